/* cuda.h - what the files of kernels/cuda share: the device's state, and the entries that cuda.cu
 * puts into the table.
 *
 * One process has one device. One owning thread runs the steps; other threads may copy for KV
 * transfer, on streams of their own (copy.cu). */
#ifndef TD_KERNELS_CUDA_CUDA_H
#define TD_KERNELS_CUDA_CUDA_H

#include "kernels/cuda/port.h"

struct td_cuda {
    int index, n_sms, cc; /* cc: 80, 89, 90 */
    bool is_deterministic;
    /* TANDEM_CUDA_OVERLAP=1 on sm_90: a kernel may begin while the one before it ends (port.h) */
    bool overlaps;
    cudaStream_t compute;    /* the stream of the entries, in order */
    bool behind_kernel;      /* the last thing queued there was a kernel of this table */
    cudaError_t first_error; /* sticky: the device is lost for this process */
    const char *first_error_at;
};
extern struct td_cuda td_cuda; /* the singleton; cuda.cu */

/* Checks the result of a runtime call, or of the launch before it (TD_LAUNCHED). Remembers the
 * first error with its label. False: this or an earlier call failed. */
bool td_cuda_ok(cudaError_t error, const char *label);
/* TD_ERR_DEVICE with the first error that td_cuda_ok saw */
td_status td_cuda_lost(struct td_err *err);
/* After each launch to td_cuda.compute, and only there. */
#define TD_LAUNCHED(label)                                                                         \
    (td_cuda.behind_kernel = true, (void)td_cuda_ok(cudaGetLastError(), (label)))

/* For TD_LAUNCH_EARLY. Only a kernel lets the next one begin early: graph recording refuses an
 * early launch behind a copy, an event or a kernel of another library. */
static inline bool td_cuda_is_early(void) { return td_cuda.overlaps && td_cuda.behind_kernel; }

/* Called before the first launch of a kernel that uses more than 48 KiB of dynamic shared memory.
 * Also asks for as much of the multiprocessor's memory as there is for it: by itself the driver may
 * leave room for one block where the launch bounds count on two. */
bool td_cuda_allow_shared(const void *kernel, size_t bytes, const char *label);
/* Waits for the queued work, then destroys every kept graph. The owning thread, outside a step. */
void td_cuda_drop_graphs(void);

/* library.cu: opens NVIDIA's library `name` with dlopen, looking in the toolkit's folders too; the
 * environment variable `variable` names another file. NULL: *err says where it was sought, and what
 * `without` says works without it. */
void *td_cuda_open_library(const char *name, const char *variable, const char *without,
                           struct td_err *err);

/* rows.cu */
void td_cuda_rmsnorm(const struct td_rmsnorm_args *a, int part, int n_parts);
void td_cuda_rmsnorm_prepare(const struct td_rmsnorm_args *a, const struct td_gemm_args *next,
                             int part, int n_parts);
void td_cuda_rope(const struct td_rope_args *a, int part, int n_parts);
void td_cuda_kv_store(const struct td_kv_store_args *a, int part, int n_parts);
void td_cuda_rope_store(const struct td_rmsnorm_args *q_norm, const struct td_rmsnorm_args *k_norm,
                        const struct td_rope_args *rope, const struct td_kv_store_args *store,
                        int part, int n_parts);
void td_cuda_silu_mul(float *out, const float *gate, const float *up, int32_t n_rows, int32_t dim,
                      int64_t out_stride, int64_t gate_stride, int64_t up_stride, int part,
                      int n_parts);
void td_cuda_silu_mul_prepare(const float *gate, const float *up, int64_t gate_stride,
                              int64_t up_stride, const struct td_gemm_args *next, int part,
                              int n_parts);
void td_cuda_embed(float *out, const void *table, enum td_dtype dtype, const int32_t *ids,
                   int32_t n_rows, int32_t dim, int part, int n_parts);

/* gemm.cu: cuBLASLt */
size_t td_cuda_packed_bytes(int32_t n_out, int32_t n_in, enum td_dtype dtype);
void td_cuda_pack(void *packed, int32_t n_out, int32_t n_in, enum td_dtype dtype, const void *src,
                  enum td_dtype src_dtype, int32_t row0, int32_t n_rows);
size_t td_cuda_gemm_scratch_bytes(int32_t n_rows, int32_t n_in);
void td_cuda_gemm_prepare(const struct td_gemm_args *a, int part, int n_parts);
void td_cuda_gemm(const struct td_gemm_args *a, int part, int n_parts);
td_status td_cuda_gemm_open(struct td_err *err);
void td_cuda_gemm_close(void);

/* quant.cu: weights in block and scaled formats, packed by quant_pack.c */
size_t td_cuda_quant_scratch_bytes(int32_t n_rows, int32_t n_in);
void td_cuda_quant_gemm(const struct td_gemm_args *a, int part, int n_parts);
void td_cuda_quant_embed(const struct td_weight *w, const int32_t *ids, int32_t n_rows, float *out);

/* copy.cu: KV transfer. Opened after the device is chosen (td_cuda.index), closed before the device
 * is given up. */
td_status td_cuda_memory_open(const struct td_device_info *info,
                              const struct td_device_memory **ret_memory, struct td_err *err);
void td_cuda_memory_close(void);

/* attn.cu (choice and plan), attn_f32.cu, attn_mma.cu */
size_t td_cuda_attn_scratch_bytes(int32_t n_heads, int32_t n_kv_heads, int32_t head_dim,
                                  int32_t block_size);
size_t td_cuda_attn_plan_bytes(int32_t max_rows, int32_t n_kv_heads);
void td_cuda_attn_plan(const struct td_attn_plan_args *a, void *ret_plan, uint64_t *ret_shape);
void td_cuda_attn(const struct td_attn_args *a, int part, int n_parts);

/* comm.cu */
const struct td_device_ranks *td_cuda_ranks(void);

/* experts.cu */
const struct td_device_experts *td_cuda_experts(void);

/* sample.cu */
size_t td_cuda_sample_scratch_bytes(int32_t max_rows, int32_t vocab);
td_status td_cuda_sample_clear(void *scratch, int32_t max_rows, int32_t vocab, struct td_err *err);
void td_cuda_sample(const struct td_sample_args *a);

#endif
