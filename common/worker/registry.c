/* registry.c - see registry.h.
 *
 * A stream for each router that router_names.h knows:
 *
 *   IDLE --connect--> OPEN (hello sent) --welcome--> WELCOMED --stream ends, keepalive fails-->
 *       IDLE (back-off) ...
 *   IDLE, and its address is no router's any more --> its place is free
 *
 * One 20 ms timer drives them all: it connects when a back-off is over, and sends a snapshot when
 * something changed, or each 200 ms. Losing a router loses no KV: requests of a dead router end by
 * their own calls.
 *
 * Two addresses may be one router's (a name with an IPv4 and an IPv6 address). A hello therefore
 * says which routers the worker has joined by other streams, and a router that finds itself there
 * turns the new stream away; it is tried again every 10 s, as the address may become another's. */
#include "common/worker/registry.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/entropy.h"
#include "common/base/log.h"
#include "common/worker/router_names.h"
#include "common/worker/worker.h"
#include "common/worker/worker_parts.h"

#define TICK_MS 20
#define MAX_SILENCE_MS 200
#define BACKOFF_MIN_MS 100
#define BACKOFF_MAX_MS 2000
#define BACKOFF_TWICE_MS 10000 /* of a router that is joined by another stream */
#define WELCOME_MS 10000       /* a router that answers hello with silence for so long is left */
/* at the end: the router answers our half-close within this, or the stream is cancelled */
#define LEAVE_MS 1000
#define STUCK_MS 10000 /* engine loop without a turn for so long = not healthy */

/* The stream to one router. */
struct join {
    struct td_registry *r;
    int at;     /* its place in td_worker.routers */
    bool used;  /* a router's */
    bool named; /* --router still stands for it */
    struct td_router_target to;
    struct td_rpc_channel *channel;
    struct td_rpc_call *call;
    bool welcomed, told_drain, twice;
    uint64_t incarnation; /* of the router; 0 = not welcomed */
    uint64_t next_try_ns, backoff_ms, sent_ns, seq, hello_ns;
    Tandem__V1__Snapshot last;
};

struct td_registry {
    struct td_port_seen port_seen;
    struct td_worker *w;
    struct td_rpc_timer *timer;
    struct td_router_names *names;
    uint64_t names_version;
    struct td_router_target targets[TD_WORKER_MAX_ROUTERS];
    struct join joins[TD_WORKER_MAX_ROUTERS];
    bool stopping, unhealthy;
    uint64_t leave_ns;
    struct td_worker_report report; /* of the snapshot being sent */
    Tandem__V1__StepReport *step_ptrs[TD_WORKER_MAX_STEPS];
    char model[256];
    pthread_mutex_t lock; /* stopped: destroy waits for it */
    pthread_cond_t cond;
    bool stopped;
};

/* The fields that a proof covers. */
static Tandem__V1__Hello hello_of(struct td_worker *w)
{
    Tandem__V1__Hello h = TANDEM__V1__HELLO__INIT;
    h.name = w->name;
    h.role = (char *)w->role->name;
    h.address = w->address;
    h.incarnation = w->incarnation;
    return h;
}

/* Routers that are joined by other streams than this one. */
static size_t joined_elsewhere(const struct join *j, uint64_t ret_routers[TD_WORKER_MAX_ROUTERS])
{
    size_t n = 0;
    for (int i = 0; i < TD_WORKER_MAX_ROUTERS; i++) {
        const struct join *other = &j->r->joins[i];
        if (other != j && other->welcomed) ret_routers[n++] = other->incarnation;
    }
    return n;
}

/* A new Join: what the engine counts, and whose proofs are taken, begins anew. */
static void begin_session(struct join *j, Tandem__V1__Hello *h)
{
    struct td_worker *w = j->r->w;
    struct td_worker_router *router = &w->routers[j->at];
    h->session = td_random_u64() | 1;
    pthread_mutex_lock(&w->told.lock);
    w->told.reports[j->at].calls_refused = 0;
    pthread_mutex_unlock(&w->told.lock);
    atomic_store(&router->session, h->session);
    router->has_nonces = false;
    if (!w->trust.id.secret) {
        h->instance_key =
            (ProtobufCBinaryData){sizeof w->trust.instance_key, w->trust.instance_key};
        return;
    }
    td_cluster_nonce(router->nonces.worker);
    h->nonce = (ProtobufCBinaryData){sizeof router->nonces.worker, router->nonces.worker};
}

