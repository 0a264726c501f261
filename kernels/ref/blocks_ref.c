/* blocks_ref.c - the obvious product with weights in a block format: rows as in the file, integer
 * sums, and one chain of fused multiply-adds per output. Other tables must give the same bits. */
#include "kernels/blocks.h"
#include "kernels/formats/formats.h"
#include "kernels/part.h"
#include "kernels/ref/ref.h"

size_t td_ref_blocks_packed_bytes(int32_t n_out, int32_t n_in, const struct td_format *format)
{
    return ((size_t)n_out * td_format_bytes(format, n_in) + 63) & ~(size_t)63;
}

bool td_ref_blocks_pack(void *packed, int32_t n_out, int32_t n_in, const struct td_format *format,
                        const void *src, int32_t row0, int32_t n_rows)
{
    (void)n_out;
    bool is_finite = true;
    size_t row_bytes = td_format_bytes(format, n_in);
    memcpy((uint8_t *)packed + (size_t)row0 * row_bytes, src, (size_t)n_rows * row_bytes);
    const uint8_t *end = (const uint8_t *)src + (size_t)n_rows * row_bytes;
    for (const uint8_t *b = src; b < end; b += format->block_bytes) {
        struct td_group w = {0};
        format->split(b, 0, &w);
        is_finite &= td_group_is_finite(format, &w);
    }
    return is_finite;
}

void td_ref_blocks_read_row(const struct td_weight *w, int32_t row, float *ret_values)
{
    const uint8_t *data = w->data;
    td_format_read(w->format, data + (size_t)row * td_format_bytes(w->format, w->n_in), w->n_in,
                   ret_values);
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

/* One group of the chain: y after it. */
static float add_group(const struct td_format *f, const struct td_group *w,
                       const struct td_group_x *x, float y)
{
    int32_t half[2] = {0, 0}, sums[2] = {x->sum - x->sum_hi, x->sum_hi};
    float d = td_f16_to_f32(w->d), m = td_f16_to_f32(w->m);
    for (int i = 0; i < TD_GROUP; i++)
        half[i / (TD_GROUP / 2)] += td_code_value(f, w->codes[i]) * x->codes[i];
    int32_t sum = half[0] + half[1], low = w->min[0] * sums[0] + w->min[1] * sums[1];
    switch (f->scales) {
    case TD_SCALES_F16:
        return fmaf((float)sum, d * x->s, y);
    case TD_SCALES_F16_MIN:
        return fmaf(m, x->s_sum, fmaf((float)sum, d * x->s, y));
    case TD_SCALES_E8M0:
        return fmaf((float)sum, td_e8m0_half(w->d) * x->s, y);
    case TD_SCALES_I8:
        return fmaf((float)sum, d * (float)(int8_t)w->scale[0] * x->s, y);
    case TD_SCALES_I8_HALVES:
        sum = (int8_t)w->scale[0] * half[0] + (int8_t)w->scale[1] * half[1];
        return fmaf((float)sum, d * x->s, y);
    case TD_SCALES_U8_MIN:
        y = fmaf((float)sum, d * (float)w->scale[0] * x->s, y);
        return fmaf(-(m * (float)w->min[0]), x->s_sum, y);
    case TD_SCALES_U4_MIN_HALVES:
        sum = w->scale[0] * half[0] + w->scale[1] * half[1];
        return fmaf(-(float)low, m * x->s, fmaf((float)sum, d * x->s, y));
    }
    return y;
}

static float dot(const struct td_format *f, const uint8_t *row, const struct td_group_x *x,
                 int32_t n_groups)
{
    int32_t per_block = f->block / TD_GROUP;
    float y = 0;
    for (int32_t g = 0; g < n_groups; g++) {
        struct td_group w = {0};
        f->split(row + (size_t)(g / per_block) * (size_t)f->block_bytes, g % per_block, &w);
        y = add_group(f, &w, &x[g], y);
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
