/* config.c - turns config.json into td_model_config, and accounts for every field.
 *
 * Every key of the object is looked up in one table. A key is READ (honoured here), HARMLESS (it
 * cannot change a logit or a token: names, versions, training only), or NEUTRAL (we do not
 * implement it: null, false, empty or its neutral number is accepted, anything else is refused by
 * name). A key of one architecture in a config of another counts as NEUTRAL. A key in no table is
 * refused.
 *
 * Defaults of absent fields are those of the published configuration classes of each architecture.
 * Sizes without a sensible default must be present. */
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
#include "common/model/gguf_config.h"
#include "kernels/ops.h"

#define CONFIG_BYTES_MAX ((size_t)4 << 20)
#define N_ELEMENTS(a) (sizeof(a) / sizeof *(a))

/* Bounds that keep every product below within 64 bits, and the allocations for an absurd file
 * small. */
#define LAYERS_MAX 1024
#define HIDDEN_MAX 65536
#define INTERMEDIATE_MAX 1048576
#define HEADS_MAX 1024
#define HEAD_DIM_MAX TD_ATTN_HEAD_DIM_MAX
#define VOCAB_MAX 4194304
#define POSITIONS_MAX 4194304
#define PARAMS_MAX ((int64_t)1 << 42)

enum field_kind { READ, HARMLESS, NEUTRAL };
enum {
    LLAMA = 1 << TD_ARCH_LLAMA,
    MISTRAL = 1 << TD_ARCH_MISTRAL,
    QWEN2 = 1 << TD_ARCH_QWEN2,
    QWEN3 = 1 << TD_ARCH_QWEN3
};
enum { ALL = LLAMA | MISTRAL | QWEN2 | QWEN3 };

struct field {
    const char *name;
    enum field_kind kind;
    int archs; /* READ: the architectures that have the field; in others it counts as NEUTRAL */
    double neutral; /* NEUTRAL: this number means "off" too (0 always does)     */
};