/* Of a prefill worker: what one grant can take, too. */
static int32_t longest(const struct td_worker *w)
{
    int64_t of_grant = TD_XFER_MAX_BLOCKS * w->cfg.model.block_size;
    int32_t len = td_engine_max_len(w->engine);
    return w->role->grows || len <= of_grant ? len : (int32_t)of_grant;
}

static void send_hello(struct join *j)
{
    struct td_registry *r = j->r;
    struct td_worker *w = r->w;
    uint64_t joined[TD_WORKER_MAX_ROUTERS];
    Tandem__V1__Hello h = hello_of(w);
    h.version = (char *)TD_VERSION;
    h.protocol = TD_PROTOCOL_VERSION;
    h.model = r->model;
    h.layout_hash = td_engine_layout_hash(w->engine);
    h.block_size = (uint32_t)w->cfg.model.block_size;
    h.kv_blocks = (uint32_t)w->kv_blocks;
    h.max_model_len = (uint32_t)longest(w);
    const struct td_model_config *config = td_model_config(td_engine_model(w->engine));
    h.vocab = (uint32_t)config->vocab;
    h.config_digest = w->cfg.model.path[0] ? td_model_config_digest(config) : 0;
    h.vocab_digest = w->guided ? td_guided_vocab_digest(w->guided) : 0;
    h.max_seqs = (uint32_t)w->cfg.model.max_seqs;
    h.pid = (uint32_t)getpid();
    h.transfer = (char *)(uintptr_t)w->cfg.transfer;
    bool is_local = td_xfer_path_is_local(td_kv_port_path(w->cfg.transfer));
    h.kv_tls = (char *)(uintptr_t)(is_local ? "" : w->use_kv_tls ? "on" : "off");
    h.node_class = (char *)w->cfg.node_class;
    h.tp = (uint32_t)td_engine_n_ranks(w->engine);
    h.kernels = (char *)(uintptr_t)td_model_kernels(td_engine_model(w->engine));
    h.max_step_tokens = (uint32_t)td_engine_max_step_tokens(w->engine);
    h.prefix_cache = w->cfg.model.prefix_cache;
    h.one_token = w->role->one_token;
    h.multiplex = true;
    begin_session(j, &h);
    h.n_joined_routers = joined_elsewhere(j, joined);
    h.joined_routers = joined;
    h.kv_bytes_per_token = td_worker_kv_bytes_per_token(w);
    h.kv_dtype = (char *)(uintptr_t)td_dtype_name(td_model_kv_dtype(td_engine_model(w->engine)));
    Tandem__V1__WorkerMessage m = TANDEM__V1__WORKER_MESSAGE__INIT;
    m.message_case = TANDEM__V1__WORKER_MESSAGE__MESSAGE_HELLO;
    m.hello = &h;
    td_rpc_call_send(j->call, &m.base);
}

/* Takes what this router is told next. */
static Tandem__V1__Snapshot take_report(struct join *j)
{
    struct td_worker_told *told = &j->r->w->told;
    struct td_worker_report *p = &told->reports[j->at];
    pthread_mutex_lock(&told->lock);
    Tandem__V1__Snapshot s = told->snap;
    j->r->report = *p;
    p->n_steps = p->n_added = p->n_evicted = 0;
    p->reset = false;
    pthread_mutex_unlock(&told->lock);
    p = &j->r->report;
    s.seq = j->last.seq;
    s.calls_taken = p->calls_taken;
    s.foreign_seqs = p->foreign_seqs;
    s.foreign_running = p->foreign_running;
    s.foreign_tokens = p->foreign_tokens;
    s.foreign_queued = p->foreign_queued;
    return s;
}

