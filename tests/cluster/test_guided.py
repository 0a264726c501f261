"""Structured output: a JSON schema, an expression, choices and rules. The tokens are those of one
process, whatever the mode, the batch, a preemption or a death in the middle (I1); what ends is
valid, and what is cut off is the beginning of something valid; what cannot be kept is refused by
name."""
import json
import os
import random
import re
import signal
import threading

import grpc
import pytest

from harness import POCKET, SHORT, SLOW, Cluster, as_result, one_process, pb
from test_device import EMULATED

SCHEMA = {
    "type": "object", "properties": {
        "name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 3,
                                                             "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}
    }, "required": ["name", "age", "next"], "additionalProperties": False
}
REGEX = "(Mon|Tues)day, [0-9]{1,2}:[0-5][0-9]( [ap]m)?"
RULES = 'root ::= "<" word (" " word)* ">"\nword ::= [a-z]{2,5} | root\n'
CHOICES = ["a cat", "a dog", "a cat and a dog"]
# numbers: enum td_grammar_kind (common/text/grammar.h)
GUIDES = [
    (2, [json.dumps(SCHEMA)], lambda t: pb.GuidedOutput(json_schema=t[0])),
    (3, [REGEX], lambda t: pb.GuidedOutput(regex=t[0])),
    (4, CHOICES, lambda t: pb.GuidedOutput(choice=pb.GuidedChoice(texts=t))),
    (5, [RULES], lambda t: pb.GuidedOutput(grammar=t[0])),
    (1, [], lambda t: pb.GuidedOutput(json_object=True)),
]
N = 15 if SHORT else 40


def make_requests():
    rng = random.Random(11)
    out = []
    for i in range(N):
        kind, texts, _ = GUIDES[i % len(GUIDES)]
        out.append({
            "ids": [rng.randrange(3, 1000) for _ in range(rng.choice([2, 17, 60]))],
            "max_tokens": rng.choice([1, 3, 12, 100]), "seed": rng.randrange(1 << 40),
            "logprobs": 0, "temperature": rng.choice([0.0, 0.8, 1.5]),
            "top_p": rng.choice([1.0, 0.9]), "repetition_penalty": rng.choice([1.0, 1.2]),
            "guided": {"kind": kind, "texts": texts}
        })
        if i % 7 == 6:  # a few among them are not guided
            del out[-1]["guided"]
    return out


REQUESTS = make_requests()


def wire(c, q):
    rest = {k: v for k, v in q.items() if k != "guided"}
    guide = q.get("guided")
    if not guide:
        return c.request(ignore_eos=True, **rest)
    build = next(b for kind, _, b in GUIDES if kind == guide["kind"])
    return c.request(guided=build(guide["texts"]), **rest)


@pytest.fixture(scope="module")
def oracle():
    results, _ = one_process(REQUESTS)
    assert any(len(set(t)) > 3 for t, _ in results)
    return results


def is_schemas(value):
    """By hand: valid by SCHEMA."""
    assert list(value) == [k for k in SCHEMA["properties"] if k in value], value
    assert isinstance(value["name"], str) and len(value["name"]) <= 12
    assert isinstance(value["age"], int) and 3 <= value["age"] <= 120
    assert set(value.get("tags", [])) <= {"red", "green", "blue"} and len(
        value.get("tags", [])) <= 3
    assert value["next"] is None or is_schemas(value["next"])
    return True


def check_text(q, r):
    """What has ended is valid; what was cut off has all its tokens."""
    kind = q["guided"]["kind"]
    ended = r.finish == pb.FINISH_STOP
    if not ended:
        assert len(r.tokens) == q["max_tokens"]
    if kind == 4:
        assert r.text in CHOICES if ended else any(t.startswith(r.text) for t in CHOICES)
    elif not ended:
        assert r.text[:1] in {1: "{", 2: "{", 3: "MT", 5: "<"}[kind]
    elif kind == 3:
        assert re.fullmatch(REGEX, r.text), r.text
    elif kind == 5:
        assert r.text.count("<") == r.text.count(">") >= 1
        assert re.fullmatch("[<>a-z ]+", r.text), r.text
    else:
        value = json.loads(r.text)
        assert kind == 1 or is_schemas(value), r.text
    return ended


def check(c, want, requests=tuple(REQUESTS)):
    results = c.generate_many([wire(c, q) for q in requests])
    n_ended = 0
    for i, (q, r, expected) in enumerate(zip(requests, results, want, strict=True)):
        assert as_result(r) == expected, f"request {i}: {r.text!r}"
        if "guided" in q:
            n_ended += check_text(q, r)
    assert n_ended >= len(requests) // 8
    c.wait_idle(4)


