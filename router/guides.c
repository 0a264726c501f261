/* guides.c - grammars of structured output are compiled on a thread of their own, so that one that
 * takes long holds up the requests that bring it and nobody's tokens.
 *
 * A request whose grammar was accepted lately goes on at once: a schema that comes with every
 * request of a client costs a comparison. Any other waits for its grammar, before the core is told
 * of it; requests with the same grammar wait for one compilation.
 *
 *   asked --> queued --(thread)--> compiled --> its requests start, or are refused
 *               |                     |
 *               +---------------------+--> nobody waits any more: dropped, at once if still queued
 *
 * Bounds: TD_GRAMMAR_MAX_* of one compilation, MAX_JOBS of the queue, guide_wait_ms of a request.
 *
 * Jobs, waiting requests and what is remembered belong to the loop thread. The compiling thread has
 * a job's texts and result between its begin and a post, with which it gives the job back. */
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/job_thread.h"
#include "common/rpc/rpc_status.h"
#include "common/text/grammar.h"
#include "router/router.h"

#define MAX_SEEN 32 /* with TD_GRAMMAR_MAX_TEXT_BYTES each, about 10 MiB in all */
#define MAX_JOBS 64 /* grammars not compiled yet, each with TD_GRAMMAR_MAX_TEXT_BYTES */

struct guide_job {
    struct td_job job; /* first */
    struct router *router;
    char *key; /* td_grammar_key: kind and texts */
    size_t n_key;
    struct request_state *waiting; /* by guide_next */
    struct guide_job *prev, *next; /* among all jobs */
    td_status status;
    struct td_err err;
};

struct router_guides {
    struct seen {
        char *key;
        size_t n_key;
        uint64_t used; /* larger: later */
    } seen[MAX_SEEN];
    uint64_t n_used;
    struct guide_job *jobs;
    uint32_t n_jobs;
    struct td_job_thread *thread;
};

/* ---- what was accepted lately ---------------------------------------------------------------- */

/* It is the latest then. */
static bool remembers(struct router_guides *g, const char *key, size_t n_key)
{
    for (struct seen *v = g->seen; v < g->seen + MAX_SEEN; v++)
        if (v->key && v->n_key == n_key && !memcmp(v->key, key, n_key)) {
            v->used = ++g->n_used;
            return true;
        }
    return false;
}

/* In place of the one that was not asked for the longest. Takes the key. */
static void remember(struct router_guides *g, char *key, size_t n_key)
{
    struct seen *oldest = g->seen;
    for (struct seen *v = g->seen; v < g->seen + MAX_SEEN; v++)
        if (v->used < oldest->used) oldest = v;
    free(oldest->key);
    *oldest = (struct seen){.key = key, .n_key = n_key, .used = ++g->n_used};
}

/* ---- the thread ------------------------------------------------------------------------------ */

/* Errors are the client's words for it. */
static td_status compile(enum td_grammar_kind kind, const struct td_grammar_text *texts, size_t n,
                         struct td_err *err)
{
    struct td_grammar *g = NULL;
    struct td_matcher *m = NULL;
    td_status s = td_grammar_compile(kind, texts, n, &g, err);
    if (!s) s = td_matcher_create(g, NULL, NULL, 0, &m, err);
    td_matcher_free(m);
    td_grammar_free(g);
    if (!s) return TD_OK;
    td_err_prefix(err, kind == TD_GRAMMAR_TOOL_CALLS ? "chat.tools" : "guided");
    return s == TD_ERR_NOMEM ? TD_ERR_AGAIN : TD_ERR_INVALID; /* what to do, not why: both limits
                                                                 and what is not there are the
                                                                 client's to change */
}

static void on_compiled(void *arg);

static void compile_job(void *ctx, struct td_job *base, bool stopping)
{
    struct guide_job *job = (struct guide_job *)base;
    enum td_grammar_kind kind;
    size_t n = 0;
    struct td_grammar_text *texts = NULL;
    (void)ctx;
    if (stopping) return; /* no request is left, and router_guides_free frees the job */
    job->status = td_grammar_key_read(job->key, job->n_key, &kind, &texts, &n, &job->err);
    if (!job->status) job->status = compile(kind, texts, n, &job->err);
    free(texts);
    td_rpc_loop_post(job->router->loop, on_compiled, job);
}

td_status router_guides_open(struct router *r, struct td_err *err)
{
    struct router_guides *g = calloc(1, sizeof *g);
    if (!g) return td_fail(err, TD_ERR_NOMEM, "no memory for guides");
    td_status s =
        td_job_thread_create("guides", compile_job, NULL, r->cfg.guides.gate, &g->thread, err);
    if (s)
        free(g);
    else
        r->guides = g;
    return s;
}

void router_guides_stop(struct router *r)
{
    if (r->guides) td_job_thread_stop(r->guides->thread);
}

/* ---- jobs ------------------------------------------------------------------------------------ */

