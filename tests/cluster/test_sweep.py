"""tandem bench sweep, plot, compare and calibrate as a user runs them: clusters of their own
that leave nothing behind, files that hold what was run."""
import csv
import html.parser
import importlib.util
import json
import os
import re
import signal
import subprocess
import time
import xml.dom.minidom

import grpc
import pytest

from harness import BIN, POCKET, ROOT, SHORT, SLOW, Cluster

TANDEM = os.path.join(BIN, "tandem")
LOAD = [
    "--isl", "32", "--osl", "8", "--ignore-eos", "--max-sched-lag-ms", "100000", "--no-send-slo"
]
OWN = ["--cluster-model", POCKET, "--up-args=--dtype f32 --kv-memory 16MiB"]

# in the environment of all that is started here
MARK = f"SWEEP_TEST={os.getpid()}-{time.monotonic_ns()}"


def marked_env():
    return dict(os.environ, **dict([MARK.split("=")]))


def bench(*args, rc=0, timeout=120):
    p = subprocess.run([TANDEM, "bench", *map(str, args)], stdin=subprocess.DEVNULL,
                       capture_output=True, timeout=timeout * SLOW, check=False, env=marked_env())
    out, err = p.stdout.decode(), p.stderr.decode()
    assert p.returncode == rc, f"exit {p.returncode}\n{out}\n{err}"
    return out, err


