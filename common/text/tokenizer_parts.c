/* tokenizer_parts.c - reads tokenizer.json's normalizer, pre_tokenizer, post_processor and decoder
 * into arrays of operations.
 *
 * Each key of a component is honoured or refused, with three exceptions that do not change ids:
 * trim_offsets (it moves offsets, which we do not return), Metaspace's str_rep (a copy of
 * replacement) and type_id. */
#include <stdlib.h>
#include <string.h>

#include "common/base/json.h"
#include "common/text/tokenizer_internal.h"

#define NEST_MAX 8

td_status td_tok_only_keys(const json_t *obj, const char *what, const char *known,
                           struct td_err *err)
{
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)obj, key, value)
    {
        size_t n = strlen(key);
        const char *at = known;
        while (n && (at = strstr(at, key)) &&
               !((at == known || at[-1] == ' ') && (at[n] == ' ' || !at[n])))
            at++;
        if (!n || !at)
            return td_fail(err, TD_ERR_UNSUPPORTED, "%s: unknown field \"%.60s\"", what, key);
    }
    return TD_OK;
}

/* Reads the object's "type"; checks that it is an object with a string there. */
static td_status type_of(const json_t *json, const char *what, const char **ret_type,
                         struct td_err *err)
{
    if (!json_is_object(json))
        return td_fail(err, TD_ERR_INVALID, "%s: must be an object or null", what);
    bool present;
    td_status s = td_json_str(json, what, "type", ret_type, &present, err);
    return s || present ? s : td_fail(err, TD_ERR_INVALID, "%s: type is missing", what);
}

static td_status need_str(const json_t *json, const char *what, const char *key,
                          const char **ret_text, struct td_err *err)
{
    bool present;
    td_status s = td_json_str(json, what, key, ret_text, &present, err);
    return s || present ? s : td_fail(err, TD_ERR_INVALID, "%s: %s is missing", what, key);
}

static td_status one_char(const json_t *json, const char *what, const char *key, uint32_t *ret_cp,
                          struct td_err *err)
{
    const char *text;
    td_status s = need_str(json, what, key, &text, err);
    if (s) return s;
    size_t n = strlen(text);
    if (!n || td_utf8_next(text, n, ret_cp) != (int)n)
        return td_fail(err, TD_ERR_INVALID, "%s: %s is \"%.40s\", must be one character", what, key,
                       text);
    return TD_OK;
}

static td_status copy_str(const char *text, const char *what, char **ret_copy, size_t *ret_n,
                          struct td_err *err)
{
    *ret_copy = strdup(text);
    *ret_n = strlen(text);
    return *ret_copy ? TD_OK : td_fail(err, TD_ERR_NOMEM, "%s: no memory", what);
}

/* {"String": "..."} or {"Regex": "..."}, or a bare string (older files). */
static td_status parse_pattern(const json_t *json, const char *what,
                               struct td_tok_pattern *ret_pattern, struct td_err *err)
{
    const json_t *pattern = json_object_get(json, "pattern");
    if (json_is_string(pattern))
        return td_tok_pattern_literal(json_string_value(pattern), json_string_length(pattern), what,
                                      ret_pattern, err);
    const json_t *string = json_object_get(pattern, "String"),
                 *regex = json_object_get(pattern, "Regex");
    if (json_object_size(pattern) != 1 || !(json_is_string(string) || json_is_string(regex))) {
        return td_fail(err, TD_ERR_INVALID,
                       "%s: pattern must be {\"String\": text} or {\"Regex\": text}", what);
    }
    if (string)
        return td_tok_pattern_literal(json_string_value(string), json_string_length(string), what,
                                      ret_pattern, err);
    return td_tok_pattern_regex(json_string_value(regex), json_string_length(regex), what,
                                ret_pattern, err);
}

/* The array of a Sequence under `key`. */
static td_status sequence(const json_t *json, const char *what, const char *key, int depth,
                          const json_t **ret_array, struct td_err *err)
{
    char known[40];
    snprintf(known, sizeof known, "type %s", key);
    td_status s = td_tok_only_keys(json, what, known, err);
    if (s) return s;
    if (depth >= NEST_MAX)
        return td_fail(err, TD_ERR_LIMIT, "%s: Sequence nested deeper than %d", what, NEST_MAX);
    *ret_array = json_object_get(json, key);
    return json_is_array(*ret_array)
               ? TD_OK
               : td_fail(err, TD_ERR_INVALID, "%s: Sequence: %s must be an array", what, key);
}

static td_status too_many(const char *what, struct td_err *err)
{
    return td_fail(err, TD_ERR_LIMIT, "%s: more than %d operations", what, TD_TOK_OPS_MAX);
}

