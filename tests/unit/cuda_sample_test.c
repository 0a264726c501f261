/* cuda_sample_test.c - the device's sampler against td_sample on fresh random rows: every bit of
 * every token, logprob and status. Runs on the emulated device of this build, or on what
 * TANDEM_CUDA_LIBRARY names. The sums behind them are compared to the last unit, as tokens would
 * not show it. TANDEM_SEED plays other rows. */
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
#include "kernels/device.h"
#include "kernels/sample_math.h"
#include "tests/unit/sample_rows.h"

#define LEN(a) ((int)(sizeof(a) / sizeof *(a)))

enum {
    MAX_ROWS = 32,
    MAX_TOKENS = 300,
    PAYLOAD_BYTES = MAX_ROWS * (MAX_TOKENS * 4 + 8 + 1024 * 8)
};

/* ---- rows ------------------------------------------------------------------------------------ */

struct row {
    struct td_sampling s;
    struct td_logit_bias bias[TD_MAX_LOGIT_BIAS];
    int32_t tokens[MAX_TOKENS], n_tokens, n_prompt, logits_row;
};

/* what: 0 greedy, 1 anything, 2 anything without penalties and bias */
static void make_row(struct row *r, int vocab, int what)
{
    static const float temps[] = {0, 0, 1e-6f, 1e-30f, 0.3f, 0.7f, 1, 1, 1, 1.5f, 100};
    static const float top_ps[] = {1, 1, 0.95f, 0.9f, 0.5f, 0.1f, 1e-6f, 0x1.fffffep-1f};
    static const float min_ps[] = {0, 0, 0, 0.02f, 0.3f, 1};
    static const int logprobs[] = {-1, -1, 0, 1, 5, 20};
    int top_ks[] = {0, 0, 1, 2, 5, 50, vocab - 1, vocab, vocab + 9, 1 + below(vocab)};

    r->n_tokens = below(MAX_TOKENS + 1);
    r->n_prompt = r->n_tokens == 0 ? 0 : below(r->n_tokens + 1);
    int span = below(2) && vocab > 8 ? 8 : vocab; /* the same few again and again, or all over */
    for (int i = 0; i < r->n_tokens; i++) r->tokens[i] = below(span);
    r->s = (struct td_sampling){.temperature = temps[below(LEN(temps))],
                                .top_k = top_ks[below(LEN(top_ks))],
                                .top_p = top_ps[below(LEN(top_ps))],
                                .min_p = min_ps[below(LEN(min_ps))],
                                .repetition_penalty = 1,
                                .seed = rng(),
                                .n_logprobs = logprobs[below(LEN(logprobs))],
                                .logit_bias = r->bias};
    if (what == 0) {
        r->s.temperature = 0;
        r->s.n_logprobs = -1;
    } else if (what == 1) {
        static const int n_bias[] = {0, 0, 0, 1, 3, 17, 1024};
        r->s.repetition_penalty = below(2) ? 1.0f : 0.5f + (float)unit();
        r->s.presence_penalty = below(2) ? 0.0f : (float)(4 * unit() - 2);
        r->s.frequency_penalty = below(2) ? 0.0f : (float)(4 * unit() - 2);
        r->s.n_logit_bias = n_bias[below(LEN(n_bias))];
        /* refused where it is looked at */
        if (below(40) == 0 && r->n_tokens > 0)
            r->tokens[below(r->n_tokens)] = below(2) ? -1 : vocab;
    }
    span = below(2) && vocab > 4 ? 4 : vocab; /* equal tokens: their order counts */
    for (int i = 0; i < r->s.n_logit_bias; i++)
        r->bias[i] = (struct td_logit_bias){below(span), (float)(20 * unit() - 10)};
    if (r->s.top_k < 0) r->s.top_k = 0;
    assert_int_equal(td_sampling_check(&r->s, vocab, NULL), TD_OK);
}

/* ---- a device, and steps on it --------------------------------------------------------------- */

