#!/usr/bin/python3
"""Tokens per second of one process beside llama.cpp's, from the same GGUF files, with the floors of
the same run.

    bench/engine_peers.py --llama-bench PATH --dir DIR [--formats bf16,q8_0,q4_0,q4_k_m]
        [--config FILE [--layers N]] [--threads 2] [--rounds 3] [--cpu-time]
        [--csv FILE --machine NAME]

Files of the shape of --config (Llama's, Mixtral's or Qwen3-MoE's) with random weights are written
to DIR once (2.2 GB for bf16 of the 1.1 B shape, half of it for q8_0, a quarter for 4 bits); with
--write-only, nothing else is done. Of the format w8a8, which llama.cpp does not have, tandem runs a
directory of compressed-tensors beside llama.cpp's q8_0. A round measures, for each format, tandem
(`tandem engine-bench`) and llama.cpp one after the other, and begins with the other one than the
round before. A ratio is the median of the rounds' ratios, so foreign load that lasts for a round
counts on both sides.

  prefill_512  one prompt of 512 tokens
  decode_1     16 steps of one sequence
  decode_16    16 steps of 16 sequences. llama.cpp: `llama-batched-bench` where it lies beside
               llama-bench, else one prompt of 16 tokens, which is the same product

With --cpu-time, on a machine that others use: tokens per second of CPU time of one thread. Each
program runs once with few and once with more tokens, and the difference counts, without its start.
Several threads that wait for each other would count their waiting.

Floors (`tandem-bench kernels`): bytes of the weights over read bandwidth, operations of the weights
over the faster bf16 sequence or, for blocks, the peak of the integer dot; the larger of both. They
leave out attention and, for blocks, what scales cost."""
import argparse
import csv
import json
import os
import resource
import statistics
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
sys.path.insert(0, HERE)
import shape_gguf  # noqa: E402

WHAT = ("prefill_512", "decode_1", "decode_16")
STEPS, BATCH, PROMPT = 16, 16, 512


def run(command):
    p = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if p.returncode:
        sys.exit(f"{' '.join(command)}: status {p.returncode}\n{p.stderr[-2000:]}")
    return p.stdout


def tandem(g, path):
    def once(batch, prompt):
        r = json.loads(run([
            os.path.join(g.bin, "tandem"), "engine-bench", "--model", path, "--dtype", "bf16",
            "--threads", str(g.threads), "--batch", str(batch), "--prompt-len", str(prompt),
            "--output-len", str(STEPS), "--repeat", str(g.repeat), "--kv-memory", "256MiB",
            "--json"] + (["--ops", g.ops] if g.ops else [])))
        return r["prefill_tok_s"]["median"], r["decode_tok_s"]["median"]

    prefill, decode = once(1, PROMPT)
    return dict(zip(WHAT, (prefill, decode, once(BATCH, 16)[1])))


def llama(g, path):
    def bench(*args):
        rows = json.loads(run([g.llama_bench, "-m", path, "-t", str(g.threads), "-r",
                               str(g.repeat), "-o", "json", *args]))
        return {("p" if r["n_prompt"] else "n"): r["avg_ts"] for r in rows}

    batched = os.path.join(os.path.dirname(g.llama_bench), "llama-batched-bench")
    r = bench("-p", str(PROMPT), "-n", str(STEPS))
    if os.path.exists(batched):
        lines = [json.loads(line) for line in run([
            batched, "-m", path, "-t", str(g.threads), "-c", "1024", "-npp", "16", "-ntg",
            str(STEPS), "-npl", str(BATCH), "--output-format", "jsonl"]).splitlines()
            if line.startswith("{")]
        many = lines[-1]["speed_tg"]
    else:
        many = bench("-p", str(BATCH), "-n", "0")["p"]
    return dict(zip(WHAT, (r["p"], r["n"], many)))


def cpu_seconds(command):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run(command)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime


def rate(n_tokens, few, more):
    """Tokens per CPU second, of those that the second command has more than the first."""
    return n_tokens / (cpu_seconds(more) - cpu_seconds(few))


