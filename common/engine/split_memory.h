/* split_memory.h - the KV of an engine whose ranks each have a device, as the one pool of whole
 * blocks that common/transfer moves (engine_ranks.h).
 *
 * Why here: a rank's part of every block lies on the rank's own device, in one allocation; whoever
 * moves blocks knows one address for a block and one table for copies
 * (common/base/device_memory.h). So addresses are reserved that hold no memory at all, laid out as
 * the pool of whole blocks would be,
 *
 *     [copy]( [block][part] | tail )        rank = part * n_copies + copy; the tail is that of the
 *                                           rank of part 0
 *
 * and a table is made whose `copy` cuts what it is given where parts end, and puts the ranks' own
 * addresses in its place. The copies run on rank 0's device, which reaches the others' memory by
 * the handles that they export (their devices must be able to reach each other). An address from
 * elsewhere - page-locked memory, a scratch on rank 0's device - stays as it is.
 *
 * One rank: its memory is the pool, under its own addresses, and the table is the device's; but it
 * opens split pools of others.
 *
 * Other processes (cuda-ipc): pool_export describes copy 0, with a handle of each part and a mark
 * that was put behind its blocks; pool_open of such a table in another process reserves addresses
 * for it in the same way, once it has opened every part and read its mark, and copies take them as
 * they take one's own. A dma-buf or an IPC handle covers one allocation, so dmabuf and ipc_export
 * refuse a pool of several.
 *
 * Threads: create and destroy: the owner; the table: any, as device_memory.h says. */
#ifndef TD_ENGINE_SPLIT_MEMORY_H
#define TD_ENGINE_SPLIT_MEMORY_H

#include "common/base/device_memory.h"

#define TD_SPLIT_RANKS_MAX 16

struct td_split_handle {
    uint8_t handle[TD_DEVICE_HANDLE_BYTES];
    uint64_t offset; /* of the rank's part of block 0 in what the handle
                        opens */
};

struct td_split_config {
    const struct td_device_memory *device; /* rank 0's; must outlive the table */
    /* [n_parts * n_copies] a rank's part of block 0 as rank 0's device reaches it; blocks lie
       part_bytes apart, tail_bytes behind them */
    void *const *rank_base;
    const struct td_split_handle *handles; /* [n_parts * n_copies] for other processes; NULL: not
                                              for them */
    int32_t n_parts, n_copies, n_blocks;
    size_t part_bytes, tail_bytes;
};

struct td_split_memory;

#define TD_SPLIT_MARK_BYTES 16 /* the last bytes of a tail: pool_export writes them */

/* TD_ERR_NOMEM: the addresses, the lists, page-locked memory. */
td_status td_split_memory_create(const struct td_split_config *config, struct td_split_memory **ret,
                                 struct td_err *err);
/* NULL is fine; every copy is done, every opened pool closed. The ranks' memory is the caller's. */
void td_split_memory_destroy(struct td_split_memory *m);

const struct td_device_memory *td_split_memory_table(const struct td_split_memory *m);
/* block 0 of copy 0: nobody may follow it, but the table */
uint8_t *td_split_memory_base(const struct td_split_memory *m);
/* of one copy with its tail: from a copy to the next */
size_t td_split_memory_bytes(const struct td_split_memory *m);

#endif
