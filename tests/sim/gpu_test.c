/* gpu_test.c - from the shapes of a config.json and the constants of a card to coefficients of a
 * step. */
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

#include "sim/gpu.h"

#define LLAMA_8B "bench/configs/llama-3.1-8b.json"
#define LLAMA_70B "bench/configs/llama-3.1-70b.json"

static struct td_model_config load(const char *path)
{
    struct td_model_config m;
    struct td_err err = {0};
    if (td_gpu_model_load(path, &m, &err)) fail_msg("%s", err.msg);
    return m;
}

static const struct td_gpu *card(const char *name)
{
    const struct td_gpu *g = NULL;
    assert_int_equal(td_gpu_find(name, &g, NULL), TD_OK);
    return g;
}

static struct td_perf perf_of(const struct td_gpu *g, const struct td_model_config *m, uint32_t tp)
{
    struct td_perf p;
    struct td_err err = {0};
    if (td_gpu_perf(g, m, tp, TD_BF16, &p, &err)) fail_msg("%s", err.msg);
    return p;
}

static void near(double have, double want, const char *what)
{
    if (!(fabs(have - want) <= 1e-9 * fabs(want)))
        fail_msg("%s is %.12g, must be %.12g", what, have, want);
}

static void shapes_give_bytes(void **state)
{
    (void)state;
    struct td_gpu_shape z;
    struct td_model_config m = load(LLAMA_8B), big = load(LLAMA_70B);
    assert_int_equal(td_gpu_shape(&m, 1, TD_BF16, &z, NULL), TD_OK);
    assert_int_equal(z.weight_bytes, 2 * 8030261248ull);
    assert_int_equal(z.kv_bytes_per_token, 131072);
    near(z.matrix_elements, 218103808,
         "matrices of a layer"); /* 4096 * (6144 + 4096 + 3 * 14336) */
    near(z.head_elements, 525336576, "lm_head");
    assert_int_equal(td_gpu_shape(&m, 4, TD_BF16, &z, NULL), TD_OK);
    near(z.matrix_elements, 54525952, "matrices of a layer, tp 4");
    assert_int_equal(z.kv_bytes_per_token, 32768);
    /* what is split, norms, the whole embedding, a quarter of lm_head */
    assert_int_equal(z.weight_bytes,
                     2ull * (32 * (54525952ull + 2 * 4096) + 4096 + 525336576 + 131334144));

    assert_int_equal(td_gpu_shape(&big, 1, TD_BF16, &z, NULL), TD_OK);
    assert_int_equal(z.weight_bytes, 2 * 70553706496ull);
    assert_int_equal(td_gpu_shape(&big, 8, TD_BF16, &z, NULL), TD_OK);
    assert_int_equal(z.kv_bytes_per_token, 80 * 2 * 128 * 2);

    for (const char *const *path =
             (const char *const[]){"llama-3.2-1b", "mistral-7b", "qwen2.5-7b", "qwen3-8b", NULL};
         *path; path++) {
        char file[96];
        snprintf(file, sizeof file, "bench/configs/%s.json", *path);
        m = load(file);
        assert_int_equal(td_gpu_shape(&m, 1, TD_BF16, &z, NULL), TD_OK);
        assert_int_equal(z.weight_bytes, 2 * (uint64_t)td_model_config_n_params(&m));
    }

    /* a byte for an element, and four for the scale of 128 of them */
    struct td_perf p;
    m = load(LLAMA_8B);
    assert_int_equal(td_gpu_shape(&m, 1, TD_INT8, &z, NULL), TD_OK);
    assert_int_equal(z.kv_bytes_per_token, 67584);
    assert_int_equal(td_gpu_perf(card("h200"), &m, 4, TD_FP8, &p, NULL), TD_OK);
    near(p.kv_bytes_per_token, 67584, "KV of a token on the wire in fp8");
    near(p.b[2], perf_of(card("h200"), &m, 4).b[2] * 67584 / 131072, "a token of the context");

    m.n_heads = 32;
    m.n_kv_heads = 2;
    m.head_dim = 128;
    m.n_layers = 10;
    assert_int_equal(td_gpu_shape(&m, 8, TD_BF16, &z, NULL),
                     TD_OK); /* four ranks share a head, each keeps it */
    assert_int_equal(z.kv_bytes_per_token, 10 * 2 * 128 * 2);
    near(perf_of(card("h200"), &m, 8).kv_bytes_per_token, 10 * 2 * 2 * 128 * 2,
         "KV of a token on the wire");
}

