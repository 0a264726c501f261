"""Fields that end an answer or cut its prompt, and the small paths: each over HTTP and over gRPC,
and against what the answer is without them."""
import json

import grpc
import pytest

from harness import PATIENT, SLOW, Cluster, pb
from test_http import TALE, Http

OK, INVALID = grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def cluster():
    with Cluster(router_args=["--http-listen", "127.0.0.1:0"], **PATIENT) as c:
        c.http = Http(c)
        yield c
        c.wait_for(lambda: c.status().live == 0, "no request", 20 * SLOW)
        c.wait_idle()


def ids_of(cluster, prompt):
    return cluster.http.json("/tokenize", {"prompt": prompt})[1]["tokens"]


def generate(cluster, min_tokens=0, include_stop=False, truncate=0, **kwargs):
    r = cluster.request(**kwargs)
    r.stop.min_tokens, r.stop.include_stop = min_tokens, include_stop
    r.truncate_prompt_tokens = truncate
    return cluster.generate(r)


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("min_tokens", [1, 2, 9, 24])
def test_min_tokens_keeps_stop_tokens_away(cluster, min_tokens, temperature):
    """Until there are so many, the answer is that of a stop token that cannot be chosen."""
    ask = dict(prompt=TALE, max_tokens=24, temperature=temperature, seed=6, ignore_eos=True)
    stop = cluster.generate(**ask).tokens[0]
    at_once = generate(cluster, stop_token_ids=[stop], **ask)
    assert at_once.tokens == [stop] and at_once.finish == pb.FINISH_STOP
    never = cluster.generate(logit_bias=[(stop, -100)], **ask).tokens
    got = generate(cluster, min_tokens, stop_token_ids=[stop], **ask)
    assert got.code == OK and len(got.tokens) >= min_tokens
    assert got.tokens[:min_tokens] == never[:min_tokens]
    assert stop not in got.tokens[:-1]
    assert (got.finish == pb.FINISH_STOP) == (got.tokens[-1] == stop)
    status, http = cluster.http.json(
        PATH, {
            "prompt": TALE, "max_tokens": 24, "temperature": temperature, "seed": 6,
            "ignore_eos": True, "stop_token_ids": [stop], "min_tokens": min_tokens
        })
    assert status == 200 and http["choices"][0]["text"] == got.text
    assert http["usage"]["completion_tokens"] == len(got.tokens)


def test_a_suffix_needs_a_model_that_fills_in_the_middle(cluster):
    for path, body in ((PATH, {"prompt": TALE}), ("/v1/chat/completions", {
            "messages": [{"role": "user", "content": TALE}]})):
        status, said = cluster.http.json(path, {**body, "suffix": "The end."})
        assert status == 400 and said["error"]["param"] == "suffix", said
        assert "suffix is not supported" in said["error"]["message"]


def test_min_tokens_keeps_the_end_of_sequence_away(cluster):
    end = cluster.generate(prompt=TALE, max_tokens=1500, temperature=0)
    assert end.finish == pb.FINISH_STOP  # the story has an end
    n = len(end.tokens)
    got = generate(cluster, n + 20, prompt=TALE, max_tokens=n + 40, temperature=0)
    assert len(got.tokens) >= n + 20 and got.tokens[:n - 1] == end.tokens[:n - 1]


def test_min_tokens_keeps_stop_strings_away(cluster):
    free = cluster.generate(prompt=TALE, max_tokens=40, temperature=0, ignore_eos=True)
    word = " a"
    assert free.text.count(word) >= 2, free.text
    n = len(cluster.generate(prompt=TALE, max_tokens=40, temperature=0, stop=[word]).tokens)
    for min_tokens in (n, n + 1):
        got = generate(cluster, min_tokens, prompt=TALE, max_tokens=40, temperature=0, stop=[word],
                       ignore_eos=True)
        assert got.tokens == free.tokens[:len(got.tokens)] and len(got.tokens) >= min_tokens
        assert got.finish == pb.FINISH_STOP and free.text.startswith(got.text + word)
        assert (got.text.count(word) == 0) == (min_tokens == n)