def marked_processes():
    """Programs of all processes with the mark: a sweep, the clusters that it started."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as f:
                environ = f.read()
            with open(f"/proc/{pid}/comm", encoding="utf-8") as f:
                comm = f.read().strip()
        except OSError:
            continue
        if MARK.encode() in environ:
            found.append(comm)
    return found


def rows_of(path):
    with open(path, encoding="utf-8", newline="") as f:
        return list(csv.DictReader(f))


class Outside(html.parser.HTMLParser):
    """Whatever a page would fetch."""
    def __init__(self):
        super().__init__()
        self.found, self.n_svg, self.n_tables = [], 0, 0

    def handle_starttag(self, tag, attrs):
        self.n_svg += tag == "svg"
        self.n_tables += tag == "table"
        if tag in ("script", "link", "img", "iframe", "object"):
            self.found.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "data") or "url(" in (value or ""):
                self.found.append((tag, name, value))


def check_pictures(folder, wanted):
    for name in wanted:
        dom = xml.dom.minidom.parse(os.path.join(folder, f"{name}.svg"))
        assert dom.documentElement.tagName == "svg" and dom.getElementsByTagName(
            "text") and dom.getElementsByTagName("title")
        assert len(rows_of(os.path.join(folder, f"{name}.csv"))) > 1
        png = os.path.join(folder, f"{name}.png")
        with open(png, "rb") as f:
            assert f.read(8) == b"\x89PNG\r\n\x1a\n" and os.path.getsize(png) > 2000
    with open(os.path.join(folder, "report.html"), encoding="utf-8") as f:
        text = f.read()
    xml.dom.minidom.parseString(text.replace("<!DOCTYPE html>", ""))
    page = Outside()
    page.feed(text)
    assert not page.found and "@import" not in text and "url(" not in text
    assert re.findall(r'https?://[^"\' ]*', text.replace("http://www.w3.org/2000/svg", "")) == []
    assert page.n_svg == len([n for n in os.listdir(folder) if n.endswith(".svg")
                              ]) and page.n_tables >= 3
    return text


@pytest.mark.skipif(SHORT, reason="the short form of sanitizer builds has the other sweeps")
def test_sweep_of_two_modes(tmp_path):
    """Two rates on two clusters that the sweep starts itself."""
    d = tmp_path / "out"
    out, err = bench("sweep", "--modes", "pd,colocated", "--rates", "20,8", "--num-prompts", 24,
                     "--goodput", "ttft:2000", "tpot:200", "--result-dir", d, "--title",
                     "a <b> & c", "--save-requests", *LOAD, *OWN)
    rows = rows_of(d / "sweep.csv")
    assert [(r["config"], float(r["rate"])) for r in rows] == [("pd 1:1", 8), ("pd 1:1", 20),
                                                               ("colocated 0:2", 8),
                                                               ("colocated 0:2", 20)]
    for key in ("offered", "completed", "goodput", "per_gpu_goodput", "attainment", "ci95_lo",
                "ci95_hi", "ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms", "tpot_p50_ms",
                "tpot_p90_ms", "tpot_p99_ms", "itl_p50_ms", "itl_p90_ms", "itl_p99_ms", "rejected",
                "deflected", "saturated", "window_s", "seed"):
        assert all(r[key] for r in rows), key
    for r in rows:
        n, k, window = float(r["n"]), float(r["n_good"]), float(r["window_s"])
        assert r["completed"] == "24" and int(r["gpus"]) == 2 and 0 < n <= 24
        assert float(r["attainment"]) == pytest.approx(
            k / n) and float(r["ci95_lo"]) <= k / n <= float(r["ci95_hi"])
        assert float(r["goodput"]) == pytest.approx(k / window) and float(
            r["per_gpu_goodput"]) == pytest.approx(k / window / 2)
        assert float(r["ttft_p50_ms"]) <= float(r["ttft_p90_ms"]) <= float(r["ttft_p99_ms"])
        assert float(r["stage_prefill_ms"]) > 0
    assert len({(r["config"], r["seed"]) for r in rows
                }) == 4, "runs of one cluster share prompts: the prefix cache would serve them"
    assert {r["mode"] for r in rows} == {"pd", "colocated"}
    doc = json.loads((d / "sweep.json").read_text())
    assert [r["rate"] for r in doc["rows"]] == [8, 20, 8, 20] and len(
        doc["rows"][0]["ttft_quantiles_ms"]) == 101
    for r in doc[
            "rows"]:  # the scaled objectives: more is never fewer, 1 is the objectives themselves
        scales = dict(
            zip((round(s, 6) for s in doc["sweep"]["slo_scales"]), r["slo_scale_attainment"]))
        assert list(scales.values()) == sorted(scales.values()) and scales[1.0] == pytest.approx(
            r["attainment"])
        known = [q for q in r["ttft_quantiles_ms"] if q is not None]
        assert known == sorted(known) and len(known) == 101
    text = check_pictures(d, [
        "attainment", "attainment-pd-1-1", "attainment-colocated-0-2", "goodput", "ttft-cdf",
        "tpot-cdf", "slo-scale", "stages"
    ])
    assert "a &lt;b&gt; &amp; c" in text and "colocated 0:2" in text and "TTFT 2000 ms" in text
    assert "runs or so to go" in err and "configuration" in out and "prefill_queue" in out
    assert marked_processes() == []

    # What was sent when: the same in both modes, as scheduled, and a trace for the simulator.
    sent = [
        rows_of(d / f"requests-{c}-{rate}-0.csv") for rate in (8, 20)
        for c in ("pd-1-1", "colocated-0-2")
    ]
    for pd, together in (sent[:2], sent[2:]):
        assert len(pd) == 24 and [r["arrived_s"] for r in pd] == [r["arrived_s"] for r in together]
        assert all(r["outcome"] == "completed" and float(r["ttft_ms"]) > 0
                   and int(r["num_prefill_tokens"]) > 0 for r in pd + together)
    assert float(sent[2][-1]["arrived_s"]) == pytest.approx(24 / 20) and float(
        sent[0][-1]["arrived_s"]) == pytest.approx(24 / 8)
    simulated = tmp_path / "sim.json"
    subprocess.run([
        TANDEM, "sim", "--trace",
        str(d / "requests-pd-1-1-20-0.csv"), "--arrival", "trace", "--duration", "0", "--warmup",
        "0", "--json",
        str(simulated), "--quiet"
    ], check=True, stdout=subprocess.DEVNULL, timeout=60)
    assert json.loads(simulated.read_text())["runs"][0]["n"] == 24

    again = tmp_path / "again"
    bench("plot", d / "sweep.json", "--out", again)
    for a, b in zip(rows_of(again / "attainment.csv"), rows_of(d / "attainment.csv"), strict=True):
        assert a.pop("config") == b.pop("config") and {k: float(v)
                                                       for k, v in a.items()} == pytest.approx(
                                                           {k: float(v)
                                                            for k, v in b.items()}, rel=1e-6)
    bench("plot", d / "sweep.csv", "--out", tmp_path / "from-csv")
    check_pictures(tmp_path / "from-csv", ["attainment", "goodput", "stages"])
    out, _ = bench("compare", d / "sweep.json", d / "sweep.json")
    assert "pd 1:1" in out and "within run-to-run spread" in out


def test_sim_live_arithmetic():
    """bench/sim_live.py: intervals, objectives that follow from calibrated times, what it says
    of rows."""
    spec = importlib.util.spec_from_file_location("sim_live",
                                                  os.path.join(ROOT, "bench", "sim_live.py"))
    m = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(m)
    assert m.wilson(90, 100) == pytest.approx(
        (0.8256343, 0.9447708), abs=1e-6) and m.wilson(0, 0) == (0.0, 1.0)
    t = {"a0": 0.001, "a1": 5e-5, "a2": 1e-8, "b0": 1e-3, "b1": 5e-5, "b2": 1e-7}
    assert m.prefill_s(
        t, 1024) == pytest.approx(2 * 0.001 + 1024 * 5e-5 + 1e-8 * (512 * 256 + 512 * 768))
    stall, rush = m.pairs_of(t)
    p, two, one = m.prefill_s(t, 512) * 1e3, m.step_s(t, 2, 544) * 1e3, m.step_s(t, 1, 544) * 1e3
    assert stall["ttft"] == pytest.approx(6 * p, abs=0.1) and two < stall[
        "tpot"] < one + p / 63, "two sequences fit, and a foreign prompt in one's steps does not"
    assert rush["ttft"] == pytest.approx(2.5 * p, abs=0.1) and rush["tpot"] > one + 4 * p / 15
    assert m.knee(lambda r: r <= 3.3, 0.1, 10) == pytest.approx(3.3, rel=0.04) and m.knee(
        lambda r: False, 0.1, 10) == 0
    assert m.rates_of({"pd": 8.0, "colocated": 2.0, "hybrid": 9.0}) == [4.0, 6.8] == m.rates_of(
        {"pd": 2.0, "colocated": 8.0, "hybrid": 0.0})
    assert m.rates_of({"pd": 0.0, "colocated": 0.0, "hybrid": 1.0}) == [] and m.rates_of(
        {"pd": 5.0, "colocated": 0.0, "hybrid": 0.0}) == [2.24, 4.25]
    assert m.requests_of([{"rates": [2.0, 4.0]}], 4.5, 1) == 120 and m.requests_of(
        [{"rates": [2.0, 4.0]}], 0.1, 1) == 80
    rows = [{
        "mode": mode, "rate": r, "live": live, "live_lo": live - 0.05, "live_hi": live + 0.05,
        "sim_alone": 1.0, "sim_beside": 0.5, "agree": 1
    } for mode, r, live in (("pd", 3, 0.95), ("pd", 6, 0.92), ("colocated", 3, 0.91), ("colocated",
                                                                                       6, 0.7))]
    text = m.verdict({"name": "stall"}, rows)
    assert "4 of 4 points agree" in text, text
    for words in (
            "live       highest rate at >= 90 %: pd 6/s, colocated 3/s, hybrid 0/s; first: pd",
            "at 3/s: pd 95.0 % (90.0..100.0), colocated 91.0 % (86.0..96.0): not told apart"):
        assert words in text, text
    assert "colocated 70.0 % (65.0..75.0): pd ahead, beyond both intervals" in text, text


def test_search_on_a_running_cluster(tmp_path):
    with Cluster() as c:
        at = [
            "--server", f"127.0.0.1:{c.port}", "--num-prompts", 60, "--result-dir", tmp_path / "s",
            "--no-plots", *LOAD
        ]
        # A objective that everything meets: doubles up to the highest rate, and verifies it.
        bench("sweep", *at, "--find-goodput", "--goodput", "ttft:60000", "--start-rate", 20,
              "--max-rate", 30, "--verify", 2)
        doc = json.loads((tmp_path / "s" / "sweep.json").read_text())
        assert [(r["phase"], r["rate"]) for r in doc["rows"]] == [("bracket", 20), ("bracket", 30),
                                                                  ("verify", 30), ("verify", 30)]
        assert doc["configs"][0]["goodput"] == 30 and doc["configs"][0]["verified"] and doc[
            "configs"][0]["name"] == "pd 1:1"
        assert len({r["seed"] for r in doc["rows"]}) == 4
        # One that nothing meets: halves down to the lowest, and says so.
        out, _ = bench("sweep", *at, "--goodput", "ttft:0.001", "--start-rate", 40, "--min-rate",
                       20, "--verify", 2)
        doc = json.loads((tmp_path / "s" / "sweep.json").read_text())
        assert [r["rate"] for r in doc["rows"]] == [
            40, 20
        ] and doc["configs"][0]["goodput"] == 0 and "No configuration met TTFT 0.001 ms" in out
        # guidellm's profile: one at a time, all at once, rates between; and two results beside each
        # other.
        bench("sweep", *at, "--profile", "kind=sweep,sweep_size=3", "--goodput", "ttft:60000")
        doc = json.loads((tmp_path / "s" / "sweep.json").read_text())
        assert [r["phase"] for r in doc["rows"]] == ["sync", "throughput", "grid"] and all(
            r["completed"] > 0 for r in doc["rows"])
        # The one rate between is the grid's end, that of all at once, which on a busy machine may
        # be below that of one at a time.
        assert doc["rows"][2]["rate"] == pytest.approx(doc["rows"][1]["rate"], rel=1e-6)
        names = []
        for name, osl in (("a", 8), ("b", 8), ("long", 16)):
            bench("serve", *at[:2], "--num-prompts", 30, "--request-rate", 20, "--isl", 32, "--osl",
                  osl, "--ignore-eos", "--goodput", "ttft:60000", "--max-sched-lag-ms", 100000,
                  "--save-result", "--result-dir", tmp_path, "--result-filename", f"{name}.json")
            names.append(tmp_path / f"{name}.json")
        out, _ = bench("compare", names[0], names[0])
        assert "SLO attainment (%)" in out and "+0.00" in out and "within run-to-run spread" in out
        assert re.search(r"Median TTFT \(ms\) +\S+ +\S+ +\+0\.0%", out)
        out, _ = bench("compare", f"{names[0]},{names[1]}", f"{names[2]},{names[2]}")
        line = next(ln for ln in out.splitlines() if ln.startswith("Output token throughput"))
        assert re.search(r"\+\d+\.\d%", line) and "[" in line
        c.wait_idle()


def test_interrupted_sweep_leaves_its_rows_and_no_process(tmp_path):
    d = tmp_path / "out"
    p = subprocess.Popen([
        TANDEM, "bench", "sweep", "--modes", "pd", "--rates", "10,11", "--num-prompts", "3000",
        "--goodput", "ttft:2000", "--result-dir",
        str(d), *LOAD, *OWN
    ], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=marked_env())
    try:
        deadline = time.monotonic() + 60 * SLOW
        log = d / "logs-pd-1-1" / "router.log"
        while not log.exists() or "tandem-decode" not in marked_processes():
            assert p.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        p.send_signal(signal.SIGINT)
        out, err = p.communicate(timeout=60 * SLOW)
    finally:
        if p.poll() is None:
            p.kill()
            p.wait()
    assert p.returncode == 130, (out, err)
    assert marked_processes() == []


def test_options_are_refused_by_name():
    for args, message in ((["--rates", "1,x"], '--rates: "x" must be a number'), ([
            "--goodput", "ttft:5", "--tolerance", "0"
    ], "--tolerance"), ([], "the search needs objectives"), ([
            "--rates", "1", "--modes", "pd"
    ], "give --cluster-model"), ([
            "--rates", "1", "--modes", "x", "--cluster-model", "m"
    ], '--modes: "x"'), ([
            "--rates", "1", "--pd", "1", "--cluster-model", "m"
    ], '--pd: "1" must be PREFILL:DECODE'), (["--profile", "kind=other"], "--profile"), ([
            "--rates", "1", "--find-goodput", "--goodput", "ttft:1"
    ], "exclude each other"), (["--rates", "1", "--request-rate", "2"], "a sweep sets the rate"), ([
            "--rates", "1", "--slo-scale", "2:1:1"
    ], "--slo-scale")):
        _, err = bench("sweep", *args, rc=2)
        assert message in err, err
    _, err = bench("plot", "/nonexistent.json", rc=1)
    assert "/nonexistent.json" in err
    _, err = bench("compare", "a.json", rc=2)
    assert "two files" in err


@pytest.mark.skipif(
    SHORT,
    reason="the short form of sanitizer builds leaves the engine's grid out: fit_test has the "
    "numbers")
def test_calibrated_table_is_what_the_router_reads(tmp_path):
    table = tmp_path / "latency.table"
    out, _ = bench("calibrate", "--model", POCKET, "--dtype", "f32", "--kv-memory", "16MiB",
                   "--prefill-grid", "16,256,1536", "--context-grid", "0,256", "--batch-grid",
                   "1,4,8", "--chunk-grid", "64", "--repeat", 3, "--link", "shm", "--out", table,
                   "--csv", tmp_path / "points.csv")
    points = rows_of(tmp_path / "points.csv")
    assert {r["kind"] for r in points} == {"prefill", "decode", "mixed"} and all(
        float(r["median_s"]) > 0 for r in points)
    lines = [ln for ln in table.read_text().splitlines() if not ln.startswith("#")]
    assert [ln.split()[0] for ln in lines] == ["node_class=prefill", "node_class=decode"]
    theta = {k: float(v) for k, v in (w.split("=") for w in lines[0].split()[1:])}
    assert set(theta) == {
        "a0", "a1", "a2", "b0", "b1", "b2", "b3", "b4", "link_tau", "link_bytes_per_s", "kv_bytes"
    } and min(theta.values()) >= 0
    assert theta["a1"] + theta["a2"] > 0 and theta["link_bytes_per_s"] > 1e6 and theta[
        "kv_bytes"] == 2 * 5 * 2 * 32 * 4, theta  # K and V, layers, heads, f32
    for r in points:  # the file's fit is the table's formula
        u, work = float(r["new_tokens"]), float(
            r["new_tokens"]) * (float(r["prompt_context"]) + float(r["new_tokens"]) / 2)
        b = float(r["batch"])
        want = theta["a0"] + theta["a1"] * u + theta["a2"] * work if r[
            "kind"] == "prefill" else theta["b0"] + theta["b1"] * b + theta["b2"] * b * float(
                r["context"]) + theta["b3"] * u + theta["b4"] * work
        assert float(r["fitted_s"]) == pytest.approx(want, rel=1e-4)
    assert "error of the fit" in out
    with Cluster(router_args=["--latency-table", table]) as c:
        r = c.generate(prompt="Once upon a time", max_tokens=4, temperature=0)
        assert r.code == grpc.StatusCode.OK, ("the first request had no prediction: the table "
                                              "was not used")
        assert r.ledger.predicted_ttft_us > 0, ("the first request had no prediction: the table "
                                                "was not used")
        c.wait_idle()
