/* gguf_model_test.c - models in GGUF files against the same models in Hugging Face directories:
 * with plain formats the same bits, with blocks close to them. */
#include "tests/golden/gguf_model.h"
#include "tests/golden/model_rig.h"

#include <unistd.h>

#define FIXTURES "tests/golden/fixtures/"

static char path[64];

static float *logits_of(const char *dir, const char *dtype, const struct td_ops *ops,
                        const int32_t *tokens, int32_t n, int32_t chunk, int32_t *ret_vocab)
{
    struct rig g;
    rig_open(&g, &(struct td_model_params){.dir = dir, .dtype = dtype, .ops = ops}, 2, 8, n, n);
    float *logits = rig_prompt(&g, 1, tokens, n, chunk);
    *ret_vocab = g.vocab;
    rig_close(&g);
    return logits;
}

/* Every family and bias, widths that are no multiple of anything. */
static void plain_formats_give_the_bits_of_the_directory(void **state)
{
    (void)state;
    static const char *const names[] = {"llama1_mha",        "llama2_gqa",
                                        "llama_mqa_sharded", "llama_linear_rope",
                                        "llama_odd_sizes",   "mistral_head_dim_no_window",
                                        "qwen2_bias_tied",   "qwen3_head_dim"};
    int32_t tokens[20], vocab;
    for (int32_t i = 0; i < 20; i++) tokens[i] = (i * 37 + 11) % 97;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char dir[128];
        snprintf(dir, sizeof dir, FIXTURES "%s", names[i]);
        gm_write(dir, path, NULL, false);
        for (int bf16 = 0; bf16 < 2; bf16++) {
            const char *dtype = bf16 ? "bf16" : "f32";
            float *want = logits_of(dir, dtype, NULL, tokens, 20, 20, &vocab),
                  *got = logits_of(path, dtype, NULL, tokens, 20, 20, &vocab);
            for (int32_t k = 0; k < 20 * vocab; k++)
                if (memcmp(&want[k], &got[k], 4) != 0)
                    fail_msg("%s %s: logit %d is %a, in the directory %a", names[i], dtype, k,
                             (double)got[k], (double)want[k]);
            free(want), free(got);
        }
    }
}

static double log_sum_exp(const float *x, int32_t n)
{
    double max = (double)x[rig_argmax(x, n)], sum = 0;
    for (int32_t i = 0; i < n; i++) sum += exp((double)x[i] - max);
    return max + log(sum);
}

static double kl(const float *p, const float *q, int32_t n)
{
    double lp = log_sum_exp(p, n), lq = log_sum_exp(q, n), sum = 0;
    for (int32_t i = 0; i < n; i++)
        sum += exp((double)p[i] - lp) * (((double)p[i] - lp) - ((double)q[i] - lq));
    return sum;
}

static uint32_t all_q8_0(const char *name, const struct td_tensor *t)
{
    (void)name, (void)t;
    return 8;
}
static uint32_t all_q4_0(const char *name, const struct td_tensor *t)
{
    (void)name, (void)t;
    return 2;
}
/* q, k and v in three formats, gate and up in two: each a product of its own. */
static uint32_t mixed(const char *name, const struct td_tensor *t)
{
    return strstr(name, "attn_q") || strstr(name, "ffn_up") ? 8
           : strstr(name, "attn_k")                         ? 30
           : strstr(name, "attn_v")                         ? 2
           : strstr(name, "token_embd")                     ? t->format->gguf_type
                                                            : 8;
}

/* Tokens of the trained model's published text. */
static int32_t *reference_tokens(int32_t *ret_n)
{
    json_t *root;
    struct td_err err = {0};
    if (td_json_load_file("models/pocket/reference_greedy.json", (size_t)16 << 20, &root, &err))
        fail_msg("%s", err.msg);
    const json_t *c = json_array_get(json_object_get(root, "cases"), 0);
    int32_t n_prompt, n_greedy;
    int32_t *prompt = rig_ids(json_object_get(c, "ids"), &n_prompt),
            *greedy = rig_ids(json_object_get(c, "continuation_ids"), &n_greedy);
    int32_t *all = malloc((size_t)(n_prompt + n_greedy) * 4);
    memcpy(all, prompt, (size_t)n_prompt * 4);
    memcpy(all + n_prompt, greedy, (size_t)n_greedy * 4);
    *ret_n = n_prompt + n_greedy;
    free(prompt), free(greedy);
    json_decref(root);
    return all;
}

/* The trained model in blocks: every table the same bits where attention is the same, any chunks
 * the same bits, and a distribution as close to the directory's as its rounding allows: the bounds
 * are above what held-out text gives (0.0002 with Q8_0, 0.02 with Q4_0), because this text is
 * short. */
static void blocks_are_close_and_do_not_know_chunks(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        gm_type_fn type_of;
        double mean_kl;
    } rows[] = {{"Q8_0", all_q8_0, 0.0006}, {"Q4_0", all_q4_0, 0.06}, {"mixed", mixed, 0.03}};
    static const char *const tables[] = {"ref", "avx2", "avx512"};
    int32_t n, vocab;
    int32_t *tokens = reference_tokens(&n);
    if (n > 96) n = 96;
    float *want = logits_of("models/pocket", "f32", NULL, tokens, n, n, &vocab);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        gm_write("models/pocket", path, rows[i].type_of, false);
        for (int t = 0; t < 3; t++) {
            const struct td_ops *ops = td_ops_by_name(tables[t]);
            if (!ops) continue;
            float *got = logits_of(path, "f32", ops, tokens, n, n, &vocab);
            double sum = 0;
            for (int32_t r = 0; r < n; r++) sum += kl(want + r * vocab, got + r * vocab, vocab);
            if (!(sum / n <= rows[i].mean_kl))
                fail_msg("%s %s: mean KL %g, must be at most %g", rows[i].name, tables[t], sum / n,
                         rows[i].mean_kl);
            printf("pocket %s %s: mean KL %.2g over %d positions\n", rows[i].name, tables[t],
                   sum / n, n);
            for (int32_t chunk = 1; chunk < n; chunk = chunk * 3 + 1) {
                float *cut = logits_of(path, "f32", ops, tokens, n, chunk, &vocab);
                assert_memory_equal(got, cut, (size_t)n * (size_t)vocab * 4);
                free(cut);
            }
            free(got);
        }
    }
    free(want), free(tokens);
}

