/* deepseek.c - DeepSeek-V2 (with Lite), DeepSeek-V3 and R1, Kimi-K2 and GLM-4.7-Flash: latent
 * attention (latent.c) in every layer; MLPs in the first layers, and in all others experts beside
 * shared ones.
 *
 * V2 chooses experts by softmax, V3 and GLM by sigmoid plus a bias. The module that predicts a
 * second token, which some checkpoints have as one more layer, is skipped. */
#include "common/model/families/families.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "common/base/json.h"
#include "common/model/config_internal.h"

/* ---- tensors --------------------------------------------------------------------------------- */

#define KV_ROWS                                                                                    \
    {TD_INTO_QKV,      "self_attn.kv_a_proj_with_mqa.weight",                                      \
     TD_DIM_LATENT_KV, TD_DIM_HIDDEN,                                                              \
     TD_CUT_NONE,      0},                                                                         \
        {TD_INTO_K_NORM, "self_attn.kv_a_layernorm.weight",                                        \
         TD_DIM_LATENT,  TD_DIM_NONE,                                                              \
         TD_CUT_NONE,    0},                                                                       \
        {TD_INTO_KV_B,        "self_attn.kv_b_proj.weight",                                        \
         TD_DIM_LATENT_HEADS, TD_DIM_LATENT,                                                       \
         TD_CUT_ROWS,         0},                                                                  \
    {                                                                                              \
        TD_INTO_O, "self_attn.o_proj.weight", TD_DIM_HIDDEN, TD_DIM_LATENT_OUT, TD_CUT_COLS, 0     \
    }
#define INPUT_NORM                                                                                 \
    {                                                                                              \
        TD_INTO_ATTN_NORM, "input_layernorm.weight", TD_DIM_HIDDEN, TD_DIM_NONE, TD_CUT_NONE, 0    \
    }

static const struct td_tensor_row attention[] = {
    INPUT_NORM,
    {TD_INTO_QKV, "self_attn.q_proj.weight", TD_DIM_LATENT_Q, TD_DIM_HIDDEN, TD_CUT_ROWS, 0},
    KV_ROWS,
    {0},
};
/* q in two products, with a norm between */
static const struct td_tensor_row attention_q_rank[] = {
    INPUT_NORM,
    {TD_INTO_QKV, "self_attn.q_a_proj.weight", TD_DIM_LATENT_Q_RANK, TD_DIM_HIDDEN, TD_CUT_NONE, 0},
    KV_ROWS,
    {TD_INTO_Q_NORM, "self_attn.q_a_layernorm.weight", TD_DIM_LATENT_Q_RANK, TD_DIM_NONE,
     TD_CUT_NONE, 0},
    {TD_INTO_Q_B, "self_attn.q_b_proj.weight", TD_DIM_LATENT_Q, TD_DIM_LATENT_Q_RANK, TD_CUT_ROWS,
     0},
    {0},
};

const struct td_tensor_row td_shared_mixture[] = {
    {TD_INTO_MLP_NORM, "post_attention_layernorm.weight", TD_DIM_HIDDEN, TD_DIM_NONE, TD_CUT_NONE,
     0},
    {TD_INTO_EXPERT_ROUTER, "mlp.gate.weight", TD_DIM_EXPERTS, TD_DIM_HIDDEN, TD_CUT_NONE, 0},
    {TD_INTO_EXPERT_BIAS, "mlp.gate.e_score_correction_bias", TD_DIM_EXPERTS, TD_DIM_NONE,
     TD_CUT_NONE, offsetof(struct td_model_config, experts.has_bias)},
    {TD_INTO_GATE_UP, "mlp.shared_experts.gate_proj.weight", TD_DIM_SHARED_MLP, TD_DIM_HIDDEN,
     TD_CUT_ROWS, 0},
    {TD_INTO_GATE_UP, "mlp.shared_experts.up_proj.weight", TD_DIM_SHARED_MLP, TD_DIM_HIDDEN,
     TD_CUT_ROWS, 0},
    {TD_INTO_DOWN, "mlp.shared_experts.down_proj.weight", TD_DIM_HIDDEN, TD_DIM_SHARED_MLP,
     TD_CUT_COLS, 0},
    {0},
};

