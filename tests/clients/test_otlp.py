"""OpenTelemetry's own messages take the router's spans, and a program that traces with its SDK
finds them in its trace. Both are from PyPI (opentelemetry-proto, opentelemetry-sdk)."""
import json
import os
import subprocess
import urllib.error
import urllib.request

import grpc
import pytest

from installed import HERE, SLOW, Cluster, installed, run

OK = grpc.StatusCode.OK
PROGRAM = os.path.join(HERE, "otlp_receiver.py")
STAGES = ["router_queue", "reserve", "prefill_queue", "prefill", "rpc", "decode"]


class Receiver:
    def __init__(self, bin_dir, path):
        self.path = path
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        self.process = subprocess.Popen([os.path.join(bin_dir, "python"), PROGRAM, path], env=env,
                                        stdin=subprocess.DEVNULL)

    def __enter__(self):
        Cluster.wait_for(lambda: self.lines(), "the receiver", 30 * SLOW)
        self.url = f"http://127.0.0.1:{self.lines()[0].split()[1]}/v1/traces"
        return self

    def __exit__(self, exc_type, exc, tb):
        self.process.kill()
        self.process.wait()

    def lines(self):
        """Those that are whole."""
        assert self.process.poll() is None, self.process.returncode
        if not os.path.exists(self.path):
            return []
        with open(self.path, encoding="utf-8") as f:
            return [line for line in f if line.endswith("\n")]

    def spans(self):
        told = [json.loads(line) for line in self.lines()[1:]]
        refused = [t for t in told if "refused" in t]
        assert not refused, refused[0]
        return told


def by_request(spans):
    """{request id: its span}"""
    return {s["attributes"]["tandem.request_id"]: s for s in spans if s["name"] == "request"}


def check_stages(root, spans):
    """The ledger's stages, one behind the other, from the request's begin to its end."""
    stages = [s for s in spans if s["parent"] == root["span"]]
    assert [s["name"] for s in stages] == STAGES
    at = root["begin"]
    for s in stages:
        assert (s["trace"], s["begin"], s["kind"]) == (root["trace"], at, "SPAN_KIND_INTERNAL"), s
        at = s["end"]
    assert at == root["end"] > root["begin"]


def check_receiver(r):
    """It refuses what OpenTelemetry's messages do not hold."""
    span = {"traceId": "00" * 16, "spanId": "00" * 8, "name": "x", "startTimeUnixNano": "1"}
    for wrong in ({"nosuch": 1}, {"startTimeUnixNano": "soon"}, {"traceId": "xy"}, {"name": 7}):
        body = {"resourceSpans": [{"scopeSpans": [{"spans": [{**span, **wrong}]}]}]}
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(urllib.request.Request(r.url, json.dumps(body).encode()))


def test_spans_are_taken(tmp_path, tmp_path_factory):
    home = installed(tmp_path_factory, "opentelemetry-proto", "opentelemetry-sdk")
    with Receiver(home, str(tmp_path / "spans")) as r, Cluster(
            router_args=["--otlp-endpoint", r.url, "--http-listen", "127.0.0.1:0"]) as c:
        port = c.router.wait_log(r"ev=http_ready .*port=(\d+)").group(1)
        trace, parent = run(home, "python", PROGRAM, "call", f"http://127.0.0.1:{port}").split()
        assert c.generate(prompt="Once", max_tokens=1, request_id="one-token").code == OK
        assert c.generate(prompt="Once", max_tokens=1 << 30,
                          request_id="refused").code == grpc.StatusCode.INVALID_ARGUMENT
        left = c.stream(
            c.request(prompt="Once", max_tokens=1500, ignore_eos=True, request_id="left"))
        next(left)
        left.cancel()
        c.wait_for(lambda: {"by-sdk", "one-token", "left"} <= set(by_request(r.spans())),
                   "the spans of three requests", 20 * SLOW)
        spans, roots = r.spans(), by_request(r.spans())
        check_receiver(r)
    for root in roots.values():
        assert root["resource"]["service.name"] == "tandem-router"
        assert root["kind"] == "SPAN_KIND_SERVER" and root["end"] >= root["begin"] > 0
    for name in ("by-sdk", "one-token"):
        check_stages(roots[name], spans)
        assert roots[name]["status"] == "STATUS_CODE_UNSET"
    assert (roots["by-sdk"]["trace"], roots["by-sdk"]["parent"]) == (trace, parent)
    assert roots["one-token"]["parent"] == "" and roots["one-token"]["trace"] != trace
    told = roots["by-sdk"]["attributes"]
    assert told["gen_ai.usage.output_tokens"] == 6 and told["gen_ai.usage.input_tokens"] > 0
    assert (told["tandem.prefill_worker"], told["tandem.decode_worker"]) == ("prefill-0",
                                                                             "decode-0")
    assert roots["left"]["status"] == "STATUS_CODE_ERROR"
    assert len({s["span"] for s in spans}) == len(spans)
