/* queue.h - the router's queue: who is next among those that wait.
 *
 * Between classes: the greater weight goes first, and equal weights are equal. The class's rank is
 * its place by weight. A rank behind others takes work only while the fleet is less full than the
 * rank's ceiling, so a flood of lesser requests never takes the last room. Fullness is load.h's;
 * ceilings begin at 1 - 0.4 * i / (N - 1) for rank i of N, and classes.c moves them by what the
 * ranks before attain.
 *
 * Between tenants of a rank: least attained service first. A tenant's score is 0.8 for service
 * (prompt + 2 * output tokens by the tenant's weight, half-life 60 s) and 0.2 for how long its
 * first request has waited.
 *
 * Within a tenant: priority, then the earliest deadline, then the order of arrival. A hopeless
 * request (its deadline has passed, and it is still to be served) goes behind the others, so that
 * one late request does not make the next one late.
 *
 * The caller names a request by its place in the caller's table. Insertion walks from the back:
 * O(1) for requests that come in the order of their deadlines. No allocation after create. Pure,
 * one thread. */
#ifndef TD_ROUTER_CORE_QUEUE_H
#define TD_ROUTER_CORE_QUEUE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

#define TD_QUEUE_NONE UINT32_MAX
#define TD_QUEUE_MAX_TENANTS 1024 /* told apart; more share one account */

#define TD_QUEUE_MAX_CLASSES 16 /* a rank has 4 bits in the wire key */

struct td_queue;
struct td_queue_key {
    uint32_t slo_class;
    uint64_t tenant; /* hash; 0 = none */
    int32_t priority;
    bool bound; /* has a deadline: once that has passed it is
                   hopeless, also while it waits here */
    bool hopeless;
    uint64_t deadline_ns;
    uint64_t id;
};

/* ranks[i] of class i, < n_classes: 0 goes first; classes of one rank are one queue. */
td_status td_queue_create(uint32_t max_requests, uint32_t n_classes, const uint32_t *ranks,
                          struct td_queue **ret_order, struct td_err *err);
void td_queue_destroy(struct td_queue *order);
void td_queue_insert(struct td_queue *order, uint32_t request_at, const struct td_queue_key *key,
                     double work_s, uint64_t now_ns);
void td_queue_remove(struct td_queue *order, uint32_t request_at);
bool td_queue_has(const struct td_queue *order, uint32_t request_at);
uint32_t td_queue_n(const struct td_queue *order);
/* sum of work_s of those who go before a newcomer of the class */
double td_queue_work_s(const struct td_queue *order, uint32_t slo_class);

/* A walk in dispatch order: start, then next until TD_QUEUE_NONE. fullness 0..1 decides which
 * classes may take work. During a walk the request last returned may be removed; a tenant whose
 * request was held gives its next one only after the other tenants had their turn. */
void td_queue_walk(struct td_queue *order, double fullness, uint64_t now_ns);
uint32_t td_queue_next(struct td_queue *order);
/* Of rank 1 and on: how full the fleet may be for it to take work; above 1: always. At most that
 * of the rank before. */
void td_queue_set_ceiling(struct td_queue *order, uint32_t rank, double ceiling);
/* During a walk: something was placed, and fullness is this now. If it exceeds the ceiling of the
 * rank whose turn it is, the walk is over. */
void td_queue_fill(struct td_queue *order, double fullness);

/* service attained */
void td_queue_charge(struct td_queue *order, uint64_t tenant, double tokens, uint64_t now_ns);
/* Accounts looked at so far in search of one that a new tenant can have: at most 16 for each. */
uint64_t td_queue_looks(const struct td_queue *order);
/* A request of the tenant has come; weight > 0: how large its share is beside the others'. */
void td_queue_ask(struct td_queue *order, uint64_t tenant, double weight, uint64_t now_ns);
/* Has it attained more service than its share of all that was attained, by weights, among the
 * tenants that asked within the last minute? The flood has; who is alone never has. */
bool td_queue_above_share(const struct td_queue *order, uint64_t tenant, uint64_t now_ns);
/* Has it attained less than its share? A tenant that asks alone never has. */
bool td_queue_below_share(const struct td_queue *order, uint64_t tenant, uint64_t now_ns);
size_t td_queue_request_bytes(void); /* memory for each place */
/* One 64-bit key for the queues of workers: class rank, priority, deadline in us. Smaller goes
 * first. */
uint64_t td_queue_wire_key(const struct td_queue *order, const struct td_queue_key *key);

#endif