static void layer(const struct td_model_config *c, int32_t i, struct td_layer_spec *ret)
{
    td_std_layer(c, i, ret);
    ret->is_latent = true;
    ret->attn_scale = c->latent.scale;
    ret->tensors[0] = c->latent.q_rank ? attention_q_rank : attention;
    if (ret->expert_tensors) ret->tensors[1] = td_shared_mixture;
}

/* ---- fields ---------------------------------------------------------------------------------- */

#define LATENT_FIELDS                                                                              \
    "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim",          \
        "v_head_dim", "attention_bias", "mlp_bias", "n_routed_experts", "num_experts",             \
        "num_local_experts", "num_experts_per_tok", "n_shared_experts", "moe_intermediate_size",   \
        "n_group", "topk_group", "routed_scaling_factor", "norm_topk_prob",                        \
        "first_k_dense_replace", "moe_layer_freq", "topk_method", "scoring_func", "auto_map",      \
        "ep_size", "aux_loss_alpha", "seq_aux"

static const char *const v2_fields[] = {LATENT_FIELDS, NULL};
static const char *const v3_fields[] = {LATENT_FIELDS, "rope_interleave",
                                        "num_nextn_predict_layers", "num_mtp_layers", NULL};
static const char *const glm_fields[] = {LATENT_FIELDS,     "rope_interleave",
                                         "mlp_layer_types", "num_nextn_predict_layers",
                                         "num_mtp_layers",  NULL};

/* yarn's scaling of scores, which DeepSeek takes into the scale of attention: the square of
 * 0.1 m ln factor + 1, m being mscale_all_dim. */
static td_status read_scale(const json_t *obj, const char *what, struct td_model_config *c,
                            struct td_err *err)
{
    static const char *const names[] = {"rope_scaling", "rope_parameters"};
    double scale = 1 / sqrt((double)(c->latent.nope + c->latent.rope));
    for (int i = 0; i < 2; i++) {
        const json_t *r = json_object_get(obj, names[i]);
        double m = 0, factor = 1;
        td_status s;
        if (!json_is_object(r)) continue; /* the rotation's reader refuses others */
        if ((s = td_json_f64(r, what, "mscale_all_dim", 0, TD_MSCALE_MAX, &m, NULL, err)) ||
            (s = td_json_f64(r, what, "factor", 1, 1e6, &factor, NULL, err)))
            return s;
        if (m == 0) continue;
        double by = 0.1 * m * log(factor) + 1;
        scale *= by * by;
        break; /* both say the same, or are refused */
    }
    c->latent.scale = (float)scale;
    return TD_OK;
}

