/* library.c - who runs the HTTP library: a thread of its own, or the loop's in its place.
 *
 * The thread waits, outside `turn`, for the library's epoll set and for the bell, which are both in
 * `watch`. When one of them has something it takes `turn` and runs the library until nothing is
 * left to do, so callbacks of the library are always under `turn`.
 *
 * The answer of a lone client comes to the loop's thread, and only the library can write it. To
 * wake another thread for that costs more than the answer. So the loop's thread takes turn before
 * it resumes a connection, and http_unlock runs the library there, if nobody else does and no other
 * call is in progress: the work that this may bring to the loop is then at most a few pieces of one
 * other client's request. The library's set is out of `watch` meanwhile, or what the loop itself
 * does to it would wake the thread: libmicrohttpd 1.0 writes to a bell of its own, in the set, for
 * each connection that is resumed.
 *
 * Order of locks: turn, then http->lock. Nobody waits for turn with http->lock, or on the loop's
 * thread: it takes turn if it is free. */
#include "router/http/call.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "common/base/log.h"
#include "router/http/first_write.h"

enum {
    MAX_RUNS = 4, /* of the library in one turn of the loop's thread */
    /* The loop's turns give connections their times, which the thread does not see: it looks for
     * itself this often. Those times are whole seconds. */
    MAX_WAIT_MS = 1000,
    /* The same while its set cannot be watched: how late a request may be seen then. */
    UNWATCHED_WAIT_MS = 10,
};

struct http_library {
    struct MHD_Daemon *daemon; /* NULL = stopped. Under turn */
    pthread_mutex_t turn;      /* of who runs the library */
    pthread_t thread;
    int set, watch, bell; /* the library's epoll set; one of it and of the bell; an eventfd */
    atomic_bool is_rung;  /* the bell, and the thread has not come to run the library */
    bool is_here;         /* under http->lock: turn is this thread's, until http_unlock */
    bool was_watched;     /* under turn: the set, before it was taken out */
    atomic_bool is_ending;
    atomic_bool is_unwatched; /* the kernel had no memory, or no watches, for the set's return */
    bool is_plain;            /* no TLS: what it says of TCP_NODELAY is not done (first_write.h) */
};

/* Not by EPOLL_CTL_MOD and no events: errors are then still waited for, and the kernel wakes the
 * thread for a set inside a set to look what it was. */
static td_status watch_set(struct http_library *l, bool is_on)
{
    struct epoll_event e = {.events = EPOLLIN, .data.fd = l->set};
    return epoll_ctl(l->watch, is_on ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, l->set, &e) ? TD_ERR_IO
                                                                                  : TD_OK;
}

static void ring(struct http_library *l)
{
    uint64_t one = 1;
    if (atomic_exchange(&l->is_rung, true)) return;
    ssize_t n = write(l->bell, &one, sizeof one);
    TD_ASSERT(n == sizeof one || errno == EAGAIN); /* EAGAIN: it has rung 2^64 - 2 times */
}

/* How long until the library has something to do without a socket: at most MAX_WAIT_MS. turn is
 * held. */
static int wait_ms(struct http_library *l)
{
    MHD_UNSIGNED_LONG_LONG ms;
    return MHD_get_timeout(l->daemon, &ms) == MHD_YES && ms < MAX_WAIT_MS ? (int)ms : MAX_WAIT_MS;
}

/* Returns wait_ms: 0 = not all is done. turn is held. */
static int run(struct http_library *l)
{
    int ms = 0;
    first_write_library(l->is_plain);
    for (int i = 0; i < MAX_RUNS && ms == 0; i++) {
        MHD_run(l->daemon);
        ms = wait_ms(l);
    }
    first_write_library(false);
    return ms;
}

/* The set is watched again, or else looked at every UNWATCHED_WAIT_MS, and this is tried there. */
static void watch_again(struct http_library *l)
{
    bool was_unwatched = atomic_load(&l->is_unwatched);
    int error = watch_set(l, true) ? errno : 0;
    if (error == EEXIST) error = 0; /* the other thread was here before */
    if (!error && was_unwatched) td_info("http_watched", "msg=\"requests are seen at once again\"");
    if (error && !was_unwatched && !atomic_load(&l->is_ending))
        td_warn("http_unwatched", "msg=\"requests are seen up to %d ms late\" error=\"%s\"",
                UNWATCHED_WAIT_MS, strerror(error));
    atomic_store(&l->is_unwatched, error != 0);
}

