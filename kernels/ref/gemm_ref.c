/* gemm_ref.c - the obvious matrix product: row-major weights, one double accumulator per output,
 * k ascending. */
#include "kernels/part.h"
#include "kernels/ref/ref.h"

size_t td_ref_packed_bytes(int32_t n_out, int32_t n_in, enum td_dtype dtype)
{
    size_t n = (size_t)n_out * (size_t)n_in * td_dtype_bytes(dtype);
    return (n + 63) & ~(size_t)63;
}

void td_ref_pack(void *packed, int32_t n_out, int32_t n_in, enum td_dtype dtype, const void *src,
                 enum td_dtype src_dtype, int32_t row0, int32_t n_rows)
{
    (void)n_out;
    int64_t first = (int64_t)row0 * n_in, n = (int64_t)n_rows * n_in;
    size_t elem = td_dtype_bytes(dtype);
    if (dtype == src_dtype) {
        memcpy((char *)packed + (size_t)first * elem, src, (size_t)n * elem);
        return;
    }
    TD_ASSERT(dtype != TD_F16); /* f16 storage is for f16 files alone */
    for (int64_t i = 0; i < n; i++) {
        float f = td_widen(src, src_dtype, i);
        if (dtype == TD_F32)
            ((float *)packed)[first + i] = f;
        else
            ((uint16_t *)packed)[first + i] = td_f32_to_bf16(f);
    }
}

size_t td_ref_gemm_scratch_bytes(int32_t n_rows, int32_t n_in)
{
    return ((size_t)n_rows * (size_t)n_in * sizeof(float) + 63) & ~(size_t)63;
}

void td_ref_gemm_prepare(const struct td_gemm_args *a, int part, int n_parts)
{
    int32_t n_in = a->w->n_in;
    int64_t lo, hi;
    td_part_range(a->n_rows, 1, part, n_parts, &lo, &hi);
    for (int64_t m = lo; m < hi; m++)
        for (int32_t k = 0; k < n_in; k++) {
            float v = a->x[m * a->x_stride + k];
            ((float *)a->scratch)[m * n_in + k] =
                a->w->format->dtype == TD_BF16 ? td_bf16_to_f32(td_f32_to_bf16(v)) : v;
        }
}

void td_ref_gemm(const struct td_gemm_args *a, int part, int n_parts)
{
    const struct td_weight *w = a->w;
    int64_t lo, hi;
    td_part_range(w->n_out, 1, part, n_parts, &lo, &hi);
    for (int64_t m = 0; m < a->n_rows; m++) {
        const float *x = (const float *)a->scratch + m * w->n_in;
        for (int64_t n = lo; n < hi; n++) {
            double dot = 0;
            for (int32_t k = 0; k < w->n_in; k++)
                dot += (double)x[k] * (double)td_widen(w->data, w->format->dtype, n * w->n_in + k);
            float v = (float)dot;
            if (a->bias) v = v + a->bias[n];
            float *y = &a->y[m * a->y_stride + n];
            *y = a->accumulate ? *y + v : v;
        }
    }
}
