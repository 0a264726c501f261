/* amx.h - whether the tiles of AMX can be used here. They are the one extension that a process has
 * to ask the kernel for: XTILEDATA is 8 KiB of registers for each thread, and Linux grants it to
 * a process as a whole (arch_prctl, ARCH_REQ_XCOMP_PERM, since 5.16). */
#ifndef TD_KERNELS_CPU_AMX_H
#define TD_KERNELS_CPU_AMX_H

#include <stdbool.h>
#include <stdint.h>

/* What decides it, each as the CPU or the kernel says it. */
struct td_amx_seen {
    bool is_built;        /* the compiler of this build knew the instructions */
    bool has_avx512;      /* the table's other entries: those of avx512bf16 */
    uint32_t features;    /* CPUID leaf 7, subleaf 0, EDX */
    uint64_t xcr0;        /* what the kernel saves when it changes threads */
    uint32_t palette[2];  /* CPUID leaf 0x1d, subleaf 1, EBX and ECX: the sizes of tiles */
    int permission_errno; /* of arch_prctl; 0: granted */
};

/* Why tiles cannot be used, a text like "the CPU lacks amx_bf16"; NULL: they can. */
const char *td_amx_lack_of(const struct td_amx_seen *seen);

/* The same for this process. The first call asks the kernel for the permission, which then all
 * threads have; the answer is kept. Threads whose alternative signal stack is too small for the
 * tiles make the kernel refuse. Any thread. */
const char *td_amx_lack(void);

#endif
