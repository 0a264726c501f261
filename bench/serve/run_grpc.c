/* run_grpc.c - see run_flight.h: a request as a call of the router's API.
 *
 *   send --messages--> tokens --status--> end        cancel --status--> end */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench/serve/run_flight.h"
#include "common/base/json.h"
#include "tandem/v1/inference.pb-c.h"

static td_status check(struct run *r, struct td_err *err)
{
    const json_t *body = r->config->extra_body;
    struct extra *x = &r->extra;
    static const char *const known[] = {
        "top_k", "min_p",   "repetition_penalty", "presence_penalty", "frequency_penalty",
        "seed",  "priority"};
    const char *what = "--extra-body", *key;
    json_t *value;
    if (!body) return TD_OK;
    if (!json_is_object(body))
        return td_fail(err, TD_ERR_INVALID, "--extra-body must be a JSON object");
    json_object_foreach((json_t *)(uintptr_t)body, key, value)
    {
        bool is_known = false;
        for (size_t i = 0; i < sizeof known / sizeof *known; i++)
            is_known |= !strcmp(known[i], key);
        if (!is_known)
            return td_fail(
                err, TD_ERR_INVALID,
                "--extra-body: '%.60s' is unknown; known are top_k, min_p, repetition_penalty, "
                "presence_penalty, frequency_penalty, seed, priority",
                key);
    }
    td_status s = td_json_i64(body, what, "top_k", 0, INT32_MAX, &x->top_k, &x->has_top_k, err);
    if (!s) s = td_json_f64(body, what, "min_p", 0, 1, &x->min_p, &x->has_min_p, err);
    if (!s)
        s = td_json_f64(body, what, "repetition_penalty", 0.01, 100, &x->repetition_penalty,
                        &x->has_repetition_penalty, err);
    if (!s) s = td_json_f64(body, what, "presence_penalty", -2, 2, &x->presence_penalty, NULL, err);
    if (!s)
        s = td_json_f64(body, what, "frequency_penalty", -2, 2, &x->frequency_penalty, NULL, err);
    if (!s) s = td_json_i64(body, what, "seed", 0, INT64_MAX, &x->seed, &x->has_seed, err);
    if (!s) s = td_json_i64(body, what, "priority", -100, 100, &x->priority, &x->has_priority, err);
    return s;
}

static void copy_ledger(struct bench_request *q, const Tandem__V1__Ledger *l)
{
    q->has_ledger = true;
    q->stages_us[BENCH_ROUTER_QUEUE] = l->router_queue_us;
    q->stages_us[BENCH_RESERVE] = l->reserve_us;
    q->stages_us[BENCH_PREFILL_QUEUE] = l->prefill_queue_us;
    q->stages_us[BENCH_PREFILL] = l->prefill_us;
    q->stages_us[BENCH_RPC] = l->rpc_us;
    q->stages_us[BENCH_TRANSFER] = l->transfer_us;
    q->stages_us[BENCH_TRANSFER_EXPOSED] = l->transfer_exposed_us;
    q->stages_us[BENCH_DECODE_QUEUE] = l->decode_queue_us;
    q->stages_us[BENCH_FIRST_STEP] = l->first_step_us;
    uint64_t before_us = l->ttft_us + l->transfer_exposed_us + l->decode_queue_us;
    q->stages_us[BENCH_DECODE] = l->e2e_us > before_us ? l->e2e_us - before_us : 0;
    q->predicted_ttft_us = l->predicted_ttft_us;
    q->predicted_tpot_us = l->predicted_tpot_us;
    q->preemptions = l->preemptions;
    q->failovers = l->failovers;
    snprintf(q->prefill_node, sizeof q->prefill_node, "%s", l->prefill_worker);
    snprintf(q->decode_node, sizeof q->decode_node, "%s", l->decode_worker);
    snprintf(q->mode, sizeof q->mode, "%s", l->mode);
}

static void on_message(struct td_rpc_call *call, const ProtobufCMessage *msg, void *user)
{
    (void)call;
    struct flight *f = user;
    struct bench_request *q = f->q;
    const Tandem__V1__GenerateResponse *m = (const Tandem__V1__GenerateResponse *)msg;
    if (f->received && !td_received_take(f->received, m)) f->retry.budget_ms = 0;
    if (m->n_token_ids)
        run_flight_tokens(f, run_since_s(f->run, td_now_ns()), (int32_t)m->n_token_ids);
    if (m->finish_reason == TANDEM__V1__FINISH_REASON__FINISH_NONE) return;
    f->finished = true;
    if (m->usage) {
        q->input_len = (int32_t)m->usage->prompt_tokens;
        q->cached_tokens = (int32_t)m->usage->cached_tokens;
    }
    if (m->ledger) copy_ledger(q, m->ledger);
}

