/* ops.c - the tables, and which of them this CPU has the instructions for. choice.c says which one
 * is used when TANDEM_OPS does not. */
#include "kernels/ops.h"

#include <stdatomic.h>
#include <string.h>
#ifdef __x86_64__
#include <cpuid.h>
#endif

#include "kernels/choice.h"
#include "kernels/cpu/amx.h"
#include "kernels/cpu/cpu.h"
#include "kernels/ref/ref.h"
#include "kernels/scaled.h"

#define TD_BLOCK_OPS_TABLE(isa)                                                                    \
    {                                                                                              \
        .packed_bytes = td_##isa##_blocks_packed_bytes, .pack = td_##isa##_blocks_pack,            \
        .read_row = td_##isa##_blocks_read_row,                                                    \
        .gemm_scratch_bytes = td_##isa##_blocks_scratch_bytes,                                     \
        .gemm_prepare = td_##isa##_blocks_prepare, .gemm = td_##isa##_blocks_gemm,                 \
    }
#define TD_SCALED_OPS_TABLE(isa)                                                                   \
    {                                                                                              \
        .packed_bytes = td_##isa##_scaled_packed_bytes, .pack = td_##isa##_scaled_pack,            \
        .read_row = td_##isa##_scaled_read_row, .gemm_scratch_bytes = td_scaled_scratch_bytes,     \
        .gemm_prepare = td_##isa##_scaled_prepare, .gemm = td_##isa##_scaled_gemm,                 \
    }
