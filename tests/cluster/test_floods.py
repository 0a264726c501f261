"""Who floods a daemon from outside: connections, slow HTTP, endless headers, huge or many
messages. Each attack is small, and each daemon must go on serving others while it lasts and
be as before when it is over."""
import contextlib
import ctypes
import errno
import os
import re
import resource
import signal
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request

import grpc
import pytest

from harness import BIN, POCKET, SLOW, Cluster, Daemon, free_port
from raw import (CONTINUATION, END_HEADERS, HEADERS, PREFACE, RST_STREAM, SETTINGS, call,
                 call_headers, dial, field, frame, http2, is_open, is_served)

GENERATE, TOKENIZE = "/tandem.v1.Inference/Generate", "/tandem.v1.Inference/Tokenize"
SYS_PIDFD_OPEN, SYS_PIDFD_GETFD = 434, 438


def healthz(port, timeout=1.0):
    """HTTP status of GET /healthz; raises what the socket raises."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=timeout) as r:
            return r.status
    except urllib.error.HTTPError as e:
        return e.code


def metric(port, name):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5 * SLOW) as r:
        for line in r.read().decode().splitlines():
            if line.startswith(name):
                return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"no metric {name}")


def check_serves(c):
    """A new connection, a whole request."""
    c.connect()
    r = c.generate(ids=[1, 2, 3], max_tokens=2, temperature=0, ignore_eos=True, timeout=20 * SLOW)
    assert r.code == grpc.StatusCode.OK, (r.code, r.details)


def test_a_listener_survives_running_out_of_descriptors():
    """gRPC core gives up its listener at the first EMFILE; the limit is lowered under the
    running router, so no bound of ours comes first."""
    port = free_port()
    with Cluster(
            router_args=["--metrics-listen", f"127.0.0.1:{port}", "--port-check-ms", 200]) as c:
        resource.prlimit(c.router.pid, resource.RLIMIT_NOFILE, (1024, 1024))
        held = []
        for _ in range(1200):
            with contextlib.suppress(ConnectionError):
                held.append(dial(c.port))
        assert len(held) > 1000
        time.sleep(1)  # the attack: all of them held for a second
        for s in held:
            s.close()
        # Core has seen that they are gone: until then there is no descriptor, and whoever comes is
        # turned away.
        c.wait_for(lambda: len(os.listdir(f"/proc/{c.router.pid}/fd")) < 900,
                   "their descriptors back", 20 * SLOW)
        check_serves(c)
        # The port's own check may have met the flood three times. It asks again every 200 ms.
        c.wait_for(lambda: healthz(port, 10 * SLOW) == 200, "health of the port", 20 * SLOW)
        assert c.router.alive()


def test_connections_are_capped_by_address_and_in_all():
    with Cluster(router_args=["--max-connections", 60, "--max-connections-per-peer", 40]) as c:
        mine = [dial(c.port, "127.0.0.2") for _ in range(50)]
        assert sum(is_served(s) for s in mine) == 40
        other = [dial(c.port, "127.0.0.3") for _ in range(30)]
        n_other = sum(is_served(s) for s in other)
        assert 10 <= n_other <= 20, n_other  # what is left, less the workers' and the test's own
        assert "ev=connections_refused why=peer_limit peer=127.0.0.2" in c.router.log()
        for s in mine + other:
            s.close()
        # Room is given back as soon as somebody needs it.
        Cluster.wait_for(lambda: is_served(dial(c.port, "127.0.0.2")), "room for a connection",
                         5 * SLOW)
        check_serves(c)


def worker_port(c, name):
    return int(next(w.address for w in c.status().workers if w.name == name).rsplit(":", 1)[1])


def test_a_worker_has_the_same_caps():
    """Connections and calls of one address at a worker's port: it is no longer open to as many
    as descriptors allow, and says how many it refused."""
    metrics = free_port()
    with Cluster(prefill=1, decode=0) as c:
        c.start_worker(
            "decode", args=[
                "--max-connections", 60, "--max-connections-per-peer", 40, "--max-calls-per-peer",
                8, "--metrics-listen", f"127.0.0.1:{metrics}"
            ])
        worker, port = c.workers["decode-0"], worker_port(c, "decode-0")
        mine = [dial(port, "127.0.0.2") for _ in range(50)]
        assert sum(is_served(s) for s in mine) == 40
        other = [dial(port, "127.0.0.3") for _ in range(30)]
        assert 10 <= sum(is_served(s) for s in other) <= 20  # what is left, less the router's
        assert "ev=connections_refused why=peer_limit peer=127.0.0.2" in worker.log()
        c.wait_for(lambda: metric(metrics, "td_connections_refused_total") >= 20,
                   "the count of the refused", 10 * SLOW)
        check_serves(c)  # the router's own connection stands
        for s in mine + other:
            s.close()

        served = []

        def room():
            s = http2(port, "127.0.0.2")
            with contextlib.suppress(ConnectionError):
                if s.recv(1, socket.MSG_PEEK):
                    served.append(s)
                    return True
            s.close()
            return False

        # The one that found room is kept: a second one would need another place, which may not have
        # been given back yet.
        c.wait_for(room, "room for a connection", 5 * SLOW)
        with served[0] as s:
            for i in range(12):
                s.sendall(
                    frame(HEADERS, END_HEADERS, 1 + 2 * i,
                          call_headers(b"/tandem.v1.Worker/Decode")))
            c.wait_for(lambda: c.status() and read_refused(s) == 4, "four refused calls", 10 * SLOW)
            check_serves(c)


# --- HTTP/2
# -------------------------------------------------------------------------------------------------

CALL = call_headers(b"/tandem.v1.Inference/Generate")


def memory(pid):
    """(resident, most ever resident) in MiB."""
    with open(f"/proc/{pid}/status", encoding="ascii") as f:
        lines = dict(line.split(":", 1) for line in f)
    return [int(lines[k].split()[0]) / 1024 for k in ("VmRSS", "VmHWM")]


def flood(s, payload, most):
    """Sends payload again and again until the server ends the connection; how many bytes that
    took. At most `most`."""
    n = 0
    try:
        while n < most:
            s.sendall(payload)
            n += len(payload)
    except OSError:
        return n
    raise AssertionError(f"{n} bytes were taken")


def continuation_flood(s, headers):
    """HEADERS without END_HEADERS, then CONTINUATION after CONTINUATION: the server must end it
    within what sockets buffer."""
    s.sendall(frame(HEADERS, 0, 1, CALL))
    flood(s, frame(CONTINUATION, 0, 1, headers) * 16, 64 << 20)


# What a header costs core is not what it costs the wire: an indexed one is a byte there.
HEADER_BYTES = {
    "indexed": b"\x90" * 16000, "empty values": b"\x00\x01a\x00" * 4000,
    "one endless value": b"\x00\x01a\x7f\xff\xff\xff\xff\x07" + b"x" * 16000
}
# One connection's headers may hold 64 KiB x 72 = 4.7 MB in core; the rest is malloc's and the
# sockets'.
MAX_GROWTH_MB = 32 * SLOW


@pytest.mark.parametrize("kind", HEADER_BYTES)
def test_endless_headers_cost_little(kind):
    with Cluster(prefill=0, decode=0) as c:
        before = memory(c.router.pid)[0]
        with http2(c.port) as s:
            continuation_flood(s, HEADER_BYTES[kind])
        c.router.wait_log("ev=connection_ended why=header_block_bytes peer=127.0.0.1")
        assert memory(c.router.pid)[1] - before < MAX_GROWTH_MB
        assert c.status().live == 0


def test_many_unfinished_headers_cost_little():
    """Each of 400 connections stays within its own bound and never sends the rest. 32 may be so
    at once, and take 1.2 MB each (the 400: 460 MB). A sanitizer keeps its own memory beside
    each byte: 1.8 MB each with ASan, 3 to 7 with TSan."""
    with Cluster(prefill=0, decode=0) as c:
        before = memory(c.router.pid)[0]
        held = []
        for _ in range(400):
            held.append(http2(c.port))
            with contextlib.suppress(OSError):
                held[-1].sendall(frame(HEADERS, 0, 1, b"\x90" * 16000))
        c.router.wait_log("ev=connection_ended why=large_header_blocks")
        assert c.status().live == 0  # others are served meanwhile
        assert memory(c.router.pid)[1] - before < 32 * 1.2 * SLOW + MAX_GROWTH_MB
        for s in held:
            s.close()


def test_who_makes_room_is_freed_first():
    """Two bursts of 32 large blocks, the second when the first has had its second, and read in
    one turn of the router: it is not let in before core has freed the first (it was: twice
    the memory)."""
    with Cluster(prefill=0, decode=0) as c:
        before = memory(c.router.pid)[0]
        bursts = [[http2(c.port) for _ in range(32)] for _ in range(2)]
        assert all(is_served(s) for burst in bursts for s in burst)
        block = frame(HEADERS, 0, 1, b"\x90" * 16000)
        for s in bursts[0]:
            s.sendall(block)
        assert c.status().live == 0
        c.wait_for(lambda: memory(c.router.pid)[0] - before > 32 * 0.9, "the first burst",
                   20 * SLOW)
        one = memory(c.router.pid)[1] - before
        c.router.signal(signal.SIGSTOP)
        for s in bursts[1]:
            s.sendall(block)
        time.sleep(1.1)  # no wait for a state: who has had a place for a second makes room
        c.router.signal(signal.SIGCONT)
        c.router.wait_log("ev=connection_ended why=large_header_blocks")
        assert c.status().live == 0  # answered after what came before it
        c.wait_for(lambda: any(not is_open(s) for s in bursts[1]), "newcomers that found no place",
                   20 * SLOW)
        assert memory(c.router.pid)[1] - before < 1.5 * one
        for s in bursts[0] + bursts[1]:
            s.close()


def test_streams_before_the_settings_ack_are_few():
    """max_concurrent_streams binds nobody before his ACK: 100,000 calls of 60 bytes took 1.2 GB."""
    with Cluster(prefill=0, decode=0, router_args=["--max-requests", 64]) as c:
        before = memory(c.router.pid)[0]
        with http2(c.port) as s, pytest.raises(OSError):
            for first in range(1, 200001, 2000):
                s.sendall(b"".join(
                    frame(HEADERS, END_HEADERS, first + i, CALL) for i in range(0, 2000, 2)))
        c.router.wait_log("ev=connection_ended why=streams_before_settings_ack")
        assert memory(c.router.pid)[1] - before < MAX_GROWTH_MB
        assert c.status().live == 0


def test_calls_taken_back_at_once_are_few():
    """Rapid reset: HEADERS and RST_STREAM, which no limit of live calls sees."""
    with Cluster(prefill=0, decode=0) as c:
        with http2(c.port) as s, pytest.raises(OSError):
            s.sendall(frame(SETTINGS, 1, 0, b""))
            for first in range(1, 200001, 2000):
                s.sendall(b"".join(
                    frame(HEADERS, END_HEADERS, first + i, CALL) +
                    frame(RST_STREAM, 0, first + i, b"\0\0\0\x08") for i in range(0, 2000, 2)))
        c.router.wait_log("ev=connection_ended why=cheap_frames")
        c.wait_for(lambda: c.status().live == 0, "no live call", 10 * SLOW)


def make_certificate(folder, days=2):
    subprocess.run([
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
        "-days",
        str(days), "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
        "-keyout", folder / "key.pem", "-out", folder / "cert.pem"
    ], check=True, capture_output=True)
    return ["--tls-cert", folder / "cert.pem", "--tls-key", folder / "key.pem"]


def test_endless_headers_cost_little_with_tls_too(tmp_path):
    args = make_certificate(tmp_path)
    credentials = grpc.ssl_channel_credentials((tmp_path / "cert.pem").read_bytes())
    context = ssl.create_default_context(cafile=tmp_path / "cert.pem")
    context.set_alpn_protocols(["h2"])
    with Cluster(prefill=0, decode=0, router_args=[*args, "--port-check-ms", 100],
                 tls=credentials) as c:
        before = memory(c.router.pid)[0]
        with http2(c.port, context=context) as s:
            continuation_flood(s, HEADER_BYTES["indexed"])
        c.router.wait_log("ev=connection_ended why=header_block_bytes")
        assert memory(c.router.pid)[1] - before < MAX_GROWTH_MB
        assert c.status().live == 0
        assert "ev=port_silent" not in c.router.log() and "andshak" not in c.router.log(
        )  # the port's own check leaves no trace


def test_calls_are_capped_by_address():
    """Calls that never send their message: one address holds its share, another is served."""
    with Cluster(router_args=["--max-calls-per-peer", 8]) as c:
        with http2(c.port, "127.0.0.2") as s:
            for i in range(12):
                s.sendall(frame(HEADERS, END_HEADERS, 1 + 2 * i, CALL))
            c.wait_for(lambda: c.status() and read_refused(s) == 4, "four refused calls", 10 * SLOW)
            check_serves(c)


def read_refused(s, seen={}):
    """How many streams of the connection have ended with trailers so far (HEADERS with
    END_STREAM)."""
    buf = seen.setdefault(s, bytearray())
    s.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        buf += s.recv(1 << 16)
    s.setblocking(True)
    at = n = 0
    while at + 9 <= len(buf):
        size = int.from_bytes(buf[at:at + 3], "big")
        n += buf[at + 3] == 1 and buf[at + 4] & 1
        at += 9 + size
    return n


def take_descriptor(pid, fd):
    """A copy of another process's descriptor: same socket."""
    libc = ctypes.CDLL(None, use_errno=True)
    pidfd = libc.syscall(SYS_PIDFD_OPEN, pid, 0)
    got = libc.syscall(SYS_PIDFD_GETFD, pidfd, fd, 0)
    if got < 0:
        e = ctypes.get_errno()
        os.close(pidfd)
        raise OSError(e, os.strerror(e))
    os.close(pidfd)
    return got


