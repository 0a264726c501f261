"""Who floods a daemon from outside: connections, slow HTTP, endless headers, huge or many messages. Each attack is small, and each daemon must go on
serving others while it lasts and be as before when it is over."""
import contextlib
import ctypes
import errno
import os
import resource
import socket
import ssl
import struct
import subprocess
import threading
import time
import urllib.error
import urllib.request

import grpc
import pytest

from harness import SLOW, Cluster, free_port

SYS_PIDFD_OPEN, SYS_PIDFD_GETFD = 434, 438
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind, flags, stream, payload):
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


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


def dial(port, source=None):
    s = socket.socket()
    s.settimeout(10 * SLOW)
    if source:
        s.bind((source, 0))
    s.connect(("127.0.0.1", port))
    return s


def is_served(s):
    """The server's SETTINGS frame came: core has the connection. False: it was closed."""
    try:
        return len(s.recv(9)) > 0
    except ConnectionError:
        return False


def check_serves(c):
    """A new connection, a whole request."""
    c.connect()
    r = c.generate(ids=[1, 2, 3], max_tokens=2, temperature=0, ignore_eos=True, timeout=20 * SLOW)
    assert r.code == grpc.StatusCode.OK, (r.code, r.details)


def test_a_listener_survives_running_out_of_descriptors():
    """gRPC core gives up its listener at the first EMFILE; the limit is lowered under the running router, so no bound of ours comes first."""
    port = free_port()
    with Cluster(router_args=["--metrics-listen", f"127.0.0.1:{port}", "--port-check-ms", 200]) as c:
        resource.prlimit(c.router.pid, resource.RLIMIT_NOFILE, (1024, 1024))
        held = []
        for _ in range(1200):
            with contextlib.suppress(ConnectionError):
                held.append(dial(c.port))
        assert len(held) > 1000
        time.sleep(1)  # the attack: all of them held for a second
        for s in held:
            s.close()
        check_serves(c)
        assert healthz(port) == 200
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
        Cluster.wait_for(lambda: is_served(dial(c.port, "127.0.0.2")), "room for a connection", 5 * SLOW)
        check_serves(c)


# --- HTTP/2 ---------------------------------------------------------------------------------------------------------

GENERATE = b"/tandem.v1.Inference/Generate"
# HPACK, no indexing but of the static table: :method POST, :scheme http, :path, :authority x, content-type, te.
CALL = (b"\x83\x86\x04" + bytes([len(GENERATE)]) + GENERATE + b"\x01\x01x" + b"\x0f\x10\x10application/grpc" + b"\x00\x02te\x08trailers")
HEADERS, RST_STREAM, SETTINGS, CONTINUATION, END_HEADERS = 1, 3, 4, 9, 4


def http2(port, source=None, context=None):
    s = dial(port, source)
    if context:
        s = context.wrap_socket(s, server_hostname="localhost")
    s.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))
    return s


def memory(pid):
    """(resident, most ever resident) in MiB."""
    with open(f"/proc/{pid}/status", encoding="ascii") as f:
        lines = dict(line.split(":", 1) for line in f)
    return [int(lines[k].split()[0]) / 1024 for k in ("VmRSS", "VmHWM")]


def flood(s, payload, most):
    """Sends payload again and again until the server ends the connection; how many bytes that took. At most `most`."""
    n = 0
    try:
        while n < most:
            s.sendall(payload)
            n += len(payload)
    except OSError:
        return n
    raise AssertionError(f"{n} bytes were taken")


def continuation_flood(s, headers):
    """HEADERS without END_HEADERS, then CONTINUATION after CONTINUATION: the server must end it within what sockets buffer."""
    s.sendall(frame(HEADERS, 0, 1, CALL))
    flood(s, frame(CONTINUATION, 0, 1, headers) * 16, 64 << 20)


# What a header costs core is not what it costs the wire: an indexed one is a byte there.
HEADER_BYTES = {"indexed": b"\x90" * 16000, "empty values": b"\x00\x01a\x00" * 4000, "one endless value": b"\x00\x01a\x7f\xff\xff\xff\xff\x07" + b"x" * 16000}
# One connection's headers may hold 64 KiB x 72 = 4.7 MB in core; the rest is malloc's and the sockets'.
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
    """Each of 400 connections stays within its own bound and never sends the rest. 32 may be so at once, and take 1.2 MB each (the 400: 460 MB)."""
    with Cluster(prefill=0, decode=0) as c:
        before = memory(c.router.pid)[0]
        held = []
        for _ in range(400):
            held.append(http2(c.port))
            with contextlib.suppress(OSError):
                held[-1].sendall(frame(HEADERS, 0, 1, b"\x90" * 16000))
        c.router.wait_log("ev=connection_ended why=large_header_blocks")
        assert c.status().live == 0  # others are served meanwhile
        assert memory(c.router.pid)[1] - before < 32 * 1.2 + MAX_GROWTH_MB
        for s in held:
            s.close()


