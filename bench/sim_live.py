#!/usr/bin/env python3
"""Simulated and live attainment at the same points, side by side: how far the simulator can be
believed on this machine, and where disaggregation wins.

  bench/sim_live.py --tandem build/release/bin/tandem --out sim_live.csv       about 7 minutes;
      --minutes for longer runs; --brief: one

1. `tandem bench calibrate` measures steps and link, once alone and once with a second calibration
   beside it (two workers of one machine share caches and memory, and perhaps a core): the simulator
   runs with both tables, and the truth should lie between.
2. Two objective pairs, made from the calibrated times (P: one prompt's prefill, D(B): a decode step
   of B sequences):
     stall   64 tokens out; TPOT half way between D(2) and D(1) with one foreign prompt in its
             steps; TTFT of 6 P: disaggregation should win
     rush    16 tokens out; TPOT that four foreign prompts do not break; TTFT of 2.5 P: colocated
             has twice the prefill capacity and should win
   The simulator finds the highest rate of each mode with them, and the rates to run: between the
   loser's and the winner's, and just below the winner's.
3. `tandem bench sweep` runs pd 1:1, colocated 0:2 and hybrid 1:1 (one thread a worker: the same
   binary, model and number of threads) at each rate and seed and records when each request was to
   be sent; `tandem sim --trace` gets just these requests, the same objectives and the table.

The model has random weights and no more to it than that a decode step is the reading of its
weights, a millisecond or so: what the router and the client, which the simulator leaves out, spend
on a token on the same processors is then little beside it. The router is not told the objectives
(--send-slo tells it): told, it holds prompts back until a decode worker can bear them, by a margin
that it learns so that just the attainment asked for is met, whatever the rate: then colocated's
attainment is near that at every rate, and which side of it depends on what was learned in earlier
runs.

Nothing else should run meanwhile. Prints a table and what it says; CSV has a row for each pair,
mode and rate. Exit status 0: measured, whatever it says."""
import argparse
import csv
import json
import math
import os
import subprocess
import sys
import tempfile
import time

MODES = ("pd", "colocated", "hybrid")
KV_MEMORY = 64 << 20
MAX_STEP_TOKENS = 512
LEAST_REQUESTS, MOST_REQUESTS = 80, 240
Z = 1.959964


def wilson(good, n):
    if n == 0:
        return 0.0, 1.0
    p, d = good / n, 1 + Z * Z / n
    c, h = (p + Z * Z / (2 * n)) / d, Z * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n)) / d
    return max(0.0, c - h), min(1.0, c + h)


def say(text):
    print(f"[{time.strftime('%H:%M:%S')}, load {os.getloadavg()[0]:.1f}] {text}", flush=True)


def run(argv):
    p = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=False)
    if p.returncode:
        sys.exit(f"{' '.join(argv)}: exit status {p.returncode}\n{(p.stdout or '')[-2000:]}")
    return p.stdout


def read_table(path):
    with open(path, encoding="utf-8") as f:
        line = next(x for x in f if x.startswith("node_class=decode"))
    return {k: float(v) for k, v in (w.split("=") for w in line.split()[1:])}


