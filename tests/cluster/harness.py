"""Real daemons on loopback, driven by plain grpcio: what the cluster tests stand on.

    with Cluster(prefill=2, decode=2) as c:
        r = c.generate(prompt="Once upon a time", max_tokens=16, temperature=0)
        assert r.code == grpc.StatusCode.OK

Every wait has a deadline. On exit each daemon still running is drained by SIGTERM and must exit
0; sanitizer reports in a log fail the test."""
import contextlib
import dataclasses
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import grpc
import proofs

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BIN = os.environ.get("TANDEM_BIN", os.path.join(ROOT, "build", "release", "bin"))
POCKET = os.environ.get("TANDEM_TEST_MODEL", os.path.join(ROOT, "models", "pocket"))
DATA = os.environ.get("TANDEM_DATA", os.path.join(ROOT, "..", "shared", "data"))
VERBS_FAKE = os.path.join(os.path.dirname(BIN), "lib",
                          "libtandem_verbs_fake.so")  # RDMA devices in memory
SHORT = os.environ.get("TANDEM_TEST_SHORT") == "1"
LONG = os.environ.get("TANDEM_TEST_LONG") == "1"
# Sanitizer builds on a shared core are many times slower: deadlines that catch hangs are stretched,
# none that a test asserts on.
SLOW = 6 if SHORT or os.environ.get("TANDEM_TEST_SANITIZER") else 1
# For one command. gRPC and the other libraries are not built with ThreadSanitizer.
TSAN_ENV = {
    "TSAN_OPTIONS":
    ":".join([*filter(None, [os.environ.get("TSAN_OPTIONS")]), "ignore_noninstrumented_modules=1"])
}
START_S = 120 * SLOW  # for what hangs: a starved machine has taken more than 30 s
# For a Cluster whose test is not of silence: on a busy machine a daemon may go without a processor
# for longer than the harness's usual second.
PATIENT = dict(worker_timeout_ms=20000, worker_args=["--peer-timeout-ms", 20000])
sys.path.insert(0,
                os.environ.get("TANDEM_PYTHON_STUBS", os.path.join(os.path.dirname(BIN), "python")))

from tandem.v1 import inference_pb2 as pb  # noqa: E402
from tandem.v1 import worker_pb2 as wpb  # noqa: E402

SANITIZER = re.compile(
    r"ERROR: (Address|Leak|Thread|UndefinedBehavior)Sanitizer|WARNING: ThreadSanitizer|runtime "
    r"error:")


