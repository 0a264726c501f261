/* sim_main.c - tandem sim: policies against a fleet and a load, and the replay of decision logs. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "sim/gpu.h"
#include "sim/heap.h"
#include "sim/mix.h"
#include "sim/sim.h"
#include "sim/sim_options.h"
#include "common/base/clock.h"
#include "common/base/options.h"
#include "common/base/progress.h"

#define MAX_LIST 64
#define MAX_INTERVALS 1000 /* rows of one run */

/* ---- small languages ------------------------------------------------------------------------- */

td_status td_sim_list_parse(const char *text, const char *what, double *ret, uint32_t max,
                            uint32_t *ret_n, struct td_err *err)
{
    double from, to, by;
    int used = 0;
    uint32_t n = 0;
    if (sscanf(text, "%lf:%lf:%lf%n", &from, &to, &by, &used) == 3 && !text[used] && by > 0 &&
        to >= from) {
        for (; from <= to * (1 + 1e-9) && n < max; from += by) ret[n++] = from;
    } else {
        for (const char *at = text; n < max; at++) {
            char *end;
            ret[n++] = strtod(at, &end);
            if (end == at || (*end && *end != ','))
                return td_fail(err, TD_ERR_INVALID,
                               "%s is \"%s\", must be numbers \"1,2,4\" or \"FROM:TO:STEP\"", what,
                               text);
            at = end;
            if (!*at) break;
        }
    }
    *ret_n = n;
    return TD_OK;
}

/* The next item of a list, trimmed, into buf; NULL at the end. */
static const char *item(const char **at, char *buf, size_t bytes)
{
    *at += strspn(*at, ", \t");
    if (!**at) return NULL;
    size_t n = strcspn(*at, ",");
    size_t keep = n;
    while (keep && strchr(" \t", (*at)[keep - 1])) keep--;
    snprintf(buf, bytes, "%.*s", (int)keep, *at);
    *at += n;
    return buf;
}

static td_status fleet_key(struct td_sim_group *g, const char *part, const char *whole,
                           struct td_err *err)
{
    char key[32];
    double v;
    int used = 0;
    if (sscanf(part, "%31[a-z_]=%lf%n", key, &v, &used) != 2 || part[used] || !(v > 0) || v > 1e12)
        return td_fail(err, TD_ERR_INVALID,
                       "fleet: \"%s\" in \"%s\" is no key=number with a number > 0 and <= 1e12",
                       part, whole);
    if (!strcmp(key, "slow"))
        g->slow = v;
    else if (!strcmp(key, "kv_tokens"))
        g->kv_tokens = (uint64_t)v;
    else if (!strcmp(key, "nic_gbs"))
        g->nic_bytes_per_s = v * 1e9;
    else if (!strcmp(key, "max_batch"))
        g->max_batch = (int32_t)fmin(v, 1 << 20);
    else if (!strcmp(key, "max_step_tokens"))
        g->max_step_tokens = (int32_t)fmin(v, 1 << 20);
    else if (!strcmp(key, "max_seqs"))
        g->max_seqs = (int32_t)fmin(v, 1 << 20);
    else
        return td_fail(err, TD_ERR_INVALID,
                       "fleet: \"%s\" is no key: slow, kv_tokens, nic_gbs, max_batch, "
                       "max_step_tokens, max_seqs",
                       key);
    return TD_OK;
}

td_status td_sim_fleet_parse(const char *text, const struct td_sim_group *defaults,
                             struct td_sim_config *c, struct td_err *err)
{
    char buf[256];
    c->n_groups = 0;
    for (const char *at = text; item(&at, buf, sizeof buf);) {
        if (c->n_groups == TD_SIM_MAX_GROUPS)
            return td_fail(err, TD_ERR_LIMIT, "fleet has more than %d groups", TD_SIM_MAX_GROUPS);
        struct td_sim_group g = *defaults;
        char role[16], spec[200];
        unsigned count;
        int used = 0;
        if (sscanf(buf, "%15[a-z]:%u:%199[^ ]%n", role, &count, spec, &used) != 3 || buf[used] ||
            count < 1 || count > TD_CORE_MAX_WORKERS ||
            (strcmp(role, "prefill") && strcmp(role, "decode")))
            return td_fail(
                err, TD_ERR_INVALID,
                "fleet: \"%s\" must be prefill:COUNT:LATENCY[:key=number...] or decode:...", buf);
        g.decode = role[0] == 'd';
        g.count = count;
        for (char *last; (last = strrchr(spec, ':')) && strchr(last, '='); *last = 0) {
            td_status s = fleet_key(&g, last + 1, buf, err);
            if (s) return s;
        }
        td_status s = td_perf_load(spec, &g.perf, err);
        if (s) return s;
        c->groups[c->n_groups++] = g;
    }
    if (c->n_groups == 0) return td_fail(err, TD_ERR_INVALID, "fleet is empty");
    return TD_OK;
}

