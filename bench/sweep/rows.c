/* rows.c - from a run's requests to a row of the sweep. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bench/sweep/sweep.h"

void sweep_free(struct sweep *s)
{
    for (size_t i = 0; i < s->n_rows; i++) {
        free(s->rows[i].ttft_q);
        free(s->rows[i].tpot_q);
        free(s->rows[i].scale_joint);
        free(s->rows[i].points);
    }
    free(s->rows);
    free(s->command);
    *s = (struct sweep){0};
}

struct sweep_row *sweep_row_add(struct sweep *s)
{
    struct sweep_row *rows = realloc(s->rows, (s->n_rows + 1) * sizeof *rows);
    if (!rows) return NULL;
    s->rows = rows;
    struct sweep_row *row = &rows[s->n_rows++];
    *row = (struct sweep_row){0};
    /* all numbers stand in one run of doubles */
    for (double *v = &row->rate; v <= &row->stages_ms[BENCH_N_STAGES - 1]; v++) *v = NAN;
    return row;
}
_Static_assert((offsetof(struct sweep_row, stages_ms) - offsetof(struct sweep_row, rate)) %
                       sizeof(double) ==
                   0,
               "the row's numbers are doubles, one after another");

static double pct(const struct bench_result *r, const struct bench_metric *m, double p)
{
    for (size_t i = 0; i < r->n_pcts; i++)
        if (r->pcts[i] == p) return m->n ? m->pct[i] : NAN;
    return NAN;
}

static double arrival_of(const struct bench_result *r, const struct bench_request *q)
{
    return r->load.closed_loop ? q->ready_s : q->scheduled_s;
}

static bool in_span(const struct bench_result *r, const struct bench_request *q)
{
    return q->outcome != BENCH_UNSENT && arrival_of(r, q) >= r->steady.t0_s &&
           arrival_of(r, q) <= r->steady.t1_s;
}

static int by_value(const void *a, const void *b)
{
    const double *x = a, *y = b;
    return (*x > *y) - (*x < *y);
}

/* --- a row ------------------------------------------------------------------------------------ */

/* Quantiles of n values of which only the first n_known are known; the others are later than
 * any. */
static double *quantiles(double *x, size_t n_known, size_t n)
{
    double *q = malloc(SWEEP_N_QUANTILES * sizeof *q);
    if (!q) return NULL;
    for (size_t i = n_known; i < n; i++) x[i] = INFINITY;
    qsort(x, n, sizeof *x, by_value);
    for (int i = 0; i < SWEEP_N_QUANTILES; i++) {
        /* nearest rank: a share of i % lies at or below it */
        size_t rank = n ? (size_t)ceil((double)i / (SWEEP_N_QUANTILES - 1) * (double)n) : 0;
        double v = n ? x[rank ? rank - 1 : 0] : NAN;
        q[i] = isfinite(v) ? v : NAN;
    }
    return q;
}

static td_status distributions(struct sweep_row *row, const struct bench_result *r,
                               struct td_err *err)
{
    double *ttft = malloc((r->n_requests + 1) * sizeof *ttft),
           *tpot = malloc((r->n_requests + 1) * sizeof *tpot);
    size_t n_ttft = 0, n_tpot = 0, n = 0, n_one = 0, n_predicted = 0;
    td_status s = ttft && tpot ? TD_OK : td_fail(err, TD_ERR_NOMEM, "out of memory");
    for (size_t i = 0; !s && i < r->n_requests; i++) {
        const struct bench_request *q = &r->requests[i];
        if (!in_span(r, q)) continue;
        n++;
        n_predicted += q->has_ledger && q->predicted_ttft_us > 0;
        if (q->outcome != BENCH_COMPLETED || isnan(q->first_s)) continue;
        ttft[n_ttft++] = (q->first_s - arrival_of(r, q)) * 1e3;
        if (q->output_len > 1)
            tpot[n_tpot++] = (q->last_s - q->first_s) / (q->output_len - 1) * 1e3;
        else
            n_one++; /* nothing to be late with */
    }
    if (!s && n) {
        row->ttft_q = quantiles(ttft, n_ttft, n);
        row->tpot_q = quantiles(tpot, n_tpot, n - n_one);
        row->points = calloc(SWEEP_MAX_POINTS, sizeof *row->points);
        if (!row->ttft_q || !row->tpot_q || !row->points)
            s = td_fail(err, TD_ERR_NOMEM, "out of memory");
    }
    size_t seen = 0, step = n_predicted / SWEEP_MAX_POINTS + 1;
    for (size_t i = 0; !s && i < r->n_requests; i++) {
        const struct bench_request *q = &r->requests[i];
        if (!in_span(r, q) || !q->has_ledger || q->predicted_ttft_us == 0 ||
            q->outcome != BENCH_COMPLETED)
            continue;
        double observed = 0;
        for (int k = 0; k <= BENCH_RPC; k++) observed += (double)q->stages_us[k] / 1e3;
        if (seen++ % step == 0 && row->n_points < SWEEP_MAX_POINTS)
            row->points[row->n_points++] =
                (struct sweep_point){(float)((double)q->predicted_ttft_us / 1e3), (float)observed};
    }
    free(ttft);
    free(tpot);
    return s;
}

