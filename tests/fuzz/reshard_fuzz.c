/* reshard_fuzz.c - any ask at all: it is refused with a message, or every walk of its plan stays
 * inside the pools and moves the counted bytes. Numbers are taken as they come or folded into
 * what passes, as a byte says, so that both the checks and the walks are met. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "common/kv/reshard.h"

#define MAX_IDS 32
#define MAX_RUNS 4096 /* of one walk: a plan may have very many */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

struct input {
    const uint8_t *at;
    size_t left;
};

static int32_t take(struct input *in, int32_t fold)
{
    int32_t v = 0;
    size_t n = in->left < 3 ? in->left : 3;
    memcpy(&v, in->at, n);
    in->at += n;
    in->left -= n;
    /* wild, and often negative */
    if ((v & 0xff) == 0xff) return (int32_t)((uint32_t)v << 8 | 0xf0);
    return (v >> 8) % fold;
}

static struct td_reshard_side take_side(struct input *in, struct td_reshard_rank *ranks,
                                        int32_t *ids, int32_t *stages)
{
    struct td_reshard_side side = {.tp = 1 + take(in, 16),
                                   .pp = 1 + take(in, 4),
                                   .order = (enum td_reshard_order)(1 + take(in, 2)),
                                   .block_size = 1 + take(in, 24),
                                   .first_token = take(in, 2),
                                   .ranks = ranks};
    if (side.first_token == 1) side.first_token = side.block_size;
    if (take(in, 2)) {
        for (int i = 1; i <= TD_RESHARD_MAX_DEGREE; i++)
            stages[i] = (int32_t)((uint32_t)stages[i - 1] + (uint32_t)take(in, 4));
        side.stage_layers = stages;
    }
    for (int i = 0; i < MAX_IDS; i++) ids[i] = take(in, MAX_IDS);
    for (int i = 0; i < TD_RESHARD_MAX_RANKS; i++)
        ranks[i] = (struct td_reshard_rank){ids, MAX_IDS, MAX_IDS};
    int32_t odd = take(in, TD_RESHARD_MAX_RANKS);
    if (odd >= 0 && odd < TD_RESHARD_MAX_RANKS) {
        /* how long the array is, the caller must know */
        ranks[odd].n_ids = take(in, MAX_IDS) % (MAX_IDS + 1);
        ranks[odd].pool_blocks = take(in, 2 * MAX_IDS);
    }
    return side;
}

static void check_inside(uint64_t offset, uint64_t bytes, uint64_t pool_bytes)
{
    TD_ASSERT(bytes > 0 && bytes <= pool_bytes && offset <= pool_bytes - bytes);
}

static void walk(const struct td_reshard *plan, const struct td_reshard_pair *pair,
                 enum td_reshard_dir dir, uint64_t max_bytes, uint32_t max_sge)
{
    uint64_t src_bytes = td_reshard_pool_bytes(plan, pair->local, pair->src),
             dst_bytes = td_reshard_pool_bytes(plan, 1, pair->dst);
    uint64_t bytes = td_reshard_pair_bytes(plan, pair), moved = 0, n_runs = 0, n_capped = 0, n = 0;
    struct td_reshard_totals totals = {0};
    struct td_reshard_iter it;
    struct td_reshard_strided d;
    struct td_reshard_run run;
    struct td_reshard_wr wr;
    td_reshard_count(plan, pair, max_bytes, &totals);
    TD_ASSERT(totals.bytes == bytes && bytes > 0);

    for (td_reshard_iter_init(&it, plan, pair, dir, max_bytes); td_reshard_next_strided(&it, &d);
         n++) {
        uint64_t src_end = d.src_offset, dst_end = d.dst_offset, count = 1;
        for (uint32_t i = 0; i < d.n_dims; i++) {
            count *= d.dims[i].count;
            src_end += (d.dims[i].count - 1) * d.dims[i].src_stride;
            dst_end += (d.dims[i].count - 1) * d.dims[i].dst_stride;
        }
        check_inside(src_end, d.run_bytes, src_bytes);
        check_inside(dst_end, d.run_bytes, dst_bytes);
        moved += count * d.run_bytes;
        n_runs += count;
    }
    TD_ASSERT(moved == bytes && n == totals.n_strided && n_runs == totals.n_runs);

