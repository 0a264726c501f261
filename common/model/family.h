/* family.h - a family of models, as data: one file of families/ for each.
 *
 * Why here: models differ in few things, and in the same ones: which fields of config.json count,
 * which tensors there are, what each layer computes. A family's file says these things and nothing
 * else. config.c, weights.c and forward.c are written once against them and know no family.
 *
 * A family's tables are static and constant: any thread may read them. */
#ifndef TD_MODEL_FAMILY_H
#define TD_MODEL_FAMILY_H

#include <jansson.h>
#include <stddef.h>

#include "common/model/config.h"
#include "kernels/ops.h"

/* ---- tensors --------------------------------------------------------------------------------- */

/* Where a tensor goes in a layer (struct td_layer of model_internal.h). Consecutive rows of a table
 * with one place are stacked: the rows of their tensors follow one another in that matrix. */
enum td_into {
    TD_INTO_ATTN_NORM,
    TD_INTO_QKV,
    TD_INTO_QKV_BIAS,
    TD_INTO_Q_NORM,
    TD_INTO_K_NORM,
    TD_INTO_O,
    TD_INTO_O_BIAS,
    TD_INTO_MLP_NORM,
    TD_INTO_GATE_UP,
    TD_INTO_DOWN,
    TD_INTO_GATE_UP_BIAS,
    TD_INTO_DOWN_BIAS,
    /* norms of what o and down return, before it is added to the residual */
    TD_INTO_ATTN_OUT_NORM,
    TD_INTO_MLP_OUT_NORM,
    TD_INTO_SINKS,
    TD_INTO_EXPERT_ROUTER,
    TD_INTO_EXPERT_ROUTER_BIAS, /* of its logits */
    TD_INTO_EXPERT_BIAS,        /* of the choice alone */
    TD_INTO_SHARED_GATE,        /* shared experts go where an MLP would */
    TD_INTO_Q_B,
    TD_INTO_KV_B, /* becomes two matrices for each head */
    TD_INTO_EXPERT_GATE_UP,
    TD_INTO_EXPERT_GATE_UP_BIAS,
    TD_INTO_EXPERT_DOWN,
    TD_INTO_EXPERT_DOWN_BIAS
};

/* A dimension of a tensor, whose size td_dim_size takes from the config. Rows of Q, K and HEAD are
 * rows of heads that are rotated (RoPE): where only a part of a head is rotated, or where the file
 * has the rows of a rotary pair side by side, loading puts them into the order in which the kernels
 * rotate (order_rows in weights.c). What ranks divide, td_tensor_row.cut says. */
enum td_dim {
    TD_DIM_NONE, /* columns of a vector */
    TD_DIM_HIDDEN,
    TD_DIM_Q,          /* n_heads * head_dim */
    TD_DIM_K,          /* n_kv_heads * head_dim */
    TD_DIM_KV,         /* the same, not rotated: v */
    TD_DIM_HEADS,      /* n_heads */
    TD_DIM_HEAD,       /* head_dim */
    TD_DIM_MLP,        /* intermediate */
    TD_DIM_EXPERTS,    /* experts.n */
    TD_DIM_EXPERT_MLP, /* experts.intermediate */
    /* 2 experts.intermediate: rows of gate and up in turn in the file; at load gate's come first */
    TD_DIM_EXPERT_PAIRS,
    TD_DIM_SHARED_MLP, /* experts.shared */
    TD_DIM_ONE,
    /* of latent attention. Rows of Q and KV end in what is rotated, Q's in every head; at load they
     * get the order of the kernels (weights.c) */
    TD_DIM_LATENT_Q,      /* n_heads * (nope + rope) */
    TD_DIM_LATENT_Q_RANK, /* q_rank */
    TD_DIM_LATENT,        /* kv_rank */
    TD_DIM_LATENT_KV,     /* kv_rank + rope */
    TD_DIM_LATENT_HEADS,  /* n_heads * (nope + v) */
    TD_DIM_LATENT_OUT     /* n_heads * v */
};

/* The part of a tensor that one of several ranks has: all of it, or its share of rows or of
 * columns in whole units of their dimension (a head, a row of the MLP). */
enum td_cut { TD_CUT_NONE, TD_CUT_ROWS, TD_CUT_COLS };

/* A tensor that a layer wants. A table of them ends with a row without a name. Rows of one name
 * that follow each other are the parts of one tensor of the checkpoint, from its first row on. */
struct td_tensor_row {
    enum td_into into;
    const char *name; /* after "model.layers.N." */
    enum td_dim rows, cols;
    enum td_cut cut;
    size_t if_set; /* offset in td_model_config of the bool that says whether it is there; 0: is */
};

/* Numbers of a dimension: `unit` elements in each of `n_units` that ranks divide. */
struct td_dim_size {
    int32_t n_units, unit;
};
struct td_dim_size td_dim_size(const struct td_model_config *c, enum td_dim dim);
bool td_tensor_is_wanted(const struct td_model_config *c, const struct td_tensor_row *row);

/* ---- layers ---------------------------------------------------------------------------------- */

#define TD_LAYER_TABLES 3

/* What of q and of k is normed before it is rotated: each head, with the weights of all or (OWN)
 * with its own, or all heads together. */
