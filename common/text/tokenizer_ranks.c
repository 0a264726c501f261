/* tokenizer_ranks.c - brings a list of tiktoken's ranks, with tokenizer_config.json beside it, into
 * the form that tokenizer.json has in memory.
 *
 * A line is "base64(bytes of a token) rank", and the rank is the id. Encoding joins, again and
 * again, the two neighbours whose bytes are the token of lowest rank, the leftmost of them; a word
 * that is a token is taken whole. So each way in which a token is two others is a merge
 * (tokenizer_scores.c), ranked as the token is. Bytes are held as the characters that byte-level
 * files have for them.
 *
 * The list says neither how a text is split into words nor which tokens follow its ranks. Both are
 * code that comes with a model, so the class that tokenizer_config.json names must be a row of
 * `classes`; others are refused by name. Special tokens in a text are tokens, as where transformers
 * calls that code, and what is between two of them passes it alone. Kimi-K2's cuts long texts into
 * pieces before it splits them (TD_PRE_RUNS). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/json.h"
#include "common/text/tokenizer_gguf.h"
#include "common/text/tokenizer_internal.h"
#include "common/text/tokenizer_sentencepiece.h"

#define TOKEN_BYTES_MAX 512 /* as in GGUF files; the longest of GPT-4 has 128 */

/* Letters without Han, capitals and then small ones. PCRE2 has no intersection of sets, so these
 * are all characters but those of the other categories. */
#define NO_HAN "\\p{N}\\p{P}\\p{S}\\p{Z}\\p{C}\\p{Han}]"
#define CAPITALS "[^\\p{Ll}" NO_HAN
#define SMALL "[^\\p{Lu}\\p{Lt}" NO_HAN
#define KIMI_WORD(capitals, small)                                                                 \
    "|[^\\r\\n\\p{L}\\p{N}]?" CAPITALS capitals SMALL small "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
#define KIMI                                                                                       \
    "\\p{Han}+" KIMI_WORD("*", "+") KIMI_WORD(                                                     \
        "+", "*") "|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

static const struct ranks_class {
    const char *name;
    const char *map;      /* what auto_map must name; NULL: the name is enough */
    const char *splitter; /* GGUF's name of its words; NULL: regex */
    const char *regex;
    bool composes;            /* texts become NFC, before special tokens are looked for */
    bool cuts_runs;           /* TD_PRE_RUNS */
    const char *const *extra; /* tokens behind the ranks */
    int32_t n_numbered;       /* and behind those <|extra_0|>, <|extra_1|>, ... */
    /* so many ids behind the ranks are tokens; <|reserved_token_ID|> where the file has no name */
    int32_t n_reserved;
    const char *const *front; /* of extra, before every text */
} classes[] = {
    /* Some versions reserve 258, of which the model has no rows for the last two. */
    {"TikTokenTokenizer", .map = "tokenization_kimi.TikTokenTokenizer", .regex = KIMI,
     .cuts_runs = true, .n_reserved = 256},
    {"QWenTokenizer", .splitter = "qwen2", .composes = true,
     .extra = (const char *const[]){"<|endoftext|>", "<|im_start|>", "<|im_end|>", NULL},
     .n_numbered = 205},
    {"ChatGLM4Tokenizer", .splitter = "llama-bpe",
     .extra = (const char *const[]){"<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>",
                                    "<eop>", "<|system|>", "<|user|>", "<|assistant|>",
                                    "<|observation|>", "<|begin_of_image|>", "<|end_of_image|>",
                                    "<|begin_of_video|>", "<|end_of_video|>", NULL},
     .front = (const char *const[]){"[gMASK]", "<sop>", NULL}},
};

struct load {
    struct td_tokenizer *t;
    const struct ranks_class *class;
    const json_t *config;
    int32_t n_ranks;
    size_t added_capacity;
    struct td_err *err;
};

static td_status no_memory(const struct load *l)
{
    return td_fail(l->err, TD_ERR_NOMEM, "no memory");
}

/* ---- what the config says -------------------------------------------------------------------- */

/* "module.Class" of auto_map's AutoTokenizer, behind "repository--" if there is one; "": none. */
static const char *mapped_class(const json_t *config)
{
    const json_t *v = json_object_get(json_object_get(config, "auto_map"), "AutoTokenizer");
    const char *text = json_string_value(json_is_array(v) ? json_array_get(v, 0) : v);
    const char *behind = text ? strstr(text, "--") : NULL;
    return behind ? behind + 2 : text ? text : "";
}

