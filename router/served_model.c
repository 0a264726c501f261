/* served_model.c - see served_model.h. Everything that is decided, counted or logged for one model
 * passes here, on the loop thread. */
#include "router/served_model.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/metrics.h"
#include "router/router.h"

/* Parts of prompts with their ids: some 5,000 turns of chats of 1,000 tokens. */
enum { TOKEN_CACHE_BYTES = 64 << 20 };

/* ---- the core -------------------------------------------------------------------------------- */

static void log_event(struct served_model *m, const struct td_core_event *e,
                      const struct td_core_action *a, size_t n)
{
    char line[TD_CORE_LINE_MAX];
    td_core_event_format(e, line, sizeof line);
    fputs(line, m->log);
    for (uint32_t i = 0; td_core_hashes_format(e, i, line, sizeof line) > 0; i++)
        fputs(line, m->log);
    for (size_t i = 0; i < n; i++) {
        td_core_action_format(&a[i], line, sizeof line);
        fputs(line, m->log);
    }
}

static void carry_out(struct router *r, const struct td_core_action *a)
{
    struct request_state *q = &r->pool.at[a->request_at];
    if (!q->live || q->id != a->id) return; /* its client has cancelled it */
    switch (a->kind) {
    case TD_ACT_START_DECODE:
        leg_start_decode(r, q, a);
        break;
    case TD_ACT_START_PREFILL:
        leg_start_prefill(r, q, a);
        break;
    case TD_ACT_CANCEL_DECODE:
        leg_cancel(&q->decode.leg);
        break;
    case TD_ACT_CANCEL_PREFILL:
        leg_cancel(&q->prefill.leg);
        break;
    case TD_ACT_COMPLETE:
        request_complete(r, q);
        break;
    case TD_ACT_FAIL:
        request_fail(r, q, a);
        break;
    }
}

/* Carrying out an action never applies another event (results of calls arrive later), so one
 * actions array serves. */
void served_model_event(struct served_model *m, struct td_core_event e)
{
    struct router *r = m->router;
    e.now_ns = td_now_ns();
    size_t n = td_core_step(m->core, &e, r->actions);
    if (m->log) log_event(m, &e, r->actions, n);
    for (size_t i = 0; i < n; i++) carry_out(r, &r->actions[i]);
}

uint32_t served_model_max_len(const struct served_model *m) { return m->max_len; }

void served_model_update_max_len(struct served_model *m)
{
    const struct router *r = m->router;
    uint32_t len = (uint32_t)m->config.max_positions;
    if (r->cfg.models.max_len && (uint32_t)r->cfg.models.max_len < len)
        len = (uint32_t)r->cfg.models.max_len;
    for (size_t i = 0; i < TD_CORE_MAX_WORKERS; i++) {
        const struct worker_conn *w = &r->workers[i];
        if (w->used && !w->gone && w->model == m && w->max_model_len < len) len = w->max_model_len;
    }
    m->max_len = len;
    inference_update_limits(r);
}

/* ---- what the metrics are told --------------------------------------------------------------- */

/* Of the decode workers' KV blocks, the share that live requests hold; 0 without a worker. */
static double kv_usage(const struct served_model *m)
{
    const struct router *r = m->router;
    uint64_t held = 0, all = 0;
    for (size_t i = 0; i < TD_CORE_MAX_WORKERS; i++) {
        const struct worker_conn *w = &r->workers[i];
        if (!w->used || w->gone || w->model != m || w->role != TD_ROLE_DECODE) continue;
        held += w->snap.kv_held;
        all += w->kv_blocks;
    }
    return all ? (double)held / (double)all : 0;
}

/* How many workers of each role are in each state. */
static void count_workers(const struct served_model *m)
{
    const struct router *r = m->router;
    uint32_t n[2][3] = {0};
    for (size_t i = 0; i < TD_CORE_MAX_WORKERS; i++) {
        const struct worker_conn *w = &r->workers[i];
        struct td_core_worker_view v;
        if (!w->used || w->gone || w->model != m) continue;
        td_core_worker_view(m->core, w->index, &v);
        if (v.state != TD_WORKER_ABSENT) n[w->role][v.state - TD_WORKER_READY]++;
    }
    for (int role = 0; role < 2; role++)
        for (int state = 0; state < 3; state++)
            td_metric_set(m->metrics.workers[role][state], n[role][state]);
}

