/* reshard_test.c - plans executed on real bytes. The source's pools are filled by a function of
 * (layer, K or V, head, token, byte) through an address formula of the test's own; after the
 * copies every byte of every destination pool is compared: the right value where the request
 * lies, poison everywhere else, and no byte written twice. Then the inverse plan must restore a
 * poisoned source. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/clock.h"
#include "common/base/random.h"
#include "common/kv/reshard.h"

#define MAX_RANKS TD_RESHARD_MAX_RANKS
#define SPARE_BLOCKS 3 /* of each pool, that belong to nobody here */
#define COUNT(a) (sizeof(a) / sizeof *(a))

static uint64_t next_random(uint64_t *state)
{
    td_random_step(state);
    return (*state >> 33) ^ (*state << 20 >> 40);
}

/* One side: its ranks, their ids, their pools. */
struct cluster {
    struct td_reshard_side side;
    struct td_reshard_rank ranks[MAX_RANKS];
    int32_t stages[TD_RESHARD_MAX_DEGREE + 1];
    int32_t n_ranks;
    int32_t *ids; /* [n_ranks][n_ids] */
    int32_t n_ids;
    uint8_t *bytes, *expected;
    size_t base[MAX_RANKS + 1]; /* of each rank's pool in bytes */
};

enum ids { SHUFFLED, CONSECUTIVE };

/* Fills ids and the side's struct; tp, pp, order, block_size, first_token and perhaps
 * stage_layers are set. */
static void cluster_open(struct cluster *c, const struct td_reshard_model *m, int32_t end_token,
                         enum ids ids, uint64_t *rng)
{
    c->n_ranks = c->side.tp * c->side.pp;
    c->n_ids = (end_token - c->side.first_token + c->side.block_size - 1) / c->side.block_size;
    c->ids = malloc(sizeof(int32_t) * ((size_t)c->n_ranks * (size_t)c->n_ids + 1));
    assert_non_null(c->ids);
    int32_t pool_blocks = c->n_ids + SPARE_BLOCKS;
    memset(c->ranks, 0, sizeof c->ranks);
    for (int32_t r = 0; r < c->n_ranks; r++) {
        int32_t *list = c->ids + (size_t)r * (size_t)c->n_ids;
        for (int32_t i = 0; i < c->n_ids; i++) list[i] = i + 1;
        for (int32_t i = c->n_ids - 1; ids == SHUFFLED && i > 0; i--) {
            /* runs of neighbours remain, and they must */
            int32_t k = (int32_t)(next_random(rng) % (uint64_t)(i + 1)), t = list[i];
            if (next_random(rng) % 2) continue;
            list[i] = list[k];
            list[k] = t;
        }
        c->ranks[r] = (struct td_reshard_rank){list, c->n_ids, pool_blocks};
    }
    c->side.ranks = c->ranks;
    if (!c->side.stage_layers && m->n_layers % c->side.pp) {
        for (int32_t i = 0; i <= c->side.pp; i++) c->stages[i] = i * m->n_layers / c->side.pp;
        c->side.stage_layers = c->stages;
    }
}

static int32_t stage_first(const struct cluster *c, const struct td_reshard_model *m, int32_t stage)
{
    return c->side.stage_layers ? c->side.stage_layers[stage] : stage * (m->n_layers / c->side.pp);
}

static int32_t heads_of(const struct cluster *c, const struct td_reshard_model *m)
{
    return c->side.tp <= m->n_kv_heads ? m->n_kv_heads / c->side.tp : 1;
}

static size_t block_bytes(const struct cluster *c, const struct td_reshard_model *m, int32_t rank)
{
    int32_t stage = rank / c->side.tp;
    return (size_t)(stage_first(c, m, stage + 1) - stage_first(c, m, stage)) * 2 *
           (size_t)heads_of(c, m) * (size_t)c->side.block_size *
           (size_t)(m->head_dim * m->element_bytes);
}

static void cluster_pools(struct cluster *c, const struct td_reshard_model *m)
{
    c->base[0] = 0;
    for (int32_t r = 0; r < c->n_ranks; r++)
        c->base[r + 1] = c->base[r] + block_bytes(c, m, r) * (size_t)c->ranks[r].pool_blocks;
    c->bytes = malloc(c->base[c->n_ranks]);
    c->expected = malloc(c->base[c->n_ranks]);
    assert_true(c->bytes && c->expected);
}

static void cluster_close(struct cluster *c)
{
    free(c->ids);
    free(c->bytes);
    free(c->expected);
}

#define POISON 0xEE

/* Never POISON, and different in any one coordinate more often than not. */
static uint8_t value(int32_t layer, int32_t kv, int32_t head, int32_t token, size_t byte)
{
    uint32_t h = (uint32_t)layer * 2654435761u ^ (uint32_t)kv * 40503u ^
                 (uint32_t)head * 2246822519u ^ (uint32_t)token * 3266489917u ^
                 (uint32_t)byte * 668265263u;
    h ^= h >> 15;
    h *= 2246822519u;
    h ^= h >> 13;
    return (uint8_t)(h % POISON);
}

/* Poisons buf and writes the values of layers [l0, l1), tokens [t0, t1) at every rank of the
 * cluster that holds them: the layouts, spelt out. */
static void fill(const struct cluster *c, const struct td_reshard_model *m, uint8_t *buf,
                 int32_t l0, int32_t l1, int32_t t0, int32_t t1)
{
    size_t row = (size_t)(m->head_dim * m->element_bytes);
    size_t n_heads = (size_t)heads_of(c, m), bs = (size_t)c->side.block_size;
    memset(buf, POISON, c->base[c->n_ranks]);
    for (int32_t rank = 0; rank < c->n_ranks; rank++) {
        int32_t stage = rank / c->side.tp, tp_rank = rank % c->side.tp;
        int32_t first = stage_first(c, m, stage), end = stage_first(c, m, stage + 1);
        /* by blocks of ranks: with 8 ranks and 4 heads, ranks 0 and 1 hold head 0 */
        int32_t first_head = (int32_t)((int64_t)tp_rank * m->n_kv_heads / c->side.tp);
        for (int32_t token = t0; token < t1; token++) {
            size_t slot = (size_t)(token - c->side.first_token) % bs;
            size_t id =
                (size_t)c->ranks[rank].block_ids[(size_t)(token - c->side.first_token) / bs];
            for (int32_t layer = first > l0 ? first : l0; layer < end && layer < l1; layer++)
                for (size_t kv = 0; kv < 2; kv++)
                    for (size_t head = 0; head < n_heads; head++) {
                        size_t l = (size_t)(layer - first), n_l = (size_t)(end - first), at;
                        if (c->side.order == TD_RESHARD_LAYER_OUTER)
                            at = ((((id * n_l + l) * 2 + kv) * n_heads + head) * bs + slot) * row;
                        else
                            at = ((((id * n_heads + head) * n_l + l) * 2 + kv) * bs + slot) * row;
                        uint8_t *to = buf + c->base[rank] + at;
                        for (size_t b = 0; b < row; b++)
                            to[b] = value(layer, (int32_t)kv, first_head + (int32_t)head, token, b);
                    }
        }
    }
}

