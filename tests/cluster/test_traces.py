"""OTLP traces over HTTP/JSON: the spans of a request add up, belong to the caller's trace, and a
receiver that is slow, wrong or away costs no request."""
import collections
import http.server
import json
import re
import socket
import threading
import time

import grpc

from harness import Cluster, free_port
from test_metrics import scrape

OK = grpc.StatusCode.OK
STAGES = ["router_queue", "reserve", "prefill_queue", "prefill", "rpc", "decode"]
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Receiver:
    """Takes POST /v1/traces and checks each body against OTLP's JSON form."""
    def __init__(self, status=200):
        receiver = self
        self.spans, self.wrong, self.status = [], [], status

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                try:
                    assert self.path == "/v1/traces", self.path
                    assert self.headers["Content-Type"] == "application/json"
                    receiver.take(json.loads(body))
                except (AssertionError, KeyError, ValueError) as e:
                    receiver.wrong.append(repr(e))
                self.send_response(receiver.status)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def take(self, body):
        assert list(body) == ["resourceSpans"]
        for rs in body["resourceSpans"]:
            service = {a["key"]: a["value"] for a in rs["resource"]["attributes"]}
            assert service["service.name"] == {"stringValue": "tandem-router"}
            for scope in rs["scopeSpans"]:
                for s in scope["spans"]:
                    check_span(s)
                    self.spans.append(s)

    def close(self):
        self.server.shutdown()
        self.server.server_close()


def check_span(s):
    known = {"traceId", "spanId", "parentSpanId", "name", "kind", "startTimeUnixNano",
             "endTimeUnixNano", "attributes", "status"}
    assert set(s) <= known, s
    assert re.fullmatch("[0-9a-f]{32}", s["traceId"]) and re.fullmatch("[0-9a-f]{16}", s["spanId"])
    assert "parentSpanId" not in s or re.fullmatch("[0-9a-f]{16}", s["parentSpanId"])
    for key in ("startTimeUnixNano", "endTimeUnixNano"):
        assert re.fullmatch("[0-9]+", s[key]), s
    for a in s["attributes"]:
        (kind, value), = a["value"].items()
        assert kind in ("stringValue", "intValue") and isinstance(value, str), a


def tell(s):
    return {a["key"]: next(iter(a["value"].values())) for a in s["attributes"]}


def nanos(s):
    return int(s["endTimeUnixNano"]) - int(s["startTimeUnixNano"])


def trace_of(spans, request_id):
    """The request's span and its stages, in order; they add up, with no gap."""
    root, = (s for s in spans if tell(s).get("tandem.request_id") == request_id)
    stages = [s for s in spans if s.get("parentSpanId") == root["spanId"]]
    assert [s["name"] for s in stages] == STAGES, stages
    assert sum(map(nanos, stages)) == nanos(root)
    at = root["startTimeUnixNano"]
    for s in stages:
        assert s["startTimeUnixNano"] == at and s["traceId"] == root["traceId"]
        at = s["endTimeUnixNano"]
    assert at == root["endTimeUnixNano"]
    return root, stages


def roots(receiver):
    return [s for s in receiver.spans if s["name"] == "request"]


def test_spans_add_up():
    receiver = Receiver()
    with Cluster(router_args=["--otlp-endpoint", receiver.url, "--http-listen",
                              "127.0.0.1:0"]) as c:
        begin = time.time()
        answers = {}
        for name, header in (("of-a-caller", f"00-{TRACE}-{PARENT}-01"),
                             ("not-sampled", f"00-{TRACE}-{PARENT}-00"),
                             ("bad-header", f"00-{TRACE}-{PARENT}-01-x"), ('"<ü>"', None)):
            metadata = [("traceparent", header)] if header else []
            *_, last = c.stream(c.request(prompt="Once upon", max_tokens=8, ignore_eos=True,
                                          request_id=name), metadata=metadata)
            answers[name] = last
        port = c.router.wait_log(r"ev=http_ready .*port=(\d+)").group(1)
        body = b'{"prompt": "Once", "max_tokens": 4}'
        with socket.create_connection(("127.0.0.1", int(port))) as s:
            head = (f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: by-http\r\n"
                    f"Connection: close\r\nContent-Length: {len(body)}\r\n"
                    f"Traceparent: 00-{TRACE}-{PARENT}-01\r\n\r\n")
            s.sendall(head.encode() + body)
            answer = b"".join(iter(lambda: s.recv(65536), b""))
        assert b" 200 " in answer.split(b"\r\n")[0], answer
        stream = c.stream(c.request(prompt="Once", max_tokens=1500, ignore_eos=True,
                                    request_id="left"))
        next(stream)
        stream.cancel()
        c.wait_for(lambda: len(roots(receiver)) == 5, "the spans of five requests", 10)
        end = time.time()
    receiver.close()
    assert not receiver.wrong, receiver.wrong[:3]
    ended = {tell(s)["tandem.request_id"]: s for s in roots(receiver)}
    assert set(ended) == {"of-a-caller", "bad-header", '"<ü>"', "by-http", "left"}
    for name, root in ended.items():
        is_of_caller = name in ("of-a-caller", "by-http")
        assert (root["traceId"] == TRACE) == is_of_caller
        assert root.get("parentSpanId") == (PARENT if is_of_caller else None)
        assert begin - 1 < int(root["startTimeUnixNano"]) / 1e9 < end + 1
        if name == "left":
            assert root["status"] == {"code": 2} and nanos(root) > 0
            continue
        _, stages = trace_of(receiver.spans, name)
        if name in answers:
            ledger = answers[name].ledger
            assert [nanos(s) // 1000 for s in stages[:5]] == [
                getattr(ledger, f"{stage}_us") for stage in STAGES[:5]
            ]
            assert nanos(root) == ledger.e2e_us * 1000
            assert tell(root)["gen_ai.usage.output_tokens"] == "8"
            assert tell(stages[3])["tandem.worker"] == ledger.prefill_worker
    counts = collections.Counter(s["spanId"] for s in receiver.spans)
    assert max(counts.values()) == 1


