/* sequence.c - see sequence.h. */
#include "cli/sequence.h"

#include <math.h>
#include <stdlib.h>

#include "common/text/tokenizer.h"
#include "kernels/device.h"

#define TEXT_BYTES_MAX ((size_t)64 << 20)

td_status cli_sequence_open(struct cli_sequence *q, struct td_model *model, int32_t max_len,
                            int32_t chunk, struct td_err *err)
{
    enum { BLOCK = 16 };
    const struct td_device *dev = td_model_device(model);
    int32_t n_blocks = (max_len + BLOCK - 1) / BLOCK;
    *q = (struct cli_sequence){
        .model = model, .arena = {.memfd = -1}, .max_len = max_len, .chunk = chunk};
    q->table = calloc((size_t)n_blocks, sizeof *q->table);
    q->rows = calloc((size_t)chunk, sizeof *q->rows);
    q->zeros = calloc((size_t)chunk, sizeof *q->zeros);
    q->positions = calloc((size_t)chunk, sizeof *q->positions);
    if (!q->table || !q->rows || !q->zeros || !q->positions)
        return td_fail(err, TD_ERR_NOMEM, "out of memory");
    for (int32_t i = 0; i < n_blocks; i++) q->table[i] = i;
    td_status s = td_model_kv_layout(model, BLOCK, &q->kv, err);
    if (s) return s;
    size_t bytes = (size_t)n_blocks * q->kv.block_bytes;
    s = dev ? dev->alloc(bytes, "kv", &q->cache, err)
            : td_arena_create(bytes, 0, "kv", &q->arena, err);
    if (!s && !dev) q->cache = q->arena.base;
    return s ? s : td_workspace_create(model, chunk, chunk, &q->ws, err);
}

void cli_sequence_close(struct cli_sequence *q)
{
    if (!q->model) return;
    const struct td_device *dev = td_model_device(q->model);
    td_workspace_destroy(q->ws);
    if (dev && q->cache) dev->release(q->cache);
    td_arena_destroy(&q->arena);
    free(q->table);
    free(q->rows);
    free(q->zeros);
    free(q->positions);
    *q = (struct cli_sequence){0};
}

/* Weights whose products overflow, or that a wrong config.json misreads, give meaningless logits:
 * an error, not a file. */
static td_status check_finite(const float *logits, const int32_t *tokens, int32_t at, int32_t n,
                              int32_t vocab, struct td_err *err)
{
    for (int32_t i = 0; i < n; i++)
        for (int32_t v = 0; v < vocab; v++) {
            float x = logits[(size_t)i * (size_t)vocab + (size_t)v];
            if (!isfinite(x))
                return td_fail(err, TD_ERR_CORRUPT,
                               "position %d (token %d): the logit of id %d is %g: products of "
                               "the weights overflow, or config.json does not fit them",
                               at + i, tokens[i], v, (double)x);
        }
    return TD_OK;
}

td_status cli_sequence_forward(struct cli_sequence *q, const int32_t *tokens, int32_t at, int32_t n,
                               float **ret_logits, struct td_err *err)
{
    for (int32_t i = 0; i < n; i++) {
        q->rows[i] = i;
        q->positions[i] = at + i;
    }
    const int32_t *tables[1] = {q->table};
    struct td_forward_args a = {.tokens = tokens,
                                .positions = q->positions,
                                .row_seq = q->zeros,
                                .block_tables = tables,
                                .n_rows = n,
                                .kv_base = q->cache,
                                .kv = &q->kv,
                                .logit_rows = q->rows,
                                .n_logit_rows = n,
                                .inputs = q->inputs,
                                .err = err};
    td_status s = td_model_forward(q->model, q->ws, &a, ret_logits);
    if (s == TD_ERR_DEVICE) return td_err_prefix(err, "forward");
    if (s) return td_fail(err, s, "forward failed: %s", td_status_name(s));
    return check_finite(*ret_logits, tokens, at, n, td_model_config(q->model)->vocab, err);
}

td_status cli_read_tokens(const char *model, const char *text, int32_t max_tokens, int32_t vocab,
                          struct td_token_list *ret_ids, struct td_err *err)
{
    struct td_tokenizer *t = NULL;
    char *bytes = NULL;
    size_t n_bytes;
    td_status s = td_file_read(text, TEXT_BYTES_MAX, &bytes, &n_bytes, err);
    if (!s) s = td_tokenizer_load(model, &t, err);
    if (!s) s = td_tokenizer_encode(t, bytes, n_bytes, true, INT32_MAX, ret_ids, err);
    if (!s && max_tokens && ret_ids->n > (size_t)max_tokens) ret_ids->n = (size_t)max_tokens;
    if (!s && ret_ids->n < 2)
        s = td_fail(err, TD_ERR_INVALID, "text \"%s\" has %zu tokens, must have at least 2", text,
                    ret_ids->n);
    for (size_t i = 0; !s && i < ret_ids->n; i++)
        if (ret_ids->ids[i] >= vocab)
            s = td_fail(err, TD_ERR_CORRUPT, "token %d is not in the model's vocabulary of %d",
                        ret_ids->ids[i], vocab);
    td_tokenizer_free(t);
    free(bytes);
    return s;
}