/* One case, in words for a failure. */
static char case_name[512];

static void name_case(const struct td_reshard_ask *a)
{
    snprintf(case_name, sizeof case_name,
             "layers %d heads %d; src tp %d pp %d order %d block %d from %d; dst tp %d pp %d order "
             "%d block %d from %d; tokens [%d, %d) "
             "layers [%d, %d) only %d/%d dedup %d split %d",
             a->model.n_layers, a->model.n_kv_heads, a->src.tp, a->src.pp, (int)a->src.order,
             a->src.block_size, a->src.first_token, a->dst.tp, a->dst.pp, (int)a->dst.order,
             a->dst.block_size, a->dst.first_token, a->first_token, a->end_token, a->first_layer,
             a->end_layer, a->only_src, a->only_dst, a->dedup, a->split);
}

static void copy_once(uint8_t *to, const uint8_t *from, uint64_t bytes)
{
    for (uint64_t i = 0; i < bytes; i++) {
        if (to[i] != POISON) fail_msg("%s: a byte is written twice", case_name);
        if (from[i] == POISON)
            fail_msg("%s: a byte is read that the request does not own", case_name);
    }
    memcpy(to, from, bytes);
}

static void check_inside(uint64_t offset, uint64_t bytes, uint64_t pool_bytes)
{
    if (offset > pool_bytes || bytes > pool_bytes - offset || !bytes)
        fail_msg("%s: [%llu, +%llu) is not in a pool of %llu bytes", case_name,
                 (unsigned long long)offset, (unsigned long long)bytes,
                 (unsigned long long)pool_bytes);
}

/* One pair's bytes, on their way by one of three iterators. */
struct moving {
    const uint8_t *in;
    uint8_t *out;
    uint64_t in_bytes, out_bytes, moved;
    struct td_reshard_totals mine; /* what the pair still has */
};

static void move_strided(struct td_reshard_iter *it, struct moving *m, uint64_t *n_strided)
{
    struct td_reshard_strided d;
    while (td_reshard_next_strided(it, &d)) {
        uint64_t count = 1;
        for (uint32_t i = 0; i < d.n_dims; i++) count *= d.dims[i].count;
        for (uint64_t k = 0; k < count; k++) {
            uint64_t rest = k, s = d.src_offset, t = d.dst_offset;
            for (uint32_t i = d.n_dims; i-- > 0; rest /= d.dims[i].count) {
                s += rest % d.dims[i].count * d.dims[i].src_stride;
                t += rest % d.dims[i].count * d.dims[i].dst_stride;
            }
            check_inside(s, d.run_bytes, m->in_bytes);
            check_inside(t, d.run_bytes, m->out_bytes);
            copy_once(m->out + t, m->in + s, d.run_bytes);
            m->moved += d.run_bytes;
        }
        ++*n_strided;
        m->mine.n_strided--;
        m->mine.n_runs -= count;
    }
}

static void move_wrs(struct td_reshard_iter *it, struct moving *m, enum td_reshard_dir dir,
                     uint32_t max_sge, uint64_t cap)
{
    struct td_reshard_wr wr;
    uint64_t n_wrs = 0, n_sges = 0;
    while (td_reshard_next_wr(it, max_sge, &wr)) {
        uint64_t sum = 0;
        assert_in_range(wr.n_sge, 1, max_sge);
        if (cap) assert_in_range(wr.bytes, 1, cap);
        for (uint32_t i = 0; i < wr.n_sge; i++) {
            uint64_t s = dir == TD_RESHARD_PUSH ? wr.sge[i].offset : wr.remote_offset + sum;
            uint64_t t = dir == TD_RESHARD_PUSH ? wr.remote_offset + sum : wr.sge[i].offset;
            check_inside(s, wr.sge[i].bytes, m->in_bytes);
            check_inside(t, wr.sge[i].bytes, m->out_bytes);
            copy_once(m->out + t, m->in + s, wr.sge[i].bytes);
            sum += wr.sge[i].bytes;
        }
        assert_int_equal(sum, wr.bytes);
        m->moved += sum;
        n_wrs++;
        n_sges += wr.n_sge;
    }
    assert_int_equal(n_sges, m->mine.n_capped);
    /* As few as that side's blocks allow: joins over ragged ends can only save. */
    if (!cap && max_sge == TD_RESHARD_SGE_MAX && n_sges <= max_sge)
        assert_in_range(n_wrs, 1, m->mine.n_side_runs[dir == TD_RESHARD_PUSH]);
}

static void move_runs(struct td_reshard_iter *it, struct moving *m, uint64_t cap)
{
    struct td_reshard_run run;
    while (td_reshard_next(it, &run)) {
        check_inside(run.src_offset, run.bytes, m->in_bytes);
        check_inside(run.dst_offset, run.bytes, m->out_bytes);
        if (cap) assert_in_range(run.bytes, 1, cap);
        copy_once(m->out + run.dst_offset, m->in + run.src_offset, run.bytes);
        m->moved += run.bytes;
        m->mine.n_capped--;
    }
}

