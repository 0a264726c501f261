"""A stream that is cut goes on elsewhere: what came before and what comes after are together the
undisturbed answer, token for token and byte for byte (I1). Cuts are made after any message, by
going away; routers are killed under the command line and the Python example."""
import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import urllib.error
import urllib.request

import grpc
import pytest

from harness import BIN, PATIENT, ROOT, SHORT, SLOW, Cluster, free_port, pb, pocket_with
from test_bench import ANY_LAG, bench
from test_http import Http
from tool_model import TEMPLATE

OK, INVALID = grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT
SEED = int(os.environ.get("SEED", "0")) or random.SystemRandom().randrange(1 << 32)
TOOLS = [
    '{"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties"'
    ': {"city": {"type": "string", "maxLength": 9}, "days": {"type": "integer"}}, "required": '
    '["city", "days"]}}}'
]
SCHEMA = ('{"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, "tags": '
          '{"type": "array", "maxItems": 2, "items": {"enum": ["red", "green"]}}}, "required": '
          '["name", "tags"]}')


def example(name):
    """docs/examples/NAME.py, which is what a client does."""
    path = os.path.join(ROOT, "docs", "examples", f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"{name}_example", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


EXAMPLE, HTTP_EXAMPLE = example("generate"), example("openai_stream")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The pocket model with a chat template that has tools and thoughts."""
    to = tmp_path_factory.mktemp("model")
    return pocket_with(to, {"tokenizer_config.json": lambda c: c.update(chat_template=TEMPLATE)})


@pytest.fixture(scope="module")
def cluster(model):
    with Cluster(model=model, router_args=["--http-listen", "127.0.0.1:0"], **PATIENT) as c:
        c.http = Http(c)
        yield c
        c.wait_idle()


def sampled(c, **kwargs):
    return c.request(
        **{"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0.9, **kwargs})


def chat(content, **kwargs):
    r = pb.GenerateRequest(
        return_token_ids=True, chat=pb.Chat(messages=[pb.ChatMessage(role="user", content=content)],
                                            split_answer=True, **kwargs))
    r.sampling.temperature, r.stop.max_tokens = 1.1, 60
    return r


def cases(c):
    text = [m.text for m in c.stream(sampled(c, seed=3, max_tokens=16))]
    stop = "".join(text)[30:33]
    many = sampled(c, n=3, max_tokens=10)
    letters = sampled(c, max_tokens=60)  # of several tokens each
    letters.guided.regex = "(\u00e9|\u65e5|\U0001f98a| ){9,12}"
    guided = sampled(c, max_tokens=60)
    guided.guided.json_schema = SCHEMA
    return {
        "sampled": sampled(c), "characters": letters, "penalties": sampled(
            c, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5, min_p=0.01,
            top_p=0.95), "logprobs": sampled(c, logprobs=2, max_tokens=12), "stop": sampled(
                c, seed=3,
                stop=[stop, "never said"]), "choices": many, "guided": guided, "tools": chat(
                    "Hello", tools=TOOLS, tool_choice="required"), "thoughts": chat("Think"),
        "one": sampled(c, max_tokens=1),
    }


def joined(messages):
    """Choice by choice, what the client of a stream has at its end."""
    out = {}
    for m in messages:
        o = out.setdefault(
            m.choice,
            {"tokens": [], "text": "", "reasoning": "", "calls": {}, "logprobs": [], "end": None})
        o["tokens"] += m.token_ids
        o["text"] += m.text
        o["reasoning"] += m.reasoning
        for d in m.tool_calls:
            call = o["calls"].setdefault(d.index, ["", "", ""])
            for i, field in enumerate((d.id, d.name, d.arguments)):
                call[i] += field
        o["logprobs"] += [lp.SerializeToString(deterministic=True) for lp in m.logprobs]
        if m.finish_reason:
            assert o["end"] is None, "an end came twice"
            o["end"] = (m.finish_reason, m.seed, m.stop_reason, m.usage.prompt_tokens,
                        m.usage.output_tokens)
    return out


def complete(c, request):
    stream = c.stream(request)
    try:
        return list(stream)
    except grpc.RpcError:
        raise AssertionError(f"{stream.code()}: {stream.details()}\n{request}") from None


def received(messages):
    r = EXAMPLE.Received()
    for m in messages:
        r.take(m)
    return r


def without_ids(again):
    """What a client says that has counted its tokens, and not kept them."""
    for choice in again.resume_from.choices:
        choice.n_tokens = len(choice.token_ids)
        del choice.token_ids[:]
    return again


def only_ids(again):
    for choice in again.resume_from.choices:
        choice.text_bytes = choice.reasoning_bytes = choice.tool_calls = choice.argument_bytes = 0
    return again


NAMES = [
    "sampled", "characters", "penalties", "logprobs", "stop", "choices", "guided", "tools",
    "thoughts", "one"
]


@pytest.mark.parametrize("name", NAMES)
def test_goes_on_from_any_message(cluster, name):
    rng = random.Random(f"{SEED} {name}")
    request = cases(cluster)[name]
    whole = complete(cluster, request)
    want = joined(whole)
    assert all(o["end"] for o in want.values()) and len(want) == max(1, request.sampling.n)
    cuts = range(len(whole) + 1)
    for at in rng.sample(cuts, min(len(cuts), 3 if SHORT else 12)) + [len(whole) - 1]:
        for how in (lambda r: r, without_ids, only_ids)[:2 if name == "tools" else 3]:
            again = how(received(whole[:at]).continued(request))
            if at == 0:  # nothing came: it begins anew, with a seed and an id of its own
                again.sampling.seed = whole[-1].seed - whole[-1].choice
                again.request_id = whole[0].request_id
            rest = complete(cluster, again)
            got = joined([*whole[:at], *rest])
            assert got == want, (SEED, name, at, how)
            if at and how is not without_ids:  # no token was sent twice
                assert sum(len(m.token_ids) for m in [*whole[:at], *rest]) == sum(
                    len(o["tokens"]) for o in want.values())


def test_cut_again_and_again(cluster):
    rng = random.Random(SEED)
    request = sampled(cluster, max_tokens=40, ignore_eos=True, n=2, repetition_penalty=1.1)
    got, r = [], EXAMPLE.Received()
    while sum(m.finish_reason != 0 for m in got) < 2:
        stream = cluster.stream(r.continued(request))
        for _, m in zip(range(rng.randrange(1, 9)), stream):
            r.take(m)
            got.append(m)
        stream.cancel()
    request.sampling.seed = r.resume.seed
    assert joined(got) == joined(complete(cluster, request)), SEED


def refused(c, request):
    stream = c.stream(request)
    with pytest.raises(grpc.RpcError):
        list(stream)
    return stream.code(), stream.details()


def test_refused(cluster):
    request = sampled(cluster, max_tokens=12, ignore_eos=True)
    whole = complete(cluster, request)  # a message may have several tokens
    good = only_ids(received(whole).continued(request))
    del good.resume_from.choices[0].token_ids[6:]
    good.resume_from.choices[0].finished = False
    few = sampled(cluster, max_tokens=5, ignore_eos=True, seed=good.resume_from.seed)
    begin = joined(complete(cluster, few))[0]["text"]

    def changed(**fields):
        r = pb.GenerateRequest()
        r.CopyFrom(good)
        for name, value in fields.items():
            setattr(r.resume_from, name, value)
        return r

    r = changed()
    r.resume_from.choices[0].token_ids[5] ^= 1
    code, details = refused(cluster, r)
    assert code == grpc.StatusCode.ABORTED and "another output" in details
    r = changed()
    r.prompt = "Another prompt"
    code, details = refused(cluster, r)
    assert code == grpc.StatusCode.ABORTED and "prompt_hash" in details
    r = changed()
    r.resume_from.choices[0].token_ids[2] = 1 << 20
    assert refused(cluster, r) == (INVALID, "resume_from.choices.token_ids[2] is 1048576, must be "
                                   f"0..{vocab(cluster) - 1}")
    r = changed()
    r.resume_from.choices[0].token_ids.extend([5] * 7)
    assert refused(cluster, r) == (INVALID, "resume_from.choices has 13 token_ids, limit 12, which "
                                   "is max_tokens")
    r = changed()
    r.sampling.seed = good.resume_from.seed ^ 1
    assert refused(cluster, r)[0] == INVALID and "sampling.seed" in refused(cluster, r)[1]
    r = changed()
    r.resume_from.choices.add()
    assert "2 choices, limit 1" in refused(cluster, r)[1]
    r = changed()
    r.sampling.best_of = 2
    assert "best_of" in refused(cluster, r)[1]
    r = changed()
    r.return_token_ids = False
    assert "no counts of bytes" in refused(cluster, r)[1]
    r = changed()
    r.stop.stop.append(begin[2:6])
    assert "behind a stop string" in refused(cluster, r)[1]
    r = without_ids(changed())
    r.resume_from.choices[0].text_bytes = 1 << 40
    code, details = refused(cluster, r)
    assert code == grpc.StatusCode.ABORTED and "another output" in details
    cluster.wait_idle()


def vocab(c):
    m = c.unary("/tandem.v1.Inference/Models", pb.ModelsRequest(), pb.ModelsResponse)
    return m.models[0].vocab


# ---- HTTP
# -------------------------------------------------------------------------------------------------

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TALE = {"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0.9, "ignore_eos": True}
BODIES = {
    "completion": (COMPLETIONS, {**TALE, "stop": "never said"}),
    "usage": (COMPLETIONS,
              {**TALE, "stream_options": {"include_usage": True, "continuous_usage_stats": True}
               }), "logprobs": (COMPLETIONS, {**TALE, "logprobs": 2, "max_tokens": 8}),
    "echo": (COMPLETIONS, {**TALE, "echo": True, "logprobs": 1, "max_tokens": 8}),
    "choices": (COMPLETIONS, {**TALE, "n": 3, "max_tokens": 8, "frequency_penalty": 0.5}),
    "prompts": (COMPLETIONS, {**TALE, "prompt": [
        "One", "Two"
    ], "n": 2, "max_tokens": 4}), "tools": (CHAT, {
        "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 50, "temperature": 1.1,
        "tools": [json.loads(t) for t in TOOLS], "tool_choice": "required"
    }), "guided": (CHAT, {
        "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 50, "temperature": 1.1,
        "logprobs": True, "top_logprobs": 1, "response_format": {
            "type": "json_schema", "json_schema": {"name": "it", "schema": json.loads(SCHEMA)}
        }
    }),
}


def raw_events(c, path, body, last_id=""):
    """(status, the events as they came, without [DONE])"""
    status, _, text = c.http.ask(path, body, {"Last-Event-ID": last_id} if last_id else {})
    if status != 200:
        return status, json.loads(text)["error"]
    events = text.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""], events[-2:]
    return status, events[:-2]


def parsed(event):
    """(its id or "", its object)"""
    data, _, last_id = event.partition("\nid: ")
    return last_id, json.loads(data.removeprefix("data: "))


def by_choice(events):
    """The bytes of each choice, in order; those of no choice (the usage) as "all". How the choices
    of one answer follow one another depends on their speed, and ids count them all; what a cache
    held differs."""
    out = {}
    for e in events:
        data, _, _ = e.partition("\nid: ")
        choices = json.loads(data.removeprefix("data: "))["choices"]
        data = re.sub(r',"prompt_tokens_details":{"cached_tokens":\d+}', "", data)
        out.setdefault(choices[0]["index"] if choices else "all", []).append(data)
    return out


@pytest.mark.parametrize("name", BODIES)
def test_http_goes_on_from_any_event(cluster, name):
    rng = random.Random(f"{SEED} {name}")
    path, body = BODIES[name]
    single = body.get("n", 1) == 1 and name != "prompts"
    client = HTTP_EXAMPLE.Stream(path, body)
    if name == "prompts":
        client.body.pop("return_token_ids")
    status, whole = raw_events(cluster, path, client.body)
    assert status == 200 and len(whole) > 3
    n_ids = len([e for e in whole if "\nid: 1." in e])
    assert n_ids == len(whole) - (name == "usage")  # the usage at the end has none
    for at in [*rng.sample(range(1, n_ids), 2 if SHORT else 6), n_ids]:
        had = HTTP_EXAMPLE.Stream(path, body)
        for e in whole[:at]:
            last_id, event = parsed(e)
            if name == "prompts":
                had.last_id = last_id
            else:
                had.take(event, last_id)
        for ids in ([], had.token_ids)[:1 if name == "prompts" else 2]:
            again = {**client.body, **({"resume_token_ids": ids} if ids else {})}
            status, rest = raw_events(cluster, path, again, had.last_id)
            assert status == 200, rest
            assert by_choice(whole[:at] + rest) == by_choice(whole), (SEED, name, at, bool(ids))
            if single and name != "usage":  # not a byte differs, ids included
                assert whole[:at] + rest == whole


def test_http_scores_of_choices_that_have_not_begun(cluster):
    """Cut before a choice's first event, which has the prompt's log-probabilities."""
    body = {**BODIES["echo"][1], "n": 2}
    client = HTTP_EXAMPLE.Stream(COMPLETIONS, body)
    status, whole = raw_events(cluster, COMPLETIONS, client.body)
    assert status == 200
    had = HTTP_EXAMPLE.Stream(COMPLETIONS, body)
    last_id, event = parsed(whole[0])
    had.take(event, last_id)
    assert [bool(ids) for ids in had.token_ids] == [True, False]
    again = {**client.body, "resume_token_ids": had.token_ids}
    status, rest = raw_events(cluster, COMPLETIONS, again, last_id)
    assert status == 200, rest
    assert by_choice(whole[:1] + rest) == by_choice(whole)


def test_http_refused(cluster):
    client = HTTP_EXAMPLE.Stream(COMPLETIONS, TALE)
    status, whole = raw_events(cluster, COMPLETIONS, client.body)
    last_id = parsed(whole[4])[0]
    fields = last_id.split(".")

    def refused(last_id, **changed):
        status, error = raw_events(cluster, COMPLETIONS, {**client.body, **changed}, last_id)
        return status, error["param"], error["message"]

    for forged in ("x", "2" + last_id[1:], last_id.rpartition(".")[0], "1." + "f" * 17, ".".join(
        [*fields[:5], ",".join(["0:0"] * 65), fields[6]]), "1......"):
        status, param, message = refused(forged)
        assert (status, param) == (400, "Last-Event-ID") and "Last-Event-ID is" in message
    assert "of 1 choices, the request has 2" in refused(last_id, n=2)[2]
    assert refused(last_id, stream_options={})[0] == 400
    assert refused(last_id, seed=1)[:2] == (400, "seed")
    assert refused(last_id, prompt="Another")[0] == 409
    n, check = fields[5].split(":")
    for events in (f"{n}:{int(check, 16) ^ 1:x}", "ffffffff:1"):  # others than it computes; more
        status, param, message = refused(".".join([*fields[:5], events, fields[6]]))
        assert (status, param) == (409, "Last-Event-ID") and "another answer" in message
    assert refused(last_id, resume_token_ids=[[5, 6, 7]])[0] == 409
    assert refused(last_id, resume_token_ids=5)[:2] == (400, "resume_token_ids")
    status, error = raw_events(cluster, COMPLETIONS, {**client.body, "n": 65})
    assert status == 400 and "64 choices" in error["message"]
    cluster.wait_idle()


# ---- routers that die
# -------------------------------------------------------------------------------------------------

ASK = ["--max-tokens", "60", "--temperature", "0.9", "--seed", "5", "--ignore-eos"]


def cli(servers, *args):
    return subprocess.Popen([
        os.path.join(BIN, "tandem"), "generate", "--server", servers, *ASK, *args,
        "Once upon a time"
    ], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def ended(p):
    out, err = p.communicate(timeout=60 * SLOW)
    assert p.returncode == 0, err
    return out, err.decode()


def test_router_killed_under_the_command_line(model):
    """It is killed at its 17th token and its 9th of what goes on; each time another one takes its
    port, to which the workers come back."""
    fault = {"TANDEM_FAULT": "router_token:kill:17"}
    with Cluster(model=model, envs={"router": fault}) as c:
        at = f"127.0.0.1:{c.port}"
        p = cli(at, "--token-ids")
        for fault in ({"TANDEM_FAULT": "router_token:kill:9"}, {"TANDEM_FAULT": ""}):
            assert c.router.wait_exit(60 * SLOW) == -signal.SIGKILL
            c.start_router(listen=at, env=fault)
        out, err = ended(p)
        whole, quiet = ended(cli(at, "--token-ids"))
        assert len(out.split()) == 60 and out == whole
        assert err.count("going on at " + at) >= 2 and "UNAVAILABLE" in err and not quiet
        c.wait_idle()


def test_two_routers(cluster, model, tmp_path):
    """The first of two dies; the other has workers of its own and goes on at once. What the Python
    examples give, by gRPC and by HTTP, is the same."""
    with Cluster(model=model, router_args=["--http-listen", "127.0.0.1:0"],
                 envs={"router": {"TANDEM_FAULT": "router_token:kill:20"}}) as c:
        both = f"127.0.0.1:{c.port},127.0.0.1:{cluster.port}"
        whole, _ = ended(cli(f"127.0.0.1:{cluster.port}"))
        out, err = ended(cli(both))
        assert out == whole and err.count("going on") == 1
        assert c.router.wait_exit(10 * SLOW) == -signal.SIGKILL
        out, err = ended(cli(both))  # the first is not there from the start
        assert out == whole and err.count("going on") == 1
        c.start_router(listen=f"127.0.0.1:{c.port}", env={"TANDEM_FAULT": "router_token:kill:11"})
        c.wait_workers(2)
        request = sampled(c, max_tokens=60, seed=5, ignore_eos=True)
        text = "".join(m.text for m in EXAMPLE.generate([c.channel, cluster.channel], request))
        assert (text + "\n").encode() == whole
        assert c.router.wait_exit(10 * SLOW) == -signal.SIGKILL
        c.start_router(listen=f"127.0.0.1:{c.port}", env={"TANDEM_FAULT": "router_token:kill:13"})
        c.wait_workers(2)
        servers = [f"127.0.0.1:{p}" for p in (Http(c).port, cluster.http.port)]
        body = {**TALE, "max_tokens": 60, "seed": 5}
        events = list(HTTP_EXAMPLE.stream(servers, COMPLETIONS, body))
        assert ("".join(e["choices"][0]["text"] for e in events) + "\n").encode() == whole
        assert sum(len(e["choices"][0]["token_ids"]) for e in events) == 60
        assert c.router.wait_exit(10 * SLOW) == -signal.SIGKILL
        # a load on both, of which none is lost
        c.start_router(listen=f"127.0.0.1:{c.port}", env={"TANDEM_FAULT": "router_token:kill:50"})
        c.wait_workers(2)
        rc, out, err = bench("serve", "--server", both, "--resume-ms", 60000, "--num-prompts", 8,
                             "--request-rate", "inf", "--isl", 16, "--osl", 40, "--ignore-eos",
                             "--result-dir", tmp_path, "--result-filename", "r.json", *ANY_LAG)
        assert rc == 0, out + err
        result = json.loads((tmp_path / "r.json").read_text())
        assert (result["completed"], result["total_output_tokens"]) == (8, 320)
        assert result["pd"]["resumes"] >= 1
        assert c.router.wait_exit(10 * SLOW) == -signal.SIGKILL


# ---- routers that leave, and that are ready
# -------------------------------------------------------------------------------------------------


def test_a_drain_hands_over(cluster, model, capsys):
    """What a drain has no time to finish ends behind its last token, by gRPC and by HTTP, and goes
    on at the other router. Each stream's decode worker stops at its fifth token, so none ends
    before."""
    long = {"max_tokens": 100, "seed": 9}
    stop = {f"decode-{i}": {"TANDEM_FAULT": "decode_token:stop:5"} for i in range(2)}
    whole = complete(cluster, sampled(cluster, ignore_eos=True, **long))
    want = "".join(m.text for m in whole)
    with Cluster(
            decode=2, envs=stop, model=model, worker_timeout_ms=60000 * SLOW, router_args=[
                "--http-listen", "127.0.0.1:0", "--drain-timeout-ms", 0, "--policy", "round_robin"
            ], worker_args=["--peer-timeout-ms", 60000 * SLOW]) as c:
        decode = [c.workers[name] for name in stop]
        messages = EXAMPLE.generate([c.channel, cluster.channel], sampled(
            c, ignore_eos=True, **long))
        servers = [f"127.0.0.1:{p}" for p in (Http(c).port, cluster.http.port)]
        events = HTTP_EXAMPLE.stream(servers, COMPLETIONS, {**TALE, **long})
        got = [next(messages)], [next(events)]
        for d in decode:
            d.wait_log(r"ev=fault_fires")
        c.router.signal(signal.SIGTERM)
        got[0].extend(messages)
        got[1].extend(events)
        assert joined(got[0]) == joined(whole)
        assert "".join(e["choices"][0]["text"] for e in got[1]) == want
        told = capsys.readouterr().err
        assert told.count("this router is draining; the answer can go on at another one: going on "
                          "at the next router") == 2, told
        assert c.router.wait_exit(20 * SLOW) == 0
        assert re.search(r"ev=drained live_at_start=2 left=2", c.router.log())
        for d in decode:
            d.signal(signal.SIGCONT)


def test_readiness_is_of_the_workers():
    """/readyz and the health name "ready": each role has a worker; the router's own health is
    another thing."""
    port = free_port()

    def ready():
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=10 * SLOW) as r:
                return r.status
        except urllib.error.HTTPError as e:
            return e.code

    with Cluster(prefill=0, decode=0, router_args=["--metrics-listen", f"127.0.0.1:{port}"]) as c:
        watch = c.channel.unary_stream("/grpc.health.v1.Health/Watch")(b"\x0a\x05ready",
                                                                       timeout=60 * SLOW)
        check = c.channel.unary_unary("/grpc.health.v1.Health/Check")
        serving, not_serving = b"\x08\x01", b"\x08\x02"
        assert next(watch) == not_serving and check(b"") == serving and ready() == 503
        c.start_worker("prefill")
        assert check(b"\x0a\x05ready") == not_serving
        decode = c.start_worker("decode")
        assert next(watch) == serving and check(b"\x0a\x05ready") == serving and ready() == 200
        decode.signal(signal.SIGTERM)
        assert next(watch) == not_serving and check(b"") == serving and ready() == 503
        watch.cancel()
        assert decode.wait_exit(20 * SLOW) == 0
