/* q8_0.c - Q8_0: 32 values in 34 bytes. 0: d (f16), 2: 32 signed bytes q; value = d * q. */
#include "kernels/formats/write.h"

void td_q8_0_split(const uint8_t *block, int32_t g, struct td_group *ret_group)
{
    (void)g;
    ret_group->d = td_load_u16(block);
    memcpy(ret_group->codes, block + 2, TD_GROUP);
}

void td_q8_0_write(const float *values, uint8_t *ret_block)
{
    float d = fabsf(td_largest(values, TD_GROUP)) / 127.0f, inverse = td_inverse(d);
    td_store_f16(ret_block, d);
    for (int i = 0; i < TD_GROUP; i++) /* halves away from 0 */
        ret_block[2 + i] = (uint8_t)(int8_t)td_clamp(roundf(values[i] * inverse), -127, 127);
}
