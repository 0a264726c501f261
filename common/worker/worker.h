/* worker.h - what both worker daemons are made of: options, the engine thread's step loop, the RPC
 * front, registration, snapshots, drain.
 *
 * A daemon supplies a td_worker_role: what a new request does, how it is admitted, what follows a
 * sampled token, a transfer event, the end of the call. Policy lives there; this file moves
 * requests between the lists.
 *
 * Threads:
 *   rpc loop thread   owns the server, the registry streams and timers; fills new requests and
 *                     posts mail
 *   engine thread     owns every td_req after it was posted, the lists, the engine, the KV pool;
 *                     consumes mail and transfer events
 *   xfer thread       inside td_xfer; wakes the engine thread
 *   main thread       waits for signals, then drains
 *
 * A td_req lives from the accepted call until BOTH the call has ended (mail ENDED) and
 * everything it holds is given back. */
#ifndef TD_WORKER_H
#define TD_WORKER_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "common/base/wakeup.h"
#include "common/base/options.h"
#include "common/rpc/rpc.h"
#include "common/worker/guided.h"
#include "common/worker/token_filter.h"
#include "common/engine/engine.h"
#include "common/kv/kv_pool.h"
#include "common/rpc/identity.h"
#include "common/worker/kv_port.h"
#include "common/rpc/port.h"
#include "common/engine/ranks.h"
#include "common/model/mix.h"
#include "common/transfer/transfer.h"
#include "tandem/v1/worker.pb-c.h"

#define TD_PROTOCOL_VERSION 1

struct td_worker;

/* What the options of both daemons say (TD_WORKER_OPTIONS: their names, limits and meaning). Text
 * is "" where nothing is said. */
struct td_worker_config {
    struct { /* the engine's: model, KV pool, sequences */
        const char *path, *served_name, *random_weights, *dtype, *kv_dtype, *ops, *experts, *device,
            *cpus, *kv_memory;
        int64_t device_index, threads, block_size, max_seqs, max_batch, max_len, max_step_tokens;
        bool prefix_cache, deterministic;
    } model;
    struct { /* processes that share the model, and on how many hosts */
        int64_t tp, ep, nnodes, node_rank;
        const char *master_addr;
        uint64_t timeout_ms;
    } ranks;
    struct {
        const char *cert, *key, *ca, *server_name;
    } tls;
    struct {
        const char *level, *format;
    } log;
    struct td_kv_port_config kv_port;
    struct td_identity_config identity;
    struct td_port_config port;
    const char *name, *listen, *advertise, *router, *node_class, *transfer, *transfer_host,
        *kv_digest, *metrics_listen, *guide_gate;
    uint64_t drain_timeout_ms, peer_timeout_ms, port_check_ms;
};

