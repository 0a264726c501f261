/* worker.c - see worker.h: a worker opens, runs, drains and closes. */
#include "common/worker/worker.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/address.h"
#include "common/base/clock.h"
#include "common/base/descriptors.h"
#include "common/base/entropy.h"
#include "common/base/log.h"
#include "common/base/metrics_http.h"
#include "common/base/process_metrics.h"
#include "common/base/signals.h"
#include "common/worker/nodes.h"
#include "common/worker/own_name.h"
#include "common/worker/registry.h"
#include "common/worker/worker_parts.h"
#include "kernels/device.h"

/* after drain: calls get their status and end within this, or are cancelled */
#define STOP_BOUND_MS 5000

static struct td_engine_config engine_config(const struct td_worker_config *c, struct td_comm *comm)
{
    return (struct td_engine_config){
        .model_dir = c->model.path[0] ? c->model.path : NULL,
        .random_config = c->model.random_weights[0] ? c->model.random_weights : NULL,
        .dtype = c->model.dtype,
        .kv_dtype = c->model.kv_dtype,
        .ops = c->model.ops,
        .cpus = c->model.cpus,
        .n_threads = (int32_t)c->model.threads,
        .kv_memory = c->model.kv_memory,
        .block_size = (int32_t)c->model.block_size,
        .max_seqs = (int32_t)c->model.max_seqs,
        .max_batch = (int32_t)c->model.max_batch,
        .max_model_len = (int32_t)c->model.max_len,
        .max_step_tokens = (int32_t)c->model.max_step_tokens,
        .prefix_cache = c->model.prefix_cache,
        .shareable_kv = true,
        .comm = comm,
        .expert_ranks = (int32_t)c->ranks.ep,
        .experts = c->model.experts,
        .rank_timeout_ms = (uint32_t)c->ranks.timeout_ms,
        .device = c->model.device,
        .device_index = (int32_t)c->model.device_index + td_comm_rank(comm),
        .deterministic = c->model.deterministic};
}

/* What nnodes, node_rank and master_addr cannot be. */
static td_status check_nodes(const struct td_worker_config *c, struct td_err *err)
{
    if (c->ranks.node_rank >= c->ranks.nnodes)
        return td_fail(err, TD_ERR_INVALID, "node_rank is %lld, must be below nnodes (%lld)",
                       (long long)c->ranks.node_rank, (long long)c->ranks.nnodes);
    const char *port = strrchr(c->ranks.master_addr, ':');
    long number = port ? strtol(port + 1, NULL, 10) : 0;
    if (c->ranks.nnodes == 1) return TD_OK;
    if (c->ranks.nnodes != c->ranks.tp)
        return td_fail(err, TD_ERR_INVALID,
                       "nnodes is %lld, tp is %lld: a node has one rank, so they must be equal",
                       (long long)c->ranks.nnodes, (long long)c->ranks.tp);
    if (number < 1 || number > 65535)
        return td_fail(err, TD_ERR_INVALID,
                       "master_addr is \"%s\": with nnodes %lld it must say, as host:port, where "
                       "node 0 awaits the others",
                       c->ranks.master_addr, (long long)c->ranks.nnodes);
    if (strcmp(c->model.device, "cpu") != 0)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "device is %s, nnodes is %lld: the GPUs of a worker must be of one host",
                       c->model.device, (long long)c->ranks.nnodes);
    return TD_OK;
}

/* Joins the ranks of several hosts; their port is as much a member's as the KV port, and has its
 * certificates. */
