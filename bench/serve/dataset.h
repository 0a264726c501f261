/* dataset.h - what is sent: prompts and output lengths, made from a seed or read from a file, and
 * the arrival times of traces.
 *
 * Prompts of token ids are computed when asked for (bench_dataset_tokens), from (seed, request) or,
 * in traces with hash ids, from the hash id alone: two requests whose lists begin alike begin with
 * the same tokens, so a prefix hit of the trace is a prefix hit of the server.
 *
 * Invariants: every item has output_len >= 1; either text, or input_len >= 1 tokens; at_s
 * ascends in traces. One thread; files are outside input: errors name file, line, field, value
 * and limit, lengths are bounded. */
#ifndef BENCH_SERVE_DATASET_H
#define BENCH_SERVE_DATASET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

#define BENCH_MAX_TOKENS 10000000 /* of one prompt or output in a file */
#define BENCH_MAX_REQUESTS 10000000
#define BENCH_TRACE_BLOCK 512 /* tokens a Mooncake hash id stands for */

enum bench_dataset_kind {
    BENCH_RANDOM,
    BENCH_PREFIX,
    BENCH_SHAREGPT,
    BENCH_CUSTOM,
    BENCH_TIMED,
    BENCH_MOONCAKE,
    BENCH_AZURE,
    BENCH_N_DATASETS
};
#define BENCH_DATASET_NAMES "random|prefix_repetition|sharegpt|custom|timed_trace|mooncake|azure"

struct bench_dataset_config {
    enum bench_dataset_kind kind;
    const char *path;    /* all but the first two */
    uint64_t n_requests; /* 0 = all of the file; random kinds need a number */
    uint64_t seed;
    uint32_t vocab;                  /* token ids are below it; texts (sharegpt, custom) do not
                                        need it */
    uint64_t input_len, output_len;  /* random: means; sharegpt, custom: output_len > 0
                                        replaces the file's */
    double range_ratio;              /* random: lengths uniform in len * (1 -+ ratio), [0, 1) */
    uint64_t prefix_len, n_prefixes; /* random: shared tokens before each prompt;
                                        prefix_repetition: also how many prefixes */
    bool shuffle;                    /* sharegpt, custom */
    double time_scale;               /* traces: time stamps times this, > 0 */
    double length_scale;             /* traces: lengths times this, > 0 */
    uint64_t block_tokens;           /* mooncake: tokens for one hash id; 0 = 512 *
                                        length_scale, at least 1 */
    bool spread;                     /* mooncake: requests of one time stamp are spread up to
                                        the next (they were rounded to about 3 s) */
    uint64_t max_input_len, max_output_len; /* longer ones are cut to these; 0 = not */
    /* sharegpt: fills counts[n] with the texts' lengths in tokens. */
    td_status (*count_tokens)(void *ctx, const char *const *texts, size_t n, int32_t *counts,
                              struct td_err *err);
    void *count_ctx;
};

struct bench_item {
    double at_s;       /* traces: after the first request */
    int32_t input_len; /* tokens; text: 0 = not known before it is sent */
    int32_t output_len;
    const char *text;       /* NULL = token ids */
    const uint64_t *hashes; /* mooncake */
    uint32_t n_hashes;
};

struct bench_dataset;

td_status bench_dataset_open(const struct bench_dataset_config *config,
                             struct bench_dataset **ret_dataset, struct td_err *err);
void bench_dataset_close(struct bench_dataset *d);
size_t bench_dataset_size(const struct bench_dataset *d);
bool bench_dataset_is_trace(enum bench_dataset_kind kind);
/* items that max_input_len or max_output_len cut */
uint64_t bench_dataset_n_cut(const struct bench_dataset *d);
/* mooncake: tokens a hash id stands for */
uint64_t bench_dataset_block_tokens(const struct bench_dataset *d);
const struct bench_item *bench_dataset_item(const struct bench_dataset *d, size_t i);
/* Prompt i, which has no text, into ret_ids[input_len]. */
void bench_dataset_tokens(const struct bench_dataset *d, size_t i, int32_t *ret_ids);

#endif
