"""One prefill worker, one decode worker: a prompt becomes streamed tokens, and every promise
about the stream holds."""
import os
import re
import subprocess

import grpc
import pytest

from harness import BIN, Cluster, free_port, pb, ttft_stages_us

OK = grpc.StatusCode.OK


@pytest.fixture(scope="module")
def cluster():
    with Cluster() as c:
        yield c


def test_first_tokens(cluster):
    r = cluster.generate(prompt="Once upon a time", max_tokens=24, temperature=0)
    assert (r.code, r.details) == (OK, "")
    assert r.finish == pb.FINISH_LENGTH and len(r.tokens) == 24 and r.usage.output_tokens == 24
    again = cluster.generate(prompt="Once upon a time", max_tokens=24, temperature=0)
    assert again.tokens == r.tokens and again.text == r.text
    cluster.wait_idle()


def test_ledger_adds_up(cluster):
    r = cluster.generate(prompt="The old boat", max_tokens=8, temperature=0)
    led = r.ledger
    assert ttft_stages_us(led) == led.ttft_us > 0
    assert led.prefill_us > 0 and led.ttft_us <= led.e2e_us
    assert led.transfer_bytes > 0 and led.transfer_path in ("shm", "tcp")
    assert led.prefill_worker == "prefill-0" and led.decode_worker == "decode-0"
    assert led.mode == "pd"
    trailing = dict(item.split("=") for item in r.trailing["tandem-ledger"].split(";"))
    assert int(trailing["ttft_us"]) == led.ttft_us and int(trailing["rpc_us"]) == led.rpc_us


@pytest.mark.parametrize("path", ["shm", "tcp", "rdma"])
def test_ledger_of_each_path(path):
    """The transfer of a prompt in chunks begins with its first one, whoever moves the bytes;
    what the first token waited for nothing is in the hand-over."""
    fabric = f"/dev/shm/tandem-ledger-{os.getpid()}"
    env = {"TANDEM_VERBS_FAKE": f"path={fabric}"} if path == "rdma" else {}
    try:
        with Cluster(envs={"prefill-0": env, "decode-0": env},
                     worker_args=["--transfer", path, "--max-step-tokens", 32]) as c:
            ledgers = []
            for i in range(6):
                ids = [3 + (7 * i + k) % 1000 for k in range(400)]  # no prefix hits
                r = c.generate(ids=ids, max_tokens=4, temperature=0, ignore_eos=True)
                assert (r.code, r.details) == (OK, "")
                ledgers.append(r.ledger)
            for led in ledgers:
                assert ttft_stages_us(led) == led.ttft_us > 0, led
                assert led.transfer_path == path and led.transfer_bytes > 0, led
                assert led.first_step_us > 0, led
                assert 0 < led.transfer_us < led.e2e_us, led
                assert 0 < led.transfer_exposed_us < led.e2e_us, led
                exposed = led.transfer_exposed_us + led.decode_queue_us + led.first_step_us
                assert exposed < led.e2e_us, led
            # 12 of 13 chunks are computed while it runs; one request of six may have had its first
            # chunk held up by others on the machine
            assert any(led.transfer_us > led.prefill_us / 2 for led in ledgers), ledgers
            # ... and after the first token only the rest of it is left
            assert any(led.transfer_exposed_us < led.transfer_us / 2 for led in ledgers), ledgers
            c.wait_idle()
    finally:
        if os.path.exists(fabric):
            os.unlink(fabric)


def test_ledger_when_a_stop_string_ends_it(cluster):
    """The router ends such a request, so decode's times must be there before its last token."""
    free = cluster.generate(prompt="Once upon a time", max_tokens=40, temperature=0)
    r = cluster.generate(prompt="Once upon a time", max_tokens=40, temperature=0,
                         stop=[free.text[30:36]])
    assert r.code == OK and r.finish == pb.FINISH_STOP and 2 < len(r.tokens) < 40
    assert r.ledger.transfer_path in (
        "shm", "tcp", "rdma") and r.ledger.transfer_us > 0 and r.ledger.first_step_us > 0, r.ledger


def test_long_prompt_in_chunks(cluster):
    words = " ".join(f"word{i}" for i in range(400))
    a = cluster.generate(prompt=words, max_tokens=8, temperature=0)
    b = cluster.generate(prompt=words, max_tokens=8, temperature=0)  # prefix hit on both sides
    assert a.code == b.code == OK and a.tokens == b.tokens
    assert a.usage.cached_tokens == 0 and b.usage.cached_tokens > 0
    assert b.ledger.transfer_bytes < a.ledger.transfer_bytes  # only the missing blocks were sent
    cluster.wait_idle()


def test_one_token(cluster):
    r = cluster.generate(prompt="One", max_tokens=1, temperature=0)
    assert r.code == OK and len(r.tokens) == 1 and r.finish == pb.FINISH_LENGTH
    cluster.wait_idle()


