/* run_flight.c - see run_flight.h.
 *
 *   made (pacer) --post--> started: sent_s --messages--> first_s, gaps, last_s --status--> end_s, outcome, place given back, freed
 *                             '--run_cancel_live--> cancelled --status--> UNFINISHED */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench/serve/run_flight.h"

void run_flight_free(struct flight *f)
{
    free(f->ids.ids);
    free(f);
}

/* Request q with a prompt of n_ids tokens (filled by the caller) or a text. NULL = no memory. */
struct flight *run_flight_make(struct run *r, struct bench_request *q, size_t index, const char *text, int32_t n_ids)
{
    const struct bench_run_config *c = r->config;
    struct flight *f = calloc(1, sizeof *f);
    if (!f) return NULL;
    f->run = r;
    f->q = q;
    tandem__v1__generate_request__init(&f->m);
    tandem__v1__sampling__init(&f->sampling);
    tandem__v1__stop_conditions__init(&f->stop);
    tandem__v1__objectives__init(&f->objectives);
    tandem__v1__token_ids__init(&f->ids);
    f->m.model = r->model;
    f->m.sampling = &f->sampling;
    f->m.stop = &f->stop;
    f->m.return_token_ids = true;
    if (text) {
        f->m.input_case = TANDEM__V1__GENERATE_REQUEST__INPUT_PROMPT;
        f->m.prompt = (ProtobufCBinaryData){strlen(text), (uint8_t *)(uintptr_t)text};
    } else {
        f->m.input_case = TANDEM__V1__GENERATE_REQUEST__INPUT_TOKEN_IDS;
        f->m.token_ids = &f->ids;
        f->ids.n_ids = (size_t)n_ids;
        f->ids.ids = malloc(((size_t)n_ids + 1) * sizeof(int32_t));
        if (!f->ids.ids) {
            free(f);
            return NULL;
        }
    }
    snprintf(f->id, sizeof f->id, "bench-%llu-%zu", (unsigned long long)c->seed, index);
    f->m.request_id = f->id;
    f->stop.has_max_tokens_case = TANDEM__V1__STOP_CONDITIONS__HAS_MAX_TOKENS_MAX_TOKENS;
    f->stop.max_tokens = q->want_len;
    f->stop.ignore_eos = c->ignore_eos;

    Tandem__V1__Sampling *s = &f->sampling;
    const struct extra *x = &r->extra;
    struct bench_rng rng = bench_rng_at(c->seed, WHAT_SAMPLING, index);
    s->has_seed_case = TANDEM__V1__SAMPLING__HAS_SEED_SEED;
    s->seed = x->has_seed ? (uint64_t)x->seed : bench_rng_u64(&rng);
    if (c->temperature >= 0) s->has_temperature_case = TANDEM__V1__SAMPLING__HAS_TEMPERATURE_TEMPERATURE, s->temperature = (float)c->temperature;
    if (c->top_p >= 0) s->has_top_p_case = TANDEM__V1__SAMPLING__HAS_TOP_P_TOP_P, s->top_p = (float)c->top_p;
    if (x->has_top_k) s->has_top_k_case = TANDEM__V1__SAMPLING__HAS_TOP_K_TOP_K, s->top_k = (int32_t)x->top_k;
    if (x->has_min_p) s->has_min_p_case = TANDEM__V1__SAMPLING__HAS_MIN_P_MIN_P, s->min_p = (float)x->min_p;
    if (x->has_repetition_penalty)
        s->has_repetition_penalty_case = TANDEM__V1__SAMPLING__HAS_REPETITION_PENALTY_REPETITION_PENALTY,
        s->repetition_penalty = (float)x->repetition_penalty;
    s->presence_penalty = (float)x->presence_penalty;
    s->frequency_penalty = (float)x->frequency_penalty;
    f->m.priority = (int32_t)x->priority;

