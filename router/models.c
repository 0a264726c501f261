/* models.c - which models the router serves: those of --model from the start, those below
 * --model-dir from the join of their first worker on.
 *
 *   hello of an unknown model --identity proved--> router_model_load --thread reads the files-->
 *       on_loaded (loop) --> listed; the streams that waited go on (join_model_loaded)
 *
 * Reading a tokenizer takes up to seconds, so a thread does it, one model at a time; a stream that
 * waits for another model asks again when that one is there. A model stays when its last worker
 * leaves: its requests wait, and what its core has learned is kept. */
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "router/router.h"

#define MAX_TOLD 8         /* names in a message */
#define STOP_WAIT_MS 10000 /* a disk that answers nothing for so long does not hold up the end */

struct model_load {
    struct router *router;
    pthread_t thread;
    struct router_model_spec spec;
    uint64_t began_ns;
    td_status status; /* below: the thread's, then the loop's */
    struct served_model *model;
    struct td_err err;
};

/* ---- finding --------------------------------------------------------------------------------- */

/* "a", "b" and 3 more */
static const char *list_models(const struct router *r, char *text, size_t text_bytes)
{
    size_t used = 0;
    snprintf(text, text_bytes, "no model yet");
    for (uint32_t i = 0; i < r->n_models && i < MAX_TOLD && used < text_bytes; i++)
        used += (size_t)snprintf(text + used, text_bytes - used, "%s\"%.40s\"", i ? ", " : "",
                                 served_model_name(r->models[i]));
    if (r->n_models > MAX_TOLD && used < text_bytes)
        snprintf(text + used, text_bytes - used, " and %u more", r->n_models - MAX_TOLD);
    return text;
}

static struct served_model *find_named(const struct router *r, const char *name)
{
    for (uint32_t i = 0; i < r->n_models; i++)
        if (router_model_names_have(&r->models[i]->names, name)) return r->models[i];
    return NULL;
}

td_status router_find_model(const struct router *r, const char *name,
                            struct served_model **ret_model, struct td_err *err)
{
    char list[TD_ERR_MSG_MAX];
    struct served_model *m = name[0] ? find_named(r, name) : r->n_models == 1 ? r->models[0] : NULL;
    if (!m && !name[0] && r->n_models)
        return td_fail(err, TD_ERR_INVALID, "model is empty, and this cluster serves several: %s",
                       list_models(r, list, sizeof list));
    if (!m)
        return td_fail(err, TD_ERR_NOT_FOUND,
                       "model \"%.100s\" is not served here; this cluster serves %s", name,
                       list_models(r, list, sizeof list));
    *ret_model = m;
    return TD_OK;
}

static td_status check_digests(const struct served_model *m, const Tandem__V1__Hello *h,
                               struct td_err *err)
{
    bool config_differs = h->config_digest && h->config_digest != m->config_digest,
         vocab_differs = h->vocab_digest && h->vocab_digest != m->vocab_digest;
    if ((int64_t)h->vocab != m->config.vocab)
        return td_fail(err, TD_ERR_INVALID,
                       "the worker's model \"%.100s\" has a vocabulary of %u, the router's "
                       "\"%.100s\" of %d: not the same model",
                       h->model, h->vocab, served_model_name(m), m->config.vocab);
    if (config_differs || vocab_differs)
        return td_fail(err, TD_ERR_INVALID,
                       "the worker's model \"%.100s\" has the %s digest %016llx, the router's "
                       "\"%.100s\" %016llx: not the same model",
                       h->model, config_differs ? "config" : "vocabulary",
                       (unsigned long long)(config_differs ? h->config_digest : h->vocab_digest),
                       served_model_name(m),
                       (unsigned long long)(config_differs ? m->config_digest : m->vocab_digest));
    return TD_OK;
}

td_status router_model_of_hello(const struct router *r, const Tandem__V1__Hello *h,
                                struct served_model **ret_model, struct td_err *err)
{
    char list[TD_ERR_MSG_MAX];
    if (strlen(h->model) >= ROUTER_MODEL_NAME)
        return td_fail(err, TD_ERR_INVALID, "model has %zu bytes, limit %d", strlen(h->model),
                       ROUTER_MODEL_NAME - 1);
    struct served_model *m = find_named(r, h->model);
    for (uint32_t i = 0; i < r->n_models && !m; i++)
        if (!strcmp(r->models[i]->dir_name, h->model)) m = r->models[i];
    if (!m && !r->may_serve_several) m = r->models[0]; /* whatever it calls its directory */
    if (!m && r->cfg.models.dir[0] && router_model_name_is_plain(h->model)) return TD_INPROGRESS;
    if (!m)
        return td_fail(err, TD_ERR_NOT_FOUND,
                       "the worker's model \"%.100s\" is not served here; this router serves %s; "
                       "the worker's --served-model-name says which it is",
                       h->model, list_models(r, list, sizeof list));
    td_status s = check_digests(m, h, err);
    if (!s) *ret_model = m;
    return s;
}

/* ---- the list -------------------------------------------------------------------------------- */

/* m is the router's from here on, or closed. */
static td_status add(struct router *r, struct served_model *m, struct td_err *err)
{
    td_status s = TD_OK;
    if (r->n_models == ROUTER_MAX_MODELS)
        s = td_fail(err, TD_ERR_LIMIT, "the router serves %d models, as many as it can",
                    ROUTER_MAX_MODELS);
    for (uint32_t i = 0; i < m->names.n && !s; i++)
        if (find_named(r, m->names.names[i]))
            s = td_fail(err, TD_ERR_INVALID, "two models have the name \"%.100s\"",
                        m->names.names[i]);
    if (s) {
        served_model_close(m);
        return s;
    }
    m->index = r->n_models;
    r->models[r->n_models++] = m;
    r->pool.shares.n_models = r->n_models;
    served_model_begin(m);
    return TD_OK;
}

