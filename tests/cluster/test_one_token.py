"""Requests that end with their first token: by max_tokens 1 (then no decode worker has a part in
it), or by a stop token (then the decode worker that was reserved is told that nothing comes,
and its word may reach the router before the token does). Either way nothing is computed
twice."""
import os
import re
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from harness import (BIN, PATIENT, POCKET, SHORT, SLOW, Cluster, as_result, one_process, pb,
                     ttft_stages_us)

OK = grpc.StatusCode.OK
N = 100 if SHORT else 400
SPREAD = ["--policy", "least_token"]


def ids_of(i):
    return [3 + (31 * i + 7 * k) % 1000 for k in range(16 + i % 40)]


def run(c, requests):
    """16 at once, as a load generator does."""
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(c.generate, requests))


def check_ledger(led):
    assert ttft_stages_us(led) == led.ttft_us > 0, led


@pytest.fixture(scope="module")
def oracle():
    """Mixed sampling, as the oracle takes it and with what it gave."""
    many = [{
        "ids": ids_of(i), "max_tokens": 1, "temperature": 0.9 if i % 3 else 0.0, "top_k": 40,
        "top_p": 0.95, "min_p": 0.0, "repetition_penalty": 1.0, "seed": i, "logprobs": i % 3
    } for i in range(N)]
    want, _ = one_process(many, dtype="f32", concurrency=8)
    return many, want


def test_max_tokens_1_has_no_decode_leg(tmp_path, oracle):
    many, want = oracle
    log = str(tmp_path / "decisions.log")
    with Cluster(prefill=2, decode=2, router_args=[*SPREAD, "--decision-log", log], **PATIENT) as c:
        requests = c.requests(many)
        for i, r in enumerate(requests):
            r.priority = i % 7 - 3
            if i % 5 == 0:
                r.stop.stop.append("never said")
        results = run(c, requests)
        for i, (r, expected) in enumerate(zip(results, want)):
            assert as_result(r) == expected, i
            assert (r.finish, r.usage.prompt_tokens,
                    r.usage.output_tokens) == (pb.FINISH_LENGTH, len(many[i]["ids"]), 1), i
            check_ledger(r.ledger)
            assert (r.ledger.reserve_us, r.ledger.transfer_bytes, r.ledger.decode_worker,
                    r.ledger.mode) == (0, 0, "", "pd"), r.ledger
            assert r.ledger.prefill_worker in ("prefill-0",
                                               "prefill-1") and r.ledger.prefill_us > 0, r.ledger
        s = c.status()
        assert (s.finished, s.failed, s.failovers) == (N, 0, 0)
        c.wait_idle()
        told = subprocess.run([
            os.path.join(BIN, "tandem"), "generate", "--server", f"127.0.0.1:{c.port}", "--stats",
            "--max-tokens", "1", "Once"
        ], capture_output=True, text=True, timeout=60 * SLOW, check=True)
        assert re.search(r"prefill on prefill-[01], decode on none \(pd\)",
                         told.stdout + told.stderr), told
    with open(log, encoding="ascii") as f:
        text = f.read()
    assert len(re.findall(r"^a kind=1 ", text, re.M)) == 0  # no Decode call
    assert len(re.findall(r"^a kind=2 .* local=1 ", text, re.M)) == N + 1
    replay = subprocess.run([os.path.join(BIN, "tandem"), "sim", "replay", log],
                            capture_output=True, timeout=60 * SLOW, check=False)
    assert replay.returncode == 0, replay.stderr.decode()[-3000:]


def test_first_token_is_a_stop_token(oracle):
    """max_tokens is 64, so a decode worker is reserved; the first token is among the stop
    tokens."""
    many, want = oracle
    with Cluster(prefill=2, decode=2, router_args=SPREAD, **PATIENT) as c:
        requests = c.requests([{**q, "max_tokens": 64} for q in many])
        for r, (tokens, _) in zip(requests, want):
            r.stop.stop_token_ids.append(tokens[0])
        for i, (r, (tokens, _)) in enumerate(zip(run(c, requests), want)):
            assert (r.code, r.details, r.tokens, r.text) == (OK, "", tokens, ""), i
            assert (r.finish, r.usage.output_tokens, r.stop_reason) == (pb.FINISH_STOP, 1,
                                                                        f"token {tokens[0]}"), i
            check_ledger(r.ledger)
            assert r.ledger.failovers == 0, r.ledger
        s = c.status()
        assert (s.finished, s.failed, s.failovers) == (N, 0, 0)
        c.wait_idle()


@pytest.mark.parametrize("mode", ["colocated", "hybrid"])
def test_other_modes(mode, oracle):
    many, want = (x[:40] for x in oracle)
    with Cluster(prefill=1 if mode == "hybrid" else 0, decode=1, mode=mode,
                 router_args=["--test-hybrid-local-tokens", 30, *SPREAD], **PATIENT) as c:
        results = run(c, c.requests(many))
        assert [as_result(r) for r in results] == want
        modes = {r.ledger.mode for r in results}
        assert modes == ({"colocated"} if mode == "colocated" else {"colocated", "pd"})
        assert c.status().failovers == 0
        c.wait_idle()


def test_no_decode_worker_at_all_and_a_lost_prefill_worker(oracle):
    """Nobody decodes here: one token is answered all the same, also by another prefill worker
    than the first, which dies on the way."""
    many, want = (x[:40] for x in oracle)
    with Cluster(prefill=2, decode=0, router_args=SPREAD,
                 envs={"prefill-0": {"TANDEM_FAULT": "prefill_started:kill:5"}}, **PATIENT) as c:
        assert [as_result(r) for r in run(c, c.requests(many))] == want
        assert c.workers["prefill-0"].wait_exit(20 * SLOW) == -signal.SIGKILL
        assert 1 <= c.status().failovers <= 16
        c.wait_idle()
