/* router.h - the router daemon: the I/O around router/core. One loop thread owns everything in this
 * file's structs. README.md says what each file is for. */
#ifndef TD_ROUTER_H
#define TD_ROUTER_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "common/base/file_stamp.h"
#include "common/base/options.h"
#include "common/base/sampling.h"
#include "common/base/traceparent.h"
#include "common/rpc/rpc.h"
#include "common/rpc/identity.h"
#include "common/rpc/port.h"
#include "router/client.h"
#include "router/core/core.h"
#include "router/late.h"
#include "router/objectives.h"
#include "router/served_model.h"
#include "router/shares.h"
#include "router/tenant_rates.h"
#include "router/tenants.h"
#include "tandem/v1/inference.pb-c.h"
#include "tandem/v1/worker.pb-c.h"

#define TD_PROTOCOL_VERSION 1
#define ROUTER_MAX_STOP_STRINGS 16
#define ROUTER_MAX_STOP_BYTES 1024
/* (prompt tokens) x (1 + alternatives) of one request: about 20 MiB of JSON */
#define ROUTER_MAX_PROMPT_LOGPROBS 262144

/* What the options say (router_options: their names, limits and meaning). Text is "" where nothing
 * is said. */
struct router_config {
    struct {
        const char *specs, *dir, *served_name, *latency_table;
        int64_t max_len; /* tokens; 0 = what model and workers allow */
    } models;
    struct { /* what goes into every model's td_core_config */
        const char *mode, *policy, *slo_class;
        double attainment;
        int64_t max_requests, max_queued;
        uint64_t worker_timeout_ms, queue_timeout_ms, stall_ms, max_failovers, prefix_entries,
            hybrid_local_tokens;
    } core;
    struct {
        const char *listen, *cors_origins, *page;
        uint64_t request_ms, send_bytes, behind_bytes;
    } http;
    struct {
        const char *cert, *key, *ca, *server_name, *operator_names;
    } tls;
    struct { /* what an operator sees */
        const char *log_level, *log_format, *decision_log, *metrics_listen, *metrics_alias,
            *otlp_endpoint;
        uint64_t trace_sample;
    } observe;
    struct { /* grammars of structured output */
        const char *gate;
        uint64_t wait_ms;
    } guides;
    struct td_identity_config identity;
    struct td_port_config port;
    const char *listen, *worker_listen, *tenants, *multiplex;
    uint64_t max_message_bytes, max_calls_bytes, client_stall_ms, port_check_ms, drain_timeout_ms,
        drain_linger_ms;
};
extern const struct td_option router_options[];

/* Keeps text back while it may be the start of a stop string. */
struct stop_matcher {
    char *strings[ROUTER_MAX_STOP_STRINGS];
    size_t bytes[ROUTER_MAX_STOP_STRINGS];
    size_t n;
    char *held; /* text not yet given out */
    size_t n_held, capacity;
    int matched;      /* index of the string that ended the output, or -1 */
    bool gives_match; /* what ends the output is given out, too */
};

struct router;
struct worker_conn;
struct join;
struct model_load;
struct guide_job;

enum leg_kind { LEG_PREFILL, LEG_DECODE };
/* One call to a worker, of its own or in the worker's stream (multiplex.c). Lives until its end;
 * a call of its own is detached (request == NULL) when the request no longer wants it. */
struct leg {
    struct router *router;
    struct request_state *request;
    struct worker_conn *worker;
    struct td_rpc_call *call;    /* NULL: in the stream */
    struct multiplex *multiplex; /* NULL: a call of its own */
    uint64_t call_id;            /* in the stream */
    enum leg_kind kind;
    uint32_t request_at, attempt;
    uint64_t id;
    bool local, finished_seen; /* finished: decode's last token, prefill's first
                                  token and then its done */
    bool first_seen;
    bool held_end;                /* decode: its call has ended OK, with tokens held */
    bool sender_finished;         /* decode: it said so */
    uint64_t sent_bytes, sent_us; /* prefill: what its done said */
};

