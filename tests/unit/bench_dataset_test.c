/* bench_dataset_test.c - what is sent: seeded prompts, shared prefixes, traces with their times,
 * and files that are wrong. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench/serve/dataset.h"

#define VOCAB 2048

static char g_path[64];

static const char *file_of(const char *text)
{
    snprintf(g_path, sizeof g_path, "/tmp/bench-dataset-XXXXXX");
    int fd = mkstemp(g_path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, strlen(text)), (ssize_t)strlen(text));
    close(fd);
    return g_path;
}

static struct bench_dataset_config config_of(enum bench_dataset_kind kind, const char *path)
{
    return (struct bench_dataset_config){.kind = kind,
                                         .path = path,
                                         .seed = 1,
                                         .vocab = VOCAB,
                                         .input_len = 32,
                                         .output_len = kind <= BENCH_PREFIX ? 16 : 0,
                                         .n_prefixes = 3,
                                         .time_scale = 1,
                                         .length_scale = 1,
                                         .spread = true};
}

static struct bench_dataset *open_ok(const struct bench_dataset_config *c)
{
    struct bench_dataset *d = NULL;
    struct td_err err = {0};
    if (bench_dataset_open(c, &d, &err)) fail_msg("%s", err.msg);
    return d;
}

static void tokens(const struct bench_dataset *d, size_t i, int32_t *ids)
{
    bench_dataset_tokens(d, i, ids);
    for (int32_t k = 0; k < bench_dataset_item(d, i)->input_len; k++)
        if (ids[k] < 0 || ids[k] >= VOCAB) fail_msg("token %d of prompt %zu is %d", k, i, ids[k]);
}

static size_t common_prefix(const int32_t *a, const int32_t *b, size_t n)
{
    size_t i = 0;
    while (i < n && a[i] == b[i]) i++;
    return i;
}

/* --- made from the seed ----------------------------------------------------------------------- */

static void random_prompts(void **state)
{
    (void)state;
    struct bench_dataset_config c = config_of(BENCH_RANDOM, "");
    c.n_requests = 500;
    c.range_ratio = 0.25;
    c.prefix_len = 8;
    struct bench_dataset *d = open_ok(&c), *again = open_ok(&c);
    int32_t a[64], b[64], first[64];
    int32_t least = 1000, most = 0;
    assert_int_equal(bench_dataset_size(d), 500);
    tokens(d, 0, first);
    for (size_t i = 0; i < 500; i++) {
        const struct bench_item *it = bench_dataset_item(d, i);
        assert_null(it->text);
        assert_in_range(it->input_len - 8, 24, 40);
        assert_in_range(it->output_len, 12, 20);
        if (it->input_len - 8 < least) least = it->input_len - 8;
        if (it->input_len - 8 > most) most = it->input_len - 8;
        tokens(d, i, a);
        assert_int_equal(bench_dataset_item(again, i)->input_len, it->input_len);
        tokens(again, i, b);
        assert_memory_equal(a, b, (size_t)it->input_len * sizeof *a);
        /* the shared prefix and no more than chance: 1 in 2048 a token */
        if (i) assert_in_range(common_prefix(a, first, 32), 8, 11);
    }
    assert_int_equal(least, 24);
    assert_int_equal(most, 40);
    c.seed = 2;
    struct bench_dataset *other = open_ok(&c);
    tokens(other, 0, b);
    assert_in_range(common_prefix(first, b, 32), 0, 3);
    bench_dataset_close(d);
    bench_dataset_close(again);
    bench_dataset_close(other);
}

static void prefix_repetition(void **state)
{
    (void)state;
    struct bench_dataset_config c = config_of(BENCH_PREFIX, "");
    c.n_requests = 30;
    c.prefix_len = 24;
    struct bench_dataset *d = open_ok(&c);
    int32_t all[30][64];
    for (size_t i = 0; i < 30; i++) {
        assert_int_equal(bench_dataset_item(d, i)->input_len, 56);
        tokens(d, i, all[i]);
    }
    size_t n_alike = 0;
    for (size_t i = 0; i < 30; i++)
        for (size_t k = i + 1; k < 30; k++) {
            size_t common = common_prefix(all[i], all[k], 56);
            if (common >= 24) n_alike++;
            assert_true(common < 28 && (common < 3 || common >= 24));
        }
    assert_int_equal(n_alike, 3 * 45); /* three prefixes, ten requests each */
    bench_dataset_close(d);
}

