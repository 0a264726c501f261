/* scaled.h - products with weights in scaled formats (format.h): the arithmetic that every table
 * shares, so that all tables give the same bits. Included inside kernels/ and by the
 * loader of weights, which writes rows.
 *
 * A row, as `pack` takes it and td_scaled_row_at finds its parts:
 *     codes   u8 [n_in], rounded up to a multiple of 4 bytes with zeros
 *     scales  f32 [n_groups]
 *     zeros   u8 [n_groups] where the format has zeros, likewise rounded up
 *
 * Kinds INT and TABLE are weight-only: the checkpoint's authors measured them with activations of
 * full precision (GPTQ: Frantar et al. 2022; AWQ: Lin et al. 2023; NF4: Dettmers et al. 2023). A
 * value is w = s * (code - zero), or s * table[code], rounded once to f32. An output is one chain
 * of fused multiply-adds along ascending k, y = fma(x[k], w[k], y). Weights are widened a piece of
 * a panel at a time, in the cache.
 *
 * With X_BF16, where a model computes in bf16 as it does with plain weights, these kinds and E4M3
 * multiply bf16 by bf16: x is rounded, half to even, and a code stands for a number that bf16 holds
 * exactly, which is code - zero, the table's entry (rounded before), or the 8-bit float. For each
 * group acc is one chain of fused multiply-adds, and y = fma(acc, s_x * s_w, y), ascending, with
 * s_x = 1. |x| below 2^-90 counts as zero, and a row that reaches 2^100 has s_x = NaN: then no
 * product or sum is subnormal or overflows, and the dot of pairs gives the bits of multiply-adds.
 *
 * Kind E4M3 multiplies 8-bit floats by 8-bit floats (Micikevicius et al. 2022): x is rounded to
 * E4M3, half to even and saturating, of x / s with s = max |x| / 448 of its row or group, or with
 * the format's own s; or it stays as it is, with s = 1, where only weights are 8-bit. With x_powers
 * s is the least power of two that is no less than max |x| / 448 (UE8M0: Open Compute Project 2023;
 * DeepSeek-V3.1). The product of two such numbers is exact in f32. For each group of the weights
 * acc is one chain of fused multiply-adds, and y = fma(acc, s_x * s_w, y), ascending.
 *
 * Kind I8 multiplies integers (SmoothQuant: Xiao et al. 2022): codes of x are those of x / s, half
 * to even, with s = max |x| / 127 of the row; the sum over all k is exact in int32, and
 * y = f32(sum) * (s_x * s_w). With OUTLIER (LLM.int8(): Dettmers et al. 2022) values |x| >= 6.0 of
 * the row have the code 0 and do not count in s; behind the sum each adds y = fma(x[k], s_w * code,
 * y), ascending. The paper takes whole columns of a batch; taking a row's own values gives the same
 * numbers for a row alone, and keeps a row's bits from depending on its neighbours (I1).
 *
 * Then the bias, then the residual, as in ops.h. A row with an infinite or NaN activation gives NaN
 * where activations are rounded; a row or group whose largest is below 2^-100 counts as zero. */
#ifndef TD_KERNELS_SCALED_H
#define TD_KERNELS_SCALED_H

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "kernels/ops.h"

enum {
    TD_SCALED_COLS_MAX = 1 << 16, /* of kind I8: sums of 255 * 127 stay within int32 */
    TD_SCALED_X_GROUP_MIN = 32,   /* the smallest group of TD_SCALED_X_GROUP */
};
#define TD_SCALED_OUTLIER 6.0f

static inline size_t td_scaled_round4(int32_t n) { return ((size_t)n + 3) & ~(size_t)3; }

/* Bytes of a row: block_bytes of the format. */
static inline size_t td_scaled_row_bytes(const struct td_scaled *s, int32_t n_in)
{
    return td_scaled_round4(n_in) + (size_t)s->n_groups * sizeof(float) +
           (s->has_zeros ? td_scaled_round4(s->n_groups) : 0);
}

struct td_scaled_row {
    uint8_t *codes;
    float *scales;
    uint8_t *zeros;
};

/* The parts of the row at `at`, which is 4-byte aligned. */
static inline struct td_scaled_row td_scaled_row_at(const struct td_format *f, const void *at)
{
    struct td_scaled_row r = {.codes = (uint8_t *)(uintptr_t)at};
    r.scales = (float *)(void *)(r.codes + td_scaled_round4(f->block));
    r.zeros = (uint8_t *)(r.scales + f->scaled.n_groups);
    return r;
}

