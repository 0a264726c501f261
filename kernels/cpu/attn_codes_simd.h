/* attn_codes_simd.h - attention over a cache of codes with scales (int8, fp8), beside attn_simd.h,
 * whose units, tiles, chains and softmax it takes.
 *
 * What differs. A tile's codes are widened without their scales, so K and V stay exact and the
 * products are those of attn_simd.h. Then each score is multiplied by its key's scale, and each
 * probability, after it was counted in the sum, by its value's scale. That is one multiplication
 * for a key and a query instead of head_dim of them. The cache itself is never widened: a tile of
 * KT keys is, into the part's scratch. Units of few queries (decode) do without that too: their
 * scores take the transposed codes from registers, and V comes straight from the cache. The chains
 * are the same, and so are the bits.
 *
 * A row of a latent cache has two scales, of the elements that are V, too, and of those behind, so
 * that its score is no product with one scale. Its codes are multiplied by their scales as they are
 * widened, once for all heads, and what follows is what an f32 cache has.
 *
 * A scale that is no number is treated as V that is not finite: the tile is then computed query by
 * query over the visible keys alone. attn_simd.h includes this file, behind what it uses. */
#ifndef TD_KERNELS_ATTN_CODES_SIMD_H
#define TD_KERNELS_ATTN_CODES_SIMD_H

#include "kernels/cpu/codes_simd.h"

/* The scales of a tile; 0 for keys that no query of the unit sees. Of a latent cache v are those of
 * the elements that are V, too, and k those of the rest. */
struct tile_scales {
    alignas(64) float k[KT], v[KT];
};

static void tile_scales_find(struct tile_scales *s, const struct td_kv_view *kv,
                             const struct key_walk *w, int32_t t0, const struct key_tile *t)
{
    size_t at = td_kv_scales_at(kv->dtype, kv->block_size, kv->head_dim);
    memset(s, 0, sizeof *s);
    for (int32_t j = t->lo, n; j < t->hi; j += n) { /* a run of keys in one block */
        int32_t first = (t0 + j) % w->block_size;
        const uint8_t *k = w->base + w->table[(t0 + j) / w->block_size] * w->block_bytes + at +
                           (size_t)first * sizeof(float);
        n = w->block_size - first < t->hi - j ? w->block_size - first : t->hi - j;
        memcpy(s->k + j, k, (size_t)n * sizeof(float));
        memcpy(s->v + j, k + w->kv_bytes, (size_t)n * sizeof(float));
    }
    for (int j = 0; kv->v_in_k && j < KT; j++) {
        float both = s->k[j];
        s->v[j] = td_kv_scale_first(both);
        s->k[j] = td_kv_scale_rest(both);
    }
}

/* The lines that tile_scales_find will read. */
static void tile_scales_fetch(const struct td_kv_view *kv, const struct key_walk *w, int32_t t0,
                              const struct key_tile *t)
{
    size_t at = td_kv_scales_at(kv->dtype, kv->block_size, kv->head_dim);
    for (int32_t j = t->lo; j < t->hi; j += 16 - (t0 + j) % 16) { /* 16 scales are a line */
        const uint8_t *k = w->base + w->table[(t0 + j) / w->block_size] * w->block_bytes + at +
                           (size_t)((t0 + j) % w->block_size) * sizeof(float);
        _mm_prefetch((const char *)k, _MM_HINT_T1);
        _mm_prefetch((const char *)k + w->kv_bytes, _MM_HINT_T1);
    }
}

static bool scales_finite(const struct tile_scales *s)
{
    bool finite = true;
    for (int j = 0; j < KT; j += VW) finite = finite && v_all_finite(v_load(s->v + j));
    return finite;
}

/* Transposes K of the tile into b->kt, four codes of a key in each lane; with `scales`, those of a
 * latent cache, times these. */
