/* reshard.c - boxes, strides and the walk over them.
 *
 * A pair is a box: layers x {K,V} x heads x tokens. Tokens are cut into segments at the block ends
 * of both sides. Inside a segment every address is base + layer * L + kv * V + head * H + token
 * row, on either side with its own strides. The innermost run is the segment's tokens. A dimension
 * whose stride equals the run on both sides lengthens the run, and that is tried until none fits.
 * It can succeed only when the segment is a whole block on both sides (else the tokens of the next
 * head do not follow), so a pair has two cases, `full` and `part`, found once in
 * td_reshard_iter_init.
 *
 * Runs come in the order of the side on which a work request must be contiguous (dst when pushing).
 * Where that side's blocks are the larger ones, several segments share one of its blocks. They form
 * a group, and the walk goes through dimensions outside and segments inside, so that successive
 * runs are adjacent there and can be gathered:
 *
 *   group (tokens in one block of the ordering side)
 *     -> dimensions -> segments -> pieces of at most max_bytes
 *
 * Invariants: (1) next.place[s] < block_size[s], and token = first_token + block * block_size +
 * place on both sides; (2) a group with several segments has no full segment of equal blocks, so it
 * uses `part`; (3) joins implies n_full == 0 and full_bytes == block_bytes on both sides; (4)
 * nothing is read that td_reshard_plan has not checked. */
#include "common/kv/reshard.h"

#include <limits.h>
#include <string.h>

#define COUNT_MAX 65536
#define BLOCK_BYTES_MAX ((uint64_t)1 << 30)

enum { SRC = 0, DST = 1 };

static int32_t min_i32(int32_t a, int32_t b) { return a < b ? a : b; }
static int32_t max_i32(int32_t a, int32_t b) { return a > b ? a : b; }

static const char *side_name(int side) { return side == SRC ? "src" : "dst"; }

static const struct td_reshard_side *side_of(const struct td_reshard_ask *ask, int side)
{
    return side == SRC ? &ask->src : &ask->dst;
}

/* --- the ask ---------------------------------------------------------------------------------- */

static td_status check_range(const char *where, const char *field, int64_t value, int64_t low,
                             int64_t high, struct td_err *err)
{
    if (value >= low && value <= high) return TD_OK;
    return td_fail(err, TD_ERR_INVALID, "reshard: %s%s is %lld, must be in %lld..%lld", where,
                   field, (long long)value, (long long)low, (long long)high);
}

static td_status check_model(const struct td_reshard_model *m, struct td_err *err)
{
    td_status s;
    if ((s = check_range("model.", "n_layers", m->n_layers, 1, COUNT_MAX, err))) return s;
    if ((s = check_range("model.", "n_kv_heads", m->n_kv_heads, 1, COUNT_MAX, err))) return s;
    if ((s = check_range("model.", "head_dim", m->head_dim, 1, COUNT_MAX, err))) return s;
    if (m->element_bytes != 1 && m->element_bytes != 2 && m->element_bytes != 4)
        return td_fail(err, TD_ERR_INVALID, "reshard: model.element_bytes is %d, must be 1, 2 or 4",
                       m->element_bytes);
    return TD_OK;
}

static td_status split_stages(const struct td_reshard_side *side, const char *where,
                              int32_t n_layers, struct td_reshard_split *split, struct td_err *err)
{
    if (!side->stage_layers) {
        if (n_layers % side->pp)
            return td_fail(err, TD_ERR_INVALID,
                           "reshard: %spp is %d and does not divide model.n_layers %d: "
                           "%sstage_layers must say the stages",
                           where, side->pp, n_layers, where);
        for (int32_t i = 0; i <= side->pp; i++) split->stage_layers[i] = i * (n_layers / side->pp);
        return TD_OK;
    }
    for (int32_t i = 0; i <= side->pp; i++) {
        int32_t v = side->stage_layers[i];
        if (i == 0 && v != 0)
            return td_fail(err, TD_ERR_INVALID, "reshard: %sstage_layers[0] is %d, must be 0",
                           where, v);
        if (i == side->pp && v != n_layers)
            return td_fail(err, TD_ERR_INVALID,
                           "reshard: %sstage_layers[%d] is %d, must be model.n_layers %d", where, i,
                           v, n_layers);
        if (i > 0 && v <= split->stage_layers[i - 1])
            return td_fail(err, TD_ERR_INVALID,
                           "reshard: %sstage_layers[%d] is %d, must be above the one before it, %d",
                           where, i, v, split->stage_layers[i - 1]);
        split->stage_layers[i] = v;
    }
    return TD_OK;
}

