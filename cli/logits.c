/* logits.c - `tandem logits`: writes the logits of every position, f32 little-endian [n_tokens,
 * vocab], so that anybody can compare us with another implementation. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "cli/sequence.h"
#include "common/base/cgroup.h"
#include "common/model/mix.h"
#include "common/model/model.h"
#include "kernels/device.h"

struct logits_config {
    const char *model, *tokens, *dtype, *kv_dtype, *out, *ops, *device;
    int64_t chunk, threads;
    bool deterministic;
};

#define OFF(f) offsetof(struct logits_config, f)
// clang-format off
static const struct td_option options[] = {
    {"model", TD_OPT_STR, NULL, 0, 0, NULL, OFF(model),
     "Hugging Face model directory or GGUF file"},
    {"tokens", TD_OPT_STR, NULL, 0, 0, NULL, OFF(tokens), "token ids, separated by commas"},
    {"out", TD_OPT_STR, NULL, 0, 0, NULL, OFF(out),
     "file to write: little-endian f32 [n_tokens, vocab]"},
    {"dtype", TD_OPT_ENUM, "f32", 0, 0, "auto|f32|bf16|" TD_MIX_NAMES, OFF(dtype),
     "compute type; auto = the checkpoint's; q8_0 ... = bf16, weights rounded as they load"},
    {"kv_dtype", TD_OPT_ENUM, "auto", 0, 0, "auto|f32|bf16|int8|fp8", OFF(kv_dtype),
     "KV cache: auto = the compute type"},
    {"chunk", TD_OPT_I64, "0", 0, 1 << 20, NULL, OFF(chunk),
     "tokens per forward pass; 0 = all at once (the bits are the same)"},
    {"threads", TD_OPT_I64, "0", 0, 1024, NULL, OFF(threads), "0 = all CPUs"},
    {"ops", TD_OPT_STR, "", 0, 0, NULL, OFF(ops),
     "kernel table: ref, avx2, avxvnni, avx512, avx512bf16, amx, neon, neonbf16; default the "
     "fastest"},
    {"device", TD_OPT_ENUM, "cpu", 0, 0, "cpu|cuda", OFF(device),
     "where model and KV live; cuda: a GPU, by libtandem_cuda.so"},
    TD_OPTION_DECIDED("device_index", "the first of the GPUs that CUDA_VISIBLE_DEVICES shows"),
    {"deterministic", TD_OPT_BOOL, "true", 0, 0, NULL, OFF(deterministic),
     "GPU: the same tokens whatever the batch; false may be faster"},
    {0},
};
// clang-format on

static td_status parse_tokens(const char *text, int32_t vocab, int32_t **ret_tokens, int32_t *ret_n,
                              struct td_err *err)
{
    int32_t *tokens = malloc((strlen(text) + 1) * sizeof *tokens), n = 0;
    if (!tokens) return td_fail(err, TD_ERR_NOMEM, "out of memory");
    for (const char *p = text; *p;) {
        char *after;
        errno = 0;
        long id = strtol(p, &after, 10);
        if (after == p || errno || id < 0 || id >= vocab || (*after && *after != ',')) {
            free(tokens);
            return td_fail(err, TD_ERR_INVALID, "tokens[%d] near \"%.20s\" is not an id in 0..%d",
                           n, p, vocab - 1);
        }
        tokens[n++] = (int32_t)id;
        p = *after ? after + 1 : after;
    }
    if (n == 0) {
        free(tokens);
        return td_fail(err, TD_ERR_INVALID, "tokens is empty");
    }
    *ret_tokens = tokens;
    *ret_n = n;
    return TD_OK;
}

static td_status run(struct td_model *m, const int32_t *tokens, int32_t n, int32_t chunk, FILE *out,
                     struct td_err *err)
{
    struct cli_sequence q;
    size_t vocab = (size_t)td_model_config(m)->vocab;
    if (chunk == 0 || chunk > n) chunk = n;
    td_status s = cli_sequence_open(&q, m, n, chunk, err);
    for (int32_t at = 0; !s && at < n; at += chunk) {
        int32_t k = n - at < chunk ? n - at : chunk;
        float *logits;
        s = cli_sequence_forward(&q, tokens + at, at, k, &logits, err);
        if (s == TD_ERR_CORRUPT && at > 0)
            td_err_prefix(err, "out has the %d positions before it", at);
        else if (!s && fwrite(logits, sizeof(float), (size_t)k * vocab, out) != (size_t)k * vocab)
            s = td_fail(err, TD_ERR_IO, "write: %s", strerror(errno));
    }
    cli_sequence_close(&q);
    return s;
}

int cli_logits(int argc, char **argv)
{
    struct logits_config c = {0};
    struct td_err err = {0};
    struct td_thread_pool *pool = NULL;
    struct td_model *m = NULL;
    const struct td_ops *ops = NULL, *device = NULL;
    int32_t *tokens = NULL, n = 0;
    FILE *out = NULL;
    td_status s = td_options_load(options, &c, "tandem logits",
                                  "Writes the logits of every position of a token sequence.", argc,
                                  argv, NULL, 0, NULL, &err);
    if (!s && c.ops[0] && !(ops = td_ops_by_name(c.ops)))
        s = td_fail(&err, TD_ERR_INVALID, "ops \"%s\": %s", c.ops, td_ops_lack(c.ops));
    if (!s && !strcmp(c.device, "cuda")) {
        struct td_device_config d = {.deterministic = c.deterministic};
        if (ops)
            s = td_fail(&err, TD_ERR_INVALID,
                        "ops is \"%s\": it names kernels of the CPU, device is cuda", c.ops);
        else if ((s = td_device_open(&d, &device, &err)))
            td_err_prefix(&err, "device cuda");
        else
            ops = device;
    }
    if (!s)
        s = td_thread_pool_create(c.threads ? (int)c.threads : td_cpus_usable(""), NULL, 50, &pool,
                                  &err);
    if (!s) {
        struct td_model_params p = {
            .dir = c.model, .dtype = c.dtype, .kv_dtype = c.kv_dtype, .ops = ops, .threads = pool};
        s = td_model_open(&p, &m, &err);
    }
    if (!s) s = parse_tokens(c.tokens, td_model_config(m)->vocab, &tokens, &n, &err);
    if (!s && n > td_model_max_len(m))
        s = td_fail(&err, TD_ERR_INVALID, "tokens has %d ids, the model's context is %d", n,
                    td_model_max_len(m));
    if (!s && !(out = fopen(c.out, "wb")))
        s = td_fail(&err, TD_ERR_IO, "out \"%s\": %s", c.out, strerror(errno));
    if (!s) s = run(m, tokens, n, (int32_t)c.chunk, out, &err);
    if (out && fclose(out) && !s)
        s = td_fail(&err, TD_ERR_IO, "out \"%s\": %s", c.out, strerror(errno));
    free(tokens);
    td_model_close(m);
    td_device_close(device);
    td_thread_pool_destroy(pool);
    return s ? td_die("tandem logits", &err) : 0;
}
