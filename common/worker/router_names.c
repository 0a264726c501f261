/* router_names.c - see router_names.h.
 *
 * The thread and its owner share the struct by two references: an owner that closes does not wait
 * for a name server. */
#include "common/worker/router_names.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "common/base/address.h"
#include "common/base/clock.h"
#include "common/base/log.h"

enum { LOOK_MS = 5000, AGAIN_MS = 1000, MAX_ITEMS = 64, ITEM_BYTES = 300 };

struct item {
    char text[ITEM_BYTES];
    bool is_name, unknown; /* unknown: its last look-up failed, which was logged */
    struct td_router_target *targets;
    size_t n_targets;
};

struct td_router_names {
    struct item items[MAX_ITEMS]; /* written by the thread, once it runs */
    size_t n_items, max_targets;
    pthread_mutex_t lock; /* of what follows */
    pthread_cond_t cond;
    bool closed;
    int n_refs;
    uint64_t version;
    struct td_router_target *targets; /* [max_targets] */
    size_t n_targets;
};

static void free_names(struct td_router_names *n)
{
    for (size_t i = 0; i < n->n_items; i++) free(n->items[i].targets);
    pthread_mutex_destroy(&n->lock);
    pthread_cond_destroy(&n->cond);
    free(n->targets);
    free(n);
}

/* "10.0.0.1:80", "[::1]:80", and what has a scheme of gRPC's. */
static bool is_literal(const char *text)
{
    char host[256];
    uint8_t raw[16];
    const char *colon = strrchr(text, ':');
    static const char *const schemes[] = {"unix:", "unix-abstract:", "dns:", "ipv4:", "ipv6:"};
    for (size_t i = 0; i < sizeof schemes / sizeof *schemes; i++)
        if (!strncmp(text, schemes[i], strlen(schemes[i]))) return true;
    if (!colon) return false;
    snprintf(host, sizeof host, "%.*s", (int)(colon - text), text);
    size_t n = strlen(host);
    if (n > 2 && host[0] == '[' && host[n - 1] == ']') {
        host[n - 1] = 0;
        return inet_pton(AF_INET6, host + 1, raw) == 1;
    }
    return inet_pton(AF_INET, host, raw) == 1;
}

static td_status target_of(const struct addrinfo *a, const char *item,
                           struct td_router_target *ret_target)
{
    char host[NI_MAXHOST], port[NI_MAXSERV];
    if (getnameinfo(a->ai_addr, a->ai_addrlen, host, sizeof host, port, sizeof port,
                    NI_NUMERICHOST | NI_NUMERICSERV))
        return TD_ERR_INVALID;
    bool six = a->ai_family == AF_INET6;
    snprintf(ret_target->target, sizeof ret_target->target, six ? "[%.200s]:%s" : "%.200s:%s", host,
             port);
    snprintf(ret_target->host, sizeof ret_target->host, "%.*s", (int)(strrchr(item, ':') - item),
             item);
    return TD_OK;
}

static void look_up(struct td_router_names *n, struct item *i)
{
    struct addrinfo *list = NULL;
    struct td_err err = {0};
    char q[TD_ERR_MSG_MAX + 8];
    td_status s = td_address_resolve("router", i->text, false, &list, &err);
    if (s && !i->unknown)
        td_warn("router_unknown", "reason=%s action=ask_again", td_log_quote(q, sizeof q, err.msg));
    i->unknown = s != TD_OK;
    if (s) return;
    i->n_targets = 0;
    for (const struct addrinfo *a = list; a && i->n_targets < n->max_targets; a = a->ai_next) {
        struct td_router_target *t = &i->targets[i->n_targets];
        bool seen = target_of(a, i->text, t) != TD_OK;
        for (size_t k = 0; k < i->n_targets && !seen; k++)
            seen = !strcmp(i->targets[k].target, t->target);
        i->n_targets += !seen;
    }
    freeaddrinfo(list);
}

/* All items' targets, each once. */
static size_t gather(const struct td_router_names *n, struct td_router_target *ret_targets)
{
    size_t n_all = 0;
    for (size_t i = 0; i < n->n_items; i++)
        for (size_t k = 0; k < n->items[i].n_targets && n_all < n->max_targets; k++) {
            const struct td_router_target *t = &n->items[i].targets[k];
            bool seen = false;
            for (size_t j = 0; j < n_all && !seen; j++)
                seen = !strcmp(ret_targets[j].target, t->target);
            if (!seen) ret_targets[n_all++] = *t;
        }
    return n_all;
}

static bool has(const struct td_router_target *list, size_t n, const char *target)
{
    for (size_t i = 0; i < n; i++)
        if (!strcmp(list[i].target, target)) return true;
    return false;
}

/* Name servers give a name's addresses in any order: another order is no news. */
static void publish(struct td_router_names *n, const struct td_router_target *all, size_t n_all)
{
    pthread_mutex_lock(&n->lock);
    bool same = n->version && n_all == n->n_targets;
    for (size_t i = 0; same && i < n_all; i++) same = has(n->targets, n->n_targets, all[i].target);
    if (!same) {
        memcpy(n->targets, all, n_all * sizeof *all);
        n->n_targets = n_all;
        n->version++;
    }
    pthread_mutex_unlock(&n->lock);
}

