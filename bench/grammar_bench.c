/* grammar_bench.c - what structured output costs a step: the mask over a real vocabulary.
 *
 * tandem-bench grammar --tokenizer DIR [--repeats 15]: one CSV row per grammar and kind of step;
 * median (least..greatest) over all steps of all repeats. A sample output of each grammar is
 * tokenised and followed, token by token:
 *   first   a new matcher: the vocabulary is walked where the sample comes to a new place
 *   warm    the same matcher once more: every mask is kept
 *   compile the text of the grammar to its automaton
 * and td_sample on random logits of that vocabulary, with and without a mask, greedy. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench/bench.h"
#include "common/base/clock.h"
#include "common/base/options.h"
#include "common/model/sampler.h"
#include "common/text/grammar.h"

#define MAX_TOKENS 4096
#define MAX_REPEATS 1001

static const struct {
    const char *name;
    enum td_grammar_kind kind;
    const char *text, *sample;
} cases[] = {
    {"json_object", TD_GRAMMAR_JSON_OBJECT, NULL,
     "{\"name\": \"Ada Lovelace\", \"born\": 1815, \"fields\": [\"mathematics\", \"poetry\"], "
     "\"works\": [{\"title\": \"Notes on the Analytical Engine\", \"year\": 1843, \"lang\": "
     "null}], "
     "\"living\": false, \"note\": \"She wrote the first program, \\\"Note G\\\".\"}"},
    {"json_schema", TD_GRAMMAR_JSON_SCHEMA,
     "{\"type\":\"object\",\"properties\":{\"name\":{\"type\":\"string\"},\"unit\":{\"enum\":["
     "\"celsius\",\"fahrenheit\"]},\"days\":{\"type\":\"integer\",\"minimum\":1,\"maximum\":14},"
     "\"places\":{\"type\":\"array\",\"items\":{\"type\":\"object\",\"properties\":{\"city\":{"
     "\"type\":\"string\"},\"country\":{\"type\":\"string\"}},\"required\":[\"city\"],"
     "\"additionalProperties\":false}}},\"required\":[\"name\",\"unit\"],\"additionalProperties\":"
     "false}",
     "{\"name\": \"get_weather\", \"unit\": \"celsius\", \"days\": 12, \"places\": [{\"city\": "
     "\"Reykjavik\", \"country\": \"Iceland\"}, {\"city\": \"Ouagadougou\"}]}"},
    {"json_schema maxLength 256", TD_GRAMMAR_JSON_SCHEMA,
     "{\"type\":\"object\",\"properties\":{\"summary\":{\"type\":\"string\",\"maxLength\":256}},"
     "\"required\":[\"summary\"]}",
     "{\"summary\": \"A request is placed on a pair of workers, and its cache moves while the "
     "prompt is still being computed.\"}"},
    {"regex", TD_GRAMMAR_REGEX, "[A-Z][a-z]+( [A-Z][a-z]+)*, \\d{4}-\\d{2}-\\d{2}",
     "Charles Babbage, 1791-12-26"},
    {"grammar", TD_GRAMMAR_EBNF,
     "root ::= sum\nsum ::= term ([+-] term)*\nterm ::= atom ([*/] atom)*\n"
     "atom ::= [0-9]+ | \"(\" sum \")\"\n",
     "(12+345)*6-(7/(8+9))*10"},
};

static int fail(const char *what, const char *why)
{
    fprintf(stderr, "tandem-bench grammar: %s: %s\n", what, why);
    return 1;
}

static int by_value(const void *x, const void *y)
{
    double a = *(const double *)x, b = *(const double *)y;
    return (a > b) - (a < b);
}

static double us_since(uint64_t start_ns) { return (double)(td_now_ns() - start_ns) / 1e3; }

static void row(const char *what, const char *step, double *us, size_t n)
{
    qsort(us, n, sizeof *us, by_value);
    printf("%s,%s,%.2f,%.2f,%.2f,%.2f,%zu\n", what, step, us[n / 2], us[0], us[n * 99 / 100],
           us[n - 1], n);
}

/* One pass along the sample: us[0..n) of its masks. */
static td_status follow(struct td_matcher *m, const struct td_token_trie *trie,
                        const struct td_token_list *tokens, double *us, const uint64_t **ret_mask)
{
    int32_t state = td_matcher_start(m);
    for (size_t i = 0; i <= tokens->n; i++) {
        uint64_t start = td_now_ns();
        td_status s = td_matcher_mask(m, state, ret_mask);
        us[i] = us_since(start);
        if (s || i == tokens->n) return s;
        int32_t id = tokens->ids[i];
        if (!((*ret_mask)[id / 64] >> id % 64 & 1)) return TD_ERR_INTERNAL;
        size_t n = 0;
        const char *bytes = td_token_trie_bytes(trie, id, &n);
        s = td_matcher_advance(m, state, bytes, n, &state);
        if (s) return s;
    }
    return TD_OK;
}

