/* worker.c - see worker.h.
 *
 * Request states and who moves them (engine thread):
 *
 *   accept -> SCHEDULED, waiting --role.admit--> IMPORT (decode, remote prefill) --SLOT_READY-->
 *       SCHEDULED, running
 *                |                           \-> SCHEDULED, running (prefill, local prefill)
 *                                            --preempted--> waiting
 *                |                                   |      \--last token--> OVER
 *                |                                   \--prefill done--> SENDING --OP_DONE--> OVER
 *                \--- cancel, deadline, error, hand-over: td_worker_end ---> RETIRING (a transfer
 *                    must let go) --terminal event--> OVER
 *   OVER + the call's end = freed.
 *
 * Invariants: (1) a req in RETIRING or with xfer_live keeps its blocks; (2) only a SCHEDULED req is
 * on a list of the scheduler;
 * (3) n_live counts reqs from accept to free, so 0 means that every pool is back to empty. */
#include "common/worker/worker.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/address.h"
#include "common/base/clock.h"
#include "common/base/fault.h"
#include "common/base/descriptors.h"
#include "common/base/hash.h"
#include "common/base/log.h"
#include "common/base/metrics.h"
#include "common/base/signals.h"
#include "common/rpc/rpc_status.h"
#include "common/base/metrics_http.h"
#include "common/worker/registry.h"
#include "kernels/device.h"

/* after drain: calls get their status and end within this, or are cancelled */
#define STOP_BOUND_MS 5000

/* ---- mail: rpc thread -> engine thread ------------------------------------------------------- */

static void mail_post(struct td_worker *w, struct td_mail *m)
{
    pthread_mutex_lock(&w->mail_lock);
    m->next = NULL;
    *w->mail_tail = m;
    w->mail_tail = &m->next;
    pthread_mutex_unlock(&w->mail_lock);
    td_doorbell_ring(&w->bell);
}

static struct td_mail *mail_take_all(struct td_worker *w)
{
    pthread_mutex_lock(&w->mail_lock);
    struct td_mail *m = w->mail_head;
    w->mail_head = NULL;
    w->mail_tail = &w->mail_head;
    pthread_mutex_unlock(&w->mail_lock);
    return m;
}

/* ---- accepting, on the rpc thread ------------------------------------------------------------ */

static td_status seq_fill(struct td_worker *w, struct td_seq *seq, const Tandem__V1__Sequence *in,
                          struct td_err *err)
{
    const Tandem__V1__SamplingSpec *p = in->sampling;
    if (!p) return td_fail(err, TD_ERR_INVALID, "seq.sampling is missing");
    if (in->n_tokens > INT32_MAX)
        return td_fail(err, TD_ERR_INVALID, "seq.tokens has %zu ids, limit %d", in->n_tokens,
                       INT32_MAX);
    if (in->n_tokens > 0 && in->n_prompt > in->n_tokens)
        return td_fail(err, TD_ERR_INVALID, "n_prompt is %u, must be 1..%zu", in->n_prompt,
                       in->n_tokens);
    if (p->n_logit_bias > TD_MAX_LOGIT_BIAS)
        return td_fail(err, TD_ERR_INVALID, "sampling.logit_bias has %zu entries, limit %d",
                       p->n_logit_bias, TD_MAX_LOGIT_BIAS);
    if (p->n_stop_token_ids > TD_MAX_STOP_TOKENS)
        return td_fail(err, TD_ERR_INVALID, "sampling.stop_token_ids has %zu ids, limit %d",
                       p->n_stop_token_ids, TD_MAX_STOP_TOKENS);
    struct td_logit_bias bias[TD_MAX_LOGIT_BIAS];
    for (size_t i = 0; i < p->n_logit_bias; i++)
        bias[i] = (struct td_logit_bias){p->logit_bias[i]->token, p->logit_bias[i]->bias};
    struct td_sampling s = {.temperature = p->temperature,
                            .top_k = p->top_k,
                            .top_p = p->top_p,
                            .min_p = p->min_p,
                            .repetition_penalty = p->repetition_penalty,
                            .presence_penalty = p->presence_penalty,
                            .frequency_penalty = p->frequency_penalty,
                            .seed = p->seed,
                            .n_logprobs = p->n_logprobs,
                            .logit_bias = bias,
                            .n_logit_bias = (int32_t)p->n_logit_bias};
    seq->request = in->request;
    seq->sched.order = in->order ? in->order : in->request;
    seq->attempt = in->attempt;
    seq->sched.priority = in->priority;
    if (in->cache_salt.len && in->cache_salt.len != TD_PREFIX_SALT_BYTES)
        return td_fail(err, TD_ERR_INVALID, "seq.cache_salt has %zu bytes, must have 0 or %d",
                       in->cache_salt.len, TD_PREFIX_SALT_BYTES);
    if (in->cache_salt.len) {
        const uint8_t *b = in->cache_salt.data;
        for (int i = 0; i < 8; i++) {
            seq->salt.lo |= (uint64_t)b[i] << 8 * i;
            seq->salt.hi |= (uint64_t)b[8 + i] << 8 * i;
        }
    }
    return td_engine_seq_set(w->engine, seq, in->tokens, (int32_t)in->n_tokens,
                             (int32_t)in->n_prompt, &s, p->stop_token_ids,
                             (int32_t)p->n_stop_token_ids, p->max_tokens, err);
}

static struct td_req *refuse(struct td_worker *w, struct td_rpc_call *call, enum td_code code,
                             const char *details)
{
    atomic_fetch_add(&w->calls_refused, 1);
    td_rpc_call_finish(call, code, details, NULL, 0);
    return NULL;
}

/* ---- who calls ------------------------------------------------------------------------------- */

static void refuse_stranger(struct td_worker *w, struct td_rpc_call *call, enum td_code code,
                            const char *why)
{
    uint32_t n_dropped;
    td_rpc_call_finish(call, code, why, NULL, 0);
    if (td_log_pace_due(&w->stranger_pace, &n_dropped))
        td_warn("call_refused", "peer=%s method=%s code=%d dropped=%u reason=\"%s\"",
                td_rpc_call_peer(call), td_rpc_call_path(call), (int)code, n_dropped, why);
}