/* The rows both daemons share; end the table with {0}. */
// clang-format off
#define TD_WORKER_OPTIONS(S, M)                                                                    \
    {"name", TD_OPT_STR, "", 0, 0, NULL, offsetof(S, M.name),                                      \
     "worker's name, unique; default ROLE-HOST-PID"},                                              \
    {"model", TD_OPT_STR, "", 0, 0, NULL, offsetof(S, M.model.path),                               \
     "Hugging Face model directory or GGUF file"},                                                 \
    {"served_model_name", TD_OPT_STR, "", 0, 0, NULL, offsetof(S, M.model.served_name),            \
     "name by which the router knows the model; default the directory's name"},                    \
    {"random_weights", TD_OPT_STR, "", 0, 0, NULL, offsetof(S, M.model.random_weights),            \
     "config.json to run with random weights (benchmarks)"},                                       \
    {"dtype", TD_OPT_ENUM, "auto", 0, 0, "auto|f32|bf16|" TD_MIX_NAMES,                            \
     offsetof(S, M.model.dtype),                                                                   \
     "compute type; auto = the checkpoint's; q8_0 ... = bf16, weights rounded as they load, "      \
     "as `tandem quantize` writes them"},                                                          \
    {"kv_dtype", TD_OPT_ENUM, "auto", 0, 0, "auto|f32|bf16|int8|fp8",                              \
     offsetof(S, M.model.kv_dtype),                                                                \
     "KV cache: auto = the compute type; int8, fp8 = codes with a scale for each token and "       \
     "head, half of bf16's bytes; equal in the workers of a model"},                               \
    {"ops", TD_OPT_STR, "", 0, 0, NULL, offsetof(S, M.model.ops),                                  \
     "kernel table: ref, avx2, avxvnni, avx512, avx512bf16, amx, neon, neonbf16; default the "     \
     "fastest"},                                                                                   \
    {"device", TD_OPT_ENUM, "cpu", 0, 0, "cpu|cuda", offsetof(S, M.model.device),                  \
     "where model and KV live; cuda: a GPU, by libtandem_cuda.so"},                                \
    {"test_device_index", TD_OPT_I64, "0", 0, 1023, NULL, offsetof(S, M.model.device_index),       \
     "the first GPU of those that CUDA shows"},                                                    \
    {"test_guide_gate", TD_OPT_STR, "", 0, 0, NULL, offsetof(S, M.guide_gate),                     \
     "no grammar is compiled before this file is there"},                                          \
    TD_OPTION_DECIDED("device_index", "the first of the GPUs that CUDA_VISIBLE_DEVICES shows"),    \
    {"deterministic", TD_OPT_BOOL, "true", 0, 0, NULL, offsetof(S, M.model.deterministic),         \
     "GPU: the same tokens whatever the batch; false may be faster"},                              \
    {"tp", TD_OPT_I64, "1", 1, 16, NULL, offsetof(S, M.ranks.tp),                                  \
     "processes that share the model: 1, 2, 4, 8 or 16; threads, cpus and kv_memory are of "       \
     "all together; device cuda: the first so many GPUs that CUDA shows, kv_memory of each"},      \
    {"ep", TD_OPT_I64, "0", 0, 16, NULL, offsetof(S, M.ranks.ep),                                  \
     "of a mixture of experts: into how many parts, of whole experts each, the tp processes "      \
     "divide them; those of a part share each of its experts; 0 = tp. Changes no result"},         \
    {"experts", TD_OPT_STR, "load", 0, 0, NULL, offsetof(S, M.model.experts),                      \
     "of a mixture: load = packed in memory at start; lazy = each when a token first chooses it; " \
     "a size (20GiB) = so, and those chosen longest ago give way to keep within it; of all tp "    \
     "processes of a host together. Changes no result"},                                           \
    {"nnodes", TD_OPT_I64, "1", 1, 16, NULL, offsetof(S, M.ranks.nnodes),                          \
     "hosts that share the model, one rank on each: 1, or as many as tp; all run this program "    \
     "with the same options but node_rank; threads and cpus are each host's own"},                 \
    {"node_rank", TD_OPT_I64, "0", 0, 15, NULL, offsetof(S, M.ranks.node_rank),                    \
     "which of the nnodes this is; 0 has the queue and speaks to router and peers"},               \
    {"master_addr", TD_OPT_OWN_STR, "", 0, 0, NULL, offsetof(S, M.ranks.master_addr),              \
     "host:port where node 0 awaits the others; the same text on all"},                            \
    {"rank_timeout_ms", TD_OPT_U64, "60000", 100, 3600000, NULL, offsetof(S, M.ranks.timeout_ms),  \
     "nnodes: a rank that a step waits for so long is given up, and the worker ends"},             \
    {"threads", TD_OPT_I64, "0", 0, 1024, NULL, offsetof(S, M.model.threads),                      \
     "compute threads; 0 = the CPUs that it may use: affinity and cgroup quota count"},            \
    {"cpus", TD_OPT_STR, "", 0, 0, NULL, offsetof(S, M.model.cpus),                                \
     "pin the compute threads to these CPUs, e.g. 0-3,8"},                                         \
    {"kv_memory", TD_OPT_STR, "25%", 0, 0, NULL, offsetof(S, M.model.kv_memory),                   \
     "KV pool: a size (2GiB), or a share of what is available (40%), of which max_seqs x "         \
     "max_model_len tokens are the most; on the device if any"},                                   \
    {"block_size", TD_OPT_I64, "16", 8, 256, NULL, offsetof(S, M.model.block_size),                \
     "tokens per KV block, a power of two"},                                                       \
    {"max_seqs", TD_OPT_I64, "256", 1, 65536, NULL, offsetof(S, M.model.max_seqs),                 \
     "requests held at once, waiting ones included"},                                              \
    {"max_batch", TD_OPT_I64, "64", 1, 4096, NULL, offsetof(S, M.model.max_batch),                 \
     "sequences in one step"},                                                                     \
    {"max_model_len", TD_OPT_I64, "0", 0, 16777216, NULL, offsetof(S, M.model.max_len),            \
     "longest sequence in tokens; 0 = the model's"},                                               \
    {"max_step_tokens", TD_OPT_I64, "512", 1, 1048576, NULL, offsetof(S, M.model.max_step_tokens), \
     "rows per step: the prefill chunk"},                                                          \
    {"node_class", TD_OPT_STR, "", 0, 0, NULL, offsetof(S, M.node_class),                          \
     "workers of one class share the router's latency model; empty = one for each role"},          \
    {"prefix_cache", TD_OPT_BOOL, "true", 0, 0, NULL, offsetof(S, M.model.prefix_cache),           \
     "keep finished blocks for equal prefixes"},                                                   \
    {"listen", TD_OPT_OWN_STR, "127.0.0.1:0", 0, 0, NULL, offsetof(S, M.listen),                   \
     "address of the Worker service; port 0 = any"},                                               \
    {"advertise", TD_OPT_STR, "", 0, 0, NULL, offsetof(S, M.advertise),                            \
     "host that the router and peers dial; default the listen host"},                              \
    {"router", TD_OPT_STR, "127.0.0.1:7600", 0, 0, NULL, offsetof(S, M.router),                    \
     "routers' registry addresses, host:port, after commas; a name that stands for several "       \
     "addresses is all of them, looked up again every 5 s"},                                       \
    {"transfer", TD_OPT_ENUM, "auto", 0, 0, "auto|tcp|shm|rdma|cuda-ipc", offsetof(S, M.transfer), \
     "KV path; naming one refuses to fall back"},                                                  \
    {"transfer_host", TD_OPT_STR, "127.0.0.1", 0, 0, NULL, offsetof(S, M.transfer_host),           \
     "address of the KV data port"},                                                               \
    TD_KV_PORT_OPTIONS(S, M.kv_port),                                                              \
    {"kv_digest", TD_OPT_STR, "off", 0, 0, NULL, offsetof(S, M.kv_digest),                         \
     "check CRC32C of sent KV blocks: off, always, or 1/N of them"},                               \
    {"port_check_ms", TD_OPT_U64, "1000", 50, 60000, NULL, offsetof(S, M.port_check_ms),           \
     "dial the own port so often; 3 failed checks: health is not serving; 10: the process "        \
     "ends with status 1"},                                                                        \
    TD_PORT_OPTIONS(S, M.port, "1024"),                                                            \
    {"peer_timeout_ms", TD_OPT_U64, "2000", 50, 600000, NULL, offsetof(S, M.peer_timeout_ms),      \
     "a silent KV peer is dead after this"},                                                       \
    {"drain_timeout_ms", TD_OPT_U64, "30000", 0, 3600000, NULL, offsetof(S, M.drain_timeout_ms),   \
     "SIGTERM: finish for so long, then hand over"},                                               \
    {"log_level", TD_OPT_ENUM, "info", 0, 0, "debug|info|warn|error", offsetof(S, M.log.level),    \
     "least level logged"},                                                                        \
    {"log_format", TD_OPT_ENUM, "logfmt", 0, 0, "logfmt|json", offsetof(S, M.log.format),          \
     "json: each line is an object with the keys of logfmt"},                                      \
    {"metrics_listen", TD_OPT_STR, "", 0, 0, NULL, offsetof(S, M.metrics_listen),                  \
     "HTTP host:port of /metrics and /healthz; empty = off"},                                      \
    {"tls_cert", TD_OPT_STR, "", 0, 0, NULL, offsetof(S, M.tls.cert),                              \
     "certificate chain (PEM); with tls_key turns TLS on"},                                        \
    {"tls_key", TD_OPT_STR, "", 0, 0, NULL, offsetof(S, M.tls.key), "private key (PEM)"},          \
    {"tls_ca", TD_OPT_STR, "", 0, 0, NULL, offsetof(S, M.tls.ca),                                  \
     "CA that peers must be signed by (mutual TLS)"},                                              \
    {"tls_server_name", TD_OPT_STR, "", 0, 0, NULL, offsetof(S, M.tls.server_name),                \
     "name that the router's certificate must hold; empty = the host dialled"},                    \
    TD_OPTION_DECIDED("tls_client_auth", "with tls_ca callers must show a certificate of it, "     \
                                         "without they are not asked for one"),                    \
    TD_IDENTITY_OPTIONS(S, M.identity)
