"""Corners of a cluster's life: who may register, what a router leaves behind, workers that lie,
a port that is taken."""
import concurrent.futures
import contextlib
import ctypes
import json
import os
import queue
import re
import signal
import socket
import subprocess
import threading

import grpc
import pytest

from harness import BIN, PATIENT, POCKET, SHORT, SLOW, Cluster, Daemon, wpb, ttft_stages_us

OK = grpc.StatusCode.OK
LONG = dict(temperature=0, ignore_eos=True)


@contextlib.contextmanager
def begun_and_held(c, n):
    """n streams, each behind its first token and far from its last, which get no more tokens
    meanwhile."""
    for _ in range(20):  # one may be over before decode is stopped
        streams = [
            c.stream(c.request(prompt=f"Story {i}", max_tokens=1800, **LONG)) for i in range(n)
        ]
        for s in streams:
            next(s)
        with c.decode_stopped():
            if c.status().live == n:
                yield streams
                return
        for s in streams:
            s.cancel()
        c.wait_idle()
    pytest.fail(f"{n} streams are never live at once")


def test_router_leaves_with_live_requests():
    """A router that may not wait cancels its clients' calls, exits 0, and the workers hold
    nothing for it any more."""
    with Cluster(router_args=["--drain-timeout-ms", 0], **PATIENT) as c:
        with begun_and_held(c, 6) as streams:
            c.router.signal(signal.SIGTERM)
            for s in streams:
                with pytest.raises(grpc.RpcError):
                    for _ in s:
                        pass
                assert s.code() in (grpc.StatusCode.UNAVAILABLE,
                                    grpc.StatusCode.CANCELLED), s.code()
            assert c.router.wait_exit(10 * SLOW) == 0
        c.router.check_sanitizers()
        c.start_router(listen=f"127.0.0.1:{c.port}")
        c.wait_workers(2)
        c.wait_idle(4)
        assert c.generate(prompt="Once", max_tokens=4, temperature=0).code == OK


def test_second_worker_of_a_name_is_turned_away():
    """Two processes of one name: the one that lives keeps its place and its requests; the other
    is told why, and comes in when the first has gone."""
    with Cluster(prefill=1, decode=1, **PATIENT) as c:
        want = c.generate(prompt="Once upon a time", max_tokens=900, **LONG)
        stream = c.stream(c.request(prompt="Once upon a time", max_tokens=900, **LONG))
        tokens = list(next(stream).token_ids)
        first = c.workers["decode-0"]
        c.next_index["decode"] = 0
        second = c.start_worker("decode", wait=False)
        second.wait_log(r"ev=registration_rejected .*decode-0")
        ledger = None
        for m in stream:
            tokens += m.token_ids
            if m.finish_reason:
                ledger = m.ledger
        assert tokens == want.tokens and ledger.failovers == 0
        first.signal(signal.SIGKILL)
        first.wait_exit(10)
        c.wait_for(
            lambda: any(w.pid == second.pid and w.state == "ready" for w in c.status().workers),
            "the second to join", 10 * SLOW)
        assert c.generate(prompt="Once upon a time", max_tokens=90,
                          **LONG).tokens == want.tokens[:90]


def test_signal_while_the_weights_load(tmp_path):
    """A worker that has nothing to drain yet does not load to the end first."""
    config = os.path.join(os.path.dirname(POCKET), "pocket", "config.json")
    with open(config, encoding="utf-8") as f:
        big = {
            **json.load(f), "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24,
            "num_attention_heads": 64
        }
    (tmp_path / "config.json").write_text(json.dumps(big))
    d = Daemon(
        "early", "tandem-decode",
        ["--random-weights", tmp_path / "config.json", "--kv-memory", "64MiB", "--threads", 1],
        str(tmp_path))

    def loading():
        with open(f"/proc/{d.pid}/status", encoding="ascii") as f:
            blocked = int(re.search(r"SigBlk:\s*(\w+)", f.read()).group(1), 16)
        return blocked >> (signal.SIGHUP - 1) & 1 and not blocked >> (signal.SIGTERM - 1) & 1

    try:
        Cluster.wait_for(loading, "the load to begin", 10 * SLOW)
        d.signal(signal.SIGTERM)
        assert d.wait_exit(5) == -signal.SIGTERM
        assert "ev=ready" not in d.log()
    finally:
        if d.alive():
            d.process.kill()
            d.process.wait()


