/* quantize.c - see quantize.h. */
#include "kernels/quantize.h"

#include <math.h>

#include "common/base/status.h"
#include "kernels/formats/fit.h"
#include "kernels/formats/write.h"
#include "kernels/kv_codes.h"

static void (*const writers[TD_N_BLOCK_FORMATS])(const float *, uint8_t *) = {
#define ROW(fn) [TD_INDEX_##fn] = td_##fn##_write,
    TD_EACH_WRITTEN_FORMAT(ROW)
#undef ROW
};

bool td_format_is_written(const struct td_format *f)
{
    return f->dtype || writers[f->index] != NULL;
}

/* The bits of the largest size; those of infinity and NaN are above all numbers. */
static uint32_t largest_bits(const float *values, int64_t n)
{
    uint32_t u, most = 0;
    for (int64_t i = 0; i < n; i++) {
        memcpy(&u, &values[i], sizeof u);
        u &= 0x7fffffffu;
        most = u > most ? u : most;
    }
    return most;
}

/* Each value's lane of a sum: a size reaches the sign's place when what is added to it is the
 * distance from the least size that is refused. No lane overflows. Two sums at a time, because one
 * would wait for itself. */
bool td_plain_is_finite(enum td_dtype from, enum td_dtype to, const void *src, int64_t n)
{
    bool is_wide = from == TD_F32;
    size_t n_bytes = (size_t)n * td_dtype_bytes(from), i = 0;
    /* what f32 has between the largest of bf16 and 2^128 is rounded to infinity */
    uint64_t least = is_wide ? (to == TD_BF16 ? 0x7f7f8000u : 0x7f800000u)
                             : (from == TD_BF16 ? 0x7f80u : 0x7c00u),
             ones = is_wide ? 0x0000000100000001u : 0x0001000100010001u,
             top = ones << (is_wide ? 31 : 15), sizes = top - ones, up = top - ones * least, u[2],
             low = 0, high = 0;
    for (; i + sizeof u <= n_bytes; i += sizeof u) {
        memcpy(u, (const uint8_t *)src + i, sizeof u);
        low |= (u[0] & sizes) + up;
        high |= (u[1] & sizes) + up;
    }
    memset(u, 0, sizeof u);
    memcpy(u, (const uint8_t *)src + i, n_bytes - i);
    low |= (u[0] & sizes) + up;
    high |= (u[1] & sizes) + up;
    return !((low | high) & top);
}

static bool write_plain(enum td_dtype dtype, const float *values, int64_t n, uint8_t *ret_bytes)
{
    bool finite = true;
    if (dtype == TD_F32) memcpy(ret_bytes, values, (size_t)n * sizeof *values);
    for (int64_t i = 0; i < n && dtype != TD_F32; i++) {
        uint16_t h = dtype == TD_BF16 ? td_f32_to_bf16(values[i]) : td_f32_to_f16(values[i]);
        uint16_t exponent = dtype == TD_BF16 ? 0x7f80u : 0x7c00u;
        finite &= (h & exponent) != exponent;
        memcpy(ret_bytes + 2 * i, &h, sizeof h);
    }
    return finite;
}

bool td_format_write(const struct td_format *f, const float *values, int64_t n_values,
                     void *ret_bytes)
{
    uint8_t *to = ret_bytes;
    TD_ASSERT(td_format_is_written(f) && n_values % f->block == 0);
    /* no scale of f16 reaches 2^40, whose squares the search for scales can still add */
    const uint32_t infinity = 0x7f800000u, too_large = (127u + 40u) << 23;
    if (largest_bits(values, n_values) >= (f->dtype ? infinity : too_large)) return false;
    if (f->dtype) return write_plain(f->dtype, values, n_values, to);
    for (int64_t i = 0; i < n_values; i += f->block, to += f->block_bytes) {
        struct td_group group = {0}; /* the factors of all groups are those of the block */
        writers[f->index](values + i, to);
        f->split(to, 0, &group);
        if (!td_group_is_finite(f, &group)) return false;
    }
    return true;
}

float td_values_max(const float *values, int64_t n)
{
    uint32_t bits = largest_bits(values, n);
    float max;
    memcpy(&max, &bits, sizeof max);
    return max;
}

float td_codes_scale(bool is_fp8, float max, const struct td_format *stored)
{
    uint8_t bytes[sizeof(float)];
    float scale = max / (is_fp8 ? TD_FP8_MAX : TD_INT8_MAX);
    TD_ASSERT(stored->dtype);
    td_format_write(stored, &scale, 1, bytes);
    td_format_read(stored, bytes, 1, &scale);
    return scale > 0 ? scale : 1;
}

void td_codes_write(bool is_fp8, const float *values, int64_t n, float scale, uint8_t *ret_codes)
{
    for (int64_t i = 0; i < n; i++) {
        float v = values[i] / scale;
        ret_codes[i] = is_fp8 ? td_f32_to_fp8(v)
                              : (uint8_t)(int8_t)td_clamp(td_round(v), -TD_INT8_MAX, TD_INT8_MAX);
    }
}

bool td_int4_write(const float *values, int32_t n, int32_t group, const struct td_format *stored,
                   float *ret_scales, uint8_t *ret_bytes)
{
    uint8_t bytes[sizeof(float)];
    memset(ret_bytes, 0, ((size_t)n + 7) / 8 * 4);
    for (int32_t k0 = 0, g = 0; k0 < n; k0 += group, g++) {
        int32_t n_k = n - k0 < group ? n - k0 : group;
        float scale = td_fit_positive_scale(values + k0, n_k, -8, 7);
        if (!td_format_write(stored, &scale, 1, bytes)) return false;
        td_format_read(stored, bytes, 1, &scale);
        if (!(scale > 0)) scale = 1; /* of zeros, or of what is too small for the type */
        ret_scales[g] = scale;
        for (int32_t k = k0; k < k0 + n_k; k++) {
            uint8_t code = (uint8_t)(8 + (int)td_clamp(td_round(values[k] / scale), -8, 7));
            ret_bytes[k / 2] |= (uint8_t)(code << 4 * (k % 2));
        }
    }
    return true;
}
