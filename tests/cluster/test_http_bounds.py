"""The HTTP port's bounds: time for a request, bytes behind a slow reader, idle connections, values
of a body; and answers that equal gRPC's under load while a decode worker dies."""
import json
import os
import resource
import signal
import socket
import threading
import time

import grpc
import pytest

from harness import PATIENT, SHORT, SLOW, Cluster, peak_bytes, pocket_with
from test_http import TALE, Http
from test_http_hostile import HEAD, SECOND, check_serves, dial, post, read_answer, rss_bytes

OK = grpc.StatusCode.OK
SANITIZED = bool(os.environ.get("TANDEM_TEST_SANITIZER"))


def make(*args, **kwargs):
    return Cluster(router_args=["--http-listen", "127.0.0.1:0", *args], **PATIENT, **kwargs)


def is_closed(s):
    """Waits for it, at most as long as the socket's time-out."""
    try:
        return s.recv(65536) == b""
    except ConnectionResetError:
        return True


def test_a_request_has_its_time():
    """Half-sent, sent byte by byte, between requests, or never begun: closed. One that is answered
    is not, however long the answer takes."""
    with make("--test-http-request-ms", 700) as c:
        c.http = Http(c)
        body = post({"prompt": "a", "max_tokens": 1})
        begun = [dial(c) for _ in range(4)]
        for s, part in zip(begun, (b"", HEAD, HEAD + b"x: ", body[:-1])):
            s.sendall(part)
        kept = dial(c)
        kept.sendall(SECOND)
        assert read_answer(kept)[0] == 200
        slow = dial(c)
        ended = threading.Event()

        def drip():
            try:
                for i in range(len(body)):
                    slow.sendall(body[i:i + 1])
                    if ended.wait(0.05):
                        return
            except OSError:
                pass

        t = threading.Thread(target=drip)
        t.start()
        long = dial(c)
        n = 400 if SANITIZED else 1900  # longer than 700 ms
        long.sendall(post({"prompt": TALE, "max_tokens": n, "ignore_eos": True, "stream": True}))
        assert all(is_closed(s) for s in [*begun, kept, slow])
        ended.set()
        t.join()
        check_serves(c)
        data = b""
        while not data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            more = long.recv(1 << 20)
            assert more, data[-300:]
            data += more
        for s in [*begun, kept, slow, long]:
            s.close()
        c.wait_idle()


def test_a_reader_8_mib_behind_is_cut():
    """Eight choices with all alternatives are 30 MB; the reader takes some KB of them. The short
    form's bound is 1 MiB."""
    ask = {
        "messages": [{"role": "user", "content": TALE}], "max_tokens": 1500, "ignore_eos": True,
        "stream": True, "logprobs": True, "top_logprobs": 20, "n": 8, "temperature": 1
    }
    with make(*(["--test-http-behind-bytes", 1 << 20] if SHORT else []), kv_memory="64MiB") as c:
        c.http = Http(c)
        check_serves(c)
        before = rss_bytes(c)
        with dial(c, receive_bytes=4096) as s:
            s.sendall(post(ask).replace(b"/v1/completions", b"/v1/chat/completions", 1))
            assert s.recv(15).startswith(b"HTTP/1.1 200 OK")
            most = [0]

            def is_over():
                most[0] = max(most[0], rss_bytes(c))
                return c.status().live == 0

            c.wait_for(is_over, "the cut", 120 * SLOW)
            assert c.router.log().count("ev=request_cancelled") == 8
            s.settimeout(20 * SLOW)
            data = b""
            try:
                while more := s.recv(1 << 20):
                    data += more
            except ConnectionResetError:
                pass
            assert b"[DONE]" not in data
        if not SANITIZED:  # a buffer of 8 MiB doubles as it grows
            assert most[0] - before < 48 << 20, most[0] - before
        check_serves(c)
        c.wait_idle()


def is_cut(c, body, path="/v1/completions"):
    with dial(c) as s:
        s.settimeout(120 * SLOW)
        s.sendall(post(body).replace(b"/v1/completions", path.encode(), 1))
        return is_closed(s)


