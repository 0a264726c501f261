/* client.c - blocking calls on top of the rpc loop: the command's thread waits while the loop
 * thread works. */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "cli/cli.h"
#include "common/base/api_key.h"
#include "common/base/clock.h"
#include "common/base/cluster_secret.h"
#include "common/base/printable.h"
#include "common/base/say.h"
#include "common/rpc/identity.h"

struct td_rpc_tls cli_tls(const struct cli_server *s)
{
    return (struct td_rpc_tls){.ca_file = s->tls_ca,
                               .cert_file = s->tls_cert[0] ? s->tls_cert : NULL,
                               .key_file = s->tls_key[0] ? s->tls_key : NULL,
                               .server_name = s->tls_server_name[0] ? s->tls_server_name : NULL};
}

/* The host:port of an address that may look like a URL: "http://10.0.0.1:7600/". https asks for
 * TLS, which needs the CA. */
static td_status take_address(const struct cli_server *s, const char *at, size_t n, char *to,
                              size_t to_bytes, struct td_err *err)
{
    static const char *const schemes[] = {"http://", "grpc://", "https://", "grpcs://"};
    const char *whole = at;
    size_t n_whole = n;
    for (size_t i = 0; i < 4; i++) {
        size_t k = strlen(schemes[i]);
        if (n < k || strncasecmp(at, schemes[i], k) != 0) continue;
        if (i >= 2 && !s->tls_ca[0])
            return td_fail(err, TD_ERR_INVALID,
                           "--server: \"%.*s\" asks for TLS: give --tls-ca with the CA of the "
                           "router's certificate",
                           (int)n, whole);
        at += k;
        n -= k;
        if (n && at[n - 1] == '/') n--;
        if (memchr(at, '/', n))
            return td_fail(err, TD_ERR_INVALID,
                           "--server: \"%.*s\" has a path: this is gRPC, the address is host:port",
                           (int)n_whole, whole);
        break;
    }
    if (!n || n >= to_bytes)
        return td_fail(err, TD_ERR_INVALID, "--server: an address has %zu bytes, must be 1..%zu", n,
                       to_bytes - 1);
    memcpy(to, at, n);
    to[n] = 0;
    return TD_OK;
}

/* One channel for each server of the list; none is dialled yet. */
static td_status open_channels(struct cli_client *c, const struct cli_server *s, struct td_err *err)
{
    struct td_rpc_tls tls = cli_tls(s);
    for (const char *at = s->server; *at;) {
        size_t n = strcspn(at, ",");
        char *to = c->servers[c->n_channels];
        if (c->n_channels == CLI_MAX_SERVERS)
            return td_fail(err, TD_ERR_INVALID, "--server has more than %d addresses",
                           CLI_MAX_SERVERS);
        td_status taken = take_address(s, at, n, to, sizeof c->servers[0], err);
        if (taken) return taken;
        struct td_rpc_channel_config cfg = {
            .loop = c->loop, .target = to, .tls = s->tls_ca[0] ? &tls : NULL};
        td_status st = td_rpc_channel_create(&cfg, &c->channels[c->n_channels], err);
        if (st) return st;
        c->n_channels++;
        at += n + (at[n] == ',');
    }
    if (!c->n_channels) return td_fail(err, TD_ERR_INVALID, "--server is empty");
    c->channel = c->channels[0];
    return TD_OK;
}

td_status cli_client_open(struct cli_client *c, const struct cli_server *s, struct td_err *err)
{
    memset(c, 0, sizeof *c);
    signal(SIGPIPE, SIG_DFL);
    td_status st = TD_OK;
    if (s->api_key_file && s->api_key_file[0])
        st = td_api_key_read(s->api_key_file, c->authorization, err);
    if (!st) st = td_rpc_loop_create("cli", &c->loop, err);
    if (st) return st;
    st = open_channels(c, s, err);
    if (st) cli_client_close(c);
    return st;
}

void cli_client_close(struct cli_client *c)
{
    for (uint32_t i = 0; i < c->n_channels; i++) td_rpc_channel_destroy(c->channels[i]);
    if (c->loop) td_rpc_loop_destroy(c->loop);
    memset(c, 0, sizeof *c);
}

struct waiting_call {
    pthread_mutex_t lock;
    pthread_cond_t cond;
    bool done;
    void (*on_message)(const ProtobufCMessage *msg, void *ctx);
    void *ctx;
    struct cli_result *result;
};

static void on_message(struct td_rpc_call *call, const ProtobufCMessage *msg, void *user)
{
    (void)call;
    struct waiting_call *w = user;
    if (w->on_message) w->on_message(msg, w->ctx);
}

