/* scaled_ref.c - the obvious product with weights in a scaled format: rows as they come, and the
 * chains that scaled.h writes down. Other tables must give the same bits. */
#include "kernels/scaled.h"

#include "kernels/part.h"
#include "kernels/ref/ref.h"

size_t td_ref_scaled_packed_bytes(int32_t n_out, int32_t n_in, const struct td_format *format)
{
    return ((size_t)n_out * td_format_bytes(format, n_in) + 63) & ~(size_t)63;
}

bool td_ref_scaled_pack(void *packed, int32_t n_out, int32_t n_in, const struct td_format *format,
                        const void *src, int32_t row0, int32_t n_rows)
{
    (void)n_out;
    bool is_finite = true;
    size_t row_bytes = td_format_bytes(format, n_in);
    memcpy((uint8_t *)packed + (size_t)row0 * row_bytes, src, (size_t)n_rows * row_bytes);
    for (int32_t i = 0; i < n_rows; i++)
        is_finite &= td_scaled_is_finite(format, (const uint8_t *)src + (size_t)i * row_bytes);
    return is_finite;
}

static const void *row_of(const struct td_weight *w, int64_t row)
{
    return (const uint8_t *)w->data + (size_t)row * td_format_bytes(w->format, w->n_in);
}

void td_ref_scaled_read_row(const struct td_weight *w, int32_t row, float *ret_values)
{
    td_scaled_read(w->format, row_of(w, row), ret_values);
}

void td_ref_scaled_prepare(const struct td_gemm_args *a, int part, int n_parts)
{
    int64_t lo, hi, n = a->w->n_in;
    enum td_scaled_kind kind = a->w->format->scaled.kind;
    const struct td_scaled_scratch s = td_scaled_scratch_at(a->scratch, a->n_rows, a->w->n_in);
    td_part_range(a->n_rows, 1, part, n_parts, &lo, &hi);
    for (int64_t m = lo; m < hi; m++) {
        if (kind == TD_SCALED_I8)
            td_scaled_prepare_i8(a, m);
        else if (a->w->format->scaled.x == TD_SCALED_X_BF16)
            td_scaled_prepare_bf16(a->x + m * a->x_stride, (int32_t)n, s.values + m * n,
                                   &s.scales[m]);
        else if (a->w->format->scaled.x != TD_SCALED_X_F32)
            td_scaled_prepare_e4m3(a, m, s.values + m * n, 1);
        else
            memcpy(s.values + m * n, a->x + m * a->x_stride, (size_t)n * sizeof(float));
        if (a->w->format->scaled.x == TD_SCALED_X_F32) s.scales[m] = 1;
    }
}

static float dot_groups(const struct td_weight *w, const struct td_scaled_row *r, const float *x,
                        const float *s_x)
{
    const struct td_scaled *f = &w->format->scaled;
    float y = 0;
    for (int32_t k0 = 0, g = 0; k0 < w->n_in; k0 += f->group, g++) {
        float acc = 0;
        for (int32_t k = k0; k < w->n_in && k - k0 < f->group; k++)
            acc = fmaf(x[k], td_scaled_value(w->format, r, k), acc);
        y = fmaf(acc, s_x[f->x == TD_SCALED_X_GROUP ? g : 0] * r->scales[g], y);
    }
    return y;
}

static float dot_i8(const struct td_weight *w, const struct td_scaled_row *r,
                    const struct td_scaled_scratch *s, int64_t row)
{
    const int8_t *x = s->codes + (size_t)row * td_scaled_codes_stride(w->n_in);
    int32_t sum = 0;
    for (int32_t k = 0; k < w->n_in; k++) sum += x[k] * (int8_t)r->codes[k];
    float y = (float)sum * (s->scales[row] * r->scales[0]);
    for (int32_t k = 0; k < w->n_in && w->format->scaled.x == TD_SCALED_X_OUTLIER; k++)
        if (s->outliers[row * ((w->n_in + 7) / 8) + k / 8] >> k % 8 & 1)
            y = fmaf(s->values[row * w->n_in + k], (float)(int8_t)r->codes[k] * r->scales[0], y);
    return y;
}

static float dot(const struct td_gemm_args *a, const struct td_scaled_scratch *s, int64_t m,
                 int64_t n)
{
    const struct td_weight *w = a->w;
    const struct td_scaled_row r = td_scaled_row_at(w->format, row_of(w, n));
    const float *x = s->values + m * w->n_in;
    float y = 0;
    if (w->format->scaled.kind == TD_SCALED_I8) return dot_i8(w, &r, s, m);
    if (td_scaled_is_grouped(&w->format->scaled))
        return dot_groups(w, &r, x, s->scales + m * td_scaled_n_x_scales(w->format));
    for (int32_t k = 0; k < w->n_in; k++) y = fmaf(x[k], td_scaled_value(w->format, &r, k), y);
    return y;
}

void td_ref_scaled_gemm(const struct td_gemm_args *a, int part, int n_parts)
{
    const struct td_scaled_scratch s = td_scaled_scratch_at(a->scratch, a->n_rows, a->w->n_in);
    int64_t lo, hi;
    td_part_range(a->w->n_out, 1, part, n_parts, &lo, &hi);
    for (int64_t m = 0; m < a->n_rows; m++)
        for (int64_t n = lo; n < hi; n++) {
            float v = dot(a, &s, m, n);
            if (a->bias) v = v + a->bias[n];
            float *y = &a->y[m * a->y_stride + n];
            *y = a->accumulate ? *y + v : v;
        }
}
