#!/usr/bin/python3
"""Streams a completion over HTTP, and goes on at the next router when one is lost. Python's own
library is enough.

    python3 docs/examples/openai_stream.py 127.0.0.1:8000,127.0.0.1:8001 "Once upon a time"

With stream_options.include_event_ids each event has an id. The same body, sent again with the last
id as the header Last-Event-ID, goes on behind that event at any router of the fleet. The token ids
that came, as resume_token_ids, spare computing them again; they may be left out."""
import http.client
import json
import random
import sys
import time

LOST = (OSError, http.client.HTTPException)


class Stream:
    """What has come of an answer. path: /v1/completions or /v1/chat/completions."""
    def __init__(self, path, body):
        options = {**body.get("stream_options", {}), "include_event_ids": True}
        self.path, self.last_id, self.token_ids = path, "", [[] for _ in range(body.get("n", 1))]
        self.body = {**body, "stream": True, "stream_options": options, "return_token_ids": True}

    def read(self, server, timeout_s=30):
        """The events that a router has to add. Raises one of LOST when it is lost, RuntimeError
        when the answer has ended with an error."""
        headers = {"Content-Type": "application/json"}
        body = dict(self.body)
        if self.last_id:
            headers["Last-Event-ID"] = self.last_id
            body["resume_token_ids"] = self.token_ids
        connection = http.client.HTTPConnection(server, timeout=timeout_s)
        try:
            connection.request("POST", self.path, json.dumps(body), headers)
            answer = connection.getresponse()
            if answer.status == 503:
                raise ConnectionError(answer.read().decode())
            if answer.status != 200:
                raise RuntimeError(answer.read().decode())
            data, last_id = "", ""
            for line in answer:
                name, _, value = line.decode().rstrip("\r\n").partition(": ")
                if name == "data":
                    data = value
                elif name == "id":
                    last_id = value
                elif not name and data:  # a blank line: the event is whole
                    if data == "[DONE]":
                        return
                    yield self.take(json.loads(data), last_id)
                    data, last_id = "", ""
            raise ConnectionError("the stream ended early")
        finally:
            connection.close()

    def take(self, event, last_id):
        if "error" in event:
            error = ConnectionError if event["error"]["code"] == 503 else RuntimeError
            raise error(event["error"]["message"])
        for choice in event["choices"]:
            self.token_ids[choice["index"]] += choice["token_ids"]
        self.last_id = last_id or self.last_id
        return event


def stream(servers, path, body, patience_s=30.0):
    """The events of an answer, from whichever router is there, for patience_s without a new one."""
    s, n_tries, since = Stream(path, body), 0, time.monotonic()
    while True:
        try:
            for event in s.read(servers[n_tries % len(servers)]):
                since = time.monotonic()
                yield event
            return
        except LOST as e:
            n_tries += 1
            if time.monotonic() - since > patience_s:
                raise
            print(f"\n{e}: going on at the next router", file=sys.stderr)
        rounds = min(n_tries // len(servers), 5)
        time.sleep(rounds and random.uniform(0.05, 0.1) * 2**rounds)


def main():
    body = {"prompt": sys.argv[2], "max_tokens": 60}
    for event in stream(sys.argv[1].split(","), "/v1/completions", body):
        for choice in event["choices"]:
            print(choice["text"], end="", flush=True)
    print()


if __name__ == "__main__":
    main()
