/* gemm_simd.h - y = x . W^T, written in the vector operations of vec_*.h. Each table's
 * gemm_*.c compiles it and says how fast it is.
 *
 * Weights lie in panels of PW output columns, [n_out / PW][n_in][PW], the last panel filled up with
 * zeros. A line is one k of one panel: what one turn of the inner loop reads. A panel is read from
 * front to back exactly once. Prepared x lies in tiles of at most TILE_ROWS rows, [tile][n_in][ld],
 * f32, already rounded for bf16 weights: one line per k as well.
 *
 * There are three ways through the same chains of multiply-adds.
 *
 * Few rows: several panels at once, so that enough independent chains and streams are in flight.
 * Memory is the limit.
 *
 * Few tiles: widen in registers while multiplying. The pass of each tile over a panel prefetches
 * its share of the next panel.
 *
 * Many tiles: widen a block of KB lines once and use it for every tile of up to ROW_TILES tiles.
 * The accumulators of PANEL_GROUP panels wait in `sums` while the next KB lines are taken, so that
 * x is walked in blocks that fit L2.
 *
 * Parts take panels, or tiles where panels would leave a part without work.
 *
 * With bf16 weights subnormal numbers count as zero, also in the outputs. The dot instruction knows
 * no other way, and so the chains of all tables have the same bits. */
#ifndef TD_KERNELS_GEMM_SIMD_H
#define TD_KERNELS_GEMM_SIMD_H

#include <stdalign.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/finish_simd.h"
#include "kernels/cpu/tile_simd.h"
#include "kernels/part.h"

enum {
    /* lines widened at a time, 32 KiB with AVX-512: 128, 384 and 512 lines were no faster */
    KB = 256,
    PANEL_GROUP = 4,
    ROW_TILES = 24,
    WIDEN_FROM_TILES = 9, /* from this many tiles on widening once pays; fewer widen in registers */
    /* how far ahead few rows prefetch into L1, per panel: measured, gemm_avx512.c */
    AHEAD_BYTES = 4096,
    /* Lines of pairs are twice as long, and CPUs with a fast dot read one stream best: one panel at
     * a time, and from 3 rows on as few tiles. */
    PAIR_FEW_ROWS = 2,
    PAIR_PANELS_1 = 1,
    PAIR_PANELS_2 = 1,
};

/* How a table stores bf16 weights. One that stores pairs has a table beside it for other types. */
#ifdef GEMM_OTHER_TYPES
#define BF16_LINE LINE_PAIR
TD_TILES(tile_near, LINE_PAIR, false, PW, ld, 1);
#else
#define BF16_LINE LINE_BF16
TD_TILES(tile_near, LINE_F32, false, PW, ld, 1);
TD_TILES(tile_mem_f32, LINE_F32, true, PW, ld, 1);
TD_TILES(tile_mem_f16, LINE_F16, true, PW, ld, 1);
#endif
TD_TILES(tile_mem_bf16, BF16_LINE, true, PW, ld, 1);

TD_INLINE enum line_kind line_kind_of(enum td_dtype dtype)
{
    return dtype == TD_F32 ? LINE_F32 : dtype == TD_F16 ? LINE_F16 : BF16_LINE;
}

/* How n_rows are cut into tiles: as equal as possible, so that 13 rows are 7 + 6 and not 12 + 1. */
struct row_tiles {
    int32_t n_tiles, small, n_large; /* the first n_large tiles have small + 1 rows */
    int32_t ld;                      /* floats per line of prepared x: 1, 4, 8 or 12 */
};

static struct row_tiles row_tiles_of(int32_t n_rows)
{
    struct row_tiles t = {.n_tiles = (n_rows + TILE_ROWS - 1) / TILE_ROWS};
    t.small = n_rows / t.n_tiles;
    t.n_large = n_rows % t.n_tiles;
    int32_t most = t.small + (t.n_large > 0);
    t.ld = most == 1 ? 1 : (most + 3) / 4 * 4;
    return t;
}
static int32_t tile_first(const struct row_tiles *t, int32_t i)
{
    return i * t->small + (i < t->n_large ? i : t->n_large);
}
static int32_t tile_rows(const struct row_tiles *t, int32_t i)
{
    return t->small + (i < t->n_large);
}

