/* internlm.c - InternLM2: Llama by other names, with q, k and v of each KV head together in one
 * tensor. InternLM3: Llama with fields of its own for biases. */
#include "common/model/families/families.h"

#include "common/base/json.h"

static const char *const fields_2[] = {"bias", "auto_map", NULL};
static const char *const fields_3[] = {"bias",     "qkv_bias", "attention_bias",
                                       "mlp_bias", "auto_map", NULL};

static td_status read_2(const json_t *obj, const char *what, struct td_model_config *c,
                        struct td_err *err)
{
    c->qkv_bias = true;
    td_status s = td_json_bool(obj, what, "bias", &c->qkv_bias, NULL, err);
    c->o_bias = c->qkv_bias;
    return s;
}

/* A switch by the class' name or by that which transformers writes. */
static td_status read_either(const json_t *obj, const char *what, const char *own,
                             const char *other, bool *ret, struct td_err *err)
{
    bool a = false, b = false, has_a, has_b;
    td_status s = td_json_bool(obj, what, own, &a, &has_a, err);
    if (!s) s = td_json_bool(obj, what, other, &b, &has_b, err);
    if (s) return s;
    if (has_a && has_b && a != b)
        return td_fail(err, TD_ERR_INVALID, "%s: %s and %s differ, must be the same", what, own,
                       other);
    *ret = a || b;
    return TD_OK;
}

/* bias is that of o and of the MLP. */
static td_status read_3(const json_t *obj, const char *what, struct td_model_config *c,
                        struct td_err *err)
{
    td_status s = read_either(obj, what, "bias", "mlp_bias", &c->mlp_bias, err);
    c->o_bias = c->mlp_bias;
    return s ? s : read_either(obj, what, "qkv_bias", "attention_bias", &c->qkv_bias, err);
}

#define IF(field) offsetof(struct td_model_config, field)
static const struct td_tensor_row attention[] = {
    {TD_INTO_ATTN_NORM, "attention_norm.weight", TD_DIM_HIDDEN, TD_DIM_NONE, TD_CUT_NONE, 0},
    {TD_INTO_QKV, "attention.wqkv.weight", TD_DIM_Q, TD_DIM_HIDDEN, TD_CUT_ROWS, 0},
    {TD_INTO_QKV, "attention.wqkv.weight", TD_DIM_K, TD_DIM_HIDDEN, TD_CUT_ROWS, 0},
    {TD_INTO_QKV, "attention.wqkv.weight", TD_DIM_KV, TD_DIM_HIDDEN, TD_CUT_ROWS, 0},
    {TD_INTO_QKV_BIAS, "attention.wqkv.bias", TD_DIM_Q, TD_DIM_NONE, TD_CUT_ROWS, IF(qkv_bias)},
    {TD_INTO_QKV_BIAS, "attention.wqkv.bias", TD_DIM_K, TD_DIM_NONE, TD_CUT_ROWS, IF(qkv_bias)},
    {TD_INTO_QKV_BIAS, "attention.wqkv.bias", TD_DIM_KV, TD_DIM_NONE, TD_CUT_ROWS, IF(qkv_bias)},
    {TD_INTO_O, "attention.wo.weight", TD_DIM_HIDDEN, TD_DIM_Q, TD_CUT_COLS, 0},
    {TD_INTO_O_BIAS, "attention.wo.bias", TD_DIM_HIDDEN, TD_DIM_NONE, TD_CUT_NONE, IF(o_bias)},
    {0},
};
static const struct td_tensor_row mlp[] = {
    {TD_INTO_MLP_NORM, "ffn_norm.weight", TD_DIM_HIDDEN, TD_DIM_NONE, TD_CUT_NONE, 0},
    {TD_INTO_GATE_UP, "feed_forward.w1.weight", TD_DIM_MLP, TD_DIM_HIDDEN, TD_CUT_ROWS, 0},
    {TD_INTO_GATE_UP, "feed_forward.w3.weight", TD_DIM_MLP, TD_DIM_HIDDEN, TD_CUT_ROWS, 0},
    {TD_INTO_DOWN, "feed_forward.w2.weight", TD_DIM_HIDDEN, TD_DIM_MLP, TD_CUT_COLS, 0},
    {0},
};

static void layer_2(const struct td_model_config *c, int32_t i, struct td_layer_spec *ret)
{
    td_std_layer(c, i, ret);
    ret->tensors[0] = attention;
    ret->tensors[1] = mlp;
}

static const struct td_file_names names_2 = {.layers = "model.layers.",
                                             .embed = "model.tok_embeddings.weight",
                                             .norm = "model.norm.weight",
                                             .head = "output.weight"};

const struct td_family td_family_internlm2 = {.model_type = "internlm2",
                                              .models = "InternLM2 and 2.5",
                                              .class_name = "InternLM2ForCausalLM",
                                              .fields = fields_2,
                                              .file_names = &names_2,
                                              .grouped_qkv = true,
                                              .kv_heads_may_be_absent = true,
                                              .default_bos = 1,
                                              .default_eos = 2,
                                              .read = read_2,
                                              .layer = layer_2};
const struct td_family td_family_internlm3 = {.model_type = "internlm3",
                                              .models = "InternLM3",
                                              .class_name = "InternLM3ForCausalLM",
                                              .old_class_name = "LlamaForCausalLM",
                                              .fields = fields_3,
                                              .kv_heads_may_be_absent = true,
                                              .default_head_dim = 128,
                                              .default_eps = 1e-5f,
                                              .default_bos = 1,
                                              .default_eos = 2,
                                              .read = read_3,
                                              .layer = td_std_layer};
