/* mem.h - big memory at boot: arenas on huge pages when the kernel gives them, and files mapped
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
    int memfd;     /* >= 0 when made shareable: another process may map it (shm transfer);
                      else -1 */
    bool reserved; /* on 2 MiB pages that the operator has set aside (vm.nr_hugepages) */
};

enum { TD_ARENA_SHAREABLE = 1, TD_ARENA_SHOW = 2 };

/* TD_ARENA_SHAREABLE: back it by a memfd; from 64 MiB on by reserved 2 MiB pages when enough are
 * free, because transparent ones are rare for shared memory and a NIC pins and translates large
 * pages many times faster. Else asks for transparent huge pages. Touches every page so that
 * exhaustion shows at boot. TD_ARENA_SHOW: progress lines on stderr when that takes long. */
td_status td_arena_create(size_t bytes, int flags, const char *name, struct td_arena *ret_arena,
                          struct td_err *err);
void td_arena_destroy(struct td_arena *arena);

struct td_file_map {
    const uint8_t *base; /* NULL for an empty file */
    size_t bytes;
};
td_status td_file_map_open(const char *path, struct td_file_map *ret_map, struct td_err *err);
void td_file_map_close(struct td_file_map *map);

/* Whole file into malloc'd memory with a NUL after it; refuses files over max_bytes by name.
 * Caller frees. */
td_status td_file_read(const char *path, size_t max_bytes, char **ret_text, size_t *ret_bytes,
                       struct td_err *err);

uint64_t td_mem_available(void); /* what this process may still use: MemAvailable, and the
                                    cgroup's limit when lower */

#endif
