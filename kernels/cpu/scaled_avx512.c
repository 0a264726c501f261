/* scaled_avx512.c - products with scaled formats for AVX-512 with VNNI and, with SCALED_PAIRS
 * (scaled_avx512bf16.c), the dot of bf16 pairs. Codes of kind I8 are stored with 128 added, because
 * the first operand of vpdpbusd is unsigned; the start of a sum takes it away. The same codes meet
 * signed ones in the tiles of AMX (i8_amx.c), for the table `amx`.
 *
 * Kind I8 on one core of an AMD EPYC (Zen 5) beside tests (load 13), CPU time, best of 7 calls (of
 * one run: +- 0.3 to 4 %), 11264x2048, GOP/s, where the dot of bytes alone has 1,060 to 1,090
 * (tandem-bench kernels --dtype w8a8 --only 'gate,up 11264' --max-threads 1 --cpu-time --best
 * --repeats 7 --memory 256MiB):
 *                                                       m=16   m=64   m=512
 *   each tile meets the whole panel                     592    443    390
 *   512 k of a panel, in L1, meet all rows of a pass    719    877    816 */
#include "kernels/cpu/amx.h"
#include "kernels/cpu/vec_avx512.h"

#define ivec __m512i
enum { I8_ROWS = 12 }; /* x 2 vectors: 24 sums, 2 of weights, 1 broadcast */
#define I8_EACH_ROWS(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12)
enum { ROWS_FEW = 4 }; /* up to which rows are multiplied while widening */
#define FEW_EACH_ROWS(X, ...)                                                                      \
    X(1, __VA_ARGS__) X(2, __VA_ARGS__) X(3, __VA_ARGS__) X(4, __VA_ARGS__)
#define I8_FLIP 0x80u
#define I8_OFFSET (-128)

TD_INLINE ivec i_set1(int32_t v) { return _mm512_set1_epi32(v); }
TD_INLINE ivec i_load(const void *p) { return _mm512_loadu_si512(p); }
TD_INLINE ivec i_and(ivec a, ivec b) { return _mm512_and_si512(a, b); }
TD_INLINE ivec i_or(ivec a, ivec b) { return _mm512_or_si512(a, b); }
/* (a & b) | c */
TD_INLINE ivec i_and_or(ivec a, ivec b, ivec c) { return _mm512_ternarylogic_epi32(a, b, c, 0xea); }
TD_INLINE ivec i_srli(ivec a, int n) { return _mm512_srli_epi32(a, (unsigned)n); }
TD_INLINE ivec i_load_u8(const uint8_t *p)
{
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
}
TD_INLINE vec i_to_f32(ivec a) { return _mm512_cvtepi32_ps(a); }
TD_INLINE ivec i_from_f32(vec a) { return _mm512_cvtps_epi32(a); } /* half to even */
TD_INLINE ivec i_add(ivec a, ivec b) { return _mm512_add_epi32(a, b); }
TD_INLINE ivec i_max(ivec a, ivec b) { return _mm512_max_epi32(a, b); }
TD_INLINE ivec i_bits(vec a) { return _mm512_castps_si512(a); }
TD_INLINE vec v_bits(ivec a) { return _mm512_castsi512_ps(a); }
TD_INLINE void i_store(int32_t *p, ivec a) { _mm512_storeu_si512(p, a); }
/* numbers in -128..127 */
TD_INLINE void i_store_i8(int8_t *p, ivec a)
{
    _mm_storeu_si128((__m128i *)(void *)p, _mm512_cvtepi32_epi8(a));
}
TD_INLINE ivec i_dot(int is_wide, ivec sum, ivec w, ivec x)
{
    (void)is_wide;
    return _mm512_dpbusd_epi32(sum, w, x);
}
/* table[code] */
TD_INLINE vec v_lookup(const float *table, ivec codes)
{
    return _mm512_permutexvar_ps(codes, v_load(table));
}
/* td_e4m3_to_f32. The seven bits below the sign become the top of a fraction and an exponent that
 * lacks 120. Codes without exponent come from a table: made an f32 without exponent, one of them
 * would have a product of its vector cost Intel's cores some 150 cycles. */
TD_INLINE vec v_from_e4m3(ivec c)
{
    static const float tiny[16] = {0,       0x1p-9f, 0x2p-9f, 0x3p-9f,
                                   0x4p-9f, 0x5p-9f, 0x6p-9f, 0x7p-9f}; /* bit 3 of c is 0 */
    __m512i size = _mm512_slli_epi32(_mm512_and_si512(c, i_set1(0x7f)), 20),
            value = _mm512_add_epi32(size, i_set1(120 << 23));
    __mmask16 is_tiny = _mm512_testn_epi32_mask(c, i_set1(0x78));
    value = _mm512_mask_permutexvar_epi32(value, is_tiny, c, _mm512_loadu_si512(tiny));
    /* (sign & 0x80000000) | value */
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(
        _mm512_slli_epi32(c, 24), i_set1((int32_t)0x80000000u), value, 0xea));
}
TD_INLINE uint16_t f16_bits(float f) { return _cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT); }

