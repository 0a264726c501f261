/* split_memory.c - see split_memory.h.
 *
 * A batch of runs becomes one batch of the device's: a cut run is several, and neighbours on
 * both sides are joined again. The list is the table's, under its lock, and grows when a batch
 * is longer than any before it, which boot's size makes rare. A ticket is the device's own. */
#include "common/engine/split_memory.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "common/base/entropy.h"

#define RUNS_AT_BOOT 8192
#define POOL_MAGIC 0x31505354u /* "TSP1" */
#define TAIL_MAX ((uint64_t)1 << 20)

/* A pool under reserved addresses: this worker's, or one that was opened. */
struct range {
    struct range *next;
    uint8_t *rank_base[TD_SPLIT_RANKS_MAX];
    void *opened[TD_SPLIT_RANKS_MAX]; /* handles, of an opened pool */
    int32_t n_parts, n_copies, n_blocks;
    size_t part_bytes, tail_bytes, block_bytes, copy_bytes; /* copy_bytes: with the tail */
    uint8_t *base;
    size_t bytes; /* reserved */
};

/* pool_export's: a head, then n_parts parts. */
struct pool_head {
    uint32_t magic, n_parts;
    uint64_t n_blocks, part_bytes, tail_bytes;
};
struct pool_part {
    struct td_split_handle at;
    uint8_t mark[TD_SPLIT_MARK_BYTES];
};
_Static_assert(sizeof(struct pool_head) == 32 && sizeof(struct pool_part) == 88,
               "they travel as they are");
_Static_assert(sizeof(struct pool_head) + TD_SPLIT_RANKS_MAX * sizeof(struct pool_part) <=
                   TD_DEVICE_POOL_BYTES,
               "a pool's description has room");

struct td_split_memory {
    struct td_device_memory table;
    const struct td_device_memory *device;
    struct range own;
    struct td_split_handle handles[TD_SPLIT_RANKS_MAX];
    int32_t n_ranks;
    pthread_mutex_t lock; /* guards the list and the ranges */
    struct range *ranges;
    struct td_device_run *runs;
    size_t n_runs, max_runs;
    pthread_mutex_t mark_lock;
    uint8_t *marks; /* page-locked, [TD_SPLIT_RANKS_MAX][TD_SPLIT_MARK_BYTES] */
};

static td_status range_init(struct range *r, int32_t n_parts, int32_t n_copies, int32_t n_blocks,
                            size_t part_bytes, size_t tail_bytes, struct td_err *err)
{
    r->n_parts = n_parts, r->n_copies = n_copies, r->n_blocks = n_blocks;
    r->part_bytes = part_bytes, r->tail_bytes = tail_bytes;
    r->block_bytes = (size_t)n_parts * part_bytes;
    r->copy_bytes = (size_t)n_blocks * r->block_bytes + tail_bytes;
    r->bytes = (size_t)n_copies * r->copy_bytes;
    void *base =
        mmap(NULL, r->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED)
        return td_fail(err, TD_ERR_NOMEM,
                       "split memory: %zu bytes of addresses asked and refused: %s", r->bytes,
                       strerror(errno));
    r->base = base;
    return TD_OK;
}

static bool holds(const struct range *r, const void *p)
{
    return (uintptr_t)p >= (uintptr_t)r->base && (uintptr_t)p < (uintptr_t)r->base + r->bytes;
}

/* Where the byte at p really lies, and how many from there on lie side by side. An address of no
 * range is its own. */
static uint8_t *place_of(const struct td_split_memory *m, const void *p, size_t bytes,
                         size_t *ret_bytes)
{
    const struct range *r = m->ranges;
    while (r && !holds(r, p)) r = r->next;
    *ret_bytes = bytes;
    if (!r) return (uint8_t *)(uintptr_t)p;
    size_t offset = (uintptr_t)p - (uintptr_t)r->base, copy = offset / r->copy_bytes,
           in_copy = offset % r->copy_bytes, blocks = (size_t)r->n_blocks * r->block_bytes;
    TD_ASSERT(bytes <= r->bytes - offset);
    size_t part = 0, there, left;
    if (in_copy < blocks) {
        part = in_copy % r->block_bytes / r->part_bytes;
        there = in_copy / r->block_bytes * r->part_bytes + in_copy % r->part_bytes;
        left = r->part_bytes - in_copy % r->part_bytes;
    } else { /* the tail */
        there = (size_t)r->n_blocks * r->part_bytes + (in_copy - blocks);
        left = r->copy_bytes - in_copy;
    }
    if (left < bytes) *ret_bytes = left;
    return r->rank_base[part * (size_t)r->n_copies + copy] + there;
}

