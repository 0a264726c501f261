/* quantize.c - `tandem quantize`: a model in another format. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/cli.h"
#include "cli/compare.h"
#include "cli/sequence.h"
#include "common/base/cgroup.h"
#include "common/base/progress.h"
#include "common/base/thread_pool.h"
#include "common/model/quantize.h"
#include "common/text/chat_template.h"
#include "common/text/tokenizer.h"

#define CALIBRATION_WINDOW 512
#define CALIBRATION_TOKENS_MAX 65536 /* bounds the time */

struct quantize_config {
    const char *from, *to, *format, *text, *calibrate;
    double alpha;
    int64_t context, max_tokens, threads;
    bool force;
};

#define OFF(f) offsetof(struct quantize_config, f)
// clang-format off
static const struct td_option options[] = {
    {"from", TD_OPT_STR, NULL, 0, 0, NULL, OFF(from), "Hugging Face model directory or GGUF file"},
    {"to", TD_OPT_STR, NULL, 0, 0, NULL, OFF(to),
     "what to write: a GGUF file; a directory for w8a8, w4a16 and fp8"},
    {"format", TD_OPT_ENUM, NULL, 0, 0, TD_MIX_NAMES "|bf16|f16|f32|w8a8|w4a16|fp8|fp8_tensor",
     OFF(format),
     "GGUF: of the matrices, by the names of llama.cpp's files; w8a8, w4a16, fp8: those of "
     "compressed-tensors"},
    {"calibrate", TD_OPT_STR, "", 0, 0, NULL, OFF(calibrate),
     "UTF-8 file: scales of channels from what the model sees of it are folded into the norms: by "
     "SmoothQuant for w8a8 and fp8, by AWQ's search for w4a16 and GGUF formats"},
    {"alpha", TD_OPT_F64, "0.5", 0, 1, NULL, OFF(alpha),
     "SmoothQuant: how much of the activations' range goes over to the weights"},
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

/* Whether `format` is one of a directory. */
static bool is_codes(const char *format, enum td_quantize_codes *ret)
{
    *ret = !strcmp(format, "w8a8")    ? TD_QUANTIZE_W8A8
           : !strcmp(format, "fp8")   ? TD_QUANTIZE_FP8
           : !strcmp(format, "w4a16") ? TD_QUANTIZE_W4A16
                                      : TD_QUANTIZE_FP8_TENSOR;
    return *ret != TD_QUANTIZE_FP8_TENSOR || !strcmp(format, "fp8_tensor");
}

/* Runs the original on the calibration text, in windows. */
static td_status observe(const struct quantize_config *c, struct td_thread_pool *threads,
                         struct td_calibration *k, struct td_err *err)
{
    struct td_model *m = NULL;
    struct cli_sequence q = {0};
    struct td_token_list ids = {0};
    struct td_progress progress;
    const struct td_forward_inputs inputs = {.observe = td_calibration_observe, .ctx = k};
    const struct td_model_params p = {.dir = c->from, .dtype = "f32", .threads = threads};
    td_status s = td_model_open(&p, &m, err);
    int32_t window = CALIBRATION_WINDOW, max = CALIBRATION_TOKENS_MAX;
    if (!s && window > td_model_max_len(m)) window = td_model_max_len(m);
    if (!s) s = cli_read_tokens(c->from, c->calibrate, max, td_model_config(m)->vocab, &ids, err);
    if (!s) s = cli_sequence_open(&q, m, window, window, err);
    q.inputs = &inputs;
    if (!s) td_progress_start(&progress, "calibrating", "tokens", ids.n);
    for (size_t at = 0; at < ids.n && !s; at += (size_t)window) {
        size_t n = ids.n - at < (size_t)window ? ids.n - at : (size_t)window;
        float *logits;
        s = cli_sequence_forward(&q, ids.ids + at, 0, (int32_t)n, &logits, err);
        td_progress_update(&progress, at + n);
    }
    if (!s) td_progress_end(&progress);
    cli_sequence_close(&q);
    td_model_close(m);
    td_token_list_free(&ids);
    return s;
}

static td_status make_fold(const struct quantize_config *c, const struct td_quantize *q,
                           struct td_fold *ret, struct td_err *err)
{
    struct td_calibration k = {0};
    enum td_quantize_codes codes;
    td_status s = td_calibration_create(q->config, &k, err);
    if (!s && (s = observe(c, q->threads, &k, err))) td_err_prefix(err, "calibrate");
    if (!s)
        s = is_codes(c->format, &codes) && codes != TD_QUANTIZE_W4A16
                ? td_fold_smooth(q, &k, (float)c->alpha, ret, err)
                : td_fold_search(q, &k, ret, err);
    td_calibration_free(&k);
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

/* An empty directory may be filled. */
static td_status check_target(const struct quantize_config *c, bool is_directory,
                              struct td_err *err)
{
    struct stat st;
    if (stat(c->to, &st)) return TD_OK;
    if (S_ISDIR(st.st_mode) != is_directory)
        return td_fail(err, TD_ERR_INVALID, "to \"%s\" is %s, format %s makes %s", c->to,
                       is_directory ? "no directory" : "a directory", c->format,
                       is_directory ? "one" : "a file");
    if (c->force) return TD_OK;
    if (is_directory && !rmdir(c->to))
        return mkdir(c->to, 0755) ? td_fail(err, TD_ERR_IO, "%s: %s", c->to, strerror(errno))
                                  : TD_OK;
    return td_fail(err, TD_ERR_INVALID, "to \"%s\" exists: --force replaces it", c->to);
}

static td_status run(const struct quantize_config *c, struct td_err *err)
{
    struct td_checkpoint checkpoint = {0};
    struct td_model_config config;
    struct td_quantize q = {.from = c->from, .checkpoint = &checkpoint, .config = &config};
    struct td_fold fold = {0};
    enum td_quantize_codes codes;
    bool is_directory = is_codes(c->format, &codes);
    td_status s = check_target(c, is_directory, err);
    /* AWQ's search rounds by a format of GGUF; Q4_0 is nearest to the codes of w4a16 */
    q.mix = td_mix_by_name(!strcmp(c->format, "w4a16") ? "q4_0" : c->format);
    if (!s) s = td_model_config_load(c->from, &config, err);
    if (!s && config.quant[0].scheme)
        s = td_fail(err, TD_ERR_UNSUPPORTED,
                    "%s: it is quantised already (%s); give the model that it was made from",
                    c->from, config.quant[0].name);
    if (!s) s = td_checkpoint_open(c->from, &checkpoint, err);
    if (!s)
        s = is_directory ? td_quantize_directory_takes(&q, err) : td_quantize_gguf_takes(&q, err);
    if (!s)
        s = td_thread_pool_create(c->threads ? (int)c->threads : td_cpus_usable(""), NULL, 50,
                                  &q.threads, err);
    if (!s && c->calibrate[0] && !(s = make_fold(c, &q, &fold, err))) q.fold = &fold;
    if (!s)
        s = is_directory ? td_quantize_directory(&q, codes, c->to, c->force, err)
                         : write_gguf(c, &q, err);
    if (!s)
        printf("%s: %s, %.1f MiB of tensors (%.1f MiB before)\n", c->to, c->format,
               (double)q.ret_to_bytes / 1048576, (double)q.ret_from_bytes / 1048576);
    td_checkpoint_close(&checkpoint);
    td_fold_free(&fold);
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
