"""Debian's Prometheus scrapes a live cluster: every target is up, what it stored is what clients
received, each panel of deploy/grafana-dashboard.json has something to show, and the alert rules
load and stay silent."""
import json
import math
import os
import re
import shutil
import signal
import subprocess
import urllib.parse
import urllib.request

import grpc
import pytest

from installed import HERE, SLOW, Cluster, free_port

yaml = pytest.importorskip("yaml", reason="python3-yaml is not installed")
PROMETHEUS = shutil.which("prometheus") or pytest.skip(
    "prometheus is not installed (package prometheus)", allow_module_level=True)
DEPLOY = os.path.join(HERE, "..", "..", "deploy")
WINDOW = "60s"  # stands for Grafana's $__rate_interval; all of this test is in it
N = 24


def load(*path):
    with open(os.path.join(DEPLOY, *path), encoding="utf-8") as f:
        return f.read()


def alert_groups():
    documents = yaml.safe_load_all(load("kubernetes", "monitoring.example.yaml"))
    (rule, ) = [d for d in documents if d["kind"] == "PrometheusRule"]
    return rule["spec"]


class Prometheus:
    """A Prometheus of its own on loopback, its data in a folder that is given."""
    def __init__(self, folder, targets):
        self.log_path, self.port = os.path.join(folder, "log"), free_port()
        config = {
            "global": dict.fromkeys(("scrape_interval", "scrape_timeout", "evaluation_interval"),
                                    f"{1000 * SLOW}ms"), "rule_files": ["rules.yaml"],
            "scrape_configs": [{
                "job_name": "tandem", "static_configs": [{
                    "targets": [f"127.0.0.1:{port}"], "labels": {"component": role, "pod": pod}
                } for pod, (role, port) in targets.items()]
            }]
        }
        for name, what in (("rules", alert_groups()), ("prometheus", config)):
            with open(os.path.join(folder, f"{name}.yaml"), "w", encoding="utf-8") as f:
                yaml.safe_dump(what, f)
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen([
                PROMETHEUS, f"--config.file={folder}/prometheus.yaml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{self.port}"
            ], stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def __enter__(self):
        return self

    def __exit__(self, exc_type, exc, tb):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30 * SLOW)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def get(self, path, **query):
        """The data of an answer. Raises OSError (HTTPError too) while it is not ready, and where it
        refuses."""
        with open(self.log_path, encoding="utf-8", errors="replace") as f:
            assert self.process.poll() is None, f.read()[-3000:]
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=20) as r:
            answer = json.load(r)
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression):
        """[(labels, value)]"""
        return [(s["metric"], float(s["value"][1]))
                for s in self.get("query", query=expression)["result"]]

    def value(self, expression):
        """Of one series."""
        ((_, value), ) = self.query(expression)
        return value


def wait_for(condition, what):
    """As a Cluster's; an answer that does not come yet is one to wait for."""
    def tried():
        try:
            return condition()
        except OSError:
            return False

    Cluster.wait_for(tried, what, 60 * SLOW)


def wait_scrapes(p, n):
    """Until each target was scraped n times from now on: a rate is of two samples at least, and a
    worker's numbers are as old as its last report."""
    scrapes = "count_over_time(up[10m])"
    begin = {labels["pod"]: v for labels, v in p.query(scrapes)}
    wait_for(lambda: all(v >= begin[labels["pod"]] + n for labels, v in p.query(scrapes)),
             f"{n} scrapes of each target")


def send(c):
    """N requests with objectives that are met, of two classes; their number of output tokens."""
    results = []
    for i in range(0, N, 4):
        results += c.generate_many([
            c.request(prompt=f"Once upon a time {k}", max_tokens=12, ignore_eos=True,
                      slo_class=("gold", "bulk")[k % 2]) for k in range(i, i + 4)
        ])
    assert [r.code for r in results] == [grpc.StatusCode.OK] * N, [r.details for r in results]
    return sum(r.usage.output_tokens for r in results)


def check_panels(p):
    """Each expression is taken, and has a number to show, with the labels that its legend names."""
    n = 0
    for panel in json.loads(load("grafana-dashboard.json"))["panels"]:
        for target in panel.get("targets", ()):
            expression = target["expr"].replace("$__rate_interval", WINDOW)
            assert "$" not in expression, expression
            series = p.query(expression)
            assert any(math.isfinite(v) for _, v in series), (panel["title"], expression, series)
            for name in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                told = all(labels.get(name) for labels, _ in series)
                assert told, (panel["title"], name, series)
            n += 1
    assert n >= 29, n


def check_rules(p):
    told = {r["alert"] for g in alert_groups()["groups"] for r in g["rules"]}
    rules = [r for g in p.get("rules")["groups"] for r in g["rules"]]
    assert {r["name"] for r in rules} == told and len(rules) == len(told)
    wait_for(lambda: all(r["health"] != "unknown" for g in p.get("rules")["groups"]
                         for r in g["rules"]), "every rule to be evaluated")
    for r in [r for g in p.get("rules")["groups"] for r in g["rules"]]:
        assert (r["health"], r["state"], r.get("lastError")) == ("ok", "inactive", None), r
    assert p.get("alerts")["alerts"] == []


def test_prometheus(tmp_path):
    ports = {"router": free_port(), "prefill-0": free_port(), "decode-0": free_port(),
             "decode-1": free_port()}
    targets = {pod: (pod.split("-")[0], port) for pod, port in ports.items()}
    classes = "gold:ttft=60000,tpot=60000 bulk:ttft=90000,tpot=60000"
    with Cluster(prefill=0, decode=0, router_args=[
            "--metrics-listen", f"127.0.0.1:{ports['router']}", "--slo-class", classes
    ]) as c:
        for role, port in list(targets.values())[1:]:
            c.start_worker(role, args=["--metrics-listen", f"127.0.0.1:{port}"])
        c.wait_workers(3)
        with Prometheus(str(tmp_path), targets) as p:
            wait_for(lambda: len(p.query("up == 1")) == len(targets), "all targets to be up")
            n_tokens = send(c)
            c.wait_idle()
            wait_scrapes(p, 3)
            assert p.value("td_time_to_first_token_seconds_count") == N
            assert p.value("td_e2e_request_latency_seconds_count") == N
            assert p.value('td_generation_tokens_total{component="router"}') == n_tokens
            assert p.value('td_slo_requests_total{outcome="good"}') == N
            for what in ("td_request_queue_time_seconds_count",
                         'td_slo_class_requests_total{outcome="good"}'):
                by_class = sorted((labels["class"], v) for labels, v in p.query(what))
                assert by_class == [("bulk", N / 2), ("gold", N / 2)], what
            workers = {(labels["role"], labels["state"]): v for labels, v in p.query("td_workers")}
            assert workers == {(role, state): (state == "ready") * (2 if role == "decode" else 1)
                               for role in ("prefill", "decode")
                               for state in ("ready", "suspect", "draining")}
            check_panels(p)
            check_rules(p)
            active = p.get("targets")["activeTargets"]
            assert sorted(t["labels"]["pod"] for t in active) == sorted(targets)
            for t in active:
                assert (t["health"], t["lastError"]) == ("up", ""), t
            assert len(p.query("min_over_time(up[10m]) == 1")) == len(targets)
        assert p.process.returncode == 0
        c.wait_idle()
