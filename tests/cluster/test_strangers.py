"""Nobody in who does not belong: each attack with plain grpcio, as somebody would who reaches
the port. docs/security.md lists them."""
import base64
import concurrent.futures
import http.client
import json
import os
import queue
import socket
import ssl
import subprocess
import threading
import time

import grpc
import proofs
import pytest
from harness import BIN, PATIENT, POCKET, SLOW, Cluster, Daemon, free_port, pb, wpb

Code = grpc.StatusCode
OK, UNAUTHENTICATED, DENIED = Code.OK, Code.UNAUTHENTICATED, Code.PERMISSION_DENIED
SECRET, WRONG = "5ecret-0123456789abcdefghijklmnop", "wr0ng!-0123456789abcdefghijklmnop"
DECODE, PREFILL, ABORT, PROVE, MULTIPLEX = (f"/tandem.v1.Worker/{m}"
                                            for m in ("Decode", "Prefill", "Abort", "Prove",
                                                      "Multiplex"))
JOIN = "/tandem.v1.Registry/Join"
WAIT_S = 20 * SLOW


@pytest.fixture(scope="module")
def secret_file(tmp_path_factory):
    return proofs.write_secret(tmp_path_factory.mktemp("secret") / "cluster", SECRET)


@pytest.fixture(scope="module")
def plain_tokens():
    with Cluster() as c:
        return c.generate(prompt="Once upon a time", max_tokens=16, temperature=0).tokens


def vocab():
    with open(os.path.join(POCKET, "config.json"), encoding="utf-8") as f:
        return json.load(f)["vocab_size"]


def hello(address, name="stranger", role="decode", layout_hash=1, **rest):
    return wpb.Hello(name=name, role=role, address=address, incarnation=77, protocol=1,
                     layout_hash=layout_hash, block_size=16, kv_blocks=64, max_model_len=512,
                     vocab=vocab(), max_seqs=8, **rest)


class Joining:
    """A Registry stream, message by message."""
    def __init__(self, channel):
        self.out = queue.SimpleQueue()
        join = channel.stream_stream(JOIN, request_serializer=wpb.WorkerMessage.SerializeToString,
                                     response_deserializer=wpb.RouterMessage.FromString)
        self.stream = join(iter(self.out.get, None), timeout=WAIT_S)

    def say(self, **message):
        self.out.put(wpb.WorkerMessage(**message))
        return self

    def hear(self):
        return next(self.stream)

    def rejected(self):
        """(code, reason) of a stream that must end without a welcome."""
        reason = ""
        try:
            for m in self.stream:
                assert m.WhichOneof("message") == "reject", m
                reason = m.reject.reason
        except grpc.RpcError as e:
            return e.code(), reason or e.details()
        raise AssertionError("the stream ended with OK")

    def close(self):
        self.out.put(None)
        self.stream.cancel()


def worker_call(port, path, request, metadata=None, creds=None, name=None):
    """(code, details, first message) of a call to a worker, or anybody."""
    target = f"127.0.0.1:{port}"
    options = [("grpc.use_local_subchannel_pool", 1)]
    with (grpc.secure_channel(target, creds, options) if creds else grpc.insecure_channel(
            target, options)) as channel:
        stream = channel.unary_stream(path, request_serializer=lambda m: m.SerializeToString(),
                                      response_deserializer=bytes)(request, timeout=WAIT_S,
                                                                   metadata=metadata)
        first = None
        try:
            first = next(stream)
            stream.cancel()
            return OK, "", first
        except StopIteration:
            return stream.code(), stream.details(), first
        except grpc.RpcError:
            return stream.code(), stream.details(), first


def decode_request(request=5, attempt=1):
    spec = wpb.SamplingSpec(top_k=0, top_p=1, repetition_penalty=1, n_logprobs=-1, max_tokens=4)
    return wpb.DecodeRequest(
        seq=wpb.Sequence(request=request, attempt=attempt, tokens=[1, 2, 3], n_prompt=3,
                         sampling=spec), local_prefill=True)


def in_stream():
    return wpb.MultiplexUp(calls=[wpb.MultiplexCall(id=1, decode=decode_request(9))])


def ports(c):
    return {
        name: int(d.wait_log(r"ev=ready .*address=127\.0\.0\.1:(\d+)").group(1))
        for name, d in c.workers.items()
    }


