/* report.c - see report.h. */
#include "sim/report.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/say.h"
#include "common/base/stats.h"
#include "sim/heap.h"

static struct td_sim_percentiles percentiles(double *v, uint32_t n)
{
    if (n == 0) return (struct td_sim_percentiles){0};
    td_stats_sort(v, n);
    return (struct td_sim_percentiles){td_stats_mean(v, n), td_stats_percentile(v, n, 50),
                                       td_stats_percentile(v, n, 90),
                                       td_stats_percentile(v, n, 99)};
}

static void fleet_name(const struct td_sim_config *c, char *text, size_t bytes)
{
    size_t n = 0;
    for (uint32_t i = 0; i < c->n_groups && n < bytes; i++)
        n += (size_t)snprintf(text + n, bytes - n, "%s%u%c %s", i ? " + " : "", c->groups[i].count,
                              c->groups[i].decode ? 'D' : 'P', c->groups[i].perf.name);
    for (char *t = text; *t; t++) /* it stands in CSV and JSON */
        if (*t == '"' || *t == ',' || *t == '\\' || (unsigned char)*t < ' ') *t = '_';
}

/* What the requests of a part of a run add up to, and the latencies of those that ended OK. */
struct tally {
    double *ttft, *tpot, *e2e; /* ms */
    double prompt, cached;     /* tokens */
};

/* Adds one request that ended OK. */
static void tally_add(struct tally *t, const struct td_sim_config *c,
                      const struct td_sim_outcome *o, struct td_sim_summary *s)
{
    const struct td_core_class *k = c->router.n_classes ? &c->router.classes[o->slo_class] : NULL;
    double ttft_limit_s = k ? k->ttft_ms / 1e3 : c->ttft_s,
           tpot_limit_s = k ? k->tpot_ms / 1e3 : c->tpot_s;
    double ttft_s = (double)(o->first_ns - o->at_ns) / 1e9,
           tpot_s =
               o->n_output > 1 ? (double)(o->end_ns - o->first_ns) / 1e9 / (o->n_output - 1) : 0;
    bool ttft_ok = ttft_limit_s <= 0 || ttft_s <= ttft_limit_s,
         tpot_ok = tpot_limit_s <= 0 || tpot_s <= tpot_limit_s;
    t->ttft[s->n_ok] = ttft_s * 1e3;
    t->tpot[s->n_ok] = tpot_s * 1e3;
    t->e2e[s->n_ok++] = (double)(o->end_ns - o->at_ns) / 1e6;
    s->n_ttft_ok += ttft_ok;
    s->n_tpot_ok += tpot_ok;
    s->n_good += ttft_ok && tpot_ok;
    t->prompt += o->n_prompt;
    t->cached += o->cached_tokens;
}

static struct td_sim_summary summary_begin(const struct td_sim_config *c,
                                           const struct td_sim_result *r)
{
    struct td_sim_summary s = {.part = "all",
                               .seed = c->seed,
                               .gpus = r->gpus,
                               .prefill_busy = r->prefill_busy,
                               .decode_busy = r->decode_busy,
                               .preemptions = r->preemptions,
                               .failovers = r->failovers,
                               .deflected = r->deflected,
                               .steps = r->steps,
                               .core_steps = r->core_steps,
                               .n_events = r->n_events,
                               .transfer_gb = (double)r->transfer_bytes / 1e9};
    snprintf(s.policy, sizeof s.policy, "%s", c->router.policy);
    snprintf(s.mode, sizeof s.mode, "%s", c->router.mode);
    fleet_name(c, s.fleet, sizeof s.fleet);
    return s;
}

