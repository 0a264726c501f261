/* ptx.h - the host's versions of the instructions in kernels/cuda/ptx.h, which includes this file
 * and says what each does. Implemented in ptx.c. */
#ifndef TD_KERNELS_CUDA_EMU_PTX_H
#define TD_KERNELS_CUDA_EMU_PTX_H

#include <stdbool.h>
#include <stdint.h>

/* For functions that work on arrays of their own, into which their caller has copied the data, with
 * constant indices: sanitizers would find nothing there, and cost half of a tensor kernel's
 * time. */
#define TD_EMU_UNCHECKED __attribute__((no_sanitize("address", "undefined", "thread")))

#ifdef __cplusplus
extern "C" {
#endif

void td_ldmatrix_x4(uint32_t r[4], const void *row);
void td_ldmatrix_x4_trans(uint32_t r[4], const void *row);
void td_ldmatrix_x2(uint32_t r[2], const void *row);
void td_ldmatrix_x2_trans(uint32_t r[2], const void *row);
void td_mma_m16n8k16_bf16(float d[4], const uint32_t a[4], const uint32_t b[2], const float c[4]);
uint32_t td_pack_bf16x2(float lo, float hi);
float td_exp2(float x);
/* c[16][64] += a[16][16] b[16][64] */
void td_emu_wgmma_multiply(float *c, const float *a, const float *b);

void td_cp_async_16(void *smem, const void *gmem, bool is_valid);
void td_cp_async_commit(void);
void td_emu_cp_async_wait(uint32_t n_groups);

void td_mbarrier_init(uint64_t *bar, uint32_t count);
void td_mbarrier_init_fence(void);
void td_mbarrier_arrive(uint64_t *bar);
void td_mbarrier_arrive_expect_tx(uint64_t *bar, uint32_t bytes);
bool td_mbarrier_try_wait_parity(uint64_t *bar, uint32_t parity);
void td_bulk_copy_g2s(void *smem, const void *gmem, uint32_t bytes, uint64_t *bar);
void td_fence_proxy_async(void);

/* Called by block.c when a thread has ended, a block is over, or a machine is freed. Copies still
 * on their way are dropped. */
struct td_emu_lane;
struct td_emu_block;
void td_emu_async_lane_end(struct td_emu_lane *lane);
void td_emu_async_lane_free(struct td_emu_lane *lane);
void td_emu_async_block_end(struct td_emu_block *block);
void td_emu_async_block_free(struct td_emu_block *block);

#ifdef __cplusplus
}
template <int N> static inline void td_cp_async_wait(void)
{
    static_assert(N >= 0, "groups that may still be on their way");
    td_emu_cp_async_wait(N);
}
#endif
#endif