static td_status normalizer(struct td_tokenizer *t, const json_t *json, int depth,
                            struct td_err *err)
{
    const char *what = "normalizer", *type, *text;
    td_status s = type_of(json, what, &type, err);
    if (s) return s;
    if (!strcmp(type, "Sequence")) {
        const json_t *array;
        s = sequence(json, what, "normalizers", depth, &array, err);
        for (size_t i = 0; !s && i < json_array_size(array); i++)
            s = normalizer(t, json_array_get(array, i), depth + 1, err);
        return s;
    }
    if (t->n_norm == TD_TOK_OPS_MAX) return too_many(what, err);
    /* counted at once, so that td_tokenizer_free frees a half-built one */
    struct td_tok_norm_op *op = &t->norm[t->n_norm++];
    if (!strcmp(type, "Prepend")) {
        op->kind = TD_NORM_PREPEND;
        s = td_tok_only_keys(json, "normalizer Prepend", "type prepend", err);
        if (!s) s = need_str(json, "normalizer Prepend", "prepend", &text, err);
        return s ? s : copy_str(text, what, &op->content, &op->n_content, err);
    }
    if (!strcmp(type, "Replace")) {
        op->kind = TD_NORM_REPLACE;
        s = td_tok_only_keys(json, "normalizer Replace", "type pattern content", err);
        if (!s) s = need_str(json, "normalizer Replace", "content", &text, err);
        if (!s) s = copy_str(text, what, &op->content, &op->n_content, err);
        return s ? s : parse_pattern(json, "normalizer Replace", &op->pattern, err);
    }
    if (!strcmp(type, "NFC") || !strcmp(type, "NFD") || !strcmp(type, "NFKC") ||
        !strcmp(type, "NFKD")) {
        op->kind = TD_NORM_UNICODE;
        op->compose = type[strlen(type) - 1] == 'C';
        op->compat = type[2] == 'K';
        return td_tok_only_keys(json, what, "type", err);
    }
    if (!strcmp(type, "Strip")) {
        op->kind = TD_NORM_STRIP;
        op->left = op->right = true;
        s = td_tok_only_keys(json, "normalizer Strip", "type strip_left strip_right", err);
        if (!s) s = td_json_bool(json, "normalizer Strip", "strip_left", &op->left, NULL, err);
        return s ? s : td_json_bool(json, "normalizer Strip", "strip_right", &op->right, NULL, err);
    }
    if (!strcmp(type, "Lowercase") || !strcmp(type, "ByteLevel")) {
        op->kind = type[0] == 'L' ? TD_NORM_LOWERCASE : TD_NORM_BYTE_LEVEL;
        return td_tok_only_keys(json, what, "type", err);
    }
    return td_fail(err, TD_ERR_UNSUPPORTED, "normalizer: type \"%.60s\" is not supported", type);
}

td_status td_tok_parse_normalizer(struct td_tokenizer *t, const json_t *json, struct td_err *err)
{
    return json && !json_is_null(json) ? normalizer(t, json, 0, err) : TD_OK;
}

static td_status parse_behavior(const json_t *json, const char *what,
                                enum td_tok_behavior *ret_behavior, struct td_err *err)
{
    static const char *const names[] = {"Removed", "Isolated", "MergedWithPrevious",
                                        "MergedWithNext", "Contiguous"};
    const char *text;
    td_status s = need_str(json, what, "behavior", &text, err);
    if (s) return s;
    for (int i = 0; i < 5; i++) {
        if (!strcmp(text, names[i])) {
            *ret_behavior = (enum td_tok_behavior)i; /* names[] is in the order of the enum */
            return TD_OK;
        }
    }
    return td_fail(err, TD_ERR_UNSUPPORTED, "%s: behavior \"%.60s\" is not supported", what, text);
}

/* Reads replacement, add_prefix_space (older files) and prepend_scheme, which must not contradict
 * each other. */
