"""Two routers over one fleet are killed in turn under clients that go on at the other one: each
answer is the undisturbed one, token for token and byte for byte; what a dead router held is free
again, and the logs of both routers replay."""
import random
import signal
import threading

from harness import SHORT, SLOW
from test_http import Http
from test_resume import COMPLETIONS, EXAMPLE, HTTP_EXAMPLE, SCHEMA, SEED, TALE, complete, joined
from test_routers import assert_replays, fleet, n_ready

N_KILLS = 2 if SHORT else 6


def grpc_requests(c):
    """What one client asks for again and again."""
    sampled = {"temperature": 0.9, "ignore_eos": True, "max_tokens": 60}
    guided = c.request(prompt="Somebody", temperature=1.1, max_tokens=60, seed=4)
    guided.guided.json_schema = SCHEMA
    return [
        c.request(prompt="Once upon a time", seed=1, **sampled),
        c.request(prompt="A fox", n=3, seed=2, logprobs=1, **sampled),
        c.request(prompt="The hill", seed=3, repetition_penalty=1.2, presence_penalty=0.5,
                  stop=["never said"], **sampled), guided
    ]


HTTP_BODIES = [{**TALE, "max_tokens": 50, "seed": 6},
               {**TALE, "max_tokens": 30, "seed": 7, "n": 2, "frequency_penalty": 0.4}]


def texts(events):
    """{choice: (its text, its token ids, its end)}"""
    out = {}
    for e in events:
        for choice in e["choices"]:
            text, ids, end = out.get(choice["index"], ("", [], None))
            assert end is None
            out[choice["index"]] = (text + choice["text"], ids + choice["token_ids"],
                                    choice["finish_reason"])
    return out


class Servers:
    """Where the HTTP ports of the routers are now: they are new at each start."""
    def __init__(self, clusters):
        self.clusters = clusters

    def __len__(self):
        return len(self.clusters)

    def __getitem__(self, i):
        return f"127.0.0.1:{Http(self.clusters[i]).port}"


class Clients:
    """Threads that ask, and compare with what one undisturbed router answers; half begin at either
    router."""
    def __init__(self, a, b):
        self.n_messages, self.n_answers, self.errors, self.is_over = 0, 0, [], False
        self.servers = Servers([a, b])
        self.jobs = [(r, joined(complete(a, r))) for r in grpc_requests(a)]
        self.http_jobs = [(body, texts(HTTP_EXAMPLE.stream(self.servers, COMPLETIONS, body)))
                          for body in HTTP_BODIES]
        self.threads = [
            threading.Thread(target=self.run, args=(ask, i)) for i in range(2)
            for ask in (self.ask_grpc, self.ask_http)
        ]
        self.channels = [a.channel, b.channel]
        for t in self.threads:
            t.start()

    def counted(self, stream):
        for m in stream:
            self.n_messages += 1
            yield m

    def ask_grpc(self, order):
        channels = self.channels[::1 - 2 * order]
        for request, want in self.jobs:
            got = joined(self.counted(EXAMPLE.generate(channels, request, 60 * SLOW)))
            assert got == want, request
            self.n_answers += 1

    def ask_http(self, order):
        for body, want in self.http_jobs:
            servers = Servers(self.servers.clusters[::1 - 2 * order])
            stream = HTTP_EXAMPLE.stream(servers, COMPLETIONS, body, 60 * SLOW)
            assert texts(self.counted(stream)) == want, body
            self.n_answers += 1

    def run(self, ask, order):
        try:
            while not self.is_over:
                ask(order)
        except BaseException as e:  # a thread's failure is the test's
            self.errors.append(repr(e))

    def end(self):
        self.is_over = True
        for t in self.threads:
            t.join(120 * SLOW)
        assert not self.errors and not any(t.is_alive() for t in self.threads), self.errors


def test_routers_are_killed_in_turn(tmp_path, capsys):
    rng = random.Random(SEED)
    with fleet(tmp_path, router_args=["--http-listen", "127.0.0.1:0"]) as (a, b):
        clients = Clients(a, b)
        try:
            for i in range(N_KILLS):
                victim = (b, a)[i % 2]
                n = clients.n_messages + rng.randrange(20, 150)
                a.wait_for(lambda n=n: clients.n_messages >= n or clients.errors, f"{n} messages",
                           60 * SLOW)
                victim.router.signal(signal.SIGKILL)
                start_again(victim)
                victim.wait_for(lambda v=victim: n_ready(v) == 2, "the workers", 30 * SLOW)
        finally:
            clients.end()
        assert clients.n_answers >= N_KILLS
        assert capsys.readouterr().err.count("going on at the next router") >= 1
        a.wait_idle()
        b.wait_idle()
    for name in ("log-0", "log-1"):
        assert_replays(tmp_path / name)


def start_again(c):
    """At its gRPC port; the channel stays, as a client's does."""
    channel, c.channel = c.channel, None
    c.start_router(listen=f"127.0.0.1:{c.port}")
    c.channel.close()
    c.channel = channel