/* --- traces ----------------------------------------------------------------------------------- */

static const char g_mooncake[] =
    "{\"timestamp\": 1000, \"input_length\": 1300, \"output_length\": 40, \"hash_ids\": [0, 1, "
    "2]}\n"
    "{\"timestamp\": 1000, \"input_length\": 1100, \"output_length\": 0, \"hash_ids\": [0, 1, 7]}\n"
    "\n"
    "{\"timestamp\": 4000, \"input_length\": 512, \"output_length\": 9, \"hash_ids\": [0]}\r\n"
    "{\"timestamp\": 4000, \"input_length\": 600, \"output_length\": 9, \"hash_ids\": [1, 9]}\n";

static void mooncake(void **state)
{
    (void)state;
    struct bench_dataset_config c = config_of(BENCH_MOONCAKE, file_of(g_mooncake));
    c.length_scale = 1.0 / 32; /* 16 tokens a hash id */
    c.time_scale = 0.5;
    struct bench_dataset *d = open_ok(&c);
    assert_int_equal(bench_dataset_size(d), 4);
    assert_int_equal(bench_dataset_block_tokens(d), 16);
    static const struct {
        double at_s;
        int32_t input, output;
    } want[] = {{0, 41, 1}, {0.75, 34, 1}, {1.5, 16, 1}, {2.25, 19, 1}};
    int32_t ids[4][64];
    for (size_t i = 0; i < 4; i++) {
        const struct bench_item *it = bench_dataset_item(d, i);
        if (fabs(it->at_s - want[i].at_s) > 1e-12)
            fail_msg("request %zu at %g s, expected %g", i, it->at_s, want[i].at_s);
        assert_int_equal(it->input_len, want[i].input);
        assert_int_equal(it->output_len, want[i].output);
        tokens(d, i, ids[i]);
    }
    /* ids 0, 1 shared, 2 and 7 differ */
    assert_in_range(common_prefix(ids[0], ids[1], 34), 32, 33);
    assert_in_range(common_prefix(ids[0], ids[2], 16), 16, 16); /* id 0 */
    assert_in_range(common_prefix(ids[0], ids[3], 19), 0, 1);
    /* block 1 is the same wherever it stands */
    assert_int_equal(common_prefix(ids[0] + 16, ids[3], 16), 16);
    bench_dataset_close(d);

    c.spread = false;
    c.length_scale = 1;
    c.time_scale = 1;
    c.block_tokens = 4; /* fewer tokens than the lengths say: the ids decide */
    c.max_output_len = 20;
    d = open_ok(&c);
    assert_true(bench_dataset_item(d, 1)->at_s == 0 && bench_dataset_item(d, 2)->at_s == 3 &&
                bench_dataset_item(d, 3)->at_s == 3);
    assert_int_equal(bench_dataset_item(d, 0)->input_len, 12);
    assert_int_equal(bench_dataset_item(d, 0)->output_len, 20);
    assert_int_equal(bench_dataset_item(d, 1)->output_len, 1); /* 0 in the trace */
    assert_int_equal(bench_dataset_n_cut(d), 1);
    bench_dataset_close(d);
    unlink(g_path);
}

static void azure(void **state)
{
    (void)state;
    struct bench_dataset_config c =
        config_of(BENCH_AZURE, file_of("TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
                                       "2023-11-16 23:59:59.9500000,4808,10\r\n"
                                       "2023-11-17 00:00:00.0500000,3180,0\r\n"
                                       "2023-11-17T00:00:01+00:00,5,7\r\n"));
    struct bench_dataset *d = open_ok(&c);
    assert_int_equal(bench_dataset_size(d), 3);
    static const double at[] = {0, 0.1, 1.05};
    for (size_t i = 0; i < 3; i++)
        if (fabs(bench_dataset_item(d, i)->at_s - at[i]) > 1e-6)
            fail_msg("request %zu at %.9g s", i, bench_dataset_item(d, i)->at_s);
    assert_int_equal(bench_dataset_item(d, 0)->input_len, 4808);
    assert_int_equal(bench_dataset_item(d, 1)->output_len, 1);
    bench_dataset_close(d);
    c.n_requests = 2;
    d = open_ok(&c);
    assert_int_equal(bench_dataset_size(d), 2);
    bench_dataset_close(d);
    unlink(g_path);
}

