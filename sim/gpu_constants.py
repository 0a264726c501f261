#!/usr/bin/python3
"""Derives sim/gpu_table.c from measured kernels: sim/gpu_constants.py [--check] [--tandem BIN]
[--data FOLDER]

The measurements are those of ai-dynamo/aiconfigurator (Apache-2.0), bf16, a file for each kernel
(SOURCES). Each constant is one of a small linear model, fitted by least squares of the RELATIVE
error, no coefficient below zero. What
it leaves unexplained is printed: the median and the 90th percentile of |model - measured| /
    measured over the rows of
the fit.

Cards without measurements (ESTIMATED) get those of a card that has them, scaled by the ratio of the
makers' figures.

--check writes nothing: exit status 1 when the table in the tree is another. 77 without the data.

--tandem BIN: what `BIN plan --print-latency` derives against whole servers that somebody measured
(END_TO_END): bf16, one pool that prefills and decodes, a closed loop of B clients. In a step each
of the B sequences decodes, and B / osl prompts are computed on the way, so
    TPOT = b0 + b1 B + b2 B (isl + osl / 2) + B / osl (a1 isl + a2 isl^2 / 2).
TTFT is not compared: there it is the wait for the others' prompts, which all came at once. Exit
status 1 when the error is above BOUNDS."""
import argparse
import csv
import difflib
import gzip
import json
import os
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TABLE = os.path.join(ROOT, "sim", "gpu_table.c")
SOURCES = {
    "a100": ("vllm_0.14.0", "nccl_2.27.3"), "h100": ("vllm_0.24.0", "nccl_2.29.2"),
    "h200": ("vllm_0.24.0", "nccl_2.29.2")
}
ESTIMATED = {"b200": "h200", "l40s": "a100"}
YAML = {
    "a100": "a100_sxm", "h100": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm", "l40s": "l40s"
}
FEW_ROWS = (1, 4, 16, 32, 64, 128, 256)  # a decode step's batches
MANY_ROWS = (128, 256, 512, 1024, 2048, 4096)  # prefill chunks
END_TO_END = {
    "meta-llama/Llama-3.1-8B-Instruct": {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
        "vocab_size": 128256, "max_position_embeddings": 131072
    }, "Qwen/Qwen3-32B": {
        "model_type": "qwen3", "hidden_size": 5120, "num_hidden_layers": 64,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 25600, "vocab_size": 151936, "max_position_embeddings": 40960
    }
}
BOUNDS = (
    0.10, 0.35
)  # median and p90 of the relative error over all rows; 0.079 and 0.317 when this was written
HEADS, HEAD_DIM = (4, 8, 16, 32, 64), 128  # of one rank
TENSOR_PARALLEL = (2, 4, 8)


