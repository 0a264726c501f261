#!/usr/bin/env python3
"""Makes tests/golden/gguf: models of tests/golden/families and mixtures as GGUF files, written with
gguf-py, whose tables of names are llama.cpp's.

Run in a throw-away environment that has gguf and numpy; `make check` needs neither:
    python tests/golden/make_gguf_families.py [NAME ...]
What llama.cpp's converter changes is done here too: 1 is added to Gemma's norms, experts that are
apart become one tensor and gate and up of gpt-oss's become two, the halves that Mixtral rotates
become neighbours, and blocks of MXFP4 get its order of nibbles. GGUF has no key
for Gemma's query_pre_attn_scalar, so a model in which it is not head_dim gets queries that are
multiplied by the root of their ratio: the same scores, with other roundings.
"""
import importlib.metadata
import json
import os
import platform
import re
import sys

import gguf
import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
MODELS = {
    "families/gemma1": "gemma", "families/gemma1_one_kv_head": "gemma",
    "families/gemma2": "gemma2", "families/gemma2_old_config": "gemma2",
    "families/gemma3": "gemma3", "families/gemma3_old_config": "gemma3",
    "families/phi3": "phi3", "families/phi3_long": "phi3", "families/phi3_short_partial": "phi3",
    "mixtures/gpt_oss_mxfp4": "gpt-oss", "mixtures/gpt_oss_odd_sizes": "gpt-oss",
    "mixtures/mixtral_odd_sizes": "llama", "mixtures/mixtral_old_config": "llama",
    "mixtures/qwen3_moe_every_layer": "qwen3moe",
}
F32, F16, BF16, MXFP4 = (gguf.GGMLQuantizationType[t] for t in ("F32", "F16", "BF16", "MXFP4"))


def widen(raw, dtype):
    """The tensor's values in f32."""
    if dtype == "BF16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.astype(np.float32)


def load(directory):
    """name: (array as it lies in the file, dtype)"""
    kinds = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "U8": np.uint8}
    with open(os.path.join(directory, "model.safetensors"), "rb") as f:
        header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        data = f.read()
    out = {}
    for name, t in header.items():
        if name != "__metadata__":
            lo, hi = t["data_offsets"]
            out[name] = (np.frombuffer(data[lo:hi], kinds[t["dtype"]]).reshape(t["shape"]),
                         t["dtype"])
    return out


