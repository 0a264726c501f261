/* fleet.c - the workers: what they said last, and the channels to them. join.c finds out who they
 * are.
 *
 * A worker is identified by its stream. One that comes back with the same name or address replaces
 * what was left of it. A second process with the name of a worker that lives is turned away, since
 * else the two would throw each other out for ever. Workers of another model, protocol or KV
 * layout, or whose KV ports differ (kv_tls, transfer), are turned away with a reason: the router
 * never pairs workers that cannot exchange blocks. */
#include <string.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/metrics.h"
#include "grpc/health/v1/health.pb-c.h"
#include "router/router.h"

#define MAX_STEPS 64    /* step reports in one snapshot */
#define MAX_BLOCKS 4096 /* blocks added or evicted in one snapshot: tandem's workers tell 256 */

static void conn_free_if_idle(struct worker_conn *w)
{
    if (!w->gone || w->n_legs > 0) return;
    td_rpc_channel_destroy(w->channel);
    memset(w, 0, sizeof *w);
}

void worker_conn_release(struct worker_conn *w)
{
    w->n_legs--;
    conn_free_if_idle(w);
}

void fleet_gone(struct worker_conn *w, const char *why)
{
    char q[600];
    td_log_at_most(w->draining ? TD_LOG_INFO : TD_LOG_WARN, "worker_gone",
                   "worker=%s role=%s why=%s legs=%u", w->logged_name, w->role_name,
                   td_log_quote(q, sizeof q, w->draining ? "it drained" : why), w->n_legs);
    join_lose_worker(w->join, why);
    w->join = NULL;
    w->n_legs++; /* held while the core cancels legs */
    served_model_event(
        w->model, (struct td_core_event){.kind = TD_EV_WORKER_GONE, .gone = {.worker = w->index}});
    w->gone = true;
    multiplex_close(w);
    served_model_update_max_len(w->model);
    worker_conn_release(w);
}

/* The connection is made when a worker joins and not when the first request waits for it. An
 * address that cannot be dialled is logged at once. */
static void on_warm(struct td_rpc_call *call, const struct td_rpc_result *res, void *user)
{
    (void)call;
    struct worker_conn *w = user;
    char q[600];
    if (res->code != TD_CODE_OK && !w->gone)
        td_warn_limited("worker_unreachable", "worker=%s address=%s msg=%s", w->logged_name,
                        w->logged_address, td_log_quote(q, sizeof q, res->details));
    worker_conn_release(w);
}

static void warm_up(struct worker_conn *w)
{
    static const struct td_rpc_client_method method = {
        "/grpc.health.v1.Health/Check", &grpc__health__v1__health_check_response__descriptor,
        false};
    static const struct td_rpc_handler handler = {NULL, on_warm};
    Grpc__Health__V1__HealthCheckRequest m = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
    w->n_legs++;
    td_rpc_call_start(w->channel, &method, &m.base, 5000, true, NULL, 0, &handler, w);
}

/* Refuses a worker whose KV port can never exchange blocks with w's. What a hello does not say (an
 * older worker, shm's TLS) is taken to fit: then the transfer itself refuses by name. */
static td_status kv_ports_check(const struct worker_conn *w, const Tandem__V1__Hello *h,
                                struct td_err *err)
{
    if (h->kv_tls[0] && w->kv_tls[0] && strcmp(h->kv_tls, w->kv_tls))
        return td_fail(err, TD_ERR_INVALID,
                       "kv_tls is %s here and %s on %s: KV would never be sent between them; give "
                       "all workers tls_cert, tls_key and tls_ca, or none of them",
                       h->kv_tls, w->kv_tls, w->name);
    bool any = !h->transfer[0] || !w->transfer[0] || !strcmp(h->transfer, "auto") ||
               !strcmp(w->transfer, "auto");
    if (!any && strcmp(h->transfer, w->transfer))
        return td_fail(err, TD_ERR_INVALID,
                       "transfer is %s here and %s on %s: KV would never be sent between them; "
                       "give all workers the same, or auto",
                       h->transfer, w->transfer, w->name);
    return TD_OK;
}

