/* summary.c - from single requests to the numbers of a report. Pure; see result.h.
 *
 * Two time bases, side by side. vLLM's metrics (metric[], request_throughput, request_goodput's
 * duration) count from the moment a request was sent and over the whole run. Everything about
 * objectives counts from the scheduled time, and attainment and steady goodput over the measured
 * span: the requests that arrived in it, however they ended and whenever. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bench/serve/result.h"

const char *const bench_metric_names[BENCH_N_METRICS] = {"ttft", "tpot", "itl", "e2el"};
const char *const bench_stage_names[BENCH_N_STAGES] = {
    "router_queue", "reserve",          "prefill_queue", "prefill",    "rpc",
    "transfer",     "transfer_exposed", "decode_queue",  "first_step", "decode"};
const char *const bench_outcome_names[BENCH_N_OUTCOMES] = {"unsent",    "completed", "rejected",
                                                           "timed_out", "failed",    "unfinished"};

/* Values on their way into a bench_metric; room for all that can come is taken first. */
struct values {
    double *x;
    size_t n;
};

static struct values values_open(size_t capacity)
{
    struct values v = {malloc((capacity ? capacity : 1) * sizeof(double)), 0};
    TD_ASSERT(v.x); /* a benchmark without memory for its own numbers has nothing to say */
    return v;
}

static void values_add(struct values *v, double x) { v->x[v->n++] = x; }

/* Sorts and frees. */
static void values_close(struct values *v, const double *pcts, size_t n_pcts,
                         struct bench_metric *ret)
{
    td_stats_sort(v->x, v->n);
    *ret = (struct bench_metric){.n = v->n,
                                 .mean = td_stats_mean(v->x, v->n),
                                 .median = td_stats_percentile(v->x, v->n, 50),
                                 .std = td_stats_std(v->x, v->n),
                                 .min = v->n ? v->x[0] : NAN,
                                 .max = v->n ? v->x[v->n - 1] : NAN};
    for (size_t i = 0; i < n_pcts; i++) {
        size_t lo = 0, hi = v->n + 1;
        if (pcts[i] > 0 && pcts[i] < 100 && v->n)
            td_stats_percentile_ranks(v->n, pcts[i], &lo, &hi);
        ret->pct[i] = td_stats_percentile(v->x, v->n, pcts[i]);
        ret->pct_ci95[i] = (struct td_stats_interval){lo >= 1 ? v->x[lo - 1] : NAN,
                                                      hi <= v->n ? v->x[hi - 1] : NAN};
    }
    free(v->x);
}

static const struct bench_slo *slo_of(const struct bench_result *r, const struct bench_request *q)
{
    return &r->classes[q->class_index].of.slo;
}
static bool offered(const struct bench_request *q) { return q->outcome != BENCH_UNSENT; }
static bool done(const struct bench_request *q) { return q->outcome == BENCH_COMPLETED; }
/* The objectives' clock starts here: at the schedule; in a closed loop at the moment a place was
 * free. */
static double arrival_s(const struct bench_result *r, const struct bench_request *q)
{
    return r->load.closed_loop ? q->ready_s : q->scheduled_s;
}
/* A request that completed without a token answered when it ended. */
static double first_s(const struct bench_request *q)
{
    return isnan(q->first_s) ? q->end_s : q->first_s;
}
static double last_s(const struct bench_request *q)
{
    return isnan(q->last_s) ? q->end_s : q->last_s;
}
static double tpot_ms(const struct bench_request *q)
{
    return q->output_len > 1 ? (q->last_s - q->first_s) / (q->output_len - 1) * 1e3 : NAN;
}

static double worst_tenth_ms(const struct bench_request *q)
{
    size_t n = q->n_messages ? q->n_messages - 1 : 0;
    struct values v = values_open(n);
    for (size_t i = 0; i < n; i++) values_add(&v, q->gaps_s[i] * 1e3);
    double worst = td_stats_worst_tenth(v.x, v.n);
    free(v.x);
    return worst;
}

static void judge(const struct bench_result *r, struct bench_request *q)
{
    const struct bench_slo *slo = slo_of(r, q);
    q->ok = (struct bench_verdict){false, false, false, false, false};
    if (!done(q)) return;
    double from_s = arrival_s(r, q), tpot = tpot_ms(q);
    q->ok.ttft = slo->ttft_ms <= 0 || (first_s(q) - from_s) * 1e3 <= slo->ttft_ms;
    q->ok.tpot = slo->tpot_ms <= 0 || isnan(tpot) || tpot <= slo->tpot_ms;
    q->ok.e2el = slo->e2el_ms <= 0 || (last_s(q) - from_s) * 1e3 <= slo->e2el_ms;
    q->ok.tbt = true;
    if (slo->tbt_ms > 0) {
        double worst = worst_tenth_ms(q);
        q->ok.tbt = isnan(worst) || worst <= slo->tbt_ms;
    }
    q->ok.joint = q->ok.ttft && q->ok.tpot && q->ok.e2el && q->ok.tbt;
}