static void send_snapshot(struct join *j, uint64_t now)
{
    struct td_registry *r = j->r;
    const struct td_worker_report *p = &r->report;
    Tandem__V1__Snapshot s = take_report(j);
    bool news =
        p->n_steps || p->n_added || p->n_evicted || p->reset || memcmp(&s, &j->last, sizeof s);
    if (!news && now - j->sent_ns < MAX_SILENCE_MS * TD_NS_PER_MS) return;
    s.seq = ++j->seq;
    j->last = s;
    j->sent_ns = now;
    for (size_t i = 0; i < p->n_steps; i++) r->step_ptrs[i] = &r->report.steps[i];
    s.n_steps = p->n_steps;
    s.steps = r->step_ptrs;
    s.n_blocks_added = p->n_added;
    s.blocks_added = r->report.added;
    s.n_blocks_evicted = p->n_evicted;
    s.blocks_evicted = r->report.evicted;
    s.blocks_reset = p->reset;
    Tandem__V1__WorkerMessage m = TANDEM__V1__WORKER_MESSAGE__INIT;
    m.message_case = TANDEM__V1__WORKER_MESSAGE__MESSAGE_SNAPSHOT;
    m.snapshot = &s;
    td_rpc_call_send(j->call, &m.base);
}

static void send_drain(struct join *j)
{
    Tandem__V1__Drain d = TANDEM__V1__DRAIN__INIT;
    d.timeout_ms = j->r->w->cfg.drain_timeout_ms;
    Tandem__V1__WorkerMessage m = TANDEM__V1__WORKER_MESSAGE__INIT;
    m.message_case = TANDEM__V1__WORKER_MESSAGE__MESSAGE_DRAIN;
    m.drain = &d;
    td_rpc_call_send(j->call, &m.base);
    j->told_drain = true;
}

/* Ends the stream, and tries again later. */
static void leave(struct join *j, uint64_t backoff_ms)
{
    j->backoff_ms = backoff_ms;
    td_rpc_call_cancel(j->call); /* the router ends it too; a broken one may not */
}

static void refuse_router(struct join *j, const char *reason)
{
    td_error("router_refused", "router=%s reason=\"%s\" action=retry", j->to.target, reason);
    leave(j, BACKOFF_MAX_MS);
}

/* From here on the router's calls are taken: it dials back before it welcomes. Who does not know
 * the secret can make none. */
static void take_challenge(struct join *j, const ProtobufCBinaryData *nonce)
{
    struct td_worker *w = j->r->w;
    struct td_worker_router *router = &w->routers[j->at];
    Tandem__V1__Hello h = hello_of(w);
    uint8_t mac[TD_CLUSTER_MAC_BYTES];
    if (!w->trust.id.secret || nonce->len != sizeof router->nonces.router || router->has_nonces) {
        refuse_router(j, "its challenge was not asked for, or is not one of 32 bytes");
        return;
    }
    memcpy(router->nonces.router, nonce->data, nonce->len);
    memset(&router->replay, 0, sizeof router->replay);
    router->has_nonces = true;
    if (td_join_prove_worker(w->trust.id.secret, &router->nonces, &h, mac)) {
        refuse_router(j, "the proof of the cluster secret could not be made: no memory");
        return;
    }
    Tandem__V1__Proof p = TANDEM__V1__PROOF__INIT;
    Tandem__V1__WorkerMessage m = TANDEM__V1__WORKER_MESSAGE__INIT;
    p.mac = (ProtobufCBinaryData){sizeof mac, mac};
    m.message_case = TANDEM__V1__WORKER_MESSAGE__MESSAGE_PROOF;
    m.proof = &p;
    td_rpc_call_send(j->call, &m.base);
}

static bool is_our_router(struct join *j, const Tandem__V1__Welcome *welcome)
{
    struct td_worker *w = j->r->w;
    const struct td_worker_router *router = &w->routers[j->at];
    if (!w->trust.id.secret ||
        (router->has_nonces && td_join_verify_router(w->trust.id.secret, &router->nonces, welcome)))
        return true;
    refuse_router(j, welcome->proof.len ? "it does not know this worker's cluster secret: the "
                                          "cluster_secret_file of both must hold the same"
                                        : "it proves no cluster secret, and this worker has one: "
                                          "start the router with --cluster-secret-file");
    return false;
}