void td_worker_on_open(struct td_rpc_call *call, void *ctx)
{
    struct td_worker *w = ctx;
    struct td_call_proof proof;
    const char *text, *why;
    if (w->id.routers && !td_rpc_call_peer_verified(call)) {
        refuse_stranger(
            w, call, TD_CODE_UNAUTHENTICATED,
            "this worker takes calls of the router only: the caller shows no certificate");
    } else if (w->id.routers && !td_identity_peer_is(call, w->id.routers)) {
        refuse_stranger(w, call, TD_CODE_PERMISSION_DENIED,
                        "this worker takes calls of the router only: no name in the caller's "
                        "certificate is one of tls_router_names");
    } else if (!w->id.secret) {
        return;
    } else if (!(text = td_rpc_call_metadata(call, TD_CALL_PROOF_KEY))) {
        refuse_stranger(w, call, TD_CODE_UNAUTHENTICATED,
                        "this worker wants a proof of the cluster secret with each call: only the "
                        "router that it has joined can make one");
    } else if (!w->has_session) {
        refuse_stranger(w, call, TD_CODE_UNAUTHENTICATED,
                        "this worker has joined no router since it started");
    } else if (td_call_proof_parse(text, &proof)) {
        refuse_stranger(w, call, TD_CODE_UNAUTHENTICATED,
                        "metadata " TD_CALL_PROOF_KEY " is not a proof of this version");
    } else if (!td_call_proof_check(w->id.secret, &w->nonces, &w->replay, td_rpc_call_path(call),
                                    &proof, &why)) {
        refuse_stranger(w, call, TD_CODE_PERMISSION_DENIED, why);
    }
}

/* What was proved is for these numbers. */
static bool is_proved(struct td_worker *w, struct td_rpc_call *call, uint64_t request,
                      uint32_t attempt)
{
    struct td_call_proof proof;
    const char *text = td_rpc_call_metadata(call, TD_CALL_PROOF_KEY);
    if (!w->id.secret || (text && !td_call_proof_parse(text, &proof) && proof.request == request &&
                          proof.attempt == attempt))
        return true;
    refuse_stranger(w, call, TD_CODE_PERMISSION_DENIED,
                    "the proof is for another request or attempt than the call");
    return false;
}

void td_worker_on_prove(struct td_rpc_call *call, const ProtobufCMessage *msg, void *ctx)
{
    struct td_worker *w = ctx;
    const ProtobufCBinaryData key = {sizeof w->instance_key, w->instance_key};
    uint8_t mac[TD_CLUSTER_MAC_BYTES];
    td_status s = td_instance_prove(w->id.secret, &w->nonces, &key,
                                    &((const Tandem__V1__ProveRequest *)msg)->nonce, mac);
    if (s) {
        td_rpc_call_finish(call, td_rpc_code(s),
                           "nonce must have 32 bytes, and this program must have libcrypto", NULL,
                           0);
        return;
    }
    Tandem__V1__ProveResponse out = TANDEM__V1__PROVE_RESPONSE__INIT;
    out.mac = (ProtobufCBinaryData){sizeof mac, mac};
    td_rpc_call_send(call, &out.base);
    td_rpc_call_finish(call, TD_CODE_OK, NULL, NULL, 0);
}

struct td_req *td_worker_accept(struct td_worker *w, struct td_rpc_call *call,
                                const Tandem__V1__Sequence *in, bool local_prefill,
                                const ProtobufCBinaryData *grant, uint32_t n_skip_blocks)
{
    struct td_err err = {0};
    if (in && !is_proved(w, call, in->request, in->attempt)) return NULL;
    if (atomic_load(&w->draining))
        return refuse(w, call, TD_CODE_UNAVAILABLE,
                      "this worker is draining; send the request to another");
    if (!in) return refuse(w, call, TD_CODE_INVALID_ARGUMENT, "seq is missing");
    struct td_seq *seq = td_engine_seq_get(w->engine);
    if (!seq)
        return refuse(w, call, TD_CODE_RESOURCE_EXHAUSTED,
                      "max_seqs requests are live on this worker");
    td_status s = seq_fill(w, seq, in, &err);
    struct td_req *r = &w->reqs[seq->index];
    *r = (struct td_req){.seq = seq,
                         .call = call,
                         .state = TD_REQ_SCHEDULED,
                         .local_prefill = local_prefill,
                         .n_skip = n_skip_blocks,
                         .n_sent = n_skip_blocks,
                         .arrived_ns = td_now_ns()};
    if (!s && grant && grant->len) {
        r->grant.data = malloc(grant->len);
        if (!r->grant.data)
            s = td_fail(&err, TD_ERR_AGAIN, "no memory for a grant of %zu bytes", grant->len);
        else {
            memcpy(r->grant.data, grant->data, grant->len);
            r->grant.len = grant->len;
        }
    }
    if (s) {
        td_engine_seq_put(w->engine, seq);
        return refuse(w, call, td_rpc_code(s), err.msg);
    }
    seq->owner = r;
    td_rpc_call_ref(call);
    td_rpc_call_set_user(call, r);
    r->mail_new = (struct td_mail){.kind = TD_MAIL_NEW, .req = r};
    r->mail_ended = (struct td_mail){.kind = TD_MAIL_ENDED, .req = r};
    atomic_fetch_add(&w->n_live, 1);
    mail_post(w, &r->mail_new);
    return r;
}

void td_worker_on_end(struct td_rpc_call *call, bool cancelled, void *ctx)
{
    (void)cancelled;
    struct td_req *r = td_rpc_call_user(call);
    if (!r) return; /* refused at accept */
    td_rpc_call_set_user(call, NULL);
    mail_post(ctx, &r->mail_ended);
}

void td_worker_on_abort(struct td_rpc_call *call, const ProtobufCMessage *msg, void *ctx)
{
    const Tandem__V1__AbortRequest *in = (const Tandem__V1__AbortRequest *)msg;
    if (!is_proved(ctx, call, in->request, in->attempt)) return;
    struct td_mail *m = malloc(sizeof *m);
    if (!m) {
        td_rpc_call_finish(call, TD_CODE_RESOURCE_EXHAUSTED, "no memory", NULL, 0);
        return;
    }
    *m = (struct td_mail){.kind = TD_MAIL_ABORT, .request = in->request, .attempt = in->attempt};
    mail_post(ctx, m);
    Tandem__V1__AbortResponse out = TANDEM__V1__ABORT_RESPONSE__INIT;
    td_rpc_call_send(call, &out.base);
    td_rpc_call_finish(call, TD_CODE_OK, NULL, NULL, 0);
}

void td_worker_on_abort_end(struct td_rpc_call *call, bool cancelled, void *ctx)
{
    (void)call;
    (void)cancelled;
    (void)ctx;
}

/* ---- lists ----------------------------------------------------------------------------------- */

static void set_waiting(struct td_worker *w, struct td_req *r)
{
    td_scheduler_wait(w->sched, &r->seq->sched);
    r->state = TD_REQ_SCHEDULED;
}

void td_worker_set_running(struct td_worker *w, struct td_req *r)
{
    td_scheduler_run(w->sched, &r->seq->sched);
    r->state = TD_REQ_SCHEDULED;
}

/* ---- the end of a request -------------------------------------------------------------------- */

static void maybe_free(struct td_worker *w, struct td_req *r)
{
    if (!r->call_ended || r->xfer_live || r->state != TD_REQ_OVER) return;
    free(r->grant.data);
    r->grant.data = NULL;
    td_rpc_call_unref(r->call);
    r->call = NULL;
    r->state = TD_REQ_FREE;
    if (r->live_prev)
        r->live_prev->live_next = r->live_next;
    else
        w->live = r->live_next;
    if (r->live_next) r->live_next->live_prev = r->live_prev;
    struct td_seq *seq = r->seq;
    td_engine_seq_put(w->engine, seq);
    atomic_fetch_sub(&w->n_live, 1);
}

