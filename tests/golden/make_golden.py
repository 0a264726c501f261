#!/usr/bin/env python3
"""Makes tests/golden/fixtures, mixtures, latent and families: small random models in Hugging Face
layout and the logits that Hugging Face transformers computes for them.

Run in a throw-away environment that has torch and transformers; `make check` needs neither. With
names only these models are made anew:
    python tests/golden/make_golden.py [NAME ...]
Weights come from a fixed seed and are scaled so that attention is far from uniform and logits reach
about 10. Logits are computed in f32 (eager attention) from the directory as it lies on disk, so
that file formats are covered too; fixtures/PROVENANCE.md records versions.
"""
import json
import math
import os
import shutil
import struct
import sys
import zlib

import safetensors.torch
import torch
import transformers
from transformers import (AutoModelForCausalLM, AutoModelForImageTextToText, Cohere2Config,
                          CohereConfig, DeepseekV2Config,
                          DeepseekV3Config, Gemma2Config, Gemma3Config, Gemma3TextConfig,
                          GemmaConfig, Glm4Config,
                          Glm4MoeConfig, Glm4MoeLiteConfig, GlmConfig, GptOssConfig,
                          GraniteConfig, InternLM3Config, LlamaConfig, Mistral3Config,
                          MistralConfig,
                          MixtralConfig, Olmo2Config, Phi3Config, Qwen2Config, Qwen2MoeConfig,
                          Qwen3Config, Qwen3MoeConfig, SmolLM3Config,
                          MiniMaxM2Config)

SEED = 20240607
PROMPT = 48
HERE = os.path.dirname(os.path.abspath(__file__))

BASE = dict(vocab_size=128, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=128, rms_norm_eps=1e-5, bos_token_id=1,
            eos_token_id=2, tie_word_embeddings=False)
LLAMA3 = dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0,
              high_freq_factor=4.0, original_max_position_embeddings=32)

# name: (config class, overrides, stored dtype, old-style config.json, shard size)
# head_dim 16, theta 10^4 and an old length of 32 put the llama3 frequencies in all three of its
# ranges.
MODELS = {
    "llama1_mha": (LlamaConfig, dict(rms_norm_eps=1e-6), torch.float32, True, None),
    "llama2_gqa": (LlamaConfig, dict(num_key_value_heads=2), torch.bfloat16, False, None),
    "llama3_rope_tied": (LlamaConfig,
                         dict(hidden_size=64, num_key_value_heads=2, tie_word_embeddings=True,
                              rope_parameters=LLAMA3), torch.bfloat16, False, None),
    "llama3_rope_old_config": (LlamaConfig,
                               dict(hidden_size=64, num_key_value_heads=1, tie_word_embeddings=True,
                                    rope_parameters=LLAMA3), torch.float16, True, None),
    "llama_linear_rope": (
        LlamaConfig, dict(rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=4.0)),
        torch.float16, True, None),
    "llama_all_biases": (LlamaConfig, dict(attention_bias=True, mlp_bias=True,
                                           num_key_value_heads=2), torch.bfloat16, False, None),
    "llama_mqa_sharded": (LlamaConfig, dict(num_key_value_heads=1), torch.bfloat16, False, "20KB"),
    "llama_odd_sizes": (LlamaConfig,
                        dict(vocab_size=97, hidden_size=40, intermediate_size=54,
                             num_attention_heads=5, head_dim=10,
                             num_key_value_heads=5), torch.bfloat16, False, None),
    "mistral_window": (MistralConfig, dict(num_key_value_heads=2,
                                           sliding_window=13), torch.bfloat16, False,
                       None), "mistral_head_dim_no_window": (MistralConfig,
                                                             dict(num_key_value_heads=2,
                                                                  head_dim=20, sliding_window=None),
                                                             torch.float16, False, None),
    "qwen2_bias_tied": (Qwen2Config, dict(num_key_value_heads=2,
                                          tie_word_embeddings=True), torch.bfloat16, True, None),
    "qwen2_mixed_window": (Qwen2Config,
                           dict(num_key_value_heads=2, num_hidden_layers=3, use_sliding_window=True,
                                sliding_window=9,
                                max_window_layers=1), torch.bfloat16, False, None),
    "qwen2_mixed_window_sharded_f32": (Qwen2Config,
                                       dict(num_key_value_heads=4, intermediate_size=40,
                                            use_sliding_window=True, sliding_window=16,
                                            max_window_layers=1), torch.float32, True,
                                       "40KB"), "qwen3_head_dim": (Qwen3Config,
                                                                   dict(
                                                                       num_key_value_heads=2,
                                                                       head_dim=24,
                                                                       tie_word_embeddings=True),
                                                                   torch.bfloat16, False, None),
    "qwen3_bias_window": (Qwen3Config,
                          dict(num_key_value_heads=2, head_dim=16, attention_bias=True,
                               use_sliding_window=True, sliding_window=11,
                               max_window_layers=1), torch.float16, False, None),
}
# The same of models that a device does not run yet, in a folder of their own.
MIXTURES = {
    "qwen3_moe_odd_sizes": (Qwen3MoeConfig,
                            dict(vocab_size=97, hidden_size=40, intermediate_size=54,
                                 num_attention_heads=5, num_key_value_heads=5, head_dim=10,
                                 num_experts=7, num_experts_per_tok=3, moe_intermediate_size=23,
                                 norm_topk_prob=False,
                                 tie_word_embeddings=True), torch.bfloat16, False, None),
    "qwen3_moe_some_layers": (Qwen3MoeConfig,
                              dict(num_hidden_layers=4, num_key_value_heads=2, head_dim=16,
                                   attention_bias=True, num_experts=5, num_experts_per_tok=2,
                                   moe_intermediate_size=24, norm_topk_prob=True,
                                   decoder_sparse_step=2,
                                   mlp_only_layers=[3]), torch.float16, False, None),
    "qwen3_moe_one_expert_a_row": (Qwen3MoeConfig,
                                   dict(num_key_value_heads=2, head_dim=24, num_experts=8,
                                        num_experts_per_tok=1, moe_intermediate_size=16,
                                        norm_topk_prob=False), torch.bfloat16, True, "40KB"),
    "qwen3_moe_every_layer": (Qwen3MoeConfig,
                              dict(num_key_value_heads=2, head_dim=16, num_experts=6,
                                   num_experts_per_tok=2, moe_intermediate_size=24,
                                   norm_topk_prob=True), torch.bfloat16, False, None),
    "mixtral_odd_sizes": (MixtralConfig,
                          dict(vocab_size=97, hidden_size=40, intermediate_size=23,
                               num_attention_heads=5, head_dim=10, num_key_value_heads=1,
                               num_local_experts=5), torch.bfloat16, False, None),
    "mixtral_window": (MixtralConfig,
                       dict(num_key_value_heads=2, sliding_window=13, intermediate_size=24,
                            num_experts_per_tok=3, num_local_experts=4), torch.float16, False,
                       None),
    "mixtral_old_config": (MixtralConfig,
                           dict(num_key_value_heads=4, intermediate_size=20, num_local_experts=3,
                                tie_word_embeddings=True), torch.bfloat16, True, None),
    "qwen2_moe_odd_sizes": (Qwen2MoeConfig,
                            dict(vocab_size=97, hidden_size=40, intermediate_size=54,
                                 num_attention_heads=5, num_key_value_heads=1, num_experts=7,
                                 num_experts_per_tok=3, moe_intermediate_size=23,
                                 shared_expert_intermediate_size=37), torch.bfloat16, False, None),
    "qwen2_moe_some_layers": (Qwen2MoeConfig,
                              dict(num_hidden_layers=4, num_key_value_heads=2, qkv_bias=False,
                                   num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24,
                                   shared_expert_intermediate_size=100, norm_topk_prob=True,
                                   decoder_sparse_step=2,
                                   mlp_only_layers=[3]), torch.float16, False, None),
    "qwen2_moe_old_config": (Qwen2MoeConfig,
                             dict(num_key_value_heads=4, num_experts=8, num_experts_per_tok=4,
                                  moe_intermediate_size=16, shared_expert_intermediate_size=64,
                                  tie_word_embeddings=True), torch.bfloat16, True, "40KB"),
}
# Rotated as the published ones, from a length that the prompt passes.
OSS_YARN = dict(rope_type="yarn", rope_theta=150000.0, factor=4.0, beta_fast=32.0, beta_slow=1.0,
                truncate=False, original_max_position_embeddings=32)
