"""allowed_token_ids and bad_words: against the same answers by logit_bias, which the plain sampler
makes, over both doors and with a decode worker killed; and continue_final_message, against the same
prompt as text."""
import signal
import threading

import grpc
import pytest

from harness import PATIENT, SLOW, Cluster, pb
from test_http import TALE, Http

OK, INVALID = grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT
VOCAB = 2048
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def cluster():
    with Cluster(decode=2, router_args=["--http-listen", "127.0.0.1:0"], **PATIENT) as c:
        c.http = Http(c)
        yield c
        c.wait_for(lambda: c.status().live == 0, "no request", 20 * SLOW)
        c.wait_idle()


def filtered(c, allowed=(), bad_words=(), **ask):
    r = c.request(**ask)
    r.sampling.allowed_token_ids.extend(allowed)
    r.sampling.bad_words.extend(bad_words)
    return r


def text_of(c, ids):
    return c.http.json("/detokenize", {"tokens": ids})[1]["prompt"]


ASKS = [dict(prompt=TALE, max_tokens=24, temperature=t, seed=s, ignore_eos=True, logprobs=2)
        for t, s in ((0, 1), (1.0, 5), (0.7, 9))]


def without(c, ask):
    """The tokens that an answer has, and the answer without them, by a bias that leaves none of
    their weight."""
    gone = sorted(set(c.generate(**ask).tokens))
    return gone, c.generate(logit_bias=[(t, -100) for t in gone], **ask)


@pytest.mark.parametrize("ask", ASKS)
def test_allowed_tokens(cluster, ask):
    gone, want = without(cluster, ask)
    kept = [t for t in range(VOCAB) if t not in gone]
    got = cluster.generate(filtered(cluster, kept, **ask))
    assert want.code == got.code == OK, got.details
    assert got.tokens == want.tokens and got.logprobs == want.logprobs
    assert not set(got.tokens) & set(gone)
    few = kept[100:104]
    got = cluster.generate(filtered(cluster, few, **ask))
    assert got.code == OK and set(got.tokens) <= set(few)
    body = {k: v for k, v in ask.items() if k != "logprobs"}
    status, http = cluster.http.json(PATH, {**body, "allowed_token_ids": few})
    assert status == 200 and http["choices"][0]["text"] == got.text


@pytest.mark.parametrize("ask", ASKS)
def test_bad_words(cluster, ask):
    """A word's tokens until its last one are the answer's; then another comes."""
    plain = cluster.generate(**ask)
    word = plain.text.split()[2].strip(".,!?\"'")
    got = cluster.generate(filtered(cluster, bad_words=[word], **ask))
    assert got.code == OK, got.details
    assert f" {word} " in plain.text + " " or word in plain.text
    at = [a == b for a, b in zip(plain.tokens, got.tokens)].index(False)
    assert word in text_of(cluster, plain.tokens[:at + 1]), (word, plain.text, got.text)
    body = {k: v for k, v in ask.items() if k != "logprobs"}
    status, http = cluster.http.json(PATH, {**body, "bad_words": [word]})
    assert status == 200 and http["choices"][0]["text"] == got.text
    _, alone = cluster.http.json("/tokenize", {"prompt": " " + word, "add_special_tokens": False})
    if len(alone["tokens"]) == 1:
        bias = [(t, -100) for t in alone["tokens"]]
        assert cluster.generate(logit_bias=bias, **ask).tokens[:at + 1] == got.tokens[:at + 1]


def test_min_tokens(cluster):
    """Stop tokens are not left over as the only ones that are allowed."""
    r = filtered(cluster, [5], prompt=TALE, max_tokens=4, stop_token_ids=[5])
    got = cluster.generate(r)
    assert got.code == OK and got.tokens == [5] and got.finish == pb.FINISH_STOP
    r.stop.min_tokens = 2
    # Many: the decode worker's word that its transfer ended may come before the prefill worker's.
    # One other worker is asked, and no more.
    before = cluster.status().failovers
    for got in cluster.generate_many([r] * 100):
        assert got.code == INVALID and "leave no token" in got.details, got.details
    assert cluster.status().failovers - before <= 100
    r.sampling.allowed_token_ids.append(6)
    got = cluster.generate(r)
    assert got.code == OK and got.tokens[:2] == [6, 6]