/* a0, a1, a2, b0, b1, b2. */
static void is(const struct td_perf *p, const double want[6])
{
    const double have[6] = {p->a[0], p->a[1], p->a[2], p->b[0], p->b[1], p->b[2]};
    static const char *const names[6] = {"a0", "a1", "a2", "b0", "b1", "b2"};
    for (int i = 0; i < 6; i++) near(have[i], want[i], names[i]);
}

/* A card of which one constant at a time is not zero: each coefficient has what it should and no
 * more. */
static void constants_give_coefficients(void **state)
{
    (void)state;
    struct td_model_config m = load(LLAMA_8B);
    const double layers = 32, matrices = 32 * 218103808.0, head = 525336576;
    const double passes = (2 * 4 * 4096 + 2 * (4096 + 1024) + 3 * 14336) * 2;
    struct td_gpu base = {.name = "x", .memory_bytes = 80000000000ull}, g;
    struct td_perf p;

#define CARD(field, value) (g = base, g.field = (value), p = perf_of(&g, &m, 1))
#define IS(...) is(&p, (const double[6]){__VA_ARGS__})
    CARD(gemm_decode.launch_us, 1), IS(1e-6, 0, 0, (4 * layers + 1) * 1e-6, 0, 0);
    CARD(gemm_decode.byte_ps, 1), IS(2 * head * 1e-12, 0, 0, 2 * (matrices + head) * 1e-12, 0, 0);
    CARD(gemm_decode.flop_fs, 1), IS(0, 0, 0, 0, 2 * (matrices + head) * 1e-15, 0);
    CARD(gemm_prefill.launch_us, 1), IS(4 * layers * 1e-6, 0, 0, 0, 0, 0);
    CARD(gemm_prefill.byte_ps, 1), IS(2 * matrices * 1e-12, 0, 0, 0, 0, 0);
    CARD(gemm_prefill.flop_fs, 1), IS(0, 2 * matrices * 1e-15, 0, 0, 0, 0);
    CARD(attn_prefill.launch_us, 1), IS(layers * 1e-6, 0, 0, 0, 0, 0);
    CARD(attn_prefill.element_ps, 1), IS(0, layers * 4096 * 1e-12, 0, 0, 0, 0);
    CARD(attn_prefill.flop_fs, 1), IS(0, 0, layers * 4 * 4096 * 1e-15, 0, 0, 0);
    CARD(attn_decode.launch_us, 1), IS(0, 0, 0, layers * 1e-6, 0, 0);
    CARD(attn_decode.element_ps, 1), IS(0, 0, 0, 0, layers * 1024 * 1e-12, 0);
    CARD(attn_decode.byte_ps, 1), IS(0, 0, 0, 0, 0, 131072 * 1e-12);
    CARD(elementwise.launch_us, 1), IS(layers * 4 * 1e-6, 0, 0, layers * 4 * 1e-6, 0, 0);
    CARD(elementwise.byte_ps, 1), IS(0, layers * passes * 1e-12, 0, 0, layers * passes * 1e-12, 0);
    CARD(all_reduce[0].launch_us, 1), IS(0, 0, 0, 0, 0, 0); /* one card has nobody to add with */
    for (uint32_t tp = 2, i = 0; tp <= 8; tp *= 2, i++) {
        g = base;
        g.all_reduce[i].launch_us = 1;
        p = perf_of(&g, &m, tp);
        IS(layers * 2 * 1e-6, 0, 0, layers * 2 * 1e-6, 0, 0);
        g.all_reduce[i].launch_us = 0;
        g.all_reduce[i].byte_ps = 1;
        p = perf_of(&g, &m, tp);
        IS(0, layers * 2 * 4096 * 2 * 1e-12, 0, 0, layers * 2 * 4096 * 2 * 1e-12, 0);
        assert_int_equal(p.gpus, tp);
    }
    p = perf_of(&base, &m, 1);
    assert_int_equal(p.kv_tokens, (uint64_t)((0.9 * 80e9 - 2 * 8030261248.0) / 131072));
    near(p.kv_bytes_per_token, 131072, "KV of a token");
    assert_int_equal(p.max_context, 131072);
}