static void timed_trace(void **state)
{
    (void)state;
    struct bench_dataset_config c = config_of(
        BENCH_TIMED, file_of("{\"timestamp\": 0.5, \"prompt\": \"hello\", \"output_length\": 3}\n"
                             "{\"timestamp\": 2.5, \"input_length\": 10, \"output_length\": 4}\n"));
    struct bench_dataset *d = open_ok(&c);
    assert_string_equal(bench_dataset_item(d, 0)->text, "hello");
    assert_null(bench_dataset_item(d, 1)->text);
    assert_int_equal(bench_dataset_item(d, 1)->input_len, 10);
    if (fabs(bench_dataset_item(d, 1)->at_s - 0.002) > 1e-12)
        fail_msg("at %g", bench_dataset_item(d, 1)->at_s);
    bench_dataset_close(d);
    unlink(g_path);
}

/* --- texts ------------------------------------------------------------------------------------ */

static void custom(void **state)
{
    (void)state;
    struct bench_dataset_config c =
        config_of(BENCH_CUSTOM, file_of("{\"prompt\": \"one\", \"output_tokens\": 5}\n{\"prompt\": "
                                        "\"two\"}\n{\"prompt\": \"three\"}"));
    struct bench_dataset *d = open_ok(&c);
    assert_int_equal(bench_dataset_size(d), 3);
    assert_string_equal(bench_dataset_item(d, 0)->text, "one");
    assert_int_equal(bench_dataset_item(d, 0)->output_len, 5);
    assert_int_equal(bench_dataset_item(d, 1)->output_len, 256);
    bench_dataset_close(d);
    c.n_requests = 7; /* from the start again */
    c.output_len = 9;
    d = open_ok(&c);
    assert_int_equal(bench_dataset_size(d), 7);
    assert_string_equal(bench_dataset_item(d, 6)->text, "one");
    assert_int_equal(bench_dataset_item(d, 6)->output_len, 9);
    bench_dataset_close(d);
    c.shuffle = true;
    c.n_requests = 3;
    bool moved = false;
    for (c.seed = 0; c.seed < 20; c.seed++) { /* each row once, in an order of the seed's */
        d = open_ok(&c);
        unsigned seen = 0;
        /* n, w, h */
        for (size_t i = 0; i < 3; i++) seen |= 1u << (bench_dataset_item(d, i)->text[1] - 'a');
        assert_int_equal(__builtin_popcount(seen), 3);
        moved |= bench_dataset_item(d, 0)->text[0] != 'o';
        bench_dataset_close(d);
    }
    assert_true(moved);
    unlink(g_path);
}

/* A tokenizer of words. */
static td_status count_words(void *ctx, const char *const *texts, size_t n, int32_t *counts,
                             struct td_err *err)
{
    (void)err;
    for (size_t i = 0; i < n; i++) {
        counts[i] = 1;
        for (const char *p = texts[i]; *p; p++) counts[i] += *p == ' ';
    }
    *(size_t *)ctx += n;
    return TD_OK;
}

static void sharegpt(void **state)
{
    (void)state;
    size_t n_counted = 0;
    struct bench_dataset_config c = config_of(
        BENCH_SHAREGPT,
        file_of(
            "[{\"conversations\": [{\"from\": \"human\", \"value\": \"a b c d e\"}, {\"from\": "
            "\"gpt\", \"value\": \"1 2 3 4 5 6\"}]},"
            " {\"conversations\": [{\"from\": \"human\", \"value\": \"too short\"}, {\"from\": "
            "\"gpt\", \"value\": \"1 2 3 4 5 6\"}]},"
            " {\"conversations\": [{\"from\": \"human\", \"value\": \"p q r s\"}, {\"from\": "
            "\"gpt\", \"value\": \"short\"}]},"
            " {\"conversations\": [{\"from\": \"human\", \"value\": \"nobody answers this one\"}]},"
            " {\"conversations\": [{\"from\": \"human\", \"value\": \"w x y z\"}, {\"from\": "
            "\"gpt\", \"value\": \"1 2 3 4\"}]}]"));
    c.count_tokens = count_words;
    c.count_ctx = &n_counted;
    struct bench_dataset *d = open_ok(&c);
    assert_int_equal(bench_dataset_size(d), 2);
    assert_int_equal(n_counted, 8);
    assert_string_equal(bench_dataset_item(d, 0)->text, "a b c d e");
    assert_int_equal(bench_dataset_item(d, 0)->input_len, 5);
    assert_int_equal(bench_dataset_item(d, 0)->output_len, 6);
    assert_string_equal(bench_dataset_item(d, 1)->text, "w x y z");
    bench_dataset_close(d);
    c.output_len = 10; /* then short answers do not matter */
    d = open_ok(&c);
    assert_int_equal(bench_dataset_size(d), 3);
    assert_int_equal(bench_dataset_item(d, 1)->output_len, 10);
    bench_dataset_close(d);
    unlink(g_path);
}

