/* verdict.c - what the rows say: goodput of each configuration, who won, and what stopped the
 * others. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bench/sweep/sweep.h"

#define MAX_POOLS 256
#define MAX_LOST 64
/* Loads per worker that differ by less are one load: a search ends at rates of its own. */
#define SAME_LOAD 1.1
/* Less goodput than this below the leader's is none: a search stops at such a tolerance. */
#define LEAST_LEAD 1.05

static bool is_open_loop(const struct sweep_row *r)
{
    return strcmp(r->phase, "sync") != 0 && strcmp(r->phase, "throughput") != 0;
}

static uint32_t workers(const struct sweep_config *c) { return c->gpus ? c->gpus : 1; }

static double ms(double v) { return isnan(v) ? 0 : v; }

/* --- runs of one rate put together ------------------------------------------------------------ */

static double student95(uint32_t df)
{
    static const double t[] = {12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262};
    return df <= sizeof t / sizeof *t ? t[df - 1] : 2.2;
}

static void pool_rate(const struct sweep *s, uint32_t config, double rate, struct sweep_pool *p)
{
    double k = 0, n = 0, k_ttft = 0, k_tpot = 0, sum = 0, squares = 0;
    *p = (struct sweep_pool){.rate = rate, .least = INFINITY, .greatest = -INFINITY};
    for (size_t i = 0; i < s->n_rows; i++) {
        const struct sweep_row *r = &s->rows[i];
        if (r->config != config || r->rate != rate || !is_open_loop(r) || !(r->run.valid > 0) ||
            !(r->steady.n > 0) || isnan(r->steady.n_good) || isnan(r->steady.attainment))
            continue;
        p->n_runs++;
        k += r->steady.n_good;
        n += r->steady.n;
        k_ttft += r->steady.attainment_ttft * r->steady.n;
        k_tpot += r->steady.attainment_tpot * r->steady.n;
        p->offered_rate += r->steady.offered_rate;
        p->goodput += r->steady.goodput;
        p->saturated |= r->steady.saturated > 0;
        p->least = fmin(p->least, r->steady.attainment);
        p->greatest = fmax(p->greatest, r->steady.attainment);
        sum += r->steady.attainment;
        squares += r->steady.attainment * r->steady.attainment;
        p->lo = r->steady.ci95_lo;
        p->hi = r->steady.ci95_hi;
    }
    if (p->n_runs == 0) return;
    p->offered_rate /= p->n_runs;
    p->goodput /= p->n_runs;
    p->n = n;
    p->joint = k / n;
    p->ttft = k_ttft / n;
    p->tpot = k_tpot / n;
    if (p->n_runs == 1) return; /* its own interval */
    struct td_stats_interval w = td_stats_wilson((uint64_t)k, (uint64_t)n);
    double mean = sum / p->n_runs,
           half = student95(p->n_runs - 1) *
                  sqrt(fmax(0, squares / p->n_runs - mean * mean) / (p->n_runs - 1));
    /* the wider one: runs may differ by more than chance among requests */
    bool seeds = p->n_runs >= 3 && 2 * half > w.hi - w.lo;
    p->lo = seeds ? fmax(0, mean - half) : w.lo;
    p->hi = seeds ? fmin(1, mean + half) : w.hi;
}

static int by_rate(const void *a, const void *b)
{
    const struct sweep_pool *x = a, *y = b;
    return (x->rate > y->rate) - (x->rate < y->rate);
}

static int by_lost_rate(const void *a, const void *b)
{
    const struct sweep_lost *x = a, *y = b;
    return (x->rate > y->rate) - (x->rate < y->rate);
}

