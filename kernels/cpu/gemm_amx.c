/* gemm_amx.c - the matrix product with bf16 weights for CPUs with AMX: one instruction multiplies
 * 16 rows x 32 k by 32 k x 16 outputs. Products with weights of other types are those of
 * gemm_avx512.c.
 *
 * What the instruction does for a row, 32 k at a time along ascending k, does not depend on the
 * other rows (I1). ref/amx_chain.h says in plain C what that is: other bits than those of the other
 * tables, and so another class. One row or two are multiplied by AVX-512, with the bits of that
 * chain: memory is their limit, and loads of tiles wait for it longer.
 *
 * Weights lie in panels of PW outputs. A step of a panel is 32 k, two tiles of 16 outputs:
 * [n_in / 32][2][16 pairs of k][16 outputs][2 of k], filled up with zeros. Prepared x is bf16 in
 * tiles of at most 16 rows, as equal as possible: [tile][n_in / 32][rows][32 k].
 *
 * Two tiles of rows meet two of outputs, so that 4 loads serve 4 products. Up to 32 rows the sums
 * stay in their tiles, and memory is the limit. With more rows a block of a panel stays in L1 while
 * all pairs of tiles use it; their sums wait in `sums`. Each pass over a block prefetches its share
 * of the next one. */
#define TD_SIMD(name) td_amx_##name
#include "kernels/cpu/vec_avx512.h"

#include <stdalign.h>
#include <stdbool.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/finish_simd.h"
#include "kernels/cpu/tile_amx.h"
#include "kernels/part.h"

enum {
    PW = 2 * VW,
    K = 32,        /* of one instruction */
    ROWS = 16,     /* of a tile */
    TILE = 16 * K, /* values of a tile of weights */
    STEP = PW * K, /* weights of a step: 2 tiles, 2 KiB */
    STEP_LINES = STEP * 2 / 64,
    KB = 8,             /* steps of a block of a panel: 16 KiB */
    ROW_TILES = 16,     /* that one pass over the panels serves; even */
    PANEL_GROUP = 4,    /* whose sums wait together */
    AHEAD_BYTES = 8192, /* how far ahead a single pass prefetches */
    CHAIN_ROWS = 2,
    CHAIN_AHEAD_BYTES = 4096, /* how far ahead they prefetch */
    CHAIN_PANELS = 4,         /* at most so many are read side by side */
};

static int32_t n_steps_of(int32_t n_in) { return (n_in + K - 1) / K; }

size_t td_amx_packed_bytes(int32_t n_out, int32_t n_in, enum td_dtype dtype)
{
    if (dtype != TD_BF16) return td_avx512_packed_bytes(n_out, n_in, dtype);
    return (size_t)((n_out + PW - 1) / PW) * (size_t)n_steps_of(n_in) * STEP * sizeof(uint16_t);
}

/* The 32 values from k0 on of a row of src as bf16, zeros behind its end. */
static void read_step(const void *src, enum td_dtype src_dtype, int64_t row, int32_t n_in,
                      int32_t k0, uint16_t *ret_values)
{
    int32_t n = n_in - k0 < K ? n_in - k0 : K;
    int64_t at = row * n_in + k0;
    memset(ret_values, 0, K * sizeof *ret_values);
    if (src_dtype == TD_BF16) {
        memcpy(ret_values, (const char *)src + 2 * at, (size_t)n * sizeof *ret_values);
        return;
    }
    for (int32_t k = 0; k < n; k++)
        ret_values[k] = td_f32_to_bf16(td_widen(src, src_dtype, at + k));
}

