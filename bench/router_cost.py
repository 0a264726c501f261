#!/usr/bin/python3
"""CPU time of the router: for each request, and for each streamed token, with and without a cluster
secret.

    bench/router_cost.py [--rounds 7] [--requests 800] [--concurrency 8] [--csv FILE --machine NAME]

Two clusters on loopback (models/pocket, one prefill and one decode worker each), one with
--cluster-secret-file; rounds are taken in turn, so that both meet the same foreign load. A round
sends the requests twice through `tandem bench serve`: with 2 output tokens each (the first from
prefill, the second from decode: every leg is called), then a quarter as many with 66. CPU time
is that of the router's whole process, gRPC's threads included, less what it takes idle. A token
costs the difference of both, a request what is left without its tokens."""
import argparse
import csv
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests",
                                "cluster"))
from harness import BIN, POCKET, ROOT, Cluster  # noqa: E402

SHORT, LONG = 2, 66  # output tokens
IDLE_S = 2.0


def cpu_s(pid):
    return time.clock_gettime(
        (~pid << 3) | 2)  # the process's clock, as clock_getcpuclockid(3) makes it: nanoseconds


def idle_rate(c):
    begin = cpu_s(c.router.pid)
    time.sleep(IDLE_S)
    return (cpu_s(c.router.pid) - begin) / IDLE_S


def send(c, n, output_len, concurrency, rate):
    """Seconds of the router's CPU for each of n requests, and how many ended well in a second."""
    with tempfile.TemporaryDirectory() as d:
        begin, at = cpu_s(c.router.pid), time.monotonic()
        subprocess.run([
            os.path.join(BIN, "tandem"), "bench", "serve", "--server", f"127.0.0.1:{c.port}",
            "--dataset-name", "random", "--input-len", "16", "--output-len",
            str(output_len), "--ignore-eos", "--num-prompts",
            str(n), "--request-rate", "inf", "--max-concurrency",
            str(concurrency)
        ], check=True, cwd=d, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=300)
        wall = time.monotonic() - at
        used = cpu_s(c.router.pid) - begin - rate * wall
    return used / n, n / wall


def main():
    a = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--rounds", type=int, default=7)
    a.add_argument("--requests", type=int, default=800)
    a.add_argument("--concurrency", type=int, default=8)
    a.add_argument("--csv", help="append a row for each cluster")
    a.add_argument("--machine", default="unnamed")
    a.add_argument("--what", default="", help="said in the row: which build this is")
    g = a.parse_args()
    rows = {"no secret": [], "secret": []}
    with tempfile.TemporaryDirectory() as d:
        secret = os.path.join(d, "secret")
        with open(os.open(secret, os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="ascii") as f:
            f.write(secrets.token_hex(32) + "\n")
        member = ["--cluster-secret-file", secret]
        with Cluster(model=POCKET) as plain, Cluster(model=POCKET, router_args=member,
                                                     worker_args=member) as proved:
            for i in range(g.rounds + 1):
                for name, c in (("no secret", plain), ("secret", proved)):
                    rate = idle_rate(c)
                    short, per_s = send(c, g.requests, SHORT, g.concurrency, rate)
                    long, _ = send(c, max(g.requests // 4, 1), LONG, g.concurrency, rate)
                    token = (long - short) / (LONG - SHORT)
                    if i:  # the first round warms up connections and pages
                        rows[name].append(((short - SHORT * token) * 1e6, token * 1e6, per_s))
    load = os.getloadavg()[0]
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"],
                            capture_output=True, text=True, check=False).stdout.strip()
    out = []
    for name, values in rows.items():
        request, token, per_s = (sorted(v) for v in zip(*values))
        out.append([
            g.machine, commit, f"{load:.2f}", g.what, name,
            *(f"{x:.1f}" for x in (statistics.median(request), request[0], request[-1])),
            *(f"{x:.2f}" for x in (statistics.median(token), token[0], token[-1])),
            f"{statistics.median(per_s):.0f}", g.rounds, g.requests, g.concurrency
        ])
        print(f"{name:10} {out[-1][5]} us a request ({out[-1][6]}..{out[-1][7]}), {out[-1][8]} us "
              f"a token ({out[-1][9]}..{out[-1][10]}), "
              f"{out[-1][11]} requests/s of {SHORT} tokens, load {load:.1f}")
    if g.csv:
        new = not os.path.exists(g.csv)
        with open(g.csv, "a", newline="", encoding="utf-8") as f:
            w = csv.writer(f, lineterminator="\n")
            if new:
                w.writerow([
                    "machine", "commit", "load", "what", "identity", "request_us",
                    "request_us_least", "request_us_greatest", "token_us", "token_us_least",
                    "token_us_greatest", "requests_per_s", "rounds", "requests", "concurrency"
                ])
            w.writerows(out)


if __name__ == "__main__":
    main()
