/* attn_simd.h - attention over a paged KV cache, written in the vector operations of vec_*.h.
 * Each table's attn_*.c compiles it and says how fast it is.
 *
 * A unit of work is a run of rows of one sequence with consecutive positions, times one kv head.
 * Every query head of that kv head is a "query" of the unit, so K and V are read and widened once
 * for rows x heads queries. Keys are walked in tiles of KT positions that start at multiples of KT.
 * For each tile and each query in turn:
 *   s = K . q        K is transposed so that keys are lanes; each score is one chain of
 *                    multiply-adds over head_dim ascending (tile_simd.h)
 *   online softmax   new maximum, old sums scaled by 2^(old - new), p = 2^(s - new)
 *                    (Milakov and Gimelshein 2018)
 *   o += p . V       one chain over the keys of the tile ascending
 * The result of one query is thus a function of its own q, its own range of keys and their absolute
 * positions: the bits are the same alone, in any chunk and in decode. A tile in which a query sees
 * no key is skipped for that query. Keys of a tile that the query may not see get p = 0 exactly;
 * the only trace such a product can leave is the sign of a zero, and the final + 0 removes it. If V
 * of a partly visible tile is not finite (0 * inf is NaN), that tile is computed query by query
 * over the visible keys alone. Over a bf16 cache subnormal numbers count as zero, as in products of
 * bf16 (gemm_simd.h).
 *
 * Parts take units such that the sums of (keys x queries) are as equal as the units allow.
 *
 * Scratch of a part, in f32:
 *   kt   [KT/PW][head_dim][PW]
 *   v    [pad/PW][KT][PW]
 *   q    [tile][head_dim][TILE_ROWS]
 *   s    [queries][KT]
 *   o    [pad/PW][queries][PW]
 *   max, sum  [queries] */
#ifndef TD_KERNELS_ATTN_SIMD_H
#define TD_KERNELS_ATTN_SIMD_H

#include <math.h>
#include <stdalign.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/tile_simd.h"
#include "kernels/cpu/exp_simd.h"
#include "kernels/part.h"

enum {
    KT = 4 * VW,
    STEP_QUERIES = 4 * TILE_ROWS,
    DIRECT_QUERIES = TILE_ROWS, /* up to this many queries read V straight from the cache */
    SLAB_DIMS = 64, /* of long rows of K: 16 KiB of a tile's keys in f32, which L1 holds */
    /* per unit, so that widening a tile of K and V costs a few percent of using it */
    QUERIES = 16 * TILE_ROWS,
};

TD_TILES(tile_scores, LINE_F32, false, KT, TILE_ROWS, 1);
/* Scores of a bf16 cache: by the dot of pairs where the table has it. The chains and bits are those
 * of widened K, because subnormal numbers count as zero in both. */
#ifdef ATTN_PAIRS
TD_TILES(tile_scores_bf16, LINE_PAIR, false, KT, TILE_ROWS, 1);
enum { ATTN_LANE_DIMS = 2 }; /* of bf16 K and q: dims in a lane of 32 bits */
#else
#define tile_scores_bf16 tile_scores
enum { ATTN_LANE_DIMS = 1 };
#endif
TD_TILES(tile_values, LINE_F32, false, PW, 1, KT);

/* o[r] += sum over k of p[r][k] * V of key k, straight from the cache: columns [at, at + PW) of
 * rows[0..n_k), where head_dim is a multiple of PW. The chains are those of tile_values on widened
 * V. This is faster when so few queries use V that widening it first does not pay. */
typedef void (*rows_fn)(float *o, const float *p, const uint8_t *const *rows,
                        const uint8_t *const *next, ptrdiff_t at, int n_k);

TD_INLINE void cache_row(bool bf16, const uint8_t *row, ptrdiff_t at, vec *b0, vec *b1)
{
    *b0 = bf16 ? v_load_bf16((const uint16_t *)row + at) : v_load((const float *)row + at);
    *b1 =
        bf16 ? v_load_bf16((const uint16_t *)row + at + VW) : v_load((const float *)row + at + VW);
}

