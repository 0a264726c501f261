#!/usr/bin/python3
"""CPU time and added latency of router processes, side by side in one run, each in front of a mock
that answers without a model: tandem-router, and those of other projects that are found in a
virtual environment.

    python3 -m venv /tmp/peers && /tmp/peers/bin/pip install sglang-router smg vllm-router
    bench/router_peers.py --venv /tmp/peers [--rounds 5] [--csv FILE --machine NAME]

tandem-router has `tandem-bench mock-worker` behind it (a decode worker: it tokenises, places and
detokenises), the others `tandem-bench http-mock` (an OpenAI server: they pass text on).
`tandem-bench http-load` is the client of all. Rounds are taken in turn, so that all meet the same
foreign load; of each figure the median, the least and the greatest are told.

  json     one request after the other, 2 tokens at once, one connection: latency. `direct` is the
           OpenAI mock without a router, and `worker` the decode worker without one (`tandem-bench
           worker-load`): what a router adds (added_*) is above what is behind it, in each round
  json16   the same on 16 connections: CPU us a request
  stream   32 streams of 64 tokens 2 ms apart: CPU us a request; a token: less a json16 one, by 64
  many     2,000 streams of 50 tokens a second, for some seconds: CPU us a second of the clock
  --pair BIN  two builds of tandem-router instead, this one and that of the folder BIN: runs of 120
           requests, one after the other, in turn (--connections and --requests: others). Foreign
           load is in all of them: compare the quantiles of their p50s and CPU times, and how often
           a thread of the router went to sleep
CPU time is that of the router's process and its children, all threads, less what it takes idle."""
import argparse
import csv
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BIN = os.environ.get("TANDEM_BIN", os.path.join(ROOT, "build", "release", "bin"))
MODEL = os.path.join(ROOT, "models", "pocket")
BENCH = os.path.join(BIN, "tandem-bench")
START_S, RUN_S = 60, 120
PROMPT = "Once upon a time there was a small fox"


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def cpu_s(pid):
    """Of the process and its descendants, those that ended included."""
    def ticks(p):
        with open(f"/proc/{p}/stat", encoding="ascii", errors="replace") as f:
            fields = f.read().rpartition(")")[2].split()
        return int(fields[1]), sum(map(int, fields[11:15]))

    tree, total = {pid}, 0
    rows = {}
    for p in filter(str.isdigit, os.listdir("/proc")):
        try:
            rows[int(p)] = ticks(p)
        except (FileNotFoundError, ProcessLookupError):
            pass
    while True:
        more = {p for p, (parent, _) in rows.items() if parent in tree} - tree
        if not more:
            break
        tree |= more
    precise = time.clock_gettime((~pid << 3) | 2) if len(tree) == 1 else 0
    total = sum(rows[p][1] for p in tree if p in rows) / os.sysconf("SC_CLK_TCK")
    return precise or total


def wait_for(what, timeout=START_S):
    until = time.monotonic() + timeout
    while True:
        try:
            if what():
                return
        except OSError:
            pass
        if time.monotonic() > until:
            raise TimeoutError(what.__doc__ or "a program did not start")
        time.sleep(0.05)


