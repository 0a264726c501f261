/* core_log.c - the decision log's lines. Numbers only, so a line has one reading; keys in a
 * fixed order; doubles as hexadecimal floats, which are exact. */
#include "router/core/core.h"

#include <inttypes.h>
#include <stddef.h>
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

/* An event's line has the same columns for every kind; each kind writes its fields into some of
 * them, and 0 into the others. a..f are numbers whose meaning depends on the kind. */
enum column {
    WORKER,
    REQUEST_AT,
    ATTEMPT,
    ROLE,
    PRIORITY,
    ID,
    A,
    B,
    C,
    D,
    E,
    F,
    WEIGHT,
    N_HASHES,
    HASH_TOKENS,
    N_COLUMNS
};

struct field {
    uint16_t offset; /* in struct td_core_event */
    uint16_t bytes;  /* 1: a bool; 4: uint32_t, int32_t or an enum; 8: uint64_t; 0: the column
                        is not used */
};
#define FIELD(member)                                                                              \
    {                                                                                              \
        offsetof(struct td_core_event, member), sizeof((struct td_core_event *)0)->member          \
    }
#define ATTEMPT_OF(member)                                                                         \
    [REQUEST_AT] = FIELD(member.of.request_at), [ID] = FIELD(member.of.id),                        \
    [ATTEMPT] = FIELD(member.of.attempt)

/* Both the writer and the reader go by this table, so they agree. It is the format: a new field
 * of a kind takes a column that the kind does not use yet. */
static const struct field fields[TD_EV_N_KINDS][N_COLUMNS] = {
    [TD_EV_TICK] = {[A] = FIELD(tick.busy_permille), [B] = FIELD(tick.late_ms)},
    [TD_EV_WORKER_JOIN] = {[WORKER] = FIELD(join.worker),
                           [ROLE] = FIELD(join.role),
                           [A] = FIELD(join.kv_tokens),
                           [B] = FIELD(join.max_seqs),
                           [C] = FIELD(join.node_class),
                           [D] = FIELD(join.max_step_tokens),
                           [E] = FIELD(join.kv_bytes_per_token),
                           [F] = FIELD(join.one_token)},
    [TD_EV_WORKER_SNAPSHOT] = {[WORKER] = FIELD(snapshot.worker),
                               [A] = FIELD(snapshot.seq),
                               [B] = FIELD(snapshot.held_tokens),
                               [C] = FIELD(snapshot.queued_tokens),
                               [D] = FIELD(snapshot.n_seqs),
                               [E] = FIELD(snapshot.calls_taken)},
    [TD_EV_WORKER_DRAIN] = {[WORKER] = FIELD(drain.worker)},
    [TD_EV_WORKER_GONE] = {[WORKER] = FIELD(gone.worker)},
    [TD_EV_WORKER_STEP] = {[WORKER] = FIELD(step.worker),
                           [A] = FIELD(step.prefill_tokens),
                           [B] = FIELD(step.attention_work),
                           [C] = FIELD(step.decode_seqs),
                           [D] = FIELD(step.context_tokens),
                           [E] = FIELD(step.wall_us)},
    [TD_EV_BLOCK_ADD] = {[WORKER] = FIELD(block_add.worker), [A] = FIELD(block_add.hash)},
    [TD_EV_BLOCK_EVICT] = {[WORKER] = FIELD(block_evict.worker), [A] = FIELD(block_evict.hash)},
    [TD_EV_BLOCKS_RESET] = {[WORKER] = FIELD(blocks_reset.worker)},
    [TD_EV_REQUEST] = {[REQUEST_AT] = FIELD(request.request_at),
                       [ID] = FIELD(request.id),
                       [PRIORITY] = FIELD(request.priority),
                       [WEIGHT] = FIELD(request.tenant_weight),
                       [A] = FIELD(request.n_prompt),
                       [B] = FIELD(request.max_tokens),
                       [C] = FIELD(request.slo_class),
                       [D] = FIELD(request.tenant),
                       [E] = FIELD(request.ttft_us),
                       [F] = FIELD(request.tpot_us),
                       [N_HASHES] = FIELD(request.n_hashes),
                       [HASH_TOKENS] = FIELD(request.hash_tokens)},
    [TD_EV_TICKET] = {ATTEMPT_OF(ticket), [A] = FIELD(ticket.cached_tokens)},
    [TD_EV_FIRST_TOKEN] =
        {ATTEMPT_OF(first_token), [A] = FIELD(first_token.last), [B] = FIELD(first_token.n_tokens),
         [C] = FIELD(first_token.cached_tokens)},
    [TD_EV_TOKEN] = {ATTEMPT_OF(token), [A] = FIELD(token.n_tokens), [B] = FIELD(token.last)},
    [TD_EV_PREFILL_END] = {ATTEMPT_OF(prefill_end), [A] = FIELD(prefill_end.code),
                           [B] = FIELD(prefill_end.sent_bytes), [C] = FIELD(prefill_end.sent_us)},
    [TD_EV_DECODE_END] = {ATTEMPT_OF(decode_end), [A] = FIELD(decode_end.code),
                          [B] = FIELD(decode_end.sender_finished)},
    [TD_EV_STOP] = {[REQUEST_AT] = FIELD(stop.request_at), [ID] = FIELD(stop.id)},
    [TD_EV_CANCEL] = {[REQUEST_AT] = FIELD(cancel.request_at), [ID] = FIELD(cancel.id)},
    [TD_EV_FOREIGN] = {[WORKER] = FIELD(foreign.worker),
                       [A] = FIELD(foreign.n_routers),
                       [B] = FIELD(foreign.n_seqs),
                       [C] = FIELD(foreign.n_running),
                       [D] = FIELD(foreign.tokens),
                       [E] = FIELD(foreign.queued_tokens)},
};