static const struct field config_fields[] = {
    {"model_type", READ, ALL, 0},
    {"architectures", READ, ALL, 0},
    {"hidden_size", READ, ALL, 0},
    {"intermediate_size", READ, ALL, 0},
    {"num_hidden_layers", READ, ALL, 0},
    {"num_attention_heads", READ, ALL, 0},
    {"num_key_value_heads", READ, ALL, 0},
    {"head_dim", READ, ALL, 0},
    {"vocab_size", READ, ALL, 0},
    {"max_position_embeddings", READ, ALL, 0},
    {"max_sequence_length", READ, LLAMA, 0}, /* first Llama conversions */
    {"rms_norm_eps", READ, ALL, 0},
    {"hidden_act", READ, ALL, 0},
    {"tie_word_embeddings", READ, ALL, 0},
    {"attention_bias", READ, LLAMA | QWEN3, 0},
    {"mlp_bias", READ, LLAMA, 0},
    {"sliding_window", READ, MISTRAL | QWEN2 | QWEN3, 0},
    {"use_sliding_window", READ, QWEN2 | QWEN3, 0},
    {"max_window_layers", READ, QWEN2 | QWEN3, 0},
    {"layer_types", READ, QWEN2 | QWEN3, 0},
    {"rope_theta", READ, ALL, 0},
    {"rope_scaling", READ, ALL, 0},
    {"rope_parameters", READ, ALL, 0},
    {"torch_dtype", READ, ALL, 0},
    {"dtype", READ, ALL, 0},
    {"bos_token_id", READ, ALL, 0},
    {"eos_token_id", READ, ALL, 0},

    {"partial_rotary_factor", NEUTRAL, ALL, 1},
    {"rope_interleaved", NEUTRAL, ALL, 0},
    {"use_mrope", NEUTRAL, ALL, 0},
    {"quantization_config", READ, ALL, 0},
    {"compression_config", NEUTRAL, ALL, 0},
    {"pruned_heads", NEUTRAL, ALL, 0},
    {"is_encoder_decoder", NEUTRAL, ALL, 0},
    {"is_decoder", HARMLESS, ALL, 0},
    {"add_cross_attention", NEUTRAL, ALL, 0},
    {"cross_attention_hidden_size", NEUTRAL, ALL, 0},
    {"chunk_size_feed_forward", HARMLESS, ALL, 0}, /* it only cuts a loop into pieces */
    {"pretraining_tp", HARMLESS, ALL, 0},          /* it only cuts a sum into pieces */

    {"_name_or_path", HARMLESS, ALL, 0},
    {"_commit_hash", HARMLESS, ALL, 0},
    {"_attn_implementation", HARMLESS, ALL, 0},
    {"_attn_implementation_autoset", HARMLESS, ALL, 0},
    {"_attn_implementation_internal", HARMLESS, ALL, 0},
    {"_flash_attn_2_enabled", HARMLESS, ALL, 0},
    {"_experts_implementation_internal", HARMLESS, ALL, 0},
    {"attn_implementation", HARMLESS, ALL, 0},
    {"transformers_version", HARMLESS, ALL, 0},
    {"transformers.js_config", HARMLESS, ALL, 0},
    {"unsloth_version", HARMLESS, ALL, 0},
    {"unsloth_fixed", HARMLESS, ALL, 0},
    {"model_name", HARMLESS, ALL, 0},
    {"use_cache", HARMLESS, ALL, 0},
    {"initializer_range", HARMLESS, ALL, 0},
    {"attention_dropout", HARMLESS, ALL, 0},
    {"hidden_dropout", HARMLESS, ALL, 0},
    {"resid_pdrop", HARMLESS, ALL, 0},
    {"embd_pdrop", HARMLESS, ALL, 0},
    {"gradient_checkpointing", HARMLESS, ALL, 0},
    {"pad_token_id", HARMLESS, ALL, 0},
    {"unk_token_id", HARMLESS, ALL, 0},
    {"sep_token_id", HARMLESS, ALL, 0},
    {"cls_token_id", HARMLESS, ALL, 0},
    {"tokenizer_class", HARMLESS, ALL, 0},
    {"task_specific_params", HARMLESS, ALL, 0},
    {"problem_type", HARMLESS, ALL, 0},
    {"finetuning_task", HARMLESS, ALL, 0},
    {"id2label", HARMLESS, ALL, 0},
    {"label2id", HARMLESS, ALL, 0},
    {"prefix", HARMLESS, ALL, 0},
    {"return_dict", HARMLESS, ALL, 0},
    {"torchscript", HARMLESS, ALL, 0},
    {"use_bfloat16", HARMLESS, ALL, 0},
    {"tf_legacy_loss", HARMLESS, ALL, 0},
    {"tie_encoder_decoder", HARMLESS, ALL, 0},
};