static td_status split_side(const struct td_reshard_ask *ask, int which, uint64_t row_bytes,
                            struct td_reshard_split *split, struct td_err *err)
{
    const struct td_reshard_model *m = &ask->model;
    const struct td_reshard_side *side = side_of(ask, which);
    const char *where = which == SRC ? "src." : "dst.";
    td_status s;
    if ((s = check_range(where, "tp", side->tp, 1, TD_RESHARD_MAX_DEGREE, err))) return s;
    if ((s = check_range(where, "pp", side->pp, 1, TD_RESHARD_MAX_DEGREE, err))) return s;
    if (m->n_kv_heads % side->tp && side->tp % m->n_kv_heads)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "reshard: %stp is %d and model.n_kv_heads %d: one must divide the other, a "
                       "KV head is not cut",
                       where, side->tp, m->n_kv_heads);
    if (side->order != TD_RESHARD_LAYER_OUTER && side->order != TD_RESHARD_HEAD_OUTER)
        return td_fail(
            err, TD_ERR_INVALID,
            "reshard: %sorder is %d, must be %d (layer outermost) or %d (head outermost)", where,
            (int)side->order, TD_RESHARD_LAYER_OUTER, TD_RESHARD_HEAD_OUTER);
    if ((s = check_range(where, "block_size", side->block_size, 1, COUNT_MAX, err))) return s;
    if ((s = check_range(where, "first_token", side->first_token, 0, ask->first_token, err)))
        return s;
    if (side->first_token % side->block_size)
        return td_fail(err, TD_ERR_INVALID,
                       "reshard: %sfirst_token is %d, must be a multiple of %sblock_size %d", where,
                       side->first_token, where, side->block_size);
    if ((s = split_stages(side, where, m->n_layers, split, err))) return s;

    split->heads_per_rank = max_i32(m->n_kv_heads / side->tp, 1);
    split->replicas = max_i32(side->tp / m->n_kv_heads, 1);
    for (int32_t stage = 0; stage < side->pp; stage++) {
        uint64_t n_layers = (uint64_t)(split->stage_layers[stage + 1] - split->stage_layers[stage]);
        uint64_t n_heads = (uint64_t)split->heads_per_rank;
        /* <= 2^34; times 2 * heads <= 2^51 */
        uint64_t run = row_bytes * (uint64_t)side->block_size;
        if (2 * run * n_heads >= BLOCK_BYTES_MAX || 2 * run * n_heads * n_layers >= BLOCK_BYTES_MAX)
            return td_fail(err, TD_ERR_LIMIT,
                           "reshard: a %s block of %d tokens, %llu layers and %llu KV heads is too "
                           "large, must be below %llu bytes",
                           side_name(which), side->block_size, (unsigned long long)n_layers,
                           (unsigned long long)n_heads, (unsigned long long)BLOCK_BYTES_MAX);
        struct td_reshard_strides *st = &split->strides[stage];
        if (side->order == TD_RESHARD_LAYER_OUTER)
            *st = (struct td_reshard_strides){
                .head = run, .kv = run * n_heads, .layer = 2 * run * n_heads};
        else
            *st = (struct td_reshard_strides){
                .kv = run, .layer = 2 * run, .head = 2 * run * n_layers};
        st->block = 2 * run * n_heads * n_layers;
    }
    return TD_OK;
}

