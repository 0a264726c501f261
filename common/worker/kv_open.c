/* kv_open.c - a worker's end of KV transfers: opened from its options, its certificates looked
 * at while it runs. */
#include "common/worker/worker_parts.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/address.h"
#include "common/base/clock.h"
#include "common/base/log.h"

static void xfer_wake(void *ctx) { td_wakeup_signal(&((struct td_worker *)ctx)->wakeup); }

/* "off", "always", "1/64". */
static td_status parse_digest(const char *text, uint32_t *ret_every, struct td_err *err)
{
    char *end = NULL;
    if (!strcmp(text, "off") || !strcmp(text, "always")) {
        *ret_every = text[0] == 'a';
        return TD_OK;
    }
    unsigned long n = strncmp(text, "1/", 2) ? 0 : strtoul(text + 2, &end, 10);
    if (n < 1 || n > 1000000 || *end)
        return td_fail(err, TD_ERR_INVALID,
                       "kv_digest is \"%s\", must be off, always or 1/N with N in 1..1000000",
                       text);
    *ret_every = (uint32_t)n;
    return TD_OK;
}

/* TD_OK with no provider where none is there and none was asked for. */
static td_status find_verbs(const struct td_worker *w, const struct td_verbs **ret_verbs,
                            struct td_err *err)
{
    struct td_err why = {0};
    enum td_xfer_path path = td_kv_port_path(w->cfg.transfer);
    if (!td_xfer_path_uses_verbs(path)) return TD_OK;
    bool split = td_engine_device_info(w->engine) && td_engine_n_ranks(w->engine) > 1;
    td_status s = split ? td_fail(&why, TD_ERR_UNSUPPORTED,
                                  "the pool lies on the devices of %d ranks (tp), and NICs are "
                                  "given the memory of one",
                                  td_engine_n_ranks(w->engine))
                        : td_kv_port_verbs(ret_verbs, &why);
    if (!s) return TD_OK;
    if (td_xfer_path_needs_verbs(path))
        return td_fail(err, s, "transfer is %s, and RDMA is not to be had: %s",
                       td_xfer_path_name(path), why.msg);
    char q[300];
    td_info("rdma_absent", "reason=%s", td_log_quote(q, sizeof q, why.msg));
    return TD_OK;
}

void td_worker_look_at_files(struct td_worker *w, uint64_t now_ns)
{
    bool loaded;
    struct td_err err = {0};
    char text[TD_ERR_MSG_MAX];
    if (!w->use_kv_tls || now_ns < w->tls_look_ns) return;
    w->tls_look_ns = td_deadline_after_ms(now_ns, 1000);
    if (td_xfer_tls_reload_files(w->xfer, &loaded, &err))
        td_warn("tls_reload_failed", "use=kv action=keep_old err=%s",
                td_log_quote(text, sizeof text, err.msg));
    else if (loaded)
        td_info("tls_reloaded", "use=kv file=%s", w->cfg.tls.cert);
}

td_status td_worker_open_xfer(struct td_worker *w, struct td_err *err)
{
    const struct td_worker_config *o = &w->cfg;
    uint32_t digest_every = 0;
    char host[256], advertise[256];
    struct td_kv_port port;
    const struct td_verbs *verbs = NULL;
    const struct td_kv_port_files files = {o->tls.cert, o->tls.key, o->tls.ca, w->trust.id.workers,
                                           w->trust.id.secret};
    struct td_xfer_config c = {.instance = w->name,
                               .incarnation = w->incarnation,
                               .layout_hash = td_engine_layout_hash(w->engine),
                               .memory = td_engine_device_memory(w->engine),
                               .listen_host = o->transfer_host,
                               .max_slots = (uint32_t)o->model.max_seqs,
                               .max_ops = (uint32_t)o->model.max_seqs,
                               .peer_timeout_ms = (uint32_t)o->peer_timeout_ms,
                               .hooks = {.wake = xfer_wake, .ctx = w}};
    td_status v = parse_digest(o->kv_digest, &digest_every, err);
    c.digest_every = digest_every;
    if (!v) v = find_verbs(w, &verbs, err);
    if (!v) v = td_kv_port_fill(&o->kv_port, o->transfer, &files, verbs, &port, &c, err);
    if (!v && o->transfer_host[0] == '[' &&
        !(v = td_address_host(o->transfer_host, host, sizeof host, err)))
        c.listen_host = host;
    if (!v && o->advertise[0] &&
        !(v = td_address_host(o->advertise, advertise, sizeof advertise, err)))
        c.advertise_host = advertise;
    if (v) return v;
    w->use_kv_tls = port.use_tls;
    td_status s = td_xfer_open(&c, &w->xfer, err);
    if (s) return s;
    struct td_kv_pool *kv = td_engine_kv(w->engine);
    struct td_kv_pool_stats st;
    td_kv_pool_stats(kv, &st);
    w->kv_blocks = st.n_blocks;
    return td_xfer_mem_add(w->xfer, td_engine_kv_arena(w->engine),
                           td_kv_pool_layout(kv)->block_bytes, st.n_blocks, err);
}

/* A KV port beyond loopback is for peers that show a certificate or prove the secret. */
td_status td_worker_check_kv_port(struct td_worker *w, struct td_err *err)
{
    const struct td_worker_config *c = &w->cfg;
    const struct td_kv_port_files files = {c->tls.cert, c->tls.key, c->tls.ca, w->trust.id.workers,
                                           w->trust.id.secret};
    struct td_kv_port port;
    struct td_xfer_config scratch = {0};
    char host[256], address[300];
    td_status s = td_kv_port_fill(&c->kv_port, c->transfer, &files, NULL, &port, &scratch, err);
    if (s) return s;
    /* a socket of this host, of this user */
    if (td_xfer_path_is_local(scratch.path)) return TD_OK;
    if ((s = td_address_host(c->transfer_host, host, sizeof host, err)) ||
        (s = td_address_join(host, 0, address, sizeof address, err)))
        return td_err_prefix(err, "transfer_host");
    if (td_address_is_loopback(address)) return TD_OK;
    return td_identity_check_port(&w->trust.id, "transfer_host", c->transfer_host, "KV transfers",
                                  "tls-worker-names", port.use_tls, err);
}
