"""kill -9 and SIGSTOP of each daemon at each named step of the protocol, under load (I3, I4).

The step is hit exactly, by TANDEM_FAULT in the victim's environment (common/base/fault.h). Two
workers of each role serve; one is the victim. Every request must end OK with the tokens of an
undisturbed run (the client never sees a worker die), and all pools must be empty again."""
import os
import signal
import threading
import time

import grpc
import pytest

from harness import LONG, SHORT, SLOW, Cluster
from test_http import Http

OK = grpc.StatusCode.OK
N = 12

DECODE_POINTS = [
    "decode_accepted:1", "decode_armed:2", "ticket_sent:3", "slot_ready:2", "decode_token:1",
    "decode_token:40", "decode_last:1"
]
PREFILL_POINTS = [
    "prefill_accepted:2", "prefill_started:2", "chunk_submitted:1", "chunk_submitted:7",
    "first_token_sent:2", "final_submitted:2", "push_done:2"
]
ROUTER_POINTS = ["router_request:3", "router_ticket:3", "router_first_token:3", "router_token:30"]
# A sanitizer build's short form has what its sanitizer looks for: deaths leave memory that others
# must free (ASan); who wakes late meets their threads (ThreadSanitizer). Release builds have both.
SANITIZER = os.environ.get("TANDEM_TEST_SANITIZER") if SHORT else None
if SHORT:  # one early, one middle, one late step of each
    DECODE_POINTS, PREFILL_POINTS, ROUTER_POINTS = DECODE_POINTS[1:6:2], PREFILL_POINTS[
        1::3], ROUTER_POINTS[1::2]


# Mixed lengths, greedy and sampled; prompts long enough for several chunks.
ASKS = [
    dict(prompt=f"Story {i}. " + "The little fox walked over the hill. " * (1 + i % 4 * 6),
         max_tokens=12 + i, temperature=0.0 if i % 2 else 0.9, seed=100 + i, ignore_eos=True)
    for i in range(N)
]


def requests(c):
    return [c.request(**ask) for ask in ASKS]


PATHS = ["shm"] if SHORT else ["shm", "tcp"]
# Each step by one path, its neighbours by the other; the long form has each by each.
POINT_PATHS = [(point, path) for i, point in enumerate(DECODE_POINTS + PREFILL_POINTS)
               for path in (PATHS if LONG else [PATHS[i % len(PATHS)]])]

CHUNKS = ["--max-step-tokens", 64]
SPREAD = [
    "--policy", "least_token"
]  # goodput would send repeats of a prompt to the worker that has it, and the victim might see none


@pytest.fixture(scope="module")
def baseline():
    with Cluster(worker_args=CHUNKS) as c:
        results = [c.generate(r) for r in requests(c)]
    assert all(r.code == OK for r in results), [r.details for r in results]
    return [(r.tokens, r.text) for r in results]


def spec(point, what):
    name, n = point.split(":")
    return {"TANDEM_FAULT": f"{name}:{what}:{n}"}


def assert_same(results, baseline):
    for i, r in enumerate(results):
        assert r.code == OK, (i, r.code, r.details)
        assert (r.tokens, r.text) == baseline[i], i


def run_round(c, baseline):
    assert_same(c.generate_many(requests(c)), baseline)


def run_until(c, baseline, reached, run_round=run_round):
    """Rounds of the load until the victim has met its fault point (which worker gets what is the
    router's business); all of them must be right."""
    for _ in range(8):
        run_round(c, baseline)
        if reached():
            return
    raise AssertionError("the fault point was not reached")


@pytest.mark.skipif(SANITIZER == "thread", reason="the short form of ASan's build has the deaths")
@pytest.mark.parametrize("point,path", POINT_PATHS)
def test_kill_worker(baseline, point, path):
    victim = ("decode-0" if point in DECODE_POINTS else "prefill-0")
    with Cluster(prefill=2, decode=2, worker_args=[*CHUNKS, "--transfer", path], router_args=SPREAD,
                 envs={victim: spec(point, "kill")}) as c:
        run_until(c, baseline, lambda: not c.workers[victim].alive())
        assert c.workers[victim].wait_exit(1) == -signal.SIGKILL
        c.wait_idle(4)
        # a new worker takes its place
        c.start_worker(victim.split("-")[0])
        assert_same(c.generate_many(requests(c)), baseline)
        c.wait_idle(4)


@pytest.mark.skipif(SANITIZER == "address,undefined",
                    reason="the short form of ThreadSanitizer's build has the stops")
