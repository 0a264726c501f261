/* iq4_xs.c - IQ4_XS: 256 values in 136 bytes. 0: d (f16), 2: the high 2 bits of 8 scales, 4: their
 * low 4, 8: 128 bytes of nibbles, 16 bytes for each 32 values, which number the entries of
 * td_values_iq4; value = d * (scale - 32) * entry. */
#include "kernels/formats/formats.h"

void td_iq4_xs_split(const uint8_t *block, int32_t g, struct td_group *ret_group)
{
    uint32_t low = block[4 + g / 2] >> 4 * (g % 2) & 15,
             high = (uint32_t)td_load_u16(block + 2) >> 2 * g & 3;
    ret_group->d = td_load_u16(block);
    ret_group->scale[0] = ret_group->scale[1] = (uint8_t)(low + 16 * high - 32);
    td_split_nibbles(block + 8 + 16 * g, ret_group->codes);
}
