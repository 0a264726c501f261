/* quantize.c - `tandem quantize`: a model in another format. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/cli.h"
#include "cli/compare.h"
#include "common/base/thread_pool.h"
#include "common/model/quantize.h"
#include "common/text/chat_template.h"
#include "common/text/tokenizer.h"

struct quantize_config {
    const char *from, *to, *format, *text;
    int64_t context, max_tokens, threads;
    bool force;
};

#define OFF(f) offsetof(struct quantize_config, f)
// clang-format off
static const struct td_option options[] = {
    {"from", TD_OPT_STR, NULL, 0, 0, NULL, OFF(from), "Hugging Face model directory or GGUF file"},
    {"to", TD_OPT_STR, NULL, 0, 0, NULL, OFF(to), "GGUF file to write"},
    {"format", TD_OPT_ENUM, NULL, 0, 0, TD_MIX_NAMES "|bf16|f16|f32", OFF(format),
     "of the matrices, by the names of llama.cpp's files"},
    {"text", TD_OPT_STR, "", 0, 0, NULL, OFF(text),
     "UTF-8 file: reports how far the result is from the original on it, as `tandem compare`"},
    {"context", TD_OPT_I64, "512", 2, 1 << 20, NULL, OFF(context),
     "of the report: tokens of a window; each begins a new sequence"},
    {"max_tokens", TD_OPT_I64, "0", 0, INT32_MAX, NULL, OFF(max_tokens),
     "of the report: tokens of the text; 0 = all"},
    {"threads", TD_OPT_I64, "0", 0, 1024, NULL, OFF(threads), "0 = all CPUs"},
    {"force", TD_OPT_BOOL, "false", 0, 0, NULL, OFF(force), "replace what --to names"},
    {0},
};
// clang-format on

/* The keys of the file: model, tokenizer and chat template. A GGUF file has them all. */
static td_status put_keys(const struct td_quantize *q, struct td_gguf_writer *w, struct td_err *err)
{
    const struct td_model_config *c = q->config;
    td_status s = td_quantize_keys(q, w, err);
    if (s || q->checkpoint->gguf) return s;
    s = td_tokenizer_put_gguf(q->from, c->vocab, c->bos_id, c->eos_ids, c->n_eos, w, err);
    return s ? s : td_chat_template_put_gguf(q->from, w, err);
}

static td_status write_gguf(const struct quantize_config *c, struct td_quantize *q,
                            struct td_err *err)
{
    struct td_gguf_writer *w = NULL;
    td_status s = td_gguf_writer_create(&w, err);
    if (!s) s = put_keys(q, w, err);
    if (!s) s = td_quantize_gguf(q, w, c->to, c->force, err);
    td_gguf_writer_close(w);
    return s;
}

static td_status report(const struct quantize_config *c, struct td_thread_pool *threads,
                        struct td_err *err)
{
    struct cli_compare_result r;
    const struct cli_compare compare = {.model = c->from,
                                        .dtype = "f32",
                                        .with = c->to,
                                        .with_dtype = "f32",
                                        .text = c->text,
                                        .context = (int32_t)c->context,
                                        .max_tokens = (int32_t)c->max_tokens,
                                        .threads = threads};
    td_status s = cli_compare_run(&compare, &r, err);
    if (!s) cli_compare_print(stdout, &compare, &r);
    return s;
}

static td_status run(const struct quantize_config *c, struct td_err *err)
{
    struct td_checkpoint checkpoint = {0};
    struct td_model_config config;
    struct td_quantize q = {.from = c->from, .checkpoint = &checkpoint, .config = &config};
    if (!c->force && access(c->to, F_OK) == 0)
        return td_fail(err, TD_ERR_INVALID, "to \"%s\" exists: --force replaces it", c->to);
    q.mix = td_mix_by_name(c->format);
    td_status s = td_model_config_load(c->from, &config, err);
    if (!s) s = td_checkpoint_open(c->from, &checkpoint, err);
    if (!s)
        s = td_thread_pool_create(c->threads ? (int)c->threads : (int)sysconf(_SC_NPROCESSORS_ONLN),
                                  NULL, 50, &q.threads, err);
    if (!s) s = write_gguf(c, &q, err);
    if (!s)
        printf("%s: %s, %.1f MiB of tensors (%.1f MiB before)\n", c->to, c->format,
               (double)q.ret_to_bytes / 1048576, (double)q.ret_from_bytes / 1048576);
    td_checkpoint_close(&checkpoint);
    if (!s && c->text[0]) s = report(c, q.threads, err);
    td_thread_pool_destroy(q.threads);
    return s;
}

int cli_quantize(int argc, char **argv)
{
    struct quantize_config c = {0};
    struct td_err err = {0};
    td_status s =
        td_options_load(options, &c, "tandem quantize", "Writes a model in another format.", argc,
                        argv, NULL, 0, NULL, &err);
    if (!s) s = run(&c, &err);
    return s ? td_die("tandem quantize", &err) : 0;
}
