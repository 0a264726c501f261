/* memory.c - allocations of the emulated device. One lock over short lists, because allocation
 * happens at boot. */
#include "tests/fake/cuda_emu/memory.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifdef TD_WITH_ASAN
#include <sanitizer/asan_interface.h>
#endif

enum { PAGE = 4096, ALIGN = 256, WATCH = 0xa5, MAX_RANGES = 4096 };
#define ARENA_BYTES ((uint64_t)64 << 30)
#define FILL_BYTES ((size_t)16 << 20)
#define HANDLE_MAGIC 0x54444d31u /* "TDM1" */

/* first, pages: what is mapped; base, bytes: what was asked for, inside it. */
struct range {
    uint8_t *first, *base;
    size_t mapped, bytes;
    uint32_t n_opened;  /* imported: how often */
    bool is_registered; /* page-locked: by cudaHostRegister */
    uint64_t peer_inode, peer_offset;
};

struct list {
    struct range *of;
    size_t n;
};

struct handle { /* the bytes of a cudaIpcMemHandle_t */
    uint32_t magic;
    int32_t pid, fd, reserved;
    uint64_t inode, first, mapped, skip, bytes;
};
_Static_assert(sizeof(struct handle) <= sizeof(cudaIpcMemHandle_t), "a handle is 64 bytes");

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint8_t *arena; /* everything below: under the lock */
static int arena_fd = -1;
static uint64_t total_bytes = (uint64_t)4 << 30, used_bytes;
static struct list ours, theirs, pinned; /* ours: in the order of addresses */

static bool is_strict;
static uint32_t n_inside;

static void allow(const struct range *r, bool is_allowed)
{
    if (mprotect(r->first, r->mapped, is_allowed ? PROT_READ | PROT_WRITE : PROT_NONE))
        td_emu_die("mprotect of device memory: %m");
}

static void allow_all(bool is_allowed)
{
    for (size_t i = 0; i < ours.n; i++) allow(&ours.of[i], is_allowed);
    for (size_t i = 0; i < theirs.n; i++) allow(&theirs.of[i], is_allowed);
}

void td_emu_memory_set_strict(bool is_now_strict)
{
    pthread_mutex_lock(&lock);
    is_strict = is_now_strict;
    if (!n_inside) allow_all(!is_strict);
    pthread_mutex_unlock(&lock);
}

void td_emu_memory_enter(void)
{
    pthread_mutex_lock(&lock);
    if (n_inside++ == 0 && is_strict) allow_all(true);
    pthread_mutex_unlock(&lock);
}

void td_emu_memory_leave(void)
{
    pthread_mutex_lock(&lock);
    if (--n_inside == 0 && is_strict) allow_all(false);
    pthread_mutex_unlock(&lock);
}

