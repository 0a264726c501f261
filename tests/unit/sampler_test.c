/* sampler_test.c - the sampler against a plain one (full stable sort, libm, doubles), its
 * published vectors, its distribution and its bits. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/model/sampler.h"
#include "tests/unit/sample_rows.h"

#define LEN(a) ((int)(sizeof(a) / sizeof *(a)))

static const struct td_sampling PLAIN = {
    .temperature = 1, .top_p = 1, .repetition_penalty = 1, .n_logprobs = -1};

/* ---- the plain sampler ----------------------------------------------------------------------- */

struct ref_item {
    double x;
    int id;
};

static int by_x(const void *a, const void *b)
{
    const struct ref_item *p = a, *q = b;
    if (p->x != q->x) return p->x > q->x ? -1 : 1;
    return p->id - q->id;
}

static double ref_adjusted(const struct td_sampling *s, double x, int i, const int32_t *tokens,
                           int n_tokens, int n_prompt)
{
    for (int b = 0; b < s->n_logit_bias; b++)
        if (s->logit_bias[b].token == i) x += (double)s->logit_bias[b].bias;
    int in_prompt = 0, in_output = 0;
    for (int t = 0; t < n_tokens; t++)
        if (tokens[t] == i) *(t < n_prompt ? &in_prompt : &in_output) += 1;
    if ((in_prompt || in_output) && s->repetition_penalty != 1)
        x = x > 0 ? x / (double)s->repetition_penalty : x * (double)s->repetition_penalty;
    if (in_output) x = x - (double)s->presence_penalty - (double)s->frequency_penalty * in_output;
    return x;
}

/* raw: the n finite logits before adjusting, the greatest first; logit: the sampled token's. */
static void ref_logprobs(const struct td_sampling *s, double logit, const struct ref_item *raw,
                         int n, struct td_sampled *out)
{
    double z = 0;
    for (int i = 0; i < n; i++) z += exp(raw[i].x - raw[0].x);
    out->n_top = n < s->n_logprobs ? n : s->n_logprobs;
    for (int i = 0; i < out->n_top; i++) {
        out->top_tokens[i] = raw[i].id;
        out->top_logprobs[i] = (float)(raw[i].x - raw[0].x - log(z));
    }
    out->logprob = (float)(logit - raw[0].x - log(z));
}

static void ref_sample(const struct td_sampling *s, const float *logits, int vocab,
                       const int32_t *tokens, int n_tokens, int n_prompt, struct td_sampled *out)
{
    struct ref_item *it = malloc((size_t)vocab * sizeof *it),
                    *raw = malloc((size_t)vocab * sizeof *raw);
    double *w = malloc((size_t)vocab * sizeof *w);
    int n = 0;

    for (int i = 0; i < vocab; i++) {
        double x = logits[i];
        if (!isfinite(x)) continue;
        raw[n] = (struct ref_item){x, i};
        it[n++] = (struct ref_item){ref_adjusted(s, x, i, tokens, n_tokens, n_prompt), i};
    }
    qsort(it, (size_t)n, sizeof *it, by_x);
    qsort(raw, (size_t)n, sizeof *raw, by_x);

    int kept = n;
    out->token = it[0].id;
    if (s->temperature > 0) {
        for (int i = 0; i < n; i++) w[i] = exp((it[i].x - it[0].x) / (double)s->temperature);
        while (w[kept - 1] < (double)s->min_p) kept--;
        if (s->top_k > 0 && kept > s->top_k) kept = s->top_k;
        double total = 0, sum = 0;
        for (int i = 0; i < kept; i++) total += w[i];
        if (s->top_p < 1) {
            int i = 0;
            while (i < kept && (i == 0 || sum < (double)s->top_p * total)) sum += w[i++];
            kept = i;
            total = sum;
        }
        uint32_t counter[4] = {(uint32_t)n_tokens, 0, 0, 0},
                 key[2] = {(uint32_t)s->seed, (uint32_t)(s->seed >> 32)}, r[4];
        td_philox4x32(counter, key, r);
        double at = (r[1] * 0x1p-32 + r[0] * 0x1p-64) * total;
        sum = 0;
        int i = 0;
        while (i < kept - 1 && sum + w[i] <= at) sum += w[i++];
        out->token = it[i].id;
    }
    if (s->n_logprobs >= 0) ref_logprobs(s, (double)logits[out->token], raw, n, out);
    free(it);
    free(raw);
    free(w);
}

