/* tokenizer_sentencepiece.c - brings SentencePiece's tokenizer.model, with tokenizer_config.json
 * beside it, into the form that tokenizer.json has in memory.
 *
 * What encodes is what transformers' slow tokenizers do: the text is cut at added tokens; each
 * piece between them goes to SentencePiece by itself. Steps of the model: its normalizer
 * (tokenizer_sp_normalize.c), user-defined pieces (they are looked for in the normalizer's output
 * and never merged), and merges by score (tokenizer_scores.c); or, of type unigram, the most
 * probable pieces, user-defined ones among them (tokenizer_unigram.c).
 *
 * What the classes differ in is a row of `classes`; another class is refused by name, because some
 * of them move ids (fairseq's) or change the text first. Control pieces are found in a text even
 * where tokenizer_config.json does not list them, as those of a GGUF file are; a special token that
 * no piece and no id has (a padding token, say) is left out, because a model has no row for it. */
#include "common/text/tokenizer_sentencepiece.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "common/base/json.h"
#include "common/base/mem.h"
#include "common/text/sentencepiece_file.h"
#include "common/text/tokenizer_internal.h"
#include "common/text/tokenizer_unigram.h"

#define CONFIG_MAX_BYTES ((size_t)64 << 20)
#define ADDED_MAX_BYTES 4096         /* of one added token's text */
#define PATTERNS_MAX_BYTES (4 << 20) /* of all texts that are looked for: 20 bytes each in memory */
#define SPECIAL_MAX 1024             /* each is looked for among all pieces */
#define SPACE_MARK "\xe2\x96\x81"    /* U+2581 */

/* How a class of transformers, or one that comes with a model, differs from others. */
static const struct tokenizer_class {
    const char *name;
    bool adds_bos;            /* where the file does not say */
    bool has_legacy;          /* "legacy": false marks the beginning of a text alone */
    const char *const *extra; /* tokens behind the model's pieces */
    const char *const *front; /* of them, before every text; NULL: BOS, if it is added */
} classes[] = {
#define GLM "[MASK]", "[gMASK]", "[sMASK]", "sop", "eop"
    {"LlamaTokenizer", true, true, NULL, NULL},
    {"LlamaTokenizerFast", true, true, NULL, NULL},
    {"GemmaTokenizer", true, false, NULL, NULL},
    {"GemmaTokenizerFast", true, false, NULL, NULL},
    {"BaichuanTokenizer", true, false, NULL, NULL},
    {"BaiChuanTokenizer", true, false, NULL, NULL},
    {"InternLMTokenizer", true, false, NULL, NULL},
    {"InternLM2Tokenizer", true, false, NULL, NULL},
    {"InternLM2TokenizerFast", true, false, NULL, NULL},
    {"InternLM3Tokenizer", true, false, NULL, NULL},
    {"ChatGLMTokenizer", false, false,
     (const char *const[]){GLM, "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", NULL},
     (const char *const[]){"[gMASK]", "sop", NULL}},
};

/* A token that is cut out of a text before the model sees it. */
struct extra {
    const char *text; /* borrowed from JSON, or from `classes` */
    struct td_tok_added added;
};

struct load {
    struct td_sp_file f;
    struct td_tokenizer *t;
    const struct tokenizer_class *class;
    const json_t *config; /* NULL: none */
    struct extra *extras;
    size_t n_extras, extras_capacity;
    int32_t *extra_of; /* [f.n_pieces] the extra that has a piece's id, or -1 */
    size_t n_patterns; /* bytes in the tries */
    struct td_err *err;
};

static td_status no_memory(const struct load *l)
{
    return td_fail(l->err, TD_ERR_NOMEM, "no memory");
}