static td_status need_class(struct load *l)
{
    const char *name = "", *map = mapped_class(l->config);
    td_status s =
        td_json_str(l->config, "tokenizer_config.json", "tokenizer_class", &name, NULL, l->err);
    for (size_t i = 0; i < sizeof classes / sizeof *classes && !s; i++) {
        l->class = &classes[i];
        if (!strcmp(name, l->class->name) && (!l->class->map || !strcmp(map, l->class->map)))
            return TD_OK;
    }
    return s ? s
             : td_fail(l->err, TD_ERR_UNSUPPORTED,
                       "a list of tiktoken's ranks, which does not say how texts are split: not "
                       "known for tokenizer_class \"%.60s\" (auto_map \"%.60s\") of "
                       "tokenizer_config.json, so a tokenizer.json must be beside it",
                       name, map);
}

/* What would change ids and is not there. */
static td_status refuse_settings(const struct load *l)
{
    static const char *const keys[] = {"do_lower_case", "split_special_tokens"};
    const char *what = "tokenizer_config.json", *more = "";
    td_status s = td_json_str(l->config, what, "extra_vocab_file", &more, NULL, l->err);
    if (!s && *more)
        return td_fail(l->err, TD_ERR_UNSUPPORTED, "%s: extra_vocab_file is not supported", what);
    for (size_t i = 0; i < sizeof keys / sizeof *keys && !s; i++) {
        bool on = false;
        s = td_json_bool(l->config, what, keys[i], &on, NULL, l->err);
        if (!s && on)
            s = td_fail(l->err, TD_ERR_UNSUPPORTED, "%s: %s true is not supported", what, keys[i]);
    }
    return s;
}

/* ---- ranks ----------------------------------------------------------------------------------- */

/* The six bits of a letter of base64; -1: none. */
static int bits_of(char c)
{
    return c >= 'A' && c <= 'Z'   ? c - 'A'
           : c >= 'a' && c <= 'z' ? c - 'a' + 26
           : c >= '0' && c <= '9' ? c - '0' + 52
           : c == '+'             ? 62
           : c == '/'             ? 63
                                  : -1;
}

/* Bytes of base64 with its padding; -1: it is none, or has more than TOKEN_BYTES_MAX. */
static int decode(const char *text, size_t n, uint8_t ret[TOKEN_BYTES_MAX])
{
    size_t n_pad = n && text[n - 1] == '=' ? 1 + (n > 1 && text[n - 2] == '=') : 0;
    int n_bytes = 0;
    if (!n || n % 4 || n / 4 * 3 - n_pad > TOKEN_BYTES_MAX) return -1;
    for (size_t i = 0; i < n; i += 4) {
        uint32_t four = 0;
        for (size_t k = 0; k < 4; k++) {
            int bits = i + k < n - n_pad ? bits_of(text[i + k]) : 0;
            if (bits < 0) return -1;
            four = four << 6 | (uint32_t)bits;
        }
        for (int k = 0; k < 3 && (i + 4 < n || k < 3 - (int)n_pad); k++)
            ret[n_bytes++] = (uint8_t)(four >> (16 - 8 * k));
    }
    return n_bytes;
}

static bool parse_rank(const char *text, size_t n, int32_t *ret)
{
    int32_t rank = 0;
    if (n == 0 || n > 7) return false;
    for (size_t i = 0; i < n; i++) {
        if (text[i] < '0' || text[i] > '9') return false;
        rank = rank * 10 + (text[i] - '0');
    }
    *ret = rank;
    return rank < TD_VOCAB_MAX;
}

static td_status add_line(struct load *l, const char *line, size_t n, size_t number)
{
    struct td_vocab *v = &l->t->bpe.vocab;
    uint8_t bytes[TOKEN_BYTES_MAX];
    char text[2 * TOKEN_BYTES_MAX + 4];
    const char *space = memchr(line, ' ', n);
    size_t n_token = space ? (size_t)(space - line) : n, n_text = 0;
    int32_t rank = 0;
    int n_bytes = decode(line, n_token, bytes);
    if (!space || n_bytes < 0 || !parse_rank(space + 1, n - n_token - 1, &rank))
        return td_fail(l->err, TD_ERR_CORRUPT,
                       "line %zu must be a token of 1 to %d bytes in base64, a space and a rank "
                       "below %d",
                       number, TOKEN_BYTES_MAX, TD_VOCAB_MAX);
    for (int i = 0; i < n_bytes; i++)
        n_text += (size_t)td_utf8_put(td_byte_to_cp(bytes[i]), text + n_text);
    return td_vocab_add(v, &v->model, text, n_text, rank, "ranks", l->err);
}

