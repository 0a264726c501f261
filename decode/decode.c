/* decode.c - the decode worker: reserves blocks, takes KV in, streams tokens; prefills for itself
 * when asked (colocated).
 *
 * The life of a request, all on the engine thread:
 *
 *   prefilled elsewhere  waiting --blocks, slot armed, Ticket sent--> IMPORT
 *                        IMPORT --SLOT_READY--> running
 *   prefilled here       waiting --blocks--> running (prefill chunks, then decode steps)
 *   preempted            running --> waiting, then prefilled here: prompt and output so far, the
 *                        same tokens again (I1)
 *   running --last token--> times, OK
 *
 * SLOT_FAILED, cancel and deadline call td_worker_end: the slot is revoked, and its blocks follow
 * at SLOT_FREE (retirement, I2). The same after SenderFinished, when SLOT_FAILED says that the
 * prefill worker has finished the request.
 *
 * The first token arrives twice: from the prefill worker through the router, and here in the
 * transfer's note. This stream repeats it, and the router drops what it has. So a prefill worker
 * that dies right after its last byte costs nothing. */
#include <stdio.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/fault.h"
#include "common/base/log.h"
#include "common/worker/worker.h"

struct decode_config {
    struct td_worker_config worker;
    uint64_t import_timeout_ms; /* reservation -> KV complete; else the slot is taken back */
};

struct decode {
    struct td_worker worker; /* first: roles get a td_worker and cast back */
    struct decode_config cfg;
};

#define OFF(f) offsetof(struct decode_config, f)

// clang-format off
static const struct td_option decode_options[] = {
    TD_WORKER_OPTIONS(struct decode_config, worker),
    {"import_timeout_ms", TD_OPT_U64, "120000", 100, 3600000, NULL, OFF(import_timeout_ms),
     "a reserved slot whose KV has not arrived by then is taken back"},
    {0},
};
// clang-format on

static void send_event(struct td_req *r, const Tandem__V1__DecodeEvent *ev)
{
    td_worker_send(r, &ev->base);
}

static void send_token(struct td_req *r, Tandem__V1__TokenOut *out)
{
    Tandem__V1__Tokens tokens = TANDEM__V1__TOKENS__INIT;
    Tandem__V1__DecodeEvent ev = TANDEM__V1__DECODE_EVENT__INIT;
    tokens.n_out = 1;
    tokens.out = &out;
    ev.event_case = TANDEM__V1__DECODE_EVENT__EVENT_TOKENS;
    ev.tokens = &tokens;
    send_event(r, &ev);
}

static void send_prefill_times(struct td_req *r, uint64_t end_ns)
{
    Tandem__V1__PrefillTimes t = TANDEM__V1__PREFILL_TIMES__INIT;
    Tandem__V1__DecodeEvent ev = TANDEM__V1__DECODE_EVENT__INIT;
    t.queue_us = (r->first_run_ns - r->arrived_ns) / TD_NS_PER_US;
    t.prefill_us = (end_ns - r->first_run_ns) / TD_NS_PER_US;
    t.cached_tokens = (uint32_t)r->seq->sched.n_cached;
    ev.event_case = TANDEM__V1__DECODE_EVENT__EVENT_PREFILL_TIMES;
    ev.prefill_times = &t;
    send_event(r, &ev);
}

static void send_scored(struct td_req *r, const struct td_step_item *item)
{
    static struct td_scored_out out; /* one engine thread per process */
    Tandem__V1__DecodeEvent ev = TANDEM__V1__DECODE_EVENT__INIT;
    ev.event_case = TANDEM__V1__DECODE_EVENT__EVENT_PROMPT_LOGPROBS;
    ev.prompt_logprobs = &out.msg;
    for (int32_t at = 0, n; (n = td_scored_out_fill(&out, item, at)) > 0; at += n)
        send_event(r, &ev);
}

/* What the ledger needs: after the first step, because a stop string at the router ends the call
 * before there is a last token, and after that. */
