"""Greedy text of 64 tokens of every family through a cluster, of which a decode worker dies: the
tokens of one process. Baichuan's 13B models, which have no rotation, count as a family here. The
models are the golden ones, which the reference computes (golden_test), with a tokenizer of a few
letters."""
import json
import os
import random
import shutil

import pytest

from harness import ROOT, SHORT, Cluster, check_one_process, check_results, one_process

GOLDEN = os.path.join(ROOT, "tests", "golden")


def models_of_families():
    """One golden model of each model_type, those with a text_config included; without a model of a
    family this file is wrong."""
    found = {"baichuan_13b": os.path.join(GOLDEN, "families", "baichuan_13b")}
    for folder in ("fixtures", "mixtures", "latent", "families"):
        for name in sorted(os.listdir(os.path.join(GOLDEN, folder))):
            path = os.path.join(GOLDEN, folder, name)
            if os.path.isdir(path):
                with open(os.path.join(path, "config.json"), encoding="utf-8") as f:
                    found.setdefault(json.load(f)["model_type"], path)
    return dict(sorted(found.items()))


MODELS = models_of_families()


def config_of(path):
    with open(os.path.join(path, "config.json"), encoding="utf-8") as f:
        config = json.load(f)
    return config.get("text_config", config)


def test_every_family_has_a_model():
    with open(os.path.join(ROOT, "common", "model", "family.h"), encoding="utf-8") as f:
        n_families = int(f.read().split("TD_N_FAMILIES = ")[1].split(" ")[0])
    assert len({config_of(path)["model_type"] for path in MODELS.values()}) == n_families


def add_tokenizer(folder, vocab):
    """Every id is a letter of its own."""
    with open(os.path.join(folder, "tokenizer.json"), "w", encoding="utf-8") as f:
        json.dump(
            {
                "version": "1.0", "model": {
                    "type": "BPE", "merges": [],
                    "vocab": {chr(0x4e00 + i): i for i in range(vocab)}
                }
            }, f)


# In short form one family of each kind: slopes of scores, other names, experts, latent rows,
# windows and caps.
KINDS = ("baichuan_13b", "chatglm", "deepseek_v3", "gemma3_text", "gpt_oss", "internlm2")


def greedy_requests(family, folder):
    """The family's model, copied there, and requests for it."""
    model = str(folder / "m")
    shutil.copytree(MODELS[family], model)
    config = config_of(model)
    vocab = config.get("vocab_size", config.get("padded_vocab_size"))
    add_tokenizer(model, vocab)
    rng = random.Random(53)
    # longer than a block and than the windows; an end of sequence is as good as another token
    return model, [{
        "ids": [rng.randrange(3, vocab) for _ in range(n)], "max_tokens": 64, "seed": 1,
        "logprobs": 0, "temperature": 0.0, "top_k": 0
    } for n in (37, 5)]


@pytest.mark.parametrize("family", KINDS if SHORT else MODELS)
def test_greedy_text(family, tmp_path):
    model, requests = greedy_requests(family, tmp_path)
    check_one_process(requests, model, n_alone=0)


@pytest.mark.parametrize("family", ["minimax_m2", "olmo2"])
def test_norms_of_all_heads_by_ranks(family, tmp_path):
    """Ranks add up what each has of a norm over all heads (ranks_test): the bits of one process of
    as many ranks, whatever rows share a step."""
    model, requests = greedy_requests(family, tmp_path)
    oracle = one_process(requests, model, "f32", tp=2)[0]
    assert one_process(requests, model, "f32", concurrency=2, chunk=7, tp=2)[0] == oracle
    with Cluster(model=model, dtype="f32", worker_args=["--tp", 2, "--threads", 2]) as c:
        check_results(c.generate_many(c.requests(requests)), oracle)
        c.wait_idle()
