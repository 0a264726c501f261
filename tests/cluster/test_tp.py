"""Models split over ranks (--tp). Equal degrees keep I1 against one process of that degree:
batched, chunked, preempted, in pd and hybrid, after a rank is killed. Unequal degrees hand KV
over in another order of its parts: the same from run to run, and within rounding of one rank.
A rank that dies is a dead worker. The same with a device for each rank, on the emulated GPU."""
import json
import os
import random
import re
import signal
import subprocess
import threading
import time

import pytest

from harness import BIN, LONG, POCKET, SHORT, SLOW, Cluster, as_result, one_process

N = 6 if SHORT else 16


def share(cases):
    """Every other case in a sanitizer's short form, those between them in release builds, all in
    the long form: what differs from case to case is degrees and paths."""
    return cases if LONG else cases[::2] if SHORT else cases[1::2]


def make_requests(seed=11, n=N):
    """Prompts of which every third shares its first 70 tokens, sampled and greedy in turn."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, 1024) for _ in range(70)]
    return [{
        "ids": (shared if i % 3 == 0 else []) +
        [rng.randrange(3, 1024)
         for _ in range(rng.choice([1, 15, 16, 17, 60, 120]))], "max_tokens": rng.choice(
             [2, 9, 17,
              30]), "seed": i, "logprobs": 0, "temperature": 0.0 if i % 2 else 1.0, "top_p": 0.9
    } for i in range(n)]


REQUESTS = make_requests()


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Configs of the pocket model's vocabulary with 8 heads and 2 or 4 KV heads, for random
    weights; the file's name is the model's."""
    with open(os.path.join(POCKET, "config.json"), encoding="utf-8") as f:
        config = json.load(f)
    paths = {}
    for n_kv in (2, 4):
        config.update(num_attention_heads=8, num_key_value_heads=n_kv, num_hidden_layers=3)
        path = tmp_path_factory.mktemp(f"kv{n_kv}") / "pocket"
        path.write_text(json.dumps(config), encoding="utf-8")
        paths[n_kv] = str(path)
    return paths


def model_args(model):
    return [] if model == POCKET else ["--model", "", "--random-weights", model]


def start_pair(c, p, d, model=POCKET, args=()):
    c.start_worker("prefill", wait=False,
                   args=["--tp", p, "--threads", p, *model_args(model), *args])
    c.start_worker("decode", wait=False,
                   args=["--tp", d, "--threads", d, *model_args(model), *args])
    c.wait_workers(2)


def check(results, want):
    for i, (got, expected) in enumerate(zip(results, want, strict=True)):
        assert got[0] == expected[0], f"request {i}: tokens differ"
        assert got[1] == expected[1], f"request {i}: logprobs differ"


EQUAL = [("pd-small-pool", 2, None, {
    "mode": "pd", "kv_memory": "1MiB",
    "worker_args": ["--transfer", "tcp", "--max-step-tokens", 17]
}), ("hybrid", 2, None, {"mode": "hybrid", "router_args": ["--test-hybrid-local-tokens", 40]}),
         ("pd-shared-heads", 4, 2, {
             "mode": "pd", "worker_args": ["--transfer", "shm", "--max-step-tokens", 64]
         }), ]


@pytest.mark.parametrize("name,tp,n_kv,kwargs", EQUAL, ids=[e[0] for e in EQUAL])
def test_equal_degrees(wide, name, tp, n_kv, kwargs):
    model = wide[n_kv] if n_kv else POCKET
    want = one_process(REQUESTS, model, "f32", tp=tp)[0]
    with Cluster(prefill=0, decode=0, **kwargs) as c:
        start_pair(c, tp, tp, model)
        requests = c.requests(REQUESTS)
        check([as_result(r) for r in c.generate_many(requests)], want)
        check([as_result(r) for r in c.generate_many(requests)], want)  # with prefix hits
        c.wait_idle()


UNEQUAL = [(1, 2, None, "tcp"), (2, 1, None, "shm"), (4, 2, 4, "rdma"), (1, 4, 4, "tcp"),
           (2, 4, 4, "shm"), (4, 1, 2, "tcp")]