def read_rows(path, **wanted):
    """Rows (dicts) whose columns are as wanted; a column that the file lacks does not count."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as f:
        names = next(csv.reader(f))
        index = {name: i for i, name in enumerate(names)}
        wanted = [(index[k], v) for k, v in wanted.items() if k in index]
        return [
            dict(zip(names, row)) for row in csv.reader(f) if all(row[i] == v for i, v in wanted)
        ]


def least_squares(rows, targets, columns):
    """Coefficients of the named columns by the normal equations, Gauss-Jordan with pivots."""
    a = [[sum(r[i] * r[k] for r in rows)
          for k in columns] + [sum(r[i] * t for r, t in zip(rows, targets))] for i in columns]
    n = len(columns)
    for i in range(n):
        pivot = max(range(i, n), key=lambda q: abs(a[q][i]))
        a[i], a[pivot] = a[pivot], a[i]
        for q in range(n):
            if q != i:
                factor = a[q][i] / a[i][i]
                a[q] = [x - factor * y for x, y in zip(a[q], a[i])]
    return [a[i][n] / a[i][i] for i in range(n)]


def fit(features, seconds):
    """Coefficients >= 0 with the least sum of squared relative errors, four digits, and the
    errors that remain, sorted."""
    n = len(features[0])
    scale = [max(f[i] for f in features)
             for i in range(n)]  # so that the equations are well conditioned
    rows = [[f[i] / scale[i] / s for i in range(n)] for f, s in zip(features, seconds)]
    columns = list(range(n))
    while True:
        found = least_squares(rows, [1.0] * len(rows), columns)
        if min(found) >= 0:
            break
        del columns[found.index(min(found))]
    coefficients = [0.0] * n
    for column, value in zip(columns, found):
        coefficients[column] = float(f"{value / scale[column]:.3e}")
    errors = sorted(
        abs(sum(c * x for c, x in zip(coefficients, f)) - s) / s for f, s in zip(features, seconds))
    return coefficients, errors


def seconds_of(row):
    return float(row["latency"]) / 1e3


def fit_gemm(folder, vllm, n_rows):
    """[launch, bytes of the weights, flops]: C[m,n] = A[m,k] B[k,n]. Shapes of layers; what is
    smaller stays in the L2 cache."""
    features, seconds = [], []
    for row in read_rows(os.path.join(folder, f"gemm_{vllm}_gemm_perf.csv.gz"),
                         gemm_dtype="bfloat16"):
        m, n, k = int(row["m"]), int(row["n"]), int(row["k"])
        if m in n_rows and 1024 <= n <= 16384 and 1024 <= k <= 16384 and n * k >= 1 << 22:
            features.append((1, 2 * n * k, 2 * m * n * k))
            seconds.append(seconds_of(row))
    return fit(features, seconds)


def attention_rows(folder, vllm, kind):
    path = os.path.join(folder, f"attention_{vllm}_{kind}_attention_perf.csv.gz")
    for row in read_rows(path, attn_dtype="bfloat16", kv_cache_dtype="bfloat16",
                         head_dim=str(HEAD_DIM), window_size="0"):
        heads, kv_heads = int(row["num_heads"]), int(row["num_key_value_heads"])
        if heads in HEADS and kv_heads <= 8:
            yield int(row["batch_size"]), int(row["isl"]), int(
                row["step"]), heads, kv_heads, seconds_of(row)


def fit_prefill_attention(folder, vllm):
    """[launch, elements of the rows' queries, flops of the causal half]."""
    rows = [(b, isl, heads, s)
            for b, isl, _, heads, _, s in attention_rows(folder, vllm, "context")
            if b <= 4 and isl >= 128]
    return fit([(1, b * isl * heads * HEAD_DIM, 4 * heads * HEAD_DIM * b * isl * isl / 2)
                for b, isl, heads, _ in rows], [r[-1] for r in rows])


def fit_decode_attention(folder, vllm):
    """[launch, elements of the sequences' new keys, bytes of the KV cache]."""
    rows = [(b, isl + step, kv_heads, s)
            for b, isl, step, _, kv_heads, s in attention_rows(folder, vllm, "generation")]
    rows = [r for r in rows if r[0] <= 256 and 128 <= r[1] <= 32768]
    return fit([(1, b * kv * HEAD_DIM, b * n * kv * HEAD_DIM * 4) for b, n, kv, _ in rows],
               [r[-1] for r in rows])


def fit_all_reduce(folder, nccl, gpus):
    """[launch, bytes of the message]."""
    rows = read_rows(os.path.join(folder, f"comm_{nccl}_nccl_perf.csv.gz"), op_name="all_reduce",
                     nccl_dtype="half", num_gpus=str(gpus))
    rows = [(2 * int(r["message_size"]), seconds_of(r)) for r in rows]  # the size is in elements
    rows = [r for r in rows if 4096 <= r[0] <= 1 << 28]
    return fit([(1, n_bytes) for n_bytes, _ in rows], [r[1] for r in rows])


def read_yaml(data, card):
    """The numbers of a card's yaml file; the names are unique in it."""
    found = {}
    with open(os.path.join(data, YAML[card] + ".yaml"), encoding="utf-8") as f:
        for line in f:
            name, _, value = line.split("#")[0].partition(":")
            try:
                found[name.strip()] = float(value)
            except ValueError:
                pass
    return found


def measured(data, card):
    """{row of the table: coefficients}, {the same: (rows, errors)}."""
    folder, (vllm, nccl) = os.path.join(data, YAML[card]), SOURCES[card]
    fits = {
        "gemm_decode": fit_gemm(folder, vllm, FEW_ROWS), "gemm_prefill": fit_gemm(
            folder, vllm, MANY_ROWS), "attn_prefill": fit_prefill_attention(folder, vllm),
        "attn_decode": fit_decode_attention(folder, vllm)
    }
    for gpus in TENSOR_PARALLEL:
        fits[f"all_reduce {gpus}"] = fit_all_reduce(folder, nccl, gpus)
    return {name: f[0] for name, f in fits.items()}, {name: f[1] for name, f in fits.items()}


def estimated(constants, to, of):
    """The constants of a measured card for another: launches as they are, bytes by memory and
    NVLink or PCIe, flops by the tensor cores."""
    memory, flops, link = (of[k] / to[k] for k in ("mem_bw", "bfloat16_tc_flops", "intra_node_bw"))
    factors = {
        "gemm_decode": (1, memory, flops), "gemm_prefill": (1, memory, flops),
        "attn_prefill": (1, flops, flops), "attn_decode": (1, memory, memory)
    }
    return {
        name: [float(f"{c * f:.3e}") for c, f in zip(values, factors.get(name, (1, link)))]
        for name, values in constants.items()
    }


def derived_tables(tandem, card, config):
    """{cards of a worker: coefficients} as tandem derives them."""
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as f:
        json.dump(config, f)
        f.flush()
        out = subprocess.run([tandem, "plan", "--gpu", card, "--model", f.name, "--print-latency"],
                             stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    lines = [dict(item.split("=", 1) for item in line.split()) for line in out.stdout.splitlines()]
    return {
        int(line["gpus"]): {k: float(line[k]) for k in ("a1", "a2", "b0", "b1", "b2")}
        for line in lines
    }


def predicted_tpot_s(table, batch, isl, osl):
    prompts = batch / osl * (table["a1"] * isl + table["a2"] * isl * isl / 2)
    return table["b0"] + table["b1"] * batch + table["b2"] * batch * (isl + osl / 2) + prompts


def compare(data, tandem):
    """Prints the error of each server's rows; True when all of them together are within BOUNDS."""
    path = os.path.join(data, "measured-e2e", "silicon_sample.csv.gz")
    tables = {model: derived_tables(tandem, "h100", config) for model, config in END_TO_END.items()}
    found = {}
    for row in read_rows(path, system="h100_sxm", mode="agg", gemm_quant_mode=""):
        if row["model_path"] not in tables:
            continue
        tp, batch, isl, osl = (int(row[k]) for k in ("tp_size", "batch_size", "isl", "osl"))
        ratio = 1e3 * predicted_tpot_s(tables[row["model_path"]][tp], batch, isl, osl) / float(
            row["silicon_tpot_ms"])
        found.setdefault((row["model_path"], row["backend"], tp), []).append(ratio - 1)
    for (model, backend, tp), errors in sorted(found.items()):
        size = sorted(abs(e) for e in errors)
        print(f"h100 {model} {backend} tp {tp}: {len(size)} rows, TPOT's error median "
              f"{size[len(size) // 2] * 100:.1f} %, p90 {size[len(size) * 9 // 10] * 100:.1f} %,"
              f" with its sign {sorted(errors)[len(errors) // 2] * 100:+.1f} %")
    size = sorted(abs(e) for errors in found.values() for e in errors)
    if len(size) < 300:
        sys.exit(f"gpu_constants: {len(size)} rows of {path} were taken, must be 300 or more")
    median, p90 = size[len(size) // 2], size[len(size) * 9 // 10]
    print(f"h100, all {len(size)} rows: error median {median * 100:.1f} %, p90 {p90 * 100:.1f} %, "
          f"limits {BOUNDS[0] * 100:.0f} % and {BOUNDS[1] * 100:.0f} %")
    return median <= BOUNDS[0] and p90 <= BOUNDS[1]


HEAD = """\
/* gpu_table.c - the constants of gpu.h. Written by sim/gpu_constants.py, which says how each
 * is derived; do not edit by hand. Measurements: ai-dynamo/aiconfigurator at 095f58a5 (Apache-2.0),
 * bf16. */
#include "sim/gpu.h"

const struct td_gpu td_gpus[] = {
"""


def number(value):
    return f"{value:.4g}"


def table_row(card, constants, yaml):
    three = (("gemm_decode", "byte_ps", "flop_fs"), ("gemm_prefill", "byte_ps", "flop_fs"),
             ("attn_prefill", "element_ps", "flop_fs"), ("attn_decode", "element_ps", "byte_ps"))
    source = "NULL"
    if card in SOURCES:
        source = '"' + ", ".join(name.replace("_", " ") for name in SOURCES[card][:2]) + '"'
    lines = [
        f"    {{.name = \"{card}\",", f"     .source = {source},", "     .estimated_from = "
        f"{repr(ESTIMATED[card]).replace(chr(39), chr(34)) if card in ESTIMATED else 'NULL'},",
        f"     .memory_bytes = {yaml['mem_capacity']:.0f}ull,"
    ]
    for name, second, third in three:
        c = constants[name]
        scale = {"byte_ps": 1e12, "element_ps": 1e12, "flop_fs": 1e15}
        lines.append(f"     .{name} = {{.launch_us = {number(c[0] * 1e6)}, .{second} = "
                     f"{number(c[1] * scale[second])}, .{third} = {number(c[2] * scale[third])}}},")
    byte_s = 1 / (yaml["mem_bw"] * yaml["mem_bw_empirical_scaling_factor"])
    lines.append(f"     .elementwise = {{.launch_us = "
                 f"{number(yaml['mem_empirical_constant_latency'] * 1e6)}, .byte_ps = "
                 f"{number(byte_s * 1e12)}}},")
    pairs = [constants[f"all_reduce {n}"] for n in TENSOR_PARALLEL]
    lines.append("     .all_reduce = {" + ",\n                    ".join(
        f"{{.launch_us = {number(c[0] * 1e6)}, .byte_ps = {number(c[1] * 1e12)}}}"
        for c in pairs) + "}},")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--data", default=os.environ.get("TANDEM_DATA", os.path.join(ROOT, "..", "shared", "data")))
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--tandem")
    args = parser.parse_args()
    data = os.path.join(args.data, "aiconfigurator")
    if not os.path.isdir(data):
        print(f"gpu_constants: {data} is not there: the constants were not derived again")
        return 77
    yaml = {card: read_yaml(data, card) for card in YAML}
    constants = {}
    for card in SOURCES:
        constants[card], errors = measured(data, card)
        for name, e in errors.items():
            print(f"{card} {name}: {len(e)} measurements, error median {e[len(e) // 2] * 100:.1f} "
                  f"%, p90 {e[len(e) * 9 // 10] * 100:.1f} %")
            if len(e) < 15:
                sys.exit(
                    f"gpu_constants: {card} {name}: {len(e)} rows of the data were taken, must "
                    "be 15 or more")
    for card, of in ESTIMATED.items():
        constants[card] = estimated(constants[of], yaml[card], yaml[of])
    text = HEAD + "".join(table_row(card, constants[card], yaml[card])
                          for card in YAML) + "    {.name = NULL},\n};\n"
    if not args.check:
        with open(TABLE, "w", encoding="utf-8") as f:
            f.write(text)
        return 0
    with open(TABLE, encoding="utf-8") as f:
        have = f.read()
    diff = list(
        difflib.unified_diff(have.splitlines(), text.splitlines(), "gpu_table.c", "derived",
                             lineterm=""))
    print("\n".join(diff) if diff else
          f"gpu_constants: the {len(YAML)} cards of gpu_table.c are what the measurements give")
    is_near = not args.tandem or compare(args.data, args.tandem)
    return 1 if diff or not is_near else 0


if __name__ == "__main__":
    sys.exit(main())