def test_one_process_batched_and_preempted(oracle):
    assert one_process(REQUESTS, concurrency=16, chunk=48, order=3, prefix=1)[0] == oracle
    with open(POCKET + "/config.json", encoding="utf-8") as f:
        m = json.load(f)
    block = 16 * 2 * m["num_hidden_layers"] * m["num_key_value_heads"] * m["head_dim"] * 2
    # short prompts with long outputs in a pool that cannot hold them all: 12 of 5 blocks in the end
    requests = [
        dict(REQUESTS[0], ids=[3 + i] * 10, max_tokens=60, seed=i, temperature=0.8,
             guided={"kind": kind, "texts": texts}) for i, (kind, texts, _) in enumerate(
                 [GUIDES[1 if i % 6 == 5 else 4 * (i % 2)] for i in range(12)])
    ]
    want, _ = one_process(requests)
    results, preemptions = one_process(requests, concurrency=12, chunk=64, kv=str(block * 12))
    assert results == want
    assert preemptions > 0


@pytest.mark.parametrize("mode", ["pd"] if SHORT else ["pd", "colocated", "hybrid"])
def test_cluster(oracle, mode):
    with Cluster(prefill=0 if mode == "colocated" else 1, decode=2, mode=mode, dtype="bf16") as c:
        check(c, oracle)


def tokens_of(results):
    return [tokens for tokens, _ in results]


@pytest.mark.parametrize("where", ["two ranks", "device"])
def test_elsewhere_the_tokens_of_one_cpu_worker(where):
    """In f32 rounding decides no token: on two ranks, and on a device, a grammar's rows get
    the tokens of one rank on a CPU; and in a cluster the bits of one process of the same kind."""
    is_device = where == "device"
    if is_device and os.environ.get("TANDEM_TEST_SANITIZER") == "thread":
        pytest.skip("the emulated GPU switches stacks, which ThreadSanitizer cannot follow")
    if is_device and not os.path.exists(EMULATED):
        pytest.skip("no emulated GPU in this build: it takes a C++ compiler")
    requests = REQUESTS[:15]
    one = one_process(requests, dtype="f32")[0]
    kind = dict(device="cuda", library=EMULATED) if is_device else dict(tp=2)
    want = one_process(requests, dtype="f32", **kind)[0]
    assert tokens_of(want) == tokens_of(one)
    assert want != one, "the logprobs are one rank's on a CPU, too: nothing was shown"
    args = ["--device", "cuda"] if is_device else ["--tp", 2, "--threads", 2]
    env = dict(os.environ, TANDEM_CUDA_LIBRARY=EMULATED)
    with Cluster(worker_args=args, envs={"prefill-0": env, "decode-0": env}) as c:
        if is_device:
            assert "kind=cuda" in c.workers["decode-0"].wait_log(r"ev=device .*").group(0)
        check(c, want, requests)
        check(c, want, requests)  # with prefix hits


def test_decode_killed_in_the_middle(oracle):
    with Cluster(prefill=1, decode=2, dtype="bf16") as c:
        box = []
        t = threading.Thread(target=lambda: box.append(check(c, oracle)))
        t.start()
        c.wait_for(
            lambda: any(w.name == "decode-0" and w.running
                        for w in c.status().workers) or not t.is_alive(), "decode to run",
            20 * SLOW)
        c.workers["decode-0"].signal(signal.SIGKILL)
        t.join()
        assert box == [None], "an answer differed: its assertion is above"


@pytest.mark.parametrize("guided,words", [
    (pb.GuidedOutput(), "guided is empty"),
    (pb.GuidedOutput(json_object=False), "guided.json_object is false"),
    (pb.GuidedOutput(regex="(a"), "guided: regex: at byte 2"),
    (pb.GuidedOutput(regex="a{9999}"), "limit 4096"),
    (pb.GuidedOutput(grammar='root ::= root "a" | "b"'), "left recursion"),
    (pb.GuidedOutput(choice=pb.GuidedChoice(texts=[])), "guided: choice: 0 alternatives"),
    (pb.GuidedOutput(choice=pb.GuidedChoice(texts=[""])), "alternative 0 is empty"),
    (pb.GuidedOutput(json_schema='{"type":"object","minProperties":2}'), "minProperties"),
    (pb.GuidedOutput(json_schema='{"type":"string","not":{"pattern":"a"}}'), "the keyword not is"),
    (pb.GuidedOutput(json_schema='{"if":{"pattern":"a"}}'), "the keyword if is"),
    (pb.GuidedOutput(json_schema="{"), "not JSON"),
    (pb.GuidedOutput(json_schema='{"enum":["' + "x" * (256 << 10) + '"]}'), "limit 262144"),
])
def test_refused(cluster, guided, words):
    r = cluster.generate(prompt="x", guided=guided)
    assert r.code == grpc.StatusCode.INVALID_ARGUMENT, (r.code, r.details)
    assert words in r.details, r.details