static float relative(float a, float b)
{
    return a == b ? 0 : fabsf(a - b) / (1e-30f + fmaxf(fabsf(a), fabsf(b)));
}

static void same_logprobs(const struct td_sampled *got, const struct td_sampled *want)
{
    assert_int_equal(got->n_top, want->n_top);
    assert_true(relative(got->logprob, want->logprob) < 3e-7f ||
                fabsf(got->logprob - want->logprob) < 1e-12f);
    for (int i = 0; i < got->n_top; i++) {
        assert_int_equal(got->top_tokens[i], want->top_tokens[i]);
        assert_true(relative(got->top_logprobs[i], want->top_logprobs[i]) < 3e-7f ||
                    fabsf(got->top_logprobs[i] - want->top_logprobs[i]) < 1e-12f);
    }
}

static void differs(int round, int vocab, int kind, const struct td_sampling *s, int32_t got,
                    int32_t want)
{
    fail_msg("round %d vocab %d kind %d T %g k %d p %g min_p %g: token %d, reference %d", round,
             vocab, kind, (double)s->temperature, s->top_k, (double)s->top_p, (double)s->min_p, got,
             want);
}

static void equals_reference(void **state)
{
    (void)state;
    static const int vocabs[] = {1, 2, 3, 7, 24, 25, 26, 100, 999, 4096};
    static const float temps[] = {0, 1e-6f, 0.3f, 0.7f, 1, 1.5f, 100};
    static const float top_ps[] = {1, 1, 0.95f, 0.9f, 0.5f, 0.1f, 1e-6f};
    static const float min_ps[] = {0, 0, 0, 0.02f, 0.3f, 1};
    static const int logprobs[] = {-1, 0, 1, 5, 20};
    int n_checked = 0, n_sampled = 0, n_rounds = getenv("TANDEM_TEST_SHORT") ? 2000 : 8000;

    rng_state = 2024;
    for (int round = 0; round < n_rounds; round++) {
        int vocab = vocabs[below(LEN(vocabs))], kind = below(ROW_NOTHING);
        int top_ks[] = {0, 0, 1, 2, 5, 50, vocab - 1, vocab, vocab + 9};
        float *l = malloc((size_t)vocab * sizeof *l);
        int32_t tokens[64];
        struct td_logit_bias bias[8];
        struct td_sampler *sm = NULL;
        struct td_err err = {0};

        fill_row(l, vocab, (enum row_kind)kind);
        int n_tokens = below(LEN(tokens)), n_prompt = n_tokens == 0 ? 0 : below(n_tokens + 1);
        for (int i = 0; i < n_tokens; i++) tokens[i] = below(vocab < 20 ? vocab : 20);
        struct td_sampling s = {.temperature = temps[below(LEN(temps))],
                                .top_k = top_ks[below(LEN(top_ks))],
                                .top_p = top_ps[below(LEN(top_ps))],
                                .min_p = min_ps[below(LEN(min_ps))],
                                .repetition_penalty = below(2) ? 1.0f : 0.5f + (float)unit(),
                                .presence_penalty = below(2) ? 0.0f : (float)(4 * unit() - 2),
                                .frequency_penalty = below(2) ? 0.0f : (float)(4 * unit() - 2),
                                .seed = rng(),
                                .n_logprobs = logprobs[below(LEN(logprobs))],
                                .logit_bias = bias,
                                .n_logit_bias = below(2) ? 0 : below(LEN(bias) + 1)};
        if (s.top_k < 0) s.top_k = 0;
        for (int i = 0; i < s.n_logit_bias; i++)
            bias[i] = (struct td_logit_bias){below(vocab), (float)(20 * unit() - 10)};
        assert_int_equal(td_sampling_check(&s, vocab, &err), TD_OK);
        assert_int_equal(td_sampler_create(vocab, &sm, &err), TD_OK);

        float *copy = malloc((size_t)vocab * sizeof *copy);
        memcpy(copy, l, (size_t)vocab * sizeof *l);
        for (int draw = 0; draw < 4; draw++) { /* the same scratch again: nothing may be left
                                                  in it */
            struct td_sampled got = {.token = -7}, want = {.token = -1};
            s.seed += (uint64_t)draw;
            assert_int_equal(td_sample(sm, &s, l, tokens, n_tokens, n_prompt, &got), TD_OK);
            ref_sample(&s, l, vocab, tokens, n_tokens, n_prompt, &want);
            if (got.token != want.token) differs(round, vocab, kind, &s, got.token, want.token);
            n_sampled += got.token != 0;
            if (s.n_logprobs >= 0) same_logprobs(&got, &want);
            n_checked++;
        }
        assert_memory_equal(copy, l, (size_t)vocab * sizeof *l);
        free(copy);
        free(l);
        td_sampler_destroy(sm);
    }
    assert_int_equal(n_checked, 4 * n_rounds);
    assert_true(n_sampled > n_rounds * 5 / 4);
}

