/* tokenizer_gguf.c - brings the vocabulary of a GGUF file into the form that tokenizer.json has in
 * memory.
 *
 * SentencePiece ("llama"). The file has a score for each token and no merges (tokenizer_scores.c).
 * Unknown characters become bytes.
 *
 * Byte-level ("gpt2"). The merges are there; tokenizer.ggml.pre names the expression that splits a
 * text into words. A file without that name, or with another, is refused: splits that fit no model
 * give other tokens without a word. */
#include "common/text/tokenizer_gguf.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/json.h"
#include "common/text/tokenizer_internal.h"
#include "common/text/tokenizer_sentencepiece.h"

/* The ways to cut a token in two are tried one by one, and each is hashed. */
#define TOKEN_BYTES_MAX 512
#define SPACE_MARK "\xe2\x96\x81" /* U+2581 */

/* token_type */
enum { NORMAL = 1, UNKNOWN = 2, CONTROL = 3, USER_DEFINED = 4, UNUSED = 5, BYTE = 6 };

struct load {
    const struct td_gguf *g;
    struct td_tokenizer *t;
    const struct td_gguf_value *tokens, *kinds, *scores, *merges;
    struct td_err *err;
};

/* How byte-level files split a text, by the value of tokenizer.ggml.pre. */
static const struct splitter {
    const char *name;
    const char *regex; /* NULL: that of GPT-2 */
    bool adds_bos;     /* where the file does not say */
    bool whole_words;  /* a word that is a token is taken without merging */
} splitters[] = {
#define LETTERS "[^\\r\\n\\p{L}\\p{N}]?\\p{L}+"
#define MARKED_LETTERS "[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+"
#define SPLIT(letters, punctuation, digits)                                                        \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|" letters "|" digits "| ?" punctuation "+[\\r\\n]*" SPACES
#define SPACES "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
/* Capitals, then small letters, so many of each. */
#define WORDS(capitals, small)                                                                     \
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]" capitals                          \
    "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]" small
#define ENDING "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
#define PUNCTUATION "[^\\s\\p{L}\\p{N}]"
    {"llama-bpe", SPLIT(LETTERS, PUNCTUATION, "\\p{N}{1,3}"), true, true},
    {"llama3", SPLIT(LETTERS, PUNCTUATION, "\\p{N}{1,3}"), true, true},
    {"llama-v3", SPLIT(LETTERS, PUNCTUATION, "\\p{N}{1,3}"), true, true},
    {"qwen2", SPLIT(LETTERS, PUNCTUATION, "\\p{N}"), false, false},
    {"deepseek-r1-qwen", SPLIT(LETTERS, PUNCTUATION, "\\p{N}"), false, false},
    {"qwen35", SPLIT(MARKED_LETTERS, "[^\\s\\p{L}\\p{M}\\p{N}]", "\\p{N}"), false, false},
    {"gpt-4o",
     WORDS("*", "+") ENDING "|" WORDS("+", "*") ENDING "|\\p{N}{1,3}| ?" PUNCTUATION
                                                       "+[\\r\\n/]*" SPACES,
     false, false},
    {"tekken", WORDS("*", "+") "|" WORDS("+", "*") "|\\p{N}| ?" PUNCTUATION "+[\\r\\n/]*" SPACES,
     true, true},
    {"dbrx", SPLIT(LETTERS, PUNCTUATION, "\\p{N}{1,3}"), false, false},
    {"smaug-bpe", SPLIT(LETTERS, PUNCTUATION, "\\p{N}{1,3}"), false, false},
    {"gpt-2", NULL, false, false},
    {"phi-2", NULL, false, false},
};

const char *td_gguf_splitter_name(const char *regex, bool whole_words)
{
    for (size_t i = 0; i < sizeof splitters / sizeof *splitters; i++) {
        const struct splitter *s = &splitters[i];
        bool same = regex && s->regex ? strcmp(regex, s->regex) == 0 : !regex && !s->regex;
        if (same && s->whole_words == whole_words) return s->name;
    }
    return NULL;
}

const char *td_gguf_splitter_regex(const char *name)
{
    for (size_t i = 0; i < sizeof splitters / sizeof *splitters; i++)
        if (strcmp(splitters[i].name, name) == 0) return splitters[i].regex;
    return NULL;
}

static td_status no_memory(const struct load *l)
{
    return td_fail(l->err, TD_ERR_NOMEM, "tokenizer: no memory");
}

static int32_t kind_of(const struct load *l, int32_t id)
{
    return l->kinds ? td_gguf_i32_at(l->kinds, (uint64_t)id) : NORMAL;
}

/* ---- vocabulary ------------------------------------------------------------------------------ */