static void share_close(struct bench_share *s)
{
    s->value = s->n ? (double)s->k / (double)s->n : NAN;
}
static void share_add(struct bench_share *s, bool is_in) { s->n++, s->k += is_in; }

/* --- parts ------------------------------------------------------------------------------------ */

static void count(struct bench_result *r)
{
    double end_s = 0;
    for (size_t i = 0; i < r->n_requests; i++) {
        struct bench_request *q = &r->requests[i];
        judge(r, q);
        r->total.n_outcome[q->outcome]++;
        if (!offered(q)) continue;
        r->total.n_offered++;
        if (q->end_s > end_s) end_s = q->end_s; /* NAN is not greater */
        r->total.n_preemptions += q->preemptions;
        r->total.n_failovers += q->failovers;
        r->total.n_resumes += q->n_resumes;
        if (!done(q)) {
            if (!isnan(q->first_s)) r->total.wasted_prefill_tokens += (uint64_t)q->input_len;
            continue;
        }
        r->total.input_tokens += (uint64_t)q->input_len;
        r->total.output_tokens += (uint64_t)q->output_len;
        r->total.cached_tokens += (uint64_t)q->cached_tokens;
        r->total.input_unknown |= q->input_unknown;
        r->total.has_cached |= q->has_cached;
        r->total.n_one_token += q->output_len == 1;
        r->total.n_no_token += q->output_len == 0;
        r->total.n_deflected += q->has_ledger && !strcmp(q->mode, "colocated") &&
                                strcmp(r->setup.topology_mode, "colocated") != 0;
    }
    r->rates.duration_s = end_s;
}

static void rates(struct bench_result *r)
{
    uint64_t n_good = 0;
    for (size_t i = 0; i < r->n_requests; i++) n_good += r->requests[i].ok.joint;
    double d = r->rates.duration_s > 0 ? r->rates.duration_s : NAN;
    r->rates.request_throughput = (double)r->total.n_outcome[BENCH_COMPLETED] / d;
    r->rates.request_goodput = (double)n_good / d;
    r->rates.output_throughput = (double)r->total.output_tokens / d;
    r->rates.total_token_throughput = (double)(r->total.input_tokens + r->total.output_tokens) / d;
}

static void metrics(struct bench_result *r)
{
    size_t n_gaps = 0;
    for (size_t i = 0; i < r->n_requests; i++)
        if (done(&r->requests[i]) && r->requests[i].n_messages)
            n_gaps += r->requests[i].n_messages - 1;
    struct values v[BENCH_N_METRICS];
    for (int m = 0; m < BENCH_N_METRICS; m++)
        v[m] = values_open(m == BENCH_ITL ? n_gaps : r->n_requests);
    for (size_t i = 0; i < r->n_requests; i++) {
        const struct bench_request *q = &r->requests[i];
        if (!done(q)) continue;
        values_add(&v[BENCH_TTFT], (first_s(q) - q->sent_s) * 1e3);
        values_add(&v[BENCH_E2EL], (last_s(q) - q->sent_s) * 1e3);
        if (q->output_len > 1) values_add(&v[BENCH_TPOT], tpot_ms(q));
        for (uint32_t k = 0; k + 1 < q->n_messages; k++)
            values_add(&v[BENCH_ITL], q->gaps_s[k] * 1e3);
    }
    for (int m = 0; m < BENCH_N_METRICS; m++)
        values_close(&v[m], r->pcts, r->n_pcts, &r->metric[m]);
}

