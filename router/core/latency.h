/* latency.h - what a prefill, a transfer and a decode step will cost, learned online from what they
 * did cost.
 *
 * The models, with times in seconds, tokens as counts, and every coefficient >= 0:
 *   prefill of a chunk of u tokens after h that are there   a0 + a1*u + a2*u*(h + u/2)
 *   transfer of n bytes behind `backlog` others             latency + (backlog + n) / bandwidth
 *   decode step of B sequences with K tokens of context     b0 + b1*B + b2*K
 *     with c prefill rows mixed in                          ... + b3*c + b4*attention_work
 * Steps with decode rows fit b0..b4, the others a0..a2. Until a node class has shown a mixed step,
 * prefill rows beside decode rows cost what they cost alone. A mixed step is never predicted below
 * its prefill rows alone. Where a class has run no prefill alone, its mixed steps fit a0..a2, too.
 *
 * The coefficients (theta) belong to a node class, and recursive least squares with forgetting
 * (0.999) refines them. Each node has a correction beside them: the median of observed / model over
 * the last 64 steps in each of 16 buckets of step size, used from 5 samples on, clamped to [0.5,
 * 2].
 *
 * Margins: `q` of a (class, bucket) tracks a quantile of observed / predicted since admission:
 * q += eta * (tau - [ratio <= q]), scaled by q, clamped to [0.5, 3]. A request is feasible when
 * prediction * q meets its objective. The margin is learned and not set, since the right one
 * depends on what the predictions leave out.
 *
 * Output lengths: EWMA of the mean and of the 0.9 quantile for each SLO class, and for all of them
 * together while a class has fewer than 20 requests.
 *
 * Pure: no clock, no allocation after create, no I/O; the same calls give the same bits. One
 * thread. Sources: DistServe (Zhong et al. 2024) for the step model, Koenker and Bassett 1978 for
 * the quantile, Ljung and Soderstrom 1983 for recursive least squares. */
#ifndef TD_ROUTER_LATENCY_H
#define TD_ROUTER_LATENCY_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "common/base/status.h"

#define TD_LAT_MAX_CLASSES 16 /* node classes */
#define TD_LAT_MAX_NODES 1024
#define TD_LAT_MAX_SLO_CLASSES 16
#define TD_LAT_BUCKETS 8      /* of margins */
#define TD_LAT_LIMIT_BUCKET 5 /* predictions just within the objective */
/* Added to a bucket: of prompts prefilled on their decode worker. */
#define TD_LAT_LOCAL TD_LAT_BUCKETS
#define TD_LAT_ALL_BUCKETS (2 * TD_LAT_BUCKETS)
#define TD_LAT_N_PREFILL 3 /* a0..a2 */
#define TD_LAT_N_DECODE 5  /* b0..b4 */

struct td_latency;

/* Coefficients of one node class, in seconds and bytes per second: a prior (shipped table,
 * `tandem bench calibrate`) or what was learned. */
struct td_lat_theta {
    double prefill[TD_LAT_N_PREFILL];
    double decode[TD_LAT_N_DECODE];
    double link_tau, link_bytes_per_s;
    bool known; /* false: nothing known, predictions are 0 until steps
                   were seen */
};

struct td_lat_config {
    double attainment; /* tau of the margins: 0.9 */
    double eta;        /* 0.02 */
    double forgetting; /* 0.999 */
};

/* One step of a worker (proto StepReport). */
struct td_lat_step {
    uint32_t prefill_tokens, decode_seqs, wall_us;
    uint64_t attention_work, context_tokens;
};

td_status td_latency_create(const struct td_lat_config *config, struct td_latency **ret_latency,
                            struct td_err *err);
void td_latency_destroy(struct td_latency *latency);

/* Sets a class's prior; samples refine it. */
void td_latency_set_theta(struct td_latency *latency, uint32_t node_class,
                          const struct td_lat_theta *theta);
void td_latency_theta(const struct td_latency *latency, uint32_t node_class,
                      struct td_lat_theta *ret_theta);
/* A node came (or came back as another): its correction starts empty. */
void td_latency_node_join(struct td_latency *latency, uint32_t node, uint32_t node_class);

/* Learning. step: any mix of prefill and decode rows. transfer: bytes that left when nothing
 * else was in the link's way. What cannot be a measurement (no time, no rows, more than 2^25
 * tokens of context a row, NaN) is ignored. Indices out of range are the caller's bug
 * (TD_ASSERT). */
void td_latency_observe_step(struct td_latency *latency, uint32_t node,
                             const struct td_lat_step *step);
void td_latency_observe_transfer(struct td_latency *latency, uint32_t node_class, uint64_t bytes,
                                 uint64_t wall_us);
void td_latency_observe_output(struct td_latency *latency, uint32_t slo_class, uint32_t n_output);

/* Predictions, in seconds, the node's correction included. Monotone: more tokens, longer
 * context, more sequences or bytes never predict less. */
/* whole prompt, in chunks */
double td_latency_prefill(const struct td_latency *latency, uint32_t node, uint64_t u, uint64_t h,
                          uint32_t chunk_tokens);
double td_latency_step(const struct td_latency *latency, uint32_t node, double decode_seqs,
                       double context_tokens, double prefill_tokens, double attention_work);
double td_latency_transfer(const struct td_latency *latency, uint32_t node_class,
                           double backlog_bytes, double bytes);
/* median over buckets; 1 when unknown: a slow node shows here */
double td_latency_correction(const struct td_latency *latency, uint32_t node);
/* Expected output tokens of a request of the class, at least 1, at most max_tokens. quantile 0.5
 * = the mean, 0.9 = the 0.9 quantile, between them a straight line. Before the first request:
 * 256 and 512. */
double td_latency_output(const struct td_latency *latency, uint32_t slo_class, double quantile,
                         uint64_t max_tokens);

/* Margins. bucket: 0..TD_LAT_BUCKETS-1 (higher counts as the last). A class with fewer than 20
 * ratios in a bucket has the margin of all classes there, which starts at 1.2 for TTFT and at 1
 * for TPOT. TPOT's buckets go by how near its objective the prediction is (td_latency_bucket): a
 * batch at the limit is held there, while a batch that was small when a request came has grown
 * before it ends. One margin for both would be too wide just where it decides. TTFT's go by how
 * many wait before it. */
enum td_lat_objective { TD_LAT_TTFT, TD_LAT_TPOT };
uint32_t td_latency_bucket(double predicted_s, double objective_s);
double td_latency_margin(const struct td_latency *latency, enum td_lat_objective what,
                         uint32_t slo_class, uint32_t bucket);
void td_latency_observe_ratio(struct td_latency *latency, enum td_lat_objective what,
                              uint32_t slo_class, uint32_t bucket, double predicted_s,
                              double observed_s);

/* For metrics: share of ratios <= q, mean absolute percentage error, samples, over the last 512
 * of each objective. */
struct td_lat_quality {
    double coverage, mape;
    uint64_t n;
};
void td_latency_quality(const struct td_latency *latency, enum td_lat_objective what,
                        struct td_lat_quality *ret_quality);

#endif
