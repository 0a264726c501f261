/* quant_packed.c - "pack-quantized" of compressed-tensors: integer weights of 4 or 8 bits.
 *
 *   weight_packed      I32 [n_out, n_in * bits / 32]       code k: bits k * bits of the row
 *   weight_scale       [n_out, groups]
 *   weight_zero_point  I32 [n_out * bits / 32, groups]     packed along the rows; asymmetric only
 *   weight_g_idx       I32 [n_in]                          the group of each column (act order)
 *   weight_shape       I64 or I32 [2]                      n_out, n_in
 *
 * A value is (code - zero) * scale: codes and zeros have the same 2^(bits - 1) added, and without
 * zeros that is the zero. */
#include <inttypes.h>
#include <string.h>

#include "common/model/quant_internal.h"

static uint32_t code_at(const struct td_quant_tensor *t, const uint8_t *words, int64_t i)
{
    int32_t per = 32 / t->bits;
    return td_quant_word(words, i / per) >> i % per * t->bits & (t->bits == 4 ? 15u : 255u);
}

static void read_rows(const struct td_quant_tensor *t, const struct td_format *cut, int32_t col0,
                      int32_t row0, int32_t n_rows, uint8_t *ret_rows)
{
    int32_t g0 = td_quant_first_group(t, col0), per = 32 / t->bits,
            n_groups = t->format.scaled.n_groups;
    int64_t row_words = (t->n_in + per - 1) / per;
    for (int32_t i = 0; i < n_rows; i++) {
        struct td_scaled_row r = td_quant_clear_row(cut, ret_rows, i);
        int64_t n = row0 + i;
        const uint8_t *row = t->codes + 4 * n * row_words;
        for (int32_t k = 0; k < cut->block; k++) r.codes[k] = (uint8_t)code_at(t, row, col0 + k);
        for (int32_t g = 0; g < cut->scaled.n_groups; g++) {
            r.scales[g] = td_quant_scale(t, n * n_groups + g0 + g);
            if (!t->zeros) continue;
            uint32_t word = td_quant_word(t->zeros, n / per * n_groups + g0 + g);
            r.zeros[g] = (uint8_t)(word >> n % per * t->bits & (t->bits == 4 ? 15u : 255u));
        }
    }
}

/* weight_shape: how many rows, and how many columns before they were filled up to whole words. */
static td_status read_shape(const struct td_quant_open *o, const struct td_tensor *codes,
                            struct td_quant_tensor *t)
{
    const struct td_tensor *shape = td_quant_part(o, "weight_shape");
    char name[TD_TENSOR_FILE_NAME_BYTES], codes_name[TD_TENSOR_FILE_NAME_BYTES];
    int64_t v[2], per = 32 / o->config->bits;
    if (!shape)
        return td_fail(o->err, TD_ERR_CORRUPT, "%s: tensor %s is missing", o->what,
                       td_quant_part_name(o, "weight_shape", name));
    bool wide = strcmp(shape->dtype_name, "I64") == 0;
    if ((!wide && strcmp(shape->dtype_name, "I32") != 0) || shape->n_dims != 1 ||
        shape->shape[0] != 2)
        return td_fail(o->err, TD_ERR_CORRUPT, "%s: tensor %s must be I64 [2]", o->what,
                       td_quant_name_of(o, shape, name));
    for (int i = 0; i < 2; i++)
        v[i] = wide ? (int64_t)((uint64_t)td_quant_word(shape->data, 2 * i) |
                                (uint64_t)td_quant_word(shape->data, 2 * i + 1) << 32)
                    : (int64_t)(int32_t)td_quant_word(shape->data, i);
    if (strcmp(codes->dtype_name, "I32") != 0 || codes->n_dims != 2 || v[0] < 1 || v[1] < 1 ||
        v[0] > INT32_MAX / 2 || v[1] > INT32_MAX / 2 || codes->shape[0] != v[0] ||
        codes->shape[1] != (v[1] + per - 1) / per)
        return td_fail(o->err, TD_ERR_CORRUPT,
                       "%s: tensor %s is [%" PRId64 ", %" PRId64 "], and %s says [%" PRId64
                       ", %" PRId64 "]: must be I32 [rows, columns / %d]",
                       o->what, td_quant_name_of(o, codes, codes_name), codes->shape[0],
                       codes->shape[1], td_quant_name_of(o, shape, name), v[0], v[1], (int)per);
    t->n_out = (int32_t)v[0];
    t->n_in = (int32_t)v[1];
    return TD_OK;
}

td_status td_quant_open_packed(const struct td_quant_open *o, struct td_quant_tensor *t)
{
    const struct td_quant_config *c = o->config;
    const struct td_tensor *codes = td_quant_part(o, "weight_packed"), *scales, *zeros;
    *t = (struct td_quant_tensor){.bits = c->bits, .codes = codes->data, .read_rows = read_rows};
    td_status s = read_shape(o, codes, t);
    if (s) return s;
    t->format.scaled.kind = TD_SCALED_INT;
    t->format.scaled.has_zeros = !c->symmetric;
    t->format.offset = 1 << (c->bits - 1);
    if ((s = td_quant_set_groups(o, t, c->group))) return s;
    int32_t n_groups = t->format.scaled.n_groups, per = 32 / c->bits;
    if ((s = td_quant_need(o, "weight_scale", NULL, t->n_out, n_groups, &scales))) return s;
    t->scales = scales->data;
    t->scales_type = scales->format->dtype;
    if (!c->symmetric) {
        if ((s = td_quant_need(o, "weight_zero_point", "I32", (t->n_out + per - 1) / per, n_groups,
                               &zeros)))
            return s;
        t->zeros = zeros->data;
    }
    return td_quant_order(o, "weight_g_idx", t);
}
