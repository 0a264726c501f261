"""What operators and standard tools touch: health, reflection, TLS, metrics, the decision log,
every command's help and its work, back-pressure."""
import array
import csv
import fcntl
import json
import math
import os
import re
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import termios
import threading
import time
import urllib.request

import grpc
import proofs
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from harness import (BIN, POCKET, ROOT, SANITIZER, SHORT, SLOW, TSAN_ENV, Cluster, free_port, nap,
                     pb, wpb)
from test_bad_input import call, field, tcp_ports
from test_metrics import scrape

Code = grpc.StatusCode
OK = Code.OK
DAEMONS = ["tandem-router", "tandem-prefill", "tandem-decode"]
COMMANDS = ["up", "generate", "chat", "status", "doctor", "tokenize", "logits", "engine-bench"]


def run(args, stdin=b"", timeout=60, env=None):
    """One command to its end: (exit status, stdout, stderr)."""
    full = {**os.environ, **TSAN_ENV, **(env or {})}
    p = subprocess.run([os.path.join(BIN, args[0]), *map(str, args[1:])], input=stdin,
                       capture_output=True, timeout=timeout * SLOW, env=full, check=False)
    err = p.stderr.decode("utf-8", "replace")
    assert not SANITIZER.search(err), err[-5000:]
    return p.returncode, p.stdout, err


# ---- help, version, unknown flags
# -------------------------------------------------------------------------------------------------

PROGRAMS = [[d] for d in DAEMONS] + [["tandem", c] for c in COMMANDS]

PROGRAMS = PROGRAMS[::3] if SHORT else PROGRAMS


@pytest.mark.parametrize("program", PROGRAMS, ids=[" ".join(p) for p in PROGRAMS])
def test_help_version_and_unknown_flags(program):
    rc, out, err = run([*program, "--help"])
    assert rc == 0 and not err
    flags = re.findall(r"^  (--[a-z0-9-]+)", out.decode(), re.M)
    assert len(flags) > 5 and {"--help", "--version", "--print-config"} <= set(flags)
    rc, out, err = run([*program, "--version"])
    assert rc == 0 and re.search(r"\d+\.\d+\.\d+", out.decode()) and not err
    required = ["--model", POCKET
                ] if "--model" in flags and program[-1] not in ("generate", "chat") else []
    if program[-1] == "logits":
        required += ["--tokens", "1", "--out", "/dev/null"]
    rc, out, err = run([*program, *required, "--print-config"])
    assert rc == 0 and not err, err
    printed = dict(line.split("=", 1) for line in out.decode().splitlines())
    assert {f[2:].replace("-", "_")
            for f in flags} - {"help", "version", "print_config"} == set(printed)
    name = flags[0][2:]
    wrong = "--" + name[:-1] + ("x" if name[-1] != "x" else "y") + "zz"
    rc, out, err = run([*program, *required, wrong, "1"])
    assert rc == 2 and wrong in err and f"--{name}" in err and len(err.splitlines()) == 1, err
    rc, out, err = run([*program, *required, flags[0]])  # a value is missing
    assert rc == 2 and flags[0] in err, err


KV_PORT = {
    "transfer_port": "4711", "rdma_devices": "a,b", "rdma_port": "2", "rdma_gid_index": "3",
    "rdma_traffic_class": "98", "rdma_pull": "true", "kv_tls_peer_name": "*.kv.tandem",
    "tls_cert": "c", "tls_key": "k", "tls_ca": "ca", "tls_server_name": "router.tandem"
}


@pytest.mark.parametrize("program", [["tandem-prefill"], ["tandem-decode"], ["tandem", "doctor"]],
                         ids=["prefill", "decode", "doctor"])
def test_kv_port_options_are_the_same_everywhere(program):
    """What a worker takes, doctor takes: by flag and (but for the port, which is the worker's)
    by variable, with the same bounds and words."""
    rc, out, err = run([*program, "--help"])
    assert rc == 0, err
    wanted = run(["tandem-decode", "--help"])[1].decode()
    pages = [
        dict(re.findall(r"^  --([a-z0-9-]+)(.*?)(?=^  --|\Z)", page, re.M | re.S))
        for page in (out.decode(), wanted)
    ]
    for name in KV_PORT:
        flag = name.replace("_", "-")
        assert flag in pages[0], flag
        if not name.startswith("tls_"):  # doctor's words for those differ
            assert pages[0][flag] == pages[1][flag], flag
    rc, out, err = run(
        [*program, *(f"--{k.replace('_', '-')}={v}" for k, v in KV_PORT.items()), "--print-config"])
    printed = dict(line.split("=", 1) for line in out.decode().splitlines())
    assert rc == 0 and {k: printed[k] for k in KV_PORT} == KV_PORT, err
    rc, out, err = run([*program, "--print-config"],
                       env={f"TANDEM_{k.upper()}": v for k, v in KV_PORT.items()})
    printed = dict(line.split("=", 1) for line in out.decode().splitlines())
    expected = {**KV_PORT, "transfer_port": "0"} if program[-1] == "doctor" else KV_PORT
    assert rc == 0 and {k: printed[k] for k in KV_PORT} == expected, err
    for bad in ("--rdma-port=0", "--rdma-gid-index=-2", "--rdma-traffic-class=256",
                "--test-kv-tls=maybe", "--transfer-port=65536"):
        rc, _, err = run([*program, bad])
        assert rc == 2 and bad[2:].split("=")[0].replace("-", "_") in err.replace("-", "_"), err


WORKERS, ALL = DAEMONS[1:], DAEMONS
DECIDED = {  # options of earlier versions: who had it, and a word of what decides now
    "transfer_lanes": (WORKERS, "4 sockets"), "transfer_zerocopy": (WORKERS, "kernel"),
    "transfer_parts": (WORKERS[:1], "256 KiB"), "rdma_qps_per_rail": (WORKERS, "800 Gb/s"),
    "rdma_timeout": (WORKERS, "4.096 us"), "rdma_service_level": (WORKERS, "always 0"),
    "rdma_srq_peers": (WORKERS, "64 peers"), "rdma_windows": (WORKERS, "pool's own key"),
    "rdma_gpu_flush": (WORKERS, "driver"), "kv_tls": (WORKERS, "tls_cert, tls_key and tls_ca"),
    "device_index": (WORKERS, "CUDA_VISIBLE_DEVICES"), "tls_client_auth": (ALL, "tls_ca"),
    "hybrid_local_tokens": (ALL[:1], "64 tokens")
}


def test_options_that_are_decided_are_refused_by_name():
    """By flag and by variable, with what decides it now; status 2 and one line. tandem doctor
    takes what workers take."""
    # 13 options, of three programs, in three forms: each is a process
    for name, (daemons, says) in list(DECIDED.items())[::4 if SHORT else 1]:
        flag, variable = "--" + name.replace("_", "-"), f"TANDEM_{name.upper()}"
        programs = [[d, "--model", POCKET] for d in daemons]
        if name.split("_")[0] in ("transfer", "rdma", "kv") and daemons == WORKERS:
            programs.append(["tandem", "doctor"])
        for program in programs:
            for args, env, source in (([flag, "1"], {}, flag), ([f"{flag}=1"], {}, flag),
                                      ([], {variable: "1"}, variable)):
                rc, out, err = run([*program, *args, "--print-config"], env=env)
                assert rc == 2 and not out and len(err.splitlines()) == 1, (program, err)
                assert f"{source} is no longer an option: " in err and says in err, (program, err)
                assert len(err) < 250, err  # whole: a struct td_err cuts at 255


def test_tandem_itself():
    assert run(["tandem", "--help"])[0] == 0 and run(["tandem", "--version"])[0] == 0
    assert run(["tandem"])[0] == 2
    rc, _, err = run(["tandem", "fly"])
    assert rc == 2 and "fly" in err


def test_no_cluster_is_said_so():
    for command in ("status", "generate", "chat"):
        rc, _, err = run(["tandem", command, "--server", "127.0.0.1:1"], stdin=b"hello\n")
        assert rc == 1 and "UNAVAILABLE" in err and "127.0.0.1:1" in err, err


# ---- tandem up and its clients
# -------------------------------------------------------------------------------------------------


class Up:
    """`tandem up` as a user starts it; stdout and stderr are read as they come."""
    def __init__(self, *args):
        self.at = f"127.0.0.1:{free_port()}"
        env = {**os.environ, **TSAN_ENV}
        self.p = subprocess.Popen([
            os.path.join(BIN, "tandem"), "up", "--model", POCKET, "--listen", self.at, "--dtype",
            "f32", "--kv-memory", "16MiB", *map(str, args)
        ], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env,
                                  start_new_session=True)
        self.out, self.err = b"", b""
        self.threads = [
            threading.Thread(target=self._read, args=(n, ), daemon=True) for n in ("out", "err")
        ]
        for t in self.threads:
            t.start()
        self.wait_for(lambda: b"--cluster-secret-file" in self.out and self.out.endswith(b"\n"), 60)
        self.secret = self.out.split()[-1].decode()
        self.pids = [w["pid"] for w in self.status()["workers"]] + self.children()

    def _read(self, which):
        f = self.p.stdout if which == "out" else self.p.stderr
        while data := os.read(f.fileno(), 65536):
            setattr(self, which, getattr(self, which) + data)

    def wait_for(self, condition, timeout):
        begin = time.monotonic()
        while not condition():
            assert time.monotonic() < begin + timeout * SLOW, (self.out[-500:], self.err[-3000:])
            nap(begin)

    def children(self):
        with open(f"/proc/{self.p.pid}/task/{self.p.pid}/children", encoding="ascii") as f:
            return [int(x) for x in f.read().split()]

    def cli(self, command, *args, stdin=b""):
        secret = ["--cluster-secret-file", self.secret] if command == "status" else []
        return run(["tandem", command, "--server", self.at, *secret, *args], stdin)

    def status(self):
        rc, out, err = self.cli("status", "--json")
        assert rc == 0, err
        return json.loads(out)

    def end(self, expected):
        """Waits for the end; no process of it may be left."""
        assert self.p.wait(30 * SLOW) == expected, self.err[-3000:]
        for t in self.threads:
            t.join(5 * SLOW)
        text = self.err.decode("utf-8", "replace")
        assert not SANITIZER.search(text), text[-5000:]
        deadline = time.monotonic() + 5 * SLOW
        while left := [
                p for p in [*(f"/proc/{pid}" for pid in self.pids),
                            os.path.dirname(self.secret)] if os.path.exists(p)
        ]:
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.01)

    def stop(self):
        self.p.send_signal(signal.SIGINT)
        self.end(0)