/* Busiest whole second of output tokens, and the most requests at once. */
static void peaks(struct bench_result *r)
{
    size_t n_seconds = (size_t)r->rates.duration_s + 2;
    double *per_s = calloc(n_seconds, sizeof *per_s);
    struct values starts = values_open(r->n_requests), ends = values_open(r->n_requests);
    TD_ASSERT(per_s);
    for (size_t i = 0; i < r->n_requests; i++) {
        const struct bench_request *q = &r->requests[i];
        if (!offered(q) || isnan(q->sent_s) || isnan(q->end_s)) continue;
        values_add(&starts, q->sent_s);
        values_add(&ends, q->end_s);
        if (!done(q) || !q->n_messages) continue;
        double at_s = q->first_s, share = (double)q->output_len / q->n_messages;
        for (uint32_t k = 0; k < q->n_messages; k++) {
            if (k) at_s += q->gaps_s[k - 1];
            size_t second = at_s > 0 ? (size_t)at_s : 0;
            if (second < n_seconds) per_s[second] += share;
        }
    }
    for (size_t i = 0; i < n_seconds; i++)
        if (per_s[i] > r->rates.max_output_tokens_per_s)
            r->rates.max_output_tokens_per_s = per_s[i];
    td_stats_sort(starts.x, starts.n);
    td_stats_sort(ends.x, ends.n);
    for (size_t i = 0, ended = 0; i < starts.n; i++) {
        while (ended < ends.n && ends.x[ended] <= starts.x[i]) ended++;
        if (i + 1 - ended > r->total.max_concurrent_requests)
            r->total.max_concurrent_requests = i + 1 - ended;
    }
    free(per_s);
    free(starts.x);
    free(ends.x);
}

static int by_arrival(const void *a, const void *b)
{
    const double *x = a, *y = b;
    return (x[0] > y[0]) - (x[0] < y[0]);
}

/* The measured span by arrival, the shares within it, and the interval of the joint one. */
static void measured_span(struct bench_result *r)
{
    double last = NAN;
    for (size_t i = 0; i < r->n_requests; i++)
        if (offered(&r->requests[i]) && !(arrival_s(r, &r->requests[i]) <= last))
            last = arrival_s(r, &r->requests[i]);
    if (isnan(last)) last = 0;
    r->steady.t0_s = r->load.warmup < 1 ? r->load.warmup * last : r->load.warmup;
    r->steady.t1_s = last - (r->load.cooldown < 1 ? r->load.cooldown * last : r->load.cooldown);

    double(*good)[2] = malloc((r->n_requests + 1) * sizeof *good); /* arrival, 1 = good */
    struct values slo_ttft = values_open(r->n_requests);
    TD_ASSERT(good);
    size_t n = 0;
    for (size_t i = 0; i < r->n_requests; i++) {
        const struct bench_request *q = &r->requests[i];
        double at_s = arrival_s(r, q);
        if (!offered(q) || at_s < r->steady.t0_s || at_s > r->steady.t1_s) continue;
        good[n][0] = at_s;
        good[n++][1] = q->ok.joint;
        share_add(&r->steady.joint, q->ok.joint);
        share_add(&r->steady.ttft, q->ok.ttft);
        share_add(&r->steady.tpot, q->ok.tpot);
        share_add(&r->steady.e2el, q->ok.e2el);
        share_add(&r->steady.tbt, q->ok.tbt);
        share_add(&r->classes[q->class_index].joint, q->ok.joint);
        if (!isnan(q->first_s)) values_add(&slo_ttft, (q->first_s - at_s) * 1e3);
    }
    values_close(&slo_ttft, r->pcts, r->n_pcts, &r->steady.slo_ttft);
    share_close(&r->steady.joint);
    share_close(&r->steady.ttft);
    share_close(&r->steady.tpot);
    share_close(&r->steady.e2el);
    share_close(&r->steady.tbt);

    qsort(good, n, sizeof *good, by_arrival);
    struct values in_order = values_open(n);
    for (size_t i = 0; i < n; i++) values_add(&in_order, good[i][1]);
    r->steady.ci95 = r->steady.ci95_wilson = td_stats_wilson(r->steady.joint.k, r->steady.joint.n);
    r->steady.has_batch = td_stats_batch_means(in_order.x, n, &r->steady.ci95_batch);
    /* Queueing makes neighbours alike: then the batches know less than Wilson's formula
       believes. */
    if (r->steady.has_batch && r->steady.ci95_batch.hi - r->steady.ci95_batch.lo >
                                   r->steady.ci95_wilson.hi - r->steady.ci95_wilson.lo)
        r->steady.ci95 = (struct td_stats_interval){fmax(0, r->steady.ci95_batch.lo),
                                                    fmin(1, r->steady.ci95_batch.hi)};
    free(in_order.x);
    free(good);

    double length_s = r->steady.t1_s - r->steady.t0_s;
    if (!(length_s > 0)) length_s = NAN;
    r->steady.offered_rate = (double)r->steady.joint.n / length_s;
    r->steady.goodput = (double)r->steady.joint.k / length_s;
    r->steady.per_gpu_goodput = r->setup.gpus ? r->steady.goodput / r->setup.gpus : NAN;
}

