/* ranks.c - see ranks.h. */
#include "common/engine/ranks.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "common/base/cgroup.h"
#include "common/base/clock.h"

#define WORD "--tp-rank="
#define ARGS_BYTES_MAX ((size_t)1 << 20)
#define ARGS_MAX 4096
/* ranks load at their own pace: a dead one is seen at once, a late one has this long */
#define TIMEOUT_MS 600000
#define SPIN_US 50
#define STOP_MS 5000

extern char **environ;

td_status td_ranks_take(int *argc, char **argv, struct td_ranks_place *ret_place,
                        struct td_err *err)
{
    *ret_place = (struct td_ranks_place){.memfd = -1, .socket = -1};
    if (*argc < 2 || strncmp(argv[1], WORD, strlen(WORD))) return TD_OK;
    int rank, memfd, socket, parent, end = 0;
    unsigned spin_us;
    const char *text = argv[1] + strlen(WORD);
    if (sscanf(text, "%d,%d,%d,%u,%d%n", &rank, &memfd, &socket, &spin_us, &parent, &end) != 5 ||
        text[end] || rank < 1 || rank >= TD_COMM_MAX_RANKS)
        return td_fail(err, TD_ERR_INVALID, "%s is for tandem's own use: give --tp N", argv[1]);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        return td_fail(err, TD_ERR_PEER, "rank %d: rank 0 (pid %d) is gone", rank, parent);
    *ret_place =
        (struct td_ranks_place){.rank = rank, .memfd = memfd, .socket = socket, .spin_us = spin_us};
    memmove(argv + 1, argv + 2, (size_t)(*argc - 1) * sizeof *argv); /* the NULL, too */
    --*argc;
    return TD_OK;
}

/* This program's own arguments, and room for one more behind the first. */
static td_status own_args(char *text, char **args, struct td_err *err)
{
    size_t bytes = 0, n = 0;
    ssize_t got = 1;
    int fd = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return td_fail(err, TD_ERR_IO, "tp: /proc/self/cmdline: %s", strerror(errno));
    while (got > 0 && bytes < ARGS_BYTES_MAX) {
        got = read(fd, text + bytes, ARGS_BYTES_MAX - bytes);
        if (got < 0 && errno == EINTR)
            got = 1;
        else if (got > 0)
            bytes += (size_t)got;
    }
    close(fd);
    if (got != 0 || bytes == 0)
        return td_fail(err, TD_ERR_IO, "tp: /proc/self/cmdline: %s",
                       got < 0 ? strerror(errno) : "empty, or too long");
    for (size_t at = 0; at < bytes; at += strlen(text + at) + 1) {
        if (n == ARGS_MAX)
            return td_fail(err, TD_ERR_LIMIT, "tp: more than %d arguments", ARGS_MAX);
        args[n == 0 ? 0 : n + 1] = text + at;
        n++;
    }
    args[n + 1] = NULL;
    return TD_OK;
}

static td_status start_one(struct td_ranks *ranks, int32_t rank, uint32_t spin_us, char **args,
                           struct td_err *err)
{
    char word[96];
    int memfd = ranks->segment.memfd, socket = ranks->segment.sockets[rank][1];
    snprintf(word, sizeof word, WORD "%d,%d,%d,%u,%d", rank, memfd, socket, spin_us, (int)getpid());
    args[1] = word;
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    /* the same number: no longer close-on-exec */
    posix_spawn_file_actions_adddup2(&actions, memfd, memfd);
    posix_spawn_file_actions_adddup2(&actions, socket, socket);
    pid_t pid;
    int e = posix_spawn(&pid, "/proc/self/exe", &actions, NULL, args, environ);
    posix_spawn_file_actions_destroy(&actions);
    if (e) return td_fail(err, TD_ERR_IO, "tp: cannot start rank %d: %s", rank, strerror(e));
    ranks->pids[rank] = (int)pid;
    td_comm_segment_expect(&ranks->segment, rank, (int)pid);
    return TD_OK;
}

td_status td_ranks_start(int32_t n_ranks, int32_t n_threads, struct td_ranks *r, struct td_err *err)
{
    *r = (struct td_ranks){.n_ranks = n_ranks}; /* in place: the communicator keeps the segment's
                                                   address */
    char *text = calloc(1, ARGS_BYTES_MAX + 1), **args = calloc(ARGS_MAX + 2, sizeof *args);
    if (!text || !args) {
        free(text);
        free(args);
        return td_fail(err, TD_ERR_NOMEM, "tp: no memory");
    }
    int n_cpus = td_cpus_usable("");
    if (n_threads == 0) n_threads = n_cpus;
    uint32_t spin_us = n_cpus >= n_ranks && n_cpus >= n_threads ? SPIN_US : 0;
    struct td_comm_config c = {.timeout_ms = TIMEOUT_MS, .spin_us = spin_us};
    td_status s = td_comm_segment_create(n_ranks, 0, &r->segment, err);
    if (!s) s = own_args(text, args, err);
    for (int32_t i = 1; i < n_ranks && !s; i++) s = start_one(r, i, spin_us, args, err);
    if (!s) s = td_comm_open(&r->segment, 0, &c, &r->comm, err);
    free(text);
    free(args);
    if (s) {
        for (int32_t i = 1; i < n_ranks; i++)
            if (r->pids[i]) kill(r->pids[i], SIGKILL);
        td_ranks_stop(r);
        return s;
    }
    return TD_OK;
}

td_status td_ranks_join(const struct td_ranks_place *place, struct td_ranks *r, struct td_err *err)
{
    *r = (struct td_ranks){0};
    struct td_comm_config c = {.timeout_ms = TIMEOUT_MS, .spin_us = place->spin_us};
    fcntl(place->memfd, F_SETFD, FD_CLOEXEC);
    fcntl(place->socket, F_SETFD, FD_CLOEXEC);
    td_status s = td_comm_segment_join(place->memfd, place->socket, place->rank, &r->segment, err);
    if (!s) s = td_comm_open(&r->segment, place->rank, &c, &r->comm, err);
    return s;
}

void td_ranks_stop(struct td_ranks *r)
{
    td_comm_close(r->comm);
    uint64_t deadline = td_deadline_after_ms(td_now_ns(), STOP_MS);
    for (int32_t i = 1; i < r->n_ranks; i++) {
        if (r->pids[i] == 0) continue;
        while (waitpid(r->pids[i], NULL, WNOHANG) == 0) {
            /* our child, not reaped yet: the number is its own */
            if (td_now_ns() > deadline) kill(r->pids[i], SIGKILL);
            struct timespec tick = {.tv_nsec = 1000000};
            clock_nanosleep(CLOCK_MONOTONIC, 0, &tick, NULL);
        }
    }
    td_comm_segment_close(&r->segment);
    memset(r, 0, sizeof *r);
}