TD_INLINE void rows_body(bool bf16, int n, float *o, const float *p, const uint8_t *const *rows,
                         const uint8_t *const *next, ptrdiff_t at, int n_k)
{
    vec acc[TILE_ROWS][2];
    TD_UNROLL
    for (int r = 0; r < n; r++) acc[r][0] = v_load(o + r * PW), acc[r][1] = v_load(o + r * PW + VW);
    for (int k = 0; k < n_k; k++) {
        vec b0, b1;
        _mm_prefetch((const char *)next[k] + at * (bf16 ? 2 : 4), _MM_HINT_T1);
        if (!bf16) _mm_prefetch((const char *)next[k] + at * 4 + 64, _MM_HINT_T1);
        cache_row(bf16, rows[k], at, &b0, &b1);
        TD_UNROLL
        for (int r = 0; r < n; r++) {
            vec pr = v_set1(p[r * KT + k]);
            acc[r][0] = v_fma(pr, b0, acc[r][0]);
            acc[r][1] = v_fma(pr, b1, acc[r][1]);
        }
    }
    TD_UNROLL
    for (int r = 0; r < n; r++) v_store(o + r * PW, acc[r][0]), v_store(o + r * PW + VW, acc[r][1]);
}

#define TD_ROWS_FN(n, name, bf16)                                                                  \
    static __attribute__((noinline)) void name##_##n(                                              \
        float *o, const float *p, const uint8_t *const *rows, const uint8_t *const *next,          \
        ptrdiff_t at, int n_k)                                                                     \
    {                                                                                              \
        rows_body(bf16, n, o, p, rows, next, at, n_k);                                             \
    }
TD_EACH_TILE_ROWS(TD_ROWS_FN, cache_values_f32, false)
TD_EACH_TILE_ROWS(TD_ROWS_FN, cache_values_bf16, true)
static const rows_fn cache_values_f32[TILE_ROWS + 1] = {
    NULL, TD_EACH_TILE_ROWS(TD_TILE_NAME, cache_values_f32)};
static const rows_fn cache_values_bf16[TILE_ROWS + 1] = {
    NULL, TD_EACH_TILE_ROWS(TD_TILE_NAME, cache_values_bf16)};

struct attn_buf {
    float *kt, *v, *q, *s, *o, *max, *sum;
    int32_t dim, v_dim; /* of a row of K and of V */
    int32_t n_panels;   /* of PW columns, that hold v_dim */
    int32_t n_places;   /* queries there is room for */
};