/* --- wrong files ------------------------------------------------------------------------------ */

static const struct {
    enum bench_dataset_kind kind;
    const char *text;
    const char *parts[3];
} malformed[] = {
    {BENCH_MOONCAKE, "", {"has no request"}},
    {BENCH_MOONCAKE,
     "{\"timestamp\": 0, \"input_length\": 5, \"output_length\": 1, \"hash_ids\": "
     "[0]}\n{\"timestamp\": 1, \"inp",
     {"line 2", "premature end"}},
    {BENCH_MOONCAKE, "[1]\n", {"line 1", "must be an object"}},
    {BENCH_MOONCAKE,
     "{\"input_length\": 5, \"output_length\": 1, \"hash_ids\": [0]}\n",
     {"line 1", "timestamp is missing"}},
    {BENCH_MOONCAKE,
     "{\"timestamp\": -1, \"input_length\": 5, \"output_length\": 1, \"hash_ids\": [0]}\n",
     {"line 1", "timestamp", "-1"}},
    {BENCH_MOONCAKE,
     "{\"timestamp\": \"now\", \"input_length\": 5, \"output_length\": 1, \"hash_ids\": [0]}\n",
     {"line 1", "timestamp", "now"}},
    {BENCH_MOONCAKE,
     "\n\n{\"timestamp\": 0, \"output_length\": 1, \"hash_ids\": [0]}\n",
     {"line 3", "input_length is missing"}},
    {BENCH_MOONCAKE,
     "{\"timestamp\": 0, \"input_length\": 0, \"output_length\": 1, \"hash_ids\": []}\n",
     {"line 1", "input_length", "0"}},
    {BENCH_MOONCAKE,
     "{\"timestamp\": 0, \"input_length\": 99999999999, \"output_length\": 1, \"hash_ids\": "
     "[]}\n",
     {"line 1", "input_length", "99999999999"}},
    {BENCH_MOONCAKE,
     "{\"timestamp\": 0, \"input_length\": 5.5, \"output_length\": 1, \"hash_ids\": [0]}\n",
     {"line 1", "input_length", "5.5"}},
    {BENCH_MOONCAKE,
     "{\"timestamp\": 0, \"input_length\": 5, \"hash_ids\": [0]}\n",
     {"line 1", "output_length is missing"}},
    {BENCH_MOONCAKE,
     "{\"timestamp\": 0, \"input_length\": 5, \"output_length\": 1e9, \"hash_ids\": [0]}\n",
     {"line 1", "output_length"}},
    {BENCH_MOONCAKE,
     "{\"timestamp\": 0, \"input_length\": 5, \"output_length\": 1}\n",
     {"line 1", "hash_ids is missing"}},
    {BENCH_MOONCAKE,
     "{\"timestamp\": 0, \"input_length\": 513, \"output_length\": 1, \"hash_ids\": [0]}\n",
     {"line 1", "hash_ids has 1 ids", "must be 2"}},
    {BENCH_MOONCAKE,
     "{\"timestamp\": 0, \"input_length\": 5, \"output_length\": 1, \"hash_ids\": [-3]}\n",
     {"line 1", "hash_ids[0]"}},
    {BENCH_MOONCAKE,
     "{\"timestamp\": 5, \"input_length\": 5, \"output_length\": 1, \"hash_ids\": "
     "[0]}\n{\"timestamp\": 4, \"input_length\": 5, "
     "\"output_length\": 1, \"hash_ids\": [0]}\n",
     {"line 2", "timestamp", "sort"}},
    {BENCH_TIMED,
     "{\"timestamp\": 0, \"output_length\": 1}\n",
     {"line 1", "input_length is missing"}},
    {BENCH_TIMED,
     "{\"timestamp\": 0, \"prompt\": \"\", \"output_length\": 1}\n",
     {"line 1", "prompt is empty"}},
    {BENCH_AZURE, "", {"line 1", "header"}},
    {BENCH_AZURE, "TIMESTAMP,Tokens\n", {"line 1", "header"}},
    {BENCH_AZURE,
     "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,12\n",
     {"line 2", "three fields"}},
    {BENCH_AZURE,
     "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,12,1,1\n",
     {"line 2", "three fields"}},
    {BENCH_AZURE,
     "TIMESTAMP,ContextTokens,GeneratedTokens\n16 Nov 2023,12,1\n",
     {"line 2", "TIMESTAMP", "16 Nov 2023"}},
    {BENCH_AZURE,
     "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97x,12,1\n",
     {"line 2", "TIMESTAMP"}},
    {BENCH_AZURE,
     "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,twelve,1\n",
     {"line 2", "ContextTokens", "twelve"}},
    {BENCH_AZURE,
     "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,12,-1\n",
     {"line 2", "GeneratedTokens", "-1"}},
    {BENCH_AZURE,
     "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,12,1\n2023-11-16 "
     "18:17:02,12,1\n",
     {"line 3", "TIMESTAMP", "sort"}},
    {BENCH_CUSTOM, "{\"text\": \"a\"}\n", {"line 1", "prompt is missing"}},
    {BENCH_CUSTOM, "{\"prompt\": 5}\n", {"line 1", "prompt"}},
    {BENCH_CUSTOM, "{\"prompt\": \"a\", \"output_tokens\": 0}\n", {"line 1", "output_tokens", "0"}},
    {BENCH_CUSTOM, "\n\n", {"has no request"}},
    {BENCH_SHAREGPT, "{}", {"must be an array"}},
    {BENCH_SHAREGPT, "[{\"conversation\": []}]", {"item 0", "conversations is missing"}},
    {BENCH_SHAREGPT,
     "[{\"conversations\": [{\"value\": 1}, {\"value\": \"b\"}]}]",
     {"item 0", "value"}},
    {BENCH_SHAREGPT, "[]", {"has no request"}},
};

