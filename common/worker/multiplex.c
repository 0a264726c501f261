/* multiplex.c - many calls of the router in one stream (Worker.Multiplex).
 *
 * The rpc thread turns each call of a message into a request, as if it had come as a call of its
 * own (requests.c). The engine thread collects what becomes of the requests as packed rows and
 * sends the rows of one turn as one message: before a step (tickets, ends), and after it (tokens).
 *
 *   opened --first message: proof of the secret checked--> open
 *   open --the router half-closes, cancels or is gone, or this worker stops--> ended
 *   ended --mail STREAM_ENDED: its requests end--> over --last request freed--> freed
 *
 * Invariants: (1) the rpc thread posts STREAM_ENDED last, so the engine thread meets no request of
 * a stream that is over; (2) rows of one call keep their order, and an end is the last of them;
 * (3) a request that has been freed counts in n_live until its end was sent, so a worker that
 * drains does not stop before. */
#include <stdlib.h>
#include <string.h>

#include "common/base/log.h"
#include "common/worker/worker_parts.h"

struct td_multiplex {
    struct td_worker *w;
    struct td_rpc_call *call;          /* referenced; never changes */
    struct td_multiplex *next, **prev; /* rpc thread: w->multiplexes */
    struct td_mail mail_over;
    /* engine thread */
    uint32_t n_reqs;
    bool is_over, is_unsent, is_full; /* full: no memory for a row, the stream is cancelled */
    struct td_multiplex *next_unsent;
    uint8_t *rows; /* packed MultiplexDown of this turn */
    size_t n_bytes, capacity;
};

/* ---- rpc thread ------------------------------------------------------------------------------ */

static struct td_multiplex *begin(struct td_worker *w, struct td_rpc_call *call)
{
    if (!td_worker_is_proved(w, call, 0, 0)) return NULL;
    struct td_multiplex *m = calloc(1, sizeof *m);
    if (!m) {
        td_rpc_call_finish(call, TD_CODE_RESOURCE_EXHAUSTED, "no memory", NULL, 0);
        return NULL;
    }
    *m = (struct td_multiplex){.w = w, .call = call, .next = w->multiplexes};
    m->mail_over = (struct td_mail){.kind = TD_MAIL_STREAM_ENDED, .multiplex = m};
    m->prev = &w->multiplexes;
    if (m->next) m->next->prev = &m->next;
    w->multiplexes = m;
    td_rpc_call_ref(call);
    td_rpc_call_set_user(call, m);
    td_rpc_call_set_merged(call);
    return m;
}

static void cancel(struct td_multiplex *m, uint64_t id)
{
    struct td_mail *mail = malloc(sizeof *mail);
    if (!mail) { /* all of its requests end, this one among them */
        td_rpc_call_cancel(m->call);
        return;
    }
    *mail = (struct td_mail){.kind = TD_MAIL_CANCEL, .multiplex = m, .request = id};
    td_worker_post(m->w, mail);
}

static void take(struct td_multiplex *m, const Tandem__V1__MultiplexCall *c)
{
    const struct td_caller caller = {.multiplex = m, .id = c->id};
    switch (c->call_case) {
    case TANDEM__V1__MULTIPLEX_CALL__CALL_DECODE:
        td_worker_take_decode(m->w, &caller, c->decode);
        break;
    case TANDEM__V1__MULTIPLEX_CALL__CALL_PREFILL:
        td_worker_take_prefill(m->w, &caller, c->prefill);
        break;
    case TANDEM__V1__MULTIPLEX_CALL__CALL_CANCEL:
        cancel(m, c->id);
        break;
    default:
        td_worker_turn_away(&caller, TD_CODE_UNIMPLEMENTED,
                            "calls[].call is missing, or of a kind that this worker does not know");
    }
}

void td_multiplex_on_message(struct td_rpc_call *call, const ProtobufCMessage *msg, void *ctx)
{
    struct td_multiplex *m = td_rpc_call_user(call);
    const Tandem__V1__MultiplexUp *up = (const Tandem__V1__MultiplexUp *)msg;
    if (!m && !(m = begin(ctx, call))) return;
    if (!up) td_rpc_call_finish(call, TD_CODE_OK, NULL, NULL, 0);
    for (size_t i = 0; up && i < up->n_calls; i++) take(m, up->calls[i]);
}

void td_multiplex_on_end(struct td_rpc_call *call, bool cancelled, void *ctx)
{
    (void)cancelled;
    struct td_multiplex *m = td_rpc_call_user(call);
    if (!m) return; /* refused */
    td_rpc_call_set_user(call, NULL);
    *m->prev = m->next;
    if (m->next) m->next->prev = m->prev;
    td_worker_post(ctx, &m->mail_over);
}

void td_multiplex_end_all(void *worker)
{
    struct td_worker *w = worker;
    for (struct td_multiplex *m = w->multiplexes; m; m = m->next)
        td_rpc_call_finish(m->call, TD_CODE_UNAVAILABLE, "this worker is stopping", NULL, 0);
}

