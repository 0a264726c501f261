"""Models split over ranks of several hosts (--nnodes): the ranks are separate processes that share
nothing and speak over TCP. The tokens and logprobs are those of one engine of that degree on one
host, to the bit; a rank that dies, stops or does not fit ends its worker with a reason, and the
requests go on elsewhere. How ranks find and prove themselves: tests/unit/nodes_test.c."""
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading

import pytest

from harness import BIN, POCKET, SHORT, SLOW, Cluster, Daemon, as_result, free_port, one_process
from test_floods import make_certificate
from test_tp import make_requests

N = 6 if SHORT else 12
REQUESTS = make_requests(23, N)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A config of the pocket model's vocabulary with 8 heads and 2 KV heads, for random weights."""
    with open(os.path.join(POCKET, "config.json"), encoding="utf-8") as f:
        config = json.load(f)
    config.update(num_attention_heads=8, num_key_value_heads=2, num_hidden_layers=2)
    path = tmp_path_factory.mktemp("wide") / "pocket"
    path.write_text(json.dumps(config), encoding="utf-8")
    return str(path)


def model_args(model):
    return [] if model == POCKET else ["--model", "", "--random-weights", model]


def follower(c, role, rank, args, enter=None):
    """Rank `rank` of a worker, as the host that it would run on starts it. enter: the process in
    whose network it runs."""
    args = [
        "--model", c.model, "--dtype", c.dtype, "--threads", 1, *c.worker_args, *args,
        "--node-rank", rank
    ]
    program = f"tandem-{role}"
    if enter:
        args = [f"--target={enter}", "--net", os.path.join(BIN, program), *args]
        program = shutil.which("nsenter")
    d = Daemon(f"{role}-rank-{rank}", program, args, c.dir.name)
    c.all.append(d)
    return d


def start_nodes(c, role, n, model=POCKET, args=()):
    """A worker of n ranks; (rank 0, the others). The others may come first, and wait."""
    args = [
        "--tp", n, "--nnodes", n, "--master-addr", f"127.0.0.1:{free_port()}", *model_args(model),
        *args
    ]
    others = [follower(c, role, r, args) for r in range(1, n)]
    return c.start_worker(role, wait=False, args=args), others


def check(results, want):
    for i, (got, expected) in enumerate(zip(results, want, strict=True)):
        assert got[0] == expected[0], f"request {i}: tokens differ"
        assert got[1] == expected[1], f"request {i}: logprobs differ"


CASES = [("small-pool-tcp", 2, False, {
    "kv_memory": "1MiB", "worker_args": ["--transfer", "tcp", "--max-step-tokens", 17]
}), ("shared-heads-shm", 4, True, {"worker_args": ["--transfer", "shm"]})]


@pytest.mark.parametrize("name,n,shared,kwargs", CASES, ids=[e[0] for e in CASES])
def test_as_on_one_host(wide, name, n, shared, kwargs):
    """pd, batched, chunked, preempted, with prefix hits. 4 ranks of 2 KV heads: two ranks have a
    head each, and get it dealt; one sends it."""
    model = wide if shared else POCKET
    want = one_process(REQUESTS, model, "f32", tp=n)[0]
    with Cluster(prefill=0, decode=0, **kwargs) as c:
        others = start_nodes(c, "prefill", n, model)[1] + start_nodes(c, "decode", n, model)[1]
        c.wait_workers(2)
        assert {w.tp for w in c.status().workers} == {n}
        requests = c.requests(REQUESTS)
        check([as_result(r) for r in c.generate_many(requests)], want)
        check([as_result(r) for r in c.generate_many(requests)], want)
        c.wait_idle()
        c.stop()  # rank 0 tells its end: the others end in good order, without a signal
        assert [d.wait_exit(20 * SLOW) for d in others] == [0] * len(others)


def test_unequal_degrees():
    """From one rank to ranks of two hosts: parts are brought into another order, and dealt.
    Greedy: the tokens of one rank, logprobs within rounding."""
    greedy = [dict(q, temperature=0.0) for q in REQUESTS[:4]]
    want = one_process(greedy, POCKET, "f32")[0]
    with Cluster(prefill=1, decode=0, worker_args=["--kv-digest", "always"]) as c:
        start_nodes(c, "decode", 2)
        c.wait_workers(2)
        for i, (got, expected) in enumerate(
                zip([as_result(r) for r in c.generate_many(c.requests(greedy))], want,
                    strict=True)):
            assert got[0] == expected[0], f"request {i}: not the tokens of one rank"
            assert max(abs(a - b) for a, b in zip(got[1], expected[1], strict=True)) < 1e-3
        c.wait_idle()