def calibrate(a, folder):
    """Two tables: with the machine to itself, and beside another calibration."""
    tables = {}
    for name, n in (("alone", 1), ("beside", 2)):
        paths = [os.path.join(folder, f"{name}{i}.table") for i in range(n)]
        argv = [[
            a.tandem, "bench", "calibrate", "--random-weights", a.shape, "--dtype", "bf16",
            "--kv-memory",
            str(KV_MEMORY), "--threads", "1", "--repeat", "3" if a.brief else "7", "--link", "auto",
            "--prefill-grid", "64,256,512", "--context-grid", "0,512", "--batch-grid", "1,2,4,8",
            "--out", p
        ] for p in paths]
        children = [
            subprocess.Popen(x, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for x in argv
        ]
        if any([c.wait() for c in children]):
            sys.exit("calibration failed: " + " ".join(argv[0]))
        tables[name] = dict(read_table(paths[0]), path=paths[0])
    return tables


def prefill_s(t, n, chunk=MAX_STEP_TOKENS):
    return sum(t["a0"] + t["a1"] * u + t["a2"] * u * (h + u / 2) for h in range(0, n, chunk)
               for u in [min(chunk, n - h)])


def step_s(t, n_seqs, context):
    return t["b0"] + n_seqs * (t["b1"] + t["b2"] * context)


def pairs_of(t):
    """Objectives from calibrated times, in ms."""
    isl, p = 512, prefill_s(t, 512)
    stall, rush = ({"name": name, "isl": isl, "osl": osl, "ttft": round(k * p * 1e3, 1)}
                   for name, osl, k in (("stall", 64, 6.0), ("rush", 16, 2.5)))
    stall["tpot"] = round(
        1e3 * math.sqrt(step_s(t, 2, isl + 32) * (step_s(t, 1, isl + 32) + p / 63)), 3)
    rush["tpot"] = round(1e3 * (1.5 * step_s(t, 2, isl + 8) + 4 * p / 15), 3)
    return stall, rush


def sim_argv(a, pair, mode, table, rpc_us):
    return [
        a.tandem, "sim", "--mode", mode, "--prefill", "0" if mode == "colocated" else "1",
        "--decode", "2" if mode == "colocated" else "1", "--latency", table["path"] + ":decode",
        "--kv-tokens",
        str(int(KV_MEMORY / table["kv_bytes"])), "--kv-bytes",
        str(table["kv_bytes"]), "--nic-gbs", f"{table['link_bytes_per_s'] / 1e9:.6g}",
        "--link-tau-us", f"{table['link_tau'] * 1e6:.6g}", "--rpc-us", f"{rpc_us:.1f}",
        "--max-step-tokens",
        str(MAX_STEP_TOKENS), "--max-batch", "64", "--max-seqs", "256", "--duration", "0",
        "--warmup", "0", "--ttft", f"{pair['ttft']:g}", "--tpot", f"{pair['tpot']:g}",
        "--tell-priors=false", "--prefix-cache=false", "--quiet"
    ] + ([] if a.send_slo else ["--send-slo=false"])


def knee(passes, low, high, turns=7):
    """The highest rate that passes, within (high / low) ** (1 / 2 ** turns); 0 when not even
    `low` does."""
    if not passes(low):
        return 0.0
    for _ in range(turns):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if passes(middle) else (low, middle)
    return low


def knees(a, pair, table, folder):
    out = os.path.join(folder, "knee.json")

    def passes(mode, rate):
        run(
            sim_argv(a, pair, mode, table, 300) + [
                "--arrival", "poisson", "--rate", f"{rate:g}", "--isl",
                str(pair["isl"]), "--osl",
                str(pair["osl"]), "--requests", "500", "--seeds", "2", "--json", out
            ])
        with open(out, encoding="utf-8") as f:
            runs = json.load(f)["runs"]
        return sum(r["good"] for r in runs) >= 0.9 * sum(r["n"] for r in runs)

    p = prefill_s(table, pair["isl"])
    return {mode: knee(lambda rate, m=mode: passes(m, rate), 0.05 / p, 3 / p) for mode in MODES}


def rates_of(knee_of):
    """Where pd and colocated should differ, and where the better of the two is still good."""
    low, high = sorted((knee_of["pd"], knee_of["colocated"]))
    if high <= 0:
        return []
    return [round(math.sqrt(max(low, 0.2 * high) * high), 2), round(0.85 * high, 2)]


def requests_of(pairs, minutes, seeds):
    """Requests of a run so that all live runs take so long."""
    per_request = sum(seeds * len(MODES) / r for p in pairs for r in p["rates"])
    return max(LEAST_REQUESTS, min(MOST_REQUESTS, int(
        minutes * 60 / per_request))) if per_request else LEAST_REQUESTS


def live(a, pair, folder):
    d = os.path.join(folder, pair["name"])
    text = run([
        a.tandem, "bench", "sweep", "--cluster-model", a.model, "--modes", ",".join(
            MODES), "--pd", "1:1", "--threads", "1",
        f"--up-args=--kv-memory {KV_MEMORY} --dtype bf16 --random-weights {a.shape}", "--rates",
        ",".join(f"{r:g}" for r in pair["rates"]), "--seeds",
        str(a.seeds), "--num-prompts",
        str(a.requests), "--isl",
        str(pair["isl"]), "--osl",
        str(pair["osl"]), "--ignore-eos", "--goodput", f"ttft:{pair['ttft']:g}",
        f"tpot:{pair['tpot']:g}", "--warmup", "0", "--num-warmups", "8", "--max-sched-lag-ms",
        "1000", "--save-requests", "--result-dir", d
    ] + ([] if a.send_slo else ["--no-send-slo"]) + ([] if a.keep else ["--no-plots"]))
    with open(os.path.join(d, "sweep.csv"), encoding="utf-8", newline="") as f:
        rows = list(csv.DictReader(f))
    for r in rows:
        r["traces"] = d
    return rows, text


def simulate(a, pair, mode, rate, k, rows_dir, table, rpc_us):
    """The very requests of that live run."""
    name = f"{mode} 0:2" if mode == "colocated" else f"{mode} 1:1"
    trace = os.path.join(rows_dir, f"requests-{name}-{rate:g}-{k}.csv".replace(" ", "-").replace(
        ":", "-"))
    out = os.path.join(rows_dir, "sim.json")
    run(
        sim_argv(a, pair, mode, table, rpc_us) +
        ["--trace", trace, "--arrival", "trace", "--json", out])
    with open(out, encoding="utf-8") as f:
        return json.load(f)["runs"][0]


def rpc_us(rows):
    """One way of a control message, from the ledger of the quietest disaggregated run: reserving
    takes two, prefill and its first token two more."""
    r = min((r for r in rows if r["mode"] == "pd"), key=lambda r: float(r["rate"]))
    return max(20.0, 1e3 * (float(r["stage_reserve_ms"]) + float(r["stage_rpc_ms"])) / 4)


def compare(a, pair, rows, tables):
    out, rpc = [], rpc_us(rows)
    for mode in MODES:
        for rate in pair["rates"]:
            mine = [r for r in rows if r["mode"] == mode and abs(float(r["rate"]) - rate) < 1e-6]
            mine = list({r["seed"]: r for r in mine}.values())  # a repeated run counts once
            if not mine:
                continue
            good, n = sum(int(float(r["n_good"])) for r in mine), sum(
                int(float(r["n"])) for r in mine)
            row = {
                "pair": pair["name"], "mode": mode, "rate": rate, "isl": pair["isl"],
                "osl": pair["osl"], "slo_ttft_ms": pair["ttft"], "slo_tpot_ms": pair["tpot"],
                "send_slo": int(
                    a.send_slo), "runs": len(mine), "n": n, "live": good / n, "live_lo": wilson(
                        good, n)[0], "live_hi": wilson(good, n)[1], "live_valid": int(
                            all(float(r["valid"]) > 0 for r in mine)), "live_load1": max(
                                float(r["load1"]) for r in mine), "rpc_us": round(rpc, 1)
            }
            for x in ("ttft", "tpot"):
                for q in ("p50", "p90"):
                    row[f"live_{x}_{q}_ms"] = sum(float(r[f"{x}_{q}_ms"] or "nan")
                                                  for r in mine) / len(mine)
            for name, table in tables.items():
                sims = [
                    simulate(a, pair, mode, rate, k, mine[0]["traces"], table, rpc)
                    for k in range(len(mine))
                ]
                g, m = sum(s["good"] for s in sims), sum(s["n"] for s in sims)
                row[f"sim_{name}"] = g / m
                row[f"sim_{name}_lo"], row[f"sim_{name}_hi"] = wilson(g, m)
                for x in ("ttft", "tpot"):
                    for q in ("p50", "p90"):
                        row[f"sim_{name}_{x}_{q}_ms"] = sum(s[f"{q}_{x}_ms"]
                                                            for s in sims) / len(sims)
            lo, hi = min(row["sim_alone_lo"], row["sim_beside_lo"]), max(
                row["sim_alone_hi"], row["sim_beside_hi"])
            row["agree"] = int(row["live_lo"] <= hi and lo <= row["live_hi"])
            out.append(row)
    return out


def verdict(pair, rows):
    """Who met 90 % up to which rate of the grid, measured and simulated; and at which rates pd
    and colocated differ by more than both intervals."""
    lines = []
    for what in ("live", "sim_alone", "sim_beside"):
        best_of = {}
        for mode in MODES:
            ok = [r["rate"] for r in rows if r["mode"] == mode and r[what] >= 0.9]
            best_of[mode] = max(ok) if ok else 0
        best = max(best_of.values())
        winners = [m for m in MODES if best_of[m] == best]
        lines.append(f"  {what:10} highest rate at >= 90 %: " + ", ".join(f"{m} {best_of[m]:g}/s"
                                                                          for m in MODES) +
                     f"; first: {' = '.join(winners) if best else 'none'}")
    for rate in sorted({r["rate"] for r in rows}):
        at = {r["mode"]: r for r in rows if r["rate"] == rate}
        if "pd" not in at or "colocated" not in at:
            continue
        p, c = at["pd"], at["colocated"]
        who = "pd ahead, beyond both intervals" if p["live_lo"] > c[
            "live_hi"] else "colocated ahead, beyond both intervals" if c["live_lo"] > p[
                "live_hi"] else "not told apart"
        lines.append(f"  live, at {rate:g}/s: pd {100 * p['live']:.1f} % "
                     f"({100 * p['live_lo']:.1f}..{100 * p['live_hi']:.1f}), colocated "
                     f"{100 * c['live']:.1f} % "
                     f"({100 * c['live_lo']:.1f}..{100 * c['live_hi']:.1f}): {who}")
    n = sum(r["agree"] for r in rows)
    return f"{pair['name']}: {n} of {len(rows)} points agree within the intervals\n" + "\n".join(
        lines)


def show(rows):
    head = (f"{'pair':6} {'mode':10} {'rate':>6} {'n':>4}  {'live':>6} {'95 % interval':15} "
            f"{'simulated alone':23} {'beside':23} {'TTFT p90 live/sim':>20} "
            f"{'TPOT p90 live/sim':>20}")
    print(head + "\n" + "-" * len(head))
    for r in rows:
        cell = {
            k: f"{r[f'{k}'] * 100:6.1f} ({r[f'{k}_lo'] * 100:5.1f}..{r[f'{k}_hi'] * 100:5.1f})"
            for k in ("live", "sim_alone", "sim_beside")
        }
        print(
            f"{r['pair']:6} {r['mode']:10} {r['rate']:6g} {r['n']:4}  {cell['live']:22} "
            f"{cell['sim_alone']:23} {cell['sim_beside']:23} "
            f"{r['live_ttft_p90_ms']:9.1f} /{r['sim_alone_ttft_p90_ms']:9.1f} "
            f"{r['live_tpot_p90_ms']:9.3f} /{r['sim_alone_tpot_p90_ms']:9.3f}"
            f"{'' if r['agree'] else '  <> differs'}{'' if r['live_valid'] else '  generator late'}"
        )


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    p.add_argument("--tandem", default="build/release/bin/tandem")
    p.add_argument("--model", default="models/pocket", help="whose tokenizer the router has")
    p.add_argument(
        "--shape", default="bench/configs/llama-15m.json", help=
        "config.json of the model that is run, with random weights and the tokenizer's vocabulary")
    p.add_argument("--out", default="sim_live.csv")
    p.add_argument(
        "--keep", default="",
        help="folder for tables, logs, traces and the sweeps' reports; default: a temporary one")
    p.add_argument("--seeds", type=int, default=1, help="runs of each point")
    p.add_argument("--minutes", type=float, default=5,
                   help="all live runs together; at least 80 requests a run")
    p.add_argument("--requests", type=int, default=0, help="of one run, in place of --minutes")
    p.add_argument("--send-slo", action="store_true", help="tell the router the objectives")
    p.add_argument("--brief", action="store_true",
                   help="one rate a pair, one run, 20 requests: does it work")
    a = p.parse_args()
    a.shape = os.path.abspath(a.shape)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = a.keep or temporary
        os.makedirs(folder, exist_ok=True)
        say("calibrating, alone and beside another")
        tables = calibrate(a, folder)
        for name, t in tables.items():
            say(f"{name}: prefill of 512 tokens {prefill_s(t, 512) * 1e3:.1f} ms, decode step "
                f"of one and of four {step_s(t, 1, 544) * 1e3:.3f} and "
                f"{step_s(t, 4, 544) * 1e3:.3f} ms, link {t['link_bytes_per_s'] / 1e9:.2f} GB/s "
                f"+ {t['link_tau'] * 1e6:.0f} us")
        pairs = pairs_of(tables["beside"])
        for q in pairs:
            q["knees"] = knees(a, q, tables["beside"], folder)
            q["rates"] = rates_of(q["knees"])[:1 if a.brief else None]
            say(f"{q['name']}: {q['isl']} in, {q['osl']} out, TTFT {q['ttft']:g} ms, TPOT "
                f"{q['tpot']:g} ms; 90 % are simulated up to " +
                ", ".join(f"{m} {k:.2f}/s" for m, k in q["knees"].items()) + "; to be run: " +
                ", ".join(f"{r:g}/s" for r in q["rates"]))
            if not q["rates"]:
                sys.exit(f"{q['name']}: neither pd nor colocated meets the objectives at any rate")
        if a.brief:
            a.seeds = 1
        a.requests = a.requests or (20 if a.brief else requests_of(pairs, a.minutes, a.seeds))
        s = sum(a.seeds * len(MODES) * (a.requests / r + 3) for q in pairs for r in q["rates"]) + 30
        say(f"live runs of {a.requests} requests: about {s / 60:.0f} minutes")
        rows, reports = [], []
        for q in pairs:
            lines, text = live(a, q, folder)
            rows += compare(a, q, lines, tables)
            reports.append("--- report of the sweep, "
                           f"{q['name']}\n{text[max(0, text.find('configuration')):].rstrip()}")
        say(f"done after {(time.monotonic() - start) / 60:.1f} minutes")
    print("\n".join(reports))
    show(rows)
    for q in pairs:
        print(verdict(q, [r for r in rows if r["pair"] == q["name"]]))
    with open(a.out, "w", encoding="utf-8", newline="") as f:
        w = csv.DictWriter(f, fieldnames=list(rows[0]))
        w.writeheader()
        for r in rows:
            w.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in r.items()})
    print(f"rows: {a.out}")


if __name__ == "__main__":
    main()
