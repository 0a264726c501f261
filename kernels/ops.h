/* ops.h - the contract between the forward pass and the arithmetic: one table of functions per
 * instruction set.
 *
 * Why here: the forward pass (common/model) is written once, against this table. ref/ holds the
 * obvious version of every entry, cpu/ the fast ones, cuda/ those of a GPU. The table is chosen
 * once, at boot; no loop asks which one it is.
 *
 * Batch invariance (I1). For every entry, the bits of one output row depend on that row's inputs
 * alone: never on the number of rows M, on the other rows, on `part` and `n_parts`, or on how a
 * prompt was cut into chunks. So the reduction along k has one fixed order for every M, and
 * attention walks the keys of a row in fixed tiles that are aligned to absolute positions.
 * Different instruction sets may give different bits (td_ops.numerics).
 *
 * Parts. Every entry computes its share `part` of `n_parts` of the outputs and returns. The caller
 * runs all parts, on any threads, and puts a barrier between entries. A call with n_parts = 1
 * computes everything. An entry never allocates, locks or waits.
 *
 * Types. Activations between entries are f32. With compute dtype BF16 the inputs of a GEMM and of
 * attention are rounded to bf16 (nearest even) and accumulated in f32; with F32 nothing is rounded.
 * Weights of F16 files stay f16 in memory and are widened exactly; a GEMM with them rounds no
 * activation. Attention computes in the type of the cache: q is rounded when the cache is BF16, and
 * the probabilities stay f32. With a coded cache q stays f32, a score is (q . codes) * scale of the
 * key, and the scale of V multiplies the probability. A device with tensor cores is the exception:
 * there the probabilities, too, are rounded to bf16 before the product with V, and they are divided
 * by the sum of the rounded ones.
 *
 * Pointers. All pointers are borrowed. No two arguments alias unless the entry says so. */
#ifndef TD_KERNELS_OPS_H
#define TD_KERNELS_OPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/dtype.h"
#include "common/base/status.h"
#include "kernels/format.h"

/* A weight matrix in the physical order that its table prefers. The caller owns `data`, which is
 * 64-byte aligned and packed_bytes() bytes long: those of td_ops for a plain format, of
 * td_ops.blocks for a block format, of td_ops.scaled for a scaled one. */
struct td_weight {
    const void *data;
    int32_t n_out, n_in; /* block format: n_in is a multiple of format->block */
    const struct td_format *format;
};

/* y[m,:] = x[m,:] . W^T (+ bias) (+ y when accumulate)
 *   W        [n_out, n_in] as in the checkpoint, packed
 *   x        [n_rows, n_in]   f32, row stride x_stride (elements)
 *   y        [n_rows, n_out]  f32, row stride y_stride (elements)
 *   bias     [n_out]          f32, or NULL
 *   scratch  td_ops.gemm_scratch_bytes(n_rows, n_in) bytes, 64-byte aligned, SHARED by all parts
 * `gemm_prepare` (all parts, then a barrier) fills scratch from x, rounded to the compute type of
 * W; `gemm` reads scratch. Several gemms may use one prepared x. */
struct td_gemm_args {
    const struct td_weight *w;
    const float *x;
    float *y;
    const float *bias;
    void *scratch;
    int32_t n_rows;
    int64_t x_stride, y_stride;
    bool accumulate; /* adds to y, for the residual; y is added last: y = y + (dot + bias) */
};

/* out[m,:] = x[m,:] / sqrt(mean(x[m,:]^2) + eps) * w
 *   x, out  [n_rows, dim]  f32, row strides x_stride, out_stride (elements); out may alias x
 *   w       [dim]          f32
 * Also the per-head norm of q and k of Qwen3, where n_rows = tokens * heads.
 * centre: the row's mean is subtracted first, so that it is LayerNorm without a bias (Ba et al.
 * 2016). Device tables refuse models that want it. */
struct td_rmsnorm_args {
    const float *x, *w;
    float *out;
    int32_t n_rows, dim;
    int64_t x_stride, out_stride;
    float eps;
    bool centre;
};

/* Rotary embedding in place, of "rotate half" pairs (i, i + head_dim/2), on n_heads heads of each
 * row.
 *   x        [n_rows, n_heads, head_dim]  f32, row stride x_stride (elements)
 *   cos_sin  [max_positions, head_dim]    f32, made by the model with every scaling in it: of each
 *                                         position head_dim/2 cosines, then head_dim/2 sines */
struct td_rope_args {
    float *x;
    const float *cos_sin;
    const int32_t *positions; /* [n_rows], each < max_positions */
    int32_t n_rows, n_heads, head_dim;
    int64_t x_stride;
};