struct bed {
    const struct td_ops *ops;
    const struct td_device *d;
    int vocab, stride, max_rows;
    float *logits, *device_logits;
    struct td_sample_row *rows, *device_rows;
    struct td_sample_result *results, *device_results;
    uint64_t *totals, *device_totals;
    unsigned char *payload;
    void *scratch;
    struct td_sampler *sampler;
};

static const struct td_ops *open_device(const char *emulator_seed)
{
    struct td_device_config config = {.deterministic = true};
    const struct td_ops *ops = NULL;
    struct td_err err = {0};
    setenv("TD_CUDA_EMU_SEED", emulator_seed, 1);
    if (td_device_open(&config, &ops, &err)) fail_msg("td_device_open: %s", err.msg);
    return ops;
}

static void bed_open(struct bed *b, const struct td_ops *ops, int vocab, int max_rows)
{
    struct td_err err = {0};
    *b = (struct bed){.ops = ops,
                      .d = ops->device,
                      .vocab = vocab,
                      .stride = vocab + below(3),
                      .max_rows = max_rows};
    size_t logits_bytes = (size_t)max_rows * (size_t)b->stride * sizeof(float),
           n = (size_t)max_rows;
    size_t scratch_bytes = b->d->sample_scratch_bytes(max_rows, vocab);
    assert_int_equal(b->d->alloc(logits_bytes, "logits", (void **)&b->device_logits, &err), TD_OK);
    assert_int_equal(b->d->alloc(n * sizeof *b->rows, "rows", (void **)&b->device_rows, &err),
                     TD_OK);
    assert_int_equal(
        b->d->alloc(n * sizeof *b->results, "results", (void **)&b->device_results, &err), TD_OK);
    assert_int_equal(
        b->d->alloc(3 * n * sizeof *b->totals, "totals", (void **)&b->device_totals, &err), TD_OK);
    assert_int_equal(b->d->alloc(scratch_bytes, "scratch", &b->scratch, &err), TD_OK);
    assert_int_equal(b->d->alloc_pinned(n * sizeof *b->rows, "rows", (void **)&b->rows, &err),
                     TD_OK);
    assert_int_equal(
        b->d->alloc_pinned(n * sizeof *b->results, "results", (void **)&b->results, &err), TD_OK);
    assert_int_equal(
        b->d->alloc_pinned(3 * n * sizeof *b->totals, "totals", (void **)&b->totals, &err), TD_OK);
    assert_int_equal(b->d->alloc_pinned(PAYLOAD_BYTES, "payload", (void **)&b->payload, &err),
                     TD_OK);
    assert_int_equal(b->d->sample_clear(b->scratch, max_rows, vocab, &err), TD_OK);
    assert_int_equal(td_sampler_create(vocab, &b->sampler, &err), TD_OK);
    b->logits = malloc(logits_bytes);
    /* beyond a row's end: never read */
    for (size_t i = 0; i < logits_bytes / sizeof(float); i++) b->logits[i] = INFINITY;
}

static void bed_close(struct bed *b)
{
    td_sampler_destroy(b->sampler);
    free(b->logits);
    b->d->release_pinned(b->payload);
    b->d->release_pinned(b->totals);
    b->d->release_pinned(b->results);
    b->d->release_pinned(b->rows);
    b->d->release(b->scratch);
    b->d->release(b->device_totals);
    b->d->release(b->device_results);
    b->d->release(b->device_rows);
    b->d->release(b->device_logits);
}