td_status td_sim_faults_parse(const char *text, struct td_sim_fault **ret_faults, uint32_t *ret_n,
                              struct td_err *err)
{
    static const char *const kinds[] = {"crash", "silent", "slow", "drain", "late", "link"};
    char buf[128], kind[16];
    *ret_faults = NULL;
    *ret_n = 0;
    for (const char *at = text; item(&at, buf, sizeof buf);) {
        struct td_sim_fault f = {.factor = 1};
        int used = 0, k = 0;
        const char *rest = buf;
        bool ok =
            sscanf(buf, "%15[a-z]:%u@%lf%n", kind, &f.worker, &f.at_s, &used) == 3 && f.at_s >= 0;
        rest += used;
        if (ok && *rest == '-') {
            ok = sscanf(rest, "-%lf%n", &f.until_s, &used) == 1 && f.until_s > f.at_s;
            rest += used;
        }
        if (ok && *rest == '*') {
            ok = sscanf(rest, "*%lf%n", &f.factor, &used) == 1 && f.factor > 0;
            rest += used;
        }
        while (ok && k < 6 && strcmp(kinds[k], kind)) k++;
        if (!ok || *rest || k == 6) {
            free(*ret_faults);
            *ret_faults = NULL;
            return td_fail(err, TD_ERR_INVALID,
                           "faults: \"%s\" must be KIND:WORKER@FROM[-UNTIL][*FACTOR], KIND crash, "
                           "silent, slow, drain, late or link",
                           buf);
        }
        f.kind = (enum td_sim_fault_kind)k;
        *ret_faults = td_sim_grow(*ret_faults, *ret_n + 1, sizeof **ret_faults);
        (*ret_faults)[(*ret_n)++] = f;
    }
    return TD_OK;
}

/* ---- options --------------------------------------------------------------------------------- */

/* The workers, and how long their steps take. */
struct fleet_options {
    const char *groups, *latency, *gpu, *model, *kv_dtype; /* groups: of --fleet */
    int64_t prefill, decode, tp, block_size, max_seqs;
    uint64_t kv_tokens;
    double kv_bytes;
    bool prefix_cache, overlap, admit_at_once;
};

/* Which requests come, when, and for how long. */
struct load_options {
    const char *arrival, *rate, *trace, *rows, *tenants;
    int64_t requests, seeds, seed;
    double cv, ramp_to, duration, warmup, cooldown, grace, time_scale, cancel, period, on_share,
        swing;
    bool spread;
};

struct router_options {
    const char *mode, *policy;
    int64_t max_requests, max_queued, told_max_tokens;
    uint64_t worker_timeout_ms, queue_timeout_ms, stall_ms, hybrid_local_tokens;
    int64_t routers;
    double tau_us, snapshot_ms, delay_ms, loss;
    bool tell_priors, send_slo;
};

struct fault_options {
    const char *faults;
    double rpc_us, noise, lose, duplicate;
};

/* What is written where, and what counts as passed. */
struct output_options {
    const char *json, *csv, *decision_log;
    double attainment, interval;
    bool check, per_seed, quiet;
};

struct sim_options {
    struct td_sim_request_options req;
    struct td_sim_worker_options worker;
    struct fleet_options fleet;
    struct load_options load;
    struct router_options router;
    struct fault_options fault;
    struct output_options out;
};

