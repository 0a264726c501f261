/* doctor_cluster.c - checks the router and each worker that it lists: whether it answers, its
 * delay, and whether clocks and builds agree.
 *
 * Health is asked of the router first, then of all workers at once, so that several dead ones cost
 * one time-out together. Those that answer are asked N_TRIPS times more, one after the other. A
 * health answer carries the daemon's clock (TD_RPC_WALL_KEY): the fastest of the round trips tells
 * its difference from ours, to within half that trip. Everything ends within three time-outs and a
 * second per live worker. */
#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "cli/doctor.h"
#include "common/base/clock.h"
#include "common/base/printable.h"
#include "grpc/health/v1/health.pb-c.h"

#define GROUP "cluster"
#define N_TRIPS 20
#define TRIPS_MS 1000 /* longest measurement of one daemon */
#define SKEW_MS 50.0  /* with more skew the logs of two machines cannot be put in order */

struct ask { /* one health call */
    pthread_mutex_t lock;
    pthread_cond_t cond;
    bool done, serving;
    enum td_code code;
    char details[256];
    /* their_wall_ns 0: not told */
    uint64_t start_ns, end_ns, sent_wall_ns, got_wall_ns, their_wall_ns;
};

struct target {
    char name[128], role[16], state[16], address[256], version[64];
    uint64_t layout_hash;
    uint32_t block_size, kv_blocks;
    size_t model; /* in cluster.models */
    struct td_rpc_channel *channel;
    struct ask ask;
    bool answers;
};

struct cluster {
    struct doctor_report *r;
    const struct doctor_config *o;
    struct td_rpc_loop *loop;
    struct td_rpc_tls tls;
    struct target router, *workers;
    size_t n_workers;
    char mode[32];
    char (*models)[256]; /* names */
    size_t n_models;
    bool withheld; /* the router treated this caller as a client and left out details */
};

static const char *code_name(enum td_code code)
{
    return code == TD_CODE_UNAVAILABLE         ? "unavailable"
           : code == TD_CODE_DEADLINE_EXCEEDED ? "no answer in time"
                                               : "refused";
}

static void on_health(struct td_rpc_call *call, const ProtobufCMessage *msg, void *user)
{
    (void)call;
    struct ask *a = user;
    const Grpc__Health__V1__HealthCheckResponse *m =
        (const Grpc__Health__V1__HealthCheckResponse *)msg;
    a->serving = m->status == GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING;
}

static void on_done(struct td_rpc_call *call, const struct td_rpc_result *res, void *user)
{
    (void)call;
    struct ask *a = user;
    pthread_mutex_lock(&a->lock);
    a->end_ns = td_now_ns();
    a->got_wall_ns = td_wall_ns();
    a->code = res->code;
    snprintf(a->details, sizeof a->details, "%s", res->details);
    td_make_printable(a->details);
    for (size_t i = 0; i < res->n_trailing; i++)
        if (!strcmp(res->trailing[i].key, TD_RPC_WALL_KEY))
            a->their_wall_ns = strtoull(res->trailing[i].value, NULL, 10);
    a->done = true;
    pthread_cond_signal(&a->cond);
    pthread_mutex_unlock(&a->lock);
}

static void ask_start(struct ask *a, struct td_rpc_channel *channel, uint64_t deadline_ms)
{
    static const struct td_rpc_client_method method = {
        "/grpc.health.v1.Health/Check", &grpc__health__v1__health_check_response__descriptor,
        false};
    static const struct td_rpc_handler handler = {on_health, on_done};
    Grpc__Health__V1__HealthCheckRequest m = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
    *a = (struct ask){.lock = PTHREAD_MUTEX_INITIALIZER,
                      .cond = PTHREAD_COND_INITIALIZER,
                      .start_ns = td_now_ns(),
                      .sent_wall_ns = td_wall_ns()};
    td_rpc_call_start(channel, &method, &m.base, deadline_ms, false, NULL, 0, &handler, a);
}

/* Bounded by the call's own deadline. */
static bool ask_wait(struct ask *a)
{
    pthread_mutex_lock(&a->lock);
    while (!a->done) pthread_cond_wait(&a->cond, &a->lock);
    pthread_mutex_unlock(&a->lock);
    return a->code == TD_CODE_OK;
}

