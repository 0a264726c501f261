"""Log-probabilities of the prompt: those of the logits of one process, and to the bit those that
the same tokens had when they were generated (I1), whatever the mode, the chunks, the cache, and
who died meanwhile. Over HTTP as vLLM's prompt_logprobs and as OpenAI's echo with logprobs."""
import array
import json
import math
import os
import subprocess
import threading

import grpc
import pytest

from harness import BIN, PATIENT, POCKET, SHORT, SLOW, Cluster, pb
from test_http import Http

OK, INVALID = grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT
TALE = "Once upon a time there was a small fox who lived in the wood and"
N = 60  # tokens that are generated behind it


def ask(c, ids, n_top, **more):
    """(entries of the prompt, tokens, messages) of a request that wants the prompt's."""
    r = c.request(ids=ids, temperature=0, seed=1, ignore_eos=True, **{"max_tokens": 2, **more})
    r.sampling.prompt_logprobs = n_top
    messages = list(c.stream(r))
    entries, tokens = [], []
    for m in messages:
        if m.prompt_logprobs:
            assert not tokens, "a token came before the prompt's log-probabilities"
        entries += [(p.token, p.logprob, p.rank, [(t.token, t.logprob) for t in p.top])
                    for p in m.prompt_logprobs]
        tokens += m.token_ids
    assert [e[0] for e in entries] == list(ids)
    assert entries[0][1:] == (0.0, 0, [])
    return entries, tokens, messages


def generated(c):
    """The tale and what the model makes of it, and of each made token its log-probabilities."""
    ids = list(
        c.unary("/tandem.v1.Inference/Tokenize", pb.TokenizeRequest(prompt=TALE),
                pb.TokenizeResponse).ids)
    r = c.request(ids=ids, temperature=0, seed=1, ignore_eos=True, max_tokens=N, logprobs=3)
    tokens, lps = [], []
    for m in c.stream(r):
        tokens += m.token_ids
        lps += [(x.logprob, [(t.token, t.logprob) for t in x.top]) for x in m.logprobs]
    assert len(tokens) == len(lps) == N
    return ids, ids + tokens, lps


def check(c, want=None):
    """All in one cluster; returns what it was told of the long prompt, the same everywhere."""
    ids, long, lps = generated(c)
    entries, _, messages = ask(c, long, 3)
    assert messages[-1].usage.cached_tokens == 0
    for e, (logprob, top) in zip(entries[len(ids):], lps):
        assert e[1] == logprob and e[3] == top and e[2] == 1
    assert want is None or entries == want
    for n_top in (0, 20):  # again, with its prefix in every cache
        again = ask(c, long, n_top)[0]
        assert [e[:3] for e in again] == [e[:3] for e in entries]
        assert all(len(e[3]) == n_top for e in again[1:])
    # the cache serves who does not ask
    r = c.request(ids=long, temperature=0, max_tokens=2)
    last = list(c.stream(r))[-1]
    assert last.usage.cached_tokens > 0
    return entries


@pytest.fixture(scope="module")
def cluster():
    with Cluster(router_args=["--http-listen", "127.0.0.1:0"], **PATIENT) as c:
        c.http = Http(c)
        yield c
        c.wait_idle()


@pytest.fixture(scope="module")
def want(cluster):
    return check(cluster)


def test_logits_of_one_process(cluster, want, tmp_path):
    out = tmp_path / "logits.f32"
    subprocess.run([os.path.join(BIN, "tandem"), "logits", "--model", POCKET, "--tokens",
                    ",".join(str(e[0]) for e in want), "--out", str(out), "--dtype", "f32"],
                   check=True, timeout=60 * SLOW, stdout=subprocess.DEVNULL)
    logits = array.array("f", out.read_bytes())
    vocab = len(logits) // len(want)
    for i in range(1, len(want)):
        row = logits[(i - 1) * vocab:i * vocab]
        top = max(row)
        log_z = top + math.log(math.fsum(math.exp(x - top) for x in row))
        token, logprob, rank, best = want[i]
        assert abs(logprob - (row[token] - log_z)) < 2e-5
        assert rank == 1 + sum(x > row[token] for x in row)
        for t, lp in best:
            assert abs(lp - (row[t] - log_z)) < 2e-5


def small_steps(chunk, **more):
    args = [*PATIENT.get("worker_args", ()), "--max-step-tokens", str(chunk), "--max-batch", "8"]
    return Cluster(**{**PATIENT, **more, "worker_args": args})


@pytest.mark.parametrize("mode,chunk", [("colocated", 16), ("pd", 17)] if SHORT else
                         [("colocated", 16), ("colocated", 512), ("pd", 17), ("pd", 48),
                          ("hybrid", 32)])
def test_modes_and_chunks(want, mode, chunk):
    with small_steps(chunk, prefill=0 if mode == "colocated" else 1, mode=mode) as c:
        check(c, want)
        c.wait_idle()


