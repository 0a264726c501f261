/* model_internal.h - what weights.c fills and forward.c reads. Inside common/model only. */
#ifndef TD_MODEL_INTERNAL_H
#define TD_MODEL_INTERNAL_H

#include "common/base/mem.h"
#include "common/model/model.h"
#include "kernels/ops.h"

/* One transformer layer. q, k, v are the rows of one matrix, and so are gate and up: one GEMM each, one pass over the input.
 * Vectors are f32; NULL where the architecture has none. */
struct td_layer {
    const float *attn_norm, *mlp_norm; /* [hidden]                                         */
    const float *q_norm, *k_norm;      /* [head_dim]                                       */
    const float *qkv_bias;             /* [q + 2 kv]                                       */
    const float *o_bias, *down_bias;   /* [hidden]                                         */
    const float *gate_up_bias;         /* [2 intermediate]                                 */
    struct td_weight qkv;              /* [q + 2 kv, hidden], q = n_heads * head_dim, ...  */
    struct td_weight o;                /* [hidden, q]                                      */
    struct td_weight gate_up;          /* [2 intermediate, hidden]                         */
    struct td_weight down;             /* [hidden, intermediate]                           */
};

/* Written by td_model_open, read-only afterwards: any number of threads may read. */
struct td_model {
    struct td_model_config config;
    const struct td_ops *ops;
    struct td_thread_pool *threads;
    enum td_dtype dtype; /* compute and KV: F32 or BF16                      */
    int32_t max_len;
    struct td_layer *layers;  /* [n_layers]                                       */
    const float *final_norm;  /* [hidden]                                         */
    struct td_weight lm_head; /* [vocab, hidden]                                  */
    const void *embed;        /* [vocab, hidden] row-major, as in the checkpoint  */
    enum td_dtype embed_dtype;
    float *cos_sin;        /* [max_len, head_dim]: cosines, then sines         */
    struct td_arena arena; /* all of the above                                 */
    uint64_t hash, weight_bytes;
};

/* Loads (dir) or generates (dir NULL) the weights into model->arena: layers, final_norm, lm_head, embed; the rotary table's space
 * too. config, ops, threads, dtype and max_len are set. Fills weight_bytes and *ret_digest. */
td_status td_weights_load(struct td_model *model, const char *dir, bool quiet, uint64_t *ret_digest, struct td_err *err);

#endif
