"""The HTTP door: OpenAI's API gives what gRPC gives, says what it refuses, and frees what its
client leaves."""
import json
import os
import re
import socket
import struct
import threading
import time
import urllib.error
import urllib.request

import grpc
import pytest

from harness import BIN, PATIENT, SHORT, SLOW, Cluster, pb
from test_review import FakeWorker, n_of, out, tokens

OK = grpc.StatusCode.OK
TALE = "Once upon a time"
# Connections take 16 KiB, so that a reader is soon behind, and may be so for ten minutes: a busy
# machine has taken longer than the usual 30 s to make what a reader waits for.
SLOW_READERS = ["--test-http-send-bytes", 16384, "--test-http-request-ms", 600000]


class Http:
    def __init__(self, cluster):
        self.port = int(cluster.router.wait_log(r"ev=http_ready .*port=(\d+)").group(1))

    def ask(self, path, body=None, headers=()):
        """(status, headers, bytes) of one request."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data=None if body is None else
            body if isinstance(body, bytes) else json.dumps(body).encode(), headers=dict(headers))
        try:
            with urllib.request.urlopen(request, timeout=60 * SLOW) as r:
                return r.status, r.headers, r.read()
        except urllib.error.HTTPError as e:
            return e.code, e.headers, e.read()

    def json(self, path, body=None, headers=()):
        status, _, text = self.ask(path, body, headers)
        return status, json.loads(text)

    def events(self, path, body):
        status, headers, text = self.ask(path, {**body, "stream": True})
        assert status == 200 and headers["Content-Type"].startswith("text/event-stream"), text
        lines = text.decode().split("\n\n")
        assert lines[-1] == "" and lines[-2] == "data: [DONE]", lines[-3:]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


@pytest.fixture
def http_with_small_buffers():
    """A cluster of its own for slow readers."""
    args = ["--http-listen", "127.0.0.1:0", *SLOW_READERS]
    with Cluster(router_args=args, **PATIENT) as c:
        c.http = Http(c)
        yield c


@pytest.fixture(scope="module")
def cluster():
    with Cluster(router_args=["--http-listen", "127.0.0.1:0"], **PATIENT) as c:
        c.http = Http(c)
        yield c
        c.wait_idle()


def n_data_segments(s):
    """Segments with data that this socket got (tcp_info.tcpi_data_segs_in); None: not told."""
    info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 160)
    n = struct.unpack_from("I", info, 152)[0] if len(info) == 160 else 0
    return n or None


def test_a_stream_has_no_segments_of_its_own_for_head_and_end(cluster):
    """The head comes with the first event, and the body's end with the last: also on a connection
    that is new, on which the library sets TCP_NODELAY in between."""
    asked = {"prompt": TALE, "max_tokens": 4, "ignore_eos": True, "stream": True}
    body = json.dumps(asked).encode()
    extra = []
    for _ in range(3):  # a segment that the kernel sends again counts, too
        with socket.create_connection(("127.0.0.1", cluster.http.port), timeout=60 * SLOW) as s:
            before = 0
            for turn in range(2):
                s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
                          % len(body) + body)
                data = b""
                while not data.endswith(b"\r\n0\r\n\r\n"):
                    more = s.recv(65536)
                    assert more, data
                    data += more
                n = n_data_segments(s)
                if n is None:
                    pytest.skip("the kernel does not count a connection's segments")
                n_chunks = len(re.findall(rb"\r\n[0-9a-fA-F]+\r\ndata: ", data))
                assert 1 <= n_chunks <= 5, data
                extra.append((n - before - n_chunks, turn))
                before = n
    assert min(e for e, turn in extra if turn == 0) <= 0, extra
    assert min(e for e, turn in extra if turn == 1) <= 0, extra


def n_sleeps(pid, name):
    """How often the thread of that name has waited for something."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/status", encoding="ascii") as f:
            status = dict(line.split(":", 1) for line in f)
        if status["Name"].strip() == name:
            return int(status["voluntary_ctxt_switches"])
    raise AssertionError(f"no thread {name}")


class LoneClient:
    """One connection, one request at a time."""
    def __init__(self, port):
        body = json.dumps({"prompt": TALE, "max_tokens": 1, "temperature": 0}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        self.request = head.encode() + body
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60 * SLOW)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def ask(self):
        self.socket.sendall(self.request)
        answer = b""
        while not answer.endswith(b"}"):
            more = self.socket.recv(65536)
            assert more, answer
            answer += more
        assert answer.startswith(b"HTTP/1.1 200 OK"), answer


