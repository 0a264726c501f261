/* q5_k.c - Q5_K: 256 values in 176 bytes. As Q4_K up to byte 16, then 32 bytes with the fifth bits,
 * that of value 32 j + l in bit j of byte l, 48: 128 bytes of nibbles. */
#include "kernels/formats/write.h"

void td_q5_k_split(const uint8_t *block, int32_t g, struct td_group *ret_group)
{
    ret_group->d = td_load_u16(block);
    ret_group->m = td_load_u16(block + 2);
    td_k_scale_min(block + 4, g, ret_group);
    td_split_bits(block + 48 + g / 2 * 32, TD_GROUP / 8, 4 * (g % 2), 15, ret_group->codes);
    td_add_bits(block + 16, TD_GROUP / 8, g, 1, 4, ret_group->codes);
}

void td_q5_k_write(const float *values, uint8_t *ret_block)
{
    uint8_t codes[TD_BLOCK_VALUES_MAX];
    td_k_write(values, 31, ret_block, codes);
    td_k_join_nibbles(codes, ret_block + 48);
    memset(ret_block + 16, 0, TD_GROUP);
    for (int i = 0; i < TD_BLOCK_VALUES_MAX; i++)
        ret_block[16 + i % TD_GROUP] |= (uint8_t)((codes[i] >> 4 & 1) << i / TD_GROUP);
}
