/* baichuan.c - Baichuan-7B and Baichuan2-7B: Llama with q, k and v in one tensor. The second one's
 * output matrix has rows of length 1, which the file has not yet. The 13B models add a slope to
 * scores in place of a rotation (ALiBi), and are refused: by their hidden_size, and because their
 * files have no max_position_embeddings. */
#include "common/model/families/families.h"

#include "common/base/json.h"
#include "common/model/config_internal.h"

static const char *const fields[] = {"z_loss_weight", "auto_map", NULL};

/* Fields of both 7B models and both 13B ones. z_loss_weight came with the second generation. */
static td_status read(const json_t *obj, const char *what, struct td_model_config *c,
                      struct td_err *err)
{
    (void)what, (void)err;
    c->unit_head = c->vocab == 125696 || json_object_get(obj, "z_loss_weight");
    return TD_OK;
}

#define HIDDEN_OF_13B 5120

static td_status translate(json_t *obj, const char *what, struct td_err *err)
{
    if (!json_object_get(obj, "max_position_embeddings"))
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "%s: max_position_embeddings is missing, as in the 13B models, whose ALiBi "
                       "is not supported: must be there",
                       what);
    /* where somebody has added that to the file of a 13B model */
    if (json_integer_value(json_object_get(obj, "hidden_size")) == HIDDEN_OF_13B)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "%s: hidden_size is %d, as in the 13B models, whose ALiBi is not supported",
                       what, HIDDEN_OF_13B);
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
                                             .models = "Baichuan and Baichuan2 7B",
                                             .class_name = "BaichuanForCausalLM",
                                             .old_class_name = "BaiChuanForCausalLM",
                                             .fields = fields,
                                             .translate = translate,
                                             .kv_heads_may_be_absent = true,
                                             .default_bos = 1,
                                             .default_eos = 2,
                                             .read = read,
                                             .layer = layer};