enum td_qk_norm { TD_QK_NORM_NONE, TD_QK_NORM_HEADS, TD_QK_NORM_ROWS, TD_QK_NORM_OWN };

/* One layer: what forward.c computes, and from which tensors. A norm whose tensor no table has is
 * not computed: x itself goes into q, k and v, or what o returns is added as it is. */
struct td_layer_spec {
    int32_t window;   /* tokens that attention sees, the row's own included; 0 = all before it */
    int32_t rope;     /* number of its rotation in td_model_config.rope */
    float attn_scale; /* by which q . k is multiplied */
    bool is_latent;   /* attention is latent (latent.c) */
    float attn_cap;   /* c: a score becomes c tanh(score / c) before softmax; 0 = none */
    bool alibi;       /* and each head's slope takes away more of it, the older the key is */
    enum td_qk_norm qk_norm;
    enum td_act act;      /* of the MLP's gate */
    float residual_scale; /* by which what o and down return is multiplied before it is added */
    /* attention and MLP read the same normed row, and both are added to the residual at the end */
    bool parallel;
    /* in the order of random weights; NULL: no more */
    const struct td_tensor_row *tensors[TD_LAYER_TABLES];
    /* Tensors of each expert, whose names follow "model.layers.N.", this prefix and "E."; NULL: the
     * layer has an MLP and no experts. */
    const struct td_tensor_row *expert_tensors;
    const char *expert_prefix;
    bool expert_stacks; /* a directory has those of all experts in one tensor (expert_stacks.h) */
};

/* ---- GGUF ------------------------------------------------------------------------------------ */

/* What GGUF files of a family call a tensor of a layer, after "blk.N.", and what the family's own
 * tables call it. A list of them ends with an empty row. */
struct td_gguf_name {
    const char *gguf, *model;
};

/* ---- families -------------------------------------------------------------------------------- */

/* What directories of a family call tensors where others have "model.layers.N.", and
 * "model.embed_tokens.weight", "model.norm.weight" and "lm_head.weight". */
struct td_file_names {
    const char *layers; /* before the layer's number */
    const char *embed, *norm, *head;
    const char *redundant; /* a tensor that follows from the config; NULL: none */
};

struct td_family {
    const char *model_type, *class_name; /* in config.json */
    const char *old_class_name;          /* which files may have in its place; NULL: none */
    const char *models;                  /* for people: in README's list, which a test compares */
    const char *gguf;                    /* general.architecture of its GGUF files */
    bool gguf_pairs;   /* whose rows of q and k stand in pairs for a rotation of neighbours */
    bool gguf_experts; /* of two families with one name, that of the files that have experts */
    /* names and keys (after "ARCH.") of its GGUF files beside those of every family, or in place of
     * them; NULL: none */
    const struct td_gguf_name *gguf_names;
    const char *const *gguf_keys; /* the last is NULL */
    /* Adds what its GGUF files do not say to the fields that were made of their keys; false: no
     * memory. NULL: nothing. */
    bool (*gguf_fields)(json_t *obj);
    const struct td_file_names *file_names; /* NULL: as others */
    /* A tensor of q, k and v has them by KV heads: its q heads, its k, its v. */
    bool grouped_qkv;
    /* the fields of config.json that it honours beside those of every family; the last is NULL */
    const char *const *fields;
    int32_t default_head_dim;         /* where head_dim is absent; 0: hidden / n_heads */
    bool kv_heads_may_be_absent;      /* and are then n_heads */
    int32_t default_bos, default_eos; /* where config.json has none; -1: none */
    double default_theta;             /* where rope_theta is absent; 0: 1e4 */
    /* of windowed layers, which then have a rotation of their own (rope[1]); 0: none */
    double local_theta;
    double partial_rotary; /* where partial_rotary_factor is absent; 0: must be 1 */
    float default_eps;     /* where rms_norm_eps is absent; 0: 1e-6 */
    bool default_tied;     /* where tie_word_embeddings is absent */
    enum td_act act;       /* that hidden_act must name */
    /* The checkpoint has the weights of norms less 1 (a GGUF file has them whole). */
    bool norms_less_1;
    /* Puts what its files say in other words into the fields of every family, of a copy of the
     * file's object. NULL: nothing. */
    td_status (*translate)(json_t *obj, const char *what, struct td_err *err);
    /* Reads its own fields, behind those of every family. */
    td_status (*read)(const json_t *obj, const char *what, struct td_model_config *c,
                      struct td_err *err);
    void (*layer)(const struct td_model_config *c, int32_t layer, struct td_layer_spec *ret_spec);
};

/* In the order of td_arch; a family's own row is td_families[arch]. */
enum { TD_N_FAMILIES = 29 };
extern const struct td_family *const td_families[TD_N_FAMILIES];

/* The name of a tensor of layer `layer`, or of its expert number `expert` (-1: none). */
#define TD_TENSOR_NAME_BYTES 160
void td_tensor_name(const struct td_layer_spec *spec, const struct td_tensor_row *row,
                    int32_t layer, int32_t expert, char ret_name[TD_TENSOR_NAME_BYTES]);

/* What layer `layer` of a model computes. */
void td_model_config_layer(const struct td_model_config *c, int32_t layer,
                           struct td_layer_spec *ret_spec);

#endif
