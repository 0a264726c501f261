"""kill -9 and SIGSTOP of each daemon at each named step of the protocol, under load (I3, I4).

The step is hit exactly, by TANDEM_FAULT in the victim's environment (common/base/fault.h). Two workers of each role serve; one is the victim.
Every request must end OK with the tokens of an undisturbed run (the client never sees a worker die), and all pools must be empty again."""
import signal
import time

import grpc
import pytest

from harness import SHORT, SLOW, Cluster

OK = grpc.StatusCode.OK
N = 12

DECODE_POINTS = ["decode_accepted:1", "decode_armed:2", "ticket_sent:3", "slot_ready:2", "decode_token:1", "decode_token:40", "decode_last:1"]
PREFILL_POINTS = ["prefill_accepted:2", "prefill_started:2", "chunk_submitted:1", "chunk_submitted:7", "first_token_sent:2", "final_submitted:2", "push_done:2"]
ROUTER_POINTS = ["router_request:3", "router_ticket:3", "router_first_token:3", "router_token:30"]
if SHORT:  # sanitizer builds: one early, one middle, one late step of each
    DECODE_POINTS, PREFILL_POINTS, ROUTER_POINTS = DECODE_POINTS[1:6:2], PREFILL_POINTS[1::3], ROUTER_POINTS[1::2]


def requests(c):
    """Mixed lengths, greedy and sampled; prompts long enough for several chunks."""
    out = []
    for i in range(N):
        prompt = f"Story {i}. " + "The little fox walked over the hill. " * (1 + i % 4 * 6)
        out.append(c.request(prompt=prompt, max_tokens=12 + i, temperature=0.0 if i % 2 else 0.9, seed=100 + i, ignore_eos=True))
    return out


CHUNKS = ["--max-step-tokens", 64]
SPREAD = ["--policy", "least_token"]  # goodput would send repeats of a prompt to the worker that has it, and the victim might see none


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


def run_until(c, baseline, reached):
    """Rounds of the load until the victim has met its fault point (which worker gets what is the router's business); all of them must be right."""
    for _ in range(8):
        assert_same(c.generate_many(requests(c)), baseline)
        if reached():
            return
    raise AssertionError("the fault point was not reached")


@pytest.mark.parametrize("path", ["shm"] if SHORT else ["shm", "tcp"])
@pytest.mark.parametrize("point", DECODE_POINTS + PREFILL_POINTS)
def test_kill_worker(baseline, point, path):
    victim = ("decode-0" if point in DECODE_POINTS else "prefill-0")
    with Cluster(prefill=2, decode=2, worker_args=[*CHUNKS, "--transfer", path], router_args=SPREAD, envs={victim: spec(point, "kill")}) as c:
        run_until(c, baseline, lambda: not c.workers[victim].alive())
        assert c.workers[victim].wait_exit(1) == -signal.SIGKILL
        c.wait_idle(4)
        # a new worker takes its place
        c.start_worker(victim.split("-")[0])
        assert_same(c.generate_many(requests(c)), baseline)
        c.wait_idle(4)


@pytest.mark.parametrize("point", DECODE_POINTS + PREFILL_POINTS)
def test_stop_worker_then_continue(baseline, point):
    victim = ("decode-0" if point in DECODE_POINTS else "prefill-0")
    with Cluster(prefill=2, decode=2, worker_args=CHUNKS, router_args=SPREAD, envs={victim: spec(point, "stop")}) as c:
        d = c.workers[victim]
        run_until(c, baseline, lambda: "ev=fault_fires" in d.log())
        d.stopped = True
        c.wait_idle(4)
        d.signal(signal.SIGCONT)  # it wakes with requests that are no longer its own
        c.wait_for(lambda: sum(w.state == "ready" for w in c.status().workers) == 4, "the stopped worker to come back", 10 * SLOW)
        c.wait_idle(4)
        assert_same(c.generate_many(requests(c)), baseline)
        c.wait_idle(4)


@pytest.mark.parametrize("point", ROUTER_POINTS)
def test_kill_router(baseline, point):
    with Cluster(prefill=1, decode=1, worker_args=CHUNKS, envs={"router": spec(point, "kill")}) as c:
        results = c.generate_many(requests(c))
        assert c.router.wait_exit(10 * SLOW) == -signal.SIGKILL
        for i, r in enumerate(results):  # exactly one terminal status each; a prefix of the right tokens
            assert r.code in (OK, grpc.StatusCode.UNAVAILABLE), (i, r.code, r.details)
            assert r.tokens == baseline[i][0][: len(r.tokens)], i
        assert any(r.code == grpc.StatusCode.UNAVAILABLE for r in results)
        c.start_router(listen=f"127.0.0.1:{c.port}", env={"TANDEM_FAULT": ""})
        c.wait_for(lambda: sum(w.state == "ready" for w in c.status().workers) == 2, "the workers to come back", 10 * SLOW)
        c.wait_idle(2)  # nothing of the dead router's requests is held
        assert_same(c.generate_many(requests(c)), baseline)
        c.wait_idle(4)


def test_stop_router_frees_workers(baseline):
    """A frozen router holds nothing for ever: its calls fail by keepalive, the workers free what they held."""
    with Cluster(worker_args=CHUNKS) as c:
        streams = [c.stream(c.request(prompt=f"Story {i}", max_tokens=1500, temperature=0, ignore_eos=True)) for i in range(4)]
        for s in streams:
            next(s)
        c.router.signal(signal.SIGSTOP)
        time.sleep(0)  # no wait: the workers must notice by themselves
        decode = c.workers["decode-0"]
        decode.wait_log(r"ev=router_lost", 20 * SLOW)
        c.router.signal(signal.SIGCONT)
        for s in streams:
            s.cancel()
        c.wait_for(lambda: sum(w.state == "ready" for w in c.status().workers) == 2, "the workers to come back", 15 * SLOW)
        c.wait_idle(4)
        assert_same(c.generate_many(requests(c)), baseline)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_drain_worker_under_load(baseline, role):
    """SIGTERM: what runs is finished, new work goes elsewhere, exit 0; the client sees nothing."""
    with Cluster(prefill=2, decode=2, worker_args=CHUNKS) as c:
        import threading

        box = []
        t = threading.Thread(target=lambda: box.extend(c.generate_many(requests(c) * 2, stagger_s=0.005)))
        t.start()
        victim = c.workers[f"{role}-0"]
        victim.signal(signal.SIGTERM)
        t.join()
        assert victim.wait_exit(20 * SLOW) == 0
        assert_same(box, baseline * 2)
        c.wait_idle(4)


def test_drain_timeout_hands_over(baseline):
    """A drain that may not finish the running requests hands them to the other decode worker, token for token."""
    with Cluster(prefill=1, decode=1, worker_args=[*CHUNKS, "--drain-timeout-ms", 0]) as c:
        long = c.request(prompt="Story 1", max_tokens=900, temperature=0.8, seed=5, ignore_eos=True)
        want = c.generate(long)
        import threading

        box = []
        t = threading.Thread(target=lambda: box.append(c.generate(long)))
        t.start()
        c.wait_for(lambda: any(w.role == "decode" and w.running for w in c.status().workers), "the request to run", 10 * SLOW)
        c.workers["decode-0"].signal(signal.SIGTERM)
        c.start_worker("decode", wait=False)
        t.join()
        assert c.workers["decode-0"].wait_exit(20 * SLOW) == 0
        assert box[0].code == OK, box[0].details
        assert box[0].tokens == want.tokens and box[0].ledger.failovers >= 1