static inline int32_t td_scaled_group_of(const struct td_scaled *s, int32_t k)
{
    return s->group_of ? s->group_of[k] : k / s->group;
}

/* The number that an 8-bit float is: sign, 4 bits of exponent (bias 7), 3 of mantissa. */
static inline float td_e4m3_to_f32(uint8_t code)
{
    uint32_t u = (code & 0x7fu) << 20; /* times 2^-120, subnormal numbers too */
    float f;
    memcpy(&f, &u, sizeof f);
    f *= 0x1p120f;
    return code & 0x80u ? -f : f;
}

/* The nearest number that E4M3 has, half to even, at most 448 in size. */
static inline float td_round_e4m3(float v)
{
    float a = fabsf(v);
    uint32_t u;
    if (!(a < 448.0f)) return copysignf(448.0f, v);
    if (a < 0x1p-6f) return copysignf(rintf(a * 0x1p9f) * 0x1p-9f, v);
    memcpy(&u, &a, sizeof u);
    u = (u + 0x7ffffu + (u >> 20 & 1u)) & ~0xfffffu;
    memcpy(&a, &u, sizeof a);
    return copysignf(a, v);
}

/* Whether scales are applied to the sums of groups, and not to each value. */
static inline bool td_scaled_is_grouped(const struct td_scaled *s)
{
    return s->kind == TD_SCALED_E4M3 || s->x == TD_SCALED_X_BF16;
}

/* Value k of a row without its scale, where that is applied later, else with it. */
static inline float td_scaled_value(const struct td_format *f, const struct td_scaled_row *r,
                                    int32_t k)
{
    const struct td_scaled *s = &f->scaled;
    int32_t g = td_scaled_group_of(s, k);
    uint8_t c = r->codes[k];
    float scale = td_scaled_is_grouped(s) ? 1 : r->scales[g];
    switch (s->kind) {
    case TD_SCALED_INT:
        return (float)((int32_t)c - (s->has_zeros ? r->zeros[g] : f->offset)) * scale;
    case TD_SCALED_TABLE:
        return s->table[c & 15] * scale;
    case TD_SCALED_E4M3:
        return td_e4m3_to_f32(c);
    case TD_SCALED_I8:
        return (float)(int8_t)c;
    case TD_SCALED_NONE:
        break;
    }
    return 0;
}

/* The scale of activations of which the largest has the bits `max` without its sign, which are
 * ordered as numbers are, NaN above infinity; codes are at most `most`. 0: they count as zero. */
static inline float td_scaled_x_scale_of(uint32_t max, float most)
{
    float f;
    if (max >= 0x7f800000u) return NAN;
    if (max < (127u - 100u) << 23) return 0;
    memcpy(&f, &max, sizeof f);
    return f / most;
}

/* The least power of two that is no less than a normal number; 0 and NaN stay. */
static inline float td_scaled_power_above(float scale)
{
    uint32_t u;
    if (!(scale > 0)) return scale;
    memcpy(&u, &scale, sizeof u);
    u = (u + 0x7fffffu) & ~0x7fffffu;
    memcpy(&scale, &u, sizeof scale);
    return scale;
}

/* The scale of n activations. With `skip`, values of TD_SCALED_OUTLIER and above do not count. */
static inline float td_scaled_x_scale(const float *x, int32_t n, float most, bool skip)
{
    uint32_t max = 0, outlier;
    const float limit = TD_SCALED_OUTLIER;
    memcpy(&outlier, &limit, sizeof outlier);
    for (int32_t i = 0; i < n; i++) {
        uint32_t u;
        memcpy(&u, &x[i], sizeof u);
        u &= 0x7fffffffu;
        if (skip && u >= outlier && u < 0x7f800000u) continue;
        max = u > max ? u : max;
    }
    return td_scaled_x_scale_of(max, most);
}

/* How many scales a prepared row has. */
static inline int32_t td_scaled_n_x_scales(const struct td_format *f)
{
    return f->scaled.x == TD_SCALED_X_GROUP ? f->scaled.n_groups : 1;
}