static void give_back(struct td_worker *w, struct td_req *r)
{
    td_engine_release(w->engine, r->seq);
    r->state = TD_REQ_OVER;
    maybe_free(w, r);
}

static void end_with(struct td_worker *w, struct td_req *r, enum td_code code, const char *details)
{
    if (r->state == TD_REQ_OVER || r->state == TD_REQ_RETIRING) return;
    if (!r->finished) td_rpc_call_finish(r->call, code, details, NULL, 0);
    r->finished = true;
    td_scheduler_detach(w->sched, &r->seq->sched);
    if (r->xfer_live) {
        r->state = TD_REQ_RETIRING;
        w->role->xfer_stop(w, r, details ? details : "finished");
        return;
    }
    give_back(w, r);
}

void td_worker_end(struct td_worker *w, struct td_req *r, td_status status, const char *details)
{
    end_with(w, r, td_rpc_code(status), details);
}

void td_worker_finish_ok(struct td_worker *w, struct td_req *r)
{
    end_with(w, r, TD_CODE_OK, NULL);
}

void td_worker_xfer_over(struct td_worker *w, struct td_req *r)
{
    r->xfer_live = false;
    if (r->state == TD_REQ_RETIRING) give_back(w, r);
}

static void take_mail(struct td_worker *w)
{
    struct td_mail *next;
    for (struct td_mail *m = mail_take_all(w); m; m = next) {
        next = m->next;
        struct td_req *r = m->req;
        switch (m->kind) {
        case TD_MAIL_NEW:
            r->live_next = w->live;
            if (w->live) w->live->live_prev = r;
            w->live = r;
            w->calls_taken++;
            set_waiting(w, r);
            break;
        case TD_MAIL_ENDED:
            r->call_ended = true;
            r->finished = true; /* the call is gone: there is nobody to tell */
            if (r->state == TD_REQ_OVER || r->state == TD_REQ_RETIRING)
                maybe_free(w, r);
            else
                end_with(w, r, TD_CODE_CANCELLED, "call cancelled");
            break;
        case TD_MAIL_ABORT:
            for (struct td_req *q = w->live, *q_next; q; q = q_next) {
                q_next = q->live_next;
                if (q->seq->request == m->request && q->seq->attempt <= m->attempt)
                    td_worker_end(w, q, TD_ERR_CANCELLED, "aborted by the router");
            }
            free(m);
            break;
        }
    }
}

/* ---- the step loop --------------------------------------------------------------------------- */

/* A path that could not be had is never silent: the operator asked for it by having the devices. */
static void log_path(const struct td_xfer_event *ev)
{
    char q[200];
    td_log_quote(q, sizeof q, ev->reason);
    const char *path = td_xfer_path_name(ev->path);
    if (ev->kind == TD_XFER_PEER_REFUSED)
        td_warn("kv_peer_refused", "path=%s reason=%s others=%u action=close", path, q, ev->id);
    else if (ev->status == TD_OK)
        td_info("kv_path", "path=%s reason=%s", path, q);
    else
        td_warn("kv_path_failed", "path=%s status=%s reason=%s action=next_path", path,
                td_status_name(ev->status), q);
}

static void take_xfer_events(struct td_worker *w)
{
    struct td_xfer_event ev[16];
    size_t n;
    while ((n = td_xfer_poll(w->xfer, ev, 16)) > 0)
        for (size_t i = 0; i < n; i++) w->role->xfer_event(w, &w->reqs[ev[i].user], &ev[i]);
    while (td_xfer_poll_path(w->xfer, &ev[0])) log_path(&ev[0]);
}

static td_status admit(void *ctx, struct td_sched_seq *sched)
{
    struct td_worker *w = ctx;
    struct td_req *r = ((struct td_seq *)(void *)sched)->owner;
    r->state = TD_REQ_IMPORT; /* on no list while the role decides */
    td_status s = w->role->admit(w, r);
    if (s == TD_ERR_AGAIN)
        r->state = TD_REQ_SCHEDULED;
    else if (!r->admitted_ns)
        r->admitted_ns = td_now_ns();
    return s;
}

/* The batch as the router's latency model counts it. */
static Tandem__V1__StepReport step_report(const struct td_sched_load *load)
{
    Tandem__V1__StepReport r = TANDEM__V1__STEP_REPORT__INIT;
    r.prefill_tokens = (uint32_t)load->prefill_rows;
    r.decode_seqs = (uint32_t)load->decode_rows;
    r.attention_work = load->attention_work_x2 / 2;
    r.context_tokens = load->context_tokens;
    return r;
}

/* A busy worker's step lasts from the end of the one before: what happens between two steps is
 * part of every token's time. */
static void tell_step(struct td_worker *w, Tandem__V1__StepReport *report, uint64_t start_ns,
                      uint64_t end_ns)
{
    uint64_t us = (end_ns - (w->last_step_ns ? w->last_step_ns : start_ns)) / TD_NS_PER_US;
    report->wall_us = us > UINT32_MAX ? UINT32_MAX : (uint32_t)us;
    w->last_step_ns = end_ns;
    pthread_mutex_lock(&w->snap_lock);
    if (w->report.n_steps < TD_WORKER_MAX_STEPS) w->report.steps[w->report.n_steps++] = *report;
    pthread_mutex_unlock(&w->snap_lock);
}

/* The others hold parts of the model and of every sequence's KV: without one of them this worker
 * is nothing. Its requests move as from any dead worker. */
static _Noreturn void ranks_lost(const struct td_err *err)
{
    char q[300];
    td_error("ranks_lost", "reason=%s action=exit", td_log_quote(q, sizeof q, err->msg));
    _exit(1);
}

/* Without its device a worker has no KV and will have none: it takes no more requests, tells the
 * router with the registry's next tick, ends what it holds so that the router moves it, and the
 * main thread ends the process. */
static void device_lost(struct td_worker *w, const char *msg)
{
    char q[TD_ERR_MSG_MAX + 8];
    if (atomic_exchange(&w->device_lost, true)) return;
    td_error("device_lost", "live=%u msg=%s action=leave", atomic_load(&w->n_live),
             td_log_quote(q, sizeof q, msg));
    atomic_store(&w->draining, true);
    atomic_store(&w->hand_over, true); /* the loop's next turn, and every one after it */
    kill(getpid(), SIGTERM);
}

