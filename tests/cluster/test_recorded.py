"""What other people's clients send, byte for byte (tests/tools/record_clients.py has recorded it):
each request is answered as its client needs it, with the text that tandem.v1 gives."""
import base64
import http.client
import json
import os
import socket

import grpc
import pytest

from harness import PATIENT, SLOW, Cluster
from inference import grpc_service_pb2 as kpb
from test_kserve import tensors
from tool_model import ANSWER, make_tool_model

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "recorded")
SERVICE = "/inference.GRPCInferenceService/"


def load():
    """(id, record) of all files."""
    for name in sorted(os.listdir(HERE)):
        with open(os.path.join(HERE, name), encoding="utf-8") as f:
            for i, line in enumerate(f):
                yield pytest.param(json.loads(line), id=f"{name.removesuffix('.jsonl')}-{i}")


RECORDS = list(load())
# With tools: tests/clients/openai_client.py and langchain_client.py sent them to tool_model.py.
TOOLS = [p for p in RECORDS if "_tools-" in p.id]


@pytest.fixture(scope="module")
def cluster():
    with Cluster(router_args=["--http-listen", "127.0.0.1:0"], **PATIENT) as c:
        c.http_port = int(c.router.wait_log(r"ev=http_ready .*port=(\d+)").group(1))
        yield c
        c.wait_idle()


def test_every_client_is_there():
    tools = {p.id.rsplit("-", 1)[0] for p in RECORDS}
    assert tools == {
        "aiperf", "guidellm", "langchain", "langchain_tools", "open_webui", "openai",
        "openai_tools", "tritonclient", "vllm_bench"
    }


def replay(cluster, record):
    """(status, headers, body); the bytes go out as one write."""
    with socket.create_connection(("127.0.0.1", cluster.http_port), timeout=60 * SLOW) as s:
        s.sendall((record["head"] + record["body"]).encode("latin-1"))
        r = http.client.HTTPResponse(s, method=record["head"].split(" ")[0])
        r.begin()
        return r.status, r.headers, r.read()


def expected_status(record):
    head, body = record["head"], record["body"]
    if "gpt-5" in head.split("\r\n")[0] or '"model":"gpt-5"' in body:
        return 404
    if '"max_tokens":0' in body or "Inference-Header-Content-Length" in head:
        return 400
    return 200


def text_of(content):
    return content if isinstance(content, str) else "\n".join(p["text"] for p in content)


def wanted(cluster, body):
    """What gRPC answers to the same."""
    asked = dict(max_tokens=body.get("max_completion_tokens", body.get("max_tokens")),
                 temperature=0, ignore_eos=body.get("ignore_eos", False),
                 stop=body.get("stop") or ())
    if "messages" in body:
        asked["chat"] = [(m["role"], text_of(m["content"])) for m in body["messages"]]
    else:
        asked["prompt"] = body["prompt"] if isinstance(body["prompt"], str) else body["prompt"][0]
    r = cluster.generate(**asked)
    assert r.code == grpc.StatusCode.OK, r.details
    return r


def events(text):
    lines = text.decode().split("\n\n")
    assert lines[-1] == "" and lines[-2] == "data: [DONE]", lines[-3:]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def piece(choice):
    return choice["text"] if "text" in choice else choice["delta"].get("content") or ""


def check_stream(cluster, body, answer):
    chunks = events(answer)
    want = wanted(cluster, body)
    assert "".join(piece(c["choices"][0]) for c in chunks if c["choices"]) == want.text
    options = body.get("stream_options") or {}
    if options.get("include_usage"):
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == want.usage.output_tokens
    if options.get("continuous_usage_stats"):
        assert all(c["usage"] for c in chunks)