@pytest.mark.parametrize("point", DECODE_POINTS + PREFILL_POINTS)
def test_stop_worker_then_continue(baseline, point):
    victim = ("decode-0" if point in DECODE_POINTS else "prefill-0")
    with Cluster(prefill=2, decode=2, worker_args=CHUNKS, router_args=SPREAD,
                 envs={victim: spec(point, "stop")}) as c:
        d = c.workers[victim]
        run_until(c, baseline, lambda: "ev=fault_fires" in d.log())
        d.stopped = True
        c.wait_idle(4)
        d.signal(signal.SIGCONT)  # it wakes with requests that are no longer its own
        c.wait_for(lambda: sum(w.state == "ready" for w in c.status().workers) == 4,
                   "the stopped worker to come back", 10 * SLOW)
        c.wait_idle(4)
        assert_same(c.generate_many(requests(c)), baseline)
        c.wait_idle(4)


def run_http_round(c, baseline):
    """The load as streams over HTTP: each token once and in its place, one end, and its count."""
    got = [None] * N

    def run(i):
        got[i] = c.http.events("/v1/completions", {
            **ASKS[i], "return_token_ids": True, "stream_options": {"include_usage": True}
        })

    threads = [threading.Thread(target=run, args=(i, )) for i in range(N)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for i, events in enumerate(got):
        assert events, i
        pieces = [e["choices"][0] for e in events if e["choices"]]
        tokens = [t for p in pieces for t in p.get("token_ids") or []]
        assert (tokens, "".join(p["text"] for p in pieces)) == baseline[i], i
        assert [p["finish_reason"] for p in pieces if p["finish_reason"]] == ["length"], i
        assert events[-1]["usage"]["completion_tokens"] == len(tokens), i


HTTP_FAULTS = [("chunk_submitted:7", "kill"), ("first_token_sent:2", "kill"),
               ("chunk_submitted:7", "stop"), ("decode_token:40", "stop")]


@pytest.mark.parametrize("point,what", HTTP_FAULTS)
def test_http_streams_of_a_worker_that_dies_or_stops(baseline, point, what):
    """What comes over HTTP is what an undisturbed run gives over gRPC, token for token."""
    if SANITIZER == ("thread" if what == "kill" else "address,undefined"):
        pytest.skip("the short form of the other sanitizer's build has it")
    victim = "decode-0" if point.startswith("decode") else "prefill-0"
    with Cluster(prefill=2, decode=2, worker_args=CHUNKS,
                 router_args=[*SPREAD, "--http-listen", "127.0.0.1:0"],
                 envs={victim: spec(point, what)}) as c:
        c.http, d = Http(c), c.workers[victim]
        run_until(c, baseline, lambda: "ev=fault_fires" in d.log(), run_http_round)
        assert c.status().failovers > 0
        c.wait_idle(4)
        if what == "kill":
            assert d.wait_exit(1) == -signal.SIGKILL
            return
        d.stopped = True
        d.signal(signal.SIGCONT)
        c.wait_for(lambda: sum(w.state == "ready" for w in c.status().workers) == 4,
                   "the stopped worker to come back", 10 * SLOW)
        run_http_round(c, baseline)
        c.wait_idle(4)


@pytest.mark.parametrize("point", ROUTER_POINTS)
def test_kill_router(baseline, point):
    with Cluster(prefill=1, decode=1, worker_args=CHUNKS, envs={"router": spec(point,
                                                                               "kill")}) as c:
        results = c.generate_many(requests(c))
        assert c.router.wait_exit(10 * SLOW) == -signal.SIGKILL
        for i, r in enumerate(
                results):  # exactly one terminal status each; a prefix of the right tokens
            assert r.code in (OK, grpc.StatusCode.UNAVAILABLE), (i, r.code, r.details)
            assert r.tokens == baseline[i][0][:len(r.tokens)], i
        assert any(r.code == grpc.StatusCode.UNAVAILABLE for r in results)
        c.start_router(listen=f"127.0.0.1:{c.port}", env={"TANDEM_FAULT": ""})
        c.wait_for(lambda: sum(w.state == "ready" for w in c.status().workers) == 2,
                   "the workers to come back", 10 * SLOW)
        c.wait_idle(2)  # nothing of the dead router's requests is held
        assert_same(c.generate_many(requests(c)), baseline)
        c.wait_idle(4)


def test_stop_router_frees_workers(baseline):
    """A frozen router holds nothing for ever: its calls fail by keepalive, the workers free what
    they held."""
    with Cluster(worker_args=CHUNKS) as c:
        streams = [
            c.stream(c.request(prompt=f"Story {i}", max_tokens=1500, temperature=0,
                               ignore_eos=True)) for i in range(4)
        ]
        for s in streams:
            next(s)
        c.router.signal(signal.SIGSTOP)
        time.sleep(0)  # no wait: the workers must notice by themselves
        decode = c.workers["decode-0"]
        decode.wait_log(r"ev=router_lost", 20 * SLOW)
        c.router.signal(signal.SIGCONT)
        for s in streams:
            s.cancel()
        c.wait_for(lambda: sum(w.state == "ready" for w in c.status().workers) == 2,
                   "the workers to come back", 15 * SLOW)
        c.wait_idle(4)
        assert_same(c.generate_many(requests(c)), baseline)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_drain_worker_under_load(baseline, role):
    """SIGTERM: what runs is finished, new work goes elsewhere, exit 0; the client sees nothing."""
    with Cluster(prefill=2, decode=2, worker_args=CHUNKS) as c:
        import threading

        box = []
        t = threading.Thread(
            target=lambda: box.extend(c.generate_many(requests(c) * 2, stagger_s=0.005)))
        t.start()
        victim = c.workers[f"{role}-0"]
        victim.signal(signal.SIGTERM)
        t.join()
        assert victim.wait_exit(20 * SLOW) == 0
        assert_same(box, baseline * 2)
        c.wait_idle(4)


def test_drain_timeout_hands_over(baseline):
    """A drain that may not finish the running requests hands them to the other decode worker,
    token for token."""
    with Cluster(prefill=1, decode=1, worker_args=[*CHUNKS, "--drain-timeout-ms", 0]) as c:
        long = c.request(prompt="Story 1", max_tokens=600 if SHORT else 900, temperature=0.8,
                         seed=5, ignore_eos=True)
        want = c.generate(long)
        import threading

        box = []
        t = threading.Thread(target=lambda: box.append(c.generate(long)))
        t.start()
        c.wait_for(lambda: any(w.role == "decode" and w.running for w in c.status().workers),
                   "the request to run", 10 * SLOW)
        c.workers["decode-0"].signal(signal.SIGTERM)
        c.start_worker("decode", wait=False)
        t.join()
        assert c.workers["decode-0"].wait_exit(20 * SLOW) == 0
        assert box[0].code == OK, box[0].details
        assert box[0].tokens == want.tokens and box[0].ledger.failovers >= 1


def health(channel):
    """ServingStatus of the whole server: 1 is SERVING."""
    out = channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=5 * SLOW)
    return out[1] if len(out) == 2 and out[0] == 0x08 else out


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_pains_05_a_peers_death_leaves_health_alone(baseline, victim):
    """A worker dies in the middle of hand-overs: those that it shared them with say SERVING all
    the while, hold nothing of it, and serve on."""
    point = "chunk_submitted:3" if victim == "prefill-0" else "slot_ready:2"
    with Cluster(prefill=2, decode=2, worker_args=[*CHUNKS, "--transfer", "tcp"],
                 router_args=SPREAD, envs={victim: spec(point, "kill")}) as c:
        others = {
            w.name: grpc.insecure_channel(w.address) for w in c.status().workers if w.name != victim
        }
        seen, over = {name: [] for name in others}, threading.Event()

        def watch():
            while True:
                last = over.is_set()
                for name, ch in others.items():
                    seen[name].append(health(ch))
                if last:
                    return
                over.wait(0.02)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            run_until(c, baseline, lambda: not c.workers[victim].alive())
            c.wait_idle(4)  # nothing is held for the dead one
            c.start_worker(victim.split("-")[0])
            assert_same(c.generate_many(requests(c)), baseline)
            c.wait_idle(4)
        finally:
            over.set()
            watcher.join()
            for ch in others.values():
                ch.close()
        assert len(seen) == 3 and all(len(s) > 1 and set(s) == {1} for s in seen.values()), seen
        assert all(c.workers[name].alive() for name in others)


def test_pains_06_the_first_legs_reason_reaches_the_client():
    """The prefill leg fails at once, and with nobody to go on with the client is told that, in
    the leg's words, and not that decode waited for nothing: the other leg is ended with it,
    long before any deadline."""
    with Cluster(router_args=["--max-failovers", 0],
                 worker_args=[*CHUNKS, "--transfer", "tcp", "--peer-timeout-ms",
                              60000], envs={"prefill-0": spec("chunk_submitted:1", "kill")}) as c:
        start = time.monotonic()
        r = c.generate(prompt="The little fox walked over the hill. " * 12, max_tokens=8,
                       temperature=0, ignore_eos=True, timeout=120 * SLOW)
        took = time.monotonic() - start
        assert c.workers["prefill-0"].wait_exit(5 * SLOW) == -signal.SIGKILL
        assert r.code == grpc.StatusCode.UNAVAILABLE, (r.code, r.details)
        assert "the prefill worker failed (prefill-0: " in r.details, (r.code, r.details)
        assert took < 20 * SLOW, f"{took:.1f} s"  # the peer's time-out alone is a minute
        c.wait_idle(4)
        assert health(c.channel) == 1
