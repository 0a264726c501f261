/* model_internal.h - what weights.c fills and forward.c reads. Inside common/model only. */
#ifndef TD_MODEL_INTERNAL_H
#define TD_MODEL_INTERNAL_H

#include <stdalign.h>
#include <stdatomic.h>

#include "common/model/comm.h"
#include "common/model/family.h"
#include "common/model/mix.h"
#include "common/base/mem.h"
#include "common/model/model.h"
#include "kernels/choice.h"
#include "kernels/experts.h"
#include "kernels/ops.h"

/* A matrix of one or more pieces below one another, because the tensors that make it up may have
 * different formats. Plain formats are brought to one, so then there is one piece. */
#define TD_MATRIX_PIECES_MAX 3
struct td_matrix {
    struct td_weight pieces[TD_MATRIX_PIECES_MAX];
    int32_t n_pieces;
    int32_t n_out; /* rows of all pieces */
};

/* One expert of a mixture. Of n ranks that share it each has one n-th of the rows of gate, of up
 * and of down. */
struct td_expert {
    struct td_matrix gate_up;              /* [2 experts.intermediate / n, hidden] */
    struct td_matrix down;                 /* [hidden / n, experts.intermediate] */
    const float *gate_up_bias, *down_bias; /* NULL: none */
};

/* One transformer layer. q, k and v are the rows of one matrix, and so are gate and up: one GEMM
 * each, one pass over the input. Vectors are f32, and NULL where the architecture has none. */
struct td_layer {
    struct td_layer_spec spec;         /* what it computes */
    const float *attn_norm, *mlp_norm; /* [hidden]                                         */
    const float *attn_out_norm, *mlp_out_norm; /* [hidden]                                 */
    /* [head_dim]; with TD_QK_NORM_ROWS [n_heads * head_dim] and [n_kv_heads * head_dim] */
    const float *q_norm, *k_norm;
    const float *sinks;                /* [n_heads]                                        */
    const float *qkv_bias;             /* [q + 2 kv]                                       */
    const float *o_bias, *down_bias;   /* [hidden]                                         */
    const float *gate_up_bias;         /* [2 intermediate]                                 */
    struct td_matrix qkv;              /* [q + 2 kv, hidden], q = n_heads * head_dim, ...  */
    struct td_matrix o;                /* [hidden, q]                                      */
    /* latent attention: qkv is [q_rank, or n_heads (nope + rope); then kv_rank + rope], o has
     * n_heads v columns, q_norm is [q_rank], k_norm [kv_rank]; and of each head */
    struct td_matrix q_b;              /* [n_heads (nope + rope), q_rank] */
    struct td_matrix *k_absorbed;      /* [n_heads] of [kv_rank, nope]; owns the memory of both */
    struct td_matrix *v_expanded;      /* [n_heads] of [v, kv_rank] */
    struct td_matrix gate_up;          /* [2 intermediate, hidden]                         */
    struct td_matrix down;             /* [hidden, intermediate]                           */
    /* a mixture, and then gate_up and down are those of shared experts, if any; NULL: none */
    struct td_expert *experts; /* [experts.n]; empty those of other ranks */
    /* F32, so that their products round nothing */
    struct td_matrix expert_router; /* [experts.n, hidden] */
    struct td_matrix shared_gate;   /* [1, hidden]; no piece: shared experts have no gate */
    const float *expert_bias;       /* [experts.n] */
    const float *expert_router_bias; /* [experts.n] */
};

/* The format of one scaled matrix, or of this rank's columns of it. */
struct td_model_format {
    struct td_model_format *next;
    struct td_format format;
    uint16_t group_of[]; /* [n_in] */
};