// clang-format on

enum td_req_state {
    TD_REQ_FREE,
    TD_REQ_GRAMMAR,   /* its grammar is being compiled (seq is on no list) */
    TD_REQ_SCHEDULED, /* with the scheduler: waits for blocks, or runs (seq->sched.list) */
    TD_REQ_IMPORT,    /* decode: blocks held, KV on its way */
    TD_REQ_SENDING,   /* prefill: computed, KV on its way out */
    TD_REQ_RETIRING,  /* ended early; a transfer has still to let go of the blocks */
    TD_REQ_OVER,      /* holds nothing; waits for the call's end */
};

enum td_mail_kind {
    TD_MAIL_NEW,
    TD_MAIL_GUIDED,
    TD_MAIL_ENDED,
    TD_MAIL_ABORT,
    TD_MAIL_CANCEL,
    TD_MAIL_STREAM_ENDED
};
struct td_req;
struct td_multiplex;
struct td_mail {
    enum td_mail_kind kind;
    struct td_req *req;             /* NEW, GUIDED, ENDED */
    struct td_multiplex *multiplex; /* CANCEL, STREAM_ENDED */
    uint64_t request;               /* ABORT; CANCEL: the call's id (both malloc'd mail) */
    uint32_t attempt;
    uint64_t session; /* ABORT: its caller's; 0 = unknown */
    struct td_mail *next;
};