/* What was judged of each class since the last tick. */
static void follow_classes(struct served_model *m, const struct td_core_stats *now)
{
    const struct td_core_stats *told = &m->told.stats;
    uint32_t n_classes = m->router->core_cfg.n_classes;
    for (uint32_t i = 0; i < (n_classes ? n_classes : 1); i++) {
        uint64_t good = now->by_class[i].good - told->by_class[i].good;
        uint64_t judged = now->by_class[i].judged - told->by_class[i].judged;
        td_metric_add(m->metrics.good_by_class[i], good);
        td_metric_add(m->metrics.missed_by_class[i], judged - good);
    }
}

/* Adds to the metrics what the core has counted since the last tick. */
static void follow_core(struct served_model *m)
{
    struct served_model_metrics *to = &m->metrics;
    struct td_core_stats now, *told = &m->told.stats;
    td_core_stats(m->core, &now);
    td_metric_set(to->waiting, now.queued);
    td_metric_set(to->running, now.live - now.queued);
    td_metric_set(to->picker_kv, kv_usage(m));
    count_workers(m);
    td_metric_add(to->failovers, now.failovers - told->failovers);
    td_metric_add(to->refused, now.refused - told->refused);
    td_metric_add(to->deflected, now.deflected - told->deflected);
    td_metric_add(to->wasted, now.wasted_prefill_tokens - told->wasted_prefill_tokens);
    td_metric_add(to->good, now.good - told->good);
    td_metric_add(to->missed_ttft, now.missed_ttft - told->missed_ttft);
    td_metric_add(to->missed_tpot, now.missed_tpot - told->missed_tpot);
    td_metric_add(to->hit_predicted, now.predicted_hit_tokens - told->predicted_hit_tokens);
    td_metric_add(to->hit_real, now.real_hit_tokens - told->real_hit_tokens);
    td_metric_set(to->arrival_rate, now.arrival_rate);
    follow_classes(m, &now);
    *told = now;
    for (int i = 0; i < 2; i++) {
        struct td_lat_quality q;
        td_latency_quality(td_core_latency(m->core), i ? TD_LAT_TPOT : TD_LAT_TTFT, &q);
        td_metric_set(to->coverage[i], q.coverage);
        td_metric_set(to->mape[i], q.mape);
    }
}

static void follow_advice(struct served_model *m, uint64_t now_ns)
{
    struct served_model_metrics *to = &m->metrics;
    struct served_model_told *told = &m->told;
    struct td_core_advice a;
    td_core_advice(m->core, &a);
    for (int i = 0; i < 2; i++) {
        td_metric_set(to->wanted[i], a.want[i]);
        td_metric_set(to->needed[i], a.need[i]);
        td_metric_set(to->utilisation[i], a.utilisation[i]);
    }
    for (int i = 0; i < TD_BOUND_N; i++) td_metric_set(to->bound[i], (int)a.bound == i);
    if (a.bound == told->bound || told->stats.arrival_rate <= 0.1 ||
        now_ns - told->bound_ns <= 10 * TD_NS_PER_S)
        return;
    told->bound_ns = now_ns;
    char quoted[2 * ROUTER_MODEL_NAME + 8];
    td_log_quote(quoted, sizeof quoted, served_model_name(m));
    td_info(
        "goodput_bound",
        "model=%s by=%s was=%s prefill_util=%.2f decode_util=%.2f want_prefill=%u want_decode=%u",
        quoted, td_bound_name(a.bound), td_bound_name(told->bound), a.utilisation[0],
        a.utilisation[1], a.want[0], a.want[1]);
    told->bound = a.bound;
}

void served_model_tick(struct served_model *m, struct td_ev_tick tick)
{
    served_model_event(m, (struct td_core_event){.kind = TD_EV_TICK, .tick = tick});
    if (m->log && (fflush(m->log) || ferror(m->log))) {
        td_error("decision_log_failed", "file=%s error=\"%s\" action=close", m->log_path,
                 strerror(errno));
        fclose(m->log);
        m->log = NULL; /* what was written replays up to its end */
    }
    follow_core(m);
    follow_advice(m, td_now_ns());
}

/* ---- open ------------------------------------------------------------------------------------ */

