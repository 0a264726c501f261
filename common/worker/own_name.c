/* own_name.c - see own_name.h. */
#include "common/worker/own_name.h"

#include <netdb.h>
#include <stdbool.h>
#include <time.h>

#include "common/base/address.h"
#include "common/base/clock.h"
#include "common/base/log.h"

static td_status look(void *ctx, const char *host, struct td_err *err)
{
    (void)ctx;
    char address[300];
    struct addrinfo *list = NULL;
    td_status s = td_address_join(host, 0, address, sizeof address, err);
    if (!s) s = td_address_resolve("advertise", address, false, &list, err);
    if (!s) freeaddrinfo(list);
    return s;
}

static uint64_t now_ns(void *ctx)
{
    (void)ctx;
    return td_now_ns();
}

static void pause_ms(void *ctx, uint64_t ms)
{
    (void)ctx;
    const struct timespec t = {.tv_sec = (time_t)(ms / 1000),
                               .tv_nsec = (long)(ms % 1000 * TD_NS_PER_MS)};
    clock_nanosleep(CLOCK_MONOTONIC, 0, &t, NULL);
}

td_status td_own_name_wait(const char *host, const struct td_own_name_hooks *hooks,
                           struct td_err *err)
{
    static const struct td_own_name_hooks real = {look, now_ns, pause_ms, NULL};
    const struct td_own_name_hooks *h = hooks ? hooks : &real;
    struct td_err why = {0};
    char q[TD_ERR_MSG_MAX + 8];
    bool told = false;
    uint64_t begin_ns = h->now_ns(h->ctx);
    for (;;) {
        td_status s = h->look(h->ctx, host, &why);
        uint64_t waited_ms = (h->now_ns(h->ctx) - begin_ns) / TD_NS_PER_MS;
        if (!s && told)
            td_info("own_name_known", "advertise=%s waited_ms=%llu", host,
                    (unsigned long long)waited_ms);
        if (!s) return TD_OK;
        if (waited_ms >= TD_OWN_NAME_WAIT_MS)
            return td_fail(err, TD_ERR_INVALID, "%s: asked for %llu s, limit %d s", why.msg,
                           (unsigned long long)waited_ms / 1000, TD_OWN_NAME_WAIT_MS / 1000);
        if (!told)
            td_warn("own_name_unknown", "advertise=%s reason=%s action=ask_again limit_ms=%d", host,
                    td_log_quote(q, sizeof q, why.msg), TD_OWN_NAME_WAIT_MS);
        told = true;
        h->pause(h->ctx, TD_OWN_NAME_AGAIN_MS);
    }
}