static void take_welcome(struct join *j, const Tandem__V1__Welcome *welcome)
{
    struct td_worker_told *told = &j->r->w->told;
    if (j->welcomed || !is_our_router(j, welcome)) return;
    j->welcomed = true;
    j->twice = false;
    j->incarnation = welcome->router_incarnation;
    j->backoff_ms = BACKOFF_MIN_MS;
    pthread_mutex_lock(&told->lock);
    struct td_worker_report *p = &told->reports[j->at];
    p->seed = welcome->prefix_seed;
    p->joined = true;
    p->epoch++;
    p->n_steps = p->n_added = p->n_evicted = 0;
    pthread_mutex_unlock(&told->lock);
    td_info("registered", "router=%s", j->to.target);
}

static void take_reject(struct join *j, const Tandem__V1__Reject *reject)
{
    char q[600];
    td_log_quote(q, sizeof q, reject->reason);
    if (!reject->already_joined)
        td_error("registration_rejected", "router=%s reason=%s action=retry", j->to.target, q);
    else if (!j->twice)
        td_info("router_twice", "router=%s reason=%s retry_ms=%d", j->to.target, q,
                BACKOFF_TWICE_MS);
    j->twice = reject->already_joined;
    leave(j, j->twice ? BACKOFF_TWICE_MS : BACKOFF_MAX_MS);
}

static void on_message(struct td_rpc_call *call, const ProtobufCMessage *msg, void *user)
{
    struct join *j = user;
    (void)call;
    const Tandem__V1__RouterMessage *m = (const Tandem__V1__RouterMessage *)msg;
    if (m->message_case == TANDEM__V1__ROUTER_MESSAGE__MESSAGE_CHALLENGE)
        take_challenge(j, &m->challenge->nonce);
    else if (m->message_case == TANDEM__V1__ROUTER_MESSAGE__MESSAGE_WELCOME)
        take_welcome(j, m->welcome);
    else if (m->message_case == TANDEM__V1__ROUTER_MESSAGE__MESSAGE_REJECT)
        take_reject(j, m->reject);
}

/* Nothing is told to the router from here on, and its requests are nobody's of ours. */
static void end_session(struct join *j)
{
    struct td_worker *w = j->r->w;
    j->welcomed = j->told_drain = false;
    j->incarnation = 0;
    w->routers[j->at].has_nonces = false;
    atomic_store(&w->routers[j->at].session, 0);
    pthread_mutex_lock(&w->told.lock);
    struct td_worker_report *p = &w->told.reports[j->at];
    p->joined = false;
    p->seed = 0;
    pthread_mutex_unlock(&w->told.lock);
}

static void stop_done(struct td_registry *r)
{
    for (int i = 0; i < TD_WORKER_MAX_ROUTERS; i++)
        if (r->joins[i].call) return;
    td_rpc_timer_cancel(r->timer);
    pthread_mutex_lock(&r->lock);
    r->stopped = true;
    pthread_cond_signal(&r->cond);
    pthread_mutex_unlock(&r->lock);
}

static void on_done(struct td_rpc_call *call, const struct td_rpc_result *result, void *user)
{
    (void)call;
    struct join *j = user;
    struct td_registry *r = j->r;
    char q[600];
    if (!r->stopping && (j->welcomed || j->backoff_ms == BACKOFF_MIN_MS))
        td_warn("router_lost", "router=%s code=%d msg=%s retry_ms=%llu", j->to.target,
                (int)result->code, td_log_quote(q, sizeof q, result->details),
                (unsigned long long)j->backoff_ms);
    j->call = NULL;
    end_session(j);
    j->next_try_ns = td_deadline_after_ms(td_now_ns(), j->backoff_ms);
    if (!j->twice)
        j->backoff_ms = j->backoff_ms * 2 > BACKOFF_MAX_MS ? BACKOFF_MAX_MS : j->backoff_ms * 2;
    if (r->stopping) stop_done(r);
}

static const struct td_rpc_client_method join_method = {
    "/tandem.v1.Registry/Join", &tandem__v1__router_message__descriptor, true};
static const struct td_rpc_handler join_handler = {on_message, on_done};

/* Health means progress: an engine loop that stopped turning is reported, whatever the port
 * says. */
