/* attn_simd.h - attention over a paged cache in the words of vec_*.h; attn_avx512.c and attn_avx2.c say how fast and why.
 *
 * A unit of work is (run of rows of one sequence with consecutive positions) x (kv head): every query head of that kv head is a
 * "query" here, so K and V are read and widened once for rows x heads queries. Keys are walked in tiles of KT positions that start
 * at multiples of KT; for each tile and each query in turn: s = K . q        K is turned so that keys are lanes: each score is one
 * chain over head_dim ascending (tile_simd.h) online softmax   new maximum, old sums scaled by 2^(old - new), p = 2^(s - new)
 * Milakov and Gimelshein 2018 o += p . V       one chain over the keys of the tile ascending What one query computes is thus a
 * function of its own q, its own range of keys and their absolute positions: the same bits alone, in any chunk, in decode. Tiles in
 * which a query sees no key are skipped for it; keys of a tile it may not see get p = 0 exactly, and the one trace such a product
 * can leave, the sign of a zero, goes away with the final + 0. If V of a partly visible tile is not finite (0 * inf), that tile is
 * done query by query over the visible keys alone.
 *
 * Parts take units so that the sums of (keys x queries) are as equal as the units allow. Scratch of a part, in f32:
 *   kt [KT/PW][head_dim][PW] · v [pad/PW][KT][PW] · q [tile][head_dim][TILE_ROWS] · s [queries][KT] · o [pad/PW][queries][PW] ·
 * max, sum */
#ifndef TD_KERNELS_ATTN_SIMD_H
#define TD_KERNELS_ATTN_SIMD_H

#include <math.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/tile_simd.h"
#include "kernels/cpu/exp_simd.h"
#include "kernels/part.h"

enum {
    KT = 4 * VW,
    QUERIES = 16 * TILE_ROWS, /* per unit, so that widening a tile of K and V is a few percent of using it */
};

TD_TILES(tile_scores, LINE_F32, false, KT, TILE_ROWS, 1);
TD_TILES(tile_values, LINE_F32, false, PW, 1, KT);

struct attn_buf {
    float *kt, *v, *q, *s, *o, *max, *sum;
    int32_t dim, n_panels; /* head_dim, and panels of PW columns that hold it */
    int32_t n_slots;       /* queries there is room for */
};

