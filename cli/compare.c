/* compare.c - `tandem compare`, and the report behind `tandem quantize --text`.
 *
 * The text is cut into windows of `context` tokens. Both models read each window as a sequence of
 * its own, chunk by chunk, and every position but the last predicts the token behind it.
 * Distributions are compared in double: KL = sum over tokens of p * (log p - log q), p the
 * original's. */
#include "cli/compare.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "cli/sequence.h"
#include "common/base/cgroup.h"
#include "common/base/progress.h"
#include "common/base/stats.h"
#include "common/model/mix.h"
#include "common/text/tokenizer.h"

#define CHUNK 64 /* positions whose logits are held at a time, of each model */

struct compare {
    struct td_model *model[2];
    struct cli_sequence sequence[2];
    int32_t vocab, context, chunk;
    struct td_token_list ids;
    double *kl; /* [n] */
    int64_t n, n_same;
    double loss[2]; /* sums of -log of what the text's tokens get */
};

static double log_sum_exp(const float *x, int32_t n, int32_t *ret_top)
{
    double max = -INFINITY, sum = 0;
    for (int32_t i = 0; i < n; i++)
        if ((double)x[i] > max) {
            max = (double)x[i];
            *ret_top = i;
        }
    for (int32_t i = 0; i < n; i++) sum += exp((double)x[i] - max);
    return max + log(sum);
}

/* One position: x and y are the models' logits, `next` the token that follows in the text. */
static void add_position(struct compare *m, const float *x, const float *y, int32_t next)
{
    int32_t top[2] = {0, 0};
    double a = log_sum_exp(x, m->vocab, &top[0]), b = log_sum_exp(y, m->vocab, &top[1]), kl = 0;
    for (int32_t i = 0; i < m->vocab; i++) {
        double log_p = (double)x[i] - a, log_q = (double)y[i] - b;
        kl += exp(log_p) * (log_p - log_q);
    }
    m->kl[m->n++] = kl > 0 ? kl : 0; /* rounding may leave a little below 0 */
    m->n_same += top[0] == top[1];
    m->loss[0] += a - (double)x[next];
    m->loss[1] += b - (double)y[next];
}

static td_status add_window(struct compare *m, const int32_t *tokens, int32_t n, struct td_err *err)
{
    for (int32_t at = 0; at < n - 1; at += m->chunk) {
        int32_t k = n - 1 - at < m->chunk ? n - 1 - at : m->chunk;
        float *logits[2];
        for (int i = 0; i < 2; i++) {
            td_status s =
                cli_sequence_forward(&m->sequence[i], tokens + at, at, k, &logits[i], err);
            if (s) return td_err_prefix(err, i ? "with" : "model");
        }
        for (int32_t i = 0; i < k; i++)
            add_position(m, logits[0] + (size_t)i * (size_t)m->vocab,
                         logits[1] + (size_t)i * (size_t)m->vocab, tokens[at + i + 1]);
    }
    return TD_OK;
}

static td_status open_models(const struct cli_compare *c, struct compare *m, struct td_err *err)
{
    const char *const dirs[] = {c->model, c->with}, *const dtypes[] = {c->dtype, c->with_dtype};
    m->context = c->context;
    for (int i = 0; i < 2; i++) {
        struct td_model_params p = {.dir = dirs[i], .dtype = dtypes[i], .threads = c->threads};
        td_status s = td_model_open(&p, &m->model[i], err);
        if (s) return s;
        if (m->context > td_model_max_len(m->model[i])) m->context = td_model_max_len(m->model[i]);
    }
    m->vocab = td_model_config(m->model[0])->vocab;
    if (td_model_config(m->model[1])->vocab != m->vocab)
        return td_fail(err, TD_ERR_INVALID, "%s has a vocabulary of %d, %s one of %d", c->model,
                       m->vocab, c->with, td_model_config(m->model[1])->vocab);
    m->chunk = m->context < CHUNK ? m->context : CHUNK;
    for (int i = 0; i < 2; i++) {
        td_status s = cli_sequence_open(&m->sequence[i], m->model[i], m->context, m->chunk, err);
        if (s) return s;
    }
    return TD_OK;
}

static td_status read_windows(struct compare *m, struct td_err *err)
{
    struct td_progress progress;
    td_progress_start(&progress, "comparing", "tokens", m->ids.n);
    td_status s = TD_OK;
    for (size_t at = 0; at < m->ids.n && !s; at += (size_t)m->context) {
        size_t n = m->ids.n - at < (size_t)m->context ? m->ids.n - at : (size_t)m->context;
        s = add_window(m, m->ids.ids + at, (int32_t)n, err);
        td_progress_update(&progress, at + n);
    }
    td_progress_end(&progress);
    return s;
}

