/* mem.c - memory that is obtained at boot.
 *
 * An arena is aligned to 2 MiB by reserving more address space than needed and mapping the memory
 * at the first aligned address in it. Pages are backed at once: by fallocate for a memfd, where a
 * later touch of a page that the kernel cannot back would be SIGBUS, and by populate for anonymous
 * memory. Before that, the size is compared with what the machine and the cgroup can still give,
 * because a process that takes more than its cgroup allows is ended by the OOM killer and gets no
 * error. */
#include "common/base/mem.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/base/cgroup.h"
#include "common/base/progress.h"
#include "common/base/shrunk.h"

#define HUGE_PAGE ((size_t)2 << 20)

#ifndef MFD_HUGE_2MB
#define MFD_HUGE_2MB (21u << 26)
#endif
#ifndef MADV_POPULATE_WRITE /* Linux 5.14 */
#define MADV_POPULATE_WRITE 23
#endif

/* smaller arenas do not use reserved pages, which are few */
#define RESERVED_FROM ((size_t)64 << 20)

/* the step between progress lines: the kernel fills it in 0.1 s or less */
#define FILL_STEP ((size_t)64 << 20)

/* 4 KiB; on aarch64 16 or 64 KiB, too */
static size_t small_page(void) { return (size_t)sysconf(_SC_PAGESIZE); }

static size_t mapped_bytes(size_t bytes, size_t page) { return (bytes + page - 1) & ~(page - 1); }

/* A memfd on reserved pages, or -1 when the kernel does not have enough of them. */
static int reserved_memfd(const char *name, size_t bytes)
{
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB | MFD_HUGE_2MB);
    if (fd < 0 || fallocate(fd, 0, 0, (off_t)mapped_bytes(bytes, HUGE_PAGE)) == 0) return fd;
    close(fd);
    return -1;
}

/* Backs and maps bytes [at, at + n) of an arena. Returns 0 or an errno. */
static int fill_pages(uint8_t *base, size_t at, size_t n, int memfd)
{
    int e = 0;
    if (memfd >= 0) {
        do e = fallocate(memfd, 0, (off_t)at, (off_t)n);
        while (e < 0 && errno == EINTR);
        if (e < 0) return errno;
    }
    do e = madvise(base + at, n, MADV_POPULATE_WRITE);
    while (e < 0 && errno == EINTR);
    if (e < 0 && errno != EINVAL) return errno;
    if (e < 0) { /* a kernel older than 5.14: touch each page */
        for (size_t i = 0; i < n; i += small_page()) *(volatile uint8_t *)(base + at + i) = 0;
    }
    return 0;
}

/* Backs and maps a whole arena, step by step. Returns 0 or an errno. */
static int fill_all(uint8_t *base, size_t map_bytes, int memfd, bool show, const char *name)
{
    char label[64];
    struct td_progress progress;
    snprintf(label, sizeof label, "touching memory of %s", name);
    td_progress_start(&progress, label, "B", map_bytes);
    for (size_t at = 0; at < map_bytes; at += FILL_STEP) {
        size_t n = map_bytes - at < FILL_STEP ? map_bytes - at : FILL_STEP;
        int e = fill_pages(base, at, n, memfd);
        if (e) return e;
        if (show) td_progress_update(&progress, at + n);
    }
    if (show) td_progress_end(&progress);
    return 0;
}

