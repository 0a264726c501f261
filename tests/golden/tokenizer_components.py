#!/usr/bin/env python3
"""Writes tokenizer_components.json: what Hugging Face tokenizers does with small tokenizer.json
files of every component.

Needs the Python package `tokenizers` (the committed file: version 0.23.3, Python 3.11); never run
by make check. The vocabularies are trained here on the few sentences below, so that the file
depends on nothing else. tests/unit/tokenizer_test.c puts each case together: {"normalizer",
"pre_tokenizer", "post_processor", "decoder", "added_tokens"} of the case, and the model it names
with the case's switches. Left out on purpose: decoding of added tokens that are `normalized` under
a normalizer (that library's text for them varies between versions), and characters that its Unicode
tables do not know.
"""
import json
import random
import sys

import tokenizers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

SENTENCES = """the quick brown fox jumps over the lazy dog and then the dog sleeps in the sun
words and more words are what the tokenizer wants to see, again and again and again
don't they're we've i'll she'd it's can't and the 1234 numbers 5678 and 2024
un giorno la nonna disse che il cane era nel giardino della casa bianca
\u00e9t\u00e9 \u00e0 la plage, na\u00efve caf\u00e9 \u65e5\u672c\u8a9e \u65e5\u672c""".split(
    "\n") * 4
POOL = (
    "a b c the and ' 's 'LL don't  x1 22 333 \u00bd \u00b2 \u2167 \u0663 \u00e9 e\u0301 \u00e0 "
    "\u00df \u0130 \u017f K \u212b \ufb01 \u338f \u200b \u200d "
    ". , ! ?? -- _ \u203f \u65e5\u672c \u8a9e \ud55c\uad6d \u1112\u1161\u11ab q\u0323\u0307 "
    "q\u0307\u0323 \U0001f600 "
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \u24b6 \u0300 < > <s> </s> <tok> <TOK> tok word "
    "<0x41> \u2581 \u2581\u2581 _a $ + ^").split(" ")
POOL += [
    " ", "  ", "   ", "\n ", " \n", "\u2581 ", "\u00a0", "\u3000", "\u180e", "\u2028", "\u0085",
    "\t", "\n", "\r\n", "\n\n"
]
REGEXES = [
    r"\s+", r"\w+", r"\d", r"[^\s\w]+", r"\p{L}+|\p{N}", r"\bthe\b|\B.",
    r"[\u4e00-\u9fa5\u0800-\u4e00]+".encode().decode("unicode_escape"), r" ?[^(\s|[.,!?])]+",
    r"\p{Han}|\p{Hangul}+", r"^.|.$", r"(?<=a)b|\p{^L}+", r"a*", r"\s*", r"x{,2}", r"[\S]+", r"\S+",
    r"\W+", r"(?i)THE|k|'s", r"[\w']+", r"\v|\t", r"(a|b)+?c?|\p{P}", r"(?m:a.b)|[\n\x41-\x5A]",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
]
rng = random.Random(20240607)


def coin(p=0.5):
    return rng.random() < p


def train(byte_level):
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False) if byte_level else pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", "</s>"
               ] + ([] if byte_level else ["<0x%02X>" % i for i in range(256)])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet()) if byte_level else []
    t.train_from_iterator(
        SENTENCES,
        trainers.BpeTrainer(vocab_size=360, initial_alphabet=alphabet, special_tokens=special,
                            show_progress=False))
    return json.loads(t.to_str())["model"]


def text():
    return "".join(
        rng.choice(POOL) + (rng.choice(["", " ", " ", "  "]) if coin() else "")
        for _ in range(rng.randrange(0, 14)))


def pattern():
    return {"String": rng.choice([" ", "a", "\u2581", "th", "  ", "\n"])
            } if coin(0.3) else {"Regex": rng.choice(REGEXES)}


def normalizer():
    kind = rng.choice(["Prepend", "Replace", "NFC", "NFD", "NFKC", "NFKD", "Strip", "Lowercase"])
    more = {
        "Prepend": {"prepend": rng.choice(["\u2581", " ", "ab"])},
        "Replace": {"pattern": pattern(), "content": rng.choice(
            ["\u2581", "", "xy", " "])}, "Strip": {"strip_left": coin(), "strip_right": coin()}
    }
    return {"type": kind, **more.get(kind, {})}