/* The three ways to walk a pair, told by n, so that each is met with everything else. */
static void execute(const struct td_reshard *plan, struct cluster *src, struct cluster *dst,
                    unsigned n, struct td_reshard_totals *ret_seen)
{
    static const uint64_t caps[] = {0, 64, 13, 1000};
    uint64_t cap = caps[n / 8 % COUNT(caps)];
    enum td_reshard_dir dir = n & 4 ? TD_RESHARD_PULL : TD_RESHARD_PUSH;
    struct td_reshard_cursor cursor = {0};
    struct td_reshard_pair pair;
    struct td_reshard_totals counted = {0}, seen = {0};
    while (td_reshard_next_pair(plan, &cursor, &pair)) {
        const struct cluster *from = pair.local ? dst : src;
        struct moving m = {.in = from->bytes + from->base[pair.src],
                           .out = dst->bytes + dst->base[pair.dst],
                           .in_bytes = from->base[pair.src + 1] - from->base[pair.src],
                           .out_bytes = dst->base[pair.dst + 1] - dst->base[pair.dst]};
        assert_int_equal(m.in_bytes, td_reshard_pool_bytes(plan, pair.local ? 1 : 0, pair.src));
        assert_int_equal(m.out_bytes, td_reshard_pool_bytes(plan, 1, pair.dst));
        struct td_reshard_iter it;
        td_reshard_iter_init(&it, plan, &pair, dir, cap);
        td_reshard_count(plan, &pair, cap, &m.mine);
        td_reshard_count(plan, &pair, cap, &counted);
        if ((n & 3) == 0) {
            move_strided(&it, &m, &seen.n_strided);
            assert_int_equal(m.mine.n_strided, 0);
            assert_int_equal(m.mine.n_runs, 0);
        } else if ((n & 3) == 1) {
            move_wrs(&it, &m, dir, 1 + n / 32 % TD_RESHARD_SGE_MAX, cap);
        } else {
            move_runs(&it, &m, cap);
            assert_int_equal(m.mine.n_capped, 0);
        }
        assert_int_equal(m.moved, td_reshard_pair_bytes(plan, &pair));
        assert_int_equal(m.moved, m.mine.bytes);
        seen.n_pairs++;
        seen.bytes += m.moved;
    }
    assert_int_equal(seen.n_pairs, counted.n_pairs);
    assert_int_equal(seen.bytes, counted.bytes);
    *ret_seen = seen;
}

static void check_pools(const struct cluster *c, const char *what)
{
    for (int32_t r = 0; r < c->n_ranks; r++)
        for (size_t i = c->base[r]; i < c->base[r + 1]; i++)
            if (c->bytes[i] != c->expected[i])
                fail_msg("%s: %s rank %d offset %zu is %02x, must be %02x", case_name, what, r,
                         i - c->base[r], c->bytes[i], c->expected[i]);
}

static void plan_ok(const struct td_reshard_ask *ask, struct td_reshard *ret)
{
    struct td_err err = {0};
    name_case(ask);
    if (td_reshard_plan(ask, ret, &err)) fail_msg("%s: %s", case_name, err.msg);
}

/* Plan, execute, compare, go back. ask's sides say tp, pp, order, block_size, first_token; the
 * rest is made here. */
static void round_trip(struct td_reshard_ask ask, enum ids ids, unsigned n)
{
    uint64_t rng = n;
    struct cluster *src = calloc(1, sizeof *src), *dst = calloc(1, sizeof *dst);
    assert_true(src && dst);
    int32_t l0 = ask.first_layer, l1 = ask.end_layer ? ask.end_layer : ask.model.n_layers;
    src->side = ask.src;
    dst->side = ask.dst;
    cluster_open(src, &ask.model, ask.end_token, ids, &rng);
    cluster_open(dst, &ask.model, ask.end_token, ids, &rng);
    cluster_pools(src, &ask.model);
    cluster_pools(dst, &ask.model);
    ask.src = src->side;
    ask.dst = dst->side;
    ask.only_src = ask.only_dst = TD_RESHARD_ALL;
    struct td_reshard plan;
    plan_ok(&ask, &plan);

    struct td_reshard_totals seen, network, local;
    fill(src, &ask.model, src->bytes, l0, l1, ask.first_token, ask.end_token);
    memset(dst->bytes, POISON, dst->base[dst->n_ranks]);
    fill(dst, &ask.model, dst->expected, l0, l1, ask.first_token, ask.end_token);
    execute(&plan, src, dst, n, &seen);
    check_pools(dst, "dst");

    /* Each unique byte crosses the network once with dedup, once per replica without. */
    uint64_t unique = 2 * (uint64_t)ask.model.head_dim * (uint64_t)ask.model.element_bytes *
                      (uint64_t)ask.model.n_kv_heads * (uint64_t)(l1 - l0) *
                      (uint64_t)(ask.end_token - ask.first_token);
    uint64_t replicas =
        ask.dst.tp > ask.model.n_kv_heads ? (uint64_t)(ask.dst.tp / ask.model.n_kv_heads) : 1;
    td_reshard_total(&plan, 0, &network, &local);
    assert_int_equal(network.bytes, ask.dedup ? unique : unique * replicas);
    assert_int_equal(local.bytes, ask.dedup ? unique * (replicas - 1) : 0);
    assert_int_equal(seen.bytes, network.bytes + local.bytes);

    struct td_reshard_ask back = ask;
    back.src = ask.dst;
    back.dst = ask.src;
    plan_ok(&back, &plan);
    memset(src->bytes, POISON, src->base[src->n_ranks]);
    fill(src, &ask.model, src->expected, l0, l1, ask.first_token, ask.end_token);
    execute(&plan, dst, src, n * 7 + 3, &seen);
    check_pools(src, "the restored src");
    cluster_close(src);
    cluster_close(dst);
    free(src);
    free(dst);
}

static bool is_split(int32_t tp, int32_t heads) { return tp % heads == 0 || heads % tp == 0; }

static const struct {
    int32_t src, dst;
} block_sizes[] = {{16, 16}, {16, 32}, {32, 16}, {16, 64}, {48, 16}, {48, 32}, {1, 16}, {5, 7}};
/* From the start and from a prefix hit, ending in and at a block's end. */
static const struct {
    int32_t first, end;
} ranges[] = {{0, 96}, {0, 1}, {0, 67}, {7, 33}, {16, 96}, {48, 65}, {31, 32}, {5, 5}};