static td_status need_class(struct load *l)
{
    const char *name = classes[0].name;
    td_status s =
        td_json_str(l->config, "tokenizer_config.json", "tokenizer_class", &name, NULL, l->err);
    for (size_t i = 0; i < sizeof classes / sizeof *classes && !s; i++) {
        if (strcmp(name, classes[i].name) != 0) continue;
        l->class = &classes[i];
        return TD_OK;
    }
    return s ? s
             : td_fail(l->err, TD_ERR_UNSUPPORTED,
                       "tokenizer_config.json: tokenizer_class \"%.60s\" is not supported with a "
                       "tokenizer.model and no tokenizer.json",
                       name);
}

/* What would change ids and is not there. */
static td_status refuse_settings(const struct load *l)
{
    static const char *const keys[] = {"do_lower_case", "split_special_tokens"};
    const char *what = "tokenizer_config.json";
    td_status s = TD_OK;
    for (size_t i = 0; i < sizeof keys / sizeof *keys && !s; i++) {
        bool on = false;
        s = td_json_bool(l->config, what, keys[i], &on, NULL, l->err);
        if (!s && on)
            s = td_fail(l->err, TD_ERR_UNSUPPORTED, "%s: %s true is not supported", what, keys[i]);
    }
    if (!s && json_object_size(json_object_get(l->config, "sp_model_kwargs")))
        s = td_fail(l->err, TD_ERR_UNSUPPORTED, "%s: sp_model_kwargs is not supported (only {})",
                    what);
    return s;
}

/* ---- added tokens ---------------------------------------------------------------------------- */

static td_status add_extra(struct load *l, const char *text, struct td_tok_added added)
{
    const char *what = "added tokens";
    size_t n = strlen(text);
    if (n == 0 || n > ADDED_MAX_BYTES)
        return td_fail(l->err, TD_ERR_LIMIT,
                       "%s: the text of token %d has %zu bytes, must have 1 to %d", what, added.id,
                       n, ADDED_MAX_BYTES);
    if (l->n_extras == l->extras_capacity) {
        size_t capacity = l->extras_capacity ? 2 * l->extras_capacity : 64;
        struct extra *grown = realloc(l->extras, capacity * sizeof *grown);
        if (!grown) return no_memory(l);
        l->extras = grown;
        l->extras_capacity = capacity;
    }
    if ((size_t)added.id < l->f.n_pieces) {
        if (l->extra_of[added.id] >= 0)
            return td_fail(l->err, TD_ERR_CORRUPT, "%s: \"%.60s\" and \"%.60s\" have the id %d",
                           what, l->extras[l->extra_of[added.id]].text, text, added.id);
        l->extra_of[added.id] = (int32_t)l->n_extras;
    }
    l->extras[l->n_extras++] = (struct extra){text, added};
    return TD_OK;
}

static struct extra *find_extra(const struct load *l, const char *text)
{
    for (size_t i = 0; i < l->n_extras; i++)
        if (strcmp(l->extras[i].text, text) == 0) return &l->extras[i];
    return NULL;
}

/* The switches of an added token's object. */
static td_status read_flags(const json_t *obj, struct td_tok_added *added, struct td_err *err)
{
    const char *what = "tokenizer_config.json: an added token";
    td_status s = td_tok_only_keys(
        obj, what, "content id lstrip rstrip single_word normalized special __type", err);
    if (!s) s = td_json_bool(obj, what, "single_word", &added->single_word, NULL, err);
    if (!s) s = td_json_bool(obj, what, "lstrip", &added->lstrip, NULL, err);
    if (!s) s = td_json_bool(obj, what, "rstrip", &added->rstrip, NULL, err);
    return s ? s : td_json_bool(obj, what, "special", &added->special, NULL, err);
}