/* What the client asked for. Fixed once the request is taken in. */
struct request_ask {
    uint64_t max_tokens;
    Tandem__V1__SamplingSpec spec; /* its arrays are owned by this struct */
    Tandem__V1__LogitBias *bias_store;
    Tandem__V1__TokenIds *word_store; /* that spec.bad_words points into */
    uint8_t *guided_bytes;            /* that spec.guided_texts points into */
    bool return_token_ids, want_logprobs;
    size_t n_stops; /* of spec.stop_token_ids: the client's, then the model's own */
    bool no_output; /* of the prompt alone: the token that is made with it is told to nobody */
    struct td_prefix_salt salt; /* of its prefix chain; zero = none */
};

/* What the client was sent, and what may still be sent. */
struct request_output {
    struct td_detokenizer *detok;
    struct stop_matcher stop;
    struct answer *answer; /* NULL: everything is text */
    struct late late;      /* not sent yet: the client is behind */
    bool greeted;          /* a message was made: it has what only the first one has */
    bool first_sent, text_lost;
    bool done;        /* the last token is there */
    uint32_t n_chars; /* want_logprobs: characters of text that the tokens so far are */
    /* A stream that goes on: so many output tokens are the client's, and stand in tokens[]. All but
     * the last are part of the sequence when it begins; the last is computed again, and differs if
     * it comes out as another. */
    uint32_t n_resumed;
    bool differs;
    uint32_t n_scored; /* prompt tokens whose log-probabilities were sent, the first included */
    Tandem__V1__FinishReason finish;
    int32_t stop_token; /* the stop token that ended it, or -1 */
    uint64_t first_ns, last_ns;
    uint32_t first_attempt;             /* that made the first token */
    uint64_t decode_sent_ns, ticket_ns; /* of that attempt */
};

/* What the current attempt has of its prefill worker. */
struct request_prefill {
    struct leg *leg;        /* NULL = none is open */
    char name[128];         /* the worker's */
    uint32_t cached_tokens; /* of the prompt, found in its cache */
};

/* What the current attempt has of its decode worker. */
struct request_decode {
    struct leg *leg; /* NULL = none is open */
    char name[128];  /* the worker's */
    uint64_t sent_ns, ticket_ns;
    uint8_t *grant; /* of its ticket, for the prefill worker */
    size_t grant_bytes;
    uint32_t cached_tokens;   /* of the prompt, which its ticket says that it holds already */
    struct held_tokens *held; /* came before the prompt's log-probabilities; the oldest first */
    char path[16];            /* by which the KV came */
};

/* A prompt as tokens, of which each choice begins. */
struct router_prompt {
    struct td_token_list list; /* the holder frees it */
    uint32_t choice;           /* the one that begins */
    bool in_reasoning;         /* it ends inside the model's reasoning */
};

/* The trace that a request belongs to. */
struct request_trace {
    struct td_traceparent at;
    bool has_id, is_on, has_parent; /* at is set; its spans are told; at is a caller's */
};

/* One request of a client, at the place that the core knows it by. */
struct request_state {
    struct client_work work;
    bool live;
    struct served_model *model;
    struct tenant_use *use;  /* of its key or tenant; NULL: no rate */
    bool started;            /* the core was told */
    struct guide_job *guide; /* of its grammar, which is not compiled yet; NULL: not waited for */
    struct request_state *guide_next; /* among those who wait for it */
    bool starts_with_guide;           /* nothing else is waited for */
    struct td_ev_request event;       /* what it is told, without the prompt's hashes */
    uint32_t request_at, attempt;
    uint64_t id;     /* the core's and the log's: it counts up, and nobody outside is told */
    uint64_t number; /* random: what workers know the request by */
    uint64_t key;    /* the core's, for the workers' queues */
    char name[ROUTER_REQUEST_ID_BYTES]; /* the client's request id, or ours */
    char logged_name[520];              /* the same, quoted for the log: it is the client's text */
    char last_error[512];               /* of a leg: the reason is never discarded */
    struct router_client client;        /* ops is NULL until the request is taken in */
    uint64_t arrived_ns;
    int32_t *tokens; /* prompt + output; capacity n_prompt + ask.max_tokens */
    uint32_t n_tokens, n_prompt;
    struct request_ask ask;
    struct request_output output;
    struct request_prefill prefill;
    struct request_decode decode;
    Tandem__V1__Ledger ledger;
    struct request_trace trace;
};

