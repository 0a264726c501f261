/* device.h - what a table of ops brings along when its memory is not the host's.
 *
 * Why here: kernels/cuda fills it in libtandem_cuda.so, which is loaded at run time (`--device
 * cuda`); the forward pass, the engine and the workers know this header only, so that one set of
 * programs runs with and without a GPU. The same sources, compiled by the host's compiler against
 * tests/fake/cuda_emu, make libtandem_cuda_emu.so: the same table on a machine without a GPU, for
 * tests (slow; info.is_emulated).
 *
 * With a device table, pointers in the arguments of ops entries are the device's unless said; an
 * entry issues work to the compute stream and returns; it is called with n_parts = 1 by the one
 * thread that owns the device; what goes wrong shows at step_end or wait. Block tables are device
 * arrays of device pointers. A row whose position is -1 is padding (also to attn_plan): nothing is
 * stored or read for it and its outputs are of no use, but finite. embed with an F32 table also
 * picks rows of activations: td_ops.embed(out, x, TD_F32, rows, ..).
 *
 * Steps. step_begin .. entries, put, get .. step_end .. wait. With a graph key other than 0 the
 * entries of the first step of that key are recorded as a CUDA graph and later steps of the key
 * only launch it: everything that the entries were given - pointers, counts - must be the same for
 * the same key; what varies goes through `put` from the same pinned memory. One process per device:
 * the table is a singleton.
 *
 * Errors: TD_ERR_DEVICE with CUDA's own words. After a failed launch or an ECC error the device
 * is lost for the process: every later call fails the same way, and the worker drains itself. */
#ifndef TD_KERNELS_DEVICE_H
#define TD_KERNELS_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/device_memory.h"
#include "common/base/status.h"
#include "kernels/ops.h"
#include "kernels/sample.h"

struct td_device_info {
    char name[128];  /* "NVIDIA H200" */
    char uuid[48];   /* "GPU-..." */
    char pci[24];    /* "0000:1b:00.0" */
    char driver[48]; /* the newest CUDA that the driver serves, and the
                        library's: "13.0 runtime=13.0"; "" = not asked */
    int32_t index, cc_major, cc_minor, n_sms;
    uint64_t memory_bytes;
    bool is_emulated;
    bool is_deterministic; /* as the config asked */
};

struct td_device_config {
    int32_t index;       /* of the visible devices */
    bool deterministic;  /* the same GEMM algorithm for every number of rows (I1) */
    const char *library; /* NULL or "": TANDEM_CUDA_LIBRARY, else libtandem_cuda.so
                            beside the program or where the loader looks */
};

#define TD_DEVICE_RANK_ID_BYTES 128
#define TD_DEVICE_MARKS_MAX 64

/* The ranks as the host knows them. The calls are for emulated devices, which do by them what
 * others do with NCCL; as in common/model/comm.h. */
struct td_device_group {
    int32_t rank, n_ranks;
    void *ctx;
    td_status (*all_reduce_sum)(void *ctx, float *x, size_t n);
    td_status (*gather_columns)(void *ctx, const float *mine, int32_t n_rows, const int32_t *first,
                                float *out);
};

/* One model over several devices, a process each. join: collective, blocks; max_floats: of one
 * call below. leave: before close. */
struct td_device_ranks {
    /* rank 0: [TD_DEVICE_RANK_ID_BYTES], for all ranks */
    td_status (*new_id)(uint8_t *ret_id, struct td_err *err);
    /* *group is copied */
    td_status (*join)(const uint8_t *id, const struct td_device_group *group, size_t max_floats,
                      struct td_err *err);
    /* Entries; all ranks issue the same ones. As in common/model/comm.h; with a deterministic
     * device the sum is taken in the order of ranks (the same bits whatever n). gather_columns
     * on rank 0: its own columns are in out already. */
    void (*all_reduce_sum)(float *x, size_t n);
    void (*gather_columns)(const float *mine, int32_t n_rows, const int32_t *first, float *out);
    /* Any thread: what the links between the ranks have reported since the last call.
       TD_ERR_DEVICE: the device is lost. Does not block. */
    td_status (*check)(struct td_err *err);
    /* Any thread but the owning one, when another rank is known to be dead: what waits for it
     * ends, the device is lost. Returns when the recorded graphs are gone, which leave drops: so
     * the caller holds no lock that the owning thread may want on its way there. */
    void (*abort)(void);
    /* The owning thread, outside a step: waits for what was issued, drops every recorded graph,
       then lets go of the other ranks. Beside abort is fine. */
    void (*leave)(void);
};

