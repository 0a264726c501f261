#!/usr/bin/python3
"""What each format of weights costs in accuracy: `tandem compare` of a model with itself in that
format, both computing as they serve (activations rounded where the format has it), in f32 else.

    models/pocket/make_corpus.py --out held_out.jsonl --mib 1 --seed 77
    bench/weight_accuracy.py --text held_out.jsonl [--model models/pocket] [--only q4_0,nf4]
        [--tokens 8192] [--csv FILE]

Formats that `tandem quantize` writes are written by it. The others' directories are made by
tests/cluster/quant_model.py: each matrix rounded to nearest, by the formulas of the scheme and
without its calibration, so GPTQ and AWQ themselves do better than their rows here. The text's
documents (one JSON string a line) are joined by <|endoftext|>."""
import argparse
import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BIN = os.environ.get("TANDEM_BIN", os.path.join(ROOT, "build", "release", "bin"))
sys.path.insert(0, os.path.join(ROOT, "tests", "cluster"))
import quant_model as qm  # noqa: E402

GGUF = ("q8_0 q6_k q5_k_m q5_k_s q5_1 q5_0 q4_k_m q4_k_s q4_1 q4_0 iq4_nl mxfp4").split()
WRITTEN = "w8a8 w4a16 fp8 fp8_tensor".split()
MADE = {
    "gptq 4 bit by 64": qm.Gptq(group=64),
    "gptq 8 bit": qm.Gptq(bits=8, group=-1, symmetric=True),
    "awq by 64": qm.Awq(group=64),
    "compressed-tensors int4 by 64": qm.Packed(group=64),
    "compressed-tensors int8 weights": qm.Int8(dynamic=False),
    "fp8 weights alone": qm.Fp8("weights"),
    "fp8 in blocks of 128 x 128": qm.Fp8("block"),
    "LLM.int8()": qm.LlmInt8(),
    "nf4": qm.Nf4(), "nf4 double quantised": qm.Nf4(double=True), "fp4": qm.Nf4(kind="fp4"),
}
FIELDS = ["model", "format", "positions", "kl_mean", "kl_p99", "kl_max", "top1",
          "perplexity_ratio", "command"]
LINEAR = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj\.weight")


def read_tensors(folder):
    """name: (array or bytes, dtype) of one safetensors file; matrices of BF16 also as f64."""
    with open(os.path.join(folder, "model.safetensors"), "rb") as f:
        data = f.read()
    n = int.from_bytes(data[:8], "little")
    out = {}
    for name, t in json.loads(data[8:8 + n]).items():
        if name == "__metadata__":
            continue
        a, b = (8 + n + x for x in t["data_offsets"])
        raw = np.frombuffer(data[a:b], "<u2").reshape(t["shape"])
        assert t["dtype"] == "BF16", f"{name}: {t['dtype']}, must be BF16"
        out[name] = qm.Typed(raw, "BF16")
    return out


def make(scheme, source, folder):
    """The directory with its linear matrices in the scheme."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors", "corpus"))
    rng, tensors = np.random.default_rng(1), {}
    for name, t in read_tensors(source).items():
        if not LINEAR.fullmatch(name):
            tensors[name] = t
            continue
        w = (t.array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        tensors.update(scheme.matrix(name[:-len(".weight")], w, rng)[0])
    qm.write_safetensors(os.path.join(folder, "model.safetensors"), tensors)
    path = os.path.join(folder, "config.json")
    with open(path, encoding="utf-8") as f:
        config = json.load(f)
    config["quantization_config"] = scheme.config
    with open(path, "w", encoding="utf-8") as f:
        json.dump(config, f)


def run(*args):
    done = subprocess.run([os.path.join(BIN, "tandem"), *map(str, args)], capture_output=True,
                          text=True, check=False)
    if done.returncode:
        raise SystemExit(f"tandem {' '.join(map(str, args))}: {done.stderr}")
    return done.stdout


def measure(name, a, text, folder):
    model, more = os.path.join(folder, "made"), []
    if name in GGUF + WRITTEN:
        model += ".gguf" if name in GGUF else ""
        run("quantize", "--from", a.model, "--to", model, "--format", name)
    elif name == "bf16":
        model, more = a.model, ["--with-dtype", "bf16"]
    else:
        make(MADE[name], a.model, model)
    said = run("compare", "--model", a.model, "--with", model, "--text", text, "--context", 512,
               "--max-tokens", a.tokens, *more)
    value = {line[:22].strip(): line[22:].split() for line in said.splitlines()}
    return [int(said.split()[0]), *(float(value[k][0]) for k in (
        "KL divergence, mean", "KL divergence, p99", "KL divergence, max", "same top token",
        "perplexity ratio"))]


def main():
    names = ["bf16", *GGUF, *WRITTEN, *MADE]
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--model", default=os.path.join(ROOT, "models", "pocket"))
    ap.add_argument("--text", required=True)
    ap.add_argument("--tokens", type=int, default=8192)
    ap.add_argument("--only", default="")
    ap.add_argument("--csv")
    a = ap.parse_args()
    rows, label = [], os.path.basename(os.path.normpath(a.model))
    command = f"bench/weight_accuracy.py --model {label} --tokens {a.tokens}"
    with open(a.text, encoding="utf-8") as f:
        documents = [json.loads(line) for line in f if line.strip()]
    for name in a.only.split(",") if a.only else names:
        with tempfile.TemporaryDirectory() as folder:
            text = os.path.join(folder, "text")
            with open(text, "w", encoding="utf-8") as f:
                f.write("<|endoftext|>".join(documents)[:8 * a.tokens])
            m = measure(name, a, text, folder)
        rows.append(dict(zip(FIELDS, [label, name, m[0], *(f"{x:.3g}" for x in m[1:4]),
                                      f"{m[4]:.4f}", f"{m[5]:.5f}", command])))
        print("{format:38} KL mean {kl_mean} p99 {kl_p99} max {kl_max}, top-1 {top1}, perplexity x "
              "{perplexity_ratio}".format(**rows[-1]), flush=True)
    if a.csv:
        with open(a.csv, "w", newline="", encoding="utf-8") as f:
            out = csv.DictWriter(f, FIELDS, lineterminator="\n")
            out.writeheader()
            out.writerows(rows)


if __name__ == "__main__":
    main()