static void send_times(struct td_req *r, bool last)
{
    Tandem__V1__DecodeTimes t = TANDEM__V1__DECODE_TIMES__INIT;
    Tandem__V1__DecodeEvent ev = TANDEM__V1__DECODE_EVENT__INIT;
    t.transfer_us = r->decode.xfer_us;
    t.transfer_exposed_us = r->decode.exposed_us;
    t.transfer_bytes = r->decode.xfer_bytes;
    t.transfer_path = (char *)(r->decode.xfer_path ? r->decode.xfer_path : "local");
    if (r->decode.ready_ns && r->decode.first_step_ns)
        t.decode_queue_us = (r->decode.first_step_ns - r->decode.ready_ns) / TD_NS_PER_US;
    t.first_step_us = r->decode.step_us;
    if (last) t.preemptions = r->seq->sched.n_preemptions; /* the router adds them up */
    ev.event_case = TANDEM__V1__DECODE_EVENT__EVENT_TIMES;
    ev.times = &t;
    send_event(r, &ev);
}

static void finish(struct td_worker *w, struct td_req *r)
{
    send_times(r, true);
    td_worker_finish_ok(w, r);
}

/* ---- admission ------------------------------------------------------------------------------- */

static td_status admit_local(struct td_worker *w, struct td_req *r)
{
    td_status s = td_engine_admit(w->engine, r->seq, false, td_scheduler_headroom(w->sched));
    if (s == TD_ERR_AGAIN) return s;
    if (s) {
        td_worker_end(w, r, TD_ERR_INVALID,
                      "the sequence needs more KV blocks than this worker has");
        return s;
    }
    td_worker_set_running(w, r);
    return TD_OK;
}

static td_status admit_import(struct td_worker *w, struct td_req *r)
{
    struct decode *d = (struct decode *)w;
    struct td_seq *seq = r->seq;
    td_status s = td_engine_admit(w->engine, seq, true, td_scheduler_headroom(w->sched));
    if (s == TD_ERR_AGAIN) return s;
    if (s) {
        td_worker_end(w, r, TD_ERR_INVALID,
                      "the sequence needs more KV blocks than this worker has");
        return s;
    }
    static uint8_t blob[TD_XFER_BLOB_MAX]; /* one engine thread per process */
    size_t blob_bytes = sizeof blob;
    struct td_err err = {0};
    int32_t hit = seq->sched.n_cached / (int32_t)w->cfg.model.block_size;
    uint64_t now = td_now_ns();
    s = td_xfer_grant(w->xfer, seq->blocks + hit, seq->sched.n_blocks - hit,
                      td_deadline_after_ms(now, d->cfg.import_timeout_ms), seq->index, &r->xfer_id,
                      blob, &blob_bytes, &err);
    if (s) {
        td_engine_release(w->engine, seq);
        if (s == TD_ERR_AGAIN) return s;
        td_worker_end(w, r, s, err.msg);
        return s;
    }
    r->xfer_live = true;
    uint64_t key = td_xfer_slot_priority(w->xfer, r->xfer_id, seq->sched.priority);
    td_debug("kv_granted", "req=%s key=%llu", r->logged_name, (unsigned long long)key);
    td_fault_point("decode_armed");
    r->state = TD_REQ_IMPORT;
    Tandem__V1__Ticket t = TANDEM__V1__TICKET__INIT;
    Tandem__V1__DecodeEvent ev = TANDEM__V1__DECODE_EVENT__INIT;
    t.slot = r->xfer_id;
    t.grant.data = blob;
    t.grant.len = blob_bytes;
    t.cached_tokens = (uint32_t)seq->sched.n_cached;
    t.queue_us = (now - r->arrived_ns) / TD_NS_PER_US;
    ev.event_case = TANDEM__V1__DECODE_EVENT__EVENT_TICKET;
    ev.ticket = &t;
    send_event(r, &ev);
    td_fault_point("ticket_sent");
    return TD_OK;
}

/* A preempted request has its tokens here already: it is prefilled again locally, whatever
 * brought its KV the first time. */
static td_status admit_somehow(struct td_worker *w, struct td_req *r)
{
    return r->decode.local_prefill || r->seq->sched.n_preemptions > 0 ? admit_local(w, r)
                                                                      : admit_import(w, r);
}

