"""Chats with tools through the router: the prompt that is made of them, the answer in fields. One
token of the model is made to say a whole answer, so that what it decodes to is known."""
import json
import os
import subprocess

import grpc
import pytest

from harness import BIN, PATIENT, SLOW, Cluster, pb
from test_http import Http
from tool_model import ANSWER, FIM, make_tool_model

OK, INVALID = grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT
UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED
TOOL = '{"type": "function", "function": {"name": "get", "parameters": {"z": 0.50, "a": []}}}'


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    model = tmp_path_factory.mktemp("model")
    last_token, thinking = make_tool_model(model)
    with Cluster(model=str(model), router_args=["--http-listen", "127.0.0.1:0"], **PATIENT) as c:
        c.last_token, c.thinking = last_token, thinking
        yield c
        c.wait_idle()


def ask(cluster, stop=("STOP", ), **chat):
    r = pb.GenerateRequest(chat=pb.Chat(**chat), request_id="r1")
    r.sampling.temperature = 0
    r.sampling.logit_bias.add(token=cluster.last_token, bias=100)
    r.stop.max_tokens = 1
    r.stop.stop.extend(stop)
    stream = cluster.stream(r)
    messages = []
    try:
        messages = list(stream)
    except grpc.RpcError:
        pass
    return stream.code(), stream.details(), messages


def user(text="Hello"):
    return pb.ChatMessage(role="user", content=text)


def test_fill_in_the_middle(cluster):
    """A suffix makes the prompt that the model's card says; without a text there is no gap."""
    http = Http(cluster)
    asked = {"max_tokens": 8, "temperature": 0, "logprobs": 0}
    before, after = "Once upon a time", " the fox was glad."
    whole = FIM[0] + before + FIM[1] + after + FIM[2]
    got = http.json("/v1/completions", {**asked, "prompt": [before, "a"], "suffix": after})[1]
    want = http.json("/v1/completions", {**asked, "prompt": whole})[1]
    assert got["choices"][0]["logprobs"] == want["choices"][0]["logprobs"]
    r = pb.GenerateRequest(prompt=before, suffix=after)
    r.sampling.temperature = 0
    r.stop.max_tokens = 8
    assert "".join(m.text for m in cluster.stream(r)) == want["choices"][0]["text"]
    for body in ({"prompt": [5, 6]}, {"prompt": "a", "truncate_prompt_tokens": 5}):
        status, said = http.json("/v1/completions", {**asked, **body, "suffix": after})
        assert status == 400 and said["error"]["param"] == "suffix", said


def test_prompt(cluster):
    chat = pb.Chat(
        messages=[
            pb.ChatMessage(role="developer", content="Be brief."),
            pb.ChatMessage(role="user", parts=[
                pb.ContentPart(type="text", text="a"),
                pb.ContentPart(type="text", text="b")
            ]),
            pb.ChatMessage(role="assistant", reasoning="So.", tool_calls=[
                pb.ToolCall(id="c1", name="get", arguments='{"y": "\\u00e9", "b": null}')
            ]),
            pb.ChatMessage(role="tool", content="42", tool_call_id="c1")
        ], tools=[TOOL], template_kwargs='{"extra": "!"}')
    want = ('<tools>{"type": "function", "function": {"name": "get", "parameters": {"z": 0.5, '
            '"a": []}}}</tools>\n<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na\nb'
            '<|im_end|>\n<|im_start|>assistant\n<think>So.</think>'
            '<tool_call>{"name": "get", "arguments": {"y": '
            '"\u00e9", "b": null}}</tool_call><|im_end|>\n<|im_start|>tool\n42<|im_end|>\n!'
            '<|im_start|>assistant\n')

    def tokens(**what):
        return cluster.unary("/tandem.v1.Inference/Tokenize",
                             pb.TokenizeRequest(no_special_tokens=True, **what),
                             pb.TokenizeResponse).ids

    assert list(tokens(chat=chat)) == list(tokens(prompt=want))


