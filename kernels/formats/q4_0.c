/* q4_0.c - Q4_0: 32 values in 18 bytes. 0: d (f16), 2: 16 bytes of nibbles; value = d * (code - 8).
 */
#include "kernels/formats/write.h"

void td_q4_0_split(const uint8_t *block, int32_t g, struct td_group *ret_group)
{
    (void)g;
    ret_group->d = td_load_u16(block);
    td_split_nibbles(block + 2, ret_group->codes);
}

void td_q4_0_write(const float *values, uint8_t *ret_block)
{
    float d;
    uint8_t codes[TD_GROUP];
    td_codes_from_largest(values, 8, &d, codes);
    td_store_f16(ret_block, d);
    td_join_nibbles(codes, ret_block + 2);
}
