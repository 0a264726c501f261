"""`tandem doctor` for real: this machine, a running cluster, a dead one, and two doctors that
measure the way between them."""
import json
import os
import re
import resource
import signal
import socket
import struct
import subprocess
import threading
import time

import pytest

import proofs
from harness import BIN, VERBS_FAKE, SANITIZER, SLOW, TSAN_ENV, Cluster, free_port
from test_surface import certs, credentials, run  # noqa: F401 (certs is a fixture)

LINE = re.compile(r"^  (ok  |warn|FAIL)  (.+?): (.+)$")


def doctor(*args, timeout=60, env=None):
    """(exit status, {name: (level, found)}, text); every line that is not ok is followed by what
    to do."""
    rc, out, err = run(["tandem", "doctor", *args], timeout=timeout, env=env)
    assert not err, err
    return rc, *read(out.decode())


def read(text):
    checks, lines = {}, text.splitlines()
    for i, line in enumerate(lines):
        m = LINE.match(line)
        if m:
            checks[m[2]] = (m[1].strip(), m[3])
            assert m[1] == "ok  " or lines[i + 1].startswith("        fix: "), text
    n = {level: sum(c[0] == level for c in checks.values()) for level in ("ok", "warn", "FAIL")}
    total = re.search(r"^(\d+) ok, (\d+) warn, (\d+) FAIL$", text, re.M)
    assert total and int(total[3]) >= n["FAIL"], text
    return checks, text


def has_rdma():
    return os.path.isdir("/sys/class/infiniband") and os.listdir("/sys/class/infiniband")


TABLES = ("ref", "avx2", "avxvnni", "avx512", "avx512bf16", "amx", "neon", "neonbf16")


def has_gpu():
    return os.path.isdir("/proc/driver/nvidia")


# ---- this host
# -------------------------------------------------------------------------------------------------


def test_this_host():
    began = time.monotonic()
    rc, checks, text = doctor("--kv-memory", "16MiB")
    assert time.monotonic() - began < 10 * SLOW
    assert rc == 0, text
    assert checks["kernel"][1].startswith(f"Linux {os.uname().release} ")
    assert checks["cpu"][1].startswith(
        f"{len(os.sched_getaffinity(0))} of {os.sysconf('SC_NPROCESSORS_ONLN')} CPUs")
    assert checks["memory"] == (
        "ok", checks["memory"][1]) and "KV pool 16 MiB (--kv-memory 16MiB)" in checks["memory"][1]
    assert checks["kernels"][0] == "ok" and checks["kernels"][1].split()[0] in TABLES, text
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert checks["open files"][1] == ("unlimited"
                                       if soft == resource.RLIM_INFINITY else f"limit {soft}")
    if not has_rdma():
        assert checks["devices"][0] == "ok" and checks["devices"][1].startswith("no RDMA device (")
        assert checks["kv path"] == ("ok", "KV will go by shm on this host and tcp between hosts")
    if not has_gpu():
        assert checks["gpu"] == (
            "ok", "no NVIDIA GPU on the PCI bus: workers compute on CPUs, and KV is in host memory")
    if not has_gpu() and not has_rdma():
        assert checks["path"] == ("ok",
                                  "neither an NVIDIA GPU nor an RDMA device: nothing to set up")


def test_what_is_missing_fails(tmp_path):
    rc, checks, text = doctor("--kv-memory", "900TiB")
    assert rc == 1 and checks["memory"][0] == "FAIL", text
    if not has_rdma():
        out = tmp_path / "doctor.json"
        rc, checks, text = doctor("--transfer", "rdma", "--kv-memory", "16MiB", "--json", out)
        assert rc == 1 and checks["devices"][0] == "FAIL" and checks["kv path"][0] == "FAIL", text
        j = json.loads(out.read_text())
        assert j["status"] == 1 and j["fail"] == 2 and len(
            j["checks"]) == j["ok"] + j["warn"] + j["fail"]
        one = next(c for c in j["checks"] if c["name"] == "devices")
        assert one["level"] == "fail" and one["group"] == "rdma" and one["fix"]
    rc, _, err = run(["tandem", "doctor", "--kv-memory", "lots"])
    assert rc == 2 and "lots" in err
    rc, _, err = run(["tandem", "doctor", "--json", "/nonexistent/x", "--local=false"])
    assert rc == 1 and "/nonexistent/x" in err
    rc, _, err = run(["tandem", "doctor", "--listen", "127.0.0.1:0", "--peer", "127.0.0.1:1"])
    assert rc == 2 and "--peer" in err