# ---- without an identity: loopback only, and even there nobody takes another's place
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "program, args, words",
    [("tandem-router", ["--listen", "0.0.0.0:0"], [
        "listen is 0.0.0.0:0", "Registry", "--cluster-secret-file", "--tls-worker-names",
        "--worker-listen"
    ]),
     ("tandem-router", ["--listen", "127.0.0.1:0", "--worker-listen", "[::]:0"
                        ], ["worker_listen is [::]:0", "Registry", "--cluster-secret-file"]),
     ("tandem-decode", ["--listen", "0.0.0.0:0", "--advertise", "localhost"],
      ["listen is 0.0.0.0:0", "Worker", "--cluster-secret-file", "--tls-router-names"]),
     ("tandem-prefill", ["--listen", "myhost:0"],
      ["listen is myhost:0", "Worker", "--cluster-secret-file", "--tls-router-names"]),
     ("tandem-decode", ["--transfer-host", "0.0.0.0"],
      ["transfer_host is 0.0.0.0", "KV transfers", "--cluster-secret-file", "--tls-worker-names"]),
     ("tandem-prefill", ["--transfer-host", "::", "--transfer", "tcp"
                         ], ["transfer_host is ::", "KV transfers", "--cluster-secret-file"])])
def test_ports_beyond_loopback_are_refused(program, args, words):
    done = subprocess.run([os.path.join(BIN, program), "--model", POCKET, *args],
                          capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 2, done.stderr
    assert all(w in done.stderr for w in words), done.stderr


def test_an_address_is_whose_process_answers_there():
    """A stranger names a live worker's address: the worker stays, and so does what runs on it."""
    with Cluster(**PATIENT) as c:
        real = next(w for w in c.status().workers if w.role == "decode")
        stream = c.stream(c.request(prompt="A fox", max_tokens=200, temperature=0, ignore_eos=True))
        next(stream)
        for key, reason in ((b"k" * 32, "another process"), (b"",
                                                             "belongs to a worker that lives")):
            for name in ("stranger", real.name):
                joining = Joining(c.channel).say(hello=hello(
                    real.address, name=name, layout_hash=real.layout_hash, instance_key=key))
                assert reason in joining.rejected()[1]
        # ... and one that answers at an address of its own with a key that is not the hello's
        assert sum(len(m.token_ids) for m in stream) == 199
        now = c.status()
        assert sorted(w.pid for w in now.workers) == sorted(
            d.pid for d in c.workers.values()) and now.failovers == 0
        # the worker's own process may come back, as it does when its stream broke
        c.workers["decode-0"].signal(9)
        c.start_worker("decode")
        c.wait_for(lambda: len(c.status().workers) == 2, "the next worker", WAIT_S)


def test_abort_by_counting():
    """Request numbers cannot be counted through: who reaches a worker without proof ends
    nobody's request."""
    with Cluster(**PATIENT) as c:
        stream = c.stream(c.request(prompt="A fox", max_tokens=400, temperature=0, ignore_eos=True))
        next(stream)
        for port in ports(c).values():
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                abort = channel.unary_unary(ABORT,
                                            request_serializer=wpb.AbortRequest.SerializeToString,
                                            response_deserializer=wpb.AbortResponse.FromString)
                for n in range(64):
                    abort(wpb.AbortRequest(request=n, attempt=0xffffffff), timeout=WAIT_S)
        assert sum(len(m.token_ids) for m in stream) == 399
        assert c.status().failovers == 0
        seen = {c.generate(prompt="A fox", max_tokens=2).trailing.get("x", "") for _ in range(1)}
        assert seen == {""}
        ids = [next(c.stream(c.request(prompt="A fox", max_tokens=1))).request_id for _ in range(4)]
        numbers = sorted(int(i, 16) for i in ids)
        assert len(set(numbers)) == 4 and min(b - a
                                              for a, b in zip(numbers, numbers[1:])) > 1 << 32, ids
        c.wait_idle()


# ---- with a secret
# -------------------------------------------------------------------------------------------------


def with_secret(path):
    return {
        "router_args": ["--cluster-secret-file", path],
        "worker_args": ["--cluster-secret-file", path]
    }


def test_a_cluster_with_a_secret_serves(secret_file, plain_tokens):
    """... and goes on after its router and a worker were replaced."""
    with Cluster(prefill=1, decode=2, **with_secret(secret_file)) as c:

        def same():
            r = c.generate(prompt="Once upon a time", max_tokens=16, temperature=0)
            assert (r.code, r.tokens) == (OK, plain_tokens), r.details

        same()
        c.workers["decode-0"].signal(9)
        same()
        c.router.signal(9)
        c.start_router(listen=f"127.0.0.1:{c.port}")
        del c.workers["decode-0"]
        c.wait_workers(2)
        same()
        c.wait_idle()


class FakeWorker:
    """A server that answers Prove as it is told."""
    def __init__(self, answer, creds=None):
        self.server = grpc.server(concurrent.futures.ThreadPoolExecutor(2))
        handlers = {
            "Prove": grpc.unary_unary_rpc_method_handler(
                lambda request, context: wpb.ProveResponse(mac=answer(request.nonce, context)),
                wpb.ProveRequest.FromString, wpb.ProveResponse.SerializeToString)
        }
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(
            "tandem.v1.Worker", handlers), ))
        self.port = self.server.add_secure_port(
            "127.0.0.1:0", creds) if creds else self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()

    def close(self):
        self.server.stop(None).wait()