def test_prefill_killed_in_the_middle(want):
    with small_steps(16, prefill=0) as c:
        c.start_worker("prefill", env={"TANDEM_FAULT": "chunk_submitted:kill:3"})
        box = []
        t = threading.Thread(target=lambda: box.append(ask(c, [e[0] for e in want], 3)))
        t.start()
        c.workers["prefill-0"].wait_exit(30 * SLOW)
        c.start_worker("prefill")
        t.join()
        entries, _, messages = box[0]
        assert entries == want and messages[-1].ledger.failovers == 1
        c.wait_idle()


def test_one_token_and_choices(cluster, want):
    ids = [e[0] for e in want]
    entries, tokens, _ = ask(cluster, ids[:1], 2)  # nothing is known of a prompt's first token
    assert len(entries) == 1 and len(tokens) == 2
    entries, _, _ = ask(cluster, ids, 3, max_tokens=1)  # no decode worker takes part
    assert entries == want
    r = cluster.request(ids=ids, seed=1, temperature=0.9, max_tokens=3, n=3)
    r.sampling.prompt_logprobs = 1
    messages = list(cluster.stream(r))
    scored = [m for m in messages if m.prompt_logprobs]
    assert {m.choice for m in scored} == {0}
    assert sum(len(m.prompt_logprobs) for m in scored) == len(ids)
    assert {m.choice for m in messages} == {0, 1, 2}
    assert messages.index(scored[-1]) < min(
        i for i, m in enumerate(messages) if m.choice > 0 or m.token_ids)


def test_refused(cluster):
    for words, change in (("prompt_logprobs is 21, must be 0..20", {"prompt_logprobs": 21}),
                          ("prompt_logprobs is -1, must be 0..20", {"prompt_logprobs": -1}),
                          ("best_of is 3 beside prompt_logprobs", {"prompt_logprobs": 1,
                                                                   "best_of": 3})):
        r = cluster.request(prompt="x", max_tokens=1)
        for k, v in change.items():
            setattr(r.sampling, k, v)
        got = cluster.generate(r)
        assert got.code == INVALID and words in got.details, got.details
    for path, body, param in (
        ("/v1/completions", {"prompt": "x", "prompt_logprobs": 1, "stream": True},
         "prompt_logprobs"),
        ("/v1/completions", {"prompt": "x", "prompt_logprobs": -1}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "x", "prompt_logprobs": "1"}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "x", "echo": True, "logprobs": 1, "best_of": 2}, "best_of"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "echo": True,
                                  "logprobs": True}, "echo"),
    ):
        status, got = cluster.http.json(path, body)
        assert status == 400 and got["error"]["param"] == param, got


def decoded(cluster, token):
    return cluster.unary("/tandem.v1.Inference/Detokenize", pb.DetokenizeRequest(ids=[token]),
                         pb.DetokenizeResponse).text


def f32(x):
    """A number of JSON as the float that it was."""
    return array.array("f", [x])[0]


def test_http_prompt_logprobs(cluster, want):
    ids = [e[0] for e in want]
    body = {"prompt": [ids, ids[:5]], "max_tokens": 2, "prompt_logprobs": 3, "n": 2,
            "temperature": 0}
    status, got = cluster.http.json("/v1/completions", body)
    assert status == 200 and len(got["choices"]) == 4, got
    for choice, n in zip(got["choices"], (len(ids), len(ids), 5, 5)):
        lists = choice["prompt_logprobs"]
        assert lists[0] is None and len(lists) == n
        for (token, logprob, rank, top), entry in zip(want[1:n], lists[1:]):
            assert f32(entry[str(token)]["logprob"]) == logprob
            assert entry[str(token)]["rank"] == rank
            assert entry[str(token)]["decoded_token"] == decoded(cluster, token)
            assert {int(k) for k in entry} == {token} | {t for t, _ in top}
            for i, (t, lp) in enumerate(top):
                assert f32(entry[str(t)]["logprob"]) == lp
                assert t == token or entry[str(t)]["rank"] == i + 1
    status, got = cluster.http.json("/v1/chat/completions", {
        "messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 2,
        "prompt_logprobs": 0
    })
    assert status == 200 and "prompt_logprobs" not in got["choices"][0]
    assert got["prompt_logprobs"][0] is None
    assert len(got["prompt_logprobs"]) == got["usage"]["prompt_tokens"]
    assert all(len(e) == 1 for e in got["prompt_logprobs"][1:])