static td_status open_nodes(const struct td_worker_role *role, const struct td_worker_config *c,
                            const struct td_identity *id, struct td_comm **ret_comm,
                            struct td_err *err)
{
    const struct td_kv_port_files files = {c->tls.cert, c->tls.key, c->tls.ca, id->workers,
                                           id->secret};
    struct td_kv_port port;
    struct td_xfer_config scratch = {0};
    struct td_nodes_config n = {.n_nodes = (int32_t)c->ranks.nnodes,
                                .node = (int32_t)c->ranks.node_rank,
                                .role = role->name,
                                .listen = c->listen,
                                .master_addr = c->ranks.master_addr,
                                .secret = id->secret};
    td_status s = td_kv_port_fill(&c->kv_port, "tcp", &files, NULL, &port, &scratch, err);
    bool has_names = port.use_tls && (id->workers || c->kv_port.kv_tls_peer_name[0]);
    if (!s && n.node == 0)
        s = td_identity_check_port(id, "listen", c->listen, "the ranks of its model",
                                   "tls-worker-names", has_names, err);
    if (!s && port.use_tls) s = td_xfer_tls_open(&port.tls, &n.tls, err);
    if (!s) s = n.node == 0 ? td_nodes_lead(&n, ret_comm, err) : td_nodes_join(&n, ret_comm, err);
    td_xfer_tls_close(n.tls);
    return s;
}

/* What cannot be is refused before any process is started for it. */
static td_status open_ranks(struct td_worker *w, struct td_err *err)
{
    const struct td_worker_config *c = &w->cfg;
    struct td_model_config mc;
    td_status early = check_nodes(c, err);
    if (early || c->ranks.tp == 1) return early;
    td_status s = c->model.path[0] ? td_model_config_load(c->model.path, &mc, err)
                                   : td_model_config_load_file(c->model.random_weights, &mc, err);
    if (!s) s = td_model_check_ranks(&mc, (int32_t)c->ranks.tp, err);
    if (!s && c->ranks.nnodes > 1) return open_nodes(w->role, c, &w->trust.id, &w->ranks.comm, err);
    if (!s) s = td_ranks_start((int32_t)c->ranks.tp, (int32_t)c->model.threads, &w->ranks, err);
    return s;
}

static void log_device(const struct td_device_info *i)
{
    char q[160];
    if (!i) return;
    td_info("device",
            "kind=cuda index=%d name=%s uuid=%s pci=%s sm=%d%d n_sms=%d memory_mib=%llu driver=%s "
            "deterministic=%s emulated=%s",
            (int)i->index, td_log_quote(q, sizeof q, i->name), i->uuid, i->pci, (int)i->cc_major,
            (int)i->cc_minor, (int)i->n_sms, (unsigned long long)(i->memory_bytes >> 20),
            i->driver[0] ? i->driver : "unknown", i->is_deterministic ? "true" : "false",
            i->is_emulated ? "true" : "false");
}

/* Without a tokenizer, or with one whose tokens have no bytes of their own, a worker serves what is
 * not guided. */
static void open_guided(struct td_worker *w)
{
    const struct td_model_config *mc = td_model_config(td_engine_model(w->engine));
    char q[TD_ERR_MSG_MAX + 8];
    if (!w->cfg.model.path[0])
        td_fail(&w->guided_why, TD_ERR_UNSUPPORTED,
                "guided output: this worker's weights are random, without a tokenizer");
    else
        td_guided_open(w->cfg.model.path, mc->vocab, mc->eos_ids, mc->n_eos, &w->guided,
                       &w->guided_why);
    if (!w->guided)
        td_info("not_guided", "reason=%s", td_log_quote(q, sizeof q, w->guided_why.msg));
}

static td_status open_engine(struct td_worker *w, struct td_err *err)
{
    const struct td_worker_config *c = &w->cfg;
    if (!c->model.path[0] && !c->model.random_weights[0])
        return td_fail(err, TD_ERR_INVALID, "model is empty: give --model DIR");
    td_status s = open_ranks(w, err);
    if (s) return s;
    struct td_engine_config e = engine_config(c, w->ranks.comm);
    e.hands_over = !w->role->grows;
    s = td_engine_open(&e, &w->engine, err);
    if (s) return s;
    log_device(td_engine_device_info(w->engine));
    w->reqs = calloc((size_t)c->model.max_seqs, sizeof *w->reqs);
    w->sched = td_engine_scheduler(w->engine);
    w->sched->grows = w->role->grows;
    w->items = calloc((size_t)c->model.max_batch, sizeof *w->items);
    if (!w->reqs || !w->items)
        return td_fail(err, TD_ERR_NOMEM, "no memory for max_seqs %lld",
                       (long long)c->model.max_seqs);
    open_guided(w);
    if (w->role->engine_opened) w->role->engine_opened(w);
    return TD_OK;
}