def test_workers_log_the_trace():
    """A receiver of spans need not be there; colocated, the decode worker alone is told."""
    for args, roles in (([], ("prefill", "decode")), (["--mode", "colocated"], ("decode", ))):
        with Cluster(router_args=args,
                     worker_args=["--log-level", "debug", "--log-format", "json"]) as c:
            for header in (f"00-{TRACE}-{PARENT}-00", f"00-{TRACE}-{PARENT}-01-x"):
                *_, last = c.stream(c.request(prompt="Once upon", max_tokens=4),
                                    metadata=[("traceparent", header)])
                assert last.ledger.e2e_us > 0
            for role in roles:
                with open(c.workers[f"{role}-0"].log_path, encoding="utf-8") as f:
                    lines = [json.loads(line) for line in f]
                taken = [x for x in lines if x["ev"] == "request_taken"]
                assert [x.get("trace_id") for x in taken] == [TRACE, None], taken
                of_it = [x["ev"] for x in lines if x.get("trace_id") == TRACE]
                begun = {"prefill": "kv_push_started", "decode": "kv_granted"}[role]
                assert (begun in of_it) == (len(roles) == 2), of_it
                assert {x["req"] for x in lines if x.get("trace_id")} == {taken[0]["req"]}


def lost(port):
    return scrape(port)['td_trace_dropped_total{reason="not_taken"}']


def test_a_bad_receiver_costs_nothing():
    """One that never answers, one that is not there, one that refuses: requests go on, and what was
    lost is counted."""
    with socket.create_server(("127.0.0.1", 0), backlog=1) as silent:
        refusing = Receiver(status=503)
        for url in (f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces",
                    f"http://127.0.0.1:{free_port()}/v1/traces", refusing.url):
            port = free_port()
            with Cluster(router_args=["--otlp-endpoint", url, "--metrics-listen",
                                      f"127.0.0.1:{port}"]) as c:
                for _ in range(20):
                    assert c.generate(prompt="Once", max_tokens=2).code == OK
                c.wait_for(lambda: lost(port) >= 1, f"what {url} lost", 15)  # noqa: B023
                assert scrape(port)["td_trace_sent_total"] == 0
                assert c.generate(prompt="Once", max_tokens=2).code == OK
        refusing.close()


def test_the_log_keeps_what_the_address_holds_to_itself():
    """A user and a password, or a key behind the path."""
    at = f"127.0.0.1:{free_port()}"
    with Cluster(router_args=["--otlp-endpoint",
                              f"http://me:hidden@{at}/v1/traces?key=hidden#hidden"]) as c:
        shown = c.router.wait_log(r"ev=traces_on endpoint=(\S+)").group(1)
        assert shown.strip('"') == f"http://{at}"
        assert c.generate(prompt="Once", max_tokens=1).code == OK
        assert "hidden" not in c.router.log()


def test_sampling():
    receiver = Receiver()
    with Cluster(router_args=["--otlp-endpoint", receiver.url, "--trace-sample", 5]) as c:
        for _ in range(20):
            assert c.generate(prompt="Once", max_tokens=1).code == OK
        c.wait_for(lambda: len(roots(receiver)) >= 4, "the spans of four requests", 10)
    receiver.close()
    assert len(roots(receiver)) == 4 and not receiver.wrong


def test_variables_of_all_programs_keep_no_router_from_serving(monkeypatch):
    """OpenTelemetry's variables name a receiver of gRPC on many hosts, without http://."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4317")
    with Cluster() as c:
        assert "http://" in c.router.wait_log(r"ev=traces_off reason=(.*)").group(1)
        assert c.generate(prompt="Once", max_tokens=1).code == OK
