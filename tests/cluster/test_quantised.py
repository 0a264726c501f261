"""Quantised checkpoints of Hugging Face: each scheme's logits are those of its formulas in double
precision, a cluster gives the tokens of one process, ranks cut the matrices anywhere, and variants
that are not supported are refused by name."""
import json
import os
import random
import subprocess

import numpy as np
import pytest

from harness import BIN, SHORT, SLOW, Cluster, as_result, check_one_process, one_process
from quant_model import (KV_HEADS, LAYERS, VOCAB, Awq, Dynamic, Fp8, Gptq, Int8, LlmInt8, Mixed,
                         Model, Nf4, Packed, Plain, Typed)

N = 4 if SHORT else 8
TOKENS = list(np.random.default_rng(3).integers(3, VOCAB, 33))

SCHEMES = {
    "gptq-4": Gptq(),
    "gptq-4-order": Gptq(act_order=True),
    "gptq-4-v2": Gptq(v2=True, group=16),
    "gptq-8": Gptq(bits=8, group=-1, symmetric=True),
    "gptq-8-order-v2": Gptq(bits=8, group=24, act_order=True, v2=True),
    "gptq-dynamic": Dynamic({r"+:.*\.q_proj$": {"bits": 8},
                             r"-:.*\.0\.mlp\.down_proj|.*\.1\..*\.k_proj": {},
                             r".*\.gate_proj": {"bits": 8, "group_size": 16, "sym": True}}),
    # as the published TinyLlama-1.1B-Chat-v1.0-GPTQ-4bits-dynamic-cfg has it
    "gptq-dynamic-order": Dynamic({r"-:model\.layers\.0\.mlp\..*": {},
                                   r".*\.1\..*": {"bits": 8, "group_size": 24, "desc_act": False}},
                                  act_order=True),
    "awq": Awq(),
    "awq-32": Awq(32),
    "awq-64": Awq(64),
    "awq-rows": Awq(-1),
    "awq-some": Awq(plain=["layers.0.mlp.down_proj", "k_proj"]),
    "packed-4": Packed(),
    "packed-4-zeros-order": Packed(symmetric=False, act_order=True, group=16),
    "packed-8": Packed(bits=8, group=-1),
    "packed-4-long": Packed(group=96),
    "int8": Int8(),
    "int8-tensor": Int8(per_tensor=True),
    "int8-weights": Int8(dynamic=False),
    "fp8-channel": Fp8("channel"),
    "fp8-tensor": Fp8("tensor"),
    "fp8-weights": Fp8("weights"),
    "fp8-static": Fp8("static"),
    "fp8-dynamic": Fp8("dynamic"),
    "fp8-block": Fp8("block"),
    "fp8-block-e8m0": Fp8("block", "F8_E8M0"),
    "fp8-block-powers": Fp8("block", "F32"),
    "fp8-dynamic-powers": Fp8("dynamic", "F32"),
    "modelopt": Fp8("modelopt"),
    "mixed": Mixed(Fp8("channel"), Packed(), Int8()),
    "mixed-bits": Mixed(Packed(bits=8, group=-1), Packed(), Packed(group=16, symmetric=False)),
    "llm-int8": LlmInt8(),
    "nf4": Nf4(),
    "nf4-double": Nf4(double=True),
    "fp4": Nf4(kind="fp4"),
}
# one of each way to compute goes through a cluster, with KV of this type
IN_CLUSTER = {"gptq-4-order": "auto", "int8": "int8", "fp8-block": "auto", "llm-int8": "fp8",
              "nf4-double": "auto"}


def make_requests():
    rng = random.Random(41)
    return [{
        "ids": [rng.randrange(3, VOCAB) for _ in range(rng.choice([1, 15, 16, 33, 70]))],
        "max_tokens": rng.choice([2, 9, 17]), "seed": rng.randrange(1 << 40), "logprobs": 0,
        "temperature": rng.choice([0.0, 0.8]), "top_k": rng.choice([0, 20])
    } for _ in range(N)]


REQUESTS = make_requests()
# short prompts with long outputs: each needs one block of 16 tokens first, and five in the end
GROWING = [dict(REQUESTS[0], ids=[3 + i] * 10, max_tokens=60, seed=i, temperature=0.8)
           for i in range(8)]


def logits(folder, out, *more, tokens=TOKENS):
    """(exit status, what was said, logits)"""
    done = subprocess.run([os.path.join(BIN, "tandem"), "logits", "--model", folder, "--tokens",
                           ",".join(map(str, tokens)), "--out", str(out), *more],
                          capture_output=True, text=True, timeout=60 * SLOW, check=False)
    got = np.fromfile(out, "<f4").reshape(len(tokens), -1) if done.returncode == 0 else None
    return done.returncode, done.stdout + done.stderr, got


