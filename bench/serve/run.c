/* run.c - see run.h; run_flight.h says what stands where.
 *
 *   pacer (caller's thread)                          loop thread
 *   makes request i+1's message                      run_flight_start: stamps sent_s, starts the
 *       call
 *   sleeps to its time (absolute)      --post-->     on_message: stamps tokens, copies ledger and
 *                                      usage
 *   takes a place (max_concurrency)    <--cond--     on_done: outcome, gives the place back
 *
 * Ownership: a bench_request belongs to the pacer until run_flight_start is posted, then to the
 * loop thread until on_done has given the place back under the mutex. struct flight: the same,
 * and it is freed by on_done. `live` is the loop thread's. Invariants: (1) n_active counts
 * flights posted and not done; (2) a request is sent once, when posted; (3) sent_s - ready_s is
 * the generator's own lag: the pacer's wake-up, the hand-over and the loop's backlog are all in
 * it. */
#include "bench/serve/run.h"

#include <math.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#include "bench/serve/run_flight.h"
#include "common/base/progress.h"
#include "common/base/random.h"

#define SLICE_NS (100 * TD_NS_PER_MS) /* how late progress and an interrupt may be noticed */
#define CANCEL_S 30.0                 /* a cancelled call ends at once; longer is our bug */
#define WARMUP_AT_ONCE 16
#define WARMUP_TEXT_TOKENS 64 /* for datasets of texts */

void bench_run_config_init(struct bench_run_config *c)
{
    *c = (struct bench_run_config){.target = "127.0.0.1:7600",
                                   .tls_ca = "",
                                   .tls_cert = "",
                                   .tls_key = "",
                                   .api_key_file = "",
                                   .model = "",
                                   .slo_preset = "",
                                   .label = "",
                                   .metadata = "",
                                   .method = "/tandem.v1.Inference/Generate",
                                   .grace_s = 30,
                                   .warmup = 0.1,
                                   .temperature = 0,
                                   .top_p = -1,
                                   .send_slo = true,
                                   .realtime = true,
                                   .pcts = {50, 90, 95, 99},
                                   .n_pcts = 4};
    c->dataset = (struct bench_dataset_config){.kind = BENCH_RANDOM,
                                               .path = "",
                                               .input_len = 1024,
                                               .output_len = 128,
                                               .n_prefixes = 10,
                                               .shuffle = true,
                                               .time_scale = 1,
                                               .length_scale = 1,
                                               .spread = true};
    c->arrivals = (struct bench_arrivals_config){
        .kind = BENCH_POISSON, .rate = INFINITY, .burstiness = 1, .rescale = true};
}

void bench_run_config_free(struct bench_run_config *c)
{
    json_decref(c->extra_body);
    c->extra_body = NULL;
}

/* --- pacing ----------------------------------------------------------------------------------- */

static struct timespec at_ns(uint64_t ns)
{
    return (struct timespec){(time_t)(ns / TD_NS_PER_S), (long)(ns % TD_NS_PER_S)};
}

static void draw(const struct run *r, struct td_progress *p, uint64_t n_done)
{
    if (!p) return;
    double now_s = run_since_s(r, td_now_ns());
    if (r->timed_s > 0)
        p->total = n_done + (now_s > 0 && now_s < r->timed_s
                                 ? (uint64_t)((double)n_done * (r->timed_s - now_s) / now_s)
                                 : 0);
    td_progress_update(p, n_done);
}

static void show(struct run *r, struct td_progress *p)
{
    pthread_mutex_lock(&r->mu);
    uint64_t n = r->n_done;
    pthread_mutex_unlock(&r->mu);
    draw(r, p, n);
}

