/* join.c - who joins: the handshake of a Registry stream, until there is a worker behind it.
 *
 *   stream opened --hello--> [secret: CHALLENGED --proof-->] DIALLED --the address answers with
 *       this process's proof--> [model not read yet: LOADING --it is there-->] JOINED
 *        \------- no certificate of a worker, wrong proof, another process at the address,
 *        MAX_HANDSHAKE_MS over -------> rejected
 *
 * Nothing is believed before JOINED: no worker is replaced, nothing is placed. What is proved, and
 * how: common/rpc/identity.h. An older worker, whose hello has neither nonce nor key, is taken
 * without dialling back when this router has no secret; it replaces nobody who lives.
 *
 * Streams that are not a worker's yet are at most MAX_JOINS, and a new one ends the oldest of
 * them: a handshake takes milliseconds, so a flood of silent streams does not keep workers out. */
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "router/router.h"

enum { MAX_JOINS = 256, MAX_HANDSHAKE_MS = 10000, DIAL_MS = 5000, MAX_HELLO_BYTES = 16 << 10 };

enum join_state { JOIN_OPEN, JOIN_CHALLENGED, JOIN_DIALLED, JOIN_LOADING, JOIN_JOINED, JOIN_OVER };

struct join {
    struct router *router;
    struct td_rpc_call *call; /* referenced */
    enum join_state state;
    bool call_ended, drain_told;
    uint64_t drain_ms, deadline_ns;
    Tandem__V1__Hello *hello; /* own copy, from the hello on */
    struct td_join_nonces nonces;
    uint8_t dial_nonce[TD_CLUSTER_NONCE_BYTES];
    struct td_rpc_channel *channel; /* while it is dialled back, or waits for its model */
    struct td_rpc_call *dial;       /* the call of Prove, while it lives */
    bool proved;                    /* ... and it answered as it should */
    bool is_member; /* its stream has shown a worker's certificate, or proved the secret */
    struct worker_conn *worker;
    bool has_name; /* the hello's, cut to its length here */
    char name[128];
    uint32_t pid;
    struct join *next, **prev; /* router->joining.first, while no worker's and not over */
};

struct td_rpc_call *join_call(const struct join *j) { return j->call; }

static void unlist(struct join *j)
{
    struct router *r = j->router;
    if (!j->prev) return;
    *j->prev = j->next;
    if (j->next)
        j->next->prev = j->prev;
    else
        r->joining.end = j->prev;
    j->prev = NULL;
    j->next = NULL;
    r->joining.n--;
}

static void free_if_over(struct join *j)
{
    if (!j->call_ended || j->dial) return;
    unlist(j);
    td_rpc_channel_destroy(j->channel);
    if (j->hello) tandem__v1__hello__free_unpacked(j->hello, NULL);
    td_rpc_call_unref(j->call);
    free(j);
}

static void over(struct join *j)
{
    j->state = JOIN_OVER;
    unlist(j);
    if (j->dial) td_rpc_call_cancel(j->dial);
}

static void tell_rejected(struct router *r, struct td_rpc_call *call, const char *reason)
{
    char q[600];
    uint32_t n_dropped;
    if (td_log_pace_due(&r->joining.reject_pace, &n_dropped))
        td_warn("worker_rejected", "peer=%s dropped=%u reason=%s", td_rpc_call_peer(call),
                n_dropped, td_log_quote(q, sizeof q, reason));
}

/* As much as fits, in whole characters. A control character becomes '?': whoever reaches the port
 * may have written it, and an operator's terminal would obey it. */
static void copy_text(char *to, size_t to_bytes, const char *from)
{
    size_t n = (size_t)snprintf(to, to_bytes, "%s", from);
    if (n >= to_bytes) n = to_bytes - 1;
    while (n && !td_rpc_utf8_valid(to, n)) to[--n] = 0;
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)to[i] < 0x20 || to[i] == 0x7F) to[i] = '?';
}

static bool is_refusal_of(const struct router_refusal *f, const struct join *j)
{
    return f->times && f->is_proved == j->is_member && f->pid == j->pid &&
           !strcmp(f->name, j->name);
}

