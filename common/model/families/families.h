/* families.h - what the files of families/ share: the tables of those that name and cut their
 * tensors as Llama does, and readers of fields that several have. Inside common/model only. */
#ifndef TD_MODEL_FAMILIES_H
#define TD_MODEL_FAMILIES_H

#include "common/model/family.h"

extern const struct td_family td_family_llama, td_family_mistral, td_family_qwen2, td_family_qwen3,
    td_family_qwen3_moe, td_family_mixtral, td_family_qwen2_moe, td_family_deepseek_v2,
    td_family_deepseek_v3, td_family_glm4_moe_lite, td_family_gemma, td_family_gemma2,
    td_family_gemma3, td_family_phi3, td_family_granite, td_family_smollm3, td_family_olmo2,
    td_family_glm, td_family_glm4, td_family_cohere, td_family_cohere2, td_family_kimi_k2,
    td_family_gpt_oss, td_family_glm4_moe, td_family_minimax_m2, td_family_internlm2,
    td_family_internlm3, td_family_chatglm, td_family_baichuan;

/* Norm, q, k, v and o, with the biases and norms of heads that the config asks for; norm, gate, up
 * and down. */
extern const struct td_tensor_row td_std_attention[], td_std_mlp[];

/* The rows of q, k and v in td_std_attention, and their biases. */
#define TD_STD_QKV                                                                                 \
    TD_STD_QKV_ROWS("weight", TD_INTO_QKV, TD_DIM_HIDDEN, 0),                                      \
        TD_STD_QKV_ROWS("bias", TD_INTO_QKV_BIAS, TD_DIM_NONE,                                     \
                        offsetof(struct td_model_config, qkv_bias))
#define TD_STD_QKV_ROWS(what, into, cols, if_set)                                                  \
    {into, "self_attn.q_proj." what, TD_DIM_Q, cols, TD_CUT_ROWS, if_set},                         \
        {into, "self_attn.k_proj." what, TD_DIM_K, cols, TD_CUT_ROWS, if_set},                     \
    {                                                                                              \
        into, "self_attn.v_proj." what, TD_DIM_KV, cols, TD_CUT_ROWS, if_set                       \
    }

/* One of the two without its first row, which is the norm. */
#define TD_WITHOUT_NORM(table) ((table) + 1)

/* As td_std_mlp, with gate and up in one tensor of the file and no biases. */
extern const struct td_tensor_row td_fused_mlp[];

/* In place of td_std_mlp: norm and router; and gate, up and down of an expert. */
extern const struct td_tensor_row td_std_mixture[], td_std_expert[];

/* A layer of those tables: full attention, or the config's window from sliding_from_layer on. */
void td_std_layer(const struct td_model_config *c, int32_t layer, struct td_layer_spec *ret_spec);

/* The same with a bias of the choice, if the config has one, and shared experts (deepseek.c). */
extern const struct td_tensor_row td_shared_mixture[];

/* gate, up and down of an expert, as Mixtral calls them. */
extern const struct td_tensor_row td_mixtral_expert[];

/* attention_bias and mlp_bias. */
td_status td_read_biases(const json_t *obj, const char *what, struct td_model_config *c,
                         struct td_err *err);
/* num_experts or num_local_experts, num_experts_per_tok, moe_intermediate_size, norm_topk_prob,
 * decoder_sparse_step and mlp_only_layers, as Qwen has them. */
td_status td_read_qwen_experts(const json_t *obj, const char *what, struct td_model_config *c,
                               struct td_err *err);
/* The fields of DeepSeek-V3's mixtures. scale, first: what routed_scaling_factor and
 * first_k_dense_replace are where they are absent. */
td_status td_read_sigmoid_experts(const json_t *obj, const char *what, double scale, int32_t first,
                                  struct td_model_config *c, struct td_err *err);
/* Refuses use_sliding_window, which readers of Qwen's mixtures understand differently. */
td_status td_refuse_window(const json_t *obj, const char *what, struct td_err *err);
/* sliding_window alone: absent means 4096 (configuration class), null means no window. */
td_status td_read_window(const json_t *obj, const char *what, int32_t *ret_window,
                         struct td_err *err);
/* layer_types, of which any may be windowed; without it all are but every `pattern`-th. */
td_status td_read_windowed_layers(const json_t *obj, const char *what, struct td_model_config *c,
                                  int32_t pattern, struct td_err *err);
/* use_sliding_window, sliding_window, max_window_layers and layer_types, as dense Qwen has them. */
td_status td_read_qwen_window(const json_t *obj, const char *what, struct td_model_config *c,
                              struct td_err *err);

#endif