#define OFF(f) offsetof(struct sim_options, f)
// clang-format off
static const struct td_option sim_table[] = {
    {"mode", TD_OPT_STR, "pd", 0, 0, NULL, OFF(router.mode),
     "pd, colocated, hybrid, or a list of them"},
    {"policy", TD_OPT_STR, "goodput", 0, 0, NULL, OFF(router.policy),
     "policies of the router, \"a,b\"; \"all\" = each of them"},
    {"prefill", TD_OPT_I64, "2", 0, TD_CORE_MAX_WORKERS, NULL, OFF(fleet.prefill),
     "prefill workers"},
    {"decode", TD_OPT_I64, "4", 1, TD_CORE_MAX_WORKERS, NULL, OFF(fleet.decode), "decode workers"},
    {"latency", TD_OPT_STR, "", 0, 0, NULL, OFF(fleet.latency),
     "how long steps take: a table's name, a file, gpu:GPU:tpN:MODEL or "
     "splitwise:FILE:MODEL:HARDWARE:TP; empty = opt-13b, unless gpu is given"},
    {"gpu", TD_OPT_STR, "", 0, 0, NULL, OFF(fleet.gpu),
     "instead of latency: derive it for model on a100, h100, h200, b200 or l40s"},
    {"model", TD_OPT_STR, "", 0, 0, NULL, OFF(fleet.model),
     "with gpu: a Hugging Face config.json, or the folder that has it"},
    {"tp", TD_OPT_I64, "1", 1, 8, NULL, OFF(fleet.tp),
     "with gpu: cards of one worker, 1, 2, 4 or 8"},
    TD_SIM_KV_DTYPE_ROW(OFF(fleet.kv_dtype)),
    {"fleet", TD_OPT_STR, "", 0, 0, NULL, OFF(fleet.groups),
     "instead of prefill, decode, latency: \"prefill:2:LATENCY, decode:3:LATENCY:slow=2\""},
    {"kv_tokens", TD_OPT_U64, "0", 0, 0, NULL, OFF(fleet.kv_tokens),
     "KV tokens of one worker; 0 = the latency table's"},
    {"kv_bytes", TD_OPT_F64, "0", 0, 1e12, NULL, OFF(fleet.kv_bytes),
     "KV bytes of one token; 0 = the latency table's"},
    TD_SIM_WORKER_ROWS(struct sim_options, worker),
    {"block_size", TD_OPT_I64, "16", 1, 4096, NULL, OFF(fleet.block_size), "tokens per KV block"},
    {"max_seqs", TD_OPT_I64, "1024", 1, 65536, NULL, OFF(fleet.max_seqs),
     "requests held by one worker, waiting ones included"},
    {"prefix_cache", TD_OPT_BOOL, "true", 0, 0, NULL, OFF(fleet.prefix_cache),
     "workers keep prompt blocks (traces with block hashes)"},
    {"overlap", TD_OPT_BOOL, "true", 0, 0, NULL, OFF(fleet.overlap),
     "a chunk's blocks leave while the next is computed"},
    {"admit_at_once", TD_OPT_BOOL, "false", 0, 0, NULL, OFF(fleet.admit_at_once),
     "decode workers reserve during a step too (tandem's do between steps)"},
    {"trace", TD_OPT_STR, "", 0, 0, NULL, OFF(load.trace),
     "requests of a file: Azure CSV, Mooncake JSONL, lengths CSV"},
    {"spread", TD_OPT_BOOL, "true", 0, 0, NULL, OFF(load.spread),
     "Mooncake: groups of one time stamp are spread until the next"},
    {"rows", TD_OPT_ENUM, "auto", 0, 0, "auto|order|drawn", OFF(load.rows),
     "which rows of the trace: in its order, drawn at random; auto = in order when it has block "
     "hashes"},
    {"time_scale", TD_OPT_F64, "1", 1e-6, 1e6, NULL, OFF(load.time_scale),
     "of the trace's arrivals; 0.5 = twice the load"},
    {"arrival", TD_OPT_ENUM, "poisson", 0, 0, "poisson|gamma|constant|trace|onoff|sine",
     OFF(load.arrival),
     "arrivals; trace = as in the file"},
    {"rate", TD_OPT_STR, "4", 0, 0, NULL, OFF(load.rate),
     "requests/s: \"4\", \"2,4,8\" or \"FROM:TO:STEP\""},
    {"cv", TD_OPT_F64, "1", 0.01, 100, NULL, OFF(load.cv),
     "gamma: coefficient of variation of the gaps"},
    {"period", TD_OPT_F64, "60", 0.001, 1e9, NULL, OFF(load.period),
     "onoff, sine: seconds after which the rate is as before"},
    {"on_share", TD_OPT_F64, "0.5", 0.001, 1, NULL, OFF(load.on_share),
     "onoff: all arrivals are in this share of a period"},
    {"swing", TD_OPT_F64, "0.5", 0, 1, NULL, OFF(load.swing),
     "sine: the rate goes up and down by this share of its mean"},
    {"ramp_to", TD_OPT_F64, "0", 0, 1e9, NULL, OFF(load.ramp_to),
     "the rate goes linearly to this over the run; 0 = constant"},
    {"duration", TD_OPT_F64, "120", 0, 1e9, NULL, OFF(load.duration),
     "seconds of arrivals; 0 = by requests"},
    {"requests", TD_OPT_I64, "0", 0, 100000000, NULL, OFF(load.requests),
     "number of requests; 0 = by duration"},
    TD_SIM_REQUEST_ROWS(struct sim_options, req),
    {"send_slo", TD_OPT_BOOL, "true", 0, 0, NULL, OFF(router.send_slo),
     "tell the router the objectives; false: it admits everything, and ttft and tpot only judge"},
    {"told_max_tokens", TD_OPT_I64, "0", 0, 100000000, NULL, OFF(router.told_max_tokens),
     "the router is told at least this max_tokens, as by clients that do not know; 0 = each "
     "output's true length"},
    {"cancel", TD_OPT_F64, "0", 0, 1, NULL, OFF(load.cancel),
     "share of clients that leave within 5 s of their arrival"},
    {"tenants", TD_OPT_STR, "", 0, 0, NULL, OFF(load.tenants),
     "tenants and their shares of the arrivals: \"acme=3 flood:bulk=10\" (flood's are all bulk)"},
    {"attainment", TD_OPT_F64, "0.9", 0.5, 0.999, NULL, OFF(out.attainment),
     "share of requests that should meet both"},
    {"warmup", TD_OPT_F64, "20", 0, 1e9, NULL, OFF(load.warmup),
     "seconds of arrivals that do not count, at the start"},
    {"cooldown", TD_OPT_F64, "0", 0, 1e9, NULL, OFF(load.cooldown), "the same at the end"},
    {"interval", TD_OPT_F64, "0", 0, 1e9, NULL, OFF(out.interval),
     "a row for the arrivals of each so many seconds, from the first arrival on; 0 = none"},
    {"grace", TD_OPT_F64, "120", 0, 1e9, NULL, OFF(load.grace),
     "seconds after the last arrival in which requests may still end"},
    {"seeds", TD_OPT_I64, "1", 1, 1000, NULL, OFF(load.seeds),
     "runs of each point, with seeds from --seed on"},
    {"seed", TD_OPT_I64, "1", 0, 1000000000, NULL, OFF(load.seed),
     "of arrivals, lengths, noise and faults"},
    {"per_seed", TD_OPT_BOOL, "false", 0, 0, NULL, OFF(out.per_seed),
     "a row for each seed beside the pooled one"},
    {"rpc_us", TD_OPT_F64, "200", 0, 1e9, NULL, OFF(fault.rpc_us), "one way of a control message"},
    {"link_tau_us", TD_OPT_F64, "20", 0, 1e9, NULL, OFF(router.tau_us),
     "latency of a transfer, on top of its bytes"},
    {"snapshot_ms", TD_OPT_F64, "20", 1, 1e6, NULL, OFF(router.snapshot_ms),
     "how often workers tell their state"},
    {"routers", TD_OPT_I64, "1", 1, TD_SIM_MAX_ROUTERS, NULL, OFF(router.routers),
     "routers over the one fleet; clients choose one at random"},
    {"router_delay", TD_OPT_F64, "0", 0, 1e6, NULL, OFF(router.delay_ms),
     "ms, one way, of each message between workers and routers, beside rpc_us"},
    {"router_loss", TD_OPT_F64, "0", 0, 0.9, NULL, OFF(router.loss),
     "share of these messages that TCP sends again: 200 ms more, and those behind wait"},
    {"step_noise", TD_OPT_F64, "0", 0, 3, NULL, OFF(fault.noise),
     "sigma of a lognormal factor on each step"},
    {"faults", TD_OPT_STR, "", 0, 0, NULL, OFF(fault.faults),
     "\"KIND:WORKER@FROM[-UNTIL][*FACTOR], ...\"; kinds crash, silent, slow, drain, late, link; "
     "seconds"},
    {"lose", TD_OPT_F64, "0", 0, 1, NULL, OFF(fault.lose), "share of control messages lost"},
    {"duplicate", TD_OPT_F64, "0", 0, 1, NULL, OFF(fault.duplicate),
     "share of control messages doubled"},
    {"check", TD_OPT_BOOL, "false", 0, 0, NULL, OFF(out.check),
     "run on to quiescence and look for leaks; a violation fails the command"},
    {"max_requests", TD_OPT_I64, "4096", 1, TD_CORE_MAX_REQUESTS, NULL, OFF(router.max_requests),
     "router: live requests"},
    {"max_queued", TD_OPT_I64, "4096", 0, TD_CORE_MAX_REQUESTS, NULL, OFF(router.max_queued),
     "router: requests waiting for a worker"},
    {"hybrid_local_tokens", TD_OPT_U64, "64", 0, 1 << 30, NULL, OFF(router.hybrid_local_tokens),
     "router, hybrid: shorter prompts are prefilled on the decode worker"},
    {"worker_timeout_ms", TD_OPT_U64, "2000", 1, 3600000, NULL, OFF(router.worker_timeout_ms),
     "router: a worker silent for so long loses its requests"},
    {"queue_timeout_ms", TD_OPT_U64, "30000", 1, 3600000, NULL, OFF(router.queue_timeout_ms),
     "router: longest wait for a worker"},
    {"stall_ms", TD_OPT_U64, "120000", 1, 3600000, NULL, OFF(router.stall_ms),
     "router: a request in which nothing moves for so long fails over"},
    {"tell_priors", TD_OPT_BOOL, "true", 0, 0, NULL, OFF(router.tell_priors),
     "the router starts with the fleet's true latency coefficients; false = it learns them"},
    {"json", TD_OPT_STR, "", 0, 0, NULL, OFF(out.json), "write results to this file as JSON"},
    {"csv", TD_OPT_STR, "", 0, 0, NULL, OFF(out.csv), "write results to this file as CSV"},
    {"decision_log", TD_OPT_STR, "", 0, 0, NULL, OFF(out.decision_log),
     "write the core's events and decisions (of the last run) to this file; router 1's to FILE.1, "
     "and so on"},
    {"quiet", TD_OPT_BOOL, "false", 0, 0, NULL, OFF(out.quiet), "no progress"},
    {0},
};
// clang-format on

