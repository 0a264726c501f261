/* cuda_copy_test.c - the device's side of KV transfer (copy.cu): batches of runs in all three
 * directions against the same moves in the host's memory, tickets, handles between processes,
 * and what becomes of them when the device is lost. TANDEM_CUDA_LIBRARY as in
 * cuda_device_test.c. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/random.h"
#include "kernels/device.h"

#define POOL ((size_t)3 << 20)
#define MAX_RUNS 5000

static const struct td_ops *ops;
static const struct td_device *dev;
static const struct td_device_memory *m;
static struct td_err err;
static const char *program;

static uint64_t rng = 1;
static uint64_t rnd(uint64_t n) { return td_random_index(&rng, n); }

static void open_device(void)
{
    struct td_device_config config = {0};
    if (td_device_open(&config, &ops, &err)) fail_msg("open: %s", err.msg);
    dev = ops->device;
    m = dev->memory;
    assert_non_null(m);
}

static void close_device(void) { td_device_close(ops); }

static void *device_bytes(const void *from, size_t n)
{
    void *p;
    if (dev->alloc(n, "test", &p, &err)) fail_msg("%s", err.msg);
    if (dev->upload(p, from, n, &err)) fail_msg("%s", err.msg);
    return p;
}

static uint8_t *pinned(size_t n)
{
    void *p;
    if (m->alloc_pinned(m->ctx, n, &p, &err)) fail_msg("%s", err.msg);
    return p;
}

static void until_done(uint64_t ticket)
{
    td_status s;
    while ((s = m->done(m->ctx, ticket, &err)) == TD_INPROGRESS) {
    }
    if (s) fail_msg("%s", err.msg);
    assert_int_equal(m->done(m->ctx, ticket, &err), TD_OK); /* once, always */
}

static void fill(uint8_t *to, size_t n)
{
    for (size_t i = 0; i < n; i++) to[i] = (uint8_t)rnd(256);
}

/* Runs of every size and alignment, many at a time: destinations side by side in random order,
 * so that they do not overlap. */
static size_t make_runs(struct td_device_run *runs, uint8_t *to, uint8_t *from, size_t max_run,
                        size_t align)
{
    size_t n = 0;
    for (size_t at = 0; at < POOL && n < MAX_RUNS;) {
        size_t bytes = (1 + rnd(max_run)) * align;
        if (bytes > POOL - at) bytes = POOL - at;
        runs[n++] = (struct td_device_run){
            .to = to + at, .from = from + rnd((POOL - bytes) / align + 1) * align, .bytes = bytes};
        at += bytes + rnd(3) * align;
    }
    for (size_t i = n; i > 1; i--) {
        size_t k = rnd(i);
        struct td_device_run r = runs[k];
        runs[k] = runs[i - 1];
        runs[i - 1] = r;
    }
    return n;
}

static void copies_are_the_hosts(void **state)
{
    (void)state;
    static const struct {
        size_t max_run, align;
    } sizes[] = {{700, 1}, {4096, 16}, {200000, 1}, {900, 256}, {3, 65536}, {1 << 20, 3}};
    static struct td_device_run runs[MAX_RUNS];
    uint8_t *a = malloc(POOL), *b = malloc(POOL), *want = malloc(POOL), *got = malloc(POOL);
    assert_true(a && b && want && got);
    open_device();
    uint8_t *pin = pinned(POOL), *pin2 = pinned(POOL);
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        for (int kind = TD_COPY_TO_HOST; kind <= TD_COPY_ON_DEVICE; kind++) {
            uint64_t ticket;
            fill(a, POOL);
            fill(b, POOL);
            memcpy(want, b, POOL);
            uint8_t *from =
                        kind == TD_COPY_TO_DEVICE ? memcpy(pin, a, POOL) : device_bytes(a, POOL),
                    *to = kind == TD_COPY_TO_HOST ? memcpy(pin2, b, POOL) : device_bytes(b, POOL);
            size_t n = make_runs(runs, to, from, sizes[i].max_run, sizes[i].align);
            for (size_t k = 0; k < n; k++) {
                memcpy(want + ((uint8_t *)runs[k].to - to),
                       a + ((const uint8_t *)runs[k].from - from), runs[k].bytes);
            }
            if (m->copy(m->ctx, (enum td_device_copy)kind, runs, n, &ticket, &err))
                fail_msg("%s", err.msg);
            memset(runs, 0xff, n * sizeof *runs); /* the caller's again */
            if (i & 1) {
                until_done(ticket);
            } else {
                if (m->wait(m->ctx, ticket, &err)) fail_msg("%s", err.msg);
                assert_int_equal(m->done(m->ctx, ticket, &err), TD_OK);
            }
            if (kind == TD_COPY_TO_HOST)
                memcpy(got, to, POOL);
            else if (dev->download(got, to, POOL, &err))
                fail_msg("%s", err.msg);
            for (size_t k = 0; k < POOL; k++)
                if (got[k] != want[k])
                    fail_msg("sizes %zu, kind %d: byte %zu is %02x, want %02x", i, kind, k, got[k],
                             want[k]);
            if (kind != TD_COPY_TO_DEVICE) dev->release(from);
            if (kind != TD_COPY_TO_HOST) dev->release(to);
        }
    m->release_pinned(m->ctx, pin);
    m->release_pinned(m->ctx, pin2);
    close_device();
    free(a);
    free(b);
    free(want);
    free(got);
}