static void check_progress(struct td_registry *r, uint64_t now)
{
    struct td_worker *w = r->w;
    if (atomic_load(&w->draining)) return;
    bool stuck = now > atomic_load(&w->progress_ns) + STUCK_MS * TD_NS_PER_MS;
    if (stuck == r->unhealthy) return;
    r->unhealthy = stuck;
    td_rpc_server_set_serving(w->server, !stuck);
    if (stuck)
        td_error("engine_stuck", "no_turn_ms=%d action=health_not_serving", STUCK_MS);
    else
        td_info("engine_moves", "action=health_serving");
}

/* ---- which routers --------------------------------------------------------------------------- */

static td_status join_open(struct td_registry *r, const struct td_router_target *to,
                           struct td_err *err)
{
    struct td_worker *w = r->w;
    struct join *j = NULL;
    for (int i = TD_WORKER_MAX_ROUTERS; i-- > 0;)
        if (!r->joins[i].used) j = &r->joins[i];
    if (!j)
        return td_fail(err, TD_ERR_LIMIT, "router %s is one more than the %d that a worker joins",
                       to->target, TD_WORKER_MAX_ROUTERS);
    struct td_rpc_tls tls = w->tls;
    if (!tls.server_name && to->host[0]) tls.server_name = to->host;
    struct td_rpc_channel_config c = {.loop = w->loop,
                                      .target = to->target,
                                      .keepalive_ms = (uint32_t)w->cfg.peer_timeout_ms / 2 + 1,
                                      .tls = w->use_tls ? &tls : NULL};
    struct td_rpc_channel *channel;
    td_status s = td_rpc_channel_create(&c, &channel, err);
    if (s) return s;
    *j = (struct join){.r = r,
                       .at = (int)(j - r->joins),
                       .used = true,
                       .named = true,
                       .to = *to,
                       .channel = channel,
                       .backoff_ms = BACKOFF_MIN_MS};
    return TD_OK;
}

static void follow_names(struct td_registry *r)
{
    uint64_t before = r->names_version;
    size_t n = td_router_names_get(r->names, &r->names_version, r->targets);
    if (r->names_version == before) return;
    for (int i = 0; i < TD_WORKER_MAX_ROUTERS; i++) r->joins[i].named = false;
    for (size_t k = 0; k < n; k++) {
        struct td_err err = {0};
        char q[TD_ERR_MSG_MAX + 8];
        bool there = false;
        for (int i = 0; i < TD_WORKER_MAX_ROUTERS && !there; i++) {
            struct join *j = &r->joins[i];
            there = j->used && !strcmp(j->to.target, r->targets[k].target);
            if (there) j->named = true;
        }
        if (!there && join_open(r, &r->targets[k], &err))
            td_error("router_not_joined", "reason=%s", td_log_quote(q, sizeof q, err.msg));
    }
}

/* A router whose name is gone, as that of a pod that ends: its stream stays as long as it lives. */
static void drop_unnamed(struct td_registry *r)
{
    for (int i = 0; i < TD_WORKER_MAX_ROUTERS; i++) {
        struct join *j = &r->joins[i];
        if (!j->used || j->named) continue;
        if (j->call) {
            if (!j->welcomed) td_rpc_call_cancel(j->call);
            continue;
        }
        td_rpc_channel_destroy(j->channel);
        j->channel = NULL;
        j->used = false;
        r->names_version = 0; /* one that found no place may have it */
    }
}

/* ---- the timer ------------------------------------------------------------------------------- */

static void join_tick(struct join *j, uint64_t now)
{
    struct td_registry *r = j->r;
    if (!j->call) {
        if (now < j->next_try_ns) return;
        j->call =
            td_rpc_call_start(j->channel, &join_method, NULL, 0, false, NULL, 0, &join_handler, j);
        j->sent_ns = j->seq = 0;
        j->hello_ns = now;
        send_hello(j);
    }
    if (!j->welcomed && now > j->hello_ns + WELCOME_MS * TD_NS_PER_MS) td_rpc_call_cancel(j->call);
    if (atomic_load(&r->w->draining) && !j->told_drain) send_drain(j);
    /* Before the welcome, blocks have a former router's names. A worker that makes no progress
       falls silent: the router moves its requests. */
    if (j->welcomed && !r->unhealthy) send_snapshot(j, now);
}