    if (c->n_tenants) {
        snprintf(f->tenant, sizeof f->tenant, "tenant-%u", q->tenant);
        f->m.tenant = f->tenant;
    }
    const struct bench_class *k = &r->result.classes[q->class_index].of;
    if (c->send_slo) {
        f->m.slo_class = (char *)(uintptr_t)k->name;
        if (k->slo.ttft_ms > 0) f->objectives.has_ttft_ms_case = TANDEM__V1__OBJECTIVES__HAS_TTFT_MS_TTFT_MS, f->objectives.ttft_ms = k->slo.ttft_ms;
        if (k->slo.tpot_ms > 0) f->objectives.has_tpot_ms_case = TANDEM__V1__OBJECTIVES__HAS_TPOT_MS_TPOT_MS, f->objectives.tpot_ms = k->slo.tpot_ms;
        if (k->slo.ttft_ms > 0 || k->slo.tpot_ms > 0) f->m.objectives = &f->objectives;
    }
    return f;
}

static void add_gap(struct flight *f, double gap_s)
{
    struct bench_request *q = f->q;
    uint32_t n = q->n_messages - 1; /* gaps so far */
    if (n == f->gaps_capacity) {
        f->gaps_capacity = f->gaps_capacity ? 2 * f->gaps_capacity : 32;
        q->gaps_s = realloc(q->gaps_s, f->gaps_capacity * sizeof *q->gaps_s);
        TD_ASSERT(q->gaps_s);
    }
    q->gaps_s[n] = gap_s;
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
    double now_s = run_since_s(f->run, td_now_ns());
    if (m->n_token_ids) {
        if (q->n_messages == 0) q->first_s = now_s;
        else add_gap(f, now_s - q->last_s);
        q->last_s = now_s;
        q->n_messages++;
        q->output_len += (int32_t)m->n_token_ids;
    }
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

static void on_done(struct td_rpc_call *call, const struct td_rpc_result *res, void *user)
{
    (void)call;
    struct flight *f = user;
    struct run *r = f->run;
    struct bench_request *q = f->q;
    q->end_s = run_since_s(r, td_now_ns());
    q->code = (int)res->code;
    const char *error = res->details;
    if (res->code == GRPC_STATUS_OK && f->finished) q->outcome = BENCH_COMPLETED, error = "";
    else if (res->code == GRPC_STATUS_OK) q->outcome = BENCH_FAILED, error = "the stream ended OK without a finish reason";
    else if (f->cancelled) q->outcome = BENCH_UNFINISHED, error = "still running at the end of the grace period";
    else if (res->code == GRPC_STATUS_RESOURCE_EXHAUSTED) q->outcome = BENCH_REJECTED;
    else if (res->code == GRPC_STATUS_DEADLINE_EXCEEDED) q->outcome = BENCH_TIMED_OUT;
    else q->outcome = BENCH_FAILED;
    if (q->outcome != BENCH_COMPLETED) q->error = strdup(error);
    q->retry_delay_ms = retry_delay_ms(res);
    if (f->next) f->next->prev = f->prev;
    *f->prev = f->next;
    run_flight_free(f);

    pthread_mutex_lock(&r->mu);
    if (r->max_active) r->free_at_s[(r->free_head + r->n_free++) % r->max_active] = q->end_s;
    r->n_active--;
    r->n_done++;
    pthread_cond_signal(&r->cond);
    pthread_mutex_unlock(&r->mu);
}

void run_flight_start(void *arg)
{
    static const struct td_rpc_handler handler = {on_message, on_done};
    struct flight *f = arg;
    struct run *r = f->run;
    f->next = r->live;
    f->prev = &r->live;
    if (f->next) f->next->prev = &f->next;
    r->live = f;
    f->q->sent_s = run_since_s(r, td_now_ns());
    f->call = td_rpc_call_start(r->channel, &r->generate, &f->m.base, 0, false, NULL, 0, &handler, f);
    free(f->ids.ids); /* packed */
    f->ids.ids = NULL;
}

void run_cancel_live(void *arg)
{
    struct run *r = arg;
    for (struct flight *f = r->live; f; f = f->next) {
        f->cancelled = true;
        td_rpc_call_cancel(f->call);
    }
}
