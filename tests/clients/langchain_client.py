"""What a user of LangChain does, against the base URL in argv[1]; with argv[2], tokens of
tests/cluster/tool_model.py, what one does who binds tools. Prints one line of JSON: what came back,
for test_langchain.py to compare."""
import asyncio
import json
import sys
from typing import Literal

import pydantic
from langchain_core.messages import ToolMessage
from langchain_openai import ChatOpenAI, OpenAI

TALE = "Once upon a time"
FOX = [("human", "Tell me a story about a fox.")]


class Animal(pydantic.BaseModel):
    name: str
    legs: int


def animal(common):
    """The pocket model writes stories: several seeds are tried until one ends its JSON."""
    for seed in range(20):
        model = ChatOpenAI(**{**common, "temperature": 1, "max_tokens": 200}, seed=seed)
        try:
            found = model.with_structured_output(Animal, method="json_schema").invoke(FOX)
            return [type(found).__name__, seed]
        except Exception as e:  # pylint: disable=broad-except
            if "length limit" not in str(e):
                raise
    return ["none ended", 20]


def get(x: int) -> int:
    """Gets x."""
    return x


def put() -> None:
    """Puts."""


class Animals(pydantic.BaseModel):
    """Counts animals."""
    kind: Literal["fox", "dog"]
    legs: int


def told(m):
    ids = [c["id"] for c in m.tool_calls]
    assert len(set(ids)) == len(ids) and not m.invalid_tool_calls, m
    return [m.content, [[c["name"], c["args"]] for c in m.tool_calls],
            m.response_metadata["finish_reason"]]


def joined(chunks):
    whole, *more = chunks
    for c in more:
        whole += c
    return whole


def with_tools(url, answer, thinking):
    common = dict(base_url=url, api_key="none", model="", max_retries=0)
    sure = ChatOpenAI(**common, temperature=0, max_tokens=1, stop=["STOP"],
                      logit_bias={answer: 100}).bind_tools([get, put])
    first = sure.invoke(FOX)
    results = [ToolMessage("42", tool_call_id=c["id"]) for c in first.tool_calls]
    free = ChatOpenAI(**common, temperature=1.5, max_tokens=400, seed=3,
                      logit_bias={t: -100 for t in thinking})
    named = free.bind_tools([get, Animals], tool_choice="Animals")
    return {
        "auto": told(first), "stream": told(joined(sure.stream(FOX))),
        "async": told(asyncio.run(sure.ainvoke(FOX))),
        "turn": told(sure.invoke([*FOX, first, *results])), "named": told(named.invoke(FOX)),
        "named_stream": told(joined(named.stream(FOX))),
        "structured": free.with_structured_output(Animals, method="function_calling").invoke(
            FOX).kind
    }


def main():
    if len(sys.argv) > 2:
        print(json.dumps(with_tools(sys.argv[1], *json.loads(sys.argv[2]))))
        return
    common = dict(base_url=sys.argv[1], api_key="none", model="pocket", temperature=0,
                  max_tokens=16, max_retries=0)
    model, text = ChatOpenAI(**common, stream_usage=True), OpenAI(**common)
    answer, chunks = model.invoke(FOX), list(model.stream(FOX))
    whole = chunks[0]
    for c in chunks[1:]:
        whole += c
    count = [(m.usage_metadata["input_tokens"], m.usage_metadata["output_tokens"])
             for m in (answer, whole)]
    print(
        json.dumps({
            "completion": text.invoke(TALE), "completion_stream": "".join(text.stream(TALE)),
            "stopped": text.invoke(TALE, stop=[","]), "chat": answer.content,
            "chat_stream": whole.content, "usage": count[0], "stream_usage": count[1],
            "finish": answer.response_metadata["finish_reason"],
            "batch": [m.content for m in model.batch([FOX] * 4)],
            "async": asyncio.run(model.ainvoke(FOX)).content, "animal": animal(common)
        }))


if __name__ == "__main__":
    main()
