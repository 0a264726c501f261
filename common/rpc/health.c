/* health.c - grpc.health.v1.Health: Check answers once, Watch answers now and at every change. All
 * names of the server's own services and "" share one state; "ready" is not more than that, and
 * tells whether the server can do its work. For an unknown name Check answers NOT_FOUND; Watch
 * answers SERVICE_UNKNOWN and its stream stays open. Loop thread only. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/rpc/rpc_internal.h"
#include "grpc/health/v1/health.pb-c.h"

struct td_rpc_watcher {
    struct td_rpc_watcher *next, **prev;
    struct td_rpc_call *call;
    bool known, of_ready;
    int told; /* status sent last; -1 = none */
};

static bool is_known(const struct td_rpc_server *server, const char *service)
{
    if (!*service || !strcmp(service, TD_RPC_READY)) return true;
    for (size_t i = 0; i < server->routes.n_own_services; i++)
        if (strcmp(server->routes.services[i], service) == 0) return true;
    return false;
}

static int state(const struct td_rpc_server *server, bool of_ready)
{
    bool well = server->serving && td_rpc_server_answers(server) && (server->ready || !of_ready);
    return well ? GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING
                : GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__NOT_SERVING;
}

static void answer(struct td_rpc_call *call, int status)
{
    Grpc__Health__V1__HealthCheckResponse response = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;
    response.status = (Grpc__Health__V1__HealthCheckResponse__ServingStatus)status;
    td_rpc_call_send(call, &response.base);
}

static void on_check(struct td_rpc_call *call, const ProtobufCMessage *msg, void *ctx)
{
    struct td_rpc_server *server = ctx;
    const char *service =
        ((const Grpc__Health__V1__HealthCheckRequest *)(const void *)msg)->service;
    if (!is_known(server, service)) {
        char why[200];
        snprintf(why, sizeof why, "service \"%.120s\" is not served here", service);
        td_rpc_call_finish(call, TD_CODE_NOT_FOUND, why, NULL, 0);
        return;
    }
    answer(call, state(server, !strcmp(service, TD_RPC_READY)));
    /* the clock goes into metadata, because the message is gRPC's own: one round trip then tells
     * health, delay, and the difference of the clocks */
    char wall_ns[24];
    snprintf(wall_ns, sizeof wall_ns, "%" PRIu64, td_wall_ns());
    struct td_rpc_metadata trailing = {TD_RPC_WALL_KEY, wall_ns};
    td_rpc_call_finish(call, TD_CODE_OK, NULL, &trailing, 1);
}

static void on_check_end(struct td_rpc_call *call, bool cancelled, void *ctx)
{
    (void)call;
    (void)cancelled;
    (void)ctx;
}

static void tell(struct td_rpc_server *server, struct td_rpc_watcher *watcher)
{
    int now = watcher->known
                  ? state(server, watcher->of_ready)
                  : GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVICE_UNKNOWN;
    if (now != watcher->told) answer(watcher->call, now);
    watcher->told = now;
}

static void on_watch(struct td_rpc_call *call, const ProtobufCMessage *msg, void *ctx)
{
    struct td_rpc_server *server = ctx;
    struct td_rpc_watcher *watcher = td_rpc_alloc(sizeof *watcher);
    watcher->call = call;
    const char *service =
        ((const Grpc__Health__V1__HealthCheckRequest *)(const void *)msg)->service;
    watcher->known = is_known(server, service);
    watcher->of_ready = !strcmp(service, TD_RPC_READY);
    watcher->told = -1;
    watcher->prev = &server->watchers;
    watcher->next = server->watchers;
    if (watcher->next) watcher->next->prev = &watcher->next;
    server->watchers = watcher;
    td_rpc_call_set_user(call, watcher);
    tell(server, watcher);
}

static void on_watch_end(struct td_rpc_call *call, bool cancelled, void *ctx)
{
    (void)cancelled;
    (void)ctx;
    struct td_rpc_watcher *watcher = td_rpc_call_user(call);
    *watcher->prev = watcher->next;
    if (watcher->next) watcher->next->prev = watcher->prev;
    free(watcher);
}

void td_rpc_health_changed(struct td_rpc_server *server)
{
    for (struct td_rpc_watcher *watcher = server->watchers; watcher; watcher = watcher->next)
        tell(server, watcher);
}

const struct td_rpc_method td_rpc_health_methods[] = {
    {.path = "/grpc.health.v1.Health/Check",
     .request = &grpc__health__v1__health_check_request__descriptor,
     .on_message = on_check,
     .on_end = on_check_end},
    {.path = "/grpc.health.v1.Health/Watch",
     .request = &grpc__health__v1__health_check_request__descriptor,
     .on_message = on_watch,
     .on_end = on_watch_end},
    {0},
};