static bool step(struct td_worker *w)
{
    struct td_sched_load load;
    uint64_t n_preempted = w->sched->n_preemptions;
    int32_t n = td_engine_batch(w->engine, w->items, &load);
    if (n == 0) return w->sched->n_preemptions > n_preempted;
    uint64_t start = td_now_ns();
    Tandem__V1__StepReport report = step_report(&load);
    for (int32_t i = 0; i < n; i++) {
        struct td_req *r = w->items[i].seq->owner;
        if (!r->first_run_ns) r->first_run_ns = start;
    }
    w->prefill_tokens += load.prefill_rows;
    w->decode_tokens += load.decode_rows;
    td_fault_point("step_begun");
    struct td_err err = {0};
    td_status s = td_engine_step(w->engine, w->items, n, &err);
    uint64_t end = td_now_ns();
    w->steps++;
    tell_step(w, &report, start, end);
    if (s == TD_ERR_PEER) ranks_lost(&err);
    if (s == TD_ERR_DEVICE) {
        device_lost(w, err.msg);
        return true;
    }
    if (s) {
        td_error("step_failed", "items=%d status=%s msg=\"%s\" action=fail_batch", n,
                 td_status_name(s), err.msg);
        for (int32_t i = 0; i < n; i++)
            td_worker_end(w, w->items[i].seq->owner, TD_ERR_INTERNAL, err.msg);
        return true;
    }
    for (int32_t i = 0; i < n; i++) {
        struct td_req *r = w->items[i].seq->owner;
        if (w->items[i].status)
            td_worker_end(w, r, TD_ERR_INTERNAL,
                          "the model gave no finite logit for this sequence");
        else
            w->role->stepped(w, r, &w->items[i], start, end);
    }
    return true;
}

/* Registered at boot, set by the engine thread from the same numbers as the snapshot. Totals are
 * kept here, so a counter gets the difference. */
static struct {
    struct td_metric *kv_usage, *running, *waiting, *preemptions, *prompt_tokens, *output_tokens,
        *prefix_queries, *prefix_hits, *sent, *received, *steps;
    struct td_metric *peers[TD_XFER_N_PATHS], *path_bytes[TD_XFER_N_PATHS], *fallbacks, *fenced,
        *digest_ok, *digest_bad, *rail_errors;
    struct td_metric *windows, *wide, *evicted, *flushes, *bad_frames, *refused_peers,
        *stale_frames;
    uint64_t seen[8], path_seen[TD_XFER_N_PATHS], kv_seen[12];
} metrics;

static void open_metrics(void)
{
    metrics.kv_usage =
        td_gauge("td_kv_cache_usage_ratio", "", "KV blocks held by live requests over all blocks");
    metrics.running = td_gauge("td_num_requests_running", "", "Requests in the step loop");
    metrics.waiting = td_gauge("td_num_requests_waiting", "", "Requests waiting for KV blocks");
    metrics.preemptions = td_counter("td_num_preemptions_total", "",
                                     "Sequences thrown out of the KV pool and computed again");
    metrics.prompt_tokens = td_counter("td_prompt_tokens_total", "", "Prompt tokens computed here");
    metrics.output_tokens =
        td_counter("td_generation_tokens_total", "", "Decode steps of sequences, one token each");
    metrics.prefix_queries =
        td_counter("td_prefix_cache_queries_total", "", "Tokens looked up in the prefix cache");
    metrics.prefix_hits =
        td_counter("td_prefix_cache_hits_total", "", "Tokens found in the prefix cache");
    metrics.sent = td_counter("td_kv_transfer_bytes_total", "direction=\"sent\"",
                              "KV bytes moved between workers");
    metrics.received = td_counter("td_kv_transfer_bytes_total", "direction=\"received\"",
                                  "KV bytes moved between workers");
    metrics.steps = td_counter("td_engine_steps_total", "", "Batches run");
    static const char *const path_label[TD_XFER_N_PATHS] = {"",
                                                            "path=\"tcp\"",
                                                            "path=\"shm\"",
                                                            "path=\"rdma\"",
                                                            "path=\"cuda-ipc\"",
                                                            "path=\"shm-staged\""};
    for (int p = TD_XFER_PATH_TCP; p < TD_XFER_N_PATHS; p++) {
        metrics.peers[p] = td_gauge("td_kv_transfer_peers", path_label[p],
                                    "KV connections that stand, by the path chosen");
        metrics.path_bytes[p] = td_counter("td_kv_transfer_path_bytes_total", path_label[p],
                                           "KV bytes sent and received, by path");
    }
    metrics.fallbacks = td_counter("td_kv_transfer_fallbacks_total", "",
                                   "KV connections that fell back to a worse path");
    metrics.fenced =
        td_counter("td_kv_transfer_fenced_total", "",
                   "Grants whose writer was fenced because it could not say that it had retired");
    metrics.digest_ok =
        td_counter("td_kv_digest_blocks_total", "", "KV blocks whose digest was compared");
    metrics.digest_bad = td_counter("td_kv_digest_mismatches_total", "",
                                    "KV blocks that differed from what the sender read");
    metrics.evicted = td_counter("td_kv_transfer_evicted_total", "",
                                 "Grants whose writer did not answer and lost its memory windows");
    metrics.windows = td_counter("td_rdma_windows_total", "", "Memory windows opened for grants");
    metrics.wide =
        td_counter("td_rdma_wide_windows_total", "",
                   "Grants whose windows covered blocks of others, for want of enough windows");
    metrics.flushes =
        td_counter("td_rdma_gpu_flushes_total", "",
                   "READs behind NICs' writes to GPU memory, one for each rail and round");
    metrics.rail_errors =
        td_counter("td_rdma_rail_errors_total", "", "Errors of RDMA devices and their links");
    metrics.bad_frames =
        td_counter("td_kv_bad_frames_total", "",
                   "Frames on the KV port that broke the protocol; each ended its connection");
    metrics.refused_peers = td_counter("td_kv_refused_peers_total", "",
                                       "Connections to the KV port that were turned away");
    metrics.stale_frames = td_counter("td_kv_stale_frames_total", "",
                                      "KV frames of grants or attempts that are over; dropped");
}

static void count(struct td_metric *m, uint64_t *seen, uint64_t total)
{
    if (total > *seen) td_metric_add(m, total - *seen);
    *seen = total;
}

