#!/usr/bin/python3
"""Is the model folder whole? Plain Python, no torch: sizes, config fields, safetensors header,
    tokenizer files, reference continuations.

    check.py [DIR]          exit status 0 when all is well; otherwise every complaint on its own
                            line
    """
import json
import os
import struct
import sys

LIMIT_BYTES = 16 << 20
FILES = [
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "model.safetensors", "reference_greedy.json", "README.md",
    "PROVENANCE"
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def expected_shapes(c):
    h, i, v, d = c["hidden_size"], c["intermediate_size"], c["vocab_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    shapes = {"model.embed_tokens.weight": [v, h], "model.norm.weight": [h]}
    for n in range(c["num_hidden_layers"]):
        p = f"model.layers.{n}."
        shapes.update({
            p + "input_layernorm.weight": [h], p + "post_attention_layernorm.weight": [h],
            p + "self_attn.q_proj.weight": [q, h], p + "self_attn.k_proj.weight": [kv, h],
            p + "self_attn.v_proj.weight": [kv, h], p + "self_attn.o_proj.weight": [h, q],
            p + "mlp.gate_proj.weight": [i, h], p + "mlp.up_proj.weight": [i, h],
            p + "mlp.down_proj.weight": [h, i]
        })
    return shapes


def check_weights(path, config, say):
    n_file = os.path.getsize(path)
    with open(path, "rb") as f:
        data = f.read()
    n_header = struct.unpack("<Q", data[:8])[0]
    if not 2 <= n_header <= min(1 << 20, n_file - 8):
        return say(f"safetensors header length {n_header} does not fit a file of {n_file} bytes")
    header = json.loads(data[8:8 + n_header])
    header.pop("__metadata__", None)
    want = expected_shapes(config)
    for name in sorted(set(want) ^ set(header)):
        say(f"tensor {name} is {'missing' if name in want else 'not expected'}")
    end = 0
    for name, t in sorted(header.items(), key=lambda kv: kv[1]["data_offsets"]):
        a, b = t["data_offsets"]
        n = 1
        for dim in t["shape"]:
            n *= dim
        if t["dtype"] != "BF16":
            say(f"tensor {name} is {t['dtype']}, expected BF16")
        if t["shape"] != want.get(name):
            say(f"tensor {name} has shape {t['shape']}, expected {want.get(name)}")
        if a != end or b - a != 2 * n:
            say(f"tensor {name} lies at {a}..{b}, expected {end}..{end + 2 * n}")
        end = b
        if 8 + n_header + b > n_file or b - a != 2 * n:
            say(f"tensor {name} ends at byte {8 + n_header + b} of {n_file}")
            continue
        # BF16 with all exponent bits set is an infinity or a NaN; a tensor of one repeated value
        # was never trained
        words = struct.unpack(f"<{n}H", data[8 + n_header + a:8 + n_header + a + 2 * n])
        n_bad = sum(1 for w in words if w & 0x7F80 == 0x7F80)
        if n_bad:
            say(f"tensor {name} holds {n_bad} infinities or NaNs")
        if len(set(words)) < 8:
            say(f"tensor {name} holds only {len(set(words))} distinct values")
    if 8 + n_header + end != n_file:
        say(f"the tensors end at byte {8 + n_header + end} of {n_file}")


def check_reference(ref, config, say):
    cases = ref["cases"]
    if len(cases) < 8:
        say(f"reference_greedy.json has {len(cases)} cases, expected at least 8")
    for c in cases:
        for key in ("ids", "continuation_ids"):
            if not c[key] or any(not 0 <= i < config["vocab_size"] for i in c[key]):
                say(f"case {c['prompt']!r}: {key} is empty or out of range")
        if len(c["gaps"]) != len(c["continuation_ids"]) or min(c["gaps"]) <= 0.01:
            say(f"case {c['prompt']!r}: a gap of at most 0.01, or gaps and continuation differ "
                "in length")
        if c["ends_with_eos"] == (c["continuation_ids"][-1]
                                  not in (0, 2)) or (not c["ends_with_eos"]
                                                     and len(c["continuation_ids"]) != 64):
            say(f"case {c['prompt']!r}: {len(c['continuation_ids'])} tokens, ends_with_eos "
                f"{c['ends_with_eos']}")


def main():
    folder = sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.abspath(__file__))
    complaints = []
    say = complaints.append
    total = 0
    for name in FILES:
        path = os.path.join(folder, name)
        if not os.path.isfile(path):
            say(f"{name} is missing")
        else:
            total += os.path.getsize(path)
    if total >= LIMIT_BYTES:
        say(f"the folder has {total} bytes, the limit is {LIMIT_BYTES}")
    if complaints:
        print("\n".join(complaints))
        return 1

    def load(name):
        with open(os.path.join(folder, name), encoding="utf-8") as f:
            return json.load(f)

    config, generation, tokenizer, tokenizer_config = map(load, FILES[:4])
    for key, want in (("architectures", [
            "LlamaForCausalLM"
    ]), ("model_type", "llama"), ("torch_dtype", "bfloat16"), ("tie_word_embeddings", True),
                      ("hidden_act", "silu"), ("bos_token_id", 0)):
        if config.get(key) != want:
            say(f"config.json: {key} is {config.get(key)!r}, expected {want!r}")
    if config["num_attention_heads"] % config["num_key_value_heads"]:
        say("config.json: num_attention_heads is not a multiple of num_key_value_heads")
    if generation["eos_token_id"] != [0, 2]:
        say(f"generation_config.json: eos_token_id is {generation['eos_token_id']}, expected [0, 2]"
            )

    vocab = tokenizer["model"]["vocab"]
    if sorted(vocab.values()) != list(range(config["vocab_size"])):
        say(f"tokenizer.json: the ids are not 0..{config['vocab_size'] - 1}, each once")
    added = {t["content"]: t["id"] for t in tokenizer["added_tokens"]}
    if added != {s: i for i, s in enumerate(SPECIAL)}:
        say(f"tokenizer.json: added tokens {added}")
    for merge in tokenizer["model"]["merges"]:
        a, b = merge if isinstance(merge, list) else merge.split(" ")
        if a not in vocab or b not in vocab or a + b not in vocab:
            say(f"tokenizer.json: merge {merge} makes no known token")
            break
    template = tokenizer_config["chat_template"]
    if "<|im_start|>" not in template or "<|im_end|>" not in template:
        say("tokenizer_config.json: the chat template is not ChatML")

    check_weights(os.path.join(folder, "model.safetensors"), config, say)
    check_reference(load("reference_greedy.json"), config, say)
    if complaints:
        print("\n".join(complaints))
        return 1
    print(f"models/pocket is whole: {total} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
