"""Gemma 2 through a cluster: windows in every second layer, soft caps, norms behind attention and
MLP, of which prefill stores what decode reads; the tokens of one process."""
import json
import os
import random
import shutil

import numpy as np
import pytest

from harness import POCKET, SHORT, check_one_process
from quant_model import Typed, write_safetensors

N = 3 if SHORT else 8
VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS, INNER = 2048, 64, 4, 2, 20, 3, 88
CONFIG = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_size": HIDDEN,
    "intermediate_size": INNER, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM, "num_hidden_layers": LAYERS, "vocab_size": VOCAB,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": HEAD_DIM,
    "attn_logit_softcapping": 4.0, "final_logit_softcapping": 12.0, "sliding_window": 24,
    "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 0
}


def write_model(folder):
    rng = np.random.default_rng(29)
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {"self_attn.q_proj": (q, HIDDEN), "self_attn.k_proj": (kv, HIDDEN),
              "self_attn.v_proj": (kv, HIDDEN), "self_attn.o_proj": (HIDDEN, q),
              "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN),
              "mlp.down_proj": (HIDDEN, INNER)}
    norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
             "post_feedforward_layernorm")
    tensors = {"model.norm": rng.uniform(-0.5, 0.5, HIDDEN),
               "model.embed_tokens": rng.normal(size=(VOCAB, HIDDEN)) * 0.3}
    for i in range(LAYERS):
        for name, shape in shapes.items():
            tensors[f"model.layers.{i}.{name}"] = rng.normal(size=shape) * (2 / shape[1])**0.5
        for name in norms:
            tensors[f"model.layers.{i}.{name}"] = rng.uniform(-0.5, 0.5, HIDDEN)
    os.makedirs(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(os.path.join(POCKET, name), folder)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as f:
        json.dump(CONFIG, f)
    upper = {n: (t.astype("<f4").view("<u4") >> 16).astype("<u2") for n, t in tensors.items()}
    write_safetensors(os.path.join(folder, "model.safetensors"),
                      {n + ".weight": Typed(t, "BF16") for n, t in upper.items()})
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("gemma") / "m")


def make_requests():
    rng = random.Random(47)
    return [{
        "ids": [rng.randrange(3, VOCAB) for _ in range(rng.choice([5, 23, 24, 25, 70]))],
        "max_tokens": 64 if i == 0 else rng.choice([9, 40]), "seed": rng.randrange(1 << 40),
        "logprobs": 0, "temperature": 0.0 if i == 0 else rng.choice([0.0, 0.8]), "top_k": 0
    } for i in range(N)]


def test_tokens_of_one_process(model):
    check_one_process(make_requests(), model, n_alone=1)
