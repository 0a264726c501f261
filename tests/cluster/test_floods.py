"""Who floods a daemon from outside: connections, slow HTTP, endless headers, huge or many messages. Each attack is small, and each daemon must go on
serving others while it lasts and be as before when it is over."""
import contextlib
import ctypes
import errno
import os
import resource
import socket
import struct
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


def test_calls_are_capped_by_address():
    """Calls that never send their message: one address holds its share, another is served."""
    with Cluster(router_args=["--max-calls-per-peer", 8]) as c:
        with dial(c.port, "127.0.0.2") as s:
            s.sendall(PREFACE + frame(4, 0, 0, b""))
            # HPACK: :method POST, :scheme http, :path, :authority x, content-type, te.
            path = b"/tandem.v1.Inference/Generate"
            block = (b"\x83\x86\x04" + bytes([len(path)]) + path + b"\x01\x01x" + b"\x0f\x10\x10application/grpc" + b"\x00\x02te\x08trailers")
            for i in range(12):
                s.sendall(frame(1, 4, 1 + 2 * i, block))
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
