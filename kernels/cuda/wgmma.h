/* wgmma.h - Hopper's matrix instruction (sm_90a): four warps, a "warpgroup", multiply 64 rows at
 * once, asynchronously, with B and optionally A straight from shared memory.
 *
 * Operands in shared memory lie in panels of 64 bf16 columns, rows of 128 bytes, whose 16-byte
 * chunks are swizzled as in the hardware's 128-byte mode: chunk c of row r is at place c ^ r % 8,
 * and a panel starts at a multiple of 1024. td_wgmma_place computes it. A panel serves as A[m][k]
 * or as B^T[n][k] (`_ss`: 16 columns from `column` on are the k of one instruction), and as B[k][n]
 * (`_rs`: 16 rows are the k, the panel's 64 columns the n).
 *
 * Fragments of 64 x 64 f32, d[32]: warp w of the group has rows 16 w .. 16 w + 15. In them a lane
 * has what it has of eight C tiles of mma.sync side by side (ptx.h): d[4 j + e] is element e of
 * tile j. A in registers: as mma.sync's A, of the warp's 16 rows.
 *
 *   td_wgmma_m64n64k16_ss(group, float *d, a, b, column, is_adding)
 *       d = A B (+ d); a and b are panels, of which columns column .. column + 15 are the k
 *   td_wgmma_m64n64k16_rs(group, float *d, const uint32_t *r, b)
 *       d += A B; A is in r, b points at the panel's row that is k 0 (a multiple of 16)
 *
 * Order. TD_WGMMA_GROUP(group) declares a group. td_wgmma_hold(d) and td_wgmma_fence come before
 * its first instruction, and td_wgmma_commit closes it. Only after td_wgmma_wait(group) and
 * td_wgmma_hold(d) may d be read, and only then may a shared operand be overwritten. Shared memory
 * that threads or cp.async wrote needs td_fence_proxy_async by each writer, then a barrier. The
 * whole warpgroup makes every call.
 *
 * The emulation computes a group when it is waited for, from what shared memory holds then. Until
 * then d holds NaN.
 *
 * Source: NVIDIA's PTX ISA, asynchronous warpgroup level matrix instructions: register fragments,
 * matrix descriptor, canonical layouts. */
#ifndef TD_KERNELS_CUDA_WGMMA_H
#define TD_KERNELS_CUDA_WGMMA_H

#include "kernels/cuda/ptx.h"

enum { WGMMA_ROW_BYTES = 128, WGMMA_COLUMNS = 64, WGMMA_ALIGN = 1024 };

/* Offset of 16-byte chunk 0..7 of a row of a panel. */
__device__ static inline int32_t td_wgmma_place(int32_t row, int32_t chunk)
{
    return row * WGMMA_ROW_BYTES + ((chunk ^ (row & 7)) << 4);
}

#ifdef TD_CUDA_EMULATE

#include <math.h>

#define TD_WGMMA_IS_HERE 1

/* One group of a lane: at most TD_EMU_WGMMAS instructions. */
enum { TD_EMU_WGMMAS = 16 };
struct td_emu_wgmma {
    float *d;
    uint32_t a[4];
    const uint8_t *a_panel, *b_panel; /* a_panel NULL: A in registers */
    int32_t column;
    bool is_adding;
};
struct td_emu_wgmmas {
    struct td_emu_wgmma list[TD_EMU_WGMMAS];
    float kept[TD_EMU_WGMMAS][32]; /* what d held when the instruction was issued, of each d once */
    float *kept_d[TD_EMU_WGMMAS];
    int n, n_kept;
};

/* Columns 8 chunk .. + 7 of a row. The swizzle as the hardware does it: on the bits of the
 * address. */
__attribute__((noinline)) static void td_emu_wgmma_chunk(const uint8_t *panel, int32_t row,
                                                         int32_t chunk, uint16_t *ret_values)
{
    uintptr_t address = (uintptr_t)panel + (uintptr_t)(row * WGMMA_ROW_BYTES + chunk * 16);
    memcpy(ret_values, (const void *)(address ^ ((address >> 3) & 0x70)), 16);
}

TD_EMU_UNCHECKED static inline float td_emu_wgmma_f32(uint32_t bf16)
{
    uint32_t bits = bf16 << 16;
    float f;
    __builtin_memcpy(&f, &bits, sizeof f);
    return f;
}

