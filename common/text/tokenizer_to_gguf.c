/* tokenizer_to_gguf.c - a tokenizer.json as the keys of a GGUF file: tokenizer_gguf.c the other
 * way.
 *
 * GGUF knows two kinds of tokenizers, and for each the steps around the merges are fixed. So what a
 * tokenizer.json says must be one of these; anything else is refused by name, because a reader of
 * the file would split texts into other tokens without a word.
 *
 * SentencePiece files have a score for each token in place of merges: here minus the rank of the
 * first merge that makes the token. That gives the same tokens when all merges of a token have
 * ranks next to one another and every way to cut it in two is a merge, which is checked. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/gguf_write.h"
#include "common/base/json.h"
#include "common/text/tokenizer_gguf.h"
#include "common/text/tokenizer_internal.h"
#include "common/text/tokenizer_sentencepiece.h"

#define SPACE_MARK "\xe2\x96\x81" /* U+2581 */
#define FILE_BYTES_MAX ((size_t)64 << 20)

/* token_type */
enum { NORMAL = 1, UNKNOWN = 2, CONTROL = 3, USER_DEFINED = 4, UNUSED = 5, BYTE = 6 };

struct put {
    const struct td_tokenizer *t;
    struct td_gguf_writer *w;
    const char *dir;
    int32_t n_ids;
    struct td_gguf_text *texts;  /* [n_ids] */
    char (*unused)[24];          /* [n_ids] texts of ids that no token has */
    int32_t *types;              /* [n_ids] */
    struct td_bpe_merge *merges; /* [n_merges] by rank */
    size_t n_merges;
    struct td_err *err;
};

static td_status refuse(const struct put *p, const char *what)
{
    return td_fail(p->err, TD_ERR_UNSUPPORTED, "%s/tokenizer.json: %s", p->dir, what);
}

static int by_rank(const void *a, const void *b)
{
    const struct td_bpe_merge *x = a, *y = b;
    return (x->rank > y->rank) - (x->rank < y->rank);
}

static td_status collect(struct put *p)
{
    const struct td_bpe *b = &p->t->bpe;
    if (b->vocab.n_ids > p->n_ids)
        return td_fail(p->err, TD_ERR_CORRUPT,
                       "%s: tokenizer.json has token %d, vocab_size is %d by config.json", p->dir,
                       b->vocab.n_ids - 1, p->n_ids);
    p->texts = calloc((size_t)p->n_ids, sizeof *p->texts);
    p->unused = calloc((size_t)p->n_ids, sizeof *p->unused);
    p->types = calloc((size_t)p->n_ids, sizeof *p->types);
    p->merges = calloc(b->n_merges + 1, sizeof *p->merges);
    if (!p->texts || !p->unused || !p->types || !p->merges)
        return td_fail(p->err, TD_ERR_NOMEM, "%s: no memory for %d tokens", p->dir, p->n_ids);
    for (int32_t i = 0; i < p->n_ids; i++) {
        struct td_gguf_text *x = &p->texts[i];
        p->types[i] = NORMAL;
        x->bytes = td_vocab_text(&b->vocab, i, &x->n);
        if (x->bytes) continue;
        x->n = (size_t)snprintf(p->unused[i], sizeof p->unused[i], "[PAD%d]", i);
        x->bytes = p->unused[i];
        p->types[i] = UNUSED;
    }
    for (size_t i = 0; b->n_merges && i <= b->merges_mask; i++)
        if (b->merges[i].new_id >= 0) p->merges[p->n_merges++] = b->merges[i];
    qsort(p->merges, p->n_merges, sizeof *p->merges, by_rank);
    for (size_t i = 0; i < p->t->n_added; i++) {
        const struct td_tok_added *a = &p->t->added[i];
        if (a->single_word || a->lstrip || a->rstrip)
            return td_fail(
                p->err, TD_ERR_UNSUPPORTED,
                "%s/tokenizer.json: added token %d has single_word, lstrip or rstrip, for "
                "which GGUF has no words",
                p->dir, a->id);
        p->types[a->id] = a->special ? CONTROL : USER_DEFINED;
    }
    return TD_OK;
}

/* ---- byte-level ------------------------------------------------------------------------------ */

/* The one regular expression of a Split among the pre-tokenizers, NULL: none. */
static const char *split_regex(const json_t *root)
{
    const json_t *pre = json_object_get(root, "pre_tokenizer"),
                 *list = json_object_get(pre, "pretokenizers");
    const json_t *first = json_array_size(list) ? json_array_get(list, 0) : pre;
    return json_string_value(json_object_get(json_object_get(first, "pattern"), "Regex"));
}