TD_INLINE ptrdiff_t panel_bytes_of(enum line_kind kind, int32_t n_in)
{
    return line_count(kind, n_in) * line_bytes(kind);
}

size_t TD_SIMD(packed_bytes)(int32_t n_out, int32_t n_in, enum td_dtype dtype)
{
#ifdef GEMM_OTHER_TYPES
    if (dtype != TD_BF16) return GEMM_OTHER_TYPES(packed_bytes)(n_out, n_in, dtype);
#endif
    return (size_t)((n_out + PW - 1) / PW) * (size_t)panel_bytes_of(line_kind_of(dtype), n_in);
}

void TD_SIMD(pack)(void *packed, int32_t n_out, int32_t n_in, enum td_dtype dtype, const void *src,
                   enum td_dtype src_dtype, int32_t row0, int32_t n_rows)
{
#ifdef GEMM_OTHER_TYPES
    if (dtype != TD_BF16) {
        GEMM_OTHER_TYPES(pack)(packed, n_out, n_in, dtype, src, src_dtype, row0, n_rows);
        return;
    }
#endif
    enum { K_STEP = 64 };
    size_t elem = td_dtype_bytes(dtype), src_elem = td_dtype_bytes(src_dtype);
    enum line_kind kind = line_kind_of(dtype);
    TD_ASSERT(row0 % 64 == 0 && (n_rows % 64 == 0 || row0 + n_rows == n_out));
    TD_ASSERT(dtype != TD_F16 || src_dtype == TD_F16);
    for (int32_t n0 = row0; n0 < row0 + n_rows; n0 += PW) {
        int32_t n_cols = n_out - n0 < PW ? n_out - n0 : PW;
        uint8_t *panel = (uint8_t *)packed + n0 / PW * panel_bytes_of(kind, n_in);
        for (int32_t k0 = 0; k0 < n_in; k0 += K_STEP) {
            int32_t n_k = n_in - k0 < K_STEP ? n_in - k0 : K_STEP;
            union {
                float f32[PW][K_STEP];
                uint16_t u16[PW][K_STEP];
            } t; /* the corner to transpose; a strided read of src itself would use one cache set */
            memset(&t, 0, sizeof t);
            for (int32_t c = 0; c < n_cols; c++) {
                const char *row = (const char *)src +
                                  ((size_t)(n0 - row0 + c) * (size_t)n_in + (size_t)k0) * src_elem;
                if (dtype == src_dtype) {
                    memcpy(dtype == TD_F32 ? (void *)t.f32[c] : (void *)t.u16[c], row,
                           (size_t)n_k * elem);
                    continue;
                }
                for (int32_t k = 0; k < n_k; k++) {
                    float v = td_widen(row, src_dtype, k);
                    if (dtype == TD_F32)
                        t.f32[c][k] = v;
                    else
                        t.u16[c][k] = td_f32_to_bf16(v);
                }
            }
            if (kind == LINE_PAIR)
                for (int32_t k = 0; k < n_k; k += 2) {
                    uint32_t *line = (uint32_t *)(void *)(panel + (k0 + k) / 2 * line_bytes(kind));
                    for (int c = 0; c < PW; c++)
                        line[c] = (uint32_t)t.u16[c][k] << 16 | t.u16[c][k + 1];
                }
            for (int32_t k = 0; kind != LINE_PAIR && k < n_k; k++) {
                uint8_t *line = panel + (k0 + k) * line_bytes(kind);
                if (dtype == TD_F32)
                    for (int c = 0; c < PW; c++) ((float *)line)[c] = t.f32[c][k];
                else if (dtype == TD_F16)
                    for (int c = 0; c < PW; c++) ((uint16_t *)line)[c] = t.u16[c][k];
                else
                    for (int c = 0; c < VW; c++)
                        ((uint32_t *)line)[c] = (uint32_t)t.u16[c + VW][k] << 16 | t.u16[c][k];
            }
        }
    }
}

