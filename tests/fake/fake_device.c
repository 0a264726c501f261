/* fake_device.c - see fake_device.h. */
#include "common/base/random.h"
#include "common/base/sanitizers.h"
#include "tests/fake/fake_device.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define AREAS 32
#define WAITING 256
#define PAGE 4096u

struct area {                 /* an allocation, or another process's as opened here */
    uint8_t *address, *bytes; /* address: what the program is told */
    size_t n_bytes;
    int fd; /* own allocations; -1: opened */
};

struct waiting { /* a batch that was issued and has not run */
    uint64_t ticket;
    struct td_device_run *runs;
    size_t n_runs;
    bool on_device;
    int n_polls; /* so many more times `done` says "not yet" */
};

struct fake_device {
    struct td_device_memory table;
    pthread_mutex_t lock;
    bool eager, slow, blind, wrong, held, peermem;
    uint64_t fails_at, n_copies, n_tickets, n_run, random;
    struct area area[AREAS];
    struct {
        uint8_t *bytes;
        size_t n;
    } pinned[4];
    struct waiting waiting[WAITING];
    uint32_t head, n_waiting;
};

struct handle {
    uint64_t magic, bytes;
    int32_t pid, fd;
};
#define HANDLE_MAGIC 0x656c646e6148ull

/* All tables of a process reach one another's allocations, as those of one device do. */
#define DEVICES 16
static pthread_mutex_t all_lock = PTHREAD_MUTEX_INITIALIZER;
static struct fake_device *all[DEVICES];
static struct {
    uint8_t *address, *bytes;
    size_t n_bytes;
} places[DEVICES * AREAS];

static void place_add(const struct area *a)
{
    int i = 0;
    pthread_mutex_lock(&all_lock);
    while (i < DEVICES * AREAS && places[i].address) i++;
    TD_ASSERT(i < DEVICES * AREAS);
    places[i].address = a->address;
    places[i].bytes = a->bytes;
    places[i].n_bytes = a->n_bytes;
    pthread_mutex_unlock(&all_lock);
}

static void place_remove(const struct area *a)
{
    pthread_mutex_lock(&all_lock);
    for (int i = 0; i < DEVICES * AREAS; i++)
        if (places[i].address == a->address) places[i].address = NULL;
    pthread_mutex_unlock(&all_lock);
}

/* The accessible address of [at, at + n) of device memory; NULL: it is not device memory. */
static uint8_t *translate(const void *at, size_t n)
{
    uint8_t *found = NULL;
    pthread_mutex_lock(&all_lock);
    for (int i = 0; i < DEVICES * AREAS && !found; i++) {
        size_t offset = (size_t)((uintptr_t)at - (uintptr_t)places[i].address);
        if (places[i].address && (uintptr_t)at >= (uintptr_t)places[i].address &&
            offset <= places[i].n_bytes && n <= places[i].n_bytes - offset)
            found = places[i].bytes + offset;
    }
    pthread_mutex_unlock(&all_lock);
    return found;
}

static bool is_pinned(const struct fake_device *d, const void *at, size_t n)
{
    for (int i = 0; i < 4; i++) {
        size_t offset = (size_t)((uintptr_t)at - (uintptr_t)d->pinned[i].bytes);
        if (d->pinned[i].bytes && (uintptr_t)at >= (uintptr_t)d->pinned[i].bytes &&
            offset <= d->pinned[i].n && n <= d->pinned[i].n - offset)
            return true;
    }
    return false;
}

/* A copy by the device, which the thread sanitizer does not watch. It may read bytes that are being
 * written, when its source was freed during the copy (cuda-ipc): its result is then not used. */
static void device_copy(uint8_t *to, const uint8_t *from, size_t bytes)
{
#ifdef TD_WITH_TSAN
    struct iovec local = {.iov_base = to, .iov_len = bytes},
                 remote = {.iov_base = (void *)(uintptr_t)from, .iov_len = bytes};
    TD_ASSERT(syscall(SYS_process_vm_readv, getpid(), &local, 1ul, &remote, 1ul, 0ul) ==
              (long)bytes);
#else
    memcpy(to, from, bytes);
#endif
}

