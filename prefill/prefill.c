/* prefill.c - the prefill worker: computes prompts in chunks and pushes their KV into the decode
 * worker's granted blocks as it goes.
 *
 * The life of a request, all on the engine thread:
 *
 *   waiting --blocks, transfer op started--> running (chunks)
 *   running --first token: sent to the router; last block and note submitted--> SENDING
 *   SENDING --OP_DONE--> PrefillDone, OK
 *
 * Full blocks are submitted after each step, so the transfer overlaps the next chunk; their first
 * layers are submitted within the step, so that it overlaps the chunk's own later ones.
 *
 * A first token that is also the last: nothing is handed over. The receiver is told that the op is
 * not needed, and the router ends the decode leg. Without a grant (one token is left, there is no
 * decode leg) a request ends with its first token.
 *
 * OP_FAILED, cancel and deadline call td_worker_end: source blocks stay held until the op's
 * terminal event (I2). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/fault.h"
#include "common/base/log.h"
#include "common/worker/worker.h"

struct prefill_config {
    struct td_worker_config worker;
    uint64_t send_timeout_ms; /* op start -> delivered; else the request fails over */
    int64_t transfer_parts;   /* tests: groups of layers that are handed over while the next
                                 are computed; 0: by their size */
};

struct prefill {
    struct td_worker worker; /* first: roles get a td_worker and cast back */
    struct prefill_config cfg;
};

#define OFF(f) offsetof(struct prefill_config, f)
/* of a block: less makes a transfer wait for frames and requests */
#define PART_BYTES ((size_t)256 << 10)
#define MAX_WITHIN_US 1000000000000ull

// clang-format off
static const struct td_option prefill_options[] = {
    TD_WORKER_OPTIONS(struct prefill_config, worker),
    {"send_timeout_ms", TD_OPT_U64, "120000", 100, 3600000, NULL, OFF(send_timeout_ms),
     "a hand-over that takes longer fails over"},
    {"test_transfer_parts", TD_OPT_I64, "0", 0, TD_FORWARD_MARKS_MAX, NULL, OFF(transfer_parts),
     "groups of layers sent while later ones are computed; 0 = as many as have 256 KiB of a "
     "block, 1 = whole blocks after each chunk"},
    TD_OPTION_DECIDED("transfer_parts", "groups of layers are sent while later ones are computed, "
                                        "as many as have 256 KiB of a block"),
    {0},
};
// clang-format on

static void send_event(struct td_req *r, const Tandem__V1__PrefillEvent *ev)
{
    td_worker_send(r, &ev->base);
}

/* ---- admission ------------------------------------------------------------------------------- */

static td_status prefill_admit(struct td_worker *w, struct td_req *r)
{
    struct prefill *p = (struct prefill *)w;
    struct td_seq *seq = r->seq;
    td_status s = td_engine_admit(w->engine, seq, false, td_scheduler_headroom(w->sched));
    if (s == TD_ERR_AGAIN) return s;
    if (s) {
        td_worker_end(w, r, TD_ERR_INVALID, "the prompt needs more KV blocks than this worker has");
        return s;
    }
    if (!r->prefill.grant.data) {
        td_fault_point("prefill_started");
        td_worker_set_running(w, r);
        return TD_OK;
    }
    struct td_err err = {0};
    int32_t n_granted = 0;
    s = td_xfer_op_start(w->xfer, r->prefill.grant.data, r->prefill.grant.len,
                         td_deadline_after_ms(td_now_ns(), p->cfg.send_timeout_ms), seq->index,
                         &r->xfer_id, &n_granted, &err);
    if (!s) {
        r->xfer_live = true;
        uint64_t key = td_xfer_op_priority(w->xfer, r->xfer_id, seq->sched.priority);
        td_debug("kv_push_started", "req=%s key=%llu", r->logged_name, (unsigned long long)key);
        if (n_granted != seq->sched.n_blocks - (int32_t)r->prefill.n_skip)
            s = td_fail(&err, TD_ERR_INVALID,
                        "grant is for %d blocks, the sequence has %d and skip_tokens leaves out %u",
                        n_granted, seq->sched.n_blocks, r->prefill.n_skip);
    }
    if (s == TD_ERR_AGAIN) {
        td_engine_release(w->engine, seq);
        return s;
    }
    if (s) {
        td_worker_end(w, r, s, err.msg);
        return s;
    }
    free(r->prefill.grant.data);
    r->prefill.grant.data = NULL;
    td_fault_point("prefill_started");
    /* Prefix hits are there already: they go (or are fetched, --rdma-pull) while the rest is
       computed. */
    int32_t n_hit = seq->sched.n_computed / (int32_t)w->cfg.model.block_size,
            skip = (int32_t)r->prefill.n_skip;
    if (n_hit > skip &&
        td_xfer_submit_pull(w->xfer, r->xfer_id, 0, seq->blocks + skip, n_hit - skip) == TD_OK)
        r->prefill.n_sent = (uint32_t)n_hit;
    td_worker_set_running(w, r);
    return TD_OK;
}

