/* status.c - `tandem status`: the router's view of the cluster, as a table or as JSON. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>

#include "cli/cli.h"
#include "router/http/status_json.h"

struct status_config {
    struct cli_server at;
    bool json;
};

// clang-format off
static const struct td_option options[] = {
    CLI_SERVER_OPTIONS(struct status_config, at),
    CLI_SECRET_OPTION(struct status_config, at),
    {"json", TD_OPT_BOOL, "false", 0, 0, NULL, offsetof(struct status_config, json),
     "one JSON object"},
    {0},
};
// clang-format on

static void print_json(const Tandem__V1__StatusResponse *s)
{
    json_t *root = status_json(s);
    json_dumpf(root, stdout, JSON_INDENT(2));
    putchar('\n');
    json_decref(root);
}

/* What is of one model, where there are several. */
static void print_models(const Tandem__V1__StatusResponse *s)
{
    printf("%-40s %7s %7s %9s %8s %10s %9s %8s %7s\n", "MODEL", "QUEUED", "LIVE", "FINISHED",
           "FAILED", "REQUESTS/s", "BOUND BY", "PREFILL", "DECODE");
    for (size_t i = 0; i < s->n_models; i++) {
        const Tandem__V1__ModelStatus *m = s->models[i];
        char names[600];
        size_t used = (size_t)snprintf(names, sizeof names, "%s", m->name);
        for (size_t k = 0; k < m->n_aliases && used < sizeof names; k++)
            used += (size_t)snprintf(names + used, sizeof names - used, ", %s", m->aliases[k]);
        printf("%-40s %7u %7u %9llu %8llu %10.1f %9s %8u %7u\n", names, m->queued, m->live,
               (unsigned long long)m->finished, (unsigned long long)m->failed, m->arrival_rate,
               m->bound, m->want_prefill, m->want_decode);
    }
}

static void print_table(const Tandem__V1__StatusResponse *s)
{
    printf("model %s   mode %s   policy %s   up %llu s   queued %u   live %u   finished %llu   "
           "failed %llu   failovers %llu\n",
           s->n_models > 1 ? "(several)" : s->model, s->mode, s->policy,
           (unsigned long long)(s->uptime_ms / 1000), s->queued, s->live,
           (unsigned long long)s->finished, (unsigned long long)s->failed,
           (unsigned long long)s->failovers);
    printf("%.1f requests/s   bound by %s   refused %llu", s->arrival_rate,
           s->bound[0] ? s->bound : "(unknown)", (unsigned long long)s->refused);
    if (s->attainment >= 0) printf("   objectives met %.1f %%", 100 * s->attainment);
    if (s->want_decode && s->n_models <= 1)
        printf("   the load asks for %u prefill and %u decode workers", s->want_prefill,
               s->want_decode);
    printf("\n");
    if (s->n_models > 1) print_models(s);
    printf("%-20s %-8s %2s %-9s %-22s %17s %8s %-4s %8s %8s %8s %10s %10s%s  KERNELS\n", "WORKER",
           "ROLE", "TP", "STATE", "ADDRESS", "KV HELD+CACHED", "OF", "IN", "B/TOKEN", "RUNNING",
           "WAITING", "PREFILL/s", "DECODE/s", s->n_models > 1 ? "  MODEL" : "");
    for (size_t i = 0; i < s->n_workers; i++) {
        const Tandem__V1__WorkerStatus *w = s->workers[i];
        printf("%-20s %-8s %2u %-9s %-22s %8u+%-8u %8u %-4s %8llu %8u %8u %10.1f %10.1f%s%s  %s\n",
               w->name, w->role, w->tp, w->state, w->address, w->kv_blocks_held,
               w->kv_blocks_cached, w->kv_blocks, w->kv_dtype,
               (unsigned long long)w->kv_bytes_per_token, w->running, w->waiting,
               w->prefill_tokens_per_s, w->decode_tokens_per_s, s->n_models > 1 ? "  " : "",
               s->n_models > 1 ? w->model : "", w->kernels);
    }
    if (s->n_workers == 0) printf("no workers have joined\n");
    if (s->withheld)
        printf("names, addresses and loads are told to operators: --cluster-secret-file "
               "(TANDEM_CLUSTER_SECRET_FILE) with the cluster's secret%s\n",
               s->challenge.len
                   ? ""
                   : ", or a certificate with a name of the router's --tls-operator-names");
}

static void on_status(const ProtobufCMessage *msg, void *ctx)
{
    const struct status_config *c = ctx;
    const Tandem__V1__StatusResponse *s = (const Tandem__V1__StatusResponse *)msg;
    if (c->json)
        print_json(s);
    else
        print_table(s);
}

int cli_status(int argc, char **argv)
{
    struct status_config c = {0};
    struct td_err err = {0};
    struct cli_client client;
    if (td_options_load(options, &c, "tandem status",
                        "Workers, KV use, queues and rates of a cluster.", argc, argv, NULL, 0,
                        NULL, &err) ||
        cli_client_open(&client, &c.at, &err))
        return td_die("tandem status", &err);
    struct cli_result res = {0};
    bool asked = cli_status_call(&client, &c.at, 5000, false, on_status, &c, &res, &err);
    cli_client_close(&client);
    if (!asked) return td_die("tandem status", &err);
    return res.code == TD_CODE_OK ? 0 : cli_complain("status", c.at.server, &res);
}
