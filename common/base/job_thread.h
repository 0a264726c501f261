/* job_thread.h - a thread that runs jobs one after another, in the order in which they were put:
 * work that may take long and must not hold up an event loop.
 *
 * A job is the caller's memory with a struct td_job inside. It belongs to the thread from
 * td_job_thread_put until its function is called, or until td_job_thread_drop takes it back. The
 * caller bounds how many jobs there are. */
#ifndef TD_BASE_JOB_THREAD_H
#define TD_BASE_JOB_THREAD_H

#include <stdbool.h>

#include "common/base/status.h"

struct td_job {
    struct td_job *behind; /* in the queue */
};

/* Called on the thread. `stopping`: the thread is about to end, so the job should only be given
 * back. The job may be freed inside. */
typedef void (*td_job_fn)(void *ctx, struct td_job *job, bool stopping);

struct td_job_thread;

/* `name` is at most 15 characters. `gate` is for tests: no job is begun before this file exists; ""
 * = no gate. The text must live as long as the thread. */
td_status td_job_thread_create(const char *name, td_job_fn run, void *ctx, const char *gate,
                               struct td_job_thread **ret_thread, struct td_err *err);
/* False: the thread was stopped, and the job is still the caller's. [any thread] */
bool td_job_thread_put(struct td_job_thread *thread, struct td_job *job);
/* Takes a job off the queue. False: it is not there, for it was never put or has begun. [any
 * thread] */
bool td_job_thread_drop(struct td_job_thread *thread, struct td_job *job);
/* Waits for the job that runs now; those that are left are run with `stopping`. NULL and a second
 * call are allowed. */
void td_job_thread_stop(struct td_job_thread *thread);
/* Stops it and frees it. NULL is allowed. */
void td_job_thread_destroy(struct td_job_thread *thread);

#endif
