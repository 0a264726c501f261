/* baichuan.c - Baichuan and Baichuan2: Llama with q, k and v in one tensor. The output matrix of
 * the second generation has rows of length 1, which the file has not yet. The 13B models add slopes
 * to scores (ALiBi) in place of a rotation. No field says so: their files have model_max_length and
 * no max_position_embeddings, those of the 7B models have max_position_embeddings, and the models
 * of either size have one hidden_size. */
#include "common/model/families/families.h"

#include "common/base/json.h"
#include "common/model/config_internal.h"

static const char *const fields[] = {"z_loss_weight", "auto_map", "model_max_length", NULL};

/* What translate adds; a file that has it is refused, because no list of fields does. */
#define IS_13B "is 13B"

/* Fields of both 7B models and both 13B ones. z_loss_weight came with the second generation. */
static td_status read(const json_t *obj, const char *what, struct td_model_config *c,
                      struct td_err *err)
{
    (void)what, (void)err;
    c->unit_head = c->vocab == 125696 || json_object_get(obj, "z_loss_weight");
    c->alibi = json_object_get(obj, IS_13B) != NULL;
    return TD_OK;
}

#define HIDDEN_OF_7B 4096
#define HIDDEN_OF_13B 5120

static td_status check_13b(const json_t *obj, const char *what, struct td_err *err)
{
    static const char *const ropes[] = {"rope_theta", "rope_scaling", "rope_parameters"};
    if (json_integer_value(json_object_get(obj, "hidden_size")) == HIDDEN_OF_7B)
        return td_fail(err, TD_ERR_INVALID,
                       "%s: hidden_size is %d, as in the 7B models, which rotate: "
                       "max_position_embeddings is missing, must be there",
                       what, HIDDEN_OF_7B);
    for (size_t i = 0; i < sizeof ropes / sizeof *ropes; i++) {
        const json_t *v = json_object_get(obj, ropes[i]);
        if (v && !json_is_null(v))
            return td_config_unsupported(what, ropes[i], v,
                                         "absent in a 13B model, which does "
                                         "not rotate",
                                         err);
    }
    return TD_OK;
}

static td_status translate(json_t *obj, const char *what, struct td_err *err)
{
    static const char positions[] = "max_position_embeddings", length[] = "model_max_length";
    bool lacks = !json_object_get(obj, positions) && json_object_get(obj, length);
    int32_t n = 0;
    /* somebody may have added max_position_embeddings to the file of a 13B model */
    if (!lacks && json_integer_value(json_object_get(obj, "hidden_size")) != HIDDEN_OF_13B)
        return TD_OK;
    td_status s = check_13b(obj, what, err);
    if (!s && lacks) s = td_json_need_i32(obj, what, length, 1, TD_POSITIONS_MAX, &n, err);
    if (s) return s;
    if ((lacks && json_object_set_new(obj, positions, json_integer(n))) ||
        json_object_set_new(obj, IS_13B, json_true()))
        return td_fail(err, TD_ERR_NOMEM, "%s: no memory", what);
    return TD_OK;
}

static const struct td_tensor_row attention[] = {
    {TD_INTO_ATTN_NORM, "input_layernorm.weight", TD_DIM_HIDDEN, TD_DIM_NONE, TD_CUT_NONE, 0},
    {TD_INTO_QKV, "self_attn.W_pack.weight", TD_DIM_Q, TD_DIM_HIDDEN, TD_CUT_ROWS, 0},
    {TD_INTO_QKV, "self_attn.W_pack.weight", TD_DIM_K, TD_DIM_HIDDEN, TD_CUT_ROWS, 0},
    {TD_INTO_QKV, "self_attn.W_pack.weight", TD_DIM_KV, TD_DIM_HIDDEN, TD_CUT_ROWS, 0},
    {TD_INTO_O, "self_attn.o_proj.weight", TD_DIM_HIDDEN, TD_DIM_Q, TD_CUT_COLS, 0},
    {0},
};

static void layer(const struct td_model_config *c, int32_t i, struct td_layer_spec *ret)
{
    td_std_layer(c, i, ret);
    ret->tensors[0] = attention;
}

const struct td_family td_family_baichuan = {.model_type = "baichuan",
                                             .models = "Baichuan and Baichuan2",
                                             .class_name = "BaichuanForCausalLM",
                                             .old_class_name = "BaiChuanForCausalLM",
                                             .fields = fields,
                                             .translate = translate,
                                             .kv_heads_may_be_absent = true,
                                             .default_bos = 1,
                                             .default_eos = 2,
                                             .read = read,
                                             .layer = layer};
