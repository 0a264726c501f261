/* i8_amx.c - integer products by the tiles of AMX: one instruction multiplies 16 rows x 64 k by
 * 64 k x 16 outputs, and its sums are exact in int32 whatever their order. So what scaled_avx512.c
 * makes of them has the bits of every other table.
 *
 * Two tiles of rows meet two of outputs, so that 4 loads serve 4 products. A block of a panel stays
 * in L1 while all pairs of tiles use it; their sums wait in `sums`. */
#include <immintrin.h>
#include <stdbool.h>

#include "kernels/cpu/amx.h"
#include "kernels/cpu/tile_amx.h"

enum {
    K = 64,                           /* of one instruction */
    COLS = TD_AMX_I8_COLS,            /* outputs of a panel: two tiles */
    LINE = 4 * COLS,                  /* bytes that hold 4 k of every output */
    STEP = K / 4 * LINE,              /* bytes of a step: 2 KiB */
    KB = 8,                           /* steps of a block: 16 KiB */
    AHEAD_BYTES = 8192,               /* how far ahead the first pair of tiles prefetches */
    HALF = LINE / 2,                  /* from a tile of outputs to the next */
    SUMS_STRIDE = COLS * sizeof(int), /* bytes from a row of sums to the next */
};

/* One or two tiles of rows by n_steps steps of a panel. */
static inline __attribute__((always_inline)) void pass(bool is_pair, int32_t rows, const int8_t *x,
                                                       const int8_t *x2, size_t x_stride,
                                                       const uint8_t *lines, int32_t n_steps,
                                                       bool fetches, int32_t *sums)
{
    int32_t *sums2 = sums + (ptrdiff_t)rows * COLS;
    TILE_LOAD(0, sums, SUMS_STRIDE);
    TILE_LOAD(1, sums + COLS / 2, SUMS_STRIDE);
    if (is_pair) {
        TILE_LOAD(2, sums2, SUMS_STRIDE);
        TILE_LOAD(3, sums2 + COLS / 2, SUMS_STRIDE);
    }
    for (int32_t s = 0; s < n_steps; s++, lines += STEP, x += K, x2 += K) {
        TILE_LOAD(6, lines, LINE);
        TILE_LOAD(4, x, x_stride);
        TILE_DOT_I8_U8(0, 4, 6);
        TILE_LOAD(7, lines + HALF, LINE);
        TILE_DOT_I8_U8(1, 4, 7);
        if (is_pair) {
            TILE_LOAD(5, x2, x_stride);
            TILE_DOT_I8_U8(2, 5, 6);
            TILE_DOT_I8_U8(3, 5, 7);
        }
        for (int32_t at = 0; fetches && at < STEP; at += 64)
            _mm_prefetch((const char *)lines + AHEAD_BYTES + at, _MM_HINT_T0);
    }
    TILE_STORE(0, sums, SUMS_STRIDE);
    TILE_STORE(1, sums + COLS / 2, SUMS_STRIDE);
    if (is_pair) {
        TILE_STORE(2, sums2, SUMS_STRIDE);
        TILE_STORE(3, sums2 + COLS / 2, SUMS_STRIDE);
    }
}

void td_amx_i8_begin(int32_t rows) { tiles_begin(rows); }
void td_amx_i8_end(void) { tiles_end(); }

void td_amx_i8_panel(const struct td_amx_rows *t, const int8_t *x, size_t x_stride,
                     const uint8_t *lines, int32_t n_k, int32_t *sums)
{
    int32_t n_steps = n_k / K, block = t->n <= 2 ? n_steps : KB;
    for (int32_t s0 = 0, n; s0 < n_steps; s0 += n) {
        n = n_steps - s0 < block ? n_steps - s0 : block;
        for (int32_t i = 0; i < t->n; i += 2) {
            const int8_t *x0 = x + (size_t)td_amx_first_row(t, i) * x_stride + s0 * K,
                         *x1 = x + (size_t)td_amx_first_row(t, i + 1) * x_stride + s0 * K;
            int32_t *to = sums + (ptrdiff_t)i * t->rows * COLS;
            const uint8_t *at = lines + (ptrdiff_t)s0 * STEP;
            if (i + 1 < t->n)
                pass(true, t->rows, x0, x1, x_stride, at, n, i == 0, to);
            else
                pass(false, t->rows, x0, x0, x_stride, at, n, i == 0, to);
        }
    }
}
