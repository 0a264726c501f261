"""Several choices of a prompt, and several prompts, in one call: each is the answer that it is
alone, over gRPC and over HTTP; the prompt is computed once; one fails or leaves, all end."""
import signal
import statistics

import grpc
import pytest

from harness import PATIENT, SHORT, SLOW, Cluster, pb
from test_http import TALE, Http, raw

OK = grpc.StatusCode.OK
LONG_TALE = "Once upon a time there was a little fox who lived in a big forest. " * 6


@pytest.fixture(scope="module")
def cluster():
    with Cluster(decode=2, router_args=["--http-listen", "127.0.0.1:0"], **PATIENT) as c:
        c.http = Http(c)
        yield c
        c.wait_for(lambda: c.status().live == 0, "no request", 20 * SLOW)
        c.wait_idle()


def by_choice(cluster, request):
    """[(text, tokens, last message)] of each choice, and the call."""
    stream = cluster.stream(request)
    texts, tokens, last = {}, {}, {}
    for m in stream:
        assert m.choice not in last, "a message after the last"
        texts[m.choice] = texts.get(m.choice, "") + m.text
        tokens.setdefault(m.choice, []).extend(m.token_ids)
        if m.finish_reason:
            last[m.choice] = m
    assert sorted(last) == list(range(len(last)))
    return [(texts[i], tokens[i], last[i]) for i in range(len(last))], stream


def test_each_choice_is_the_answer_of_its_seed(cluster):
    ask = dict(prompt=TALE, max_tokens=16, temperature=1.1)
    got, stream = by_choice(cluster, cluster.request(n=4, seed=2**64 - 2, **ask))
    assert len(got) == 4 and "tandem-ledger" in dict(stream.trailing_metadata())
    for i, (text, tokens, last) in enumerate(got):
        alone = cluster.generate(seed=(2**64 - 2 + i) % 2**64, **ask)
        assert (text, tokens) == (alone.text, alone.tokens), i
        assert last.seed == alone.seed and last.usage.output_tokens == len(tokens)
    assert len({tuple(tokens) for _, tokens, _ in got}) > 1
    drawn, _ = by_choice(cluster, cluster.request(n=2, **ask))
    assert drawn[1][2].seed == (drawn[0][2].seed + 1) % 2**64
    again = cluster.generate(seed=drawn[1][2].seed, **ask)
    assert again.tokens == drawn[1][1]


