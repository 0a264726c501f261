"""Several routers over one fleet: workers join each of them, each serves its own requests with the
same tokens, and what one that dies held is free again within 2 s."""
import contextlib
import itertools
import os
import random
import re
import secrets
import shutil
import signal
import subprocess
import threading
import time

import grpc
import pytest

from harness import BIN, POCKET, SHORT, SLOW, Cluster, free_port
from test_resume import EXAMPLE

CHAOS_S = int(os.environ.get("TANDEM_TEST_CHAOS_S", "0"))  # 0: a number of events instead
LONG = os.environ.get("TANDEM_TEST_LONG") == "1"
OK = grpc.StatusCode.OK
N_SHORT = sum(8 + 3 * i for i in range(6))  # tokens of requests()


def requests(c, n=6):
    return [
        c.request(prompt=f"Story {i}. " + "The little fox walked over the hill. " * (i % 3 * 4),
                  max_tokens=8 + 3 * i, temperature=0.0 if i % 2 else 0.9, seed=70 + i,
                  ignore_eos=True) for i in range(n)
    ]


@contextlib.contextmanager
def fleet(tmp_path, n_routers=2, with_secret=False, **args):
    """Clusters, one for each router; the workers are the first one's, and join all."""
    router_args, worker_args = list(args.pop("router_args", ())), list(args.pop("worker_args", ()))
    if with_secret:
        path = tmp_path / "secret"
        path.write_text(secrets.token_hex(32))
        path.chmod(0o600)
        router_args += ["--cluster-secret-file", path]
        worker_args += ["--cluster-secret-file", path]
    with contextlib.ExitStack() as stack:
        others = [
            stack.enter_context(
                Cluster(prefill=0, decode=0, envs=args.pop("other_envs", None),
                        router_args=[*router_args, "--decision-log", tmp_path / f"log-{i}"]))
            for i in range(1, n_routers)
        ]
        first = stack.enter_context(
            Cluster(other_routers=others, worker_args=worker_args,
                    router_args=[*router_args, "--decision-log", tmp_path / "log-0"], **args))
        for c in others:
            c.wait_for(lambda c=c: n_ready(c) == len(first.workers), "the workers", 30 * SLOW)
        yield [first, *others]


def n_ready(c):
    return sum(w.state == "ready" for w in c.status().workers)