def test_strangers_join_no_cluster_with_a_secret(secret_file):
    with Cluster(prefill=0, decode=0, **with_secret(secret_file)) as c:
        ours, nonces, answers = os.urandom(32), [], [SECRET]

        def answer(nonce, _):
            return proofs.instance(answers[0], nonces, nonce)

        fake = FakeWorker(answer)
        me = hello(f"127.0.0.1:{fake.port}", nonce=ours)
        try:
            # no nonce, as an older worker or one without a secret
            code, reason = Joining(c.channel).say(hello=hello("127.0.0.1:1")).rejected()
            assert code == UNAUTHENTICATED and "--cluster-secret-file" in reason
            # a wrong secret; a proof of nothing
            for proof in (lambda n: proofs.worker(WRONG, n, me), lambda n: b"", lambda n: n[1],
                          lambda n: proofs.worker("", n, me)):
                joining = Joining(c.channel).say(hello=me)
                theirs = joining.hear().challenge.nonce
                assert len(theirs) == 32
                joining.say(proof=wpb.Proof(mac=proof([ours, theirs])))
                code, reason = joining.rejected()
                assert code == DENIED and "does not know this router's cluster secret" in reason
            # snapshots before the proof count for nothing, and a second hello ends it
            joining = Joining(c.channel).say(hello=me).say(snapshot=wpb.Snapshot(seq=1)).say(
                drain=wpb.Drain()).say(hello=me)
            joining.hear()
            assert "said already" in joining.rejected()[1]
            # who knows the secret is let in: so that the refusals above are for what they say
            joining = Joining(c.channel).say(hello=me)
            nonces[:] = [ours, joining.hear().challenge.nonce]
            proof = proofs.worker(SECRET, nonces, me)
            welcome = joining.say(proof=wpb.Proof(mac=proof)).hear().welcome
            assert welcome.proof == proofs.router(SECRET, nonces, welcome)
            joining.close()
            # the proof of that Join, played back
            again = Joining(c.channel).say(hello=me)
            nonce = again.hear().challenge.nonce
            assert nonce != nonces[1]
            assert again.say(proof=wpb.Proof(mac=proof)).rejected()[0] == DENIED
            # the router's own proof, reflected
            again = Joining(c.channel).say(hello=me)
            again.hear()
            assert again.say(proof=wpb.Proof(mac=welcome.proof)).rejected()[0] == DENIED
            # a member that gives an address where another process answers: one that does not know
            # the secret, one of another Join
            for answers[0], shift in ((WRONG, 0), (SECRET, 1)):
                joining = Joining(c.channel).say(hello=me)
                nonces[:] = [ours, joining.hear().challenge.nonce]
                proof = proofs.worker(SECRET, nonces, me)
                if shift:
                    nonces[1] = os.urandom(32)
                reason = joining.say(proof=wpb.Proof(mac=proof)).rejected()[1]
                assert "another process" in reason
        finally:
            fake.close()
        assert "worker_joined worker=stranger" in c.router.log()
        c.wait_for(lambda: not c.status().workers, "nobody left", WAIT_S)


def test_strangers_hide_no_refused_member(secret_file):
    """Who has not proved the secret takes no place from a worker that has, in the list of those
    that were refused, adds nothing to what it was refused for, and learns nothing of the model."""
    with Cluster(prefill=0, decode=0, **with_secret(secret_file)) as c:
        ours = os.urandom(32)
        me = hello("127.0.0.1:1", name="member", nonce=ours, pid=4711)
        me.vocab += 1
        joining = Joining(c.channel).say(hello=me)
        proof = proofs.worker(SECRET, [ours, joining.hear().challenge.nonce], me)
        code, reason = joining.say(proof=wpb.Proof(mac=proof)).rejected()
        assert code == Code.FAILED_PRECONDITION and "vocabulary" in reason
        for name in ["member"] * 3 + [f"stranger-{i}" for i in range(20)]:
            other = hello("127.0.0.1:1", name=name, pid=4711)
            other.vocab += 1
            code, reason = Joining(c.channel).say(hello=other).rejected()
            assert code == UNAUTHENTICATED and "vocabulary" not in reason
        told = c.status().refused_workers
        assert len(told) == 8
        assert [(x.name, x.times_for_good, "vocabulary" in x.reason)
                for x in told if x.proved] == [("member", 1, True)]