static int run_case(size_t c, const struct td_tokenizer *tokenizer,
                    const struct td_token_trie *trie, long repeats)
{
    struct td_err err = {0};
    struct td_token_list tokens = {0};
    struct td_grammar_text text = {cases[c].text, cases[c].text ? strlen(cases[c].text) : 0};
    int32_t eos = td_token_trie_vocab(trie) - 1;
    if (td_tokenizer_encode(tokenizer, cases[c].sample, strlen(cases[c].sample), false, MAX_TOKENS,
                            &tokens, &err))
        return fail(cases[c].name, err.msg);
    size_t n = tokens.n + 1;
    double *first = calloc(n * (size_t)repeats, sizeof *first),
           *warm = calloc(n * (size_t)repeats, sizeof *warm),
           *made = calloc((size_t)repeats, sizeof *made);
    int rc = first && warm && made ? 0 : fail(cases[c].name, "no memory");
    for (long r = 0; r < repeats && !rc; r++) {
        struct td_grammar *g = NULL;
        struct td_matcher *m = NULL;
        const uint64_t *mask;
        uint64_t start = td_now_ns();
        td_status s = td_grammar_compile(cases[c].kind, &text, cases[c].text != NULL, &g, &err);
        if (!s) s = td_matcher_create(g, trie, &eos, 1, &m, &err);
        made[r] = us_since(start);
        if (s) rc = fail(cases[c].name, err.msg);
        if (!s) s = follow(m, trie, &tokens, first + (size_t)r * n, &mask);
        if (!s) s = follow(m, trie, &tokens, warm + (size_t)r * n, &mask);
        if (s && !rc) rc = fail(cases[c].name, td_status_name(s));
        td_matcher_free(m);
        td_grammar_free(g);
    }
    if (!rc) {
        row(cases[c].name, "compile", made, (size_t)repeats);
        row(cases[c].name, "first", first, n * (size_t)repeats);
        row(cases[c].name, "warm", warm, n * (size_t)repeats);
    }
    free(first);
    free(warm);
    free(made);
    td_token_list_free(&tokens);
    return rc;
}

/* Inside a JSON string nearly every token is allowed, between two properties few are: a mask of
 * both, in stretches of 1,000 tokens. */
static int run_sampler(int32_t vocab, long repeats, float temperature, const char *name)
{
    struct td_sampler *sampler;
    struct td_err err = {0};
    struct td_sampled out;
    float *logits = calloc((size_t)vocab, sizeof *logits);
    uint64_t *mask = calloc((size_t)vocab / 64 + 1, sizeof *mask);
    double *us[2] = {calloc((size_t)repeats, sizeof **us), calloc((size_t)repeats, sizeof **us)};
    int rc = 0;
    if (!logits || !mask || !us[0] || !us[1] || td_sampler_create(vocab, &sampler, &err))
        return fail("sampler", "no memory");
    for (int32_t i = 0; i < vocab; i++) {
        logits[i] = (float)((uint32_t)i * 2654435761u >> 8) / 1e6f;
        if (i / 1000 % 2 ? i % 50 : i % 50 == 0) mask[i / 64] |= (uint64_t)1 << i % 64;
    }
    for (long r = 0; r < 2 * repeats && !rc; r++) {
        struct td_sampling s = {.temperature = temperature,
                                .top_p = 1,
                                .repetition_penalty = 1,
                                .n_logprobs = -1,
                                .allowed = r % 2 ? mask : NULL};
        uint64_t start = td_now_ns();
        if (td_sample(sampler, &s, logits, NULL, 0, 0, &out)) rc = fail("sampler", "no token");
        us[r % 2][r / 2] = us_since(start);
    }
    if (!rc) {
        row(name, "without a mask", us[0], (size_t)repeats);
        row(name, "with a mask", us[1], (size_t)repeats);
    }
    td_sampler_destroy(sampler);
    free(logits);
    free(mask);
    free(us[0]);
    free(us[1]);
    return rc;
}

struct config {
    const char *tokenizer;
    int64_t repeats;
};

static const struct td_option options[] = {
    {"tokenizer", TD_OPT_STR, "", 0, 0, NULL, offsetof(struct config, tokenizer),
     "directory with tokenizer.json"},
    {"repeats", TD_OPT_I64, "15", 1, MAX_REPEATS, NULL, offsetof(struct config, repeats),
     "passes along each sample"},
    {0},
};

int td_bench_grammar(int argc, char **argv)
{
    struct config c = {0};
    struct td_err err = {0};
    struct td_tokenizer *tokenizer = NULL;
    struct td_token_trie *trie = NULL;
    size_t n_positional = 0;
    if (td_options_load(options, &c, "tandem-bench grammar",
                        "What a mask of structured output costs a step", argc, argv, NULL, 0,
                        &n_positional, &err))
        return td_die("tandem-bench grammar", &err);
    if (!c.tokenizer[0]) return fail("tokenizer", "give --tokenizer DIR");
    if (td_tokenizer_load(c.tokenizer, &tokenizer, &err))
        return td_die("tandem-bench grammar", &err);
    int32_t vocab = td_tokenizer_vocab(tokenizer);
    uint64_t start = td_now_ns();
    int rc = td_token_trie_create(tokenizer, vocab, &trie, &err)
                 ? td_die("tandem-bench grammar", &err)
                 : 0;
    double trie_us = us_since(start);
    printf("grammar,step,us,us_least,us_p99,us_greatest,n\n");
    if (!rc) printf("trie of %d tokens,once,%.0f,,,,1\n", vocab, trie_us);
    for (size_t i = 0; i < sizeof cases / sizeof *cases && !rc; i++)
        rc = run_case(i, tokenizer, trie, (long)c.repeats);
    if (!rc) rc = run_sampler(vocab, (long)c.repeats * 10, 0, "td_sample greedy");
    if (!rc) rc = run_sampler(vocab, (long)c.repeats * 10, 0.8f, "td_sample temperature 0.8");
    td_token_trie_free(trie);
    td_tokenizer_free(tokenizer);
    return rc;
}
