/* rpc_interop_server.c - common/rpc as a program, for rpc_interop_test.py.
 *
 *   rpc_interop_server serve ADDRESS [CERT KEY [CA]]     prints "port N"; reads commands from
 *       stdin: serving, not_serving, goaway, connections (prints "connections N", those that are
 *       open), quit (or EOF)
 *   rpc_interop_server call TARGET TEXT [CA [CERT KEY [NAME]]]      one Tokenize; prints "CODE
 *       n_ids details"; TEXT "-" = one call per
 *                                                                   line of stdin, over one channel
 *
 * Inference.Generate answers the prompt byte by byte, max_tokens bytes at most, then a last
 * message; its trailing metadata peer-names says who its caller has proved to be. Tokenize
 * answers the bytes as ids. Status says "held" and holds the loop until goaway is told. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/log.h"
#include "common/rpc/rpc.h"
#include "tandem/v1/inference.pb-c.h"

/* "dns=a,cn=b" of the peer; "none" when it is not verified. */
static bool add_name(enum td_rpc_name_kind kind, const char *name, void *arg)
{
    char *text = arg;
    size_t n = strlen(text);
    snprintf(text + n, 500 - n, "%s%s=%s", n ? "," : "", td_rpc_name_kind_text(kind), name);
    return false;
}

static void on_generate(struct td_rpc_call *call, const ProtobufCMessage *msg, void *ctx)
{
    (void)ctx;
    const Tandem__V1__GenerateRequest *request = (const void *)msg;
    if (request->input_case != TANDEM__V1__GENERATE_REQUEST__INPUT_PROMPT ||
        !td_rpc_utf8_valid(request->prompt.data, request->prompt.len)) {
        td_rpc_call_finish(call, TD_CODE_INVALID_ARGUMENT, "prompt: must be UTF-8 text", NULL, 0);
        return;
    }
    size_t i = 0;
    while (i < request->prompt.len) { /* whole characters */
        size_t n = 1;
        while (i + n < request->prompt.len && (request->prompt.data[i + n] & 0xc0) == 0x80) n++;
        Tandem__V1__GenerateResponse chunk = TANDEM__V1__GENERATE_RESPONSE__INIT;
        chunk.text = (ProtobufCBinaryData){n, request->prompt.data + i};
        if (td_rpc_call_send(call, &chunk.base)) return;
        i += n;
    }
    if (request->prompt.len == 4 && memcmp(request->prompt.data, "hang", 4) == 0) return;
    Tandem__V1__GenerateResponse last = TANDEM__V1__GENERATE_RESPONSE__INIT;
    last.finish_reason = TANDEM__V1__FINISH_REASON__FINISH_STOP;
    const char *key = td_rpc_call_metadata(call, "x-key");
    last.request_id = (char *)(key ? key : "");
    td_rpc_call_send(call, &last.base);
    char names[500] = "";
    if (td_rpc_call_peer_names(call, add_name, names)) abort();
    if (!td_rpc_call_peer_verified(call)) snprintf(names, sizeof names, "none");
    struct td_rpc_metadata trailing[] = {{"tandem-ledger", "ttft_us=1"}, {"peer-names", names}};
    td_rpc_call_finish(call, TD_CODE_OK, NULL, trailing, 2);
}

static void on_tokenize(struct td_rpc_call *call, const ProtobufCMessage *msg, void *ctx)
{
    (void)ctx;
    const Tandem__V1__TokenizeRequest *request = (const void *)msg;
    Tandem__V1__TokenizeResponse response = TANDEM__V1__TOKENIZE_RESPONSE__INIT;
    size_t n =
        request->input_case == TANDEM__V1__TOKENIZE_REQUEST__INPUT_PROMPT ? request->prompt.len : 0;
    int32_t *ids = malloc((n + 1) * sizeof *ids);
    if (!ids) abort();
    for (size_t i = 0; i < n; i++) ids[i] = request->prompt.data[i];
    response.ids = ids;
    response.n_ids = n;
    td_rpc_call_send(call, &response.base);
    free(ids);
    td_rpc_call_finish(call, TD_CODE_OK, NULL, NULL, 0);
}

static struct {
    pthread_mutex_t mu;
    pthread_cond_t cond;
    bool is_away;
} g_held = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, false};

static void on_status_open(struct td_rpc_call *call, void *ctx)
{
    (void)call;
    (void)ctx;
    printf("held\n");
    fflush(stdout);
    pthread_mutex_lock(&g_held.mu);
    while (!g_held.is_away) pthread_cond_wait(&g_held.cond, &g_held.mu);
    pthread_mutex_unlock(&g_held.mu);
}

static void on_status(struct td_rpc_call *call, const ProtobufCMessage *msg, void *ctx)
{
    (void)msg;
    (void)ctx;
    td_rpc_call_finish(call, TD_CODE_OK, NULL, NULL, 0);
}

static void on_end(struct td_rpc_call *call, bool cancelled, void *ctx)
{
    (void)call;
    (void)ctx;
    if (cancelled) {
        printf("cancelled\n");
        fflush(stdout);
    }
}

static const struct td_rpc_method inference[] = {
    {.path = "/tandem.v1.Inference/Generate",
     .request = &tandem__v1__generate_request__descriptor,
     .on_message = on_generate,
     .on_end = on_end},
    {.path = "/tandem.v1.Inference/Tokenize",
     .request = &tandem__v1__tokenize_request__descriptor,
     .on_message = on_tokenize,
     .on_end = on_end},
    {.path = "/tandem.v1.Inference/Status",
     .request = &tandem__v1__status_request__descriptor,
     .on_open = on_status_open,
     .on_message = on_status,
     .on_end = on_end},
    {0},
};