static td_status check_count(const struct load *l, const struct td_gguf_value *v, const char *key)
{
    if (!v || v->n == l->tokens->n) return TD_OK;
    return td_fail(l->err, TD_ERR_CORRUPT,
                   "%s has %llu entries, must have one for each of the %llu "
                   "tokens",
                   key, (unsigned long long)v->n, (unsigned long long)l->tokens->n);
}

static td_status find_arrays(struct load *l)
{
    td_status s;
    if ((s = td_gguf_array(l->g, "tokenizer.ggml.tokens", TD_GGUF_STRING, &l->tokens, l->err)) ||
        (s = td_gguf_array(l->g, "tokenizer.ggml.token_type", TD_GGUF_I32, &l->kinds, l->err)) ||
        (s = td_gguf_array(l->g, "tokenizer.ggml.scores", TD_GGUF_F32, &l->scores, l->err)) ||
        (s = td_gguf_array(l->g, "tokenizer.ggml.merges", TD_GGUF_STRING, &l->merges, l->err)))
        return s;
    if (!l->tokens || l->tokens->n == 0 || l->tokens->n > TD_VOCAB_MAX)
        return td_fail(l->err, TD_ERR_CORRUPT,
                       "tokenizer.ggml.tokens has %llu entries, must have 1 to %d",
                       l->tokens ? (unsigned long long)l->tokens->n : 0, TD_VOCAB_MAX);
    if ((s = check_count(l, l->kinds, "tokenizer.ggml.token_type"))) return s;
    return check_count(l, l->scores, "tokenizer.ggml.scores");
}

/* Control tokens and tokens that the model's author added are cut out of a text before it is split;
 * everything is a token of the model, so that it has a text. */
static td_status add_token(struct load *l, int32_t id, struct td_gguf_text text)
{
    struct td_tokenizer *t = l->t;
    int32_t kind = kind_of(l, id);
    size_t bad;
    if (kind < NORMAL || kind > BYTE)
        return td_fail(l->err, TD_ERR_CORRUPT,
                       "tokenizer.ggml.token_type[%d] is %d, must be in %d..%d", id, kind, NORMAL,
                       BYTE);
    if (!td_utf8_valid(text.bytes, text.n, &bad))
        return td_fail(l->err, TD_ERR_UNSUPPORTED,
                       "tokenizer.ggml.tokens[%d] is not valid UTF-8 at its byte %zu", id, bad);
    if (text.n > TOKEN_BYTES_MAX)
        return td_fail(l->err, TD_ERR_LIMIT, "tokenizer.ggml.tokens[%d] has %zu bytes, at most %d",
                       id, text.n, TOKEN_BYTES_MAX);
    if (memchr(text.bytes, '\0', text.n))
        return td_fail(l->err, TD_ERR_UNSUPPORTED, "tokenizer.ggml.tokens[%d] holds a NUL", id);
    if (text.n == 0) return TD_OK;
    bool is_added = kind == UNKNOWN || kind == CONTROL || kind == USER_DEFINED;
    struct td_vocab *v = &t->bpe.vocab;
    td_status s = td_vocab_add(v, is_added ? &v->added : &v->model, text.bytes, text.n, id,
                               "tokenizer.ggml.tokens", l->err);
    if (s || !is_added) return s;
    bool special = kind != USER_DEFINED;
    t->added[t->n_added++] = (struct td_tok_added){.id = id, .special = special};
    v->tokens[id].special = special;
    return TD_OK;
}

static td_status add_tokens(struct load *l)
{
    const uint8_t *at = NULL;
    l->t->added = calloc((size_t)l->tokens->n, sizeof *l->t->added);
    if (!l->t->added) return no_memory(l);
    td_status s = TD_OK;
    for (uint64_t i = 0; i < l->tokens->n && !s; i++)
        s = add_token(l, (int32_t)i, td_gguf_next(l->tokens, &at));
    return s;
}

/* ---- merges ---------------------------------------------------------------------------------- */

static td_status merge_by_score(struct load *l)
{
    if (!l->scores) return td_fail(l->err, TD_ERR_CORRUPT, "tokenizer.ggml.scores is missing");
    struct td_scored_piece *pieces = calloc((size_t)l->tokens->n, sizeof *pieces);
    size_t n = 0;
    if (!pieces) return no_memory(l);
    td_status s = TD_OK;
    for (uint64_t i = 0; i < l->tokens->n && !s; i++) {
        float score = td_gguf_f32_at(l->scores, i);
        if (score != score)
            s = td_fail(l->err, TD_ERR_CORRUPT, "tokenizer.ggml.scores[%llu] is no number",
                        (unsigned long long)i);
        if (kind_of(l, (int32_t)i) == NORMAL)
            pieces[n++] = (struct td_scored_piece){(int32_t)i, score};
    }
    if (!s && td_bpe_merge_by_score(&l->t->bpe, pieces, n)) s = no_memory(l);
    free(pieces);
    return s;
}