def listener_of(pid, port):
    for name in os.listdir(f"/proc/{pid}/fd"):
        if not os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
            continue
        try:
            s = socket.socket(fileno=take_descriptor(pid, int(name)))
        except OSError as e:
            if e.errno in (errno.EPERM, errno.ENOSYS):
                pytest.skip(f"cannot take the daemon's listener: {e}")
            raise
        if s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and s.getsockname()[1] == port:
            return s
        s.close()
    raise AssertionError(f"pid {pid} does not listen on {port}")


def test_a_daemon_whose_listener_died_says_so_and_ends():
    """The listener is shut down behind the router's back: health follows the port, then the
    process ends with an error."""
    port = free_port()
    with Cluster(
            router_args=["--metrics-listen", f"127.0.0.1:{port}", "--port-check-ms", 300 *
                         SLOW]) as c:
        assert healthz(port, 10 * SLOW) == 200
        with listener_of(c.router.pid, c.port) as listener:
            listener.shutdown(socket.SHUT_RDWR)
        c.router.wait_log("ev=port_silent .*action=health_not_serving", 20 * SLOW)
        assert healthz(port, 10 * SLOW) == 503
        c.router.wait_log("ev=port_deaf", 20 * SLOW)
        assert c.router.wait_exit(20 * SLOW) == 1
        for d in c.workers.values():
            assert d.alive()  # they wait for the next router


