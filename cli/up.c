/* up.c - `tandem up`: starts a local cluster of real processes. Ctrl-C (or SIGTERM) drains workers,
 * then the router, and exits 0.
 *
 * Each child has its own process group (so that we pass on one Ctrl-C) and dies with us
 * (PR_SET_PDEATHSIG), so a killed `up` leaves no process behind. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <netdb.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli/cli.h"
#include "cli/terminal.h"
#include "common/base/address.h"
#include "common/base/clock.h"
#include "common/base/cluster_secret.h"
#include "common/base/entropy.h"
#include "common/base/say.h"
#include "common/base/signals.h"
#include "common/base/thread_pool.h"
#include "common/model/checkpoint.h"
#include "common/model/config.h"
#include "common/model/mix.h"
#include "router/core/core.h"
#include "router/model_names.h"

#define MAX_ROUTERS 8 /* as many as a worker joins */
#define MAX_CHILDREN 137
#define MAX_WORKERS (MAX_CHILDREN - 1 - MAX_ROUTERS) /* beside the routers and the cleaner */
#define MAX_ARGS 80

struct up_config {
    const char *model, *random_weights, *listen, *http_listen, *mode, *policy, *dtype, *kv_dtype,
        *kv_memory, *transfer, *log_level, *log_dir, *decision_log, *ops, *cpus, *device,
        *cluster_secret_file, *tenants, *metrics_listen, *tls_cert, *tls_key, *tls_ca,
        *tls_server_name, *http_cors_origins;
    int64_t routers, prefill, decode, threads, block_size, max_step_tokens, max_batch, max_seqs,
        max_model_len;
    int64_t prefill_tp, decode_tp;
    uint64_t start_timeout_ms, drain_timeout_ms;
    bool prefix_cache, deterministic;
};