@pytest.mark.parametrize("name", SCHEMES)
def test_logits_are_those_of_the_formulas(name, tmp_path):
    model = Model(SCHEMES[name])
    folder = model.write(tmp_path / "m")
    want = model.logits(TOKENS)
    code, said, got = logits(folder, tmp_path / "out")
    assert code == 0, said
    assert 1 < want.std() < 10
    # what sums in f32 leave; a code of an activation that is off by one gives 1e-3
    assert np.abs(got - want).max() < 5e-5
    # chunks change no bit (I1)
    assert (logits(folder, tmp_path / "out", "--chunk", "5")[2] == got).all()


@pytest.mark.parametrize("name", ["gptq-4", "gptq-8-order-v2", "gptq-dynamic", "awq", "packed-8",
                                  "fp8-weights", "nf4-double"])
def test_a_model_in_bf16(name, tmp_path):
    """Products whose activations the scheme leaves alone round them to bf16, as the others do: half
    of 2^-8 of each number, which a dozen products make 1 % of a logit or less."""
    model = Model(SCHEMES[name])
    folder = model.write(tmp_path / "m")
    want = model.logits(TOKENS)
    code, said, got = logits(folder, tmp_path / "out", "--dtype", "bf16")
    assert code == 0, said
    assert 1e-4 < np.sqrt(((got - want)**2).mean()) / want.std() < 0.02
    assert (logits(folder, tmp_path / "out", "--dtype", "bf16", "--chunk", "5")[2] == got).all()


@pytest.mark.parametrize("name", ["gptq-4-order", "awq", "int8", "fp8-block", "nf4-double"])
def test_experts_are_quantised(name, tmp_path):
    """Each matrix of each expert is a product of its own. Where activations are rounded, one of the
    many that lies at a tie may go the other way than in double precision, which the rows behind it
    see; so there half of the rows are compared."""
    model = Model(SCHEMES[name], experts=3)
    folder = model.write(tmp_path / "m")
    want = model.logits(TOKENS)
    code, said, got = logits(folder, tmp_path / "out")
    assert code == 0, said
    assert 1 < want.std() < 10
    off = np.abs(got - want).max(axis=1)
    assert np.median(off) < 5e-5
    assert name in ("int8", "fp8-block") or off.max() < 2e-4
    assert (logits(folder, tmp_path / "out", "--chunk", "5")[2] == got).all()


@pytest.mark.parametrize("name,file,key", [("gptq-4", "quantize_config.json", None),
                                           ("modelopt", "hf_quant_config.json", "quantization")])
def test_the_configuration_is_beside(name, file, key, tmp_path):
    """Older directories have it in a file of its own."""
    model = Model(SCHEMES[name])
    folder = model.write(tmp_path / "m")
    want = logits(folder, tmp_path / "out")[2]
    c = model.config.pop("quantization_config")
    c.pop("quant_method")
    model.files[file] = {key: c} if key else c
    assert (logits(model.write(tmp_path / "beside"), tmp_path / "out")[2] == want).all()
    c["strange"] = 1
    code, said, _ = logits(model.write(tmp_path / "bad"), tmp_path / "out")
    assert code != 0 and file in said and "unknown field strange" in said, said


def test_the_first_names_of_awq(tmp_path):
    """AutoAWQ wrote quant_config.json before config.json had a place for it. What else has that
    name is not looked at."""
    model = Model(SCHEMES["awq"])
    want = logits(model.write(tmp_path / "m"), tmp_path / "out")[2]
    both = model.config["quantization_config"]
    own = {"zero_point": True, "q_group_size": 16, "w_bit": 4, "version": "GEMM"}
    for n, (c, content, said) in enumerate([
            (None, own, None), (both, own, None), (both, {"other": [1]}, None),
            (None, dict(own, version="GEMV"), "quant_config.json: quantization_config: version is"),
            (both, dict(own, q_group_size=32), "differ in group_size")]):
        model.config["quantization_config"] = c
        model.files["quant_config.json"] = content
        code, text, got = logits(model.write(tmp_path / f"m{n}"), tmp_path / "out")
        assert (code == 0 and (got == want).all()) if said is None else (code != 0 and said in text)


def test_codes_are_whole_bytes(tmp_path):
    """A matrix of 99 rows of 165 codes in blocks of 33 has half a byte more than half as many
    bytes."""
    code, said, _ = logits(Model(Nf4(block=33)).write(tmp_path / "m"), tmp_path / "out")
    assert code != 0 and "blocksize is 33, must be a power of two" in said, said


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_in_codes(tied, tmp_path):
    """It is a table of numbers; as an output matrix, too, whose codes are no bytes to compare."""
    scheme, rng = SCHEMES["gptq-4"], np.random.default_rng(5)
    model = Model(scheme)
    w = rng.normal(size=(VOCAB, model.sizes[0]))
    for name in ("model.embed_tokens", "lm_head"):
        del model.tensors[name + ".weight"]
        model.tensors.update(scheme.matrix(name, w, rng)[0])
    model.config["tie_word_embeddings"] = tied
    code, said, _ = logits(model.write(tmp_path / "m"), tmp_path / "out")
    assert code != 0 and "model.embed_tokens.weight is quantised (gptq), not sup" in said, said