td_status td_tok_read_decoder(const json_t *decoder, td_tok_added_fn add, void *ctx,
                              struct td_err *err)
{
    const char *what = "tokenizer_config.json: added_tokens_decoder", *key;
    json_t *value;
    td_status s = TD_OK;
    if (!json_is_object(decoder)) return td_fail(err, TD_ERR_INVALID, "%s must be an object", what);
    json_object_foreach((json_t *)decoder, key, value)
    {
        struct td_tok_added added = {0};
        const char *text = "";
        char *end;
        errno = 0;
        long id = strtol(key, &end, 10);
        if (key[0] < '0' || key[0] > '9' || *end || errno || id >= TD_VOCAB_MAX)
            return td_fail(err, TD_ERR_INVALID, "%s: \"%.40s\" is no id in 0..%d", what, key,
                           TD_VOCAB_MAX - 1);
        added.id = (int32_t)id;
        if (!json_is_object(value))
            return td_fail(err, TD_ERR_INVALID, "%s: %ld must be an object", what, id);
        if ((s = td_json_str(value, what, "content", &text, NULL, err)) ||
            (s = read_flags(value, &added, err)) || (s = add(ctx, text, &added)))
            return s;
    }
    return TD_OK;
}

static td_status add_listed(void *ctx, const char *text, const struct td_tok_added *added)
{
    return add_extra(ctx, text, *added);
}

/* added_tokens.json: {"<|im_end|>": 32000} */
static td_status read_added(struct load *l, const json_t *list)
{
    const char *key;
    json_t *value;
    td_status s = TD_OK;
    if (!json_is_object(list))
        return td_fail(l->err, TD_ERR_INVALID, "added_tokens.json must be an object of text: id");
    json_object_foreach((json_t *)list, key, value)
    {
        json_int_t id = json_is_integer(value) ? json_integer_value(value) : -1;
        if (id < 0 || id >= TD_VOCAB_MAX)
            return td_fail(l->err, TD_ERR_INVALID,
                           "added_tokens.json: \"%.60s\" must have an id in 0..%d", key,
                           TD_VOCAB_MAX - 1);
        if ((s = add_extra(l, key, (struct td_tok_added){.id = (int32_t)id}))) return s;
    }
    return TD_OK;
}

/* The piece with this text, or -1. */
static int32_t find_piece(const struct load *l, const char *text)
{
    size_t n = strlen(text);
    for (size_t i = 0; i < l->f.n_pieces; i++)
        if (l->f.pieces[i].n == n && memcmp(l->f.pieces[i].text, text, n) == 0) return (int32_t)i;
    return -1;
}

/* A token that tokenizer_config.json names as a special one, as a text or as an object. */
static td_status add_special(struct load *l, const json_t *token)
{
    struct td_tok_added added = {.special = true};
    const char *text = json_string_value(token);
    td_status s = TD_OK;
    if (json_is_object(token)) {
        s = td_json_str(token, "tokenizer_config.json: a special token", "content", &text, NULL,
                        l->err);
        if (!s) s = read_flags(token, &added, l->err);
    }
    if (s || !text || !*text) return s;
    struct extra *known = find_extra(l, text);
    added.special = added.named = true;
    if (known) known->added.special = known->added.named = true;
    if (known || (added.id = find_piece(l, text)) < 0 || l->extra_of[added.id] >= 0) return TD_OK;
    return add_extra(l, text, added);
}

static td_status read_special(struct load *l)
{
    static const char *const keys[] = {"bos_token", "eos_token", "unk_token", "sep_token",
                                       "pad_token", "cls_token", "mask_token"};
    const json_t *more = json_object_get(l->config, "additional_special_tokens");
    td_status s = TD_OK;
    if (json_array_size(more) > SPECIAL_MAX)
        return td_fail(l->err, TD_ERR_LIMIT,
                       "tokenizer_config.json: %zu additional_special_tokens, at most %d",
                       json_array_size(more), SPECIAL_MAX);
    for (size_t i = 0; i < sizeof keys / sizeof *keys && !s; i++)
        s = add_special(l, json_object_get(l->config, keys[i]));
    for (size_t i = 0; i < json_array_size(more) && !s; i++)
        s = add_special(l, json_array_get(more, i));
    return s;
}

