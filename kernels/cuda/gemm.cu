/* gemm.cu - matrix products: chooses one of three ways to compute a product, packs weights, and
 * calls cuBLASLt.
 *
 *   way     how                                                     used for
 *   cublas  cuBLASLt: bf16 x bf16 or f32 x f32 into f32; never      many rows, unless deterministic
 *           TF32
 *   own     gemm_mma.cu for bf16: tensor cores, one order of k for  few rows (decode); with
 *           every M. gemm_exact_kernel and gemm_few_kernel here     deterministic any number of
 *           for F32 and F16: one chain of fmaf                      rows; F16 weights (f32 x
 *                                                                   widened f16); experts
 *   plain   loops; emulated devices only, where the other kernels   all tests of what stands above
 *           do not exist or are slow                                the kernels
 *
 * Batch invariance (I1). `own` and `plain` have it by construction: an output is one fixed order of
 * sums along k, cut at places that depend on n_in alone. cuBLASLt chooses a kernel per shape, so
 * the bits of a row depend on how many rows came along; config.deterministic therefore uses `own`
 * only. The cost on a card is to be measured (cuda_bench compares the ways).
 * TANDEM_CUDA_GEMM=cublas together with deterministic uses one algorithm per weight for every M,
 * without split-K. That is invariant as long as the library's kernels are, and it reads weights
 * badly when M is small.
 *
 * TANDEM_CUDA_GEMM=auto|own|cublas|plain forces one way where it exists, for benches and tests. A
 * product that cuBLASLt refuses is computed by `own`.
 *
 * Order at the end (ops.h): y + (dot + bias). cuBLASLt adds the bias in its epilogue, or y as beta
 * = 1, in exactly this order. When both are wanted, the sum goes through the workspace and a small
 * kernel, because the order inside the library is not documented. */
#include <stdlib.h>

#include "common/base/symbols.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/ptx.h"
#ifdef TD_CUDA_EMULATE
#include "tests/fake/cuda_emu/cublaslt.h"
#else
#include <cublasLt.h>
#endif

#define WORKSPACE_BYTES ((size_t)64 << 20)
#define ALIGN_BYTES 64
#define OWN_ROWS_MAX 16 /* bf16 products of at most this many rows are `own` unless forced */

enum way { WAY_AUTO, WAY_OWN, WAY_CUBLAS, WAY_PLAIN };

static struct {
    enum way forced;
    void *workspace;
} self;

/* ---- packing: host to host, any thread; the caller uploads ----------------------------------- */

