"""The `openai` package, unchanged, from PyPI in a throw-away environment: it gets over HTTP what
gRPC gives."""
import json

import pytest

from installed import HERE, Up, installed, run


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