/* Several routers may place more here than there are blocks: no lock between them prevents it. */
static td_status decode_admit(struct td_worker *w, struct td_req *r)
{
    td_status s = admit_somehow(w, r);
    if (s != TD_ERR_AGAIN || !r->decode.no_wait || r->seq->sched.n_preemptions > 0) return s;
    td_worker_end(w, r, TD_ERR_AGAIN, "this worker has no free KV blocks for the sequence");
    return TD_ERR_LIMIT;
}

/* ---- transfer -------------------------------------------------------------------------------- */

static void slot_ready(struct td_worker *w, struct td_req *r, const struct td_xfer_event *ev)
{
    td_xfer_revoke(w->xfer, r->xfer_id, "taken over"); /* the slot goes back; the blocks are ours
                                                          now */
    if (r->state != TD_REQ_IMPORT) return;             /* cancelled meanwhile */
    Tandem__V1__TokenOut *first = tandem__v1__token_out__unpack(NULL, ev->note_bytes, ev->note);
    const struct td_model_config *mc = td_model_config(td_engine_model(w->engine));
    if (!first || first->index != (uint32_t)r->seq->sched.n_tokens || first->token < 0 ||
        first->token >= mc->vocab) {
        if (first) tandem__v1__token_out__free_unpacked(first, NULL);
        td_worker_end(w, r, TD_ERR_PEER,
                      "the prefill worker's note does not hold the first token of this sequence");
        return;
    }
    td_fault_point("slot_ready");
    struct td_err err = {0};
    int32_t hit = r->seq->sched.n_cached / (int32_t)w->cfg.model.block_size,
            parts = first->kv_parts > TD_COMM_MAX_RANKS ? -1
                    : first->kv_parts                   ? (int32_t)first->kv_parts
                                                        : 1;
    const int32_t *blocks = r->seq->blocks + hit;
    int32_t n_blocks = r->seq->sched.n_blocks - hit,
            n_tokens = r->seq->sched.n_tokens - hit * (int32_t)w->cfg.model.block_size;
    if (td_engine_kv_arrange(w->engine, blocks, n_blocks, parts, &err) ||
        td_engine_kv_check(w->engine, blocks, n_blocks, n_tokens, &err)) {
        tandem__v1__token_out__free_unpacked(first, NULL);
        td_worker_end(w, r, TD_ERR_PEER, err.msg);
        return;
    }
    r->decode.ready_ns = td_now_ns();
    td_fault_point("slot_taken");
    r->decode.xfer_us = ev->elapsed_ns / TD_NS_PER_US;
    /* Sampled, submitted, READY, taken by this thread: each on one clock. */
    r->decode.exposed_us =
        first->age_us + (ev->tail_ns + (r->decode.ready_ns - ev->at_ns)) / TD_NS_PER_US;
    first->age_us = first->kv_parts = 0;
    r->decode.xfer_bytes = ev->bytes;
    r->decode.xfer_path = td_xfer_path_name(ev->path);
    td_engine_imported(w->engine, r->seq, first->token);
    first->finish = (Tandem__V1__FinishReason)r->seq->finish;
    send_token(r, first);
    tandem__v1__token_out__free_unpacked(first, NULL);
    td_worker_set_running(w, r);
    if (r->seq->finish) finish(w, r);
}

/* The first token was also the last: it goes from the prefill worker to the router, which ends
 * this call too, unless this word overtakes it. */
static void sender_finished(struct td_worker *w, struct td_req *r)
{
    Tandem__V1__SenderFinished none = TANDEM__V1__SENDER_FINISHED__INIT;
    Tandem__V1__DecodeEvent ev = TANDEM__V1__DECODE_EVENT__INIT;
    ev.event_case = TANDEM__V1__DECODE_EVENT__EVENT_SENDER_FINISHED;
    ev.sender_finished = &none;
    send_event(r, &ev);
    /* revokes through xfer_stop */
    td_worker_end(w, r, TD_ERR_FINISHED, "the prefill worker has finished the request");
}

