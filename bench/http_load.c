/* http_load.c - `tandem-bench http-load`: one request over and over on kept-open connections of
 * loopback, with as little work for each byte as can be, so that the server under test and not its
 * client is what a small machine is busy with (router_peers.py). It prints one line of JSON.
 *
 * A connection has one request in flight. An answer is over at its Content-Length, or, chunked, at
 * the last chunk; what it says is not looked at, but its status must be 200. */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "bench/bench.h"
#include "common/base/clock.h"
#include "common/base/options.h"

#define PROGRAM "tandem-bench http-load"

enum { HEAD_BYTES = 8192, MAX_CONNECTIONS = 8192 };

struct connection {
    int fd;
    bool busy, has_head, is_chunked;
    uint64_t sent_ns, first_ns;
    long long left; /* of a body with a length */
    size_t n_head;
    char head[HEAD_BYTES], tail[8]; /* tail: the last 7 bytes of a chunked body */
};

static struct load {
    int64_t port, connections, requests;
    uint64_t timeout_ms;
    const char *path, *body;
    char *request;
    size_t n_request;
    struct connection *c;
    uint64_t n_sent, n_done, n_bytes, n_events, n_reads;
    double *first_us, *whole_us;
} load;

#define OFF(f) offsetof(struct load, f)
static const struct td_option options[] = {
    {"port", TD_OPT_I64, NULL, 1, 65535, NULL, OFF(port), "of 127.0.0.1"},
    {"connections", TD_OPT_I64, "1", 1, MAX_CONNECTIONS, NULL, OFF(connections), "kept open"},
    {"requests", TD_OPT_I64, "1000", 1, 100000000, NULL, OFF(requests), "in all"},
    {"path", TD_OPT_STR, "/v1/completions", 0, 0, NULL, OFF(path), "of the URL"},
    {"body", TD_OPT_STR, NULL, 0, 0, NULL, OFF(body), "JSON"},
    {"timeout_ms", TD_OPT_U64, "60000", 1, 600000, NULL, OFF(timeout_ms), "of the whole run"},
    {0},
};

static void fail(const char *what)
{
    fprintf(stderr, "%s: %s\n", PROGRAM, what);
    exit(1);
}

static void send_request(struct connection *c)
{
    c->busy = true;
    c->has_head = false;
    c->n_head = 0;
    c->first_ns = 0;
    c->sent_ns = td_now_ns();
    load.n_sent++;
    if (send(c->fd, load.request, load.n_request, MSG_NOSIGNAL) != (ssize_t)load.n_request)
        fail("a request could not be sent whole");
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static void answered(struct connection *c)
{
    uint64_t now = td_now_ns();
    load.first_us[load.n_done] = (double)(c->first_ns - c->sent_ns) / 1e3;
    load.whole_us[load.n_done] = (double)(now - c->sent_ns) / 1e3;
    load.n_done++;
    c->busy = false;
    if (load.n_sent < (uint64_t)load.requests) send_request(c);
}

static void take_body(struct connection *c, const char *at, size_t n)
{
    for (const char *e = at; (e = memmem(e, (size_t)(at + n - e), "data: ", 6)); e += 6)
        load.n_events++;
    if (!c->is_chunked) {
        c->left -= (long long)n;
        if (c->left <= 0) answered(c);
        return;
    }
    char end[16];
    size_t old = n >= 7 ? 0 : 7 - n, fresh = n >= 7 ? 7 : n;
    memcpy(end, c->tail + 7 - old, old);
    memcpy(end + old, at + n - fresh, fresh);
    memcpy(c->tail, end, 7);
    if (!memcmp(c->tail, "\r\n0\r\n\r\n", 7)) answered(c);
}

static void take(struct connection *c, const char *bytes, size_t n)
{
    load.n_bytes += n;
    load.n_reads++;
    if (!c->first_ns) c->first_ns = td_now_ns();
    if (c->has_head) {
        take_body(c, bytes, n);
        return;
    }
    if (c->n_head + n >= sizeof c->head) fail("an answer's head is too long");
    memcpy(c->head + c->n_head, bytes, n);
    c->n_head += n;
    c->head[c->n_head] = 0;
    char *end = strstr(c->head, "\r\n\r\n");
    if (!end) return;
    if (strncmp(c->head, "HTTP/1.1 200", 12)) fail(c->head);
    end += 4;
    char *length = strcasestr(c->head, "\r\ncontent-length:");
    c->has_head = true;
    c->is_chunked = !length || length > end;
    if (!c->is_chunked) c->left = strtoll(length + 17, NULL, 10);
    memset(c->tail, 0, sizeof c->tail);
    size_t body = c->n_head - (size_t)(end - c->head);
    if (body) take_body(c, end, body);
}

static void open_all(int ep)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)load.port)};
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    for (int64_t i = 0; i < load.connections; i++) {
        struct connection *c = &load.c[i];
        int one = 1;
        c->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (c->fd < 0 || connect(c->fd, (struct sockaddr *)&to, sizeof to)) fail(strerror(errno));
        setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
        epoll_ctl(ep, EPOLL_CTL_ADD, c->fd, &e);
    }
}