/* The refusal of the worker that is j's, else a free one, else the oldest of those that prove no
 * more than j does; NULL: none. Free ones have is_proved false and last_ns 0. */
static struct router_refusal *refusal_of(const struct join *j)
{
    struct router_refusal *all = j->router->joining.refusals, *best = NULL;
    for (size_t i = 0; i < ROUTER_MAX_REFUSALS; i++) {
        struct router_refusal *f = &all[i];
        if (is_refusal_of(f, j)) return f;
        if (f->is_proved && !j->is_member) continue;
        if (!best || f->is_proved < best->is_proved ||
            (f->is_proved == best->is_proved && f->last_ns < best->last_ns))
            best = f;
    }
    return best;
}

/* For the status: who has said no hello is nobody's worker. */
static void note_refused(struct join *j, const char *reason, bool is_for_good)
{
    struct router_refusal *f = j->has_name ? refusal_of(j) : NULL;
    if (!f) return;
    if (!is_refusal_of(f, j)) *f = (struct router_refusal){.pid = j->pid};
    f->is_proved = j->is_member;
    snprintf(f->name, sizeof f->name, "%s", j->name);
    copy_text(f->reason, sizeof f->reason, reason);
    f->times++;
    f->times_for_good += is_for_good;
    f->last_ns = td_now_ns();
}

static void note_joined(struct join *j)
{
    struct router_refusal *f = refusal_of(j);
    if (f && is_refusal_of(f, j)) *f = (struct router_refusal){0};
}

static void reject_as(struct join *j, enum td_code code, const char *reason, bool is_for_good)
{
    Tandem__V1__Reject m = TANDEM__V1__REJECT__INIT;
    Tandem__V1__RouterMessage out = TANDEM__V1__ROUTER_MESSAGE__INIT;
    m.reason = (char *)(uintptr_t)reason;
    out.message_case = TANDEM__V1__ROUTER_MESSAGE__MESSAGE_REJECT;
    out.reject = &m;
    td_rpc_call_send(j->call, &out.base);
    td_rpc_call_finish(j->call, code, reason, NULL, 0);
    tell_rejected(j->router, j->call, reason);
    note_refused(j, reason, is_for_good);
    over(j);
}

static void reject_with(struct join *j, enum td_code code, const char *reason)
{
    reject_as(j, code, reason, true);
}

static void join_reject(struct join *j, const char *reason)
{
    reject_with(j, TD_CODE_FAILED_PRECONDITION, reason);
}

/* The same worker may be taken the next time: it, or this machine, was late. */
static void join_reject_for_now(struct join *j, const char *reason)
{
    reject_as(j, TD_CODE_FAILED_PRECONDITION, reason, false);
}

void join_lose_worker(struct join *j, const char *why)
{
    j->worker = NULL;
    /* no effect when the stream has ended; else it must not go on unheard */
    td_rpc_call_finish(j->call, TD_CODE_ABORTED, why, NULL, 0);
    over(j);
}

/* ---- proofs of calls ------------------------------------------------------------------------- */

static size_t call_proof(struct router *r, const struct td_join_nonces *nonces, const char *path,
                         uint64_t request, uint32_t attempt, uint64_t counter,
                         char text[TD_CALL_PROOF_MAX], struct td_rpc_metadata *ret_metadata)
{
    if (!r->id.secret) return 0;
    td_status s = td_call_prove(r->id.secret, nonces, path, request, attempt, counter, text);
    if (s) return 0; /* no memory: the worker refuses the call by name */
    *ret_metadata = (struct td_rpc_metadata){TD_CALL_PROOF_KEY, text};
    return 1;
}

size_t worker_proof(struct worker_conn *w, const char *path, uint64_t request, uint32_t attempt,
                    char text[TD_CALL_PROOF_MAX], struct td_rpc_metadata *ret_metadata)
{
    return call_proof(w->router, &w->nonces, path, request, attempt, ++w->n_proofs, text,
                      ret_metadata);
}

/* ---- the handshake --------------------------------------------------------------------------- */

