/* config_test.c - config.json: what is honoured, and that everything else is refused by name. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/mem.h"
#include "common/model/config.h"
#include "common/model/family.h"

#define SIZES                                                                                      \
    "\"hidden_size\":64,\"intermediate_size\":96,\"num_hidden_layers\":4,\"num_attention_heads\":" \
    "4,\"vocab_size\":256,"
#define LLAMA "{\"model_type\":\"llama\"," SIZES "\"max_position_embeddings\":128"
#define MISTRAL                                                                                    \
    "{\"model_type\":\"mistral\"," SIZES "\"num_key_value_heads\":2,\"max_position_embeddings\":"  \
    "128"
#define QWEN2                                                                                      \
    "{\"model_type\":\"qwen2\"," SIZES "\"num_key_value_heads\":2,\"max_position_embeddings\":128"
#define QWEN3                                                                                      \
    "{\"model_type\":\"qwen3\"," SIZES "\"num_key_value_heads\":2,\"max_position_embeddings\":128"
#define QWEN3_MOE                                                                                  \
    "{\"model_type\":\"qwen3_moe\"," SIZES "\"num_key_value_heads\":2,\"max_position_"             \
    "embeddings\":128,\"num_experts_per_tok\":3,\"moe_intermediate_size\":24"
#define MIXTRAL                                                                                    \
    "{\"model_type\":\"mixtral\"," SIZES "\"num_key_value_heads\":2,\"max_position_embeddings\":"  \
    "128"

#define QWEN2_MOE                                                                                  \
    "{\"model_type\":\"qwen2_moe\"," SIZES "\"num_key_value_heads\":2,\"max_position_"             \
    "embeddings\":128,\"num_experts\":8,\"num_experts_per_tok\":3,\"moe_intermediate_size\":24,"   \
    "\"shared_expert_intermediate_size\":40"
#define DEEPSEEK(family)                                                                           \
    "{\"model_type\":\"" family "\"," SIZES "\"num_key_value_heads\":4,\"max_position_"            \
    "embeddings\":128,\"kv_lora_rank\":32,\"qk_nope_head_dim\":12,\"qk_rope_head_dim\":8,"         \
    "\"v_head_dim\":10,\"n_routed_experts\":8,\"num_experts_per_tok\":3,\"n_shared_experts\":2,"   \
    "\"moe_intermediate_size\":24"
#define LITE DEEPSEEK("deepseek_v2") ",\"q_lora_rank\":null"
#define V3 DEEPSEEK("deepseek_v3") ",\"q_lora_rank\":28"

#define CHATGLM                                                                                    \
    "{\"model_type\":\"chatglm\",\"hidden_size\":64,\"ffn_hidden_size\":96,\"num_layers\":4,"      \
    "\"num_attention_heads\":4,\"padded_vocab_size\":65024,\"seq_length\":128,\"kv_channels\":16"
#define INTERNLM3 "{\"model_type\":\"internlm3\"," SIZES "\"max_position_embeddings\":128"

static struct td_model_config parse(const char *text, const char *generation)
{
    struct td_model_config c;
    struct td_err err = {0};
    memset(&c, 0x5a, sizeof c);
    if (td_model_config_parse(text, strlen(text), generation, generation ? strlen(generation) : 0,
                              &c, &err))
        fail_msg("%s\nrefused: %s", text, err.msg);
    return c;
}

static void defaults(void **state)
{
    (void)state;
    struct td_model_config c = parse(LLAMA "}", NULL);
    assert_int_equal(c.arch, TD_ARCH_LLAMA);
    assert_int_equal(c.n_layers, 4);
    assert_int_equal(c.hidden, 64);
    assert_int_equal(c.intermediate, 96);
    assert_int_equal(c.n_heads, 4);
    assert_int_equal(c.n_kv_heads, 4);
    assert_int_equal(c.head_dim, 16);
    assert_int_equal(c.vocab, 256);
    assert_int_equal(c.max_positions, 128);
    assert_true(c.rms_eps == 1e-6f && c.rope[0].theta == 10000 &&
                c.rope[0].scaling == TD_ROPE_PLAIN);
    assert_false(c.tied_embeddings || c.qkv_bias || c.o_bias || c.mlp_bias || c.qk_norm ||
                 c.do_sample);
    assert_int_equal(c.sliding_window, 0);
    assert_int_equal(c.checkpoint_dtype, TD_F32);
    assert_int_equal(c.bos_id, 1);
    assert_int_equal(c.n_eos, 1);
    assert_int_equal(c.eos_ids[0], 2);
    assert_true(c.temperature == 1 && c.top_p == 1 && c.top_k == 0 && c.min_p == 0 &&
                c.repetition_penalty == 1);

    c = parse(MISTRAL "}", NULL);
    assert_int_equal(c.sliding_window, 4096);
    assert_int_equal(c.sliding_from_layer, 0);
    c = parse(QWEN2 "}", NULL);
    assert_true(c.qkv_bias && !c.o_bias && !c.qk_norm);
    assert_int_equal(c.bos_id, -1);
    assert_int_equal(c.n_eos, 0);
    c = parse(QWEN3 "}", NULL);
    assert_true(!c.qkv_bias && c.qk_norm);
    assert_int_equal(c.head_dim, 128);
}

/* What the files of Baichuan2-13B say, in full. */
#define BAICHUAN_13B                                                                               \
    "{\"architectures\":[\"BaichuanForCausalLM\"],\"auto_map\":{\"AutoConfig\":"                   \
    "\"configuration_baichuan.BaichuanConfig\",\"AutoModelForCausalLM\":"                          \
    "\"modeling_baichuan.BaichuanForCausalLM\"},\"bos_token_id\":1,\"eos_token_id\":2,"            \
    "\"pad_token_id\":0,\"hidden_act\":\"silu\",\"hidden_size\":5120,\"initializer_range\":0.02,"  \
    "\"intermediate_size\":13696,\"model_max_length\":4096,\"model_type\":\"baichuan\","           \
    "\"num_attention_heads\":40,\"num_hidden_layers\":40,\"rms_norm_eps\":1e-06,"                  \
    "\"tie_word_embeddings\":false,\"torch_dtype\":\"bfloat16\",\"use_cache\":true,"               \
    "\"vocab_size\":125696"

/* Files that say the same in other words. */
static void translated(void **state)
{
    (void)state;
    struct td_model_config c =
        parse(CHATGLM ",\"eos_token_id\":2,\"add_qkv_bias\":true,\"layernorm_epsilon\":1e-4,"
                      "\"multi_query_attention\":true,\"multi_query_group_num\":2}",
              NULL);
    assert_true(c.n_layers == 4 && c.intermediate == 96 && c.vocab == 65024 && c.n_kv_heads == 2);
    assert_true(c.head_dim == 16 && c.rotary_dim == 8 && c.rope_neighbours && c.qkv_bias);
    assert_true(c.rms_eps == 1e-4f && c.max_positions == 128);
    /* <|user|> and <|observation|> of ChatGLM3 end an answer, too */
    assert_true(c.n_eos == 3 && c.eos_ids[0] == 2 && c.eos_ids[1] == 64795 &&
                c.eos_ids[2] == 64797);
    c = parse(CHATGLM "}", NULL);
    assert_true(c.n_kv_heads == 4 && !c.qkv_bias && c.rms_eps == 1e-5f);
    c = parse("{\"model_type\":\"baichuan\",\"architectures\":[\"BaiChuanForCausalLM\"]," SIZES
              "\"max_position_embeddings\":128}",
              NULL);
    assert_false(c.unit_head);
    c = parse("{\"model_type\":\"baichuan\",\"architectures\":[\"BaichuanForCausalLM\"]," SIZES
              "\"max_position_embeddings\":128,\"z_loss_weight\":0}",
              NULL);
    assert_true(c.unit_head && !c.alibi);
    c = parse("{\"model_type\":\"internlm2\"," SIZES "\"max_position_embeddings\":128}", NULL);
    assert_true(c.qkv_bias && c.o_bias && !c.mlp_bias);
    c = parse(INTERNLM3 ",\"qkv_bias\":true,\"rope_scaling\":{\"rope_type\":\"dynamic\","
                        "\"factor\":6.0}}",
              NULL);
    assert_true(c.qkv_bias && !c.o_bias && c.head_dim == 128 && c.rope[0].scaling == TD_ROPE_PLAIN);
}

/* Slopes in place of a rotation: where no max_position_embeddings says that it rotates, and where
 * somebody added that to the file of a 13B model. */