static void pains_10_unequal_tp_gives_exact_bytes(void **state)
{
    (void)state;
    static const int32_t head_counts[] = {1, 2, 4, 8, 16};
    unsigned n = 0, n_refused = 0;
    for (size_t h = 0; h < COUNT(head_counts); h++)
        for (int32_t src_tp = 1; src_tp <= 16; src_tp++)
            for (int32_t dst_tp = 1; dst_tp <= 16; dst_tp++) {
                int32_t heads = head_counts[h];
                if (!is_split(src_tp, heads) || !is_split(dst_tp, heads)) {
                    struct td_reshard_rank ranks[16] = {{0}};
                    struct td_reshard_side side = {
                        .pp = 1, .order = TD_RESHARD_LAYER_OUTER, .block_size = 16, .ranks = ranks};
                    struct td_reshard_ask ask = {
                        {2, heads, 2, 1}, side, side, .only_src = -1, .only_dst = -1};
                    ask.src.tp = src_tp;
                    ask.dst.tp = dst_tp;
                    struct td_reshard plan;
                    struct td_err err = {0};
                    char says[64];
                    bool src_is_bad = !is_split(src_tp, heads);
                    snprintf(says, sizeof says, "%s.tp is %d and model.n_kv_heads %d",
                             src_is_bad ? "src" : "dst", src_is_bad ? src_tp : dst_tp, heads);
                    assert_int_equal(td_reshard_plan(&ask, &plan, &err), TD_ERR_UNSUPPORTED);
                    if (!strstr(err.msg, says)) fail_msg("'%s' does not say '%s'", err.msg, says);
                    n_refused++;
                    continue;
                }
                for (size_t b = 0; b < COUNT(block_sizes); b++)
                    for (unsigned orders = 0; orders < 4; orders++, n++) {
                        unsigned r = n * 5 + n / 32, mix = n * 2654435761u >> 20;
                        struct td_reshard_ask ask = {
                            .model = {2, heads, 3, 1},
                            .src = {.tp = src_tp,
                                    .pp = 1,
                                    .block_size = block_sizes[b].src,
                                    .order = 1 + (orders & 1)},
                            .dst = {.tp = dst_tp,
                                    .pp = 1,
                                    .block_size = block_sizes[b].dst,
                                    .order = 1 + (orders >> 1)},
                            .first_token = ranges[r % COUNT(ranges)].first,
                            .end_token = ranges[r % COUNT(ranges)].end,
                            .dedup = mix & 1,
                            .split = mix & 2,
                        };
                        if (mix & 4)
                            ask.dst.first_token =
                                ask.first_token / ask.dst.block_size * ask.dst.block_size;
                        if (mix & 8)
                            ask.src.first_token =
                                ask.first_token / ask.src.block_size * ask.src.block_size;
                        round_trip(ask, mix & 16 ? SHUFFLED : CONSECUTIVE, n);
                    }
            }
    print_message("%u plans executed and reversed, %u pairs of degrees refused by name\n", n,
                  n_refused);
    assert_int_equal(n, 423 * COUNT(block_sizes) * 4);
    assert_int_equal(n_refused, 5 * 256 - 423);
}

/* Few ranges of tokens were met per pair above; here all of them, with every option, for degrees
 * that replicate and that do not. */
static void every_option_meets_every_range(void **state)
{
    (void)state;
    static const int32_t tps[][2] = {{1, 1}, {2, 1}, {4, 12}, {12, 4}, {8, 16}, {16, 8}};
    unsigned n = 1;
    for (size_t t = 0; t < COUNT(tps); t++)
        for (size_t r = 0; r < COUNT(ranges); r++)
            for (size_t b = 0; b < COUNT(block_sizes); b++)
                for (unsigned options = 0; options < 8; options++, n++) {
                    struct td_reshard_ask ask = {
                        .model = {3, 4, 1, 2},
                        .src = {.tp = tps[t][0],
                                .pp = 1,
                                .block_size = block_sizes[b].src,
                                .order = 1 + n % 2},
                        .dst = {.tp = tps[t][1],
                                .pp = 1,
                                .block_size = block_sizes[b].dst,
                                .order = 1 + n / 16 % 2},
                        .first_token = ranges[r].first,
                        .end_token = ranges[r].end,
                        .dedup = options & 1,
                        .split = options & 2,
                    };
                    if (n % 3 == 0) {
                        ask.first_layer = (int32_t)(n / 3 % 3);
                        ask.end_layer = ask.first_layer + 1;
                    }
                    round_trip(ask, options & 4 ? SHUFFLED : CONSECUTIVE, n);
                }
}

static void every_pair_of_pipelines(void **state)
{
    (void)state;
    unsigned n = 0;
    for (int32_t src_pp = 1; src_pp <= 16; src_pp++)
        for (int32_t dst_pp = 1; dst_pp <= 16; dst_pp++)
            for (unsigned t = 0; t < 3; t++, n++) {
                static const int32_t tps[][2] = {{1, 2}, {4, 1}, {2, 4}};
                struct td_reshard_ask ask = {
                    .model = {17 - (int32_t)(n % 2), 2, 1, 2}, /* 17: no even split */
                    .src = {.tp = tps[t][0],
                            .pp = src_pp,
                            .block_size = block_sizes[n % 5].src,
                            .order = 1 + n % 2},
                    .dst = {.tp = tps[t][1],
                            .pp = dst_pp,
                            .block_size = block_sizes[n % 5].dst,
                            .order = 1 + n / 2 % 2},
                    .first_token = (int32_t)(n % 3) * 5,
                    .end_token = 37,
                    .dedup = n & 4,
                    .split = n & 8,
                };
                if (n % 5 == 0) {
                    ask.first_layer = 3;
                    ask.end_layer = 9;
                }
                round_trip(ask, n & 16 ? SHUFFLED : CONSECUTIVE, n);
            }
}

/* Ids, ranks and a side for the tests below; no pools. */
static struct cluster *cluster_for(struct td_reshard_side side, const struct td_reshard_model *m,
                                   int32_t end_token, enum ids ids)
{
    uint64_t rng = 1;
    struct cluster *c = calloc(1, sizeof *c);
    assert_non_null(c);
    c->side = side;
    cluster_open(c, m, end_token, ids, &rng);
    return c;
}

static struct td_reshard_side canonical(int32_t tp, int32_t block_size)
{
    return (struct td_reshard_side){
        .tp = tp, .pp = 1, .block_size = block_size, .order = TD_RESHARD_LAYER_OUTER};
}

static struct td_reshard_ask ask_between(struct cluster *src, struct cluster *dst,
                                         const struct td_reshard_model *m, int32_t end_token)
{
    return (struct td_reshard_ask){*m,
                                   src->side,
                                   dst->side,
                                   .end_token = end_token,
                                   .only_src = TD_RESHARD_ALL,
                                   .only_dst = TD_RESHARD_ALL};
}