/* Those of the class: their ids follow the pieces'. "sop" is four letters' worth of many words
 * ("philosophy"), so it is a token only where it must be one, behind [gMASK]; "eop" only as an
 * id. */
static td_status add_class_tokens(struct load *l)
{
    td_status s = TD_OK;
    int32_t id = (int32_t)l->f.n_pieces, mask = id + 1;
    for (const char *const *text = l->class->extra; text && *text && !s; text++, id++) {
        struct td_tok_added added = {.id = id, .special = true};
        if (strcmp(*text, "sop") == 0) added.behind = mask + 1;
        if (strcmp(*text, "eop") == 0) added.behind = INT32_MAX;
        struct extra *known = find_extra(l, *text);
        if (!known) {
            s = add_extra(l, *text, added);
            continue;
        }
        if (known->added.id != id)
            return td_fail(l->err, TD_ERR_CORRUPT,
                           "tokenizer_config.json: \"%s\" has the id %d, must have %d behind the "
                           "model's pieces",
                           *text, known->added.id, id);
        known->added.special = true;
        known->added.behind = added.behind;
    }
    return s;
}

static td_status collect_extras(struct load *l, const json_t *added)
{
    const json_t *decoder = json_object_get(l->config, "added_tokens_decoder");
    l->extra_of = malloc(l->f.n_pieces * sizeof *l->extra_of);
    if (!l->extra_of) return no_memory(l);
    for (size_t i = 0; i < l->f.n_pieces; i++) l->extra_of[i] = -1;
    td_status s = TD_OK;
    if (decoder && !json_is_null(decoder))
        s = td_tok_read_decoder(decoder, add_listed, l, l->err);
    else if (added)
        s = read_added(l, added);
    if (!s) s = add_class_tokens(l);
    return s ? s : read_special(l);
}

/* ---- vocabulary ------------------------------------------------------------------------------ */

/* A token that is looked for in texts, in the trie of raw text; or in that of the normalizer's
 * output, but where the model is the one to find it, and in that of what the normalizer keeps. */
static td_status look_for(struct load *l, const char *text, size_t n, struct td_tok_added added,
                          bool raw)
{
    struct td_tokenizer *t = l->t;
    int32_t at = (int32_t)t->n_added;
    t->added[t->n_added++] = added;
    if (added.behind == INT32_MAX) return TD_OK;
    l->n_patterns += raw ? n : 2 * n;
    if (l->n_patterns > PATTERNS_MAX_BYTES)
        return td_fail(l->err, TD_ERR_LIMIT,
                       "control, user-defined and added tokens have more than %d bytes, "
                       "user-defined ones counted twice",
                       PATTERNS_MAX_BYTES);
    td_status s = TD_OK;
    if (raw || l->f.model_type == TD_SP_BPE)
        s = td_tok_trie_add(raw ? &t->raw_trie : &t->normalized_trie, text, n, at);
    if (!s && !raw) s = td_tok_trie_add(&t->norm[0].rules->kept, text, n, at);
    return s ? no_memory(l) : TD_OK;
}

