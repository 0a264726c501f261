/* mem.h - large memory at boot: arenas on huge pages where the kernel gives them, and files mapped
 * read-only. */
#ifndef TD_BASE_MEM_H
#define TD_BASE_MEM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

struct td_arena {
    void *base; /* 2 MiB aligned; zeroed */
    size_t bytes;
    int memfd;     /* >= 0 when made shareable: another process can map it (shm path); else -1 */
    bool reserved; /* on reserved 2 MiB pages (vm.nr_hugepages) */
};

enum { TD_ARENA_SHAREABLE = 1, TD_ARENA_SHOW = 2 };

/* Makes an arena of `bytes` bytes and touches every page, so that lack of memory shows at boot.
 * TD_ARENA_SHAREABLE: a memfd backs it, from 64 MiB on with reserved 2 MiB pages when enough are
 * free, because the kernel rarely makes transparent huge pages of shared memory, and a NIC pins and
 * translates large pages many times faster. Other arenas ask for transparent huge pages.
 * TD_ARENA_SHOW: prints progress on stderr when this takes long. */
td_status td_arena_create(size_t bytes, int flags, const char *name, struct td_arena *ret_arena,
                          struct td_err *err);
/* An arena of address space, cut by its owner into pieces: memory comes to a page when it is first
 * written, and lack of it then ends the process, so that the owner bounds what it writes. unit:
 * td_arena_sparse_unit() of the smallest piece; pieces begin at multiples of it. */
td_status td_arena_create_sparse(size_t bytes, size_t unit, const char *name,
                                 struct td_arena *ret_arena, struct td_err *err);
/* A huge page, where pieces of so many bytes grow by no more than an eighth when they are rounded
 * to it; else a page. */
size_t td_arena_sparse_unit(size_t piece_bytes);
/* Whole units of a sparse arena become zeros that take no memory; locked memory (mlock) stays. */
void td_arena_give_back(const struct td_arena *arena, size_t at, size_t bytes);
void td_arena_destroy(struct td_arena *arena); /* of either kind */

struct td_file_map {
    const uint8_t *base; /* NULL for an empty file */
    size_t bytes;
};
/* A file that becomes shorter while it is mapped ends the process with a line that names it
 * (shrunk.h). */
td_status td_file_map_open(const char *path, struct td_file_map *ret_map, struct td_err *err);
void td_file_map_close(struct td_file_map *map);

/* Reads a whole file into malloc'd memory with a NUL after it; refuses, by name, a file of more
 * than max_bytes. The caller frees. */
td_status td_file_read(const char *path, size_t max_bytes, char **ret_text, size_t *ret_bytes,
                       struct td_err *err);

/* bytes that this process may still use: MemAvailable, or the cgroup's limit when that is lower */
uint64_t td_mem_available(void);

#endif
