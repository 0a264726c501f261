/* config.c - turns config.json into td_model_config, and accounts for every field.
 *
 * Every key of the object is looked up in one table and in its family's list (family.h). A key is
 * READ (honoured here, or by the family), HARMLESS (it cannot change a logit or a token: names,
 * versions, training only), or NEUTRAL (we do not implement it: null, false, empty or its neutral
 * number is accepted, anything else is refused by name). A key of one family in a config of another
 * counts as NEUTRAL. A key in no table is refused.
 *
 * Defaults of absent fields are those of the published configuration classes of each family. Sizes
 * without a sensible default must be present. */
#include "common/model/config.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/hash.h"
#include "common/base/json.h"
#include "common/base/mem.h"
#include "common/base/model_dir.h"
#include "common/model/config_internal.h"
#include "common/model/family.h"
#include "common/model/gguf_config.h"
#include "kernels/ops.h"

#define CONFIG_BYTES_MAX ((size_t)4 << 20)
#define N_ELEMENTS(a) (sizeof(a) / sizeof *(a))

/* Bounds that keep every product below within 64 bits, and the allocations for an absurd file
 * small. */
#define LAYERS_MAX TD_LAYERS_MAX
#define HIDDEN_MAX 65536
#define INTERMEDIATE_MAX TD_INTERMEDIATE_MAX
#define HEADS_MAX TD_HEADS_MAX
#define HEAD_DIM_MAX TD_ATTN_HEAD_DIM_MAX
#define VOCAB_MAX 4194304
#define POSITIONS_MAX TD_POSITIONS_MAX
#define PARAMS_MAX ((int64_t)1 << 42)

enum field_kind { READ, HARMLESS, NEUTRAL };

struct field {
    const char *name;
    enum field_kind kind;
    double neutral; /* NEUTRAL: this number means "off" too (0 always does) */
};

static const struct field config_fields[] = {
    {"model_type", READ, 0},
    {"architectures", READ, 0},
    {"hidden_size", READ, 0},
    {"intermediate_size", READ, 0},
    {"num_hidden_layers", READ, 0},
    {"num_attention_heads", READ, 0},
    {"num_key_value_heads", READ, 0},
    {"head_dim", READ, 0},
    {"vocab_size", READ, 0},
    {"max_position_embeddings", READ, 0},
    {"rms_norm_eps", READ, 0},
    {"hidden_act", READ, 0},
    {"tie_word_embeddings", READ, 0},
    {"rope_theta", READ, 0},
    {"rope_scaling", READ, 0},
    {"rope_parameters", READ, 0},
    {"torch_dtype", READ, 0},
    {"dtype", READ, 0},
    {"bos_token_id", READ, 0},
    {"eos_token_id", READ, 0},

    {"partial_rotary_factor", READ, 1},
    {"rope_interleaved", NEUTRAL, 0},
    {"full_attn_mod", NEUTRAL, 1},
    {"interpolate_factor", NEUTRAL, 1},
    {"lm_head_bias", NEUTRAL, 0},
    {"model_max_length", HARMLESS, 0}, /* the tokenizer's */
    {"use_mrope", NEUTRAL, 0},
    {"quantization_config", READ, 0},
    {"compression_config", NEUTRAL, 0},
    {"use_bidirectional_attention", NEUTRAL, 0},
    {"pruned_heads", NEUTRAL, 0},
    {"is_encoder_decoder", NEUTRAL, 0},
    {"is_decoder", HARMLESS, 0},
    {"add_cross_attention", NEUTRAL, 0},
    {"cross_attention_hidden_size", NEUTRAL, 0},
    {"chunk_size_feed_forward", HARMLESS, 0}, /* it only cuts a loop into pieces */
    {"pretraining_tp", HARMLESS, 0},          /* it only cuts a sum into pieces */

    {"_name_or_path", HARMLESS, 0},
    {"_commit_hash", HARMLESS, 0},
    {"_attn_implementation", HARMLESS, 0},
    {"_attn_implementation_autoset", HARMLESS, 0},
    {"_attn_implementation_internal", HARMLESS, 0},
    {"_flash_attn_2_enabled", HARMLESS, 0},
    {"_experts_implementation_internal", HARMLESS, 0},
    {"attn_implementation", HARMLESS, 0},
    {"transformers_version", HARMLESS, 0},
    {"transformers.js_config", HARMLESS, 0},
    {"unsloth_version", HARMLESS, 0},
    {"unsloth_fixed", HARMLESS, 0},
    {"model_name", HARMLESS, 0},
    {"use_cache", HARMLESS, 0},
    {"initializer_range", HARMLESS, 0},
    {"output_router_logits", HARMLESS, 0}, /* one more output, which nobody here reads */
    {"router_aux_loss_coef", HARMLESS, 0},
    {"router_jitter_noise", HARMLESS, 0}, /* in training */
    {"attention_dropout", HARMLESS, 0},
    {"hidden_dropout", HARMLESS, 0},
    {"resid_pdrop", HARMLESS, 0},
    {"embd_pdrop", HARMLESS, 0},
    {"gradient_checkpointing", HARMLESS, 0},
    {"pad_token_id", HARMLESS, 0},
    {"unk_token_id", HARMLESS, 0},
    {"sep_token_id", HARMLESS, 0},
    {"cls_token_id", HARMLESS, 0},
    {"tokenizer_class", HARMLESS, 0},
    {"task_specific_params", HARMLESS, 0},
    {"problem_type", HARMLESS, 0},
    {"finetuning_task", HARMLESS, 0},
    {"id2label", HARMLESS, 0},
    {"label2id", HARMLESS, 0},
    {"prefix", HARMLESS, 0},
    {"return_dict", HARMLESS, 0},
    {"torchscript", HARMLESS, 0},
    {"use_bfloat16", HARMLESS, 0},
    {"tf_legacy_loss", HARMLESS, 0},
    {"tie_encoder_decoder", HARMLESS, 0},
};

