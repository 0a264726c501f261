/* tokenizer_scores.c - merges of a vocabulary that has scores in their place, as SentencePiece's:
 * encoding joins, again and again, the two neighbours whose concatenation is the piece with the
 * highest score, the leftmost of equal ones. That is BPE with a merge for every way in which a
 * piece is two others, ranked by the piece's score: equal scores, equal ranks. */
#include <stdlib.h>

#include "common/text/tokenizer_sentencepiece.h"

static int by_score(const void *a, const void *b)
{
    const struct td_scored_piece *x = a, *y = b;
    if (x->score != y->score) return x->score > y->score ? -1 : 1;
    return (x->id > y->id) - (x->id < y->id);
}

/* Calls td_bpe_add_merge for each way in which the text is two tokens; b NULL: counts them only. */
static size_t merges_of(const struct td_vocab *v, const char *text, size_t n, struct td_bpe *b,
                        uint32_t rank, int32_t id)
{
    size_t n_merges = 0;
    uint32_t cp;
    for (size_t at = 0; at < n;) {
        at += (size_t)td_utf8_next(text + at, n - at, &cp);
        if (at >= n) break;
        int32_t left = td_vocab_find(v, &v->model, text, at),
                right = td_vocab_find(v, &v->model, text + at, n - at);
        if (left < 0 || right < 0) continue;
        n_merges++;
        if (b) td_bpe_add_merge(b, left, right, rank, id);
    }
    return n_merges;
}

size_t td_bpe_n_cuts(const struct td_vocab *v, const char *text, size_t n)
{
    return merges_of(v, text, n, NULL, 0, 0);
}

td_status td_bpe_merge_by_score(struct td_bpe *b, struct td_scored_piece *pieces, size_t n)
{
    const struct td_vocab *v = &b->vocab;
    const char *text;
    size_t n_merges = 0, n_text;
    for (size_t i = 0; i < n; i++)
        if ((text = td_vocab_text(v, pieces[i].id, &n_text)))
            n_merges += td_bpe_n_cuts(v, text, n_text);
    qsort(pieces, n, sizeof *pieces, by_score);
    td_status s = td_bpe_reserve_merges(b, n_merges);
    for (size_t i = 0, rank = 0; i < n && !s; i++) {
        if (i > 0 && pieces[i].score != pieces[i - 1].score) rank++;
        if ((text = td_vocab_text(v, pieces[i].id, &n_text)))
            merges_of(v, text, n_text, b, (uint32_t)rank, pieces[i].id);
    }
    return s;
}
