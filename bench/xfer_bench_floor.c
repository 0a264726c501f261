/* xfer_bench_floor.c - floors that are other programs, run once per run of the engine: iperf3
 * beside tcp, ib_write_bw beside rdma.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench/xfer_bench.h"
#include "common/base/clock.h"
#include "common/base/json.h"

#define OUT_MAX 65536

bool bench_program_exists(const char *name)
{
    char path[4096];
    const char *list = getenv("PATH");
    for (const char *at = list ? list : "/usr/bin:/bin"; at;) {
        const char *colon = strchr(at, ':');
        snprintf(path, sizeof path, "%.*s/%s", (int)(colon ? colon - at : (long)strlen(at)), at,
                 name);
        if (access(path, X_OK) == 0) return true;
        at = colon ? colon + 1 : NULL;
    }
    return false;
}

/* Starts a program whose standard output and error come through *ret_fd; it ends with this one. */
static pid_t start(const char *const argv[], int *ret_fd)
{
    int out[2];
    if (pipe2(out, O_CLOEXEC)) return -1;
    pid_t pid = fork();
    if (pid == 0) { /* this process has threads: nothing but system calls here */
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        int null = open("/dev/null", O_RDONLY);
        dup2(null, 0);
        dup2(out[1], 1);
        dup2(out[1], 2);
        execvp(argv[0], (char *const *)(uintptr_t)argv);
        _exit(127);
    }
    close(out[1]);
    *ret_fd = out[0];
    if (pid < 0) close(out[0]);
    return pid;
}

/* Reads until `word` has come (NULL: until the end). What does not fit is read and dropped. */
static bool read_until(int fd, const char *word, char *out, size_t n)
{
    size_t used = 0;
    out[0] = 0;
    for (;;) {
        char more[4096];
        ssize_t k = read(fd, more, sizeof more);
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0) return !word;
        size_t take = (size_t)k < n - 1 - used ? (size_t)k : n - 1 - used;
        memcpy(out + used, more, take);
        used += take;
        out[used] = 0;
        if (word && strstr(out, word)) return true;
    }
}

static int end(pid_t pid, int fd, char *out, size_t n)
{
    int status = -1;
    read_until(fd, NULL, out, n);
    close(fd);
    while (pid > 0 && waitpid(pid, &status, 0) < 0 && errno == EINTR) continue;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

int bench_capture(const char *const argv[], char *out, size_t n)
{
    int fd;
    pid_t pid = start(argv, &fd);
    return pid < 0 ? -1 : end(pid, fd, out, n);
}

/* A port that was free a moment ago. */
static uint16_t free_port(void)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t n = sizeof a;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0 &&
        (bind(fd, (struct sockaddr *)&a, sizeof a) || getsockname(fd, (struct sockaddr *)&a, &n)))
        a.sin_port = 0;
    if (fd >= 0) close(fd);
    return ntohs(a.sin_port);
}

td_status bench_iperf_run(const struct bench_case *c, struct bench_sample *s, struct td_err *err)
{
    static char out[OUT_MAX], told[OUT_MAX];
    char port[8], bytes[24], message[24], streams[12];
    double n_bytes = (double)c->bytes * c->batch * c->n_batches;
    if (n_bytes < 256e6) n_bytes = 256e6; /* or it would measure its own start */
    snprintf(port, sizeof port, "%u", free_port());
    snprintf(bytes, sizeof bytes, "%.0f", n_bytes);
    snprintf(message, sizeof message, "%llu",
             (unsigned long long)(c->message           ? c->message
                                  : c->bytes < 1 << 20 ? c->bytes
                                                       : 1 << 20));
    snprintf(streams, sizeof streams, "%d", c->streams);
    const char *server[] = {"iperf3", "-s", "-1",           "-B", "127.0.0.1",
                            "-p",     port, "--forceflush", NULL};
    const char *client[] = {"iperf3", "-c",    "127.0.0.1", "-p",    port, "-n", bytes,
                            "-l",     message, "-P",        streams, "-J", NULL};
    int fd;
    pid_t pid = start(server, &fd);
    if (pid < 0) return td_fail(err, TD_ERR_IO, "iperf3: %s", strerror(errno));
    bool listening = read_until(fd, "listening", told, sizeof told);
    int status = listening ? bench_capture(client, out, sizeof out) : -1;
    if (status) kill(pid, SIGKILL);
    end(pid, fd, told, sizeof told);
    if (status) return td_fail(err, TD_ERR_IO, "iperf3: %.200s", listening ? out : told);

    json_t *root, *sum = NULL;
    double bits = 0, seconds = 0;
    td_status r = td_json_load_text(out, strlen(out), "iperf3 -J", &root, err);
    if (r) return r;
    sum = json_object_get(json_object_get(root, "end"), "sum_received");
    r = td_json_f64(sum, "iperf3 sum_received", "bits_per_second", 1, 1e15, &bits, NULL, err);
    if (!r) r = td_json_f64(sum, "iperf3 sum_received", "seconds", 0, 1e6, &seconds, NULL, err);
    json_decref(root);
    if (r) return r;
    if (!(bits > 0))
        return td_fail(err, TD_ERR_CORRUPT, "iperf3 -J: no end.sum_received.bits_per_second");
    s->n_bytes += n_bytes;
    s->seconds += n_bytes * 8 / bits;
    return TD_OK;
}