/* Who asked for a request, and is sent what becomes of it: a call of the request's own, or one of
 * the calls in a stream of many (multiplex.c). */
struct td_caller {
    struct td_rpc_call *call;       /* NULL: the stream's */
    struct td_multiplex *multiplex; /* NULL: a call of its own */
    uint64_t id;                    /* in the stream */
};

/* What only a prefill worker keeps of a request. */
struct td_req_prefill {
    ProtobufCBinaryData grant; /* malloc'd copy until the op starts */
    uint32_t n_skip, n_sent;   /* blocks that decode holds already; blocks submitted (both of the
                                  sequence) */
    uint32_t n_begun; /* of blocks [n_sent, n_begun) the first begun_bytes were submitted in
                         the step that is running */
    uint64_t begun_bytes;
};

/* What only a decode worker keeps of a request. */
struct td_req_decode {
    bool local_prefill;
    bool no_wait; /* DecodeRequest's */
    uint64_t ready_ns, first_step_ns, step_us;
    uint64_t xfer_us, exposed_us, xfer_bytes; /* docs/operations.md says what they are */
    const char *xfer_path;
};

struct td_req {
    struct td_seq *seq;
    struct td_guided_seq guided;
    struct td_guided_job *guide;    /* of its grammar, until mail GUIDED is read; NULL: none */
    struct td_token_filter *filter; /* NULL: every token may come, or a grammar says which */
    struct td_caller caller;        /* its call is referenced until the req is freed */
    uint64_t session; /* td_worker_router.session of the router whose it is; 0 = unknown */
    char
        logged_name[64]; /* after req= in log lines: seq->request, and its trace_id if it has one */
    enum td_req_state state;
    /* mail ENDED, CANCEL or STREAM_ENDED was seen, or its end was sent in the stream */
    bool call_ended;
    bool finished;   /* the caller was told the end, or is gone */
    bool is_refused; /* the end was INVALID_ARGUMENT, and the router has it from here */
    bool xfer_live;  /* a slot (decode) or op (prefill) has not reached its terminal event */
    uint32_t xfer_id;
    uint64_t arrived_ns, first_run_ns;
    union { /* by the worker's role */
        struct td_req_prefill prefill;
        struct td_req_decode decode;
    };
    struct td_mail mail_new, mail_guided, mail_ended;
    struct td_req *live_prev, *live_next; /* all reqs the engine thread knows */
};

