/* formats.h - the block formats: one row each, for the table in format.c and for the kernels, whose
 * code depends on nothing else. Included inside kernels/ only. */
#ifndef TD_KERNELS_FORMATS_H
#define TD_KERNELS_FORMATS_H

#include <string.h>

#include "kernels/format.h"
#include "kernels/part.h"

/* X(function prefix, name, GGUF type, values and bytes of a block, bits and offset of a code, what
 * codes stand for (NULL: themselves), how scales are made) */
#define TD_EACH_BLOCK_FORMAT(X)                                                                    \
    X(q4_0, "Q4_0", 2, 32, 18, 4, 8, NULL, TD_SCALES_F16)                                          \
    X(q4_1, "Q4_1", 3, 32, 20, 4, 0, NULL, TD_SCALES_F16_MIN)                                      \
    X(q5_0, "Q5_0", 6, 32, 22, 5, 16, NULL, TD_SCALES_F16)                                         \
    X(q5_1, "Q5_1", 7, 32, 24, 5, 0, NULL, TD_SCALES_F16_MIN)                                      \
    X(q8_0, "Q8_0", 8, 32, 34, 8, 0, NULL, TD_SCALES_F16)                                          \
    X(q2_k, "Q2_K", 10, 256, 84, 2, 0, NULL, TD_SCALES_U4_MIN_HALVES)                              \
    X(q3_k, "Q3_K", 11, 256, 110, 3, 4, NULL, TD_SCALES_I8_HALVES)                                 \
    X(q4_k, "Q4_K", 12, 256, 144, 4, 0, NULL, TD_SCALES_U8_MIN)                                    \
    X(q5_k, "Q5_K", 13, 256, 176, 5, 0, NULL, TD_SCALES_U8_MIN)                                    \
    X(q6_k, "Q6_K", 14, 256, 210, 6, 32, NULL, TD_SCALES_I8_HALVES)                                \
    X(iq4_nl, "IQ4_NL", 20, 32, 18, 4, 0, td_values_iq4, TD_SCALES_F16)                            \
    X(iq4_xs, "IQ4_XS", 23, 256, 136, 4, 0, td_values_iq4, TD_SCALES_I8)                           \
    X(mxfp4, "MXFP4", 39, 32, 17, 4, 0, td_values_mxfp4, TD_SCALES_E8M0)

extern const int8_t td_values_iq4[16], td_values_mxfp4[16];

#define TD_FORMAT_DECLARE(fn, ...)                                                                 \
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

/* ret[i] = bytes[i] >> shift & mask for i < 8 n; eight at a time, as loading packs whole models. */
static inline void td_split_bits(const uint8_t *bytes, int n, int shift, uint8_t mask,
                                 uint8_t *ret_codes)
{
    const uint64_t all = 0x0101010101010101u * mask;
    for (int i = 0; i < n; i++) {
        uint64_t v;
        memcpy(&v, bytes + 8 * i, sizeof v);
        v = v >> shift & all;
        memcpy(ret_codes + 8 * i, &v, sizeof v);
    }
}

/* The same, moved up by `up` bits and added to codes that lack them. */
static inline void td_add_bits(const uint8_t *bytes, int n, int shift, uint8_t mask, int up,
                               uint8_t *codes)
{
    const uint64_t all = 0x0101010101010101u * mask;
    for (int i = 0; i < n; i++) {
        uint64_t v, high;
        memcpy(&v, codes + 8 * i, sizeof v);
        memcpy(&high, bytes + 8 * i, sizeof high);
        v |= (high >> shift & all) << up;
        memcpy(codes + 8 * i, &v, sizeof v);
    }
}

/* 32 codes of 4 bits: byte j holds code j (low half) and code j + 16. */
static inline void td_split_nibbles(const uint8_t *bytes, uint8_t *ret_codes)
{
    td_split_bits(bytes, 2, 0, 15, ret_codes);
    td_split_bits(bytes, 2, 4, 15, ret_codes + 16);
}

/* To each of 32 codes its fifth bit: bit i of 4 bytes is that of code i. Eight codes at a time: of
 * a byte in all places of a word, place i keeps bit i. */
static inline void td_add_fifth_bits(const uint8_t *bits, uint8_t *codes)
{
    const uint64_t ones = 0x0101010101010101u;
    for (int i = 0; i < TD_GROUP / 8; i++) {
        uint64_t v, set = bits[i] * ones & 0x8040201008040201u;
        memcpy(&v, codes + 8 * i, sizeof v);
        v |= ((set + 0x7f * ones) >> 7 & ones) << 4;
        memcpy(codes + 8 * i, &v, sizeof v);
    }
}

/* q4_k.c: scale and minimum number j of Q4_K's and Q5_K's 12 bytes, to both halves. */
void td_k_scale_min(const uint8_t *s, int32_t j, struct td_group *ret_group);

/* 2^(e - 128), the scale of a block of MXFP4 that holds e. */
static inline float td_e8m0_half(uint32_t e)
{
    uint32_t u = e < 2 ? 0x00200000u << e : (e - 1) << 23;
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

/* What a code stands for. */
static inline int32_t td_code_value(const struct td_format *f, uint8_t code)
{
    return f->bits == 8 ? (int8_t)code : f->values ? f->values[code] : code - f->offset;
}

#endif
