/* part.h - how an entry cuts its outputs into parts, and how the plain versions read elements of
 * each dtype. Included inside kernels/ only. */
#ifndef TD_KERNELS_PART_H
#define TD_KERNELS_PART_H

#include <stdint.h>
#include <string.h>

#include "common/base/dtype.h"
#include "kernels/kv_codes.h"

/* The share [*lo, *hi) of n items that `part` of `n_parts` computes. Shares are contiguous, and
 * their sizes differ by at most `grain` items, the smallest unit that is not divided. */
static inline void td_part_range(int64_t n, int64_t grain, int part, int n_parts, int64_t *lo,
                                 int64_t *hi)
{
    int64_t n_units = (n + grain - 1) / grain;
    int64_t a = n_units * part / n_parts * grain, b = n_units * (part + 1) / n_parts * grain;
    *lo = a < n ? a : n;
    *hi = b < n ? b : n;
}

static inline float td_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exp = (h >> 10) & 31u, man = h & 0x3ffu, u;
    float f;
    if (exp == 0) { /* zero and subnormals: man * 2^-24, exact in f32 */
        f = (float)man * 0x1p-24f;
        memcpy(&u, &f, sizeof u);
        u |= sign;
    } else {
        u = sign | (exp == 31 ? 0x7f800000u : (exp + 112u) << 23) | man << 13;
    }
    memcpy(&f, &u, sizeof f);
    return f;
}

/* Element i of an array of `dtype`, widened exactly; of a coded type the code without its scale. */
static inline float td_widen(const void *data, enum td_dtype dtype, int64_t i)
{
    if (dtype == TD_F32) return ((const float *)data)[i];
    if (dtype == TD_INT8) return (float)((const int8_t *)data)[i];
    if (dtype == TD_FP8) return td_fp8_to_f32(((const uint8_t *)data)[i]);
    uint16_t h;
    memcpy(&h, (const char *)data + 2 * i, sizeof h);
    return dtype == TD_BF16 ? td_bf16_to_f32(h) : td_f16_to_f32(h);
}

#endif