size_t sweep_lost(const struct sweep *s, uint32_t config, struct sweep_lost *ret_lost, size_t max)
{
    size_t n = 0;
    for (size_t i = 0; i < s->n_rows; i++) {
        const struct sweep_row *r = &s->rows[i];
        struct sweep_pool p;
        size_t k = 0;
        if (r->config != config || !is_open_loop(r)) continue;
        pool_rate(s, config, r->rate, &p);
        while (k < n && ret_lost[k].rate != r->rate) k++;
        if (p.n_runs > 0 || k == max) continue;
        const char *why = r->run.valid > 0     ? "no request in the measured span"
                          : isnan(r->run.late) ? "generator late or run interrupted"
                          : r->run.late > 0    ? "generator late"
                                               : "interrupted";
        if (k == n) ret_lost[n++] = (struct sweep_lost){.rate = r->rate, .lag_ms = NAN};
        ret_lost[k].n_runs++;
        ret_lost[k].why = why;
        ret_lost[k].lag_ms = fmin(ret_lost[k].lag_ms, r->run.sched_lag_p99_ms);
    }
    qsort(ret_lost, n, sizeof *ret_lost, by_lost_rate);
    return n;
}

size_t sweep_pool(const struct sweep *s, uint32_t config, struct sweep_pool *ret_pools, size_t max)
{
    size_t n = 0;
    for (size_t i = 0; i < s->n_rows && n < max; i++) {
        if (s->rows[i].config != config) continue;
        bool have = false;
        for (size_t k = 0; k < n && !have; k++) have = ret_pools[k].rate == s->rows[i].rate;
        if (have) continue;
        pool_rate(s, config, s->rows[i].rate, &ret_pools[n]);
        n += ret_pools[n].n_runs > 0;
    }
    qsort(ret_pools, n, sizeof *ret_pools, by_rate);
    return n;
}

void sweep_settle(struct sweep *s)
{
    struct sweep_pool pools[MAX_POOLS];
    for (uint32_t c = 0; c < s->n_configs; c++) {
        if (s->configs[c].searched) continue;
        size_t n = sweep_pool(s, c, pools, MAX_POOLS);
        s->configs[c].goodput = n && s->attainment > 0 ? 0 : NAN;
        s->configs[c].failed_rate = n ? pools[0].rate : 0;
        for (size_t i = 0; i < n && s->attainment > 0; i++)
            if (pools[i].lo >= s->attainment)
                s->configs[c].goodput = pools[i].rate,
                s->configs[c].failed_rate = i + 1 < n ? pools[i + 1].rate : 0;
    }
}

/* --- the winner ------------------------------------------------------------------------------- */

/* Of the rates that were run, the least often. */
static uint32_t fewest_runs(const struct sweep *s)
{
    struct sweep_pool pools[MAX_POOLS];
    uint32_t least = UINT32_MAX;
    for (uint32_t c = 0; c < s->n_configs; c++)
        for (size_t n = sweep_pool(s, c, pools, MAX_POOLS), i = 0; i < n; i++)
            if (pools[i].n_runs && pools[i].n_runs < least) least = pools[i].n_runs;
    return least;
}

static double per_worker(const struct sweep_config *c) { return c->goodput / workers(c); }

/* The best but `except`. */
static int best(const struct sweep *s, int except)
{
    int found = -1;
    for (int i = 0; i < (int)s->n_configs; i++)
        if (i != except && s->configs[i].goodput > 0 &&
            (found < 0 || per_worker(&s->configs[i]) > per_worker(&s->configs[found])))
            found = i;
    return found;
}

int sweep_leader(const struct sweep *s) { return best(s, -1); }

/* Why configuration i is not told apart from the leader w. */
enum apart { APART, NOT_MEASURED, NOT_SEEN_TO_MISS, TOO_NEAR };

static enum apart is_apart(const struct sweep *s, int w, uint32_t i)
{
    struct sweep_pool pools[MAX_POOLS];
    const struct sweep_config *c = &s->configs[w], *o = &s->configs[i];
    size_t n = sweep_pool(s, i, pools, MAX_POOLS);
    double load = per_worker(c) * (1 + 1e-9), failed = o->failed_rate / workers(o);
    bool missed = false;
    if (n == 0) return NOT_MEASURED;
    for (size_t k = 0; k < n; k++)
        missed |= pools[k].rate / workers(o) <= load && pools[k].hi < s->attainment;
    if (o->goodput > 0 && (failed <= 0 || failed > load)) return NOT_SEEN_TO_MISS;
    if (!missed) return NOT_SEEN_TO_MISS;
    return o->goodput > 0 && per_worker(c) / per_worker(o) < LEAST_LEAD ? TOO_NEAR : APART;
}

