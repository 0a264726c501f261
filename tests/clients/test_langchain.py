"""LangChain (langchain-openai), unchanged, from PyPI: chat, completion, streams, batches and
structured output give what gRPC gives."""
import json

import pytest

from installed import HERE, Up, installed, run
from tool_model import make_tool_model

TALE = "Once upon a time"
FOX = "Tell me a story about a fox."


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return installed(tmp_path_factory, "langchain-openai")


def test_langchain(home):
    with Up() as up:
        got = json.loads(run(home, "python", f"{HERE}/langchain_client.py", f"{up.url}/v1"))
        text, chat = up.text(TALE, 16), up.chat(FOX, 16)
        assert got["completion"] == got["completion_stream"] == text != ""
        assert got["chat"] == got["chat_stream"] == chat != ""
        assert got["batch"] == [chat] * 4 and got["async"] == chat
        assert got["usage"] == got["stream_usage"] == [16, 16]
        assert got["stopped"] == text.split(",")[0] and got["finish"] == "length"
        assert got["animal"][0] == "Animal", got["animal"]
        up.wait_idle()


def test_bind_tools(home, tmp_path):
    """The names, arguments and ends of calls, whole and as a stream; and what a user sends next."""
    tokens = make_tool_model(tmp_path)
    with Up(str(tmp_path)) as up:
        got = json.loads(
            run(home, "python", f"{HERE}/langchain_client.py", f"{up.url}/v1", json.dumps(tokens)))
        for name in ("auto", "stream", "async", "turn"):
            assert got[name] == ["Hi ", [["get", {"x": 1}], ["put", {}]], "tool_calls"], (name, got)
        content, [[name, value]], end = got["named"]
        assert (content, name, end) == ("", "Animals", "tool_calls"), got["named"]
        assert list(value) == ["kind", "legs"] and value["kind"] in ("fox", "dog"), value
        assert isinstance(value["legs"], int) and got["named_stream"] == got["named"], got
        assert got["structured"] == value["kind"], got
        up.wait_idle()