def test_slow_http_does_not_hide_health():
    """64 half-open connections, then 130 new ones a second that each send a byte at a time:
    /healthz answers within a second all along."""
    port = free_port()
    with Cluster(prefill=0, decode=0, router_args=["--metrics-listen", f"127.0.0.1:{port}"]):
        held = [dial(port) for _ in range(64)]
        for s in held:
            s.sendall(b"GET /healthz HT")
        assert healthz(port, 1.0 * SLOW) == 200
        stop = threading.Event()

        def flood():
            next_at = time.monotonic()
            while not stop.is_set():
                s = dial(port)
                held.append(s)
                s.sendall(b"G")
                next_at += 1 / 130
                stop.wait(max(0.0, next_at - time.monotonic()))

        t = threading.Thread(target=flood)
        t.start()
        try:
            for _ in range(6):
                time.sleep(0.5)
                assert healthz(port, 1.0 * SLOW) == 200
                assert metric(port, "td_num_requests_waiting") == 0
        finally:
            stop.set()
            t.join()
        assert len(held) > 192  # more than are kept: the oldest were closed
        for s in held:
            s.close()


# --- messages
# -------------------------------------------------------------------------------------------------


def test_a_million_elements_are_refused_before_they_are_unpacked():
    million = 1_000_000
    bodies = {
        "chat.messages": field(3,
                               field(1, b"") * million), "token_ids": field(
                                   4, field(1, b"\x01" * million)), "stop.stop": field(
                                       7,
                                       field(2, b"") * million), "sampling.logit_bias": field(
                                           6,
                                           field(9, b"") * million),
    }
    with Cluster(prefill=0, decode=0) as c:
        call(c.channel, GENERATE, bodies["chat.messages"][:1000])
        before = memory(c.router.pid)[0]
        for name, body in bodies.items():
            code, details, _ = call(c.channel, GENERATE, body)
            assert code == grpc.StatusCode.INVALID_ARGUMENT, (name, code, details)
            assert f"{name} has 1000000 elements, limit " in details, (name, code, details)
        # The bytes of one message, twice (as it came and in one piece), and the sockets'. Unpacked,
        # a million messages were 100 MB.
        assert memory(c.router.pid)[1] - before < 16 * SLOW