/* Of the requests of a class and a tenant (-1: all) that arrived in [from_s, to_s]. */
static void summarise(const struct td_sim_config *c, const struct td_sim_result *r,
                      int32_t slo_class, int32_t tenant, double from, double to,
                      struct td_sim_summary *ret)
{
    struct td_sim_summary s = summary_begin(c, r);
    struct tally t = {.ttft = td_sim_grow(NULL, r->n, sizeof(double)),
                      .tpot = td_sim_grow(NULL, r->n, sizeof(double)),
                      .e2e = td_sim_grow(NULL, r->n, sizeof(double))};
    for (uint32_t i = 0; i < r->n; i++) {
        const struct td_sim_outcome *o = &r->outcomes[i];
        double at = (double)o->at_ns / 1e9;
        if (at < from || at > to || (slo_class >= 0 && o->slo_class != (uint32_t)slo_class) ||
            (tenant >= 0 && o->tenant != (uint32_t)tenant))
            continue;
        s.n++;
        s.n_rejected += o->status == TD_SIM_REJECTED;
        s.n_failed += o->status == TD_SIM_FAILED || o->status == TD_SIM_CANCELLED;
        s.n_unfinished += o->status == TD_SIM_PENDING;
        if (o->status == TD_SIM_OK) tally_add(&t, c, o, &s);
    }
    s.span_s = to > from ? to - from : 0;
    if (s.span_s > 0) {
        s.offered = s.n / s.span_s;
        s.goodput = s.n_good / s.span_s;
    }
    s.attainment = s.n ? (double)s.n_good / s.n : 0;
    struct td_stats_interval ci = td_stats_wilson(s.n_good, s.n);
    s.ci_low = ci.lo;
    s.ci_high = ci.hi;
    s.ttft_ms = percentiles(t.ttft, s.n_ok);
    s.tpot_ms = percentiles(t.tpot, s.n_ok);
    s.e2e_ms = percentiles(t.e2e, s.n_ok);
    s.hit_share = t.prompt > 0 ? t.cached / t.prompt : 0;
    free(t.ttft);
    free(t.tpot);
    free(t.e2e);
    *ret = s;
}

static double first_s(const struct td_sim_result *r) { return (double)r->outcomes[0].at_ns / 1e9; }

void td_sim_summarise_part(const struct td_sim_config *c, const struct td_sim_result *r,
                           int32_t slo_class, int32_t tenant, struct td_sim_summary *ret)
{
    double last = (double)r->outcomes[r->n - 1].at_ns / 1e9;
    summarise(c, r, slo_class, tenant, first_s(r) + c->warmup_s, last - c->cooldown_s, ret);
}

void td_sim_summarise_interval(const struct td_sim_config *c, const struct td_sim_result *r,
                               double from_s, double to_s, struct td_sim_summary *ret)
{
    summarise(c, r, -1, -1, first_s(r) + from_s, nextafter(first_s(r) + to_s, 0), ret);
    snprintf(ret->part, sizeof ret->part, "%g..%g s", from_s, to_s);
}

void td_sim_summarise(const struct td_sim_config *c, const struct td_sim_result *r,
                      struct td_sim_summary *ret)
{
    td_sim_summarise_part(c, r, -1, -1, ret);
}

static void mean_percentiles(struct td_sim_percentiles *sum, const struct td_sim_percentiles *x,
                             double share)
{
    sum->mean += x->mean * share;
    sum->p50 += x->p50 * share;
    sum->p90 += x->p90 * share;
    sum->p99 += x->p99 * share;
}