OSS = dict(num_key_value_heads=2, head_dim=12, intermediate_size=24, num_local_experts=4,
           num_experts_per_tok=2, sliding_window=13, rope_parameters=OSS_YARN)
MIXTURES.update({
    "gpt_oss_odd_sizes": (GptOssConfig,
                          dict(OSS, vocab_size=97, hidden_size=40, intermediate_size=23,
                               num_attention_heads=5, num_key_value_heads=1, head_dim=10,
                               num_local_experts=3), torch.bfloat16, False, None),
    "gpt_oss_old_config": (GptOssConfig,
                           dict(OSS, attention_bias=False, tie_word_embeddings=True,
                                num_experts_per_tok=3, sliding_window=9), torch.float16, True,
                           "40KB"),
    "gpt_oss_listed": (GptOssConfig,
                       dict(OSS, num_key_value_heads=4, num_hidden_layers=3, num_local_experts=3,
                            num_experts_per_tok=1, layer_types=[
                                "full_attention", "sliding_attention", "full_attention"
                            ]), torch.bfloat16, False, None),
    "gpt_oss_mxfp4": (GptOssConfig,
                      dict(OSS, hidden_size=64, intermediate_size=32, head_dim=16,
                           vocab_size=65), torch.bfloat16, False, None),
})
GLM = dict(num_key_value_heads=2, head_dim=12, n_routed_experts=4, num_experts_per_tok=2,
           n_shared_experts=1, moe_intermediate_size=24, first_k_dense_replace=1)
MINIMAX = dict(num_key_value_heads=2, head_dim=12, intermediate_size=24, num_local_experts=4,
               num_experts_per_tok=2)
PARTIAL = dict(rope_type="default", rope_theta=1e4)
MIXTURES.update({
    "glm4_moe": (Glm4MoeConfig,
                 dict(GLM, attention_bias=True, use_qk_norm=True), torch.bfloat16, False, None),
    "glm4_moe_odd_sizes": (Glm4MoeConfig,
                           dict(GLM, vocab_size=97, hidden_size=40, intermediate_size=54,
                                num_attention_heads=5, num_key_value_heads=1, head_dim=20,
                                n_routed_experts=6, n_group=2, topk_group=1, n_shared_experts=2,
                                moe_intermediate_size=23, routed_scaling_factor=2.5,
                                rope_parameters=dict(PARTIAL, partial_rotary_factor=0.3)),
                           torch.float16, False, None),
    "glm4_moe_old_config": (Glm4MoeConfig,
                            dict(GLM, num_key_value_heads=4, n_routed_experts=3,
                                 norm_topk_prob=False, num_hidden_layers=3, use_qk_norm=True,
                                 first_k_dense_replace=2,
                                 tie_word_embeddings=True), torch.bfloat16, True, "40KB"),
    "minimax_m2": (MiniMaxM2Config,
                   dict(MINIMAX, rope_parameters=dict(PARTIAL, partial_rotary_factor=0.5)),
                   torch.bfloat16, False, None),
    "minimax_m2_odd_sizes": (MiniMaxM2Config,
                             dict(MINIMAX, vocab_size=97, hidden_size=40, intermediate_size=23,
                                  num_attention_heads=5, num_key_value_heads=1, head_dim=10,
                                  num_local_experts=3), torch.float16, False, None),
    "minimax_m2_old_config": (MiniMaxM2Config,
                              dict(MINIMAX, num_key_value_heads=4, num_experts_per_tok=3,
                                   head_dim=16,
                                   rope_parameters=dict(PARTIAL, partial_rotary_factor=0.75)),
                              torch.bfloat16, True, "40KB"),
})
# Latent attention: one row of KV for all heads.
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=40.0, beta_fast=32.0, beta_slow=1.0,
            original_max_position_embeddings=32)
LATENT = dict(kv_lora_rank=20, q_lora_rank=None, qk_nope_head_dim=10, qk_rope_head_dim=6,
              v_head_dim=12, num_key_value_heads=4, moe_intermediate_size=24, num_hidden_layers=2,
              first_k_dense_replace=1, n_routed_experts=7, num_experts_per_tok=3)