def tandem_cpu(g, path):
    def bench(batch, prompt, output):  # one run before the one that counts
        return [os.path.join(g.bin, "tandem"), "engine-bench", "--model", path, "--dtype", "bf16",
                "--threads", "1", "--batch", str(batch), "--prompt-len", str(prompt),
                "--output-len", str(output), "--repeat", "1", "--kv-memory", "256MiB",
                "--json"] + (["--ops", g.ops] if g.ops else [])

    return dict(zip(WHAT, (rate(2 * (PROMPT - 16), bench(1, 16, 2), bench(1, PROMPT, 2)),
                           rate(2 * STEPS, bench(1, 1, 8), bench(1, 1, 8 + STEPS)),
                           rate(2 * STEPS * BATCH, bench(BATCH, 1, 8), bench(BATCH, 1,
                                                                             8 + STEPS)))))


def llama_cpu(g, path):
    def bench(prompt, output):
        return [g.llama_bench, "-m", path, "-t", "1", "-r", "1", "--no-warmup", "-p", str(prompt),
                "-n", str(output)]

    def batched(n_steps):
        return [os.path.join(os.path.dirname(g.llama_bench), "llama-batched-bench"), "-m", path,
                "-t", "1", "-c", "1024", "-npp", "1", "-ntg", str(n_steps), "-npl", str(BATCH)]

    return dict(zip(WHAT, (rate(PROMPT - 16, bench(16, 0), bench(PROMPT, 0)),
                           rate(2 * STEPS, bench(0, 8), bench(0, 8 + 2 * STEPS)),
                           rate(STEPS * BATCH, batched(4), batched(4 + STEPS)))))


def measure_floors(g):
    """GFLOP/s, GOP/s and GB/s of g.threads threads."""
    out = run([os.path.join(g.bin, "tandem-bench"), "kernels", "--only", "none", "--repeats", "5",
               "--max-threads", str(g.threads), "--json"] + (["--cpu-time"] if g.cpu_time else []))
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return {r["what"]: r["value"] for r in rows
            if r["name"] == "floor" and r.get("threads") == g.threads}


# What llama.cpp runs beside a format that it does not have.
BESIDE = {"w8a8": "q8_0"}


def floor_of(what, fmt, config, floors):
    """Tokens per second that the weights alone would allow."""
    flops = n_bytes = 0
    n = {"prefill_512": PROMPT, "decode_1": 1, "decode_16": BATCH}[what]
    for name, columns, rows, kind in shape_gguf.tensors(config, fmt):
        if not rows or name == "token_embd.weight":
            continue
        used = read = 1
        if "_exps" in name:  # of a token, and of all tokens where they choose at random
            n_experts, n_used, _ = shape_gguf.experts_of(config)
            used = n_used / n_experts
            read = 1 - (1 - used)**n
        n_bytes += read * shape_gguf.tensor_bytes(columns, rows, kind)
        last = f"blk.{config['num_hidden_layers'] - 1}."
        of_one = name == "output.weight" or name.startswith((last + "attn_output", last + "ffn"))
        if what != "prefill_512" or not of_one:  # a prompt wants those for its last token alone
            flops += used * 2 * columns * rows
    peak = (max(floors["bf16 widen + fma"], floors.get("bf16 dot", 0)) if fmt == "bf16" else
            floors["int8 dot"]) * 1e9
    return n / max(n * flops / peak, n_bytes / (floors["read memory"] * 1e9))


def spread(values):
    return f"{statistics.median(values):.1f} ({min(values):.1f}..{max(values):.1f})"