class FakeRouter:
    """A Registry that greets the first worker as `secret` tells it (None: it proves nothing),
    and keeps its stream open until it has told so many snapshots."""
    def __init__(self, secret, challenge=True, n_snapshots=1 << 40):
        self.secret, self.challenge, self.n_snapshots = secret, challenge, n_snapshots
        self.hello, self.nonces, self.heard, self.proof = None, None, [], None
        self.seqs = []  # of each stream's snapshots
        self.joined, self.stop = threading.Event(), threading.Event()
        self.server = grpc.server(concurrent.futures.ThreadPoolExecutor(4))
        handlers = {
            "Join": grpc.stream_stream_rpc_method_handler(self.join, wpb.WorkerMessage.FromString,
                                                          wpb.RouterMessage.SerializeToString)
        }
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(
            "tandem.v1.Registry", handlers), ))
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()

    def join(self, messages, _context):
        self.hello = next(messages).hello
        nonces = [self.hello.nonce, os.urandom(32)]
        if self.challenge:
            yield wpb.RouterMessage(challenge=wpb.Challenge(nonce=nonces[1]))
            self.proof = next(messages).proof.mac
        welcome = wpb.Welcome(router_incarnation=3, protocol=1, prefix_seed=4)
        if self.secret:
            welcome.proof = proofs.router(self.secret, nonces, welcome)
        yield wpb.RouterMessage(welcome=welcome)
        self.nonces = nonces
        self.seqs.append([])
        self.joined.set()
        for m in messages:
            self.heard.append(m.WhichOneof("message"))
            if self.heard[-1] == "snapshot":
                self.seqs[-1].append(m.snapshot.seq)
                if len(self.seqs[-1]) == self.n_snapshots:
                    return

    def close(self):
        self.server.stop(None).wait()


def lone_worker(tmp_path, router_port, *args):
    return Daemon("decode", "tandem-decode", [
        "--model", POCKET, "--router", f"127.0.0.1:{router_port}", "--kv-memory", "4MiB",
        "--threads", 1, *args
    ], str(tmp_path))


def end(daemon):
    daemon.signal(15)
    assert daemon.wait_exit(30 * SLOW) == 0
    daemon.check_sanitizers()


@pytest.mark.parametrize("secret, challenge, reason",
                         [(None, False, "it proves no cluster secret"),
                          (WRONG, True, "does not know this worker's cluster secret"),
                          (SECRET, False, "does not know this worker's cluster secret")])
def test_a_worker_believes_no_strange_router(tmp_path, secret_file, secret, challenge, reason):
    """It leaves with the reason in its log, and has told it nothing but its hello. (SECRET
    without a challenge: over no nonce of the router's.)"""
    router = FakeRouter(secret, challenge)
    worker = lone_worker(tmp_path, router.port, "--cluster-secret-file", secret_file)
    try:
        assert reason in worker.wait_log(r"ev=router_refused .*").group(0)
        assert "snapshot" not in router.heard and "ev=registered" not in worker.log()
        end(worker)
    finally:
        worker.process.kill()
        router.close()


def test_a_new_stream_counts_its_snapshots_anew(tmp_path):
    """The numbers of a worker that had been up for hours went on in its next stream, and the router
    that it had just joined took them for nonsense."""
    router = FakeRouter(None, challenge=False, n_snapshots=3)
    worker = lone_worker(tmp_path, router.port)
    try:
        deadline = time.monotonic() + 30 * SLOW
        while len(router.seqs) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert router.seqs[:2] == [[1, 2, 3]] * 2
        end(worker)
    finally:
        worker.process.kill()
        router.close()


