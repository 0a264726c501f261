/* tokenizer.c - reads tokenizer.json into a struct td_tokenizer, and answers what needs no text.
 *
 * The order matters: vocabulary, then added tokens (their ids may be new), then the merges and the
 * components, and last the tries, which hold `normalized` tokens in the form in which the
 * normalizer leaves them. Every top-level field is honoured or refused, except two. `padding` is
 * accepted when it cannot change a single text (BatchLongest, no multiple). `truncation` is
 * accepted and not applied: transformers clears it before each call unless asked to truncate, and
 * files saved after training carry it; a server must never cut a prompt in silence (max_tokens
 * refuses instead). */
#include "common/text/tokenizer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "common/base/hash.h"
#include "common/base/json.h"
#include "common/base/mem.h"
#include "common/base/model_dir.h"
#include "common/text/tokenizer_gguf.h"
#include "common/text/tokenizer_internal.h"
#include "common/text/tokenizer_sentencepiece.h"
#include "common/text/tokenizer_unigram.h"

#define FILE_MAX_BYTES ((size_t)64 << 20)
#define ADDED_MAX_BYTES 4096 /* bytes of one added token's text */

/* Reads an id: a JSON integer in range. */
static td_status id_of(const json_t *json, const char *what, const char *text, int32_t *ret_id,
                       struct td_err *err)
{
    if (!json_is_integer(json))
        return td_fail(err, TD_ERR_INVALID, "%s: the id of \"%.60s\" is not an integer", what,
                       text);
    json_int_t id = json_integer_value(json);
    if (id < 0 || id >= TD_VOCAB_MAX) {
        return td_fail(err, TD_ERR_LIMIT, "%s: the id of \"%.60s\" is %lld, must be in 0..%d", what,
                       text, (long long)id, TD_VOCAB_MAX - 1);
    }
    *ret_id = (int32_t)id;
    return TD_OK;
}

static td_status parse_vocab(struct td_bpe *b, const json_t *vocab, struct td_err *err)
{
    const char *key;
    json_t *value;
    if (!json_is_object(vocab) || !json_object_size(vocab))
        return td_fail(err, TD_ERR_INVALID, "model: vocab must be an object of text: id");
    if (json_object_size(vocab) > TD_VOCAB_MAX) {
        return td_fail(err, TD_ERR_LIMIT, "model: vocab has %zu tokens, at most %d",
                       json_object_size(vocab), TD_VOCAB_MAX);
    }
    json_object_foreach((json_t *)vocab, key, value)
    {
        int32_t id;
        td_status s = id_of(value, "model: vocab", key, &id, err);
        if (!s)
            s = td_vocab_add(&b->vocab, &b->vocab.model, key, strlen(key), id, "model: vocab", err);
        if (s) return s;
    }
    return TD_OK;
}

static td_status find_part(const struct td_bpe *b, size_t at, const char *text, size_t n,
                           int32_t *ret_id, struct td_err *err)
{
    *ret_id = td_vocab_find(&b->vocab, &b->vocab.model, text, n);
    if (*ret_id >= 0) return TD_OK;
    return td_fail(err, TD_ERR_CORRUPT, "model: merges[%zu]: \"%.*s\" is not in the vocabulary", at,
                   n < 60 ? (int)n : 60, text);
}

/* "a b" or ["a", "b"]; `joined` is scratch for the text of the merged token. */
static td_status parse_merge(struct td_bpe *b, const json_t *merge, size_t at,
                             struct td_tok_buf *joined, struct td_err *err)
{
    const char *left, *right;
    size_t n_left, n_right;
    if (json_is_string(merge)) {
        left = json_string_value(merge);
        size_t n = json_string_length(merge);
        /* the first line of a merges.txt that was copied along */
        if (n >= 8 && !memcmp(left, "#version", 8)) return TD_OK;
        const char *space = memchr(left, ' ', n);
        if (!space || memchr(space + 1, ' ', n - (size_t)(space + 1 - left))) {
            return td_fail(
                err, TD_ERR_INVALID,
                "model: merges[%zu] is \"%.60s\", must be two texts with one space between", at,
                left);
        }
        right = space + 1;
        n_left = (size_t)(space - left);
        n_right = n - n_left - 1;
    } else {
        const json_t *a = json_array_get(merge, 0), *c = json_array_get(merge, 1);
        if (json_array_size(merge) != 2 || !json_is_string(a) || !json_is_string(c)) {
            return td_fail(err, TD_ERR_INVALID,
                           "model: merges[%zu] must be \"a b\" or [\"a\", \"b\"]", at);
        }
        left = json_string_value(a), n_left = json_string_length(a);
        right = json_string_value(c), n_right = json_string_length(c);
    }
    int32_t left_id, right_id, new_id;
    joined->n = 0;
    td_status s = find_part(b, at, left, n_left, &left_id, err);
    if (!s) s = find_part(b, at, right, n_right, &right_id, err);
    if (s) return s;
    if (td_tok_buf_append(joined, left, n_left) || td_tok_buf_append(joined, right, n_right)) {
        return td_fail(err, TD_ERR_NOMEM, "model: merges[%zu]: no memory", at);
    }
    s = find_part(b, at, joined->n ? joined->bytes : "", joined->n, &new_id, err);
    if (!s) td_bpe_add_merge(b, left_id, right_id, (uint32_t)at, new_id);
    return s;
}