/* generation_config.json; old config.json files hold some of them too. */
static const struct field generation_fields[] = {
    {"bos_token_id", READ, ALL, 0},
    {"eos_token_id", READ, ALL, 0},
    {"do_sample", READ, ALL, 0},
    {"temperature", READ, ALL, 0},
    {"top_p", READ, ALL, 0},
    {"top_k", READ, ALL, 0},
    {"min_p", READ, ALL, 0},
    {"repetition_penalty", READ, ALL, 0},

    {"typical_p", NEUTRAL, ALL, 1},
    {"epsilon_cutoff", NEUTRAL, ALL, 0},
    {"eta_cutoff", NEUTRAL, ALL, 0},
    {"top_h", NEUTRAL, ALL, 0},
    {"penalty_alpha", NEUTRAL, ALL, 0},
    {"no_repeat_ngram_size", NEUTRAL, ALL, 0},
    {"encoder_no_repeat_ngram_size", NEUTRAL, ALL, 0},
    {"encoder_repetition_penalty", NEUTRAL, ALL, 1},
    {"diversity_penalty", NEUTRAL, ALL, 0},
    {"num_beams", NEUTRAL, ALL, 1},
    {"num_beam_groups", NEUTRAL, ALL, 1},
    {"num_return_sequences", NEUTRAL, ALL, 1},
    {"bad_words_ids", NEUTRAL, ALL, 0},
    {"force_words_ids", NEUTRAL, ALL, 0},
    {"forced_bos_token_id", NEUTRAL, ALL, 0},
    {"forced_eos_token_id", NEUTRAL, ALL, 0},
    {"forced_decoder_ids", NEUTRAL, ALL, 0},
    {"suppress_tokens", NEUTRAL, ALL, 0},
    {"begin_suppress_tokens", NEUTRAL, ALL, 0},
    {"sequence_bias", NEUTRAL, ALL, 0},
    {"exponential_decay_length_penalty", NEUTRAL, ALL, 0},
    {"guidance_scale", NEUTRAL, ALL, 1},
    {"watermarking_config", NEUTRAL, ALL, 0},
    {"renormalize_logits", NEUTRAL, ALL, 0},
    {"remove_invalid_values", NEUTRAL, ALL, 0},
    {"constraints", NEUTRAL, ALL, 0},
    {"dola_layers", NEUTRAL, ALL, 0},
    {"low_memory", NEUTRAL, ALL, 0},
    {"stop_strings", NEUTRAL, ALL, 0},
    {"token_healing", NEUTRAL, ALL, 0},
    {"min_length", NEUTRAL, ALL, 0},
    {"min_new_tokens", NEUTRAL, ALL, 0},

    {"max_length", HARMLESS, ALL, 0}, /* each request has its own limit */
    {"max_new_tokens", HARMLESS, ALL, 0},
    {"max_time", HARMLESS, ALL, 0},
    {"length_penalty", HARMLESS, ALL, 0}, /* beams only */
    {"early_stopping", HARMLESS, ALL, 0},
    {"decoder_start_token_id", HARMLESS, ALL, 0},
    {"pad_token_id", HARMLESS, ALL, 0},
    {"use_cache", HARMLESS, ALL, 0},
    {"cache_implementation", HARMLESS, ALL, 0},
    {"cache_config", HARMLESS, ALL, 0},
    {"output_attentions", HARMLESS, ALL, 0},
    {"output_hidden_states", HARMLESS, ALL, 0},
    {"output_scores", HARMLESS, ALL, 0},
    {"output_logits", HARMLESS, ALL, 0},
    {"return_dict_in_generate", HARMLESS, ALL, 0},
    {"transformers_version", HARMLESS, ALL, 0},
    {"trust_remote_code", HARMLESS, ALL, 0},
    {"_from_model_config", HARMLESS, ALL, 0},
    {"_commit_hash", HARMLESS, ALL, 0},
};

static const struct arch_name {
    const char *model_type, *class_name;
} arch_names[] = {
    [TD_ARCH_LLAMA] = {"llama", "LlamaForCausalLM"},
    [TD_ARCH_MISTRAL] = {"mistral", "MistralForCausalLM"},
    [TD_ARCH_QWEN2] = {"qwen2", "Qwen2ForCausalLM"},
    [TD_ARCH_QWEN3] = {"qwen3", "Qwen3ForCausalLM"},
};

/* The value as text, short enough for a message. */
static const char *show(const json_t *v, char *buf, size_t buf_bytes)
{
    char *text = json_dumps(v, JSON_ENCODE_ANY | JSON_COMPACT);
    int n = snprintf(buf, buf_bytes, "%s", text ? text : "(unprintable)");
    if (n > 0 && (size_t)n >= buf_bytes) memcpy(buf + buf_bytes - 4, "...", 4);
    free(text);
    return buf;
}