def test_variables_of_a_worker():
    """In a worker's pod the worker's own variables say what to check; its port is not the
    doctor's."""
    env = {
        "TANDEM_LISTEN": "127.0.0.1:0", "TANDEM_KV_MEMORY": "20MiB", "TANDEM_ROUTER": "127.0.0.1:1"
    }
    rc, out, err = run(["tandem", "doctor", "--timeout-ms", 1000], env=env)
    checks, text = read(out.decode())
    assert rc == 1 and not err and "(--kv-memory 20MiB)" in checks["memory"][1] and checks[
        "router"][0] == "FAIL", text


def test_other_root(tmp_path):
    """A host's /sys below another folder: a card with no driver is seen there."""
    at = tmp_path / "sys/devices/pci0000:d7/0000:d7:00.0/0000:d8:00.0"
    at.mkdir(parents=True)
    (at / "vendor").write_text("0x15b3\n")
    (at / "class").write_text("0x020700\n")
    (tmp_path / "sys/bus/pci/devices").mkdir(parents=True)
    os.symlink("../../../devices/pci0000:d7/0000:d7:00.0/0000:d8:00.0",
               tmp_path / "sys/bus/pci/devices/0000:d8:00.0")
    if not has_rdma():
        rc, checks, text = doctor("--root", tmp_path, "--kv-memory", "16MiB")
        assert rc == 0 and checks["devices"][0] == "warn" and "(first: 0000:d8:00.0)" in checks[
            "devices"][1], text
    rc, out, _ = run(["tandem", "doctor", "--json", "-", "--kv-memory", "16MiB"])
    assert rc == 0 and json.loads(out)["status"] == 0


# ---- cluster
# -------------------------------------------------------------------------------------------------


def test_cluster_and_its_end(tmp_path):
    out = tmp_path / "doctor.json"
    with Cluster(prefill=1, decode=2) as c:
        args = ("--local=false", "--router", f"127.0.0.1:{c.port}", "--timeout-ms", 2000 * SLOW)
        rc, checks, text = doctor(*args, "--json", out)
        assert rc == 0, text
        status = {w.name: w for w in c.status().workers}
        assert set(status) == {"prefill-0", "decode-0", "decode-1"}
        for name, w in status.items():
            assert checks[name][0] == "ok" and checks[name][1].startswith(
                f"serving at {w.address}; round trip"), text
        assert checks["router"][1].startswith(f"serving at 127.0.0.1:{c.port}; ")
        values = {x["name"]: x.get("values", {}) for x in json.loads(out.read_text())["checks"]}
        for name in ["router clock"] + [
                f"{n} clock" for n in status
        ]:  # one machine, one clock: the estimate must be within its own error
            v = values[name]
            assert abs(v["skew_ms"]) <= v["skew_error_ms"] + 0.05, (name, v)
            assert checks[name][0] == "ok", text
        # both workers' tables, with the figures where there was a choice
        assert all(w.kernels.split()[0] in TABLES for w in status.values()), text
        layouts = {w.layout_hash for w in status.values()}
        assert len(layouts) == 1 and checks["KV layout"][1].startswith(
            f"{layouts.pop():016x}, 16 tokens a block, the same on all"), text
        assert checks["versions"][0] == "ok" and {w.version for w in status.values()} == {
            checks["versions"][1].split(" are ")[1].split(",")[0]
        }
        assert checks["roles"] == ("ok", "1 prefill, 2 decode, mode pd, model pocket")
        assert checks["kv paths"][1].startswith("by address: 2 pairs on one host"), text

        c.workers["decode-1"].signal(
            signal.SIGSTOP
        )  # frozen: it does not answer, and is listed until the router has given it up
        began = time.monotonic()
        rc, checks, text = doctor(*args)
        assert time.monotonic() - began < 15 * SLOW
        assert "decode-1" not in checks or (rc == 1 and checks["decode-1"][0] == "FAIL"
                                            and "decode worker at" in checks["decode-1"][1]), text
        assert checks["prefill-0"][0] == "ok" and checks["decode-0"][0] == "ok", text
        c.workers["decode-1"].signal(signal.SIGCONT)
        c.wait_workers(3)
    rc, checks, text = doctor(*args)
    assert rc == 1 and checks["router"][0] == "FAIL" and "unavailable" in checks["router"][1], text


