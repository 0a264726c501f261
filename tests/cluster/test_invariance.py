"""I1: the same 64 requests give one set of tokens and logprobs, byte for byte: alone, batched,
shuffled, in three chunk sizes, with and without prefix hits, with preemption, colocated, pd
and hybrid, over tcp and shm, and with a decode worker killed in the middle. The oracle is one
process without daemons that runs them one at a time. A mixture of experts and latent attention have
fewer requests, and one cluster each unless the long form is asked for."""
import json
import os
import random
import shutil
import signal
import subprocess
import threading

import pytest

from harness import BIN, LONG, POCKET, ROOT, SHORT, SLOW, Cluster, as_result, one_process
from test_families import add_tokenizer

N = 12 if SHORT else 64
SEED = int(os.environ.get("SEED", "7"))


def make_requests(n, vocab, n_shared, lengths):
    """n_shared: tokens of a prefix that many have in common, several full blocks."""
    rng = random.Random(SEED)
    shared = [rng.randrange(3, vocab) for _ in range(n_shared)]
    out = []
    for i in range(n):
        own = [rng.randrange(3, vocab) for _ in range(rng.choice(lengths))]
        ids = (shared if i % 3 == 0 else []) + own
        out.append({
            "ids": ids, "max_tokens": rng.choice([1, 2, 9, 17, 30]), "seed": rng.randrange(1 << 40),
            "logprobs": 0, "temperature": rng.choice([0.0, 0.7, 1.3]), "top_k": rng.choice(
                [0, 5, 40]), "top_p": rng.choice([1.0, 0.9, 0.5]), "min_p": rng.choice([0.0, 0.05]),
            "repetition_penalty": rng.choice([1.0, 1.2]), "presence_penalty": rng.choice(
                [0.0, 0.5]), "frequency_penalty": rng.choice([0.0, 0.25])
        })
    return out


REQUESTS = make_requests(N, 1024, 70, [1, 2, 15, 16, 17, 33, 60, 120])


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


def block_bytes(model, dtype):
    done = subprocess.run([os.path.join(BIN, "tandem"), "model", model, "--dtype", dtype, "--json"],
                          capture_output=True, text=True, timeout=60 * SLOW, check=True)
    return 16 * json.loads(done.stdout)["kv_bytes_a_token"]


def check_preemption(requests, model, dtype):
    """Short prompts with long outputs in a pool that cannot hold them all: sequences are thrown
    out and computed again, to the same tokens."""
    requests = [dict(q, ids=q["ids"][:10], max_tokens=60)
                for q in requests[:12]]  # 5 blocks each in the end, 12 in all
    want, _ = one_process(requests, model, dtype)
    results, preemptions = one_process(requests, model, dtype, concurrency=12, chunk=64, kv=str(
        block_bytes(model, dtype) * 12))
    check(results, want)
    assert preemptions > 0


def test_engine_preempts(oracle):
    check_preemption(REQUESTS, POCKET, oracle[0])


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


def check_cluster(requests, want, **kwargs):
    with Cluster(**kwargs) as c:
        sent = c.requests(requests)
        order = list(range(len(sent)))
        random.Random(1).shuffle(order)
        results = c.generate_many([sent[i] for i in order])
        back = [None] * len(sent)
        for i, r in zip(order, results):
            back[i] = as_result(r)
        check(back, want)
        again = [as_result(r)
                 for r in c.generate_many(sent)]  # now with prefix hits, where there is a cache
        check(again, want)
        c.wait_idle()


@pytest.mark.parametrize("name,kwargs", CLUSTERS[::2] if SHORT else CLUSTERS,
                         ids=[n for n, _ in (CLUSTERS[::2] if SHORT else CLUSTERS)])
def test_cluster(oracle, name, kwargs):
    dtype, want = oracle
    check_cluster(REQUESTS, want, dtype=dtype, **kwargs)


def check_kill(requests, want, **kwargs):
    with Cluster(prefill=1, decode=2, **kwargs) as c:
        sent = c.requests(requests)
        box = []
        t = threading.Thread(target=lambda: box.extend(c.generate_many(sent)))
        t.start()
        c.wait_for(
            lambda: any(w.name == "decode-0" and w.running
                        for w in c.status().workers) or not t.is_alive(), "decode to run",
            20 * SLOW)
        c.workers["decode-0"].signal(signal.SIGKILL)
        t.join()
        check([as_result(r) for r in box], want)
        c.wait_idle(4)


@pytest.mark.parametrize("path", ["tcp"] if SHORT else ["tcp", "shm"])
def test_decode_killed_in_the_middle(oracle, path):
    dtype, want = oracle
    check_kill(REQUESTS, want, dtype=dtype, worker_args=["--transfer", path])


# ---- a mixture of experts, and latent attention with experts in groups ---------------------------

GOLDEN = {"mixture": "mixtures/qwen3_moe_some_layers", "latent": "latent/deepseek_v3_groups"}


class Golden:
    """One of the models of tests/golden, its requests and their results."""
    def __init__(self, folder, name):
        self.model = str(folder / "m")
        shutil.copytree(os.path.join(ROOT, "tests", "golden", GOLDEN[name]), self.model)
        with open(os.path.join(self.model, "config.json"), encoding="utf-8") as f:
            vocab = json.load(f)["vocab_size"]
        add_tokenizer(self.model, vocab)
        self.requests = make_requests(12, vocab, 40, [1, 2, 15, 16, 17, 33, 50])
        self.want = one_process(self.requests, self.model, "f32")[0]
        assert sum(len(set(t)) > 3 for t, _ in self.want) > 4


@pytest.fixture(scope="module", params=GOLDEN)
def golden(request, tmp_path_factory):
    return Golden(tmp_path_factory.mktemp(request.param), request.param)


def test_golden_engine(golden):
    for concurrency, chunk, order, prefix in ((16, 512, 3, 0), (8, 17, 1, 1)):
        check(
            one_process(golden.requests, golden.model, "f32", concurrency=concurrency, chunk=chunk,
                        order=order, prefix=prefix)[0], golden.want)
    check_preemption(golden.requests, golden.model, "f32")


GOLDEN_CLUSTERS = [("colocated-small-pool", {
    "mode": "colocated", "prefill": 0, "worker_args": ["--max-step-tokens", 24]
})] + (CLUSTERS if LONG else [])


@pytest.mark.parametrize("name,kwargs", GOLDEN_CLUSTERS, ids=[n for n, _ in GOLDEN_CLUSTERS])
def test_golden_cluster(golden, name, kwargs):
    """Of pd clusters test_families.py has one of every family, of which a decode worker dies."""
    if "small-pool" in name:
        kwargs = dict(kwargs, kv_memory=str(block_bytes(golden.model, "f32") * 24))
        kwargs["worker_args"] = [*kwargs["worker_args"], "--max-model-len", 128]
    check_cluster(golden.requests, golden.want, model=golden.model, dtype="f32", **kwargs)


@pytest.mark.skipif(not LONG, reason="long form")
def test_golden_decode_killed_in_the_middle(golden):
    check_kill(golden.requests, golden.want, model=golden.model, dtype="f32")