static td_status parse_merges(struct td_bpe *b, const json_t *merges, struct td_err *err)
{
    if (!json_is_array(merges))
        return td_fail(err, TD_ERR_INVALID, "model: merges must be an array");
    td_status s = td_bpe_reserve_merges(b, json_array_size(merges));
    if (s) return td_fail(err, s, "model: no memory for %zu merges", json_array_size(merges));
    struct td_tok_buf joined = {0};
    for (size_t i = 0; i < json_array_size(merges) && !s; i++)
        s = parse_merge(b, json_array_get(merges, i), i, &joined, err);
    td_tok_buf_free(&joined);
    return s;
}

/* Refuses a string that is neither null nor empty, because its effect is not implemented. */
static td_status refuse_text(const json_t *model, const char *key, struct td_err *err)
{
    const char *text = "";
    td_status s = td_json_str(model, "model", key, &text, NULL, err);
    if (s || !*text) return s;
    return td_fail(err, TD_ERR_UNSUPPORTED, "model: %s \"%.60s\" is not supported (only null)", key,
                   text);
}

static td_status parse_model(struct td_bpe *b, const json_t *model, struct td_err *err)
{
    const char *type = "BPE", *unk = NULL;
    double dropout = 0;
    if (!json_is_object(model)) return td_fail(err, TD_ERR_INVALID, "model must be an object");
    td_status s = td_json_str(model, "model", "type", &type, NULL, err);
    if (!s && strcmp(type, "BPE"))
        s = td_fail(err, TD_ERR_UNSUPPORTED, "model: type \"%.60s\" is not supported (only BPE)",
                    type);
    if (!s) {
        s = td_tok_only_keys(model, "model",
                             "type dropout unk_token continuing_subword_prefix end_of_word_suffix "
                             "fuse_unk byte_fallback "
                             "ignore_merges vocab merges",
                             err);
    }
    if (!s) s = td_json_f64(model, "model", "dropout", 0, 1, &dropout, NULL, err);
    if (!s && dropout != 0)
        s = td_fail(err, TD_ERR_UNSUPPORTED, "model: dropout %g is not supported (only null or 0)",
                    dropout);
    if (!s) s = refuse_text(model, "continuing_subword_prefix", err);
    if (!s) s = refuse_text(model, "end_of_word_suffix", err);
    if (!s) s = td_json_bool(model, "model", "fuse_unk", &b->fuse_unk, NULL, err);
    if (!s) s = td_json_bool(model, "model", "byte_fallback", &b->byte_fallback, NULL, err);
    if (!s) s = td_json_bool(model, "model", "ignore_merges", &b->ignore_merges, NULL, err);
    if (!s) s = td_json_str(model, "model", "unk_token", &unk, NULL, err);
    if (!s) s = parse_vocab(b, json_object_get(model, "vocab"), err);
    if (s) return s;
    b->unk_id = unk ? td_vocab_find(&b->vocab, &b->vocab.model, unk, strlen(unk)) : -1;
    if (unk && b->unk_id < 0)
        return td_fail(err, TD_ERR_CORRUPT, "model: unk_token \"%.60s\" is not in the vocabulary",
                       unk);
    s = parse_merges(b, json_object_get(model, "merges"), err);
    if (!s) td_bpe_index(b);
    return s;
}