@pytest.fixture(scope="module")
def up():
    u = Up("--prefill", 2, "--decode", 2)
    yield u
    u.stop()


def test_up_makes_a_secret(up):
    """For this user's eyes, its daemons and whoever is told where it is."""
    folder, file = os.stat(os.path.dirname(up.secret)), os.stat(up.secret)
    assert (folder.st_mode & 0o777, file.st_mode & 0o777, file.st_uid) == (0o700, 0o600,
                                                                           os.getuid())
    with open(up.secret, encoding="ascii") as f:
        assert re.fullmatch(r"[0-9a-f]{64}\n", f.read())
    for pid in up.children():
        with open(f"/proc/{pid}/cmdline", "rb") as f:
            assert up.secret.encode() in f.read().split(b"\0")
    s = json.loads(run(["tandem", "status", "--server", up.at, "--json"])[1])
    assert s["withheld"] and {w["address"] for w in s["workers"]} == {""}


def test_up_generate(up):
    prompt = "Once upon a time"
    rc, out, err = up.cli("generate", "--max-tokens", 16, "--temperature", 0, prompt)
    assert rc == 0 and out.endswith(b"\n") and len(out) > 20 and not err, err
    again = up.cli("generate", "--max-tokens", 16, "--temperature", 0,
                   stdin=prompt.encode())  # the prompt from stdin
    assert again[1] == out
    rc, ids, err = up.cli("generate", "--max-tokens", 16, "--temperature", 0, "--token-ids",
                          "--prompt", prompt)
    assert rc == 0 and len(ids.split()) == 16 and all(x.isdigit() for x in ids.split())
    text = run(["tandem", "tokenize", "--model", POCKET, "--decode", "--whole"], ids)[1]
    assert text.strip() == out.decode().strip().encode()
    rc, with_stats, err = up.cli("generate", "--max-tokens", 16, "--temperature", 0, "--stats",
                                 prompt)
    assert rc == 0 and with_stats == out
    for word in ("TTFT", "TPOT", "router queue", "prefill", "KV transfer", "finish length",
                 "failovers"):
        assert word in err, err
    stages = [
        float(re.search(rf"  {name} +([\d.]+) ms", err).group(1))
        for name in ("router queue", "reserve", "prefill queue", "prefill", "rpc")
    ]
    assert abs(sum(stages) -
               float(re.search(r"TTFT +([\d.]+) ms", err).group(1))) < 0.01  # it adds up
    seeded = [
        up.cli("generate", "--max-tokens", 12, "--temperature", 1, "--seed", 5, prompt)[1]
        for _ in range(2)
    ]
    assert seeded[0] == seeded[1]
    tokens = run(["tandem", "tokenize", "--model", POCKET, "--whole", "--add-special"],
                 prompt.encode())[1].split()
    rc, by_ids, err = up.cli("generate", "--max-tokens", 16, "--temperature", 0, "--ids",
                             b",".join(tokens).decode())
    assert rc == 0 and by_ids == out, err
    rc, out, err = up.cli("generate", "--max-tokens", 0, prompt)
    assert rc == 1 and "INVALID_ARGUMENT" in err and "max_tokens" in err
    rc, out, err = up.cli("generate", "--model", "other", prompt)
    assert rc == 1 and "NOT_FOUND" in err
    rc, out, err = up.cli("generate", "--ids", "1,x", prompt)
    assert rc == 2 and "ids" in err
    rc, out, err = up.cli("generate", "--max-tokens", 1500, "--ignore-eos", "--timeout-ms", 100,
                          prompt)
    assert rc == 1 and "DEADLINE_EXCEEDED" in err


def test_up_chat(up):
    """Two turns through a pipe; the second one sees the first."""
    turn = ["--max-tokens", 12, "--temperature", 0]
    rc, out, err = up.cli("chat", *turn, "--system", "You are kind.",
                          stdin=b"Tell me about a fox.\n\nAnd a hen?\n/quit\nnever sent\n")
    assert rc == 0 and not err and len(out.strip().splitlines()) >= 2, (out, err)
    one = up.cli("chat", *turn, "--system", "You are kind.", stdin=b"Tell me about a fox.\n")
    assert one[0] == 0 and out.startswith(one[1])
    second = up.cli("chat", *turn, "--system", "You are kind.", stdin=b"And a hen?\n")
    assert out[len(one[1]):] != second[1]
    rc, out, err = up.cli("generate", "--chat", *turn, "--system", "You are kind.",
                          "Tell me about a fox.")
    assert rc == 0 and out == one[1]


def test_up_status(up):
    up.wait_for(lambda: all(w["kv_blocks_held"] == 0 for w in up.status()["workers"]),
                10)  # the last snapshots may be of the request before
    s = up.status()
    assert s["model"] == os.path.basename(
        os.path.realpath(POCKET)) and s["mode"] == "pd" and s["live"] == s["queued"] == 0
    assert sorted(
        w["name"] for w in s["workers"]) == ["decode-0", "decode-1", "prefill-0", "prefill-1"]
    for w in s["workers"]:
        assert w["state"] == "ready" and w["kv_blocks"] > 0 and w["role"] in w["name"] and w[
            "kv_blocks_held"] == 0
    rc, table, err = up.cli("status")
    assert rc == 0 and not err
    lines = table.decode().splitlines()
    assert s["model"] in lines[0] and "requests/s   bound by" in lines[1] and "WORKER" in lines[
        2] and len(lines) == 7
    assert all(
        re.search(rf"^{w['name']} .*{w['role']} .*ready .*{w['address']}", table.decode(), re.M)
        for w in s["workers"])


