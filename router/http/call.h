/* call.h - inside the HTTP door: a call, the table of routes, and what the door's files share.
 *
 * A call has two holders, the library's connection and the loop; each drops its reference when it
 * will not look again, the last frees. What both touch is under the door's `lock`: out, n_sent,
 * is_suspended, has_head, is_done, is_gone, is_cut and what follows them. `work` is the loop
 * thread's alone.
 *
 *   READING --body complete--> WAITING (suspended) --head known--> SENDING --all sent--> over
 *      any state --connection closed--> is_gone: the loop cancels the request
 *   SENDING, a stream between two chunks (suspended): the loop writes events to the socket itself
 *
 * Files: http.c connections, daemon and its callbacks; library.c who runs the daemon; call.c a
 * call's life, its body and its answer; routes.c what each path does; page.c the page at /.
 *
 * "Library's thread" is whoever runs the daemon: its own thread as a rule (library.c). */
#ifndef TD_ROUTER_HTTP_CALL_H
#define TD_ROUTER_HTTP_CALL_H

#include <microhttpd.h>
#include <pthread.h>
#include <stdatomic.h>

#include "router/http/http.h"
#include "router/http/openai_answer.h"
#include "router/http/tls.h"
#include "router/kserve/kserve_http.h"
#include "router/router.h"

struct http_call;

enum { HTTP_MODEL_BYTES = 256 }; /* a model's name in a path */

/* What a path does. Either answer_here answers at once, on the library's thread, or read takes the
 * body there (NULL: there is none) and on_loop answers on the router's loop thread, by http_ops of
 * the call. */
struct http_route {
    const char *path, *method;
    enum MHD_Result (*answer_here)(struct http_call *c);
    td_status (*read)(struct http_call *c, struct td_err *err); /* err, c->param: why not */
    void (*on_loop)(struct http_call *c);
    bool is_limited; /* its requests count for the rates of a tenant */
};

struct connection {
    struct connection *next, *prev;
    int fd;
    uint64_t since_ns;      /* it began, or its last answer ended */
    bool is_busy;           /* its request is complete */
    bool is_hung_up;        /* its client will send nothing more */
    bool is_known;          /* peer was looked for */
    bool is_early;          /* its last request was answered before its body was read */
    struct http_peer *peer; /* with TLS and a CA; NULL: peer_why */
    const char *peer_why;
    char address[96]; /* "http:HOST:PORT"; "" = its first request has not come */
};

struct http_call {
    struct router_http *http;
    struct MHD_Connection *mhd;
    struct connection *connection; /* NULL: there was no memory for one */
    struct http_call *next, *prev; /* of http->calls */
    atomic_int n_holders;
    char peer[96], request_id[160], authorization[ROUTER_MAX_KEY_BYTES + sizeof "Bearer "];
    char origin[256], traceparent[128];
    struct http_peer *certificate; /* NULL = none was asked for */

    const struct http_route *route; /* library's thread, until it is given to the loop */
    bool is_given;
    char *body; /* these three: the library's thread, then the loop, under http->lock */
    size_t n_body, body_capacity;
    unsigned refused; /* HTTP status, before the body is complete; 0 = not */
    char refused_why[256], param[64];
    const char *allowed;           /* 405: the method */
    char model[HTTP_MODEL_BYTES];  /* of /v1/models/NAME */
    struct openai_request *parsed; /* until the loop has taken it in, as the body */
    struct kserve_http *kserve;    /* of a path under /v2; else NULL */

    struct client_work *work; /* loop thread */
    struct openai_answer answer;

    struct text_buffer out; /* under http->lock */
    size_t n_sent;
    unsigned status, retry_s;
    bool is_stream, is_suspended, has_head, is_done, is_gone, is_cut;
    bool is_chunked; /* a stream's framing is known: it may go past the library */
    bool is_between; /* suspended between two chunks: the socket is the loop's to write to */
    bool is_corked;  /* library's thread: until what waits makes a segment with what follows */
    struct text_buffer tail; /* of a chunk that the socket took a part of; nothing goes before it */
    size_t n_tail_sent;
    uint64_t tail_ns; /* when a part of it was last taken */

    struct http_call *next_unsent; /* loop thread: of http->unsent, which holds it */
    bool is_unsent;
};

/* The socket of a connection that has ended; its client may be sending still. */
struct lingering {
    int fd;                      /* -1: none */
    uint64_t until_ns, quiet_ns; /* the end of all its time; of the time without a byte */
};

