/* health.c - `tandem health`: asks one daemon whether it serves, as a probe does. Kubernetes' own
 * gRPC probes speak no TLS; this command does, and is in the same image. */
#include <stdio.h>
#include <string.h>

#include "cli/cli.h"
#include "grpc/health/v1/health.pb-c.h"
#include "inference/grpc_service.pb-c.h"

struct health_config {
    struct cli_server at;
    const char *service;
    uint64_t timeout_ms;
    bool need_workers;
};

// clang-format off
static const struct td_option options[] = {
    CLI_SERVER_OPTIONS(struct health_config, at),
    {"service", TD_OPT_STR, "", 0, 0, NULL, offsetof(struct health_config, service),
     "the service that is asked about, such as tandem.v1.Inference; empty = the daemon"},
    {"need_workers", TD_OPT_BOOL, "false", 0, 0, NULL, offsetof(struct health_config, need_workers),
     "a router: workers are there, too, for each role that its mode needs"},
    {"timeout_ms", TD_OPT_U64, "2000", 1, 600000, NULL, offsetof(struct health_config, timeout_ms),
     "longest wait for the answer"},
    {0},
};
// clang-format on

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

/* 0: the router has the workers that it needs; KServe's ServerReady says so. */
static int ask_workers(struct cli_client *client, const struct health_config *c)
{
    Inference__ServerReadyRequest m = INFERENCE__SERVER_READY_REQUEST__INIT;
    struct cli_result res = {0};
    bool ready = false;
    cli_call(client, "/inference.GRPCInferenceService/ServerReady",
             &inference__server_ready_response__descriptor, &m.base, c->timeout_ms, true, on_ready,
             &ready, &res);
    if (res.code != TD_CODE_OK) return cli_complain("health", c->at.server, &res);
    printf("%s: %s\n", c->at.server, ready ? "has workers" : "a role has no worker");
    return ready ? 0 : 1;
}

int cli_health(int argc, char **argv)
{
    struct health_config c = {0};
    struct td_err err = {0};
    struct cli_client client;
    const char *address[1] = {NULL};
    size_t n_addresses = 0;
    if (td_options_load(options, &c, "tandem health",
                        "Asks a daemon at HOST:PORT whether it serves: exit status 0 when it says "
                        "SERVING, else 1. For exec probes, with TLS, too.",
                        argc, argv, address, 1, &n_addresses, &err))
        return td_die("tandem health", &err);
    if (n_addresses) c.at.server = address[0];
    if (cli_client_open(&client, &c.at, &err)) return td_die("tandem health", &err);
    Grpc__Health__V1__HealthCheckRequest m = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
    m.service = (char *)c.service;
    struct cli_result res = {0};
    int status = -1;
    /* wait_for_ready: a name that answers a moment later is no failure before the time is over */
    cli_call(&client, "/grpc.health.v1.Health/Check",
             &grpc__health__v1__health_check_response__descriptor, &m.base, c.timeout_ms, true,
             on_health, &status, &res);
    int rc = 1;
    if (res.code != TD_CODE_OK) {
        cli_complain("health", c.at.server, &res);
    } else {
        printf("%s: %s%s%s\n", c.at.server, c.service, c.service[0] ? " is " : "",
               status_name(status));
        if (status == GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING)
            rc = c.need_workers ? ask_workers(&client, &c) : 0;
    }
    cli_client_close(&client);
    return rc;
}