def test_engine_thread_that_hangs():
    """Health means progress: a worker whose engine stands still while its RPC thread answers
    loses its requests to others, and comes back."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    seize, interrupt, detach = 0x4206, 0x4207, 17
    n_tokens = 900 if SHORT else 1500
    with Cluster(prefill=0, decode=1, mode="colocated") as c:
        want = c.generate(prompt="Once upon a time", max_tokens=n_tokens, **LONG).tokens
        d = c.workers["decode-0"]
        tasks = f"/proc/{d.pid}/task"

        def comm(tid):
            with open(f"{tasks}/{tid}/comm", encoding="utf-8") as f:
                return f.read().strip()

        engine = [int(t) for t in os.listdir(tasks) if comm(t) == "engine"][0]
        stream = c.stream(c.request(prompt="Once upon a time", max_tokens=n_tokens, **LONG))
        tokens = list(next(stream).token_ids)
        if libc.ptrace(seize, engine, None, None):
            pytest.skip(f"no ptrace here: {os.strerror(ctypes.get_errno())}")
        assert libc.ptrace(interrupt, engine, None, None) == 0
        os.waitpid(engine, 0x40000000)  # __WALL
        c.start_worker("decode")
        ledger = None
        for m in stream:
            tokens += m.token_ids
            if m.finish_reason:
                ledger = m.ledger
        assert tokens == want and ledger.failovers == 1 and ledger.decode_worker == "decode-1"
        assert next(w for w in c.status().workers if w.name == "decode-0").state == "suspect"
        assert libc.ptrace(detach, engine, None, None) == 0
        c.wait_workers(2)
        c.wait_idle(4)


@pytest.mark.parametrize("mode", ["pd", "colocated"])
def test_ledger_survives_a_failover(mode):
    """The stages are those of the attempt that made the first token, also when a later attempt
    made the rest."""
    with Cluster(prefill=1 if mode == "pd" else 0, decode=2, mode=mode, envs={
            "decode-0": {"TANDEM_FAULT": "decode_token:kill:5"}
    }, router_args=["--policy", "round_robin"], **PATIENT) as c:
        results = [c.generate(prompt="The old boat " * 20, max_tokens=24, **LONG) for _ in range(2)]
        assert all(r.code == OK and len(r.tokens) == 24 for r in results)
        assert results[0].tokens == results[1].tokens
        assert sorted(r.ledger.failovers for r in results) == [0, 1]
        for led in (r.ledger for r in results):
            assert ttft_stages_us(led) == led.ttft_us <= led.e2e_us
            assert led.prefill_us > 0 and (led.reserve_us > 0) == (mode == "pd")
            assert led.mode == mode
        c.wait_idle(4)


@pytest.mark.parametrize("listen,why", [("taken", "in use"), ("127.0.0.1:0", "port")])
def test_up_refuses_a_port_it_cannot_have(listen, why):
    """`tandem up` on a port that serves something else must not hand its workers to a stranger's
    router."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        address = f"127.0.0.1:{s.getsockname()[1]}" if listen == "taken" else listen
        done = subprocess.run([
            os.path.join(BIN, "tandem"), "up", "--model", POCKET, "--listen", address,
            "--start-timeout-ms", "20000"
        ], capture_output=True, text=True, timeout=60 * SLOW, check=False)
    assert done.returncode != 0 and why in done.stderr, done.stderr
    assert "is up" not in done.stdout


