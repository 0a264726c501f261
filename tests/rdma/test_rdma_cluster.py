"""Router, prefill and decode whose KV goes by RDMA between two Soft-RoCE devices: the oracle's
tokens, with packets lost, with the link down for a second in mid-transfer, with another MTU
or address than the devices had, and with either worker killed. Each fault is seen to have
happened, by a counter of the device, of the kernel or of the workers. Runs in
scripts/rdma-vm, by tests/rdma/run.py; every deadline is the slow machine's."""
import contextlib
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

import grpc
import pytest

os.environ[
    "TANDEM_TEST_SHORT"] = "1"  # read by harness.py: the emulated machine is as slow as a sanitizer
with open("/proc/cpuinfo", encoding="utf-8") as cpuinfo:
    if "QEMU TCG" in cpuinfo.read():
        # An emulated vector multiplies a lane at a time, and takes six times as long as the plain
        # kernels (40 tokens of the small model: 26 and 31 s, 4.6 s). These tests are of transfers.
        os.environ["TANDEM_OPS"] = "ref"
sys.path.insert(
    0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "cluster"))
import harness  # noqa: E402
import proofs  # noqa: E402
from harness import BIN, POCKET, Cluster, free_port  # noqa: E402

harness.SLOW = SLOW = 20  # slower still: on a busy host a step can take seconds

pytestmark = pytest.mark.skipif(not os.path.exists("/sys/class/infiniband/rxe1"),
                                reason="no devices rxe0 and rxe1: scripts/rdma-vm has them")
OK = grpc.StatusCode.OK
UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED
# Silence of a worker that the router takes for its death; gRPC's keepalive does at half of it. No
# fault here is silent, and on a machine that has ten
# other things to do a living worker has been too late with its answer to a ping.
SILENCE_MS = 60000
END = {"prefill": ("rxe0", "10.9.1.1"), "decode": ("rxe1", "10.9.1.2")}


def run(command):
    subprocess.run(command.split(), check=True, timeout=30 * SLOW)


def doctor(*args):
    r = subprocess.run([os.path.join(BIN, "tandem"), "doctor", *args, "--timeout-ms", "60000"],
                       capture_output=True, text=True, timeout=30 * SLOW, check=False)
    return r.returncode, r.stdout + r.stderr


def test_doctor_sees_both_devices():
    rc, text = doctor("--transfer", "rdma", "--kv-memory", "16MiB", "--register", "16MiB")
    assert rc == 0 and all(
        re.search(rf"^  ok .*\b{name}\b", text, re.M) for name in ("rxe0", "rxe1")), text


def test_two_doctors_measure_rdma():
    listener = subprocess.Popen(
        [os.path.join(BIN, "tandem"), "doctor", "--listen", "10.9.1.2:0", "--timeout-ms", "60000"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        at = re.fullmatch(r"listening at (\S+)\n", listener.stdout.readline())[1]
        rc, text = doctor("--local=false", "--peer", at, "--bytes", "1MiB", "--transfer", "rdma")
        assert rc == 0 and re.search(r"^  ok    rdma: used rdma; .* every byte verified$", text,
                                     re.M), text
        theirs = listener.communicate(timeout=30 * SLOW)[0]
        assert listener.returncode == 0 and " transfers verified" in theirs, theirs
    finally:
        listener.kill()
        listener.communicate()


class RdmaCluster(Cluster):
    """Prefill workers on one device, decode workers on the other, and no other path allowed.
    shallow: a model's folder, whose requests are short."""
    def __init__(self, host=None, shallow=None, **rest):
        self.metrics, self.host = {}, host
        self.secret_dir = tempfile.TemporaryDirectory(
            prefix="tandem-rdma-")  # a KV port on a NIC's address wants one
        self.secret = [
            "--cluster-secret-file",
            proofs.write_secret(os.path.join(self.secret_dir.name, "secret"),
                                "rdma-0123456789abcdefghijklmnopqrst")
        ]
        rest["router_args"] = [*rest.get("router_args", ()), *self.secret]
        self.block, self.asked = (8, SHORT_REQUESTS) if shallow else (16, REQUESTS)
        super().__init__(worker_timeout_ms=SILENCE_MS, model=shallow or POCKET, **rest)

    def start_worker(self, role, wait=True, env=None, args=()):
        device, address = END[role]
        port = self.metrics[f"{role}-{self.next_index[role]}"] = free_port()
        return super().start_worker(role, wait, env, [
            *self.secret, "--transfer", "rdma", "--rdma-devices", device, "--transfer-host",
            self.host or address, "--kv-digest", "always", "--block-size", self.block,
            "--max-step-tokens", 2 * self.block, "--metrics-listen", f"127.0.0.1:{port}", *args
        ])

    def scrape(self, name):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics[name]}/metrics",
                                    timeout=10 * SLOW) as r:
            return {
                m[1]: float(m[2]) for m in re.finditer(r"^(td_\S+) (\S+)$",
                                                       r.read().decode(), re.MULTILINE)
            }


