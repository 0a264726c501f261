/* device.h - what a table of kernels brings along when its memory is not the host's: allocation,
 * steps, graphs, ranks, sampling.
 *
 * Why here: kernels/cuda fills this table in libtandem_cuda.so, which is loaded at run time
 * (`--device cuda`). The forward pass, the engine and the workers include this header only, so one
 * set of programs runs with and without a GPU. The same sources, compiled by the host's compiler
 * against tests/fake/cuda_emu, make libtandem_cuda_emu.so: the same table on a machine without a
 * GPU, slow and for tests (info.is_emulated).
 *
 * Entries. With a device table the pointers in the arguments of ops.h are device pointers, except
 * where a field says otherwise. Block tables are device arrays of device pointers. An entry queues
 * its work on the compute stream and returns. The one thread that owns the device calls it, with
 * n_parts = 1. An error of queued work is returned by step_end or wait. A row whose position is -1
 * is padding (also to attn_plan): nothing is stored or read for it, and its outputs are finite but
 * meaningless. `embed` with an F32 table also picks rows of activations: td_ops.embed(out, x,
 * TD_F32, rows, ..).
 *
 * Steps. One step is step_begin, then entries, `put` and `get`, then step_end, then wait. With a
 * graph key other than 0 the first step of that key is recorded as a CUDA graph, and later steps of
 * the key launch the graph. Every pointer and count that the entries were given must therefore be
 * the same for the same key. What varies goes through `put` from the same pinned memory. The table
 * is a singleton: one device per process.
 *
 * Errors: TD_ERR_DEVICE with CUDA's own message. After a failed launch or an ECC error the device
 * is lost for the process: every later call fails the same way, and the worker drains itself. */
#ifndef TD_KERNELS_DEVICE_H
#define TD_KERNELS_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/device_memory.h"
#include "common/base/status.h"
#include "kernels/experts.h"
#include "kernels/ops.h"
#include "kernels/sample.h"

struct td_device_info {
    char name[128]; /* "NVIDIA H200" */
    char uuid[48];  /* "GPU-..." */
    char pci[24];   /* "0000:1b:00.0" */
    /* the newest CUDA that the driver serves and the runtime library's version: "13.0
     * runtime=13.0"; "" = not asked */
    char driver[48];
    int32_t index, cc_major, cc_minor, n_sms;
    uint64_t memory_bytes;
    bool is_emulated;
    bool is_deterministic; /* as the config asked */
};

struct td_device_config {
    int32_t index;      /* among the devices that the process sees */
    bool deterministic; /* invariant I1: one GEMM algorithm for every number of rows */
    /* the file to load; NULL or "": TANDEM_CUDA_LIBRARY, else libtandem_cuda.so beside the program,
     * else wherever the loader looks */
    const char *library;
};

#define TD_DEVICE_RANK_ID_BYTES 128
#define TD_DEVICE_MARKS_MAX 64

/* The ranks as the host connects them. An emulated device reduces and gathers through these two
 * calls, where a GPU uses NCCL. Their contract is that of common/model/comm.h. */
struct td_device_group {
    int32_t rank, n_ranks;
    void *ctx;
    td_status (*all_reduce_sum)(void *ctx, float *x, size_t n);
    td_status (*gather_columns)(void *ctx, const float *mine, int32_t n_rows, const int32_t *first,
                                float *out);
};

/* One model over several devices, one process per device. `join` is collective and blocks until all
 * ranks have joined; max_floats is the largest n of one all_reduce_sum or gather_columns. Call
 * `leave` before `close`. */
