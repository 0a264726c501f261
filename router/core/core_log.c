/* core_log.c - the decision log's lines. Numbers only, so a line has one reading; keys in a
 * fixed order; doubles as hexadecimal floats, which are exact. */
#include "router/core/core.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define VERSION 3

/* ---- writing --------------------------------------------------------------------------------- */

int td_core_config_format(const struct td_core_config *c, uint32_t i, char *line, size_t line_bytes)
{
    if (i == 0)
        return snprintf(line, line_bytes,
                        "c version=%d mode=%d policy=%s max_requests=%u max_queued=%u "
                        "hybrid_local_tokens=%u worker_timeout_ms=%u queue_timeout_ms=%u "
                        "stall_ms=%u max_failovers=%u max_prefix_entries=%" PRIu64
                        " attainment=%a seed=%" PRIu64 " classes=%u thetas=%u\n",
                        VERSION, (int)c->mode, c->policy, c->max_requests, c->max_queued,
                        c->hybrid_local_tokens, c->worker_timeout_ms, c->queue_timeout_ms,
                        c->stall_ms, c->max_failovers, c->max_prefix_entries, c->attainment,
                        c->seed, c->n_classes, c->n_thetas);
    if (--i < c->n_classes) {
        const struct td_core_class *k = &c->classes[i];
        return snprintf(line, line_bytes,
                        "k name=%s ttft_ms=%a tpot_ms=%a weight=%a best_effort=%d\n", k->name,
                        k->ttft_ms, k->tpot_ms, k->weight, k->best_effort ? 1 : 0);
    }
    if ((i -= c->n_classes) >= c->n_thetas) return 0;
    const struct td_lat_theta *t = &c->thetas[i];
    return snprintf(line, line_bytes, "t known=%d p=%a,%a,%a d=%a,%a,%a,%a,%a link=%a,%a\n",
                    t->known ? 1 : 0, t->prefill[0], t->prefill[1], t->prefill[2], t->decode[0],
                    t->decode[1], t->decode[2], t->decode[3], t->decode[4], t->link_tau,
                    t->link_bytes_per_s);
}

int td_core_event_format(const struct td_core_event *e, char *line, size_t line_bytes)
{
    return snprintf(
        line, line_bytes,
        "e kind=%d now=%" PRIu64 " worker=%u slot=%u attempt=%u role=%d priority=%d id=%" PRIu64
        " a=%" PRIu64 " b=%" PRIu64 " c=%" PRIu64 " d=%" PRIu64 " e=%" PRIu64 " f=%" PRIu64
        " weight=%u hashes=%u hash_tokens=%u\n",
        (int)e->kind, e->now_ns, e->worker, e->slot, e->attempt, (int)e->role, e->priority, e->id,
        e->a, e->b, e->c, e->d, e->e, e->f, e->tenant_weight, e->n_hashes, e->hash_tokens);
}

int td_core_hashes_format(const struct td_core_event *e, uint32_t i, char *line, size_t line_bytes)
{
    uint32_t from = i * TD_CORE_HASHES_PER_LINE;
    if (from >= e->n_hashes) return 0;
    int n = snprintf(line, line_bytes, "h");
    for (uint32_t j = from; j < e->n_hashes && j < from + TD_CORE_HASHES_PER_LINE; j++)
        n += snprintf(line + n, line_bytes - (size_t)n, " %016" PRIx64, e->hashes[j]);
    return n + snprintf(line + n, line_bytes - (size_t)n, "\n");
}
_Static_assert(TD_CORE_HASHES_PER_LINE * 17 + 3 < TD_CORE_LINE_MAX, "a line of hashes fits");

int td_core_action_format(const struct td_core_action *a, char *line, size_t line_bytes)
{
    return snprintf(line, line_bytes,
                    "a kind=%d slot=%u id=%" PRIu64
                    " attempt=%u worker=%u local=%d code=%u retry_ms=%u key=%" PRIu64
                    " ttft_us=%" PRIu64 " tpot_us=%" PRIu64 " reason=\"%s\"\n",
                    (int)a->kind, a->slot, a->id, a->attempt, a->worker, a->local ? 1 : 0, a->code,
                    a->retry_ms, a->key, a->ttft_us, a->tpot_us, a->reason);
}

/* ---- reading --------------------------------------------------------------------------------- */

static td_status bad_line(struct td_err *err, const char *line, const char *why)
{
    return td_fail(err, TD_ERR_CORRUPT, "decision log: line \"%.80s\" %s", line, why);
}

static td_status read_config(struct td_core_reader *r, const char *line, struct td_err *err)
{
    struct td_core_config c = {0};
    int mode = -1, version = 0;
    if (sscanf(line, "c version=%d", &version) == 1 && version != VERSION)
        return td_fail(err, TD_ERR_UNSUPPORTED, "decision log: version is %d, this build reads %d",
                       version, VERSION);
    int n =
        sscanf(line,
               "c version=%d mode=%d policy=%31[a-z_] max_requests=%u max_queued=%u "
               "hybrid_local_tokens=%u worker_timeout_ms=%u "
               "queue_timeout_ms=%u stall_ms=%u max_failovers=%u max_prefix_entries=%" SCNu64
               " attainment=%la seed=%" SCNu64 " classes=%u thetas=%u",
               &version, &mode, r->policy, &c.max_requests, &c.max_queued, &c.hybrid_local_tokens,
               &c.worker_timeout_ms, &c.queue_timeout_ms, &c.stall_ms, &c.max_failovers,
               &c.max_prefix_entries, &c.attainment, &c.seed, &c.n_classes, &c.n_thetas);
    if (n != 15 || mode < TD_MODE_PD || mode > TD_MODE_HYBRID)
        return bad_line(err, line, "is not a configuration of ours");
    if (c.n_classes > TD_CORE_MAX_CLASSES || c.n_thetas > TD_CORE_MAX_NODE_CLASSES)
        return bad_line(err, line, "has too many classes or thetas");
    c.mode = (enum td_core_mode)mode;
    c.policy = r->policy;
    r->config = c;
    r->n_classes_missing = c.n_classes;
    r->n_thetas_missing = c.n_thetas;
    r->have_config = true;
    return TD_OK;
}

