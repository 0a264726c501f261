/* quant_awq.c - AWQ: Lin et al. 2023, in the layout "gemm" that AutoAWQ writes. The scales that the
 * method searches are already part of the weights.
 *
 *   qweight  I32 [n_in, n_out / 8]      output n: nibble place[n % 8] of word n / 8
 *   qzeros   I32 [groups, n_out / 8]    likewise
 *   scales   F16 [groups, n_out] */
#include <string.h>

#include "common/model/quant_internal.h"
#include "kernels/scaled.h"

static uint32_t nibble(const uint8_t *words, int64_t row, int32_t n_words, int32_t n)
{
    static const uint8_t place[8] = {0, 4, 1, 5, 2, 6, 3, 7};
    return td_quant_word(words, row * n_words + n / 8) >> 4 * place[n % 8] & 15;
}

static void read_rows(const struct td_quant_tensor *t, const struct td_format *cut, int32_t col0,
                      int32_t row0, int32_t n_rows, uint8_t *ret_rows)
{
    int32_t g0 = td_quant_first_group(t, col0), n_words = t->n_out / 8;
    size_t row_bytes = (size_t)cut->block_bytes;
    memset(ret_rows, 0, (size_t)n_rows * row_bytes);
    for (int32_t k = 0; k < cut->block; k++)
        for (int32_t i = 0; i < n_rows; i++)
            ret_rows[(size_t)i * row_bytes + (size_t)k] =
                (uint8_t)nibble(t->codes, col0 + k, n_words, row0 + i);
    for (int32_t i = 0; i < n_rows; i++) {
        struct td_scaled_row r = td_scaled_row_at(cut, ret_rows + (size_t)i * row_bytes);
        for (int32_t g = 0; g < cut->scaled.n_groups; g++) {
            r.scales[g] = td_quant_scale(t, (int64_t)(g0 + g) * t->n_out + row0 + i);
            r.zeros[g] = (uint8_t)nibble(t->zeros, g0 + g, n_words, row0 + i);
        }
    }
}

td_status td_quant_open_awq(const struct td_quant_open *o, struct td_quant_tensor *t)
{
    const struct td_tensor *codes = td_quant_part(o, "qweight"), *zeros, *scales;
    char name[TD_TENSOR_FILE_NAME_BYTES];
    int64_t n_in = codes->shape[0], n_words = codes->shape[1];
    if (strcmp(codes->dtype_name, "I32") != 0 || codes->n_dims != 2 || n_in < 1 || n_words < 1 ||
        n_in > INT32_MAX / 2 || n_words > INT32_MAX / 16)
        return td_fail(o->err, TD_ERR_CORRUPT, "%s: tensor %s must be I32 [columns, rows / 8]",
                       o->what, td_quant_name_of(o, codes, name));
    *t = (struct td_quant_tensor){.n_out = (int32_t)n_words * 8,
                                  .n_in = (int32_t)n_in,
                                  .bits = 4,
                                  .codes = codes->data,
                                  .read_rows = read_rows};
    t->format.scaled.kind = TD_SCALED_INT;
    t->format.scaled.has_zeros = true;
    td_status s = td_quant_set_groups(o, t, o->config->group);
    if (s) return s;
    int32_t n_groups = t->format.scaled.n_groups;
    if ((s = td_quant_need(o, "qzeros", "I32", n_groups, n_words, &zeros)) ||
        (s = td_quant_need(o, "scales", NULL, n_groups, t->n_out, &scales)))
        return s;
    t->zeros = zeros->data;
    t->scales = scales->data;
    t->scales_type = scales->format->dtype;
    return TD_OK;
}