static td_status add_piece(struct load *l, int32_t id)
{
    const struct td_sp_piece *p = &l->f.pieces[id];
    struct td_vocab *v = &l->t->bpe.vocab;
    const struct extra *extra = l->extra_of[id] >= 0 ? &l->extras[l->extra_of[id]] : NULL;
    bool renamed =
        extra && (strlen(extra->text) != p->n || memcmp(extra->text, p->text, p->n) != 0);
    bool is_text = p->kind == TD_SP_NORMAL;
    td_status s = TD_OK;
    if (p->kind == TD_SP_BYTE && !l->f.byte_fallback)
        return td_fail(l->err, TD_ERR_CORRUPT, "piece %d is a byte, but byte_fallback is false",
                       id);
    if (p->kind == TD_SP_UNUSED && l->f.model_type == TD_SP_BPE)
        return td_fail(l->err, TD_ERR_UNSUPPORTED,
                       "piece %d (\"%.*s\") is marked as unused, which is not supported", id,
                       p->n < 60 ? (int)p->n : 60, p->text);
    if (!renamed)
        s = td_vocab_add(v, is_text ? &v->model : &v->added, p->text, p->n, id, "pieces", l->err);
    if (s) return s;
    if (p->kind == TD_SP_USER_DEFINED)
        return look_for(l, p->text, p->n, (struct td_tok_added){.id = id}, false);
    if (p->kind != TD_SP_CONTROL && p->kind != TD_SP_UNKNOWN) return TD_OK;
    if (p->kind == TD_SP_UNKNOWN && l->t->bpe.unk_id >= 0)
        return td_fail(l->err, TD_ERR_CORRUPT, "pieces %d and %d are both the unknown one",
                       l->t->bpe.unk_id, id);
    if (p->kind == TD_SP_UNKNOWN) l->t->bpe.unk_id = id;
    if (extra) return TD_OK;
    v->tokens[id].special = true;
    return look_for(l, p->text, p->n, (struct td_tok_added){.id = id, .special = true}, true);
}

/* A piece whose id an added token has under another text: nothing may be encoded to it. */
static td_status check_renamed(const struct load *l, int32_t id)
{
    const struct td_sp_piece *p = &l->f.pieces[id];
    const struct td_vocab *v = &l->t->bpe.vocab;
    uint32_t cp;
    if (l->extra_of[id] < 0 || p->kind != TD_SP_NORMAL ||
        td_vocab_find(v, &v->model, p->text, p->n) >= 0)
        return TD_OK;
    if (l->f.model_type == TD_SP_BPE && td_bpe_n_cuts(v, p->text, p->n) == 0 &&
        td_utf8_next(p->text, p->n, &cp) != (int)p->n)
        return TD_OK;
    return td_fail(l->err, TD_ERR_CORRUPT,
                   "added token %d is \"%.60s\", but the model makes \"%.*s\" of it", id,
                   l->extras[l->extra_of[id]].text, p->n < 60 ? (int)p->n : 60, p->text);
}

static td_status add_vocabulary(struct load *l)
{
    struct td_tokenizer *t = l->t;
    struct td_vocab *v = &t->bpe.vocab;
    t->bpe.unk_id = -1;
    t->added = calloc(l->f.n_pieces + l->n_extras, sizeof *t->added);
    if (!t->added) return no_memory(l);
    td_status s = TD_OK;
    for (size_t i = 0; i < l->n_extras && !s; i++) {
        const struct extra *e = &l->extras[i];
        size_t n = strlen(e->text);
        s = td_vocab_add(v, &v->added, e->text, n, e->added.id, "added tokens", l->err);
        if (!s) v->tokens[e->added.id].special = e->added.special;
        if (!s) s = look_for(l, e->text, n, e->added, true);
    }
    for (size_t i = 0; i < l->f.n_pieces && !s; i++) s = add_piece(l, (int32_t)i);
    for (size_t i = 0; i < l->f.n_pieces && !s; i++) s = check_renamed(l, (int32_t)i);
    if (!s && t->bpe.unk_id < 0) s = td_fail(l->err, TD_ERR_CORRUPT, "no piece is the unknown one");
    return s;
}

/* ---- merges ---------------------------------------------------------------------------------- */

/* Merging is by texts in that library, and by tokens here: the same where every character of a
 * piece that can be merged is a piece. */
