/* received.h - what a client has of an answer of Inference.Generate, so that the answer can go on
 * at another router when this one is lost; and when to try again.
 *
 *   send request --messages--> td_received_take --UNAVAILABLE--> td_retry_next: wait
 *      ^                                                              |
 *      '------- td_received_resume: the request and resume_from <-----'
 *
 * Threads: one at a time. Used by `tandem generate`, `chat` and `bench serve`. */
#ifndef TD_RPC_RECEIVED_H
#define TD_RPC_RECEIVED_H

#include <stdbool.h>
#include <stdint.h>

#include "common/base/status.h"
#include "tandem/v1/inference.pb-c.h"

struct td_received;

/* Of a request that may have n_choices (Sampling.n, 0 = 1). NULL: no memory. */
struct td_received *td_received_create(uint32_t n_choices);
void td_received_free(struct td_received *r); /* NULL is fine */
/* A message came and was taken whole. False: no memory, or a choice that was not asked for; the
 * stream cannot go on elsewhere any more. */
bool td_received_take(struct td_received *r, const Tandem__V1__GenerateResponse *m);
/* Messages so far: it grows with each that has brought anything. */
uint64_t td_received_n(const struct td_received *r);
uint32_t td_received_n_tokens(const struct td_received *r);
/* Makes *request one that goes on: sets request_id and resume_from, which belong to r and stand
 * until the next call of a function of it. Nothing when nothing has come: then the request begins
 * anew. The request must have asked for return_token_ids from the start. */
void td_received_resume(struct td_received *r, Tandem__V1__GenerateRequest *request);

/* When to try again. A try that has brought something starts both bounds anew. */
struct td_retry {
    uint64_t budget_ms;  /* so long without anything new; 0 = never again */
    uint64_t since_ns;   /* these four: zero at the start */
    uint64_t n_received; /* td_received_n when the bounds were started */
    uint32_t n_tries;
    bool was_reached; /* somebody has answered, or has kept the call for a while */
};

enum {
    TD_RETRY_MAX_TRIES = 64,
    /* A server that nobody has reached yet is likely a wrong address: such a call ends sooner. */
    TD_RETRY_UNREACHED_MS = 2000,
};

/* A try that began at began_ns has ended UNAVAILABLE, with n_received messages in all. True: the
 * next one begins after *ret_wait_ms; n_servers are tried in turn, in the first round without a
 * wait. */
bool td_retry_next(struct td_retry *t, uint64_t began_ns, uint64_t now_ns, uint64_t n_received,
                   uint32_t n_servers, uint64_t *ret_wait_ms);

#endif
