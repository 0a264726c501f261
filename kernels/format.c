/* format.c - the table of formats, and reading them back. */
#include "kernels/format.h"

#include <math.h>
#include <string.h>

#include "common/base/status.h"
#include "kernels/formats/formats.h"

static const struct td_format formats[] = {
    {.name = "F32", .dtype = TD_F32, .gguf_type = 0, .block = 1, .block_bytes = 4},
    {.name = "F16", .dtype = TD_F16, .gguf_type = 1, .block = 1, .block_bytes = 2},
    {.name = "BF16", .dtype = TD_BF16, .gguf_type = 30, .block = 1, .block_bytes = 2},
#define ROW(fn, label, number, n_values, n_bytes, n_bits, zero, stand_for, kind)                   \
    {.name = label,                                                                                \
     .gguf_type = number,                                                                          \
     .block = n_values,                                                                            \
     .block_bytes = n_bytes,                                                                       \
     .split = td_##fn##_split,                                                                     \
     .bits = n_bits,                                                                               \
     .offset = zero,                                                                               \
     .values = stand_for,                                                                          \
     .scales = kind,                                                                               \
     .index = TD_INDEX_##fn},
    TD_EACH_BLOCK_FORMAT(ROW)
#undef ROW
};

const struct td_format *td_format_of_dtype(enum td_dtype dtype)
{
    size_t i = 0;
    while (formats[i].dtype != dtype) TD_ASSERT(++i < sizeof formats / sizeof *formats);
    return &formats[i];
}

const struct td_format *td_format_of_gguf(uint32_t gguf_type)
{
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
        if (formats[i].gguf_type == gguf_type) return &formats[i];
    return NULL;
}

void td_group_read(const struct td_format *f, const struct td_group *g, float *ret_values)
{
    float d = td_f16_to_f32(g->d), m = td_f16_to_f32(g->m), scale[2] = {d, d}, min[2] = {0, 0};
    for (int h = 0; h < 2; h++) {
        switch (f->scales) {
        case TD_SCALES_F16:
            break;
        case TD_SCALES_F16_MIN:
            min[h] = -m;
            break;
        case TD_SCALES_E8M0:
            scale[h] = td_e8m0_half(g->d);
            break;
        case TD_SCALES_I8:
        case TD_SCALES_I8_HALVES:
            scale[h] = d * (float)(int8_t)g->scale[h];
            break;
        case TD_SCALES_U8_MIN:
        case TD_SCALES_U4_MIN_HALVES:
            scale[h] = d * (float)g->scale[h];
            min[h] = m * (float)g->min[h];
            break;
        }
    }
    for (int i = 0; i < TD_GROUP; i++) {
        int h = i / (TD_GROUP / 2);
        ret_values[i] = scale[h] * (float)td_code_value(f, g->codes[i]);
        if (f->scales == TD_SCALES_F16_MIN || f->scales >= TD_SCALES_U8_MIN)
            ret_values[i] -= min[h];
    }
}

void td_format_read(const struct td_format *f, const void *src, int64_t n_values, float *ret_values)
{
    const uint8_t *from = src;
    if (f->dtype == TD_F32) {
        memcpy(ret_values, src, (size_t)n_values * sizeof(float));
    } else if (f->dtype) {
        for (int64_t i = 0; i < n_values; i++) ret_values[i] = td_widen(src, f->dtype, i);
    } else {
        for (int64_t i = 0; i < n_values; i += f->block, from += f->block_bytes)
            for (int32_t g = 0; g < f->block / TD_GROUP; g++) {
                struct td_group group = {0};
                f->split(from, g, &group);
                td_group_read(f, &group, ret_values + i + g * TD_GROUP);
            }
    }
}

bool td_group_is_finite(const struct td_format *f, const struct td_group *group)
{
    const uint16_t exponent = 0x7c00;
    if (f->scales == TD_SCALES_E8M0) {
        if (group->d < 253) return true; /* 12 * 2^(252 - 128) is finite, and f16 times codes */
        float values[TD_GROUP];
        bool ok = group->d != 255;
        td_group_read(f, group, values);
        for (int i = 0; i < TD_GROUP; i++) ok &= isfinite(values[i]) != 0;
        return ok;
    }
    bool has_m = f->scales == TD_SCALES_F16_MIN || f->scales >= TD_SCALES_U8_MIN;
    return (group->d & exponent) != exponent && (!has_m || (group->m & exponent) != exponent);
}

void td_format_embed(const struct td_format *f, const void *table, const int32_t *ids,
                     int32_t n_rows, int32_t dim, int part, int n_parts, float *ret_rows)
{
    int64_t lo, hi;
    td_part_range(n_rows, 1, part, n_parts, &lo, &hi);
    for (int64_t r = lo; r < hi; r++)
        td_format_read(f, (const uint8_t *)table + td_format_bytes(f, (int64_t)ids[r] * dim), dim,
                       ret_rows + r * dim);
}
