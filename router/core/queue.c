/* queue.c - see queue.h. One list for each (class, tenant) that has something waiting; the lists of
 * a class stand in a small array.
 *
 * A list is walked by its links, and found into by a treap over the same items (heap by a hash
 * of the place): a worker that dies sends thousands of requests back at once, each of which
 * belongs before most that wait. Accounts of tenants are found by a hash table with linear
 * probing. */
#include "router/core/queue.h"

#include <math.h>
#include <stdlib.h>

#define N_TENANTS (TD_QUEUE_MAX_TENANTS + 1) /* the last is shared by the surplus */
#define HALF_LIFE_S 60.0
#define NO TD_QUEUE_NONE
#define MAX_LOOKS 16
#define ACTIVE_NS 60000000000ull /* a tenant shares while its last request came within this */
#define COUNT_NS 500000000ull    /* how often those are counted */
/* equal tenants stand a little above and below their shares by turns: no reason to hold them
   back */
#define SHARE_SLACK 1.1
#define N_ACCOUNTS 4096 /* a power of two, four times the tenants: probes are short */

struct item {
    struct td_queue_key key;
    uint32_t prev, next;
    uint32_t left, right; /* of the treap */
    uint16_t tenant;
    bool in;
    double work_s;
    uint64_t since_ns;
};

struct list {
    uint32_t head, tail, cursor, root;
};

struct tenant {
    uint64_t hash;
    double service; /* decayed to service_ns */
    uint64_t service_ns;
    uint32_t n_waiting;
    double weight;     /* of its last request */
    uint64_t asked_ns; /* when that came; 0 = never */
};

struct td_queue {
    struct item *items; /* [max_requests] */
    uint32_t n, n_classes, n_ranks, max_requests;
    uint32_t rank_of[TD_QUEUE_MAX_CLASSES];
    double ceiling[TD_QUEUE_MAX_CLASSES]; /* of each rank, never above the one before */
    double work_s[TD_QUEUE_MAX_CLASSES];  /* of each rank */
    struct list (*lists)[N_TENANTS];      /* [n_ranks]: classes of one rank wait together */
    uint16_t (*busy)[N_TENANTS];          /* [n_ranks]: tenants with a list that is not empty */
    uint32_t n_busy[TD_QUEUE_MAX_CLASSES];
    struct tenant tenants[N_TENANTS];
    uint32_t n_tenants, hand; /* hand: where the search for an account to forget
                                 goes on */
    uint64_t n_looks;
    uint16_t account[N_ACCOUNTS]; /* tenant by hash; 0 = none */
    double total;                 /* service of all, decayed to total_ns */
    double active_weight;         /* of those who asked lately, at counted_ns */
    uint64_t total_ns, counted_ns;
    /* the walk */
    double service[N_TENANTS]; /* now, of those with a list in its class: worked out once, since
                                  next would cost an exp2 for each of them each time */
    uint16_t given;            /* whose request was given last: the caller may have charged that
                                  one since */
    uint32_t walk_rank;
    double fullness;
    uint64_t now_ns;
};

td_status td_queue_create(uint32_t max_requests, uint32_t n_classes, const uint32_t *ranks,
                          struct td_queue **ret_order, struct td_err *err)
{
    TD_ASSERT(n_classes >= 1 && n_classes <= TD_QUEUE_MAX_CLASSES);
    struct td_queue *o = calloc(1, sizeof *o);
    if (o) {
        o->items = calloc(max_requests, sizeof *o->items);
        o->lists = malloc(n_classes * sizeof *o->lists);
        o->busy = malloc(n_classes * sizeof *o->busy);
    }
    if (!o || !o->items || !o->lists || !o->busy) {
        td_queue_destroy(o);
        return td_fail(err, TD_ERR_NOMEM, "router queue: no memory for %u requests", max_requests);
    }
    o->max_requests = max_requests;
    o->n_classes = n_classes;
    for (uint32_t c = 0; c < n_classes; c++) {
        TD_ASSERT(ranks[c] < n_classes);
        o->rank_of[c] = ranks[c];
        if (ranks[c] >= o->n_ranks) o->n_ranks = ranks[c] + 1;
        for (uint32_t t = 0; t < N_TENANTS; t++) o->lists[c][t] = (struct list){NO, NO, NO, NO};
    }
    for (uint32_t rank = 0; rank < o->n_ranks; rank++)
        o->ceiling[rank] = rank ? 1 - 0.4 * rank / (o->n_ranks - 1) : INFINITY;
    o->n_tenants = 1; /* 0 = no tenant */
    o->walk_rank = o->n_ranks;
    *ret_order = o;
    return TD_OK;
}