# What GPTQModel 7.7 and transformers 5.23 write beside what the schemes say, which other versions
# do not have.
NEWER = {
    "gptq": dict(lm_head=False, method="gptq", format="gptq", checkpoint_format="gptq",
                 pack_dtype="int32", meta={"quantizer": ["gptqmodel:7.7.0"]}),
    "gptq-transformers": dict(
        act_group_aware=True, format="gptq", checkpoint_format="gptq", meta=None, backend="auto",
        tokenizer=None, dataset=None, model_seqlen=None, block_name_to_quantize=None,
        module_name_preceding_first_block=None, batch_size=1, pad_token_id=None,
        max_input_length=None, cache_block_outputs=True, modules_in_block_to_quantize=None),
    "awq": dict(desc_act=False, lm_head=False, method="awq", format="gemm", version="gemm",
                checkpoint_format="gemm", pack_dtype="int32", meta={"pack_impl": "cpu"}),
    "awq-transformers": dict(desc_act=False, sym=True, act_group_aware=True, format="gemm",
                             true_sequential=True, damp_percent=0.1, meta=None, backend="auto",
                             dataset=None, tokenizer=None, batch_size=1, cache_block_outputs=True),
    "fp8": dict(modules_to_convert=None, scale_fmt="float", expert_dtype="fp8", dequantize=False),
}


@pytest.mark.parametrize("name,newer", [
    ("gptq-4", "gptq"), ("gptq-4", "gptq-transformers"), ("awq", "awq"),
    ("awq", "awq-transformers"), ("fp8-block", "fp8")])
def test_configurations_of_todays_libraries(name, newer, tmp_path):
    model = Model(SCHEMES[name])
    want = logits(model.write(tmp_path / "m"), tmp_path / "out")[2]
    model.config["quantization_config"].update(NEWER[newer])
    code, said, got = logits(model.write(tmp_path / "newer"), tmp_path / "out")
    assert code == 0, said
    assert (got == want).all()


@pytest.mark.parametrize("name,file,key,field,value", [
    ("gptq-4", "quantize_config.json", None, "checkpoint_format", "gptq_v2"),
    ("gptq-4", "quantize_config.json", None, "group_size", 64),
    ("gptq-4", "quantize_config.json", None, "group_size", -1),
    ("gptq-8", "quantize_config.json", None, "bits", 4),
    ("modelopt", "hf_quant_config.json", "quantization", "quant_algo", "FP8"),
    ("fp8-block", "hf_quant_config.json", "quantization", "quant_algo", "FP8"),
])
def test_two_configurations_must_agree(name, file, key, field, value, tmp_path):
    """A directory with both is loaded when they say the same; which of two is right is no guess of
    ours. A file that says what this version does not read is not needed, as config.json does."""
    model = Model(SCHEMES[name])
    c = {k: v for k, v in model.config["quantization_config"].items() if k != "quant_method"}
    other = {field: value} if name == "fp8-block" else dict(c, **{field: value})
    for n, (content, is_fine) in enumerate([(c, True), (other, other == c),
                                            (dict(other, strange=1), True)]):
        model.files[file] = {key: content} if key else content
        code, said, _ = logits(model.write(tmp_path / f"m{n}"), tmp_path / "out")
        assert is_fine == (code == 0), said
        assert is_fine or (file in said and
                           "and the quantization_config of config.json" in said), said


@pytest.mark.parametrize("rounded,whole", [("int8", "int8-weights"),
                                           ("fp8-channel", "fp8-weights"),
                                           ("fp8-dynamic-powers", "fp8-dynamic")])
def test_activations_are_rounded(rounded, whole):
    """The formulas tell whether activations were rounded, and how, so the test above does."""
    a, b = (Model(SCHEMES[name]).logits(TOKENS) for name in (rounded, whole))
    assert 1e-3 < np.median(np.abs(a - b))


@pytest.mark.parametrize("name", IN_CLUSTER)
def test_tokens_of_one_process(name, tmp_path):
    """Whatever the batch, the chunks, a prefix hit, a preemption, and when a decode worker dies at
    its second token."""
    scheme, kv = SCHEMES[name], IN_CLUSTER[name]
    model = Model(scheme).write(tmp_path / "m")
    head_dim = getattr(scheme, "sizes", (0, 24))[1]
    block = 16 * 2 * LAYERS * KV_HEADS * head_dim * 4  # of 16 tokens, as large as any type's
    got, preemptions = one_process(GROWING, model, dtype="auto", kv_dtype=kv, concurrency=8,
                                   kv=str(6 * block))
    assert preemptions > 0
    assert got == one_process(GROWING, model, dtype="auto", kv_dtype=kv)[0]
    check_one_process(REQUESTS, model, n_alone=2, dtype="auto", kv_dtype=kv)


def test_blocks_are_not_cut(tmp_path):
    model = Model(SCHEMES["fp8-block"]).write(tmp_path / "m")
    with pytest.raises(AssertionError, match="blocks of 128 values tp 2 would cut"):
        one_process(REQUESTS[:1], model, dtype="auto", tp=2)


