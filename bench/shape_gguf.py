"""Writes a GGUF file of a model's shape with random weights, for benchmarks of speed: every program
that reads GGUF computes with the same bytes. And a directory in compressed-tensors' W8A8, which
GGUF does not have. Only the standard library is needed."""
import json
import os
import random
import struct

U32, F32, BOOL, STRING, ARRAY = 4, 6, 7, 8, 9
BLOCKS = {  # name: number in the file, values and bytes of a block, where its f16 scales are
    "f32": (0, 1, 4, ()),  # norms, all 1
    "router": (0, 1, 4, ()),  # random, so that tokens choose different experts
    "bf16": (30, 1, 2, ()),
    "q8_0": (8, 32, 34, (0, )),
    "q4_0": (2, 32, 18, (0, )),
    "iq4_nl": (20, 32, 18, (0, )),
    "q4_k": (12, 256, 144, (0, 2)),
    "q6_k": (14, 256, 210, (208, )),
    "w8a8": (24, 1, 1, ()),
}
SCALE = struct.pack("<e", 0.001)
ALIGNMENT = 32
# How many blocks are made; a tensor repeats them.
N_BLOCKS = 4096


def text(s):
    b = s.encode()
    return struct.pack("<Q", len(b)) + b


def value(key, kind, raw):
    return text(key) + struct.pack("<I", kind) + raw


def strings(key, items):
    head = struct.pack("<IQ", STRING, len(items))
    return value(key, ARRAY, head + b"".join(text(i) for i in items))


def numbers(key, kind, code, items):
    head = struct.pack("<IQ", kind, len(items))
    return value(key, ARRAY, head + struct.pack(f"<{len(items)}{code}", *items))


def experts_of(c):
    """(experts of a layer, of which a token uses so many, hidden size of one); none: 0, 0, 0."""
    n = c.get("num_experts", c.get("num_local_experts", 0))
    return (n, c["num_experts_per_tok"], c.get("moe_intermediate_size", c["intermediate_size"])) \
        if n else (0, 0, 0)


def head_dim_of(c):
    return c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]


def metadata(c):
    v = c["vocab_size"]
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{i:02X}>" for i in range(256)]
    tokens += [f"w{i}" for i in range(v - len(tokens))]
    types = [2, 3, 3] + [6] * 256 + [1] * (v - 259)
    heads = c["num_attention_heads"]
    sizes = {
        "block_count": c["num_hidden_layers"], "embedding_length": c["hidden_size"],
        "feed_forward_length": c["intermediate_size"], "attention.head_count": heads,
        "context_length": c["max_position_embeddings"],
        "attention.head_count_kv": c["num_key_value_heads"],
        "rope.dimension_count": head_dim_of(c), "vocab_size": v
    }
    n_experts, n_used, ff = experts_of(c)
    arch = "qwen3moe" if c["model_type"] == "qwen3_moe" else "llama"
    if n_experts:
        sizes.update({"expert_count": n_experts, "expert_used_count": n_used})
    if arch == "qwen3moe":
        sizes.update({"attention.key_length": head_dim_of(c), "expert_feed_forward_length": ff,
                      "attention.value_length": head_dim_of(c)})
    out = [value("general.architecture", STRING, text(arch))]
    out += [value(f"{arch}.{k}", U32, struct.pack("<I", n)) for k, n in sizes.items()]
    out += [
        value(f"{arch}.attention.layer_norm_rms_epsilon", F32,
              struct.pack("<f", c["rms_norm_eps"])),
        value(f"{arch}.rope.freq_base", F32, struct.pack("<f", c["rope_theta"])),
        value("tokenizer.ggml.model", STRING, text("llama")),
        strings("tokenizer.ggml.tokens", tokens),
        numbers("tokenizer.ggml.scores", F32, "f", [-float(i) for i in range(v)]),
        numbers("tokenizer.ggml.token_type", 5, "i", types),
        value("tokenizer.ggml.bos_token_id", U32, struct.pack("<I", 1)),
        value("tokenizer.ggml.eos_token_id", U32, struct.pack("<I", 2)),
        value("tokenizer.ggml.add_bos_token", BOOL, b"\1"),
    ]
    return out


def tensors(c, fmt):
    """(name, columns, rows, format) of every tensor; q4_k_m is llama.cpp's mix of that name. What
    each expert has, "NAME_exps", has the rows of all."""
    n, hidden, ff = c["num_hidden_layers"], c["hidden_size"], c["intermediate_size"]
    q, kv = (head_dim_of(c) * c[f"num_{k}_heads"] for k in ("attention", "key_value"))
    n_experts, _, expert_ff = experts_of(c)
    most = "q4_k" if fmt == "q4_k_m" else fmt
    head = "q6_k" if fmt in ("q4_0", "iq4_nl", "q4_k_m") else "bf16" if fmt == "w8a8" else most
    out = [("token_embd.weight", hidden, c["vocab_size"], head if fmt == "w8a8" else most),
           ("output_norm.weight", hidden, 0, "f32"),
           ("output.weight", hidden, c["vocab_size"], head)]
    for i in range(n):
        more = fmt == "q4_k_m" and (i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2)
        layer = [("attn_norm", hidden, 0, "f32"), ("attn_q", hidden, q, most),
                 ("attn_k", hidden, kv, most), ("attn_v", hidden, kv, "q6_k" if more else most),
                 ("attn_output", q, hidden, most), ("ffn_norm", hidden, 0, "f32")]
        if c["model_type"] == "qwen3_moe":
            layer += [(f"attn_{k}_norm", head_dim_of(c), 0, "f32") for k in "qk"]
        if n_experts:
            layer += [("ffn_gate_inp", hidden, n_experts, "router"),
                      ("ffn_gate_exps", hidden, expert_ff * n_experts, most),
                      ("ffn_up_exps", hidden, expert_ff * n_experts, most),
                      ("ffn_down_exps", expert_ff, hidden * n_experts, "q6_k" if more else most)]
        else:
            layer += [("ffn_gate", hidden, ff, most), ("ffn_up", hidden, ff, most),
                      ("ffn_down", ff, hidden, "q6_k" if more else most)]
        out += [(f"blk.{i}.{name}.weight", k, rows, f) for name, k, rows, f in layer]
    return out


