/* amx.c - asks CPU and kernel for tiles. Compiled for the base instruction set. */
#include "kernels/cpu/amx.h"

#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>

enum {
    AMX_BF16 = 1 << 22,
    AMX_TILE = 1 << 24,
    AMX_INT8 = 1 << 25,
    XCR0_TILECFG = 1 << 17,
    XCR0_TILEDATA = 1 << 18,
};

const char *td_amx_lack_of(const struct td_amx_seen *s)
{
    if (!s->is_built) return "the compiler of this build lacks -mamx-bf16";
    if (!(s->features & AMX_TILE)) return "the CPU lacks amx_tile";
    if (!(s->features & AMX_BF16)) return "the CPU lacks amx_bf16";
    if (!(s->features & AMX_INT8)) return "the CPU lacks amx_int8";
    if (!s->has_avx512)
        return "the CPU lacks avx512_bf16 or avx512_vnni, which the table also uses";
    if ((s->xcr0 & (XCR0_TILECFG | XCR0_TILEDATA)) != (XCR0_TILECFG | XCR0_TILEDATA))
        return "the kernel does not save tiles (XCR0 lacks bits 17 and 18)";
    if (s->palette[0] >> 16 < 8 || (s->palette[0] & 0xffffu) != 64 ||
        (s->palette[1] & 0xffffu) < 16)
        return "the CPU's tiles have other sizes than 8 times 16 rows of 64 bytes";
    switch (s->permission_errno) {
    case 0:
        return NULL;
    case EINVAL:
    case ENOSYS:
        return "the kernel does not know arch_prctl(ARCH_REQ_XCOMP_PERM), which Linux has from "
               "5.16 on";
    case ENOSPC:
        return "the kernel refused tiles: a thread's alternative signal stack is too small for "
               "them";
    case EPERM:
        return "the kernel refused tiles: arch_prctl(ARCH_REQ_XCOMP_PERM) is not permitted, as "
               "under a seccomp filter";
    default:
        return "the kernel refused tiles: arch_prctl(ARCH_REQ_XCOMP_PERM) failed";
    }
}

#ifdef __x86_64__
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

static struct td_amx_seen look(void)
{
    struct td_amx_seen s = {0};
    unsigned a, b, c, d;
#ifdef TD_HAS_AMX
    s.is_built = true;
#endif
    s.has_avx512 = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) s.features = d;
    if (__get_cpuid(1, &a, &b, &c, &d) && (c & bit_OSXSAVE)) {
        __asm__("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
        s.xcr0 = (uint64_t)d << 32 | a;
    }
    if (__get_cpuid_count(0x1d, 1, &a, &b, &c, &d)) s.palette[0] = b, s.palette[1] = c;
    return s;
}

const char *td_amx_lack(void)
{
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18 };
    /* A second thread that comes here at the same time asks again, and gets the same answer. */
    static _Atomic(const char *) lack;
    static atomic_bool is_known;
    if (atomic_load(&is_known)) return atomic_load(&lack);
    struct td_amx_seen s = look();
    const char *why = td_amx_lack_of(&s);
    if (!why && syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA)) {
        s.permission_errno = errno;
        why = td_amx_lack_of(&s);
    }
    atomic_store(&lack, why);
    atomic_store(&is_known, true);
    return why;
}
#endif
