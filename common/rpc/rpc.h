/* rpc.h - gRPC C core made small: one loop thread per completion queue, methods as callbacks,
 * messages as protobuf-c structs.
 *
 * Threads. A td_rpc_loop is one completion queue with one thread; every callback of the calls,
 * servers and timers on that loop runs on that thread and must be short. Functions marked [any] may
 * be called from any thread: they append to a queue and ring the loop's doorbell once (0.5 us),
 * they never write to a socket themselves - so an engine step is never delayed by the network. All
 * others: loop thread only.
 *
 * Ownership. A call handle stays valid until its on_end callback has returned; [any] functions on
 * it afterwards need a reference taken with td_rpc_call_ref (and are then ignored). Messages given
 * to callbacks are freed when the callback returns.
 *
 * Bounds. Message sizes, live calls, connections' handshake time, metadata size, queued bytes
 * per call and memory for unpacking one message are limited by td_rpc_limits; breaking one
 * answers RESOURCE_EXHAUSTED or INVALID_ARGUMENT with the limit. Compression is refused. */
#ifndef TD_RPC_H
#define TD_RPC_H

#include <protobuf-c/protobuf-c.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

struct td_rpc_loop;
struct td_rpc_server;
struct td_rpc_channel;
struct td_rpc_call; /* either side of one RPC */
struct td_rpc_timer;

struct td_rpc_metadata {
    const char *key, *value;
}; /* ASCII, lower-case keys */

/* ---- loop ------------------------------------------------------------------------------------ */

/* Creates the queue and starts its thread; grpc_init is counted inside. SIGTERM & co. must
 * already be blocked in the caller. */
td_status td_rpc_loop_create(const char *name, struct td_rpc_loop **ret_loop, struct td_err *err);
/* Every server, channel and call of the loop must be gone. Joins. */
void td_rpc_loop_destroy(struct td_rpc_loop *loop);
bool td_rpc_loop_is_current(const struct td_rpc_loop *loop);

/* [any] Runs fn(arg) on the loop thread, in the order of posts. */
void td_rpc_loop_post(struct td_rpc_loop *loop, void (*fn)(void *arg), void *arg);

/* [any] Calls fn(arg) on the loop thread every period_ms until cancelled. Cancel on the loop
 * thread: after it returns fn is not called. */
struct td_rpc_timer *td_rpc_timer_start(struct td_rpc_loop *loop, uint32_t period_ms,
                                        void (*fn)(void *arg), void *arg);
void td_rpc_timer_cancel(struct td_rpc_timer *timer);

/* ---- TLS ------------------------------------------------------------------------------------- */

struct td_rpc_tls {
    const char *cert_file, *key_file; /* own certificate chain and key (PEM); NULL = none (a
                                         client without identity) */
    const char *ca_file;              /* who the peer must be signed by; on a server: set =
                                         mutual TLS, clients must show a certificate */
    const char *server_name;          /* client: name to verify instead of the target's host;
                                         may be NULL */
    const char *peer_names;           /* client: patterns (common/base/peer_names.h), one of
                                         which a name of the server's certificate must match,
                                         besides the name that was dialled; checked before a
                                         byte of a call is sent. NULL = any */
};

/* ---- server ---------------------------------------------------------------------------------- */

/* How many elements a repeated field may have, told before a message is unpacked
 * (INVALID_ARGUMENT). */
struct td_rpc_field_limit {
    const ProtobufCMessageDescriptor *type; /* NULL ends a list */
    uint32_t field;                         /* its number in type */
    uint32_t max;
    /* as the client knows it: "chat.messages" */
    const char *name;
};

struct td_rpc_method {
    /* "/tandem.v1.Inference/Generate"; NULL ends the table */
    const char *path;
    const ProtobufCMessageDescriptor *request;
    bool client_streaming;
    /* First message (unary, server streaming) or each message (client streaming; NULL msg = the
       client half-closed). ctx = server's ctx. */
    void (*on_message)(struct td_rpc_call *call, const ProtobufCMessage *msg, void *ctx);
    /* Exactly once per call for which on_message or on_open ran: the RPC is over (status sent,
     * cancelled, deadline, connection lost). Free what td_rpc_call_user holds. */
    void (*on_end)(struct td_rpc_call *call, bool cancelled, void *ctx);
    /* optional: call accepted, before any message; one that it finishes is read no further */
    void (*on_open)(struct td_rpc_call *call, void *ctx);
    const struct td_rpc_field_limit *field_limits; /* optional; read on the loop thread */
};