/* Attention, whose cache has one row of kv_rank + rope elements. */
static td_status read_latent(const json_t *obj, const char *what, struct td_model_config *c,
                             struct td_err *err)
{
    struct td_latent_config *l = &c->latent;
    td_status s;
    bool bias = false, mlp_bias = false;
    l->interleaved = true;
    if (!json_object_get(obj, "q_lora_rank"))
        return td_fail(err, TD_ERR_INVALID,
                       "%s: q_lora_rank is missing, must be an integer in 1..%d, or null", what,
                       TD_INTERMEDIATE_MAX);
    if (c->n_kv_heads != c->n_heads)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "%s: num_key_value_heads is %d, must be num_attention_heads (%d) in latent "
                       "attention",
                       what, c->n_kv_heads, c->n_heads);
    if ((s = td_json_need_i32(obj, what, "kv_lora_rank", 2, TD_LATENT_RANK_MAX, &l->kv_rank,
                              err)) ||
        (s = td_config_i32(obj, what, "q_lora_rank", 1, TD_INTERMEDIATE_MAX, &l->q_rank, err)) ||
        (s = td_json_need_i32(obj, what, "qk_nope_head_dim", 1, TD_LATENT_RANK_MAX, &l->nope,
                              err)) ||
        (s = td_json_need_i32(obj, what, "qk_rope_head_dim", 2, TD_LATENT_ROPE_MAX, &l->rope,
                              err)) ||
        (s = td_json_need_i32(obj, what, "v_head_dim", 1, TD_LATENT_RANK_MAX, &l->v, err)) ||
        (s = td_json_bool(obj, what, "rope_interleave", &l->interleaved, NULL, err)) ||
        (s = td_json_bool(obj, what, "attention_bias", &bias, NULL, err)) ||
        (s = td_json_bool(obj, what, "mlp_bias", &mlp_bias, NULL, err)))
        return s;
    if (bias || mlp_bias)
        return td_config_unsupported(what, bias ? "attention_bias" : "mlp_bias", json_true(),
                                     "false in latent attention", err);
    if (l->kv_rank % 2 || l->rope % 2)
        return td_fail(err, TD_ERR_UNSUPPORTED, "%s: %s is %d, must be even", what,
                       l->rope % 2 ? "qk_rope_head_dim" : "kv_lora_rank",
                       l->rope % 2 ? l->rope : l->kv_rank);
    int32_t whole = l->nope + l->rope;
    if ((s = td_config_i32(obj, what, "qk_head_dim", 1, INT32_MAX, &whole, err))) return s;
    if (whole != l->nope + l->rope)
        return td_fail(err, TD_ERR_INVALID,
                       "%s: qk_head_dim is %d, must be qk_nope_head_dim + qk_rope_head_dim (%d)",
                       what, whole, l->nope + l->rope);
    c->n_kv_heads = 1;
    c->head_dim = l->kv_rank + l->rope;
    c->rotary_dim = l->rope;
    return read_scale(obj, what, c, err);
}

/* A field that must have one value, or be absent. */
static td_status need_text(const json_t *obj, const char *what, const char *key, const char *value,
                           struct td_err *err)
{
    const char *text = value;
    td_status s = td_json_str(obj, what, key, &text, NULL, err);
    if (s || strcmp(text, value) == 0) return s;
    return td_config_unsupported(what, key, json_object_get(obj, key), value, err);
}

static td_status read_groups(const json_t *obj, const char *what, struct td_model_config *c,
                             struct td_err *err)
{
    struct td_experts_config *e = &c->experts;
    struct td_experts_rule *rule = &e->rule;
    td_status s = td_config_i32(obj, what, "n_group", 1, e->n, &rule->n_groups, err);
    if (s) return s;
    if (rule->n_groups <= 1) {
        rule->n_groups = rule->n_groups_used = 0;
        return TD_OK;
    }
    if (e->n % rule->n_groups || (rule->groups_by_two && e->n / rule->n_groups < 2))
        return td_fail(
            err, TD_ERR_INVALID, "%s: n_group is %d, must divide n_routed_experts (%d)%s", what,
            rule->n_groups, e->n, rule->groups_by_two ? " into groups of 2 or more" : "");
    if ((s = td_json_need_i32(obj, what, "topk_group", 1, rule->n_groups, &rule->n_groups_used,
                              err)))
        return s;
    int32_t most = e->n / rule->n_groups * rule->n_groups_used;
    if (e->n_used > most)
        return td_fail(err, TD_ERR_INVALID,
                       "%s: num_experts_per_tok is %d, must be at most %d, the experts of "
                       "topk_group (%d) groups",
                       what, e->n_used, most, rule->n_groups_used);
    return TD_OK;
}

/* Other names of n_routed_experts, which a file may only repeat. */
static td_status check_n_experts(const json_t *obj, const char *what, int32_t n, struct td_err *err)
{
    static const char *const names[] = {"num_experts", "num_local_experts"};
    for (int i = 0; i < 2; i++) {
        int32_t again = n;
        td_status s = td_config_i32(obj, what, names[i], 1, TD_EXPERTS_MAX, &again, err);
        if (s) return s;
        if (again != n)
            return td_fail(err, TD_ERR_INVALID,
                           "%s: n_routed_experts is %d and %s is %d, must be the same", what, n,
                           names[i], again);
    }
    return TD_OK;
}

