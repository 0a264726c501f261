/* fiber.h - a stack for each thread of an emulated block, and the switch from one to another.
 *
 * Why here: a block's threads take turns at every warp operation and barrier, so the switch is the
 * emulation's main cost. Ours saves the registers that a call preserves and nothing else
 * (swapcontext also asks the kernel for the signal mask). x86_64 and aarch64 in assembler, ucontext
 * elsewhere. AddressSanitizer is told of every switch. ThreadSanitizer is not: the fibers of a
 * block belong to one host thread and count as that thread.
 *
 * A fiber belongs to the host thread that switches to it; two never enter it at once. */
#ifndef TD_KERNELS_CUDA_EMU_FIBER_H
#define TD_KERNELS_CUDA_EMU_FIBER_H

#include <stddef.h>

#include "common/base/sanitizers.h"

#if !defined(__x86_64__) && !defined(__aarch64__)
#define TD_EMU_UCONTEXT 1
#include <ucontext.h>
#endif

#ifdef __cplusplus
extern "C" {
#endif

struct td_emu_fiber {
    void *sp;          /* stack pointer at which it stopped */
    const void *stack; /* lowest address; for a native stack the one that ASan reported */
    size_t stack_bytes;
    void *fake_stack; /* ASan's */
#ifdef TD_EMU_UCONTEXT
    ucontext_t context;
#endif
};

/* Prepares a fiber that starts in entry() at the first switch to it; entry never returns. `skew`:
 * bytes left free at the top, so that the stacks of a block do not all fall on the same lines of a
 * cache. */
void td_emu_fiber_init(struct td_emu_fiber *f, void *stack, size_t stack_bytes, size_t skew,
                       void (*entry)(void));

/* Stops in `from` (any stack: it need not have been initialised) and continues in `to`. */
void td_emu_fiber_switch(struct td_emu_fiber *from, struct td_emu_fiber *to);

/* The first call of an entry(). */
void td_emu_fiber_entered(void);

#ifdef __cplusplus
}
#endif
#endif