/* A mapping that processes share, page-locked where it lies: copies large and small go there and
 * come from there, and who has mapped it elsewhere sees them. */
static void pages_that_are_there_are_pinned(void **state)
{
    (void)state;
    static struct td_device_run runs[MAX_RUNS];
    uint8_t *a = malloc(POOL), *got = malloc(POOL);
    uint64_t ticket;
    int fd = memfd_create("cuda-copy", MFD_CLOEXEC);
    assert_true(a && got && fd >= 0 && ftruncate(fd, (off_t)POOL) == 0);
    uint8_t *here = mmap(NULL, POOL, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0),
            *there = mmap(NULL, POOL, PROT_READ, MAP_SHARED, fd, 0);
    assert_true(here != MAP_FAILED && there != MAP_FAILED);
    open_device();
    assert_int_equal(m->pin(m->ctx, NULL, POOL, &err), TD_ERR_UNSUPPORTED);
    assert_non_null(strstr(err.msg, "cudaHostRegister"));
    for (int round = 0; round < 2; round++) { /* again after unpin */
        if (m->pin(m->ctx, here, POOL, &err)) fail_msg("%s", err.msg);
        assert_int_equal(m->pin(m->ctx, here, POOL, &err), TD_ERR_UNSUPPORTED);
        for (int i = 0; i < 2; i++) {
            fill(a, POOL);
            memset(here, 0xee, POOL);
            uint8_t *from = device_bytes(a, POOL), *to = device_bytes(here, POOL);
            size_t n = 0;
            for (size_t at = 0, bytes = i ? 300 : 1 << 20; at < POOL && n < MAX_RUNS;
                 at += bytes, n++) {
                if (i && n + 1 == MAX_RUNS) bytes = POOL - at;
                runs[n] = (struct td_device_run){.to = here + at,
                                                 .from = from + at,
                                                 .bytes = bytes < POOL - at ? bytes : POOL - at};
            }
            if (m->copy(m->ctx, TD_COPY_TO_HOST, runs, n, &ticket, &err)) fail_msg("%s", err.msg);
            until_done(ticket);
            assert_memory_equal(there, a, POOL);
            for (size_t k = 0; k < n; k++) {
                runs[k].from = runs[k].to;
                runs[k].to = to + ((const uint8_t *)runs[k].from - here);
            }
            if (m->copy(m->ctx, TD_COPY_TO_DEVICE, runs, n, &ticket, &err)) fail_msg("%s", err.msg);
            until_done(ticket);
            if (dev->download(got, to, POOL, &err)) fail_msg("%s", err.msg);
            assert_memory_equal(got, a, POOL);
            dev->release(from);
            dev->release(to);
        }
        m->unpin(m->ctx, here);
    }
    close_device();
    munmap(here, POOL);
    munmap(there, POOL);
    close(fd);
    free(a);
    free(got);
}

/* More batches than there are events, on all streams at once; tickets are waited for in any
 * order. */
