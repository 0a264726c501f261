/* fiber.c - the switch. A stopped fiber's stack holds, from its sp upwards, the registers that a
 * call preserves and the address where it continues. */
#include "tests/fake/cuda_emu/fiber.h"

#include <stdint.h>
#include <string.h>

#ifdef TD_WITH_ASAN
#include <sanitizer/common_interface_defs.h>
#endif

/* The fiber that switched last on this thread: the one that continues learns that fiber's stack
 * from ASan (nothing else knows a native stack's bounds). */
static __thread struct td_emu_fiber *switched_from __attribute__((tls_model("initial-exec")));

#if defined(__x86_64__)
__asm__(".text\n"
        ".p2align 4\n"
        ".globl td_emu_switch_stack\n"
        ".hidden td_emu_switch_stack\n"
        ".type td_emu_switch_stack, @function\n"
        "td_emu_switch_stack:\n" /* rdi: where to keep our sp; rsi: the sp to go on with */
        "    pushq %rbp\n"
        "    pushq %rbx\n"
        "    pushq %r12\n"
        "    pushq %r13\n"
        "    pushq %r14\n"
        "    pushq %r15\n"
        "    movq %rsp, (%rdi)\n"
        "    movq %rsi, %rsp\n"
        "    popq %r15\n"
        "    popq %r14\n"
        "    popq %r13\n"
        "    popq %r12\n"
        "    popq %rbx\n"
        "    popq %rbp\n"
        "    ret\n"
        ".size td_emu_switch_stack, .-td_emu_switch_stack\n");
enum {
    SAVED_WORDS = 6
}; /* then the address, then one word so that entry sees the alignment of
      a call */
#elif defined(__aarch64__)
__asm__(".text\n"
        ".p2align 4\n"
        ".globl td_emu_switch_stack\n"
        ".hidden td_emu_switch_stack\n"
        ".type td_emu_switch_stack, %function\n"
        "td_emu_switch_stack:\n"
        "    sub sp, sp, #160\n"
        "    stp x19, x20, [sp, #0]\n"
        "    stp x21, x22, [sp, #16]\n"
        "    stp x23, x24, [sp, #32]\n"
        "    stp x25, x26, [sp, #48]\n"
        "    stp x27, x28, [sp, #64]\n"
        "    stp x29, x30, [sp, #80]\n"
        "    stp d8, d9, [sp, #96]\n"
        "    stp d10, d11, [sp, #112]\n"
        "    stp d12, d13, [sp, #128]\n"
        "    stp d14, d15, [sp, #144]\n"
        "    mov x9, sp\n"
        "    str x9, [x0]\n"
        "    mov sp, x1\n"
        "    ldp x19, x20, [sp, #0]\n"
        "    ldp x21, x22, [sp, #16]\n"
        "    ldp x23, x24, [sp, #32]\n"
        "    ldp x25, x26, [sp, #48]\n"
        "    ldp x27, x28, [sp, #64]\n"
        "    ldp x29, x30, [sp, #80]\n"
        "    ldp d8, d9, [sp, #96]\n"
        "    ldp d10, d11, [sp, #112]\n"
        "    ldp d12, d13, [sp, #128]\n"
        "    ldp d14, d15, [sp, #144]\n"
        "    add sp, sp, #160\n"
        "    ret\n"
        ".size td_emu_switch_stack, .-td_emu_switch_stack\n");
#endif

#ifndef TD_EMU_UCONTEXT
void td_emu_switch_stack(void **save_sp, void *load_sp);
#endif

void td_emu_fiber_init(struct td_emu_fiber *f, void *stack, size_t stack_bytes, size_t skew,
                       void (*entry)(void))
{
    memset(f, 0, sizeof *f);
    f->stack = stack;
    f->stack_bytes = stack_bytes;
#ifdef TD_EMU_UCONTEXT
    getcontext(&f->context);
    f->context.uc_stack.ss_sp = stack;
    f->context.uc_stack.ss_size = stack_bytes - skew;
    f->context.uc_link = NULL;
    makecontext(&f->context, entry, 0);
#else
    uintptr_t top = ((uintptr_t)stack + stack_bytes - skew) & ~(uintptr_t)15;
#if defined(__x86_64__)
    void **sp = (void **)top - (SAVED_WORDS + 2); /* an even number of words: top - 8 holds
                                                     nothing, as after a call */
    memset(sp, 0, (SAVED_WORDS + 2) * sizeof *sp);
    sp[SAVED_WORDS] = (void *)(uintptr_t)entry;
#else
    void **sp = (void **)(top - 160);
    memset(sp, 0, 160);
    sp[11] = (void *)(uintptr_t)entry; /* x30 */
#endif
    f->sp = sp;
#endif
}

void td_emu_fiber_entered(void)
{
#ifdef TD_WITH_ASAN
    __sanitizer_finish_switch_fiber(NULL, &switched_from->stack, &switched_from->stack_bytes);
#endif
}

void td_emu_fiber_switch(struct td_emu_fiber *from, struct td_emu_fiber *to)
{
    switched_from = from;
#ifdef TD_WITH_ASAN
    __sanitizer_start_switch_fiber(&from->fake_stack, to->stack, to->stack_bytes);
#endif
#ifdef TD_EMU_UCONTEXT
    swapcontext(&from->context, &to->context);
#else
    td_emu_switch_stack(&from->sp, to->sp);
#endif
#ifdef TD_WITH_ASAN
    __sanitizer_finish_switch_fiber(from->fake_stack, &switched_from->stack,
                                    &switched_from->stack_bytes);
#endif
}
