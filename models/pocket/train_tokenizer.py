#!/usr/bin/env python3
"""Train the byte-level BPE tokenizer of models/pocket on its corpus and write the tokenizer's
files.

    train_tokenizer.py --corpus corpus.jsonl --out models/pocket [--vocab 2048]

Every byte is a token, so any text can be encoded. A document begins with <|endoftext|> (BOS, and
    EOS of plain text); a chat turn is
<|im_start|>role, a newline, the text, <|im_end|>.
"""
import argparse
import json
import os

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = ("{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + "
                 "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
                 "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def write_json(path, value):
    with open(path, "w", encoding="utf-8") as f:
        json.dump(value, f, indent=2, ensure_ascii=False)
        f.write("\n")


def main():
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--corpus", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--vocab", type=int, default=2048)
    ap.add_argument("--max-positions", type=int, default=2048)
    args = ap.parse_args()

    def texts():
        with open(args.corpus, encoding="utf-8") as f:
            for line in f:
                text = json.loads(line)
                for s in SPECIAL:
                    text = text.replace(s, "\n")
                yield text

    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=args.vocab, special_tokens=SPECIAL,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  min_frequency=2, show_progress=False)
    tok.train_from_iterator(texts(), trainer)
    tok.post_processor = processors.TemplateProcessing(single="<|endoftext|> $A",
                                                       pair="<|endoftext|> $A <|endoftext|> $B",
                                                       special_tokens=[("<|endoftext|>", 0)])
    tok.save(os.path.join(args.out, "tokenizer.json"))

    entry = lambda s: {
        "content": s, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
        "special": True
    }
    write_json(
        os.path.join(args.out, "tokenizer_config.json"), {
            "added_tokens_decoder": {str(i): entry(s) for i, s in enumerate(SPECIAL)
                                     }, "additional_special_tokens": SPECIAL[1:],
            "bos_token": SPECIAL[0], "eos_token": SPECIAL[0], "pad_token": SPECIAL[0],
            "chat_template": CHAT_TEMPLATE, "clean_up_tokenization_spaces": False,
            "model_max_length": args.max_positions, "tokenizer_class": "PreTrainedTokenizerFast",
        })
    plain = lambda s: {k: v for k, v in entry(s).items() if k != "special"}
    write_json(
        os.path.join(args.out, "special_tokens_map.json"), {
            "additional_special_tokens": [plain(s) for s in SPECIAL[1:]], "bos_token": plain(
                SPECIAL[0]), "eos_token": plain(SPECIAL[0]), "pad_token": plain(SPECIAL[0])
        })
    print(f"vocabulary {tok.get_vocab_size()}")


if __name__ == "__main__":
    main()
