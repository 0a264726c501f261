/* q2_k.c - Q2_K: 256 values in 84 bytes. 0: 16 bytes, one for each 16 values: scale (low half) and
 * minimum, 16: 64 bytes of 2 bits, 80: d, 82: m (f16); value = d * scale * code - m * minimum.
 * Byte l of a run of 32 holds values l, l + 32, l + 64 and l + 96 of 128. */
#include "kernels/formats/formats.h"

void td_q2_k_split(const uint8_t *block, int32_t g, struct td_group *ret_group)
{
    ret_group->d = td_load_u16(block + 80);
    ret_group->m = td_load_u16(block + 82);
    for (int h = 0; h < 2; h++) {
        ret_group->scale[h] = block[2 * g + h] & 15;
        ret_group->min[h] = block[2 * g + h] >> 4;
    }
    td_split_bits(block + 16 + g / 4 * 32, TD_GROUP / 8, 2 * (g % 4), 3, ret_group->codes);
}
