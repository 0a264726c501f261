/* cluster.c - see cluster.h. */
#include "bench/sweep/cluster.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <netinet/in.h>
#include <poll.h>
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

/* The pipe's end: "tandem is up" or the end of the child. */
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

td_status sweep_cluster_start(const struct sweep_cluster_config *config,
                              struct sweep_cluster *ret_cluster, struct td_err *err)
{
    struct sweep_cluster cluster = {0};
    char self[PATH_MAX], prefill[16], decode[16], threads[16], *argv[MAX_ARGS],
        *more = strdup(config->more_args ? config->more_args : "");
    int n = 0, ends[2] = {-1, -1};
    if (!more) return td_fail(err, TD_ERR_NOMEM, "out of memory");
    td_status s = free_port(cluster.address, sizeof cluster.address, err);
    ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    if (!s && length < 0) s = td_fail(err, TD_ERR_IO, "/proc/self/exe: %s", strerror(errno));
    if (!s && pipe2(ends, O_CLOEXEC)) s = td_fail(err, TD_ERR_IO, "pipe: %s", strerror(errno));
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
    close(ends[1]);
    ends[1] = -1;
    s = wait_up(ends[0], config, err);
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
    *cluster = (struct sweep_cluster){0};
}