/* Of the trailing metadata; -1: none, or no number. */
static int64_t retry_delay_ms(const struct td_rpc_result *res)
{
    for (size_t i = 0; i < res->n_trailing; i++) {
        if (strcmp(res->trailing[i].key, "retry-delay-ms") != 0) continue;
        char *end;
        long long ms = strtoll(res->trailing[i].value, &end, 10);
        return end != res->trailing[i].value && !*end && ms >= 0 && ms <= INT32_MAX ? ms : -1;
    }
    return -1;
}

static void send_call(struct flight *f);

static void on_timer(void *arg)
{
    struct flight *f = arg;
    td_rpc_timer_cancel(f->timer);
    f->timer = NULL;
    send_call(f);
}

/* Its router is lost: whether it goes on at the next one, after a while. */
static bool go_on(struct flight *f)
{
    uint64_t wait_ms = 0;
    struct run *r = f->run;
    if (!f->received || f->cancelled ||
        !td_retry_next(&f->retry, f->try_ns, td_now_ns(), td_received_n(f->received), r->n_channels,
                       &wait_ms))
        return false;
    f->n_lost++;
    f->q->n_resumes++;
    f->timer = td_rpc_timer_start(r->loop, wait_ms ? (uint32_t)wait_ms : 1, on_timer, f);
    return true;
}

static void on_done(struct td_rpc_call *call, const struct td_rpc_result *res, void *user)
{
    (void)call;
    struct flight *f = user;
    f->call = NULL;
    if (res->code == TD_CODE_UNAVAILABLE && go_on(f)) return;
    enum bench_outcome outcome = BENCH_FAILED;
    const char *error = res->details;
    if (res->code == TD_CODE_OK && f->finished)
        outcome = BENCH_COMPLETED, error = NULL;
    else if (res->code == TD_CODE_OK)
        error = "the stream ended OK without a finish reason";
    else if (f->cancelled)
        outcome = BENCH_UNFINISHED, error = "still running at the end of the grace period";
    else if (res->code == TD_CODE_RESOURCE_EXHAUSTED)
        outcome = BENCH_REJECTED;
    else if (res->code == TD_CODE_DEADLINE_EXCEEDED)
        outcome = BENCH_TIMED_OUT;
    run_flight_end(f, outcome, (int)res->code, error, retry_delay_ms(res));
}

static void set_sampling(const struct flight *f, Tandem__V1__Sampling *s)
{
    const struct bench_run_config *c = f->run->config;
    const struct extra *x = &f->run->extra;
    s->has_seed_case = TANDEM__V1__SAMPLING__HAS_SEED_SEED;
    s->seed = x->has_seed ? (uint64_t)x->seed : f->seed;
    if (c->temperature >= 0)
        s->has_temperature_case = TANDEM__V1__SAMPLING__HAS_TEMPERATURE_TEMPERATURE,
        s->temperature = (float)c->temperature;
    if (c->top_p >= 0)
        s->has_top_p_case = TANDEM__V1__SAMPLING__HAS_TOP_P_TOP_P, s->top_p = (float)c->top_p;
    if (x->has_top_k)
        s->has_top_k_case = TANDEM__V1__SAMPLING__HAS_TOP_K_TOP_K, s->top_k = (int32_t)x->top_k;
    if (x->has_min_p)
        s->has_min_p_case = TANDEM__V1__SAMPLING__HAS_MIN_P_MIN_P, s->min_p = (float)x->min_p;
    if (x->has_repetition_penalty)
        s->has_repetition_penalty_case =
            TANDEM__V1__SAMPLING__HAS_REPETITION_PENALTY_REPETITION_PENALTY,
        s->repetition_penalty = (float)x->repetition_penalty;
    s->presence_penalty = (float)x->presence_penalty;
    s->frequency_penalty = (float)x->frequency_penalty;
}

