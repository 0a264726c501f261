/* gguf_config.c - a GGUF file's keys as a config.json.
 *
 * Converters store a Mistral model as architecture "llama" and leave its sliding window out, so
 * such a file attends to everything, here as in llama.cpp. */
#include "common/model/gguf_config.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "common/base/json.h"
#include "common/model/config_internal.h"
#include "common/model/family.h"

#define KEY_BYTES 128

/* Keys of an architecture, after "ARCH.", that are read or may say anything. */
static const char *const known_keys[] = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
};

/* Integers: a key after "ARCH." and the field of config.json that it becomes. */
static const struct {
    const char *key, *field;
} integers[] = {
    {"block_count", "num_hidden_layers"},
    {"embedding_length", "hidden_size"},
    {"feed_forward_length", "intermediate_size"},
    {"context_length", "max_position_embeddings"},
    {"attention.head_count", "num_attention_heads"},
    {"attention.head_count_kv", "num_key_value_heads"},
    {"attention.key_length", "head_dim"},
};

/* Control tokens that end a generation under any model that has them; but END_OF_MESSAGE does not
 * in a vocabulary with the token behind it (gpt-oss), whose answers have several messages. */
#define END_OF_MESSAGE "<|end|>"
#define END_OF_ANSWER "<|return|>"
static const char *const end_texts[] = {
    "<|eot_id|>",      "<|im_end|>", END_OF_MESSAGE, "<end_of_turn>", "<|endoftext|>",
    "<|end_of_text|>", "<|eom_id|>", "<EOT>",        END_OF_ANSWER,   "<|call|>",
};

struct build {
    const struct td_gguf *g;
    json_t *out;
    char arch[32];
    const struct td_family *family;
    struct td_err *err;
};

static const char *key_of(const struct build *b, const char *key, char buf[KEY_BYTES])
{
    snprintf(buf, KEY_BYTES, "%s.%s", b->arch, key);
    return buf;
}

static td_status set(const struct build *b, const char *field, json_t *value)
{
    return json_object_set_new(b->out, field, value) ? td_fail(b->err, TD_ERR_NOMEM, "no memory")
                                                     : TD_OK;
}

static bool has_tensor(const struct td_gguf *g, const char *name)
{
    for (size_t i = 0; i < g->n_tensors; i++)
        if (strcmp(g->tensors[i].name, name) == 0) return true;
    return false;
}

static bool is_in(const char *const *list, struct td_gguf_text key)
{
    for (; list && *list; list++)
        if (strlen(*list) == key.n && memcmp(*list, key.bytes, key.n) == 0) return true;
    return false;
}

static bool honours(const struct td_family *family, const char *field)
{
    return is_in(family->fields, (struct td_gguf_text){field, strlen(field)});
}

static td_status refuse_unknown(const struct build *b)
{
    size_t n = strlen(b->arch);
    for (size_t i = 0; i < b->g->n_values; i++) {
        const struct td_gguf_value *v = &b->g->values[i];
        if (v->key.n <= n || memcmp(v->key.bytes, b->arch, n) != 0 || v->key.bytes[n] != '.')
            continue;
        struct td_gguf_text rest = {v->key.bytes + n + 1, v->key.n - n - 1};
        bool known = is_in(b->family->gguf_keys, rest);
        for (size_t k = 0; k < sizeof known_keys / sizeof *known_keys; k++)
            known |= strlen(known_keys[k]) == rest.n && !memcmp(known_keys[k], rest.bytes, rest.n);
        char key[KEY_BYTES];
        snprintf(key, sizeof key, "%.*s", (int)(v->key.n < 100 ? v->key.n : 100), v->key.bytes);
        int64_t number;
        double real;
        bool flag;
        if (known || (!td_gguf_i64(b->g, key, 0, 0, &number, NULL, NULL)) ||
            (!td_gguf_f64(b->g, key, 0, 0, &real, NULL, NULL)) ||
            (!td_gguf_bool(b->g, key, &flag, NULL, NULL) && !flag))
            continue;
        return td_fail(b->err, TD_ERR_UNSUPPORTED,
                       "unknown key %s: refused, because it may change the result", key);
    }
    return TD_OK;
}