static void job_free(struct router_guides *g, struct guide_job *job)
{
    if (job->prev)
        job->prev->next = job->next;
    else
        g->jobs = job->next;
    if (job->next) job->next->prev = job->prev;
    g->n_jobs--;
    free(job->key);
    free(job);
}

void router_guides_free(struct router *r)
{
    struct router_guides *g = r->guides;
    if (!g) return;
    while (g->jobs) job_free(g, g->jobs);
    for (int i = 0; i < MAX_SEEN; i++) free(g->seen[i].key);
    td_job_thread_destroy(g->thread);
    free(g);
    r->guides = NULL;
}

/* Takes the key. NULL: no memory, and the key is freed. */
static struct guide_job *job_new(struct router *r, char *key, size_t n_key)
{
    struct router_guides *g = r->guides;
    struct guide_job *job = calloc(1, sizeof *job);
    if (!job) {
        free(key);
        return NULL;
    }
    *job = (struct guide_job){.router = r, .key = key, .n_key = n_key, .next = g->jobs};
    if (g->jobs) g->jobs->prev = job;
    g->jobs = job;
    g->n_jobs++;
    bool put = td_job_thread_put(g->thread, &job->job);
    TD_ASSERT(put); /* it stops after the servers whose requests bring jobs */
    return job;
}

static void wait_for(struct guide_job *job, struct request_state *q)
{
    q->guide = job;
    q->guide_next = job->waiting;
    job->waiting = q;
}

td_status router_guide_ask(struct router *r, struct request_state *q, struct td_err *err)
{
    struct router_guides *g = r->guides;
    const Tandem__V1__SamplingSpec *spec = &q->ask.spec;
    size_t n = spec->n_guided_texts, n_key = 0;
    char *key = NULL;
    if (!spec->guided_kind) return TD_OK;
    struct td_grammar_text *texts = calloc(n + 1, sizeof *texts);
    if (!texts) return td_fail(err, TD_ERR_AGAIN, "no memory for %zu texts of guided", n);
    for (size_t i = 0; i < n; i++)
        texts[i] = (struct td_grammar_text){(const char *)spec->guided_texts[i].data,
                                            spec->guided_texts[i].len};
    td_status s =
        td_grammar_key((enum td_grammar_kind)spec->guided_kind, texts, n, &key, &n_key, err);
    free(texts);
    if (s) return s;
    struct guide_job *job = g->jobs;
    while (job && (job->n_key != n_key || memcmp(job->key, key, n_key))) job = job->next;
    if (job || remembers(g, key, n_key)) {
        free(key);
    } else if (g->n_jobs >= MAX_JOBS) {
        free(key);
        return td_fail(err, TD_ERR_AGAIN, "guided: %d grammars wait to be compiled, the limit",
                       MAX_JOBS);
    } else if (!(job = job_new(r, key, n_key))) {
        return td_fail(err, TD_ERR_AGAIN, "no memory for guided");
    }
    if (job) wait_for(job, q);
    return TD_OK;
}

/* q waits no more. */
static void leave(struct request_state *q)
{
    struct request_state **at = &q->guide->waiting;
    while (*at != q) at = &(*at)->guide_next;
    *at = q->guide_next;
    q->guide = NULL;
}

void router_guide_forget(struct router *r, struct request_state *q)
{
    struct guide_job *job = q->guide;
    if (!job) return;
    leave(q);
    if (!job->waiting && td_job_thread_drop(r->guides->thread, &job->job)) job_free(r->guides, job);
}

/* The thread has compiled the job's grammar. */
static void on_compiled(void *arg)
{
    struct guide_job *job = arg;
    struct router *r = job->router;
    while (job->waiting) {
        struct request_state *q = job->waiting;
        bool starts = q->starts_with_guide;
        leave(q);
        if (job->status)
            inference_refuse(r, q, td_rpc_code(job->status), job->err.msg);
        else if (starts)
            inference_start(r, q);
    }
    if (!job->status) {
        remember(r->guides, job->key, job->n_key);
        job->key = NULL;
    }
    job_free(r->guides, job);
}

void router_guides_tick(struct router *r, uint64_t now_ns)
{
    struct router_guides *g = r->guides;
    struct td_err err = {0};
    uint64_t wait_ms = r->cfg.guides.wait_ms;
    td_fail(&err, TD_ERR_AGAIN,
            "guided: its grammar was not compiled within %llu ms: others came before it",
            (unsigned long long)wait_ms);
    for (struct guide_job *job = g->jobs, *next; job; job = next) {
        next = job->next;
        for (struct request_state *q = job->waiting, *q_next; q; q = q_next) {
            q_next = q->guide_next;
            if (now_ns - q->arrived_ns < wait_ms * TD_NS_PER_MS) continue;
            bool last = job->waiting == q && !q_next; /* its job may be freed with it */
            inference_refuse(r, q, TD_CODE_RESOURCE_EXHAUSTED, err.msg);
            if (last) break;
        }
    }
}