def test_a_lone_answer_wakes_no_second_thread(cluster):
    """The HTTP library's thread wakes for a request, and not for its answer, which the loop's
    thread has the library write. With two wakes for each this counts twice as many."""
    n, pid = 100, cluster.router.process.pid
    with LoneClient(cluster.http.port) as client:
        for _ in range(5):
            client.ask()
        begin, before = time.monotonic(), n_sleeps(pid, "http")
        for _ in range(n):
            client.ask()
        # once a second it looks by itself
        assert n_sleeps(pid, "http") - before < 1.5 * n + 2 * (time.monotonic() - begin)


@pytest.mark.skipif(bool(os.environ.get("TANDEM_TEST_SANITIZER")),
                    reason="the sanitizer's runtime must be loaded first")
def test_requests_are_answered_where_they_cannot_be_watched_for():
    """For a second the kernel refuses to watch the library's sockets for the router: requests are
    seen some milliseconds late then, where the router once ended itself."""
    preload = os.path.join(os.path.dirname(BIN), "lib", "libtd_unwatched.so")
    with Cluster(router_args=["--http-listen", "127.0.0.1:0"],
                 envs={"router": {"LD_PRELOAD": preload}}, **PATIENT) as c:
        with LoneClient(Http(c).port) as client:
            begin, n = time.monotonic(), 0
            while "ev=http_watched" not in c.router.log() and n < 2000:
                client.ask()
                n += 1
            assert c.router.log().count("ev=http_unwatched") == 1
            # at a second each, as where only the clock wakes it, there would be one or two
            assert n > 5 and time.monotonic() - begin < 60 * SLOW, n


@pytest.mark.skipif(bool(os.environ.get("TANDEM_TEST_SANITIZER")),
                    reason="the sanitizer's runtime must be loaded first")
def test_grpc_sets_its_options_on_the_librarys_thread():
    """That one starts a lone client's calls to workers, and gRPC may connect there: without
    TCP_NODELAY, which is kept from the HTTP library, it would give the connection up."""
    preload = os.path.join(os.path.dirname(BIN), "lib", "libtd_no_delay.so")
    with Cluster(router_args=["--http-listen", "127.0.0.1:0"],
                 envs={"router": {"LD_PRELOAD": preload}}, **PATIENT) as c:
        with LoneClient(Http(c).port) as client:
            for _ in range(20):
                client.ask()
        log = c.router.log()
        assert "no_delay is set" in log and "no_delay is lost" not in log


def test_streams_of_one_step(cluster):
    """More streams than are sent to one by one: each has its own tokens, in order, and its end."""
    n, asked = 20, {"prompt": TALE, "max_tokens": 12, "temperature": 1.0, "ignore_eos": True}
    got = [None] * n

    def stream(i):
        events = cluster.http.events("/v1/completions", {**asked, "seed": i})
        got[i] = ("".join(e["choices"][0]["text"] for e in events),
                  [e["choices"][0]["finish_reason"] for e in events][-1])

    threads = [threading.Thread(target=stream, args=(i, )) for i in range(n)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    _, want = cluster.http.json("/v1/completions", {**asked, "seed": 0, "n": n})
    assert got == [(c["text"], "length") for c in want["choices"]]


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.2, "seed": 7},
                                      {"temperature": 0.8, "seed": 11, "top_k": 20, "top_p": 0.9}])
def test_completions_equal_grpc(cluster, sampling):
    want = cluster.generate(prompt=TALE, max_tokens=24, **sampling)
    assert want.code == OK
    body = {"prompt": TALE, "max_tokens": 24, **sampling}
    status, got = cluster.http.json("/v1/completions", body)
    assert status == 200 and got["choices"][0]["text"] == want.text
    assert got["usage"]["completion_tokens"] == want.usage.output_tokens
    assert got["usage"]["prompt_tokens"] == want.usage.prompt_tokens
    length = want.finish == pb.FINISH_LENGTH
    assert got["choices"][0]["finish_reason"] == ("length" if length else "stop")
    events = cluster.http.events("/v1/completions", body)
    assert "".join(e["choices"][0]["text"] for e in events) == want.text
    assert [e["choices"][0]["finish_reason"] for e in events][:-1] == [None] * (len(events) - 1)


