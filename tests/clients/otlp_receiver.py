"""An OTLP/HTTP receiver whose messages are OpenTelemetry's own (PyPI: opentelemetry-proto), and a
caller that traces (opentelemetry-sdk). Run by test_otlp.py:

    otlp_receiver.py OUT         writes "port N", then a line of JSON for each span; until SIGTERM
    otlp_receiver.py call URL    asks URL/v1/completions from within a span: its trace's and its id
"""
import base64
import http.server
import json
import sys
import urllib.request

SPAN_IDS = ("traceId", "spanId", "parentSpanId")


def as_protobuf_json(value):
    """OTLP's JSON is protobuf's but for the ids, which are hexadecimal there and base64 here (OTLP
    specification, "JSON Protobuf Encoding")."""
    if isinstance(value, list):
        return [as_protobuf_json(v) for v in value]
    if not isinstance(value, dict):
        return value
    return {
        k: base64.b64encode(bytes.fromhex(v)).decode() if k in SPAN_IDS else as_protobuf_json(v)
        for k, v in value.items()
    }


def attributes(list_of):
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in list_of}


def spans_of(request):
    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            for s in scope.spans:
                yield {
                    "resource": attributes(resource.resource.attributes), "trace": s.trace_id.hex(),
                    "span": s.span_id.hex(), "parent": s.parent_span_id.hex(), "name": s.name,
                    "kind": s.SpanKind.Name(s.kind), "begin": s.start_time_unix_nano,
                    "end": s.end_time_unix_nano, "status": s.status.StatusCode.Name(
                        s.status.code), "attributes": attributes(s.attributes)
                }


def receive(path):
    from google.protobuf import json_format
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb

    out = open(path, "w", encoding="utf-8", buffering=1)  # until the end of the program

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            try:  # strict: a field that OpenTelemetry's message lacks is an error
                request = json_format.ParseDict(as_protobuf_json(json.loads(body)),
                                                pb.ExportTraceServiceRequest())
                for span in spans_of(request):
                    out.write(json.dumps(span) + "\n")
                status, answer = 200, json_format.MessageToJson(pb.ExportTraceServiceResponse())
            except (json_format.ParseError, ValueError, KeyError) as e:
                out.write(json.dumps({"refused": repr(e), "body": body.decode()}) + "\n")
                status, answer = 400, "{}"
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer.encode())

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    out.write(f"port {server.server_port}\n")
    server.serve_forever()


def call(url):
    from opentelemetry.propagate import inject
    from opentelemetry.sdk.trace import TracerProvider

    with TracerProvider().get_tracer("caller").start_as_current_span("ask") as span:
        headers = {"Content-Type": "application/json", "X-Request-Id": "by-sdk"}
        inject(headers)
        request = urllib.request.Request(
            f"{url}/v1/completions",
            json.dumps({"prompt": "Once upon", "max_tokens": 6, "ignore_eos": True}).encode(),
            headers)
        with urllib.request.urlopen(request, timeout=60) as r:
            json.load(r)
        c = span.get_span_context()
        print(f"{c.trace_id:032x} {c.span_id:016x}")


if __name__ == "__main__":
    call(sys.argv[2]) if sys.argv[1] == "call" else receive(sys.argv[1])