static size_t attn_buf_layout(struct attn_buf *b, float *base, int32_t n_heads, int32_t n_kv_heads,
                              int32_t head_dim, int32_t v_dim)
{
    int32_t group = n_heads / n_kv_heads;
    size_t at = 0;
    b->dim = head_dim;
    b->v_dim = v_dim;
    b->n_panels = (v_dim + PW - 1) / PW;
    b->n_places = group <= QUERIES ? QUERIES : (group + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
    size_t pad = (size_t)b->n_panels * PW, places = (size_t)b->n_places;
    size_t sizes[] = {KT * (size_t)head_dim,
                      KT * pad,
                      places * (size_t)head_dim,
                      places * KT,
                      places * pad,
                      places,
                      places * VW};
    float **ptrs[] = {&b->kt, &b->v, &b->q, &b->s, &b->o, &b->max, &b->sum};
    for (int i = 0; i < 7; i++) {
        *ptrs[i] = base ? base + at : NULL;
        at += (sizes[i] + 15) / 16 * 16;
    }
    return at * sizeof(float);
}

size_t TD_SIMD(attn_scratch_bytes)(int32_t n_heads, int32_t n_kv_heads, int32_t head_dim,
                                   int32_t block_size)
{
    struct attn_buf b;
    (void)block_size;
    return attn_buf_layout(&b, NULL, n_heads, n_kv_heads, head_dim, head_dim);
}

/* Lines of K in a panel of keys: dims, or pairs of them. */
TD_INLINE int32_t key_lines(bool bf16, const struct attn_buf *b)
{
    return bf16 ? b->dim / ATTN_LANE_DIMS : b->dim;
}

struct key_walk {
    const uint8_t *base; /* K of this kv head in block 0 */
    const int32_t *table;
    int64_t block_bytes, row_bytes;
    int64_t kv_bytes, v_row_bytes; /* from K of the head to its V; from a row of V to the next */
    int32_t block_size;
};

/* Where K of the KT keys of a tile lies. Keys outside the visible range point at zeros, for K and V
 * alike, so that the loops need no test. */
struct key_tile {
    const uint8_t *k[KT], *v[KT];
    int32_t lo, hi; /* visible: lo <= j < hi */
};

alignas(64) static const uint8_t zero_row[TD_ATTN_ROW_MAX * sizeof(float)];

/* The tile at t0 of which positions [first, end) are visible. */
static void key_tile_find(struct key_tile *t, const struct key_walk *w, int32_t t0, int32_t first,
                          int32_t end)
{
    t->lo = first > t0 ? first - t0 : 0;
    t->hi = end - t0 < KT ? end - t0 : KT; /* below lo past the end: no key */
    for (int32_t j = 0; j < KT; j++) t->k[j] = t->v[j] = zero_row;
    for (int32_t j = t->lo, n; j < t->hi; j += n) { /* a run of keys in one block */
        int32_t at = (t0 + j) % w->block_size;
        const uint8_t *head = w->base + w->table[(t0 + j) / w->block_size] * w->block_bytes,
                      *k = head + at * w->row_bytes, *v = head + w->kv_bytes + at * w->v_row_bytes;
        n = w->block_size - at < t->hi - j ? w->block_size - at : t->hi - j;
        for (int32_t i = 0; i < n; i++, k += w->row_bytes, v += w->v_row_bytes)
            t->k[j + i] = k, t->v[j + i] = v;
    }
}

/* Lane i of VW keys, two bf16 or one f32, to where the scores' lines are. */
TD_INLINE void store_key_lane(bool bf16, float *kt, int32_t i, vec lane)
{
    if (!bf16) {
        v_store(kt + i * PW, lane);
        return;
    }
#ifdef ATTN_PAIRS
    v_store(kt + i * PW, v_swap_halves(lane)); /* the first dim high */
#else
    v_store(kt + i * 2 * PW, v_pair_lo(lane));
    v_store(kt + i * 2 * PW + PW, v_pair_hi(lane));
#endif
}

/* Dims of K: all, or a slab of a long row. */
struct dims {
    int32_t from, n;
};

/* Transposes some dims of K of the tile into b->kt. Here and below the loops prefetch what they
 * will read of the next tile line by line, as they go; prefetching all of it at once would wait for
 * free line buffers. */
TD_INLINE void turn_keys(bool bf16, const struct attn_buf *b, const struct key_tile *t,
                         const struct key_tile *next, struct dims d)
{
    /* a lane of 32 bits holds two bf16 or one f32 */
    int32_t per_lane = bf16 ? 2 : 1, first = d.from / per_lane, n_lanes = first + d.n / per_lane;
    int32_t n_lines = bf16 ? d.n / ATTN_LANE_DIMS : d.n;
    for (int j0 = 0; j0 < KT; j0 += VW) {
        float *kt = b->kt + (ptrdiff_t)(j0 / PW) * n_lines * PW + j0 % PW;
        for (int32_t i0 = first; i0 < n_lanes; i0 += VW) {
            int n = n_lanes - i0 < VW ? n_lanes - i0 : VW;
            vec r[VW];
            TD_UNROLL
            for (int j = 0; j < VW; j++)
                _mm_prefetch((const char *)next->k[j0 + j] + 4 * i0, _MM_HINT_T1);
            if (n == VW) {
                TD_UNROLL
                for (int j = 0; j < VW; j++) r[j] = v_load((const float *)t->k[j0 + j] + i0);
                v_transpose(r);
                TD_UNROLL
                for (int i = 0; i < VW; i++) store_key_lane(bf16, kt, i0 - first + i, r[i]);
                continue;
            }
            vec e[VW]; /* not r, which is to stay in registers */
            TD_UNROLL
            for (int j = 0; j < VW; j++) r[j] = v_load_n((const float *)t->k[j0 + j] + i0, n);
            v_transpose(r);
            TD_UNROLL
            for (int i = 0; i < VW; i++) e[i] = r[i];
            for (int i = 0; i < n; i++) store_key_lane(bf16, kt, i0 - first + i, e[i]);
        }
    }
}

TD_INLINE void widen_values(bool bf16, const struct attn_buf *b, const struct key_tile *t,
                            const struct key_tile *next)
{
    int32_t whole = b->v_dim / VW * VW, pad = b->n_panels * PW;
    for (int j = 0; j < KT; j++) {
        float *to = b->v + (ptrdiff_t)j * PW;
        const uint8_t *v = t->v[j];
        int32_t i = 0;
        for (int32_t at = 0; at < b->v_dim * (bf16 ? 2 : 4); at += 64)
            _mm_prefetch((const char *)next->v[j] + at, _MM_HINT_T1);
        for (; i < whole; i += VW)
            v_store(to + (ptrdiff_t)(i / PW) * KT * PW + i % PW,
                    bf16 ? v_load_bf16((const uint16_t *)v + i) : v_load((const float *)v + i));
        for (; i < pad; i += VW) {
            int n = b->v_dim - i < 0 ? 0 : b->v_dim - i;
            v_store(to + (ptrdiff_t)(i / PW) * KT * PW + i % PW,
                    bf16 ? v_load_bf16_n((const uint16_t *)v + i, n)
                         : v_load_n((const float *)v + i, n));
        }
    }
}

/* Whether V of all visible keys is finite. */
TD_INLINE bool values_finite(bool bf16, const struct attn_buf *b, const struct key_tile *t)
{
    bool finite = true;
    for (int j = t->lo; j < t->hi; j++)
        for (int32_t i = 0; i < b->v_dim; i += VW) {
            int n = b->v_dim - i < VW ? b->v_dim - i : VW;
            finite = finite && v_all_finite(bf16 ? v_load_bf16_n((const uint16_t *)t->v[j] + i, n)
                                                 : v_load_n((const float *)t->v[j] + i, n));
        }
    return finite;
}

/* Turns the scores of one query into probabilities, in place. With `masked`, lanes outside [lo, hi)
 * become 0; otherwise all lanes count. The sum stays spread over VW lanes until the end. Returns
 * the factor for the old sums. */
TD_INLINE float soften(bool masked, float *s, int lo, int hi, vec to_log2, float *max, float *sums)
{
    vec t[4], p[4], none = v_set1(-INFINITY);
    TD_UNROLL
    for (int i = 0; i < 4; i++) {
        t[i] = v_mul(v_load(s + i * VW), to_log2);
        if (masked) {
            int l = lo - i * VW, h = hi - i * VW;
            t[i] = v_keep_lanes(t[i],
                                l < 0    ? 0
                                : l > VW ? VW
                                         : l,
                                h < 0    ? 0
                                : h > VW ? VW
                                         : h,
                                none);
        }
    }
    float top = v_max_lane(v_max(v_max(t[0], t[1]), v_max(t[2], t[3])));
    float new_max = top > *max ? top : *max;
    vec m = v_set1(new_max);
    TD_UNROLL
    for (int i = 0; i < 4; i++) {
        p[i] = v_exp2_or_0(v_sub(t[i], m));
        v_store(s + i * VW, p[i]);
    }
    vec sum = v_add(v_add(p[0], p[1]), v_add(p[2], p[3]));
    float keep = 1.0f;
    if (new_max > *max) {
        vec k = v_exp2_or_0(v_set1(*max - new_max));
        keep = v_lane0(k);
        sum = v_fma(v_load(sums), k, sum);
        *max = new_max;
    } else {
        sum = v_add(v_load(sums), sum);
    }
    v_store(sums, sum);
    return keep;
}

struct attn_unit {
    int32_t row, n_rows, kv_head; /* rows [row, row + n_rows) of the batch, positions pos, pos +
                                     1, ... */
    int32_t pos;
};

static int32_t first_key(const struct td_attn_args *a, int32_t pos)
{
    return a->sliding_window > 0 && pos >= a->sliding_window ? pos - a->sliding_window + 1 : 0;
}

/* Packs the unit's queries, and starts their maxima and sums. */
static void queries_begin(bool bf16, const struct td_attn_args *a, const struct attn_buf *b,
                          const struct attn_unit *u, int32_t group)
{
    int32_t dim = a->kv.head_dim, n_q = u->n_rows * group;
    for (int32_t i0 = 0; i0 < n_q; i0 += TILE_ROWS) {
        const float *rows[TILE_ROWS];
        int n = n_q - i0 < TILE_ROWS ? n_q - i0 : TILE_ROWS;
        for (int i = 0; i < n; i++)
            rows[i] = a->q + (u->row + (i0 + i) / group) * a->q_stride +
                      ((int64_t)u->kv_head * group + (i0 + i) % group) * dim;
        float *q = b->q + (ptrdiff_t)i0 * key_lines(bf16, b);
#ifdef ATTN_PAIRS
        tile_pack_pairs(q, TILE_ROWS, rows, n, 0, dim, NULL);
#else
        tile_pack_rows(q, TILE_ROWS, rows, n, 0, dim, bf16, NULL);
#endif
    }
    memset(b->sum, 0, (size_t)n_q * VW * sizeof(float));
    for (int32_t i = 0; i < n_q; i++) {
        b->max[i] = -INFINITY;
        if (!a->sinks) continue; /* a key that was seen already, whose value is 0 */
        b->max[i] = a->sinks[u->kv_head * group + i % group] * 1.44269504088896340736f;
        b->sum[(ptrdiff_t)i * VW] = 1;
    }
    for (int32_t p = 0; p < b->n_panels; p++)
        memset(b->o + (ptrdiff_t)p * b->n_places * PW, 0, (size_t)n_q * PW * sizeof(float));
}

/* Divides the unit's sums of p . V by the sums of p, into out. */
static void queries_end(const struct td_attn_args *a, const struct attn_buf *b,
                        const struct attn_unit *u, int32_t group)
{
    int32_t dim = b->v_dim;
    for (int32_t i = 0; i < u->n_rows * group; i++) {
        float *out = a->out + (u->row + i / group) * a->out_stride +
                     ((int64_t)u->kv_head * group + i % group) * dim;
        vec sum = v_set1(v_sum(v_load(b->sum + (ptrdiff_t)i * VW)));
        for (int32_t d = 0; d < dim; d += VW) {
            vec o = v_load(b->o + ((ptrdiff_t)(d / PW) * b->n_places + i) * PW + d % PW);
            v_store_n(out + d, v_add(v_div(o, sum), v_zero()), dim - d < VW ? dim - d : VW);
        }
    }
}

/* One tile of keys as the unit's queries see it. */
struct tile_view {
    const struct key_tile *t, *next;
    int32_t t0;
    /* finite: no V of a partly visible tile is infinite or NaN. direct: V comes from the cache. */
    bool finite, direct;
};

/* How many of the queries [i, end) one call takes: cut at multiples of TILE_ROWS, as q is. */
TD_INLINE int32_t tile_run(int32_t i, int32_t end)
{
    return TILE_ROWS - i % TILE_ROWS < end - i ? TILE_ROWS - i % TILE_ROWS : end - i;
}

/* s = K . q of the queries [g0, g1), or what some dims, which were turned, add to it. */
TD_INLINE void score_queries(bool bf16, const struct attn_buf *b, const struct tile_view *w,
                             int32_t g0, int32_t g1, struct dims d)
{
    int32_t per_line = bf16 ? ATTN_LANE_DIMS : 1, n_lines = d.n / per_line;
    for (int32_t i = g0, n; i < g1; i += n) {
        n = tile_run(i, g1);
        const float *q =
            b->q +
            ((ptrdiff_t)(i / TILE_ROWS) * key_lines(bf16, b) + d.from / per_line) * TILE_ROWS +
            i % TILE_ROWS;
        for (int h = 0; h < KT / PW; h++) {
            if (h * PW >= w->t->hi) break;
            (bf16 ? tile_scores_bf16
                  : tile_scores)[n](b->s + (ptrdiff_t)i * KT + h * PW, q, 0,
                                    (const uint8_t *)(b->kt + (ptrdiff_t)h * n_lines * PW), n_lines,
                                    d.from == 0, NULL, 0);
        }
    }
}

/* The same of all dims of long rows, slab by slab: what is turned stays in L1 while the queries
 * use it. A chain that goes on from where it was has the same bits. */
TD_INLINE void score_slabs(bool bf16, const struct attn_buf *b, const struct tile_view *w,
                           int32_t g0, int32_t g1)
{
    for (struct dims d = {0, SLAB_DIMS}; d.from < b->dim; d.from += SLAB_DIMS) {
        if (d.n > b->dim - d.from) d.n = b->dim - d.from;
        turn_keys(bf16, b, w->t, w->next, d);
        score_queries(bf16, b, w, g0, g1, d);
    }
}

/* Caps the scores of the queries [g0, g1), which a->scale is to multiply. */
static void cap_scores(const struct td_attn_args *a, const struct attn_buf *b, int32_t g0,
                       int32_t g1)
{
    vec in = v_set1(a->scale / a->cap), out = v_set1(a->cap / a->scale);
    for (int64_t i = (int64_t)g0 * KT; i < (int64_t)g1 * KT; i += VW)
        v_store(b->s + i, v_mul(v_tanh(v_mul(v_load(b->s + i), in)), out));
}

/* Adds slope * (key's position - pos) to KT scores, which a->scale is to multiply. The distances
 * are whole numbers below 2^24, so f32 holds them. */
static void slope_scores(const struct td_attn_args *a, float slope, int32_t t0, int32_t pos,
                         float *s)
{
    alignas(64) static const float lanes[16] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                8, 9, 10, 11, 12, 13, 14, 15};
    vec by = v_set1(slope / a->scale);
    for (int j = 0; j < KT; j += VW)
        v_store(s + j,
                v_fma(by, v_add(v_load(lanes), v_set1((float)(t0 + j - pos))), v_load(s + j)));
}

