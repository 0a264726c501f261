"""A model in a GGUF file, served: routers and workers that read all of it from the file give the
tokens of one process, and workers with another format are not mixed in."""
import os
import random
import subprocess

import pytest

from harness import (BIN, POCKET, SHORT, SLOW, Cluster, check_one_process, check_results,
                     one_process)

N = 6 if SHORT else 16


def make_requests():
    rng = random.Random(31)
    return [{
        "ids": [rng.randrange(3, 1024) for _ in range(rng.choice([1, 15, 16, 33, 100]))],
        "max_tokens": rng.choice([2, 9, 17]), "seed": rng.randrange(1 << 40), "logprobs": 0,
        "temperature": rng.choice([0.0, 0.8]), "top_k": rng.choice([0, 20])
    } for i in range(N)]


REQUESTS = make_requests()


def write(path, kind):
    subprocess.run([os.path.join(BIN, "make_gguf"), POCKET, path, kind], check=True,
                   timeout=60 * SLOW)
    return str(path)


@pytest.fixture(scope="module", params=["Q8_0", "Q4_0"])
def model(request, tmp_path_factory):
    kind = request.param
    return write(tmp_path_factory.mktemp("gguf") / f"pocket-{kind}.gguf", kind)


def test_tokens_of_one_process(model):
    check_one_process(REQUESTS, model, n_alone=4)


def test_ranks(model):
    """Two ranks cut the columns of the output matrices at whole blocks: the same greedy tokens, and
    a pair of such workers has those of two ranks in one process, with their logprobs."""
    greedy = [dict(r, temperature=0.0, top_k=0) for r in REQUESTS]
    want, got = one_process(greedy, model)[0], one_process(greedy, model, tp=2)[0]
    same = sum(a[0] == b[0] for a, b in zip(want, got))
    assert same >= N - 2, (same, N)  # sums over ranks have another order: near ties may differ
    with Cluster(model=model, dtype="bf16", worker_args=["--tp", 2, "--threads", 2]) as c:
        check_results(c.generate_many(c.requests(greedy)), got)
        c.wait_idle()


def tokenize(model, text, *more):
    done = subprocess.run([os.path.join(BIN, "tandem"), "tokenize", "--whole", "--model", model,
                           *more], input=text.encode(), capture_output=True, timeout=60 * SLOW,
                          check=True)
    return done.stdout


@pytest.mark.parametrize("text", [
    "Once upon a time, there was a girl.", "it's  1234 \n\n\t x", "<|im_start|>user\nh\u00e9llo"
    " \U0001f600<|im_end|>", " ", "'re'LL 'S"
])
def test_the_ids_of_the_directory(text, tmp_path):
    path = write(tmp_path / "pocket.gguf", "BF16")
    for more in ([], ["--add-special"]):
        assert tokenize(path, text, *more) == tokenize(POCKET, text, *more)


def test_another_format_is_another_model(tmp_path):
    """A decode worker with Q4_0 beside prefill workers with Q8_0 would continue other numbers."""
    q8_0, q4_0 = (write(tmp_path / f"{k}.gguf", k) for k in ("Q8_0", "Q4_0"))
    with Cluster(model=q8_0, dtype="bf16") as c:
        c.model = q4_0
        odd = c.start_worker("decode", wait=False)
        odd.wait_log(r"ev=registration_rejected .*KV layout \S+ differs from .*: model, dtype")
        check_results([c.generate(r) for r in c.requests(REQUESTS[:2])],
                      one_process(REQUESTS[:2], q8_0)[0])


def quantize(*args):
    return subprocess.run([os.path.join(BIN, "tandem"), "quantize", *map(str, args)],
                          capture_output=True, text=True, timeout=60 * SLOW, check=False)


def test_quantize(tmp_path):
    """The command's file has the tokenizer and the tokens of the directory rounded while it loads;
    what stands at its place is not replaced without being asked; the report is of the text."""
    path, text = tmp_path / "pocket.gguf", tmp_path / "text.txt"
    text.write_text("Once upon a time, there was a girl. She had a red ball and a dog.\n" * 4)
    args = ("--from", POCKET, "--to", path, "--format", "q4_0")
    done = quantize(*args, "--text", text)
    assert done.returncode == 0, done.stderr
    rows = {r[:22].strip(): r[22:].split() for r in done.stdout.splitlines()[2:]}
    assert 0 < float(rows["KL divergence, mean"][0]) < 0.2
    assert 0.8 < float(rows["same top token"][0]) <= 1
    assert 0.8 < float(rows["perplexity ratio"][0]) < 1.2
    assert sorted(os.listdir(tmp_path)) == ["pocket.gguf", "text.txt"]
    for words in ("it's  1234 \n\n\t x", "<|im_start|>user\nh\u00e9llo<|im_end|>"):
        assert tokenize(path, words, "--add-special") == tokenize(POCKET, words, "--add-special")
    before = path.read_bytes()
    again = quantize(*args)
    assert again.returncode == 2 and "exists: --force replaces it" in again.stderr
    assert quantize(*args, "--force").returncode == 0
    assert path.read_bytes() == before  # the same bytes every time
    assert quantize("--from", path, "--to", tmp_path / "x.gguf", "--format", "q9").returncode == 2
    none = quantize("--from", tmp_path / "none", "--to", tmp_path / "x.gguf", "--format", "q8_0")
    assert none.returncode == 1 and "none" in none.stderr
    # scales from what the model sees of the text, and a directory of codes
    done = quantize(*args, "--force", "--calibrate", text, "--text", text)
    rows = {r[:22].strip(): r[22:].split() for r in done.stdout.splitlines()[2:]}
    assert done.returncode == 0 and 0 < float(rows["KL divergence, mean"][0]) < 0.2, done.stderr
    assert path.read_bytes() != before
    path.write_bytes(before)
    into = tmp_path / "w8a8"
    into.mkdir()  # an empty directory may be filled
    done = quantize("--from", POCKET, "--to", into, "--format", "w8a8", "--calibrate", text)
    assert done.returncode == 0, done.stderr
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(os.listdir(into))
    done = quantize("--from", POCKET, "--to", into, "--format", "fp8")
    assert done.returncode == 2 and "exists: --force replaces it" in done.stderr
    done = quantize("--from", POCKET, "--to", path, "--format", "fp8", "--force")
    assert done.returncode == 2 and "no directory" in done.stderr
    assert one_process(REQUESTS[:4], path)[0] == one_process(REQUESTS[:4], POCKET, dtype="q4_0")[0]


@pytest.mark.parametrize("kind, most", [("w8a8", 0.03), ("fp8", 0.2), ("fp8_tensor", 0.2),
                                        ("w4a16", 0.2)])
def test_written_directories_are_read(kind, most, tmp_path):
    """The report after writing loads what was written: close to the original, and not equal."""
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time, there was a girl. She had a red ball and a dog.\n" * 4)
    done = quantize("--from", POCKET, "--to", tmp_path / kind, "--format", kind, "--text", text)
    assert done.returncode == 0, done.stderr
    rows = {r[:22].strip(): r[22:].split() for r in done.stdout.splitlines()[2:]}
    assert 0 < float(rows["KL divergence, mean"][0]) < most
    assert 0.8 < float(rows["same top token"][0]) <= 1