def test_what_ends_the_text_is_part_of_it_when_asked(cluster):
    ask = dict(prompt=TALE, max_tokens=40, temperature=0)
    free = cluster.generate(**ask, ignore_eos=True)
    for stop in (" the", "e", free.text[10:14]):
        without = cluster.generate(stop=[stop], **ask)
        got = generate(cluster, include_stop=True, stop=[stop], **ask)
        assert got.text == without.text + stop and got.tokens == without.tokens
        assert got.stop_reason == stop
        status, http = cluster.http.json(
            PATH, {
                "prompt": TALE, "max_tokens": 40, "temperature": 0, "stop": stop,
                "include_stop_str_in_output": True
            })
        assert http["choices"][0]["text"] == got.text
        assert http["choices"][0]["stop_reason"] == stop
    token = free.tokens[3]
    without = cluster.generate(stop_token_ids=[token], **ask)
    got = generate(cluster, include_stop=True, stop_token_ids=[token], **ask)
    assert got.tokens == without.tokens and got.tokens[-1] == token
    assert got.text != without.text and got.text.startswith(without.text)
    assert free.text.startswith(got.text)


def test_stop_reason_is_the_token_of_stop_token_ids(cluster):
    """As vLLM has it: an integer, and null for the model's own end."""
    ask = {"prompt": TALE, "max_tokens": 1500, "temperature": 0}
    own = cluster.generate(**ask)
    assert own.finish == pb.FINISH_STOP and own.stop_reason == f"token {own.tokens[-1]}"
    first = own.tokens[0]
    for change, reason in (({}, None), ({"stop_token_ids": [own.tokens[-1]]}, None),
                           ({"stop_token_ids": [own.tokens[-1]], "ignore_eos": True},
                            own.tokens[-1]), ({"stop_token_ids": [first]}, first)):
        choice = cluster.http.json(PATH, {**ask, **change})[1]["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason), change


def test_a_prompt_is_truncated_from_its_beginning(cluster):
    ids = ids_of(cluster, TALE * 3)
    ask = {"max_tokens": 8, "temperature": 0}
    for keep in (1, 5, len(ids) - 1, len(ids), len(ids) + 7):
        want = cluster.generate(ids=ids[-keep:], max_tokens=8, temperature=0)
        for prompt in (ids, TALE * 3):
            status, got = cluster.http.json(PATH, {
                **ask, "prompt": prompt, "truncate_prompt_tokens": keep
            })
            assert status == 200 and got["choices"][0]["text"] == want.text
            assert got["usage"]["prompt_tokens"] == min(keep, len(ids))
        assert generate(cluster, truncate=keep, prompt=TALE * 3, max_tokens=8,
                        temperature=0).tokens == want.tokens
    longer = ids * (2500 // len(ids))  # than the context of 2,048
    status, got = cluster.http.json(PATH, {**ask, "prompt": longer})
    assert status == 400
    status, got = cluster.http.json(PATH, {**ask, "prompt": longer, "truncate_prompt_tokens": -1})
    want = cluster.generate(ids=longer[-2040:], max_tokens=8, temperature=0)
    assert got["usage"]["prompt_tokens"] == 2040 and got["choices"][0]["text"] == want.text
    assert generate(cluster, truncate=2040, ids=longer, max_tokens=8,
                    temperature=0).tokens == want.tokens
    refused = generate(cluster, ids=longer, max_tokens=8)
    assert refused.code == INVALID and refused.details == (
        f"token_ids has {len(longer)} ids, must be below the longest sequence, 2048")
    refused = generate(cluster, truncate=2040, ids=[5] * 8193, max_tokens=8)
    assert refused.code == INVALID and refused.details == "token_ids has 8193 elements, limit 8192"
    status, got = cluster.http.json(PATH, {
        **ask, "prompt": "fox " * 20000, "truncate_prompt_tokens": 5
    })
    assert status == 400 and "8192 tokens" in got["error"]["message"], got


@pytest.mark.parametrize(
    "body, param, words",
    [({"min_tokens": -1}, "min_tokens", "stop.min_tokens is -1, must be 0..16"),
     ({"min_tokens": 17}, "min_tokens", "stop.min_tokens is 17"),
     ({"min_tokens": 2**63 - 1}, "min_tokens", "must be 0..16"),
     ({"min_tokens": 5, "guided_regex": "a"}, "min_tokens", "beside guided"),
     ({"min_tokens": 5, "logit_bias": {str(i): 1 for i in range(1020)
                                       }, "stop_token_ids": [1, 2, 3, 4, 5]
       }, "min_tokens", "1024 entries together"),
     ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "must be 1..2047"),
     ({"truncate_prompt_tokens": 2048}, "truncate_prompt_tokens", "must be 1..2047"), ])
def test_refusals(cluster, body, param, words):
    status, got = cluster.http.json(PATH, {"prompt": TALE, **body})
    error = got["error"]
    assert status == 400 and error["param"] == param and words in error["message"], got


def test_detokenize(cluster):
    for text in (TALE, "a\u00e9\u4e16\U0001f98a\n", ""):
        ids = ids_of(cluster, text)
        status, got = cluster.http.json("/detokenize", {"tokens": ids, "model": "pocket"})
        assert status == 200
        whole = cluster.unary("/tandem.v1.Inference/Detokenize", pb.DetokenizeRequest(ids=ids),
                              pb.DetokenizeResponse).text
        assert got == {"prompt": whole} and whole.endswith(text), (text, got)
    for body, words in (({}, "must be a list"), ({"tokens": "a"}, "must be a list"),
                        ({"tokens": [1.5]}, "must be a list"),
                        ({"tokens": [1, -1]}, "tokens[1] is -1"),
                        ({"tokens": [10**9]}, "tokens[0] is 1000000000"),
                        ({"tokens": [1] * 9000}, "tokens has 9000 ids")):
        status, got = cluster.http.json("/detokenize", body)
        assert status == 400 and words in got["error"]["message"], got
        assert got["error"]["param"] == "tokens"
    assert cluster.http.json("/detokenize", {"tokens": [1], "model": "x"})[0] == 404


def test_echo(cluster):
    ids = ids_of(cluster, "The dog")
    told = cluster.http.json("/detokenize", {"tokens": ids})[1]["prompt"]
    ask = {"prompt": [TALE, ids], "n": 2, "seed": 3, "temperature": 1, "max_tokens": 7}
    _, plain = cluster.http.json(PATH, ask)
    status, got = cluster.http.json(PATH, {**ask, "echo": True})
    assert status == 200 and got["usage"] == plain["usage"]
    want = [
        prompt + c["text"] for prompt, c in zip((TALE, TALE, told, told), plain["choices"])
    ]
    assert [c["text"] for c in got["choices"]] == want
    events = cluster.http.events(PATH, {**ask, "echo": True})
    for i in range(4):
        mine = [e["choices"][0]["text"] for e in events if e["choices"][0]["index"] == i]
        assert "".join(mine) == want[i] and mine[0].startswith((TALE, TALE, told, told)[i])
    status, got = cluster.http.json(PATH, {"prompt": "x" * 30000, "echo": True, "n": 128})
    assert status == 400 and got["error"]["param"] in ("prompt", "max_tokens"), got
    status, got = cluster.http.json(PATH, {"prompt": "x" * 70000, "echo": True, "n": 128})
    assert status == 400 and "limit 8388608" in got["error"]["message"], got
    status, got = cluster.http.json("/v1/chat/completions", {
        "messages": [{"role": "user", "content": "x"}], "echo": True
    })
    assert status == 400 and got["error"]["param"] == "echo", got


def test_status_says_no_more_than_a_client_needs(cluster):
    status, got = cluster.http.json("/v1/status")
    assert status == 200 and got["withheld"] is True and got["model"] == "pocket"
    assert sorted((w["role"], w["state"]) for w in got["workers"]) == [("decode", "ready"),
                                                                       ("prefill", "ready")]
    for w in cluster.status().workers:
        for secret in (w.name, w.address, str(w.pid), str(w.kv_blocks)):
            assert json.dumps(secret) not in json.dumps(got["workers"])
    assert all(w["name"] == w["address"] == "" and w["pid"] == 0 for w in got["workers"])
