"""aiperf, unchanged, from PyPI: a profile of chats and one of completions run to their end, no
request failed, what they were answered is what gRPC answers, and the metrics page is read."""
import json

import pytest

from installed import POCKET, Up, installed, run

N = 12
TOKENS = 16


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return installed(tmp_path_factory, "aiperf", disk_gib=3)


def load(path):
    with open(path, encoding="utf-8") as f:
        return json.load(f)


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_aiperf(home, tmp_path, kind):
    with Up() as up:
        run(home, "aiperf", "profile", "-m", "pocket", "--url", up.url, "--endpoint-type", kind,
            "--streaming", "--tokenizer", POCKET, "--isl", 32, "--osl", TOKENS, "--extra-inputs",
            "temperature:0", "--extra-inputs", "ignore_eos:true", "--extra-inputs",
            "min_tokens:0", "--use-server-token-count", "--export-outputs-json", "--request-count",
            N, "--concurrency", 4, "--artifact-dir", tmp_path, "--ui", "none",
            "--wait-for-model-timeout", 30, "--server-metrics", f"{up.url}/metrics", cwd=tmp_path,
            offline=False)  # offline, aiperf does not take the path of a tokenizer
        summary = load(tmp_path / "profile_export_aiperf.json")
        assert summary["request_count"]["avg"] == N and summary["error_summary"] == []
        assert summary["output_sequence_length"]["min"] == TOKENS
        asked = {d["session_id"]: d["payloads"][0] for d in load(tmp_path / "inputs.json")["data"]}
        outputs = load(tmp_path / "outputs.json")["data"]
        assert len(outputs) == N
        for o in outputs:
            body = asked[o["conversation_id"]]
            want = up.text(body["prompt"], TOKENS, True) if kind == "completions" else up.chat(
                body["messages"][0]["content"], TOKENS, True)
            assert o["response_text"] == want, body
        metrics = load(tmp_path / "server_metrics_export.json")["summary"]
        assert metrics["endpoints_successful"] == [f"{up.url}/metrics"]
        up.wait_idle()