static void on_done(struct td_rpc_call *call, const struct td_rpc_result *res, void *user)
{
    (void)call;
    struct waiting_call *w = user;
    pthread_mutex_lock(&w->lock);
    w->result->code = res->code;
    snprintf(w->result->details, sizeof w->result->details, "%s", res->details);
    td_make_printable(w->result->details);
    w->done = true;
    pthread_cond_signal(&w->cond);
    pthread_mutex_unlock(&w->lock);
}

/* Until the call is over; cancels it when the user wants so. */
static void wait_done(const struct cli_client *c, struct waiting_call *w, struct td_rpc_call *call)
{
    bool is_cancelled = false;
    pthread_mutex_lock(&w->lock);
    while (!w->done) {
        if (!c->is_interrupted || is_cancelled) {
            pthread_cond_wait(&w->cond, &w->lock);
            continue;
        }
        uint64_t at = td_now_ns() + 50 * TD_NS_PER_MS;
        struct timespec until = {(time_t)(at / TD_NS_PER_S), (long)(at % TD_NS_PER_S)};
        int rc = pthread_cond_clockwait(&w->cond, &w->lock, CLOCK_MONOTONIC, &until);
        if (rc == ETIMEDOUT && c->is_interrupted()) {
            is_cancelled = true;
            pthread_mutex_unlock(&w->lock);
            td_rpc_call_cancel(call);
            pthread_mutex_lock(&w->lock);
        }
    }
    pthread_mutex_unlock(&w->lock);
}

static void call_with(struct cli_client *c, const char *path,
                      const ProtobufCMessageDescriptor *response, const ProtobufCMessage *request,
                      uint64_t deadline_ms, bool wait_for_ready,
                      const struct td_rpc_metadata *metadata, size_t n_metadata,
                      void (*message_fn)(const ProtobufCMessage *msg, void *ctx), void *ctx,
                      struct cli_result *ret_result)
{
    static const struct td_rpc_handler handler = {on_message, on_done};
    struct td_rpc_client_method method = {.path = path, .response = response};
    struct waiting_call w = {.lock = PTHREAD_MUTEX_INITIALIZER,
                             .cond = PTHREAD_COND_INITIALIZER,
                             .on_message = message_fn,
                             .ctx = ctx,
                             .result = ret_result};
    struct td_rpc_metadata all[4]; /* the caller's have at most three */
    TD_ASSERT(n_metadata < 4);
    for (size_t i = 0; i < n_metadata; i++) all[i] = metadata[i];
    if (c->authorization[0])
        all[n_metadata++] = (struct td_rpc_metadata){"authorization", c->authorization};
    struct td_rpc_call *call = td_rpc_call_start_ref(c->channel, &method, request, deadline_ms,
                                                     wait_for_ready, all, n_metadata, &handler, &w);
    wait_done(c, &w, call);
    td_rpc_call_unref(call);
}

void cli_call(struct cli_client *c, const char *path, const ProtobufCMessageDescriptor *response,
              const ProtobufCMessage *request, uint64_t deadline_ms, bool wait_for_ready,
              void (*message_fn)(const ProtobufCMessage *msg, void *ctx), void *ctx,
              struct cli_result *ret_result)
{
    call_with(c, path, response, request, deadline_ms, wait_for_ready, NULL, 0, message_fn, ctx,
              ret_result);
}

struct status_asked {
    struct td_cluster_secret *secret;
    char proof[TD_STATUS_PROOF_MAX]; /* "" = nothing to prove */
    void (*on_message)(const ProtobufCMessage *msg, void *ctx);
    void *ctx;
};

/* Every string of a message, and of the messages in it. */
static void make_printable(const ProtobufCMessage *m)
{
    for (unsigned i = 0; i < m->descriptor->n_fields; i++) {
        const ProtobufCFieldDescriptor *f = &m->descriptor->fields[i];
        const uint8_t *at = (const uint8_t *)m + f->offset, *items;
        size_t n = 1;
        if (f->type != PROTOBUF_C_TYPE_STRING && f->type != PROTOBUF_C_TYPE_MESSAGE) continue;
        if (f->label == PROTOBUF_C_LABEL_REPEATED) {
            memcpy(&n, (const uint8_t *)m + f->quantifier_offset, sizeof n);
            memcpy(&items, at, sizeof items);
            at = items;
        }
        for (size_t k = 0; k < n; k++) {
            void *item;
            memcpy(&item, at + k * sizeof item, sizeof item);
            if (item && f->type == PROTOBUF_C_TYPE_STRING)
                td_make_printable(item);
            else if (item)
                make_printable(item);
        }
    }
}

static void on_status(const ProtobufCMessage *msg, void *ctx)
{
    const struct status_asked *a = ctx;
    make_printable(msg);
    a->on_message(msg, a->ctx);
}