size_t td_cuda_packed_bytes(int32_t n_out, int32_t n_in, enum td_dtype dtype)
{
    size_t n = (size_t)n_out * (size_t)td_cuda_k_stride(n_in) * td_dtype_bytes(dtype);
    return (n + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES;
}

void td_cuda_pack(void *packed, int32_t n_out, int32_t n_in, enum td_dtype dtype, const void *src,
                  enum td_dtype src_dtype, int32_t row0, int32_t n_rows)
{
    int64_t stride = td_cuda_k_stride(n_in);
    size_t elem = td_dtype_bytes(dtype);
    for (int64_t r = 0; r < n_rows; r++) {
        uint8_t *to = (uint8_t *)packed + (size_t)((row0 + r) * stride) * elem;
        if (dtype == src_dtype) {
            memcpy(to, (const uint8_t *)src + (size_t)(r * n_in) * elem, (size_t)n_in * elem);
        } else {
            TD_ASSERT(dtype != TD_F16); /* f16 storage is for f16 files alone */
            for (int32_t k = 0; k < n_in; k++) {
                float f = td_cuda_widen(src, src_dtype, r * n_in + k);
                if (dtype == TD_F32)
                    memcpy(to + 4 * (size_t)k, &f, sizeof f);
                else {
                    uint16_t h = td_f32_to_bf16(f);
                    memcpy(to + 2 * (size_t)k, &h, sizeof h);
                }
            }
        }
        memset(to + (size_t)n_in * elem, 0, (size_t)(stride - n_in) * elem);
    }
    if (row0 + n_rows == n_out) { /* zeros up to the end of the last line of 64 bytes */
        size_t used = (size_t)(n_out * stride) * elem;
        memset((uint8_t *)packed + used, 0, td_cuda_packed_bytes(n_out, n_in, dtype) - used);
    }
}

size_t td_cuda_gemm_scratch_bytes(int32_t n_rows, int32_t n_in)
{
    size_t n = (size_t)n_rows * (size_t)td_cuda_k_stride(n_in) * sizeof(float);
    return (n + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES;
}

/* ---- what every way is given ----------------------------------------------------------------- */

struct td_gemm_params td_cuda_gemm_params_of(const struct td_gemm_args *a)
{
    struct td_gemm_params p = {};
    p.w = a->w->data, p.x = a->scratch, p.bias = a->bias, p.y = a->y, p.y_stride = a->y_stride;
    p.k_stride = td_cuda_x_stride(a->w), p.n_out = a->w->n_out, p.n_in = a->w->n_in,
    p.n_rows = a->n_rows;
    p.w_dtype = a->w->format->dtype ? a->w->format->dtype : TD_BF16, p.accumulate = a->accumulate;
    return p;
}

/* ---- own, f32 and f16 weights: one chain of fmaf per output ---------------------------------- */

#define EXACT_TILE 64 /* outputs x rows of a block */
#define EXACT_K 16    /* elements of k in shared memory at a time */
#define EXACT_THREADS 256
#define EXACT_EACH 4 /* outputs and rows of a thread: i, i + 16, i + 32, i + 48 */

static __device__ __forceinline__ void exact(const struct td_gemm_params &p, int32_t n0, int32_t m0)
{
    __shared__ float w[EXACT_K][EXACT_TILE + 1], x[EXACT_K][EXACT_TILE + 1];
    int tn = (int)threadIdx.x % 16, tm = (int)threadIdx.x / 16;
    float acc[EXACT_EACH][EXACT_EACH] = {};
    for (int32_t k0 = 0; k0 < p.n_in; k0 += EXACT_K) {
        for (int i = (int)threadIdx.x; i < EXACT_TILE * EXACT_K; i += EXACT_THREADS) {
            int r = i / EXACT_K, k = i % EXACT_K;
            bool is_k = k0 + k < p.n_in;
            w[k][r] = is_k && n0 + r < p.n_out
                          ? td_cuda_widen(p.w, p.w_dtype, (n0 + r) * p.k_stride + k0 + k)
                          : 0.0f;
            x[k][r] = is_k && m0 + r < p.n_rows
                          ? ((const float *)p.x)[(m0 + r) * p.k_stride + k0 + k]
                          : 0.0f;
        }
        __syncthreads();
        int n_k = p.n_in - k0 < EXACT_K ? p.n_in - k0 : EXACT_K;
        for (int k = 0; k < n_k; k++)
            for (int i = 0; i < EXACT_EACH; i++)
                for (int j = 0; j < EXACT_EACH; j++)
                    acc[i][j] = fmaf(x[k][tm + 16 * i], w[k][tn + 16 * j], acc[i][j]);
        __syncthreads();
    }
    for (int i = 0; i < EXACT_EACH; i++)
        for (int j = 0; j < EXACT_EACH; j++)
            td_cuda_gemm_store(&p, m0 + tm + 16 * i, n0 + tn + 16 * j, acc[i][j]);
}

static __global__ void __launch_bounds__(EXACT_THREADS) gemm_exact_kernel(struct td_gemm_params p)
{
    p.x_scale = NULL; /* codes are not multiplied here: saves registers */
    td_wait_for_previous();
    exact(p, (int32_t)blockIdx.x * EXACT_TILE, (int32_t)blockIdx.y * EXACT_TILE);
}

static __global__ void __launch_bounds__(EXACT_THREADS)
    grouped_exact_kernel(struct td_gemm_params p, struct td_gemm_groups groups)
{
    p.x_scale = NULL;
    td_wait_for_previous();
    if (!td_cuda_gemm_take_tile(&groups, (int32_t)blockIdx.y, &p)) return; /* the whole block */
    for (int32_t m0 = 0; m0 < p.n_rows; m0 += EXACT_TILE)
        exact(p, (int32_t)blockIdx.x * EXACT_TILE, m0);
}

/* The same chains for few rows of f32, or few outputs. A mixture's expert router has 128 outputs,
 * say, and a decode step waits for its product in every layer: tiles of 64 x 64 would be two blocks
 * that wait for memory at every 16 elements. Here a block is 32 outputs x 8 rows, an output to a
 * thread, and three stages of 64 elements are in flight. Estimate for k = 2048: 8,192 cycles, which
 * the chain itself takes. */
#define FEW_OUT 32
#define FEW_ROWS 8
#define FEW_K 64
#define FEW_STAGES 4
#define FEW_STRIDE (FEW_K + 4) /* floats; 16-byte loads of 8 lanes then fall on all banks */
#define FEW_MANY 64            /* rows up to which few outputs come here */

/* Stage s of the outputs' rows, then x's; what is not there becomes zeros. */
static __device__ __forceinline__ void few_fetch(const struct td_gemm_params &p, int32_t n0,
                                                 int32_t m0, int32_t s, float *to)
{
    for (int i = (int)threadIdx.x; s * FEW_K < p.n_in && i < (FEW_OUT + FEW_ROWS) * FEW_K / 4;
         i += FEW_OUT * FEW_ROWS) {
        int r = i / (FEW_K / 4), k = i % (FEW_K / 4) * 4;
        bool is_w = r < FEW_OUT;
        int32_t row = is_w ? n0 + r : m0 + r - FEW_OUT;
        const float *all = (const float *)(is_w ? p.w : p.x);
        bool is_there = row < (is_w ? p.n_out : p.n_rows) && s * FEW_K + k < p.k_stride;
        td_cp_async_16(to + r * FEW_STRIDE + k,
                       is_there ? all + row * p.k_stride + s * FEW_K + k : all, is_there);
    }
    td_cp_async_commit(); /* commit even an empty group, because waits count groups */
}

static __global__ void __launch_bounds__(FEW_OUT *FEW_ROWS) gemm_few_kernel(struct td_gemm_params p)
{
    __shared__ __align__(16) float stages[FEW_STAGES][(FEW_OUT + FEW_ROWS) * FEW_STRIDE];
    int o = (int)threadIdx.x % FEW_OUT, m = (int)threadIdx.x / FEW_OUT;
    int32_t n0 = (int32_t)blockIdx.x * FEW_OUT, m0 = (int32_t)blockIdx.y * FEW_ROWS;
    p.x_scale = NULL;
    td_wait_for_previous();
    for (int32_t s = 0; s < FEW_STAGES - 1; s++) few_fetch(p, n0, m0, s, stages[s]);
    float acc = 0;
    for (int32_t s = 0; s * FEW_K < p.n_in; s++) {
        td_cp_async_wait<FEW_STAGES - 2>();
        /* stage s has arrived for all threads, and all are done with stage s - 1, whose place the
         * next fetch fills */
        __syncthreads();
        few_fetch(p, n0, m0, s + FEW_STAGES - 1, stages[(s + FEW_STAGES - 1) % FEW_STAGES]);
        const float *w = stages[s % FEW_STAGES] + o * FEW_STRIDE,
                    *x = stages[s % FEW_STAGES] + (FEW_OUT + m) * FEW_STRIDE;
        int n_k = p.n_in - s * FEW_K < FEW_K ? p.n_in - s * FEW_K : FEW_K, k = 0;
        for (; k + 4 <= n_k; k += 4) {
            float4 wv = *(const float4 *)(w + k), xv = *(const float4 *)(x + k);
            acc = fmaf(xv.x, wv.x, acc), acc = fmaf(xv.y, wv.y, acc);
            acc = fmaf(xv.z, wv.z, acc), acc = fmaf(xv.w, wv.w, acc);
        }
        for (; k < n_k; k++) acc = fmaf(x[k], w[k], acc);
    }
    td_cp_async_wait<0>();
    td_cuda_gemm_store(&p, m0 + m, n0 + o, acc);
}

/* Whether few rows or outputs would leave most of the device without a tile. */
static bool is_few(const struct td_gemm_params *p)
{
    bool fills = (p->n_out + EXACT_TILE - 1) / EXACT_TILE >= td_cuda.n_sms;
    return p->w_dtype == TD_F32 && (p->n_rows <= FEW_ROWS || (p->n_rows <= FEW_MANY && !fills));
}

static void few_launch(const struct td_gemm_params *p)
{
    dim3 grid((unsigned)((p->n_out + FEW_OUT - 1) / FEW_OUT),
              (unsigned)((p->n_rows + FEW_ROWS - 1) / FEW_ROWS));
    TD_LAUNCH_EARLY(td_cuda_is_early(), gemm_few_kernel, grid, dim3(FEW_OUT * FEW_ROWS), 0,
                    td_cuda.compute, *p);
    TD_LAUNCHED("gemm (few)");
}

static void grouped_exact_launch(const struct td_gemm_params *p, const struct td_gemm_groups *g)
{
    dim3 grid((unsigned)((p->n_out + EXACT_TILE - 1) / EXACT_TILE), (unsigned)g->n_tiles);
    TD_LAUNCH_EARLY(td_cuda_is_early(), grouped_exact_kernel, grid, dim3(EXACT_THREADS), 0,
                    td_cuda.compute, *p, *g);
    TD_LAUNCHED("grouped gemm (exact)");
}

static void exact_launch(const struct td_gemm_params *p)
{
    if (is_few(p)) {
        few_launch(p);
        return;
    }
    dim3 grid((unsigned)((p->n_out + EXACT_TILE - 1) / EXACT_TILE),
              (unsigned)((p->n_rows + EXACT_TILE - 1) / EXACT_TILE));
    TD_LAUNCH_EARLY(td_cuda_is_early(), gemm_exact_kernel, grid, dim3(EXACT_THREADS), 0,
                    td_cuda.compute, *p);
    TD_LAUNCHED("gemm (exact)");
}

/* ---- plain: emulated devices ----------------------------------------------------------------- */

#ifdef TD_CUDA_EMULATE
#define PLAIN_LANES 8
#define PLAIN_ROWS 8 /* outputs per block */

typedef float plain_f32 __attribute__((vector_size(4 * PLAIN_LANES)));
typedef uint32_t plain_u32 __attribute__((vector_size(4 * PLAIN_LANES)));
typedef uint16_t plain_u16 __attribute__((vector_size(2 * PLAIN_LANES)));

/* Output n of row m. Lane i sums k = i, i + 8 and so on; the lanes are added in ascending order.
 * Vectors go through memcpy and stay local, because the way they pass between functions depends on
 * the instruction set. The dtype is a constant here: most of what tests with an emulated device
 * compute is this loop. */
template <enum td_dtype W>
static __device__ inline float plain_dot(const struct td_gemm_params &p, int32_t n, int32_t m)
{
    const char *w = (const char *)p.w + n * p.k_stride * (W == TD_F32 ? 4 : 2);
    const char *x = (const char *)p.x + m * p.k_stride * (W == TD_BF16 ? 2 : 4);
    plain_f32 acc = {};
    for (int64_t k = 0; k < p.k_stride; k += PLAIN_LANES) {
        plain_f32 wv, xv;
        if (W == TD_F32) {
            memcpy(&wv, w + 4 * k, sizeof wv);
        } else if (W == TD_BF16) {
            plain_u16 h;
            memcpy(&h, w + 2 * k, sizeof h);
            plain_u32 u = __builtin_convertvector(h, plain_u32) << 16;
            memcpy(&wv, &u, sizeof wv);
        } else {
            for (int i = 0; i < PLAIN_LANES; i++)
                wv[i] = td_cuda_widen(p.w, W, n * p.k_stride + k + i);
        }
        if (W == TD_BF16) {
            plain_u16 h;
            memcpy(&h, x + 2 * k, sizeof h);
            plain_u32 u = __builtin_convertvector(h, plain_u32) << 16;
            memcpy(&xv, &u, sizeof xv);
        } else {
            memcpy(&xv, x + 4 * k, sizeof xv);
        }
        acc += wv * xv;
    }
    float dot = 0;
    for (int i = 0; i < PLAIN_LANES; i++) dot += acc[i];
    return dot;
}

static __device__ inline void plain(const struct td_gemm_params &p)
{
    for (int r = 0; r < PLAIN_ROWS; r++) {
        int32_t n = (int32_t)blockIdx.x * PLAIN_ROWS + r;
        if (n >= p.n_out) return;
        for (int32_t m = 0; m < p.n_rows; m++) {
            float dot = p.w_dtype == TD_F32    ? plain_dot<TD_F32>(p, n, m)
                        : p.w_dtype == TD_BF16 ? plain_dot<TD_BF16>(p, n, m)
                                               : plain_dot<TD_F16>(p, n, m);
            td_cuda_gemm_store(&p, m, n, dot);
        }
    }
}

static __global__ void gemm_plain_kernel(struct td_gemm_params p) { plain(p); }

static __global__ void grouped_plain_kernel(struct td_gemm_params p, struct td_gemm_groups groups)
{
    if (td_cuda_gemm_take_tile(&groups, (int32_t)blockIdx.y, &p)) plain(p);
}

static void grouped_plain_launch(const struct td_gemm_params *p, const struct td_gemm_groups *g)
{
    dim3 grid((unsigned)((p->n_out + PLAIN_ROWS - 1) / PLAIN_ROWS), (unsigned)g->n_tiles);
    TD_LAUNCH(grouped_plain_kernel, grid, dim3(1), 0, td_cuda.compute, *p, *g);
    TD_LAUNCHED("grouped gemm (plain)");
}

static void plain_launch(const struct td_gemm_params *p)
{
    TD_LAUNCH(gemm_plain_kernel, dim3((unsigned)((p->n_out + PLAIN_ROWS - 1) / PLAIN_ROWS)),
              dim3(1), 0, td_cuda.compute, *p);
    TD_LAUNCHED("gemm (plain)");
}
#endif

/* ---- cuBLASLt -------------------------------------------------------------------------------- */

/* We take the library's first proposal and never the fastest of a few timed ones. The fastest
 * differs from run to run, and so would the bits of a request that another worker finishes (I4). */
/* a direct-mapped cache: a shape that falls on another's entry replaces it */
#define N_ALGORITHMS 4096
#define INVARIANT_ROWS 256 /* deterministic: the algorithm for this many rows serves every M */

/* Everything that an algorithm was chosen for. One that was chosen with more workspace, or for
 * another row stride, is refused or gives wrong results here. */
struct problem_key {
    int32_t n_rows, n_out, n_in; /* n_rows 0: the entry is free */
    uint32_t y_align;
    uint16_t dtype, epilogue;
    uint32_t pad;
    int64_t y_stride;
    size_t workspace_bytes;
};

struct algorithm {
    struct problem_key key;
    bool is_refused; /* the library has no algorithm: `own` computes this product, now and later */
    cublasLtMatmulAlgo_t algo;
};

/* Opened together with the first device. It maps 600 MB, which a process on a CPU saves, and a
 * machine that has a driver alone gets an error that names what is missing. */
/* clang-format off */
#define LT_FUNCTIONS(F)                      \
    F(cublasLtCreate)                        \
    F(cublasLtDestroy)                       \
    F(cublasLtGetStatusString)               \
    F(cublasLtMatmul)                        \
    F(cublasLtMatmulAlgoGetHeuristic)        \
    F(cublasLtMatmulDescInit_internal)       \
    F(cublasLtMatmulDescSetAttribute)        \
    F(cublasLtMatrixLayoutInit_internal)     \
    F(cublasLtMatmulPreferenceInit_internal) \
    F(cublasLtMatmulPreferenceSetAttribute)
/* clang-format on */
#define LT_POINTER(name) decltype(&::name) name;
#define LT_LIBRARY "libcublasLt.so." LT_TEXT(CUBLAS_VER_MAJOR)
#define LT_TEXT(number) LT_TEXT_OF(number)
#define LT_TEXT_OF(number) #number

static struct {
    void *library;
    LT_FUNCTIONS(LT_POINTER)
} lt;
static cublasLtHandle_t handle;
static struct algorithm *algorithms;

static bool lt_ok(cublasStatus_t s, const char *label)
{
    return s == CUBLAS_STATUS_SUCCESS || td_cuda_ok(cudaErrorUnknown, label);
}

#ifdef TD_CUDA_EMULATE
static td_status lt_load(struct td_err *err)
{
    (void)err;
    lt.library = &lt;
#define LT_TAKE(name) lt.name = ::name;
    LT_FUNCTIONS(LT_TAKE)
    return TD_OK;
}
#else
static td_status lt_load(struct td_err *err)
{
    lt.library = td_cuda_open_library(LT_LIBRARY, "TANDEM_CUBLASLT_LIBRARY",
                                      "run deterministic, which does without", err);
    if (!lt.library) return td_err_prefix(err, "cuBLASLt is needed for products");
    const char *missing = NULL;
#define LT_FIND(name) td_symbol_find(lt.library, #name, NULL, true, &lt.name, &missing);
    LT_FUNCTIONS(LT_FIND)
    return missing
               ? td_fail(err, TD_ERR_UNSUPPORTED,
                         LT_LIBRARY
                         " has no %s: it is of another version than this library was built with",
                         missing)
               : TD_OK;
}
#endif

static td_status cublas_open(struct td_err *err)
{
    if (self.forced == WAY_OWN || self.forced == WAY_PLAIN ||
        (self.forced == WAY_AUTO && td_cuda.is_deterministic))
        return TD_OK;
    td_status status = lt.library ? TD_OK : lt_load(err);
    if (status) return status;
    algorithms = (struct algorithm *)calloc(N_ALGORITHMS, sizeof *algorithms);
    if (!algorithms)
        return td_fail(err, TD_ERR_NOMEM, "no memory for the cache of GEMM algorithms");
    cublasStatus_t s = lt.cublasLtCreate(&handle);
    return s == CUBLAS_STATUS_SUCCESS ? TD_OK
                                      : td_fail(err, TD_ERR_DEVICE, "cuBLASLt does not start: %s",
                                                lt.cublasLtGetStatusString(s));
}

/* The library stays loaded, because its threads and exit handlers live in it. */
static void cublas_close(void)
{
    if (handle) (void)lt.cublasLtDestroy(handle);
    free(algorithms);
    handle = NULL, algorithms = NULL;
}

/* The row-major product in the library's column-major terms: y^T [n_out, n_rows] = W [n_in,
 * n_out]^T . x^T [n_in, n_rows]. */
struct lt_problem {
    cublasLtMatmulDescOpaque_t desc;
    cublasLtMatrixLayoutOpaque_t w, x, y;
};

static bool problem_make(const struct td_gemm_params *p, int32_t n_rows, bool with_bias,
                         int64_t y_stride, struct lt_problem *ret)
{
    cudaDataType_t type = p->w_dtype == TD_BF16 ? CUDA_R_16BF : CUDA_R_32F;
    cublasOperation_t trans = CUBLAS_OP_T;
    cublasLtEpilogue_t epilogue = with_bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    /* k includes the zeros behind n_in, so that it is whole 16 bytes */
    uint64_t rows = (uint64_t)n_rows, n = (uint64_t)p->n_out, k = (uint64_t)p->k_stride;
    bool ok =
        lt.cublasLtMatmulDescInit_internal(&ret->desc, sizeof ret->desc, CUBLAS_COMPUTE_32F,
                                           CUDA_R_32F) == CUBLAS_STATUS_SUCCESS &&
        lt.cublasLtMatmulDescSetAttribute(&ret->desc, CUBLASLT_MATMUL_DESC_TRANSA, &trans,
                                          sizeof trans) == CUBLAS_STATUS_SUCCESS &&
        lt.cublasLtMatmulDescSetAttribute(&ret->desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue,
                                          sizeof epilogue) == CUBLAS_STATUS_SUCCESS;
    if (ok && with_bias) {
        cudaDataType_t bias_type = CUDA_R_32F;
        ok = lt.cublasLtMatmulDescSetAttribute(&ret->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                               &p->bias, sizeof p->bias) == CUBLAS_STATUS_SUCCESS &&
             lt.cublasLtMatmulDescSetAttribute(&ret->desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE,
                                               &bias_type,
                                               sizeof bias_type) == CUBLAS_STATUS_SUCCESS;
    }
    return ok &&
           lt.cublasLtMatrixLayoutInit_internal(&ret->w, sizeof ret->w, type, k, n, p->k_stride) ==
               CUBLAS_STATUS_SUCCESS &&
           lt.cublasLtMatrixLayoutInit_internal(&ret->x, sizeof ret->x, type, k, rows,
                                                p->k_stride) == CUBLAS_STATUS_SUCCESS &&
           lt.cublasLtMatrixLayoutInit_internal(&ret->y, sizeof ret->y, CUDA_R_32F, n, rows,
                                                y_stride) == CUBLAS_STATUS_SUCCESS;
}

/* The largest power of two up to 256 that divides address and row. */
static uint32_t alignment_of(const void *p, int64_t stride_bytes)
{
    uint64_t bits = (uint64_t)(uintptr_t)p | (uint64_t)stride_bytes | 256u;
    return (uint32_t)(bits & (~bits + 1));
}

static bool choose(struct lt_problem *problem, uint32_t y_align, size_t workspace_bytes,
                   cublasLtMatmulAlgo_t *ret_algo)
{
    cublasLtMatmulPreferenceOpaque_t prefer;
    cublasLtMatmulHeuristicResult_t found;
    int n_found = 0;
    /* The sums of split-K go through the workspace in a fixed order, never by atomics into y.
     * deterministic: no split-K. */
    uint32_t reductions = td_cuda.is_deterministic ? CUBLASLT_REDUCTION_SCHEME_NONE
                                                   : CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE,
             in_align = 16;
    bool ok =
        lt.cublasLtMatmulPreferenceInit_internal(&prefer, sizeof prefer) == CUBLAS_STATUS_SUCCESS &&
        lt.cublasLtMatmulPreferenceSetAttribute(&prefer, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                &workspace_bytes,
                                                sizeof workspace_bytes) == CUBLAS_STATUS_SUCCESS &&
        lt.cublasLtMatmulPreferenceSetAttribute(&prefer, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                                &reductions,
                                                sizeof reductions) == CUBLAS_STATUS_SUCCESS &&
        lt.cublasLtMatmulPreferenceSetAttribute(&prefer, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
                                                &in_align,
                                                sizeof in_align) == CUBLAS_STATUS_SUCCESS &&
        lt.cublasLtMatmulPreferenceSetAttribute(&prefer, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                                                &in_align,
                                                sizeof in_align) == CUBLAS_STATUS_SUCCESS &&
        lt.cublasLtMatmulPreferenceSetAttribute(&prefer, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                                                &y_align,
                                                sizeof y_align) == CUBLAS_STATUS_SUCCESS &&
        lt.cublasLtMatmulPreferenceSetAttribute(&prefer, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
                                                &y_align, sizeof y_align) == CUBLAS_STATUS_SUCCESS;
    if (!ok ||
        lt.cublasLtMatmulAlgoGetHeuristic(handle, &problem->desc, &problem->w, &problem->x,
                                          &problem->y, &problem->y, &prefer, 1, &found,
                                          &n_found) != CUBLAS_STATUS_SUCCESS ||
        n_found == 0)
        return false;
    *ret_algo = found.algo;
    return true;
}

/* The key's place in the cache; *ret_is_new: it was not there, and algo is still to be found. */
static struct algorithm *algorithm_at(const struct problem_key *key, bool *ret_is_new)
{
    uint64_t words[sizeof *key / 8], h = 0;
    static_assert(sizeof words == sizeof *key, "whole words");
    memcpy(words, key, sizeof words);
    for (size_t i = 0; i < sizeof words / 8; i++)
        h = (h ^ words[i]) * 0x9e3779b97f4a7c15u, h ^= h >> 32;
    struct algorithm *a = &algorithms[h % N_ALGORITHMS];
    *ret_is_new = memcmp(&a->key, key, sizeof *key) != 0;
    a->key = *key;
    return a;
}

static struct algorithm *algorithm_of(const struct td_gemm_params *p, bool with_bias,
                                      int64_t y_stride, uint32_t y_align, size_t workspace_bytes)
{
    struct problem_key key;
    memset(&key, 0, sizeof key); /* compared and hashed as bytes */
    key.n_rows = td_cuda.is_deterministic ? INVARIANT_ROWS : p->n_rows, key.n_out = p->n_out,
    key.n_in = p->n_in;
    key.dtype = (uint16_t)p->w_dtype, key.epilogue = with_bias;
    key.y_align = y_align, key.y_stride = y_stride, key.workspace_bytes = workspace_bytes;
    bool is_new;
    struct algorithm *a = algorithm_at(&key, &is_new);
    if (!is_new) return a;
    struct lt_problem problem;
    a->is_refused = !problem_make(p, key.n_rows, with_bias, y_stride, &problem) ||
                    !choose(&problem, y_align, workspace_bytes, &a->algo);
    return a;
}

/* What became of a call: false: refused, now and later. */
static bool is_done(struct algorithm *a, cublasStatus_t s)
{
    if (s == CUBLAS_STATUS_NOT_SUPPORTED || s == CUBLAS_STATUS_INVALID_VALUE ||
        s == CUBLAS_STATUS_ARCH_MISMATCH) {
        a->is_refused = true;
        return false;
    }
    td_cuda.behind_kernel = false; /* The library's kernel never lets the next one begin early. */
    (void)lt_ok(s, "gemm: cublasLtMatmul");
    return true;
}

/* to [n_rows, n_out] = dot (+ bias) (+ to). False: the library refuses this product and has done
 * nothing; its error concerns the call, and the device goes on. Any other error loses the
 * device. */
static bool matmul(const struct td_gemm_params *p, float *to, int64_t to_stride, bool with_bias,
                   bool accumulate, void *workspace, size_t workspace_bytes)
{
    struct lt_problem problem;
    float one = 1.0f, beta = accumulate ? 1.0f : 0.0f;
    struct algorithm *a =
        algorithm_of(p, with_bias, to_stride, alignment_of(to, to_stride * 4), workspace_bytes);
    if (a->is_refused || !problem_make(p, p->n_rows, with_bias, to_stride, &problem)) return false;
    cublasStatus_t s = lt.cublasLtMatmul(handle, &problem.desc, &one, p->w, &problem.w, p->x,
                                         &problem.x, &beta, to, &problem.y, to, &problem.y,
                                         &a->algo, workspace, workspace_bytes, td_cuda.compute);
    return is_done(a, s);
}

static bool codes_problem(const struct td_gemm_codes *c, int32_t n_rows, struct lt_problem *ret)
{
    cudaDataType_t type = c->is_i8 ? CUDA_R_8I : CUDA_R_8F_E4M3,
                   sum = c->is_i8 ? CUDA_R_32I : CUDA_R_32F;
    cublasOperation_t trans = CUBLAS_OP_T;
    uint64_t rows = (uint64_t)n_rows, n = (uint64_t)c->n_out, k = (uint64_t)c->n_in;
    return lt.cublasLtMatmulDescInit_internal(&ret->desc, sizeof ret->desc,
                                              c->is_i8 ? CUBLAS_COMPUTE_32I : CUBLAS_COMPUTE_32F,
                                              sum) == CUBLAS_STATUS_SUCCESS &&
           lt.cublasLtMatmulDescSetAttribute(&ret->desc, CUBLASLT_MATMUL_DESC_TRANSA, &trans,
                                             sizeof trans) == CUBLAS_STATUS_SUCCESS &&
           lt.cublasLtMatrixLayoutInit_internal(&ret->w, sizeof ret->w, type, k, n, c->w_stride) ==
               CUBLAS_STATUS_SUCCESS &&
           lt.cublasLtMatrixLayoutInit_internal(&ret->x, sizeof ret->x, type, k, rows,
                                                c->x_stride) == CUBLAS_STATUS_SUCCESS &&
           lt.cublasLtMatrixLayoutInit_internal(&ret->y, sizeof ret->y, sum, n, rows, c->n_out) ==
               CUBLAS_STATUS_SUCCESS;
}

bool td_cuda_gemm_uses_cublas(void)
{
    return handle && (self.forced == WAY_CUBLAS || self.forced == WAY_AUTO);
}

/* 8-bit floats need sm_89, and are summed in an order of the library's, so a deterministic device
 * does not ask. What else the library wants, it says. */
bool td_cuda_gemm_codes(const struct td_gemm_codes *c)
{
    if (!td_cuda_gemm_uses_cublas()) return false;
    if (!c->is_i8 && (td_cuda.cc < 89 || td_cuda.is_deterministic)) return false;
    struct problem_key key;
    memset(&key, 0, sizeof key);
    key.n_rows = c->n_rows, key.n_out = c->n_out, key.n_in = c->n_in;
    key.dtype = (uint16_t)(c->is_i8 ? TD_INT8 : TD_FP8);
    key.y_align = alignment_of(c->sums, (int64_t)c->n_out * 4), key.y_stride = c->w_stride,
    key.workspace_bytes = WORKSPACE_BYTES;
    bool is_new;
    struct lt_problem problem;
    struct algorithm *a = algorithm_at(&key, &is_new);
    if (is_new)
        a->is_refused = !codes_problem(c, key.n_rows, &problem) ||
                        !choose(&problem, key.y_align, WORKSPACE_BYTES, &a->algo);
    if (a->is_refused || !codes_problem(c, c->n_rows, &problem)) return false;
    int32_t i_one = 1, i_zero = 0;
    float f_one = 1.0f, f_zero = 0.0f;
    const void *one = c->is_i8 ? (const void *)&i_one : (const void *)&f_one,
               *zero = c->is_i8 ? (const void *)&i_zero : (const void *)&f_zero;
    return is_done(a,
                   lt.cublasLtMatmul(handle, &problem.desc, one, c->w, &problem.w, c->x, &problem.x,
                                     zero, c->sums, &problem.y, c->sums, &problem.y, &a->algo,
                                     self.workspace, WORKSPACE_BYTES, td_cuda.compute));
}

static __global__ void add_rows_kernel(float *y, int64_t y_stride, const float *sums, int32_t n_out,
                                       int64_t n)
{
    int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (i >= n) return;
    float *at = y + i / n_out * y_stride + i % n_out;
    *at = *at + sums[i];
}

static void own_gemm(const struct td_gemm_params *p);

/* Rows from m on. */
static struct td_gemm_params rows_from(const struct td_gemm_params *p, int32_t m)
{
    struct td_gemm_params rest = *p;
    rest.n_rows = p->n_rows - m, rest.y = p->y + m * p->y_stride;
    rest.x = (const uint8_t *)p->x + m * p->k_stride * (p->w_dtype == TD_BF16 ? 2 : 4);
    return rest;
}

static void cublas_gemm(const struct td_gemm_params *p)
{
    if (p->x_scale) { /* which come before bias and residual */
        own_gemm(p);
        return;
    }
    if (!(p->bias && p->accumulate)) {
        if (!matmul(p, p->y, p->y_stride, p->bias != NULL, p->accumulate, self.workspace,
                    WORKSPACE_BYTES))
            own_gemm(p);
        return;
    }
    size_t half_bytes = WORKSPACE_BYTES / 2, row_bytes = (size_t)p->n_out * 4;
    TD_ASSERT(row_bytes <= half_bytes);
    float *sums = (float *)((uint8_t *)self.workspace + half_bytes);
    int32_t at_once = (int32_t)(half_bytes / row_bytes < (size_t)p->n_rows ? half_bytes / row_bytes
                                                                           : (size_t)p->n_rows);
    for (int32_t m = 0; m < p->n_rows; m += at_once) {
        struct td_gemm_params piece = rows_from(p, m);
        if (piece.n_rows > at_once) piece.n_rows = at_once;
        if (!matmul(&piece, sums, p->n_out, true, false, self.workspace, half_bytes)) {
            own_gemm(&piece);
            continue;
        }
        int64_t n = (int64_t)piece.n_rows * p->n_out;
        TD_LAUNCH(add_rows_kernel, dim3((unsigned)((n + 255) / 256)), dim3(256), 0, td_cuda.compute,
                  piece.y, p->y_stride, sums, p->n_out, n);
        TD_LAUNCHED("gemm: add the residual");
    }
}

/* ---- the choice ------------------------------------------------------------------------------ */

static void own_gemm(const struct td_gemm_params *p)
{
    if (p->w_dtype == TD_BF16)
        td_cuda_gemm_mma(p);
    else
        exact_launch(p);
}

static enum way way_of(const struct td_gemm_params *p)
{
    if (self.forced != WAY_AUTO)
        return self.forced == WAY_CUBLAS && p->w_dtype == TD_F16 ? WAY_OWN : self.forced;
#ifdef TD_CUDA_EMULATE
    return WAY_PLAIN;
#else
    if (td_cuda.is_deterministic || p->w_dtype == TD_F16) return WAY_OWN;
    return p->w_dtype == TD_BF16 && p->n_rows <= OWN_ROWS_MAX ? WAY_OWN : WAY_CUBLAS;
#endif
}

void td_cuda_gemm_run(const struct td_gemm_params *p)
{
    switch (way_of(p)) {
    case WAY_CUBLAS:
        cublas_gemm(p);
        return;
#ifdef TD_CUDA_EMULATE
    case WAY_PLAIN:
        plain_launch(p);
        return;
#endif
    default:
        own_gemm(p);
        return;
    }
}

/* cuBLASLt has no such call: own, whatever is chosen for other products. */
void td_cuda_gemm_grouped(const struct td_gemm_params *p, const struct td_gemm_groups *g)
{
#ifdef TD_CUDA_EMULATE
    if (way_of(p) == WAY_PLAIN) {
        grouped_plain_launch(p, g);
        return;
    }
#endif
    if (p->w_dtype == TD_BF16)
        td_cuda_gemm_mma_grouped(p, g);
    else
        grouped_exact_launch(p, g);
}

bool td_cuda_gemm_is_own(const struct td_gemm_params *p) { return way_of(p) == WAY_OWN; }

void td_cuda_gemm(const struct td_gemm_args *a, int part, int n_parts)
{
    (void)part, (void)n_parts;
    if (a->n_rows <= 0) return;
    struct td_gemm_params p = td_cuda_gemm_params_of(a);
    td_cuda_gemm_run(&p);
}

td_status td_cuda_gemm_open(struct td_err *err)
{
    static const char *const names[] = {"auto", "own", "cublas", "plain"};
    const char *forced = getenv("TANDEM_CUDA_GEMM");
    int way = forced && *forced ? -1 : WAY_AUTO;
    for (int i = 0; way < 0 && i < 4; i++)
        if (strcmp(forced, names[i]) == 0) way = i;
#ifdef TD_CUDA_EMULATE
    bool is_here = way >= 0;
#else
    bool is_here = way >= 0 && way != WAY_PLAIN;
#endif
    if (!is_here)
        return td_fail(err, TD_ERR_INVALID,
                       "TANDEM_CUDA_GEMM=%s: this library has no such way (auto, own, cublas; "
                       "plain on an emulated GPU)",
                       forced);
    self.forced = (enum way)way;
    cudaError_t e = cudaMalloc(&self.workspace, WORKSPACE_BYTES);
    if (e != cudaSuccess) {
        (void)cudaGetLastError();
        self.workspace = NULL;
        return td_fail(err, e == cudaErrorMemoryAllocation ? TD_ERR_NOMEM : TD_ERR_DEVICE,
                       "%u MiB of workspace for products: %s (%s)",
                       (unsigned)(WORKSPACE_BYTES >> 20), cudaGetErrorName(e),
                       cudaGetErrorString(e));
    }
    return cublas_open(err);
}

void td_cuda_gemm_close(void)
{
    cublas_close();
    if (self.workspace) (void)cudaFree(self.workspace);
    self.workspace = NULL;
}
