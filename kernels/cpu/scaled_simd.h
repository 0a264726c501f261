/* scaled_simd.h - the product with weights in scaled formats, written in the operations that
 * scaled_avx512.c and scaled_avx2.c define before they include it. scaled.h says what is computed.
 *
 * Weights lie in panels of PW outputs: the scales of all groups and then the zeros, each for all
 * outputs side by side, then lines of codes. 4 bits: a line is 2 consecutive k of every output, the
 * first in the low halves. 8 bits: a line is one k. Kind I8: a line is 4 consecutive k of every
 * output, so that one broadcast of 4 activations meets them all; with SCALED_I8_PAIRS it is 8,
 * which meet those of two rows at a time.
 *
 * All kinds but I8 widen some lines of a panel in the cache and use them for every tile of
 * rows (tile_simd.h): a chain continues where the piece before left it, so the bits do not depend
 * on how many lines or rows there are. Zeros, scales and act order are applied while widening; act
 * order then only selects which scale a line uses, and x stays as it is. Where sums of groups get
 * the scales, a tile scales them in registers. */
#ifndef TD_KERNELS_SCALED_SIMD_H
#define TD_KERNELS_SCALED_SIMD_H

#include <stdalign.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/finish_simd.h"
#include "kernels/cpu/tile_simd.h"
#include "kernels/part.h"
#include "kernels/scaled.h"

enum {
    KB = 128,             /* lines widened at a time: 16 KiB with AVX-512 */
    GROUPS_KB = 256,      /* the same of whole groups: their sums are scaled while they are in L1 */
    ROW_TILES = 24,       /* tiles that one widening serves */
    AHEAD_BYTES = 4096,   /* how far ahead lines are prefetched into L1 */
    I8_BYTES = 256 << 10, /* prepared rows of one pass over the panels: a quarter of L2 */
    I8_PASS_ROWS = 256,   /* of one pass at most: sums of 32 KiB with AVX-512 */
    I8_KB = 512,          /* k that meet all rows of a pass: lines of 16 KiB with AVX-512 */
    I8_FINISH_ROWS = 16,  /* at most, at a time: those of a tile of AMX */
};

/* Consecutive k of an output in a line of kind I8. */
#ifdef SCALED_I8_PAIRS
enum { I8_K = 8 };
#else
enum { I8_K = 4 };
#endif

TD_TILES(tile_f32, LINE_F32, false, PW, ld, 1);

/* Whether codes and activations meet as pairs of bf16, which hold both exactly: those of E4M3, or
 * of X_BF16. The dot of pairs then makes the chain of multiply-adds, with the same bits, because
 * neither a product nor a sum of such numbers is subnormal. x lies as tile_pack_pairs leaves it.
 *
 * A line is two k of every output. 64 bytes hold one line of 8 bits, or two of 4: lane i of 32 bits
 * has outputs i and VW + i, the first k in its high half. A half has output i in its low byte, or
 * from the low end on a nibble for each of output i and VW + i of the first line and of the second.
 * So one load and few shifts serve all. No such 64 bytes are of two groups. */
#ifdef SCALED_PAIRS
static bool in_pairs(const struct td_format *f)
{
    return td_scaled_is_grouped(&f->scaled) && f->scaled.x != TD_SCALED_X_F32 &&
           (f->scaled.n_groups == 1 || f->scaled.group % 4 == 0);
}
#else
static bool in_pairs(const struct td_format *f)
{
    (void)f;
    return false;
}
#endif

/* ---- packing --------------------------------------------------------------------------------- */

/* n_in of kind I8, filled up to whole lines */
TD_INLINE size_t i8_round(int32_t n_in) { return ((size_t)n_in + I8_K - 1) / I8_K * I8_K; }

/* Where the parts of a panel lie. */
struct panel {
    size_t zeros_at, lines_at, bytes;
};

static struct panel panel_of(const struct td_format *f, int32_t n_in)
{
    const struct td_scaled *s = &f->scaled;
    size_t groups = (size_t)s->n_groups * PW, k = (size_t)n_in;
    struct panel p = {.zeros_at = groups * td_dtype_bytes(s->scale_type)};
    p.lines_at = (p.zeros_at + (s->has_zeros ? groups : 0) + 63) & ~(size_t)63;
    size_t lines = s->kind == TD_SCALED_I8 ? i8_round(n_in)
                   : in_pairs(f)           ? td_scaled_round4(n_in)
                                           : k;
    if (f->bits == 4) lines = (lines + 1) / 2;
    p.bytes = (p.lines_at + lines * PW + 63) & ~(size_t)63;
    return p;
}

size_t TD_SIMD(scaled_packed_bytes)(int32_t n_out, int32_t n_in, const struct td_format *format)
{
    return (size_t)((n_out + PW - 1) / PW) * panel_of(format, n_in).bytes;
}

/* Where the byte of code k of output c lies among the lines. Of two codes of 4 bits in one byte the
 * second, in the high half, is that of an odd k, or in pairs of an output of the second vector. */
TD_INLINE size_t code_at(const struct td_format *f, int32_t k, int32_t c)
{
    if (in_pairs(f)) {
        size_t half = (size_t)(2 * (c % VW) + (k % 2 == 0));
        if (f->bits == 4) return (size_t)(k / 4 * 2 * PW) + 2 * half + (size_t)(k / 2 % 2);
        return (size_t)(k / 2 * 2 * PW) + 2 * half + (size_t)(c / VW);
    }
    if (f->scaled.kind == TD_SCALED_I8)
        return (size_t)(k / I8_K * PW + c) * I8_K + (size_t)(k % I8_K);
    return (size_t)(f->bits == 4 ? k / 2 : k) * PW + (size_t)c;
}

static void pack_scale(enum td_dtype type, uint8_t *to, size_t i, float scale)
{
    uint16_t h = type == TD_BF16 ? td_f32_to_bf16(scale) : f16_bits(scale);
    if (type == TD_F32)
        memcpy(to + 4 * i, &scale, 4);
    else
        memcpy(to + 2 * i, &h, 2);
}

/* Scales and zeros of output c of a panel, from a row. */
static void pack_groups(const struct td_format *f, const struct td_scaled_row *row, int32_t c,
                        const struct panel *p, uint8_t *panel)
{
    const struct td_scaled *s = &f->scaled;
    for (int32_t g = 0; g < s->n_groups; g++) {
        size_t i = (size_t)g * PW + (size_t)c;
        pack_scale(s->scale_type, panel, i, row->scales[g]);
        if (s->has_zeros) panel[p->zeros_at + i] = row->zeros[g];
    }
}

/* Codes [k0, k1) of output c to where code_at says; k0 is a multiple of 4. */
static void pack_codes(const struct td_format *f, const struct td_scaled_row *row, int32_t c,
                       int32_t k0, int32_t k1, uint8_t *lines)
{
    const uint8_t *codes = row->codes;
    if (f->scaled.kind == TD_SCALED_I8) {
        for (int32_t k = k0; k < k1; k += 4) { /* behind the last code are zeros */
            uint32_t four;
            memcpy(&four, codes + k, sizeof four);
            four ^= k1 - k >= 4 ? I8_FLIP * 0x01010101u
                                : (I8_FLIP * 0x01010101u) & ((1u << 8 * (k1 - k)) - 1);
            memcpy(lines + code_at(f, k, c), &four, sizeof four);
        }
    } else if (f->bits == 4) {
        for (int32_t k = k0; k < k1; k += 2)
            lines[(size_t)(k / 2) * PW + (size_t)c] =
                (uint8_t)((codes[k] & 15) | (k + 1 < k1 ? codes[k + 1] << 4 : 0));
    } else {
        for (int32_t k = k0; k < k1; k++) lines[(size_t)k * PW + (size_t)c] = codes[k];
    }
}