static void on_first_status(const ProtobufCMessage *msg, void *ctx)
{
    struct status_asked *a = ctx;
    const Tandem__V1__StatusResponse *m = (const Tandem__V1__StatusResponse *)msg;
    /* it is asked again */
    if (m->withheld && a->secret && !td_status_prove(a->secret, &m->challenge, a->proof)) return;
    a->proof[0] = 0;
    on_status(msg, a);
}

bool cli_status_call(struct cli_client *c, const struct cli_server *s, uint64_t deadline_ms,
                     bool wait_for_ready,
                     void (*message_fn)(const ProtobufCMessage *msg, void *ctx), void *ctx,
                     struct cli_result *ret_result, struct td_err *err)
{
    static const char path[] = "/tandem.v1.Inference/Status";
    struct status_asked asked = {.on_message = message_fn, .ctx = ctx};
    Tandem__V1__StatusRequest m = TANDEM__V1__STATUS_REQUEST__INIT;
    if (s->cluster_secret_file && s->cluster_secret_file[0] &&
        td_cluster_secret_load(s->cluster_secret_file, &asked.secret, err)) {
        td_err_prefix(err, "cluster_secret_file");
        return false;
    }
    call_with(c, path, &tandem__v1__status_response__descriptor, &m.base, deadline_ms,
              wait_for_ready, NULL, 0, on_first_status, &asked, ret_result);
    if (ret_result->code == TD_CODE_OK && asked.proof[0]) {
        struct td_rpc_metadata proof = {TD_STATUS_PROOF_KEY, asked.proof};
        call_with(c, path, &tandem__v1__status_response__descriptor, &m.base, deadline_ms, false,
                  &proof, 1, on_status, &asked, ret_result);
    }
    td_cluster_secret_destroy(asked.secret);
    return true;
}

const char *cli_code_name(enum td_code code)
{
    static const char *const names[] = {"OK",
                                        "CANCELLED",
                                        "UNKNOWN",
                                        "INVALID_ARGUMENT",
                                        "DEADLINE_EXCEEDED",
                                        "NOT_FOUND",
                                        "ALREADY_EXISTS",
                                        "PERMISSION_DENIED",
                                        "RESOURCE_EXHAUSTED",
                                        "FAILED_PRECONDITION",
                                        "ABORTED",
                                        "OUT_OF_RANGE",
                                        "UNIMPLEMENTED",
                                        "INTERNAL",
                                        "UNAVAILABLE",
                                        "DATA_LOSS",
                                        "UNAUTHENTICATED"};
    return (unsigned)code < sizeof names / sizeof *names ? names[code] : "?";
}

const char *cli_port_hint(const struct cli_server *s, const char *address,
                          const struct cli_result *r)
{
    bool has_tls = s->tls_ca && s->tls_ca[0], has_own = has_tls && s->tls_cert[0];
    if (r->code != TD_CODE_UNAVAILABLE && r->code != TD_CODE_DEADLINE_EXCEEDED) return NULL;
    if (strstr(r->details, "CERTIFICATE_VERIFY_FAILED") ||
        strstr(r->details, "certificate verify failed"))
        return "its certificate is not signed by the CA of --tls-ca";
    switch (cli_port_kind(address)) {
    case CLI_PORT_HTTP:
        return "that port speaks HTTP (--http-listen, --metrics-listen); this command needs the "
               "router's gRPC port (--listen)";
    case CLI_PORT_CLEAR:
        return has_tls ? "that port speaks no TLS: leave out --tls-ca, --tls-cert and --tls-key "
                         "(TANDEM_TLS_...)"
                       : NULL;
    case CLI_PORT_TLS:
        if (!has_tls) return "that port speaks TLS: give --tls-ca with the CA of its certificate";
        return has_own ? NULL
                       : "that port speaks TLS and may ask for a certificate: give --tls-cert and "
                         "--tls-key";
    case CLI_PORT_UNKNOWN:
        break;
    }
    return NULL;
}

int cli_complain(const char *command, const struct cli_server *s, const struct cli_result *r)
{
    char one[256];
    td_say(stderr, 2, "tandem %s: %s: %s\n", command, cli_code_name(r->code), r->details);
    snprintf(one, sizeof one, "%.*s", (int)strcspn(s->server, ","), s->server);
    const char *hint = r->code == TD_CODE_UNAVAILABLE ? cli_port_hint(s, one, r) : NULL;
    if (hint)
        td_say(stderr, 2, "  %s: %s\n", one, hint);
    else if (r->code == TD_CODE_UNAVAILABLE)
        td_say(stderr, 2,
               "  is a cluster running at %s? `tandem up --model DIR` starts one; `tandem status` "
               "shows its workers\n",
               s->server);
    return 1;
}
