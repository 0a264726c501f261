#!/usr/bin/env python3
"""Writes sentencepiece.json: small SentencePiece models of many options, and the ids that the
sentencepiece library and transformers' slow LlamaTokenizer make of random texts with them.

    make_sentencepiece.py OUT          such a file: sentencepiece 0.2.3, transformers 4.57.6
    make_sentencepiece.py --seed N --models M --texts T OUT

The committed file grew: to its 12 cases came the texts EDGES, and a case of rules without legacy
mode. No single call makes it again. Never run by make check; tests/clients/test_sentencepiece.py
runs it with a new seed and with the library's own normalizers, which have 240 kB each and so are in
no model of the committed file (it has rules of a dozen lines). The models are trained on the
sentences below. Each case: {"options", "model": base64, "config": tokenizer_config.json, "by":
which library, "texts": [[text, ids, decoded text or null]]}. Ids have no special tokens around
them.
"""
import argparse
import base64
import io
import json
import os
import random
import struct
import tempfile

import sentencepiece

SENTENCES = """the quick brown fox jumps over the lazy dog and then the dog sleeps in the sun
words and more words are what the tokenizer wants to see, again and again and again
don't they're we've i'll she'd it's can't and the 1234 numbers 5678 and 2024
un giorno la nonna disse che il cane era nel giardino della casa bianca
\u00e9t\u00e9 \u00e0 la plage, na\u00efve caf\u00e9 \u65e5\u672c\u8a9e
\u65e5\u672c \u4e2d\u6587\u5b57
for (int i = 0; i < n; i++) { x[i] += y[i]; }  // a loop
\u043f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440, \u043f\u0440\u0438\u0432\u0435\u0442
""".strip().split("\n")
POOL = ("a b c the and ' 's 'LL don't x1 22 333 \u00bd \u00b2 \u2167 \u0663 \u00e9 e\u0301 \u00e0 "
        "\u00df \u0130 \u017f \u212a \u212b \ufb01 \u338f \u200b \u200d . , ! ?? -- _ \u203f "
        "\u65e5\u672c \u8a9e \u4e2d\u6587 \ud55c\uad6d \u1112\u1161\u11ab q\u0323\u0307 \U0001f600 "
        "\U0001f468\u200d\U0001f469\u200d\U0001f467 \u24b6 \u0300 < > <tok> <TOK> tok word words "
        "quick giardino \u043f\u0440\u0438 \u043c\u0438\u0440 again tokenizer <0x41> \u2581 "
        "\u2581\u2581 \uff21\uff22 \uff11 $ + ^ \ufffd \ufeff").split(" ") + [
            " ", "  ", "   ", "\n ", " \n", "\u2581 ", "\u00a0", "\u3000", "\u2028", "\u0085", "\t",
            "\n", "\r\n", "\n\n", "\x01", "\x7f"
        ]
SPECIAL = ["<s>", "</s>", "<unk>", "<ctl>", "<|im_start|>", "<|im_end|>", "<fin>", "[INST]"]
# What the normalizers make nothing of, and a space, before special tokens.
EDGES = ["\x01</s>", "\x01<s> a", "\u200b<unk>b", "\u200b\x01<s>", " </s>", "\x01 <s>", "\x01a</s>"]
RULES = """61 62\t78
41\t61
42\t62
a0\t20
3000\t20
200b\t
1\t
fb01\t66 69
ff21\t41
ff22\t42
e9\t65
65 301\te9
3d\t20 3d 20
212b\tc5"""


def text(rng, more=()):
    pool = POOL + list(more)
    return "".join(
        rng.choice(pool) + (rng.choice(["", " ", " ", "  "]) if rng.random() < 0.5 else "")
        for _ in range(rng.randrange(0, 16)))


def options(rng, own_rules, types):
    """One model's, of those that its type can have."""
    def coin(p=0.5):
        return rng.random() < p

    o = {
        "model_type": rng.choice(types), "byte_fallback": coin(), "add_dummy_prefix": coin(0.7),
        "remove_extra_whitespaces": coin(0.4), "character_coverage": rng.choice(
            [1.0, 0.97]), "split_by_whitespace": coin(0.8), "allow_whitespace_only_pieces": coin(),
        "split_digits": coin(), "normalization_rule_name": rng.choice(
            ["identity", "identity", "nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf"] if own_rules else
            ["identity", "identity", "rules"]), "user_defined_symbols": rng.sample(
                ["<tok>", "\t", "\u65e5\u672c", "th", "\u2581\u2581", "\n\n", "a b", "A"],
                rng.choice([0, 0, 2, 4])), "control_symbols": rng.choice([[], ["<ctl>"]]),
    }
    o["vocab_size"] = rng.randrange(140, 240) + (256 if o["byte_fallback"] else 0)
    return o


def train(o, rng):
    """The model's bytes; None: that library has no model of these options."""
    out = io.BytesIO()
    lines = [" ".join(rng.sample(s.split(" "), len(s.split(" ")))) for s in SENTENCES * 12]
    with tempfile.TemporaryDirectory() as folder:
        more = dict(o)
        if o["normalization_rule_name"] == "rules":
            del more["normalization_rule_name"]
            more["normalization_rule_tsv"] = os.path.join(folder, "rules.tsv")
            with open(more["normalization_rule_tsv"], "w", encoding="ascii") as f:
                f.write(RULES + "\n")
        try:
            sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines),
                                                     model_writer=out, hard_vocab_limit=False,
                                                     num_threads=1, minloglevel=5, **more)
        except (RuntimeError, OSError):
            return None
    return out.getvalue()


