/* engine_bench_cases.c - `tandem engine-bench --cases`: prefill and single decode steps of one
 * loaded model at several batches and contexts, beside floors.
 *
 * A case BxN holds B sequences of N prompt tokens each. All are prefilled (timed as one run), then
 * `output_len` decode steps are timed one by one; the median step is printed with half the distance
 * of the quartiles. Prompts differ, so nothing is shared. The first steps of a shape choose
 * algorithms and record graphs, so as many untimed steps go before.
 *
 * Floors, when the rates are given (tandem-bench cuda measures both on the same card): a decode
 * step must read the weights once (of a mixture those of the experts that its rows chose) and the
 * KV of every sequence once, at --floor-gb-s; a prefill must do the operations of products and
 * attention, at --floor-tflops. Percent is floor time over measured time. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/engine_bench.h"
#include "cli/engine_bench_counts.h"
#include "common/base/clock.h"
#include "common/base/random.h"
#include "kernels/device.h"

#define WARM_STEPS 4

struct measured {
    double prefill_s, step_s, step_spread_percent;
    double active; /* experts that a step read */
};

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

td_status engine_bench_parse_cases(const char *text, struct engine_bench_case *ret, int32_t *ret_n,
                                   struct td_err *err)
{
    int32_t n = 0;
    for (const char *p = text; *p;) {
        char *after;
        errno = 0;
        long batch = strtol(p, &after, 10), len = 0;
        bool ok = after != p && *after == 'x' && batch >= 1 && batch <= 4096;
        if (ok) {
            p = after + 1;
            len = strtol(p, &after, 10);
            ok = after != p && !errno && len >= 1 && len <= 1 << 24 && (*after == ',' || !*after);
        }
        if (!ok)
            return td_fail(err, TD_ERR_INVALID,
                           "cases near \"%.20s\": must be BATCHxPROMPT_LEN, separated by commas, "
                           "batch 1..4096",
                           p);
        if (n == ENGINE_BENCH_CASES_MAX)
            return td_fail(err, TD_ERR_LIMIT, "cases: at most %d", ENGINE_BENCH_CASES_MAX);
        ret[n++] = (struct engine_bench_case){(int32_t)batch, (int32_t)len};
        p = *after ? after + 1 : after;
    }
    *ret_n = n;
    return n ? TD_OK : td_fail(err, TD_ERR_INVALID, "cases is empty");
}

static td_status prefill_all(struct td_engine *e, struct td_seq **seqs, int32_t n,
                             struct td_err *err)
{
    for (int32_t i = 0; i < n;) {
        if (seqs[i]->sched.phase != TD_SEQ_PREFILL) {
            i++;
            continue;
        }
        int32_t left = seqs[i]->sched.n_tokens - seqs[i]->sched.n_computed,
                max = td_engine_max_step_tokens(e);
        struct td_step_item it = {.seq = seqs[i], .n_new = left < max ? left : max};
        td_status s = td_engine_step(e, &it, 1, err);
        if (s) return s;
    }
    return TD_OK;
}