struct worker_conn {
    struct router *router;
    struct served_model *model;
    bool used, gone, draining;
    uint32_t index, n_legs;
    struct join *join;            /* its registry stream; NULL = gone */
    struct td_join_nonces nonces; /* of its Join: what proofs of calls to it are made of */
    uint64_t n_proofs;            /* counter of the last */
    struct td_rpc_channel *channel;
    bool takes_multiplex;        /* its hello said so */
    struct multiplex *multiplex; /* the open stream of calls, or NULL */
    char name[128], role_name[16], address[256], version[64], kernels[128];
    char logged_name[520], logged_address[1030]; /* the same, quoted for the log: they are what
                                                    the worker says */
    char transfer[16], kv_tls[8];                /* of its hello: what of its KV port must agree */
    char kv_dtype[8];                            /* which layout_hash covers; "" = unknown */
    enum td_core_role role;
    uint64_t session;   /* of its hello: told with each request */
    uint32_t n_routers; /* that it has, by its last snapshot; 0 = 1 */
    uint64_t incarnation, layout_hash, kv_bytes_per_token;
    uint32_t block_size, kv_blocks, max_model_len, pid, tp;
    Tandem__V1__Snapshot snap;
    uint64_t snap_ns, rate_ns, rate_prefill_total, rate_decode_total;
    double prefill_rate, decode_rate;
};

/* Of what no model has a part in. */
struct router_metrics {
    struct td_metric *tenants_unknown, *tenants_denied, *failed;
};

/* A worker that was not taken in, until it is. Who has not proved to be a worker of this cluster
 * takes no place from one who has, and says nothing in its name. */
enum { ROUTER_MAX_REFUSALS = 8 };
struct router_refusal {
    char name[128], reason[300]; /* UTF-8 */
    bool is_proved;              /* by the cluster secret, or a certificate */
    uint32_t pid, times;         /* times 0: free */
    uint32_t times_for_good;     /* of them: what no further try mends */
    uint64_t last_ns;
};

/* The model below model_dir that is being read, on a thread of its own. */
struct router_loading {
    struct model_load *model; /* NULL = none; loop thread */
    pthread_mutex_t lock;     /* of the rest */
    pthread_cond_t ended;     /* n is 0: router_close waits for it */
    uint32_t n;
    bool stopped;
};

/* Registry streams that are not a worker's yet. */
struct router_joining {
    struct join *first, **end; /* the oldest first */
    uint32_t n;
    struct router_refusal refusals[ROUTER_MAX_REFUSALS]; /* for the status */
    struct td_log_pace reject_pace, unreachable_pace;
};

struct router_tenancy {
    struct tenant_use *uses;      /* of all that ever had a rate */
    struct router_tenants *known; /* NULL: a tenant is what the client says. Changed by the loop,
                                     with the lock; read by others with it */
    pthread_mutex_t lock;
    struct td_file_stamp stamp; /* of the file as it was last read, or tried */
    uint64_t seen_ns;           /* when it was last looked at */
    struct td_log_pace pace;    /* of log lines about calls that were refused; with the lock */
};

/* Hashes of prompts, which the core compares with what workers hold. */
struct router_prefixes {
    uint64_t seed;
    uint64_t hashes[TD_CORE_MAX_HASHES]; /* of the request being taken */
    uint64_t *all;                       /* [max_all], grown to max_len / block size: scratch */
    size_t max_all;
};

/* The places for requests. */
struct router_pool {
    struct request_state *at; /* [max_requests] */
    uint32_t *free, n_free;   /* indices of at */
    uint64_t next_id;
    struct router_shares shares; /* of the places, by served_model.index */
};

/* The loop's regular tick. */
struct router_tick {
    struct td_rpc_timer *timer;
    uint64_t at_ns, cpu_ns; /* the last one, and this thread's CPU time then */
};

