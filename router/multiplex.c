/* multiplex.c - the calls to one worker in one stream (Worker.Multiplex): legs go up, and the rows
 * of a worker's step come down in one message, so a token costs this process no message of its own.
 *
 *   NULL --first call--> open --on_done--> freed; the next call opens another
 *   open --the worker is gone--> cancelled --on_done--> freed
 *
 * A call's id is its cell in the table of legs, and how many calls had that cell before: rows of a
 * call that was cancelled name a call that is not there. When the stream ends, its legs end as
 * UNAVAILABLE, as they would with calls of their own to a worker that is gone.
 *
 * Invariants: (1) a leg in the table has l->multiplex == m, and the reverse; (2) the stream holds
 * its worker_conn like one leg. */
#include <stdlib.h>
#include <string.h>

#include "common/base/log.h"
#include "router/http/http.h"
#include "router/router.h"

/* A longer call goes on its own: other calls need not wait for it, and a worker that refuses its
 * size ends no others. */
enum { MAX_CALL_BYTES = 1 << 20, CELL_BITS = 20 };

/* Most calls are smaller. */
enum { SMALL_CALL_BYTES = 4096 };

struct cell {
    struct leg *leg; /* NULL: free */
    uint64_t n_used; /* calls that had the cell before */
    uint32_t next_free;
};

struct multiplex {
    struct worker_conn *worker;
    struct td_rpc_call *call;
    bool is_over;
    struct cell *cells;
    uint32_t n_cells, capacity, first_free; /* n_cells: none is free */
};

static struct leg *leg_of(const struct multiplex *m, uint64_t id)
{
    uint64_t at = id & ((1u << CELL_BITS) - 1);
    if (at >= m->n_cells || m->cells[at].n_used != id >> CELL_BITS) return NULL;
    return m->cells[at].leg;
}

/* The leg's id; the table is bounded by the legs that there can be. */
static uint64_t enter(struct multiplex *m, struct leg *l)
{
    if (m->first_free == m->n_cells) {
        TD_ASSERT(m->n_cells < 1u << CELL_BITS);
        if (m->n_cells == m->capacity) {
            m->capacity = m->capacity ? m->capacity * 2 : 64;
            struct cell *grown = realloc(m->cells, m->capacity * sizeof *grown);
            TD_ASSERT(grown); /* small and bounded by 2 x max_requests */
            m->cells = grown;
        }
        m->cells[m->n_cells] = (struct cell){.next_free = m->n_cells + 1};
        m->n_cells++;
    }
    uint32_t at = m->first_free;
    m->first_free = m->cells[at].next_free;
    m->cells[at].leg = l;
    return m->cells[at].n_used << CELL_BITS | at;
}

static void leave(struct leg *l)
{
    struct multiplex *m = l->multiplex;
    uint32_t at = (uint32_t)(l->call_id & ((1u << CELL_BITS) - 1));
    TD_ASSERT(m->cells[at].leg == l);
    m->cells[at].leg = NULL;
    m->cells[at].n_used++;
    m->cells[at].next_free = m->first_free;
    m->first_free = at;
    l->multiplex = NULL;
}

static void on_message(struct td_rpc_call *call, const ProtobufCMessage *msg, void *user)
{
    (void)call;
    struct multiplex *m = user;
    const Tandem__V1__MultiplexDown *down = (const Tandem__V1__MultiplexDown *)msg;
    struct router_http *http = m->worker->router->http;
    router_http_hold(http); /* a client gets the tokens of one message in one piece */
    for (size_t i = 0; i < down->n_rows; i++) {
        const Tandem__V1__MultiplexRow *row = down->rows[i];
        struct leg *l = leg_of(m, row->id);
        if (!l) continue; /* cancelled meanwhile */
        if (row->row_case != TANDEM__V1__MULTIPLEX_ROW__ROW_END) {
            leg_row(l, row);
            continue;
        }
        leave(l);
        leg_end(l, (enum td_code)row->end->code, row->end->details);
    }
    router_http_release(http);
}