/* The cards of the table, against what is known of them and against the table made by hand. */
static void cards_are_plausible(void **state)
{
    (void)state;
    struct td_model_config m = load(LLAMA_8B);
    struct td_perf hand, p = perf_of(card("h200"), &m, 1);
    assert_int_equal(td_perf_load("llama-8b-h200", &hand, NULL), TD_OK);
    assert_true(fabs(p.b[0] / hand.b[0] - 1) < 0.1 && fabs(p.a[1] / hand.a[1] - 1) < 0.1 &&
                fabs(p.b[2] / hand.b[2] - 1) < 0.1);
    static const char *const slower_first[] = {"l40s", "a100", "h100", "h200", "b200"};
    for (int i = 0; i + 1 < 5; i++) {
        struct td_perf slow = perf_of(card(slower_first[i]), &m, 1),
                       fast = perf_of(card(slower_first[i + 1]), &m, 1);
        assert_true(slow.b[0] > fast.b[0] && slow.b[2] > fast.b[2]);
    }
    for (const struct td_gpu *g = td_gpus; g->name; g++) {
        assert_true(!g->source == !!g->estimated_from);
        if (g->estimated_from) assert_non_null(card(g->estimated_from)->source);
        struct td_perf one = perf_of(g, &m, 1), four = perf_of(g, &m, 4);
        double flops = 2 * 32 * 218103808.0 / one.a[1];
        assert_true(flops > 100e12 &&
                    flops < 2250e12); /* no faster than the fastest tensor cores */
        assert_true(four.b[0] < one.b[0] && four.b[0] > one.b[0] / 4 &&
                    four.kv_tokens > 4 * one.kv_tokens);
    }
}

static void what_cannot_be_is_refused_by_name(void **state)
{
    (void)state;
    struct td_model_config m = load(LLAMA_8B), big = load(LLAMA_70B);
    struct td_gpu_shape z;
    struct td_perf p;
    const struct td_gpu *g;
    struct td_err err = {0};
    assert_int_equal(td_gpu_perf(card("h100"), &big, 1, TD_BF16, &p, &err), TD_ERR_LIMIT);
    assert_string_equal(
        err.msg,
        "the weights take 141.1 GB of each h100 with tp 1, limit 77.0 GB (0.9 of its memory, less "
        "1,024 tokens of KV): a larger tp or card");
    assert_int_equal(td_gpu_perf(card("h100"), &big, 2, TD_BF16, &p, &err), TD_OK);
    assert_int_equal(td_gpu_find("v100", &g, &err), TD_ERR_INVALID);
    assert_string_equal(err.msg, "gpu is \"v100\", must be one of a100, h100, h200, b200, l40s");
    static const struct {
        uint32_t tp;
        int32_t heads, kv_heads, intermediate;
        const char *want;
    } cases[] = {
        {0, 32, 8, 14336, "tp is 0, must be 1, 2, 4 or 8"},
        {3, 32, 8, 14336, "tp is 3, must be 1, 2, 4 or 8"},
        {16, 32, 8, 14336, "tp is 16, must be 1, 2, 4 or 8"},
        {8, 28, 4, 14336, "tp is 8, must divide num_attention_heads (28)"},
        {4, 32, 8, 14338, "tp is 4, must divide intermediate_size (14338)"},
        {2, 36, 3, 14336, "tp is 2, must divide num_key_value_heads (3) or be a multiple of it"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        m.n_heads = cases[i].heads;
        m.n_kv_heads = cases[i].kv_heads;
        m.intermediate = cases[i].intermediate;
        assert_int_equal(td_gpu_shape(&m, cases[i].tp, TD_BF16, &z, &err), TD_ERR_INVALID);
        assert_string_equal(err.msg, cases[i].want);
    }
    static const char *const specs[] = {"gpu:",
                                        "gpu:h100",
                                        "gpu:h100:",
                                        "gpu:v100:" LLAMA_8B,
                                        "gpu:h100:tp3:" LLAMA_8B,
                                        "gpu:h100:tp2:",
                                        "gpu:h100:/nowhere",
                                        "gpu:h100:tp99999:" LLAMA_8B,
                                        "gpu:a-name-that-is-longer-than-any-card-has:" LLAMA_8B};
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++)
        assert_int_not_equal(td_perf_load(specs[i], &p, &err), TD_OK);
    assert_int_equal(td_perf_load("gpu:h100:tp4:" LLAMA_70B, &p, &err), TD_OK);
    assert_string_equal(p.name, "h100:tp4");
}