struct router {
    struct router_config cfg;
    struct served_model *models[ROUTER_MAX_MODELS]; /* loop thread, once there is one */
    uint32_t n_models;
    bool may_serve_several; /* by the options: metrics have a label, a worker must say its model */
    struct router_loading loading;
    struct router_guides *guides; /* grammars, and who waits for one */
    struct td_rpc_loop *loop;
    struct td_rpc_server *server; /* clients; workers too unless worker_server is there */
    struct td_rpc_server *worker_server;
    struct td_rpc_tls tls;
    bool use_tls;
    struct td_identity id;
    struct td_peer_names *operators; /* NULL = not told */
    uint8_t status_key[32];          /* of the challenges that Status gives out */
    struct router_joining joining;
    struct router_tenancy tenancy;
    struct router_tick tick;
    struct td_core_config core_cfg; /* of every model's core, but for the thetas */
    struct router_prefixes prefixes;
    struct td_port_seen port_seen;
    struct td_core_action *actions; /* TD_CORE_MAX_ACTIONS_PER_EVENT */
    uint64_t started_ns, incarnation;
    struct router_pool pool;
    struct worker_conn workers[TD_CORE_MAX_WORKERS];
    atomic_uint n_live;
    atomic_bool draining;
    bool handed_over;  /* loop thread: the drain's time is over */
    atomic_bool ready; /* as of the last tick: requests for some model can be placed */
    struct td_metrics_http *metrics_http;
    struct trace_export *trace_export; /* NULL = no endpoint is given */
    uint64_t n_untraced;               /* requests that came without a traceparent */
    struct router_http *http;          /* NULL = no HTTP port */
    struct router_metrics metrics;
};

/* router.c: the daemon's life. */
td_status router_open(struct router *r, const struct router_config *config, struct td_err *err);
int router_run(struct router *r); /* 0 = asked to stop; 1 = its port is deaf, nothing can be
                                     drained */
void router_drain(struct router *r);
void router_close(struct router *r);

/* guided.c: what the output must be, by `guided` or by a tool that must be called, into ask->spec,
 * whose arrays the caller frees. in_reasoning: the prompt ends inside the model's thoughts. */
td_status router_guided_fill(const struct served_model *m, struct request_ask *ask,
                             const Tandem__V1__GenerateRequest *in, bool in_reasoning,
                             struct td_err *err);
bool router_must_call(const Tandem__V1__GenerateRequest *in); /* the answer is a tool call */

/* token_filter.c: allowed_token_ids and bad_words into ask->spec. free: what it has put there, also
 * after an error. */
td_status router_token_filter_fill(const struct served_model *m, struct request_ask *ask,
                                   const Tandem__V1__GenerateRequest *in, struct td_err *err);
void router_token_filter_free(struct request_ask *ask);

/* guides.c: grammars, compiled on a thread. Loop thread but for open, stop and free. */
td_status router_guides_open(struct router *r, struct td_err *err);
void router_guides_stop(struct router *r); /* while the loop runs: nothing is posted afterwards */
void router_guides_free(struct router *r);
void router_guides_tick(struct router *r, uint64_t now_ns); /* refuses who has waited too long */
/* q's grammar, if it has one, is compiled or waited for (q->guide). TD_ERR_AGAIN: too many are. */
td_status router_guide_ask(struct router *r, struct request_state *q, struct td_err *err);
void router_guide_forget(struct router *r, struct request_state *q);

/* models.c: which models there are. */
td_status router_models_open(struct router *r, struct td_err *err); /* those of the options */
/* Before the loop ends: no more models come. */
void router_models_stop(struct router *r);
void router_models_close(struct router *r);
/* The model of that name or alias, "" = the only one. TD_ERR_NOT_FOUND, and TD_ERR_INVALID for ""
 * where there are several, list what there is. Loop thread. */
td_status router_find_model(const struct router *r, const char *name,
                            struct served_model **ret_model, struct td_err *err);
/* The model that a worker's hello is of. TD_INPROGRESS: none yet, and router_model_load may find it
 * below model_dir. Any other: it cannot join, and *err says why. */
