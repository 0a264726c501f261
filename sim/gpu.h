/* gpu.h - estimates how long a model's steps take on a card on which nobody has timed it: shapes of
 * a config.json times constants of the card.
 *
 * A step of one rank is, in each layer, four GEMMs (q, k and v; o; gate and up; down), one
 * attention, four elementwise passes (two norms with the residual, rotary embedding, activation)
 * and, with tensor parallelism, two all-reduces; and the lm_head once. Each kernel costs a launch
 * and a price per byte, element or flop. Summed up these are the coefficients of perf.h. Weights
 * and activations are bf16, KV of a type that the caller names, split over ranks as tandem does it
 * (docs/tensor-parallel.md). KV in one byte halves what attention reads and pays the same price per
 * byte; nothing is added for turning codes into numbers.
 *
 * Not in it: the CPU's time between steps, sampling, overlap of communication and compute, sliding
 * windows (attention is priced as if it were full), connections between nodes.
 *
 * Constants: sim/gpu_table.c, which sim/gpu_constants.py derives from public measurements. */
#ifndef TD_SIM_GPU_H
#define TD_SIM_GPU_H

#include "sim/perf.h"
#include "common/base/dtype.h"
#include "common/model/config.h"

#define TD_GPU_MAX_TP 8 /* the cards of a node; all-reduces were measured for 2, 4 and 8 */
/* The share of a card's memory for weights and KV; activations and libraries get the rest. vLLM's
 * default. */
#define TD_GPU_MEMORY_SHARE 0.9

struct td_gpu {
    const char *name, *source;  /* source: versions of what was measured; NULL = estimated */
    const char *estimated_from; /* the measured card whose constants were scaled; else NULL */
    uint64_t memory_bytes;
    /* byte_ps: of the weights; flop_fs: 1.08 fs = 926 TFLOP/s. gemm_decode: up to 256 rows,
     * gemm_prefill: 128 to 4,096. */
    struct {
        double launch_us, byte_ps, flop_fs;
    } gemm_decode, gemm_prefill;
    /* element_ps: of the rows' queries; flops: 4 for an element of a query and a key it sees. */
    struct {
        double launch_us, element_ps, flop_fs;
    } attn_prefill;
    /* element_ps: of the new keys; byte_ps: of the context's keys and values. */
    struct {
        double launch_us, element_ps, byte_ps;
    } attn_decode;
    struct {
        double launch_us, byte_ps;
    } elementwise, all_reduce[3]; /* over 2, 4, 8 cards */
};

extern const struct td_gpu td_gpus[]; /* a row without a name ends it */

/* One rank of a model split over tp. */
struct td_gpu_shape {
    uint64_t weight_bytes; /* bytes of weights that it keeps */
    /* KV bytes that it keeps; shared KV heads count once on each rank */
    uint64_t kv_bytes_per_token;
    double matrix_elements;             /* of the four matrices of a layer */
    double head_elements;               /* of lm_head */
    double query_elements, kv_elements; /* of a token in a layer: heads * head_dim */
    double pass_bytes;                  /* elementwise traffic of a token in a layer */
};
/* TD_ERR_INVALID: tp is not 1, 2, 4 or 8, or does not divide what it must; names the field. */
td_status td_gpu_shape(const struct td_model_config *model, uint32_t tp, enum td_dtype kv,
                       struct td_gpu_shape *ret_shape, struct td_err *err);
/* The type that a worker's --kv-dtype of this name gives to KV, where the compute type is bf16.
 * TD_ERR_INVALID lists the names. */
td_status td_gpu_kv_dtype(const char *name, enum td_dtype *ret_kv, struct td_err *err);

/* TD_ERR_INVALID lists the cards. */
td_status td_gpu_find(const char *name, const struct td_gpu **ret_gpu, struct td_err *err);

/* Describes a worker of tp cards: coefficients, KV tokens (not rounded to whole blocks), KV bytes
 * of a token on the wire. ret_perf->name is "h100" or "h100:tp4". TD_ERR_LIMIT: the weights leave
 * no room for KV. */
td_status td_gpu_perf(const struct td_gpu *gpu, const struct td_model_config *model, uint32_t tp,
                      enum td_dtype kv, struct td_perf *ret_perf, struct td_err *err);

/* Reads a config.json, or a folder that has one; needs no weights. */
td_status td_gpu_model_load(const char *path, struct td_model_config *ret_model,
                            struct td_err *err);

/* "h100:PATH" or "h100:tp4:PATH": what follows "gpu:" in the name of a latency table. */
td_status td_gpu_load(const char *spec, struct td_perf *ret_perf, struct td_err *err);

#endif
