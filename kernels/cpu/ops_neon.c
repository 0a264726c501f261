/* ops_neon.c - the tables of aarch64, and what the kernel says of the CPU (HWCAP), for there is no
 * cpuid that a process may read. */
#include <string.h>
#include <sys/auxv.h>

#include "kernels/cpu/cpu.h"
#include "kernels/scaled.h"

/* As in the kernel's asm/hwcap.h; headers older than the CPU lack the later ones. */
enum { CPU_ASIMD = 1 << 1, CPU_DOTPROD = 1 << 20 }; /* AT_HWCAP */
enum { CPU_I8MM = 1 << 13, CPU_BF16 = 1 << 14 };    /* AT_HWCAP2 */

#define BLOCKS(isa)                                                                                \
    {                                                                                              \
        .packed_bytes = td_##isa##_blocks_packed_bytes, .pack = td_##isa##_blocks_pack,            \
        .read_row = td_##isa##_blocks_read_row,                                                    \
        .gemm_scratch_bytes = td_##isa##_blocks_scratch_bytes,                                     \
        .gemm_prepare = td_##isa##_blocks_prepare, .gemm = td_##isa##_blocks_gemm,                 \
    }
#define SCALED(isa)                                                                                \
    {                                                                                              \
        .packed_bytes = td_##isa##_scaled_packed_bytes, .pack = td_##isa##_scaled_pack,            \
        .read_row = td_##isa##_scaled_read_row, .gemm_scratch_bytes = td_scaled_scratch_bytes,     \
        .gemm_prepare = td_##isa##_scaled_prepare, .gemm = td_##isa##_scaled_gemm,                 \
    }
/* Products with plain weights by `isa`, all else is the same. */
#define OPS(isa, generation)                                                                       \
    {                                                                                              \
        .name = #isa, .blocks = &blocks[generation], .scaled = &scaled[generation],                \
        .packed_bytes = td_##isa##_packed_bytes, .pack = td_##isa##_pack,                          \
        .gemm_scratch_bytes = td_##isa##_gemm_scratch_bytes,                                       \
        .gemm_prepare = td_##isa##_gemm_prepare, .gemm = td_##isa##_gemm,                          \
        .rmsnorm = td_neon_rmsnorm, .rope = td_neon_rope, .kv_store = td_neon_kv_store,            \
        .attn_scratch_bytes = td_neon_attn_scratch_bytes, .attn = td_neon_attn,                    \
        .act_mul = td_neon_act_mul, .scale_cap = td_neon_scale_cap, .silu_mul = td_neon_silu_mul,  \
        .embed = td_neon_embed,                                                                    \
    }

/* Products with blocks and scaled formats have the same bits in all three, so the table's name is
 * the same, too. */
static const struct td_block_ops blocks[] = {BLOCKS(neon), BLOCKS(neon_dot), BLOCKS(neon_i8mm)};
static const struct td_block_ops scaled[] = {SCALED(neon), SCALED(neon_dot), SCALED(neon_i8mm)};
static const struct td_ops neon[] = {OPS(neon, 0), OPS(neon, 1), OPS(neon, 2)};
static const struct td_ops neonbf16[] = {OPS(neonbf16, 0), OPS(neonbf16, 1), OPS(neonbf16, 2)};

const struct td_ops *td_neon_ops(const char *name)
{
    unsigned long has = getauxval(AT_HWCAP), has2 = getauxval(AT_HWCAP2);
    int generation = !(has & CPU_DOTPROD) ? 0 : !(has2 & CPU_I8MM) ? 1 : 2;
    if (!(has & CPU_ASIMD)) return NULL;
    if (strcmp(name, "neon") == 0) return &neon[generation];
    if (strcmp(name, "neonbf16") == 0 && (has2 & CPU_BF16)) return &neonbf16[generation];
    return NULL;
}
