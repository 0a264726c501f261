"""Tenants: the prefix caches of different owners are apart (no hit, no count, no KV less to send that would tell), and what parts them changes no token."""
import grpc

from harness import SLOW, Cluster, free_port
from test_metrics import scrape

OK, INVALID = grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT
PATIENT = dict(worker_timeout_ms=20000, worker_args=["--peer-timeout-ms", 20000])
PROMPT = "The little fox walked over the hill and saw a dog. " * 16


def computed(c, port, before):
    """Prompt tokens that the prefill worker has computed since it had computed `before`: read when it has told the router that it holds nothing more."""
    c.wait_idle()
    return int(scrape(port)["td_prompt_tokens_total"]) - before


def probe(mode):
    """Owners in turn send one prompt; for each: (cached_tokens, tokens prefilled, KV bytes sent to decode) and the tokens of the answer."""
    port = free_port()
    alone = ["--metrics-listen", f"127.0.0.1:{port}"]
    pd = mode == "pd"
    with Cluster(prefill=0, decode=1 if pd else 0, mode=mode, **PATIENT) as c:
        c.start_worker("prefill" if pd else "decode", args=alone)
        total, answers = 0, []

        def ask(**who):
            nonlocal total
            r = c.generate(prompt=PROMPT, max_tokens=4, temperature=0.7, seed=11, ignore_eos=True, **who)
            assert r.code == OK, r.details
            n = computed(c, port, total)
            total += n
            answers.append(r.tokens)
            return r.usage.cached_tokens, n, r.ledger.transfer_bytes

        first = ask(tenant="a")
        n = first[1]
        assert first[0] == 0 and n >= 10 * 16 and (first[2] > 0) == pd, first
        hit = (n - 1) // 16 * 16
        again = ask(tenant="a")
        assert again[:2] == (hit, n - hit) and again[2] <= first[2], again
        # Whoever is not a computes all of it and has all of it sent, as if nobody had asked before.
        for who in (dict(tenant="b"), dict(tenant="a", cache_salt="x"), dict(tenant="a", cache_salt="y"), dict(cache_salt="a"), dict(), dict(tenant="ax")):
            got = ask(**who)
            assert got == first, (who, got, first)
        # Each has its own, and only its own.
        for who in (dict(tenant="b"), dict(tenant="a", cache_salt="x"), dict(cache_salt="a"), dict()):
            got = ask(**who)
            assert got[:2] == (hit, n - hit), (who, got)
        assert answers == [answers[0]] * len(answers)  # a salt never changes a token (I1)
        c.wait_idle()


def test_no_tenant_sees_what_another_has_warmed():
    probe("pd")


def test_no_tenant_sees_what_another_has_warmed_colocated():
    probe("colocated")


def test_limits_are_named():
    with Cluster(**PATIENT) as c:
        r = c.generate(prompt="Once", max_tokens=2, cache_salt="s" * 129)
        assert r.code == INVALID and "cache_salt has 129 bytes, limit 128" in r.details, r.details
        r = c.generate(prompt="Once", max_tokens=2, tenant="t" * 64, cache_salt="s" * 128)
        assert r.code == OK, r.details
        c.wait_idle()
