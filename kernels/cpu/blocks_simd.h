/* blocks_simd.h - the product with weights in block formats, written in the integer operations that
 * blocks_avx512.c and blocks_avx2.c define before they include it. blocks.h says what is computed.
 *
 * Weights lie in panels of PW outputs. Of each group of 32 k a panel holds the f16 factors of its
 * outputs, then lines. With 8 bits there are 8 lines, of 4 consecutive codes for each output; with
 * 4 bits 4 lines, whose low halves hold 4 codes and whose high halves the next 4. So one broadcast
 * of 4 activations meets a whole line, and no sum runs across lanes. The bytes are those of the
 * file.
 *
 * A tile is up to QUANT_ROWS rows x one panel, with all its sums in registers. Rows are taken in
 * blocks whose prepared form fits L2, and each block passes over the panels from front to back. */
#ifndef TD_KERNELS_BLOCKS_SIMD_H
#define TD_KERNELS_BLOCKS_SIMD_H

#include <stdalign.h>
#include <stdbool.h>

#include "kernels/blocks.h"
#include "kernels/cpu/cpu.h"
#include "kernels/formats/formats.h"

#if defined(__clang__)
#define TD_UNROLL _Pragma("clang loop unroll(full)")
#else
#define TD_UNROLL _Pragma("GCC unroll 32")
#endif

enum {
    PW = 2 * VW,
    LINE_BYTES = 4 * PW,
    ROWS_BYTES = 256 << 10, /* prepared rows of one pass over the panels: a quarter of L2 */
    AHEAD_BYTES = 4096,     /* how far ahead lines are prefetched into L1 */
};

TD_INLINE int n_lines(int bits) { return bits; }
TD_INLINE ptrdiff_t group_bytes(int bits) { return 2 * PW + n_lines(bits) * LINE_BYTES; }

static ptrdiff_t panel_bytes(const struct td_format *f, int32_t n_in)
{
    return n_in / TD_GROUP * group_bytes(f->bits);
}

size_t TD_SIMD(blocks_packed_bytes)(int32_t n_out, int32_t n_in, const struct td_format *format)
{
    return (size_t)((n_out + PW - 1) / PW) * (size_t)panel_bytes(format, n_in);
}

/* Writes the lines of output `c` of a panel's group. */
static void pack_codes(const struct td_format *f, const uint8_t *codes, int c, uint8_t *lines)
{
    for (int l = 0; l < n_lines(f->bits); l++) {
        uint32_t four, next;
        if (f->bits == 8) {
            memcpy(&four, codes + 4 * l, 4);
            four ^= CODE_FLIP;
        } else {
            memcpy(&four, codes + 8 * l, 4);
            memcpy(&next, codes + 8 * l + 4, 4);
            four |= next << 4;
        }
        memcpy(lines + l * LINE_BYTES + 4 * c, &four, 4);
    }
}

void TD_SIMD(blocks_pack)(void *packed, int32_t n_out, int32_t n_in, const struct td_format *f,
                          const void *src, int32_t row0, int32_t n_rows)
{
    size_t row_bytes = td_format_bytes(f, n_in);
    int32_t per_block = f->block / TD_GROUP, n_groups = n_in / TD_GROUP;
    TD_ASSERT(row0 % 64 == 0 && (n_rows % 64 == 0 || row0 + n_rows == n_out));
    for (int32_t n0 = row0; n0 < row0 + n_rows; n0 += PW) {
        int32_t n_cols = n_out - n0 < PW ? n_out - n0 : PW;
        uint8_t *panel = (uint8_t *)packed + n0 / PW * panel_bytes(f, n_in);
        if (n_cols < PW) memset(panel, 0, (size_t)panel_bytes(f, n_in));
        for (int32_t g = 0; g < n_groups; g++) {
            uint8_t *to = panel + g * group_bytes(f->bits);
            const uint8_t *from = (const uint8_t *)src + (size_t)(n0 - row0) * row_bytes +
                                  (size_t)(g / per_block) * (size_t)f->block_bytes;
            for (int32_t c = 0; c < n_cols; c++) {
                struct td_group w;
                f->split(from + (size_t)c * row_bytes, g % per_block, &w);
                memcpy(to + 2 * c, &w.d, 2);
                pack_codes(f, w.codes, c, to + 2 * PW);
            }
        }
    }
}

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

/* Line l of a group as codes of 8 bits. */
TD_INLINE ivec line_load(int bits, const uint8_t *lines, int l)
{
    if (bits == 8) return i_load(lines + l * LINE_BYTES);
    ivec both = i_load(lines + l / 2 * LINE_BYTES);
    return i_and(l % 2 ? i_srli(both, 4) : both, i_set1(0x0f0f0f0f));
}

/* What the products of a group begin with, so that codes may stand for code - 2^shift. */
TD_INLINE ivec sum_start(int bits, int offset, const struct td_group_x *x)
{
    int zero = bits == 8 ? CODE_OFFSET : offset;
    return zero ? i_set1(-zero * x->sum) : i_zero();
}