static bool arena_open(void)
{
    if (arena) return true;
    int fd = memfd_create("tandem-cuda-emu", MFD_CLOEXEC);
    if (fd < 0) return false;
    void *p = ftruncate(fd, (off_t)ARENA_BYTES)
                  ? MAP_FAILED
                  : mmap(NULL, ARENA_BYTES, PROT_NONE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (p == MAP_FAILED) {
        close(fd);
        return false;
    }
    arena = p;
    arena_fd = fd;
    return true;
}

static bool insert(struct list *list, size_t at, struct range range)
{
    if (list->n >= MAX_RANGES) return false;
    struct range *of = realloc(list->of, (list->n + 1) * sizeof *of);
    if (!of) return false;
    memmove(of + at + 1, of + at, (list->n - at) * sizeof *of);
    of[at] = range;
    list->of = of;
    list->n++;
    return true;
}

static void erase(struct list *list, size_t at)
{
    list->n--;
    memmove(list->of + at, list->of + at + 1, (list->n - at) * sizeof *list->of);
    if (list->n) return;
    free(list->of);
    list->of = NULL;
}

static const struct range *find(const struct list *list, const void *memory)
{
    for (size_t i = 0; i < list->n; i++) {
        if (list->of[i].base == memory) return &list->of[i];
    }
    return NULL;
}

static bool holds(const struct range *r, const void *memory, size_t bytes)
{
    uintptr_t at = (uintptr_t)memory, base = (uintptr_t)r->base;
    return at >= base && at - base <= r->bytes && bytes <= r->bytes - (at - base);
}

static bool touches(const struct range *r, const void *memory, size_t bytes)
{
    uintptr_t at = (uintptr_t)memory, first = (uintptr_t)r->first;
    return at < first + r->mapped && at + bytes > first;
}

void td_emu_memory_set_total(uint64_t bytes)
{
    pthread_mutex_lock(&lock);
    total_bytes = bytes < ARENA_BYTES / 2 ? bytes : ARENA_BYTES / 2;
    pthread_mutex_unlock(&lock);
}

void td_emu_memory_info(uint64_t *ret_free, uint64_t *ret_total)
{
    pthread_mutex_lock(&lock);
    *ret_free = used_bytes < total_bytes ? total_bytes - used_bytes : 0;
    *ret_total = total_bytes;
    pthread_mutex_unlock(&lock);
}

cudaError_t td_emu_memory_alloc(size_t bytes, void **ret_memory)
{
    pthread_mutex_lock(&lock);
    cudaError_t error = cudaErrorMemoryAllocation;
    size_t rounded = (bytes + ALIGN - 1) / ALIGN * ALIGN,
           mapped = (rounded + PAGE - 1) / PAGE * PAGE;
    if (bytes > total_bytes || used_bytes + rounded > total_bytes || !arena_open()) goto out;

    /* The first gap with room for the pages and an empty one on either side. */
    uint8_t *first = arena + PAGE;
    size_t at = 0;
    for (; at < ours.n && first + mapped + PAGE > ours.of[at].first; at++)
        first = ours.of[at].first + ours.of[at].mapped + PAGE;
    if (first + mapped + PAGE > arena + ARENA_BYTES) goto out;
    struct range r = {
        .first = first, .base = first + mapped - rounded, .mapped = mapped, .bytes = bytes};
    if (mprotect(first, mapped, PROT_READ | PROT_WRITE) || !insert(&ours, at, r)) goto out;
    memset(r.first, WATCH, (size_t)(r.base - r.first));
    memset(r.base + bytes, WATCH, rounded - bytes);
    if (bytes <= FILL_BYTES) memset(r.base, 0xff, bytes);
#ifdef TD_WITH_ASAN
    ASAN_POISON_MEMORY_REGION(r.first, (size_t)(r.base - r.first));
    ASAN_POISON_MEMORY_REGION(r.base + bytes, rounded - bytes);
#endif
    if (is_strict && !n_inside) allow(&r, false);
    used_bytes += rounded;
    *ret_memory = r.base;
    error = cudaSuccess;
out:
    pthread_mutex_unlock(&lock);
    return error;
}

cudaError_t td_emu_memory_free(void *memory)
{
    pthread_mutex_lock(&lock);
    const struct range *found = find(&ours, memory);
    if (!found) {
        pthread_mutex_unlock(&lock);
        return cudaErrorInvalidValue;
    }
    struct range r = *found;
    if (is_strict) allow(&r, true);
#ifdef TD_WITH_ASAN
    ASAN_UNPOISON_MEMORY_REGION(r.first, r.mapped);
#endif
    for (const uint8_t *p = r.first; p < r.first + r.mapped; p++) {
        if (p == r.base && r.bytes) p += r.bytes;
        if (p < r.first + r.mapped && *p != WATCH)
            td_emu_die("device memory: byte %td of an allocation of %zu bytes was written",
                       p - r.base, r.bytes);
    }
    mprotect(r.first, r.mapped, PROT_NONE);
    if (fallocate(arena_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, r.first - arena,
                  (off_t)r.mapped)) {
        /* It stays allocated to the file; its bytes are of no use to anyone. */
    }
    used_bytes -= (r.bytes + ALIGN - 1) / ALIGN * ALIGN;
    erase(&ours, (size_t)(found - ours.of));
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

enum td_emu_where td_emu_memory_where(const void *memory, size_t bytes)
{
    pthread_mutex_lock(&lock);
    enum td_emu_where where = TD_EMU_HOST;
    const struct list *lists[] = {&ours, &theirs};
    if (arena && touches(&(struct range){.first = arena, .mapped = ARENA_BYTES}, memory, bytes))
        where = TD_EMU_STRAY;
    for (int l = 0; l < 2; l++) {
        for (size_t i = 0; i < lists[l]->n; i++) {
            if (touches(&lists[l]->of[i], memory, bytes)) where = TD_EMU_STRAY;
            if (holds(&lists[l]->of[i], memory, bytes)) {
                where = TD_EMU_DEVICE;
                goto out;
            }
        }
    }
out:
    pthread_mutex_unlock(&lock);
    return where;
}

cudaError_t td_emu_memory_export(void *memory, cudaIpcMemHandle_t *ret_handle)
{
    pthread_mutex_lock(&lock);
    const struct range *r = find(&ours, memory);
    struct stat file;
    cudaError_t error = cudaErrorInvalidValue;
    if (r && !fstat(arena_fd, &file)) {
        struct handle h = {HANDLE_MAGIC, getpid(),
                           arena_fd,     0,
                           file.st_ino,  (uint64_t)(r->first - arena),
                           r->mapped,    (uint64_t)(r->base - r->first),
                           r->bytes};
        memset(ret_handle, 0, sizeof *ret_handle);
        memcpy(ret_handle, &h, sizeof h);
        error = cudaSuccess;
    }
    pthread_mutex_unlock(&lock);
    return error;
}

cudaError_t td_emu_memory_import(const cudaIpcMemHandle_t *handle, void **ret_memory)
{
    struct handle h;
    memcpy(&h, handle, sizeof h);
    if (h.magic != HANDLE_MAGIC || h.first % PAGE || h.mapped % PAGE ||
        h.first + h.mapped > ARENA_BYTES || h.skip + h.bytes > h.mapped)
        return cudaErrorInvalidValue;
    /* as CUDA: one's own memory needs no handle */
    if (h.pid == getpid()) return cudaErrorDeviceUninitialized;
    cudaError_t error = cudaErrorInvalidResourceHandle;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < theirs.n; i++) {
        struct range *r = &theirs.of[i];
        if (r->peer_inode != h.inode || r->peer_offset != h.first) continue;
        r->n_opened++;
        *ret_memory = r->base;
        pthread_mutex_unlock(&lock);
        return cudaSuccess;
    }
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", h.pid, h.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    struct stat file;
    if (fd < 0 || fstat(fd, &file) || file.st_ino != h.inode) goto out;
    uint8_t *p = mmap(NULL, h.mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)h.first);
    if (p == MAP_FAILED) goto out;
    struct range r = {.first = p,
                      .base = p + h.skip,
                      .mapped = h.mapped,
                      .bytes = h.bytes,
                      .n_opened = 1,
                      .peer_inode = h.inode,
                      .peer_offset = h.first};
    if (!insert(&theirs, theirs.n, r)) {
        munmap(p, h.mapped);
        goto out;
    }
    if (is_strict && !n_inside) allow(&r, false);
    *ret_memory = r.base;
    error = cudaSuccess;
out:
    if (fd >= 0) close(fd);
    pthread_mutex_unlock(&lock);
    return error;
}