static td_status run_case(struct td_engine *e, const struct engine_bench_case *c, int32_t n_steps,
                          uint64_t seed, struct measured *ret, struct td_err *err)
{
    size_t n = (size_t)c->batch;
    int32_t vocab = td_model_config(td_engine_model(e))->vocab, n_preempted = 0;
    struct td_seq **seqs = calloc(n, sizeof(struct td_seq *)),
                  **preempted = calloc(n, sizeof(struct td_seq *));
    struct td_step_item *items = calloc(n, sizeof *items);
    int32_t *tokens = calloc((size_t)c->prompt_len, sizeof *tokens);
    double *times = calloc((size_t)n_steps, sizeof *times);
    td_status s = seqs && preempted && items && tokens && times
                      ? TD_OK
                      : td_fail(err, TD_ERR_NOMEM, "out of memory");
    struct td_sampling greedy = {.top_p = 1, .repetition_penalty = 1, .n_logprobs = -1};
    struct td_expert_counts before = {0};
    for (int32_t i = 0; !s && i < c->batch; i++) {
        for (int32_t j = 0; j < c->prompt_len; j++)
            tokens[j] = (int32_t)td_random_index(&seed, (uint32_t)vocab);
        seqs[i] = td_engine_seq_get(e);
        seqs[i]->sched.priority = (uint64_t)i;
        s = td_engine_seq_set(e, seqs[i], tokens, c->prompt_len, c->prompt_len, &greedy, NULL, 0,
                              n_steps + WARM_STEPS + 1, err);
        if (!s && td_engine_admit(e, seqs[i], false, 0))
            s = td_fail(err, TD_ERR_NOMEM,
                        "kv_memory does not hold %d sequences of %d tokens; raise it", c->batch,
                        c->prompt_len);
    }
    uint64_t start = td_now_ns();
    if (!s) s = prefill_all(e, seqs, c->batch, err);
    ret->prefill_s = (double)(td_now_ns() - start) / 1e9;
    for (int32_t i = -WARM_STEPS; !s && i < n_steps; i++) {
        if (i == 0) td_engine_expert_counts(e, &before);
        start = td_now_ns();
        int32_t k = td_engine_plan(e, seqs, c->batch, items, preempted, &n_preempted);
        if (n_preempted)
            s = td_fail(err, TD_ERR_NOMEM,
                        "kv_memory does not hold %d sequences of %d tokens; raise it", c->batch,
                        c->prompt_len + n_steps + WARM_STEPS);
        else
            s = td_engine_step(e, items, k, err);
        if (i >= 0) times[i] = (double)(td_now_ns() - start) / 1e9;
    }
    for (int32_t i = 0; seqs && i < c->batch && seqs[i]; i++) {
        td_engine_release(e, seqs[i]);
        td_engine_seq_put(e, seqs[i]);
    }
    if (!s) {
        qsort(times, (size_t)n_steps, sizeof *times, by_value);
        ret->step_s = times[n_steps / 2];
        ret->active = engine_bench_active_experts(e, &before, c->batch, n_steps);
        ret->step_spread_percent = 50 * (times[n_steps * 3 / 4] - times[n_steps / 4]) / ret->step_s;
    }
    free(seqs);
    free(preempted);
    free(items);
    free(tokens);
    free(times);
    return s;
}

double engine_bench_active_experts(struct td_engine *e, const struct td_expert_counts *before,
                                   int32_t n_rows, int32_t n_steps)
{
    struct td_expert_counts now;
    td_engine_expert_counts(e, &now);
    return now.rows ? (double)(now.active - before->active) / n_steps
                    : engine_bench_even_experts(td_model_config(td_engine_model(e)), n_rows);
}

double engine_bench_step_weights(struct td_engine *e, double active)
{
    const struct td_model *m = td_engine_model(e);
    return engine_bench_weight_bytes(td_model_config(m), (double)td_model_weight_bytes(m),
                                     (double)td_model_expert_weight_bytes(m), active);
}

static void percent(char *text, size_t text_bytes, double floor_s, double measured_s)
{
    if (floor_s > 0)
        snprintf(text, text_bytes, "%.1f", 100 * floor_s / measured_s);
    else
        snprintf(text, text_bytes, "%s", "");
}

/* What this variable told the device library (kernels/README.md). A card that lacks what is asked
 * for uses the default. */
static const char *asked(const char *variable, const char *by_default)
{
    const char *value = getenv(variable);
    return value && *value ? value : by_default;
}

static void csv_line(FILE *f, const struct engine_bench_report *r, const struct td_device_info *dev,
                     const char *dtype, const struct engine_bench_case *c, const char *what,
                     double seconds, double spread, double tok_s, double gb, double gflop,
                     const char *percent_text)
{
    char spread_text[32] = "";
    if (spread >= 0) snprintf(spread_text, sizeof spread_text, "%.1f", spread);
    fprintf(f, "\"%s\",%s,%d,%s,%s,%s,%d,%d,%s,%.6f,%s,%.2f,%.6f,%.6f,%s,\"%s\",%s,%s,%s\n",
            dev ? dev->name : "cpu", dev && dev->driver[0] ? dev->driver : "",
            dev ? dev->is_emulated : 0, r->commit, r->model, dtype, c->batch, c->prompt_len, what,
            seconds * 1e3, spread_text, tok_s, gb, gflop, percent_text, r->command,
            dev ? asked("TANDEM_CUDA_ATTN", "mma") : "",
            dev ? asked("TANDEM_CUDA_OVERLAP", "0") : "",
            dev ? (dev->is_deterministic ? "true" : "false") : "");
}