def test_cluster_with_mutual_tls(certs):  # noqa: F811
    args = [
        "--tls-cert", certs / "server.pem", "--tls-key", certs / "server.key", "--tls-ca",
        certs / "ca.pem"
    ]
    with Cluster(router_args=args, worker_args=args, tls=credentials(certs, name="client")) as c:
        at = ["--local=false", "--router", f"127.0.0.1:{c.port}", "--timeout-ms", 5000 * SLOW]
        own = [
            "--tls-ca", certs / "ca.pem", "--tls-cert", certs / "client.pem", "--tls-key",
            certs / "client.key"
        ]
        rc, checks, text = doctor(*at, *own)
        assert rc == 0 and {checks[n][0]
                            for n in ("router", "prefill-0", "decode-0")} == {"ok"}, text
        for wrong in ([], own[:2]):  # plaintext, nobody
            rc, checks, text = doctor(*at, *wrong)
            assert rc == 1 and checks["router"][0] == "FAIL", text


@pytest.mark.parametrize("says", ["nothing", "rubbish"])
def test_router_that_is_none(says):
    """A port that takes connections and never answers, or answers with something else: FAIL
    within the deadline."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen(8)
        kept = []

        def serve():
            while True:
                try:
                    conn, _ = s.accept()
                except OSError:
                    return
                kept.append(conn)
                if says == "rubbish":
                    try:
                        conn.sendall(b"HTTP/1.1 200 OK\r\n\r\nhello")
                    except OSError:
                        pass

        t = threading.Thread(target=serve, daemon=True)
        t.start()
        began = time.monotonic()
        rc, checks, text = doctor("--local=false", "--router", f"127.0.0.1:{s.getsockname()[1]}",
                                  "--timeout-ms", 1000)
        assert time.monotonic() - began < 8 * SLOW
        assert rc == 1 and checks["router"][0] == "FAIL", text
        s.shutdown(socket.SHUT_RDWR)
        for conn in kept:
            conn.close()


# ---- two doctors
# -------------------------------------------------------------------------------------------------


class Listener:
    def __init__(self, *args, env=None):
        self.p = subprocess.Popen(
            [os.path.join(BIN, "tandem"), "doctor", "--listen", "127.0.0.1:0", *map(str, args)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, **TSAN_ENV, **(env or {})})
        line = self.p.stdout.readline().decode()
        m = re.fullmatch(r"listening at (127\.0\.0\.1:\d+)\n", line)
        assert m, (line, self.p.stderr.read())
        self.at = m[1]

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        if self.p.poll() is None:
            self.p.kill()
        self.p.communicate()

    def end(self, timeout=30):
        out, err = self.p.communicate(timeout=timeout * SLOW)
        assert not err and not SANITIZER.search(err.decode()), err
        return self.p.returncode, *read(out.decode())


def test_one_doctor_measures_several_peers_and_one_listener_serves_several(tmp_path):
    out = tmp_path / "doctor.json"
    args = ["--local=false", "--bytes", "1MiB", "--transfer", "tcp", "--timeout-ms", 5000 * SLOW]
    with socket.socket() as closed, Listener("--sessions", 2, "--timeout-ms",
                                             5000 * SLOW) as twice, Listener(
                                                 "--timeout-ms", 5000 * SLOW) as once:
        closed.bind(("127.0.0.1", 0))  # bound, not listening: refused at once
        nobody = f"127.0.0.1:{closed.getsockname()[1]}"
        rc, checks, text = doctor(*args, "--peer", f"{twice.at},{nobody},{once.at}", "--json", out)
        assert rc == 1 and checks[nobody][
            0] == "FAIL", text  # the one that is not there is named, and the others are measured
        values = {x["name"]: x.get("values", {}) for x in json.loads(out.read_text())["checks"]}
        for at in (twice.at, once.at):
            assert checks[at][0] == "ok" and checks[f"{at} tcp"][0] == "ok", text
            v = values[f"{at} tcp"]
            assert v["peer"] == at and v["used"] == "tcp" and v["whole_gb_per_s"] > 0
        rc, theirs, text = once.end()
        assert rc == 0 and theirs["session"][0] == "ok", text
        assert twice.p.poll() is None  # it listens on
        rc, checks, text = doctor(*args, "--peer", twice.at)
        assert rc == 0 and checks["tcp"][0] == "ok", text
        rc, theirs, text = twice.end()
        assert rc == 0 and len(re.findall(r"transfers verified", text)) == 2, text


def test_pair_measures_every_path(tmp_path):
    out = tmp_path / "doctor.json"
    with Listener("--timeout-ms", 5000 * SLOW) as other:
        rc, checks, text = doctor("--local=false", "--peer", other.at, "--bytes", "8MiB",
                                  "--timeout-ms", 5000 * SLOW, "--json", out)
        assert rc == 0, text
        assert checks["auto"] == ("ok", "workers of these two hosts use shm"), text
        values = {x["name"]: x.get("values", {}) for x in json.loads(out.read_text())["checks"]}
        for path in ("tcp", "shm"):
            assert checks[path][0] == "ok" and checks[path][1].startswith(
                f"used {path}; 4 KiB in "), text
            assert checks[path][1].endswith("every byte verified")
            v = values[path]
            assert v["used"] == path and v["small_us"] > 0 and v["many_gb_per_s"] > 0 and v[
                "whole_gb_per_s"] > 0
            assert v["whole_bytes"] <= 8 << 20
        rc, theirs, text = other.end()
        assert rc == 0 and theirs["session"][0] == "ok", text
        assert int(re.search(r" port \d+: (\d+) transfers verified, ",
                             text)[1]) >= 2 * (8 + 8 + 1), text


@pytest.mark.parametrize("path", ["tcp", "shm"])
def test_pair_one_path(path):
    with Listener("--timeout-ms", 5000 * SLOW) as other:
        rc, checks, text = doctor("--local=false", "--peer", other.at, "--bytes", "2MiB",
                                  "--transfer", path, "--timeout-ms", 5000 * SLOW)
        assert rc == 0 and checks[path][1].startswith(f"used {path}; "), text
        assert not {"auto", "tcp", "shm", "rdma"} - {path} & set(checks), text
        assert other.end()[0] == 0


def test_a_fallback_is_no_success():
    """rdma asked for where there is none: FAIL with a reason, and no other path is tried in its
    place."""
    if has_rdma():
        pytest.skip("this machine has RDMA devices")
    with Listener("--timeout-ms", 5000 * SLOW) as other:
        rc, checks, text = doctor("--local=false", "--peer", other.at, "--bytes", "2MiB",
                                  "--transfer", "rdma", "--timeout-ms", 5000 * SLOW)
        assert rc == 1 and checks["rdma"][0] == "FAIL" and "rdma" in checks["rdma"][1].lower(), text
        assert not {"tcp", "shm", "auto"} & set(checks), text
        rc, theirs, text = other.end()
        assert rc == 0 and ": 0 transfers verified" in theirs["session"][1], text


PAIR = ["--local=false", "--bytes", "2MiB", "--timeout-ms", 5000 * SLOW]


@pytest.fixture
def fabric(tmp_path):
    """The provider of RDMA in memory, one file for both processes, two devices in each."""
    return {
        "TANDEM_VERBS_FAKE": f"path={tmp_path / 'fabric'},devices=2",
        "TANDEM_VERBS_LIBRARY": VERBS_FAKE
    }


def rdma_names(env):
    _, checks, text = doctor("--register", "1MiB", env=env)
    names = [m[1] for name in checks if (m := re.fullmatch(r"(\S+) port 1", name))]
    assert len(names) == 2, text
    return names


def test_pair_over_rdma(fabric):
    """Devices, GID and traffic class as a worker is given them; both sides count."""
    names = rdma_names(fabric)
    options = [
        "--transfer", "rdma", "--rdma-devices", names[1], "--rdma-gid-index", 3,
        "--rdma-traffic-class", 98, "--test-rdma-windows"
    ]
    with Listener("--timeout-ms", 5000 * SLOW, *options, env=fabric) as other:
        rc, checks, text = doctor(*PAIR, "--peer", other.at, *options, env=fabric)
        assert rc == 0 and checks["rdma"][1].startswith(
            "used rdma; 4 KiB in ") and checks["rdma"][1].endswith("every byte verified"), text
        assert "RDMA devices yes here, yes there" in checks["peer"][
            1] and not {"tcp", "shm", "auto"} & set(checks), text
        assert other.end()[0] == 0


@pytest.mark.parametrize(
    "option", [["--rdma-devices", "none_0"], ["--rdma-gid-index", "77"], ["--rdma-port", "2"]],
    ids=lambda o: o[0])
@pytest.mark.parametrize("side", ["here", "there"])
def test_pair_over_rdma_that_is_not_there(fabric, option, side):
    """What a worker with these options would refuse, doctor refuses, with the value in the
    message; whichever side has it."""
    there, here = (option, []) if side == "there" else ([], option)
    with Listener("--timeout-ms", 5000 * SLOW, *there, env=fabric) as other:
        rc, checks, text = doctor(*PAIR, "--peer", other.at, "--transfer", "rdma", *here,
                                  env=fabric)
        assert rc == 1 and checks["rdma"][0] == "FAIL" and re.search(rf"\b{option[1]}\b",
                                                                     checks["rdma"][1]), text
        assert ": 0 transfers verified" in other.end()[1]["session"][1]


def test_local_checks_follow_the_options(fabric):
    names = rdma_names(fabric)
    _, checks, text = doctor("--register", "1MiB", "--rdma-devices", f"{names[1]},none_0",
                             env=fabric)
    assert checks["none_0"][0] == "FAIL" and checks[names[0]] == (
        "ok", "left out: --rdma-devices does not name it"), text
    assert f"{names[1]} port 1" in checks and f"{names[0]} port 1" not in checks, text
    _, checks, text = doctor("--register", "1MiB", "--rdma-gid-index", 3, env=fabric)
    assert checks[f"{names[0]} port 1 gid"][1].startswith("index 3, "), text


def kv_tls(certs, name):  # noqa: F811
    return [
        "--tls-cert", certs / f"{name}.pem", "--tls-key", certs / f"{name}.key", "--tls-ca",
        certs / "ca.pem"
    ]


NAME = ["--kv-tls-peer-name", "*.kv.tandem"]


@pytest.mark.parametrize("path", ["tcp", "rdma"])
def test_pair_over_tls(certs, fabric, path):  # noqa: F811
    options = ["--transfer", path, *kv_tls(certs, "worker"), *NAME]
    with Listener("--timeout-ms", 5000 * SLOW, *options, env=fabric) as other:
        rc, checks, text = doctor(*PAIR, "--peer", other.at, *options, env=fabric)
        words = {
            "tcp": "used tcp over TLS; ", "rdma": "used rdma (set up over TLS, KV in the clear); "
        }[path]
        assert rc == 0 and checks[path][1].startswith(words), text
        assert other.end()[0] == 0


def worker_tls(c):
    return kv_tls(c, "worker")


def no_tls(_):
    return []


TLS_PAIRS = {  # the listener's, the leader's, what the leader says
    "only the leader": (no_tls, worker_tls, "its KV port is in the clear and this side speaks TLS"),
    "only the listener": (worker_tls, no_tls, "its KV port speaks TLS and this side does not"),
    "switched off here": (worker_tls, lambda c: [*kv_tls(c, "worker"), "--test-kv-tls", "off"],
                          "its KV port speaks TLS"),
    "another name leads": (lambda c: [*kv_tls(c, "worker"), *NAME], lambda c: kv_tls(c, "client"),
                           "alert bad certificate"),
    "another name listens": (lambda c: kv_tls(c, "client"), lambda c: [*kv_tls(c, "worker"), *NAME],
                             "hostname mismatch"),
    "another CA": (worker_tls, lambda c: kv_tls(c, "stranger"), "alert unknown ca"),
    "no such file": (worker_tls, lambda c: kv_tls(c, "nobody"), "nobody.pem"),
}


@pytest.mark.parametrize("path, pair", [
    *(("tcp", pair) for pair in TLS_PAIRS), ("rdma", "another name leads"),
    ("rdma", "another name listens")
])
def test_pair_whose_tls_does_not_fit(certs, fabric, path, pair):  # noqa: F811
    """RDMA as well: who may not set a connection up has no queue pair and no key."""
    there, here, says = TLS_PAIRS[pair]
    with Listener("--timeout-ms", 5000 * SLOW, *there(certs), env=fabric) as other:
        rc, checks, text = doctor(*PAIR, "--peer", other.at, "--transfer", path, *here(certs),
                                  env=fabric)
        assert rc == 1 and checks[path][0] == "FAIL" and says in checks[path][
            1] and "--tls-ca" in text, text
        assert ": 0 transfers verified" in other.end()[1]["session"][1]


SECRET_PAIRS = {  # the listener's, the leader's, what the leader says
    "only the leader": (None, "a", "its KV port proves no cluster secret and this side asks for "
                                   "one"),
    "only the listener": ("a", None, "its KV port asks for the cluster secret and this side has "
                                     "none"),
    "another secret": ("a", "b", "the cluster secret was not proved"),
    "the same": ("a", "a", None),
}


@pytest.mark.parametrize("path", ["tcp", "rdma"])
@pytest.mark.parametrize("pair", SECRET_PAIRS)
def test_pair_with_a_cluster_secret(fabric, path, pair, tmp_path):
    there, here, says = SECRET_PAIRS[pair]

    def secret(which):
        return [
            "--cluster-secret-file",
            proofs.write_secret(tmp_path / which, f"doctor-{which}-0123456789abcdefghijklmnop")
        ] if which else []

    with Listener("--timeout-ms", 5000 * SLOW, *secret(there), env=fabric) as other:
        rc, checks, text = doctor(*PAIR, "--peer", other.at, "--transfer", path, *secret(here),
                                  env=fabric)
        ended = other.end()
        if says:
            assert rc == 1 and checks[path][0] == "FAIL" and says in checks[path][1], text
            assert ": 0 transfers verified" in ended[1]["session"][1]
        else:
            assert rc == 0 and checks[path][1].startswith(f"used {path}; ") and ended[0] == 0, text


def test_data_port_can_be_pinned():
    """For a firewall between the two. The variable of a worker in the same pod does not count:
    its port is taken."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port, worker_port = free_port(), taken.getsockname()[1]
        with Listener("--timeout-ms", 5000 * SLOW, "--transfer-port", port,
                      env={"TANDEM_TRANSFER_PORT": str(worker_port)}) as other:
            rc, checks, text = doctor(*PAIR, "--peer", other.at, "--transfer", "tcp",
                                      env={"TANDEM_TRANSFER_PORT": str(worker_port)})
            assert rc == 0, text
            assert other.end()[0] == 0
        with Listener("--timeout-ms", 5000 * SLOW, "--transfer-port", worker_port) as other:
            rc, checks, text = doctor(*PAIR, "--peer", other.at, "--transfer", "tcp")
            assert rc == 1 and str(worker_port) in checks["tcp"][1], text