static void on_tick(void *arg)
{
    struct td_registry *r = arg;
    uint64_t now = td_now_ns();
    check_progress(r, now);
    if (td_port_follow(&r->port_seen, r->w->server, now)) td_log_tell_suppressed();
    td_worker_look_at_files(r->w, now);
    td_identity_look_at_file(&r->w->trust.id, now);
    if (r->stopping) {
        for (int i = 0; i < TD_WORKER_MAX_ROUTERS; i++)
            if (r->joins[i].call && now > r->leave_ns) td_rpc_call_cancel(r->joins[i].call);
        return;
    }
    follow_names(r);
    drop_unnamed(r);
    for (int i = 0; i < TD_WORKER_MAX_ROUTERS; i++)
        if (r->joins[i].used) join_tick(&r->joins[i], now);
}

/* The name by which routers know the model. */
static void fill_model(struct td_registry *r)
{
    const struct td_worker_config *c = &r->w->cfg;
    const char *dir = c->model.path[0] ? c->model.path : c->model.random_weights;
    char *real = realpath(dir, NULL);
    const char *path = real ? real : dir, *slash = strrchr(path, '/');
    const char *name = c->model.served_name; /* the router's may be the same variable, which has
                                                aliases after a comma */
    if (name[0])
        snprintf(r->model, sizeof r->model, "%.*s", (int)strcspn(name, ","), name);
    else
        snprintf(r->model, sizeof r->model, "%s", slash ? slash + 1 : path);
    free(real);
}

td_status td_registry_create(struct td_worker *w, struct td_registry **ret_registry,
                             struct td_err *err)
{
    struct td_registry *r = calloc(1, sizeof *r);
    if (!r) return td_fail(err, TD_ERR_NOMEM, "registry: out of memory");
    r->w = w;
    fill_model(r);
    td_status s = td_router_names_open(w->cfg.router, TD_WORKER_MAX_ROUTERS, &r->names, err);
    size_t n = s ? 0 : td_router_names_get(r->names, &r->names_version, r->targets);
    for (size_t i = 0; i < n && !s; i++) s = join_open(r, &r->targets[i], err);
    if (s) {
        for (int i = 0; i < TD_WORKER_MAX_ROUTERS; i++) td_rpc_channel_destroy(r->joins[i].channel);
        td_router_names_close(r->names);
        free(r);
        return s;
    }
    pthread_mutex_init(&r->lock, NULL);
    pthread_cond_init(&r->cond, NULL);
    r->timer = td_rpc_timer_start(w->loop, TICK_MS, on_tick, r);
    *ret_registry = r;
    return TD_OK;
}

static void drain_on_loop(void *arg)
{
    struct td_registry *r = arg;
    for (int i = 0; i < TD_WORKER_MAX_ROUTERS; i++)
        if (r->joins[i].call && !r->joins[i].told_drain) send_drain(&r->joins[i]);
}

void td_registry_drain(struct td_registry *r)
{
    if (r) td_rpc_loop_post(r->w->loop, drain_on_loop, r);
}

static void stop_on_loop(void *arg)
{
    struct td_registry *r = arg;
    r->stopping = true;
    r->leave_ns = td_deadline_after_ms(td_now_ns(), LEAVE_MS);
    drain_on_loop(r);
    for (int i = 0; i < TD_WORKER_MAX_ROUTERS; i++)
        if (r->joins[i].call) td_rpc_call_close_send(r->joins[i].call);
    stop_done(r);
}

void td_registry_destroy(struct td_registry *r)
{
    if (!r) return;
    td_rpc_loop_post(r->w->loop, stop_on_loop, r);
    pthread_mutex_lock(&r->lock);
    while (!r->stopped) pthread_cond_wait(&r->cond, &r->lock);
    pthread_mutex_unlock(&r->lock);
    for (int i = 0; i < TD_WORKER_MAX_ROUTERS; i++) td_rpc_channel_destroy(r->joins[i].channel);
    td_router_names_close(r->names);
    pthread_mutex_destroy(&r->lock);
    pthread_cond_destroy(&r->cond);
    free(r);
}
