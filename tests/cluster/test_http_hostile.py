"""The HTTP door against clients that are wrong, slow, greedy or gone: each hears why or loses its
connection, one request never becomes two, and what they held comes back."""
import ctypes
import hashlib
import json
import os
import re
import select
import socket
import struct
import time

import pytest

from harness import PATIENT, SHORT, SLOW, Cluster
from test_http import Http

BODY = b'{"prompt":"a","max_tokens":1,"temperature":0}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
SECOND = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
LONG = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True, "stream": True}


def dial(c, address="127.0.0.1", receive_bytes=None):
    s = socket.socket()
    if receive_bytes:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    s.settimeout(30 * SLOW)
    s.bind((address, 0))
    s.connect(("127.0.0.1", c.http.port))
    return s


def post(body, head=b""):
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return HEAD + head + b"Content-Length: %d\r\n\r\n" % len(text) + text


def read_answer(s, data=b""):
    """(status, headers, body, what came after) of the next answer that has a length."""
    while b"\r\n\r\n" not in data:
        more = s.recv(65536)
        assert more, data
        data += more
    head, data = data.split(b"\r\n\r\n", 1)
    headers = {
        k.lower(): v
        for k, v in (line.split(": ", 1) for line in head.decode().split("\r\n")[1:])
    }
    n = int(headers["content-length"])
    while len(data) < n:
        more = s.recv(65536)
        assert more, data
        data += more
    return int(head.split()[1]), headers, data[:n], data[n:]


def read_to_end(s):
    data = b""
    try:
        while more := s.recv(65536):
            data += more
    except ConnectionResetError:
        pass
    return data


def statuses(data):
    return [int(x) for x in re.findall(rb"HTTP/1\.[01] (\d+) ", data)]


def may_refuse_extensions():
    """libmicrohttpd 1.0 takes the end of a chunk's line with an extension for the chunk's first
    byte."""
    library = ctypes.CDLL("libmicrohttpd.so.12")
    library.MHD_get_version.restype = ctypes.c_char_p
    return not library.MHD_get_version().startswith(b"0.")


def check_serves(c):
    with dial(c) as s:
        s.sendall(post(BODY))
        status, _, body, _ = read_answer(s)
        assert status == 200 and json.loads(body)["usage"]["completion_tokens"] == 1


def make(**kwargs):
    args = ["--http-listen", "127.0.0.1:0", *kwargs.pop("router_args", [])]
    return Cluster(router_args=args, **PATIENT, **kwargs)


@pytest.fixture(scope="module")
def cluster():
    # no connection ends because it has been silent for 30 s, the rule that test_http_bounds tests
    with make(router_args=["--max-message-bytes", "65536", "--test-http-request-ms", 600000]) as c:
        c.http = Http(c)
        yield c
        c.wait_for(lambda: c.status().live == 0, "no request", 20 * SLOW)
        c.wait_idle()


N = len(BODY)


@pytest.mark.parametrize(
    "shape", [
        # Two lengths: who believes the one sees a second request where the other sees a body.
        b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" % (5 + len(SECOND)),
        b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n",
        b"Content-Length: %d\r\nContent-Length: %d\r\n\r\n%s" % (N, N + len(SECOND), BODY),
        b"Content-Length: %d\r\nContent-Length: %d\r\n\r\n%s" % (N + len(SECOND), N, BODY),
        b"Content-Length: %d, %d\r\n\r\n%s" % (N, N, BODY),
        # Lengths that are none.
        b"Content-Length: +%d\r\n\r\n%s" % (N, BODY),
        b"Content-Length: -1\r\n\r\n%s" % BODY,
        b"Content-Length: 0x%x\r\n\r\n%s" % (N, BODY),
        b"Content-Length: 99999999999999999999999\r\n\r\n%s" % BODY,
        b"Content-Length: \r\n\r\n%s" % BODY,
        # Codings that are none, or hidden.
        b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: identity\r\n\r\n%s" % BODY,
        b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"Content-Length: 5\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        # Chunks whose sizes are none.
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\n%s\r\n0\r\n\r\n" % BODY,
        b"Transfer-Encoding: chunked\r\n\r\n-1\r\n%s\r\n0\r\n\r\n" % BODY,
        b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (N - 1, BODY),
        b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n%s\r\n0\r\n\r\n" % BODY,
        # What follows is a trailer, and no good one.
        b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0;x=y\r\n" % (N, BODY),
    ])