/* Waits for the next look; true = closed. */
static bool wait_closed(struct td_router_names *n, uint64_t ms)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += (time_t)(ms / 1000);
    pthread_mutex_lock(&n->lock);
    while (!n->closed && pthread_cond_timedwait(&n->cond, &n->lock, &until) != ETIMEDOUT) {
    }
    bool closed = n->closed;
    pthread_mutex_unlock(&n->lock);
    return closed;
}

static void let_go(struct td_router_names *n)
{
    pthread_mutex_lock(&n->lock);
    bool last = --n->n_refs == 0;
    pthread_mutex_unlock(&n->lock);
    if (last) free_names(n);
}

static void *look_main(void *arg)
{
    struct td_router_names *n = arg;
    struct td_router_target *all = calloc(n->max_targets, sizeof *all);
    TD_ASSERT(all); /* some KiB */
    for (bool closed = false; !closed;) {
        bool unknown = false;
        for (size_t i = 0; i < n->n_items; i++) {
            if (n->items[i].is_name) look_up(n, &n->items[i]);
            unknown |= n->items[i].unknown;
        }
        publish(n, all, gather(n, all));
        closed = wait_closed(n, unknown ? AGAIN_MS : LOOK_MS);
    }
    free(all);
    let_go(n);
    return NULL;
}

static td_status add_item(struct td_router_names *n, const char *text, size_t n_bytes,
                          struct td_err *err)
{
    while (n_bytes && text[0] == ' ') text++, n_bytes--;
    while (n_bytes && text[n_bytes - 1] == ' ') n_bytes--;
    if (n_bytes == 0) return TD_OK;
    if (n->n_items == MAX_ITEMS || n->n_items == n->max_targets)
        return td_fail(err, TD_ERR_LIMIT, "router names more than %zu routers", n->n_items);
    if (n_bytes >= ITEM_BYTES)
        return td_fail(err, TD_ERR_INVALID, "router has an item of %zu bytes, limit %d", n_bytes,
                       ITEM_BYTES - 1);
    struct item *i = &n->items[n->n_items];
    snprintf(i->text, sizeof i->text, "%.*s", (int)n_bytes, text);
    i->targets = calloc(n->max_targets, sizeof *i->targets);
    if (!i->targets) return td_fail(err, TD_ERR_NOMEM, "router: no memory");
    n->n_items++;
    /* host without a port: gRPC takes 443 for it, or refuses it, as ever */
    i->is_name = strrchr(i->text, ':') && !is_literal(i->text);
    if (i->is_name) return TD_OK;
    snprintf(i->targets[0].target, sizeof i->targets[0].target, "%s", i->text);
    i->n_targets = 1;
    return TD_OK;
}

static td_status start(struct td_router_names *n, struct td_err *err)
{
    pthread_attr_t detached;
    pthread_t thread;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    n->n_refs++;
    int e = pthread_create(&thread, &detached, look_main, n);
    pthread_attr_destroy(&detached);
    if (!e) return TD_OK;
    n->n_refs--;
    return td_fail(err, TD_ERR_IO, "router: no thread to look names up: %s", strerror(e));
}

td_status td_router_names_open(const char *list, size_t max_targets,
                               struct td_router_names **ret_names, struct td_err *err)
{
    struct td_router_names *n = calloc(1, sizeof *n);
    if (!n) return td_fail(err, TD_ERR_NOMEM, "router: no memory");
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&n->lock, NULL);
    pthread_cond_init(&n->cond, &monotonic);
    pthread_condattr_destroy(&monotonic);
    n->n_refs = 1;
    n->max_targets = max_targets;
    n->targets = calloc(max_targets, sizeof *n->targets);
    td_status s = n->targets ? TD_OK : td_fail(err, TD_ERR_NOMEM, "router: no memory");
    bool any_name = false;
    for (const char *at = list; !s;) {
        size_t n_bytes = strcspn(at, ",");
        s = add_item(n, at, n_bytes, err);
        if (!at[n_bytes]) break;
        at += n_bytes + 1;
    }
    if (!s && n->n_items == 0)
        s = td_fail(err, TD_ERR_INVALID, "router is empty: give --router host:port");
    for (size_t i = 0; i < n->n_items; i++) any_name |= n->items[i].is_name;
    if (!s && any_name) s = start(n, err);
    if (!s && !any_name) {
        n->n_targets = gather(n, n->targets);
        n->version = 1;
    }
    if (s)
        free_names(n);
    else
        *ret_names = n;
    return s;
}

void td_router_names_close(struct td_router_names *n)
{
    if (!n) return;
    pthread_mutex_lock(&n->lock);
    n->closed = true;
    pthread_cond_signal(&n->cond);
    pthread_mutex_unlock(&n->lock);
    let_go(n);
}

size_t td_router_names_get(struct td_router_names *n, uint64_t *version,
                           struct td_router_target *ret_targets)
{
    pthread_mutex_lock(&n->lock);
    if (*version != n->version) memcpy(ret_targets, n->targets, n->n_targets * sizeof *ret_targets);
    *version = n->version;
    size_t n_targets = n->n_targets;
    pthread_mutex_unlock(&n->lock);
    return n_targets;
}
