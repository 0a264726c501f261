/* q5_1.c - Q5_1: 32 values in 24 bytes. 0: d, 2: m (f16), 4: the fifth bits, that of value i in bit
 * i of 4 bytes, 8: 16 bytes of nibbles; value = d * code + m. */
#include "kernels/formats/write.h"

void td_q5_1_split(const uint8_t *block, int32_t g, struct td_group *ret_group)
{
    (void)g;
    ret_group->d = td_load_u16(block);
    ret_group->m = td_load_u16(block + 2);
    td_split_nibbles(block + 8, ret_group->codes);
    td_add_fifth_bits(block + 4, ret_group->codes);
}

void td_q5_1_write(const float *values, uint8_t *ret_block)
{
    float d, min;
    uint8_t codes[TD_GROUP];
    td_codes_from_range(values, 31, &d, &min, codes);
    td_store_f16(ret_block, d);
    td_store_f16(ret_block + 2, min);
    td_join_fifth_bits(codes, ret_block + 4);
    td_join_nibbles(codes, ret_block + 8);
}