static td_status names_check(const Tandem__V1__Hello *h, struct td_err *err)
{
    if (h->protocol != TD_PROTOCOL_VERSION)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "protocol is %u, this router speaks %d (worker version %s)", h->protocol,
                       TD_PROTOCOL_VERSION, h->version);
    if (strcmp(h->role, "prefill") && strcmp(h->role, "decode"))
        return td_fail(err, TD_ERR_INVALID, "role is \"%s\", must be prefill or decode", h->role);
    if (!h->name[0] || strlen(h->name) > 127)
        return td_fail(err, TD_ERR_INVALID, "name must have 1..127 bytes");
    if (!h->address[0] || strlen(h->address) > 255)
        return td_fail(err, TD_ERR_INVALID, "address must have 1..255 bytes");
    if (strlen(h->node_class) >= ROUTER_NODE_CLASS_NAME)
        return td_fail(err, TD_ERR_INVALID, "node_class has %zu bytes, limit %d",
                       strlen(h->node_class), ROUTER_NODE_CLASS_NAME - 1);
    if (strlen(h->version) > 63)
        return td_fail(err, TD_ERR_INVALID, "version must have at most 63 bytes");
    if (strlen(h->kernels) > 127)
        return td_fail(err, TD_ERR_INVALID, "kernels must have at most 127 bytes");
    return TD_OK;
}

static td_status sizes_check(const Tandem__V1__Hello *h, struct td_err *err)
{
    if (h->kv_blocks == 0 || h->block_size == 0 || h->max_model_len == 0 || h->max_seqs == 0)
        return td_fail(err, TD_ERR_INVALID,
                       "kv_blocks, block_size, max_model_len and max_seqs must be > 0");
    if ((uint64_t)h->kv_blocks * h->block_size > TD_CORE_MAX_TOKENS ||
        h->max_seqs > TD_CORE_MAX_SEQS)
        return td_fail(err, TD_ERR_LIMIT,
                       "kv_blocks %u of block_size %u, limit %llu tokens; max_seqs %u, limit %u",
                       h->kv_blocks, h->block_size, (unsigned long long)TD_CORE_MAX_TOKENS,
                       h->max_seqs, TD_CORE_MAX_SEQS);
    if (strlen(h->transfer) > 15 || strlen(h->kv_tls) > 7 || strlen(h->kv_dtype) > 7)
        return td_fail(err, TD_ERR_INVALID,
                       "transfer must have at most 15 bytes, kv_tls and kv_dtype at most 7 bytes");
    if (h->kv_dtype[strspn(h->kv_dtype, "abcdefghijklmnopqrstuvwxyz0123456789_")])
        return td_fail(err, TD_ERR_INVALID, "kv_dtype must be of letters, digits and _");
    return TD_OK;
}

/* Of two workers of one model. The type of the KV is in the hash; it is named where both say it. */
static td_status layouts_check(const struct worker_conn *w, const Tandem__V1__Hello *h,
                               struct td_err *err)
{
    if (w->layout_hash == h->layout_hash) return TD_OK;
    if (w->kv_dtype[0] && h->kv_dtype[0] && strcmp(w->kv_dtype, h->kv_dtype))
        return td_fail(err, TD_ERR_INVALID,
                       "kv_dtype %s differs from %s's %s: the KV of the workers of one model must "
                       "be of one type",
                       h->kv_dtype, w->name, w->kv_dtype);
    return td_fail(err, TD_ERR_INVALID,
                   "KV layout %016llx differs from %s's %016llx: model, dtype, KV type, block size "
                   "and instruction set must agree in the workers of one model",
                   (unsigned long long)h->layout_hash, w->name, (unsigned long long)w->layout_hash);
}