/* The weights in memory are those of the file, norms and rotary table aside. */
static void blocks_stay_blocks_in_memory(void **state)
{
    (void)state;
    struct rig g;
    gm_write("models/pocket", path, all_q8_0, false);
    rig_open(&g, &(struct td_model_params){.dir = path}, 1, 8, 8, 8);
    int64_t n = td_model_config_n_params(td_model_config(g.model));
    uint64_t bytes = td_model_weight_bytes(g.model);
    if (bytes > (uint64_t)n * 34 / 32 * 107 / 100)
        fail_msg("%llu bytes for %lld parameters in Q8_0", (unsigned long long)bytes, (long long)n);
    assert_int_equal(td_model_dtype(g.model), TD_BF16);
    rig_close(&g);
}

static void refuse(td_status want, const char *part)
{
    struct td_err err = {0};
    struct td_model *m = NULL;
    struct td_thread_pool *threads;
    assert_int_equal(td_thread_pool_create(1, NULL, 0, &threads, &err), TD_OK);
    td_status s = td_model_open(
        &(struct td_model_params){.dir = path, .threads = threads, .quiet = true}, &m, &err);
    if (s != want || !strstr(err.msg, part))
        fail_msg("%s (%s), must be %s with \"%s\"", td_status_name(s), err.msg,
                 td_status_name(want), part);
    td_thread_pool_destroy(threads);
}

/* The keys of a model with nothing in it, then one more. */
static struct gf keys_of(const char *arch)
{
    struct gf f = {0};
    char key[64];
    static const struct {
        const char *key;
        uint32_t value;
    } rows[] = {{"block_count", 1},
                {"context_length", 64},
                {"embedding_length", 64},
                {"feed_forward_length", 64},
                {"attention.head_count", 2}};
    gf_str(&f, "general.architecture", arch);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        snprintf(key, sizeof key, "%s.%s", arch, rows[i].key);
        gf_u32(&f, key, rows[i].value);
    }
    snprintf(key, sizeof key, "%s.attention.layer_norm_rms_epsilon", arch);
    gf_f32(&f, key, 1e-5f);
    return f;
}

static void add_embedding(struct gf *f)
{
    float *zeros = calloc(64 * 64, 4);
    gf_tensor(f, "token_embd.weight", 64, 64, 0, zeros, 64 * 64 * 4);
    free(zeros);
}

static void settings_are_refused_by_name(void **state)
{
    (void)state;
    struct gf f = keys_of("gemma");
    gf_write(&f, path);
    refuse(TD_ERR_UNSUPPORTED, "general.architecture is gemma, must be llama, qwen2 or qwen3");
    f = keys_of("llama");
    gf_str(&f, "general.type", "adapter");
    gf_write(&f, path);
    refuse(TD_ERR_UNSUPPORTED, "general.type is adapter");
    f = keys_of("llama");
    gf_u32(&f, "llama.expert_count", 8);
    gf_write(&f, path);
    refuse(TD_ERR_UNSUPPORTED, "unknown key llama.expert_count");
    f = keys_of("llama");
    gf_u32(&f, "llama.expert_count", 0);
    gf_write(&f, path);
    refuse(TD_ERR_CORRUPT, "tensor token_embd.weight is missing");
    f = keys_of("llama");
    gf_str(&f, "llama.rope.scaling.type", "yarn");
    add_embedding(&f);
    gf_write(&f, path);
    refuse(TD_ERR_UNSUPPORTED, "llama.rope.scaling.type is yarn, must be none or linear");
    f = keys_of("llama");
    gf_u32(&f, "llama.rope.dimension_count", 16);
    add_embedding(&f);
    gf_write(&f, path);
    refuse(TD_ERR_INVALID, "llama.rope.dimension_count is 16, must be in 32..32");
    f = keys_of("llama");
    gf_u32(&f, "llama.attention.head_count_kv", 3);
    add_embedding(&f);
    gf_write(&f, path);
    refuse(TD_ERR_INVALID, "num_key_value_heads is 3");
    f = keys_of("qwen2");
    gf_u32(&f, "qwen2.vocab_size", 65);
    add_embedding(&f);
    gf_write(&f, path);
    refuse(TD_ERR_INVALID, "qwen2.vocab_size is 65, must be in 64..64");
    f = keys_of("qwen3");
    add_embedding(&f);
    gf_write(&f, path);
    refuse(TD_ERR_CORRUPT, "tensor model.norm.weight [64] is missing");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plain_formats_give_the_bits_of_the_directory),
        cmocka_unit_test(blocks_are_close_and_do_not_know_chunks),
        cmocka_unit_test(blocks_stay_blocks_in_memory),
        cmocka_unit_test(settings_are_refused_by_name),
    };
    snprintf(path, sizeof path, "/tmp/tandem-gguf-model-%d.gguf", (int)getpid());
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    unlink(path);
    return failed;
}