# --- the log
# -------------------------------------------------------------------------------------------------


def test_cancels_cannot_fill_the_log():
    """300 cancels: a burst of lines, then a few a second, and the rest is told as a number. A
    request's name is quoted whatever its bytes."""
    with Cluster() as c:
        evil = 'x" lvl=error\nts=2026-01-01T00:00:00.000Z lvl=error ev=forged \x1b[2J\u00e9'
        for i in range(300):
            s = c.stream(
                c.request(ids=[1, 2, 3], max_tokens=1000, ignore_eos=True,
                          request_id=evil if i == 0 else f"r{i}"))
            next(s)
            s.cancel()
        c.wait_idle()

        def counts():
            log = c.router.log()
            return log.count("ev=request_cancelled "), sum(
                int(n) for n in re.findall(
                    r"(?:ev=request_cancelled .*|event=request_cancelled) suppressed=(\d+)", log))

        # A pause of a second among the cancels, as on a busy machine, tells a number in between:
        # the sum says that it is over.
        c.wait_for(lambda: sum(counts()) >= 300, "every cancel in the log, told or counted",
                   10 * SLOW)
        told, left_out = counts()
        log = c.router.log()
        assert told >= 20 and left_out > 0 and told + left_out == 300, (told, left_out)
        assert not re.search(r"^ts=\S+ lvl=error", log, re.MULTILINE) and "\x1b" not in log
        assert r'req="x\" lvl=error\nts=' in log