void td_queue_destroy(struct td_queue *o)
{
    if (!o) return;
    free(o->items);
    free(o->lists);
    free(o->busy);
    free(o);
}

/* ---- tenants --------------------------------------------------------------------------------- */

static double service_at(const struct tenant *t, uint64_t now_ns)
{
    double dt = now_ns > t->service_ns ? (double)(now_ns - t->service_ns) * 1e-9 : 0;
    return t->service * exp2(-dt / HALF_LIFE_S);
}

static uint32_t account_home(uint64_t hash)
{
    return (uint32_t)(hash * 0x9e3779b97f4a7c15ull >> 32) & (N_ACCOUNTS - 1);
}

/* Where the hash's account is entered, or would be. */
static uint32_t account_at(const struct td_queue *o, uint64_t hash)
{
    uint32_t at = account_home(hash);
    while (o->account[at] && o->tenants[o->account[at]].hash != hash)
        at = (at + 1) & (N_ACCOUNTS - 1);
    return at;
}

/* Out of the table; those that had probed past it move up. */
static void account_forget(struct td_queue *o, uint64_t hash)
{
    uint32_t hole = account_at(o, hash);
    o->account[hole] = 0;
    for (uint32_t at = (hole + 1) & (N_ACCOUNTS - 1); o->account[at];
         at = (at + 1) & (N_ACCOUNTS - 1)) {
        uint32_t home = account_home(o->tenants[o->account[at]].hash);
        /* it does not reach back to the hole */
        if (((at - home) & (N_ACCOUNTS - 1)) < ((at - hole) & (N_ACCOUNTS - 1))) continue;
        o->account[hole] = o->account[at];
        o->account[at] = 0;
        hole = at;
    }
}

/* An account for the hash: its own, a new one, that of somebody with nothing waiting and no
 * service worth a token, or the shared one. For the third at most MAX_LOOKS are looked at, from
 * where the last search ended: a flood of tenants that come once costs each of them no more than
 * that, and an account that can be forgotten is found by one of the next N_TENANTS / MAX_LOOKS
 * who ask. */
static uint16_t tenant_of(struct td_queue *o, uint64_t hash, uint64_t now_ns)
{
    if (hash == 0) return 0;
    uint32_t at = account_at(o, hash), idle = NO;
    if (o->account[at]) return o->account[at];
    if (o->n_tenants < TD_QUEUE_MAX_TENANTS) {
        idle = o->n_tenants++;
    } else {
        for (uint32_t looks = 0; looks < MAX_LOOKS && idle == NO; looks++) {
            uint32_t i = 1 + o->hand;
            o->hand = (o->hand + 1) % (TD_QUEUE_MAX_TENANTS - 1);
            o->n_looks++;
            if (o->tenants[i].n_waiting == 0 && service_at(&o->tenants[i], now_ns) <= 1) idle = i;
        }
        if (idle == NO) return N_TENANTS - 1; /* nobody there may be forgotten yet */
        account_forget(o, o->tenants[idle].hash);
        at = account_at(o, hash);
    }
    o->tenants[idle] = (struct tenant){.hash = hash, .service_ns = now_ns};
    o->account[at] = (uint16_t)idle;
    return (uint16_t)idle;
}

static double decayed(double service, uint64_t at_ns, uint64_t now_ns)
{
    return now_ns > at_ns ? service * exp2(-(double)(now_ns - at_ns) * 1e-9 / HALF_LIFE_S)
                          : service;
}

void td_queue_charge(struct td_queue *o, uint64_t tenant, double tokens, uint64_t now_ns)
{
    struct tenant *t = &o->tenants[tenant_of(o, tenant, now_ns)];
    t->service = service_at(t, now_ns) + tokens;
    t->service_ns = now_ns;
    o->total = decayed(o->total, o->total_ns, now_ns) + tokens;
    o->total_ns = now_ns;
}