static void take_in(struct join *j, struct td_rpc_channel *channel)
{
    struct router *r = j->router;
    struct served_model *m = NULL;
    struct td_err err = {0};
    /* again: the fleet may have changed */
    td_status s = fleet_hello_check(r, j->hello, channel != NULL, &m, &err);
    if (!s && !m && !(s = router_model_load(r, j->hello->model, &err))) {
        j->channel = channel;
        j->state = JOIN_LOADING;
        return;
    }
    if (s)
        td_rpc_channel_destroy(channel);
    else
        j->worker = fleet_join(m, j, j->hello, &j->nonces, channel, &err);
    if (!j->worker) {
        join_reject(j, err.msg);
        return;
    }
    j->state = JOIN_JOINED;
    note_joined(j);
    unlist(j);
    if (j->drain_told) fleet_drain(j->worker, j->drain_ms);
}

void join_model_loaded(struct router *r, const char *name, td_status status, const char *why)
{
    for (struct join *j = r->joining.first, *next; j; j = next) {
        next = j->next; /* what follows unlists j alone */
        if (j->state != JOIN_LOADING) continue;
        if (status && !strcmp(j->hello->model, name)) {
            join_reject(j, why);
            continue;
        }
        struct td_rpc_channel *channel = j->channel;
        j->channel = NULL;
        take_in(j, channel); /* of another model: that is read now */
    }
}

static void on_proved(struct td_rpc_call *call, const ProtobufCMessage *msg, void *user)
{
    (void)call;
    struct join *j = user;
    const ProtobufCBinaryData nonce = {sizeof j->dial_nonce, j->dial_nonce};
    j->proved = td_instance_verify(j->router->id.secret, &j->nonces, &j->hello->instance_key,
                                   &nonce, &((const Tandem__V1__ProveResponse *)msg)->mac);
}

static void on_dialled(struct td_rpc_call *call, const struct td_rpc_result *res, void *user)
{
    struct join *j = user;
    struct td_rpc_channel *channel = j->channel;
    char q[600], why[800];
    td_rpc_call_unref(call);
    j->dial = NULL;
    if (j->state != JOIN_DIALLED) {
        free_if_over(j);
        return;
    }
    if (res->code == TD_CODE_OK && j->proved) {
        j->channel = NULL;
        take_in(j, channel);
        return;
    }
    if (res->code == TD_CODE_OK) {
        snprintf(why, sizeof why,
                 "address %s is another process's: who answers there did not say this hello",
                 j->hello->address);
    } else {
        uint32_t n_dropped;
        if (td_log_pace_due(&j->router->joining.unreachable_pace, &n_dropped)) {
            char name[300];
            td_warn("worker_unreachable", "worker=%s address=%s dropped=%u msg=%s",
                    td_log_quote(name, sizeof name, j->hello->name), j->hello->address, n_dropped,
                    td_log_quote(q, sizeof q, res->details));
        }
        snprintf(why, sizeof why,
                 "the router dialled back %s, the address of the hello, and got code %d: %.500s",
                 j->hello->address, (int)res->code, res->details);
    }
    /* who answers late may answer the next time; a wrong address stays wrong */
    reject_as(j, TD_CODE_FAILED_PRECONDITION, why, res->code != TD_CODE_DEADLINE_EXCEEDED);
}

/* The address is asked who is there. Fails at once when nobody listens: the worker comes back. */
static void dial_back(struct join *j)
{
    static const struct td_rpc_client_method method = {
        "/tandem.v1.Worker/Prove", &tandem__v1__prove_response__descriptor, false};
    static const struct td_rpc_handler handler = {on_proved, on_dialled};
    struct router *r = j->router;
    struct td_err err = {0};
    if (fleet_channel(r, j->hello->address, &j->channel, &err)) {
        join_reject(j, err.msg);
        return;
    }
    char text[TD_CALL_PROOF_MAX];
    struct td_rpc_metadata metadata;
    size_t n = call_proof(r, &j->nonces, method.path, 0, 0, 1, text, &metadata);
    Tandem__V1__ProveRequest m = TANDEM__V1__PROVE_REQUEST__INIT;
    td_cluster_nonce(j->dial_nonce);
    m.nonce = (ProtobufCBinaryData){sizeof j->dial_nonce, j->dial_nonce};
    j->state = JOIN_DIALLED;
    j->dial = td_rpc_call_start_ref(j->channel, &method, &m.base, DIAL_MS, false, &metadata, n,
                                    &handler, j);
}