/* rank 0 drains and tells its end: a signal to the whole group of processes must not end a rank
 * before */
static void block_signals(void)
{
    sigset_t set;
    td_stop_signals(&set);
    sigaddset(&set, SIGHUP);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
}

/* A rank's life once it has a communicator, or s says why it has none. */
static int follow(td_status s, int32_t rank, struct td_ranks *ranks,
                  const struct td_worker_config *config, struct td_err *err)
{
    char q[300];
    struct td_engine_config e = engine_config(config, ranks->comm);
    bool has_joined = !s;
    if (has_joined) td_info("rank_started", "rank=%d pid=%d", rank, (int)getpid());
    if (!s) s = td_engine_follow(&e, err);
    /* rank 0, if it lives, decides */
    if (has_joined && s == TD_ERR_PEER)
        td_info("rank_ends", "rank=%d reason=%s", rank, td_log_quote(q, sizeof q, err->msg));
    else if (s)
        td_error("rank_failed", "rank=%d reason=%s action=exit", rank,
                 td_log_quote(q, sizeof q, err->msg));
    td_ranks_stop(ranks);
    return s != TD_OK;
}

int td_worker_follow(const struct td_ranks_place *place, const struct td_worker_config *config)
{
    struct td_err err = {0};
    struct td_ranks ranks = {0};
    block_signals();
    td_status s = td_ranks_join(place, &ranks, &err);
    return follow(s, place->rank, &ranks, config, &err);
}

int td_worker_follow_node(const struct td_worker_role *role, const struct td_worker_config *c)
{
    struct td_err err = {0};
    struct td_ranks ranks = {0};
    struct td_identity id = {0};
    signal(SIGPIPE, SIG_IGN);
    td_status s = check_nodes(c, &err);
    if (!s && !c->model.path[0] && !c->model.random_weights[0])
        s = td_fail(&err, TD_ERR_INVALID, "model is empty: give --model DIR");
    if (!s) s = td_identity_open(&c->identity, c->tls.cert[0] && c->tls.ca[0], &id, &err);
    if (!s) s = open_nodes(role, c, &id, &ranks.comm, &err);
    td_identity_close(&id);
    if (!s) block_signals(); /* before, a signal ends it at once */
    return follow(s, (int32_t)c->ranks.node_rank, &ranks, c, &err);
}

static td_status open_server(struct td_worker *w, struct td_err *err)
{
    td_status s = td_rpc_loop_create(w->role->name, &w->loop, err);
    if (s) return s;
    const struct td_rpc_method *services[] = {td_worker_methods, NULL};
    struct td_rpc_server_config c = {
        .loop = w->loop,
        .address = w->cfg.listen,
        .tls = w->use_tls ? &w->tls : NULL,
        .services = services,
        .keepalive_ms = (uint32_t)w->cfg.peer_timeout_ms / 2 +
                        1 /* a frozen router's requests are freed after about twice this (I3) */,
        .port_check_ms = (uint32_t)w->cfg.port_check_ms,
        .reflection = true,
        .ctx = w};
    td_port_limits(&w->cfg.port, (uint32_t)w->cfg.model.max_seqs * 2 + 64, &c.limits);
    if ((s = td_rpc_server_start(&c, &w->server, err))) return s;
    const char *colon = strrchr(w->cfg.listen, ':');
    int host_bytes = colon ? (int)(colon - w->cfg.listen) : 0;
    uint16_t bound = (uint16_t)td_rpc_server_port(w->server);
    if (w->cfg.advertise[0] &&
        (s = td_address_join(w->cfg.advertise, bound, w->address, sizeof w->address, err)))
        return td_err_prefix(err, "advertise");
    if (!w->cfg.advertise[0])
        snprintf(w->address, sizeof w->address, "%.*s:%d", host_bytes, w->cfg.listen, bound);
    if (!strncmp(w->address, "0.0.0.0:", 8) || !strncmp(w->address, "[::]:", 5))
        return td_fail(err, TD_ERR_INVALID,
                       "advertise is empty and listen is the wildcard address \"%s\": say with "
                       "--advertise which host others dial",
                       w->cfg.listen);
    return TD_OK;
}