def report(g, config, found, floors, loads):
    rows = []
    commit = run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"]).strip()
    print(f"{'format':8} {'what':12} {'tandem tok/s':>24} {'llama.cpp tok/s':>24} {'ratio':>6} "
          f"{'floor':>8} {'tandem':>7} {'llama':>6}")
    for fmt in g.formats:
        for what in WHAT:
            ours, theirs = ([r[fmt][i][what] for r in found] for i in (0, 1))
            ratio = statistics.median(a / b for a, b in zip(ours, theirs))
            floor = statistics.median(floor_of(what, fmt, config, f) for f in floors)
            shares = [statistics.median(v) / floor for v in (ours, theirs)]
            print(f"{fmt:8} {what:12} {spread(ours):>24} {spread(theirs):>24} {ratio:6.2f} "
                  f"{floor:8.1f} {shares[0]:6.0%} {shares[1]:6.0%}")
            rows.append([g.machine, commit, f"{min(loads):.1f}..{max(loads):.1f}",
                         f"{g.threads} cpu" if g.cpu_time else g.threads, fmt,
                         what] + [f"{f(v):.2f}" for v in (ours, theirs)
                                  for f in (statistics.median, min, max)] +
                        [f"{ratio:.3f}", f"{floor:.1f}", len(found)])
    print("floors:", ", ".join(f"{k} {statistics.median(f[k] for f in floors):.0f}"
                               for k in floors[0]), "; load", rows[0][2])
    if not g.csv:
        return
    is_new = not os.path.exists(g.csv)
    with open(g.csv, "a", newline="", encoding="utf-8") as f:
        w = csv.writer(f, lineterminator="\n")
        if is_new:
            w.writerow(["machine", "commit", "load", "threads", "format", "what"] +
                       [f"{e}_{v}" for e in ("tandem", "llama_cpp")
                        for v in ("median", "least", "greatest")] + ["ratio", "floor", "rounds"])
        w.writerows(rows)


def main():
    a = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--llama-bench", default="llama-bench")
    a.add_argument("--dir", required=True, help="for the GGUF files; they are kept")
    a.add_argument("--config", default=os.path.join(HERE, "configs", "llama-1.1b.json"))
    a.add_argument("--layers", type=int, help="so many of the config's layers")
    a.add_argument("--formats", default="bf16,q8_0,q4_0,q4_k_m", type=lambda s: s.split(","))
    a.add_argument("--threads", type=int, default=2)
    a.add_argument("--rounds", type=int, default=3)
    a.add_argument("--repeat", type=int, default=3, help="runs in each process")
    a.add_argument("--write-only", action="store_true", help="write the files, measure nothing")
    a.add_argument("--cpu-time", action="store_true",
                   help="tokens per CPU second of one thread, for a machine that others use")
    a.add_argument("--ops", help="tandem's kernel table; the fastest if not said")
    a.add_argument("--bin", default=os.path.join(ROOT, "build", "release", "bin"))
    a.add_argument("--csv", help="append a row for each format and measure")
    a.add_argument("--machine", default="unnamed")
    g = a.parse_args()
    if g.cpu_time:
        g.threads = 1
    with open(g.config, encoding="utf-8") as f:
        config = json.load(f)
    os.makedirs(g.dir, exist_ok=True)
    name = os.path.splitext(os.path.basename(g.config))[0]
    if g.layers:
        config["num_hidden_layers"] = g.layers
        name += f"-{g.layers}l"
    names = dict.fromkeys(g.formats + [BESIDE[f] for f in g.formats if f in BESIDE])
    paths = {f: os.path.join(g.dir, f"{name}-{f}" + ("" if f in BESIDE else ".gguf"))
             for f in names}
    for fmt, path in paths.items():
        if fmt in BESIDE:
            shape_gguf.write_w8a8(config, path)
        else:
            shape_gguf.write(config, fmt, path)
    if g.write_only:
        return
    found, floors, loads = [], [], []
    for i in range(g.rounds):
        floors.append(measure_floors(g))
        found.append({})
        for fmt in g.formats:
            loads.append(os.getloadavg()[0])
            both = list(zip((tandem_cpu, llama_cpu) if g.cpu_time else (tandem, llama),
                            (paths[fmt], paths[BESIDE.get(fmt, fmt)])))
            one, two = (f(g, path) for f, path in both[::-1 if i % 2 else 1])
            found[-1][fmt] = (two, one) if i % 2 else (one, two)
    report(g, config, found, floors, loads)


if __name__ == "__main__":
    main()