static void *thread_main(void *ctx)
{
    struct http_library *l = ctx;
    int ms = 0;
    pthread_setname_np(pthread_self(), "http");
    while (!atomic_load(&l->is_ending)) {
        if (atomic_load(&l->is_unwatched)) {
            watch_again(l);
            if (ms > UNWATCHED_WAIT_MS) ms = UNWATCHED_WAIT_MS;
        }
        struct epoll_event events[2];
        uint64_t rings;
        int n = epoll_wait(l->watch, events, 2, ms);
        for (int i = 0; i < n; i++)
            if (events[i].data.fd == l->bell && read(l->bell, &rings, sizeof rings) < 0)
                TD_ASSERT(errno == EAGAIN);
        atomic_store(&l->is_rung, false); /* before the run: a later ring is of what comes later */
        pthread_mutex_lock(&l->turn);
        ms = run(l);
        pthread_mutex_unlock(&l->turn);
    }
    return NULL;
}

void http_library_resume(struct router_http *h, struct MHD_Connection *connection)
{
    struct http_library *l = h->library;
    bool is_alone = h->n_calls == 1 && !h->tls;
    if (!h->has_resumed && is_alone && td_rpc_loop_is_current(h->router->loop) &&
        !pthread_mutex_trylock(&l->turn)) {
        /* before the library has the byte of its own bell (1.0), which is in the set */
        l->was_watched = l->daemon && !watch_set(l, false);
        l->is_here = true;
    }
    h->has_resumed = true;
    MHD_resume_connection(connection);
}

/* In the place of the library's thread, on the loop's, which has turn and gives it back. False:
 * not all is done, and that one must. */
static bool run_here(struct http_library *l)
{
    bool was_watched = l->was_watched;
    /* once more: the connection that goes on is in the set anew, which is an event, too */
    bool is_done = !l->daemon || (run(l) > 0 && run(l) > 0);
    pthread_mutex_unlock(&l->turn);
    /* Behind turn, or a thread that wakes for the client's next request would wait for it. When the
     * port is being closed there may be no set any more, and nobody waits for it. */
    if (was_watched) watch_again(l);
    return is_done && !atomic_load(&l->is_unwatched);
}

void http_unlock(struct router_http *h)
{
    struct http_library *l = h->library;
    bool has_resumed = h->has_resumed, is_here = has_resumed && l->is_here;
    if (has_resumed) h->has_resumed = l->is_here = false;
    pthread_mutex_unlock(&h->lock);
    if (has_resumed && (!is_here || !run_here(l))) ring(l);
}

td_status http_library_start(struct router_http *h, struct MHD_Daemon *daemon, struct td_err *err)
{
    struct http_library *l = calloc(1, sizeof *l);
    if (!l) return td_fail(err, TD_ERR_NOMEM, "no memory for the HTTP port");
    const union MHD_DaemonInfo *info = MHD_get_daemon_info(daemon, MHD_DAEMON_INFO_EPOLL_FD);
    l->daemon = daemon;
    l->is_plain = !h->tls;
    l->set = info ? info->epoll_fd : -1;
    l->watch = epoll_create1(EPOLL_CLOEXEC);
    l->bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    pthread_mutex_init(&l->turn, NULL);
    struct epoll_event bell = {.events = EPOLLIN, .data.fd = l->bell};
    h->library = l;
    int rc = 0;
    if (l->watch < 0 || l->bell < 0 || watch_set(l, true) ||
        epoll_ctl(l->watch, EPOLL_CTL_ADD, l->bell, &bell))
        rc = errno;
    if (!rc) rc = pthread_create(&l->thread, NULL, thread_main, l);
    if (!rc) return TD_OK;
    h->library = NULL;
    if (l->watch >= 0) close(l->watch);
    if (l->bell >= 0) close(l->bell);
    pthread_mutex_destroy(&l->turn);
    free(l);
    return td_fail(err, TD_ERR_IO, "the HTTP port cannot start a thread: %s", strerror(rc));
}

int http_library_quiesce(struct http_library *l)
{
    pthread_mutex_lock(&l->turn);
    int fd = l->daemon ? MHD_quiesce_daemon(l->daemon) : -1;
    pthread_mutex_unlock(&l->turn);
    return fd;
}

void http_library_stop(struct http_library *l)
{
    atomic_store(&l->is_ending, true);
    ring(l);
    pthread_join(l->thread, NULL);
    pthread_mutex_lock(&l->turn);
    MHD_stop_daemon(l->daemon);
    l->daemon = NULL;
    pthread_mutex_unlock(&l->turn);
}

void http_library_free(struct http_library *l)
{
    if (!l) return;
    close(l->watch);
    close(l->bell);
    pthread_mutex_destroy(&l->turn);
    free(l);
}