static td_status read_sizes(const struct build *b)
{
    char key[KEY_BYTES];
    td_status s;
    int64_t n, value_length;
    bool present;
    for (size_t i = 0; i < sizeof integers / sizeof *integers; i++) {
        if ((s = td_gguf_i64(b->g, key_of(b, integers[i].key, key), 1, INT32_MAX, &n, &present,
                             b->err)) ||
            (present && (s = set(b, integers[i].field, json_integer(n)))))
            return s;
    }
    int64_t heads = json_integer_value(json_object_get(b->out, "num_attention_heads")),
            hidden = json_integer_value(json_object_get(b->out, "hidden_size"));
    if (heads && !json_object_get(b->out, "num_key_value_heads") &&
        (s = set(b, "num_key_value_heads", json_integer(heads))))
        return s;
    if (heads && !json_object_get(b->out, "head_dim") &&
        (s = set(b, "head_dim", json_integer(hidden / heads))))
        return s;
    int64_t head_dim = json_integer_value(json_object_get(b->out, "head_dim"));
    value_length = head_dim;
    if ((s = td_gguf_i64(b->g, key_of(b, "attention.value_length", key), head_dim, head_dim,
                         &value_length, NULL, b->err)))
        return s;
    bool may_be_part = b->family->partial_rotary > 0;
    n = head_dim;
    s = td_gguf_i64(b->g, key_of(b, "rope.dimension_count", key), may_be_part ? 2 : head_dim,
                    head_dim, &n, NULL, b->err);
    if (s || n == head_dim) return s;
    /* the half is for the division's rounding: the product with head_dim is cut to whole dims */
    return set(b, "partial_rotary_factor", json_real(((double)n + 0.5) / (double)head_dim));
}

/* Settings that only some families have, each a key and the field that it becomes. */
static td_status read_own_keys(const struct build *b)
{
    static const struct {
        const char *key, *field;
        double min, max;
    } reals[] = {{"attn_logit_softcapping", "attn_logit_softcapping", 1e-3, 1e6},
                 {"final_logit_softcapping", "final_logit_softcapping", 1e-3, 1e6},
                 {"rope.freq_base_swa", "rope_local_base_freq", 1, 1e12}};
    char key[KEY_BYTES];
    td_status s;
    bool present;
    int64_t n;
    double v;
    for (size_t i = 0; i < sizeof reals / sizeof *reals; i++) {
        struct td_gguf_text name = {reals[i].key, strlen(reals[i].key)};
        if (!is_in(b->family->gguf_keys, name)) continue;
        if ((s = td_gguf_f64(b->g, key_of(b, reals[i].key, key), reals[i].min, reals[i].max, &v,
                             &present, b->err)) ||
            (present && (s = set(b, reals[i].field, json_real(v)))))
            return s;
    }
    if (!honours(b->family, "sliding_window") || !b->family->gguf_keys) return TD_OK;
    /* 0 is how files say that there is none */
    if ((s = td_gguf_i64(b->g, key_of(b, "attention.sliding_window", key), 0, INT32_MAX, &n,
                         &present, b->err)) ||
        (present && (s = set(b, "sliding_window", n ? json_integer(n) : json_null()))))
        return s;
    if ((s = td_gguf_i64(b->g, key_of(b, "attention.sliding_window_pattern", key), 1, TD_LAYERS_MAX,
                         &n, &present, b->err)))
        return s;
    return present ? set(b, "sliding_window_pattern", json_integer(n)) : TD_OK;
}

/* Readers of these files divide the weights of a row's experts by their sum, and no key says
 * otherwise. A family without a field for it has experts of the size of an MLP. */
