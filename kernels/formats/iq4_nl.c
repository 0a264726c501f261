/* iq4_nl.c - IQ4_NL: 32 values in 18 bytes. 0: d (f16), 2: 16 bytes of nibbles, which number the
 * entries of td_values_iq4; value = d * entry. */
#include "kernels/formats/fit.h"
#include "kernels/formats/write.h"

const int8_t td_values_iq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                  1,    13,   25,  38,  53,  69,  89,  113};

void td_iq4_nl_split(const uint8_t *block, int32_t g, struct td_group *ret_group)
{
    (void)g;
    ret_group->d = td_load_u16(block);
    td_split_nibbles(block + 2, ret_group->codes);
}

void td_iq4_nl_write(const float *values, uint8_t *ret_block)
{
    uint8_t codes[TD_GROUP];
    td_store_f16(ret_block, td_fit_iq4(values));
    float inverse = td_inverse(td_f16_to_f32(td_load_u16(ret_block)));
    for (int i = 0; i < TD_GROUP; i++) codes[i] = td_nearest_iq4(values[i] * inverse);
    td_join_nibbles(codes, ret_block + 2);
}
