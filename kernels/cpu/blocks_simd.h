/* blocks_simd.h - the product with weights in block formats, written in the integer operations that
 * blocks_avx512.c and blocks_avx2.c define before they include it. blocks.h says what is computed.
 *
 * Weights lie in panels of PW outputs. Of each group of 32 k a panel holds what scales need, each
 * field for all outputs side by side, then as many lines of 4 bytes for each output as a code has
 * bits. 8 bits: a line is 4 consecutive codes of each output. 4 to 6 bits: the low halves of a line
 * are the low 4 bits of 4 codes, the high halves those of the next 4; 2, 3 and 6 bits: a line is 2
 * bits of 16 codes; 3 and 5 bits: a line is 1 bit of 32 codes. So one broadcast of 4 activations
 * meets the codes of all outputs, and no sum runs across lanes. Fields of a block of 256 values
 * stand in front of its 8 groups. The bytes are those of the file, and up to 4 % more where integer
 * scales of 6 bits take 8.
 *
 * A tile is up to QUANT_ROWS rows x one panel, with all its sums in registers. Rows are taken in
 * blocks whose prepared form fits L2, and each block passes over the panels from front to back. */
#ifndef TD_KERNELS_BLOCKS_SIMD_H
#define TD_KERNELS_BLOCKS_SIMD_H

#include <stdalign.h>
#include <stdbool.h>

#include "kernels/blocks.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/finish_simd.h"
#include "kernels/formats/formats.h"

enum {
    PW = 2 * VW,
    LINE_BYTES = 4 * PW,
    GROUPS = TD_BLOCK_VALUES_MAX / TD_GROUP,
    ROWS_BYTES = 256 << 10, /* prepared rows of one pass over the panels: a quarter of L2 */
    AHEAD_BYTES = 4096,     /* how far ahead lines are prefetched into L1 */
};

TD_INLINE bool is_long(enum td_scales s) { return s >= TD_SCALES_I8; } /* blocks of 256 */
TD_INLINE bool has_m(enum td_scales s)
{
    return s == TD_SCALES_F16_MIN || s == TD_SCALES_U8_MIN || s == TD_SCALES_U4_MIN_HALVES;
}
TD_INLINE bool has_halves(enum td_scales s)
{
    return s == TD_SCALES_I8_HALVES || s == TD_SCALES_U4_MIN_HALVES;
}
/* d and m, in front of a group or of a block of 256 */
TD_INLINE ptrdiff_t factor_bytes(enum td_scales s)
{
    return s == TD_SCALES_E8M0 ? PW : has_m(s) ? 4 * PW : 2 * PW;
}
/* integer scales and minima in front of the lines of a group */
TD_INLINE ptrdiff_t scale_bytes(enum td_scales s)
{
    return !is_long(s) ? 0 : s == TD_SCALES_I8 ? PW : 2 * PW;
}
TD_INLINE ptrdiff_t group_bytes(int bits, enum td_scales s)
{
    return (is_long(s) ? 0 : factor_bytes(s)) + scale_bytes(s) + bits * LINE_BYTES;
}
TD_INLINE ptrdiff_t block_head_bytes(enum td_scales s) { return is_long(s) ? factor_bytes(s) : 0; }

static ptrdiff_t panel_bytes(const struct td_format *f, int32_t n_in)
{
    return n_in / TD_GROUP * group_bytes(f->bits, f->scales) +
           (is_long(f->scales) ? n_in / TD_BLOCK_VALUES_MAX * block_head_bytes(f->scales) : 0);
}

size_t TD_SIMD(blocks_packed_bytes)(int32_t n_out, int32_t n_in, const struct td_format *format)
{
    size_t bytes = (size_t)((n_out + PW - 1) / PW) * (size_t)panel_bytes(format, n_in);
    return (bytes + 63) & ~(size_t)63;
}

/* ---- packing --------------------------------------------------------------------------------- */

/* Codes at .. at + 7, the first in the lowest byte. */
TD_INLINE uint64_t eight(const uint8_t *codes, int at)
{
    uint64_t v;
    memcpy(&v, codes + at, sizeof v);
    return v;
}

/* Line l of a group, for one output. Eight codes at a time: what belongs to the first four of them
 * is gathered in the low half of a word, what belongs to the others in its high half. */
