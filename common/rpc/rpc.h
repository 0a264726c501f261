/* rpc.h - a small layer over gRPC C core: one loop thread per completion queue, methods as
 * callbacks, messages as protobuf-c structs.
 *
 * Threads. A td_rpc_loop is one completion queue with one thread. Every callback of the calls,
 * servers and timers on that loop runs on that thread and must be short. Any thread may call the
 * functions marked [any]: they append to a queue and wake the loop once (0.5 us), and never write
 * to a socket themselves, so the network never delays an engine step. All others are for the loop
 * thread only.
 *
 * Ownership. A call handle stays valid until its on_end callback has returned. [any] functions on
 * it afterwards need a reference taken with td_rpc_call_ref, and then do nothing. Messages given to
 * callbacks are freed when the callback returns.
 *
 * Bounds. td_rpc_limits limits message sizes, live calls, the time for a connection's handshake,
 * metadata size, queued bytes per call, and memory for unpacking one message. A call that breaks
 * one is answered RESOURCE_EXHAUSTED or INVALID_ARGUMENT with the limit. Compression is refused. */
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

/* Creates the queue and starts its thread; calls grpc_init. The caller has blocked SIGTERM and the
 * other stop signals before. */
td_status td_rpc_loop_create(const char *name, struct td_rpc_loop **ret_loop, struct td_err *err);
/* Every server must be stopped, every channel destroyed, every call over or cancelled. Waits for
 * the end of the calls that were cancelled, and of the thread. */
void td_rpc_loop_destroy(struct td_rpc_loop *loop);
bool td_rpc_loop_is_current(const struct td_rpc_loop *loop);

/* [any] Runs fn(arg) on the loop thread, in the order of posts. */
void td_rpc_loop_post(struct td_rpc_loop *loop, void (*fn)(void *arg), void *arg);

/* The same; but where the loop's thread has nothing to do, the posts run here and now: the caller
 * is the loop thread until this returns. That spares waking the other one, and the delay of it.
 * [any but the loop thread] The caller holds no lock that a post may take. */
void td_rpc_loop_run(struct td_rpc_loop *loop, void (*fn)(void *arg), void *arg);

/* [any] Calls fn(arg) on the loop thread every period_ms until cancelled. Cancel it on the loop
 * thread: fn is not called after that returns. */
struct td_rpc_timer *td_rpc_timer_start(struct td_rpc_loop *loop, uint32_t period_ms,
                                        void (*fn)(void *arg), void *arg);
void td_rpc_timer_cancel(struct td_rpc_timer *timer);

/* ---- TLS ------------------------------------------------------------------------------------- */

struct td_rpc_tls {
    const char *cert_file, *key_file; /* own certificate chain and key (PEM); NULL = none (a
                                         client without identity) */
    /* the CA that must have signed the peer's certificate; on a server: set = mutual TLS, clients
     * must show a certificate */
    const char *ca_file;
    const char *server_name; /* client: name to verify instead of the target's host;
                                         may be NULL */
    /* client: patterns (common/base/peer_names.h), one of which a name of the server's certificate
     * must match, besides the name that was dialled; checked before a byte of a call is sent. NULL
     * = no pattern */
    const char *peer_names;
};

/* ---- server ---------------------------------------------------------------------------------- */

/* The most elements that a repeated field may have, checked before a message is unpacked
 * (INVALID_ARGUMENT). */
struct td_rpc_field_limit {
    const ProtobufCMessageDescriptor *type; /* NULL ends a list */
    uint32_t field;                         /* the field's number in type */
    uint32_t max;
    /* the name that the client knows: "chat.messages" */
    const char *name;
};

struct td_rpc_method {
    /* "/tandem.v1.Inference/Generate"; NULL ends the table */
    const char *path;
    const ProtobufCMessageDescriptor *request;
    bool client_streaming;
    /* Called for the first message (unary, server streaming) or each message (client streaming;
     * NULL msg = the client half-closed). ctx = server's ctx. */
    void (*on_message)(struct td_rpc_call *call, const ProtobufCMessage *msg, void *ctx);
    /* Called exactly once per call for which on_message or on_open ran, when the RPC is over
     * (status sent, cancelled, deadline, connection lost). Free what td_rpc_call_user holds. */
    void (*on_end)(struct td_rpc_call *call, bool cancelled, void *ctx);
    /* optional: called when a call is accepted, before any message; a call that it finishes is read
     * no further */
    void (*on_open)(struct td_rpc_call *call, void *ctx);
    const struct td_rpc_field_limit *field_limits; /* optional; read on the loop thread */
    /* optional: the peer has taken the last message that was sent (td_rpc_call_is_behind) */
    void (*on_caught_up)(struct td_rpc_call *call, void *ctx);
};