void td_amx_pack(void *packed, int32_t n_out, int32_t n_in, enum td_dtype dtype, const void *src,
                 enum td_dtype src_dtype, int32_t row0, int32_t n_rows)
{
    if (dtype != TD_BF16) {
        td_avx512_pack(packed, n_out, n_in, dtype, src, src_dtype, row0, n_rows);
        return;
    }
    TD_ASSERT(row0 % 64 == 0 && (n_rows % 64 == 0 || row0 + n_rows == n_out));
    int32_t n_steps = n_steps_of(n_in);
    for (int32_t n0 = row0; n0 < row0 + n_rows; n0 += PW) {
        int32_t n_cols = n_out - n0 < PW ? n_out - n0 : PW;
        uint16_t *step = (uint16_t *)packed + (size_t)(n0 / PW) * (size_t)n_steps * STEP;
        for (int32_t s = 0; s < n_steps; s++, step += STEP) {
            uint32_t pairs[PW][K / 2]; /* of each output */
            memset(pairs, 0, sizeof pairs);
            for (int32_t c = 0; c < n_cols; c++)
                read_step(src, src_dtype, n0 - row0 + c, n_in, s * K, (uint16_t *)pairs[c]);
            for (int32_t c = 0; c < PW; c++)
                for (int32_t p = 0; p < K / 2; p++)
                    memcpy(step + c / VW * TILE + (p * VW + c % VW) * 2, &pairs[c][p], 4);
        }
    }
}

/* ---- preparing ------------------------------------------------------------------------------- */

struct row_tiles {
    int32_t n, rows; /* tiles, and rows of each; the last one may have rows of zeros */
};

static struct row_tiles row_tiles_of(int32_t n_rows)
{
    struct row_tiles t = {.n = (n_rows + ROWS - 1) / ROWS};
    t.rows = (n_rows + t.n - 1) / t.n;
    return t;
}

size_t td_amx_gemm_scratch_bytes(int32_t n_rows, int32_t n_in)
{
    if (n_rows <= 0) return 0;
    struct row_tiles t = row_tiles_of(n_rows);
    size_t bytes = (size_t)t.n * (size_t)t.rows * (size_t)n_steps_of(n_in) * K * sizeof(uint16_t),
           plain = td_avx512_gemm_scratch_bytes(n_rows, n_in);
    return bytes > plain ? bytes : plain;
}

/* Steps [s0, s1) of one row; NULL: of a row of zeros. */
static void prepare_row(const float *x, int32_t n_in, int32_t s0, int32_t s1, int32_t rows,
                        uint16_t *to)
{
    for (int32_t s = s0; s < s1; s++) {
        int32_t n = x ? n_in - s * K : 0, n_lo = n < VW ? n : VW, n_hi = n < K ? n - VW : VW;
        vec lo = v_zero(), hi = v_zero();
        if (n_lo > 0) lo = v_load_n(x + s * K, n_lo);
        if (n_hi > 0) hi = v_load_n(x + s * K + VW, n_hi);
        _mm512_storeu_si512(to + (ptrdiff_t)s * rows * K, (__m512i)_mm512_cvtne2ps_pbh(hi, lo));
    }
}

void td_amx_gemm_prepare(const struct td_gemm_args *a, int part, int n_parts)
{
    if (a->w->format->dtype != TD_BF16) {
        td_avx512_gemm_prepare(a, part, n_parts);
        return;
    }
    if (a->n_rows <= 0) return;
    struct row_tiles t = row_tiles_of(a->n_rows);
    int32_t n_steps = n_steps_of(a->w->n_in);
    int64_t t0 = 0, t1 = t.n, s0 = 0, s1 = n_steps;
    if (t.n >= n_parts)
        td_part_range(t.n, 1, part, n_parts, &t0, &t1);
    else
        td_part_range(n_steps, 2, part, n_parts, &s0, &s1);
    for (int64_t i = t0; i < t1; i++)
        for (int32_t r = 0; r < t.rows; r++) {
            int64_t row = i * t.rows + r;
            prepare_row(row < a->n_rows ? a->x + row * a->x_stride : NULL, a->w->n_in, (int32_t)s0,
                        (int32_t)s1, t.rows,
                        (uint16_t *)a->scratch + (i * n_steps * t.rows + r) * K);
        }
}

/* ---- the product ----------------------------------------------------------------------------- */

/* Where a pass finds what it prefetches: `lines` lines of 64 bytes in each step. */
struct ahead {
    const uint16_t *at;
    int32_t lines;
};

/* One or two tiles of rows, x_tile values apart, by n_steps steps of a panel. sums has rows of PW,
 * the first tile's and then the second's. */