/* Scores to probabilities; keep[] gets the factor of each query's old sums. True when any differs
 * from 1. */
TD_INLINE bool soften_queries(const struct td_attn_args *a, const struct attn_buf *b,
                              const struct attn_unit *u, const struct tile_view *w, int32_t group,
                              int32_t g0, int32_t g1, vec to_log2, float keep[STEP_QUERIES])
{
    bool scaled = false;
    if (a->cap > 0) cap_scores(a, b, g0, g1);
    for (int32_t i = g0, in_row = g0 % group, pos = u->pos + g0 / group; i < g1; i++) {
        int32_t lo = first_key(a, pos) - w->t0, hi = pos + 1 - w->t0;
        float *sums = b->sum + (ptrdiff_t)i * VW, *s = b->s + (ptrdiff_t)i * KT;
        if (a->slopes) slope_scores(a, a->slopes[u->kv_head * group + in_row], w->t0, pos, s);
        if (lo <= 0 && hi >= KT)
            keep[i - g0] = soften(false, s, 0, KT, to_log2, &b->max[i], sums);
        else
            keep[i - g0] =
                soften(true, s, lo < 0 ? 0 : lo, hi > KT ? KT : hi, to_log2, &b->max[i], sums);
        scaled = scaled || keep[i - g0] != 1.0f;
        if (++in_row == group) in_row = 0, pos++;
    }
    return scaled;
}

