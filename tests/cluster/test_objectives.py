"""Objectives, classes, tenants, priorities and prefixes from a client's side: what is refused
and how, what the ledger says of it, who goes first, and where a prompt goes whose beginning a
worker still holds."""
import os
import re
import subprocess
import threading

import grpc
import pytest

from harness import BIN, PATIENT, POCKET, SLOW, Cluster, free_port, pb
from test_metrics import scrape

Code = grpc.StatusCode
OK, INVALID, EXHAUSTED = Code.OK, Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED
CLASSES = "chat:ttft=60000,tpot=5000 gold:ttft=30000,tpot=2000,weight=4 bulk:weight=0.5,best_effort"

# A busy machine must not look like a dead worker here: a failover is a second prefill, and another
# place in the queue.


def objectives(ttft_ms=None, tpot_ms=None):
    o = pb.Objectives()
    if ttft_ms is not None:
        o.ttft_ms = ttft_ms
    if tpot_ms is not None:
        o.tpot_ms = tpot_ms
    return o


def test_bad_values_name_their_field():
    nan, inf = float("nan"), float("inf")
    with Cluster(router_args=["--slo-class", CLASSES], **PATIENT) as c:
        cases = [(dict(objectives=objectives(ttft_ms=v)), "objectives.ttft_ms is")
                 for v in (0, -1, nan, inf, 1.5e9)]
        cases += [(dict(objectives=objectives(tpot_ms=v)), "objectives.tpot_ms is")
                  for v in (0, -0.5, nan, -inf, 1e300)]
        cases += [(dict(slo_class="silver"),
                   'slo_class is "silver"; this router has: chat gold bulk'),
                  (dict(tenant="t" * 65), "tenant has 65 bytes, limit 64"),
                  (dict(priority=101), "priority is 101, must be -100..100"),
                  (dict(priority=-101), "priority is -101, must be -100..100")]
        for fields, message in cases:
            r = c.generate(prompt="Once", max_tokens=2, **fields)
            assert r.code == INVALID and message in r.details, (fields, r.code, r.details)
            assert "retry-delay-ms" not in r.trailing, (fields, r.code, r.details)
        r = c.generate(prompt="Once", max_tokens=2, slo_class="bulk", tenant="t" * 64,
                       priority=-100, objectives=objectives(1e9, 1e9))
        assert r.code == OK, r.details
        c.wait_idle()


def test_each_class_is_judged():
    """Status and metrics have what met its objectives of each class; a best-effort class serves
    late ones. One that misses both is one that missed."""
    port = free_port()
    with Cluster(router_args=["--slo-class", CLASSES, "--metrics-listen", f"127.0.0.1:{port}"],
                 **PATIENT) as c:
        for _ in range(3):
            assert c.generate(prompt="Once", max_tokens=2, slo_class="gold").code == OK
        for o in (objectives(ttft_ms=1e-3, tpot_ms=1e-3), objectives(ttft_ms=60000)):
            r = c.generate(prompt="Once", max_tokens=2, slo_class="bulk", objectives=o)
            assert r.code == OK, r.details
        assert c.generate(prompt="Once", max_tokens=2, slo_class="bulk").code == OK  # not judged
        c.wait_idle()
        (model, ) = c.status().models
        told = [(k.name, k.judged, k.good) for k in model.classes]
        assert told == [("chat", 0, 0), ("gold", 3, 3), ("bulk", 2, 1)]
        assert (model.judged, model.good) == (5, 4)
        ask = [os.path.join(BIN, "tandem"), "status", "--server", f"127.0.0.1:{c.port}"]
        shown = subprocess.run(ask, capture_output=True, text=True, timeout=60 * SLOW,
                               check=True).stdout
        for text in ("objectives met 80.0 %", "class gold 100.0 % of 3", "class bulk 50.0 % of 2",
                     "class chat none finished"):
            assert text in shown, shown

        def counted():
            m = scrape(port)
            return [
                tuple(
                    sum(v for k, v in m.items()
                        if k.startswith(f'td_slo_class_requests_total{{class="{name}",')
                        and f'outcome="{outcome}"' in k) for outcome in ("good", "missed"))
                for name in ("chat", "gold", "bulk")
            ]

        c.wait_for(lambda: counted() == [(0, 0), (3, 0), (1, 1)], "the classes' counters", 10)
        assert scrape(port)['td_slo_requests_total{outcome="missed_ttft"}'] == 1
        assert scrape(port)['td_slo_requests_total{outcome="missed_tpot"}'] == 1


