/* mxfp4.c - MXFP4: 32 values in 17 bytes. 0: e (a power of two, E8M0), 1: 16 bytes of nibbles,
 * which are numbers of 4 bits (E2M1); value = 2^(e - 128) * twice that number. e = 255 is no
 * number. */
#include "kernels/formats/formats.h"

const int8_t td_values_mxfp4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

void td_mxfp4_split(const uint8_t *block, int32_t g, struct td_group *ret_group)
{
    (void)g;
    ret_group->d = block[0];
    td_split_nibbles(block + 1, ret_group->codes);
}