/* generation_config.json; old config.json files hold some of them too. */
static const struct field generation_fields[] = {
    {"bos_token_id", READ, 0},
    {"eos_token_id", READ, 0},
    {"do_sample", READ, 0},
    {"temperature", READ, 0},
    {"top_p", READ, 0},
    {"top_k", READ, 0},
    {"min_p", READ, 0},
    {"repetition_penalty", READ, 0},

    {"typical_p", NEUTRAL, 1},
    {"epsilon_cutoff", NEUTRAL, 0},
    {"eta_cutoff", NEUTRAL, 0},
    {"top_h", NEUTRAL, 0},
    {"penalty_alpha", NEUTRAL, 0},
    {"no_repeat_ngram_size", NEUTRAL, 0},
    {"encoder_no_repeat_ngram_size", NEUTRAL, 0},
    {"encoder_repetition_penalty", NEUTRAL, 1},
    {"diversity_penalty", NEUTRAL, 0},
    {"num_beams", NEUTRAL, 1},
    {"num_beam_groups", NEUTRAL, 1},
    {"num_return_sequences", NEUTRAL, 1},
    {"bad_words_ids", NEUTRAL, 0},
    {"force_words_ids", NEUTRAL, 0},
    {"forced_bos_token_id", NEUTRAL, 0},
    {"forced_eos_token_id", NEUTRAL, 0},
    {"forced_decoder_ids", NEUTRAL, 0},
    {"suppress_tokens", NEUTRAL, 0},
    {"begin_suppress_tokens", NEUTRAL, 0},
    {"sequence_bias", NEUTRAL, 0},
    {"exponential_decay_length_penalty", NEUTRAL, 0},
    {"guidance_scale", NEUTRAL, 1},
    {"watermarking_config", NEUTRAL, 0},
    {"renormalize_logits", NEUTRAL, 0},
    {"remove_invalid_values", NEUTRAL, 0},
    {"constraints", NEUTRAL, 0},
    {"dola_layers", NEUTRAL, 0},
    {"low_memory", NEUTRAL, 0},
    {"stop_strings", NEUTRAL, 0},
    {"token_healing", NEUTRAL, 0},
    {"min_length", NEUTRAL, 0},
    {"min_new_tokens", NEUTRAL, 0},

    {"max_length", HARMLESS, 0}, /* each request has its own limit */
    {"max_new_tokens", HARMLESS, 0},
    {"max_time", HARMLESS, 0},
    {"length_penalty", HARMLESS, 0}, /* beams only */
    {"early_stopping", HARMLESS, 0},
    {"decoder_start_token_id", HARMLESS, 0},
    {"pad_token_id", HARMLESS, 0},
    {"use_cache", HARMLESS, 0},
    {"cache_implementation", HARMLESS, 0},
    {"cache_config", HARMLESS, 0},
    {"output_attentions", HARMLESS, 0},
    {"output_hidden_states", HARMLESS, 0},
    {"output_scores", HARMLESS, 0},
    {"output_logits", HARMLESS, 0},
    {"return_dict_in_generate", HARMLESS, 0},
    {"transformers_version", HARMLESS, 0},
    {"trust_remote_code", HARMLESS, 0},
    {"_from_model_config", HARMLESS, 0},
    {"_commit_hash", HARMLESS, 0},
};