static uint64_t field_load(const struct td_core_event *e, struct field f)
{
    const char *at = (const char *)e + f.offset;
    bool flag;
    uint32_t narrow;
    uint64_t wide;
    switch (f.bytes) {
    case sizeof flag:
        memcpy(&flag, at, sizeof flag);
        return flag;
    case sizeof narrow:
        memcpy(&narrow, at, sizeof narrow);
        return narrow;
    case sizeof wide:
        memcpy(&wide, at, sizeof wide);
        return wide;
    default:
        return 0;
    }
}

static void field_store(struct td_core_event *e, struct field f, uint64_t value)
{
    char *at = (char *)e + f.offset;
    bool flag = value != 0;
    uint32_t narrow = (uint32_t)value;
    switch (f.bytes) {
    case sizeof flag:
        memcpy(at, &flag, sizeof flag);
        break;
    case sizeof narrow:
        memcpy(at, &narrow, sizeof narrow);
        break;
    case sizeof value:
        memcpy(at, &value, sizeof value);
        break;
    default:
        break; /* no field of this kind */
    }
}

int td_core_event_format(const struct td_core_event *e, char *line, size_t line_bytes)
{
    uint64_t v[N_COLUMNS];
    for (int i = 0; i < N_COLUMNS; i++) v[i] = field_load(e, fields[e->kind][i]);
    return snprintf(line, line_bytes,
                    "e kind=%d now=%" PRIu64 " worker=%" PRIu64 " slot=%" PRIu64 " attempt=%" PRIu64
                    " role=%" PRIu64 " priority=%" PRId32 " id=%" PRIu64 " a=%" PRIu64 " b=%" PRIu64
                    " c=%" PRIu64 " d=%" PRIu64 " e=%" PRIu64 " f=%" PRIu64 " weight=%" PRIu64
                    " hashes=%" PRIu64 " hash_tokens=%" PRIu64 "\n",
                    (int)e->kind, e->now_ns, v[WORKER], v[REQUEST_AT], v[ATTEMPT], v[ROLE],
                    (int32_t)(uint32_t)v[PRIORITY], v[ID], v[A], v[B], v[C], v[D], v[E], v[F],
                    v[WEIGHT], v[N_HASHES], v[HASH_TOKENS]);
}

int td_core_hashes_format(const struct td_core_event *e, uint32_t i, char *line, size_t line_bytes)
{
    uint32_t from = i * TD_CORE_HASHES_PER_LINE,
             n_hashes = e->kind == TD_EV_REQUEST ? e->request.n_hashes : 0;
    if (from >= n_hashes) return 0;
    int n = snprintf(line, line_bytes, "h");
    for (uint32_t j = from; j < n_hashes && j < from + TD_CORE_HASHES_PER_LINE; j++)
        n += snprintf(line + n, line_bytes - (size_t)n, " %016" PRIx64, e->request.hashes[j]);
    return n + snprintf(line + n, line_bytes - (size_t)n, "\n");
}
_Static_assert(TD_CORE_HASHES_PER_LINE * 17 + 3 < TD_CORE_LINE_MAX, "a line of hashes fits");

