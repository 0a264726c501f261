/* worker_metrics.c - a worker's metrics: one row each, with where its number stands.
 *
 * Registered at boot, set by the engine thread after each turn of its loop from the same numbers
 * as the snapshot. The sources keep totals, so a counter is given what its total has grown by. */
#include "common/worker/worker_parts.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "common/base/log.h"
#include "common/base/metrics.h"

enum kind {
    COUNTS,
    LEVEL,
    RATIO
}; /* a counter; a gauge of an unsigned number; a gauge of a double */

struct row {
    enum kind kind;
    bool by_path; /* an array over enum td_xfer_path, one series for each path with its name as
                     label */
    const char *name, *labels, *help;
    size_t offset, bytes; /* of the number, or of an array's first, in struct td_worker_numbers */
};

#define FIELD(f) offsetof(struct td_worker_numbers, f), sizeof((struct td_worker_numbers){0}.f)
#define COUNTER(name, labels, f, help)                                                             \
    {                                                                                              \
        COUNTS, false, name, labels, help, FIELD(f)                                                \
    }
#define GAUGE(name, f, help)                                                                       \
    {                                                                                              \
        LEVEL, false, name, "", help, FIELD(f)                                                     \
    }
#define GAUGE_RATIO(name, f, help)                                                                 \
    {                                                                                              \
        RATIO, false, name, "", help, FIELD(f)                                                     \
    }
#define COUNTER_BY_PATH(name, f, help)                                                             \
    {                                                                                              \
        COUNTS, true, name, "", help, FIELD(f[0])                                                  \
    }
#define GAUGE_BY_PATH(name, f, help)                                                               \
    {                                                                                              \
        LEVEL, true, name, "", help, FIELD(f[0])                                                   \
    }

static const struct row rows[] = {
    GAUGE_RATIO("td_kv_cache_usage_ratio", kv_usage,
                "KV blocks held by live requests over all blocks"),
    GAUGE("td_kv_bytes_per_token", kv_bytes_per_token,
          "Bytes that the KV of a token takes here and in a transfer, with its scales"),
    GAUGE("td_num_requests_running", n_running, "Requests in the step loop"),
    GAUGE("td_num_requests_waiting", n_waiting, "Requests waiting for KV blocks"),
    COUNTER("td_num_preemptions_total", "", n_preemptions,
            "Sequences thrown out of the KV pool and computed again"),
    COUNTER("td_prompt_tokens_total", "", prefill_tokens, "Prompt tokens computed here"),
    COUNTER("td_generation_tokens_total", "", decode_tokens,
            "Decode steps of sequences, one token each"),
    COUNTER("td_prefix_cache_queries_total", "", kv.n_prefix_queries_tokens,
            "Tokens looked up in the prefix cache"),
    COUNTER("td_prefix_cache_hits_total", "", kv.n_prefix_hit_tokens,
            "Tokens found in the prefix cache"),
    COUNTER("td_kv_transfer_bytes_total", "direction=\"sent\"", xfer.bytes_sent,
            "KV bytes moved between workers"),
    COUNTER("td_kv_transfer_bytes_total", "direction=\"received\"", xfer.bytes_received,
            "KV bytes moved between workers"),
    COUNTER("td_engine_steps_total", "", steps, "Batches run"),
    COUNTER("td_moe_rows_total", "", experts.rows,
            "Rows given to experts of mixtures, each once in a layer for each expert it chose"),
    COUNTER("td_moe_busiest_expert_rows_total", "", experts.busiest_rows,
            "Rows of the busiest expert of each layer and step, summed"),
    COUNTER("td_moe_busiest_part_rows_total", "", experts.busiest_part_rows,
            "Rows of the busiest part of ep of each layer and step, summed"),
    GAUGE_RATIO("td_moe_busiest_expert_ratio", experts.busiest_share,
                "Rows of the busiest expert over the mean of its layer's experts, since the start, "
                "of the layer where that is the most"),
    GAUGE("td_moe_experts", expert_memory.n, "Experts of all layers in this process"),
    GAUGE("td_moe_experts_packed", expert_memory.n_packed, "Experts that are packed in memory"),
    GAUGE("td_moe_experts_packed_bytes", expert_memory.packed_bytes, "Memory of packed experts"),
    COUNTER("td_moe_expert_packings_total", "", expert_memory.packings,
            "Experts packed because a row chose them"),
    GAUGE_BY_PATH("td_kv_transfer_peers", xfer.conns_by_path,
                  "KV connections that stand, by the path chosen"),
    COUNTER_BY_PATH("td_kv_transfer_path_bytes_total", xfer.bytes_by_path,
                    "KV bytes sent and received, by path"),
    COUNTER("td_kv_transfer_fallbacks_total", "", xfer.n_fallbacks,
            "KV connections that fell back to a worse path"),
    COUNTER("td_kv_transfer_fenced_total", "", xfer.n_fenced,
            "Grants whose writer was fenced because it could not say that it had retired"),
    COUNTER("td_kv_digest_blocks_total", "", xfer.n_digests, "KV blocks whose digest was compared"),
    COUNTER("td_kv_digest_mismatches_total", "", xfer.n_digest_mismatches,
            "KV blocks that differed from what the sender read"),
    COUNTER("td_kv_transfer_evicted_total", "", xfer.n_evicted,
            "Grants whose writer did not answer and lost its memory windows"),
    COUNTER("td_rdma_windows_total", "", xfer.n_windows, "Memory windows opened for grants"),
    COUNTER("td_rdma_wide_windows_total", "", xfer.n_wide_windows,
            "Grants whose windows covered blocks of others, for want of enough windows"),
    COUNTER("td_rdma_gpu_flushes_total", "", xfer.n_gpu_flushes,
            "READs behind NICs' writes to GPU memory, one for each rail and round"),
    COUNTER("td_rdma_rail_errors_total", "", xfer.n_rail_errors,
            "Errors of RDMA devices and their links"),
    COUNTER("td_kv_bad_frames_total", "", xfer.n_bad_frames,
            "Frames on the KV port that broke the protocol; each ended its connection"),
    COUNTER("td_kv_refused_peers_total", "", xfer.n_refused_peers,
            "Connections to the KV port that were turned away"),
    COUNTER("td_kv_stale_frames_total", "", xfer.n_stale_frames,
            "KV frames of grants or attempts that are over; dropped"),
};