/* A name in an option must be some model's; those below model_dir are not known yet. */
static td_status check_option_names(const struct router *r, struct td_err *err)
{
    char name[ROUTER_MAX_MODEL_PATH];
    const char *at = r->cfg.models.latency_table;
    if (r->cfg.models.dir[0]) return TD_OK;
    while (router_model_option_name(&at, name))
        if (name[0] && !find_named(r, name))
            return td_fail(err, TD_ERR_INVALID,
                           "latency_table is for \"%.100s\", which is no model's name", name);
    return TD_OK;
}

td_status router_models_open(struct router *r, struct td_err *err)
{
    struct router_model_spec *specs = calloc(ROUTER_MAX_MODELS, sizeof *specs);
    uint32_t n = 0;
    pthread_mutex_init(&r->loading.lock, NULL);
    pthread_cond_init(&r->loading.ended, NULL);
    if (!specs) return td_fail(err, TD_ERR_NOMEM, "no memory for the list of models");
    td_status s =
        router_model_specs_parse(r->cfg.models.specs, r->cfg.models.served_name, specs, &n, err);
    if (!s && n == 0 && !r->cfg.models.dir[0])
        s = td_fail(err, TD_ERR_INVALID,
                    "model and model_dir are empty: give --model DIR, or --model-dir DIR with "
                    "models below it");
    r->may_serve_several = n > 1 || r->cfg.models.dir[0];
    for (uint32_t i = 0; i < n && !s; i++) {
        struct served_model *m;
        s = served_model_open(r, &specs[i], i == 0, &m, err);
        if (!s) s = add(r, m, err);
    }
    free(specs);
    return s ? s : check_option_names(r, err);
}

void router_models_close(struct router *r)
{
    for (uint32_t i = 0; i < r->n_models; i++) served_model_close(r->models[i]);
    r->n_models = 0;
}

/* ---- loading --------------------------------------------------------------------------------- */

static void tell_loaded(const struct model_load *l)
{
    char name[2 * ROUTER_MODEL_NAME + 8], why[2 * TD_ERR_MSG_MAX];
    unsigned long long ms = (td_now_ns() - l->began_ns) / TD_NS_PER_MS;
    td_log_quote(name, sizeof name, l->spec.names.names[0]);
    if (l->status)
        td_warn_limited("model_refused", "model=%s ms=%llu reason=%s", name, ms,
                        td_log_quote(why, sizeof why, l->err.msg));
    else
        td_info("model_loaded", "model=%s ms=%llu", name, ms);
}

static void on_loaded(void *arg)
{
    struct model_load *l = arg;
    struct router *r = l->router;
    pthread_join(l->thread, NULL); /* it ended with the post of this */
    r->loading.model = NULL;
    if (!l->status) l->status = add(r, l->model, &l->err);
    tell_loaded(l);
    join_model_loaded(r, l->spec.names.names[0], l->status, l->err.msg);
    free(l);
    pthread_mutex_lock(&r->loading.lock);
    r->loading.n--;
    pthread_cond_signal(&r->loading.ended);
    pthread_mutex_unlock(&r->loading.lock);
}

static void *load(void *arg)
{
    struct model_load *l = arg;
    l->status = served_model_open(l->router, &l->spec, false, &l->model, &l->err);
    td_rpc_loop_post(l->router->loop, on_loaded, l);
    return NULL;
}

td_status router_model_load(struct router *r, const char *name, struct td_err *err)
{
    if (r->loading.model) return TD_OK; /* join_model_loaded tries again */
    struct model_load *l = calloc(1, sizeof *l);
    if (!l) return td_fail(err, TD_ERR_NOMEM, "no memory to load model \"%.100s\"", name);
    l->router = r;
    l->began_ns = td_now_ns();
    int n = snprintf(l->spec.dir, sizeof l->spec.dir, "%s/%s", r->cfg.models.dir, name);
    td_status s = n > 0 && (size_t)n < sizeof l->spec.dir
                      ? router_model_names_parse(name, strlen(name), &l->spec.names, err)
                      : td_fail(err, TD_ERR_LIMIT, "model_dir has %zu bytes, which is too long",
                                strlen(r->cfg.models.dir));
    pthread_mutex_lock(&r->loading.lock);
    if (!s && r->loading.stopped) s = td_fail(err, TD_ERR_AGAIN, "this router is ending");
    if (!s && pthread_create(&l->thread, NULL, load, l))
        s = td_fail(err, TD_ERR_AGAIN, "no thread to load model \"%.100s\"", name);
    if (!s) r->loading.n++;
    pthread_mutex_unlock(&r->loading.lock);
    if (s)
        free(l);
    else
        r->loading.model = l;
    return s;
}

void router_models_stop(struct router *r)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += STOP_WAIT_MS / 1000;
    pthread_mutex_lock(&r->loading.lock);
    r->loading.stopped = true;
    int e = 0;
    while (r->loading.n && !e)
        e = pthread_cond_timedwait(&r->loading.ended, &r->loading.lock, &until);
    bool left = r->loading.n > 0;
    pthread_mutex_unlock(&r->loading.lock);
    if (!left) return;
    td_error("model_load_stuck", "waited_ms=%d action=exit", STOP_WAIT_MS);
    _exit(1); /* the thread would post to a loop that is gone */
}
