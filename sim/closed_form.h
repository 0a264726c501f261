/* closed_form.h - formulas for a fleet, without simulating it: the planner ranks layouts with them,
 * and tests compare the simulator with them. Sources: Pollaczek-Khinchine for M/D/1 (as DistServe
 * uses it, section 3.1); rate matching as in AIConfigurator; decode capacity as in Dynamo's
 * planner. */
#ifndef TD_SIM_CLOSED_FORM_H
#define TD_SIM_CLOSED_FORM_H

#include "sim/perf.h"

/* Mean wait of an M/D/1 queue: rate * D^2 / (2 (1 - rate * D)); INFINITY when rate * D >= 1. */
double td_md1_wait_s(double rate, double service_s);
/* Largest Poisson rate at which the mean wait plus one service stays within `target_s`; 0 when
 * the service alone does not. */
double td_md1_rate(double service_s, double target_s);
/* p-quantile of the M/D/1 response time, by its known exponential tail: service + wait quantile
 * (0 when the wait is shorter). */
double td_md1_quantile_s(double rate, double service_s, double p);

/* min(prefill rate * P * 0.90, decode rate * D * 0.92): sequences/s of P prefill and D decode
 * workers whose static rates are given. */
double td_rate_match(double prefill_seq_s, uint32_t n_prefill, double decode_seq_s,
                     uint32_t n_decode);

/* Largest batch whose step stays within tpot_s and whose KV fits, with the mean context isl +
 * osl/2; 0 when not even one. */
int64_t td_decode_batch(const struct td_perf *perf, double isl, double osl, double tpot_s,
                        int64_t max_batch);
/* Requests/s of one decode worker at that batch. */
double td_decode_rate(const struct td_perf *perf, double isl, double osl, double tpot_s,
                      int64_t max_batch);

#endif
