/* mock_worker.c - `tandem-bench mock-worker`: a decode worker without a model, for benches of the
 * router's process (router_peers.py). It joins a router in mode colocated, and gives each request a
 * token every --step-ms, all rows of a step in one message; with 0 it answers a call at once, in
 * one message. It takes its calls in the Multiplex stream alone.
 *
 * One rpc loop thread owns everything; main waits for a signal. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench/bench.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/options.h"
#include "common/base/signals.h"
#include "common/rpc/rpc.h"
#include "tandem/v1/worker.pb-c.h"

#define PROGRAM "tandem-bench mock-worker"

enum { MAX_SEQS = 8192, SNAPSHOT_MS = 20, KV_BLOCKS = 1 << 20, BLOCK_TOKENS = 16, MAX_LEN = 2048 };

struct seq {
    struct td_rpc_call *call; /* its stream */
    uint64_t id;
    uint32_t n_tokens, n_left;
    bool begun;
};

static struct mock {
    const char *router;
    int64_t vocab;
    uint64_t step_ms;
    struct td_rpc_loop *loop;
    struct td_rpc_server *server;
    struct td_rpc_call *join;
    uint64_t snapshot, calls, tokens, steps;
    struct seq seqs[MAX_SEQS];
    uint32_t n_seqs;
} mock;

#define OFF(f) offsetof(struct mock, f)
static const struct td_option options[] = {
    {"router", TD_OPT_STR, "127.0.0.1:7600", 0, 0, NULL, OFF(router), "the router's address"},
    {"vocab", TD_OPT_I64, "2048", 1, 1 << 24, NULL, OFF(vocab), "of the router's model"},
    {"step_ms", TD_OPT_U64, "0", 0, 10000, NULL, OFF(step_ms),
     "a token of each request every so often; 0 = all at once"},
    {0},
};

/* Rows of one message. */
static Tandem__V1__MultiplexRow rows[2 * MAX_SEQS + 4];
static Tandem__V1__MultiplexRow *row_ptrs[2 * MAX_SEQS + 4];
static Tandem__V1__TokenOut outs[2 * MAX_SEQS];
static Tandem__V1__MultiplexEnd end_ok = TANDEM__V1__MULTIPLEX_END__INIT;
static size_t n_rows;

static Tandem__V1__MultiplexRow *add_row(uint64_t id)
{
    Tandem__V1__MultiplexRow *row = &rows[n_rows];
    tandem__v1__multiplex_row__init(row);
    row->id = id;
    row_ptrs[n_rows++] = row;
    return row;
}

static void send_rows(struct td_rpc_call *call)
{
    Tandem__V1__MultiplexDown down = TANDEM__V1__MULTIPLEX_DOWN__INIT;
    down.n_rows = n_rows;
    down.rows = row_ptrs;
    if (n_rows) td_rpc_call_send(call, &down.base);
    n_rows = 0;
}

static void add_token(struct seq *s)
{
    Tandem__V1__TokenOut *out = &outs[n_rows];
    tandem__v1__token_out__init(out);
    out->index = s->n_tokens++;
    out->token = 64 + (int32_t)(out->index % 512 % (uint32_t)(mock.vocab - 64));
    s->n_left--;
    if (!s->n_left) out->finish = TANDEM__V1__FINISH_REASON__FINISH_LENGTH;
    Tandem__V1__MultiplexRow *row = add_row(s->id);
    row->row_case = TANDEM__V1__MULTIPLEX_ROW__ROW_TOKEN;
    row->token = out;
    mock.tokens++;
    if (s->n_left) return;
    row = add_row(s->id);
    row->row_case = TANDEM__V1__MULTIPLEX_ROW__ROW_END;
    row->end = &end_ok;
}

static void drop(uint32_t at) { mock.seqs[at] = mock.seqs[--mock.n_seqs]; }

static void on_step(void *arg)
{
    (void)arg;
    struct td_rpc_call *call = mock.n_seqs ? mock.seqs[0].call : NULL;
    mock.steps += mock.n_seqs > 0;
    for (uint32_t i = 0; i < mock.n_seqs;) {
        struct seq *s = &mock.seqs[i];
        if (s->call != call) {
            send_rows(call);
            call = s->call;
        }
        add_token(s);
        if (s->n_left)
            i++;
        else
            drop(i);
    }
    if (call) send_rows(call);
}

static void take(struct td_rpc_call *call, const Tandem__V1__MultiplexCall *c)
{
    if (c->call_case == TANDEM__V1__MULTIPLEX_CALL__CALL_CANCEL) {
        for (uint32_t i = 0; i < mock.n_seqs; i++)
            if (mock.seqs[i].call == call && mock.seqs[i].id == c->id) {
                drop(i);
                return;
            }
        return;
    }
    const Tandem__V1__Sequence *in = c->decode ? c->decode->seq : NULL;
    if (c->call_case != TANDEM__V1__MULTIPLEX_CALL__CALL_DECODE || !in || !in->sampling) return;
    struct seq s = {.call = call,
                    .id = c->id,
                    .n_tokens = (uint32_t)in->n_tokens,
                    .n_left = in->n_prompt + in->sampling->max_tokens - (uint32_t)in->n_tokens};
    mock.calls++;
    if (mock.step_ms) {
        if (mock.n_seqs < MAX_SEQS) mock.seqs[mock.n_seqs++] = s;
        return;
    }
    while (s.n_left && n_rows + 2 < sizeof outs / sizeof *outs) add_token(&s);
    send_rows(call);
}