@pytest.mark.parametrize("how", ["kill"] if SHORT else ["kill", "stop"])
def test_lost_rank(how):
    """The worker ends with the rank's name, its requests go on at one whose ranks are of one host,
    token for token. Killed: in the middle of decoding. A stopped rank is given up after
    --rank-timeout-ms; when it goes on, it ends, too."""
    want = one_process(REQUESTS, POCKET, "f32", tp=2)[0]
    with Cluster(prefill=0, decode=0) as c:
        c.start_worker("prefill", wait=False, args=["--tp", 2, "--threads", 2])
        # more than a busy machine takes a processor away for
        patience = ["--rank-timeout-ms", 3000 * SLOW] if how == "stop" else []
        lead, (other, ) = start_nodes(c, "decode", 2, args=patience)
        c.start_worker("decode", wait=False, args=["--tp", 2, "--threads", 2])
        c.wait_workers(3)
        box = []
        t = threading.Thread(target=lambda: box.extend(c.generate_many(c.requests(REQUESTS))))
        if how == "stop":  # the first step that it is in has no end
            other.signal(signal.SIGSTOP)
        t.start()
        if how == "kill":
            c.wait_for(
                lambda: any(w.name == lead.name and w.running
                            for w in c.status().workers) or not t.is_alive(), "decode to run",
                20 * SLOW)
            other.signal(signal.SIGKILL)
        assert lead.wait_exit(30 * SLOW) == 1
        says = (r"rank 1 \(127\.0\.0\.1:\d+\) is gone: \w"
                if how == "kill" else r"rank 0 still waits for rank 1 \(127\.0\.0\.1:\d+\) in \w+")
        assert re.search(rf'ev=ranks_lost reason="[^"]*{says}', lead.log()), lead.log()[-2000:]
        t.join()
        check([as_result(r) for r in box], want)
        c.wait_idle(4)
        if how == "stop":
            other.signal(signal.SIGCONT)
            assert other.wait_exit(20 * SLOW) == 1
            assert "ev=rank_ends rank=1" in other.log()


def test_rank_ends_with_rank_0_and_comes_again():
    """Rank 0 killed: the others end; started again, as an orchestrator does, the group forms
    again."""
    with Cluster(prefill=1, decode=0) as c:
        for _ in range(2):
            lead, (other, ) = start_nodes(c, "decode", 2)
            c.wait_workers(2)
            assert c.generate(prompt="Once", max_tokens=4).tokens
            lead.signal(signal.SIGKILL)
            assert other.wait_exit(20 * SLOW) == 1
            assert re.search(r'ev=rank_ends rank=1 reason="ranks: rank 0 \(.*\) is gone',
                             other.log())
            lead.wait_exit(10)
            del c.workers[lead.name]
            c.wait_for(lambda: sum(w.state == "ready" for w in c.status().workers) == 1,
                       "the lost worker to be gone", 10 * SLOW)


@pytest.mark.parametrize("theirs,says", [
    (["--block-size", 32], "rank 1: block_size is 32, rank 0's is 16; all ranks must have"),
    (["--dtype", "bf16"], "rank 1: dtype is bf16, rank 0's is f32; all ranks must have"),
    (["--ops", "ref"], "rank 1: ops is ref, rank 0's is "),
    (["--random-weights", "config"], "rank 1: its model's files are not those of rank 0"),
    (["--ep", 1], "rank 1: ep is 1, rank 0's is 0; all ranks must have"),
][::3 if SHORT else 1])
def test_ranks_that_do_not_fit(wide, theirs, says):
    """Both say which option, or that the files differ, before any weight is loaded."""
    if "config" in theirs:
        theirs = model_args(wide)
    with Cluster(prefill=0, decode=0) as c:
        args = ["--tp", 2, "--nnodes", 2, "--master-addr", f"127.0.0.1:{free_port()}"]
        other = follower(c, "decode", 1, args + theirs)
        lead = c.start_worker("decode", wait=False, args=args)
        assert other.wait_exit(20 * SLOW) == 1 and lead.wait_exit(20 * SLOW) == 2
        assert says in lead.log() and says in other.log(), lead.log() + other.log()
        assert "ev=ready" not in lead.log()


@pytest.mark.parametrize(
    "args,says",
    [(["--node-rank", 1], "node_rank is 1, must be below nnodes (1)"),
     (["--tp", 4, "--nnodes", 2], "nnodes is 2, tp is 4: a node has one rank"),
     (["--tp", 2, "--nnodes", 2], 'master_addr is "": with nnodes 2 it must say'),
     (["--tp", 2, "--nnodes", 2, "--master-addr", "here"
       ], 'master_addr is "here": with nnodes 2 it must say'),
     (["--tp", 2, "--nnodes", 2, "--master-addr", "127.0.0.1:9", "--device", "cuda"
       ], "device is cuda, nnodes is 2: the GPUs of a worker must be of one host"),
     (["--tp", 2, "--nnodes", 2, "--master-addr", "10.0.0.1:9", "--listen", "0.0.0.0:0"
       ], "listen is 0.0.0.0:0, beyond loopback"), ])