LATENTS = {
    "deepseek_v2_lite": (DeepseekV2Config,
                         dict(LATENT, n_shared_experts=2, max_position_embeddings=1280,
                              rope_parameters=dict(YARN, mscale=0.707, mscale_all_dim=0.707)),
                         torch.bfloat16, False, None),
    "deepseek_v2_groups": (DeepseekV2Config,
                           dict(LATENT, q_lora_rank=24, n_shared_experts=1, n_routed_experts=8,
                                topk_method="group_limited_greedy", n_group=4, topk_group=2,
                                routed_scaling_factor=3.0), torch.float16, False, None),
    "deepseek_v2_odd_sizes": (DeepseekV2Config,
                              dict(LATENT, vocab_size=97, hidden_size=40, intermediate_size=54,
                                   num_attention_heads=5, num_key_value_heads=5, kv_lora_rank=18,
                                   qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=9,
                                   q_lora_rank=31, moe_intermediate_size=23, n_shared_experts=3,
                                   first_k_dense_replace=0,
                                   tie_word_embeddings=True), torch.bfloat16, True, None),
    "deepseek_v3_groups": (DeepseekV3Config,
                           dict(LATENT, q_lora_rank=24, n_shared_experts=1, n_routed_experts=16,
                                num_experts_per_tok=4, n_group=4, topk_group=2,
                                max_position_embeddings=1280,
                                rope_parameters=dict(YARN, mscale=1.0, mscale_all_dim=1.0)),
                           torch.bfloat16, False, None),
    "deepseek_v3_odd_sizes": (DeepseekV3Config,
                              dict(LATENT, vocab_size=97, hidden_size=40, intermediate_size=54,
                                   num_attention_heads=5, num_key_value_heads=5, kv_lora_rank=16,
                                   qk_nope_head_dim=7, qk_rope_head_dim=8, v_head_dim=5,
                                   moe_intermediate_size=23, n_group=1, topk_group=1,
                                   norm_topk_prob=False, rope_interleave=False,
                                   num_hidden_layers=3,
                                   first_k_dense_replace=2), torch.float16, False, None),
    "deepseek_v3_groups_of_three": (DeepseekV3Config,
                                    dict(LATENT, n_routed_experts=9, n_group=3, topk_group=2,
                                         q_lora_rank=16), torch.float32, True, "40KB"),
    "glm4_moe_lite": (Glm4MoeLiteConfig,
                      dict({k: v for k, v in LATENT.items() if k != "first_k_dense_replace"},
                           q_lora_rank=24, qk_nope_head_dim=12, v_head_dim=16,
                           n_shared_experts=1), torch.bfloat16, False, None),
}
LITE = {k: v for k, v in LATENT.items() if k != "first_k_dense_replace"}
LATENTS.update({
    "glm4_moe_lite_odd_sizes": (Glm4MoeLiteConfig,
                                dict(LITE, vocab_size=61, hidden_size=21, intermediate_size=23,
                                     num_attention_heads=3, num_key_value_heads=3, q_lora_rank=13,
                                     kv_lora_rank=18, qk_nope_head_dim=7, qk_rope_head_dim=4,
                                     v_head_dim=9, moe_intermediate_size=11, n_routed_experts=5,
                                     num_experts_per_tok=2, n_shared_experts=2,
                                     num_hidden_layers=3), torch.float16, False, None),
    "glm4_moe_lite_all_used": (Glm4MoeLiteConfig,
                               dict(LITE, vocab_size=61, hidden_size=24, intermediate_size=18,
                                    q_lora_rank=16, moe_intermediate_size=12, n_routed_experts=3,
                                    num_experts_per_tok=3, n_shared_experts=1,
                                    norm_topk_prob=False, routed_scaling_factor=1.5,
                                    tie_word_embeddings=True), torch.bfloat16, True, None),
    "kimi_k2": (DeepseekV3Config,
                dict(LATENT, vocab_size=61, hidden_size=24, intermediate_size=18, q_lora_rank=16,
                     n_shared_experts=1, n_group=1, topk_group=1, routed_scaling_factor=2.8,
                     max_position_embeddings=1024,
                     rope_parameters=dict(YARN, factor=32.0, beta_fast=1.0, mscale=1.0,
                                          mscale_all_dim=1.0)), torch.bfloat16, True, None),
    "kimi_k2_odd_sizes": (DeepseekV3Config,
                          dict(LATENT, vocab_size=61, hidden_size=21, intermediate_size=23,
                               num_attention_heads=3, num_key_value_heads=3, q_lora_rank=13,
                               kv_lora_rank=18, qk_nope_head_dim=7, qk_rope_head_dim=4,
                               v_head_dim=9, moe_intermediate_size=11, n_routed_experts=5,
                               num_experts_per_tok=2, n_shared_experts=1, n_group=1, topk_group=1),
                          torch.float16, False, None),
    "kimi_k2_most_used": (DeepseekV3Config,
                     dict(LATENT, vocab_size=61, hidden_size=24, intermediate_size=18,
                          q_lora_rank=16, moe_intermediate_size=12, n_routed_experts=6,
                          num_experts_per_tok=4, n_shared_experts=1, n_group=1, topk_group=1,
                          num_hidden_layers=3), torch.bfloat16, False, None),
})

# Families with mechanisms of their own, as small as shows them. Windows end inside the prompt, and
# so do the lengths from which a rotation was stretched.
TINY = dict(vocab_size=61, hidden_size=20, intermediate_size=18, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=10, bos_token_id=1,
            eos_token_id=2, pad_token_id=0)
SMALL = dict(TINY, vocab_size=41, hidden_size=16, intermediate_size=10)
LONG = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0, 1.1, 1.2, 1.5, 2.0],
            long_factor=[1.2, 1.5, 2.0, 3.0, 4.5])
YARN_32 = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0,
               original_max_position_embeddings=32)
