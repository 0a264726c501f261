#!/usr/bin/env python3
"""Writes tiktoken.json: a small list of ranks, and the ids that the tiktoken library makes of
random texts with it, by the patterns and special tokens of the classes that read such lists.

    make_tiktoken.py OUT               the committed file: tiktoken 0.14.0
    make_tiktoken.py --seed N --texts T [--long L] [--ranks FILE] OUT

Never run by make check. {"ranks": lines, "cases": [{"config": tokenizer_config.json, "front": ids
before every text, "texts": [[text, ids]]}]}; ids have none of those before them. --ranks: a
published list, which OUT then has.
"""
import argparse
import base64
import collections
import json
import random
import re
import unicodedata

import tiktoken

WORDS = """the quick brown fox jumps over the lazy dog and then the dog sleeps in the sun words
and more words are what the tokenizer wants to see again and again don't they're we've i'll she'd
it's can't HTTPServer McDonald eBay ABCdef 1234 5678 2024 for (int i = 0; i < n; i++) x[i] += y;
\u00e9t\u00e9 na\u00efve caf\u00e9 \u65e5\u672c\u8a9e \u65e5\u672c \u4e2d\u6587\u5b57 \u4e2d\u6587
\u043f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440 \ud55c\uad6d\uc5b4
\u0e44\u0e17\u0e22""".split()
POOL = ("a b the The THE tHE and ' 's 'S 'LL 'll don't I'M x1 22 333 4444 55555 \u00bd \u2167 "
        "\u0663 \u00e9 e\u0301 \u0301 \u00c5 A\u030a \u212b \ufb01 \u01c5 \u01c5abc ABC ABCdef "
        "abcDEF McX \u017f it'\u017f \u65e5 \u65e5\u672c \u4e2d\u6587\u5b57 \u3005 \u303b \u3007 "
        "\u2e80 \u4e2da\u6587B \U00020000 \U00016ff0 \u30ab\u30bf\u3072\u3089 \ud55c\uad6d "
        "\u0e44\u0e17\u0e22 \u0939\u093f\u0928 \U0001f600 \U0001f468\u200d\U0001f469 . , ! ?? -- _ "
        "// <| |> < > [ ] \u3002 \u300c\u5f15\u300d zqjx zqjxk quick tokenizer \ufffd \u200b $ + "
        "\u0378").split(" ") + [
            " ", "  ", "   ", "\n", "\n ", " \n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000",
            "\u2028", "\u0085", "\x01", "\x7f", "\u180e"]
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = (r"[\p{%s}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]" % c for c in (r"Lu}\p{Lt", "Ll"))
PREFIX = r"[^\r\n\p{L}\p{N}]?"
PATTERNS = {
    "TikTokenTokenizer": r"[\p{Han}]+" + "".join(
        "|" + PREFIX + UPPER + a + LOWER + b + CONTRACTION + "?" for a, b in ("*+", "+*")) +
                         r"|\p{N}{1,3}" + REST,
    "QWenTokenizer": CONTRACTION + "|" + PREFIX + r"\p{L}+|\p{N}" + REST,
    "ChatGLM4Tokenizer": CONTRACTION + "|" + PREFIX + r"\p{L}+|\p{N}{1,3}" + REST,
}
MAPS = {"TikTokenTokenizer": "tokenization_kimi", "QWenTokenizer": "tokenization_qwen",
        "ChatGLM4Tokenizer": "tokenization_chatglm"}
KIMI = {0: ("[BOS]", True), 1: ("[EOS]", True), 2: ("<|im_end|>", True), 9: ("<|call|>", False),
        254: ("[UNK]", True), 255: ("[PAD]", True)}
GLM = ["<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>",
       "<|assistant|>", "<|observation|>", "<|begin_of_image|>", "<|end_of_image|>",
       "<|begin_of_video|>", "<|end_of_video|>"]
QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] + ["<|extra_%d|>" % i for i in range(205)]