static void on_calls(struct td_rpc_call *call, const ProtobufCMessage *msg, void *ctx)
{
    (void)ctx;
    const Tandem__V1__MultiplexUp *up = (const Tandem__V1__MultiplexUp *)msg;
    for (size_t i = 0; up && i < up->n_calls; i++) take(call, up->calls[i]);
}

static void on_end(struct td_rpc_call *call, bool cancelled, void *ctx)
{
    (void)cancelled;
    (void)ctx;
    for (uint32_t i = mock.n_seqs; i-- > 0;)
        if (mock.seqs[i].call == call) drop(i);
}

static const struct td_rpc_method methods[] = {
    {.path = "/tandem.v1.Worker/Multiplex",
     .request = &tandem__v1__multiplex_up__descriptor,
     .client_streaming = true,
     .on_message = on_calls,
     .on_end = on_end},
    {0},
};

/* ---- registration ---------------------------------------------------------------------------- */

static void on_router(struct td_rpc_call *call, const ProtobufCMessage *msg, void *user)
{
    (void)call;
    (void)user;
    const Tandem__V1__RouterMessage *m = (const Tandem__V1__RouterMessage *)msg;
    if (m->message_case == TANDEM__V1__ROUTER_MESSAGE__MESSAGE_WELCOME)
        td_info("registered", "n=1");
}

static void on_left(struct td_rpc_call *call, const struct td_rpc_result *res, void *user)
{
    (void)call;
    (void)user;
    char q[300];
    td_info("left", "code=%d reason=%s", (int)res->code, td_log_quote(q, sizeof q, res->details));
    mock.join = NULL;
}

static void on_snapshot(void *arg)
{
    (void)arg;
    Tandem__V1__Snapshot s = TANDEM__V1__SNAPSHOT__INIT;
    Tandem__V1__StepReport step = TANDEM__V1__STEP_REPORT__INIT, *steps = &step;
    Tandem__V1__WorkerMessage m = TANDEM__V1__WORKER_MESSAGE__INIT;
    if (!mock.join) return;
    s.seq = ++mock.snapshot;
    s.running = mock.n_seqs;
    s.calls_taken = mock.calls;
    s.decode_tokens_total = mock.tokens;
    s.steps_total = mock.steps;
    if (mock.n_seqs) {
        step.decode_seqs = mock.n_seqs;
        step.wall_us = (uint32_t)mock.step_ms * 1000;
        s.n_steps = 1;
        s.steps = &steps;
    }
    m.message_case = TANDEM__V1__WORKER_MESSAGE__MESSAGE_SNAPSHOT;
    m.snapshot = &s;
    td_rpc_call_send(mock.join, &m.base);
}

static void join(void *arg)
{
    static const struct td_rpc_client_method method = {
        "/tandem.v1.Registry/Join", &tandem__v1__router_message__descriptor, true};
    static const struct td_rpc_handler handler = {on_router, on_left};
    struct td_rpc_channel *channel = arg;
    char address[64];
    snprintf(address, sizeof address, "127.0.0.1:%d", td_rpc_server_port(mock.server));
    mock.join = td_rpc_call_start(channel, &method, NULL, 0, true, NULL, 0, &handler, NULL);
    Tandem__V1__Hello h = TANDEM__V1__HELLO__INIT;
    Tandem__V1__WorkerMessage m = TANDEM__V1__WORKER_MESSAGE__INIT;
    h.name = (char *)"mock";
    h.role = (char *)"decode";
    h.address = address;
    h.incarnation = td_now_ns();
    h.version = (char *)TD_VERSION;
    h.protocol = 1;
    h.layout_hash = 1;
    h.block_size = BLOCK_TOKENS;
    h.kv_blocks = KV_BLOCKS;
    h.max_model_len = MAX_LEN;
    h.vocab = (uint32_t)mock.vocab;
    h.max_seqs = MAX_SEQS;
    h.multiplex = true;
    m.message_case = TANDEM__V1__WORKER_MESSAGE__MESSAGE_HELLO;
    m.hello = &h;
    td_rpc_call_send(mock.join, &m.base);
}

static void leave(void *arg)
{
    (void)arg;
    if (mock.join) td_rpc_call_cancel(mock.join);
}

int td_bench_mock_worker(int argc, char **argv)
{
    struct td_err err = {0};
    sigset_t set;
    td_stop_signals(&set);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    const struct td_rpc_method *services[] = {methods, NULL};
    struct td_rpc_channel *channel = NULL;
    td_status s = td_options_load(options, &mock, PROGRAM, "A decode worker without a model.", argc,
                                  argv, NULL, 0, NULL, &err);
    if (!s) s = td_rpc_loop_create("mock", &mock.loop, &err);
    struct td_rpc_server_config c = {
        .loop = mock.loop, .address = "127.0.0.1:0", .services = services};
    if (!s) s = td_rpc_server_start(&c, &mock.server, &err);
    struct td_rpc_channel_config to = {.loop = mock.loop, .target = mock.router};
    if (!s) s = td_rpc_channel_create(&to, &channel, &err);
    if (s) return td_die(PROGRAM, &err);
    td_rpc_loop_post(mock.loop, join, channel);
    td_rpc_timer_start(mock.loop, SNAPSHOT_MS, on_snapshot, NULL);
    if (mock.step_ms) td_rpc_timer_start(mock.loop, (uint32_t)mock.step_ms, on_step, NULL);
    while (!td_stop_signal_wait(1000)) {
    }
    td_rpc_loop_post(mock.loop, leave, NULL);
    td_rpc_server_stop(mock.server, 0);
    _exit(0); /* a bench's mock: the kernel takes back the rest */
}