static inline void td_emu_wgmma_issue(struct td_emu_wgmmas *w, struct td_emu_wgmma m)
{
    bool is_known = false;
    if (w->n == TD_EMU_WGMMAS) td_emu_die("more than %d wgmma in a group", TD_EMU_WGMMAS);
    if ((uintptr_t)m.b_panel % WGMMA_ALIGN || (uintptr_t)m.a_panel % WGMMA_ALIGN)
        td_emu_die("a panel of wgmma is not aligned to %d", WGMMA_ALIGN);
    for (int i = 0; i < w->n_kept; i++) is_known = is_known || w->kept_d[i] == m.d;
    if (!is_known) {
        memcpy(w->kept[w->n_kept], m.d, sizeof w->kept[0]);
        w->kept_d[w->n_kept++] = m.d;
        for (int i = 0; i < 32; i++) m.d[i] = NAN;
    }
    w->list[w->n++] = m;
}

/* One instruction of a warp, computed by its last lane: the warp's 16 rows of A (the `warp`th of
 * the group's 64) times 64 columns of B. Unchecked, because td_emu_wgmma_chunk checks the reads of
 * shared memory and the lanes' d were copied at their issue. */
TD_EMU_UNCHECKED static void td_emu_wgmma_collect(uint8_t (*operands)[TD_EMU_OPERAND_BYTES],
                                                  uint8_t (*)[TD_EMU_OPERAND_BYTES])
{
    const struct td_emu_wgmma *of[TD_EMU_LANES];
    float a[16][16], b[16][WGMMA_COLUMNS], c[16][WGMMA_COLUMNS];
    uint16_t line[WGMMA_COLUMNS];
    for (int l = 0; l < TD_EMU_LANES; l++) __builtin_memcpy(&of[l], operands[l], sizeof of[l]);
    const struct td_emu_wgmma *m = of[0];
    int32_t warp = (int32_t)td_emu_self->thread / 32 % 4;
    for (int l = 0; l < TD_EMU_LANES; l++) {
        if (of[l]->a_panel != m->a_panel || of[l]->b_panel != m->b_panel ||
            of[l]->column != m->column || of[l]->is_adding != m->is_adding)
            td_emu_die("lane %d brings another panel, column or is_adding to a wgmma than lane 0",
                       l);
    }
    if (m->a_panel) {
        for (int r = 0; r < 16; r++) {
            for (int i = 0; i < 2; i++)
                td_emu_wgmma_chunk(m->a_panel, warp * 16 + r, m->column / 8 + i, line + 8 * i);
            for (int k = 0; k < 16; k++) a[r][k] = td_emu_wgmma_f32(line[k]);
        }
        for (int n = 0; n < WGMMA_COLUMNS; n++) {
            for (int i = 0; i < 2; i++)
                td_emu_wgmma_chunk(m->b_panel, n, m->column / 8 + i, line + 8 * i);
            for (int k = 0; k < 16; k++) b[k][n] = td_emu_wgmma_f32(line[k]);
        }
    } else {
        for (int l = 0; l < TD_EMU_LANES; l++)
            for (int i = 0; i < 4; i++) {
                float *pair = &a[l / 4 + 8 * (i & 1)][l % 4 * 2 + 8 * (i >> 1)];
                pair[0] = td_emu_wgmma_f32(of[l]->a[i] & 0xffff);
                pair[1] = td_emu_wgmma_f32(of[l]->a[i] >> 16);
            }
        for (int k = 0; k < 16; k++) {
            for (int i = 0; i < WGMMA_COLUMNS / 8; i++)
                td_emu_wgmma_chunk(m->b_panel, k, i, line + 8 * i);
            for (int n = 0; n < WGMMA_COLUMNS; n++) b[k][n] = td_emu_wgmma_f32(line[n]);
        }
    }
    for (int l = 0; l < TD_EMU_LANES; l++)
        for (int e = 0; e < 32; e++)
            c[l / 4 + e / 2 % 2 * 8][e / 4 * 8 + l % 4 * 2 + e % 2] =
                m->is_adding ? of[l]->d[e] : 0;
    td_emu_wgmma_multiply(&c[0][0], &a[0][0], &b[0][0]);
    for (int l = 0; l < TD_EMU_LANES; l++)
        for (int e = 0; e < 32; e++)
            of[l]->d[e] = c[l / 4 + e / 2 % 2 * 8][e / 4 * 8 + l % 4 * 2 + e % 2];
}