static void cluster_drop(struct cluster *c)
{
    cluster_close(c);
    free(c);
}

/* A rank sees its own part of the plan, and the lists of ranks it has no business with may be
 * missing. */
static void one_rank_plans_its_own_part(void **state)
{
    (void)state;
    const struct td_reshard_model m = {4, 4, 2, 2};
    struct cluster *src = cluster_for(
        (struct td_reshard_side){.tp = 8, .pp = 2, .block_size = 4, .order = 1}, &m, 37, SHUFFLED);
    struct cluster *dst = cluster_for(
        (struct td_reshard_side){.tp = 12, .pp = 1, .block_size = 4, .order = 1}, &m, 37, SHUFFLED);
    for (unsigned options = 0; options < 4; options++) {
        struct td_reshard_ask ask = ask_between(src, dst, &m, 37);
        ask.dedup = options & 1;
        ask.split = options & 2;
        struct td_reshard plan;
        struct td_reshard_totals all, all_local, part, part_local, by_src = {0}, by_dst = {0},
                                                                   by_dst_local = {0};
        plan_ok(&ask, &plan);
        td_reshard_total(&plan, 0, &all, &all_local);
        for (int32_t r = 0; r < 16; r++) {
            ask.only_src = r;
            struct td_reshard_rank kept[MAX_RANKS];
            memcpy(kept, src->ranks, sizeof kept);
            for (int32_t i = 0; i < 16; i++)
                if (i != r) src->ranks[i] = (struct td_reshard_rank){0};
            plan_ok(&ask, &plan);
            memcpy(src->ranks, kept, sizeof kept);
            td_reshard_total(&plan, 0, &part, &part_local);
            by_src.bytes += part.bytes;
            by_src.n_pairs += part.n_pairs;
            assert_int_equal(part_local.bytes, 0);
        }
        ask.only_src = TD_RESHARD_ALL;
        for (int32_t r = 0; r < 12; r++) {
            ask.only_dst = r;
            plan_ok(&ask, &plan);
            td_reshard_total(&plan, 0, &part, &part_local);
            by_dst.bytes += part.bytes;
            by_dst.n_pairs += part.n_pairs;
            by_dst_local.bytes += part_local.bytes;
        }
        assert_int_equal(by_src.bytes, all.bytes);
        assert_int_equal(by_src.n_pairs, all.n_pairs);
        assert_int_equal(by_dst.bytes, all.bytes);
        assert_int_equal(by_dst.n_pairs, all.n_pairs);
        assert_int_equal(by_dst_local.bytes, all_local.bytes);
    }
    cluster_drop(src);
    cluster_drop(dst);
}

/* Replicas share the sending: alike to a block when split, and without split one source per dst
 * rank and head, taking turns. */
static void replicas_share_the_sending(void **state)
{
    (void)state;
    static const int32_t tps[][2] = {{8, 1},  {8, 2},   {8, 4},  {8, 8}, {8, 16},
                                     {12, 8}, {16, 12}, {4, 16}, {2, 2}};
    const struct td_reshard_model m = {2, 2, 4, 2};
    const int32_t n_tokens = 16 * 96;
    for (size_t t = 0; t < COUNT(tps); t++)
        for (unsigned options = 0; options < 4; options++) {
            struct cluster *src = cluster_for(canonical(tps[t][0], 16), &m, n_tokens, SHUFFLED);
            struct cluster *dst = cluster_for(canonical(tps[t][1], 16), &m, n_tokens, SHUFFLED);
            struct td_reshard_ask ask = ask_between(src, dst, &m, n_tokens);
            ask.dedup = options & 1;
            ask.split = options & 2;
            struct td_reshard plan;
            plan_ok(&ask, &plan);
            uint64_t sent[16] = {0}, least = UINT64_MAX, most = 0;
            int n_sources[16][2] = {{0}};
            struct td_reshard_cursor cursor = {0};
            struct td_reshard_pair pair;
            while (td_reshard_next_pair(&plan, &cursor, &pair)) {
                if (pair.local) {
                    /* only from a rank that received over the network */
                    assert_true(ask.dedup);
                    assert_int_equal(n_sources[pair.src][pair.first_head] > 0, true);
                    assert_int_equal(n_sources[pair.dst][pair.first_head], 0);
                } else {
                    sent[pair.src] += td_reshard_pair_bytes(&plan, &pair);
                    for (int32_t h = pair.first_head; h < pair.end_head; h++)
                        n_sources[pair.dst][h]++;
                }
            }
            int32_t replicas = tps[t][0] / 2,
                    receivers = ask.dedup || tps[t][1] < 2 ? 1 : tps[t][1] / 2;
            for (int32_t r = 0; r < tps[t][0]; r++) {
                least = sent[r] < least ? sent[r] : least;
                most = sent[r] > most ? sent[r] : most;
            }
            uint64_t one = 2 * 2 * 8 * (uint64_t)n_tokens; /* one head of one receiver */
            if (ask.split) {
                if (least != most)
                    fail_msg("%s: replicas send from %llu to %llu bytes", case_name,
                             (unsigned long long)least, (unsigned long long)most);
                assert_int_equal(least, one * (uint64_t)receivers / (uint64_t)replicas);
            } else {
                for (int32_t r = 0; r < tps[t][1]; r++)
                    for (int h = 0; h < 2; h++) assert_in_range(n_sources[r][h], 0, 1);
                assert_in_range(most - least, 0, one); /* whole receivers cannot be shared more
                                                          evenly */
            }
            cluster_drop(src);
            cluster_drop(dst);
        }
}

/* 32k tokens of an 8B model: 32 layers, 8 KV heads of 128 bf16, 4 GiB. */
static const struct td_reshard_model model_8b = {32, 8, 128, 2};

static uint64_t count_wrs(const struct td_reshard *plan, uint32_t max_sge, uint64_t max_bytes)
{
    struct td_reshard_cursor cursor = {0};
    struct td_reshard_pair pair;
    struct td_reshard_iter it;
    struct td_reshard_wr wr;
    uint64_t n = 0;
    while (td_reshard_next_pair(plan, &cursor, &pair))
        for (td_reshard_iter_init(&it, plan, &pair, TD_RESHARD_PUSH, max_bytes);
             td_reshard_next_wr(&it, max_sge, &wr);)
            n++;
    return n;
}