/* One step of n rows, the last n_padding of them padding; logits of b->logits. */
static void bed_step(struct bed *b, const struct row *r, int n, int n_padding, uint64_t graph_key,
                     uint32_t more_features)
{
    struct td_sample_payload payload = {.base = b->payload, .bytes = PAYLOAD_BYTES};
    struct td_err err = {0};
    uint32_t features = 0;

    memset(b->results, 0xee, (size_t)n * sizeof *b->results);
    for (int i = 0; i < n; i++) {
        if (i >= n - n_padding) {
            td_sample_pack_padding(&b->rows[i]);
            continue;
        }
        size_t used = payload.used;
        assert_int_equal(td_sample_pack(&r[i].s, r[i].tokens, r[i].n_tokens, r[i].n_prompt,
                                        r[i].logits_row, &payload, &b->rows[i], &features),
                         TD_OK);
        assert_int_equal(payload.used - used, td_sample_payload_bytes(&r[i].s, r[i].n_tokens));
    }
    assert_int_equal(b->d->upload(b->device_logits, b->logits,
                                  (size_t)b->max_rows * (size_t)b->stride * sizeof(float), &err),
                     TD_OK);
    struct td_sample_args a = {.logits = b->device_logits,
                               .logits_stride = b->stride,
                               .vocab = b->vocab,
                               .n_rows = n,
                               .features = features | more_features,
                               .rows = b->device_rows,
                               .results = b->device_results,
                               .totals = b->device_totals,
                               .scratch = b->scratch};
    if (b->d->step_begin(graph_key)) {
        b->d->put(b->device_rows, b->rows, (size_t)n * sizeof *b->rows);
        b->d->sample(&a);
        b->d->get(b->results, b->device_results, (size_t)n * sizeof *b->results);
        b->d->get(b->totals, b->device_totals, 3 * (size_t)n * sizeof *b->totals);
    }
    if (b->d->step_end(&err) || b->d->wait(&err)) fail_msg("step: %s", err.msg);
}

static const char *describe(const struct row *r)
{
    static char text[256];
    snprintf(text, sizeof text,
             "T %g k %d p %.9g min_p %g rep %g pres %g freq %g bias %d logprobs %d tokens %d",
             (double)r->s.temperature, r->s.top_k, (double)r->s.top_p, (double)r->s.min_p,
             (double)r->s.repetition_penalty, (double)r->s.presence_penalty,
             (double)r->s.frequency_penalty, r->s.n_logit_bias, r->s.n_logprobs, r->n_tokens);
    return text;
}

/* The plain loops: weight of all candidates, sum of e^y in its two parts. */
static void plain_totals(const struct row *r, const float *l, int vocab, uint64_t ret_totals[3])
{
    static double x[TD_SAMPLE_MAX_VOCAB];
    static int in_output[TD_SAMPLE_MAX_VOCAB];
    static bool is_seen[TD_SAMPLE_MAX_VOCAB];
    double max = -INFINITY, raw_max = -INFINITY, rep = (double)r->s.repetition_penalty;

    for (int i = 0; i < vocab; i++) {
        x[i] = (double)l[i];
        raw_max = x[i] > raw_max ? x[i] : raw_max;
        in_output[i] = is_seen[i] = 0;
    }
    for (int i = 0; i < r->s.n_logit_bias; i++) x[r->bias[i].token] += (double)r->bias[i].bias;
    bool has_penalties = rep != 1 || r->s.presence_penalty != 0 || r->s.frequency_penalty != 0;
    for (int i = 0; has_penalties && i < r->n_tokens; i++) {
        /* else nobody looks, and there may be one that is no token */
        is_seen[r->tokens[i]] = true;
        in_output[r->tokens[i]] += i >= r->n_prompt;
    }
    ret_totals[0] = ret_totals[1] = ret_totals[2] = 0;
    for (int i = 0; i < vocab; i++) {
        if (is_seen[i] && rep != 1) x[i] = x[i] > 0 ? x[i] / rep : x[i] * rep;
        if (in_output[i] > 0)
            x[i] = x[i] - (double)r->s.presence_penalty -
                   (double)r->s.frequency_penalty * in_output[i];
        max = x[i] > max ? x[i] : max;
    }
    for (int i = 0; i < vocab; i++) {
        if (r->s.temperature > 0) {
            double e = td_sample_exp((x[i] - max) / (double)r->s.temperature);
            ret_totals[0] += e < (double)r->s.min_p ? 0 : (uint64_t)(e * 0x1p44);
        }
        if (r->s.n_logprobs >= 0) {
            double e = td_sample_exp((double)l[i] - raw_max), hi = nearbyint(e * 0x1p32);
            ret_totals[1] += (uint64_t)hi;
            ret_totals[2] += (uint64_t)(int64_t)nearbyint((e * 0x1p32 - hi) * 0x1p44);
        }
    }
}