/* Whether one prepared x serves both. */
static inline bool td_scaled_prepared_alike(const struct td_format *a, const struct td_format *b)
{
    if (a->scaled.x != b->scaled.x) return false;
    if (a->scaled.x == TD_SCALED_X_F32 || a->scaled.x == TD_SCALED_X_BF16) return true;
    if (a->scaled.x == TD_SCALED_X_STATIC) return a->scaled.x_scale == b->scaled.x_scale;
    return a->scaled.kind == b->scaled.kind && a->scaled.x_powers == b->scaled.x_powers &&
           (a->scaled.x != TD_SCALED_X_GROUP || a->scaled.group == b->scaled.group);
}

/* Bytes from the codes of a prepared row to the next: an odd number of cache lines, because rows a
 * power of two apart would share one set of the L1 cache. */
static inline size_t td_scaled_codes_stride(int32_t n_in)
{
    return (((size_t)n_in + 63) / 64 | 1) * 64;
}

/* Where the parts of prepared rows lie in scratch, whatever the format:
 *     values  f32, the rows as the table's tiles want them; OUTLIER: [row][n_in], 0 where none
 *     scales  [row][x scales]
 *     codes   i8 [row][td_scaled_codes_stride]; sums i32 [row]; is_outlier, a bit for each value */
struct td_scaled_scratch {
    float *values, *scales;
    int8_t *codes;
    int32_t *sums;
    uint8_t *outliers; /* [row][(n_in + 7) / 8] */
    size_t bytes;
};

enum { TD_SCALED_TILE_ROWS_MAX = 16 };

static inline struct td_scaled_scratch td_scaled_scratch_at(void *base, int32_t n_rows,
                                                            int32_t n_in)
{
    size_t rows = (size_t)n_rows, k = (size_t)n_in,
           tile_rows = n_rows == 1 ? 1 : rows + TD_SCALED_TILE_ROWS_MAX,
           scales_at = (tile_rows * k * sizeof(float) + 63) & ~(size_t)63,
           codes_at = (scales_at + rows * (k / TD_SCALED_X_GROUP_MIN + 1) * sizeof(float) + 63) &
                      ~(size_t)63,
           sums_at = (codes_at + rows * td_scaled_codes_stride(n_in) + 63) & ~(size_t)63,
           outliers_at = sums_at + rows * sizeof(int32_t),
           end = (outliers_at + rows * ((k + 7) / 8) + 63) & ~(size_t)63;
    char *at = base;
    return (struct td_scaled_scratch){
        .values = (float *)(void *)at,
        .scales = at ? (float *)(void *)(at + scales_at) : NULL,
        .codes = at ? (int8_t *)(void *)(at + codes_at) : NULL,
        .sums = at ? (int32_t *)(void *)(at + sums_at) : NULL,
        .outliers = at ? (uint8_t *)(void *)(at + outliers_at) : NULL,
        .bytes = end,
    };
}

/* gemm_scratch_bytes of every table */
size_t td_scaled_scratch_bytes(int32_t n_rows, int32_t n_in);

/* Row `row` of x as the codes of kind I8, their sum and scale, and the outliers. */
void td_scaled_prepare_i8(const struct td_gemm_args *a, int64_t row);

/* Row `row` of x as numbers that E4M3 has: [n_in] to ret_values, `stride` apart, and its scales to
 * the scratch. */
void td_scaled_prepare_e4m3(const struct td_gemm_args *a, int64_t row, float *ret_values,
                            int64_t stride);

/* Row `row` of x as numbers that bf16 has, likewise; x may be a tile's. *ret_scale: s_x. */
#define TD_SCALED_X_LEAST 0x1p-90f
#define TD_SCALED_X_MOST 0x1p100f
void td_scaled_prepare_bf16(const float *x, int32_t n, float *ret_values, float *ret_scale);

/* Makes X_F32 of a format X_BF16, and rounds its table, unless groups are in no order or cut four
 * values; returns whether it did. Table entries below 2^-16 become zero. */
bool td_scaled_use_bf16(struct td_format *f);

/* All values of a row, each with its scale: what the weights are as numbers. */
void td_scaled_read(const struct td_format *f, const void *row, float *ret_values);

/* Whether every scale and value of a row is finite, and no code of E4M3 is a NaN. */
bool td_scaled_is_finite(const struct td_format *f, const void *row);

#endif