static bool active(const struct tenant *t, uint64_t now_ns)
{
    return t->asked_ns && now_ns - t->asked_ns < ACTIVE_NS;
}

static void count_active(struct td_queue *o, uint64_t now_ns)
{
    o->active_weight =
        active(&o->tenants[N_TENANTS - 1], now_ns) ? o->tenants[N_TENANTS - 1].weight : 0;
    for (uint32_t i = 0; i < o->n_tenants; i++)
        if (active(&o->tenants[i], now_ns)) o->active_weight += o->tenants[i].weight;
    o->counted_ns = now_ns;
}

void td_queue_ask(struct td_queue *o, uint64_t tenant, double weight, uint64_t now_ns)
{
    struct tenant *t = &o->tenants[tenant_of(o, tenant, now_ns)];
    bool counted = active(t, now_ns) && !(t->weight < weight) && !(t->weight > weight);
    t->weight = weight;
    t->asked_ns = now_ns > 0 ? now_ns : 1;
    if (!counted || now_ns - o->counted_ns >= COUNT_NS) count_active(o, now_ns);
}

/* Service attained, in shares of all that was attained; 1 for who has nobody to share with. */
static double in_shares(const struct td_queue *o, uint64_t tenant, uint64_t now_ns)
{
    uint32_t at = tenant == 0 ? 0 : o->account[account_at(o, tenant)];
    const struct tenant *t = &o->tenants[tenant != 0 && at == 0 ? N_TENANTS - 1 : at];
    if (!(o->active_weight > t->weight) || !(t->weight > 0)) return 1;
    double share = decayed(o->total, o->total_ns, now_ns) * t->weight / o->active_weight;
    return share > 0 ? service_at(t, now_ns) / share : 1;
}

bool td_queue_above_share(const struct td_queue *o, uint64_t tenant, uint64_t now_ns)
{
    return in_shares(o, tenant, now_ns) > SHARE_SLACK;
}
bool td_queue_below_share(const struct td_queue *o, uint64_t tenant, uint64_t now_ns)
{
    return in_shares(o, tenant, now_ns) < 1 / SHARE_SLACK;
}

/* ---- lists ----------------------------------------------------------------------------------- */

static bool goes_before(const struct td_queue_key *a, const struct td_queue_key *b)
{
    if (a->priority != b->priority) return a->priority > b->priority;
    if (a->hopeless != b->hopeless) return b->hopeless;
    if (a->deadline_ns != b->deadline_ns) return a->deadline_ns < b->deadline_ns;
    return a->id < b->id;
}

/* A total order of the items of a list: ids differ, but nothing here depends on it. */
static bool stands_before(const struct td_queue *o, uint32_t a, uint32_t b)
{
    const struct td_queue_key *x = &o->items[a].key, *y = &o->items[b].key;
    return goes_before(x, y) || (a < b && !goes_before(y, x));
}

/* odd: no two are equal */
static uint32_t heap_key(uint32_t request_at) { return request_at * 2654435761u; }

/* Into the treap; the one before it, or NO. */
static uint32_t treap_insert(struct td_queue *o, struct list *l, uint32_t request_at)
{
    uint32_t *at = &l->root, before = NO, *less = &o->items[request_at].left,
             *more = &o->items[request_at].right;
    while (*at != NO && heap_key(*at) > heap_key(request_at)) {
        bool right = stands_before(o, *at, request_at);
        if (right) before = *at;
        at = right ? &o->items[*at].right : &o->items[*at].left;
    }
    uint32_t rest = *at; /* to be split by the new item, which takes its place */
    *at = request_at;
    while (rest != NO) {
        if (stands_before(o, rest, request_at)) {
            before = *less = rest;
            less = &o->items[rest].right;
            rest = *less;
        } else {
            *more = rest;
            more = &o->items[rest].left;
            rest = *more;
        }
    }
    *less = *more = NO;
    return before;
}