static void scale_slo(struct bench_slo *to, const struct bench_slo *from, double by)
{
    *to = (struct bench_slo){from->ttft_ms * by, from->tpot_ms * by, from->e2el_ms * by,
                             from->tbt_ms * by};
}

/* r's requests judged by its objectives times `by`: r keeps its numbers, its requests' verdicts
 * are those of the last call. */
static double attainment_at(const struct bench_result *r, double by)
{
    struct bench_result t = *r;
    /* what bench_result_summarise fills */
    memset(&t.valid, 0, sizeof t - offsetof(struct bench_result, valid));
    scale_slo(&t.slo, &r->slo, by);
    for (size_t k = 0; k < r->n_classes; k++) {
        t.classes[k] = (struct bench_class_result){.of = r->classes[k].of};
        scale_slo(&t.classes[k].of.slo, &r->classes[k].of.slo, by);
    }
    bench_result_summarise(&t);
    return t.steady.joint.value;
}

static td_status scales(const struct sweep *s, struct sweep_row *row, const struct bench_result *r,
                        struct td_err *err)
{
    if (s->n_scales == 0) return TD_OK;
    row->scale_joint = calloc(s->n_scales, sizeof *row->scale_joint);
    if (!row->scale_joint) return td_fail(err, TD_ERR_NOMEM, "out of memory");
    for (uint32_t i = 0; i < s->n_scales; i++) row->scale_joint[i] = attainment_at(r, s->scales[i]);
    attainment_at(r, 1);
    return TD_OK;
}

td_status sweep_row_fill(const struct sweep *s, struct sweep_row *row, const struct bench_result *r,
                         struct td_err *err)
{
    row->seed = (double)r->load.seed;
    row->count.offered = (double)r->total.n_offered;
    row->count.completed = (double)r->total.n_outcome[BENCH_COMPLETED];
    row->count.rejected = (double)r->total.n_outcome[BENCH_REJECTED];
    row->count.rejected_ttft = row->count.rejected_tpot = 0;
    for (size_t i = 0; i < r->n_requests; i++) { /* the router's refusal says which objective it
                                                    is for */
        const struct bench_request *q = &r->requests[i];
        if (q->outcome != BENCH_REJECTED || !q->error) continue;
        row->count.rejected_ttft += strstr(q->error, "TTFT") != NULL;
        row->count.rejected_tpot += strstr(q->error, "TPOT") != NULL;
    }
    row->count.timed_out = (double)r->total.n_outcome[BENCH_TIMED_OUT];
    row->count.failed = (double)r->total.n_outcome[BENCH_FAILED];
    row->count.unfinished = (double)r->total.n_outcome[BENCH_UNFINISHED];
    row->count.deflected = r->setup.plain_server ? NAN : (double)r->total.n_deflected;
    row->steady.offered_rate = r->steady.offered_rate;
    row->steady.goodput = r->steady.goodput;
    row->steady.per_gpu_goodput = r->steady.per_gpu_goodput;
    row->steady.attainment = r->steady.joint.value;
    row->steady.n_good = (double)r->steady.joint.k;
    row->steady.n = (double)r->steady.joint.n;
    row->steady.ci95_lo = r->steady.ci95.lo;
    row->steady.ci95_hi = r->steady.ci95.hi;
    row->steady.attainment_ttft = r->steady.ttft.value;
    row->steady.attainment_tpot = r->steady.tpot.value;
    row->steady.attainment_e2el = r->steady.e2el.value;
    row->ttft.p50_ms = pct(r, &r->steady.slo_ttft, 50);
    row->ttft.p90_ms = pct(r, &r->steady.slo_ttft, 90);
    row->ttft.p99_ms = pct(r, &r->steady.slo_ttft, 99);
    row->tpot.p50_ms = pct(r, &r->metric[BENCH_TPOT], 50);
    row->tpot.p90_ms = pct(r, &r->metric[BENCH_TPOT], 90);
    row->tpot.p99_ms = pct(r, &r->metric[BENCH_TPOT], 99);
    row->itl.p50_ms = pct(r, &r->metric[BENCH_ITL], 50);
    row->itl.p90_ms = pct(r, &r->metric[BENCH_ITL], 90);
    row->itl.p99_ms = pct(r, &r->metric[BENCH_ITL], 99);
    row->steady.saturated = r->steady.saturated;
    row->run.valid = r->valid;
    row->run.late = !r->valid && !r->interrupted;
    row->steady.span_s = r->steady.t1_s - r->steady.t0_s;
    row->run.duration_s = r->rates.duration_s;
    row->run.sched_lag_p99_ms = r->generator.lag_p99_ms;
    row->predicted.mape = r->predicted_ttft_mape;
    row->predicted.coverage = r->predicted_ttft_coverage;
    for (int k = 0; k < BENCH_N_STAGES; k++)
        row->stages_ms[k] = r->stages[k].n ? r->stages[k].mean : NAN;
    td_status st = distributions(row, r, err);
    return st ? st : scales(s, row, r, err);
}
