/* workers.c - events about workers: who is there, what they report, and what is lost with them. */
#include <math.h>
#include <string.h>

#include "router/core/core_state.h"

/* Rate of the EWMA over steps of mix_share. A sequence feels the mean of some hundred steps: a
 * greater rate would take the worker for full after one prompt, and for empty soon after it. */
#define MIX_SHARE_RATE 0.02
/* How far the sequence number of a worker's snapshots may jump: five hours of them at one each
 * 20 ms. A worker that was silent for so long has been lost long ago. */
#define MAX_SEQ_JUMP (1u << 20)
/* The first one after a join is where its numbers begin: a worker that joins again may count on. It
 * leaves room for those that follow. */
#define MAX_FIRST_SEQ (UINT64_MAX >> 1)
/* A worker that reports more than these is in error, and nothing is learned from it. */
#define MAX_STEP_TOKENS (1u << 20)
#define MAX_KV_BYTES_PER_TOKEN (1u << 30)
/* Of this length is a prompt whose time says what a token of others' prompts takes, until this
 * router's own have shown it. */
#define MEAN_PROMPT 512
/* Rate of the EWMA of mix_rows: the mean of some five steps. */
#define MIX_ROWS_RATE 0.2

/* How much the worker's next step takes of the time between a step of one sequence and the guarded
 * TPOT, 0..1. It is 0 where even a step of one sequence is longer than that TPOT: then there is no
 * room to keep. */
static double step_share(const struct td_core *c, uint32_t worker)
{
    const struct td_core_worker *w = &c->workers[worker];
    if (c->classes.guarded_tpot_s >= INFINITY) return 0;
    double q = td_latency_margin(c->latency, TD_LAT_TPOT, c->classes.guarded_tpot_class,
                                 TD_LAT_LIMIT_BUCKET);
    double one_s = td_latency_step(c->latency, worker, 1, 0, 0, 0),
           room_s = c->classes.guarded_tpot_s / q - one_s;
    return room_s > 0 ? fmin(1, fmax(0, w->decode.step_s - one_s) / room_s) : 0;
}

/* Predicts the decode worker's next step, which the scans of policies read. */
void core_refresh_step(struct td_core *c, uint32_t worker)
{
    struct td_core_worker *w = &c->workers[worker];
    if (w->role != TD_ROLE_DECODE) return;
    w->decode.step_s = td_worker_step_s(
        c->latency, worker, w, w->decode.n_active + w->n_pending + w->foreign.n_seqs + 1.0,
        (double)(w->decode.active_tokens + w->decode.reserved_tokens + w->foreign.tokens));
    if (c->cfg.n_classes > 1) w->decode.step_share = step_share(c, worker);
    td_account_changed(w);
}

void core_shun(struct td_core *c, uint32_t worker)
{
    c->workers[worker].shunned = true;
    td_account_changed(&c->workers[worker]);
}

void core_set_state(struct td_core_worker *w, enum td_worker_state state)
{
    w->state = state;
    td_account_changed(w);
}

/* Moves every request off a worker that cannot be counted on. */
void core_worker_lost(struct td_core *c, uint32_t worker, const char *reason)
{
    c->foreign_on_way -= c->workers[worker].foreign.on_way; /* other routers move theirs, too */
    c->workers[worker].foreign.on_way = 0;
    for (uint32_t i = 0; i < c->requests_end; i++) {
        struct request *r = &c->requests[i];
        if (r->phase == FREE || r->phase == QUEUED) continue;
        bool on_decode = r->decode.worker == worker, on_prefill = r->prefill.worker == worker;
        if (on_prefill && (r->prefill.planned || r->decode_flows)) {
            /* It was not called yet, and the ticket finds another; or its work is done. */
            if (core_prefill_told(r)) core_emit(c, TD_ACT_CANCEL_PREFILL, r);
            core_leg_close(c, &r->prefill);
            on_prefill = false;
            if (r->finished_ns) core_complete(c, r);
        }
        if (on_decode || on_prefill) core_fail_over(c, r, reason);
    }
}