static Tandem__V1__MultiplexRow end_row(const struct td_caller *caller,
                                        Tandem__V1__MultiplexEnd *end, enum td_code code,
                                        const char *details)
{
    Tandem__V1__MultiplexRow row = TANDEM__V1__MULTIPLEX_ROW__INIT;
    tandem__v1__multiplex_end__init(end);
    end->code = code;
    end->details = (char *)(uintptr_t)(details ? details : "");
    row.id = caller->id;
    row.row_case = TANDEM__V1__MULTIPLEX_ROW__ROW_END;
    row.end = end;
    return row;
}

void td_multiplex_turn_away(const struct td_caller *caller, enum td_code code, const char *details)
{
    Tandem__V1__MultiplexEnd end;
    Tandem__V1__MultiplexRow row = end_row(caller, &end, code, details), *rows[] = {&row};
    Tandem__V1__MultiplexDown down = TANDEM__V1__MULTIPLEX_DOWN__INIT;
    down.n_rows = 1;
    down.rows = rows;
    td_rpc_call_send(caller->multiplex->call, &down.base);
}

/* ---- engine thread --------------------------------------------------------------------------- */

static void free_if_over(struct td_multiplex *m)
{
    if (!m->is_over || m->n_reqs || m->is_unsent) return;
    td_rpc_call_unref(m->call);
    free(m->rows);
    free(m);
}

void td_multiplex_enter(struct td_multiplex *m) { m->n_reqs++; }

void td_multiplex_leave(struct td_multiplex *m)
{
    m->n_reqs--;
    free_if_over(m);
}

void td_multiplex_over(struct td_multiplex *m)
{
    m->is_over = true;
    free_if_over(m);
}

static bool reserve(struct td_multiplex *m, size_t more)
{
    if (m->capacity - m->n_bytes >= more) return true;
    size_t capacity = m->capacity ? m->capacity : 4096;
    while (capacity - m->n_bytes < more) capacity *= 2;
    uint8_t *rows = realloc(m->rows, capacity);
    if (!rows) {
        m->is_full = true;
        return false;
    }
    m->rows = rows;
    m->capacity = capacity;
    return true;
}

/* As protobuf packs `repeated MultiplexRow rows = 1`. */
static void add(struct td_multiplex *m, const Tandem__V1__MultiplexRow *row)
{
    enum { HEAD_BYTES = 11 }; /* the tag, and a varint of 64 bits */
    size_t n = tandem__v1__multiplex_row__get_packed_size(row);
    if (!m->is_unsent) {
        m->is_unsent = true;
        m->next_unsent = m->w->unsent;
        m->w->unsent = m;
    }
    if (m->is_full || !reserve(m, n + HEAD_BYTES)) return;
    m->rows[m->n_bytes++] = 1 << 3 | 2;
    for (size_t left = n;; left >>= 7) {
        m->rows[m->n_bytes++] = (uint8_t)((left & 0x7f) | (left > 0x7f ? 0x80 : 0));
        if (left <= 0x7f) break;
    }
    m->n_bytes += tandem__v1__multiplex_row__pack(row, m->rows + m->n_bytes);
}

void td_multiplex_event(const struct td_caller *caller, const ProtobufCMessage *event)
{
    Tandem__V1__MultiplexRow row = TANDEM__V1__MULTIPLEX_ROW__INIT;
    row.id = caller->id;
    if (event->descriptor == &tandem__v1__prefill_event__descriptor) {
        row.row_case = TANDEM__V1__MULTIPLEX_ROW__ROW_PREFILL;
        row.prefill = (Tandem__V1__PrefillEvent *)(uintptr_t)event;
    } else {
        Tandem__V1__DecodeEvent *decode = (Tandem__V1__DecodeEvent *)(uintptr_t)event;
        bool is_token = decode->event_case == TANDEM__V1__DECODE_EVENT__EVENT_TOKENS &&
                        decode->tokens->n_out == 1;
        row.row_case =
            is_token ? TANDEM__V1__MULTIPLEX_ROW__ROW_TOKEN : TANDEM__V1__MULTIPLEX_ROW__ROW_DECODE;
        if (is_token)
            row.token = decode->tokens->out[0];
        else
            row.decode = decode;
    }
    add(caller->multiplex, &row);
}

void td_multiplex_finish(const struct td_caller *caller, enum td_code code, const char *details)
{
    Tandem__V1__MultiplexEnd end;
    Tandem__V1__MultiplexRow row = end_row(caller, &end, code, details);
    add(caller->multiplex, &row);
}

void td_multiplex_flush(struct td_worker *w)
{
    while (w->unsent) {
        struct td_multiplex *m = w->unsent;
        w->unsent = m->next_unsent;
        m->is_unsent = false;
        td_status s = TD_OK;
        if (m->is_full)
            td_rpc_call_cancel(m->call);
        else
            s = td_rpc_call_send_packed(m->call, m->rows, m->n_bytes);
        m->n_bytes = 0;
        if (s && s != TD_ERR_CANCELLED)
            td_warn_limited("stream_dropped", "reqs=%u status=%s", m->n_reqs, td_status_name(s));
        free_if_over(m);
    }
    atomic_fetch_sub(&w->n_live, w->n_freed);
    w->n_freed = 0;
}
