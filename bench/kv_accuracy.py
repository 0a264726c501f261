#!/usr/bin/python3
"""What a type of KV costs in accuracy: the distribution over the next token beside that with KV in
f32.

    models/pocket/make_corpus.py --out held_out.jsonl --mib 0.1 --seed 9
    TANDEM_BIN=build/release/bin bench/kv_accuracy.py --model models/pocket --text held_out.jsonl
        [--dtype f32] [--types bf16,int8,fp8] [--sequences 8] [--tokens 512] [--csv FILE]

The text (one JSON string a line, or plain text) is cut into sequences; of each `tandem logits`
writes the logits of every position, once for each type. Reported: KL(f32 || type) in nats, mean,
99th percentile and largest, the share of positions with the same most likely token, and the ratio
of the perplexities of the text. Plain Python: a position of a vocabulary of 2,048 takes a
millisecond."""
import argparse
import array
import csv
import json
import math
import os
import subprocess
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BIN = os.environ.get("TANDEM_BIN", os.path.join(ROOT, "build", "release", "bin"))
FIELDS = ["model", "dtype", "kv_dtype", "positions", "kl_mean", "kl_p99", "kl_max", "top1",
          "perplexity_ratio", "command"]


def token_ids(model, text):
    done = subprocess.run([os.path.join(BIN, "tandem"), "tokenize", "--model", model, "--whole"],
                          input=text, capture_output=True, text=True, check=True)
    return [int(word) for word in done.stdout.replace(",", " ").split()]


def logits(model, ids, dtype, kv_dtype, folder):
    path = os.path.join(folder, "logits")
    subprocess.run([os.path.join(BIN, "tandem"), "logits", "--model", model, "--tokens",
                    ",".join(map(str, ids)), "--dtype", dtype, "--kv-dtype", kv_dtype, "--out",
                    path], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    values = array.array("f")
    with open(path, "rb") as f:
        values.frombytes(f.read())
    return values


def log_softmax(row):
    top = max(row)
    total = math.log(sum(math.exp(x - top) for x in row)) + top
    return [x - total for x in row]


def compare(ids, wanted, got, sums):
    """Adds the positions of one sequence."""
    vocab = len(wanted) // len(ids)
    for i in range(len(ids)):
        p, q = (log_softmax(v[i * vocab:(i + 1) * vocab]) for v in (wanted, got))
        sums["kl"].append(sum(math.exp(a) * (a - b) for a, b in zip(p, q)))
        sums["same"] += p.index(max(p)) == q.index(max(q))
        if i + 1 < len(ids):
            sums["worse"].append(p[ids[i + 1]] - q[ids[i + 1]])


def main():
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--model", required=True)
    ap.add_argument("--text", required=True)
    ap.add_argument("--dtype", default="f32")
    ap.add_argument("--types", default="bf16,int8,fp8")
    ap.add_argument("--sequences", type=int, default=8)
    ap.add_argument("--tokens", type=int, default=512)
    ap.add_argument("--csv")
    a = ap.parse_args()
    with open(a.text, encoding="utf-8") as f:
        lines = f.read().split("\n")
    text = "\n".join(json.loads(x) if x[:1] == '"' else x for x in lines)
    ids = token_ids(a.model, text)
    n = min(a.sequences, len(ids) // a.tokens)
    if n < 1:
        raise SystemExit(f"text has {len(ids)} tokens, must have at least --tokens {a.tokens}")
    types = a.types.split(",")
    sums = {t: {"kl": [], "same": 0, "worse": []} for t in types}
    with tempfile.TemporaryDirectory() as folder:
        for s in range(n):
            part = ids[s * a.tokens:(s + 1) * a.tokens]
            wanted = logits(a.model, part, a.dtype, "f32", folder)
            for t in types:
                compare(part, wanted, logits(a.model, part, a.dtype, t, folder), sums[t])
    rows = []
    for t in types:
        kl, worse = sorted(sums[t]["kl"]), sums[t]["worse"]
        name = os.path.basename(os.path.normpath(a.model))
        command = f"bench/kv_accuracy.py --model {name} --dtype {a.dtype} --tokens {a.tokens}"
        rows.append(dict(zip(FIELDS, [
            name, a.dtype, t, len(kl),
            f"{sum(kl) / len(kl):.2g}", f"{kl[int(0.99 * len(kl))]:.2g}", f"{kl[-1]:.2g}",
            f"{sums[t]['same'] / len(kl):.4f}", f"{math.exp(sum(worse) / len(worse)):.5f}",
            f"{command} --sequences {n}"])))
        print("KV {kv_dtype:5} {positions} positions: KL mean {kl_mean} p99 {kl_p99} max {kl_max}, "
              "top-1 {top1}, perplexity x {perplexity_ratio}".format(**rows[-1]))
    if a.csv:
        is_new = not os.path.exists(a.csv)
        with open(a.csv, "a", newline="", encoding="utf-8") as f:
            out = csv.DictWriter(f, FIELDS, lineterminator="\n")
            if is_new:
                out.writeheader()
            out.writerows(rows)


if __name__ == "__main__":
    main()