# ---- workers that lie
# -------------------------------------------------------------------------------------------------


class FakeWorker:
    """A worker made of lies: registers like a real one, answers Decode (or Prefill) with what
    `script(request)` yields, then with `code`. With `multiplex` it takes the calls in a stream;
    `streams` and `cancels` count those."""
    def __init__(self, cluster, script, code=OK, name="liar", role="decode", multiplex=False):
        real = [w for w in cluster.status().workers if w.role == "decode"][0]
        self.script, self.code, self.calls, self.role = script, code, 0, role
        self.streams = self.cancels = 0
        self.server = grpc.server(concurrent.futures.ThreadPoolExecutor(8))
        decode, prefill = ((wpb.DecodeRequest, wpb.DecodeEvent), (wpb.PrefillRequest,
                                                                  wpb.PrefillEvent))
        request, event = decode if role == "decode" else prefill
        handlers = {
            role.capitalize(): grpc.unary_stream_rpc_method_handler(self.answer, request.FromString,
                                                                    event.SerializeToString),
            "Multiplex": grpc.stream_stream_rpc_method_handler(
                self.multiplex, wpb.MultiplexUp.FromString, wpb.MultiplexDown.SerializeToString)
        }
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(
            "tandem.v1.Worker", handlers), ))
        port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()
        hello = wpb.Hello(name=name, role=role, address=f"127.0.0.1:{port}", incarnation=7,
                          protocol=1, layout_hash=layout_hash(cluster), model="pocket",
                          block_size=real.block_size, kv_blocks=real.kv_blocks, max_model_len=2048,
                          vocab=vocab(), max_seqs=64, pid=1, multiplex=multiplex)
        self.stop = threading.Event()
        self.snapshots = queue.SimpleQueue()

        def messages():
            yield wpb.WorkerMessage(hello=hello)
            seq = 0
            while not self.stop.wait(0.05):
                seq += 1
                snapshot = wpb.Snapshot() if self.snapshots.empty() else self.snapshots.get()
                snapshot.seq = seq
                yield wpb.WorkerMessage(snapshot=snapshot)

        join = cluster.channel.stream_stream("/tandem.v1.Registry/Join",
                                             request_serializer=wpb.WorkerMessage.SerializeToString,
                                             response_deserializer=wpb.RouterMessage.FromString)
        self.stream = join(messages())
        first = next(self.stream)
        assert first.WhichOneof("message") == "welcome", first

    def answer(self, request, context):
        self.calls += 1
        yield from self.script(request)
        if self.code != OK:
            context.abort(self.code, "as scripted")

    def multiplex(self, messages, context):
        """The calls one after the other, each in one message but for "send", which sends what there
        is. A script may yield whole rows; after None the stream ends, and not the call alone."""
        self.streams += 1
        for up in messages:
            for call in up.calls:
                kind = call.WhichOneof("call")
                if kind == "cancel":
                    self.cancels += 1
                    continue
                self.calls += 1
                rows = []
                for event in self.script(getattr(call, kind)):
                    if event == "send":
                        yield wpb.MultiplexDown(rows=rows)
                        rows = []
                        continue
                    if event is None:
                        yield wpb.MultiplexDown(rows=rows)
                        context.abort(self.code, "as scripted")
                    if isinstance(event, wpb.MultiplexRow):
                        if not event.id:
                            event.id = call.id
                        rows.append(event)
                    else:
                        rows.append(wpb.MultiplexRow(id=call.id, **{self.role: event}))
                rows.append(
                    wpb.MultiplexRow(
                        id=call.id, end=wpb.MultiplexEnd(code=self.code.value[0],
                                                         details="as scripted")))
                yield wpb.MultiplexDown(rows=rows)

    def close(self):
        self.stop.set()
        self.stream.cancel()
        self.server.stop(None).wait()


def vocab():
    with open(os.path.join(POCKET, "config.json"), encoding="utf-8") as f:
        return json.load(f)["vocab_size"]


