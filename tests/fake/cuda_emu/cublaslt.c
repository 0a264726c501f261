/* cublaslt.c - products on the emulated GPU. A product is a host function on the stream, so no
 * kernel of the caller may begin early behind it. */
#include "tests/fake/cuda_emu/cublaslt.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define ALIGN_INPUT 16

struct product {
    const uint8_t *a, *b;
    float *d; /* of I8: int32 */
    const float *bias;
    uint8_t *workspace;
    size_t workspace_bytes;
    int64_t n_out, n_rows, k, lda, ldb, ldd;
    cudaDataType type;
    bool is_recorded, accumulates;
};

static struct td_emu_lt {
    int unused;
} the_handle;

static bool has_fault(const char *word)
{
    const char *faults = getenv("TD_CUDA_EMU_FAULT");
    return faults && strstr(faults, word);
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t *ret_handle)
{
    *ret_handle = &the_handle;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle)
{
    return handle ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

const char *cublasLtGetStatusString(cublasStatus_t status)
{
    return status == CUBLAS_STATUS_SUCCESS ? "success" : "not supported";
}

cublasStatus_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t desc, size_t bytes,
                                               cublasComputeType_t compute, cudaDataType_t scale)
{
    if (bytes != sizeof *desc ||
        (compute == CUBLAS_COMPUTE_32I ? scale != CUDA_R_32I
                                       : compute != CUBLAS_COMPUTE_32F || scale != CUDA_R_32F))
        return CUBLAS_STATUS_INVALID_VALUE;
    *desc = (cublasLtMatmulDescOpaque_t){
        .trans = CUBLAS_OP_N, .epilogue = CUBLASLT_EPILOGUE_DEFAULT, .compute = compute};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t which,
                                              const void *value, size_t bytes)
{
    if (which == CUBLASLT_MATMUL_DESC_TRANSA && bytes == sizeof desc->trans)
        memcpy(&desc->trans, value, bytes);
    else if (which == CUBLASLT_MATMUL_DESC_EPILOGUE && bytes == sizeof desc->epilogue)
        memcpy(&desc->epilogue, value, bytes);
    else if (which == CUBLASLT_MATMUL_DESC_BIAS_POINTER && bytes == sizeof desc->bias)
        memcpy(&desc->bias, value, bytes);
    else if (which != CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE)
        return CUBLAS_STATUS_INVALID_VALUE;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t layout, size_t bytes,
                                                 cudaDataType type, uint64_t rows, uint64_t cols,
                                                 int64_t ld)
{
    if (bytes != sizeof *layout || ld < (int64_t)rows) return CUBLAS_STATUS_INVALID_VALUE;
    *layout = (cublasLtMatrixLayoutOpaque_t){type, rows, cols, ld};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceInit_internal(cublasLtMatmulPreference_t preference,
                                                     size_t bytes)
{
    if (bytes != sizeof *preference) return CUBLAS_STATUS_INVALID_VALUE;
    *preference = (cublasLtMatmulPreferenceOpaque_t){.d_align = 256};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t which,
                                                    const void *value, size_t bytes)
{
    if (which == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES &&
        bytes == sizeof preference->workspace_bytes)
        memcpy(&preference->workspace_bytes, value, bytes);
    else if (which == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES &&
             bytes == sizeof preference->d_align)
        memcpy(&preference->d_align, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

/* What the library takes of operands of 8 bits: K-contiguous ("TN"), in whole 16 bytes. */
static bool is_served(cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                      cublasLtMatrixLayout_t d)
{
    bool is_i8 = a->type == CUDA_R_8I, is_fp8 = a->type == CUDA_R_8F_E4M3;
    if (a->type != b->type || (desc->compute == CUBLAS_COMPUTE_32I) != is_i8 ||
        d->type != (is_i8 ? CUDA_R_32I : CUDA_R_32F))
        return false;
    return !(is_i8 || is_fp8) ||
           (a->rows % 16 == 0 && a->cols % 16 == 0 && a->ld % 16 == 0 && b->ld % 16 == 0 &&
            desc->epilogue == CUBLASLT_EPILOGUE_DEFAULT);
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int n_asked,
                                              cublasLtMatmulHeuristicResult_t *ret_found,
                                              int *ret_n_found)
{
    *ret_n_found = 0;
    if (!handle || n_asked < 1 || desc->trans != CUBLAS_OP_T || a->rows != b->rows ||
        a->cols != d->rows || b->cols != d->cols || c->ld != d->ld)
        return CUBLAS_STATUS_INVALID_VALUE;
    if (has_fault("ltnone") || !is_served(desc, a, b, d)) return CUBLAS_STATUS_NOT_SUPPORTED;
    ret_found->algo = (cublasLtMatmulAlgo_t){
        preference->workspace_bytes, d->ld,   (int64_t)a->cols, (int64_t)a->rows,
        preference->d_align,         a->type, desc->epilogue};
    *ret_n_found = 1;
    return CUBLAS_STATUS_SUCCESS;
}

static float element(const uint8_t *x, cudaDataType type, int64_t i)
{
    float f;
    if (type == CUDA_R_32F) {
        memcpy(&f, x + 4 * i, sizeof f);
    } else if (type == CUDA_R_8I) {
        f = (float)(int8_t)x[i];
    } else if (type == CUDA_R_8F_E4M3) {
        uint32_t u = (uint32_t)(x[i] & 0x7fu) << 20;
        memcpy(&f, &u, sizeof f);
        f = (x[i] & 0x7f) == 0x7f ? NAN : f * (x[i] & 0x80 ? -0x1p120f : 0x1p120f);
    } else {
        uint16_t h;
        memcpy(&h, x + 2 * i, sizeof h);
        uint32_t u = (uint32_t)h << 16;
        memcpy(&f, &u, sizeof f);
    }
    return f;
}

static void run_product(void *arg)
{
    struct product *p = arg;
    for (int64_t m = 0; m < p->n_rows; m++)
        for (int64_t n = 0; n < p->n_out; n++) {
            float dot = 0, *to = p->d + m * p->ldd + n;
            if (p->type == CUDA_R_8I) {
                int32_t sum = 0;
                for (int64_t k = 0; k < p->k; k++)
                    sum += (int8_t)p->a[n * p->lda + k] * (int8_t)p->b[m * p->ldb + k];
                memcpy(to, &sum, sizeof sum);
                continue;
            }
            for (int64_t k = 0; k < p->k; k++)
                dot +=
                    element(p->a, p->type, n * p->lda + k) * element(p->b, p->type, m * p->ldb + k);
            if (p->bias) dot += p->bias[n];
            *to = p->accumulates ? *to + dot : dot;
        }
    memset(p->workspace, 0xff, p->workspace_bytes);
    if (!p->is_recorded) free(p);
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha,
                              const void *a, cublasLtMatrixLayout_t a_layout, const void *b,
                              cublasLtMatrixLayout_t b_layout, const void *beta, const void *c,
                              cublasLtMatrixLayout_t c_layout, void *d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t *algo,
                              void *workspace, size_t workspace_bytes, cudaStream_t stream)
{
    float one, old;
    memcpy(&one, alpha, sizeof one);
    memcpy(&old, beta, sizeof old);
    if (desc->compute == CUBLAS_COMPUTE_32I) {
        int32_t i_one, i_old;
        memcpy(&i_one, alpha, sizeof i_one);
        memcpy(&i_old, beta, sizeof i_old);
        one = (float)i_one, old = i_old ? 2 : 0; /* adds to nothing */
    }
    if (!handle || one != 1 || (old != 0 && old != 1) || c != d || c_layout->ld != d_layout->ld ||
        ((uintptr_t)a | (uintptr_t)b) % ALIGN_INPUT)
        return CUBLAS_STATUS_INVALID_VALUE;
    if (has_fault("ltrefuse")) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (algo->ld != d_layout->ld || algo->n_out != (int64_t)d_layout->rows ||
        algo->k != (int64_t)a_layout->rows || algo->type != a_layout->type ||
        algo->epilogue != desc->epilogue || algo->workspace_bytes > workspace_bytes ||
        (uintptr_t)d % algo->d_align)
        td_emu_die("cublasLtMatmul: an algorithm for rows %lld apart with %zu bytes of workspace "
                   "is used for rows %lld apart with "
                   "%zu bytes",
                   (long long)algo->ld, algo->workspace_bytes, (long long)d_layout->ld,
                   workspace_bytes);
    struct product *p = calloc(1, sizeof *p);
    if (!p) td_emu_die("no memory for a product");
    *p = (struct product){.a = a,
                          .b = b,
                          .d = d,
                          .bias = desc->epilogue == CUBLASLT_EPILOGUE_BIAS ? desc->bias : NULL,
                          .workspace = workspace,
                          .workspace_bytes =
                              algo->workspace_bytes < 4096 ? algo->workspace_bytes : 4096,
                          .n_out = algo->n_out,
                          .n_rows = (int64_t)d_layout->cols,
                          .k = algo->k,
                          .lda = a_layout->ld,
                          .ldb = b_layout->ld,
                          .ldd = d_layout->ld,
                          .type = algo->type,
                          .accumulates = old == 1};
    p->is_recorded = td_emu_graph_attach(stream, free, p);
    return cudaLaunchHostFunc(stream, run_product, p) == cudaSuccess ? CUBLAS_STATUS_SUCCESS
                                                                     : CUBLAS_STATUS_INVALID_VALUE;
}
