/* quant_codes.h - activations rounded to 8 bits, and the products of codes (quant_codes.cu). */
#ifndef TD_KERNELS_CUDA_QUANT_CODES_H
#define TD_KERNELS_CUDA_QUANT_CODES_H

#include "kernels/cuda/gemm.h"

/* Prepared rows of a quantised weight in a product's scratch: bf16, and where the format's packed
 * form is rows (quant.h) their codes and scales. Rows of bf16 and of codes are `stride` elements
 * apart, with zeros behind n_in. */
struct td_quant_x {
    uint16_t *bf16;
    uint8_t *codes;
    float *scales;
    uint8_t *rest; /* what is behind, 256-byte aligned: `bytes` from the start */
    int64_t stride;
    size_t bytes;
};

struct td_quant_x td_cuda_quant_x_at(void *scratch, int32_t n_rows, int32_t n_in);

/* The product of a weight in rows; sets the scales of *g. Returns how many outputs are done, from
 * the first on: all of I8, and of E4M3 those that cuBLASLt has taken; quant.cu does the rest in
 * bf16. rest_bytes: of the scratch behind the rows. */
int32_t td_cuda_quant_codes(const struct td_gemm_args *a, struct td_gemm_params *g,
                            size_t rest_bytes);

/* The product's outputs from n on; its weight is still that of the whole. */
struct td_gemm_params td_cuda_gemm_outputs_from(const struct td_gemm_params *p, int32_t n);

void td_cuda_quant_prepare(const struct td_gemm_args *a, int part, int n_parts);

#endif