static void summarize(struct compare *m, struct cli_compare_result *r)
{
    double n = (double)m->n;
    td_stats_sort(m->kl, (size_t)m->n);
    *r = (struct cli_compare_result){.n_tokens = m->n,
                                     .kl_mean = td_stats_mean(m->kl, (size_t)m->n),
                                     .kl_p99 = td_stats_percentile(m->kl, (size_t)m->n, 99),
                                     .kl_max = m->kl[m->n - 1],
                                     .top1 = (double)m->n_same / n,
                                     .perplexity = exp(m->loss[0] / n),
                                     .with_perplexity = exp(m->loss[1] / n)};
}

td_status cli_compare_run(const struct cli_compare *c, struct cli_compare_result *ret,
                          struct td_err *err)
{
    struct compare m = {0};
    td_status s = open_models(c, &m, err);
    if (!s) s = cli_read_tokens(c->model, c->text, c->max_tokens, m.vocab, &m.ids, err);
    if (!s && !(m.kl = malloc(m.ids.n * sizeof *m.kl)))
        s = td_fail(err, TD_ERR_NOMEM, "no memory for %zu tokens", m.ids.n);
    if (!s) s = read_windows(&m, err);
    if (!s) summarize(&m, ret);
    for (int i = 0; i < 2; i++) {
        cli_sequence_close(&m.sequence[i]);
        td_model_close(m.model[i]);
    }
    td_token_list_free(&m.ids);
    free(m.kl);
    return s;
}

void cli_compare_print(FILE *out, const struct cli_compare *c, const struct cli_compare_result *r)
{
    fprintf(out, "%" PRId64 " tokens of %s, windows of %d\n", r->n_tokens, c->text, c->context);
    fprintf(out, "%-22s %12s %12s\n", "", "original", "compared");
    fprintf(out, "%-22s %12.4f %12.4f\n", "perplexity", r->perplexity, r->with_perplexity);
    fprintf(out, "%-22s %12s %12.5f\n", "perplexity ratio", "", r->with_perplexity / r->perplexity);
    fprintf(out, "%-22s %12s %12.6f\n", "KL divergence, mean", "", r->kl_mean);
    fprintf(out, "%-22s %12s %12.6f\n", "KL divergence, p99", "", r->kl_p99);
    fprintf(out, "%-22s %12s %12.6f\n", "KL divergence, max", "", r->kl_max);
    fprintf(out, "%-22s %12s %12.4f\n", "same top token", "", r->top1);
}

struct compare_config {
    const char *model, *with, *text, *dtype, *with_dtype;
    int64_t context, max_tokens, threads;
};

#define OFF(f) offsetof(struct compare_config, f)
// clang-format off
static const struct td_option options[] = {
    {"model", TD_OPT_STR, NULL, 0, 0, NULL, OFF(model),
     "the original: Hugging Face model directory or GGUF file"},
    {"with", TD_OPT_STR, NULL, 0, 0, NULL, OFF(with),
     "what is compared with it: directory or file; the same with --with-dtype"},
    {"text", TD_OPT_STR, NULL, 0, 0, NULL, OFF(text), "UTF-8 file that both models read"},
    {"dtype", TD_OPT_ENUM, "f32", 0, 0, "auto|f32|bf16|" TD_MIX_NAMES, OFF(dtype),
     "of the original, as workers have it"},
    {"with_dtype", TD_OPT_ENUM, "f32", 0, 0, "auto|f32|bf16|" TD_MIX_NAMES, OFF(with_dtype),
     "of the other"},
    {"context", TD_OPT_I64, "512", 2, 1 << 20, NULL, OFF(context),
     "tokens of a window; each begins a new sequence"},
    {"max_tokens", TD_OPT_I64, "0", 0, INT32_MAX, NULL, OFF(max_tokens),
     "of the text; 0 = all"},
    {"threads", TD_OPT_I64, "0", 0, 1024, NULL, OFF(threads), "0 = all CPUs"},
    {0},
};
// clang-format on

int cli_compare(int argc, char **argv)
{
    struct compare_config o = {0};
    struct td_err err = {0};
    struct td_thread_pool *pool = NULL;
    struct cli_compare_result r;
    td_status s = td_options_load(
        options, &o, "tandem compare",
        "How far a model is from another on a text: KL divergence, agreement, perplexity.", argc,
        argv, NULL, 0, NULL, &err);
    if (!s)
        s = td_thread_pool_create(o.threads ? (int)o.threads : td_cpus_usable(""), NULL, 50, &pool,
                                  &err);
    struct cli_compare c = {.model = o.model,
                            .dtype = o.dtype,
                            .with = o.with,
                            .with_dtype = o.with_dtype,
                            .text = o.text,
                            .context = (int32_t)o.context,
                            .max_tokens = (int32_t)o.max_tokens,
                            .threads = pool};
    if (!s) s = cli_compare_run(&c, &r, &err);
    if (!s) cli_compare_print(stdout, &c, &r);
    td_thread_pool_destroy(pool);
    return s ? td_die("tandem compare", &err) : 0;
}