TD_INLINE void pass(bool is_pair, int32_t rows, const uint16_t *x, ptrdiff_t x_tile,
                    const uint16_t *b, int32_t n_steps, bool from_zero, struct ahead next,
                    float *sums)
{
    const ptrdiff_t stride = PW * sizeof *sums;
    float *sums2 = sums + (ptrdiff_t)rows * PW;
    if (from_zero) {
        TILE_ZERO(0);
        TILE_ZERO(1);
        if (is_pair) {
            TILE_ZERO(2);
            TILE_ZERO(3);
        }
    } else {
        TILE_LOAD(0, sums, stride);
        TILE_LOAD(1, sums + VW, stride);
        if (is_pair) {
            TILE_LOAD(2, sums2, stride);
            TILE_LOAD(3, sums2 + VW, stride);
        }
    }
    for (int32_t s = 0; s < n_steps; s++) {
        TILE_LOAD(6, b, 64);
        TILE_LOAD(4, x, 64);
        TILE_DOT_BF16(0, 4, 6);
        TILE_LOAD(7, b + TILE, 64);
        TILE_DOT_BF16(1, 4, 7);
        if (is_pair) {
            TILE_LOAD(5, x + x_tile, 64);
            TILE_DOT_BF16(2, 5, 6);
            TILE_DOT_BF16(3, 5, 7);
        }
        for (int32_t l = 0; l < next.lines; l++)
            _mm_prefetch((const char *)next.at + (ptrdiff_t)l * 64, _MM_HINT_T0);
        next.at += (ptrdiff_t)next.lines * 32;
        b += STEP;
        x += (ptrdiff_t)rows * K;
    }
    TILE_STORE(0, sums, stride);
    TILE_STORE(1, sums + VW, stride);
    if (is_pair) {
        TILE_STORE(2, sums2, stride);
        TILE_STORE(3, sums2 + VW, stride);
    }
}

/* finish for tiles [t0, t1), without the last one's rows of zeros */
static void finish_tiles(const struct td_gemm_args *a, const struct row_tiles *t, int32_t t0,
                         int32_t t1, int32_t panel, const float *sums)
{
    int32_t row = t0 * t->rows, end = t1 * t->rows < a->n_rows ? t1 * t->rows : a->n_rows;
    finish(a, panel, row, end - row, sums);
}

static const uint16_t *tile_at(const struct td_gemm_args *a, const struct row_tiles *t, int32_t i,
                               int32_t step)
{
    return (const uint16_t *)a->scratch +
           ((int64_t)i * n_steps_of(a->w->n_in) + step) * t->rows * K;
}
static const uint16_t *panel_at(const struct td_gemm_args *a, int32_t p, int32_t step)
{
    return (const uint16_t *)a->w->data + ((int64_t)p * n_steps_of(a->w->n_in) + step) * STEP;
}

/* One or two tiles: each panel once, the sums in their tiles all along. */
static void few_tiles(const struct td_gemm_args *a, const struct row_tiles *t, int32_t t0,
                      int32_t t1, int32_t p0, int32_t p1)
{
    alignas(64) float sums[2 * ROWS * PW];
    int32_t n_steps = n_steps_of(a->w->n_in);
    ptrdiff_t x_tile = (ptrdiff_t)n_steps * t->rows * K;
    const uint16_t *x = tile_at(a, t, t0, 0);
    for (int32_t p = p0; p < p1; p++) {
        const uint16_t *b = panel_at(a, p, 0);
        const struct ahead next = {b + AHEAD_BYTES / 2, STEP_LINES};
        if (t1 - t0 == 2)
            pass(true, t->rows, x, x_tile, b, n_steps, true, next, sums);
        else
            pass(false, t->rows, x, 0, b, n_steps, true, next, sums);
        finish_tiles(a, t, t0, t1, p, sums);
    }
}

/* ---- a few rows ------------------------------------------------------------------------------ */

/* The chains of one step (ref/amx_chain.h) for n_rows rows and n_panels panels, whose sums stay in
 * registers. A vector of weights is 16 pairs of one even and one odd k. */