def test_up_second_interrupt_and_killed_children():
    u = Up("--drain-timeout-ms", 60000)
    victim = next(w for w in u.status()["workers"] if w["role"] == "prefill")
    os.kill(victim["pid"], signal.SIGKILL)
    u.wait_for(lambda: b"prefill-0 was killed by signal 9" in u.err, 10)
    assert u.p.poll() is None  # a lost worker only makes the cluster smaller
    # what waits for a prefill worker that will not come keeps the drain waiting: a second Ctrl-C
    # does not
    waiting = subprocess.Popen([
        os.path.join(BIN, "tandem"), "generate", "--server", u.at, "--retry-ms", "0", "Once"
    ], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    u.wait_for(lambda: u.status()["live"] == 1, 10)
    u.p.send_signal(signal.SIGINT)
    u.wait_for(lambda: len(u.children()) == 1, 20)  # the workers have gone; the router drains
    u.p.send_signal(signal.SIGINT)
    u.end(1)
    assert b"router was still stopping at the second signal, killing it" in u.err
    assert waiting.wait(20 * SLOW) == 1

    u = Up()
    router = next(p for p in u.children() if p not in [w["pid"] for w in u.status()["workers"]])
    os.kill(router, signal.SIGKILL)  # without the router there is no cluster
    u.end(1)
    assert b"router was killed by signal 9" in u.err


def test_up_killed_leaves_nothing():
    u = Up()
    u.p.send_signal(signal.SIGKILL)
    u.end(-signal.SIGKILL)


def test_up_that_cannot():
    rc, _, err = run(
        ["tandem", "up", "--model", "/nowhere", "--listen", f"127.0.0.1:{free_port()}"])
    assert rc == 1 and err.count("/nowhere") == 1 and len(err.splitlines()) == 1, err
    # one fault is told once, whichever daemons have it, and with nothing beside it
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        used = f"127.0.0.1:{s.getsockname()[1]}"
        for args, who, says in (
            (["--kv-memory", "nonsense"], "(prefill|decode)-[01]", "kv_memory: is 'nonsense'"),
            (["--random-weights", "/no/config.json"], "(prefill|decode)-[01]", "/no/config.json: "),
            (["--cluster-secret-file", "/no/secret"], "cluster_secret_file",
             "/no/secret: cannot be opened"),
            (["--http-listen", used], "router", f'http_listen "{used}": '),
            (["--metrics-listen", used], "router", f'metrics_listen "{used}": ')):
            rc, out, err = run([
                "tandem", "up", "--model", POCKET, "--listen", f"127.0.0.1:{free_port()}",
                "--prefill", 2, "--decode", 2, *args
            ])
            told = [x for x in re.split(r"[\r\n]+", err) if x and "touching memory" not in x]
            assert rc == 1 and not out and len(told) == 1, (args, err)
            assert re.match(f"tandem up: error: {who}: ", told[0]) and says in told[0], told
    rc, _, err = run([
        "tandem", "up", "--model", POCKET, "--listen", f"127.0.0.1:{free_port()}", "--log-dir",
        "/no"
    ])
    assert rc == 2 and err == 'tandem up: error: log_dir "/no": No such file or directory\n'
    rc, _, err = run(["tandem", "up", "--model", POCKET, "--tls-ca", "ca.pem"])
    assert rc == 2 and "tls_cert, tls_key and tls_ca are not all given" in err
    # nobody listens where the worker says: it will never join, and up ends long before its time
    rc, _, err = run([
        "tandem", "up", "--model", POCKET, "--listen", f"127.0.0.1:{free_port()}", "--log-level",
        "error", "--kv-memory", "1MiB", "--start-timeout-ms", 600000
    ], env={"TANDEM_DECODE_ADVERTISE": "127.0.0.2"})
    told = [x for x in err.splitlines() if x.startswith("tandem up:")]
    assert rc == 1 and len(told) == 1, err
    assert "the router refuses decode-0: the router dialled back 127.0.0.2:" in told[0]
    rc, _, err = run(["tandem", "up", "--model", POCKET, "--prefill", 0])
    assert rc == 2 and "prefill" in err
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        at = f"127.0.0.1:{s.getsockname()[1]}"
        rc, _, err = run(["tandem", "up", "--model", POCKET, "--listen", at, "--kv-memory", "1MiB"])
        assert rc == 1 and at in err


# ---- commands without a cluster
# -------------------------------------------------------------------------------------------------


def test_tokenize_round_trip():
    text = "Once upon a time,\n  a fox\tmet a hen. Grüße, 狐狸! 🦊\n\nThe end"
    lines = text.split("\n")
    rc, out, _ = run(["tandem", "tokenize", "--model", POCKET], text.encode())
    assert rc == 0 and len(out.splitlines()) == len(lines)
    back = run(["tandem", "tokenize", "--model", POCKET, "--decode"], out)
    assert back[0] == 0 and back[1].decode() == text + "\n"
    rc, whole, _ = run(["tandem", "tokenize", "--model", POCKET, "--whole"], text.encode())
    assert rc == 0 and whole.count(b"\n") == 1
    assert run(["tandem", "tokenize", "--model", POCKET, "--whole", "--decode"],
               whole)[1].decode() == text
    special = run(["tandem", "tokenize", "--model", POCKET, "--whole", "--add-special"],
                  b"fox")[1].split()
    plain = run(["tandem", "tokenize", "--model", POCKET, "--whole"], b"fox")[1].split()
    assert special[-len(plain):] == plain or special[:len(plain)] == plain
    assert run(["tandem", "tokenize", "--model", POCKET, "--whole"], b"a\0b")[1] != run(
        ["tandem", "tokenize", "--model", POCKET, "--whole"], b"a")[1]
    rc, _, err = run(["tandem", "tokenize", "--model", POCKET], b"fine\nbad \xff\n")
    assert rc == 2 and "line 2" in err and "UTF-8" in err
    rc, _, err = run(["tandem", "tokenize", "--model", POCKET, "--decode"], b"5 99999999\n")
    assert rc == 2 and "99999999" in err
    rc, _, err = run(["tandem", "tokenize", "--model", POCKET, "--decode"], b"5 fox\n")
    assert rc == 2 and "fox" in err
    assert run(["tandem", "tokenize", "--model", POCKET], b"")[:2] == (0, b"")


def test_model_that_runs(tmp_path):
    """Sizes are those that follow from models/pocket's config.json by hand."""
    rc, out, err = run(["tandem", "model", POCKET, "--json"])
    assert rc == 0 and not err
    it = json.loads(out)
    layer = (6 * 32 + 2 * 2 * 32) * 192 + 6 * 32 * 192 + 3 * 512 * 192 + 2 * 192
    n = 2048 * 192 + 5 * layer + 192
    assert it["runs"] is True and it["family"] == "llama" and it["vocab"] == 2048
    assert it["n_parameters"] == it["n_active_parameters"] == n
    assert it["kv_dtype"] == "bf16" and it["kv_bytes_a_token"] == 5 * 2 * 2 * 32 * 2
    # matrices once more as the table of embeddings, and cosines and sines of 2,048 positions in f32
    memory = 2 * (n + 2048 * 192) + 2048 * 32 * 4
    assert memory <= it["memory_bytes"] < 1.01 * memory
    assert 2 * n <= it["weight_bytes_a_step"] < 1.01 * 2 * n
    assert "rope_theta" in it["honoured"] and "use_cache" in it["without_effect"]
    with open(os.path.join(POCKET, "config.json"), encoding="utf-8") as f:
        fields = json.load(f)
    assert sorted(it["honoured"] + it["without_effect"] + it["switched_off"]) == sorted(fields)

    rc, text, _ = run(["tandem", "model", POCKET, "--max-model-len", 512, "--kv-dtype", "int8"])
    text = text.decode()
    assert rc == 0 and "512 tokens, whose KV is" in text and "2048 tokens" in text
    coded = 5 * 2 * 2 * (32 * 16 + 64) // 16  # a head's block: codes, then scales
    assert f"{coded} bytes a token in int8" in text
    assert max(map(len, text.splitlines())) <= max(80, len(POCKET) + 1)

    file = tmp_path / "pocket.gguf"
    assert run(["tandem", "quantize", "--from", POCKET, "--to", file, "--format", "q8_0"])[0] == 0
    rc, out, _ = run(["tandem", "model", file, "--json"])
    quantised = json.loads(out)
    assert rc == 0 and quantised["vocab"] == 2048 and quantised["honoured"] == []
    assert quantised["n_parameters"] == n
    assert 0.5 < quantised["weight_bytes_a_step"] / it["weight_bytes_a_step"] < 0.6


def test_model_tells_of_windows(tmp_path):
    """What layers with a window take of a token's KV: of models/pocket none; of the same as a
    Mistral with a window, all."""
    whole = 5 * 2 * 2 * 32 * 2
    model = tmp_path / "model"
    shutil.copytree(POCKET, model)
    config = json.loads((model / "config.json").read_text())
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"],
               "sliding_window": 64}
    for more, said in (({}, 0), (mistral, whole)):
        (model / "config.json").write_text(json.dumps({**config, **more}))
        it = json.loads(run(["tandem", "model", model, "--json"])[1])
        assert it.get("reason") is None
        assert it["kv_bytes_a_token"] == whole and it["kv_bytes_a_token_in_windows"] == said
        text = run(["tandem", "model", model])[1].decode()
        assert (f"{whole} of those are of layers with a window" in text) == bool(said)


# What is said of two golden models: their sizes by hand from config.json, bytes of a token in f32,
# bf16 and int8 (codes padded to 64 bytes in each block of 16 tokens, and a scale for each row).
SAID = {
    "mixtures/qwen3_moe_some_layers": (
        "family qwen3_moe (Qwen3MoeForCausalLM), as are Qwen3-MoE",
        "layers 4 of 48 values; 4 heads of 16, 2 of K and V", "experts 5 in 1 of 4 layers, "
        "2 for each token parameters", "of the weights are 5 experts, of which --experts lazy",
        f"KV cache {4 * 2 * 2 * 16 * 4} bytes a token in f32; bf16 {4 * 2 * 2 * 16 * 2}, "
        f"int8 {4 * 2 * 2 * (16 * 16 + 64) // 16}", "context 128 tokens, whose KV is 128 KiB"),
    "latent/deepseek_v3_groups": (
        "family deepseek_v3 (DeepseekV3ForCausalLM), as are DeepSeek-V3 and R1",
        "layers 2 of 48 values; latent attention of 4 heads, rank 20 + 6 rotated",
        "experts 16 in 1 of 2 layers, 4 for each token, and shared ones parameters",
        "of the weights are 16 experts, of which --experts lazy",
        f"KV cache {2 * 26 * 4} bytes a token in f32; bf16 {2 * 26 * 2}, "
        f"int8 {2 * (448 + 64) // 16}", "context 1280 tokens, whose KV is 260 KiB"),
}


@pytest.mark.parametrize("name", SAID)
def test_model_of_experts_and_latent_rows(name):
    """Parameters are those of the file's tensors, and those of the experts that a token uses."""
    model = os.path.join(ROOT, "tests", "golden", name)
    rc, text, _ = run(["tandem", "model", model, "--dtype", "f32"])
    text = " ".join(text.decode().split())
    assert rc == 0 and [line for line in SAID[name] if line not in text] == [], text
    assert "are of layers with a window" not in text

    it = json.loads(run(["tandem", "model", model, "--dtype", "f32", "--json"])[1])
    with open(os.path.join(model, "config.json"), encoding="utf-8") as f:
        used = json.load(f)["num_experts_per_tok"]
    with open(os.path.join(model, "model.safetensors"), "rb") as f:
        tensors = json.loads(f.read(*struct.unpack("<Q", f.read(8))))
    sizes = {k: math.prod(t["shape"]) for k, t in tensors.items() if k != "__metadata__"}
    of_experts = sum(n for k, n in sizes.items() if ".experts." in k)
    n_experts = it["n_experts"]
    unused = of_experts * (n_experts - used) // n_experts
    assert 0 < unused and it["n_parameters"] == sum(sizes.values())
    assert it["n_active_parameters"] == it["n_parameters"] - unused
    assert it["family"] == text.split(" family ")[1].split()[0]
    # 2 or 4 bytes a value, and what kernels pad their panels with
    assert 2 * of_experts <= it["expert_bytes"] < it["memory_bytes"]
    assert it["weight_bytes_a_step"] <= it["memory_bytes"] - it["expert_bytes"] * (
        n_experts - used) // n_experts
    assert it["kv_bytes_a_token"] * it["max_model_len"] == int(
        text.split("whose KV is ")[1].split()[0]) * 1024


def test_model_that_does_not_run(tmp_path):
    rc, out, err = run(["tandem", "model", tmp_path / "absent"])
    assert rc == 1 and b"NO:" in out and out.count(b"No such file") == 1
    assert run(["tandem", "model"])[0] == 2
    rc, out, _ = run(["tandem", "model", POCKET, "--ops", "sse9", "--json"])
    assert rc == 1 and "sse9" in json.loads(out)["reason"]
    rc, out, _ = run(["tandem", "model", POCKET, "--max-model-len", 4096, "--json"])
    assert rc == 1 and "4096" in json.loads(out)["reason"]

    model = tmp_path / "model"
    shutil.copytree(POCKET, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "intermediate_size": 513}))
    rc, out, _ = run(["tandem", "model", model, "--json"])
    it = json.loads(out)
    assert rc == 1 and it["runs"] is False and it["family"] == "llama" and "vocab" in it
    assert "[513, 192]" in it["reason"] and "mlp" in it["reason"]
    (model / "config.json").write_text(json.dumps({**config, "secret_sauce": 3}))
    rc, out, _ = run(["tandem", "model", model, "--json"])
    assert rc == 1 and "secret_sauce" in json.loads(out)["reason"]
    # what a file says is no command for the terminal
    (model / "config.json").write_text(json.dumps({**config, "secret\x1b[2Jsauce": 3}))
    rc, out, err = run(["tandem", "model", model])
    assert rc == 1 and b"sauce" in out and b"\x1b" not in out + (err or "").encode()


