"""All calls to a worker in one stream (Worker.Multiplex): what the worker does with them, what the
router does when the stream is strange, and that nothing changes without it."""
import queue
import signal
import time

import grpc
import pytest
from harness import PATIENT, SLOW, Cluster, as_result, check_results, one_process, wpb
from test_invariance import REQUESTS
from test_review import LONG, FakeWorker, n_of, out, tokens
from test_strangers import DECODE, ports, worker_call

OK, UNAVAILABLE = grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE
WAIT_S = 20 * SLOW
INVALID, PRECONDITION, UNIMPLEMENTED = 3, 9, 12


def request(number, max_tokens):
    spec = wpb.SamplingSpec(top_k=0, top_p=1, repetition_penalty=1, n_logprobs=-1,
                            max_tokens=max_tokens)
    return wpb.DecodeRequest(
        seq=wpb.Sequence(request=number, attempt=1, tokens=[1, 2, 3], n_prompt=3, sampling=spec),
        local_prefill=True)


class Stream:
    """A router's stream to a worker, message by message."""
    def __init__(self, port):
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self.up = queue.SimpleQueue()
        call = self.channel.stream_stream("/tandem.v1.Worker/Multiplex",
                                          request_serializer=wpb.MultiplexUp.SerializeToString,
                                          response_deserializer=wpb.MultiplexDown.FromString)
        self.call = call(iter(self.up.get, None), timeout=WAIT_S)
        self.tokens, self.ends = {}, {}

    def say(self, *calls):
        self.up.put(wpb.MultiplexUp(calls=calls))

    def hear_until(self, reached):
        while not reached():
            for row in next(self.call).rows:
                assert row.id not in self.ends, "a row after the end"
                if row.WhichOneof("row") == "token":
                    self.tokens.setdefault(row.id, []).append(row.token.token)
                elif row.WhichOneof("row") == "end":
                    self.ends[row.id] = (row.end.code, row.end.details)

    def close(self):
        self.call.cancel()
        self.channel.close()


def call(number, **what):
    return wpb.MultiplexCall(id=number, **what)


@pytest.fixture(scope="module", name="colocated")
def colocated_cluster():
    with Cluster(prefill=0, decode=1, mode="colocated", **PATIENT) as c:
        yield c


def test_calls_of_one_message(colocated):
    """Each call of a message has its own life: its tokens, its refusal, its cancel."""
    port = ports(colocated)["decode-0"]
    alone = []
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        decode = channel.unary_stream(DECODE, request_serializer=lambda m: m.SerializeToString(),
                                      response_deserializer=wpb.DecodeEvent.FromString)
        for ev in decode(request(5, 8), timeout=WAIT_S):
            alone += [t.token for t in ev.tokens.out]
    s = Stream(port)
    s.say(call(1, decode=request(11, 8)), call(2, decode=request(12, 1500)),
          call(3, prefill=wpb.PrefillRequest()), call(4), call(5, decode=wpb.DecodeRequest()))
    s.hear_until(lambda: {1, 3, 4, 5} <= set(s.ends) and len(s.tokens.get(2, [])) > 8)
    assert s.tokens[1] == alone and s.tokens[2][:8] == alone and len(alone) == 8
    assert s.ends[1] == (0, "")
    assert s.ends[3][0] == PRECONDITION and "send Prefill to a prefill worker" in s.ends[3][1]
    assert s.ends[4][0] == UNIMPLEMENTED and s.ends[5] == (INVALID, "seq is missing")
    s.say(call(2, cancel=wpb.MultiplexCancel()), call(77, cancel=wpb.MultiplexCancel()))
    s.say(call(6, decode=request(16, 8)))
    s.hear_until(lambda: 6 in s.ends)
    assert s.tokens[6] == alone and 2 not in s.ends
    colocated.wait_idle()
    s.close()


def wait_workers_idle(c):
    """By snapshots that are later than this call. The router does not count what a test asks a
    worker itself, so a snapshot from before would do for wait_idle."""
    begin = time.monotonic()

    def idle():
        passed_ms = (time.monotonic() - begin) * 1000
        return all(w.snapshot_age_ms < passed_ms and not (
            w.running or w.waiting or w.kv_blocks_held) for w in c.status().workers)

    c.wait_for(idle, "idle workers", WAIT_S)


def test_the_end_of_the_stream_ends_its_calls(colocated):
    """Cancelled, or half-closed: nothing of its requests is left."""
    for half_close in (False, True):
        s = Stream(ports(colocated)["decode-0"])
        s.say(*(call(i, decode=request(100 + i, 1500)) for i in range(1, 9)))
        s.hear_until(lambda s=s: len(s.tokens) > 4)
        if half_close:
            s.up.put(None)
            list(s.call)
            assert s.call.code() == OK
        s.close()
        wait_workers_idle(colocated)


