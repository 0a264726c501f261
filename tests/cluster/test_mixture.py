"""A mixture of experts through a cluster: the tokens of one process, whatever rows share an expert,
with prefix hits, and when a decode worker dies; and what a mixture cannot have is refused by
name."""
import json
import os
import random
import shutil
import subprocess

import numpy as np
import pytest

from harness import BIN, POCKET, SHORT, SLOW, check_one_process
from quant_model import Typed, write_safetensors

N = 4 if SHORT else 8
VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS, EXPERTS, INNER = 2048, 96, 4, 2, 24, 2, 6, 40
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": HIDDEN,
    "intermediate_size": 176, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM, "num_hidden_layers": LAYERS, "vocab_size": VOCAB,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 0,
    "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": INNER,
    "norm_topk_prob": True
}


def bf16(a):
    """The upper half of each f32."""
    return Typed((a.astype("<f4").view("<u4") >> 16).astype("<u2"), "BF16")


def write_model(folder):
    rng = np.random.default_rng(17)
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {"self_attn.q_proj": (q, HIDDEN), "self_attn.k_proj": (kv, HIDDEN),
              "self_attn.v_proj": (kv, HIDDEN), "self_attn.o_proj": (HIDDEN, q),
              "mlp.gate": (EXPERTS, HIDDEN)}
    for e in range(EXPERTS):
        shapes.update({f"mlp.experts.{e}.gate_proj": (INNER, HIDDEN),
                       f"mlp.experts.{e}.up_proj": (INNER, HIDDEN),
                       f"mlp.experts.{e}.down_proj": (HIDDEN, INNER)})
    norms = {"input_layernorm": HIDDEN, "post_attention_layernorm": HIDDEN,
             "self_attn.q_norm": HEAD_DIM, "self_attn.k_norm": HEAD_DIM}
    tensors = {"model.norm": rng.uniform(0.5, 1.5, HIDDEN),
               "model.embed_tokens": rng.normal(size=(VOCAB, HIDDEN)),
               "lm_head": rng.normal(size=(VOCAB, HIDDEN)) * 0.3}
    for i in range(LAYERS):
        for name, shape in shapes.items():
            tensors[f"model.layers.{i}.{name}"] = rng.normal(size=shape) * (2 / shape[1])**0.5
        for name, n in norms.items():
            tensors[f"model.layers.{i}.{name}"] = rng.uniform(0.5, 1.5, n)
    os.makedirs(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(os.path.join(POCKET, name), folder)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as f:
        json.dump(CONFIG, f)
    write_safetensors(os.path.join(folder, "model.safetensors"),
                      {name + ".weight": bf16(t) for name, t in tensors.items()})
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("mixture") / "m")


def make_requests():
    rng = random.Random(43)
    return [{
        "ids": [rng.randrange(3, VOCAB) for _ in range(rng.choice([1, 15, 16, 33, 70]))],
        "max_tokens": rng.choice([9, 17, 64]), "seed": rng.randrange(1 << 40), "logprobs": 0,
        "temperature": rng.choice([0.0, 0.8]), "top_k": rng.choice([0, 20])
    } for _ in range(N)]


def test_tokens_of_one_process(model):
    check_one_process(make_requests(), model, n_alone=2)


@pytest.mark.parametrize("form,says", [
    ("q8_0", "no GGUF files of this family are written"),
    ("w8a8", "no mixture of experts is written in this format"),
])
def test_what_is_not_there_is_refused(form, says, model, tmp_path):
    done = subprocess.run([os.path.join(BIN, "tandem"), "quantize", "--from", model, "--to",
                           str(tmp_path / "out"), "--format", form], capture_output=True, text=True,
                          timeout=60 * SLOW, check=False)
    assert done.returncode != 0 and says in done.stderr, done.stdout + done.stderr
