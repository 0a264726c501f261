/* sampler.h - chooses one token from one row of logits: penalties, bias, temperature, top-k, top-p,
 * min-p, logprobs.
 *
 * Randomness is Philox4x32-10 (Salmon et al. 2011) keyed by (seed, position of the new token in the
 * sequence). The token depends on nothing else, so a failover, another batch or another worker
 * draws the same one (I1). Pure; thread-safe for distinct outputs.
 *
 * Order (vLLM's): logprobs are the log-softmax of the raw logits. Then come logit bias, repetition,
 * presence and frequency penalties; then tokens that are not allowed become -inf; greedy if
 * temperature == 0; else temperature, min-p, top-k (exactly k, ties by lower id), top-p of the
 * rest, and a draw by inverse CDF in descending probability (ties by lower id). Every compiler and
 * CPU gives the same bits: see sampler.c. NaN and -inf logits are never chosen. */
#ifndef TD_MODEL_SAMPLER_H
#define TD_MODEL_SAMPLER_H

#include <stdbool.h>
#include <stdint.h>

#include "common/base/sampling.h"
#include "common/base/status.h"
#include "kernels/sample.h"

struct td_sampled {
    int32_t token;
    float logprob; /* of token, when n_logprobs >= 0 */
    int32_t n_top;
    int32_t top_tokens[TD_MAX_TOP_LOGPROBS]; /* descending logprob, ties by lower id */
    float top_logprobs[TD_MAX_TOP_LOGPROBS];
};

struct td_sampler; /* scratch memory for one vocabulary: sized once, used by one thread at a time */

td_status td_sampler_create(int32_t vocab, struct td_sampler **ret_sampler, struct td_err *err);
void td_sampler_destroy(struct td_sampler *sampler);

/* Samples one token. tokens[0..n_tokens) is the sequence so far, of which the first n_prompt are
 * the prompt; the new token's position is n_tokens. logits [vocab] is not modified. s has passed
 * td_sampling_check(). TD_ERR_CORRUPT: the row has no finite logit of an allowed token, or +inf.
 * TD_ERR_INVALID: there are penalties and a token outside [0, vocab). */
td_status td_sample(struct td_sampler *sampler, const struct td_sampling *s, const float *logits,
                    const int32_t *tokens, int32_t n_tokens, int32_t n_prompt,
                    struct td_sampled *ret_sampled);

/* What a row of logits says of a token that is known already. */
struct td_scored {
    struct td_sampled at; /* token, logprob, the best beside it: the bits that td_sample gives */
    int32_t rank;         /* of the token, 1 = no other is more probable */
};
/* n_top: 0..TD_MAX_TOP_LOGPROBS. TD_ERR_CORRUPT as above. Thread-safe for distinct outputs. */
td_status td_sample_score(const float *logits, int32_t vocab, int32_t token, int32_t n_top,
                          struct td_scored *ret_scored);

/* The same on a device table (kernels/sample.h), row by row with the same bits: td_sample_pack,
 * td_device.sample, td_sample_unpack. td_sample_pack writes *ret_row from a checked s and adds to
 * *features what the row needs (0 before the first row of a step). It copies the tokens, if s has
 * penalties, and the bias to payload->base + payload->used: pinned memory of `bytes` bytes, which
 * must not change until the step is done. td_sample_payload_bytes says how many bytes a row takes.
 * TD_ERR_LIMIT: no room, nothing changed. */
struct td_sample_payload {
    unsigned char *base; /* aligned to 8 */
    size_t bytes, used;
};

size_t td_sample_payload_bytes(const struct td_sampling *s, int32_t n_tokens);
td_status td_sample_pack(const struct td_sampling *s, const int32_t *tokens, int32_t n_tokens,
                         int32_t n_prompt, int32_t logits_row, struct td_sample_payload *payload,
                         struct td_sample_row *ret_row, uint32_t *features);
/* fills a padding row, for which nothing is computed */
void td_sample_pack_padding(struct td_sample_row *ret_row);

/* Converts to what td_sample would have returned; *ret_sampled is untouched unless TD_OK. */
td_status td_sample_unpack(const struct td_sample_result *result, struct td_sampled *ret_sampled);

/* Philox4x32-10: out = f(counter, key). Public for tests with its published vectors and against the
 * CUDA version. */
void td_philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t ret_out[4]);

#endif