static inline void td_emu_wgmma_run(struct td_emu_wgmmas *w)
{
    for (int i = 0; i < w->n_kept; i++) memcpy(w->kept_d[i], w->kept[i], sizeof w->kept[0]);
    for (int i = 0; i < w->n; i++) {
        const struct td_emu_wgmma *m = &w->list[i];
        (void)td_emu_warp_collect(TD_EMU_WGMMA, 0xffffffffu, &m, sizeof m, td_emu_wgmma_collect);
    }
    w->n = w->n_kept = 0;
}

#define TD_WGMMA_GROUP(group) struct td_emu_wgmmas group = {}
#define td_wgmma_m64n64k16_ss(group, d, a, b, column, is_adding)                                   \
    td_emu_wgmma_issue(&(group), td_emu_wgmma{(d), {0, 0, 0, 0}, (a), (b), (column), (is_adding)})
#define td_wgmma_m64n64k16_rs(group, d, r, b)                                                      \
    td_emu_wgmma_issue(&(group),                                                                   \
                       td_emu_wgmma{(d), {(r)[0], (r)[1], (r)[2], (r)[3]}, NULL, (b), 0, true})
#define td_wgmma_wait(group) td_emu_wgmma_run(&(group))
static inline void td_wgmma_fence(void) {}
static inline void td_wgmma_commit(void) {}
static inline void td_wgmma_hold(float *) {}

#elif !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

#define TD_WGMMA_IS_HERE 1

/* Descriptor of a panel from byte `at` on: 128-byte swizzle, groups of 8 rows 1024 bytes apart. */
__device__ __forceinline__ uint64_t td_wgmma_descriptor(const void *panel, int32_t at)
{
    return (uint64_t)(((td_shared_address(panel) + (uint32_t)at) & 0x3ffffu) >> 4) | 1ull << 16 |
           (uint64_t)(8 * WGMMA_ROW_BYTES >> 4) << 32 | 1ull << 62;
}

__device__ __forceinline__ void td_wgmma_ss_(float *d, const void *a, const void *b, int32_t column,
                                             bool is_adding)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "%32, %33, p, 1, 1, 0, 0;\n}\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
                   "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
                   "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
                   "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                   "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
                   "+f"(d[30]), "+f"(d[31])
                 : "l"(td_wgmma_descriptor(a, 2 * column)), "l"(td_wgmma_descriptor(b, 2 * column)),
                   "r"((int)is_adding)
                 : "memory");
}

__device__ __forceinline__ void td_wgmma_rs_(float *d, const uint32_t *r, const void *b)
{
    asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "{%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
                   "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
                   "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
                   "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                   "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
                   "+f"(d[30]), "+f"(d[31])
                 : "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "l"(td_wgmma_descriptor(b, 0))
                 : "memory");
}

/* Keeps the compiler from moving operations on d across this place: before the fence and after the
 * wait. */
__device__ __forceinline__ void td_wgmma_hold(float *d)
{
#pragma unroll
    for (int i = 0; i < 32; i++) asm volatile("" : "+f"(d[i])::"memory");
}

__device__ __forceinline__ void td_wgmma_fence(void)
{
    asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}
__device__ __forceinline__ void td_wgmma_commit(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}

#define TD_WGMMA_GROUP(group) ((void)0)
#define td_wgmma_m64n64k16_ss(group, d, a, b, column, is_adding)                                   \
    td_wgmma_ss_((d), (a), (b), (column), (is_adding))
#define td_wgmma_m64n64k16_rs(group, d, r, b) td_wgmma_rs_((d), (r), (b))
#define td_wgmma_wait(group) asm volatile("wgmma.wait_group.sync.aligned 0;\n" ::: "memory")

/* Compiled for another architecture, where no launch picks a kernel with these. Such kernels leave
 * their bodies out (TD_WGMMA_IS_HERE). */
#else

#define TD_WGMMA_IS_HERE 0

__device__ __forceinline__ void td_wgmma_hold(float *) { __trap(); }
__device__ __forceinline__ void td_wgmma_fence(void) { __trap(); }
__device__ __forceinline__ void td_wgmma_commit(void) { __trap(); }
#define TD_WGMMA_GROUP(group) ((void)0)
#define td_wgmma_m64n64k16_ss(group, d, a, b, column, is_adding) ((void)(d), (void)(a), (void)(b))
#define td_wgmma_m64n64k16_rs(group, d, r, b) ((void)(d), (void)(r), (void)(b))
#define td_wgmma_wait(group) ((void)0)
#endif

#endif