TD_INLINE void turn_codes(bool fp8, const struct attn_buf *b, const struct key_tile *t,
                          const struct key_tile *next, const struct tile_scales *scales)
{
    for (int j0 = 0; j0 < KT; j0 += VW) {
        vec first = scales ? v_load(scales->v + j0) : v_zero(),
            rest = scales ? v_load(scales->k + j0) : v_zero();
        float *kt = b->kt + (ptrdiff_t)(j0 / PW) * b->dim * PW + j0 % PW;
        for (int32_t i0 = 0; i0 < b->dim; i0 += 4 * VW) {
            int n = b->dim - i0 < 4 * VW ? b->dim - i0 : 4 * VW;
            alignas(64) uint8_t part[VW][4 * VW]; /* of a row that ends inside a vector */
            vec r[VW], lanes[VW];
            TD_UNROLL
            for (int j = 0; j < VW; j++)
                _mm_prefetch((const char *)next->k[j0 + j] + i0, _MM_HINT_T1);
            if (n < 4 * VW) {
                memset(part, 0, sizeof part);
                for (int j = 0; j < VW; j++) memcpy(part[j], t->k[j0 + j] + i0, (size_t)n);
            }
            TD_UNROLL
            for (int j = 0; j < VW; j++)
                r[j] =
                    v_load((const float *)(const void *)(n < 4 * VW ? part[j] : t->k[j0 + j] + i0));
            v_transpose(r);
            TD_UNROLL
            for (int i = 0; i < VW; i++) lanes[i] = r[i];
            for (int i = 0; i < n; i++) {
                float *to = kt + (ptrdiff_t)(i0 + i) * PW;
                vec a = lanes[i / 4], k = i % 4 == 0   ? v_lane_code(fp8, a, 0)
                                          : i % 4 == 1 ? v_lane_code(fp8, a, 1)
                                          : i % 4 == 2 ? v_lane_code(fp8, a, 2)
                                                       : v_lane_code(fp8, a, 3);
                v_store(to, scales ? v_mul(k, i0 + i < b->v_dim ? first : rest) : k);
            }
        }
    }
}

TD_INLINE void widen_codes(bool fp8, const struct attn_buf *b, const struct key_tile *t,
                           const struct key_tile *next, const struct tile_scales *scales)
{
    int32_t pad = b->n_panels * PW;
    for (int j = 0; j < KT; j++) {
        float *to = b->v + (ptrdiff_t)j * PW;
        vec by = v_set1(scales ? scales->v[j] : 1);
        for (int32_t at = 0; at < b->v_dim; at += 64)
            _mm_prefetch((const char *)next->v[j] + at, _MM_HINT_T1);
        for (int32_t i = 0; i < pad; i += VW) {
            uint8_t part[VW] = {0};
            const uint8_t *v = t->v[j] + i;
            int32_t n = b->v_dim - i < 0 ? 0 : b->v_dim - i;
            if (n < VW) memcpy(part, v, (size_t)n), v = part;
            vec values = v_load_codes(fp8, v);
            v_store(to + (ptrdiff_t)(i / PW) * KT * PW + i % PW,
                    scales ? v_mul(values, by) : values);
        }
    }
}

/* The queries of one row, up to this many, are scored while the codes are turned. They lie in the
 * first tile of queries, also when their number is rounded up. */
enum { TURN_QUERIES = TILE_ROWS < 8 ? 4 : 8 };

/* s = K . q of n queries, for the keys [j0, j0 + VW) of the tile: the chains of tile_scores. */
TD_INLINE void score_turned(bool fp8, int n, const struct attn_buf *b, const struct key_tile *t,
                            const struct key_tile *next, int j0)
{
    vec acc[8];
    TD_UNROLL
    for (int q = 0; q < n; q++) acc[q] = v_zero();
    for (int32_t i0 = 0; i0 < b->dim; i0 += 4 * VW) {
        int n_dims = b->dim - i0 < 4 * VW ? b->dim - i0 : 4 * VW;
        const float *at = b->q + (ptrdiff_t)i0 * TILE_ROWS;
        alignas(64) uint8_t part[VW][4 * VW];
        vec r[VW];
        TD_UNROLL
        for (int j = 0; j < VW; j++) _mm_prefetch((const char *)next->k[j0 + j] + i0, _MM_HINT_T1);
        if (n_dims < 4 * VW) {
            memset(part, 0, sizeof part);
            for (int j = 0; j < VW; j++) memcpy(part[j], t->k[j0 + j] + i0, (size_t)n_dims);
        }
        TD_UNROLL
        for (int j = 0; j < VW; j++)
            r[j] = v_load(
                (const float *)(const void *)(n_dims < 4 * VW ? part[j] : t->k[j0 + j] + i0));
        v_transpose(r);
        TD_UNROLL
        for (int i = 0; i < VW; i++) {
            if (4 * i >= n_dims) break;
            TD_UNROLL
            for (int d = 0; d < 4; d++, at += TILE_ROWS) {
                if (4 * i + d >= n_dims) break;
                vec k = v_lane_code(fp8, r[i], d);
                TD_UNROLL
                for (int q = 0; q < n; q++) acc[q] = v_fma(v_set1(at[q]), k, acc[q]);
            }
        }
    }
    TD_UNROLL
    for (int q = 0; q < n; q++) v_store(b->s + (ptrdiff_t)q * KT + j0, acc[q]);
}

