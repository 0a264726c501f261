/* quant_fp8.c - matrices of 8-bit floats (E4M3): "float-quantized" of compressed-tensors, "fp8" of
 * transformers and of DeepSeek's models, modelopt's FP8.
 *
 *   weight       F8_E4M3 [n_out, n_in]
 *   weight_scale, or weight_scale_inv (a factor, too, whatever its name): one for the matrix, one
 *                for each row, or one for each block of rows x columns; F32, F16 or BF16, or powers
 *                of two as their exponents, F8_E8M0
 *   input_scale, or activation_scale: one number, where activations have a fixed scale
 *
 * Where q, k and v (or gate and up) have a scale each, each keeps its own. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "common/model/quant_internal.h"

static void read_rows(const struct td_quant_tensor *t, const struct td_format *cut, int32_t col0,
                      int32_t row0, int32_t n_rows, uint8_t *ret_rows)
{
    int32_t g0 = td_quant_first_group(t, col0), n_groups = t->format.scaled.n_groups;
    for (int32_t i = 0; i < n_rows; i++) {
        struct td_scaled_row r = td_quant_clear_row(cut, ret_rows, i);
        int64_t n = row0 + i;
        memcpy(r.codes, t->codes + n * t->n_in + col0, (size_t)cut->block);
        for (int32_t g = 0; g < cut->scaled.n_groups; g++)
            r.scales[g] =
                td_quant_scale(t, t->scale_rows ? n / t->scale_rows * n_groups + g0 + g : 0);
    }
}

/* One of two names; only the first is required to be known to all. */
static const struct td_tensor *either(const struct td_quant_open *o, const char *a, const char *b)
{
    const struct td_tensor *t = td_quant_part(o, a);
    return t ? t : td_quant_part(o, b);
}

static bool has_one_number(const struct td_tensor *t)
{
    return t->n_dims == 0 || (t->n_dims == 1 && t->shape[0] == 1) ||
           (t->n_dims == 2 && t->shape[0] == 1 && t->shape[1] == 1);
}

static td_status read_scales(const struct td_quant_open *o, struct td_quant_tensor *t)
{
    const struct td_quant_config *c = o->config;
    const struct td_tensor *s = either(o, "weight_scale", "weight_scale_inv");
    char name[TD_TENSOR_FILE_NAME_BYTES], codes[TD_TENSOR_FILE_NAME_BYTES];
    if (!s)
        return td_fail(o->err, TD_ERR_CORRUPT, "%s: tensor %s is missing", o->what,
                       td_quant_part_name(o, "weight_scale", name));
    t->scales_are_e8m0 = strcmp(s->dtype_name, "F8_E8M0") == 0;
    if (!t->scales_are_e8m0 && (!s->format || !s->format->dtype))
        return td_fail(o->err, TD_ERR_UNSUPPORTED,
                       "%s: tensor %s has dtype %s, must be F32, F16, BF16 or F8_E8M0", o->what,
                       td_quant_name_of(o, s, name), s->dtype_name);
    int64_t rows = c->block_rows ? (t->n_out + c->block_rows - 1) / c->block_rows : t->n_out,
            cols = t->format.scaled.n_groups;
    bool is_row =
        s->shape[0] == t->n_out && (s->n_dims == 1 || (s->n_dims == 2 && s->shape[1] == 1));
    if (c->block_rows && s->n_dims == 2 && s->shape[0] == rows && s->shape[1] == cols)
        t->scale_rows = c->block_rows;
    else if (!c->block_rows && s->n_dims > 0 && is_row)
        t->scale_rows = 1;
    else if (c->block_rows || !has_one_number(s))
        return td_fail(o->err, TD_ERR_CORRUPT,
                       "%s: tensor %s must have %s%" PRId64 ", %" PRId64 "] numbers beside %s",
                       o->what, td_quant_name_of(o, s, name),
                       c->block_rows ? "[" : "one number or [", rows, cols,
                       td_quant_part_name(o, "weight", codes));
    t->scales = s->data;
    t->scales_type = t->scales_are_e8m0 ? TD_BF16 : s->format->dtype;
    return TD_OK;
}

/* The fixed scale of the activations. */
static td_status read_input_scale(const struct td_quant_open *o, struct td_quant_tensor *t)
{
    const struct td_tensor *s = either(o, "input_scale", "activation_scale");
    char name[TD_TENSOR_FILE_NAME_BYTES];
    bool is_static = o->config->x == TD_QUANT_X_STATIC;
    if (!s != !is_static)
        return td_fail(o->err, TD_ERR_CORRUPT,
                       "%s: tensor %s is %s, but quantization_config says that activations are "
                       "scaled %s",
                       o->what, td_quant_part_name(o, "input_scale", name), s ? "there" : "missing",
                       is_static ? "by it" : "as they come");
    if (!s) return TD_OK;
    if (!s->format || !s->format->dtype || !has_one_number(s))
        return td_fail(o->err, TD_ERR_UNSUPPORTED,
                       "%s: tensor %s must be one number of F32, F16 or BF16", o->what,
                       td_quant_name_of(o, s, name));
    struct td_quant_tensor one = {.scales = s->data, .scales_type = s->format->dtype};
    float v = td_quant_scale(&one, 0);
    if (!(v > 0) || !isfinite(v))
        return td_fail(o->err, TD_ERR_CORRUPT, "%s: tensor %s is %g, must be above 0 and finite",
                       o->what, td_quant_name_of(o, s, name), (double)v);
    t->format.scaled.x_scale = v;
    return TD_OK;
}

td_status td_quant_open_fp8(const struct td_quant_open *o, struct td_quant_tensor *t)
{
    static const enum td_scaled_x xs[] = {[TD_QUANT_X_NONE] = TD_SCALED_X_F32,
                                          [TD_QUANT_X_ROW] = TD_SCALED_X_ROW,
                                          [TD_QUANT_X_STATIC] = TD_SCALED_X_STATIC,
                                          [TD_QUANT_X_GROUP] = TD_SCALED_X_GROUP};
    const struct td_tensor *codes = td_quant_part(o, "weight");
    td_status s = td_quant_check_bytes(o, codes, t);
    if (s) return s;
    t->read_rows = read_rows;
    t->format.scaled.kind = TD_SCALED_E4M3;
    t->format.scaled.x = xs[o->config->x];
    t->format.scaled.x_powers = o->config->x_powers;
    if ((s = td_quant_set_groups(o, t, o->config->group)) || (s = read_scales(o, t))) return s;
    return read_input_scale(o, t);
}