static bool copy_hello(struct join *j, const Tandem__V1__Hello *h)
{
    size_t n_bytes = tandem__v1__hello__get_packed_size(h);
    uint8_t *bytes = n_bytes <= MAX_HELLO_BYTES ? malloc(n_bytes + 1) : NULL;
    if (!bytes) return false;
    tandem__v1__hello__pack(h, bytes);
    j->hello = tandem__v1__hello__unpack(NULL, n_bytes, bytes);
    free(bytes);
    return j->hello != NULL;
}

/* Two of our addresses were found by the worker: the stream that it has is the one. */
static bool is_joined(const struct router *r, const Tandem__V1__Hello *h)
{
    for (size_t i = 0; i < h->n_joined_routers; i++)
        if (h->joined_routers[i] == r->incarnation) return true;
    return false;
}

static void tell_joined(struct join *j)
{
    Tandem__V1__Reject m = TANDEM__V1__REJECT__INIT;
    Tandem__V1__RouterMessage out = TANDEM__V1__ROUTER_MESSAGE__INIT;
    m.reason = (char *)(uintptr_t) "this worker has joined this router by another stream";
    m.already_joined = true;
    out.message_case = TANDEM__V1__ROUTER_MESSAGE__MESSAGE_REJECT;
    out.reject = &m;
    td_rpc_call_send(j->call, &out.base);
    td_rpc_call_finish(j->call, TD_CODE_ALREADY_EXISTS, m.reason, NULL, 0);
    over(j);
}

static void take_hello(struct join *j, const Tandem__V1__Hello *h)
{
    struct router *r = j->router;
    struct served_model *m;
    struct td_err err = {0};
    j->has_name = true;
    j->pid = h->pid;
    copy_text(j->name, sizeof j->name, h->name);
    bool asks = r->id.secret || h->instance_key.len == TD_CLUSTER_NONCE_BYTES;
    if (is_joined(r, h)) {
        tell_joined(j);
    } else if (!r->id.secret && fleet_hello_check(r, h, asks, &m, &err)) {
        join_reject(j, err.msg); /* with a secret: when the worker has proved it (take_proof) */
    } else if (r->id.secret && h->nonce.len != TD_CLUSTER_NONCE_BYTES) {
        reject_with(j, TD_CODE_UNAUTHENTICATED,
                    "this router takes workers that prove the cluster secret: start the worker "
                    "with --cluster-secret-file, the same as the router's");
    } else if (!copy_hello(j, h)) {
        join_reject(j, "the hello is too large");
    } else if (r->id.secret) {
        memcpy(j->nonces.worker, h->nonce.data, sizeof j->nonces.worker);
        td_cluster_nonce(j->nonces.router);
        Tandem__V1__Challenge c = TANDEM__V1__CHALLENGE__INIT;
        Tandem__V1__RouterMessage out = TANDEM__V1__ROUTER_MESSAGE__INIT;
        c.nonce = (ProtobufCBinaryData){sizeof j->nonces.router, j->nonces.router};
        out.message_case = TANDEM__V1__ROUTER_MESSAGE__MESSAGE_CHALLENGE;
        out.challenge = &c;
        td_rpc_call_send(j->call, &out.base);
        j->state = JOIN_CHALLENGED;
    } else if (asks) {
        dial_back(j);
    } else {
        take_in(j, NULL);
    }
}

static void take_proof(struct join *j, const ProtobufCBinaryData *mac)
{
    struct served_model *m;
    struct td_err err = {0};
    if (!td_join_verify_worker(j->router->id.secret, &j->nonces, j->hello, mac)) {
        reject_with(j, TD_CODE_PERMISSION_DENIED,
                    "the worker does not know this router's cluster secret: the "
                    "cluster_secret_file of both must hold the same");
        return;
    }
    j->is_member = true;
    if (fleet_hello_check(j->router, j->hello, true, &m, &err))
        join_reject(j, err.msg);
    else
        dial_back(j);
}