@pytest.mark.parametrize("head", [HEAD, SECOND[:-2]])
def test_one_request_is_never_two(cluster, shape, head):
    with dial(cluster) as s:
        s.sendall(head + shape + SECOND)
        s.shutdown(socket.SHUT_WR)  # whatever is waited for does not come
        data = read_to_end(s)
    assert b'"version"' not in data, data
    if data:
        head, body = data.split(b"\r\n\r\n", 1)
        assert re.match(rb"HTTP/1.1 (400|413) ", head) and b"Connection: close" in head, data
        # What is behind the answer's length is no answer. (libmicrohttpd 0.9.75 writes the head of
        # the answers that it makes itself twice, the second time as the body's beginning.)
        n = int(re.search(rb"Content-Length: (\d+)", head).group(1))
        assert not body[n:].startswith(b"HTTP/"), data
    check_serves(cluster)


@pytest.mark.parametrize("extension", [b"", b";x=y"])
def test_chunks_are_a_body(cluster, extension):
    with dial(cluster) as s:
        s.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        chunks = [b"1" + extension + b"\r\n" + BODY[i:i + 1] + b"\r\n" for i in range(N)]
        if extension and may_refuse_extensions():
            s.sendall(b"".join(chunks) + b"0\r\n\r\n" + SECOND)
            s.shutdown(socket.SHUT_WR)
            assert statuses(read_to_end(s)) in ([], [400], [200, 200])
            return
        for chunk in chunks:
            s.sendall(chunk)
        s.sendall(b"0\r\n\r\n" + SECOND)
        status, _, body, rest = read_answer(s)
        assert status == 200 and json.loads(body)["usage"]["completion_tokens"] == 1
        status, _, body, rest = read_answer(s, rest)
        assert status == 200 and b'"version"' in body and not rest


def test_requests_in_one_piece_are_answered_in_order(cluster):
    with dial(cluster) as s:
        s.sendall(b"".join(post(BODY, b"x-request-id: p%d\r\n" % i) for i in range(4)) + SECOND)
        rest = b""
        for i in range(4):
            status, headers, body, rest = read_answer(s, rest)
            assert status == 200 and headers["x-request-id"] == f"p{i}", headers
            assert json.loads(body)["id"] == f"cmpl-p{i}"
        assert b'"version"' in read_answer(s, rest)[2]


def test_heads_and_bodies_have_bounds(cluster):
    for head in (b"x: " + b"y" * 100000 + b"\r\n", b"x: y\r\n" * 20000):
        with dial(cluster) as s:
            try:
                s.sendall(HEAD + head + b"Content-Length: 0\r\n\r\n")
            except ConnectionError:  # closed while this is still sent: it was read as far as 32 KiB
                pass
            assert statuses(read_to_end(s)) in ([], [431])
    for head, body in (
        (b"Content-Length: 70000\r\n", b" " * 70000),
        (b"Transfer-Encoding: chunked\r\n", b"8000\r\n" + b" " * 32768 + b"\r\n8000\r\n" +
         b" " * 32768 + b"\r\n1\r\n \r\n0\r\n\r\n")):
        with dial(cluster) as s:
            s.sendall(HEAD + head + b"\r\n" + body)
            status, _, text, _ = read_answer(s)
            assert status == 413 and b"65536 bytes" in text
    for length in (65537, 2**64 - 1):  # told by the head: nothing need follow
        for expect in (b"", b"Expect: 100-continue\r\n"):
            with dial(cluster) as s:
                s.sendall(HEAD + b"Content-Length: %d\r\n" % length + expect + b"\r\n")
                status, headers, text, _ = read_answer(s)
                assert status == 413
                # libmicrohttpd 1.0 refuses 2^64 - 1, its own sign for an unknown length, itself.
                assert b"65536 bytes" in text or length == 2**64 - 1, text
                assert headers["connection"].lower() == "close" and s.recv(1) == b""
    with dial(cluster) as s:  # the most that may come: no JSON, but read
        s.sendall(HEAD + b"Content-Length: 65536\r\n\r\n" + b" " * 65536)
        assert read_answer(s)[0] == 400
    check_serves(cluster)