def test_calls_of_strangers(tmp_path, secret_file):
    """A worker takes calls of the router it has joined, each once; nobody computes on it for
    free, and nobody ends what is not theirs."""
    router = FakeRouter(SECRET)
    worker = lone_worker(tmp_path, router.port, "--cluster-secret-file", secret_file)
    try:
        assert router.joined.wait(30 * SLOW)
        worker.wait_log("ev=registered")
        assert router.proof == proofs.worker(SECRET, router.nonces, router.hello)
        port = int(router.hello.address.rsplit(":", 1)[1])
        n = router.nonces
        abort = wpb.AbortRequest(request=5, attempt=1)
        for path, request in ((DECODE, decode_request()), (ABORT, abort),
                              (PREFILL, wpb.PrefillRequest(seq=decode_request().seq)),
                              (PROVE, wpb.ProveRequest(nonce=n[0])), (MULTIPLEX, in_stream())):
            code, why, first = worker_call(port, path, request)
            assert code == UNAUTHENTICATED and first is None and "cluster secret" in why, (path,
                                                                                           code,
                                                                                           why)
        good = proofs.call(SECRET, n, DECODE, 5, 1, 10)
        value = good[0][1]
        other = [n[0], n[1][:8] + os.urandom(24)]
        for what, metadata in (("no proof", (("tandem-proof", "x"), )),
                               ("too long", (("tandem-proof", value + "0"), )),
                               ("wrong secret", proofs.call(WRONG, n, DECODE, 5, 1, 11)),
                               ("no secret", proofs.call(
                                   "", n, DECODE, 5, 1,
                                   11)), ("another method's", proofs.call(
                                       SECRET, n, ABORT, 5, 1,
                                       11)), ("another Join's",
                                              proofs.call(SECRET, other, DECODE, 5, 1,
                                                          11)), ("another request's",
                                                                 proofs.call(
                                                                     SECRET, n, DECODE, 6, 1,
                                                                     12)), ("another attempt's",
                                                                            proofs.call(
                                                                                SECRET, n, DECODE,
                                                                                5, 2, 13)),
                               ("counter 0", proofs.call(
                                   SECRET, n, DECODE, 5,
                                   1, 0)), ("a changed bit",
                                            (("tandem-proof",
                                              value[:-1] + ("0" if value[-1] != "0" else "1")), ))):
            code, why, first = worker_call(port, DECODE, decode_request(), metadata)
            assert code in (UNAUTHENTICATED, DENIED) and first is None, (what, code, why)
        code, why, first = worker_call(port, DECODE, decode_request(), good)
        assert code == OK and first, why  # ... and the right one is taken
        code, why, _ = worker_call(port, DECODE, decode_request(), good)
        assert code == DENIED and "used before" in why  # once
        # The stream has a proof too, which is not one of a request's.
        for metadata in (proofs.call(SECRET, n, MULTIPLEX, 5, 1, 14), good,
                         proofs.call(SECRET, n, DECODE, 0, 0, 15)):
            code, why, first = worker_call(port, MULTIPLEX, in_stream(), metadata)
            assert code == DENIED and first is None, (code, why)
        stream = proofs.call(SECRET, n, MULTIPLEX, 0, 0, 16)
        code, why, _ = worker_call(port, MULTIPLEX, in_stream(), stream)
        assert code == OK, why
        code, why, _ = worker_call(port, MULTIPLEX, in_stream(), stream)
        assert code == DENIED and "used before" in why
        code, why, _ = worker_call(port, ABORT, abort, proofs.call(SECRET, n, ABORT, 5, 1, 20))
        assert code == OK, why
        assert SECRET not in worker.log()
        end(worker)
    finally:
        worker.process.kill()
        router.close()


class Tap:
    """A proxy that keeps every byte that passes."""
    def __init__(self, port):
        self.port_behind, self.bytes, self.lock = port, bytearray(), threading.Lock()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                a, _ = self.listener.accept()
            except OSError:
                return
            b = socket.create_connection(("127.0.0.1", self.port_behind))
            for pair in ((a, b), (b, a)):
                threading.Thread(target=self.pump, args=pair, daemon=True).start()

    def pump(self, source, sink):
        try:
            while data := source.recv(65536):
                with self.lock:
                    self.bytes += data
                sink.sendall(data)
        except OSError:
            pass
        finally:
            for s in (source, sink):
                try:
                    s.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

    def close(self):
        self.listener.close()


def test_the_secret_is_never_on_the_wire(secret_file):
    """What goes between a worker and its router, and from the router to a worker, recorded:
    neither the secret, nor its usual other spellings, nor a log line."""
    with Cluster(prefill=0, decode=0, mode="colocated", **with_secret(secret_file)) as c:
        tap = Tap(c.port)
        try:
            c.start_worker("decode", args=["--router", f"127.0.0.1:{tap.port}"])
            assert c.generate(prompt="A fox", max_tokens=3).code == OK
            c.wait_for(lambda: len(tap.bytes) > 1000, "bytes through the tap", WAIT_S)
            assert b"decode-0" in tap.bytes  # it is the hello that was recorded
            for spelling in (SECRET.encode(), SECRET.encode().hex().encode(),
                             base64.b64encode(SECRET.encode())[:-4], SECRET[:12].encode()):
                assert spelling not in bytes(tap.bytes)
            for d in c.all:
                assert SECRET not in d.log() and SECRET.encode() not in open(
                    f"/proc/{d.pid}/cmdline", "rb").read()
            c.wait_idle()
        finally:
            tap.close()


