/* config.h - reads a Hugging Face config.json (and generation_config.json) into the fields that the
 * engine uses.
 *
 * Every field is honoured or refused by name. A field that this file does not know is an error,
 * unless it is on the list of fields that cannot change the logits (names, versions, training-only
 * settings). A known field with a value that we do not implement is TD_ERR_UNSUPPORTED. */
#ifndef TD_MODEL_CONFIG_H
#define TD_MODEL_CONFIG_H

#include <stdbool.h>
#include <stdint.h>

#include "common/base/dtype.h"
#include "common/base/status.h"
#include "common/model/quant_config.h"
#include "kernels/experts.h"

#define TD_MAX_EOS 16

enum td_arch {
    TD_ARCH_LLAMA,
    TD_ARCH_MISTRAL,
    TD_ARCH_QWEN2,
    TD_ARCH_QWEN3,
    TD_ARCH_QWEN3_MOE,
    TD_ARCH_MIXTRAL,
    TD_ARCH_QWEN2_MOE,
    TD_ARCH_DEEPSEEK_V2,
    TD_ARCH_DEEPSEEK_V3,
    TD_ARCH_GLM4_MOE_LITE,
    TD_ARCH_GEMMA,
    TD_ARCH_GEMMA2,
    TD_ARCH_GEMMA3,
    TD_ARCH_PHI3,
    TD_ARCH_GRANITE,
    TD_ARCH_SMOLLM3,
    TD_ARCH_OLMO2,
    TD_ARCH_GLM,
    TD_ARCH_GLM4,
    TD_ARCH_COHERE,
    TD_ARCH_COHERE2,
    TD_ARCH_KIMI_K2,
    TD_ARCH_GPT_OSS,
    TD_ARCH_GLM4_MOE,
    TD_ARCH_MINIMAX_M2,
    TD_ARCH_INTERNLM2,
    TD_ARCH_INTERNLM3,
    TD_ARCH_CHATGLM,
    TD_ARCH_BAICHUAN
};
enum td_rope_scaling {
    TD_ROPE_PLAIN,
    TD_ROPE_LINEAR,
    TD_ROPE_LLAMA3,
    TD_ROPE_YARN,
    TD_ROPE_LONG, /* "longrope": a factor for each pair, from one of two lists */
    TD_ROPE_NONE  /* layers that do not rotate */
};

/* A rotation of q and k: the frequency of pair i, of rotary_dim / 2, is theta^(-2i / rotary_dim),
 * scaled. */
#define TD_ROPE_PAIRS_MAX 128 /* half of the largest head, and of TD_LATENT_ROPE_MAX */
struct td_rope {
    enum td_rope_scaling scaling;
    double theta, factor;
    double low_freq_factor, high_freq_factor; /* llama3 */
    int32_t original_max_positions;           /* llama3, yarn, longrope */
    /* yarn, longrope: by which cosines and sines are multiplied */
    double attention_factor;
    double beta_fast, beta_slow; /* yarn */
    bool keeps_fractions;        /* yarn, "truncate": false */
    /* longrope: by which frequencies are divided, as long as max_model_len is not above
     * original_max_positions, and beyond */
    float short_factors[TD_ROPE_PAIRS_MAX], long_factors[TD_ROPE_PAIRS_MAX];
};

#define TD_ROPES_MAX 2 /* of a model */

#define TD_LAYERS_MAX 1024 /* of a model */
#define TD_HEADS_MAX 1024  /* of a layer */

/* A mixture of experts in place of the MLP of some layers, or of all. */
struct td_experts_config {
    int32_t n;            /* experts of a layer; 0: no layer has any */
    int32_t n_used;       /* of which each row goes to so many */
    int32_t intermediate; /* of one expert */
    int32_t shared;       /* size of the MLP that every row has beside its experts; 0: none */
    struct td_experts_rule rule; /* how rows choose */
    bool has_bias;               /* and by which bias */
    /* gate and up of an expert are two tensors of the file, whatever the family's directories have
     * (GGUF) */
    bool gate_up_apart;
    /* layer i has experts where i >= first and (i + 1) % step == 0, except where its bit is set */
    int32_t first, step;
    uint8_t dense[TD_LAYERS_MAX / 8];
};

/* Latent attention (latent.c): the cache has one row of kv_rank + rope elements for all heads. */
#define TD_LATENT_RANK_MAX 768
#define TD_LATENT_ROPE_MAX 256
struct td_latent_config {
    int32_t kv_rank;    /* 0: no latent attention */
    int32_t q_rank;     /* of the row that q is a product of; 0: of the layer's input itself */
    int32_t nope, rope; /* elements of a head of q that are not rotated, and then those that are */
    int32_t v;          /* elements of a head of V */
    bool interleaved;   /* pairs that are rotated are neighbours in the checkpoint */
    float scale;        /* of scores */
};