static void treap_remove(struct td_queue *o, struct list *l, uint32_t request_at)
{
    uint32_t *at = &l->root, less = o->items[request_at].left, more = o->items[request_at].right;
    while (*at != request_at)
        at = stands_before(o, *at, request_at) ? &o->items[*at].right : &o->items[*at].left;
    while (less != NO && more != NO) { /* its two subtrees become one */
        if (heap_key(less) > heap_key(more)) {
            *at = less;
            at = &o->items[less].right;
            less = *at;
        } else {
            *at = more;
            at = &o->items[more].left;
            more = *at;
        }
    }
    *at = less != NO ? less : more;
}

/* Into its place in its list. Its key must not change while it is in. */
static void link_item(struct td_queue *o, uint32_t request_at)
{
    struct item *it = &o->items[request_at];
    uint32_t c = o->rank_of[it->key.slo_class];
    struct list *l = &o->lists[c][it->tenant];
    uint32_t after = treap_insert(o, l, request_at);
    it->prev = after;
    it->next = after == NO ? l->head : o->items[after].next;
    if (l->head == NO) o->busy[c][o->n_busy[c]++] = it->tenant;
    if (it->next == NO)
        l->tail = request_at;
    else
        o->items[it->next].prev = request_at;
    if (after == NO)
        l->head = request_at;
    else
        o->items[after].next = request_at;
}

static void unlink_item(struct td_queue *o, uint32_t request_at)
{
    struct item *it = &o->items[request_at];
    uint32_t c = o->rank_of[it->key.slo_class];
    struct list *l = &o->lists[c][it->tenant];
    treap_remove(o, l, request_at);
    if (l->cursor == request_at) l->cursor = it->next;
    if (it->prev == NO)
        l->head = it->next;
    else
        o->items[it->prev].next = it->next;
    if (it->next == NO)
        l->tail = it->prev;
    else
        o->items[it->next].prev = it->prev;
    if (l->head != NO) return;
    for (uint32_t i = 0; i < o->n_busy[c]; i++)
        if (o->busy[c][i] == it->tenant) {
            o->busy[c][i] = o->busy[c][--o->n_busy[c]];
            break;
        }
}

void td_queue_insert(struct td_queue *o, uint32_t request_at, const struct td_queue_key *key,
                     double work_s, uint64_t now_ns)
{
    TD_ASSERT(request_at < o->max_requests && !o->items[request_at].in &&
              key->slo_class < o->n_classes);
    uint16_t tenant = tenant_of(o, key->tenant, now_ns);
    o->items[request_at] = (struct item){
        .key = *key, .tenant = tenant, .in = true, .work_s = work_s, .since_ns = now_ns};
    link_item(o, request_at);
    o->tenants[tenant].n_waiting++;
    o->work_s[o->rank_of[key->slo_class]] += work_s;
    o->n++;
}

void td_queue_remove(struct td_queue *o, uint32_t request_at)
{
    struct item *it = &o->items[request_at];
    TD_ASSERT(request_at < o->max_requests && it->in);
    uint32_t c = o->rank_of[it->key.slo_class];
    unlink_item(o, request_at);
    o->tenants[it->tenant].n_waiting--;
    /* exact at rest: no rounding is carried on */
    o->work_s[c] = o->n_busy[c] == 0 ? 0 : fmax(0, o->work_s[c] - it->work_s);
    it->in = false;
    o->n--;
}

/* Those at the cursor whose deadline has passed while they waited go behind the hopeful of their
 * priority. Each at most once. */
static void demote_late(struct td_queue *o, struct list *l)
{
    while (l->cursor != NO) {
        uint32_t request_at = l->cursor, next = o->items[request_at].next;
        struct td_queue_key *k = &o->items[request_at].key;
        if (!k->bound || k->hopeless || o->now_ns <= k->deadline_ns) return;
        if (o->items[request_at].prev == NO && next == NO) {
            k->hopeless = true;
            return;
        }
        unlink_item(o, request_at);
        k->hopeless = true;
        link_item(o, request_at);
        /* those before `next` had their turn, unless it stands there now itself */
        l->cursor = o->items[request_at].next == next ? request_at : next;
    }
}

bool td_queue_has(const struct td_queue *o, uint32_t request_at)
{
    return request_at < o->max_requests && o->items[request_at].in;
}
uint32_t td_queue_n(const struct td_queue *o) { return o->n; }

