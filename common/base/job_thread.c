#include "common/base/job_thread.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "common/base/clock.h"

#define GATE_MS 5 /* the gate is looked at so often */

struct td_job_thread {
    td_job_fn run;
    void *ctx;
    const char *gate;
    pthread_t thread;
    bool is_joined;
    pthread_mutex_t lock; /* guards what follows */
    pthread_cond_t changed;
    struct td_job *queue, **queue_tail;
    bool stopping;
};

/* With the lock. */
static void wait_for_gate(struct td_job_thread *t)
{
    while (t->gate[0] && access(t->gate, F_OK) && !t->stopping) {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += (long)(GATE_MS * TD_NS_PER_MS);
        if (until.tv_nsec >= (long)TD_NS_PER_S) until.tv_sec++, until.tv_nsec -= (long)TD_NS_PER_S;
        pthread_cond_timedwait(&t->changed, &t->lock, &until);
    }
}

static void *run_all(void *arg)
{
    struct td_job_thread *t = arg;
    pthread_mutex_lock(&t->lock);
    while (t->queue || !t->stopping) {
        if (!t->queue) {
            pthread_cond_wait(&t->changed, &t->lock);
            continue;
        }
        wait_for_gate(t);
        struct td_job *job = t->queue; /* dropped meanwhile: another, or none */
        if (!job) continue;
        t->queue = job->behind;
        if (!t->queue) t->queue_tail = &t->queue;
        bool stopping = t->stopping;
        pthread_mutex_unlock(&t->lock);
        t->run(t->ctx, job, stopping);
        pthread_mutex_lock(&t->lock);
    }
    pthread_mutex_unlock(&t->lock);
    return NULL;
}

td_status td_job_thread_create(const char *name, td_job_fn run, void *ctx, const char *gate,
                               struct td_job_thread **ret_thread, struct td_err *err)
{
    struct td_job_thread *t = calloc(1, sizeof *t);
    if (!t) return td_fail(err, TD_ERR_NOMEM, "no memory for the thread \"%s\"", name);
    t->run = run;
    t->ctx = ctx;
    t->gate = gate;
    t->queue_tail = &t->queue;
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->changed, NULL);
    if (pthread_create(&t->thread, NULL, run_all, t)) {
        t->is_joined = true;
        td_job_thread_destroy(t);
        return td_fail(err, TD_ERR_NOMEM, "the system gives no thread for \"%s\"", name);
    }
    pthread_setname_np(t->thread, name);
    *ret_thread = t;
    return TD_OK;
}

bool td_job_thread_put(struct td_job_thread *t, struct td_job *job)
{
    pthread_mutex_lock(&t->lock);
    bool stopping = t->stopping; /* then the thread may have ended */
    job->behind = NULL;
    if (!stopping) {
        *t->queue_tail = job;
        t->queue_tail = &job->behind;
        pthread_cond_signal(&t->changed);
    }
    pthread_mutex_unlock(&t->lock);
    return !stopping;
}

bool td_job_thread_drop(struct td_job_thread *t, struct td_job *job)
{
    pthread_mutex_lock(&t->lock);
    struct td_job **at = &t->queue;
    while (*at && *at != job) at = &(*at)->behind;
    bool waits = *at == job;
    if (waits) *at = job->behind;
    if (waits && !job->behind) t->queue_tail = at;
    pthread_mutex_unlock(&t->lock);
    return waits;
}

void td_job_thread_stop(struct td_job_thread *t)
{
    if (!t || t->is_joined) return;
    pthread_mutex_lock(&t->lock);
    t->stopping = true;
    pthread_cond_signal(&t->changed);
    pthread_mutex_unlock(&t->lock);
    pthread_join(t->thread, NULL); /* at most one job later */
    t->is_joined = true;
}

void td_job_thread_destroy(struct td_job_thread *t)
{
    if (!t) return;
    td_job_thread_stop(t);
    pthread_cond_destroy(&t->changed);
    pthread_mutex_destroy(&t->lock);
    free(t);
}