struct tally {
    int ok, corrupt, invalid, drawn_elsewhere;
};

/* Row i of the last step against td_sample. */
static void check_row(struct bed *b, const struct row *r, int i, int kind, struct tally *t)
{
    struct td_sampled want = {.token = -5}, got = {.token = -5};
    const float *l = b->logits + (size_t)r->logits_row * (size_t)b->stride;
    td_status want_status =
        td_sample(b->sampler, &r->s, l, r->tokens, r->n_tokens, r->n_prompt, &want);
    td_status got_status = td_sample_unpack(&b->results[i], &got);
    if (got_status != want_status || got.token != want.token ||
        memcmp(&got.logprob, &want.logprob, sizeof got.logprob) || got.n_top != want.n_top ||
        memcmp(got.top_tokens, want.top_tokens, (size_t)want.n_top * sizeof *got.top_tokens) ||
        memcmp(got.top_logprobs, want.top_logprobs, (size_t)want.n_top * sizeof *got.top_logprobs))
        fail_msg(
            "vocab %d, row %d of kind %d (%s): status %d token %d logprob %.9g top %d (%d %.9g), "
            "want status %d token %d logprob %.9g top %d (%d %.9g)",
            b->vocab, i, kind, describe(r), got_status, got.token, (double)got.logprob, got.n_top,
            got.n_top ? got.top_tokens[0] : 0, got.n_top ? (double)got.top_logprobs[0] : 0,
            want_status, want.token, (double)want.logprob, want.n_top,
            want.n_top ? want.top_tokens[0] : 0, want.n_top ? (double)want.top_logprobs[0] : 0);
    if (want_status == TD_OK) {
        uint64_t totals[3];
        plain_totals(r, l, b->vocab, totals);
        for (int k = 0; k < 3; k++)
            if (totals[k] != b->totals[3 * i + k])
                fail_msg("vocab %d, row %d of kind %d (%s): total %d is off by %lld", b->vocab, i,
                         kind, describe(r), k, (long long)(b->totals[3 * i + k] - totals[k]));
    }
    t->ok += want_status == TD_OK;
    t->corrupt += want_status == TD_ERR_CORRUPT;
    t->invalid += want_status == TD_ERR_INVALID;
    if (want_status == TD_OK && r->s.temperature > 0) {
        struct td_sampling greedy = r->s;
        struct td_sampled best;
        greedy.temperature = 0;
        assert_int_equal(
            td_sample(b->sampler, &greedy, l, r->tokens, r->n_tokens, r->n_prompt, &best), TD_OK);
        t->drawn_elsewhere += best.token != want.token;
    }
}

static void play(struct bed *b, struct row *rows, int n, int what, uint64_t graph_key,
                 uint32_t more_features, struct tally *t)
{
    int kinds[MAX_ROWS], n_padding = n > 1 ? below(n / 2 + 1) : 0;
    for (int i = 0; i < b->max_rows; i++) {
        kinds[i] = below(N_ROW_KINDS + 6); /* the ordinary ones more often */
        if (kinds[i] >= N_ROW_KINDS)
            kinds[i] = below(3) ? ROW_GAUSS : below(2) ? ROW_TIES : ROW_CLUSTERS;
        fill_row(b->logits + (size_t)i * (size_t)b->stride, b->vocab, (enum row_kind)kinds[i]);
    }
    for (int i = 0; i < n - n_padding; i++) {
        make_row(&rows[i], b->vocab, what);
        rows[i].logits_row = below(b->max_rows); /* in any order, two of one row too */
    }
    bed_step(b, rows, n, n_padding, graph_key, more_features);
    for (int i = 0; i < n - n_padding; i++) check_row(b, &rows[i], i, kinds[rows[i].logits_row], t);
}

static uint64_t test_seed(void)
{
    const char *s = getenv("TANDEM_SEED");
    return s ? strtoull(s, NULL, 0) : 2024;
}

/* ---- tests ----------------------------------------------------------------------------------- */