TD_INLINE void few_rows(int n_rows, int n_panels, const uint16_t *x, const uint16_t *b,
                        ptrdiff_t panel_values, int32_t n_steps, float (*sums)[CHAIN_ROWS * PW])
{
    const __m512i odd_half = _mm512_set1_epi32((int)0xffff0000u);
    vec acc[CHAIN_PANELS][CHAIN_ROWS][2];
    TD_UNROLL
    for (int p = 0; p < n_panels; p++) TD_UNROLL
    for (int r = 0; r < n_rows; r++) acc[p][r][0] = acc[p][r][1] = v_zero();
    for (int32_t s = 0; s < n_steps; s++, b += STEP, x += n_rows * K) {
        vec even[CHAIN_PANELS][CHAIN_ROWS][2], odd[CHAIN_PANELS][CHAIN_ROWS][2];
        TD_UNROLL
        for (int p = 0; p < n_panels; p++) TD_UNROLL
        for (int r = 0; r < n_rows; r++) TD_UNROLL
        for (int h = 0; h < 2; h++) even[p][r][h] = odd[p][r][h] = v_zero();
        for (int k = 0; k < K / 2; k++) {
            vec x_even[CHAIN_ROWS], x_odd[CHAIN_ROWS];
            TD_UNROLL
            for (int r = 0; r < n_rows; r++) {
                uint32_t pair;
                memcpy(&pair, x + r * K + 2 * k, sizeof pair);
                __m512i both = _mm512_set1_epi32((int)pair);
                x_even[r] = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
                x_odd[r] = _mm512_castsi512_ps(_mm512_and_si512(both, odd_half));
            }
            TD_UNROLL
            for (int p = 0; p < n_panels; p++) TD_UNROLL
            for (int h = 0; h < 2; h++) {
                const uint16_t *at = b + p * panel_values + h * TILE + k * PW;
                _mm_prefetch((const char *)at + CHAIN_AHEAD_BYTES, _MM_HINT_T0);
                __m512i w = _mm512_load_si512(at);
                vec w_even = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16)),
                    w_odd = _mm512_castsi512_ps(_mm512_and_si512(w, odd_half));
                TD_UNROLL
                for (int r = 0; r < n_rows; r++) {
                    even[p][r][h] = v_fma(x_even[r], w_even, even[p][r][h]);
                    odd[p][r][h] = v_fma(x_odd[r], w_odd, odd[p][r][h]);
                }
            }
        }
        TD_UNROLL
        for (int p = 0; p < n_panels; p++) TD_UNROLL
        for (int r = 0; r < n_rows; r++) TD_UNROLL
        for (int h = 0; h < 2; h++)
            acc[p][r][h] = v_add(acc[p][r][h], v_add(even[p][r][h], odd[p][r][h]));
    }
    TD_UNROLL
    for (int p = 0; p < n_panels; p++) TD_UNROLL
    for (int r = 0; r < n_rows; r++) TD_UNROLL
    for (int h = 0; h < 2; h++) v_store(sums[p] + r * PW + h * VW, acc[p][r][h]);
}

TD_INLINE void gemm_few_rows(int n_rows, int n_panels, const struct td_gemm_args *a, int32_t p0,
                             int32_t p1)
{
    alignas(64) float sums[CHAIN_PANELS][CHAIN_ROWS * PW];
    int32_t n_steps = n_steps_of(a->w->n_in);
    ptrdiff_t panel_values = (ptrdiff_t)n_steps * STEP;
    for (int32_t p = p0, n; p < p1; p += n) {
        n = p1 - p >= n_panels ? n_panels : 1;
        if (n > 1)
            few_rows(n_rows, n_panels, a->scratch, panel_at(a, p, 0), panel_values, n_steps, sums);
        else
            few_rows(n_rows, 1, a->scratch, panel_at(a, p, 0), panel_values, n_steps, sums);
        for (int i = 0; i < n; i++) finish(a, p + i, 0, n_rows, sums[i]);
    }
}

/* ---- tiles ----------------------------------------------------------------------------------- */