cudaError_t td_emu_memory_close(void *memory)
{
    pthread_mutex_lock(&lock);
    const struct range *r = find(&theirs, memory);
    cudaError_t error = r ? cudaSuccess : cudaErrorInvalidValue;
    if (r) {
        size_t at = (size_t)(r - theirs.of);
        if (--theirs.of[at].n_opened == 0) {
            munmap(r->first, r->mapped);
            erase(&theirs, at);
        }
    }
    pthread_mutex_unlock(&lock);
    return error;
}

cudaError_t td_emu_pinned_add(void *memory, size_t bytes, bool is_registered)
{
    cudaError_t error = cudaSuccess;
    pthread_mutex_lock(&lock);
    struct range r = {.first = memory,
                      .base = memory,
                      .mapped = bytes,
                      .bytes = bytes,
                      .is_registered = is_registered};
    for (size_t i = 0; i < pinned.n; i++)
        if (touches(&pinned.of[i], memory, bytes)) error = cudaErrorInvalidValue;
    if (!error && !insert(&pinned, pinned.n, r)) error = cudaErrorMemoryAllocation;
    pthread_mutex_unlock(&lock);
    return error;
}

cudaError_t td_emu_pinned_remove(void *memory, bool is_registered)
{
    pthread_mutex_lock(&lock);
    const struct range *r = find(&pinned, memory);
    if (r && r->is_registered != is_registered) r = NULL;
    if (r) erase(&pinned, (size_t)(r - pinned.of));
    pthread_mutex_unlock(&lock);
    return r ? cudaSuccess : cudaErrorInvalidValue;
}

bool td_emu_pinned_has(const void *memory, size_t bytes)
{
    pthread_mutex_lock(&lock);
    bool found = false;
    for (size_t i = 0; i < pinned.n && !found; i++) found = holds(&pinned.of[i], memory, bytes);
    pthread_mutex_unlock(&lock);
    return found;
}

__attribute__((destructor)) static void memory_unload(void)
{
    for (size_t i = 0; i < pinned.n; i++) /* a device that was lost takes nothing back */
        if (!pinned.of[i].is_registered) free(pinned.of[i].base);
    free(ours.of);
    free(theirs.of);
    free(pinned.of);
    if (arena) munmap(arena, ARENA_BYTES);
    if (arena_fd >= 0) close(arena_fd);
}
