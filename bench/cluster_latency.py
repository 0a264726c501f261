#!/usr/bin/python3
"""Latency through the whole cluster, one request at a time: TTFT, TPOT and the stages of the
ledger, with their spread.

    TANDEM_BIN=build/release/bin bench/cluster_latency.py [--prompt-tokens 200] [--output-tokens 64]
    [--requests 60] [--transfer shm] [--config FILE --kv-dtype int8] [--csv FILE]

Three real daemons on loopback (one compute thread each). hand-over = transfer_exposed +
decode_queue of the ledger: from the first token that is sampled on the prefill worker to the
decode worker's first step, what disaggregation adds between token one and token two. rdma: with
TANDEM_VERBS_FAKE=path=FILE. With --config the workers run that shape with random weights and
--model's vocabulary."""
import argparse
import csv
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests",
                                "cluster"))
from harness import POCKET, ROOT, Cluster  # noqa: E402


def percentile(values, p):
    values = sorted(values)
    return values[min(len(values) - 1, int(p / 100 * len(values)))]


def read_config(path):
    with open(path, encoding="utf-8") as f:
        return json.load(f)


def main():
    a = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--model", default=POCKET)
    a.add_argument("--dtype", default="bf16")
    a.add_argument("--config", help="config.json of a shape for random weights")
    a.add_argument("--kv-dtype", default="auto", help="auto, bf16, int8, fp8")
    a.add_argument("--kv-memory", default="64MiB")
    a.add_argument("--prompt-tokens", type=int, default=200)
    a.add_argument("--output-tokens", type=int, default=64)
    a.add_argument("--requests", type=int, default=60)
    a.add_argument("--transfer", default="auto", choices=["auto", "tcp", "shm", "rdma"])
    a.add_argument("--mode", default="pd", choices=["pd", "colocated"])
    a.add_argument("--csv", help="append a row per stage")
    g = a.parse_args()
    rng = random.Random(1)
    rows = {}
    args = ["--transfer", g.transfer, "--kv-dtype", g.kv_dtype]
    shape = tempfile.NamedTemporaryFile("w", suffix=".json")
    if g.config:  # with the tokenizer's vocabulary, for the router compares them
        json.dump(read_config(g.config) | {
            "vocab_size": read_config(os.path.join(g.model, "config.json"))["vocab_size"]
        }, shape)
        shape.flush()
        args += ["--model", "", "--random-weights", shape.name, "--served-model-name",
                 os.path.basename(os.path.abspath(g.model))]
    with Cluster(mode=g.mode, prefill=0 if g.mode == "colocated" else 1, dtype=g.dtype,
                 model=g.model, kv_memory=g.kv_memory, worker_args=args) as c:
        for i in range(g.requests + 5):
            ids = [rng.randrange(3, 1000)
                   for _ in range(g.prompt_tokens)]  # distinct: no prefix hits
            r = c.generate(ids=ids, max_tokens=g.output_tokens, temperature=0, ignore_eos=True)
            assert r.code.value[0] == 0, r.details
            if i < 5:
                continue  # warm-up: connections, pages
            led = r.ledger
            values = {
                "ttft": led.ttft_us, "tpot": (led.e2e_us - led.ttft_us) / (g.output_tokens - 1),
                "router_queue": led.router_queue_us, "reserve": led.reserve_us,
                "prefill_queue": led.prefill_queue_us, "prefill": led.prefill_us, "rpc": led.rpc_us,
                "transfer": led.transfer_us,
                "handover": led.transfer_exposed_us + led.decode_queue_us,
                "first_step": led.first_step_us
            }
            for name, us in values.items():
                rows.setdefault(name, []).append(us / 1e3)
        path = led.transfer_path
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"],
                            capture_output=True, text=True, check=False).stdout.strip()
    model = os.path.basename(os.path.abspath(g.config or g.model)).removesuffix(".json")
    dtype = g.dtype if g.kv_dtype == "auto" else f"{g.dtype}, KV {g.kv_dtype}"
    print(f"{model} {dtype}, {g.mode}, {path}, prompt {g.prompt_tokens}, output "
          f"{g.output_tokens}, {g.requests} requests one at a time, commit {commit}")
    print(f"{'stage, ms':14} {'median':>9} {'p10':>9} {'p90':>9} {'p99':>9}")
    for name, v in rows.items():
        print(f"{name:14} {statistics.median(v):9.3f} {percentile(v, 10):9.3f} "
              f"{percentile(v, 90):9.3f} {percentile(v, 99):9.3f}")
    if g.csv:
        new = not os.path.exists(g.csv)
        with open(g.csv, "a", newline="", encoding="utf-8") as f:
            w = csv.writer(f)
            if new:
                w.writerow([
                    "commit", "cpu", "model", "dtype", "mode", "path", "prompt_tokens",
                    "output_tokens", "requests", "stage", "median_ms", "p10_ms", "p90_ms", "p99_ms"
                ])
            for name, v in rows.items():
                w.writerow([
                    commit,
                    platform.processor() or platform.machine(), model, dtype, g.mode, path,
                    g.prompt_tokens, g.output_tokens, g.requests,
                    name, *(f"{x:.3f}" for x in (statistics.median(v), percentile(v, 10),
                                                 percentile(v, 90), percentile(v, 99)))
                ])


if __name__ == "__main__":
    main()