def rope_of(config):
    """The rotation of full layers, old fields or new."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = dict(rope.get("full_attention", rope))
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    return rope


def window_pattern(config):
    types = config.get("layer_types") or []
    if "full_attention" in types:
        return types.index("full_attention") + 1
    return config.get("_sliding_window_pattern", 6)


def put_keys(w, config, arch):
    rope = rope_of(config)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    w.add_block_count(config["num_hidden_layers"])
    w.add_context_length(config["max_position_embeddings"])
    w.add_embedding_length(config["hidden_size"])
    w.add_feed_forward_length(config["intermediate_size"])
    w.add_head_count(heads)
    w.add_head_count_kv(config["num_key_value_heads"])
    w.add_key_length(head_dim)
    w.add_value_length(head_dim)
    w.add_layer_norm_rms_eps(config["rms_norm_eps"])
    w.add_rope_freq_base(rope["rope_theta"])
    kind = rope.get("rope_type", "default")
    if arch == "phi3":
        share = config.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0))
        w.add_rope_dimension_count(int(share * head_dim))
        w.add_sliding_window(config["sliding_window"] or 0)
        w.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
        if kind == "longrope":
            ratio = config["max_position_embeddings"] / config["original_max_position_embeddings"]
            long = 1 + np.log(ratio) / np.log(config["original_max_position_embeddings"])
            w.add_rope_scaling_attn_factors(float(np.sqrt(long)) if ratio > 1 else 1.0)
            for name in ("long", "short"):
                w.add_tensor("rope_factors_%s.weight" % name,
                             np.array(rope[name + "_factor"], np.float32))
        return
    if kind in ("linear", "yarn"):
        w.add_rope_scaling_type(gguf.RopeScalingType(kind))
        w.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        w.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        w.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if arch in ("gemma2", "gemma3", "gpt-oss"):
        w.add_sliding_window(config["sliding_window"])
    if arch == "gemma2":
        w.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        w.add_final_logit_softcapping(config["final_logit_softcapping"])
    if arch == "gemma3":
        w.add_sliding_window_pattern(window_pattern(config))
        if config["final_logit_softcapping"]:
            w.add_final_logit_softcapping(config["final_logit_softcapping"])
    if arch in ("gpt-oss", "llama", "qwen3moe"):
        w.add_expert_count(config["num_local_experts"])
        w.add_expert_used_count(config["num_experts_per_tok"])
    if arch == "gpt-oss":
        w.add_expert_feed_forward_length(config["intermediate_size"])
    if arch == "qwen3moe":
        w.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if arch == "llama":
        w.add_rope_dimension_count(head_dim)
        w.add_vocab_size(config["vocab_size"])


def mxfp4(codes, scales):
    """Blocks of 32: byte j has the codes 2j and 2j + 1 in the directory, j and j + 16 in GGUF."""
    values = np.stack([codes & 15, codes >> 4], -1).reshape(codes.shape[:-1] + (32,))
    packed = values[..., :16] | values[..., 16:] << 4
    return np.concatenate([scales[..., None], packed], -1).reshape(codes.shape[:2] + (-1,))


def experts_apart(tensors):
    """gate_up_proj [E, in, 2 * rows], gate and up in turn, as gate_proj and up_proj."""
    for name, (t, dtype) in list(tensors.items()):
        base, _, kind = name.rpartition("_")
        if ".experts." not in name:
            continue
        del tensors[name]
        if kind in ("blocks", "scales"):
            if kind == "scales":
                continue
            rows = mxfp4(t, tensors_of[base + "_scales"][0])
            suffix, dtype = ".weight", "MXFP4"
        elif kind == "bias":
            rows, suffix = t, ".bias"
        else:
            base, rows, suffix = name, t.swapaxes(1, 2), ".weight"
        if base.endswith("gate_up_proj"):
            base = base[:-len("gate_up_proj")]
            tensors[base + "gate_proj" + suffix] = rows[:, 0::2], dtype
            tensors[base + "up_proj" + suffix] = rows[:, 1::2], dtype
        else:
            tensors[base + suffix] = rows, dtype


def experts_together(tensors):
    """Of every E EXPERTS.E.KIND.weight as EXPERTS.KIND.weight, by a name that gguf-py knows."""
    stacks = {}
    for name in [n for n in tensors if re.search(r"\.experts\.\d+\.", n)]:
        base, number, kind = re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name).groups()
        stacks.setdefault(base + "." + kind, {})[int(number)] = tensors.pop(name)
    for name, parts in stacks.items():
        rows = [parts[e][0] for e in range(len(parts))]
        if "block_sparse_moe" in name:
            name = name.replace("model.", "").replace("block_sparse_moe", "feed_forward")
        tensors[name] = np.stack(rows), parts[0][1]


def in_pairs(config, name, t):
    """Rows i and i + half a head next to each other."""
    heads = config["num_key_value_heads" if "k_proj" in name else "num_attention_heads"]
    return t.reshape(heads, 2, -1, t.shape[1]).swapaxes(1, 2).reshape(t.shape)


def put_tensors(w, config, arch, tensors):
    names = gguf.TensorNameMap(arch, config["num_hidden_layers"])
    gemma = config["model_type"].startswith("gemma")
    fold = np.float32(1)
    if config.get("query_pre_attn_scalar"):
        fold = np.sqrt(np.float32(config["head_dim"] / config["query_pre_attn_scalar"]))
    norms_queries = any("q_norm" in n for n in tensors)
    for name in sorted(tensors):
        t, dtype = tensors[name]
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        to = names.get_name(name.replace("sinks", "sinks.weight"), (".weight", ".bias"))
        if name == "lm_head.weight":  # of a tiny Gemma too, whose published models are all tied
            to = "output.weight"
        assert to, name
        if config["model_type"] == "mixtral" and ("q_proj" in name or "k_proj" in name):
            t = in_pairs(config, name, t)
        t = np.ascontiguousarray(t)
        if t.ndim == 1 or ".router." in name or name.endswith((".bias", ".gate.weight")):
            t, dtype = widen(t, dtype), "F32"
        if gemma and name.endswith("norm.weight"):
            t = t + np.float32(1)
        if fold != 1 and name.endswith("q_norm.weight" if norms_queries else "q_proj.weight"):
            t, dtype = widen(t, dtype) * fold, "F32"
        if dtype in ("BF16", "MXFP4"):
            w.add_tensor(to, t.view(np.uint8), raw_dtype=BF16 if dtype == "BF16" else MXFP4)
        else:
            w.add_tensor(to, t)


def main():
    global tensors_of
    for model, arch in MODELS.items():
        name = model.rpartition("/")[2]
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        config = json.load(open(os.path.join(HERE, model, "config.json")))
        tensors = load(os.path.join(HERE, model))
        tensors_of = dict(tensors)
        if arch == "gpt-oss":
            experts_apart(tensors)
        else:
            experts_together(tensors)
        number = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == arch)
        w = gguf.GGUFWriter(os.path.join(HERE, "gguf", name + ".gguf"), arch)
        put_keys(w, config, arch)
        put_tensors(w, config, number, tensors)
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_tensors_to_file()
        w.close()
    with open(os.path.join(HERE, "gguf", "PROVENANCE.md"), "w") as f:
        f.write("""# Where these files come from

Each file is the model of the same name in tests/golden/families or tests/golden/mixtures, with its
weights, as gguf-py writes it. No trained weights, no third-party data.

* made by: `python tests/golden/make_gguf_families.py`
* python %s, gguf %s, numpy %s
""" % (platform.python_version(), importlib.metadata.version("gguf"), np.__version__))


if __name__ == "__main__":
    main()
