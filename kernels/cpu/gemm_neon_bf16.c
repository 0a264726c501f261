/* gemm_neon_bf16.c - the product with bf16 weights for aarch64 CPUs with BFMMLA (FEAT_BF16): one
 * instruction multiplies 2 rows x 4 k by 4 k x 2 outputs and adds to 2 x 2 sums in f32. Products
 * with other weights are those of gemm_neon.c.
 *
 * An output is one chain of BFMMLA along ascending k, 4 k at a time, k filled up with zeros to a
 * multiple of 4. A row's lanes know nothing of the other row of its pair, so its bits do not depend
 * on company (I1); a last row without a partner has zeros beside it. The instruction rounds twice
 * for each pair of k, to odd, and takes subnormal numbers for zero, whatever the mode of the
 * thread: other bits than gemm_neon.c has, and so another name for the table.
 *
 * Weights lie in panels of PW outputs; a line holds 4 k: [pair of outputs][output][k]. Prepared x
 * lies in tiles of up to TILE_PAIRS pairs of rows, [tile][n_in / 4][pair][row][k]. Rows are taken
 * in blocks whose prepared form fits L2, and each block passes over the panels from front to back.
 * How fast that is has not been measured: it has run under emulation only. */
#define TD_SIMD(name) td_neonbf16_##name
#include "kernels/cpu/vec_neon.h"

#include <stdalign.h>
#include <stdbool.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/finish_simd.h"
#include "kernels/part.h"

#define TD_UNROLL _Pragma("GCC unroll 32")

enum {
    PW = 2 * VW,
    K = 4,                  /* of one instruction */
    LINE = PW * K,          /* weights of a line: two cache lines of 64 bytes */
    PAIR = 2 * K,           /* values of x that one instruction reads */
    TILE_PAIRS = 3,         /* x 8 pairs of outputs: 24 registers of sums, 3 of x, 1 of weights */
    ROWS_BYTES = 512 << 10, /* prepared rows of one pass over the panels: half of an L2 */
    AHEAD_BYTES = 4096,     /* how far ahead lines are prefetched into L1 */
};

static int32_t n_lines(int32_t n_in) { return (n_in + K - 1) / K; }

size_t td_neonbf16_packed_bytes(int32_t n_out, int32_t n_in, enum td_dtype dtype)
{
    if (dtype != TD_BF16) return td_neon_packed_bytes(n_out, n_in, dtype);
    return (size_t)((n_out + PW - 1) / PW) * (size_t)n_lines(n_in) * LINE * sizeof(uint16_t);
}

void td_neonbf16_pack(void *packed, int32_t n_out, int32_t n_in, enum td_dtype dtype,
                      const void *src, enum td_dtype src_dtype, int32_t row0, int32_t n_rows)
{
    if (dtype != TD_BF16) {
        td_neon_pack(packed, n_out, n_in, dtype, src, src_dtype, row0, n_rows);
        return;
    }
    TD_ASSERT(row0 % 64 == 0 && (n_rows % 64 == 0 || row0 + n_rows == n_out));
    for (int32_t n0 = row0; n0 < row0 + n_rows; n0 += PW) {
        uint16_t *panel = (uint16_t *)packed + (size_t)(n0 / PW) * (size_t)n_lines(n_in) * LINE;
        for (int32_t k0 = 0; k0 < n_in; k0 += K, panel += LINE)
            for (int32_t c = 0; c < PW; c++)
                for (int32_t k = k0; k < k0 + K; k++) {
                    int64_t at = (int64_t)(n0 - row0 + c) * n_in + k;
                    bool is_there = n0 + c < n_out && k < n_in;
                    uint16_t v = 0;
                    if (is_there && src_dtype == TD_BF16)
                        memcpy(&v, (const char *)src + 2 * at, sizeof v);
                    else if (is_there)
                        v = td_f32_to_bf16(td_widen(src, src_dtype, at));
                    panel[c * K + k - k0] = v;
                }
    }
}

/* The rows in pairs, the pairs in tiles as equal as possible. */
struct pair_tiles {
    int32_t n_pairs, n_tiles;
};
static struct pair_tiles pair_tiles_of(int32_t n_rows)
{
    int32_t n_pairs = (n_rows + 1) / 2;
    return (struct pair_tiles){n_pairs, (n_pairs + TILE_PAIRS - 1) / TILE_PAIRS};
}
static int32_t tile_first(const struct pair_tiles *t, int64_t i)
{
    return (int32_t)(t->n_pairs * i / t->n_tiles);
}

size_t td_neonbf16_gemm_scratch_bytes(int32_t n_rows, int32_t n_in)
{
    size_t bytes = (size_t)pair_tiles_of(n_rows).n_pairs * (size_t)n_lines(n_in) * PAIR * 2,
           plain = td_neon_gemm_scratch_bytes(n_rows, n_in);
    bytes = (bytes + 63) & ~(size_t)63;
    return bytes > plain ? bytes : plain;
}

/* Lines [l0, l1) of rows `row` and row + 1, a line of the scratch every `step` values. */
static void prepare_pair(const struct td_gemm_args *a, int32_t row, int32_t l0, int32_t l1,
                         ptrdiff_t step, uint16_t *to)
{
    int32_t n_in = a->w->n_in;
    for (int r = 0; r < 2; r++) {
        const float *x = a->x + (row + r) * a->x_stride;
        bool is_there = row + r < a->n_rows;
        for (int32_t l = l0; l < l1; l++) {
            int32_t n = n_in - l * K < K ? n_in - l * K : K;
            float four[K] = {0};
            if (is_there) memcpy(four, x + l * K, (size_t)n * sizeof *four);
            vst1_u16(to + l * step + r * K, vmovn_u32(bf16_bits4(vld1q_f32(four))));
        }
    }
}