/* What says how long steps take is said once. Without gpu, model and tp may come from the
 * environment of the daemons: they count for nothing, and that is said. */
static td_status check_latency(const struct sim_options *o, struct td_err *err)
{
    const char *other = o->fleet.latency[0] ? "latency" : o->fleet.groups[0] ? "fleet" : NULL;
    const char *idle = o->fleet.model[0]                   ? "model"
                       : o->fleet.tp != 1                  ? "tp"
                       : strcmp(o->fleet.kv_dtype, "auto") ? "kv_dtype"
                                                           : NULL;
    if (!o->fleet.gpu[0] && idle)
        fprintf(stderr, "tandem sim: %s counts only with gpu: steps take what %s says\n", idle,
                other ? other : "table opt-13b");
    if (!o->fleet.gpu[0]) return TD_OK;
    if (other)
        return td_fail(err, TD_ERR_INVALID,
                       "give gpu or %s, not both: each says how long steps take", other);
    return o->fleet.model[0]
               ? TD_OK
               : td_fail(err, TD_ERR_INVALID,
                         "gpu is %.40s without model: give a config.json or its folder",
                         o->fleet.gpu);
}

static td_status worker_perf(const struct sim_options *o, struct td_perf *ret_perf,
                             struct td_err *err)
{
    const struct td_gpu *gpu;
    struct td_model_config model;
    if (!o->fleet.gpu[0])
        return td_perf_load(o->fleet.latency[0] ? o->fleet.latency : "opt-13b", ret_perf, err);
    enum td_dtype kv = TD_BF16;
    td_status s = td_gpu_find(o->fleet.gpu, &gpu, err);
    if (!s) s = td_gpu_kv_dtype(o->fleet.kv_dtype, &kv, err);
    if (!s) s = td_gpu_model_load(o->fleet.model, &model, err);
    return s ? s : td_gpu_perf(gpu, &model, (uint32_t)o->fleet.tp, kv, ret_perf, err);
}

