/* q3_k.c - Q3_K: 256 values in 110 bytes. 0: 32 bytes with the third bits, that of value 32 j + l
 * in bit j of byte l, 32: 64 bytes of 2 bits as in Q2_K, 96: 16 scales of 6 bits, 108: d (f16);
 * value = d * (scale - 32) * (code - 4). */
#include "kernels/formats/formats.h"

static uint8_t scale_of(const uint8_t *s, uint32_t j)
{
    uint32_t low = s[j % 8] >> 4 * (j / 8) & 15, high = s[8 + j % 4] >> 2 * (j / 4) & 3;
    return (uint8_t)(low + 16 * high - 32);
}

void td_q3_k_split(const uint8_t *block, int32_t g, struct td_group *ret_group)
{
    ret_group->d = td_load_u16(block + 108);
    for (int h = 0; h < 2; h++) ret_group->scale[h] = scale_of(block + 96, (uint32_t)(2 * g + h));
    td_split_bits(block + 32 + g / 4 * 32, TD_GROUP / 8, 2 * (g % 4), 3, ret_group->codes);
    td_add_bits(block, TD_GROUP / 8, g, 1, 2, ret_group->codes);
}
