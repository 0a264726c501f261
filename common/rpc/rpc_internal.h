/* rpc_internal.h - what the files of common/rpc share, and nobody else includes.
 *
 * Every grpc operation is tagged with a struct td_rpc_event embedded in the object that it belongs
 * to; the loop thread takes the event from the completion queue and calls its fn. A field's comment
 * says who may touch it: "loop" = the loop thread, "mu" = under td_rpc_loop.mu. */
#ifndef TD_RPC_INTERNAL_H
#define TD_RPC_INTERNAL_H

#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpc/slice.h>
#include <pthread.h>
#include <stdatomic.h>

#include "common/base/sanitizers.h"
#include "common/rpc/accept.h"
#include "common/rpc/peers.h"
#include "common/rpc/rpc.h"
#include "common/rpc/unpack.h"

/* Annotations for TSan: gRPC is not instrumented, so TSan cannot see that starting an operation
 * happens before its event. */
#ifdef TD_WITH_TSAN
void __tsan_acquire(void *addr);
void __tsan_release(void *addr);
#define td_rpc_tag_acquire(tag) __tsan_acquire(tag)
#define td_rpc_tag_release(tag) __tsan_release(tag)
#else
#define td_rpc_tag_acquire(tag) ((void)(tag))
#define td_rpc_tag_release(tag) ((void)(tag))
#endif

#define td_rpc_container(ptr, type, member) ((type *)(void *)((char *)(ptr)-offsetof(type, member)))

enum {
    TD_RPC_DEFAULT_MESSAGE_BYTES = 64 << 20,
    TD_RPC_DEFAULT_CALLS_BYTES = 256 << 20,
    TD_RPC_READ_BYTES = 256 << 10, /* bytes read from a connection at once */
    TD_RPC_DEFAULT_LIVE_CALLS = 4096,
    /* calls of health and reflection, which are answered even when the live calls are at their
     * limit */
    TD_RPC_MAX_BUILTIN_CALLS = 1024,
    TD_RPC_DEFAULT_QUEUED_BYTES = 16 << 20,
    TD_RPC_DEFAULT_STALL_MS = 60000,
    TD_RPC_MAX_METADATA_BYTES = 16 << 10,
    /* core percent-encodes this to at most three times as much, which fits the peer's 8 KiB */
    TD_RPC_MAX_DETAILS_BYTES = 2048,
    TD_RPC_HANDSHAKE_MS = 10000,
    TD_RPC_SERVER_KEEPALIVE_MS = 10000,
    /* the time that a stopping server gives its watchers to be told */
    TD_RPC_STOP_BUILTIN_MS = 500,
    /* the time that it gives the last call's bytes to leave the kernel */
    TD_RPC_STOP_FLUSH_MS = 100,
    TD_RPC_CHANNEL_KEEPALIVE_MS = 1000,
    /* The default of TLS handshakes in progress at once: each holds about 100 KiB, and takes
     * milliseconds of CPU. */
    TD_RPC_MAX_HANDSHAKES = 256,
    TD_RPC_MAX_CONNECTIONS = 16384, /* the default of one server: about 20 KiB each, so 320 MiB */
    /* descriptors kept for other things than connections: channels, KV connections, files */
    TD_RPC_RESERVED_FDS = 512,
    TD_RPC_MAX_MERGED = 64,             /* messages in one, where a call merges them ... */
    TD_RPC_MAX_MERGED_BYTES = 64 << 10, /* ... unless the first alone has more */
    TD_RPC_PROBE_TURNS = 20,    /* a probe fails after this many turns of a tenth of its period */
    TD_RPC_PROBE_UNHEALTHY = 3, /* this many failures in a row: health says not serving */
    TD_RPC_PROBE_DEAF = 10,     /* this many failures in a row: td_rpc_server_is_deaf */
};

struct td_rpc_event {
    void (*fn)(struct td_rpc_event *event, bool ok);
};

