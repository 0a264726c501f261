/* late.h - the messages that a client which is behind gets as one.
 *
 * A token is a message of its own as long as the client takes them. While one waits for the client
 * (router_client_ops.is_behind), the next ones are kept here, packed, and joined when the client
 * has caught up or 64 KiB are there: text is appended to text, token ids to token ids. The last
 * message takes with it what is kept. So nothing is lost, and what a slow client costs is bounded
 * by its door, which cuts off a client that is too far behind.
 *
 * Zeroed = empty. Owned by its request. Threads: the router's loop thread alone. */
#ifndef TD_ROUTER_LATE_H
#define TD_ROUTER_LATE_H

#include "router/client.h"
#include "router/resume.h"
#include "tandem/v1/inference.pb-c.h"

struct late {
    uint8_t *bytes; /* messages, each behind its length as uint32_t */
    size_t n_bytes, capacity;
    uint32_t n_messages;
    struct resume_skip skip; /* what the client has already is not sent */
};

/* Sends m, or keeps a copy. A message with a finish_reason is the last one, and is not kept.
 * Allocates only while the client is behind. */
void late_send(struct late *l, struct router_client client, const Tandem__V1__GenerateResponse *m);
/* Sends what is kept. */
void late_flush(struct late *l, struct router_client client);
void late_free(struct late *l);

#endif
