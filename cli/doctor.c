/* doctor.c - `tandem doctor`, the checks before serving: of this host always (unless --local=false
 * or --listen), of a cluster with --router, of the way to another machine with --peer there and
 * --listen here. Prints one line per check to stdout; exit status 1 when a check failed. */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "cli/doctor.h"
#include "common/base/cluster_secret.h"
#include "common/base/mem.h"
#include "common/engine/engine.h"

#define OFF(f) offsetof(struct doctor_config, f)
// clang-format off
static const struct td_option options[] = {
    {"kv_memory", TD_OPT_STR, "25%", 0, 0, NULL, OFF(kv_memory),
     "the largest KV pool that a worker here can have: a size or a share, as its own"},
    {"transfer", TD_OPT_ENUM, "auto", 0, 0, "auto|tcp|shm|rdma|cuda-ipc", OFF(transfer),
     "KV path that must work; auto: whichever does"},
    {"register", TD_OPT_SIZE, "256MiB", 0, 1e13, NULL, OFF(register_bytes),
     "memory to register with each RDMA device; 0 = none, no GPU's either"},
    {"local", TD_OPT_BOOL, "true", 0, 0, NULL, OFF(local),
     "check this host: CPU, memory, limits, clocks, RDMA devices, GPUs"},
    {"router", TD_OPT_STR, "", 0, 0, NULL, OFF(at.server),
     "router of a running cluster: look at it and at each of its workers"},
    {"tls_ca", TD_OPT_STR, "", 0, 0, NULL, OFF(at.tls_ca),
     "CA of the cluster's certificates; turns TLS on"},
    {"tls_cert", TD_OPT_STR, "", 0, 0, NULL, OFF(at.tls_cert),
     "own certificate, for mutual TLS; with tls_ca on the KV port, too"},
    {"tls_key", TD_OPT_STR, "", 0, 0, NULL, OFF(at.tls_key), "own key, for mutual TLS"},
    {"tls_server_name", TD_OPT_STR, "", 0, 0, NULL, OFF(at.tls_server_name),
     "name that the router's and workers' certificates must hold; empty = hosts dialled"},
    {"listen", TD_OPT_STR, "", 0, 0, NULL, OFF(listen),
     "HOST:PORT: be the other side of a --peer, then end; no other check"},
    {"sessions", TD_OPT_U64, "1", 1, 10000, NULL, OFF(sessions),
     "--listen: end after so many, one after the other"},
    {"listen_timeout_ms", TD_OPT_U64, "600000", 100, 86400000, NULL, OFF(listen_timeout_ms),
     "--listen: longest wait for a --peer"},
    {"peer", TD_OPT_STR, "", 0, 0, NULL, OFF(peer),
     "HOST:PORT[,HOST:PORT...] of doctors with --listen: measure the KV paths to each"},
    {"cluster_secret_file", TD_OPT_STR, "", 0, 0, NULL, OFF(at.cluster_secret_file),
     "the cluster's secret: --router: names and addresses of workers are told to who proves it; "
     "--peer, --listen: proved on KV connections"},
    TD_KV_PORT_OPTIONS(struct doctor_config, kv_port),
    {"bytes", TD_OPT_SIZE, "256MiB", 1 << 20, 1 << 30, NULL, OFF(bytes),
     "--peer: the largest transfer, and the pool at both ends"},
    {"timeout_ms", TD_OPT_U64, "5000", 100, 600000, NULL, OFF(timeout_ms),
     "longest wait for an answer: router, worker, peer"},
    {"json", TD_OPT_STR, "", 0, 0, NULL, OFF(json),
     "write the checks to this file as JSON; - is stdout (the lines then go to stderr)"},
    {"root", TD_OPT_STR, "", 0, 0, NULL, OFF(root),
     "read /sys and /proc below this folder (a host's, mounted in a container)"},
    {0},
};
// clang-format on

static int write_json(const struct doctor_report *r, const char *path)
{
    json_t *root = doctor_json(r);
    bool to_stdout = !strcmp(path, "-");
    FILE *out = to_stdout ? stdout : fopen(path, "w");
    int e = !out || json_dumpf(root, out, JSON_INDENT(2)) || fputc('\n', out) == EOF || fflush(out);
    if (out && !to_stdout && fclose(out)) e = 1;
    if (e)
        fprintf(stderr, "tandem doctor: error: json: cannot write %s: %s\n", path, strerror(errno));
    json_decref(root);
    return e;
}

