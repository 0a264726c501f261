#!/usr/bin/python3
"""tandem sim and tandem plan from outside: what they print, write and refuse."""
import csv
import json
import os
import subprocess
import sys
import tempfile

TANDEM = sys.argv[1]


def run(*args, status=0,
        timeout=600):  # for what hangs: a plan under ASan beside other work took more than 100 s
    p = subprocess.run([TANDEM, *args], capture_output=True, text=True, timeout=timeout)
    assert p.returncode == status, (args, p.returncode, p.stdout[-2000:], p.stderr[-2000:])
    return p


def test_sweep(folder):
    """A row for each policy and rate on stdout; each seed in JSON and CSV, the same numbers in
    both."""
    j, c = os.path.join(folder, "s.json"), os.path.join(folder, "s.csv")
    p = run("sim", "--policy", "round_robin,goodput", "--rate", "3,6", "--duration", "30",
            "--warmup", "5", "--seeds", "2", "--json", j, "--csv", c, "--osl", "40", "--quiet")
    rows = p.stdout.splitlines()
    assert len(rows) == 5 and rows[0].startswith("policy"), rows
    assert [r.split()[0] for r in rows[1:]] == ["round_robin", "goodput"] * 2
    with open(j, encoding="utf-8") as f:
        doc = json.load(f)
    with open(c, encoding="utf-8", newline="") as f:
        table = list(csv.DictReader(f))
    assert len(doc["runs"]) == len(table) == 8
    assert doc["slo"] == {"ttft_ms": 400, "tpot_ms": 50, "attainment": 0.9}
    for a, b in zip(doc["runs"], table):
        assert None not in b and None not in b.values(), b  # as many fields as the header has
        assert a["policy"] == b["policy"] and a["seed"] == int(b["seed"]) and a["n"] == int(b["n"])
        assert abs(a["attainment"]["joint"] - float(b["attainment"])) < 1e-9
        low, high = a["attainment"]["ci95"]
        assert 0 <= low <= a["attainment"]["joint"] <= high <= 1
        assert a["good"] <= a["completed"] <= a["n"]
        assert a["p50_ttft_ms"] <= a["p90_ttft_ms"] <= a["p99_ttft_ms"]
    again = run("sim", "--policy", "round_robin,goodput", "--rate", "3,6", "--duration", "30",
                "--warmup", "5", "--seeds", "2", "--osl", "40", "--quiet")
    assert again.stdout == p.stdout, "the same seeds gave other rows"


def test_parts(folder):
    """Several classes and tenants: a row for each under the whole's, in the table, the CSV and
    the JSON."""
    j, c = os.path.join(folder, "m.json"), os.path.join(folder, "m.csv")
    p = run("sim", "--rate", "8", "--duration", "40", "--warmup", "5", "--slo-class",
            "gold:ttft=400,tpot=50,weight=4 bulk:ttft=5000,tpot=100", "--class-mix",
            "gold=1 bulk=3", "--tenants", "acme=1 flood:bulk=4", "--json", j, "--csv", c, "--osl",
            "40", "--quiet")
    names = ["all", "class gold", "class bulk", "tenant acme", "tenant flood"]
    assert [" ".join(r.split()[:2]) for r in p.stdout.splitlines()[2:]] == names[1:], p.stdout
    with open(c, encoding="utf-8", newline="") as f:
        table = list(csv.DictReader(f))
    with open(j, encoding="utf-8") as f:
        runs = json.load(f)["runs"]
    assert [r["part"] for r in table] == [r["part"] for r in runs] == names
    n = [int(r["n"]) for r in table]
    assert n[0] == n[1] + n[2] == n[3] + n[4] and n[2] > n[1] > 0 and n[4] > n[3] > 0, n


def rows_of(folder, *args):
    path = os.path.join(folder, "rows.csv")
    run("sim", *args, "--csv", path, "--quiet", "--warmup", "0")
    with open(path, encoding="utf-8", newline="") as f:
        return list(csv.DictReader(f))


def test_arrivals(folder):
    """On/off has all arrivals in its on-times, sine most in its upper half; both have the mean
    rate asked for. Intervals add up."""
    common = ("--duration", "400", "--rate", "5", "--isl", "64", "--osl", "8", "--prefill", "4",
              "--interval", "10", "--period", "40")
    for arrival, busy in (("onoff", (0, )), ("sine", (0, 1))):
        rows = rows_of(folder, "--arrival", arrival, "--on-share", "0.25", "--swing", "1", *common)
        total, parts = int(rows[0]["n"]), [int(r["n"]) for r in rows[1:]]
        assert [r["part"] for r in rows[:3]] == ["all", "0..10 s", "10..20 s"] and len(parts) == 40
        assert sum(parts) == total and abs(total - 2000) < 6 * 2000**0.5, (arrival, total)
        in_busy = sum(n for i, n in enumerate(parts) if i % 4 in busy)
        # sine with a swing of 1 has 1/2 + 1/pi of its arrivals in the upper half
        assert in_busy == total if arrival == "onoff" else abs(in_busy / total - 0.818) < 0.05, (
            arrival, parts)