/* o = o * keep + p . V of the queries [g0, g1). keep NULL: all are 1. */
TD_INLINE void add_values(bool bf16, const struct td_attn_args *a, const struct attn_buf *b,
                          const struct attn_unit *u, const struct tile_view *w, int32_t group,
                          int32_t g0, int32_t g1, const float *keep)
{
    for (int32_t p = 0; p < b->n_panels; p++) {
        const float *v = b->v + (ptrdiff_t)p * KT * PW;
        float *o = b->o + (ptrdiff_t)p * b->n_places * PW;
        if (keep)
            for (int32_t i = g0; i < g1; i++) {
                vec k = v_set1(keep[i - g0]);
                v_store(o + i * PW, v_mul(v_load(o + i * PW), k));
                v_store(o + i * PW + VW, v_mul(v_load(o + i * PW + VW), k));
            }
        for (int32_t i = g0, n; i < g1; i += n) {
            n = w->finite ? tile_run(i, g1) : 1;
            int32_t last_pos = u->pos + (i + n - 1) / group,
                    hi = last_pos + 1 - w->t0 < KT ? last_pos + 1 - w->t0 : KT;
            int32_t lo =
                w->finite || first_key(a, last_pos) <= w->t0 ? 0 : first_key(a, last_pos) - w->t0;
            const float *prob = b->s + (ptrdiff_t)i * KT + lo;
            if (w->direct)
                (bf16 ? cache_values_bf16 : cache_values_f32)[n](o + i * PW, prob, w->t->v + lo,
                                                                 w->next->v + lo, p * PW, hi - lo);
            else
                tile_values[n](o + i * PW, prob, 0, (const uint8_t *)(v + (ptrdiff_t)lo * PW),
                               hi - lo, false, NULL, 0);
        }
    }
}