static td_status unsupported(const char *what, const char *key, const json_t *v, const char *must,
                             struct td_err *err)
{
    char text[80];
    return td_fail(err, TD_ERR_UNSUPPORTED, "%s: %.64s is %s, not supported: must be %s", what, key,
                   show(v, text, sizeof text), must);
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

static td_status check_fields(const json_t *obj, const char *what, enum td_arch arch,
                              bool is_generation, struct td_err *err)
{
    const char *key;
    json_t *v;
    json_object_foreach((json_t *)obj, key, v)
    {
        const struct field *f =
            is_generation ? NULL : find_field(config_fields, N_ELEMENTS(config_fields), key);
        if (!f) f = find_field(generation_fields, N_ELEMENTS(generation_fields), key);
        if (!f) {
            char text[80];
            return td_fail(
                err, TD_ERR_UNSUPPORTED,
                "%s: unknown field %.64s (%s): refused, because it may change the result", what,
                key, show(v, text, sizeof text));
        }
        if (f->kind == HARMLESS || (f->kind == READ && (f->archs & 1 << arch))) continue;
        if (f->kind == READ) {
            if (is_neutral(v, 0)) continue;
            char must[64];
            snprintf(must, sizeof must, "absent in a %s model", arch_names[arch].model_type);
            return unsupported(what, key, v, must, err);
        }
        if (!is_neutral(v, f->neutral))
            return unsupported(what, key, v, "absent or switched off", err);
    }
    return TD_OK;
}

static td_status may_i32(const json_t *obj, const char *what, const char *key, int32_t min,
                         int32_t max, int32_t *ret, struct td_err *err)
{
    int64_t v = *ret;
    td_status s = td_json_i64(obj, what, key, min, max, &v, NULL, err);
    if (!s) *ret = (int32_t)v;
    return s;
}

static td_status may_float(const json_t *obj, const char *what, const char *key, double min,
                           double max, float *ret, struct td_err *err)
{
    double v = (double)*ret;
    td_status s = td_json_f64(obj, what, key, min, max, &v, NULL, err);
    if (!s) *ret = (float)v;
    return s;
}

static td_status read_arch(const json_t *obj, const char *what, enum td_arch *ret,
                           struct td_err *err)
{
    const char *type = NULL;
    td_status s = td_json_str(obj, what, "model_type", &type, NULL, err);
    if (s) return s;
    if (!type)
        return td_fail(err, TD_ERR_INVALID,
                       "%s: model_type is missing, must be llama, mistral, qwen2 or qwen3", what);
    size_t i = 0;
    while (i < N_ELEMENTS(arch_names) && strcmp(arch_names[i].model_type, type) != 0) i++;
    if (i == N_ELEMENTS(arch_names))
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "%s: model_type is %.64s, must be llama, mistral, qwen2 or qwen3", what,
                       type);
    const json_t *list = json_object_get(obj, "architectures");
    if (list && !json_is_null(list)) {
        const char *name = json_string_value(json_array_get(list, 0));
        if (!name || json_array_size(list) != 1 || strcmp(name, arch_names[i].class_name) != 0) {
            char must[80];
            snprintf(must, sizeof must, "[\"%s\"] for model_type %s", arch_names[i].class_name,
                     type);
            return unsupported(what, "architectures", list, must, err);
        }
    }
    *ret = (enum td_arch)i;
    return TD_OK;
}

/* The fields that only "llama3" scaling has. */
static td_status read_rope_llama3(const json_t *r, const char *where, struct td_model_config *c,
                                  struct td_err *err)
{
    td_status s;
    bool present;
    if ((s = td_json_f64(r, where, "low_freq_factor", 1e-6, 1e6, &c->rope_low_freq_factor, &present,
                         err)))
        return s;
    if (!present) return td_fail(err, TD_ERR_INVALID, "%s: low_freq_factor is missing", where);
    if ((s = td_json_f64(r, where, "high_freq_factor", 1e-6, 1e6, &c->rope_high_freq_factor,
                         &present, err)))
        return s;
    if (!present) return td_fail(err, TD_ERR_INVALID, "%s: high_freq_factor is missing", where);
    if (!(c->rope_high_freq_factor > c->rope_low_freq_factor))
        return td_fail(err, TD_ERR_INVALID,
                       "%s: high_freq_factor is %g, must be above low_freq_factor %g", where,
                       c->rope_high_freq_factor, c->rope_low_freq_factor);
    return td_json_need_i32(r, where, "original_max_position_embeddings", 1, POSITIONS_MAX,
                            &c->rope_original_max_positions, err);
}

/* The rotary embedding's object: "rope_scaling" ("type" or "rope_type") and the newer
 * "rope_parameters" (which holds rope_theta too). */
static td_status read_rope_object(const json_t *obj, const char *what, const char *name,
                                  struct td_model_config *c, struct td_err *err)
{
    const json_t *r = json_object_get(obj, name);
    if (!r || json_is_null(r)) return TD_OK;
    char where[128];
    snprintf(where, sizeof where, "%.96s: %s", what, name);
    if (!json_is_object(r)) return td_fail(err, TD_ERR_INVALID, "%s must be an object", where);

