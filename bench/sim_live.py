#!/usr/bin/env python3
"""Simulated and live attainment at the same points, side by side: how far the simulator can be believed on this machine, and where disaggregation wins.

  bench/sim_live.py --tandem build/release/bin/tandem --model models/pocket --out sim_live.csv       about 15 minutes; --brief: one

1. `tandem bench calibrate` measures steps and link, once alone and once with a second calibration beside it (two workers of one machine share caches and
   memory, and perhaps a core): the simulator runs with both tables, and the truth should lie between.
2. Two objective pairs, made from the calibrated times so that the knee lies in the grid on any machine:
     stall   long prompts and a TPOT that the stall by one foreign prompt breaks, a TTFT of six prefills: disaggregation should win
     rush    short outputs and a TPOT that four stalls do not break, a TTFT of 2.5 prefills: colocated has twice the prefill capacity and should win
3. `tandem bench sweep` runs pd 1:1, colocated 0:2 and hybrid 1:1 (one thread a worker: the same binary, model and number of threads) at each rate and seed and
   records when each request was to be sent; `tandem sim --trace` gets just these requests, the same objectives and the table.

Nothing else should run meanwhile. Prints a table and what it says; CSV has a row for each pair, mode and rate. Exit status 0: measured, whatever it says."""
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
Z = 1.959964


def wilson(good, n):
    if n == 0:
        return 0.0, 1.0
    p, d = good / n, 1 + Z * Z / n
    c, h = (p + Z * Z / (2 * n)) / d, Z * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n)) / d
    return max(0.0, c - h), min(1.0, c + h)


def say(text):
    print(f"[{time.strftime('%H:%M:%S')}, load {os.getloadavg()[0]:.1f}] {text}", flush=True)


