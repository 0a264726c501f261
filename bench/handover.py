#!/usr/bin/python3
"""Hand-over through the whole cluster, beside the time that its bytes are on the wire.

    TANDEM_BIN=build/release/bin bench/handover.py [--paths shm,tcp,rdma] [--prompts 200,1900]
    [--kv-dtypes auto | bf16,int8] [--rounds 9] [--requests 25] [--csv FILE --machine NAME]

hand-over = the first token is sampled on the prefill worker -> the decode worker's first step
starts (ledger: transfer_exposed + decode_queue). wire = the bytes that are left when the first
token is there (the last chunk's) over the rate of the same path alone, many such transfers in
flight (tandem-bench xfer, in the same round). alone = one such transfer by itself, from op_start to
its event: what the engine needs for them with an idle caller.

Three real daemons on loopback, one compute thread each, one request at a time, distinct prompts.
In each round every path and every type of KV has its turn. rdma goes over the provider in memory
(TANDEM_VERBS_FAKE),
whose copies say nothing about a network."""
import argparse
import csv
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests",
                                "cluster"))
from harness import BIN, POCKET, ROOT, Cluster  # noqa: E402

STEP_TOKENS, BLOCK_TOKENS, WARM_UP = 512, 16, 5


def percentile(values, p):
    values = sorted(values)
    return values[min(len(values) - 1, int(p / 100 * len(values)))]


def bench_xfer(path, n_bytes, block_bytes, depth, env, out):
    """Rate in GB/s and one transfer's time in us."""
    at = os.path.join(out, "xfer.csv")
    args = [
        os.path.join(BIN, "tandem-bench"), "xfer", "--path", path, "--sizes",
        str(n_bytes), "--block-bytes",
        str(block_bytes), "--depth",
        str(depth), "--streams", "4" if path == "tcp" and depth > 1 else "1", "--repeats", "9",
        "--floors=false", "--footprint", "64MiB", "--csv", at
    ]
    if path == "rdma":
        args += ["--device", "fake0", "--peer-device", "fake0"]
    subprocess.run(args, env={**os.environ, **env}, check=True, stdout=subprocess.DEVNULL,
                   stderr=subprocess.DEVNULL, timeout=300)
    with open(at, newline="", encoding="utf-8") as f:
        row = list(csv.DictReader(f))[-1]
    os.unlink(at)
    return float(row["gb_s_median"]), float(row["latency_us_p50"])


