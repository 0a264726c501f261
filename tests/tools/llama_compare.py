#!/usr/bin/python3
"""Whole models in every GGUF format that `tandem quantize` writes, beside llama.cpp on the same
file and tokens: models/pocket, and a random llama whose rows K-quants fit (256 and 512 values).

    tests/tools/llama_compare.py --llama-logits PROGRAM --text held_out.jsonl [--csv FILE]

PROGRAM is tests/tools/llama_logits.c. Both round activations to 8 bits, llama.cpp those of K-quants
in groups of 256, so their logits differ by that rounding; how far each is from the model before it
was quantised should be the same. Reported: the size of the difference of the logits, KL and the
share of equal most likely tokens between the two, and KL of each from the original in f32."""
import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile

import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BIN = os.environ.get("TANDEM_BIN", os.path.join(ROOT, "build", "release", "bin"))
sys.path.insert(0, os.path.join(ROOT, "tests", "cluster"))
import quant_model as qm  # noqa: E402

POCKET = "bf16 q8_0 q5_1 q5_0 q4_1 q4_0 iq4_nl mxfp4 q4_k_m".split()
RANDOM = "f16 q8_0 q6_k q5_k_m q4_k_m iq4_nl mxfp4 q4_0".split()
HIDDEN, DIM, FF, HEADS, KV_HEADS, LAYERS = 256, 64, 512, 4, 2, 4
FIELDS = ["model", "format", "positions", "logits_off", "kl_between", "same_top", "kl_tandem",
          "kl_llama_cpp"]


def random_model(folder):
    rng, vocab = np.random.default_rng(5), qm.VOCAB
    os.makedirs(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(os.path.join(qm.POCKET, name), folder)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
        "intermediate_size": FF, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "head_dim": DIM, "num_hidden_layers": LAYERS, "vocab_size": vocab,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "torch_dtype": "float16", "bos_token_id": 0,
        "eos_token_id": 0
    }
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as f:
        json.dump(config, f)
    q, kv = HEADS * DIM, KV_HEADS * DIM
    shapes = {"self_attn.q_proj": (q, HIDDEN), "self_attn.k_proj": (kv, HIDDEN),
              "self_attn.v_proj": (kv, HIDDEN), "self_attn.o_proj": (HIDDEN, q),
              "mlp.gate_proj": (FF, HIDDEN), "mlp.up_proj": (FF, HIDDEN),
              "mlp.down_proj": (HIDDEN, FF)}
    t = {"model.norm": rng.uniform(0.5, 1.5, HIDDEN),
         "model.embed_tokens": rng.normal(size=(vocab, HIDDEN)),
         "lm_head": rng.normal(size=(vocab, HIDDEN)) * 0.15}
    for i in range(LAYERS):
        for name, shape in shapes.items():
            t[f"model.layers.{i}.{name}"] = rng.normal(size=shape) * (2 / shape[1])**0.5
        for name in ("input_layernorm", "post_attention_layernorm"):
            t[f"model.layers.{i}.{name}"] = rng.uniform(0.5, 1.5, HIDDEN)
    qm.write_safetensors(os.path.join(folder, "model.safetensors"),
                         {name + ".weight": v.astype(np.float16) for name, v in t.items()})


def run(*args, **more):
    done = subprocess.run(list(map(str, args)), capture_output=True, check=False, **more)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, args))[:300]}: {done.stderr.decode()[-800:]}")
    return done.stdout


def log_softmax(x):
    x = x.astype(np.float64) - x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def kl(p, q):
    return float((np.exp(p) * (p - q)).sum(axis=1).mean())


def measure(model, fmt, ids, llama, folder):
    tandem, text = os.path.join(BIN, "tandem"), ",".join(map(str, ids))
    at = [os.path.join(folder, name) for name in ("model.gguf", "a", "b", "c")]
    run(tandem, "quantize", "--from", model, "--to", at[0], "--format", fmt, "--force")
    for source, out in ((at[0], at[1]), (model, at[3])):
        run(tandem, "logits", "--model", source, "--tokens", text, "--dtype", "f32", "--out", out)
    run(llama, at[0], at[2], text)
    a, b, c = (np.fromfile(path, "<f4").reshape(len(ids), -1) for path in at[1:])
    p, q, o = map(log_softmax, (a, b, c))
    off = np.sqrt(((a - b)**2).sum() / (a**2).sum())
    return [len(ids), f"{off:.2e}", f"{kl(q, p):.2e}",
            f"{np.mean(p.argmax(axis=1) == q.argmax(axis=1)):.4f}", f"{kl(o, p):.3e}",
            f"{kl(o, q):.3e}"]


def main():
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--llama-logits", required=True)
    ap.add_argument("--text", required=True)
    ap.add_argument("--tokens", type=int, default=512)
    ap.add_argument("--csv")
    a = ap.parse_args()
    with open(a.text, encoding="utf-8") as f:
        text = "<|endoftext|>".join(json.loads(line) for line in f if line.strip())
    said = run(os.path.join(BIN, "tandem"), "tokenize", "--model", qm.POCKET, "--whole",
               input=text[:8 * a.tokens].encode())
    ids = [int(word) for word in said.decode().replace(",", " ").split()][:a.tokens]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        seeded = os.path.join(folder, "random")
        random_model(seeded)
        for model, formats in ((qm.POCKET, POCKET), (seeded, RANDOM)):
            for fmt in formats:
                rows.append([os.path.basename(model), fmt,
                             *measure(model, fmt, ids, a.llama_logits, folder)])
                print(" ".join(f"{k}={v}" for k, v in zip(FIELDS, rows[-1])), flush=True)
    if a.csv:
        with open(a.csv, "w", newline="", encoding="utf-8") as f:
            csv.writer(f, lineterminator="\n").writerows([FIELDS, *rows])


if __name__ == "__main__":
    main()
