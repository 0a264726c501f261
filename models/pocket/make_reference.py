#!/usr/bin/env python3
"""Write reference_greedy.json: what transformers continues greedily in f32, to be compared token
for token.

    make_reference.py --model models/pocket [--samples]

The stored BF16 weights are widened to f32 and all arithmetic is f32. Of the candidate prompts the
first eight are taken whose gap between the best and the second logit is above 0.01 at every step; a
continuation is 64 tokens or ends with an EOS token. Every step is a whole forward pass without a KV
cache.
"""
import argparse
import json
import os

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

CANDIDATES = [
    "Once upon a time", "One cold winter morning, a little fox named",
    "Anna had a red kite. One windy day,", "The sun is", "Dear Grandma Rose,",
    ["What is the capital of France?"], ["Tell me a story about a rabbit named Poppy."],
    ["How do I make tea?"], ["What is 3 plus 4?"],
    "There was a small robot", "Tom was afraid of the dark.", "In a busy town by the sea lived",
    ["What do owls eat?"], "Today was a good day.", ["I am sad today."],
    "Mia wanted to learn to swim.", "A lighthouse is", "\"Where is my hat?\" asked",
    ["Write a poem, please."], "It was raining, and", "The old clock stopped.",
]


def ids_of(tok, prompt):
    """-> (prompt text, ids): a string is plain text with BOS, a list is a chat whose turns
    alternate, rendered by the template."""
    if isinstance(prompt, str):
        return prompt, tok(prompt)["input_ids"]
    messages = [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(prompt)]
    text = tok.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text, tok(text, add_special_tokens=False)["input_ids"]


@torch.no_grad()
def greedy(model, ids, n_tokens, eos):
    ids, out, gaps = list(ids), [], []
    for _ in range(n_tokens):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        top = torch.topk(logits, 2)
        gaps.append(round((top.values[0] - top.values[1]).item(), 5))
        ids.append(top.indices[0].item())
        out.append(ids[-1])
        if ids[-1] in eos:
            break
    return out, gaps


def main():
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--model", required=True)
    ap.add_argument("--samples", action="store_true", help="also print sampled continuations")
    args = ap.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    tok = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32,
                                                 attn_implementation="eager").eval()
    eos = model.generation_config.eos_token_id
    if args.samples:
        for prompt in CANDIDATES[:9]:
            text, ids = ids_of(tok, prompt)
            out = model.generate(torch.tensor([ids]), attention_mask=torch.ones(
                1, len(ids)), max_new_tokens=220, do_sample=True, temperature=0.7, top_p=0.95,
                                 top_k=0)
            print(f"--- {text!r}\n{tok.decode(out[0, len(ids):], skip_special_tokens=True)}\n")
    cases = []
    for prompt in CANDIDATES:
        text, ids = ids_of(tok, prompt)
        out, gaps = greedy(model, ids, 64, eos)
        print(f"{'take' if min(gaps) > 0.01 else 'SKIP'} smallest gap {min(gaps):.4f} {text!r} -> "
              f"{tok.decode(out)!r}")
        if min(gaps) > 0.01 and len(cases) < 8:
            cases.append({
                "prompt": text, "adds_bos": isinstance(
                    prompt, str), "ids": ids, "continuation_ids": out, "text": tok.decode(out),
                "ends_with_eos": out[-1] in eos, "smallest_gap": min(gaps), "gaps": gaps
            })
    lines = ",\n".join("    " + json.dumps(c) for c in cases)
    with open(os.path.join(args.model, "reference_greedy.json"), "w", encoding="utf-8") as f:
        f.write(f'{{\n  "origin": "transformers {transformers.__version__}, torch '
                f'{torch.__version__.split("+")[0]}, CPU, f32 arithmetic '
                f'on the BF16 weights, no KV cache",\n  "cases": [\n{lines}\n  ]\n}}\n')


if __name__ == "__main__":
    main()