def test_streams_before_the_settings_ack_are_few():
    """max_concurrent_streams binds nobody before his ACK: 100,000 calls of 60 bytes took 1.2 GB."""
    with Cluster(prefill=0, decode=0, router_args=["--max-requests", 64]) as c:
        before = memory(c.router.pid)[0]
        with http2(c.port) as s, pytest.raises(OSError):
            for first in range(1, 200001, 2000):
                s.sendall(b"".join(frame(HEADERS, END_HEADERS, first + i, CALL) for i in range(0, 2000, 2)))
        c.router.wait_log("ev=connection_ended why=streams_before_settings_ack")
        assert memory(c.router.pid)[1] - before < MAX_GROWTH_MB
        assert c.status().live == 0


def test_calls_taken_back_at_once_are_few():
    """Rapid reset: HEADERS and RST_STREAM, which no limit of live calls sees."""
    with Cluster(prefill=0, decode=0) as c:
        with http2(c.port) as s, pytest.raises(OSError):
            s.sendall(frame(SETTINGS, 1, 0, b""))
            for first in range(1, 200001, 2000):
                s.sendall(b"".join(frame(HEADERS, END_HEADERS, first + i, CALL) + frame(RST_STREAM, 0, first + i, b"\0\0\0\x08")
                                   for i in range(0, 2000, 2)))
        c.router.wait_log("ev=connection_ended why=cheap_frames")
        c.wait_for(lambda: c.status().live == 0, "no live call", 10 * SLOW)


def make_certificate(folder, days=2):
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", str(days), "-subj", "/CN=localhost",
                    "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", folder / "key.pem", "-out", folder / "cert.pem"], check=True,
                   capture_output=True)
    return ["--tls-cert", folder / "cert.pem", "--tls-key", folder / "key.pem"]


def test_endless_headers_cost_little_with_tls_too(tmp_path):
    args = make_certificate(tmp_path)
    credentials = grpc.ssl_channel_credentials((tmp_path / "cert.pem").read_bytes())
    context = ssl.create_default_context(cafile=tmp_path / "cert.pem")
    context.set_alpn_protocols(["h2"])
    with Cluster(prefill=0, decode=0, router_args=[*args, "--port-check-ms", 100], tls=credentials) as c:
        before = memory(c.router.pid)[0]
        with http2(c.port, context=context) as s:
            continuation_flood(s, HEADER_BYTES["indexed"])
        c.router.wait_log("ev=connection_ended why=header_block_bytes")
        assert memory(c.router.pid)[1] - before < MAX_GROWTH_MB
        assert c.status().live == 0
        assert "ev=port_silent" not in c.router.log() and "andshak" not in c.router.log()  # the port's own check leaves no trace


def test_calls_are_capped_by_address():
    """Calls that never send their message: one address holds its share, another is served."""
    with Cluster(router_args=["--max-calls-per-peer", 8]) as c:
        with http2(c.port, "127.0.0.2") as s:
            for i in range(12):
                s.sendall(frame(HEADERS, END_HEADERS, 1 + 2 * i, CALL))
            c.wait_for(lambda: c.status() and read_refused(s) == 4, "four refused calls", 10 * SLOW)
            check_serves(c)


def read_refused(s, seen={}):
    """How many streams of the connection have ended with trailers so far (HEADERS with END_STREAM)."""
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
    """The listener is shut down behind the router's back: health follows the port, then the process ends with an error."""
    port = free_port()
    with Cluster(router_args=["--metrics-listen", f"127.0.0.1:{port}", "--port-check-ms", 300 * SLOW]) as c:
        assert healthz(port) == 200
        with listener_of(c.router.pid, c.port) as listener:
            listener.shutdown(socket.SHUT_RDWR)
        c.router.wait_log("ev=port_silent .*action=health_not_serving", 20 * SLOW)
        assert healthz(port) == 503
        c.router.wait_log("ev=port_deaf", 20 * SLOW)
        assert c.router.wait_exit(20 * SLOW) == 1
        for d in c.workers.values():
            assert d.alive()  # they wait for the next router


def test_slow_http_does_not_hide_health():
    """64 half-open connections, then 130 new ones a second that each send a byte at a time: /healthz answers within a second all along."""
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