static void run_oldest(struct fake_device *d)
{
    struct waiting *w = &d->waiting[d->head];
    for (size_t i = 0; i < w->n_runs; i++) {
        if (w->on_device)
            device_copy(w->runs[i].to, w->runs[i].from, w->runs[i].bytes);
        else
            memcpy(w->runs[i].to, w->runs[i].from, w->runs[i].bytes);
    }
    d->n_run = w->ticket;
    free(w->runs);
    d->head = (d->head + 1) % WAITING;
    d->n_waiting--;
}

static td_status failed(const struct fake_device *d, struct td_err *err)
{
    (void)d;
    return td_fail(err, TD_ERR_DEVICE, "an illegal memory access was encountered");
}

static bool is_dead(const struct fake_device *d)
{
    return d->fails_at && d->n_copies >= d->fails_at;
}

static td_status copy(void *ctx, enum td_device_copy kind, const struct td_device_run *runs,
                      size_t n_runs, uint64_t *ret_ticket, struct td_err *err)
{
    struct fake_device *d = ctx;
    pthread_mutex_lock(&d->lock);
    d->n_copies++;
    if (is_dead(d)) {
        pthread_mutex_unlock(&d->lock);
        return failed(d, err);
    }
    TD_ASSERT(n_runs > 0);
    while (d->n_waiting == WAITING) run_oldest(d);
    struct waiting *w = &d->waiting[(d->head + d->n_waiting++) % WAITING];
    *w = (struct waiting){.ticket = ++d->n_tickets,
                          .runs = calloc(n_runs, sizeof *runs),
                          .n_runs = n_runs,
                          .on_device = kind == TD_COPY_ON_DEVICE};
    TD_ASSERT(w->runs);
    td_random_step(&d->random);
    w->n_polls = d->slow ? (int)(d->random >> 33) % 4 : 0;
    for (size_t i = 0; i < n_runs; i++) {
        uint8_t *to = kind == TD_COPY_TO_HOST ? runs[i].to : translate(runs[i].to, runs[i].bytes);
        const uint8_t *from =
            kind == TD_COPY_TO_DEVICE ? runs[i].from : translate(runs[i].from, runs[i].bytes);
        TD_ASSERT(to && from && runs[i].bytes);
        if (kind == TD_COPY_TO_HOST) TD_ASSERT(is_pinned(d, to, runs[i].bytes));
        if (kind == TD_COPY_TO_DEVICE) TD_ASSERT(is_pinned(d, from, runs[i].bytes));
        w->runs[i] = (struct td_device_run){.to = to, .from = from, .bytes = runs[i].bytes};
        /* whoever looks too early sees this */
        memset(to, 0xa5, runs[i].bytes < 4096 ? runs[i].bytes : 4096);
        if (runs[i].bytes > 4096) to[runs[i].bytes - 1] = 0xa5;
    }
    *ret_ticket = w->ticket;
    while (d->eager && d->n_waiting && !d->held) run_oldest(d);
    pthread_mutex_unlock(&d->lock);
    return TD_OK;
}

static td_status done(void *ctx, uint64_t ticket, struct td_err *err)
{
    struct fake_device *d = ctx;
    td_status status = TD_OK;
    pthread_mutex_lock(&d->lock);
    TD_ASSERT(ticket && ticket <= d->n_tickets);
    if (is_dead(d)) status = failed(d, err);
    while (!status && d->n_run < ticket) {
        if (d->held || d->waiting[d->head].n_polls-- > 0)
            status = TD_INPROGRESS;
        else
            run_oldest(d);
    }
    pthread_mutex_unlock(&d->lock);
    return status;
}

static td_status wait_for(void *ctx, uint64_t ticket, struct td_err *err)
{
    struct fake_device *d = ctx;
    td_status status = TD_OK;
    pthread_mutex_lock(&d->lock);
    if (is_dead(d)) status = failed(d, err);
    while (!status && d->n_run < ticket) run_oldest(d);
    pthread_mutex_unlock(&d->lock);
    return status;
}

static td_status alloc_pinned(void *ctx, size_t bytes, void **ret_memory, struct td_err *err)
{
    struct fake_device *d = ctx;
    int i = 0;
    while (i < 4 && d->pinned[i].bytes) i++;
    TD_ASSERT(i < 4);
    d->pinned[i].bytes = calloc(1, bytes);
    if (!d->pinned[i].bytes)
        return td_fail(err, TD_ERR_NOMEM, "%zu bytes of page-locked memory", bytes);
    d->pinned[i].n = bytes;
    *ret_memory = d->pinned[i].bytes;
    return TD_OK;
}