td_status router_model_of_hello(const struct router *r, const Tandem__V1__Hello *h,
                                struct served_model **ret_model, struct td_err *err);
/* Reads the model of that name below model_dir on a thread, one model at a time, and calls
 * join_model_loaded when it is there or cannot be. Nothing when it is being read. */
td_status router_model_load(struct router *r, const char *name, struct td_err *err);

/* trace.c: spans of requests. Loop thread but for open. */
td_status trace_open(struct router *r, struct td_err *err);
void trace_begin(struct router *r, struct request_state *q); /* its client is known */
/* Once, before q is freed. OK: its ledger is closed. */
void trace_end(struct router *r, const struct request_state *q, enum td_code code);

/* inference.c */
extern const struct td_rpc_method inference_methods[];
void inference_update_limits(const struct router *r); /* of ids in a message, by the longest
                                                         sequence */
/* Takes requests in that differ in their prompts alone, or finishes the client's call with why not.
 * in[n_in] is borrowed for the call, n_in >= 1. */
void inference_generate(struct router *r, struct router_client client,
                        const Tandem__V1__GenerateRequest *const *in, size_t n_in);
/* Its parts, for choices.c. prompt is empty before; the caller frees its list, also on errors. */
td_status inference_prompt(const struct served_model *m, const Tandem__V1__GenerateRequest *in,
                           const struct router_tenant *who, struct router_prompt *prompt,
                           struct td_err *err);
/* Tokens that the client has been told of. */
static inline uint32_t request_n_output(const struct request_state *q)
{
    return q->ask.no_output ? 0 : q->n_tokens - q->n_prompt;
}
/* Fills a free request and attaches it to the client; there must be one. On an error the client's
 * call is not finished. */
td_status inference_take(struct router *r, struct served_model *m, struct router_client client,
                         const Tandem__V1__GenerateRequest *in, const struct router_tenant *who,
                         const struct router_prompt *prompt, uint64_t arrived_ns,
                         struct request_state **ret_request, struct td_err *err);
/* Tells the core, once the request's grammar is compiled: from now on the request may end at any
 * time. */
void inference_start(struct router *r, struct request_state *q);
/* Ends a request of which the core was not told. */
void inference_refuse(struct router *r, struct request_state *q, enum td_code code,
                      const char *why);
/* What a caller is told before its request is read: one that may not use the API at all, or whose
 * tenant was told to wait and does not (is_limited: the call would count for its rates).
 * *ret_wait_ms is 0 but for that. Nothing of `client` is asked but who it is. TD_CODE_OK: it may.
 * [any thread] */
enum td_code inference_refuse_early(struct router *r, struct router_client client, bool is_limited,
                                    uint32_t *ret_wait_ms, struct td_err *err);
/* on_open of methods with large requests: a stranger's call ends before its request is read; that
 * of a tenant above its rates, too. */
void inference_on_open(struct td_rpc_call *call, void *router);
void inference_on_open_limited(struct td_rpc_call *call, void *router);
/* It is refused for now, or did not begin: where none of its output has been made, its tenant has
 * used no tokens. It has had a request, which bounds how many prompts a client has read for
 * nothing. */
void request_give_back(struct request_state *q);
/* Whether the caller may use the API at all; the call is finished when not. */
bool inference_may_call(struct router *r, struct router_client client);
/* list is empty before; the caller frees it. in->model is not looked at. */
td_status inference_tokenize(const struct served_model *m, const Tandem__V1__TokenizeRequest *in,
                             struct td_token_list *list, struct td_err *err);
/* The text of tokens, special ones included; *ret_text is malloc'd. */
td_status inference_detokenize(const struct served_model *m, const int32_t *ids, size_t n,
                               char **ret_text, size_t *ret_bytes, struct td_err *err);
/* Whether the caller of a door without a cluster secret is told everything about the workers: by a
 * certificate of a member or an operator, or as a tenant that is one. False: it may not call, and
 * has been answered. */
bool inference_may_see_all(struct router *r, struct router_client client, bool *ret_all);
/* Shows the status to take(), for the call alone. all: not only each worker's role and state.
 * False: no memory. */