static void update_metrics(const struct td_worker *w, const struct td_kv_pool_stats *kv,
                           const struct td_xfer_stats *xs)
{
    td_metric_set(metrics.kv_usage, (double)kv->n_held / (double)kv->n_blocks);
    td_metric_set(metrics.running, w->sched->n_running);
    td_metric_set(metrics.waiting, w->sched->n_waiting);
    count(metrics.preemptions, &metrics.seen[0], w->sched->n_preemptions);
    count(metrics.prompt_tokens, &metrics.seen[1], w->prefill_tokens);
    count(metrics.output_tokens, &metrics.seen[2], w->decode_tokens);
    count(metrics.prefix_queries, &metrics.seen[3], kv->n_prefix_queries_tokens);
    count(metrics.prefix_hits, &metrics.seen[4], kv->n_prefix_hit_tokens);
    count(metrics.sent, &metrics.seen[5], xs->bytes_sent);
    count(metrics.received, &metrics.seen[6], xs->bytes_received);
    count(metrics.steps, &metrics.seen[7], w->steps);
    for (int p = TD_XFER_PATH_TCP; p < TD_XFER_N_PATHS; p++) {
        td_metric_set(metrics.peers[p], xs->conns_by_path[p]);
        count(metrics.path_bytes[p], &metrics.path_seen[p], xs->bytes_by_path[p]);
    }
    count(metrics.fallbacks, &metrics.kv_seen[0], xs->n_fallbacks);
    count(metrics.fenced, &metrics.kv_seen[1], xs->n_fenced);
    count(metrics.digest_ok, &metrics.kv_seen[2], xs->n_digests);
    count(metrics.digest_bad, &metrics.kv_seen[3], xs->n_digest_mismatches);
    count(metrics.rail_errors, &metrics.kv_seen[4], xs->n_rail_errors);
    if (xs->n_wide_windows && !metrics.kv_seen[6])
        td_info("rdma_windows_wide", "msg=\"a grant has more pieces than memory windows are free; "
                                     "td_rdma_wide_windows_total counts further ones\"");
    count(metrics.windows, &metrics.kv_seen[5], xs->n_windows);
    count(metrics.wide, &metrics.kv_seen[6], xs->n_wide_windows);
    count(metrics.evicted, &metrics.kv_seen[7], xs->n_evicted);
    count(metrics.flushes, &metrics.kv_seen[8], xs->n_gpu_flushes);
    count(metrics.bad_frames, &metrics.kv_seen[9], xs->n_bad_frames);
    count(metrics.refused_peers, &metrics.kv_seen[10], xs->n_refused_peers);
    count(metrics.stale_frames, &metrics.kv_seen[11], xs->n_stale_frames);
}

static void update_snapshot(struct td_worker *w)
{
    struct td_kv_pool_stats kv;
    struct td_xfer_stats xs;
    td_kv_pool_stats(td_engine_kv(w->engine), &kv);
    td_xfer_stats(w->xfer, &xs);
    update_metrics(w, &kv, &xs);
    pthread_mutex_lock(&w->snap_lock);
    Tandem__V1__Snapshot *s = &w->snap;
    s->kv_held = (uint32_t)kv.n_held;
    s->kv_cached = (uint32_t)kv.n_cached;
    s->running = (uint32_t)w->sched->n_running;
    s->waiting = (uint32_t)w->sched->n_waiting;
    s->tokens_queued = td_scheduler_queued_tokens(w->sched);
    s->prefill_tokens_total = w->prefill_tokens;
    s->decode_tokens_total = w->decode_tokens;
    s->kv_bytes_sent = xs.bytes_sent;
    s->kv_bytes_received = xs.bytes_received;
    s->steps_total = w->steps;
    s->slots_used = xs.n_slots_used + xs.n_ops_used;
    bool new_router = w->report.epoch != w->report_epoch;
    uint64_t seed = w->report.seed;
    if (new_router) {
        w->report_epoch = w->report.epoch;
        w->calls_base = w->calls_taken + atomic_load(&w->calls_refused);
        w->report.n_added = w->report.n_evicted = 0;
        w->report.reset = true;
    } else if (w->report.n_added == 0 && w->report.n_evicted == 0) {
        td_kv_report_take(td_engine_kv(w->engine), TD_WORKER_MAX_BLOCKS, w->report.added,
                          &w->report.n_added, w->report.evicted, &w->report.n_evicted);
    }
    s->calls_taken = w->calls_taken + atomic_load(&w->calls_refused) - w->calls_base;
    pthread_mutex_unlock(&w->snap_lock);
    if (new_router && seed) td_kv_report_begin(td_engine_kv(w->engine), seed);
}

static void hand_over_all(struct td_worker *w)
{
    for (struct td_req *r = w->live, *next; r; r = next) {
        next = r->live_next;
        td_worker_end(w, r, TD_ERR_PEER,
                      "this worker is draining; the rest of the request belongs elsewhere");
    }
}

static void *engine_main(void *arg)
{
    struct td_worker *w = arg;
    pthread_setname_np(pthread_self(), "engine");
    bool busy = true;
    for (;;) {
        td_doorbell_wait(&w->bell, busy ? 0 : td_deadline_after_ms(td_now_ns(), 100));
        atomic_store(&w->progress_ns, td_now_ns());
        bool stopping = atomic_load(&w->stopping); /* before the mail is taken: what was posted
                                                      before it is not lost */
        take_mail(w);
        take_xfer_events(w);
        if (atomic_load(&w->hand_over)) hand_over_all(w);
        if (stopping && atomic_load(&w->n_live) == 0) return NULL;
        td_scheduler_admit_waiting(w->sched, td_now_ns(), admit, w);
        busy = step(w);
        struct td_err err = {0};
        if (!busy) w->last_step_ns = 0;
        if (!busy && !atomic_load(&w->device_lost) && td_engine_check(w->engine, &err))
            ranks_lost(&err);
        update_snapshot(w);
    }
}

/* ---- tokens on the wire ---------------------------------------------------------------------- */

void td_token_out_fill(struct td_token_out *o, const struct td_seq *seq, const struct td_sampled *s)
{
    tandem__v1__token_out__init(&o->msg);
    o->msg.index = (uint32_t)seq->sched.n_tokens - 1;
    o->msg.token = s->token;
    o->msg.finish = (Tandem__V1__FinishReason)seq->finish;
    if (seq->sampling.n_logprobs < 0) return;
    tandem__v1__logprobs__init(&o->lp);
    o->lp.logprob = s->logprob;
    o->lp.n_top = (size_t)s->n_top;
    o->lp.top = o->top_ptrs;
    for (int32_t i = 0; i < s->n_top; i++) {
        tandem__v1__token_logprob__init(&o->tops[i]);
        o->tops[i].token = s->top_tokens[i];
        o->tops[i].logprob = s->top_logprobs[i];
        o->top_ptrs[i] = &o->tops[i];
    }
    o->msg.logprobs = &o->lp;
}

/* ---- the daemon's life ----------------------------------------------------------------------- */

static void xfer_wake(void *ctx) { td_doorbell_ring(&((struct td_worker *)ctx)->bell); }

static struct td_engine_config engine_config(const struct td_worker_config *c, struct td_comm *comm)
{
    return (struct td_engine_config){.model_dir = c->model[0] ? c->model : NULL,
                                     .random_config =
                                         c->random_weights[0] ? c->random_weights : NULL,
                                     .dtype = c->dtype,
                                     .ops = c->ops,
                                     .cpus = c->cpus,
                                     .n_threads = (int32_t)c->threads,
                                     .kv_memory = c->kv_memory,
                                     .block_size = (int32_t)c->block_size,
                                     .max_seqs = (int32_t)c->max_seqs,
                                     .max_batch = (int32_t)c->max_batch,
                                     .max_model_len = (int32_t)c->max_model_len,
                                     .max_step_tokens = (int32_t)c->max_step_tokens,
                                     .prefix_cache = c->prefix_cache,
                                     .shareable_kv = true,
                                     .comm = comm,
                                     .device = c->device,
                                     .device_index = (int32_t)c->device_index + td_comm_rank(comm),
                                     .deterministic = c->deterministic};
}