def http(port, method, path, body=""):
    with socket.create_connection(("127.0.0.1", port), timeout=10) as s:
        s.sendall(f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: "
                  f"application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        data = b""
        while more := s.recv(65536):
            data += more
    return int(data.split()[1]), data


class System:
    """A router with a mock behind it. The mock's pace is fixed when it starts, so there is one for
    each."""
    def __init__(self, name, step_ms, venv, logs, *router_args, folder=BIN):
        self.name, self.processes, self.folder = name, [], folder
        try:
            self.start(name, step_ms, venv, logs, router_args)
        except BaseException:
            self.stop()
            raise

    def start(self, name, step_ms, venv, logs, router_args):
        self.port = free_port()
        self.path = "/v1/completions"
        log = open(os.path.join(logs, f"{name}-{step_ms}.log"), "wb")

        def start(*args, **kw):
            p = subprocess.Popen([str(a) for a in args], stdout=log, stderr=log, **kw)
            self.processes.append(p)
            return p

        if name.startswith("tandem"):
            grpc_port = free_port()
            program = os.path.join(self.folder, "tandem-router")
            self.router = start(program, "--model", MODEL, "--listen", f"127.0.0.1:{grpc_port}",
                                "--http-listen", f"127.0.0.1:{self.port}", "--mode", "colocated",
                                "--max-requests", 4096, "--max-queued", 4096, *router_args)
            wait_for(lambda: http(self.port, "GET", "/health")[0] == 200)
            start(BENCH, "mock-worker", "--router", f"127.0.0.1:{grpc_port}", "--step-ms", step_ms)
        else:
            mock = self.port if name == "direct" else free_port()
            self.router = start(BENCH, "http-mock", "--port", mock, "--step-ms", step_ms)
            wait_for(lambda: http(mock, "GET", "/health")[0] == 200)
            url = f"http://127.0.0.1:{mock}"
            at = ["--host", "127.0.0.1", "--port", self.port]
            program = os.path.join(venv or "", "bin", name)
            env = dict(os.environ, RUST_LOG="error")
            if name == "vllm-router":
                self.router = start(program, *at, "--worker-urls", url, "--policy", "round_robin",
                                    env=env)
            elif name in ("sglang-router", "smg"):
                self.router = start(program, "launch", *at, "--worker-urls", url, "--policy",
                                    "round_robin", env=env)
        wait_for(lambda: http(self.port, "POST", self.path, self.body(2, False))[0] == 200)
        time.sleep(1)
        begin = cpu_s(self.router.pid)
        time.sleep(2)
        self.idle = (cpu_s(self.router.pid) - begin) / 2

    def body(self, tokens, stream):
        return json.dumps({"model": "pocket", "prompt": PROMPT, "max_tokens": tokens,
                           "stream": stream, "ignore_eos": True, "temperature": 0},
                          separators=(",", ":"))

    def load(self, connections, requests, tokens, stream):
        begin = cpu_s(self.router.pid)
        run = subprocess.run([
            BENCH, "http-load", "--port", str(self.port), "--connections", str(connections),
            "--requests", str(requests), "--path", self.path, "--body", self.body(tokens, stream),
            "--timeout-ms", str(RUN_S * 1000)
        ], capture_output=True, text=True, timeout=RUN_S + 30, check=False)
        if run.returncode:
            raise RuntimeError(f"{self.name}: {run.stderr}")
        r = json.loads(run.stdout)
        r["cpu_us"] = (cpu_s(self.router.pid) - begin - self.idle * r["wall_s"]) * 1e6
        return r

    def stop(self):
        for p in reversed(self.processes):
            p.terminate()
        for p in self.processes:
            try:
                p.wait(10)
            except subprocess.TimeoutExpired:
                p.kill()
                p.wait()


def measure_worker(g, logs):
    """The decode worker alone: no router is between it and who asks."""
    port = free_port()
    with open(os.path.join(logs, "worker.log"), "wb") as log, subprocess.Popen(
        [BENCH, "worker-load", "--listen", f"127.0.0.1:{port}", "--requests", str(g.requests // 4),
         "--timeout-ms", str(RUN_S * 1000)], stdout=subprocess.PIPE, text=True) as load:
        wait_for(lambda: socket.create_connection(("127.0.0.1", port), timeout=1).close() or True)
        worker = subprocess.Popen([BENCH, "mock-worker", "--router", f"127.0.0.1:{port}"],
                                  stdout=log, stderr=log)
        try:
            r = json.loads(load.communicate(timeout=RUN_S + 30)[0])
        finally:
            load.kill()
            worker.terminate()
            worker.wait()
    return {"json_p50_us": r["whole_p50_us"], "json_p99_us": r["whole_p99_us"]}


def measure(name, g, logs):
    if name == "worker":
        return measure_worker(g, logs)
    out = {}
    s = System(name, 0, g.venv, logs)
    try:
        r = s.load(1, g.requests // 4, 2, False)
        out["json_p50_us"], out["json_p99_us"] = r["whole_p50_us"], r["whole_p99_us"]
        r = s.load(16, g.requests, 2, False)
        out["request_cpu_us"] = r["cpu_us"] / r["requests"]
        out["requests_per_s"] = r["requests"] / r["wall_s"]
    finally:
        s.stop()
    s = System(name, 2, g.venv, logs)
    try:
        r = s.load(32, g.requests // 8, 64, True)
        out["stream64_cpu_us"] = r["cpu_us"] / r["requests"]
        out["token_cpu_us"] = (out["stream64_cpu_us"] - out["request_cpu_us"]) / 64
        out["stream_reads_per_token"] = r["reads"] / r["requests"] / 64
        out["stream_first_p50_us"] = r["first_p50_us"]
    finally:
        s.stop()
    if g.many and (name.startswith("tandem") or g.many > 1):
        # without objectives: this is of the process, and not of what it would refuse
        s = System(name, 20, g.venv, logs,
                   *(["--policy", "round_robin"] if name.startswith("tandem") else []))
        try:
            r = s.load(2000, 2000, 250, True)
            out["many_cpu_share"] = r["cpu_us"] / 1e6 / r["wall_s"]
            out["many_wall_s"] = r["wall_s"]
            out["many_token_cpu_us"] = r["cpu_us"] / 2000 / 250
        finally:
            s.stop()
    return out


def add_added(name, rows):
    """What a router adds to what is behind it, where that was measured in the same round."""
    behind = rows.get("worker" if name == "tandem" else "direct")
    if name in ("direct", "worker") or not behind or len(behind) != len(rows[name]):
        return  # a run that failed has no row
    for q in ("p50", "p99"):
        rows[name][-1][f"added_{q}_us"] = (rows[name][-1][f"json_{q}_us"] -
                                           behind[-1][f"json_{q}_us"])


def n_sleeps(pid):
    """How often its threads have waited for something."""
    n = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/status", encoding="ascii", errors="replace") as f:
            n += sum(int(line.split()[1]) for line in f if line.startswith("voluntary_ctxt"))
    return n


def pair(g, logs):
    requests = g.requests or 120
    systems, rows = {}, {}
    try:
        for name, folder in (("this", BIN), ("other", g.pair)):
            systems[name] = System("tandem", 0, None, logs, folder=folder)
            rows[name] = {"json_p50_us": [], "request_cpu_us": [], "sleeps": []}
        for i in range(g.rounds):
            for name in sorted(systems, reverse=i % 2 == 0):
                s, begin = systems[name], n_sleeps(systems[name].router.pid)
                r = s.load(g.connections, requests, 2, False)
                rows[name]["sleeps"].append((n_sleeps(s.router.pid) - begin) / requests)
                rows[name]["json_p50_us"].append(r["whole_p50_us"])
                rows[name]["request_cpu_us"].append(r["cpu_us"] / requests)
    finally:
        for s in systems.values():
            s.stop()
    print(f"load {os.getloadavg()[0]:.1f}; of {g.rounds} runs the quantiles 10, 25, 50, 75 %")
    for key in rows["this"]:
        for name in rows:
            v = sorted(rows[name][key])
            print(f"{key:16} {name:6}",
                  *(f"{v[int(q * (len(v) - 1))]:9.2f}" for q in (0.1, 0.25, 0.5, 0.75)))


def main():
    a = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--venv", help="with sglang-router, smg, vllm-router; those it has are measured")
    a.add_argument("--rounds", type=int, default=5)
    a.add_argument("--requests", type=int, help="of a run; without --pair 8000")
    a.add_argument("--connections", type=int, default=1, help="of --pair")
    a.add_argument("--only", default="", help="names, comma-separated")
    a.add_argument("--many", type=int, default=1, help="0 = not, 1 = tandem alone, 2 = all")
    a.add_argument("--pair", help="a bin folder: compare the tandem-router there with this one")
    a.add_argument("--csv", help="append a row for each system")
    a.add_argument("--machine", default="unnamed")
    g = a.parse_args()
    if g.pair:
        with tempfile.TemporaryDirectory() as logs:
            pair(g, logs)
        return
    g.requests = g.requests or 8000
    names = ["direct", "worker", "tandem"] + [
        n for n in ("sglang-router", "smg", "vllm-router")
        if g.venv and os.path.exists(os.path.join(g.venv, "bin", n))
    ]
    if g.only:
        names = g.only.split(",")
    rows = {n: [] for n in names}
    with tempfile.TemporaryDirectory() as logs:
        for i in range(g.rounds):
            for name in names:
                try:
                    rows[name].append(measure(name, g, logs))
                except (RuntimeError, TimeoutError, ValueError, subprocess.TimeoutExpired) as e:
                    print(f"{name}: {e}", file=sys.stderr)
                    continue
                add_added(name, rows)
                print(i, name, json.dumps({k: round(v, 2) for k, v in rows[name][-1].items()}),
                      f"load {os.getloadavg()[0]:.1f}", flush=True)
    load = f"{os.getloadavg()[0]:.2f}"
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"],
                            capture_output=True, text=True, check=False).stdout.strip()
    keys = ["json_p50_us", "json_p99_us", "added_p50_us", "added_p99_us", "request_cpu_us",
            "requests_per_s", "stream64_cpu_us", "token_cpu_us", "stream_reads_per_token",
            "stream_first_p50_us", "many_cpu_share",
            "many_token_cpu_us", "many_wall_s"]
    out = []
    for name, got in rows.items():
        for key in keys:
            values = sorted(r[key] for r in got if key in r)
            if values:
                out.append([g.machine, commit, load, name, key,
                            *(f"{x:.3f}" for x in (statistics.median(values), values[0],
                                                   values[-1])), len(values)])
    for row in out:
        print(f"{row[3]:14} {row[4]:24} {row[5]:>12} ({row[6]}..{row[7]})")
    if g.csv:
        new = not os.path.exists(g.csv)
        with open(g.csv, "a", newline="", encoding="utf-8") as f:
            w = csv.writer(f, lineterminator="\n")
            if new:
                w.writerow(["machine", "commit", "load", "router", "figure", "median", "least",
                            "greatest", "rounds"])
            w.writerows(out)


if __name__ == "__main__":
    main()