static void run(int ep)
{
    static char bytes[256 << 10];
    struct epoll_event events[256];
    uint64_t until = td_deadline_after_ms(td_now_ns(), load.timeout_ms);
    for (int64_t i = 0; i < load.connections && i < load.requests; i++) send_request(&load.c[i]);
    while (load.n_done < (uint64_t)load.requests) {
        int n = epoll_wait(ep, events, 256, 1000);
        if (td_now_ns() > until) fail("the run did not end in time");
        for (int i = 0; i < n; i++) {
            struct connection *c = events[i].data.ptr;
            ssize_t got = recv(c->fd, bytes, sizeof bytes, MSG_DONTWAIT);
            if (got > 0)
                take(c, bytes, (size_t)got);
            else if (got == 0 || (errno != EAGAIN && errno != EINTR))
                fail("a connection was closed");
        }
    }
}

int td_bench_http_load(int argc, char **argv)
{
    struct td_err err = {0};
    td_status s = td_options_load(options, &load, PROGRAM, "One request over and over, over HTTP.",
                                  argc, argv, NULL, 0, NULL, &err);
    if (s) return td_die(PROGRAM, &err);
    size_t room = strlen(load.path) + strlen(load.body) + 256;
    load.request = malloc(room);
    load.c = calloc((size_t)load.connections, sizeof *load.c);
    load.first_us = calloc((size_t)load.requests, sizeof(double));
    load.whole_us = calloc((size_t)load.requests, sizeof(double));
    if (!load.request || !load.c || !load.first_us || !load.whole_us) fail("no memory");
    load.n_request = (size_t)snprintf(load.request, room,
                                      "POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
                                      "application/json\r\nContent-Length: %zu\r\n\r\n%s",
                                      load.path, strlen(load.body), load.body);
    int ep = epoll_create1(EPOLL_CLOEXEC);
    open_all(ep);
    uint64_t start = td_now_ns();
    run(ep);
    double wall = (double)(td_now_ns() - start) / 1e9;
    size_t n = (size_t)load.n_done;
    qsort(load.first_us, n, sizeof(double), by_value);
    qsort(load.whole_us, n, sizeof(double), by_value);
    printf("{\"requests\": %zu, \"wall_s\": %.4f, \"events\": %llu, \"reads\": %llu, \"bytes\": "
           "%llu, \"first_p50_us\": %.1f, \"first_p99_us\": %.1f, \"whole_p50_us\": %.1f, "
           "\"whole_p99_us\": %.1f}\n",
           n, wall, (unsigned long long)load.n_events, (unsigned long long)load.n_reads,
           (unsigned long long)load.n_bytes, load.first_us[n / 2], load.first_us[n * 99 / 100],
           load.whole_us[n / 2], load.whole_us[n * 99 / 100]);
    return 0;
}