static td_status check_characters(const struct load *l, const struct td_sp_piece *p)
{
    const struct td_tokenizer *t = l->t;
    const struct td_vocab *v = &t->bpe.vocab;
    size_t n_found;
    uint32_t cp;
    for (size_t at = 0, n = 0; at < p->n; at += n) {
        n = (size_t)td_utf8_next(p->text + at, p->n - at, &cp);
        if (td_vocab_find(v, &v->model, p->text + at, n) >= 0) continue;
        if (td_tok_trie_longest(&t->normalized_trie, p->text + at, n, &n_found) >= 0) continue;
        return td_fail(l->err, TD_ERR_UNSUPPORTED,
                       "piece \"%.*s\" has the character U+%04X, which is no piece by itself",
                       p->n < 60 ? (int)p->n : 60, p->text, cp);
    }
    return TD_OK;
}

static td_status set_bytes(struct load *l)
{
    struct td_bpe *b = &l->t->bpe;
    for (size_t i = 0; i < l->f.n_pieces; i++) {
        const struct td_sp_piece *p = &l->f.pieces[i];
        char name[8];
        if (p->kind != TD_SP_BYTE) continue;
        unsigned byte = 256;
        if (p->n == 6 && sscanf(p->text, "<0x%2X>", &byte) != 1) byte = 256;
        snprintf(name, sizeof name, "<0x%02X>", byte);
        if (p->n != 6 || byte > 255 || memcmp(p->text, name, 6) != 0)
            return td_fail(l->err, TD_ERR_CORRUPT, "piece %zu (\"%.*s\") is marked as a byte", i,
                           p->n < 60 ? (int)p->n : 60, p->text);
        b->byte_ids[byte] = (int32_t)i;
    }
    for (int i = 0; i < 256 && l->f.byte_fallback; i++)
        if (b->byte_ids[i] < 0)
            return td_fail(l->err, TD_ERR_CORRUPT,
                           "byte_fallback is true, but no piece is the byte <0x%02X>", (unsigned)i);
    return TD_OK;
}

static td_status set_merges(struct load *l)
{
    struct td_bpe *b = &l->t->bpe;
    struct td_scored_piece *scored = calloc(l->f.n_pieces, sizeof *scored);
    size_t n = 0;
    if (!scored) return no_memory(l);
    td_status s = TD_OK;
    for (size_t i = 0; i < l->f.n_pieces && !s; i++) {
        const struct td_sp_piece *p = &l->f.pieces[i];
        if (p->kind != TD_SP_NORMAL || td_vocab_find(&b->vocab, &b->vocab.model, p->text, p->n) < 0)
            continue;
        scored[n++] = (struct td_scored_piece){(int32_t)i, p->score};
        s = check_characters(l, p);
    }
    if (!s && td_bpe_merge_by_score(b, scored, n)) s = no_memory(l);
    free(scored);
    if (s) return s;
    b->fuse_unk = true;
    return TD_OK;
}

static td_status set_engine(struct load *l)
{
    struct td_bpe *b = &l->t->bpe;
    td_status s = l->f.model_type == TD_SP_BPE ? set_merges(l) : td_bpe_reserve_merges(b, 0);
    if (s == TD_ERR_NOMEM) return no_memory(l);
    if (s) return s;
    b->byte_fallback = l->f.byte_fallback;
    td_bpe_index(b);
    if (l->f.model_type == TD_SP_UNIGRAM && !(l->t->unigram = td_unigram_create(&l->f)))
        return no_memory(l);
    return set_bytes(l);
}

/* ---- the steps around them ------------------------------------------------------------------- */