/* Enough for the prepared rows of any type. */
size_t TD_SIMD(gemm_scratch_bytes)(int32_t n_rows, int32_t n_in)
{
    if (n_rows <= 0) return 0;
    struct row_tiles t = row_tiles_of(n_rows);
    return ((size_t)t.n_tiles * (size_t)t.ld * (size_t)n_in * sizeof(float) + 63) & ~(size_t)63;
}

void TD_SIMD(gemm_prepare)(const struct td_gemm_args *a, int part, int n_parts)
{
    if (a->n_rows <= 0) return;
#ifdef GEMM_OTHER_TYPES
    if (a->w->format->dtype != TD_BF16) {
        GEMM_OTHER_TYPES(gemm_prepare)(a, part, n_parts);
        return;
    }
#endif
    struct row_tiles t = row_tiles_of(a->n_rows);
    int32_t n_in = a->w->n_in;
    enum line_kind kind = line_kind_of(a->w->format->dtype);
    bool by_tiles = t.n_tiles >= n_parts;
    int64_t t0 = 0, t1 = t.n_tiles, k0 = 0, k1 = n_in;
    if (by_tiles)
        td_part_range(t.n_tiles, 1, part, n_parts, &t0, &t1);
    else
        td_part_range(n_in, 64, part, n_parts, &k0, &k1);
    for (int64_t i = t0; i < t1; i++) {
        const float *rows[TILE_ROWS];
        int32_t n_rows = tile_rows(&t, (int32_t)i), first = tile_first(&t, (int32_t)i);
        for (int32_t r = 0; r < n_rows; r++) rows[r] = a->x + (first + r) * a->x_stride;
        float *dst = (float *)a->scratch + i * t.ld * line_count(kind, n_in);
#ifdef GEMM_OTHER_TYPES
        tile_pack_pairs(dst, t.ld, rows, n_rows, (int)k0, (int)k1, NULL);
#else
        tile_pack_rows(dst, t.ld, rows, n_rows, (int)k0, (int)k1, kind == LINE_BF16, NULL);
#endif
    }
}

/* n_rows <= FEW_ROWS rows through n_panels panels at once. */
TD_INLINE void few_rows(enum line_kind kind, int n_rows, int n_panels, const float *a, ptrdiff_t ld,
                        const uint8_t *b, ptrdiff_t panel_bytes, int32_t n_lines,
                        float (*sums)[FEW_ROWS][PW])
{
    vec acc[4][FEW_ROWS][2];
    TD_UNROLL
    for (int p = 0; p < n_panels; p++) TD_UNROLL
    for (int r = 0; r < n_rows; r++) acc[p][r][0] = acc[p][r][1] = v_zero();
    for (int32_t k = 0; k < n_lines; k++) {
        vec ak[FEW_ROWS];
        TD_UNROLL
        for (int r = 0; r < n_rows; r++) ak[r] = v_set1(a[r]);
        TD_UNROLL
        for (int p = 0; p < n_panels; p++) {
            vec b0, b1;
            const uint8_t *line = b + p * panel_bytes;
            _mm_prefetch((const char *)line + AHEAD_BYTES, _MM_HINT_T0);
            if (line_bytes(kind) > 64)
                _mm_prefetch((const char *)line + AHEAD_BYTES + 64, _MM_HINT_T0);
            line_load(kind, line, &b0, &b1);
            TD_UNROLL
            for (int r = 0; r < n_rows; r++) {
                acc[p][r][0] = line_fma(kind, ak[r], b0, acc[p][r][0]);
                acc[p][r][1] = line_fma(kind, ak[r], b1, acc[p][r][1]);
            }
        }
        a += ld;
        b += line_bytes(kind);
    }
    TD_UNROLL
    for (int p = 0; p < n_panels; p++) TD_UNROLL
    for (int r = 0; r < n_rows; r++)
        v_store(sums[p][r], acc[p][r][0]), v_store(sums[p][r] + VW, acc[p][r][1]);
}