double td_queue_work_s(const struct td_queue *o, uint32_t slo_class)
{
    double sum = 0;
    for (uint32_t rank = 0; rank <= o->rank_of[slo_class]; rank++) sum += o->work_s[rank];
    return sum;
}

/* ---- walk ------------------------------------------------------------------------------------ */

void td_queue_set_ceiling(struct td_queue *o, uint32_t rank, double ceiling)
{
    if (rank > 0 && rank < o->n_ranks) o->ceiling[rank] = fmin(ceiling, o->ceiling[rank - 1]);
}

/* May the rank that the walk is at take no more? The first always may. */
static bool over_ceiling(const struct td_queue *o)
{
    return o->fullness >= o->ceiling[o->walk_rank];
}

/* Service attained for each unit of the tenant's weight. */
static double weighted_service(const struct td_queue *o, uint16_t tenant)
{
    const struct tenant *t = &o->tenants[tenant];
    return service_at(t, o->now_ns) / (t->weight > 0 ? t->weight : 1);
}

static void enter_class(struct td_queue *o)
{
    for (; o->walk_rank < o->n_ranks; o->walk_rank++) {
        uint32_t c = o->walk_rank;
        if (o->n_busy[c] == 0 || over_ceiling(o)) continue;
        for (uint32_t i = 0; i < o->n_busy[c]; i++) {
            struct list *l = &o->lists[c][o->busy[c][i]];
            l->cursor = l->head;
            demote_late(o, l);
            o->service[o->busy[c][i]] = weighted_service(o, o->busy[c][i]);
        }
        o->given = o->busy[c][0];
        return;
    }
}

void td_queue_walk(struct td_queue *o, double fullness, uint64_t now_ns)
{
    o->walk_rank = 0;
    o->fullness = fullness;
    o->now_ns = now_ns;
    enter_class(o);
}

void td_queue_fill(struct td_queue *o, double fullness)
{
    o->fullness = fullness;
    if (o->walk_rank >= o->n_ranks || !over_ceiling(o)) return;
    o->walk_rank = o->n_ranks; /* ceilings fall from rank to rank */
}

uint32_t td_queue_next(struct td_queue *o)
{
    while (o->walk_rank < o->n_ranks) {
        uint32_t c = o->walk_rank, best = NO;
        double best_score = INFINITY, most = 1e-9, longest = 1e-9;
        o->service[o->given] = weighted_service(o, o->given);
        for (uint32_t i = 0; i < o->n_busy[c] && o->n_busy[c] > 1; i++) {
            /* scales of the two terms */
            const struct list *l = &o->lists[c][o->busy[c][i]];
            most = fmax(most, o->service[o->busy[c][i]]);
            longest = fmax(longest, (double)(o->now_ns - o->items[l->head].since_ns));
        }
        for (uint32_t i = 0; i < o->n_busy[c]; i++) {
            const struct list *l = &o->lists[c][o->busy[c][i]];
            if (l->cursor == NO) continue;
            double score = 0.8 * o->service[o->busy[c][i]] / most -
                           0.2 * (double)(o->now_ns - o->items[l->head].since_ns) / longest +
                           (l->cursor == l->head ? 0 : 2);
            if (score < best_score) {
                best_score = score;
                best = o->busy[c][i];
            }
        }
        if (best != NO) {
            struct list *l = &o->lists[c][best];
            uint32_t request_at = l->cursor;
            l->cursor = o->items[request_at].next;
            demote_late(o, l);
            o->given = (uint16_t)best;
            return request_at;
        }
        o->walk_rank++;
        enter_class(o);
    }
    return NO;
}

uint64_t td_queue_looks(const struct td_queue *o) { return o->n_looks; }

size_t td_queue_request_bytes(void) { return sizeof(struct item); }

uint64_t td_queue_wire_key(const struct td_queue *o, const struct td_queue_key *k)
{
    uint64_t us = k->deadline_ns / 1000, most = ((uint64_t)1 << 50) - 1;
    uint64_t rank = o->rank_of[k->slo_class], priority = (uint32_t)(100 - k->priority),
             hopeless = k->hopeless;
    return rank << 60 | priority << 51 | hopeless << 50 | (us < most ? us : most);
}
