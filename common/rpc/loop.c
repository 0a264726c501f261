/* loop.c - the loop of rpc.h: one completion queue and one thread.
 *
 * A turn of the loop takes one event and calls its fn, then drains: it runs posts in order, pumps
 * the calls that were marked dirty, and runs due timers. Work that callbacks add while draining is
 * taken in the next turn with a zero timeout, so sockets are polled in between and a post that
 * posts itself cannot starve them (grpc_completion_queue_next polls sockets only when the queue is
 * empty).
 *
 * Waking the loop: gRPC C core has no call for it, but an empty batch on any call delivers its tag
 * at once. So the loop owns a call on a lame channel for this purpose (the bell). The flag `rung`
 * merges many wake-ups into one batch: a thread appends its work first and then rings, and the loop
 * clears `rung` before it drains, so no work is missed.
 *
 * A caller of td_rpc_loop_run takes a turn in the place of the loop's thread, if that one waits for
 * an event: `turn` is free then. It drains, but for timers, which stay on one thread. What it sends
 * completes at once as a rule: core can give such an event to the thread that caused it, else it
 * would wake the waiting thread for that.
 *
 * gpr_log goes to td_log, at most LOG_BURST lines per second, because peers can cause lines (bad
 * handshakes). */
#include <grpc/support/log.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/rpc/rpc_internal.h"

/* LEAVE_MS: a loop that is destroyed waits so long for its cancelled calls. They need milliseconds;
 * what takes longer is an object that nobody destroyed, a fault that must not look like a wait. */
enum { LOG_BURST = 10, SHUTDOWN_MS = 1000, LEAVE_MS = 60000, MAX_OWN_TURNS = 16 };

struct td_rpc_timer {
    struct td_rpc_timer *next;
    struct td_rpc_loop *loop;
    uint64_t period_ns, next_ns;
    void (*fn)(void *arg);
    void *arg;
    bool cancelled;
};

static _Thread_local struct td_rpc_loop *current_loop;

#ifdef TD_WITH_TSAN
/* For every program that links this library: TSan must not judge what core, which is not
 * instrumented, does to its own memory. */
const char *__tsan_default_options(void);
const char *__tsan_default_options(void) { return "ignore_noninstrumented_modules=1"; }
#endif

void *td_rpc_alloc(size_t bytes)
{
    void *p = calloc(1, bytes);
    TD_ASSERT(p != NULL);
    return p;
}

char *td_rpc_strdup(const char *text)
{
    size_t n = strlen(text) + 1;
    char *copy = td_rpc_alloc(n);
    memcpy(copy, text, n);
    return copy;
}

static void bridge_log(gpr_log_func_args *args)
{
    static _Atomic uint64_t second;
    static atomic_uint n_lines, n_dropped;
    uint64_t now = td_now_ns() / TD_NS_PER_S, seen = atomic_load(&second);
    unsigned dropped = 0;
    if (seen != now && atomic_compare_exchange_strong(&second, &seen, now)) {
        atomic_store(&n_lines, 0);
        dropped = atomic_exchange(&n_dropped, 0);
    }
    if (atomic_fetch_add(&n_lines, 1) >= LOG_BURST) {
        atomic_fetch_add(&n_dropped, 1);
        return;
    }
    char text[600];
    td_log_quote(text, sizeof text, args->message);
    /* "Failed accept4" means that the listener is dead until a restart: log it as an error. */
    bool dead = strstr(args->message, "Failed accept4") != NULL;
    td_log(dead || args->severity == GPR_LOG_SEVERITY_ERROR ? TD_LOG_WARN : TD_LOG_DEBUG,
           dead ? "grpc_listener_dead" : "grpc", "dropped=%u msg=%s", dropped, text);
}

static void bridge_start(void)
{
    gpr_set_log_function(bridge_log);
    gpr_set_log_verbosity(GPR_LOG_SEVERITY_ERROR);
}

static void bell_fired(struct td_rpc_event *event, bool ok)
{
    (void)ok;
    atomic_store(&td_rpc_container(event, struct td_rpc_loop, bell_event)->rung, false);
}

void td_rpc_loop_ring(struct td_rpc_loop *loop)
{
    if (current_loop == loop || atomic_exchange(&loop->rung, true)) return;
    td_rpc_tag_release(&loop->bell_event);
    grpc_call_error e = grpc_call_start_batch(loop->bell, NULL, 0, &loop->bell_event, NULL);
    TD_ASSERT(e == GRPC_CALL_OK);
}