def test_a_planned_table_is_a_routers_table(tmp_path):
    """What `tandem plan --print-latency` prints of a card is a router's --latency-table: workers of
    that --node-class are predicted from the first request on, which they are not without."""
    plan = [
        os.path.join(BIN, "tandem"), "plan", "--gpu", "h100", "--model",
        os.path.join(POCKET, "config.json"), "--print-latency"
    ]
    done = subprocess.run(plan, capture_output=True, text=True, timeout=60 * SLOW, check=False)
    assert done.returncode == 0 and done.stdout.startswith("node_class=h100 a0="), done.stderr
    table = tmp_path / "h100.theta"
    table.write_text(done.stdout)
    for args, known in ((["--latency-table", table], True), ([], False)):
        with Cluster(router_args=args, worker_args=["--node-class", "h100"],
                     worker_timeout_ms=PATIENT["worker_timeout_ms"]) as c:
            r = c.generate(prompt="Once upon a time", max_tokens=8, ignore_eos=True)
            assert r.code == OK and len(r.tokens) == 8, r.details
            assert (r.ledger.predicted_ttft_us > 0) == known, r.ledger


def test_the_ledger_says_objectives_and_predictions():
    with Cluster(router_args=["--slo-class", CLASSES], **PATIENT) as c:
        r = c.generate(prompt="Once upon a time", max_tokens=8, ignore_eos=True)
        assert (r.code, r.ledger.slo_class, r.ledger.slo_ttft_us,
                r.ledger.slo_tpot_us) == (OK, "chat", 60000000, 5000000), r.details
        r = c.generate(prompt="Once upon a time", max_tokens=8, ignore_eos=True, slo_class="gold",
                       objectives=objectives(tpot_ms=1500.5))
        assert (r.code, r.ledger.slo_class, r.ledger.slo_ttft_us,
                r.ledger.slo_tpot_us) == (OK, "gold", 30000000,
                                          1500500), r.details  # what is set replaces the class's
        r = c.generate(prompt="Once upon a time", max_tokens=8, ignore_eos=True, slo_class="bulk")
        assert (r.code, r.ledger.slo_class, r.ledger.slo_ttft_us,
                r.ledger.slo_tpot_us) == (OK, "bulk", 0, 0), r.details
        for i in range(6):
            r = c.generate(prompt=f"Story {i}. The little fox walked over the hill.", max_tokens=30,
                           ignore_eos=True)
        # steps were reported meanwhile: the model predicts, within what a busy machine may do
        assert r.code == OK and 0 < r.ledger.predicted_ttft_us < 60e6, (r.details, r.ledger)
        assert 0 < r.ledger.predicted_tpot_us < 5e6, (r.details, r.ledger)
        c.wait_idle()


@pytest.mark.parametrize("which", ["ttft_ms", "tpot_ms"])
def test_impossible_objectives_are_refused_with_a_delay(which):
    """Told before any prefill is spent; one request in 128 is tried all the same, so that the
    router would notice if it were wrong."""
    with Cluster(**PATIENT) as c:
        for i in range(8):
            assert c.generate(prompt=f"Story {i}. The little fox walked over the hill.",
                              max_tokens=20, ignore_eos=True).code == OK
        refused = []
        for i in range(8):
            r = c.generate(prompt=f"Tale {i}", max_tokens=20, ignore_eos=True,
                           objectives=objectives(**{which: 0.001}))
            assert r.code in (OK, EXHAUSTED), (r.code, r.details)
            if r.code == EXHAUSTED:
                refused.append(r)
        assert len(refused) >= 6, len(refused)
        for r in refused:
            assert which[:4].upper() in r.details and 1 <= int(
                r.trailing["retry-delay-ms"]) <= 60000, (r.details, r.trailing)
            assert not r.tokens
        assert c.generate(prompt="Tale", max_tokens=20,
                          ignore_eos=True).code == OK  # nobody else is hurt
        c.wait_idle()