static void baichuan_13b(void **state)
{
    (void)state;
    static const char *const same[] = {BAICHUAN_13B "}",
                                       BAICHUAN_13B ",\"max_position_embeddings\":4096}",
                                       BAICHUAN_13B ",\"rope_scaling\":null}"};
    for (size_t i = 0; i < sizeof same / sizeof *same; i++) {
        struct td_layer_spec spec;
        struct td_model_config c = parse(same[i], NULL);
        assert_true(c.alibi && c.unit_head && c.max_positions == 4096 && c.n_kv_heads == 40);
        assert_true(c.n_ropes == 1 && c.rope[0].scaling == TD_ROPE_NONE);
        td_model_config_layer(&c, 39, &spec);
        assert_true(spec.alibi && spec.rope == 0 && spec.window == 0);
    }
    struct td_model_config c =
        parse("{\"model_type\":\"baichuan\"," SIZES "\"model_max_length\":77}", NULL);
    assert_true(c.alibi && !c.unit_head && c.max_positions == 77);
}

static void rope_fields(void **state)
{
    (void)state;
    struct td_model_config c;
    c = parse(LLAMA ",\"rope_theta\":5e5,\"rope_scaling\":{\"type\":\"linear\",\"factor\":2}}",
              NULL);
    assert_true(c.rope[0].scaling == TD_ROPE_LINEAR && c.rope[0].factor == 2 &&
                c.rope[0].theta == 5e5);
    static const char llama3[] = "{\"rope_type\":\"llama3\",\"rope_theta\":500000.0,\"factor\":8,"
                                 "\"low_freq_factor\":1,\"high_freq_factor\":4,"
                                 "\"original_max_position_embeddings\":8192}}";
    char text[1024];
    snprintf(text, sizeof text, LLAMA ",\"rope_parameters\":%s", llama3);
    c = parse(text, NULL);
    assert_true(c.rope[0].scaling == TD_ROPE_LLAMA3 && c.rope[0].factor == 8 &&
                c.rope[0].low_freq_factor == 1 && c.rope[0].high_freq_factor == 4);
    assert_true(c.rope[0].original_max_positions == 8192 && c.rope[0].theta == 5e5);
    /* yarn: the context is as long as the original one, stretched, or as the file says */
    static const struct {
        const char *yarn;
        int32_t max_positions;
    } stretched[] = {
        {"\"factor\":4.0,\"original_max_position_embeddings\":32768", 131072},
        {"\"factor\":2.5,\"original_max_position_embeddings\":13109", 32772},
        {"\"factor\":4.0,\"original_max_position_embeddings\":16", 128},
        {"\"factor\":4.0", 128},
        {"\"factor\":1000000,\"original_max_position_embeddings\":32768", 4194304},
    };
    for (size_t i = 0; i < sizeof stretched / sizeof *stretched; i++) {
        snprintf(text, sizeof text, LLAMA ",\"rope_scaling\":{\"type\":\"yarn\",%s}}",
                 stretched[i].yarn);
        c = parse(text, NULL);
        assert_int_equal(c.max_positions, stretched[i].max_positions);
    }
    c = parse(LLAMA ",\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":123},\"rope_"
                    "scaling\":null}",
              NULL);
    assert_true(c.rope[0].scaling == TD_ROPE_PLAIN && c.rope[0].theta == 123);
}

static void window_fields(void **state)
{
    (void)state;
    struct td_model_config c;
    c = parse(MISTRAL ",\"sliding_window\":null}", NULL);
    assert_int_equal(c.sliding_window, 0);
    c = parse(MISTRAL ",\"sliding_window\":7,\"head_dim\":20}", NULL);
    assert_true(c.sliding_window == 7 && c.head_dim == 20);
    c = parse(QWEN2 ",\"use_sliding_window\":false,\"sliding_window\":7,\"max_window_layers\":2}",
              NULL);
    assert_int_equal(c.sliding_window, 0);
    c = parse(QWEN2 ",\"use_sliding_window\":true,\"sliding_window\":7,\"max_window_layers\":2}",
              NULL);
    assert_true(c.sliding_window == 7 && c.sliding_from_layer == 2);
    c = parse(QWEN2 ",\"use_sliding_window\":true,\"sliding_window\":7,\"max_window_layers\":4}",
              NULL);
    assert_int_equal(c.sliding_window, 0);
    c = parse(QWEN2 ",\"use_sliding_window\":true,\"sliding_window\":7,\"layer_types\":[\"full_"
                    "attention\",\"sliding_attention\","
                    "\"sliding_attention\","
                    "\"sliding_attention\"]}",
              NULL);
    assert_true(c.sliding_window == 7 && c.sliding_from_layer == 1);
}

static void fields(void **state)
{
    (void)state;
    struct td_model_config c;
    assert_true(parse(LLAMA
                      ",\"attention_bias\":true,\"mlp_bias\":true,\"tie_word_embeddings\":true}",
                      NULL)
                    .o_bias);
    c = parse(LLAMA ",\"attention_bias\":true,\"mlp_bias\":true,\"tie_word_embeddings\":true,\"rms_"
                    "norm_eps\":1e-5,\"head_dim\":32}",
              NULL);
    assert_true(c.qkv_bias && c.mlp_bias && c.tied_embeddings && c.rms_eps == 1e-5f &&
                c.head_dim == 32);
    c = parse("{\"model_type\":\"llama\"," SIZES "\"max_sequence_length\":77}", NULL);
    assert_int_equal(c.max_positions, 77);
    c = parse(QWEN3 ",\"attention_bias\":true,\"head_dim\":null}", NULL);
    assert_true(c.qkv_bias && c.o_bias && c.head_dim == 16);

    assert_int_equal(parse(LLAMA ",\"torch_dtype\":\"bfloat16\"}", NULL).checkpoint_dtype, TD_BF16);
    assert_int_equal(
        parse(LLAMA ",\"dtype\":\"float16\",\"torch_dtype\":\"float16\"}", NULL).checkpoint_dtype,
        TD_F16);
    /* Off is as good as absent. */
    parse(LLAMA ",\"sliding_window\":null,\"use_sliding_window\":false,\"quantization_config\":"
                "null,\"pruned_heads\":{},\"partial_"
                "rotary_factor\":1.0}",
          NULL);
}

/* Which layers have experts, and what they are. */
static void mixtures(void **state)
{
    (void)state;
    struct td_model_config c =
        parse(QWEN3_MOE ",\"num_experts\":8,\"use_sliding_window\":false,\"sliding_window\":null,"
                        "\"max_window_layers\":48,\"output_router_logits\":false,\"router_aux_"
                        "loss_coef\":0.001}",
              NULL);
    assert_true(c.qk_norm && !c.qkv_bias && c.head_dim == 16 && c.sliding_window == 0);
    assert_true(c.experts.n == 8 && c.experts.n_used == 3 && c.experts.intermediate == 24 &&
                !c.experts.rule.normalise);
    for (int32_t i = 0; i < 4; i++) assert_true(td_model_config_has_experts(&c, i));
    /* of each layer: q, k, v; o; norms of heads; norms; expert router */
    int64_t rest = 2 * 64 * 256 + 64 + 4 * (64 * 128 + 64 * 64 + 32 + 128 + 512);
    assert_true(td_model_config_n_params(&c) == rest + 4 * 8 * 3 * 64 * 24);
    assert_true(td_model_config_n_active_params(&c) == rest + 4 * 3 * 3 * 64 * 24);

    struct td_model_config other =
        parse(QWEN3_MOE ",\"num_local_experts\":8,\"num_experts\":8,\"norm_topk_prob\":true,"
                        "\"decoder_sparse_step\":2,\"mlp_only_layers\":[3,0]}",
              NULL);
    assert_true(other.experts.n == 8 && other.experts.rule.normalise);
    for (int32_t i = 0; i < 4; i++) assert_true(td_model_config_has_experts(&other, i) == (i == 1));
    struct td_model_config mixtral =
        parse(MIXTRAL ",\"num_local_experts\":8,\"num_experts_per_tok\":2,\"router_jitter_"
                      "noise\":0.1,\"sliding_window\":null}",
              NULL);
    assert_true(mixtral.rope[0].theta == 1e6 && mixtral.rms_eps == 1e-5f && !mixtral.qk_norm &&
                mixtral.sliding_window == 0 && mixtral.eos_ids[0] == 2);
    assert_true(mixtral.experts.n == 8 && mixtral.experts.n_used == 2 &&
                mixtral.experts.intermediate == 96 && mixtral.experts.rule.normalise);
    other.experts.n_used = 2;
    assert_true(td_model_config_digest(&c) != td_model_config_digest(&other));
}