static void run_timers(struct td_rpc_loop *loop)
{
    uint64_t now = td_now_ns();
    pthread_mutex_lock(&loop->mu);
    for (;;) {
        struct td_rpc_timer *due = loop->timers;
        while (due && due->next_ns > now) due = due->next;
        if (!due) break;
        due->next_ns = now + due->period_ns;
        loop->running = due;
        pthread_mutex_unlock(&loop->mu);
        due->fn(due->arg);
        pthread_mutex_lock(&loop->mu);
        loop->running = NULL;
        if (due->cancelled) free(due);
    }
    pthread_mutex_unlock(&loop->mu);
}

/* Returns the time of the next turn: 0 = at once, TD_NEVER_NS = at the next event. *ret_stopping:
 * the loop is to end. turn is held. */
static uint64_t drain(struct td_rpc_loop *loop, bool may_run_timers, bool *ret_stopping)
{
    pthread_mutex_lock(&loop->mu);
    *ret_stopping = loop->stopping;
    struct td_rpc_post *posts = loop->post_head;
    struct td_rpc_call *dirty = loop->dirty_head;
    loop->post_head = NULL;
    loop->post_tail = &loop->post_head;
    loop->dirty_head = NULL;
    loop->dirty_tail = &loop->dirty_head;
    bool timers = may_run_timers && loop->timers != NULL;
    pthread_mutex_unlock(&loop->mu);
    while (posts) {
        struct td_rpc_post *post = posts;
        posts = post->next;
        post->fn(post->arg);
        free(post);
    }
    while (dirty) {
        pthread_mutex_lock(&loop->mu);
        struct td_rpc_call *call = dirty;
        dirty = call->asked.next_dirty;
        call->asked.next_dirty = NULL;
        call->asked.dirty = false;
        pthread_mutex_unlock(&loop->mu);
        td_rpc_call_pump(call);
        td_rpc_call_unref(call);
    }
    if (timers) run_timers(loop);
    uint64_t wake_ns = TD_NEVER_NS;
    pthread_mutex_lock(&loop->mu);
    for (struct td_rpc_timer *t = loop->timers; t; t = t->next)
        if (t->next_ns < wake_ns) wake_ns = t->next_ns;
    if (loop->post_head || loop->dirty_head) wake_ns = 0;
    pthread_mutex_unlock(&loop->mu);
    return wake_ns;
}

static gpr_timespec gpr_deadline(uint64_t at_ns)
{
    if (at_ns == TD_NEVER_NS) return gpr_inf_future(GPR_CLOCK_MONOTONIC);
    return (gpr_timespec){(int64_t)(at_ns / TD_NS_PER_S), (int32_t)(at_ns % TD_NS_PER_S),
                          GPR_CLOCK_MONOTONIC};
}

static void *loop_main(void *arg)
{
    struct td_rpc_loop *loop = arg;
    current_loop = loop;
    pthread_setname_np(pthread_self(), loop->name);
    bool stopping;
    uint64_t leave_ns = 0; /* once stopping: when the objects must be gone */
    pthread_mutex_lock(&loop->turn);
    uint64_t wake_ns = drain(loop, true, &stopping);
    for (;;) {
        loop->wake_ns = wake_ns;
        pthread_mutex_unlock(&loop->turn);
        grpc_event e = grpc_completion_queue_next(loop->cq, gpr_deadline(wake_ns), NULL);
        pthread_mutex_lock(&loop->turn);
        if (e.type == GRPC_QUEUE_SHUTDOWN) break;
        if (e.type == GRPC_OP_COMPLETE) {
            struct td_rpc_event *event = e.tag;
            td_rpc_tag_acquire(event);
            event->fn(event, e.success != 0);
        }
        wake_ns = drain(loop, true, &stopping);
        if (!stopping || leave_ns == TD_NEVER_NS) continue;
        if (!leave_ns) leave_ns = td_deadline_after_ms(td_now_ns(), LEAVE_MS);
        /* wake_ns 0: a post has posted, and that runs first */
        if (!atomic_load(&loop->n_objects) && wake_ns > 0) {
            /* Nobody rings any more: destroy is the last call on the loop and has rung already. */
            grpc_completion_queue_shutdown(loop->cq);
            leave_ns = TD_NEVER_NS;
            continue;
        }
        /* A call that was cancelled still reads what had come before. Core aborts the process when
         * an operation begins on a queue that is shut down and empty, so it stays open. */
        TD_ASSERT(td_now_ns() < leave_ns);
        if (wake_ns > leave_ns) wake_ns = leave_ns;
    }
    pthread_mutex_unlock(&loop->turn);
    return NULL;
}