static size_t attn_buf_layout(struct attn_buf *b, float *base, int32_t n_heads, int32_t n_kv_heads, int32_t head_dim)
{
    int32_t group = n_heads / n_kv_heads;
    size_t at = 0;
    b->dim = head_dim;
    b->n_panels = (head_dim + PW - 1) / PW;
    b->n_slots = group <= QUERIES ? QUERIES : (group + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
    size_t pad = (size_t)b->n_panels * PW, slots = (size_t)b->n_slots;
    size_t sizes[] = {KT * (size_t)head_dim, KT * pad, slots * (size_t)head_dim, slots * KT, slots * pad, slots, slots};
    float **ptrs[] = {&b->kt, &b->v, &b->q, &b->s, &b->o, &b->max, &b->sum};
    for (int i = 0; i < 7; i++) {
        *ptrs[i] = base ? base + at : NULL;
        at += (sizes[i] + 15) / 16 * 16;
    }
    return at * sizeof(float);
}

size_t TD_SIMD(attn_scratch_bytes)(int32_t n_heads, int32_t n_kv_heads, int32_t head_dim, int32_t block_size)
{
    struct attn_buf b;
    (void)block_size;
    return attn_buf_layout(&b, NULL, n_heads, n_kv_heads, head_dim);
}

struct key_walk {
    const uint8_t *base; /* K of this kv head in block 0 */
    const int32_t *table;
    int64_t block_bytes, kv_bytes, row_bytes;
    int32_t block_size;
};

static inline const uint8_t *key_at(const struct key_walk *w, int32_t p)
{
    return w->base + w->table[p / w->block_size] * w->block_bytes + p % w->block_size * w->row_bytes;
}

/* Keys [lo, hi) of the tile at t0, hi - lo > 0: K turned and V widened; the other slots of the tile become zeros and are not read.
 */
TD_INLINE void load_keys(bool bf16, const struct attn_buf *b, const struct key_walk *w, int32_t t0, int32_t lo, int32_t hi,
                         int32_t ahead_end)
{
    const uint8_t *keys[KT];
    for (int j = 0; j < KT; j++) keys[j] = t0 + j >= lo && t0 + j < hi ? key_at(w, t0 + j) : NULL;
    for (int j = 0; j < KT && t0 + KT + j < ahead_end; j++) {
        const char *k = (const char *)key_at(w, t0 + KT + j);
        for (int64_t o = 0; o < w->row_bytes; o += 64) {
            _mm_prefetch(k + o, _MM_HINT_T1);
            _mm_prefetch(k + w->kv_bytes + o, _MM_HINT_T1);
        }
    }
    int32_t per_lane = bf16 ? 2 : 1, n_lanes = b->dim / per_lane; /* a lane of 32 bits holds two bf16 or one f32 */
    for (int j0 = 0; j0 < KT; j0 += VW) {
        float *kt = b->kt + (ptrdiff_t)(j0 / PW) * b->dim * PW + j0 % PW;
        for (int32_t i0 = 0; i0 < n_lanes; i0 += VW) {
            int n = n_lanes - i0 < VW ? n_lanes - i0 : VW;
            vec r[VW];
            TD_UNROLL
            for (int j = 0; j < VW; j++) r[j] = keys[j0 + j] ? v_load_n((const float *)keys[j0 + j] + i0, n) : v_zero();
            v_transpose(r);
            if (n == VW) {
                TD_UNROLL
                for (int i = 0; i < VW; i++) {
                    if (bf16) {
                        v_store(kt + (i0 + i) * 2 * PW, v_pair_lo(r[i]));
                        v_store(kt + (i0 + i) * 2 * PW + PW, v_pair_hi(r[i]));
                    } else {
                        v_store(kt + (i0 + i) * PW, r[i]);
                    }
                }
            } else {
                vec t[VW]; /* a copy, so that r stays in registers in the full case */
                TD_UNROLL
                for (int i = 0; i < VW; i++) t[i] = r[i];
                for (int i = 0; i < n; i++) {
                    if (bf16) {
                        v_store(kt + (i0 + i) * 2 * PW, v_pair_lo(t[i]));
                        v_store(kt + (i0 + i) * 2 * PW + PW, v_pair_hi(t[i]));
                    } else {
                        v_store(kt + (i0 + i) * PW, t[i]);
                    }
                }
            }
        }
    }
    int32_t pad = b->n_panels * PW;
    for (int j = 0; j < KT; j++) {
        const uint8_t *value = keys[j] ? keys[j] + w->kv_bytes : NULL;
        for (int32_t i = 0; i < pad; i += VW) {
            int n = !value || b->dim < i ? 0 : b->dim - i < VW ? b->dim - i : VW;
            vec x = n == 0    ? v_zero()
                    : !bf16   ? v_load_n((const float *)value + i, n)
                    : n == VW ? v_load_bf16((const uint16_t *)value + i)
                              : v_load_bf16_n((const uint16_t *)value + i, n);
            v_store(b->v + ((ptrdiff_t)(i / PW) * KT + j) * PW + i % PW, x);
        }
    }
}

/* Scores of one query to probabilities in place; lanes outside [lo, hi) become 0. Returns what the old sums must be multiplied by.
 */
TD_INLINE float soften(float *s, int lo, int hi, vec to_log2, float *max, float *sum)
{
    vec t[4], none = v_set1(-INFINITY);
    for (int i = 0; i < 4; i++) {
        t[i] = v_mul(v_load(s + i * VW), to_log2);
        int l = lo - i * VW, h = hi - i * VW;
        if (l > 0 || h < VW) t[i] = v_keep_lanes(t[i], l < 0 ? 0 : l > VW ? VW : l, h < 0 ? 0 : h > VW ? VW : h, none);
    }
    float top = v_max_lane(v_max(v_max(t[0], t[1]), v_max(t[2], t[3])));
    float new_max = top > *max ? top : *max, keep = 1.0f;
    if (new_max > *max) {
        float d[VW];
        v_store(d, v_exp2_or_0(v_set1(*max - new_max)));
        keep = d[0];
    }
    vec m = v_set1(new_max), p[4];
    for (int i = 0; i < 4; i++) {
        p[i] = v_exp2_or_0(v_sub(t[i], m));
        v_store(s + i * VW, p[i]);
    }
    *max = new_max;
    *sum = *sum * keep + v_sum(v_add(v_add(p[0], p[1]), v_add(p[2], p[3])));
    return keep;
}

struct attn_unit {
    int32_t row, n_rows, kv_head; /* rows [row, row + n_rows) of the batch, positions pos, pos + 1, ... */
    int32_t pos;
};

static int32_t first_key(const struct td_attn_args *a, int32_t pos)
{
    return a->window > 0 && pos >= a->window ? pos - a->window + 1 : 0;
}

TD_INLINE void attn_unit_run(bool bf16, const struct td_attn_args *a, const struct attn_buf *b, const struct attn_unit *u)
{
    const struct td_kv_view *kv = &a->kv;
    int32_t dim = kv->head_dim, group = a->n_heads / kv->n_kv_heads, n_q = u->n_rows * group;
    int64_t elem = bf16 ? 2 : 4;
    struct key_walk w = {.base = kv->base + (int64_t)u->kv_head * kv->block_size * dim * elem,
                         .table = a->block_tables[a->row_seq[u->row]],
                         .block_bytes = kv->block_bytes,
                         .kv_bytes = (int64_t)kv->n_kv_heads * kv->block_size * dim * elem,
                         .row_bytes = dim * elem,
                         .block_size = kv->block_size};
    vec to_log2 = v_set1(a->scale * 1.44269504088896340736f);

    for (int32_t i0 = 0; i0 < n_q; i0 += TILE_ROWS) {
        const float *rows[TILE_ROWS];
        int n = n_q - i0 < TILE_ROWS ? n_q - i0 : TILE_ROWS;
        for (int i = 0; i < n; i++)
            rows[i] = a->q + (u->row + (i0 + i) / group) * a->q_stride + ((int64_t)u->kv_head * group + (i0 + i) % group) * dim;
        tile_pack_rows(b->q + (ptrdiff_t)i0 * dim, TILE_ROWS, rows, n, 0, dim, bf16);
    }
    for (int32_t i = 0; i < n_q; i++) b->max[i] = -INFINITY, b->sum[i] = 0.0f;
    for (int32_t p = 0; p < b->n_panels; p++) memset(b->o + (ptrdiff_t)p * b->n_slots * PW, 0, (size_t)n_q * PW * sizeof(float));

    int32_t last = u->pos + u->n_rows - 1, first = first_key(a, u->pos);
    for (int32_t t0 = first / KT * KT; t0 <= last; t0 += KT) {
        /* rows that see at least one key of this tile: a contiguous run, for positions and window starts both ascend */
        int32_t r0 = u->pos >= t0 ? 0 : t0 - u->pos, r1 = u->n_rows;
        while (r1 > r0 && first_key(a, u->pos + r1 - 1) >= t0 + KT) r1--;
        if (r0 >= r1) continue;
        int32_t key_lo = first_key(a, u->pos + r0) > t0 ? first_key(a, u->pos + r0) : t0;
        int32_t key_hi = u->pos + r1 < t0 + KT ? u->pos + r1 : t0 + KT;
        load_keys(bf16, b, &w, t0, key_lo, key_hi, last + 1);
        bool partly = u->pos + r0 + 1 < t0 + KT || first_key(a, u->pos + r1 - 1) > t0, finite = true;
        if (partly)
            for (ptrdiff_t i = 0; i < (ptrdiff_t)b->n_panels * KT * PW; i += VW) finite = finite && v_all_finite(v_load(b->v + i));

        int32_t q0 = r0 * group, q1 = r1 * group;
        for (int32_t i = q0, n; i < q1; i += n) { /* tiles of queries, cut at multiples of TILE_ROWS */
            n = TILE_ROWS - i % TILE_ROWS < q1 - i ? TILE_ROWS - i % TILE_ROWS : q1 - i;
            float *s = b->s + (ptrdiff_t)i * KT, keep[TILE_ROWS];
            const float *q = b->q + (ptrdiff_t)(i / TILE_ROWS) * TILE_ROWS * dim + i % TILE_ROWS;
            for (int h = 0; h < KT / PW; h++)
                if (t0 + h * PW < key_hi)
                    tile_scores[n](s + h * PW, q, 0, (const uint8_t *)(b->kt + (ptrdiff_t)h * dim * PW), dim, true, NULL, 0);
            bool scaled = false;
            int n_keys = 0;
            for (int j = 0; j < n; j++) {
                int32_t pos = u->pos + (i + j) / group, lo = first_key(a, pos) - t0, hi = pos + 1 - t0;
                lo = lo < 0 ? 0 : lo, hi = hi > KT ? KT : hi;
                keep[j] = soften(s + (ptrdiff_t)j * KT, lo, hi, to_log2, &b->max[i + j], &b->sum[i + j]);
                scaled = scaled || keep[j] != 1.0f;
                n_keys = hi;
            }
            for (int32_t p = 0; p < b->n_panels; p++) {
                float *o = b->o + ((ptrdiff_t)p * b->n_slots + i) * PW;
                if (scaled)
                    for (int j = 0; j < n; j++) {
                        vec f = v_set1(keep[j]);
                        v_store(o + j * PW, v_mul(v_load(o + j * PW), f));
                        v_store(o + j * PW + VW, v_mul(v_load(o + j * PW + VW), f));
                    }
                const float *v = b->v + (ptrdiff_t)p * KT * PW;
                if (finite) {
                    tile_values[n](o, s, 0, (const uint8_t *)v, n_keys, false, NULL, 0);
                    continue;
                }
                for (int j = 0; j < n; j++) {
                    int32_t pos = u->pos + (i + j) / group, lo = first_key(a, pos) - t0, hi = pos + 1 - t0;
                    lo = lo < 0 ? 0 : lo, hi = hi > KT ? KT : hi;
                    tile_values[1](o + j * PW, s + (ptrdiff_t)j * KT + lo, 0, (const uint8_t *)(v + (ptrdiff_t)lo * PW), hi - lo,
                                   false, NULL, 0);
                }
            }
        }
    }
    for (int32_t i = 0; i < n_q; i++) {
        float *out = a->out + (u->row + i / group) * a->out_stride + ((int64_t)u->kv_head * group + i % group) * dim;
        vec sum = v_set1(b->sum[i]);
        for (int32_t d = 0; d < dim; d += VW) {
            vec o = v_load(b->o + ((ptrdiff_t)(d / PW) * b->n_slots + i) * PW + d % PW);
            v_store_n(out + d, v_add(v_div(o, sum), v_zero()), dim - d < VW ? dim - d : VW);
        }
    }
}

/* Calls visit every unit in one fixed order. Returns false after the last one. */
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
    while (u->n_rows < walk->max_rows && u->row + u->n_rows < a->n_rows && a->row_seq[u->row + u->n_rows] == a->row_seq[u->row] &&
           a->positions[u->row + u->n_rows] == u->pos + u->n_rows)
        u->n_rows++;
    return true;
}