static td_status read_files(struct served_model *m, const char *dir, struct td_err *err)
{
    td_status s = td_model_config_load(dir, &m->config, err);
    if (!s) s = td_tokenizer_load(dir, &m->tokenizer, err);
    if (!s) s = td_chat_template_load(dir, &m->chat, err);
    if (s) return s;
    if (td_token_cache_create(m->tokenizer, TOKEN_CACHE_BYTES, &m->token_cache))
        return td_fail(err, TD_ERR_NOMEM, "no memory for the cache of tokens");
    m->config_digest = td_model_config_digest(&m->config);
    m->vocab_digest = td_tokenizer_digest(m->tokenizer);
    m->longest_token_bytes = 16;
    for (int32_t i = 0; i < td_tokenizer_vocab(m->tokenizer); i++) {
        size_t n = 0;
        if (td_tokenizer_token_text(m->tokenizer, i, &n) && n > m->longest_token_bytes)
            m->longest_token_bytes = n;
    }
    td_chat_template_set_max_bytes(m->chat,
                                   m->longest_token_bytes * (size_t)m->config.max_positions);
    return TD_OK;
}

static void choose_names(struct served_model *m, const struct router_model_spec *spec)
{
    char *real = realpath(spec->dir, NULL);
    const char *slash = real ? strrchr(real, '/') : NULL;
    snprintf(m->dir_name, sizeof m->dir_name, "%s", slash ? slash + 1 : spec->dir);
    free(real);
    m->names = spec->names;
    if (m->names.n) return;
    snprintf(m->names.names[0], sizeof m->names.names[0], "%s", m->dir_name);
    m->names.n = 1;
}

const char *served_model_name(const struct served_model *m) { return m->names.names[0]; }

static td_status open_log(struct served_model *m, const struct td_core_config *c, bool is_first,
                          struct td_err *err)
{
    const char *file = m->router->cfg.observe.decision_log;
    char line[TD_CORE_LINE_MAX];
    if (!file[0]) return TD_OK;
    if (is_first)
        snprintf(m->log_path, sizeof m->log_path, "%s", file);
    else if (router_model_log_path(file, served_model_name(m), m->log_path, sizeof m->log_path,
                                   err))
        return err->code;
    m->log = fopen(m->log_path, "w");
    if (!m->log)
        return td_fail(err, TD_ERR_IO, "decision_log \"%.400s\": %s", m->log_path, strerror(errno));
    for (uint32_t i = 0; td_core_config_format(c, i, line, sizeof line) > 0; i++)
        fputs(line, m->log);
    return TD_OK;
}

static td_status open_core(struct served_model *m, bool is_first, struct td_err *err)
{
    const struct router *r = m->router;
    const struct router_config *g = &r->cfg;
    struct td_core_config c = r->core_cfg;
    char table[ROUTER_MAX_MODEL_PATH];
    td_status s = router_model_option(g->models.latency_table, &m->names, table, sizeof table, err);
    if (s) return td_err_prefix(err, "latency_table");
    if (table[0]) s = router_latency_table_load(table, &c, m->node_classes, NULL, err);
    if (!s) s = td_core_create(&c, &m->core, err);
    if (s) return s;
    m->n_node_classes = c.n_thetas;
    return open_log(m, &c, is_first, err);
}

td_status served_model_open(struct router *r, const struct router_model_spec *spec, bool is_first,
                            struct served_model **ret_model, struct td_err *err)
{
    struct served_model *m = calloc(1, sizeof *m);
    if (!m) return td_fail(err, TD_ERR_NOMEM, "no memory for model \"%.200s\"", spec->dir);
    m->router = r;
    td_status s = read_files(m, spec->dir, err);
    if (!s) choose_names(m, spec);
    if (!s) s = open_core(m, is_first, err);
    if (s) {
        served_model_close(m);
        return s;
    }
    *ret_model = m;
    return TD_OK;
}

void served_model_begin(struct served_model *m)
{
    served_model_metrics_make(m);
    served_model_update_max_len(m);
}

void served_model_close(struct served_model *m)
{
    if (!m) return;
    if (m->log) fclose(m->log);
    td_core_destroy(m->core);
    td_chat_template_free(m->chat);
    td_token_cache_free(m->token_cache);
    td_tokenizer_free(m->tokenizer);
    free(m);
}