td_status td_config_unsupported(const char *what, const char *key, const json_t *v,
                                const char *must, struct td_err *err)
{
    char text[80];
    return td_fail(err, TD_ERR_UNSUPPORTED, "%s: %.64s is %s, not supported: must be %s", what, key,
                   td_json_show(v, text, sizeof text), must);
}

static bool is_neutral(const json_t *v, double neutral)
{
    if (json_is_null(v) || json_is_false(v)) return true;
    if (json_is_number(v)) return json_number_value(v) == 0 || json_number_value(v) == neutral;
    if (json_is_string(v)) return json_string_length(v) == 0;
    return (json_is_object(v) && json_object_size(v) == 0) ||
           (json_is_array(v) && json_array_size(v) == 0);
}

static const struct field *find_field(const struct field *fields, size_t n_fields, const char *key)
{
    for (size_t i = 0; i < n_fields; i++)
        if (strcmp(fields[i].name, key) == 0) return &fields[i];
    return NULL;
}

static bool is_listed(const struct td_family *family, const char *key)
{
    for (const char *const *f = family->fields; *f; f++)
        if (strcmp(*f, key) == 0) return true;
    return false;
}

static bool is_of_another(const char *key)
{
    bool any = false;
    for (int i = 0; i < TD_N_FAMILIES && !any; i++) any = is_listed(td_families[i], key);
    return any;
}

static const struct field *known_field(const char *key, bool is_generation)
{
    const struct field *f =
        is_generation ? NULL : find_field(config_fields, N_ELEMENTS(config_fields), key);
    return f ? f : find_field(generation_fields, N_ELEMENTS(generation_fields), key);
}

static td_status check_field(const char *what, const char *key, const json_t *v,
                             const struct td_family *family, bool is_generation, struct td_err *err)
{
    char text[80], must[64];
    const struct field *f = known_field(key, is_generation);
    if (f && f->kind == NEUTRAL)
        return is_neutral(v, f->neutral)
                   ? TD_OK
                   : td_config_unsupported(what, key, v, "absent or switched off", err);
    if (f || (!is_generation && is_listed(family, key))) return TD_OK;
    if (is_generation || !is_of_another(key))
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "%s: unknown field %.64s (%s): refused, because it may change the result",
                       what, key, td_json_show(v, text, sizeof text));
    snprintf(must, sizeof must, "absent in a %s model", family->model_type);
    return is_neutral(v, 0) ? TD_OK : td_config_unsupported(what, key, v, must, err);
}

static td_status check_fields(const json_t *obj, const char *what, const struct td_family *family,
                              bool is_generation, struct td_err *err)
{
    const char *key;
    json_t *v;
    json_object_foreach((json_t *)obj, key, v)
    {
        td_status s = check_field(what, key, v, family, is_generation, err);
        if (s) return s;
    }
    return TD_OK;
}

td_status td_config_check_without_effect(const char *what, const char *key, const json_t *v,
                                         struct td_err *err)
{
    char text[80];
    const struct field *f = known_field(key, false);
    if (f && (f->kind == HARMLESS || (f->kind == NEUTRAL && is_neutral(v, f->neutral))))
        return TD_OK;
    if (f && f->kind == NEUTRAL)
        return td_config_unsupported(what, key, v, "absent or switched off", err);
    return td_fail(err, TD_ERR_UNSUPPORTED,
                   "%s: unknown field %.64s (%s): refused, because it may change the result", what,
                   key, td_json_show(v, text, sizeof text));
}

