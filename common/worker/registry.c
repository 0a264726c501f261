/* registry.c - see registry.h.
 *
 *   IDLE --connect--> OPEN (hello sent) --welcome--> WELCOMED --stream ends, keepalive fails-->
 *       IDLE (back-off) ...
 *
 * One 20 ms timer drives it: it connects when the back-off is over and sends a snapshot when
 * something changed, or each 200 ms. Losing the router loses no KV: requests of a dead router
 * end by their own calls. */
#include "common/worker/registry.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/worker/worker.h"
#include "common/worker/worker_parts.h"

#define TICK_MS 20
#define MAX_SILENCE_MS 200
#define BACKOFF_MIN_MS 100
#define BACKOFF_MAX_MS 2000
#define WELCOME_MS 10000 /* a router that answers hello with silence for so long is left */
/* at the end: the router answers our half-close within this, or the stream is cancelled */
#define LEAVE_MS 1000
#define STUCK_MS 10000 /* engine loop without a turn for so long = not healthy */

struct td_registry {
    struct td_port_seen port_seen;
    struct td_worker *w;
    struct td_rpc_channel *channel;
    struct td_rpc_timer *timer;
    struct td_rpc_call *call;
    bool welcomed, told_drain, stopping, unhealthy;
    uint64_t next_try_ns, backoff_ms, sent_ns, seq, leave_ns, hello_ns;
    Tandem__V1__Snapshot last;
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

static void send_hello(struct td_registry *r)
{
    struct td_worker *w = r->w;
    Tandem__V1__Hello h = hello_of(w);
    h.version = (char *)TD_VERSION;
    h.protocol = TD_PROTOCOL_VERSION;
    h.model = r->model;
    h.layout_hash = td_engine_layout_hash(w->engine);
    h.block_size = (uint32_t)w->cfg.block_size;
    h.kv_blocks = (uint32_t)w->kv_blocks;
    h.max_model_len = (uint32_t)td_engine_max_len(w->engine);
    const struct td_model_config *config = td_model_config(td_engine_model(w->engine));
    h.vocab = (uint32_t)config->vocab;
    h.config_digest = w->cfg.model[0] ? td_model_config_digest(config) : 0;
    h.vocab_digest = w->guided ? td_guided_vocab_digest(w->guided) : 0;
    h.max_seqs = (uint32_t)w->cfg.max_seqs;
    h.pid = (uint32_t)getpid();
    h.transfer = (char *)(uintptr_t)w->cfg.transfer;
    bool is_local = td_xfer_path_is_local(td_kv_port_path(w->cfg.transfer));
    h.kv_tls = (char *)(uintptr_t)(is_local ? "" : w->use_kv_tls ? "on" : "off");
    h.node_class = (char *)w->cfg.node_class;
    h.tp = (uint32_t)td_engine_n_ranks(w->engine);
    h.kernels = (char *)(uintptr_t)td_model_kernels(td_engine_model(w->engine));
    h.max_step_tokens = (uint32_t)td_engine_max_step_tokens(w->engine);
    h.prefix_cache = w->cfg.prefix_cache;
    h.one_token = w->role->one_token;
    h.multiplex = true;
    if (w->trust.id.secret) {
        td_cluster_nonce(w->trust.nonces.worker);
        w->trust.has_session = false;
        h.nonce = (ProtobufCBinaryData){sizeof w->trust.nonces.worker, w->trust.nonces.worker};
    } else {
        h.instance_key = (ProtobufCBinaryData){sizeof w->trust.instance_key, w->trust.instance_key};
    }
    h.kv_bytes_per_token = td_worker_kv_bytes_per_token(w);
    h.kv_dtype = (char *)(uintptr_t)td_dtype_name(td_model_kv_dtype(td_engine_model(w->engine)));
    Tandem__V1__WorkerMessage m = TANDEM__V1__WORKER_MESSAGE__INIT;
    m.message_case = TANDEM__V1__WORKER_MESSAGE__MESSAGE_HELLO;
    m.hello = &h;
    td_rpc_call_send(r->call, &m.base);
}

static void send_snapshot(struct td_registry *r, uint64_t now)
{
    struct td_worker *w = r->w;
    pthread_mutex_lock(&w->told.lock);
    Tandem__V1__Snapshot s = w->told.snap;
    r->report = w->told.report;
    w->told.report.n_steps = w->told.report.n_added = w->told.report.n_evicted = 0;
    w->told.report.reset = false;
    pthread_mutex_unlock(&w->told.lock);
    struct td_worker_report *p = &r->report;
    s.seq = r->last.seq;
    bool news =
        p->n_steps || p->n_added || p->n_evicted || p->reset || memcmp(&s, &r->last, sizeof s);
    if (!news && now - r->sent_ns < MAX_SILENCE_MS * TD_NS_PER_MS) return;
    s.seq = ++r->seq;
    r->last = s;
    r->sent_ns = now;
    for (size_t i = 0; i < p->n_steps; i++) r->step_ptrs[i] = &p->steps[i];
    s.n_steps = p->n_steps;
    s.steps = r->step_ptrs;
    s.n_blocks_added = p->n_added;
    s.blocks_added = p->added;
    s.n_blocks_evicted = p->n_evicted;
    s.blocks_evicted = p->evicted;
    s.blocks_reset = p->reset;
    Tandem__V1__WorkerMessage m = TANDEM__V1__WORKER_MESSAGE__INIT;
    m.message_case = TANDEM__V1__WORKER_MESSAGE__MESSAGE_SNAPSHOT;
    m.snapshot = &s;
    td_rpc_call_send(r->call, &m.base);
}

static void send_drain(struct td_registry *r)
{
    Tandem__V1__Drain d = TANDEM__V1__DRAIN__INIT;
    d.timeout_ms = r->w->cfg.drain_timeout_ms;
    Tandem__V1__WorkerMessage m = TANDEM__V1__WORKER_MESSAGE__INIT;
    m.message_case = TANDEM__V1__WORKER_MESSAGE__MESSAGE_DRAIN;
    m.drain = &d;
    td_rpc_call_send(r->call, &m.base);
    r->told_drain = true;
}

/* Ends the stream, and tries again later. */
static void leave(struct td_registry *r, struct td_rpc_call *call)
{
    r->backoff_ms = BACKOFF_MAX_MS;
    td_rpc_call_cancel(call); /* the router ends it too; a broken one may not */
}

static void refuse_router(struct td_registry *r, struct td_rpc_call *call, const char *reason)
{
    td_error("router_refused", "router=%s reason=\"%s\" action=retry", r->w->cfg.router, reason);
    leave(r, call);
}

/* From here on the router's calls are taken: it dials back before it welcomes. Who does not know
 * the secret can make none. */
static void take_challenge(struct td_registry *r, struct td_rpc_call *call,
                           const ProtobufCBinaryData *nonce)
{
    struct td_worker *w = r->w;
    Tandem__V1__Hello h = hello_of(w);
    uint8_t mac[TD_CLUSTER_MAC_BYTES];
    if (!w->trust.id.secret || nonce->len != sizeof w->trust.nonces.router ||
        w->trust.has_session) {
        refuse_router(r, call, "its challenge was not asked for, or is not one of 32 bytes");
        return;
    }
    memcpy(w->trust.nonces.router, nonce->data, nonce->len);
    memset(&w->trust.replay, 0, sizeof w->trust.replay);
    w->trust.has_session = true;
    if (td_join_prove_worker(w->trust.id.secret, &w->trust.nonces, &h, mac)) {
        refuse_router(r, call, "the proof of the cluster secret could not be made: no memory");
        return;
    }
    Tandem__V1__Proof p = TANDEM__V1__PROOF__INIT;
    Tandem__V1__WorkerMessage m = TANDEM__V1__WORKER_MESSAGE__INIT;
    p.mac = (ProtobufCBinaryData){sizeof mac, mac};
    m.message_case = TANDEM__V1__WORKER_MESSAGE__MESSAGE_PROOF;
    m.proof = &p;
    td_rpc_call_send(call, &m.base);
}

static bool is_our_router(struct td_registry *r, struct td_rpc_call *call,
                          const Tandem__V1__Welcome *welcome)
{
    struct td_worker *w = r->w;
    if (!w->trust.id.secret ||
        (w->trust.has_session &&
         td_join_verify_router(w->trust.id.secret, &w->trust.nonces, welcome)))
        return true;
    refuse_router(r, call,
                  welcome->proof.len ? "it does not know this worker's cluster secret: the "
                                       "cluster_secret_file of both must hold the same"
                                     : "it proves no cluster secret, and this worker has one: "
                                       "start the router with --cluster-secret-file");
    return false;
}

static void on_message(struct td_rpc_call *call, const ProtobufCMessage *msg, void *user)
{
    struct td_registry *r = user;
    const Tandem__V1__RouterMessage *m = (const Tandem__V1__RouterMessage *)msg;
    if (m->message_case == TANDEM__V1__ROUTER_MESSAGE__MESSAGE_CHALLENGE) {
        take_challenge(r, call, &m->challenge->nonce);
    } else if (m->message_case == TANDEM__V1__ROUTER_MESSAGE__MESSAGE_WELCOME) {
        if (r->welcomed || !is_our_router(r, call, m->welcome)) return;
        r->welcomed = true;
        r->backoff_ms = BACKOFF_MIN_MS;
        pthread_mutex_lock(&r->w->told.lock);
        r->w->told.report.seed = m->welcome->prefix_seed;
        r->w->told.report.epoch++;
        r->w->told.report.n_steps = r->w->told.report.n_added = r->w->told.report.n_evicted = 0;
        pthread_mutex_unlock(&r->w->told.lock);
        td_info("registered", "router=%s", r->w->cfg.router);
    } else if (m->message_case == TANDEM__V1__ROUTER_MESSAGE__MESSAGE_REJECT) {
        char q[600];
        td_error("registration_rejected", "router=%s reason=%s action=retry", r->w->cfg.router,
                 td_log_quote(q, sizeof q, m->reject->reason));
        leave(r, call);
    }
}

static void stop_done(struct td_registry *r)
{
    td_rpc_timer_cancel(r->timer);
    pthread_mutex_lock(&r->lock);
    r->stopped = true;
    pthread_cond_signal(&r->cond);
    pthread_mutex_unlock(&r->lock);
}

static void on_done(struct td_rpc_call *call, const struct td_rpc_result *result, void *user)
{
    (void)call;
    struct td_registry *r = user;
    char q[600];
    if (!r->stopping && (r->welcomed || r->backoff_ms == BACKOFF_MIN_MS))
        td_warn("router_lost", "router=%s code=%d msg=%s retry_ms=%llu", r->w->cfg.router,
                (int)result->code, td_log_quote(q, sizeof q, result->details),
                (unsigned long long)r->backoff_ms);
    r->call = NULL;
    r->welcomed = r->told_drain = false;
    r->next_try_ns = td_deadline_after_ms(td_now_ns(), r->backoff_ms);
    r->backoff_ms = r->backoff_ms * 2 > BACKOFF_MAX_MS ? BACKOFF_MAX_MS : r->backoff_ms * 2;
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

static void on_tick(void *arg)
{
    struct td_registry *r = arg;
    uint64_t now = td_now_ns();
    check_progress(r, now);
    if (td_port_follow(&r->port_seen, r->w->server, now)) td_log_tell_suppressed();
    td_worker_look_at_files(r->w, now);
    td_identity_look_at_file(&r->w->trust.id, now);
    if (r->stopping) {
        if (now > r->leave_ns) td_rpc_call_cancel(r->call);
        return;
    }
    if (!r->call) {
        if (now < r->next_try_ns) return;
        r->call =
            td_rpc_call_start(r->channel, &join_method, NULL, 0, false, NULL, 0, &join_handler, r);
        r->sent_ns = 0;
        r->hello_ns = now;
        send_hello(r);
    }
    if (!r->welcomed && now > r->hello_ns + WELCOME_MS * TD_NS_PER_MS) td_rpc_call_cancel(r->call);
    if (atomic_load(&r->w->draining) && !r->told_drain) send_drain(r);
    /* Before the welcome, blocks have a former router's names. A worker that makes no progress
       falls silent: the router moves its requests. */
    if (r->welcomed && !r->unhealthy) send_snapshot(r, now);
}

td_status td_registry_create(struct td_worker *w, struct td_registry **ret_registry,
                             struct td_err *err)
{
    struct td_registry *r = calloc(1, sizeof *r);
    if (!r) return td_fail(err, TD_ERR_NOMEM, "registry: out of memory");
    r->w = w;
    r->backoff_ms = BACKOFF_MIN_MS;
    pthread_mutex_init(&r->lock, NULL);
    pthread_cond_init(&r->cond, NULL);
    const char *dir = w->cfg.model[0] ? w->cfg.model : w->cfg.random_weights;
    char *real = realpath(dir, NULL);
    const char *path = real ? real : dir, *slash = strrchr(path, '/');
    const char *name = w->cfg.served_model_name; /* the router's may be the same variable, which has
                                                    aliases after a comma */
    if (name[0])
        snprintf(r->model, sizeof r->model, "%.*s", (int)strcspn(name, ","), name);
    else
        snprintf(r->model, sizeof r->model, "%s", slash ? slash + 1 : path);
    free(real);
    struct td_rpc_channel_config c = {.loop = w->loop,
                                      .target = w->cfg.router,
                                      .keepalive_ms = (uint32_t)w->cfg.peer_timeout_ms / 2 + 1,
                                      .tls = w->use_tls ? &w->tls : NULL};
    td_status s = td_rpc_channel_create(&c, &r->channel, err);
    if (s) {
        free(r);
        return s;
    }
    r->timer = td_rpc_timer_start(w->loop, TICK_MS, on_tick, r);
    *ret_registry = r;
    return TD_OK;
}

static void drain_on_loop(void *arg)
{
    struct td_registry *r = arg;
    if (r->call && !r->told_drain) send_drain(r);
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
    if (!r->call) {
        stop_done(r);
        return;
    }
    if (!r->told_drain) send_drain(r);
    td_rpc_call_close_send(r->call);
}

void td_registry_destroy(struct td_registry *r)
{
    if (!r) return;
    td_rpc_loop_post(r->w->loop, stop_on_loop, r);
    pthread_mutex_lock(&r->lock);
    while (!r->stopped) pthread_cond_wait(&r->cond, &r->lock);
    pthread_mutex_unlock(&r->lock);
    td_rpc_channel_destroy(r->channel);
    pthread_mutex_destroy(&r->lock);
    pthread_cond_destroy(&r->cond);
    free(r);
}