td_status fleet_hello_check(const struct router *r, const Tandem__V1__Hello *h, bool dialled,
                            struct served_model **ret_model, struct td_err *err)
{
    struct served_model *m = NULL;
    td_status s = names_check(h, err);
    if (s) return s;
    s = router_model_of_hello(r, h, &m, err);
    if (s < 0) return s;
    if ((s = sizes_check(h, err))) return s;
    uint64_t now = td_now_ns();
    bool sends_kv = strcmp(r->cfg.core.mode, "colocated") != 0;
    for (size_t i = 0; i < TD_CORE_MAX_WORKERS; i++) {
        const struct worker_conn *w = &r->workers[i];
        if (w->used && !w->gone && !strcmp(w->name, h->name) && w->incarnation != h->incarnation &&
            strcmp(w->address, h->address) &&
            now - w->snap_ns < r->cfg.core.worker_timeout_ms * TD_NS_PER_MS)
            return td_fail(
                err, TD_ERR_INVALID,
                "name \"%s\" belongs to a worker that lives, at %s (pid %u): names are unique",
                h->name, w->address, w->pid);
        /* An address belongs to the process that answers there. A worker that was not dialled back
         * takes no address from one that lives. */
        if (!dialled && w->used && !w->gone && !strcmp(w->address, h->address) &&
            w->incarnation != h->incarnation &&
            now - w->snap_ns < r->cfg.core.worker_timeout_ms * TD_NS_PER_MS)
            return td_fail(err, TD_ERR_INVALID,
                           "address %s belongs to a worker that lives, %s (pid %u)", h->address,
                           w->name, w->pid);
        if (!m || !w->used || w->gone || w->model != m) continue; /* the rest is of one model */
        if (strcmp(w->name, h->name) && (s = layouts_check(w, h, err))) return s;
        if (sends_kv && strcmp(w->name, h->name) && kv_ports_check(w, h, err)) return err->code;
    }
    *ret_model = m;
    return TD_OK;
}

/* A free index. One is reused only when nothing refers to it any more. */
static struct worker_conn *conn_new(struct router *r, struct served_model *m)
{
    for (uint32_t i = 0; i < TD_CORE_MAX_WORKERS; i++)
        if (!r->workers[i].used) {
            r->workers[i] = (struct worker_conn){.router = r, .model = m, .used = true, .index = i};
            return &r->workers[i];
        }
    return NULL;
}

uint32_t fleet_block_size(const struct served_model *m)
{
    for (size_t i = 0; i < TD_CORE_MAX_WORKERS; i++) {
        const struct worker_conn *w = &m->router->workers[i];
        if (w->used && !w->gone && w->model == m) return w->block_size;
    }
    return 0;
}

/* The number of a node class: those of the latency table come first, then the others in order of
 * appearance. "" stands for the role. When there are too many, the surplus shares the last
 * number. */
static uint32_t node_class_of(struct served_model *m, const char *name, const char *role)
{
    if (!name[0]) name = role;
    for (uint32_t i = 0; i < m->n_node_classes; i++)
        if (!strncmp(m->node_classes[i], name, ROUTER_NODE_CLASS_NAME - 1)) return i;
    if (m->n_node_classes == TD_CORE_MAX_NODE_CLASSES) return TD_CORE_MAX_NODE_CLASSES - 1;
    snprintf(m->node_classes[m->n_node_classes], ROUTER_NODE_CLASS_NAME, "%s", name);
    return m->n_node_classes++;
}

/* Warns when workers differ in their number of ranks. Sums over another number of ranks round
 * differently: such workers exchange KV, but a request that moves between them may go on with other
 * tokens. */
static void tell_degrees(const struct router *r, const struct worker_conn *joined)
{
    for (size_t i = 0; i < TD_CORE_MAX_WORKERS; i++) {
        const struct worker_conn *w = &r->workers[i];
        if (!w->used || w->gone || w == joined || w->model != joined->model || w->tp == joined->tp)
            continue;
        td_warn_limited("tp_differs", "worker=%s tp=%u other=%s other_tp=%u action=pair_them",
                        joined->logged_name, joined->tp, w->logged_name, w->tp);
        return;
    }
}

td_status fleet_channel(struct router *r, const char *address, struct td_rpc_channel **ret_channel,
                        struct td_err *err)
{
    struct td_rpc_channel_config c = {.loop = r->loop,
                                      .target = address,
                                      .tls = r->use_tls ? &r->tls : NULL,
                                      /* given up after twice this */
                                      .keepalive_ms =
                                          (uint32_t)r->cfg.core.worker_timeout_ms / 2 + 1,
                                      /* workers' answers: tokens, a grant */
                                      .max_message_bytes = 32 << 20};
    return td_rpc_channel_create(&c, ret_channel, err);
}