THREE = dict(TINY, hidden_size=21, num_attention_heads=3)
FAMILIES = {
    "gemma1": (GemmaConfig, dict(TINY), torch.bfloat16, False, None),
    "gemma1_untied_mha": (GemmaConfig,
                          dict(TINY, hidden_size=28, num_key_value_heads=4, head_dim=6,
                               tie_word_embeddings=False), torch.float16, True, None),
    "gemma1_one_kv_head": (GemmaConfig,
                           dict(THREE, num_key_value_heads=1, head_dim=12,
                                attention_bias=True), torch.bfloat16, True, None),
    "gemma2": (Gemma2Config,
               dict(TINY, num_hidden_layers=3, sliding_window=11, query_pre_attn_scalar=17,
                    attn_logit_softcapping=3.0, final_logit_softcapping=8.0), torch.bfloat16, False,
               None),
    "gemma2_old_config": (Gemma2Config,
                          dict(TINY, sliding_window=13, num_key_value_heads=1,
                               query_pre_attn_scalar=10), torch.float16, True, None),
    "gemma2_no_caps": (Gemma2Config,
                       dict(THREE, num_key_value_heads=3, sliding_window=8,
                            attn_logit_softcapping=None, final_logit_softcapping=None,
                            layer_types=["full_attention",
                                         "sliding_attention"]), torch.bfloat16, False, None),
    "gemma3": (Gemma3TextConfig,
               dict(TINY, num_hidden_layers=4, sliding_window=9, layer_types=[
                   "sliding_attention", "full_attention", "sliding_attention", "full_attention"
               ], rope_parameters={
                   "full_attention": dict(rope_type="linear", rope_theta=1e6, factor=8.0),
                   "sliding_attention": dict(rope_type="default", rope_theta=1e4)
               }, query_pre_attn_scalar=12), torch.bfloat16, False, None),
    "gemma3_old_config": (Gemma3TextConfig,
                          dict(TINY, num_hidden_layers=7, hidden_size=16, intermediate_size=10,
                               head_dim=6, num_key_value_heads=1, sliding_window=12,
                               query_pre_attn_scalar=6), torch.float16, True, None),
    "gemma3_caps": (Gemma3TextConfig,
                    dict(THREE, num_key_value_heads=3, sliding_window=10,
                         final_logit_softcapping=5.0,
                         tie_word_embeddings=False), torch.bfloat16, False, None),
    # with a part for images, which is not looked at: with the names that transformers 4.52 gave it,
    # and as the published directories are
    "gemma3_images": (Gemma3Config, dict(TINY, num_hidden_layers=4, sliding_window=9,
                                         query_pre_attn_scalar=12), torch.bfloat16, False, None),
    "gemma3_images_old": (Gemma3Config,
                          dict(TINY, num_hidden_layers=7, num_key_value_heads=1,
                               sliding_window=12), torch.float16, False, None),
    "mistral3_images_old": (Mistral3Config, dict(SMALL, sliding_window=None,
                                                 head_dim=14), torch.bfloat16, False, None),
    "phi3": (Phi3Config, dict(SMALL, sliding_window=11), torch.bfloat16, False, None),
    "phi3_long": (Phi3Config,
                  dict(SMALL, hidden_size=20, num_attention_heads=2, max_position_embeddings=120,
                       original_max_position_embeddings=24, rope_parameters=LONG), torch.bfloat16,
                  False, None),
    "phi3_short_partial": (Phi3Config,
                           dict(SMALL, hidden_size=32, num_attention_heads=2, num_key_value_heads=1,
                                head_dim=16, original_max_position_embeddings=64,
                                tie_word_embeddings=True,
                                rope_parameters=dict(LONG, partial_rotary_factor=0.75,
                                                     short_factor=[1.0, 1.0, 1.2, 1.4, 2.0, 2.5],
                                                     long_factor=[1.5, 2.5, 3.0, 4.0, 5.0, 6.0])),
                           torch.float16, True, None),
    "granite": (GraniteConfig,
                dict(SMALL, embedding_multiplier=3.0, attention_multiplier=0.4,
                     residual_multiplier=0.6, logits_scaling=4.0), torch.bfloat16, False, None),
    "granite_biases": (GraniteConfig,
                       dict(SMALL, attention_bias=True, mlp_bias=True, residual_multiplier=0.22,
                            logits_scaling=0.5, tie_word_embeddings=True), torch.float16, True,
                       None),
    "granite_one_scale": (GraniteConfig,
                          dict(SMALL, num_key_value_heads=1,
                               attention_multiplier=0.25), torch.bfloat16, False, None),
    "smollm3": (SmolLM3Config, dict(SMALL, num_hidden_layers=5), torch.bfloat16, False, None),
    "smollm3_listed": (SmolLM3Config,
                       dict(SMALL, no_rope_layers=[0, 1], attention_bias=True,
                            tie_word_embeddings=False), torch.float16, True, None),
    "smollm3_every_second": (SmolLM3Config,
                             dict(SMALL, num_hidden_layers=3, no_rope_layer_interval=2,
                                  mlp_bias=True, num_key_value_heads=1), torch.bfloat16, False,
                             None),
    "olmo2": (Olmo2Config, dict(SMALL), torch.bfloat16, False, None),
    "olmo2_mha_tied": (Olmo2Config,
                       dict(SMALL, num_key_value_heads=4, tie_word_embeddings=True,
                            num_hidden_layers=3), torch.float16, True, None),
    "olmo2_biases": (Olmo2Config,
                     dict(SMALL, hidden_size=21, num_attention_heads=3, num_key_value_heads=1,
                          head_dim=14, attention_bias=True), torch.bfloat16, False, None),
    "glm": (GlmConfig, dict(SMALL, head_dim=12), torch.bfloat16, False, None),
    "glm_no_bias": (GlmConfig,
                    dict(SMALL, head_dim=16, attention_bias=False,
                         partial_rotary_factor=0.25), torch.float16, True, None),
    "glm4": (Glm4Config, dict(SMALL, head_dim=12), torch.bfloat16, False, None),
    "glm4_whole_heads": (Glm4Config,
                         dict(SMALL, num_attention_heads=6, num_key_value_heads=3, head_dim=6,
                              rope_parameters=dict(rope_type="default", rope_theta=1e4,
                                                   partial_rotary_factor=1.0)), torch.bfloat16,
                         False, None),
    "glm4_tied": (Glm4Config,
                  dict(SMALL, num_key_value_heads=1, head_dim=8, tie_word_embeddings=True,
                       num_hidden_layers=3), torch.float16, True, None),
    "cohere": (CohereConfig, dict(SMALL, logit_scale=0.5), torch.bfloat16, False, None),
    "cohere_biases": (CohereConfig,
                      dict(SMALL, num_key_value_heads=4, attention_bias=True,
                           tie_word_embeddings=False), torch.float16, True, None),
    "cohere_head_norms": (CohereConfig, dict(SMALL, use_qk_norm=True), torch.bfloat16, False, None),
    "cohere_head_norms_odd_sizes": (CohereConfig,
                                    dict(SMALL, hidden_size=18, intermediate_size=11,
                                         num_attention_heads=3, num_key_value_heads=1,
                                         use_qk_norm=True, attention_bias=True,
                                         num_hidden_layers=3), torch.float16, True, None),
    "cohere2": (Cohere2Config,
                dict(SMALL, num_hidden_layers=4, sliding_window=9, head_dim=10), torch.bfloat16,
                False, None),
    "cohere2_listed": (Cohere2Config,
                       dict(SMALL, num_hidden_layers=3, sliding_window=12, head_dim=6,
                            logit_scale=1.0, layer_types=[
                                "full_attention", "sliding_attention", "full_attention"
                            ]), torch.float16, True, None),
    "glm_odd_sizes": (GlmConfig,
                      dict(SMALL, hidden_size=21, intermediate_size=11, num_attention_heads=3,
                           num_key_value_heads=3, head_dim=8,
                           num_hidden_layers=3), torch.bfloat16, True, None),
    "cohere_odd_sizes": (CohereConfig,
                         dict(SMALL, hidden_size=18, intermediate_size=11, num_attention_heads=3,
                              num_key_value_heads=1, num_hidden_layers=3), torch.float16, False,
                         None),
    "cohere2_odd_sizes": (Cohere2Config,
                          dict(SMALL, hidden_size=21, intermediate_size=11, num_hidden_layers=5,
                               num_attention_heads=3, num_key_value_heads=3, head_dim=8,
                               sliding_window=7, attention_bias=True,
                               layer_norm_eps=1e-3), torch.bfloat16, True, None),
    "internlm2": (LlamaConfig,
                  dict(SMALL, num_attention_heads=8, hidden_size=32, intermediate_size=12,
                       head_dim=4), torch.bfloat16, False, None),
    "internlm2_biases": (LlamaConfig,
                         dict(SMALL, hidden_size=20, num_attention_heads=5, num_key_value_heads=5,
                              head_dim=4, attention_bias=True,
                              num_hidden_layers=3), torch.float16, True, None),
    "internlm2_odd_sizes": (LlamaConfig,
                            dict(SMALL, hidden_size=42, intermediate_size=11, num_attention_heads=3,
                                 num_key_value_heads=1, head_dim=14,
                                 rope_parameters=dict(rope_type="linear", rope_theta=1e4,
                                                      factor=2.0)), torch.float32, True, None),
    "internlm3": (InternLM3Config, dict(SMALL, head_dim=6), torch.bfloat16, False, None),
    "internlm3_biases": (InternLM3Config,
                         dict(SMALL, hidden_size=18, intermediate_size=11, num_attention_heads=3,
                              num_key_value_heads=1, head_dim=8, attention_bias=True,
                              mlp_bias=True), torch.float16, True, None),
    "internlm3_dynamic": (InternLM3Config,
                          dict(SMALL, head_dim=10, num_hidden_layers=3, max_position_embeddings=64,
                               tie_word_embeddings=True,
                               rope_parameters=dict(rope_type="dynamic", rope_theta=5e4,
                                                    factor=6.0)), torch.bfloat16, False, None),
    "chatglm": (GlmConfig, dict(SMALL, head_dim=12), torch.bfloat16, False, None),
    "chatglm_no_bias": (GlmConfig,
                        dict(SMALL, num_key_value_heads=4, head_dim=8,
                             attention_bias=False), torch.float16, False, None),
    "chatglm_odd_sizes": (GlmConfig,
                          dict(SMALL, hidden_size=21, intermediate_size=11, num_attention_heads=3,
                               num_key_value_heads=1, head_dim=4,
                               num_hidden_layers=3), torch.float32, False, None),
    "baichuan": (LlamaConfig, dict(SMALL, num_key_value_heads=4,
                                   head_dim=4), torch.bfloat16, True, None),
    "baichuan2": (LlamaConfig, dict(SMALL, num_key_value_heads=4, head_dim=4,
                                    num_hidden_layers=3), torch.bfloat16, True, None),
    "baichuan2_odd_sizes": (LlamaConfig,
                            dict(SMALL, hidden_size=30, intermediate_size=11, num_attention_heads=3,
                                 num_key_value_heads=3, head_dim=10,
                                 rms_norm_eps=1e-6), torch.float32, True, None),
    "baichuan_13b": (LlamaConfig, dict(SMALL, num_attention_heads=8, num_key_value_heads=8,
                                       head_dim=2), torch.bfloat16, True, None),
    "baichuan_13b_odd_sizes": (LlamaConfig,
                               dict(SMALL, hidden_size=30, intermediate_size=11,
                                    num_attention_heads=5, num_key_value_heads=5, head_dim=6,
                                    num_hidden_layers=3), torch.float16, True, None),
    "baichuan2_13b": (LlamaConfig, dict(SMALL, hidden_size=24, num_attention_heads=12,
                                        num_key_value_heads=12, head_dim=2,
                                        num_hidden_layers=3), torch.bfloat16, True, None),
    "baichuan2_13b_odd_sizes": (LlamaConfig,
                                dict(SMALL, hidden_size=30, intermediate_size=13,
                                     num_attention_heads=3, num_key_value_heads=3, head_dim=10,
                                     rms_norm_eps=1e-6), torch.float32, True, None),
    "mistral_odd_sizes": (MistralConfig,
                          dict(SMALL, vocab_size=43, hidden_size=35, intermediate_size=19,
                               num_attention_heads=5, num_key_value_heads=5, head_dim=6,
                               num_hidden_layers=3, sliding_window=11, rms_norm_eps=1e-6),
                          torch.bfloat16, False, None),
    "mistral_odd_sizes_no_window": (MistralConfig,
                                    dict(SMALL, vocab_size=37, hidden_size=27,
                                         intermediate_size=13, num_attention_heads=3,
                                         num_key_value_heads=1, head_dim=14, num_hidden_layers=3,
                                         sliding_window=None), torch.float16, True, None),
    "llama_yarn": (LlamaConfig, dict(SMALL, head_dim=16, rope_parameters=YARN_32), torch.bfloat16,
                   False, None),
    "qwen3_yarn_fractions": (Qwen3Config,
                             dict(SMALL, head_dim=16,
                                  rope_parameters=dict(YARN_32, truncate=False, beta_fast=8.0)),
                             torch.float16, True, None),
}


