/* cluster.c - see cluster.h. */
#include "bench/sweep/cluster.h"

#include <arpa/inet.h>
#include <errno.h>
#include <limits.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/clock.h"

#define STOP_MS 30000 /* tandem up's own drain and kill come before it */
#define MAX_ARGS 96

/* A port that is free now. Somebody may take it before the router does: the router says so, and
 * the sweep fails with its message. */
static td_status free_port(char *address, size_t address_bytes, struct td_err *err)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof at;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool good = fd >= 0 && !bind(fd, (struct sockaddr *)&at, sizeof at) &&
                !getsockname(fd, (struct sockaddr *)&at, &bytes);
    int saved = errno;
    if (fd >= 0) close(fd);
    if (!good) return td_fail(err, TD_ERR_IO, "no port on 127.0.0.1: %s", strerror(saved));
    snprintf(address, address_bytes, "127.0.0.1:%u", ntohs(at.sin_port));
    return TD_OK;
}

/* Our end of the child's output: "tandem is up" or the end of the child. */
static td_status wait_up(int fd, const struct sweep_cluster_config *c, struct td_err *err)
{
    char text[4096];
    size_t n = 0;
    uint64_t deadline = td_deadline_after_ms(td_now_ns(), c->start_timeout_ms);
    for (;;) {
        struct pollfd p = {.fd = fd, .events = POLLIN};
        if (c->stop && *c->stop) return td_fail(err, TD_ERR_CANCELLED, "interrupted");
        if (td_now_ns() > deadline)
            return td_fail(err, TD_ERR_DEADLINE, "the cluster is not up after %llu ms",
                           (unsigned long long)c->start_timeout_ms);
        if (poll(&p, 1, 100) <= 0) continue;
        ssize_t k = read(fd, text + n, sizeof text - 1 - n);
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0)
            return td_fail(
                err, TD_ERR_PEER,
                "tandem up ended before its workers joined (%s, %u prefill, %u decode)%s%s",
                c->mode, c->prefill, c->decode, c->log_dir && c->log_dir[0] ? ": see " : "",
                c->log_dir ? c->log_dir : "");
        n += (size_t)k;
        text[n] = 0;
        if (strstr(text, "tandem is up")) return TD_OK;
        if (n == sizeof text - 1) n = 0;
    }
}

/* Reads what the child says once it is up, and forgets it: a child whose output nobody reads waits
 * for room, and one whose reader has gone may end. Ends with the child's output, or when
 * sweep_cluster_stop shuts the socket. */
static void *read_all(void *cluster_fd)
{
    char text[4096];
    int fd = (int)(intptr_t)cluster_fd;
    ssize_t n;
    do n = read(fd, text, sizeof text);
    while (n > 0 || (n < 0 && errno == EINTR));
    return NULL;
}

static td_status start_reader(struct sweep_cluster *c, struct td_err *err)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the thread that sweeps */
    int e = pthread_create(&c->reader, NULL, read_all, (void *)(intptr_t)c->output_fd);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    c->has_reader = e == 0;
    return e ? td_fail(err, TD_ERR_NOMEM, "a thread for the cluster's output: %s", strerror(e))
             : TD_OK;
}

td_status sweep_cluster_start(const struct sweep_cluster_config *config,
                              struct sweep_cluster *ret_cluster, struct td_err *err)
{
    struct sweep_cluster cluster = {.output_fd = -1};
    char self[PATH_MAX], prefill[16], decode[16], threads[16], *argv[MAX_ARGS],
        *more = strdup(config->more_args ? config->more_args : "");
    int n = 0, ends[2] = {-1, -1};
    if (!more) return td_fail(err, TD_ERR_NOMEM, "out of memory");
    td_status s = free_port(cluster.address, sizeof cluster.address, err);
    ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    if (!s && length < 0) s = td_fail(err, TD_ERR_IO, "/proc/self/exe: %s", strerror(errno));
    /* A socket and no pipe: shutdown() ends a read in another thread. */
    if (!s && socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends))
        s = td_fail(err, TD_ERR_IO, "socketpair: %s", strerror(errno));
    if (s) goto end;
    self[length] = 0;
    snprintf(prefill, sizeof prefill, "%u", config->prefill);
    snprintf(decode, sizeof decode, "%u", config->decode);
    snprintf(threads, sizeof threads, "%u", config->threads);
    const char *const fixed[] = {self,         "up",        "--model",  config->model,  "--mode",
                                 config->mode, "--prefill", prefill,    "--decode",     decode,
                                 "--threads",  threads,     "--listen", cluster.address};
    for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++)
        argv[n++] = (char *)(uintptr_t)fixed[i];
    if (config->cpus && config->cpus[0])
        argv[n++] = (char *)(uintptr_t) "--cpus", argv[n++] = (char *)(uintptr_t)config->cpus;
    if (config->log_dir && config->log_dir[0])
        argv[n++] = (char *)(uintptr_t) "--log-dir", argv[n++] = (char *)(uintptr_t)config->log_dir;
    for (char *rest = more, *item; (item = strsep(&rest, " \t\n"));)
        if (item[0] && n < MAX_ARGS - 1) argv[n++] = item;
    argv[n] = NULL;

    pid_t parent = getpid(), pid = fork();
    if (pid < 0) {
        s = td_fail(err, TD_ERR_IO, "fork: %s", strerror(errno));
        goto end;
    }
    if (pid == 0) {
        setpgid(0, 0);
        prctl(PR_SET_PDEATHSIG, SIGTERM);
        if (getppid() != parent || dup2(ends[1], STDOUT_FILENO) < 0) _exit(1);
        execv(self, argv);
        _exit(127);
    }
    cluster.pid = pid;
    cluster.output_fd = ends[0];
    close(ends[1]);
    ends[0] = ends[1] = -1;
    s = wait_up(cluster.output_fd, config, err);
    if (!s) s = start_reader(&cluster, err);
    if (s)
        sweep_cluster_stop(&cluster);
    else
        *ret_cluster = cluster;
end:
    for (int i = 0; i < 2; i++)
        if (ends[i] >= 0) close(ends[i]);
    free(more);
    return s;
}

void sweep_cluster_stop(struct sweep_cluster *cluster)
{
    if (cluster->pid == 0) return;
    uint64_t deadline = td_deadline_after_ms(td_now_ns(), STOP_MS);
    bool killed = false;
    kill(cluster->pid, SIGTERM);
    while (waitpid(cluster->pid, NULL, WNOHANG) == 0) {
        if (!killed && td_now_ns() > deadline) killed = !kill(cluster->pid, SIGKILL);
        poll(NULL, 0, 10);
    }
    shutdown(cluster->output_fd, SHUT_RDWR); /* a daemon that outlived it may hold the other end */
    if (cluster->has_reader) pthread_join(cluster->reader, NULL);
    close(cluster->output_fd);
    *cluster = (struct sweep_cluster){0};
}