/* ---- steps ----------------------------------------------------------------------------------- */

/* Blocks that this step completes: those that it fills, and with the prompt's last token the
 * last one, whose rest nobody reads. */
static int32_t completed_by(const struct td_worker *w, const struct td_step_item *item)
{
    int32_t n_computed = item->seq->sched.n_computed + item->n_new;
    return n_computed == item->seq->sched.n_tokens ? item->seq->sched.n_blocks
                                                   : n_computed / (int32_t)w->cfg.model.block_size;
}

/* In the middle of a step: the first n_layers of what it computes are there. What cannot be
 * submitted now shows at the end of the step. */
static void prefill_layers_done(void *ctx, const struct td_step_item *items, int32_t n_items,
                                int32_t n_layers)
{
    struct td_worker *w = ctx;
    uint64_t n_bytes = (uint64_t)n_layers * td_kv_pool_layout(td_engine_kv(w->engine))->layer_bytes;
    for (int32_t i = 0; i < n_items; i++) {
        struct td_seq *seq = items[i].seq;
        struct td_req *r = seq->owner;
        int32_t from = (int32_t)r->prefill.n_sent, upto = completed_by(w, &items[i]);
        if (seq->sched.phase != TD_SEQ_PREFILL || !r->xfer_live || upto <= from) continue;
        if (td_xfer_submit_part(w->xfer, r->xfer_id, from - (int32_t)r->prefill.n_skip,
                                seq->blocks + from, upto - from, r->prefill.begun_bytes,
                                n_bytes - r->prefill.begun_bytes))
            continue;
        r->prefill.n_begun = (uint32_t)upto;
        r->prefill.begun_bytes = n_bytes;
    }
    td_fault_point("layers_submitted");
}

/* Several KV parts: a group of layers is not one run of a block's bytes, so blocks go whole. */
static void prefill_engine_opened(struct td_worker *w)
{
    const struct prefill *p = (const struct prefill *)w;
    const struct td_kv_layout *l = td_kv_pool_layout(td_engine_kv(w->engine));
    int64_t n =
        p->cfg.transfer_parts ? p->cfg.transfer_parts : (int64_t)(l->block_bytes / PART_BYTES);
    if (n > TD_FORWARD_MARKS_MAX) n = TD_FORWARD_MARKS_MAX;
    if (n > l->n_layers) n = l->n_layers;
    if (n < 2 || td_engine_kv_parts(w->engine) > 1) return;
    td_engine_on_layers(w->engine, &(struct td_engine_layers){
                                       .done = prefill_layers_done,
                                       .ctx = w,
                                       .every = (l->n_layers + (int32_t)n - 1) / (int32_t)n});
}

/* The rest of the blocks of which a step has submitted layers. */
static td_status submit_begun(struct td_worker *w, struct td_req *r)
{
    int32_t from = (int32_t)r->prefill.n_sent, n = (int32_t)r->prefill.n_begun - from;
    uint64_t at = r->prefill.begun_bytes,
             left = td_kv_pool_layout(td_engine_kv(w->engine))->block_bytes - at;
    if (!at) return TD_OK;
    r->prefill.begun_bytes = 0;
    td_status s = left ? td_xfer_submit_part(w->xfer, r->xfer_id, from - (int32_t)r->prefill.n_skip,
                                             r->seq->blocks + from, n, at, left)
                       : TD_OK;
    if (!s) r->prefill.n_sent = r->prefill.n_begun;
    return s;
}

/* Hands finished blocks [n_sent, upto) to the transfer; the last call carries the note. */
static bool submit(struct td_worker *w, struct td_req *r, int32_t upto, bool final,
                   const void *note, size_t note_bytes)
{
    td_status s = submit_begun(w, r);
    int32_t from = (int32_t)r->prefill.n_sent, n = upto > from ? upto - from : 0;
    if (!s && !n && !final) return true;
    if (!s)
        s = td_xfer_submit(w->xfer, r->xfer_id, from - (int32_t)r->prefill.n_skip,
                           r->seq->blocks + from, n, final, note, note_bytes);
    if (s == TD_ERR_INVALID || s == TD_ERR_NOT_FOUND) { /* a bug of ours: this call can never
                                                           succeed */
        td_worker_end(w, r, TD_ERR_INTERNAL, "KV transfer refused a submit");
        return false;
    }
    if (s)
        return false; /* it failed during the step: OP_FAILED is on its way with the reason,
                         and ends the request */
    r->prefill.n_sent += (uint32_t)n;
    return true;
}

