/* mxfp4.c - MXFP4: 32 values in 17 bytes. 0: e (a power of two, E8M0), 1: 16 bytes of nibbles,
 * which are numbers of 4 bits (E2M1); value = 2^(e - 128) * twice that number. e = 255 is no
 * number. */
#include "kernels/formats/write.h"

const int8_t td_values_mxfp4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

void td_mxfp4_split(const uint8_t *block, int32_t g, struct td_group *ret_group)
{
    (void)g;
    ret_group->d = block[0];
    td_split_nibbles(block + 1, ret_group->codes);
}

/* The scale that the OCP's MX specification has, and ggml: of the value of largest magnitude the
 * power of two becomes that of 4, the largest that E2M1 has. Values go to the nearest code, from
 * the middle to that of smaller magnitude, as gguf-py's search does. */
void td_mxfp4_write(const float *values, uint8_t *ret_block)
{
    static const float middles[7] = {0.5f, 1.5f, 2.5f, 3.5f, 5, 7, 10};
    uint8_t codes[TD_GROUP];
    int exponent = 0;
    float largest = fabsf(td_largest(values, TD_GROUP));
    frexpf(largest, &exponent); /* largest = [0.5, 1) * 2^exponent */
    int e = largest > 0 ? exponent - 1 - 2 + 127 : 0;
    ret_block[0] = (uint8_t)(e < 0 ? 0 : e);
    float scale = td_e8m0_half(ret_block[0]);
    for (int i = 0; i < TD_GROUP; i++) {
        float v = fabsf(values[i]);
        uint8_t code = 0;
        for (int k = 0; k < 7; k++) code += v > middles[k] * scale;
        codes[i] = (uint8_t)(code ? code | (values[i] < 0) << 3 : 0);
    }
    td_join_nibbles(codes, ret_block + 1);
}