def starts(path):
    """Requests, numbered by arrival, in the order in which the router first sent them to a
    worker: the clients' threads may learn of the ends in another one."""
    text = path.read_text()
    arrived = re.findall(r"^e kind=10 now=\d+ .* id=(\d+) ", text, re.MULTILINE)
    return list(
        dict.fromkeys(
            arrived.index(i)
            for i in re.findall(r"^a kind=1 slot=\d+ id=(\d+) ", text, re.MULTILINE)))


def test_gold_overtakes_bulk(tmp_path):
    """One at a time is served; six of a lesser class wait when one of a greater class comes, and
    one with a priority among the lesser."""
    log = tmp_path / "decisions"
    with Cluster(prefill=0, decode=1, mode="colocated",
                 router_args=["--slo-class", "bulk:weight=1 gold:weight=4", "--decision-log",
                              log], worker_timeout_ms=20000, worker_args=["--max-seqs", 1]) as c:
        first = c.stream(c.request(prompt="Once", max_tokens=1500, ignore_eos=True))
        next(first)  # it holds the only place
        codes, threads = {}, []

        def run(name, **fields):
            codes[name] = c.generate(
                c.request(prompt=f"Story {name}", max_tokens=3, ignore_eos=True, **fields)).code

        for i, (name, fields) in enumerate([(f"bulk{i}", {}) for i in range(6)] +
                                           [("urgent",
                                             dict(priority=5)), ("gold", dict(slo_class="gold"))]):
            threads.append(threading.Thread(target=run, args=(name, ), kwargs=fields))
            threads[-1].start()
            c.wait_for(lambda n=i + 1: c.status().queued == n, f"{i + 1} requests to wait",
                       10 * SLOW)
        first.cancel()
        for t in threads:
            t.join()
        assert len(codes) == 8 and set(codes.values()) == {OK}, codes
        c.wait_idle()
        c.wait_for(lambda: len(starts(log)) == 9, "nine requests in the decision log", 10 * SLOW)
        assert starts(log) == [0, 8, 7, 1, 2, 3, 4, 5, 6], starts(
            log)  # the one that held the place, gold, urgent, bulk


def test_the_ordering_key_reaches_the_transfers(tmp_path):
    """The key that the router's core made, as its decision log has it, is the one by which both
    ends order the request's KV transfer."""
    log = tmp_path / "decisions"
    with Cluster(
            router_args=[
                "--slo-class", "bulk:weight=1 gold:weight=4,ttft=60000", "--decision-log", log
            ], worker_timeout_ms=20000,
            worker_args=["--log-level", "debug", "--peer-timeout-ms", 20000]) as c:
        for fields in ({}, dict(slo_class="gold"), dict(priority=7),
                       dict(slo_class="gold", priority=-7)):
            assert c.generate(prompt="Once there was a fox", max_tokens=3, ignore_eos=True,
                              **fields).code == OK
        c.wait_idle()
        asked = re.compile(r"^a kind=(\d+) slot=\d+ id=(\d+) .* key=(\d+) ", re.MULTILINE)
        c.wait_for(lambda: len([m for m in asked.finditer(log.read_text()) if m[1] in "12"]) >= 8,
                   "eight calls in the decision log", 10 * SLOW)
        calls = [(m[1], m[2], m[3]) for m in asked.finditer(log.read_text())
                 if m[1] in "12"]  # to decode, to prefill
        decode, prefill = ({int(i): int(k) for kind, i, k in calls if kind == want}
                           for want in "12")
        assert decode == prefill and len(decode) == 4 and len(set(
            decode.values())) == 4 and min(decode.values()) >> 60 == 0, calls
        numbers = None
        for name, event in (("decode-0", "kv_granted"), ("prefill-0", "kv_push_started")):
            told = {
                int(m[1], 16): int(m[2]) for m in re.finditer(
                    rf" ev={event} req=([0-9a-f]+) key=(\d+)", c.workers[name].log())
            }
            # random, so that nobody counts them: the same ones at both ends, one for each key
            numbers = numbers or set(told)
            assert set(told) == numbers and len(told) == 4, (name, told)
            # What is above 50 bits is the core's; the time below is by the worker's own clock, so
            # that several routers' requests have an order.
            pairs = list(zip(sorted(told.values()), sorted(decode.values())))
            assert all(ours >> 50 == core >> 50 and abs(ours - core) < 60 * 10**6
                       for ours, core in pairs), (name, pairs)