TD_INLINE void gemm_few_rows(enum line_kind kind, int n_rows, int n_panels,
                             const struct td_gemm_args *a, const struct row_tiles *t, int32_t p0,
                             int32_t p1)
{
    int32_t n_lines = line_count(kind, a->w->n_in);
    ptrdiff_t panel_bytes = n_lines * line_bytes(kind);
    alignas(64) float sums[4][FEW_ROWS][PW];
    for (int32_t p = p0, n; p < p1; p += n) {
        const uint8_t *b = (const uint8_t *)a->w->data + p * panel_bytes;
        n = p1 - p >= n_panels ? n_panels : 1;
        if (n > 1)
            few_rows(kind, n_rows, n_panels, a->scratch, t->ld, b, panel_bytes, n_lines, sums);
        else
            few_rows(kind, n_rows, 1, a->scratch, t->ld, b, panel_bytes, n_lines, sums);
        for (int i = 0; i < n; i++) finish(a, p + i, 0, n_rows, sums[i][0]);
    }
}

/* Each of the T passes over a panel prefetches 1/T of the next panel into L2, so that memory works
 * during all passes and not only the first. */
TD_INLINE void gemm_few_tiles(enum line_kind kind, const tile_fn *tile,
                              const struct td_gemm_args *a, const struct row_tiles *t, int32_t p0,
                              int32_t p1, int32_t t0, int32_t t1)
{
    int32_t n_lines = line_count(kind, a->w->n_in);
    ptrdiff_t panel_bytes = n_lines * line_bytes(kind), step = line_bytes(kind) / (t1 - t0);
    alignas(64) float sums[TILE_ROWS][PW];
    for (int32_t p = p0; p < p1; p++)
        for (int32_t i = t0; i < t1; i++) {
            int32_t n_rows = tile_rows(t, i);
            const float *x = (const float *)a->scratch + (int64_t)i * t->ld * n_lines;
            const uint8_t *b = (const uint8_t *)a->w->data + p * panel_bytes;
            tile[n_rows](sums[0], x, t->ld, b, n_lines, true,
                         b + panel_bytes + (i - t0) * n_lines * step, step);
            finish(a, p, tile_first(t, i), n_rows, sums[0]);
        }
}

TD_INLINE void gemm_many_tiles(enum line_kind kind, const struct td_gemm_args *a,
                               const struct row_tiles *t, int32_t p0, int32_t p1, int32_t t0,
                               int32_t t1)
{
    int32_t n_lines = line_count(kind, a->w->n_in),
            n_blocks = (t1 - t0 + ROW_TILES - 1) / ROW_TILES;
    int32_t block_tiles = (t1 - t0 + n_blocks - 1) / n_blocks;
    ptrdiff_t panel_bytes = n_lines * line_bytes(kind);
    bool widens = line_bytes(kind) < 4 * PW;
    alignas(64) float wide[KB * PW];
    alignas(64) float sums[PANEL_GROUP][ROW_TILES * TILE_ROWS][PW];
    for (int32_t tb = t0; tb < t1; tb += block_tiles) {
        int32_t te = tb + block_tiles < t1 ? tb + block_tiles : t1, row0 = tile_first(t, tb);
        for (int32_t pg = p0; pg < p1; pg += PANEL_GROUP) {
            int32_t pe = pg + PANEL_GROUP < p1 ? pg + PANEL_GROUP : p1;
            for (int32_t k0 = 0; k0 < n_lines; k0 += KB) {
                int32_t n_k = n_lines - k0 < KB ? n_lines - k0 : KB;
                for (int32_t p = pg; p < pe; p++) {
                    const uint8_t *b =
                        (const uint8_t *)a->w->data + p * panel_bytes + k0 * line_bytes(kind);
                    const uint8_t *next =
                        p + 1 < pe ? b + panel_bytes
                                   : b - (pe - 1 - pg) * panel_bytes + KB * line_bytes(kind);
                    int64_t next_bytes = n_k * line_bytes(kind),
                            step = (next_bytes / (te - tb) + 63) / 64 * 64;
                    if (widens)
                        for (int32_t k = 0; k < n_k; k++) {
                            vec b0, b1;
                            line_load(kind, b + k * line_bytes(kind), &b0, &b1);
                            v_store(wide + k * PW, b0);
                            v_store(wide + k * PW + VW, b1);
                        }
                    for (int32_t i = tb; i < te; i++) {
                        int64_t from = (i - tb) * step,
                                to = from + step < next_bytes ? from + step : next_bytes;
                        for (int64_t o = from; o < to; o += 64)
                            _mm_prefetch((const char *)next + o, _MM_HINT_T1);
                        const float *x = (const float *)a->scratch + (int64_t)i * t->ld * n_lines +
                                         (int64_t)k0 * t->ld;
                        tile_near[tile_rows(t, i)](sums[p - pg][tile_first(t, i) - row0], x, t->ld,
                                                   widens ? (const uint8_t *)wide : b, n_k, k0 == 0,
                                                   NULL, 0);
                    }
                }
            }
            for (int32_t p = pg; p < pe; p++)
                finish(a, p, row0, tile_first(t, te) - row0, sums[p - pg][0]);
        }
    }
}