def test_nobody_there_and_nobody_comes():
    with socket.socket() as s:  # bound, not listening: refused at once
        s.bind(("127.0.0.1", 0))
        rc, checks, text = doctor("--local=false", "--peer", f"127.0.0.1:{s.getsockname()[1]}",
                                  "--timeout-ms", 2000)
        assert rc == 1 and checks["peer"][0] == "FAIL", text
    with socket.socket() as s:  # listening, silent
        s.bind(("127.0.0.1", 0))
        s.listen(1)
        began = time.monotonic()
        rc, checks, text = doctor("--local=false", "--peer", f"127.0.0.1:{s.getsockname()[1]}",
                                  "--timeout-ms", 500)
        assert rc == 1 and checks["peer"][0] == "FAIL" and "no answer in time" in checks["peer"][
            1], text
        assert time.monotonic() - began < 5 * SLOW
    with Listener("--listen-timeout-ms", 300) as other:
        rc, checks, text = other.end()
        assert rc == 1 and checks["listen"] == ("FAIL", "no --peer came in time"), text


def test_strangers_do_not_end_the_listening():
    with Listener("--timeout-ms", 5000 * SLOW) as other:
        host, port = other.at.rsplit(":", 1)
        for bytes_ in (b"", b"GET / HTTP/1.1\r\n\r\n".ljust(4096, b"x"), bytes(4096)):
            with socket.create_connection((host, int(port)), timeout=10 * SLOW) as s:
                s.sendall(bytes_)
                if bytes_:
                    try:
                        assert s.recv(1) == b""  # told nothing
                    except ConnectionResetError:
                        pass
        rc, checks, text = doctor("--local=false", "--peer", other.at, "--bytes", "1MiB",
                                  "--transfer", "tcp", "--timeout-ms", 5000 * SLOW)
        assert rc == 0, text
        rc, theirs, text = other.end()
        assert rc == 0 and theirs["session"][0] == "ok" and text.count("stranger") == 3, text