/* As with events, every kind has the same columns, and those of other kinds are 0 or empty. */
int td_core_action_format(const struct td_core_action *a, char *line, size_t line_bytes)
{
    struct td_act_start start = {0};
    struct td_act_fail fail = {.reason = ""};
    if (a->kind == TD_ACT_START_DECODE || a->kind == TD_ACT_START_PREFILL) start = a->start;
    if (a->kind == TD_ACT_FAIL) fail = a->fail;
    char judged[64] = ""; /* with several routers only: one router's log is as it was */
    if (start.finish_within_us)
        snprintf(judged, sizeof judged, " work_us=%" PRIu64 " finish_within_us=%" PRIu64,
                 start.work_us, start.finish_within_us);
    return snprintf(line, line_bytes,
                    "a kind=%d slot=%u id=%" PRIu64
                    " attempt=%u worker=%u local=%d code=%u retry_ms=%u key=%" PRIu64
                    " ttft_us=%" PRIu64 " tpot_us=%" PRIu64 "%s reason=\"%s\"\n",
                    (int)a->kind, a->request_at, a->id, a->attempt, start.worker,
                    start.local ? 1 : 0, fail.code, fail.retry_ms, start.key, start.ttft_us,
                    start.tpot_us, judged, fail.reason);
}

/* ---- reading --------------------------------------------------------------------------------- */

static td_status bad_line(struct td_err *err, const char *line, const char *why)
{
    return td_fail(err, TD_ERR_CORRUPT, "decision log: line \"%.80s\" %s", line, why);
}

static td_status read_config(struct td_core_reader *reader, const char *line, struct td_err *err)
{
    struct td_core_config c = {0};
    int mode = -1, version = 0;
    if (sscanf(line, "c version=%d", &version) == 1 && version != VERSION)
        return td_fail(err, TD_ERR_UNSUPPORTED, "decision log: version is %d, this build reads %d",
                       version, VERSION);
    int n = sscanf(line,
                   "c version=%d mode=%d policy=%31[a-z_] max_requests=%u max_queued=%u "
                   "hybrid_local_tokens=%u worker_timeout_ms=%u "
                   "queue_timeout_ms=%u stall_ms=%u max_failovers=%u max_prefix_entries=%" SCNu64
                   " attainment=%la seed=%" SCNu64 " classes=%u thetas=%u",
                   &version, &mode, reader->policy, &c.max_requests, &c.max_queued,
                   &c.hybrid_local_tokens, &c.worker_timeout_ms, &c.queue_timeout_ms, &c.stall_ms,
                   &c.max_failovers, &c.max_prefix_entries, &c.attainment, &c.seed, &c.n_classes,
                   &c.n_thetas);
    if (n != 15 || mode < TD_MODE_PD || mode > TD_MODE_HYBRID)
        return bad_line(err, line, "is not a configuration of ours");
    if (c.n_classes > TD_CORE_MAX_CLASSES || c.n_thetas > TD_CORE_MAX_NODE_CLASSES)
        return bad_line(err, line, "has too many classes or thetas");
    c.mode = (enum td_core_mode)mode;
    c.policy = reader->policy;
    reader->config = c;
    reader->n_classes_missing = c.n_classes;
    reader->n_thetas_missing = c.n_thetas;
    reader->have_config = true;
    return TD_OK;
}

static td_status read_class(struct td_core_reader *reader, const char *line, struct td_err *err)
{
    if (!reader->n_classes_missing)
        return bad_line(err, line, "is one class more than the configuration says");
    struct td_core_class *k =
        &reader->config.classes[reader->config.n_classes - reader->n_classes_missing];
    int best_effort = 0;
    if (sscanf(line, "k name=%31[^ ] ttft_ms=%la tpot_ms=%la weight=%la best_effort=%d", k->name,
               &k->ttft_ms, &k->tpot_ms, &k->weight, &best_effort) != 5)
        return bad_line(err, line, "is not a class of ours");
    k->best_effort = best_effort != 0;
    reader->n_classes_missing--;
    return TD_OK;
}