#define L(tp_, pp_, size)                                                                          \
    {                                                                                              \
        .tp = tp_, .pp = pp_, .block_size = size, .order = TD_RESHARD_LAYER_OUTER                  \
    }
#define H(tp_, pp_, size)                                                                          \
    {                                                                                              \
        .tp = tp_, .pp = pp_, .block_size = size, .order = TD_RESHARD_HEAD_OUTER                   \
    }
static const struct {
    struct td_reshard_side src, dst;
    enum ids ids;
    uint64_t n_runs, average, n_strided, n_wrs_16; /* work requests of at most 16 pieces, no
                                                      cap */
    enum td_reshard_how how;
} long_prompts[] = {
    /* equal sides: one run per block, and one for the whole prompt when the allocators kept
       neighbours */
    {L(1, 1, 16), L(1, 1, 16), SHUFFLED, 0, 2 << 20, 0, 0, TD_RESHARD_DIRECT},
    {L(1, 1, 16), L(1, 1, 16), CONSECUTIVE, 1, (uint64_t)4 << 30, 1, 1, TD_RESHARD_DIRECT},
    {L(8, 1, 16), L(8, 1, 16), CONSECUTIVE, 8, (uint64_t)512 << 20, 8, 8, TD_RESHARD_DIRECT},
    /* halves of a canonical block are slices per layer; the receiver's block is whole, so 16
       of them make one request of 256 KiB */
    {L(1, 1, 16), L(2, 1, 16), CONSECUTIVE, 2048 * 64 * 2, 16 << 10, 2, 2048 * 64 * 2 / 16,
     TD_RESHARD_GATHER},
    /* head outermost: halves are runs */
    {H(1, 1, 16), H(2, 1, 16), CONSECUTIVE, 2048 * 2, 1 << 20, 2, 2048 * 2 / 16, TD_RESHARD_DIRECT},
    /* the receiver gets parts of its blocks from each sender: crumbs on both sides */
    {L(4, 1, 16), L(2, 1, 16), CONSECUTIVE, 2048 * 64 * 4, 8 << 10, 4, 2048 * 64 * 4,
     TD_RESHARD_STAGED},
    /* other block sizes and other orders: the receiver's blocks are whole again */
    {L(1, 1, 16), L(1, 1, 32), CONSECUTIVE, 2048 * 64 * 8, 4 << 10, 2048, 2048 * 64 * 8 / 16,
     TD_RESHARD_GATHER},
    {L(2, 1, 64), H(1, 1, 64), CONSECUTIVE, 512 * 64 * 8, 16 << 10, 2, 512 * 64 * 8 / 16,
     TD_RESHARD_GATHER},
    /* pipelines: a stage's layers are a run */
    {L(1, 1, 16), L(1, 4, 16), SHUFFLED, 2048 * 4, 512 << 10, 0, 0, TD_RESHARD_DIRECT},
};
#undef L
#undef H

static void pains_11_a_long_prompt_needs_few_work_requests(void **state)
{
    (void)state;
    const int32_t n_tokens = 32768;
    for (size_t i = 0; i < COUNT(long_prompts); i++) {
        struct cluster *src =
            cluster_for(long_prompts[i].src, &model_8b, n_tokens, long_prompts[i].ids);
        struct cluster *dst =
            cluster_for(long_prompts[i].dst, &model_8b, n_tokens, long_prompts[i].ids);
        struct td_reshard_ask ask = ask_between(src, dst, &model_8b, n_tokens);
        struct td_reshard plan;
        struct td_reshard_totals t;
        plan_ok(&ask, &plan);
        td_reshard_total(&plan, 0, &t, NULL);
        assert_int_equal(t.bytes, (uint64_t)4 << 30);
        uint64_t n_wrs = count_wrs(&plan, 16, 0);
        print_message("tp %d pp %d block %d order %d -> tp %d pp %d block %d order %d%s: %llu runs "
                      "of %llu bytes, %llu strided; work requests of up "
                      "to 16 pieces: %llu, of at most 1 MiB: %llu\n",
                      ask.src.tp, ask.src.pp, ask.src.block_size, (int)ask.src.order, ask.dst.tp,
                      ask.dst.pp, ask.dst.block_size, (int)ask.dst.order,
                      long_prompts[i].ids == SHUFFLED ? ", shuffled ids" : "",
                      (unsigned long long)t.n_runs, (unsigned long long)td_reshard_average_run(&t),
                      (unsigned long long)t.n_strided, (unsigned long long)n_wrs,
                      (unsigned long long)count_wrs(&plan, 16, 1 << 20));
        if (long_prompts[i].n_runs)
            assert_int_equal(t.n_runs, long_prompts[i].n_runs);
        else
            assert_in_range(t.n_runs, 1, 2048); /* shuffling leaves neighbours */
        assert_true(td_reshard_average_run(&t) >= long_prompts[i].average);
        if (long_prompts[i].n_strided) assert_int_equal(t.n_strided, long_prompts[i].n_strided);
        if (long_prompts[i].n_wrs_16) assert_int_equal(n_wrs, long_prompts[i].n_wrs_16);
        assert_int_equal(td_reshard_choose(&t, TD_RESHARD_PUSH, 16), long_prompts[i].how);
        cluster_drop(src);
        cluster_drop(dst);
    }
}

static void choosing_how(void **state)
{
    (void)state;
    static const struct {
        uint64_t bytes, n_runs, src_runs, dst_runs;
        enum td_reshard_dir dir;
        uint32_t max_sge;
        enum td_reshard_how how;
    } cases[] = {
        {0, 0, 0, 0, TD_RESHARD_PUSH, 16, TD_RESHARD_DIRECT},
        {256 * 100, 256, 256, 256, TD_RESHARD_PUSH, 1, TD_RESHARD_DIRECT}, /* small, but few */
        {257 * 100, 257, 257, 257, TD_RESHARD_PUSH, 1, TD_RESHARD_STAGED},
        {(uint64_t)257 << 15, 257, 257, 257, TD_RESHARD_PUSH, 1, TD_RESHARD_DIRECT},
        {((uint64_t)257 << 15) - 1, 257, 257, 257, TD_RESHARD_PUSH, 16, TD_RESHARD_STAGED},
        {(uint64_t)1024 << 12, 1024, 1024, 1, TD_RESHARD_PUSH, 16, TD_RESHARD_GATHER},
        /* 7 pieces of 4 KiB */
        {(uint64_t)1024 << 12, 1024, 1024, 1, TD_RESHARD_PUSH, 7, TD_RESHARD_STAGED},
        {(uint64_t)1024 << 12, 1024, 1024, 1, TD_RESHARD_PULL, 16, TD_RESHARD_STAGED},
        {(uint64_t)1024 << 12, 1024, 1, 1024, TD_RESHARD_PULL, 16, TD_RESHARD_GATHER},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        struct td_reshard_totals t = {.bytes = cases[i].bytes,
                                      .n_runs = cases[i].n_runs,
                                      .n_side_runs = {cases[i].src_runs, cases[i].dst_runs}};
        if (td_reshard_choose(&t, cases[i].dir, cases[i].max_sge) != cases[i].how)
            fail_msg("case %zu", i);
    }
}