static bool has_rdma(const struct td_verbs *vb)
{
    static char names[TD_VB_DEVICES_MAX][TD_VB_NAME_MAX];
    uint32_t n = 0;
    return vb && vb->list(vb, names, &n) == 0 && n > 0;
}

static void check_local(struct doctor_report *r, const struct doctor_config *c, uint64_t kv_bytes,
                        const struct td_verbs *vb, const char *why)
{
    static struct doctor_pci gpus[DOCTOR_PCI_MAX];
    static struct doctor_rdma rdma;
    static struct doctor_gpu_memory gpu;
    doctor_host(r, c, kv_bytes, vb != NULL);
    doctor_flush(r);
    size_t n_gpus = doctor_gpus(r, c->root, gpus, DOCTOR_PCI_MAX);
    if (n_gpus > 0 && !has_rdma(vb))
        snprintf(gpu.why, sizeof gpu.why, "there is no RDMA device");
    else if (n_gpus > 0 && c->register_bytes == 0)
        snprintf(gpu.why, sizeof gpu.why, "--register 0");
    else if (n_gpus > 0)
        doctor_gpu_memory_open(&gpu);
    doctor_rdma(r, c, vb, why, kv_bytes, n_gpus > 0 ? &gpu : NULL, &rdma);
    doctor_flush(r);
    doctor_gpudirect(r, c->root, gpus, n_gpus, rdma.n_nics, rdma.n_reach_gpu, &gpu);
    doctor_gpu_memory_close(&gpu);
    doctor_topology(r, c->root, gpus, n_gpus, rdma.nics, rdma.n_nics);
    doctor_flush(r);
}

int cli_doctor(int argc, char **argv)
{
    static struct doctor_config c;
    struct doctor_report r = {0};
    struct td_err err = {0}, verbs_err = {0};
    const struct td_verbs *vb = NULL;
    uint64_t kv_bytes = 0;
    /* in a worker's pod these are the worker's ports; TANDEM_KV_*, _TRANSFER, _ROUTER, _RDMA_*,
     * _TLS_* mean the same here and stay */
    unsetenv("TANDEM_LISTEN");
    unsetenv("TANDEM_TRANSFER_PORT");
    if (td_options_load(
            options, &c, "tandem doctor",
            "Checks this host, a cluster and the way between two machines before they serve.", argc,
            argv, NULL, 0, NULL, &err) ||
        td_engine_kv_bytes(c.kv_memory, &kv_bytes, &err))
        return td_die("tandem doctor", &err);
    if (c.listen[0] && c.peer[0]) {
        td_fail(&err, TD_ERR_INVALID, "listen: one doctor listens, the other has --peer");
        return td_die("tandem doctor", &err);
    }
    if (c.at.cluster_secret_file[0] &&
        td_cluster_secret_load(c.at.cluster_secret_file, &c.secret, &err))
        return td_die("tandem doctor", &err);
    signal(SIGPIPE, SIG_IGN);
    r.out = !strcmp(c.json, "-") ? stderr : stdout;
    if (td_kv_port_verbs(&vb, &verbs_err)) vb = NULL;
    if (c.listen[0]) {
        doctor_listen(&r, &c, vb);
    } else {
        if (c.local) check_local(&r, &c, kv_bytes, vb, verbs_err.msg);
        if (c.at.server[0]) doctor_cluster(&r, &c);
        doctor_flush(&r);
        if (c.peer[0]) doctor_peer(&r, &c, vb);
    }
    doctor_flush(&r);
    int status = doctor_status(&r);
    fprintf(r.out, "\n%u ok, %u warn, %u FAIL\n", r.n_levels[DOCTOR_OK], r.n_levels[DOCTOR_WARN],
            r.n_levels[DOCTOR_FAIL]);
    if (c.json[0] && write_json(&r, c.json)) status = 1;
    doctor_report_free(&r);
    td_cluster_secret_destroy(c.secret);
    return status;
}
