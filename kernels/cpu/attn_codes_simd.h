/* attn_codes_simd.h - attention over a cache of codes with scales (int8, fp8), beside attn_simd.h,
 * whose units, tiles, chains and softmax it takes.
 *
 * What differs. A tile's codes are widened without their scales, so K and V stay exact and the
 * products are those of attn_simd.h. Then each score is multiplied by its key's scale, and each
 * probability, after it was counted in the sum, by its value's scale. That is one multiplication
 * for a key and a query instead of head_dim of them. The cache itself is never widened: a tile of
 * KT keys is, into the part's scratch.
 *
 * A scale that is no number is treated as V that is not finite: the tile is then computed query by
 * query over the visible keys alone. attn_simd.h includes this file, behind what it uses. */
#ifndef TD_KERNELS_ATTN_CODES_SIMD_H
#define TD_KERNELS_ATTN_CODES_SIMD_H

#include "kernels/cpu/codes_simd.h"

/* The scales of a tile; 0 for keys that no query of the unit sees. */
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
}

static bool scales_finite(const struct tile_scales *s)
{
    bool finite = true;
    for (int j = 0; j < KT; j += VW) finite = finite && v_all_finite(v_load(s->v + j));
    return finite;
}

/* Transposes K of the tile into b->kt, four codes of a key in each lane. */
TD_INLINE void turn_codes(bool fp8, const struct attn_buf *b, const struct key_tile *t,
                          const struct key_tile *next)
{
    for (int j0 = 0; j0 < KT; j0 += VW) {
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
                vec a = lanes[i / 4];
                v_store(to, i % 4 == 0   ? v_lane_code(fp8, a, 0)
                            : i % 4 == 1 ? v_lane_code(fp8, a, 1)
                            : i % 4 == 2 ? v_lane_code(fp8, a, 2)
                                         : v_lane_code(fp8, a, 3));
            }
        }
    }
}

TD_INLINE void widen_codes(bool fp8, const struct attn_buf *b, const struct key_tile *t,
                           const struct key_tile *next)
{
    int32_t pad = b->n_panels * PW;
    for (int j = 0; j < KT; j++) {
        float *to = b->v + (ptrdiff_t)j * PW;
        for (int32_t at = 0; at < b->dim; at += 64)
            _mm_prefetch((const char *)next->v[j] + at, _MM_HINT_T1);
        for (int32_t i = 0; i < pad; i += VW) {
            uint8_t part[VW] = {0};
            const uint8_t *v = t->v[j] + i;
            int32_t n = b->dim - i < 0 ? 0 : b->dim - i;
            if (n < VW) memcpy(part, v, (size_t)n), v = part;
            v_store(to + (ptrdiff_t)(i / PW) * KT * PW + i % PW, v_load_codes(fp8, v));
        }
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

/* One tile of keys and the queries [q0, q1) of the unit that see any of them. */
TD_INLINE void attn_codes_tile(const struct td_attn_args *a, const struct attn_buf *b,
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
        score_queries(b, view, g0, g1);
        scale_keys(b, g0, g1, scales->k);
        bool scaled = soften_queries(a, b, u, view, group, g0, g1, to_log2, keep);
        scale_keys(b, g0, g1, scales->v);
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
                         .kv_bytes = kv->n_kv_heads * head_bytes,
                         .row_bytes = kv->head_dim,
                         .block_size = kv->block_size};
    queries_begin(false, a, b, u, group);

    int32_t end = u->pos + u->n_rows, first = first_key(a, u->pos);
    struct key_tile tiles[2];
    struct tile_scales scales;
    struct tile_view view = {.direct = false};
    int turn = 0;
    key_tile_find(&tiles[0], &w, first / KT * KT, first, end);
    for (int32_t t0 = first / KT * KT; t0 < end; t0 += KT, turn = !turn) {
        int32_t r0 = u->pos >= t0 ? 0 : t0 - u->pos, r1 = u->n_rows; /* as attn_unit_run */
        while (r1 > r0 && first_key(a, u->pos + r1 - 1) >= t0 + KT) r1--;
        key_tile_find(&tiles[!turn], &w, t0 + KT, first, end);
        view.t = &tiles[turn], view.next = &tiles[!turn], view.t0 = t0;
        tile_scales_find(&scales, kv, &w, t0, view.t);
        turn_codes(fp8, b, view.t, view.next);
        widen_codes(fp8, b, view.t, view.next);
        bool partly =
            u->n_rows > 1 && (u->pos + r0 + 1 < t0 + KT || first_key(a, u->pos + r1 - 1) > t0);
        view.finite = !partly || scales_finite(&scales);
        attn_codes_tile(a, b, u, &view, &scales, r0 * group, r1 * group);
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