static void many_batches_are_under_way(void **state)
{
    (void)state;
    enum { N = 200, EACH = 1024 };
    static uint64_t tickets[3][N];
    uint8_t *host = malloc(3 * N * EACH), *got = malloc(N * EACH);
    assert_true(host && got);
    fill(host, 3 * N * EACH);
    open_device();
    uint8_t *pin = pinned(2 * N * EACH), *d[3];
    for (int k = 0; k < 3; k++) d[k] = device_bytes(host + (size_t)k * N * EACH, N * EACH);
    memcpy(pin, host, N * EACH); /* first half: to d[1] */
    memset(pin + N * EACH, 0, N * EACH);
    uint8_t *target = device_bytes(got, N * EACH);
    for (size_t i = 0; i < N; i++) {
        struct td_device_run down = {pin + N * EACH + i * EACH, d[0] + i * EACH, EACH},
                             up = {d[1] + i * EACH, pin + i * EACH, EACH},
                             on = {target + i * EACH, d[2] + i * EACH, EACH};
        assert_int_equal(m->copy(m->ctx, TD_COPY_TO_HOST, &down, 1, &tickets[0][i], &err), TD_OK);
        assert_int_equal(m->copy(m->ctx, TD_COPY_TO_DEVICE, &up, 1, &tickets[1][i], &err), TD_OK);
        assert_int_equal(m->copy(m->ctx, TD_COPY_ON_DEVICE, &on, 1, &tickets[2][i], &err), TD_OK);
    }
    for (size_t i = N; i-- > 0;)
        for (int k = 0; k < 3; k++) until_done(tickets[k][(i * 7) % N]);
    assert_memory_equal(pin + N * EACH, host, N * EACH);
    assert_int_equal(dev->download(got, d[1], N * EACH, &err), TD_OK);
    assert_memory_equal(got, host, N * EACH);
    assert_int_equal(dev->download(got, target, N * EACH, &err), TD_OK);
    assert_memory_equal(got, host + 2 * N * EACH, N * EACH);
    for (int k = 0; k < 3; k++) dev->release(d[k]);
    dev->release(target);
    m->release_pinned(m->ctx, pin);
    close_device();
    free(host);
    free(got);
}

#define IPC_BYTES ((size_t)1 << 20)

/* The other process: opens what it is told, reads it through its own device, and says what it
 * saw. */
static int child_main(int fd)
{
    uint8_t handle[TD_DEVICE_HANDLE_BYTES];
    uint64_t offset, ticket;
    void *base = NULL;
    struct td_device_config config = {0};
    if (read(fd, handle, sizeof handle) != sizeof handle ||
        read(fd, &offset, sizeof offset) != sizeof offset)
        return 2;
    if (td_device_open(&config, &ops, &err)) return 3;
    m = ops->device->memory;
    if (m->ipc_open(m->ctx, handle, &base, &err)) {
        fprintf(stderr, "open: %s\n", err.msg);
        return 4;
    }
    uint8_t *pin;
    void *own, *p;
    if (m->alloc_pinned(m->ctx, IPC_BYTES, &p, &err) ||
        ops->device->alloc(IPC_BYTES, "test", &own, &err))
        return 5;
    pin = p;
    struct td_device_run pull = {own, (uint8_t *)base + offset, IPC_BYTES},
                         down = {pin, own, IPC_BYTES};
    if (m->copy(m->ctx, TD_COPY_ON_DEVICE, &pull, 1, &ticket, &err) ||
        m->wait(m->ctx, ticket, &err))
        return 6;
    if (m->copy(m->ctx, TD_COPY_TO_HOST, &down, 1, &ticket, &err) || m->wait(m->ctx, ticket, &err))
        return 7;
    m->ipc_close(m->ctx, base);
    for (size_t at = 0; at < IPC_BYTES;) {
        ssize_t k = write(fd, pin + at, IPC_BYTES - at);
        if (k <= 0) return 8;
        at += (size_t)k;
    }
    handle[5] ^= 0x40; /* not a handle */
    memset(handle + 8, 0xee, 40);
    if (m->ipc_open(m->ctx, handle, &base, &err) != TD_ERR_UNSUPPORTED || !err.msg[0]) return 9;
    struct td_device_run again = {pin, own, 64}; /* that was an answer and no failure of the
                                                    device */
    if (m->copy(m->ctx, TD_COPY_TO_HOST, &again, 1, &ticket, &err) || m->wait(m->ctx, ticket, &err))
        return 10;
    m->release_pinned(m->ctx, pin);
    ops->device->release(own);
    td_device_close(ops);
    return 0;
}

