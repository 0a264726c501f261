/* step_loop.c - the engine thread: mail, transfer events, admission, one step, and what the router
 * is told of it.
 *
 * Nothing in a turn blocks but the step itself; an idle loop waits for its wake-up, at most 100
 * ms. */
#include "common/worker/worker_parts.h"

#include <signal.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/fault.h"
#include "common/base/log.h"

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
    if (s == TD_ERR_AGAIN) r->state = TD_REQ_SCHEDULED;
    return s;
}

/* The batch as the router's latency model counts it. */
static Tandem__V1__StepReport step_report(const struct td_sched_load *load)
{
    Tandem__V1__StepReport report = TANDEM__V1__STEP_REPORT__INIT;
    report.prefill_tokens = (uint32_t)load->prefill_rows;
    report.decode_seqs = (uint32_t)load->decode_rows;
    report.attention_work = load->attention_work_x2 / 2;
    report.context_tokens = load->context_tokens;
    return report;
}

/* A busy worker's step lasts from the end of the one before: what happens between two steps is
 * part of every token's time. */
static void tell_step(struct td_worker *w, Tandem__V1__StepReport *report, uint64_t start_ns,
                      uint64_t end_ns)
{
    uint64_t us = (end_ns - (w->last_step_ns ? w->last_step_ns : start_ns)) / TD_NS_PER_US;
    report->wall_us = us > UINT32_MAX ? UINT32_MAX : (uint32_t)us;
    w->last_step_ns = end_ns;
    pthread_mutex_lock(&w->told.lock);
    for (int i = 0; i < TD_WORKER_MAX_ROUTERS; i++) {
        struct td_worker_report *due = &w->told.reports[i];
        if (due->joined && due->n_steps < TD_WORKER_MAX_STEPS) due->steps[due->n_steps++] = *report;
    }
    pthread_mutex_unlock(&w->told.lock);
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
        td_guided_trim(&r->guided);
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
        const char *why = r->filter && w->items[i].status == TD_ERR_NOT_FOUND
                              ? "sampling.allowed_token_ids and bad_words leave no token to choose"
                              : td_guided_reason(w->items[i].status);
        if (why)
            td_worker_end(w, r, TD_ERR_INVALID, why);
        else if (w->items[i].status)
            td_worker_end(w, r, TD_ERR_INTERNAL,
                          "the model gave no finite logit for this sequence");
        else
            w->role->stepped(w, r, &w->items[i], start, end);
    }
    return true;
}

/* ---- what the router is told ----------------------------------------------------------------- */

uint64_t td_worker_kv_bytes_per_token(const struct td_worker *w)
{
    return td_kv_pool_layout(td_engine_kv(w->engine))->block_bytes /
           (uint64_t)w->cfg.model.block_size;
}

/* What requests of other routers than this one are and hold. */
static void count_foreign(const struct td_worker *w, uint64_t session, struct td_worker_report *due)
{
    due->foreign_seqs = due->foreign_running = 0;
    due->foreign_tokens = due->foreign_queued = 0;
    for (const struct td_req *q = w->live; q; q = q->live_next) {
        const struct td_sched_seq *s = &q->seq->sched;
        if (q->session == session || q->state == TD_REQ_OVER) continue;
        due->foreign_seqs++;
        due->foreign_running += s->list == TD_SCHED_RUNNING;
        due->foreign_tokens += (uint64_t)s->n_tokens;
        if (s->list == TD_SCHED_WAITING)
            due->foreign_queued += (uint64_t)s->n_tokens;
        else if (s->list == TD_SCHED_RUNNING && s->phase == TD_SEQ_PREFILL)
            due->foreign_queued += (uint64_t)(s->n_tokens - s->n_computed);
    }
}

/* Under told.lock: what one router is told. True: it is a new one, which knows of no block. */
static bool report_to(struct td_worker *w, int at, uint32_t n_routers)
{
    struct td_worker_router *router = &w->routers[at];
    struct td_worker_report *due = &w->told.reports[at];
    uint64_t session = atomic_load(&router->session);
    due->calls_taken =
        due->calls_refused + (router->counted_session == session ? router->calls_taken : 0);
    if (n_routers > 1)
        count_foreign(w, session, due);
    else
        due->foreign_seqs = due->foreign_running = 0, due->foreign_tokens = due->foreign_queued = 0;
    if (due->epoch != router->epoch) {
        router->epoch = due->epoch;
        due->n_added = due->n_evicted = 0;
        due->reset = true;
        return true;
    }
    if (due->n_added == 0 && due->n_evicted == 0)
        td_kv_report_take(td_engine_kv(w->engine), at, TD_WORKER_MAX_BLOCKS, due->added,
                          &due->n_added, due->evicted, &due->n_evicted);
    return false;
}