/* Written by td_model_open and read-only afterwards: any number of threads may read it. */
struct td_model {
    struct td_model_config config;
    struct td_comm *comm; /* NULL: one rank                                   */
    int32_t expert_ranks; /* as in td_model_params, not 0 */
    /* config with this rank's n_heads, n_kv_heads and intermediate, which forward.c computes
     * with */
    struct td_model_config shard;
    int32_t logit_first[TD_COMM_MAX_RANKS + 1]; /* rank r computes logits [first[r], first[r +
                                                   1]) */
    const struct td_ops *ops;
    char kernels[TD_OPS_CHOICE_TEXT];
    struct td_thread_pool *threads;
    enum td_dtype dtype;    /* compute type: F32 or BF16 */
    enum td_dtype kv_dtype; /* F32, BF16, INT8 or FP8 */
    const struct td_mix *mix; /* to which the weights are rounded; NULL: as in the files */
    int32_t max_len;
    struct td_layer *layers;  /* [n_layers]                                       */
    /* by which the frequency of pair i is divided (tensor rope_freqs of a GGUF file); 0: none */
    float rope_factors[TD_ATTN_HEAD_DIM_MAX / 2];
    int32_t n_rope_factors;
    const float *final_norm;  /* [hidden]                                         */
    struct td_matrix lm_head; /* [vocab, hidden]; with several ranks this rank's rows */
    /* [vocab, hidden] row-major, as in the checkpoint; NULL: it has blocks, and they are the rows
     * of embed_rows or, where that has no pieces, of lm_head */
    const void *embed;
    struct td_matrix embed_rows;
    const struct td_format *embed_format;
    float slopes[TD_HEADS_MAX]; /* of this rank's heads, where scores have slopes */
    /* of each of config.rope [max_len, td_rope_width]: the cosines of half as many pairs, then the
     * sines; 1 and 0 where a pair is not rotated */
    float *cos_sin[TD_ROPES_MAX];
    struct td_model_format *formats; /* of the scaled matrices above; a list, freed one by one */
    struct td_arena arena;  /* memory of all of the above on the host */
    uint8_t *device_memory; /* memory of all of the above on a device */
    /* experts that are packed when they are chosen: NULL, or experts_most > 0 and these; weights
     * packs them */
    struct td_lazy_experts *lazy_experts;
    struct td_weights *weights;
    uint64_t experts_most; /* bytes that packed experts may take; 0: they are packed at load */
    uint64_t expert_bytes; /* of the matrices of all experts of this rank */
    uint64_t expert_weight_bytes; /* the same with their biases */
    bool no_graphs;
    uint64_t hash, weight_bytes, memory_bytes;
};

/* The first logit that rank r of n computes. */
static inline int32_t td_logit_first(int32_t vocab, int32_t r, int32_t n)
{
    return (int32_t)((int64_t)vocab * r / n);
}

/* The first expert of each layer that part r of n has. */
static inline int32_t td_expert_first(int32_t n_experts, int32_t r, int32_t n)
{
    return (int32_t)((int64_t)n_experts * r / n);
}

/* Loads (dir) or generates (dir NULL) the weights into model->arena: layers, final_norm, lm_head,
 * embed; also makes room for the rotary table. config, ops, threads, dtype and max_len are set.
 * Fills weight_bytes, memory_bytes and *ret_digest. */
td_status td_weights_load(struct td_model *model, const char *dir, bool quiet, uint64_t *ret_digest,
                          struct td_err *err);
/* Makes the layers, checks the names, shapes and formats of what td_weights_load would read, and
 * fills weight_bytes and memory_bytes. Reads no weights and keeps no memory for them. */
td_status td_weights_look(struct td_model *model, const char *dir, struct td_err *err);

/* Frees what lazy experts keep, with their memory. */
void td_weights_close(struct td_model *model);
/* Frees model->formats. */
void td_weights_free_formats(struct td_model *model);
/* Frees model->layers. */
void td_weights_free_layers(struct td_model *model);

/* Rows that the experts of one layer have had together, and the most that one has. */
struct td_expert_layer {
    uint64_t rows, most;
};

/* What a mixture of experts computes with (experts.c). NULL where the model has none, and what only
 * the host has (first, counts, had, of_layer, shares) on a device. */
