"""Several models behind one router: each answers as if it were alone, names and aliases find them,
workers bring models into service, and what happens to one model's workers is no matter of the
other's requests."""
import random
import signal
import socket
import subprocess
import threading
import urllib.request

import grpc
import pytest

from harness import (BIN, PATIENT, POCKET, SHORT, SLOW, Cluster, Daemon, free_port, one_process, pb)
from small_model import VOCAB, make_small
from test_bench import ANY_LAG, run as run_bench, bench
from test_doctor import doctor
from test_http import Http, raw_request

OK = grpc.StatusCode.OK
POCKET_VOCAB = 2048
N = 6 if SHORT else 16


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return make_small(str(tmp_path_factory.mktemp("models") / "small"))


def questions(vocab, seed):
    rng = random.Random(seed)
    return [{
        "ids": [rng.randrange(3, vocab) for _ in range(rng.randrange(3, 90))],
        "max_tokens": rng.randrange(4, 20), "seed": rng.randrange(1 << 40), "logprobs": 0,
        "temperature": rng.choice([0.0, 0.9]), "top_k": 0, "top_p": 1.0, "min_p": 0.0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0
    } for _ in range(N)]


class Model:
    """Requests of one model, and what one process answers to them."""
    def __init__(self, c, name, path, vocab):
        asked = questions(vocab, len(name))
        results, _ = one_process(asked, model=path, dtype="f32")
        self.path, self.want = path, results
        self.requests = c.requests(asked)
        for r in self.requests:
            r.model = name

    def check(self, i, r):
        assert r.code == OK, (r.code, r.details)
        got = r.tokens, [lp for lp, _ in r.logprobs]
        assert got == self.want[i], f"request {i} of {self.requests[i].model} differs"