static void malformed_files(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof malformed / sizeof *malformed; i++) {
        size_t n_counted = 0;
        struct bench_dataset_config c = config_of(malformed[i].kind, file_of(malformed[i].text));
        c.count_tokens = count_words;
        c.count_ctx = &n_counted;
        struct bench_dataset *d = NULL;
        struct td_err err = {0};
        td_status s = bench_dataset_open(&c, &d, &err);
        if (s != TD_ERR_INVALID) fail_msg("case %zu: status %d '%s'", i, s, err.msg);
        if (!strstr(err.msg, g_path)) fail_msg("case %zu: '%s' does not name the file", i, err.msg);
        for (size_t k = 0; k < 3 && malformed[i].parts[k]; k++)
            if (!strstr(err.msg, malformed[i].parts[k]))
                fail_msg("case %zu: '%s' lacks '%s'", i, err.msg, malformed[i].parts[k]);
        unlink(g_path);
    }
}

static void bad_configs(void **state)
{
    (void)state;
    struct bench_dataset_config c = config_of(BENCH_RANDOM, ""), bad[10];
    c.n_requests = 5;
    static const char *const fields[] = {
        "num_prompts", "input_len",  "output_len",   "random_range_ratio", "vocabulary",
        "num_prompts", "time_scale", "length_scale", "--dataset-path",     "--dataset-path"};
    for (size_t i = 0; i < 10; i++) bad[i] = c;
    bad[0].n_requests = 0;
    bad[1].input_len = 0;
    bad[2].output_len = 0;
    bad[3].range_ratio = 1;
    bad[4].vocab = 0;
    bad[5].n_requests = UINT64_MAX;
    bad[6].kind = BENCH_MOONCAKE, bad[6].time_scale = 0;
    bad[7].kind = BENCH_MOONCAKE, bad[7].length_scale = NAN;
    bad[8].kind = BENCH_AZURE; /* no file */
    bad[9].kind = BENCH_CUSTOM, bad[9].path = "/nonexistent/prompts.jsonl";
    for (size_t i = 0; i < 10; i++) {
        struct bench_dataset *d = NULL;
        struct td_err err = {0};
        assert_int_equal(bench_dataset_open(&bad[i], &d, &err), TD_ERR_INVALID);
        if (!strstr(err.msg, fields[i])) fail_msg("case %zu: '%s' lacks %s", i, err.msg, fields[i]);
    }
}