static void same_bits_small(void **state)
{
    (void)state;
    static const int vocabs[] = {1, 2, 3, 31, 32, 33, 100, 257, 999, 1500, 4096};
    static struct row rows[MAX_ROWS];
    struct tally t = {0};
    char emulator_seed[24];

    rng_state = test_seed();
    for (int round = 0; round < 3; round++) {
        /* the order of threads and blocks */
        snprintf(emulator_seed, sizeof emulator_seed, "%d", 1 + below(1 << 30));
        const struct td_ops *ops = open_device(emulator_seed);
        for (int v = 0; v < LEN(vocabs); v++) {
            struct bed b;
            bed_open(&b, ops, vocabs[v], MAX_ROWS);
            for (int step = 0; step < 6; step++)
                play(&b, rows, step == 0 ? 1 : 1 + below(MAX_ROWS), step % 3, 0, 0, &t);
            bed_close(&b);
        }
        td_device_close(ops);
    }
    printf("%d rows as on the CPU, %d of them not the best token; %d corrupt, %d invalid\n", t.ok,
           t.drawn_elsewhere, t.corrupt, t.invalid);
    assert_true(t.ok > 1500 && t.drawn_elsewhere > 150 && t.corrupt > 100 && t.invalid > 3);
}

static void same_bits_large(void **state)
{
    (void)state;
    static const struct {
        int vocab, kind;
    } cases[] = {
        {128256, ROW_GAUSS},   {128256, ROW_NARROW},
        {128256, ROW_CLUSTER}, {128256, ROW_CLUSTERS},
        {128256, ROW_FLAT},    {128256, ROW_TIES},
        {128256, ROW_BITS},    {1 << 18, ROW_GAUSS},
        {50257, ROW_TWO},      {TD_SAMPLE_MAX_VOCAB, ROW_GAUSS},
    };
    static const struct {
        float temperature, top_p;
        int top_k, n_logprobs, penalties;
    } how[] = {
        {0, 1, 0, 20, 0},
        {1, 1, 0, 5, 0},
        {0.8f, 0.95f, 50, -1, 0},
        {1, 0.9f, 100000, 20, 1},
    };
    static struct row rows[LEN(how)];
    struct tally t = {0};

    rng_state = test_seed() + 1;
    const struct td_ops *ops = open_device("7");
    for (int c = 0; c < LEN(cases); c += getenv("TANDEM_TEST_SHORT") ? 3 : 1) {
        /* short: as the sanitizer stages run it */
        struct bed b;
        bed_open(&b, ops, cases[c].vocab, 1);
        fill_row(b.logits, b.vocab, (enum row_kind)cases[c].kind);
        for (int i = 0; i < LEN(how); i++) {
            make_row(&rows[0], b.vocab, how[i].penalties);
            rows[0].logits_row = 0;
            rows[0].s.temperature = how[i].temperature;
            rows[0].s.top_p = how[i].top_p;
            rows[0].s.top_k = how[i].top_k;
            rows[0].s.n_logprobs = how[i].n_logprobs;
            rows[0].s.min_p = 0;
            bed_step(&b, rows, 1, 0, 0, 0);
            check_row(&b, &rows[0], 0, cases[c].kind, &t);
        }
        bed_close(&b);
    }
    td_device_close(ops);
}

/* Steps of one shape are recorded once; rows, tokens, biases and padding differ from step to
 * step. */
static void replayed(void **state)
{
    (void)state;
    static struct row rows[8];
    struct tally t = {0};
    struct bed b;

    rng_state = test_seed() + 2;
    const struct td_ops *ops = open_device("3");
    bed_open(&b, ops, 700, 8);
    for (int step = 0; step < 12; step++)
        play(&b, rows, 8, 1, 0x5a5a, TD_SAMPLE_WEIGHTS | TD_SAMPLE_ADJUST, &t);
    bed_close(&b);
    td_device_close(ops);
    assert_true(t.ok > 30);
}

