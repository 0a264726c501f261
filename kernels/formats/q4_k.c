/* q4_k.c - Q4_K: 256 values in 144 bytes. 0: d, 2: m (f16), 4: 8 scales and 8 minima of 6 bits in
 * 12 bytes, 16: 128 bytes of nibbles; value = d * scale * code - m * minimum. Byte l of a run of 32
 * holds values l (low half) and l + 32 of 64. */
#include "kernels/formats/fit.h"
#include "kernels/formats/write.h"

void td_k_scale_min(const uint8_t *s, int32_t j, struct td_group *ret_group)
{
    uint8_t scale, min;
    if (j < 4) {
        scale = s[j] & 63;
        min = s[j + 4] & 63;
    } else {
        scale = (uint8_t)((s[j + 4] & 15) | s[j - 4] >> 6 << 4);
        min = (uint8_t)(s[j + 4] >> 4 | s[j] >> 6 << 4);
    }
    ret_group->scale[0] = ret_group->scale[1] = scale;
    ret_group->min[0] = ret_group->min[1] = min;
}

void td_q4_k_split(const uint8_t *block, int32_t g, struct td_group *ret_group)
{
    ret_group->d = td_load_u16(block);
    ret_group->m = td_load_u16(block + 2);
    td_k_scale_min(block + 4, g, ret_group);
    td_split_bits(block + 16 + g / 2 * 32, TD_GROUP / 8, 4 * (g % 2), 15, ret_group->codes);
}

/* Puts scale and minimum number j, each below 64, where td_k_scale_min finds them. */
static void put_scale_min(uint8_t *s, int j, uint8_t scale, uint8_t min)
{
    if (j < 4) {
        s[j] |= scale;
        s[j + 4] |= min;
    } else {
        s[j + 4] = (uint8_t)((scale & 15) | (min & 15) << 4);
        s[j - 4] |= (uint8_t)(scale >> 4 << 6);
        s[j] |= (uint8_t)(min >> 4 << 6);
    }
}

void td_k_write(const float *values, float top, uint8_t *ret_head, uint8_t *ret_codes)
{
    enum { N = TD_BLOCK_VALUES_MAX / TD_GROUP };
    float scale[N], min[N];
    for (int j = 0; j < N; j++) td_fit_scale_min(values + TD_GROUP * j, top, &scale[j], &min[j]);
    memset(ret_head, 0, 16);
    td_store_f16(ret_head, td_largest(scale, N) / 63.0f);
    td_store_f16(ret_head + 2, td_largest(min, N) / 63.0f);
    float d = td_f16_to_f32(td_load_u16(ret_head)), m = td_f16_to_f32(td_load_u16(ret_head + 2)),
          d_inverse = td_inverse(d), m_inverse = td_inverse(m);
    for (int j = 0; j < N; j++) {
        float s = td_clamp(td_round(scale[j] * d_inverse), 0, 63),
              low = td_clamp(td_round(min[j] * m_inverse), 0, 63), step = td_inverse(d * s);
        put_scale_min(ret_head + 4, j, (uint8_t)s, (uint8_t)low);
        for (int i = TD_GROUP * j; i < TD_GROUP * (j + 1); i++)
            ret_codes[i] = (uint8_t)td_clamp(td_round((values[i] + m * low) * step), 0, top);
    }
}

void td_k_join_nibbles(const uint8_t *codes, uint8_t *ret_bytes)
{
    for (int g = 0; g < TD_BLOCK_VALUES_MAX / TD_GROUP; g += 2)
        for (int i = 0; i < TD_GROUP; i++)
            ret_bytes[g / 2 * TD_GROUP + i] = (uint8_t)((codes[g * TD_GROUP + i] & 15) |
                                                        (codes[(g + 1) * TD_GROUP + i] & 15) << 4);
}

void td_q4_k_write(const float *values, uint8_t *ret_block)
{
    uint8_t codes[TD_BLOCK_VALUES_MAX];
    td_k_write(values, 15, ret_block, codes);
    td_k_join_nibbles(codes, ret_block + 16);
}