struct td_device_ranks {
    /* Rank 0 makes an id of TD_DEVICE_RANK_ID_BYTES bytes, which every rank passes to join. */
    td_status (*new_id)(uint8_t *ret_id, struct td_err *err);
    /* *group is copied. */
    td_status (*join)(const uint8_t *id, const struct td_device_group *group, size_t max_floats,
                      struct td_err *err);
    /* Entries, as in common/model/comm.h; every rank issues the same ones in the same order. A
     * deterministic device sums in the order of ranks, so the bits do not depend on n.
     * gather_columns on rank 0 expects rank 0's own columns in `out` already. */
    void (*all_reduce_sum)(float *x, size_t n);
    void (*gather_columns)(const float *mine, int32_t n_rows, const int32_t *first, float *out);
    /* Returns the errors that the connections between the ranks have reported since the last call;
     * TD_ERR_DEVICE: the device is lost. Any thread. Does not block. */
    td_status (*check)(struct td_err *err);
    /* Called when another rank is known to be dead, by any thread but the owning one. Work that
     * waits for that rank ends, and the device is lost. Returns when no recorded graph exists any
     * more. Graphs are dropped by `leave`, which the owning thread calls: the caller of abort must
     * hold no lock that the owning thread needs to get there. */
    void (*abort)(void);
    /* Called by the owning thread outside a step: waits for the queued work, drops every recorded
     * graph, then disconnects from the other ranks. May run at the same time as abort. */
    void (*leave)(void);
};

/* The rows of a mixture in the order of their experts, in which products take them: pairs (row,
 * expert) sorted by expert, those of one expert in ascending order of rows. Device memory. */
struct td_device_experts_order {
    int32_t n_rows, n_used, n_experts;
    int32_t *row_of; /* [n_rows * n_used] the row of each pair; -1 behind the last pair */
    int32_t *at;     /* [n_rows, n_used] where a row's pairs are; -1: a padding row has none */
    int32_t *tiles;  /* tile_ints(n_rows, n_used, n_experts) ints: how products are cut */
};

/* Products of the rows of each expert with its own matrix:
 *   y[i,:] = x[row of pair i,:] . W[expert of pair i]^T
 * `prepare` (or td_ops.silu_mul_prepare of n_rows * n_used rows) fills scratch, and `gemm` reads
 * it, as the entries of td_ops. A pair has the bits that td_ops.gemm of a deterministic device
 * gives its row, whoever else chose the expert. Rows of y behind the last pair stay as they are.
 *   w        of expert 0: a plain format; the next expert's data lies w_stride bytes further on
 *   x        [n_rows, n_in]            f32, row stride x_stride
 *   y        [n_rows * n_used, n_out]  f32, row stride y_stride
 *   scratch  td_ops.gemm_scratch_bytes(n_rows * n_used, n_in) bytes */
struct td_device_experts_gemm_args {
    const struct td_device_experts_order *order;
    const struct td_weight *w;
    int64_t w_stride;
    const float *x;
    float *y;
    void *scratch;
    int64_t x_stride, y_stride;
};

/* A mixture of experts; the table then has silu_mul_prepare, too. Entries: what is launched depends
 * on counts alone and never on which experts were chosen, so that steps with graphs may hold them.
 */
struct td_device_experts {
    /* The choices and weights of td_experts_choose, bit for bit. Padding rows (position -1) choose
     * nothing: their ids are -1, their weights 0. */
    void (*choose)(const struct td_experts_choose_args *a, const int32_t *positions);
    /* Ints of tiles, at most for fewer rows, too. */
    size_t (*tile_ints)(int32_t n_rows, int32_t n_used, int32_t n_experts);
    /* Fills the order of the choices ids [n_rows, n_used]. */
    void (*sort)(const int32_t *ids, const struct td_device_experts_order *order);
    void (*prepare)(const struct td_device_experts_gemm_args *a);
    void (*gemm)(const struct td_device_experts_gemm_args *a);
    /* As td_experts_sum with the same bits; `at` below 0 adds nothing. */
    void (*sum)(const struct td_experts_sum_args *a);
    /* As td_experts_gate with the same bits. */
    void (*gate)(float *x, const float *logits, int32_t n_rows, int32_t dim, int64_t stride);
};

