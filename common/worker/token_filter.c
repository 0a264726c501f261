/* token_filter.c - see token_filter.h. */
#include "common/worker/token_filter.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/sampling.h"
#include "common/engine/engine.h"

struct bad_word {
    int32_t ids[TD_MAX_BAD_WORD_TOKENS];
    size_t n;
};

struct td_token_filter {
    int32_t vocab;
    size_t n_words;
    uint64_t *always,
        *now;             /* [n_words] bits of the tokens that may come: as a rule; in this step */
    struct bad_word *bad; /* [TD_MAX_BAD_WORDS]; NULL: none yet */
    size_t n_bad;
};

static void set(uint64_t *words, int32_t id) { words[id / 64] |= (uint64_t)1 << id % 64; }
static void clear(uint64_t *words, int32_t id) { words[id / 64] &= ~((uint64_t)1 << id % 64); }

static td_status check_id(const struct td_token_filter *f, const char *name, int32_t id,
                          struct td_err *err)
{
    if (id >= 0 && id < f->vocab) return TD_OK;
    return td_fail(err, TD_ERR_INVALID, "sampling.%s has token %d, must be 0..%d", name, id,
                   f->vocab - 1);
}

td_status td_token_filter_create(int32_t vocab, const int32_t *allowed, size_t n_allowed,
                                 struct td_token_filter **ret_filter, struct td_err *err)
{
    struct td_token_filter *f = calloc(1, sizeof *f);
    if (!f) return td_fail(err, TD_ERR_NOMEM, "no memory for allowed tokens");
    f->vocab = vocab;
    f->n_words = ((size_t)vocab + 63) / 64;
    f->always = calloc(f->n_words, sizeof *f->always);
    f->now = calloc(f->n_words, sizeof *f->now);
    td_status s = TD_OK;
    if (!f->always || !f->now) s = td_fail(err, TD_ERR_NOMEM, "no memory for allowed tokens");
    for (int32_t id = 0; !s && !n_allowed && id < vocab; id++) set(f->always, id);
    for (size_t i = 0; !s && i < n_allowed; i++) {
        s = check_id(f, "allowed_token_ids", allowed[i], err);
        if (!s) set(f->always, allowed[i]);
    }
    if (s)
        td_token_filter_free(f);
    else
        *ret_filter = f;
    return s;
}

td_status td_token_filter_forbid(struct td_token_filter *f, const int32_t *word, size_t n,
                                 struct td_err *err)
{
    if (n < 1 || n > TD_MAX_BAD_WORD_TOKENS)
        return td_fail(err, TD_ERR_INVALID, "sampling.bad_words has a word of %zu tokens, limit %d",
                       n, TD_MAX_BAD_WORD_TOKENS);
    if (f->n_bad == TD_MAX_BAD_WORDS)
        return td_fail(err, TD_ERR_INVALID, "sampling.bad_words has more than %d words",
                       TD_MAX_BAD_WORDS);
    for (size_t i = 0; i < n; i++) {
        td_status s = check_id(f, "bad_words", word[i], err);
        if (s) return s;
    }
    if (n == 1) { /* it never comes */
        clear(f->always, word[0]);
        return TD_OK;
    }
    if (!f->bad) f->bad = calloc(TD_MAX_BAD_WORDS, sizeof *f->bad);
    if (!f->bad) return td_fail(err, TD_ERR_NOMEM, "no memory for bad_words");
    struct bad_word *b = &f->bad[f->n_bad++];
    memcpy(b->ids, word, n * sizeof *word);
    b->n = n;
    return TD_OK;
}

void td_token_filter_free(struct td_token_filter *f)
{
    if (!f) return;
    free(f->always);
    free(f->now);
    free(f->bad);
    free(f);
}

td_status td_token_filter_allowed(void *ctx, const struct td_seq *seq, const uint64_t **ret_words)
{
    struct td_token_filter *f = ctx;
    const int32_t *end = seq->tokens + seq->sched.n_tokens;
    size_t n_output = (size_t)(seq->sched.n_tokens - seq->n_prompt);
    memcpy(f->now, f->always, f->n_words * sizeof *f->now);
    for (size_t i = 0; i < f->n_bad; i++) {
        const struct bad_word *b = &f->bad[i];
        size_t n = b->n - 1;
        if (n <= n_output && !memcmp(end - n, b->ids, n * sizeof *end)) clear(f->now, b->ids[n]);
    }
    if (n_output < (size_t)seq->min_tokens)
        for (int32_t i = 0; i < seq->n_stop_tokens; i++) clear(f->now, seq->stop_tokens[i]);
    *ret_words = f->now;
    for (size_t i = 0; i < f->n_words; i++)
        if (f->now[i]) return TD_OK;
    return TD_ERR_NOT_FOUND;
}