enum { HTTP_MAX_LINGERING = 64 };

struct router_http {
    struct router *router;
    struct router_http_config config;
    struct http_library *library; /* who runs it */
    int port;
    struct http_tls *tls;          /* NULL = no TLS */
    pthread_mutex_t lock;          /* given back by http_unlock alone */
    bool has_resumed;              /* under lock: connections go on when it is given back */
    struct connection connections; /* ring heads */
    struct http_call calls;
    uint32_t n_calls;
    size_t n_bodies_bytes;
    struct lingering lingering[HTTP_MAX_LINGERING]; /* these two: under lock */
    unsigned next_lingering;
    int hangups; /* an epoll of all connections: the library does not watch those that sleep */
    bool is_stopping;
    uint32_t n_alone;           /* under turn: requests in a row that came while none was live */
    struct http_call *unsent;   /* loop thread: streams with events since router_http_hold */
    bool is_held, is_waiting;   /* waiting: a post will look again, and send */
    unsigned n_unsent, n_turns; /* streams there; turns of the loop that they have waited */
    bool has_more;              /* events came since the last look */
};

/* ---- library.c ------------------------------------------------------------------------------- */

/* Runs the library until http_library_stop, which ends its connections: callbacks come until then.
 * The daemon is h's from then on. */
td_status http_library_start(struct router_http *h, struct MHD_Daemon *daemon, struct td_err *err);
int http_library_quiesce(struct http_library *l); /* the port's socket, to be closed; or -1 */
void http_library_stop(struct http_library *l);
void http_library_free(struct http_library *l); /* NULL is fine */
/* http->lock is held: the connection goes on when it is given back. */
void http_library_resume(struct router_http *h, struct MHD_Connection *connection);
/* Gives http->lock back. What was resumed goes on: on the library's thread, or here. */
void http_unlock(struct router_http *h);

/* ---- routes.c -------------------------------------------------------------------------------- */

/* The route of a path and method, or NULL and *ret_status: 404, or 405 for a wrong method with
 * *ret_allowed, the right one. ret_model: the name in /v1/models/NAME. */
const struct http_route *http_route_find(const char *path, const char *method,
                                         char ret_model[HTTP_MODEL_BYTES], unsigned *ret_status,
                                         const char **ret_allowed);

/* ---- call.c ---------------------------------------------------------------------------------- */

/* A request's head is there. NULL: no memory. [library's thread] */
struct http_call *http_call_begin(struct router_http *h, struct MHD_Connection *mhd,
                                  const char *url, const char *method, const char *version);
void http_call_take_body(struct http_call *c, const char *bytes, size_t n);
/* Why a body above the limit is refused; as long as the call. */
const char *http_call_too_large(struct http_call *c);
/* The answer's id is this one, where it can stand in a header and the router's limit allows it. */
void http_call_name(struct http_call *c, const char *id);
/* The body is complete: to the loop with it. The connection sleeps until the answer begins. */
enum MHD_Result http_call_give_to_loop(struct http_call *c);
/* The loop has said how the answer begins. */
enum MHD_Result http_call_begin_answer(struct http_call *c);
/* The answer is sent, or the connection is gone. */
void http_call_end(struct http_call *c);
/* The connection is of no use any more: the request need not go on. http->lock is held. */
void http_call_cut(struct http_call *c);
/* A sleeping call once in a while: what its socket did not take. http->lock is held. */
void http_call_look(struct http_call *c, uint64_t now_ns);
/* Answers at once. Takes the text's bytes. */
enum MHD_Result http_call_answer(struct http_call *c, struct text_buffer *text, unsigned status,
                                 const char *type);
enum MHD_Result http_call_answer_error(struct http_call *c, unsigned status, const char *why,
                                       const char *param);

/* The same with status 200, for a browser to show: its policy, and that nobody keeps it. */
enum MHD_Result http_call_answer_page(struct http_call *c, struct text_buffer *text,
                                      const char *policy);

/* page.c: answers GET /. */
enum MHD_Result http_page_answer(struct http_call *c);

/* To an OPTIONS request of an origin that may call. */
enum MHD_Result http_call_answer_preflight(struct http_call *c);

/* The call as inference.c sees its client. [loop thread; what it says of itself: any] */
struct router_client http_call_client(struct http_call *c);
extern const struct router_client_ops http_ops;
/* Ends the call with this body, whose bytes it takes, and status 200. [loop thread] */
void http_call_finish_json(struct http_call *c, struct text_buffer *json);

#endif