/* Nothing but a splitting expression and the mapping of bytes to characters. */
static td_status find_splitter(const struct put *p, const json_t *root, const char **ret_name)
{
    const struct td_tokenizer *t = p->t;
    const struct td_tok_pre_op *last = &t->pre[t->n_pre - 1], *first = &t->pre[0];
    bool plain = !last->add_prefix_space && (t->n_pre == 1 ? last->split : !last->split),
         split = t->n_pre == 2 && first->kind == TD_PRE_SPLIT && !first->invert &&
                 first->behavior == TD_SPLIT_ISOLATED && split_regex(root);
    if (!plain || (t->n_pre != 1 && !split))
        return refuse(p,
                      "its pre_tokenizer is not one expression that splits words, then ByteLevel: "
                      "GGUF has no words for it");
    bool is_nfc = t->n_norm == 1 && t->norm[0].kind == TD_NORM_UNICODE && t->norm[0].compose &&
                  !t->norm[0].compat;
    if (t->n_norm && !is_nfc)
        return refuse(p, "its normalizer is not NFC: GGUF has no words for it");
    *ret_name = td_gguf_splitter_name(split ? split_regex(root) : NULL, t->bpe.ignore_merges);
    return *ret_name
               ? TD_OK
               : refuse(p, "the expression that splits words is none that GGUF has a name for "
                           "here (llama-bpe, qwen2, qwen35, gpt-4o, gpt-2)");
}

static td_status put_merges(struct put *p)
{
    size_t n_bytes = 0, at = 0;
    struct td_gguf_text *list = calloc(p->n_merges + 1, sizeof *list);
    for (size_t i = 0; i < p->n_merges; i++)
        n_bytes += p->texts[p->merges[i].key >> 32].n + p->texts[(uint32_t)p->merges[i].key].n + 1;
    char *joined = malloc(n_bytes + 1);
    if (!list || !joined) {
        free(list);
        free(joined);
        return td_fail(p->err, TD_ERR_NOMEM, "%s: no memory for %zu merges", p->dir, p->n_merges);
    }
    for (size_t i = 0; i < p->n_merges; i++) {
        struct td_gguf_text left = p->texts[p->merges[i].key >> 32],
                            right = p->texts[(uint32_t)p->merges[i].key];
        list[i] = (struct td_gguf_text){joined + at, left.n + 1 + right.n};
        memcpy(joined + at, left.bytes, left.n);
        joined[at + left.n] = ' ';
        memcpy(joined + at + left.n + 1, right.bytes, right.n);
        at += list[i].n;
    }
    td_gguf_put_texts(p->w, "tokenizer.ggml.merges", list, p->n_merges);
    free(list);
    free(joined);
    return TD_OK;
}

static td_status put_byte_level(struct put *p, const json_t *root)
{
    const char *splitter;
    td_status s = find_splitter(p, root, &splitter);
    if (s) return s;
    td_gguf_put_text(p->w, "tokenizer.ggml.model", "gpt2", 4);
    td_gguf_put_text(p->w, "tokenizer.ggml.pre", splitter, strlen(splitter));
    return put_merges(p);
}

/* ---- SentencePiece --------------------------------------------------------------------------- */

static td_status find_scores(struct put *p, float *scores)
{
    const struct td_vocab *v = &p->t->bpe.vocab;
    size_t n_ways = 0;
    int32_t last = -1;
    for (size_t i = 0; i < p->n_merges; i++) {
        int32_t id = p->merges[i].new_id;
        if (id == last) continue;
        if (scores[id] != 0)
            return td_fail(p->err, TD_ERR_UNSUPPORTED,
                           "%s/tokenizer.json: the merges of token %d are not next to one another: "
                           "scores, which GGUF has in their place, cannot say that",
                           p->dir, id);
        scores[id] = -(float)(i + 1);
        last = id;
    }
    for (int32_t i = 0; i < p->n_ids; i++)
        if (p->types[i] == NORMAL) n_ways += td_bpe_n_cuts(v, p->texts[i].bytes, p->texts[i].n);
    if (n_ways == p->n_merges) return TD_OK;
    return td_fail(p->err, TD_ERR_UNSUPPORTED,
                   "%s/tokenizer.json: %zu merges, but its tokens can be cut in two in %zu ways: "
                   "scores, which GGUF has in place of merges, would allow them all",
                   p->dir, p->n_merges, n_ways);
}

/* Whether the steps before the merges are those of SentencePiece: every space marked, and one more
 * put in front of a text. */
static bool marks_spaces(const struct td_tokenizer *t, bool *ret_prefix)
{
    const struct td_tok_norm_op *a = &t->norm[0], *b = &t->norm[t->n_norm > 1];
    *ret_prefix = t->n_norm == 2;
    if (t->n_norm == 0 && t->n_pre == 1 && t->pre[0].kind == TD_PRE_METASPACE) {
        *ret_prefix = t->pre[0].prepend != TD_PREPEND_NEVER;
        return t->pre[0].n_replacement == 3 && !memcmp(t->pre[0].replacement, SPACE_MARK, 3);
    }
    if (t->n_pre || t->n_norm < 1 || t->n_norm > 2 || b->kind != TD_NORM_REPLACE) return false;
    return (t->n_norm == 1 || a->kind == TD_NORM_PREPEND) && b->n_content == 3 &&
           memcmp(b->content, SPACE_MARK, 3) == 0;
}