/* What the cache holds, how rows choose, and which layers have experts. */
static void latent(void **state)
{
    (void)state;
    struct td_model_config c =
        parse(LITE ",\"head_dim\":8,\"qk_head_dim\":20,\"first_k_dense_replace\":1,\"topk_method\":"
                   "\"group_limited_greedy\",\"n_group\":4,\"topk_group\":2,\"routed_scaling_"
                   "factor\":16,\"norm_topk_prob\":false,\"aux_loss_alpha\":0.001}",
              NULL);
    assert_true(c.n_kv_heads == 1 && c.head_dim == 40 && c.rotary_dim == 8);
    assert_true(c.latent.kv_rank == 32 && c.latent.q_rank == 0 && c.latent.interleaved);
    assert_true(fabs((double)c.latent.scale - 1 / sqrt(20.0)) < 1e-7);
    assert_true(c.experts.shared == 48 && !c.experts.rule.sigmoid && !c.experts.has_bias &&
                c.experts.rule.n_groups == 4 && c.experts.rule.n_groups_used == 2 &&
                !c.experts.rule.groups_by_two && c.experts.rule.scale == 16);
    for (int32_t i = 0; i < 4; i++) assert_true(td_model_config_has_experts(&c, i) == (i > 0));
    c = parse(V3 ",\"topk_group\":4,\"n_group\":4,\"rope_interleave\":false,\"num_nextn_predict_"
                 "layers\":1}",
              NULL);
    assert_true(c.latent.q_rank == 28 && !c.latent.interleaved && c.n_skipped == 1);
    assert_true(c.experts.rule.sigmoid && c.experts.has_bias && c.experts.rule.normalise &&
                c.experts.rule.groups_by_two && c.experts.rule.scale == 2.5f &&
                c.experts.first == 3); /* as the class has it */
    c = parse(DEEPSEEK("kimi_k2") ",\"q_lora_rank\":28,\"n_group\":1,\"topk_group\":1,\"routed_"
                                  "scaling_factor\":2.827,\"architectures\":"
                                  "[\"DeepseekV3ForCausalLM\"]}",
              NULL);
    assert_true(c.experts.rule.sigmoid && c.experts.rule.n_groups == 0 &&
                c.arch == TD_ARCH_KIMI_K2);
    c = parse(DEEPSEEK("glm4_moe_lite") ",\"q_lora_rank\":28,\"mlp_layer_types\":[\"sparse\","
                                        "\"dense\",\"sparse\",\"dense\"]}",
              NULL);
    for (int32_t i = 0; i < 4; i++) assert_true(td_model_config_has_experts(&c, i) == (i % 2 == 0));
    /* as GLM-4.7-Flash is published: all of the part that rotates, not of the row of the cache */
    c = parse(DEEPSEEK("glm4_moe_lite") ",\"q_lora_rank\":28,\"partial_rotary_factor\":1.0}", NULL);
    assert_true(c.head_dim == 40 && c.rotary_dim == 8);
    c = parse(LITE ",\"rope_parameters\":{\"rope_type\":\"default\",\"partial_rotary_factor\":1}}",
              NULL);
    assert_true(c.rotary_dim == 8);
    c = parse(QWEN2_MOE ",\"sliding_window\":0,\"layer_types\":[\"full_attention\"]}", NULL);
    assert_true(c.qkv_bias && c.experts.shared == 40 && !c.experts.rule.normalise);
}

/* Two files are one model to a router when the sizes are the same. */
static void digests(void **state)
{
    (void)state;
    struct td_model_config c = parse(LLAMA "}", NULL), same = c, other = c;
    same.max_positions *= 2;
    same.checkpoint_dtype = TD_BF16;
    same.n_eos = 0;
    assert_true(td_model_config_digest(&c) == td_model_config_digest(&same));
    assert_true(td_model_config_digest(&c) != 0);
    int32_t *const sizes[] = {&other.n_layers, &other.hidden,     &other.intermediate,
                              &other.n_heads,  &other.n_kv_heads, &other.head_dim,
                              &other.vocab};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        *sizes[i] += 1;
        assert_true(td_model_config_digest(&c) != td_model_config_digest(&other));
        *sizes[i] -= 1;
    }
    other.arch = TD_ARCH_QWEN2;
    assert_true(td_model_config_digest(&c) != td_model_config_digest(&other));
}

static void special_ids_and_generation(void **state)
{
    (void)state;
    struct td_model_config c =
        parse(LLAMA ",\"eos_token_id\":[3,4,-1],\"bos_token_id\":null}", NULL);
    assert_true(c.bos_id == -1 && c.n_eos == 2 && c.eos_ids[0] == 3 && c.eos_ids[1] == 4);
    c = parse(LLAMA ",\"eos_token_id\":3}",
              "{\"eos_token_id\":[9,8],\"bos_token_id\":7,\"do_sample\":true,\"temperature\":0.6,"
              "\"top_p\":0.9,\"top_k\":20,"
              "\"min_p\":0.05,\"repetition_penalty\":1.1,\"transformers_version\":\"4.0\",\"max_"
              "length\":4096}");
    assert_true(c.bos_id == 7 && c.n_eos == 2 && c.eos_ids[0] == 9 && c.eos_ids[1] == 8 &&
                c.do_sample);
    assert_true(c.temperature == 0.6f && c.top_p == 0.9f && c.top_k == 20 && c.min_p == 0.05f &&
                c.repetition_penalty == 1.1f);
    /* config.json's ids stay when generation_config.json says nothing. */
    c = parse(LLAMA ",\"eos_token_id\":3,\"temperature\":0.5}", "{}");
    assert_true(c.n_eos == 1 && c.eos_ids[0] == 3 && c.temperature == 0.5f);
}

struct bad {
    const char *text, *generation;
    td_status status;
    const char *says; /* part of the message */
};

/* a file of the 7B models without what tells them apart */
#define BAICHUAN_7B                                                                                \
    "{\"model_type\":\"baichuan\",\"hidden_size\":4096,\"intermediate_size\":11008,"               \
    "\"num_hidden_layers\":32,\"num_attention_heads\":32,\"vocab_size\":125696,"                   \
    "\"model_max_length\":4096"

/* longrope of heads of 16 dims, all of which are rotated */
#define PHI3                                                                                       \
    "{\"model_type\":\"phi3\"," SIZES "\"num_key_value_heads\":2,\"max_position_embeddings\":"     \
    "128"
#define EIGHT "[1,1,1,1,1,1,1,1]"
#define LONG_FACTORS "\"long_factor\":[2,2,2,2,2,2,2,2]"
#define LONG_BAD(fields, says)                                                                     \
    {                                                                                              \
        PHI3 ",\"rope_scaling\":{\"type\":\"longrope\"," fields "}}", NULL, TD_ERR_INVALID, says   \
    }