def test_clients(folder):
    """Classes by length; clients that leave; a max_tokens that says nothing."""
    common = ("--duration", "60", "--rate", "6", "--isl", "uniform:100,1500", "--osl", "60")
    classes = ("--slo-class", "chat:ttft=400,tpot=50 long:ttft=4000", "--class-by-length",
               "chat:400 long")
    whole, chat, long = [int(r["n"]) for r in rows_of(folder, *common, *classes)]
    assert whole == chat + long and abs(chat / whole - 301 / 1401) < 0.1, (chat, long)
    all_long = rows_of(folder, *common, "--slo-class", "chat long", "--class-by-length",
                       "chat:99 long")
    assert [int(r["n"]) for r in all_long] == [whole, 0, whole]
    assert int(rows_of(folder, *common, "--cancel", "0.5")[0]["failed"]) > whole / 10 and int(
        rows_of(folder, *common)[0]["failed"]) == 0
    # what is said to be long is held to be long: fewer are let in
    tight = (*common, "--rate", "20", "--decode", "1", "--kv-tokens", "20000", "--ttft", "800")
    assert rows_of(folder, *tight) != rows_of(folder, *tight, "--told-max-tokens", "4000")


def test_rows_in_order(folder):
    """A file with block hashes is taken in its order, so that what follows a prompt finds its
    prefix; drawn rows do not."""
    path = os.path.join(folder, "turns.jsonl")
    with open(path, "w", encoding="utf-8") as f:
        for i in range(4000):
            f.write(
                json.dumps({
                    "timestamp": i *
                    1000, "input_length": 1024, "output_length": 4, "hash_ids": [i // 2, 10000 + i]
                }) + "\n")
    common = ("--trace", path, "--latency", "llama-8b-h200", "--prefill", "1", "--decode", "1",
              "--rate", "2", "--requests", "300", "--kv-tokens", "60000", "--ttft", "0", "--tpot",
              "0")
    shares = [
        float(rows_of(folder, *common, *more)[0]["hit_share"])
        for more in ((), ("--rows", "order"), ("--rows", "drawn"))
    ]
    assert shares[0] == shares[
        1] == 0.25, shares  # every second prompt finds the first of its two blocks
    assert shares[2] < 0.1, shares


def test_replay(folder):
    log = os.path.join(folder, "d.log")
    run("sim", "--mode", "hybrid", "--rate", "5", "--duration", "10", "--warmup", "0",
        "--decision-log", log, "--quiet", "--faults", "crash:3@2-5", "--check")
    assert run("sim", "replay", log).stdout.endswith(": the same\n")
    with open(log, encoding="utf-8") as f:
        text = f.read()
    spoilt = text.replace("\na kind=1 ", "\na kind=2 ", 1)
    assert spoilt != text
    with open(log, "w", encoding="utf-8") as f:
        f.write(spoilt)
    p = run("sim", "replay", log, status=1)
    line = spoilt[:spoilt.index("\na kind=2 ") + 1].count("\n") + 1
    first = min(
        i for i, (x, y) in enumerate(zip(text.splitlines(), spoilt.splitlines()), 1) if x != y)
    assert line >= 1 and f"line {first}\n" in p.stderr, p.stderr
    with open(log, "w", encoding="utf-8") as f:
        f.write("not a log\n")
    run("sim", "replay", log, status=1)
    run("sim", "replay", os.path.join(folder, "nowhere"), status=1)


def test_plan(folder):
    j, c = os.path.join(folder, "p.json"), os.path.join(folder, "p.csv")
    p = run("plan", "--model", "opt-13b", "--isl", "512", "--osl", "32", "--prefix", "128",
            "--ttft", "300", "--tpot", "60", "--gpus", "2", "--top", "2", "--seeds", "2",
            "--tolerance", "0.1", "--json", j, "--csv", c, "--quiet")
    assert "layout" in p.stdout
    with open(j, encoding="utf-8") as f:
        rows = json.load(f)["rows"]
    with open(c, encoding="utf-8", newline="") as f:
        table = list(csv.DictReader(f))
    assert len(rows) == len(table) >= 2
    simulated = [r for r in rows if r["simulated"]]
    assert len(simulated) == 2 and any(r["pareto"] for r in rows)
    for r in simulated:
        assert r["gpus"] <= 2 and (r["request_rate"] == 0 or r["ci95"][0] >= 0.9)
    p = run("plan", "--model", "opt-13b", "--gpus", "64", "--closed-form", "--quiet")
    assert p.stdout.count("\n") > 5


def plan_rows(folder, *args):
    path = os.path.join(folder, "plan.json")
    run("plan", *args, "--json", path, "--quiet")
    with open(path, encoding="utf-8") as f:
        return json.load(f)["rows"]


def test_plan_cost(folder):
    """GPUs at hand are paid for, used or not; a price for each table turns the order round; for
    a wanted rate only what is used counts."""
    common = ("--model", "opt-13b,opt-13b:tp2", "--isl", "512", "--osl", "32", "--ttft", "300",
              "--tpot", "60", "--closed-form")
    rows = plan_rows(folder, *common, "--gpus", "3", "--mode", "colocated")
    assert {(r["gpus"], r["cost_per_hour"])
            for r in rows} == {(3, 3), (2, 3)}, rows  # one worker of two GPUs leaves one idle
    assert [r["estimate"] for r in rows] == sorted((r["estimate"] for r in rows), reverse=True)
    rows = plan_rows(folder, *common, "--gpus", "3", "--mode", "colocated", "--price",
                     "opt-13b=2 opt-13b:tp2=9")
    assert {r["decode"]: r["cost_per_hour"] for r in rows} == {"opt-13b": 6, "opt-13b:tp2": 20}
    cheap, dear = [
        plan_rows(folder, *common, "--gpus", "4", "--mode", "colocated", "--price",
                  f"opt-13b={p} opt-13b:tp2=1")[0]["decode"] for p in (0.1, 9)
    ]
    assert (cheap, dear) == ("opt-13b", "opt-13b:tp2")
    rows = plan_rows(folder, *common, "--gpus", "4", "--mode", "pd", "--target-request-rate", "1")
    assert all(r["cost_per_hour"] == r["gpus"] for r in rows) and min(r["gpus"] for r in rows) == 2


def test_plan_loads(folder):
    """Hybrid layouts; lengths of a file; classes, each of which must reach the attainment."""
    path = os.path.join(folder, "lengths.csv")
    with open(path, "w", encoding="utf-8") as f:
        f.write("num_prefill_tokens,num_decode_tokens\n" + "500,30\n700,40\n" * 50 + "90000,10\n")
    common = ("--model", "opt-13b", "--ttft", "300", "--tpot", "60", "--gpus", "2", "--top", "1",
              "--seeds", "2", "--tolerance", "0.2")
    rows = plan_rows(folder, *common, "--mode", "hybrid", "--trace", path, "--max-prompt", "4000")
    assert {r["mode"]
            for r in rows} == {"hybrid"} and rows[0]["simulated"] and rows[0]["request_rate"] > 1
    drawn = plan_rows(folder, *common, "--mode", "hybrid", "--isl", "600", "--osl", "35")
    assert abs(rows[0]["estimate"] / drawn[0]["estimate"] -
               1) < 1e-6  # the means of the file without its long row
    classes = ("--slo-class", "chat:ttft=300,tpot=60 long:ttft=2000,tpot=100", "--class-by-length",
               "chat:600 long")
    both = plan_rows(folder, *common, "--mode", "pd", "--trace", path, "--max-prompt", "4000",
                     *classes)
    assert both[0]["request_rate"] > 1
    run("plan", *common, "--slo-class", "chat:ttft=300,tpot=60 now:ttft=1", "--quiet", status=1)


LLAMA_8B, LLAMA_70B = "bench/configs/llama-3.1-8b.json", "bench/configs/llama-3.1-70b.json"


def test_plan_gpu(folder):
    """A stranger's config.json on a card: layouts of each parallelism that fits, and of two
    kinds of cards; the tables as the router reads them."""
    common = ("--isl", "1024", "--osl", "128", "--ttft", "400", "--tpot", "30", "--gpus", "4")
    rows = plan_rows(folder, "--gpu", "h100", "--model", LLAMA_8B, *common, "--top", "1", "--seeds",
                     "2", "--tolerance", "0.2")
    assert rows[0]["simulated"] and rows[0]["request_rate"] > 10 and rows[0]["ci95"][0] >= 0.9
    assert {r["decode"] for r in rows} == {"h100", "h100:tp2", "h100:tp4"}
    rows = plan_rows(folder, "--gpu", "h100", "--model", LLAMA_70B, *common, "--tpot", "60",
                     "--closed-form")
    assert {r["decode"] for r in rows} == {"h100:tp2", "h100:tp4"}  # one card does not hold it
    rows = plan_rows(folder, "--gpu", "h100,h200", "--tp", "2", "--model", LLAMA_70B, *common,
                     "--ttft", "900", "--tpot", "60", "--mode", "pd", "--closed-form", "--price",
                     "h100:tp2=2 h200:tp2=3")
    assert {(r["prefill"], r["decode"], r["cost_per_hour"])
            for r in rows} == {(f"{p}:tp2", f"{d}:tp2", 2 * (c + e))
                               for p, c in (("h100", 2), ("h200", 3))
                               for d, e in (("h100", 2), ("h200", 3))}
    table = os.path.join(folder, "cards.theta")
    with open(table, "w", encoding="utf-8") as f:
        f.write(run("plan", "--gpu", "h100", "--model", LLAMA_8B, "--print-latency").stdout)
    # an estimate is called one, in words that the table's readers skip
    for more in (("--print-latency", ), ("--closed-form", )):
        p = run("plan", "--gpu", "b200", "--tp", "1", "--model", LLAMA_8B, "--quiet", *more)
        assert ("b200 was not measured: its step times are those of h200"
                in p.stdout) and ("h100" not in p.stdout), p.stdout
        assert all(line.startswith(("#", "node_class="))
                   for line in p.stdout.splitlines()) or more[0] != "--print-latency"
        assert "not measured" not in run("plan", "--gpu", "h100", "--tp", "1", "--model", LLAMA_8B,
                                         "--quiet", *more).stdout
    p = run("sim", "--gpu", "l40s", "--model", LLAMA_8B, "--duration", "1", "--quiet")
    assert p.stderr.count("l40s was not measured: its step times are those of a100") == 1, p.stderr
    load = ("--duration", "30", "--rate", "4", "--prefill", "1", "--decode", "1")
    by_gpu, by_name, by_file = [
        rows_of(folder, *load, *more)[0]
        for more in (("--gpu", "h100", "--model", LLAMA_8B, "--tp", "2"),
                     ("--latency", f"gpu:h100:tp2:{LLAMA_8B}"), ("--latency", f"{table}:h100:tp2"))
    ]
    assert by_gpu["attainment"] == "1.00000" and {k for k in by_gpu if by_gpu[k] != by_name[k]
                                                  } <= {"wall_s"}, (by_gpu, by_name)
    assert abs(float(by_file["tpot_p50"]) / float(by_gpu["tpot_p50"]) - 1) < 1e-3, (by_file, by_gpu)


def test_refusals(folder):
    """Each bad input is named, with exit status 2 (usage) or 1 (a file)."""
    bad = os.path.join(folder, "bad.csv")
    with open(bad, "w", encoding="utf-8") as f:
        f.write("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00,10,none\n")
    for args, status, want in [
        (["sim", "--policy", "luck"], 2, "luck"), (["sim", "--mode", "both"], 2, "both"),
        (["sim", "--rate", "0"], 2, "rate is 0"), (["sim", "--rate", "many"], 2, 'rate is "many"'),
        (["sim", "--isl", "-3"], 2, 'isl is "-3"'), (["sim", "--latency", "gpt-9"], 2, "gpt-9"),
        (["sim", "--latency", "/nowhere.theta"], 1, "/nowhere.theta"),
        (["sim", "--fleet", "decode:0:opt-13b"], 2, "decode:0:opt-13b"),
        (["sim", "--faults", "melt:1@5"], 2, "melt:1@5"),
        (["sim", "--trace", bad], 2, "line 2: GeneratedTokens"),
        (["sim", "--arrival", "trace"], 2, "no trace file"), (["sim", "--ttft", "nan"], 2, "ttft"),
        (["sim", "--lose", "2"], 2, "lose"), (["sim", "--class-mix", "gold=1"], 2, "gold"),
        (["sim", "--slo-class", "a b", "--class-by-length",
          "a:10 b:20"], 2, "the last class must be without a bound"),
        (["sim", "--slo-class", "a b", "--class-by-length",
          "a:10 b:5 a"], 2, 'the bound of b is "5"'),
        (["sim", "--slo-class", "a b", "--class-by-length", "c:10 b"], 2, "class_by_length"),
        (["sim", "--slo-class", "a b", "--class-by-length", "a:10 b", "--class-mix",
          "a=1"], 2, "not both"),
        (["sim", "--interval", "1", "--duration", "0", "--requests", "10"], 2, "interval is 1 s"),
        (["sim", "--interval", "0.01"], 2, "limit 1000"),
        (["sim", "--arrival", "sine", "--ramp-to", "9"], 2, "ramp_to is 9"),
        (["sim", "--tenants", "a=b"], 2, "share of a"),
        (["sim", "--no-send-slo", "--slo-class", "a"], 2, "send_slo"),
        (["plan", "--model", "gpt-9"], 2, "gpt-9"), (["plan", "--ttft", "1"], 1, "no layout"),
        (["plan", "--prefix", "512"], 2, "prefix is 512"),
        (["plan", "--mode", "neither"], 2, "neither"),
        (["plan", "--mode", "pd,neither"], 2, "pd,neither"),
        (["plan", "--price", "opt-13b=0"], 2, 'price is "0"'),
        (["plan", "--price", "opt-99=2"], 1, "opt-99"),
        (["plan", "--price", "opt-13b=2"], 2, "opt-13b:tp2 has none"),
        (["plan", "--trace", bad], 2, "line 2: GeneratedTokens"),
        (["plan", "--gpu", "h100", "--model", LLAMA_8B, "--latency",
          "opt-13b"], 2, "give gpu or latency, not both"),
        (["plan", "--model", "opt-13b", "--latency",
          "opt-13b"], 2, "give model or latency, not both"),
        (["plan", "--gpu", "h100"], 2, "gpu is h100 without model"),
        (["plan", "--gpu", "v100", "--model",
          LLAMA_8B], 2, 'gpu is "v100", must be one of a100, h100'),
        (["plan", "--gpu", "h100,h100", "--model", LLAMA_8B], 2, "twice"),
        (["plan", "--gpu", ",", "--model", LLAMA_8B], 2, "gpu is empty"),
        (["plan", "--gpu", "h100", "--model", "opt-13b"], 1, "opt-13b: cannot open"),
        (["plan", "--gpu", "h100", "--model", bad], 2, bad),
        (["plan", "--gpu", "h100", "--model", LLAMA_8B, "--tp",
          "3"], 2, "tp is 3, must be 1, 2, 4 or 8"),
        (["plan", "--gpu", "h100", "--model", LLAMA_8B, "--tp", "2x"], 2, 'tp is "2x"'),
        (["plan", "--gpu", "h100", "--model", LLAMA_8B, "--gpus", "2", "--tp",
          "4"], 2, "at most gpus (2)"),
        (["plan", "--gpu", "h100", "--model", LLAMA_70B, "--tp",
          "1"], 1, "the weights take 141.1 GB of each h100 with tp 1, limit 77.0 GB"),
        (["plan", "--gpu", "l40s", "--model", LLAMA_70B, "--gpus",
          "2"], 1, "the weights take 71.6 GB of each l40s with tp 2"),
        (["plan", "--gpu", "h100", "--model", LLAMA_8B, "--isl",
          "131000"], 1, "isl and osl are 131128 tokens together, limit 131072"),
        (["plan", "--tp", "2", "--closed-form"], 0, "tp counts only with gpu"),
        (["plan", "--latency", "opt-13b", "--print-latency"], 1, "more than one line can say"),
        (["sim", "--gpu", "h100", "--model", LLAMA_8B, "--latency",
          "opt-13b"], 2, "give gpu or latency, not both"),
        (["sim", "--gpu", "h100", "--model", LLAMA_8B, "--fleet",
          "decode:1:opt-13b"], 2, "give gpu or fleet, not both"),
        (["sim", "--gpu", "h100"], 2, "gpu is h100 without model"),
        (["sim", "--model", LLAMA_8B, "--duration",
          "1"], 0, "model counts only with gpu: steps take what table opt-13b says"),
        (["sim", "--tp", "2", "--duration", "1", "--latency",
          "opt-13b:tp2"], 0, "tp counts only with gpu: steps take what latency says"),
        (["sim", "--gpu", "h100", "--model", LLAMA_8B, "--tp",
          "5"], 2, "tp is 5, must be 1, 2, 4 or 8"),
        (["sim", "--latency", "gpu:h100"], 2, "gpu:GPU:tpN:MODEL"),
    ]:
        p = run(*args, "--quiet", status=status)
        assert want in p.stderr, (args, p.stderr)


def main():
    for test in (test_sweep, test_parts, test_arrivals, test_clients, test_rows_in_order,
                 test_replay, test_plan, test_plan_cost, test_plan_loads, test_plan_gpu,
                 test_refusals):
        with tempfile.TemporaryDirectory() as folder:
            test(folder)
        print(f"{test.__name__}: ok")


if __name__ == "__main__":
    main()