    moved = 0;
    for (td_reshard_iter_init(&it, plan, pair, dir, max_bytes);
         n_capped < MAX_RUNS && td_reshard_next(&it, &run); n_capped++) {
        check_inside(run.src_offset, run.bytes, src_bytes);
        check_inside(run.dst_offset, run.bytes, dst_bytes);
        moved += run.bytes;
    }
    if (n_capped < MAX_RUNS) TD_ASSERT(moved == bytes && n_capped == totals.n_capped);

    moved = n = 0;
    for (td_reshard_iter_init(&it, plan, pair, dir, max_bytes);
         n < MAX_RUNS / 16 && td_reshard_next_wr(&it, max_sge, &wr); n++) {
        uint64_t sum = 0;
        for (uint32_t i = 0; i < wr.n_sge; i++) {
            check_inside(wr.sge[i].offset, wr.sge[i].bytes,
                         dir == TD_RESHARD_PUSH ? src_bytes : dst_bytes);
            sum += wr.sge[i].bytes;
        }
        TD_ASSERT(sum == wr.bytes && wr.n_sge >= 1 && wr.n_sge <= max_sge &&
                  (!max_bytes || wr.bytes <= max_bytes));
        check_inside(wr.remote_offset, wr.bytes, dir == TD_RESHARD_PUSH ? dst_bytes : src_bytes);
        moved += wr.bytes;
    }
    if (n < MAX_RUNS / 16) TD_ASSERT(moved == bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    static struct td_reshard_rank ranks[2][TD_RESHARD_MAX_RANKS];
    static int32_t ids[2][MAX_IDS], stages[2][TD_RESHARD_MAX_DEGREE + 1];
    struct input in = {data, n_bytes};
    struct td_reshard_ask ask = {
        .model = {1 + take(&in, 16), 1 + take(&in, 16), 1 + take(&in, 200), take(&in, 6)}};
    ask.dedup = take(&in, 2);
    ask.split = take(&in, 2);
    ask.only_src = take(&in, 4) - 1;
    ask.only_dst = take(&in, 4) - 1;
    ask.first_token = take(&in, 80);
    ask.end_token = take(&in, 200);
    ask.first_layer = take(&in, 3);
    ask.end_layer = take(&in, 16);
    uint64_t max_bytes = (uint64_t)(uint32_t)take(&in, 20000);
    uint32_t max_sge = 1 + (uint32_t)take(&in, TD_RESHARD_SGE_MAX) % TD_RESHARD_SGE_MAX;
    ask.src = take_side(&in, ranks[0], ids[0], stages[0]);
    ask.dst = take_side(&in, ranks[1], ids[1], stages[1]);

    struct td_reshard plan;
    struct td_err err = {0};
    td_status status = td_reshard_plan(&ask, &plan, &err);
    TD_ASSERT((status == TD_OK) == (err.msg[0] == 0));
    if (status) return 0;
    struct td_reshard_cursor cursor = {0};
    struct td_reshard_pair pair;
    uint64_t moved = 0, n_pairs = 0;
    struct td_reshard_totals network, local;
    while (td_reshard_next_pair(&plan, &cursor, &pair)) {
        if (n_pairs++ % 7 == 0)
            walk(&plan, &pair, n_pairs & 8 ? TD_RESHARD_PULL : TD_RESHARD_PUSH, max_bytes, max_sge);
        moved += td_reshard_pair_bytes(&plan, &pair);
    }
    td_reshard_total(&plan, max_bytes, &network, &local);
    TD_ASSERT(network.bytes + local.bytes == moved && network.n_pairs + local.n_pairs == n_pairs);
    td_reshard_choose(&network, TD_RESHARD_PUSH, max_sge);
    return 0;
}
