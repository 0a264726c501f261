/* blocks_ref.c - the obvious product with weights in a block format: rows as in the file, integer
 * sums, and one chain of fused multiply-adds per output. Other tables must give the same bits. */
#include "kernels/blocks.h"
#include "kernels/format.h"
#include "kernels/part.h"
#include "kernels/ref/ref.h"

size_t td_ref_blocks_packed_bytes(int32_t n_out, int32_t n_in, const struct td_format *format)
{
    return ((size_t)n_out * td_format_bytes(format, n_in) + 63) & ~(size_t)63;
}

void td_ref_blocks_pack(void *packed, int32_t n_out, int32_t n_in, const struct td_format *format,
                        const void *src, int32_t row0, int32_t n_rows)
{
    (void)n_out;
    size_t row_bytes = td_format_bytes(format, n_in);
    memcpy((uint8_t *)packed + (size_t)row0 * row_bytes, src, (size_t)n_rows * row_bytes);
}

size_t td_ref_blocks_scratch_bytes(int32_t n_rows, int32_t n_in)
{
    return td_blocks_scratch_bytes(n_rows, n_in);
}

void td_ref_blocks_prepare(const struct td_gemm_args *a, int part, int n_parts)
{
    int64_t lo, hi;
    int32_t n_groups = a->w->n_in / TD_GROUP;
    td_part_range(a->n_rows, 1, part, n_parts, &lo, &hi);
    for (int64_t m = lo; m < hi; m++)
        for (int32_t g = 0; g < n_groups; g++)
            td_group_x_make(a->x + m * a->x_stride + g * TD_GROUP,
                            (struct td_group_x *)a->scratch + m * n_groups + g);
}

/* What a code stands for. */
static int32_t value_of(const struct td_format *f, uint8_t code)
{
    return f->bits == 8 ? (int8_t)code : code - f->offset;
}

static float dot(const struct td_format *f, const uint8_t *row, const struct td_group_x *x,
                 int32_t n_groups)
{
    int32_t per_block = f->block / TD_GROUP;
    float y = 0;
    for (int32_t g = 0; g < n_groups; g++) {
        struct td_group w;
        f->split(row + (size_t)(g / per_block) * (size_t)f->block_bytes, g % per_block, &w);
        int32_t sum = 0;
        for (int i = 0; i < TD_GROUP; i++) sum += value_of(f, w.codes[i]) * x[g].codes[i];
        y = fmaf((float)sum, td_f16_to_f32(w.d) * x[g].s, y);
    }
    return y;
}

void td_ref_blocks_gemm(const struct td_gemm_args *a, int part, int n_parts)
{
    const struct td_weight *w = a->w;
    size_t row_bytes = td_format_bytes(w->format, w->n_in);
    int64_t lo, hi;
    td_part_range(w->n_out, 1, part, n_parts, &lo, &hi);
    for (int64_t m = 0; m < a->n_rows; m++)
        for (int64_t n = lo; n < hi; n++) {
            float v = dot(w->format, (const uint8_t *)w->data + (size_t)n * row_bytes,
                          td_blocks_row(a, m), w->n_in / TD_GROUP);
            if (a->bias) v = v + a->bias[n];
            float *y = &a->y[m * a->y_stride + n];
            *y = a->accumulate ? *y + v : v;
        }
}