static void welcome(struct router *r, struct worker_conn *w)
{
    Tandem__V1__Welcome wel = TANDEM__V1__WELCOME__INIT;
    Tandem__V1__RouterMessage m = TANDEM__V1__ROUTER_MESSAGE__INIT;
    uint8_t mac[TD_CLUSTER_MAC_BYTES];
    wel.router_incarnation = r->incarnation;
    wel.protocol = TD_PROTOCOL_VERSION;
    wel.prefix_seed = r->prefixes.seed;
    if (r->id.secret && !td_join_prove_router(r->id.secret, &w->nonces, &wel, mac))
        wel.proof = (ProtobufCBinaryData){sizeof mac, mac};
    m.message_case = TANDEM__V1__ROUTER_MESSAGE__MESSAGE_WELCOME;
    m.welcome = &wel;
    td_rpc_call_send(join_call(w->join), &m.base);
}

/* What the worker says of itself. */
static void conn_fill(struct worker_conn *w, const Tandem__V1__Hello *h)
{
    snprintf(w->name, sizeof w->name, "%s", h->name);
    snprintf(w->role_name, sizeof w->role_name, "%s", h->role);
    snprintf(w->address, sizeof w->address, "%s", h->address);
    td_log_quote(w->logged_name, sizeof w->logged_name, w->name);
    td_log_quote(w->logged_address, sizeof w->logged_address, w->address);
    snprintf(w->version, sizeof w->version, "%s", h->version);
    snprintf(w->kernels, sizeof w->kernels, "%s", h->kernels);
    snprintf(w->transfer, sizeof w->transfer, "%s", h->transfer);
    snprintf(w->kv_tls, sizeof w->kv_tls, "%s", h->kv_tls);
    w->role = strcmp(h->role, "prefill") ? TD_ROLE_DECODE : TD_ROLE_PREFILL;
    w->incarnation = h->incarnation;
    w->session = h->session;
    w->layout_hash = h->layout_hash;
    w->kv_bytes_per_token = h->kv_bytes_per_token;
    snprintf(w->kv_dtype, sizeof w->kv_dtype, "%s", h->kv_dtype);
    w->block_size = h->block_size;
    w->kv_blocks = h->kv_blocks;
    w->max_model_len = h->max_model_len;
    w->pid = h->pid;
    w->tp = h->tp ? h->tp : 1;
    w->snap_ns = w->rate_ns = td_now_ns();
    tandem__v1__snapshot__init(&w->snap);
}

struct worker_conn *fleet_join(struct served_model *m, struct join *j, const Tandem__V1__Hello *h,
                               const struct td_join_nonces *nonces, struct td_rpc_channel *channel,
                               struct td_err *err)
{
    struct router *r = m->router;
    for (size_t i = 0; i < TD_CORE_MAX_WORKERS; i++) {
        struct worker_conn *old = &r->workers[i];
        if (old->used && !old->gone &&
            (!strcmp(old->name, h->name) || !strcmp(old->address, h->address)))
            fleet_gone(old, "replaced by a new registration");
    }
    struct worker_conn *w = conn_new(r, m);
    td_status s =
        w ? TD_OK : td_fail(err, TD_ERR_LIMIT, "the router holds as many workers as it can");
    bool dialled = channel != NULL;
    if (!s && !channel) s = fleet_channel(r, h->address, &channel, err);
    if (s) {
        if (w) memset(w, 0, sizeof *w);
        td_rpc_channel_destroy(channel);
        return NULL;
    }
    conn_fill(w, h);
    w->channel = channel;
    w->takes_multiplex = h->multiplex && !strcmp(r->cfg.multiplex, "on");
    w->join = j;
    w->nonces = *nonces;
    w->n_proofs = 1; /* the dial-back's */
    served_model_update_max_len(m);
    welcome(r, w);
    char model[2 * ROUTER_MODEL_NAME + 8];
    td_info_limited("worker_joined",
                    "worker=%s role=%s address=%s tp=%u kv_blocks=%u block_size=%u max_len=%u "
                    "model=%s",
                    w->logged_name, w->role_name, w->logged_address, w->tp, w->kv_blocks,
                    w->block_size, w->max_model_len,
                    td_log_quote(model, sizeof model, served_model_name(m)));
    tell_degrees(r, w);
    served_model_event(
        m, (struct td_core_event){.kind = TD_EV_WORKER_JOIN,
                                  .join = {.worker = w->index,
                                           .role = w->role,
                                           .kv_tokens = (uint64_t)w->kv_blocks * w->block_size,
                                           .max_seqs = h->max_seqs,
                                           .one_token = h->one_token,
                                           .node_class = node_class_of(m, h->node_class, h->role),
                                           .max_step_tokens = h->max_step_tokens,
                                           .kv_bytes_per_token = h->kv_bytes_per_token}});
    if (!dialled) warm_up(w);
    return w;
}