static td_status config_of(const struct sim_options *o, struct td_sim_config *c, struct td_err *err)
{
    td_sim_config_init(c);
    struct td_sim_group d = {.kv_tokens = o->fleet.kv_tokens,
                             .max_batch = (int32_t)o->worker.max_batch,
                             .max_step_tokens = (int32_t)o->worker.max_step_tokens,
                             .max_seqs = (int32_t)o->fleet.max_seqs,
                             .nic_bytes_per_s = o->worker.nic_gbs * 1e9,
                             .slow = 1};
    td_status s = check_latency(o, err);
    if (s) return s;
    if (o->fleet.groups[0]) {
        s = td_sim_fleet_parse(o->fleet.groups, &d, c, err);
    } else {
        struct td_sim_group g = d;
        s = worker_perf(o, &g.perf, err);
        if (o->fleet.prefill) {
            g.count = (uint32_t)o->fleet.prefill;
            c->groups[c->n_groups++] = g;
        }
        g.count = (uint32_t)o->fleet.decode;
        g.decode = true;
        c->groups[c->n_groups++] = g;
    }
    if (s) return s;
    struct td_port_config *port = &c->router;
    port->max_requests = (uint32_t)o->router.max_requests;
    port->max_queued = (uint32_t)o->router.max_queued;
    port->hybrid_local_tokens = (uint32_t)o->router.hybrid_local_tokens;
    port->worker_timeout_ms = (uint32_t)o->router.worker_timeout_ms;
    port->queue_timeout_ms = (uint32_t)o->router.queue_timeout_ms;
    port->stall_ms = (uint32_t)o->router.stall_ms;
    port->attainment = o->out.attainment;
    port->link_bytes_per_s = o->worker.nic_gbs * 1e9;
    port->link_tau_s = o->router.tau_us / 1e6;
    for (uint32_t i = 0; o->router.tell_priors && i < c->n_groups && i < TD_PORT_MAX_PRIORS;
         i++, port->n_priors++)
        port->priors[i] = &c->groups[i].perf;
    c->n_routers = (uint32_t)o->router.routers;
    c->router_delay_ns = (uint64_t)(o->router.delay_ms * 1e6);
    c->router_loss = o->router.loss;
    c->block_size = (int32_t)o->fleet.block_size;
    c->prefix_cache = o->fleet.prefix_cache;
    c->overlap = o->fleet.overlap;
    c->admit_at_once = o->fleet.admit_at_once;
    c->rpc_ns = (uint64_t)(o->fault.rpc_us * 1e3);
    c->link_tau_ns = (uint64_t)(o->router.tau_us * 1e3);
    c->snapshot_ns = (uint64_t)(o->router.snapshot_ms * 1e6);
    c->kv_bytes_per_token = o->fleet.kv_bytes;
    c->step_noise = o->fault.noise;
    c->warmup_s = o->load.warmup;
    c->cooldown_s = o->load.cooldown;
    c->grace_s = o->load.grace;
    c->lose = o->fault.lose;
    c->duplicate = o->fault.duplicate;
    c->cancel = o->load.cancel;
    c->told_max_tokens = (int32_t)o->router.told_max_tokens;
    c->check = o->out.check;
    return td_sim_faults_parse(o->fault.faults, &c->faults, &c->n_faults, err);
}

struct meter {
    struct td_progress p;
    uint64_t done, span_s;
    bool on;
};

static void meter_share(void *ctx, double share)
{
    struct meter *m = ctx;
    if (m->on) td_progress_update(&m->p, m->done + (uint64_t)(share * (double)m->span_s));
}