static int die(const struct td_err *err)
{
    fprintf(stderr, "%s\n", err->msg);
    return 1;
}

/* The loop gets the order while it is held, and goes on. */
static void go_away(struct td_rpc_server *server)
{
    td_rpc_server_goaway(server);
    pthread_mutex_lock(&g_held.mu);
    g_held.is_away = true;
    pthread_cond_signal(&g_held.cond);
    pthread_mutex_unlock(&g_held.mu);
}

static void tell_connections(const struct td_rpc_server *server)
{
    struct td_rpc_server_stats stats;
    td_rpc_server_stats(server, &stats);
    printf("connections %u\n", stats.connections);
    fflush(stdout);
}

static int serve(int argc, char **argv)
{
    struct td_rpc_loop *loop;
    struct td_rpc_server *server;
    struct td_err err = {0};
    const struct td_rpc_method *const services[] = {inference, NULL};
    struct td_rpc_tls tls = {0};
    if (argc > 1) {
        tls.cert_file = argv[1];
        tls.key_file = argv[2];
        tls.ca_file = argc > 3 ? argv[3] : NULL;
    }
    struct td_rpc_server_config config = {.address = argv[0],
                                          .tls = argc > 1 ? &tls : NULL,
                                          .services = services,
                                          .reflection = true,
                                          .limits = {.max_message_bytes = 1 << 20}};
    if (td_rpc_loop_create("rpc", &loop, &err)) return die(&err);
    config.loop = loop;
    if (td_rpc_server_start(&config, &server, &err)) {
        td_rpc_loop_destroy(loop);
        return die(&err);
    }
    printf("port %d\n", td_rpc_server_port(server));
    fflush(stdout);
    char line[64];
    while (fgets(line, sizeof line, stdin) && strcmp(line, "quit\n") != 0)
        if (strcmp(line, "goaway\n") == 0)
            go_away(server);
        else if (strcmp(line, "connections\n") == 0)
            tell_connections(server);
        else
            td_rpc_server_set_serving(server, strcmp(line, "serving\n") == 0);
    td_rpc_server_stop(server, 200);
    td_rpc_loop_destroy(loop);
    return 0;
}

struct answer {
    pthread_mutex_t mu;
    pthread_cond_t cond;
    bool done;
    size_t n_ids;
};

static void on_answer(struct td_rpc_call *call, const ProtobufCMessage *msg, void *user)
{
    (void)call;
    ((struct answer *)user)->n_ids =
        ((const Tandem__V1__TokenizeResponse *)(const void *)msg)->n_ids;
}

static void on_done(struct td_rpc_call *call, const struct td_rpc_result *result, void *user)
{
    (void)call;
    struct answer *a = user;
    printf("%d %zu %s\n", (int)result->code, a->n_ids, result->details);
    fflush(stdout);
    pthread_mutex_lock(&a->mu);
    a->done = true;
    pthread_cond_signal(&a->cond);
    pthread_mutex_unlock(&a->mu);
}

static void call_text(struct td_rpc_channel *channel, const char *text)
{
    static const struct td_rpc_client_method method = {
        "/tandem.v1.Inference/Tokenize", &tandem__v1__tokenize_response__descriptor, false};
    static const struct td_rpc_handler handler = {on_answer, on_done};
    struct answer a = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, false, 0};
    Tandem__V1__TokenizeRequest request = TANDEM__V1__TOKENIZE_REQUEST__INIT;
    request.input_case = TANDEM__V1__TOKENIZE_REQUEST__INPUT_PROMPT;
    request.prompt = (ProtobufCBinaryData){strlen(text), (uint8_t *)text};
    td_rpc_call_start(channel, &method, &request.base, 10000, false, NULL, 0, &handler, &a);
    pthread_mutex_lock(&a.mu);
    while (!a.done) pthread_cond_wait(&a.cond, &a.mu);
    pthread_mutex_unlock(&a.mu);
}

static int call_once(int argc, char **argv)
{
    struct td_rpc_loop *loop;
    struct td_rpc_channel *channel;
    struct td_err err = {0};
    struct td_rpc_tls tls = {0};
    if (argc > 2) tls.ca_file = argv[2];
    if (argc > 4) {
        tls.cert_file = argv[3];
        tls.key_file = argv[4];
    }
    if (argc > 5) tls.server_name = argv[5];
    struct td_rpc_channel_config config = {.target = argv[0], .tls = argc > 2 ? &tls : NULL};
    if (td_rpc_loop_create("rpc", &loop, &err)) return die(&err);
    config.loop = loop;
    if (td_rpc_channel_create(&config, &channel, &err)) {
        td_rpc_loop_destroy(loop);
        return die(&err);
    }
    char line[256];
    if (strcmp(argv[1], "-") != 0)
        call_text(channel, argv[1]);
    else
        while (fgets(line, sizeof line, stdin)) call_text(channel, line);
    td_rpc_channel_destroy(channel);
    td_rpc_loop_destroy(loop);
    return 0;
}

int main(int argc, char **argv)
{
    td_log_start("rpc_interop_server", TD_LOG_INFO);
    if (argc >= 3 && argc != 4 && strcmp(argv[1], "serve") == 0) return serve(argc - 2, argv + 2);
    if (argc >= 4 && argc != 6 && strcmp(argv[1], "call") == 0)
        return call_once(argc - 2, argv + 2);
    fprintf(stderr, "usage: see the top of rpc_interop_server.c\n");
    return 2;
}