struct td_worker_role {
    const char *name; /* "prefill", "decode" */
    bool one_token;   /* Hello.one_token */
    bool grows;       /* its sequences go on to decode here (td_scheduler.grows) */
    /* [rpc thread] Looks at a DecodeRequest (decode) or PrefillRequest (prefill), and gives it to
     * td_worker_accept or td_worker_turn_away. The other one is NULL: the role does not take it. */
    void (*decode)(struct td_worker *w, const struct td_caller *caller,
                   const Tandem__V1__DecodeRequest *in);
    void (*prefill)(struct td_worker *w, const struct td_caller *caller,
                    const Tandem__V1__PrefillRequest *in);
    /* [rpc thread] Fills the role's part of a new req from the call's message, before it is posted.
     * On failure it has kept nothing. */
    td_status (*accept)(struct td_worker *w, struct td_req *r, const ProtobufCMessage *msg,
                        struct td_err *err);
    /* [engine thread] Frees what accept has kept. NULL: nothing. */
    void (*forget)(struct td_req *r);
    /* All on the engine thread. admit: the head of the queue; TD_OK moved it on, TD_ERR_AGAIN
       leaves it, else the role has finished it. */
    td_status (*admit)(struct td_worker *w, struct td_req *r);
    void (*stepped)(struct td_worker *w, struct td_req *r, const struct td_step_item *item,
                    uint64_t step_start_ns, uint64_t step_end_ns);
    void (*xfer_event)(struct td_worker *w, struct td_req *r, const struct td_xfer_event *ev);
    /* The engine is open, its thread is not. NULL: nothing to do. */
    void (*engine_opened)(struct td_worker *w);
    /* Stop the transfer of a req that ends early; its terminal event follows. */
    void (*xfer_stop)(struct td_worker *w, struct td_req *r, const char *why);
};

#define TD_WORKER_MAX_STEPS 64 /* reports in one snapshot */
#define TD_WORKER_MAX_BLOCKS 256

/* Who may call. rpc loop thread. */
struct td_worker_trust {
    struct td_identity id;
    uint8_t instance_key[TD_CLUSTER_NONCE_BYTES]; /* told to the routers that this process joins,
                                                     when there is no secret */
    struct td_log_pace pace;                      /* of log lines about strangers */
};

/* Mail from the rpc thread to the engine thread. */
struct td_worker_inbox {
    pthread_mutex_t lock;
    struct td_mail *head, **tail;
};

/* Routers that a worker joins at once. */
enum { TD_WORKER_MAX_ROUTERS = TD_KV_MAX_REPORTS };

/* What one router is told beside what all are told: of its own calls, of others' requests, and
 * what has happened since its last snapshot. */