/* Four codes from k on of one output, the first in the low byte; NULL: zeros. */
TD_INLINE uint32_t four_codes(const struct td_scaled_row *row, int32_t k)
{
    uint32_t four = 0;
    if (row) memcpy(&four, row->codes + k, sizeof four); /* behind the last code are zeros */
    return four;
}

/* Codes [k0, k1) in pairs of outputs c and VW + c, the second of which may be NULL. */
static void pack_pairs(const struct td_format *f, const struct td_scaled_row *row,
                       const struct td_scaled_row *row2, int32_t c, int32_t k0, int32_t k1,
                       uint8_t *lines)
{
    for (int32_t k = k0; k < k1; k += 4) {
        uint32_t a = four_codes(row, k), b = four_codes(row2, k), lane[2];
        if (f->bits == 4) {
            a = (a & 0x0f0f0f0fu) | (b & 0x0f0f0f0fu) << 4;
            lane[0] =
                (a >> 8 & 0xffu) | (a >> 16 & 0xff00u) | (a & 0xffu) << 16 | (a << 8 & 0xff000000u);
            memcpy(lines + (size_t)(k / 4 * 2 * PW + 4 * c), lane, 4);
            continue;
        }
        for (int i = 0; i < 2; i++, a >>= 16, b >>= 16)
            lane[i] = (a >> 8 & 0xffu) | (b & 0xff00u) | (a & 0xffu) << 16 | (b & 0xffu) << 24;
        memcpy(lines + (size_t)(k / 2 * 2 * PW + 4 * c), &lane[0], 4);
        memcpy(lines + (size_t)((k / 2 + 1) * 2 * PW + 4 * c), &lane[1], 4);
    }
}

/* A piece of a panel at a time stays in L1 while all its outputs are written. */
bool TD_SIMD(scaled_pack)(void *packed, int32_t n_out, int32_t n_in, const struct td_format *f,
                          const void *src, int32_t row0, int32_t n_rows)
{
    enum { K_STEP = 256 };
    const struct panel p = panel_of(f, n_in);
    size_t row_bytes = td_format_bytes(f, n_in);
    bool is_finite = true;
    TD_ASSERT(row0 % 64 == 0 && (n_rows % 64 == 0 || row0 + n_rows == n_out));
    for (int32_t i = 0, n; i < n_rows; i += n) {
        const uint8_t *from = (const uint8_t *)src + (size_t)i * row_bytes;
        uint8_t *panel = (uint8_t *)packed + (size_t)((row0 + i) / PW) * p.bytes;
        struct td_scaled_row rows[PW];
        n = n_rows - i < PW ? n_rows - i : PW;
        memset(panel, 0, p.bytes);
        for (int32_t c = 0; c < n; c++) {
            rows[c] = td_scaled_row_at(f, from + (size_t)c * row_bytes);
            is_finite &= td_scaled_is_finite(f, from + (size_t)c * row_bytes);
            pack_groups(f, &rows[c], c, &p, panel);
        }
        for (int32_t k0 = 0; k0 < n_in; k0 += K_STEP) {
            int32_t k1 = n_in - k0 < K_STEP ? n_in : k0 + K_STEP;
            for (int32_t c = 0; c < n; c++)
                if (!in_pairs(f))
                    pack_codes(f, &rows[c], c, k0, k1, panel + p.lines_at);
                else if (c < VW)
                    pack_pairs(f, &rows[c], c + VW < n ? &rows[c + VW] : NULL, c, k0, k1,
                               panel + p.lines_at);
        }
    }
    return is_finite;
}

static float scale_read(enum td_dtype type, const uint8_t *panel, size_t i)
{
    return td_widen(panel, type, (int64_t)i);
}

void TD_SIMD(scaled_read_row)(const struct td_weight *w, int32_t row, float *ret_values)
{
    const struct td_format *f = w->format;
    const struct td_scaled *s = &f->scaled;
    const struct panel p = panel_of(f, w->n_in);
    const uint8_t *panel = (const uint8_t *)w->data + (size_t)(row / PW) * p.bytes;
    for (int32_t k = 0; k < w->n_in; k++) {
        size_t i = (size_t)td_scaled_group_of(s, k) * PW + (size_t)(row % PW);
        uint8_t code = panel[p.lines_at + code_at(f, k, row % PW)],
                zero = s->has_zeros ? panel[p.zeros_at + i] : (uint8_t)f->offset;
        float scale = scale_read(s->scale_type, panel, i);
        if (s->kind == TD_SCALED_I8)
            ret_values[k] = (float)(int8_t)(code ^ I8_FLIP) * scale;
        else if (s->kind == TD_SCALED_E4M3)
            ret_values[k] = td_e4m3_to_f32(code) * scale;
        else if (f->bits == 4)
            code = (in_pairs(f) ? row % PW >= VW : k % 2) ? code >> 4 : code & 15;
        if (s->kind == TD_SCALED_INT) ret_values[k] = (float)(code - zero) * scale;
        if (s->kind == TD_SCALED_TABLE) ret_values[k] = s->table[code] * scale;
    }
}

/* ---- preparing ------------------------------------------------------------------------------- */

/* Rows are cut into tiles of at most TILE_ROWS, as equal as possible: 16 are 8 + 8. */
static int32_t tile_count(int32_t n_rows) { return (n_rows + TILE_ROWS - 1) / TILE_ROWS; }
static int32_t tile_rows(int32_t n_rows)
{
    return (n_rows + tile_count(n_rows) - 1) / tile_count(n_rows);
}
/* How many of n_rows rows tile i has. */
static int32_t rows_in_tile(int32_t n_rows, int64_t i)
{
    int64_t left = n_rows - i * tile_rows(n_rows);
    return (int32_t)(left < 0 ? 0 : left < tile_rows(n_rows) ? left : tile_rows(n_rows));
}
/* Floats of prepared x for each k of a tile. */
static int32_t tile_ld(int32_t n_rows)
{
    int32_t n = tile_rows(n_rows);
    return n == 1 ? 1 : n >= TILE_ROWS ? TILE_ROWS : (n + 3) / 4 * 4;
}

static float *tile_at(const struct td_gemm_args *a, int64_t tile)
{
    return (float *)a->scratch + tile * tile_ld(a->n_rows) * (int64_t)a->w->n_in;
}

/* A part's share of the rows' tiles, or of all tiles' columns where there are fewer tiles. */
static void part_of_x(const struct td_gemm_args *a, int part, int n_parts, int64_t *t0, int64_t *t1,
                      int64_t *k0, int64_t *k1)
{
    int32_t n_tiles = tile_count(a->n_rows);
    *t0 = 0, *t1 = n_tiles, *k0 = 0, *k1 = a->w->n_in;
    if (n_tiles >= n_parts)
        td_part_range(n_tiles, 1, part, n_parts, t0, t1);
    else
        td_part_range(a->w->n_in, 64, part, n_parts, k0, k1);
}

static void prepare_f32(const struct td_gemm_args *a, int part, int n_parts)
{
    int64_t t0, t1, k0, k1;
    const struct td_scaled_scratch s = td_scaled_scratch_at(a->scratch, a->n_rows, a->w->n_in);
    for (int32_t r = 0; r < a->n_rows && part == 0; r++) s.scales[r] = 1;
    part_of_x(a, part, n_parts, &t0, &t1, &k0, &k1);
    for (int64_t i = t0; i < t1; i++) {
        const float *rows[TILE_ROWS];
        int32_t first = (int32_t)i * tile_rows(a->n_rows), n = rows_in_tile(a->n_rows, i);
        for (int32_t r = 0; r < n; r++) rows[r] = a->x + (first + r) * a->x_stride;
        tile_pack_rows(tile_at(a, i), tile_ld(a->n_rows), rows, n, (int)k0, (int)k1, false, NULL);
    }
}