def test_a_whole_answer_above_64_mib_is_cut():
    """Before it is written: it would have the 1.9 MB of the prompt's log-probabilities 40 times."""
    with make(kv_memory="64MiB") as c:
        c.http = Http(c)
        check_serves(c)
        before = peak_bytes(c.router)
        ids = [3 + i * 7 % 900 for i in range(1500)]
        ask = {"prompt": ids, "prompt_logprobs": 20, "max_tokens": 1, "ignore_eos": True}
        assert c.http.json("/v1/completions", {**ask, "n": 2})[0] == 200
        assert is_cut(c, {**ask, "n": 40})
        c.wait_for(lambda: c.status().live == 0, "the cut", 20 * SLOW)
        if not SANITIZED:
            assert peak_bytes(c.router) - before < 32 << 20, peak_bytes(c.router) - before
        check_serves(c)
        c.wait_idle()


LONG_TOKEN, LONG_BYTES = 2047, 4096  # as long as one may be


@pytest.fixture(scope="module")
def long_token_model(tmp_path_factory):
    """The pocket model with a token of 4,096 bytes, each of which is six in JSON."""
    def lengthen(tokenizer):
        bpe = tokenizer["model"]
        old = next(text for text, token in bpe["vocab"].items() if token == LONG_TOKEN)
        del bpe["vocab"][old]
        bpe["merges"] = [m for m in bpe["merges"] if "".join(m).replace(" ", "") != old]
        tokenizer["added_tokens"].append({
            "id": LONG_TOKEN, "content": "\x01" * LONG_BYTES, "single_word": False, "lstrip": False,
            "rstrip": False, "normalized": False, "special": False
        })

    return pocket_with(tmp_path_factory.mktemp("long_token"), {"tokenizer.json": lengthen})


def test_texts_of_long_tokens_are_bounded(long_token_model):
    """Of ids, at /detokenize, and as prompts that are echoed: 8 MB each, of which the third is not
    made any more."""
    with make(model=long_token_model) as c:
        c.http = Http(c)
        check_serves(c)
        before = peak_bytes(c.router)
        status, got = c.http.json("/v1/completions", {
            "prompt": [[LONG_TOKEN] * 2000] * 16, "max_tokens": 1, "echo": True
        })
        assert status == 400 and "limit 8388608" in got["error"]["message"], got
        if not SANITIZED:
            assert peak_bytes(c.router) - before < 48 << 20, peak_bytes(c.router) - before
        n = (64 << 20) // (6 * LONG_BYTES)
        status, got = c.http.json("/detokenize", {"tokens": [LONG_TOKEN] * (n - 1)})
        assert status == 200 and len(got["prompt"]) == (n - 1) * LONG_BYTES
        assert is_cut(c, {"tokens": [LONG_TOKEN] * (n + 1)}, "/detokenize")
        check_serves(c)
        c.wait_idle()


def test_200_slow_readers_are_bounded():
    n = 20 if SHORT else 200
    with make("--max-requests", 300, kv_memory="64MiB") as c:
        c.http = Http(c)
        check_serves(c)
        c.wait_idle()
        before, n_before = rss_bytes(c), c.status().finished
        held = [dial(c, receive_bytes=4096) for _ in range(n)]
        for s in held:
            s.sendall(
                post({
                    "prompt": TALE, "max_tokens": 40, "ignore_eos": True, "stream": True,
                    "logprobs": 5
                }))
        check_serves(c)
        c.wait_finished(n_before + n + 1, 120 * SLOW)
        c.wait_for(lambda: c.status().live == 0, "their ends", 120 * SLOW)
        if not SANITIZED:  # 40 events of 600 bytes each, in a buffer twice as large
            assert rss_bytes(c) - before < n * 40 * 1200 + (16 << 20)
        for s in held:
            s.close()
        c.wait_idle()