static td_status set_normalizer(struct load *l)
{
    struct td_tokenizer *t = l->t;
    bool legacy = true, prefix = true;
    struct td_sp_rules *r = calloc(1, sizeof *r);
    if (!r) return no_memory(l);
    t->norm[t->n_norm++] = (struct td_tok_norm_op){.kind = TD_NORM_SENTENCEPIECE, .rules = r};
    r->mark = l->f.dummy_prefix ? TD_PREPEND_ALWAYS : TD_PREPEND_NEVER;
    r->remove_extra = l->f.remove_extra_whitespaces;
    r->escape = l->f.escape_whitespaces;
    td_status s = td_json_bool(l->config, "tokenizer_config.json", "legacy", &legacy, NULL, l->err);
    if (!s)
        s = td_json_bool(l->config, "tokenizer_config.json", "add_prefix_space", &prefix, NULL,
                         l->err);
    if (s) return s;
    if (l->class->has_legacy && !legacy) {
        if (r->remove_extra)
            return td_fail(l->err, TD_ERR_UNSUPPORTED,
                           "tokenizer_config.json: legacy false is not supported with a model that "
                           "removes extra white space");
        r->mark = prefix ? TD_PREPEND_FIRST : TD_PREPEND_NEVER;
        t->lone_mark = find_piece(l, SPACE_MARK);
    }
    return td_sp_rules_set(r, l->f.charsmap, l->f.n_charsmap, l->err);
}

td_status td_tok_sp_decoder(struct td_tokenizer *t, bool strips_front, struct td_err *err)
{
    json_t *steps =
        json_pack("[{s:s, s:{s:s}, s:s}, {s:s}, {s:s}]", "type", "Replace", "pattern", "String",
                  SPACE_MARK, "content", " ", "type", "ByteFallback", "type", "Fuse");
    if (steps && strips_front)
        json_array_append_new(steps, json_pack("{s:s, s:s, s:i, s:i}", "type", "Strip", "content",
                                               " ", "start", 1, "stop", 0));
    json_t *json = json_pack("{s:s, s:o}", "type", "Sequence", "decoders", steps);
    if (!json) return td_fail(err, TD_ERR_NOMEM, "no memory");
    td_status s = td_tok_parse_decoder(t, json, err);
    json_decref(json);
    return s;
}

/* BOS or EOS around a text: what tokenizer_config.json calls so, else the model. */
static td_status set_end(struct load *l, const char *add_key, bool add, const char *token_key,
                         int64_t model_id, int32_t *ids, size_t *n)
{
    const char *what = "tokenizer_config.json", *text = NULL;
    const json_t *token = json_object_get(l->config, token_key);
    td_status s = td_json_bool(l->config, what, add_key, &add, NULL, l->err);
    if (s || !add) return s;
    if (json_is_object(token))
        s = td_json_str(token, what, "content", &text, NULL, l->err);
    else
        s = td_json_str(l->config, what, token_key, &text, NULL, l->err);
    if (s) return s;
    int64_t id = model_id;
    if (text)
        id = td_tokenizer_token_id(l->t, text);
    else if (id >= (int64_t)l->f.n_pieces || id < 0 || l->f.pieces[id].kind != TD_SP_CONTROL)
        id = -1;
    if (id < 0)
        return td_fail(l->err, TD_ERR_CORRUPT, "%s: %s is true, but %s \"%.60s\" is no token", what,
                       add_key, token_key, text ? text : "");
    ids[(*n)++] = (int32_t)id;
    return TD_OK;
}

static td_status set_ends(struct load *l)
{
    struct td_tokenizer *t = l->t;
    td_status s = set_end(l, "add_bos_token", l->class->adds_bos, "bos_token", l->f.bos_id,
                          t->before, &t->n_before);
    for (const char *const *text = l->class->front; text && *text; text++)
        t->before[t->n_before++] = td_tokenizer_token_id(t, *text);
    return s ? s
             : set_end(l, "add_eos_token", false, "eos_token", l->f.eos_id, t->after, &t->n_after);
}

/* ---- all of it ------------------------------------------------------------------------------- */

static td_status refuse_model(const struct load *l)
{
    static const char *const names[] = {"0", "unigram", "bpe", "word", "char"};
    int64_t type = l->f.model_type;
    if (type != TD_SP_BPE && type != TD_SP_UNIGRAM)
        return td_fail(l->err, TD_ERR_UNSUPPORTED,
                       "trainer_spec: model_type %s is not supported (only bpe and unigram)",
                       type >= 0 && type < 5 ? names[type] : "of another number");
    if (l->f.whitespace_as_suffix)
        return td_fail(l->err, TD_ERR_UNSUPPORTED,
                       "trainer_spec: treat_whitespace_as_suffix is not supported");
    if (l->f.has_denormalizer)
        return td_fail(l->err, TD_ERR_UNSUPPORTED,
                       "denormalizer_spec: a precompiled_charsmap is not supported");
    return TD_OK;
}

