/* ops.h - the contract between the forward pass and the arithmetic: one table of functions per
 * instruction set.
 *
 * Why here: the forward pass (common/model) is written once against this table; ref/ holds the
 * obvious version of every entry, cpu/ the fast ones, cuda/ the device's. Chosen once at boot;
 * never an `if` in a loop.
 *
 * Batch invariance (I1). For every entry: the bits of one output row depend on that row's inputs
 * alone - never on the number of rows M, on the other rows, on `part`/`n_parts`, nor on how a
 * prompt was cut into chunks. So: one fixed reduction order along k for every M; attention walks
 * the keys of a row in fixed tiles aligned to absolute position. Different instruction sets may
 * differ.
 *
 * Parts. Every entry computes its share `part` of `n_parts` of the outputs and returns; the caller
 * runs all parts (on any threads) and puts a barrier between entries. An entry never allocates,
 * locks or waits. Calls with n_parts = 1 compute everything.
 *
 * Types. Activations between entries are f32. With compute dtype BF16 the inputs of a GEMM and
 * of attention are rounded to bf16 (nearest even) and accumulated in f32; with F32 nothing is
 * rounded. Weights of F16 files keep f16 storage and are widened exactly; a GEMM with them
 * rounds no activation. For attention the compute type is the cache's: q is rounded when the
 * cache is BF16, the probabilities stay f32 - except on a device with tensor cores, where they
 * enter the product with V as bf16 does any GEMM: rounded to bf16 (the sum that they are divided
 * by is that of the rounded ones). All pointers are borrowed; no two arguments alias unless
 * said. */
#ifndef TD_KERNELS_OPS_H
#define TD_KERNELS_OPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/dtype.h"
#include "common/base/status.h"

/* A weight in the physical order its table likes best. data: 64-byte aligned,
 * td_ops.packed_bytes() long, owner: the caller. */
struct td_weight {
    const void *data;
    int32_t n_out, n_in;
    enum td_dtype dtype;
};

/* y[m,:] = x[m,:] . W^T (+ bias) (+ y when accumulate)         W is [n_out, n_in] as in the
 *     checkpoint
 *   x [n_rows, n_in] f32, row stride x_stride (elements);   y [n_rows, n_out] f32, row stride
 *       y_stride;   bias [n_out] f32 or NULL
 * scratch: td_ops.gemm_scratch_bytes(n_rows, n_in) bytes, 64-byte aligned, SHARED by all parts:
 * entries `gemm_prepare` (all parts, then a barrier) fills it from x (rounding to w's compute
 * type), `gemm` reads it. Several gemms may reuse one prepared x. */
struct td_gemm_args {
    const struct td_weight *w;
    const float *x;
    float *y;
    const float *bias;
    void *scratch;
    int32_t n_rows;
    int64_t x_stride, y_stride;
    bool accumulate; /* y += : the residual; added last: y = y + (dot + bias) */
};

/* out[m,:] = x[m,:] / sqrt(mean(x[m,:]^2) + eps) * w         x, out [n_rows, dim] f32 (may alias);
 *     w [dim] f32
 * Rows are n_rows runs of dim at x + r*x_stride. Also the per-head q/k norm of Qwen3 (rows =
 * tokens*heads). */
struct td_rmsnorm_args {
    const float *x, *w;
    float *out;
    int32_t n_rows, dim;
    int64_t x_stride, out_stride;
    float eps;
};

/* Rotary embedding, "rotate half" pairs (i, i + head_dim/2), in place on n_heads heads of each row;
 * then K and V rows are stored into the paged cache.
 *   cos_sin [max_positions, head_dim] f32: head_dim/2 cosines then head_dim/2 sines of each
 *   position (made by the model: all scalings) x [n_rows, n_heads, head_dim] f32, row stride
 *   x_stride */
struct td_rope_args {
    float *x;
    const float *cos_sin;
    const int32_t *positions; /* [n_rows], each < max_positions */
    int32_t n_rows, n_heads, head_dim;
    int64_t x_stride;
};

/* Where a paged KV cache lives: canonical layout [block][layer][K,V][kv head][token][head_dim];
 * `base` already points at this layer of block 0, so K of (block b, head h, token t) starts at
 * base + b*block_bytes + (h*block_size + t)*head_dim*elem, V of the same at + kv_bytes where
 * kv_bytes = n_kv_heads*block_size*head_dim*elem. */
struct td_kv_view {
    uint8_t *base;
    int64_t block_bytes;
    int32_t n_kv_heads, block_size, head_dim;
    enum td_dtype dtype; /* F32 or BF16 */
};

/* Stores row r of k, v [n_rows, n_kv_heads, head_dim] f32 at token slot position[r] of its
 * sequence's block table. */
struct td_kv_store_args {
    struct td_kv_view kv;
    const float *k, *v;
    int64_t k_stride, v_stride;
    const int32_t *positions;           /* [n_rows] */
    const int32_t *row_seq;             /* [n_rows] index into block_tables */
    const int32_t *const *block_tables; /* [n_seqs] -> block ids; position p lives in
                                           block_tables[s][p / block_size] */
    int32_t n_rows;
};

/* head_dim of attention: even, at most this; the model refuses others by name */
#define TD_ATTN_HEAD_DIM_MAX 256

/* out[r,h,:] = softmax(q[r,h,:] . K^T * scale) V over key positions max(0, p - window + 1) .. p, p
 * = positions[r] (window 0 = all; scale > 0). Slots outside that range are never read (they may
 * hold NaN). GQA: head h reads kv head h / (n_heads/n_kv_heads).
 *   q, out [n_rows, n_heads, head_dim] f32, strides q_stride, out_stride
 * Rows of one sequence with consecutive positions are adjacent, so a prefill chunk can be tiled.
 * scratch: attn_scratch_bytes(...) bytes per PART (the caller gives part p the p-th slice). */