#define N_ROWS (sizeof rows / sizeof *rows)

/* One worker in a process. [path] is 0 for rows that are not by path. */
static struct {
    struct td_metric *metric;
    uint64_t seen; /* the total at the last update */
} series[N_ROWS][TD_XFER_N_PATHS];

void td_worker_metrics_open(void)
{
    for (size_t i = 0; i < N_ROWS; i++) {
        const struct row *r = &rows[i];
        int first = r->by_path ? TD_XFER_PATH_AUTO + 1 : 0, end = r->by_path ? TD_XFER_N_PATHS : 1;
        for (int p = first; p < end; p++) {
            char label[64];
            snprintf(label, sizeof label, "path=\"%s\"", td_xfer_path_name((enum td_xfer_path)p));
            const char *labels = r->by_path ? label : r->labels;
            series[i][p].metric = r->kind == COUNTS ? td_counter(r->name, labels, r->help)
                                                    : td_gauge(r->name, labels, r->help);
        }
    }
}

static uint64_t number_at(const uint8_t *at, size_t bytes)
{
    uint64_t u64;
    uint32_t u32;
    TD_ASSERT(bytes == sizeof u64 || bytes == sizeof u32);
    if (bytes == sizeof u64) return memcpy(&u64, at, sizeof u64), u64;
    memcpy(&u32, at, sizeof u32);
    return u32;
}

static void update_row(const struct row *r, int path, const struct td_worker_numbers *n)
{
    const uint8_t *at = (const uint8_t *)n + r->offset + (size_t)path * r->bytes;
    size_t i = (size_t)(r - rows);
    if (r->kind == RATIO) {
        double ratio;
        memcpy(&ratio, at, sizeof ratio);
        td_metric_set(series[i][path].metric, ratio);
        return;
    }
    uint64_t total = number_at(at, r->bytes), *seen = &series[i][path].seen;
    if (r->kind == LEVEL)
        td_metric_set(series[i][path].metric, (double)total);
    else if (total > *seen)
        td_metric_add(series[i][path].metric, total - *seen);
    *seen = total;
}

void td_worker_metrics_update(const struct td_worker_numbers *n)
{
    static bool told_wide;
    if (n->xfer.n_wide_windows && !told_wide) {
        told_wide = true;
        td_info("rdma_windows_wide", "msg=\"a grant has more pieces than memory windows are free; "
                                     "td_rdma_wide_windows_total counts further ones\"");
    }
    for (size_t i = 0; i < N_ROWS; i++) {
        int first = rows[i].by_path ? TD_XFER_PATH_AUTO + 1 : 0;
        int end = rows[i].by_path ? TD_XFER_N_PATHS : 1;
        for (int p = first; p < end; p++) update_row(&rows[i], p, n);
    }
}
