/* compare.h - how far a model is from another on a text: the Kullback-Leibler divergence of their
 * next-token distributions, how often they agree on the most likely token, and both
 * perplexities. */
#ifndef TD_CLI_COMPARE_H
#define TD_CLI_COMPARE_H

#include <stdint.h>
#include <stdio.h>

#include "common/base/thread_pool.h"

struct cli_compare {
    const char *model, *dtype;      /* the original, which also tokenizes the text */
    const char *with, *with_dtype;  /* the other */
    const char *text;               /* file, UTF-8 */
    int32_t context;                /* tokens of a window; every window begins a new sequence */
    int32_t max_tokens;             /* 0: all of the text */
    struct td_thread_pool *threads; /* borrowed */
};

struct cli_compare_result {
    int64_t n_tokens; /* predicted ones: all of a window but its first */
    double kl_mean, kl_p99, kl_max;
    double top1;                        /* share of positions with the same most likely token */
    double perplexity, with_perplexity; /* of the original and of the other */
};

/* Blocks until done, with a progress line on stderr. Both models are in memory together. */
td_status cli_compare_run(const struct cli_compare *c, struct cli_compare_result *ret,
                          struct td_err *err);
/* A small table. */
void cli_compare_print(FILE *out, const struct cli_compare *c, const struct cli_compare_result *r);

#endif