TD_INLINE void tile(int bits, int offset, int n_rows, const struct td_group_x *x, int32_t n_groups,
                    const uint8_t *b, float *sums)
{
    vec y[QUANT_ROWS][2];
    TD_UNROLL
    for (int r = 0; r < n_rows; r++) y[r][0] = y[r][1] = v_zero();
    for (int32_t g = 0; g < n_groups; g++, b += group_bytes(bits)) {
        const uint8_t *lines = b + 2 * PW;
        ivec sum[QUANT_ROWS][2];
        TD_UNROLL
        for (int r = 0; r < n_rows; r++)
            sum[r][0] = sum[r][1] = sum_start(bits, offset, x + r * n_groups + g);
        TD_UNROLL
        for (int l = 0; l < 8; l++) {
            if (bits == 8 || l % 2 == 0) {
                const char *at = (const char *)lines + (bits == 8 ? l : l / 2) * LINE_BYTES;
                _mm_prefetch(at + AHEAD_BYTES, _MM_HINT_T0);
                if (LINE_BYTES > 64) _mm_prefetch(at + AHEAD_BYTES + 64, _MM_HINT_T0);
            }
            ivec w0 = line_load(bits, lines, l), w1 = line_load(bits, lines + 4 * VW, l);
            TD_UNROLL
            for (int r = 0; r < n_rows; r++) {
                int32_t four;
                memcpy(&four, x[r * n_groups + g].codes + 4 * l, 4);
                sum[r][0] = i_dot(bits == 8, sum[r][0], w0, i_set1(four));
                sum[r][1] = i_dot(bits == 8, sum[r][1], w1, i_set1(four));
            }
        }
        vec d0 = v_load_f16((const uint16_t *)(const void *)b),
            d1 = v_load_f16((const uint16_t *)(const void *)b + VW);
        TD_UNROLL
        for (int r = 0; r < n_rows; r++) {
            vec s = v_set1(x[r * n_groups + g].s);
            y[r][0] = v_fma(i_to_f32(sum[r][0]), v_mul(d0, s), y[r][0]);
            y[r][1] = v_fma(i_to_f32(sum[r][1]), v_mul(d1, s), y[r][1]);
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
                               float *sums);
#define TILE_FN(n, fn, bits, offset)                                                               \
    static __attribute__((noinline)) void tile_##fn##_##n(                                         \
        const struct td_group_x *x, int32_t n_groups, const uint8_t *b, float *sums)               \
    {                                                                                              \
        tile(bits, offset, n, x, n_groups, b, sums);                                               \
    }
#define TILE_NAME(n, fn, ...) tile_##fn##_##n,
#define TILE_FNS(fn, label, number, n_values, n_bytes, bits, offset, scales)                       \
    QUANT_EACH_ROWS(TILE_FN, fn, bits, offset)
#define TILE_NAMES(fn, ...) [TD_INDEX_##fn] = {NULL, QUANT_EACH_ROWS(TILE_NAME, fn)},
TD_EACH_BLOCK_FORMAT(TILE_FNS)
static const blocks_tile_fn tiles[TD_N_BLOCK_FORMATS][QUANT_ROWS + 1] = {
    TD_EACH_BLOCK_FORMAT(TILE_NAMES)};

/* Adds bias, then the residual. Columns past n_out are not written. */
static void finish(const struct td_gemm_args *a, int32_t panel, int32_t row, int32_t n_rows,
                   const float *sums)
{
    for (int h = 0; h < 2; h++) {
        int32_t n = panel * PW + h * VW, n_cols = a->w->n_out - n < VW ? a->w->n_out - n : VW;
        if (n_cols <= 0) break;
        for (int32_t r = 0; r < n_rows; r++) {
            float *y = a->y + (row + r) * a->y_stride + n;
            vec v = v_load(sums + r * PW + h * VW);
            if (a->bias) v = v_add(v, v_load_n(a->bias + n, n_cols));
            if (a->accumulate) v = v_add(v_load_n(y, n_cols), v);
            v_store_n(y, v, n_cols);
        }
    }
}

/* Rows [r0, r1) x panels [p0, p1), in tiles as equal as possible. */
static void pass(const struct td_gemm_args *a, int32_t r0, int32_t r1, int32_t p0, int32_t p1)
{
    const blocks_tile_fn *tile_of = tiles[a->w->format->index];
    int32_t n_rows = r1 - r0, n_tiles = (n_rows + QUANT_ROWS - 1) / QUANT_ROWS;
    ptrdiff_t stride = panel_bytes(a->w->format, a->w->n_in);
    alignas(64) float sums[QUANT_ROWS * PW];
    for (int32_t p = p0; p < p1; p++)
        for (int32_t i = 0; i < n_tiles; i++) {
            int32_t row = r0 + (int32_t)((int64_t)n_rows * i / n_tiles),
                    n = r0 + (int32_t)((int64_t)n_rows * (i + 1) / n_tiles) - row;
            tile_of[n](td_blocks_row(a, row), a->w->n_in / TD_GROUP,
                       (const uint8_t *)a->w->data + p * stride, sums);
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
            n = ROWS_BYTES / row_bytes / QUANT_ROWS * QUANT_ROWS;
    if (n < QUANT_ROWS) n = QUANT_ROWS;
    for (int64_t r = r0; r < r1; r += n)
        pass(a, (int32_t)r, (int32_t)(r + n < r1 ? r + n : r1), (int32_t)p0, (int32_t)p1);
}

#endif
