/* health.c - `tandem health`: asks one daemon whether it serves, as a probe does. Kubernetes' own
 * gRPC probes speak no TLS; this command does, and is in the same image. */
#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "common/base/say.h"
#include "grpc/health/v1/health.pb-c.h"
#include "inference/grpc_service.pb-c.h"

struct health_config {
    struct cli_server at;
    const char *service, *need_workers;
    uint64_t timeout_ms;
};

/* What --need-workers asks for. */
struct need {
    bool any;     /* one of each role that the router's mode needs: KServe's ServerReady */
    bool counted; /* at least that many are ready */
    unsigned long prefill, decode;
};

/* What a router's Status says. */
struct ready_workers {
    unsigned long prefill, decode;
};

// clang-format off
static const struct td_option options[] = {
    CLI_SERVER_OPTIONS(struct health_config, at),
    {"service", TD_OPT_STR, "", 0, 0, NULL, offsetof(struct health_config, service),
     "the service that is asked about, such as tandem.v1.Inference; empty = the daemon"},
    {"need_workers", TD_OPT_STR, "false", 0, 0, NULL, offsetof(struct health_config, need_workers),
     "a router: workers are there, too. PREFILL,DECODE, such as 2,4: at least so many are ready; "
     "without a\nvalue: one at least for each role that its mode needs"},
    {"timeout_ms", TD_OPT_U64, "2000", 1, 600000, NULL, offsetof(struct health_config, timeout_ms),
     "longest wait for the answer"},
    {0},
};
// clang-format on

/* The option's text: true, false or "PREFILL,DECODE". */
static td_status parse_need(const char *text, struct need *ret, struct td_err *err)
{
    static const char *const yes[] = {"true", "1", "yes", "on"},
                             *no[] = {"false", "0", "no", "off"};
    struct need need = {0};
    for (size_t i = 0; i < 4; i++) {
        need.any |= !strcmp(text, yes[i]);
        if (need.any || !strcmp(text, no[i])) {
            *ret = need;
            return TD_OK;
        }
    }
    char *after = NULL, *end = NULL;
    errno = 0;
    if (isdigit((unsigned char)text[0])) need.prefill = strtoul(text, &after, 10);
    if (after && after[0] == ',' && isdigit((unsigned char)after[1]))
        need.decode = strtoul(after + 1, &end, 10);
    if (!end || *end || errno || need.prefill > 100000 || need.decode > 100000)
        return td_fail(
            err, TD_ERR_INVALID,
            "need_workers is \"%.60s\", must be PREFILL,DECODE with numbers of 0..100000, "
            "such as 1,2; or true or false",
            text);
    need.counted = true;
    *ret = need;
    return TD_OK;
}

/* `--need-workers` was a switch before it took a value: alone, and as --no-need-workers, it is one
 * still. The next argument is its value only where it looks like "1,2". */
static int join_need(int argc, char **argv, char **to, char *joined, size_t joined_bytes)
{
    int n = 0;
    for (int i = 0; i < argc; i++) {
        const char *next = i + 1 < argc ? argv[i + 1] : "";
        size_t digits = strspn(next, "0123456789");
        to[n] = argv[i];
        if (!strcmp(argv[i], "--no-need-workers") || !strcmp(argv[i], "--no-need_workers")) {
            to[n] = (char *)(uintptr_t) "--need-workers=false";
        } else if (!strcmp(argv[i], "--need-workers") || !strcmp(argv[i], "--need_workers")) {
            bool has_value = digits && next[digits] == ',';
            snprintf(joined, joined_bytes, "--need-workers=%s", has_value ? next : "true");
            to[n] = joined;
            i += has_value;
        }
        n++;
    }
    to[n] = NULL;
    return n;
}

static void on_health(const ProtobufCMessage *msg, void *ctx)
{
    *(int *)ctx = ((const Grpc__Health__V1__HealthCheckResponse *)msg)->status;
}

static const char *status_name(int status)
{
    const ProtobufCEnumValue *v = protobuf_c_enum_descriptor_get_value(
        &grpc__health__v1__health_check_response__serving_status__descriptor, status);
    return v ? v->name : "a status that is not known";
}

static void on_ready(const ProtobufCMessage *msg, void *ctx)
{
    *(bool *)ctx = ((const Inference__ServerReadyResponse *)msg)->ready;
}

