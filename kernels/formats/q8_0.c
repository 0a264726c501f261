/* q8_0.c - Q8_0: 32 values in 34 bytes. 0: d (f16), 2: 32 signed bytes q; value = d * q. */
#include "kernels/formats/formats.h"

void td_q8_0_split(const uint8_t *block, int32_t g, struct td_group *ret_group)
{
    (void)g;
    ret_group->d = td_load_u16(block);
    memcpy(ret_group->codes, block + 2, TD_GROUP);
}