# ---- what the status tells whom
# -------------------------------------------------------------------------------------------------


def status_of(channel, metadata=None):
    call = channel.unary_unary("/tandem.v1.Inference/Status",
                               request_serializer=pb.StatusRequest.SerializeToString,
                               response_deserializer=pb.StatusResponse.FromString)
    return call(pb.StatusRequest(), timeout=WAIT_S, metadata=metadata)


def told(s):
    """What is told of workers, field by field."""
    return [{f.name: v for f, v in w.ListFields()} for w in s.workers]


def test_status_tells_clients_no_more_than_they_need(secret_file, tmp_path):
    with Cluster(**with_secret(secret_file)) as c:
        s = status_of(c.channel)
        assert s.withheld and len(s.challenge) == 32 and s.model
        assert sorted(told(s), key=str) == [{"role": "decode", "state": "ready"},
                                            {"role": "prefill", "state": "ready"}]
        changed = bytes([s.challenge[0] ^ 1]) + s.challenge[1:]  # its expiry, forged
        for bad in (proofs.status(WRONG, s.challenge), proofs.status(
                "", s.challenge), proofs.status(
                    SECRET,
                    os.urandom(32)), proofs.status(SECRET, changed), proofs.status(
                        SECRET, bytes(32)), (("tandem-status-proof", "x"), )):
            assert status_of(c.channel, bad).withheld, bad
        s = status_of(c.channel, proofs.status(SECRET, s.challenge))
        assert not s.withheld and not s.challenge and {w.name for w in s.workers} == {
            "prefill-0", "decode-0"
        } and all(w.address and w.pid for w in s.workers)
        # the operator's command, with and without
        at = [os.path.join(BIN, "tandem"), "status", "--server", f"127.0.0.1:{c.port}"]
        env = {k: v for k, v in os.environ.items() if not k.startswith("TANDEM_")}
        out = subprocess.run(at, capture_output=True, text=True, timeout=WAIT_S, check=True,
                             env=env).stdout
        assert "--cluster-secret-file" in out and "prefill-0" not in out and "127.0.0.1" not in out
        for args, more in (([*at, "--cluster-secret-file",
                             secret_file], {}), (at, {"TANDEM_CLUSTER_SECRET_FILE": secret_file})):
            out = subprocess.run(args, capture_output=True, text=True, timeout=WAIT_S, check=True,
                                 env={**env, **more}).stdout
            assert "prefill-0" in out and "127.0.0.1" in out and SECRET not in out
        other = proofs.write_secret(tmp_path / "other", WRONG)
        out = subprocess.run([*at, "--cluster-secret-file", other], capture_output=True, text=True,
                             timeout=WAIT_S, check=True, env=env).stdout
        assert "prefill-0" not in out
        doctor = [
            os.path.join(BIN, "tandem"), "doctor", "--local=false", "--router",
            f"127.0.0.1:{c.port}"
        ]
        done = subprocess.run(doctor, capture_output=True, text=True, timeout=WAIT_S, check=False,
                              env=env)
        assert done.returncode == 1 and "--cluster-secret-file" in done.stdout
        done = subprocess.run([*doctor, "--cluster-secret-file", secret_file], capture_output=True,
                              text=True, timeout=WAIT_S, check=False, env=env)
        assert "prefill-0" in done.stdout and "decode-0" in done.stdout, done.stdout


# ---- a port of their own for workers
# -------------------------------------------------------------------------------------------------


def test_workers_have_a_port_of_their_own(secret_file, plain_tokens):
    port = free_port()
    with Cluster(
            prefill=0, decode=0, router_args=[
                "--cluster-secret-file", secret_file, "--worker-listen", f"127.0.0.1:{port}"
            ], worker_args=["--cluster-secret-file", secret_file, "--router",
                            f"127.0.0.1:{port}"]) as c:
        assert int(c.router.wait_log(r"ev=ready .*worker_port=(\d+)").group(1)) == port
        c.start_worker("prefill")
        c.start_worker("decode")
        r = c.generate(prompt="Once upon a time", max_tokens=16, temperature=0)
        assert (r.code, r.tokens) == (OK, plain_tokens), r.details
        assert Joining(c.channel).say(
            hello=hello("127.0.0.1:1")).rejected()[0] == grpc.StatusCode.UNIMPLEMENTED
        code, _, _ = worker_call(port, "/tandem.v1.Inference/Models", pb.ModelsRequest())
        assert code == grpc.StatusCode.UNIMPLEMENTED
        code, _, _ = worker_call(port, "/tandem.v1.Inference/Generate", c.request(prompt="x"))
        assert code == grpc.StatusCode.UNIMPLEMENTED
        c.wait_idle()


