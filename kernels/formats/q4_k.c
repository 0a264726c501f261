/* q4_k.c - Q4_K: 256 values in 144 bytes. 0: d, 2: m (f16), 4: 8 scales and 8 minima of 6 bits in
 * 12 bytes, 16: 128 bytes of nibbles; value = d * scale * code - m * minimum. Byte l of a run of 32
 * holds values l (low half) and l + 32 of 64. */
#include "kernels/formats/formats.h"

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
    for (int i = 0; i < TD_GROUP; i++)
        ret_group->codes[i] = block[16 + g / 2 * 32 + i] >> 4 * (g % 2) & 15;
}
