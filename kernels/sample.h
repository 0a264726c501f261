/* sample.h - the sampler of a device table: from rows of logits in the device's memory to tokens
 * and logprobs, with the same bits as the CPU's sampler.
 *
 * Why here: 256 rows of 128,256 logits are 131 MB: 2 ms on the bus to the host and more than that
 * on a CPU. The results are 176 bytes a row. common/model/sampler.h says what is computed;
 * td_sample is the reference, bit for bit, for token, logprobs and status. td_sample_pack and
 * td_sample_unpack there are the host's side.
 *
 * One step: the host packs one td_sample_row per row into pinned memory, puts them on the device,
 * calls `sample` and gets the results. The launches depend on n_rows, vocab and `features` only, so
 * they may be part of a recorded graph whose key holds these three. Padding rows have logits_row
 * -1. Two inputs vary in length, the tokens of a row with penalties and its logit bias: the host
 * does not put these, because the device reads them where they lie in pinned memory, when the row
 * needs them. */
#ifndef TD_KERNELS_SAMPLE_H
#define TD_KERNELS_SAMPLE_H

#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

#define TD_SAMPLE_MAX_TOP 20
#define TD_SAMPLE_MAX_BIAS 1024
#define TD_SAMPLE_MAX_VOCAB (1 << 19)

struct td_sample_bias {
    int32_t token; /* in [0, vocab) */
    float bias;
};

/* The parameters of one row. `tokens` and `bias` lie in memory that the device can read (from
 * alloc_pinned or alloc) and must not change until the step is done. */
struct td_sample_row {
    uint64_t seed;
    /* [n_tokens] the sequence so far, prompt first; read only when the row has penalties, else may
     * be NULL */
    const int32_t *tokens;
    /* [n_bias] in ascending order of token; biases of one token are added in the order given */
    const struct td_sample_bias *bias;
    /* the row of td_sample_args.logits; -1: padding, nothing is read and the result is
     * meaningless */
    int32_t logits_row;
    int32_t n_tokens, n_prompt; /* the new token's position is n_tokens */
    int32_t n_bias, top_k, n_logprobs;
    float temperature, top_p, min_p;
    float repetition_penalty, presence_penalty, frequency_penalty;
};
_Static_assert(sizeof(struct td_sample_row) == 72, "the host writes it, the device reads it");

/* status: TD_OK; TD_ERR_CORRUPT (no finite logit, or +inf); TD_ERR_INVALID (the row has penalties
 * and a token outside [0, vocab)). The other fields are those of struct td_sampled and are valid
 * with TD_OK only; logprob and the top lists are valid only as far as the row asked for them. */
struct td_sample_result {
    int32_t status, token;
    float logprob;
    int32_t n_top;
    int32_t top_tokens[TD_SAMPLE_MAX_TOP];
    float top_logprobs[TD_SAMPLE_MAX_TOP];
};
_Static_assert(sizeof(struct td_sample_result) == 176, "the device writes it, the host reads it");

/* td_sample_args.features: what at least one row of the step needs. A bit too many costs launches
 * that find nothing to do. A bit too few is the caller's bug: the rows that need it get the status
 * TD_ERR_INTERNAL. */
#define TD_SAMPLE_WEIGHTS 1u /* some row has a temperature above 0, or wants logprobs */
#define TD_SAMPLE_ADJUST 2u  /* some row has penalties, or a logit bias */

struct td_sample_args {
    const float *logits; /* [.., vocab] f32, row stride logits_stride (elements); not modified */
    int64_t logits_stride;
    int32_t vocab, n_rows; /* n_rows <= max_rows of the scratch */
    uint32_t features;
    const struct td_sample_row *rows; /* [n_rows] device */
    struct td_sample_result *results; /* [n_rows] device */
    /* For tests: [n_rows, 3] on the device, or NULL. The weight of all candidates before top-k (0:
     * greedy), and the two sums behind the logprobs (sample_math.h; 0: none asked). Tests compare
     * these because one unit of 2^-44 in a sum changes a token only once in 10^12 draws. */
    uint64_t *totals;
    /* sample_scratch_bytes() bytes, aligned to 256; cleared once by `sample_clear`, and clean again
     * after every step */
    void *scratch;
};

#endif