td_status td_arena_create(size_t bytes, int flags, const char *name, struct td_arena *ret_arena,
                          struct td_err *err)
{
    if (bytes == 0) return td_fail(err, TD_ERR_INVALID, "arena %s: size is 0, must be > 0", name);
    bool shareable = flags & TD_ARENA_SHAREABLE;
    uint64_t available = td_mem_available();
    int fd = shareable && bytes >= RESERVED_FROM ? reserved_memfd(name, bytes) : -1;
    bool reserved = fd >= 0; /* MemAvailable does not count reserved pages */
    if (!reserved && bytes > available) {
        return td_fail(err, TD_ERR_NOMEM,
                       "arena %s: needs %zu bytes, but only %" PRIu64
                       " bytes of memory are available",
                       name, bytes, available);
    }
    size_t map_bytes = mapped_bytes(bytes, reserved ? HUGE_PAGE : small_page()),
           reserve_bytes = map_bytes + HUGE_PAGE;
    int e;
    uint8_t *reserve =
        mmap(NULL, reserve_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserve == MAP_FAILED) {
        e = errno;
        goto err_close;
    }
    if (shareable && !reserved) {
        /* sealing allowed, so that the owner can promise that it does not shrink */
        fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
        if (fd < 0 || ftruncate(fd, (off_t)map_bytes) < 0) {
            e = errno;
            goto err_unmap;
        }
    }
    uint8_t *base = (uint8_t *)(((uintptr_t)reserve + HUGE_PAGE - 1) & ~(uintptr_t)(HUGE_PAGE - 1));
    int map_flags = MAP_FIXED | (shareable ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS);
    if (mmap(base, map_bytes, PROT_READ | PROT_WRITE, map_flags, fd, 0) == MAP_FAILED) {
        e = errno;
        goto err_unmap;
    }
    size_t head = (size_t)(base - reserve), tail = reserve_bytes - head - map_bytes;
    if (head) munmap(reserve, head);
    if (tail) munmap(base + map_bytes, tail);
    reserve = base;
    reserve_bytes = map_bytes;

    /* a request: a kernel without huge pages gives small ones */
    madvise(base, map_bytes, MADV_HUGEPAGE);
    e = fill_all(base, map_bytes, shareable && !reserved ? fd : -1, flags & TD_ARENA_SHOW, name);
    if (e) goto err_unmap;
    *ret_arena = (struct td_arena){.base = base, .bytes = bytes, .memfd = fd, .reserved = reserved};
    return TD_OK;

err_unmap:
    munmap(reserve, reserve_bytes);
err_close:
    if (fd >= 0) close(fd);
    return td_fail(err, TD_ERR_NOMEM, "arena %s: cannot back and map %zu bytes: %s", name, bytes,
                   strerror(e));
}

size_t td_arena_sparse_unit(size_t piece_bytes)
{
    size_t grows = mapped_bytes(piece_bytes, HUGE_PAGE) - piece_bytes;
    return grows <= piece_bytes / 8 ? HUGE_PAGE : small_page();
}

td_status td_arena_create_sparse(size_t bytes, size_t unit, const char *name,
                                 struct td_arena *ret_arena, struct td_err *err)
{
    if (bytes == 0 || bytes > SIZE_MAX / 2)
        return td_fail(err, TD_ERR_INVALID, "arena %s: size is %zu, must be > 0 and fit", name,
                       bytes);
    size_t map_bytes = mapped_bytes(bytes, small_page()), reserve_bytes = map_bytes + HUGE_PAGE;
    uint8_t *reserve = mmap(NULL, reserve_bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserve == MAP_FAILED)
        return td_fail(err, TD_ERR_NOMEM, "arena %s: cannot map %zu bytes: %s", name, bytes,
                       strerror(errno));
    uint8_t *base = (uint8_t *)(((uintptr_t)reserve + HUGE_PAGE - 1) & ~(uintptr_t)(HUGE_PAGE - 1));
    size_t head = (size_t)(base - reserve), tail = reserve_bytes - head - map_bytes;
    if (head) munmap(reserve, head);
    if (tail) munmap(base + map_bytes, tail);
    /* a huge page that two small pieces share would come with one of them, and stay with it */
    madvise(base, map_bytes, unit == HUGE_PAGE ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    *ret_arena = (struct td_arena){.base = base, .bytes = bytes, .memfd = -1};
    return TD_OK;
}

void td_arena_give_back(const struct td_arena *arena, size_t at, size_t bytes)
{
    madvise((uint8_t *)arena->base + at, bytes, MADV_DONTNEED);
}

void td_arena_destroy(struct td_arena *arena)
{
    if (!arena || !arena->base) return; /* zeroed or already destroyed */
    munmap(arena->base, mapped_bytes(arena->bytes, arena->reserved ? HUGE_PAGE : small_page()));
    if (arena->memfd >= 0) close(arena->memfd);
    *arena = (struct td_arena){.memfd = -1};
}

/* Opens a regular file for reading. */
static td_status open_regular(const char *path, int *ret_fd, size_t *ret_bytes, struct td_err *err)
{
    /* O_NONBLOCK: a FIFO must not hang us; no effect on files */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        td_status s = errno == ENOENT || errno == ENOTDIR ? TD_ERR_NOT_FOUND : TD_ERR_IO;
        return td_fail(err, s, "%s: cannot open: %s", path, strerror(errno));
    }
    struct stat st;
    if (fstat(fd, &st) < 0) {
        int e = errno;
        close(fd);
        return td_fail(err, TD_ERR_IO, "%s: cannot stat: %s", path, strerror(e));
    }
    if (!S_ISREG(st.st_mode)) {
        close(fd);
        return td_fail(err, TD_ERR_INVALID, "%s: is not a regular file", path);
    }
    *ret_fd = fd;
    *ret_bytes = (size_t)st.st_size;
    return TD_OK;
}