static td_status read_experts(const struct build *b)
{
    char key[KEY_BYTES];
    int64_t n = 0, used = 0, wide;
    bool is_mlp = !honours(b->family, "moe_intermediate_size"), present;
    td_status s;
    if (!b->family->gguf_experts) return TD_OK;
    wide = json_integer_value(json_object_get(b->out, "intermediate_size"));
    int64_t least = is_mlp ? wide : 1, most = is_mlp ? wide : INT32_MAX;
    if ((s = td_gguf_i64(b->g, key_of(b, "expert_count", key), 1, INT32_MAX, &n, NULL, b->err)) ||
        (s = td_gguf_i64(b->g, key_of(b, "expert_used_count", key), 1, n, &used, &present, b->err)))
        return s;
    if (!present) return td_fail(b->err, TD_ERR_INVALID, "%s is missing", key);
    if ((s = td_gguf_i64(b->g, key_of(b, "expert_feed_forward_length", key), least, most, &wide,
                         &present, b->err)) ||
        (s = set(b, "num_local_experts", json_integer(n))) ||
        (s = set(b, "num_experts_per_tok", json_integer(used))) || is_mlp)
        return s;
    if (!present) return td_fail(b->err, TD_ERR_INVALID, "%s is missing", key);
    s = set(b, "moe_intermediate_size", json_integer(wide));
    return s ? s : set(b, "norm_topk_prob", json_true());
}

static td_status read_vocab_size(const struct build *b)
{
    char key[KEY_BYTES];
    for (size_t i = 0; i < b->g->n_tensors; i++) {
        const struct td_gguf_tensor *t = &b->g->tensors[i];
        if (strcmp(t->name, "token_embd.weight") != 0) continue;
        int64_t n = t->ne[1];
        td_status s = td_gguf_i64(b->g, key_of(b, "vocab_size", key), n, n, &n, NULL, b->err);
        return s ? s : set(b, "vocab_size", json_integer(n));
    }
    return td_fail(b->err, TD_ERR_CORRUPT, "tensor token_embd.weight is missing");
}

/* A tensor of factors for longrope, as a list. */
static td_status read_factors(const struct build *b, const char *name, json_t **ret_list)
{
    const struct td_gguf_tensor *t = NULL;
    for (size_t i = 0; i < b->g->n_tensors && !t; i++)
        if (strcmp(b->g->tensors[i].name, name) == 0) t = &b->g->tensors[i];
    if (!t) return td_fail(b->err, TD_ERR_CORRUPT, "tensor %s is missing", name);
    if (t->type != 0 || t->n_dims != 1 || t->ne[0] > TD_ROPE_PAIRS_MAX)
        return td_fail(b->err, TD_ERR_CORRUPT,
                       "tensor %s has %d dimensions, the first of %lld, must be F32 with one of at "
                       "most %d",
                       name, t->n_dims, (long long)t->ne[0], TD_ROPE_PAIRS_MAX);
    json_t *list = json_array();
    for (int64_t i = 0; i < t->ne[0]; i++) {
        float f;
        memcpy(&f, t->data + (size_t)i * sizeof f, sizeof f);
        if (json_array_append_new(list, json_real(isfinite(f) ? (double)f : 0))) {
            json_decref(list);
            return td_fail(b->err, TD_ERR_NOMEM, "no memory");
        }
    }
    *ret_list = list;
    return TD_OK;
}

/* Numbers of yarn and longrope, into the object of the rotation. */
static td_status read_stretch(const struct build *b, json_t *rope)
{
    static const struct {
        const char *key, *field;
    } rows[] = {{"rope.scaling.factor", "factor"},
                {"rope.scaling.yarn_beta_fast", "beta_fast"},
                {"rope.scaling.yarn_beta_slow", "beta_slow"},
                {"rope.scaling.attn_factor", "attention_factor"}};
    char key[KEY_BYTES];
    bool present;
    int64_t n;
    double v;
    td_status s = td_gguf_i64(b->g, key_of(b, "rope.scaling.original_context_length", key), 1,
                              INT32_MAX, &n, &present, b->err);
    if (s) return s;
    if (present && json_object_set_new(rope, "original_max_position_embeddings", json_integer(n)))
        return td_fail(b->err, TD_ERR_NOMEM, "no memory");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        if ((s = td_gguf_f64(b->g, key_of(b, rows[i].key, key), 0, 1e6, &v, &present, b->err)))
            return s;
        if (present && json_object_set_new(rope, rows[i].field, json_real(v)))
            return td_fail(b->err, TD_ERR_NOMEM, "no memory");
    }
    return TD_OK;
}

