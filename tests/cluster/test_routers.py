"""Several routers over one fleet: workers join each of them, each serves its own requests with the
same tokens, and what one that dies held is free again within 2 s."""
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import threading

import grpc
import pytest

from harness import BIN, SHORT, SLOW, Cluster

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
