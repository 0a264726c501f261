/* dtype.h - the element types of weights, activations and KV, and conversions between them.
 * status.h, device_memory.h, symbols.h and this file are the headers of base that kernels/ may
 * include. */
#ifndef TD_BASE_DTYPE_H
#define TD_BASE_DTYPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* INT8 and FP8 (e4m3) are types of KV alone: codes of one byte, which mean something with the scale
 * of their row (kernels/kv_codes.h). */
enum td_dtype { TD_F32 = 1, TD_F16 = 2, TD_BF16 = 3, TD_INT8 = 4, TD_FP8 = 5 };

static inline size_t td_dtype_bytes(enum td_dtype t)
{
    return t == TD_F32 ? 4 : t == TD_INT8 || t == TD_FP8 ? 1 : 2;
}
static inline const char *td_dtype_name(enum td_dtype t)
{
    return t == TD_F32    ? "f32"
           : t == TD_F16  ? "f16"
           : t == TD_INT8 ? "int8"
           : t == TD_FP8  ? "fp8"
                          : "bf16";
}

/* A KV cache of this type holds codes with scales. */
static inline bool td_dtype_is_coded(enum td_dtype t) { return t == TD_INT8 || t == TD_FP8; }

/* The K, or the V, of one head in one KV block: block_size rows of head_dim elements. Coded types
 * have the rows' scales behind them, one f32 for each token, and are rounded up to a multiple of 64
 * bytes. Scales are aligned when block_size * head_dim is a multiple of 4. */
static inline size_t td_kv_scales_at(enum td_dtype t, int32_t block_size, int32_t head_dim)
{
    return (size_t)block_size * (size_t)head_dim * td_dtype_bytes(t);
}
static inline size_t td_kv_head_bytes(enum td_dtype t, int32_t block_size, int32_t head_dim)
{
    size_t codes = td_kv_scales_at(t, block_size, head_dim);
    return td_dtype_is_coded(t) ? (codes + 4 * (size_t)block_size + 63) / 64 * 64 : codes;
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