def test_answer_in_fields(cluster):
    code, details, messages = ask(cluster, messages=[user()], tools=[TOOL], split_answer=True)
    assert code == OK, details
    assert "".join(m.reasoning for m in messages) == "hm"
    assert "".join(m.text for m in messages) == "Hi "
    calls = [c for m in messages for c in m.tool_calls]
    assert [(c.index, c.name, c.arguments)
            for c in calls] == [(0, "get", '{"x": 1}'), (1, "put", "{}")]
    assert all(c.id.startswith("call_") for c in calls) and calls[0].id != calls[1].id
    assert messages[-1].finish_reason == pb.FINISH_TOOL_CALLS
    again = ask(cluster, messages=[user()], tools=[TOOL], split_answer=True)[2]
    assert [c.id for m in again for c in m.tool_calls] == [c.id for c in calls]
    # without its stop string the answer ends at the limit
    messages = ask(cluster, stop=(), messages=[user()], tools=[TOOL], split_answer=True)[2]
    assert messages[-1].finish_reason == pb.FINISH_LENGTH
    assert "".join(m.text for m in messages) == "Hi STOP"


PLACE = '''{"type": "function", "function": {"name": "go", "parameters": {"type": "object",
"properties": {"to": {"enum": ["sea", "wood"]}, "n": {"type": "integer", "minimum": 1,
"maximum": 9}}, "required": ["to", "n"], "additionalProperties": false}}}'''
STOP = '{"type": "function", "function": {"name": "stop"}}'


def forced(cluster, seed, **chat):
    """The calls of an answer with tools that must be called, (name, arguments), and its end."""
    r = pb.GenerateRequest(chat=pb.Chat(messages=[user()], tools=[PLACE, STOP], **chat))
    r.sampling.temperature = 1.5
    r.sampling.seed = seed
    for token in cluster.thinking:
        r.sampling.logit_bias.add(token=token, bias=-100)
    r.stop.max_tokens = 400
    r.return_token_ids = True
    messages = list(cluster.stream(r))
    calls = {}
    for c in (c for m in messages for c in m.tool_calls):
        name, arguments = calls.get(c.index, (c.name, ""))
        calls[c.index] = name, arguments + c.arguments
    return calls, "".join(m.text for m in messages), messages[-1].finish_reason, [
        t for m in messages for t in m.token_ids]


def test_forced_calls(cluster):
    n_many = 0
    for seed in range(8):
        calls, text, end, ids = forced(cluster, seed, tool_choice="required", split_answer=True)
        assert text == "" and calls
        if end == pb.FINISH_LENGTH:  # more calls than there was room for
            n_many += 1
            continue
        assert end == pb.FINISH_TOOL_CALLS
        n_many += len(calls) > 1
        for name, arguments in calls.values():
            value = json.loads(arguments)
            assert name in ("go", "stop")
            assert value == {} if name == "stop" else (value["to"] in ("sea", "wood")
                                                       and 1 <= value["n"] <= 9)
        # the same tokens without fields, as the model wrote it
        assert ids == forced(cluster, seed, tool_choice="required")[3]
    for seed in range(4):
        calls, text, end, _ = forced(cluster, seed, tool_name="go", split_answer=True)
        assert end == pb.FINISH_TOOL_CALLS and text == "" and list(calls) == [0]
        assert calls[0][0] == "go" and set(json.loads(calls[0][1])) == {"to", "n"}
        calls, text, end, _ = forced(cluster, seed, tool_choice="required", single_tool_call=True,
                                     split_answer=True)
        assert end == pb.FINISH_TOOL_CALLS and text == "" and list(calls) == [0]
    assert n_many, "no answer had two calls: the last loop has shown nothing"


def test_single_call_of_auto(cluster):
    messages = ask(cluster, messages=[user()], tools=[TOOL], split_answer=True,
                   single_tool_call=True)[2]
    calls = [c for m in messages for c in m.tool_calls]
    assert [(c.index, c.name, c.arguments) for c in calls] == [(0, "get", '{"x": 1}')]
    assert messages[-1].finish_reason == pb.FINISH_TOOL_CALLS