static td_status parse_metaspace(const json_t *json, const char *what, uint32_t *ret_cp,
                                 enum td_tok_prepend *ret_prepend, bool *ret_split,
                                 struct td_err *err)
{
    bool add_prefix_space = true, present;
    const char *scheme = NULL;
    td_status s = td_tok_only_keys(
        json, what, "type replacement add_prefix_space prepend_scheme split str_rep", err);
    if (!s) s = one_char(json, what, "replacement", ret_cp, err);
    if (!s) s = td_json_bool(json, what, "split", ret_split, NULL, err);
    if (!s) s = td_json_bool(json, what, "add_prefix_space", &add_prefix_space, NULL, err);
    if (!s) s = td_json_str(json, what, "prepend_scheme", &scheme, &present, err);
    if (s) return s;
    if (!present) scheme = add_prefix_space ? "always" : "never";
    if (!strcmp(scheme, "always"))
        *ret_prepend = TD_PREPEND_ALWAYS;
    else if (!strcmp(scheme, "first"))
        *ret_prepend = TD_PREPEND_FIRST;
    else if (!strcmp(scheme, "never"))
        *ret_prepend = TD_PREPEND_NEVER;
    else
        return td_fail(err, TD_ERR_UNSUPPORTED, "%s: prepend_scheme \"%.60s\" is not supported",
                       what, scheme);
    if (!add_prefix_space && *ret_prepend != TD_PREPEND_NEVER) {
        return td_fail(err, TD_ERR_INVALID,
                       "%s: add_prefix_space false contradicts prepend_scheme \"%s\"", what,
                       scheme);
    }
    return TD_OK;
}

/* A pre-tokenizer that is a split by a fixed expression. */
static td_status fixed_split(struct td_tok_pre_op *op, const char *regex,
                             enum td_tok_behavior behavior, bool invert, struct td_err *err)
{
    op->kind = TD_PRE_SPLIT;
    op->behavior = behavior;
    op->invert = invert;
    return td_tok_pattern_regex(regex, strlen(regex), "pre_tokenizer", &op->pattern, err);
}

/* The types that split by a fixed expression; refuses any other. */
static td_status fixed_pre_tokenizer(struct td_tok_pre_op *op, const json_t *json, const char *type,
                                     struct td_err *err)
{
    td_status s;
    if (!strcmp(type, "Digits")) {
        bool individual = false;
        s = td_tok_only_keys(json, "pre_tokenizer Digits", "type individual_digits", err);
        if (!s)
            s = td_json_bool(json, "pre_tokenizer Digits", "individual_digits", &individual, NULL,
                             err);
        return s ? s
                 : fixed_split(op, "\\p{N}", individual ? TD_SPLIT_ISOLATED : TD_SPLIT_CONTIGUOUS,
                               false, err);
    }
    if (!strcmp(type, "Punctuation")) {
        enum td_tok_behavior behavior = TD_SPLIT_ISOLATED;
        s = td_tok_only_keys(json, "pre_tokenizer Punctuation", "type behavior", err);
        if (!s && json_object_get(json, "behavior"))
            s = parse_behavior(json, "pre_tokenizer Punctuation", &behavior, err);
        return s ? s
                 : fixed_split(op, "[\\x21-\\x2f\\x3a-\\x40\\x5b-\\x60\\x7b-\\x7e\\p{P}]", behavior,
                               false, err);
    }
    if (!strcmp(type, "Whitespace") || !strcmp(type, "WhitespaceSplit")) {
        s = td_tok_only_keys(json, "pre_tokenizer", "type", err);
        if (s) return s;
        if (type[10]) return fixed_split(op, "\\s", TD_SPLIT_REMOVED, false, err);
        /* because Rust's \w includes the joiners */
        return fixed_split(op, "[\\w\\x{200c}\\x{200d}]+|[^\\w\\s\\x{200c}\\x{200d}]+",
                           TD_SPLIT_REMOVED, true, err);
    }
    return td_fail(err, TD_ERR_UNSUPPORTED, "pre_tokenizer: type \"%.60s\" is not supported", type);
}