TD_INLINE uint32_t pack_line(int bits, const uint8_t *codes, int l)
{
    int n_nibbles = bits >= 4 ? 4 : 0, n_pairs = bits % 4 >= 2 ? 2 : 0;
    uint64_t v = 0;
    if (bits == 8) return (uint32_t)(eight(codes, l / 2 * 8) >> l % 2 * 32) ^ CODE_FLIP;
    if (l < n_nibbles) {
        v = eight(codes, 8 * l) & 0x0f0f0f0f0f0f0f0fu;
        return (uint32_t)v | (uint32_t)(v >> 32) << 4;
    }
    l -= n_nibbles;
    if (l < n_pairs) {
        TD_UNROLL
        for (int i = 0; i < 2; i++)
            v |= (eight(codes, 16 * l + 8 * i) >> n_nibbles & 0x0303030303030303u) << 4 * i;
        return (uint32_t)v | (uint32_t)(v >> 32) << 2;
    }
    TD_UNROLL
    for (int i = 0; i < 4; i++)
        v |= (eight(codes, 8 * i) >> (bits - 1) & 0x0101010101010101u) << 2 * i;
    return (uint32_t)v | (uint32_t)(v >> 32) << 1;
}

TD_INLINE void pack_factors(enum td_scales s, const struct td_group *w, int c, uint8_t *to)
{
    if (s == TD_SCALES_E8M0) {
        to[c] = (uint8_t)w->d;
        return;
    }
    memcpy(to + 2 * c, &w->d, 2);
    if (has_m(s)) memcpy(to + 2 * PW + 2 * c, &w->m, 2);
}

TD_INLINE void pack_scales(enum td_scales s, const struct td_group *w, int c, uint8_t *to)
{
    if (s == TD_SCALES_U4_MIN_HALVES) {
        to[c] = (uint8_t)(w->scale[0] | w->min[0] << 4);
        to[PW + c] = (uint8_t)(w->scale[1] | w->min[1] << 4);
        return;
    }
    to[c] = w->scale[0];
    if (s != TD_SCALES_I8) to[PW + c] = s == TD_SCALES_U8_MIN ? w->min[0] : w->scale[1];
}

/* The groups of one block of the file, of output c. Inlined where bits and scales are constants, so
 * that nothing is decided for each byte. */
TD_INLINE bool pack_block(const struct td_format *f, int bits, enum td_scales scales,
                          const uint8_t *block, int c, uint8_t *to)
{
    bool is_finite = true;
    uint8_t *head = to;
    to += block_head_bytes(scales);
    for (int32_t g = 0; g < (is_long(scales) ? GROUPS : 1); g++) {
        struct td_group w;
        f->split(block, g, &w);
        if (g == 0) is_finite = td_group_is_finite(f, &w);
        uint8_t *at = to + g * group_bytes(bits, scales);
        if (is_long(scales)) {
            if (g == 0) pack_factors(scales, &w, c, head);
            pack_scales(scales, &w, c, at);
            at += scale_bytes(scales);
        } else {
            pack_factors(scales, &w, c, at);
            at += factor_bytes(scales);
        }
        TD_UNROLL
        for (int l = 0; l < bits; l++) {
            uint32_t line = pack_line(bits, w.codes, l);
            memcpy(at + l * LINE_BYTES + 4 * c, &line, sizeof line);
        }
    }
    return is_finite;
}

/* n_cols rows of the file, n_blocks blocks of each, into a panel. */
typedef bool (*pack_panel_fn)(const struct td_format *f, const uint8_t *from, size_t row_bytes,
                              int32_t n_blocks, int32_t n_cols, uint8_t *panel);
#define PACK_FN(fn, label, number, n_values, n_bytes, bits, offset, values, scales)                \
    static bool pack_panel_##fn(const struct td_format *f, const uint8_t *from, size_t row_bytes,  \
                                int32_t n_blocks, int32_t n_cols, uint8_t *panel)                  \
    {                                                                                              \
        ptrdiff_t step =                                                                           \
            block_head_bytes(scales) + (n_values) / TD_GROUP * group_bytes(bits, scales);          \
        bool is_finite = true;                                                                     \
        for (int32_t b = 0; b < n_blocks; b++, from += (n_bytes), panel += step)                   \
            for (int32_t c = 0; c < n_cols; c++)                                                   \
                is_finite &= pack_block(f, bits, scales, from + (size_t)c * row_bytes, c, panel);  \
        return is_finite;                                                                          \
    }
