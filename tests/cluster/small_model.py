"""A second model for tests: models/pocket with fewer layers and a shorter vocabulary, so that its
tokens, its sizes and its answers are others."""
import json
import os
import re
import struct

from harness import POCKET

LAYERS, VOCAB = 2, 1536


def _read(name):
    with open(os.path.join(POCKET, name), encoding="utf-8") as f:
        return json.load(f)


def _write(folder, name, value):
    with open(os.path.join(folder, name), "w", encoding="utf-8") as f:
        json.dump(value, f)


def _tensors():
    """(name, dtype, shape, bytes) of those that stay."""
    with open(os.path.join(POCKET, "model.safetensors"), "rb") as f:
        header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
        begin = f.tell()
        for name, t in header.items():
            layer = re.search(r"\.layers\.(\d+)\.", name)
            if name == "__metadata__" or (layer and int(layer[1]) >= LAYERS):
                continue
            f.seek(begin + t["data_offsets"][0])
            data, shape = f.read(t["data_offsets"][1] - t["data_offsets"][0]), t["shape"]
            if name == "model.embed_tokens.weight":
                data, shape = data[:len(data) // shape[0] * VOCAB], [VOCAB, shape[1]]
            yield name, t["dtype"], shape, data


def make_small(folder, swap=()):
    """Writes it to `folder`; swap: two tokens that change their ids, for another vocabulary of the
    same size."""
    os.makedirs(folder)
    config, tokenizer = _read("config.json"), _read("tokenizer.json")
    config.update(num_hidden_layers=LAYERS, vocab_size=VOCAB)
    vocab = {t: i for t, i in tokenizer["model"]["vocab"].items() if i < VOCAB}
    if swap:
        vocab[swap[0]], vocab[swap[1]] = vocab[swap[1]], vocab[swap[0]]
    tokenizer["model"]["vocab"] = vocab
    tokenizer["model"]["merges"] = [
        m for m in tokenizer["model"]["merges"] if all(t in vocab for t in (*m, "".join(m)))
    ]
    _write(folder, "config.json", config)
    _write(folder, "tokenizer.json", tokenizer)
    for name in ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json"):
        _write(folder, name, _read(name))
    header, body = {}, []
    at = 0
    for name, dtype, shape, data in _tensors():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        body.append(data)
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(os.path.join(folder, "model.safetensors"), "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + b"".join(body))
    return folder