/* slabs: of long rows, which few queries use; V then comes from the cache. */
TD_INLINE void attn_unit_run(bool bf16, bool slabs, const struct td_attn_args *a,
                             const struct attn_buf *b, const struct attn_unit *u)
{
    const struct td_kv_view *kv = &a->kv;
    int32_t group = a->n_heads / kv->n_kv_heads;
    int64_t head_bytes = td_kv_view_head_bytes(kv), v_head_bytes = td_kv_view_v_head_bytes(kv);
    struct key_walk w = {.base = kv->base + u->kv_head * head_bytes,
                         .table = a->block_tables[a->row_seq[u->row]],
                         .block_bytes = kv->block_bytes,
                         .kv_bytes = td_kv_view_v_at(kv) + u->kv_head * (v_head_bytes - head_bytes),
                         .row_bytes = kv->head_dim * (bf16 ? 2 : 4),
                         .v_row_bytes = td_kv_view_v_row_bytes(kv),
                         .block_size = kv->block_size};
    vec to_log2 = v_set1(a->scale * 1.44269504088896340736f);
    queries_begin(bf16, a, b, u, group);

    int32_t end = u->pos + u->n_rows, first = first_key(a, u->pos);
    struct key_tile tiles[2];
    struct tile_view view = {.direct = u->n_rows * group <= (slabs ? 2 : 1) * DIRECT_QUERIES &&
                                       b->v_dim % PW == 0};
    const struct dims whole = {0, b->dim};
    int turn = 0;
    key_tile_find(&tiles[0], &w, first / KT * KT, first, end);
    for (int32_t t0 = first / KT * KT; t0 < end; t0 += KT, turn = !turn) {
        /* the rows that see at least one key of this tile: a contiguous run, because positions and
         * window starts both ascend */
        int32_t r0 = u->pos >= t0 ? 0 : t0 - u->pos, r1 = u->n_rows;
        while (r1 > r0 && first_key(a, u->pos + r1 - 1) >= t0 + KT) r1--;
        key_tile_find(&tiles[!turn], &w, t0 + KT, first, end);
        view.t = &tiles[turn], view.next = &tiles[!turn], view.t0 = t0;
        if (!slabs) turn_keys(bf16, b, view.t, view.next, whole);
        if (!view.direct) widen_values(bf16, b, view.t, view.next);
        bool partly =
            u->n_rows > 1 && (u->pos + r0 + 1 < t0 + KT || first_key(a, u->pos + r1 - 1) > t0);
        view.finite = !partly || values_finite(bf16, b, view.t);

        /* STEP_QUERIES queries do each step together: the first operations of the next tile of
         * queries then overlap the end of the chains of the tile before. */
        int32_t q0 = r0 * group, q1 = r1 * group;
        if (slabs) score_slabs(bf16, b, &view, q0, q1);
        for (int32_t g0 = q0, g1; g0 < q1; g0 = g1) {
            float keep[STEP_QUERIES];
            g1 = g0 / TILE_ROWS * TILE_ROWS + STEP_QUERIES < q1
                     ? g0 / TILE_ROWS * TILE_ROWS + STEP_QUERIES
                     : q1;
            if (!slabs) score_queries(bf16, b, &view, g0, g1, whole);
            bool scaled = soften_queries(a, b, u, &view, group, g0, g1, to_log2, keep);
            add_values(bf16, a, b, u, &view, group, g0, g1, scaled ? keep : NULL);
        }
    }
    queries_end(a, b, u, group);
}

