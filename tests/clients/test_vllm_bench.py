"""The request functions of `vllm bench serve`, unchanged, from PyPI's vllm: the one file that sends
its requests and reads the answers. The command itself needs torch before its first line (`import
vllm` runs env_override.py, which imports it: vllm 0.33.0), and PyPI's torch brings CUDA with it.
This file does not: it is loaded by its path from the package without its dependencies."""
import json

import pytest

from installed import HERE, Up, installed, run

N = 8
TOKENS = 16


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    at = installed(tmp_path_factory, "vllm", options=["--no-deps"], disk_gib=4)
    run(at, "pip", "install", "-q", "aiohttp", "regex", "tqdm")
    return at


@pytest.mark.parametrize("backend", ["vllm", "openai", "openai-chat"])
def test_vllm_bench(home, backend):
    prompts = [f"Once upon a time {n} animals" for n in range(2, 2 + N)]
    with Up() as up:
        got = json.loads(
            run(home, "python", f"{HERE}/vllm_bench_client.py", up.url, backend, TOKENS,
                json.dumps(prompts)))
        for prompt, out in zip(prompts, got, strict=True):
            want = (up.chat if backend == "openai-chat" else up.text)(prompt, TOKENS, True)
            assert out["success"] and not out["error"], out
            assert out["generated_text"] == want and out["output_tokens"] == TOKENS, out
            assert out["ttft"] > 0, out
        up.wait_idle()