struct td_rpc_post {
    struct td_rpc_post *next;
    void (*fn)(void *arg);
    void *arg;
};

struct td_rpc_loop {
    grpc_completion_queue *cq;
    pthread_t thread;
    char name[16];
    /* a lame channel: its call only carries the empty batches that wake the loop */
    grpc_channel *bell_channel;
    grpc_call *bell;
    struct td_rpc_event bell_event;
    atomic_bool rung; /* set by the thread that rings, cleared by the loop before it drains */
    /* Held by the loop's thread but while it waits for an event, and by a caller of
     * td_rpc_loop_run: whoever holds it is "the loop thread" of all comments. Taken before mu. */
    pthread_mutex_t turn;
    uint64_t wake_ns; /* turn: until when the loop's thread waits */

    pthread_mutex_t mu;
    struct td_rpc_post *post_head, **post_tail;   /* mu */
    struct td_rpc_call *dirty_head, **dirty_tail; /* mu: calls with something to send, finish
                                                     or cancel; one reference each */
    struct td_rpc_timer *timers;                  /* mu */
    struct td_rpc_timer *running;                 /* mu */
    bool stopping;                                /* by mu: destroy has been called */

    struct td_rpc_unpacker unpacker; /* loop: memory of the message being handled */
    atomic_uint n_objects;           /* servers, channels and live calls: the
                                        queue is open until there are none */
};

/* Wakes the loop thread. Does nothing on the loop thread itself, which drains after each event.
 * [any] */
void td_rpc_loop_ring(struct td_rpc_loop *loop);
void *td_rpc_alloc(size_t bytes); /* zeroed; aborts when memory is gone */
char *td_rpc_strdup(const char *text);

/* One message to send; lives in the call's queue. */
struct td_rpc_out {
    struct td_rpc_out *next;
    grpc_slice slice;
    size_t bytes;
};

/* What users of a call have asked for, from any thread; the loop's mu guards it. */
struct td_rpc_call_asked {
    struct td_rpc_out *out_head, **out_tail;
    size_t queued_bytes; /* queued and in flight */
    struct td_rpc_call *next_dirty;
    bool dirty;
    bool end_wanted; /* finish (server) or close_send (client) when the queue is empty */
    bool cancel_wanted;
    enum td_code cancel_code;
    char *cancel_details;
    enum td_code end_code; /* server, with end_wanted, as the next three */
    char *end_details;
    grpc_metadata *trailing;
    size_t n_trailing;
};

/* The server's part of a call; loop, but for began_ns, which never changes. */
struct td_rpc_call_as_server {
    struct td_rpc_server *server;
    const struct td_rpc_method *method; /* NULL: the call is being refused */
    void *ctx;
    uint64_t began_ns;
    bool builtin, counted, opened, got_message;
    struct td_rpc_peer *of_peer; /* the peer that counts this call, or NULL */
    int recv_cancelled;
    grpc_metadata_array request_metadata;
    struct td_rpc_metadata *metadata;           /* copies as C strings, made when first asked for */
    struct td_rpc_call *next_live, **prev_live; /* links of server->live */
};

/* The client's part of a call; loop. */
struct td_rpc_call_as_client {
    struct td_rpc_channel *channel;
    const struct td_rpc_client_method *method;
    const struct td_rpc_handler *handler;
    bool started, wait_for_ready, initial_received;
    grpc_metadata *initial; /* to send */
    size_t n_initial;
    grpc_metadata_array recv_initial, recv_trailing;
    grpc_status_code status; /* as gRPC gives it */
    grpc_slice status_details;
    char *failure; /* our own reason to fail a response; replaces the status */
};

/* Life of a call: new -> (client: begin) -> batches -> closed (server: RECV_CLOSE, client:
 * RECV_STATUS) -> every tag is back -> ended: last callback. The owner's reference is dropped with
 * the last callback; the loop's dirty list and users may hold more. */
