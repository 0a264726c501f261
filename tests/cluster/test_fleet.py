"""Workers come and go all the time, drained or killed, under a constant load: the client never
sees it (I4), and every answer is the reference (I1)."""
import os
import random
import signal
import subprocess
import threading

import grpc
import pytest

from harness import BIN, LONG, SHORT, SLOW, Cluster

OK = grpc.StatusCode.OK


def reference_requests(c):
    return [
        c.request(prompt=f"Story {i}. " + "The little fox walked over the hill. " * (i % 5 * 3),
                  max_tokens=8 + 5 * i, temperature=0.0 if i % 2 else 0.9, seed=50 + i,
                  ignore_eos=True) for i in range(10)
    ]


class Load:
    """n_clients threads, each with one request at a time, until stopped; every answer is
    compared."""
    def __init__(self, c, requests, want, n_clients=4):
        self.c, self.requests, self.want = c, requests, want
        self.stop_asked, self.n_done, self.wrong, self.failovers = threading.Event(), 0, [], 0
        self.lock = threading.Lock()
        self.threads = [threading.Thread(target=self._run, args=(i, )) for i in range(n_clients)]
        for t in self.threads:
            t.start()

    def _run(self, seed):
        rng = random.Random(seed)
        while not self.stop_asked.is_set() and len(self.wrong) < 3:
            i = rng.randrange(len(self.requests))
            r = self.c.generate(self.requests[i])
            with self.lock:
                self.n_done += 1
                if r.code != OK or r.tokens != self.want[i]:
                    self.wrong.append(
                        (i, r.code, r.details, r.tokens == self.want[i][:len(r.tokens)]))
                elif r.ledger:
                    self.failovers += r.ledger.failovers

    def stop(self):
        self.stop_asked.set()
        for t in self.threads:
            t.join()
        assert not self.wrong, self.wrong


@pytest.mark.parametrize("mode", ["pd"] if SHORT else ["pd", "hybrid"])
def test_workers_come_and_go(mode, tmp_path):
    # counted, not timed: in four events each role leaves in both ways, however slow the machine is
    n_events = 4 if SHORT else (12 if mode == "pd" else 8) * (2 if LONG else 1)
    log = tmp_path / "decisions"
    with Cluster(prefill=1, decode=1, mode=mode, router_args=["--decision-log", log]) as c:
        want = [c.generate(r).tokens for r in reference_requests(c)]
        c.start_worker("prefill")
        c.start_worker("decode")
        load = Load(c, reference_requests(c), want)
        rng = random.Random(11)
        left = []
        try:
            for events in range(n_events):
                role = ("prefill", "decode")[events % 2]
                new = c.start_worker(
                    role)  # joined before the old one goes: there is always somebody
                mine = [
                    d for n, d in c.workers.items()
                    if n.startswith(role) and d is not new and d.alive() and d not in left
                ]
                victim = rng.choice(mine)
                how = signal.SIGKILL if events % 4 >= 2 else signal.SIGTERM
                victim.signal(how)
                left.append(victim)
                if how == signal.SIGKILL:
                    assert victim.wait_exit(10 * SLOW) == -signal.SIGKILL
        finally:
            load.stop()
        for d in left:
            code = d.wait_exit(30 * SLOW)
            assert code in (0, -signal.SIGKILL), (d.name, code, d.log()[-3000:])
        assert load.n_done > n_events, load.n_done
        c.wait_for(lambda: len(c.status().workers) == 4, "the leavers to be forgotten", 5 * SLOW)
        c.wait_idle(4)
        s = c.status()
        assert s.failed == 0 and s.failovers >= load.failovers
    # the router's log of all this, replayed through its core, gives the same decisions (I5)
    replay = subprocess.run([os.path.join(BIN, "tandem"), "sim", "replay", log],
                            capture_output=True, timeout=60 * SLOW)
    assert replay.returncode == 0, replay.stderr.decode()[-3000:]
    text = log.read_text()
    assert replay.stdout.decode(
    ) == f'{text.count(chr(10) + "e ")} events, {text.count(chr(10) + "a ")} actions: the same\n'
    assert text.count("\ne kind=5 ") >= n_events and text.count("\na kind=5 ") >= load.n_done


def test_the_last_one_of_a_role_leaves_and_comes_back():
    """For a while nobody serves a role: requests wait in the router's queue and are served when
    somebody joins."""
    with Cluster(prefill=1, decode=1) as c:
        requests = reference_requests(c)
        want = [c.generate(r).tokens for r in requests]
        leaves = [("decode", signal.SIGKILL), ("prefill", signal.SIGTERM),
                  ("decode", signal.SIGTERM), ("prefill", signal.SIGKILL)]
        for role, how in leaves[:1] if SHORT else leaves:
            box = []
            t = threading.Thread(
                target=lambda: box.extend(c.generate_many(requests, stagger_s=0.01)))
            t.start()
            old = [d for n, d in c.workers.items() if n.startswith(role) and d.alive()]
            for d in old:
                d.signal(how)
            for d in old:
                d.wait_exit(20 * SLOW)
            c.start_worker(role)
            t.join()
            assert [r.code
                    for r in box] == [OK] * len(requests), (role, how, [r.details for r in box])
            assert [r.tokens for r in box] == want
        c.wait_idle(4)