/* Not asserted: a machine under load would fail it. The aim is well under 0.5 ms. */
static void cost_of_planning(void **state)
{
    (void)state;
    static const struct {
        int32_t src_tp, dst_tp, src_block, dst_block;
        enum ids ids;
    } cases[] = {
        {1, 1, 16, 16, CONSECUTIVE}, {1, 1, 16, 16, SHUFFLED}, {4, 2, 16, 16, CONSECUTIVE},
        {4, 2, 16, 16, SHUFFLED},    {8, 8, 16, 32, SHUFFLED},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        struct cluster *src = cluster_for(canonical(cases[i].src_tp, cases[i].src_block), &model_8b,
                                          32768, cases[i].ids);
        struct cluster *dst = cluster_for(canonical(cases[i].dst_tp, cases[i].dst_block), &model_8b,
                                          32768, cases[i].ids);
        struct td_reshard_ask ask = ask_between(src, dst, &model_8b, 32768);
        struct td_reshard plan;
        struct td_reshard_totals t = {0};
        uint64_t plan_ns = UINT64_MAX, total_ns = UINT64_MAX, walk_ns = UINT64_MAX, n_runs = 0;
        for (int k = 0; k < 9; k++) {
            uint64_t t0 = td_now_ns();
            plan_ok(&ask, &plan);
            uint64_t t1 = td_now_ns();
            td_reshard_total(&plan, 1 << 20, &t, NULL);
            uint64_t t2 = td_now_ns();
            struct td_reshard_cursor cursor = {0};
            struct td_reshard_pair pair;
            struct td_reshard_iter it;
            struct td_reshard_run run;
            for (n_runs = 0; td_reshard_next_pair(&plan, &cursor, &pair);)
                for (td_reshard_iter_init(&it, &plan, &pair, TD_RESHARD_PUSH, 1 << 20);
                     td_reshard_next(&it, &run);)
                    n_runs++;
            uint64_t t3 = td_now_ns();
            plan_ns = t1 - t0 < plan_ns ? t1 - t0 : plan_ns;
            total_ns = t2 - t1 < total_ns ? t2 - t1 : total_ns;
            walk_ns = t3 - t2 < walk_ns ? t3 - t2 : walk_ns;
        }
        assert_int_equal(n_runs, t.n_capped);
        print_message("32k tokens of 8B, tp %d -> %d, blocks %d -> %d%s: plan %.1f us, totals %.1f "
                      "us; %llu runs at %.1f ns\n",
                      cases[i].src_tp, cases[i].dst_tp, cases[i].src_block, cases[i].dst_block,
                      cases[i].ids == SHUFFLED ? " shuffled" : "", (double)plan_ns / 1e3,
                      (double)total_ns / 1e3, (unsigned long long)n_runs,
                      (double)walk_ns / (double)n_runs);
        cluster_drop(src);
        cluster_drop(dst);
    }
}

static const int32_t good_ids[] = {3, 1, 2, 0}, bad_ids[] = {0, 4, 1, 2},
                     negative_ids[] = {0, 1, -1, 2};
static const int32_t stages_ok[] = {0, 1, 4}, stages_late[] = {1, 2, 4}, stages_short[] = {0, 2, 3},
                     stages_back[] = {0, 0, 4};
static const struct td_reshard_rank ranks[4] = {
    {good_ids, 4, 4}, {good_ids, 4, 4}, {good_ids, 4, 4}, {good_ids, 4, 4}};
static const struct td_reshard_rank ranks_bad[] = {{bad_ids, 4, 4}},
                                    ranks_negative[] = {{negative_ids, 4, 4}},
                                    ranks_none[] = {{NULL, 4, 4}},
                                    ranks_short[] = {{good_ids, 3, 4}},
                                    ranks_empty[] = {{good_ids, 4, 0}};
#define SIDE                                                                                       \
    {                                                                                              \
        .tp = 1, .pp = 1, .order = TD_RESHARD_LAYER_OUTER, .block_size = 16, .ranks = ranks        \
    }
static const struct td_reshard_ask good_ask = {
    {4, 2, 8, 2}, SIDE, SIDE, .first_token = 16, .end_token = 64, .only_src = -1, .only_dst = -1};
#undef SIDE

static struct {
    struct td_reshard_ask ask;
    td_status status;
    const char *says;
} bad_asks[64];
static size_t n_bad_asks;

#define BAD(field, value, code, text)                                                              \
    do {                                                                                           \
        TD_ASSERT(n_bad_asks < COUNT(bad_asks));                                                   \
        bad_asks[n_bad_asks].ask = good_ask;                                                       \
        bad_asks[n_bad_asks].ask.field = value;                                                    \
        bad_asks[n_bad_asks].status = code;                                                        \
        bad_asks[n_bad_asks++].says = text;                                                        \
    } while (0)