#define OFF(f) offsetof(struct up_config, f)
// clang-format off
static const struct td_option options[] = {
    {"model", TD_OPT_LIST, NULL, 0, 0, NULL, OFF(model),
     "Hugging Face model directory or GGUF file, or NAME[,ALIAS...]=DIR; again for each further "
     "model"},
    {"random_weights", TD_OPT_STR, "", 0, 0, NULL, OFF(random_weights),
     "config.json: workers run with random weights (benchmarks)"},
    {"prefill", TD_OPT_I64, "1", 0, 64, NULL, OFF(prefill), "prefill workers of each model"},
    {"decode", TD_OPT_I64, "1", 1, 64, NULL, OFF(decode), "decode workers of each model"},
    {"prefill_tp", TD_OPT_I64, "1", 1, 16, NULL, OFF(prefill_tp),
     "processes of each prefill worker that share the model"},
    {"decode_tp", TD_OPT_I64, "1", 1, 16, NULL, OFF(decode_tp),
     "processes of each decode worker that share the model"},
    {"listen", TD_OPT_STR, "127.0.0.1:7600", 0, 0, NULL, OFF(listen), "router's address"},
    {"routers", TD_OPT_I64, "1", 1, MAX_ROUTERS, NULL, OFF(routers),
     "routers over all workers, at the ports from listen's (and http_listen's) on; their decision "
     "logs are FILE, FILE.1 ..."},
    {"http_listen", TD_OPT_STR, "", 0, 0, NULL, OFF(http_listen),
     "host:port of the router's OpenAI-compatible HTTP API; empty = off"},
    {"http_cors_origins", TD_OPT_STR, "", 0, 0, NULL, OFF(http_cors_origins),
     "origins whose pages may call the HTTP API from a browser, such as \"https://a.example\"; "
     "\"*\" = any; empty = none"},
    {"metrics_listen", TD_OPT_STR, "", 0, 0, NULL, OFF(metrics_listen),
     "host:port of Prometheus metrics and probes: the first router's; further routers, then the "
     "workers, have the ports after it; empty = off"},
    {"tls_cert", TD_OPT_STR, "", 0, 0, NULL, OFF(tls_cert),
     "certificate chain (PEM) of all daemons; with tls_key and tls_ca turns TLS on, at all ports"},
    {"tls_key", TD_OPT_STR, "", 0, 0, NULL, OFF(tls_key), "its private key (PEM)"},
    {"tls_ca", TD_OPT_STR, "", 0, 0, NULL, OFF(tls_ca),
     "CA whose certificates daemons and clients must show"},
    {"tls_server_name", TD_OPT_STR, "", 0, 0, NULL, OFF(tls_server_name),
     "name that the certificate holds, where it does not hold the addresses that are dialled"},
    {"tenants", TD_OPT_STR, "", 0, 0, NULL, OFF(tenants),
     "JSON file of API keys and tenants (docs/tenants.md); empty = whoever reaches the ports may "
     "ask"},
    TD_OPTION_ALIAS("api_keys", "tenants"),
    {"mode", TD_OPT_ENUM, "pd", 0, 0, "pd|colocated|hybrid", OFF(mode), "who prefills"},
    {"policy", TD_OPT_ENUM, "goodput", 0, 0, TD_CORE_POLICIES, OFF(policy), "router's policy"},
    {"policy", TD_OPT_ELSEWHERE, "", 0, 0, TD_CORE_POLICIES_ELSEWHERE, 0,
     "`tandem sim` has that one, to compare"},
    TD_OPTION_DECIDED("hybrid_local_tokens", "the router's policy decides which prompts stay on "
                                             "the decode worker"),
    {"dtype", TD_OPT_ENUM, "auto", 0, 0, "auto|f32|bf16|" TD_MIX_NAMES, OFF(dtype),
     "compute type; auto = the checkpoint's; q8_0 ... = bf16, weights rounded as they load"},
    {"kv_dtype", TD_OPT_ENUM, "auto", 0, 0, "auto|f32|bf16|int8|fp8", OFF(kv_dtype),
     "KV cache: auto = the compute type; int8, fp8: half of bf16's bytes"},
    {"ops", TD_OPT_STR, "", 0, 0, NULL, OFF(ops),
     "kernel table: ref, avx2, avxvnni, avx512, avx512bf16, amx, neon, neonbf16"},
    {"device", TD_OPT_ENUM, "cpu", 0, 0, "cpu|cuda", OFF(device),
     "where the workers' models and KV live: all of them on the one GPU, or the first so many "
     "(tp)"},
    TD_OPTION_DECIDED("device_index", "the first of the GPUs that CUDA_VISIBLE_DEVICES shows"),
    {"deterministic", TD_OPT_BOOL, "true", 0, 0, NULL, OFF(deterministic),
     "GPU: the same tokens whatever the batch; false may be faster"},
    {"threads", TD_OPT_I64, "1", 0, 1024, NULL, OFF(threads),
     "compute threads of each worker; 0 = all CPUs"},
    {"cpus", TD_OPT_STR, "", 0, 0, NULL, OFF(cpus),
     "pin compute threads: these CPUs, such as 0-3, are dealt out to the workers, --threads each"},
    {"kv_memory", TD_OPT_STR, "256MiB", 0, 0, NULL, OFF(kv_memory), "KV pool of each worker"},
    {"block_size", TD_OPT_I64, "16", 8, 256, NULL, OFF(block_size), "tokens per KV block"},
    {"max_step_tokens", TD_OPT_I64, "512", 1, 1 << 20, NULL, OFF(max_step_tokens),
     "rows per step: the prefill chunk"},
    {"max_batch", TD_OPT_I64, "64", 1, 4096, NULL, OFF(max_batch), "sequences in one step"},
    {"max_seqs", TD_OPT_I64, "256", 1, 65536, NULL, OFF(max_seqs),
     "requests each worker holds at once"},
    {"max_model_len", TD_OPT_I64, "0", 0, 16777216, NULL, OFF(max_model_len),
     "longest sequence; 0 = the model's"},
    {"prefix_cache", TD_OPT_BOOL, "true", 0, 0, NULL, OFF(prefix_cache),
     "keep finished blocks for equal prefixes"},
    {"transfer", TD_OPT_ENUM, "auto", 0, 0, "auto|tcp|shm|rdma|cuda-ipc", OFF(transfer), "KV path"},
    {"decision_log", TD_OPT_STR, "", 0, 0, NULL, OFF(decision_log),
     "file for the router's events and actions"},
    {"log_dir", TD_OPT_STR, "", 0, 0, NULL, OFF(log_dir),
     "write NAME.log files there instead of stderr"},
    {"log_level", TD_OPT_ENUM, "warn", 0, 0, "debug|info|warn|error", OFF(log_level),
     "least level logged"},
    {"cluster_secret_file", TD_OPT_STR, "", 0, 0, NULL, OFF(cluster_secret_file),
     "secret that the daemons prove to one another; empty = a new one for as long as this "
     "cluster runs"},
    {"start_timeout_ms", TD_OPT_U64, "120000", 1000, 3600000, NULL, OFF(start_timeout_ms),
     "longest wait for all workers to join"},
    {"drain_timeout_ms", TD_OPT_U64, "10000", 0, 3600000, NULL, OFF(drain_timeout_ms),
     "at the end: finish for so long"},
    {0},
};
// clang-format on

struct child {
    pid_t pid, first_pid; /* pid 0 = gone */
    char name[64];
    int status;
};

struct cluster {
    const struct up_config *cfg;
    struct router_model_spec models[ROUTER_MAX_MODELS];
    uint32_t n_models;
    char routers[MAX_ROUTERS][300]; /* their addresses */
    char bin_dir[PATH_MAX];
    struct child children[MAX_CHILDREN];
    int n;
    int faults
        [2]; /* a pipe by which children say what keeps them from starting; -1: their logs do */
    char told[8][512]; /* what they have said */
    int n_told;
    char secret_dir[PATH_MAX], secret_file[PATH_MAX + 16]; /* dir "": the file is the user's */
};

/* Arguments as "--flag" "value" pairs; numbers are formatted into store. */
struct args {
    char *argv[MAX_ARGS];
    char store[MAX_ARGS][64];
    int n, n_store;
};

static void arg_str(struct args *a, const char *flag, const char *value)
{
    if (!value[0]) return;
    a->argv[a->n++] = (char *)(uintptr_t)flag;
    a->argv[a->n++] = (char *)(uintptr_t)value;
}

static void arg_int(struct args *a, const char *flag, long long value)
{
    char *s = a->store[a->n_store++];
    snprintf(s, sizeof a->store[0], "%lld", value);
    arg_str(a, flag, s);
}