    const char *type = NULL, *old_type = NULL, *key;
    td_status s;
    if ((s = td_json_str(r, where, "rope_type", &type, NULL, err)) ||
        (s = td_json_str(r, where, "type", &old_type, NULL, err)))
        return s;
    if (type && old_type && strcmp(type, old_type) != 0)
        return td_fail(err, TD_ERR_INVALID,
                       "%s: rope_type is %.32s and type is %.32s, must be the same", where, type,
                       old_type);
    if (!type) type = old_type ? old_type : "default";
    if (strcmp(type, "default") == 0)
        c->rope_scaling = TD_ROPE_PLAIN;
    else if (strcmp(type, "linear") == 0)
        c->rope_scaling = TD_ROPE_LINEAR;
    else if (strcmp(type, "llama3") == 0)
        c->rope_scaling = TD_ROPE_LLAMA3;
    else
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "%s: rope_type is %.32s, not supported: must be default, linear or llama3",
                       where, type);

    json_t *v;
    json_object_foreach((json_t *)r, key, v)
    {
        static const char *const llama3_only[] = {"low_freq_factor", "high_freq_factor",
                                                  "original_max_position_embeddings"};
        if (strcmp(key, "type") == 0 || strcmp(key, "rope_type") == 0 ||
            strcmp(key, "rope_theta") == 0)
            continue;
        if (strcmp(key, "factor") == 0 && c->rope_scaling != TD_ROPE_PLAIN) continue;
        bool ok = false;
        for (size_t i = 0; i < N_ELEMENTS(llama3_only); i++)
            ok |= c->rope_scaling == TD_ROPE_LLAMA3 && strcmp(key, llama3_only[i]) == 0;
        if (!ok &&
            !is_neutral(v, strcmp(key, "partial_rotary_factor") == 0 || strcmp(key, "factor") == 0))
            return unsupported(where, key, v, "absent", err);
    }
    if ((s = td_json_f64(r, where, "rope_theta", 1, 1e12, &c->rope_theta, NULL, err))) return s;
    if (c->rope_scaling == TD_ROPE_PLAIN) return TD_OK;

    bool present;
    if ((s = td_json_f64(r, where, "factor", 1, 1e6, &c->rope_factor, &present, err))) return s;
    if (!present)
        return td_fail(err, TD_ERR_INVALID, "%s: factor is missing, must be a number in 1..1e6",
                       where);
    return c->rope_scaling == TD_ROPE_LINEAR ? TD_OK : read_rope_llama3(r, where, c, err);
}

static td_status read_rope(const json_t *obj, const char *what, struct td_model_config *c,
                           struct td_err *err)
{
    td_status s;
    c->rope_theta = 10000;
    c->rope_factor = 1;
    if ((s = td_json_f64(obj, what, "rope_theta", 1, 1e12, &c->rope_theta, NULL, err))) return s;
    const json_t *old = json_object_get(obj, "rope_scaling"),
                 *new = json_object_get(obj, "rope_parameters");
    if (old && !json_is_null(old) && new && !json_is_null(new) && !json_equal(old, new))
        return td_fail(
            err, TD_ERR_UNSUPPORTED,
            "%s: rope_scaling and rope_parameters are both set and differ: must be one of them",
            what);
    if ((s = read_rope_object(obj, what, "rope_scaling", c, err))) return s;
    return new && !json_is_null(new) ? read_rope_object(obj, what, "rope_parameters", c, err)
                                     : TD_OK;
}

/* Reads the explicit list of layer types. The window must start at one layer and hold to the last,
 * because sliding_from_layer can express nothing else. */
static td_status read_layer_types(const json_t *obj, const char *what, struct td_model_config *c,
                                  struct td_err *err)
{
    const json_t *list = json_object_get(obj, "layer_types");
    if (!list || json_is_null(list)) return TD_OK;
    if (!json_is_array(list) || json_array_size(list) != (size_t)c->n_layers)
        return td_fail(err, TD_ERR_INVALID,
                       "%s: layer_types has %zu entries, must be num_hidden_layers (%d)", what,
                       json_is_array(list) ? json_array_size(list) : 0, c->n_layers);
    int32_t first = c->n_layers;
    for (int32_t i = 0; i < c->n_layers; i++) {
        const char *type = json_string_value(json_array_get(list, (size_t)i));
        bool full = type && strcmp(type, "full_attention") == 0,
             sliding = type && strcmp(type, "sliding_attention") == 0;
        char name[32];
        snprintf(name, sizeof name, "layer_types[%d]", i);
        if (!full && !sliding)
            return unsupported(what, name, json_array_get(list, (size_t)i),
                               "full_attention or sliding_attention", err);
        if (sliding && c->sliding_window == 0)
            return td_fail(err, TD_ERR_INVALID,
                           "%s: %s is sliding_attention, but use_sliding_window and sliding_window "
                           "set no window",
                           what, name);
        if (sliding && first == c->n_layers) first = i;
        if (full && first < i)
            return unsupported(what, name, json_array_get(list, (size_t)i),
                               "sliding_attention, as an earlier layer is", err);
    }
    c->sliding_from_layer = first;
    if (first == c->n_layers) c->sliding_window = c->sliding_from_layer = 0;
    return TD_OK;
}