def test_forced_calls_over_http(cluster):
    http = Http(cluster)
    body = {
        "messages": [{"role": "user", "content": "Hello"}], "temperature": 1.5, "seed": 3,
        "tools": [json.loads(PLACE), json.loads(STOP)], "max_tokens": 400,
        "tool_choice": {"type": "function", "function": {"name": "go"}},
        "logit_bias": {str(t): -100 for t in cluster.thinking}
    }
    status, got = http.json("/v1/chat/completions", body)
    message = got["choices"][0]["message"]
    assert status == 200 and got["choices"][0]["finish_reason"] == "tool_calls", got
    want = forced(cluster, 3, tool_name="go", split_answer=True)[0]
    assert [(c["function"]["name"], c["function"]["arguments"])
            for c in message["tool_calls"]] == list(want.values())
    events = http.events("/v1/chat/completions", body)
    pieces = [c for e in events for x in e["choices"] for c in x["delta"].get("tool_calls") or []]
    assert "".join(p["function"].get("arguments", "") for p in pieces) == want[0][1]
    want = forced(cluster, 3, tool_choice="required", single_tool_call=True, split_answer=True)[0]
    status, got = http.json("/v1/chat/completions",
                            {**body, "tool_choice": "required", "parallel_tool_calls": False})
    assert [(c["function"]["name"], c["function"]["arguments"])
            for c in got["choices"][0]["message"]["tool_calls"]] == list(want.values())
    for choice in ("any", {"type": "allowed_tools"}, {"type": "function", "function": {}}, 3):
        status, got = http.json("/v1/chat/completions", {**body, "tool_choice": choice})
        assert status == 400 and got["error"]["param"] == "tool_choice", got
    status, got = http.json("/v1/chat/completions",
                            {**body, "response_format": {"type": "json_object"}})
    assert status == 400 and "beside a tool that must be called" in got["error"]["message"], got


def test_http_chat_fields(cluster):
    """The same prompt over HTTP as over gRPC, and the answer in the fields that OpenAI has."""
    http = Http(cluster)
    chat = pb.Chat(
        messages=[
            pb.ChatMessage(role="developer", content="Be brief."),
            pb.ChatMessage(role="user", parts=[pb.ContentPart(type="text", text="a"),
                                               pb.ContentPart(type="text", text="b")]),
            pb.ChatMessage(role="assistant", reasoning="So.",
                           tool_calls=[pb.ToolCall(id="c1", name="get", arguments='{"y": 1}')]),
            pb.ChatMessage(role="tool", content="42", tool_call_id="c1")
        ], tools=[TOOL], template_kwargs='{"extra": "!"}')
    body = {
        "messages": [{"role": "developer", "content": "Be brief."}, {
            "role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text",
                                                                        "text": "b"}]
        }, {
            "role": "assistant", "content": None, "reasoning_content": "So.", "tool_calls": [{
                "id": "c1", "type": "function", "function": {"name": "get",
                                                             "arguments": '{"y": 1}'}
            }]
        }, {"role": "tool", "content": "42", "tool_call_id": "c1"}],
        "tools": [json.loads(TOOL)], "chat_template_kwargs": {"extra": "!"}
    }
    want = cluster.unary("/tandem.v1.Inference/Tokenize", pb.TokenizeRequest(chat=chat),
                         pb.TokenizeResponse).ids
    status, got = http.json("/tokenize", body)
    assert status == 200 and got["tokens"] == list(want), got
    body = {
        "messages": [{"role": "user", "content": "Hello"}], "tools": [json.loads(TOOL)],
        "max_tokens": 1, "stop": ["STOP"], "logit_bias": {str(cluster.last_token): 100},
        "temperature": 0
    }
    status, got = http.json("/v1/chat/completions", body)
    choice = got["choices"][0]
    assert status == 200 and choice["finish_reason"] == "tool_calls", got
    assert choice["message"]["reasoning_content"] == "hm"
    assert choice["message"]["content"] == "Hi "
    calls = [("get", '{"x": 1}'), ("put", "{}")]
    assert [(c["type"], c["function"]["name"], c["function"]["arguments"])
            for c in choice["message"]["tool_calls"]] == [("function", *c) for c in calls]
    deltas = [x["delta"] for e in http.events("/v1/chat/completions", body) for x in e["choices"]]
    assert "".join(d.get("reasoning_content") or "" for d in deltas) == "hm"
    assert "".join(d.get("content") or "" for d in deltas) == "Hi "
    pieces = [c for d in deltas for c in d.get("tool_calls") or []]
    for i, (name, arguments) in enumerate(calls):
        mine = [p for p in pieces if p["index"] == i]
        assert mine[0]["id"].startswith("call_") and mine[0]["function"]["name"] == name
        assert "".join(p["function"].get("arguments", "") for p in mine) == arguments
    # a gateway may give all turns of a talk one request id: calls are told apart all the same
    name = {"x-request-id": "talk"}
    _, first = http.json("/v1/chat/completions", {**body, "n": 2}, name)
    _, turn = http.json("/v1/chat/completions", {
        **body, "messages": [{"role": "user", "content": "More"}]
    }, name)
    said = [c["message"] for c in first["choices"] + turn["choices"]]
    named = [call["id"] for message in said for call in message["tool_calls"]]
    assert len(named) == len(set(named)) == 6, named
    status, got = http.json("/v1/chat/completions", {**body, "parallel_tool_calls": False})
    assert [c["function"]["name"]
            for c in got["choices"][0]["message"]["tool_calls"]] == ["get"], got


