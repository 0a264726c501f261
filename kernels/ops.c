/* ops.c - the tables, and the choice among them, made once at boot from what the CPU has and what
 * TANDEM_OPS asks for. */
#include "kernels/ops.h"

#include <stdlib.h>
#include <string.h>
#ifdef __x86_64__
#include <cpuid.h>
#endif

#include "kernels/cpu/cpu.h"
#include "kernels/ref/ref.h"

#define TD_BLOCK_OPS_TABLE(isa)                                                                    \
    {                                                                                              \
        .packed_bytes = td_##isa##_blocks_packed_bytes, .pack = td_##isa##_blocks_pack,            \
        .read_row = td_##isa##_blocks_read_row,                                                    \
        .gemm_scratch_bytes = td_##isa##_blocks_scratch_bytes,                                     \
        .gemm_prepare = td_##isa##_blocks_prepare, .gemm = td_##isa##_blocks_gemm,                 \
    }
#define TD_OPS_TABLE(isa, block_ops)                                                               \
    {                                                                                              \
        .name = #isa, .blocks = block_ops, .packed_bytes = td_##isa##_packed_bytes,                \
        .pack = td_##isa##_pack, .gemm_scratch_bytes = td_##isa##_gemm_scratch_bytes,              \
        .gemm_prepare = td_##isa##_gemm_prepare, .gemm = td_##isa##_gemm,                          \
        .rmsnorm = td_##isa##_rmsnorm, .rope = td_##isa##_rope, .kv_store = td_##isa##_kv_store,   \
        .attn_scratch_bytes = td_##isa##_attn_scratch_bytes, .attn = td_##isa##_attn,              \
        .silu_mul = td_##isa##_silu_mul, .embed = td_##isa##_embed,                                \
    }

static const struct td_block_ops blocks_ref = TD_BLOCK_OPS_TABLE(ref);
static const struct td_ops ops_ref = TD_OPS_TABLE(ref, &blocks_ref);
#ifdef __x86_64__
static const struct td_block_ops blocks_avx2 = TD_BLOCK_OPS_TABLE(avx2);
static const struct td_block_ops blocks_avx512 = TD_BLOCK_OPS_TABLE(avx512);
static const struct td_ops ops_avx2 = TD_OPS_TABLE(avx2, &blocks_avx2);
static const struct td_ops ops_avx512 = TD_OPS_TABLE(avx512, &blocks_avx512);
/* The same bits, for the first CPUs with AVX-512, which lack its integer products. */
static const struct td_ops ops_avx512_no_vnni = TD_OPS_TABLE(avx512, &blocks_avx2);

/* clang 14 does not know "f16c" in __builtin_cpu_supports. */
static bool cpu_has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

const struct td_ops *td_ops_by_name(const char *name)
{
    if (strcmp(name, "ref") == 0) return &ops_ref;
#ifdef __x86_64__
    /* __builtin_cpu_supports also checks that the operating system saves the vector registers. */
    bool has_avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && cpu_has_f16c();
    if (strcmp(name, "avx2") == 0 && has_avx2) return &ops_avx2;
    if (strcmp(name, "avx512") == 0 && has_avx2 && __builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        return __builtin_cpu_supports("avx512vnni") ? &ops_avx512 : &ops_avx512_no_vnni;
#endif
#ifdef __aarch64__
    return td_neon_ops(name);
#else
    return NULL;
#endif
}

const char *const td_ops_names[TD_N_OPS] = {"ref", "avx2", "avx512", "neon", "neonbf16"};

const struct td_ops *td_ops_best(void)
{
    const char *forced = getenv("TANDEM_OPS");
    if (forced && *forced) return td_ops_by_name(forced);
    const struct td_ops *ops = NULL;
    for (int i = TD_N_OPS; i > 0 && !ops; i--) ops = td_ops_by_name(td_ops_names[i - 1]);
    return ops;
}