bool inference_status(struct router *r, bool all,
                      void (*take)(void *ctx, const Tandem__V1__StatusResponse *status), void *ctx);
/* The drain's time is over: every request that is left ends UNAVAILABLE, behind all that was made
 * for it, so that its client can go on elsewhere. Posted to the loop. */
void inference_hand_over(void *router);
/* The client has gone away: both legs of each of its requests are cancelled, they are freed. */
void inference_cancel(struct router *r, struct client_work *w);
/* The client has taken what was sent to it: it gets what was kept meanwhile. */
void inference_caught_up(struct router *r, struct client_work *w);
void request_complete(struct router *r, struct request_state *q);
/* What the client of a stream that goes on has is not what is computed here: ends the request. */
void request_refuse_resumed(struct router *r, struct request_state *q);
void request_fail(struct router *r, struct request_state *q, const struct td_core_action *a);

/* choices.c: several prompts, and several choices of each, as one call. */

#define ROUTER_MAX_CHOICES 128 /* sampling.n and sampling.best_of */

/* How many requests the call becomes. */
td_status choices_count(const struct router *r, const Tandem__V1__GenerateRequest *const *in,
                        size_t n_in, size_t *ret_n, struct td_err *err);
/* Begins them; on an error the call is not finished and nothing of it is left. */
td_status choices_generate(struct router *r, struct served_model *m, struct router_client client,
                           const Tandem__V1__GenerateRequest *const *in, size_t n_in,
                           const struct router_tenant *who, uint64_t now_ns, struct td_err *err);

/* legs.c */
void leg_start_decode(struct router *r, struct request_state *q, const struct td_core_action *a);
void leg_start_prefill(struct router *r, struct request_state *q, const struct td_core_action *a);
void leg_cancel(struct leg **leg);
void leg_drop_held(struct request_state *q); /* tokens that waited for the prompt's logprobs */
/* What came down the stream of a leg's worker. Each may end the request, which frees the leg. */
void leg_row(struct leg *l, const Tandem__V1__MultiplexRow *row);
/* The leg's call has ended; frees the leg. */
void leg_end(struct leg *l, enum td_code code, const char *details);

/* multiplex.c: the calls to one worker in one stream. Loop thread. */

/* Sends the call, of which the caller has set the kind and the message; l->multiplex and l->call_id
 * are set. False: the worker does not take such streams, or the message is too long for one. */
bool multiplex_call(struct leg *l, Tandem__V1__MultiplexCall *call);
/* Nothing more is heard of the leg. */
void multiplex_cancel(struct leg *l);
/* The worker is gone: ends the stream. */
void multiplex_close(struct worker_conn *w);

/* answer.c: a chat's answer in fields: text, reasoning, tool calls. Owned by the loop thread. */

/* NULL: no memory. */
struct answer *answer_create(struct td_output_format format, bool begins_in_reasoning,
                             const char *request_id);
void answer_keep_one_call(struct answer *a); /* calls after the first are left out */
void answer_free(struct answer *a);
/* Takes text and, with `end`, the end of the output. What is complete but for the last field goes
 * to the client in messages of its own, by late_send; the last is put into *m, borrowed until the
 * next call. */
void answer_take(struct answer *a, struct late *late, struct router_client client, const char *text,
                 size_t n_bytes, bool end, Tandem__V1__GenerateResponse *m);
bool answer_has_calls(const struct answer *a);

/* output.c */
td_status stop_matcher_add(struct stop_matcher *m, const void *text, size_t n_bytes,
                           struct td_err *err);
/* Appends new text; *ret_text[0..*ret_bytes) may be given out now (borrowed until the next
 * call); true when a stop string matched. */
bool stop_matcher_push(struct stop_matcher *m, const char *text, size_t n_bytes,
                       const char **ret_text, size_t *ret_bytes);
void stop_matcher_flush(struct stop_matcher *m, const char **ret_text, size_t *ret_bytes);
void stop_matcher_free(struct stop_matcher *m);
/* Takes tokens of a leg into the request's output: drops what it has, appends the next, sends
 * text. TD_ERR_CORRUPT when a worker's token contradicts what was already sent (I1 broken) or
 * leaves a gap. */