def test_logits(tmp_path):
    ids = [5, 300, 301, 302, 1999, 7, 8, 9, 10, 400, 401, 402, 403, 404, 405, 406, 407, 408,
           409]  # more than a block
    out = {}
    for chunk in (0, 1, 5):
        for dtype in ("f32", "bf16"):
            path = tmp_path / f"{chunk}-{dtype}"
            rc, stdout, err = run([
                "tandem", "logits", "--model", POCKET, "--tokens", ",".join(map(str, ids)),
                "--chunk", chunk, "--dtype", dtype, "--threads", 1, "--out", path
            ])
            assert rc == 0 and not stdout, err
            out[chunk, dtype] = path.read_bytes()
    assert len(out[0, "f32"]) == len(ids) * 2048 * 4
    for dtype in ("f32", "bf16"):
        assert out[0, dtype] == out[1, dtype] == out[5, dtype], "the chunk shows in the bits"
    row = struct.unpack("<2048f", out[0, "f32"][-2048 * 4:])
    assert max(row) - min(row) > 1 and all(abs(x) < 1e4 for x in row)
    base = ["tandem", "logits", "--model", POCKET, "--out", tmp_path / "x"]
    for tokens, part in (("", "empty"), ("1,x", "x"), ("2048", "2047"), ("-1", "2047"),
                         ("5," * 3000, "2048")):
        rc, _, err = run([*base, "--tokens", tokens])
        assert rc == 2 and part in err, err
    rc, _, err = run([*base[:-1], "/nowhere/x", "--tokens", "1"])
    assert rc == 1 and "/nowhere/x" in err


def poison(model, tensor, element, value=b"\xff\xff\xff\xff", n=1):
    """n f32, f16 or bf16 elements of a tensor become the end of `value`, by default NaN in all
    three."""
    path = model / "model.safetensors"
    data = bytearray(path.read_bytes())
    length, = struct.unpack_from("<Q", data)
    t = json.loads(data[8:8 + length])[tensor]
    width = 4 if t["dtype"] == "F32" else 2
    at = 8 + length + t["data_offsets"][0] + element * width
    data[at:at + n * width] = value[-width:] * n
    path.write_bytes(data)


def logits_of(model, *args):
    return run([
        "tandem", "logits", "--model", model, "--threads", 1, "--out", model.parent / "x",
        "--tokens", "5,7,300,8", *args
    ])


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("tensor,row,columns,value",
                         [("model.embed_tokens.weight", 300, 192, b"\xff\xff\xff\xff"),
                          ("model.layers.1.self_attn.k_proj.weight", 41, 192, b"\0\0\x80\x7f"),
                          ("model.layers.4.mlp.up_proj.weight", 511, 192, b"\0\0\x80\xff"),
                          ("model.layers.3.mlp.down_proj.weight", 0, 512, b"\1\0\x81\x7f")])
def test_weights_that_are_no_numbers(tensor, row, columns, value, dtype, tmp_path):
    """A NaN or an infinity in a matrix is refused as the model loads, whether or not a token meets
    it."""
    model = tmp_path / "model"
    shutil.copytree(POCKET, model)
    poison(model, tensor, row * columns + 5, value)
    rc, _, err = logits_of(model, "--dtype", dtype)
    assert rc == 1 and f"tensor {tensor}, row {row}: a value is infinite, no number" in err, err


def test_logits_that_are_no_numbers(tmp_path):
    """Finite weights whose products are not: the position and id are named, and the exit status
    is 1; without them nothing is wrong."""
    model = tmp_path / "model"
    shutil.copytree(POCKET, model)
    poison(model, "model.embed_tokens.weight", 300 * 192, b"\0\0\x61\x7f", 192)
    for chunk in (0, 1):
        rc, _, err = logits_of(model, "--dtype", "f32", "--chunk", chunk)
        assert rc == 1 and "position 0 (token 5): the logit of id 300 is" in err, err
        assert "products of the weights overflow, or config.json does not fit them" in err, err
        assert (tmp_path / "x").stat().st_size == 0
    shutil.copytree(POCKET, tmp_path / "as-it-was" / "model")
    rc, _, err = logits_of(tmp_path / "as-it-was" / "model", "--dtype", "f32")
    said = [line for line in err.splitlines() if not line.startswith("touching memory of ")
            ]  # its progress, on a machine that is slow at it
    assert rc == 0 and not said, err


def test_engine_bench():
    tiny = [
        "--batch", 2, "--prompt-len", 24, "--output-len", 3, "--repeat", 1, "--threads", 1,
        "--kv-memory", "64MiB", "--json"
    ]
    models = [["--model", POCKET]] if SHORT else [[
        "--model", POCKET
    ], ["--random-weights",
        os.path.join(ROOT, "bench/configs/llama-110m.json"), "--dtype", "bf16"]]
    for model in models:
        rc, out, err = run(["tandem", "engine-bench", *model, *tiny], timeout=100)
        assert rc == 0, err
        j = json.loads(out)
        assert j["batch"] == 2 and j["prefill_tok_s"]["median"] > 0 and j["decode_tok_s"][
            "min"] <= j["decode_tok_s"]["median"] <= j["decode_tok_s"]["max"]
    assert SHORT or 90e6 < j["parameters"] < 130e6
    rc, _, err = run(["tandem", "engine-bench"])
    assert rc == 2 and "--model" in err
    for wrong, says in ((["--attn", "mma,abc"], 'attn is "mma,abc", must be mma, wgmma'), ([
            "--overlap", "1"
    ], 'device is "cpu", must be cuda')):
        rc, _, err = run(["tandem", "engine-bench", "--model", POCKET, "--cases", "1x8", *wrong])
        assert rc == 2 and says in err, err
    rc, _, err = run(["tandem", "engine-bench", "--model", POCKET, *tiny, "--prompt-len", 5000])
    assert rc != 0 and "5000" in err, err


def test_engine_bench_of_a_mixture(tmp_path):
    """Weights that a step reads grow with the experts that its rows choose, and of a shape the
    first layers alone may run."""
    shape = os.path.join(ROOT, "tests/golden/mixtures/qwen3_moe_odd_sizes/config.json")
    base = [
        "tandem", "engine-bench", "--random-weights", shape, "--dtype", "f32", "--threads", 1,
        "--kv-memory", "64MiB", "--output-len", 3
    ]

    def plain(batch, layers):
        rc, out, err = run(
            [*base, "--layers", layers, "--batch", batch, "--prompt-len", 8, "--repeat", 1,
             "--json"])
        assert rc == 0, err
        j = json.loads(out)
        assert j["layers"] == (layers or 2), j
        return j["decode_weight_bytes"], j["decode_experts"], j["parameters"]

    expert = 4 * 3 * 40 * 23  # gate, up and down; kernels may pad them
    (one, n_one, all_params), (many, n_many, _) = plain(1, 0), plain(12, 0)
    assert n_one == 2 * 3 and n_one < n_many <= 2 * 7
    assert expert <= (many - one) / (n_many - n_one) < 4 * expert
    half, n_half, params = plain(1, 1)
    assert n_half == 3 and half < one and params < all_params

    table = tmp_path / "x.csv"
    rc, out, err = run([*base, "--layers", 1, "--cases", "1x8,12x8", "--csv", table])
    assert rc == 0, err
    assert out.startswith(b"config.json (1 layer), "), out
    with open(table, encoding="utf-8", newline="") as f:
        rows = list(csv.DictReader(f))
    assert {r["model"] for r in rows} == {"config.json (1 layer)"}
    read = {int(r["batch"]): float(r["gbytes"]) for r in rows if r["what"] == "decode"}
    kv = 4 * 2 * 5 * 10 * (8 + 4 + 1.5)  # of a sequence
    assert read[1] * 1e9 == pytest.approx(half + kv, abs=1000)
    experts = (read[12] * 1e9 - 12 * kv - half) / expert
    assert 0.9 < experts < 4 * 4, read  # all 7 at most, and 3 are one row's

    for more, says in ((["--random-weights", shape, "--layers", 3], "must be in 1..2"),
                       (["--model", POCKET, "--layers", 1], "layers goes with random-weights")):
        rc, _, err = run(["tandem", "engine-bench", *more, "--kv-memory", "64MiB"])
        assert rc != 0 and says in err, err


# ---- health, reflection
# -------------------------------------------------------------------------------------------------

SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3


def health(channel, service=""):
    code, details, out = call(channel, "/grpc.health.v1.Health/Check",
                              field(1, service.encode()) if service else b"")
    if code != OK:
        return code
    return out[0][1] if out[0] else 0  # field 1, an enum


def channel_of(address):
    return grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])


def test_health_and_drain():
    patient = ["--drain-timeout-ms", 60000 * SLOW]  # what runs is finished, on a busy machine too
    with Cluster(router_args=patient, worker_args=patient) as c:
        workers = {w.name: channel_of(w.address) for w in c.status().workers}
        assert health(c.channel) == health(c.channel, "tandem.v1.Inference") == health(
            c.channel, "tandem.v1.Registry") == SERVING
        assert health(c.channel, "no.such.Service") == Code.NOT_FOUND
        for name, ch in workers.items():
            assert health(ch) == health(ch, "tandem.v1.Worker") == SERVING, name
        watches = {
            name: ch.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=60 * SLOW)
            for name, ch in [("router", c.channel), *workers.items()]
        }
        for w in watches.values():
            assert next(w) == b"\x08\x01"
        unknown = c.channel.unary_stream("/grpc.health.v1.Health/Watch")(field(1, b"no.such"),
                                                                         timeout=60 * SLOW)
        assert next(unknown) == b"\x08\x03"
        unknown.cancel()
        n = 250 if SHORT else 1500
        long = c.stream(
            c.request(prompt="Once upon a time", max_tokens=n, temperature=0, ignore_eos=True))
        next(long)
        for name, d in [("prefill-0", c.workers["prefill-0"]), ("decode-0", c.workers["decode-0"]),
                        ("router", c.router)]:
            d.signal(signal.SIGTERM)
            assert next(watches[name]) == b"\x08\x02", name  # NOT_SERVING while it drains
        assert sum(len(m.token_ids) for m in long) == n - 1  # and what runs is finished
        assert long.code() == OK
        for d in c.all:
            assert d.wait_exit(60 * SLOW) == 0
        for ch in workers.values():
            ch.close()