/* The blocks of one rank that hold tokens [first, end). */
static td_status check_blocks(const struct td_reshard_ask *ask, int which, int32_t rank,
                              struct td_err *err)
{
    const struct td_reshard_side *side = side_of(ask, which);
    const char *name = side_name(which);
    const struct td_reshard_rank *r = &side->ranks[rank];
    int32_t first = (ask->first_token - side->first_token) / side->block_size;
    int32_t end = (ask->end_token - side->first_token - 1) / side->block_size + 1;
    if (r->n_ids < end)
        return td_fail(err, TD_ERR_INVALID,
                       "reshard: %s.ranks[%d].n_ids is %d, must be at least %d to hold token %d",
                       name, rank, r->n_ids, end, ask->end_token - 1);
    if (!r->block_ids)
        return td_fail(err, TD_ERR_INVALID,
                       "reshard: %s.ranks[%d].block_ids is NULL, must hold %d ids", name, rank,
                       end);
    if (r->pool_blocks < 1)
        return td_fail(err, TD_ERR_INVALID,
                       "reshard: %s.ranks[%d].pool_blocks is %d, must be at least 1", name, rank,
                       r->pool_blocks);
    uint32_t worst = 0; /* one comparison for "negative" and "too large", and no
                           branch per id */
    for (int32_t i = first; i < end; i++)
        worst = (uint32_t)r->block_ids[i] > worst ? (uint32_t)r->block_ids[i] : worst;
    if (worst < (uint32_t)r->pool_blocks) return TD_OK;
    while ((uint32_t)r->block_ids[first] < (uint32_t)r->pool_blocks) first++;
    return td_fail(err, TD_ERR_INVALID,
                   "reshard: %s.ranks[%d].block_ids[%d] is %d, must be in 0..%d", name, rank, first,
                   r->block_ids[first], r->pool_blocks - 1);
}

static td_status check_touched(const struct td_reshard *plan, struct td_err *err)
{
    bool seen[2][TD_RESHARD_MAX_RANKS] = {{false}};
    struct td_reshard_cursor cursor = {0};
    struct td_reshard_pair pair;
    while (td_reshard_next_pair(plan, &cursor, &pair)) {
        int from = pair.local ? DST : SRC;
        td_status s;
        if (!seen[from][pair.src] && (s = check_blocks(&plan->ask, from, pair.src, err))) return s;
        if (!seen[DST][pair.dst] && (s = check_blocks(&plan->ask, DST, pair.dst, err))) return s;
        seen[from][pair.src] = seen[DST][pair.dst] = true;
    }
    return TD_OK;
}

td_status td_reshard_plan(const struct td_reshard_ask *ask, struct td_reshard *ret_plan,
                          struct td_err *err)
{
    struct td_reshard p = {.ask = *ask};
    td_status s;
    if ((s = check_model(&ask->model, err))) return s;
    if ((s = check_range("", "end_token", ask->end_token, 0, TD_RESHARD_MAX_TOKENS, err))) return s;
    if ((s = check_range("", "first_token", ask->first_token, 0, ask->end_token, err))) return s;
    if (!ask->first_layer && !ask->end_layer) p.ask.end_layer = ask->model.n_layers;
    if ((s = check_range("", "end_layer", p.ask.end_layer, 1, ask->model.n_layers, err))) return s;
    if ((s = check_range("", "first_layer", p.ask.first_layer, 0, p.ask.end_layer - 1, err)))
        return s;
    p.row_bytes = (uint64_t)ask->model.head_dim * (uint64_t)ask->model.element_bytes;
    for (int which = SRC; which <= DST; which++) {
        const struct td_reshard_side *side = side_of(ask, which);
        int32_t only = which == SRC ? ask->only_src : ask->only_dst;
        if ((s = split_side(ask, which, p.row_bytes, &p.split[which], err))) return s;
        if (!side->ranks)
            return td_fail(err, TD_ERR_INVALID, "reshard: %s.ranks is NULL, must hold %d ranks",
                           side_name(which), side->pp * side->tp);
        if ((s = check_range(which == SRC ? "only_src" : "only_dst", "", only, TD_RESHARD_ALL,
                             side->pp * side->tp - 1, err)))
            return s;
    }
    if ((s = check_touched(&p, err))) return s;
    *ret_plan = p;
    return TD_OK;
}

uint64_t td_reshard_block_bytes(const struct td_reshard *plan, int side, int32_t rank)
{
    return plan->split[side].strides[rank / side_of(&plan->ask, side)->tp].block;
}

uint64_t td_reshard_pool_bytes(const struct td_reshard *plan, int side, int32_t rank)
{
    return td_reshard_block_bytes(plan, side, rank) *
           (uint64_t)side_of(&plan->ask, side)->ranks[rank].pool_blocks;
}

/* --- pairs ------------------------------------------------------------------------------------ */

static int32_t first_head_of(const struct td_reshard_split *split, int32_t tp_rank)
{
    return tp_rank / split->replicas * split->heads_per_rank;
}