#include "kernels/cpu/scaled_simd.h"

#ifdef TD_HAS_AMX
/* ---- integer products by tiles --------------------------------------------------------------- */

enum {
    TILES_FROM = 4,   /* rows; fewer wait for memory, by tiles longer than by vectors */
    TILES_ROWS = 256, /* of one pass over the panels, whose sums wait in 32 KiB */
};
_Static_assert(TD_AMX_I8_COLS == (int)PW, "a panel is two tiles of outputs");

/* What the sums of rows begin with: as in i8_pass, and the k behind the last whole tile. */
static void start_sums(const struct td_gemm_args *a, const struct td_scaled_scratch *s,
                       const struct td_amx_rows *t, int32_t r0, const uint8_t *lines, int32_t *sums)
{
    size_t stride = td_scaled_codes_stride(a->w->n_in), n = td_scaled_round4(a->w->n_in),
           k0 = n / TD_AMX_I8_K * TD_AMX_I8_K;
    for (int32_t i = 0; i < t->n; i++)
        for (int32_t r = 0; r < t->rows; r++, sums += PW) {
            int32_t row = r0 + td_amx_first_row(t, i) + r;
            const int8_t *x = s->codes + (size_t)row * stride;
            ivec lo = i_set1(I8_OFFSET * s->sums[row]), hi = lo;
            for (size_t k = k0; k < n; k += 4) {
                int32_t v;
                memcpy(&v, x + k, sizeof v);
                lo = i_dot(true, lo, i_load(lines + k * PW), i_set1(v));
                hi = i_dot(true, hi, i_load(lines + k * PW + 4 * VW), i_set1(v));
            }
            i_store(sums, lo);
            i_store(sums + VW, hi);
        }
}

/* i8_pass, by tiles */
static void tiles_pass(const struct td_gemm_args *a, int32_t r0, int32_t r1, int32_t p0, int32_t p1)
{
    const struct td_scaled_scratch s = td_scaled_scratch_at(a->scratch, a->n_rows, a->w->n_in);
    const struct panel p = panel_of(a->w->format, a->w->n_in);
    const struct td_amx_rows t = td_amx_rows_of(r1 - r0);
    size_t stride = td_scaled_codes_stride(a->w->n_in);
    int32_t n_k = (int32_t)td_scaled_round4(a->w->n_in) / TD_AMX_I8_K * TD_AMX_I8_K;
    alignas(64) int32_t sums[TILES_ROWS * PW];
    td_amx_i8_begin(t.rows);
    for (int32_t i = p0; i < p1; i++) {
        const uint8_t *lines = (const uint8_t *)a->w->data + (size_t)i * p.bytes + p.lines_at;
        start_sums(a, &s, &t, r0, lines, sums);
        td_amx_i8_panel(&t, s.codes + (size_t)r0 * stride, stride, lines, n_k, sums);
        for (int32_t tile = 0; tile < t.n; tile++) {
            int32_t first = td_amx_first_row(&t, tile);
            /* but for the first rows, which the tile before it has */
            i8_finish(a, &s, &p, i, r0 + first, tile * t.rows - first, t.rows,
                      sums + tile * t.rows * PW);
        }
    }
    td_amx_i8_end();
}

void td_amx_scaled_gemm(const struct td_gemm_args *a, int part, int n_parts)
{
    if (a->w->format->scaled.kind != TD_SCALED_I8 || a->n_rows < TILES_FROM) {
        td_avx512_scaled_gemm(a, part, n_parts);
        return;
    }
    int64_t n_panels = (a->w->n_out + PW - 1) / PW, p0 = 0, p1 = n_panels, r0 = 0, r1 = a->n_rows;
    if (n_panels >= n_parts || a->n_rows < n_parts)
        td_part_range(n_panels, 1, part, n_parts, &p0, &p1);
    else
        td_part_range(a->n_rows, 1, part, n_parts, &r0, &r1);
    if (p0 >= p1) return;
    for (int64_t r = r0; r < r1; r += TILES_ROWS)
        tiles_pass(a, (int32_t)r, (int32_t)(r + TILES_ROWS < r1 ? r + TILES_ROWS : r1), (int32_t)p0,
                   (int32_t)p1);
}
#endif
