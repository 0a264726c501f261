"""tokenizer.model files of new options, with new texts: the ids of the sentencepiece library and of
transformers' slow tokenizer are ours. tests/golden/make_sentencepiece.py trains the models and asks
the two; tests/unit/tokenizer_sentencepiece_test.c, which has a small committed file of the same
kind, compares."""
import os
import random
import subprocess

import pytest
from installed import run, installed
from harness import BIN, ROOT, SLOW


def test_ids_are_the_library_s(tmp_path_factory):
    program = os.path.join(BIN, "tokenizer_sentencepiece_test")
    if not os.path.exists(program):
        pytest.skip("this build has no tokenizer_sentencepiece_test")
    seed = int(os.environ.get("SEED", random.randrange(1 << 30)))
    print(f"SEED={seed}")
    home = installed(tmp_path_factory, "sentencepiece", "transformers<5", "protobuf")
    out = str(tmp_path_factory.mktemp("sentencepiece") / "cases.json")
    run(home, "python", os.path.join(ROOT, "tests", "golden", "make_sentencepiece.py"), "--seed",
        seed, "--models", 24, "--texts", 200, "--own-rules", out)
    done = subprocess.run([program], cwd=ROOT, env=dict(os.environ, SENTENCEPIECE_JSON=out),
                          capture_output=True, text=True, timeout=600 * SLOW, check=False)
    assert done.returncode == 0, (seed, done.stdout[-3000:], done.stderr[-3000:])
    assert "24 models" in done.stdout + done.stderr