VISION = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
              image_size=28, patch_size=14)
VISION_OF = {
    Gemma3Config: dict(VISION, model_type="siglip_vision_model"),
    Mistral3Config: dict(VISION, model_type="pixtral", head_dim=8)
}


def auto_class(cls):
    return AutoModelForImageTextToText if cls in VISION_OF else AutoModelForCausalLM


def make_config(cls, overrides):
    fields = {**BASE, **overrides}
    if cls not in VISION_OF:
        return cls(**fields)
    more = dict(mm_tokens_per_image=4) if cls is Gemma3Config else dict(tie_word_embeddings=False)
    return cls(text_config=fields, vision_config=VISION_OF[cls], eos_token_id=2, **more)


def init(model, gen):
    """Unit-variance products; q and k larger, so that softmax is peaked; norms and biases away
    from 1 and 0 (norms that are stored less 1: from 0), those of the choice of experts mostly below
    0."""
    less_1 = model.config.model_type.startswith("gemma")
    for name, b in model.named_buffers():
        if "e_score_correction_bias" in name:
            b.copy_(0.2 * torch.randn(b.shape, generator=gen) - 0.5)
    for name, p in model.named_parameters():
        r = torch.randn(p.shape, generator=gen)
        if p.dim() == 2 and "embed" in name:
            p.data = r
        elif p.dim() == 3 and model.config.model_type == "gpt_oss":  # gates reach their limit
            p.data = r * (3.5 if "gate_up" in name else 0.5) / math.sqrt(p.shape[1])
        elif p.dim() == 3:  # all experts in one
            p.data = r / math.sqrt(p.shape[2])
        elif p.dim() == 2 and "norm" not in name:
            gain = 1.6 if ("q_proj" in name or "k_proj" in name
                           or "q_b_proj" in name) else 3.0 if "lm_head" in name else 1.0
            p.data = r * gain / math.sqrt(p.shape[1])
        elif "bias" in name:
            p.data = 0.3 * r
        else:
            p.data = (0 if less_1 else 1) + 0.2 * r