def test_chat_streams_what_it_answers(cluster):
    body = {
        "messages": [{"role": "system", "content": "You tell stories."}, {
            "role": "user", "content": [{"type": "text", "text": "Tell "},
                                        {"type": "text", "text": "me one."}]
        }], "max_completion_tokens": 20, "temperature": 0
    }
    status, whole = cluster.http.json("/v1/chat/completions", body)
    assert status == 200 and whole["object"] == "chat.completion"
    message = whole["choices"][0]["message"]
    assert message["role"] == "assistant" and message["content"]
    events = cluster.http.events("/v1/chat/completions",
                                 {**body, "stream_options": {"include_usage": True,
                                                              "include_ledger": True}})
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("role" not in e["choices"][0]["delta"] for e in events[1:-1])
    text = "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1])
    assert text == message["content"]
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == \
        whole["usage"]["completion_tokens"]
    ledger = events[-1]["ledger"]
    assert ledger["ttft_us"] == sum(
        ledger[x + "_us"] for x in ("router_queue", "reserve", "prefill_queue", "prefill", "rpc"))
    assert 0 < ledger["ttft_us"] <= ledger["e2e_us"] and ledger["mode"] in ("pd", "colocated")
    assert ledger["transfer_path"] and not [x for x in ledger if "worker" in x]
    assert not [e for e in events[:-1] if "ledger" in e]
    alone = cluster.http.events("/v1/chat/completions",
                                {**body, "stream_options": {"include_ledger": True}})
    assert alone[-1]["choices"] == [] and "usage" not in alone[-1] and "ledger" in alone[-1]
    assert len({e["id"] for e in events}) == 1 and events[0]["id"].startswith("chatcmpl-")


def test_logprobs_equal_grpc(cluster):
    want = cluster.generate(prompt=TALE, max_tokens=6, temperature=0, logprobs=2)
    _, got = cluster.http.json("/v1/completions",
                               {"prompt": TALE, "max_tokens": 6, "temperature": 0, "logprobs": 2})
    p = got["choices"][0]["logprobs"]
    assert "".join(p["tokens"]) == want.text == got["choices"][0]["text"]
    assert p["token_logprobs"] == pytest.approx([lp for lp, _ in want.logprobs], rel=1e-6)
    assert [len(x) for x in p["top_logprobs"]] == [2] * 6
    offsets = [sum(map(len, p["tokens"][:i])) for i in range(6)]
    assert p["text_offset"] == offsets
    # text that is held back, because a stop string may begin with it, moves no offset
    text = got["choices"][0]["text"]
    ask = {"prompt": TALE, "max_tokens": 6, "temperature": 0, "logprobs": 0,
           "stop": [c + "\x01" for c in set(text)]}
    _, held = cluster.http.json("/v1/completions", ask)
    assert held["choices"][0]["text"] == text
    assert held["choices"][0]["logprobs"]["text_offset"] == offsets
    streamed = [
        e["choices"][0]["logprobs"] for e in cluster.http.events("/v1/completions", ask)
        if e["choices"] and e["choices"][0]["logprobs"]
    ]
    assert sum((x["text_offset"] for x in streamed), []) == offsets
    # the token itself is always among the alternatives
    _, got = cluster.http.json("/v1/completions", {
        "prompt": TALE, "max_tokens": 24, "temperature": 2, "seed": 5, "logprobs": 1
    })
    p = got["choices"][0]["logprobs"]
    for token, logprob, best in zip(p["tokens"], p["token_logprobs"], p["top_logprobs"]):
        assert best[token] == logprob and len(best) <= 2
    assert max(map(len, p["top_logprobs"])) == 2
    _, got = cluster.http.json(
        "/v1/chat/completions", {
            "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0,
            "logprobs": True, "top_logprobs": 3
        })
    content = got["choices"][0]["logprobs"]["content"]
    assert len(content) == 3 and all(len(x["top_logprobs"]) == 3 for x in content)
    assert all(bytes(x["bytes"]).decode() == x["token"] for x in content)
    assert all(x["logprob"] == x["top_logprobs"][0]["logprob"] for x in content)