def requests_of(n_ids):
    return [{
        "ids": [3 + (i * 131 + k * 17) % 1000 for k in range(n)], "max_tokens": 4 + i % 2,
        "seed": 100 + i, "logprobs": 0, "temperature": 0.0 if i % 2 else 0.9, "top_k": 40,
        "top_p": 0.95, "min_p": 0.0, "repetition_penalty": 1.0
    } for i, n in enumerate(n_ids)]


# 2 to 4 blocks of KV each, in one chunk or two; greedy and sampled. Rounds under faults take the
# first four. Multiplications are what an emulated CPU is
# slowest at: where a request need not take long, blocks are half as long and the model has
# N_LAYERS.
REQUESTS = requests_of((40, 23, 34, 28, 47, 57, 33, 62))
SHORT_REQUESTS = requests_of((20, 12, 17, 14, 24, 29, 18, 31))
N_LAYERS = 2


@pytest.fixture(scope="module")
def shallow():
    """A folder with the pocket model's first layers."""
    with tempfile.TemporaryDirectory(prefix="tandem-model-") as folder:
        with open(os.path.join(POCKET, "config.json"), encoding="utf-8") as f:
            config = json.load(f)
        with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as f:
            json.dump(dict(config, num_hidden_layers=N_LAYERS), f)
        with open(os.path.join(POCKET, "model.safetensors"), "rb") as f:
            tensors = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
            base, kept, data = f.tell(), {}, b""
            for name, t in tensors.items():
                layer = re.match(r"model\.layers\.(\d+)\.", name)
                if name == "__metadata__" or layer and int(layer[1]) >= N_LAYERS:
                    continue
                begin, end = t["data_offsets"]
                f.seek(base + begin)
                kept[name] = dict(t, data_offsets=[len(data), len(data) + end - begin])
                data += f.read(end - begin)
        header = json.dumps(kept).encode()
        header += b" " * (-len(header) % 8)
        with open(os.path.join(folder, "model.safetensors"), "wb") as f:
            f.write(struct.pack("<Q", len(header)) + header + data)
        for name in ("generation_config.json", "special_tokens_map.json", "tokenizer.json",
                     "tokenizer_config.json"):
            shutil.copy(os.path.join(POCKET, name), folder)
        yield folder