def test_the_prompt_is_computed_once(cluster):
    got, _ = by_choice(cluster,
                       cluster.request(prompt=LONG_TALE, n=3, seed=5, temperature=1, max_tokens=8))
    cached = [last.usage.cached_tokens for _, _, last in got]
    prompt = got[0][2].usage.prompt_tokens
    assert cached[0] == 0 and all(c > prompt // 2 for c in cached[1:]), (cached, prompt)


def test_http_choices_equal_grpc(cluster):
    want, _ = by_choice(cluster, cluster.request(prompt=TALE, n=3, seed=9, temperature=1,
                                                 max_tokens=12, logprobs=1))
    body = {"prompt": TALE, "n": 3, "seed": 9, "temperature": 1, "max_tokens": 12, "logprobs": 1}
    status, got = cluster.http.json("/v1/completions", body)
    assert status == 200 and [c["index"] for c in got["choices"]] == [0, 1, 2]
    assert [c["text"] for c in got["choices"]] == [text for text, _, _ in want]
    tokens = sum(len(t) for _, t, _ in want)
    prompt = want[0][2].usage.prompt_tokens
    assert got["usage"]["prompt_tokens"] == prompt
    assert got["usage"]["completion_tokens"] == tokens
    events = cluster.http.events("/v1/completions", {
        **body, "stream_options": {"include_usage": True, "continuous_usage_stats": True}
    })
    assert events[-1]["choices"] == [] and events[-1]["usage"] == got["usage"]
    n = 0
    for e in events[:-1]:  # each counts all choices' tokens so far
        n += len(e["choices"][0]["logprobs"]["tokens"]) if e["choices"][0]["logprobs"] else 0
        assert (e["usage"]["prompt_tokens"], e["usage"]["completion_tokens"]) == (prompt, n), e
    for i, c in enumerate(got["choices"]):
        mine = [e["choices"][0] for e in events[:-1] if e["choices"][0]["index"] == i]
        assert "".join(m["text"] for m in mine) == c["text"]
        assert [m["finish_reason"] for m in mine if m["finish_reason"]] == [c["finish_reason"]]
        offsets = [o for m in mine if m["logprobs"] for o in m["logprobs"]["text_offset"]]
        assert offsets == c["logprobs"]["text_offset"]


def test_chats_have_choices(cluster):
    body = {
        "messages": [{"role": "user", "content": "Tell me a story."}], "n": 2, "seed": 3,
        "temperature": 1, "max_tokens": 8
    }
    status, got = cluster.http.json("/v1/chat/completions", body)
    assert status == 200 and len(got["choices"]) == 2, got
    events = cluster.http.events("/v1/chat/completions", body)
    for i, c in enumerate(got["choices"]):
        mine = [e["choices"][0]["delta"] for e in events if e["choices"][0]["index"] == i]
        assert "".join(d.get("content", "") for d in mine) == c["message"]["content"]
        assert mine[0]["role"] == "assistant" and all("role" not in d for d in mine[1:])


def test_lists_of_prompts(cluster):
    ids = cluster.http.json("/tokenize", {"prompt": LONG_TALE})[1]["tokens"]
    ask = {"max_tokens": 6, "temperature": 1, "seed": 4}
    alone = [[
        cluster.http.json("/v1/completions", {**ask, "prompt": p, "seed": 4 + i})[1]
        for i in range(2)
    ] for p in (TALE, "The dog", ids)]
    for prompts in ([TALE, "The dog"], [TALE, "The dog", ids], [ids], [ids, ids]):
        status, got = cluster.http.json("/v1/completions", {**ask, "prompt": prompts, "n": 2})
        want = [
            alone[[TALE, "The dog", ids].index(p)][i]["choices"][0]["text"] for p in prompts
            for i in range(2)
        ]
        assert status == 200 and [c["text"] for c in got["choices"]] == want
        assert got["usage"]["prompt_tokens"] == sum(
            alone[[TALE, "The dog", ids].index(p)][0]["usage"]["prompt_tokens"] for p in prompts)


def mean_logprob(choice):
    return statistics.fmean(choice["logprobs"]["token_logprobs"])


def test_the_best_of_some(cluster):
    ask = {"prompt": TALE, "max_tokens": 7, "temperature": 1.3, "seed": 21, "logprobs": 0}
    _, made = cluster.http.json("/v1/completions", {**ask, "n": 6})
    want = sorted(made["choices"], key=mean_logprob, reverse=True)[:2]
    status, got = cluster.http.json("/v1/completions", {**ask, "n": 2, "best_of": 6})
    assert status == 200 and [c["index"] for c in got["choices"]] == [0, 1]
    assert [c["logprobs"] for c in got["choices"]] == [c["logprobs"] for c in want]
    del ask["logprobs"]
    status, got = cluster.http.json("/v1/completions", {**ask, "n": 2, "best_of": 6})
    assert [(c["text"], c["logprobs"]) for c in got["choices"]] == [(c["text"], None) for c in want]


@pytest.mark.parametrize(
    "body, param, words",
    [({"n": 0}, "n", "n is 0"), ({"n": 129}, "n", "must be 1..128"),
     ({"n": 2**40}, "n", "n is 1099511627776"), ({"best_of": 129}, "best_of", "best_of is 129"),
     ({"n": 3, "best_of": 2}, "best_of", "must be sampling.n, 3, ..128"),
     ({"n": 1, "best_of": 2, "stream": True}, "best_of", "cannot be streamed"),
     ({"prompt": ["a"] * 1025}, "prompt", "has 1025 prompts, limit 1024"),
     ({"prompt": ["a"] * 100, "n": 11}, "prompt", "100 prompts of 11 choices, limit 1024"),
     ({"prompt": ["a", ""]}, "prompt", "prompt[1]: prompt is empty"),
     ({"prompt": ["a", [5, -1]]}, "prompt", "prompt[1]: token_ids[1] is -1"),
     ({"prompt": ["a", 5]}, "prompt", "must be a string"),
     ({"prompt": [[]]}, "prompt", "must be a string"), ({"prompt": []}, "prompt", "must be"),
     ({"n": 2, "max_tokens": 0}, "max_tokens", "max_tokens is 0"), ])
def test_refusals(cluster, body, param, words):
    status, got = cluster.http.json("/v1/completions", {"prompt": TALE, **body})
    error = got["error"]
    assert status == 400 and error["param"] == param and words in error["message"], got
    assert cluster.status().live == 0


def seen_live(c, body, n):
    """The connection of a call whose n choices have been live at once when somebody looked: one
    that is over before is begun again."""
    for _ in range(20):
        c.wait_idle(20)
        over, live = c.status().finished + n, 0

        def look():
            nonlocal live
            s = c.status()
            live = s.live
            return live == n or s.finished >= over

        s = raw(c, body)
        c.wait_for(look, "the choices", 60 * SLOW)
        if live == n:
            return s
        s.close()
    pytest.fail(f"{n} choices are never seen live")


@pytest.mark.parametrize("body", [{"n": 4}, {"n": 4, "stream": True}, {"n": 1, "best_of": 4}])
def test_a_client_that_leaves_frees_all_choices(cluster, body):
    s = seen_live(
        cluster, {"prompt": LONG_TALE, "max_tokens": 1500, "ignore_eos": True, **body}, 4)
    s.close()
    cluster.wait_for(lambda: cluster.status().live == 0, "their end", 20 * SLOW)
    cluster.wait_idle()


def test_there_must_be_room_for_all():
    args = ["--http-listen", "127.0.0.1:0", "--max-requests", 8]
    with Cluster(router_args=args, **PATIENT) as c:
        c.http = Http(c)
        with c.decode_stopped():
            held = [raw(c, {"prompt": TALE, "max_tokens": 1500}) for _ in range(6)]
            c.wait_for(lambda: c.status().live == 6, "their requests", 20 * SLOW)
            status, headers, text = c.http.ask("/v1/completions", {"prompt": "a", "n": 3})
            assert status == 429 and int(headers["Retry-After"]) >= 1, text
            status, _, text = c.http.ask("/v1/completions", {"prompt": "a", "n": 9})
            assert status == 400 and b"limit 8" in text, text
            one_token = {"prompt": "a", "n": 2, "max_tokens": 1}  # needs no decode worker
            assert c.http.ask("/v1/completions", one_token)[0] == 200
            for s in held:
                s.close()
            c.wait_for(lambda: c.status().live == 0, "their end", 20 * SLOW)
        c.wait_idle()


def test_one_that_fails_ends_all():
    """No room in the queue for the third: the call is refused, and what has begun is cancelled."""
    args = ["--http-listen", "127.0.0.1:0", "--max-queued", 2]
    with Cluster(prefill=0, decode=0, router_args=args, **PATIENT) as c:
        c.http = Http(c)
        status, headers, text = c.http.ask("/v1/completions", {"prompt": "a", "n": 3})
        assert status == 429 and int(headers["Retry-After"]) >= 1, text
        c.wait_for(lambda: c.status().live == 0, "their end", 20 * SLOW)


def test_choices_survive_a_decode_worker():
    """Killed while all choices stream: each goes on, token for token."""
    with Cluster(decode=2, router_args=["--http-listen", "127.0.0.1:0"], kv_memory="32MiB") as c:
        c.http = Http(c)
        n, ask = 4, dict(prompt=LONG_TALE, max_tokens=60 if SHORT else 200, temperature=1,
                         ignore_eos=True)
        want = [c.generate(seed=i, **ask).tokens for i in range(n)]
        stream = c.stream(c.request(n=n, seed=0, **ask))
        tokens, killed, failovers = {}, False, 0
        for m in stream:
            tokens.setdefault(m.choice, []).extend(m.token_ids)
            failovers += m.ledger.failovers
            if not killed and len(tokens) == n:
                killed = True
                w = max((w for w in c.status().workers if w.role == "decode"),
                        key=lambda w: w.assigned)
                c.workers.pop(w.name).signal(signal.SIGKILL)
        assert stream.code() == OK and failovers > 0
        assert [tokens[i] for i in range(n)] == want
        c.wait_for(lambda: c.status().live == 0, "no request", 20 * SLOW)