/* What cannot be is refused before any process is started for it. */
static td_status open_ranks(struct td_worker *w, struct td_err *err)
{
    const struct td_worker_config *c = &w->cfg;
    struct td_model_config mc;
    if (c->tp == 1) return TD_OK;
    td_status s = c->model[0] ? td_model_config_load(c->model, &mc, err)
                              : td_model_config_load_file(c->random_weights, &mc, err);
    if (!s) s = td_model_check_ranks(&mc, (int32_t)c->tp, err);
    if (!s) s = td_ranks_start((int32_t)c->tp, (int32_t)c->threads, &w->ranks, err);
    return s;
}

static void log_device(const struct td_device_info *i)
{
    char q[160];
    if (!i) return;
    td_info("device",
            "kind=cuda index=%d name=%s uuid=%s pci=%s sm=%d%d n_sms=%d memory_mib=%llu driver=%s "
            "deterministic=%s emulated=%s",
            (int)i->index, td_log_quote(q, sizeof q, i->name), i->uuid, i->pci, (int)i->cc_major,
            (int)i->cc_minor, (int)i->n_sms, (unsigned long long)(i->memory_bytes >> 20),
            i->driver[0] ? i->driver : "unknown", i->is_deterministic ? "true" : "false",
            i->is_emulated ? "true" : "false");
}

static td_status open_engine(struct td_worker *w, struct td_err *err)
{
    const struct td_worker_config *c = &w->cfg;
    if (!c->model[0] && !c->random_weights[0])
        return td_fail(err, TD_ERR_INVALID, "model is empty: give --model DIR");
    td_status s = open_ranks(w, err);
    if (s) return s;
    struct td_engine_config e = engine_config(c, w->ranks.comm);
    s = td_engine_open(&e, &w->engine, err);
    if (s) return s;
    log_device(td_engine_device_info(w->engine));
    w->reqs = calloc((size_t)c->max_seqs, sizeof *w->reqs);
    w->sched = td_engine_scheduler(w->engine);
    w->sched->grows = w->role->grows;
    w->items = calloc((size_t)c->max_batch, sizeof *w->items);
    if (!w->reqs || !w->items)
        return td_fail(err, TD_ERR_NOMEM, "no memory for max_seqs %lld", (long long)c->max_seqs);
    if (w->role->engine_opened) w->role->engine_opened(w);
    return TD_OK;
}

int td_worker_follow(const struct td_ranks_place *place, const struct td_worker_config *config)
{
    struct td_err err = {0};
    char q[300];
    sigset_t set;
    td_stop_signals(&set); /* rank 0 drains and tells its end: a signal to the whole group of
                              processes must not end a rank before */
    sigaddset(&set, SIGHUP);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    struct td_ranks ranks = {0};
    td_status s = td_ranks_join(place, &ranks, &err);
    struct td_engine_config e = engine_config(config, ranks.comm);
    td_info("rank_started", "rank=%d pid=%d", place->rank, (int)getpid());
    if (!s) s = td_engine_follow(&e, &err);
    /* rank 0, if it lives, decides */
    if (s == TD_ERR_PEER)
        td_info("rank_ends", "rank=%d reason=%s", place->rank, td_log_quote(q, sizeof q, err.msg));
    else if (s)
        td_error("rank_failed", "rank=%d reason=%s action=exit", place->rank,
                 td_log_quote(q, sizeof q, err.msg));
    td_ranks_stop(&ranks);
    return s != TD_OK;
}

/* "off", "always", "1/64". */
static td_status parse_digest(const char *text, uint32_t *ret_every, struct td_err *err)
{
    char *end = NULL;
    if (!strcmp(text, "off") || !strcmp(text, "always")) {
        *ret_every = text[0] == 'a';
        return TD_OK;
    }
    unsigned long n = strncmp(text, "1/", 2) ? 0 : strtoul(text + 2, &end, 10);
    if (n < 1 || n > 1000000 || *end)
        return td_fail(err, TD_ERR_INVALID,
                       "kv_digest is \"%s\", must be off, always or 1/N with N in 1..1000000",
                       text);
    *ret_every = (uint32_t)n;
    return TD_OK;
}

/* TD_OK with no provider where none is there and none was asked for. */
static td_status find_verbs(const struct td_worker *w, const struct td_verbs **ret_verbs,
                            struct td_err *err)
{
    struct td_err why = {0};
    enum td_xfer_path path = td_kv_port_path(w->cfg.transfer);
    if (path != TD_XFER_PATH_AUTO && path != TD_XFER_PATH_RDMA) return TD_OK;
    bool split = td_engine_device_info(w->engine) && td_engine_n_ranks(w->engine) > 1;
    td_status s = split ? td_fail(&why, TD_ERR_UNSUPPORTED,
                                  "the pool lies on the devices of %d ranks (tp), and NICs are "
                                  "given the memory of one",
                                  td_engine_n_ranks(w->engine))
                        : td_kv_port_verbs(ret_verbs, &why);
    if (!s) return TD_OK;
    if (path == TD_XFER_PATH_RDMA)
        return td_fail(err, s, "transfer is rdma, and RDMA is not to be had: %s", why.msg);
    char q[300];
    td_info("rdma_absent", "reason=%s", td_log_quote(q, sizeof q, why.msg));
    return TD_OK;
}

void td_worker_look_at_files(struct td_worker *w, uint64_t now_ns)
{
    bool loaded;
    struct td_err err = {0};
    char text[TD_ERR_MSG_MAX];
    if (!w->use_kv_tls || now_ns < w->tls_look_ns) return;
    w->tls_look_ns = td_deadline_after_ms(now_ns, 1000);
    if (td_xfer_tls_reload_files(w->xfer, &loaded, &err))
        td_warn("tls_reload_failed", "use=kv action=keep_old err=%s",
                td_log_quote(text, sizeof text, err.msg));
    else if (loaded)
        td_info("tls_reloaded", "use=kv file=%s", w->cfg.tls_cert);
}