/* The end of share k of n: at a block end of both sides when one block size divides the other. */
static int32_t cut_tokens(const struct td_reshard_ask *ask, int32_t k, int32_t n)
{
    if (k <= 0) return ask->first_token;
    if (k >= n) return ask->end_token;
    int32_t unit = max_i32(ask->src.block_size, ask->dst.block_size);
    int64_t first = ask->first_token / unit;
    int64_t n_units = ((int64_t)ask->end_token + unit - 1) / unit - first;
    int64_t at = (first + n_units * k / n) * unit;
    return at < ask->first_token ? ask->first_token
           : at > ask->end_token ? ask->end_token
                                 : (int32_t)at;
}

/* The tokens that replica i of the source gives to receiver j of n; false: none. */
static bool share_tokens(const struct td_reshard *p, int32_t i, int32_t j, int32_t n,
                         int32_t dst_stage, int32_t *ret_first, int32_t *ret_end)
{
    int32_t n_replicas = p->split[SRC].replicas;
    *ret_first = p->ask.first_token;
    *ret_end = p->ask.end_token;
    /* of the stage; there are fewer receivers than replicas */
    if (n_replicas > 1 && !p->ask.split) return i == (j * n_replicas / n + dst_stage) % n_replicas;
    if (n_replicas > 1) {
        /* On an axis of n * n_replicas units, replica i covers [i * n, +n) and receiver j covers [j
         * * n_replicas, +n_replicas); both tile it. */
        int32_t low = max_i32(i * n, j * n_replicas),
                high = min_i32((i + 1) * n, (j + 1) * n_replicas);
        if (low >= high) return false;
        *ret_first = cut_tokens(&p->ask, low - j * n_replicas, n_replicas);
        *ret_end = cut_tokens(&p->ask, high - j * n_replicas, n_replicas);
    }
    return *ret_first < *ret_end;
}

/* When dst is replicated and deduplicated: the first rank of each head receives. */
static bool receives(const struct td_reshard *p, int32_t dst_tp)
{
    return !p->ask.dedup || dst_tp % p->split[DST].replicas == 0;
}

static bool network_pair(const struct td_reshard *p, int32_t src_stage, int32_t src_tp, int32_t dst,
                         struct td_reshard_pair *ret)
{
    const struct td_reshard_split *src_split = &p->split[SRC], *dst_split = &p->split[DST];
    int32_t dst_stage = dst / p->ask.dst.tp, dst_tp = dst % p->ask.dst.tp;
    int32_t src_head = first_head_of(src_split, src_tp),
            dst_head = first_head_of(dst_split, dst_tp);
    struct td_reshard_pair r = {
        .src = src_stage * p->ask.src.tp + src_tp,
        .dst = dst,
        .first_layer = max_i32(p->ask.first_layer, max_i32(src_split->stage_layers[src_stage],
                                                           dst_split->stage_layers[dst_stage])),
        .end_layer = min_i32(p->ask.end_layer, min_i32(src_split->stage_layers[src_stage + 1],
                                                       dst_split->stage_layers[dst_stage + 1])),
        .first_head = max_i32(src_head, dst_head),
        .end_head =
            min_i32(src_head + src_split->heads_per_rank, dst_head + dst_split->heads_per_rank),
    };
    if (r.first_layer >= r.end_layer || r.first_head >= r.end_head) return false;
    bool all = !p->ask.dedup;
    if (!share_tokens(p, src_tp % src_split->replicas, all ? dst_tp % dst_split->replicas : 0,
                      all ? dst_split->replicas : 1, dst_stage, &r.first_token, &r.end_token))
        return false;
    *ret = r;
    return r.first_token < r.end_token;
}

static bool next_network(const struct td_reshard *p, struct td_reshard_cursor *c,
                         struct td_reshard_pair *ret)
{
    const struct td_reshard_split *src_split = &p->split[SRC];
    for (; c->dst < p->ask.dst.pp * p->ask.dst.tp; c->dst++, c->src_stage = c->src_tp = 0) {
        int32_t dst_stage = c->dst / p->ask.dst.tp, dst_tp = c->dst % p->ask.dst.tp;
        if ((p->ask.only_dst >= 0 && c->dst != p->ask.only_dst) || !receives(p, dst_tp)) continue;
        int32_t head = first_head_of(&p->split[DST], dst_tp);
        /* the tp ranks that hold any of its heads */
        int32_t low = head / src_split->heads_per_rank * src_split->replicas;
        int32_t high = (head + p->split[DST].heads_per_rank - 1) / src_split->heads_per_rank *
                           src_split->replicas +
                       src_split->replicas;
        for (; c->src_stage < p->ask.src.pp; c->src_stage++, c->src_tp = 0) {
            if (src_split->stage_layers[c->src_stage] >= p->split[DST].stage_layers[dst_stage + 1])
                continue;
            if (src_split->stage_layers[c->src_stage + 1] <= p->split[DST].stage_layers[dst_stage])
                continue;
            for (c->src_tp = max_i32(c->src_tp, low); c->src_tp < high;) {
                int32_t src_tp = c->src_tp++;
                if (p->ask.only_src >= 0 &&
                    c->src_stage * p->ask.src.tp + src_tp != p->ask.only_src)
                    continue;
                if (network_pair(p, c->src_stage, src_tp, c->dst, ret)) return true;
            }
        }
    }
    return false;
}