td_status td_config_i32(const json_t *obj, const char *what, const char *key, int32_t min,
                        int32_t max, int32_t *ret, struct td_err *err)
{
    int64_t v = *ret;
    td_status s = td_json_i64(obj, what, key, min, max, &v, NULL, err);
    if (!s) *ret = (int32_t)v;
    return s;
}

td_status td_config_float(const json_t *obj, const char *what, const char *key, double min,
                          double max, float *ret, struct td_err *err)
{
    double v = (double)*ret;
    td_status s = td_json_f64(obj, what, key, min, max, &v, NULL, err);
    if (!s) *ret = (float)v;
    return s;
}

/* "llama, mistral or qwen2", for errors. */
static const char *family_names(char *buf, size_t buf_bytes)
{
    size_t n = 0;
    for (int i = 0; i < TD_N_FAMILIES && n < buf_bytes; i++)
        n += (size_t)snprintf(buf + n, buf_bytes - n, "%s%s",
                              i == 0                   ? ""
                              : i == TD_N_FAMILIES - 1 ? " or "
                                                       : ", ",
                              td_families[i]->model_type);
    return buf;
}

static td_status read_arch(const json_t *obj, const char *what, enum td_arch *ret,
                           struct td_err *err)
{
    const char *type = NULL;
    char names[560];
    td_status s = td_json_str(obj, what, "model_type", &type, NULL, err);
    if (s) return s;
    if (!type)
        return td_fail(err, TD_ERR_INVALID, "%s: model_type is missing, must be %s", what,
                       family_names(names, sizeof names));
    int i = 0;
    while (i < TD_N_FAMILIES && strcmp(td_families[i]->model_type, type) != 0) i++;
    if (i == TD_N_FAMILIES)
        return td_fail(err, TD_ERR_UNSUPPORTED, "%s: model_type is %.64s, must be %s", what, type,
                       family_names(names, sizeof names));
    const char *class_name = td_families[i]->class_name;
    const json_t *list = json_object_get(obj, "architectures");
    if (list && !json_is_null(list)) {
        const char *name = json_string_value(json_array_get(list, 0));
        const char *old = td_families[i]->old_class_name;
        bool fits = name && (!strcmp(name, class_name) || (old && !strcmp(name, old)));
        if (!fits || json_array_size(list) != 1) {
            char must[80];
            snprintf(must, sizeof must, "[\"%s\"] for model_type %s", class_name, type);
            return td_config_unsupported(what, "architectures", list, must, err);
        }
    }
    *ret = (enum td_arch)i;
    return TD_OK;
}

static td_status read_dtype(const json_t *obj, const char *what, enum td_dtype *ret,
                            struct td_err *err)
{
    const char *a = NULL, *b = NULL;
    td_status s;
    if ((s = td_json_str(obj, what, "dtype", &a, NULL, err)) ||
        (s = td_json_str(obj, what, "torch_dtype", &b, NULL, err)))
        return s;
    if (a && b && strcmp(a, b) != 0)
        return td_fail(err, TD_ERR_INVALID,
                       "%s: dtype is %.32s and torch_dtype is %.32s, must be the same", what, a, b);
    const char *name = a ? a : b;
    *ret = TD_F32; /* absent: f32 holds every type we read exactly */
    if (!name || strcmp(name, "float32") == 0) return TD_OK;
    if (strcmp(name, "float16") == 0)
        *ret = TD_F16;
    else if (strcmp(name, "bfloat16") == 0)
        *ret = TD_BF16;
    else
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "%s: %s is %.32s, must be float32, float16 or bfloat16", what,
                       a ? "dtype" : "torch_dtype", name);
    return TD_OK;
}

static td_status add_eos(const json_t *v, const char *what, const char *name,
                         struct td_model_config *c, struct td_err *err)
{
    char text[80];
    json_int_t id = json_is_integer(v) ? json_integer_value(v) : INT32_MIN;
    if (id == -1) return TD_OK; /* how some files write "none" */
    if (id < 0 || id >= c->vocab)
        return td_fail(err, TD_ERR_INVALID,
                       "%s: %s is %s, must be an integer in 0..%d (vocab_size - 1)", what, name,
                       td_json_show(v, text, sizeof text), c->vocab - 1);
    if (c->n_eos == TD_MAX_EOS)
        return td_fail(err, TD_ERR_LIMIT, "%s: %s has more than %d ids", what, name, TD_MAX_EOS);
    c->eos_ids[c->n_eos++] = (int32_t)id;
    return TD_OK;
}