@pytest.mark.parametrize(
    "path, body, status, param, words",
    [("/v1/completions", {"prompt": TALE, "max_tokens": 0}, 400, "max_tokens", "must be 1.."),
     ("/v1/completions", {"prompt": TALE, "temperature": -1}, 400, "temperature", "temperature is"),
     ("/v1/completions", {"prompt": TALE, "temperature": "hot"}, 400, "temperature", "must be"),
     ("/v1/completions", {"prompt": TALE, "logit_bias": {"99999": 1}}, 400, "logit_bias", "token"),
     ("/v1/completions", {"prompt": TALE, "logprobs": 21}, 400, "logprobs", "must be in [-1, 20]"),
     ("/v1/completions", {"prompt": TALE, "guided_regex": "("}, 400, "guided_regex", "guided"),
     ("/v1/completions", {"prompt": TALE, "response_format": {
         "type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "odd"}}
     }}, 400, "response_format", "guided"),
     ("/v1/completions", {"prompt": TALE, "response_format": {
         "type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {"pattern": "a"}}}
     }}, 400, "response_format", "the keyword not is supported for"),
     ("/v1/completions", {"prompt": TALE, "guided_json": {"$dynamicRef": "#x"}}, 400,
      "guided_json", "the keyword $dynamicRef is not supported"),
     ("/v1/completions", {"prompt": [5, -1]}, 400, "prompt", "token_ids[1] is -1"),
     ("/v1/completions", {"prompt": TALE, "prompt_logprobs": 1, "stream": True}, 400,
      "prompt_logprobs", "prompt_logprobs cannot be streamed"),
     ("/tokenize", {"prompt": ["a", "b"]}, 400, "prompt", "is a list of 2 prompts"),
     ("/v1/completions", {"prompt": 7}, 400, "prompt", "must be a string"),
     ("/v1/completions", {}, 400, "prompt", "must be a string"),
     ("/v1/completions", {"prompt": ""}, 400, "prompt", "prompt is empty"),
     ("/v1/completions", {"prompt": TALE, "model": "gpt"}, 404, None, "is not served here"),
     ("/v1/completions", b"{", 400, None, "line 1"),
     ("/v1/completions", b"[]", 400, None, "must be a JSON object"),
     ("/v1/completions", b"", 400, None, "request body"),
     pytest.param("/v1/completions", b"[" * 100000, 400, None, "maximum parsing depth", id="deep"),
     ("/v1/completions", b'{"prompt":"\xff"}', 400, None, "decode byte 0xff"),
     ("/v1/chat/completions", {"messages": []}, 400, "messages", "is empty"),
     ("/v1/chat/completions", {"messages": [{"role": "wizard", "content": "x"}]
                               }, 400, "messages", "wizard"),
     ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]
                               }, 400, "messages", "[0].content[0]"),
     ("/v1/chat/completions", {
         "messages": [{"role": "user", "content": "x"}], "tool_choice": "any"
     }, 400, "tool_choice", "must be none, auto, required or"),
     ("/v1/chat/completions", {
         "messages": [{"role": "user", "content": "x"}], "response_format": {"type": "xml"}
     }, 400, "response_format", "must be of type"),
     ("/v1/nothing", {}, 404, None, "not served here"),
     ("/v1/models", {}, 405, None, "not served here"), ])
def test_refusals_name_the_field(cluster, path, body, status, param, words):
    got, text = cluster.http.json(path, body)
    error = text["error"]
    assert (got, error["code"], error["param"]) == (status, status, param), text
    assert words in error["message"], text


def test_one_model(cluster):
    _, listed = cluster.http.json("/v1/models")
    assert cluster.http.json("/v1/models/pocket") == (200, listed["data"][0])
    status, said = cluster.http.json("/v1/models/gpt-5")
    assert status == 404 and "pocket" in said["error"]["message"], said
    for path in ("/v1/models", "/v1/models/pocket"):
        status, headers, _ = cluster.http.ask(path, b"{}")
        assert status == 405 and headers["Allow"] == "GET", path
    status, headers, _ = cluster.http.ask("/v2/models/pocket/infer")
    assert status == 405 and headers["Allow"] == "POST"


def test_what_asks_for_nothing_passes(cluster):
    body = {
        "prompt": TALE, "max_tokens": 2, "temperature": 0, "n": 1, "best_of": 1, "tools": [],
        "response_format": {"type": "text"}, "stop": None, "seed": None, "user": "me", "metadata": {
            "a": "b"
        }, "store": False, "echo": False, "service_tier": "auto", "invented": [1, 2]
    }
    status, got = cluster.http.json("/v1/completions", body)
    assert status == 200 and got["usage"]["completion_tokens"] == 2


SCHEMA = {
    "type": "object", "properties": {
        "name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}
    }, "required": ["name", "age"], "additionalProperties": False
}