struct td_worker_report {
    Tandem__V1__StepReport steps[TD_WORKER_MAX_STEPS];
    uint64_t added[TD_WORKER_MAX_BLOCKS], evicted[TD_WORKER_MAX_BLOCKS];
    size_t n_steps, n_added, n_evicted;
    bool reset;
    bool joined;    /* welcomed, and its stream stands */
    uint64_t seed;  /* of the router's prefix hashes; 0 = it has none */
    uint32_t epoch; /* grows with each welcome */
    uint64_t calls_taken, calls_refused, foreign_tokens, foreign_queued;
    uint32_t foreign_seqs, foreign_running;
};

/* What the routers are told: under lock, filled by the engine thread, emptied by the registry with
 * each snapshot. */
struct td_worker_told {
    pthread_mutex_t lock;
    Tandem__V1__Snapshot snap;
    struct td_worker_report reports[TD_WORKER_MAX_ROUTERS];
};

/* A router that this worker has joined, or is joining. Its place among them is that of its
 * td_worker_report, and its number in the KV pool's reports. */
struct td_worker_router {
    /* Hello.session of its present Join, 0 = none: written by the rpc loop thread. */
    _Atomic uint64_t session;
    /* rpc loop thread */
    bool has_nonces; /* of that Join: its router's calls are taken */
    struct td_join_nonces nonces;
    struct td_replay_guard replay;
    int64_t clock_ahead_us; /* our clock less the router's, of that session */
    uint64_t clock_session;
    /* engine thread */
    uint64_t counted_session, calls_taken; /* of its Prefill and Decode calls, and whose they are */
    uint32_t epoch;                        /* of td_worker_report, the last that it has begun */
};

struct td_worker {
    struct td_worker_config cfg;
    const struct td_worker_role *role;
    char name[128], address[256];
    uint64_t incarnation;
    int32_t kv_blocks; /* size of the pool: fixed at boot, so any thread may read
                          it here */
    struct td_engine *engine;
    struct td_guided *guided; /* NULL: no structured output here, and why */
    struct td_err guided_why;
    struct td_xfer *xfer;
    struct td_rpc_loop *loop;
    struct td_rpc_server *server;
    struct td_rpc_tls tls;
    bool use_tls, use_kv_tls;
    struct td_worker_trust trust;
    struct td_multiplex *multiplexes; /* rpc loop: the open ones */
    uint64_t tls_look_ns;             /* rpc loop: when the KV port's files were last looked at */
    struct td_req *reqs;              /* [max_seqs], by seq->index */

    struct td_wakeup wakeup; /* rings the engine thread */
    struct td_worker_inbox inbox;

    /* engine thread */
    pthread_t thread;
    bool thread_started;
    struct td_req *live;
    struct td_scheduler *sched;  /* the engine's: who waits, who runs */
    struct td_step_item *items;  /* [max_batch] */
    struct td_multiplex *unsent; /* streams with rows of this turn */
    uint32_t n_freed;            /* reqs, since the rows were last sent: n_live still counts them */
    uint64_t prefill_tokens, decode_tokens, steps;

    atomic_bool draining, stopping, hand_over, device_lost;
    atomic_uint n_live;           /* reqs not freed, or freed with their end not sent yet */
    _Atomic uint64_t progress_ns; /* last turn of the engine loop: health means progress */

    struct td_worker_told told;
    struct td_worker_router routers[TD_WORKER_MAX_ROUTERS];
    uint64_t last_step_ns; /* engine thread */

    struct td_ranks ranks; /* tp > 1: the other ranks' processes */
    struct td_registry *registry;
    struct td_metrics_http *metrics;
};

/* What main.c runs: prefill.c defines one, decode.c the other. */
struct td_worker_program {
    const char *name, *summary; /* "tandem-prefill"; a line for --help */
    const struct td_worker_role *role;
    struct td_worker *worker; /* zeroed: nothing open */
    const struct td_option *options;
    void *config; /* what the options fill; begins with a struct td_worker_config */
};
extern const struct td_worker_program td_worker_program;

