#!/usr/bin/env python3
"""Train models/pocket on one CPU thread within a time budget, and export it.

    train.py --corpus corpus.jsonl --model models/pocket --work DIR --minutes 55      trains;
        snapshots in DIR; exports at the end
    train.py --corpus corpus.jsonl --model models/pocket --work DIR --export-only     exports the
        last snapshot in DIR

Weights are f32 while training; matrices inside the layers are updated by Muon (momentum, then the
update made orthogonal by a Newton-Schulz iteration; Jordan et al. 2024), embeddings and norms by
AdamW. The learning rate follows the elapsed share of the time budget: warm-up, level, then a cosine
to zero. The exported weights are rounded to BF16, and the loss that is reported is theirs.
"""
import argparse
import json
import math
import os
import random
import time

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

SHAPE = dict(hidden_size=192, intermediate_size=512, num_hidden_layers=5, num_attention_heads=6,
             num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, rms_norm_eps=1e-5,
             rope_theta=10000.0)
BOS, IM_START = 0, 1
LENGTHS, LENGTH_WEIGHTS = (256, 512, 1024, 2048), (0.45, 0.42, 0.09, 0.04)
RARE = 500  # a token is rare when it is less than one of so many: names, things, animals
SINGLE_LENGTH, SINGLE_SHARE = 512, 0.88  # with --single: rows whose documents do not see each other