# ---- with certificates
# -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certs(tmp_path_factory):
    """One CA; a router's, a worker's and a client's certificate by name, and one of the worker's
    names that is for clients only (EKU)."""
    d = tmp_path_factory.mktemp("certs")

    def openssl(*args):
        subprocess.run(["openssl", *args], check=True, capture_output=True, cwd=d)

    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "30", "-subj",
            "/CN=ca", "-addext", "basicConstraints=critical,CA:TRUE", "-addext",
            "keyUsage=keyCertSign")
    here, both = "IP:127.0.0.1,DNS:localhost", "serverAuth,clientAuth"
    for name, alt, usage in (("router", f"{here},DNS:r0.routers.test",
                              both), ("worker", f"{here},DNS:w0.workers.test",
                                      both), ("client", f"{here},DNS:c0.clients.test", both),
                             ("operator", "DNS:night.operators.test",
                              "clientAuth"), ("half", f"{here},DNS:w1.workers.test", "clientAuth"),
                             ("server", f"{here},DNS:w2.workers.test", "serverAuth")):
        (d / "ext").write_text(
            f"basicConstraints=CA:FALSE\nsubjectAltName={alt}\nextendedKeyUsage={usage}\n")
        openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj",
                "/CN=w0.workers.test")  # a CN is nobody's identity
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key",
                "-CAcreateserial", "-days", "30", "-extfile", "ext", "-out", f"{name}.pem")
    return d


NAMES = ["--tls-worker-names", "*.workers.test", "--tls-router-names", "*.routers.test"]


def tls_args(certs, name):
    return [
        "--tls-cert", certs / f"{name}.pem", "--tls-key", certs / f"{name}.key", "--tls-ca",
        certs / "ca.pem", *NAMES
    ]


def creds(certs, name):
    return grpc.ssl_channel_credentials(*((certs / f).read_bytes()
                                          for f in ("ca.pem", f"{name}.key", f"{name}.pem")))


def test_certificates_by_role(certs, plain_tokens):
    """One CA signs all: a client's certificate joins nothing and calls no worker, a worker's
    calls no worker, a server's only is no client's."""
    with Cluster(router_args=tls_args(certs, "router"), worker_args=tls_args(certs, "worker"),
                 tls=creds(certs, "client")) as c:
        r = c.generate(prompt="Once upon a time", max_tokens=16, temperature=0)
        assert (r.code, r.tokens) == (OK, plain_tokens), r.details
        code, why = Joining(c.channel).say(hello=hello("127.0.0.1:1")).rejected()
        assert code == DENIED and "tls_worker_names" in why
        for port in ports(c).values():
            for who in ("client", "worker", "half"):
                for path, request in ((DECODE, decode_request()), (ABORT,
                                                                   wpb.AbortRequest(request=1)),
                                      (PROVE, wpb.ProveRequest(nonce=b"n" * 32))):
                    code, why, first = worker_call(port, path, request, creds=creds(certs, who))
                    assert code == DENIED and "tls_router_names" in why and first is None, (who,
                                                                                            path,
                                                                                            code,
                                                                                            why)
            code, _, _ = worker_call(port, ABORT, wpb.AbortRequest(request=1), creds=creds(
                certs, "server"))
            assert code == grpc.StatusCode.UNAVAILABLE  # extendedKeyUsage: refused in the handshake
            code, why, _ = worker_call(port, ABORT, wpb.AbortRequest(request=1), creds=creds(
                certs, "router"))
            assert code == OK, why
        c.wait_idle()


def status_by_http(certs, who, port):
    """What the page shows of workers to a browser with that certificate."""
    tls = ssl.create_default_context(cafile=certs / "ca.pem")
    tls.load_cert_chain(certs / f"{who}.pem", certs / f"{who}.key")
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=30 * SLOW, context=tls)
    try:
        connection.request("GET", "/v1/status")
        r = connection.getresponse()
        assert r.status == 200
        status = json.loads(r.read())
    finally:
        connection.close()
    return status["workers"], status["withheld"]


