"""Lists of tiktoken's ranks with new texts: the ids of the tiktoken library are ours, with a small
made list and, where TANDEM_DATA has them, with published ones. tests/golden/make_tiktoken.py asks
the library; tests/unit/tokenizer_ranks_test.c, which has a small committed file of the same kind,
compares."""
import os
import random
import subprocess

import pytest
from installed import run, installed
from harness import BIN, ROOT, SLOW

DATA = os.environ.get("TANDEM_DATA", os.path.join(ROOT, "..", "shared", "data"))
LISTS = [os.path.join(DATA, "tokenizer-models", *name) for name in
         (("qwen", "qwen.tiktoken"), ("llama3", "tokenizer.model"))]


def test_ids_are_the_library_s(tmp_path_factory):
    program = os.path.join(BIN, "tokenizer_ranks_test")
    if not os.path.exists(program):
        pytest.skip("this build has no tokenizer_ranks_test")
    seed = int(os.environ.get("SEED", random.randrange(1 << 30)))
    print(f"SEED={seed}")
    home = installed(tmp_path_factory, "tiktoken")
    for ranks in [None, *filter(os.path.exists, LISTS)]:
        out = str(tmp_path_factory.mktemp("tiktoken") / "cases.json")
        run(home, "python", os.path.join(ROOT, "tests", "golden", "make_tiktoken.py"), "--seed",
            seed, "--texts", 2000, "--long", 3, *(["--ranks", ranks] if ranks else []), out)
        done = subprocess.run([program], cwd=ROOT, env=dict(os.environ, TIKTOKEN_JSON=out),
                              capture_output=True, text=True, timeout=600 * SLOW, check=False)
        assert done.returncode == 0, (ranks, seed, done.stdout[-3000:], done.stderr[-3000:])
        assert "6000 texts" in done.stdout + done.stderr
