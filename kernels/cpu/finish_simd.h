/* finish_simd.h - the end of every product: sums of a panel of 2 * VW outputs get bias and residual
 * and become y. Written in the vector operations that the includer defines (vec_avx512.h ...), and
 * one for plain weights, blocks and scaled formats, so that all add in one order: the sum, the
 * bias, then what y had. */
#ifndef TD_KERNELS_CPU_FINISH_SIMD_H
#define TD_KERNELS_CPU_FINISH_SIMD_H

#include "kernels/ops.h"

/* sums: n_rows rows of 2 * VW, those of rows [row, row + n_rows). Columns past n_out are not
 * written. */
static void finish(const struct td_gemm_args *a, int32_t panel, int32_t row, int32_t n_rows,
                   const float *sums)
{
    for (int h = 0; h < 2; h++) {
        int32_t n = (2 * panel + h) * VW, n_cols = a->w->n_out - n < VW ? a->w->n_out - n : VW;
        if (n_cols <= 0) break;
        vec bias = a->bias ? v_load_n(a->bias + n, n_cols) : v_zero();
        for (int32_t r = 0; r < n_rows; r++) {
            float *y = a->y + (row + r) * a->y_stride + n;
            vec v = v_load(sums + (2 * r + h) * VW);
            if (a->bias) v = v_add(v, bias);
            if (a->accumulate) v = v_add(v_load_n(y, n_cols), v);
            v_store_n(y, v, n_cols);
        }
    }
}

#endif