/* The nearest to the leader of those that are not told apart from it; -1: none. */
static int rival(const struct sweep *s, int w)
{
    int found = -1;
    for (int i = 0; i < (int)s->n_configs; i++)
        if (i != w && is_apart(s, w, (uint32_t)i) != APART &&
            (found < 0 || per_worker(&s->configs[i]) > per_worker(&s->configs[found])))
            found = i;
    return found;
}

bool sweep_has_winner(const struct sweep *s)
{
    int w = sweep_leader(s);
    return w >= 0 && s->n_configs > 1 && rival(s, w) < 0;
}

static bool is_measured(const struct sweep_row *r)
{
    return is_open_loop(r) && r->run.valid > 0 && r->count.completed > 0;
}

static double load_of(const struct sweep *s, const struct sweep_row *r)
{
    return r->rate / workers(&s->configs[r->config]);
}

static bool is_same_load(double a, double b) { return a <= b * SAME_LOAD && b <= a * SAME_LOAD; }

/* How many configurations were measured at a load. */
static uint32_t n_at_load(const struct sweep *s, double load)
{
    bool has[SWEEP_MAX_CONFIGS] = {false};
    uint32_t n = 0;
    for (size_t i = 0; i < s->n_rows; i++)
        if (is_measured(&s->rows[i]) && is_same_load(load_of(s, &s->rows[i]), load))
            has[s->rows[i].config] = true;
    for (uint32_t c = 0; c < s->n_configs; c++) n += has[c];
    return n;
}

double sweep_reference_rate(const struct sweep *s)
{
    int w = sweep_leader(s);
    double found = NAN, least_far = INFINITY;
    uint32_t most = 0;
    for (size_t i = 0; i < s->n_rows; i++) {
        if (!is_measured(&s->rows[i])) continue;
        double load = load_of(s, &s->rows[i]),
               far = w >= 0 ? fabs(log(load / per_worker(&s->configs[w]))) : log(load);
        uint32_t n = n_at_load(s, load);
        if (n > most || (n == most && far < least_far)) most = n, least_far = far, found = load;
    }
    return found;
}

const struct sweep_row *sweep_reference_row(const struct sweep *s, uint32_t config)
{
    const struct sweep_row *found = NULL;
    double want = sweep_reference_rate(s), least = INFINITY;
    for (size_t i = 0; i < s->n_rows; i++) {
        const struct sweep_row *r = &s->rows[i];
        if (r->config != config || !is_measured(r) || !is_same_load(load_of(s, r), want)) continue;
        double far = fabs(log(load_of(s, r) / want));
        if (far < least ||
            (far == least && !strcmp(r->phase, "verify") && strcmp(found->phase, "verify") != 0))
            least = far, found = r;
    }
    return found;
}

/* --- text ------------------------------------------------------------------------------------- */

static double lost_share(const struct sweep_row *r)
{
    return r->count.offered > 0 ? (r->count.offered - r->count.completed) / r->count.offered : 0;
}

/* Whether all configurations have as many workers: their rates compare as they are. */
static bool has_one_size(const struct sweep *s)
{
    for (uint32_t i = 1; i < s->n_configs; i++)
        if (workers(&s->configs[i]) != workers(&s->configs[0])) return false;
    return true;
}