@pytest.mark.parametrize("name", [n for n in IN_CLUSTER if n != "fp8-block"] + ["fp8-channel"])
def test_ranks(name, tmp_path):
    """Ranks have columns that begin and end inside a group: the same greedy tokens. Where a row's
    activations are rounded by its largest, a rank rounds its part of the row by that part's."""
    model = Model(SCHEMES[name]).write(tmp_path / "m")
    greedy = [dict(r, temperature=0.0, top_k=0) for r in REQUESTS]
    want = [tokens for tokens, _ in one_process(greedy, model, dtype="auto")[0]]
    for tp in (2, 4):
        got = [tokens for tokens, _ in one_process(greedy, model, dtype="auto", tp=tp)[0]]
        if name == "gptq-4-order":
            assert got == want, f"tp {tp}"
        first = sum(a[0] == b[0] for a, b in zip(got, want))
        assert first >= N - N // 4, f"tp {tp}: {first} of {N} first tokens are the same"


def wide(scheme):
    """Two ranks cut its columns between blocks of 128 values."""
    scheme.sizes = 128, 64, 256
    return scheme


# name: the matrices, --dtype, and how far a logprob may be from one rank's. Sums have another
# order: 6e-6 was seen in f32. Where activations are rounded, one that lies at a tie may go the
# other way (0.03 in bf16; 0.09 with codes of 8 bits, by groups that no cut breaks). By rows a
# rank rounds its part by that part's largest (0.3 in int8, 0.6 in E4M3).
ON_RANKS = {
    "q8_0": (Plain(), "q8_0", 0.25),
    "q4_k_m": (Plain(), "q4_k_m", 0.25),
    "gptq-4-order": (SCHEMES["gptq-4-order"], "auto", 1e-3),
    "awq-bf16": (SCHEMES["awq"], "bf16", 0.1),
    "nf4-double": (SCHEMES["nf4-double"], "auto", 1e-3),
    "fp8-block": (wide(Fp8("block")), "auto", 1e-3),
    "fp8-channel": (SCHEMES["fp8-channel"], "auto", 1.5),
    "int8": (SCHEMES["int8"], "auto", 0.6),
}