def one_process(dtype="f32", requests=REQUESTS, model=POCKET):
    done = subprocess.run(
        [os.path.join(BIN, "one_process"), model, dtype, "1", "512", "0", "0", "16MiB"],
        input=json.dumps(requests), capture_output=True, text=True, timeout=60 * SLOW, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    tokens = [r["tokens"] for r in json.loads(done.stdout)["results"]]
    assert any(len(set(t)) > 3 for t in tokens)
    return tokens


@pytest.fixture(scope="module")
def want(shallow):
    return one_process(requests=SHORT_REQUESTS, model=shallow)


@pytest.fixture(scope="module")
def long_want():
    return one_process()


def device_counters():
    """What both devices have counted of packets that were lost, came twice or out of turn, and
    of links that went."""
    names = ("completer_retry_err", "duplicate_request", "out_of_seq_request", "rcvd_seq_err",
             "retry_exceeded_err", "link_downed")
    total = dict.fromkeys(names, 0)
    for device in ("rxe0", "rxe1"):
        for name in names:
            with open(f"/sys/class/infiniband/{device}/ports/1/hw_counters/{name}",
                      encoding="ascii") as f:
                total[name] += int(f.read())
    return total


def counted(before):
    return {name: n - before[name] for name, n in device_counters().items()}


def place_of_threads(pid):
    """Where each thread of a process is, and how long it ran and waited for a CPU: for an engine
    that made no turn."""
    lines = []
    for tid in sorted(os.listdir(f"/proc/{pid}/task"), key=int):
        row = []
        for name in ("comm", "schedstat", "syscall", "stack"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{tid}/{name}",
                                                    encoding="ascii", errors="replace") as f:
                row.append(name + " " + f.read().strip().replace("\n", " < "))
        lines.append(f"  {tid}: " + "; ".join(row))
    return "\n".join(lines)


@contextlib.contextmanager
def stalls_explained(c):
    """Says where a worker's threads are when its engine makes no turn. A machine that is slow
    enough can do that to it; a lock must not."""
    stop, seen = threading.Event(), {}

    def look():
        while not stop.wait(1):
            for d in list(c.workers.values()):
                n = d.log().count(" ev=engine_stuck ")
                if n > seen.get(d.name, 0) and d.alive():
                    print(f"engine_stuck: {d.name}, load {os.getloadavg()}", place_of_threads(
                        d.pid), sep="\n", flush=True)
                seen[d.name] = n

    t = threading.Thread(target=look)
    t.start()
    try:
        yield
    finally:
        stop.set()
        t.join()


LINK = {"is_down": False, "n_downs": 0,
        "noticed_s": 0.0}  # noticed_s: by then the workers know that it is up again


def send(c, want, n=4, may_refuse=lambda: False):
    """The results, but for what was refused because no port was up, where that may be."""
    requests = [dict(q) for q in c.asked[:n]]
    results = c.generate_many([c.request(ids=q.pop("ids"), ignore_eos=True, **q) for q in requests])
    taken = [
        (i, r) for i, r in enumerate(results)
        if not (r.code == UNIMPLEMENTED and "no usable RDMA device" in r.details and may_refuse())
    ]
    for i, r in taken:
        assert r.code == OK, (i, r.code, r.details)
        assert r.tokens == want[i], i
        assert r.ledger.transfer_path == "rdma", (i, r.ledger)
    return [r for _, r in taken]


@pytest.fixture(scope="module")
def cluster(shallow):
    with RdmaCluster(shallow=shallow, worker_args=[
            "--no-prefix-cache"
    ]) as c:  # so that every request moves all of its blocks
        yield c


@pytest.fixture(scope="module")
def long_cluster():
    with RdmaCluster(worker_args=["--no-prefix-cache"]) as c:
        yield c


def test_tokens_are_one_process_s(cluster, want):
    send(cluster, want, len(SHORT_REQUESTS))
    cluster.wait_idle()
    for name in ("prefill-0", "decode-0"):
        m = cluster.scrape(name)
        assert m['td_kv_transfer_peers{path="rdma"}'] == 1 and m[
            'td_kv_transfer_peers{path="tcp"}'] == 0, name
        assert m['td_kv_transfer_path_bytes_total{path="rdma"}'] > 0 and m[
            "td_kv_transfer_fallbacks_total"] == 0
        assert m["td_kv_digest_mismatches_total"] == 0 and m["td_rdma_rail_errors_total"] == 0
    assert cluster.scrape("decode-0")["td_kv_digest_blocks_total"] >= len(SHORT_REQUESTS)


def qdisc_drops():
    text = subprocess.run(["tc", "-s", "-j", "qdisc", "show", "dev", "v0"], check=True,
                          capture_output=True, text=True, timeout=30 * SLOW).stdout
    return sum(q["drops"] for q in json.loads(text))


@contextlib.contextmanager
def netem(what):
    run(f"tc qdisc add dev v0 root netem {what}")
    try:
        yield
    finally:
        run("tc qdisc del dev v0 root")


def test_lost_packets_are_sent_again(cluster, want):
    before = device_counters()
    with netem("loss 5%"):
        for _ in range(6):  # chance drops them
            send(cluster, want)
            n = counted(before)
            if qdisc_drops() and n["completer_retry_err"] + n["duplicate_request"] + n[
                    "out_of_seq_request"] + n["rcvd_seq_err"]:
                break
        else:
            raise AssertionError(
                f"{qdisc_drops()} packets were dropped, and the devices counted {n}")
        print(f"{qdisc_drops()} packets dropped; {n}")
    cluster.wait_idle()
    assert cluster.scrape("decode-0")["td_kv_digest_mismatches_total"] == 0


@contextlib.contextmanager
def requests_running(c, want, n=4):
    """A stream of them beside the block, n in a round; at least one round before it and two
    after what it did. Yields nothing; every request must come out right, but for those that
    came while the link was down, which may be refused: then the round does not count."""
    stop, errors, n_rounds = threading.Event(), [], [0]

    def stream():
        try:
            while not stop.is_set():
                was = dict(LINK)
                was_down = was["is_down"] or time.monotonic() < was["noticed_s"]
                taken = send(c, want, n, lambda: was_down or LINK["n_downs"] != was["n_downs"])
                n_rounds[0] += len(taken) == n
        except AssertionError as e:
            errors.append(e)

    t = threading.Thread(target=stream)
    t.start()
    try:
        c.wait_for(lambda: n_rounds[0] or errors, "a round", 60 * SLOW)
        yield
        after = n_rounds[0]
        c.wait_for(lambda: n_rounds[0] >= after + 2 or errors, "two more rounds", 60 * SLOW)
    finally:
        stop.set()
        t.join()
    assert not errors, errors
    c.wait_idle()


def link_up():
    run("ip link set v1 up")
    run("ip route replace 10.9.1.1/32 dev v1 table 102")  # went with the link


def link_down_for_a_second():
    LINK.update(is_down=True, n_downs=LINK["n_downs"] + 1)
    run("ip link set v1 down")
    time.sleep(1)  # the fault's length, not a wait
    link_up()
    LINK.update(is_down=False, noticed_s=time.monotonic() + 5 * SLOW)


def test_long_link_down_for_a_second(long_cluster):
    """The port goes down with the link, and with it the queue pairs: what was under way is
    fenced, and sent anew over new ones. What comes while the link is down is refused, as no
    other path is allowed."""
    cluster, want = long_cluster, one_process(requests=REQUESTS[:2])
    before, was = device_counters(), {
        name: cluster.scrape(name) for name in ("prefill-0", "decode-0")
    }
    with netem("delay 100ms"), requests_running(
            cluster, want, 2):  # slow enough that some transfer is met in the middle
        for _ in range(10):
            cluster.wait_for(lambda: cluster.scrape("decode-0")["td_kv_cache_usage_ratio"] > 0,
                             "a request", 30 * SLOW)
            link_down_for_a_second()
            if cluster.scrape("decode-0")["td_kv_transfer_fenced_total"] > was["decode-0"][
                    "td_kv_transfer_fenced_total"]:
                break
        else:
            raise AssertionError(
                "the link was down ten times and never in the middle of a transfer")
    assert counted(before)["link_downed"] >= 2
    for name in ("prefill-0", "decode-0"):
        m = cluster.scrape(name)
        assert m["td_rdma_rail_errors_total"] > was[name]["td_rdma_rail_errors_total"], name
        assert m['td_kv_transfer_peers{path="rdma"}'] == 1 and m[
            "td_kv_transfer_fallbacks_total"] == 0, name
    assert cluster.scrape("decode-0")["td_kv_digest_mismatches_total"] == 0


def bytes_per_packet(c, want):
    """Of one round, at the sender's device."""
    def sent():
        with open("/sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts",
                  encoding="ascii") as f:
            return c.scrape("prefill-0")['td_kv_transfer_bytes_total{direction="sent"}'], int(
                f.read())

    n_bytes, n_packets = sent()
    send(c, want)
    after_bytes, after_packets = sent()
    return (after_bytes - n_bytes) / (after_packets - n_packets)


def test_long_one_end_has_a_small_mtu(long_cluster, long_want):
    """Set while its link is down: links that come after it go by the smaller of both ports.
    (Under a link that stands Soft-RoCE would send what is too large for ever: it takes seven
    retries for any number.)"""
    assert bytes_per_packet(long_cluster, long_want) > 1024
    run("ip link set v1 down")
    run("ip link set v1 mtu 1500")
    link_up()
    try:
        send(long_cluster, long_want, 2)  # the link comes back under it
        assert 0 < bytes_per_packet(long_cluster, long_want) <= 1024
    finally:
        run("ip link set v1 down")
        run("ip link set v1 mtu 9000")
        link_up()
    send(long_cluster, long_want, 2)
    long_cluster.wait_idle()
    assert bytes_per_packet(long_cluster, long_want) > 1024
    assert long_cluster.scrape("decode-0")["td_kv_digest_mismatches_total"] == 0


def exits_by_kill(c, names):
    return [name for name in names if c.workers[name].process.poll() == -signal.SIGKILL]


def test_long_bf16():
    want = one_process("bf16")
    with RdmaCluster(dtype="bf16", worker_args=["--no-prefix-cache"]) as c, stalls_explained(c):
        send(c, want, 3)
        c.wait_idle()


def test_killed_workers(cluster, want):
    """Either role, in the middle of a transfer; another worker of the role stands by, and a new
    one takes the dead one's place."""
    c, victims = cluster, {"decode-1": "decode_armed:kill:2", "prefill-1": "final_submitted:kill:2"}
    with stalls_explained(c):
        for name, fault in victims.items():
            c.start_worker(name.split("-")[0], wait=False, env={"TANDEM_FAULT": fault})
        c.wait_workers(4)
        for _ in range(8):
            send(c, want)
            if len(exits_by_kill(c, victims)) == len(victims):
                break
        assert exits_by_kill(c,
                             victims) == list(victims), "not every victim reached its fault point"
        c.wait_idle()
        for role in ("decode", "prefill"):
            c.start_worker(role, wait=False)
        c.wait_for(
            lambda: all(
                any(w.name == name and w.state == "ready" for w in c.status().workers)
                for name in ("decode-2", "prefill-2")), "new workers", harness.START_S)
        send(c, want)
        c.wait_idle()


# another worker is killed as long as this lasts: an emulated machine that is shared takes minutes
# for each
KILLS_S = 300


def test_long_killed_whenever(long_want):
    """SIGKILL from outside while requests run, each role in turn, and each time a new worker
    takes the place: one of each role at least, and three of each where there is time. At no
    step in particular: test_killed_workers names the steps."""
    begin, victims = time.monotonic(), []
    with RdmaCluster(prefill=2, decode=2,
                     worker_args=["--no-prefix-cache"]) as c, stalls_explained(c):
        for i in range(6):
            if len(victims) >= 2 and time.monotonic() - begin > KILLS_S:
                break
            role = ("decode", "prefill")[i % 2]
            victim = f"{role}-{i // 2}"
            with requests_running(c, long_want, 2):
                c.wait_for(
                    lambda name=victim: any(w.name == name and w.transfers
                                            for w in c.status().workers), f"{victim} to transfer",
                    60 * SLOW)
                c.workers[victim].signal(signal.SIGKILL)
                c.workers[victim].process.wait(30 * SLOW)
                c.start_worker(role)
            victims.append(victim)
            print(
                f"{victim} killed and replaced, {time.monotonic() - begin:.0f} s after the "
                "beginning", flush=True)
        assert exits_by_kill(c, victims) == victims


def test_long_an_address_changes(long_want):
    """The receiver's device gets another address and loses the one that it had; frames go over
    the loopback device and do not notice."""
    with RdmaCluster(worker_args=["--no-prefix-cache"], host="127.0.0.1") as c:
        send(c, long_want)
        n_before = len(re.findall(" ev=kv_path path=rdma ", c.workers["decode-0"].log()))
        run("ip addr add 10.9.1.52/32 dev v1")
        run("ip rule add pref 20 from 10.9.1.1 to 10.9.1.52 lookup 101")
        run("ip rule add pref 21 from 10.9.1.52 to 10.9.1.1 lookup 102")
        run("ip route add 10.9.1.52/32 dev v0 table 101")
        run("ip addr del 10.9.1.2/24 dev v1")
        run("ip route replace 10.9.1.1/32 dev v1 table 102")
        try:
            for _ in range(2):
                send(c, long_want)
            c.wait_idle()
            assert len(re.findall(" ev=kv_path path=rdma ", c.workers["decode-0"].log())) > n_before
            assert c.scrape("decode-0")["td_kv_digest_mismatches_total"] == 0
        finally:
            run("ip addr add 10.9.1.2/24 dev v1")
            run("ip addr del 10.9.1.52/32 dev v1")
            run("ip route replace 10.9.1.1/32 dev v1 table 102")


def test_long_the_device_goes_and_comes(long_want):
    """The decode worker's device is taken out of the machine, and later there is one again.
    Soft-RoCE lets none go that a process holds, and tells that process nothing
    (docs/rdma.md), so the worker goes first. The prefill worker lives through it and dials
    the new one."""
    with RdmaCluster(worker_args=["--no-prefix-cache"]) as c, stalls_explained(c):
        send(c, long_want, 2)
        c.workers["decode-0"].signal(signal.SIGKILL)
        run("rdma link delete rxe1")
        try:
            without = c.start_worker("decode", wait=False)
            assert without.process.wait(30 * SLOW) == 1
            assert re.search(r"\brxe1\b", without.log()), without.log()[-2000:]
        finally:
            run("rdma link add rxe1 type rxe netdev v1")
        c.start_worker("decode")
        send(c, long_want, 2)
        c.wait_idle()