static struct td_core_worker *known_worker(struct td_core *c, uint32_t worker)
{
    if (worker >= TD_CORE_MAX_WORKERS || c->workers[worker].state == TD_WORKER_ABSENT) return NULL;
    return &c->workers[worker];
}

static void roster_remove(struct td_core *c, uint32_t worker)
{
    for (int role = 0; role < 2; role++)
        for (uint32_t i = 0; i < c->n_by_role[role]; i++)
            if (c->by_role[role][i] == worker) {
                memmove(&c->by_role[role][i], &c->by_role[role][i + 1],
                        (c->n_by_role[role] - i - 1) * sizeof c->by_role[role][0]);
                c->n_by_role[role]--;
                break;
            }
}

/* In the order of the index, by which round robin goes. */
static void roster_insert(struct td_core *c, uint32_t worker, enum td_core_role role)
{
    uint32_t i = c->n_by_role[role]++;
    for (; i > 0 && c->by_role[role][i - 1] > worker; i--)
        c->by_role[role][i] = c->by_role[role][i - 1];
    c->by_role[role][i] = worker;
}

void core_on_gone(struct td_core *c, uint32_t worker)
{
    if (!known_worker(c, worker)) return;
    roster_remove(c, worker);
    /* SUSPECT, so that nothing is placed there while its requests move. */
    core_set_state(&c->workers[worker], TD_WORKER_SUSPECT);
    core_worker_lost(c, worker, "the worker left");
    core_set_state(&c->workers[worker], TD_WORKER_ABSENT);
    if (c->index) td_prefix_index_reset(c->index, worker);
}

void core_on_join(struct td_core *c, const struct td_ev_join *e)
{
    if (e->worker >= TD_CORE_MAX_WORKERS || e->role > TD_ROLE_DECODE) return;
    if (e->kv_tokens == 0 || e->kv_tokens > TD_CORE_MAX_TOKENS) return;
    if (e->max_seqs == 0 || e->max_seqs > TD_CORE_MAX_SEQS) return;
    core_on_gone(c, e->worker); /* a worker that had this index and was not seen to leave */
    struct td_ev_join join = *e;
    if (join.node_class >= TD_CORE_MAX_NODE_CLASSES) join.node_class = TD_CORE_MAX_NODE_CLASSES - 1;
    if (join.max_step_tokens > MAX_STEP_TOKENS) join.max_step_tokens = MAX_STEP_TOKENS;
    if (join.kv_bytes_per_token > MAX_KV_BYTES_PER_TOKEN)
        join.kv_bytes_per_token = MAX_KV_BYTES_PER_TOKEN;
    td_account_join(&c->workers[e->worker], &join, c->now_ns);
    td_latency_node_join(c->latency, e->worker, (uint32_t)join.node_class);
    roster_insert(c, e->worker, e->role);
    if (e->worker >= c->n_workers) c->n_workers = e->worker + 1;
    core_refresh_step(c, e->worker);
    c->room_changed = true;
}

/* Neither an old one, nor so far ahead that every later snapshot would look old. */
static bool is_next_snapshot(const struct td_core_worker *w, uint64_t seq)
{
    if (w->snapshot_seq == 0) return seq > 0 && seq <= MAX_FIRST_SEQ;
    return seq > w->snapshot_seq && seq - w->snapshot_seq <= MAX_SEQ_JUMP;
}

void core_on_snapshot(struct td_core *c, const struct td_ev_snapshot *e)
{
    struct td_core_worker *w = known_worker(c, e->worker);
    if (!w || !is_next_snapshot(w, e->seq)) return;
    /* It was silent, so its margins were wider: now they are what they were. */
    if (td_worker_doubt(w, c->now_s) > 1) c->room_changed = true;
    td_account_snapshot(w, e, c->now_s);
    w->snapshot_ns = c->now_ns;
    bool is_back = w->state == TD_WORKER_SUSPECT;
    if (w->shunned || is_back) c->room_changed = true;
    w->shunned = false;
    core_set_state(w, !is_back ? w->state : w->draining ? TD_WORKER_DRAINING : TD_WORKER_READY);
    if (is_back) core_refresh_step(c, e->worker); /* its step was that of the batch it lost */
}