HELLO, OPEN, GRANT, VERIFY, BYE = range(1, 6)
MESSAGE = struct.Struct("<IHBBiBBHQQ16sIIII256s704s3072s")  # cli/doctor_wire.h
assert MESSAGE.size == 4096


def message(kind, answer=0, status=0, path=1, blob=b"", block_bytes=0, seed=0, host=b"", n_blocks=0,
            slot=0, first=0, n=0, text=b""):
    return MESSAGE.pack(0x31444454, 1, kind, answer, status, path, 0, len(blob), block_bytes, seed,
                        host, n_blocks, slot, first, n, text, b"", blob)


def receive(conn):
    data = b""
    while len(data) < 4096:
        part = conn.recv(4096 - len(data))
        if not part:
            return None
        data += part
    return MESSAGE.unpack(data)


FALSE_LEADERS = {
    "goes": [], "no such path": [message(OPEN, path=9, block_bytes=4096, n_blocks=64)],
    "pool too large": [message(OPEN, block_bytes=1 << 20, n_blocks=4096)], "grant without a pool": [
        message(GRANT, n=1)
    ], "hello twice": [message(HELLO)], "no message": [b"x" * 4096], "blocks beyond the pool": [
        message(OPEN, block_bytes=4096, n_blocks=64),
        message(GRANT, first=60, n=5)
    ], "an unknown slot": [
        message(OPEN, block_bytes=4096, n_blocks=64),
        message(VERIFY, n=1, slot=64)
    ],
}