static bool add(struct td_split_memory *m, uint8_t *to, const uint8_t *from, size_t bytes)
{
    struct td_device_run *last = m->n_runs ? &m->runs[m->n_runs - 1] : NULL;
    if (last && (uint8_t *)last->to + last->bytes == to &&
        (const uint8_t *)last->from + last->bytes == from) {
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
        const uint8_t *from =
            place_of(m, (const uint8_t *)run->from + at, run->bytes - at, &n_from);
        size_t n = n_to < n_from ? n_to : n_from;
        if (!add(m, to, from, n)) return false;
        at += n;
    }
    return true;
}

static td_status copy(void *ctx, enum td_device_copy kind, const struct td_device_run *runs,
                      size_t n_runs, uint64_t *ret_ticket, struct td_err *err)
{
    struct td_split_memory *m = ctx;
    bool good = true;
    pthread_mutex_lock(&m->lock);
    m->n_runs = 0;
    for (size_t i = 0; i < n_runs && good && m->ranges; i++) good = cut(m, &runs[i]);
    td_status s =
        !good ? td_fail(err, TD_ERR_NOMEM, "no memory for a list of %zu copies", 2 * m->max_runs)
        : m->ranges ? m->device->copy(m->device->ctx, kind, m->runs, m->n_runs, ret_ticket, err)
                    : m->device->copy(m->device->ctx, kind, runs, n_runs, ret_ticket, err);
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

static td_status pin(void *ctx, void *memory, size_t bytes, struct td_err *err)
{
    const struct td_split_memory *m = ctx;
    return m->device->pin(m->device->ctx, memory, bytes, err);
}

static void unpin(void *ctx, void *memory)
{
    const struct td_split_memory *m = ctx;
    m->device->unpin(m->device->ctx, memory);
}

static void release_pinned(void *ctx, void *memory)
{
    const struct td_split_memory *m = ctx;
    m->device->release_pinned(m->device->ctx, memory);
}

/* ---- other processes, NICs ------------------------------------------------------------------- */

static td_status ipc_export(void *ctx, const void *memory,
                            uint8_t ret_handle[TD_DEVICE_HANDLE_BYTES], uint64_t *ret_offset,
                            struct td_err *err)
{
    const struct td_split_memory *m = ctx;
    if (m->n_ranks == 1)
        return m->device->ipc_export(m->device->ctx, memory, ret_handle, ret_offset, err);
    return td_fail(err, TD_ERR_UNSUPPORTED,
                   "the pool lies on the devices of %d ranks (tp), and a handle is of one",
                   m->n_ranks);
}

static td_status dmabuf(void *ctx, const void *memory, size_t bytes, int *ret_fd,
                        uint64_t *ret_offset, struct td_err *err)
{
    const struct td_split_memory *m = ctx;
    if (m->n_ranks == 1)
        return m->device->dmabuf(m->device->ctx, memory, bytes, ret_fd, ret_offset, err);
    return td_fail(err, TD_ERR_UNSUPPORTED,
                   "the pool lies on the devices of %d ranks (tp), and a dma-buf is of one",
                   m->n_ranks);
}

static td_status ipc_open(void *ctx, const uint8_t handle[TD_DEVICE_HANDLE_BYTES], void **ret_base,
                          struct td_err *err)
{
    const struct td_split_memory *m = ctx;
    return m->device->ipc_open(m->device->ctx, handle, ret_base, err);
}

/* Copies the mark behind each part of copy 0 from or to m->marks. mark_lock is held. */
static td_status copy_marks(const struct td_split_memory *m, const struct range *r, bool write,
                            struct td_err *err)
{
    struct td_device_run runs[TD_SPLIT_RANKS_MAX];
    uint64_t ticket;
    for (int32_t p = 0; p < r->n_parts; p++) {
        uint8_t *there = r->rank_base[p * r->n_copies] + (size_t)r->n_blocks * r->part_bytes +
                         r->tail_bytes - TD_SPLIT_MARK_BYTES;
        uint8_t *here = m->marks + p * TD_SPLIT_MARK_BYTES;
        runs[p] = (struct td_device_run){
            .to = write ? there : here, .from = write ? here : there, .bytes = TD_SPLIT_MARK_BYTES};
    }
    td_status s = m->device->copy(m->device->ctx, write ? TD_COPY_TO_DEVICE : TD_COPY_TO_HOST, runs,
                                  (size_t)r->n_parts, &ticket, err);
    return s ? s : m->device->wait(m->device->ctx, ticket, err);
}

static td_status pool_export(void *ctx, uint8_t *ret_pool, size_t *ret_bytes, struct td_err *err)
{
    struct td_split_memory *m = ctx;
    const struct range *r = &m->own;
    struct pool_head head = {.magic = POOL_MAGIC,
                             .n_parts = (uint32_t)r->n_parts,
                             .n_blocks = (uint64_t)r->n_blocks,
                             .part_bytes = r->part_bytes,
                             .tail_bytes = r->tail_bytes};
    memcpy(ret_pool, &head, sizeof head);
    pthread_mutex_lock(&m->mark_lock);
    td_random_fill(m->marks, (size_t)r->n_parts * TD_SPLIT_MARK_BYTES);
    for (int32_t p = 0; p < r->n_parts; p++) {
        struct pool_part part = {.at = m->handles[p * r->n_copies]};
        memcpy(part.mark, m->marks + p * TD_SPLIT_MARK_BYTES, sizeof part.mark);
        memcpy(ret_pool + sizeof head + (size_t)p * sizeof part, &part, sizeof part);
    }
    td_status s = copy_marks(m, r, true, err);
    pthread_mutex_unlock(&m->mark_lock);
    *ret_bytes = sizeof head + (size_t)r->n_parts * sizeof(struct pool_part);
    return s;
}

static void range_free(const struct td_split_memory *m, struct range *r)
{
    for (int p = 0; p < TD_SPLIT_RANKS_MAX; p++)
        if (r->opened[p]) m->device->ipc_close(m->device->ctx, r->opened[p]);
    if (r->base) munmap(r->base, r->bytes);
    free(r);
}

static td_status open_parts(struct td_split_memory *m, struct range *r, const uint8_t *parts,
                            struct td_err *err)
{
    struct pool_part part;
    for (int32_t p = 0; p < r->n_parts; p++) {
        memcpy(&part, parts + (size_t)p * sizeof part, sizeof part);
        if (part.at.offset > UINT64_MAX / 4)
            return td_fail(err, TD_ERR_CORRUPT, "part %d of the pool begins at %llu", p,
                           (unsigned long long)part.at.offset);
        td_status s = m->device->ipc_open(m->device->ctx, part.at.handle, &r->opened[p], err);
        if (s) return td_err_prefix(err, "part %d of %d", p, r->n_parts);
        r->rank_base[p] = (uint8_t *)r->opened[p] + part.at.offset;
    }
    pthread_mutex_lock(&m->mark_lock);
    td_status s = copy_marks(m, r, false, err);
    for (int32_t p = 0; p < r->n_parts && !s; p++) {
        memcpy(&part, parts + (size_t)p * sizeof part, sizeof part);
        if (memcmp(part.mark, m->marks + p * TD_SPLIT_MARK_BYTES, sizeof part.mark) != 0)
            s = td_fail(err, TD_ERR_UNSUPPORTED,
                        "part %d of %d holds other bytes than were put there: the handle is not "
                        "its memory's",
                        p, r->n_parts);
    }
    pthread_mutex_unlock(&m->mark_lock);
    return s;
}

static td_status pool_open(void *ctx, const uint8_t *pool, size_t bytes, size_t block_bytes,
                           int32_t n_blocks, void **ret_base, struct td_err *err)
{
    struct td_split_memory *m = ctx;
    struct pool_head h = {0};
    if (bytes >= sizeof h) memcpy(&h, pool, sizeof h);
    if (h.magic != POOL_MAGIC || h.n_parts < 1 || h.n_parts > TD_SPLIT_RANKS_MAX ||
        bytes != sizeof h + h.n_parts * sizeof(struct pool_part))
        return td_fail(err, TD_ERR_CORRUPT, "%zu bytes are no description of a pool", bytes);
    if (n_blocks < 1 || h.n_blocks != (uint64_t)n_blocks ||
        h.part_bytes != block_bytes / h.n_parts || block_bytes % h.n_parts || h.part_bytes < 1 ||
        h.tail_bytes < TD_SPLIT_MARK_BYTES || h.tail_bytes > TAIL_MAX)
        return td_fail(err, TD_ERR_CORRUPT,
                       "a pool of %llu blocks in %u parts of %llu bytes, tail %llu: it must be %d "
                       "of %zu bytes",
                       (unsigned long long)h.n_blocks, h.n_parts, (unsigned long long)h.part_bytes,
                       (unsigned long long)h.tail_bytes, n_blocks, block_bytes);
    struct range *r = calloc(1, sizeof *r);
    if (!r) return td_fail(err, TD_ERR_NOMEM, "split memory: out of memory");
    td_status s = range_init(r, (int32_t)h.n_parts, 1, n_blocks, (size_t)h.part_bytes,
                             (size_t)h.tail_bytes, err);
    if (!s) s = open_parts(m, r, pool + sizeof h, err);
    if (s) {
        range_free(m, r);
        return s;
    }
    pthread_mutex_lock(&m->lock);
    r->next = m->ranges;
    m->ranges = r;
    pthread_mutex_unlock(&m->lock);
    *ret_base = r->base;
    return TD_OK;
}

static void ipc_close(void *ctx, void *base)
{
    struct td_split_memory *m = ctx;
    pthread_mutex_lock(&m->lock);
    struct range **at = &m->ranges;
    while (*at && (*at)->base != base) at = &(*at)->next;
    struct range *r = *at;
    if (r) *at = r->next;
    pthread_mutex_unlock(&m->lock);
    if (r)
        range_free(m, r);
    else
        m->device->ipc_close(m->device->ctx, base);
}

/* ---- life ------------------------------------------------------------------------------------ */

static void fill_table(struct td_split_memory *m, const struct td_split_config *c)
{
    struct td_device_memory *t = &m->table;
    bool alone = m->n_ranks == 1;
    memcpy(t->name, c->device->name, sizeof t->name);
    memcpy(t->uuid, c->device->uuid, sizeof t->uuid);
    memcpy(t->pci, c->device->pci, sizeof t->pci);
    t->ctx = m;
    t->rdma_order = alone ? c->device->rdma_order : TD_RDMA_ORDER_NONE;
    t->alloc_pinned = alloc_pinned, t->release_pinned = release_pinned;
    if (c->device->pin) t->pin = pin, t->unpin = unpin;
    t->copy = copy, t->done = done, t->wait = wait_for;
    if (!alone || c->device->ipc_export) t->ipc_export = ipc_export;
    if (!alone || c->device->dmabuf) t->dmabuf = dmabuf;
    if (c->device->ipc_open)
        t->ipc_open = ipc_open, t->ipc_close = ipc_close, t->pool_open = pool_open;
    if (!alone && c->handles) t->pool_export = pool_export;
}

td_status td_split_memory_create(const struct td_split_config *c, struct td_split_memory **ret,
                                 struct td_err *err)
{
    int32_t n_ranks = c->n_parts * c->n_copies;
    TD_ASSERT(n_ranks >= 1 && n_ranks <= TD_SPLIT_RANKS_MAX && c->n_blocks >= 1 &&
              c->part_bytes >= 1);
    TD_ASSERT(!c->handles || c->tail_bytes >= TD_SPLIT_MARK_BYTES);
    struct td_split_memory *m = calloc(1, sizeof *m);
    if (!m) return td_fail(err, TD_ERR_NOMEM, "split memory: out of memory");
    m->device = c->device;
    m->n_ranks = n_ranks;
    m->own.copy_bytes = (size_t)c->n_blocks * (size_t)c->n_parts * c->part_bytes + c->tail_bytes;
    m->max_runs = RUNS_AT_BOOT;
    for (int32_t r = 0; r < n_ranks; r++) m->own.rank_base[r] = c->rank_base[r];
    for (int32_t r = 0; c->handles && r < n_ranks; r++) m->handles[r] = c->handles[r];
    pthread_mutex_init(&m->lock, NULL);
    pthread_mutex_init(&m->mark_lock, NULL);
    fill_table(m, c);
    void *pinned = NULL;
    td_status s = m->device->alloc_pinned(m->device->ctx, TD_SPLIT_RANKS_MAX * TD_SPLIT_MARK_BYTES,
                                          &pinned, err);
    m->marks = pinned;
    if (!s && !(m->runs = calloc(m->max_runs, sizeof *m->runs)))
        s = td_fail(err, TD_ERR_NOMEM, "split memory: out of memory");
    if (!s && n_ranks > 1 &&
        !(s = range_init(&m->own, c->n_parts, c->n_copies, c->n_blocks, c->part_bytes,
                         c->tail_bytes, err)))
        m->ranges = &m->own;
    if (s) {
        td_split_memory_destroy(m);
        return s;
    }
    *ret = m;
    return TD_OK;
}

void td_split_memory_destroy(struct td_split_memory *m)
{
    if (!m) return;
    TD_ASSERT(!m->ranges || (m->ranges == &m->own && !m->own.next));
    if (m->marks) m->device->release_pinned(m->device->ctx, m->marks);
    if (m->own.base) munmap(m->own.base, m->own.bytes);
    pthread_mutex_destroy(&m->lock);
    pthread_mutex_destroy(&m->mark_lock);
    free(m->runs);
    free(m);
}

const struct td_device_memory *td_split_memory_table(const struct td_split_memory *m)
{
    return &m->table;
}
uint8_t *td_split_memory_base(const struct td_split_memory *m)
{
    return m->n_ranks == 1 ? m->own.rank_base[0] : m->own.base;
}
size_t td_split_memory_bytes(const struct td_split_memory *m) { return m->own.copy_bytes; }