static td_status read_yarn(const struct build *b)
{
    json_t *rope = json_pack("{s:s}", "rope_type", "yarn");
    td_status s = read_stretch(b, rope), kept = set(b, "rope_scaling", rope);
    return s ? s : kept;
}

static td_status read_longrope(const struct build *b)
{
    json_t *rope = json_pack("{s:s}", "rope_type", "longrope"), *list;
    td_status s = read_stretch(b, rope), kept = set(b, "rope_scaling", rope);
    if (s || kept) return s ? s : kept;
    if ((s = read_factors(b, TD_GGUF_SHORT_FACTORS, &list))) return s;
    if (json_object_set_new(rope, "short_factor", list))
        return td_fail(b->err, TD_ERR_NOMEM, "no memory");
    if ((s = read_factors(b, TD_GGUF_LONG_FACTORS, &list))) return s;
    return json_object_set_new(rope, "long_factor", list)
               ? td_fail(b->err, TD_ERR_NOMEM, "no memory")
               : TD_OK;
}

/* A factor alone means linear scaling. The scaling of Llama 3 is in tensor rope_freqs, that of
 * longrope in two tensors, which a file need not name. */
static td_status read_rope(const struct build *b)
{
    char key[KEY_BYTES];
    struct td_gguf_text type;
    char shown[TD_GGUF_SHOWN];
    double base = 10000, factor = 1, linear = 1;
    td_status s;
    if ((s = td_gguf_f64(b->g, key_of(b, "rope.freq_base", key), 1, 1e12, &base, NULL, b->err)) ||
        (s = set(b, "rope_theta", json_real(base))) ||
        (s = td_gguf_str(b->g, key_of(b, "rope.scaling.type", key), &type, b->err)))
        return s;
    if (td_gguf_text_is(type, "longrope") || has_tensor(b->g, TD_GGUF_LONG_FACTORS))
        return read_longrope(b);
    if (td_gguf_text_is(type, "yarn")) return read_yarn(b);
    if (type.bytes && !td_gguf_text_is(type, "none") && !td_gguf_text_is(type, "linear"))
        return td_fail(b->err, TD_ERR_UNSUPPORTED,
                       "%s.rope.scaling.type is %s, must be none, linear, yarn or longrope",
                       b->arch, td_gguf_show(type, shown));
    if ((s = td_gguf_f64(b->g, key_of(b, "rope.scaling.factor", key), 0, 1e6, &factor, NULL,
                         b->err)) ||
        (s = td_gguf_f64(b->g, key_of(b, "rope.scale_linear", key), 0, 1e6, &linear, NULL, b->err)))
        return s;
    if (factor == 0 || factor == 1) factor = linear;
    if (factor == 0 || factor == 1 || td_gguf_text_is(type, "none")) return TD_OK;
    return set(b, "rope_scaling", json_pack("{s:s,s:f}", "rope_type", "linear", "factor", factor));
}

static td_status read_eps(const struct build *b)
{
    char key[KEY_BYTES];
    double eps = 0;
    bool present;
    td_status s = td_gguf_f64(b->g, key_of(b, "attention.layer_norm_rms_epsilon", key), 0, 1, &eps,
                              &present, b->err);
    if (s) return s;
    if (!present) return td_fail(b->err, TD_ERR_INVALID, "%s is missing", key);
    return set(b, "rms_norm_eps", json_real(eps));
}

/* Appends the ids of control tokens that end a generation by their text. */
static td_status add_ends_by_text(const struct build *b, json_t *eos)
{
    const struct td_gguf_value *tokens, *kinds;
    td_status s = td_gguf_array(b->g, "tokenizer.ggml.tokens", TD_GGUF_STRING, &tokens, b->err);
    if (!s) s = td_gguf_array(b->g, "tokenizer.ggml.token_type", TD_GGUF_I32, &kinds, b->err);
    if (s || !tokens || !kinds) return s;
    const uint8_t *at = NULL;
    bool has_messages = false;
    for (uint64_t i = 0; i < tokens->n && !has_messages; i++)
        has_messages = td_gguf_text_is(td_gguf_next(tokens, &at), END_OF_ANSWER);
    at = NULL;
    for (uint64_t i = 0; i < tokens->n; i++) {
        struct td_gguf_text t = td_gguf_next(tokens, &at);
        if (has_messages && td_gguf_text_is(t, END_OF_MESSAGE)) continue;
        if (json_array_size(eos) > TD_MAX_EOS + 3)
            return td_fail(b->err, TD_ERR_LIMIT, "more than %d tokens end a generation",
                           TD_MAX_EOS);
        if (i >= kinds->n || td_gguf_i32_at(kinds, i) != 3) continue;
        for (size_t k = 0; k < sizeof end_texts / sizeof *end_texts; k++)
            if (td_gguf_text_is(t, end_texts[k]) &&
                json_array_append_new(eos, json_integer((json_int_t)i)))
                return td_fail(b->err, TD_ERR_NOMEM, "no memory");
    }
    return TD_OK;
}

