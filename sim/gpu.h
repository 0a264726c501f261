/* gpu.h - how long a model's steps take on a card that nobody has timed it on: shapes of a
 * config.json times constants of the card.
 *
 * A step of one rank is, in each layer, four GEMMs (q, k and v; o; gate and up; down), one
 * attention, four elementwise passes (two norms with the residual, rotary embedding, activation)
 * and with tensor parallelism two all-reduces; and the lm_head once. Each kernel costs a launch and
 * so much for a byte, an element or a flop. Summed up these are the coefficients of perf.h.
 * Weights, activations and KV are bf16. Split over ranks as tandem does it
 * (docs/tensor-parallel.md).
 *
 * Not in it: the CPU's time between steps, sampling, overlap of communication and compute, sliding
 * windows (attention is priced as if it were full), links between nodes.
 *
 * Constants: sim/gpu_table.c, which sim/gpu_constants.py derives from public
 * measurements. */
#ifndef TD_SIM_GPU_H
#define TD_SIM_GPU_H

#include "sim/perf.h"
#include "common/model/config.h"

#define TD_GPU_MAX_TP 8 /* the cards of a node; all-reduces were measured for 2, 4 and 8 */
/* Of a card's memory, for weights and KV; the rest is for activations and libraries. vLLM's
 * default. */
#define TD_GPU_MEMORY_SHARE 0.9

struct td_gpu {
    const char *name, *source;  /* of the measurements: versions; NULL = estimated */
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
    uint64_t weight_bytes;              /* that it keeps */
    uint64_t kv_bytes_per_token;        /* that it keeps: shared KV heads once on each rank */
    double matrix_elements;             /* of the four matrices of a layer */
    double head_elements;               /* of lm_head */
    double query_elements, kv_elements; /* of a token in a layer: heads * head_dim */
    double pass_bytes;                  /* elementwise traffic of a token in a layer */
};
/* TD_ERR_INVALID: tp is not 1, 2, 4 or 8, or does not divide what it must; names the field. */
td_status td_gpu_shape(const struct td_model_config *model, uint32_t tp,
                       struct td_gpu_shape *ret_shape, struct td_err *err);

/* TD_ERR_INVALID lists the cards. */
td_status td_gpu_find(const char *name, const struct td_gpu **ret_gpu, struct td_err *err);

/* A worker of tp cards: coefficients, KV tokens (whole blocks are not looked at), KV bytes of a
 * token on the wire. ret_perf->name is "h100" or "h100:tp4". TD_ERR_LIMIT: the weights leave no
 * room for KV. */
td_status td_gpu_perf(const struct td_gpu *gpu, const struct td_model_config *model, uint32_t tp,
                      struct td_perf *ret_perf, struct td_err *err);

/* A config.json or a folder that has one; no weights are looked for. */
td_status td_gpu_model_load(const char *path, struct td_model_config *ret_model,
                            struct td_err *err);

/* "h100:PATH" or "h100:tp4:PATH": what follows "gpu:" in the name of a latency table. */
td_status td_gpu_load(const char *spec, struct td_perf *ret_perf, struct td_err *err);

#endif