void td_sim_pool(const struct td_sim_summary *runs, uint32_t n, struct td_sim_summary *ret)
{
    struct td_sim_summary s = runs[0];
    if (n == 1) {
        *ret = s;
        return;
    }
    s.n = s.n_good = s.n_ttft_ok = s.n_tpot_ok = s.n_ok = s.n_rejected = s.n_failed =
        s.n_unfinished = 0;
    s.span_s = s.offered = s.goodput = s.prefill_busy = s.decode_busy = s.hit_share = s.wall_s =
        s.transfer_gb = 0;
    s.preemptions = s.failovers = s.deflected = s.steps = s.core_steps = s.n_events = 0;
    s.ttft_ms = s.tpot_ms = s.e2e_ms = (struct td_sim_percentiles){0};
    double mean = 0, square = 0, share = 1.0 / n;
    for (uint32_t i = 0; i < n; i++) {
        const struct td_sim_summary *r = &runs[i];
        s.n += r->n;
        s.n_good += r->n_good;
        s.n_ttft_ok += r->n_ttft_ok;
        s.n_tpot_ok += r->n_tpot_ok;
        s.n_ok += r->n_ok;
        s.n_rejected += r->n_rejected;
        s.n_failed += r->n_failed;
        s.n_unfinished += r->n_unfinished;
        s.span_s += r->span_s;
        s.offered += r->offered * share;
        s.goodput += r->goodput * share;
        s.prefill_busy += r->prefill_busy * share;
        s.decode_busy += r->decode_busy * share;
        s.hit_share += r->hit_share * share;
        s.wall_s += r->wall_s;
        s.transfer_gb += r->transfer_gb;
        s.preemptions += r->preemptions;
        s.failovers += r->failovers;
        s.deflected += r->deflected;
        s.steps += r->steps;
        s.core_steps += r->core_steps;
        s.n_events += r->n_events;
        mean_percentiles(&s.ttft_ms, &r->ttft_ms, share);
        mean_percentiles(&s.tpot_ms, &r->tpot_ms, share);
        mean_percentiles(&s.e2e_ms, &r->e2e_ms, share);
        mean += r->attainment;
        square += r->attainment * r->attainment;
    }
    s.attainment = s.n ? (double)s.n_good / s.n : 0;
    struct td_stats_interval ci = td_stats_wilson(s.n_good, s.n);
    s.ci_low = ci.lo;
    s.ci_high = ci.hi;
    /* Requests of one run are not independent (they queue behind each other); runs are.
       Student's t, 95 %. */
    static const double t95[] = {0, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262};
    double var = fmax(0, (square - mean * mean / n) / (n - 1)),
           half = (n - 1 < 10 ? t95[n - 1] : 2.0) * sqrt(var / n);
    s.ci_low = fmax(0, fmin(s.ci_low, s.attainment - half));
    s.ci_high = fmin(1, fmax(s.ci_high, s.attainment + half));
    *ret = s;
}

void td_sim_table_head(FILE *out)
{
    td_say(out, 4, "%-13s %-9s %8s %6s %8s %7s %-15s %8s %8s %8s %7s %7s %6s %5s %5s %5s\n",
           "policy", "mode", "rate", "n", "goodput", "attain", "95% interval", "ttft p50",
           "ttft p90", "ttft p99", "tpot50", "tpot90", "reject", "pbusy", "dbusy", "hit");
}

void td_sim_table_row(const struct td_sim_summary *s, FILE *out)
{
    char part[24];
    snprintf(part, sizeof part, "  %.21s", s->part);
    bool all = !strcmp(s->part, "all");
    td_say(out, 4,
           "%-*s %*s%8.2f %6u %8.2f %6.1f%% [%5.1f%%,%6.1f%%] %8.1f %8.1f %8.1f %7.2f %7.2f %6u "
           "%4.0f%% %4.0f%% %4.0f%%%s\n",
           all ? 13 : 23, all ? s->policy : part, all ? -10 : 0, all ? s->mode : "", s->offered,
           s->n, s->goodput, s->attainment * 100, s->ci_low * 100, s->ci_high * 100, s->ttft_ms.p50,
           s->ttft_ms.p90, s->ttft_ms.p99, s->tpot_ms.p50, s->tpot_ms.p90, s->n_rejected,
           s->prefill_busy * 100, s->decode_busy * 100, s->hit_share * 100,
           s->n_failed || s->n_unfinished ? " !" : "");
}

void td_sim_csv_head(FILE *out)
{
    fprintf(out, "policy,mode,fleet,gpus,rate,cv,seed,offered,n,ok,good,goodput,per_gpu_goodput,"
                 "attainment,ci_low,ci_high,ttft_ok,tpot_ok,rejected,"
                 "failed,unfinished,"
                 "ttft_mean,ttft_p50,ttft_p90,ttft_p99,tpot_mean,tpot_p50,tpot_p90,tpot_p99,e2e_"
                 "mean,e2e_p50,e2e_p90,e2e_p99,prefill_busy,decode_"
                 "busy,hit_share,"
                 "preemptions,failovers,deflected,transfer_gb,steps,events,core_steps,window_s,"
                 "wall_s,part\n");
}