static td_status pre_tokenizer(struct td_tokenizer *t, const json_t *json, int depth,
                               struct td_err *err)
{
    const char *what = "pre_tokenizer", *type;
    td_status s = type_of(json, what, &type, err);
    if (s) return s;
    if (!strcmp(type, "Sequence")) {
        const json_t *array;
        s = sequence(json, what, "pretokenizers", depth, &array, err);
        for (size_t i = 0; !s && i < json_array_size(array); i++)
            s = pre_tokenizer(t, json_array_get(array, i), depth + 1, err);
        return s;
    }
    if (t->n_pre == TD_TOK_OPS_MAX) return too_many(what, err);
    struct td_tok_pre_op *op = &t->pre[t->n_pre++];
    if (!strcmp(type, "ByteLevel")) {
        what = "pre_tokenizer ByteLevel";
        bool trim_offsets;
        op->kind = TD_PRE_BYTE_LEVEL;
        op->behavior = TD_SPLIT_ISOLATED;
        op->split = op->add_prefix_space = true;
        s = td_tok_only_keys(json, what, "type add_prefix_space trim_offsets use_regex", err);
        if (!s) s = td_json_bool(json, what, "add_prefix_space", &op->add_prefix_space, NULL, err);
        if (!s) s = td_json_bool(json, what, "trim_offsets", &trim_offsets, NULL, err);
        if (!s) s = td_json_bool(json, what, "use_regex", &op->split, NULL, err);
        return s || !op->split ? s
                               : td_tok_pattern_regex(TD_TOK_REGEX_GPT2, strlen(TD_TOK_REGEX_GPT2),
                                                      what, &op->pattern, err);
    }
    if (!strcmp(type, "Split")) {
        what = "pre_tokenizer Split";
        op->kind = TD_PRE_SPLIT;
        s = td_tok_only_keys(json, what, "type pattern behavior invert", err);
        if (!s) s = parse_behavior(json, what, &op->behavior, err);
        if (!s) s = td_json_bool(json, what, "invert", &op->invert, NULL, err);
        return s ? s : parse_pattern(json, what, &op->pattern, err);
    }
    if (!strcmp(type, "Metaspace")) {
        uint32_t cp;
        op->kind = TD_PRE_METASPACE;
        op->behavior = TD_SPLIT_NEXT;
        op->split = true;
        s = parse_metaspace(json, "pre_tokenizer Metaspace", &cp, &op->prepend, &op->split, err);
        if (s) return s;
        op->n_replacement = td_utf8_put(cp, op->replacement);
        return td_tok_pattern_literal(op->replacement, (size_t)op->n_replacement, what,
                                      &op->pattern, err);
    }
    return fixed_pre_tokenizer(op, json, type, err);
}

td_status td_tok_parse_pre_tokenizer(struct td_tokenizer *t, const json_t *json, struct td_err *err)
{
    return json && !json_is_null(json) ? pre_tokenizer(t, json, 0, err) : TD_OK;
}

/* The ids that the template's special_tokens give to `name`, appended to ids[*n]. */
static td_status template_ids(const struct td_tokenizer *t, const json_t *json, const char *name,
                              int32_t *ids, size_t *n, struct td_err *err)
{
    const char *what = "post_processor TemplateProcessing";
    const json_t *list =
        json_object_get(json_object_get(json_object_get(json, "special_tokens"), name), "ids");
    if (!json_is_array(list))
        return td_fail(err, TD_ERR_INVALID, "%s: special_tokens has no ids for \"%.60s\"", what,
                       name);
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *id = json_array_get(list, i);
        json_int_t value = json_is_integer(id) ? json_integer_value(id) : -1;
        if (value < 0 || value >= TD_VOCAB_MAX ||
            !td_vocab_text(&t->bpe.vocab, (int32_t)value, NULL)) {
            return td_fail(err, TD_ERR_CORRUPT, "%s: id %lld of \"%.60s\" is not in the vocabulary",
                           what, (long long)value, name);
        }
        if (*n == TD_TOK_OPS_MAX) return too_many(what, err);
        ids[(*n)++] = (int32_t)value;
    }
    return TD_OK;
}

/* A later template is put around an earlier one. */
static td_status template(struct td_tokenizer *t, const json_t *json, struct td_err *err)
{
    const char *what = "post_processor TemplateProcessing";
    int32_t before[TD_TOK_OPS_MAX];
    size_t n_before = 0, n_text = 0;
    td_status s = td_tok_only_keys(json, what, "type single pair special_tokens", err);
    if (s) return s;
    const json_t *single = json_object_get(json, "single");
    if (!json_is_array(single))
        return td_fail(err, TD_ERR_INVALID, "%s: single must be an array", what);
    for (size_t i = 0; i < json_array_size(single); i++) {
        const json_t *item = json_array_get(single, i), *text = json_object_get(item, "Sequence"),
                     *special = json_object_get(item, "SpecialToken");
        const char *id = json_string_value(json_object_get(text ? text : special, "id"));
        if (json_object_size(item) != 1 || !id) {
            return td_fail(
                err, TD_ERR_INVALID,
                "%s: single[%zu] must be {\"Sequence\": {\"id\"}} or {\"SpecialToken\": {\"id\"}}",
                what, i);
        }
        if (text && (strcmp(id, "A") || n_text++))
            return td_fail(err, TD_ERR_INVALID,
                           "%s: single must have the sequence A once, and no other", what);
        if (text) continue;
        s = n_text ? template_ids(t, json, id, t->after, &t->n_after, err)
                   : template_ids(t, json, id, before, &n_before, err);
        if (s) return s;
    }
    if (!n_text) return td_fail(err, TD_ERR_INVALID, "%s: single has no sequence A", what);
    if (t->n_before + n_before > TD_TOK_OPS_MAX) return too_many(what, err);
    memmove(t->before + n_before, t->before, t->n_before * sizeof *before);
    memcpy(t->before, before, n_before * sizeof *before);
    t->n_before += n_before;
    return TD_OK;
}