/* --- the published traces --------------------------------------------------------------------- */

static int compare(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static const char *data_file(const char *name, char path[512])
{
    const char *data = getenv("TANDEM_DATA");
    snprintf(path, 512, "%s/%s", data && data[0] ? data : "../shared/data", name);
    return access(path, R_OK) ? NULL : path;
}

/* Counts of the whole Mooncake conversation trace, and of its prefix hits with an endless cache,
 * as published with the data. */
static void mooncake_conversation(void **state)
{
    (void)state;
    char path[512];
    if (!data_file("mooncake-fast25/conversation_trace.jsonl", path)) skip();
    struct bench_dataset_config c = config_of(BENCH_MOONCAKE, path);
    struct bench_dataset *d = open_ok(&c);
    assert_int_equal(bench_dataset_size(d), 12031);
    uint64_t n_blocks = 0, n_input = 0;
    for (size_t i = 0; i < 12031; i++)
        n_blocks += bench_dataset_item(d, i)->n_hashes,
            n_input += (uint64_t)bench_dataset_item(d, i)->input_len;
    assert_int_equal(n_blocks, 288500);
    assert_int_equal((n_input + 6015) / 12031, 12035);
    /* Leading blocks seen before: 36.6 %. Unique ids: 182,790. */
    uint8_t *seen = calloc(1 << 20, 1);
    uint64_t n_hit = 0, n_unique = 0;
    assert_non_null(seen);
    for (size_t i = 0; i < 12031; i++) {
        const struct bench_item *it = bench_dataset_item(d, i);
        bool leading = true;
        for (uint32_t b = 0; b < it->n_hashes; b++) {
            assert_true(it->hashes[b] < 1 << 20);
            leading = leading && seen[it->hashes[b]];
            n_hit += leading;
            n_unique += !seen[it->hashes[b]];
            seen[it->hashes[b]] = 1;
        }
    }
    free(seen);
    assert_int_equal(n_unique, 182790);
    assert_int_equal((n_hit * 1000 + n_blocks / 2) / n_blocks, 366);
    /* Spread groups: no two requests at one time, and the order kept. */
    for (size_t i = 1; i < 12031; i++)
        assert_true(bench_dataset_item(d, i)->at_s > bench_dataset_item(d, i - 1)->at_s);
    assert_in_range((uint64_t)bench_dataset_item(d, 12030)->at_s, 3536, 3540);
    bench_dataset_close(d);
}

static void azure_traces(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        size_t n;
        uint64_t duration_s, input_p50, output_p50;
    } traces[] = {
        {"azure-llm-2023/AzureLLMInferenceTrace_code.csv", 8819, 3436, 1469, 13},
        {"azure-llm-2023/AzureLLMInferenceTrace_conv.csv", 19366, 3502, 1020, 129},
    };
    char path[512];
    for (size_t t = 0; t < 2; t++) {
        if (!data_file(traces[t].name, path)) skip();
        struct bench_dataset_config c = config_of(BENCH_AZURE, path);
        struct bench_dataset *d = open_ok(&c);
        size_t n = bench_dataset_size(d);
        assert_int_equal(n, traces[t].n);
        assert_in_range((uint64_t)bench_dataset_item(d, n - 1)->at_s, traces[t].duration_s - 1,
                        traces[t].duration_s + 1);
        int64_t *lens = malloc(n * sizeof *lens);
        assert_non_null(lens);
        for (size_t i = 0; i < n; i++) lens[i] = bench_dataset_item(d, i)->input_len;
        qsort(lens, n, sizeof *lens, compare);
        assert_int_equal(lens[n / 2], traces[t].input_p50);
        for (size_t i = 0; i < n; i++) lens[i] = bench_dataset_item(d, i)->output_len;
        qsort(lens, n, sizeof *lens, compare);
        assert_int_equal(lens[n / 2], traces[t].output_p50);
        free(lens);
        bench_dataset_close(d);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_prompts), cmocka_unit_test(prefix_repetition),
        cmocka_unit_test(mooncake),       cmocka_unit_test(azure),
        cmocka_unit_test(timed_trace),    cmocka_unit_test(custom),
        cmocka_unit_test(sharegpt),       cmocka_unit_test(malformed_files),
        cmocka_unit_test(bad_configs),    cmocka_unit_test(mooncake_conversation),
        cmocka_unit_test(azure_traces),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