static td_status put_sentencepiece(struct put *p)
{
    const struct td_tokenizer *t = p->t;
    bool prefix;
    if (!marks_spaces(t, &prefix))
        return refuse(p,
                      "its normalizer and pre_tokenizer are not those of SentencePiece: GGUF has "
                      "no words for them");
    for (int i = 0; i < 256; i++)
        if (t->bpe.byte_ids[i] >= 0) p->types[t->bpe.byte_ids[i]] = BYTE;
    if (t->bpe.unk_id >= 0) p->types[t->bpe.unk_id] = UNKNOWN;
    float *scores = calloc((size_t)p->n_ids, sizeof *scores);
    if (!scores) return td_fail(p->err, TD_ERR_NOMEM, "%s: no memory for scores", p->dir);
    td_status s = find_scores(p, scores);
    if (!s) {
        td_gguf_put_text(p->w, "tokenizer.ggml.model", "llama", 5);
        td_gguf_put_numbers(p->w, "tokenizer.ggml.scores", TD_GGUF_F32, scores, (size_t)p->n_ids);
        td_gguf_put_bool(p->w, "tokenizer.ggml.add_space_prefix", prefix);
        if (t->bpe.unk_id >= 0)
            td_gguf_put_u32(p->w, "tokenizer.ggml.unknown_token_id", (uint32_t)t->bpe.unk_id);
    }
    free(scores);
    return s;
}

/* ---- ends ------------------------------------------------------------------------------------ */

/* The special tokens that the post-processor adds: at most the first and the last token. */
static td_status put_ends(const struct put *p, int32_t bos_id, const int32_t *eos_ids,
                          int32_t n_eos)
{
    static const char *const keys[] = {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
                                       "tokenizer.ggml.eom_token_id"};
    const struct td_tokenizer *t = p->t;
    if (t->n_before > 1 || t->n_after > 1 || (t->n_after && (!n_eos || t->after[0] != eos_ids[0])))
        return refuse(p, "its post_processor adds other tokens than BOS and EOS: GGUF has no words "
                         "for it");
    if (t->n_before) bos_id = t->before[0];
    if (bos_id >= 0) td_gguf_put_u32(p->w, "tokenizer.ggml.bos_token_id", (uint32_t)bos_id);
    for (int32_t i = 0; i < n_eos && i < 3; i++)
        td_gguf_put_u32(p->w, keys[i], (uint32_t)eos_ids[i]);
    if (n_eos > 3) /* llama.cpp knows further ends by their texts alone */
        td_gguf_put_numbers(p->w, TD_GGUF_EOS_IDS, TD_GGUF_I32, eos_ids, (size_t)n_eos);
    td_gguf_put_bool(p->w, "tokenizer.ggml.add_bos_token", t->n_before > 0);
    td_gguf_put_bool(p->w, "tokenizer.ggml.add_eos_token", t->n_after > 0);
    return TD_OK;
}

static td_status put_all(struct put *p, const json_t *root)
{
    const struct td_tokenizer *t = p->t;
    td_status s = collect(p);
    if (s) return s;
    bool is_byte_level = t->n_pre > 0 && t->pre[t->n_pre - 1].kind == TD_PRE_BYTE_LEVEL;
    if (!is_byte_level && !t->bpe.byte_fallback)
        return refuse(p, "neither byte-level nor with byte_fallback: GGUF has no words for it");
    s = is_byte_level ? put_byte_level(p, root) : put_sentencepiece(p);
    if (s) return s;
    td_gguf_put_texts(p->w, "tokenizer.ggml.tokens", p->texts, (size_t)p->n_ids);
    td_gguf_put_numbers(p->w, "tokenizer.ggml.token_type", TD_GGUF_I32, p->types, (size_t)p->n_ids);
    return TD_OK;
}

td_status td_tokenizer_put_gguf(const char *dir, int32_t n_ids, int32_t bos_id,
                                const int32_t *eos_ids, int32_t n_eos, struct td_gguf_writer *w,
                                struct td_err *err)
{
    struct td_tokenizer *t = NULL;
    json_t *root = NULL;
    char path[4096];
    struct put p = {.w = w, .dir = dir, .n_ids = n_ids, .err = err};
    td_status s = td_tokenizer_load(dir, &t, err);
    if (s) return s;
    p.t = t;
    if (strcmp(t->file, "tokenizer.json") != 0) {
        s = td_fail(err, TD_ERR_UNSUPPORTED,
                    "%s: a GGUF file is not written from %s, only from a tokenizer.json", dir,
                    t->file);
        td_tokenizer_free(t);
        return s;
    }
    snprintf(path, sizeof path, "%s/tokenizer.json", dir);
    s = td_json_load_file(path, FILE_BYTES_MAX, &root, err);
    if (!s) s = put_all(&p, root);
    if (!s) s = put_ends(&p, bos_id, eos_ids, n_eos);
    json_decref(root);
    free(p.texts);
    free(p.unused);
    free(p.types);
    free(p.merges);
    td_tokenizer_free(t);
    return s;
}
