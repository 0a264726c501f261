"""Quantised directories of families beside Llama: what their matrices' codes stand for, written
plainly, gives the same logits. Rows of q and k stand in another order in memory where a head is
rotated in part or by neighbours, and fused matrices are cut by rows: a row must keep its own
scales."""
import json
import os
import re
import struct

import numpy as np
import pytest

from quant_model import ROOT, Fp8, Int8, Packed, Typed, write_safetensors
from test_quantised import logits

GOLDEN = os.path.join(ROOT, "tests", "golden")
MODELS = ["mixtures/glm4_moe", "mixtures/minimax_m2", "families/glm4", "families/phi3",
          "families/phi3_short_partial", "families/gemma2", "families/gemma3", "families/olmo2"]
MATRIX = re.compile(r"(_proj|\.w[123])\.weight$")
STACK = re.compile(r"experts\.(gate_up|down)_proj_(blocks|scales)$")
WEIGHTS_ALONE = {"packed-4": Packed(group=-1), "packed-8": Packed(bits=8, group=-1),
                 "int8-weights": Int8(dynamic=False), "fp8-weights": Fp8("weights")}
# these round activations, too
BOTH = {"int8": Int8(), "fp8-channel": Fp8("channel"), "fp8-block": Fp8("block")}


def read(folder):
    """Tensors of a small directory, by name: numbers in double precision, and as they are."""
    kinds = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "U8": np.uint8}
    wide, own = {}, {}
    for name in sorted(os.listdir(folder)):
        if not name.endswith(".safetensors"):
            continue
        with open(os.path.join(folder, name), "rb") as f:
            header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
            data = f.read()
        for tensor, t in header.items():
            if tensor == "__metadata__":
                continue
            lo, hi = t["data_offsets"]
            raw = np.frombuffer(data[lo:hi], kinds[t["dtype"]]).reshape(t["shape"])
            own[tensor] = Typed(raw, t["dtype"])
            wide[tensor] = (raw.astype(np.uint32) << 16).view(
                np.float32).astype(float) if t["dtype"] == "BF16" else raw.astype(float)
    return wide, own


def write(folder, config, tensors):
    os.makedirs(folder)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as f:
        json.dump(config, f)
    write_safetensors(os.path.join(folder, "model.safetensors"), tensors)
    return str(folder)


def both(model, scheme, path):
    """The model's matrices as `scheme` stores them, and as what that stands for; tokens."""
    folder = os.path.join(GOLDEN, model)
    config, said = (json.load(open(os.path.join(folder, n), encoding="utf-8"))
                    for n in ("config.json", "tokens.json"))
    wide, own = read(folder)
    rng = np.random.default_rng(11)
    coded, plain = {}, {}
    for name, value in wide.items():
        if not MATRIX.search(name):
            coded[name] = plain[name] = own[name]
            continue
        parts, product = scheme.matrix(name[:-len(".weight")], value, rng)
        coded.update(parts)
        # a scheme that rounds activations keeps rows of the identity as they are, but for fp8's
        # scale, whose product with 448 may be off in the last bit of f32
        plain[name] = product(np.eye(value.shape[1])).T.astype(np.float32)
    return (write(path / "coded", {**config, "quantization_config": scheme.config}, coded),
            write(path / "plain", config, plain), said["tokens"])


@pytest.mark.parametrize("scheme", WEIGHTS_ALONE)
@pytest.mark.parametrize("model", MODELS)
def test_codes_are_what_they_stand_for(model, scheme, tmp_path):
    coded, plain, tokens = both(model, WEIGHTS_ALONE[scheme], tmp_path)
    code, said, want = logits(plain, tmp_path / "out", "--dtype", "f32", tokens=tokens)
    assert code == 0, said
    code, said, got = logits(coded, tmp_path / "out", "--dtype", "f32", tokens=tokens)
    assert code == 0, said
    # sums in f32 in two orders
    assert np.abs(got - want).max() < 3e-5 * np.abs(want).max()
    again = logits(coded, tmp_path / "out", "--dtype", "f32", "--chunk", "5", tokens=tokens)[2]
    assert (again == got).all()


@pytest.mark.parametrize("scheme", BOTH)
@pytest.mark.parametrize("model", MODELS)
def test_rounded_activations_are_near(model, scheme, tmp_path):
    """A row in a wrong place, or with another's scale, makes another model: correlation is near 0
    then. The median row, because rounding may send a row to another expert."""
    coded, plain, tokens = both(model, BOTH[scheme], tmp_path)
    want = logits(plain, tmp_path / "out", "--dtype", "f32", tokens=tokens)[2]
    code, said, got = logits(coded, tmp_path / "out", "--dtype", "f32", tokens=tokens)
    assert code == 0, said
    off = np.sqrt(((got - want)**2).mean(axis=1)) / want.std()
    assert np.median(off) < (0.1 if scheme == "int8" else 0.3)


def q8_0(w):
    """What blocks of 32 along the second axis stand for."""
    blocks = w.swapaxes(1, 2).reshape(w.shape[0], w.shape[2], -1, 32)
    scale = (np.abs(blocks).max(-1, keepdims=True) / np.float32(127)).astype(np.float32)
    codes = blocks * (1 / scale)
    codes = np.trunc(codes + np.copysign(np.float32(0.5), codes))
    scale = scale.astype(np.float16).astype(np.float32)
    assert np.abs(codes).max(-1).min() == 127  # so a second rounding finds the same scales
    return (codes * scale).astype(np.float32).reshape(w.swapaxes(1, 2).shape).swapaxes(1, 2)


def test_stacks_are_rounded_at_load(tmp_path):
    """--dtype q8_0 of gpt-oss's experts in bf16, which lie transposed in the file: rounded in
    blocks of 32 inputs, as formulas of the format have it. What is rounded so already stays as it
    is, so both directories are one model; blocks cut any other way would round again."""
    folder = os.path.join(GOLDEN, "mixtures/gpt_oss_mxfp4")
    config, said = (json.load(open(os.path.join(folder, n), encoding="utf-8"))
                    for n in ("config.json", "tokens.json"))
    del config["quantization_config"]
    _, own = read(folder)
    plain = {n: t for n, t in own.items() if not STACK.search(n)}
    rounded, rng = dict(plain), np.random.default_rng(5)
    n, hidden, inner = (config[k] for k in ("num_local_experts", "hidden_size",
                                            "intermediate_size"))
    for i in range(config["num_hidden_layers"]):
        for name, shape in (("gate_up_proj", (n, hidden, 2 * inner)),
                            ("down_proj", (n, inner, hidden))):
            # the low half of an f32 is cut off: bf16 exactly
            bits = (rng.normal(size=shape) * 0.3).astype(np.float32).view(np.uint32) >> 16
            at = f"model.layers.{i}.mlp.experts.{name}"
            plain[at] = Typed(bits.astype(np.uint16), "BF16")
            rounded[at] = np.ascontiguousarray(q8_0((bits << 16).astype(np.uint32).view(
                np.float32)))
    got = []
    for name, tensors in (("plain", plain), ("rounded", rounded)):
        made = write(tmp_path / name, config, tensors)
        code, text, rows = logits(made, tmp_path / "out", "--dtype", "q8_0",
                                  tokens=said["tokens"])
        assert code == 0, text
        got.append(rows)
    assert (got[0] == got[1]).all()
    exact = logits(str(tmp_path / "plain"), tmp_path / "out", "--dtype", "f32",
                   tokens=said["tokens"])[2]
    off = np.sqrt(((got[0] - exact)**2).mean(axis=1)) / exact.std()
    assert 0 < np.median(off) < 0.05