static void drop_pinned(struct fake_device *d, void *memory)
{
    for (int i = 0; i < 4; i++) {
        if (d->pinned[i].bytes != memory) continue;
        TD_ASSERT(!d->n_waiting || is_dead(d)); /* or a copy would land in what is not there any
                                                   more */
        d->pinned[i].bytes = NULL;
        return;
    }
    TD_ASSERT(!"page-locked memory is this table's");
}

static td_status pin(void *ctx, void *memory, size_t bytes, struct td_err *err)
{
    struct fake_device *d = ctx;
    int i = 0;
    (void)err;
    while (i < 4 && d->pinned[i].bytes) i++;
    TD_ASSERT(i < 4);
    d->pinned[i].bytes = memory;
    d->pinned[i].n = bytes;
    return TD_OK;
}

static td_status no_pin(void *ctx, void *memory, size_t bytes, struct td_err *err)
{
    (void)ctx, (void)memory, (void)bytes;
    return td_fail(err, TD_ERR_UNSUPPORTED,
                   "operation not supported: memory that is not the driver's");
}

static void unpin(void *ctx, void *memory) { drop_pinned(ctx, memory); }

static void release_pinned(void *ctx, void *memory)
{
    drop_pinned(ctx, memory);
    free(memory);
}

/* Maps the memory of fd twice: with access for copies, and without any. */
static bool map(struct area *a, int fd, size_t bytes)
{
    size_t n = (bytes + PAGE - 1) / PAGE * PAGE;
    void *address = mmap(NULL, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0),
         *real = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (address == MAP_FAILED || real == MAP_FAILED) {
        if (address != MAP_FAILED) munmap(address, n);
        if (real != MAP_FAILED) munmap(real, n);
        return false;
    }
    *a = (struct area){.address = address, .bytes = real, .n_bytes = bytes, .fd = -1};
    place_add(a);
    return true;
}

static void unmap(struct area *a)
{
    size_t n = (a->n_bytes + PAGE - 1) / PAGE * PAGE;
    place_remove(a);
    munmap(a->address, n);
    munmap(a->bytes, n);
    if (a->fd >= 0) close(a->fd);
    *a = (struct area){0};
}

static struct area *free_area(struct fake_device *d)
{
    for (int i = 0; i < AREAS; i++)
        if (!d->area[i].address) return &d->area[i];
    TD_ASSERT(!"areas");
    return NULL;
}

static td_status ipc_export(void *ctx, const void *memory,
                            uint8_t ret_handle[TD_DEVICE_HANDLE_BYTES], uint64_t *ret_offset,
                            struct td_err *err)
{
    struct fake_device *d = ctx;
    (void)err;
    for (int i = 0; i < AREAS; i++) {
        const struct area *a = &d->area[i];
        if (!a->address || a->fd < 0 || (uintptr_t)memory < (uintptr_t)a->address ||
            (uintptr_t)memory >= (uintptr_t)a->address + a->n_bytes)
            continue;
        struct handle h = {
            .magic = HANDLE_MAGIC, .bytes = a->n_bytes, .pid = (int32_t)getpid(), .fd = a->fd};
        memset(ret_handle, 0, TD_DEVICE_HANDLE_BYTES);
        memcpy(ret_handle, &h, sizeof h);
        *ret_offset = (uint64_t)((uintptr_t)memory - (uintptr_t)a->address);
        return TD_OK;
    }
    TD_ASSERT(!"exported memory is this table's");
    return TD_ERR_INVALID;
}

/* The table's own allocation that contains [at, at + n); NULL: none. */
static const struct area *area_of(const struct fake_device *d, const void *at, size_t n,
                                  uint64_t *ret_offset)
{
    for (int i = 0; i < AREAS; i++) {
        const struct area *a = &d->area[i];
        size_t offset = (size_t)((uintptr_t)at - (uintptr_t)a->address);
        if (!a->address || a->fd < 0 || (uintptr_t)at < (uintptr_t)a->address ||
            offset > a->n_bytes || n > a->n_bytes - offset)
            continue;
        *ret_offset = offset;
        return a;
    }
    return NULL;
}