def test_answer_as_text(cluster):
    for chat in (dict(), dict(tools=[TOOL])):
        code, details, messages = ask(cluster, messages=[user()], **chat)
        assert code == OK, details
        assert "".join(m.text for m in messages) == ANSWER
        assert not any(m.reasoning or m.tool_calls for m in messages)
        assert messages[-1].finish_reason == pb.FINISH_STOP
    # calls stay in the text when none were to be made
    for chat in (dict(), dict(tools=[TOOL], tool_choice="none")):
        messages = ask(cluster, messages=[user()], split_answer=True, **chat)[2]
        assert "".join(m.reasoning for m in messages) == "hm"
        assert "".join(m.text for m in messages) == ANSWER.split("</think>\n\n")[1]
        assert not any(m.tool_calls for m in messages)
        assert messages[-1].finish_reason == pb.FINISH_STOP


def test_refused_by_name(cluster):
    image = pb.ChatMessage(role="user", parts=[pb.ContentPart(type="image_url", text="x")])
    many = [pb.ToolCall(name="f")] * 129
    for want, text, chat in (
        (INVALID, "chat.messages[0].role is \"ipython\", must be system, developer, user, "
         "assistant or tool", dict(messages=[pb.ChatMessage(role="ipython", content="a")])),
        (UNIMPLEMENTED, "messages[0].content[0].type is \"image_url\", must be text",
         dict(messages=[image])),
        (INVALID, "tools[0]: line 1, column", dict(messages=[user()], tools=["{"])),
        (INVALID, "tools[0]: is no JSON object", dict(messages=[user()], tools=["[1]"])),
        (INVALID, "chat.tools", dict(messages=[user()], tools=[TOOL] * 129)),
        (INVALID, "chat.messages.tool_calls",
         dict(messages=[pb.ChatMessage(role="assistant", tool_calls=many)])),
        (INVALID, "template_kwargs sets \"messages\"",
         dict(messages=[user()], template_kwargs='{"messages": 1}')),
        (INVALID, "chat.tool_choice is \"any\", must be auto, none or required",
         dict(messages=[user()], tools=[TOOL], tool_choice="any")),
        (INVALID, "chat.tool_name is set beside chat.tool_choice \"auto\"",
         dict(messages=[user()], tools=[TOOL], tool_choice="auto", tool_name="get")),
        (INVALID, "chat.tool_choice: there are no tools that could be called",
         dict(messages=[user()], tool_choice="required")),
        (INVALID, "chat.tool_choice: \"put\" is the name of none of the tools",
         dict(messages=[user()], tools=[TOOL], tool_name="put")),
        (INVALID, "chat.tools: tool \"get\": ",
         dict(messages=[user()], tools=[TOOL.replace('"a": []', '"not": {}')],
              tool_choice="required")),
    ):
        code, details, _ = ask(cluster, **chat)
        assert code == want and text in details, (code, details)
    assert ask(cluster, messages=[user()])[0] == OK


def test_chat_command(cluster):
    """Reasoning goes to stderr, the answer to stdout."""
    def chat(lines):
        p = subprocess.run([
            os.path.join(BIN, "tandem"), "chat", "--server", f"127.0.0.1:{cluster.port}",
            "--max-tokens", "6", "--temperature", "0"
        ], input=lines, capture_output=True, text=True, timeout=60 * SLOW, check=False)
        assert p.returncode == 0, p.stderr
        return p.stdout, p.stderr

    out, err = chat("Think\n")
    assert out.strip() == "" and "[reasoning] " in err and len(err.split("[reasoning] ")[1]) > 2
    out, err = chat("Hello\n")
    assert out.strip() and "[reasoning]" not in err
