/* core_log.c - the decision log's lines. Numbers only, so a line has one reading; keys in a fixed order. */
#include "router/core/core.h"

#include <stdlib.h>
#include <string.h>

int td_core_config_format(const struct td_core_config *c, char *line, size_t line_bytes)
{
    return snprintf(line, line_bytes,
                    "c version=1 mode=%d policy=%s max_requests=%u max_queued=%u hybrid_local_tokens=%u worker_timeout_ms=%u queue_timeout_ms=%u "
                    "stall_ms=%u max_failovers=%u\n",
                    (int)c->mode, c->policy, c->max_requests, c->max_queued, c->hybrid_local_tokens, c->worker_timeout_ms, c->queue_timeout_ms,
                    c->stall_ms, c->max_failovers);
}

int td_core_event_format(const struct td_core_event *e, char *line, size_t line_bytes)
{
    return snprintf(line, line_bytes, "e kind=%d now=%llu worker=%u slot=%u attempt=%u role=%d id=%llu a=%llu b=%llu c=%llu d=%llu\n", (int)e->kind,
                    (unsigned long long)e->now_ns, e->worker, e->slot, e->attempt, (int)e->role, (unsigned long long)e->id,
                    (unsigned long long)e->a, (unsigned long long)e->b, (unsigned long long)e->c, (unsigned long long)e->d);
}

int td_core_action_format(const struct td_core_action *a, char *line, size_t line_bytes)
{
    return snprintf(line, line_bytes, "a kind=%d slot=%u id=%llu attempt=%u worker=%u local=%d code=%u retry_ms=%u reason=\"%s\"\n", (int)a->kind,
                    a->slot, (unsigned long long)a->id, a->attempt, a->worker, a->local ? 1 : 0, a->code, a->retry_ms, a->reason);
}

static td_status bad_line(struct td_err *err, const char *line)
{
    return td_fail(err, TD_ERR_CORRUPT, "decision log: line \"%.80s\" is not one of ours", line);
}

td_status td_core_config_parse(const char *line, struct td_core_config *ret_config, char *policy_buf, struct td_err *err)
{
    struct td_core_config c = {0};
    int mode = -1, version = 0;
    char policy[32];
    int n = sscanf(line,
                   "c version=%d mode=%d policy=%31[a-z_] max_requests=%u max_queued=%u hybrid_local_tokens=%u worker_timeout_ms=%u "
                   "queue_timeout_ms=%u stall_ms=%u max_failovers=%u",
                   &version, &mode, policy, &c.max_requests, &c.max_queued, &c.hybrid_local_tokens, &c.worker_timeout_ms, &c.queue_timeout_ms,
                   &c.stall_ms, &c.max_failovers);
    if (n != 10 || mode < TD_MODE_PD || mode > TD_MODE_HYBRID) return bad_line(err, line);
    if (version != 1) return td_fail(err, TD_ERR_UNSUPPORTED, "decision log: version is %d, this build reads 1", version);
    c.mode = (enum td_core_mode)mode;
    memcpy(policy_buf, policy, sizeof policy);
    c.policy = policy_buf;
    *ret_config = c;
    return TD_OK;
}

td_status td_core_event_parse(const char *line, struct td_core_event *ret_event, struct td_err *err)
{
    struct td_core_event e = {0};
    int kind = 0, role = 0;
    unsigned long long now, id, a, b, c, d;
    int n = sscanf(line, "e kind=%d now=%llu worker=%u slot=%u attempt=%u role=%d id=%llu a=%llu b=%llu c=%llu d=%llu", &kind, &now, &e.worker, &e.slot,
                   &e.attempt, &role, &id, &a, &b, &c, &d);
    if (n != 11 || kind < TD_EV_TICK || kind > TD_EV_CANCEL || role < 0 || role > 1) return bad_line(err, line);
    e.kind = (enum td_core_event_kind)kind;
    e.role = (enum td_core_role)role;
    e.now_ns = now;
    e.id = id;
    e.a = a;
    e.b = b;
    e.c = c;
    e.d = d;
    *ret_event = e;
    return TD_OK;
}