static td_status read_theta(struct td_core_reader *reader, const char *line, struct td_err *err)
{
    if (!reader->n_thetas_missing)
        return bad_line(err, line, "is one theta more than the configuration says");
    struct td_lat_theta *t =
        &reader->config.thetas[reader->config.n_thetas - reader->n_thetas_missing];
    int known = 0;
    if (sscanf(line, "t known=%d p=%la,%la,%la d=%la,%la,%la,%la,%la link=%la,%la", &known,
               &t->prefill[0], &t->prefill[1], &t->prefill[2], &t->decode[0], &t->decode[1],
               &t->decode[2], &t->decode[3], &t->decode[4], &t->link_tau,
               &t->link_bytes_per_s) != 11)
        return bad_line(err, line, "is not a theta of ours");
    t->known = known != 0;
    reader->n_thetas_missing--;
    return TD_OK;
}

static td_status read_event(struct td_core_reader *reader, const char *line, struct td_err *err)
{
    struct td_core_event e = {0};
    uint64_t v[N_COLUMNS] = {0};
    int kind = 0, priority = 0;
    int n = sscanf(line,
                   "e kind=%d now=%" SCNu64 " worker=%" SCNu64 " slot=%" SCNu64 " attempt=%" SCNu64
                   " role=%" SCNu64 " priority=%d id=%" SCNu64 " a=%" SCNu64 " b=%" SCNu64
                   " c=%" SCNu64 " d=%" SCNu64 " e=%" SCNu64 " f=%" SCNu64 " weight=%" SCNu64
                   " hashes=%" SCNu64 " hash_tokens=%" SCNu64,
                   &kind, &e.now_ns, &v[WORKER], &v[REQUEST_AT], &v[ATTEMPT], &v[ROLE], &priority,
                   &v[ID], &v[A], &v[B], &v[C], &v[D], &v[E], &v[F], &v[WEIGHT], &v[N_HASHES],
                   &v[HASH_TOKENS]);
    if (n != N_COLUMNS + 2 || kind < TD_EV_TICK || kind >= TD_EV_N_KINDS ||
        v[ROLE] > TD_ROLE_DECODE)
        return bad_line(err, line, "is not an event of ours");
    if (v[N_HASHES] > TD_CORE_MAX_HASHES) return bad_line(err, line, "has too many hashes");
    v[PRIORITY] = (uint32_t)priority;
    e.kind = (enum td_core_event_kind)kind;
    for (int i = 0; i < N_COLUMNS; i++) field_store(&e, fields[kind][i], v[i]);
    if (e.kind == TD_EV_REQUEST) e.request.hashes = reader->hashes;
    reader->event = e;
    reader->n_hashes = reader->n_hashes_missing = (uint32_t)v[N_HASHES];
    return TD_OK;
}

static td_status read_hashes(struct td_core_reader *reader, const char *line, struct td_err *err)
{
    const char *at = line + 1;
    for (int i = 0; i < TD_CORE_HASHES_PER_LINE && reader->n_hashes_missing > 0;
         i++, reader->n_hashes_missing--) {
        char *end;
        reader->hashes[reader->n_hashes - reader->n_hashes_missing] = strtoull(at, &end, 16);
        if (*at != ' ' || end != at + 17)
            return bad_line(err, line, "is not a line of hashes of ours");
        at = end;
    }
    return TD_OK;
}

td_status td_core_read_line(struct td_core_reader *reader, const char *line,
                            enum td_core_read *ret_read, struct td_err *err)
{
    *ret_read = TD_READ_MORE;
    td_status s = TD_OK;
    bool in_config = reader->have_config && (reader->n_classes_missing || reader->n_thetas_missing);
    if (reader->n_hashes_missing && line[0] != 'h')
        return bad_line(err, line, "stands where hashes are missing");
    if (in_config && line[0] != 'k' && line[0] != 't')
        return bad_line(err, line, "stands where classes or thetas are missing");
    if (!reader->have_config && line[0] != 'c')
        return bad_line(err, line, "comes before the configuration");
    switch (line[0]) {
    case 'c':
        s = reader->have_config ? bad_line(err, line, "is a second configuration")
                                : read_config(reader, line, err);
        break;
    case 'k':
        s = read_class(reader, line, err);
        break;
    case 't':
        s = read_theta(reader, line, err);
        break;
    case 'e':
        s = read_event(reader, line, err);
        break;
    case 'h':
        s = reader->n_hashes_missing ? read_hashes(reader, line, err)
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
    if (config_line && !reader->n_classes_missing && !reader->n_thetas_missing)
        *ret_read = TD_READ_CONFIG;
    if (!config_line && !reader->n_hashes_missing) *ret_read = TD_READ_EVENT;
    return TD_OK;
}