static bool in_span(const struct bench_result *r, const struct bench_request *q)
{
    return offered(q) && arrival_s(r, q) >= r->steady.t0_s && arrival_s(r, q) <= r->steady.t1_s;
}

/* Over-saturation, as guidellm sees it: work piles up and answers take longer and longer. A long
 * queue that does not grow is none, and a server that turns requests away keeps its queue. */
static void trend(struct bench_result *r)
{
    size_t n = 0;
    double(*order)[2] = malloc((r->n_requests + 1) * sizeof *order); /* arrival, TTFT ms */
    struct values ends = values_open(r->n_requests), starts = values_open(r->n_requests),
                  flying = values_open(r->n_requests), ttft = values_open(r->n_requests);
    TD_ASSERT(order);
    for (size_t i = 0; i < r->n_requests; i++) {
        const struct bench_request *q = &r->requests[i];
        if (!offered(q)) continue;
        values_add(&starts, arrival_s(r, q));
        values_add(&ends, isnan(q->end_s) ? INFINITY : q->end_s);
        if (!in_span(r, q) || isnan(q->first_s)) continue;
        order[n][0] = arrival_s(r, q);
        order[n++][1] = (q->first_s - arrival_s(r, q)) * 1e3;
    }
    td_stats_sort(starts.x, starts.n);
    td_stats_sort(ends.x, ends.n);
    qsort(order, n, sizeof *order, by_arrival);
    for (size_t i = 0, started = 0, ended = 0; i < n; i++) {
        while (started < starts.n && starts.x[started] <= order[i][0]) started++;
        while (ended < ends.n && ends.x[ended] <= order[i][0]) ended++;
        values_add(&flying, (double)(started - ended));
        values_add(&ttft, order[i][1]);
    }
    r->steady.has_trend = n >= 2 * TD_STATS_N_BATCHES && order[n - 1][0] > order[0][0];
    r->steady.saturated =
        r->steady.has_trend && td_stats_rises(flying.x, n, 1) && td_stats_rises(ttft.x, n, 0);
    free(order);
    free(ends.x);
    free(starts.x);
    free(flying.x);
    free(ttft.x);
}

/* Tokens that came by the time a reader who follows the objectives would want them. What a
 * request that did not complete was asked for and did not send is late. */
static void token_deadlines(struct bench_result *r)
{
    struct bench_share s = {0};
    for (size_t i = 0; i < r->n_requests; i++) {
        const struct bench_request *q = &r->requests[i];
        const struct bench_slo *slo = slo_of(r, q);
        if (!in_span(r, q) || slo->ttft_ms <= 0 || slo->tpot_ms <= 0) continue;
        double at_s = q->first_s, due_s = arrival_s(r, q) + slo->ttft_ms / 1e3;
        for (uint32_t k = 0; k < q->n_messages; k++, due_s += slo->tpot_ms / 1e3) {
            if (k) at_s += q->gaps_s[k - 1];
            share_add(&s, at_s <= due_s);
        }
        if (!done(q) && q->want_len > (int32_t)q->n_messages)
            s.n += (uint64_t)q->want_len - q->n_messages;
    }
    share_close(&s);
    r->steady.token_deadline_share = s.value;
}

static void classes(struct bench_result *r)
{
    double length_s = r->steady.t1_s - r->steady.t0_s;
    for (size_t c = 0; c < r->n_classes; c++) {
        struct bench_class_result *k = &r->classes[c];
        struct values ttft = values_open(r->n_requests), tpot = values_open(r->n_requests);
        for (size_t i = 0; i < r->n_requests; i++) {
            const struct bench_request *q = &r->requests[i];
            if (q->class_index != c || !in_span(r, q) || !done(q)) continue;
            values_add(&ttft, (first_s(q) - arrival_s(r, q)) * 1e3);
            if (q->output_len > 1) values_add(&tpot, tpot_ms(q));
        }
        td_stats_sort(ttft.x, ttft.n);
        td_stats_sort(tpot.x, tpot.n);
        k->ttft_p50_ms = td_stats_percentile(ttft.x, ttft.n, 50);
        k->ttft_p99_ms = td_stats_percentile(ttft.x, ttft.n, 99);
        k->tpot_p50_ms = td_stats_percentile(tpot.x, tpot.n, 50);
        k->tpot_p99_ms = td_stats_percentile(tpot.x, tpot.n, 99);
        share_close(&k->joint);
        k->ci95 = td_stats_wilson(k->joint.k, k->joint.n);
        k->request_goodput = length_s > 0 ? (double)k->joint.k / length_s : NAN;
        free(ttft.x);
        free(tpot.x);
    }
}

