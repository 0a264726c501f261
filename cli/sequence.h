/* sequence.h - one sequence through a model, chunk by chunk, with a KV cache of its own: what
 * `logits` and `compare` run. One thread. */
#ifndef TD_CLI_SEQUENCE_H
#define TD_CLI_SEQUENCE_H

#include "common/base/mem.h"
#include "common/model/model.h"

struct cli_sequence {
    struct td_model *model;
    struct td_kv_layout kv;
    struct td_arena arena;
    void *cache; /* the device's, or the arena's */
    struct td_workspace *ws;
    int32_t *table, *rows, *zeros, *positions;
    int32_t max_len, chunk;
    const struct td_forward_inputs *inputs; /* NULL; may be set behind open */
};

/* For sequences of at most max_len tokens and chunks of at most `chunk`. `model` is borrowed. Call
 * cli_sequence_close whatever it returns. */
td_status cli_sequence_open(struct cli_sequence *q, struct td_model *model, int32_t max_len,
                            int32_t chunk, struct td_err *err);
void cli_sequence_close(struct cli_sequence *q);

/* Computes tokens[0..n) at positions [at, at + n), n <= chunk; what came before was computed by
 * earlier calls. *ret_logits is [n, vocab], valid until the next call. TD_ERR_CORRUPT: a logit is
 * no number. */
td_status cli_sequence_forward(struct cli_sequence *q, const int32_t *tokens, int32_t at, int32_t n,
                               float **ret_logits, struct td_err *err);

/* The ids of a UTF-8 file by the tokenizer of `model`, special tokens added, at most max_tokens (0:
 * all) and at least 2; each below vocab. The caller frees ret_ids, on failure too. */
struct td_token_list;
td_status cli_read_tokens(const char *model, const char *text, int32_t max_tokens, int32_t vocab,
                          struct td_token_list *ret_ids, struct td_err *err);

#endif