struct td_device {
    struct td_device_info info;

    /* ---- memory: plain allocations (cudaMalloc), so that IPC and dma-buf can export them. Boot
       only, any thread. TD_ERR_NOMEM says what was asked, what is free. */
    td_status (*alloc)(size_t bytes, const char *what, void **ret_memory, struct td_err *err);
    void (*release)(void *memory);
    /* the host's, page-locked */
    td_status (*alloc_pinned)(size_t bytes, const char *what, void **ret_memory,
                              struct td_err *err);
    void (*release_pinned)(void *memory);
    td_status (*free_bytes)(uint64_t *ret_free, uint64_t *ret_total, struct td_err *err);
    /* Block until done; any thread. They do not wait for entries that were issued before: call
       `wait` first where that matters. */
    td_status (*upload)(void *device_memory, const void *host_memory, size_t bytes,
                        struct td_err *err);
    td_status (*download)(void *host_memory, const void *device_memory, size_t bytes,
                          struct td_err *err);

    /* ---- steps: the owning thread. step_begin: true = issue the entries; false = they are
       recorded under this key already, go to step_end at once. */
    bool (*step_begin)(uint64_t graph_key);
    /* part of the step, in order with the entries */
    void (*put)(void *device_memory, const void *pinned, size_t bytes);
    void (*get)(void *pinned, const void *device_memory, size_t bytes);
    td_status (*step_end)(struct td_err *err);
    td_status (*wait)(struct td_err *err); /* until everything issued is done */
    /* mark: in a step without a graph key, behind the entries issued so far; marks of a step are
     * numbered from 0, TD_DEVICE_MARKS_MAX at most. wait_mark: after step_end and before the
     * next step_begin: until that mark is reached, which says nothing of what was issued behind
     * it. */
    void (*mark)(void);
    td_status (*wait_mark)(int32_t mark, struct td_err *err);

    const struct td_device_memory *memory; /* what KV transfer copies with, beside the steps; as
                                              long as the table */
    /* ---- sampling (sample.h): issued like an entry. sample_clear: once, before the first step
       (blocks). */
    size_t (*sample_scratch_bytes)(int32_t max_rows, int32_t vocab);
    td_status (*sample_clear)(void *scratch, int32_t max_rows, int32_t vocab, struct td_err *err);
    void (*sample)(const struct td_sample_args *a);

    const struct td_device_ranks *ranks;

    void (*close)(void); /* frees what the table holds itself; memory handed out must have come
                            back */
};

/* Loads the library and opens the device. ret_ops->device is set. One at a time. Errors, all
 * precise: TD_ERR_UNSUPPORTED (no library, no driver, no device, an architecture below sm_80),
 * TD_ERR_INVALID (no such index), TD_ERR_NOMEM, TD_ERR_DEVICE. */
td_status td_device_open(const struct td_device_config *config, const struct td_ops **ret_ops,
                         struct td_err *err);
void td_device_close(const struct td_ops *ops); /* NULL is fine */

/* What the library exports, and the number that both sides were built with: raised when a
 * meaning changes; the tables' sizes are in it. */
#define TD_CUDA_ABI                                                                                \
    ((uint32_t)5u << 24 | (uint32_t)sizeof(struct td_ops) << 12 |                                  \
     (uint32_t)sizeof(struct td_device))
#define TD_CUDA_OPEN_SYMBOL "td_cuda_open"
typedef td_status td_cuda_open_fn(uint32_t abi, const struct td_device_config *config,
                                  const struct td_ops **ret_ops, struct td_err *err);

#endif