/* Sizes, which all name alike; scale and first: of the class, where the fields are absent. */
static td_status read_experts(const json_t *obj, const char *what, double scale, int32_t first,
                              struct td_model_config *c, struct td_err *err)
{
    struct td_experts_config *e = &c->experts;
    int32_t n_shared = 0, freq = 1;
    td_status s;
    e->step = 1;
    e->first = first;
    if ((s = td_json_need_i32(obj, what, "n_routed_experts", 1, TD_EXPERTS_MAX, &e->n, err)) ||
        (s = check_n_experts(obj, what, e->n, err)))
        return s;
    int32_t most = e->n < TD_EXPERTS_USED_MAX ? e->n : TD_EXPERTS_USED_MAX;
    if ((s = td_json_need_i32(obj, what, "num_experts_per_tok", 1, most, &e->n_used, err)) ||
        (s = td_json_need_i32(obj, what, "moe_intermediate_size", 1, TD_INTERMEDIATE_MAX,
                              &e->intermediate, err)) ||
        (s = td_json_need_i32(obj, what, "n_shared_experts", 1,
                              TD_INTERMEDIATE_MAX / e->intermediate, &n_shared, err)) ||
        (s = td_config_i32(obj, what, "first_k_dense_replace", 0, TD_LAYERS_MAX, &e->first, err)) ||
        (s = td_config_i32(obj, what, "moe_layer_freq", 1, 1, &freq, err)) ||
        (s = td_json_f64(obj, what, "routed_scaling_factor", 1e-6, 1e6, &scale, NULL, err)))
        return s;
    e->shared = n_shared * e->intermediate;
    e->rule.scale = scale == 1 ? 0 : (float)scale;
    return TD_OK;
}

static td_status read_v2(const json_t *obj, const char *what, struct td_model_config *c,
                         struct td_err *err)
{
    const char *method = "greedy";
    bool normalise = false;
    td_status s = read_latent(obj, what, c, err);
    if (s || (s = read_experts(obj, what, 1, 0, c, err)) ||
        (s = td_json_str(obj, what, "topk_method", &method, NULL, err)) ||
        (s = need_text(obj, what, "scoring_func", "softmax", err)) ||
        (s = td_json_bool(obj, what, "norm_topk_prob", &normalise, NULL, err)))
        return s;
    if (normalise) /* transformers ignores it; DeepSeek's own code then leaves out the scale */
        return td_config_unsupported(what, "norm_topk_prob", json_true(), "false", err);
    if (strcmp(method, "greedy") == 0) return TD_OK;
    if (strcmp(method, "group_limited_greedy") != 0)
        return td_config_unsupported(what, "topk_method", json_object_get(obj, "topk_method"),
                                     "greedy or group_limited_greedy", err);
    return read_groups(obj, what, c, err);
}

td_status td_read_sigmoid_experts(const json_t *obj, const char *what, double scale, int32_t first,
                                  struct td_model_config *c, struct td_err *err)
{
    struct td_experts_rule *rule = &c->experts.rule;
    td_status s;
    if ((s = read_experts(obj, what, scale, first, c, err)) ||
        (s = need_text(obj, what, "topk_method", "noaux_tc", err)) ||
        (s = need_text(obj, what, "scoring_func", "sigmoid", err)))
        return s;
    if ((s = td_config_i32(obj, what, "num_nextn_predict_layers", 0, TD_LAYERS_MAX, &c->n_skipped,
                           err)) ||
        (s = td_config_i32(obj, what, "num_mtp_layers", 0, TD_LAYERS_MAX, &c->n_skipped, err)))
        return s;
    rule->sigmoid = rule->groups_by_two = c->experts.has_bias = true;
    rule->normalise = true;
    s = td_json_bool(obj, what, "norm_topk_prob", &rule->normalise, NULL, err);
    return s ? s : read_groups(obj, what, c, err);
}

