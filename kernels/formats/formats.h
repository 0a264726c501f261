/* formats.h - the block formats: one row each, for the table in format.c and for the kernels, whose
 * code depends on nothing else. Included inside kernels/ only. */
#ifndef TD_KERNELS_FORMATS_H
#define TD_KERNELS_FORMATS_H

#include <string.h>

#include "kernels/format.h"
#include "kernels/part.h"

/* X(function prefix, name, GGUF type, values and bytes of a block, bits and offset of a code, how
 * scales are made) */
#define TD_EACH_BLOCK_FORMAT(X)                                                                    \
    X(q4_0, "Q4_0", 2, 32, 18, 4, 8, TD_SCALES_F16)                                                \
    X(q8_0, "Q8_0", 8, 32, 34, 8, 0, TD_SCALES_F16)

#define TD_FORMAT_DECLARE(fn, ...)                                                                 \
    void td_##fn##_read(const uint8_t *block, float *ret_values);                                  \
    void td_##fn##_split(const uint8_t *block, int32_t g, struct td_group *ret_group);
TD_EACH_BLOCK_FORMAT(TD_FORMAT_DECLARE)
#undef TD_FORMAT_DECLARE

#define TD_FORMAT_INDEX(fn, ...) TD_INDEX_##fn,
enum { TD_EACH_BLOCK_FORMAT(TD_FORMAT_INDEX) TD_N_BLOCK_FORMATS };
#undef TD_FORMAT_INDEX

static inline uint16_t td_load_u16(const uint8_t *p)
{
    uint16_t v;
    memcpy(&v, p, sizeof v);
    return v;
}
static inline float td_load_f16(const uint8_t *p) { return td_f16_to_f32(td_load_u16(p)); }

/* 32 codes of 4 bits: byte j holds code j (low half) and code j + 16. */
static inline uint8_t td_nibble(const uint8_t *bytes, int i)
{
    return bytes[i % 16] >> 4 * (i / 16) & 15;
}

#endif