/* False when interrupted. */
static bool sleep_until(struct run *r, double at_s, struct td_progress *p)
{
    uint64_t until_ns = r->t0_ns + (uint64_t)(at_s * 1e9);
    for (;;) {
        if (run_stopped(r)) return false;
        uint64_t now_ns = td_now_ns();
        if (now_ns >= until_ns) return true;
        bool last = until_ns - now_ns <= SLICE_NS;
        /* drawing takes time: not when it is tight */
        if (until_ns - now_ns > TD_NS_PER_MS) show(r, p);
        struct timespec t = at_ns(last ? until_ns : now_ns + SLICE_NS);
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL);
    }
}

/* Takes a place: *ret_free_s = since when it was free. False: interrupted, or none came free
 * until deadline_s. */
static bool take_place(struct run *r, double deadline_s, double *ret_free_s, struct td_progress *p)
{
    pthread_mutex_lock(&r->mu);
    bool got = true;
    while (r->max_active && r->n_free == 0) {
        uint64_t now_ns = td_now_ns();
        if (run_stopped(r) || run_since_s(r, now_ns) >= deadline_s) {
            got = false;
            break;
        }
        struct timespec t = at_ns(now_ns + SLICE_NS);
        pthread_cond_timedwait(&r->cond, &r->mu, &t);
        uint64_t n = r->n_done;
        pthread_mutex_unlock(&r->mu);
        draw(r, p, n);
        pthread_mutex_lock(&r->mu);
    }
    if (got) {
        *ret_free_s = 0;
        if (r->max_active) {
            *ret_free_s = r->free_at_s[r->free_head];
            r->free_head = (r->free_head + 1) % r->max_active;
            r->n_free--;
        }
        r->n_active++;
    }
    pthread_mutex_unlock(&r->mu);
    return got;
}

/* Waits until nothing is in flight; what is at deadline_s (or after an interrupt) is cancelled. */
static void drain(struct run *r, double deadline_s, struct td_progress *p)
{
    bool cancelled = false;
    pthread_mutex_lock(&r->mu);
    while (r->n_active) {
        uint64_t now_ns = td_now_ns();
        double now_s = run_since_s(r, now_ns);
        if (!cancelled && (run_stopped(r) || now_s >= deadline_s)) {
            r->backend->post(r, run_cancel_live, r);
            cancelled = true;
            deadline_s = now_s;
        }
        TD_ASSERT(!cancelled || now_s < deadline_s + CANCEL_S);
        struct timespec t = at_ns(now_ns + SLICE_NS);
        pthread_cond_timedwait(&r->cond, &r->mu, &t);
        uint64_t n = r->n_done;
        pthread_mutex_unlock(&r->mu);
        draw(r, p, n);
        pthread_mutex_lock(&r->mu);
    }
    pthread_mutex_unlock(&r->mu);
}

static td_status places_open(struct run *r, uint64_t max_active, struct td_err *err)
{
    free(r->free_at_s);
    r->max_active = max_active;
    r->free_head = 0;
    r->n_free = max_active;
    r->n_done = 0;
    r->free_at_s = calloc(max_active ? max_active : 1, sizeof *r->free_at_s);
    return r->free_at_s ? TD_OK : run_no_memory(err);
}

static bool prepare(struct flight *f)
{
    return !f->run->backend->prepare || f->run->backend->prepare(f);
}