static bool next_local(const struct td_reshard *p, struct td_reshard_cursor *c,
                       struct td_reshard_pair *ret)
{
    const struct td_reshard_split *split = &p->split[DST];
    if (!p->ask.dedup || split->replicas == 1 || p->ask.only_src >= 0 ||
        p->ask.first_token == p->ask.end_token)
        return false;
    while (c->dst < p->ask.dst.pp * p->ask.dst.tp) {
        int32_t dst = c->dst++, stage = dst / p->ask.dst.tp, dst_tp = dst % p->ask.dst.tp;
        if ((p->ask.only_dst >= 0 && dst != p->ask.only_dst) || receives(p, dst_tp)) continue;
        struct td_reshard_pair r = {
            .src = dst - dst_tp % split->replicas,
            .dst = dst,
            .local = true,
            .first_layer = max_i32(p->ask.first_layer, split->stage_layers[stage]),
            .end_layer = min_i32(p->ask.end_layer, split->stage_layers[stage + 1]),
            .first_head = first_head_of(split, dst_tp),
            .end_head = first_head_of(split, dst_tp) + 1,
            .first_token = p->ask.first_token,
            .end_token = p->ask.end_token,
        };
        if (r.first_layer >= r.end_layer) continue;
        *ret = r;
        return true;
    }
    return false;
}

bool td_reshard_next_pair(const struct td_reshard *plan, struct td_reshard_cursor *cursor,
                          struct td_reshard_pair *ret_pair)
{
    if (!cursor->in_local) {
        if (next_network(plan, cursor, ret_pair)) return true;
        *cursor = (struct td_reshard_cursor){.in_local = true};
    }
    return next_local(plan, cursor, ret_pair);
}

uint64_t td_reshard_pair_bytes(const struct td_reshard *plan, const struct td_reshard_pair *pair)
{
    return 2 * plan->row_bytes * (uint64_t)(pair->end_layer - pair->first_layer) *
           (uint64_t)(pair->end_head - pair->first_head) *
           (uint64_t)(pair->end_token - pair->first_token);
}

/* --- the walk --------------------------------------------------------------------------------- */

static uint64_t stride_on(const struct td_reshard_dim *dim, int side)
{
    return side == SRC ? dim->src_stride : dim->dst_stride;
}

/* Removes from dims[0..n) those that only lengthen a run of *bytes on every side in `sides` (bit
 * per side); returns how many are left. */
static uint32_t lengthen(struct td_reshard_dim *dims, uint32_t n, unsigned sides, uint64_t *bytes)
{
    for (uint32_t i = 0; i < n;) {
        bool fits = (!(sides & 1u << SRC) || dims[i].src_stride == *bytes) &&
                    (!(sides & 1u << DST) || dims[i].dst_stride == *bytes);
        if (!fits) {
            i++;
            continue;
        }
        *bytes *= dims[i].count;
        memmove(&dims[i], &dims[i + 1], (n - i - 1) * sizeof *dims);
        n--;
        i = 0; /* one that did not fit before may now */
    }
    return n;
}

static struct td_reshard_at advanced(const struct td_reshard_iter *it, struct td_reshard_at at,
                                     int32_t tokens)
{
    at.token += tokens;
    for (int s = SRC; s <= DST; s++) { /* tokens never pass a block's end */
        at.place[s] += tokens;
        if (at.place[s] == it->block_size[s]) {
            at.place[s] = 0;
            at.block[s]++;
        }
    }
    return at;
}

