/* tokenizer_encode.c - turns text into ids:
 *
 *     text   --added tokens, raw--------------------------> pieces
 *     pieces --normalizer, added tokens in its output-----> pieces
 *     pieces --pre-tokenizers------------------------------> words
 *     words  --BPE-----------------------------------------> ids
 *
 * as Hugging Face's TokenizerImpl does it: each stage sees each piece alone (so "Prepend" happens
 * once per piece between added tokens), and pieces that are tokens pass all stages unchanged. All
 * working memory belongs to the call: any number of threads may encode at once. */
#include <stdio.h>
#include <stdlib.h>

#include "common/text/tokenizer_internal.h"
#include "common/text/tokenizer_unigram.h"

struct encoding {
    struct td_tok_budget budget;
    size_t norm_at; /* the normalizer that failed */
    struct td_tok_matcher matcher;
    struct td_tok_text a, b;
    struct td_tok_buf normal, tmp;
    struct td_bpe_scratch bpe;
};

/* The cut text of e->a into e->b. */
static td_status normalize(const struct td_tokenizer *t, struct encoding *e)
{
    td_status s = TD_OK;
    bool front_lost;
    for (size_t i = 0; i < e->a.n && !s; i++) {
        const struct td_tok_piece *piece = &e->a.pieces[i];
        size_t start = e->b.buf.n;
        if (piece->id >= 0) {
            s = td_tok_text_add_piece(&e->b, start, 0, piece->id, false);
            continue;
        }
        s = td_tok_normalize(t, &e->matcher, e->a.buf.bytes + piece->start, piece->n, piece->first,
                             &e->normal, &e->tmp, &front_lost, &e->norm_at);
        if (!s) s = td_tok_buf_append(&e->b.buf, e->normal.bytes, e->normal.n);
        if (!s)
            s = td_tok_split_added(t, &t->normalized_trie, &e->b, start, e->normal.n,
                                   piece->first && !front_lost);
    }
    return s;
}

/* Names the part of the file that exceeded a limit, and the limit; never called for too many
 * tokens. */
static td_status over_budget(const struct td_tokenizer *t, const struct encoding *e, size_t n_bytes,
                             const char *part, size_t at, size_t n, struct td_err *err)
{
    bool norm = part[0] == 'n';
    char which[64];
    snprintf(which, sizeof which, "%s %zu of %zu%s%s", part, (at < n ? at : 0) + 1, n,
             norm ? " " : "", norm ? td_tok_normalizer_name(t, at) : "");
    if (e->budget.text_over)
        return td_fail(err, TD_ERR_INVALID,
                       "text of %zu bytes: %s's %s makes more than %zu bytes of it", n_bytes,
                       t->file, which, e->budget.max_text_bytes);
    if (e->budget.heap_over)
        return td_fail(err, TD_ERR_INVALID,
                       "text of %zu bytes: %s's %s needs more than %zu bytes of memory", n_bytes,
                       t->file, which, e->budget.max_heap_bytes);
    return td_fail(err, TD_ERR_INVALID,
                   "text of %zu bytes: %s's %s has a regex that needs too many steps", n_bytes,
                   t->file, which);
}

static void begin(struct encoding *e, size_t n_bytes)
{
    *e = (struct encoding){.budget = td_tok_budget_of(n_bytes), .norm_at = SIZE_MAX};
    e->a.buf.budget = e->b.buf.budget = e->normal.budget = e->tmp.budget = e->bpe.budget =
        &e->budget;
}

static void end(struct encoding *e)
{
    td_tok_matcher_free(&e->matcher);
    td_tok_text_free(&e->a);
    td_tok_text_free(&e->b);
    td_tok_buf_free(&e->normal);
    td_tok_buf_free(&e->tmp);
    td_bpe_scratch_free(&e->bpe);
    TD_ASSERT(e->budget.heap_bytes == 0); /* all of it was counted */
}