static td_status open_out(const char *path, FILE **ret, struct td_err *err)
{
    if (!path[0]) return TD_OK;
    *ret = fopen(path, "w");
    return *ret ? TD_OK : td_fail(err, TD_ERR_IO, "%s: %s", path, strerror(errno));
}

struct sweep {
    const struct sim_options *o;
    struct td_sim_config config;
    struct td_sim_load load;
    struct td_sim_mix mix;
    struct td_sim_trace file, *from;
    char policies[MAX_LIST][32], modes[3][32];
    uint32_t n_policies, n_modes, n_rates, n_rows, n_intervals;
    double rates[MAX_LIST];
    struct meter meter;
    FILE *json, *csv;
    bool violated;
};

/* Virtual seconds of arrivals in one run, 0 when only their number is given: then it depends on the
 * rate. */
static double arrivals_span_s(const struct sweep *w)
{
    const struct sim_options *o = w->o;
    bool by_time = o->load.duration > 0 && !o->load.requests;
    if (w->load.arrival != TD_ARRIVAL_TRACE) return by_time ? o->load.duration : 0;
    double all = (double)w->file.requests[w->file.n - 1].at_ns / 1e9 * o->load.time_scale;
    return by_time ? fmin(all, o->load.duration) : all;
}

/* Part 0 is all of a run; then each class, when there are several, each tenant, and each interval
 * of the arrivals. */
static uint32_t n_parts(const struct sweep *w)
{
    return 1 + (w->mix.n_classes > 1 ? w->mix.n_classes : 0) + w->mix.n_tenants + w->n_intervals;
}

static void summarise_part(const struct sweep *w, const struct td_sim_result *result, uint32_t part,
                           struct td_sim_summary *ret)
{
    uint32_t n_classes = w->mix.n_classes > 1 ? w->mix.n_classes : 0, tenant = part - n_classes;
    if (part == 0) {
        td_sim_summarise(&w->config, result, ret);
    } else if (part <= n_classes) {
        td_sim_summarise_part(&w->config, result, (int32_t)part - 1, -1, ret);
        snprintf(ret->part, sizeof ret->part, "class %s", w->mix.classes[part - 1].name);
    } else if (tenant > w->mix.n_tenants) {
        double from_s = (tenant - w->mix.n_tenants - 1) * w->o->out.interval;
        td_sim_summarise_interval(&w->config, result, from_s, from_s + w->o->out.interval, ret);
    } else {
        td_sim_summarise_part(&w->config, result, -1, (int32_t)tenant, ret);
        snprintf(ret->part, sizeof ret->part, "tenant %s", w->mix.tenants[tenant - 1]);
    }
}

static void print_part(struct sweep *w, const struct td_sim_summary *runs, uint32_t n_seeds)
{
    struct td_sim_summary pooled;
    td_sim_pool(runs, n_seeds, &pooled);
    if (w->o->out.per_seed && n_seeds > 1)
        for (uint32_t k = 0; k < n_seeds; k++) td_sim_table_row(&runs[k], stdout);
    td_sim_table_row(&pooled, stdout);
    fflush(stdout);
    for (uint32_t k = 0; k < n_seeds; k++) {
        if (w->csv) td_sim_csv_row(&runs[k], w->csv);
        if (w->json) {
            fputs(w->n_rows++ ? ",\n  " : "\n  ", w->json);
            td_sim_json_row(&runs[k], w->json);
        }
    }
}

static void close_logs(struct sweep *w)
{
    if (w->config.router.decision_log) fclose(w->config.router.decision_log);
    w->config.router.decision_log = NULL;
    for (uint32_t i = 0; i < TD_SIM_MAX_ROUTERS; i++) {
        if (w->config.decision_logs[i]) fclose(w->config.decision_logs[i]);
        w->config.decision_logs[i] = NULL;
    }
}

/* FILE is the first router's, FILE.1 the second's. */
static td_status open_logs(struct sweep *w, struct td_err *err)
{
    close_logs(w);
    td_status s = open_out(w->o->out.decision_log, &w->config.router.decision_log, err);
    for (uint32_t i = 1; i < w->config.n_routers && !s; i++) {
        char path[4096];
        snprintf(path, sizeof path, "%.4000s.%u", w->o->out.decision_log, i);
        s = open_out(path, &w->config.decision_logs[i], err);
    }
    return s;
}

