/* quant_bnb4.c - matrices of 4-bit codes of bitsandbytes, NF4 and FP4 (QLoRA: Dettmers et al.
 * 2023).
 *
 *   weight             U8 [n_out * n_in / 2, 1]: codes of the flattened matrix, the first in the
 *                      high half
 *   weight.quant_map   F32 [16]: what the codes stand for
 *   weight.absmax      F32 [blocks]: a block is 64 (blocksize) codes of the flattened matrix.
 *                      Double quantised: U8 [blocks], codes of
 *   weight.nested_quant_map  F32 [256], times
 *   weight.nested_absmax     F32 [blocks / 256], plus an offset of the state
 *   weight.quant_state.bitsandbytes__nf4 (or fp4): a JSON text as U8 [bytes] */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "common/base/json.h"
#include "common/model/quant_internal.h"

#define STATE_BYTES_MAX 4096

static float f32_at(const uint8_t *p, int64_t i)
{
    uint32_t u = td_quant_word(p, i);
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

static float scale_of(const struct td_quant_tensor *t, int64_t block)
{
    if (!t->nested_map) return f32_at(t->scales, block);
    return f32_at(t->nested_map, t->scales[block]) *
               f32_at(t->nested_scales, block / t->nested_block) +
           t->nested_offset;
}

static void read_rows(const struct td_quant_tensor *t, const struct td_format *cut, int32_t col0,
                      int32_t row0, int32_t n_rows, uint8_t *ret_rows)
{
    int32_t g0 = td_quant_first_group(t, col0), n_groups = t->format.scaled.n_groups;
    for (int32_t i = 0; i < n_rows; i++) {
        struct td_scaled_row r = td_quant_clear_row(cut, ret_rows, i);
        int64_t n = row0 + i, first = n * t->n_in + col0;
        for (int32_t k = 0; k < cut->block; k++) {
            int64_t e = first + k;
            r.codes[k] = (uint8_t)(t->codes[e / 2] >> (e % 2 ? 0 : 4) & 15);
        }
        for (int32_t g = 0; g < cut->scaled.n_groups; g++)
            r.scales[g] = scale_of(t, n * n_groups + g0 + g);
    }
}

struct state {
    int64_t n_out, n_in, block, nested_block;
    double nested_offset;
    bool is_nested;
};

static td_status parse_state(const struct td_quant_open *o, const char *what, const json_t *root,
                             struct state *ret)
{
    const json_t *shape = json_object_get(root, "shape");
    const char *type = NULL;
    bool present;
    td_status s;
    if (!json_is_object(root) || json_array_size(shape) != 2)
        return td_fail(o->err, TD_ERR_CORRUPT, "%s must be an object with a shape of 2 numbers",
                       what);
    ret->n_out = json_integer_value(json_array_get(shape, 0));
    ret->n_in = json_integer_value(json_array_get(shape, 1));
    if (ret->n_out < 1 || ret->n_in < 1 || ret->n_out > INT32_MAX / 2 || ret->n_in > INT32_MAX / 2)
        return td_fail(o->err, TD_ERR_CORRUPT,
                       "%s: shape [%" PRId64 ", %" PRId64 "], must be integers in 1..2^30", what,
                       ret->n_out, ret->n_in);
    if ((s = td_json_i64(root, what, "blocksize", 32, 4096, &ret->block, &present, o->err)) ||
        (s = td_json_str(root, what, "quant_type", &type, NULL, o->err)))
        return s;
    if (!present || !type || strcmp(type, o->config->name) != 0)
        return td_fail(o->err, TD_ERR_CORRUPT, "%s: must have a blocksize, and quant_type %s", what,
                       o->config->name);
    /* a power of two, as the library writes: whole bytes of codes, and whole fours of a group */
    if (ret->block & (ret->block - 1))
        return td_fail(o->err, TD_ERR_UNSUPPORTED,
                       "%s: blocksize is %" PRId64 ", must be a power of two", what, ret->block);
    if ((s = td_json_i64(root, what, "nested_blocksize", 32, 4096, &ret->nested_block,
                         &ret->is_nested, o->err)))
        return s;
    return td_json_f64(root, what, "nested_offset", -1e6, 1e6, &ret->nested_offset, NULL, o->err);
}

static td_status read_state(const struct td_quant_open *o, struct state *ret)
{
    char suffix[64], what[200], name[TD_TENSOR_FILE_NAME_BYTES];
    json_t *root;
    snprintf(suffix, sizeof suffix, "weight.quant_state.bitsandbytes__%s", o->config->name);
    const struct td_tensor *t = td_quant_part(o, suffix);
    snprintf(what, sizeof what, "tensor %s", td_quant_part_name(o, suffix, name));
    if (!t || strcmp(t->dtype_name, "U8") != 0 || t->n_bytes > STATE_BYTES_MAX)
        return td_fail(o->err, TD_ERR_CORRUPT, "%s: %s is %s, must be a text of at most %d bytes",
                       o->what, what, t ? "no text" : "missing", STATE_BYTES_MAX);
    td_status s = td_json_load_text((const char *)t->data, (size_t)t->n_bytes, what, &root, o->err);
    if (s) return s;
    s = parse_state(o, what, root, ret);
    json_decref(root);
    return s;
}

/* A table of numbers, all finite. */
static td_status need_numbers(const struct td_quant_open *o, const char *suffix, int64_t n,
                              const struct td_tensor **ret)
{
    char name[TD_TENSOR_FILE_NAME_BYTES];
    td_status s = td_quant_need(o, suffix, "F32", n, 0, ret);
    for (int64_t i = 0; i < n && !s; i++)
        if (!isfinite(f32_at((*ret)->data, i)))
            s = td_fail(o->err, TD_ERR_CORRUPT, "%s: tensor %s: number %" PRId64 " is not finite",
                        o->what, td_quant_name_of(o, *ret, name), i);
    return s;
}

static td_status open_scales(const struct td_quant_open *o, const struct state *state,
                             struct td_quant_tensor *t)
{
    int64_t n_blocks = state->n_out * (state->n_in / state->block);
    const struct td_tensor *absmax, *map, *nested;
    td_status s =
        td_quant_need(o, "weight.absmax", state->is_nested ? "U8" : "F32", n_blocks, 0, &absmax);
    if (s) return s;
    t->scales = absmax->data;
    t->scales_type = TD_F32;
    if (!state->is_nested) return TD_OK;
    int64_t n_nested = (n_blocks + state->nested_block - 1) / state->nested_block;
    if ((s = need_numbers(o, "weight.nested_quant_map", 256, &map)) ||
        (s = need_numbers(o, "weight.nested_absmax", n_nested, &nested)))
        return s;
    t->nested_map = map->data;
    t->nested_scales = nested->data;
    t->nested_block = (int32_t)state->nested_block;
    t->nested_offset = (float)state->nested_offset;
    return TD_OK;
}

td_status td_quant_open_bnb4(const struct td_quant_open *o, struct td_quant_tensor *t)
{
    const struct td_tensor *codes = td_quant_part(o, "weight"), *map;
    char name[TD_TENSOR_FILE_NAME_BYTES];
    struct state state = {0};
    td_status s = read_state(o, &state);
    if (s) return s;
    int64_t n = state.n_out * state.n_in;
    if (state.n_in % state.block || codes->n_bytes != (uint64_t)n / 2)
        return td_fail(o->err, TD_ERR_UNSUPPORTED,
                       "%s: tensor %s has %" PRIu64 " bytes for [%" PRId64 ", %" PRId64
                       "] in blocks of %" PRId64 ": must be half as many bytes, and columns whole "
                       "blocks",
                       o->what, td_quant_name_of(o, codes, name), codes->n_bytes, state.n_out,
                       state.n_in, state.block);
    *t = (struct td_quant_tensor){.n_out = (int32_t)state.n_out,
                                  .n_in = (int32_t)state.n_in,
                                  .bits = 4,
                                  .codes = codes->data,
                                  .read_rows = read_rows};
    t->format.scaled.kind = TD_SCALED_TABLE;
    if ((s = td_quant_set_groups(o, t, (int32_t)state.block)) ||
        (s = need_numbers(o, "weight.quant_map", 16, &map)) || (s = open_scales(o, &state, t)))
        return s;
    for (int i = 0; i < 16; i++) t->format.scaled.table[i] = f32_at(map->data, i);
    return TD_OK;
}