def test_echo_with_logprobs(cluster):
    body = {"prompt": TALE, "max_tokens": 3, "echo": True, "logprobs": 2, "temperature": 0}
    status, got = cluster.http.json("/v1/completions", body)
    assert status == 200, got
    choice = got["choices"][0]
    lists = choice["logprobs"]
    n = got["usage"]["prompt_tokens"]
    assert choice["text"].startswith(TALE) and "prompt_logprobs" not in choice
    assert {len(v) for v in lists.values()} == {n + 3}
    assert lists["token_logprobs"][0] is None and lists["top_logprobs"][0] is None
    assert all(x <= 0 for x in lists["token_logprobs"][1:])
    for token, own, best in list(
            zip(lists["tokens"], lists["token_logprobs"], lists["top_logprobs"]))[1:]:
        assert best[token] == own  # the two best, and the token where it is none of them
        assert len(best) == 2 or (len(best) == 3 and own == min(best.values())), best
    assert lists["text_offset"] == sorted(lists["text_offset"])
    assert lists["text_offset"][n] == len(TALE)
    for token, at in zip(lists["tokens"][n:], lists["text_offset"][n:]):
        assert choice["text"].startswith(token, at)
    ids = list(
        cluster.unary("/tandem.v1.Inference/Tokenize", pb.TokenizeRequest(prompt=TALE),
                      pb.TokenizeResponse).ids)
    entries = ask(cluster, ids, 2)[0]
    assert [f32(x) for x in lists["token_logprobs"][1:n]] == [e[1] for e in entries[1:]]
    # the same, streamed and with two choices: each begins with the prompt
    events = cluster.http.events("/v1/completions", {**body, "n": 2})
    for i in range(2):
        mine = [e["choices"][0] for e in events if e["choices"] and e["choices"][0]["index"] == i]
        assert mine[0]["text"].startswith(TALE)
        joined = [x for m in mine if m["logprobs"] for x in m["logprobs"]["token_logprobs"]]
        assert joined == lists["token_logprobs"]
        offsets = [x for m in mine if m["logprobs"] for x in m["logprobs"]["text_offset"]]
        assert offsets == lists["text_offset"]


@pytest.mark.parametrize("prompt", [
    "<|im_start|>user\nOnce upon<|im_end|>", "One<|endoftext|>Two", "<|endoftext|>Once upon a time"
])
def test_offsets_of_special_tokens(cluster, prompt):
    """Of the text's own each is counted; the one that the tokenizer puts before it is not in it."""
    ids = cluster.http.json("/tokenize", {"prompt": prompt})[1]["tokens"]
    for asked in (prompt, ids):
        status, got = cluster.http.json("/v1/completions", {
            "prompt": asked, "max_tokens": 1, "echo": True, "logprobs": 0, "temperature": 0
        })
        choice = got["choices"][0]
        assert status == 200 and choice["text"].startswith(prompt if asked is prompt else
                                                           "<|endoftext|>" + prompt)
        at = 0
        lists = choice["logprobs"]
        own = ids[0] == 0 and asked is prompt
        for token, offset in list(zip(lists["tokens"], lists["text_offset"]))[own:-1]:
            if own and ids[1] == 0 and not at:  # of two that are the same, the text has the first
                at = len(token)
            else:
                assert choice["text"].startswith(token, offset) and offset == at
                at += len(token)
        assert lists["text_offset"][-1] == len(choice["text"]) - len(lists["tokens"][-1])


def test_the_prompt_alone(cluster, want):
    """max_tokens 0: what scores texts (lm-eval's loglikelihood) and wants no output."""
    ids = [e[0] for e in want]
    got, tokens, messages = ask(cluster, ids, 3, max_tokens=0, logprobs=2)
    assert got == want and tokens == [] and messages[-1].usage.output_tokens == 0
    assert messages[-1].finish_reason == pb.FINISH_LENGTH
    assert not any(m.text or m.logprobs for m in messages)
    body = {"prompt": [TALE, ids[:5]], "max_tokens": 0, "echo": True}
    status, scored = cluster.http.json("/v1/completions", {**body, "logprobs": 3})
    assert status == 200, scored
    assert scored["usage"]["completion_tokens"] == 0
    for choice, n in zip(scored["choices"], (None, 5)):
        lists = choice["logprobs"]
        assert choice["finish_reason"] == "length"
        assert "".join(lists["tokens"]).endswith(choice["text"])
        assert n is None or [f32(x) for x in lists["token_logprobs"][1:]
                             ] == [e[1] for e in want[1:n]]
    status, plain = cluster.http.json("/v1/completions", body)
    assert status == 200 and [c["text"] for c in plain["choices"]
                              ] == [c["text"] for c in scored["choices"]]
    assert plain["choices"][0]["text"] == TALE and plain["choices"][0]["logprobs"] is None
    events = cluster.http.events("/v1/completions", {**body, "prompt": TALE})
    assert "".join(e["choices"][0]["text"] for e in events if e["choices"]) == TALE
    for more, param in (({"echo": False}, "max_tokens"), ({"n": 2}, "n"),
                        ({"min_tokens": 1}, "min_tokens")):
        status, refused = cluster.http.json("/v1/completions", {**body, **more})
        assert status == 400 and refused["error"]["param"] == param, refused


def test_long_prompt(cluster):
    """In many messages, each of a bounded size."""
    ids = [3 + i * 7 % 900 for i in range(1500)]
    entries, _, messages = ask(cluster, ids, 20)
    assert len(entries) == 1500
    assert max(len(m.prompt_logprobs) for m in messages) <= 64
    status, got = cluster.http.json("/v1/completions",
                                    {"prompt": ids, "max_tokens": 1, "prompt_logprobs": 20})
    assert status == 200 and len(got["choices"][0]["prompt_logprobs"]) == 1500
    assert json.dumps(got).count("logprob") > 1499 * 20