void td_neonbf16_gemm_prepare(const struct td_gemm_args *a, int part, int n_parts)
{
    if (a->w->format->dtype != TD_BF16) {
        td_neon_gemm_prepare(a, part, n_parts);
        return;
    }
    if (a->n_rows <= 0) return;
    struct pair_tiles t = pair_tiles_of(a->n_rows);
    int64_t lines = n_lines(a->w->n_in), t0 = 0, t1 = t.n_tiles, l0 = 0, l1 = lines;
    if (t.n_tiles >= n_parts)
        td_part_range(t.n_tiles, 1, part, n_parts, &t0, &t1);
    else
        td_part_range(lines, 16, part, n_parts, &l0, &l1);
    for (int64_t i = t0; i < t1; i++) {
        int32_t first = tile_first(&t, i), n = tile_first(&t, i + 1) - first;
        uint16_t *tile = (uint16_t *)a->scratch + first * lines * PAIR;
        for (int32_t p = 0; p < n; p++)
            prepare_pair(a, 2 * (first + p), (int32_t)l0, (int32_t)l1, n * PAIR, tile + p * PAIR);
    }
}

TD_INLINE bfloat16x8_t load_bf16(const uint16_t *p) { return vreinterpretq_bf16_u16(vld1q_u16(p)); }

/* sums[row][output] of n_pairs pairs of rows over all lines of a panel */
TD_INLINE void tile_body(int n_pairs, const uint16_t *x, const uint16_t *b, int32_t lines,
                         float (*sums)[PW])
{
    float32x4_t acc[TILE_PAIRS][PW / 2];
    TD_UNROLL
    for (int p = 0; p < n_pairs; p++) TD_UNROLL
    for (int c = 0; c < PW / 2; c++) acc[p][c] = vdupq_n_f32(0);
    for (int32_t l = 0; l < lines; l++, x += n_pairs * PAIR, b += LINE) {
        bfloat16x8_t xs[TILE_PAIRS];
        __builtin_prefetch((const char *)b + AHEAD_BYTES);
        __builtin_prefetch((const char *)b + AHEAD_BYTES + 64);
        TD_UNROLL
        for (int p = 0; p < n_pairs; p++) xs[p] = load_bf16(x + p * PAIR);
        TD_UNROLL
        for (int c = 0; c < PW / 2; c++) {
            bfloat16x8_t w = load_bf16(b + c * 2 * K);
            TD_UNROLL
            for (int p = 0; p < n_pairs; p++) acc[p][c] = vbfmmlaq_f32(acc[p][c], xs[p], w);
        }
    }
    TD_UNROLL
    for (int p = 0; p < n_pairs; p++) TD_UNROLL
    for (int c = 0; c < PW / 2; c++) {
        vst1_f32(&sums[2 * p][2 * c], vget_low_f32(acc[p][c]));
        vst1_f32(&sums[2 * p + 1][2 * c], vget_high_f32(acc[p][c]));
    }
}

typedef void (*pair_tile_fn)(const uint16_t *x, const uint16_t *b, int32_t lines,
                             float (*sums)[PW]);
#define PAIR_TILE(n)                                                                               \
    static __attribute__((noinline)) void pair_tile_##n(const uint16_t *x, const uint16_t *b,      \
                                                        int32_t lines, float(*sums)[PW])           \
    {                                                                                              \
        tile_body(n, x, b, lines, sums);                                                           \
    }
PAIR_TILE(1)
PAIR_TILE(2)
PAIR_TILE(3)
static const pair_tile_fn pair_tiles[TILE_PAIRS + 1] = {NULL, pair_tile_1, pair_tile_2,
                                                        pair_tile_3};

/* Tiles [t0, t1) x panels [p0, p1). */
static void pass(const struct td_gemm_args *a, const struct pair_tiles *t, int64_t t0, int64_t t1,
                 int64_t p0, int64_t p1)
{
    int32_t lines = n_lines(a->w->n_in);
    alignas(64) float sums[2 * TILE_PAIRS][PW];
    for (int64_t p = p0; p < p1; p++)
        for (int64_t i = t0; i < t1; i++) {
            int32_t first = tile_first(t, i), n = tile_first(t, i + 1) - first,
                    n_rows = a->n_rows - 2 * first < 2 * n ? a->n_rows - 2 * first : 2 * n;
            pair_tiles[n]((const uint16_t *)a->scratch + (int64_t)first * lines * PAIR,
                          (const uint16_t *)a->w->data + p * lines * LINE, lines, sums);
            finish(a, (int32_t)p, 2 * first, n_rows, (const float *)sums);
        }
}

void td_neonbf16_gemm(const struct td_gemm_args *a, int part, int n_parts)
{
    if (a->w->format->dtype != TD_BF16) {
        td_neon_gemm(a, part, n_parts);
        return;
    }
    if (a->n_rows <= 0) return;
    struct pair_tiles t = pair_tiles_of(a->n_rows);
    int64_t n_panels = (a->w->n_out + PW - 1) / PW, p0 = 0, p1 = n_panels, t0 = 0, t1 = t.n_tiles;
    if (n_panels >= n_parts || t.n_tiles < n_parts)
        td_part_range(n_panels, 1, part, n_parts, &p0, &p1);
    else
        td_part_range(t.n_tiles, 1, part, n_parts, &t0, &t1);
    int64_t tile_bytes = (int64_t)n_lines(a->w->n_in) * TILE_PAIRS * PAIR * 2,
            n = ROWS_BYTES / tile_bytes;
    if (n < 1) n = 1;
    for (int64_t i = t0; i < t1; i += n) pass(a, &t, i, i + n < t1 ? i + n : t1, p0, p1);
}
