"""The `openai` package, unchanged, from PyPI in a throw-away environment: it gets over HTTP what
gRPC gives."""
import json
import os
import subprocess
import sys

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "cluster"))
from harness import PATIENT, SLOW, Cluster  # noqa: E402

INSTALL_S = 300


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The interpreter of an environment with the package."""
    home = str(tmp_path_factory.mktemp("openai"))
    made = subprocess.run([sys.executable, "-m", "venv", home], capture_output=True, text=True,
                          check=False)
    if made.returncode:
        pytest.skip(f"python3-venv is not installed: {made.stdout[-300:]}")
    got = subprocess.run([os.path.join(home, "bin", "pip"), "install", "-q", "openai"],
                         capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if got.returncode:
        pytest.skip(f"PyPI has no openai for us: {got.stderr[-300:]}")
    return os.path.join(home, "bin", "python")


def test_openai(python):
    with Cluster(router_args=["--http-listen", "127.0.0.1:0"], **PATIENT) as c:
        port = c.router.wait_log(r"ev=http_ready .*port=(\d+)").group(1)
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        run = subprocess.run(
            [python, os.path.join(HERE, "openai_client.py"), f"http://127.0.0.1:{port}/v1"],
            capture_output=True, text=True, timeout=120 * SLOW, env=env, check=False)
        assert run.returncode == 0, run.stderr[-4000:]
        got = json.loads(run.stdout)
        want = c.generate(prompt="Once upon a time", max_tokens=16, temperature=0)
        assert got["models"] == ["pocket"]
        assert got["text"] == got["stream"] == want.text and got["several"] == [want.text]
        assert got["chat"] == got["chat_stream"] == got["logprobs"] != ""
        assert got["usage"] == got["stream_usage"] == 16
        assert got["errors"] == {
            "field": ["BadRequestError", 400, "max_tokens"], "model": ["NotFoundError", 404, None]
        }
        assert got["parsed"][0] == "Animal", got["parsed"]
        c.wait_idle()