static void another_process_reads_the_allocation(void **state)
{
    (void)state;
    int pair[2], status;
    char text[16];
    uint8_t handle[TD_DEVICE_HANDLE_BYTES], *host = malloc(IPC_BYTES), *got = malloc(IPC_BYTES);
    uint64_t offset;
    void *base;
    assert_true(host && got);
    fill(host, IPC_BYTES);
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
    pid_t pid = fork();
    if (pid == 0) {
        close(pair[0]);
        snprintf(text, sizeof text, "%d", pair[1]);
        execl(program, program, "--child", text, (char *)NULL);
        _exit(127);
    }
    close(pair[1]);
    open_device();
    void *pool = device_bytes(host, IPC_BYTES);
    if (m->ipc_export(m->ctx, pool, handle, &offset, &err)) fail_msg("%s", err.msg);
    /* in the process that exported it */
    assert_int_equal(m->ipc_open(m->ctx, handle, &base, &err), TD_ERR_UNSUPPORTED);
    assert_true(err.msg[0]);
    assert_int_equal(write(pair[0], handle, sizeof handle), sizeof handle);
    assert_int_equal(write(pair[0], &offset, sizeof offset), sizeof offset);
    for (size_t at = 0; at < IPC_BYTES;) {
        ssize_t k = read(pair[0], got + at, IPC_BYTES - at);
        if (k <= 0) fail_msg("the other process ended after %zu bytes", at);
        at += (size_t)k;
    }
    assert_memory_equal(got, host, IPC_BYTES);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    if (!WIFEXITED(status) || WEXITSTATUS(status))
        fail_msg("the other process: status %x", (unsigned)status);
    dev->release(pool);
    close_device();
    close(pair[0]);
    free(host);
    free(got);
}

/* A copy that fails is the end of the device for this process, and says why; so do those after
 * it, and the steps. */
static void a_lost_device_says_so(void **state)
{
    (void)state;
    struct td_device_config config = {0};
    if (td_device_open(&config, &ops, &err)) fail_msg("%s", err.msg);
    bool is_emulated = ops->device->info.is_emulated;
    td_device_close(ops);
    if (!is_emulated) {
        print_message("skipped: a real device gets no planted faults\n");
        return;
    }
    assert_int_equal(setenv("TD_CUDA_EMU_FAULT", "launch:2", 1), 0); /* the first is open's own */
    open_device();
    void *pool;
    uint8_t *pin = pinned(4096);
    uint64_t ticket;
    if (dev->alloc(4096, "test", &pool, &err)) fail_msg("%s", err.msg);
    struct td_device_run runs[8];
    /* small ones: a kernel */
    for (int i = 0; i < 8; i++)
        runs[i] = (struct td_device_run){(uint8_t *)pool + i * 64, pin + i * 64, 32};
    td_status s = m->copy(m->ctx, TD_COPY_TO_DEVICE, runs, 8, &ticket, &err);
    while (!s && (s = m->done(m->ctx, ticket, &err)) == TD_INPROGRESS) s = TD_OK;
    if (!s) s = m->wait(m->ctx, ticket, &err);
    assert_int_equal(s, TD_ERR_DEVICE);
    assert_non_null(strstr(err.msg, "is lost for this process"));
    assert_int_equal(m->copy(m->ctx, TD_COPY_TO_HOST, runs, 1, &ticket, &err), TD_ERR_DEVICE);
    assert_int_equal(dev->wait(&err), TD_ERR_DEVICE);
    m->release_pinned(m->ctx, pin);
    close_device();
    assert_int_equal(unsetenv("TD_CUDA_EMU_FAULT"), 0);
}

/* A page that a copy comes to and cannot go on from: the thread that reads it waits in the
 * handler until a byte comes through the pipe. */
static uint8_t *page;
static size_t page_bytes;
static int reached[2], go_on[2];

