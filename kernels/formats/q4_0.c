/* q4_0.c - Q4_0: 32 values in 18 bytes. 0: d (f16), 2: 16 bytes of nibbles; value = d * (code - 8).
 */
#include "kernels/formats/formats.h"

void td_q4_0_read(const uint8_t *block, float *ret_values)
{
    float d = td_load_f16(block);
    for (int i = 0; i < TD_GROUP; i++) ret_values[i] = d * (float)(td_nibble(block + 2, i) - 8);
}

void td_q4_0_split(const uint8_t *block, int32_t g, struct td_group *ret_group)
{
    (void)g;
    ret_group->d = td_load_u16(block);
    for (int i = 0; i < TD_GROUP; i++) ret_group->codes[i] = td_nibble(block + 2, i);
}
