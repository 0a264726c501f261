"""guidellm, unchanged, from PyPI: a benchmark of chats and one of completions run to their end, no
request failed, and what they were answered is what gRPC answers. It installs torch, which is most
of the disk that this test needs."""
import json

import pytest

from installed import POCKET, Up, installed, run

N = 12
TOKENS = 16


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return installed(tmp_path_factory, "guidellm", disk_gib=16)


def answered(body):
    """The text of the request that guidellm sent."""
    if "messages" not in body:
        return body["prompt"]
    return "\n".join(p["text"] for p in body["messages"][0]["content"])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm(home, tmp_path, path):
    backend = {
        "kind": "openai_http", "request_format": path, "extras": {"body": {"temperature": 0}}
    }
    with Up() as up:
        backend["target"] = up.url
        run(home, "guidellm", "run", "--backend", json.dumps(backend), "--profile",
            "kind=concurrent,streams=4", "--constraint", f"kind=max_requests,count={N}",
            "--tokenizer", f"kind=hf_auto,model={POCKET}", "--data",
            f"kind=synthetic_text,prompt_tokens=32,output_tokens={TOKENS}", "--output",
            f"kind=json,path={tmp_path}/out.json", "--disable-console")
        with open(tmp_path / "out.json", encoding="utf-8") as f:
            benchmark, = json.load(f)["benchmarks"]
        requests = benchmark["requests"]
        assert not requests["errored"] and len(requests["successful"]) == N, requests["errored"]
        for r in requests["successful"]:
            body = json.loads(r["request_args"])["body"]
            want = (up.chat if "messages" in body else up.text)(answered(body), TOKENS, True)
            assert r["output"] == want and r["output_tokens"] == TOKENS, (body, r["output"])
        up.wait_idle()