static td_status read_special_ids(const json_t *obj, const char *what, struct td_model_config *c,
                                  struct td_err *err)
{
    td_status s;
    const json_t *v = json_object_get(obj, "bos_token_id");
    if (v && json_is_null(v)) c->bos_id = -1;
    if ((s = td_config_i32(obj, what, "bos_token_id", -1, c->vocab - 1, &c->bos_id, err))) return s;

    v = json_object_get(obj, "eos_token_id");
    if (!v) return TD_OK;
    c->n_eos = 0;
    if (json_is_null(v)) return TD_OK;
    if (!json_is_array(v)) return add_eos(v, what, "eos_token_id", c, err);
    for (size_t i = 0; i < json_array_size(v); i++) {
        char name[48];
        snprintf(name, sizeof name, "eos_token_id[%zu]", i);
        if ((s = add_eos(json_array_get(v, i), what, name, c, err))) return s;
    }
    return TD_OK;
}

static td_status read_generation(const json_t *obj, const char *what, struct td_model_config *c,
                                 struct td_err *err)
{
    td_status s;
    if ((s = read_special_ids(obj, what, c, err))) return s;
    if ((s = td_json_bool(obj, what, "do_sample", &c->do_sample, NULL, err))) return s;
    if ((s = td_config_float(obj, what, "temperature", 0, 100, &c->temperature, err))) return s;
    if ((s = td_config_float(obj, what, "top_p", 1e-6, 1, &c->top_p, err))) return s;
    if ((s = td_config_float(obj, what, "min_p", 0, 1, &c->min_p, err))) return s;
    if ((s = td_config_float(obj, what, "repetition_penalty", 1e-3, 1e3, &c->repetition_penalty,
                             err)))
        return s;
    return td_config_i32(obj, what, "top_k", 0, INT32_MAX, &c->top_k, err);
}

static td_status read_sizes(const json_t *obj, const char *what, struct td_model_config *c,
                            struct td_err *err)
{
    td_status s;
    const struct td_family *family = td_families[c->arch];
    if ((s = td_json_need_i32(obj, what, "num_hidden_layers", 1, LAYERS_MAX, &c->n_layers, err)))
        return s;
    if ((s = td_json_need_i32(obj, what, "hidden_size", 1, HIDDEN_MAX, &c->hidden, err))) return s;
    if ((s = td_json_need_i32(obj, what, "intermediate_size", 1, INTERMEDIATE_MAX, &c->intermediate,
                              err)))
        return s;
    if ((s = td_json_need_i32(obj, what, "num_attention_heads", 1, HEADS_MAX, &c->n_heads, err)))
        return s;
    if ((s = td_json_need_i32(obj, what, "vocab_size", 1, VOCAB_MAX, &c->vocab, err))) return s;
    const char *positions = "max_position_embeddings";
    const char *old = "max_sequence_length";
    if (is_listed(family, old) && !json_object_get(obj, positions) && json_object_get(obj, old))
        positions = old;
    if ((s = td_json_need_i32(obj, what, positions, 1, POSITIONS_MAX, &c->max_positions, err)))
        return s;

    const json_t *kv = json_object_get(obj, "num_key_value_heads");
    c->n_kv_heads = c->n_heads;
    if (!kv && !family->kv_heads_may_be_absent)
        return td_fail(err, TD_ERR_INVALID,
                       "%s: num_key_value_heads is missing, must be an integer in 1..%d", what,
                       c->n_heads);
    if ((s = td_config_i32(obj, what, "num_key_value_heads", 1, c->n_heads, &c->n_kv_heads, err)))
        return s;
    if (c->n_heads % c->n_kv_heads)
        return td_fail(err, TD_ERR_INVALID,
                       "%s: num_key_value_heads is %d, must divide num_attention_heads (%d)", what,
                       c->n_kv_heads, c->n_heads);