/* Models that are none of ours, and files that contradict themselves: by field, before anything is
 * derived. */
static void bad_configs_are_refused_by_field(void **state)
{
    (void)state;
#define HEAD                                                                                       \
    "{\"model_type\": \"llama\", \"num_hidden_layers\": 2, \"num_attention_heads\": 4, "           \
    "\"max_position_embeddings\": 64, "
    static const struct {
        const char *text, *want;
    } cases[] = {
        {"{\"model_type\": \"dbrx\", \"num_local_experts\": 8}", "model_type is dbrx"},
        {"{\"model_type\": \"qwen3_moe\", \"num_hidden_layers\": 2, \"num_attention_heads\": 4, "
         "\"num_key_value_heads\": 2, \"max_position_embeddings\": 64, \"hidden_size\": 64, "
         "\"intermediate_size\": 64, \"vocab_size\": 99, \"num_experts\": 128, "
         "\"num_experts_per_tok\": 8, \"moe_intermediate_size\": 32}",
         "num_experts is 128, but step times are known for dense models alone"},
        {HEAD "\"hidden_size\": 64, \"intermediate_size\": 64, \"vocab_size\": 99, "
              "\"num_local_experts\": 8}",
         "num_local_experts"},
        {HEAD "\"hidden_size\": 64, \"intermediate_size\": 64, \"vocab_size\": 99, "
              "\"quantization_config\": {\"quant_method\": \"fp8\"}}",
         "quantization_config"},
        {HEAD "\"intermediate_size\": 64, \"vocab_size\": 99}", "hidden_size is missing"},
        {HEAD "\"hidden_size\": 64, \"intermediate_size\": -1, \"vocab_size\": 99}",
         "intermediate_size"},
        {HEAD "\"hidden_size\": 64, \"intermediate_size\": 64, \"vocab_size\": 99999999}",
         "vocab_size"},
        {HEAD "\"hidden_size\": 64, \"intermediate_size\": 64, \"vocab_size\": 99, "
              "\"num_key_value_heads\": 3}",
         "num_key_value_heads is 3"},
        {"[]", "must be a JSON object"},
        {"{", "config.json"},
    };
    char folder[] = "/tmp/gpu_test_XXXXXX", path[64];
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/config.json", folder);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct td_model_config m;
        struct td_err err = {0};
        FILE *f = fopen(path, "w");
        assert_non_null(f);
        fputs(cases[i].text, f);
        fclose(f);
        assert_int_not_equal(td_gpu_model_load(folder, &m, &err), TD_OK);
        if (!strstr(err.msg, cases[i].want) || !strstr(err.msg, path))
            fail_msg("\"%s\" does not say %s and %s", err.msg, cases[i].want, path);
        err = (struct td_err){0};
        assert_int_not_equal(td_gpu_model_load(path, &m, &err), TD_OK);
        assert_non_null(strstr(err.msg, cases[i].want));
    }
    unlink(path);
    rmdir(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shapes_give_bytes),
        cmocka_unit_test(constants_give_coefficients),
        cmocka_unit_test(cards_are_plausible),
        cmocka_unit_test(what_cannot_be_is_refused_by_name),
        cmocka_unit_test(bad_configs_are_refused_by_field),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
