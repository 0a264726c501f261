#!/usr/bin/python3
"""Renders chats with the real Jinja, configured as transformers does it: the oracle of
chat_template_test.

Input: a JSON file {"templates": [source, ...], "chats": [{"template": index, "messages": [...],
"add_generation_prompt": bool, "bos_token": str or null, "eos_token": str or null, "tools": [JSON
text, ...], "template_kwargs": JSON text}, ...]}; the arguments of a message's tool_calls are JSON
texts too. Output: a JSON list with {"text": str} or {"error": str} for each chat. strftime_now is
fixed to 26 July 2024, the date our renderer gives by default. Exit status 77: no jinja2 here.
"""
import datetime
import json
import sys

try:
    import jinja2
    import jinja2.ext
    import jinja2.sandbox
except ImportError:
    sys.exit(77)


class Generation(jinja2.ext.Extension):
    """{% generation %}: transformers marks the assistant's tokens with it; the text is that of
    its body."""
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)


def main():
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = datetime.datetime(2024, 7, 26).strftime
    with open(sys.argv[1], encoding="utf-8") as f:
        work = json.load(f)
    templates = []
    for source in work["templates"]:
        try:
            templates.append(env.from_string(source))
        except jinja2.exceptions.TemplateError as e:
            templates.append(e)
    answers = []
    for chat in work["chats"]:
        template = templates[chat["template"]]
        tokens = {k: chat[k] for k in ("bos_token", "eos_token") if chat[k] is not None}
        for message in chat["messages"]:
            for call in message.get("tool_calls", []):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        tokens.update(json.loads(chat.get("template_kwargs", "{}")))
        tools = [json.loads(tool) for tool in chat.get("tools", [])] or None
        try:
            if isinstance(template, Exception):
                raise template
            answers.append({
                "text": template.render(messages=chat["messages"], tools=tools, documents=None,
                                        add_generation_prompt=chat["add_generation_prompt"],
                                        **tokens)
            })
        except Exception as e:  # whatever the template runs into is this chat's answer
            answers.append({"error": f"{type(e).__name__}: {e}"})
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