@pytest.mark.parametrize("does", FALSE_LEADERS)
def test_a_leader_that_is_not_to_be_trusted(does):
    """Whatever comes after the hello, the listener ends at once, says FAIL and has verified
    nothing."""
    with Listener("--timeout-ms", 5000 * SLOW) as other:
        host, port = other.at.rsplit(":", 1)
        with socket.create_connection((host, int(port)), timeout=30 * SLOW) as s:
            s.sendall(message(HELLO))
            answer = receive(s)
            assert answer[2:5] == (HELLO, 1, 0)
            for m in FALSE_LEADERS[does]:
                s.sendall(m)
                if m is not FALSE_LEADERS[does][-1]:
                    assert receive(s)[2:5] == (OPEN, 1, 0)
            if FALSE_LEADERS[does]:
                try:
                    assert receive(s) is None
                except ConnectionResetError:
                    pass
        rc, checks, text = other.end()
        assert rc == 1 and checks["session"][0] == "FAIL" and ": 0 transfers verified" in checks[
            "session"][1], text


FALSE_LISTENERS = {  # what it answers, in turn, after the hello; then it goes
    "goes": ([], "the other doctor"),
    "refuses": ([message(OPEN, 1, -5, text=b"not\x1b[31m here")], "not?[31m here"),
    "answers another question": ([message(GRANT, 1)], "answer 3 to question 2"),
    "gives no grant": ([message(OPEN, 1), message(GRANT, 1, blob=b"")], ""),
    "gives a false grant": ([message(OPEN, 1), message(GRANT, 1, blob=bytes(280))], ""),
    "text without end": ([message(OPEN, 1, text=b"x" * 256)], "text"),
}


@pytest.mark.parametrize("does", FALSE_LISTENERS)
def test_a_listener_that_is_not_to_be_trusted(does):
    answers, says = FALSE_LISTENERS[does]
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen(1)
        s.settimeout(30 * SLOW)

        def serve():
            conn, _ = s.accept()
            conn.settimeout(30 * SLOW)
            with conn:
                for m in [message(HELLO, 1), *answers]:
                    if receive(conn) is None:
                        return
                    conn.sendall(m)

        t = threading.Thread(target=serve)
        t.start()
        at = f"127.0.0.1:{s.getsockname()[1]}"
        rc, checks, text = doctor("--local=false", "--peer", at, "--bytes", "1MiB", "--transfer",
                                  "tcp", "--timeout-ms", 3000 * SLOW)
        t.join()
        assert rc == 1 and checks["tcp"][0] == "FAIL" and says in checks["tcp"][1], text