/* What V3 and GLM-4.7-Flash have in common. */
static td_status read_sigmoid(const json_t *obj, const char *what, double scale, int32_t first,
                              struct td_model_config *c, struct td_err *err)
{
    td_status s = read_latent(obj, what, c, err);
    return s ? s : td_read_sigmoid_experts(obj, what, scale, first, c, err);
}

static td_status read_v3(const json_t *obj, const char *what, struct td_model_config *c,
                         struct td_err *err)
{
    c->experts.rule.n_groups = 8;
    return read_sigmoid(obj, what, 2.5, 3, c, err);
}

/* GLM lists its layers. */
static td_status read_glm(const json_t *obj, const char *what, struct td_model_config *c,
                          struct td_err *err)
{
    const json_t *list = json_object_get(obj, "mlp_layer_types");
    td_status s = read_sigmoid(obj, what, 1.8, 1, c, err);
    if (s) return s;
    if (!list || json_is_null(list)) return TD_OK;
    if (!json_is_array(list) || json_array_size(list) != (size_t)c->n_layers)
        return td_fail(err, TD_ERR_INVALID,
                       "%s: mlp_layer_types has %zu entries, must be num_hidden_layers (%d)", what,
                       json_is_array(list) ? json_array_size(list) : 0, c->n_layers);
    c->experts.first = 0;
    for (int32_t i = 0; i < c->n_layers; i++) {
        const json_t *v = json_array_get(list, (size_t)i);
        const char *type = json_string_value(v);
        if (type && strcmp(type, "dense") == 0)
            c->experts.dense[i / 8] |= (uint8_t)(1 << i % 8);
        else if (!type || strcmp(type, "sparse") != 0)
            return td_config_unsupported(what, "mlp_layer_types", v, "dense or sparse", err);
    }
    return TD_OK;
}

const struct td_family td_family_deepseek_v2 = {.model_type = "deepseek_v2",
                                                .models = "DeepSeek-V2",
                                                .class_name = "DeepseekV2ForCausalLM",
                                                .fields = v2_fields,
                                                .default_head_dim = 64,
                                                .kv_heads_may_be_absent = true,
                                                .default_bos = 1,
                                                .default_eos = 2,
                                                .read = read_v2,
                                                .layer = layer};
const struct td_family td_family_deepseek_v3 = {.model_type = "deepseek_v3",
                                                .models = "DeepSeek-V3 and R1",
                                                .class_name = "DeepseekV3ForCausalLM",
                                                .fields = v3_fields,
                                                .default_head_dim = 64,
                                                .kv_heads_may_be_absent = true,
                                                .default_bos = 0,
                                                .default_eos = 1,
                                                .read = read_v3,
                                                .layer = layer};
/* DeepSeek-V3 under a name of its own, with one group. */
const struct td_family td_family_kimi_k2 = {.model_type = "kimi_k2",
                                            .class_name = "DeepseekV3ForCausalLM",
                                            .models = "Kimi-K2",
                                            .fields = v3_fields,
                                            .default_head_dim = 64,
                                            .kv_heads_may_be_absent = true,
                                            .default_bos = -1,
                                            .default_eos = -1,
                                            .read = read_v3,
                                            .layer = layer};
const struct td_family td_family_glm4_moe_lite = {.model_type = "glm4_moe_lite",
                                                  .models = "GLM-4.7-Flash",
                                                  .class_name = "Glm4MoeLiteForCausalLM",
                                                  .fields = glm_fields,
                                                  .default_head_dim = 64,
                                                  .kv_heads_may_be_absent = true,
                                                  .default_bos = 0,
                                                  .default_eos = 1,
                                                  .default_eps = 1e-5f,
                                                  .read = read_glm,
                                                  .layer = layer};