struct td_attn_args {
    struct td_kv_view kv;
    const float *q;
    float *out;
    int64_t q_stride, out_stride;
    const int32_t *positions;
    const int32_t *row_seq;
    const int32_t *const *block_tables;
    int32_t n_rows, n_heads;
    float scale;
    int32_t window;
    void *scratch; /* base of n_parts slices of scratch_bytes_per_part */
    size_t scratch_bytes_per_part;
    /* device tables: what td_ops.attn_plan wrote, on the host; it was also put at `device_plan`
       (256-byte aligned). Attention counts */
    const void *plan;
    void *device_plan; /* arrivals in it and leaves it as it found it, so that every
                          layer of the step can use it */
};

/* What attn_plan looks at: host arrays, as the device's will be in the step. */
struct td_attn_plan_args {
    const int32_t *positions, *row_seq;  /* [n_rows]; position -1: padding */
    int32_t n_rows, n_heads, n_kv_heads; /* of this rank */
};

struct td_device;

struct td_ops {
    const char *name;               /* "ref", "avx2", "avx512", "cuda" */
    const struct td_device *device; /* NULL: arguments are the host's memory; else device.h says
                                       what is different */

    size_t (*packed_bytes)(int32_t n_out, int32_t n_in, enum td_dtype dtype);
    /* Rows [row0, row0 + n_rows) of the checkpoint's row-major [n_out, n_in] `src` into `packed`;
     * row0 and n_rows multiples of 64 except at the end, so that loading can run on all threads and
     * show progress. compute type = dtype of the result: src dtype may differ
     * (src F16/BF16/F32 -> F32 exactly; F32/F16 -> BF16 rounds). Any thread. Device tables: both
     *     are the host's memory; a matrix is packed in pieces,
     * each as if it were the whole (row0 = 0, n_out = n_rows), and the loader uploads the piece
     * of rows [r, ..) to data + packed_bytes(r, n_in, dtype), r % 64 == 0. */
    void (*pack)(void *packed, int32_t n_out, int32_t n_in, enum td_dtype dtype, const void *src,
                 enum td_dtype src_dtype, int32_t row0, int32_t n_rows);

    size_t (*gemm_scratch_bytes)(int32_t n_rows, int32_t n_in);
    void (*gemm_prepare)(const struct td_gemm_args *a, int part, int n_parts);
    void (*gemm)(const struct td_gemm_args *a, int part, int n_parts);

    void (*rmsnorm)(const struct td_rmsnorm_args *a, int part, int n_parts);
    void (*rope)(const struct td_rope_args *a, int part, int n_parts);
    void (*kv_store)(const struct td_kv_store_args *a, int part, int n_parts);

    size_t (*attn_scratch_bytes)(int32_t n_heads, int32_t n_kv_heads, int32_t head_dim,
                                 int32_t block_size);
    void (*attn)(const struct td_attn_args *a, int part, int n_parts);

    /* Device tables only, else NULL. How the rows of one step are cut into thread blocks:
     * written once per step by the host from host arrays, put on the device, used by the
     * attention of every layer. ret_shape: all of it that decides grids (two steps with equal
     * shapes may share a graph); no more than 40 bits. attn_plan_bytes bytes are put, whatever
     * the step. */
    size_t (*attn_plan_bytes)(int32_t max_rows, int32_t n_kv_heads);
    void (*attn_plan)(const struct td_attn_plan_args *a, void *ret_plan, uint64_t *ret_shape);

    /* Fused pairs, so that a normed or gated row crosses memory once; NULL: the caller uses the
     * two entries. Same bits as the pair. next->x is not read: the prepared rows go straight to
     * next->scratch. */
    void (*rmsnorm_prepare)(const struct td_rmsnorm_args *a, const struct td_gemm_args *next,
                            int part, int n_parts);
    void (*silu_mul_prepare)(const float *gate, const float *up, int64_t gate_stride,
                             int64_t up_stride, const struct td_gemm_args *next, int part,
                             int n_parts);

    /* What stands between the product of q, k, v and attention, in one pass over those rows: the
     * heads of q and k normed (q_norm and k_norm: w and
     * eps alone are read; NULL: no norm), rope, kv_store. Heads of q: rope->n_heads -
     *     store->kv.n_kv_heads. NULL: the caller uses the entries. Same
     * bits as they. */
    void (*rope_store)(const struct td_rmsnorm_args *q_norm, const struct td_rmsnorm_args *k_norm,
                       const struct td_rope_args *rope, const struct td_kv_store_args *store,
                       int part, int n_parts);

    /* out[r,i] = silu(gate[r,i]) * up[r,i]; out may alias gate. [n_rows, dim], strides in
       elements */
    void (*silu_mul)(float *out, const float *gate, const float *up, int32_t n_rows, int32_t dim,
                     int64_t out_stride, int64_t gate_stride, int64_t up_stride, int part,
                     int n_parts);

    /* out[r,:] = table[ids[r],:] widened; table is the checkpoint's row-major [vocab, dim] in
       `dtype`. ids are checked by the caller. */
    void (*embed)(float *out, const void *table, enum td_dtype dtype, const int32_t *ids,
                  int32_t n_rows, int32_t dim, int part, int n_parts);
};

/* The fastest table this CPU runs (TANDEM_OPS=ref|avx2|avx512 forces one), the named one, or NULL
 *     when the CPU lacks it (or nobody
 * knows the name). Static storage; thread-safe. */
const struct td_ops *td_ops_best(void);
const struct td_ops *td_ops_by_name(const char *name);

#endif
