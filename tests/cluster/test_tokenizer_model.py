"""A directory with SentencePiece's tokenizer.model and no tokenizer.json: the commands read it, and
a cluster serves texts by it."""
import base64
import json
import os
import shutil
import subprocess

import grpc
import pytest

from harness import BIN, POCKET, ROOT, SLOW, Cluster

with open(os.path.join(ROOT, "tests", "golden", "sentencepiece.json"), encoding="utf-8") as f:
    CASES = json.load(f)["cases"]


def directory(path, case):
    """The pocket model with a case's tokenizer."""
    shutil.copytree(POCKET, path)
    os.remove(os.path.join(path, "tokenizer.json"))
    with open(os.path.join(path, "tokenizer.model"), "wb") as f:
        f.write(base64.b64decode(case["model"]))
    with open(os.path.join(path, "tokenizer_config.json"), "w", encoding="utf-8") as f:
        json.dump(case["config"] or {}, f)
    return path


def tandem(*args, **kwargs):
    return subprocess.run([os.path.join(BIN, "tandem"), *args], capture_output=True,
                          encoding="utf-8", timeout=60 * SLOW, check=False, **kwargs)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_commands(kind, tmp_path):
    case = next(c for c in CASES if c["options"]["model_type"] == kind and not c["config"])
    model = directory(str(tmp_path / "m"), case)
    looked = tandem("model", model)
    assert "tokens, from tokenizer.model" in looked.stdout, looked
    for text, ids, _ in case["texts"][:4]:
        done = tandem("tokenize", "--whole", "--model", model, input=text)
        assert [int(i) for i in done.stdout.split()] == ids, (text, done)


def test_a_cluster_serves_it(tmp_path):
    case = next(c for c in CASES if c["config"] and not c["config"]["add_eos_token"])
    texts = [row for row in case["texts"] if row[0]][:4]
    with Cluster(model=directory(str(tmp_path / "m"), case)) as c:
        for text, ids, _ in texts:
            by_text = c.generate(prompt=text, max_tokens=8, temperature=0, ignore_eos=True)
            by_ids = c.generate(ids=[1, *ids], max_tokens=8, temperature=0, ignore_eos=True)
            assert by_text.code == grpc.StatusCode.OK, (by_text.code, by_text.details)
            assert by_text.tokens == by_ids.tokens and len(by_ids.tokens) == 8, text