struct td_rpc_limits {
    uint32_t max_message_bytes; /* of a received message; default 64 MiB */
    uint32_t max_unpack_bytes;  /* heap one message may take to unpack; default 8x
                                   max_message_bytes, at most 1 GiB */
    /* of all messages that are being received; default 256 MiB, at least two messages */
    uint64_t max_calls_bytes;
    uint32_t max_live_calls; /* default 4096 */
    /* live calls of one address (peers.h); default 0 = no separate limit */
    uint32_t max_peer_calls;
    uint32_t max_queued_bytes; /* unsent messages per call; a slower reader is cancelled
                                   with RESOURCE_EXHAUSTED; default 16 MiB. One message
                                   may be larger when nothing else is queued */
    /* a message that the peer does not take within this time ends the call the same way; default 60
     * s */
    uint32_t max_stall_ms;
    /* a call whose (first) message is not complete within this time ends the same way; default
     * 60 s */
    uint32_t max_request_ms;
    /* Connections above these are closed as they come (accept.h). 0 = as many as descriptors allow,
     * at most 16384, and for one address half of max_connections: no single address can then take
     * them all, while a load balancer still has thousands. */
    uint32_t max_connections, max_peer_connections;
    /* TLS handshakes in progress at once, and begun in a second (four seconds' worth may come at
     * once); further connections are closed as they come. One address has the share of both that it
     * has of max_connections. 0 = 256 in progress, any number a second. */
    uint32_t max_handshakes, max_handshakes_per_s;
    /* a connection whose first bytes (TLS's or HTTP/2's hello) are not complete within this time is
     * ended; default 10 s */
    uint32_t max_handshake_ms;
};

struct td_rpc_server_config {
    struct td_rpc_loop *loop;
    const char *address;          /* "127.0.0.1:7600", "0.0.0.0:0", "[::]:7600",
                                     "unix:/path" */
    const struct td_rpc_tls *tls; /* NULL = plaintext; certificates are re-read when the
                                     files change */
    const struct td_rpc_method *const *services; /* NULL-terminated list of method tables */
    struct td_rpc_limits limits;                 /* zero fields = defaults */
    uint32_t keepalive_ms; /* 0 = 10 000: calls of a silent peer are cancelled after
                               about twice this */
    /* period of the check that dials the server's own port; 0 = never, and the port counts as
     * answering */
    uint32_t port_check_ms;
    bool reflection; /* serve grpc.reflection v1 and v1alpha from the embedded
                               descriptor set */
    void *ctx;
};

/* Trailing metadata of grpc.health.v1.Health/Check: the server's wall clock in ns since 1970,
 * decimal. */
#define TD_RPC_WALL_KEY "tandem-unix-ns"

/* Listens and serves grpc.health.v1.Health besides the services. Health starts as NOT_SERVING.
 * TD_ERR_IO when the port is bound elsewhere; the message names it. */
td_status td_rpc_server_start(const struct td_rpc_server_config *config,
                              struct td_rpc_server **ret_server, struct td_err *err);
int td_rpc_server_port(const struct td_rpc_server *server);
/* [any] Sets the health of service "" and of every service name in the tables, and tells Watch
 * streams. */
void td_rpc_server_set_serving(struct td_rpc_server *server, bool serving);
/* [any] Sets the health of the name TD_RPC_READY, for servers that can be there without being able
 * to do their work. It is SERVING while this is true, as it is at first, and the others are
 * SERVING. */
#define TD_RPC_READY "ready"
void td_rpc_server_set_ready(struct td_rpc_server *server, bool ready);
/* [any] True when the port answered its last check, or failed fewer than three in a row. Health is
 * SERVING only while this is true. */
bool td_rpc_server_answers(const struct td_rpc_server *server);
/* [any] True when the port failed ten checks in a row: its listener is gone or the loop's thread is
 * stuck. The process should end with an error, so that its supervisor starts another. */
bool td_rpc_server_is_deaf(const struct td_rpc_server *server);
uint32_t td_rpc_server_live_calls(const struct td_rpc_server *server); /* [any] */
/* [any but the loop thread] Health goes off, the port is closed, and every client is told by GOAWAY
 * to open new calls elsewhere. Calls that have been read by then go on; those that come later are
 * never seen, and their clients open them elsewhere. td_rpc_server_stop follows. */
void td_rpc_server_goaway(struct td_rpc_server *server);
/* [any] Whether goaway has come so far: no call comes any more. */
bool td_rpc_server_is_away(const struct td_rpc_server *server);
struct td_rpc_server_stats {
    uint32_t connections, max_connections, max_peer_connections;
    uint32_t handshakes; /* TLS handshakes in progress */
    uint64_t connections_accepted, connections_refused;
    uint64_t connections_ended; /* ended because of what the client sent (frames.h) */
};
/* [any] */
void td_rpc_server_stats(const struct td_rpc_server *server, struct td_rpc_server_stats *ret_stats);
/* [any but the loop thread] Stops and destroys the server: sets health off, refuses new calls with
 * UNAVAILABLE, waits up to drain_ms for live calls, lets their last bytes leave (0.1 s), cancels
 * the rest, and stops listening. drain_ms 0 = cancel all at once. After
 * td_rpc_server_goaway it waits up to 1 s more for clients that have not closed yet. */
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
/* True when the peer dialled from this machine: a loopback address or a unix socket. All clients of
 * a proxy on this machine look so. */