/* Those of `tandem quantize`, of a model that has more than GGUF has keys for. */
static td_status add_own_ends(const struct build *b, json_t *eos)
{
    const struct td_gguf_value *ids;
    td_status s = td_gguf_array(b->g, TD_GGUF_EOS_IDS, TD_GGUF_I32, &ids, b->err);
    if (s || !ids) return s;
    if (ids->n > TD_MAX_EOS)
        return td_fail(b->err, TD_ERR_LIMIT, "%s has %llu ids, limit %d", TD_GGUF_EOS_IDS,
                       (unsigned long long)ids->n, TD_MAX_EOS);
    for (uint64_t i = 0; i < ids->n; i++)
        if (json_array_append_new(eos, json_integer(td_gguf_i32_at(ids, i))))
            return td_fail(b->err, TD_ERR_NOMEM, "no memory");
    return TD_OK;
}

/* An id twice in the list of ends is once too often: the list is short. */
static void drop_repeated(json_t *list)
{
    for (size_t i = json_array_size(list); i-- > 0;)
        for (size_t k = 0; k < i; k++)
            if (json_equal(json_array_get(list, i), json_array_get(list, k))) {
                json_array_remove(list, i);
                break;
            }
}

static td_status read_special_ids(const struct build *b)
{
    static const char *const ends[] = {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
                                       "tokenizer.ggml.eom_token_id"};
    struct td_gguf_text model;
    bool present;
    td_status s = td_gguf_str(b->g, "tokenizer.ggml.model", &model, b->err);
    if (s) return s;
    /* what SentencePiece files mean that leave the ids out */
    int64_t bos = td_gguf_text_is(model, "llama") ? 1 : -1, id = bos < 0 ? -1 : 2;
    if ((s = td_gguf_i64(b->g, "tokenizer.ggml.bos_token_id", -1, INT32_MAX, &bos, NULL, b->err)) ||
        (s = set(b, "bos_token_id", json_integer(bos))))
        return s;
    json_t *eos = json_array();
    if (!eos) return td_fail(b->err, TD_ERR_NOMEM, "no memory");
    for (size_t i = 0; i < sizeof ends / sizeof *ends && !s; i++, id = -1) {
        s = td_gguf_i64(b->g, ends[i], -1, INT32_MAX, &id, &present, b->err);
        if (!s && id >= 0) json_array_append_new(eos, json_integer(id));
    }
    if (!s) s = add_own_ends(b, eos);
    drop_repeated(eos);
    if (!s) s = add_ends_by_text(b, eos);
    drop_repeated(eos);
    td_status kept = set(b, "eos_token_id", eos);
    return s ? s : kept;
}

/* The type that "--dtype auto" means: that of the matrices; bf16 beside blocks. */
static const char *dtype_name(const struct td_gguf *g)
{
    for (size_t i = 0; i < g->n_tensors; i++)
        if (strcmp(g->tensors[i].name, "blk.0.attn_q.weight") == 0 ||
            strcmp(g->tensors[i].name, "blk.0.attn_qkv.weight") == 0)
            return g->tensors[i].type == 0   ? "float32"
                   : g->tensors[i].type == 1 ? "float16"
                                             : "bfloat16";
    return "bfloat16";
}

/* Whether family i is the first that stores its models under this name. */
static bool is_first_of_name(int i)
{
    bool first = td_families[i]->gguf != NULL;
    for (int k = 0; k < i && first; k++)
        first = !td_families[k]->gguf || strcmp(td_families[k]->gguf, td_families[i]->gguf) != 0;
    return first;
}

