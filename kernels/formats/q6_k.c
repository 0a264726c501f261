/* q6_k.c - Q6_K: 256 values in 210 bytes. 0: 128 bytes with the low 4 bits, 128: 64 bytes with the
 * high 2, 192: 16 signed scales, 208: d (f16); value = d * scale * (code - 32). Of each 128 values,
 * byte l of a run of 64 holds the low bits of l and l + 64; byte l of 32 the high ones of l, l +
 * 32, l + 64, l + 96. */
#include "kernels/formats/formats.h"

void td_q6_k_split(const uint8_t *block, int32_t g, struct td_group *ret_group)
{
    const uint8_t *low = block + g / 4 * 64 + g % 2 * 32, *high = block + 128 + g / 4 * 32;
    ret_group->d = td_load_u16(block + 208);
    memcpy(ret_group->scale, block + 192 + 2 * g, 2);
    for (int i = 0; i < TD_GROUP; i++)
        ret_group->codes[i] =
            (uint8_t)((low[i] >> 4 * (g % 4 / 2) & 15) | (high[i] >> 2 * (g % 4) & 3) << 4);
}