/* "a b": two tokens, cut at the first space behind the first byte. */
static td_status add_merge(struct load *l, size_t at, struct td_gguf_text text,
                           struct td_tok_buf *joined)
{
    struct td_vocab *v = &l->t->bpe.vocab;
    const char *space = text.n > 1 ? memchr(text.bytes + 1, ' ', text.n - 1) : NULL;
    if (!space)
        return td_fail(l->err, TD_ERR_CORRUPT,
                       "tokenizer.ggml.merges[%zu] must be two texts with a space between", at);
    size_t n_left = (size_t)(space - text.bytes), n_right = text.n - n_left - 1;
    joined->n = 0;
    if (td_tok_buf_append(joined, text.bytes, n_left) ||
        td_tok_buf_append(joined, space + 1, n_right))
        return no_memory(l);
    int32_t left = td_vocab_find(v, &v->model, text.bytes, n_left),
            right = td_vocab_find(v, &v->model, space + 1, n_right),
            both = td_vocab_find(v, &v->model, joined->bytes, joined->n);
    if (left < 0 || right < 0 || both < 0)
        return td_fail(l->err, TD_ERR_CORRUPT,
                       "tokenizer.ggml.merges[%zu]: \"%.*s\" or one of its parts is no token", at,
                       text.n < 60 ? (int)text.n : 60, text.bytes);
    td_bpe_add_merge(&l->t->bpe, left, right, (uint32_t)at, both);
    return TD_OK;
}

static td_status merge_by_list(struct load *l)
{
    if (!l->merges) return td_fail(l->err, TD_ERR_CORRUPT, "tokenizer.ggml.merges is missing");
    if (l->merges->n > 2 * (uint64_t)TD_VOCAB_MAX)
        return td_fail(l->err, TD_ERR_LIMIT, "tokenizer.ggml.merges has %llu entries, at most %d",
                       (unsigned long long)l->merges->n, 2 * TD_VOCAB_MAX);
    if (td_bpe_reserve_merges(&l->t->bpe, (size_t)l->merges->n)) return no_memory(l);
    struct td_tok_buf joined = {0};
    const uint8_t *at = NULL;
    td_status s = TD_OK;
    for (uint64_t i = 0; i < l->merges->n && !s; i++)
        s = add_merge(l, (size_t)i, td_gguf_next(l->merges, &at), &joined);
    td_tok_buf_free(&joined);
    return s;
}

/* ---- the steps around the merges ------------------------------------------------------------- */

typedef td_status (*part_fn)(struct td_tokenizer *t, const json_t *json, struct td_err *err);

/* A component as tokenizer.json would have it; takes `json`. */
static td_status set_part(struct load *l, part_fn parse, json_t *json)
{
    if (!json) return no_memory(l);
    td_status s = parse(l->t, json, l->err);
    json_decref(json);
    return s;
}

static json_t *replace(const char *from, const char *to)
{
    return json_pack("{s:s, s:{s:s}, s:s}", "type", "Replace", "pattern", "String", from, "content",
                     to);
}

static td_status set_sentencepiece(struct load *l)
{
    bool prefix = true;
    td_status s = td_gguf_bool(l->g, "tokenizer.ggml.add_space_prefix", &prefix, NULL, l->err);
    if (s) return s;
    if (prefix && (s = set_part(l, td_tok_parse_normalizer,
                                json_pack("{s:s, s:s}", "type", "Prepend", "prepend", SPACE_MARK))))
        return s;
    if ((s = set_part(l, td_tok_parse_normalizer, replace(" ", SPACE_MARK)))) return s;
    return td_tok_sp_decoder(l->t, prefix, l->err);
}

static td_status set_byte_level(struct load *l, const struct splitter *splitter)
{
    td_status s = TD_OK;
    if (splitter->regex)
        s = set_part(l, td_tok_parse_pre_tokenizer,
                     json_pack("{s:s, s:{s:s}, s:s, s:b}", "type", "Split", "pattern", "Regex",
                               splitter->regex, "behavior", "Isolated", "invert", 0));
    if (!s)
        s = set_part(l, td_tok_parse_pre_tokenizer,
                     json_pack("{s:s, s:b, s:b, s:b}", "type", "ByteLevel", "add_prefix_space", 0,
                               "trim_offsets", 1, "use_regex", splitter->regex == NULL));
    l->t->bpe.ignore_merges = splitter->whole_words;
    return s ? s : set_part(l, td_tok_parse_decoder, json_pack("{s:s}", "type", "ByteLevel"));
}

