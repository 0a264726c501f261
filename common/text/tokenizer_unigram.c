/* tokenizer_unigram.c - Viterbi's algorithm over a trie of the pieces: for each place of the text,
 * in order, the best way to come there, by the sum of its pieces' scores.
 *
 * Sums are floats, and of equal ways the one that was found first stays, so that near ties end as
 * in the sentencepiece library (0.2.3, whose scores of user-defined pieces and unknown characters
 * these are, too). A user-defined piece has a tenth for each byte but one, whatever the file says:
 * no logarithm of a probability is higher. An unknown character has the lowest score less 10. */
#include "common/text/tokenizer_unigram.h"

#include <float.h>
#include <stdlib.h>

#define UNKNOWN_PENALTY 10.0f

struct td_unigram {
    struct td_tok_trie pieces; /* ends in a piece's id */
    float *scores;             /* by id */
    float unknown_score;
};

struct place {
    float score;
    int32_t id;    /* the last piece of the best way; -1: an unknown character */
    int32_t start; /* where it begins; -1: there is no way yet */
};

struct td_unigram *td_unigram_create(const struct td_sp_file *file)
{
    struct td_unigram *u = calloc(1, sizeof *u);
    if (!u) return NULL;
    u->scores = calloc(file->n_pieces, sizeof *u->scores);
    float lowest = FLT_MAX;
    td_status s = u->scores ? TD_OK : TD_ERR_NOMEM;
    for (size_t i = 0; i < file->n_pieces && !s; i++) {
        const struct td_sp_piece *p = &file->pieces[i];
        u->scores[i] = p->kind == TD_SP_USER_DEFINED ? (float)(0.1 * (double)(p->n - 1)) : p->score;
        if (p->kind == TD_SP_NORMAL && p->score < lowest) lowest = p->score;
        if (p->kind == TD_SP_NORMAL || p->kind == TD_SP_USER_DEFINED)
            s = td_tok_trie_add(&u->pieces, p->text, p->n, (int32_t)i);
    }
    u->unknown_score = lowest - UNKNOWN_PENALTY;
    if (!s) return u;
    td_unigram_free(u);
    return NULL;
}

void td_unigram_free(struct td_unigram *u)
{
    if (!u) return;
    td_tok_trie_free(&u->pieces);
    free(u->scores);
    free(u);
}

/* Pieces that begin at `at`, a place that a way leads to; a character has n_char bytes. */
static void extend(const struct td_unigram *u, const char *text, size_t n, size_t at, size_t n_char,
                   struct place *places)
{
    float here = places[at].score;
    bool has_char = false;
    int32_t node = 0;
    for (size_t end = at; end < n && u->pieces.n;) {
        node = td_tok_trie_child(&u->pieces, node, (uint8_t)text[end++]);
        if (node < 0) break;
        int32_t id = u->pieces.nodes[node].added;
        if (id < 0) continue;
        struct place *to = &places[end];
        float sum = u->scores[id] + here;
        if (to->start < 0 || sum > to->score) *to = (struct place){sum, id, (int32_t)at};
        has_char = has_char || end - at == n_char;
    }
    struct place *to = &places[at + n_char];
    float sum = u->unknown_score + here;
    if (!has_char && (to->start < 0 || sum > to->score)) *to = (struct place){sum, -1, (int32_t)at};
}

/* The tokens of an unknown character. */
static td_status add_unknown(const struct td_bpe *b, const char *text, size_t n, bool again,
                             size_t max_tokens, struct td_token_list *list)
{
    td_status s = TD_OK;
    if (!b->byte_fallback)
        return again ? TD_OK : td_token_list_add_all(list, &b->unk_id, 1, max_tokens);
    for (size_t i = 0; i < n && !s; i++)
        s = td_token_list_add_all(list, &b->byte_ids[(uint8_t)text[i]], 1, max_tokens);
    return s;
}

/* Turns the way to the end round: each place's `start` becomes where its piece ends. */
static void reverse(struct place *places, size_t n)
{
    int32_t end = -1, id = -1;
    for (int32_t at = (int32_t)n; at >= 0;) {
        struct place p = places[at];
        places[at].start = end;
        places[at].id = id;
        end = at;
        id = p.id;
        at = at ? p.start : -1;
    }
}

td_status td_unigram_encode(const struct td_unigram *u, const struct td_bpe *b,
                            struct td_tok_budget *budget, const char *text, size_t n,
                            size_t max_tokens, struct td_token_list *list)
{
    td_status s = TD_OK;
    size_t bytes = (n + 1) * sizeof(struct place);
    uint32_t cp;
    struct place *places = td_tok_grow(budget, NULL, 0, bytes, &s);
    if (!places) return s;
    for (size_t i = 0; i <= n; i++) places[i] = (struct place){0, -1, -1};
    for (size_t at = 0; at < n;) {
        int len = td_utf8_next(text + at, n - at, &cp);
        size_t n_char = len > 0 ? (size_t)len : 1; /* not reached: texts are valid */
        extend(u, text, n, at, n_char, places);
        at += n_char;
    }
    reverse(places, n);
    bool after_unknown = false;
    for (size_t at = 0; at < n && !s;) {
        const struct place *p = &places[at];
        size_t end = (size_t)p->start;
        s = p->id >= 0 ? td_token_list_add_all(list, &p->id, 1, max_tokens)
                       : add_unknown(b, text + at, end - at, after_unknown, max_tokens, list);
        after_unknown = p->id < 0;
        at = end;
    }
    td_tok_release(budget, places, bytes);
    return s;
}