def pre_tokenizer():
    kind = rng.choice([
        "ByteLevel", "Split", "Split", "Split", "Metaspace", "Digits", "Whitespace",
        "WhitespaceSplit", "Punctuation"
    ])
    behavior = rng.choice(
        ["Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"])
    more = {
        "ByteLevel": {"add_prefix_space": coin(), "trim_offsets": coin(), "use_regex": coin()},
        "Split": {"pattern": pattern(), "behavior": behavior, "invert": coin()}, "Metaspace": {
            "replacement": rng.choice("\u2581_"), "prepend_scheme": rng.choice(
                ["always", "first", "never"]), "split": coin()
        }, "Digits": {"individual_digits": coin()}, "Punctuation": {"behavior": behavior}
    }
    return {"type": kind, **more.get(kind, {})}


def decoder():
    kind = rng.choice(["ByteLevel", "ByteFallback", "Fuse", "Replace", "Strip", "Metaspace"])
    more = {
        "Replace": {"pattern": pattern(), "content": rng.choice(["\u2581", "", " ", "xx"])},
        "Strip": {"content": rng.choice(" \u2581a"), "start": rng.randrange(3),
                  "stop": 0}, "Metaspace": {
                      "replacement": rng.choice("\u2581_"), "prepend_scheme": rng.choice(
                          ["always", "first", "never"]), "split": True
                  }
    }
    return {"type": kind, **more.get(kind, {})}


def some(make, key):
    n = rng.choice([0, 1, 1, 2, 3])
    return None if n == 0 else make(
    ) if n == 1 else {"type": "Sequence", key: [make() for _ in range(n)]}


def added_tokens(vocab):
    out, next_id = [], len(vocab)
    for content in ["<unk>", "<s>", "</s>"] + rng.sample(
        ["<tok>", "tok", "word", "  ", "\n", "a b", "the", " and", "\t", "\U0001f600", "\u0301"],
            4):
        if content not in vocab:
            next_id += 1
        flags = {k: coin(0.3) for k in ("single_word", "lstrip", "rstrip", "normalized")}
        out.append(
            {"id": vocab.get(content, next_id - 1), "content": content, **flags, "special": coin()})
    return sorted(out, key=lambda a: a["id"])


def template(vocab):
    if coin():
        return None
    names = {"<s>": [vocab["<s>"]], "</s>": [vocab["</s>"], 0]}
    special = {k: {"id": k, "ids": v, "tokens": [k] * len(v)} for k, v in names.items()}
    single = [{"SpecialToken": {"id": "<s>",
                                "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
              {"SpecialToken": {"id": "</s>", "type_id": 0}}]
    pair = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]
    return {
        "type": "Sequence", "processors": [{
            "type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True
        }, {
            "type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special
        }]
    }


def main():
    trained = {"byte_level": train(True), "byte_fallback": train(False)}
    cases = []
    while len(cases) < 120:
        name = rng.choice(list(trained))
        switches = {
            "byte_fallback": coin(), "fuse_unk": coin(), "ignore_merges": coin(),
            "unk_token": rng.choice([None, "<unk>"])
        }
        vocab = trained[name]["vocab"]
        case = {
            "normalizer": some(normalizer, "normalizers") if coin(0.6) else None,
            "pre_tokenizer": some(
                pre_tokenizer, "pretokenizers"), "post_processor": template(vocab), "decoder": some(
                    decoder, "decoders"), "added_tokens": added_tokens(vocab)
        }
        try:
            t = Tokenizer.from_str(
                json.dumps({"version": "1.0", **case, "model": {**trained[name], **switches}}))
        except Exception:  # a pattern that Oniguruma refuses: no case
            continue
        if t.normalizer and any(a["normalized"] and not t.normalizer.normalize_str(a["content"])
                                for a in case["added_tokens"]):
            continue  # a pattern that would match everywhere: refused here
        unsure = {a["id"] for a in case["added_tokens"] if a["normalized"] and case["normalizer"]}
        texts = []
        for _ in range(5):
            s = text()
            try:
                ids = t.encode(s).ids
                again = [
                    i for i in (
                        ids if coin() else [rng.choice(list(vocab.values())) for _ in range(8)])
                    if i not in unsure
                ]
                texts.append([
                    s, ids, again,
                    t.decode(again, skip_special_tokens=False),
                    t.decode(again, skip_special_tokens=True)
                ])
            # that library panics now and then (pyo3's PanicException is no Exception)
            except BaseException as e:
                if isinstance(e, KeyboardInterrupt):
                    raise
        cases.append({"model": name, "switches": switches, "file": case, "texts": texts})
    sys.stdout.reconfigure(encoding="utf-8")
    json.dump(
        {
            "made_by": "tokenizer_components.py with tokenizers " + tokenizers.__version__,
            "models": trained, "cases": cases
        }, sys.stdout, ensure_ascii=False, indent=None, separators=(",", ":"))


main()
