"""What a user of the `openai` package does, against the base URL in argv[1]; with argv[2], tokens
of tests/cluster/tool_model.py, what one does who has tools. Prints one line of JSON: what came
back, for test_openai.py to compare."""
import asyncio
import json
import sys

import openai
import pydantic

TALE = "Once upon a time"
CHAT = [{"role": "user", "content": "Tell me a story about a fox."}]
GREEDY = {"model": "pocket", "temperature": 0, "max_tokens": 16}


class Animal(pydantic.BaseModel):
    name: str
    legs: int


def sync(client):
    out = {"models": [m.id for m in client.models.list().data]}
    out["model"] = client.models.retrieve("pocket").id
    out["text"] = client.completions.create(prompt=TALE, **GREEDY).choices[0].text
    out["stream"] = "".join(
        c.choices[0].text for c in client.completions.create(prompt=TALE, stream=True, **GREEDY))
    echo = client.completions.create(prompt=TALE, echo=True, logprobs=1, **GREEDY)
    lists = echo.choices[0].logprobs
    out["echo"] = [echo.choices[0].text, len(lists.tokens) - echo.usage.prompt_tokens,
                   lists.token_logprobs[0], max(lists.token_logprobs[1:]) <= 0]
    chat = client.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=2, **GREEDY)
    out["chat"] = chat.choices[0].message.content
    out["logprobs"] = "".join(t.token for t in chat.choices[0].logprobs.content)
    out["usage"] = chat.usage.completion_tokens
    chunks = list(
        client.chat.completions.create(messages=CHAT, stream=True,
                                       stream_options={"include_usage": True}, **GREEDY))
    out["chat_stream"] = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    out["stream_usage"] = chunks[-1].usage.completion_tokens
    return out


def errors(client):
    out = {}
    for name, call in ((
            "field", lambda: client.completions.create(prompt=TALE, model="pocket", max_tokens=0)),
                       ("model", lambda: client.completions.create(prompt=TALE, model="gpt-5")),
                       ):
        try:
            call()
            out[name] = "no error"
        except openai.APIStatusError as e:
            out[name] = [type(e).__name__, e.status_code, e.body["param"]]
    return out


def parsed(client):
    """A schema made from a class. The pocket model writes stories, so several seeds are tried
    until one ends its JSON before max_tokens."""
    for seed in range(20):
        try:
            done = client.chat.completions.parse(model="pocket", messages=CHAT, temperature=1,
                                                 seed=seed, max_tokens=200, response_format=Animal)
            return [type(done.choices[0].message.parsed).__name__, seed]
        except openai.LengthFinishReasonError:
            continue
    return ["none ended", 20]


async def several(url):
    client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    answers = await asyncio.gather(*(client.completions.create(prompt=TALE, **GREEDY)
                                     for _ in range(8)))
    stream = await client.completions.create(prompt=TALE, stream=True, **GREEDY)
    return sorted({a.choices[0].text
                   for a in answers} | {"".join([c.choices[0].text async for c in stream])})


TOOLS = [{
    "type": "function", "function": {
        "name": name, "description": f"To {name}.", "parameters": {
            "type": "object", "properties": properties, "required": list(properties),
            "additionalProperties": False
        }
    }
} for name, properties in (("get", {"x": {"type": "integer"}}), ("put", {}),
                           ("go", {"to": {"enum": ["sea", "wood"]}, "n": {"type": "integer"}}))]


def told(message, finish_reason):
    return [message.content, [[c.type, c.function.name, c.function.arguments]
                              for c in message.tool_calls or []], finish_reason]


def told_by_stream(chunks):
    """The same of the deltas, joined as OpenAI's documentation says."""
    content, calls, ends = "", {}, []
    for choice in (c for chunk in chunks for c in chunk.choices):
        content += choice.delta.content or ""
        ends += [choice.finish_reason] if choice.finish_reason else []
        for d in choice.delta.tool_calls or []:
            if d.index not in calls:
                assert d.id.startswith("call_"), d
                calls[d.index] = [d.type, d.function.name, ""]
            calls[d.index][2] += d.function.arguments or ""
    return [content or None, [calls[i] for i in sorted(calls)], *ends]


def with_tools(client, answer, thinking):
    """An answer that calls two tools, the next turn of that talk, and a call that must be made."""
    asked = {
        "model": client.models.list().data[0].id, "messages": CHAT, "tools": TOOLS,
        "max_tokens": 1, "stop": ["STOP"], "temperature": 0, "logit_bias": {str(answer): 100}
    }
    create = client.chat.completions.create
    first = create(**asked).choices[0]
    out = {"auto": told(first.message, first.finish_reason)}
    out["auto_stream"] = told_by_stream(create(stream=True, **asked))
    results = [{"role": "tool", "tool_call_id": c.id, "content": "42"}
               for c in first.message.tool_calls]
    turn = create(**{**asked, "messages": [*CHAT, first.message, *results]}).choices[0]
    out["turn"] = told(turn.message, turn.finish_reason)
    none = create(**asked, tool_choice="none").choices[0]
    out["none"] = told(none.message, none.finish_reason)
    go = {
        **asked, "tool_choice": {"type": "function", "function": {"name": "go"}},
        "max_tokens": 400, "temperature": 1.5, "seed": 3, "stop": None,
        "logit_bias": {str(t): -100 for t in thinking}
    }
    named = create(**go).choices[0]
    out["named"] = told(named.message, named.finish_reason)
    out["named_stream"] = told_by_stream(create(stream=True, **go))
    out["parsed"] = parsed_calls(client, {**go, "tools": [openai.pydantic_function_tool(Animal)]})
    return out


def parsed_calls(client, asked):
    """A tool made of a class, by the client's own parser: whole, and of its stream of events."""
    asked["tool_choice"] = {"type": "function", "function": {"name": "Animal"}}
    call, = client.chat.completions.parse(**asked).choices[0].message.tool_calls
    with client.chat.completions.stream(**asked) as events:
        done = [e for e in events if e.type == "tool_calls.function.arguments.done"]
        final, = events.get_final_completion().choices[0].message.tool_calls
    values = [call.function.parsed_arguments, *[e.parsed_arguments for e in done],
              final.function.parsed_arguments]
    return [type(values[0]).__name__, len(values), all(v == values[0] for v in values)]


async def with_tools_later(url, answer):
    client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    stream = await client.chat.completions.create(
        model=(await client.models.list()).data[0].id, messages=CHAT, tools=TOOLS, max_tokens=1,
        stop=["STOP"], temperature=0, logit_bias={str(answer): 100}, stream=True)
    return told_by_stream([c async for c in stream])


def main():
    url = sys.argv[1]
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    if len(sys.argv) > 2:
        answer, thinking = json.loads(sys.argv[2])
        later = asyncio.run(with_tools_later(url, answer))
        print(json.dumps({**with_tools(client, answer, thinking), "async_stream": later}))
        return
    out = {
        "version": openai.__version__, **sync(client), "errors": errors(client),
        "parsed": parsed(client), "several": asyncio.run(several(url))
    }
    print(json.dumps(out))


if __name__ == "__main__":
    main()