struct td_rpc_limits {
    uint32_t max_message_bytes; /* received; default 64 MiB */
    uint32_t max_unpack_bytes;  /* heap one message may take to unpack; default 8x
                                   max_message_bytes, at most 1 GiB */
    uint64_t max_calls_bytes;   /* of all calls' messages that are coming in; default 256
                                   MiB, at least two messages */
    uint32_t max_live_calls;    /* default 4096 */
    uint32_t max_peer_calls;    /* of them of one address (peers.h); default 0 = all */
    uint32_t max_queued_bytes;  /* unsent messages per call; a slower reader is cancelled
                                   with RESOURCE_EXHAUSTED; default 16 MiB. One message
                                   may be larger when nothing else is queued */
    uint32_t max_stall_ms;      /* a message the peer does not take for so long ends the
                                   call the same way; default 60 s */
    uint32_t max_request_ms;    /* a call whose (first) message has not come whole ends
                                   the same way; default 60 s */
    /* Connections above these are closed as they come (accept.h). 0 = as many as descriptors
     * allow, at most 16384; and half of max_connections, so that no single address can take them
     * all, and one load balancer has thousands. */
    uint32_t max_connections, max_peer_connections;
    /* TLS handshakes that are in progress at once, and that begin in a second (four seconds'
     * worth may come at once); further connections are closed as they come. One address has the
     * share of both that it has of max_connections. 0 = 256 in progress; any number a second. */
    uint32_t max_handshakes, max_handshakes_per_s;
    uint32_t max_handshake_ms; /* a connection that has not said TLS's or HTTP/2's hello
                                  whole is ended; default 10 s */
};

struct td_rpc_server_config {
    struct td_rpc_loop *loop;
    const char *address;          /* "127.0.0.1:7600", "0.0.0.0:0", "[::]:7600",
                                     "unix:/path" */
    const struct td_rpc_tls *tls; /* NULL = plaintext; certificates are re-read when the
                                     files change */
    const struct td_rpc_method *const *services; /* NULL-terminated list of method tables */
    struct td_rpc_limits limits;                 /* zero fields = defaults */
    uint32_t keepalive_ms;  /* 0 = 10 000: calls of a silent peer are cancelled after
                               about twice this */
    uint32_t port_check_ms; /* dial the server's own port so often; 0 = never: then
                               it always "answers" */
    bool reflection;        /* serve grpc.reflection v1 and v1alpha from the embedded
                               descriptor set */
    void *ctx;
};

/* Trailing metadata of grpc.health.v1.Health/Check: the server's wall clock in ns since 1970,
 * decimal. */
#define TD_RPC_WALL_KEY "tandem-unix-ns"

/* Listens (port already bound elsewhere = TD_ERR_IO naming it) and serves grpc.health.v1.Health
 * besides the services. Health starts NOT_SERVING. */
td_status td_rpc_server_start(const struct td_rpc_server_config *config,
                              struct td_rpc_server **ret_server, struct td_err *err);
int td_rpc_server_port(const struct td_rpc_server *server);
/* [any] Health of service "" and of every service name in the tables (Watch streams are told). */
void td_rpc_server_set_serving(struct td_rpc_server *server, bool serving);
/* [any] The port answered its last check, or failed fewer than three in a row. Health is SERVING
 * only while it does. */
bool td_rpc_server_answers(const struct td_rpc_server *server);
/* [any] The port failed ten checks in a row: its listener is gone or the loop's thread stands.
 * The process should end with an error, so that who supervises it starts another. */
bool td_rpc_server_is_deaf(const struct td_rpc_server *server);
uint32_t td_rpc_server_live_calls(const struct td_rpc_server *server); /* [any] */
/* [any but the loop thread] Health off, new calls refused with UNAVAILABLE; waits up to drain_ms
 * for live calls, lets their last bytes leave (0.1 s), cancels the rest, stops listening,
 * destroys. drain_ms 0 = cancel all at once. */
struct td_rpc_server_stats {
    uint32_t connections, max_connections, max_peer_connections;
    uint32_t handshakes; /* TLS: in progress */
    uint64_t connections_accepted, connections_refused;
    uint64_t connections_ended; /* because of what they sent (frames.h) */
};
/* [any] */
void td_rpc_server_stats(const struct td_rpc_server *server, struct td_rpc_server_stats *ret_stats);
void td_rpc_server_stop(struct td_rpc_server *server, uint32_t drain_ms);

/* ---- calls, both sides ----------------------------------------------------------------------- */

void td_rpc_call_ref(struct td_rpc_call *call);   /* [any] */
void td_rpc_call_unref(struct td_rpc_call *call); /* [any] */
void td_rpc_call_set_user(struct td_rpc_call *call, void *user);
void *td_rpc_call_user(const struct td_rpc_call *call);
/* Time left until the RPC's deadline in ms; UINT64_MAX = none. [any] */
uint64_t td_rpc_call_remaining_ms(const struct td_rpc_call *call);
/* "ipv4:127.0.0.1:4711"; valid while the call is */
const char *td_rpc_call_peer(const struct td_rpc_call *call);
/* True when the peer dialled from this machine: a loopback address or a unix socket. A proxy on
 * this machine makes all its clients look so. */
bool td_rpc_call_peer_is_local(const struct td_rpc_call *call);
/* Who the peer of the call's connection has proved to be. true = it showed a certificate that
 * was verified against the CA (a server: with tls.ca_file; a client: always under TLS). Loop
 * thread, while the call lives. */