struct td_device {
    struct td_device_info info;
    bool has_coded_kv; /* kv_store and attention take INT8 and FP8 caches, as every host table */

    /* ---- memory: plain allocations (cudaMalloc), because IPC and dma-buf can export no others. At
     * boot only, any thread. The message of TD_ERR_NOMEM names the bytes asked for and the bytes
     * free. */
    td_status (*alloc)(size_t bytes, const char *what, void **ret_memory, struct td_err *err);
    void (*release)(void *memory);
    /* Page-locked memory of the host. */
    td_status (*alloc_pinned)(size_t bytes, const char *what, void **ret_memory,
                              struct td_err *err);
    void (*release_pinned)(void *memory);
    td_status (*free_bytes)(uint64_t *ret_free, uint64_t *ret_total, struct td_err *err);
    /* Copies that block until done; any thread. They do not wait for entries queued before: call
     * `wait` first where that matters. */
    td_status (*upload)(void *device_memory, const void *host_memory, size_t bytes,
                        struct td_err *err);
    td_status (*download)(void *host_memory, const void *device_memory, size_t bytes,
                          struct td_err *err);

    /* ---- steps: the owning thread only. step_begin returns true when the caller must issue the
     * entries, and false when the graph of this key is recorded already: then go to step_end at
     * once. */
    bool (*step_begin)(uint64_t graph_key);
    /* Copies to and from the device, part of the step and in order with the entries. */
    void (*put)(void *device_memory, const void *pinned, size_t bytes);
    void (*get)(void *pinned, const void *device_memory, size_t bytes);
    td_status (*step_end)(struct td_err *err);
    td_status (*wait)(struct td_err *err); /* blocks until all queued work is done */
    /* `mark` sets a mark behind the entries issued so far, in a step without a graph key. The marks
     * of a step are numbered from 0; at most TD_DEVICE_MARKS_MAX. `wait_mark`, between step_end and
     * the next step_begin, blocks until the device has reached that mark; entries behind the mark
     * may still run. */
    void (*mark)(void);
    td_status (*wait_mark)(int32_t mark, struct td_err *err);

    /* what KV transfer copies with, beside the steps; lives as long as the table */
    const struct td_device_memory *memory;
    /* ---- sampling (sample.h). `sample` is issued like an entry. `sample_clear` blocks and is
     * called once, before the first step. */
    size_t (*sample_scratch_bytes)(int32_t max_rows, int32_t vocab);
    td_status (*sample_clear)(void *scratch, int32_t max_rows, int32_t vocab, struct td_err *err);
    void (*sample)(const struct td_sample_args *a);

    const struct td_device_ranks *ranks;
    const struct td_device_experts *experts; /* NULL: none, and models that want them are refused */

    /* Frees what the table holds itself; memory that it handed out must have been released
     * before. */
    void (*close)(void);
};

/* Loads the library and opens the device; (*ret_ops)->device is set. One device may be open at a
 * time. Errors, each with the exact cause: TD_ERR_UNSUPPORTED (no library, no driver, no device, an
 * architecture below sm_80), TD_ERR_INVALID (no device of that index), TD_ERR_NOMEM,
 * TD_ERR_DEVICE. */
td_status td_device_open(const struct td_device_config *config, const struct td_ops **ret_ops,
                         struct td_err *err);
void td_device_close(const struct td_ops *ops); /* NULL is allowed */

/* The symbol that the library exports, and the ABI number that program and library must agree on.
 * The first 8 bits are raised when a meaning changes; the sizes of both tables fill the rest. */
#define TD_CUDA_ABI                                                                                \
    ((uint32_t)6u << 24 | (uint32_t)sizeof(struct td_ops) << 12 |                                  \
     (uint32_t)sizeof(struct td_device))
#define TD_CUDA_OPEN_SYMBOL "td_cuda_open"
typedef td_status td_cuda_open_fn(uint32_t abi, const struct td_device_config *config,
                                  const struct td_ops **ret_ops, struct td_err *err);

#endif
