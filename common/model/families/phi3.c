/* phi3.c - Phi-3, 3.5 and 4 (mini and medium): Llama with q, k and v in one tensor of the file, and
 * gate and up in another. Long contexts by longrope, whose long factors a deployment takes when its
 * max_model_len is above the original length: for every request, so that keys in a cache never
 * change. */
#include "common/model/families/families.h"

#include "common/model/config_internal.h"

static const char *const fields[] = {"sliding_window", "original_max_position_embeddings",
                                     "auto_map", NULL};

static td_status read(const json_t *obj, const char *what, struct td_model_config *c,
                      struct td_err *err)
{
    return td_config_i32(obj, what, "sliding_window", 1, INT32_MAX, &c->sliding_window,
                         err); /* absent: none */
}

static const struct td_tensor_row attention[] = {
    {TD_INTO_ATTN_NORM, "input_layernorm.weight", TD_DIM_HIDDEN, TD_DIM_NONE, TD_CUT_NONE, 0},
    {TD_INTO_QKV, "self_attn.qkv_proj.weight", TD_DIM_Q, TD_DIM_HIDDEN, TD_CUT_ROWS, 0},
    {TD_INTO_QKV, "self_attn.qkv_proj.weight", TD_DIM_K, TD_DIM_HIDDEN, TD_CUT_ROWS, 0},
    {TD_INTO_QKV, "self_attn.qkv_proj.weight", TD_DIM_KV, TD_DIM_HIDDEN, TD_CUT_ROWS, 0},
    {TD_INTO_O, "self_attn.o_proj.weight", TD_DIM_HIDDEN, TD_DIM_Q, TD_CUT_COLS, 0},
    {0},
};

static void layer(const struct td_model_config *c, int32_t i, struct td_layer_spec *ret)
{
    td_std_layer(c, i, ret);
    ret->tensors[0] = attention;
    ret->tensors[1] = td_fused_mlp;
}

static const struct td_gguf_name gguf_names[] = {
    {"attn_qkv.weight", "self_attn.qkv_proj.weight"},
    {"ffn_up.weight", "mlp.gate_up_proj.weight"},
    {0},
};
static const char *const gguf_keys[] = {"attention.sliding_window", "rope.scaling.attn_factor",
                                        NULL};

const struct td_family td_family_phi3 = {.model_type = "phi3",
                                         .models = "Phi-3, 3.5 and 4",
                                         .class_name = "Phi3ForCausalLM",
                                         .gguf = "phi3",
                                         .gguf_names = gguf_names,
                                         .gguf_keys = gguf_keys,
                                         .fields = fields,
                                         .kv_heads_may_be_absent = true,
                                         .default_bos = 1,
                                         .default_eos = 32000,
                                         .default_eps = 1e-5f,
                                         .partial_rotary = 1,
                                         .read = read,
                                         .layer = layer};
