/* device_memory.h - memory that this process's CPU must not touch, and what moves its bytes.
 *
 * Why here: the KV pool of a GPU worker lies in such memory. kernels/cuda fills this table,
 * common/transfer moves blocks with it, and neither may include the other. Tests fill it with a
 * fake whose pages no instruction can read or write (tests/fake/fake_device.h).
 *
 * Copies go to streams of their own beside whatever computes: they are ordered with nothing but
 * what their caller waited for. So a caller copies from what was computed only after the
 * computation is known to be complete, and computes with what was copied only after `done` has said
 * so.
 *
 * Threads: every entry may be called by any thread. Errors: TD_ERR_DEVICE with the driver's
 * words; after one in copy or done nothing that was issued runs any more, the device is lost for
 * the process and every later call fails the same way. */
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

/* May work that starts on the device after a NIC's completion miss what the NIC wrote before it?
 * As the driver says. */
enum td_device_rdma_order {
    TD_RDMA_ORDER_NONE = 0,
    TD_RDMA_ORDER_OWNER = 100,
    TD_RDMA_ORDER_ALL = 200
};

struct td_device_memory {
    void *ctx;
    char name[128], uuid[48], pci[24]; /* pci: "0000:1b:00.0"; "" where there is none */
    enum td_device_rdma_order rdma_order;

    /* The host's, page-locked: one side of TO_HOST and TO_DEVICE, which may be no other memory
       of the host (but for what `pin` took). Boot only. */
    td_status (*alloc_pinned)(void *ctx, size_t bytes, void **ret_memory, struct td_err *err);
    void (*release_pinned)(void *ctx, void *memory);
    /* The same for pages that are there already, such as a mapping that processes share; unpin
     * before they go. TD_ERR_UNSUPPORTED, TD_ERR_NOMEM: err says why. NULL: not at all. Boot
     * only. */
    td_status (*pin)(void *ctx, void *memory, size_t bytes, struct td_err *err);
    void (*unpin)(void *ctx, void *memory);

    /* Issues these copies; runs[] may be changed when it returns, the bytes not before `done`.
       Many small runs cost one launch. Does not wait for them. */
    td_status (*copy)(void *ctx, enum td_device_copy kind, const struct td_device_run *runs,
                      size_t n_runs, uint64_t *ret_ticket, struct td_err *err);
    /* TD_OK: complete; TD_INPROGRESS: not yet. Once OK, always OK. Does not block */
    td_status (*done)(void *ctx, uint64_t ticket, struct td_err *err);
    td_status (*wait)(void *ctx, uint64_t ticket, struct td_err *err); /* blocks until it is */

    /* Between processes of this host. export: the handle is of the whole allocation that
     * `memory` lies in, ret_offset bytes from its start. open fails in the process that exported
     * (there the pointer itself is good), where the device cannot reach the exporter's, and for
     * anything that is not a handle. close comes after every copy from it is done.
     * TD_ERR_UNSUPPORTED: not with this memory, device or container; err says why. NULL: not at
     * all. */
    td_status (*ipc_export)(void *ctx, const void *memory,
                            uint8_t ret_handle[TD_DEVICE_HANDLE_BYTES], uint64_t *ret_offset,
                            struct td_err *err);
    td_status (*ipc_open)(void *ctx, const uint8_t handle[TD_DEVICE_HANDLE_BYTES], void **ret_base,
                          struct td_err *err);
    void (*ipc_close)(void *ctx, void *base);
    /* The same for a pool that is several allocations and one range of addresses to this table.
     * pool_export (NULL: the pool is one allocation, ipc_export is of it): a description of at
     * most TD_DEVICE_POOL_BYTES bytes. pool_open takes it, from outside: TD_ERR_CORRUPT unless
     * it is of n_blocks blocks of block_bytes; what it opens has been seen to be the exporter's;
     * ipc_close ends it. NULL: this table opens no such pool. */
    td_status (*pool_export)(void *ctx, uint8_t *ret_pool, size_t *ret_bytes, struct td_err *err);
    td_status (*pool_open)(void *ctx, const uint8_t *pool, size_t bytes, size_t block_bytes,
                           int32_t n_blocks, void **ret_base, struct td_err *err);

    /* A dma-buf over the pages that [memory, memory + bytes) lies in, which begins at its byte
     * *ret_offset; the caller closes the descriptor. TD_ERR_UNSUPPORTED with the reason: no such
     * thing here. NULL: not at all. */
    td_status (*dmabuf)(void *ctx, const void *memory, size_t bytes, int *ret_fd,
                        uint64_t *ret_offset, struct td_err *err);
};

#endif
