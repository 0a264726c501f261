/* split_memory.c - see split_memory.h.
 *
 * A batch of runs becomes one batch of the device's: a cut run is several, and neighbours on both sides are joined again. The list is the table's, under its
 * lock, and grows when a batch is longer than any before it, which boot's size makes rare. A ticket is the device's own. */
#include "common/worker/split_memory.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define RUNS_AT_BOOT 8192

struct td_split_memory {
    struct td_device_memory table;
    const struct td_device_memory *device;
    uint8_t *rank_base[TD_SPLIT_RANKS_MAX];
    int32_t n_parts, n_copies, n_blocks;
    size_t part_bytes, tail_bytes, block_bytes, copy_bytes; /* copy_bytes: with the tail */
    uint8_t *base;
    size_t bytes;                  /* of the reserved addresses */
    pthread_mutex_t lock;          /* guards the list */
    struct td_device_run *runs;
    size_t n_runs, max_runs;
};

/* Where the byte at p really lies, and how many from there on lie side by side. Any other address is its own. */
static uint8_t *place_of(const struct td_split_memory *m, const void *p, size_t bytes, size_t *ret_bytes)
{
    uintptr_t at = (uintptr_t)p, base = (uintptr_t)m->base;
    *ret_bytes = bytes;
    if (at < base || at >= base + m->bytes) return (uint8_t *)at;
    size_t offset = at - base, copy = offset / m->copy_bytes, in_copy = offset % m->copy_bytes, blocks = (size_t)m->n_blocks * m->block_bytes;
    TD_ASSERT(copy < (size_t)m->n_copies && bytes <= m->bytes - offset);
    size_t part = 0, there = 0, left = 0;
    if (in_copy < blocks) {
        part = in_copy % m->block_bytes / m->part_bytes;
        there = in_copy / m->block_bytes * m->part_bytes + in_copy % m->part_bytes;
        left = m->part_bytes - in_copy % m->part_bytes;
    } else { /* the tail */
        there = (size_t)m->n_blocks * m->part_bytes + (in_copy - blocks);
        left = m->copy_bytes - in_copy;
    }
    if (left < bytes) *ret_bytes = left;
    return m->rank_base[part * (size_t)m->n_copies + copy] + there;
}

static bool add(struct td_split_memory *m, uint8_t *to, const uint8_t *from, size_t bytes)
{
    struct td_device_run *last = m->n_runs ? &m->runs[m->n_runs - 1] : NULL;
    if (last && (uint8_t *)last->to + last->bytes == to && (const uint8_t *)last->from + last->bytes == from) {
        last->bytes += bytes;
        return true;
    }
    if (m->n_runs == m->max_runs) {
        struct td_device_run *more = realloc(m->runs, 2 * m->max_runs * sizeof *more);
        if (!more) return false;
        m->runs = more;
        m->max_runs *= 2;
    }
    m->runs[m->n_runs++] = (struct td_device_run){.to = to, .from = from, .bytes = bytes};
    return true;
}

static bool cut(struct td_split_memory *m, const struct td_device_run *run)
{
    for (size_t at = 0; at < run->bytes;) {
        size_t n_to, n_from;
        uint8_t *to = place_of(m, (uint8_t *)run->to + at, run->bytes - at, &n_to);
        const uint8_t *from = place_of(m, (const uint8_t *)run->from + at, run->bytes - at, &n_from);
        size_t n = n_to < n_from ? n_to : n_from;
        if (!add(m, to, from, n)) return false;
        at += n;
    }
    return true;
}

static td_status copy(void *ctx, enum td_device_copy kind, const struct td_device_run *runs, size_t n_runs, uint64_t *ret_ticket, struct td_err *err)
{
    struct td_split_memory *m = ctx;
    bool good = true;
    pthread_mutex_lock(&m->lock);
    m->n_runs = 0;
    for (size_t i = 0; i < n_runs && good; i++) good = cut(m, &runs[i]);
    td_status s = good ? m->device->copy(m->device->ctx, kind, m->runs, m->n_runs, ret_ticket, err)
                       : td_fail(err, TD_ERR_NOMEM, "no memory for a list of %zu copies", 2 * m->max_runs);
    pthread_mutex_unlock(&m->lock);
    return s;
}

static td_status done(void *ctx, uint64_t ticket, struct td_err *err)
{
    const struct td_split_memory *m = ctx;
    return m->device->done(m->device->ctx, ticket, err);
}

static td_status wait_for(void *ctx, uint64_t ticket, struct td_err *err)
{
    const struct td_split_memory *m = ctx;
    return m->device->wait(m->device->ctx, ticket, err);
}