static td_status load(struct load *l, const json_t *added)
{
    td_status s;
    if ((s = refuse_model(l)) || (s = need_class(l)) || (s = refuse_settings(l)) ||
        (s = collect_extras(l, added)) || (s = set_normalizer(l)) || (s = add_vocabulary(l)) ||
        (s = set_engine(l)) ||
        (s = td_tok_sp_decoder(l->t, l->f.dummy_prefix || l->f.remove_extra_whitespaces, l->err)))
        return s;
    return set_ends(l);
}

td_status td_tokenizer_from_sentencepiece(const void *model, size_t n_bytes, const json_t *config,
                                          const json_t *added, struct td_tokenizer **ret_tokenizer,
                                          struct td_err *err)
{
    struct load l = {.config = config, .err = err};
    if (config && !json_is_object(config))
        return td_fail(err, TD_ERR_INVALID, "tokenizer_config.json is no object");
    if (td_tok_is_ranks(model, n_bytes)) /* GLM-4's and Llama 3's files have this name, too */
        return td_tokenizer_from_ranks(model, n_bytes, config, "tokenizer.model", ret_tokenizer,
                                       err);
    td_status s = td_sp_file_read(model, n_bytes, &l.f, err);
    if (s) return err ? td_err_prefix(err, "tokenizer.model") : s;
    l.t = td_tok_create("tokenizer.model");
    s = l.t ? load(&l, added) : no_memory(&l);
    if (s && err && strncmp(err->msg, "tokenizer_config.json", 21) != 0)
        td_err_prefix(err, "tokenizer.model");
    if (s)
        td_tokenizer_free(l.t);
    else
        *ret_tokenizer = l.t;
    free(l.extras);
    free(l.extra_of);
    td_sp_file_free(&l.f);
    return s;
}

/* *ret stays NULL when there is no such file. */
static td_status load_json(const char *dir, const char *name, json_t **ret, struct td_err *err)
{
    char path[4096];
    struct stat sb;
    if (snprintf(path, sizeof path, "%s/%s", dir, name) >= (int)sizeof path)
        return td_fail(err, TD_ERR_LIMIT, "%s: the directory's name is too long", name);
    if (stat(path, &sb) != 0) return TD_OK;
    return td_json_load_file(path, CONFIG_MAX_BYTES, ret, err);
}

td_status td_tokenizer_load_sentencepiece(const char *dir, const char *file,
                                          struct td_tokenizer **ret_tokenizer, struct td_err *err)
{
    json_t *config = NULL, *added = NULL;
    char *path, *bytes = NULL;
    size_t n_bytes;
    if (asprintf(&path, "%s/%s", dir, file) < 0)
        return td_fail(err, TD_ERR_NOMEM, "%s: no memory", file);
    td_status s = td_file_read(path, TD_SP_FILE_MAX_BYTES, &bytes, &n_bytes, err);
    free(path);
    if (s) return s;
    s = load_json(dir, "tokenizer_config.json", &config, err);
    if (!s) s = load_json(dir, "added_tokens.json", &added, err);
    if (!s) {
        s = strcmp(file, "tokenizer.model") != 0
                ? td_tokenizer_from_ranks(bytes, n_bytes, config, file, ret_tokenizer, err)
                : td_tokenizer_from_sentencepiece(bytes, n_bytes, config, added, ret_tokenizer,
                                                  err);
        if (s && err) td_err_prefix(err, "%s", dir);
    }
    json_decref(config);
    json_decref(added);
    free(bytes);
    return s;
}