/* More than any worker has is an error of who said it. */
static uint64_t at_most(uint64_t value, uint64_t most) { return value < most ? value : most; }

/* What others' requests will have beside what they have now: nobody says, so half of what an output
 * is expected to be. */
void core_on_foreign(struct td_core *c, const struct td_ev_foreign *e)
{
    struct td_core_worker *w = known_worker(c, e->worker);
    if (!w) return;
    struct td_ev_foreign f = {.worker = e->worker,
                              .n_routers = at_most(e->n_routers, TD_CORE_MAX_ROUTERS),
                              .n_seqs = at_most(e->n_seqs, TD_CORE_MAX_SEQS),
                              .n_running = at_most(e->n_running, TD_CORE_MAX_SEQS),
                              .tokens = at_most(e->tokens, TD_CORE_MAX_TOKENS),
                              .queued_tokens = at_most(e->queued_tokens, TD_CORE_MAX_TOKENS)};
    double more = td_latency_output(c->latency, 0, 0.5, TD_CORE_MAX_TOKENS) / 2;
    if (w->prefill.s_per_token <= 0)
        w->prefill.s_per_token =
            td_latency_prefill(c->latency, e->worker, MEAN_PROMPT, 0, w->max_step_tokens) /
            MEAN_PROMPT;
    c->foreign_on_way -= w->foreign.on_way;
    td_account_foreign(w, &f, (double)f.tokens + (double)f.n_seqs * more);
    c->foreign_on_way += w->foreign.on_way;
    core_refresh_step(c, e->worker);
    c->room_changed = true;
}

/* No step has such numbers. */
static bool absurd(const struct td_ev_step *e)
{
    return e->wall_us == 0 || e->wall_us > MAX_REPORTED_US || e->prefill_tokens > MAX_STEP_TOKENS ||
           e->decode_seqs > TD_CORE_MAX_SEQS || e->attention_work > 1ull << 50 ||
           e->context_tokens > 1ull << 40;
}

void core_on_step(struct td_core *c, const struct td_ev_step *e)
{
    struct td_core_worker *w = known_worker(c, e->worker);
    if (!w || absurd(e)) return;
    struct td_lat_step s = {.prefill_tokens = (uint32_t)e->prefill_tokens,
                            .decode_seqs = (uint32_t)e->decode_seqs,
                            .wall_us = (uint32_t)e->wall_us,
                            .attention_work = e->attention_work,
                            .context_tokens = e->context_tokens};
    td_latency_observe_step(c->latency, e->worker, &s);
    w->busy_us += e->wall_us;
    w->prefill.stepped = true;
    if (e->decode_seqs) { /* prefill steps without decode rows disturb nobody */
        w->decode.mix_share += MIX_SHARE_RATE * ((e->prefill_tokens ? 1 : 0) - w->decode.mix_share);
        if (e->prefill_tokens)
            w->decode.mix_rows += MIX_ROWS_RATE * ((double)e->prefill_tokens - w->decode.mix_rows);
    }
    w->correction = td_latency_correction(c->latency, e->worker);
    td_account_changed(w);
    if (e->decode_seqs) core_refresh_step(c, e->worker);
}

void core_on_drain(struct td_core *c, uint32_t worker)
{
    struct td_core_worker *w = known_worker(c, worker);
    if (!w) return;
    w->draining = true;
    if (w->state == TD_WORKER_READY) core_set_state(w, TD_WORKER_DRAINING);
}

/* The worker's prefix index, when there is one and the worker is known; else NULL. */
static struct td_prefix_index *index_of(struct td_core *c, uint32_t worker)
{
    return known_worker(c, worker) ? c->index : NULL;
}

void core_on_block_add(struct td_core *c, const struct td_ev_block *e)
{
    if (index_of(c, e->worker)) td_prefix_index_add(c->index, e->worker, e->hash);
}

void core_on_block_evict(struct td_core *c, const struct td_ev_block *e)
{
    if (index_of(c, e->worker)) td_prefix_index_evict(c->index, e->worker, e->hash);
}

void core_on_blocks_reset(struct td_core *c, uint32_t worker)
{
    if (index_of(c, worker)) td_prefix_index_reset(c->index, worker);
}