def one_process(requests, model=POCKET, dtype="bf16", *, concurrency=1, chunk=512, order=0,
                prefix=0, kv="16MiB", tp=1, device="cpu", kv_dtype="auto", library=None):
    """The oracle: ([(tokens, logprobs)] of the requests, preemptions) of one engine in one
    process."""
    args = [model, dtype, concurrency, chunk, order, prefix, kv, tp, device, kv_dtype]
    env = dict(os.environ, TANDEM_CUDA_LIBRARY=library) if library else None
    done = subprocess.run([os.path.join(BIN, "one_process"), *map(str, args)],
                          input=json.dumps(requests), capture_output=True, text=True,
                          timeout=600 * SLOW, check=False, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    return [(r["tokens"], r["logprobs"]) for r in result["results"]], result["preemptions"]


def as_result(r):
    """What a cluster gave, as one_process tells it."""
    assert r.code == grpc.StatusCode.OK, (r.code, r.details)
    return r.tokens, [lp for lp, _ in r.logprobs]


def ttft_stages_us(ledger):
    """The stages that add up to the TTFT (I6)."""
    return (ledger.router_queue_us + ledger.reserve_us + ledger.prefill_queue_us +
            ledger.prefill_us + ledger.rpc_us)


def check_results(results, want):
    for i, (r, expected) in enumerate(zip(results, want)):
        assert as_result(r) == expected, f"request {i} differs"
    assert len(results) == len(want)


def free_port(n=1):
    """A port of loopback for a program that cannot be given port 0: of n in a row the first. Below
    the kernel's ephemeral range: one of that range may be given to a connection or to another
    test's port 0 before the program binds it. A test that needs several asks once: what it was
    given before is free until somebody binds it, and may be given again."""
    with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as f:
        first_ephemeral = int(f.read().split()[0])
    while True:
        port = random.randrange(min(10000, first_ephemeral // 2), first_ephemeral - n + 1)
        try:
            for i in range(n):
                with socket.socket() as s:
                    s.bind(("127.0.0.1", port + i))
            return port
        except OSError:
            pass  # somebody's


def nap(begin):
    """Between two looks at what is waited for since `begin`: a tenth of the wait so far, so that
    looking does not take the time of what is looked at."""
    time.sleep(min(max((time.monotonic() - begin) / 10, 0.01), 0.2))


@dataclasses.dataclass
class Result:
    code: grpc.StatusCode
    details: str
    tokens: list
    text: str
    logprobs: list
    finish: int
    usage: object
    ledger: object
    seed: int
    stop_reason: str
    trailing: dict
    n_messages: int


class Daemon:
    """One process; its stderr goes to a file that assertion messages quote."""
    def __init__(self, name, program, args, log_dir, env=None):
        self.name, self.log_path = name, os.path.join(log_dir, f"{name}-{time.monotonic_ns()}.log")
        full_env = dict(os.environ)
        full_env.setdefault("TSAN_OPTIONS", "ignore_noninstrumented_modules=1")
        full_env.update(env or {})
        if "TANDEM_VERBS_FAKE" in full_env:
            full_env.setdefault("TANDEM_VERBS_LIBRARY", VERBS_FAKE)
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen([os.path.join(BIN, program), *map(str, args)],
                                            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                            env=full_env)
        self.stopped = False
        self.logs_json = "--log-format" in args

    @property
    def pid(self):
        return self.process.pid

    def log(self):
        with open(self.log_path, encoding="utf-8", errors="replace") as f:
            text = f.read()
        if not self.logs_json:
            return text
        # told as logfmt, so that what waits for an event does not care
        return "".join(
            " ".join(f"{k}={v}" for k, v in json.loads(line).items()) + "\n"
            for line in text.splitlines(keepends=True) if line.endswith("}\n"))

    def wait_log(self, pattern, timeout=None):
        """First match of the pattern in the log; fails when the process ends or time runs out
        first."""
        begin = time.monotonic()
        deadline = begin + (timeout or START_S)
        while True:
            m = re.search(pattern, self.log())
            if m:
                return m
            assert self.process.poll(
            ) is None, f"{self.name} ended with {self.process.returncode}:\n{self.log()[-4000:]}"
            assert time.monotonic(
            ) < deadline, f"{self.name}: no {pattern!r} in time:\n{self.log()[-4000:]}"
            nap(begin)

    def signal(self, sig):
        self.process.send_signal(sig)
        if sig == signal.SIGSTOP:
            self.stopped = True
            self._wait_stopped()
        if sig == signal.SIGCONT:
            self.stopped = False
        if sig == signal.SIGKILL:
            self.process.wait(20 * SLOW)  # else it may still count as alive when the cluster stops

    def _wait_stopped(self):
        """The kernel stops a process when one of its threads runs next: on a busy machine the
        others may answer until then."""
        begin = time.monotonic()
        tasks = f"/proc/{self.process.pid}/task"
        while self.process.poll() is None:
            try:
                states = set()
                for tid in os.listdir(tasks):
                    with open(f"{tasks}/{tid}/stat", encoding="utf-8", errors="replace") as f:
                        states.add(f.read().rsplit(")", 1)[1].split()[0])
            except (FileNotFoundError, ProcessLookupError):
                continue  # a thread ended meanwhile
            if states <= set("TtZX"):
                return
            assert time.monotonic() - begin < 20 * SLOW, f"{self.name} is not stopped: {states}"
            nap(begin)

    def wait_exit(self, timeout):
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(
                f"{self.name} did not exit within {timeout} s:\n{self.log()[-4000:]}") from None

    def alive(self):
        return self.process.poll() is None

    def check_sanitizers(self):
        m = SANITIZER.search(self.log())
        assert not m, (f"{self.name}: sanitizer "
                       f"report:\n{self.log()[max(0, m.start() - 200):][:6000]}")


def peak_bytes(daemon):
    """The most memory that it has had."""
    with open(f"/proc/{daemon.pid}/status", encoding="utf-8") as f:
        return int(re.search(r"VmHWM:\s+(\d+) kB", f.read()).group(1)) * 1024


def pocket_with(folder, changes):
    """models/pocket in `folder`, a Path, by links; changes: name of a JSON file -> what changes its
    value. Returns the folder's name."""
    for name in os.listdir(POCKET):
        if name not in changes:
            os.symlink(os.path.join(POCKET, name), folder / name)
            continue
        with open(os.path.join(POCKET, name), encoding="utf-8") as f:
            value = json.load(f)
        changes[name](value)
        (folder / name).write_text(json.dumps(value))
    return str(folder)


class Cluster:
    def __init__(self, prefill=1, decode=1, model=POCKET, mode="pd", router_args=(), worker_args=(),
                 envs=None, kv_memory="16MiB", dtype="f32", worker_timeout_ms=None, tls=None,
                 other_routers=()):
        """other_routers: Clusters without workers of their own, whose routers the workers join,
        too."""
        self.other_routers = list(other_routers)
        self.model, self.mode, self.kv_memory, self.dtype = model, mode, kv_memory, dtype
        self.router_args, self.worker_args, self.envs, self.tls = list(router_args), list(
            worker_args), envs or {}, tls
        self.n = {"prefill": prefill, "decode": decode}
        self.worker_timeout_ms = worker_timeout_ms or 1000 * SLOW
        self.dir = tempfile.TemporaryDirectory(prefix="tandem-test-")
        self.all, self.workers, self.router, self.channel = [], {}, None, None
        self.next_index = {"prefill": 0, "decode": 0}

    # --- life
    # ---------------------------------------------------------------------------------------------

    def __enter__(self):
        try:
            self.start_router()
            for role, n in self.n.items():
                for _ in range(n):
                    self.start_worker(role, wait=False)
            self.wait_workers(sum(self.n.values()))
        except BaseException:
            self._kill_all()
            raise
        return self

    def __exit__(self, exc_type, exc, tb):
        if self.channel:
            self.channel.close()
        if exc_type:
            for d in self.all:
                sys.stderr.write(f"--- {d.name} (exit {d.process.poll()})\n{d.log()[-3000:]}\n")
            self._kill_all()
        else:
            self.stop()
        self.dir.cleanup()

    def _kill_all(self):
        for d in self.all:
            if d.alive():
                d.process.kill()
                d.process.wait()

    def stop(self):
        """SIGTERM: workers, then the router; each exits 0 and no log holds a sanitizer report."""
        try:
            workers = [d for d in self.workers.values() if d.alive()]
            for d in workers:
                if d.stopped:
                    d.signal(signal.SIGCONT)
                d.signal(signal.SIGTERM)
            for d in workers:
                status = d.wait_exit(20 * SLOW)
                # One that has killed itself at a fault point may still be dying when it is looked
                # for above.
                expected = -signal.SIGKILL if re.search(
                    rf"ev=fault_fires .*signal={int(signal.SIGKILL)}\b", d.log()) else 0
                assert status == expected, f"{d.name} exit {status}:\n{d.log()[-4000:]}"
            if self.router.alive():
                self.router.signal(signal.SIGTERM)
                assert self.router.wait_exit(
                    20 *
                    SLOW) == 0, ("router exit "
                                 f"{self.router.process.returncode}:\n{self.router.log()[-4000:]}")
            for d in self.all:
                d.check_sanitizers()
        finally:
            self._kill_all()

    def start_router(self, listen="127.0.0.1:0", env=None):
        args = [
            "--model", self.model, "--listen", listen, "--mode", self.mode, "--worker-timeout-ms",
            self.worker_timeout_ms, "--drain-timeout-ms", 5000 * SLOW, "--queue-timeout-ms",
            30000 * SLOW, *self.router_args
        ]
        self.router = Daemon("router", "tandem-router", args, self.dir.name, env
                             or self.envs.get("router"))
        self.all.append(self.router)
        self.port = int(self.router.wait_log(r"ev=ready .*port=(\d+)").group(1))
        self.connect()

    def connect(self):
        if self.channel:
            self.channel.close()
        options = [("grpc.max_receive_message_length", 256 << 20),
                   ("grpc.max_send_message_length", 256 << 20),
                   ("grpc.use_local_subchannel_pool", 1)]
        target = f"127.0.0.1:{self.port}"
        self.channel = grpc.secure_channel(
            target, self.tls, options) if self.tls else grpc.insecure_channel(target, options)

    def start_worker(self, role, wait=True, env=None, args=()):
        i = self.next_index[role]
        self.next_index[role] += 1
        name = f"{role}-{i}"
        full = [
            "--name", name, "--model", self.model, "--router",
            ",".join(f"127.0.0.1:{c.port}" for c in [self, *self.other_routers]), "--dtype",
            self.dtype, "--threads", 1, "--kv-memory", self.kv_memory, "--drain-timeout-ms",
            5000 * SLOW, "--peer-timeout-ms", 1000 * SLOW, *self.worker_args, *args
        ]
        d = Daemon(name, f"tandem-{role}", full, self.dir.name, env or self.envs.get(name))
        self.all.append(d)
        self.workers[name] = d
        if wait:
            self.wait_for(
                lambda: any(w.name == name and w.state == "ready" for w in self.status().workers),
                f"{name} to join", START_S)
        return d

    def wait_workers(self, n):
        def joined():
            for d in self.workers.values():
                assert d.alive(), f"{d.name} ended with {d.process.returncode}:\n{d.log()[-4000:]}"
            return sum(w.state == "ready" for w in self.status().workers) == n

        self.wait_for(joined, f"{n} workers", START_S)

    # --- state
    # ---------------------------------------------------------------------------------------------

    @staticmethod
    def wait_for(condition, what, timeout):
        begin = time.monotonic()
        deadline = begin + timeout
        last = None
        while True:
            try:
                if condition():
                    return
                last = None
            except grpc.RpcError as e:
                last = e
            assert time.monotonic() < deadline, f"no {what} within {timeout} s ({last})"
            nap(begin)

    def status(self):
        """As an operator sees it: with the router's cluster secret when it has one."""
        path = "/tandem.v1.Inference/Status"
        s = self.unary(path, pb.StatusRequest(), pb.StatusResponse, timeout=10 * SLOW)
        for _ in range(5):  # a challenge holds for 10 s, which a starved machine may take to answer
            if not s.withheld or "--cluster-secret-file" not in self.router_args:
                break
            with open(self.router_args[self.router_args.index("--cluster-secret-file") + 1],
                      encoding="ascii") as f:
                proof = proofs.status(f.readline().strip(), s.challenge)
            s = self.unary(path, pb.StatusRequest(), pb.StatusResponse, timeout=10 * SLOW,
                           metadata=proof)
            assert not s.withheld
        return s

    def wait_idle(self, timeout=None):
        """All pools empty: nothing live or queued at the router, no KV block held, no transfer
        unretired, on any worker that answers. A snapshot of the time before the last request
        says nothing of what that one holds: it must have seen every call."""
        def idle():
            s = self.status()
            busy = [
                w for w in s.workers if w.state in ("ready", "draining") and (
                    w.kv_blocks_held or w.running or w.waiting or w.assigned or w.transfers
                    or w.calls_unseen or w.snapshot_age_ms > 1000 * SLOW)
            ]
            return s.live == 0 and s.queued == 0 and not busy

        try:
            self.wait_for(idle, "idle cluster", (timeout or 5) * SLOW)
        except AssertionError as e:
            raise AssertionError(f"{e}\n{self.status()}") from None

    @contextlib.contextmanager
    def decode_stopped(self):
        """Meanwhile no decode worker runs: requests last until somebody has looked. For patient
        clusters."""
        workers = [d for n, d in self.workers.items() if n.startswith("decode") and d.alive()]
        for d in workers:
            d.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for d in workers:
                d.signal(signal.SIGCONT)

    def wait_finished(self, n, timeout):
        """Until n requests in all have finished. Whether one is under way cannot be waited for: it
        may be over before anybody looks."""
        self.wait_for(lambda: self.status().finished >= n, f"{n} finished requests", timeout)

    # --- calls
    # ---------------------------------------------------------------------------------------------

    def unary(self, path, request, response_type, timeout=30, metadata=None):
        call = self.channel.unary_unary(path, request_serializer=type(request).SerializeToString,
                                        response_deserializer=response_type.FromString)
        return call(request, timeout=timeout, metadata=metadata)

    @staticmethod
    def request(prompt=None, ids=None, chat=None, max_tokens=16, temperature=None, seed=None,
                top_k=None, top_p=None, min_p=None, repetition_penalty=None, logprobs=None,
                presence_penalty=0.0, frequency_penalty=0.0, stop=(), stop_token_ids=(),
                ignore_eos=False, logit_bias=(), model="", n=0, **rest):
        r = pb.GenerateRequest(model=model, return_token_ids=True, **rest)
        if prompt is not None:
            r.prompt = prompt
        if ids is not None:
            r.token_ids.ids.extend(ids)
            r.token_ids.SetInParent()
        if chat is not None:
            for role, content in chat:
                r.chat.messages.add(role=role, content=content)
            r.chat.SetInParent()
        s = r.sampling
        for name, value in (("temperature", temperature), ("seed", seed), ("top_k", top_k),
                            ("top_p", top_p), ("min_p", min_p),
                            ("repetition_penalty", repetition_penalty), ("logprobs", logprobs)):
            if value is not None:
                setattr(s, name, value)
        s.presence_penalty, s.frequency_penalty, s.n = presence_penalty, frequency_penalty, n
        for token, bias in logit_bias:
            s.logit_bias.add(token=token, bias=bias)
        if max_tokens is not None:
            r.stop.max_tokens = max_tokens
        r.stop.stop.extend(stop)
        r.stop.stop_token_ids.extend(stop_token_ids)
        r.stop.ignore_eos = ignore_eos
        return r

    def stream(self, request, timeout=None, wait_for_ready=False, metadata=None):
        call = self.channel.unary_stream("/tandem.v1.Inference/Generate",
                                         request_serializer=pb.GenerateRequest.SerializeToString,
                                         response_deserializer=pb.GenerateResponse.FromString)
        return call(request, timeout=timeout or 60 * SLOW, wait_for_ready=wait_for_ready,
                    metadata=metadata)

    def generate(self, request=None, timeout=None, metadata=None, **kwargs):
        """Runs one request to its terminal status; never raises for a gRPC error."""
        stream = self.stream(request or self.request(**kwargs), timeout, metadata=metadata)
        r = Result(None, "", [], "", [], 0, None, None, 0, "", {}, 0)
        try:
            for m in stream:
                r.n_messages += 1
                r.tokens += m.token_ids
                r.text += m.text
                r.logprobs += [(lp.logprob, [(t.token, t.logprob) for t in lp.top])
                               for lp in m.logprobs]
                if m.finish_reason:
                    r.finish, r.usage, r.ledger = m.finish_reason, m.usage, m.ledger
                    r.seed, r.stop_reason = m.seed, m.stop_reason
        except grpc.RpcError:
            pass
        r.code, r.details = stream.code(), stream.details() or ""
        r.trailing = {k: v for k, v in stream.trailing_metadata() or ()}
        return r

    def requests(self, many):
        """Requests of token ids, as one_process takes them."""
        return [
            self.request(ids=q["ids"], ignore_eos=True,
                         **{k: v for k, v in q.items() if k != "ids"}) for q in many
        ]

    def generate_many(self, requests, stagger_s=0.0, timeout=None):
        """All at once, a thread each; results in order."""
        results = [None] * len(requests)

        def run(i):
            results[i] = self.generate(requests[i], timeout)

        threads = [threading.Thread(target=run, args=(i, )) for i in range(len(requests))]
        for t in threads:
            t.start()
            if stagger_s:
                time.sleep(stagger_s)
        for t in threads:
            t.join()
        return results


def check_one_process(requests, model, *, n_alone, dtype="bf16", kv_dtype="auto"):
    """The tokens of one process, whatever the batch, the chunks and the prefix hits, and through a
    cluster of which a decode worker dies at its second token. The first n_alone requests are
    also asked one at a time."""
    oracle = one_process(requests, model, dtype=dtype, kv_dtype=kv_dtype)[0]
    assert one_process(requests, model, dtype=dtype, kv_dtype=kv_dtype, concurrency=8, chunk=48,
                       order=3, prefix=1)[0] == oracle
    with Cluster(model=model, dtype=dtype, prefill=1, decode=2,
                 worker_args=["--kv-dtype", kv_dtype],
                 router_args=["--policy", "round_robin"],
                 envs={"decode-0": {"TANDEM_FAULT": "decode_token:kill:2"}}) as c:
        sent = c.requests(requests)
        check_results(c.generate_many(sent), oracle)
        check_results([c.generate(r) for r in sent[:n_alone]], oracle[:n_alone])
        c.wait_for(lambda: len(c.status().workers) == 2, "the dead worker to be gone", 20 * SLOW)
        c.wait_idle()