def layout_hash(cluster):
    """What the router tells a worker of another layout: the hash of those it has."""
    def messages():
        yield wpb.WorkerMessage(hello=wpb.Hello(
            name="probe", role="decode", address="127.0.0.1:1", protocol=1, layout_hash=1,
            block_size=16, kv_blocks=1, max_model_len=1, vocab=vocab(), max_seqs=1))

    join = cluster.channel.stream_stream("/tandem.v1.Registry/Join",
                                         request_serializer=wpb.WorkerMessage.SerializeToString,
                                         response_deserializer=wpb.RouterMessage.FromString)
    answer = next(join(messages()))
    return int(re.search(r"differs from \S+'s ([0-9a-f]{16})", answer.reject.reason).group(1), 16)


def out(index, token, finish=0):
    return wpb.TokenOut(index=index, token=token, finish=finish)


def tokens(*outs):
    return wpb.DecodeEvent(tokens=wpb.Tokens(out=outs))


def n_of(request):
    return len(request.seq.tokens)


LIES = {
    "nothing": lambda r: [], "empty event": lambda r: [wpb.DecodeEvent()],
    "no tokens": lambda r: [tokens()], "gap": lambda r: [tokens(out(n_of(r) + 1, 5))],
    "prompt overwritten": lambda r: [tokens(out(0, 5))],
    "huge index": lambda r: [tokens(out(0xFFFFFFFF, 5))],
    "token out of range": lambda r: [tokens(out(n_of(r), 1 << 30))],
    "negative token": lambda r: [tokens(out(n_of(r), -1))],
    "unknown finish": lambda r: [tokens(out(n_of(r), -7, 9))],
    "ticket without grant": lambda r: [wpb.DecodeEvent(ticket=wpb.Ticket(slot=1))],
    "ticket of nonsense": lambda r:
    [wpb.DecodeEvent(ticket=wpb.Ticket(slot=1, grant=b"\xff" * 70000, cached_tokens=0))],
    "ticket cached too much": lambda r:
    [wpb.DecodeEvent(ticket=wpb.Ticket(slot=1, grant=b"x", cached_tokens=0xFFFFFFFF))],
    "ticket twice": lambda r: [
        wpb.DecodeEvent(ticket=wpb.Ticket(slot=1, grant=b"x" * 40)),
        wpb.DecodeEvent(ticket=wpb.Ticket(slot=2, grant=b"y" * 40))
    ], "times with a strange path": lambda r:
    [wpb.DecodeEvent(times=wpb.DecodeTimes(transfer_path="\u00e9\n" * 50, preemptions=0xFFFFFFFF))],
}


@pytest.fixture(scope="module")
def honest():
    with Cluster(prefill=1, decode=1, router_args=["--policy", "round_robin"], **PATIENT) as c:
        yield c, c.generate(prompt="Once upon a time", max_tokens=8, **LONG).tokens


@pytest.mark.parametrize("multiplex", [True, False], ids=["stream", "calls"])
@pytest.mark.parametrize("lie", LIES)
def test_lying_decode_worker(honest, lie, multiplex):
    """Whatever it says, the client gets the honest worker's tokens, and the router forgets the
    liar's legs."""
    c, want = honest
    fake = FakeWorker(c, LIES[lie], name="liar " + lie, multiplex=multiplex)
    try:
        for _ in range(4):  # round robin: two of them meet the liar
            r = c.generate(prompt="Once upon a time", max_tokens=8, **LONG)
            assert (r.code, r.tokens) == (OK, want), (r.code, r.details)
            led = r.ledger
            assert ttft_stages_us(led) == led.ttft_us
        assert fake.calls > 0 and (fake.streams > 0) == multiplex
    finally:
        fake.close()
    c.wait_for(lambda: len(c.status().workers) == 2, "the liar to leave", 10 * SLOW)
    c.wait_idle()