#define TD_TURNED_FN(n, name, fp8)                                                                 \
    static __attribute__((noinline)) void name##_##n(                                              \
        const struct attn_buf *b, const struct key_tile *t, const struct key_tile *next)           \
    {                                                                                              \
        for (int j0 = 0; j0 < KT && j0 < t->hi; j0 += VW) score_turned(fp8, n, b, t, next, j0);    \
    }
typedef void (*turned_fn)(const struct attn_buf *b, const struct key_tile *t,
                          const struct key_tile *next);
#define TD_TURNED_FNS(name, fp8)                                                                   \
    TD_TURNED_FN(1, name, fp8)                                                                     \
    TD_TURNED_FN(2, name, fp8)                                                                     \
    TD_TURNED_FN(4, name, fp8)                                                                     \
    TD_TURNED_FN(8, name, fp8)                                                                     \
    static const turned_fn name[9] = {NULL,     name##_1, name##_2, name##_4, name##_4,            \
                                      name##_8, name##_8, name##_8, name##_8}
TD_TURNED_FNS(turned_int8, false);
TD_TURNED_FNS(turned_fp8, true);

/* As cache_values of attn_simd.h. */
TD_INLINE void codes_body(bool fp8, int n, float *o, const float *p, const uint8_t *const *rows,
                          const uint8_t *const *next, ptrdiff_t at, int n_k)
{
    vec acc[TILE_ROWS][2];
    TD_UNROLL
    for (int r = 0; r < n; r++) acc[r][0] = v_load(o + r * PW), acc[r][1] = v_load(o + r * PW + VW);
    for (int k = 0; k < n_k; k++) {
        if (at % 64 == 0) _mm_prefetch((const char *)next[k] + at, _MM_HINT_T1);
        vec b0 = v_load_codes(fp8, rows[k] + at), b1 = v_load_codes(fp8, rows[k] + at + VW);
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

#define TD_CODES_FN(n, name, fp8)                                                                  \
    static __attribute__((noinline)) void name##_##n(                                              \
        float *o, const float *p, const uint8_t *const *rows, const uint8_t *const *next,          \
        ptrdiff_t at, int n_k)                                                                     \
    {                                                                                              \
        codes_body(fp8, n, o, p, rows, next, at, n_k);                                             \
    }
TD_EACH_TILE_ROWS(TD_CODES_FN, cache_int8, false)
TD_EACH_TILE_ROWS(TD_CODES_FN, cache_fp8, true)
static const rows_fn cache_int8[TILE_ROWS + 1] = {NULL,
                                                  TD_EACH_TILE_ROWS(TD_TILE_NAME, cache_int8)};
static const rows_fn cache_fp8[TILE_ROWS + 1] = {NULL, TD_EACH_TILE_ROWS(TD_TILE_NAME, cache_fp8)};

/* o = o * keep + p . V of the n queries of one row. Keys outside [lo, hi) have p = 0. */
TD_INLINE void add_codes(bool fp8, const struct attn_buf *b, const struct tile_view *w, int32_t n,
                         const float *keep)
{
    for (int32_t p = 0; p < b->n_panels; p++) {
        float *o = b->o + (ptrdiff_t)p * b->n_places * PW;
        for (int32_t i = 0; keep && i < n; i++) {
            vec k = v_set1(keep[i]);
            v_store(o + i * PW, v_mul(v_load(o + i * PW), k));
            v_store(o + i * PW + VW, v_mul(v_load(o + i * PW + VW), k));
        }
        (fp8 ? cache_fp8 : cache_int8)[n](o, b->s, w->t->v, w->next->v, p * PW, w->t->hi);
    }
}

/* Multiplies s of the queries [g0, g1), which are [KT] each, by the keys' scales. */
TD_INLINE void scale_keys(const struct attn_buf *b, int32_t g0, int32_t g1, const float *scales)
{
    vec by[KT / VW];
    TD_UNROLL
    for (int j = 0; j < KT / VW; j++) by[j] = v_load(scales + j * VW);
    for (int32_t i = g0; i < g1; i++) {
        float *s = b->s + (ptrdiff_t)i * KT;
        TD_UNROLL
        for (int j = 0; j < KT / VW; j++) v_store(s + j * VW, v_mul(v_load(s + j * VW), by[j]));
    }
}

/* Whether the codes are scored while they are turned. */
static bool scores_turned(const struct td_attn_args *a, const struct attn_unit *u)
{
    return u->n_rows == 1 && a->n_heads / a->kv.n_kv_heads <= TURN_QUERIES && !a->kv.v_in_k;
}

/* Brings the tile's K and, unless it is read straight from the cache, V to where the unit's queries
 * want them. */
TD_INLINE void codes_begin(bool fp8, const struct td_attn_args *a, const struct attn_buf *b,
                           const struct attn_unit *u, const struct tile_view *view,
                           const struct tile_scales *scales)
{
    if (a->kv.v_in_k) {
        turn_codes(fp8, b, view->t, view->next, scales);
        widen_codes(fp8, b, view->t, view->next, scales);
        return;
    }
    if (scores_turned(a, u))
        (fp8 ? turned_fp8 : turned_int8)[a->n_heads / a->kv.n_kv_heads](b, view->t, view->next);
    else
        turn_codes(fp8, b, view->t, view->next, NULL);
    if (!view->direct) widen_codes(fp8, b, view->t, view->next, NULL);
}

/* One tile of keys and the queries [q0, q1) of the unit that see any of them. */
TD_INLINE void attn_codes_tile(bool fp8, const struct td_attn_args *a, const struct attn_buf *b,
                               const struct attn_unit *u, const struct tile_view *view,
                               const struct tile_scales *scales, int32_t q0, int32_t q1)
{
    int32_t group = a->n_heads / a->kv.n_kv_heads;
    vec to_log2 = v_set1(a->scale * 1.44269504088896340736f);
    for (int32_t g0 = q0, g1; g0 < q1; g0 = g1) {
        float keep[STEP_QUERIES];
        g1 = g0 / TILE_ROWS * TILE_ROWS + STEP_QUERIES < q1
                 ? g0 / TILE_ROWS * TILE_ROWS + STEP_QUERIES
                 : q1;
        if (!scores_turned(a, u)) score_queries(false, b, view, g0, g1, (struct dims){0, b->dim});
        if (!a->kv.v_in_k) scale_keys(b, g0, g1, scales->k);
        bool scaled = soften_queries(a, b, u, view, group, g0, g1, to_log2, keep);
        if (!a->kv.v_in_k) scale_keys(b, g0, g1, scales->v);
        if (view->direct)
            add_codes(fp8, b, view, g1, scaled ? keep : NULL);
        else
            add_values(false, a, b, u, view, group, g0, g1, scaled ? keep : NULL);
    }
}

TD_INLINE void attn_codes_unit(bool fp8, const struct td_attn_args *a, const struct attn_buf *b,
                               const struct attn_unit *u)
{
    const struct td_kv_view *kv = &a->kv;
    int32_t group = a->n_heads / kv->n_kv_heads;
    int64_t head_bytes = td_kv_view_head_bytes(kv);
    struct key_walk w = {.base = kv->base + u->kv_head * head_bytes,
                         .table = a->block_tables[a->row_seq[u->row]],
                         .block_bytes = kv->block_bytes,
                         .kv_bytes = td_kv_view_v_at(kv),
                         .row_bytes = kv->head_dim,
                         .v_row_bytes = kv->head_dim,
                         .block_size = kv->block_size};
    queries_begin(false, a, b, u, group);

    int32_t end = u->pos + u->n_rows, first = first_key(a, u->pos);
    struct key_tile tiles[2];
    struct tile_scales scales;
    struct tile_view view = {.direct = u->n_rows == 1 && group <= TILE_ROWS &&
                                       kv->head_dim % PW == 0 && !kv->v_in_k};
    int turn = 0;
    key_tile_find(&tiles[0], &w, first / KT * KT, first, end);
    for (int32_t t0 = first / KT * KT; t0 < end; t0 += KT, turn = !turn) {
        int32_t r0 = u->pos >= t0 ? 0 : t0 - u->pos, r1 = u->n_rows; /* as attn_unit_run */
        while (r1 > r0 && first_key(a, u->pos + r1 - 1) >= t0 + KT) r1--;
        key_tile_find(&tiles[!turn], &w, t0 + KT, first, end);
        view.t = &tiles[turn], view.next = &tiles[!turn], view.t0 = t0;
        tile_scales_find(&scales, kv, &w, t0, view.t);
        tile_scales_fetch(kv, &w, t0 + KT, view.next);
        codes_begin(fp8, a, b, u, &view, &scales);
        bool partly =
            u->n_rows > 1 && (u->pos + r0 + 1 < t0 + KT || first_key(a, u->pos + r1 - 1) > t0);
        view.finite = !partly || scales_finite(&scales);
        attn_codes_tile(fp8, a, b, u, &view, &scales, r0 * group, r1 * group);
    }
    queries_end(a, b, u, group);
}

static void attn_codes_unit_run(const struct td_attn_args *a, const struct attn_buf *b,
                                const struct attn_unit *u)
{
    if (a->kv.dtype == TD_FP8)
        attn_codes_unit(true, a, b, u);
    else
        attn_codes_unit(false, a, b, u);
}

#endif