void td_sim_csv_row(const struct td_sim_summary *s, FILE *out)
{
    fprintf(out, "%s,%s,%s,%u,%g,%g,%llu,%.4f,%u,%u,%u,%.4f,%.4f,%.5f,%.5f,%.5f,%u,%u,%u,%u,%u,",
            s->policy, s->mode, s->fleet, s->gpus, s->rate, s->cv, (unsigned long long)s->seed,
            s->offered, s->n, s->n_ok, s->n_good, s->goodput, s->goodput / (s->gpus ? s->gpus : 1),
            s->attainment, s->ci_low, s->ci_high, s->n_ttft_ok, s->n_tpot_ok, s->n_rejected,
            s->n_failed, s->n_unfinished);
    const struct td_sim_percentiles *p[3] = {&s->ttft_ms, &s->tpot_ms, &s->e2e_ms};
    for (int i = 0; i < 3; i++)
        fprintf(out, "%.3f,%.3f,%.3f,%.3f,", p[i]->mean, p[i]->p50, p[i]->p90, p[i]->p99);
    fprintf(out, "%.4f,%.4f,%.4f,%llu,%llu,%llu,%.3f,%llu,%llu,%llu,%.3f,%.3f,%s\n",
            s->prefill_busy, s->decode_busy, s->hit_share, (unsigned long long)s->preemptions,
            (unsigned long long)s->failovers, (unsigned long long)s->deflected, s->transfer_gb,
            (unsigned long long)s->steps, (unsigned long long)s->n_events,
            (unsigned long long)s->core_steps, s->span_s, s->wall_s, s->part);
}

void td_sim_json_row(const struct td_sim_summary *s, FILE *out)
{
    fprintf(out,
            "{\"part\":\"%s\",\"policy\":\"%s\",\"mode\":\"%s\",\"fleet\":\"%s\",\"gpus\":%u,"
            "\"request_rate\":%g,\"cv\":%g,\"seed\":%llu,\"offered\":"
            "%.4f,\"n\":%u,"
            "\"completed\":%u,"
            "\"good\":%u,\"request_goodput\":%.4f,\"per_gpu_goodput\":%.4f,\"attainment\":{"
            "\"joint\":%.5f,\"ci95\":[%.5f,%.5f],\"ttft\":%.5f,"
            "\"tpot\":%.5f},"
            "\"rejected\":%u,\"failed\":%u,\"unfinished\":%u,",
            s->part, s->policy, s->mode, s->fleet, s->gpus, s->rate, s->cv,
            (unsigned long long)s->seed, s->offered, s->n, s->n_ok, s->n_good, s->goodput,
            s->goodput / (s->gpus ? s->gpus : 1), s->attainment, s->ci_low, s->ci_high,
            s->n ? (double)s->n_ttft_ok / s->n : 0, s->n ? (double)s->n_tpot_ok / s->n : 0,
            s->n_rejected, s->n_failed, s->n_unfinished);
    static const char *const names[3] = {"ttft", "tpot", "e2el"};
    const struct td_sim_percentiles *p[3] = {&s->ttft_ms, &s->tpot_ms, &s->e2e_ms};
    for (int i = 0; i < 3; i++)
        fprintf(
            out, "\"mean_%s_ms\":%.3f,\"p50_%s_ms\":%.3f,\"p90_%s_ms\":%.3f,\"p99_%s_ms\":%.3f,",
            names[i], p[i]->mean, names[i], p[i]->p50, names[i], p[i]->p90, names[i], p[i]->p99);
    fprintf(out,
            "\"prefill_busy\":%.4f,\"decode_busy\":%.4f,\"hit_share\":%.4f,\"preemptions\":%llu,"
            "\"failovers\":%llu,\"deflected\":%llu,\"transfer_"
            "gb\":%.3f,"
            "\"window_s\":%.3f,\"wall_s\":%.3f}",
            s->prefill_busy, s->decode_busy, s->hit_share, (unsigned long long)s->preemptions,
            (unsigned long long)s->failovers, (unsigned long long)s->deflected, s->transfer_gb,
            s->span_s, s->wall_s);
}