    const json_t *dim = json_object_get(obj, "head_dim");
    if (dim && !json_is_null(dim)) {
        if ((s = td_json_need_i32(obj, what, "head_dim", 2, HEAD_DIM_MAX, &c->head_dim, err)))
            return s;
    } else if (!dim && family->default_head_dim) {
        c->head_dim = family->default_head_dim;
    } else if (c->hidden % c->n_heads) {
        return td_fail(err, TD_ERR_INVALID,
                       "%s: hidden_size is %d, must be a multiple of num_attention_heads (%d) when "
                       "head_dim is absent",
                       what, c->hidden, c->n_heads);
    } else {
        c->head_dim = c->hidden / c->n_heads;
    }
    if (c->head_dim % 2 || c->head_dim < 2 || c->head_dim > HEAD_DIM_MAX)
        return td_fail(err, TD_ERR_UNSUPPORTED, "%s: head_dim is %d, must be even and in 2..%d",
                       what, c->head_dim, HEAD_DIM_MAX);
    return TD_OK;
}

td_status td_config_read_act(const json_t *obj, const char *what, const char *key,
                             const struct td_model_config *c, struct td_err *err)
{
    bool gelu = td_families[c->arch]->act == TD_ACT_GELU;
    const char *act = gelu ? "gelu_pytorch_tanh" : "silu";
    td_status s = td_json_str(obj, what, key, &act, NULL, err);
    if (s) return s;
    /* Gemma's first files say "gelu" and mean it by tanh */
    if (gelu ? !strcmp(act, "gelu_pytorch_tanh") ||
                   (!strcmp(act, "gelu") && !strcmp(key, "hidden_act"))
             : !strcmp(act, "silu") || !strcmp(act, "swish"))
        return TD_OK;
    return td_fail(err, TD_ERR_UNSUPPORTED, "%s: %s is %.32s, must be %s", what, key, act,
                   gelu ? "gelu_pytorch_tanh" : "silu");
}

static td_status check_n_params(const char *what, const struct td_model_config *c,
                                struct td_err *err)
{
    int64_t n = td_model_config_n_params(c);
    if (n <= PARAMS_MAX) return TD_OK;
    return td_fail(err, TD_ERR_LIMIT, "%s: the sizes make %lld parameters, must be at most %lld",
                   what, (long long)n, (long long)PARAMS_MAX);
}

/* All fields are known. */
static td_status read_fields(const json_t *obj, const char *what, struct td_model_config *c,
                             struct td_err *err)
{
    td_status s;
    c->tied_embeddings = td_families[c->arch]->default_tied;
    if ((s = td_json_bool(obj, what, "tie_word_embeddings", &c->tied_embeddings, NULL, err)))
        return s;
    if ((s = read_sizes(obj, what, c, err))) return s;

    const struct td_family *family = td_families[c->arch];
    c->rms_eps = family->default_eps > 0 ? family->default_eps : 1e-6f;
    if ((s = td_config_float(obj, what, "rms_norm_eps", 0, 1, &c->rms_eps, err))) return s;
    if ((s = td_config_read_act(obj, what, "hidden_act", c, err))) return s;
    c->residual_scale = c->logit_scale = c->embed_scale = 1;
    c->n_ropes = family->local_theta > 0 ? 2 : 1;
    if ((s = family->read(obj, what, c, err)) || (s = check_n_params(what, c, err))) return s;
    if ((s = td_config_read_rope(obj, what, c, err))) return s;
    if ((s = read_dtype(obj, what, &c->checkpoint_dtype, err))) return s;
    if ((s = td_quant_config_read(json_object_get(obj, "quantization_config"), what, c->quant,
                                  err)))
        return s;

    c->bos_id = family->default_bos < c->vocab ? family->default_bos : -1;
    c->n_eos = 0;
    if (family->default_eos >= 0 && family->default_eos < c->vocab)
        c->eos_ids[c->n_eos++] = family->default_eos;
    c->temperature = c->top_p = c->repetition_penalty = 1;
    return read_generation(obj, what, c, err);
}