/* What most requests that missed had missed, and the evidence in its stages. */
static void why(const struct sweep *s, const struct sweep_row *r, FILE *out)
{
    double lost = lost_share(r), late_ttft = fmax(0, 1 - r->steady.attainment_ttft - lost),
           late_tpot = fmax(0, 1 - r->steady.attainment_tpot - lost), ttft = 0;
    int longest = 0;
    for (int k = 0; k <= BENCH_RPC; k++) {
        ttft += ms(r->stages_ms[k]);
        if (ms(r->stages_ms[k]) > ms(r->stages_ms[longest])) longest = k;
    }
    fprintf(out, "at %.3g requests/s ", r->rate);
    if (!has_one_size(s)) fprintf(out, "(%.3g per worker) ", load_of(s, r));
    fprintf(out, "%.0f %% met both", 100 * r->steady.attainment);
    if (s->slo.ttft_ms > 0) fprintf(out, ", TTFT came too late for %.0f %%", 100 * late_ttft);
    if (s->slo.tpot_ms > 0) fprintf(out, ", TPOT for %.0f %%", 100 * late_tpot);
    if (lost > 0.005) fprintf(out, ", and %.0f %% were turned away or did not finish", 100 * lost);
    fputs(". ", out);
    if (lost >= late_ttft && lost >= late_tpot && lost > 0) {
        if (r->count.rejected > 0.5 * (r->count.offered - r->count.completed))
            fprintf(
                out,
                "Most misses are admission: the router turned away what it expected to be late%s. ",
                r->count.rejected_ttft > 2 * r->count.rejected_tpot   ? ", for TTFT"
                : r->count.rejected_tpot > 2 * r->count.rejected_ttft ? ", for TPOT"
                                                                      : "");
        else
            fprintf(out, "Most misses never finished. ");
    } else if (late_tpot > late_ttft) {
        fprintf(out, "TPOT is what fails: p99 is %.3g ms against %.3g ms at the median",
                r->tpot.p99_ms, r->tpot.p50_ms);
        if (r->itl.p99_ms > 3 * r->itl.p50_ms)
            fprintf(out,
                    ", and single gaps reach %.3g ms at p99 (median %.3g): other work sits in the "
                    "decode steps",
                    r->itl.p99_ms, r->itl.p50_ms);
        fprintf(out, ". ");
    } else if (late_ttft > 0) {
        fprintf(out, "TTFT is what fails: p90 is %.4g ms. ", r->ttft.p90_ms);
    }
    if (ttft > 0)
        fprintf(out, "Of a mean TTFT of %.4g ms, %.0f %% is %s.", ttft,
                100 * ms(r->stages_ms[longest]) / ttft, bench_stage_names[longest]);
}

/* The row to explain a configuration's limit by: the lowest rate above its goodput that missed
 * the attainment. */
static const struct sweep_row *failing_row(const struct sweep *s, uint32_t config)
{
    const struct sweep_row *found = NULL;
    for (size_t i = 0; i < s->n_rows; i++) {
        const struct sweep_row *r = &s->rows[i];
        if (r->config != config || !is_open_loop(r) || !(r->run.valid > 0) ||
            !(r->steady.attainment < s->attainment) || r->rate < s->configs[config].goodput)
            continue;
        if (!found || r->rate < found->rate ||
            (r->rate == found->rate && r->steady.attainment < found->steady.attainment))
            found = r;
    }
    return found;
}

/* The highest rate at which the attainment was reached by so few requests that they do not prove
 * it. A search passes over such rates on its way: of it only when no rate failed. */
static bool unproven(const struct sweep *s, uint32_t config, struct sweep_pool *ret)
{
    struct sweep_pool pools[MAX_POOLS];
    size_t n = sweep_pool(s, config, pools, MAX_POOLS);
    bool found = false;
    for (size_t i = 0; i < n; i++)
        if ((!s->configs[config].searched || !failing_row(s, config)) &&
            pools[i].joint >= s->attainment && pools[i].lo < s->attainment &&
            pools[i].rate > s->configs[config].goodput)
            *ret = pools[i], found = true;
    return found;
}

static void objectives(const struct sweep *s, FILE *out)
{
    const struct {
        const char *name;
        double v;
    } all[] = {{"TTFT", s->slo.ttft_ms},
               {"TPOT", s->slo.tpot_ms},
               {"E2EL", s->slo.e2el_ms},
               {"TBT", s->slo.tbt_ms}};
    const char *comma = "";
    for (size_t i = 0; i < 4; i++)
        if (all[i].v > 0) fprintf(out, "%s%s %.4g ms", comma, all[i].name, all[i].v), comma = ", ";
}