/* n_kv_heads and head_dim are those of the cache: of latent attention 1, and kv_rank + rope. */
struct td_model_config {
    enum td_arch arch;
    int32_t n_layers, hidden, intermediate, n_heads, n_kv_heads, head_dim, vocab, max_positions;
    float rms_eps;
    bool tied_embeddings, qkv_bias, o_bias, mlp_bias, qk_norm;
    struct td_experts_config experts;
    struct td_latent_config latent;
    bool has_images; /* the text model of a checkpoint that takes images, too: they are left out */
    int32_t n_skipped;          /* layers behind the last, which predict more tokens: not loaded */
    int32_t rotary_dim;         /* dims of a head that are rotated: its first ones */
    int32_t sliding_window;     /* sliding window in tokens, 0 = none */
    int32_t sliding_from_layer; /* Qwen2 max_window_layers: layers below it use full
                                   attention */
    uint8_t full_layers[TD_LAYERS_MAX / 8]; /* bit i: layer i has no window, whatever the above */
    struct td_rope rope[TD_ROPES_MAX];
    int32_t n_ropes;
    uint8_t second_rope[TD_LAYERS_MAX / 8]; /* bit i: layer i takes rope[1] */
    bool rope_neighbours;      /* the file's pairs are (2i, 2i + 1), not (i, i + rotary_dim / 2) */
    bool alibi;                /* layers that do not rotate add slopes to scores (ALiBi) */
    bool norm_centres;         /* norms subtract the mean first (LayerNorm without bias) */
    bool unit_head;            /* rows of lm_head are divided by their length at load */
    bool embed_root;           /* embeddings are multiplied by sqrt(hidden), in the compute type */
    float embed_scale;         /* and by this */
    float attn_scale;          /* by which q . k is multiplied; 0: 1 / sqrt(head_dim) */
    float attn_cap, logit_cap; /* c: x becomes c tanh(x / c); 0 = none */
    float residual_scale;      /* of what a layer's halves add */
    float logit_scale;         /* logits are multiplied by it, before logit_cap */
    /* from torch_dtype or dtype: the type that "--dtype auto" means */
    enum td_dtype checkpoint_dtype;
    /* how the checkpoint's matrices are stored; as td_quant_config_read has it */
    struct td_quant_config quant[TD_QUANT_SCHEMES_MAX];
    int32_t bos_id;                     /* -1 = none */
    int32_t eos_ids[TD_MAX_EOS], n_eos; /* from generation_config.json, else from config.json */
    /* generation defaults (generation_config.json), used where a request leaves the field out */
    float temperature, top_p, min_p, repetition_penalty;
    int32_t top_k; /* 0 = off */
    bool do_sample;
};

/* Reads DIR/config.json and DIR/generation_config.json (optional), or the keys of a GGUF file. */
td_status td_model_config_load(const char *dir, struct td_model_config *ret_config,
                               struct td_err *err);
/* The same from one config file (engine-bench --random-weights CONFIG.json), and from memory
 * (fuzzing); the generation text may be NULL. */
td_status td_model_config_load_file(const char *path, struct td_model_config *ret_config,
                                    struct td_err *err);
td_status td_model_config_parse(const char *text, size_t n_bytes, const char *generation_text,
                                size_t generation_bytes, struct td_model_config *ret_config,
                                struct td_err *err);

/* What becomes of a field of config.json. */
enum td_config_use {
    TD_CONFIG_HONOURED,       /* read, and the model computes as it says */
    TD_CONFIG_WITHOUT_EFFECT, /* cannot change a logit or a token: names, versions, training */
    TD_CONFIG_OF_IMAGES,      /* of a part that is left out: text alone is served */
    TD_CONFIG_OFF,            /* not implemented, and absent, null, false or neutral in the file */
    TD_CONFIG_USES
};
/* Calls tell for each field of DIR/config.json, in the file's order, as td_model_config_load judges
 * them. Of a GGUF file it tells nothing. Errors are those of td_model_config_load. */
td_status td_model_config_fields(const char *dir,
                                 void (*tell)(void *ctx, const char *name, enum td_config_use use),
                                 void *ctx, struct td_err *err);

/* Of the architecture and its sizes: equal for all that may be one model to a router, whatever the
 * type of its weights or the length of its context. Never 0. */
uint64_t td_model_config_digest(const struct td_model_config *c);

int64_t td_model_config_n_params(const struct td_model_config *c);
/* The same without the experts that a row does not go to. The whole embedding table counts in both,
 * though a token reads one row of it. */
int64_t td_model_config_n_active_params(const struct td_model_config *c);

/* Elements of a row of the table of a rotation. */
static inline int32_t td_rope_width(const struct td_model_config *c)
{
    return c->latent.kv_rank ? c->rotary_dim : c->head_dim;
}

static inline bool td_layer_bit(const uint8_t *bits, int32_t layer)
{
    return bits[layer / 8] >> layer % 8 & 1;
}

/* Whether the MLP of layer `layer` is a mixture of experts. */
static inline bool td_model_config_has_experts(const struct td_model_config *c, int32_t layer)
{
    const struct td_experts_config *e = &c->experts;
    return e->n > 0 && layer >= e->first && (layer + 1) % e->step == 0 &&
           !(e->dense[layer / 8] >> layer % 8 & 1);
}

#endif