#define PACK_NAME(fn, ...) [TD_INDEX_##fn] = pack_panel_##fn,
TD_EACH_BLOCK_FORMAT(PACK_FN)
static const pack_panel_fn pack_panels[TD_N_BLOCK_FORMATS] = {TD_EACH_BLOCK_FORMAT(PACK_NAME)};

bool TD_SIMD(blocks_pack)(void *packed, int32_t n_out, int32_t n_in, const struct td_format *f,
                          const void *src, int32_t row0, int32_t n_rows)
{
    size_t row_bytes = td_format_bytes(f, n_in);
    bool is_finite = true;
    TD_ASSERT(row0 % 64 == 0 && (n_rows % 64 == 0 || row0 + n_rows == n_out));
    for (int32_t n0 = row0; n0 < row0 + n_rows; n0 += PW) {
        int32_t n_cols = n_out - n0 < PW ? n_out - n0 : PW;
        uint8_t *panel = (uint8_t *)packed + n0 / PW * panel_bytes(f, n_in);
        const uint8_t *from = (const uint8_t *)src + (size_t)(n0 - row0) * row_bytes;
        if (n_cols < PW) memset(panel, 0, (size_t)panel_bytes(f, n_in));
        is_finite &= pack_panels[f->index](f, from, row_bytes, n_in / f->block, n_cols, panel);
    }
    return is_finite;
}

/* pack_line backwards: the group's codes for output c. */
static void unpack_codes(const struct td_format *f, const uint8_t *lines, int c, uint8_t *ret_codes)
{
    int bits = f->bits, n_nibbles = bits >= 4 ? 4 : 0;
    for (int i = 0; i < TD_GROUP; i++) {
        const uint8_t *at = lines + 4 * c + i % 4; /* of the first line */
        int l = i / 4;
        uint32_t code = 0;
        if (bits == 8) {
            ret_codes[i] = at[l * LINE_BYTES] ^ (uint8_t)CODE_FLIP;
            continue;
        }
        if (n_nibbles) code = at[l / 2 * LINE_BYTES] >> l % 2 * 4 & 15;
        if (bits % 4 >= 2)
            code |= (uint32_t)(at[(n_nibbles + l / 4) * LINE_BYTES] >> l % 4 * 2 & 3) << n_nibbles;
        if (bits % 2) code |= (uint32_t)(at[(bits - 1) * LINE_BYTES] >> l & 1) << (bits - 1);
        ret_codes[i] = (uint8_t)code;
    }
}

/* pack_factors backwards. */
static void unpack_factors(enum td_scales s, const uint8_t *from, int c, struct td_group *ret)
{
    if (s == TD_SCALES_E8M0) {
        ret->d = from[c];
        return;
    }
    memcpy(&ret->d, from + 2 * c, 2);
    if (has_m(s)) memcpy(&ret->m, from + 2 * PW + 2 * c, 2);
}

/* pack_scales backwards. */
static void unpack_scales(enum td_scales s, const uint8_t *from, int c, struct td_group *ret)
{
    for (int h = 0; h < 2; h++) {
        uint8_t v = from[c + (has_halves(s) ? h * PW : 0)];
        bool is_u4 = s == TD_SCALES_U4_MIN_HALVES;
        ret->scale[h] = is_u4 ? v & 15 : v;
        ret->min[h] = is_u4 ? v >> 4 : s == TD_SCALES_U8_MIN ? from[PW + c] : 0;
    }
}

void TD_SIMD(blocks_read_row)(const struct td_weight *w, int32_t row, float *ret_values)
{
    const struct td_format *f = w->format;
    const uint8_t *at = (const uint8_t *)w->data + row / PW * panel_bytes(f, w->n_in), *head = at;
    int c = row % PW;
    for (int32_t g = 0; g < w->n_in / TD_GROUP; g++) {
        struct td_group group = {0};
        if (g % (f->block / TD_GROUP) == 0) {
            head = at;
            at += block_head_bytes(f->scales);
        }
        unpack_factors(f->scales, is_long(f->scales) ? head : at, c, &group);
        if (is_long(f->scales)) unpack_scales(f->scales, at, c, &group);
        ptrdiff_t step = group_bytes(f->bits, f->scales);
        unpack_codes(f, at + step - f->bits * LINE_BYTES, c, group.codes);
        td_group_read(f, &group, ret_values + g * TD_GROUP);
        at += step;
    }
}