/* A step whose caller forgot what a row needs says so, for that row alone. */
static void features_are_needed(void **state)
{
    (void)state;
    struct td_sample_payload payload = {0};
    static struct row row;
    struct td_err err = {0};
    struct bed b;

    rng_state = 4;
    const struct td_ops *ops = open_device("3");
    bed_open(&b, ops, 100, 4);
    payload = (struct td_sample_payload){.base = b.payload, .bytes = PAYLOAD_BYTES};
    for (int i = 0; i < 4; i++) {
        fill_row(b.logits + (size_t)i * (size_t)b.stride, b.vocab, ROW_GAUSS);
        uint32_t unused = 0;
        make_row(&row, b.vocab, 0);
        row.s.temperature = i == 1 ? 1 : 0;
        row.s.n_logprobs = i == 2 ? 0 : -1;
        row.s.presence_penalty = i == 3 ? 1 : 0;
        assert_int_equal(td_sample_pack(&row.s, row.tokens, row.n_tokens, row.n_prompt, i, &payload,
                                        &b.rows[i], &unused),
                         TD_OK);
        assert_int_equal(unused, i == 0 ? 0 : i == 3 ? TD_SAMPLE_ADJUST : TD_SAMPLE_WEIGHTS);
    }
    assert_int_equal(
        b.d->upload(b.device_logits, b.logits, (size_t)(4 * b.stride) * sizeof(float), &err),
        TD_OK);
    struct td_sample_args a = {.logits = b.device_logits,
                               .logits_stride = b.stride,
                               .vocab = b.vocab,
                               .n_rows = 4,
                               .rows = b.device_rows,
                               .results = b.device_results,
                               .scratch = b.scratch};
    assert_true(b.d->step_begin(0));
    b.d->put(b.device_rows, b.rows, 4 * sizeof *b.rows);
    b.d->sample(&a);
    b.d->get(b.results, b.device_results, 4 * sizeof *b.results);
    assert_int_equal(b.d->step_end(&err), TD_OK);
    assert_int_equal(b.d->wait(&err), TD_OK);
    for (int i = 0; i < 4; i++)
        assert_int_equal(b.results[i].status, i == 0 ? TD_OK : TD_ERR_INTERNAL);
    bed_close(&b);
    td_device_close(ops);
}

static void payload_is_bounded(void **state)
{
    (void)state;
    unsigned char memory[64] __attribute__((aligned(8)));
    struct td_logit_bias bias[3] = {{5, 1}, {2, 2}, {5, 3}};
    int32_t tokens[5] = {1, 2, 3, 4, 5};
    struct td_sampling s = {.top_p = 1,
                            .repetition_penalty = 2,
                            .n_logprobs = -1,
                            .logit_bias = bias,
                            .n_logit_bias = 3};
    struct td_sample_payload p = {.base = memory, .bytes = 47};
    struct td_sample_row row = {.n_tokens = -3};
    uint32_t features = 0;

    assert_int_equal(td_sample_payload_bytes(&s, 5), 24 + 24);
    assert_int_equal(td_sample_pack(&s, tokens, 5, 2, 9, &p, &row, &features), TD_ERR_LIMIT);
    assert_int_equal(row.n_tokens, -3);
    assert_int_equal(features, 0);
    assert_int_equal(p.used, 0);
    p.bytes = 48;
    assert_int_equal(td_sample_pack(&s, tokens, 5, 2, 9, &p, &row, &features), TD_OK);
    assert_int_equal(features, TD_SAMPLE_ADJUST);
    assert_int_equal(p.used, 48);
    assert_memory_equal(row.tokens, tokens, sizeof tokens);
    const struct td_sample_bias want[3] = {{2, 2}, {5, 1}, {5, 3}}; /* by token, and stable */
    assert_memory_equal(row.bias, want, sizeof want);
    assert_int_equal(row.logits_row, 9);
    s.repetition_penalty = 1;
    s.n_logit_bias = 0;
    /* needs none */
    assert_int_equal(td_sample_pack(&s, tokens, 5, 2, 9, &p, &row, &features), TD_OK);
    assert_null(row.tokens);
    assert_null(row.bias);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(payload_is_bounded),  cmocka_unit_test(same_bits_small),
        cmocka_unit_test(same_bits_large),     cmocka_unit_test(replayed),
        cmocka_unit_test(features_are_needed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