static void decode_xfer_event(struct td_worker *w, struct td_req *r, const struct td_xfer_event *ev)
{
    switch (ev->kind) {
    case TD_XFER_SLOT_READY:
        slot_ready(w, r, ev);
        break;
    case TD_XFER_SLOT_FAILED:
        if (r->state == TD_REQ_IMPORT && ev->status == TD_ERR_FINISHED) {
            sender_finished(w, r);
        } else if (r->state == TD_REQ_IMPORT) {
            char msg[256], q[200];
            snprintf(msg, sizeof msg, "KV transfer failed: %s", ev->reason);
            td_info_limited("kv_import_failed", "req=%s reason=%s action=fail_attempt",
                            r->logged_name, td_log_quote(q, sizeof q, ev->reason));
            td_worker_end(w, r, TD_ERR_PEER, msg); /* revokes through xfer_stop */
        } else {
            td_xfer_revoke(w->xfer, r->xfer_id, "failed");
        }
        break;
    case TD_XFER_SLOT_FREE:
        td_worker_xfer_over(w, r);
        break;
    case TD_XFER_OP_DONE:
    case TD_XFER_OP_FAILED:
        break; /* a decode worker starts no ops */
    case TD_XFER_PATH_CHOSEN:
    case TD_XFER_PEER_REFUSED:
        break; /* not from this queue */
    }
}

static void decode_xfer_stop(struct td_worker *w, struct td_req *r, const char *why)
{
    td_xfer_revoke(w->xfer, r->xfer_id, why);
}

/* ---- steps ----------------------------------------------------------------------------------- */

static void decode_stepped(struct td_worker *w, struct td_req *r, const struct td_step_item *item,
                           uint64_t step_start_ns, uint64_t step_end_ns)
{
    send_scored(r, item);
    if (!item->sampled) return;
    struct td_seq *seq = r->seq;
    bool first_here = seq->sched.n_tokens == seq->n_input + 1, first_step = false;
    if (r->decode.local_prefill && first_here) send_prefill_times(r, step_end_ns);
    if (!r->decode.first_step_ns && !(r->decode.local_prefill && first_here)) {
        first_step = true;
        r->decode.first_step_ns = step_start_ns;
        r->decode.step_us = (step_end_ns - step_start_ns) / TD_NS_PER_US;
    }
    struct td_token_out out;
    td_token_out_fill(&out, seq, &item->out);
    if (seq->finish) td_fault_point("decode_last");
    send_token(r, &out.msg);
    td_fault_point("decode_token");
    if (seq->finish)
        finish(w, r);
    else if (first_step)
        send_times(r, false);
}

/* ---- RPC ------------------------------------------------------------------------------------- */

static td_status decode_accept(struct td_worker *w, struct td_req *r, const ProtobufCMessage *msg,
                               struct td_err *err)
{
    (void)w;
    r->decode.local_prefill = ((const Tandem__V1__DecodeRequest *)msg)->local_prefill;
    r->decode.no_wait = ((const Tandem__V1__DecodeRequest *)msg)->no_wait;
    /* what another worker computes it tells itself */
    return r->decode.local_prefill ? TD_OK : td_engine_seq_set_prompt_logprobs(r->seq, -1, err);
}

static void decode_take(struct td_worker *w, const struct td_caller *caller,
                        const Tandem__V1__DecodeRequest *in)
{
    td_fault_point("decode_accepted");
    td_worker_accept(w, caller, &in->base, in->seq);
}

static const struct td_worker_role decode_role = {.name = "decode",
                                                  .grows = true,
                                                  .decode = decode_take,
                                                  .accept = decode_accept,
                                                  .admit = decode_admit,
                                                  .stepped = decode_stepped,
                                                  .xfer_event = decode_xfer_event,
                                                  .xfer_stop = decode_xfer_stop};

static struct decode decode_daemon;

const struct td_worker_program td_worker_program = {
    .name = "tandem-decode",
    .summary = "Decode worker: takes KV from prefill workers and streams tokens.",
    .role = &decode_role,
    .worker = &decode_daemon.worker,
    .options = decode_options,
    .config = &decode_daemon.cfg};