static void tenants(struct bench_result *r)
{
    r->jain_index = NAN;
    if (r->load.n_tenants < 2) return;
    struct bench_share *s = calloc(r->load.n_tenants, sizeof *s);
    struct values v = values_open(r->load.n_tenants);
    TD_ASSERT(s);
    for (size_t i = 0; i < r->n_requests; i++)
        if (in_span(r, &r->requests[i]))
            share_add(&s[r->requests[i].tenant], r->requests[i].ok.joint);
    for (uint32_t t = 0; t < r->load.n_tenants; t++) {
        share_close(&s[t]);
        if (s[t].n) values_add(&v, s[t].value);
    }
    r->jain_index = td_stats_jain(v.x, v.n);
    free(v.x);
    free(s);
}

static void stages(struct bench_result *r)
{
    struct values v[BENCH_N_STAGES];
    double error = 0;
    struct bench_share covered = {0};
    for (int k = 0; k < BENCH_N_STAGES; k++) v[k] = values_open(r->n_requests);
    for (size_t i = 0; i < r->n_requests; i++) {
        const struct bench_request *q = &r->requests[i];
        if (!done(q) || !q->has_ledger) continue;
        double ttft_us = 0;
        for (int k = 0; k < BENCH_N_STAGES; k++) values_add(&v[k], (double)q->stages_us[k] / 1e3);
        for (int k = 0; k <= BENCH_RPC; k++) ttft_us += (double)q->stages_us[k];
        if (!q->predicted_ttft_us || ttft_us <= 0) continue;
        error += fabs((double)q->predicted_ttft_us - ttft_us) / ttft_us;
        share_add(&covered, ttft_us <= (double)q->predicted_ttft_us);
    }
    for (int k = 0; k < BENCH_N_STAGES; k++) values_close(&v[k], r->pcts, r->n_pcts, &r->stages[k]);
    share_close(&covered);
    r->predicted_ttft_coverage = covered.value;
    r->predicted_ttft_mape = covered.n ? error / (double)covered.n : NAN;
}

static void lag(struct bench_result *r)
{
    struct values v = values_open(r->n_requests);
    double least_ttft_ms = INFINITY, limit_ms = r->generator.max_sched_lag_ms;
    for (size_t i = 0; i < r->n_requests; i++)
        if (offered(&r->requests[i]) && !isnan(r->requests[i].sent_s))
            values_add(&v, (r->requests[i].sent_s - r->requests[i].ready_s) * 1e3);
    td_stats_sort(v.x, v.n);
    r->generator.lag_p50_ms = td_stats_percentile(v.x, v.n, 50);
    r->generator.lag_p99_ms = td_stats_percentile(v.x, v.n, 99);
    r->generator.lag_max_ms = v.n ? v.x[v.n - 1] : NAN;
    free(v.x);
    for (size_t c = 0; c < r->n_classes; c++)
        if (r->classes[c].of.slo.ttft_ms > 0)
            least_ttft_ms = fmin(least_ttft_ms, r->classes[c].of.slo.ttft_ms);
    if (limit_ms <= 0) limit_ms = fmin(5, least_ttft_ms / 100);
    r->valid = true;
    if (r->interrupted) {
        r->valid = false;
        snprintf(r->invalid_reason, sizeof r->invalid_reason,
                 "interrupted after %llu of %zu requests", (unsigned long long)r->total.n_offered,
                 r->n_requests);
    } else if (r->generator.lag_p99_ms > limit_ms) {
        r->valid = false;
        snprintf(r->invalid_reason, sizeof r->invalid_reason,
                 "the load generator itself was late: sched_lag_ms p99 is %.3f, limit %.3f (5 ms, "
                 "or 1 %% of the TTFT objective; --max-sched-lag-ms)",
                 r->generator.lag_p99_ms, limit_ms);
    }
}

void bench_result_summarise(struct bench_result *r)
{
    count(r);
    rates(r);
    metrics(r);
    peaks(r);
    measured_span(r);
    trend(r);
    token_deadlines(r);
    classes(r);
    tenants(r);
    stages(r);
    lag(r);
}

void bench_result_free(struct bench_result *r)
{
    for (size_t i = 0; r->requests && i < r->n_requests; i++) {
        free(r->requests[i].error);
        free(r->requests[i].gaps_s);
    }
    free(r->requests);
    free(r->setup.metadata);
    memset(r, 0, sizeof *r);
}