static void send_scored(struct td_req *r, const struct td_step_item *item)
{
    static struct td_scored_out out; /* one engine thread per process */
    Tandem__V1__PrefillEvent ev = TANDEM__V1__PREFILL_EVENT__INIT;
    ev.event_case = TANDEM__V1__PREFILL_EVENT__EVENT_PROMPT_LOGPROBS;
    ev.prompt_logprobs = &out.msg;
    for (int32_t at = 0, n; (n = td_scored_out_fill(&out, item, at)) > 0; at += n)
        send_event(r, &ev);
}

static void prefill_stepped(struct td_worker *w, struct td_req *r, const struct td_step_item *item,
                            uint64_t step_start_ns, uint64_t step_end_ns)
{
    (void)step_start_ns;
    struct td_seq *seq = r->seq;
    send_scored(r, item);
    if (!item->sampled) {
        if (r->xfer_live)
            submit(w, r, seq->sched.n_computed / (int32_t)w->cfg.model.block_size, false, NULL, 0);
        td_fault_point("chunk_submitted");
        return;
    }
    td_scheduler_detach(w->sched, &seq->sched);
    r->state = TD_REQ_SENDING;

    struct td_token_out out;
    td_token_out_fill(&out, seq, &item->out);
    Tandem__V1__PrefillTimes t = TANDEM__V1__PREFILL_TIMES__INIT;
    t.queue_us = (r->first_run_ns - r->arrived_ns) / TD_NS_PER_US;
    t.prefill_us = (step_end_ns - r->first_run_ns) / TD_NS_PER_US;
    t.cached_tokens = (uint32_t)seq->sched.n_cached;
    Tandem__V1__FirstToken first = TANDEM__V1__FIRST_TOKEN__INIT;
    Tandem__V1__PrefillEvent ev = TANDEM__V1__PREFILL_EVENT__INIT;
    first.out = &out.msg;
    first.times = &t;
    ev.event_case = TANDEM__V1__PREFILL_EVENT__EVENT_FIRST;
    ev.first = &first;
    send_event(r, &ev);
    td_fault_point("first_token_sent");
    if (seq->finish) {
        td_worker_finish_ok(w, r); /* and prefill_xfer_stop tells the receiver: nothing to decode */
        return;
    }
    TD_ASSERT(r->xfer_live); /* without a grant one token was left (prefill_take): it is finished */
    out.msg.age_us = (td_now_ns() - step_end_ns) / TD_NS_PER_US;
    out.msg.kv_parts = (uint32_t)td_engine_kv_parts(w->engine);
    uint8_t note[TD_XFER_NOTE_MAX];
    size_t note_bytes = tandem__v1__token_out__get_packed_size(&out.msg);
    TD_ASSERT(note_bytes <= sizeof note);
    tandem__v1__token_out__pack(&out.msg, note);
    submit(w, r, seq->sched.n_blocks, true, note, note_bytes);
    td_fault_point("final_submitted");
}

/* ---- transfer -------------------------------------------------------------------------------- */

static void prefill_xfer_event(struct td_worker *w, struct td_req *r,
                               const struct td_xfer_event *ev)
{
    if (ev->kind == TD_XFER_OP_DONE && r->state == TD_REQ_SENDING) {
        td_fault_point("push_done");
        Tandem__V1__PrefillDone done = TANDEM__V1__PREFILL_DONE__INIT;
        Tandem__V1__PrefillEvent out = TANDEM__V1__PREFILL_EVENT__INIT;
        done.transfer_us = ev->elapsed_ns / TD_NS_PER_US;
        done.bytes = ev->bytes;
        done.path = (char *)(uintptr_t)td_xfer_path_name(ev->path);
        out.event_case = TANDEM__V1__PREFILL_EVENT__EVENT_DONE;
        out.done = &done;
        send_event(r, &out);
        r->xfer_live = false;
        td_worker_finish_ok(w, r);
        return;
    }
    if (ev->kind == TD_XFER_OP_FAILED && r->state != TD_REQ_RETIRING) {
        char msg[256], q[200];
        snprintf(msg, sizeof msg, "KV transfer failed: %s", ev->reason);
        td_info_limited("kv_push_failed", "req=%s reason=%s action=fail_attempt", r->logged_name,
                        td_log_quote(q, sizeof q, ev->reason));
        r->xfer_live = false;
        td_worker_end(w, r, TD_ERR_PEER, msg);
        return;
    }
    if (ev->kind == TD_XFER_OP_DONE || ev->kind == TD_XFER_OP_FAILED) td_worker_xfer_over(w, r);
}