static td_status refuse_arch(const struct build *b, struct td_gguf_text arch)
{
    char shown[TD_GGUF_SHOWN], names[160] = "";
    int last = TD_N_FAMILIES - 1;
    while (!is_first_of_name(last)) last--;
    for (int i = 0, n = 0; i <= last && (size_t)n < sizeof names; i++)
        if (is_first_of_name(i))
            n += snprintf(names + n, sizeof names - (size_t)n, "%s%s",
                          n == 0      ? ""
                          : i == last ? " or "
                                      : ", ",
                          td_families[i]->gguf);
    return td_fail(b->err, TD_ERR_UNSUPPORTED, "general.architecture is %s, must be %s",
                   td_gguf_show(arch, shown), names);
}

/* Which of the families with this architecture: that with experts, or the first without. */
static td_status read_family(struct build *b)
{
    char key[KEY_BYTES];
    int64_t n = 0;
    td_status s = td_gguf_i64(b->g, key_of(b, "expert_count", key), 0, INT32_MAX, &n, NULL, b->err);
    if (s) return s;
    for (int i = 0; i < TD_N_FAMILIES; i++)
        if (td_families[i]->gguf && strcmp(td_families[i]->gguf, b->arch) == 0 &&
            td_families[i]->gguf_experts == (n > 0)) {
            b->family = td_families[i];
            return set(b, "model_type", json_string(b->family->model_type));
        }
    return td_fail(b->err, TD_ERR_UNSUPPORTED, "%s is %lld, must be %s", key, (long long)n,
                   n > 0 ? "0 in this architecture" : "1 or more");
}

static td_status read_arch(struct build *b)
{
    struct td_gguf_text arch, type;
    char shown[TD_GGUF_SHOWN];
    td_status s = td_gguf_str(b->g, "general.architecture", &arch, b->err);
    if (!s) s = td_gguf_str(b->g, "general.type", &type, b->err);
    if (s) return s;
    if (type.bytes && !td_gguf_text_is(type, "model"))
        return td_fail(b->err, TD_ERR_UNSUPPORTED, "general.type is %s, must be model",
                       td_gguf_show(type, shown));
    for (int i = 0; i < TD_N_FAMILIES && arch.bytes; i++)
        if (is_first_of_name(i) && td_gguf_text_is(arch, td_families[i]->gguf)) {
            snprintf(b->arch, sizeof b->arch, "%s", td_families[i]->gguf);
            return read_family(b);
        }
    return refuse_arch(b, arch);
}

static td_status build(struct build *b)
{
    td_status s;
    if ((s = read_arch(b)) || (s = refuse_unknown(b)) || (s = read_sizes(b)) ||
        (s = read_own_keys(b)) || (s = read_experts(b)) || (s = read_vocab_size(b)) ||
        (s = read_eps(b)) || (s = read_rope(b)) || (s = read_special_ids(b)))
        return s;
    if ((s = set(b, "torch_dtype", json_string(dtype_name(b->g)))) ||
        (s = set(b, "tie_word_embeddings", json_boolean(!has_tensor(b->g, "output.weight")))))
        return s;
    if (b->family->gguf_fields && !b->family->gguf_fields(b->out))
        return td_fail(b->err, TD_ERR_NOMEM, "no memory");
    return strcmp(b->arch, "qwen2") != 0
               ? set(b, "attention_bias", json_boolean(has_tensor(b->g, "blk.0.attn_output.bias")))
               : TD_OK;
}

td_status td_gguf_config(const struct td_gguf *g, const char *what,
                         struct td_model_config *ret_config, struct td_err *err)
{
    struct build b = {.g = g, .out = json_object(), .err = err};
    if (!b.out) return td_fail(err, TD_ERR_NOMEM, "%s: no memory", what);
    td_status s = build(&b);
    if (!s) s = td_model_config_read(b.out, "its keys, as config.json", ret_config, err);
    if (!s) ret_config->experts.gate_up_apart = ret_config->experts.n > 0;
    json_decref(b.out);
    return s && err ? td_err_prefix(err, "%s", what) : s;
}