def new_model(vocab):
    shape = {k: v for k, v in SHAPE.items() if k != "rope_theta"}
    config = LlamaConfig(
        vocab_size=vocab, tie_word_embeddings=True, attention_bias=False, mlp_bias=False,
        hidden_act="silu", bos_token_id=0, eos_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": SHAPE["rope_theta"]}, **shape)
    return LlamaForCausalLM(config)


# --- data: every document is a tensor of ids; a row is documents one after another, each led by BOS
# ---


class Data:
    def __init__(self, path, tokenizer, held_out, rng):
        with open(path, encoding="utf-8") as f:
            texts = [json.loads(line) for line in f]
        self.docs = []
        for i in range(0, len(texts), 4096):
            for e in tokenizer.encode_batch(texts[i:i + 4096], add_special_tokens=False):
                self.docs.append(torch.tensor(e.ids, dtype=torch.int16))
        random.Random(1).shuffle(self.docs)  # the held-out documents do not depend on the seed
        self.val, self.docs = self.docs[:held_out], self.docs[held_out:]
        rng.shuffle(self.docs)
        self.n_tokens = sum(len(d) + 1 for d in self.docs)
        self.rng, self.next = rng, 0
        counts = torch.bincount(torch.cat(self.docs).long(), minlength=tokenizer.get_vocab_size())
        self.rare = counts < counts.sum() / RARE

    def row(self, length, source=None):
        """length + 1 ids. A row may begin without BOS, and now and then in the middle of a
        document."""
        parts, n = [], 0
        bos = torch.tensor([BOS], dtype=torch.int16)
        while n < length + 1:
            if source is None:
                if self.next == len(self.docs):
                    self.rng.shuffle(self.docs)
                    self.next = 0
                doc = self.docs[self.next]
                self.next += 1
            else:
                doc = source.pop()
            lead = bos
            if n == 0 and source is None:
                r = self.rng.random()
                if r < 0.15 and len(doc) > 64:
                    doc = doc[self.rng.randrange(len(doc) // 2):]
                    lead = bos[:0]
                elif r < (0.7 if doc[0] == IM_START else 0.3):
                    lead = bos[:0]
            parts += [lead, doc]
            n += len(lead) + len(doc)
        return torch.cat(parts)[:length + 1].long()

    def batch(self, n_tokens, single):
        """-> inputs, targets, keyword arguments for the model."""
        single = single and self.rng.random() < SINGLE_SHARE
        length = SINGLE_LENGTH if single else self.rng.choices(LENGTHS, LENGTH_WEIGHTS)[0]
        rows = torch.stack([self.row(length) for _ in range(max(1, n_tokens // length))])
        return rows[:, :-1], rows[:, 1:], apart(rows[:, :-1]) if single else {}


def apart(x):
    """Mask and positions that make every document of a row (BOS leads) a row of its own: a name
    is copied from this story, not the last."""
    n_rows, length = x.shape
    index = torch.arange(length).expand(n_rows, length)
    first = torch.where(x == BOS, index,
                        0).cummax(dim=1).values  # where the document of each position begins
    sees = (first[:, :, None] == first[:, None, :]) & (index[:, :, None] >= index[:, None, :])
    return {
        "position_ids": index - first, "attention_mask": torch.where(
            sees, 0.0,
            torch.finfo(torch.float32).min)[:, None]
    }


def weights_of(x, y, rare, extra, factor):
    """A rare token that this document has already used counts `factor` times: who did what to
    what is the hard part of a story."""
    if factor == 1 or not extra:
        return None
    again = (y[:, :, None] == x[:, None, :]) & (extra["attention_mask"][:, 0] == 0)
    return torch.where(again.any(dim=2) & rare[y], factor, 1.0)


def loss_of(model, x, y, extra={}, weights=None):
    logits = model(input_ids=x, use_cache=False, **extra).logits
    losses = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(), y.reshape(-1), reduction="none")
    return losses.mean() if weights is None else (losses *
                                                  weights.reshape(-1)).sum() / weights.sum()


@torch.no_grad()
def validate(model, data):
    """Mean loss per token of the held-out documents, packed into rows of 512."""
    source = list(data.val)
    total, n = 0.0, 0
    while sum(len(d) for d in source) > 600:
        row = data.row(512, source)[None]
        total += loss_of(model, row[:, :-1], row[:, 1:]).item()
        n += 1
    return total / n


# --- optimizer ---


def orthogonal(g):
    """The nearest (semi-)orthogonal matrix to g, roughly: five steps of an odd polynomial on the
    singular values."""
    x = g / (g.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return x.T if tall else x


class Muon:
    def __init__(self, params, lr, momentum=0.95, decay=0.02):
        self.params, self.lr, self.momentum, self.decay = list(params), lr, momentum, decay
        self.state = [torch.zeros_like(p) for p in self.params]

    @torch.no_grad()
    def step(self, scale):
        for p, m in zip(self.params, self.state):
            m.lerp_(p.grad, 1 - self.momentum)
            update = orthogonal(p.grad.lerp(m, self.momentum))
            p.mul_(1 - self.lr * scale * self.decay)
            p.add_(update, alpha=-self.lr * scale * max(1.0, p.shape[0] / p.shape[1])**0.5)


def scale_at(share):
    """Learning-rate factor at this share of the time budget."""
    if share < 0.02:
        return 0.1 + 0.9 * share / 0.02
    if share < 0.35:
        return 1.0
    return max(0.0, 0.5 * (1 + math.cos(math.pi * (share - 0.35) / 0.65)))


# --- export ---


def write_json(path, value):
    with open(path, "w", encoding="utf-8") as f:
        json.dump(value, f, indent=2)
        f.write("\n")


def export(model, out):
    """model.safetensors in BF16 (the embedding is tied: no lm_head), config.json,
    generation_config.json; the model is rounded too."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16().float())
    tensors = {
        k: v.detach().bfloat16().contiguous() for k, v in model.state_dict().items()
        if k != "lm_head.weight"
    }
    tmp = os.path.join(out, "model.safetensors.tmp")
    save_file(tensors, tmp, metadata={"format": "pt"})
    os.chmod(tmp, 0o644)
    os.replace(tmp, os.path.join(out, "model.safetensors"))
    write_json(
        os.path.join(out, "config.json"), {
            "architectures": ["LlamaForCausalLM"
                              ], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 0, "eos_token_id": 0, "head_dim": SHAPE["head_dim"],
            "hidden_act": "silu", "hidden_size": SHAPE["hidden_size"], "initializer_range": 0.02,
            "intermediate_size": SHAPE["intermediate_size"],
            "max_position_embeddings": SHAPE["max_position_embeddings"], "mlp_bias": False,
            "model_type": "llama", "num_attention_heads": SHAPE["num_attention_heads"],
            "num_hidden_layers": SHAPE["num_hidden_layers"],
            "num_key_value_heads": SHAPE["num_key_value_heads"], "pretraining_tp": 1,
            "rms_norm_eps": SHAPE["rms_norm_eps"], "rope_scaling": None,
            "rope_theta": SHAPE["rope_theta"], "tie_word_embeddings": True,
            "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": model.config.vocab_size
        })
    write_json(
        os.path.join(out, "generation_config.json"), {
            "bos_token_id": 0, "eos_token_id": [0, 2], "pad_token_id": 0, "do_sample": True,
            "temperature": 0.7, "top_p": 0.95
        })


def main():
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--corpus", required=True)
    ap.add_argument("--model", required=True,
                    help="folder with tokenizer.json; the weights go there")
    ap.add_argument("--work", required=True, help="folder for snapshots and the log")
    ap.add_argument("--minutes", type=float, default=55)
    ap.add_argument("--batch-tokens", type=int, default=4096)
    ap.add_argument("--lr-matrix", type=float, default=0.02)
    ap.add_argument("--lr-other", type=float, default=4e-3)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--single", action="store_true", help="most rows keep their documents apart")
    ap.add_argument("--copy-weight", type=float, default=1.0,
                    help="weight of rare tokens the document has already used; needs --single")
    ap.add_argument("--resume", action="store_true",
                    help="begin from the snapshot in --work (weights only)")
    ap.add_argument("--export-only", action="store_true")
    args = ap.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    os.makedirs(args.work, exist_ok=True)
    snapshot = os.path.join(args.work, "snapshot.pt")
    tokenizer = Tokenizer.from_file(os.path.join(args.model, "tokenizer.json"))
    model = new_model(tokenizer.get_vocab_size())

    if args.export_only:
        saved = torch.load(snapshot)
        model.load_state_dict(saved["model"])
        data = Data(args.corpus, tokenizer, 400, random.Random(args.seed))
        before = validate(model, data)
        export(model, args.model)
        print(f"exported the snapshot of step {saved['step']}: held-out loss {before:.4f} in f32, "
              f"{validate(model, data):.4f} after rounding to BF16")
        return

    log = open(os.path.join(args.work, "train.log"), "a", encoding="utf-8")

    def say(text):
        print(text, flush=True)
        log.write(text + "\n")
        log.flush()

    t0 = time.monotonic()
    data = Data(args.corpus, tokenizer, 400, random.Random(args.seed))
    if args.resume:
        saved = torch.load(snapshot)
        model.load_state_dict(saved["model"])
        say(f"resumed from the snapshot of step {saved['step']}")
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "layers" in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "layers" not in n]
    say(f"parameters {sum(p.numel() for p in model.parameters())}, tokens {data.n_tokens}, "
        f"documents {len(data.docs)}, "
        f"read in {time.monotonic() - t0:.0f} s")
    muon = Muon(matrices, args.lr_matrix)
    adam = torch.optim.AdamW(others, lr=args.lr_other, betas=(0.9, 0.95), weight_decay=0.0)
    start, last_save, step, seen, mean = time.monotonic(), 0.0, 0, 0, None
    budget_s = args.minutes * 60
    while True:
        elapsed = time.monotonic() - start
        if elapsed >= budget_s:
            break
        scale = scale_at(elapsed / budget_s)
        x, y, extra = data.batch(args.batch_tokens, args.single)
        loss = loss_of(model, x, y, extra, weights_of(x, y, data.rare, extra, args.copy_weight))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        for group in adam.param_groups:
            group["lr"] = args.lr_other * scale
        adam.step()
        muon.step(scale)
        model.zero_grad(set_to_none=True)
        step += 1
        seen += x.numel()
        mean = loss.item() if mean is None else 0.95 * mean + 0.05 * loss.item()
        if step % 20 == 0:
            say(f"step {step} tokens {seen} loss {mean:.4f} scale {scale:.3f} elapsed "
                f"{elapsed:.0f} s, {seen / max(elapsed, 1):.0f} tok/s")
        if elapsed - last_save > 150:
            last_save = elapsed
            torch.save({"model": model.state_dict(), "step": step}, snapshot + ".tmp")
            os.replace(snapshot + ".tmp", snapshot)
    torch.save({"model": model.state_dict(), "step": step}, snapshot)
    before = validate(model, data)
    export(model, args.model)
    say(f"done: step {step}, tokens {seen}, training loss {mean:.4f}, held-out loss "
        f"{before:.4f} in f32, {validate(model, data):.4f} after "
        f"rounding to BF16")


if __name__ == "__main__":
    main()