static td_status open_xfer(struct td_worker *w, struct td_err *err)
{
    const struct td_worker_config *o = &w->cfg;
    uint32_t digest_every = 0;
    char host[256], advertise[256];
    struct td_kv_port port;
    const struct td_verbs *verbs = NULL;
    const struct td_kv_port_files files = {o->tls_cert, o->tls_key, o->tls_ca, w->id.workers,
                                           w->id.secret};
    struct td_xfer_config c = {.instance = w->name,
                               .incarnation = w->incarnation,
                               .layout_hash = td_engine_layout_hash(w->engine),
                               .memory = td_engine_device_memory(w->engine),
                               .listen_host = o->transfer_host,
                               .max_slots = (uint32_t)o->max_seqs,
                               .max_ops = (uint32_t)o->max_seqs,
                               .peer_timeout_ms = (uint32_t)o->peer_timeout_ms,
                               .hooks = {.wake = xfer_wake, .ctx = w}};
    td_status v = parse_digest(o->kv_digest, &digest_every, err);
    c.digest_every = digest_every;
    if (!v) v = find_verbs(w, &verbs, err);
    if (!v) v = td_kv_port_fill(&o->kv_port, o->transfer, &files, verbs, &port, &c, err);
    if (!v && o->transfer_host[0] == '[' &&
        !(v = td_address_host(o->transfer_host, host, sizeof host, err)))
        c.listen_host = host;
    if (!v && o->advertise[0] &&
        !(v = td_address_host(o->advertise, advertise, sizeof advertise, err)))
        c.advertise_host = advertise;
    if (v) return v;
    w->use_kv_tls = port.use_tls;
    td_status s = td_xfer_open(&c, &w->xfer, err);
    if (s) return s;
    struct td_kv_pool *kv = td_engine_kv(w->engine);
    struct td_kv_pool_stats st;
    td_kv_pool_stats(kv, &st);
    w->kv_blocks = st.n_blocks;
    return td_xfer_mem_add(w->xfer, td_engine_kv_arena(w->engine),
                           td_kv_pool_layout(kv)->block_bytes, st.n_blocks, err);
}

static td_status open_server(struct td_worker *w, struct td_err *err)
{
    td_status s = td_rpc_loop_create(w->role->name, &w->loop, err);
    if (s) return s;
    const struct td_rpc_method *services[] = {w->role->methods, NULL};
    struct td_rpc_tls server_tls = w->tls; /* copied by the start */
    if (!w->cfg.tls_client_auth) server_tls.ca_file = NULL;
    struct td_rpc_server_config c = {
        .loop = w->loop,
        .address = w->cfg.listen,
        .tls = w->use_tls ? &server_tls : NULL,
        .services = services,
        .keepalive_ms = (uint32_t)w->cfg.peer_timeout_ms / 2 +
                        1 /* a frozen router's requests are freed after about twice this (I3) */,
        .port_check_ms = (uint32_t)w->cfg.port_check_ms,
        .reflection = true,
        .ctx = w};
    td_port_limits(&w->cfg.port, (uint32_t)w->cfg.max_seqs * 2 + 64, &c.limits);
    if ((s = td_rpc_server_start(&c, &w->server, err))) return s;
    const char *colon = strrchr(w->cfg.listen, ':');
    int host_bytes = colon ? (int)(colon - w->cfg.listen) : 0;
    uint16_t bound = (uint16_t)td_rpc_server_port(w->server);
    if (w->cfg.advertise[0] &&
        (s = td_address_join(w->cfg.advertise, bound, w->address, sizeof w->address, err)))
        return td_err_prefix(err, "advertise");
    if (!w->cfg.advertise[0])
        snprintf(w->address, sizeof w->address, "%.*s:%d", host_bytes, w->cfg.listen, bound);
    if (!strncmp(w->address, "0.0.0.0:", 8) || !strncmp(w->address, "[::]:", 5))
        return td_fail(err, TD_ERR_INVALID,
                       "advertise is empty and listen is the wildcard address \"%s\": say with "
                       "--advertise which host others dial",
                       w->cfg.listen);
    return TD_OK;
}

/* TANDEM_LISTEN is the router's address: one environment may be that of all daemons of a host.
 * Whoever meant a worker by it is told; who also has others dial another host of it (advertise)
 * has most likely meant it. */
static void tell_of_shared_listen(const struct td_worker *w)
{
    bool is_prefill = !strcmp(w->role->name, "prefill");
    const char *shared = getenv("TANDEM_LISTEN"),
               *own = getenv(is_prefill ? "TANDEM_PREFILL_LISTEN" : "TANDEM_DECODE_LISTEN");
    bool given = (own && own[0]) || strcmp(w->cfg.listen, "127.0.0.1:0") != 0;
    char q[300];
    if (!shared || !shared[0] || given) return;
    td_log_quote(q, sizeof q, shared);
    if (w->cfg.advertise[0])
        td_warn("listen_is_the_routers",
                "shared=%s listen=%s advertise=%s not_read=TANDEM_LISTEN read=TANDEM_%s_LISTEN", q,
                w->cfg.listen, w->cfg.advertise, is_prefill ? "PREFILL" : "DECODE");
    else
        td_info("listen_is_the_routers",
                "shared=%s listen=%s not_read=TANDEM_LISTEN read=TANDEM_%s_LISTEN", q,
                w->cfg.listen, is_prefill ? "PREFILL" : "DECODE");
}

static bool port_answers(void *ctx)
{
    return td_rpc_server_answers(((struct td_worker *)ctx)->server);
}

/* With the host: in containers every worker's pid is 1, and names are unique in a cluster. */
static void default_name(struct td_worker *w, const struct td_worker_role *role)
{
    char host[65] = "host";
    if (gethostname(host, sizeof host)) snprintf(host, sizeof host, "host");
    host[sizeof host - 1] = 0;
    snprintf(w->name, sizeof w->name, "%s-%s-%d", role->name, host, (int)getpid());
}

/* While the weights are loaded there is nothing to drain: a signal ends the process at once, by
 * its default action (a handler would wait for the kernel to fill gigabytes of pages). Only the
 * main thread takes it: the pool's threads block all. */
static td_status open_engine_interruptible(struct td_worker *w, const sigset_t *set,
                                           struct td_err *err)
{
    pthread_sigmask(SIG_UNBLOCK, set, NULL);
    td_status s = open_engine(w, err);
    pthread_sigmask(SIG_BLOCK, set, NULL);
    return s;
}

/* A KV port beyond loopback is for peers that show a certificate or prove the secret. */
static td_status check_kv_port(struct td_worker *w, struct td_err *err)
{
    const struct td_worker_config *c = &w->cfg;
    const struct td_kv_port_files files = {c->tls_cert, c->tls_key, c->tls_ca, w->id.workers,
                                           w->id.secret};
    struct td_kv_port port;
    struct td_xfer_config scratch = {0};
    char host[256], address[300];
    td_status s = td_kv_port_fill(&c->kv_port, c->transfer, &files, NULL, &port, &scratch, err);
    if (s) return s;
    /* a socket of this host, of this user */
    if (scratch.path == TD_XFER_PATH_SHM || scratch.path == TD_XFER_PATH_CUDA_IPC) return TD_OK;
    if ((s = td_address_host(c->transfer_host, host, sizeof host, err)) ||
        (s = td_address_join(host, 0, address, sizeof address, err)))
        return td_err_prefix(err, "transfer_host");
    if (td_address_is_loopback(address)) return TD_OK;
    return td_identity_check_port(&w->id, "transfer_host", c->transfer_host, "KV transfers",
                                  "tls-worker-names", port.use_tls, err);
}

