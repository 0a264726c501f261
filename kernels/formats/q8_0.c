/* q8_0.c - Q8_0: 32 values in 34 bytes. 0: d (f16), 2: 32 signed bytes q; value = d * q. */
#include "kernels/formats/formats.h"

void td_q8_0_read(const uint8_t *block, float *ret_values)
{
    float d = td_load_f16(block);
    for (int i = 0; i < TD_GROUP; i++) ret_values[i] = d * (float)(int8_t)block[2 + i];
}

void td_q8_0_split(const uint8_t *block, int32_t g, struct td_group *ret_group)
{
    (void)g;
    ret_group->d = td_load_u16(block);
    memcpy(ret_group->codes, block + 2, TD_GROUP);
}
