"""Quantised models with --device cuda, on the emulated GPU: a GGUF file through a cluster gives the
tokens of one process on the same device and the CPU's logits up to rounding, and so does every
scheme of Hugging Face's checkpoints beside its formulas in double precision.
$TANDEM_TEST_CUDA_LIBRARY puts another library in the emulated one's place (tests/gpu/run)."""
import os

import numpy as np
import pytest

import test_device
import test_gguf
from harness import SHORT, check_results, one_process
from quant_model import Model
from test_device import EMULATED
from test_quantised import SCHEMES, TOKENS, logits

# whose activations are not rounded: what differs is bf16
WEIGHTS_ONLY = [
    "gptq-4", "gptq-4-order", "gptq-4-v2", "gptq-8", "gptq-8-order-v2", "awq", "packed-4",
    "packed-4-zeros-order", "packed-8", "int8-weights", "fp8-weights", "nf4", "nf4-double", "fp4"
]
# whose activations are, by the same formulas
ROUNDED = [
    "int8", "int8-tensor", "fp8-channel", "fp8-tensor", "fp8-static", "modelopt", "llm-int8"
]
N = 4 if SHORT else 10
REQUESTS = test_gguf.REQUESTS[:N]


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    if os.environ.get("TANDEM_TEST_SANITIZER") == "thread":
        pytest.skip("the emulated GPU switches stacks, which ThreadSanitizer cannot follow")
    if not os.path.exists(EMULATED):
        pytest.skip("no emulated GPU in this build: it takes a C++ compiler")
    monkeypatch.setenv("TANDEM_CUDA_LIBRARY", EMULATED)


def check_close(got, want, rms):
    """Of numbers with a standard deviation near 3."""
    assert np.sqrt(((got - want)**2).mean()) < rms
    assert (got.argmax(axis=1) == want.argmax(axis=1)).mean() > 0.85


@pytest.mark.parametrize("kind", ["Q8_0"] if SHORT else ["Q8_0", "Q4_0"])
def test_gguf_through_a_cluster(kind, tmp_path):
    """Weights and embeddings stay in the file's blocks in the device's memory."""
    model = test_gguf.write(tmp_path / f"{kind}.gguf", kind)
    oracle = one_process(REQUESTS, model, device="cuda", library=EMULATED)[0]
    with test_device.on_device(library=EMULATED, model=model) as c:
        requests = c.requests(REQUESTS)
        check_results(c.generate_many(requests), oracle)
        check_results(c.generate_many(requests[::-1]), oracle[::-1])
        c.wait_idle()
    tokens = [int(t) % 1024 for t in TOKENS]
    code, said, want = logits(model, tmp_path / "cpu", "--ops", "ref", tokens=tokens)
    assert code == 0, said
    code, said, got = logits(model, tmp_path / "cuda", "--device", "cuda", tokens=tokens)
    assert code == 0, said
    check_close(got, want, 0.3)  # the CPU rounds activations to 8 bits


@pytest.mark.parametrize("name", ["gptq-4", "gptq-8-order-v2", "nf4", "fp8-static", "llm-int8"]
                         if SHORT else WEIGHTS_ONLY + ROUNDED)
def test_logits_are_those_of_the_formulas(name, tmp_path):
    model = Model(SCHEMES[name])
    folder = model.write(tmp_path / "m")
    code, said, got = logits(folder, tmp_path / "out", "--device", "cuda")
    assert code == 0, said
    want = model.logits(TOKENS)
    if name in ROUNDED:  # a code that is off by one, where f32 rounds otherwise, gives 0.1
        assert np.median(np.abs(got - want)) < 5e-5
    check_close(got, want, 0.05)
    # chunks change no bit (I1)
    assert (logits(folder, tmp_path / "out", "--device", "cuda", "--chunk", "5")[2] == got).all()