static td_status run_point(struct sweep *w, double rate, struct td_err *err)
{
    uint32_t n_seeds = (uint32_t)w->o->load.seeds, parts = n_parts(w);
    /* [part][seed] */
    struct td_sim_summary *runs = td_sim_grow(NULL, (size_t)n_seeds * parts, sizeof *runs);
    td_status s = TD_OK;
    for (uint32_t k = 0; k < n_seeds && !s; k++) {
        struct td_sim_trace trace;
        struct td_sim_result result;
        w->load.rate = rate;
        w->load.seed = w->config.seed = w->config.router.seed = (uint64_t)w->o->load.seed + k;
        if ((s = td_sim_trace_make(&w->load, w->from, &trace, err))) break;
        if (w->o->out.decision_log[0]) s = open_logs(w, err);
        uint64_t t0 = td_now_ns();
        if (!s) s = td_sim_run(&w->config, &trace, meter_share, &w->meter, &result, err);
        if (!s) {
            for (uint32_t part = 0; part < parts; part++) {
                struct td_sim_summary *x = &runs[part * n_seeds + k];
                summarise_part(w, &result, part, x);
                x->wall_s = (double)(td_now_ns() - t0) / 1e9;
                x->rate = rate;
                x->cv = w->load.arrival == TD_ARRIVAL_GAMMA ? w->load.cv : 1;
            }
            if (result.n_violations) {
                w->violated = true;
                fprintf(stderr, "tandem sim: seed %llu: %u violations, the first %s\n",
                        (unsigned long long)w->load.seed, result.n_violations, result.violation);
            }
            td_sim_result_free(&result);
        }
        td_sim_trace_free(&trace);
        w->meter.done += w->meter.span_s;
    }
    if (!s) {
        if (w->meter.on && w->meter.p.is_tty) fputs("\r\033[K", stderr);
        for (uint32_t part = 0; part < parts; part++)
            print_part(w, runs + (size_t)part * n_seeds, n_seeds);
    }
    free(runs);
    return s;
}

static td_status split_names(const char *text, char (*names)[32], uint32_t max, uint32_t *ret_n)
{
    uint32_t n = 0;
    char buf[32];
    for (const char *at = text; n < max && item(&at, buf, sizeof buf);)
        memcpy(names[n++], buf, sizeof buf);
    *ret_n = n;
    return TD_OK;
}

/* Estimated step times are told, once for groups that share them. */
static void tell_estimates(const struct td_sim_config *c)
{
    for (uint32_t i = 0; i < c->n_groups; i++) {
        const struct td_perf *p = &c->groups[i].perf;
        bool is_told = i > 0 && !strcmp(p->name, c->groups[i - 1].perf.name);
        if (p->estimated_from && !is_told)
            fprintf(
                stderr,
                "tandem sim: %s was not measured: its step times are those of %s, scaled by the "
                "makers' figures\n",
                p->name, p->estimated_from);
    }
}

static struct td_sim_load load_of(const struct sim_options *o)
{
    return (struct td_sim_load){.cv = o->load.cv,
                                .ramp_to = o->load.ramp_to,
                                .duration_s = o->load.requests ? 0 : o->load.duration,
                                .n_requests = (uint32_t)o->load.requests,
                                .time_scale = o->load.time_scale,
                                .period_s = o->load.period,
                                .on_share = o->load.on_share,
                                .swing = o->load.swing,
                                .rows = o->load.rows[0] == 'a'   ? TD_ROWS_AUTO
                                        : o->load.rows[0] == 'o' ? TD_ROWS_ORDER
                                                                 : TD_ROWS_DRAWN,
                                .arrival = o->load.arrival[0] == 'p'   ? TD_ARRIVAL_POISSON
                                           : o->load.arrival[0] == 'g' ? TD_ARRIVAL_GAMMA
                                           : o->load.arrival[0] == 'c' ? TD_ARRIVAL_CONSTANT
                                           : o->load.arrival[0] == 'o' ? TD_ARRIVAL_ONOFF
                                           : o->load.arrival[0] == 's' ? TD_ARRIVAL_SINE
                                                                       : TD_ARRIVAL_TRACE};
}

/* How many intervals the run is told in. */
static td_status count_intervals(const struct sweep *w, uint32_t *ret, struct td_err *err)
{
    double n = ceil(arrivals_span_s(w) / w->o->out.interval);
    if (n < 1)
        return td_fail(err, TD_ERR_INVALID,
                       "interval is %g s, and only a duration says how many there are",
                       w->o->out.interval);
    if (n > MAX_INTERVALS)
        return td_fail(err, TD_ERR_INVALID, "interval is %g s: %.0f of them, limit %d",
                       w->o->out.interval, n, MAX_INTERVALS);
    *ret = (uint32_t)n;
    return TD_OK;
}