def tensor_bytes(columns, rows, fmt):
    _, values, size, _ = BLOCKS[fmt]
    return columns * max(rows, 1) // values * size


def blocks_of(fmt):
    """Random blocks whose scales are small numbers, and plain weights of about 0.02."""
    r = random.Random(1)
    _, _, size, scales = BLOCKS[fmt]
    if fmt == "f32":
        return struct.pack("<f", 1.0) * N_BLOCKS
    if fmt == "router":  # an odd number, so that no two experts have the same row
        return b"".join(struct.pack("<f", r.gauss(0, 0.02)) for _ in range(32 * N_BLOCKS + 1))
    if fmt == "bf16":
        return b"".join(
            struct.pack("<f", r.gauss(0, 0.02))[2:] for _ in range(32 * N_BLOCKS))
    if fmt == "w8a8":
        return r.randbytes(256 * N_BLOCKS).replace(b"\x80", b"\x81")  # -127 to 127
    out = bytearray(r.randbytes(size * N_BLOCKS))
    for at in scales:
        for i in range(N_BLOCKS):
            out[i * size + at:i * size + at + 2] = SCALE
    return bytes(out)


def pad(n):
    return (n + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def fill(f, kind, n, made):
    """n bytes of blocks of a kind."""
    if kind not in made:
        made[kind] = blocks_of(kind)
    while n:
        n -= f.write(made[kind][:n])


HF_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
            "blk": "model.layers", "attn_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
            "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj",
            "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}


def write_w8a8(c, path):
    """Writes the directory PATH, a model of config c, unless it is there."""
    if os.path.exists(path):
        return
    eight = {"num_bits": 8, "type": "int", "symmetric": True}
    quantised = {
        "quant_method": "compressed-tensors", "format": "int-quantized",
        "quantization_status": "compressed", "ignore": ["lm_head"],
        "config_groups": {"group_0": {
            "targets": ["Linear"], "weights": dict(eight, dynamic=False, strategy="channel"),
            "input_activations": dict(eight, dynamic=True, strategy="token")}}}
    parts, infos, at = [], {}, 0
    for name, columns, rows, kind in tensors(c, "w8a8"):
        name = ".".join(HF_NAMES.get(p, p) for p in name.split("."))
        shape = [rows, columns] if rows else [columns]
        parts.append((name, shape, kind, tensor_bytes(columns, rows, kind)))
        if kind == "w8a8":
            parts.append((name + "_scale", [rows, 1], "scales", 4 * rows))
    types = {"f32": "F32", "bf16": "BF16", "w8a8": "I8", "scales": "F32"}
    for name, shape, kind, n in parts:
        infos[name] = {"dtype": types[kind], "shape": shape, "data_offsets": [at, at + n]}
        at += n
    head, made = json.dumps(infos).encode(), {}
    head += b" " * (-len(head) % 8)
    os.makedirs(path + ".part", exist_ok=True)
    with open(os.path.join(path + ".part", "config.json"), "w", encoding="utf-8") as f:
        json.dump(dict(c, quantization_config=quantised), f)
    with open(os.path.join(path + ".part", "model.safetensors"), "wb") as f:
        f.write(struct.pack("<Q", len(head)) + head)
        for _, _, kind, n in parts:
            if kind == "scales":
                f.write(struct.pack("<f", 0.02 / 127) * (n // 4))
            else:
                fill(f, kind, n, made)
    os.rename(path + ".part", path)


def write(c, fmt, path):
    """Writes PATH, a model of config c, unless it is there; a file that was cut short is never left
    under that name."""
    if os.path.exists(path):
        return
    values, infos, at = metadata(c), [], 0
    for name, columns, rows, kind in tensors(c, fmt):
        n_experts = experts_of(c)[0]
        dims = ((columns, rows // n_experts, n_experts) if "_exps" in name else
                (columns, rows) if rows else (columns, ))
        infos.append(
            text(name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}q", *dims) +
            struct.pack("<IQ", BLOCKS[kind][0], at))
        at += pad(tensor_bytes(columns, rows, kind))
    head = b"GGUF" + struct.pack("<Iqq", 3, len(infos), len(values)) + b"".join(values + infos)
    made = {}
    with open(path + ".part", "wb") as f:
        f.write(head + b"\0" * (pad(len(head)) - len(head)))
        for _, columns, rows, kind in tensors(c, fmt):
            fill(f, kind, tensor_bytes(columns, rows, kind), made)
            f.write(b"\0" * (-f.tell() % ALIGNMENT))
    os.rename(path + ".part", path)
