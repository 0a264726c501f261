/* scaled.c - what all tables share of the scaled formats: scratch, rounding of activations, and
 * reading rows. */
#include "kernels/scaled.h"

size_t td_scaled_scratch_bytes(int32_t n_rows, int32_t n_in)
{
    return n_rows > 0 ? td_scaled_scratch_at(NULL, n_rows, n_in).bytes : 0;
}

void td_scaled_prepare_i8(const struct td_gemm_args *a, int64_t row)
{
    int32_t n = a->w->n_in, sum = 0;
    bool outliers = a->w->format->scaled.x == TD_SCALED_X_OUTLIER;
    const float *x = a->x + row * a->x_stride;
    const struct td_scaled_scratch s = td_scaled_scratch_at(a->scratch, a->n_rows, n);
    int8_t *codes = s.codes + (size_t)row * td_scaled_codes_stride(n);
    float scale = td_scaled_x_scale(x, n, 127.0f, outliers);
    bool is_zero = !(scale > 0); /* or NaN, which makes the outputs NaN */
    memset(codes, 0, td_scaled_codes_stride(n));
    for (int32_t k = 0; k < n && !is_zero; k++) {
        if (outliers && fabsf(x[k]) >= TD_SCALED_OUTLIER) continue;
        codes[k] = (int8_t)rintf(x[k] / scale);
        sum += codes[k];
    }
    s.scales[row] = scale;
    s.sums[row] = sum;
    if (!outliers) return;
    size_t n_bytes = ((size_t)n + 7) / 8;
    uint8_t *bits = s.outliers + (size_t)row * n_bytes;
    memset(bits, 0, n_bytes);
    for (int32_t k = 0; k < n; k++) {
        bool is = fabsf(x[k]) >= TD_SCALED_OUTLIER;
        s.values[row * n + k] = is ? x[k] : 0;
        if (is) bits[k / 8] |= (uint8_t)(1u << k % 8);
    }
}

void td_scaled_prepare_e4m3(const struct td_gemm_args *a, int64_t row, float *ret_values,
                            int64_t stride)
{
    const struct td_scaled *f = &a->w->format->scaled;
    int32_t n = a->w->n_in, n_scales = td_scaled_n_x_scales(a->w->format),
            step = f->x == TD_SCALED_X_GROUP ? f->group : n;
    const float *x = a->x + row * a->x_stride;
    float *scales = td_scaled_scratch_at(a->scratch, a->n_rows, n).scales + row * n_scales;
    for (int32_t k0 = 0, g = 0; k0 < n; k0 += step, g++) {
        int32_t n_k = n - k0 < step ? n - k0 : step;
        float scale = td_scaled_x_scale(x + k0, n_k, 448.0f, false);
        if (f->x == TD_SCALED_X_STATIC && !isnan(scale)) scale = f->x_scale;
        if (f->x_powers) scale = td_scaled_power_above(scale);
        bool is_zero = !(scale > 0);
        for (int32_t k = k0; k < k0 + n_k; k++)
            ret_values[k * stride] = is_zero ? 0 : td_round_e4m3(x[k] / scale);
        scales[g] = scale;
    }
}

void td_scaled_prepare_bf16(const float *x, int32_t n, float *ret_values, float *ret_scale)
{
    bool is_large = false;
    for (int32_t k = 0; k < n; k++) is_large |= !(fabsf(x[k]) < TD_SCALED_X_MOST);
    for (int32_t k = 0; k < n; k++)
        ret_values[k] =
            is_large || fabsf(x[k]) < TD_SCALED_X_LEAST ? 0 : td_bf16_to_f32(td_f32_to_bf16(x[k]));
    *ret_scale = is_large ? NAN : 1;
}

bool td_scaled_use_bf16(struct td_format *f)
{
    struct td_scaled *s = &f->scaled;
    if (s->kind == TD_SCALED_NONE || s->kind == TD_SCALED_I8 || s->x != TD_SCALED_X_F32 ||
        s->group_of || (s->n_groups > 1 && s->group % 4 != 0))
        return false;
    s->x = TD_SCALED_X_BF16;
    for (int i = 0; i < 16; i++)
        s->table[i] =
            fabsf(s->table[i]) < 0x1p-16f ? 0 : td_bf16_to_f32(td_f32_to_bf16(s->table[i]));
    return true;
}

/* Value k of a row with its scale. */
static float whole_value(const struct td_format *f, const struct td_scaled_row *r, int32_t k)
{
    float v = td_scaled_value(f, r, k);
    bool has_scale = f->scaled.kind != TD_SCALED_I8 && !td_scaled_is_grouped(&f->scaled);
    return has_scale ? v : v * r->scales[td_scaled_group_of(&f->scaled, k)];
}

void td_scaled_read(const struct td_format *f, const void *row, float *ret_values)
{
    const struct td_scaled_row r = td_scaled_row_at(f, row);
    for (int32_t k = 0; k < f->block; k++) ret_values[k] = whole_value(f, &r, k);
}

/* A number that no code of the format exceeds in size. */
static float most_of(const struct td_scaled *s)
{
    float most = 0;
    if (s->kind != TD_SCALED_TABLE) return 448.0f; /* E4M3's; integers are below 256 */
    for (int i = 0; i < 16; i++) most = fmaxf(most, fabsf(s->table[i]));
    return most;
}

bool td_scaled_is_finite(const struct td_format *f, const void *row)
{
    const struct td_scaled_row r = td_scaled_row_at(f, row);
    float most = most_of(&f->scaled);
    bool ok = true, fits = true;
    for (int32_t g = 0; g < f->scaled.n_groups; g++) {
        ok &= isfinite(r.scales[g]) != 0;
        fits &= isfinite(r.scales[g] * most) != 0;
    }
    for (int32_t k = 0; k < f->block && ok && !fits; k++) ok = isfinite(whole_value(f, &r, k)) != 0;
    if (f->scaled.kind != TD_SCALED_E4M3) return ok;
    uint32_t nan = 0; /* four codes at a time: 0x7f + 1 without its sign reaches the sign's place */
    for (size_t k = 0; k < td_scaled_round4(f->block); k += 4) {
        uint32_t c;
        memcpy(&c, r.codes + k, sizeof c);
        nan |= ((c & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
    }
    return ok && nan == 0;
}