/* A rank other than 0 (ranks.h): instead of all that follows. Returns the exit status. */
int td_worker_follow(const struct td_ranks_place *place, const struct td_worker_config *config);
/* The same on another host than rank 0's (node_rank > 0): joins node 0 first. */
int td_worker_follow_node(const struct td_worker_role *role, const struct td_worker_config *config);

/* --- the daemon's life, called by main.c in this order ---------------------------------------- */

/* Blocks signals, loads the model, opens pools, transfer, server; starts the threads and the
 * registration. */
td_status td_worker_open(struct td_worker *w, const struct td_worker_role *role,
                         const struct td_worker_config *config, struct td_err *err);
int td_worker_run(struct td_worker *w); /* until SIGTERM or SIGINT (0), or the device is
                                           lost (1): the process's exit status after drain
                                           and close */
/* Loop thread, from the registry's timer: certificates that changed serve the KV port's next
 * connections. */
void td_worker_look_at_files(struct td_worker *w, uint64_t now_ns);
void td_worker_drain(struct td_worker *w); /* unready, stop intake, finish or hand over */
void td_worker_close(struct td_worker *w); /* reverse of open; NULL fields are fine */

/* --- for roles -------------------------------------------------------------------------------- */

/* [rpc thread] Turns a call into a posted td_req, or ends it with a precise status. msg is the
 * call's message, seq its sequence (may be NULL: refused). */
void td_worker_accept(struct td_worker *w, const struct td_caller *caller,
                      const ProtobufCMessage *msg, const Tandem__V1__Sequence *seq);
/* [rpc thread] Ends a call that becomes no request. */
void td_worker_turn_away(const struct td_caller *caller, enum td_code code, const char *details);
/* [engine thread] Sends the caller a DecodeEvent (decode) or PrefillEvent (prefill). */
void td_worker_send(struct td_req *r, const ProtobufCMessage *event);
/* [engine thread] */
/* admitted: the step loop has it */
void td_worker_set_running(struct td_worker *w, struct td_req *r);
/* Ends the call (once) and gives back all it holds; a live transfer is stopped first and the
 * blocks follow at its terminal event. */
void td_worker_end(struct td_worker *w, struct td_req *r, td_status status, const char *details);
/* The same after success. */
void td_worker_finish_ok(struct td_worker *w, struct td_req *r);
/* Gives a prompt back that would be computed too late (PrefillRequest.finish_within_us). */
void td_worker_end_late(struct td_worker *w, struct td_req *r);
/* A transfer reached its terminal event: xfer_live is false; frees what waited for it. */
void td_worker_xfer_over(struct td_worker *w, struct td_req *r);
/* Fills a proto TokenOut for item's token; storage in *lp and tops[TD_MAX_TOP_LOGPROBS] + ptrs. */
struct td_token_out {
    Tandem__V1__TokenOut msg;
    Tandem__V1__Logprobs lp;
    Tandem__V1__TokenLogprob tops[TD_MAX_TOP_LOGPROBS];
    Tandem__V1__TokenLogprob *top_ptrs[TD_MAX_TOP_LOGPROBS];
};
void td_token_out_fill(struct td_token_out *o, const struct td_seq *seq,
                       const struct td_sampled *s);

/* Proto PromptLogprobs of some of an item's scored tokens, with their storage. */
enum { TD_SCORED_OUT_MAX = 64 };
struct td_scored_out {
    Tandem__V1__PromptLogprobs msg;
    Tandem__V1__PromptLogprob tokens[TD_SCORED_OUT_MAX], *token_ptrs[TD_SCORED_OUT_MAX];
    Tandem__V1__TokenLogprob tops[TD_SCORED_OUT_MAX][TD_MAX_TOP_LOGPROBS];
    Tandem__V1__TokenLogprob *top_ptrs[TD_SCORED_OUT_MAX][TD_MAX_TOP_LOGPROBS];
};
/* From item->scored[from] on; returns how many, 0 = no more. */
int32_t td_scored_out_fill(struct td_scored_out *o, const struct td_step_item *item, int32_t from);

#endif
