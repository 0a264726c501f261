/* xfer_soak_state.c - what an endpoint knows of its transfers, on stderr: for whoever reads that
 * one of them hangs. It looks into the engine, which has no call for this. */
#include "tests/unit/xfer_soak.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <time.h>

#include "common/base/clock.h"
#include "common/transfer/endpoint.h"
#include "common/transfer/rdma/rdma.h"

#define NAME(names, i) ((size_t)(i) < sizeof(names) / sizeof(names)[0] ? (names)[i] : "?")

/* Milliseconds from now on; a time that is not set is left out. */
static void print_time(const char *what, uint64_t at_ns, uint64_t now)
{
    if (!at_ns || at_ns == TD_NEVER_NS) return;
    fprintf(stderr, ", %s in %.1f ms", what, ((double)at_ns - (double)now) / 1e6);
}

static void print_holds(const struct td_xfer_holds *h)
{
    static const char *const names[] = {"io",         "device",  "nic",   "writer",
                                        "quarantine", "windows", "flush", "reader"};
    _Static_assert(sizeof names / sizeof names[0] == TD_N_HOLDS, "a name for each hold");
    fprintf(stderr, ", %u holds", h->n);
    for (int i = 0; i < TD_N_HOLDS; i++)
        if (h->of[i]) fprintf(stderr, " %s:%u", names[i], h->of[i]);
}

static void print_slot(const struct td_xfer *x, uint32_t id, uint64_t now)
{
    static const char *const states[] = {"FREE",  "ARMED",  "FILLING",  "VERIFYING",
                                         "READY", "FAILED", "REVOKING", "RETIRED"};
    static const char *const windows[] = {"none", "binding", "open", "ending"};
    const struct td_xfer_slot *s = &x->core.slots[id];
    const struct grant_windows *g = x->rdma && x->rdma->grant ? &x->rdma->grant[id] : NULL;
    if (s->state == TD_SLOT_FREE) return;
    fprintf(stderr, "    slot %u, transfer %" PRIu64 ": %s, attempt %u on connection %" PRIx64, id,
            s->user / SOAK_JOBS, NAME(states, s->state), s->attempt, s->conn);
    print_holds(&s->holds);
    fprintf(stderr, ", %" PRIu64 " bytes of %d blocks, %d targets, %d of %d refs%s", s->bytes_got,
            s->n_blocks, s->nic.n_targets, s->fetch.at, s->fetch.n_refs,
            s->final_seen ? ", final" : "");
    fprintf(stderr, ", words %x of %x, writer %" PRIx64 "%s", s->nic.qps_got, s->nic.qps_want,
            s->nic.writer_conn, s->nic.owe_conn ? ", owes FAIL" : "");
    if (g) fprintf(stderr, ", windows %s", NAME(windows, g->state));
    print_time("deadline", s->deadline_ns, now);
    print_time("orphan", s->orphan_ns, now);
    print_time("retire", s->nic.retire_ns, now);
    print_time("evict", s->nic.evict_ns, now);
    print_time("quarantine", s->nic.quarantine_ns, now);
    fprintf(stderr, "%s%s\n", s->reason[0] ? ": " : "", s->reason);
}

static void print_op(const struct td_xfer *x, uint32_t id, uint64_t now)
{
    static const char *const states[] = {"FREE",         "WAIT_CONN", "STREAMING",
                                         "WAIT_VERDICT", "STOPPING",  "ENDED"};
    const struct td_xfer_op *op = &x->core.ops[id];
    if (op->state == TD_OP_FREE) return;
    fprintf(stderr, "    op %u, transfer %" PRIu64 ": %s, attempt %u on connection %" PRIx64, id,
            op->user / SOAK_JOBS, NAME(states, op->state), op->attempt, op->conn);
    print_holds(&op->holds);
    fprintf(stderr, ", begun %" PRIu64 " of %" PRIu64 " bytes submitted%s, %d targets of %d",
            op->sent.bytes_begun, op->bytes_ready, op->final ? " (all)" : "", op->nic.n_targets,
            op->grant.n_blocks);
    fprintf(stderr, ", requests on %" PRIx64 ", reader %" PRIx64 ", waits for %" PRIx64,
            op->nic.wr_conn, op->pull.reader_conn, x->op_aux[id].waits_for);
    print_time("deadline", op->deadline_ns, now);
    print_time("retry", op->tries.retry_ns, now);
    print_time("stop", op->stop_ns, now);
    fprintf(stderr, "%s%s\n", op->reason[0] ? ": " : "", op->reason);
}

static void print_conn(const struct td_xfer_conn *c, uint64_t now)
{
    static const char *const states[] = {"FREE",  "CONNECTING", "TLS",   "HELLO",
                                         "SETUP", "READY",      "ENDING"};
    fprintf(stderr,
            "    connection %" PRIx64 " (%" PRIx64 ", lane %u) of %s, %s, %s, heard %.1f ms ago, "
            "%u bytes to send%s%s%s\n",
            c->id, c->conn_id, c->lane, c->peer.instance, c->backend->name, NAME(states, c->state),
            ((double)now - (double)c->last_rx_ns) / 1e6, c->tx.used + c->tx.left,
            c->tx.ready ? ", ready" : "", c->tx.want_out ? ", waits for the socket" : "",
            c->retiring ? ", retiring" : "");
}

static void print_qp_set(const struct qp_set *set, uint64_t now)
{
    static const char *const states[] = {"stands", "doomed", "broken", "fenced"};
    fprintf(stderr, "    queue pairs of connection %" PRIx64 ": %s%s", set->conn,
            NAME(states, set->end.state), set->joining ? ", connecting" : "");
    print_time("ends", set->end.at_ns, now);
    fprintf(stderr, "%s%s\n", set->end.reason[0] ? ": " : "", set->end.reason);
    for (uint32_t q = 0; q < TD_XFER_QPS_MAX; q++) {
        const struct queue_pair *p = &set->qp[q];
        if (!p->qp) continue;
        fprintf(stderr,
                "      %u on rail %u: requests %" PRIu64 " to %" PRIu64 " pending (seen to %" PRIu64
                "), %" PRIu64 " bytes, %u receives, %u words\n",
                p->qp->num, p->rail, p->tail, p->head, p->flushed, p->in_flight, p->recv_left,
                p->words);
    }
}

void soak_print_state(struct td_xfer *x, uint32_t end)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 2;
    int e = pthread_mutex_timedlock(&x->lock, &until);
    uint64_t now = td_now_ns();
    fprintf(stderr, "  endpoint %u%s: %u events queued", end,
            e == ETIMEDOUT ? ", whose lock somebody holds" : "", x->core.n_events);
    print_time("next tick", x->core.next_tick_ns, now);
    print_time("next check", x->loop.next_check_ns, now);
    fprintf(stderr, "%s%s%s\n", x->loop.rung ? ", rung" : "", x->loop.sleeps ? ", sleeps" : "",
            x->loop.attach_due ? ", an op waits for a connection" : "");
    for (uint32_t i = 0; i < x->core.max_slots; i++) print_slot(x, i, now);
    for (uint32_t i = 0; i < x->core.max_ops; i++) print_op(x, i, now);
    for (uint32_t i = 0; i < x->n_conns; i++) print_conn(x->live[i], now);
    if (!x->n_conns) fprintf(stderr, "    no connection\n"); /* unused ones are closed */
    if (x->rdma)
        EACH_QP_SET (x->rdma, set) print_qp_set(set, now);
    if (!e) pthread_mutex_unlock(&x->lock);
    fflush(stderr);
}