/* ---- products -------------------------------------------------------------------------------- */

size_t TD_SIMD(blocks_scratch_bytes)(int32_t n_rows, int32_t n_in)
{
    return td_blocks_scratch_bytes(n_rows, n_in);
}

void TD_SIMD(blocks_prepare)(const struct td_gemm_args *a, int part, int n_parts)
{
    int32_t n_groups = a->w->n_in / TD_GROUP;
    int64_t lo, hi; /* groups of all rows, so that one row can be shared by all parts */
    td_part_range((int64_t)a->n_rows * n_groups, 1, part, n_parts, &lo, &hi);
    for (int64_t i = lo; i < hi; i++)
        group_x_make(a->x + i / n_groups * a->x_stride + i % n_groups * TD_GROUP,
                     (struct td_group_x *)a->scratch + i);
}

/* What a kernel's code depends on; constants after inlining. */
struct kind {
    int bits, offset;
    const int8_t *values;
    enum td_scales scales;
};

/* Whether codes are signed bytes, or (where the table multiplies unsigned ones) have 128 added. */
TD_INLINE bool is_wide(struct kind k) { return k.bits == 8 || k.values; }

/* v moved by n bits to the left, or -n to the right */
TD_INLINE ivec i_shift(ivec v, int n) { return n > 0 ? i_slli(v, n) : n < 0 ? i_srli(v, -n) : v; }

/* The codes 4l to 4l + 3 of all outputs, a byte each. */
TD_INLINE ivec codes_load(struct kind k, const uint8_t *lines, int l)
{
    if (k.bits == 8) return i_load(lines + l * LINE_BYTES);
    ivec c = i_zero();
    int high = k.bits >= 4 ? 4 : 0; /* bits below the pairs; lines too */
    if (k.bits >= 4)
        c = i_and(i_shift(i_load(lines + l / 2 * LINE_BYTES), l % 2 ? -4 : 0), i_set1(0x0f0f0f0f));
    if (k.bits % 4 >= 2)
        c = i_or(c, i_and(i_shift(i_load(lines + (high + l / 4) * LINE_BYTES), high - l % 4 * 2),
                          i_set1(0x03030303 << high)));
    if (k.bits % 2)
        c = i_or(c, i_and(i_shift(i_load(lines + (k.bits - 1) * LINE_BYTES), k.bits - 1 - l),
                          i_set1(0x01010101 << (k.bits - 1))));
    return k.values ? i_lookup(k.values, c) : c;
}

/* The sum of a group, or of half h of one, begins with what makes codes values. */
TD_INLINE ivec sum_start(struct kind k, int32_t x_sum)
{
    int zero = is_wide(k) ? CODE_OFFSET : k.offset;
    return zero ? i_set1(-zero * x_sum) : i_zero();
}

#ifdef BLOCKS_PAIRS
/* add_lines for the pairs of rows, where one instruction multiplies two rows; returns how many rows
 * have been added. */
TD_INLINE int add_pairs(struct kind k, int n_rows, int l0, int l1, const uint8_t *lines,
                        const struct td_group_x *x, int32_t n_groups, ivec sum[][2])
{
    ipairs pairs[(QUANT_ROWS + 1) / 2][2];
    int n = n_rows / 2 * 2;
    TD_UNROLL
    for (int r = 0; r < n; r += 2) pairs[r / 2][0] = pairs[r / 2][1] = i_pairs_zero();
    TD_UNROLL
    for (int l = l0; l < l1; l += 2)
        for (int v = 0; v < 2; v++) {
            ivec w0 = codes_load(k, lines + v * 4 * VW, l),
                 w1 = codes_load(k, lines + v * 4 * VW, l + 1);
            TD_UNROLL
            for (int r = 0; r < n; r += 2)
                pairs[r / 2][v] = i_dot_pairs(pairs[r / 2][v], w0, w1, x[r * n_groups].codes,
                                              x[(r + 1) * n_groups].codes, 4 * l);
        }
    TD_UNROLL
    for (int r = 0; r < n; r++)
        for (int v = 0; v < 2; v++)
            sum[r][v] = i_add(sum[r][v], i_of_pairs(pairs[r / 2][v], r % 2));
    return n;
}
#endif