/* While the worker has several routers, and once when it has one again. */
static void tell_foreign(struct worker_conn *w, const Tandem__V1__Snapshot *s)
{
    if (s->routers <= 1 && w->n_routers <= 1) return;
    w->n_routers = s->routers;
    served_model_event(w->model,
                       (struct td_core_event){.kind = TD_EV_FOREIGN,
                                              .foreign = {.worker = w->index,
                                                          .n_routers = s->routers,
                                                          .n_seqs = s->foreign_seqs,
                                                          .n_running = s->foreign_running,
                                                          .tokens = s->foreign_tokens,
                                                          .queued_tokens = s->foreign_queued}});
}

void fleet_snapshot(struct worker_conn *w, const Tandem__V1__Snapshot *s)
{
    uint64_t now = td_now_ns();
    if (now - w->rate_ns > TD_NS_PER_S) { /* rates over the last second or so, smoothed */
        double dt = (double)(now - w->rate_ns) / 1e9;
        w->prefill_rate = 0.5 * w->prefill_rate +
                          0.5 * (double)(s->prefill_tokens_total - w->rate_prefill_total) / dt;
        w->decode_rate = 0.5 * w->decode_rate +
                         0.5 * (double)(s->decode_tokens_total - w->rate_decode_total) / dt;
        w->rate_prefill_total = s->prefill_tokens_total;
        w->rate_decode_total = s->decode_tokens_total;
        w->rate_ns = now;
    }
    w->snap = *s;
    w->snap.base.n_unknown_fields = 0;
    w->snap.base.unknown_fields = NULL;
    /* the message's own, gone with it */
    w->snap.n_steps = w->snap.n_blocks_added = w->snap.n_blocks_evicted = 0;
    w->snap.steps = NULL;
    w->snap.blocks_added = w->snap.blocks_evicted = NULL;
    w->snap_ns = now;
    struct served_model *m = w->model;
    /* Its blocks are forgotten: they are not believed, and this thread is not held up by them. */
    bool flood = s->n_blocks_added > MAX_BLOCKS || s->n_blocks_evicted > MAX_BLOCKS;
    if (flood)
        td_warn_limited("blocks_flood",
                        "worker=%s added=%zu evicted=%zu limit=%d action=forget_its_blocks",
                        w->logged_name, s->n_blocks_added, s->n_blocks_evicted, MAX_BLOCKS);
    if (s->blocks_reset || flood)
        served_model_event(m, (struct td_core_event){.kind = TD_EV_BLOCKS_RESET,
                                                     .blocks_reset = {.worker = w->index}});
    for (size_t i = 0; i < s->n_blocks_evicted && !flood; i++)
        served_model_event(m,
                           (struct td_core_event){
                               .kind = TD_EV_BLOCK_EVICT,
                               .block_evict = {.worker = w->index, .hash = s->blocks_evicted[i]}});
    for (size_t i = 0; i < s->n_blocks_added && !flood; i++)
        served_model_event(m, (struct td_core_event){
                                  .kind = TD_EV_BLOCK_ADD,
                                  .block_add = {.worker = w->index, .hash = s->blocks_added[i]}});
    for (size_t i = 0; i < s->n_steps && i < MAX_STEPS; i++)
        served_model_event(
            m, (struct td_core_event){.kind = TD_EV_WORKER_STEP,
                                      .step = {.worker = w->index,
                                               .prefill_tokens = s->steps[i]->prefill_tokens,
                                               .attention_work = s->steps[i]->attention_work,
                                               .decode_seqs = s->steps[i]->decode_seqs,
                                               .context_tokens = s->steps[i]->context_tokens,
                                               .wall_us = s->steps[i]->wall_us}});
    tell_foreign(w, s);
    served_model_event(
        m, (struct td_core_event){.kind = TD_EV_WORKER_SNAPSHOT,
                                  .snapshot = {.worker = w->index,
                                               .seq = s->seq,
                                               .held_tokens = (uint64_t)s->kv_held * w->block_size,
                                               .queued_tokens = s->tokens_queued,
                                               .n_seqs = (uint64_t)s->running + s->waiting,
                                               .calls_taken = s->calls_taken}});
}