static td_status read_class(struct td_core_reader *r, const char *line, struct td_err *err)
{
    if (!r->n_classes_missing)
        return bad_line(err, line, "is one class more than the configuration says");
    struct td_core_class *k = &r->config.classes[r->config.n_classes - r->n_classes_missing];
    int best_effort = 0;
    if (sscanf(line, "k name=%31[^ ] ttft_ms=%la tpot_ms=%la weight=%la best_effort=%d", k->name,
               &k->ttft_ms, &k->tpot_ms, &k->weight, &best_effort) != 5)
        return bad_line(err, line, "is not a class of ours");
    k->best_effort = best_effort != 0;
    r->n_classes_missing--;
    return TD_OK;
}

static td_status read_theta(struct td_core_reader *r, const char *line, struct td_err *err)
{
    if (!r->n_thetas_missing)
        return bad_line(err, line, "is one theta more than the configuration says");
    struct td_lat_theta *t = &r->config.thetas[r->config.n_thetas - r->n_thetas_missing];
    int known = 0;
    if (sscanf(line, "t known=%d p=%la,%la,%la d=%la,%la,%la,%la,%la link=%la,%la", &known,
               &t->prefill[0], &t->prefill[1], &t->prefill[2], &t->decode[0], &t->decode[1],
               &t->decode[2], &t->decode[3], &t->decode[4], &t->link_tau,
               &t->link_bytes_per_s) != 11)
        return bad_line(err, line, "is not a theta of ours");
    t->known = known != 0;
    r->n_thetas_missing--;
    return TD_OK;
}

static td_status read_event(struct td_core_reader *r, const char *line, struct td_err *err)
{
    struct td_core_event e = {0};
    int kind = 0, role = 0;
    int n = sscanf(
        line,
        "e kind=%d now=%" SCNu64 " worker=%u slot=%u attempt=%u role=%d priority=%d id=%" SCNu64
        " a=%" SCNu64 " b=%" SCNu64 " c=%" SCNu64 " d=%" SCNu64 " e=%" SCNu64 " f=%" SCNu64
        " weight=%u hashes=%u hash_tokens=%u",
        &kind, &e.now_ns, &e.worker, &e.slot, &e.attempt, &role, &e.priority, &e.id, &e.a, &e.b,
        &e.c, &e.d, &e.e, &e.f, &e.tenant_weight, &e.n_hashes, &e.hash_tokens);
    if (n != 17 || kind < TD_EV_TICK || kind >= TD_EV_N_KINDS || role < 0 || role > 1)
        return bad_line(err, line, "is not an event of ours");
    if (e.n_hashes > TD_CORE_MAX_HASHES) return bad_line(err, line, "has too many hashes");
    e.kind = (enum td_core_event_kind)kind;
    e.role = (enum td_core_role)role;
    e.hashes = r->hashes;
    r->event = e;
    r->n_hashes_missing = e.n_hashes;
    return TD_OK;
}

static td_status read_hashes(struct td_core_reader *r, const char *line, struct td_err *err)
{
    const char *at = line + 1;
    for (int i = 0; i < TD_CORE_HASHES_PER_LINE && r->n_hashes_missing > 0;
         i++, r->n_hashes_missing--) {
        char *end;
        r->hashes[r->event.n_hashes - r->n_hashes_missing] = strtoull(at, &end, 16);
        if (*at != ' ' || end != at + 17)
            return bad_line(err, line, "is not a line of hashes of ours");
        at = end;
    }
    return TD_OK;
}

td_status td_core_read_line(struct td_core_reader *r, const char *line, enum td_core_read *ret_read,
                            struct td_err *err)
{
    *ret_read = TD_READ_MORE;
    td_status s = TD_OK;
    bool in_config = r->have_config && (r->n_classes_missing || r->n_thetas_missing);
    if (r->n_hashes_missing && line[0] != 'h')
        return bad_line(err, line, "stands where hashes are missing");
    if (in_config && line[0] != 'k' && line[0] != 't')
        return bad_line(err, line, "stands where classes or thetas are missing");
    if (!r->have_config && line[0] != 'c')
        return bad_line(err, line, "comes before the configuration");
    switch (line[0]) {
    case 'c':
        s = r->have_config ? bad_line(err, line, "is a second configuration")
                           : read_config(r, line, err);
        break;
    case 'k':
        s = read_class(r, line, err);
        break;
    case 't':
        s = read_theta(r, line, err);
        break;
    case 'e':
        s = read_event(r, line, err);
        break;
    case 'h':
        s = r->n_hashes_missing ? read_hashes(r, line, err)
                                : bad_line(err, line, "has hashes that no event announced");
        break;
    case 'a':
        *ret_read = TD_READ_ACTION;
        return TD_OK;
    default:
        return bad_line(err, line, "is not one of ours");
    }
    if (s) return s;
    bool config_line = line[0] == 'c' || line[0] == 'k' || line[0] == 't';
    if (config_line && !r->n_classes_missing && !r->n_thetas_missing) *ret_read = TD_READ_CONFIG;
    if (!config_line && !r->n_hashes_missing) *ret_read = TD_READ_EVENT;
    return TD_OK;
}