/* A turn in the place of the loop's thread. turn is held, and released. */
static void take_turn(struct td_rpc_loop *loop)
{
    bool stopping;
    uint64_t wake_ns = 0;
    current_loop = loop;
    for (int i = 0; i < MAX_OWN_TURNS && wake_ns == 0; i++) {
        void *tag = NULL;
        int ok = 0;
        grpc_completion_queue_thread_local_cache_init(loop->cq);
        wake_ns = drain(loop, false, &stopping);
        if (!grpc_completion_queue_thread_local_cache_flush(loop->cq, &tag, &ok)) continue;
        struct td_rpc_event *event = tag;
        td_rpc_tag_acquire(event);
        event->fn(event, ok != 0);
        wake_ns = 0; /* it may have left work */
    }
    bool is_earlier = wake_ns < loop->wake_ns; /* than the thread that waits knows */
    current_loop = NULL;
    pthread_mutex_unlock(&loop->turn);
    if (is_earlier) td_rpc_loop_ring(loop);
}

/* gRPC's own threads may still be closing a TLS connection when main returns. OpenSSL's atexit
 * handler would then free tables that they use, and a command that has done its work would end by
 * SIGSEGV (seen about once in 2000 refused handshakes). The symbol is weak, because gRPC need not
 * be built on OpenSSL. */
#define OPENSSL_NO_ATEXIT 0x00080000ull /* OPENSSL_INIT_NO_ATEXIT */
int OPENSSL_init_crypto(uint64_t options, const void *settings) __attribute__((weak));

static void process_start(void)
{
    if (OPENSSL_init_crypto) OPENSSL_init_crypto(OPENSSL_NO_ATEXIT, NULL);
    bridge_start();
}

static _Atomic int n_loops; /* loops alive; each has called grpc_init */

/* A handshake in progress keeps core alive beyond the last grpc_shutdown; core's threads then end
 * by themselves. A process that exits meanwhile runs OpenSSL's clean-up beside them. Core has no
 * call that waits for these threads, so this polls until core has ended, for at most SHUTDOWN_MS; a
 * handshake with a silent peer may take longer. */
static void shut_down(void)
{
    grpc_shutdown();
    if (atomic_fetch_sub(&n_loops, 1) > 1) return;
    uint64_t until = td_deadline_after_ms(td_now_ns(), SHUTDOWN_MS);
    for (uint64_t now_ns; grpc_is_initialized() && (now_ns = td_now_ns()) < until;) {
        uint64_t next_ns = now_ns + TD_NS_PER_MS;
        struct timespec next = {(time_t)(next_ns / TD_NS_PER_S), (long)(next_ns % TD_NS_PER_S)};
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &next, NULL);
    }
}