def test_a_half_closed_client_is_gone(cluster):
    """A server cannot tell a client that has only ended its side from one that has left."""
    with dial(cluster) as s:
        s.sendall(post(LONG))
        assert s.recv(65536).startswith(b"HTTP/1.1 200 OK\r\n")
        s.shutdown(socket.SHUT_WR)
        data = read_to_end(s)
        assert b"[DONE]" not in data
    cluster.wait_for(lambda: cluster.status().live == 0, "its end", 20 * SLOW)
    check_serves(cluster)


def n_descriptors(c):
    return len(os.listdir(f"/proc/{c.router.pid}/fd"))


def rss_bytes(c):
    with open(f"/proc/{c.router.pid}/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_resets_give_everything_back(cluster):
    """A reset at every stage: in the head, in the body, while it waits, in its stream."""
    check_serves(cluster)
    before = n_descriptors(cluster)
    for i in range(40 if SHORT else 200):
        with dial(cluster) as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            text = post({**LONG, "stream": i % 8 != 7})
            s.sendall(text[:20] if i % 4 == 0 else text[:-5] if i % 4 == 1 else text)
            if i % 4 == 2:
                s.recv(100)
    cluster.wait_for(lambda: cluster.status().live == 0, "their ends", 30 * SLOW)
    cluster.wait_for(lambda: n_descriptors(cluster) <= before, "their descriptors", 10 * SLOW)
    cluster.wait_idle()
    check_serves(cluster)


def test_a_reset_stream_is_closed_beside_an_idle_connection(cluster):
    """At once, and not when the connections before it have ended."""
    check_serves(cluster)
    with dial(cluster):
        cluster.wait_for(lambda: cluster.status().live == 0, "its end", 30 * SLOW)
        before = n_descriptors(cluster)
        for _ in range(3):
            with dial(cluster) as s:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                s.sendall(post(LONG))
                s.recv(100)
        cluster.wait_for(lambda: n_descriptors(cluster) <= before, "their descriptors", 20 * SLOW)


def test_readers_that_do_not_read(cluster):
    check_serves(cluster)
    cluster.wait_idle()
    before, n_before = rss_bytes(cluster), cluster.status().finished
    n = 10 if SHORT else 50
    held = [dial(cluster, receive_bytes=4096) for _ in range(n)]
    for s in held:
        s.sendall(post({**LONG, "max_tokens": 300, "logprobs": 5}))
    check_serves(cluster)
    cluster.wait_finished(n_before + n + 1, 90 * SLOW)
    cluster.wait_for(lambda: cluster.status().live == 0, "their ends", 60 * SLOW)
    if not os.environ.get("TANDEM_TEST_SANITIZER"):
        # 300 events of 500 bytes each wait for the client at most, in a buffer twice as large
        assert rss_bytes(cluster) - before < n * 300 * 1000 + (16 << 20)
    texts = [read_to_end_of_stream(s) for s in held[:3]]  # late, and whole
    assert all(t.count(b"data: ") >= 100 and t.endswith(b"[DONE]\n\n\r\n0\r\n\r\n") for t in texts)
    for s in held:
        s.close()


def read_to_end_of_stream(s):
    data = b""
    while not data.endswith(b"\r\n0\r\n\r\n"):
        more = s.recv(65536)
        assert more, data[-500:]
        data += more
    return data


def is_served(s):
    try:
        s.sendall(SECOND)
        return read_answer(s)[0] == 200
    except (AssertionError, ConnectionError):
        return False


def test_connections_are_capped_by_address_and_in_all():
    with make(router_args=["--max-connections", 60, "--max-connections-per-peer", 40]) as c:
        c.http = Http(c)
        mine = [dial(c, "127.0.0.2") for _ in range(50)]
        assert sum(is_served(s) for s in mine) == 40  # they stay, idle
        other = [dial(c, "127.0.0.3") for _ in range(18)]
        assert all(is_served(s) for s in other)
        more = [dial(c, "127.0.0.4") for _ in range(10)]
        for s in more:
            s.sendall(SECOND)
            s.settimeout(0.05)
        waiting = [s for s in more if not has_bytes(s)]
        assert len(waiting) >= 8  # not taken up while there are 60
        for s in mine:
            s.close()
        for s in waiting:
            s.settimeout(20 * SLOW)
            assert read_answer(s)[0] == 200
        check_serves(c)


def has_bytes(s):
    try:
        return bool(s.recv(1, socket.MSG_PEEK))
    except TimeoutError:
        return False


def test_strangers_and_too_many(tmp_path):
    key = "key-of-acme-0123456789"
    path = tmp_path / "tenants"
    path.write_text(
        json.dumps({
            "tenants": [{
                "name": "acme", "keys": ["sha256:" + hashlib.sha256(key.encode()).hexdigest()]
            }]
        }))
    with make(router_args=["--tenants", path, "--max-requests", 2]) as c:
        c.http = Http(c)
        paths = ("/v1/completions", "/tokenize", "/v1/models")
        for path in paths:
            body = None if path == "/v1/models" else BODY
            for wrong in ({}, {"Authorization": "Bearer nothing-of-acme-0123456789"},
                          {"Authorization": "Basic " + key}, {"Authorization": key},
                          {"Authorization": "Bearer " + "x" * 600}):
                status, headers, text = c.http.ask(path, body, wrong)
                assert status == 401 and headers["WWW-Authenticate"].startswith("Bearer"), text
                error = json.loads(text)["error"]
                assert error["type"] == "authentication_error" and key not in error["message"]
            assert c.http.ask(path, body, {"Authorization": "Bearer " + key})[0] == 200
        held = [dial(c) for _ in range(2)]
        mine = b"Authorization: Bearer %s\r\n" % key.encode()
        for s in held:
            s.sendall(post(LONG, mine))
            assert s.recv(65536).startswith(b"HTTP/1.1 200 OK\r\n")
        status, headers, text = c.http.ask("/v1/completions", BODY,
                                           {"Authorization": "Bearer " + key})
        assert status == 429 and int(headers["Retry-After"]) >= 1, text
        assert json.loads(text)["error"]["type"] == "rate_limit_error"
        for s in held:
            s.close()
        c.wait_for(lambda: c.http.ask("/v1/completions", BODY, {"Authorization": "Bearer " + key})[
            0] == 200, "room", 20 * SLOW)


STRANGERS = [
    b"", b"Authorization: Bearer nothing-of-acme-0123456789\r\n", b"Authorization: Basic eA==\r\n"
]


def test_a_stranger_is_told_before_its_body(tmp_path):
    """By its head alone, as soon as that is there, whatever the body's length and coding; nothing
    of the body is kept, and the answer survives a body that is sent all the same."""
    key = "key-of-acme-0123456789"
    path = tmp_path / "tenants"
    path.write_text(
        json.dumps({
            "tenants": [{
                "name": "acme", "keys": ["sha256:" + hashlib.sha256(key.encode()).hexdigest()]
            }]
        }))
    args = ["--tenants", path, "--test-http-request-ms", 600000]
    with make(router_args=args, prefill=0, decode=0) as c:
        c.http = Http(c)
        before, n_before = rss_bytes(c), n_descriptors(c)

        def is_refused(s, rest=b""):
            status, headers, text, rest = read_answer(s, rest)
            assert status == 401 and headers["connection"].lower() == "close", (status, headers)
            assert headers["www-authenticate"] == "Bearer" and "x-request-id" in headers
            assert json.loads(text)["error"]["type"] == "authentication_error" and not rest, rest

        posts = [
            b"POST %s HTTP/1.1\r\nHost: x\r\n" % p
            for p in (b"/v1/completions", b"/v1/chat/completions", b"/tokenize", b"/detokenize")
        ]
        lengths = (b"Content-Length: 60000000\r\n", b"Transfer-Encoding: chunked\r\n")
        for i, head in enumerate(posts):
            for wrong in STRANGERS:
                with dial(c) as s:  # nothing follows
                    s.sendall(head + wrong + lengths[i % 2] + b"\r\n")
                    is_refused(s)
                    assert s.recv(1) == b""
        with dial(c) as s:
            s.sendall(b"POST /v2/models/pocket/generate HTTP/1.1\r\nHost: x\r\n" + lengths[0] +
                      b"\r\n")
            assert read_answer(s)[0] == 401
        with dial(c) as s:  # who asks first is not told to go on
            s.sendall(HEAD + lengths[0] + b"Expect: 100-continue\r\n\r\n")
            is_refused(s)
        with dial(c) as s:
            mine = b"Authorization: Bearer %s\r\nExpect: 100-continue\r\n" % key.encode()
            s.sendall(HEAD + mine + b"Content-Length: 2\r\n\r\n")
            assert s.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
            s.sendall(b"{}")
            assert read_answer(s)[0] == 400
            # the same connection without its key, the body in the same piece as another request
            s.sendall(post(BODY) + SECOND)
            is_refused(s)
            assert s.recv(1) == b""
        for _ in range(5):  # a client that sends all before it reads is not cut off meanwhile
            with dial(c) as s:
                s.sendall(HEAD + b"Content-Length: 2000000\r\n\r\n")
                assert s.recv(1, socket.MSG_PEEK)
                for _ in range(20):
                    s.sendall(b" " * 100000)
                is_refused(s)
        # A path that reads no body keeps none.
        with dial(c) as s:
            s.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\nContent-Length: 40000000\r\n\r\n")
            for _ in range(40):
                s.sendall(b" " * 1000000)
            assert read_answer(s)[0] == 200
        if not os.environ.get("TANDEM_TEST_SANITIZER"):
            assert rss_bytes(c) - before < 16 << 20, rss_bytes(c) - before
        c.wait_for(lambda: n_descriptors(c) <= n_before, "their descriptors", 20 * SLOW)
        assert "ev=tenant_refused" in c.router.log()


def test_strangers_that_send_on_are_read_slowly(tmp_path):
    """What they send behind their answers is thrown away on the loop's thread, which has tokens to
    send: so much of all of them at once and no more."""
    path = tmp_path / "tenants"
    path.write_text(json.dumps({"tenants": [{"name": "acme", "keys": ["sha256:" + "0" * 64]}]}))
    args = ["--tenants", path, "--test-http-request-ms", 600000]
    with make(router_args=args, prefill=0, decode=0) as c:
        c.http = Http(c)
        sockets = [dial(c) for _ in range(64)]
        for s in sockets:
            s.sendall(HEAD + b"Content-Length: 60000000000\r\n\r\n")
        for s in sockets:
            assert read_answer(s)[0] == 401
            s.setblocking(False)

        def send_for(seconds):
            n, end = 0, time.monotonic() + seconds
            while time.monotonic() < end:
                for s in select.select([], sockets, [], 0.1)[1]:
                    try:
                        n += s.send(b" " * 65536)
                    except BlockingIOError:
                        pass
            return n

        send_for(2)  # fills the kernel's buffers
        n = send_for(2)
        assert 0 < n < 100 << 20, n
        for s in sockets:
            s.close()
