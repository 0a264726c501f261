/* client.h - who asked for a request, whichever door the call came through.
 *
 * A door (gRPC, HTTP) reads a call into a GenerateRequest and writes GenerateResponses to its
 * client; everything between is one implementation (inference.c, output.c, legs.c) that knows the
 * client through this table alone. Values are small and copied; `call` is the door's.
 *
 * Threads: the router's loop thread alone. */
#ifndef TD_ROUTER_CLIENT_H
#define TD_ROUTER_CLIENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "common/rpc/rpc.h"

struct router;
struct td_peer_names;

/* What a call became: a request, or several choices at once; the first member of either. */
struct client_work {
    void (*cancel)(struct router *r, struct client_work *w);
    void (*caught_up)(struct router *r, struct client_work *w); /* ops->is_behind is over */
};

/* Limits of one chat and of one call; every door refuses more before it allocates. */
enum { ROUTER_MAX_CHAT_MESSAGES = 4096, ROUTER_MAX_ALL_CHOICES = 1024 };
enum { ROUTER_REQUEST_ID_BYTES = 128 }; /* of a client's name for its request, with its end */

/* Code points of UTF-8 text: what text_offset counts. */
static inline uint32_t router_count_characters(const char *text, size_t n_bytes)
{
    uint32_t n = 0;
    for (size_t i = 0; i < n_bytes; i++) n += ((unsigned char)text[i] & 0xc0) != 0x80;
    return n;
}

/* As much of the text as there is room for, and its end: snprintf's "%s" at a tenth of its cost. */
static inline void router_copy_text(char *to, size_t bytes, const char *text)
{
    size_t n = strnlen(text, bytes - 1);
    memcpy(to, text, n);
    to[n] = 0;
}

struct router_client_ops {
    /* Queues one message. A client that is too far behind is cut off by its door, which then calls
     * inference_cancel. */
    void (*send)(void *call, const ProtobufCMessage *message);
    /* Whether a message still waits for the client to take it: what comes next is kept and sent as
     * one when the door calls inference_caught_up (late.h). NULL: never; the door does without. */
    bool (*is_behind)(void *call);
    /* Ends the call after the queued messages. details may be NULL; everything is copied. */
    void (*finish)(void *call, enum td_code code, const char *details,
                   const struct td_rpc_metadata *trailing, size_t n_trailing);
    /* A header of the call by its lower-case name, or NULL. Valid while the call is. */
    const char *(*metadata)(void *call, const char *name);
    const char *(*peer)(void *call); /* for the log: "ipv4:127.0.0.1:4711" */
    /* Whether the client showed a certificate that was verified and that has one of the names.
     * NULL: it showed none. */
    bool (*certificate_is)(void *call, const struct td_peer_names *names);
    uint64_t (*remaining_ms)(void *call); /* until its deadline; UINT64_MAX = none */
    /* The work that the call became: the door names it to inference_cancel when the client goes
     * away. NULL: the work is over and will not touch the call again. */
    void (*attach)(void *call, struct client_work *w);
    /* True: on a stream that goes on (resume_from) the door gets all messages, from the first on,
     * and leaves out itself what its client has. False: inference.c leaves it out (resume.h). */
    bool takes_all;
    /* True: the door sends no trailing metadata with OK, so the ledger is not written as text. */
    bool drops_ledger;
};

struct router_client {
    const struct router_client_ops *ops;
    void *call;
};

#endif