/* ---- vectors, distribution, bits ------------------------------------------------------------- */

static void philox_vectors(void **state)
{
    (void)state;
    /* Random123 1.x, kat_vectors, philox4x32 10 */
    static const struct {
        uint32_t counter[4], key[2], out[4];
    } kat[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (int i = 0; i < LEN(kat); i++) {
        uint32_t out[4];
        td_philox4x32(kat[i].counter, kat[i].key, out);
        assert_memory_equal(out, kat[i].out, sizeof out);
    }
}

/* 30,000 positions of one seed; chi-square against p[] over cells with p > 0. Returns the
 * statistic, sets *ret_dof. */
static double chi_square(const struct td_sampling *s, const float *l, int vocab, const double *p,
                         int *ret_dof)
{
    enum { N = 30000 };
    struct td_sampler *sm = NULL;
    int seen[64] = {0};
    double chi = 0;

    assert_int_equal(td_sampler_create(vocab, &sm, NULL), TD_OK);
    for (int i = 0; i < N; i++) {
        struct td_sampled got;
        assert_int_equal(td_sample(sm, s, l, NULL, i, 0, &got), TD_OK);
        seen[got.token]++;
    }
    td_sampler_destroy(sm);
    *ret_dof = -1;
    for (int i = 0; i < vocab; i++) {
        if (p[i] == 0) {
            assert_int_equal(seen[i], 0);
            continue;
        }
        chi += (seen[i] - N * p[i]) * (seen[i] - N * p[i]) / (N * p[i]);
        *ret_dof += 1;
    }
    return chi;
}

static void draws_follow_distribution(void **state)
{
    (void)state;
    /* weights 16:8:8:4:2:1:1 in a mixed order, and what is left of them by each truncation */
    const float ln2 = 0.69314718f;
    const float l[8] = {1 * ln2, 4 * ln2, 0, -INFINITY, 3 * ln2, 2 * ln2, 3 * ln2, 0};
    static const struct {
        const char *name;
        float temperature, top_p, min_p;
        int top_k;
        double w[8];
    } rows[] = {
        {"temperature 1", 1, 1, 0, 0, {2, 16, 1, 0, 8, 4, 8, 1}},
        {"temperature 0.5", 0.5f, 1, 0, 0, {4, 256, 1, 0, 64, 16, 64, 1}},
        {"temperature 2", 2, 1, 0, 0, {1.4142135, 4, 1, 0, 2.8284271, 2, 2.8284271, 1}},
        {"top_k 2 cuts a tie by id", 1, 1, 0, 2, {0, 16, 0, 0, 8, 0, 0, 0}},
        /* 24 / 40 = 0.6 is not enough */
        {"top_p 0.6", 1, 0.601f, 0, 0, {0, 16, 0, 0, 8, 0, 8, 0}},
        {"top_p 0.59", 1, 0.59f, 0, 0, {0, 16, 0, 0, 8, 0, 0, 0}},
        {"top_p of what top_k left", 1, 0.8f, 0, 3, {0, 16, 0, 0, 8, 0, 8, 0}},
        {"min_p 0.2", 1, 1, 0.2f, 0, {0, 16, 0, 0, 8, 4, 8, 0}},
    };
    for (int i = 0; i < LEN(rows); i++) {
        struct td_sampling s = PLAIN;
        s.temperature = rows[i].temperature;
        s.top_p = rows[i].top_p;
        s.min_p = rows[i].min_p;
        s.top_k = rows[i].top_k;
        double p[8], total = 0;
        for (int t = 0; t < 8; t++) total += rows[i].w[t];
        for (int t = 0; t < 8; t++) p[t] = rows[i].w[t] / total;
        for (uint64_t seed = 1; seed <= (getenv("TANDEM_TEST_SHORT") ? 1 : 3); seed++) {
            /* what is drawn is the same in every build */
            int dof = 0;
            s.seed = seed * 0x100000001ull;
            double chi = chi_square(&s, l, 8, p, &dof);
            if (!(chi < 28)) /* 6 degrees of freedom: 1 in 10,000; seeds are fixed */
                fail_msg("%s, seed %d: chi-square %g with %d degrees of freedom", rows[i].name,
                         (int)seed, chi, dof);
        }
    }
    /* the check itself can fail: the same draws against weights 16:8:8:4:2:1:1 at a temperature
       of 1.05 */
    struct td_sampling s = PLAIN;
    s.temperature = 1.05f;
    double p[8];
    int dof = 0;
    for (int t = 0; t < 8; t++) p[t] = rows[0].w[t] / 40;
    assert_true(chi_square(&s, l, 8, p, &dof) > 28);
}

static void keyed_by_seed_and_position(void **state)
{
    (void)state;
    enum { V = 512, N = 400 };
    static float l[V];
    int32_t tokens[N] = {0};
    struct td_sampler *a = NULL, *b = NULL;
    struct td_sampling s = PLAIN;
    int n_new_position = 0, n_new_seed = 0, n_new_high_seed = 0;

    rng_state = 5;
    fill_row(l, V, ROW_GAUSS);
    assert_int_equal(td_sampler_create(V, &a, NULL), TD_OK);
    assert_int_equal(td_sampler_create(V, &b, NULL), TD_OK);
    for (int i = 0; i < N; i++) {
        struct td_sampled x, y, z;
        s.seed = 77;
        assert_int_equal(td_sample(a, &s, l, tokens, i, 0, &x), TD_OK);
        /* another worker, another split of the sequence */
        assert_int_equal(td_sample(b, &s, l, tokens, i, i, &y), TD_OK);
        assert_int_equal(x.token, y.token);
        assert_int_equal(td_sample(b, &s, l, tokens, i + 1, 0, &z), TD_OK);
        n_new_position += z.token != x.token;
        s.seed = 78;
        assert_int_equal(td_sample(b, &s, l, tokens, i, 0, &z), TD_OK);
        n_new_seed += z.token != x.token;
        s.seed = 77 | 1ull << 40;
        assert_int_equal(td_sample(b, &s, l, tokens, i, 0, &z), TD_OK);
        n_new_high_seed += z.token != x.token;
    }
    assert_true(n_new_position > N / 2 && n_new_seed > N / 2 && n_new_high_seed > N / 2);
    td_sampler_destroy(a);
    td_sampler_destroy(b);
}

/* Every token and every bit of every logprob of 600 draws, folded: the same number from every
 * compiler and optimisation level. */
static void same_bits_everywhere(void **state)
{
    (void)state;
    enum { V = 2000 };
    static float l[V];
    int32_t tokens[30];
    struct td_sampler *sm = NULL;
    uint64_t fold = 0xcbf29ce484222325ull;

    assert_int_equal(td_sampler_create(V, &sm, NULL), TD_OK);
    rng_state = 99;
    for (int i = 0; i < 600; i++) {
        for (int t = 0; t < V; t++) l[t] = (float)(below(1 << 24) - (1 << 23)) * 0x1p-20f;
        for (int t = 0; t < LEN(tokens); t++) tokens[t] = below(V);
        struct td_sampling s = {.temperature = 0.25f * (float)below(7),
                                .top_k = below(2) * 40,
                                .top_p = below(2) ? 1 : 0.9f,
                                .min_p = below(2) ? 0 : 0.01f,
                                .repetition_penalty = 1.1f,
                                .presence_penalty = 0.3f,
                                .frequency_penalty = -0.7f,
                                .seed = rng(),
                                .n_logprobs = 20};
        struct td_sampled got = {0};
        assert_int_equal(td_sample(sm, &s, l, tokens, below(LEN(tokens)), 7, &got), TD_OK);
        const unsigned char *bytes = (const unsigned char *)&got;
        for (size_t k = 0; k < sizeof got; k++) fold = (fold ^ bytes[k]) * 0x100000001b3ull;
    }
    td_sampler_destroy(sm);
    if (fold != 0x5f89362a78936a63ull)
        fail_msg("the draws fold to 0x%llx", (unsigned long long)fold);
}

/* The sum behind a logprob has no order: a row's tokens in any other order have the same
 * logprobs to the last bit. Near certainty shows it: the rest's 1e-7 beside 1. */
static void logprobs_owe_nothing_to_the_order(void **state)
{
    (void)state;
    enum { V = 5000, N = 200 };
    static float l[V];
    struct td_sampler *sm = NULL;
    struct td_sampling s = PLAIN;
    struct td_sampled first = {0}, got = {0};

    s.temperature = 0;
    s.n_logprobs = 20;
    assert_int_equal(td_sampler_create(V, &sm, NULL), TD_OK);
    rng_state = 11;
    for (int i = 0; i < V; i++) l[i] = i == 0 ? 20 : -5 + gauss();
    for (int round = 0; round < N; round++) {
        assert_int_equal(td_sample(sm, &s, l, NULL, 0, 0, &got), TD_OK);
        if (round == 0) first = got;
        assert_true(got.logprob < 0 && got.logprob > -1e-5f);
        assert_memory_equal(&got.logprob, &first.logprob, sizeof got.logprob);
        assert_memory_equal(got.top_logprobs, first.top_logprobs, sizeof got.top_logprobs);
        for (int i = V - 1; i > 0; i--) {
            int k = below(i + 1);
            float t = l[i];
            l[i] = l[k];
            l[k] = t;
        }
    }
    td_sampler_destroy(sm);
}

/* ---- edges ----------------------------------------------------------------------------------- */

static void rows_without_a_distribution(void **state)
{
    (void)state;
    struct td_sampler *sm = NULL;
    struct td_sampled got = {.token = -9};
    const float nothing[3] = {-INFINITY, NAN, -INFINITY}, overflow[3] = {1, INFINITY, 2},
                one[3] = {NAN, -5, -INFINITY};

    assert_int_equal(td_sampler_create(3, &sm, NULL), TD_OK);
    for (int greedy = 0; greedy < 2; greedy++) {
        struct td_sampling s = PLAIN;
        s.temperature = greedy ? 0 : 1;
        s.n_logprobs = 5;
        got.token = -9;
        assert_int_equal(td_sample(sm, &s, nothing, NULL, 0, 0, &got), TD_ERR_CORRUPT);
        assert_int_equal(td_sample(sm, &s, overflow, NULL, 0, 0, &got), TD_ERR_CORRUPT);
        assert_int_equal(got.token, -9);
        for (int i = 0; i < 50; i++) {
            assert_int_equal(td_sample(sm, &s, one, NULL, i, 0, &got), TD_OK);
            assert_int_equal(got.token, 1);
            assert_true(got.logprob == 0);
            assert_int_equal(got.n_top, 1);
            assert_int_equal(got.top_tokens[0], 1);
        }
    }
    /* a token that is no token is refused where it would be looked at, and leaves nothing behind
       in the scratch */
    struct td_sampling s = PLAIN;
    s.temperature = 0;
    s.frequency_penalty = 2;
    const float l[3] = {1, 2, 1.5f};
    int32_t bad[3] = {1, 3, 0}, good[3] = {0, 0, 0};
    assert_int_equal(td_sample(sm, &s, l, bad, 3, 0, &got), TD_ERR_INVALID);
    bad[1] = -1;
    assert_int_equal(td_sample(sm, &s, l, bad, 3, 0, &got), TD_ERR_INVALID);
    assert_int_equal(td_sample(sm, &s, l, good, 3, 0, &got), TD_OK);
    assert_int_equal(got.token, 1);
    td_sampler_destroy(sm);
}

static void penalties_by_hand(void **state)
{
    (void)state;
    struct td_sampler *sm = NULL;
    struct td_sampled got;
    const float l[4] = {4, 3, 2, -1};
    const int32_t seq[4] = {0, 1, 1, 1}; /* prompt: 0; output: 1 1 1 */
    assert_int_equal(td_sampler_create(4, &sm, NULL), TD_OK);

    struct td_logit_bias bias[2] = {{3, 4}, {3, 1.5f}};
    const struct {
        struct td_sampling s;
        int n_prompt, want;
    } rows[] = {
        {{.top_p = 1, .repetition_penalty = 1, .n_logprobs = -1}, 1, 0},
        /* 1.6 1.2 2 -1: the prompt counts, once per token */
        {{.top_p = 1, .repetition_penalty = 2.5f, .n_logprobs = -1}, 1, 2},
        {{.top_p = 1, .repetition_penalty = 1.9f, .n_logprobs = -1}, 1, 0}, /* 2.1 1.58 2 -1 */
        /* 4 4.5: the output only */
        {{.top_p = 1, .repetition_penalty = 1, .presence_penalty = -1.5f, .n_logprobs = -1}, 1, 1},
        /* no output */
        {{.top_p = 1, .repetition_penalty = 1, .presence_penalty = -1.5f, .n_logprobs = -1}, 4, 0},
        /* 3 + 3 x 0.4 */
        {{.top_p = 1, .repetition_penalty = 1, .frequency_penalty = -0.4f, .n_logprobs = -1}, 1, 1},
        /* 3 + 2 x 0.4 */
        {{.top_p = 1, .repetition_penalty = 1, .frequency_penalty = -0.4f, .n_logprobs = -1}, 2, 0},
        /* both add */
        {{.top_p = 1,
          .repetition_penalty = 1,
          .n_logprobs = -1,
          .logit_bias = bias,
          .n_logit_bias = 2},
         1,
         3},
    };
    for (int i = 0; i < LEN(rows); i++) {
        assert_int_equal(td_sample(sm, &rows[i].s, l, seq, 4, rows[i].n_prompt, &got), TD_OK);
        if (got.token != rows[i].want)
            fail_msg("row %d: token %d, want %d", i, got.token, rows[i].want);
    }
    td_sampler_destroy(sm);
}

/* What is not allowed is as if its logit were -inf, but for the logprobs, which are the row's. */
static void masks_are_minus_infinity(void **state)
{
    (void)state;
    enum { VOCAB = 1000 };
    static float logits[VOCAB], masked[VOCAB];
    struct td_sampler *sm;
    struct td_err err = {0};
    assert_int_equal(td_sampler_create(VOCAB, &sm, &err), TD_OK);
    for (int round = 0; round < 200; round++) {
        uint64_t allowed[(VOCAB + 63) / 64] = {0};
        struct td_sampling s = PLAIN;
        struct td_sampled a, b;
        s.seed = (uint64_t)round;
        s.temperature = round % 3 ? 1.5f : 0;
        s.top_k = round % 5 ? 0 : 7;
        int32_t before[3] = {round, 2 * round, round}; /* tokens so far, for the penalties */
        struct td_logit_bias bias[2] = {{3 * round % VOCAB, 20}, {7 * round % VOCAB, -20}};
        s.repetition_penalty = round % 7 == 6 ? 1.5f : 1;
        s.logit_bias = bias;
        s.n_logit_bias = round % 8 == 7 ? 2 : 0;
        for (int i = 0; i < VOCAB; i++) {
            uint32_t out[4], counter[4] = {(uint32_t)i, (uint32_t)round}, key[2] = {1, 2};
            td_philox4x32(counter, key, out);
            logits[i] = round % 6 == 5 ? (float)(out[0] % 4) : (float)out[0] / 4e8f; /* ties */
            bool yes = round % 4 == 0   ? out[1] % 50 == 0
                       : round % 4 == 1 ? out[1] % 50 != 0
                                        : (i / 100 + round) % 2; /* whole words of the mask */
            masked[i] = yes ? logits[i] : -INFINITY;
            if (yes) allowed[i / 64] |= (uint64_t)1 << i % 64;
        }
        assert_int_equal(td_sample(sm, &s, masked, before, 3, 1, &b), TD_OK);
        s.allowed = allowed;
        s.n_logprobs = 0;
        assert_int_equal(td_sample(sm, &s, logits, before, 3, 1, &a), TD_OK);
        assert_int_equal(a.token, b.token);
        assert_true(allowed[a.token / 64] >> a.token % 64 & 1);
        s.allowed = NULL;
        s.n_logprobs = 20;
        s.temperature = 0;
        s.n_logit_bias = 0;
        s.repetition_penalty = 1;
        float logprob = a.logprob;
        assert_int_equal(td_sample(sm, &s, logits, NULL, 0, 0, &b), TD_OK);
        for (int i = 0; i < b.n_top; i++)
            if (b.top_tokens[i] == a.token) assert_true(b.top_logprobs[i] == logprob);
        memset(allowed, 0, sizeof allowed);
        s.allowed = allowed;
        assert_int_equal(td_sample(sm, &s, logits, NULL, 0, 0, &b), TD_ERR_CORRUPT);
    }
    td_sampler_destroy(sm);
}

static void checks_name_the_field(void **state)
{
    (void)state;
    struct td_logit_bias bad_token[1] = {{10, 0}}, bad_bias[1] = {{9, NAN}},
                         low_token[1] = {{-1, 0}}, big_bias[1] = {{1, 100.5f}};
    struct td_sampling s[21];
    const char *want[LEN(s)] = {"temperature is -1",
                                "temperature is nan",
                                "temperature is 100.5",
                                "top_k is -1",
                                "top_p is 0",
                                "top_p is 1.5",
                                "top_p is nan",
                                "min_p is -0.1",
                                "min_p is 1.1",
                                "min_p is nan",
                                "repetition_penalty is 0",
                                "repetition_penalty is inf",
                                "presence_penalty is -2.5",
                                "frequency_penalty is 2.5",
                                "n_logprobs is 21, must be in [-1, 20]",
                                "n_logit_bias is 1025",
                                "logit_bias is null",
                                "logit_bias[0].token is 10, must be in [0, 10)",
                                "logit_bias[0].bias is nan",
                                "logit_bias[0].token is -1",
                                "logit_bias[0].bias is 100.5"};
    for (int i = 0; i < LEN(s); i++) s[i] = PLAIN;
    s[0].temperature = -1;
    s[1].temperature = NAN;
    s[2].temperature = 100.5f;
    s[3].top_k = -1;
    s[4].top_p = 0;
    s[5].top_p = 1.5f;
    s[6].top_p = NAN;
    s[7].min_p = -0.1f;
    s[8].min_p = 1.1f;
    s[9].min_p = NAN;
    s[10].repetition_penalty = 0;
    s[11].repetition_penalty = INFINITY;
    s[12].presence_penalty = -2.5f;
    s[13].frequency_penalty = 2.5f;
    s[14].n_logprobs = 21;
    s[15].n_logit_bias = 1025;
    s[16].n_logit_bias = 1;
    s[17].n_logit_bias = s[18].n_logit_bias = s[19].n_logit_bias = s[20].n_logit_bias = 1;
    s[17].logit_bias = bad_token;
    s[18].logit_bias = bad_bias;
    s[19].logit_bias = low_token;
    s[20].logit_bias = big_bias;
    for (int i = 0; i < LEN(s); i++) {
        struct td_err err = {0};
        assert_int_equal(td_sampling_check(&s[i], 10, &err), TD_ERR_INVALID);
        if (strstr(err.msg, want[i]) == NULL)
            fail_msg("\"%s\" does not say \"%s\"", err.msg, want[i]);
    }
}

static void vocabularies_have_limits(void **state)
{
    (void)state;
    struct td_sampler *sm = NULL;
    struct td_err err = {0};
    assert_int_equal(td_sampling_check(&PLAIN, 10, &err), TD_OK);
    assert_int_equal(td_sampler_create(0, &sm, &err), TD_ERR_INVALID);
    assert_int_equal(td_sampler_create((1 << 19) + 1, &sm, &err), TD_ERR_INVALID);
    assert_null(sm);
    td_sampler_destroy(NULL);
}

/* TANDEM_TIME=1 prints the median time of a draw; a shared machine's clock is no verdict, so
 * nothing is asserted. */
static void time_of_a_draw(void **state)
{
    (void)state;
    if (getenv("TANDEM_TIME") == NULL) skip();
    static const struct {
        const char *name;
        int vocab;
        float temperature, top_p;
        int top_k, n_logprobs;
        enum row_kind kind;
    } rows[] = {
        {"32k greedy", 32000, 0, 1, 0, -1, ROW_GAUSS},
        {"32k temperature", 32000, 1, 1, 0, -1, ROW_GAUSS},
        {"32k temperature, 20 logprobs", 32000, 1, 1, 0, 20, ROW_GAUSS},
        {"128k temperature", 128256, 1, 1, 0, -1, ROW_GAUSS},
        {"128k top-p 0.9", 128256, 1, 0.9f, 0, -1, ROW_GAUSS},
        {"128k top-k 50 top-p 0.9", 128256, 1, 0.9f, 50, -1, ROW_GAUSS},
        {"128k top-p 0.9, one cluster", 128256, 100, 0.9f, 0, -1, ROW_CLUSTER},
        {"128k top-p 0.9, flat", 128256, 1, 0.9f, 0, -1, ROW_FLAT},
    };
    for (int i = 0; i < LEN(rows); i++) {
        struct td_sampler *sm = NULL;
        float *l = malloc((size_t)rows[i].vocab * sizeof *l);
        double us[101];
        struct td_sampling s = PLAIN;
        s.temperature = rows[i].temperature;
        s.top_p = rows[i].top_p;
        s.top_k = rows[i].top_k;
        s.n_logprobs = rows[i].n_logprobs;
        rng_state = 3;
        fill_row(l, rows[i].vocab, rows[i].kind);
        assert_int_equal(td_sampler_create(rows[i].vocab, &sm, NULL), TD_OK);
        for (int k = 0; k < LEN(us); k++) {
            struct timespec a, b;
            struct td_sampled got;
            clock_gettime(CLOCK_MONOTONIC, &a);
            assert_int_equal(td_sample(sm, &s, l, NULL, k, 0, &got), TD_OK);
            clock_gettime(CLOCK_MONOTONIC, &b);
            double t = (double)(b.tv_sec - a.tv_sec) * 1e6 + (double)(b.tv_nsec - a.tv_nsec) * 1e-3;
            int at = k;
            for (; at > 0 && us[at - 1] > t; at--) us[at] = us[at - 1];
            us[at] = t;
        }
        printf("%-32s median %7.1f us, best %7.1f us\n", rows[i].name, us[LEN(us) / 2], us[0]);
        free(l);
        td_sampler_destroy(sm);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(philox_vectors),
        cmocka_unit_test(equals_reference),
        cmocka_unit_test(draws_follow_distribution),
        cmocka_unit_test(keyed_by_seed_and_position),
        cmocka_unit_test(same_bits_everywhere),
        cmocka_unit_test(logprobs_owe_nothing_to_the_order),
        cmocka_unit_test(rows_without_a_distribution),
        cmocka_unit_test(penalties_by_hand),
        cmocka_unit_test(masks_are_minus_infinity),
        cmocka_unit_test(checks_name_the_field),
        cmocka_unit_test(vocabularies_have_limits),
        cmocka_unit_test(time_of_a_draw),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
