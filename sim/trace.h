/* trace.h - the requests of a run: arrival times, lengths and prefix blocks, read from public trace
 * files or drawn from a seed.
 *
 * Files: Azure 2023 (TIMESTAMP,ContextTokens,GeneratedTokens), Mooncake JSONL (timestamp in ms,
 * input_length, output_length, hash_ids of 512-token blocks), and CSV with
 * num_prefill_tokens,num_decode_tokens (lengths; with arrived_s, in seconds, arrivals too: `tandem
 * bench sweep --save-requests` writes it). Arrivals of a file may be kept, scaled in time, or
 * replaced by a process. Mooncake's time stamps come in groups about 3 s apart; `spread`
 * distributes each group evenly until the next. */
#ifndef TD_SIM_TRACE_H
#define TD_SIM_TRACE_H

#include <stdbool.h>
#include <stdint.h>

#include "common/base/status.h"

struct td_sim_request {
    uint64_t at_ns;
    int32_t n_prompt, n_output;
    /* index into the trace's hashes: chain ids of the prompt's leading blocks of hash_tokens
     * tokens */
    uint32_t hash_at, n_hashes;
    uint32_t slo_class, tenant; /* tenant: 1..; 0 = none */
};

#define TD_SIM_MAX_CLASSES 16
#define TD_SIM_MAX_TENANTS 64

struct td_sim_trace {
    struct td_sim_request *requests;
    uint32_t n, n_hashes, hash_tokens;
    uint64_t *hashes;
};

/* ONOFF and SINE are Poisson processes whose rate changes with a period: ONOFF has all arrivals in
 * the first on_share of it, SINE has rate * (1 + swing * sin). `rate` is the mean of both. */
enum td_sim_arrival {
    TD_ARRIVAL_POISSON,
    TD_ARRIVAL_GAMMA,
    TD_ARRIVAL_CONSTANT,
    TD_ARRIVAL_TRACE,
    TD_ARRIVAL_ONOFF,
    TD_ARRIVAL_SINE,
};

/* Which rows of a file a run takes when the arrivals are not the file's. In the file's order the
 * turns of a conversation follow one another, so that their prefixes are still cached: AUTO chooses
 * that for a file with block hashes. Seed 1 begins at the first row, each further seed a sixteenth
 * of the file later, and all continue from the start at the end. */
enum td_sim_rows { TD_ROWS_AUTO, TD_ROWS_ORDER, TD_ROWS_DRAWN };

/* Lengths: "512" = always; "lognormal:MEAN,CV"; "uniform:LOW,HIGH". */
struct td_sim_length {
    enum { TD_LENGTH_FIXED, TD_LENGTH_LOGNORMAL, TD_LENGTH_UNIFORM } kind;
    double a, b;
};
td_status td_sim_length_parse(const char *text, const char *what, struct td_sim_length *ret_length,
                              struct td_err *err);

struct td_sim_load {
    enum td_sim_arrival arrival;
    double rate;                      /* requests/s */
    double cv;                        /* gamma */
    double period_s, on_share, swing; /* onoff, sine */
    enum td_sim_rows rows;
    double ramp_to;      /* > 0: the rate changes linearly from `rate` to this over the run */
    double duration_s;   /* arrivals stop here; 0 = n_requests decides */
    uint32_t n_requests; /* 0 = duration decides */
    struct td_sim_length isl, osl;
    double time_scale; /* factor on a file's arrival times: 0.5 = twice as fast; 0 = 1 */
    int32_t max_prompt, max_output; /* longer requests of a file are left out; 0 = none */
    uint64_t seed;
    /* The shares of classes and tenants, of drawn requests and of a file's alike. 0 classes = all
     * are of class 0, 0 tenants = none. */
    double class_share[TD_SIM_MAX_CLASSES];
    struct {
        double share;
        int32_t slo_class; /* -1 = by class_share */
    } tenants[TD_SIM_MAX_TENANTS];
    uint32_t n_classes, n_tenants;
    /* Classes by length, in rising order of max_prompt; with n_length_classes > 0 they replace
     * class_share. */
    struct {
        int32_t max_prompt;
        uint32_t slo_class;
    } length_classes[TD_SIM_MAX_CLASSES];
    uint32_t n_length_classes;
};

/* Reads lengths (and arrivals, hashes) from a file; its contents tell the format. */
td_status td_sim_trace_read(const char *path, bool spread, struct td_sim_trace *ret_trace,
                            struct td_err *err);
/* Makes the requests of one run. With `file` NULL lengths are drawn from isl and osl; otherwise
 * they are those of its rows, for arrival TRACE in the file's order, else as load->rows says. */
td_status td_sim_trace_make(const struct td_sim_load *load, const struct td_sim_trace *file,
                            struct td_sim_trace *ret_trace, struct td_err *err);
void td_sim_trace_free(struct td_sim_trace *trace);

/* Counts the leading blocks of all requests that one global cache of `capacity` blocks (0 =
 * unlimited) has already seen, requests in order. Each block is looked up, then inserted or moved
 * to the fresh end; then the oldest is dropped when the cache is over capacity. A block is a hit
 * when all before it in the request were. */
uint64_t td_sim_prefix_hits(const struct td_sim_trace *trace, uint64_t capacity,
                            uint64_t *ret_hit_tokens);

#endif