bool td_rpc_call_peer_is_local(const struct td_rpc_call *call);
/* True when the peer of the call's connection showed a certificate that was verified against the CA
 * (a server: with tls.ca_file; a client: always under TLS). Loop thread, while the call lives. */
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
/* Calls match with each name of the verified peer's own certificate until it returns true; returns
 * whether it did. False when the peer is not verified. A name that holds a NUL byte, which no
 * honest CA signs, is skipped. name is valid inside match only. Loop thread. */
bool td_rpc_call_peer_names(const struct td_rpc_call *call,
                            bool (*match)(enum td_rpc_name_kind kind, const char *name, void *arg),
                            void *arg);
/* The path of the method that is called. */
const char *td_rpc_call_path(const struct td_rpc_call *call);
/* Request metadata value by key, or NULL. Server side. */
const char *td_rpc_call_metadata(const struct td_rpc_call *call, const char *key);

/* [any] Packs msg now and queues it. TD_ERR_CANCELLED when the call is over; TD_ERR_LIMIT when
 * max_queued_bytes would be exceeded (the call is then cancelled). Several sends in a row wake the
 * loop once. */
td_status td_rpc_call_send(struct td_rpc_call *call, const ProtobufCMessage *msg);

/* [any] The same with a message that is packed already; the bytes are copied. */
td_status td_rpc_call_send_packed(struct td_rpc_call *call, const void *bytes, size_t n_bytes);
/* Whether a message that was sent still waits for the peer to take it. A server that holds its next
 * messages back until then can send them as one: on_caught_up says when. Loop thread. */
bool td_rpc_call_is_behind(struct td_rpc_call *call);
/* From now on messages that wait for the peer are sent as one, up to 64 KiB: for streams whose
 * messages hold nothing but repeated fields, which protobuf joins when encodings are joined. Loop
 * thread, or before the call is known to others. */
void td_rpc_call_set_merged(struct td_rpc_call *call);

/* Server. [any] Ends the RPC after the queued messages. details (UTF-8, copied, may be NULL);
 * trailing metadata copied. Later calls are ignored. */
void td_rpc_call_finish(struct td_rpc_call *call, enum td_code code, const char *details,
                        const struct td_rpc_metadata *trailing, size_t n_trailing);
/* Client: [any] Says that no more messages will be sent. For streaming requests; unary and
 * server-streaming calls do it by themselves. */
void td_rpc_call_close_send(struct td_rpc_call *call);
/* [any] Cancels at once; on_end / on_done follows. */
void td_rpc_call_cancel(struct td_rpc_call *call);

/* ---- client ---------------------------------------------------------------------------------- */

struct td_rpc_channel_config {
    struct td_rpc_loop *loop;
    const char *target; /* "host:port", "dns:///host:port", "ipv4:1.2.3.4:5",
                                     "unix:/path" */
    /* NULL = plaintext; when files change, calls that start 1 to 2 s later use them */
    const struct td_rpc_tls *tls;
    uint32_t max_message_bytes; /* 0 = 64 MiB */
    uint32_t keepalive_ms;      /* 0 = 1000; a silent peer is given up after about twice this */
};
td_status td_rpc_channel_create(const struct td_rpc_channel_config *config,
                                struct td_rpc_channel **ret_channel, struct td_err *err);
/* its calls must have ended before; [any] */
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
    /* called for each response; optional */
    void (*on_message)(struct td_rpc_call *call, const ProtobufCMessage *msg, void *user);
    /* called exactly once, last; the handle is invalid after it */
    void (*on_done)(struct td_rpc_call *call, const struct td_rpc_result *result, void *user);
};

/* [any] Starts a call. request may be NULL with client_streaming. deadline_ms 0 = none.
 * wait_for_ready: queue until connected instead of failing at once. Callbacks run on the loop
 * thread with td_rpc_call_user == user. Never fails: errors arrive at on_done. Off the loop thread
 * the call may be over, and the handle invalid, when this returns; such callers use
 * td_rpc_call_start_ref and unref the handle that it returns. */
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

/* True when the text is well-formed UTF-8. Every `string` field of a message is checked before a
 * callback sees it, except fields marked as-bytes in the .proto: the reader of such a field calls
 * this before it answers with its text. [any] */
bool td_rpc_utf8_valid(const void *text, size_t n_bytes);

#endif