static td_status warm_up(struct run *r, struct td_err *err)
{
    const struct bench_run_config *c = r->config;
    if (c->n_warmups == 0) return TD_OK;
    td_status s = places_open(r, c->max_concurrency ? c->max_concurrency : WARMUP_AT_ONCE, err);
    if (s) return s;
    struct bench_request *warm = calloc(c->n_warmups, sizeof *warm);
    if (!warm) return run_no_memory(err);
    struct td_progress progress;
    td_progress_start(&progress, "warm-up", "requests", c->n_warmups);
    struct td_progress *p = c->progress ? &progress : NULL;
    r->t0_ns = td_now_ns();
    for (uint64_t i = 0; i < c->n_warmups; i++) {
        const struct bench_item *it =
            bench_dataset_item(r->dataset, i % bench_dataset_size(r->dataset));
        warm[i].want_len = it->output_len;
        int32_t n = it->text ? WARMUP_TEXT_TOKENS : it->input_len;
        struct flight *f = run_flight_make(r, &warm[i], i, NULL, n);
        if (!f) {
            s = run_no_memory(err);
            break;
        }
        /* prompts of their own: the measured ones must not be in the cache */
        struct td_keyed rng = td_keyed_at(c->seed, WHAT_WARMUP, i);
        for (int32_t k = 0; k < n; k++) f->ids[k] = (int32_t)td_keyed_below(&rng, r->vocab);
        double free_s;
        f->warming = true;
        if (!prepare(f)) s = run_no_memory(err);
        if (s || !take_place(r, INFINITY, &free_s, p)) {
            run_flight_free(f);
            break;
        }
        r->backend->post(r, run_flight_start, f);
    }
    drain(r, run_since_s(r, td_now_ns()) + c->grace_s, p);
    if (p) td_progress_end(p);
    uint64_t n_ok = 0;
    char name[24];
    for (uint64_t i = 0; i < c->n_warmups; i++) {
        n_ok += warm[i].outcome == BENCH_COMPLETED;
        if (!s && n_ok == 0 && i + 1 == c->n_warmups && !run_stopped(r))
            s = td_fail(err, TD_ERR_PEER, "%s: no warm-up request completed; the last: %s: %s",
                        c->target, r->backend->code_name(warm[i].code, name),
                        warm[i].error ? warm[i].error : "");
    }
    for (uint64_t i = 0; i < c->n_warmups; i++) {
        free(warm[i].error);
        free(warm[i].gaps_s);
    }
    free(warm);
    return s;
}

/* --- the run ---------------------------------------------------------------------------------- */

/* Sends the flight when its time and its place have come. False: no more are to be sent. */
static bool send_one(struct run *r, struct flight *f, double deadline_s, struct td_progress *p)
{
    const struct bench_run_config *c = r->config;
    struct bench_request *q = f->q;
    bool closed = r->result.load.closed_loop;
    double free_s;
    if (!closed && !sleep_until(r, q->scheduled_s, p)) return false;
    /* A closed loop has no last arrival: it ends when all places are taken for longer than a
       last request may take. */
    if (closed)
        deadline_s = c->duration_s > 0 ? c->duration_s : run_since_s(r, td_now_ns()) + c->grace_s;
    if (!take_place(r, deadline_s, &free_s, p)) return false;
    if (closed) q->scheduled_s = free_s;
    q->ready_s = free_s > q->scheduled_s ? free_s : q->scheduled_s;
    if (closed && c->duration_s > 0 && q->ready_s >= c->duration_s) {
        pthread_mutex_lock(&r->mu);
        r->n_active--;
        pthread_mutex_unlock(&r->mu);
        return false;
    }
    r->backend->post(r, run_flight_start, f);
    return true;
}

