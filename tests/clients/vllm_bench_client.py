"""Sends prompts as `vllm bench serve` does: argv is the server's URL, the backend's name, the
number of output tokens and the prompts as JSON. Prints one line of JSON: its own record of each
request."""
import asyncio
import importlib.util
import json
import os
import sys
import sysconfig

import aiohttp

PATHS = {"openai-chat": "/v1/chat/completions"}


def load():
    path = os.path.join(sysconfig.get_paths()["purelib"], "vllm", "benchmarks", "lib",
                        "endpoint_request_func.py")
    spec = importlib.util.spec_from_file_location("endpoint_request_func", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


async def main():
    url, backend, n_tokens, prompts = sys.argv[1:]
    bench = load()
    send = bench.ASYNC_REQUEST_FUNCS[backend]
    async with aiohttp.ClientSession() as session:
        outputs = await asyncio.gather(*(send(
            bench.RequestFuncInput(
                prompt=prompt, api_url=url + PATHS.get(backend, "/v1/completions"), prompt_len=8,
                output_len=int(n_tokens), model="pocket", logprobs=None, ignore_eos=True,
                request_id=f"bench-{i}", extra_body={"temperature": 0.0}), session=session)
                                         for i, prompt in enumerate(json.loads(prompts))))
    print(
        json.dumps([{
            k: getattr(o, k)
            for k in ("success", "error", "generated_text", "output_tokens", "ttft")
        } for o in outputs]))


if __name__ == "__main__":
    asyncio.run(main())
