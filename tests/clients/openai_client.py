"""What a user of the `openai` package does, against the base URL in argv[1]. Prints one line of
JSON: what came back, for test_openai.py to compare."""
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


def main():
    url = sys.argv[1]
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    out = {
        "version": openai.__version__, **sync(client), "errors": errors(client),
        "parsed": parsed(client), "several": asyncio.run(several(url))
    }
    print(json.dumps(out))


if __name__ == "__main__":
    main()