static td_status read_window(const json_t *obj, const char *what, struct td_model_config *c,
                             struct td_err *err)
{
    td_status s;
    c->sliding_window = c->sliding_from_layer = 0;
    if (c->arch == TD_ARCH_LLAMA) return TD_OK;
    const json_t *v = json_object_get(obj, "sliding_window");
    /* absent means 4096 (configuration class), null means no window */
    int32_t window = v && json_is_null(v) ? 0 : 4096;
    if ((s = may_i32(obj, what, "sliding_window", 1, INT32_MAX, &window, err))) return s;
    if (c->arch == TD_ARCH_MISTRAL) {
        c->sliding_window = window;
        return TD_OK;
    }
    bool use = false;
    int32_t first = 28;
    if ((s = td_json_bool(obj, what, "use_sliding_window", &use, NULL, err))) return s;
    if ((s = may_i32(obj, what, "max_window_layers", 0, LAYERS_MAX, &first, err))) return s;
    if (use) {
        c->sliding_window = window;
        c->sliding_from_layer = window ? first : 0;
    }
    if ((s = read_layer_types(obj, what, c, err))) return s;
    if (c->sliding_from_layer >= c->n_layers) c->sliding_window = c->sliding_from_layer = 0;
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
                       show(v, text, sizeof text), c->vocab - 1);
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
    if ((s = may_i32(obj, what, "bos_token_id", -1, c->vocab - 1, &c->bos_id, err))) return s;

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
    if ((s = may_float(obj, what, "temperature", 0, 100, &c->temperature, err))) return s;
    if ((s = may_float(obj, what, "top_p", 1e-6, 1, &c->top_p, err))) return s;
    if ((s = may_float(obj, what, "min_p", 0, 1, &c->min_p, err))) return s;
    if ((s = may_float(obj, what, "repetition_penalty", 1e-3, 1e3, &c->repetition_penalty, err)))
        return s;
    return may_i32(obj, what, "top_k", 0, INT32_MAX, &c->top_k, err);
}

static td_status read_sizes(const json_t *obj, const char *what, struct td_model_config *c,
                            struct td_err *err)
{
    td_status s;
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
    if (c->arch == TD_ARCH_LLAMA && !json_object_get(obj, positions) &&
        json_object_get(obj, "max_sequence_length"))
        positions = "max_sequence_length";
    if ((s = td_json_need_i32(obj, what, positions, 1, POSITIONS_MAX, &c->max_positions, err)))
        return s;

    const json_t *kv = json_object_get(obj, "num_key_value_heads");
    c->n_kv_heads = c->n_heads;
    if (!kv && c->arch != TD_ARCH_LLAMA)
        return td_fail(err, TD_ERR_INVALID,
                       "%s: num_key_value_heads is missing, must be an integer in 1..%d", what,
                       c->n_heads);
    if ((s = may_i32(obj, what, "num_key_value_heads", 1, c->n_heads, &c->n_kv_heads, err)))
        return s;
    if (c->n_heads % c->n_kv_heads)
        return td_fail(err, TD_ERR_INVALID,
                       "%s: num_key_value_heads is %d, must divide num_attention_heads (%d)", what,
                       c->n_kv_heads, c->n_heads);