/* Special tokens follow the last rank, so none may be missing. */
static td_status check_ranks(const struct load *l)
{
    const struct td_vocab *v = &l->t->bpe.vocab;
    for (int32_t i = 0; i < v->n_ids; i++)
        if (!td_vocab_text(v, i, NULL))
            return td_fail(l->err, TD_ERR_CORRUPT, "rank %d is missing, the last one is %d", i,
                           v->n_ids - 1);
    for (unsigned byte = 0; byte < 256; byte++) {
        char text[4];
        size_t n = (size_t)td_utf8_put(td_byte_to_cp((uint8_t)byte), text);
        if (td_vocab_find(v, &v->model, text, n) < 0)
            return td_fail(l->err, TD_ERR_CORRUPT, "no token is the byte 0x%02x", byte);
    }
    return TD_OK;
}

static td_status add_ranks(struct load *l, const char *text, size_t n_bytes)
{
    td_status s = TD_OK;
    for (size_t at = 0, number = 1; at < n_bytes && !s; number++) {
        const char *end = memchr(text + at, '\n', n_bytes - at);
        size_t n = end ? (size_t)(end - text) - at : n_bytes - at,
               n_line = n && text[at + n - 1] == '\r' ? n - 1 : n;
        if (n_line) s = add_line(l, text + at, n_line, number);
        at += n + 1;
    }
    l->n_ranks = l->t->bpe.vocab.n_ids;
    return s ? s : check_ranks(l);
}

static td_status set_merges(struct load *l)
{
    struct td_bpe *b = &l->t->bpe;
    struct td_scored_piece *scored = calloc((size_t)l->n_ranks, sizeof *scored);
    if (!scored) return no_memory(l);
    for (int32_t i = 0; i < l->n_ranks; i++) scored[i] = (struct td_scored_piece){i, -(float)i};
    td_status s = td_bpe_merge_by_score(b, scored, (size_t)l->n_ranks);
    free(scored);
    if (s) return no_memory(l);
    b->unk_id = -1;
    b->ignore_merges = true;
    td_bpe_index(b);
    return TD_OK;
}

/* ---- tokens behind the ranks ----------------------------------------------------------------- */

static td_status add_token(struct load *l, const char *text, struct td_tok_added added)
{
    struct td_tokenizer *t = l->t;
    struct td_vocab *v = &t->bpe.vocab;
    size_t n = strlen(text);
    int32_t known = td_vocab_find(v, &v->added, text, n);
    if (added.id < l->n_ranks)
        return td_fail(l->err, TD_ERR_CORRUPT, "added token \"%.60s\" has the id %d, a rank's",
                       text, added.id);
    if (added.single_word || added.lstrip || added.rstrip)
        return td_fail(l->err, TD_ERR_UNSUPPORTED,
                       "added token \"%.60s\": single_word, lstrip and rstrip are not supported",
                       text);
    td_status s = td_vocab_add(v, &v->added, text, n, added.id, "added tokens", l->err);
    if (s) return s;
    v->tokens[added.id].special |= added.special;
    if (known >= 0) return TD_OK; /* of the class, and the file says so, too */
    if (t->n_added == l->added_capacity) {
        size_t capacity = l->added_capacity ? 2 * l->added_capacity : 256;
        struct td_tok_added *grown = realloc(t->added, capacity * sizeof *grown);
        if (!grown) return no_memory(l);
        t->added = grown;
        l->added_capacity = capacity;
    }
    added.normalized = l->class->composes;
    t->added[t->n_added++] = added;
    return TD_OK;
}

static td_status add_listed(void *ctx, const char *text, const struct td_tok_added *added)
{
    struct load *l = ctx;
    if (!*text) return td_fail(l->err, TD_ERR_INVALID, "added token %d has no text", added->id);
    return add_token(l, text, *added);
}