@pytest.mark.parametrize(
    "fields",
    [{"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, {
        "guided_json": SCHEMA
    }, {"guided_json": json.dumps(SCHEMA)}, {"structured_outputs": {"json": SCHEMA}}])
def test_structured_output(cluster, fields):
    body = {"prompt": TALE, "max_tokens": 60, "temperature": 1, "seed": 3, **fields}
    status, got = cluster.http.json("/v1/completions", body)
    choice = got["choices"][0]
    assert status == 200, got
    if choice["finish_reason"] == "stop":
        value = json.loads(choice["text"])
        assert set(value) == {"name", "age"} and isinstance(value["age"], int), choice
    else:
        assert choice["text"].lstrip().startswith("{"), choice


def test_guides_by_name(cluster):
    ask = {"prompt": TALE, "max_tokens": 20, "temperature": 0}
    for fields, pattern in (({"guided_regex": "[0-9]{3}"}, "[0-9]{3}"), ({
            "guided_choice": ["red", "green"]
    }, "red|green"), ({"guided_grammar": 'root ::= "a" | "b"'}, "a|b")):
        status, got = cluster.http.json("/v1/completions", {**ask, **fields})
        assert status == 200 and re.fullmatch(pattern, got["choices"][0]["text"]), got
        assert got["choices"][0]["finish_reason"] == "stop"
    status, got = cluster.http.json("/v1/completions",
                                    {**ask, "guided_regex": "a", "guided_choice": ["b"]})
    assert status == 400 and "second guide" in got["error"]["message"], got
    status, got = cluster.http.json("/v1/completions", {**ask, "guided_regex": "("})
    assert status == 400 and "guided" in got["error"]["message"], got


def test_small_paths(cluster):
    status, got = cluster.http.json("/v1/models")
    assert status == 200 and got["data"][0]["id"] == "pocket"
    assert got["data"][0]["max_model_len"] == 2048
    assert cluster.http.json("/health") == (200, {"status": "ok"})
    assert cluster.http.ask("/ping")[0] == 200
    status, _, text = cluster.http.ask("/metrics")
    assert status == 200 and b"td_time_to_first_token_seconds_count" in text
    status, got = cluster.http.json("/tokenize", {"prompt": TALE})
    ids = got["tokens"]
    assert status == 200 and got["count"] == len(ids) > 2
    same = cluster.http.json("/v1/completions", {"prompt": ids, "max_tokens": 5, "temperature": 0})
    text = cluster.http.json("/v1/completions", {"prompt": TALE, "max_tokens": 5, "temperature": 0})
    assert same[1]["choices"][0]["text"] == text[1]["choices"][0]["text"]
    assert "token_strs" not in got
    status, got = cluster.http.json("/tokenize", {"prompt": "a cat", "return_token_strs": True})
    assert status == 200 and "".join(got["token_strs"]).endswith("a\u0120cat"), got
    _, headers, _ = cluster.http.ask("/health", headers={"x-request-id": "abc-1"})
    assert headers["x-request-id"] == "abc-1"


def test_request_ids(cluster):
    ask = {"prompt": TALE, "max_tokens": 2, "temperature": 0}

    def answer(body, **headers):
        status, head, text = cluster.http.ask("/v1/completions", json.dumps(body).encode(),
                                              headers=headers)
        return status, head["x-request-id"], json.loads(text).get("id")

    assert answer(ask, **{"x-request-id": "from-head"}) == (200, "from-head", "cmpl-from-head")
    assert answer({**ask, "request_id": "body"}) == (200, "body", "cmpl-body")
    assert answer({**ask, "request_id": "body"}, **{"x-request-id": "h"}) == (200, "body",
                                                                              "cmpl-body")
    assert answer(ask, **{"x-request-id": "x" * 127}) == (200, "x" * 127, "cmpl-" + "x" * 127)
    status, name, _ = answer(ask, **{"x-request-id": "x" * 128})  # longer than is kept
    assert status == 200 and "x" not in name
    assert answer({**ask, "request_id": "x" * 128})[0] == 400