struct doctor_skew doctor_skew_of(uint64_t sent_ns, uint64_t got_ns, uint64_t theirs_ns)
{
    double half = ((double)got_ns - (double)sent_ns) / 2;
    /* wall clocks may differ either way, by much less than 2^63 ns */
    int64_t since = (int64_t)(theirs_ns - sent_ns);
    return (struct doctor_skew){.skew_ms = ((double)since - half) / 1e6, .error_ms = half / 1e6};
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Round trips to a daemon that has answered; adds its lines. */
static void measure(struct cluster *k, struct target *t, const char *name)
{
    double trips[N_TRIPS];
    size_t n = 0;
    struct ask a;
    struct doctor_skew skew = {0};
    double least = 0;
    bool told = false;
    uint64_t until = td_deadline_after_ms(td_now_ns(), TRIPS_MS);
    while (n < N_TRIPS && td_now_ns() < until) {
        ask_start(&a, t->channel, k->o->timeout_ms);
        if (!ask_wait(&a)) break;
        trips[n] = (double)(a.end_ns - a.start_ns) / 1e6;
        if (a.their_wall_ns && (!told || trips[n] < least)) {
            told = true;
            least = trips[n];
            skew = doctor_skew_of(a.sent_wall_ns, a.got_wall_ns, a.their_wall_ns);
        }
        n++;
    }
    if (n == 0) {
        struct doctor_check *c = doctor_add(k->r, GROUP, DOCTOR_WARN, name,
                                            "answered once, then no more: %s", a.details);
        doctor_fix(c, "look at its log; an overloaded or frozen process");
        return;
    }
    qsort(trips, n, sizeof *trips, by_value);
    struct doctor_check *c = doctor_add(k->r, GROUP, t->ask.serving ? DOCTOR_OK : DOCTOR_FAIL, name,
                                        "%s at %s; round trip %.2f ms median of %zu, %.2f..%.2f",
                                        t->ask.serving ? "serving" : "NOT serving", t->address,
                                        trips[n / 2], n, trips[0], trips[n - 1]);
    doctor_fix(c, "it is draining, or its engine makes no progress: look at its log "
                  "(engine_stuck), `tandem status`");
    doctor_number(c, "rtt_ms", trips[n / 2]);
    char clock[160];
    snprintf(clock, sizeof clock, "%s clock", name);
    if (!told) {
        doctor_add(k->r, GROUP, DOCTOR_OK, clock, "not told: a build that does not say its time");
        return;
    }
    double sure = (skew.skew_ms < 0 ? -skew.skew_ms : skew.skew_ms) - skew.error_ms;
    c = doctor_add(k->r, GROUP, sure > SKEW_MS ? DOCTOR_WARN : DOCTOR_OK, clock,
                   "%+.2f ms from here, to within %.2f", skew.skew_ms, skew.error_ms);
    doctor_fix(c, "run chrony, ntpd or systemd-timesyncd on both hosts: logs cannot be put in "
                  "order; beyond minutes TLS certificates look expired");
    doctor_number(c, "skew_ms", skew.skew_ms);
    doctor_number(c, "skew_error_ms", skew.error_ms);
}

static bool dial(struct cluster *k, struct target *t, struct td_err *err)
{
    struct td_rpc_channel_config c = {
        .loop = k->loop, .target = t->address, .tls = k->o->at.tls_ca[0] ? &k->tls : NULL};
    return td_rpc_channel_create(&c, &t->channel, err) == TD_OK;
}

static void take_status(const ProtobufCMessage *msg, void *ctx)
{
    struct cluster *k = ctx;
    const Tandem__V1__StatusResponse *s = (const Tandem__V1__StatusResponse *)msg;
    k->withheld = s->withheld;
    snprintf(k->mode, sizeof k->mode, "%s", s->mode);
    k->models = calloc(s->n_models ? s->n_models : 1, sizeof *k->models);
    k->workers = calloc(s->n_workers ? s->n_workers : 1, sizeof *k->workers);
    if (!k->workers || !k->models) return;
    k->n_models = s->n_models ? s->n_models : 1; /* an older router tells of one alone */
    for (size_t i = 0; i < k->n_models; i++)
        snprintf(k->models[i], sizeof *k->models, "%s",
                 s->n_models ? s->models[i]->name : s->model);
    k->n_workers = s->n_workers;
    for (size_t i = 0; i < s->n_workers; i++) {
        const Tandem__V1__WorkerStatus *w = s->workers[i];
        struct target *t = &k->workers[i];
        snprintf(t->name, sizeof t->name, "%s", w->name);
        snprintf(t->role, sizeof t->role, "%s", w->role);
        snprintf(t->state, sizeof t->state, "%s", w->state);
        snprintf(t->address, sizeof t->address, "%s", w->address);
        snprintf(t->version, sizeof t->version, "%s", w->version);
        for (size_t m = 0; m < k->n_models; m++)
            if (!strcmp(w->model, k->models[m])) t->model = m;
        t->layout_hash = w->layout_hash;
        t->block_size = w->block_size;
        t->kv_blocks = w->kv_blocks;
    }
}

static bool check_router(struct cluster *k)
{
    struct td_err err = {0};
    struct target *t = &k->router;
    snprintf(t->address, sizeof t->address, "%s", k->o->at.server);
    if (!dial(k, t, &err)) {
        struct doctor_check *c =
            doctor_add(k->r, GROUP, DOCTOR_FAIL, "router", "%s: %s", t->address, err.msg);
        doctor_fix(c, "--router HOST:PORT, --tls-ca, --tls-cert, --tls-key");
        return false;
    }
    ask_start(&t->ask, t->channel, k->o->timeout_ms);
    if (!ask_wait(&t->ask)) {
        struct doctor_check *c = doctor_add(k->r, GROUP, DOCTOR_FAIL, "router", "%s: %s: %s",
                                            t->address, code_name(t->ask.code), t->ask.details);
        doctor_fix(c, "is it running (tandem-router's log: ev=ready), is the address right, does a "
                      "firewall drop it; TLS on both sides or neither "
                      "(--tls-ca, and --tls-cert, --tls-key where it wants to know its clients)");
        return false;
    }
    measure(k, t, "router");
    struct cli_client client = {.loop = k->loop, .channel = t->channel};
    struct cli_result res = {0};
    if (!cli_status_call(&client, &k->o->at, k->o->timeout_ms, false, take_status, k, &res, &err)) {
        struct doctor_check *c =
            doctor_add(k->r, GROUP, DOCTOR_FAIL, "router status", "%s", err.msg);
        doctor_fix(c, "the file of the cluster's secret, as the daemons have it");
        return false;
    }
    if (res.code == TD_CODE_OK && k->withheld) {
        struct doctor_check *c =
            doctor_add(k->r, GROUP, DOCTOR_FAIL, "router status",
                       "%s does not tell this caller where its workers are", t->address);
        doctor_fix(c, "--cluster-secret-file with the cluster's secret, or a certificate with a "
                      "name of the router's --tls-operator-names");
        return false;
    }
    if (res.code == TD_CODE_OK) return true;
    struct doctor_check *c = doctor_add(k->r, GROUP, DOCTOR_FAIL, "router status", "%s: %s",
                                        code_name(res.code), res.details);
    doctor_fix(c, "is %s a tandem router, and of this version?", t->address);
    return false;
}

static void check_workers(struct cluster *k)
{
    struct td_err err = {0};
    for (size_t i = 0; i < k->n_workers; i++)
        if (dial(k, &k->workers[i], &err))
            ask_start(&k->workers[i].ask, k->workers[i].channel, k->o->timeout_ms);
    for (size_t i = 0; i < k->n_workers; i++) {
        struct target *t = &k->workers[i];
        char name[160];
        snprintf(name, sizeof name, "%s", t->name);
        t->answers = t->channel && ask_wait(&t->ask);
        if (!t->answers) {
            struct doctor_check *c =
                doctor_add(k->r, GROUP, DOCTOR_FAIL, name,
                           "%s worker at %s (%s to the router): %s: %s", t->role, t->address,
                           t->state, t->channel ? code_name(t->ask.code) : "cannot be dialled",
                           t->channel ? t->ask.details : err.msg);
            doctor_fix(c, "workers dial the router, but the router and this command dial them: "
                          "--advertise must name an address that others reach; "
                          "firewall; with TLS the same CA");
            continue;
        }
        measure(k, t, name);
        if (strcmp(t->state, "ready")) {
            struct doctor_check *c =
                doctor_add(k->r, GROUP, DOCTOR_WARN, name, "the router holds it for %s", t->state);
            doctor_fix(c,
                       !strcmp(t->state, "suspect")
                           ? "it answers here, but sends the router no snapshots: look at its log"
                           : "it takes no new requests");
        }
    }
}

static void check_versions(struct cluster *k)
{
    char odd[400] = "";
    for (size_t i = 0; i < k->n_workers; i++) {
        const struct target *t = &k->workers[i];
        size_t n = strlen(odd);
        if (strcmp(t->version, TD_VERSION))
            snprintf(odd + n, sizeof odd - n, "%s%s %s", n ? ", " : "", t->name,
                     t->version[0] ? t->version : "?");
    }
    struct doctor_check *c;
    if (odd[0])
        c = doctor_add(k->r, GROUP, DOCTOR_WARN, "versions", "this command is %s, but %s",
                       TD_VERSION, odd);
    else
        c = doctor_add(k->r, GROUP, DOCTOR_OK, "versions",
                       "all %zu workers are %s, as this command", k->n_workers, TD_VERSION);
    doctor_fix(c, "finish the roll-out: one version in a cluster");
}

/* The name of a check that is made for each model, where there are several. */
static const char *name_of_check(const struct cluster *k, const char *what, size_t model,
                                 char name[64])
{
    if (k->n_models == 1)
        snprintf(name, 64, "%s", what);
    else
        snprintf(name, 64, "%s of %.40s", what, k->models[model]);
    return name;
}

/* Of one model. Workers join only with the layout of those that have joined, so a difference means
 * a router of another version, or a bug. */
static void check_layout(struct cluster *k, size_t model)
{
    const struct target *a = NULL;
    char odd[400] = "", name[64];
    for (size_t i = 0; i < k->n_workers; i++) {
        const struct target *t = &k->workers[i];
        size_t n = strlen(odd);
        if (t->model != model) continue;
        if (!a) a = t;
        if (t->layout_hash != a->layout_hash || t->block_size != a->block_size)
            snprintf(odd + n, sizeof odd - n, "%s%s", n ? ", " : "", t->name);
    }
    if (!a) return;
    name_of_check(k, "KV layout", model, name);
    struct doctor_check *c;
    if (odd[0])
        c = doctor_add(k->r, GROUP, DOCTOR_FAIL, name, "differs from %s's %016" PRIx64 ": %s",
                       a->name, a->layout_hash, odd);
    else
        c = doctor_add(k->r, GROUP, DOCTOR_OK, name,
                       "%016" PRIx64 ", %u tokens a block, the same on all", a->layout_hash,
                       a->block_size);
    doctor_fix(
        c,
        "model files, --dtype, --kv-dtype, --block-size and instruction set (--ops) must agree in "
        "one cluster");
}

/* Whether a model has the workers that the mode needs. */
static void check_roles(struct cluster *k, size_t model)
{
    size_t n_prefill = 0, n_decode = 0;
    char name[64];
    for (size_t i = 0; i < k->n_workers; i++) {
        if (k->workers[i].model != model) continue;
        if (!strcmp(k->workers[i].role, "decode"))
            n_decode++;
        else
            n_prefill++;
    }
    bool needs_prefill = !strcmp(k->mode, "pd");
    struct doctor_check *c = doctor_add(
        k->r, GROUP, n_decode == 0 || (needs_prefill && n_prefill == 0) ? DOCTOR_FAIL : DOCTOR_OK,
        name_of_check(k, "roles", model, name), "%zu prefill, %zu decode, mode %s, model %s",
        n_prefill, n_decode, k->mode, k->models[model]);
    if (k->n_models == 1)
        doctor_fix(c, "start %s workers with --router %s", n_decode == 0 ? "decode" : "prefill",
                   k->o->at.server);
    else
        doctor_fix(c, "start %s workers with --router %s --served-model-name %s",
                   n_decode == 0 ? "decode" : "prefill", k->o->at.server, k->models[model]);
}

static size_t host_bytes(const char *address)
{
    const char *colon = strrchr(address, ':');
    return colon ? (size_t)(colon - address) : strlen(address);
}

static void check_pairs(struct cluster *k)
{
    size_t n_shm = 0, n_net = 0;
    char example[300] = "";
    for (size_t p = 0; p < k->n_workers; p++)
        for (size_t d = 0; d < k->n_workers; d++) {
            const struct target *a = &k->workers[p], *b = &k->workers[d];
            if (!strcmp(a->role, "decode") || strcmp(b->role, "decode")) continue;
            if (a->model != b->model) continue;
            size_t n = host_bytes(a->address);
            bool same = n == host_bytes(b->address) && !memcmp(a->address, b->address, n);
            if (same)
                n_shm++;
            else
                n_net++;
            if (!same && !example[0])
                snprintf(example, sizeof example, " (%.120s to %.120s, ...)", a->name, b->name);
        }
    if (n_shm + n_net == 0) return;
    struct doctor_check *c = doctor_add(
        k->r, GROUP, DOCTOR_OK, "kv paths",
        "by address: %zu pair%s on one host (shm unless --transfer says otherwise), %zu "
        "between hosts (%s)%s",
        n_shm, n_shm == 1 ? "" : "s", n_net, "rdma where both have it, else tcp", example);
    doctor_number(c, "same_host_pairs", (double)n_shm);
    doctor_number(c, "cross_host_pairs", (double)n_net);
}

void doctor_cluster(struct doctor_report *r, const struct doctor_config *o)
{
    struct cluster k = {.r = r, .o = o};
    struct td_err err = {0};
    k.tls = cli_tls(&o->at);
    if (td_rpc_loop_create("doctor", &k.loop, &err)) {
        doctor_add(r, GROUP, DOCTOR_FAIL, "grpc", "%s", err.msg);
        return;
    }
    if (check_router(&k)) {
        if (k.n_workers > 0) {
            check_workers(&k);
            check_versions(&k);
        }
        for (size_t i = 0; i < k.n_models; i++) {
            check_layout(&k, i);
            check_roles(&k, i);
        }
        check_pairs(&k);
    }
    if (k.router.channel) td_rpc_channel_destroy(k.router.channel);
    for (size_t i = 0; i < k.n_workers; i++)
        if (k.workers[i].channel) td_rpc_channel_destroy(k.workers[i].channel);
    td_rpc_loop_destroy(k.loop);
    free(k.workers);
    free(k.models);
}