/* td_scaled_x_scale without skipping */
static float scale_of(const float *x, int32_t n, float most)
{
    int32_t lane[VW], k = 0;
    uint32_t max = 0;
    ivec m = i_set1(0);
    for (; k + VW <= n; k += VW) m = i_max(m, i_and(i_bits(v_load(x + k)), i_set1(0x7fffffff)));
    i_store(lane, m);
    for (int i = 0; i < VW; i++) max = (uint32_t)lane[i] > max ? (uint32_t)lane[i] : max;
    for (; k < n; k++) {
        uint32_t u;
        memcpy(&u, &x[k], sizeof u);
        u &= 0x7fffffffu;
        max = u > max ? u : max;
    }
    return td_scaled_x_scale_of(max, most);
}

/* td_scaled_prepare_i8, a vector at a time */
static void prepare_i8(const struct td_gemm_args *a, int64_t row)
{
    int32_t n = a->w->n_in, k = 0, sum = 0, lane[VW];
    const float *x = a->x + row * a->x_stride;
    const struct td_scaled_scratch s = td_scaled_scratch_at(a->scratch, a->n_rows, n);
    int8_t *codes = s.codes + (size_t)row * td_scaled_codes_stride(n);
    float scale = scale_of(x, n, 127.0f);
    if (a->w->format->scaled.x == TD_SCALED_X_OUTLIER || !(scale > 0)) {
        td_scaled_prepare_i8(a, row);
        return;
    }
    ivec sums = i_set1(0);
    for (; k + VW <= n; k += VW) {
        ivec c = i_from_f32(v_div(v_load(x + k), v_set1(scale)));
        i_store_i8(codes + k, c);
        sums = i_add(sums, c);
    }
    for (; k < n; k++) sum += codes[k] = (int8_t)rintf(x[k] / scale);
    memset(codes + n, 0, i8_round(n) - (size_t)n);
    i_store(lane, sums);
    for (int i = 0; i < VW; i++) sum += lane[i];
    s.scales[row] = scale;
    s.sums[row] = sum;
}

/* td_scaled_prepare_bf16's s_x of a row. */
static float bf16_scale_of(const float *x, int32_t n)
{
    float size = scale_of(x, n, 1.0f); /* NaN: one is infinite or none; 0: all are tiny */
    return size < TD_SCALED_X_MOST ? 1 : NAN;
}

/* td_scaled_prepare_bf16, a tile at a time. A row of which nothing may count wants at least NaN. */
static void prepare_bf16(const struct td_gemm_args *a, int part, int n_parts)
{
    int64_t t0, t1, k0, k1;
    int32_t ld = tile_ld(a->n_rows);
    const struct td_scaled_scratch s = td_scaled_scratch_at(a->scratch, a->n_rows, a->w->n_in);
    part_of_x(a, part, n_parts, &t0, &t1, &k0, &k1);
    for (int64_t i = t0; i < t1; i++) {
        const float *rows[TILE_ROWS];
        float least[TILE_ROWS];
        int32_t first = (int32_t)i * tile_rows(a->n_rows), n = rows_in_tile(a->n_rows, i);
        for (int32_t r = 0; r < n; r++) {
            rows[r] = a->x + (first + r) * a->x_stride;
            float scale = bf16_scale_of(rows[r], a->w->n_in);
            least[r] = scale * TD_SCALED_X_LEAST;
            if (k0 == 0 && k1 > 0) s.scales[first + r] = scale; /* one part of them */
        }
#ifdef SCALED_PAIRS
        tile_pack_pairs(tile_at(a, i), ld, rows, n, (int)k0, (int)k1, least);
#else
        tile_pack_rows(tile_at(a, i), ld, rows, n, (int)k0, (int)k1, true, least);
#endif
    }
}

/* td_round_e4m3 */
TD_INLINE vec v_round_e4m3(vec v)
{
    ivec sign = i_and(i_bits(v), i_set1((int32_t)0x80000000u));
    vec a = v_min(v_bits(i_and(i_bits(v), i_set1(0x7fffffff))), v_set1(448.0f)),
        least = v_set1(0x1p-6f);
    ivec u = i_bits(a), odd = i_and(i_srli(u, 20), i_set1(1));
    vec normal = v_bits(i_and(i_add(i_add(u, odd), i_set1(0x7ffff)), i_set1(~0xfffff))),
        tiny = v_mul(v_round(v_mul(a, v_set1(0x1p9f))), v_set1(0x1p-9f));
    vec size = v_add(v_keep_ge(normal, a, least), v_sub(tiny, v_keep_ge(tiny, a, least)));
    return v_bits(i_add(i_bits(size), sign));
}

/* n values, ld apart, to pairs of bf16 in place, the earlier one high: exact for numbers of E4M3. A
 * pair of one number has -0 beside it, which adds nothing. */
static void to_pairs(float *x, int64_t ld, int32_t n)
{
    const float none = -0.0f;
    for (int32_t k = 0; k < n; k += 2) {
        uint32_t high, low;
        memcpy(&high, &x[k * ld], sizeof high);
        memcpy(&low, k + 1 < n ? &x[(k + 1) * ld] : &none, sizeof low);
        high = (high & 0xffff0000u) | low >> 16;
        memcpy(&x[k / 2 * ld], &high, sizeof high);
    }
}

/* td_scaled_prepare_e4m3, a vector at a time */
static void prepare_e4m3(const struct td_gemm_args *a, int64_t row)
{
    const struct td_scaled *f = &a->w->format->scaled;
    int32_t n = a->w->n_in, n_scales = td_scaled_n_x_scales(a->w->format), ld = tile_ld(a->n_rows),
            step = f->x == TD_SCALED_X_GROUP ? f->group : n;
    const float *x = a->x + row * a->x_stride;
    float *scales = td_scaled_scratch_at(a->scratch, a->n_rows, n).scales + row * n_scales,
          *to = tile_at(a, row / tile_rows(a->n_rows)) + row % tile_rows(a->n_rows);
    for (int32_t k0 = 0, g = 0; k0 < n; k0 += step, g++) {
        int32_t k = k0, end = n - k0 < step ? n : k0 + step;
        float scale = scale_of(x + k0, end - k0, 448.0f), lane[VW];
        if (f->x == TD_SCALED_X_STATIC && !isnan(scale)) scale = f->x_scale;
        if (f->x_powers) scale = td_scaled_power_above(scale);
        bool is_zero = !(scale > 0);
        for (; k + VW <= end && !is_zero; k += VW) {
            v_store(lane, v_round_e4m3(v_div(v_load(x + k), v_set1(scale))));
            for (int i = 0; i < VW; i++) to[(k + i) * ld] = lane[i];
        }
        for (; k < end; k++) to[k * ld] = is_zero ? 0 : td_round_e4m3(x[k] / scale);
        scales[g] = scale;
    }
    if (in_pairs(a->w->format)) to_pairs(to, ld, n);
}

void TD_SIMD(scaled_prepare)(const struct td_gemm_args *a, int part, int n_parts)
{
    enum td_scaled_kind kind = a->w->format->scaled.kind;
    int64_t lo, hi;
    if (a->n_rows <= 0) return;
    if (a->w->format->scaled.x == TD_SCALED_X_F32) {
        prepare_f32(a, part, n_parts);
        return;
    }
    if (a->w->format->scaled.x == TD_SCALED_X_BF16) {
        prepare_bf16(a, part, n_parts);
        return;
    }
    td_part_range(a->n_rows, 1, part, n_parts, &lo, &hi);
    for (int64_t row = lo; row < hi; row++)
        if (kind == TD_SCALED_I8)
            prepare_i8(a, row);
        else
            prepare_e4m3(a, row);
}

/* ---- widened products ------------------------------------------------------------------------ */

/* What the codes of a group become values with: `zero` and 2^23, or 2^19, so that one subtraction
 * is exact and leaves code - zero. */
struct factors {
    vec scale[2], zero[2], zero_high[2];
};

/* 2^23 as f32; with a code in the lowest bits, 2^23 + code. And 2^19; with a code of 4 bits above
 * the lowest 4, 2^19 + code. */