def test_scheduling_fields(cluster):
    """What they do is test_objectives' and test_tenants'; here that both doors read them alike."""
    body = {"prompt": TALE, "max_tokens": 2, "priority": 7, "tenant": "t", "cache_salt": "s"}
    for value, status in (("60000", 200), ("soon", 400), ("0", 400)):  # a busy machine keeps it
        for name in ("x-slo-ttft-ms", "x-slo-tpot-ms"):
            got = cluster.http.json("/v1/completions", body, {name: value})
            assert got[0] == status, got
    for name, value, param in (("x-priority", "101", "priority"), ("x-priority", "x", "x-priority"),
                               ("x-slo-class", "nobody's", "slo_class"),
                               ("x-tenant", "t" * 65, "tenant"), ("x-slo-ttft-ms", "soon",
                                                                  "x-slo-ttft-ms")):
        status, got = cluster.http.json("/v1/completions", body, {name: value})
        assert status == 400 and got["error"]["param"] == param, got
    for name, value in (("x-priority", "-100"), ("x-tenant", "u"), ("x-slo-class", "")):
        assert cluster.http.json("/v1/completions", body, {name: value})[0] == 200, name
    for change, param in (({"slo_class": "nobody's"}, "slo_class"), ({"priority": 101}, "priority"),
                          ({"tenant": "t" * 65}, "tenant"), ({"cache_salt": "s" * 129},
                                                             "cache_salt"),
                          ({"objectives": {"ttft_ms": -1}}, "ttft_ms")):
        status, got = cluster.http.json("/v1/completions", {**body, **change})
        assert status == 400 and got["error"]["param"] == param, got


def raw(cluster, body, path="/v1/completions"):
    s = socket.create_connection(("127.0.0.1", cluster.http.port), timeout=60 * SLOW)
    text = json.dumps(body).encode()
    s.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n\r\n".encode() +
              text)
    return s


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_request(cluster, stream):
    before = cluster.router.log().count("ev=request_cancelled")
    with cluster.decode_stopped():
        s = raw(cluster, {"prompt": TALE, "max_tokens": 1500, "ignore_eos": True, "stream": stream})
        cluster.wait_for(lambda: cluster.status().live == 1, "the request", 20 * SLOW)
        s.close()
        cluster.wait_for(lambda: cluster.status().live == 0, "its end", 20 * SLOW)
    assert cluster.router.log().count("ev=request_cancelled") == before + 1
    cluster.wait_idle()


def test_the_first_event_does_not_wait_for_an_acknowledgement(cluster):
    """The library sends head and first event by two calls. Without TCP_NODELAY the second waits
    for the client's delayed acknowledgement of the first, 40 ms, each time."""
    gaps = []
    for _ in range(20):
        with raw(cluster, {"prompt": TALE, "max_tokens": 2, "stream": True}) as s:
            data, begin = s.recv(65536), time.monotonic()
            assert data.startswith(b"HTTP/1.1 200 OK\r\n")
            while b"data: {" not in data:
                data += s.recv(65536)
            gaps.append(time.monotonic() - begin)
    assert min(gaps) < 0.02, gaps


def test_a_connection_serves_many_requests(cluster):
    with raw(cluster, {"prompt": TALE, "max_tokens": 1}) as s:
        for _ in range(3):
            data = b""
            while b"\r\n\r\n" not in data:
                data += s.recv(65536)
            head, body = data.split(b"\r\n\r\n", 1)
            n = int(re.search(rb"Content-Length: (\d+)", head).group(1))
            while len(body) < n:
                body += s.recv(65536)
            assert json.loads(body)["usage"]["completion_tokens"] == 1
            text = b'{"prompt":"x","max_tokens":1}'
            s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" %
                      (len(text), text))


def raw_request(body, version="1.1"):
    body = json.dumps(body).encode()
    return (f"POST /v1/completions HTTP/{version}\r\nHost: x\r\nConnection: close\r\n"
            f"Content-Length: {len(body)}\r\n\r\n").encode() + body


def read_rest(s):
    """Until the server closes."""
    data = bytearray()
    while piece := s.recv(1 << 16):
        data += piece
    return bytes(data)


def read_all(s):
    """(head, body)"""
    head, _, body = read_rest(s).partition(b"\r\n\r\n")
    return head.decode().lower(), body


def chunks_of(body):
    """The chunks of a chunked body, which must be whole."""
    chunks = []
    while True:
        size, _, body = body.partition(b"\r\n")
        n = int(size, 16)
        assert body[n:n + 2] == b"\r\n", body[:60]
        if n == 0:
            assert body == b"\r\n"
            return chunks
        chunks.append(body[:n])
        body = body[n + 2:]