@pytest.mark.parametrize("multiplex", [True, False], ids=["stream", "calls"])
def test_worker_gone_after_the_last_token(honest, multiplex):
    """All tokens came, then the worker failed instead of saying OK: the answer is whole."""
    c, _ = honest

    def script(r):
        n = n_of(r)
        yield tokens(*[out(n + i, 10 + i, 2 if i == 7 else 0) for i in range(8)])

    fake = FakeWorker(c, script, code=grpc.StatusCode.UNAVAILABLE, name="dies late",
                      multiplex=multiplex)
    try:
        results = [c.generate(prompt="Once upon a time", max_tokens=8, **LONG) for _ in range(4)]
        assert all(r.code == OK and len(r.tokens) == 8 for r in results), results
        assert fake.calls > 0 and any(r.tokens == list(range(10, 18)) for r in results)
        assert all(r.ledger.failovers == 0 for r in results)
    finally:
        fake.close()
    c.wait_for(lambda: len(c.status().workers) == 2, "it to leave", 10 * SLOW)


def test_first_token_event_after_decode_has_ended():
    """Decode was done before the prefill worker's event arrived: the answer still says what the
    prefix cache held and how long the prefill took."""
    with Cluster() as c:
        started, held = threading.Event(), []

        def decode(r):
            yield wpb.DecodeEvent(ticket=wpb.Ticket(slot=1, grant=b"x" * 40))
            assert started.wait(10 * SLOW)
            yield tokens(*[out(n_of(r) + i, 10 + i, 2 if i == 3 else 0) for i in range(4)])

        def prefill(r):
            started.set()
            for _ in range(
                    10000
            ):  # until the router has closed decode's leg; it waits for us half a second
                st = c.status()
                if [w.assigned for w in st.workers if w.name == "fake decode"] == [0]:
                    held.append(st.live == 1)
                    break
            yield wpb.PrefillEvent(first=wpb.FirstToken(
                out=out(n_of(r), 10), times=wpb.PrefillTimes(queue_us=1, prefill_us=77,
                                                             cached_tokens=16)))
            yield wpb.PrefillEvent(done=wpb.PrefillDone())

        fakes = [
            FakeWorker(c, decode, name="fake decode"),
            FakeWorker(c, prefill, name="fake prefill", role="prefill")
        ]
        try:
            for w in c.workers.values():
                w.signal(signal.SIGTERM)
                assert w.wait_exit(10 * SLOW) == 0
            c.wait_for(lambda: len(c.status().workers) == 2, "the honest ones to leave", 10 * SLOW)
            waited = []
            for _ in range(
                    5
                    # a busy machine may take longer than the router waits: then it says nothing of
                    # the
                    # prefill, but it answers
            ):
                started.clear()
                held.clear()
                r = c.generate(ids=list(range(5, 45)), max_tokens=4, **LONG)
                assert (r.code, r.tokens) == (OK, [10, 11, 12, 13]), r.details
                led = r.ledger
                assert ttft_stages_us(led) == led.ttft_us
                if held == [True]:
                    waited.append((r.usage.cached_tokens, led.failovers))
            assert waited and set(waited) == {(16, 0)}, waited
        finally:
            for f in fakes:
                f.close()


def test_flood_of_prefix_blocks(honest):
    """A snapshot with more blocks than any of ours tells is not believed, said once, and does no
    harm."""
    c, want = honest
    fake = FakeWorker(c, LIES["nothing"], name="flood")
    try:
        fake.snapshots.put(wpb.Snapshot(blocks_added=range(1, 5000)))
        c.router.wait_log(r"ev=blocks_flood worker=flood added=4999 evicted=0 limit=4096",
                          10 * SLOW)
        assert c.generate(prompt="Once upon a time", max_tokens=8, **LONG).tokens == want
    finally:
        fake.close()
    c.wait_for(lambda: len(c.status().workers) == 2, "it to leave", 10 * SLOW)
