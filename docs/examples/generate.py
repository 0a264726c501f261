#!/usr/bin/python3
"""Streams an answer, and goes on at the next router when one is lost.

    PYTHONPATH=build/python python3 docs/examples/generate.py 127.0.0.1:7600,127.0.0.1:7601 "Once"

Tokens are a function of the request and its seed, so any router of the fleet can go on behind what
this client has: `Received` counts that, and says it in the request's `resume_from`."""
import random
import sys
import time

import grpc
from tandem.v1 import inference_pb2 as pb


class Received:
    """What has come of an answer."""
    def __init__(self):
        self.request_id, self.n_messages, self.resume = "", 0, pb.ResumeFrom()

    def take(self, m):
        self.n_messages += 1
        if m.request_id:
            self.request_id = m.request_id
        if m.max_tokens:  # a first message
            self.resume.seed = (m.seed - m.choice) % 2**64
            self.resume.max_tokens = m.max_tokens
            self.resume.prompt_hash = m.prompt_hash
        self.resume.prompt_logprobs += len(m.prompt_logprobs)
        while len(self.resume.choices) <= m.choice:
            self.resume.choices.add()
        c = self.resume.choices[m.choice]
        c.token_ids.extend(m.token_ids)
        c.text_bytes += len(m.text.encode())
        c.reasoning_bytes += len(m.reasoning.encode())
        for call in m.tool_calls:
            c.tool_calls += bool(call.name)
            c.argument_bytes += len(call.arguments.encode())
        c.finished = c.finished or m.finish_reason != pb.FINISH_NONE

    def continued(self, request):
        """The request that goes on behind what has come."""
        again = pb.GenerateRequest()
        again.CopyFrom(request)
        if self.resume.max_tokens:
            again.request_id = self.request_id
            again.resume_from.CopyFrom(self.resume)
        return again


def generate(channels, request, patience_s=30.0):
    """The messages of an answer. A router that is lost, or that drains, is followed by the next of
    the channels, for patience_s without anything new."""
    request.return_token_ids = True  # else all that has come would be computed again
    received, n_before, n_tries, since = Received(), 0, 0, time.monotonic()
    while True:
        call = channels[n_tries % len(channels)].unary_stream(
            "/tandem.v1.Inference/Generate",
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateResponse.FromString)
        try:
            for message in call(received.continued(request)):
                received.take(message)
                yield message
            return
        except grpc.RpcError as e:
            if received.n_messages > n_before:
                n_before, since = received.n_messages, time.monotonic()
            n_tries += 1
            if e.code() != grpc.StatusCode.UNAVAILABLE or time.monotonic() - since > patience_s:
                raise
            print(f"\n{e.details()}: going on at the next router", file=sys.stderr)
        rounds = min(n_tries // len(channels), 5)
        time.sleep(rounds and random.uniform(0.05, 0.1) * 2**rounds)


def main():
    servers, prompt = sys.argv[1].split(","), sys.argv[2]
    request = pb.GenerateRequest(prompt=prompt, stop=pb.StopConditions(max_tokens=60))
    for message in generate([grpc.insecure_channel(s) for s in servers], request):
        print(message.text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