def check_body(cluster, body, answer):
    got = json.loads(answer)
    choice, = got["choices"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    if body.get("temperature") == 0:
        want = wanted(cluster, body)
        assert text == want.text and got["usage"]["completion_tokens"] == want.usage.output_tokens
    elif "response_format" in body and choice["finish_reason"] == "stop":
        assert isinstance(json.loads(text), dict)
    assert got["usage"]["completion_tokens"] <= body.get("max_completion_tokens",
                                                         body.get("max_tokens"))


def check_infer(cluster, answer, body):
    """Of the one prompt that the client has."""
    excludes = any(t["name"] == "exclude_input_in_output" for t in body["inputs"])
    prompt, = [t["data"][0] for t in body["inputs"] if t["name"] == "text_input"]
    want = cluster.generate(prompt=prompt, max_tokens=16, temperature=0).text
    out = {t["name"]: t["data"][0] for t in json.loads(answer)["outputs"]}
    assert out["text_output"] == ("" if excludes else prompt) + want


@pytest.mark.parametrize("record",
                         [p for p in RECORDS if "head" in p.values[0] and p not in TOOLS])
def test_http(cluster, record):
    status, headers, answer = replay(cluster, record)
    method, path, _ = record["head"].split("\r\n")[0].split(" ")
    assert status == expected_status(record), answer
    if status != 200:
        assert "error" in json.loads(answer)
    elif method == "HEAD":
        assert answer == b"" and int(headers["Content-Length"]) > 0
    elif path == "/metrics":
        assert b"td_num_requests_running" in answer
    elif method == "GET":
        assert isinstance(json.loads(answer), dict)
    elif path.startswith("/v2/"):
        check_infer(cluster, answer, json.loads(record["body"]))
    elif json.loads(record["body"]).get("stream"):
        check_stream(cluster, json.loads(record["body"]), answer)
    else:
        check_body(cluster, json.loads(record["body"]), answer)


@pytest.fixture(scope="module")
def tool_cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "pocket"
    folder.mkdir()
    make_tool_model(folder)
    with Cluster(model=str(folder), router_args=["--http-listen", "127.0.0.1:0"], **PATIENT) as c:
        c.http_port = int(c.router.wait_log(r"ev=http_ready .*port=(\d+)").group(1))
        yield c
        c.wait_idle()


def told(body, answer):
    """(content, [(name, arguments)], end) of an answer, whole or as deltas."""
    if not body.get("stream"):
        choice, = json.loads(answer)["choices"]
        parts, ends = [choice["message"]], [choice["finish_reason"]]
    else:
        choices = [x for e in events(answer) for x in e["choices"]]
        parts = [x["delta"] for x in choices]
        ends = [x["finish_reason"] for x in choices if x["finish_reason"]]
    calls = {}
    for i, c in ((c.get("index", i), c) for p in parts
                 for i, c in enumerate(p.get("tool_calls") or [])):
        name, arguments = calls.get(i, (c["function"].get("name"), ""))
        calls[i] = name, arguments + (c["function"].get("arguments") or "")
    end, = ends
    return "".join(p.get("content") or "" for p in parts), list(calls.values()), end


@pytest.mark.parametrize("record", TOOLS)
def test_tools(tool_cluster, record):
    status, _, answer = replay(tool_cluster, record)
    assert status == 200, answer
    if not record["body"]:
        assert json.loads(answer)["data"][0]["id"] == "pocket"
        return
    body = json.loads(record["body"])
    content, calls, end = told(body, answer)
    choice = body.get("tool_choice", "auto")
    if choice == "auto":
        assert (content, calls, end) == ("Hi ", [("get", '{"x": 1}'), ("put", "{}")], "tool_calls")
    elif choice == "none":
        assert content == ANSWER.split("</think>\n\n")[1] and not calls and end == "stop"
    else:  # by name: its arguments are its schema's
        (name, arguments), = calls
        assert name == choice["function"]["name"] and not content and end == "tool_calls"
        parameters, = [t["function"]["parameters"] for t in body["tools"]
                       if t["function"]["name"] == name]
        assert list(json.loads(arguments)) == parameters["required"]


def check_inferences(cluster, requests, answers):
    """Each request's pieces are its text, whatever order the requests' answers have."""
    texts = {}
    for r in answers:
        texts[r.id] = texts.get(r.id, "") + tensors(r)["text_output"]
    for r in requests:
        flags = {t.name: raw == b"\1" for t, raw in zip(r.inputs, r.raw_input_contents)}
        prompt = r.raw_input_contents[0][4:].decode()
        excludes = flags.get("exclude_input_in_output") or flags.get("stream")
        want = cluster.generate(prompt=prompt, max_tokens=16, temperature=0).text
        assert texts.pop(r.id) == ("" if excludes else prompt) + want
    assert not texts


@pytest.mark.parametrize("record", [p for p in RECORDS if "method" in p.values[0]])
def test_grpc(cluster, record):
    method, messages = record["method"], [base64.b64decode(m) for m in record["messages"]]
    is_stream = method == SERVICE + "ModelStreamInfer"
    requests = [kpb.ModelInferRequest.FromString(m) for m in messages if "Infer" in method]
    answers = list(cluster.channel.stream_stream(method)(iter(messages), timeout=60 * SLOW))
    if is_stream:
        read = [kpb.ModelStreamInferResponse.FromString(a) for a in answers]
        wrong = [a for a in read if a.error_message]
        refused = [r for r in requests if "temperature" in r.parameters]
        assert len(wrong) == len(refused) and all("temperature" in a.error_message for a in wrong)
        check_inferences(cluster, [r for r in requests if r not in refused],
                         [a.infer_response for a in read if not a.error_message])
        return
    assert len(answers) == 1
    if method == SERVICE + "ModelInfer":
        check_inferences(cluster, requests, [kpb.ModelInferResponse.FromString(answers[0])])
    elif method == SERVICE + "ModelReady":
        asked = kpb.ModelReadyRequest.FromString(messages[0]).name
        assert kpb.ModelReadyResponse.FromString(answers[0]).ready == (asked == "pocket")
    else:
        assert answers[0]