def test_refusals(args, says):
    done = subprocess.run([os.path.join(BIN, "tandem-decode"), "--model", POCKET, *map(str, args)],
                          capture_output=True, text=True, timeout=20 * SLOW, check=False)
    assert done.returncode in (1, 2) and says in done.stderr, done.stderr[-2000:]
    assert "ev=ready" not in done.stderr


def test_a_certificate_without_names(tmp_path):
    """Every certificate of the CA would be a rank's: node 0 listens beyond loopback only with names
    (the router's are not enough), or with the secret."""
    tls = [*make_certificate(tmp_path), "--tls-ca", tmp_path / "cert.pem"]
    args = [
        "--tp", 2, "--nnodes", 2, "--master-addr", f"10.0.0.1:{free_port()}", "--listen",
        "0.0.0.0:0", *tls, "--tls-router-names", "localhost"
    ]
    test_refusals(args, "listen is 0.0.0.0:0, beyond loopback, and serves the ranks of its model")


# --- two hosts, which are network namespaces
# -------------------------------------------------------------------------------------------------


def run(*command):
    subprocess.run(command, check=True, timeout=20, capture_output=True, text=True)


def two_hosts():
    """In a network namespace of its own, beside another one, joined by a pair of veth: the router,
    the prefill worker and decode's rank 0 here, its rank 1 there. Then the cable is pulled."""
    want = one_process(REQUESTS[:4], POCKET, "f32", tp=2)[0]
    with tempfile.TemporaryDirectory() as d, subprocess.Popen(
        ["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as there:
        there.stdin.write(b"x")
        there.stdin.flush()
        there.stdout.read(1)  # it is in its namespace
        run("ip", "link", "set", "lo", "up")
        run("ip", "link", "add", "v0", "type", "veth", "peer", "name", "v1", "netns", str(
            there.pid))
        run("ip", "addr", "add", "10.77.0.1/24", "dev", "v0")
        run("ip", "link", "set", "v0", "up")
        for command in ("addr add 10.77.0.2/24 dev v1", "link set v1 up"):
            run("nsenter", f"--target={there.pid}", "--net", "ip", *command.split())
        secret = os.path.join(d, "secret")
        with open(os.open(secret, os.O_CREAT | os.O_WRONLY, 0o600), "w", encoding="ascii") as f:
            f.write("0123456789abcdef" * 4)
        member = ["--cluster-secret-file", secret]
        with Cluster(prefill=0, decode=0, router_args=member, worker_args=member) as c:
            c.start_worker("prefill", wait=False, args=["--tp", 2, "--threads", 2])
            args = [
                "--tp", 2, "--nnodes", 2, "--master-addr", f"10.77.0.1:{free_port()}",
                "--rank-timeout-ms", 4000 * SLOW
            ]
            other = follower(c, "decode", 1, args, enter=there.pid)
            lead = c.start_worker("decode", wait=False, args=[*args, "--listen", "10.77.0.1:0"])
            c.wait_workers(2)
            assert re.search(r"ev=rank_joined rank=1 at=10\.77\.0\.2:\d+", lead.log())
            check([as_result(r) for r in c.generate_many(c.requests(REQUESTS[:4]))], want)
            if not SHORT:
                run("ip", "link", "set", "v0", "down")
                c.generate(c.requests(REQUESTS[:1])[0], timeout=8)  # a step that has no end
                assert lead.wait_exit(20 * SLOW) == 1
                assert re.search(r"ev=ranks_lost reason=.*rank 1 \(10\.77\.0\.2:", lead.log())
                other.signal(signal.SIGKILL)  # it would see by itself, after 20 s
                other.wait_exit(20)
        there.stdin.close()


def test_two_network_namespaces():
    tools = [t for t in ("ip", "unshare", "nsenter") if not shutil.which(t)]
    if os.geteuid() != 0 or tools:
        pytest.skip(f"takes root and ip, unshare, nsenter; missing: {tools or 'root'}")
    probe = subprocess.run(
        ["unshare", "--net", "ip", "link", "add", "v0", "type", "veth", "peer", "name", "v1"],
        capture_output=True, text=True, check=False, timeout=20)
    if probe.returncode:
        pytest.skip(f"no network namespaces with veth here: {probe.stderr.strip()}")
    done = subprocess.run(["unshare", "--net", sys.executable,
                           os.path.abspath(__file__)], capture_output=True, text=True, check=False,
                          timeout=300 * SLOW)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


if __name__ == "__main__":
    two_hosts()