#define CODE_EXPONENT 0x4b000000
#define HIGH_EXPONENT 0x49000000

TD_INLINE vec scale_load(enum td_dtype type, const uint8_t *p, size_t i)
{
    if (type == TD_F32) return v_load((const float *)(const void *)p + i);
    const uint16_t *h = (const uint16_t *)(const void *)p + i;
    return type == TD_F16 ? v_load_f16(h) : v_load_bf16(h);
}

TD_INLINE struct factors factors_load(const struct td_format *f, const struct panel *p,
                                      const uint8_t *panel, int32_t g)
{
    const struct td_scaled *s = &f->scaled;
    struct factors of_group;
    TD_UNROLL
    for (int v = 0; v < 2; v++) {
        size_t i = (size_t)g * PW + (size_t)(v * VW);
        ivec zero = s->has_zeros ? i_load_u8(panel + p->zeros_at + i) : i_set1(f->offset);
        of_group.scale[v] =
            td_scaled_is_grouped(s) ? v_zero() : scale_load(s->scale_type, panel, i);
        of_group.zero[v] = v_add(i_to_f32(zero), v_set1(0x1p23f));
        of_group.zero_high[v] = v_add(i_to_f32(zero), v_set1(0x1p19f));
    }
    return of_group;
}

/* The values of a vector v of codes, the low bytes of c's lanes; of 4 bits, their low halves or the
 * high ones. With `whole` without the scale, which sums get. */
TD_INLINE vec codes_widen(enum td_scaled_kind kind, int bits, bool whole, bool high, ivec c, int v,
                          const struct factors *f, const float *table)
{
    vec w;
    if (kind == TD_SCALED_E4M3) return v_from_e4m3(c);
    if (kind == TD_SCALED_TABLE)
        w = v_lookup(table, high ? i_srli(c, 4) : c);
    else if (bits == 4 && high)
        w = v_sub(v_bits(i_and_or(c, i_set1(0xf0), i_set1(HIGH_EXPONENT))), f->zero_high[v]);
    else
        w = v_sub(v_bits(bits == 4 ? i_and_or(c, i_set1(15), i_set1(CODE_EXPONENT))
                                   : i_or(c, i_set1(CODE_EXPONENT))),
                  f->zero[v]);
    return whole ? w : v_mul(w, f->scale[v]);
}

/* Loads the factors of line k; lines [k, the result) have the same. E4M3 has none. */
TD_INLINE int32_t factors_at(enum td_scaled_kind kind, const struct td_format *f,
                             const struct panel *p, const uint8_t *panel, int32_t k, int32_t end,
                             struct factors *ret)
{
    if (kind == TD_SCALED_E4M3) return end;
    int32_t g = td_scaled_group_of(&f->scaled, k);
    *ret = factors_load(f, p, panel, g);
    if (f->scaled.group_of) return k + 1;
    int64_t stop = (int64_t)(g + 1) * f->scaled.group;
    return stop < end ? (int32_t)stop : end;
}

/* Where line k of a panel of 4 or 8 bits begins, which is prefetched some way ahead. */
TD_INLINE const uint8_t *line_fetch(int bits, const uint8_t *lines, int32_t k)
{
    const uint8_t *line = lines + (size_t)(bits == 4 ? k / 2 : k) * PW;
    _mm_prefetch((const char *)line + AHEAD_BYTES, _MM_HINT_T0);
    return line;
}

/* Whether lines k and k + 1 lie in the same bytes, and both come before `stop`. */
TD_INLINE int lines_together(int bits, int32_t k, int32_t stop)
{
    return bits == 4 && k % 2 == 0 && k + 1 < stop ? 2 : 1;
}

/* Lines [k0, k0 + n_k) of a panel as f32. */
TD_INLINE void widen_kind(enum td_scaled_kind kind, int bits, bool whole, const struct td_format *f,
                          const struct panel *p, const uint8_t *panel, int32_t k0, int32_t n_k,
                          float *wide)
{
    const float *table = f->scaled.table;
    struct factors fac = {0};
    for (int32_t k = k0, stop; k < k0 + n_k; k = stop) {
        stop = factors_at(kind, f, p, panel, k, k0 + n_k, &fac);
        for (int32_t i = k, n; i < stop; i += n) {
            const uint8_t *line = line_fetch(bits, panel + p->lines_at, i);
            n = lines_together(bits, i, stop);
            TD_UNROLL
            for (int v = 0; v < 2; v++) {
                ivec c = i_load_u8(line + v * VW);
                float *to = wide + (i - k0) * PW + v * VW;
                if (n == 1) {
                    v_store(to, codes_widen(kind, bits, whole, i % 2, c, v, &fac, table));
                    continue;
                }
                v_store(to, codes_widen(kind, bits, whole, false, c, v, &fac, table));
                v_store(to + PW, codes_widen(kind, bits, whole, true, c, v, &fac, table));
            }
        }
    }
}

/* The codes c of vector v of one line, times n_rows rows of x. */
TD_INLINE void few_codes(enum td_scaled_kind kind, int bits, bool whole, int n_rows, bool high,
                         ivec c, int v, const struct factors *fac, const float *table,
                         const float *x, vec y[][2])
{
    vec w = codes_widen(kind, bits, whole, high, c, v, fac, table);
    TD_UNROLL
    for (int r = 0; r < n_rows; r++) y[r][v] = v_fma(v_set1(x[r]), w, y[r][v]);
}

/* The same lines times n_rows rows of x, without a detour through memory: the chains of [k0, k1)
 * from zero. */
TD_INLINE void few_rows(enum td_scaled_kind kind, int bits, bool whole, int n_rows,
                        const struct td_format *f, const struct panel *p, const uint8_t *panel,
                        int32_t k0, int32_t k1, const float *x, int32_t ld, float *sums)
{
    const float *table = f->scaled.table;
    struct factors fac = {0};
    vec y[ROWS_FEW][2];
    TD_UNROLL
    for (int r = 0; r < n_rows; r++) y[r][0] = y[r][1] = v_zero();
    for (int32_t k = k0, stop; k < k1; k = stop) {
        stop = factors_at(kind, f, p, panel, k, k1, &fac);
        for (int32_t i = k, n; i < stop; i += n) {
            const uint8_t *line = line_fetch(bits, panel + p->lines_at, i);
            const float *xi = x + (int64_t)i * ld;
            n = lines_together(bits, i, stop);
            TD_UNROLL
            for (int v = 0; v < 2; v++) {
                ivec c = i_load_u8(line + v * VW);
                if (n == 1) {
                    few_codes(kind, bits, whole, n_rows, i % 2, c, v, &fac, table, xi, y);
                    continue;
                }
                few_codes(kind, bits, whole, n_rows, false, c, v, &fac, table, xi, y);
                few_codes(kind, bits, whole, n_rows, true, c, v, &fac, table, xi + ld, y);
            }
        }
    }
    TD_UNROLL
    for (int r = 0; r < n_rows; r++)
        v_store(sums + r * PW, y[r][0]), v_store(sums + r * PW + VW, y[r][1]);
}

/* Columns [k0, k1) of a panel, which are in group g, for one tile of rows after the other. */
struct piece {
    const struct td_format *f;
    const struct panel *p;
    const uint8_t *panel;
    int32_t g, k0, k1, ld;
    bool begins, ends; /* the group */
    const uint8_t *at; /* the lines from k0 on */
    float *wide;       /* pairs: where the first tile leaves them for the others; NULL: nowhere */
    /* the tile's: its rows from k0 on; its sums of the group and of all groups; s_x of its rows */
    const float *x;
    float *sums, *chains;
    const float *s_x;
    int32_t n_x_scales;
};

