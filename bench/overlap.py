#!/usr/bin/python3
"""How much of a transfer is hidden behind the computing of its own prompt (chunk by chunk, layers
by layers), on tcp over a slow link.

    TANDEM_BIN=build/release/bin bench/overlap.py [--mbit 200] [--prompt 1900] [--step-tokens 64]
    [--parts 1,5] [--rounds 9] [--requests 8]
                                                  [--csv FILE --machine NAME]

Real daemons in a network namespace of this script's own (root, or a kernel that lets users make
one), whose loopback interface carries --mbit. Per request:

  with      the prompt, computed in chunks while the transfer runs: prefill + transfer_exposed of
            the ledger = first chunk starts -> KV in decode's hands
  alone     the same prompt again; prefill has it in its prefix cache and decode does not, so all
            blocks but the last chunk's go at once: ledger's transfer
  compute   the same prompts in colocated mode: prefill with no transfer at all

exposed = (with - compute) / alone; hidden = 1 - exposed, of the medians of a round. `waited` is
transfer_exposed / alone: it leaves out what the transfer takes from computing on a machine with
few CPUs. --parts: values of --test-transfer-parts, in turn in each round; 1: a chunk's blocks go
when it is computed."""
import argparse
import csv
import os
import platform
import random
import statistics
import subprocess
import sys

if os.environ.get(
        "TANDEM_OVERLAP_INSIDE") != "1" and "-h" not in sys.argv and "--help" not in sys.argv:
    os.environ["TANDEM_OVERLAP_INSIDE"] = "1"
    os.execvp("unshare",
              ["unshare", "-n" if os.geteuid() == 0 else "-rn", sys.executable, *sys.argv])

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests",
                                "cluster"))
from harness import POCKET, ROOT, Cluster  # noqa: E402

WARM_UP = 2


def one(c, ids, want):
    r = c.generate(ids=ids, max_tokens=4, temperature=0, ignore_eos=True)
    assert r.code.value[0] == 0 and r.ledger.transfer_path == want and r.ledger.failovers == 0, (
        r.details, r.ledger)
    return r


def one_round(g, rng, parts):
    prompts = [[rng.randrange(3, 1000) for _ in range(g.prompt)]
               for _ in range(g.requests + WARM_UP)]
    v = {name: [] for name in ("with", "prefill", "waited", "alone", "compute")}
    common = {"dtype": "bf16", "model": g.model, "kv_memory": "128MiB", "worker_timeout_ms": 10000}
    step = ["--max-step-tokens", g.step_tokens]
    with Cluster(worker_args=["--transfer", "tcp", *step], **common, prefill=0, decode=0) as c, \
            Cluster(mode="colocated", prefill=0, worker_args=step, **common) as alone:
        c.start_worker("prefill", args=["--test-transfer-parts", parts])
        c.start_worker("decode", args=["--prefix-cache=false"])
        for i, ids in enumerate(prompts):  # in turn, so that foreign work falls on all three
            a, b, only = one(c, ids, "tcp"), one(c, ids, "tcp"), one(alone, ids, "local")
            assert a.usage.cached_tokens == only.usage.cached_tokens == 0
            assert b.usage.cached_tokens >= g.prompt - 32
            assert a.ledger.transfer_bytes == b.ledger.transfer_bytes
            if i < WARM_UP:
                continue
            v["with"].append(a.ledger.prefill_us + a.ledger.transfer_exposed_us)
            v["prefill"].append(a.ledger.prefill_us)
            v["waited"].append(a.ledger.transfer_exposed_us)
            v["alone"].append(b.ledger.transfer_us)
            v["compute"].append(only.ledger.prefill_us)
    return {name: statistics.median(x) / 1e3 for name, x in v.items()}, b.ledger.transfer_bytes


def main():
    a = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--model", default=POCKET)
    a.add_argument("--mbit", type=int, default=200)
    a.add_argument("--prompt", type=int, default=1900)
    a.add_argument("--step-tokens", type=int, default=64)
    a.add_argument("--parts", type=lambda text: [int(x) for x in text.split(",")], default=[0])
    a.add_argument("--rounds", type=int, default=9)
    a.add_argument("--requests", type=int, default=8)
    a.add_argument("--machine", default="")
    a.add_argument("--csv", help="append a row")
    g = a.parse_args()
    for command in ("ip link set lo up",
                    f"tc qdisc add dev lo root tbf rate {g.mbit}mbit burst 256kb latency 2s"):
        subprocess.run(command.split(), check=True)
    rng, load = random.Random(1), os.getloadavg()[0]
    rounds = {parts: [] for parts in g.parts}
    for i in range(g.rounds * len(g.parts)):
        parts = g.parts[i % len(g.parts)]
        r, n_bytes = one_round(g, rng, parts)
        assert r["alone"] < r["compute"], (
            f"the transfer alone takes {r['alone']:.1f} ms and computing "
            f"{r['compute']:.1f}: nothing could hide it; a faster link")
        r["hidden"] = 1 - (r["with"] - r["compute"]) / r["alone"]
        r["hidden_waited"] = 1 - r["waited"] / r["alone"]
        rounds[parts].append(r)
    for parts in g.parts:
        show(g, parts, rounds[parts], n_bytes, load)


def show(g, parts, rounds, n_bytes, load):
    commit = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty"],
                            capture_output=True, text=True, check=False).stdout.strip()
    print(f"{os.path.basename(os.path.abspath(g.model))} bf16, prompt {g.prompt} in steps of "
          f"{g.step_tokens}, {parts} parts, {n_bytes / 1024:.0f} KiB over {g.mbit} Mbit/s, "
          f"{g.rounds} rounds of {g.requests}, load {load:.1f} .. {os.getloadavg()[0]:.1f}, "
          f"commit {commit}")
    names = {
        "with": "with transfer, ms", "prefill": "prefill meanwhile, ms",
        "compute": "compute only, ms", "alone": "transfer alone, ms", "waited": "decode waited, ms",
        "hidden": "hidden", "hidden_waited": "hidden, by waiting"
    }
    out = {}
    for name, text in names.items():
        values = [r[name] for r in rounds]
        out[name] = (statistics.median(values), min(values), max(values))
        print(f"{text:22} {out[name][0]:9.3f} ({out[name][1]:.3f}..{out[name][2]:.3f})")
    if g.csv:
        new = not os.path.exists(g.csv)
        with open(g.csv, "a", newline="", encoding="utf-8") as f:
            w = csv.writer(f)
            if new:
                w.writerow([
                    "commit", "machine", "kernel", "load_before", "load_after", "prompt_tokens",
                    "step_tokens", "parts", "bytes", "mbit", "rounds", "requests",
                    *(f"{name}{end}" for name in names
                      for end in ("_median", "_least", "_greatest")), "command"
                ])
            w.writerow([
                commit, g.machine,
                platform.release(), f"{load:.2f}", f"{os.getloadavg()[0]:.2f}", g.prompt,
                g.step_tokens, parts, n_bytes, g.mbit, g.rounds, g.requests,
                *(f"{x:.3f}" for name in names for x in out[name]), " ".join(
                    ["bench/overlap.py", *sys.argv[1:]])
            ])


if __name__ == "__main__":
    main()
