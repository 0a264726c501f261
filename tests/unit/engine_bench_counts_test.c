/* engine_bench_counts_test.c - operations of a prefill and bytes of a decode step, beside numbers
 * that were worked out by hand from the shapes. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/engine_bench_counts.h"
#include "common/model/model.h"

/* q 8 x 8, k and v 4 x 8: 128 in a layer's first half; o 8 x 8, gate, up and down of 12 x 8: 352 in
 * its second. */
#define DENSE                                                                                      \
    "\"hidden_size\":8,\"intermediate_size\":12,\"num_hidden_layers\":3,"                          \
    "\"num_attention_heads\":4,\"num_key_value_heads\":2,\"vocab_size\":10,"                       \
    "\"max_position_embeddings\":64,\"tie_word_embeddings\":false}"
/* Two heads of 4, and one of K and V. First halves 64 + 32 + 32 = 128. Second: o 64, and in layer 0
 * an MLP of 3 x 16 x 8 = 384, in the others the router's 4 x 8 and experts of 3 x 6 x 8 = 144, two
 * of them for a row. */
#define MIXTURE                                                                                    \
    "{\"model_type\":\"qwen3_moe\",\"hidden_size\":8,\"intermediate_size\":16,"                    \
    "\"num_hidden_layers\":3,\"num_attention_heads\":2,\"num_key_value_heads\":1,\"head_dim\":4,"  \
    "\"vocab_size\":10,\"max_position_embeddings\":64,\"tie_word_embeddings\":true,"               \
    "\"num_experts\":4,\"num_experts_per_tok\":2,\"moe_intermediate_size\":6,"                     \
    "\"norm_topk_prob\":true,\"mlp_only_layers\":[0],\"dtype\":\"bfloat16\"}"
/* First halves: q_a 4 x 8, q_b 2 x 5 x 4, kv_a 8 x 8, and K absorbed 2 x 3 x 6: 172. Second: V
 * expanded 2 x 5 x 6, o 8 x 10: 140, with an MLP of 384 in layer 0, and in layer 1 the router's 32,
 * one shared expert and two others of 144 each. */
#define LATENT                                                                                     \
    "{\"model_type\":\"deepseek_v2\",\"hidden_size\":8,\"intermediate_size\":16,"                  \
    "\"num_hidden_layers\":2,\"num_attention_heads\":2,\"num_key_value_heads\":2,"                 \
    "\"kv_lora_rank\":6,\"q_lora_rank\":4,\"qk_nope_head_dim\":3,\"qk_rope_head_dim\":2,"          \
    "\"v_head_dim\":5,\"vocab_size\":10,\"max_position_embeddings\":64,"                           \
    "\"tie_word_embeddings\":false,\"n_routed_experts\":4,\"n_shared_experts\":1,"                 \
    "\"num_experts_per_tok\":2,\"moe_intermediate_size\":6,\"first_k_dense_replace\":1,"           \
    "\"topk_method\":\"greedy\",\"scoring_func\":\"softmax\",\"norm_topk_prob\":false,"            \
    "\"dtype\":\"bfloat16\"}"

static struct td_model_config parse(const char *text)
{
    struct td_model_config c;
    struct td_err err = {0};
    if (td_model_config_parse(text, strlen(text), NULL, 0, &c, &err)) fail_msg("%s", err.msg);
    return c;
}

static void check_ops(const char *text, double prompt_len, double products, double attention)
{
    struct td_model_config c = parse(text);
    struct engine_bench_ops got = engine_bench_prefill_ops(&c, prompt_len);
    if (got.products != products || got.attention != attention)
        fail_msg("%s: %.1f operations of products, %.1f of attention; by hand %.1f and %.1f", text,
                 got.products, got.attention, products, attention);
}

static void prefill_of_a_dense_model(void **state)
{
    (void)state;
    /* the last layer's second half is one row's; the output layer 10 x 8 */
    double products = 2 * (3 * 5 * 128 + (5 + 5 + 1) * 352 + 80);
    /* 4 heads, 2 elements of K and of V: 32 operations a key; rows of all layers but the last see
     * 1 + 2 + .. + 5 keys, and its last row 5 */
    check_ops("{\"model_type\":\"llama\"," DENSE, 5, products, 32 * (15 + 15 + 5));
    /* a window of 3 tokens: 1 + 2 + 3 + 3 + 3 keys, and 3 */
    check_ops("{\"model_type\":\"mistral\",\"sliding_window\":3," DENSE, 5, products,
              32 * (12 + 12 + 3));
    check_ops("{\"model_type\":\"llama\"," DENSE, 1, 2 * (3 * 480 + 80), 32 * 3);
}

static void prefill_of_a_mixture(void **state)
{
    (void)state;
    /* 2 heads, 4 elements of K and of V */
    check_ops(MIXTURE, 6, 2 * (3 * 6 * 128 + 6 * 448 + 6 * 384 + 384 + 80), 32 * (21 + 21 + 6));
}