void fleet_drain(struct worker_conn *w, uint64_t timeout_ms)
{
    td_info_limited("worker_draining", "worker=%s timeout_ms=%llu", w->logged_name,
                    (unsigned long long)timeout_ms);
    w->draining = true;
    served_model_event(w->model, (struct td_core_event){.kind = TD_EV_WORKER_DRAIN,
                                                        .drain = {.worker = w->index}});
}

/* ---- status ---------------------------------------------------------------------------------- */

/* One model's numbers, and into those of the router, which are all models' together. */
static void classes_status(const struct served_model *m, const struct td_core_stats *st,
                           Tandem__V1__ModelStatus *s, struct fleet_class_store *store)
{
    const struct td_core_config *c = &m->router->core_cfg;
    for (uint32_t i = 0; i < c->n_classes; i++) {
        Tandem__V1__ClassStatus *k = store->ptrs[i] = &store->classes[i];
        tandem__v1__class_status__init(k);
        k->name = (char *)(uintptr_t)c->classes[i].name;
        k->judged = st->by_class[i].judged;
        k->good = st->by_class[i].good;
    }
    s->n_classes = c->n_classes;
    s->classes = store->ptrs;
}

static void model_status(const struct served_model *m, Tandem__V1__ModelStatus *s, char **aliases,
                         struct fleet_class_store *classes, Tandem__V1__StatusResponse *out)
{
    struct td_core_stats st;
    struct td_core_advice advice;
    td_core_stats(m->core, &st);
    td_core_advice(m->core, &advice);
    tandem__v1__model_status__init(s);
    s->name = (char *)(uintptr_t)served_model_name(m);
    for (uint32_t i = 1; i < m->names.n; i++)
        aliases[s->n_aliases++] = (char *)(uintptr_t)m->names.names[i];
    s->aliases = aliases;
    s->queued = st.queued;
    s->live = st.live;
    s->finished = st.finished;
    s->failed = st.failed;
    s->failovers = st.failovers;
    s->refused = st.refused;
    s->arrival_rate = st.arrival_rate;
    s->judged = st.judged;
    s->good = st.good;
    classes_status(m, &st, s, classes);
    s->bound = (char *)(uintptr_t)td_bound_name(advice.bound);
    s->want_prefill = advice.want[TD_ROLE_PREFILL];
    s->want_decode = advice.want[TD_ROLE_DECODE];
    s->max_model_len = served_model_max_len(m);
    s->ttft_p50_ms = 1e3 * td_metric_quantile(m->metrics.ttft, 0.5);
    s->ttft_p99_ms = 1e3 * td_metric_quantile(m->metrics.ttft, 0.99);
    s->tpot_p50_ms = 1e3 * td_metric_quantile(m->metrics.tpot, 0.5);
    s->tpot_p99_ms = 1e3 * td_metric_quantile(m->metrics.tpot, 0.99);
    out->queued += s->queued;
    out->live += s->live;
    out->finished += s->finished;
    out->failed += s->failed;
    out->failovers += s->failovers;
    out->refused += s->refused;
    out->arrival_rate += s->arrival_rate;
    out->want_prefill += s->want_prefill;
    out->want_decode += s->want_decode;
    if (advice.bound != TD_BOUND_NONE && !strcmp(out->bound, td_bound_name(TD_BOUND_NONE)))
        out->bound = s->bound;
}

