#!/usr/bin/env python3
"""attn_compare.py RESULTS.csv [--published DIR] [--no-torch] - our attention beside the framework's
and the published times.

RESULTS.csv is what tandem-bench cuda-attn wrote on this machine. For each of its lines this
measures torch's scaled_dot_product_attention (its fused kernels only, the keys and values
contiguous: it reads no block table) with the same batch, rows, keys, heads and window, by CUDA
events over the same number of calls, rotating over as many copies of K and V as keep them out of
L2. --published: a folder of aiconfigurator's
attention_*_{context,generation}_attention_perf.csv.gz; the rows of equal shape are printed beside.
Prints CSV; `times_faster` is the best of the others over ours. Needs a GPU and torch, unless
--no-torch.
"""
import argparse
import csv
import glob
import gzip
import os
import statistics
import sys


def published_times(folder):
    """{(kind, batch, q, keys, heads, kv_heads, head_dim, window): [(us, who)]}: bf16 only."""
    times = {}
    for path in sorted(glob.glob(os.path.join(folder, "attention_*_attention_perf.csv.gz"))):
        with gzip.open(path, "rt") as f:
            for row in csv.DictReader(f):
                if row["kv_cache_dtype"] != "bfloat16" or row["attn_dtype"] != "bfloat16":
                    continue
                q, step = int(row["isl"]), int(row["step"])
                shape = (int(row["batch_size"]), q, q + step, int(
                    row["num_heads"]), int(row["num_key_value_heads"]), int(
                        row["head_dim"]), int(row["window_size"]))
                times.setdefault(shape, []).append(
                    (float(row["latency"]) * 1000, f'{row["framework"]}-{row["version"]}'))
    return times


def torch_time(torch, shape, calls, repeats):
    """Median us of one call, or None where torch has no fused kernel for it."""
    batch, q, keys, heads, kv_heads, head_dim, window = shape
    if window and window < keys:
        return None  # its fused kernels take no window
    copies = max(1, min(calls, -(-(128 << 20) // (batch * keys * kv_heads * head_dim * 4))))
    make = lambda n, h: torch.randn(batch, h, n, head_dim, device="cuda", dtype=torch.bfloat16)
    query = make(q, heads)
    kv = [(make(keys, kv_heads), make(keys, kv_heads)) for _ in range(copies)]
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    options = {"enable_gqa": heads != kv_heads}
    if q == keys and q > 1:
        options["is_causal"] = True
    elif q > 1:
        options["attn_mask"] = causal_lower_right(q, keys)

    def run():
        for i in range(calls):
            k, v = kv[i % copies]
            torch.nn.functional.scaled_dot_product_attention(query, k, v, **options)

    times = []
    try:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]):
            run()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            for _ in range(repeats + 2):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(
                    enable_timing=True)
                start.record()
                graph.replay()
                end.record()
                torch.cuda.synchronize()
                times.append(start.elapsed_time(end) * 1000 / calls)
    except RuntimeError as error:
        print(f"# torch, {shape}: {str(error).splitlines()[0]}", file=sys.stderr)
        return None
    return statistics.median(times[2:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results")
    parser.add_argument("--published")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--calls", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=15)
    a = parser.parse_args()
    torch = None
    if not a.no_torch:
        import torch
        print(f"# torch {torch.__version__} on {torch.cuda.get_device_name()}")
    published = published_times(a.published) if a.published else {}
    with open(a.results) as f:
        lines = [line for line in f if not line.startswith("#")]
    print("batch,q,context,heads,kv_heads,head_dim,window,us,torch_us,published_us,published_by,"
          "times_faster")
    for row in csv.DictReader(lines):
        shape = tuple(
            int(row[name])
            for name in ("batch", "q", "context", "heads", "kv_heads", "head_dim", "window"))
        ours, torch_us = float(
            row["us"]), torch_time(torch, shape, a.calls, a.repeats) if torch else None
        # a published decode step's keys are isl + step: as many as ours, or one fewer
        near = published.get(shape, []) or published.get(shape[:2] +
                                                         (shape[2] + 1, ) + shape[3:], [])
        best, who = min(near) if near else (None, "")
        others = [t for t in (torch_us, best) if t is not None]
        text = lambda t: "" if t is None else f"{t:.2f}"
        print(
            ",".join(map(str, shape)) + f",{ours:.2f},{text(torch_us)},{text(best)},{who}," +
            (f"{min(others) / ours:.2f}" if others else ""), flush=True)


if __name__ == "__main__":
    main()