def made_ranks(n_merges):
    """Bytes in the order of GPT-2's characters for them, merges of frequent pairs, and tokens that
    no merge makes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    ranks = [bytes([b]) for b in printable + [b for b in range(256) if b not in printable]]
    counts = collections.Counter(w for word in WORDS for w in (word, " " + word))
    words = {w: [bytes([b]) for b in w.encode()] for w in counts}
    for _ in range(n_merges):
        pairs = collections.Counter()
        for w, parts in words.items():
            for pair in zip(parts, parts[1:]):
                pairs[pair] += counts[w]
        a, b = max(pairs, key=lambda p: (pairs[p], p))
        ranks.append(a + b)
        for w, parts in words.items():
            i = 0
            while i + 1 < len(parts):
                if parts[i] == a and parts[i + 1] == b:
                    parts[i:i + 2] = [a + b]
                i += 1
        if len(set(ranks)) < len(ranks):
            ranks.pop()
    return ranks + [b"zqjx", b" tokenizer.", "\u65e5\u672c".encode() + b"x"]


def config_of(name, n):
    """tokenizer_config.json, the special tokens, and those before every text."""
    config = {"tokenizer_class": name,
              "auto_map": {"AutoTokenizer": [MAPS[name] + "." + name, None]}}
    front = []
    if name == "TikTokenTokenizer":
        special = {KIMI.get(i, ("<|reserved_token_%d|>" % (n + i),))[0]: n + i for i in range(256)}
        config["added_tokens_decoder"] = {
            str(n + i): {"content": text, "lstrip": False, "normalized": False, "rstrip": False,
                         "single_word": False, "special": is_special}
            for i, (text, is_special) in KIMI.items()}
    else:
        special = {text: n + i for i, text in enumerate(QWEN if name[0] == "Q" else GLM)}
        front = [] if name[0] == "Q" else [special["[gMASK]"], special["<sop>"]]
    return config, special, front


def pieces_of(text):
    """What Kimi-K2's code gives to the library one by one of a text between special tokens: slices
    of 400,000 characters, cut again where more than 25,000 in a row are or are not white space."""
    for at in range(0, len(text), 400000):
        part, start, run = text[at:at + 400000], 0, 0
        for i, c in enumerate(part):
            run = run + 1 if i and c.isspace() == part[i - 1].isspace() else 1
            if run > 25000:
                yield part[start:i]
                start, run = i, 1
        yield part[start:]


def encode_kimi(e, text, special):
    ids = []
    names = sorted(special, key=len, reverse=True)
    for part in re.split("(" + "|".join(map(re.escape, names)) + ")", text):
        ids += [special[part]] if part in special else [
            i for piece in pieces_of(part) for i in e.encode(piece, disallowed_special=())
        ]
    return ids


def long_text(rng, special):
    """More than 400,000 characters, of runs around 25,000 and 50,000 of them."""
    text = ""
    while len(text) < 410000:
        n = rng.choice([25000, 50000]) + rng.randrange(-3, 4)
        space = rng.random() < 0.5
        unit = rng.choice([" ", "\n", "\t \u3000", "\x1c\x85 "] if space else
                          ["the", "quick", "\u65e5\u672c", "x1", "\U0001f600", "?"])
        text += (unit * n)[:n] + ("a" if space else " ") * rng.randrange(2)
        if rng.random() < 0.2:
            text += rng.choice(sorted(special))
    return text


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--texts", type=int, default=60)
    p.add_argument("--ranks")
    p.add_argument("--long", type=int, default=0, help="so many of Kimi-K2's texts are long")
    p.add_argument("out")
    args = p.parse_args()
    rng = random.Random(args.seed)
    if args.ranks:
        with open(args.ranks, encoding="ascii") as f:
            lines = f.read()
        ranks = [base64.b64decode(line.split()[0]) for line in lines.splitlines() if line]
    else:
        ranks = made_ranks(220)
        lines = "".join("%s %d\n" % (base64.b64encode(t).decode(), i) for i, t in enumerate(ranks))
    cases = []
    for name, pattern in PATTERNS.items():
        config, special, front = config_of(name, len(ranks))
        e = tiktoken.Encoding(name, pat_str=pattern, special_tokens=special,
                              mergeable_ranks={t: i for i, t in enumerate(ranks)})
        is_kimi = name[0] == "T"
        texts = []
        for i in range(args.texts):
            pieces = rng.choices(POOL + rng.sample(sorted(special), 6) + WORDS,
                                 k=rng.randrange(1, 24))
            glue = rng.choice(["", "", " "])
            text = glue.join(pieces)
            if is_kimi and i < args.long:
                text = long_text(rng, special)
            asked = unicodedata.normalize("NFC", text) if name[0] == "Q" else text
            ids = encode_kimi(e, text, special) if is_kimi else e.encode(asked,
                                                                         allowed_special="all")
            texts.append([text, ids])
        cases.append({"config": config, "front": front, "texts": texts})
    with open(args.out, "w", encoding="ascii") as f:
        json.dump({"ranks": lines, "cases": cases}, f, separators=(",", ":"))
        f.write("\n")


if __name__ == "__main__":
    main()
