/* ref.h - the plain version of every entry of ops.h, for tests to compare with: obvious loops,
 * double accumulators. ops.c makes them a table. */
#ifndef TD_KERNELS_REF_H
#define TD_KERNELS_REF_H

#include "kernels/cpu/cpu.h"
#include "kernels/ops.h"

TD_DECLARE_BLOCK_OPS(ref);
TD_DECLARE_SCALED_OPS(ref);

size_t td_ref_packed_bytes(int32_t n_out, int32_t n_in, enum td_dtype dtype);
void td_ref_pack(void *packed, int32_t n_out, int32_t n_in, enum td_dtype dtype, const void *src,
                 enum td_dtype src_dtype, int32_t row0, int32_t n_rows);
size_t td_ref_gemm_scratch_bytes(int32_t n_rows, int32_t n_in);
void td_ref_gemm_prepare(const struct td_gemm_args *a, int part, int n_parts);
void td_ref_gemm(const struct td_gemm_args *a, int part, int n_parts);

void td_ref_rmsnorm(const struct td_rmsnorm_args *a, int part, int n_parts);
void td_ref_rope(const struct td_rope_args *a, int part, int n_parts);
void td_ref_kv_store(const struct td_kv_store_args *a, int part, int n_parts);
void td_ref_silu_mul(float *out, const float *gate, const float *up, int32_t n_rows, int32_t dim,
                     int64_t out_stride, int64_t gate_stride, int64_t up_stride, int part,
                     int n_parts);
void td_ref_act_mul(const struct td_act_args *a, int part, int n_parts);
void td_ref_scale_cap(const struct td_scale_args *a, int part, int n_parts);
void td_ref_embed(float *out, const void *table, enum td_dtype dtype, const int32_t *ids,
                  int32_t n_rows, int32_t dim, int part, int n_parts);

size_t td_ref_attn_scratch_bytes(int32_t n_heads, int32_t n_kv_heads, int32_t head_dim,
                                 int32_t block_size);
void td_ref_attn(const struct td_attn_args *a, int part, int n_parts);

#endif
