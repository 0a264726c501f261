"""Layers of a chunk are handed over while its later ones are computed (--test-transfer-parts): the
tokens and logprobs are those of one process on every path, with digests of every block and
without, with prefix hits, and when a worker or its device goes in the middle of such a step."""
import os
import random
import signal
import threading

import pytest

from harness import BIN, SHORT, SLOW, Cluster, check_results, one_process

EMULATED = os.path.join(BIN, "libtandem_cuda_emu.so")
N = 6 if SHORT else 12
CHUNK = 48
ARGS = ["--max-step-tokens", CHUNK]
SPREAD = ["--policy", "least_token"]


def make_requests():
    rng = random.Random(23)
    shared = [rng.randrange(3, 1024) for _ in range(40)]
    return [{
        "ids": (shared if i % 3 == 0 else []) +
        [rng.randrange(3, 1024)
         for _ in range(rng.choice([1, 15, 16, 17, 33, 100]))], "max_tokens": rng.choice(
             [1, 2, 9,
              17]), "seed": rng.randrange(1 << 40), "logprobs": 0, "temperature": rng.choice(
                  [0.0, 0.8]), "top_k": rng.choice([0, 20]), "top_p": rng.choice([1.0, 0.8])
    } for i in range(N)]


REQUESTS = make_requests()


@pytest.fixture(autouse=True)
def parts(monkeypatch):
    monkeypatch.setenv("TANDEM_TEST_TRANSFER_PARTS", "5")  # a layer each


@pytest.fixture(scope="module")
def oracle():
    return one_process(REQUESTS)[0]


@pytest.fixture(scope="module")
def emulated_oracle():
    if os.environ.get("TANDEM_TEST_SANITIZER") == "thread":
        pytest.skip("the emulated GPU switches stacks, which ThreadSanitizer cannot follow")
    if not os.path.exists(EMULATED):
        pytest.skip("no emulated GPU in this build: it takes a C++ compiler")
    return one_process(REQUESTS, device="cuda", library=EMULATED)[0]


def requests_of(c):
    return c.requests(REQUESTS)


@pytest.mark.parametrize("n_parts", ["5", "2"])
@pytest.mark.parametrize("path", ["shm", "tcp", "rdma"])
def test_same_tokens(oracle, path, n_parts, tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_TEST_TRANSFER_PARTS", n_parts)
    if path == "rdma":
        monkeypatch.setenv("TANDEM_VERBS_FAKE", f"path={tmp_path / 'fabric'}")
    digests = ["--kv-digest", "always" if n_parts == "2" else "off"
               ]  # one that differed would mend what these look for
    with Cluster(dtype="bf16", worker_args=[*ARGS, "--transfer", path, *digests]) as c:
        requests = requests_of(c)
        results = c.generate_many(requests)
        check_results(results, oracle)
        assert any(r.ledger.transfer_path == path for r in results)
        check_results(c.generate_many(requests[::-1]), oracle[::-1])  # with prefix hits
        check_results([c.generate(r) for r in requests], oracle)  # one at a time
        c.wait_idle()


@pytest.mark.parametrize("what,n", [("kill", 1), ("kill", 8), ("stop", 3)])
@pytest.mark.parametrize("path", ["shm"] if SHORT else ["shm", "tcp"])
def test_prefill_gone_between_layers(oracle, path, what, n):
    """Killed, or stopped for longer than its peers believe in it, when some layers of a chunk
    are on their way and others are not computed."""
    env = {
        "prefill-0": {
            "TANDEM_FAULT": f"layers_submitted:{what}:{n}", "TANDEM_TEST_TRANSFER_PARTS": "5"
        }
    }
    with Cluster(prefill=2, decode=2, dtype="bf16", worker_args=[*ARGS, "--transfer", path],
                 router_args=SPREAD, envs=env) as c:
        d = c.workers["prefill-0"]
        for _ in range(8):
            check_results(c.generate_many(requests_of(c)), oracle)
            if "ev=fault_fires" in d.log():
                break
        assert "ev=fault_fires" in d.log()
        if what == "kill":
            assert d.wait_exit(1 * SLOW) == -signal.SIGKILL
            c.wait_idle(4)
            return
        d.stopped = True
        c.wait_idle(4)
        d.signal(
            signal.SIGCONT)  # it computes the other layers and hands over what nobody waits for
        c.wait_for(lambda: sum(w.state == "ready" for w in c.status().workers) == 4,
                   "the stopped worker to come back", 10 * SLOW)
        check_results(c.generate_many(requests_of(c)), oracle)
        c.wait_idle(4)


def test_decode_killed(oracle):
    with Cluster(decode=2, dtype="bf16", worker_args=[*ARGS, "--transfer", "tcp"]) as c:
        box = []
        t = threading.Thread(target=lambda: box.extend(c.generate_many(requests_of(c))))
        t.start()
        c.wait_for(
            lambda: any(w.name == "decode-0" and w.running
                        for w in c.status().workers) or not t.is_alive(), "decode to run",
            20 * SLOW)
        c.workers["decode-0"].signal(signal.SIGKILL)
        t.join()
        check_results(box, oracle)
        c.wait_idle(4)


def test_cancelled(oracle):
    """Clients that leave while their prompts are computed: nothing is held for them afterwards,
    and those beside them have their tokens."""
    long = {"ids": [3 + i % 1000 for i in range(1500)], "max_tokens": 8, "temperature": 0}
    with Cluster(dtype="bf16", worker_args=[*ARGS, "--no-prefix-cache", "--transfer", "shm"]) as c:
        gone = [c.stream(c.request(**long)) for _ in range(4)]
        c.wait_for(lambda: any(w.name == "prefill-0" and w.running for w in c.status().workers),
                   "a prompt to be computed", 20 * SLOW)
        box = []
        t = threading.Thread(target=lambda: box.extend(c.generate_many(requests_of(c))))
        t.start()
        for call in gone:
            call.cancel()
        t.join()
        check_results(box, oracle)
        c.wait_idle(4)


def on_device(library, monkeypatch, **kwargs):
    monkeypatch.setenv("TANDEM_CUDA_LIBRARY", library)
    args = ["--device", "cuda", *ARGS, *kwargs.pop("worker_args", [])]
    return Cluster(dtype="bf16", worker_args=args, **kwargs)


@pytest.mark.parametrize("path", ["tcp", "cuda-ipc"])
def test_device(emulated_oracle, path, monkeypatch):
    """The emulated device does its work as late as CUDA allows: a layer that is sent before its
    mark was waited for is old bytes."""
    with on_device(EMULATED, monkeypatch, worker_args=["--transfer", path]) as c:
        results = c.generate_many(requests_of(c))
        check_results(results, emulated_oracle)
        assert any(r.ledger.transfer_path == path for r in results)
        c.wait_idle()


def test_device_lost_between_layers(emulated_oracle, monkeypatch):
    with on_device(
            EMULATED, monkeypatch, prefill=2, router_args=SPREAD,
            worker_args=["--transfer", "cuda-ipc"], envs={
                "prefill-0": dict(os.environ, TD_CUDA_EMU_FAULT="launch:150",
                                  TANDEM_CUDA_LIBRARY=EMULATED, TANDEM_TEST_TRANSFER_PARTS="5")
            }) as c:
        lost = c.workers["prefill-0"]
        for _ in range(8):
            check_results(c.generate_many(requests_of(c)), emulated_oracle)
            if "ev=device_lost" in lost.log():
                break
        assert lost.wait_exit(20 * SLOW) == 1
        assert lost.log().count("ev=device_lost") == 1, lost.log()[-2000:]
        c.wait_idle(4)
