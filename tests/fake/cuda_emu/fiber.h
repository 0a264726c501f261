/* fiber.h - a stack of its own for each thread of an emulated block, and the switch from one to
 * another.
 *
 * Why here: a block's threads take turns at every warp word and barrier, so a switch is what the
 * emulation costs; ours saves the registers that a call keeps and nothing else (swapcontext also
 * asks the kernel for the signal mask). x86_64 and aarch64 in assembler, ucontext elsewhere.
 * AddressSanitizer is told of every switch. ThreadSanitizer is not: the fibers of a block belong to
 * one thread of the host and count as that thread.
 *
 * A fiber belongs to the thread of the host that switches to it; it is never entered by two at
 * once. */
#ifndef TD_KERNELS_CUDA_EMU_FIBER_H
#define TD_KERNELS_CUDA_EMU_FIBER_H

#include <stddef.h>

#if defined(__SANITIZE_ADDRESS__)
#define TD_EMU_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define TD_EMU_ASAN 1
#endif
#endif

#if !defined(__x86_64__) && !defined(__aarch64__)
#define TD_EMU_UCONTEXT 1
#include <ucontext.h>
#endif

#ifdef __cplusplus
extern "C" {
#endif

struct td_emu_fiber {
    void *sp;          /* where it stopped */
    const void *stack; /* lowest address; of a native stack: what ASan told */
    size_t stack_bytes;
    void *fake_stack; /* ASan's */
#ifdef TD_EMU_UCONTEXT
    ucontext_t context;
#endif
};

/* The fiber starts in entry() at the first switch to it; entry never returns. `skew`: bytes left
 * free at the top, so that the stacks of a block do not all fall on the same lines of a cache. */
void td_emu_fiber_init(struct td_emu_fiber *f, void *stack, size_t stack_bytes, size_t skew,
                       void (*entry)(void));

/* Stops in `from` (any stack: it need not have been initialised) and goes on in `to`. */
void td_emu_fiber_switch(struct td_emu_fiber *from, struct td_emu_fiber *to);

/* The first words of an entry(). */
void td_emu_fiber_entered(void);

#ifdef __cplusplus
}
#endif
#endif