bool fake_device_peermem(const void *at, size_t n, int *ret_fd, uint64_t *ret_offset)
{
    const struct area *found = NULL;
    pthread_mutex_lock(&all_lock);
    for (int i = 0; i < DEVICES && !found; i++)
        if (all[i] && all[i]->peermem) found = area_of(all[i], at, n, ret_offset);
    if (found) *ret_fd = found->fd;
    pthread_mutex_unlock(&all_lock);
    return found != NULL;
}

/* The allocation's memfd takes the place of a dma-buf; the fake NIC maps it. */
static td_status dmabuf(void *ctx, const void *memory, size_t bytes, int *ret_fd,
                        uint64_t *ret_offset, struct td_err *err)
{
    const struct area *a = area_of(ctx, memory, bytes, ret_offset);
    if (!a) return td_fail(err, TD_ERR_UNSUPPORTED, "not an allocation");
    *ret_fd = fcntl(a->fd, F_DUPFD_CLOEXEC, 0);
    TD_ASSERT(*ret_fd >= 0);
    return TD_OK;
}

static td_status no_dmabuf(void *ctx, const void *memory, size_t bytes, int *ret_fd,
                           uint64_t *ret_offset, struct td_err *err)
{
    (void)ctx, (void)memory, (void)bytes, (void)ret_fd, (void)ret_offset;
    return td_fail(err, TD_ERR_UNSUPPORTED, "the driver exports no dma-buf");
}

static td_status no_export(void *ctx, const void *memory,
                           uint8_t ret_handle[TD_DEVICE_HANDLE_BYTES], uint64_t *ret_offset,
                           struct td_err *err)
{
    (void)ctx, (void)memory, (void)ret_handle, (void)ret_offset;
    return td_fail(err, TD_ERR_UNSUPPORTED,
                   "operation not supported: memory of a virtual allocation");
}

static td_status ipc_open(void *ctx, const uint8_t handle[TD_DEVICE_HANDLE_BYTES], void **ret_base,
                          struct td_err *err)
{
    struct fake_device *d = ctx;
    struct handle h;
    char path[64];
    memcpy(&h, handle, sizeof h);
    if (d->blind)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "peer access is not supported between these two devices");
    if (h.magic != HANDLE_MAGIC || h.bytes > (uint64_t)1 << 32)
        return td_fail(err, TD_ERR_UNSUPPORTED, "invalid resource handle");
    /* as CUDA: not in the process that exported */
    if (h.pid == (int32_t)getpid())
        return td_fail(err, TD_ERR_UNSUPPORTED, "invalid device context");
    snprintf(path, sizeof path, "/proc/%d/fd/%d", h.pid, h.fd);
    int fd =
        d->wrong ? memfd_create("fake-device-wrong", MFD_CLOEXEC) : open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return td_fail(err, TD_ERR_UNSUPPORTED, "the exporting process is gone: %s",
                       strerror(errno));
    pthread_mutex_lock(&d->lock);
    struct area *a = free_area(d);
    bool ok = (!d->wrong || ftruncate(fd, (off_t)h.bytes) == 0) && map(a, fd, h.bytes);
    if (ok) *ret_base = a->address;
    pthread_mutex_unlock(&d->lock);
    close(fd);
    return ok ? TD_OK : td_fail(err, TD_ERR_UNSUPPORTED, "mapping of buffer object failed");
}

static void ipc_close(void *ctx, void *base)
{
    struct fake_device *d = ctx;
    bool found = false;
    pthread_mutex_lock(&d->lock);
    for (uint32_t k = 0; k < d->n_waiting; k++) /* a copy from it would read what is not there
                                                   any more */
        for (size_t i = 0; i < d->waiting[(d->head + k) % WAITING].n_runs && !is_dead(d); i++)
            for (int a = 0; a < AREAS; a++) {
                const uint8_t *from = d->waiting[(d->head + k) % WAITING].runs[i].from;
                TD_ASSERT(d->area[a].address != base || from < d->area[a].bytes ||
                          from >= d->area[a].bytes + d->area[a].n_bytes);
            }
    for (int i = 0; i < AREAS && !found; i++) {
        if (d->area[i].address != base || d->area[i].fd >= 0) continue;
        unmap(&d->area[i]);
        found = true;
    }
    pthread_mutex_unlock(&d->lock);
    TD_ASSERT(found);
}