/* TANDEM_LISTEN is the router's address: one environment may be that of all daemons of a host.
 * Whoever meant a worker by it is told; who also has others dial another host of it (advertise)
 * has most likely meant it. */
static void tell_of_shared_listen(const struct td_worker *w)
{
    bool is_prefill = !strcmp(w->role->name, "prefill");
    const char *shared = getenv("TANDEM_LISTEN"),
               *own = getenv(is_prefill ? "TANDEM_PREFILL_LISTEN" : "TANDEM_DECODE_LISTEN");
    bool given = (own && own[0]) || strcmp(w->cfg.listen, "127.0.0.1:0") != 0;
    char q[300];
    if (!shared || !shared[0] || given) return;
    td_log_quote(q, sizeof q, shared);
    if (w->cfg.advertise[0])
        td_warn("listen_is_the_routers",
                "shared=%s listen=%s advertise=%s not_read=TANDEM_LISTEN read=TANDEM_%s_LISTEN", q,
                w->cfg.listen, w->cfg.advertise, is_prefill ? "PREFILL" : "DECODE");
    else
        td_info("listen_is_the_routers",
                "shared=%s listen=%s not_read=TANDEM_LISTEN read=TANDEM_%s_LISTEN", q,
                w->cfg.listen, is_prefill ? "PREFILL" : "DECODE");
}

static bool port_answers(void *ctx)
{
    return td_rpc_server_answers(((struct td_worker *)ctx)->server);
}

/* With the host: in containers every worker's pid is 1, and names are unique in a cluster. */
static void default_name(struct td_worker *w, const struct td_worker_role *role)
{
    char host[65] = "host";
    if (gethostname(host, sizeof host)) snprintf(host, sizeof host, "host");
    host[sizeof host - 1] = 0;
    snprintf(w->name, sizeof w->name, "%s-%s-%d", role->name, host, (int)getpid());
}

/* While the weights are loaded there is nothing to drain: a signal ends the process at once, by
 * its default action (a handler would wait for the kernel to fill gigabytes of pages). Only the
 * main thread takes it: the pool's threads block all. */
static td_status open_engine_interruptible(struct td_worker *w, const sigset_t *set,
                                           struct td_err *err)
{
    pthread_sigmask(SIG_UNBLOCK, set, NULL);
    td_status s = open_engine(w, err);
    pthread_sigmask(SIG_BLOCK, set, NULL);
    return s;
}

/* After the weights, which take longer to load than a name usually takes to be known. A signal
 * ends it, as above. */
static td_status wait_own_name_interruptible(const struct td_worker *w, const sigset_t *set,
                                             struct td_err *err)
{
    char host[256];
    if (!w->cfg.advertise[0] || td_xfer_path_is_local(td_kv_port_path(w->cfg.transfer)))
        return TD_OK;
    td_status s = td_address_host(w->cfg.advertise, host, sizeof host, err);
    if (s) return td_err_prefix(err, "advertise");
    pthread_sigmask(SIG_UNBLOCK, set, NULL);
    s = td_own_name_wait(host, NULL, err);
    pthread_sigmask(SIG_BLOCK, set, NULL);
    return s;
}