static td_status sweep_open(struct sweep *w, struct td_err *err)
{
    const struct sim_options *o = w->o;
    char all[512];
    snprintf(all, sizeof all, "%s",
             !strcmp(o->router.policy, "all") ? td_port_policies() : o->router.policy);
    for (char *t = all; *t; t++)
        if (*t == '|') *t = ',';
    split_names(all, w->policies, MAX_LIST, &w->n_policies);
    split_names(o->router.mode, w->modes, 3, &w->n_modes);
    td_status s = config_of(o, &w->config, err);
    if (!s) tell_estimates(&w->config);
    if (!s) s = td_sim_list_parse(o->load.rate, "rate", w->rates, MAX_LIST, &w->n_rates, err);
    w->load = load_of(o);
    if (!s) s = td_sim_requests_parse(&o->req, o->load.tenants, &w->mix, &w->load, err);
    memcpy(w->config.router.classes, w->mix.classes, sizeof w->mix.classes);
    w->config.router.n_classes = w->mix.n_classes;
    if (!s && !o->router.send_slo && (w->mix.n_classes > 1 || o->req.slo_class[0]))
        s = td_fail(err, TD_ERR_INVALID,
                    "send_slo is false, and classes are what the router is told: give ttft and "
                    "tpot instead of slo_class");
    if (!o->router.send_slo) w->config.router.n_classes = 0;
    w->config.ttft_s = o->req.ttft / 1e3;
    w->config.tpot_s = o->req.tpot / 1e3;
    if (!s && o->load.trace[0]) {
        s = td_sim_trace_read(o->load.trace, o->load.spread, &w->file, err);
        w->from = &w->file;
        if (w->load.arrival == TD_ARRIVAL_TRACE) w->n_rates = 1; /* the file's */
    }
    if (!s && o->out.interval > 0) s = count_intervals(w, &w->n_intervals, err);
    if (!s) s = open_out(o->out.json, &w->json, err);
    if (!s) s = open_out(o->out.csv, &w->csv, err);
    return s;
}

static void sweep_close(struct sweep *w)
{
    td_sim_trace_free(&w->file);
    free(w->config.faults);
    if (w->json) fclose(w->json);
    if (w->csv) fclose(w->csv);
    close_logs(w);
}

static td_status sweep_run(struct sweep *w, struct td_err *err)
{
    const struct sim_options *o = w->o;
    uint64_t n_runs = (uint64_t)w->n_policies * w->n_modes * w->n_rates * (uint64_t)o->load.seeds;
    td_status s = TD_OK;
    if (w->csv) td_sim_csv_head(w->csv);
    if (w->json)
        fprintf(w->json,
                "{\"tandem_sim\":1,\"definitions\":{\"ttft\":\"arrival at the router to first "
                "token sent\",\"tpot\":\"(end - first token) / (output "
                "tokens - 1)\","
                "\"good\":\"completed with both objectives met\",\"window\":\"by arrival, warm-up "
                "and cool-down left out\"},"
                "\"slo\":{\"ttft_ms\":%g,\"tpot_ms\":%g,\"attainment\":%g},\"runs\":[",
                o->req.ttft, o->req.tpot, o->out.attainment);
    w->meter.on = !o->out.quiet;
    if (w->meter.on) {
        double span_s = arrivals_span_s(w);
        if (span_s <= 0) span_s = (double)o->load.requests / w->rates[0];
        w->meter.span_s = (uint64_t)ceil(span_s) + 1;
        td_progress_start(&w->meter.p, "simulating", "virtual s", n_runs * w->meter.span_s);
    }
    td_sim_table_head(stdout);
    for (uint32_t m = 0; m < w->n_modes && !s; m++)
        for (uint32_t r = 0; r < w->n_rates && !s; r++)
            for (uint32_t p = 0; p < w->n_policies && !s; p++) {
                w->config.router.mode = w->modes[m];
                w->config.router.policy = w->policies[p];
                s = run_point(w, w->rates[r], err);
            }
    if (w->meter.on) td_progress_end(&w->meter.p);
    if (w->json) fputs("\n]}\n", w->json);
    return s;
}

/* ---- replay ---------------------------------------------------------------------------------- */

static void say_difference(void *ctx, uint64_t line, const char *logged, const char *ours)
{
    (void)ctx;
    fprintf(stderr, "line %llu\n  log:  %s\n  core: %s\n", (unsigned long long)line, logged, ours);
}

static int replay(int argc, char **argv)
{
    struct td_err err = {0};
    if (argc != 2 || !strcmp(argv[1], "--help")) {
        fprintf(
            argc == 2 ? stdout : stderr,
            "usage: tandem sim replay FILE\n\nRuns the events of a router's decision log "
            "(--decision-log) through the core and compares every\n"
            "action. Exit status 0: all the same; 1: they differ, or FILE is no decision log.\n");
        return argc == 2 ? 0 : 2;
    }
    uint64_t n_events, n_actions;
    td_status s = td_port_replay(argv[1], say_difference, NULL, &n_events, &n_actions, &err);
    if (s) return td_die("tandem sim replay", &err), 1;
    printf("%llu events, %llu actions: the same\n", (unsigned long long)n_events,
           (unsigned long long)n_actions);
    return 0;
}

int td_sim_main(int argc, char **argv)
{
    if (argc > 1 && !strcmp(argv[1], "replay")) return replay(argc - 1, argv + 1);
    struct sim_options o = {0};
    struct td_err err = {0};
    td_status s = td_options_load(sim_table, &o, "tandem sim",
                                  "Simulate a fleet with the router's own core: policies, loads, "
                                  "faults. `tandem sim replay FILE` checks a decision log.",
                                  argc, argv, NULL, 0, NULL, &err);
    struct sweep w = {.o = &o};
    if (!s) s = sweep_open(&w, &err);
    if (!s) s = sweep_run(&w, &err);
    sweep_close(&w);
    if (s) return td_die("tandem sim", &err);
    return w.violated ? 1 : 0;
}
