/* dtype.h - the element types of weights, activations and KV, and conversions between them.
 * Together with status.h and device_memory.h one of the three headers of base that kernels/ may
 * include. */
#ifndef TD_BASE_DTYPE_H
#define TD_BASE_DTYPE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum td_dtype { TD_F32 = 1, TD_F16 = 2, TD_BF16 = 3 };

static inline size_t td_dtype_bytes(enum td_dtype t) { return t == TD_F32 ? 4 : 2; }
static inline const char *td_dtype_name(enum td_dtype t)
{
    return t == TD_F32 ? "f32" : t == TD_F16 ? "f16" : "bf16";
}

static inline float td_bf16_to_f32(uint16_t h)
{
    uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

/* Rounds to nearest even; NaN stays a (quiet) NaN. */
static inline uint16_t td_f32_to_bf16(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40u);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

#endif