/* Where a paged KV cache lies, for one layer. The canonical layout is
 *     [block][layer][K,V][kv head] { [token][head_dim] elements, scales }
 * `base` points at this layer of block 0, so with elem the size of one element in bytes the row of
 * (block b, head h, token t) starts at
 *     K: base + b*block_bytes + h*td_kv_head_bytes(..) + t*head_dim*elem
 *     V: K's address + n_kv_heads*td_kv_head_bytes(..)
 * Only INT8 and FP8 have scales: an f32 for each token (two of bf16 where V is in the rows of K),
 * td_kv_scales_at(..) bytes behind the head's first element. F32 and BF16 rows follow each other
 * without a gap. The bytes between scales and the next head are never read. */
struct td_kv_view {
    uint8_t *base;
    int64_t block_bytes;
    int32_t n_kv_heads, block_size, head_dim;
    enum td_dtype dtype; /* F32, BF16, INT8 or FP8 */
    /* Host tables: elements of a row of V, at most head_dim (0: head_dim); and whether these are
     * the first of K's row, so that there is no plane of V. Codes with such a plane: head_dim. */
    int32_t v_dim;
    bool v_in_k;
};

static inline int32_t td_kv_view_v_dim(const struct td_kv_view *kv)
{
    return kv->v_dim ? kv->v_dim : kv->head_dim;
}

/* Bytes from one head of a block to the next. */
static inline int64_t td_kv_view_head_bytes(const struct td_kv_view *kv)
{
    return (int64_t)td_kv_head_bytes(kv->dtype, kv->block_size, kv->head_dim);
}
/* The same of V; and bytes from the first head of K to that of V. */
static inline int64_t td_kv_view_v_head_bytes(const struct td_kv_view *kv)
{
    return (int64_t)td_kv_head_bytes(kv->dtype, kv->block_size,
                                     kv->v_in_k ? kv->head_dim : td_kv_view_v_dim(kv));
}
static inline int64_t td_kv_view_v_at(const struct td_kv_view *kv)
{
    return kv->v_in_k ? 0 : kv->n_kv_heads * td_kv_view_head_bytes(kv);
}
/* Bytes from one row of V to the next; F32 and BF16. */
static inline int64_t td_kv_view_v_row_bytes(const struct td_kv_view *kv)
{
    return (kv->v_in_k ? kv->head_dim : td_kv_view_v_dim(kv)) * (int64_t)td_dtype_bytes(kv->dtype);
}
/* The scale of token t of the head whose first element is at `head`. */
static inline float *td_kv_view_scale(const struct td_kv_view *kv, uint8_t *head, int32_t t)
{
    return (float *)(void *)(head + td_kv_scales_at(kv->dtype, kv->block_size, kv->head_dim)) + t;
}

/* Stores row r of k and v at position positions[r] of its sequence, in the block that the
 * sequence's block table names for it. Coded types: kv_codes.h is the formula, and every table
 * stores the same bits; head_dim * block_size is a multiple of 4.
 *   k, v  [n_rows, n_kv_heads, head_dim]  f32, row strides k_stride, v_stride (elements); v has
 *         rows of v_dim, and is not read where V is in the rows of K */
struct td_kv_store_args {
    struct td_kv_view kv;
    const float *k, *v;
    int64_t k_stride, v_stride;
    const int32_t *positions; /* [n_rows] */
    const int32_t *row_seq;   /* [n_rows] index into block_tables */
    /* [n_seqs] arrays of block ids: position p of sequence s lies in block
     *     block_tables[s][p / block_size] */
    const int32_t *const *block_tables;
    int32_t n_rows;
};

/* The largest head_dim where K and V have heads of their own, and on every device; head_dim is
 * even. The model refuses others by name. */
#define TD_ATTN_HEAD_DIM_MAX 256
/* The largest head_dim where all heads share one row, that of a latent cache, on host tables: no
 * device has such a cache. */
#define TD_ATTN_ROW_MAX 1024