def test_what_is_no_message_ends_the_stream(colocated):
    code, _, _ = worker_call(
        ports(colocated)["decode-0"], "/tandem.v1.Worker/Multiplex",
        type("Raw", (), {"SerializeToString": lambda self: b"\x0a\x7f\x08"})())
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert colocated.generate(prompt="Once", max_tokens=2, **LONG).code == OK


@pytest.fixture(scope="module", name="honest")
def honest_cluster():
    with Cluster(prefill=1, decode=1, router_args=["--policy", "round_robin"], **PATIENT) as c:
        yield c, c.generate(prompt="Once upon a time", max_tokens=8, **LONG).tokens


def generate_four(c):
    """Round robin: two of them meet the other decode worker."""
    return [c.generate(prompt="Once upon a time", max_tokens=8, **LONG) for _ in range(4)]


def test_strange_rows_are_not_heard(honest):
    """Rows of calls that are not there, of another kind, or without content do no harm."""
    c, _ = honest

    def script(r):
        n = n_of(r)
        yield wpb.MultiplexRow(id=1 << 63, token=out(n, 5))
        yield wpb.MultiplexRow(id=(1 << 20) - 1, end=wpb.MultiplexEnd(code=3))
        yield wpb.MultiplexRow()
        yield wpb.MultiplexRow(prefill=wpb.PrefillEvent(done=wpb.PrefillDone()))
        yield tokens(out(n, 10))
        for i in range(1, 8):
            yield wpb.MultiplexRow(token=out(n + i, 10 + i, 2 if i == 7 else 0))
        yield wpb.MultiplexRow(end=wpb.MultiplexEnd())
        yield wpb.MultiplexRow(token=out(n + 8, 10))

    fake = FakeWorker(c, script, name="strange rows", multiplex=True)
    try:
        results = generate_four(c)
        assert all(r.code == OK and len(r.tokens) == 8 for r in results), results
        assert any(r.tokens == list(range(10, 18)) for r in results) and fake.streams == 1
        assert all(r.ledger.failovers == 0 for r in results)
    finally:
        fake.close()
    c.wait_for(lambda: len(c.status().workers) == 2, "it to leave", WAIT_S)


def test_a_broken_leg_is_cancelled(honest):
    """A gap ends that leg alone; the stream stays, and the worker is told."""
    c, want = honest
    fake = FakeWorker(c, lambda r: [tokens(out(n_of(r) + 1, 5))], name="gap", multiplex=True)
    try:
        assert [r.tokens for r in generate_four(c)] == [want] * 4
        c.wait_for(lambda: fake.cancels == fake.calls > 0, "the cancels", WAIT_S)
        assert fake.streams == 1
    finally:
        fake.close()
    c.wait_for(lambda: len(c.status().workers) == 2, "it to leave", WAIT_S)


def test_a_stream_that_ends_fails_its_legs_over(honest):
    """In the middle of a request: the client sees nothing of it, and the next call opens another
    stream."""
    c, want = honest
    fake = FakeWorker(c, lambda r: [tokens(out(n_of(r), want[0])), None], code=UNAVAILABLE,
                      name="ends", multiplex=True)
    try:
        for _ in range(100):  # a worker that failed a call is left alone until its next snapshot
            results = generate_four(c)
            assert [(r.code, r.tokens) for r in results] == [(OK, want)] * 4
            if fake.calls > 2:
                break
        assert fake.streams == fake.calls > 2
    finally:
        fake.close()
    c.wait_for(lambda: len(c.status().workers) == 2, "it to leave", WAIT_S)


@pytest.mark.parametrize("multiplex", ["on", "off"])
def test_decode_killed_with_and_without_it(multiplex):
    """The same tokens as one process, also when a worker dies; the decision log has no word of
    which of the two it was."""
    want, _ = one_process(REQUESTS[:8], dtype="f32")
    with Cluster(prefill=1, decode=2, dtype="f32", router_args=["--test-multiplex", multiplex],
                 **PATIENT) as c:
        requests = c.requests(REQUESTS[:8])
        assert [as_result(r) for r in c.generate_many(requests)] == want
        stream = c.stream(c.request(prompt="Once", max_tokens=1500, **LONG))
        next(stream)
        busy = [w.name for w in c.status().workers if w.running and w.role == "decode"]
        c.workers[busy[0] if busy else "decode-0"].signal(signal.SIGKILL)
        check_results(c.generate_many(requests), want)
        assert next(stream).token_ids
        stream.cancel()
        c.wait_idle(4)