/* Adds lines [l0, l1) of a group to the sums. */
TD_INLINE void add_lines(struct kind k, int n_rows, int l0, int l1, const uint8_t *lines,
                         const struct td_group_x *x, int32_t n_groups, ivec sum[][2])
{
    int r0 = 0;
#ifdef BLOCKS_PAIRS
    r0 = add_pairs(k, n_rows, l0, l1, lines, x, n_groups, sum);
    if (r0 == n_rows) return;
#endif
    TD_UNROLL
    for (int l = l0; l < l1; l++) {
        ivec w0 = codes_load(k, lines, l), w1 = codes_load(k, lines + 4 * VW, l);
        TD_UNROLL
        for (int r = r0; r < n_rows; r++) {
            int32_t v;
            memcpy(&v, x[r * n_groups].codes + 4 * l, sizeof v);
            sum[r][0] = i_dot(is_wide(k), sum[r][0], w0, i_set1(v));
            sum[r][1] = i_dot(is_wide(k), sum[r][1], w1, i_set1(v));
        }
    }
}

/* Integer scales and minima of half h for vector v of the panel, as f32: products of them and sums
 * of a half are below 2^24 in size, and so exact. */
TD_INLINE vec scale_load(enum td_scales s, const uint8_t *scales, int h, int v)
{
    if (s == TD_SCALES_U4_MIN_HALVES)
        return i_to_f32(i_and(i_load_u8(scales + h * PW + v * VW), i_set1(15)));
    if (s == TD_SCALES_U8_MIN) return i_to_f32(i_load_u8(scales + v * VW));
    return i_to_f32(i_load_i8(scales + h * PW + v * VW));
}
TD_INLINE vec min_load(enum td_scales s, const uint8_t *scales, int h, int v)
{
    return i_to_f32(s == TD_SCALES_U8_MIN ? i_load_u8(scales + PW + v * VW)
                                          : i_srli(i_load_u8(scales + h * PW + v * VW), 4));
}

/* d and m of the panel's outputs, in front of a group or of a block. */
struct factors {
    vec d[2], m[2];
};
TD_INLINE struct factors factors_load(enum td_scales s, const uint8_t *b)
{
    struct factors f;
    const uint16_t *h = (const uint16_t *)(const void *)b;
    for (int v = 0; v < 2; v++) {
        f.d[v] = s == TD_SCALES_E8M0 ? v_load_e8m0(b + v * VW) : v_load_f16(h + v * VW);
        f.m[v] = has_m(s) ? v_load_f16(h + PW + v * VW) : v_zero();
    }
    return f;
}

/* What the outputs of a group are multiplied with: w, and m or m * min of blocks.h. */
TD_INLINE struct factors group_factors(enum td_scales s, const struct factors *f,
                                       const uint8_t *scales)
{
    struct factors of_group = *f;
    for (int v = 0; v < 2; v++) {
        if (s == TD_SCALES_I8 || s == TD_SCALES_U8_MIN)
            of_group.d[v] = v_mul(f->d[v], scale_load(s, scales, 0, v));
        if (s == TD_SCALES_U8_MIN) of_group.m[v] = v_mul(f->m[v], min_load(s, scales, 0, v));
    }
    return of_group;
}

/* The sums of a group whose halves have scales: to f32, times them. */
TD_INLINE void add_halves(struct kind k, int n_rows, const uint8_t *scales,
                          const struct td_group_x *x, int32_t n_groups, vec all[][2])
{
    const uint8_t *lines = scales + scale_bytes(k.scales);
    TD_UNROLL
    for (int h = 0; h < 2; h++) {
        ivec sum[QUANT_ROWS][2];
        TD_UNROLL
        for (int r = 0; r < n_rows; r++) {
            int32_t hi = x[r * n_groups].sum_hi;
            sum[r][0] = sum[r][1] = sum_start(k, h ? hi : x[r * n_groups].sum - hi);
        }
        add_lines(k, n_rows, 4 * h, 4 * h + 4, lines, x, n_groups, sum);
        TD_UNROLL
        for (int v = 0; v < 2; v++) {
            vec scale = scale_load(k.scales, scales, h, v);
            TD_UNROLL
            for (int r = 0; r < n_rows; r++)
                all[r][v] = h ? v_fma(i_to_f32(sum[r][v]), scale, all[r][v])
                              : v_mul(i_to_f32(sum[r][v]), scale);
        }
    }
}

