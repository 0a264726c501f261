/* block.h - runs one block of threads at a time: lanes, warps, and the meetings at which they wait
 * for each other.
 *
 * Why here: a kernel may rely on the order that meetings give, and on nothing else. Every thread of
 * a block is a fiber that runs until it comes to a meeting: a warp operation (shuffle, vote,
 * ldmatrix, mma, __syncwarp: all 32 lanes of its warp) or a barrier (all threads of the block). The
 * next fiber is drawn from a seed (TD_CUDA_EMU_SEED), lanes and warps alike, so a kernel that needs
 * an order which no meeting gives it computes wrong results. Blocks run one after another, in a
 * drawn order, on the host thread that runs the launch; of several such host threads one runs a
 * grid and the others wait for its end. All shared memory holds NaN (0xff) when a block begins.
 *
 * Reported, with kernel, block, thread and operation, and then abort():
 *   (1) lanes of a warp that meet at different operations, or one at a barrier while others wait at
 *       a warp operation, or two kinds of barrier;
 *   (2) a thread that ends while others wait, or a meeting after a thread ended (stricter than the
 *       hardware, which lets ended threads miss barriers);
 *   (3) a warp operation in a warp of fewer than 32 threads, or with a mask other than 0xffffffff;
 *   (4) a block all of whose threads wait for an mbarrier (td_emu_yield) that nobody completes;
 *   (5) a write into dynamic shared memory past its size (behind the last 128-byte line a guard
 *       page ends the program instead). */
#ifndef TD_KERNELS_CUDA_EMU_BLOCK_H
#define TD_KERNELS_CUDA_EMU_BLOCK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "tests/fake/cuda_emu/fiber.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { TD_EMU_LANES = 32, TD_EMU_MAX_THREADS = 1024, TD_EMU_OPERAND_BYTES = 64 };

enum td_emu_word {
    TD_EMU_SYNCWARP = 1,
    TD_EMU_SHFL,
    TD_EMU_SHFL_UP,
    TD_EMU_SHFL_DOWN,
    TD_EMU_SHFL_XOR,
    TD_EMU_BALLOT,
    TD_EMU_ALL,
    TD_EMU_ANY,
    TD_EMU_REDUCE,
    TD_EMU_LDMATRIX,
    TD_EMU_LDMATRIX_TRANS,
    TD_EMU_LDMATRIX_X2,
    TD_EMU_LDMATRIX_X2_TRANS,
    TD_EMU_MMA,
    TD_EMU_WGMMA,
    TD_EMU_SYNCTHREADS, /* operations of the whole block from here on */
    TD_EMU_SYNCTHREADS_COUNT,
    TD_EMU_SYNCTHREADS_AND,
    TD_EMU_SYNCTHREADS_OR,
};

struct td_emu_dims {
    unsigned x, y, z;
};

struct td_emu_block;

struct td_emu_warp {
    uint32_t all, ready, waiting, at_barrier, done; /* lanes, as bits; every lane of `all` is in
                                                       exactly one of the others */
    /* meetings so far; buffers have two phases, because a lane may be one ahead of another */
    uint32_t phase;
    enum td_emu_word word; /* the operation of the lanes that wait */
    uint32_t ballot[2];
    uint64_t slots[2][TD_EMU_LANES]; /* shuffles */
    /* operands of collected operations, read by the last lane only */
    uint8_t operands[TD_EMU_LANES][TD_EMU_OPERAND_BYTES];
    uint8_t results[2][TD_EMU_LANES][TD_EMU_OPERAND_BYTES];
};

struct td_emu_lane {
    struct td_emu_dims thread_idx;
    uint32_t lane, thread; /* in the warp; in the block */
    struct td_emu_warp *warp;
    struct td_emu_block *block;
    enum td_emu_word word; /* the operation at which it stopped last */
    struct td_emu_fiber fiber;
    void *async; /* ptx.c: copies that have not landed */
};

struct td_emu_block {
    struct td_emu_dims block_idx, block_dim, grid_dim;
    uint8_t *shared; /* dynamic shared memory; its end touches a guard page */
    size_t shared_bytes;
    const char *kernel;
    void (*run)(const void *closure);
    const void *closure;

    uint32_t n_threads, n_warps, n_done, n_at_barrier, barrier_phase, votes[2];
    enum td_emu_word barrier_word;
    uint64_t random;
    uint32_t n_idle; /* yields since something last happened */
    struct td_emu_fiber scheduler;
    struct td_emu_warp *warps;
    struct td_emu_lane *lanes;
    uint32_t n_fibers;   /* lanes that have a stack */
    uint8_t *shared_end; /* the guard page */
    void *bulks;         /* ptx.c: bulk copies on their way */
};

/* The emulated thread that runs on this host thread; NULL outside a kernel. The TLS model is
 * initial-exec because every operation of a kernel reads it, and a call for each (which ASan also
 * intercepts) was a third of the emulation's time; there is static room for a pointer or two, also
 * in a library that is loaded later. */
#define TD_EMU_TLS __attribute__((visibility("hidden"), tls_model("initial-exec")))
extern __thread struct td_emu_lane *td_emu_self TD_EMU_TLS;

/* Runs a launch to its end. Sizes are in bounds (runtime.c checks). */
void td_emu_grid_run(const char *kernel, struct td_emu_dims grid, struct td_emu_dims block,
                     size_t shared_bytes, void (*run)(const void *closure), const void *closure);

void td_emu_warp_sync(enum td_emu_word word, unsigned mask);
/* Meets; returns the 32 values that the lanes brought, to be read before the next warp
 * operation. */
const uint64_t *td_emu_warp_exchange(enum td_emu_word word, unsigned mask, uint64_t value);
uint32_t td_emu_warp_ballot(enum td_emu_word word, unsigned mask, bool vote);
/* Meets; the last lane computes every lane's result from every lane's operand; returns this lane's.
 * n bytes <= TD_EMU_OPERAND_BYTES. */
typedef void td_emu_collect_fn(uint8_t (*operands)[TD_EMU_OPERAND_BYTES],
                               uint8_t (*ret_results)[TD_EMU_OPERAND_BYTES]);
const void *td_emu_warp_collect(enum td_emu_word word, unsigned mask, const void *operand,
                                size_t n_bytes, td_emu_collect_fn *collect);

/* The block's barrier; returns how many threads brought true. */
uint32_t td_emu_barrier(enum td_emu_word word, bool vote);

/* For operations that wait for memory (mbarrier): lets other threads run, and reports a block where
 * nothing happens any more. */
void td_emu_yield(void);
void td_emu_happened(void);

void td_emu_fence(void); /* other host threads see memory in the order in which it was written */

/* names kernel, block and thread when there is one */
void td_emu_die(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));

#ifdef __cplusplus
}
#endif
#endif