struct td_rpc_call {
    struct td_rpc_loop *loop;
    atomic_uint n_refs;
    atomic_bool over; /* the call is closed: nothing can be sent, and every request is ignored */
    bool is_server;
    uint64_t deadline_ns; /* TD_NEVER_NS = none */
    void *user;           /* loop */
    uint32_t max_queued_bytes;
    struct td_rpc_call_asked asked; /* mu */

    grpc_call *call; /* loop, as all fields below */
    uint32_t n_tags; /* operations whose tags are not back yet */
    bool merged;     /* messages that wait are sent as one */
    bool initial_sent, send_busy, end_sent, cancel_done, closed, ended, peer_cancelled;
    size_t inflight_bytes;
    uint64_t send_started_ns; /* when the message in flight was given to core */
    struct td_rpc_event ev_close, ev_recv, ev_send;
    grpc_byte_buffer *recv_buffer;
    char *peer;
    struct td_rpc_call_as_server as_server;
    struct td_rpc_call_as_client as_client;
};

struct td_rpc_call *td_rpc_call_new(struct td_rpc_loop *loop, bool is_server,
                                    uint32_t max_queued_bytes);
/* Client: takes the first message (or NULL) and whether it is also the last, and rings, which
 * begins the call. [any] */
void td_rpc_call_open(struct td_rpc_call *call, const ProtobufCMessage *request, bool last);
/* Starts the next batch of what is queued and asked for. Loop thread. */
void td_rpc_call_pump(struct td_rpc_call *call);
/* Calls the last callback when the RPC is over and every tag is back; may free the call. */
void td_rpc_call_check_end(struct td_rpc_call *call);
/* Starts a batch whose only tag is event; a refused batch is our bug. */
void td_rpc_call_batch(struct td_rpc_call *call, const grpc_op *ops, size_t n_ops,
                       struct td_rpc_event *event);
void td_rpc_call_read(struct td_rpc_call *call);
/* Cancels with a status of our own (max_queued_bytes, stalls, responses that do not parse).
 * [any] */
void td_rpc_call_cancel_with(struct td_rpc_call *call, enum td_code code, const char *details);
/* Copies the legal ASCII pairs and drops and logs others, which are our bug or a user's text. NULL
 * for none. */
grpc_metadata *td_rpc_metadata_copy(const struct td_rpc_metadata *pairs, size_t n_pairs,
                                    size_t *ret_n);
void td_rpc_metadata_free(grpc_metadata *pairs, size_t n_pairs);
char *td_rpc_slice_string(grpc_slice slice);

/* client.c */
void td_rpc_client_begin(struct td_rpc_call *call);
void td_rpc_client_bad_message(struct td_rpc_call *call, const struct td_err *err);
void td_rpc_client_end(struct td_rpc_call *call);
void td_rpc_channel_unref(struct td_rpc_channel *channel);

/* server.c */
struct td_rpc_route {
    const struct td_rpc_method *method;
    bool builtin; /* ctx is the server itself; not counted as a live
                     call */
};

struct td_rpc_watcher;

/* What a server answers. */
struct td_rpc_routes {
    struct td_rpc_route *v;
    size_t n;
    char **services; /* service names, from the tables' paths */
    /* the server's own services come first; then health and reflection */
    size_t n_services, n_own_services;
};

/* The next call, which core fills in. Loop. */
struct td_rpc_incoming {
    struct td_rpc_event event;
    grpc_call *call;
    grpc_call_details details;
    grpc_metadata_array metadata;
    uint64_t n_taken; /* calls that core has given us, all told */
};

/* Clients are told to go elsewhere (server.c). Loop. */
struct td_rpc_goaway {
    atomic_bool is_done;         /* written by the loop: they have been told; the port is closed */
    struct td_rpc_timer *timer;  /* NULL = goaway does not wait */
    struct td_rpc_timer *linger; /* since goaway: looks at connections that linger */
    uint32_t ticks, quiet_ticks;
    uint64_t n_seen; /* incoming.n_taken at the last tick */
};