/* What this worker has told the router of the request's end counts, not that the transfer failed:
 * the decode worker's word of that may be there first. */
static void prefill_xfer_stop(struct td_worker *w, struct td_req *r, const char *why)
{
    if (r->seq->finish || r->is_refused)
        td_xfer_finished(w->xfer, r->xfer_id);
    else
        td_xfer_cancel(w->xfer, r->xfer_id, why);
}

/* ---- RPC ------------------------------------------------------------------------------------- */

/* The first token that will be sampled is the last that may be. */
static bool one_token_left(const Tandem__V1__Sequence *seq)
{
    return seq && seq->sampling && seq->n_tokens >= seq->n_prompt &&
           seq->sampling->max_tokens == seq->n_tokens - seq->n_prompt + 1;
}

static td_status prefill_accept(struct td_worker *w, struct td_req *r, const ProtobufCMessage *msg,
                                struct td_err *err)
{
    const Tandem__V1__PrefillRequest *in = (const Tandem__V1__PrefillRequest *)msg;
    uint32_t block_size = (uint32_t)w->cfg.model.block_size;
    r->prefill.n_skip = r->prefill.n_sent = in->skip_tokens / block_size;
    /* a longer time is as good as none */
    bool bound =
        in->finish_within_us && in->finish_within_us < MAX_WITHIN_US && in->work_us < MAX_WITHIN_US;
    r->seq->sched.work_ns = bound ? in->work_us * TD_NS_PER_US : 0;
    r->seq->sched.finish_by_ns = bound ? r->arrived_ns + in->finish_within_us * TD_NS_PER_US : 0;
    if (!in->grant.len) return TD_OK;
    r->prefill.grant.data = malloc(in->grant.len);
    if (!r->prefill.grant.data)
        return td_fail(err, TD_ERR_AGAIN, "no memory for a grant of %zu bytes", in->grant.len);
    memcpy(r->prefill.grant.data, in->grant.data, in->grant.len);
    r->prefill.grant.len = in->grant.len;
    return TD_OK;
}

static void prefill_forget(struct td_req *r)
{
    free(r->prefill.grant.data);
    r->prefill.grant.data = NULL;
}

static void prefill_take(struct td_worker *w, const struct td_caller *caller,
                         const Tandem__V1__PrefillRequest *in)
{
    uint32_t block_size = (uint32_t)w->cfg.model.block_size;
    char why[200];
    if (in->grant.len > TD_XFER_BLOB_MAX || (in->grant.len == 0 && !one_token_left(in->seq))) {
        snprintf(why, sizeof why, "grant has %zu bytes, must be 1..%d, or 0 when one token is left",
                 in->grant.len, TD_XFER_BLOB_MAX);
    } else if (in->grant.len == 0 && in->skip_tokens) {
        snprintf(why, sizeof why, "skip_tokens is %u, must be 0 without a grant", in->skip_tokens);
    } else if (in->skip_tokens % block_size ||
               (in->skip_tokens && in->seq && in->skip_tokens >= in->seq->n_tokens)) {
        snprintf(why, sizeof why,
                 "skip_tokens is %u, must be a multiple of the block size %u below the %zu tokens",
                 in->skip_tokens, block_size, in->seq ? in->seq->n_tokens : 0);
    } else {
        td_fault_point("prefill_accepted");
        td_worker_accept(w, caller, &in->base, in->seq);
        return;
    }
    td_worker_turn_away(caller, TD_CODE_INVALID_ARGUMENT, why);
}

static const struct td_worker_role prefill_role = {.name = "prefill",
                                                   .one_token = true,
                                                   .prefill = prefill_take,
                                                   .accept = prefill_accept,
                                                   .forget = prefill_forget,
                                                   .admit = prefill_admit,
                                                   .stepped = prefill_stepped,
                                                   .xfer_event = prefill_xfer_event,
                                                   .engine_opened = prefill_engine_opened,
                                                   .xfer_stop = prefill_xfer_stop};

static struct prefill prefill_daemon;

const struct td_worker_program td_worker_program = {
    .name = "tandem-prefill",
    .summary = "Prefill worker: computes prompts and pushes their KV to decode workers.",
    .role = &prefill_role,
    .worker = &prefill_daemon.worker,
    .options = prefill_options,
    .config = &prefill_daemon.cfg};
