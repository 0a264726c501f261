/* shrunk.c - see shrunk.h. The handler only reads the table and calls write and _exit, which may be
 * called in a signal handler. */
#include "common/base/shrunk.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAPPINGS_MAX 4096

struct mapping {
    const uint8_t *base;
    size_t bytes;
    char path[];
};

static struct mapping *_Atomic mappings[MAPPINGS_MAX];
static struct sigaction before;
/* Of installing the handler, and of who changes the table: two that forget would each look at what
 * the other frees. The handler takes no lock; it says that it looks, and what it may look at is not
 * freed. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_int n_handlers;

static void tell(const char *text)
{
    ssize_t n = write(STDERR_FILENO, text, strlen(text));
    (void)n; /* nobody is left to be told */
}

_Noreturn void td_changed_exit(const char *what)
{
    tell("tandem: ");
    tell(what);
    tell(" changed since it was loaded: a model must not be written to while it is in use; put a "
         "new one in its place by rename\n");
    _exit(1);
}

static void on_sigbus(int signal_number, siginfo_t *info, void *context)
{
    const uint8_t *at = info->si_addr;
    atomic_fetch_add(&n_handlers, 1);
    for (int i = 0; i < MAPPINGS_MAX; i++) {
        const struct mapping *m = atomic_load(&mappings[i]);
        if (!m || at < m->base || at >= m->base + m->bytes) continue;
        tell("tandem: ");
        tell(m->path);
        tell(" became shorter while it was read: a model must not be written to while it is "
             "loaded; put a new one in its place by rename\n");
        _exit(1);
    }
    atomic_fetch_sub(&n_handlers, 1);
    if (before.sa_flags & SA_SIGINFO) {
        before.sa_sigaction(signal_number, info, context);
    } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
        before.sa_handler(signal_number);
    } else { /* the read is tried again and fails as if there were no handler */
        signal(signal_number, SIG_DFL);
    }
}

static void install(void)
{
    struct sigaction now, ours = {.sa_sigaction = on_sigbus, .sa_flags = SA_SIGINFO};
    pthread_mutex_lock(&lock);
    if (!sigaction(SIGBUS, NULL, &now) &&
        !((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_sigbus)) {
        before = now;
        sigemptyset(&ours.sa_mask);
        sigaction(SIGBUS, &ours, NULL);
    }
    pthread_mutex_unlock(&lock);
}

void td_shrunk_watch(const char *path, const void *base, size_t bytes)
{
    size_t n = strlen(path) + 1;
    struct mapping *m = malloc(sizeof *m + n);
    if (!m) return;
    *m = (struct mapping){.base = base, .bytes = bytes};
    memcpy(m->path, path, n);
    install();
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < MAPPINGS_MAX && atomic_load(&mappings[i])) i++;
    if (i < MAPPINGS_MAX)
        atomic_store(&mappings[i], m);
    else
        free(m);
    pthread_mutex_unlock(&lock);
}

void td_shrunk_forget(const void *base)
{
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MAPPINGS_MAX; i++) {
        struct mapping *m = atomic_load(&mappings[i]);
        if (!m || m->base != base) continue;
        atomic_store(&mappings[i], NULL);
        if (atomic_load(&n_handlers) == 0) free(m); /* one that begins now does not find it */
        break;
    }
    pthread_mutex_unlock(&lock);
}