static void no_winner(const struct sweep *s, FILE *out)
{
    struct sweep_pool p;
    bool few = false;
    for (uint32_t i = 0; i < s->n_configs && !few; i++) few = unproven(s, i, &p);
    fprintf(out, few ? "No configuration is proven to meet " : "No configuration met ");
    objectives(s, out);
    fprintf(out, " for %.3g %% of its requests at any rate that was run.%s\n", 100 * s->attainment,
            few ? " Some did in what was measured, of too few requests: run more "
                  "(--num-prompts, --seeds)."
                : "");
}

static void winner(const struct sweep *s, const struct sweep_config *c, FILE *out)
{
    fprintf(out,
            "%s sustains %.3g requests/s (%.3g per worker) with at least %.3g %% of the "
            "requests within ",
            c->name, c->goodput, per_worker(c), 100 * s->attainment);
    objectives(s, out);
    if (!c->searched)
        fprintf(out, "; of the rates that were run, which are a grid");
    else if (!c->verified)
        fprintf(out, "; not verified with other seeds");
    fprintf(out, ".\n");
    uint32_t seeds = fewest_runs(s);
    if (seeds < 3)
        fprintf(out,
                "Some rates were run %s: intervals hold what differs between requests, not "
                "between runs; --seeds 3 does.\n",
                seeds == 1 ? "once" : "twice");
}

/* The leader w beside o, from which it is not told apart. */
static void no_clear_winner(const struct sweep *s, int w, int o, FILE *out)
{
    const struct sweep_config *c = &s->configs[w], *p = &s->configs[o];
    if (is_apart(s, w, (uint32_t)o) == NOT_MEASURED) {
        fprintf(out, "No clear winner: %s was not measured.\n", p->name);
        return;
    }
    fprintf(out, "No clear winner: %s has %.3g per worker and %s %.3g, ", p->name, per_worker(p),
            c->name, per_worker(c));
    if (is_apart(s, w, (uint32_t)o) == TOO_NEAR)
        fprintf(out, "which is too near: repeats of one run differ by more. ");
    else
        fprintf(out,
                "and nothing that was run tells the two apart: at no load up to %.3g per worker "
                "does the whole interval of %s lie below %.3g %%. ",
                per_worker(c), p->name, 100 * s->attainment);
    fprintf(out, "Use more --seeds, or a finer --tolerance.\n");
}

/* The winner c beside the second o. */
static void margin(const struct sweep_config *c, const struct sweep_config *o, FILE *out)
{
    double ratio = per_worker(c) / per_worker(o);
    fprintf(out, "%s won: %.2f times the goodput per worker of the next, %s (%.3g requests/s).%s\n",
            c->name, ratio, o->name, o->goodput,
            ratio < 1.2 ? " Repeats of whole benchmarks are known to differ by 15 to "
                          "20 %; repeat it before relying on it."
                        : "");
}

/* Where configuration i has its limit, and what limits it. */
static void limit_of(const struct sweep *s, uint32_t i, bool is_winner, FILE *out)
{
    const struct sweep_config *c = &s->configs[i];
    const struct sweep_row *r = failing_row(s, i);
    struct sweep_pool few;
    bool maybe = unproven(s, i, &few);
    if (maybe)
        fprintf(out,
                "%s may do more than is proven: at %.3g requests/s %.3g %% met both, of too "
                "few requests: the 95 %% interval begins at %.3g %%.\n",
                c->name, few.rate, 100 * few.joint, 100 * few.lo);
    if (r) {
        fprintf(out, "%s%s ", c->name,
                is_winner        ? " itself has its limit here:"
                : c->goodput > 0 ? " stops earlier:"
                : maybe          ? " missed here:"
                                 : " meets no rate that was run:");
        why(s, r, out);
        fputc('\n', out);
    } else if (c->goodput > 0 && !maybe) {
        fprintf(out, "%s met the objectives at every rate that was run, up to %.3g requests/s.\n",
                c->name, c->goodput);
    }
    if (c->note[0]) fprintf(out, "%s: %s\n", c->name, c->note);
}