/* The ends of group's chains: to the sums of all groups. */
TD_INLINE void piece_fold(int n_rows, const struct piece *t, int32_t g, vec y[][2])
{
    TD_UNROLL
    for (int v = 0; v < 2; v++) {
        vec s_w = scale_load(t->f->scaled.scale_type, t->panel, (size_t)g * PW + (size_t)(v * VW));
        TD_UNROLL
        for (int r = 0; r < n_rows; r++) {
            float *to = t->chains + r * PW + v * VW;
            vec s = v_mul(v_set1(t->s_x[(int64_t)r * t->n_x_scales + (t->n_x_scales > 1 ? g : 0)]),
                          s_w);
            v_store(to, v_fma(y[r][v], s, g ? v_load(to) : v_zero()));
        }
    }
}

/* The sums that a tile goes on with, and where it leaves them. */
TD_INLINE void piece_begin(int n_rows, const struct piece *t, vec y[][2])
{
    TD_UNROLL
    for (int r = 0; r < n_rows; r++) {
        y[r][0] = t->begins ? v_zero() : v_load(t->sums + r * PW);
        y[r][1] = t->begins ? v_zero() : v_load(t->sums + r * PW + VW);
    }
}

TD_INLINE void piece_end(int n_rows, const struct piece *t, int32_t g, vec y[][2])
{
    if (t->ends) {
        piece_fold(n_rows, t, g, y);
        return;
    }
    TD_UNROLL
    for (int r = 0; r < n_rows; r++)
        v_store(t->sums + r * PW, y[r][0]), v_store(t->sums + r * PW + VW, y[r][1]);
}

/* A piece that lies widened at `at`: a part of a group, or whole groups from g on. */
TD_INLINE void wide_tile(int n_rows, const struct piece *t)
{
    const float *x = t->x, *w = (const float *)(const void *)t->at;
    int32_t group = t->f->scaled.group;
    for (int32_t g = t->g, k = t->k0; k < t->k1; g++) {
        int32_t end = t->k1 - g * group < group ? t->k1 : g * group + group;
        vec y[TILE_ROWS][2];
        piece_begin(n_rows, t, y);
        for (; k < end; k++, x += t->ld, w += PW) {
            vec w0 = v_load(w), w1 = v_load(w + VW);
            TD_UNROLL
            for (int r = 0; r < n_rows; r++) {
                vec xr = v_set1(x[r]);
                y[r][0] = v_fma(xr, w0, y[r][0]);
                y[r][1] = v_fma(xr, w1, y[r][1]);
            }
        }
        piece_end(n_rows, t, g, y);
    }
}

typedef void (*piece_fn)(const struct piece *t);
#define WIDE_FN(n, name)                                                                           \
    static __attribute__((noinline)) void name##_##n(const struct piece *t) { wide_tile(n, t); }
TD_EACH_TILE_ROWS(WIDE_FN, group_tile)
static const piece_fn group_tiles[TILE_ROWS + 1] = {NULL,
                                                    TD_EACH_TILE_ROWS(TD_TILE_NAME, group_tile)};

#ifdef SCALED_PAIRS
/* How the codes of two k become a pair of bf16. */
enum pair_kind { PAIR_E4M3, PAIR_TABLE, PAIR_INT4, PAIR_INT8, PAIR_WIDE /* it is one */ };

/* What that takes: of E4M3 the codes without exponent, m * 2^-9; of 4 bits the number of each code,
 * or of each difference of a code and a zero, from 0 to 15 and from -16 to -1; the zeros. */
struct pair_factors {
    __m512i table, zero[2];
};

static enum pair_kind pair_kind_of(const struct td_format *f)
{
    if (f->scaled.kind == TD_SCALED_E4M3) return PAIR_E4M3;
    if (f->bits == 8) return PAIR_INT8;
    return f->scaled.kind == TD_SCALED_INT && f->scaled.has_zeros ? PAIR_INT4 : PAIR_TABLE;
}

static __m512i pair_table_of(const struct td_format *f)
{
    uint16_t table[32] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
    for (int i = 0; i < 32 && f->bits == 4; i++)
        table[i] = td_f32_to_bf16(f->scaled.kind == TD_SCALED_TABLE ? f->scaled.table[i & 15]
                                  : f->scaled.has_zeros             ? (float)(i < 16 ? i : i - 32)
                                                        : (float)((i & 15) - f->offset));
    return _mm512_loadu_si512(table);
}

/* The zeros of group g of a panel, in both halves of each lane. */
TD_INLINE void pair_zeros(const struct td_format *f, const struct panel *p, const uint8_t *panel,
                          int32_t g, struct pair_factors *ret)
{
    TD_UNROLL
    for (int v = 0; v < 2; v++) {
        const uint8_t *zeros = panel + p->zeros_at + (size_t)g * PW + v * VW;
        ivec z = f->scaled.has_zeros ? i_load_u8(zeros) : i_set1(f->offset);
        ret->zero[v] = i_or(z, _mm512_slli_epi32(z, 16));
    }
}

TD_INLINE __m512i w_and(__m512i a, int words) { return i_and(a, _mm512_set1_epi16((short)words)); }

/* Of words with a code of E4M3 in the low byte (v 0) or the high one: what bf16 has for it. */
TD_INLINE __m512i e4m3_widen(__m512i c, int v, __m512i subnormal)
{
    __m512i size = w_and(v ? _mm512_srli_epi16(c, 4) : _mm512_slli_epi16(c, 4), 0x7f0),
            sign = v ? c : _mm512_slli_epi16(c, 8),
            value = _mm512_add_epi16(size, _mm512_set1_epi16(120 << 7));
    __mmask32 tiny = _mm512_testn_epi16_mask(c, _mm512_set1_epi16(v ? 0x7800 : 0x78));
    value = _mm512_mask_permutexvar_epi16(value, tiny, v ? _mm512_srli_epi16(c, 8) : c, subnormal);
    /* (sign & 0x8000) | value */
    return _mm512_ternarylogic_epi32(sign, _mm512_set1_epi16((short)0x8000), value, 0xea);
}

/* 64 bytes, line `odd` of the two that codes of 4 bits have there: pairs of vector v. A permutation
 * of words looks at the low 5 bits of each index. */
TD_INLINE vec pair_widen(enum pair_kind kind, const uint8_t *at, int odd, int v,
                         const struct pair_factors *f)
{
    if (kind == PAIR_WIDE) return v_load((const float *)(const void *)at + v * VW);
    __m512i c = i_load(at);
    if (kind == PAIR_E4M3) return v_bits(e4m3_widen(c, v, f->table));
    if (kind == PAIR_INT8) {
        c = _mm512_sub_epi16(v ? _mm512_srli_epi16(c, 8) : w_and(c, 0xff), f->zero[v]);
        __m512i first = i_bits(i_to_f32(_mm512_srai_epi32(c, 16))),
                second = i_bits(i_to_f32(_mm512_srai_epi32(_mm512_slli_epi32(c, 16), 16)));
        return v_bits(i_or(first, i_srli(second, 16)));
    }
    if (odd || v) c = _mm512_srli_epi16(c, (unsigned)(8 * odd + 4 * v));
    if (kind == PAIR_INT4) /* the table of the others repeats itself, so there bit 4 is no matter */
        c = _mm512_sub_epi16(odd && v ? c : w_and(c, 15), f->zero[v]);
    return v_bits(_mm512_permutexvar_epi16(c, f->table));
}

/* Lines that lie together, and the bytes that they take. */
TD_INLINE int pair_lines(enum pair_kind kind)
{
    return kind == PAIR_TABLE || kind == PAIR_INT4 ? 2 : 1;
}
TD_INLINE int pair_bytes(enum pair_kind kind) { return kind == PAIR_WIDE ? 4 * PW : 2 * PW; }

TD_INLINE void pair_multiply(int n_rows, vec w0, vec w1, const float *x, vec y[][2])
{
    TD_UNROLL
    for (int r = 0; r < n_rows; r++) {
        vec xr = v_set1(x[r]);
        y[r][0] = v_dot_bf16(xr, w0, y[r][0]);
        y[r][1] = v_dot_bf16(xr, w1, y[r][1]);
    }
}