def plain_case(o, model, rng, n_texts):
    """The library alone; the texts have no control pieces, which it does not look for. Its decoder
    drops every mark that a text begins with where white space is removed; fast tokenizers drop
    one, as here, and only a mark written in the text can make more."""
    sp = sentencepiece.SentencePieceProcessor(model_proto=model)
    rows = []
    for _ in range(n_texts):
        s = text(rng)
        ids = sp.encode(s)
        unlike = sp.unk_id() in ids or (o["remove_extra_whitespaces"] and "\u2581" in s)
        rows.append([s, ids, None if unlike else sp.decode(ids)])
    return {"by": "sentencepiece", "options": o, "config": None, "texts": rows}


def config(sp, o, rng):
    """A tokenizer_config.json with added tokens: behind the pieces, and in place of some."""
    n = sp.get_piece_size()
    decoder = {}
    for at, name in enumerate(rng.sample(["<|im_start|>", "<|im_end|>", "<fin>", "[INST]"], 3)):
        decoder[str(n + at)] = {
            "content": name, "lstrip": rng.random() < 0.3, "rstrip": rng.random() < 0.3,
            "normalized": False, "single_word": False, "special": rng.random() < 0.7
        }
    if (not o["remove_extra_whitespaces"] and o["model_type"] == "bpe" and rng.random() < 0.7):
        legacy = False
    else:
        legacy = True
    for i, name in enumerate(["<unk>", "<s>", "</s>"]):
        decoder[str(i)] = {
            "content": name, "lstrip": False, "rstrip": False, "normalized": False,
            "single_word": False, "special": True
        }
    if sp.piece_to_id("<ctl>") != sp.unk_id():
        decoder[str(sp.piece_to_id("<ctl>"))] = {
            "content": "<ctl>", "lstrip": False, "rstrip": False, "normalized": False,
            "single_word": False, "special": True
        }
    return {
        "tokenizer_class": "LlamaTokenizer", "legacy": legacy, "add_bos_token": True,
        "add_eos_token": rng.random() < 0.3, "bos_token": "<s>", "eos_token": "</s>",
        "unk_token": "<unk>", "added_tokens_decoder": decoder
    }


def slow_case(o, model, rng, n_texts):
    """transformers' slow tokenizer, with added tokens in the texts. Without its legacy mode it puts
    a mark before an added token that begins the text and is none of bos, eos and unk; here, as in
    the fast tokenizers, none: such texts are left out. So are those with a mark written in them,
    which it takes for a space that an added token may strip. It also encodes pieces behind a text
    that it removes again, which changes what is most probable: unigram models are in legacy
    mode."""
    from transformers import LlamaTokenizer
    sp = sentencepiece.SentencePieceProcessor(model_proto=model)
    c = config(sp, o, rng)
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "tokenizer.model"), "wb") as f:
            f.write(model)
        with open(os.path.join(folder, "tokenizer_config.json"), "w", encoding="utf-8") as f:
            json.dump(c, f)
        slow = LlamaTokenizer.from_pretrained(folder)
    others = tuple(e["content"] for e in c["added_tokens_decoder"].values()
                   if e["content"] not in ("<s>", "</s>", "<unk>"))
    rows = []
    while len(rows) < n_texts:
        s = text(rng, SPECIAL * 3)
        if not c["legacy"] and (s.lstrip().startswith(others) or "\u2581" in s):
            continue
        rows.append([s, slow(s, add_special_tokens=False)["input_ids"], None])
    rows += [[s, slow(s, add_special_tokens=False)["input_ids"], None] for s in EDGES]
    return {"by": "transformers", "options": o, "config": c, "texts": rows}


def write_seeds(cases, folder):
    """Inputs of tests/fuzz/sentencepiece_fuzz.c."""
    for i, case in enumerate(cases):
        texts = " ".join(row[0] for row in case["texts"][:3]).encode()
        settings = json.dumps(case["config"]).encode() if case["config"] else b""
        with open(os.path.join(folder, f"model_{i}"), "wb") as f:
            f.write(
                struct.pack("<HH", len(texts), len(settings)) + texts + settings +
                base64.b64decode(case["model"]))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--seed", type=int, default=7)
    ap.add_argument("--models", type=int, default=14)
    ap.add_argument("--texts", type=int, default=24)
    ap.add_argument("--own-rules", action="store_true", help="the library's own normalizers")
    ap.add_argument("--types", default="bpe,bpe,unigram")
    ap.add_argument("--seeds", help="a folder: the models as inputs of the fuzzer, too")
    ap.add_argument("out")
    args = ap.parse_args()
    rng = random.Random(args.seed)
    cases = []
    while len(cases) < args.models:
        o = options(rng, args.own_rules, args.types.split(","))
        model = train(o, rng)
        if model is None:
            continue
        # a normalizer that removes spaces is of no use to that class without its legacy mode
        slow = len(cases) % 3 == 2 and o["add_dummy_prefix"]
        case = (slow_case if slow else plain_case)(o, model, rng, args.texts)
        cases.append({**case, "model": base64.b64encode(model).decode()})
    if args.seeds:
        write_seeds(cases, args.seeds)
    made_by = f"sentencepiece {sentencepiece.__version__}"
    with open(args.out, "w", encoding="utf-8") as f:
        json.dump({"made_by": made_by, "cases": cases}, f, ensure_ascii=True, indent=0)
        f.write("\n")


if __name__ == "__main__":
    main()