struct td_mixture {
    float *logits;    /* [max_rows, experts.n] of the expert router */
    int32_t *ids;     /* [max_rows, n_used] */
    float *weights;   /* [max_rows, n_used] */
    float *shared_gate; /* [max_rows] logits of the gate of shared experts */
    int32_t *first;   /* [experts.n + 1] of each expert's rows in what follows */
    struct td_expert_counts *counts;  /* busiest_share is made when asked for */
    uint64_t *had;                    /* [n_layers, experts.n] rows that each has had */
    struct td_expert_layer *of_layer; /* [n_layers] */
    int32_t *row_of;  /* [slab rows * n_used] */
    int32_t *at;      /* [slab rows, n_used] inverse of row_of */
    int32_t *tiles;   /* device only: how products are cut */
    float *rows;      /* [slab rows * n_used, hidden] into gate and up; then out of down */
    float *gate_up;   /* [slab rows * n_used, 2 experts.intermediate] */
    float *shares;    /* what ranks that share experts computed of either; NULL: none do */
    uint8_t *scratch; /* of the products of all experts */
    size_t scratch_bytes;
};

/* What latent attention computes with (latent.c). NULL where the model has none. */
struct td_latent {
    float *q;         /* [max_rows, n_heads (nope + rope)]; where q is of two products */
    float *absorbed;  /* [max_rows, n_heads * head_dim]: q of attention */
    float *out;       /* [max_rows, n_heads * v]: what o multiplies */
    uint8_t *scratch; /* [n_heads][head_scratch_bytes] of the products of all heads */
    size_t head_scratch_bytes;
};

/* forward_device.c: the part of a workspace beside its buffers, when those are a device's */
struct td_forward_device;

/* One part's share of a product, in chunks. The part takes them in order; a part that has none left
 * takes some of the others', because two cores are seldom equally fast for a whole product. */
struct td_share {
    /* [any part] number of the product << 16 | how many of the share's chunks are taken */
    alignas(64) _Atomic uint64_t taken;
    uint64_t product; /* [its own part alone] number of the product that it works on, from 1 */
};

struct td_workspace {
    const struct td_model *model;
    int32_t max_rows, max_logit_rows;
    struct td_arena arena;
    float *x;      /* [max_rows, hidden]                    the residual
                                          stream */
    float *h;      /* [max_rows, hidden]                    normed input of a
                                          GEMM */
    float *branch; /* [max_rows, hidden] what o and down return, where that is not added to x at
                      once; NULL: in no layer */
    float *qkv;    /* [max_rows, q + 2 kv] */
    float *attn;   /* [max_rows, q] */
    float *mlp;    /* [max_rows, 2 intermediate]            gate, then up;
                                          silu(gate) * up over gate */
    float *x_last; /* [max_logit_rows, hidden] the wanted rows, after the last K and V are stored */
    float *q_last; /* [max_logit_rows, q]                   device: [.., q +
                                          2 kv] */
    int32_t *position_last, *seq_last; /* [max_logit_rows] */
    float *logits;                     /* [max_logit_rows, vocab] */
    struct td_mixture mixture;
    struct td_latent latent;
    void *gemm_scratch;
    struct td_share *shares; /* [threads]; on a device unused */
    uint8_t *attn_scratch;
    size_t attn_scratch_bytes; /* bytes per part */
    /* result of this forward's calls between ranks; member 0 sets it before a meeting */
    td_status comm_status;
    struct td_forward_device *device; /* NULL: host */
};

/* One batch in the form that the entries take: the arguments of td_model_forward, or their copies
 * on a device. */
struct td_batch {
    const int32_t *tokens, *positions, *row_seq;
    const int32_t *const *block_tables;
    int32_t n_rows, n_logit_rows;
    uint8_t *kv_base;
    size_t kv_stride; /* bytes from a block to the next; 0: kv->block_bytes */
    const struct td_kv_layout *kv;
    const int32_t *logit_rows;
    const struct td_forward_layers *layers; /* NULL: no calls */
    const struct td_forward_inputs *inputs; /* NULL: no calls */
    /* Device only: position and sequence of the wanted rows; attention's plans for all rows and for
     * the wanted ones, on the host and on the device. */
    const int32_t *position_last, *seq_last;
    const void *plan, *plan_last;
    void *device_plan, *device_plan_last;
};

/* Calls the list of entries, for one part. On a device it issues them all (part 0 of 1). */
void td_forward_walk(struct td_model *model, struct td_workspace *ws, const struct td_batch *batch,
                     int part, int n_parts);