struct fake_device *fake_device_open(const char *words)
{
    struct fake_device *d = calloc(1, sizeof *d);
    TD_ASSERT(d);
    pthread_mutex_init(&d->lock, NULL);
    d->random = 0x5eed;
    d->eager = strstr(words, "eager") != NULL;
    d->slow = strstr(words, "slow") != NULL;
    d->blind = strstr(words, "blind-ipc") != NULL;
    d->wrong = strstr(words, "wrong-ipc") != NULL;
    d->peermem = strstr(words, "peermem") != NULL;
    const char *fails = strstr(words, "fails=");
    if (fails) d->fails_at = strtoull(fails + 6, NULL, 10);
    int at = 0;
    pthread_mutex_lock(&all_lock);
    while (at < DEVICES && all[at]) at++;
    TD_ASSERT(at < DEVICES);
    all[at] = d;
    pthread_mutex_unlock(&all_lock);
    d->table = (struct td_device_memory){
        .ctx = d,
        .name = "Fake Device",
        .uuid = "GPU-00000000-fake",
        .rdma_order = TD_RDMA_ORDER_NONE,
        .alloc_pinned = alloc_pinned,
        .release_pinned = release_pinned,
        .pin = strstr(words, "no-pin") ? no_pin : pin,
        .unpin = unpin,
        .copy = copy,
        .done = done,
        .wait = wait_for,
        .ipc_export = strstr(words, "no-ipc") ? no_export : ipc_export,
        .ipc_open = ipc_open,
        .ipc_close = ipc_close,
        .dmabuf = strstr(words, "no-dmabuf") || d->peermem ? no_dmabuf : dmabuf};
    if (strstr(words, "owner")) d->table.rdma_order = TD_RDMA_ORDER_OWNER;
    return d;
}

const struct td_device_memory *fake_device_memory(const struct fake_device *d) { return &d->table; }

void *fake_device_alloc(struct fake_device *d, size_t bytes)
{
    struct area *a = free_area(d);
    int fd = memfd_create("fake-device", MFD_CLOEXEC);
    TD_ASSERT(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0 && map(a, fd, bytes));
    a->fd = fd;
    return a->address;
}

uint8_t *fake_device_bytes(struct fake_device *d, const void *address)
{
    (void)d;
    return translate(address, 1);
}

void fake_device_hold(struct fake_device *d, bool hold)
{
    pthread_mutex_lock(&d->lock);
    d->held = hold;
    pthread_mutex_unlock(&d->lock);
}

uint64_t fake_device_n_copies(struct fake_device *d)
{
    pthread_mutex_lock(&d->lock);
    uint64_t n = d->n_copies;
    pthread_mutex_unlock(&d->lock);
    return n;
}

uint64_t fake_device_n_waiting(struct fake_device *d)
{
    pthread_mutex_lock(&d->lock);
    uint64_t n = d->n_waiting;
    pthread_mutex_unlock(&d->lock);
    return n;
}

void fake_device_close(struct fake_device *d)
{
    if (!d) return;
    pthread_mutex_lock(&all_lock);
    struct fake_device *others[DEVICES];
    for (int i = 0; i < DEVICES; i++) {
        if (all[i] == d) all[i] = NULL;
        others[i] = all[i];
    }
    pthread_mutex_unlock(&all_lock);
    /* Freed memory waits for the devices of all tables: nothing reads it afterwards. No table is
     * opened or closed meanwhile. */
    for (int i = 0; i < DEVICES; i++) {
        if (!others[i]) continue;
        pthread_mutex_lock(&others[i]->lock);
        while (others[i]->n_waiting && !is_dead(others[i])) run_oldest(others[i]);
        pthread_mutex_unlock(&others[i]->lock);
    }
    while (d->n_waiting) { /* of a device that failed: they never ran */
        free(d->waiting[d->head].runs);
        d->head = (d->head + 1) % WAITING;
        d->n_waiting--;
    }
    for (int i = 0; i < 4; i++) TD_ASSERT(!d->pinned[i].bytes);
    for (int i = 0; i < AREAS; i++) {
        TD_ASSERT(!d->area[i].address || d->area[i].fd >= 0);
        if (d->area[i].address) unmap(&d->area[i]);
    }
    pthread_mutex_destroy(&d->lock);
    free(d);
}
