"""The channels of gpt-oss (harmony) through the router, over both doors. One token of the model is
made to say a whole answer, so that what it decodes to is known; and the marks are special tokens,
which come one by one where a test wants them."""
import json
import os

import pytest

from harness import PATIENT, POCKET, Cluster, pb
from test_http import Http

TEMPLATE = ("{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>"
            "{% endfor %}{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
            "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
            "{# <|channel|> #}")
NEXT = "<|end|><|start|>assistant<|channel|>"
ANSWER = ("<|channel|>analysis<|message|>hm" + NEXT + "commentary<|message|>I look." + NEXT +
          'commentary to=functions.get <|constrain|>json<|message|>{"x": 1}STOP' + NEXT +
          "final<|message|>Hi")
MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>")
WORDS = ("analysis", "hm", ANSWER)
TOOL = {"type": "function", "function": {"name": "get", "parameters": {}}}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The pocket model with that template, whose last tokens are MARKS and WORDS."""
    model = tmp_path_factory.mktemp("model")
    for name in os.listdir(POCKET):
        if name not in ("tokenizer.json", "tokenizer_config.json"):
            os.symlink(os.path.join(POCKET, name), model / name)
    with open(os.path.join(POCKET, "tokenizer_config.json"), encoding="utf-8") as f:
        config = json.load(f)
    config["chat_template"] = TEMPLATE
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    with open(os.path.join(POCKET, "tokenizer.json"), encoding="utf-8") as f:
        tokenizer = json.load(f)
    vocab, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    ids = {}
    for i, word in enumerate(MARKS + WORDS, len(vocab) - len(MARKS + WORDS)):
        del vocab[next(t for t, number in vocab.items() if number == i)]
        merges.pop()
        vocab[word.replace(" ", "\u0120")] = i
        ids[word] = i
    tokenizer["added_tokens"] += [{
        "id": ids[m], "content": m, "single_word": False, "lstrip": False, "rstrip": False,
        "normalized": False, "special": True
    } for m in MARKS]
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    with Cluster(model=str(model), router_args=["--http-listen", "127.0.0.1:0"], **PATIENT) as c:
        c.ids = ids
        yield c
        c.wait_idle()


def ask(cluster, stop=("STOP", ), tools=(), **chat):
    r = pb.GenerateRequest(
        request_id="r1", chat=pb.Chat(messages=[pb.ChatMessage(
            role="user", content="Hello")], split_answer=True, tools=[json.dumps(t) for t in tools],
                                      **chat))
    r.sampling.temperature = 0
    r.sampling.logit_bias.add(token=cluster.ids[ANSWER], bias=100)
    r.stop.max_tokens = 1
    r.stop.stop.extend(stop)
    return list(cluster.stream(r))


def fields(messages):
    return ("".join(m.reasoning for m in messages), "".join(
        m.text for m in messages), [(c.index, c.name, c.arguments) for m in messages
                                    for c in m.tool_calls])


def test_answer_in_fields(cluster):
    messages = ask(cluster, tools=[TOOL])
    assert fields(messages) == ("hm", "I look.", [(0, "get", '{"x": 1}')])
    assert messages[-1].finish_reason == pb.FINISH_TOOL_CALLS
    # without its stop string the answer goes on in another channel
    assert fields(ask(cluster, stop=(), tools=[TOOL]))[:2] == ("hm", "I look.STOPHi")
    # without tools, or when none may be called, a message to one is text
    for chat in (dict(), dict(tools=[TOOL], tool_choice="none")):
        messages = ask(cluster, **chat)
        assert fields(messages) == ("hm", 'I look.{"x": 1}', [])
        assert messages[-1].finish_reason == pb.FINISH_STOP


def test_special_tokens(cluster):
    """Marks that are tokens of their own are seen by the parser. Each token is chosen once, in the
    order of its bias, because the penalty takes away what it had."""
    r = pb.GenerateRequest(
        chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="Hello")], split_answer=True))
    said = ("<|channel|>", "analysis", "hm")
    r.sampling.temperature = 0
    r.sampling.repetition_penalty = 100
    for i, word in enumerate(said):
        r.sampling.logit_bias.add(token=cluster.ids[word], bias=100 - 30 * i)
    r.stop.max_tokens = len(said)
    r.return_token_ids = True
    messages = list(cluster.stream(r))
    assert [t for m in messages for t in m.token_ids] == [cluster.ids[w] for w in said]
    # the answer ended in a header, which is no content
    assert fields(messages) == ("", "", [])


def test_over_http(cluster):
    http = Http(cluster)
    body = {
        "messages": [{"role": "user", "content": "Hello"}], "tools": [TOOL], "max_tokens": 1,
        "stop": ["STOP"], "logit_bias": {str(cluster.ids[ANSWER]): 100}, "temperature": 0
    }
    status, got = http.json("/v1/chat/completions", body)
    choice = got["choices"][0]
    assert status == 200 and choice["finish_reason"] == "tool_calls", got
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "I look.")
    assert [c["function"]
            for c in message["tool_calls"]] == [{"name": "get", "arguments": '{"x": 1}'}]
    deltas = [x["delta"] for e in http.events("/v1/chat/completions", body) for x in e["choices"]]
    assert "".join(d.get("reasoning_content") or "" for d in deltas) == "hm"
    assert "".join(d.get("content") or "" for d in deltas) == "I look."
    pieces = [c for d in deltas for c in d.get("tool_calls") or []]
    assert pieces[0]["id"].startswith("call_") and pieces[0]["function"]["name"] == "get"
    assert "".join(p["function"].get("arguments", "") for p in pieces) == '{"x": 1}'


def test_guided_is_the_final_channel(cluster):
    """What a grammar describes is content from its first byte: the prompt opens the channel."""
    asked = {
        "messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 40,
        "guided_choice": ["red", "green"]
    }
    status, got = Http(cluster).json("/v1/chat/completions", asked)
    assert status == 200 and got["choices"][0]["message"]["content"] in ("red", "green"), got
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="Hello")])
    plain = cluster.unary("/tandem.v1.Inference/Tokenize", pb.TokenizeRequest(chat=chat),
                          pb.TokenizeResponse).ids
    opened = [cluster.ids["<|channel|>"], cluster.ids["<|message|>"]]
    assert got["usage"]["prompt_tokens"] > len(plain) + len(opened)
