"""I1: the same 64 requests give one set of tokens and logprobs, byte for byte: alone, batched,
shuffled, in three chunk sizes, with and without prefix hits, with preemption, colocated, pd
and hybrid, over tcp and shm, and with a decode worker killed in the middle. The oracle is one
process without daemons that runs them one at a time."""
import json
import os
import random
import signal
import threading

import pytest

from harness import POCKET, SHORT, SLOW, Cluster, as_result, one_process

N = 12 if SHORT else 64
SEED = int(os.environ.get("SEED", "7"))


def make_requests():
    rng = random.Random(SEED)
    vocab = 1024
    shared = [rng.randrange(3, vocab)
              for _ in range(70)]  # a prefix that many have in common: several full blocks
    out = []
    for i in range(N):
        ids = (shared if i % 3 == 0 else []) + [
            rng.randrange(3, vocab) for _ in range(rng.choice([1, 2, 15, 16, 17, 33, 60, 120]))
        ]
        out.append({
            "ids": ids, "max_tokens": rng.choice([1, 2, 9, 17, 30]), "seed": rng.randrange(1 << 40),
            "logprobs": 0, "temperature": rng.choice([0.0, 0.7, 1.3]), "top_k": rng.choice(
                [0, 5, 40]), "top_p": rng.choice([1.0, 0.9, 0.5]), "min_p": rng.choice([0.0, 0.05]),
            "repetition_penalty": rng.choice([1.0, 1.2]), "presence_penalty": rng.choice(
                [0.0, 0.5]), "frequency_penalty": rng.choice([0.0, 0.25])
        })
    return out


REQUESTS = make_requests()


@pytest.fixture(scope="module", params=["f32"] if SHORT else ["f32", "bf16"])
def oracle(request):
    results, _ = one_process(REQUESTS, dtype=request.param)
    assert any(len(set(t)) > 3 for t, _ in results)
    return request.param, results


def check(results, want):
    assert len(results) == len(want)
    for i, (got, expected) in enumerate(zip(results, want)):
        assert got[0] == expected[0], f"request {i}: tokens differ"
        assert got[1] == expected[1], f"request {i}: logprobs differ"


@pytest.mark.parametrize("concurrency,chunk,order,prefix", [(16, 512, 0, 0), (16, 512, 3, 0),
                                                            (8, 48, 5, 0), (8, 17, 1, 1),
                                                            (16, 64, 2, 1)])
def test_engine(oracle, concurrency, chunk, order, prefix):
    dtype, want = oracle
    check(
        one_process(REQUESTS, dtype=dtype, concurrency=concurrency, chunk=chunk, order=order,
                    prefix=prefix)[0], want)


def test_engine_preempts(oracle):
    """Short prompts with long outputs in a pool that cannot hold them all: sequences are thrown
    out and computed again, to the same tokens."""
    dtype, _ = oracle
    with open(os.path.join(POCKET, "config.json"), encoding="utf-8") as f:
        m = json.load(f)
    block_bytes = 16 * 2 * m["num_hidden_layers"] * m["num_key_value_heads"] * m["head_dim"] * (
        4 if dtype == "f32" else 2)
    requests = [dict(q, ids=q["ids"][:10], max_tokens=60)
                for q in REQUESTS[:12]]  # 5 blocks each in the end, 12 in all
    want, _ = one_process(requests, dtype=dtype)
    results, preemptions = one_process(requests, dtype=dtype, concurrency=12, chunk=64, kv=str(
        block_bytes * 12))
    check(results, want)
    assert preemptions > 0


CLUSTERS = [
    ("pd-shm-chunk64", {
        "mode": "pd", "worker_args": ["--transfer", "shm", "--max-step-tokens", 64]
    }),
    ("pd-tcp-chunk17", {
        "mode": "pd",
        "worker_args": ["--transfer", "tcp", "--max-step-tokens", 17, "--max-batch", 16]
    }),
    ("pd-2x2-noprefix", {
        "mode": "pd", "prefill": 2, "decode": 2, "worker_args": ["--no-prefix-cache"]
    }),
    ("colocated", {
        "mode": "colocated", "prefill": 0, "decode": 1, "worker_args": ["--max-step-tokens", 96]
    }), ("hybrid", {"mode": "hybrid", "router_args": ["--test-hybrid-local-tokens", 40]}),
    ("pd-small-pool", {"mode": "pd", "kv_memory": "1MiB", "worker_args": ["--transfer", "tcp"]}),
]


@pytest.mark.parametrize("name,kwargs", CLUSTERS[::2] if SHORT else CLUSTERS,
                         ids=[n for n, _ in (CLUSTERS[::2] if SHORT else CLUSTERS)])
def test_cluster(oracle, name, kwargs):
    dtype, want = oracle
    with Cluster(dtype=dtype, **kwargs) as c:
        requests = c.requests(REQUESTS)
        order = list(range(N))
        random.Random(1).shuffle(order)
        results = c.generate_many([requests[i] for i in order])
        back = [None] * N
        for i, r in zip(order, results):
            back[i] = as_result(r)
        check(back, want)
        again = [as_result(r)
                 for r in c.generate_many(requests)]  # now with prefix hits, where there is a cache
        check(again, want)
        c.wait_idle()


@pytest.mark.parametrize("path", ["tcp"] if SHORT else ["tcp", "shm"])
def test_decode_killed_in_the_middle(oracle, path):
    dtype, want = oracle
    with Cluster(prefill=1, decode=2, dtype=dtype, worker_args=["--transfer", path]) as c:
        requests = c.requests(REQUESTS)
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