TD_INLINE void gemm_kind(enum line_kind kind, const tile_fn *tile, const struct td_gemm_args *a,
                         int part, int n_parts)
{
    if (a->n_rows <= 0) return;
    struct row_tiles t = row_tiles_of(a->n_rows);
    int64_t n_panels = (a->w->n_out + PW - 1) / PW, p0 = 0, p1 = n_panels, t0 = 0, t1 = t.n_tiles;
    if ((n_panels + n_parts - 1) / n_parts * t.n_tiles <=
        n_panels * ((t.n_tiles + n_parts - 1) / n_parts))
        td_part_range(n_panels, 1, part, n_parts, &p0, &p1);
    else
        td_part_range(t.n_tiles, 1, part, n_parts, &t0, &t1);
    if (p0 >= p1 || t0 >= t1) return;
    if (a->n_rows <= (kind == LINE_PAIR ? PAIR_FEW_ROWS : FEW_ROWS)) {
        switch (a->n_rows) { /* 8 or more chains in flight, as many as the registers hold */
        case 1:
            gemm_few_rows(kind, 1, kind == LINE_PAIR ? PAIR_PANELS_1 : FEW_PANELS_1, a, &t,
                          (int32_t)p0, (int32_t)p1);
            break;
        case 2:
            gemm_few_rows(kind, 2, kind == LINE_PAIR ? PAIR_PANELS_2 : FEW_PANELS_2, a, &t,
                          (int32_t)p0, (int32_t)p1);
            break;
#if FEW_ROWS > 2
        case 3:
            gemm_few_rows(kind, 3, FEW_PANELS_3, a, &t, (int32_t)p0, (int32_t)p1);
            break;
        case 4:
            gemm_few_rows(kind, 4, FEW_PANELS_4, a, &t, (int32_t)p0, (int32_t)p1);
            break;
        case 5:
            gemm_few_rows(kind, 5, FEW_PANELS_5, a, &t, (int32_t)p0, (int32_t)p1);
            break;
#endif
        }
    } else if (t1 - t0 < WIDEN_FROM_TILES)
        gemm_few_tiles(kind, tile, a, &t, (int32_t)p0, (int32_t)p1, (int32_t)t0, (int32_t)t1);
    else
        gemm_many_tiles(kind, a, &t, (int32_t)p0, (int32_t)p1, (int32_t)t0, (int32_t)t1);
}

/* A function of its own, so that no arithmetic moves past the change of mode around it. */
static __attribute__((noinline)) void gemm_bf16(const struct td_gemm_args *a, int part, int n_parts)
{
    gemm_kind(BF16_LINE, tile_mem_bf16, a, part, n_parts);
}

void TD_SIMD(gemm)(const struct td_gemm_args *a, int part, int n_parts)
{
    if (a->w->format->dtype == TD_BF16) {
        unsigned was = v_flush_begin();
        gemm_bf16(a, part, n_parts);
        v_flush_end(was);
        return;
    }
#ifdef GEMM_OTHER_TYPES
    GEMM_OTHER_TYPES(gemm)(a, part, n_parts);
#else
    if (a->w->format->dtype == TD_F16)
        gemm_kind(LINE_F16, tile_mem_f16, a, part, n_parts);
    else
        gemm_kind(LINE_F32, tile_mem_f32, a, part, n_parts);
#endif
}

#endif