/* Each line is widened while the one before is multiplied: the two wait for different units of the
 * CPU. */
TD_INLINE void pair_tile(enum pair_kind kind, int n_rows, const struct piece *t)
{
    const uint8_t *at = t->at;
    const float *x = t->x;
    float *wide = t->wide;
    struct pair_factors fac = {0};
    vec y[TILE_ROWS][2];
    if (kind != PAIR_WIDE) {
        fac.table = pair_table_of(t->f);
        pair_zeros(t->f, t->p, t->panel, t->g, &fac);
    }
    piece_begin(n_rows, t, y);
    vec n0 = pair_widen(kind, at, 0, 0, &fac), n1 = pair_widen(kind, at, 0, 1, &fac);
    for (int32_t left = (t->k1 - t->k0 + 1) / 2; left > 0; left -= pair_lines(kind)) {
        if (kind != PAIR_WIDE) _mm_prefetch((const char *)at + AHEAD_BYTES, _MM_HINT_T0);
        TD_UNROLL
        for (int odd = 0; odd < pair_lines(kind); odd++) {
            vec w0 = n0, w1 = n1;
            bool is_last = odd + 1 == pair_lines(kind);
            if (odd && left == 1) break;
            if (is_last) at += left > pair_lines(kind) ? pair_bytes(kind) : 0;
            n0 = pair_widen(kind, at, !is_last, 0, &fac);
            n1 = pair_widen(kind, at, !is_last, 1, &fac);
            if (kind != PAIR_WIDE && wide) {
                v_store(wide, w0), v_store(wide + VW, w1);
                wide += PW;
            }
            pair_multiply(n_rows, w0, w1, x, y);
            x += t->ld;
        }
    }
    piece_end(n_rows, t, t->g, y);
}

#define PAIR_FN(n, kind)                                                                           \
    static __attribute__((noinline)) void tile_##kind##_##n(const struct piece *t)                 \
    {                                                                                              \
        pair_tile(kind, n, t);                                                                     \
    }
#define PAIR_NAME(n, kind) tile_##kind##_##n,
TD_EACH_TILE_ROWS(PAIR_FN, PAIR_E4M3)
TD_EACH_TILE_ROWS(PAIR_FN, PAIR_TABLE)
TD_EACH_TILE_ROWS(PAIR_FN, PAIR_INT4)
TD_EACH_TILE_ROWS(PAIR_FN, PAIR_INT8)
TD_EACH_TILE_ROWS(PAIR_FN, PAIR_WIDE)
static const piece_fn pair_tiles[5][TILE_ROWS + 1] = {
    [PAIR_E4M3] = {NULL, TD_EACH_TILE_ROWS(PAIR_NAME, PAIR_E4M3)},
    [PAIR_TABLE] = {NULL, TD_EACH_TILE_ROWS(PAIR_NAME, PAIR_TABLE)},
    [PAIR_INT4] = {NULL, TD_EACH_TILE_ROWS(PAIR_NAME, PAIR_INT4)},
    [PAIR_INT8] = {NULL, TD_EACH_TILE_ROWS(PAIR_NAME, PAIR_INT8)},
    [PAIR_WIDE] = {NULL, TD_EACH_TILE_ROWS(PAIR_NAME, PAIR_WIDE)}};
#endif

typedef void (*few_fn)(const struct td_format *f, const struct panel *p, const uint8_t *panel,
                       int32_t k0, int32_t k1, const float *x, int32_t ld, float *sums);
typedef void (*widen_fn)(const struct td_format *f, const struct panel *p, const uint8_t *panel,
                         int32_t k0, int32_t n_k, float *wide);
#define FEW_FN(n, name, kind, bits, whole)                                                         \
    static __attribute__((noinline)) void few_##name##_##n(                                        \
        const struct td_format *f, const struct panel *p, const uint8_t *panel, int32_t k0,        \
        int32_t k1, const float *x, int32_t ld, float *sums)                                       \
    {                                                                                              \
        few_rows(kind, bits, whole, n, f, p, panel, k0, k1, x, ld, sums);                          \
    }
#define FEW_NAME(n, name) few_##name##_##n,
#define FEW_AND_WIDEN(name, kind, bits, whole)                                                     \
    FEW_EACH_ROWS(FEW_FN, name, kind, bits, whole)                                                 \
    static void widen_##name(const struct td_format *f, const struct panel *p,                     \
                             const uint8_t *panel, int32_t k0, int32_t n_k, float *wide)           \
    {                                                                                              \
        widen_kind(kind, bits, whole, f, p, panel, k0, n_k, wide);                                 \
    }
FEW_AND_WIDEN(e4m3, TD_SCALED_E4M3, 8, true)
FEW_AND_WIDEN(table, TD_SCALED_TABLE, 4, false)
FEW_AND_WIDEN(int4, TD_SCALED_INT, 4, false)
FEW_AND_WIDEN(int8, TD_SCALED_INT, 8, false)
FEW_AND_WIDEN(whole_table, TD_SCALED_TABLE, 4, true)
FEW_AND_WIDEN(whole_int4, TD_SCALED_INT, 4, true)
FEW_AND_WIDEN(whole_int8, TD_SCALED_INT, 8, true)

struct widening {
    few_fn few[ROWS_FEW + 1];
    widen_fn widen;
};
#define WIDENING(name)                                                                             \
    {                                                                                              \
        {NULL, FEW_EACH_ROWS(FEW_NAME, name)}, widen_##name                                        \
    }

/* How a format's codes become numbers: without the scales where sums of groups get them. */
static const struct widening *widening_of(const struct td_format *f)
{
    static const struct widening e4m3 = WIDENING(e4m3),
                                 of[2][3] = {{WIDENING(table), WIDENING(int4), WIDENING(int8)},
                                             {WIDENING(whole_table), WIDENING(whole_int4),
                                              WIDENING(whole_int8)}};
    if (f->scaled.kind == TD_SCALED_E4M3) return &e4m3;
    return &of[td_scaled_is_grouped(&f->scaled)][f->scaled.kind == TD_SCALED_TABLE ? 0
                                                 : f->bits == 4                    ? 1
                                                                                   : 2];
}

/* Group g's sums, scaled, to the chains of rows [r0, r1). */
static void fold_group(const struct td_gemm_args *a, const uint8_t *panel, int32_t g, int32_t r0,
                       int32_t r1, const float *sums, float *chains)
{
    const struct td_format *f = a->w->format;
    int32_t n_scales = td_scaled_n_x_scales(f);
    const float *s_x = td_scaled_scratch_at(a->scratch, a->n_rows, a->w->n_in).scales;
    for (int v = 0; v < 2; v++) {
        vec s_w = scale_load(f->scaled.scale_type, panel, (size_t)g * PW + (size_t)(v * VW));
        for (int32_t r = r0; r < r1; r++) {
            float *y = chains + (r - r0) * PW + v * VW;
            vec s = v_mul(v_set1(s_x[(int64_t)r * n_scales + (n_scales > 1 ? g : 0)]), s_w);
            v_store(y, v_fma(v_load(sums + (r - r0) * PW + v * VW), s, g ? v_load(y) : v_zero()));
        }
    }
}

/* All rows, at most ROWS_FEW, times one panel. */
static void panel_times_few(const struct td_gemm_args *a, int32_t index)
{
    const struct td_format *f = a->w->format;
    const struct panel p = panel_of(f, a->w->n_in);
    const uint8_t *panel = (const uint8_t *)a->w->data + (size_t)index * p.bytes;
    bool grouped = td_scaled_is_grouped(&f->scaled);
    int32_t n_in = a->w->n_in, chain = grouped ? f->scaled.group : n_in;
    alignas(64) float sums[ROWS_FEW * PW], chains[ROWS_FEW * PW];
    for (int32_t k = 0, g = 0; k < n_in; k += chain, g++) {
        int32_t end = n_in - k < chain ? n_in : k + chain;
        widening_of(f)->few[a->n_rows](f, &p, panel, k, end, a->scratch, tile_ld(a->n_rows), sums);
        if (grouped) fold_group(a, panel, g, 0, a->n_rows, sums, chains);
    }
    finish(a, index, 0, a->n_rows, grouped ? chains : sums);
}