def choices_of(text):
    lines = text.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: "))["choices"] for line in lines[:-2]]


def test_a_slow_reader_misses_nothing(http_with_small_buffers):
    """Its socket takes a part of a chunk, or none: what it reads in the end is what others read."""
    cluster, n = http_with_small_buffers, 200
    body = {
        "prompt": TALE, "max_tokens": n, "temperature": 0, "ignore_eos": True, "logprobs": 20,
        "stream": True
    }
    answers = []
    for slow in (False, True):
        with socket.socket() as s:
            if slow:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            s.settimeout(60 * SLOW)
            s.connect(("127.0.0.1", cluster.http.port))
            s.sendall(raw_request(body))
            if slow:  # not a byte until all of it is made
                cluster.wait_finished(2, 60 * SLOW)
                cluster.wait_idle(60 * SLOW)
            head, text = read_all(s)
        assert "transfer-encoding: chunked" in head
        answers.append(choices_of(b"".join(chunks_of(text))))
    assert answers[0] == answers[1] and len(answers[0]) >= n


def test_http_1_0_has_no_chunks(cluster):
    with socket.create_connection(("127.0.0.1", cluster.http.port), timeout=60 * SLOW) as s:
        s.sendall(raw_request({"prompt": TALE, "max_tokens": 24, "temperature": 0, "stream": True},
                              "1.0"))
        head, text = read_all(s)
    assert "transfer-encoding" not in head
    want = cluster.generate(prompt=TALE, max_tokens=24, temperature=0)
    assert "".join(c[0]["text"] for c in choices_of(text)) == want.text


def test_tokens_of_one_message_go_in_one_piece():
    """A worker's message with many tokens becomes one chunk with as many events, also where the
    socket takes a part of it."""
    n, heard, answers = 300 if SHORT else 1500, threading.Event(), []

    top = [pb.TokenLogprob(token=300 + k, logprob=-1.5 * k) for k in range(20)]

    def script(r):
        def token(i):
            t = out(n_of(r) + i, 40 + i % 900, 2 if i == n - 1 else 0)
            t.logprobs.CopyFrom(pb.Logprobs(logprob=-0.25, top=top))
            return tokens(t)

        yield token(0)
        yield "send"
        assert heard.wait(20 * SLOW)
        yield from (token(i) for i in range(1, n - 1))
        yield "send"
        yield token(n - 1)

    with Cluster(
            router_args=[
                "--http-listen", "127.0.0.1:0", "--policy", "round_robin", *SLOW_READERS
            ], **PATIENT) as c:
        port = Http(c).port
        fake = FakeWorker(c, script, name="many", multiplex=True)
        body = {
            "prompt": TALE, "max_tokens": n, "ignore_eos": True, "stream": True, "logprobs": 20
        }  # some 500 bytes a token
        try:
            while fake.calls < 2:  # round robin: some meet the honest worker
                calls, slow = fake.calls, fake.calls == 1
                heard.clear()
                with socket.socket() as s:
                    s.settimeout(60 * SLOW)
                    if slow:
                        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                    s.connect(("127.0.0.1", port))
                    s.sendall(raw_request(body))
                    first = s.recv(1 << 16)
                    heard.set()
                    if slow:
                        c.wait_for(lambda: fake.calls == 2 or not c.status().live, "it", 20 * SLOW)
                        c.wait_idle(20 * SLOW)
                    head, _, begun = first.partition(b"\r\n\r\n")
                    assert b"200" in head
                    chunks = chunks_of(begun + read_rest(s))
                if fake.calls > calls:
                    assert len(chunks) == 3, [len(x) for x in chunks]
                    answers.append(choices_of(b"".join(chunks)))
            assert answers[0] == answers[1] and len(answers[0]) > n / 2
        finally:
            heard.set()
            fake.close()


def test_bodies_have_a_bound():
    args = [
        "--http-listen", "127.0.0.1:0", "--max-message-bytes", "65536", "--queue-timeout-ms", "200"
    ]
    with Cluster(prefill=0, decode=0, router_args=args) as c:
        status, got = Http(c).json("/v1/completions", {"prompt": "x" * 70000})
        assert status == 413 and "65536 bytes" in got["error"]["message"]
        status, headers, text = Http(c).ask("/v1/completions", {"prompt": "x", "max_tokens": 1})
        assert status == 503 and int(headers["Retry-After"]) >= 1, text
        assert json.loads(text)["error"]["type"] == "server_error"