def one_round(g, path, kv_dtype, rng, out, rows):
    """Adds to rows[path, kv_dtype, prompt]: lists of us, one value a request, and of the round's
    wire times."""
    fabric = f"/dev/shm/tandem-handover-{os.getpid()}"
    env = {"TANDEM_VERBS_FAKE": f"path={fabric}"} if path == "rdma" else {}
    try:
        with Cluster(
                dtype="bf16", model=g.model, kv_memory="64MiB", worker_timeout_ms=10000,
                envs={"prefill-0": env, "decode-0": env}, worker_args=[
                    "--transfer", path, "--max-step-tokens", STEP_TOKENS, "--block-size",
                    BLOCK_TOKENS, "--kv-dtype", kv_dtype
                ]) as c:
            for prompt in g.prompts:
                r = rows.setdefault(
                    (path, kv_dtype, prompt), {
                        name: [] for name in ("handover", "exposed", "queue", "transfer",
                                              "of_round", "wire", "alone", "left", "ttft", "tpot")
                    })
                handovers = []
                for i in range(g.requests + WARM_UP):
                    ids = [rng.randrange(3, 1000)
                           for _ in range(prompt)]  # distinct: no prefix hits
                    a = c.generate(ids=ids, max_tokens=g.output, temperature=0, ignore_eos=True)
                    assert a.code.value[
                        0] == 0 and a.ledger.transfer_path == path and a.ledger.failovers == 0, (
                            a.details, a.ledger)
                    if i < WARM_UP:
                        continue
                    led = a.ledger
                    handovers.append(led.transfer_exposed_us + led.decode_queue_us)
                    r["exposed"].append(led.transfer_exposed_us)
                    r["queue"].append(led.decode_queue_us)
                    r["transfer"].append(led.transfer_us)
                    r["ttft"].append(led.ttft_us)
                    r["tpot"].append((led.e2e_us - led.ttft_us) / (g.output - 1))
                n_blocks = -(-prompt // BLOCK_TOKENS)
                assert led.transfer_bytes % n_blocks == 0
                block_bytes = led.transfer_bytes // n_blocks
                left = n_blocks - (prompt - 1) // STEP_TOKENS * STEP_TOKENS // BLOCK_TOKENS
                r["bytes"], r["left_bytes"], r[
                    "block_bytes"] = led.transfer_bytes, left * block_bytes, block_bytes
                r["handover"] += handovers
                r["of_round"].append(statistics.median(handovers))
        for prompt in g.prompts:
            r = rows[path, kv_dtype, prompt]
            rate, _ = bench_xfer(path, r["left_bytes"], r["block_bytes"], 16, env, out)
            _, alone = bench_xfer(path, r["left_bytes"], r["block_bytes"], 1, env, out)
            wire = r["left_bytes"] / rate / 1e3
            r["wire"].append(wire)
            r["alone"].append(alone)
            r["left"] += [h - wire for h in r["handover"][-g.requests:]]
    finally:
        if os.path.exists(fabric):
            os.unlink(fabric)


def main():
    a = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--model", default=POCKET)
    a.add_argument("--paths", default="shm,tcp,rdma", type=lambda s: s.split(","))
    a.add_argument("--prompts", default="200,1900", type=lambda s: [int(n) for n in s.split(",")])
    a.add_argument("--kv-dtypes", default="auto", type=lambda s: s.split(","))
    a.add_argument("--output", type=int, default=8, help="tokens of each answer, 2 or more")
    a.add_argument("--rounds", type=int, default=9)
    a.add_argument("--requests", type=int, default=25, help="of each prompt length, path and round")
    a.add_argument("--machine", default="")
    a.add_argument("--csv", help="append a row per path and prompt length")
    g = a.parse_args()
    rng, rows = random.Random(1), {}
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as out:
        for _ in range(g.rounds):
            for path in g.paths:
                for kv_dtype in g.kv_dtypes:
                    one_round(g, path, kv_dtype, rng, out, rows)
    commit = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty"],
                            capture_output=True, text=True, check=False).stdout.strip()
    print(f"{os.path.basename(os.path.abspath(g.model))} bf16, {g.rounds} rounds of {g.requests}, "
          f"load {load:.1f} .. {os.getloadavg()[0]:.1f}, "
          f"commit {commit}; us")
    print(f"{'path':5} {'KV':5} {'prompt':>6} {'KiB':>6} {'left':>6} {'handover p50 (rounds)':>24} "
          f"{'p99':>7} {'exposed':>8} {'queue':>6} {'transfer':>8} {'wire':>6} "
          f"{'alone':>6} {'minus wire p50':>14} {'p99':>7} "
          f"{'TTFT ms':>8} {'TPOT ms':>8}")
    new = g.csv and not os.path.exists(g.csv)
    with open(g.csv or os.devnull, "a", newline="", encoding="utf-8") as f:
        w = csv.writer(f)
        if new:
            w.writerow([
                "commit", "machine", "kernel", "load_before", "load_after", "model", "dtype",
                "path", "prompt_tokens", "rounds", "requests", "bytes", "bytes_left_at_first_token",
                "handover_us_p50", "handover_us_p99", "handover_us_p50_least_round",
                "handover_us_p50_greatest_round", "exposed_us_p50", "decode_queue_us_p50",
                "transfer_us_p50", "wire_us_median", "wire_us_least", "wire_us_greatest",
                "alone_us_median", "handover_minus_wire_us_p50", "handover_minus_wire_us_p99",
                "command", "kv_dtype", "ttft_us_p50", "tpot_us_p50"
            ])
        for (path, kv_dtype, prompt), r in rows.items():
            med = statistics.median
            span = f"{med(r['handover']):.0f} ({min(r['of_round']):.0f}..{max(r['of_round']):.0f})"
            print(f"{path:5} {kv_dtype:5} {prompt:6} "
                  f"{r['bytes'] / 1024:6.0f} {r['left_bytes'] / 1024:6.0f} "
                  f"{span:>24} {percentile(r['handover'], 99):7.0f} "
                  f"{med(r['exposed']):8.0f} {med(r['queue']):6.0f} {med(r['transfer']):8.0f} "
                  f"{med(r['wire']):6.0f} {med(r['alone']):6.0f} "
                  f"{med(r['left']):14.0f} {percentile(r['left'], 99):7.0f} "
                  f"{med(r['ttft']) / 1e3:8.1f} {med(r['tpot']) / 1e3:8.2f}")
            w.writerow([
                commit, g.machine,
                platform.release(), f"{load:.2f}", f"{os.getloadavg()[0]:.2f}",
                os.path.basename(os.path.abspath(g.model)), "bf16", path, prompt, g.rounds,
                len(r["handover"]), r["bytes"], r["left_bytes"],
                *(f"{x:.0f}"
                  for x in (med(r["handover"]), percentile(r["handover"], 99), min(r["of_round"]),
                            max(r["of_round"]), med(r["exposed"]), med(r["queue"]),
                            med(r["transfer"]), med(r["wire"]), min(r["wire"]), max(r["wire"]),
                            med(r["alone"]), med(r["left"]), percentile(r["left"], 99))), " ".join(
                                ["bench/handover.py", *sys.argv[1:]]), kv_dtype,
                f"{med(r['ttft']):.0f}", f"{med(r['tpot']):.0f}"
            ])


if __name__ == "__main__":
    main()