def test_refusals(cluster):
    regex = pb.GuidedOutput(regex="a+")
    for r, words in (
        (filtered(cluster, [VOCAB], prompt="x"), "allowed_token_ids[0] is 2048, must be 0..2047"),
        (filtered(cluster, [-1], prompt="x"), "allowed_token_ids[0] is -1"),
        (filtered(cluster, [1], prompt="x", guided=regex), "allowed_token_ids is set beside"),
        (filtered(cluster, bad_words=["a"], prompt="x", guided=regex), "bad_words is set beside"),
        (filtered(cluster, bad_words=[""], prompt="x"), "bad_words[0] has 0 bytes"),
        (filtered(cluster, bad_words=["a", " "], prompt="x"), "bad_words[1] has no token"),
        (filtered(cluster, bad_words=["x" * 257], prompt="x"), "bad_words[0] has 257 bytes"),
        (filtered(cluster, bad_words=["z9" * 60], prompt="x"), "bad_words[0] has more tokens"),
        (filtered(cluster, bad_words=["a"] * 129, prompt="x"), "sampling.bad_words"),
        (filtered(cluster, [1] * 65537, prompt="x"), "sampling.allowed_token_ids"),
    ):
        got = cluster.generate(r)
        assert got.code in (INVALID, grpc.StatusCode.RESOURCE_EXHAUSTED), (words, got.code)
        assert words in got.details, (words, got.details)
    for field, value in (("allowed_token_ids", [VOCAB]), ("bad_words", [""])):
        status, said = cluster.http.json(PATH, {"prompt": "x", field: value})
        assert status == 400 and said["error"]["param"] == field, said


def chat(cluster, content, **fields):
    messages = [{"role": "user", "content": "Tell me a story."},
                {"role": "assistant", "content": content}]
    return {"messages": messages, "temperature": 0, "max_tokens": 12, "ignore_eos": True, **fields}


@pytest.mark.parametrize("content", ["Once upon a time", "A fox <|im_end|> and", "One day "])
def test_a_message_goes_on(cluster, content):
    _, ids = cluster.http.json("/tokenize", {**chat(cluster, content),
                                             "add_generation_prompt": False})
    whole = text_of(cluster, ids["tokens"])
    prompt = whole[:whole.rindex(content.strip()) + len(content.strip())]
    if whole[len(prompt):].startswith(content[len(content.rstrip()):]):
        prompt += content[len(content.rstrip()):]
    _, want = cluster.http.json("/tokenize", {"prompt": prompt, "add_special_tokens": False})
    _, got = cluster.http.json("/tokenize", {**chat(cluster, content),
                                             "continue_final_message": True})
    assert got["tokens"] == want["tokens"]
    ask = {k: v for k, v in chat(cluster, content).items() if k != "messages"}
    _, want = cluster.http.json(PATH, {**ask, "prompt": want["tokens"]})
    status, got = cluster.http.json("/v1/chat/completions",
                                    chat(cluster, content, continue_final_message=True))
    assert status == 200
    assert got["choices"][0]["message"]["content"] == want["choices"][0]["text"]


@pytest.mark.parametrize("fields, words", [
    ({"add_generation_prompt": True}, "beside add_generation_prompt"),
    ({"messages": [{"role": "user", "content": "x"}]}, "must be the assistant's"),
])
def test_a_message_that_cannot_go_on(cluster, fields, words):
    status, said = cluster.http.json("/v1/chat/completions", {
        **chat(cluster, "x"), "continue_final_message": True, **fields})
    assert status == 400 and words in said["error"]["message"], said


def test_a_dead_decode_worker_changes_nothing():
    with Cluster(decode=2, **PATIENT) as c:
        c.http = None
        asks = [dict(ids=[3 + i] * 20, max_tokens=200, temperature=1.0, seed=i, ignore_eos=True)
                for i in range(6)]
        kept = [t for t in range(VOCAB) if t % 3]
        requests = [filtered(c, kept, ["time", "a small"], **a) for a in asks]
        want = c.generate_many(requests)
        assert all(r.code == OK and not [t for t in r.tokens if t % 3 == 0] for r in want)
        box = []
        t = threading.Thread(target=lambda: box.extend(c.generate_many(requests)))
        t.start()
        c.wait_for(lambda: any(w.name == "decode-0" and w.running for w in c.status().workers)
                   or not t.is_alive(), "decode to run", 20 * SLOW)
        c.workers["decode-0"].signal(signal.SIGKILL)
        t.join()
        assert [r.tokens for r in box] == [r.tokens for r in want]
        c.wait_idle(2)