static td_status post_processor(struct td_tokenizer *t, const json_t *json, int depth,
                                struct td_err *err)
{
    const char *what = "post_processor", *type;
    td_status s = type_of(json, what, &type, err);
    if (s) return s;
    if (!strcmp(type, "Sequence")) {
        const json_t *array;
        s = sequence(json, what, "processors", depth, &array, err);
        for (size_t i = 0; !s && i < json_array_size(array); i++)
            s = post_processor(t, json_array_get(array, i), depth + 1, err);
        return s;
    }
    if (!strcmp(type, "TemplateProcessing")) return template(t, json, err);
    if (!strcmp(type, "ByteLevel")) { /* moves offsets only */
        return td_tok_only_keys(json, "post_processor ByteLevel",
                                "type add_prefix_space trim_offsets use_regex", err);
    }
    return td_fail(err, TD_ERR_UNSUPPORTED, "post_processor: type \"%.60s\" is not supported",
                   type);
}

td_status td_tok_parse_post_processor(struct td_tokenizer *t, const json_t *json,
                                      struct td_err *err)
{
    return json && !json_is_null(json) ? post_processor(t, json, 0, err) : TD_OK;
}

static td_status decoder(struct td_tokenizer *t, const json_t *json, int depth, struct td_err *err)
{
    const char *what = "decoder", *type, *text;
    td_status s = type_of(json, what, &type, err);
    if (s) return s;
    if (!strcmp(type, "Sequence")) {
        const json_t *array;
        s = sequence(json, what, "decoders", depth, &array, err);
        for (size_t i = 0; !s && i < json_array_size(array); i++)
            s = decoder(t, json_array_get(array, i), depth + 1, err);
        return s;
    }
    if (t->n_dec == TD_TOK_OPS_MAX) return too_many(what, err);
    struct td_tok_dec_op *op = &t->dec[t->n_dec++];
    if (!strcmp(type, "ByteLevel")) {
        op->kind = TD_DEC_BYTE_LEVEL; /* its fields are those of the pre-tokenizer, without
                                         meaning here */
        return td_tok_only_keys(json, "decoder ByteLevel",
                                "type add_prefix_space trim_offsets use_regex", err);
    }
    if (!strcmp(type, "ByteFallback") || !strcmp(type, "Fuse")) {
        op->kind = type[0] == 'B' ? TD_DEC_BYTE_FALLBACK : TD_DEC_FUSE;
        return td_tok_only_keys(json, what, "type", err);
    }
    if (!strcmp(type, "Replace")) {
        op->kind = TD_DEC_REPLACE;
        s = td_tok_only_keys(json, "decoder Replace", "type pattern content", err);
        if (!s) s = need_str(json, "decoder Replace", "content", &text, err);
        if (!s) s = copy_str(text, what, &op->content, &op->n_content, err);
        return s ? s : parse_pattern(json, "decoder Replace", &op->pattern, err);
    }
    if (!strcmp(type, "Strip")) {
        int64_t start = 0, stop = 0;
        op->kind = TD_DEC_STRIP;
        s = td_tok_only_keys(json, "decoder Strip", "type content start stop", err);
        if (!s) s = one_char(json, "decoder Strip", "content", &op->cp, err);
        if (!s) s = td_json_i64(json, "decoder Strip", "start", 0, 1 << 20, &start, NULL, err);
        if (!s) s = td_json_i64(json, "decoder Strip", "stop", 0, 1 << 20, &stop, NULL, err);
        op->start = (uint32_t)start;
        op->stop = (uint32_t)stop;
        return s;
    }
    if (!strcmp(type, "Metaspace")) {
        enum td_tok_prepend prepend = TD_PREPEND_ALWAYS;
        bool split = true;
        op->kind = TD_DEC_METASPACE;
        s = parse_metaspace(json, "decoder Metaspace", &op->cp, &prepend, &split, err);
        op->drop_first = prepend != TD_PREPEND_NEVER;
        return s;
    }
    return td_fail(err, TD_ERR_UNSUPPORTED, "decoder: type \"%.60s\" is not supported", type);
}

td_status td_tok_parse_decoder(struct td_tokenizer *t, const json_t *json, struct td_err *err)
{
    if (json && !json_is_null(json)) return decoder(t, json, 0, err);
    t->dec[t->n_dec++] = (struct td_tok_dec_op){.kind = TD_DEC_JOIN};
    return TD_OK;
}