void td_reshard_iter_init(struct td_reshard_iter *it, const struct td_reshard *plan,
                          const struct td_reshard_pair *pair, enum td_reshard_dir dir,
                          uint64_t max_bytes)
{
    *it = (struct td_reshard_iter){.row_bytes = plan->row_bytes,
                                   .max_bytes = max_bytes ? max_bytes : UINT64_MAX,
                                   .dir = dir == TD_RESHARD_PULL ? SRC : DST,
                                   .end_token = pair->end_token};
    struct td_reshard_strides st[2];
    it->next.token = pair->first_token;
    for (int s = SRC; s <= DST; s++) {
        int which = pair->local ? DST : s;
        const struct td_reshard_side *side = side_of(&plan->ask, which);
        const struct td_reshard_split *split = &plan->split[which];
        int32_t rank = s == SRC ? pair->src : pair->dst, stage = rank / side->tp;
        st[s] = split->strides[stage];
        it->ids[s] = side->ranks[rank].block_ids;
        it->block_size[s] = side->block_size;
        it->block_bytes[s] = st[s].block;
        it->base[s] =
            (uint64_t)(pair->first_layer - split->stage_layers[stage]) * st[s].layer +
            (uint64_t)(pair->first_head - first_head_of(split, rank % side->tp)) * st[s].head;
        it->next.block[s] = (pair->first_token - side->first_token) / side->block_size;
        it->next.place[s] = (pair->first_token - side->first_token) % side->block_size;
    }
    struct td_reshard_dim dims[3] = {
        {(uint32_t)(pair->end_layer - pair->first_layer), st[SRC].layer, st[DST].layer},
        {2, st[SRC].kv, st[DST].kv},
        {(uint32_t)(pair->end_head - pair->first_head), st[SRC].head, st[DST].head},
    };
    /* outermost first, in the order of the ordering side; a dimension of count 1 is left out */
    for (int i = 0; i < 3; i++) {
        if (dims[i].count == 1) continue;
        uint32_t k = it->n_part++;
        for (; k > 0 && stride_on(&it->part[k - 1], it->dir) < stride_on(&dims[i], it->dir); k--)
            it->part[k] = it->part[k - 1];
        it->part[k] = dims[i];
    }
    memcpy(it->full, it->part, sizeof it->full);
    it->n_full = it->n_part;
    it->full_bytes = (uint64_t)it->block_size[SRC] * it->row_bytes;
    if (it->block_size[SRC] == it->block_size[DST])
        it->n_full = lengthen(it->full, it->n_full, 1u << SRC | 1u << DST, &it->full_bytes);
    it->joins = it->n_full == 0 && it->full_bytes == it->block_bytes[SRC] &&
                it->full_bytes == it->block_bytes[DST];
}

static int32_t segment_tokens(const struct td_reshard_iter *it, const struct td_reshard_at *at,
                              int32_t end)
{
    int32_t n = min_i32(it->block_size[SRC] - at->place[SRC], it->block_size[DST] - at->place[DST]);
    return min_i32(n, end - at->token);
}

static uint64_t offset_at(const struct td_reshard_iter *it, const struct td_reshard_at *at,
                          int side)
{
    return (uint64_t)(uint32_t)it->ids[side][at->block[side]] * it->block_bytes[side] +
           it->base[side] + (uint64_t)at->place[side] * it->row_bytes;
}

/* Takes the segment at *at, and as many whole blocks after it as continue it by one step on both
 * sides; moves *at behind them. */
static void take_strided(const struct td_reshard_iter *it, struct td_reshard_at *at,
                         struct td_reshard_strided *ret)
{
    int32_t tokens = segment_tokens(it, at, it->end_token);
    ret->src_offset = offset_at(it, at, SRC);
    ret->dst_offset = offset_at(it, at, DST);
    if (tokens < it->block_size[SRC] || tokens < it->block_size[DST]) {
        ret->run_bytes = (uint64_t)tokens * it->row_bytes;
        ret->n_dims = it->n_part;
        memcpy(ret->dims, it->part, sizeof it->part);
        *at = advanced(it, *at, tokens);
        return;
    }
    int32_t n = 1, max = (it->end_token - at->token) / tokens;
    const int32_t *src = it->ids[SRC] + at->block[SRC], *dst = it->ids[DST] + at->block[DST];
    while (n < max && src[n] == src[n - 1] + 1 && dst[n] == dst[n - 1] + 1) n++;
    at->token += n * tokens;
    at->block[SRC] += n;
    at->block[DST] += n;
    uint32_t k = 0;
    ret->run_bytes = it->full_bytes;
    if (it->joins)
        ret->run_bytes *= (uint64_t)n;
    else if (n > 1)
        ret->dims[k++] =
            (struct td_reshard_dim){(uint32_t)n, it->block_bytes[SRC], it->block_bytes[DST]};
    memcpy(ret->dims + k, it->full, sizeof it->full);
    ret->n_dims = k + it->n_full;
}

