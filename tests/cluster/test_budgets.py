"""A prompt that a hostile model directory's tokenizer or template would make gigabytes of: the
router refuses it by name, and holds little meanwhile."""
import json
import os
import re

import grpc
import pytest

from harness import PATIENT, POCKET, Cluster, peak_bytes

OK, INVALID = grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT
FOUR = {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaa"}
MARKS = "{# <|im_start|><|im_end|> #}"


@pytest.fixture
def model(tmp_path):
    for name in os.listdir(POCKET):
        os.symlink(os.path.join(POCKET, name), tmp_path / name)
    return tmp_path


def edit(model, name, change):
    value = json.loads((model / name).read_text()) if (model / name).exists() else {}
    change(value)
    if (model / name).is_symlink():
        (model / name).unlink()
    (model / name).write_text(json.dumps(value))


def test_bytes_are_bounded(model):
    edit(model, "tokenizer.json",
         lambda t: t.update(normalizer={"type": "Sequence", "normalizers": [FOUR] * 9}))
    template = (MARKS + "{% for i in range(100000) %}{{ messages[0].content }}"
                "{{ range(1000) | join('.') }}{% endfor %}")
    edit(model, "tokenizer_config.json", lambda t: t.update(chat_template=template))
    with Cluster(model=str(model), **PATIENT) as c:
        before = peak_bytes(c.router)
        r = c.generate(prompt="a" * 900, max_tokens=2)
        assert r.code == INVALID, r.details
        assert ("prompt: text of 900 bytes: tokenizer.json's normalizer 4 of 9 Replace makes "
                "more than 94336 bytes") in r.details, r.details
        r = c.generate(chat=[("user", "Hello")], max_tokens=2)
        assert r.code == INVALID and re.search(
            r"chat template, line 1: the prompt would have more than \d+ bytes, the most that "
            r"this model's context holds", r.details), r.details
        r = c.generate(prompt="b" * 900, max_tokens=2)
        assert r.code == OK, r.details
        assert peak_bytes(c.router) - before < 128 << 20  # 4.5 GB before there were budgets
        c.wait_idle()