/* The special token at one end of a text. */
static td_status set_end(struct load *l, const char *add_key, bool add, const char *id_key,
                         int64_t id, int32_t *ids, size_t *n)
{
    td_status s = td_gguf_bool(l->g, add_key, &add, NULL, l->err);
    if (!s) s = td_gguf_i64(l->g, id_key, -1, (int64_t)l->tokens->n - 1, &id, NULL, l->err);
    if (s || !add) return s;
    if (id < 0 || id >= (int64_t)l->tokens->n)
        return td_fail(l->err, TD_ERR_CORRUPT, "%s is missing, but %s is true", id_key, add_key);
    ids[(*n)++] = (int32_t)id;
    return TD_OK;
}

static td_status set_ends(struct load *l, bool adds_bos, bool is_sentencepiece)
{
    struct td_tokenizer *t = l->t;
    int64_t bos = is_sentencepiece ? 1 : -1, eos = is_sentencepiece ? 2 : -1;
    td_status s = set_end(l, "tokenizer.ggml.add_bos_token", adds_bos,
                          "tokenizer.ggml.bos_token_id", bos, t->before, &t->n_before);
    return s ? s
             : set_end(l, "tokenizer.ggml.add_eos_token", false, "tokenizer.ggml.eos_token_id", eos,
                       t->after, &t->n_after);
}

static td_status find_splitter(struct load *l, const struct splitter **ret)
{
    struct td_gguf_text pre;
    char shown[TD_GGUF_SHOWN];
    td_status s = td_gguf_str(l->g, "tokenizer.ggml.pre", &pre, l->err);
    if (s) return s;
    for (size_t i = 0; i < sizeof splitters / sizeof *splitters && pre.bytes; i++)
        if (td_gguf_text_is(pre, splitters[i].name)) {
            *ret = &splitters[i];
            return TD_OK;
        }
    return td_fail(l->err, TD_ERR_UNSUPPORTED,
                   "tokenizer.ggml.pre is %s, which this version does not split words by: must "
                   "be llama-bpe, qwen2, qwen35, gpt-4o, tekken, dbrx or gpt-2",
                   td_gguf_show(pre, shown));
}

static td_status load_sentencepiece(struct load *l)
{
    struct td_bpe *b = &l->t->bpe;
    int64_t unk = 0;
    td_status s = td_gguf_i64(l->g, "tokenizer.ggml.unknown_token_id", 0, (int64_t)l->tokens->n - 1,
                              &unk, NULL, l->err);
    if (!s) s = merge_by_score(l);
    if (s) return s;
    b->unk_id = td_vocab_text(&b->vocab, (int32_t)unk, NULL) ? (int32_t)unk : -1;
    b->byte_fallback = b->fuse_unk = true;
    td_bpe_index(b);
    if ((s = set_sentencepiece(l))) return s;
    return set_ends(l, true, true);
}

static td_status load_byte_level(struct load *l)
{
    const struct splitter *splitter;
    td_status s = find_splitter(l, &splitter);
    if (!s) s = merge_by_list(l);
    if (s) return s;
    l->t->bpe.unk_id = -1;
    td_bpe_index(&l->t->bpe);
    if ((s = set_byte_level(l, splitter))) return s;
    return set_ends(l, splitter->adds_bos, false);
}

static td_status load(struct load *l)
{
    struct td_gguf_text model;
    char shown[TD_GGUF_SHOWN];
    td_status s = td_gguf_str(l->g, "tokenizer.ggml.model", &model, l->err);
    if (s) return s;
    bool is_sentencepiece = td_gguf_text_is(model, "llama");
    if (!is_sentencepiece && !td_gguf_text_is(model, "gpt2"))
        return td_fail(l->err, TD_ERR_UNSUPPORTED,
                       "tokenizer.ggml.model is %s, must be llama (SentencePiece) or gpt2 "
                       "(byte-level BPE)",
                       td_gguf_show(model, shown));
    if ((s = find_arrays(l)) || (s = add_tokens(l))) return s;
    s = is_sentencepiece ? load_sentencepiece(l) : load_byte_level(l);
    return s ? s : td_tok_build_tries(l->t, l->err);
}

td_status td_tokenizer_from_gguf(const struct td_gguf *g, const char *what,
                                 struct td_tokenizer **ret_tokenizer, struct td_err *err)
{
    struct td_tokenizer *t = td_tok_create("the GGUF file");
    if (!t) return td_fail(err, TD_ERR_NOMEM, "%s: no memory", what);
    struct load l = {.g = g, .t = t, .err = err};
    td_status s = load(&l);
    if (s)
        td_tokenizer_free(t);
    else
        *ret_tokenizer = t;
    return s && err ? td_err_prefix(err, "%s", what) : s;
}
