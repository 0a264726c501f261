"""A model that calls tools: models/pocket with a chat template that has tools and thoughts, and one
token that is a whole answer, so that what is decoded is known."""
import json
import os

from harness import POCKET

TEMPLATE = ("{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>\n"
            "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
            "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
            "{{ m.content }}"
            "{% for c in m.tool_calls %}<tool_call>{\"name\": \"{{ c.function.name }}\", "
            "\"arguments\": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}"
            "<|im_end|>\n{% endfor %}{# 'tool' <think> #}{{ extra }}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
            "{% if messages[-1].content == 'Think' %}<think>\n{% endif %}")
ANSWER = ('<think>\nhm\n</think>\n\nHi <tool_call>\n{"name": "get", "arguments": {"x": 1}}\n'
          '</tool_call>\n<tool_call>\n{"name": "put", "arguments": {}}\n</tool_call>')
FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


def _read(name):
    with open(os.path.join(POCKET, name), encoding="utf-8") as f:
        return json.load(f)


def make_tool_model(folder):
    """Writes it to `folder`, a Path. Its last token reads ANSWER and STOP; the three before are
    those of a model that fills in the middle. Returns the last token, and the tokens without which
    no answer begins to think, which a model of stories would never end."""
    for name in os.listdir(POCKET):
        if name not in ("tokenizer.json", "tokenizer_config.json"):
            os.symlink(os.path.join(POCKET, name), folder / name)
    config, tokenizer = _read("tokenizer_config.json"), _read("tokenizer.json")
    config["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    vocab, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    last = max(vocab, key=vocab.get)
    del vocab[last]
    merges.pop()
    for i, word in enumerate(FIM, len(vocab) - len(FIM)):
        del vocab[next(t for t, number in vocab.items() if number == i)]
        merges.pop()
        vocab[word] = i
        tokenizer["added_tokens"].append({
            "id": i, "content": word, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": True
        })
    vocab[(ANSWER + "STOP").replace(" ", "\u0120").replace("\n", "\u010a")] = len(vocab)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return len(vocab) - 1, [i for t, i in vocab.items() if "h" in t and t in "<think>"]