/* The minima of halves: y -= low * (m * s). */
TD_INLINE void add_low(struct kind k, int n_rows, const struct factors *f, const uint8_t *scales,
                       const struct td_group_x *x, int32_t n_groups, vec y[][2])
{
    TD_UNROLL
    for (int v = 0; v < 2; v++) {
        vec min_lo = min_load(k.scales, scales, 0, v), min_hi = min_load(k.scales, scales, 1, v);
        TD_UNROLL
        for (int r = 0; r < n_rows; r++) {
            const struct td_group_x *xr = x + r * n_groups;
            vec low = v_mul(min_lo, i_to_f32(i_set1(xr->sum - xr->sum_hi)));
            low = v_fma(min_hi, i_to_f32(i_set1(xr->sum_hi)), low);
            y[r][v] = v_fnma(low, v_mul(f->m[v], v_set1(xr->s)), y[r][v]);
        }
    }
}

/* One group of the chains of all rows. */
TD_INLINE void add_group(struct kind k, int n_rows, const struct factors *block,
                         const uint8_t *scales, const struct td_group_x *x, int32_t n_groups,
                         vec y[][2])
{
    struct factors f = group_factors(k.scales, block, scales);
    vec all[QUANT_ROWS][2];
    if (has_halves(k.scales)) {
        add_halves(k, n_rows, scales, x, n_groups, all);
    } else {
        ivec sum[QUANT_ROWS][2];
        TD_UNROLL
        for (int r = 0; r < n_rows; r++) sum[r][0] = sum[r][1] = sum_start(k, x[r * n_groups].sum);
        add_lines(k, n_rows, 0, 8, scales + scale_bytes(k.scales), x, n_groups, sum);
        TD_UNROLL
        for (int r = 0; r < n_rows; r++)
            for (int v = 0; v < 2; v++) all[r][v] = i_to_f32(sum[r][v]);
    }
    TD_UNROLL
    for (int r = 0; r < n_rows; r++) {
        const struct td_group_x *xr = x + r * n_groups;
        for (int v = 0; v < 2; v++) {
            y[r][v] = v_fma(all[r][v], v_mul(f.d[v], v_set1(xr->s)), y[r][v]);
            if (k.scales == TD_SCALES_F16_MIN) y[r][v] = v_fma(f.m[v], v_set1(xr->s_sum), y[r][v]);
            if (k.scales == TD_SCALES_U8_MIN) y[r][v] = v_fnma(f.m[v], v_set1(xr->s_sum), y[r][v]);
        }
    }
    if (k.scales == TD_SCALES_U4_MIN_HALVES) add_low(k, n_rows, &f, scales, x, n_groups, y);
}

TD_INLINE void prefetch(const uint8_t *b, ptrdiff_t bytes)
{
    for (ptrdiff_t at = 0; at < bytes; at += 64)
        _mm_prefetch((const char *)b + AHEAD_BYTES + at, _MM_HINT_T0);
}

/* Where a pass over a panel finds its share of the next panel, to prefetch into L2: `step` bytes
 * for each group, 0 for none. */
struct ahead {
    const uint8_t *at;
    ptrdiff_t step;
};

TD_INLINE void prefetch_ahead(struct ahead *next)
{
    for (ptrdiff_t at = 0; at < next->step; at += 64)
        _mm_prefetch((const char *)next->at + at, _MM_HINT_T1);
    next->at += next->step;
}

TD_INLINE void tile(struct kind k, int n_rows, const struct td_group_x *x, int32_t n_groups,
                    const uint8_t *b, struct ahead next, float *sums)
{
    vec y[QUANT_ROWS][2];
    struct factors f;
    ptrdiff_t step = group_bytes(k.bits, k.scales);
    TD_UNROLL
    for (int r = 0; r < n_rows; r++) y[r][0] = y[r][1] = v_zero();
    if (is_long(k.scales)) {
        for (int32_t g = 0; g < n_groups; g += GROUPS) {
            f = factors_load(k.scales, b);
            b += factor_bytes(k.scales);
            for (int32_t i = g; i < g + GROUPS; i++, b += step) {
                prefetch(b, step);
                prefetch_ahead(&next);
                add_group(k, n_rows, &f, b, x + i, n_groups, y);
            }
        }
    } else {
        for (int32_t g = 0; g < n_groups; g++, b += step) {
            prefetch(b, step);
            prefetch_ahead(&next);
            f = factors_load(k.scales, b);
            add_group(k, n_rows, &f, b + factor_bytes(k.scales), x + g, n_groups, y);
        }
    }
    TD_UNROLL
    for (int r = 0; r < n_rows; r++) {
        v_store(sums + r * PW, y[r][0]);
        v_store(sums + r * PW + VW, y[r][1]);
    }
}