struct td_rpc_server {
    struct td_rpc_loop *loop;
    grpc_server *server;
    struct td_rpc_limits limits;
    void *ctx;
    int port;
    int lock_fd; /* unix socket: the lock that keeps a second server from taking over the path */
    char *lock_path;
    struct td_rpc_tls_files *tls;
    struct td_rpc_guard *guard; /* guards the listener */
    struct td_rpc_probe *probe; /* NULL = none */
    struct td_rpc_routes routes;

    struct td_rpc_event ev_shutdown; /* loop, as all fields below */
    struct td_rpc_incoming incoming;
    struct td_rpc_goaway goaway;
    struct td_rpc_call *live;
    struct td_rpc_peers peers; /* calls of the services */
    struct td_rpc_timer *stall_timer;
    bool serving, ready;
    int stopping;
    struct td_rpc_watcher *watchers;

    atomic_uint n_live;                /* calls of the services */
    atomic_uint n_builtin;             /* calls of health and reflection */
    atomic_uint_least64_t last_end_ns; /* when the last call ended */
    uint32_t n_calls;                  /* mu_stop: all calls, with the request for the next */
    bool draining, shut_down, gone;    /* mu_stop */
    pthread_mutex_t mu_stop;
    pthread_cond_t cond_stop;
};

void td_rpc_server_message(struct td_rpc_call *call, const ProtobufCMessage *msg);
/* All that was sent is taken. Of a client's call: nothing. */
void td_rpc_server_caught_up(struct td_rpc_call *call);
void td_rpc_server_bad_message(struct td_rpc_call *call, const struct td_err *err);
void td_rpc_server_end(struct td_rpc_call *call);
/* counts one call less; the last one lets stop continue */
void td_rpc_server_release(struct td_rpc_server *server);

/* probe.c: starts the thread that dials the server's own port. address as in td_rpc_server_config;
 * port as bound. */
td_status td_rpc_probe_start(struct td_rpc_server *server, const char *address, bool use_tls,
                             uint32_t period_ms, struct td_rpc_probe **ret_probe,
                             struct td_err *err);
/* waits for the thread's end; NULL is allowed */
void td_rpc_probe_stop(struct td_rpc_probe *probe);
/* call it after td_rpc_probe_stop, or when never started */
void td_rpc_probe_free(struct td_rpc_probe *probe);
uint32_t td_rpc_probe_failed(const struct td_rpc_probe *probe); /* failures in a row [any] */

/* health.c, reflection.c: method tables whose ctx is the server */
extern const struct td_rpc_method td_rpc_health_methods[];
extern const struct td_rpc_method td_rpc_reflection_methods[];
void td_rpc_health_changed(struct td_rpc_server *server); /* tells every Watch */

/* tls.c */
td_status td_rpc_tls_server(const struct td_rpc_tls *tls, struct td_rpc_tls_files **ret_files,
                            grpc_server_credentials **ret_creds, struct td_err *err);
/* Updates the metric of days left; warns once a day while they are few. NULL is allowed. [any] */
void td_rpc_tls_look_at_expiry(struct td_rpc_tls_files *files);
void td_rpc_tls_files_destroy(struct td_rpc_tls_files *files);
td_status td_rpc_tls_client(const struct td_rpc_tls *tls, struct td_rpc_tls_files **ret_files,
                            grpc_channel_credentials **ret_creds, struct td_err *err);
/* New credentials when the files have changed and settled, else NULL. */
grpc_channel_credentials *td_rpc_tls_client_changed(struct td_rpc_tls_files *files);

/* peer.c: core's verify_peer_callback, called on core's threads. 0 = the certificate holds a name
 * that matches peer_names (struct td_peer_names *). */
int td_rpc_peer_check(const char *target, const char *peer_pem, void *peer_names);
td_status td_rpc_peer_check_supported(struct td_err *err);

#endif