/* unit_next visits every unit in one fixed order and returns false after the last one. */
struct unit_walk {
    struct attn_unit unit;
    int32_t max_rows;
};

static bool unit_next(const struct td_attn_args *a, struct unit_walk *walk)
{
    struct attn_unit *u = &walk->unit;
    if (u->n_rows && ++u->kv_head < a->kv.n_kv_heads) return true;
    u->row += u->n_rows;
    u->kv_head = 0;
    if (u->row >= a->n_rows) return false;
    u->pos = a->positions[u->row];
    u->n_rows = 1;
    while (u->n_rows < walk->max_rows && u->row + u->n_rows < a->n_rows &&
           a->row_seq[u->row + u->n_rows] == a->row_seq[u->row] &&
           a->positions[u->row + u->n_rows] == u->pos + u->n_rows)
        u->n_rows++;
    return true;
}

/* The cost of a unit: keys x queries, plus the cost of widening the keys in the same measure. */
static int64_t unit_cost(const struct td_attn_args *a, const struct attn_unit *u)
{
    int64_t group = a->n_heads / a->kv.n_kv_heads, last = u->pos + u->n_rows - 1;
    int64_t n_keys = last + 1 - first_key(a, u->pos),
            mean_keys = u->pos + 1 - first_key(a, u->pos) + (a->sliding_window ? 0 : u->n_rows / 2);
    return mean_keys * u->n_rows * group + n_keys * 8 + 64;
}