/* Before the weights: what is refused is refused at once. */
static td_status open_identity(struct td_worker *w, struct td_err *err)
{
    const struct td_worker_config *c = &w->cfg;
    bool has_ca = w->use_tls && c->tls_ca[0];
    td_random_fill(w->instance_key, sizeof w->instance_key);
    td_status s = td_identity_open(&c->identity, has_ca, &w->id, err);
    if (!s && w->id.routers && !c->tls_client_auth)
        s = td_fail(err, TD_ERR_INVALID,
                    "tls_router_names is given and tls_client_auth is false: callers without a "
                    "certificate have no names");
    if (!s)
        s = td_identity_check_port(&w->id, "listen", c->listen, "Worker", "tls-router-names",
                                   w->id.routers != NULL, err);
    if (!s) s = check_kv_port(w, err);
    return s;
}

td_status td_worker_open(struct td_worker *w, const struct td_worker_role *role,
                         const struct td_worker_config *config, struct td_err *err)
{
    sigset_t set;
    td_stop_signals(&set);
    sigaddset(&set, SIGHUP);
    pthread_sigmask(SIG_BLOCK, &set, NULL); /* before gRPC: its threads inherit the mask */
    signal(SIGPIPE, SIG_IGN);
    td_descriptors_raise();

    memset(w, 0, sizeof *w);
    w->bell.fd = -1;
    w->cfg = *config;
    w->role = role;
    w->incarnation = td_random_u64();
    if (config->name[0])
        snprintf(w->name, sizeof w->name, "%s", config->name);
    else
        default_name(w, role);
    w->use_tls = config->tls_cert[0] != 0;
    if (w->use_tls != (config->tls_key[0] != 0))
        return td_fail(err, TD_ERR_INVALID, "tls_cert and tls_key must be given together");
    w->tls = (struct td_rpc_tls){
        .cert_file = config->tls_cert,
        .key_file = config->tls_key,
        .ca_file = config->tls_ca[0] ? config->tls_ca : NULL,
        .server_name = config->tls_server_name[0] ? config->tls_server_name : NULL,
        .peer_names =
            config->identity.tls_router_names[0] ? config->identity.tls_router_names : NULL};
    td_status early = open_identity(w, err);
    if (early) return early;
    char host[256];
    /* before the weights */
    if (config->advertise[0] && td_address_host(config->advertise, host, sizeof host, err))
        return td_err_prefix(err, "advertise");
    pthread_mutex_init(&w->mail_lock, NULL);
    pthread_mutex_init(&w->snap_lock, NULL);
    w->mail_tail = &w->mail_head;
    tandem__v1__snapshot__init(&w->snap);
    atomic_store(&w->progress_ns, td_now_ns());

    tell_of_shared_listen(w);
    td_status s = td_doorbell_open(&w->bell, err);
    sigdelset(&set, SIGHUP); /* stays blocked */
    if (!s) s = open_engine_interruptible(w, &set, err);
    if (!s) s = open_xfer(w, err);
    if (!s) s = open_server(w, err);
    if (!s && config->metrics_listen[0])
        s = td_metrics_http_start(config->metrics_listen, port_answers, w, &w->metrics, err);
    if (s) return s;
    open_metrics();
    update_snapshot(w);
    if (pthread_create(&w->thread, NULL, engine_main, w))
        return td_fail(err, TD_ERR_IO, "engine thread: %s", strerror(errno));
    w->thread_started = true;
    if ((s = td_registry_create(w, &w->registry, err))) return s;
    td_rpc_server_set_serving(w->server, true);
    td_info("ready",
            "name=%s address=%s router=%s tp=%d kv_blocks=%d kv_pages=%s block_size=%lld "
            "max_len=%d pid=%d",
            w->name, w->address, w->cfg.router, td_engine_n_ranks(w->engine), w->kv_blocks,
            td_engine_device_info(w->engine)          ? "device"
            : td_engine_kv_arena(w->engine)->reserved ? "reserved_2MiB"
                                                      : "small",
            (long long)w->cfg.block_size, td_engine_max_len(w->engine), (int)getpid());
    return TD_OK;
}

int td_worker_run(struct td_worker *w)
{
    int sig;
    while (!(sig = td_stop_signal_wait((int)w->cfg.port_check_ms)))
        if (td_rpc_server_is_deaf(w->server)) { /* nothing can be drained: the router moves its
                                                   requests */
            td_error("port_deaf", "port=%d action=exit hint=\"no router can come in\"",
                     td_rpc_server_port(w->server));
            _exit(1);
        }
    bool lost = atomic_load(&w->device_lost);
    if (!lost) td_info("signal", "sig=%d action=drain", sig);
    return lost;
}

/* True once no request is live; a second signal exits the process at once. */
static bool wait_idle(struct td_worker *w, uint64_t deadline_ns)
{
    while (atomic_load(&w->n_live) > 0) {
        if (td_now_ns() >= deadline_ns) return false;
        if (td_stop_signal_wait(10)) {
            td_warn("second_signal", "live=%u action=exit", atomic_load(&w->n_live));
            _exit(1);
        }
    }
    return true;
}

void td_worker_drain(struct td_worker *w)
{
    atomic_store(&w->draining, true);
    td_rpc_server_set_serving(w->server, false);
    td_registry_drain(w->registry);
    unsigned live = atomic_load(&w->n_live);
    bool idle = wait_idle(w, td_deadline_after_ms(td_now_ns(), w->cfg.drain_timeout_ms));
    if (!idle) {
        td_warn("drain_timeout", "live=%u waited_ms=%llu action=hand_over", atomic_load(&w->n_live),
                (unsigned long long)w->cfg.drain_timeout_ms);
        atomic_store(&w->hand_over, true);
        td_doorbell_ring(&w->bell);
        wait_idle(w, td_deadline_after_ms(td_now_ns(), STOP_BOUND_MS));
    }
    td_info("drained", "live_at_start=%u finished_all=%s", live, idle ? "true" : "false");
}

void td_worker_close(struct td_worker *w)
{
    td_registry_destroy(w->registry);
    td_metrics_http_stop(w->metrics); /* it asks the server how it is */
    if (w->server)
        td_rpc_server_stop(w->server, 1000); /* cancels what is left: their ENDED mail
                                                frees them */
    if (w->thread_started) {
        atomic_store(&w->hand_over, true);
        atomic_store(&w->stopping, true);
        td_doorbell_ring(&w->bell);
        pthread_join(w->thread, NULL);
    }
    td_xfer_close(w->xfer);
    if (w->loop) td_rpc_loop_destroy(w->loop);
    td_engine_close(w->engine);
    td_ranks_stop(&w->ranks);
    td_identity_close(&w->id);
    free(w->reqs);
    free(w->items);
    if (w->bell.fd >= 0) td_doorbell_close(&w->bell);
    memset(w, 0, sizeof *w);
}
