/* http_mock.c - `tandem-bench http-mock`: a server with the OpenAI completions API and without a
 * model, for other routers to stand in front of (router_peers.py). A request gets max_tokens
 * tokens, one every --step-ms, or all at once with 0; `"stream": true` is found in the body by its
 * letters.
 *
 * One thread, one epoll; a timerfd gives the steps. Requests are taken on trust: this is a mock. */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "bench/bench.h"
#include "common/base/options.h"

#define PROGRAM "tandem-bench http-mock"

enum { MAX_FDS = 65536, IN_BYTES = 65536 };

struct client {
    bool open, streams;
    unsigned left;
    size_t n_in;
    char in[IN_BYTES];
};

static struct mock {
    int64_t port;
    uint64_t step_ms;
    struct client *clients[MAX_FDS]; /* by descriptor */
    int live[MAX_FDS], n_live;       /* that are due tokens */
} mock;

#define OFF(f) offsetof(struct mock, f)
static const struct td_option options[] = {
    {"port", TD_OPT_I64, NULL, 1, 65535, NULL, OFF(port), "of 127.0.0.1"},
    {"step_ms", TD_OPT_U64, "0", 0, 10000, NULL, OFF(step_ms),
     "a token of each request every so often; 0 = all at once"},
    {0},
};

static const char chunk[] =
    "data: {\"id\":\"cmpl-0123456789abcdef\",\"object\":\"text_completion\",\"created\":1700000000,"
    "\"model\":\"pocket\",\"choices\":[{\"index\":0,\"text\":\" token\",\"logprobs\":null,"
    "\"finish_reason\":null}]}\n\n";

static void put(int fd, const char *bytes, size_t n)
{
    if (send(fd, bytes, n, MSG_NOSIGNAL) != (ssize_t)n && errno != EPIPE && errno != ECONNRESET)
        fprintf(stderr, "%s: send: %s\n", PROGRAM, strerror(errno));
}

static void put_event(int fd, const char *event, size_t n, const char *end)
{
    char out[1024];
    int m = snprintf(out, sizeof out, "%zx\r\n%.*s\r\n%s", n, (int)n, event, end);
    put(fd, out, (size_t)m);
}

static void step(int fd, struct client *c)
{
    put_event(fd, chunk, sizeof chunk - 1, "");
    if (--c->left == 0) put_event(fd, "data: [DONE]\n\n", 14, "0\r\n\r\n");
}

static void answer_whole(int fd)
{
    static const char body[] =
        "{\"id\":\"cmpl-0123456789abcdef\",\"object\":\"text_completion\",\"created\":1700000000,"
        "\"model\":\"pocket\",\"choices\":[{\"index\":0,\"text\":\" a few tokens of text\","
        "\"logprobs\":null,\"finish_reason\":\"length\"}],\"usage\":{\"prompt_tokens\":8,"
        "\"completion_tokens\":2,\"total_tokens\":10}}";
    char out[1024];
    int m = snprintf(out, sizeof out,
                     "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: "
                     "%zu\r\n\r\n%s",
                     sizeof body - 1, body);
    put(fd, out, (size_t)m);
}

static void answer_get(int fd, const char *path)
{
    static const char models[] =
        "{\"object\":\"list\",\"data\":[{\"id\":\"pocket\",\"object\":\"model\"}],"
        "\"model_path\":\"pocket\",\"is_generation\":true,\"max_model_len\":2048}";
    char out[1024];
    const char *body = strstr(path, "health") ? "" : models;
    int m = snprintf(out, sizeof out,
                     "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: "
                     "%zu\r\n\r\n%s",
                     strlen(body), body);
    put(fd, out, (size_t)m);
}

static void answer(int fd, struct client *c, const char *body)
{
    static const char head[] = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                               "Transfer-Encoding: chunked\r\n\r\n";
    const char *max = strstr(body, "\"max_tokens\":");
    bool streams = strstr(body, "\"stream\":true") || strstr(body, "\"stream\": true");
    c->left = max ? (unsigned)strtoul(max + 13, NULL, 10) : 1;
    if (!streams) {
        c->left = 0;
        answer_whole(fd);
        return;
    }
    put(fd, head, sizeof head - 1);
    if (mock.step_ms)
        mock.live[mock.n_live++] = fd;
    else
        while (c->left) step(fd, c);
}