static void prefill_of_latent_attention(void **state)
{
    (void)state;
    /* 2 heads: 8 elements of K, and V is the first 6 of them */
    check_ops(LATENT, 4, 2 * (2 * 4 * 172 + 4 * 524 + 604 + 80), 56 * (10 + 4));
}

static void look(const char *text, struct td_model **ret_model)
{
    char path[] = "/tmp/engine_bench_counts_XXXXXX";
    struct td_err err = {0};
    int fd = mkstemp(path);
    assert_true(fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text));
    close(fd);
    struct td_model_params p = {.random_config = path,
                                .dtype = "f32",
                                .ops = td_model_ops_by_name("ref"),
                                .quiet = true,
                                .only_look = true};
    td_status s = td_model_open(&p, ret_model, &err);
    unlink(path);
    if (s) fail_msg("%s", err.msg);
}

static double read_of(const struct td_model *m, double active)
{
    return engine_bench_weight_bytes(td_model_config(m), (double)td_model_weight_bytes(m),
                                     (double)td_model_expert_weight_bytes(m), active);
}

/* Output layer 80 and its norm 8; of each of three layers 192 of attention, and norms of 8, 8, 4
 * and 4; the MLP's 384; two routers. Of an expert 144. All f32. */
static void decode_reads_the_experts_that_are_active(void **state)
{
    (void)state;
    struct td_model *m;
    double rest = 4 * (80 + 8 + 3 * (192 + 24) + 384 + 2 * 32), expert = 4 * 144;
    look(MIXTURE, &m);
    assert_true(td_model_weight_bytes(m) == (uint64_t)(rest + 4 * expert));
    assert_true(td_model_expert_weight_bytes(m) == (uint64_t)(8 * expert));
    for (int active = 4; active <= 8; active++)
        assert_true(read_of(m, active) == rest + active * expert);
    /* two layers of four experts, of which a row misses two and two rows miss one */
    assert_true(engine_bench_even_experts(td_model_config(m), 1) == 4);
    assert_true(engine_bench_even_experts(td_model_config(m), 2) == 6);
    assert_true(engine_bench_even_experts(td_model_config(m), 1000) == 8);
    td_model_close(m);

    look("{\"model_type\":\"llama\"," DENSE, &m);
    assert_true(td_model_weight_bytes(m) == 4 * (80 + 8 + 3 * (480 + 16)));
    assert_true(td_model_expert_weight_bytes(m) == 0 && read_of(m, 0) == 4 * 1576);
    assert_true(engine_bench_even_experts(td_model_config(m), 3) == 0);
    td_model_close(m);

    /* norms of a layer: 8, 8, and of the short rows of q and K 4 and 6. Matrices take multiples of
     * 64 bytes: q_b 32 more than its 160, two of K 56 more than 72, two of V 8 more than 120. */
    look(LATENT, &m);
    rest = 4 * (80 + 8 + 2 * (172 + 140 + 26) + 384 + 32 + 144) + 2 * (32 + 2 * 56 + 2 * 8);
    assert_true(read_of(m, 2) == rest + 2 * expert && read_of(m, 4) == rest + 4 * expert);
    assert_true((double)td_model_weight_bytes(m) == read_of(m, 2));
    td_model_close(m);
}

static void check_kv(const char *text, double n_seqs, double context, double want)
{
    struct td_model *m;
    struct td_kv_layout kv;
    struct td_err err = {0};
    look(text, &m);
    assert_int_equal(td_model_kv_layout(m, 8, &kv, &err), TD_OK);
    double got = engine_bench_kv_bytes(td_model_config(m), &kv, n_seqs, context);
    if (got != want) fail_msg("%s: %.1f bytes of KV, by hand %.1f", text, got, want);
    td_model_close(m);
}

static void decode_reads_the_keys_in_sight(void **state)
{
    (void)state;
    /* f32; a token of a layer has K and V of 2 heads of 2, of 1 head of 4, or one row of 8 */
    check_kv("{\"model_type\":\"llama\"," DENSE, 2, 7, 4 * 2 * 7 * 3 * 8);
    check_kv("{\"model_type\":\"mistral\",\"sliding_window\":3," DENSE, 2, 7, 4 * 2 * 3 * 3 * 8);
    check_kv(MIXTURE, 3, 5, 4 * 3 * 5 * 3 * 8);
    check_kv(LATENT, 3, 9, 4 * 3 * 9 * 2 * 8);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(prefill_of_a_dense_model),
                                       cmocka_unit_test(prefill_of_a_mixture),
                                       cmocka_unit_test(prefill_of_latent_attention),
                                       cmocka_unit_test(decode_reads_the_experts_that_are_active),
                                       cmocka_unit_test(decode_reads_the_keys_in_sight)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
