"""Sends to an OpenAI server what Open WebUI's connector sends (backend/open_webui/routers/openai.py
and tasks.py: the list of models, a chat that streams, a chat's title), by the HTTP library that it
uses. Open WebUI itself has some hundred dependencies; this needs aiohttp alone.

    open_webui_requests.py http://127.0.0.1:8000/v1      # behind tests/tools/record_clients.py

Its model is set up with temperature 0 and 16 tokens, which it adds to each request."""
import asyncio
import json
import sys

import aiohttp

PARAMS = {"temperature": 0.0, "max_tokens": 16}
HEADERS = {"Content-Type": "application/json", "Authorization": "Bearer none"}
QUESTION = "Tell me a story about a fox."


async def ask(url, payload):
    async with aiohttp.ClientSession(trust_env=True) as session:
        async with session.request(method="POST", url=f"{url}/chat/completions",
                                   data=json.dumps(payload), headers=HEADERS) as r:
            assert r.status == 200, await r.text()
            async for _ in r.content:
                pass


async def main(url):
    async with aiohttp.ClientSession(trust_env=True) as session:
        async with session.get(f"{url}/models", headers={"Authorization": "Bearer none"}) as r:
            model = (await r.json())["data"][0]["id"]
    parts = [{"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}}]
    for content in (QUESTION, parts):
        await ask(url, {
            "stream": True, "model": model, "messages": [{"role": "user", "content": content}],
            **PARAMS, "stream_options": {"include_usage": True}
        })
    await ask(url, {
        "model": model, "messages": [{
            "role": "user",
            "content": "### Task:\nGenerate a concise title of 3 to 5 words.\n\n### Chat History:\n"
                       f"<chat_history>\nUSER: {QUESTION}\n</chat_history>"
        }], "stream": False, "max_completion_tokens": PARAMS["max_tokens"], **PARAMS
    })


asyncio.run(main(sys.argv[1]))
