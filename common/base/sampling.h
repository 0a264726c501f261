/* sampling.h - the sampling parameters of a request, and their limits.
 *
 * Why here: the router refuses a bad request before any worker sees it, and a worker checks what
 * the router sends. Both use this check, and the router links no model. common/model/sampler.h says
 * what the fields do to the logits.
 *
 * Pure; any thread. */
#ifndef TD_BASE_SAMPLING_H
#define TD_BASE_SAMPLING_H

#include <stdint.h>

#include "common/base/status.h"

#define TD_MAX_LOGIT_BIAS 1024
#define TD_MAX_TOP_LOGPROBS 20
#define TD_MAX_STOP_TOKENS 128
#define TD_MAX_ALLOWED_TOKENS 65536
#define TD_MAX_BAD_WORDS 256 /* sequences of tokens; a word of a client is one or two */
#define TD_MAX_BAD_WORD_TOKENS 32

struct td_logit_bias {
    int32_t token;
    float bias;
};

struct td_sampling {
    float temperature;        /* 0 = greedy; <= 100 */
    int32_t top_k;            /* 0 = off */
    float top_p;              /* (0, 1], 1 = off */
    float min_p;              /* [0, 1], 0 = off */
    float repetition_penalty; /* > 0, 1 = off; prompt and output tokens */
    float presence_penalty;   /* [-2, 2]; output tokens only */
    float frequency_penalty;  /* [-2, 2]; output tokens only */
    uint64_t seed;
    int32_t n_logprobs; /* -1 = none, 0 = of the chosen token, n = also of the n best tokens */
    const struct td_logit_bias *logit_bias; /* borrowed */
    int32_t n_logit_bias;
    /* Which tokens may be chosen: bit t of word t / 64 for token t. Borrowed; NULL = all. Of one
     * step: structured output, or a filter of tokens, sets it before it samples. */
    const uint64_t *allowed;
};

/* Refuses NaN, negative and out-of-range values (TD_ERR_INVALID; the message has field name, value
 * and limit). vocab: the number of tokens of the model; tokens of logit_bias must be below it. */
td_status td_sampling_check(const struct td_sampling *s, int32_t vocab, struct td_err *err);

#endif
