/* report.h - the results of a run: attainment with its interval, goodput, latency percentiles; as a
 * table, JSON and CSV.
 *
 * Definitions (printed into the JSON too). TTFT: arrival at the router to the first token sent.
 * TPOT: (end - first token) / (output tokens - 1), 0 for one token. Good: ended OK with both within
 * the objectives. Attainment: good / all that arrived in the measured span; refused, failed and
 * unfinished ones are misses. Goodput: good / length of the span. A request belongs to the span by
 * its arrival: from the end of warm-up to the beginning of cool-down. */
#ifndef TD_SIM_REPORT_H
#define TD_SIM_REPORT_H

#include <stdio.h>

#include "sim/cluster.h"

struct td_sim_percentiles {
    double mean, p50, p90, p99;
};

struct td_sim_summary {
    /* "all", or the part of the requests that this describes: "class gold", "tenant acme", "10..20
     * s" */
    char part[48];
    char policy[32], mode[16], fleet[96];
    double rate, cv; /* as asked for */
    uint64_t seed;
    uint32_t gpus, n, n_good, n_ttft_ok, n_tpot_ok, n_ok, n_rejected, n_failed, n_unfinished;
    double span_s, offered, goodput, attainment, ci_low, ci_high;
    struct td_sim_percentiles ttft_ms, tpot_ms, e2e_ms; /* of requests that ended OK */
    double prefill_busy, decode_busy, hit_share, wall_s;
    uint64_t preemptions, failovers, deflected, steps, core_steps, n_events;
    double transfer_gb;
};

void td_sim_summarise(const struct td_sim_config *config, const struct td_sim_result *result,
                      struct td_sim_summary *ret_summary);
/* The same for the requests of one class (else -1) and one tenant (1..; else -1). Values of the
 * fleet (busy, steps, bytes) stay those of the whole run. */
void td_sim_summarise_part(const struct td_sim_config *config, const struct td_sim_result *result,
                           int32_t slo_class, int32_t tenant, struct td_sim_summary *ret_summary);
/* The same for the requests that arrived from from_s on and before to_s, in seconds after the first
 * arrival; warm-up and cool-down are included. */
void td_sim_summarise_interval(const struct td_sim_config *config,
                               const struct td_sim_result *result, double from_s, double to_s,
                               struct td_sim_summary *ret_summary);
/* Combines runs that differ in their seeds: counts are added, rates are means, and the interval is
 * the wider of Wilson's and that of the seeds' means. */
void td_sim_pool(const struct td_sim_summary *runs, uint32_t n, struct td_sim_summary *ret_summary);

void td_sim_table_head(FILE *out);
/* the row of a part is indented, under that of the whole */
void td_sim_table_row(const struct td_sim_summary *s, FILE *out);
void td_sim_csv_head(FILE *out);
void td_sim_csv_row(const struct td_sim_summary *s, FILE *out);
void td_sim_json_row(const struct td_sim_summary *s, FILE *out); /* one object, no newline */

#endif