def reflect(channel, version, *requests):
    path = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
    return list(channel.stream_stream(path)(iter(requests), timeout=20 * SLOW))


def fields_of(data):
    """(number, value) pairs of a message; values as bytes or ints."""
    out, i = [], 0

    def varint():
        nonlocal i
        n = shift = 0
        while True:
            b = data[i]
            i += 1
            n |= (b & 127) << shift
            shift += 7
            if b < 128:
                return n

    while i < len(data):
        key = varint()
        if key & 7 == 0:
            out.append((key >> 3, varint()))
        else:
            n = varint()
            out.append((key >> 3, data[i:i + n]))
            i += n
    return out


@pytest.mark.parametrize("version", ["v1"] if SHORT else ["v1", "v1alpha"])
def test_reflection(version):
    """Nothing but reflection is known: services are listed, the descriptors make a Generate
    call."""
    with Cluster() as c:
        listed, unknown, by_symbol = reflect(c.channel, version, field(7, b"*"),
                                             field(4, b"no.such.Thing"),
                                             field(4, b"tandem.v1.Inference"))
        names = {dict(fields_of(v))[1].decode() for k, v in fields_of(dict(fields_of(listed))[6])}
        assert {
            "tandem.v1.Inference", "tandem.v1.Registry", "grpc.health.v1.Health",
            f"grpc.reflection.{version}.ServerReflection"
        } <= names
        assert dict(fields_of(dict(fields_of(unknown))[7]))[1] == Code.NOT_FOUND.value[0]
        pool = descriptor_pool.DescriptorPool()
        files = [
            descriptor_pb2.FileDescriptorProto.FromString(v)
            for k, v in fields_of(dict(fields_of(by_symbol))[4])
        ]
        for f in files:
            pool.Add(f)
        method = pool.FindServiceByName("tandem.v1.Inference").methods_by_name["Generate"]
        factory = message_factory.MessageFactory(pool)
        request, response = factory.GetPrototype(method.input_type), factory.GetPrototype(
            method.output_type)
        r = request(prompt="Once upon a time", return_token_ids=True)
        r.stop.max_tokens = 5
        r.sampling.temperature = 0
        code, details, out = call(c.channel, "/tandem.v1.Inference/Generate", r.SerializeToString())
        assert code == OK, details
        got = [t for m in out for t in response.FromString(m).token_ids]
        assert got == c.generate(prompt="Once upon a time", max_tokens=5, temperature=0).tokens
        worker = channel_of(c.status().workers[0].address)
        (listed, ) = reflect(worker, version, field(7, b""))
        assert b"tandem.v1.Worker" in listed
        worker.close()


# ---- TLS
# -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certs(tmp_path_factory):
    """Two CAs; certificates of the first: a server's, a client's, a worker's with a name of its
    own, one that holds no address; one of the second."""
    d = tmp_path_factory.mktemp("certs")

    def openssl(*args):
        subprocess.run(["openssl", *args], check=True, capture_output=True, cwd=d)

    for ca in ("ca", "other-ca"):
        openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                "-keyout", f"{ca}.key", "-out", f"{ca}.pem", "-days", "30", "-subj", f"/CN={ca}",
                "-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=keyCertSign")
    here = "IP:127.0.0.1,DNS:localhost"
    for name, ca, alt in (("server", "ca", here), ("client", "ca", here), ("stranger", "other-ca",
                                                                           here),
                          ("worker", "ca", f"{here},DNS:w0.kv.tandem"), ("named", "ca",
                                                                         "DNS:cluster.tandem")):
        (d / "ext").write_text(f"subjectAltName={alt}\n")
        openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout",
                f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", f"{ca}.pem", "-CAkey", f"{ca}.key",
                "-CAcreateserial", "-days", "30", "-extfile", "ext", "-out", f"{name}.pem")
    return d


def credentials(certs, ca="ca", name=None):
    read = lambda f: (certs / f).read_bytes()  # noqa: E731
    if name:
        return grpc.ssl_channel_credentials(read(f"{ca}.pem"), read(f"{name}.key"),
                                            read(f"{name}.pem"))
    return grpc.ssl_channel_credentials(read(f"{ca}.pem"))


def reaches(port, creds):
    """A status call over fresh credentials: its code."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    target = f"127.0.0.1:{port}"
    channel = grpc.secure_channel(target, creds, options) if creds else grpc.insecure_channel(
        target, options)
    try:
        return call(channel, "/tandem.v1.Inference/Status", b"", timeout=10 * SLOW)[0]
    finally:
        channel.close()


@pytest.fixture(scope="module")
def plain_tokens():
    with Cluster() as c:
        return c.generate(prompt="Once upon a time", max_tokens=16, temperature=0).tokens


@pytest.mark.parametrize("mutual", [True] if SHORT else [True, False])
def test_tls(certs, plain_tokens, mutual, monkeypatch):
    args = [
        "--tls-cert", certs / "server.pem", "--tls-key", certs / "server.key", "--tls-ca",
        certs / "ca.pem"
    ]
    if not mutual:  # no CA to ask callers for: what daemons dial is checked by the system's roots
        del args[-2:]
        monkeypatch.setenv("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", str(certs / "ca.pem"))
    own = credentials(certs, name="client" if mutual else None)
    with Cluster(router_args=args, worker_args=args, tls=own) as c:
        r = c.generate(prompt="Once upon a time", max_tokens=16, temperature=0)
        assert (r.code, r.tokens) == (OK, plain_tokens), r.details
        ports = [c.port, *(int(w.address.rsplit(":", 1)[1]) for w in c.status().workers)]
        for port in ports:  # router and workers alike: UNIMPLEMENTED = the worker answered
            assert reaches(port, own) in (OK, Code.UNIMPLEMENTED)
            assert reaches(port, None) == Code.UNAVAILABLE  # plaintext
            assert reaches(port, credentials(
                certs, ca="other-ca")) == Code.UNAVAILABLE  # a client that trusts somebody else
            no_certificate, stranger = reaches(port, credentials(certs)), reaches(
                port, credentials(certs, name="stranger"))
            if mutual:
                assert no_certificate == stranger == Code.UNAVAILABLE
            else:
                assert no_certificate in (OK, Code.UNIMPLEMENTED)
        cli = [
            "tandem", "generate", "--server", f"127.0.0.1:{c.port}", "--tls-ca", certs / "ca.pem",
            "--max-tokens", 16, "--temperature", 0, "--token-ids", "Once upon a time"
        ]
        with_identity = [
            *cli, "--tls-cert", certs / "client.pem", "--tls-key", certs / "client.key"
        ]
        rc, out, err = run(with_identity)
        assert rc == 0 and [int(x) for x in out.split()] == plain_tokens, err
        assert run(cli)[0] == (1 if mutual else 0)
        assert run(["tandem", "status", "--server", f"127.0.0.1:{c.port}"])[0] == 1
        c.wait_idle()


def test_worker_of_another_ca_is_refused(certs):
    good = [
        "--tls-cert", certs / "server.pem", "--tls-key", certs / "server.key", "--tls-ca",
        certs / "ca.pem"
    ]
    bad = [
        "--tls-cert", certs / "stranger.pem", "--tls-key", certs / "stranger.key", "--tls-ca",
        certs / "ca.pem"
    ]
    with Cluster(router_args=good, worker_args=good, tls=credentials(certs, name="client")) as c:
        stranger = c.start_worker("decode", wait=False, args=bad)
        stranger.wait_log(r"ev=router_lost")
        assert len(c.status().workers) == 2
        assert stranger.alive()


def tls_args(certs, name="server"):
    return [
        "--tls-cert", certs / f"{name}.pem", "--tls-key", certs / f"{name}.key", "--tls-ca",
        certs / "ca.pem"
    ]


def test_kv_goes_over_tls(certs, plain_tokens):
    """With certificates given, KV between hosts is encrypted without another option; the tokens
    are the same, and new certificates are taken."""
    live = [certs / "kv.pem", certs / "kv.key"]
    for source, copy in zip(("server.pem", "server.key"), live):
        shutil.copy(certs / source, copy)
    with Cluster(router_args=tls_args(certs),
                 worker_args=[*tls_args(certs, "kv"), "--transfer", "tcp"], tls=credentials(
                     certs, name="client")) as c:
        r = c.generate(prompt="Once upon a time", max_tokens=16, temperature=0)
        assert (r.code, r.tokens) == (OK, plain_tokens), r.details
        for worker in c.workers.values():
            worker.wait_log(r"ev=kv_path path=tcp .*over TLS")
        for source, copy in zip(("client.pem", "client.key"), live):
            os.replace(shutil.copy(certs / source, f"{copy}.new"), copy)
        for worker in c.workers.values():
            worker.wait_log(r"ev=tls_reloaded use=kv")
        late = c.start_worker("decode")
        c.workers["decode-0"].signal(signal.SIGTERM)
        c.workers["decode-0"].wait_exit(30 * SLOW)
        r = c.generate(prompt="Once upon a time", max_tokens=16, temperature=0)
        assert (r.code, r.tokens) == (OK, plain_tokens), r.details
        late.wait_log(r"ev=kv_path path=tcp .*over TLS")
        c.wait_idle()


MIXED = {
    "kv_tls": (["--transfer", "tcp", "--test-kv-tls",
                "off"], ["--transfer", "tcp"], "kv_tls is on here and off on {first}"),
    "kv_tls of auto": ([], ["--test-kv-tls", "off"], "kv_tls is off here and on on {first}"),
    "transfer": (["--transfer", "tcp"], ["--transfer",
                                         "shm"], "transfer is shm here and tcp on {first}")
}


@pytest.mark.parametrize("what", MIXED)
@pytest.mark.parametrize("first", ["decode"] if SHORT else ["decode", "prefill"])
def test_workers_that_cannot_exchange_kv_are_never_paired(certs, what, first):
    """The second kind is turned away, by the option's name at both ends; requests wait for a
    worker that fits, and find it."""
    first_args, second_args, sentence = MIXED[what]
    second = "prefill" if first == "decode" else "decode"
    with Cluster(prefill=0, decode=0, router_args=[*tls_args(certs), "--queue-timeout-ms", 200],
                 worker_args=tls_args(certs), tls=credentials(certs, name="client")) as c:
        one = c.start_worker(first, args=first_args)
        other = c.start_worker(second, wait=False, args=second_args)
        reason = sentence.format(first=one.name)
        c.router.wait_log(f'ev=worker_rejected .*{reason}')
        other.wait_log(f'ev=registration_rejected .*{reason}')
        assert [w.name for w in c.status().workers] == [one.name]
        r = c.generate(prompt="A fox", max_tokens=2)
        assert r.code == Code.UNAVAILABLE, (r.code, r.details)
        assert "no worker of the needed role is connected" in r.details, (r.code, r.details)
        fits = c.start_worker(second, args=first_args)
        r = c.generate(prompt="A fox", max_tokens=2, temperature=0)
        assert (r.code, len(r.tokens)) == (OK, 2), r.details
        if what == "kv_tls":  # the last of the old kind goes: the one that was turned away is taken
            for w in (one, fits):
                w.signal(signal.SIGTERM)
                assert w.wait_exit(30 * SLOW) == 0
            c.wait_for(lambda: [w.name for w in c.status().workers] == [other.name],
                       f"{other.name} to join", 30 * SLOW)
        c.wait_idle()


HELLOS = {
    "says nothing, as older ones": ({}, None),
    "the same": ({"kv_tls": "off", "transfer": "tcp"}, None), "auto": ({
        "kv_tls": "off", "transfer": "auto"
    }, None), "TLS": ({"kv_tls": "on", "transfer": "tcp"}, "kv_tls is on here and off on decode-0"),
    "TLS alone": ({"kv_tls": "on"}, "kv_tls is on here"),
    "shm": ({"transfer": "shm"}, "transfer is shm here and tcp on decode-0"), "rdma": ({
        "kv_tls": "off", "transfer": "rdma"
    }, "transfer is rdma here"), "too long": ({"kv_tls": "o" * 8}, "at most 7 bytes"),
    "too long a path": ({"transfer": "t" * 16}, "at most 15 bytes")
}


def test_hellos_and_kv_ports():
    """What a worker says of its KV port, and what it leaves out, against one that speaks plain
    tcp."""
    with Cluster(prefill=0, decode=1, worker_args=["--transfer", "tcp"]) as c:
        real = c.status().workers[0]
        with open(os.path.join(POCKET, "config.json"), encoding="utf-8") as f:
            vocab = json.load(f)["vocab_size"]
        join = c.channel.stream_stream("/tandem.v1.Registry/Join",
                                       request_serializer=wpb.WorkerMessage.SerializeToString,
                                       response_deserializer=wpb.RouterMessage.FromString)
        for i, (what, (says, refused_for)) in enumerate(HELLOS.items()):
            hello = wpb.Hello(name=f"new-{i}", role="prefill", address=f"127.0.0.1:{i + 1}",
                              incarnation=i + 1, protocol=1, layout_hash=real.layout_hash,
                              block_size=real.block_size, kv_blocks=8, max_model_len=64,
                              vocab=vocab, max_seqs=4, **says)
            stream = join(iter([wpb.WorkerMessage(hello=hello)]), timeout=30 * SLOW)
            answer = next(stream)
            if refused_for:
                assert refused_for in answer.reject.reason, (what, answer)
            else:
                assert answer.WhichOneof("message") == "welcome", (what, answer)
            stream.cancel()
        c.wait_for(lambda: len(c.status().workers) == 1, "only the real worker", 10 * SLOW)


def test_colocated_workers_need_not_agree(certs):
    """Nobody sends KV there: what the KV ports speak is nobody's business."""
    with Cluster(prefill=0, decode=0, mode="colocated", router_args=tls_args(certs),
                 worker_args=tls_args(certs), tls=credentials(certs, name="client")) as c:
        c.start_worker("decode")
        c.start_worker("decode", args=["--test-kv-tls", "off", "--transfer", "tcp"])
        assert len(c.status().workers) == 2
        assert c.generate(prompt="A fox", max_tokens=2).code == OK
        c.wait_idle()