def test_idle_connections():
    """10,000 where descriptors allow; each costs the router little, and a new client is served."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    n = 300 if SHORT else min(10000, hard - 1000)
    try:
        with make("--max-connections", 12000, "--max-connections-per-peer", 12000,
                  "--test-http-request-ms", 600000) as c:
            c.http = Http(c)
            check_serves(c)
            before, begin = rss_bytes(c), time.monotonic()
            idle = []
            for i in range(n):
                s = socket.socket()
                s.settimeout(30 * SLOW)
                s.bind((f"127.0.0.{2 + i % 8}", 0))
                s.connect(("127.0.0.1", c.http.port))
                idle.append(s)
            for _ in range(5):
                check_serves(c)
            c.wait_for(lambda: len(os.listdir(f"/proc/{c.router.pid}/fd")) > n, "them all", 60)
            print(f"{n} idle connections in {time.monotonic() - begin:.1f} s, "
                  f"{(rss_bytes(c) - before) / n:.0f} bytes each")
            if not SANITIZED:
                assert rss_bytes(c) - before < n * 8192 + (8 << 20)
            for s in idle[::97]:  # they are good still
                s.sendall(SECOND)
                assert read_answer(s)[0] == 200
            for s in idle:
                s.close()
            c.wait_for(lambda: len(os.listdir(f"/proc/{c.router.pid}/fd")) < 200, "their ends",
                       60 * SLOW)
            check_serves(c)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


BODIES = {
    "ids": (b'{"prompt":[' + b"1," * 1200000 + b"1]}", "values, limit 1114112"),
    "lists": (b'{"x":[' + b"[]," * 600000 + b"1]}", "values, limit 1114112"),
    "names": (b'{"metadata":{' + b",".join(b'"%x":1' % i for i in range(70000)) + b"}}",
              "names, limit 65536"),
}


@pytest.mark.parametrize("kind", list(BODIES))
def test_what_a_body_becomes_is_bounded(kind):
    body, words = BODIES[kind]
    with make("--max-message-bytes", "8MiB", prefill=0, decode=0) as c:
        before = rss_bytes(c)
        status, got = Http(c).json("/v1/completions", body)
        assert status == 400 and words in got["error"]["message"], got
        if not SANITIZED:
            assert rss_bytes(c) - before < 32 << 20
        # the same characters inside a string are no values
        status, got = Http(c).json("/v1/completions", {"prompt": ",[{:\\\"" * 300000})
        assert status == 400 and "prompt has" in got["error"]["message"], got


def test_http_equals_grpc_while_a_decode_worker_dies():
    n = 6 if SHORT else 16
    asks = [
        dict(prompt=f"{TALE} there were {i} foxes", max_tokens=60 if SHORT else 200,
             temperature=[0, 1, 0.7][i % 3], seed=i, ignore_eos=True) for i in range(n)
    ]
    with Cluster(decode=2, router_args=["--http-listen", "127.0.0.1:0"], kv_memory="32MiB") as c:
        http = Http(c)
        want = [c.generate(**a).text for a in asks]
        got, begun = [None] * n, threading.Semaphore(0)

        def run(i):
            if i % 2:  # a body
                begun.release()
                status, answer = http.json("/v1/completions", asks[i])
                got[i] = answer["choices"][0]["text"] if status == 200 else answer
                return
            with dial_plain(http.port) as s:
                s.sendall(post({**asks[i], "stream": True}))
                data = s.recv(1 << 16)
                begun.release()
                while not data.endswith(b"\r\n0\r\n\r\n"):
                    more = s.recv(1 << 16)
                    assert more, data[-300:]
                    data += more
                got[i] = text_of_stream(data)

        threads = [threading.Thread(target=run, args=(i, )) for i in range(n)]
        for t in threads:
            t.start()
        for _ in threads:
            assert begun.acquire(timeout=60 * SLOW)
        c.wait_for(
            lambda: any(w.role == "decode" and w.running for w in c.status().workers),
            "a decode step", 30 * SLOW)
        w = max((w for w in c.status().workers if w.role == "decode"), key=lambda w: w.assigned)
        c.workers.pop(w.name).signal(signal.SIGKILL)
        for t in threads:
            t.join(120 * SLOW)
        assert got == want
        assert c.status().failovers > 0
        c.wait_for(lambda: c.status().live == 0, "no request", 20 * SLOW)


def dial_plain(port):
    return socket.create_connection(("127.0.0.1", port), timeout=60 * SLOW)


def text_of_stream(data):
    """The text of all events of a chunked stream."""
    body, at = b"", data.index(b"\r\n\r\n") + 4
    while True:
        end = data.index(b"\r\n", at)
        size = int(data[at:end], 16)
        if not size:
            break
        body += data[end + 2:end + 2 + size]
        at = end + 2 + size + 2
    events = [e.removeprefix("data: ") for e in body.decode().split("\n\n")[:-2]]
    return "".join(json.loads(e)["choices"][0]["text"] for e in events)