/* One try; *ret_gb_s 0: perftest ran and told no figure (where it cannot calibrate its clock it
 * says 0.00 or inf). */
static td_status ib_write_once(const char *const server[], const char *const client[],
                               double *ret_gb_s, struct td_err *err)
{
    static char out[OUT_MAX], told[OUT_MAX];
    uint64_t until = td_deadline_after_ms(td_now_ns(), 10000);
    int fd, status = -1, ended = 0;
    pid_t pid = start(server, &fd);
    if (pid < 0) return td_fail(err, TD_ERR_IO, "ib_write_bw: %s", strerror(errno));
    /* The server does not say when it listens (its output is buffered): the client is started
       until it gets through. */
    while (status && !ended && td_now_ns() < until) {
        status = bench_capture(client, out, sizeof out);
        ended = status ? waitpid(pid, NULL, WNOHANG) : 0;
    }
    if (status && !ended) kill(pid, SIGKILL);
    end(ended ? -1 : pid, fd, told, sizeof told);
    if (status)
        return td_fail(err, TD_ERR_IO, "ib_write_bw: server: %.180s; client: %.180s", told, out);
    double size, n, peak, average = 0; /* the row under "#bytes #iterations BW peak[Gb/sec] BW
                                          average[Gb/sec]" */
    const char *row = strstr(out, "#bytes");
    row = row ? strchr(row, '\n') : NULL;
    if (!row || sscanf(row + 1, "%lf %lf %lf %lf", &size, &n, &peak, &average) != 4)
        return td_fail(err, TD_ERR_CORRUPT, "ib_write_bw: no row of results in \"%.200s\"", out);
    *ret_gb_s = average > 0 && average < 1e5 ? average / 8 : 0;
    return TD_OK;
}

td_status bench_ib_write_run(const struct bench_case *c, const struct bench_options *o,
                             struct bench_sample *s, struct td_err *err)
{
    char port[8], bytes[24], n_iters[24], depth[12], gid[12];
    /* Messages as large as the engine's work requests, and as many in flight, up to perftest's
       own default. */
    uint64_t run = c->shuffled ? c->block_bytes : c->bytes, message = run < 1 << 20 ? run : 1 << 20;
    uint64_t iters = c->bytes * (uint64_t)(c->batch * c->n_batches) / message,
             in_flight = (uint64_t)c->depth * (c->bytes / message);
    snprintf(port, sizeof port, "%u", free_port());
    snprintf(bytes, sizeof bytes, "%llu", (unsigned long long)message);
    snprintf(n_iters, sizeof n_iters, "%llu", (unsigned long long)(iters < 64 ? 64 : iters));
    snprintf(depth, sizeof depth, "%d", in_flight < 2 ? 2 : in_flight > 128 ? 128 : (int)in_flight);
    snprintf(gid, sizeof gid, "%d", (int)o->gid_index);
    const char *server[24], *client[24];
    int k = 0;
    const char *const common[] = {
        "ib_write_bw", "-F", "--report_gbits", "-p", port, "-s", bytes, "-n", n_iters, "-t", depth,
        "-q",          "2"};
    /* two queue pairs, as the engine has */
    for (size_t i = 0; i < sizeof common / sizeof *common; i++, k++)
        server[k] = client[k] = common[i];
    if (o->gid_index >= 0) {
        server[k] = client[k] = "-x";
        server[k + 1] = client[k + 1] = gid;
        k += 2;
    }
    server[k] = client[k] = "-d";
    server[k + 1] = o->peer_device;
    client[k + 1] = o->device;
    client[k + 2] = "127.0.0.1";
    server[k + 2] = client[k + 3] = NULL;
    double gb_s = 0;
    td_status status = TD_OK;
    for (int i = 0; !status && i < 3 && !(gb_s > 0); i++)
        status = ib_write_once(server, client, &gb_s, err);
    if (status || !(gb_s > 0)) return status; /* no figure: not measured in this repeat */
    s->n_bytes += (double)(message * iters);
    s->seconds += (double)(message * iters) / 1e9 / gb_s;
    return TD_OK;
}