/* The request's class, and its objectives into *o; a warm-up has none, so that it is not judged. */
static void set_objectives(const struct flight *f, Tandem__V1__GenerateRequest *m,
                           Tandem__V1__Objectives *o)
{
    const struct bench_class *k = &f->run->result.classes[f->q->class_index].of;
    m->slo_class = (char *)(uintptr_t)k->name;
    if (k->slo.ttft_ms > 0)
        o->has_ttft_ms_case = TANDEM__V1__OBJECTIVES__HAS_TTFT_MS_TTFT_MS,
        o->ttft_ms = k->slo.ttft_ms;
    if (k->slo.tpot_ms > 0)
        o->has_tpot_ms_case = TANDEM__V1__OBJECTIVES__HAS_TPOT_MS_TPOT_MS,
        o->tpot_ms = k->slo.tpot_ms;
    if ((k->slo.ttft_ms > 0 || k->slo.tpot_ms > 0) && !f->warming) m->objectives = o;
}

static void send_call(struct flight *f)
{
    static const struct td_rpc_handler handler = {on_message, on_done};
    struct run *r = f->run;
    const struct bench_run_config *c = r->config;
    char id[48], tenant[24];
    Tandem__V1__GenerateRequest m = TANDEM__V1__GENERATE_REQUEST__INIT;
    Tandem__V1__Sampling s = TANDEM__V1__SAMPLING__INIT;
    Tandem__V1__StopConditions stop = TANDEM__V1__STOP_CONDITIONS__INIT;
    Tandem__V1__Objectives objectives = TANDEM__V1__OBJECTIVES__INIT;
    Tandem__V1__TokenIds ids = TANDEM__V1__TOKEN_IDS__INIT;
    m.model = r->model;
    m.sampling = &s;
    m.stop = &stop;
    m.return_token_ids = true;
    if (f->text) {
        m.input_case = TANDEM__V1__GENERATE_REQUEST__INPUT_PROMPT;
        m.prompt = (ProtobufCBinaryData){strlen(f->text), (uint8_t *)(uintptr_t)f->text};
    } else {
        m.input_case = TANDEM__V1__GENERATE_REQUEST__INPUT_TOKEN_IDS;
        m.token_ids = &ids;
        ids.n_ids = (size_t)f->n_ids;
        ids.ids = f->ids;
    }
    snprintf(id, sizeof id, "bench-%llu-%zu", (unsigned long long)c->seed, f->index);
    m.request_id = id;
    stop.has_max_tokens_case = TANDEM__V1__STOP_CONDITIONS__HAS_MAX_TOKENS_MAX_TOKENS;
    stop.max_tokens = f->q->want_len;
    stop.ignore_eos = c->ignore_eos;
    set_sampling(f, &s);
    m.priority = (int32_t)r->extra.priority;
    if (c->n_tenants) {
        snprintf(tenant, sizeof tenant, "tenant-%u", f->q->tenant);
        m.tenant = tenant;
    }
    if (c->send_slo) set_objectives(f, &m, &objectives);
    if (c->resume_ms && !f->received) {
        f->received = td_received_create(1);
        TD_ASSERT(f->received); /* small */
        f->retry.budget_ms = c->resume_ms;
    }
    if (f->received) td_received_resume(f->received, &m);
    f->try_ns = td_now_ns();
    const struct td_rpc_metadata key = {"authorization", r->authorization};
    f->call = td_rpc_call_start(r->channels[(f->index + f->n_lost) % r->n_channels], &r->generate,
                                &m.base, 0, false, &key, r->authorization[0] ? 1 : 0, &handler,
                                f); /* packs m */
    if (f->received) return;        /* it may be sent again */
    free(f->ids);
    f->ids = NULL;
}

static void cancel_call(struct flight *f)
{
    if (f->call) {
        td_rpc_call_cancel(f->call);
        return;
    }
    td_rpc_timer_cancel(f->timer);
    f->timer = NULL;
    run_flight_end(f, BENCH_UNFINISHED, TD_CODE_UNAVAILABLE,
                   "its router was lost; no other had taken it at the end of the grace period", -1);
}

static void forget(struct flight *f) { td_received_free(f->received); }

static void post(struct run *r, void (*fn)(void *arg), void *arg)
{
    td_rpc_loop_post(r->loop, fn, arg);
}

static void close_channel(struct run *r)
{
    for (uint32_t i = 0; i < r->n_channels; i++) td_rpc_channel_destroy(r->channels[i]);
    if (r->loop) td_rpc_loop_destroy(r->loop);
}

const struct run_backend run_grpc = {
    .name = "grpc",
    .check = check,
    .connect = run_grpc_connect,
    .discover = run_grpc_discover,
    .count_tokens = run_grpc_count_tokens,
    .post = post,
    .send = send_call,
    .cancel = cancel_call,
    .forget = forget,
    .code_name = run_grpc_code_name,
    .close = close_channel,
};