/* One line, for the event that a probe's failure is told in. */
static int complain(const struct health_config *c, const struct cli_result *r)
{
    const char *hint = cli_port_hint(&c->at, c->at.server, r);
    td_say(stderr, 2, "tandem health: %s: %s: %s%s%s\n", c->at.server, cli_code_name(r->code),
           r->details, hint ? "; " : "", hint ? hint : "");
    return 1;
}

/* 0: the router has the workers that it needs; KServe's ServerReady says so. */
static int ask_workers(struct cli_client *client, const struct health_config *c)
{
    Inference__ServerReadyRequest m = INFERENCE__SERVER_READY_REQUEST__INIT;
    struct cli_result res = {0};
    bool ready = false;
    cli_call(client, "/inference.GRPCInferenceService/ServerReady",
             &inference__server_ready_response__descriptor, &m.base, c->timeout_ms, true, on_ready,
             &ready, &res);
    if (res.code != TD_CODE_OK) return complain(c, &res);
    td_say(stdout, 2, "%s: %s\n", c->at.server, ready ? "has workers" : "a role has no worker");
    return ready ? 0 : 1;
}

static void on_status(const ProtobufCMessage *msg, void *ctx)
{
    struct ready_workers *ready = ctx;
    const Tandem__V1__StatusResponse *m = (const Tandem__V1__StatusResponse *)msg;
    *ready = (struct ready_workers){0};
    for (size_t i = 0; i < m->n_workers; i++) {
        if (strcmp(m->workers[i]->state, "ready") != 0) continue;
        ready->prefill += !strcmp(m->workers[i]->role, "prefill");
        ready->decode += !strcmp(m->workers[i]->role, "decode");
    }
}

/* 0: the router has so many workers. Anybody who may call is told roles and states. */
static int count_workers(struct cli_client *client, const struct health_config *c,
                         const struct need *need)
{
    struct ready_workers ready = {0};
    struct cli_result res = {0};
    struct td_err err = {0};
    if (!cli_status_call(client, &c->at, c->timeout_ms, true, on_status, &ready, &res, &err))
        return td_die("tandem health", &err);
    if (res.code != TD_CODE_OK) return complain(c, &res);
    td_say(stdout, 2,
           "%s: SERVING, %lu prefill and %lu decode workers are ready, needed %lu and %lu\n",
           c->at.server, ready.prefill, ready.decode, need->prefill, need->decode);
    return ready.prefill >= need->prefill && ready.decode >= need->decode ? 0 : 1;
}

static int ask(struct cli_client *client, const struct health_config *c, const struct need *need)
{
    Grpc__Health__V1__HealthCheckRequest m = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
    m.service = (char *)(uintptr_t)c->service;
    struct cli_result res = {0};
    int status = -1;
    /* wait_for_ready: a name that answers a moment later is no failure before the time is over */
    cli_call(client, "/grpc.health.v1.Health/Check",
             &grpc__health__v1__health_check_response__descriptor, &m.base, c->timeout_ms, true,
             on_health, &status, &res);
    if (res.code != TD_CODE_OK) return complain(c, &res);
    bool serves = status == GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING;
    if (serves && need->counted) return count_workers(client, c, need);
    td_say(stdout, 2, "%s: %s%s%s\n", c->at.server, c->service, c->service[0] ? " is " : "",
           status_name(status));
    if (!serves) return 1;
    return need->any ? ask_workers(client, c) : 0;
}

int cli_health(int argc, char **argv)
{
    struct health_config c = {0};
    struct td_err err = {0};
    struct cli_client client;
    struct need need;
    const char *address[1] = {NULL};
    size_t n_addresses = 0;
    char joined[160], **args = calloc((size_t)argc + 1, sizeof *args);
    if (!args) return 1;
    argc = join_need(argc, argv, args, joined, sizeof joined);
    td_status s = td_options_load(options, &c, "tandem health",
                                  "Asks a daemon at HOST:PORT whether it serves: exit status 0 "
                                  "when it says SERVING, else 1. For exec probes, with TLS, too.",
                                  argc, args, address, 1, &n_addresses, &err);
    if (!s) s = parse_need(c.need_workers, &need, &err);
    if (!s && n_addresses) c.at.server = address[0];
    if (!s) s = cli_client_open(&client, &c.at, &err);
    free(args);
    if (s) return td_die("tandem health", &err);
    int rc = ask(&client, &c, &need);
    cli_client_close(&client);
    return rc;
}
