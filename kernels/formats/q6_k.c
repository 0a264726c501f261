/* q6_k.c - Q6_K: 256 values in 210 bytes. 0: 128 bytes with the low 4 bits, 128: 64 bytes with the
 * high 2, 192: 16 signed scales, 208: d (f16); value = d * scale * (code - 32). Of each 128 values,
 * byte l of a run of 64 holds the low bits of l and l + 64; byte l of 32 the high ones of l, l +
 * 32, l + 64, l + 96. */
#include "kernels/formats/fit.h"
#include "kernels/formats/write.h"

void td_q6_k_split(const uint8_t *block, int32_t g, struct td_group *ret_group)
{
    const uint8_t *low = block + g / 4 * 64 + g % 2 * 32, *high = block + 128 + g / 4 * 32;
    ret_group->d = td_load_u16(block + 208);
    memcpy(ret_group->scale, block + 192 + 2 * g, 2);
    td_split_bits(low, TD_GROUP / 8, 4 * (g % 4 / 2), 15, ret_group->codes);
    td_add_bits(high, TD_GROUP / 8, 2 * (g % 4), 3, 4, ret_group->codes);
}

void td_q6_k_write(const float *values, uint8_t *ret_block)
{
    enum { N = 16, RUN = 16 }; /* scales, and values of each */
    float scale[N];
    uint8_t codes[TD_BLOCK_VALUES_MAX];
    for (int j = 0; j < N; j++) scale[j] = td_fit_scale(values + RUN * j, RUN, -32, 31);
    td_store_f16(ret_block + 208, td_largest(scale, N) / -128.0f);
    float d = td_f16_to_f32(td_load_u16(ret_block + 208)), inverse = td_inverse(d);
    for (int j = 0; j < N; j++) {
        float q = td_clamp(td_round(scale[j] * inverse), -128, 127), step = td_inverse(d * q);
        ret_block[192 + j] = (uint8_t)(int8_t)q;
        for (int i = RUN * j; i < RUN * (j + 1); i++)
            codes[i] = (uint8_t)(32 + (int)td_clamp(td_round(values[i] * step), -32, 31));
    }
    for (int h = 0; h < 2; h++)
        for (int i = 0; i < TD_GROUP; i++) {
            const uint8_t *c = codes + 128 * h + i; /* every 32nd */
            ret_block[64 * h + i] = (uint8_t)((c[0] & 15) | (c[64] & 15) << 4);
            ret_block[64 * h + 32 + i] = (uint8_t)((c[32] & 15) | (c[96] & 15) << 4);
            ret_block[128 + 32 * h + i] =
                (uint8_t)(c[0] >> 4 | c[32] >> 4 << 2 | c[64] >> 4 << 4 | c[96] >> 4 << 6);
        }
}