def block_adds(path, roles):
    """How many blocks prefill workers have reported, by the decision log."""
    text = path.read_text()
    for m in re.finditer(r"^e kind=2 now=\d+ worker=(\d+) .* role=(\d)", text, re.MULTILINE):
        roles[m[1]] = m[2]
    return sum(
        roles.get(m[1]) == "0"
        for m in re.finditer(r"^e kind=7 now=\d+ worker=(\d+) ", text, re.MULTILINE))


def test_a_prompt_goes_where_its_prefix_is(tmp_path):
    """Each of six long prompts comes twice. A router that did not look would send half of the
    second ones to the prefill worker that has nothing of them."""
    port, log, roles = free_port(), tmp_path / "decisions", {}
    with Cluster(prefill=2, decode=1,
                 router_args=["--decision-log", log, "--metrics-listen",
                              f"127.0.0.1:{port}"], **PATIENT) as c:
        cached, expected, blocks, told = 0, 0, 0, 0
        for i in range(6):
            line = f"The little fox number {i} walked over the hill and saw a dog. "
            prompt = f"Tale number {i}: " + line * 12
            first = c.generate(prompt=prompt, max_tokens=24, temperature=0, ignore_eos=True)
            assert first.code == OK and first.usage.cached_tokens == 0, (first.details, first.usage)
            blocks += first.usage.prompt_tokens // 16
            assert first.usage.prompt_tokens >= 10 * 16
            c.wait_for(lambda: block_adds(log, roles) >= blocks,
                       f"{blocks} blocks in the router's index", 10 * SLOW)
            c.wait_idle()
            again = c.generate(prompt=prompt, max_tokens=24, temperature=0, ignore_eos=True)
            assert again.code == OK and again.tokens == first.tokens, again.details
            assert again.ledger.prefill_worker == first.ledger.prefill_worker
            expected += (first.usage.prompt_tokens - 1) // 16 * 16
            # else the last token outran the prefill worker's first message, and with it what it
            # found
            if again.ledger.prefill_us:
                assert again.usage.cached_tokens == (first.usage.prompt_tokens -
                                                     1) // 16 * 16, again.usage
                cached += again.usage.cached_tokens
                told += 1
        c.wait_for(lambda: scrape(port)['td_prefix_hit_tokens_total{source="found"}'] == cached,
                   "what was found in the metrics", 5 * SLOW)
        assert scrape(port)['td_prefix_hit_tokens_total{source="predicted"}'] == expected
        assert told >= 3, told
        c.wait_idle()
    # the log of all this replays to the same decisions (I5)
    replay = subprocess.run([os.path.join(BIN, "tandem"), "sim", "replay", log],
                            capture_output=True, timeout=60 * SLOW)
    assert replay.returncode == 0 and b": the same\n" in replay.stdout, (
        replay.stdout, replay.stderr.decode()[-3000:])