/* ---- the stream ------------------------------------------------------------------------------ */

static void on_open(struct td_rpc_call *call, void *ctx)
{
    struct router *r = ctx;
    if (r->id.workers && !td_identity_peer_is(call, r->id.workers)) {
        bool verified = td_rpc_call_peer_verified(call);
        const char *why =
            verified
                ? "this router takes workers whose certificate holds a name of its "
                  "tls_worker_names, and the caller's holds none"
                : "this router takes workers that show a certificate, and the caller shows none";
        td_rpc_call_finish(call, verified ? TD_CODE_PERMISSION_DENIED : TD_CODE_UNAUTHENTICATED,
                           why, NULL, 0);
        tell_rejected(r, call, why);
        return;
    }
    struct join *j = calloc(1, sizeof *j);
    if (!j) {
        td_rpc_call_finish(call, TD_CODE_RESOURCE_EXHAUSTED, "no memory", NULL, 0);
        return;
    }
    *j = (struct join){.router = r,
                       .call = call,
                       .deadline_ns = td_deadline_after_ms(td_now_ns(), MAX_HANDSHAKE_MS),
                       .is_member = r->id.workers != NULL, /* shown, as seen above */
                       .prev = r->joining.end};
    td_rpc_call_ref(call);
    td_rpc_call_set_user(call, j);
    *r->joining.end = j;
    r->joining.end = &j->next;
    if (++r->joining.n > MAX_JOINS)
        join_reject_for_now(r->joining.first,
                            "too many streams that have not joined: this was the oldest");
}

static void on_message(struct td_rpc_call *call, const ProtobufCMessage *msg, void *ctx)
{
    (void)ctx;
    struct join *j = td_rpc_call_user(call);
    if (!msg) { /* half close */
        td_rpc_call_finish(call, TD_CODE_OK, NULL, NULL, 0);
        return;
    }
    if (j->state == JOIN_OVER) return;
    const Tandem__V1__WorkerMessage *m = (const Tandem__V1__WorkerMessage *)msg;
    switch (m->message_case) {
    case TANDEM__V1__WORKER_MESSAGE__MESSAGE_HELLO:
        if (j->state == JOIN_OPEN)
            take_hello(j, m->hello);
        else
            join_reject(j, "hello was said already"); /* a worker goes with the stream's end */
        break;
    case TANDEM__V1__WORKER_MESSAGE__MESSAGE_PROOF:
        if (j->state == JOIN_CHALLENGED) take_proof(j, &m->proof->mac);
        break;
    case TANDEM__V1__WORKER_MESSAGE__MESSAGE_SNAPSHOT:
        if (j->worker) fleet_snapshot(j->worker, m->snapshot);
        break;
    case TANDEM__V1__WORKER_MESSAGE__MESSAGE_DRAIN:
        j->drain_told = true;
        j->drain_ms = m->drain->timeout_ms;
        if (j->worker) fleet_drain(j->worker, j->drain_ms);
        break;
    default:
        break; /* a newer worker's message: tolerated */
    }
}

static void on_end(struct td_rpc_call *call, bool cancelled, void *ctx)
{
    (void)ctx;
    struct join *j = td_rpc_call_user(call);
    if (!j) return;
    td_rpc_call_set_user(call, NULL);
    struct worker_conn *w = j->worker;
    if (w) fleet_gone(w, cancelled ? "its stream broke" : "it left"); /* sets j->worker to NULL */
    if (j->state != JOIN_OVER) over(j);
    j->call_ended = true;
    free_if_over(j);
}

void join_tick(struct router *r, uint64_t now_ns)
{
    while (r->joining.first && r->joining.first->deadline_ns < now_ns) {
        bool asked = r->joining.first->state != JOIN_OPEN;
        join_reject_for_now(r->joining.first,
                            asked ? "the handshake took longer than 10 s" : "no hello for 10 s");
    }
}

const struct td_rpc_method registry_methods[] = {
    {.path = "/tandem.v1.Registry/Join",
     .request = &tandem__v1__worker_message__descriptor,
     .client_streaming = true,
     .on_message = on_message,
     .on_end = on_end,
     .on_open = on_open},
    {0},
};
