/* worker_load.c - `tandem-bench worker-load`: what a lone request to a decode worker takes without
 * a router. It lets one worker join (mock-worker), opens its Multiplex stream as a router does, and
 * sends one request after the other, each when the one before has ended. router_peers.py compares
 * this with the same through the router: the difference is what the router adds. It prints one line
 * of JSON.
 *
 * One rpc loop thread owns everything; main waits for its end. */
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "bench/bench.h"
#include "common/base/clock.h"
#include "common/base/options.h"
#include "common/base/signals.h"
#include "common/rpc/rpc.h"
#include "tandem/v1/worker.pb-c.h"

#define PROGRAM "tandem-bench worker-load"

enum { N_PROMPT = 10, MAX_REQUESTS = 10000000 };

static struct load {
    const char *listen;
    int64_t requests, tokens;
    uint64_t timeout_ms;
    struct td_rpc_loop *loop;
    struct td_rpc_call *stream;
    double *whole_us;
    uint64_t id, sent_ns, start_ns;
    int64_t n_done;
    sem_t is_over;
} load;

#define OFF(f) offsetof(struct load, f)
static const struct td_option options[] = {
    {"listen", TD_OPT_STR, "127.0.0.1:7600", 0, 0, NULL, OFF(listen), "where the worker joins"},
    {"requests", TD_OPT_I64, "1000", 1, MAX_REQUESTS, NULL, OFF(requests), "one after the other"},
    {"tokens", TD_OPT_I64, "2", 1, 1000, NULL, OFF(tokens), "of each answer"},
    {"timeout_ms", TD_OPT_U64, "60000", 1, 600000, NULL, OFF(timeout_ms), "of the whole run"},
    {0},
};

static void fail(const char *what)
{
    fprintf(stderr, "%s: %s\n", PROGRAM, what);
    _exit(1);
}

static void send_request(void)
{
    static int32_t prompt[N_PROMPT] = {64, 65, 66, 67, 68, 69, 70, 71, 72, 73};
    Tandem__V1__SamplingSpec sampling = TANDEM__V1__SAMPLING_SPEC__INIT;
    Tandem__V1__Sequence seq = TANDEM__V1__SEQUENCE__INIT;
    Tandem__V1__DecodeRequest decode = TANDEM__V1__DECODE_REQUEST__INIT;
    Tandem__V1__MultiplexCall call = TANDEM__V1__MULTIPLEX_CALL__INIT, *calls = &call;
    Tandem__V1__MultiplexUp up = TANDEM__V1__MULTIPLEX_UP__INIT;
    sampling.max_tokens = (uint32_t)load.tokens;
    seq.request = seq.order = call.id = ++load.id;
    seq.tokens = prompt;
    seq.n_tokens = seq.n_prompt = N_PROMPT;
    seq.sampling = &sampling;
    decode.seq = &seq;
    decode.local_prefill = true;
    call.call_case = TANDEM__V1__MULTIPLEX_CALL__CALL_DECODE;
    call.decode = &decode;
    up.n_calls = 1;
    up.calls = &calls;
    load.sent_ns = td_now_ns();
    if (td_rpc_call_send(load.stream, &up.base)) fail("a request could not be sent");
}

static void on_rows(struct td_rpc_call *call, const ProtobufCMessage *msg, void *user)
{
    (void)call;
    (void)user;
    const Tandem__V1__MultiplexDown *down = (const Tandem__V1__MultiplexDown *)msg;
    for (size_t i = 0; i < down->n_rows; i++) {
        const Tandem__V1__MultiplexRow *row = down->rows[i];
        if (row->id != load.id || row->row_case != TANDEM__V1__MULTIPLEX_ROW__ROW_END) continue;
        if (row->end->code) fail("a request failed");
        load.whole_us[load.n_done++] = (double)(td_now_ns() - load.sent_ns) / TD_NS_PER_US;
        if (load.n_done == load.requests)
            sem_post(&load.is_over);
        else
            send_request();
        return;
    }
}

static void on_stream_end(struct td_rpc_call *call, const struct td_rpc_result *res, void *user)
{
    (void)call;
    (void)user;
    if (load.n_done < load.requests) fail(res->details);
}

static void on_worker(struct td_rpc_call *call, const ProtobufCMessage *msg, void *ctx)
{
    (void)ctx;
    static const struct td_rpc_client_method multiplex = {
        "/tandem.v1.Worker/Multiplex", &tandem__v1__multiplex_down__descriptor, true};
    static const struct td_rpc_handler handler = {on_rows, on_stream_end};
    const Tandem__V1__WorkerMessage *m = (const Tandem__V1__WorkerMessage *)msg;
    if (load.stream || !m || m->message_case != TANDEM__V1__WORKER_MESSAGE__MESSAGE_HELLO) return;
    Tandem__V1__RouterMessage answer = TANDEM__V1__ROUTER_MESSAGE__INIT;
    Tandem__V1__Welcome welcome = TANDEM__V1__WELCOME__INIT;
    answer.message_case = TANDEM__V1__ROUTER_MESSAGE__MESSAGE_WELCOME;
    answer.welcome = &welcome;
    td_rpc_call_send(call, &answer.base);
    struct td_rpc_channel *channel;
    struct td_err err = {0};
    struct td_rpc_channel_config to = {.loop = load.loop, .target = m->hello->address};
    if (td_rpc_channel_create(&to, &channel, &err)) fail(err.msg);
    load.stream = td_rpc_call_start(channel, &multiplex, NULL, 0, true, NULL, 0, &handler, NULL);
    load.start_ns = td_now_ns();
    send_request();
}

static void on_worker_end(struct td_rpc_call *call, bool cancelled, void *ctx)
{
    (void)call;
    (void)cancelled;
    (void)ctx;
}

static const struct td_rpc_method methods[] = {
    {.path = "/tandem.v1.Registry/Join",
     .request = &tandem__v1__worker_message__descriptor,
     .client_streaming = true,
     .on_message = on_worker,
     .on_end = on_worker_end},
    {0},
};

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static void report(void)
{
    size_t n = (size_t)load.n_done;
    double wall = (double)(td_now_ns() - load.start_ns) / 1e9;
    qsort(load.whole_us, n, sizeof(double), by_value);
    printf(
        "{\"requests\": %zu, \"wall_s\": %.4f, \"whole_p50_us\": %.1f, \"whole_p99_us\": %.1f}\n",
        n, wall, load.whole_us[n / 2], load.whole_us[n * 99 / 100]);
}

int td_bench_worker_load(int argc, char **argv)
{
    struct td_err err = {0};
    sigset_t set;
    td_stop_signals(&set);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    const struct td_rpc_method *services[] = {methods, NULL};
    struct td_rpc_server *server;
    td_status s = td_options_load(options, &load, PROGRAM,
                                  "One request after the other to a decode worker that joins.",
                                  argc, argv, NULL, 0, NULL, &err);
    if (s) return td_die(PROGRAM, &err);
    load.whole_us = calloc((size_t)load.requests, sizeof(double));
    if (!load.whole_us) fail("no memory");
    sem_init(&load.is_over, 0, 0);
    s = td_rpc_loop_create("load", &load.loop, &err);
    struct td_rpc_server_config c = {
        .loop = load.loop, .address = load.listen, .services = services};
    if (!s) s = td_rpc_server_start(&c, &server, &err);
    if (s) return td_die(PROGRAM, &err);
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += (time_t)(load.timeout_ms / 1000) + 1;
    if (sem_timedwait(&load.is_over, &until)) fail("the run did not end in time");
    report();
    fflush(stdout);
    _exit(0); /* a bench's client: the kernel takes back the rest */
}