/* A whole request, if there is one, is answered and taken off. */
static bool take(int fd, struct client *c)
{
    c->in[c->n_in] = 0;
    char *end = strstr(c->in, "\r\n\r\n");
    if (!end) return false;
    end += 4;
    char *length = strcasestr(c->in, "\r\ncontent-length:");
    size_t body = length && length < end ? strtoul(length + 17, NULL, 10) : 0,
           whole = (size_t)(end - c->in) + body;
    if (c->n_in < whole) return false;
    char *close_asked = strcasestr(c->in, "\r\nconnection: close\r\n");
    bool closes = close_asked && close_asked < end;
    char after = c->in[whole];
    c->in[whole] = 0;
    if (!strncmp(c->in, "GET ", 4))
        answer_get(fd, c->in + 4);
    else
        answer(fd, c, end);
    c->in[whole] = after;
    memmove(c->in, c->in + whole, c->n_in - whole);
    c->n_in -= whole;
    if (closes && !c->left) shutdown(fd, SHUT_WR);
    return true;
}

static void close_client(int fd)
{
    for (int i = mock.n_live; i-- > 0;)
        if (mock.live[i] == fd) mock.live[i] = mock.live[--mock.n_live];
    free(mock.clients[fd]);
    mock.clients[fd] = NULL;
    close(fd);
}

static void on_client(int fd)
{
    struct client *c = mock.clients[fd];
    ssize_t n = recv(fd, c->in + c->n_in, sizeof c->in - 1 - c->n_in, MSG_DONTWAIT);
    if (n > 0) {
        c->n_in += (size_t)n;
        while (take(fd, c)) {
        }
    } else if (n == 0 || (errno != EAGAIN && errno != EINTR)) {
        close_client(fd);
    }
}

static void on_steps(int timer)
{
    uint64_t n;
    if (read(timer, &n, sizeof n) != sizeof n) return;
    for (int i = 0; i < mock.n_live;) {
        struct client *c = mock.clients[mock.live[i]];
        step(mock.live[i], c);
        if (c->left)
            i++;
        else
            mock.live[i] = mock.live[--mock.n_live];
    }
}

static void on_connection(int ep, int listener)
{
    int one = 1, fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    if (fd < 0) return;
    if (fd >= MAX_FDS || !(mock.clients[fd] = calloc(1, sizeof(struct client)))) {
        close(fd);
        return;
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    struct epoll_event e = {.events = EPOLLIN, .data.fd = fd};
    epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e);
}

int td_bench_http_mock(int argc, char **argv)
{
    struct td_err err = {0};
    td_status s = td_options_load(options, &mock, PROGRAM, "An OpenAI server without a model.",
                                  argc, argv, NULL, 0, NULL, &err);
    if (s) return td_die(PROGRAM, &err);
    int one = 1, ep = epoll_create1(EPOLL_CLOEXEC),
        listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0),
        timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)mock.port)};
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, 1024)) {
        td_fail(&err, TD_ERR_IO, "port %d: %s", (int)mock.port, strerror(errno));
        return td_die(PROGRAM, &err);
    }
    struct itimerspec every = {.it_interval = {.tv_nsec = (long)(mock.step_ms % 1000) * 1000000,
                                               .tv_sec = (long)(mock.step_ms / 1000)}};
    every.it_value = every.it_interval;
    timerfd_settime(timer, 0, &every, NULL);
    struct epoll_event e = {.events = EPOLLIN, .data.fd = listener};
    epoll_ctl(ep, EPOLL_CTL_ADD, listener, &e);
    e.data.fd = timer;
    epoll_ctl(ep, EPOLL_CTL_ADD, timer, &e);
    for (;;) { /* until it is killed */
        struct epoll_event events[256];
        int n = epoll_wait(ep, events, 256, -1);
        for (int i = 0; i < n; i++) {
            int fd = events[i].data.fd;
            if (fd == listener)
                on_connection(ep, listener);
            else if (fd == timer)
                on_steps(timer);
            else if (mock.clients[fd])
                on_client(fd);
        }
    }
}
