/* token_filter_test.c - which tokens may come: against a check of each token by itself, on random
 * words and outputs; and its limits. SEED=n repeats a run. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/random.h"
#include "common/base/sampling.h"
#include "common/engine/engine.h"
#include "common/worker/token_filter.h"

enum { MAX_VOCAB = 200, MAX_OUTPUT = 12, MAX_WORDS = 6, MAX_LEN = 4, PROMPT = 3 };

static uint64_t state = 1;

static int32_t draw(int32_t n) /* 0..n-1 */
{
    return (int32_t)td_random_index(&state, (uint32_t)n);
}

struct play {
    int32_t vocab, allowed[8], words[MAX_WORDS][MAX_LEN];
    size_t n_allowed, n_words, word_n[MAX_WORDS];
    int32_t tokens[PROMPT + MAX_OUTPUT];
    struct td_seq seq;
};

/* A vocabulary of few tokens, so that words meet outputs, or one of several words of bits. */
static void draw_play(struct play *p)
{
    *p = (struct play){.vocab = draw(2) ? 4 : 1 + draw(MAX_VOCAB)};
    p->n_allowed = draw(2) ? 0 : (size_t)(1 + draw(8));
    for (size_t i = 0; i < p->n_allowed; i++) p->allowed[i] = draw(p->vocab);
    p->n_words = (size_t)draw(MAX_WORDS + 1);
    for (size_t i = 0; i < p->n_words; i++) {
        p->word_n[i] = (size_t)(1 + draw(MAX_LEN));
        for (size_t k = 0; k < p->word_n[i]; k++) p->words[i][k] = draw(p->vocab);
    }
    int32_t n_output = draw(MAX_OUTPUT);
    for (int32_t i = 0; i < PROMPT + n_output; i++) p->tokens[i] = draw(p->vocab);
    p->seq.tokens = p->tokens;
    p->seq.n_prompt = PROMPT;
    p->seq.sched.n_tokens = PROMPT + n_output;
    p->seq.min_tokens = draw(4);
    p->seq.n_stop_tokens = draw(3);
    for (int32_t i = 0; i < p->seq.n_stop_tokens; i++) p->seq.stop_tokens[i] = draw(p->vocab);
}

/* By the definition. */
static bool may_come(const struct play *p, int32_t id)
{
    size_t n_output = (size_t)(p->seq.sched.n_tokens - PROMPT);
    bool is_allowed = p->n_allowed == 0;
    for (size_t i = 0; i < p->n_allowed; i++) is_allowed |= p->allowed[i] == id;
    for (int32_t i = 0; i < p->seq.n_stop_tokens; i++)
        if (p->seq.stop_tokens[i] == id && n_output < (size_t)p->seq.min_tokens) return false;
    for (size_t i = 0; i < p->n_words; i++) {
        size_t n = p->word_n[i] - 1;
        bool is_met = n <= n_output && p->words[i][n] == id;
        for (size_t k = 0; is_met && k < n; k++)
            is_met = p->tokens[PROMPT + n_output - n + k] == p->words[i][k];
        if (is_met) return false;
    }
    return is_allowed;
}

static void test_random_plays(void **unused)
{
    (void)unused;
    const char *seed = getenv("SEED");
    if (seed) state = strtoull(seed, NULL, 10);
    int n_empty = 0, n_partial = 0;
    for (int round = 0; round < 4000; round++) {
        struct play p;
        struct td_token_filter *f = NULL;
        struct td_err err = {0};
        const uint64_t *words = NULL;
        draw_play(&p);
        assert_int_equal(td_token_filter_create(p.vocab, p.allowed, p.n_allowed, &f, &err), TD_OK);
        for (size_t i = 0; i < p.n_words; i++)
            assert_int_equal(td_token_filter_forbid(f, p.words[i], p.word_n[i], &err), TD_OK);
        td_status s = td_token_filter_allowed(f, &p.seq, &words);
        int32_t n = 0;
        for (int32_t id = 0; id < p.vocab; id++) n += may_come(&p, id);
        assert_int_equal(s, n ? TD_OK : TD_ERR_NOT_FOUND);
        for (int32_t id = 0; n && id < (p.vocab + 63) / 64 * 64; id++)
            if ((words[id / 64] >> id % 64 & 1) != (id < p.vocab && may_come(&p, id)))
                fail_msg("round %d: token %d of %d", round, id, p.vocab);
        n_empty += n == 0;
        n_partial += n > 0 && n < p.vocab;
        td_token_filter_free(f);
    }
    assert_true(n_empty > 20 && n_partial > 1000);
}

static void test_limits(void **unused)
{
    (void)unused;
    struct td_token_filter *f = NULL;
    struct td_err err = {0};
    int32_t word[TD_MAX_BAD_WORD_TOKENS + 1] = {0}, outside[] = {1, 10}, below[] = {-1};
    assert_int_equal(td_token_filter_create(10, outside, 2, &f, &err), TD_ERR_INVALID);
    assert_non_null(strstr(err.msg, "allowed_token_ids has token 10, must be 0..9"));
    assert_int_equal(td_token_filter_create(10, below, 1, &f, &err), TD_ERR_INVALID);
    assert_null(f);
    assert_int_equal(td_token_filter_create(10, NULL, 0, &f, &err), TD_OK);
    assert_int_equal(td_token_filter_forbid(f, word, 0, &err), TD_ERR_INVALID);
    assert_int_equal(td_token_filter_forbid(f, word, TD_MAX_BAD_WORD_TOKENS + 1, &err),
                     TD_ERR_INVALID);
    assert_int_equal(td_token_filter_forbid(f, outside, 2, &err), TD_ERR_INVALID);
    for (int i = 0; i < TD_MAX_BAD_WORDS; i++)
        assert_int_equal(td_token_filter_forbid(f, word, TD_MAX_BAD_WORD_TOKENS, &err), TD_OK);
    assert_int_equal(td_token_filter_forbid(f, word, 2, &err), TD_ERR_INVALID);
    td_token_filter_free(f);
    td_token_filter_free(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_plays),
        cmocka_unit_test(test_limits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