/* "<|extra_7|>" */
static td_status add_numbered(struct load *l, const char *name, int32_t number, int32_t id)
{
    char text[64];
    snprintf(text, sizeof text, "<|%s_%d|>", name, number);
    return add_token(l, text, (struct td_tok_added){.id = id, .special = true});
}

static td_status add_tokens(struct load *l)
{
    const json_t *decoder = json_object_get(l->config, "added_tokens_decoder");
    const struct td_vocab *v = &l->t->bpe.vocab;
    int32_t id = l->n_ranks;
    td_status s = TD_OK;
    for (const char *const *text = l->class->extra; text && *text && !s; text++, id++)
        s = add_token(l, *text, (struct td_tok_added){.id = id, .special = true});
    for (int32_t i = 0; i < l->class->n_numbered && !s; i++)
        s = add_numbered(l, "extra", i, id + i);
    if (!s && decoder && !json_is_null(decoder))
        s = td_tok_read_decoder(decoder, add_listed, l, l->err);
    for (int32_t i = l->n_ranks; i < l->n_ranks + l->class->n_reserved && !s; i++)
        if (!td_vocab_text(v, i, NULL)) s = add_numbered(l, "reserved_token", i, i);
    return s;
}

/* ---- the steps around them ------------------------------------------------------------------- */

typedef td_status (*part_fn)(struct td_tokenizer *t, const json_t *json, struct td_err *err);

/* A component as tokenizer.json would have it; takes `json`. */
static td_status set_part(struct load *l, part_fn parse, json_t *json)
{
    if (!json) return no_memory(l);
    td_status s = parse(l->t, json, l->err);
    json_decref(json);
    return s;
}

static td_status set_steps(struct load *l)
{
    const struct ranks_class *c = l->class;
    const char *regex = c->splitter ? td_gguf_splitter_regex(c->splitter) : c->regex;
    td_status s = TD_OK;
    if (c->composes) s = set_part(l, td_tok_parse_normalizer, json_pack("{s:s}", "type", "NFC"));
    if (c->cuts_runs) l->t->pre[l->t->n_pre++] = (struct td_tok_pre_op){.kind = TD_PRE_RUNS};
    if (!s)
        s = set_part(l, td_tok_parse_pre_tokenizer,
                     json_pack("{s:s, s:{s:s}, s:s, s:b}", "type", "Split", "pattern", "Regex",
                               regex, "behavior", "Isolated", "invert", 0));
    if (!s)
        s = set_part(l, td_tok_parse_pre_tokenizer,
                     json_pack("{s:s, s:b, s:b, s:b}", "type", "ByteLevel", "add_prefix_space", 0,
                               "trim_offsets", 1, "use_regex", 0));
    if (!s) s = set_part(l, td_tok_parse_decoder, json_pack("{s:s}", "type", "ByteLevel"));
    for (const char *const *text = c->front; text && *text && !s; text++)
        l->t->before[l->t->n_before++] = td_tokenizer_token_id(l->t, *text);
    return s ? s : td_tok_build_tries(l->t, l->err);
}

bool td_tok_is_ranks(const char *text, size_t n)
{
    size_t at = 0;
    while (at < n && at < 400 && text[at] > ' ' && text[at] <= 'z') at++;
    return at > 0 && at + 1 < n && text[at] == ' ' && text[at + 1] == '0' &&
           (at + 2 == n || text[at + 2] == '\n' || text[at + 2] == '\r');
}

td_status td_tokenizer_from_ranks(const char *text, size_t n_bytes, const json_t *config,
                                  const char *file, struct td_tokenizer **ret_tokenizer,
                                  struct td_err *err)
{
    struct load l = {.config = config, .err = err};
    if (config && !json_is_object(config))
        return td_fail(err, TD_ERR_INVALID, "tokenizer_config.json is no object");
    l.t = td_tok_create(file);
    td_status s = l.t ? need_class(&l) : no_memory(&l);
    if (!s) s = refuse_settings(&l);
    if (!s) s = add_ranks(&l, text, n_bytes);
    if (!s) s = set_merges(&l);
    if (!s) s = add_tokens(&l);
    if (!s) s = set_steps(&l);
    if (s && err && strncmp(err->msg, "tokenizer_config.json", 21) != 0)
        td_err_prefix(err, "%s", file);
    if (s)
        td_tokenizer_free(l.t);
    else
        *ret_tokenizer = l.t;
    return s;
}
