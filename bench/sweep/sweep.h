/* sweep.h - what a sweep found: configurations, a row for every run, and what is said of them.
 * Files: sweep.csv (a row a run), sweep.json (that and what the plots need of single requests).
 *
 * A configuration is one shape of cluster under test ("pd 1:1"); a row one run of one rate and
 * seed against it. Latencies are of the requests that arrived in the measured span, from their
 * scheduled time. NAN = not known. Zeroed = empty. One thread. */
#ifndef BENCH_SWEEP_SWEEP_H
#define BENCH_SWEEP_SWEEP_H

#include <stdio.h>

#include "bench/serve/result.h"

#define SWEEP_MAX_CONFIGS 64
#define SWEEP_MAX_SCALES 32
#define SWEEP_N_QUANTILES 101
#define SWEEP_MAX_POINTS 250

struct sweep_config {
    char name[48], mode[24];
    uint32_t prefill, decode, gpus;
    double goodput;          /* highest rate that meets the attainment, requests/s; 0 = none
                                did; NAN = not looked for */
    double failed_rate;      /* the lowest rate above it that did not; 0 = none */
    bool searched, verified; /* by bisection, not only a point of the grid; repeated with
                                other seeds */
    char note[160];          /* why it ended early; "" = it did not */
};

struct sweep_point {
    float predicted_ms, observed_ms;
};

/* Numbers of a row are doubles, also those that count: NAN is what a file does not say. */
struct sweep_counts {
    double offered, completed, rejected, timed_out, failed, unfinished, deflected;
    double rejected_ttft, rejected_tpot; /* of rejected: the router named this objective */
};

/* Of the measured span. */
struct sweep_steady {
    double span_s, offered_rate, goodput, per_gpu_goodput;
    double attainment, ci95_lo, ci95_hi, n_good, n, attainment_ttft, attainment_tpot,
        attainment_e2el;
    double saturated; /* 0 or 1 */
};

struct sweep_latency {
    double p50_ms, p90_ms, p99_ms;
};

/* How the run itself went. */
struct sweep_run {
    double valid; /* 0 or 1 */
    double late;  /* 1: not valid because the load generator was late; 0: it was not. Older files do
                     not say */
    double duration_s, sched_lag_p99_ms, load1;
};

/* The router's TTFT as predicted, beside what it was. */
struct sweep_predicted {
    double mape, coverage;
};

struct sweep_row {
    uint32_t config; /* index */
    char phase[12];  /* grid sync throughput bracket bisect verify */
    double rate, seed;
    struct sweep_counts count;
    struct sweep_steady steady;
    struct sweep_latency ttft, tpot, itl;
    struct sweep_run run;
    struct sweep_predicted predicted;
    double stages_ms[BENCH_N_STAGES]; /* means */
    /* not in the CSV */
    double *ttft_q, *tpot_q; /* [SWEEP_N_QUANTILES] of all offered in the span, a request
                                without one counts as never (NAN); owned, NULL = none */
    double *scale_joint;     /* [n_scales] attainment with the objectives times each scale;
                                owned */
    struct sweep_point *points; /* the router's TTFT as predicted and as it was; owned */
    uint32_t n_points;
};

struct sweep {
    char title[128], date[32], model[128], load[160], arrival[64], machine[256], build[96],
        policy[32];
    char *command; /* owned; may be NULL */
    bool grid;     /* rates were given, not searched */
    struct bench_slo slo;
    bool slo_sent;
    double attainment, tolerance, load1_start, load1_end;
    double scales[SWEEP_MAX_SCALES];
    uint32_t n_scales, n_configs;
    struct sweep_config configs[SWEEP_MAX_CONFIGS];
    struct sweep_row *rows; /* owned */
    size_t n_rows;
};

void sweep_free(struct sweep *s);
/* Appends an empty row (every number NAN). NULL = no memory. It moves when another is added. */
struct sweep_row *sweep_row_add(struct sweep *s);
/* A run's numbers and its requests' distributions. */
td_status sweep_row_fill(const struct sweep *s, struct sweep_row *row, const struct bench_result *r,
                         struct td_err *err);
td_status sweep_csv_write(const struct sweep *s, const char *path, struct td_err *err);
td_status sweep_json_write(const struct sweep *s, const char *path, struct td_err *err);
/* Either file, told by its first byte. TD_ERR_INVALID names file and field or line. */
td_status sweep_read(const char *path, struct sweep *ret, struct td_err *err);

/* --- what is said of it (verdict.c). Pure. ---------------------------------------------------- */

/* Fills goodput and failed_rate of configurations that were not searched: the highest rate of
 * the grid whose runs together have their lower bound at the attainment, and the next one. */
void sweep_settle(struct sweep *s);
/* The configuration with the highest goodput per worker; -1: none is known. */
int sweep_leader(const struct sweep *s);
/* Whether the leader may be called the winner: each other configuration was seen to miss the
 * attainment, by its whole interval, at no more load per worker than the leader sustains, and has
 * at least 5 % less goodput. False of a single configuration. */
bool sweep_has_winner(const struct sweep *s);
/* The load at which configurations are held beside each other, in requests/s per worker: of the
 * loads that were measured, the one that most configurations have; of several the one nearest to
 * the leader's goodput, else the least. NAN: nothing was measured. */
double sweep_reference_rate(const struct sweep *s);
/* The row of a configuration at that load, which may differ by a tenth; verified ones first. NULL:
 * it was not measured at that load, and has no place in the comparison. */
const struct sweep_row *sweep_reference_row(const struct sweep *s, uint32_t config);
/* All runs of one configuration, rate and kind of phase put together. */
struct sweep_pool {
    /* least, greatest: of the runs' joint attainment */
    double rate, offered_rate, goodput, joint, ttft, tpot, lo, hi, least, greatest;
    double n; /* requests */
    uint32_t n_runs;
    bool saturated;
};
/* Ascending by rate; returns how many, at most max. Runs that are not valid are left out. */
size_t sweep_pool(const struct sweep *s, uint32_t config, struct sweep_pool *ret_pools, size_t max);
/* A rate of one configuration that was run, and of which no run counts. */
struct sweep_lost {
    double rate, lag_ms; /* lag_ms: the generator's p99, the least of the runs; NAN = not known */
    uint32_t n_runs;
    const char *why; /* "generator late", "interrupted", or either where the file does not say */
};
/* Ascending by rate; returns how many, at most max. */
size_t sweep_lost(const struct sweep *s, uint32_t config, struct sweep_lost *ret_lost, size_t max);
/* One paragraph a line: who won, by how much, and which objective the others missed at which
 * rate, and where their time went. */
void sweep_verdict(const struct sweep *s, FILE *out);
void sweep_print(const struct sweep *s, FILE *out); /* console: goodput table, stage table,
                                                       verdict */

#endif