NAME = ["--kv-tls-peer-name", "*.kv.tandem"]


def kv_bytes(c):
    return sum(w.kv_bytes_sent + w.kv_bytes_received for w in c.status().workers)


def test_kv_peers_by_name(certs, plain_tokens):
    """Workers whose certificates hold the name talk as always. Whoever else has a certificate of
    the same CA is not heard on the KV port."""
    with Cluster(router_args=tls_args(certs),
                 worker_args=[*tls_args(certs, "worker"), "--transfer", "tcp",
                              *NAME], tls=credentials(certs, name="client")) as c:
        r = c.generate(prompt="Once upon a time", max_tokens=16, temperature=0)
        assert (r.code, r.tokens) == (OK, plain_tokens), r.details
        for worker in c.workers.values():
            worker.wait_log(r"ev=kv_path path=tcp .*over TLS")
        grpc_ports = {int(w.address.rsplit(":", 1)[1]) for w in c.status().workers}
        for worker in c.workers.values():
            (port, ) = set(tcp_ports(worker.pid)) - grpc_ports
            assert told_by_kv_port(certs, port,
                                   "client") == "bad certificate"  # of the CA, and another name
            assert told_by_kv_port(certs, port, "stranger") == "unknown ca"
            assert told_by_kv_port(certs, port,
                                   "worker") is None  # let in; what it says then is no KV
        c.wait_idle()


def told_by_kv_port(certs, port, name):
    """The alert with which a KV port answers this certificate; None: it took it, and closed for
    what was said inside."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(certs / "ca.pem")
    context.load_cert_chain(certs / f"{name}.pem", certs / f"{name}.key")
    with socket.create_connection(("127.0.0.1", port), timeout=20 * SLOW) as raw:
        with context.wrap_socket(raw, server_hostname="localhost") as s:
            try:
                s.sendall(b"no KV at all".ljust(4096))
                while s.recv(4096):
                    pass
            except ssl.SSLEOFError:
                return None
            except ssl.SSLError as e:
                return re.search(r"alert (.*?) \(", str(e)).group(1)
            except OSError:
                pass
            return None


@pytest.mark.parametrize("wrong", ["prefill", "decode"])
def test_kv_goes_to_and_comes_from_nobody_of_another_name(certs, wrong):
    """A prefill that is not one could write into a decode's pool; a decode that is not one would
    be sent everybody's prompts. Neither gets a byte."""
    right = "decode" if wrong == "prefill" else "prefill"
    with Cluster(prefill=0, decode=0, router_args=[*tls_args(certs), "--max-failovers", 1],
                 worker_args=["--transfer", "tcp"], tls=credentials(certs, name="client")) as c:
        c.start_worker(right, args=[*tls_args(certs, "worker"), *NAME])
        stranger = c.start_worker(wrong, args=tls_args(certs, "client"))
        r = c.generate(prompt="Once upon a time", max_tokens=4, temperature=0)
        assert r.code == Code.UNAVAILABLE and len(r.tokens) <= 2, (
            r.code, r.details)  # of each attempt prefill's own token, which needs no KV of others
        assert re.search("hostname mismatch|bad certificate", r.details), r.details
        assert all("ev=kv_path " not in w.log() for w in c.workers.values())
        c.wait_idle()
        assert kv_bytes(c) == 0
        stranger.signal(signal.SIGTERM)
        assert stranger.wait_exit(30 * SLOW) == 0
        c.start_worker(wrong, args=[*tls_args(certs, "worker"), *NAME])
        r = c.generate(prompt="Once upon a time", max_tokens=4, temperature=0)
        assert (r.code, len(r.tokens)) == (OK, 4), r.details
        c.wait_idle()
        c.wait_for(lambda: kv_bytes(c) > 0, "KV bytes in the snapshots", 10 * SLOW)


def test_kv_tls_that_contradicts_itself(certs):
    def says(*args):
        rc, _, err = run([
            "tandem-decode", "--model", POCKET, "--listen", "127.0.0.1:0", "--kv-memory", "4MiB",
            *args
        ])
        assert rc == 2, err
        return err

    needs = "kv_tls_peer_name is \"a.b\", and the KV port would be without TLS: it needs tls_cert"
    assert needs in says("--kv-tls-peer-name", "a.b")
    assert "kv_tls is off" in says("--kv-tls-peer-name", "a.b", "--test-kv-tls", "off",
                                   *tls_args(certs))
    assert "must be a DNS name" in says("--kv-tls-peer-name", "a*.b", *tls_args(certs))


def ask_health(*args):
    """(exit status, what it says) of `tandem health`."""
    rc, out, err = run(["tandem", "health", "--timeout-ms", 2000 * SLOW, *args])
    return rc, (out.decode() + err).strip()