def to_old_style(path):
    """config.json as transformers 4 wrote it: torch_dtype, rope_theta, rope_scaling."""
    c = json.load(open(path))
    rope = c.pop("rope_parameters")
    if "sliding_attention" in rope:
        c["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    c["rope_theta"] = rope.pop("rope_theta")
    if c["model_type"] == "minimax_m2":
        c["rotary_dim"] = int(c["head_dim"] * rope.pop("partial_rotary_factor"))
    if "partial_rotary_factor" in rope:
        c["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    c["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    if c["rope_scaling"] and rope["rope_type"] == "linear":
        rope["type"] = rope.pop("rope_type")
    c["torch_dtype"] = c.pop("dtype")
    c.pop("layer_types", None)
    if c["model_type"] in ("qwen2_moe", "qwen3_moe") and "num_local_experts" in c:
        c["num_experts"] = c.pop("num_local_experts")
    json.dump(c, open(path, "w"), indent=2, sort_keys=True)


def random_model(cls, overrides, dtype, seed, n_tokens):
    """A model with values that `dtype` holds, and a prompt."""
    gen = torch.Generator().manual_seed(seed)
    config = make_config(cls, overrides)
    model = auto_class(cls).from_config(config, attn_implementation="eager",
                                             experts_implementation="eager")
    init(model, gen)
    config = config.get_text_config()
    if config.tie_word_embeddings:
        model.tie_weights()
        model.get_input_embeddings().weight.data *= 3.0 / math.sqrt(config.hidden_size)
    return model.to(dtype), torch.randint(0, config.vocab_size, (1, n_tokens), generator=gen)


def smallest_gap(model, tokens):
    """How near a row's last expert is to the first that it did not choose, in standard deviations
    of the experts' logits. A near tie falls elsewhere with the smallest rounding, and then the
    row's logits say nothing about the arithmetic."""
    gaps, used = [1.0], getattr(model.config, "num_experts_per_tok", 0)

    def gap(values, n):
        best = values.sort(dim=-1, descending=True).values
        return (best[:, n - 1] - best[:, n]).min() if n < values.shape[1] else torch.tensor(1.0)

    def look(module, _args, output):
        values = output[0].float()
        spread = values.std()
        bias = getattr(module, "e_score_correction_bias", None)
        if bias is not None:
            values = values.sigmoid() + bias
            spread = values.std()
        n_groups = getattr(module, "num_group", None) or 1
        if n_groups > 1:
            grouped = values.view(len(values), n_groups, -1)
            scores = grouped.topk(1 if bias is None else 2, dim=-1).values.sum(-1)
            gaps.append(float(gap(scores, module.topk_group) / spread))
            kept = torch.zeros_like(scores).scatter_(1, scores.topk(module.topk_group).indices, 1)
            values = grouped.masked_fill(kept.unsqueeze(-1) == 0, -1e3).flatten(1)
        gaps.append(float(gap(values, used) / spread))

    hooks = [m.register_forward_hook(look) for n, m in model.named_modules()
             if used and n.endswith(("mlp.gate", "mlp.router"))]
    with torch.no_grad():
        model.eval()(tokens)
    for hook in hooks:
        hook.remove()
    return min(gaps)


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def mxfp4(weight):
    """Rows of 32 * n values as codes, powers of two, and what both stand for."""
    blocks = weight.float().unflatten(-1, (-1, 32))
    power = torch.floor(torch.log2(blocks.abs().amax(-1).clamp(min=1e-30))) - 2
    scaled = blocks / torch.exp2(power).unsqueeze(-1)
    codes = (scaled.abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
    values = E2M1[codes] * torch.where(scaled < 0, -1.0, 1.0)
    codes = codes + 8 * (scaled < 0)
    packed = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return (packed, (power + 127).to(torch.uint8),
            (values * torch.exp2(power).unsqueeze(-1)).flatten(-2))


def experts_to_mxfp4(out):
    """The matrices of experts in a directory as gpt-oss has them; they are what MXFP4 holds."""
    path, changed = os.path.join(out, "model.safetensors"), {}
    for name, t in safetensors.torch.load_file(path).items():
        if t.dim() == 3:
            codes, scales, values = mxfp4(t.transpose(1, 2))
            assert torch.equal(values, t.transpose(1, 2).float())
            changed[name + "_blocks"], changed[name + "_scales"] = codes, scales
        else:
            changed[name] = t
    safetensors.torch.save_file(changed, path, metadata={"format": "pt"})
    path = os.path.join(out, "config.json")
    config = json.load(open(path))
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"
        ]
    }
    json.dump(config, open(path, "w"), indent=2, sort_keys=True)


def make(folder, name, cls, overrides, dtype, old_style, shard):
    seed = SEED + zlib.crc32(name.encode()) % 1000000
    n_tokens = 40 if folder == "families" else PROMPT
    model, tokens = random_model(cls, overrides, dtype, seed, n_tokens)
    least = {"mixtures": 0.03, "latent": 0.03}.get(folder)
    while least and smallest_gap(model.float(), tokens) < least:
        seed += 1
        model, tokens = random_model(cls, overrides, dtype, seed, n_tokens)
    config = model.config
    out = os.path.join(HERE, folder, name)
    shutil.rmtree(out, ignore_errors=True)
    if name.endswith("mxfp4"):
        for p in model.parameters():
            if p.dim() == 3:
                p.data = mxfp4(p.data.transpose(1, 2))[2].transpose(1, 2)
    model.to(dtype).save_pretrained(out, **({"max_shard_size": shard} if shard else {}))
    if old_style:
        to_old_style(os.path.join(out, "config.json"))

    loaded = auto_class(cls).from_pretrained(out, dtype=torch.float32,
                                                  attn_implementation="eager",
                                                  experts_implementation="eager").eval()
    if name.startswith("baichuan2"):
        head = loaded.lm_head.weight
        head.data = torch.nn.functional.normalize(head.data)
    more = slopes_alone(config.num_attention_heads, n_tokens) if "_13b" in name else {}
    with torch.no_grad():
        logits = loaded(tokens, **more).logits[0].contiguous()
    vocab = config.get_text_config().vocab_size
    assert logits.dtype == torch.float32 and logits.shape == (n_tokens, vocab)
    with open(os.path.join(out, "logits.f32"), "wb") as f:
        flat = logits.flatten().tolist()
        f.write(struct.pack("<%df" % len(flat), *flat))
    if name.endswith("mxfp4"):
        experts_to_mxfp4(out)
    if name.endswith("_images"):
        to_later_names(out)
    if name.endswith("_images_old"):
        to_published_config(out)
    if name.split("_")[0] in REMOTE:
        REMOTE[name.split("_")[0]](out, config)
    json.dump(
        {"seed": seed, "tokens": tokens[0].tolist(), "largest_logit": float(logits.abs().max())},
        open(os.path.join(out, "tokens.json"), "w"), indent=1)
    print("%-32s seed %d largest logit %.2f" % (name, seed, float(logits.abs().max())))


def alibi_slopes(n):
    """Of n heads, as the paper's code has them."""
    if n & (n - 1) == 0:
        return [2.0 ** (-8.0 * i / n) for i in range(1, n + 1)]
    power = 1 << (n.bit_length() - 1)
    return alibi_slopes(power) + alibi_slopes(2 * power)[::2][:n - power]


def slopes_alone(n_heads, n_tokens):
    """What makes a forward of Llama one with ALiBi: position 0, which is not rotated, for all, and
    a mask that adds slopes to the scores."""
    at = torch.arange(n_tokens)
    back = (at.unsqueeze(0) - at.unsqueeze(1)).float()
    mask = torch.tensor(alibi_slopes(n_heads)).view(-1, 1, 1) * back
    mask = mask.masked_fill(back > 0, float("-inf")).unsqueeze(0)
    return dict(attention_mask=mask, position_ids=torch.zeros(1, n_tokens, dtype=torch.long))


def rewrite(out, tensors, change):
    """The directory with other names of tensors and another config.json."""
    path = os.path.join(out, "model.safetensors")
    safetensors.torch.save_file(tensors(safetensors.torch.load_file(path)), path,
                                metadata={"format": "pt"})
    path = os.path.join(out, "config.json")
    config = json.load(open(path))
    for name in ("head_dim", "attention_bias", "mlp_bias", "pretraining_tp"):
        config.pop(name, None)
    change(config)
    json.dump(config, open(path, "w"), indent=2, sort_keys=True)


def fused(t, names, ret):
    """Tensors below one another, biases too, where there are any."""
    for kind in ("weight", "bias"):
        if names[0] + "." + kind in t:
            t[ret + "." + kind] = torch.cat([t.pop(n + "." + kind) for n in names])


QKV = [".self_attn.%s_proj" % x for x in "qkv"]


def to_internlm2(out, old):
    """q, k and v by KV heads, and names of its own."""
    n_kv, size = old.num_key_value_heads, old.hidden_size // old.num_attention_heads

    def tensors(t):
        for i in range(old.num_hidden_layers):
            p = "model.layers.%d" % i
            for kind in ("weight", "bias"):
                if p + QKV[0] + "." + kind not in t:
                    continue
                q, k, v = (t.pop(p + n + "." + kind) for n in QKV)
                parts = [x.reshape(n_kv, -1, *x.shape[1:]) for x in (q, k, v)]
                assert parts[1].shape[1] == size
                t[p + ".attention.wqkv." + kind] = torch.cat(parts, 1).flatten(0, 1).contiguous()
        names = [("self_attn.o_proj", "attention.wo"), ("mlp.gate_proj", "feed_forward.w1"),
                 ("mlp.up_proj", "feed_forward.w3"), ("mlp.down_proj", "feed_forward.w2"),
                 ("input_layernorm", "attention_norm"), ("post_attention_layernorm", "ffn_norm"),
                 ("embed_tokens", "tok_embeddings"), ("lm_head", "output")]
        return {renamed(n, names): x for n, x in t.items()}

    rewrite(out, tensors, lambda c: c.update(model_type="internlm2",
                                             architectures=["InternLM2ForCausalLM"],
                                             bias=old.attention_bias))


def renamed(name, names):
    for a, b in names:
        name = name.replace(a, b)
    return name


def to_baichuan(out, old):
    def tensors(t):
        for i in range(old.num_hidden_layers):
            p = "model.layers.%d" % i
            fused(t, [p + n for n in QKV], p + ".self_attn.W_pack")
        return t

    def change(c):
        c.update(model_type="baichuan", architectures=["BaiChuanForCausalLM"])
        c.pop("num_key_value_heads")
        if "baichuan2" in out:
            c.update(architectures=["BaichuanForCausalLM"], z_loss_weight=0, model_max_length=128)
        if "_13b" in out:
            c["model_max_length"] = c.pop("max_position_embeddings")
            del c["rope_theta"], c["rope_scaling"]

    rewrite(out, tensors, change)


def to_chatglm(out, old):
    def tensors(t):
        for i in range(old.num_hidden_layers):
            p = "model.layers.%d" % i
            fused(t, [p + n for n in QKV], p + ".self_attention.query_key_value")
        names = [("self_attn.o_proj", "self_attention.dense"),
                 ("mlp.gate_up_proj", "mlp.dense_h_to_4h"), ("mlp.down_proj", "mlp.dense_4h_to_h"),
                 ("model.layers", "transformer.encoder.layers"),
                 ("model.embed_tokens", "transformer.embedding.word_embeddings"),
                 ("model.norm", "transformer.encoder.final_layernorm"),
                 ("lm_head", "transformer.output_layer")]
        t = {renamed(n, names): x for n, x in t.items()}
        t["transformer.rotary_pos_emb.inv_freq"] = torch.zeros(old.head_dim // 4)
        return t

    def change(c):
        groups = old.num_key_value_heads < old.num_attention_heads
        new = dict(model_type="chatglm", architectures=["ChatGLMModel"], add_bias_linear=False,
                   add_qkv_bias=old.attention_bias, apply_query_key_layer_scaling=True,
                   apply_residual_connection_post_layernorm=False, attention_softmax_in_fp32=True,
                   bias_dropout_fusion=True, ffn_hidden_size=old.intermediate_size,
                   fp32_residual_connection=False, hidden_dropout=0.0, attention_dropout=0.0,
                   hidden_size=old.hidden_size, kv_channels=old.head_dim,
                   layernorm_epsilon=old.rms_norm_eps, multi_query_attention=groups,
                   multi_query_group_num=old.num_key_value_heads if groups else 1,
                   num_attention_heads=old.num_attention_heads, num_layers=old.num_hidden_layers,
                   original_rope=True, padded_vocab_size=old.vocab_size, post_layer_norm=True,
                   rmsnorm=True, seq_length=128, use_cache=True, tie_word_embeddings=False,
                   eos_token_id=2, pad_token_id=0, torch_dtype=c["dtype"])
        c.clear()
        c.update(new)

    rewrite(out, tensors, change)


def to_internlm3(out, old):
    """Under the names of the published files: transformers writes those of Llama."""
    rewrite(out, lambda t: t, lambda c: c.update(architectures=["InternLM3ForCausalLM"],
                                                 head_dim=old.head_dim, bias=old.mlp_bias,
                                                 qkv_bias=old.attention_bias))


IMAGE_NAMES = [("language_model.model.", "model.language_model."),
               ("language_model.lm_head.", "lm_head."), ("vision_tower.", "model.vision_tower."),
               ("multi_modal_projector.", "model.multi_modal_projector.")]


def to_later_names(out):
    rewrite(out, lambda t: {renamed(n, IMAGE_NAMES): x for n, x in t.items()}, lambda c: None)


def to_published_config(out):
    """config.json as with the first models that take images: what it can leave out stays out."""
    def change(c):
        text = c["text_config"]
        ropes = text.pop("rope_parameters")
        rope = ropes.get("full_attention", ropes)
        text["rope_theta"] = rope["rope_theta"]
        if "sliding_attention" in ropes:
            text["rope_local_base_freq"] = ropes["sliding_attention"]["rope_theta"]
        c["torch_dtype"] = c.pop("dtype")
        for key in ("dtype", "layer_types", "architectures", "tie_word_embeddings",
                    "attention_bias", "final_logit_softcapping", "attn_logit_softcapping",
                    "query_pre_attn_scalar", "use_bidirectional_attention"):
            text.pop(key, None)
        if c["model_type"] == "gemma3":
            c.pop("tie_word_embeddings", None)

    rewrite(out, lambda t: t, change)


def to_kimi(out, old):
    path = os.path.join(out, "config.json")
    config = json.load(open(path))
    config["model_type"] = "kimi_k2"
    json.dump(config, open(path, "w"), indent=2, sort_keys=True)


# What a directory becomes whose class is not in transformers: the same arithmetic, otherwise put.
REMOTE = {"internlm2": to_internlm2, "internlm3": to_internlm3, "chatglm": to_chatglm,
          "baichuan": to_baichuan, "baichuan2": to_baichuan, "kimi": to_kimi}

FAMILIES_NOTE = """\
* internlm2, chatglm and baichuan are not in transformers: classes of Llama and GLM compute
  the logits, and then tensors and config.json get the names and the order that those models' files
  have; the output matrix of baichuan2 has its rows divided by their length before, and those with
  13b in their names get no rotation and a mask with the slopes of ALiBi
"""

MIXTURES_NOTE = """* of the seeds from a model's first one on, that with which no row of the prompt
  is near a tie between experts: rounding would decide such a row's logits
"""


def provenance(folder):
    with open(os.path.join(HERE, folder, "PROVENANCE.md"), "w") as f:
        f.write("""# Where these files come from

Each folder is a small random model (config.json, generation_config.json, safetensors) with the
logits (`logits.f32`: little-endian f32 [tokens, vocab]) that Hugging Face transformers computes in
f32 with eager attention on the CPU for the prompt in `tokens.json`, from the directory as it lies
here. No trained weights, no third-party data.

* made by: `python tests/golden/make_golden.py`
* python %s, torch %s, transformers %s, safetensors %s
* base seed %d; each model's seed is in its tokens.json
* weights are stored in the dtype that config.json names and widened to f32 before the logits are
  computed
%s""" % (sys.version.split()[0], torch.__version__, transformers.__version__,
        __import__("safetensors").__version__, SEED,
        ("" if folder == "fixtures" else MIXTURES_NOTE) +
        (FAMILIES_NOTE if folder == "families" else "")))


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    wanted = sys.argv[1:]
    for folder, models in (("fixtures", MODELS), ("mixtures", MIXTURES), ("latent", LATENTS),
                           ("families", FAMILIES)):
        chosen = [name for name in models if not wanted or name in wanted]
        for name in chosen:
            make(folder, name, *models[name])
        if chosen:
            provenance(folder)


if __name__ == "__main__":
    main()
