"""KV as codes with scales (--kv-dtype int8, fp8): the tokens are those of one process with the same
type, byte for byte, whatever the chunks, the batch, a prefix hit, a preemption, the transport or
a worker's death (I1); a token's KV takes the bytes that the layout says, in the pool and in a
transfer; and workers of different types, or of kernels with other bits, never pair."""
import os
import random
import re
import signal
import subprocess
import threading
import urllib.request

import pytest

from harness import (BIN, POCKET, SHORT, SLOW, Cluster, as_result, check_results, free_port,
                     one_process)

N = 10 if SHORT else 16  # with fewer, nobody is preempted
BLOCK, LAYERS, HEADS, DIM = 16, 5, 2, 32  # of models/pocket
CODED = ["int8"] if SHORT else ["int8", "fp8"]


def bytes_per_token(kv_dtype):
    """Of the layout: a head's rows in a block, for codes with their scales, in whole lines of 64
    bytes."""
    row = {"f32": 4 * DIM, "bf16": 2 * DIM}.get(kv_dtype, DIM)
    head = BLOCK * row
    if kv_dtype in ("int8", "fp8"):
        head = (head + 4 * BLOCK + 63) // 64 * 64
    return LAYERS * 2 * HEADS * head // BLOCK


def make_requests():
    rng = random.Random(int(os.environ.get("SEED", "5")))
    shared = [rng.randrange(3, 1024) for _ in range(70)]
    return [{
        "ids": (shared if i % 3 == 0 else []) +
        [rng.randrange(3, 1024) for _ in range(rng.choice([1, 15, 16, 17, 60]))],
        "max_tokens": rng.choice([2, 9, 30]), "seed": i, "logprobs": 0,
        "temperature": 0.0 if i % 2 else 1.0, "top_p": 0.9
    } for i in range(N)]


REQUESTS = make_requests()


@pytest.fixture(scope="module", params=CODED)
def oracle(request):
    return request.param, one_process(REQUESTS, dtype="f32", kv_dtype=request.param)[0]


def check(results, want):
    for i, (got, expected) in enumerate(zip(results, want, strict=True)):
        assert got[0] == expected[0], f"request {i}: tokens differ"
        assert got[1] == expected[1], f"request {i}: logprobs differ"


def test_one_process(oracle):
    """Chunks, company, order, prefix hits and preemptions leave tokens and logprobs as they are;
    the type of the KV does not."""
    kv_dtype, want = oracle
    results, preemptions = one_process(REQUESTS, dtype="f32", kv_dtype=kv_dtype, concurrency=N,
                                       chunk=17, order=1, prefix=1,
                                       kv=str(bytes_per_token(kv_dtype) * BLOCK * 14))
    check(results, want)
    assert preemptions > 0
    assert [r[1] for r in one_process(REQUESTS, dtype="f32")[0]] != [r[1] for r in want]


def test_pd_with_a_death(oracle):
    """A pool in which not all have room, small chunks, digests of every block; then a second time,
    with prefix hits, while a decode worker is killed."""
    kv_dtype, want = oracle
    with Cluster(prefill=1, decode=2, worker_args=[
            "--transfer", "tcp", "--kv-dtype", kv_dtype, "--max-step-tokens", 17, "--kv-digest",
            "always"
    ]) as c:
        requests = c.requests(REQUESTS)
        check([as_result(r) for r in c.generate_many(requests)], want)
        box = []
        t = threading.Thread(target=lambda: box.extend(c.generate_many(requests)))
        t.start()
        c.wait_for(
            lambda: any(w.name == "decode-0" and w.running
                        for w in c.status().workers) or not t.is_alive(), "decode to run",
            20 * SLOW)
        c.workers["decode-0"].signal(signal.SIGKILL)
        t.join()
        check([as_result(r) for r in box], want)
        c.wait_idle(4)


@pytest.mark.parametrize("mode,path", [("colocated", "auto")] if SHORT else
                         [("colocated", "auto"), ("hybrid", "shm")])
def test_modes(oracle, mode, path):
    kv_dtype, want = oracle
    with Cluster(prefill=int(mode == "hybrid"), decode=1, mode=mode, router_args=[
            "--test-hybrid-local-tokens", 40
    ] if mode == "hybrid" else [], kv_memory=str(bytes_per_token(kv_dtype) * BLOCK * 20),
                 worker_args=["--kv-dtype", kv_dtype, "--transfer", path]) as c:
        check([as_result(r) for r in c.generate_many(c.requests(REQUESTS))], want)
        c.wait_idle()


def start_pair(c, p, d, kv_dtype):
    for role, tp in (("prefill", p), ("decode", d)):
        c.start_worker(role, wait=False,
                       args=["--tp", tp, "--threads", tp, "--kv-dtype", kv_dtype])
    c.wait_workers(2)