td_status output_take(struct request_state *q, Tandem__V1__TokenOut *const *out, size_t n);
/* A stream that goes on: runs the tokens that the client has, but for the last, through text, stop
 * strings and answer. TD_ERR_INVALID: the output would have ended within them. */
td_status output_replay(struct request_state *q);
/* How many output tokens were there before anything was computed. */
uint32_t output_n_replayed(const struct request_state *q);
/* The log-probabilities of the prompt's tokens, when the client asked for them: the first token, of
 * which there is none. */
void output_begin_prompt(struct request_state *q);
/* The next ones go to the client; what an earlier attempt has told is dropped. TD_ERR_CORRUPT: of
 * other tokens than the prompt's, or after a gap. */
td_status output_take_prompt(struct request_state *q, const Tandem__V1__PromptLogprobs *p);
/* They come before any token, and are not all there. */
bool output_waits_for_prompt(const struct request_state *q);

/* join.c */
extern const struct td_rpc_method registry_methods[];
void join_tick(struct router *r, uint64_t now_ns);      /* streams that say nothing are ended */
void join_lose_worker(struct join *j, const char *why); /* its worker is gone: nothing more is
                                                           taken from the stream, which ends */
/* A model was read below model_dir, or why not: streams that wait for it go on. */
void join_model_loaded(struct router *r, const char *name, td_status status, const char *why);
struct td_rpc_call *join_call(const struct join *j);
/* Metadata of a call to w: 1 when a cluster secret is in use, else 0. text holds the value. */
size_t worker_proof(struct worker_conn *w, const char *path, uint64_t request, uint32_t attempt,
                    char text[TD_CALL_PROOF_MAX], struct td_rpc_metadata *ret_metadata);

/* fleet.c */
void worker_conn_release(struct worker_conn *w); /* a leg ended */
/* Whether such a worker can join now. dialled: its address was dialled back, and this very
 * process answered. *ret_model: whose it is; NULL = of a model that router_model_load may find. */
td_status fleet_hello_check(const struct router *r, const Tandem__V1__Hello *h, bool dialled,
                            struct served_model **ret_model, struct td_err *err);
td_status fleet_channel(struct router *r, const char *address, struct td_rpc_channel **ret_channel,
                        struct td_err *err);
/* Takes the worker in and welcomes it; a former self of it is gone then. channel: to its
 * address, taken over; NULL = made here. NULL and *err: it cannot be. */
struct worker_conn *fleet_join(struct served_model *m, struct join *j, const Tandem__V1__Hello *h,
                               const struct td_join_nonces *nonces, struct td_rpc_channel *channel,
                               struct td_err *err);
void fleet_snapshot(struct worker_conn *w, const Tandem__V1__Snapshot *s);
void fleet_drain(struct worker_conn *w, uint64_t timeout_ms);
void fleet_gone(struct worker_conn *w, const char *why);
uint32_t fleet_block_size(const struct served_model *m); /* of the workers that are there: one
                                                            layout, one size; 0 = nobody */
/* What out's lists point into. */
struct fleet_status_store {
    Tandem__V1__WorkerStatus workers[TD_CORE_MAX_WORKERS], *worker_ptrs[TD_CORE_MAX_WORKERS];
    Tandem__V1__ModelStatus models[ROUTER_MAX_MODELS], *model_ptrs[ROUTER_MAX_MODELS];
    char *aliases[ROUTER_MAX_MODELS][ROUTER_MAX_MODEL_NAMES];
    struct fleet_class_store {
        Tandem__V1__ClassStatus classes[TD_CORE_MAX_CLASSES], *ptrs[TD_CORE_MAX_CLASSES];
    } classes[ROUTER_MAX_MODELS];
    Tandem__V1__RefusedWorker refused[ROUTER_MAX_REFUSALS], *refused_ptrs[ROUTER_MAX_REFUSALS];
};
void fleet_status(struct router *r, Tandem__V1__StatusResponse *out,
                  struct fleet_status_store *store);

#endif