td_status td_rpc_loop_create(const char *name, struct td_rpc_loop **ret_loop, struct td_err *err)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, process_start);
    struct td_rpc_loop *loop = td_rpc_alloc(sizeof *loop);
    snprintf(loop->name, sizeof loop->name, "%s", name);
    pthread_mutex_init(&loop->mu, NULL);
    pthread_mutex_init(&loop->turn, NULL);
    loop->post_tail = &loop->post_head;
    loop->dirty_tail = &loop->dirty_head;
    td_rpc_unpacker_init(&loop->unpacker);
    atomic_fetch_add(&n_loops, 1);
    grpc_init();
    loop->cq = grpc_completion_queue_create_for_next(NULL);
    loop->bell_channel =
        grpc_lame_client_channel_create("wakeup", GRPC_STATUS_UNAVAILABLE, "wakeup");
    loop->bell = grpc_channel_create_call(loop->bell_channel, NULL, 0, loop->cq,
                                          grpc_slice_from_static_string("/d/b"), NULL,
                                          gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
    loop->bell_event.fn = bell_fired;
    int rc = pthread_create(&loop->thread, NULL, loop_main, loop);
    if (rc) {
        grpc_call_unref(loop->bell);
        grpc_channel_destroy(loop->bell_channel);
        grpc_completion_queue_shutdown(loop->cq);
        grpc_completion_queue_next(loop->cq, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
        grpc_completion_queue_destroy(loop->cq);
        shut_down();
        td_rpc_unpacker_close(&loop->unpacker);
        pthread_mutex_destroy(&loop->turn);
        pthread_mutex_destroy(&loop->mu);
        free(loop);
        return td_fail(err, TD_ERR_IO, "rpc loop %s: cannot start a thread: %s", name,
                       strerror(rc));
    }
    *ret_loop = loop;
    return TD_OK;
}

void td_rpc_loop_destroy(struct td_rpc_loop *loop)
{
    if (!loop) return;
    TD_ASSERT(current_loop != loop);
    /* Ring while holding the lock: a loop that is awake for another reason could otherwise close
     * its queue before the ring has reached it, and core would abort the process. */
    pthread_mutex_lock(&loop->mu);
    loop->stopping = true;
    td_rpc_loop_ring(loop);
    pthread_mutex_unlock(&loop->mu);
    pthread_join(loop->thread, NULL);
    TD_ASSERT(atomic_load(&loop->n_objects) == 0);
    grpc_call_unref(loop->bell);
    grpc_channel_destroy(loop->bell_channel);
    grpc_completion_queue_destroy(loop->cq);
    while (loop->timers) {
        struct td_rpc_timer *timer = loop->timers;
        loop->timers = timer->next;
        free(timer);
    }
    TD_ASSERT(!loop->post_head && !loop->dirty_head);
    td_rpc_unpacker_close(&loop->unpacker);
    pthread_mutex_destroy(&loop->turn);
    pthread_mutex_destroy(&loop->mu);
    free(loop);
    shut_down();
}

bool td_rpc_loop_is_current(const struct td_rpc_loop *loop) { return current_loop == loop; }

static void append_post(struct td_rpc_loop *loop, void (*fn)(void *arg), void *arg)
{
    struct td_rpc_post *post = td_rpc_alloc(sizeof *post);
    post->fn = fn;
    post->arg = arg;
    pthread_mutex_lock(&loop->mu);
    *loop->post_tail = post;
    loop->post_tail = &post->next;
    pthread_mutex_unlock(&loop->mu);
}

void td_rpc_loop_post(struct td_rpc_loop *loop, void (*fn)(void *arg), void *arg)
{
    append_post(loop, fn, arg);
    td_rpc_loop_ring(loop);
}

void td_rpc_loop_run(struct td_rpc_loop *loop, void (*fn)(void *arg), void *arg)
{
    TD_ASSERT(current_loop != loop);
    append_post(loop, fn, arg);
    if (pthread_mutex_trylock(&loop->turn))
        td_rpc_loop_ring(loop); /* its thread is at work, and may have looked at posts already */
    else
        take_turn(loop);
}

struct td_rpc_timer *td_rpc_timer_start(struct td_rpc_loop *loop, uint32_t period_ms,
                                        void (*fn)(void *arg), void *arg)
{
    struct td_rpc_timer *timer = td_rpc_alloc(sizeof *timer);
    timer->loop = loop;
    timer->period_ns = (period_ms ? period_ms : 1) * TD_NS_PER_MS;
    timer->next_ns = td_now_ns() + timer->period_ns;
    timer->fn = fn;
    timer->arg = arg;
    pthread_mutex_lock(&loop->mu);
    timer->next = loop->timers;
    loop->timers = timer;
    pthread_mutex_unlock(&loop->mu);
    td_rpc_loop_ring(loop);
    return timer;
}

void td_rpc_timer_cancel(struct td_rpc_timer *timer)
{
    if (!timer) return;
    struct td_rpc_loop *loop = timer->loop;
    TD_ASSERT(current_loop == loop);
    pthread_mutex_lock(&loop->mu);
    struct td_rpc_timer **at = &loop->timers;
    while (*at && *at != timer) at = &(*at)->next;
    TD_ASSERT(*at == timer);
    *at = timer->next;
    timer->cancelled = true;
    bool running = loop->running == timer;
    pthread_mutex_unlock(&loop->mu);
    if (!running) free(timer);
}
