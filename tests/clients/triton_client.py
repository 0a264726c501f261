"""What a user of tritonclient does with a model of Triton's vLLM backend, against the gRPC address
in argv[1] and the HTTP address in argv[2]; or, with a key of a tenant in argv[3], what its streams
are told without one and with it. Prints one line of JSON: what came back, for test_triton.py to
compare."""
import asyncio
import json
import queue
import sys

import grpc
import numpy as np
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_aio
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

TALE = "Once upon a time"
SAMPLING = {"temperature": "0", "max_tokens": "16"}


def tensor(kind, name, value, **how):
    datatype = "BOOL" if isinstance(value, bool) else "BYTES"
    t = kind.InferInput(name, [1], datatype)
    data = np.array([value]) if datatype == "BOOL" else np.array([value.encode()], dtype=np.object_)
    t.set_data_from_numpy(data, **how)
    return t


def inputs(kind, stream=None, exclude=None, **how):
    all_of_them = [
        tensor(kind, "text_input", TALE, **how),
        tensor(kind, "sampling_parameters", json.dumps(SAMPLING), **how),
        tensor(kind, "return_num_output_tokens", True, **how)
    ]
    if stream is not None:
        all_of_them.append(tensor(kind, "stream", stream, **how))
    if exclude is not None:
        all_of_them.append(tensor(kind, "exclude_input_in_output", exclude, **how))
    return all_of_them


def text(result):
    return result.as_numpy("text_output")[0].decode() if isinstance(
        result.as_numpy("text_output")[0], bytes) else result.as_numpy("text_output")[0]


def common(kind, client, **how):
    """What both protocols have."""
    server, model = client.get_server_metadata(), client.get_model_metadata("pocket")
    whole = client.infer("pocket", inputs(kind, **how))
    return {
        "live": client.is_server_live(), "ready": client.is_server_ready(), "model_ready":
        client.is_model_ready("pocket"), "other_ready": client.is_model_ready("gpt-5"), "server":
        server["name"] if isinstance(server, dict) else server.name, "model":
        model["name"] if isinstance(model, dict) else model.name, "infer": text(whole), "tokens":
        int(whole.as_numpy("num_output_tokens")[0]), "excluded":
        text(client.infer("pocket", inputs(kind, exclude=True, **how)))
    }


def piece(result):
    response = result.get_response()
    return response.id, [text(result), response.parameters["triton_final_response"].bool_param]


def take(results, n):
    """{id: pieces} of n requests."""
    pieces, ended = {}, 0
    while ended < n:
        result, error = results.get(timeout=60)
        if error:
            raise error
        key, one = piece(result)
        pieces.setdefault(key, []).append(one)
        ended += one[1]
    return pieces


def stream(client):
    results = queue.Queue()
    client.start_stream(callback=lambda result, error: results.put((result, error)))
    for i in range(3):
        client.async_stream_infer("pocket", inputs(triton_grpc, stream=True), request_id=str(i))
    pieces = take(results, 3)
    client.async_stream_infer("pocket", [tensor(triton_grpc, "text_input", TALE)],
                              parameters={"temperature": "-1"})
    _, error = results.get(timeout=60)
    client.stop_stream()
    return pieces, str(error)


async def aio_stream(at):
    async def requests():
        for i in range(3):
            yield {
                "model_name": "pocket", "inputs": inputs(triton_grpc, stream=True), "request_id":
                str(i)
            }

    pieces = {}
    async with triton_aio.InferenceServerClient(at) as client:
        async for result, error in client.stream_infer(requests()):
            if error:
                raise error
            key, one = piece(result)
            pieces.setdefault(key, []).append(one)
    return pieces


def over_grpc(at):
    client = triton_grpc.InferenceServerClient(at)
    out = common(triton_grpc, client)
    out["stream"], out["stream_error"] = stream(client)
    out["aio_stream"] = asyncio.run(aio_stream(at))
    try:
        client.infer("gpt-5", inputs(triton_grpc))
    except InferenceServerException as e:
        out["error"] = [e.status(), "pocket" in e.message()]
    return out


def over_http(at):
    client = triton_http.InferenceServerClient(at)
    out = common(triton_http, client, binary_data=False)
    try:
        client.infer("pocket", inputs(triton_http, binary_data=True))
    except InferenceServerException as e:
        out["binary"] = [e.status(), "binary" in e.message()]
    return out


async def aio_stranger(at):
    async def nothing():
        await asyncio.sleep(60)
        yield {}

    async with triton_aio.InferenceServerClient(at) as client:
        try:
            async for _ in client.stream_infer(nothing()):
                return "an answer"
        except grpc.RpcError as e:
            return str(e.code())
    return "the end"


def with_keys(at, key):
    results = queue.Queue()
    client = triton_grpc.InferenceServerClient(at)

    def start(headers):
        client.start_stream(callback=lambda result, error: results.put((result, error)),
                            headers=headers)

    start(None)
    _, error = results.get(timeout=60)  # before it has sent a request
    client.stop_stream()
    start({"authorization": "Bearer " + key})
    client.async_stream_infer("pocket", inputs(triton_grpc, stream=True), request_id="0")
    pieces = take(results, 1)
    client.stop_stream()
    return {"stranger": error.status(), "aio_stranger": asyncio.run(aio_stranger(at)),
            "pieces": pieces["0"]}


if __name__ == "__main__" and len(sys.argv) > 3:
    print(json.dumps(with_keys(sys.argv[1], sys.argv[3])))
elif __name__ == "__main__":
    print(json.dumps({"grpc": over_grpc(sys.argv[1]), "http": over_http(sys.argv[2])}))
