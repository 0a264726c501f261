#!/usr/bin/env python3
"""Write the training text of models/pocket: one JSON string per line, one document each.

    make_corpus.py --out corpus.jsonl [--mib 32] [--seed 1]

60 % stories, 15 % dialogues, diaries, letters, descriptions and explanations, 25 % chats in ChatML.
The text is our own (CC0-1.0); a seed gives the same bytes on every machine. --notes mixes in notes
of two or three sentences. A document that has already come up is dropped, so no two are the same.
"""
import argparse
import json
import random

from corpus import facts, stories


def document(rng, notes):
    if notes and rng.random() < notes:
        return facts.note(rng)
    r = rng.random()
    if r < 0.60:
        return stories.story(rng)[0]
    if r < 0.75:
        return facts.plain(rng)
    return facts.chat(rng)


def main():
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--out", required=True)
    ap.add_argument("--mib", type=float, default=32.0, help="size of the text in MiB")
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--notes", type=float, default=0.0,
                    help="share of the documents that are notes of two or three sentences")
    args = ap.parse_args()
    rng = random.Random(args.seed)
    seen, n_bytes, n_docs, n_dropped = set(), 0, 0, 0
    with open(args.out, "w", encoding="utf-8") as f:
        while n_bytes < args.mib * (1 << 20):
            text = document(rng, args.notes)
            if text in seen:
                n_dropped += 1
                continue
            seen.add(text)
            f.write(json.dumps(text) + "\n")
            n_bytes += len(text)
            n_docs += 1
    print(f"{n_docs} documents, {n_bytes} bytes, {n_dropped} duplicates dropped")


if __name__ == "__main__":
    main()