/* out[r,h,:] = softmax(q[r,h,:] . K^T * scale) V over the key positions
 * max(0, p - sliding_window + 1) .. p, where p = positions[r]; sliding_window 0 = all positions;
 * scale > 0. cap > 0: a score s is cap * tanh(s / cap) before softmax. slopes: then slopes[h] *
 * (k - p) is added for the key at position k (ALiBi, Press et al. 2022). sinks: softmax also counts
 * a key with score sinks[h] (neither scaled nor capped) and value 0. Device tables have none of
 * these.
 *   q, out        [n_rows, n_heads, head_dim]  f32, row strides q_stride, out_stride (elements);
 *                 a head of out has v_dim elements
 *   positions     [n_rows]   int32
 *   row_seq       [n_rows]   int32, index into block_tables
 *   block_tables  [n_seqs]   arrays of block ids, as in td_kv_store_args
 *   scratch       n_parts slices of scratch_bytes_per_part = td_ops.attn_scratch_bytes(...) bytes;
 *                 part p uses slice p
 * Tokens outside the range of positions are never read (they may hold NaN). GQA: head h reads kv
 * head h / (n_heads / n_kv_heads). Rows of one sequence with consecutive positions are adjacent, so
 * that a prefill chunk can be tiled. */
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
    float cap;           /* 0: none */
    const float *slopes; /* [n_heads], >= 0; NULL: none */
    const float *sinks;  /* [n_heads]; NULL: none */
    int32_t sliding_window;
    void *scratch;
    size_t scratch_bytes_per_part;
    /* Device tables only: what td_ops.attn_plan wrote on the host, and where that was put on the
     * device (256-byte aligned). Attention counts the arrivals of its thread blocks in device_plan
     * and leaves the counts as it found them, so every layer of the step can use the same plan. */
    const void *plan;
    void *device_plan;
};

/* What attn_plan reads: host arrays with the values that the device's arrays have in the step. */
struct td_attn_plan_args {
    const int32_t *positions, *row_seq;  /* [n_rows]; position -1 is padding */
    int32_t n_rows, n_heads, n_kv_heads; /* of this rank */
};

struct td_device;

/* The product for block formats, or for scaled ones (format.h). Its entries have the contracts of
 * those of td_ops with the same names. All tables of CPUs that have them give the same bits,
 * because the order of every sum is part of one written formula (blocks.h, scaled.h); devices round
 * the weights' numbers to bf16 and multiply those. The bytes of a packed matrix are those of the
 * file, up to 4 % more for formats with scales of 6 bits, rounded up to whole panels of at most 32
 * rows. */
struct td_block_ops {
    size_t (*packed_bytes)(int32_t n_out, int32_t n_in, const struct td_format *format);
    /* false: a scale is infinite or no number */
    bool (*pack)(void *packed, int32_t n_out, int32_t n_in, const struct td_format *format,
                 const void *src, int32_t row0, int32_t n_rows);
    /* Row `row` of a packed matrix, as td_format_read has it: n_in values. Device tables have
     * `embed` in its place: out[r,:] = row ids[r], zeros where that is below 0. */
    void (*read_row)(const struct td_weight *w, int32_t row, float *ret_values);
    void (*embed)(const struct td_weight *w, const int32_t *ids, int32_t n_rows, float *out);
    size_t (*gemm_scratch_bytes)(int32_t n_rows, int32_t n_in);
    void (*gemm_prepare)(const struct td_gemm_args *a, int part, int n_parts);
    void (*gemm)(const struct td_gemm_args *a, int part, int n_parts);
};

/* How an MLP's gate g and its other half u become one row:
 *   SILU       silu(g) * u
 *   GELU       gelu(g) * u, by tanh: g / 2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 g^3)))
 *              (Hendrycks and Gimpel 2016)
 *   SWIGLU_7   with g' = min(g, 7) and u' = u within -7..7: g' * sigmoid(1.702 g') * (u' + 1) */
enum td_act { TD_ACT_SILU, TD_ACT_GELU, TD_ACT_SWIGLU_7 };

/* out[r,i] = act(gate[r,i], up[r,i])
 *   out, gate, up  [n_rows, dim]  f32, row strides in elements; out may alias gate */
struct td_act_args {
    enum td_act act;
    float *out;
    const float *gate, *up;
    int32_t n_rows, dim;
    int64_t out_stride, gate_stride, up_stride;
};

/* x[r,i] = cap * tanh(x[r,i] * scale / cap), in place; cap 0: x[r,i] * scale
 *   x  [n_rows, dim]  f32, row stride in elements */
struct td_scale_args {
    float *x;
    int32_t n_rows, dim;
    int64_t stride;
    float scale, cap;
};

struct td_ops {
    const char *name; /* "cuda", or one of td_ops_names */
    /* Tables with the same numerics give the same bits in every entry, so their workers may finish
     * each other's requests. NULL: the name. */
    const char *numerics;
    /* NULL: the arguments are host memory; otherwise device.h says what is different */
    const struct td_device *device;
    /* NULL: weights in block formats are refused */
    const struct td_block_ops *blocks;
    /* the same for scaled formats (scaled.h); the sources of pack are rows as scaled.h has them */
    const struct td_block_ops *scaled;

