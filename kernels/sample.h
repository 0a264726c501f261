/* sample.h - the sampler of a device table: rows of logits in the device's memory to tokens and
 * logprobs, with the bits of the CPU's sampler.
 *
 * Why here: 256 rows of 128,256 logits are 131 MB, two milliseconds of a bus and more of a CPU;
 * what comes back is 176 bytes a row. common/model/sampler.h says what is computed (td_sample is
 * the reference, bit for bit: token, logprobs and status); td_sample_pack and td_sample_unpack
 * there are the host's side of this.
 *
 * One step: the host packs one td_sample_row per row into pinned memory, puts them on the
 * device, calls `sample`, gets the results. The launches depend on n_rows, vocab and `features`
 * only, so they may be part of a recorded graph whose key holds these three. Rows beyond the
 * real ones have logits_row -1. What varies in length - the tokens of a row with penalties, its
 * logit bias - is not put: the device reads it where it is, in pinned memory, if the row needs
 * it. */
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

/* One row's job. tokens and bias: memory that the device can read (alloc_pinned's or its own),
 * untouched until the step is done. */
struct td_sample_row {
    uint64_t seed;
    const int32_t *tokens;             /* [n_tokens] the sequence so far, prompt first; read with
                                          penalties only, else may be NULL */
    const struct td_sample_bias *bias; /* [n_bias] ascending tokens; equal tokens in the order in
                                          which they add up */
    int32_t logits_row;                /* -1: padding; nothing is read and the result is of no
                                          use */
    int32_t n_tokens, n_prompt;        /* the new token's position is n_tokens */
    int32_t n_bias, top_k, n_logprobs;
    float temperature, top_p, min_p;
    float repetition_penalty, presence_penalty, frequency_penalty;
};
_Static_assert(sizeof(struct td_sample_row) == 72, "the host writes it, the device reads it");

/* status: TD_OK; TD_ERR_CORRUPT (no finite logit, or +inf); TD_ERR_INVALID (penalties, and a
 * token outside [0, vocab)). The other fields are td_sampled's, and mean something with TD_OK
 * only; logprob and the top ones only as far as the row asked for them. */
struct td_sample_result {
    int32_t status, token;
    float logprob;
    int32_t n_top;
    int32_t top_tokens[TD_SAMPLE_MAX_TOP];
    float top_logprobs[TD_SAMPLE_MAX_TOP];
};
_Static_assert(sizeof(struct td_sample_result) == 176, "the device writes it, the host reads it");

/* What some row of the step needs; too much costs launches that find nothing to do, too little
 * is the caller's bug: such a row's status is TD_ERR_INTERNAL. */
#define TD_SAMPLE_WEIGHTS 1u /* a temperature above 0, or logprobs */
#define TD_SAMPLE_ADJUST 2u  /* penalties, or a logit bias */

struct td_sample_args {
    const float *logits; /* [.., vocab] f32, row stride logits_stride (elements); not modified */
    int64_t logits_stride;
    int32_t vocab, n_rows; /* n_rows <= max_rows of the scratch */
    uint32_t features;
    const struct td_sample_row *rows; /* [n_rows] device */
    struct td_sample_result *results; /* [n_rows] device */
    uint64_t *totals;                 /* [n_rows, 3] device or NULL: the weight of all candidates
                                         before top-k (0: greedy), and the two sums behind
                                         logprobs (sample_math.h; 0: none asked). For tests: one
                                         unit of 2^44 moves a token once in 10^12 draws */
    void *scratch;                    /* scratch_bytes long, aligned to 256; cleared once by
                                         `sample_clear`, clean again after every step */
};

#endif