def test_health_command(up):
    (port, ) = {w["address"].rsplit(":", 1)[1] for w in up.status()["workers"]
                if w["name"] == "decode-0"}
    for args in ((up.at, ), ("--server", up.at), (f"127.0.0.1:{port}", )):
        assert ask_health(*args) == (0, f"{args[-1]}: SERVING")
    assert ask_health("--service", "tandem.v1.Inference",
                  up.at) == (0, f"{up.at}: tandem.v1.Inference is SERVING")
    assert ask_health("--need-workers", up.at) == (0, f"{up.at}: SERVING\n{up.at}: has workers")
    for need, rc in (("2,2", 0), ("0,1", 0), ("3,1", 1), ("1,3", 1)):
        said = (f"{up.at}: SERVING, 2 prefill and 2 decode workers are ready, needed " +
                need.replace(",", " and "))
        assert ask_health("--need-workers", need, up.at) == (rc, said)
    rc, said = ask_health("--need-workers=1,x", up.at)
    assert rc == 2 and 'need_workers is "1,x", must be PREFILL,DECODE' in said
    rc, said = ask_health("--service", "no.Such", up.at)
    assert rc == 1 and 'service "no.Such" is not served here' in said
    rc, said = ask_health("--timeout-ms", 300, f"127.0.0.1:{free_port()}")
    assert rc == 1 and "DEADLINE_EXCEEDED" in said and "\n" not in said
    assert ask_health(up.at, up.at)[0] == 2


def test_health_over_mtls(certs):
    """Each question, of a router and of a worker, by who shows a certificate; who shows none, or
    speaks no TLS, is told."""
    mine = tls_args(certs, "client")
    with Cluster(router_args=tls_args(certs), worker_args=tls_args(certs, "worker"),
                 tls=credentials(certs, name="client")) as c:
        at = f"127.0.0.1:{c.port}"
        (worker, ) = {w.address for w in c.status().workers if w.role == "decode"}
        asked = "1 prefill and 1 decode workers are ready, needed "
        for args, to, rc, said in (
            ([], at, 0, "SERVING"), ([], worker, 0, "SERVING"),
            (["--service", "tandem.v1.Inference"], at, 0, "tandem.v1.Inference is SERVING"),
            (["--service", "tandem.v1.Worker"], worker, 0, "tandem.v1.Worker is SERVING"),
            (["--need-workers"], at, 0, f"SERVING\n{at}: has workers"),
            (["--need-workers", "1,1"], at, 0, f"SERVING, {asked}1 and 1"),
            (["--need-workers", "1,2"], at, 1, f"SERVING, {asked}1 and 2"),
            (["--service", "tandem.v1.Inference", "--need-workers", "1,1"], at, 0,
             f"SERVING, {asked}1 and 1")):
            assert ask_health(*mine, *args, to) == (rc, f"{to}: {said}"), args
        for to in (at, worker):
            rc, said = ask_health(*mine, "--service", "no.Such", to)
            assert rc == 1 and 'service "no.Such" is not served here' in said
            for args, why in (([], "that port speaks TLS: give --tls-ca"),
                              (["--tls-ca", certs / "ca.pem"], "give --tls-cert"),
                              (tls_args(certs, "stranger"), "")):
                rc, said = ask_health(*args, to)
                assert rc == 1 and why in said and "\n" not in said, (args, said)


def test_up_with_tls_and_metrics(certs):
    """The daemons find one another, and the commands that up prints work as they are."""
    tls = [str(x) for x in tls_args(certs)]
    port = free_port(5)  # of the metrics of three, of gRPC and of HTTP
    at, http = f"127.0.0.1:{port + 3}", f"127.0.0.1:{port + 4}"
    p = subprocess.Popen([
        os.path.join(BIN, "tandem"), "up", "--model", POCKET, "--listen", at, "--http-listen", http,
        "--metrics-listen", f"127.0.0.1:{port}", "--kv-memory", "16MiB", "--routers", "1",
        "--http-cors-origins", "https://a.example", *tls
    ], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    try:
        lines = [p.stdout.readline() for _ in range(4)]
        assert lines[0].startswith(f"tandem is up at {at}: 1 prefill, 1 decode"), lines
        status = lines[2].split()
        assert status[:4] == ["tandem", "status", "--server", at] and "--tls-key" in status
        rc, out, err = run([*status, "--json"])
        assert rc == 0 and not json.loads(out)["withheld"], err
        assert lines[3].startswith(f"  curl https://{http}/v1/completions ")
        ask = urllib.request.Request(f"https://{http}/version",
                                     headers={"Origin": "https://a.example"})
        context = ssl.create_default_context(cafile=certs / "ca.pem")
        context.load_cert_chain(certs / "client.pem", certs / "client.key")
        with urllib.request.urlopen(ask, context=context) as r:
            assert r.headers["Access-Control-Allow-Origin"] == "https://a.example"
        for i in range(3):  # the router, then the workers
            with urllib.request.urlopen(f"http://127.0.0.1:{port + i}/metrics") as r:
                assert b"td_" in r.read()
    finally:
        p.send_signal(signal.SIGINT)
        assert p.wait(30 * SLOW) == 0
        p.stdout.close()


def test_up_outlives_who_reads_its_first_line_alone():
    """A script that waits for "tandem is up" and closes the pipe: the lines that nobody reads any
    more are lost, and the cluster is not."""
    at = f"127.0.0.1:{free_port()}"
    first = f"tandem is up at {at}: 1 prefill, 1 decode, mode pd. Ctrl-C stops it.\n".encode()
    # A pipe of one page in which there is room for the first line alone: the second line waits
    # there until we close, so that it always comes too late and not only when we are quick.
    reader, writer = os.pipe()
    room = fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writer, b"-" * (room - len(first)))
    p = subprocess.Popen([
        os.path.join(BIN, "tandem"), "up", "--model", POCKET, "--listen", at, "--dtype", "f32",
        "--kv-memory", "16MiB"
    ], stdin=subprocess.DEVNULL, stdout=writer)
    os.close(writer)
    try:
        n_waiting, begin = array.array("i", [0]), time.monotonic()
        while n_waiting[0] < room:
            assert p.poll() is None and time.monotonic() < begin + 60 * SLOW
            nap(begin)
            fcntl.ioctl(reader, termios.FIONREAD, n_waiting)
        # All but the last byte: a page that is read to its end would make room for more.
        assert os.read(reader, room - 1).lstrip(b"-") == first[:-1]
        os.close(reader)
        reader = -1
        for _ in range(2):
            rc, out, err = run(["tandem", "generate", "--server", at, "--max-tokens", 4, "Once"])
            assert rc == 0 and out, err
        assert p.poll() is None
    finally:
        if reader >= 0:
            os.close(reader)
        p.send_signal(signal.SIGTERM)
        assert p.wait(30 * SLOW) == 0


# ---- names and addresses that are dialled
# -------------------------------------------------------------------------------------------------


class NamedCluster(Cluster):
    """Its certificate holds a name and no address: everybody who dials it must be told the name."""
    def connect(self):
        if self.channel:
            self.channel.close()
        options = [("grpc.ssl_target_name_override", "cluster.tandem"),
                   ("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.secure_channel(f"127.0.0.1:{self.port}", self.tls, options)


def test_server_names(certs, plain_tokens):
    named = ["--tls-server-name", "cluster.tandem"]
    both = [*tls_args(certs, "named"), *named]
    with NamedCluster(router_args=both, worker_args=both, tls=credentials(certs,
                                                                          name="client")) as c:
        r = c.generate(prompt="Once upon a time", max_tokens=16, temperature=0)
        assert (r.code, r.tokens) == (OK, plain_tokens), r.details
        for args in ([], ["--tls-server-name", "w0.kv.tandem"
                          ]):  # a host, and a name, that the router's certificate does not hold
            lost = c.start_worker("decode", wait=False, args=["--tls-server-name", "", *args])
            lost.wait_log(r"ev=router_lost")
        cli = ["--server", f"127.0.0.1:{c.port}", *tls_args(certs, "client")]
        assert run(["tandem", "status", *cli])[0] == 1
        assert run(["tandem", "status", *cli, *named])[0] == 0
        assert ask_health(*cli, "--timeout-ms", 500)[0] == 1  # the certificate lacks this host
        assert ask_health(*cli, *named) == (0, f"{cli[1]}: SERVING")
        rc, out, err = run([
            "tandem", "generate", *cli, *named, "--max-tokens", 16, "--temperature", 0,
            "--token-ids", "Once upon a time"
        ])
        assert rc == 0 and [int(x) for x in out.split()] == plain_tokens, err
        doctor = [
            "tandem", "doctor", "--local=false", "--router", f"127.0.0.1:{c.port}",
            *tls_args(certs, "client"), "--timeout-ms", 5000 * SLOW
        ]
        rc, out, _ = run([*doctor, *named])
        assert rc == 0 and b"prefill-0" in out and b"decode-0" in out, out
        assert run(doctor)[0] == 1
        assert len(c.status().workers) == 2
        c.wait_idle()


def test_router_that_does_not_know_its_workers_names(certs):
    """It says so of each, and sends them nothing."""
    with Cluster(prefill=0, decode=0, router_args=tls_args(certs), tls=credentials(
            certs, name="client")) as c:
        d = c.start_worker("decode", args=tls_args(certs, "named"), wait=False)
        c.router.wait_log(r"ev=worker_unreachable worker=decode-0")
        assert "is not in peer certificate" in d.wait_log(r"ev=registration_rejected .*").group(0)
        assert not c.status().workers


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="no IPv6 here")
@pytest.mark.parametrize("advertise", ["::1", "[::1]"])
def test_ipv6(plain_tokens, advertise, tmp_path):
    """Addresses that go from daemon to daemon: in brackets where a port follows, whichever way
    the operator wrote them."""
    secret = [
        "--cluster-secret-file",
        proofs.write_secret(tmp_path / "secret", "ipv6-0123456789abcdefghijklmnopqrst")
    ]
    with Cluster(
            router_args=["--listen", "[::]:0", *secret], worker_args=[
                *secret, "--listen", "[::]:0", "--advertise", advertise, "--transfer-host",
                advertise, "--transfer", "tcp"
            ]) as c:
        for w in c.status().workers:
            assert re.fullmatch(r"\[::1\]:\d+", w.address), w.address
        c.start_worker(
            "decode",
            args=["--router", f"[::1]:{c.port}", "--listen", "[::1]:0", "--advertise", ""])
        assert all(re.fullmatch(r"\[::1\]:\d+", w.address) for w in c.status().workers)
        r = c.generate(prompt="Once upon a time", max_tokens=16, temperature=0)
        assert (r.code, r.tokens) == (OK, plain_tokens), r.details
        c.wait_for(lambda: kv_bytes(c) > 0, "KV bytes in the snapshots", 10 * SLOW)
        assert "ev=worker_unreachable" not in c.router.log()
        c.wait_idle()


@pytest.mark.parametrize("advertise",
                         ["127.0.0.1:7610", "[worker-0]", "[::1]:7610", "fe80::1%lo", "two words"])
def test_advertise_that_nobody_can_dial(advertise):
    rc, _, err = run(
        ["tandem-decode", "--model", POCKET, "--listen", "127.0.0.1:0", "--advertise", advertise])
    assert rc == 2 and "advertise: host" in err, err


# ---- metrics, decision log
# -------------------------------------------------------------------------------------------------


def http(port, path, method="GET"):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=10 * SLOW) as r:
            return r.status, r.headers.get("Content-Type", ""), r.read().decode()
    except urllib.error.HTTPError as e:
        return e.code, "", e.read().decode()


