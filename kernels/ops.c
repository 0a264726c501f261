/* ops.c - the tables, and the choice among them: made once, at boot, by what the CPU has and what TANDEM_OPS asks for. */
#include "kernels/ops.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/ref/ref.h"

static const struct td_ops ops_ref = {
    .name = "ref",
    .packed_bytes = td_ref_packed_bytes,
    .pack = td_ref_pack,
    .gemm_scratch_bytes = td_ref_gemm_scratch_bytes,
    .gemm_prepare = td_ref_gemm_prepare,
    .gemm = td_ref_gemm,
    .rmsnorm = td_ref_rmsnorm,
    .rope = td_ref_rope,
    .kv_store = td_ref_kv_store,
    .attn_scratch_bytes = td_ref_attn_scratch_bytes,
    .attn = td_ref_attn,
    .silu_mul = td_ref_silu_mul,
    .embed = td_ref_embed,
};

const struct td_ops *td_ops_by_name(const char *name)
{
    if (strcmp(name, "ref") == 0) return &ops_ref;
    return NULL;
}

const struct td_ops *td_ops_best(void)
{
    static const char *const fastest_first[] = {"avx512", "avx2", "ref"};
    const char *forced = getenv("TANDEM_OPS");
    if (forced && *forced) return td_ops_by_name(forced);
    for (size_t i = 0; i < sizeof fastest_first / sizeof *fastest_first; i++) {
        const struct td_ops *ops = td_ops_by_name(fastest_first[i]);
        if (ops) return ops;
    }
    return NULL;
}