    size_t (*packed_bytes)(int32_t n_out, int32_t n_in, enum td_dtype dtype);
    /* Packs rows [row0, row0 + n_rows) of `src`, the checkpoint's row-major [n_out, n_in] matrix,
     * into `packed`. row0 and n_rows are multiples of 64, except n_rows at the end, so that loading
     * can run on all threads and show progress. The compute type is `dtype`; src_dtype may differ:
     * F16, BF16 and F32 widen to F32 exactly, F32 and F16 are rounded to BF16. Any thread. Device
     * tables: src and packed are host memory. A matrix is packed in pieces, each as if it were the
     * whole (row0 = 0, n_out = n_rows), and the loader uploads the piece of rows [r, ..) to data +
     * packed_bytes(r, n_in, dtype), where r % 64 == 0. */
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

    /* Device tables only, else NULL. The plan says how the rows of one step are cut into thread
     * blocks. The host writes it once per step, from host arrays, and puts it on the device; the
     * attention of every layer uses it. ret_shape, at most 40 bits, holds everything that decides a
     * grid: two steps with equal shapes may share a graph. attn_plan_bytes bytes are put in every
     * step. */
    size_t (*attn_plan_bytes)(int32_t max_rows, int32_t n_kv_heads);
    void (*attn_plan)(const struct td_attn_plan_args *a, void *ret_plan, uint64_t *ret_shape);

    /* Two entries in one pass, so that a normed or gated row crosses memory once; the same bits as
     * the two. next->x is not read, because the prepared rows go straight to next->scratch. NULL:
     * the caller uses the two entries. */
    void (*rmsnorm_prepare)(const struct td_rmsnorm_args *a, const struct td_gemm_args *next,
                            int part, int n_parts);
    void (*silu_mul_prepare)(const float *gate, const float *up, int64_t gate_stride,
                             int64_t up_stride, const struct td_gemm_args *next, int part,
                             int n_parts);

    /* Everything between the product that gives q, k and v and attention, in one pass over those
     * rows: norm of the heads of q and of k, rope, kv_store; the same bits as those entries. Of
     * q_norm and k_norm only w and eps are read; NULL = no norm. q has rope->n_heads -
     * store->kv.n_kv_heads heads. NULL: the caller uses the entries. */
    void (*rope_store)(const struct td_rmsnorm_args *q_norm, const struct td_rmsnorm_args *k_norm,
                       const struct td_rope_args *rope, const struct td_kv_store_args *store,
                       int part, int n_parts);

    /* out[r,i] = silu(gate[r,i]) * up[r,i]
     *   out, gate, up  [n_rows, dim]  f32, row strides in elements; out may alias gate */
    void (*silu_mul)(float *out, const float *gate, const float *up, int32_t n_rows, int32_t dim,
                     int64_t out_stride, int64_t gate_stride, int64_t up_stride, int part,
                     int n_parts);

    /* The other gates, and a scale with or without a cap. NULL on device tables, for which a model
     * that wants them is refused by name. act_mul with SILU gives the bits of silu_mul. */
    void (*act_mul)(const struct td_act_args *a, int part, int n_parts);
    void (*scale_cap)(const struct td_scale_args *a, int part, int n_parts);

    /* out[r,:] = table[ids[r],:], widened to f32
     *   table  [vocab, dim]   row-major as in the checkpoint, of type `dtype`
     *   ids    [n_rows]       int32; the caller has checked that each is in [0, vocab) */
    void (*embed)(float *out, const void *table, enum td_dtype dtype, const int32_t *ids,
                  int32_t n_rows, int32_t dim, int part, int n_parts);
};

/* The entries for a format that is not plain; NULL: this table has none. */
static inline const struct td_block_ops *td_ops_blocks(const struct td_ops *ops,
                                                       const struct td_format *format)
{
    return format->scaled.kind ? ops->scaled : ops->blocks;
}

/* The tables of all CPUs, of one architecture the plainest first. */
enum { TD_N_OPS = 8 };
#define TD_OPS_NAMES_TEXT "ref, avx2, avxvnni, avx512, avx512bf16, amx, neon, neonbf16"
extern const char *const td_ops_names[TD_N_OPS];

/* td_ops_best returns the fastest table that this CPU can run, which it measures in a few
 * milliseconds where several give the same bits (choice.h); TANDEM_OPS=NAME forces one.
 * td_ops_by_name returns the named table. Both return NULL when the CPU lacks the instructions
 * or no table has that name. Static storage; thread-safe. */
const struct td_ops *td_ops_best(void);
const struct td_ops *td_ops_by_name(const char *name);

/* Why td_ops_by_name has no such table here, a text for an error; NULL: it has. The text of "amx"
 * says which of CPU, compiler and kernel lacks what. */
const char *td_ops_lack(const char *name);

static inline const char *td_ops_numerics(const struct td_ops *ops)
{
    return ops->numerics ? ops->numerics : ops->name;
}

#endif