td_status td_model_config_read(const json_t *obj, const char *what, struct td_model_config *c,
                               struct td_err *err)
{
    td_status s;
    *c = (struct td_model_config){0};
    if (!json_is_object(obj))
        return td_fail(err, TD_ERR_INVALID, "%s: must be a JSON object", what);
    if ((s = read_arch(obj, what, &c->arch, err))) return s;
    const struct td_family *family = td_families[c->arch];
    if ((s = check_fields(obj, what, family, false, err))) return s;
    if (!family->translate) return read_fields(obj, what, c, err);
    json_t *own = json_copy((json_t *)(uintptr_t)obj);
    if (!own) return td_fail(err, TD_ERR_NOMEM, "%s: no memory", what);
    s = family->translate(own, what, err);
    if (!s) s = read_fields(own, what, c, err);
    json_decref(own);
    return s;
}

static td_status read_root(const json_t *root, struct td_model_config *c, struct td_err *err)
{
    json_t *text;
    td_status s = td_config_text_part(root, "config.json", &text, err);
    if (s || !text) return s ? s : td_model_config_read(root, "config.json", c, err);
    s = td_model_config_read(text, "config.json: text_config", c, err);
    c->has_images = true;
    json_decref(text);
    return s;
}

td_status td_model_config_parse(const char *text, size_t n_bytes, const char *generation_text,
                                size_t generation_bytes, struct td_model_config *ret_config,
                                struct td_err *err)
{
    struct td_model_config c = {0};
    json_t *root;
    if (n_bytes > CONFIG_BYTES_MAX)
        return td_fail(err, TD_ERR_LIMIT, "config.json: %zu bytes, must be at most %zu", n_bytes,
                       CONFIG_BYTES_MAX);
    td_status s = td_json_load_text(text, n_bytes, "config.json", &root, err);
    if (s) return s;
    s = read_root(root, &c, err);
    json_decref(root);
    if (s) return s;
    if (generation_text) {
        static const char what[] = "generation_config.json";
        if (generation_bytes > CONFIG_BYTES_MAX)
            return td_fail(err, TD_ERR_LIMIT, "%s: %zu bytes, must be at most %zu", what,
                           generation_bytes, CONFIG_BYTES_MAX);
        if ((s = td_json_load_text(generation_text, generation_bytes, what, &root, err))) return s;
        if (!json_is_object(root))
            s = td_fail(err, TD_ERR_INVALID, "%s: must be a JSON object", what);
        else if (!(s = check_fields(root, what, td_families[c.arch], true, err)))
            s = read_generation(root, what, &c, err);
        json_decref(root);
        if (s) return s;
    }
    *ret_config = c;
    return TD_OK;
}

static td_status load(const char *dir, const char *path, const char *generation_path,
                      struct td_model_config *ret, struct td_err *err)
{
    char *text, *generation_text = NULL;
    size_t n_bytes, generation_bytes = 0;
    td_status s = td_file_read(path, CONFIG_BYTES_MAX, &text, &n_bytes, err);
    if (s) return s;
    if (generation_path && access(generation_path, F_OK) == 0 &&
        (s = td_file_read(generation_path, CONFIG_BYTES_MAX, &generation_text, &generation_bytes,
                          err))) {
        free(text);
        return s;
    }
    s = td_model_config_parse(text, n_bytes, generation_text, generation_bytes, ret, err);
    free(text);
    free(generation_text);
    return s ? (err ? td_err_prefix(err, "%s", dir) : s) : TD_OK;
}

td_status td_model_config_load(const char *dir, struct td_model_config *ret_config,
                               struct td_err *err)
{
    if (td_gguf_is_file(dir)) {
        struct td_gguf *g = NULL;
        td_status opened = td_gguf_open(dir, &g, err);
        if (opened) return opened;
        td_status read = td_gguf_config(g, dir, ret_config, err);
        td_gguf_close(g);
        return read;
    }
    char path[4096], generation_path[4096];
    int n = snprintf(path, sizeof path, "%s/config.json", dir);
    int m = snprintf(generation_path, sizeof generation_path, "%s/generation_config.json", dir);
    if (n < 0 || (size_t)n >= sizeof path || m < 0 || (size_t)m >= sizeof generation_path)
        return td_fail(err, TD_ERR_LIMIT,
                       "model directory: path of %zu bytes is too long, must be below %zu",
                       strlen(dir), sizeof path);
    td_status s = td_model_dir_check(dir, ".safetensors", err);
    if (s || (s = load(dir, path, generation_path, ret_config, err))) return s;
    return td_quant_config_beside(dir, ret_config->quant, err);
}