/* Before the weights: what is refused is refused at once. */
static td_status open_identity(struct td_worker *w, struct td_err *err)
{
    const struct td_worker_config *c = &w->cfg;
    bool has_ca = w->use_tls && c->tls.ca[0];
    td_random_fill(w->trust.instance_key, sizeof w->trust.instance_key);
    td_status s = td_identity_open(&c->identity, has_ca, &w->trust.id, err);
    if (!s)
        s = td_identity_check_port(&w->trust.id, "listen", c->listen, "Worker", "tls-router-names",
                                   w->trust.id.routers != NULL, err);
    if (!s) s = td_worker_check_kv_port(w, err);
    return s;
}

/* The files and names of the worker's gRPC side. */
static td_status open_tls(struct td_worker *w, struct td_err *err)
{
    w->use_tls = w->cfg.tls.cert[0] != 0;
    if (w->use_tls != (w->cfg.tls.key[0] != 0))
        return td_fail(err, TD_ERR_INVALID, "tls_cert and tls_key must be given together");
    w->tls = (struct td_rpc_tls){
        .cert_file = w->cfg.tls.cert,
        .key_file = w->cfg.tls.key,
        .ca_file = w->cfg.tls.ca[0] ? w->cfg.tls.ca : NULL,
        .server_name = w->cfg.tls.server_name[0] ? w->cfg.tls.server_name : NULL,
        .peer_names =
            w->cfg.identity.tls_router_names[0] ? w->cfg.identity.tls_router_names : NULL};
    return TD_OK;
}

static void say_ready(const struct td_worker *w)
{
    char kernels[TD_ERR_MSG_MAX];
    td_info("ready",
            "name=%s address=%s router=%s tp=%d kv_blocks=%d kv_dtype=%s kv_bytes_per_token=%llu "
            "kv_pages=%s block_size=%lld max_len=%d kernels=%s pid=%d",
            w->name, w->address, w->cfg.router, td_engine_n_ranks(w->engine), w->kv_blocks,
            td_dtype_name(td_model_kv_dtype(td_engine_model(w->engine))),
            (unsigned long long)td_worker_kv_bytes_per_token(w),
            td_engine_device_info(w->engine)          ? "device"
            : td_engine_kv_arena(w->engine)->reserved ? "reserved_2MiB"
                                                      : "small",
            (long long)w->cfg.model.block_size, td_engine_max_len(w->engine),
            td_log_quote(kernels, sizeof kernels, td_model_kernels(td_engine_model(w->engine))),
            (int)getpid());
}

td_status td_worker_open(struct td_worker *w, const struct td_worker_role *role,
                         const struct td_worker_config *config, struct td_err *err)
{
    sigset_t set;
    td_stop_signals(&set);
    sigaddset(&set, SIGHUP);
    pthread_sigmask(SIG_BLOCK, &set, NULL); /* before gRPC: its threads inherit the mask */
    signal(SIGPIPE, SIG_IGN);
    td_descriptors_raise();

    memset(w, 0, sizeof *w);
    w->wakeup.fd = -1;
    w->cfg = *config;
    w->role = role;
    w->incarnation = td_random_u64();
    if (config->name[0])
        snprintf(w->name, sizeof w->name, "%s", config->name);
    else
        default_name(w, role);
    td_status early = open_tls(w, err);
    if (!early) early = open_identity(w, err);
    if (early) return early;
    char host[256];
    /* before the weights */
    if (config->advertise[0] && td_address_host(config->advertise, host, sizeof host, err))
        return td_err_prefix(err, "advertise");
    pthread_mutex_init(&w->inbox.lock, NULL);
    pthread_mutex_init(&w->told.lock, NULL);
    w->inbox.tail = &w->inbox.head;
    tandem__v1__snapshot__init(&w->told.snap);
    atomic_store(&w->progress_ns, td_now_ns());

    tell_of_shared_listen(w);
    td_status s = td_wakeup_open(&w->wakeup, err);
    sigdelset(&set, SIGHUP); /* stays blocked */
    if (!s) s = open_engine_interruptible(w, &set, err);
    if (!s) s = wait_own_name_interruptible(w, &set, err);
    if (!s) s = td_worker_open_xfer(w, err);
    if (!s) s = open_server(w, err);
    if (!s && config->metrics_listen[0])
        s = td_metrics_http_start(config->metrics_listen, port_answers, w, &w->metrics, err);
    if (!s && w->guided)
        s = td_guided_start(w->guided, td_worker_on_guided, w, config->guide_gate, err);
    if (s) return s;
    td_process_metrics_open(td_model_kernels(td_engine_model(w->engine)));
    td_worker_metrics_open();
    td_worker_update_snapshot(w);
    if (pthread_create(&w->thread, NULL, td_worker_engine_main, w))
        return td_fail(err, TD_ERR_IO, "engine thread: %s", strerror(errno));
    w->thread_started = true;
    if ((s = td_registry_create(w, &w->registry, err))) return s;
    td_rpc_server_set_serving(w->server, true);
    say_ready(w);
    return TD_OK;
}

