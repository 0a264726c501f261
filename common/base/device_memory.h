/* device_memory.h - memory that this process's CPU must not touch (a GPU's), and the calls that
 * move its bytes.
 *
 * Why here: the KV pool of a GPU worker lies in such memory. kernels/cuda fills this table,
 * common/transfer moves blocks with it, and neither may include the other. Tests fill it with a
 * fake whose pages no instruction can read or write (tests/fake/fake_device.h).
 *
 * Order: copies run on streams of their own, beside the computation, and are ordered only by what
 * their caller waited for. A caller copies computed bytes only after the computation is known to be
 * complete, and computes with copied bytes only after `done` has returned TD_OK.
 *
 * Threads: any thread may call any entry. Errors: TD_ERR_DEVICE with the driver's message. After
 * one in copy or done the device is lost for the process: nothing that was issued runs any more,
 * and every later call fails the same way. */
#ifndef TD_BASE_DEVICE_MEMORY_H
#define TD_BASE_DEVICE_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

#define TD_DEVICE_HANDLE_BYTES 64
#define TD_DEVICE_POOL_BYTES 2048

enum td_device_copy { TD_COPY_TO_HOST = 0, TD_COPY_TO_DEVICE, TD_COPY_ON_DEVICE };

struct td_device_run {
    void *to;
    const void *from;
    size_t bytes;
};

/* Whether work that starts on the device after a NIC's completion may miss bytes that the NIC wrote
 * before it, as the driver reports it. */
enum td_device_rdma_order {
    TD_RDMA_ORDER_NONE = 0,
    TD_RDMA_ORDER_OWNER = 100,
    TD_RDMA_ORDER_ALL = 200
};

struct td_device_memory {
    void *ctx;
    char name[128], uuid[48], pci[24]; /* pci: "0000:1b:00.0"; "" where there is none */
    enum td_device_rdma_order rdma_order;

    /* Page-locked memory of the host: one side of a TO_HOST or TO_DEVICE copy must be such memory,
     * or memory that `pin` took. Boot only. */
    td_status (*alloc_pinned)(void *ctx, size_t bytes, void **ret_memory, struct td_err *err);
    void (*release_pinned)(void *ctx, void *memory);
    /* Page-locks memory that exists already, such as a mapping that processes share. Call unpin
     * before it is unmapped. TD_ERR_UNSUPPORTED, TD_ERR_NOMEM: err says why. A NULL entry: not
     * supported. Boot only. */
    td_status (*pin)(void *ctx, void *memory, size_t bytes, struct td_err *err);
    void (*unpin)(void *ctx, void *memory);

    /* Issues these copies and does not wait for them. runs[] may change when it returns, the bytes
     * only after `done`. Many small runs cost one launch. */
    td_status (*copy)(void *ctx, enum td_device_copy kind, const struct td_device_run *runs,
                      size_t n_runs, uint64_t *ret_ticket, struct td_err *err);
    /* TD_OK: complete; TD_INPROGRESS: not yet. Once OK, always OK. Does not block. */
    td_status (*done)(void *ctx, uint64_t ticket, struct td_err *err);
    /* blocks until it is complete */
    td_status (*wait)(void *ctx, uint64_t ticket, struct td_err *err);

    /* Sharing with other processes of this host. ipc_export: the handle is of the whole allocation
     * that `memory` lies in; *ret_offset is the distance of `memory` from its start, in bytes.
     * ipc_open fails in the process that exported (where the pointer itself is good), where the
     * device cannot reach the exporter's device, and for anything that is not a handle. ipc_close
     * is called after every copy from it is done. TD_ERR_UNSUPPORTED: not with this memory, device
     * or container; err says why. NULL entries: not supported. */
    td_status (*ipc_export)(void *ctx, const void *memory,
                            uint8_t ret_handle[TD_DEVICE_HANDLE_BYTES], uint64_t *ret_offset,
                            struct td_err *err);
    td_status (*ipc_open)(void *ctx, const uint8_t handle[TD_DEVICE_HANDLE_BYTES], void **ret_base,
                          struct td_err *err);
    void (*ipc_close)(void *ctx, void *base);
    /* The same for a pool that is several allocations and one range of addresses to this table.
     * pool_export (NULL: the pool is one allocation, use ipc_export) writes a description of at
     * most TD_DEVICE_POOL_BYTES bytes. pool_open takes a description from outside: TD_ERR_CORRUPT
     * unless it describes n_blocks blocks of block_bytes; the memory it opens has been checked to
     * be the exporter's; ipc_close ends it. A NULL pool_open: this table opens no such pool. */
    td_status (*pool_export)(void *ctx, uint8_t *ret_pool, size_t *ret_bytes, struct td_err *err);
    td_status (*pool_open)(void *ctx, const uint8_t *pool, size_t bytes, size_t block_bytes,
                           int32_t n_blocks, void **ret_base, struct td_err *err);

    /* A dma-buf over the pages that [memory, memory + bytes) lies in; the range begins at byte
     * *ret_offset of it. The caller closes the descriptor. TD_ERR_UNSUPPORTED: err says why there
     * is none here. A NULL entry: not supported. */
    td_status (*dmabuf)(void *ctx, const void *memory, size_t bytes, int *ret_fd,
                        uint64_t *ret_offset, struct td_err *err);
};

#endif