#ifdef SCALED_PAIRS
/* Rows of tiles [t0, t1), at most ROW_TILES, times one panel of pairs. */
static void panel_times_pairs(const struct td_gemm_args *a, int32_t index, int32_t t0, int32_t t1)
{
    const struct td_format *f = a->w->format;
    const struct panel p = panel_of(f, a->w->n_in);
    enum pair_kind kind = pair_kind_of(f);
    int32_t n_in = a->w->n_in, group = f->scaled.group, n_x = td_scaled_n_x_scales(f),
            rows = tile_rows(a->n_rows), lines = pair_lines(kind),
            most = t1 - t0 == 1 ? n_in : 2 * KB; /* one tile leaves nothing in wide */
    const float *s_x = td_scaled_scratch_at(a->scratch, a->n_rows, n_in).scales;
    alignas(64) float wide[KB * PW];
    alignas(64) float sums[ROW_TILES * TILE_ROWS * PW];
    alignas(64) float chains[ROW_TILES * TILE_ROWS * PW];
    struct piece t = {.f = f,
                      .p = &p,
                      .panel = (const uint8_t *)a->w->data + (size_t)index * p.bytes,
                      .ld = tile_ld(a->n_rows),
                      .n_x_scales = n_x};
    for (t.k0 = 0; t.k0 < n_in; t.k0 = t.k1) {
        t.g = t.k0 / group;
        int32_t begin = t.g * group, end = n_in - begin < group ? n_in : begin + group;
        t.k1 = end - t.k0 < most ? end : t.k0 + most;
        t.begins = t.k0 == begin, t.ends = t.k1 == end;
        for (int32_t i = t0; i < t1; i++) {
            bool is_first = i == t0;
            t.at = is_first ? t.panel + p.lines_at + (size_t)(t.k0 / (2 * lines) * 2 * PW)
                            : (const uint8_t *)wide;
            t.wide = t1 - t0 > 1 ? wide : NULL;
            t.x = tile_at(a, i) + (int64_t)(t.k0 / 2) * t.ld;
            t.sums = sums + (i - t0) * rows * PW, t.chains = chains + (i - t0) * rows * PW;
            t.s_x = s_x + (int64_t)i * rows * n_x;
            pair_tiles[is_first ? kind : PAIR_WIDE][rows_in_tile(a->n_rows, i)](&t);
        }
    }
    int32_t r0 = t0 * rows, r1 = t1 * rows < a->n_rows ? t1 * rows : a->n_rows;
    finish(a, index, r0, r1 - r0, chains);
}
#else
static void panel_times_pairs(const struct td_gemm_args *a, int32_t index, int32_t t0, int32_t t1)
{
    (void)a, (void)index, (void)t0, (void)t1;
}
#endif

/* Rows of tiles [t0, t1), at most ROW_TILES, times one panel whose sums of groups are scaled. */
static void panel_times_groups(const struct td_gemm_args *a, int32_t index, int32_t t0, int32_t t1)
{
    const struct td_format *f = a->w->format;
    const struct panel p = panel_of(f, a->w->n_in);
    widen_fn widen = widening_of(f)->widen;
    int32_t n_in = a->w->n_in, group = f->scaled.group, n_x = td_scaled_n_x_scales(f),
            rows = tile_rows(a->n_rows),
            most = group < GROUPS_KB ? GROUPS_KB / group * group : GROUPS_KB;
    const float *s_x = td_scaled_scratch_at(a->scratch, a->n_rows, n_in).scales;
    alignas(64) float wide[GROUPS_KB * PW];
    alignas(64) float sums[ROW_TILES * TILE_ROWS * PW];
    alignas(64) float chains[ROW_TILES * TILE_ROWS * PW];
    struct piece t = {.f = f,
                      .p = &p,
                      .panel = (const uint8_t *)a->w->data + (size_t)index * p.bytes,
                      .ld = tile_ld(a->n_rows),
                      .at = (const uint8_t *)wide,
                      .n_x_scales = n_x};
    for (t.k0 = 0; t.k0 < n_in; t.k0 = t.k1) {
        t.g = t.k0 / group;
        int32_t left = n_in - t.k0, in_group = group - t.k0 % group;
        t.k1 = t.k0 + (left < most ? left : most);
        if (group >= GROUPS_KB && t.k1 - t.k0 > in_group) t.k1 = t.k0 + in_group;
        t.begins = t.k0 % group == 0, t.ends = t.k1 % group == 0 || t.k1 == n_in;
        widen(f, &p, t.panel, t.k0, t.k1 - t.k0, wide);
        for (int32_t i = t0; i < t1; i++) {
            t.x = tile_at(a, i) + (int64_t)t.k0 * t.ld;
            t.sums = sums + (i - t0) * rows * PW, t.chains = chains + (i - t0) * rows * PW;
            t.s_x = s_x + (int64_t)i * rows * n_x;
            group_tiles[rows_in_tile(a->n_rows, i)](&t);
        }
    }
    int32_t r0 = t0 * rows, r1 = t1 * rows < a->n_rows ? t1 * rows : a->n_rows;
    finish(a, index, r0, r1 - r0, chains);
}

/* The same with scaled weights: one chain for each output. */
static void panel_times_rows(const struct td_gemm_args *a, int32_t index, int32_t t0, int32_t t1)
{
    const struct td_format *f = a->w->format;
    const struct panel p = panel_of(f, a->w->n_in);
    const uint8_t *panel = (const uint8_t *)a->w->data + (size_t)index * p.bytes;
    widen_fn widen = widening_of(f)->widen;
    int32_t n_in = a->w->n_in, ld = tile_ld(a->n_rows), rows = tile_rows(a->n_rows), r0 = t0 * rows,
            r1 = t1 * rows < a->n_rows ? t1 * rows : a->n_rows;
    alignas(64) float wide[KB * PW];
    alignas(64) float sums[ROW_TILES * TILE_ROWS * PW];
    for (int32_t k0 = 0; k0 < n_in; k0 += KB) {
        int32_t n_k = n_in - k0 < KB ? n_in - k0 : KB;
        widen(f, &p, panel, k0, n_k, wide);
        for (int32_t i = t0; i < t1; i++)
            tile_f32[rows_in_tile(a->n_rows, i)](sums + (i - t0) * rows * PW,
                                                 tile_at(a, i) + (int64_t)k0 * ld, ld,
                                                 (const uint8_t *)wide, n_k, k0 == 0, NULL, 0);
    }
    finish(a, index, r0, r1 - r0, sums);
}

/* ---- integer products ------------------------------------------------------------------------ */

#ifndef SCALED_I8_PAIRS
/* Adds the products of n_k codes of n_rows rows, `stride` apart, with those lines of a panel. */
TD_INLINE void i8_sums(int n_rows, const int8_t *x, size_t stride, size_t n_k, const uint8_t *line,
                       ivec sum[][2])
{
    for (size_t k = 0; k < n_k; k += 4, line += 4 * PW) {
        ivec w0 = i_load(line), w1 = i_load(line + 4 * VW);
        _mm_prefetch((const char *)line + AHEAD_BYTES, _MM_HINT_T0);
        _mm_prefetch((const char *)line + AHEAD_BYTES + 64, _MM_HINT_T0);
        TD_UNROLL
        for (int r = 0; r < n_rows; r++) {
            int32_t v;
            memcpy(&v, x + (size_t)r * stride + k, sizeof v);
            sum[r][0] = i_dot(true, sum[r][0], w0, i_set1(v));
            sum[r][1] = i_dot(true, sum[r][1], w1, i_set1(v));
        }
    }
}
#endif