static const struct bad bad_configs[] = {
    {"", NULL, TD_ERR_INVALID, "config.json"},
    {"[]", NULL, TD_ERR_INVALID, "object"},
    {"{", NULL, TD_ERR_INVALID, "line 1"},
    {"{}", NULL, TD_ERR_INVALID, "model_type is missing"},
    {"{\"model_type\":5}", NULL, TD_ERR_INVALID, "model_type is 5"},
    {"{\"model_type\":\"gemma9\"}", NULL, TD_ERR_UNSUPPORTED, "gemma9"},
    {"{\"model_type\":\"phi3small\"}", NULL, TD_ERR_UNSUPPORTED, "model_type is phi3small"},
    {"{\"model_type\":\"phimoe\"}", NULL, TD_ERR_UNSUPPORTED, "model_type is phimoe"},
    {"{\"model_type\":\"phi4mm\"}", NULL, TD_ERR_UNSUPPORTED, "model_type is phi4mm"},
    {LLAMA ",\"architectures\":[\"LlamaForSequenceClassification\"]}", NULL, TD_ERR_UNSUPPORTED,
     "LlamaForCausalLM"},
    {LLAMA ",\"architectures\":\"x\"}", NULL, TD_ERR_UNSUPPORTED, "architectures"},
    {"{\"model_type\":\"llama\"}", NULL, TD_ERR_INVALID, "num_hidden_layers is missing"},
    {"{\"model_type\":\"llama\"," SIZES "\"x\":1}", NULL, TD_ERR_UNSUPPORTED,
     "unknown field x (1)"},
    {"{\"model_type\":\"llama\"," SIZES "\"use_cache\":true}", NULL, TD_ERR_INVALID,
     "max_position_embeddings is missing"},
    {LLAMA ",\"num_hidden_layers\":0}", NULL, TD_ERR_INVALID,
     "num_hidden_layers is 0, must be an integer in 1..1024"},
    {LLAMA ",\"num_hidden_layers\":1000000}", NULL, TD_ERR_INVALID, "num_hidden_layers"},
    {LLAMA ",\"hidden_size\":-64}", NULL, TD_ERR_INVALID, "hidden_size is -64"},
    {LLAMA ",\"hidden_size\":64.5}", NULL, TD_ERR_INVALID, "hidden_size is 64.5"},
    {LLAMA ",\"hidden_size\":\"64\"}", NULL, TD_ERR_INVALID, "hidden_size"},
    {LLAMA ",\"hidden_size\":99999999999999999999999}", NULL, TD_ERR_INVALID, "hidden_size"},
    {LLAMA ",\"hidden_size\":66}", NULL, TD_ERR_INVALID, "multiple of num_attention_heads (4)"},
    {LLAMA ",\"vocab_size\":100000000}", NULL, TD_ERR_INVALID, "vocab_size is 100000000"},
    {LLAMA ",\"intermediate_size\":0}", NULL, TD_ERR_INVALID, "intermediate_size"},
    {LLAMA ",\"max_position_embeddings\":1000000000}", NULL, TD_ERR_INVALID,
     "max_position_embeddings"},
    {LLAMA ",\"num_key_value_heads\":3}", NULL, TD_ERR_INVALID,
     "must divide num_attention_heads (4)"},
    {LLAMA ",\"num_key_value_heads\":8}", NULL, TD_ERR_INVALID, "num_key_value_heads is 8"},
    {"{\"model_type\":\"qwen2\"," SIZES "\"max_position_embeddings\":128}", NULL, TD_ERR_INVALID,
     "num_key_value_heads is missing"},
    {LLAMA ",\"head_dim\":7}", NULL, TD_ERR_UNSUPPORTED, "head_dim is 7, must be even"},
    {LLAMA ",\"head_dim\":512}", NULL, TD_ERR_INVALID, "head_dim is 512"},
    {LLAMA ",\"hidden_size\":65536,\"num_attention_heads\":256,\"num_hidden_layers\":1024,"
           "\"intermediate_size\":1048576}",
     NULL, TD_ERR_LIMIT, "parameters"},
    {LLAMA ",\"hidden_act\":\"gelu\"}", NULL, TD_ERR_UNSUPPORTED, "hidden_act is gelu"},
    {LLAMA ",\"rms_norm_eps\":-1}", NULL, TD_ERR_INVALID, "rms_norm_eps"},
    {LLAMA ",\"attention_bias\":1}", NULL, TD_ERR_INVALID, "attention_bias"},
    {LLAMA ",\"tie_word_embeddings\":\"yes\"}", NULL, TD_ERR_INVALID, "tie_word_embeddings"},
    {LLAMA ",\"sliding_window\":64}", NULL, TD_ERR_UNSUPPORTED, "sliding_window is 64"},
    {LLAMA ",\"quantization_config\":{\"bits\":4}}", NULL, TD_ERR_UNSUPPORTED,
     "quantization_config: quant_method is missing, not supported: must be gptq, awq"},
    {LLAMA ",\"partial_rotary_factor\":0.5}", NULL, TD_ERR_UNSUPPORTED, "partial_rotary_factor"},
    {LLAMA ",\"auto_map\":{\"AutoModel\":\"x.Y\"}}", NULL, TD_ERR_UNSUPPORTED, "auto_map"},
    {LLAMA ",\"dtype\":\"float64\"}", NULL, TD_ERR_UNSUPPORTED, "dtype is float64"},
    {LLAMA ",\"dtype\":\"float32\",\"torch_dtype\":\"float16\"}", NULL, TD_ERR_INVALID,
     "must be the same"},
    {LLAMA ",\"rope_theta\":0}", NULL, TD_ERR_INVALID, "rope_theta is 0"},
    {LLAMA ",\"rope_scaling\":5}", NULL, TD_ERR_INVALID, "rope_scaling must be an object"},
    {LLAMA ",\"rope_scaling\":{\"type\":\"yarn\",\"factor\":2,\"low_freq_factor\":1}}", NULL,
     TD_ERR_UNSUPPORTED, "low_freq_factor is 1"},
    {LLAMA ",\"rope_scaling\":{\"type\":\"longrope\",\"short_factor\":[1]}}", NULL, TD_ERR_INVALID,
     "short_factor must be a list of 8 numbers"},
    LONG_BAD("\"short_factor\":[1,1,1,1,1,1,1]," LONG_FACTORS,
             "short_factor must be a list of 8 numbers"),
    LONG_BAD("\"short_factor\":" EIGHT ",\"long_factor\":[1,1,1,1,1,1,1,1,1]",
             "long_factor must be a list of 8 numbers"),
    LONG_BAD("\"short_factor\":" EIGHT ",\"long_factor\":[]", "long_factor must be a list of 8"),
    LONG_BAD("\"short_factor\":" EIGHT, "long_factor must be a list of 8 numbers"),
    LONG_BAD(LONG_FACTORS, "short_factor must be a list of 8 numbers"),
    LONG_BAD("\"short_factor\":null," LONG_FACTORS, "short_factor must be a list of 8 numbers"),
    LONG_BAD("\"short_factor\":{\"a\":1}," LONG_FACTORS, "short_factor must be a list of 8"),
    LONG_BAD("\"short_factor\":1.5," LONG_FACTORS, "short_factor must be a list of 8 numbers"),
    LONG_BAD("\"short_factor\":[1,1,0,1,1,1,1,1]," LONG_FACTORS,
             "short_factor[2] is 0, must be in 1e-3..1e6"),
    LONG_BAD("\"short_factor\":[1,1,1,1,1,1,1,\"1\"]," LONG_FACTORS, "short_factor[7] is 0"),
    LONG_BAD("\"short_factor\":" EIGHT ",\"long_factor\":[-1,1,1,1,1,1,1,1]",
             "long_factor[0] is -1"),
    LONG_BAD("\"short_factor\":" EIGHT ",\"long_factor\":[1,1,1,1,1e7,1,1,1]",
             "long_factor[4] is 1e+07"),
    LONG_BAD("\"short_factor\":" EIGHT "," LONG_FACTORS ",\"factor\":0.5",
             "factor is 0.5, must be a number in 1..1e+06"),
    LONG_BAD("\"short_factor\":" EIGHT "," LONG_FACTORS ",\"attention_factor\":0",
             "attention_factor is 0"),
    LONG_BAD("\"short_factor\":" EIGHT "," LONG_FACTORS ",\"original_max_position_embeddings\":1",
             "original_max_position_embeddings is 1"),
    {PHI3 ",\"rope_scaling\":{\"type\":\"longrope\",\"short_factor\":" EIGHT "," LONG_FACTORS
          ",\"short_mscale\":1.1}}",
     NULL, TD_ERR_UNSUPPORTED, "short_mscale is 1.1"},
    {PHI3 ",\"rope_scaling\":{\"type\":\"longrope\",\"short_factor\":" EIGHT "," LONG_FACTORS
          "},\"original_max_position_embeddings\":0}",
     NULL, TD_ERR_INVALID, "original_max_position_embeddings is 0"},
    /* as many as pairs are rotated; the older names of the kind */
    {PHI3 ",\"partial_rotary_factor\":0.75,\"rope_scaling\":{\"type\":\"longrope\","
          "\"short_factor\":" EIGHT "," LONG_FACTORS "}}",
     NULL, TD_ERR_INVALID, "short_factor must be a list of 6 numbers"},
    {PHI3 ",\"rope_scaling\":{\"type\":\"su\",\"short_factor\":[1]," LONG_FACTORS "}}", NULL,
     TD_ERR_INVALID, "short_factor must be a list of 8 numbers"},
    {PHI3 ",\"rope_scaling\":{\"type\":\"yarn\",\"short_factor\":" EIGHT ",\"long_factor\":[1]}}",
     NULL, TD_ERR_INVALID, "long_factor must be a list of 8 numbers"},
    {PHI3 ",\"rope_scaling\":{\"type\":\"su\"," LONG_FACTORS "}}", NULL, TD_ERR_UNSUPPORTED,
     "rope_type is su, not supported"},
    {LLAMA ",\"partial_rotary_factor\":0.5}", NULL, TD_ERR_UNSUPPORTED,
     "partial_rotary_factor is 0.5"},
    {LLAMA ",\"rope_scaling\":{\"type\":\"dynamic\",\"factor\":2,\"alpha\":1000}}", NULL,
     TD_ERR_UNSUPPORTED, "alpha is 1000"},
    {LLAMA ",\"rope_scaling\":{\"type\":\"ntk\",\"factor\":2}}", NULL, TD_ERR_UNSUPPORTED,
     "rope_type is ntk"},
    {"{\"model_type\":\"baichuan\"," SIZES "\"use_cache\":true}", NULL, TD_ERR_INVALID,
     "max_position_embeddings is missing"},
    {"{\"model_type\":\"baichuan\"," SIZES "\"model_max_length\":0}", NULL, TD_ERR_INVALID,
     "model_max_length is 0"},
    {"{\"model_type\":\"baichuan\"," SIZES "\"model_max_length\":1e30}", NULL, TD_ERR_INVALID,
     "model_max_length is 1e30"},
    {BAICHUAN_7B "}", NULL, TD_ERR_INVALID, "hidden_size is 4096, as in the 7B models"},
    {BAICHUAN_13B ",\"rope_theta\":1e4}", NULL, TD_ERR_UNSUPPORTED, "rope_theta is 10000.0"},
    {BAICHUAN_13B ",\"rope_scaling\":{\"type\":\"linear\",\"factor\":2}}", NULL, TD_ERR_UNSUPPORTED,
     "must be absent in a 13B model, which does not rotate"},
    {BAICHUAN_13B ",\"is 13B\":true}", NULL, TD_ERR_UNSUPPORTED, "unknown field is 13B"},
    {LLAMA ",\"alibi\":true}", NULL, TD_ERR_UNSUPPORTED, "unknown field alibi (true)"},
    {CHATGLM ",\"rope_ratio\":50}", NULL, TD_ERR_UNSUPPORTED, "rope_ratio is 50"},
    {CHATGLM ",\"rmsnorm\":false}", NULL, TD_ERR_UNSUPPORTED, "rmsnorm is false"},
    {CHATGLM ",\"num_hidden_layers\":5}", NULL, TD_ERR_INVALID,
     "num_layers and num_hidden_layers differ"},
    {CHATGLM ",\"multi_query_attention\":true}", NULL, TD_ERR_INVALID,
     "multi_query_group_num is missing"},
    {INTERNLM3 ",\"bias\":true,\"mlp_bias\":false}", NULL, TD_ERR_INVALID,
     "bias and mlp_bias differ"},
    {LLAMA ",\"rope_scaling\":{\"type\":\"linear\"}}", NULL, TD_ERR_INVALID, "factor is missing"},
    {LLAMA ",\"rope_scaling\":{\"type\":\"linear\",\"factor\":0}}", NULL, TD_ERR_INVALID,
     "factor is 0"},
    {LLAMA ",\"rope_scaling\":{\"type\":\"linear\",\"rope_type\":\"llama3\",\"factor\":2}}", NULL,
     TD_ERR_INVALID, "must be the same"},
    {LLAMA ",\"rope_scaling\":{\"type\":\"linear\",\"factor\":2,\"mscale\":3}}", NULL,
     TD_ERR_UNSUPPORTED, "mscale is 3"},
    {LLAMA ",\"rope_scaling\":{\"factor\":2}}", NULL, TD_ERR_UNSUPPORTED, "factor is 2"},
    {LLAMA ",\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":4,\"high_"
           "freq_factor\":4,\"original_max_"
           "position_embeddings\":8}}",
     NULL, TD_ERR_INVALID, "high_freq_factor is 4, must be above"},
    {LLAMA ",\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":1,\"high_"
           "freq_factor\":4}}",
     NULL, TD_ERR_INVALID, "original_max_position_embeddings is missing"},
    {LLAMA ",\"rope_scaling\":{\"type\":\"linear\",\"factor\":2},\"rope_parameters\":{\"rope_"
           "type\":\"default\"}}",
     NULL, TD_ERR_UNSUPPORTED, "differ"},
    {LLAMA ",\"rope_parameters\":{\"full_attention\":{\"rope_type\":\"default\"}}}", NULL,
     TD_ERR_UNSUPPORTED, "full_attention"},
    {QWEN2 ",\"mlp_bias\":true}", NULL, TD_ERR_UNSUPPORTED,
     "mlp_bias is true, not supported: must be absent in a qwen2 model"},
    {MISTRAL ",\"attention_bias\":true}", NULL, TD_ERR_UNSUPPORTED, "attention_bias"},
    {MISTRAL ",\"sliding_window\":0}", NULL, TD_ERR_INVALID, "sliding_window is 0"},
    {QWEN2 ",\"layer_types\":[\"full_attention\"]}", NULL, TD_ERR_INVALID,
     "layer_types has 1 entries, must be num_hidden_layers (4)"},
    {QWEN2 ",\"layer_types\":[\"full_attention\",\"full_attention\",\"full_attention\",\"sliding_"
           "attention\"]}",
     NULL, TD_ERR_INVALID, "layer_types[3]"},
    {QWEN2 ",\"use_sliding_window\":true,\"layer_types\":[\"sliding_attention\",\"full_attention\","
           "\"full_attention\",\"full_"
           "attention\"]}",
     NULL, TD_ERR_UNSUPPORTED, "layer_types[1]"},
    {QWEN2 ",\"layer_types\":[\"linear_attention\",1,2,3]}", NULL, TD_ERR_UNSUPPORTED,
     "linear_attention"},
    {LLAMA ",\"eos_token_id\":256}", NULL, TD_ERR_INVALID,
     "eos_token_id is 256, must be an integer in 0..255"},
    {LLAMA ",\"eos_token_id\":[1,\"x\"]}", NULL, TD_ERR_INVALID, "eos_token_id[1]"},
    {LLAMA ",\"eos_token_id\":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17]}", NULL, TD_ERR_LIMIT,
     "more than 16"},
    {LLAMA ",\"bos_token_id\":256}", NULL, TD_ERR_INVALID, "bos_token_id"},
    {LLAMA ",\"no_repeat_ngram_size\":3}", NULL, TD_ERR_UNSUPPORTED, "no_repeat_ngram_size is 3"},
    {QWEN3_MOE "}", NULL, TD_ERR_INVALID, "num_experts is missing, must be an integer in 1..1024"},
    {QWEN3_MOE ",\"num_experts\":1025}", NULL, TD_ERR_INVALID, "num_experts is 1025"},
    {QWEN3_MOE ",\"num_experts\":8,\"num_local_experts\":9}", NULL, TD_ERR_INVALID,
     "num_experts is 8 and num_local_experts is 9, must be the same"},
    {QWEN3_MOE ",\"num_experts\":2}", NULL, TD_ERR_INVALID,
     "num_experts_per_tok is 3, must be an integer in 1..2"},
    {QWEN3_MOE ",\"num_experts\":8,\"moe_intermediate_size\":0}", NULL, TD_ERR_INVALID,
     "moe_intermediate_size is 0"},
    {QWEN3_MOE ",\"num_experts\":8,\"decoder_sparse_step\":0}", NULL, TD_ERR_INVALID,
     "decoder_sparse_step is 0"},
    {QWEN3_MOE ",\"num_experts\":8,\"mlp_only_layers\":[0,4]}", NULL, TD_ERR_INVALID,
     "mlp_only_layers[1] is 4, must be an integer in 0..3"},
    {QWEN3_MOE ",\"num_experts\":8,\"mlp_only_layers\":[\"2\"]}", NULL, TD_ERR_INVALID,
     "mlp_only_layers[0] is \"2\", must be an integer in 0..3"},
    {QWEN3_MOE ",\"num_experts\":8,\"mlp_only_layers\":3}", NULL, TD_ERR_INVALID,
     "mlp_only_layers is 3, must be a list"},
    {QWEN3_MOE ",\"num_experts\":8,\"use_sliding_window\":true}", NULL, TD_ERR_UNSUPPORTED,
     "use_sliding_window is true, not supported: must be false"},
    {QWEN3_MOE ",\"num_experts\":1024,\"hidden_size\":65536,\"head_dim\":64,\"moe_"
               "intermediate_size\":1048576}",
     NULL, TD_ERR_LIMIT, "parameters"},
    {MIXTRAL ",\"num_experts_per_tok\":2}", NULL, TD_ERR_INVALID, "num_local_experts is missing"},
    {QWEN2_MOE ",\"layer_types\":[\"sliding_attention\"]}", NULL, TD_ERR_UNSUPPORTED,
     "layer_types is \"sliding_attention\""},
    {QWEN2_MOE ",\"use_sliding_window\":true}", NULL, TD_ERR_UNSUPPORTED,
     "use_sliding_window is true"},
    {DEEPSEEK("deepseek_v3") "}", NULL, TD_ERR_INVALID, "q_lora_rank is missing"},
    {LITE ",\"partial_rotary_factor\":1,\"max_position_embeddings\":64,\"rope_scaling\":{\"type\":"
          "\"longrope\",\"original_max_position_embeddings\":32,\"short_factor\":[1,1,1,1,1,1],"
          "\"long_factor\":[1,1,1,1,1,1]}}",
     NULL, TD_ERR_INVALID, "short_factor must be a list of 4 numbers"},
    {LITE ",\"rope_scaling\":{\"type\":\"yarn\",\"factor\":2,\"mscale\":101}}", NULL,
     TD_ERR_INVALID, "mscale is 101, must be a number in 0..100"},
    {LITE ",\"rope_scaling\":{\"type\":\"yarn\",\"original_max_position_embeddings\":32,"
          "\"mscale_all_dim\":1}}",
     NULL, TD_ERR_INVALID, "rope_scaling: factor is missing, must be a number in 1..1e+06"},
    {LITE ",\"norm_topk_prob\":true}", NULL, TD_ERR_UNSUPPORTED,
     "norm_topk_prob is true, not supported: must be false"},
    {LITE ",\"topk_method\":\"noaux_tc\"}", NULL, TD_ERR_UNSUPPORTED,
     "topk_method is \"noaux_tc\""},
    {LITE ",\"attention_bias\":true}", NULL, TD_ERR_UNSUPPORTED, "attention_bias is true"},
    {LITE ",\"kv_lora_rank\":769}", NULL, TD_ERR_INVALID, "kv_lora_rank is 769"},
    {LITE ",\"qk_rope_head_dim\":7}", NULL, TD_ERR_UNSUPPORTED,
     "qk_rope_head_dim is 7, must be even"},
    {LITE ",\"num_key_value_heads\":2}", NULL, TD_ERR_UNSUPPORTED,
     "num_key_value_heads is 2, must be num_attention_heads (4) in latent attention"},
    {LITE ",\"num_experts\":7}", NULL, TD_ERR_INVALID,
     "n_routed_experts is 8 and num_experts is 7, must be the same"},
    {LITE ",\"num_local_experts\":9}", NULL, TD_ERR_INVALID,
     "n_routed_experts is 8 and num_local_experts is 9, must be the same"},
    {LITE ",\"qk_head_dim\":24}", NULL, TD_ERR_INVALID,
     "qk_head_dim is 24, must be qk_nope_head_dim + qk_rope_head_dim (20)"},
    {V3 ",\"n_group\":3}", NULL, TD_ERR_INVALID, "n_group is 3, must divide n_routed_experts (8)"},
    {V3 ",\"n_group\":8}", NULL, TD_ERR_INVALID, "into groups of 2 or more"},
    {V3 ",\"n_group\":4,\"topk_group\":1}", NULL, TD_ERR_INVALID,
     "num_experts_per_tok is 3, must be at most 2"},
    {V3 ",\"n_group\":4,\"topk_group\":2,\"scoring_func\":\"softmax\"}", NULL, TD_ERR_UNSUPPORTED,
     "scoring_func is \"softmax\""},
    {QWEN3_MOE ",\"num_experts\":8,\"kv_lora_rank\":16}", NULL, TD_ERR_UNSUPPORTED,
     "kv_lora_rank is 16, not supported: must be absent in a qwen3_moe model"},
    {MIXTRAL ",\"num_local_experts\":8,\"num_experts_per_tok\":9}", NULL, TD_ERR_INVALID,
     "num_experts_per_tok is 9, must be an integer in 1..8"},
    {MIXTRAL ",\"num_local_experts\":8,\"num_experts_per_tok\":2,\"norm_topk_prob\":true}", NULL,
     TD_ERR_UNSUPPORTED,
     "norm_topk_prob is true, not supported: must be absent in a mixtral model"},
    {QWEN3 ",\"num_experts\":8}", NULL, TD_ERR_UNSUPPORTED,
     "num_experts is 8, not supported: must be absent in a qwen3 model"},
    {LLAMA "}", "[]", TD_ERR_INVALID, "generation_config.json"},
    {LLAMA "}", "{\"temperature\":-1}", TD_ERR_INVALID,
     "generation_config.json: temperature is -1"},
    {LLAMA "}", "{\"top_p\":0}", TD_ERR_INVALID, "top_p"},
    {LLAMA "}", "{\"num_beams\":4}", TD_ERR_UNSUPPORTED, "generation_config.json: num_beams is 4"},
    {LLAMA "}", "{\"frobnicate\":1}", TD_ERR_UNSUPPORTED, "frobnicate"},
    {LLAMA "}", "{\"hidden_size\":64}", TD_ERR_UNSUPPORTED, "hidden_size"},
};

