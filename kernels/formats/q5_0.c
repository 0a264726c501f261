/* q5_0.c - Q5_0: 32 values in 22 bytes. 0: d (f16), 2: the fifth bits, that of value i in bit i of
 * 4 bytes, 6: 16 bytes of nibbles; value = d * (code - 16). */
#include "kernels/formats/write.h"

void td_q5_0_split(const uint8_t *block, int32_t g, struct td_group *ret_group)
{
    (void)g;
    ret_group->d = td_load_u16(block);
    td_split_nibbles(block + 6, ret_group->codes);
    td_add_fifth_bits(block + 2, ret_group->codes);
}

void td_q5_0_write(const float *values, uint8_t *ret_block)
{
    float d;
    uint8_t codes[TD_GROUP];
    td_codes_from_largest(values, 16, &d, codes);
    td_store_f16(ret_block, d);
    td_join_fifth_bits(codes, ret_block + 2);
    td_join_nibbles(codes, ret_block + 6);
}