static td_status parse_added(struct td_tokenizer *t, const json_t *list, struct td_err *err)
{
    const char *what = "added_tokens";
    if (!list || json_is_null(list)) return TD_OK;
    if (!json_is_array(list)) return td_fail(err, TD_ERR_INVALID, "%s must be an array", what);
    size_t n = json_array_size(list);
    if (n > TD_VOCAB_MAX)
        return td_fail(err, TD_ERR_LIMIT, "%s has %zu entries, at most %d", what, n, TD_VOCAB_MAX);
    t->added = calloc(n ? n : 1, sizeof *t->added);
    if (!t->added) return td_fail(err, TD_ERR_NOMEM, "%s: no memory for %zu entries", what, n);
    for (size_t i = 0; i < n; i++) {
        const json_t *json = json_array_get(list, i);
        const char *content;
        bool present;
        struct td_tok_added added = {0};
        if (!json_is_object(json))
            return td_fail(err, TD_ERR_INVALID, "%s[%zu] must be an object", what, i);
        td_status s = td_tok_only_keys(
            json, what, "id content single_word lstrip rstrip normalized special", err);
        if (!s) s = td_json_str(json, what, "content", &content, &present, err);
        if (s) return s;
        if (!present || !*content)
            return td_fail(err, TD_ERR_INVALID, "%s[%zu]: content is missing or empty", what, i);
        if (strlen(content) > ADDED_MAX_BYTES)
            return td_fail(err, TD_ERR_LIMIT, "%s[%zu]: content has %zu bytes, at most %d", what, i,
                           strlen(content), ADDED_MAX_BYTES);
        s = id_of(json_object_get(json, "id"), what, content, &added.id, err);
        if (!s) s = td_json_bool(json, what, "special", &added.special, NULL, err);
        added.normalized = !added.special; /* Hugging Face's default */
        if (!s) s = td_json_bool(json, what, "single_word", &added.single_word, NULL, err);
        if (!s) s = td_json_bool(json, what, "lstrip", &added.lstrip, NULL, err);
        if (!s) s = td_json_bool(json, what, "rstrip", &added.rstrip, NULL, err);
        if (!s) s = td_json_bool(json, what, "normalized", &added.normalized, NULL, err);
        if (s) return s;
        int32_t model_id =
            td_vocab_find(&t->bpe.vocab, &t->bpe.vocab.model, content, strlen(content));
        if (model_id >= 0 && model_id != added.id) {
            return td_fail(err, TD_ERR_CORRUPT,
                           "%s: \"%.60s\" has id %d, but %d in the model's vocab", what, content,
                           added.id, model_id);
        }
        if (td_vocab_find(&t->bpe.vocab, &t->bpe.vocab.added, content, strlen(content)) >= 0) {
            return td_fail(err, TD_ERR_CORRUPT, "%s[%zu]: \"%.60s\" is there twice", what, i,
                           content);
        }
        s = td_vocab_add(&t->bpe.vocab, &t->bpe.vocab.added, content, strlen(content), added.id,
                         what, err);
        if (s) return s;
        t->added[t->n_added++] = added;
        t->bpe.vocab.tokens[added.id].special = added.special;
    }
    return TD_OK;
}

/* bytes of all patterns: each takes a trie node of 20 bytes; real files have some kilobytes */
#define PATTERNS_MAX_BYTES (4 << 20)

/* Special tokens first, in the order of Hugging Face's patterns, which decides between equal
 * ones. */