/* What was run and thrown out, so that nobody takes it for measured or for never tried. */
static void lost_of(const struct sweep *s, uint32_t i, FILE *out)
{
    struct sweep_lost lost[MAX_LOST];
    size_t n = sweep_lost(s, i, lost, MAX_LOST);
    for (size_t k = 0; k < n; k++) {
        fprintf(out, k ? "; " : "%s at ", s->configs[i].name);
        fprintf(out, "%.4g/s: not measured, %s", lost[k].rate, lost[k].why);
        if (lost[k].lag_ms > 0 && !strncmp(lost[k].why, "generator", 9))
            fprintf(out, " (p99 %.3g ms)", lost[k].lag_ms);
    }
    if (n) fputs(".\n", out);
}

void sweep_verdict(const struct sweep *s, FILE *out)
{
    if (!bench_slo_any(&s->slo)) {
        fprintf(out, "No objectives were given (--goodput ttft:... tpot:...), so there is no "
                     "goodput to compare.\n");
        return;
    }
    int w = sweep_leader(s), second = w >= 0 ? best(s, w) : -1, near = w >= 0 ? rival(s, w) : -1;
    /* The report sets the first line in bold: it is the one that says whether there is a winner. */
    if (w < 0) no_winner(s, out);
    if (near >= 0) no_clear_winner(s, w, near, out);
    if (w >= 0) winner(s, &s->configs[w], out);
    if (near < 0 && second >= 0) margin(&s->configs[w], &s->configs[second], out);
    if (near < 0 && w >= 0 && second < 0 && s->n_configs > 1)
        fprintf(out, "No other configuration met them at any rate that was run.\n");
    for (uint32_t i = 0; i < s->n_configs; i++) limit_of(s, i, (int)i == w, out);
    for (uint32_t i = 0; i < s->n_configs; i++) lost_of(s, i, out);
    size_t n_invalid = 0;
    for (size_t i = 0; i < s->n_rows; i++) n_invalid += !(s->rows[i].run.valid > 0);
    if (n_invalid)
        fprintf(out,
                "%zu of %zu runs are not valid (interrupted, or the load generator itself was "
                "late) and count for nothing.\n",
                n_invalid, s->n_rows);
}

/* A configuration a column, four side by side: 80 columns. */
static void print_stages(const struct sweep *s, FILE *out)
{
    enum { SIDE_BY_SIDE = 4 };
    fprintf(out, "\nstages at %.3g requests/s per worker, mean ms\n", sweep_reference_rate(s));
    for (uint32_t first = 0; first < s->n_configs; first += SIDE_BY_SIDE) {
        uint32_t end = first + SIDE_BY_SIDE < s->n_configs ? first + SIDE_BY_SIDE : s->n_configs;
        for (int k = -2; k < BENCH_N_STAGES; k++) {
            fprintf(out, "%-18s", k == -2 ? "" : k == -1 ? "requests/s" : bench_stage_names[k]);
            for (uint32_t i = first; i < end; i++) {
                const struct sweep_row *r = sweep_reference_row(s, i);
                if (k == -2)
                    fprintf(out, " %14.14s", s->configs[i].name);
                else if (!r)
                    fprintf(out, " %14s", k == -1 ? "not measured" : "-");
                else if (k == -1)
                    fprintf(out, " %14.4g", r->rate);
                else
                    fprintf(out, " %14.3f", ms(r->stages_ms[k]));
            }
            fputc('\n', out);
        }
    }
}

void sweep_print(const struct sweep *s, FILE *out)
{
    fprintf(out, "\n%-20s %10s %12s %10s  %s\n", "configuration", "goodput/s", "per worker",
            "fails at", "");
    for (uint32_t i = 0; i < s->n_configs; i++) {
        const struct sweep_config *c = &s->configs[i];
        char failed[24] = "-";
        if (c->failed_rate > 0) snprintf(failed, sizeof failed, "%.4g", c->failed_rate);
        if (isnan(c->goodput))
            fprintf(out, "%-20s %10s %12s %10s\n", c->name, "-", "-", failed);
        else
            fprintf(out, "%-20s %10.4g %12.4g %10s  %s\n", c->name, c->goodput, per_worker(c),
                    failed,
                    c->verified   ? "verified"
                    : c->searched ? "not verified"
                                  : "of the grid");
    }
    print_stages(s, out);
    fputc('\n', out);
    sweep_verdict(s, out);
}
