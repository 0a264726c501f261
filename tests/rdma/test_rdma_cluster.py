"""Router, prefill and decode whose KV goes by RDMA between two Soft-RoCE devices: the oracle's tokens, with packets lost, with the link down for a
second in the middle, and with either worker killed. Runs in scripts/rdma-vm, by tests/rdma/run.py; every deadline is the slow machine's."""
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import grpc
import pytest

os.environ["TANDEM_TEST_SHORT"] = "1"  # read by harness.py: the emulated machine is as slow as a sanitizer
sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "cluster"))
import harness  # noqa: E402
from harness import BIN, POCKET, Cluster  # noqa: E402

harness.SLOW = SLOW = 20  # slower still: on a busy host a step can take seconds

pytestmark = pytest.mark.skipif(not os.path.exists("/sys/class/infiniband/rxe1"), reason="no devices rxe0 and rxe1: scripts/rdma-vm has them")
OK = grpc.StatusCode.OK
END = {"prefill": ("rxe0", "10.9.1.1"), "decode": ("rxe1", "10.9.1.2")}


def run(command):
    subprocess.run(command.split(), check=True, timeout=30 * SLOW)


def doctor(*args):
    r = subprocess.run([os.path.join(BIN, "tandem"), "doctor", *args, "--timeout-ms", "60000"], capture_output=True, text=True, timeout=30 * SLOW, check=False)
    return r.returncode, r.stdout + r.stderr


def test_doctor_sees_both_devices():
    rc, text = doctor("--transfer", "rdma", "--kv-memory", "16MiB")
    assert rc == 0 and all(re.search(rf"^  ok .*\b{name}\b", text, re.M) for name in ("rxe0", "rxe1")), text


def test_two_doctors_measure_rdma():
    listener = subprocess.Popen([os.path.join(BIN, "tandem"), "doctor", "--listen", "10.9.1.2:0", "--timeout-ms", "60000"], stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        at = re.fullmatch(r"listening at (\S+)\n", listener.stdout.readline())[1]
        rc, text = doctor("--local=false", "--peer", at, "--bytes", "1MiB", "--transfer", "rdma")
        assert rc == 0 and re.search(r"^  ok    rdma: used rdma; .* every byte verified$", text, re.M), text
        theirs = listener.communicate(timeout=30 * SLOW)[0]
        assert listener.returncode == 0 and " transfers verified" in theirs, theirs
    finally:
        listener.kill()
        listener.communicate()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class RdmaCluster(Cluster):
    """Prefill workers on one device, decode workers on the other, and no other path allowed."""

    def __init__(self, **rest):
        self.metrics = {}
        super().__init__(**rest)

    def start_worker(self, role, wait=True, env=None, args=()):
        device, address = END[role]
        port = self.metrics[f"{role}-{self.next_index[role]}"] = free_port()
        return super().start_worker(role, wait, env, ["--transfer", "rdma", "--rdma-devices", device, "--transfer-host", address, "--kv-digest", "always",
                                                      "--max-step-tokens", 32, "--metrics-listen", f"127.0.0.1:{port}", *args])

    def scrape(self, name):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics[name]}/metrics", timeout=10 * SLOW) as r:
            return {m[1]: float(m[2]) for m in re.finditer(r"^(td_\S+) (\S+)$", r.read().decode(), re.MULTILINE)}


# 2 to 4 blocks of KV each, in up to two chunks; greedy and sampled.
REQUESTS = [{"ids": [3 + (i * 131 + k * 17) % 1000 for k in range(20 + (i * 19 + 18) % 43)], "max_tokens": 4 + i % 2, "seed": 100 + i, "logprobs": 0,
             "temperature": 0.0 if i % 2 else 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.0, "repetition_penalty": 1.0} for i in range(8)]