static void tell_fields(const json_t *obj, const struct td_model_config *c,
                        void (*tell)(void *ctx, const char *name, enum td_config_use use),
                        void *ctx)
{
    const char *key;
    json_t *v;
    json_object_foreach((json_t *)(uintptr_t)obj, key, v)
    {
        const struct field *f = known_field(key, false);
        bool is_own =
            is_listed(td_families[c->arch], key) || (c->has_images && !strcmp(key, "text_config"));
        tell(ctx, key,
             td_config_is_of_images(obj, key) ? TD_CONFIG_OF_IMAGES
             : is_own                         ? TD_CONFIG_HONOURED
             : f && f->kind == HARMLESS       ? TD_CONFIG_WITHOUT_EFFECT
             : f && f->kind == READ           ? TD_CONFIG_HONOURED
                                              : TD_CONFIG_OFF);
    }
}

td_status td_model_config_fields(const char *dir,
                                 void (*tell)(void *ctx, const char *name, enum td_config_use use),
                                 void *ctx, struct td_err *err)
{
    struct td_model_config c;
    char path[4096];
    json_t *root;
    td_status s = td_model_config_load(dir, &c, err);
    if (s || td_gguf_is_file(dir)) return s;
    snprintf(path, sizeof path, "%s/config.json", dir); /* it was short enough to be loaded */
    if ((s = td_json_load_file(path, CONFIG_BYTES_MAX, &root, err))) return s;
    tell_fields(root, &c, tell, ctx);
    if (c.has_images) tell_fields(json_object_get(root, "text_config"), &c, tell, ctx);
    json_decref(root);
    return TD_OK;
}

td_status td_model_config_load_file(const char *path, struct td_model_config *ret_config,
                                    struct td_err *err)
{
    return load(path, path, NULL, ret_config, err);
}

uint64_t td_model_config_digest(const struct td_model_config *c)
{
    char text[240]; /* text: neither padding nor byte order can differ between machines */
    int n = snprintf(text, sizeof text, "arch %d layers %d hidden %d inter %d heads %d %d %d %d",
                     c->arch, c->n_layers, c->hidden, c->intermediate, c->n_heads, c->n_kv_heads,
                     c->head_dim, c->vocab);
    if (c->experts.n)
        n += snprintf(text + n, sizeof text - (size_t)n, " experts %d %d %d", c->experts.n,
                      c->experts.n_used, c->experts.intermediate);
    if (c->latent.kv_rank)
        n +=
            snprintf(text + n, sizeof text - (size_t)n, " latent %d %d %d %d %d", c->latent.kv_rank,
                     c->latent.q_rank, c->latent.nope, c->latent.rope, c->latent.v);
    uint64_t digest = td_hash64(text, (size_t)n, 0);
    return digest ? digest : 1;
}

static int64_t table_params(const struct td_model_config *c, const struct td_tensor_row *table)
{
    int64_t n = 0;
    for (const struct td_tensor_row *t = table; t && t->name; t++) {
        struct td_dim_size rows = td_dim_size(c, t->rows), cols = td_dim_size(c, t->cols);
        if (td_tensor_is_wanted(c, t))
            n += (int64_t)rows.n_units * rows.unit * cols.n_units * cols.unit;
    }
    return n;
}

/* n_experts: those that are counted of each layer that has some. */
static int64_t count_params(const struct td_model_config *c, int64_t n_experts)
{
    int64_t n = (int64_t)c->hidden * c->vocab * (c->tied_embeddings ? 1 : 2) + c->hidden;
    struct td_layer_spec spec;
    for (int32_t i = 0; i < c->n_layers; i++) {
        td_model_config_layer(c, i, &spec);
        for (int k = 0; k < TD_LAYER_TABLES; k++) n += table_params(c, spec.tensors[k]);
        n += n_experts * table_params(c, spec.expert_tensors);
    }
    return n;
}

int64_t td_model_config_n_params(const struct td_model_config *c)
{
    return count_params(c, c->experts.n);
}

int64_t td_model_config_n_active_params(const struct td_model_config *c)
{
    return count_params(c, c->experts.n_used);
}