td_status td_tok_build_tries(struct td_tokenizer *t, struct td_err *err)
{
    struct td_tok_matcher m = {0};
    struct td_tok_budget budget = {0};
    struct td_tok_buf normal = {.budget = &budget}, tmp = {.budget = &budget};
    td_status s = TD_OK;
    bool front_lost;
    size_t at, n_patterns = 0;
    for (int special = 1; special >= 0; special--) {
        for (size_t i = 0; i < t->n_added && !s; i++) {
            if (t->added[i].special != special) continue;
            size_t n;
            const char *text = td_vocab_text(&t->bpe.vocab, t->added[i].id, &n);
            struct td_tok_budget own = td_tok_budget_of(n);
            budget.max_text_bytes = own.max_text_bytes;
            /* the buffers are kept from token to token */
            budget.max_heap_bytes = budget.heap_bytes + own.max_heap_bytes;
            n_patterns += n;
            if (!t->added[i].normalized) {
                s = td_tok_trie_add(&t->raw_trie, text, n, (int32_t)i);
                continue;
            }
            s = td_tok_normalize(t, &m, text, n, false, &normal, &tmp, &front_lost, &at);
            n_patterns += normal.n;
            if (s == TD_ERR_LIMIT)
                td_fail(err, s,
                        "added_tokens: \"%.60s\": normalizer %zu of %zu (%s) makes more than %zu "
                        "bytes of its %zu, or its regex "
                        "too many steps",
                        text, at + 1, t->n_norm, td_tok_normalizer_name(t, at),
                        budget.max_text_bytes, n);
            if (!s && n_patterns > PATTERNS_MAX_BYTES)
                s = td_fail(
                    err, TD_ERR_LIMIT,
                    "added_tokens: more than %d bytes in all, normalized ones counted twice",
                    PATTERNS_MAX_BYTES);
            if (!s && !normal.n)
                s = td_fail(err, TD_ERR_UNSUPPORTED,
                            "added_tokens: the normalizer leaves nothing of \"%.60s\"", text);
            if (!s) s = td_tok_trie_add(&t->normalized_trie, normal.bytes, normal.n, (int32_t)i);
        }
    }
    td_tok_buf_free(&normal);
    td_tok_buf_free(&tmp);
    td_tok_matcher_free(&m);
    return s == TD_ERR_NOMEM ? td_fail(err, s, "added_tokens: no memory") : s;
}

static td_status check_padding(const json_t *padding, struct td_err *err)
{
    if (!padding || json_is_null(padding)) return TD_OK;
    const char *strategy = json_string_value(json_object_get(padding, "strategy"));
    const json_t *multiple = json_object_get(padding, "pad_to_multiple_of");
    if (!strategy || strcmp(strategy, "BatchLongest") || (multiple && !json_is_null(multiple))) {
        return td_fail(
            err, TD_ERR_UNSUPPORTED,
            "padding: only strategy BatchLongest without pad_to_multiple_of is accepted");
    }
    return TD_OK;
}

static td_status parse_root(struct td_tokenizer *t, const json_t *root, struct td_err *err)
{
    const char *version = "1.0";
    if (!json_is_object(root)) return td_fail(err, TD_ERR_INVALID, "the file is not an object");
    td_status s = td_tok_only_keys(root, "file",
                                   "version truncation padding added_tokens normalizer "
                                   "pre_tokenizer post_processor decoder model",
                                   err);
    if (!s) s = td_json_str(root, "file", "version", &version, NULL, err);
    if (!s && strcmp(version, "1.0"))
        s = td_fail(err, TD_ERR_UNSUPPORTED, "version \"%.20s\" is not supported (only 1.0)",
                    version);
    if (!s) s = check_padding(json_object_get(root, "padding"), err);
    if (!s) s = parse_model(&t->bpe, json_object_get(root, "model"), err);
    if (!s) s = parse_added(t, json_object_get(root, "added_tokens"), err);
    if (!s) s = td_tok_parse_normalizer(t, json_object_get(root, "normalizer"), err);
    if (!s) s = td_tok_parse_pre_tokenizer(t, json_object_get(root, "pre_tokenizer"), err);
    if (!s) s = td_tok_parse_post_processor(t, json_object_get(root, "post_processor"), err);
    if (!s) s = td_tok_parse_decoder(t, json_object_get(root, "decoder"), err);
    return s ? s : td_tok_build_tries(t, err);
}

struct td_tokenizer *td_tok_create(const char *file)
{
    struct td_tokenizer *t = calloc(1, sizeof *t);
    if (!t) return NULL;
    t->file = file;
    t->lone_mark = -1;
    td_vocab_init(&t->bpe.vocab);
    return t;
}

td_status td_tokenizer_parse(const char *json, size_t n_bytes, struct td_tokenizer **ret_tokenizer,
                             struct td_err *err)
{
    if (n_bytes > FILE_MAX_BYTES)
        return td_fail(err, TD_ERR_LIMIT, "tokenizer.json: %zu bytes, at most %zu", n_bytes,
                       FILE_MAX_BYTES);
    json_t *root;
    td_status s = td_json_load_text(json, n_bytes, "tokenizer.json", &root, err);
    if (s) return s;
    struct td_tokenizer *t = td_tok_create("tokenizer.json");
    if (t) {
        s = parse_root(t, root, err);
        if (s && err) td_err_prefix(err, "tokenizer.json");
    } else {
        s = td_fail(err, TD_ERR_NOMEM, "tokenizer.json: no memory");
    }
    json_decref(root);
    if (s)
        td_tokenizer_free(t);
    else
        *ret_tokenizer = t;
    return s;
}