def run(argv, quiet=True):
    p = subprocess.run(argv, stdout=subprocess.PIPE if quiet else None, text=True, check=False)
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
        argv = [[a.tandem, "bench", "calibrate", "--model", a.model, "--kv-memory", str(KV_MEMORY), "--threads", "1", "--repeat", "3" if a.brief else "7", "--link",
                 "auto", "--prefill-grid", "64,256,512", "--context-grid", "0,512,1024", "--batch-grid", "1,2,4,8,16", "--out", p] for p in paths]
        children = [subprocess.Popen(x, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for x in argv]
        if any([c.wait() for c in children]):
            sys.exit("calibration failed: " + " ".join(argv[0]))
        tables[name] = dict(read_table(paths[0]), path=paths[0])
    return tables


def prefill_s(t, n, chunk=512):
    return sum(t["a0"] + t["a1"] * u + t["a2"] * u * (h + u / 2) for h in range(0, n, chunk) for u in [min(chunk, n - h)])


def pairs_of(t, brief):
    """Objectives and rates from calibrated times."""
    isl, out = 1024, []
    p = prefill_s(t, isl)
    for name, osl, ttft, stalls, shares in (("stall", 128, 6.0, 0.5, (0.25, 0.45, 0.7, 0.95)), ("rush", 16, 2.5, 4.0, (0.4, 0.7, 1.0, 1.4))):
        step = t["b0"] + 2 * t["b1"] + 2 * t["b2"] * (isl + osl)
        tpot = 1.5 * step + stalls * p / (osl - 1)
        out.append({"name": name, "isl": isl, "osl": osl, "ttft": round(ttft * p * 1e3, 1), "tpot": round(tpot * 1e3, 3),
                    "rates": [round(s / p, 2) for s in (shares[1:2] if brief else shares)]})
    return out


def live(a, pair, folder):
    d = os.path.join(folder, pair["name"])
    argv = [a.tandem, "bench", "sweep", "--cluster-model", a.model, "--modes", ",".join(MODES), "--pd", "1:1", "--threads", "1", f"--up-args=--kv-memory {KV_MEMORY}",
            "--rates", ",".join(f"{r:g}" for r in pair["rates"]), "--seeds", str(a.seeds), "--num-prompts", str(a.requests), "--isl", str(pair["isl"]), "--osl",
            str(pair["osl"]), "--ignore-eos", "--goodput", f"ttft:{pair['ttft']:g}", f"tpot:{pair['tpot']:g}", "--warmup", "0", "--num-warmups", "20",
            "--max-sched-lag-ms", "1000", "--save-requests", "--no-plots", "--result-dir", d] + (["--no-send-slo"] if a.no_send_slo else [])
    run(argv)
    with open(os.path.join(d, "sweep.csv"), encoding="utf-8", newline="") as f:
        rows = list(csv.DictReader(f))
    for r in rows:
        r["traces"] = d
    return rows


def simulate(a, pair, mode, rate, k, rows_dir, table, rpc_us):
    """The very requests of that live run."""
    name = f"{mode} 0:2" if mode == "colocated" else f"{mode} 1:1"
    trace = os.path.join(rows_dir, f"requests-{name}-{rate:g}-{k}.csv".replace(" ", "-").replace(":", "-"))
    out = os.path.join(rows_dir, "sim.json")
    run([a.tandem, "sim", "--mode", mode, "--prefill", "0" if mode == "colocated" else "1", "--decode", "2" if mode == "colocated" else "1", "--latency",
         table["path"] + ":decode", "--kv-tokens", str(int(KV_MEMORY / table["kv_bytes"])), "--kv-bytes", str(table["kv_bytes"]), "--nic-gbs",
         f"{table['link_bytes_per_s'] / 1e9:.6g}", "--link-tau-us", f"{table['link_tau'] * 1e6:.6g}", "--rpc-us", f"{rpc_us:.1f}", "--max-step-tokens", "512", "--max-batch",
         "64", "--max-seqs", "256", "--trace", trace, "--arrival", "trace", "--duration", "0", "--warmup", "0", "--ttft", f"{pair['ttft']:g}", "--tpot",
         f"{pair['tpot']:g}", "--prefix-cache=false", "--quiet", "--json", out] + (["--no-send-slo"] if a.no_send_slo else []))
    with open(out, encoding="utf-8") as f:
        return json.load(f)["runs"][0]


def rpc_us(rows):
    """One way of a control message, from the ledger of the quietest disaggregated run: reserving takes two, prefill and its first token two more."""
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
            good, n = sum(int(float(r["n_good"])) for r in mine), sum(int(float(r["n"])) for r in mine)
            row = {"pair": pair["name"], "mode": mode, "rate": rate, "isl": pair["isl"], "osl": pair["osl"], "slo_ttft_ms": pair["ttft"], "slo_tpot_ms": pair["tpot"],
                   "runs": len(mine), "n": n, "live": good / n, "live_lo": wilson(good, n)[0], "live_hi": wilson(good, n)[1],
                   "live_valid": int(all(float(r["valid"]) > 0 for r in mine)), "live_load1": max(float(r["load1"]) for r in mine), "rpc_us": round(rpc, 1)}
            for x in ("ttft", "tpot"):
                for q in ("p50", "p90"):
                    row[f"live_{x}_{q}_ms"] = sum(float(r[f"{x}_{q}_ms"]) for r in mine) / len(mine)
            for name, table in tables.items():
                sims = [simulate(a, pair, mode, rate, k, mine[0]["traces"], table, rpc) for k in range(len(mine))]
                g, m = sum(s["good"] for s in sims), sum(s["n"] for s in sims)
                row[f"sim_{name}"] = g / m
                row[f"sim_{name}_lo"], row[f"sim_{name}_hi"] = wilson(g, m)
                for x in ("ttft", "tpot"):
                    for q in ("p50", "p90"):
                        row[f"sim_{name}_{x}_{q}_ms"] = sum(s[f"{q}_{x}_ms"] for s in sims) / len(sims)
            lo, hi = min(row["sim_alone_lo"], row["sim_beside_lo"]), max(row["sim_alone_hi"], row["sim_beside_hi"])
            row["agree"] = int(row["live_lo"] <= hi and lo <= row["live_hi"])
            out.append(row)
    return out


def verdict(pair, rows):
    """The highest rate of the grid that meets 90 %, for each mode: measured and simulated."""
    lines = []
    for what in ("live", "sim_alone", "sim_beside"):
        knee = {}
        for mode in MODES:
            ok = [r["rate"] for r in rows if r["mode"] == mode and r[what] >= 0.9]
            knee[mode] = max(ok) if ok else 0
        best = max(knee.values())
        winners = [m for m in MODES if knee[m] == best]
        lines.append(f"  {what:10} highest rate at >= 90 %: " + ", ".join(f"{m} {knee[m]:g}/s" for m in MODES) + f"; first: {' = '.join(winners) if best else 'none'}")
    n = sum(r["agree"] for r in rows)
    return f"{pair['name']}: {n} of {len(rows)} points agree within the intervals\n" + "\n".join(lines)


def show(rows):
    head = f"{'pair':6} {'mode':10} {'rate':>6} {'n':>4}  {'live':>6} {'95 % interval':15} {'simulated alone':23} {'beside':23} {'TTFT p90 live/sim':>20} {'TPOT p90 live/sim':>20}"
    print(head + "\n" + "-" * len(head))
    for r in rows:
        cell = {k: f"{r[f'{k}'] * 100:6.1f} ({r[f'{k}_lo'] * 100:5.1f}..{r[f'{k}_hi'] * 100:5.1f})" for k in ("live", "sim_alone", "sim_beside")}
        print(f"{r['pair']:6} {r['mode']:10} {r['rate']:6g} {r['n']:4}  {cell['live']:22} {cell['sim_alone']:23} {cell['sim_beside']:23} "
              f"{r['live_ttft_p90_ms']:9.1f} /{r['sim_alone_ttft_p90_ms']:9.1f} {r['live_tpot_p90_ms']:9.3f} /{r['sim_alone_tpot_p90_ms']:9.3f}"
              f"{'' if r['agree'] else '  <> differs'}{'' if r['live_valid'] else '  generator late'}")


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    p.add_argument("--tandem", default="build/release/bin/tandem")
    p.add_argument("--model", default="models/pocket")
    p.add_argument("--out", default="sim_live.csv")
    p.add_argument("--keep", default="", help="folder for tables, logs and traces; default: a temporary one")
    p.add_argument("--seeds", type=int, default=2, help="runs of each point")
    p.add_argument("--requests", type=int, default=120, help="of one run")
    p.add_argument("--no-send-slo", action="store_true", help="do not tell the router the objectives: it admits everything, and hybrid cannot know what a stall breaks")
    p.add_argument("--brief", action="store_true", help="one rate a pair, one run, 30 requests: does it work")
    a = p.parse_args()
    if a.brief:
        a.seeds, a.requests = 1, 30
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = a.keep or temporary
        os.makedirs(folder, exist_ok=True)
        say("calibrating, alone and beside another")
        tables = calibrate(a, folder)
        for name, t in tables.items():
            say(f"{name}: prefill of 1,024 tokens {prefill_s(t, 1024) * 1e3:.1f} ms, decode step {(t['b0'] + t['b1'] + t['b2'] * 1024) * 1e3:.3f} ms, link "
                f"{t['link_bytes_per_s'] / 1e9:.2f} GB/s + {t['link_tau'] * 1e6:.0f} us")
        pairs = pairs_of(tables["alone"], a.brief)
        s = sum(a.seeds * len(MODES) * (a.requests / r + 2) for q in pairs for r in q["rates"]) + 30
        say(f"live runs: about {s / 60:.0f} minutes")
        rows = []
        for q in pairs:
            say(f"{q['name']}: {q['isl']} in, {q['osl']} out, TTFT {q['ttft']:g} ms, TPOT {q['tpot']:g} ms, {', '.join(f'{r:g}' for r in q['rates'])} requests/s")
            rows += compare(a, q, live(a, q, folder), tables)
        say(f"done after {(time.monotonic() - start) / 60:.1f} minutes")
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