static td_status spawn(struct cluster *c, const char *program, const char *name, struct args *a,
                       struct td_err *err)
{
    char path[PATH_MAX + 64], log_path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", c->bin_dir, program);
    a->argv[0] = path;
    a->argv[a->n] = NULL;
    pid_t parent = getpid(), pid = fork();
    if (pid < 0) return td_fail(err, TD_ERR_IO, "fork: %s", strerror(errno));
    if (pid == 0) {
        sigset_t none;
        sigemptyset(&none);
        sigprocmask(SIG_SETMASK, &none, NULL);
        setpgid(0, 0);
        prctl(PR_SET_PDEATHSIG, SIGTERM);
        if (getppid() != parent) _exit(1);
        if (c->cfg->log_dir[0]) {
            snprintf(log_path, sizeof log_path, "%s/%s.log", c->cfg->log_dir, name);
            int fd = open(log_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
            if (fd >= 0) dup2(fd, STDERR_FILENO);
        }
        if (c->faults[1] >= 0) {
            char number[16];
            snprintf(number, sizeof number, "%d", c->faults[1]);
            fcntl(c->faults[1], F_SETFD, 0);
            setenv(TD_STARTER_VARIABLE, number, 1);
        }
        execv(path, a->argv);
        td_say(stderr, 2, "tandem up: cannot start %s: %s\n", path, strerror(errno));
        _exit(127);
    }
    struct child *ch = &c->children[c->n++];
    ch->pid = ch->first_pid = pid;
    snprintf(ch->name, sizeof ch->name, "%s", name);
    return TD_OK;
}

/* "host:port" at the i-th port from there. A unix socket has none. */
static td_status address_at(const char *field, const char *first, int64_t i, char *ret_address,
                            size_t bytes, struct td_err *err)
{
    const char *colon = strrchr(first, ':');
    unsigned long port = colon ? strtoul(colon + 1, NULL, 10) + (unsigned long)i : 0;
    if (i > 0 && (!strncmp(first, "unix:", 5) || !colon || port > 65535))
        return td_fail(err, TD_ERR_INVALID,
                       "%s is \"%.200s\", which gives router %lld no port: it must be host:port",
                       field, first, (long long)i);
    if (i == 0)
        snprintf(ret_address, bytes, "%s", first);
    else
        snprintf(ret_address, bytes, "%.*s:%lu", (int)(colon - first), first, port);
    return TD_OK;
}

/* What all daemons have: TLS, and metrics at the i-th port. */
static td_status common_args(const struct cluster *c, struct args *a, int64_t i, char metrics[300],
                             struct td_err *err)
{
    const struct up_config *g = c->cfg;
    td_status s = TD_OK;
    metrics[0] = 0;
    if (g->metrics_listen[0])
        s = address_at("metrics_listen", g->metrics_listen, i, metrics, 300, err);
    if (s) return s;
    arg_str(a, "--metrics-listen", metrics);
    arg_str(a, "--tls-cert", g->tls_cert);
    arg_str(a, "--tls-key", g->tls_key);
    arg_str(a, "--tls-ca", g->tls_ca);
    arg_str(a, "--tls-server-name", g->tls_server_name);
    return TD_OK;
}

static td_status spawn_router(struct cluster *c, int64_t i, struct td_err *err)
{
    const struct up_config *g = c->cfg;
    struct args a = {.n = 1};
    char http[300] = "", log[PATH_MAX] = "", name[64] = "router", metrics[300];
    td_status s = common_args(c, &a, i, metrics, err);
    if (!s && g->http_listen[0])
        s = address_at("http_listen", g->http_listen, i, http, sizeof http, err);
    if (s) return s;
    if (i > 0) snprintf(name, sizeof name, "router-%lld", (long long)i);
    if (g->decision_log[0] && i > 0)
        snprintf(log, sizeof log, "%.4000s.%lld", g->decision_log, (long long)i);
    else
        snprintf(log, sizeof log, "%.4000s", g->decision_log);
    arg_str(&a, "--model", g->model);
    arg_str(&a, "--listen", c->routers[i]);
    arg_str(&a, "--http-listen", http);
    arg_str(&a, "--http-cors-origins", g->http_cors_origins);
    if (g->tenants[0]) arg_str(&a, "--tenants", g->tenants);
    arg_str(&a, "--mode", g->mode);
    arg_str(&a, "--policy", g->policy);
    arg_str(&a, "--log-level", g->log_level);
    arg_str(&a, "--decision-log", log);
    arg_str(&a, "--cluster-secret-file", c->secret_file);
    arg_int(&a, "--drain-timeout-ms", (long long)g->drain_timeout_ms);
    return spawn(c, "tandem-router", name, &a, err);
}

static td_status spawn_routers(struct cluster *c, struct td_err *err)
{
    td_status s = TD_OK;
    for (int64_t i = 0; i < c->cfg->routers && !s; i++) s = spawn_router(c, i, err);
    return s;
}

/* All routers' addresses, with commas. */
static const char *router_list(const struct cluster *c, char *text, size_t bytes)
{
    size_t n = 0;
    text[0] = 0;
    for (int64_t i = 0; i < c->cfg->routers && n < bytes; i++)
        n += (size_t)snprintf(text + n, bytes - n, "%s%s", i ? "," : "", c->routers[i]);
    return text;
}

/* The CPUs of worker i: `threads` CPUs of the list, after those of the workers before it. */
static td_status worker_cpus(const struct up_config *g, int64_t n_models, int64_t i, char *text,
                             size_t text_bytes, struct td_err *err)
{
    int cpus[1024], n = 0;
    text[0] = 0;
    if (!g->cpus[0]) return TD_OK;
    td_status s = td_parse_cpu_list(g->cpus, cpus, 1024, &n, err);
    if (!s) s = td_check_cpu_list(cpus, n, err);
    if (s) return td_err_prefix(err, "cpus");
    int64_t n_workers = n_models * (g->prefill + g->decode);
    if (g->threads == 0 || n < n_workers * g->threads)
        return td_fail(err, TD_ERR_INVALID,
                       "cpus lists %d CPUs, must be at least %lld workers times %lld threads (and "
                       "threads > 0)",
                       n, (long long)n_workers, (long long)g->threads);
    size_t used = 0;
    for (int64_t k = 0; k < g->threads && used < text_bytes; k++)
        used += (size_t)snprintf(text + used, text_bytes - used, "%s%d", k ? "," : "",
                                 cpus[i * g->threads + k]);
    return used < text_bytes
               ? TD_OK
               : td_fail(err, TD_ERR_LIMIT, "cpus: %lld CPUs of one worker are too many to name",
                         (long long)g->threads);
}

/* The i-th of that role among the workers of all models. */
static td_status spawn_worker(struct cluster *c, const struct router_model_spec *model,
                              const char *role, int64_t i, struct td_err *err)
{
    const struct up_config *g = c->cfg;
    char program[64], name[64], cpus[4096], routers[MAX_ROUTERS * 300], metrics[300];
    /* the first children are the routers */
    td_status s = worker_cpus(g, c->n_models, c->n - g->routers, cpus, sizeof cpus, err);
    if (s) return s;
    snprintf(program, sizeof program, "tandem-%s", role);
    snprintf(name, sizeof name, "%s-%lld", role, (long long)i);
    struct args a = {.n = 1};
    s = common_args(c, &a, c->n, metrics, err);
    if (s) return s;
    arg_str(&a, "--name", name);
    arg_int(&a, "--tp", !strcmp(role, "prefill") ? g->prefill_tp : g->decode_tp);
    if (g->random_weights[0])
        arg_str(&a, "--random-weights", g->random_weights);
    else
        arg_str(&a, "--model", model->dir);
    if (model->names.n) arg_str(&a, "--served-model-name", model->names.names[0]);
    arg_str(&a, "--router", router_list(c, routers, sizeof routers));
    arg_str(&a, "--cluster-secret-file", c->secret_file);
    arg_str(&a, "--dtype", g->dtype);
    arg_str(&a, "--kv-dtype", g->kv_dtype);
    arg_str(&a, "--ops", g->ops);
    if (strcmp(g->device, "cpu") != 0) {
        arg_str(&a, "--device", g->device);
        a.argv[a.n++] = (char *)(uintptr_t)(g->deterministic ? "--deterministic=true"
                                                             : "--deterministic=false");
    }
    arg_str(&a, "--cpus", cpus);
    arg_str(&a, "--kv-memory", g->kv_memory);
    arg_str(&a, "--transfer", g->transfer);
    arg_str(&a, "--log-level", g->log_level);
    a.argv[a.n++] =
        (char *)(uintptr_t)(g->prefix_cache ? "--prefix-cache=true" : "--prefix-cache=false");
    arg_int(&a, "--threads", g->threads);
    arg_int(&a, "--block-size", g->block_size);
    arg_int(&a, "--max-step-tokens", g->max_step_tokens);
    arg_int(&a, "--max-batch", g->max_batch);
    arg_int(&a, "--max-seqs", g->max_seqs);
    arg_int(&a, "--max-model-len", g->max_model_len);
    arg_int(&a, "--drain-timeout-ms", (long long)g->drain_timeout_ms);
    return spawn(c, program, name, &a, err);
}

static td_status spawn_workers(struct cluster *c, struct td_err *err)
{
    const struct up_config *g = c->cfg;
    td_status s = TD_OK;
    for (uint32_t m = 0; m < c->n_models; m++) {
        for (int64_t i = 0; !s && i < g->prefill; i++)
            s = spawn_worker(c, &c->models[m], "prefill", m * g->prefill + i, err);
        for (int64_t i = 0; !s && i < g->decode; i++)
            s = spawn_worker(c, &c->models[m], "decode", m * g->decode + i, err);
    }
    return s;
}

/* What each daemon would say of a model that cannot be read is said once, before they start. */
static td_status check_model(const struct up_config *g, const char *dir, struct td_err *err)
{
    struct td_model_config config;
    struct td_checkpoint weights = {0};
    td_status s = td_model_config_load(dir, &config, err);
    if (!s && !g->random_weights[0]) s = td_checkpoint_open(dir, &weights, err);
    td_checkpoint_close(&weights);
    return s;
}

static td_status read_models(struct cluster *c, struct td_err *err)
{
    const struct up_config *g = c->cfg;
    td_status s = router_model_specs_parse(g->model, "", c->models, &c->n_models, err);
    if (s) return s;
    int64_t n = c->n_models * (g->prefill + g->decode);
    if (c->n_models == 0) return td_fail(err, TD_ERR_INVALID, "model is empty: give --model DIR");
    if (c->n_models > 1 && g->random_weights[0])
        return td_fail(err, TD_ERR_INVALID,
                       "random_weights is given and there are %u models: it takes one",
                       c->n_models);
    if (n > MAX_WORKERS)
        return td_fail(err, TD_ERR_LIMIT,
                       "%u models of %lld prefill and %lld decode workers are %lld workers, limit "
                       "%d",
                       c->n_models, (long long)g->prefill, (long long)g->decode, (long long)n,
                       MAX_WORKERS);
    if ((g->tls_cert[0] || g->tls_key[0] || g->tls_ca[0]) &&
        !(g->tls_cert[0] && g->tls_key[0] && g->tls_ca[0]))
        return td_fail(
            err, TD_ERR_INVALID,
            "tls_cert, tls_key and tls_ca are not all given: the daemons show one another "
            "certificates, so it takes all three or none");
    for (uint32_t i = 0; !s && i < c->n_models; i++) s = check_model(g, c->models[i].dir, err);
    return s;
}

/* Checks the router's port early. If somebody else listened there, our router would fail and our
 * workers would join a stranger's; port 0 would be known to nobody. The bind here is only a test
 * and is undone at once; the router still reports exactly what it cannot have. */
static td_status check_listen(const char *listen, struct td_err *err)
{
    if (!strncmp(listen, "unix:", 5)) return TD_OK;
    struct addrinfo *ai = NULL;
    td_status s = td_address_resolve("listen", listen, true, &ai, err);
    if (s) return s;
    if (strtoul(strrchr(listen, ':') + 1, NULL, 10) == 0) {
        freeaddrinfo(ai);
        return td_fail(err, TD_ERR_INVALID,
                       "listen is \"%s\", must be host:port with a port above 0: workers and "
                       "clients must know it",
                       listen);
    }
    int one = 1, fd = socket(ai->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0) {
        /* as for the router's listener, so that old connections in TIME_WAIT do not matter */
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        if (bind(fd, ai->ai_addr, ai->ai_addrlen))
            s = td_fail(err, TD_ERR_IO, "listen \"%s\": %s; choose another with --listen", listen,
                        strerror(errno));
        close(fd);
    }
    freeaddrinfo(ai);
    return s;
}

/* Makes a secret that only this user's processes can read, in a folder of its own, so that no other
 * user of this host can join as a worker or a router. */
static td_status make_secret(struct cluster *c, struct td_err *err)
{
    const char *tmp = getenv("TMPDIR");
    char text[2 * TD_CLUSTER_NONCE_BYTES + 2];
    uint8_t random[TD_CLUSTER_NONCE_BYTES];
    if (c->cfg->cluster_secret_file[0]) {
        struct td_cluster_secret *given = NULL;
        td_status s = td_cluster_secret_load(c->cfg->cluster_secret_file, &given, err);
        td_cluster_secret_destroy(given);
        snprintf(c->secret_file, sizeof c->secret_file, "%s", c->cfg->cluster_secret_file);
        return s ? td_err_prefix(err, "cluster_secret_file") : TD_OK;
    }
    int n = snprintf(c->secret_dir, sizeof c->secret_dir, "%s/tandem-up-XXXXXX",
                     tmp && tmp[0] ? tmp : "/tmp");
    if ((size_t)n >= sizeof c->secret_dir || !mkdtemp(c->secret_dir)) {
        td_status s = td_fail(err, TD_ERR_IO, "no folder for the cluster's secret: %s: %s (TMPDIR)",
                              c->secret_dir, strerror(errno));
        c->secret_dir[0] = 0;
        return s;
    }
    snprintf(c->secret_file, sizeof c->secret_file, "%s/secret", c->secret_dir);
    td_random_fill(random, sizeof random);
    for (size_t i = 0; i < sizeof random; i++) snprintf(text + 2 * i, 4, "%02x\n", random[i]);
    int fd = open(c->secret_file, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    bool written = fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text);
    if (fd >= 0 && close(fd)) written = false;
    return written ? TD_OK : td_fail(err, TD_ERR_IO, "%s: %s", c->secret_file, strerror(errno));
}

/* Starts a process that only waits for our end, however it comes, and then removes the secret. Its
 * signals are blocked as ours are; it is not our child, and in no group that a terminal's Ctrl-C
 * reaches. */
static td_status start_cleaner(struct cluster *c, struct td_err *err)
{
    int ends[2];
    char byte;
    if (!c->secret_dir[0]) return TD_OK;
    if (pipe2(ends, O_CLOEXEC)) return td_fail(err, TD_ERR_IO, "pipe: %s", strerror(errno));
    pid_t pid = fork();
    if (pid < 0) return td_fail(err, TD_ERR_IO, "fork: %s", strerror(errno));
    if (pid == 0) {
        setsid();
        close(ends[1]);
        if (fork() != 0) _exit(0);
        while (read(ends[0], &byte, 1) < 0 && errno == EINTR) {
        }
        unlink(c->secret_file);
        rmdir(c->secret_dir);
        _exit(0);
    }
    waitpid(pid, NULL, 0);
    close(ends[0]); /* our exit, however it comes, closes the other end */
    return TD_OK;
}

static void remove_secret(struct cluster *c)
{
    if (!c->secret_dir[0]) return;
    unlink(c->secret_file);
    rmdir(c->secret_dir);
}

static td_status make_fault_pipe(struct cluster *c, struct td_err *err)
{
    c->faults[0] = c->faults[1] = -1;
    if (c->cfg->log_dir[0]) return TD_OK;
    if (pipe2(c->faults, O_CLOEXEC)) return td_fail(err, TD_ERR_IO, "pipe: %s", strerror(errno));
    fcntl(c->faults[0], F_SETFL, O_NONBLOCK);
    return TD_OK;
}

/* Reaps what ended; returns the first child that ended, or NULL. */
static struct child *reap(struct cluster *c)
{
    for (int i = 0; i < c->n; i++) {
        struct child *ch = &c->children[i];
        if (ch->pid && waitpid(ch->pid, &ch->status, WNOHANG) == ch->pid) {
            ch->pid = 0;
            return ch;
        }
    }
    return NULL;
}

/* The first child that says it is named. Workers of one kind say the same: it is told once. */
static void tell_fault(struct cluster *c, long pid, const char *text)
{
    const char *name = "a daemon"; /* one rank of a worker, say */
    for (int i = 0; i < c->n_told; i++)
        if (!strcmp(c->told[i], text)) return;
    for (int i = 0; i < c->n; i++)
        if (c->children[i].first_pid == pid) name = c->children[i].name;
    td_say(stderr, 2, "tandem up: error: %s: %s\n", name, text);
    if (c->n_told < (int)(sizeof c->told / sizeof *c->told))
        snprintf(c->told[c->n_told++], sizeof *c->told, "%s", text);
}

/* Tells what children have said since the last time: lines of "PID MSG". */
static void tell_faults(struct cluster *c)
{
    char lines[4096];
    ssize_t n = c->faults[0] >= 0 ? read(c->faults[0], lines, sizeof lines - 1) : 0;
    if (n <= 0) return;
    lines[n] = 0;
    char *rest = NULL;
    for (char *line = strtok_r(lines, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        char *text = NULL;
        long pid = strtol(line, &text, 10);
        if (text != line && *text == ' ') tell_fault(c, pid, text + 1);
    }
}

/* What it said before it ended, or else how it ended. */
static void describe_end(struct cluster *c, const struct child *ch)
{
    int n = c->n_told;
    tell_faults(c);
    if (WIFSIGNALED(ch->status))
        td_say(stderr, 2, "tandem up: %s was killed by signal %d\n", ch->name,
               WTERMSIG(ch->status));
    else if (c->n_told == n)
        td_say(stderr, 2, "tandem up: %s ended with status %d%s%s%s%s\n", ch->name,
               WEXITSTATUS(ch->status), c->cfg->log_dir[0] ? ", see " : "", c->cfg->log_dir,
               c->cfg->log_dir[0] ? "/" : "", c->cfg->log_dir[0] ? ch->name : "");
}

/* Of one worker, for what no further try mends: it will not be taken. */
enum { MAX_REFUSALS = 3 };

struct joined {
    const struct cluster *cluster;
    size_t have;
    char refused[400]; /* a child that is refused for good, and why; "" = none */
};

static bool is_child(const struct cluster *c, uint32_t pid)
{
    for (int k = 0; k < c->n; k++)
        if (c->children[k].pid > 0 && pid == (uint32_t)c->children[k].pid) return true;
    return false;
}

/* Counts our own children among the router's workers. */
static void on_status(const ProtobufCMessage *msg, void *ctx)
{
    struct joined *j = ctx;
    const Tandem__V1__StatusResponse *m = (const Tandem__V1__StatusResponse *)msg;
    j->have = 0;
    for (size_t i = 0; i < m->n_workers; i++) j->have += is_child(j->cluster, m->workers[i]->pid);
    for (size_t i = 0; i < m->n_refused_workers; i++) {
        const Tandem__V1__RefusedWorker *w = m->refused_workers[i];
        /* Who has not proved the secret that our children have may say any of their pids. */
        if (w->proved && w->times_for_good >= MAX_REFUSALS && is_child(j->cluster, w->pid))
            snprintf(j->refused, sizeof j->refused, "%s: %s", w->name, w->reason);
    }
}

/* True when the router answers and `want` workers have joined; false on a signal, a dead child or
 * the deadline (told to the user). */
static bool wait_joined_at(struct cluster *c, const char *router, size_t want, uint64_t deadline)
{
    const struct up_config *g = c->cfg;
    struct cli_server at = {router,         g->tls_ca, g->tls_cert, g->tls_key, g->tls_server_name,
                            c->secret_file, ""};
    struct cli_client client;
    struct td_err err = {0};
    struct joined joined = {.cluster = c};
    if (cli_client_open(&client, &at, &err)) {
        td_die("tandem up", &err);
        return false;
    }
    bool ok = false;
    for (;;) {
        struct cli_result res = {0};
        if (!cli_status_call(&client, &at, 500, true, on_status, &joined, &res, &err)) {
            td_die("tandem up", &err);
            break;
        }
        if (res.code == TD_CODE_OK && joined.have >= want) {
            ok = true;
            break;
        }
        struct child *dead = reap(c);
        if (dead) {
            describe_end(c, dead);
            break;
        }
        if (joined.refused[0]) {
            td_say(stderr, 2, "tandem up: the router refuses %s\n", joined.refused);
            break;
        }
        /* the router says no, and will say it again */
        if (res.code == TD_CODE_UNAUTHENTICATED || res.code == TD_CODE_PERMISSION_DENIED) {
            td_say(stderr, 2, "tandem up: %s: %s: %s\n", router, cli_code_name(res.code),
                   res.details);
            break;
        }
        if (td_now_ns() > deadline) {
            td_say(stderr, 2,
                   "tandem up: %zu of %zu workers joined within %llu ms; see --log-level info\n",
                   joined.have, want, (unsigned long long)g->start_timeout_ms);
            break;
        }
        if (td_stop_signal_wait(20)) break;
    }
    cli_client_close(&client);
    return ok;
}

static bool wait_joined(struct cluster *c, size_t want, uint64_t deadline)
{
    for (int64_t i = 0; i < c->cfg->routers; i++)
        if (!wait_joined_at(c, c->routers[i], want, deadline)) return false;
    return true;
}

/* Workers start when the routers answer: until then they could only warn that nobody does. False:
 * told. */
static bool start(struct cluster *c, struct td_err *err)
{
    uint64_t deadline = td_deadline_after_ms(td_now_ns(), c->cfg->start_timeout_ms);
    size_t want = c->n_models * (size_t)(c->cfg->prefill + c->cfg->decode);
    td_status s = make_secret(c, err);
    if (!s) s = start_cleaner(c, err);
    if (!s) s = make_fault_pipe(c, err);
    if (!s) s = spawn_routers(c, err);
    if (!s && !wait_joined(c, 0, deadline)) return false;
    if (!s) s = spawn_workers(c, err);
    if (s) td_die("tandem up", err);
    return !s && wait_joined(c, want, deadline);
}

/* Sends SIGTERM to children [first, last), waits, then sends SIGKILL to those that have not
 * ended. is_told: why the cluster does not come up. */
static bool stop_children(struct cluster *c, int first, int last, bool is_told)
{
    for (int i = first; i < last; i++)
        if (c->children[i].pid) kill(c->children[i].pid, SIGTERM);
    uint64_t deadline = td_deadline_after_ms(td_now_ns(), c->cfg->drain_timeout_ms + 10000);
    bool clean = true;
    for (;;) {
        int left = 0;
        for (int i = first; i < last; i++) {
            struct child *ch = &c->children[i];
            if (!ch->pid) continue;
            if (waitpid(ch->pid, &ch->status, WNOHANG) != ch->pid) {
                left++;
                continue;
            }
            ch->pid = 0;
            /* our signal reached it before it had anything to drain */
            bool starting = WIFSIGNALED(ch->status) && WTERMSIG(ch->status) == SIGTERM;
            if (!starting && (!WIFEXITED(ch->status) || WEXITSTATUS(ch->status) != 0)) {
                /* what kept the first from starting kept this one, too */
                if (!is_told || WIFSIGNALED(ch->status)) describe_end(c, ch);
                clean = false;
            }
        }
        if (!left) return clean;
        bool is_told_twice = td_stop_signal_wait(10);
        if (is_told_twice || td_now_ns() > deadline)
            for (int i = first; i < last; i++)
                if (c->children[i].pid) {
                    td_say(stderr, 2, "tandem up: %s %s, killing it\n", c->children[i].name,
                           is_told_twice ? "was still stopping at the second signal"
                                         : "did not stop in time");
                    kill(c->children[i].pid, SIGKILL);
                }
    }
}

/* One word of a command, on a line of its own where it does not fit any more. Returns where the
 * line is then. */
static unsigned say_part(const char *part, size_t n_bytes, unsigned at, unsigned columns)
{
    bool fits = !columns || at + 1 + n_bytes + 2 <= columns; /* 2: " \\" */
    printf(fits ? " %.*s" : " \\\n      %.*s", (int)n_bytes, part);
    return (fits ? at + 1 : 6) + (unsigned)n_bytes;
}

/* A command to copy; on a terminal over as many lines as it takes. An option and its value stay
 * together where a line has room for both. */
static void say_command(const char *const *parts)
{
    unsigned columns = td_terminal_columns(stdout), at = 2 + (unsigned)strlen(parts[0]);
    printf("  %s", parts[0]);
    for (size_t i = 1; parts[i]; i++) {
        size_t n = strlen(parts[i]), flag = parts[i][0] == '-' ? strcspn(parts[i], " ") : n;
        if (flag < n && columns && 6 + n + 2 > columns) {
            at = say_part(parts[i], flag, at, columns);
            at = say_part(parts[i] + flag + 1, n - flag - 1, at, columns);
        } else {
            at = say_part(parts[i], n, at, columns);
        }
    }
    putchar('\n');
}

static void say_up(const struct cluster *c)
{
    const struct up_config *g = c->cfg;
    char routers[MAX_ROUTERS * 300], at[MAX_ROUTERS * 300 + 16], one[340], http[400],
        tls[3][PATH_MAX + 16];
    signal(SIGPIPE, SIG_IGN); /* who reads the first line alone does not end the cluster */
    router_list(c, routers, sizeof routers);
    td_say(stdout, 2, "tandem is up at %s: %lld prefill, %lld decode, mode %s. Ctrl-C stops it.\n",
           routers, c->n_models * (long long)g->prefill, c->n_models * (long long)g->decode,
           g->mode);
    bool has_tls = g->tls_ca[0];
    snprintf(at, sizeof at, "--server %s", routers);
    snprintf(one, sizeof one, "--server %s", g->listen);
    snprintf(tls[0], sizeof tls[0], "--tls-ca %s", g->tls_ca);
    snprintf(tls[1], sizeof tls[1], "--tls-cert %s", g->tls_cert);
    snprintf(tls[2], sizeof tls[2], "--tls-key %s", g->tls_key);
    const char *generate[12] = {"tandem", "generate", at, "--stats"},
               *status[12] = {"tandem", "status", one};
    size_t n = 4, k = 3;
    for (size_t i = 0; has_tls && i < 3; i++) generate[n++] = status[k++] = tls[i];
    if (c->n_models > 1) generate[n++] = "--model NAME";
    generate[n++] = "\"Once upon a time\"";
    say_command(generate);
    char secret[PATH_MAX + 64];
    snprintf(secret, sizeof secret, "--cluster-secret-file %s", c->secret_file);
    status[k++] = secret;
    say_command(status);
    if (g->http_listen[0]) {
        snprintf(http, sizeof http, "http%s://%s/v1/completions", has_tls ? "s" : "",
                 g->http_listen);
        const char *curl[12] = {"curl", http, "-d '{\"prompt\": \"Once upon a time\"}'"};
        char files[3][PATH_MAX + 16];
        snprintf(files[0], sizeof files[0], "--cacert %s", g->tls_ca);
        snprintf(files[1], sizeof files[1], "--cert %s", g->tls_cert);
        snprintf(files[2], sizeof files[2], "--key %s", g->tls_key);
        for (size_t i = 0; has_tls && i < 3; i++) curl[3 + i] = files[i];
        say_command(curl);
    }
    fflush(stdout);
}

/* Until a stop signal: true. False when the last router has ended: without one there is no cluster;
 * without a worker, or one router of several, it is only smaller. */
static bool watch_children(struct cluster *c)
{
    while (!td_stop_signal_wait(200)) {
        struct child *dead = reap(c);
        if (!dead) continue;
        describe_end(c, dead);
        bool any = false;
        for (int64_t i = 0; i < c->cfg->routers; i++) any |= c->children[i].pid != 0;
        if (!any) return false;
    }
    return true;
}

int cli_up(int argc, char **argv)
{
    struct up_config g = {0};
    struct td_err err = {0};
    static struct cluster c;
    if (td_options_load(options, &g, "tandem up",
                        "Starts a local cluster; Ctrl-C stops it cleanly.", argc, argv, NULL, 0,
                        NULL, &err))
        return td_die("tandem up", &err);
    if (g.prefill == 0 && !strcmp(g.mode, "pd")) {
        td_fail(&err, TD_ERR_INVALID,
                "prefill is 0 and mode is pd: nobody would prefill; use --mode colocated");
        return td_die("tandem up", &err);
    }
    for (int64_t i = 0; i < g.routers; i++)
        if (address_at("listen", g.listen, i, c.routers[i], sizeof c.routers[i], &err) ||
            check_listen(c.routers[i], &err))
            return td_die("tandem up", &err);
    if (g.log_dir[0] && access(g.log_dir, W_OK | X_OK)) {
        td_fail(&err, TD_ERR_INVALID, "log_dir \"%s\": %s", g.log_dir, strerror(errno));
        return td_die("tandem up", &err);
    }
    unsetenv("TANDEM_LISTEN"); /* the router gets it as a flag */
    c.cfg = &g;
    if (read_models(&c, &err)) return td_die("tandem up", &err);
    ssize_t n = readlink("/proc/self/exe", c.bin_dir, sizeof c.bin_dir - 1);
    char *slash = n > 0 ? (c.bin_dir[n] = 0, strrchr(c.bin_dir, '/')) : NULL;
    if (!slash) {
        td_fail(&err, TD_ERR_IO, "cannot find the daemons beside this program: %s",
                strerror(errno));
        return td_die("tandem up", &err);
    }
    *slash = 0;
    sigset_t set;
    td_stop_signals(&set);
    sigprocmask(SIG_BLOCK, &set, NULL);

    bool ok = start(&c, &err), was_up = ok;
    if (ok) {
        say_up(&c);
        ok = watch_children(&c);
    }
    /* workers first, so that running requests can finish through the router */
    int n_routers = c.n < (int)g.routers ? c.n : (int)g.routers;
    bool clean = stop_children(&c, n_routers, c.n, !was_up);
    clean = stop_children(&c, 0, n_routers, !was_up) && clean;
    remove_secret(&c);
    return ok && clean ? 0 : 1;
}