td_status td_file_map_open(const char *path, struct td_file_map *ret_map, struct td_err *err)
{
    int fd;
    size_t bytes;
    td_status s = open_regular(path, &fd, &bytes, err);
    if (s) return s;
    void *base = NULL;
    if (bytes > 0) {
        base = mmap(NULL, bytes, PROT_READ, MAP_PRIVATE, fd, 0);
        if (base == MAP_FAILED) {
            int e = errno;
            close(fd);
            return td_fail(err, TD_ERR_NOMEM, "%s: cannot map %zu bytes: %s", path, bytes,
                           strerror(e));
        }
    }
    close(fd); /* the mapping holds the file */
    if (base) td_shrunk_watch(path, base, bytes);
    *ret_map = (struct td_file_map){.base = base, .bytes = bytes};
    return TD_OK;
}

void td_file_map_close(struct td_file_map *map)
{
    if (!map) return;
    if (map->base) {
        td_shrunk_forget(map->base);
        munmap((void *)(uintptr_t)map->base, map->bytes);
    }
    *map = (struct td_file_map){0};
}

td_status td_file_read(const char *path, size_t max_bytes, char **ret_text, size_t *ret_bytes,
                       struct td_err *err)
{
    int fd;
    size_t bytes;
    td_status s = open_regular(path, &fd, &bytes, err);
    if (s) return s;
    char *text = NULL;
    if (bytes > max_bytes) {
        s = td_fail(err, TD_ERR_LIMIT, "%s: is %zu bytes, must be at most %zu", path, bytes,
                    max_bytes);
        goto out;
    }
    text = malloc(bytes + 1);
    if (!text) {
        s = td_fail(err, TD_ERR_NOMEM, "%s: no memory for %zu bytes", path, bytes);
        goto out;
    }
    size_t n = 0;
    while (n < bytes) {
        ssize_t k = read(fd, text + n, bytes - n);
        if (k < 0 && errno == EINTR) continue;
        if (k < 0) {
            s = td_fail(err, TD_ERR_IO, "%s: cannot read: %s", path, strerror(errno));
            goto out;
        }
        if (k == 0) { /* the file shrank since fstat, and half a file is not usable */
            s = td_fail(err, TD_ERR_IO, "%s: ended after %zu of %zu bytes", path, n, bytes);
            goto out;
        }
        n += (size_t)k;
    }
    text[n] = '\0';
    *ret_text = text;
    if (ret_bytes) *ret_bytes = n;
    text = NULL;
out:
    free(text);
    close(fd);
    return s;
}

/* UINT64_MAX when the kernel does not tell. */
static uint64_t machine_available(void)
{
    FILE *f = fopen("/proc/meminfo", "re");
    char line[256];
    uint64_t kib, available = UINT64_MAX;
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "MemAvailable: %" SCNu64, &kib) == 1) available = kib * 1024;
    if (f) fclose(f);
    return available;
}

uint64_t td_mem_available(void)
{
    uint64_t available = machine_available(), room = td_cgroup_memory_room("");
    return room < available ? room : available;
}