def generate_at_all(clusters, many):
    """The requests at each router, all at once; results by router."""
    results = [None] * len(clusters)

    def run(i):
        results[i] = clusters[i].generate_many(many)

    threads = [threading.Thread(target=run, args=(i, )) for i in range(len(clusters))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return results


def assert_replays(log):
    """The router's log, replayed through its core, gives the same decisions (I5). The log of a
    router that was killed ends in the middle of a line."""
    text = log.read_text()
    log.write_text(text[:text.rfind("\ne ") + 1])
    done = subprocess.run([os.path.join(BIN, "tandem"), "sim", "replay", log], check=False,
                          capture_output=True, timeout=60 * SLOW)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    assert done.stdout.decode().endswith(" actions: the same\n"), done.stdout


@pytest.mark.parametrize("with_secret", [True] if SHORT else [False, True])
def test_each_router_serves_and_one_dies(tmp_path, with_secret):
    die = {"router": {"TANDEM_FAULT": f"router_token:kill:{N_SHORT + 60}"}}
    with fleet(tmp_path, with_secret=with_secret, other_envs=die) as (a, b):
        want = [(r.tokens, r.text) for r in map(a.generate, requests(a))]
        for results in generate_at_all([a, b], requests(a)):
            assert [r.code for r in results] == [OK] * len(want), [r.details for r in results]
            assert [(r.tokens, r.text) for r in results] == want
        a.wait_idle()
        b.wait_idle()
        # b dies in the middle of its streams' output
        long = [b.request(prompt=f"Story {i}", max_tokens=400, ignore_eos=True) for i in range(4)]
        cut = b.generate_many(long)
        assert b.router.wait_exit(10 * SLOW) == -signal.SIGKILL
        a.wait_idle(2)
        assert [r.code for r in cut] == [grpc.StatusCode.UNAVAILABLE] * len(cut)
        shutil.copy(tmp_path / "log-1", tmp_path / "log-dead")
        assert [(r.tokens, r.text) for r in a.generate_many(requests(a))] == want
        b.start_router(listen=f"127.0.0.1:{b.port}", env={"TANDEM_FAULT": ""})
        b.wait_for(lambda: n_ready(b) == 2, "the workers to join again", 15 * SLOW)
        assert [(r.tokens, r.text) for r in b.generate_many(requests(a))] == want
        assert all(d.alive() for d in a.workers.values())
        b.wait_idle()
        a.wait_idle()
    for name in ("log-0", "log-1", "log-dead"):
        assert_replays(tmp_path / name)


def test_one_router_by_two_addresses():
    """A worker that meets one router twice joins it once, and stays."""
    with Cluster(prefill=0, decode=0) as c:
        d = c.start_worker("decode", wait=False,
                           args=["--router", f"localhost:{c.port}, ipv4:127.0.0.1:{c.port}"])
        d.wait_log(r"ev=registered")
        d.wait_log(r"ev=router_twice")
        c.wait_for(lambda: n_ready(c) == 1, "the worker", 15 * SLOW)
        assert d.log().count("ev=registered") <= 2  # 2: both hellos were under way


# ---- chaos: routers and workers are killed and stopped under clients that go on elsewhere
# -------------------------------------------------------------------------------------------------


class Streams:
    """n clients, each with one answer at a time, until stopped. Each goes on at the next router
    when its own is lost, and every answer is compared."""
    def __init__(self, clusters, many, want, n):
        self.ports, self.many, self.want = [c.port for c in clusters], many, want
        self.over, self.lock, self.n_done, self.wrong = threading.Event(), threading.Lock(), 0, []
        self.threads = [threading.Thread(target=self._run, args=(i, )) for i in range(n)]
        for t in self.threads:
            t.start()

    def _run(self, seed):
        rng = random.Random(seed)
        first = seed % len(self.ports)
        channels = [
            grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)])
            for port in self.ports[first:] + self.ports[:first]
        ]
        while not self.over.is_set() and not self.wrong:
            i = rng.randrange(len(self.many))
            try:
                tokens = [
                    t for m in EXAMPLE.generate(channels, self.many[i], 60 * SLOW)
                    for t in m.token_ids
                ]
                problem = None if tokens == self.want[i] else (i, tokens, self.want[i])
            except grpc.RpcError as e:
                problem = (i, e.code(), e.details())
            with self.lock:
                self.n_done += 1
                if problem:
                    self.wrong.append(problem)
        for channel in channels:
            channel.close()

    def wait_for_more(self, n):
        until = self.n_done + n
        Cluster.wait_for(lambda: self.n_done >= until or self.wrong, "answers", 60 * SLOW)
        assert not self.wrong, self.wrong

    def stop(self):
        self.over.set()
        for t in self.threads:
            t.join()
        assert not self.wrong, self.wrong


def kill_router(clusters, c, tmp_path, k):
    c.router.signal(signal.SIGKILL)
    at = c.router_args.index("--decision-log") + 1
    c.router_args[at] = tmp_path / f"log-again-{k}"
    c.start_router(listen=f"127.0.0.1:{c.port}")
    return [c.router_args[at]]


def kill_worker(clusters, c, tmp_path, k):
    first = clusters[0]
    live = [name for name, d in first.workers.items() if d.alive()]
    name = live[k % len(live)]
    first.workers.pop(name).signal(signal.SIGKILL)
    first.start_worker(name.split("-")[0], wait=False)
    return []


def stop_router(clusters, c, tmp_path, k):
    """For as long as it takes the workers to leave it."""
    d = next(iter(clusters[0].workers.values()))
    lost = rf"ev=router_lost router=127.0.0.1:{c.port} "
    n = len(re.findall(lost, d.log()))
    c.router.signal(signal.SIGSTOP)
    Cluster.wait_for(lambda: len(re.findall(lost, d.log())) > n, "the worker to leave", 30 * SLOW)
    c.router.signal(signal.SIGCONT)
    return []