/* forward.c: whether rows that are prepared for one matrix serve the other: codes for blocks, or
 * the rounding of a plain format. */
bool td_prepared_alike(const struct td_weight *a, const struct td_weight *b);

/* experts.c: bytes of the buffers of a mixture for max_rows rows, 0 where the model has none; and
 * their places from `base` on, which is aligned as a workspace is. */
size_t td_mixture_bytes(const struct td_model *model, int32_t max_rows);
void td_mixture_place(const struct td_model *model, int32_t max_rows, uint8_t *base,
                      struct td_mixture *ret);
/* Adds the mixture of layer `layer` to rows x of the workspace's model: ws->h holds the normed
 * rows, which every part sees. Host only; all parts call, and meet inside. False: the group of
 * ranks is lost, and ws->comm_status says how. */
bool td_mixture_forward(struct td_workspace *ws, int32_t layer, float *x, int32_t n_rows, int part,
                        int n_parts);

/* The choice of experts of a layer for n_rows rows: on a CPU and on a device. */
struct td_experts_choose_args td_mixture_choice(const struct td_workspace *ws, int32_t layer,
                                                int32_t n_rows);

/* experts_device.c: the same places on a device (base NULL: only counts), and their bytes; and the
 * mixture as entries of its table, in which a row of position -1 has no experts. */
size_t td_mixture_device_place(const struct td_model *model, int32_t max_rows, uint8_t *base,
                               struct td_mixture *ret);
void td_mixture_device_issue(const struct td_workspace *ws, int32_t layer, float *x,
                             const int32_t *positions, int32_t n_rows);

/* latent.c: the same two of latent attention. */
size_t td_latent_bytes(const struct td_model *model, int32_t max_rows);
void td_latent_place(const struct td_model *model, int32_t max_rows, uint8_t *base,
                     struct td_latent *ret);
/* The rows of a forward after the product that gives q, or the row that q is a product of, and
 * behind it the row of the cache. */
struct td_latent_rows {
    float *products; /* [n, stride]; changed */
    int64_t stride;
    const float *cos_sin;
    const int32_t *positions, *row_seq;
    const int32_t *const *block_tables;
    int32_t n;
};
/* Stores the rows in the cache, and fills ws->latent.absorbed. Host only; all parts call, and meet
 * inside. */
void td_latent_prepare(struct td_workspace *ws, int32_t layer, const struct td_latent_rows *rows,
                       const struct td_kv_view *kv, int part, int n_parts);
/* What attention wrote to ws->attn, rows of n_heads * kv_rank, becomes ws->latent.out. */
void td_latent_expand(struct td_workspace *ws, int32_t layer, int32_t n_rows, int part,
                      int n_parts);

/* model.c: the frequencies of the pairs of a rotation, [rotary_dim / 2], for a deployment in which
 * sequences are at most max_len tokens long. */
void td_model_rope_frequencies(const struct td_model_config *c, const struct td_rope *rope,
                               int32_t max_len, float *ret_frequencies);
/* model.c: by which Llama 3's scaling divides the frequency of each pair of config.rope[0],
 * [rotary_dim / 2]. */
void td_model_rope_factors(const struct td_model_config *c, float *ret_factors);
/* model.c: the slopes of heads [first, first + n) of n_heads (ALiBi, Press et al. 2022). Of a power
 * of two of heads, head h has 2^(-8 (h + 1) / n_heads); heads beyond the largest power have every
 * second slope of twice as many heads. */
void td_model_alibi_slopes(int32_t n_heads, int32_t first, int32_t n, float *ret_slopes);

/* forward_device.c: makes the device part of a workspace (`bytes` of buffers at *ret_memory), and
 * runs a forward there. */
td_status td_forward_device_create(struct td_workspace *ws, size_t bytes, uint8_t **ret_memory,
                                   struct td_err *err);
void td_forward_device_destroy(struct td_workspace *ws);
td_status td_forward_device(struct td_model *model, struct td_workspace *ws,
                            const struct td_forward_args *args, float **ret_logits);

#endif