static void refusals(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof bad_configs / sizeof *bad_configs; i++) {
        const struct bad *b = &bad_configs[i];
        struct td_model_config c, before;
        struct td_err err = {0};
        memset(&c, 0x5a, sizeof c);
        memset(&before, 0x5a, sizeof before);
        td_status s = td_model_config_parse(b->text, strlen(b->text), b->generation,
                                            b->generation ? strlen(b->generation) : 0, &c, &err);
        if (s != b->status || err.code != s || !strstr(err.msg, b->says))
            fail_msg("%s %s\n  answered %s: %s\n  expected %s: ...%s...", b->text,
                     b->generation ? b->generation : "", td_status_name(s), err.msg,
                     td_status_name(b->status), b->says);
        assert_memory_equal(&c, &before, sizeof c);
    }
}

static void files(void **state)
{
    (void)state;
    struct td_model_config c;
    struct td_err err = {0};
    assert_int_equal(td_model_config_load_file("bench/configs/llama-1.1b.json", &c, &err), TD_OK);
    assert_true(td_model_config_n_params(&c) == 1100048384); /* TinyLlama 1.1B as published */
    /* as published: 46.7 and 12.9, and 30.5 and 3.3 billion with all and with the active experts */
    assert_int_equal(td_model_config_load_file("bench/configs/mixtral-8x7b.json", &c, &err), TD_OK);
    assert_true(td_model_config_n_params(&c) == 46702792704);
    assert_true(td_model_config_n_active_params(&c) / 10000000 == 1287);
    assert_int_equal(td_model_config_load_file("bench/configs/qwen3-30b-a3b.json", &c, &err),
                     TD_OK);
    assert_true(td_model_config_n_params(&c) == 30532122624);
    assert_true(td_model_config_n_active_params(&c) / 10000000 == 335);
    /* 15.7 and 671.0 billion; the scales of yarn */
    assert_int_equal(td_model_config_load_file("bench/configs/deepseek-v2-lite.json", &c, &err),
                     TD_OK);
    assert_true(td_model_config_n_params(&c) == 15706484224);
    assert_true(fabs((double)c.latent.scale - 0.114721) < 1e-6);
    assert_int_equal(td_model_config_load_file("bench/configs/deepseek-v3.json", &c, &err), TD_OK);
    assert_true(td_model_config_n_params(&c) == 671026419200);
    assert_true(fabs((double)c.latent.scale - 0.135234) < 1e-6 && c.n_skipped == 1);
    assert_int_equal(td_model_config_load_file("bench/configs/gpt-oss-20b.json", &c, &err), TD_OK);
    assert_true(td_model_config_n_params(&c) == 20914757184); /* as published */
    assert_true(c.sliding_window == 128 && !td_layer_bit(c.full_layers, 0) &&
                td_layer_bit(c.full_layers, 1) && c.rope[0].keeps_fractions);
    assert_true(fabs(c.rope[0].attention_factor - 1.34657) < 1e-5);
    assert_int_equal(td_model_config_load_file("bench/configs/llama-110m.json", &c, &err), TD_OK);
    assert_true(td_model_config_n_params(&c) > 100000000 &&
                td_model_config_n_params(&c) < 120000000);
    assert_int_equal(td_model_config_load("tests/golden/fixtures/qwen3_bias_window", &c, &err),
                     TD_OK);
    assert_true(c.arch == TD_ARCH_QWEN3 && c.sliding_window == 11 && c.sliding_from_layer == 1);
    assert_int_equal(td_model_config_load("tests/golden/fixtures/absent", &c, &err),
                     TD_ERR_NOT_FOUND);
    assert_non_null(strstr(err.msg, "absent/config.json"));
}