td_status engine_bench_run_cases(struct td_engine *e, const struct engine_bench_case *cases,
                                 int32_t n_cases, const struct engine_bench_report *r,
                                 struct td_err *err)
{
    const struct td_model_config *m = td_model_config(td_engine_model(e));
    const struct td_device_info *dev = td_engine_device_info(e);
    const char *dtype = strcmp(r->dtype, "auto") == 0
                            ? td_dtype_name(td_model_dtype(td_engine_model(e)))
                            : r->dtype;
    FILE *csv = NULL;
    if (r->csv[0]) {
        if (!(csv = fopen(r->csv, "a")))
            return td_fail(err, TD_ERR_IO, "csv \"%s\": %s", r->csv, strerror(errno));
        if (ftell(csv) == 0)
            fprintf(csv, "card,driver,emulated,commit,model,dtype,batch,prompt_len,what,ms,spread_"
                         "percent,tok_s,gbytes,gflop,percent_of_floor,"
                         "command,attn,overlap,deterministic\n");
    }
    printf("%s, %s, %s, %.0f M parameters%s", r->model, dev ? dev->name : "cpu", dtype,
           (double)td_model_config_n_params(m) / 1e6,
           dev && dev->is_emulated ? "; EMULATED: times mean nothing" : "");
    if (dev)
        printf("; attn %s, overlap %s, deterministic %s", asked("TANDEM_CUDA_ATTN", "mma"),
               asked("TANDEM_CUDA_OVERLAP", "0"), dev->is_deterministic ? "true" : "false");
    printf("\n%9s  %12s %14s %8s   %12s %8s %14s %8s\n", "case", "prefill ms", "tok/s", "% floor",
           "step ms", "+-%", "tok/s", "% floor");
    td_status s = TD_OK;
    for (int32_t i = 0; !s && i < n_cases; i++) {
        const struct engine_bench_case *c = &cases[i];
        struct engine_bench_case warm = {c->batch, c->prompt_len < 64 ? c->prompt_len : 64};
        struct measured x = {0};
        if (i == 0) s = run_case(e, &warm, 1, 99, &x, err); /* pages, clocks, libraries */
        if (!s) s = run_case(e, c, r->n_steps, (uint32_t)i + 1, &x, err);
        if (s) break;
        struct engine_bench_ops one = engine_bench_prefill_ops(m, c->prompt_len);
        double ops = c->batch * (one.products + one.attention),
               context = c->prompt_len + WARM_STEPS + r->n_steps / 2.0,
               bytes =
                   engine_bench_step_weights(e, x.active) +
                   engine_bench_kv_bytes(m, td_kv_pool_layout(td_engine_kv(e)), c->batch, context);
        double prefill_tok_s = (double)c->batch * c->prompt_len / x.prefill_s,
               step_tok_s = c->batch / x.step_s;
        char prefill_percent[32], step_percent[32], name[40];
        percent(prefill_percent, sizeof prefill_percent,
                r->floor_tflops > 0 ? ops / (r->floor_tflops * 1e12) : 0, x.prefill_s);
        percent(step_percent, sizeof step_percent,
                r->floor_gb_s > 0 ? bytes / (r->floor_gb_s * 1e9) : 0, x.step_s);
        snprintf(name, sizeof name, "%dx%d", c->batch, c->prompt_len);
        printf("%9s  %12.2f %14.1f %8s   %12.3f %8.1f %14.1f %8s\n", name, x.prefill_s * 1e3,
               prefill_tok_s, prefill_percent, x.step_s * 1e3, x.step_spread_percent, step_tok_s,
               step_percent);
        fflush(stdout);
        if (!csv) continue;
        csv_line(csv, r, dev, dtype, c, "prefill", x.prefill_s, -1, prefill_tok_s, 0, ops / 1e9,
                 prefill_percent);
        csv_line(csv, r, dev, dtype, c, "decode", x.step_s, x.step_spread_percent, step_tok_s,
                 bytes / 1e9, 0, step_percent);
        fflush(csv);
    }
    if (csv && fclose(csv) && !s)
        s = td_fail(err, TD_ERR_IO, "csv \"%s\": %s", r->csv, strerror(errno));
    return s;
}