static td_status alloc_pinned(void *ctx, size_t bytes, void **ret_memory, struct td_err *err)
{
    const struct td_split_memory *m = ctx;
    return m->device->alloc_pinned(m->device->ctx, bytes, ret_memory, err);
}

static void release_pinned(void *ctx, void *memory)
{
    const struct td_split_memory *m = ctx;
    m->device->release_pinned(m->device->ctx, memory);
}

static td_status ipc_export(void *ctx, const void *memory, uint8_t ret_handle[TD_DEVICE_HANDLE_BYTES], uint64_t *ret_offset, struct td_err *err)
{
    const struct td_split_memory *m = ctx;
    (void)memory, (void)ret_handle, (void)ret_offset;
    return td_fail(err, TD_ERR_UNSUPPORTED, "the pool lies on the devices of %d ranks (tp), and a handle is of one", m->n_parts * m->n_copies);
}

static td_status dmabuf(void *ctx, const void *memory, size_t bytes, int *ret_fd, uint64_t *ret_offset, struct td_err *err)
{
    const struct td_split_memory *m = ctx;
    (void)memory, (void)bytes, (void)ret_fd, (void)ret_offset;
    return td_fail(err, TD_ERR_UNSUPPORTED, "the pool lies on the devices of %d ranks (tp), and a dma-buf is of one", m->n_parts * m->n_copies);
}

static td_status ipc_open(void *ctx, const uint8_t handle[TD_DEVICE_HANDLE_BYTES], void **ret_base, struct td_err *err)
{
    const struct td_split_memory *m = ctx;
    return m->device->ipc_open(m->device->ctx, handle, ret_base, err);
}

static void ipc_close(void *ctx, void *base)
{
    const struct td_split_memory *m = ctx;
    m->device->ipc_close(m->device->ctx, base);
}

td_status td_split_memory_create(const struct td_split_config *c, struct td_split_memory **ret, struct td_err *err)
{
    int32_t n_ranks = c->n_parts * c->n_copies;
    TD_ASSERT(n_ranks >= 1 && n_ranks <= TD_SPLIT_RANKS_MAX && c->n_blocks >= 1 && c->part_bytes >= 1);
    struct td_split_memory *m = calloc(1, sizeof *m);
    if (!m) return td_fail(err, TD_ERR_NOMEM, "split memory: out of memory");
    m->n_parts = c->n_parts, m->n_copies = c->n_copies, m->n_blocks = c->n_blocks;
    m->part_bytes = c->part_bytes, m->tail_bytes = c->tail_bytes;
    m->block_bytes = (size_t)c->n_parts * c->part_bytes;
    m->copy_bytes = (size_t)c->n_blocks * m->block_bytes + c->tail_bytes;
    m->bytes = (size_t)c->n_copies * m->copy_bytes;
    m->device = c->device;
    m->max_runs = RUNS_AT_BOOT;
    for (int32_t r = 0; r < n_ranks; r++) m->rank_base[r] = c->rank_base[r];
    pthread_mutex_init(&m->lock, NULL);
    td_status s = TD_OK;
    void *base = mmap(NULL, m->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) s = td_fail(err, TD_ERR_NOMEM, "split memory: %zu bytes of addresses asked and refused: %s", m->bytes, strerror(errno));
    else m->base = base;
    if (!s && !(m->runs = calloc(m->max_runs, sizeof *m->runs))) s = td_fail(err, TD_ERR_NOMEM, "split memory: out of memory");
    if (s) {
        td_split_memory_destroy(m);
        return s;
    }
    struct td_device_memory *t = &m->table;
    memcpy(t->name, c->device->name, sizeof t->name);
    memcpy(t->uuid, c->device->uuid, sizeof t->uuid);
    memcpy(t->pci, c->device->pci, sizeof t->pci);
    t->ctx = m, t->rdma_order = TD_RDMA_ORDER_NONE;
    t->alloc_pinned = alloc_pinned, t->release_pinned = release_pinned;
    t->copy = copy, t->done = done, t->wait = wait_for;
    t->ipc_export = ipc_export, t->dmabuf = dmabuf;
    if (c->device->ipc_open) t->ipc_open = ipc_open, t->ipc_close = ipc_close;
    *ret = m;
    return TD_OK;
}

void td_split_memory_destroy(struct td_split_memory *m)
{
    if (!m) return;
    if (m->base) munmap(m->base, m->bytes);
    pthread_mutex_destroy(&m->lock);
    free(m->runs);
    free(m);
}

const struct td_device_memory *td_split_memory_table(const struct td_split_memory *m) { return &m->table; }
uint8_t *td_split_memory_base(const struct td_split_memory *m) { return m->base; }
size_t td_split_memory_bytes(const struct td_split_memory *m) { return m->copy_bytes; }