    const json_t *dim = json_object_get(obj, "head_dim");
    if (dim && !json_is_null(dim)) {
        if ((s = td_json_need_i32(obj, what, "head_dim", 2, HEAD_DIM_MAX, &c->head_dim, err)))
            return s;
    } else if (!dim && c->arch == TD_ARCH_QWEN3) {
        c->head_dim = 128; /* this class has a fixed default */
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
    if (td_model_config_n_params(c) > PARAMS_MAX)
        return td_fail(err, TD_ERR_LIMIT,
                       "%s: the sizes make %lld parameters, must be at most %lld", what,
                       (long long)td_model_config_n_params(c), (long long)PARAMS_MAX);
    return TD_OK;
}

td_status td_model_config_read(const json_t *obj, const char *what, struct td_model_config *c,
                               struct td_err *err)
{
    td_status s;
    *c = (struct td_model_config){0};
    if (!json_is_object(obj))
        return td_fail(err, TD_ERR_INVALID, "%s: must be a JSON object", what);
    if ((s = read_arch(obj, what, &c->arch, err))) return s;
    if ((s = check_fields(obj, what, c->arch, false, err))) return s;
    if ((s = td_json_bool(obj, what, "tie_word_embeddings", &c->tied_embeddings, NULL, err)))
        return s;
    if ((s = read_sizes(obj, what, c, err))) return s;

    c->rms_eps = 1e-6f;
    if ((s = may_float(obj, what, "rms_norm_eps", 0, 1, &c->rms_eps, err))) return s;
    const char *act = "silu";
    if ((s = td_json_str(obj, what, "hidden_act", &act, NULL, err))) return s;
    if (strcmp(act, "silu") != 0 && strcmp(act, "swish") != 0)
        return td_fail(err, TD_ERR_UNSUPPORTED, "%s: hidden_act is %.32s, must be silu", what, act);

    bool attention_bias = false;
    if ((s = td_json_bool(obj, what, "attention_bias", &attention_bias, NULL, err))) return s;
    if ((s = td_json_bool(obj, what, "mlp_bias", &c->mlp_bias, NULL, err))) return s;
    c->qkv_bias = attention_bias || c->arch == TD_ARCH_QWEN2;
    c->o_bias = attention_bias;
    c->qk_norm = c->arch == TD_ARCH_QWEN3;

    if ((s = read_window(obj, what, c, err))) return s;
    if ((s = read_rope(obj, what, c, err))) return s;
    if ((s = read_dtype(obj, what, &c->checkpoint_dtype, err))) return s;
    if ((s = td_quant_config_read(json_object_get(obj, "quantization_config"), what, &c->quant,
                                  err)))
        return s;

    /* The ids of the configuration classes, for absent ones. */
    bool old_class = c->arch == TD_ARCH_LLAMA || c->arch == TD_ARCH_MISTRAL;
    c->bos_id = old_class && c->vocab > 2 ? 1 : -1;
    c->n_eos = 0;
    if (old_class && c->vocab > 2) c->eos_ids[c->n_eos++] = 2;
    c->temperature = c->top_p = c->repetition_penalty = 1;
    return read_generation(obj, what, c, err);
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
    s = td_model_config_read(root, "config.json", &c, err);
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
        else if (!(s = check_fields(root, what, c.arch, true, err)))
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
    if (s || (s = load(dir, path, generation_path, ret_config, err)) || ret_config->quant.scheme)
        return s;
    return td_quant_config_beside(dir, &ret_config->quant, err);
}

td_status td_model_config_load_file(const char *path, struct td_model_config *ret_config,
                                    struct td_err *err)
{
    return load(path, path, NULL, ret_config, err);
}

uint64_t td_model_config_digest(const struct td_model_config *c)
{
    char text[160]; /* text: neither padding nor byte order can differ between machines */
    int n = snprintf(text, sizeof text, "arch %d layers %d hidden %d inter %d heads %d %d %d %d",
                     c->arch, c->n_layers, c->hidden, c->intermediate, c->n_heads, c->n_kv_heads,
                     c->head_dim, c->vocab);
    uint64_t digest = td_hash64(text, (size_t)n, 0);
    return digest ? digest : 1;
}

int64_t td_model_config_n_params(const struct td_model_config *c)
{
    int64_t h = c->hidden, q = (int64_t)c->n_heads * c->head_dim,
            kv = (int64_t)c->n_kv_heads * c->head_dim;
    int64_t layer = h * (q + 2 * kv) + q * h + 3 * h * c->intermediate + 2 * h;
    if (c->qkv_bias) layer += q + 2 * kv;
    if (c->o_bias) layer += h;
    if (c->mlp_bias) layer += 2 * (int64_t)c->intermediate + h;
    if (c->qk_norm) layer += 2 * (int64_t)c->head_dim;
    return layer * c->n_layers + h * c->vocab * (c->tied_embeddings ? 1 : 2) + h;
}
