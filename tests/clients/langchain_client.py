"""What a user of LangChain does, against the base URL in argv[1]. Prints one line of JSON: what
came back, for test_langchain.py to compare."""
import asyncio
import json
import sys

import pydantic
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


def main():
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