bool td_reshard_next_strided(struct td_reshard_iter *it, struct td_reshard_strided *ret_strided)
{
    if (it->next.token >= it->end_token) return false;
    take_strided(it, &it->next, ret_strided);
    return true;
}

/* Loads the next group; false: no more tokens. */
static bool load_group(struct td_reshard_iter *it)
{
    it->n_segments = it->segment = 0;
    if (it->next.token >= it->end_token) return false;
    int32_t end =
        min_i32(it->end_token, it->next.token + it->block_size[it->dir] - it->next.place[it->dir]);
    if (segment_tokens(it, &it->next, end) == end - it->next.token) {
        struct td_reshard_strided one;
        take_strided(it, &it->next, &one);
        it->segments[it->n_segments++] =
            (struct td_reshard_run){one.src_offset, one.dst_offset, one.run_bytes};
        it->n_dims = one.n_dims;
        memcpy(it->dims, one.dims, sizeof it->dims);
    } else {
        while (it->next.token < end && it->n_segments < TD_RESHARD_GROUP) {
            int32_t tokens = segment_tokens(it, &it->next, end);
            it->segments[it->n_segments++] = (struct td_reshard_run){
                offset_at(it, &it->next, SRC), offset_at(it, &it->next, DST),
                (uint64_t)tokens * it->row_bytes};
            it->next = advanced(it, it->next, tokens);
        }
        it->n_dims = it->n_part;
        memcpy(it->dims, it->part, sizeof it->part);
    }
    memset(it->index, 0, sizeof it->index);
    it->dim_offset[SRC] = it->dim_offset[DST] = 0;
    return true;
}

/* Moves to the next run of the group, or to the next group. */
static bool next_run(struct td_reshard_iter *it)
{
    if (it->n_segments == 0) return load_group(it);
    if (++it->segment < it->n_segments) return true;
    it->segment = 0;
    for (uint32_t i = it->n_dims; i-- > 0;) {
        const struct td_reshard_dim *dim = &it->dims[i];
        if (++it->index[i] < dim->count) {
            it->dim_offset[SRC] += dim->src_stride;
            it->dim_offset[DST] += dim->dst_stride;
            return true;
        }
        it->index[i] = 0;
        it->dim_offset[SRC] -= (dim->count - 1) * dim->src_stride;
        it->dim_offset[DST] -= (dim->count - 1) * dim->dst_stride;
    }
    return load_group(it);
}

bool td_reshard_next(struct td_reshard_iter *it, struct td_reshard_run *ret_run)
{
    const struct td_reshard_run *s = &it->segments[it->segment];
    if (it->n_segments == 0 || it->done == s->bytes) {
        it->done = 0;
        if (!next_run(it)) return false;
        s = &it->segments[it->segment];
    }
    uint64_t left = s->bytes - it->done;
    ret_run->bytes = left < it->max_bytes ? left : it->max_bytes;
    ret_run->src_offset = s->src_offset + it->dim_offset[SRC] + it->done;
    ret_run->dst_offset = s->dst_offset + it->dim_offset[DST] + it->done;
    it->done += ret_run->bytes;
    return true;
}

bool td_reshard_next_wr(struct td_reshard_iter *it, uint32_t max_sge, struct td_reshard_wr *ret_wr)
{
    TD_ASSERT(max_sge >= 1 && max_sge <= TD_RESHARD_SGE_MAX);
    ret_wr->bytes = 0;
    ret_wr->n_sge = 0;
    for (;;) {
        if (!it->ahead && !td_reshard_next(it, &it->peeked)) break;
        it->ahead = true;
        uint64_t remote = it->dir == DST ? it->peeked.dst_offset : it->peeked.src_offset;
        uint64_t local = it->dir == DST ? it->peeked.src_offset : it->peeked.dst_offset;
        if (ret_wr->n_sge == 0)
            ret_wr->remote_offset = remote;
        else if (ret_wr->n_sge == max_sge || remote != ret_wr->remote_offset + ret_wr->bytes ||
                 it->peeked.bytes > it->max_bytes - ret_wr->bytes)
            break;
        ret_wr->sge[ret_wr->n_sge].offset = local;
        ret_wr->sge[ret_wr->n_sge++].bytes = it->peeked.bytes;
        ret_wr->bytes += it->peeked.bytes;
        it->ahead = false;
    }
    return ret_wr->n_sge > 0;
}