static void on_done(struct td_rpc_call *call, const struct td_rpc_result *res, void *user)
{
    (void)call;
    struct multiplex *m = user;
    struct worker_conn *w = m->worker;
    m->is_over = true;
    if (w->multiplex == m) w->multiplex = NULL;
    for (uint32_t i = 0; i < m->n_cells; i++) {
        struct leg *l = m->cells[i].leg;
        if (!l) continue;
        leave(l);
        leg_end(l, TD_CODE_UNAVAILABLE, res->code ? res->details : "the stream of calls ended");
    }
    free(m->cells);
    free(m);
    worker_conn_release(w);
}

static struct multiplex *open_stream(struct worker_conn *w)
{
    static const struct td_rpc_client_method method = {
        "/tandem.v1.Worker/Multiplex", &tandem__v1__multiplex_down__descriptor, true};
    static const struct td_rpc_handler handler = {on_message, on_done};
    struct multiplex *m = calloc(1, sizeof *m);
    TD_ASSERT(m); /* one for each worker */
    char proof[TD_CALL_PROOF_MAX];
    struct td_rpc_metadata metadata;
    size_t n = worker_proof(w, method.path, 0, 0, proof, &metadata);
    m->worker = w;
    w->n_legs++;
    w->multiplex = m;
    m->call = td_rpc_call_start(w->channel, &method, NULL, 0, false, &metadata, n, &handler, m);
    td_rpc_call_set_merged(m->call);
    return m;
}

/* A MultiplexUp of one call of n_bytes, as protobuf-c packs it, which would measure the call again
 * for that. */
static size_t pack_up(uint8_t *to, const Tandem__V1__MultiplexCall *call, size_t n_bytes)
{
    size_t n = 0, left = n_bytes;
    to[n++] = 1 << 3 | 2; /* field 1, calls: bytes */
    for (; left >= 0x80; left >>= 7) to[n++] = (uint8_t)(left | 0x80);
    to[n++] = (uint8_t)left;
    size_t packed = protobuf_c_message_pack(&call->base, to + n);
    TD_ASSERT(packed == n_bytes);
    return n + packed;
}

/* n_bytes: of the call, packed. What cannot be sent ends the stream, and so the legs. */
static void send_call(struct multiplex *m, Tandem__V1__MultiplexCall *call, size_t n_bytes)
{
    uint8_t small[SMALL_CALL_BYTES + 16];
    if (n_bytes <= SMALL_CALL_BYTES) {
        td_rpc_call_send_packed(m->call, small, pack_up(small, call, n_bytes));
        return;
    }
    Tandem__V1__MultiplexUp up = TANDEM__V1__MULTIPLEX_UP__INIT;
    up.n_calls = 1;
    up.calls = &call;
    td_rpc_call_send(m->call, &up.base);
}

/* What the id adds to a call that was measured without. */
static size_t id_bytes(uint64_t id)
{
    size_t n = id > 0; /* proto3 leaves a zero out */
    for (; id; id >>= 7) n++;
    return n;
}

bool multiplex_call(struct leg *l, Tandem__V1__MultiplexCall *call)
{
    struct worker_conn *w = l->worker;
    if (!w->takes_multiplex) return false;
    size_t n_bytes = protobuf_c_message_get_packed_size(&call->base); /* its id is 0 still */
    if (n_bytes > MAX_CALL_BYTES) return false;
    if (!w->multiplex) open_stream(w);
    l->multiplex = w->multiplex;
    l->call_id = call->id = enter(l->multiplex, l);
    send_call(l->multiplex, call, n_bytes + id_bytes(call->id));
    return true;
}

void multiplex_cancel(struct leg *l)
{
    struct multiplex *m = l->multiplex;
    Tandem__V1__MultiplexCall call = TANDEM__V1__MULTIPLEX_CALL__INIT;
    Tandem__V1__MultiplexCancel cancel = TANDEM__V1__MULTIPLEX_CANCEL__INIT;
    call.id = l->call_id;
    call.call_case = TANDEM__V1__MULTIPLEX_CALL__CALL_CANCEL;
    call.cancel = &cancel;
    if (!m) return; /* its end is being told */
    leave(l);
    if (!m->is_over) send_call(m, &call, protobuf_c_message_get_packed_size(&call.base));
}

void multiplex_close(struct worker_conn *w)
{
    struct multiplex *m = w->multiplex;
    if (!m) return;
    w->multiplex = NULL;
    td_rpc_call_cancel(m->call);
}