def stop_worker(clusters, c, tmp_path, k):
    """For as long as it takes the routers to move its requests."""
    name, d = list(clusters[0].workers.items())[k % len(clusters[0].workers)]
    d.signal(signal.SIGSTOP)
    for other in clusters:
        other.wait_for(
            lambda o=other: not any(w.name == name and w.state == "ready"
                                    for w in o.status().workers), "a suspect", 30 * SLOW)
    d.signal(signal.SIGCONT)
    return []


@pytest.mark.parametrize("n_routers", [2, 3] if LONG else [2])
def test_chaos(tmp_path, n_routers):
    """Every answer is the undisturbed one, all pools are empty at the end, and the log of each
    router, those that were killed included, replays."""
    kinds = [kill_router, kill_worker, stop_router, stop_worker]
    if SHORT:
        kinds = kinds[:2]
    n_events, n_streams = (200, 32) if LONG else (len(kinds), 4)
    over = time.monotonic() + CHAOS_S if CHAOS_S else None
    with fleet(tmp_path, n_routers, prefill=2, decode=2) as clusters:
        many = requests(clusters[0])
        want = [clusters[0].generate(r).tokens for r in many]
        logs = [tmp_path / f"log-{i}" for i in range(n_routers)]
        streams = Streams(clusters, many, want, n_streams)
        try:
            for k, kind in zip(itertools.count(), itertools.cycle(kinds)):
                if time.monotonic() >= over if over else k == n_events:
                    break
                streams.wait_for_more(2)
                logs += kind(clusters, clusters[k // len(kinds) % n_routers], tmp_path, k)
                for c in clusters:
                    c.wait_for(lambda c=c: n_ready(c) == 4, "four workers", 30 * SLOW)
            streams.wait_for_more(2 * n_streams)
        finally:
            streams.stop()
        print(f"{n_routers} routers: {k} kills and stops, {streams.n_done} answers")
        for c in clusters:
            c.wait_idle()
    for log in logs:
        assert_replays(log)


# ---- tandem up --routers
# -------------------------------------------------------------------------------------------------


def tandem(*args):
    done = subprocess.run([os.path.join(BIN, "tandem"), *map(str, args)], check=False,
                          stdin=subprocess.DEVNULL, capture_output=True, timeout=60 * SLOW)
    assert done.returncode == 0, (args, done.stderr.decode()[-3000:])
    return done.stdout


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as f:
        return [int(x) for x in f.read().split()]


def test_up_with_two_routers(tmp_path):
    port = free_port(2)
    at = [f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"]
    with subprocess.Popen([
            os.path.join(BIN, "tandem"), "up", "--routers", "2", "--model", POCKET, "--listen",
            at[0], "--kv-memory", "16MiB", "--decision-log", tmp_path / "log"
    ], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True) as up:
        try:
            line = ""
            while "--cluster-secret-file" not in line:
                line = up.stdout.readline().decode()
                assert line, "up has ended"
            ask = ["--max-tokens", 12, "--temperature", 0, "Once upon a time"]
            for address in at:  # either has all workers
                status = tandem("status", "--server", address, "--cluster-secret-file",
                                line.split()[-1])
                assert status.count(b" ready ") == 2, status
            texts = {tandem("generate", "--server", address, *ask) for address in at}
            assert len(texts) == 1
            router = children(up.pid)[0]
            os.kill(router, signal.SIGKILL)
            assert tandem("generate", "--server", ",".join(at), *ask) in texts
            Cluster.wait_for(lambda: router not in children(up.pid), "up to see it", 15 * SLOW)
            up.send_signal(signal.SIGINT)
            assert up.wait(60 * SLOW) == 0
        finally:
            if up.poll() is None:
                up.kill()
    assert_replays(tmp_path / "log")
    assert_replays(tmp_path / "log.1")