@pytest.mark.parametrize("p,d,n_kv,path", share(UNEQUAL))
def test_unequal_degrees(wide, p, d, n_kv, path):
    """Greedy, so that rounding alone decides nothing: the tokens of one rank, logprobs within
    rounding; and the same bits alone and in a batch."""
    model = wide[n_kv] if n_kv else POCKET
    greedy = [dict(q, temperature=0.0) for q in REQUESTS[:8]]
    want = one_process(greedy, model, "f32")[0]
    fabric = f"/dev/shm/tandem-tp-{os.getpid()}"
    env = {"TANDEM_VERBS_FAKE": f"path={fabric}"} if path == "rdma" else {}
    try:
        with Cluster(prefill=0, decode=0, envs={"prefill-0": env, "decode-0": env},
                     worker_args=["--transfer", path, "--max-step-tokens", 48]) as c:
            start_pair(c, p, d, model)
            requests = c.requests(greedy)
            alone = [as_result(c.generate(r)) for r in requests]
            for i, (got, expected) in enumerate(zip(alone, want, strict=True)):
                assert got[0] == expected[0], f"request {i}: not the tokens of one rank"
                worst = max(abs(a - b) for a, b in zip(got[1], expected[1], strict=True))
                assert worst < 1e-3, f"request {i}: logprobs differ by {worst} from one rank's"
            check([as_result(r) for r in c.generate_many(requests)], alone)
            assert c.generate(requests[2]).ledger.transfer_path == path
            c.wait_idle()
    finally:
        if os.path.exists(fabric):
            os.unlink(fabric)


def rank_pids(daemon):
    return {
        int(rank): int(pid)
        for rank, pid in re.findall(r"ev=rank_started rank=(\d+) pid=(\d+)", daemon.log())
    }