def parse_metrics(text):
    """Prometheus text format, strictly enough: {name{labels}: value}; each series has a TYPE
    before it."""
    values, types = {}, {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in types and kind in ("counter", "gauge", "histogram"), line
            types[name] = kind
        elif not line.startswith("#"):
            m = re.fullmatch(
                r'([a-zA-Z_:][a-zA-Z0-9_:]*)'
                r'(\{[a-zA-Z_]\w*="(?:\\.|[^"\\])*"(?:,[a-zA-Z_]\w*="(?:\\.|[^"\\])*")*\})? '
                r'(\S+)', line)
            assert m, line
            base = re.sub(r"_(bucket|sum|count)$", "", m[1])
            assert m[1] in types or types.get(base) == "histogram", line
            key = m[1] + (m[2] or "")
            assert key not in values, line
            values[key] = float(m[3])
    return values


def test_metrics(tmp_path):
    log = tmp_path / "decisions"
    with Cluster(router_args=["--metrics-listen", "127.0.0.1:0", "--decision-log", log],
                 worker_args=["--metrics-listen", "127.0.0.1:0"]) as c:
        port = next(p for p in tcp_ports(c.router.pid) if p != c.port)
        n = 7
        results = c.generate_many([
            c.request(prompt=f"Fox {i}", max_tokens=5, temperature=0, ignore_eos=True)
            for i in range(n)
        ])
        assert all(r.code == OK for r in results)
        bad = c.generate(prompt="", max_tokens=5)
        assert bad.code == Code.INVALID_ARGUMENT
        c.wait_idle()
        status, kind, text = http(port, "/metrics")
        assert status == 200 and kind.startswith("text/plain")
        m = parse_metrics(text)
        assert m["td_time_to_first_token_seconds_count"] == n == m["td_request_success_total"]
        assert m['td_time_to_first_token_seconds_bucket{le="+Inf"}'] == n
        buckets = [v for k, v in m.items() if k.startswith("td_time_to_first_token_seconds_bucket")]
        assert buckets == sorted(buckets)
        assert m["td_generation_tokens_total"] == 5 * n and m[
            "td_request_failure_total"] == 1 and m["td_token_mismatch_total"] == 0
        want = sum(r.ledger.ttft_us for r in results) / 1e6
        assert abs(m["td_time_to_first_token_seconds_sum"] - want) < 1e-4 * n
        assert abs(sum(v for k, v in m.items() if k.startswith("td_stage_seconds_sum")) -
                   want) < 1e-4 * n  # the stages add up there too
        assert http(port, "/healthz")[0] == 200 and http(port, "/nothing")[0] == 404 and http(
            port, "/metrics", "POST")[0] == 405
        for name, d in c.workers.items():
            rpc = int(
                next(w for w in c.status().workers if w.name == name).address.rsplit(":", 1)[1])
            pages = []
            for p in tcp_ports(d.pid):
                if p != rpc:
                    try:
                        pages.append(http(p, "/metrics"))
                    except (OSError, ValueError):
                        pass  # the KV port speaks no HTTP
            assert any(s == 200 for s, _, _ in pages), name
            for s, _, text in pages:
                assert s != 200 or parse_metrics(text) is not None
    lines = log.read_text().splitlines()
    assert lines[0].startswith("c version=3 mode=0 policy=goodput") and lines[1].startswith(
        "k name=default ")
    assert all(
        re.fullmatch(r"[ckea]( \w+=\S*)+( reason=.*)?|h( [0-9a-f]{16})+", line) for line in lines)
    events, actions = ([int(x) for x in re.findall(rf"^{kind} kind=(\d+)", "\n".join(lines), re.M)]
                       for kind in "ea")
    assert events.count(10) == n and actions.count(1) == n and actions.count(
        2) == n and actions.count(5) == n and actions.count(6) == 0  # router/core/core.h


# ---- exhaustion is back-pressure
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option,limit", [("--max-requests", 4), ("--max-queued", 3)])
def test_too_many_requests(option, limit):
    """While no worker can take any, as many as the limit wait and the rest is told at once when
    to come back; those that wait are finished."""
    n = 10 if SHORT else 40
    with Cluster(decode=0, router_args=[option, limit, "--queue-timeout-ms", 30000 * SLOW],
                 worker_args=["--max-seqs", 4]) as c:
        streams = [
            c.stream(c.request(prompt="A fox", max_tokens=40, temperature=0, ignore_eos=True))
            for _ in range(n)
        ]
        c.wait_for(lambda: sum(s.done() for s in streams) == n - limit,
                   f"{n - limit} refused requests", 20 * SLOW)
        assert c.status().queued == limit
        waiting = [s for s in streams if not s.done()]
        for s in streams:
            assert s in waiting or (s.code() == Code.RESOURCE_EXHAUSTED
                                    and int(dict(s.trailing_metadata())["retry-delay-ms"]) > 0
                                    and s.details()), s
        c.start_worker("decode")
        tokens = [[t for m in s for t in m.token_ids] for s in waiting]
        assert [s.code() for s in waiting] == [OK] * limit
        c.wait_idle()
        again = c.generate(prompt="A fox", max_tokens=40, temperature=0, ignore_eos=True)
        assert again.code == OK and len(again.tokens) == 40 and tokens == [again.tokens] * limit


@pytest.mark.parametrize("mode", ["pd"] if SHORT else ["pd", "colocated"])
def test_tiny_pools(mode):
    """Sequences that together need many times the pool: they wait or are preempted, none fails,
    each has the tokens it has alone."""
    n = 6 if SHORT else 30
    with Cluster(mode=mode, kv_memory="1MiB", worker_args=[
            "--max-seqs", 8, "--max-batch", 4, "--max-step-tokens", 32
    ], router_args=[
            "--policy", "least_token"
    ]) as c:  # 25 blocks of 16; a policy that does not look at KV, so that workers must preempt
        requests = [
            c.request(prompt=f"Story {i}. " + "The fox ran. " * (i % 9),
                      max_tokens=60 + 9 * (i % 7), temperature=0.7 * (i % 2), seed=i,
                      ignore_eos=True) for i in range(n)
        ]
        together = c.generate_many(requests)
        assert [r.code for r in together] == [OK] * n, [r.details for r in together if r.code != OK]
        c.wait_idle(10)
        for i in range(0, n, 3):
            assert c.generate(requests[i]).tokens == together[i].tokens, i
        assert SHORT or mode == "pd" or sum(r.ledger.preemptions for r in together) > 0
        c.wait_idle(10)


def test_cancelled_while_waiting():
    """Requests that queue for a place and are cancelled there leave nothing behind."""
    with Cluster(kv_memory="1MiB", worker_args=["--max-seqs", 2]) as c:
        streams = [
            c.stream(c.request(prompt=f"Fox {i}", max_tokens=300, temperature=0, ignore_eos=True))
            for i in range(30)
        ]
        c.wait_for(lambda: c.status().queued > 5, "a queue", 10 * SLOW)
        for s in streams:
            s.cancel()
        c.wait_idle()
        expired = c.generate_many([
            c.request(prompt=f"Fox {i}", max_tokens=300, temperature=0, ignore_eos=True)
            for i in range(20)
        ], timeout=0.02)
        assert {r.code for r in expired} <= {OK, Code.DEADLINE_EXCEEDED} and any(r.code != OK
                                                                                 for r in expired)
        c.wait_idle()


def test_no_worker():
    with Cluster(prefill=0, decode=0, router_args=["--queue-timeout-ms", 200]) as c:
        r = c.generate(prompt="A fox", max_tokens=2)
        assert r.code == Code.UNAVAILABLE and "worker" in r.details
        c.start_worker("decode")
        r = c.generate(prompt="A fox", max_tokens=2)  # pd: nobody to prefill
        assert r.code == Code.UNAVAILABLE and "worker" in r.details
        c.wait_idle()


def test_to_no_workers_and_back():
    """Scaled to nothing and up again: requests that come meanwhile are held, told as waiting, and
    answered as before."""
    port = free_port()
    with Cluster(prefill=0, decode=0, router_args=["--metrics-listen", f"127.0.0.1:{port}"]) as c:
        requests = [c.request(prompt=f"Fox {i}", max_tokens=8, temperature=0) for i in range(4)]
        workers = [c.start_worker(role) for role in ("prefill", "decode")]
        before = c.generate_many(requests)
        assert all(r.code == OK for r in before)
        for w in workers:
            w.signal(signal.SIGTERM)
        for w in workers:
            assert w.wait_exit(20 * SLOW) == 0
        c.wait_for(lambda: not c.status().workers, "no worker", 10 * SLOW)
        after = []
        held = threading.Thread(target=lambda: after.extend(c.generate_many(requests)))
        held.start()
        c.wait_for(lambda: c.status().queued == 4, "all held", 10 * SLOW)
        c.wait_for(lambda: scrape(port)["td_num_requests_waiting"] == 4, "what KEDA asks", 10)
        for role in ("decode", "prefill"):
            c.start_worker(role)
        held.join()
        assert [r.tokens for r in after] == [r.tokens for r in before]
        c.wait_idle()