static double cpu_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t); /* cannot fail for this id */
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static td_status offer_load(struct run *r, struct td_err *err)
{
    const struct bench_run_config *c = r->config;
    struct bench_result *res = &r->result;
    td_status s = places_open(r, c->max_concurrency, err);
    if (s) return s;
    struct td_progress progress;
    struct td_progress *p = c->progress ? &progress : NULL;
    r->timed_s = res->load.closed_loop ? c->duration_s : 0;
    td_progress_start(&progress, "bench", "requests", res->n_requests);
    prctl(PR_SET_TIMERSLACK, 1000UL);
    /* an open loop's first request may be due at 0 */
    uint64_t head_ns = res->load.closed_loop ? 0 : 10 * TD_NS_PER_MS;
    r->t0_ns = td_now_ns() + head_ns;
    res->setup.start_wall_ns = td_wall_ns() + head_ns;
    double last_s =
               res->load.closed_loop ? INFINITY : res->requests[res->n_requests - 1].scheduled_s,
           deadline_s = last_s + c->grace_s;
    double cpu_before_s = cpu_s();
    size_t n_sent = 0;
    for (; n_sent < res->n_requests; n_sent++) {
        struct bench_request *q = &res->requests[n_sent];
        const struct bench_item *it = bench_dataset_item(r->dataset, n_sent);
        struct flight *f = run_flight_make(r, q, n_sent, it->text, it->input_len);
        if (!f) {
            s = run_no_memory(err);
            break;
        }
        if (!it->text) bench_dataset_tokens(r->dataset, n_sent, f->ids);
        if (!prepare(f)) s = run_no_memory(err);
        if (s || !send_one(r, f, deadline_s, p)) {
            run_flight_free(f);
            break;
        }
    }
    if (res->load.closed_loop) deadline_s = run_since_s(r, td_now_ns()) + c->grace_s;
    drain(r, s ? 0 : deadline_s, p);
    res->generator.cpu_s = cpu_s() - cpu_before_s;
    if (p) td_progress_end(p);
    res->interrupted = run_stopped(r);
    if (res->interrupted || s) return s;
    if (res->load.closed_loop) res->n_requests = n_sent; /* the others were never due */
    /* Open loop: what found no place until the end was offered all the same. */
    for (size_t i = n_sent; i < res->n_requests; i++) {
        res->requests[i].outcome = BENCH_UNFINISHED;
        res->requests[i].error =
            strdup("no place within --max-concurrency until the end of the grace period");
    }
    return TD_OK;
}

/* On a machine that the cluster shares, the pacer and the loop wait for workers to let them run:
 * at a load of 13 on 2 CPUs p99 lag was 35 to 99 ms without this and 0.2 to 1.2 ms with it. They
 * use about 1 % of a CPU. */
static bool go_realtime(void)
{
    struct sched_param first = {.sched_priority = sched_get_priority_min(SCHED_RR)};
    return pthread_setschedparam(pthread_self(), SCHED_RR, &first) == 0;
}

td_status bench_run(const struct bench_run_config *c, struct bench_result *ret_result,
                    struct td_err *err)
{
    struct run r = {.config = c, .backend = c->openai ? &run_http : &run_grpc};
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_mutex_init(&r.mu, NULL);
    pthread_cond_init(&r.cond, &attr);
    pthread_condattr_destroy(&attr);

    td_status s = run_check(c, err);
    if (!s && c->api_key_file[0]) s = td_api_key_read(c->api_key_file, r.authorization, err);
    if (!s) s = r.backend->check(&r, err);
    int policy_before = 0;
    struct sched_param param_before = {0};
    pthread_getschedparam(pthread_self(), &policy_before, &param_before);
    if (!s && c->realtime) r.result.generator.realtime = go_realtime();
    if (!s) s = r.backend->connect(&r, err);
    /* reading files and arithmetic can wait */
    if (r.result.generator.realtime)
        pthread_setschedparam(pthread_self(), policy_before, &param_before);
    if (!s) s = r.backend->discover(&r, err);
    if (!s) s = run_open_dataset(&r, err);
    if (!s) run_describe_classes(&r);
    if (!s) s = run_plan(&r, err);
    if (!s) run_describe(&r);
    if (r.result.generator.realtime) go_realtime();
    if (!s) s = warm_up(&r, err);
    if (!s) s = offer_load(&r, err);
    if (r.result.generator.realtime)
        pthread_setschedparam(pthread_self(), policy_before, &param_before);
    if (!s) {
        bench_result_summarise(&r.result);
        *ret_result = r.result;
    } else {
        bench_result_free(&r.result);
    }
    bench_dataset_close(r.dataset);
    free(r.free_at_s);
    r.backend->close(&r);
    pthread_cond_destroy(&r.cond);
    pthread_mutex_destroy(&r.mu);
    return s;
}