/* The text that is cut in e->a into words, *ret_words. s: what the cutting gave. */
static td_status make_words(const struct td_tokenizer *t, struct encoding *e, td_status s,
                            size_t n_bytes, const struct td_tok_text **ret_words,
                            struct td_err *err)
{
    struct td_tok_text *from = &e->b, *to = &e->a;
    if (!s) s = normalize(t, e);
    if (s == TD_ERR_LIMIT) s = over_budget(t, e, n_bytes, "normalizer", e->norm_at, t->n_norm, err);
    for (size_t i = 0; i < t->n_pre && !s; i++) {
        s = td_tok_pre_tokenize(&t->pre[i], &e->matcher, from, to);
        struct td_tok_text *swap = from;
        from = to;
        to = swap;
        if (s == TD_ERR_LIMIT) s = over_budget(t, e, n_bytes, "pre_tokenizer", i, t->n_pre, err);
    }
    *ret_words = from;
    return s;
}

static td_status encode_words(const struct td_tokenizer *t, struct encoding *e,
                              const struct td_tok_text *words, size_t max_tokens,
                              struct td_token_list *list)
{
    td_status s = TD_OK;
    size_t start = list->n;
    for (size_t i = 0; i < words->n && !s; i++) {
        const struct td_tok_piece *piece = &words->pieces[i];
        if (piece->id >= 0)
            s = td_tok_add_added(t, piece->id, start, max_tokens, list);
        else if (t->unigram)
            s = td_unigram_encode(t->unigram, &t->bpe, &e->budget, words->buf.bytes + piece->start,
                                  piece->n, max_tokens, list);
        else
            s = td_bpe_encode_word(&t->bpe, &e->bpe, words->buf.bytes + piece->start, piece->n,
                                   max_tokens, list);
    }
    return s;
}

td_status td_tok_encode_piece(const struct td_tokenizer *t, const char *text, size_t n, bool first,
                              size_t max_tokens, struct td_token_list *list, struct td_err *err)
{
    const struct td_tok_text *words;
    struct encoding e;
    begin(&e, n);
    td_status s = td_tok_buf_append(&e.a.buf, text, n);
    if (!s) s = td_tok_text_add_piece(&e.a, 0, n, -1, first);
    s = make_words(t, &e, s, n, &words, err);
    if (!s) s = encode_words(t, &e, words, max_tokens, list);
    end(&e);
    return s;
}

td_status td_tokenizer_encode(const struct td_tokenizer *t, const char *text, size_t n_bytes,
                              bool add_special, size_t max_tokens, struct td_token_list *list,
                              struct td_err *err)
{
    size_t at, n_before = list->n;
    if (n_bytes > TD_TOK_TEXT_MAX_BYTES)
        return td_fail(err, TD_ERR_LIMIT, "text has %zu bytes, at most %zu", n_bytes,
                       TD_TOK_TEXT_MAX_BYTES);
    if (!td_utf8_valid(text, n_bytes, &at))
        return td_fail(err, TD_ERR_INVALID, "text is not valid UTF-8 at byte %zu", at);
    const struct td_tok_text *words;
    struct encoding e;
    begin(&e, n_bytes);
    td_status s = td_tok_buf_append(&e.a.buf, text, n_bytes);
    if (!s) s = td_tok_split_added(t, &t->raw_trie, &e.a, 0, n_bytes, true);
    s = make_words(t, &e, s, n_bytes, &words, err);
    if (!s && add_special) s = td_token_list_add_all(list, t->before, t->n_before, max_tokens);
    if (!s) s = encode_words(t, &e, words, max_tokens, list);
    if (!s && add_special) s = td_token_list_add_all(list, t->after, t->n_after, max_tokens);
    if (s == TD_ERR_LIMIT && e.budget.heap_over)
        s = over_budget(t, &e, n_bytes, "model", 0, 1, err);
    if (s == TD_ERR_LIMIT) td_fail(err, s, "text has more than %zu tokens", max_tokens);
    if (s == TD_ERR_NOMEM) td_fail(err, s, "no memory to encode %zu bytes of text", n_bytes);
    if (s) list->n = n_before;
    end(&e);
    return s;
}

void td_token_list_free(struct td_token_list *list)
{
    free(list->ids);
    *list = (struct td_token_list){0};
}
