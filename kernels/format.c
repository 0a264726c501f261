/* format.c - the table of formats. */
#include "kernels/format.h"

#include <string.h>

#include "common/base/status.h"
#include "kernels/formats/formats.h"

static const struct td_format formats[] = {
    {.name = "F32", .dtype = TD_F32, .gguf_type = 0, .block = 1, .block_bytes = 4},
    {.name = "F16", .dtype = TD_F16, .gguf_type = 1, .block = 1, .block_bytes = 2},
    {.name = "BF16", .dtype = TD_BF16, .gguf_type = 30, .block = 1, .block_bytes = 2},
#define ROW(fn, label, number, n_values, n_bytes, n_bits, zero, kind)                              \
    {.name = label,                                                                                \
     .gguf_type = number,                                                                          \
     .block = n_values,                                                                            \
     .block_bytes = n_bytes,                                                                       \
     .read = td_##fn##_read,                                                                       \
     .split = td_##fn##_split,                                                                     \
     .bits = n_bits,                                                                               \
     .offset = zero,                                                                               \
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

void td_format_read(const struct td_format *f, const void *src, int64_t n_values, float *ret_values)
{
    const uint8_t *from = src;
    if (!f->dtype)
        for (int64_t i = 0; i < n_values; i += f->block, from += f->block_bytes)
            f->read(from, ret_values + i);
    else if (f->dtype == TD_F32)
        memcpy(ret_values, src, (size_t)n_values * sizeof(float));
    else
        for (int64_t i = 0; i < n_values; i++) ret_values[i] = td_widen(src, f->dtype, i);
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