@pytest.mark.parametrize("p,d", [(2, 1)] if SHORT else [(2, 2), (2, 1), (1, 2)])
def test_ranks(p, d):
    """Each rank stores codes and scales of its heads, and a hand-over between degrees moves both:
    the same bits alone and in a batch, and of equal degrees those of one process."""
    greedy = [dict(q, temperature=0.0) for q in REQUESTS[:6]]
    with Cluster(prefill=0, decode=0, worker_args=["--transfer", "tcp"]) as c:
        start_pair(c, p, d, "int8")
        requests = c.requests(greedy)
        alone = [as_result(c.generate(r)) for r in requests]
        check([as_result(r) for r in c.generate_many(requests)], alone)
        if p == d:
            check(alone, one_process(greedy, dtype="f32", kv_dtype="int8", tp=p)[0])
        else:  # a rounding apart, which may turn a code; a scale out of place would be far off
            near = one_process(greedy, dtype="f32", kv_dtype="int8")[0]
            for i, (got, expected) in enumerate(zip(alone, near, strict=True)):
                assert got[0][:2] == expected[0][:2], f"request {i}"
                worst = max(abs(a - b) for a, b in zip(got[1][:2], expected[1][:2], strict=True))
                assert worst < 0.05, f"request {i}: logprobs differ by {worst} from one rank's"
        c.wait_idle()


def metric(port, name):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return float(re.search(rf"^{name} (\S+)$", answer.read().decode(), re.M).group(1))


def test_bytes():
    """What is sent follows the layout: as many blocks, each of the type's bytes."""
    sent = {}
    for kv_dtype in ("bf16", "int8"):
        ports = [free_port(), free_port()]
        with Cluster(prefill=0, decode=0, dtype="bf16",
                     worker_args=["--transfer", "tcp", "--no-prefix-cache"]) as c:
            for role, port in zip(("prefill", "decode"), ports):
                c.start_worker(
                    role, wait=False,
                    args=["--metrics-listen", f"127.0.0.1:{port}", "--kv-dtype", kv_dtype])
            c.wait_workers(2)
            check_results([c.generate(r) for r in c.requests(REQUESTS[:3])],
                          one_process(REQUESTS[:3], kv_dtype=kv_dtype)[0])
            c.wait_idle()
            c.wait_for(
                lambda: len({w.kv_bytes_sent + w.kv_bytes_received
                             for w in c.status().workers}) == 1, "the last snapshots", 10 * SLOW)
            for w in c.status().workers:
                assert w.kv_dtype == kv_dtype
                assert w.kv_bytes_per_token == bytes_per_token(kv_dtype)
            for port in ports:
                assert metric(port, "td_kv_bytes_per_token") == bytes_per_token(kv_dtype)
            sent[kv_dtype] = sum(w.kv_bytes_sent for w in c.status().workers)
    blocks = {k: n / (bytes_per_token(k) * BLOCK) for k, n in sent.items()}
    assert blocks["bf16"] == blocks["int8"] == sum(-(-len(r["ids"]) // BLOCK) for r in REQUESTS[:3])
    assert sent["int8"] / sent["bf16"] == 0.5625  # 32 codes and a scale, for 32 of two bytes


def test_other_types_never_pair():
    with Cluster(prefill=1, decode=1, worker_args=["--kv-dtype", "int8"]) as c:
        odd = c.start_worker("decode", wait=False, args=["--kv-dtype", "fp8"])
        odd.wait_log(r"ev=registration_rejected .*kv_dtype fp8 differs from \S+'s int8: the KV of "
                     r"the workers of one model must be of one type")
        check_results([c.generate(r) for r in c.requests(REQUESTS[:2])],
                      one_process(REQUESTS[:2], dtype="f32", kv_dtype="int8")[0])


def runs_here(ops):
    """Whether this CPU has the kernel table of that name."""
    done = subprocess.run([os.path.join(BIN, "tandem"), "model", POCKET, "--ops", ops],
                          capture_output=True, timeout=60 * SLOW, check=False)
    return done.returncode == 0


@pytest.mark.parametrize("ours,other,is_one", [("ref", "avx2", False), ("avx2", "avx512", False),
                                               ("ref", "neon", False), ("avx2", "avxvnni", True),
                                               ("avx512", "avx512bf16", True),
                                               ("avx512", "amx", False)])
def test_tables_of_other_bits_never_pair(ours, other, is_one):
    """Two workers whose kernels add in another order would finish one another's requests with other
    tokens: the second is refused, says what must agree, and the pair serves on. Tables of the same
    bits make one fleet, and a request that begins by one and ends by the other has the tokens of
    either alone."""
    for ops in (ours, other):
        if not runs_here(ops):
            pytest.skip(f"this CPU has no table {ops}")
    with Cluster(prefill=1, decode=1, dtype="bf16", worker_args=["--ops", ours]) as c:
        requests = c.requests(REQUESTS[:3])
        want = [as_result(c.generate(r)) for r in requests]
        odd = c.start_worker("decode", wait=is_one, args=["--ops", other])
        if is_one:
            old = c.workers["decode-0"]
            old.signal(signal.SIGTERM)
            old.wait_exit(20 * SLOW)
        else:
            odd.wait_log(r"ev=registration_rejected .*KV layout \S+ differs from \S+'s \S+: model, "
                         r"dtype, KV type, block size and instruction set must agree")
            assert {w.name for w in c.status().workers} == {"prefill-0", "decode-0"}
        check_results(c.generate_many(requests), want)