def is_there(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as f:
            return f.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_gone(pids, timeout):
    deadline = time.monotonic() + timeout
    while any(is_there(p) for p in pids):
        assert time.monotonic(
        ) < deadline, f"ranks {[p for p in pids if is_there(p)]} outlive their worker"
        time.sleep(0.01)


@pytest.mark.parametrize("victim", ["rank-1", "rank-0"])
def test_killed_rank(wide, victim):
    """In the middle of decoding: the worker is dead as a whole within 2 s, its requests go on
    elsewhere, token for token."""
    want = one_process(REQUESTS, wide[4], "f32", tp=2)[0]
    with Cluster(prefill=0, decode=0) as c:
        start_pair(c, 2, 2, wide[4])
        c.start_worker("decode", args=["--tp", 2, "--threads", 2, *model_args(wide[4])])
        ranks = rank_pids(c.workers["decode-0"])
        assert list(ranks) == [1]
        box = []
        t = threading.Thread(target=lambda: box.extend(c.generate_many(c.requests(REQUESTS))))
        t.start()
        c.wait_for(
            lambda: any(w.name == "decode-0" and w.running
                        for w in c.status().workers) or not t.is_alive(), "decode to run",
            20 * SLOW)
        if victim == "rank-1":
            os.kill(ranks[1], signal.SIGKILL)
            assert c.workers["decode-0"].wait_exit(2 * SLOW) == 1
            assert re.search(
                rf'ev=ranks_lost reason="rank 1 \(pid {ranks[1]}\) is dead" action=exit',
                c.workers["decode-0"].log())
        else:
            c.workers["decode-0"].signal(signal.SIGKILL)
        wait_gone(ranks.values(), 2 * SLOW)
        t.join()
        check([as_result(r) for r in box], want)
        c.wait_idle(4)


def test_idle_worker_loses_a_rank():
    with Cluster(prefill=0, decode=0) as c:
        start_pair(c, 2, 1)
        pid = rank_pids(c.workers["prefill-0"])[1]
        os.kill(pid, signal.SIGKILL)
        assert c.workers["prefill-0"].wait_exit(2 * SLOW) == 1
        assert f"rank 1 (pid {pid}) is dead" in c.workers["prefill-0"].log()


@pytest.mark.parametrize("args,says",
                         [(["--tp", 4], "tp is 4, must divide num_attention_heads 6"),
                          (["--tp", 3], "tp is 3, must be 1, 2, 4, 8 or 16"),
                          (["--tp", 2, "--kv-memory", "1"], "kv_memory 1 bytes holds 0 KV blocks"),
                          (["--tp", 2, "--cpus", "0"], "cpus lists 1 CPUs, threads is 2")])
def test_refusals(args, says):
    done = subprocess.run(
        [os.path.join(BIN, "tandem-decode"), "--model", POCKET, "--threads", "2", *map(str, args)],
        capture_output=True, text=True, timeout=20 * SLOW, check=False)
    assert done.returncode in (1, 2) and says in done.stderr, done.stderr[-2000:]
    assert "ev=ready" not in done.stderr


def test_only_ranks_are_ranks():
    done = subprocess.run([os.path.join(BIN, "tandem-decode"), "--tp-rank=1,2", "--model", POCKET],
                          capture_output=True, text=True, timeout=20 * SLOW, check=False)
    assert done.returncode == 2 and "is for tandem's own use: give --tp N" in done.stderr


# --- a device for each rank
# -------------------------------------------------------------------------------------------------

EMULATED = os.environ.get("TANDEM_TEST_CUDA_LIBRARY") or os.path.join(BIN, "libtandem_cuda_emu.so")
FEW = [dict(q, max_tokens=min(q["max_tokens"], 9)) for q in REQUESTS[:6]]  # an emulated GPU is slow


@pytest.fixture()
def devices(monkeypatch):
    if os.environ.get("TANDEM_TEST_SANITIZER") == "thread":
        pytest.skip("the emulated GPU switches stacks, which ThreadSanitizer cannot follow")
    if not os.path.exists(EMULATED):
        pytest.skip("no emulated GPU in this build: it takes a C++ compiler")
    monkeypatch.setenv("TANDEM_CUDA_LIBRARY", EMULATED)
    monkeypatch.setenv("TD_CUDA_EMU_DEVICES", "8")
    monkeypatch.setenv("TD_CUDA_EMU_STRICT",
                       "1")  # who follows a device's address ends with SIGSEGV


# eight emulated GPUs on two cores: a worker that says nothing for a second is not dead
PATIENCE_MS = 6000 * SLOW
CUDA = ["--device", "cuda", "--max-step-tokens", 48, "--peer-timeout-ms", PATIENCE_MS]
EQUAL_DEVICES = [("cuda-ipc", 2, None, {}), ("tcp", 2, None, {"kv_memory": "512KiB"}),
                 ("cuda-ipc", 4, 2, {})][:2 if SHORT else 3]


@pytest.mark.parametrize("path,tp,n_kv,kwargs", EQUAL_DEVICES)
def test_devices_of_equal_degrees(wide, devices, path, tp, n_kv, kwargs):
    """Each rank on a device of its own: the tokens of one engine of that degree, with and
    without prefix hits; tcp, staged, in a pool that is too small for all; cuda-ipc with 4
    ranks of 2 KV heads: an import fills the second copies."""
    model = wide[n_kv] if n_kv else POCKET
    want = one_process(FEW, model, "f32", tp=tp, device="cuda")[0]
    with Cluster(prefill=0, decode=0, worker_timeout_ms=PATIENCE_MS, **kwargs) as c:
        start_pair(c, tp, tp, model, [*CUDA, "--transfer", path, "--kv-digest", "always"])
        requests = c.requests(FEW)
        results = c.generate_many(requests)
        check([as_result(r) for r in results], want)
        assert results[0].ledger.transfer_path == path
        check([as_result(r) for r in c.generate_many(requests)], want)  # with prefix hits
        c.wait_idle()


UNEQUAL_DEVICES = share([(1, 2, None), (4, 2, 4), (2, 1, 4), (1, 4, 2)])


@pytest.mark.parametrize("p,d,n_kv", UNEQUAL_DEVICES)
def test_devices_of_unequal_degrees(wide, devices, p, d, n_kv):
    """Greedy: the tokens of one device, logprobs within rounding; the same bits alone and in a
    batch. 1 to 4 with 2 KV heads: an import fills copies, too. 2 to 1 by shm-staged: copies
    from both devices to one ring."""
    path = "shm" if (p, d) == (2, 1) else "cuda-ipc"
    model = wide[n_kv] if n_kv else POCKET
    greedy = [dict(q, temperature=0.0) for q in FEW]
    want = one_process(greedy, model, "f32", device="cuda")[0]
    with Cluster(prefill=0, decode=0, worker_timeout_ms=PATIENCE_MS) as c:
        start_pair(c, p, d, model, [*CUDA, "--transfer", path, "--kv-digest", "always"])
        assert {w.role: w.tp for w in c.status().workers} == {"prefill": p, "decode": d}
        requests = c.requests(greedy)
        alone = [as_result(c.generate(r)) for r in requests]
        for i, (got, expected) in enumerate(zip(alone, want, strict=True)):
            assert got[0] == expected[0], f"request {i}: not the tokens of one device"
            worst = max(abs(a - b) for a, b in zip(got[1], expected[1], strict=True))
            assert worst < 1e-3, f"request {i}: logprobs differ by {worst} from one device's"
        results = c.generate_many(requests)
        check([as_result(r) for r in results], alone)
        assert results[0].ledger.transfer_path == path.replace("shm", "shm-staged")
        c.wait_idle()


LOSSES = [
    ("decode", "kill", r'ev=ranks_lost reason="rank 1 \(pid \d+\) is dead" action=exit'),
    ("decode", "launch:300@1",
     r'ev=ranks_lost reason="rank 1: .*CUDA device 1 .* is lost for this process: .*" action=exit'),
    ("prefill", "ecc:300@0",
     r"ev=device_lost .*CUDA device 0 .* is lost for this process: .*memory error")
][1 if SHORT else 0:2 if SHORT else 3]


@pytest.mark.parametrize("role,fault,says", LOSSES,
                         ids=[f"{role}-{fault.split(':')[0]}" for role, fault, _ in LOSSES])
def test_lost_device(devices, role, fault, says):
    """A rank, or the device of a rank, is lost while requests are on its worker: the worker ends
    as a whole, naming it; the requests go on, token for token."""
    want = one_process(FEW, POCKET, "f32", tp=2, device="cuda")[0]
    with Cluster(prefill=0, decode=0, worker_timeout_ms=PATIENCE_MS) as c:
        env = dict(os.environ) if fault == "kill" else dict(os.environ, TD_CUDA_EMU_FAULT=fault)
        args = ["--tp", 2, "--threads", 2, *CUDA]
        victim = c.start_worker(role, wait=False, env=env, args=args)
        for other in ("prefill", "decode"):
            c.start_worker(other, wait=False, args=args)
        c.wait_workers(3)
        ranks = rank_pids(victim)
        requests, is_killed = c.requests(FEW), False
        for _ in range(20):
            box = []
            t = threading.Thread(target=lambda: box.extend(c.generate_many(requests)))
            t.start()
            if fault == "kill":
                c.wait_for(
                    lambda: any(w.name == victim.name and w.running
                                for w in c.status().workers) or not t.is_alive(), f"{role} to run",
                    20 * SLOW)
                if t.is_alive():  # else all was over before it was seen to run: another round
                    os.kill(ranks[1], signal.SIGKILL)
                    is_killed = True
            t.join()
            check([as_result(r) for r in box], want)
            if is_killed or not victim.alive() or re.search(says, victim.log()):
                break
        assert victim.wait_exit(20 * SLOW) == 1
        assert re.search(says, victim.log()), victim.log()[-3000:]
        wait_gone(ranks.values(), 5 * SLOW)
        c.wait_for(lambda: sum(w.state == "ready" for w in c.status().workers) == 2,
                   "the lost worker to be gone", 10 * SLOW)
        c.wait_idle(4)


@pytest.mark.parametrize(
    "args,says",
    [(["--transfer", "rdma"],
      "transfer is rdma, and RDMA is not to be had: the pool lies on the devices of 2 ranks (tp)"),
     (["--test-device-index", 7], "rank 1: device cuda: "),
     (["--kv-memory", "1"], "kv_memory 1 bytes holds 0 KV blocks"),
     (["nopeer"], "does not reach the KV of rank 1 on GPU-")])
def test_refusals_of_devices(devices, monkeypatch, args, says):
    if args == ["nopeer"]:
        monkeypatch.setenv("TD_CUDA_EMU_FAULT", args.pop())
    done = subprocess.run([
        os.path.join(BIN, "tandem-decode"), "--model", POCKET, "--threads", "2", "--tp", "2",
        "--device", "cuda", "--kv-memory", "1MiB", *map(str, args)
    ], capture_output=True, text=True, timeout=20 * SLOW, check=False)
    assert done.returncode in (1, 2) and says in done.stderr, done.stderr[-2000:]
    assert "ev=ready" not in done.stderr