static void on_fault(int sig, siginfo_t *info, void *context)
{
    char byte = 0;
    (void)sig, (void)context;
    if ((uint8_t *)info->si_addr < page || (uint8_t *)info->si_addr >= page + page_bytes) abort();
    if (write(reached[1], &byte, 1) != 1 || read(go_on[0], &byte, 1) != 1) abort();
    if (mprotect(page, page_bytes, PROT_READ | PROT_WRITE)) abort();
}

static void *wait_for_ticket(void *arg)
{
    struct td_err e;
    return m->wait(m->ctx, *(uint64_t *)arg, &e) ? arg : NULL;
}

/* While one thread waits for a copy to the device that does not end, copies of the other kinds
 * are issued, asked for and waited for, and the next to the device is issued and asked for. */
static void a_wait_holds_up_nobody(void **state)
{
    (void)state;
    struct sigaction fault = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO}, before[2];
    struct td_device_run run;
    uint64_t stuck, next, other;
    pthread_t waiter;
    char byte = 0;
    open_device();
    if (!dev->info.is_emulated) { /* a copy engine raises no signal */
        close_device();
        skip();
    }
    page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    page = mmap(NULL, page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(page != MAP_FAILED && pipe(reached) == 0 && pipe(go_on) == 0);
    assert_int_equal(m->pin(m->ctx, page, page_bytes, &err), TD_OK);
    uint8_t *pin = pinned(page_bytes), *pool = device_bytes(pin, page_bytes),
            *pool2 = device_bytes(pin, page_bytes);
    assert_int_equal(sigaction(SIGSEGV, &fault, &before[0]), 0);
    assert_int_equal(sigaction(SIGBUS, &fault, &before[1]), 0);
    assert_int_equal(mprotect(page, page_bytes, PROT_NONE), 0);
    run = (struct td_device_run){pool, page, page_bytes};
    assert_int_equal(m->copy(m->ctx, TD_COPY_TO_DEVICE, &run, 1, &stuck, &err), TD_OK);
    assert_int_equal(pthread_create(&waiter, NULL, wait_for_ticket, &stuck), 0);
    assert_int_equal(read(reached[0], &byte, 1), 1);
    alarm(20); /* who is held up here ends the test */
    for (int kind = TD_COPY_TO_HOST; kind <= TD_COPY_ON_DEVICE; kind++) {
        if (kind == TD_COPY_TO_DEVICE) continue;
        run = (struct td_device_run){kind == TD_COPY_TO_HOST ? pin : pool2, pool2, 64};
        if (kind == TD_COPY_ON_DEVICE) run.from = pool2 + 64;
        assert_int_equal(m->copy(m->ctx, (enum td_device_copy)kind, &run, 1, &other, &err), TD_OK);
        until_done(other);
        assert_int_equal(m->wait(m->ctx, other, &err), TD_OK);
    }
    run = (struct td_device_run){pool2, pin, 64};
    assert_int_equal(m->copy(m->ctx, TD_COPY_TO_DEVICE, &run, 1, &next, &err), TD_OK);
    assert_int_equal(m->done(m->ctx, next, &err), TD_INPROGRESS);
    alarm(0);
    assert_int_equal(write(go_on[1], &byte, 1), 1);
    void *failed;
    assert_int_equal(pthread_join(waiter, &failed), 0);
    assert_null(failed);
    until_done(next);
    assert_int_equal(sigaction(SIGSEGV, &before[0], NULL), 0);
    assert_int_equal(sigaction(SIGBUS, &before[1], NULL), 0);
    m->unpin(m->ctx, page);
    munmap(page, page_bytes);
    dev->release(pool), dev->release(pool2);
    m->release_pinned(m->ctx, pin);
    for (int i = 0; i < 2; i++) close(reached[i]), close(go_on[i]);
    close_device();
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "--child") == 0)
        return child_main((int)strtol(argv[2], NULL, 10));
    program = argv[0];
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(copies_are_the_hosts),
        cmocka_unit_test(pages_that_are_there_are_pinned),
        cmocka_unit_test(many_batches_are_under_way),
        cmocka_unit_test(a_wait_holds_up_nobody),
        cmocka_unit_test(another_process_reads_the_allocation),
        cmocka_unit_test(a_lost_device_says_so),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