/* The products and attention from gemm_isa, all other entries from isa. */
#define TD_OPS_TABLE(same_bits_as, isa, gemm_isa, block_ops, scaled_ops)                           \
    TD_OPS_TABLE_NAMED(#gemm_isa, same_bits_as, isa, gemm_isa, block_ops, scaled_ops)
#define TD_OPS_TABLE_NAMED(called, same_bits_as, isa, gemm_isa, block_ops, scaled_ops)             \
    TD_OPS_TABLE_OF(called, same_bits_as, isa, gemm_isa, gemm_isa, block_ops, scaled_ops)
#define TD_OPS_TABLE_OF(called, same_bits_as, isa, gemm_isa, attn_isa, block_ops, scaled_ops)      \
    {                                                                                              \
        .name = called, .numerics = same_bits_as, .blocks = block_ops, .scaled = scaled_ops,       \
        .packed_bytes = td_##gemm_isa##_packed_bytes, .pack = td_##gemm_isa##_pack,                \
        .gemm_scratch_bytes = td_##gemm_isa##_gemm_scratch_bytes,                                  \
        .gemm_prepare = td_##gemm_isa##_gemm_prepare, .gemm = td_##gemm_isa##_gemm,                \
        .rmsnorm = td_##isa##_rmsnorm, .rope = td_##isa##_rope, .kv_store = td_##isa##_kv_store,   \
        .attn_scratch_bytes = td_##attn_isa##_attn_scratch_bytes, .attn = td_##attn_isa##_attn,    \
        .act_mul = td_##isa##_act_mul, .scale_cap = td_##isa##_scale_cap,                          \
        .silu_mul = td_##isa##_silu_mul, .embed = td_##isa##_embed,                                \
    }

static const struct td_block_ops blocks_ref = TD_BLOCK_OPS_TABLE(ref);
static const struct td_block_ops scaled_ref = TD_SCALED_OPS_TABLE(ref);
static const struct td_ops ops_ref = TD_OPS_TABLE("ref", ref, ref, &blocks_ref, &scaled_ref);
#ifdef __x86_64__
static const struct td_block_ops blocks_avx2 = TD_BLOCK_OPS_TABLE(avx2);
static const struct td_block_ops blocks_avx512 = TD_BLOCK_OPS_TABLE(avx512);
static const struct td_block_ops scaled_avx2 = TD_SCALED_OPS_TABLE(avx2);
static const struct td_block_ops scaled_avx512 = TD_SCALED_OPS_TABLE(avx512);
static const struct td_ops ops_avx2 = TD_OPS_TABLE("avx2", avx2, avx2, &blocks_avx2, &scaled_avx2);
/* AVX2 with a dot of bytes, whose encoding is that of AVX-VNNI or of AVX-512 */
static const struct td_block_ops blocks_avxvnni = TD_BLOCK_OPS_TABLE(avxvnni);
static const struct td_block_ops blocks_avxvnni_evex = TD_BLOCK_OPS_TABLE(avxvnni_evex);
static const struct td_block_ops scaled_avxvnni = TD_SCALED_OPS_TABLE(avxvnni);
static const struct td_block_ops scaled_avxvnni_evex = TD_SCALED_OPS_TABLE(avxvnni_evex);
static const struct td_ops ops_avxvnni =
    TD_OPS_TABLE_NAMED("avxvnni", "avx2", avx2, avx2, &blocks_avxvnni, &scaled_avxvnni);
static const struct td_ops ops_avxvnni_evex =
    TD_OPS_TABLE_NAMED("avxvnni", "avx2", avx2, avx2, &blocks_avxvnni_evex, &scaled_avxvnni_evex);
static const struct td_ops ops_avx512 =
    TD_OPS_TABLE("avx512", avx512, avx512, &blocks_avx512, &scaled_avx512);
static const struct td_block_ops scaled_avx512bf16 = TD_SCALED_OPS_TABLE(avx512bf16);
static const struct td_ops ops_avx512bf16 =
    TD_OPS_TABLE("avx512", avx512, avx512bf16, &blocks_avx512, &scaled_avx512bf16);
/* For a CPU whose dot instruction adds in another order than those seen so far. */
static const struct td_ops ops_avx512bf16_own_bits =
    TD_OPS_TABLE("avx512bf16", avx512, avx512bf16, &blocks_avx512, &scaled_avx512);
/* The same bits, for the first CPUs with AVX-512, which lack its integer products. */
static const struct td_ops ops_avx512_no_vnni =
    TD_OPS_TABLE("avx512", avx512, avx512, &blocks_avx2, &scaled_avx2);

#ifdef TD_HAS_AMX
/* Integer products by tiles; all else of scaled formats is avx512's. */
static const struct td_block_ops scaled_amx = {
    .packed_bytes = td_avx512_scaled_packed_bytes,
    .pack = td_avx512_scaled_pack,
    .read_row = td_avx512_scaled_read_row,
    .gemm_scratch_bytes = td_scaled_scratch_bytes,
    .gemm_prepare = td_avx512_scaled_prepare,
    .gemm = td_amx_scaled_gemm,
};
/* Attention is that of avx512, because on the CPUs with AMX seen so far the dot of pairs is slower
 * than widening. */
static const struct td_ops ops_amx =
    TD_OPS_TABLE_OF("amx", "amx", avx512, amx, avx512, &blocks_avx512, &scaled_amx);

/* NULL where tiles add in another order than ref/amx_chain.h: one row or two are computed by that
 * chain. The products that tell are made once in a process; a second thread that comes here at the
 * same time makes them again and gets the same answer. */
static const struct td_ops *amx_or_null(void)
{
    enum { NOT_TRIED, IS_CHAIN, IS_OTHER };
    static atomic_int known = NOT_TRIED;
    int k = atomic_load(&known);
    if (k == NOT_TRIED) {
        k = td_ops_is_amx_chain(&ops_amx) ? IS_CHAIN : IS_OTHER;
        atomic_store(&known, k);
    }
    return k == IS_CHAIN ? &ops_amx : NULL;
}
#endif

/* clang 14 does not know "f16c" in __builtin_cpu_supports. */
static bool cpu_has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

/* Nor "avxvnni": leaf 7, subleaf 1. */
static bool cpu_has_avxvnni(void)
{
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
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
    bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
    bool has_vnni = has_avx512 && __builtin_cpu_supports("avx512vnni");
    if (strcmp(name, "avxvnni") == 0 && has_avx2 && cpu_has_avxvnni()) return &ops_avxvnni;
    if (strcmp(name, "avxvnni") == 0 && has_vnni) return &ops_avxvnni_evex;
    if (strcmp(name, "avx512") == 0 && has_avx512)
        return has_vnni ? &ops_avx512 : &ops_avx512_no_vnni;
    if (strcmp(name, "avx512bf16") == 0 && has_vnni && __builtin_cpu_supports("avx512bf16"))
        return td_ops_same_bits(&ops_avx512, &ops_avx512bf16) ? &ops_avx512bf16
                                                              : &ops_avx512bf16_own_bits;
#ifdef TD_HAS_AMX
    if (strcmp(name, "amx") == 0 && !td_amx_lack()) return amx_or_null();
#endif
#endif
#ifdef __aarch64__
    return td_neon_ops(name);
#else
    return NULL;
#endif
}

const char *const td_ops_names[TD_N_OPS] = {"ref",        "avx2", "avxvnni", "avx512",
                                            "avx512bf16", "amx",  "neon",    "neonbf16"};

const char *td_ops_lack(const char *name)
{
    if (td_ops_by_name(name)) return NULL;
#ifdef __x86_64__
    if (strcmp(name, "amx") == 0) {
        const char *lack = td_amx_lack();
        return lack ? lack : "the CPU's tiles add in another order than ref/amx_chain.h says";
    }
#endif
    for (int i = 0; i < TD_N_OPS; i++)
        if (strcmp(name, td_ops_names[i]) == 0) return "this CPU lacks its instructions";
    return "no table has that name (" TD_OPS_NAMES_TEXT ")";
}

const struct td_ops *td_ops_best(void)
{
    struct td_ops_choice choice;
    td_ops_choose(&choice);
    return choice.ops;
}