static void models_status(const struct router *r, Tandem__V1__StatusResponse *out,
                          struct fleet_status_store *store)
{
    uint64_t judged = 0, good = 0;
    out->model = (char *)(uintptr_t)(r->n_models ? served_model_name(r->models[0]) : "");
    out->bound = (char *)(uintptr_t)td_bound_name(TD_BOUND_NONE);
    for (uint32_t i = 0; i < r->n_models; i++) {
        Tandem__V1__ModelStatus *s = store->model_ptrs[i] = &store->models[i];
        model_status(r->models[i], s, store->aliases[i], &store->classes[i], out);
        judged += s->judged;
        good += s->good;
    }
    out->n_models = r->n_models;
    out->models = store->model_ptrs;
    out->attainment = judged ? (double)good / (double)judged : -1;
}

static void refusals_status(const struct router *r, uint64_t now_ns,
                            Tandem__V1__StatusResponse *out, struct fleet_status_store *store)
{
    out->refused_workers = store->refused_ptrs;
    for (size_t i = 0; i < ROUTER_MAX_REFUSALS; i++) {
        const struct router_refusal *f = &r->joining.refusals[i];
        if (!f->times) continue;
        Tandem__V1__RefusedWorker *s = &store->refused[i];
        tandem__v1__refused_worker__init(s);
        s->name = (char *)(uintptr_t)f->name;
        s->pid = f->pid;
        s->reason = (char *)(uintptr_t)f->reason;
        s->times = f->times;
        s->times_for_good = f->times_for_good;
        s->proved = f->is_proved;
        s->age_ms = (now_ns - f->last_ns) / TD_NS_PER_MS;
        store->refused_ptrs[out->n_refused_workers++] = s;
    }
}

void fleet_status(struct router *r, Tandem__V1__StatusResponse *out,
                  struct fleet_status_store *store)
{
    static const char *const states[] = {"absent", "ready", "suspect", "draining"};
    uint64_t now = td_now_ns();
    models_status(r, out, store);
    refusals_status(r, now, out, store);
    out->mode = (char *)(uintptr_t)r->cfg.core.mode;
    out->policy = (char *)(uintptr_t)r->cfg.core.policy;
    out->uptime_ms = (now - r->started_ns) / TD_NS_PER_MS;
    out->workers = store->worker_ptrs;
    for (size_t i = 0; i < TD_CORE_MAX_WORKERS; i++) {
        struct worker_conn *w = &r->workers[i];
        if (!w->used || w->gone) continue;
        struct td_core_worker_view v;
        td_core_worker_view(w->model->core, w->index, &v);
        Tandem__V1__WorkerStatus *s = &store->workers[out->n_workers];
        tandem__v1__worker_status__init(s);
        s->name = w->name;
        s->role = w->role_name;
        s->model = (char *)(uintptr_t)served_model_name(w->model);
        s->address = w->address;
        s->state = (char *)(uintptr_t)states[v.state];
        s->kv_blocks = w->kv_blocks;
        s->kv_blocks_held = w->snap.kv_held;
        s->kv_blocks_cached = w->snap.kv_cached;
        s->block_size = w->block_size;
        s->running = w->snap.running;
        s->waiting = w->snap.waiting;
        s->prefill_tokens_per_s = w->prefill_rate;
        s->decode_tokens_per_s = w->decode_rate;
        s->snapshot_age_ms = (now - w->snap_ns) / TD_NS_PER_MS;
        s->assigned = v.assigned;
        s->calls_unseen = v.calls_unseen;
        s->kv_bytes_sent = w->snap.kv_bytes_sent;
        s->kv_bytes_received = w->snap.kv_bytes_received;
        s->pid = w->pid;
        s->transfers = w->snap.slots_used;
        s->version = w->version;
        s->kernels = w->kernels;
        s->layout_hash = w->layout_hash;
        s->kv_dtype = w->kv_dtype;
        s->kv_bytes_per_token = w->kv_bytes_per_token;
        s->tp = w->tp;
        store->worker_ptrs[out->n_workers++] = s;
    }
}