#ifndef ATTN_PAIRS
#include "kernels/cpu/attn_codes_simd.h" /* attn_codes_unit_run */
#endif

/* Decode over a latent cache: long rows of K that few queries use. */
static bool is_few_of_long(const struct attn_buf *b, const struct attn_unit *u, int32_t group)
{
    return b->dim > TD_ATTN_HEAD_DIM_MAX && u->n_rows * group <= 2 * TILE_ROWS;
}

#define TD_LONG_FN(name, bf16)                                                                     \
    static __attribute__((noinline)) void name(                                                    \
        const struct td_attn_args *a, const struct attn_buf *b, const struct attn_unit *u)         \
    {                                                                                              \
        attn_unit_run(bf16, true, a, b, u);                                                        \
    }
TD_LONG_FN(few_of_long_bf16, true)
#ifndef ATTN_PAIRS
TD_LONG_FN(few_of_long_f32, false)
#endif

/* A function of its own, so that no arithmetic moves past the change of mode around it. */
static __attribute__((noinline)) void attn_part(const struct td_attn_args *a, int part, int n_parts)
{
    struct attn_buf b;
    int32_t group = a->n_heads / a->kv.n_kv_heads;
    int32_t v_dim = td_kv_view_v_dim(&a->kv);
    TD_ASSERT(a->kv.head_dim <= TD_ATTN_ROW_MAX && a->kv.head_dim % 2 == 0);
    TD_ASSERT(v_dim <= a->kv.head_dim && !(a->kv.v_in_k && a->kv.n_kv_heads > 1));
    TD_ASSERT(!td_dtype_is_coded(a->kv.dtype) || v_dim == a->kv.head_dim || a->kv.v_in_k);
    float *base = (float *)((uint8_t *)a->scratch + (size_t)part * a->scratch_bytes_per_part);
    size_t need = attn_buf_layout(&b, base, a->n_heads, a->kv.n_kv_heads, a->kv.head_dim, v_dim);
    TD_ASSERT(need <= a->scratch_bytes_per_part);

    /* units big enough to share the widening, small enough that every part gets about four */
    int64_t most = b.n_places / group,
            fair = (int64_t)a->n_rows * a->kv.n_kv_heads / (4 * (int64_t)n_parts);
    int64_t least = (TILE_ROWS + group - 1) / group;
    if (fair < least) fair = least;
    struct unit_walk start = {.max_rows = (int32_t)(fair < most ? fair : most)}, walk = start;
    int64_t total = 0, before = 0;
    if (n_parts > 1)
        while (unit_next(a, &walk)) total += unit_cost(a, &walk.unit);
    for (walk = start; unit_next(a, &walk);) {
        if (n_parts > 1) {
            int64_t cost = unit_cost(a, &walk.unit), middle = before + cost / 2;
            before += cost;
            if (middle * n_parts / total != part) continue;
        }
        bool few = is_few_of_long(&b, &walk.unit, group);
#ifdef ATTN_PAIRS
        if (few)
            few_of_long_bf16(a, &b, &walk.unit);
        else
            attn_unit_run(true, false, a, &b, &walk.unit);
#else
        if (td_dtype_is_coded(a->kv.dtype))
            attn_codes_unit_run(a, &b, &walk.unit);
        else if (few)
            (a->kv.dtype == TD_BF16 ? few_of_long_bf16 : few_of_long_f32)(a, &b, &walk.unit);
        else if (a->kv.dtype == TD_BF16)
            attn_unit_run(true, false, a, &b, &walk.unit);
        else
            attn_unit_run(false, false, a, &b, &walk.unit);
#endif
    }
}

void TD_SIMD(attn)(const struct td_attn_args *a, int part, int n_parts)
{
    bool is_bf16 = a->kv.dtype == TD_BF16;
#ifdef ATTN_PAIRS
    if (!is_bf16) {
        ATTN_OTHER_TYPES(attn)(a, part, n_parts);
        return;
    }
#endif
    unsigned was = is_bf16 ? v_flush_begin() : 0;
    attn_part(a, part, n_parts);
    if (is_bf16) v_flush_end(was);
}

#endif
