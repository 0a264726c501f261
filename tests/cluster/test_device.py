"""Workers with --device cuda, on device libraries that need no GPU: the strict table over
kernels of the CPU (tests/fake/deferred_device.c) and, for whatever moves KV, the emulated GPU;
$TANDEM_TEST_CUDA_LIBRARY puts another in its place (tests/gpu/run: the real one). A cluster's
tokens are those of one process on the same device; a worker whose device is lost leaves, its
requests move, and it exits with status 1."""
import os
import random
import re
import signal
import subprocess
import threading

import pytest

from harness import BIN, POCKET, SHORT, SLOW, Cluster, check_results, one_process

DEFERRED = os.path.join(os.path.dirname(BIN), "lib", "libtandem_deferred_device.so")
EMULATED = os.environ.get("TANDEM_TEST_CUDA_LIBRARY") or os.path.join(BIN, "libtandem_cuda_emu.so")
N = 4 if SHORT else 10


def make_requests():
    rng = random.Random(11)
    shared = [rng.randrange(3, 1024) for _ in range(40)]
    return [{
        "ids": (shared if i % 3 == 0 else []) +
        [rng.randrange(3, 1024)
         for _ in range(rng.choice([1, 15, 16, 17, 33]))], "max_tokens": rng.choice(
             [2, 9, 17]), "seed": rng.randrange(1 << 40), "logprobs": 0, "temperature": rng.choice(
                 [0.0, 0.8]), "top_k": rng.choice([0, 20]), "top_p": rng.choice(
                     [1.0, 0.8]), "min_p": 0.0, "repetition_penalty": rng.choice([1.0, 1.2])
    } for i in range(N)]


REQUESTS = make_requests()


@pytest.fixture(scope="module")
def oracle():
    return one_process(REQUESTS, device="cuda", library=DEFERRED)[0]


@pytest.fixture(scope="module")
def emulated_oracle():
    if os.environ.get("TANDEM_TEST_SANITIZER") == "thread":
        pytest.skip("the emulated GPU switches stacks, which ThreadSanitizer cannot follow")
    if not os.path.exists(EMULATED):
        pytest.skip("no emulated GPU in this build: it takes a C++ compiler")
    return one_process(REQUESTS, device="cuda", library=EMULATED)[0]


def cluster_requests(c):
    return c.requests(REQUESTS)


def on_device(n_decode=1, envs=None, library=DEFERRED, **kwargs):
    """A cluster whose workers are on the device; envs are added to those of single workers."""
    os.environ["TANDEM_CUDA_LIBRARY"] = library
    full = {name: dict(os.environ, **env) for name, env in (envs or {}).items()}
    args = ["--device", "cuda", "--max-step-tokens", 48, *kwargs.pop("worker_args", [])]
    return Cluster(decode=n_decode, dtype="bf16", worker_args=args, envs=full, **kwargs)


def test_colocated(oracle):
    with on_device(mode="colocated", prefill=0) as c:
        log = c.workers["decode-0"].wait_log(r"ev=device .*")
        assert "kind=cuda index=0" in log.group(0) and "emulated=true" in log.group(
            0) and "deterministic=true" in log.group(0)
        requests = cluster_requests(c)
        check_results(c.generate_many(requests), oracle)
        check_results(c.generate_many(requests[::-1]), oracle[::-1])  # with prefix hits
        c.wait_idle()


def test_device_lost(oracle):
    """The first worker's device fails in its 6th step, with requests on it."""
    with on_device(2, {"decode-0": {"TD_DEFERRED_FAIL_AT": "6"}}, mode="colocated", prefill=0) as c:
        lost = c.workers["decode-0"]
        for _ in range(20):  # the router may give the first ones all to the other worker
            check_results(c.generate_many(cluster_requests(c)), oracle)
            if not lost.alive() or "ev=device_lost" in lost.log():
                break
        assert lost.wait_exit(20 * SLOW) == 1
        assert lost.log().count(
            "ev=device_lost") == 1 and "is lost for this process" in lost.log(), lost.log()[-2000:]
        c.wait_for(
            lambda: [w.name for w in c.status().workers if w.state == "ready"] == ["decode-1"],
            "decode-0 to be gone", 10 * SLOW)
        check_results(c.generate_many(cluster_requests(c)[:2]), oracle[:2])
        c.wait_idle()


def test_killed_in_the_middle(oracle):
    with on_device(2, mode="colocated", prefill=0) as c:
        box = []
        t = threading.Thread(target=lambda: box.extend(c.generate_many(cluster_requests(c))))
        t.start()
        c.wait_for(
            lambda: any(w.name == "decode-0" and w.running
                        for w in c.status().workers) or not t.is_alive(), "decode to run",
            20 * SLOW)
        c.workers["decode-0"].signal(signal.SIGKILL)
        t.join()
        check_results(box, oracle)
        c.wait_idle(4)