static void bad_models_and_sides(void)
{
    BAD(model.n_layers, 0, TD_ERR_INVALID, "model.n_layers is 0, must be in 1..65536");
    BAD(model.n_layers, -2, TD_ERR_INVALID, "model.n_layers is -2");
    BAD(model.n_kv_heads, 65537, TD_ERR_INVALID, "model.n_kv_heads is 65537, must be in 1..65536");
    BAD(model.head_dim, 0, TD_ERR_INVALID, "model.head_dim is 0");
    BAD(model.element_bytes, 3, TD_ERR_INVALID, "model.element_bytes is 3, must be 1, 2 or 4");
    BAD(src.tp, 0, TD_ERR_INVALID, "src.tp is 0, must be in 1..16");
    BAD(dst.tp, 17, TD_ERR_INVALID, "dst.tp is 17, must be in 1..16");
    BAD(src.tp, 3, TD_ERR_UNSUPPORTED,
        "src.tp is 3 and model.n_kv_heads 2: one must divide the other");
    BAD(dst.pp, 17, TD_ERR_INVALID, "dst.pp is 17, must be in 1..16");
    BAD(dst.pp, 3, TD_ERR_INVALID,
        "dst.pp is 3 and does not divide model.n_layers 4: dst.stage_layers must say the stages");
    BAD(src.order, (enum td_reshard_order)0, TD_ERR_INVALID,
        "src.order is 0, must be 1 (layer outermost) or 2 (head outermost)");
    BAD(dst.order, (enum td_reshard_order)3, TD_ERR_INVALID, "dst.order is 3");
    BAD(src.block_size, 0, TD_ERR_INVALID, "src.block_size is 0, must be in 1..65536");
    BAD(dst.block_size, 65537, TD_ERR_INVALID, "dst.block_size is 65537");
    BAD(src.first_token, 8, TD_ERR_INVALID,
        "src.first_token is 8, must be a multiple of src.block_size 16");
    BAD(src.first_token, 32, TD_ERR_INVALID, "src.first_token is 32, must be in 0..16");
    BAD(dst.first_token, -16, TD_ERR_INVALID, "dst.first_token is -16, must be in 0..16");
}

static void bad_spans(void)
{
    BAD(first_token, 65, TD_ERR_INVALID, "first_token is 65, must be in 0..64");
    BAD(first_token, -1, TD_ERR_INVALID, "first_token is -1");
    BAD(end_token, TD_RESHARD_MAX_TOKENS + 1, TD_ERR_INVALID,
        "end_token is 67108865, must be in 0..67108864");
    BAD(end_token, 65, TD_ERR_INVALID,
        "src.ranks[0].n_ids is 4, must be at least 5 to hold token 64");
    BAD(first_layer, 4, TD_ERR_INVALID, "end_layer is 0, must be in 1..4");
    BAD(end_layer, 5, TD_ERR_INVALID, "end_layer is 5, must be in 1..4");
    BAD(only_src, 1, TD_ERR_INVALID, "only_src is 1, must be in -1..0");
    BAD(only_dst, -2, TD_ERR_INVALID, "only_dst is -2, must be in -1..0");
}

static void bad_ranks_and_stages(void)
{
    BAD(src.ranks, NULL, TD_ERR_INVALID, "src.ranks is NULL, must hold 1 ranks");
    BAD(src.ranks, ranks_bad, TD_ERR_INVALID, "src.ranks[0].block_ids[1] is 4, must be in 0..3");
    BAD(dst.ranks, ranks_negative, TD_ERR_INVALID,
        "dst.ranks[0].block_ids[2] is -1, must be in 0..3");
    BAD(dst.ranks, ranks_none, TD_ERR_INVALID, "dst.ranks[0].block_ids is NULL, must hold 4 ids");
    BAD(dst.ranks, ranks_short, TD_ERR_INVALID,
        "dst.ranks[0].n_ids is 3, must be at least 4 to hold token 63");
    BAD(dst.ranks, ranks_empty, TD_ERR_INVALID,
        "dst.ranks[0].pool_blocks is 0, must be at least 1");
    BAD(model.head_dim, 65536, TD_ERR_INVALID, ""); /* replaced below: 4 x 2 x 2 x 65536 x 2 x 16
                                                       is not 1 GiB */
    bad_asks[n_bad_asks - 1].ask.model = (struct td_reshard_model){65536, 2, 65536, 4};
    bad_asks[n_bad_asks - 1].status = TD_ERR_LIMIT;
    bad_asks[n_bad_asks - 1].says =
        "a src block of 16 tokens, 65536 layers and 2 KV heads is too large, must "
        "be below 1073741824 bytes";
    BAD(src.stage_layers, stages_late, TD_ERR_INVALID, "src.stage_layers[0] is 1, must be 0");
    bad_asks[n_bad_asks - 1].ask.src.pp = 2;
    BAD(dst.stage_layers, stages_short, TD_ERR_INVALID,
        "dst.stage_layers[2] is 3, must be model.n_layers 4");
    bad_asks[n_bad_asks - 1].ask.dst.pp = 2;
    BAD(dst.stage_layers, stages_back, TD_ERR_INVALID,
        "dst.stage_layers[1] is 0, must be above the one before it, 0");
    bad_asks[n_bad_asks - 1].ask.dst.pp = 2;
    BAD(dst.stage_layers, stages_ok, TD_OK, "");
    bad_asks[n_bad_asks - 1].ask.dst.pp = 2;
}
#undef BAD

static void bad_asks_are_named(void **state)
{
    (void)state;
    struct td_reshard plan;
    struct td_err err = {0};
    assert_int_equal(td_reshard_plan(&good_ask, &plan, &err), TD_OK);
    n_bad_asks = 0;
    bad_models_and_sides();
    bad_spans();
    bad_ranks_and_stages();
    for (size_t i = 0; i < n_bad_asks; i++) {
        struct td_reshard before, after;
        memset(&before, 0x5a, sizeof before);
        memset(&after, 0x5a, sizeof after);
        memset(&err, 0, sizeof err);
        td_status s = td_reshard_plan(&bad_asks[i].ask, &after, &err);
        if (s != bad_asks[i].status || !strstr(err.msg, bad_asks[i].says) || err.code != s)
            fail_msg("case %zu answered %s '%s', not %s '%s'", i, td_status_name(s), err.msg,
                     td_status_name(bad_asks[i].status), bad_asks[i].says);
        if (s) assert_memory_equal(&before, &after, sizeof before);
        assert_int_equal(td_reshard_plan(&bad_asks[i].ask, &after, NULL), s);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pains_10_unequal_tp_gives_exact_bytes),
        cmocka_unit_test(every_option_meets_every_range),
        cmocka_unit_test(every_pair_of_pipelines),
        cmocka_unit_test(one_rank_plans_its_own_part),
        cmocka_unit_test(replicas_share_the_sending),
        cmocka_unit_test(pains_11_a_long_prompt_needs_few_work_requests),
        cmocka_unit_test(choosing_how),
        cmocka_unit_test(cost_of_planning),
        cmocka_unit_test(bad_asks_are_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