/* Adds the products of n_k codes of n_rows rows to their sums, [row][PW]. */
TD_INLINE void i8_tile(int n_rows, const int8_t *x, size_t stride, size_t n_k, const uint8_t *line,
                       int32_t *sums)
{
    ivec sum[I8_ROWS][2];
    TD_UNROLL
    for (int r = 0; r < n_rows; r++)
        for (int v = 0; v < 2; v++) sum[r][v] = i_load(sums + r * PW + v * VW);
    i8_sums(n_rows, x, stride, n_k, line, sum);
    TD_UNROLL
    for (int r = 0; r < n_rows; r++)
        for (int v = 0; v < 2; v++) i_store(sums + r * PW + v * VW, sum[r][v]);
}

typedef void (*i8_fn)(const int8_t *x, size_t stride, size_t n_k, const uint8_t *line,
                      int32_t *sums);
#define I8_FN(n)                                                                                   \
    static __attribute__((noinline)) void i8_tile_##n(const int8_t *x, size_t stride, size_t n_k,  \
                                                      const uint8_t *line, int32_t *sums)          \
    {                                                                                              \
        i8_tile(n, x, stride, n_k, line, sums);                                                    \
    }
#define I8_NAME(n) i8_tile_##n,
I8_EACH_ROWS(I8_FN)
static const i8_fn i8_tiles[I8_ROWS + 1] = {NULL, I8_EACH_ROWS(I8_NAME)};

/* What the outliers of a row add to its sums. */
static void add_outliers(const struct td_gemm_args *a, const uint8_t *panel, const struct panel *p,
                         const struct td_scaled_scratch *s, int64_t row, float *sums)
{
    int32_t n_in = a->w->n_in, n_bytes = (n_in + 7) / 8;
    const uint8_t *bits = s->outliers + row * n_bytes;
    for (int32_t i = 0; i < n_bytes; i++) {
        if (!bits[i]) continue;
        for (int32_t k = 8 * i; k < 8 * i + 8; k++) {
            if (!(bits[i] >> k % 8 & 1)) continue;
            float x = s->values[row * n_in + k];
            for (int32_t c = 0; c < PW; c++) {
                uint8_t code = panel[p->lines_at + code_at(a->w->format, k, c)] ^ I8_FLIP;
                float scale = scale_read(a->w->format->scaled.scale_type, panel, (size_t)c);
                sums[c] = fmaf(x, (float)(int8_t)code * scale, sums[c]);
            }
        }
    }
}

/* The first row of tile t of n_tiles. */
TD_INLINE int32_t i8_tile_row(int32_t n_rows, int32_t n_tiles, int32_t t)
{
    return (int32_t)((int64_t)n_rows * t / n_tiles);
}

/* The exact sums of `rows` rows from `row` on become y, but for those of the first `skip`. */
static void i8_finish(const struct td_gemm_args *a, const struct td_scaled_scratch *s,
                      const struct panel *p, int32_t index, int32_t row, int32_t skip, int32_t rows,
                      const int32_t *sums)
{
    const uint8_t *panel = (const uint8_t *)a->w->data + (size_t)index * p->bytes;
    enum td_dtype scale_type = a->w->format->scaled.scale_type;
    alignas(64) float y[I8_FINISH_ROWS * PW];
    for (int32_t r = skip; r < rows; r++) {
        for (int v = 0; v < 2; v++) {
            vec scale =
                v_mul(v_set1(s->scales[row + r]), scale_load(scale_type, panel, (size_t)(v * VW)));
            v_store(y + r * PW + v * VW, v_mul(i_to_f32(i_load(sums + r * PW + v * VW)), scale));
        }
        if (a->w->format->scaled.x == TD_SCALED_X_OUTLIER)
            add_outliers(a, panel, p, s, row + r, y + r * PW);
    }
    finish(a, index, row + skip, rows - skip, y + skip * PW);
}

/* Rows [r0, r1) x panels [p0, p1), in tiles as equal as possible. As many lines of a panel as stay
 * in L1 meet all tiles, whose sums wait in memory meanwhile. One tile meets all of the panel. */
static void i8_pass(const struct td_gemm_args *a, int32_t r0, int32_t r1, int32_t p0, int32_t p1)
{
    const struct td_scaled_scratch s = td_scaled_scratch_at(a->scratch, a->n_rows, a->w->n_in);
    const struct panel p = panel_of(a->w->format, a->w->n_in);
    size_t n = i8_round(a->w->n_in), stride = td_scaled_codes_stride(a->w->n_in);
    int32_t n_rows = r1 - r0, n_tiles = (n_rows + I8_ROWS - 1) / I8_ROWS;
    size_t most = n_tiles == 1 ? n : I8_KB;
    alignas(64) int32_t sums[I8_PASS_ROWS * PW];
    for (int32_t i = p0; i < p1; i++) {
        const uint8_t *lines = (const uint8_t *)a->w->data + (size_t)i * p.bytes + p.lines_at;
        for (int32_t r = 0; r < n_rows; r++)
            for (int v = 0; v < 2; v++)
                i_store(sums + r * PW + v * VW, i_set1(I8_OFFSET * s.sums[r0 + r]));
        for (size_t k0 = 0; k0 < n; k0 += most)
            for (int32_t t = 0; t < n_tiles; t++) {
                int32_t r = i8_tile_row(n_rows, n_tiles, t);
                i8_tiles[i8_tile_row(n_rows, n_tiles, t + 1) - r](
                    s.codes + (size_t)(r0 + r) * stride + k0, stride, n - k0 < most ? n - k0 : most,
                    lines + k0 * PW, sums + r * PW);
            }
        for (int32_t t = 0; t < n_tiles; t++) {
            int32_t r = i8_tile_row(n_rows, n_tiles, t), end = i8_tile_row(n_rows, n_tiles, t + 1);
            i8_finish(a, &s, &p, i, r0 + r, 0, end - r, sums + r * PW);
        }
    }
}

void TD_SIMD(scaled_gemm)(const struct td_gemm_args *a, int part, int n_parts)
{
    bool is_i8 = a->w->format->scaled.kind == TD_SCALED_I8;
    int32_t n_units = is_i8 ? a->n_rows : a->n_rows > 0 ? tile_count(a->n_rows) : 0;
    int64_t n_panels = (a->w->n_out + PW - 1) / PW, p0 = 0, p1 = n_panels, r0 = 0, r1 = n_units;
    if (a->n_rows <= 0) return;
    if (n_panels >= n_parts || n_units < n_parts)
        td_part_range(n_panels, 1, part, n_parts, &p0, &p1);
    else
        td_part_range(n_units, 1, part, n_parts, &r0, &r1);
    int64_t step = is_i8 ? I8_BYTES / (int64_t)td_scaled_codes_stride(a->w->n_in) : ROW_TILES;
    if (is_i8 && step > I8_PASS_ROWS) step = I8_PASS_ROWS;
    if (is_i8) step = step < I8_ROWS ? I8_ROWS : step / I8_ROWS * I8_ROWS;
    for (int64_t r = r0; r < r1; r += step) {
        int32_t end = (int32_t)(r + step < r1 ? r + step : r1);
        if (is_i8)
            i8_pass(a, (int32_t)r, end, (int32_t)p0, (int32_t)p1);
        else
            for (int64_t i = p0; i < p1; i++)
                if (in_pairs(a->w->format))
                    panel_times_pairs(a, (int32_t)i, (int32_t)r, end);
                else if (a->n_rows <= ROWS_FEW)
                    panel_times_few(a, (int32_t)i);
                else if (td_scaled_is_grouped(&a->w->format->scaled))
                    panel_times_groups(a, (int32_t)i, (int32_t)r, end);
                else
                    panel_times_rows(a, (int32_t)i, (int32_t)r, end);
    }
}

#endif