bool td_rpc_call_peer_verified(const struct td_rpc_call *call);
/* The kinds of name in a certificate: subjectAltName's, and the subject's common name. */
enum td_rpc_name_kind {
    TD_RPC_NAME_DNS,
    TD_RPC_NAME_URI,
    TD_RPC_NAME_IP,
    TD_RPC_NAME_EMAIL,
    TD_RPC_NAME_CN
};
/* "dns", "uri", "ip", "email", "cn" */
const char *td_rpc_name_kind_text(enum td_rpc_name_kind kind);
/* Calls match with each name of the verified peer's own certificate until it answers true;
 * returns whether it did. false when the peer is not verified. A name that holds a NUL byte,
 * which no honest CA signs, is left out. name is valid inside match only. Loop thread. */
bool td_rpc_call_peer_names(const struct td_rpc_call *call,
                            bool (*match)(enum td_rpc_name_kind kind, const char *name, void *arg),
                            void *arg);
/* The path of the method that is called. */
const char *td_rpc_call_path(const struct td_rpc_call *call);
/* Request metadata value by key, or NULL. Server side. */
const char *td_rpc_call_metadata(const struct td_rpc_call *call, const char *key);

/* [any] Packs msg now and queues it. TD_ERR_CANCELLED when the call is over; TD_ERR_LIMIT when
 * max_queued_bytes would be exceeded (the call is then cancelled). Batches of several sends cost
 * one doorbell. */
td_status td_rpc_call_send(struct td_rpc_call *call, const ProtobufCMessage *msg);

/* Server. [any] Ends the RPC after the queued messages. details (UTF-8, copied, may be NULL);
 * trailing metadata copied. Later calls are ignored. */
void td_rpc_call_finish(struct td_rpc_call *call, enum td_code code, const char *details,
                        const struct td_rpc_metadata *trailing, size_t n_trailing);
/* Client: [any] no more messages will be sent (streaming requests; unary/server-streaming calls
 * do it by themselves). */
void td_rpc_call_close_send(struct td_rpc_call *call);
/* [any] Cancels at once; on_end / on_done follows. */
void td_rpc_call_cancel(struct td_rpc_call *call);

/* ---- client ---------------------------------------------------------------------------------- */

struct td_rpc_channel_config {
    struct td_rpc_loop *loop;
    const char *target;           /* "host:port", "dns:///host:port", "ipv4:1.2.3.4:5",
                                     "unix:/path" */
    const struct td_rpc_tls *tls; /* NULL = plaintext; changed files serve the calls that
                                     start 1-2 s later */
    uint32_t max_message_bytes;   /* 0 = 64 MiB */
    uint32_t keepalive_ms;        /* 0 = 1000: a silent peer is given up after about twice
                                     this */
};
td_status td_rpc_channel_create(const struct td_rpc_channel_config *config,
                                struct td_rpc_channel **ret_channel, struct td_err *err);
/* its calls must have ended; [any] */
void td_rpc_channel_destroy(struct td_rpc_channel *channel);

struct td_rpc_client_method {
    const char *path;
    const ProtobufCMessageDescriptor *response;
    bool client_streaming; /* keep the sending side open until
                              td_rpc_call_close_send */
};

struct td_rpc_result {
    enum td_code code;
    const char *details; /* never NULL */
    const struct td_rpc_metadata *trailing;
    size_t n_trailing;
};

struct td_rpc_handler {
    /* each response; optional */
    void (*on_message)(struct td_rpc_call *call, const ProtobufCMessage *msg, void *user);
    /* exactly once, last; the handle dies after it */
    void (*on_done)(struct td_rpc_call *call, const struct td_rpc_result *result, void *user);
};

/* [any] Starts a call; request may be NULL with client_streaming. deadline_ms 0 = none.
 * wait_for_ready: queue until connected instead of failing fast. Callbacks run on the loop
 * thread with td_rpc_call_user == user. Never fails (errors arrive at on_done). Off the loop
 * thread the call may be over, and the handle dead, when this returns: such callers use
 * td_rpc_call_start_ref, whose handle is theirs to unref. */
struct td_rpc_call *td_rpc_call_start(struct td_rpc_channel *channel,
                                      const struct td_rpc_client_method *method,
                                      const ProtobufCMessage *request, uint64_t deadline_ms,
                                      bool wait_for_ready, const struct td_rpc_metadata *metadata,
                                      size_t n_metadata, const struct td_rpc_handler *handler,
                                      void *user);
struct td_rpc_call *td_rpc_call_start_ref(struct td_rpc_channel *channel,
                                          const struct td_rpc_client_method *method,
                                          const ProtobufCMessage *request, uint64_t deadline_ms,
                                          bool wait_for_ready,
                                          const struct td_rpc_metadata *metadata, size_t n_metadata,
                                          const struct td_rpc_handler *handler, void *user);

/* ---- text ------------------------------------------------------------------------------------ */

/* Every `string` field of every message is checked before a callback sees it; fields marked
 * as-bytes in the .proto are not: their reader calls this before it answers with such text.
 * [any] */
bool td_rpc_utf8_valid(const void *text, size_t n_bytes);

#endif