/* Tiles [t0, t1) by a block of steps of one panel. */
static void block(const struct td_gemm_args *a, const struct row_tiles *t, int32_t t0, int32_t t1,
                  int32_t p, int32_t s0, int32_t s1, const uint16_t *next, float *sums)
{
    ptrdiff_t x_tile = (ptrdiff_t)n_steps_of(a->w->n_in) * t->rows * K;
    int32_t n_pairs = (t1 - t0 + 1) / 2, lines = (STEP_LINES + n_pairs - 1) / n_pairs;
    const uint16_t *b = panel_at(a, p, s0);
    for (int32_t i = t0; i < t1; i += 2, sums += (ptrdiff_t)2 * t->rows * PW) {
        const uint16_t *x = tile_at(a, t, i, s0);
        const struct ahead ahead = {next, lines};
        if (i + 1 < t1)
            pass(true, t->rows, x, x_tile, b, s1 - s0, s0 == 0, ahead, sums);
        else
            pass(false, t->rows, x, 0, b, s1 - s0, s0 == 0, ahead, sums);
        next += (ptrdiff_t)(s1 - s0) * lines * 32;
    }
}

static void many_tiles(const struct td_gemm_args *a, const struct row_tiles *t, int32_t t0,
                       int32_t t1, int32_t p0, int32_t p1)
{
    alignas(64) float sums[PANEL_GROUP][ROW_TILES * ROWS * PW];
    int32_t n_steps = n_steps_of(a->w->n_in);
    for (int32_t g0 = p0, g1; g0 < p1; g0 = g1) {
        g1 = g0 + PANEL_GROUP < p1 ? g0 + PANEL_GROUP : p1;
        for (int32_t s0 = 0, s1; s0 < n_steps; s0 = s1) {
            s1 = s0 + KB < n_steps ? s0 + KB : n_steps;
            for (int32_t p = g0; p < g1; p++) {
                const uint16_t *next = p + 1 < g1     ? panel_at(a, p + 1, s0)
                                       : s1 < n_steps ? panel_at(a, g0, s1)
                                                      : panel_at(a, g1, 0);
                block(a, t, t0, t1, p, s0, s1, next, sums[p - g0]);
            }
        }
        for (int32_t p = g0; p < g1; p++) finish_tiles(a, t, t0, t1, p, sums[p - g0]);
    }
}

static __attribute__((noinline)) void gemm_bf16(const struct td_gemm_args *a, int part, int n_parts)
{
    struct row_tiles t = row_tiles_of(a->n_rows);
    int64_t n_panels = (a->w->n_out + PW - 1) / PW, p0 = 0, p1 = n_panels, t0 = 0, t1 = t.n;
    if ((n_panels + n_parts - 1) / n_parts * t.n <= n_panels * ((t.n + n_parts - 1) / n_parts))
        td_part_range(n_panels, 1, part, n_parts, &p0, &p1);
    else
        td_part_range(t.n, 1, part, n_parts, &t0, &t1);
    if (p0 >= p1 || t0 >= t1) return;
    switch (a->n_rows) { /* panels by the registers that 2 chains and a sum of each row need */
    case 1:
        gemm_few_rows(1, 4, a, (int32_t)p0, (int32_t)p1);
        return;
    case CHAIN_ROWS:
        gemm_few_rows(CHAIN_ROWS, 2, a, (int32_t)p0, (int32_t)p1);
        return;
    }
    tiles_begin(t.rows);
    int64_t n_blocks = (t1 - t0 + ROW_TILES - 1) / ROW_TILES,
            n = ((t1 - t0 + n_blocks - 1) / n_blocks + 1) / 2 * 2;
    for (int64_t i = t0; i < t1; i += n) {
        int32_t end = (int32_t)(i + n < t1 ? i + n : t1);
        if (end - i <= 2)
            few_tiles(a, &t, (int32_t)i, end, (int32_t)p0, (int32_t)p1);
        else
            many_tiles(a, &t, (int32_t)i, end, (int32_t)p0, (int32_t)p1);
    }
    tiles_end();
}

/* Subnormal numbers count as zero in bias and residual, too, as in the other products of bf16. */
void td_amx_gemm(const struct td_gemm_args *a, int part, int n_parts)
{
    if (a->w->format->dtype != TD_BF16) {
        td_avx512_gemm(a, part, n_parts);
        return;
    }
    if (a->n_rows <= 0) return;
    unsigned was = v_flush_begin();
    gemm_bf16(a, part, n_parts);
    v_flush_end(was);
}