static void refuse(const char *text, const char *says)
{
    struct td_model_config c;
    struct td_err err = {0};
    if (!td_model_config_parse(text, strlen(text), NULL, 0, &c, &err))
        fail_msg("%s was taken", text);
    if (!strstr(err.msg, says)) fail_msg("%s: says %s, must say %s", text, err.msg, says);
}

/* What is particular to the later families, and what they refuse. */
static void families_say_what_they_are(void **state)
{
    (void)state;
#define FAMILY_SIZES                                                                               \
    "\"hidden_size\":64,\"intermediate_size\":96,\"num_hidden_layers\":6,\"num_attention_heads\":" \
    "4,\"num_key_value_heads\":2,\"vocab_size\":256,\"max_position_embeddings\":128"
#define GPT_OSS                                                                                    \
    "{\"model_type\":\"gpt_oss\"," FAMILY_SIZES                                                    \
    ",\"num_local_experts\":5,\"rope_parameters\":{\"rope_type\":\"default\"}"
    struct td_layer_spec spec;
    struct td_model_config c = parse("{\"model_type\":\"gemma2\"," FAMILY_SIZES "}", NULL);
    td_model_config_layer(&c, 0, &spec);
    assert_true(c.tied_embeddings && c.head_dim == 256 && c.attn_scale == 1.0f / 16);
    assert_true(spec.window == 4096 && spec.attn_cap == 50 && c.logit_cap == 30);
    td_model_config_layer(&c, 1, &spec);
    assert_int_equal(spec.window, 0);
    c = parse("{\"model_type\":\"gemma3_text\"," FAMILY_SIZES "}", NULL);
    td_model_config_layer(&c, 4, &spec);
    assert_true(spec.window == 4096 && c.rope[spec.rope].theta == 1e4);
    td_model_config_layer(&c, 5, &spec);
    assert_true(spec.window == 0 && c.rope[spec.rope].theta == 1e6 && spec.attn_cap == 0);
    c = parse("{\"model_type\":\"smollm3\"," FAMILY_SIZES "}", NULL);
    for (int32_t i = 0; i < 6; i++) {
        td_model_config_layer(&c, i, &spec);
        assert_int_equal(c.rope[spec.rope].scaling, i == 3 ? TD_ROPE_NONE : TD_ROPE_PLAIN);
    }
    c = parse("{\"model_type\":\"glm4\"," FAMILY_SIZES "}", NULL);
    assert_true(c.head_dim == 128 && c.rotary_dim == 64 && c.rope_neighbours && c.qkv_bias);
    c = parse("{\"model_type\":\"cohere\"," FAMILY_SIZES "}", NULL);
    assert_true(c.rope[0].theta == 5e5 && c.rms_eps == 1e-5f && c.logit_scale == 0.0625f);
    c = parse(
        "{\"model_type\":\"phi3\"," FAMILY_SIZES ",\"original_max_position_embeddings\":32,"
        "\"rope_scaling\":{\"type\":\"su\",\"short_factor\":[1,1,1,1,1,1,1,1],\"long_factor\":"
        "[2,2,2,2,2,2,2,2]}}",
        NULL);
    assert_true(c.rope[0].scaling == TD_ROPE_LONG && c.rope[0].original_max_positions == 32);
    assert_true(fabs(c.rope[0].attention_factor - sqrt(1 + log(4) / log(32))) < 1e-12);

    static const struct {
        const char *text, *says;
    } bad[] = {
        {"{\"model_type\":\"cohere2\"," FAMILY_SIZES ",\"use_qk_norm\":true}",
         "use_qk_norm is true"},
        {"{\"model_type\":\"gemma3_text\"," FAMILY_SIZES ",\"attn_logit_softcapping\":50}",
         "attn_logit_softcapping is 50"},
        {"{\"model_type\":\"gemma2\"," FAMILY_SIZES ",\"hidden_activation\":\"gelu\"}",
         "hidden_activation is gelu"},
        {"{\"model_type\":\"gemma\"," FAMILY_SIZES ",\"hidden_act\":\"silu\"}",
         "hidden_act is silu"},
        {"{\"model_type\":\"smollm3\"," FAMILY_SIZES ",\"no_rope_layers\":[1,1,1]}",
         "no_rope_layers has 3 entries"},
        {"{\"model_type\":\"cohere2\"," FAMILY_SIZES ",\"rotary_pct\":0.5}", "rotary_pct is 0.5"},
        {"{\"model_type\":\"glm4\"," FAMILY_SIZES ",\"partial_rotary_factor\":0.01}",
         "partial_rotary_factor is 0.01"},
        {"{\"model_type\":\"glm4\"," FAMILY_SIZES ",\"head_dim\":2}",
         "head_dim is 2, of which glm4 rotates 1 dims: must be an even number of at least 2"},
        {"{\"model_type\":\"glm\"," FAMILY_SIZES ",\"head_dim\":6}",
         "head_dim is 6, of which glm rotates 3 dims"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) refuse(bad[i].text, bad[i].says);
}

/* The file of Command-R+: 104 billion parameters. */
#define COMMAND_R_PLUS                                                                             \
    "{\"architectures\":[\"CohereForCausalLM\"],\"attention_bias\":false,"                         \
    "\"attention_dropout\":0.0,\"bos_token_id\":5,\"eos_token_id\":255001,\"pad_token_id\":0,"     \
    "\"hidden_act\":\"silu\",\"hidden_size\":12288,\"initializer_range\":0.02,"                    \
    "\"intermediate_size\":33792,\"layer_norm_eps\":1e-05,\"logit_scale\":0.8333333333333334,"     \
    "\"max_position_embeddings\":131072,\"model_type\":\"cohere\",\"num_attention_heads\":96,"     \
    "\"num_hidden_layers\":64,\"num_key_value_heads\":8,\"rope_theta\":75000000.0,"                \
    "\"torch_dtype\":\"float16\",\"use_cache\":true,\"use_qk_norm\":true,\"vocab_size\":256000"

static void norms_that_each_head_has(void **state)
{
    (void)state;
    struct td_layer_spec spec;
    struct td_model_config c = parse(COMMAND_R_PLUS "}", NULL);
    td_model_config_layer(&c, 63, &spec);
    assert_true(c.qk_norm && spec.qk_norm == TD_QK_NORM_OWN && c.head_dim == 128);
    int64_t layer = 12288 * (2 * 12288 + 2 * 1024 + 3 * 33792) + 12288 + 12288 + 1024;
    assert_true(td_model_config_n_params(&c) == 64 * layer + 256000 * 12288ll + 12288);
    assert_int_equal(td_model_config_n_params(&c) / 1000000000, 103);
}

/* A model that takes images, too, is served as its text model. */
static void text_of_models_with_images(void **state)
{
    (void)state;
#define IMAGES                                                                                     \
    "\"architectures\":[\"Gemma3ForConditionalGeneration\"],\"model_type\":\"gemma3\","            \
    "\"mm_tokens_per_image\":256,\"image_token_index\":262144,\"vision_config\":{\"x\":[1]}"
    /* the fields of a published file of 4 billion parameters: the others are the class's */
    struct td_model_config c = parse(
        "{" IMAGES
        ",\"eos_token_id\":[1,106],\"torch_dtype\":\"bfloat16\",\"initializer_range\":0.02,"
        "\"text_config\":{\"hidden_size\":2560,\"intermediate_size\":10240,\"model_type\":"
        "\"gemma3_text\",\"num_hidden_layers\":34,\"rope_scaling\":{\"factor\":8.0,\"rope_type\":"
        "\"linear\"},\"sliding_window\":1024}}",
        NULL);
    struct td_layer_spec spec;
    assert_true(c.has_images && c.n_heads == 8 && c.n_kv_heads == 4 && c.head_dim == 256);
    assert_true(c.vocab == 262208 && c.max_positions == 131072 && c.tied_embeddings);
    assert_true(c.checkpoint_dtype == TD_BF16 && c.n_eos == 2 && c.eos_ids[1] == 106);
    td_model_config_layer(&c, 4, &spec);
    assert_true(spec.window == 1024 && c.rope[spec.rope].theta == 1e4);
    assert_true(c.rope[spec.rope].scaling == TD_ROPE_PLAIN);
    td_model_config_layer(&c, 5, &spec);
    assert_true(spec.window == 0 && c.rope[spec.rope].theta == 1e6 &&
                c.rope[spec.rope].factor == 8);
    /* the same text model alone is the same model to a router */
    struct td_model_config alone =
        parse("{\"model_type\":\"gemma3_text\",\"hidden_size\":2560,\"intermediate_size\":10240,"
              "\"num_hidden_layers\":34,\"num_attention_heads\":8,\"num_key_value_heads\":4,"
              "\"vocab_size\":262208,\"max_position_embeddings\":131072}",
              NULL);
    assert_true(!alone.has_images);
    assert_int_equal(td_model_config_digest(&c), td_model_config_digest(&alone));
#define TEXT "\"text_config\":{\"hidden_size\":64,\"intermediate_size\":96,\"num_hidden_layers\":2"
    /* what the outer object says counts */
    c = parse("{" IMAGES ",\"dtype\":\"float16\",\"tie_word_embeddings\":true," TEXT
              ",\"torch_dtype\":\"bfloat16\",\"tie_word_embeddings\":false}}",
              NULL);
    assert_true(c.checkpoint_dtype == TD_F16 && c.tied_embeddings);
    static const struct {
        const char *text, *says;
    } bad[] = {
        {"{" IMAGES "}", "text_config is missing"},
        {"{" IMAGES ",\"text_config\":7}", "text_config is missing, must be an object"},
        {"{" IMAGES "," TEXT ",\"model_type\":\"llama\"}}",
         "text_config.model_type is llama, must be gemma3_text"},
        {"{" IMAGES "," TEXT ",\"odd\":1}}", "text_config: unknown field odd"},
        {"{" IMAGES "," TEXT "},\"audio_config\":{}}", "config.json: unknown field audio_config"},
        {"{" IMAGES "," TEXT "},\"use_mrope\":true}", "use_mrope is true"},
        {"{\"model_type\":\"gemma3\",\"architectures\":[\"Gemma3ForCausalLM\"]," TEXT "}}",
         "must be [\"Gemma3ForConditionalGeneration\"]"},
        {"{\"model_type\":\"mistral3\"," TEXT ",\"model_type\":\"ministral3\"}}",
         "must be mistral for model_type mistral3"},
        {"{\"model_type\":\"mistral3\"," TEXT "}}", "num_attention_heads"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) refuse(bad[i].text, bad[i].says);
}

#define MINIMAX                                                                                    \
    "{\"model_type\":\"minimax_m2\"," FAMILY_SIZES ",\"num_local_experts\":8,"                     \
    "\"num_experts_per_tok\":3,\"head_dim\":24"
#define GLM_MOE                                                                                    \
    "{\"model_type\":\"glm4_moe\"," FAMILY_SIZES ",\"n_routed_experts\":8,"                        \
    "\"num_experts_per_tok\":3,\"moe_intermediate_size\":32,\"n_shared_experts\":1,"               \
    "\"head_dim\":24"

/* As they are published: GLM-4.5 with a layer behind the last, MiniMax-M2 with fields of its
 * ancestors. */
static void sigmoid_mixtures(void **state)
{
    (void)state;
    struct td_layer_spec spec;
    struct td_model_config c =
        parse(GLM_MOE ",\"attention_bias\":true,\"use_qk_norm\":true,\"first_k_dense_replace\":3,"
                      "\"num_nextn_predict_layers\":1,\"routed_scaling_factor\":2.5}",
              NULL);
    assert_true(c.qkv_bias && !c.o_bias && c.qk_norm && c.rotary_dim == 12 && !c.rope_neighbours);
    assert_true(c.experts.first == 3 && c.n_skipped == 1 && c.experts.rule.scale == 2.5f &&
                c.experts.shared == 32 && c.experts.has_bias && c.experts.rule.normalise);
    c = parse(MINIMAX ",\"rotary_dim\":6,\"attn_type_list\":[1,1,1,1,1,1],\"use_qk_norm\":true,"
                      "\"qk_norm_type\":\"per_layer\",\"scoring_func\":\"sigmoid\","
                      "\"use_routing_bias\":true,\"shared_intermediate_size\":0,"
                      "\"shared_moe_mode\":\"sigmoid\",\"mlp_intermediate_size\":8192,"
                      "\"layernorm_mlp_beta\":1.0,\"use_mtp\":true,\"num_mtp_modules\":3,"
                      "\"sliding_window\":null,\"mtp_transformer_layers\":1}",
              NULL);
    td_model_config_layer(&c, 5, &spec);
    assert_true(c.rotary_dim == 6 && c.rope[0].theta == 5e6 && spec.qk_norm == TD_QK_NORM_ROWS);
    assert_true(c.experts.rule.sigmoid && c.experts.has_bias && c.experts.rule.n_groups == 0);
    assert_int_equal(parse(MINIMAX "}", NULL).rotary_dim, 24);
    refuse(MINIMAX ",\"attn_type_list\":[1,1,1,0,1,1]}", "attn_type_list is 0, not supported");
    refuse(MINIMAX ",\"attn_type_list\":[1]}", "attn_type_list has 1 entries");
    assert_int_equal(parse(MINIMAX ",\"partial_rotary_factor\":0.25}", NULL).rotary_dim, 6);
    c = parse(MINIMAX ",\"rotary_dim\":6,\"partial_rotary_factor\":0.25}", NULL);
    assert_int_equal(c.rotary_dim, 6);
    refuse(MINIMAX ",\"rotary_dim\":6,\"partial_rotary_factor\":0.5}",
           "rotary_dim is 6, but partial_rotary_factor rotates 12 dims of a head");
    refuse(MINIMAX ",\"rotary_dim\":7}", "rotary_dim is 7, must be even");
    refuse(MINIMAX ",\"rotary_dim\":26}", "rotary_dim is 26");
    refuse(MINIMAX ",\"scoring_func\":\"softmax\"}", "must be sigmoid");
    refuse(MINIMAX ",\"use_qk_norm\":false}", "use_qk_norm is false, not supported");
    refuse(MINIMAX ",\"shared_intermediate_size\":64}", "shared_intermediate_size is 64");
    refuse(MINIMAX ",\"layernorm_mlp_beta\":3.5}", "layernorm_mlp_beta is 3.5");
    refuse(GLM_MOE ",\"scoring_func\":\"softmax\"}", "scoring_func is");
}

/* Command-R7B's file says twice where its windows are; a share of 0 rotates nothing, which no
 * family does. */
static void fields_that_repeat(void **state)
{
    (void)state;
#define COHERE2 "{\"model_type\":\"cohere2\"," FAMILY_SIZES
    struct td_model_config c =
        parse(COHERE2 ",\"layer_switch\":4,\"position_embedding_type\":\"rope_gptj\"}", NULL);
    assert_true(td_layer_bit(c.full_layers, 3) && !td_layer_bit(c.full_layers, 2));
    refuse(COHERE2 ",\"layer_switch\":3}",
           "layer_switch is 3, not supported: must be sliding_window_pattern (4)");
    refuse(COHERE2 ",\"position_embedding_type\":\"rope\"}", "must be rope_gptj");
    refuse("{\"model_type\":\"glm4\"," FAMILY_SIZES ",\"partial_rotary_factor\":0}",
           "partial_rotary_factor is 0, which rotates 0 dims");
}

static void gpt_oss_refuses(void **state)
{
    (void)state;
    static const struct {
        const char *text, *says;
    } bad[] = {
        {"{\"model_type\":\"gpt_oss\"," FAMILY_SIZES
         ",\"num_local_experts\":5,\"num_experts_per_tok\":2}",
         "rope_scaling and rope_parameters are missing"},
        {GPT_OSS ",\"num_experts_per_tok\":2,\"swiglu_limit\":6.5}",
         "swiglu_limit is 6.5, not supported: must be 7"},
        {GPT_OSS ",\"num_experts_per_tok\":2,\"swiglu_alpha\":1.7}", "swiglu_alpha is 1.7"},
        {GPT_OSS ",\"num_experts_per_tok\":2,\"experts_per_token\":3}",
         "num_experts_per_tok is 2 and experts_per_token is 3, must be the same"},
        {GPT_OSS ",\"num_experts_per_tok\":6}", "num_experts_per_tok is 6"},
        {GPT_OSS ",\"num_experts_per_tok\":2,\"quantization_config\":{\"quant_method\":\"mxfp4\","
                 "\"group_size\":16}}",
         "unknown field group_size"},
        {"{\"model_type\":\"llama\"," FAMILY_SIZES ",\"swiglu_limit\":7.0}", "swiglu_limit is 7.0"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) refuse(bad[i].text, bad[i].says);
}

/* The lists of models in README.md and docs/use.md are those of td_families. */
static void documents_list_the_families(void **state)
{
    (void)state;
    static const char *const files[] = {"README.md", "docs/use.md"};
    char row[1000] = "| architectures | ";
    size_t n = strlen(row);
    for (int i = 0; i < TD_N_FAMILIES; i++)
        n += (size_t)snprintf(row + n, sizeof row - n, "%s%s", td_families[i]->models,
                              i + 1 < TD_N_FAMILIES ? "; " : " |\n");
    assert_true(n < sizeof row);
    for (int i = 0; i < 2; i++) {
        char *text;
        size_t n_bytes;
        struct td_err err;
        if (td_file_read(files[i], (size_t)1 << 20, &text, &n_bytes, &err)) fail_msg("%s", err.msg);
        if (!memmem(text, n_bytes, row, n)) fail_msg("%s must have the line\n%s", files[i], row);
        free(text);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(defaults),
                                       cmocka_unit_test(fields),
                                       cmocka_unit_test(mixtures),
                                       cmocka_unit_test(latent),
                                       cmocka_unit_test(translated),
                                       cmocka_unit_test(baichuan_13b),
                                       cmocka_unit_test(rope_fields),
                                       cmocka_unit_test(window_fields),
                                       cmocka_unit_test(digests),
                                       cmocka_unit_test(special_ids_and_generation),
                                       cmocka_unit_test(refusals),
                                       cmocka_unit_test(files),
                                       cmocka_unit_test(families_say_what_they_are),
                                       cmocka_unit_test(norms_that_each_head_has),
                                       cmocka_unit_test(text_of_models_with_images),
                                       cmocka_unit_test(fields_that_repeat),
                                       cmocka_unit_test(gpt_oss_refuses),
                                       cmocka_unit_test(sigmoid_mixtures),
                                       cmocka_unit_test(documents_list_the_families)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