static bool has_file(const char *dir, const char *name)
{
    char path[4096];
    struct stat sb;
    return snprintf(path, sizeof path, "%s/%s", dir, name) < (int)sizeof path &&
           stat(path, &sb) == 0;
}

td_status td_tokenizer_load(const char *dir, struct td_tokenizer **ret_tokenizer,
                            struct td_err *err)
{
    char *path, *text;
    size_t n_bytes;
    td_status s;
    if (td_gguf_is_file(dir)) {
        struct td_gguf *g = NULL;
        if ((s = td_gguf_open(dir, &g, err))) return s;
        s = td_tokenizer_from_gguf(g, dir, ret_tokenizer, err);
        td_gguf_close(g);
        return s;
    }
    /* Kimi-K2's and Qwen's first models have lists of ranks with names of their own. */
    static const char *const files[] = {"tokenizer.json", "tokenizer.model", "tiktoken.model",
                                        "qwen.tiktoken", NULL};
    const char *const *file = files;
    while (*file && !has_file(dir, *file)) file++;
    bool is_json = !*file || file == files;
    s = td_model_dir_check(dir, is_json ? files[0] : *file, err);
    if (s) return s;
    if (!is_json) return td_tokenizer_load_sentencepiece(dir, *file, ret_tokenizer, err);
    if (asprintf(&path, "%s/tokenizer.json", dir) < 0)
        return td_fail(err, TD_ERR_NOMEM, "tokenizer.json: no memory");
    s = td_file_read(path, FILE_MAX_BYTES, &text, &n_bytes, err);
    free(path);
    if (s) return s;
    s = td_tokenizer_parse(text, n_bytes, ret_tokenizer, err);
    if (s && err) td_err_prefix(err, "%s", dir);
    free(text);
    return s;
}

void td_tokenizer_free(struct td_tokenizer *t)
{
    if (!t) return;
    for (size_t i = 0; i < t->n_norm; i++)
        td_tok_pattern_free(&t->norm[i].pattern), free(t->norm[i].content),
            td_sp_rules_free(t->norm[i].rules);
    for (size_t i = 0; i < t->n_pre; i++) td_tok_pattern_free(&t->pre[i].pattern);
    for (size_t i = 0; i < t->n_dec; i++)
        td_tok_pattern_free(&t->dec[i].pattern), free(t->dec[i].content);
    td_tok_trie_free(&t->raw_trie);
    td_tok_trie_free(&t->normalized_trie);
    td_bpe_free(&t->bpe);
    td_unigram_free(t->unigram);
    free(t->added);
    free(t);
}

int32_t td_tokenizer_vocab(const struct td_tokenizer *t) { return t->bpe.vocab.n_ids; }

const char *td_tokenizer_file(const struct td_tokenizer *t) { return t->file; }

int32_t td_tokenizer_token_id(const struct td_tokenizer *t, const char *text)
{
    int32_t id = td_vocab_find(&t->bpe.vocab, &t->bpe.vocab.added, text, strlen(text));
    return id >= 0 ? id : td_vocab_find(&t->bpe.vocab, &t->bpe.vocab.model, text, strlen(text));
}

const char *td_tokenizer_token_text(const struct td_tokenizer *t, int32_t id, size_t *ret_bytes)
{
    return td_vocab_text(&t->bpe.vocab, id, ret_bytes);
}

uint64_t td_tokenizer_digest(const struct td_tokenizer *t)
{
    uint64_t digest = 0;
    for (int32_t id = 0; id < t->bpe.vocab.n_ids; id++) {
        size_t n = 0;
        const char *text = td_tokenizer_token_text(t, id, &n);
        if (text) digest = td_hash64(text, n, digest + (uint64_t)id);
    }
    return digest ? digest : 1;
}

bool td_tokenizer_is_special(const struct td_tokenizer *t, int32_t id)
{
    return id >= 0 && id < t->bpe.vocab.n_ids && t->bpe.vocab.tokens[id].special;
}