@pytest.mark.parametrize("transfer", ["tcp", "shm", "cuda-ipc", "rdma"])
def test_pd(emulated_oracle, transfer, tmp_path):
    """KV goes from GPU memory to GPU memory, and the decode worker goes on with the bits that
    the prefill worker computed. tcp, shm: through page-locked memory; rdma: the provider in
    memory writes into the device's, as one with GPUDirect would."""
    if transfer == "rdma" and "TANDEM_TEST_CUDA_LIBRARY" in os.environ:
        pytest.skip("the provider in memory reaches no real GPU's memory")
    env = {"TANDEM_VERBS_FAKE": f"path={tmp_path / 'fabric'}"} if transfer == "rdma" else {}
    with on_device(envs={"prefill-0": env, "decode-0": env}, library=EMULATED,
                   worker_args=["--transfer", transfer, "--kv-digest", "always"]) as c:
        log = c.workers["decode-0"].wait_log(r"ev=device .*").group(0)
        assert "deterministic=true" in log and re.search(r" driver=\d+\.\d+ runtime=\d+\.\d+ ",
                                                         log), log
        requests = cluster_requests(c)
        results = c.generate_many(requests)
        check_results(results, emulated_oracle)
        assert any(r.trailing["tandem-ledger"].find(f"transfer_path={transfer}") >= 0
                   for r in results), results[0].trailing
        check_results(c.generate_many(requests[::-1]), emulated_oracle[::-1])
        c.wait_idle()


def test_pd_unequal_multiprocessors(emulated_oracle):
    """Two cards of one architecture, or a card and a slice of one: their number of
    multiprocessors decides no bit, and so is no part of what must be equal."""
    with on_device(
            envs={"prefill-0": {"TD_CUDA_EMU_SMS": "3"}, "decode-0": {"TD_CUDA_EMU_SMS": "114"}},
            library=EMULATED, worker_args=["--transfer", "cuda-ipc", "--kv-digest", "always"]) as c:
        assert " n_sms=3 " in c.workers["prefill-0"].wait_log(r"ev=device .*").group(0)
        assert " n_sms=114 " in c.workers["decode-0"].wait_log(r"ev=device .*").group(0)
        check_results(c.generate_many(cluster_requests(c)), emulated_oracle)
        c.wait_idle()


def test_pd_killed_in_the_middle(emulated_oracle):
    """A prefill worker is killed while decode's device copies from its memory; later the decode
    worker of the rest, while others copy to it."""
    with on_device(2, library=EMULATED, prefill=2, worker_args=["--transfer", "cuda-ipc"]) as c:
        for victim in ("prefill-0", "decode-1"):
            box = []
            t = threading.Thread(target=lambda: box.extend(c.generate_many(cluster_requests(c))))
            t.start()
            c.wait_for(
                lambda: any(w.name == victim and w.running
                            for w in c.status().workers) or not t.is_alive(), f"{victim} to run",
                20 * SLOW)
            c.workers[victim].signal(signal.SIGKILL)
            t.join()
            check_results(box, emulated_oracle)
        check_results(c.generate_many(cluster_requests(c)), emulated_oracle)
        c.wait_idle(2)


@pytest.mark.parametrize("fault,says", [("launch:400", "launch"), ("ecc:700", "memory error")],
                         ids=["launch", "ecc"])
def test_pd_device_lost(emulated_oracle, fault, says):
    """One of two decode workers, or of two prefill workers, loses its GPU while requests are on
    it."""
    role = "decode" if fault.startswith("launch") else "prefill"
    with on_device(2, {f"{role}-0": {"TD_CUDA_EMU_FAULT": fault}}, library=EMULATED,
                   prefill=2) as c:
        lost = c.workers[f"{role}-0"]
        for _ in range(20):
            check_results(c.generate_many(cluster_requests(c)), emulated_oracle)
            if not lost.alive() or "ev=device_lost" in lost.log():
                break
        assert lost.wait_exit(20 * SLOW) == 1
        assert lost.log().count("ev=device_lost") == 1 and says in lost.log(), lost.log()[-2000:]
        c.wait_for(lambda: sum(w.state == "ready" for w in c.status().workers) == 3,
                   "the lost worker to be gone", 10 * SLOW)
        c.wait_idle()


@pytest.mark.parametrize("program", ["tandem-prefill", "tandem-decode", "logits", "engine-bench"])
def test_cuda_is_not_available(program, tmp_path):
    absent = str(tmp_path / "libtandem_cuda.so")
    args = {
        "logits": ["tandem", "logits", "--tokens", "1", "--out",
                   str(tmp_path / "x")], "engine-bench": ["tandem", "engine-bench"]
    }.get(program, [program])
    done = subprocess.run(
        [os.path.join(BIN, args[0]), *args[1:], "--model", POCKET, "--device", "cuda"],
        capture_output=True, text=True, timeout=60 * SLOW, check=False, env=dict(
            os.environ, TANDEM_CUDA_LIBRARY=absent))
    assert done.returncode == 1
    assert "CUDA is not available" in done.stderr and absent in done.stderr, done.stderr