@pytest.mark.parametrize("name", ON_RANKS)
def test_ranks_in_a_cluster(name, tmp_path):
    """A prefill and a decode worker of two ranks each: the tokens and logprobs of one engine of two
    ranks, in a batch, alone and with prefix hits; and beside one rank whole sequences of the same
    tokens, but where two were as likely."""
    scheme, dtype, most = ON_RANKS[name]
    model = Model(scheme).write(tmp_path / "m")
    greedy = [dict(r, temperature=0.0, top_k=0) for r in REQUESTS]
    want = one_process(greedy, model, dtype=dtype, tp=2)[0]
    with Cluster(model=model, dtype=dtype, prefill=1, decode=1,
                 worker_args=["--tp", 2, "--threads", 2, "--max-step-tokens", 48]) as c:
        requests = c.requests(greedy)
        check(c.generate_many(requests), want)
        check([c.generate(r) for r in requests[:2]], want)
        c.wait_idle()
    whole = 0
    for i, (got, one) in enumerate(zip(want, one_process(greedy, model, dtype=dtype)[0])):
        same = [a == b for a, b in zip(got[0], one[0])] + [False]
        n = same.index(False)  # behind another token everything is another
        off = max(abs(a - b) for a, b in zip(got[1][:n + 1], one[1][:n + 1]))
        assert off < most, f"request {i}, up to token {n}: logprobs differ by {off} from one rank's"
        whole += n == len(got[0])
    assert whole >= (N - 1 if most < 0.5 else N // 2), f"{whole} of {N} sequences are one rank's"


def check(results, want):
    for i, (r, expected) in enumerate(zip(results, want)):
        assert as_result(r) == expected, f"request {i} differs"


def test_what_is_ignored_the_tensors_say(tmp_path):
    """Patterns of a configuration are not looked at, so none can be without end or wrong."""
    model = Model(SCHEMES["packed-4"])
    want = logits(model.write(tmp_path / "m"), tmp_path / "out")[2]
    c = model.config["quantization_config"]
    c["ignore"] = ["re:((a+)+)+$" + "a" * 10000, "lm_head", "re:("]
    assert (logits(model.write(tmp_path / "odd"), tmp_path / "out")[2] == want).all()
    model = Model(SCHEMES["gptq-4"])
    want = logits(model.write(tmp_path / "gptq"), tmp_path / "out")[2]
    model.config["quantization_config"]["dynamic"] = {
        "+:((a+)+)+$" + "a" * 10000: {"bits": 8}, "-:(": {}, "-:.*": None}
    assert (logits(model.write(tmp_path / "of-none"), tmp_path / "out")[2] == want).all()


def test_exponents_of_scales(tmp_path):
    """Powers of two by their exponents are the same numbers as in F32, down to the smallest, which
    f32 has as a subnormal number."""
    models = [Model(Fp8("block", powers)) for powers in ("F8_E8M0", "F32")]
    for exponent in (0, 1, 126, 160):
        models[0].tensors[f"{DOWN}.weight_scale_inv"].array[0, 1] = exponent
        models[1].tensors[f"{DOWN}.weight_scale_inv"][0, 1] = 2.0**(exponent - 127)
        for options in ([], ["--dtype", "bf16"]):
            a, b = (logits(m.write(tmp_path / f"{exponent}-{len(options)}-{i}"), tmp_path / "out",
                           *options) for i, m in enumerate(models))
            assert a[0] == b[0] == 0, a[1] + b[1]
            assert (a[2] == b[2]).all()


def test_groups_of_one_format(tmp_path):
    """Groups that name other layers and say the same are one."""
    model = Model(SCHEMES["packed-4"])
    want = logits(model.write(tmp_path / "m"), tmp_path / "out")[2]
    second_group()(model)
    code, said, got = logits(model.write(tmp_path / "two"), tmp_path / "out")
    assert code == 0, said
    assert (got == want).all()


@pytest.mark.parametrize("name,group_size", [
    ("gptq-8", 176), ("packed-8", 176), ("packed-8", 2048)])
def test_groups_that_are_rows(name, group_size, tmp_path):
    """Rows of 176 values in groups of 176 or more are as whole rows, so a matrix that fits both
    follows either. The second is no other group, or fits rows of this length alone."""
    model = Model(SCHEMES[name])
    want = logits(model.write(tmp_path / "m"), tmp_path / "out")[2]
    if name.startswith("gptq"):
        config(dynamic={".*down.*": {"group_size": group_size}, "a": {"group_size": 4096}})(model)
    else:
        second_group(strategy="group", group_size=group_size)(model)
    code, said, got = logits(model.write(tmp_path / "two"), tmp_path / "out")
    assert code == 0, said
    assert (got == want).all()


def config(**more):
    """Changes fields of quantization_config; None takes one away."""

    def change(model):
        c = dict(model.config["quantization_config"])
        for key, value in more.items():
            if value is None:
                c.pop(key, None)
            else:
                c[key] = value
        model.config["quantization_config"] = c

    return change


def group(part, **more):
    """Changes fields of the one group's weights or input_activations."""

    def change(model):
        groups = model.config["quantization_config"]["config_groups"]
        groups["group_0"][part] = dict(groups["group_0"][part] or {}, **more)

    return change


def top(**more):
    """Changes fields of config.json itself."""
    return lambda model: model.config.update(more)


def second_group(fmt=None, name="group_1", **weights):
    """One more group, which is as the first but for these."""

    def change(model):
        groups = model.config["quantization_config"]["config_groups"]
        first = groups["group_0"]
        groups[name] = dict(first, format=fmt or first.get("format"), targets=["re:.*down.*"],
                                 weights=dict(first["weights"], **weights))

    return change


def tensor(name, function):
    """Changes a tensor of layer 1's down_proj; function(None) adds one, and None takes it away."""

    def change(model):
        full = f"model.layers.1.mlp.down_proj.{name}"
        value = function(model.tensors.pop(full, None))
        if value is not None:
            model.tensors[full] = value

    return change


def state(**more):
    """Changes fields of bitsandbytes' state."""

    def change(t):
        return np.frombuffer(json.dumps(dict(json.loads(t.tobytes()), **more)).encode(), np.uint8)

    return tensor("weight.quant_state.bitsandbytes__nf4", change)


def with_value(index, value):

    def change(t):
        t = t.copy()
        t[index] = value
        return t

    return change


DOWN = "model.layers.1.mlp.down_proj"
REFUSED = [
    ("gptq-4", config(bits=3), "quantization_config: bits is 3, must be 4 or 8"),
    ("gptq-4", config(bits=None), "quantization_config: bits is missing"),
    ("gptq-4", config(group_size=20), "group_size is 20, must be a multiple of 8 in 16..65536"),
    ("gptq-4", config(group_size=0), "group_size is 0, must be a multiple of 8 in 16..65536"),
    ("gptq-4", config(group_size=2**40), "group_size is 1099511627776, must be an integer in -1"),
    ("gptq-4", config(checkpoint_format="marlin"),
     "checkpoint_format is marlin, not supported: must be gptq or gptq_v2"),
    ("gptq-4", config(is_marlin_format=True), "is_marlin_format is true, not supported"),
    ("gptq-4", config(pack_dtype="int64"), "pack_dtype is int64, not supported"),
    ("gptq-4", config(dynamic=["re"]), "dynamic is [\"re\"], not supported: must be an object"),
    ("gptq-4", config(dynamic={"+:re": 8}), "quantization_config: dynamic.+:re: must be an object"),
    ("gptq-4", config(dynamic={"+:re": {"bits": 3}}), "dynamic.+:re: bits is 3, must be 4 or 8"),
    ("gptq-4", config(dynamic={"re": {"group_size": 20}}), "dynamic.re: group_size is 20, must be"),
    ("gptq-4", config(dynamic={"re": {"format": "gptq_v2"}}), "dynamic.re: unknown field format"),
    ("gptq-4", config(dynamic={"re": {"adapter": {"rank": 8}}}),
     "dynamic.re: adapter is {\"rank\":8}, not supported"),
    ("gptq-4", config(dynamic={"re": {"desc_act": True}}), "dynamic.re: differs in act order, and "
     "not in bits or group_size, from another group of the same format, not supported"),
    ("gptq-4", config(dynamic={"a": {"bits": 8}, "b": {"group_size": 64}, "c": {"group_size": 16}}),
     "dynamic.c: differs from 3 others, not supported: at most 3 may differ"),
    ("gptq-dynamic", config(group_size=64),
     "tensor model.layers.0.mlp.up_proj.qweight fits none of 3 groups of quantization_config: for "
     "one of them tensor model.layers.0.mlp.up_proj."),
    ("awq", config(dynamic={"re": {"bits": 8}}), "dynamic is {\"re\":{\"bits\":8}}, not supported"),
    ("gptq-4", config(strange=1), "quantization_config: unknown field strange"),
    ("gptq-4", config(method="qqq"), "method is qqq, not supported: must be gptq"),
    ("gptq-4", config(format="gptq_v2", checkpoint_format="gptq"),
     "format is gptq_v2, but checkpoint_format is gptq: must be the same"),
    ("gptq-4", config(activation={"mode": "w4afp8"}), "activation is {\"mode\":\"w4afp8\"}, not"),
    ("gptq-4", config(quant_method="hqq"), "quant_method is hqq, not supported: must be gptq"),
    ("gptq-4", config(quant_method=None), "quant_method is missing"),
    ("gptq-4", top(tie_word_embeddings=True),
     "tie_word_embeddings is true, but model.embed_tokens.weight and lm_head.weight differ"),
    ("gptq-4", config(bits=8), "model.layers.0.mlp.down_proj.qzeros has shape [6, 14], must be "
     "[3, 28] beside model.layers.0.mlp.down_proj.qweight"),
    ("gptq-4", tensor("scales", lambda t: None), f"tensor {DOWN}.scales [6, 112] of a gptq "
     "matrix is missing"),
    ("gptq-4", tensor("scales", lambda t: t[:5]),
     f"tensor {DOWN}.scales has shape [5, 112], must be [6, 112]"),
    ("gptq-4", tensor("scales", lambda t: t.astype("i4")),
     f"tensor {DOWN}.scales has dtype I32, must be F16, BF16 or F32"),
    ("gptq-4", tensor("scales", with_value((2, 7), np.inf)),
     f"tensor {DOWN}.weight (gptq): a scale or value in rows 0 to 111 of its matrix is infinite"),
    ("gptq-4", tensor("scales", with_value((5, 111), np.nan)), "is infinite or no number"),
    ("gptq-4", tensor("qzeros", lambda t: t[:, :-1]), f"{DOWN}.qzeros has shape [6, 13], must be"),
    ("gptq-4", tensor("qzeros", with_value((1, 1), 0x0000f000)),
     f"{DOWN}.qzeros: word 15 holds a zero of 15 in checkpoint_format gptq, which may mean 0 or 16"
     ),
    ("gptq-4-order", tensor("g_idx", with_value(3, 6)),
     f"tensor {DOWN}.g_idx: entry 3 is 6, must be in 0..5"),
    ("gptq-4-order", tensor("g_idx", with_value(3, -1)), "entry 3 is -1, must be in 0..5"),
    ("gptq-4-order", config(desc_act=False),
     "tensor model.layers.0.mlp.down_proj.g_idx puts columns in another order, but "
     "quantization_config has no act order"),
    ("gptq-4", tensor("qweight", lambda t: t.reshape(-1)),
     f"{DOWN}.qweight must be I32 [columns / 8, rows], with rows a multiple of 8"),
    ("gptq-4", tensor("qweight", lambda t: t[:-1]), f"{DOWN}.g_idx has shape [176], must be [168]"),
    ("gptq-4", tensor("weight", lambda t: np.zeros((112, 176), "f2")),
     f"both {DOWN}.weight and {DOWN}.qweight are there"),
    ("gptq-4", tensor("extra", lambda t: np.zeros(4, "f2")), f"tensor {DOWN}.extra has no place"),
    ("gptq-4", tensor("bias", lambda t: np.ones(112, "f2")), f"tensor {DOWN}.bias has no place"),
    ("awq", config(version="gemv"), "version is gemv, not supported: must be gemm or GEMM"),
    ("awq", config(version="marlin"), "version is marlin, not supported: must be gemm or GEMM"),
    ("awq", config(group_size=0), "group_size is 0, must be a multiple of 8 in 16..65536"),
    ("awq", config(format="gemv_fast"), "format is gemv_fast, not supported: must be gemm or GEMM"),
    ("awq", config(desc_act=True), "desc_act is true, not supported: must be absent or switched"),
    ("awq", config(bits=8), "bits is 8, must be 4 for awq"),
    ("awq", config(zero_point=False), "zero_point is false, must be true"),
    ("awq", tensor("qweight", lambda t: t.reshape(-1)),
     f"{DOWN}.qweight must be I32 [columns, rows / 8]"),
    ("awq", tensor("qzeros", lambda t: None), f"{DOWN}.qzeros [11, 14] of a awq matrix is missing"),
    ("packed-4", group("weights", num_bits=3), "weights are int of 3 bits by group, must be int"),
    ("packed-4", group("input_activations", num_bits=8), "input_activations with format pack-quan"),
    ("packed-4", tensor("weight_shape", with_value(1, 180)),
     f"{DOWN}.weight_packed is [112, 22], and {DOWN}.weight_shape says [112, 180]"),
    ("packed-4", tensor("weight_shape", with_value(0, -1)), "weight_shape says [-1, 176]"),
    ("packed-4", tensor("weight_shape", with_value(1, 2**63 - 1)), "[112, 9223372036854775807]"),
    ("packed-8", group("weights", strategy="group", group_size=0),
     "group_size is 0, must be a multiple of 8 in 16..65536 for weights by group"),
    ("packed-8", group("weights", strategy="group", group_size=-1), "group_size is -1, must be a"),
    ("packed-4", tensor("weight_shape", lambda t: None), f"{DOWN}.weight_shape is missing"),
    ("packed-4", tensor("weight_shape", lambda t: t[:1]), f"{DOWN}.weight_shape must be I64 [2]"),
    ("packed-4", config(format="nvfp4-pack-quantized"),
     "format is nvfp4-pack-quantized, not supported: must be pack-quantized, int-quantized or"),
    ("packed-4", config(moe_sparsity_config={"top": 2}),
     "moe_sparsity_config is {\"top\":2}, not supported: must be absent or switched off"),
    ("packed-4", config(config_groups={}), "config_groups has no groups"),
    ("packed-4", config(config_groups=[]), "config_groups has no groups"),
    ("packed-4", second_group(symmetric=False), "config_groups.group_1: differs in symmetric, and "
     "not in bits or group_size, from another group of the same format, not supported"),
    ("packed-4", second_group(num_bits=8),
     "says compressed-tensors of 8 bits, but no tensor for it is named *.weight_packed"),
    ("packed-4", second_group(group_size=176, symmetric=False), "of 4 bits, but no tensor for it"),
    ("packed-4-long", second_group(group_size=104),
     "tensor model.layers.0.mlp.down_proj.weight_packed fits 2 groups of quantization_config, "
     "which make different numbers of it, not supported: must fit one"),
    ("mixed-bits", second_group(name="group_3", strategy="group", group_size=64),
     "config_groups.group_3: differs from 3 others, not supported: at most 3 may differ"),
    ("mixed-bits", tensor("weight_scale", lambda t: t[:, :7]),
     f"{DOWN}.weight_packed fits none of 3 groups of quantization_config: for one of them tensor "
     f"{DOWN}.weight_scale has shape"),
    ("packed-4", second_group("int-quantized", num_bits=8, strategy="channel"),
     "says compressed-tensors of 8 bits, but no tensor for it is named *.weight of type I8"),
    ("mixed", group("input_activations", dynamic=False), "input_activations are static float"),
    ("mixed", tensor("weight_scale", lambda t: None), f"{DOWN}.weight_scale [112, 1] of a compr"),
    ("packed-4-zeros-order", tensor("weight_g_idx", with_value(0, 11)),
     f"{DOWN}.weight_g_idx: entry 0 is 11, must be in 0..10"),
    ("packed-4-zeros-order", group("weights", actorder=None), "has no act order"),
    ("int8", group("input_activations", dynamic=False),
     "input_activations are static int of 8 bits by token, must be symmetric dynamic int"),
    ("int8", group("weights", symmetric=False), "weights are asymmetric int of 8 bits"),
    ("int8", tensor("weight", lambda t: t.reshape(-1)), f"{DOWN}.weight must be I8 [rows, col"),
    ("int8-tensor", tensor("weight_scale", lambda t: t.astype("i4")),
     f"{DOWN}.weight_scale has dtype I32, must be F32, F16 or BF16"),
    ("int8", tensor("weight_scale", lambda t: t[:7]), f"{DOWN}.weight_scale has shape [7, 1],"),
    ("int8", tensor("weight_scale", with_value((3, 0), -np.inf)), "is infinite or no number"),
    ("int8", tensor("weight_scale", with_value((3, 0), 1e38)), "is infinite or no number"),
    ("fp8-static", tensor("input_scale", lambda t: np.array(np.float32(0))),
     f"{DOWN}.input_scale is 0, must be above 0 and finite"),
    ("fp8-static", tensor("input_scale", lambda t: None),
     f"{DOWN}.input_scale is missing, but quantization_config says that activations are scaled by"),
    ("fp8-static", tensor("input_scale", lambda t: np.ones(2, "f4")),
     f"{DOWN}.input_scale must be one number of F32, F16 or BF16"),
    ("fp8-channel", tensor("weight_scale", lambda t: None), f"{DOWN}.weight_scale is missing"),
    ("fp8-channel", tensor("input_scale", lambda t: np.array(np.float32(1))),
     f"{DOWN}.input_scale is there, but quantization_config says that activations are scaled as"),
    ("fp8-channel", tensor("weight", lambda t: Typed(with_value((5, 5), 0xff)(t.array), t.dtype)),
     f"tensor {DOWN}.weight (compressed-tensors): a scale or value in rows 0 to 111"),
    ("fp8-channel", tensor("weight_scale", lambda t: t[:, :0]), f"{DOWN}.weight_scale must have"),
    ("fp8-block", tensor("weight_scale_inv", lambda t: t[:, :1]),
     f"{DOWN}.weight_scale_inv must have [1, 2] numbers beside {DOWN}.weight"),
    ("fp8-block", config(weight_block_size=[128, 20]), "a block of weights is [128,20], must be"),
    ("fp8-block", config(weight_block_size=[2**32 + 128, 128]),
     "a block of weights is [4294967424,128], must be"),
    ("fp8-block", config(activation_scheme="static"), "weight_block_size is [128,128], not supp"),
    ("fp8-channel", group("weights", strategy="block", block_structure=[128, 2**32 + 128]),
     "a block of weights is [128,4294967424], must be"),
    ("fp8-block", config(scale_fmt="e5m3"),
     "scale_fmt is e5m3, not supported: must be float or ue8m0"),
    ("fp8-static", config(scale_fmt="ue8m0"), "scale_fmt is \"ue8m0\", not supported: must be fl"),
    ("fp8-block-e8m0",
     tensor("weight_scale_inv", lambda t: Typed(with_value((0, 1), 255)(t.array), t.dtype)),
     f"tensor {DOWN}.weight (fp8): a scale or value"),
    ("fp8-block-e8m0", tensor("weight_scale_inv", lambda t: Typed(t.array, "F8_E5M2")),
     f"{DOWN}.weight_scale_inv has dtype F8_E5M2, must be F32, F16, BF16 or F8_E8M0"),
    ("fp8-block", config(expert_dtype="fp4"), "expert_dtype is fp4, not supported: must be fp8"),
    ("fp8-block", config(modules_to_convert=["embed_tokens"]), "modules_to_convert is [\"embed_to"),
    ("modelopt", config(quant_algo="NVFP4"), "quant_algo is NVFP4, not supported: must be FP8"),
    ("llm-int8", config(llm_int8_threshold=5.0), "llm_int8_threshold is 5, must be 6, or 0"),
    ("llm-int8", config(load_in_4bit=True), "load_in_8bit and load_in_4bit are both true"),
    ("llm-int8", tensor("weight_format", lambda t: np.array(1, "u1")),
     f"tensor {DOWN}.weight_format must be the byte 0"),
    ("nf4", tensor("weight.quant_state.bitsandbytes__nf4", lambda t: t[:-9]),
     f"tensor {DOWN}.weight.quant_state.bitsandbytes__nf4"),
    ("nf4", tensor("weight.quant_state.bitsandbytes__nf4", lambda t: None),
     f"tensor {DOWN}.weight.quant_state.bitsandbytes__nf4 is missing, must"),
    ("nf4", state(blocksize=0), "blocksize is 0, must be an integer in 32..4096"),
    ("nf4", state(shape=[2**62, 192]), "shape [4611686018427387904, 192], must be integers in 1.."),
    ("nf4", tensor("weight", lambda t: t[:-1]), f"{DOWN}.weight has 12287 bytes for [128, 192]"),
    ("nf4", tensor("weight.absmax", with_value(3, np.nan)), "is infinite or no number"),
    ("nf4", tensor("weight.absmax", lambda t: t[:-1]), f"{DOWN}.weight.absmax has shape [383],"),
    ("nf4-double", tensor("weight.nested_quant_map", with_value(255, np.inf)),
     f"tensor {DOWN}.weight.nested_quant_map: number 255 is not finite"),
]


@pytest.mark.parametrize("name,change,message", REFUSED,
                         ids=[f"{r[0]}-{i}" for i, r in enumerate(REFUSED)])
def test_refused_by_name(name, change, message, tmp_path):
    model = Model(SCHEMES[name])
    change(model)
    code, said, _ = logits(model.write(tmp_path / "m"), tmp_path / "out")
    assert code != 0 and message in said, said


OF_TENSORS = [(i, *r) for i, r in enumerate(REFUSED) if "model.layers." in r[2]]


@pytest.mark.parametrize("name,change,message", [r[1:] for r in OF_TENSORS],
                         ids=[f"{r[1]}-{r[0]}" for r in OF_TENSORS])
def test_refused_by_the_name_of_the_file(name, change, message, tmp_path):
    """The text model of one that takes images has another prefix there."""
    model = Model(SCHEMES[name])
    change(model)
    model.take_images()
    code, said, _ = logits(model.write(tmp_path / "m"), tmp_path / "out")
    want = message.replace("model.layers.", "language_model.model.layers.")
    assert code != 0 and want in said, said


def test_a_model_that_takes_images(tmp_path):
    """The same logits, so what is refused above is refused for what was changed."""
    model = Model(SCHEMES["gptq-4"])
    want = logits(model.write(tmp_path / "m"), tmp_path / "out")[2]
    model.take_images()
    code, said, got = logits(model.write(tmp_path / "images"), tmp_path / "out")
    assert code == 0, said
    assert (got == want).all()