/* One function per format and number of rows, so that the sums are registers. */
typedef void (*blocks_tile_fn)(const struct td_group_x *x, int32_t n_groups, const uint8_t *b,
                               struct ahead next, float *sums);
#define TILE_FN(n, fn, ...)                                                                        \
    static __attribute__((noinline)) void tile_##fn##_##n(const struct td_group_x *x,              \
                                                          int32_t n_groups, const uint8_t *b,      \
                                                          struct ahead next, float *sums)          \
    {                                                                                              \
        tile((struct kind){__VA_ARGS__}, n, x, n_groups, b, next, sums);                           \
    }
#define TILE_NAME(n, fn) tile_##fn##_##n,
#define TILE_FNS(fn, label, number, n_values, n_bytes, bits, offset, values, scales)               \
    QUANT_EACH_ROWS(TILE_FN, fn, bits, offset, values, scales)
#define TILE_NAMES(fn, ...) [TD_INDEX_##fn] = {NULL, QUANT_EACH_ROWS(TILE_NAME, fn)},
TD_EACH_BLOCK_FORMAT(TILE_FNS)
static const blocks_tile_fn tiles[TD_N_BLOCK_FORMATS][QUANT_ROWS + 1] = {
    TD_EACH_BLOCK_FORMAT(TILE_NAMES)};

/* Rows [r0, r1) x panels [p0, p1), in tiles as equal as possible. */
static void pass(const struct td_gemm_args *a, int32_t r0, int32_t r1, int32_t p0, int32_t p1)
{
    const blocks_tile_fn *tile_of = tiles[a->w->format->index];
    int32_t most = has_halves(a->w->format->scales) ? QUANT_ROWS_HALVES : QUANT_ROWS,
            n_rows = r1 - r0, n_tiles = (n_rows + most - 1) / most,
            n_groups = a->w->n_in / TD_GROUP;
    ptrdiff_t stride = panel_bytes(a->w->format, a->w->n_in);
    /* All passes over a panel fetch the next one together, so that memory works all the time. */
    ptrdiff_t step = n_tiles > 1 ? (stride / n_tiles + n_groups - 1) / n_groups : 0;
    alignas(64) float sums[QUANT_ROWS * PW];
    for (int32_t p = p0; p < p1; p++)
        for (int32_t i = 0; i < n_tiles; i++) {
            int32_t row = r0 + (int32_t)((int64_t)n_rows * i / n_tiles),
                    n = r0 + (int32_t)((int64_t)n_rows * (i + 1) / n_tiles) - row;
            const uint8_t *panel = (const uint8_t *)a->w->data + p * stride;
            tile_of[n](td_blocks_row(a, row), n_groups, panel,
                       (struct ahead){panel + stride + i * (stride / n_tiles), step}, sums);
            finish(a, p, row, n, sums);
        }
}

void TD_SIMD(blocks_gemm)(const struct td_gemm_args *a, int part, int n_parts)
{
    int64_t n_panels = (a->w->n_out + PW - 1) / PW, p0 = 0, p1 = n_panels, r0 = 0, r1 = a->n_rows;
    if (n_panels >= n_parts || a->n_rows < n_parts)
        td_part_range(n_panels, 1, part, n_parts, &p0, &p1);
    else
        td_part_range(a->n_rows, 1, part, n_parts, &r0, &r1);
    int64_t row_bytes = (int64_t)(a->w->n_in / TD_GROUP) * (int64_t)sizeof(struct td_group_x),
            n = ROWS_BYTES / row_bytes / 12 * 12; /* whole tiles of 6 and of 4 */
    if (n < 12) n = 12;
    for (int64_t r = r0; r < r1; r += n)
        pass(a, (int32_t)r, (int32_t)(r + n < r1 ? r + n : r1), (int32_t)p0, (int32_t)p1);
}

#endif