def replays(log):
    done = subprocess.run([f"{BIN}/tandem", "sim", "replay", str(log)], capture_output=True,
                          timeout=60 * SLOW, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(b": the same\n"), done.stdout
    assert log.read_text().count("\na kind=5 ") > 0


def start_two(c, small):
    for role in ("prefill", "decode"):
        c.start_worker(role, args=["--model", small, "--served-model-name", "small"])


class Load:
    """Asks until it is stopped, and compares each answer."""
    def __init__(self, c, model, n_threads=2):
        self.c, self.model, self.over, self.failed, self.n_done = c, model, False, None, 0
        self.threads = [threading.Thread(target=self._run, args=(i, )) for i in range(n_threads)]
        for t in self.threads:
            t.start()

    def _run(self, i):
        while not self.over and not self.failed:
            i = (i + 1) % N
            try:
                r = self.c.generate(self.model.requests[i])
                self.model.check(i, r)
                assert r.ledger.failovers == 0
                self.n_done += 1
            except AssertionError as e:
                self.failed = e

    def stop(self):
        self.over = True
        for t in self.threads:
            t.join()
        if self.failed:
            raise self.failed
        assert self.n_done > 0


@pytest.fixture(scope="module")
def two(small, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "decisions"
    args = ["--model", f"small,tiny,in/between={small}", "--http-listen", "127.0.0.1:0",
            "--metrics-listen", "127.0.0.1:0", "--decision-log", log]
    with Cluster(router_args=args, **PATIENT) as c:
        start_two(c, small)
        c.http = Http(c)
        c.pocket = Model(c, "pocket", POCKET, POCKET_VOCAB)
        c.small = Model(c, "small", small, VOCAB)
        yield c
        c.wait_idle()
    replays(log)
    replays(log.with_name("decisions.small"))


def test_each_answers_as_one_process(two):
    """At once, over both doors: tokens and logprobs over gRPC are those of one process, and HTTP's
    text is gRPC's."""
    requests = two.pocket.requests + two.small.requests
    texts = [None] * len(requests)

    def over_http(i):
        q = requests[i]
        status, got = two.http.json("/v1/completions", {
            "model": q.model, "prompt": list(q.token_ids.ids), "max_tokens": q.stop.max_tokens,
            "temperature": q.sampling.temperature, "seed": q.sampling.seed, "top_p": 1.0,
            "ignore_eos": True
        })
        assert got.get("model") == q.model, (status, got)
        texts[i] = got["choices"][0]["text"]

    threads = [threading.Thread(target=over_http, args=(i, )) for i in range(len(requests))]
    for t in threads:
        t.start()
    results = two.generate_many(requests)
    for t in threads:
        t.join()
    for i in range(N):
        two.pocket.check(i, results[i])
        two.small.check(i, results[N + i])
    assert texts == [r.text for r in results]


def test_names(two):
    """An alias is the model; no name, and a name that is none, list what there is."""
    q = pb.GenerateRequest()
    q.CopyFrom(two.small.requests[0])
    for name in ("small", "tiny", "in/between"):
        q.model = name
        two.small.check(0, two.generate(q))
    q.model = ""
    r = two.generate(q)
    assert r.code == grpc.StatusCode.INVALID_ARGUMENT
    assert 'model is empty' in r.details and '"pocket", "small"' in r.details
    q.model = "large"
    r = two.generate(q)
    assert r.code == grpc.StatusCode.NOT_FOUND
    assert r.details == 'model "large" is not served here; this cluster serves "pocket", "small"'
    tokenize = "/tandem.v1.Inference/Tokenize"
    ids = {
        name: list(two.unary(tokenize, pb.TokenizeRequest(model=name, prompt="The fox's shadows"),
                             pb.TokenizeResponse).ids) for name in ("pocket", "tiny")
    }
    assert len(ids["tiny"]) > len(ids["pocket"]), ids  # its vocabulary has no "shadows"
    models = two.unary("/tandem.v1.Inference/Models", pb.ModelsRequest(), pb.ModelsResponse).models
    assert [(m.id, list(m.aliases), m.vocab) for m in models
            ] == [("pocket", [], POCKET_VOCAB), ("small", ["tiny", "in/between"], VOCAB)]


def test_names_over_http(two):
    status, got = two.http.json("/v1/models")
    assert status == 200
    assert [(m["id"], m["root"]) for m in got["data"]] == [("pocket", None), ("small", None),
                                                           ("tiny", "small"),
                                                           ("in/between", "small")]
    ask = {"prompt": [5, 6, 7], "max_tokens": 2}
    status, got = two.http.json("/v1/completions", {**ask, "model": "tiny"})
    assert status == 200 and got["model"] == "tiny"
    status, got = two.http.json("/v1/completions", {**ask, "model": "x"})
    assert status == 404 and '"pocket", "small"' in got["error"]["message"], got
    status, got = two.http.json("/v1/completions", ask)
    assert status == 400 and got["error"]["param"] == "model", got
    status, got = two.http.json("/tokenize", {"model": "tiny", "prompt": "shadows"})
    assert status == 200 and got["count"] > 1


def test_status_and_metrics_tell_of_each(two):
    r = two.generate(two.small.requests[0])
    two.small.check(0, r)
    s = two.status()
    assert [m.name for m in s.models] == ["pocket", "small"]
    assert sum(m.finished for m in s.models) == s.finished
    assert sorted(w.model for w in s.workers) == ["pocket"] * 2 + ["small"] * 2
    done = subprocess.run([f"{BIN}/tandem", "status", "--server", f"127.0.0.1:{two.port}"],
                          capture_output=True, text=True, timeout=20 * SLOW, check=True)
    assert "small, tiny, in/between" in done.stdout and "MODEL" in done.stdout, done.stdout
    status, _, text = two.http.ask("/metrics")
    assert status == 200
    lines = text.decode().splitlines()
    for name in ("pocket", "small"):
        assert any(line.startswith(f'td_request_success_total{{model_name="{name}"}} ')
                   for line in lines), lines
        assert f'td_stage_seconds_count{{stage="prefill",model_name="{name}"}}' in text.decode()


def test_commands_know_of_each(two, tmp_path):
    """bench asks for one by a name or an alias, and counts its workers alone; doctor looks at
    each."""
    at = f"127.0.0.1:{two.port}"
    ask = ["--dataset-name", "random", "--input-len", 8, "--output-len", 4, "--num-prompts", 3,
           "--ignore-eos", *ANY_LAG]
    result, _, _ = run_bench(two, tmp_path, "--model", "tiny", *ask)
    assert result["model_id"] == "tiny" and result["completed"] == 3, result
    topology = result["pd"]["topology"]
    assert (topology["prefill"], topology["decode"]) == (1, 1), topology
    rc, _, err = bench("serve", "--server", at, *ask)
    assert rc == 2 and "--model is not given" in err and "2 models: pocket, small" in err, err
    rc, _, err = bench("serve", "--server", at, "--model", "x", *ask)
    assert rc == 2 and "it serves pocket, small" in err, err
    rc, checks, text = doctor("--local=false", "--router", at, "--timeout-ms", 2000 * SLOW)
    assert rc == 0, text
    for name in ("pocket", "small"):
        assert checks[f"roles of {name}"] == ("ok", f"1 prefill, 1 decode, mode pd, model {name}")
        assert checks[f"KV layout of {name}"][0] == "ok", text
    assert checks["kv paths"][1].startswith("by address: 2 pairs on one host"), text


def test_one_models_workers_are_its_own(two):
    """kill -9 of the workers of one model: the other's requests do not fail over, those of its own
    wait for a worker; its name stays."""
    load = Load(two, two.pocket)
    victims = [two.workers["prefill-1"], two.workers["decode-1"]]
    waiting = []
    try:
        for d in victims:
            d.signal(signal.SIGKILL)
        two.wait_for(lambda: len(two.status().workers) == 2, "the dead to be gone", 20 * SLOW)
        one = threading.Thread(target=lambda: waiting.append(two.generate(two.small.requests[1])))
        one.start()
        two.wait_for(lambda: [m.queued for m in two.status().models] == [0, 1], "one to wait",
                     20 * SLOW)
        n = load.n_done
        two.wait_for(lambda: load.n_done > n + 3 or load.failed, "the other to go on", 60 * SLOW)
    finally:
        load.stop()
        for d in victims:
            del two.workers[d.name]
            two.all.remove(d)
    start_two(two, two.small.path)
    one.join()
    two.small.check(1, waiting[0])


def joins(c, args, role="decode"):
    """A worker that is expected to be turned away, and what it was told."""
    c.next_index[role] += 1
    d = Daemon("stranger", f"tandem-{role}", [
        "--name", "stranger", "--router", f"127.0.0.1:{c.port}", "--dtype", "f32", "--threads", 1,
        "--kv-memory", "4MiB", *args
    ], c.dir.name)
    try:
        said = d.wait_log(r"ev=registration_rejected .*reason=(\".*\") action").group(1)
        return said.replace('\\"', '"')
    finally:
        d.signal(signal.SIGKILL)


def test_strangers_are_refused_by_name(two, tmp_path):
    other = make_small(str(tmp_path / "other"), swap=("er", "in"))
    said = joins(two, ["--model", other, "--served-model-name", "small"])
    assert "vocabulary digest" in said and '"small"' in said and "not the same model" in said, said
    said = joins(two, ["--model", other])
    assert '"other" is not served here; this router serves "pocket", "small"' in said, said
    said = joins(two, ["--model", POCKET, "--served-model-name", "tiny"])
    assert "has a vocabulary of 2048" in said, said


def test_models_come_with_their_workers(small, tmp_path):
    """--model-dir: the first worker of a model brings it into service, under load; a name that
    leads elsewhere, one that is not there and one with other tokens do not."""
    root = tmp_path / "root"
    root.mkdir()
    (root / "small").symlink_to(small)
    (root / "broken").mkdir()
    (tmp_path / "outside").symlink_to(small)
    log = tmp_path / "decisions"
    with Cluster(router_args=["--model-dir", root, "--decision-log", log], **PATIENT) as c:
        pocket, late = Model(c, "pocket", POCKET, POCKET_VOCAB), Model(c, "small", small, VOCAB)
        r = c.generate(late.requests[0])
        assert r.code == grpc.StatusCode.NOT_FOUND
        load = Load(c, pocket)
        try:
            for name in ("../outside", "/" + str(tmp_path / "outside"), ".", "..", "outside/x"):
                said = joins(c, ["--model", small, "--served-model-name", name])
                assert "is not served here" in said, (name, said)
            said = joins(c, ["--model", small, "--served-model-name", "broken"])
            assert "broken" in said, said
            said = joins(c, ["--model", small, "--served-model-name", "nowhere"])
            assert "nowhere" in said, said
            start_two(c, small)
            for i, r in enumerate(c.generate_many(late.requests)):
                late.check(i, r)
            other = make_small(str(tmp_path / "other"), swap=("er", "in"))
            said = joins(c, ["--model", other, "--served-model-name", "small"])
            assert "vocabulary digest" in said, said
        finally:
            load.stop()
        assert [m.name for m in c.status().models] == ["pocket", "small"]
        c.wait_idle()
    replays(log)
    replays(log.with_name("decisions.small"))


def test_up_starts_the_workers_of_each(small):
    port = free_port()
    at = f"127.0.0.1:{port}"
    with subprocess.Popen([f"{BIN}/tandem", "up", "--model", POCKET, "--model",
                           f"small,tiny={small}", "--listen", at, "--kv-memory", "8MiB"],
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as up:
        try:
            assert "2 prefill, 2 decode" in up.stdout.readline()  # its end, when it cannot start
            for name in ("pocket", "tiny"):
                done = subprocess.run([f"{BIN}/tandem", "generate", "--server", at, "--model", name,
                                       "--max-tokens", "4", "Once"],
                                      capture_output=True, text=True, timeout=60 * SLOW,
                                      check=False)
                assert done.returncode == 0 and done.stdout, done.stderr
        finally:
            up.send_signal(signal.SIGTERM)
        assert up.wait(60 * SLOW) == 0
    done = subprocess.run([f"{BIN}/tandem", "up", "--model", POCKET, "--model", f"s={small}",
                           "--decode", "64", "--listen", at],
                          capture_output=True, text=True, timeout=60 * SLOW, check=False)
    assert done.returncode != 0 and "limit 128" in done.stderr, done.stderr


def test_as_many_models_as_there_may_be(small, tmp_path):
    """32 of them, and the metrics of each."""
    many = [a for i in range(32) for a in ("--model", f"m{i}={small}")]
    d = Daemon("router", "tandem-router", [
        *many, "--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0", "--prefix-entries", 1024
    ], str(tmp_path))
    try:
        d.wait_log(r"ev=ready .*models=32 ")
        port = d.wait_log(r"ev=http_ready .*port=(\d+)").group(1)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30 * SLOW) as r:
            text = r.read().decode()
        for i in range(32):
            assert f'td_token_mismatch_total{{model_name="m{i}"}} 0' in text
    finally:
        d.signal(signal.SIGTERM)
    assert d.wait_exit(20 * SLOW) == 0


def test_options_are_checked(small, tmp_path):
    def refused(*args):
        done = subprocess.run([f"{BIN}/tandem-router", "--listen", "127.0.0.1:0", *args],
                              capture_output=True, text=True, timeout=30 * SLOW, check=False)
        assert done.returncode in (1, 2), done.stderr
        return done.stderr

    assert "give --model DIR" in refused()
    assert 'two models have the name "a"' in refused("--model", f"a={small}", "--model",
                                                     f"b,a={POCKET}")
    assert "give one of them" in refused("--model", f"a={small}", "--served-model-name", "b")
    assert 'latency_table is for "c"' in refused("--model", f"a={small}", "--latency-table",
                                                 f"c={tmp_path}/x")


def test_a_full_queue_is_told_with_its_model():
    """Nobody serves here. Each model has a queue of its own."""
    with Cluster(prefill=0, decode=0, router_args=["--model", f"b={POCKET}", "--max-queued", 1,
                                                   "--queue-timeout-ms", 600000]) as c:
        held = [c.stream(c.request(prompt="Once", model=m), timeout=600) for m in ("pocket", "b")]
        c.wait_for(lambda: c.status().queued == 2, "both to wait", 20 * SLOW)
        for model in ("pocket", "b"):
            r = c.generate(prompt="Once", model=model)
            assert r.code == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert r.details == f'model "{model}": the router\'s queue is full', r.details
        for s in held:
            s.cancel()


def test_a_flooded_model_leaves_room(tmp_path):
    """Of max_requests and of the bytes of bodies. Nobody serves here: requests wait, and are
    live."""
    waits = ["--queue-timeout-ms", 600000, "--max-requests", 16, "--http-listen", "127.0.0.1:0"]
    bodies = ["--max-message-bytes", "512KiB", "--max-calls-bytes", "1MiB"]
    with Cluster(prefill=0, decode=0,
                 router_args=["--model", f"b={POCKET}", *waits, *bodies]) as c:
        http, held = Http(c), []

        def live(n):
            c.wait_for(lambda: c.status().live == n, f"{n} live requests", 20 * SLOW)

        def hold(model):
            held.append(c.stream(c.request(prompt="Once", model=model), timeout=600))
            live(len(held))

        for _ in range(15):
            hold("pocket")
        r = c.generate(prompt="Once", model="pocket")
        assert r.code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert r.details.startswith('model "pocket" has 15 live requests'), r.details
        assert "of max_requests, 16, 15 are live" in r.details
        hold("b")
        status, headers, text = http.ask("/v1/completions", {"prompt": "a", "model": "b", "n": 2})
        assert (status, headers["Retry-After"]) == (429, "1")
        assert b'model \\"b\\" has 1 live requests and cannot have 2 more now' in text, text
        for s in held:
            s.cancel()
        live(0)
        big = {"prompt": "Once", "stream": True, "user": "x" * 400000}
        clients = []
        for i, model in enumerate(["pocket", "pocket", "b"]):
            s = socket.create_connection(("127.0.0.1", http.port), timeout=20 * SLOW)
            clients.append(s)
            s.sendall(raw_request({**big, "model": model}))
            live(i + 1)
        for s in clients:
            s.close()
        live(0)