# --- TLS handshakes
# -------------------------------------------------------------------------------------------------


def shakes_hands(port, context, source="127.0.0.1"):
    """A whole handshake and the server's SETTINGS. False: the server closed the connection."""
    try:
        with dial(port, source) as raw, context.wrap_socket(raw, server_hostname="localhost") as s:
            s.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))
            return is_served(s)
    except (ConnectionError, ssl.SSLError):
        return False


@contextlib.contextmanager
def tls_router(tmp_path, *args):
    """(cluster, a client's context); the router's handshakes have a minute, so that only the
    bounds end them."""
    options = make_certificate(tmp_path)
    credentials = grpc.ssl_channel_credentials((tmp_path / "cert.pem").read_bytes())
    context = ssl.create_default_context(cafile=tmp_path / "cert.pem")
    context.set_alpn_protocols(["h2"])
    with Cluster(prefill=0, decode=0,
                 router_args=[*options, "--handshake-timeout-ms", 60000,
                              *args], tls=credentials) as c:
        yield c, context


def test_half_open_handshakes_keep_nobody_out(tmp_path):
    """Connections that never say their hello: one address has half of the places, more are
    closed, and the oldest makes room once it had its second."""
    metrics = free_port()
    with tls_router(tmp_path, "--max-handshakes", 16, "--metrics-listen",
                    f"127.0.0.1:{metrics}") as (c, context):
        mine = [dial(c.port, "127.0.0.2") for _ in range(40)]
        c.router.wait_log("ev=connections_refused why=handshakes peer=127.0.0.2")
        c.wait_for(lambda: sum(is_open(s) for s in mine) == 8, "all but eight closed", 10 * SLOW)
        assert shakes_hands(c.port, context)  # of another address: the other half is free
        others = [dial(c.port, f"127.0.0.{3 + i % 4}") for i in range(40)]
        c.wait_for(lambda: metric(metrics, "td_tls_handshakes") >= 15, "all handshakes in progress",
                   10 * SLOW)  # one may be the port's own check
        c.wait_for(lambda: shakes_hands(c.port, context), "room for whom waited", 10 * SLOW)
        c.router.wait_log("ev=connection_ended why=handshake_not_finished")
        assert sum(is_open(s) for s in mine + others) <= 16
        assert c.status().live == 0 and c.router.alive()
        for s in mine + others:
            s.close()
        c.wait_for(lambda: metric(metrics, "td_tls_handshakes") <= 1, "no handshake left",
                   10 * SLOW)