def test_refused_beside_ignore_eos(cluster):
    r = cluster.generate(prompt="x", guided=pb.GuidedOutput(regex="a"), ignore_eos=True)
    assert r.code == grpc.StatusCode.INVALID_ARGUMENT and "stop.ignore_eos" in r.details


def ask_regex(c, regex):
    guided = pb.GuidedOutput(regex=regex)
    return c.stream(c.request(prompt="x", max_tokens=40, seed=5, guided=guided))


def end_of(stream):
    text = ""
    try:
        for m in stream:
            text += m.text
    except grpc.RpcError:
        pass
    return stream.code(), stream.details() or text


def test_compiling_holds_up_nobody(tmp_path):
    """While grammars are being compiled (the gate is shut), other requests answer in full."""
    gate = tmp_path / "gate"
    with Cluster(router_args=["--test-guide-gate", str(gate)]) as c:
        first, same, other, wrong = (ask_regex(c, r)
                                     for r in ("[ab]{3}c", "[ab]{3}c", "[de]{2}", "(a"))
        plain = list(c.stream(c.request(prompt="x", max_tokens=20, ignore_eos=True)))
        assert sum(len(m.text) for m in plain) and plain[-1].usage.output_tokens == 20
        assert not any(s.done() for s in (first, same, other, wrong))
        other.cancel()
        many = [ask_regex(c, f"[de]{{{i}}}") for i in range(1, 67)]
        # 64 grammars wait: those of `first` and `wrong`, and of `other` unless its cancel was read
        c.wait_for(lambda: sum(s.done() for s in many) >= 4, "what is too much to be refused",
                   20 * SLOW)
        refused = [end_of(s) for s in many if s.done()]
        assert all(code == grpc.StatusCode.RESOURCE_EXHAUSTED
                   and "64 grammars wait to be compiled" in text for code, text in refused)
        for s in many:
            s.cancel()
        gate.touch()
        code, text = end_of(first)
        assert code == grpc.StatusCode.OK and re.fullmatch("[ab]{3}c", text)
        assert end_of(same) == (code, text)
        code, text = end_of(wrong)
        assert code == grpc.StatusCode.INVALID_ARGUMENT and "regex: at byte 2" in text
        # Of the many those are compiled, too, whose cancel was not read in time, and only so many
        # grammars are remembered: first one behind them all, then the one that is to be the latest.
        ok = grpc.StatusCode.OK
        c.wait_for(lambda: end_of(ask_regex(c, "[ab]{4}c"))[0] == ok, "the many", 20 * SLOW)
        assert end_of(ask_regex(c, "[ab]{3}c"))[0] == ok
        gate.unlink()
        assert end_of(ask_regex(c, "[ab]{3}c"))[0] == ok  # it was accepted lately
        c.wait_idle(2)


def test_workers_compile_beside_their_tokens(tmp_path):
    """While a worker compiles grammars (its gate is shut), it answers others; who leaves meanwhile
    frees what it has."""
    gate = tmp_path / "gate"
    with Cluster(worker_args=["--test-guide-gate", str(gate)]) as c:
        first, same, gone = (ask_regex(c, r) for r in ("[ab]{3}c", "[ab]{3}c", "[de]{2}"))
        c.wait_for(
            lambda: any(w.role == "decode" and w.assigned == 3 and w.calls_unseen == 0
                        for w in c.status().workers), "the decode worker to have the three",
            20 * SLOW)
        plain = list(c.stream(c.request(prompt="x", max_tokens=20, ignore_eos=True)))
        assert plain[-1].usage.output_tokens == 20
        assert not any(s.done() for s in (first, same, gone))
        gone.cancel()
        gate.touch()
        code, text = end_of(first)
        assert code == grpc.StatusCode.OK and re.fullmatch("[ab]{3}c", text)
        assert end_of(same) == (code, text)
        gate.unlink()
        assert end_of(ask_regex(c, "[ab]{3}c")) == (code, text)  # the workers remember it
        waits = ask_regex(c, "[fg]{2}")
        c.wait_for(lambda: c.status().live == 1, "one to wait", 20 * SLOW)
        waits.cancel()
        c.wait_idle(2)


def test_grammar_waits_no_longer_than_this(tmp_path):
    with Cluster(prefill=0, decode=1, mode="colocated", router_args=[
            "--test-guide-gate", str(tmp_path / "gate"), "--test-guide-wait-ms", "50"]) as c:
        r = end_of(ask_regex(c, "[ab]"))
        assert r[0] == grpc.StatusCode.RESOURCE_EXHAUSTED and "within 50 ms" in r[1], r
        assert c.generate(prompt="x", max_tokens=2).code == grpc.StatusCode.OK


@pytest.fixture(scope="module")
def cluster():
    with Cluster() as c:
        yield c