def test_stop_string_and_token(cluster):
    free = cluster.generate(prompt="Once upon a time", max_tokens=40, temperature=0)
    stop = free.text[10:14]
    r = cluster.generate(prompt="Once upon a time", max_tokens=40, temperature=0, stop=[stop])
    assert r.code == OK and r.finish == pb.FINISH_STOP and r.stop_reason == stop
    assert r.text == free.text[:free.text.index(stop)]
    token = free.tokens[5]
    first = free.tokens.index(token)
    r = cluster.generate(prompt="Once upon a time", max_tokens=40, temperature=0,
                         stop_token_ids=[token])
    assert r.code == OK and r.finish == pb.FINISH_STOP and r.tokens == free.tokens[:first + 1]
    assert r.stop_reason == f"token {token}"
    cluster.wait_idle()


def test_seed_reproduces_and_differs(cluster):
    a = cluster.generate(prompt="A dog", max_tokens=24, temperature=1.0)
    b = cluster.generate(prompt="A dog", max_tokens=24, temperature=1.0, seed=a.seed)
    c = cluster.generate(prompt="A dog", max_tokens=24, temperature=1.0, seed=a.seed + 1)
    assert a.tokens == b.tokens and a.tokens != c.tokens


def test_logprobs(cluster):
    r = cluster.generate(prompt="A dog", max_tokens=6, temperature=0, logprobs=3)
    assert len(r.logprobs) == 6
    for token, (lp, top) in zip(r.tokens, r.logprobs):
        assert len(top) == 3 and top[0] == (token,
                                            lp) and top[0][1] >= top[1][1] >= top[2][1] and lp <= 0


def test_tokenize_and_models(cluster):
    t = cluster.unary("/tandem.v1.Inference/Tokenize", pb.TokenizeRequest(prompt="A dog"),
                      pb.TokenizeResponse)
    assert len(t.ids) > 0
    by_ids = cluster.generate(ids=list(t.ids), max_tokens=8, temperature=0)
    by_text = cluster.generate(prompt="A dog", max_tokens=8, temperature=0)
    assert by_ids.tokens == by_text.tokens
    m = cluster.unary("/tandem.v1.Inference/Models", pb.ModelsRequest(), pb.ModelsResponse)
    assert [x.id for x in m.models] == ["pocket"] and m.models[0].chat_template == "chatml"


def test_chat(cluster):
    r = cluster.generate(chat=[("user", "Tell me about a fox.")], max_tokens=16, temperature=0)
    assert r.code == OK and len(r.tokens) > 0


def test_client_cancel_frees_both_legs(cluster):
    stream = cluster.stream(
        cluster.request(prompt="Once upon a time", max_tokens=1500, temperature=0, ignore_eos=True))
    next(stream)
    stream.cancel()
    cluster.wait_idle(2)


def test_deadline_frees_both_legs(cluster):
    r = cluster.generate(prompt="Once upon a time", max_tokens=1500, temperature=0, ignore_eos=True,
                         timeout=0.15)
    assert r.code == grpc.StatusCode.DEADLINE_EXCEEDED
    cluster.wait_idle(2)


def test_many_at_once(cluster):
    requests = [
        cluster.request(prompt=f"Number {i % 7} is", max_tokens=4 + i % 13, temperature=0)
        for i in range(48)
    ]
    alone = {i: cluster.generate(requests[i]) for i in range(13)}
    together = cluster.generate_many(requests)
    assert [r.code for r in together] == [OK] * 48, [r.details for r in together]
    for i in alone:
        assert together[i].tokens == alone[i].tokens
    cluster.wait_idle()


def test_one_environment_for_all_daemons(monkeypatch):
    """A host's daemons share an environment that names the router's address: workers neither
    take its port nor fail at it, and say what they read."""
    port = free_port()
    monkeypatch.setenv("TANDEM_LISTEN", f"127.0.0.1:{port}")
    monkeypatch.setenv("TANDEM_DECODE_LISTEN", f"127.0.0.1:{(own := free_port())}")
    monkeypatch.setenv("TANDEM_MAX_BATCH", "7")
    monkeypatch.setenv("TANDEM_DECODE_MAX_BATCH", "9")
    with Cluster() as c:  # the router has --listen, which wins
        assert c.generate(prompt="Once upon a time", max_tokens=4,
                          temperature=0).code == grpc.StatusCode.OK
        log = {name: d.log() for name, d in c.workers.items()}
        assert re.search(r"ev=listen_is_the_routers .*TANDEM_PREFILL_LISTEN", log["prefill-0"])
        assert f"address=127.0.0.1:{port}" not in log["prefill-0"]
        assert f"address=127.0.0.1:{own} " in log[
            "decode-0"] and "listen_is_the_routers" not in log["decode-0"]
    for program, batch in (("tandem-prefill", "7"), ("tandem-decode", "9")):
        out = subprocess.run([os.path.join(BIN, program), "--print-config"], capture_output=True,
                             text=True, check=True).stdout
        assert f"\nmax_batch={batch}\n" in out
    out = subprocess.run([os.path.join(BIN, "tandem-router"), "--print-config", "--model", "x"],
                         capture_output=True, text=True, check=True).stdout
    assert f"\nlisten=127.0.0.1:{port}\n" in out