@pytest.fixture(scope="module")
def want():
    done = subprocess.run([os.path.join(BIN, "one_process"), POCKET, "f32", "1", "512", "0", "0", "16MiB"], input=json.dumps(REQUESTS), capture_output=True,
                          text=True, timeout=60 * SLOW, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    tokens = [r["tokens"] for r in json.loads(done.stdout)["results"]]
    assert any(len(set(t)) > 3 for t in tokens)
    return tokens


def send(c, want, n=4):
    requests = [dict(q) for q in REQUESTS[:n]]
    results = c.generate_many([c.request(ids=q.pop("ids"), ignore_eos=True, **q) for q in requests])
    for i, r in enumerate(results):
        assert r.code == OK, (i, r.code, r.details)
        assert r.tokens == want[i], i
        assert r.ledger.transfer_path == "rdma", (i, r.ledger)
    return results


@pytest.fixture(scope="module")
def cluster():
    with RdmaCluster(worker_args=["--no-prefix-cache"]) as c:  # so that every request moves all of its blocks
        yield c


def test_tokens_are_one_process_s(cluster, want):
    send(cluster, want, len(REQUESTS))
    cluster.wait_idle()
    for name in ("prefill-0", "decode-0"):
        m = cluster.scrape(name)
        assert m['td_kv_transfer_peers{path="rdma"}'] == 1 and m['td_kv_transfer_peers{path="tcp"}'] == 0, name
        assert m['td_kv_transfer_path_bytes_total{path="rdma"}'] > 0 and m["td_kv_transfer_fallbacks_total"] == 0
        assert m["td_kv_digest_mismatches_total"] == 0 and m["td_rdma_rail_errors_total"] == 0
    assert cluster.scrape("decode-0")["td_kv_digest_blocks_total"] >= len(REQUESTS)


@contextlib.contextmanager
def loss(share):
    run(f"tc qdisc add dev v0 root netem loss {share}")
    try:
        yield
    finally:
        run("tc qdisc del dev v0 root")


def test_lost_packets_are_sent_again(cluster, want):
    with loss("0.5%"):
        send(cluster, want)
    cluster.wait_idle()


def test_link_down_for_a_second(cluster, want):
    """In the middle of a stream of requests. The port goes down with the link, and with it the queue pairs: what was under way is sent anew."""
    stop, errors, n_rounds = threading.Event(), [], [0]

    def stream():
        try:
            while not stop.is_set():
                send(cluster, want)
                n_rounds[0] += 1
        except AssertionError as e:
            errors.append(e)

    t = threading.Thread(target=stream)
    t.start()
    cluster.wait_for(lambda: n_rounds[0] or errors, "a round", 30 * SLOW)
    run("ip link set v1 down")
    time.sleep(1)  # the fault's length, not a wait
    run("ip link set v1 up")
    run("ip route replace 10.9.1.1/32 dev v1 table 102")  # went with the link
    after = n_rounds[0]
    cluster.wait_for(lambda: n_rounds[0] >= after + 2 or errors, "two more rounds", 30 * SLOW)
    stop.set()
    t.join()
    assert not errors, errors
    cluster.wait_idle()
    assert cluster.scrape("decode-0")["td_kv_digest_mismatches_total"] == 0


def test_killed_workers(want):
    """Either role, in the middle of a transfer; another worker of the role stands by, and a new one takes the dead one's place."""
    victims = {"decode-0": "decode_armed:kill:2", "prefill-0": "final_submitted:kill:2"}
    with RdmaCluster(prefill=2, decode=2, worker_args=["--no-prefix-cache"], envs={name: {"TANDEM_FAULT": fault} for name, fault in victims.items()}) as c:
        for _ in range(8):
            send(c, want)
            if not any(c.workers[name].alive() for name in victims):
                break
        for name in victims:
            assert not c.workers[name].alive(), f"{name} did not reach its fault point"
        c.wait_idle()
        c.start_worker("decode")
        c.start_worker("prefill")
        send(c, want)
        c.wait_idle()
