/* capture.h - runs a function in a child process and keeps what it wrote and how it ended: for
 * aborts, exits and output. */
#ifndef TD_TESTS_CAPTURE_H
#define TD_TESTS_CAPTURE_H

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

struct capture {
    int wait_status;  /* of waitpid */
    char text[16384]; /* stdout and stderr together, NUL-terminated */
    size_t n_bytes;
};

static inline int capture_aborted(const struct capture *c)
{
    return WIFSIGNALED(c->wait_status) && WTERMSIG(c->wait_status) == SIGABRT;
}
static inline int capture_exit(const struct capture *c)
{
    return WIFEXITED(c->wait_status) ? WEXITSTATUS(c->wait_status) : -1;
}

/* Call it before the process has threads. The child ends with status 0 when fn returns. */
static inline void capture_run(struct capture *c, void (*fn)(void *), void *arg)
{
    memset(c, 0, sizeof *c);
    int fds[2];
    fflush(NULL);
    if (pipe(fds)) abort();
    pid_t pid = fork();
    if (pid < 0) abort();
    if (pid == 0) {
        struct rlimit no_core = {0, 0};
        setrlimit(RLIMIT_CORE, &no_core);
        dup2(fds[1], STDOUT_FILENO);
        dup2(fds[1], STDERR_FILENO);
        close(fds[0]);
        close(fds[1]);
        fn(arg);
        fflush(NULL);
        _exit(0);
    }
    close(fds[1]);
    for (;;) {
        ssize_t k = read(fds[0], c->text + c->n_bytes, sizeof c->text - 1 - c->n_bytes);
        if (k <= 0) break;
        c->n_bytes += (size_t)k;
    }
    close(fds[0]);
    if (waitpid(pid, &c->wait_status, 0) != pid) abort();
}

#endif
