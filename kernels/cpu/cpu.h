/* cpu.h - declares the fast entries of ops.h, once per instruction set: td_avx512_gemm,
 * td_avx2_gemm and so on. ops.c makes them tables. */
#ifndef TD_KERNELS_CPU_H
#define TD_KERNELS_CPU_H

#include "kernels/ops.h"

/* Before a loop whose count the compiler knows: no loop remains of it. */
#if defined(__clang__)
#define TD_UNROLL _Pragma("clang loop unroll(full)")
#else
#define TD_UNROLL _Pragma("GCC unroll 32")
#endif

#define TD_DECLARE_BLOCK_OPS(isa)                                                                  \
    size_t td_##isa##_blocks_packed_bytes(int32_t n_out, int32_t n_in,                             \
                                          const struct td_format *format);                         \
    bool td_##isa##_blocks_pack(void *packed, int32_t n_out, int32_t n_in,                         \
                                const struct td_format *format, const void *src, int32_t row0,     \
                                int32_t n_rows);                                                   \
    void td_##isa##_blocks_read_row(const struct td_weight *w, int32_t row, float *ret_values);    \
    size_t td_##isa##_blocks_scratch_bytes(int32_t n_rows, int32_t n_in);                          \
    void td_##isa##_blocks_prepare(const struct td_gemm_args *a, int part, int n_parts);           \
    void td_##isa##_blocks_gemm(const struct td_gemm_args *a, int part, int n_parts)

#define TD_DECLARE_SCALED_OPS(isa)                                                                 \
    size_t td_##isa##_scaled_packed_bytes(int32_t n_out, int32_t n_in,                             \
                                          const struct td_format *format);                         \
    bool td_##isa##_scaled_pack(void *packed, int32_t n_out, int32_t n_in,                         \
                                const struct td_format *format, const void *src, int32_t row0,     \
                                int32_t n_rows);                                                   \
    void td_##isa##_scaled_read_row(const struct td_weight *w, int32_t row, float *ret_values);    \
    void td_##isa##_scaled_prepare(const struct td_gemm_args *a, int part, int n_parts);           \
    void td_##isa##_scaled_gemm(const struct td_gemm_args *a, int part, int n_parts)

#define TD_DECLARE_GEMM(isa)                                                                       \
    size_t td_##isa##_packed_bytes(int32_t n_out, int32_t n_in, enum td_dtype dtype);              \
    void td_##isa##_pack(void *packed, int32_t n_out, int32_t n_in, enum td_dtype dtype,           \
                         const void *src, enum td_dtype src_dtype, int32_t row0, int32_t n_rows);  \
    size_t td_##isa##_gemm_scratch_bytes(int32_t n_rows, int32_t n_in);                            \
    void td_##isa##_gemm_prepare(const struct td_gemm_args *a, int part, int n_parts);             \
    void td_##isa##_gemm(const struct td_gemm_args *a, int part, int n_parts)

#define TD_DECLARE_PRODUCTS(isa)                                                                   \
    TD_DECLARE_GEMM(isa);                                                                          \
    size_t td_##isa##_attn_scratch_bytes(int32_t n_heads, int32_t n_kv_heads, int32_t head_dim,    \
                                         int32_t block_size);                                      \
    void td_##isa##_attn(const struct td_attn_args *a, int part, int n_parts)

#define TD_DECLARE_OPS(isa)                                                                        \
    TD_DECLARE_PRODUCTS(isa);                                                                      \
    void td_##isa##_rmsnorm(const struct td_rmsnorm_args *a, int part, int n_parts);               \
    void td_##isa##_rope(const struct td_rope_args *a, int part, int n_parts);                     \
    void td_##isa##_kv_store(const struct td_kv_store_args *a, int part, int n_parts);             \
    void td_##isa##_silu_mul(float *out, const float *gate, const float *up, int32_t n_rows,       \
                             int32_t dim, int64_t out_stride, int64_t gate_stride,                 \
                             int64_t up_stride, int part, int n_parts);                            \
    void td_##isa##_act_mul(const struct td_act_args *a, int part, int n_parts);                   \
    void td_##isa##_scale_cap(const struct td_scale_args *a, int part, int n_parts);               \
    void td_##isa##_embed(float *out, const void *table, enum td_dtype dtype, const int32_t *ids,  \
                          int32_t n_rows, int32_t dim, int part, int n_parts)

TD_DECLARE_OPS(avx512);
TD_DECLARE_OPS(avx2);
TD_DECLARE_PRODUCTS(avx512bf16);
TD_DECLARE_GEMM(amx); /* kernels/cpu/amx.h says where they run */
TD_DECLARE_BLOCK_OPS(avx512);
TD_DECLARE_BLOCK_OPS(avx2);
/* kernels/scaled.h: td_avx512_scaled_gemm and so on */
TD_DECLARE_SCALED_OPS(avx512);
TD_DECLARE_SCALED_OPS(avx512bf16);
TD_DECLARE_SCALED_OPS(avx2);
/* td_avx512_scaled_gemm, of integers by tiles (i8_amx.c): the same bits */
void td_amx_scaled_gemm(const struct td_gemm_args *a, int part, int n_parts);
/* AVX2 with a dot of bytes, in the encoding of AVX-VNNI and in that of AVX-512: the same bits, and
 * packed alike */
TD_DECLARE_BLOCK_OPS(avxvnni);
TD_DECLARE_BLOCK_OPS(avxvnni_evex);
TD_DECLARE_SCALED_OPS(avxvnni);
TD_DECLARE_SCALED_OPS(avxvnni_evex);

/* aarch64: neon and neonbf16, whose products with plain weights alone differ; three versions of
 * those with block and scaled formats. td_neon_ops has the table of that name, or NULL. */
TD_DECLARE_OPS(neon);
TD_DECLARE_PRODUCTS(neonbf16);
TD_DECLARE_BLOCK_OPS(neon);
TD_DECLARE_BLOCK_OPS(neon_dot);
TD_DECLARE_BLOCK_OPS(neon_i8mm);
TD_DECLARE_SCALED_OPS(neon);
TD_DECLARE_SCALED_OPS(neon_dot);
TD_DECLARE_SCALED_OPS(neon_i8mm);
const struct td_ops *td_neon_ops(const char *name);

#endif
