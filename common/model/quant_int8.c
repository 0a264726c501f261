/* quant_int8.c - matrices of signed bytes with a scale for each row: "int-quantized" of
 * compressed-tensors (SmoothQuant: Xiao et al. 2022), LLM.int8() of bitsandbytes (Dettmers et al.
 * 2022).
 *
 *   weight  I8 [n_out, n_in]
 *   weight_scale [n_out, 1] or one number; or SCB F32 [n_out], 127 times the scale
 *   weight_format U8 (bitsandbytes): 0, rows in order */

#include "common/model/quant_internal.h"
#include "kernels/scaled.h"

static void read_rows(const struct td_quant_tensor *t, const struct td_format *cut, int32_t col0,
                      int32_t row0, int32_t n_rows, uint8_t *ret_rows)
{
    bool is_wide = cut->scaled.kind == TD_SCALED_INT; /* codes from 0 on, with a zero of 128 */
    for (int32_t i = 0; i < n_rows; i++) {
        struct td_scaled_row r = td_quant_clear_row(cut, ret_rows, i);
        int64_t n = row0 + i;
        const uint8_t *from = t->codes + n * t->n_in + col0;
        for (int32_t k = 0; k < cut->block; k++) r.codes[k] = is_wide ? from[k] ^ 0x80 : from[k];
        r.scales[0] = td_quant_scale(t, t->scale_rows ? n : 0) / t->scale_divisor;
    }
}

td_status td_quant_open_int8(const struct td_quant_open *o, struct td_quant_tensor *t)
{
    static const enum td_scaled_x xs[] = {[TD_QUANT_X_NONE] = TD_SCALED_X_F32,
                                          [TD_QUANT_X_ROW] = TD_SCALED_X_ROW,
                                          [TD_QUANT_X_OUTLIER] = TD_SCALED_X_OUTLIER};
    bool is_bnb = o->config->scheme == TD_QUANT_BNB8;
    const struct td_tensor *codes = td_quant_part(o, "weight"), *scales, *kind;
    char name[TD_TENSOR_FILE_NAME_BYTES];
    td_status s = td_quant_check_bytes(o, codes, t);
    if (s) return s;
    t->read_rows = read_rows;
    t->format.scaled.x = xs[o->config->x];
    t->format.scaled.kind = o->config->x == TD_QUANT_X_NONE ? TD_SCALED_INT : TD_SCALED_I8;
    t->format.offset = 128;
    t->scale_rows = 1;
    t->scale_divisor = 1;
    if ((s = td_quant_set_groups(o, t, 0))) return s;
    if (t->format.scaled.kind == TD_SCALED_I8 && t->n_in > TD_SCALED_COLS_MAX)
        return td_fail(o->err, TD_ERR_LIMIT, "%s: tensor %s has %d columns, must be at most %d",
                       o->what, td_quant_name_of(o, codes, name), t->n_in, TD_SCALED_COLS_MAX);
    if (is_bnb) {
        if ((s = td_quant_need(o, "SCB", "F32", t->n_out, 0, &scales))) return s;
        t->scale_divisor = 127;
        if ((kind = td_quant_part(o, "weight_format")) && (kind->n_bytes != 1 || kind->data[0]))
            return td_fail(o->err, TD_ERR_UNSUPPORTED,
                           "%s: tensor %s must be the byte 0 (rows in order)", o->what,
                           td_quant_name_of(o, kind, name));
    } else if ((scales = td_quant_find(o, "weight_scale")) && scales->n_dims < 2 &&
               (scales->n_dims == 0 || scales->shape[0] == 1)) {
        if (!scales->format || !scales->format->dtype)
            return td_fail(o->err, TD_ERR_CORRUPT,
                           "%s: tensor %s has dtype %s, must be F32, F16 or BF16", o->what,
                           td_quant_name_of(o, scales, name), scales->dtype_name);
        td_quant_part(o, "weight_scale");
        t->scale_rows = 0;
    } else if ((s = td_quant_need(o, "weight_scale", NULL, t->n_out, 1, &scales))) {
        return s;
    }
    t->scales = scales->data;
    t->scales_type = scales->format->dtype;
    return TD_OK;
}