/* What is not the same for all routers. */
static void update_reports(struct td_worker *w)
{
    uint64_t seeds[TD_WORKER_MAX_ROUTERS] = {0};
    bool is_new[TD_WORKER_MAX_ROUTERS] = {false}, left[TD_WORKER_MAX_ROUTERS] = {false};
    uint32_t n_routers = 0;
    pthread_mutex_lock(&w->told.lock);
    for (int i = 0; i < TD_WORKER_MAX_ROUTERS; i++) n_routers += w->told.reports[i].joined;
    w->told.snap.routers = n_routers > 1 ? n_routers : 0;
    for (int i = 0; i < TD_WORKER_MAX_ROUTERS; i++) {
        seeds[i] = w->told.reports[i].seed;
        left[i] = !w->told.reports[i].joined;
        if (!left[i]) is_new[i] = report_to(w, i, n_routers);
    }
    pthread_mutex_unlock(&w->told.lock);
    for (int i = 0; i < TD_WORKER_MAX_ROUTERS; i++) {
        if (left[i] || (is_new[i] && !seeds[i])) td_kv_report_end(td_engine_kv(w->engine), i);
        if (is_new[i] && seeds[i] && td_kv_report_begin(td_engine_kv(w->engine), i, seeds[i]))
            td_warn_limited("blocks_untold", "router=%d reason=\"no memory\"", i);
    }
}

void td_worker_update_snapshot(struct td_worker *w)
{
    struct td_worker_numbers n = {.n_running = (uint32_t)w->sched->n_running,
                                  .n_waiting = (uint32_t)w->sched->n_waiting,
                                  .n_preemptions = w->sched->n_preemptions,
                                  .prefill_tokens = w->prefill_tokens,
                                  .decode_tokens = w->decode_tokens,
                                  .steps = w->steps,
                                  .kv_bytes_per_token = td_worker_kv_bytes_per_token(w)};
    td_kv_pool_stats(td_engine_kv(w->engine), &n.kv);
    td_xfer_stats(w->xfer, &n.xfer);
    td_engine_expert_counts(w->engine, &n.experts);
    td_model_expert_memory(td_engine_model(w->engine), &n.expert_memory);
    n.kv_usage = (double)n.kv.n_held / (double)n.kv.n_blocks;
    td_worker_metrics_update(&n);
    pthread_mutex_lock(&w->told.lock);
    Tandem__V1__Snapshot *s = &w->told.snap;
    s->kv_held = (uint32_t)n.kv.n_held;
    s->kv_cached = (uint32_t)n.kv.n_cached;
    s->running = n.n_running;
    s->waiting = n.n_waiting;
    s->tokens_queued = td_scheduler_queued_tokens(w->sched);
    s->prefill_tokens_total = w->prefill_tokens;
    s->decode_tokens_total = w->decode_tokens;
    s->kv_bytes_sent = n.xfer.bytes_sent;
    s->kv_bytes_received = n.xfer.bytes_received;
    s->steps_total = w->steps;
    s->slots_used = n.xfer.n_slots_used + n.xfer.n_ops_used;
    pthread_mutex_unlock(&w->told.lock);
    update_reports(w);
}

/* Prompts that would be late go back before they are begun (PrefillRequest.finish_within_us). */
static void give_back_late(struct td_worker *w)
{
    struct td_sched_seq *sched;
    while ((sched = td_scheduler_late(w->sched, td_now_ns()))) {
        struct td_req *r = ((struct td_seq *)(void *)sched)->owner;
        td_debug("prompt_given_back", "req=%s", r->logged_name);
        td_worker_end_late(w, r);
    }
}

/* ---- the loop -------------------------------------------------------------------------------- */

static void hand_over_all(struct td_worker *w)
{
    for (struct td_req *r = w->live, *next; r; r = next) {
        next = r->live_next;
        td_worker_end(w, r, TD_ERR_PEER,
                      "this worker is draining; the rest of the request belongs elsewhere");
    }
}

void *td_worker_engine_main(void *arg)
{
    struct td_worker *w = arg;
    pthread_setname_np(pthread_self(), "engine");
    bool busy = true;
    for (;;) {
        td_wakeup_wait(&w->wakeup, busy ? 0 : td_deadline_after_ms(td_now_ns(), 100));
        atomic_store(&w->progress_ns, td_now_ns());
        bool stopping = atomic_load(&w->stopping); /* before the mail is taken: what was posted
                                                      before it is not lost */
        td_worker_take_mail(w);
        take_xfer_events(w);
        if (atomic_load(&w->hand_over)) hand_over_all(w);
        td_multiplex_flush(w);
        if (stopping && atomic_load(&w->n_live) == 0) return NULL;
        td_scheduler_admit_waiting(w->sched, td_now_ns(), admit, w);
        give_back_late(w);
        td_multiplex_flush(w); /* nobody waits a step for a ticket */
        busy = step(w);
        td_multiplex_flush(w);
        struct td_err err = {0};
        if (!busy) w->last_step_ns = 0;
        if (!busy && !atomic_load(&w->device_lost) && td_engine_check(w->engine, &err))
            ranks_lost(&err);
        td_worker_update_snapshot(w);
    }
}