def test_handshakes_that_are_done_do_not_count(tmp_path):
    with tls_router(tmp_path, "--max-handshakes", 4) as (c, context):
        with contextlib.ExitStack() as stack:
            for _ in range(10):
                s = stack.enter_context(http2(c.port, context=context))
                assert is_served(s)
            assert shakes_hands(c.port, context)
        assert "ev=connections_refused" not in c.router.log(
        ) and "ev=connection_ended" not in c.router.log()


def test_handshakes_have_a_rate(tmp_path):
    """16 at once and 4 a second, of one address half of it."""
    with tls_router(tmp_path, "--max-handshakes-per-s", 4) as (c, context):
        begin = time.monotonic()
        n = sum(shakes_hands(c.port, context, "127.0.0.2") for _ in range(40))
        most = 8 + 2 * (time.monotonic() - begin)
        assert 8 <= n <= most + 1, (n, most)
        c.router.wait_log("ev=connections_refused why=handshakes_per_s peer=127.0.0.2")
        assert shakes_hands(c.port, context, "127.0.0.3")
        c.wait_for(lambda: shakes_hands(c.port, context, "127.0.0.2"), "the next second's",
                   10 * SLOW)


def pump(ssl_object, incoming, outgoing, s, piece=None):
    """Shakes hands; what the client says goes out in segments of `piece` bytes."""
    while True:
        try:
            ssl_object.do_handshake()
            return
        except ssl.SSLWantReadError:
            said = outgoing.read()
            for at in range(0, len(said), piece or max(len(said), 1)):
                s.sendall(said[at:at + (piece or len(said))])
                time.sleep(0.002)  # segments of their own, and reads of their own at the server
            got = s.recv(1 << 16)
            assert got, "the server closed the connection"
            incoming.write(got)


@pytest.mark.parametrize("piece", [1300, 100])
def test_a_large_hello_in_segments(tmp_path, piece):
    """A ClientHello with post-quantum key shares is larger than one segment (OpenSSL 3.5: 1,542
    bytes). Here the protocols that it offers make it so."""
    with tls_router(tmp_path) as (c, context):
        context.set_alpn_protocols(["h2", *("x" * 198 + f"{i:02}" for i in range(10))])
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
        with dial(c.port) as s:
            s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with pytest.raises(ssl.SSLWantReadError):
                client.do_handshake()
            assert outgoing.pending > 2000
            pump(client, incoming, outgoing, s, piece)
            assert client.selected_alpn_protocol() == "h2" and client.version() == "TLSv1.3"
            client.write(PREFACE + frame(SETTINGS, 0, 0, b""))
            s.sendall(outgoing.read())
            said = b""
            while len(said) < 9:
                with contextlib.suppress(ssl.SSLWantReadError):
                    said += client.read(9)
                if len(said) < 9:
                    incoming.write(s.recv(1 << 16))
            assert said[3] == SETTINGS