/* Keys x queries, and what widening the keys costs in the same coin. */
static int64_t unit_cost(const struct td_attn_args *a, const struct attn_unit *u)
{
    int64_t group = a->n_heads / a->kv.n_kv_heads, last = u->pos + u->n_rows - 1;
    int64_t n_keys = last + 1 - first_key(a, u->pos),
            mean_keys = u->pos + 1 - first_key(a, u->pos) + (a->window ? 0 : u->n_rows / 2);
    return mean_keys * u->n_rows * group + n_keys * 8 + 64;
}

void TD_SIMD(attn)(const struct td_attn_args *a, int part, int n_parts)
{
    struct attn_buf b;
    int32_t group = a->n_heads / a->kv.n_kv_heads;
    TD_ASSERT(a->kv.head_dim <= TD_ATTN_HEAD_DIM_MAX && a->kv.head_dim % 2 == 0);
    float *base = (float *)((uint8_t *)a->scratch + (size_t)part * a->scratch_bytes_per_part);
    size_t need = attn_buf_layout(&b, base, a->n_heads, a->kv.n_kv_heads, a->kv.head_dim);
    TD_ASSERT(need <= a->scratch_bytes_per_part);

    /* units big enough to share the widening, small enough that every part gets about four */
    int64_t most = b.n_slots / group, fair = (int64_t)a->n_rows * a->kv.n_kv_heads / (4 * (int64_t)n_parts);
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
        if (a->kv.dtype == TD_BF16)
            attn_unit_run(true, a, &b, &walk.unit);
        else
            attn_unit_run(false, a, &b, &walk.unit);
    }
}

#endif
