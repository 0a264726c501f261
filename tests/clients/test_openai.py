"""The `openai` package, unchanged, from PyPI in a throw-away environment: it gets over HTTP what
gRPC gives."""
import json

import pytest

from installed import HERE, Up, installed, run
from tool_model import ANSWER, make_tool_model


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return installed(tmp_path_factory, "openai")


def test_openai(home):
    with Up() as up:
        got = json.loads(run(home, "python", f"{HERE}/openai_client.py", f"{up.url}/v1"))
        text = up.text("Once upon a time", 16)
        assert got["models"] == ["pocket"] and got["model"] == "pocket"
        assert got["text"] == got["stream"] == text and got["several"] == [text]
        assert got["echo"] == ["Once upon a time" + text, 16, None, True]
        assert got["chat"] == got["chat_stream"] == got["logprobs"] != ""
        assert got["usage"] == got["stream_usage"] == 16
        assert got["errors"] == {
            "field": ["BadRequestError", 400, "max_tokens"], "model": ["NotFoundError", 404, None]
        }
        assert got["parsed"][0] == "Animal", got["parsed"]
        up.wait_idle()


def test_tools(home, tmp_path):
    """The names, arguments and ends of calls, whole and as deltas; and what a user sends next."""
    tokens = make_tool_model(tmp_path)
    with Up(str(tmp_path)) as up:
        got = json.loads(
            run(home, "python", f"{HERE}/openai_client.py", f"{up.url}/v1", json.dumps(tokens)))
        calls = [["function", "get", '{"x": 1}'], ["function", "put", "{}"]]
        for name in ("auto", "auto_stream", "async_stream", "turn"):
            assert got[name] == ["Hi ", calls, "tool_calls"], (name, got[name])
        assert got["none"] == [ANSWER.split("</think>\n\n")[1], [], "stop"], got["none"]
        content, [[kind, name, arguments]], end = got["named"]
        assert (content, kind, name, end) == (None, "function", "go", "tool_calls"), got["named"]
        value = json.loads(arguments)
        assert list(value) == ["to", "n"] and value["to"] in ("sea", "wood"), value
        assert isinstance(value["n"], int) and got["named_stream"] == got["named"], got
        assert got["parsed"] == ["Animal", 3, True], got["parsed"]
        up.wait_idle()