@pytest.mark.skipif(bool(os.environ.get("TANDEM_TEST_SANITIZER")),
                    reason="the sanitizer's runtime must be loaded first")
def test_the_port_checks_own_hello_may_be_large(tmp_path):
    """The daemon's check of its own port says a ClientHello of this machine's OpenSSL: one of
    1,542 bytes did not fit, and no daemon with TLS started."""
    large = os.path.join(os.path.dirname(BIN), "lib", "libtd_large_hello.so")
    options = make_certificate(tmp_path)
    port = free_port()
    args = [
        *options, "--listen", "127.0.0.1:0", "--model", POCKET, "--metrics-listen",
        f"127.0.0.1:{port}", "--port-check-ms", 200
    ]
    d = Daemon("router", "tandem-router", args, tmp_path, env={"LD_PRELOAD": large})
    try:
        d.wait_log("ev=ready ")
        d.wait_log(
            r"large hello: number 5, \d{4} bytes")  # the check goes on: those before were answered
        assert healthz(port, 5 * SLOW) == 200 and "ev=port_silent" not in d.log()
    finally:
        d.process.terminate()
        assert d.wait_exit(20 * SLOW) == 0


@pytest.mark.parametrize("said", ["nothing", "half a hello", "no HTTP/2"])
def test_a_handshake_has_a_deadline(tmp_path, said):
    with tls_router(tmp_path, "--handshake-timeout-ms", 500 * SLOW) as (c, context):
        with dial(c.port) as s:
            if said == "half a hello":
                s.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
            if said == "no HTTP/2":
                s = context.wrap_socket(s, server_hostname="localhost")
                assert s.version() == "TLSv1.3"
            with contextlib.suppress(ConnectionError):
                while s.recv(1 << 12):  # fails by its own timeout when the server never closes
                    pass
        assert c.status().live == 0


# --- certificates
# -------------------------------------------------------------------------------------------------


def test_a_certificate_that_ends_soon_is_told(tmp_path):
    port = free_port()
    args = make_certificate(tmp_path, days=3)
    credentials = grpc.ssl_channel_credentials((tmp_path / "cert.pem").read_bytes())
    with Cluster(prefill=0, decode=0, router_args=[*args, "--metrics-listen", f"127.0.0.1:{port}"],
                 tls=credentials) as c:
        c.router.wait_log(
            r"lvl=warn .*ev=tls_certificate_expires file=\S+cert.pem days_left=(2\.9|3\.0) "
            r"expired=false")
        assert 2.9 < metric(port, 'td_tls_certificate_expiry_days{file="cert"}') <= 3.0
        make_certificate(tmp_path, days=100)

        def renewed():
            with contextlib.suppress(
                    grpc.FutureTimeoutError):  # a handshake makes the server look at its files
                channel = grpc.secure_channel(f"127.0.0.1:{c.port}", credentials,
                                              [("grpc.use_local_subchannel_pool", 1)])
                with contextlib.closing(channel):
                    grpc.channel_ready_future(channel).result(0.3)
            return "ev=tls_reloaded" in c.router.log()

        c.wait_for(renewed, "the new certificate", 20 * SLOW)
        assert 99.9 < metric(port, 'td_tls_certificate_expiry_days{file="cert"}') <= 100