def test_status_by_certificate(certs):
    with Cluster(
            prefill=0, mode="colocated",
            router_args=[*tls_args(certs, "router"), "--http-listen", "127.0.0.1:0",
                         "--tls-operator-names", "*.operators.test"],
            worker_args=tls_args(certs, "worker"), tls=creds(certs, "client")) as c:
        assert told(c.status()) == [{"role": "decode", "state": "ready"}]
        port = int(c.router.wait_log(r"ev=http_ready .*port=(\d+) tls=1").group(1))
        workers, withheld = status_by_http(certs, "client", port)
        assert withheld and [(w["role"], w["state"]) for w in workers] == [("decode", "ready")]
        assert not workers[0].get("name") and not workers[0].get("address")
        for who in ("operator", "worker", "router"):
            (w, ), withheld = status_by_http(certs, who, port)
            assert not withheld and w["name"] == "decode-0" and w["kv_blocks"] > 0, (who, w)
            with grpc.secure_channel(f"127.0.0.1:{c.port}", creds(certs, who)) as channel:
                s = status_of(channel)
                assert not s.withheld and s.workers[0].name == "decode-0", who


def test_a_client_is_no_worker_to_the_router(certs):
    """A member's hello gives the address of a server that shows a client's certificate: the
    router sends it nothing, not even a call."""
    asked = []
    with Cluster(prefill=0, decode=0, router_args=tls_args(certs, "router"), tls=creds(
            certs, "client")) as c:
        with grpc.secure_channel(f"127.0.0.1:{c.port}", creds(certs, "worker")) as channel:
            for who, joins in (("client", False), ("half", False), ("router", False), ("worker",
                                                                                       True)):

                def answer(nonce, _):
                    asked.append(who)
                    return proofs.instance_of_key(b"k" * 32, nonce)

                pem = [(certs / f).read_bytes() for f in (f"{who}.key", f"{who}.pem")]
                fake = FakeWorker(
                    answer,
                    grpc.ssl_server_credentials([tuple(pem)], (certs / "ca.pem").read_bytes(),
                                                True))
                joining = Joining(channel).say(
                    hello=hello(f"127.0.0.1:{fake.port}", instance_key=b"k" * 32))
                if joins:
                    assert joining.hear().WhichOneof("message") == "welcome"
                    joining.close()
                else:
                    assert "dialled back" in joining.rejected()[1], who
                fake.close()
        assert asked == ["worker"]
        assert "ev=tls_peer_refused" in c.router.log()


def test_a_client_is_no_router_to_a_worker(certs, tmp_path):
    """A worker that is sent to a server with a client's certificate tells it nothing."""
    seen = []
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(2))

    def join(messages, _):
        seen.append(next(messages))
        yield wpb.RouterMessage()

    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(
        "tandem.v1.Registry", {
            "Join": grpc.stream_stream_rpc_method_handler(join, wpb.WorkerMessage.FromString,
                                                          wpb.RouterMessage.SerializeToString)
        }), ))
    pem = [(certs / f).read_bytes() for f in ("client.key", "client.pem")]
    port = server.add_secure_port(
        "127.0.0.1:0",
        grpc.ssl_server_credentials([tuple(pem)], (certs / "ca.pem").read_bytes(), True))
    server.start()
    worker = lone_worker(tmp_path, port, *tls_args(certs, "worker"))
    try:
        worker.wait_log("ev=tls_peer_refused")
        worker.wait_log("ev=router_lost")
        assert not seen
        end(worker)
    finally:
        worker.process.kill()
        server.stop(None).wait()


@pytest.mark.parametrize(
    "args, words",
    [(["--tls-worker-names", "*.workers.test"], ["tls_worker_names", "tls_ca"]),
     (["--cluster-secret-file", "/nowhere/secret"], ["cluster_secret_file", "/nowhere/secret"]),
     (["--cluster-secret-file", os.devnull], ["cluster_secret_file", "/dev/null"])])
def test_identities_that_cannot_be(args, words):
    for program in ("tandem-router", "tandem-decode"):
        done = subprocess.run([os.path.join(BIN, program), "--model", POCKET, *args],
                              capture_output=True, text=True, timeout=WAIT_S, check=False)
        assert done.returncode in (1, 2) and all(w in done.stderr for w in words), done.stderr


def test_secrets_others_can_read_are_refused(tmp_path):
    path = proofs.write_secret(tmp_path / "s", SECRET, 0o644)
    done = subprocess.run(
        [os.path.join(BIN, "tandem-router"), "--model", POCKET, "--cluster-secret-file", path],
        capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 2 and path in done.stderr and SECRET not in done.stderr, done.stderr