/* --- totals ----------------------------------------------------------------------------------- */

static uint64_t product(const struct td_reshard_dim *dims, uint32_t n)
{
    uint64_t count = 1;
    for (uint32_t i = 0; i < n; i++) count *= dims[i].count;
    return count;
}

/* Counts runs that are contiguous on one side, whatever the other does: only its own blocks
 * decide. */
static uint64_t count_side_runs(const struct td_reshard_iter *it, int side)
{
    struct td_reshard_dim dims[3];
    memcpy(dims, it->part, sizeof dims);
    uint64_t run = (uint64_t)it->block_size[side] * it->row_bytes;
    uint32_t n_left = lengthen(dims, it->n_part, 1u << side, &run);
    uint64_t per_whole = product(dims, n_left), per_part = product(it->part, it->n_part);

    int32_t token = it->next.token, block = it->next.block[side], place = it->next.place[side],
            size = it->block_size[side];
    uint64_t n = 0;
    /* the segment does not begin at a block's start, or does not end at its end */
    if (place || it->end_token - token < size) {
        n += per_part;
        token = min_i32(it->end_token, token + size - place);
        block++;
    }
    int32_t n_whole = (it->end_token - token) / size;
    n += (uint64_t)n_whole * per_whole;
    if (run == it->block_bytes[side])
        for (int32_t i = 1; i < n_whole; i++)
            n -= it->ids[side][block + i] == it->ids[side][block + i - 1] + 1;
    return n + (token + n_whole * size < it->end_token ? per_part : 0);
}

void td_reshard_count(const struct td_reshard *plan, const struct td_reshard_pair *pair,
                      uint64_t max_bytes, struct td_reshard_totals *totals)
{
    struct td_reshard_iter it;
    struct td_reshard_strided d;
    td_reshard_iter_init(&it, plan, pair, TD_RESHARD_PUSH, max_bytes);
    totals->n_pairs++;
    totals->bytes += td_reshard_pair_bytes(plan, pair);
    for (int side = SRC; side <= DST; side++)
        totals->n_side_runs[side] += count_side_runs(&it, side);
    while (td_reshard_next_strided(&it, &d)) {
        uint64_t n = product(d.dims, d.n_dims);
        totals->n_strided++;
        totals->n_runs += n;
        totals->n_capped +=
            d.run_bytes <= it.max_bytes ? n : n * ((d.run_bytes - 1) / it.max_bytes + 1);
    }
}

void td_reshard_total(const struct td_reshard *plan, uint64_t max_bytes,
                      struct td_reshard_totals *ret_network, struct td_reshard_totals *ret_local)
{
    struct td_reshard_totals totals[2] = {{0}};
    struct td_reshard_cursor cursor = {0};
    struct td_reshard_pair pair;
    while (td_reshard_next_pair(plan, &cursor, &pair))
        td_reshard_count(plan, &pair, max_bytes, &totals[pair.local]);
    if (ret_network) *ret_network = totals[false];
    if (ret_local) *ret_local = totals[true];
}

uint64_t td_reshard_average_run(const struct td_reshard_totals *totals)
{
    return totals->n_runs ? totals->bytes / totals->n_runs : 0;
}

enum td_reshard_how td_reshard_choose(const struct td_reshard_totals *totals,
                                      enum td_reshard_dir dir, uint32_t max_sge)
{
    if (totals->n_runs <= TD_RESHARD_DIRECT_RUNS ||
        td_reshard_average_run(totals) >= TD_RESHARD_DIRECT_RUN_BYTES)
        return TD_RESHARD_DIRECT;
    uint64_t remote = totals->bytes / totals->n_side_runs[dir == TD_RESHARD_PULL ? SRC : DST];
    uint64_t reach = td_reshard_average_run(totals) * max_sge;
    return (remote < reach ? remote : reach) >= TD_RESHARD_DIRECT_RUN_BYTES ? TD_RESHARD_GATHER
                                                                            : TD_RESHARD_STAGED;
}