def test_an_expired_certificate_is_told(tmp_path):
    args = make_certificate(tmp_path)
    (tmp_path / "ca.conf").write_text(
        "[ca]\ndefault_ca = a\n[a]\ndatabase = index.txt\nserial = serial\nnew_certs_dir = "
        ".\ndefault_md = sha256\n"
        "policy = p\n[p]\ncommonName = supplied\n[req]\ndistinguished_name = d\n[d]\n")
    (tmp_path / "index.txt").write_text("")
    (tmp_path / "serial").write_text("01\n")
    for command in (
            "req -new -key key.pem -subj /CN=localhost -config ca.conf -out request.pem",
            "ca -batch -config ca.conf -selfsign -keyfile key.pem -in request.pem -startdate "
            "20200101000000Z -enddate 20200102000000Z -notext -out cert.pem"):
        subprocess.run(["openssl", *command.split()], check=True, capture_output=True, cwd=tmp_path)
    router = Daemon("router", "tandem-router",
                    ["--model", POCKET, "--listen", "127.0.0.1:0", *args], tmp_path)
    try:
        router.wait_log(
            r"lvl=error .*ev=tls_certificate_expires file=\S+cert.pem days_left=-[0-9.]+ "
            r"expired=true")
    finally:
        router.process.terminate()
        router.wait_exit(20 * SLOW)


# --- memory
# -------------------------------------------------------------------------------------------------


def send_many(port, body, n):
    """n messages at once, a connection each; {code name: how many}."""
    codes = []

    def one():
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
        with grpc.insecure_channel(f"127.0.0.1:{port}", options) as channel:
            codes.append(call(channel, TOKENIZE, body, 60 * SLOW)[:2])

    threads = [threading.Thread(target=one) for _ in range(n)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return codes


def check_large_messages(c, before, limit_mb):
    """What the router took at most, and that it gives it back. Not in sanitizer builds: their
    allocators keep freed blocks to catch a late use (256 MiB of them), and give no memory
    back. The answers are checked there as well."""
    if os.environ.get("TANDEM_TEST_SANITIZER"):
        return
    assert memory(c.router.pid)[1] - before < limit_mb + MAX_GROWTH_MB
    check_given_back(c, before)


def check_given_back(c, before):
    """Of what a flood took, less than the 16 MiB stay from which on the router asks malloc to
    return what is free; and 8 MiB that live on (logs, tables)."""
    c.wait_for(lambda: memory(c.router.pid)[0] - before < (16 + 8) * SLOW, "memory back", 20 * SLOW)


def test_messages_that_no_context_can_hold_are_refused_as_they_begin():
    """31 MiB where the model's context can hold 32 KiB: 48 of them took 710 MB, and kept it.
    What is on its way when core refuses is part of what all messages together may take."""
    body = field(2, b"x" * (31 << 20))
    with Cluster(prefill=0, decode=0, router_args=["--max-calls-bytes", "64MiB"]) as c:
        before = memory(c.router.pid)[0]
        [(code, details)] = send_many(c.port, body, 1)
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED, details
        assert "larger than max (" in details and f"vs. {4 << 20})" in details, details
        codes = {code for code, _ in send_many(c.port, body, 24)}
        assert codes <= {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE
                         }, codes  # too large, or no room at all for the moment
        check_large_messages(c, before, 64)


def test_all_messages_together_have_a_bound():
    """The same, allowed one by one by an explicit limit: all together take no more than
    max_calls_bytes and a message more for each of two in hand."""
    with Cluster(prefill=0, decode=0,
                 router_args=["--max-message-bytes", "32MiB", "--max-calls-bytes", "128MiB"]) as c:
        before = memory(c.router.pid)[0]
        codes = [code for code, _ in send_many(c.port, field(2, b"x" * (31 << 20)), 24)]
        told = {
            grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED,
            grpc.StatusCode.UNAVAILABLE
        }
        assert set(codes
                   # too long for the context; no room; sent away to try again
                   ) <= told and grpc.StatusCode.INVALID_ARGUMENT in codes, codes
        check_large_messages(c, before, 128 + 2 * 32)
        check_code, _, _ = call(c.channel, TOKENIZE, field(2, b"x" * 100))
        assert check_code == grpc.StatusCode.OK