int td_worker_run(struct td_worker *w)
{
    int sig;
    while (!(sig = td_stop_signal_wait((int)w->cfg.port_check_ms)))
        if (td_rpc_server_is_deaf(w->server)) { /* nothing can be drained: the router moves its
                                                   requests */
            td_error("port_deaf", "port=%d action=exit hint=\"no router can come in\"",
                     td_rpc_server_port(w->server));
            _exit(1);
        }
    bool lost = atomic_load(&w->device_lost);
    if (!lost) td_info("signal", "sig=%d action=drain", sig);
    return lost;
}

/* True once no request is live; a second signal exits the process at once. */
static bool wait_idle(struct td_worker *w, uint64_t deadline_ns)
{
    while (atomic_load(&w->n_live) > 0) {
        if (td_now_ns() >= deadline_ns) return false;
        if (td_stop_signal_wait(10)) {
            td_warn("second_signal", "live=%u action=exit", atomic_load(&w->n_live));
            _exit(1);
        }
    }
    return true;
}

void td_worker_drain(struct td_worker *w)
{
    atomic_store(&w->draining, true);
    td_rpc_server_set_serving(w->server, false);
    td_registry_drain(w->registry);
    unsigned live = atomic_load(&w->n_live);
    bool idle = wait_idle(w, td_deadline_after_ms(td_now_ns(), w->cfg.drain_timeout_ms));
    if (!idle) {
        td_warn("drain_timeout", "live=%u waited_ms=%llu action=hand_over", atomic_load(&w->n_live),
                (unsigned long long)w->cfg.drain_timeout_ms);
        atomic_store(&w->hand_over, true);
        td_wakeup_signal(&w->wakeup);
        wait_idle(w, td_deadline_after_ms(td_now_ns(), STOP_BOUND_MS));
    }
    td_info("drained", "live_at_start=%u finished_all=%s", live, idle ? "true" : "false");
}

void td_worker_close(struct td_worker *w)
{
    td_registry_destroy(w->registry);
    td_metrics_http_stop(w->metrics); /* it asks the server how it is */
    if (w->server) td_rpc_loop_post(w->loop, td_multiplex_end_all, w);
    if (w->server)
        td_rpc_server_stop(w->server, 1000); /* cancels what is left: their ENDED mail
                                                frees them */
    td_guided_stop(w->guided);
    if (w->thread_started) {
        atomic_store(&w->hand_over, true);
        atomic_store(&w->stopping, true);
        td_wakeup_signal(&w->wakeup);
        pthread_join(w->thread, NULL);
    }
    td_xfer_close(w->xfer);
    if (w->loop) td_rpc_loop_destroy(w->loop);
    td_guided_close(w->guided);
    td_engine_close(w->engine);
    td_ranks_stop(&w->ranks);
    td_identity_close(&w->trust.id);
    free(w->reqs);
    free(w->items);
    if (w->wakeup.fd >= 0) td_wakeup_close(&w->wakeup);
    memset(w, 0, sizeof *w);
}
