"""KServe's Open Inference Protocol v2, over gRPC and its HTTP twin, gives what tandem.v1 gives;
what it does not take is refused by name, and a client that leaves frees what it held."""
import json
import re
import struct

import grpc
import pytest

from harness import PATIENT, SLOW, Cluster, pb
from inference import grpc_service_pb2 as kpb
from test_http import Http
from test_tenants import ACME, bearer, hashed
from test_tenants import write as write_tenants

Code = grpc.StatusCode
TALE = "Once upon a time"
SERVICE = "/inference.GRPCInferenceService/"


def raw_bytes(text):
    return struct.pack("<I", len(text)) + text


class KServe:
    """The service of one cluster, by calls of plain grpcio."""
    def __init__(self, cluster):
        self.cluster = cluster

    def ask(self, method, request, response, metadata=None):
        return self.cluster.unary(SERVICE + method, request, response, timeout=60 * SLOW,
                                  metadata=metadata)

    def infer(self, request, metadata=None):
        return self.ask("ModelInfer", request, kpb.ModelInferResponse, metadata)

    def stream(self, requests, timeout=60, metadata=None):
        call = self.cluster.channel.stream_stream(
            SERVICE + "ModelStreamInfer",
            request_serializer=kpb.ModelInferRequest.SerializeToString,
            response_deserializer=kpb.ModelStreamInferResponse.FromString)
        return call(iter(requests), timeout=timeout * SLOW, metadata=metadata)


def request(text=TALE, raw=False, id="", flags=None, sampling=None, outputs=(), model="pocket",
            **parameters):
    """A ModelInferRequest; flags: BOOL tensors; sampling: the JSON of sampling_parameters."""
    r = kpb.ModelInferRequest(model_name=model, id=id)
    tensors = [("text_input", "BYTES", text.encode() if isinstance(text, str) else text)]
    if sampling is not None:
        text = json.dumps(sampling, separators=(",", ":")).encode()
        tensors.append(("sampling_parameters", "BYTES", text))
    tensors += [(name, "BOOL", value) for name, value in (flags or {}).items()]
    for name, datatype, value in tensors:
        t = r.inputs.add(name=name, datatype=datatype, shape=[1])
        if raw:
            r.raw_input_contents.append(
                raw_bytes(value) if datatype == "BYTES" else bytes([value]))
        elif datatype == "BYTES":
            t.contents.bytes_contents.append(value)
        else:
            t.contents.bool_contents.append(value)
    for name in outputs:
        r.outputs.add(name=name)
    for name, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
        setattr(r.parameters[name], kind[type(value)], value)
    return r


def tensors(response):
    """{name: value} of an answer, whichever form it has."""
    out = {}
    for i, t in enumerate(response.outputs):
        assert list(t.shape) == [1]
        if response.raw_output_contents:
            raw = response.raw_output_contents[i]
            if t.datatype == "BYTES":
                assert struct.unpack("<I", raw[:4])[0] == len(raw) - 4
                out[t.name] = raw[4:].decode()
            else:
                out[t.name], = struct.unpack("<I", raw)
        elif t.datatype == "BYTES":
            out[t.name] = t.contents.bytes_contents[0].decode()
        else:
            out[t.name] = t.contents.uint_contents[0]
    return out


@pytest.fixture(scope="module")
def cluster():
    # a busy machine has taken longer than a minute to make what a late reader waits for
    router_args = ["--http-listen", "127.0.0.1:0", "--test-client-stall-ms", 600000]
    with Cluster(router_args=router_args, **PATIENT) as c:
        c.http, c.kserve = Http(c), KServe(c)
        yield c
        c.wait_idle()


SAMPLINGS = [{"temperature": 0}, {"temperature": 1.2, "seed": 7},
             {"temperature": 0.8, "seed": 11, "top_k": 20, "top_p": 0.9}]


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_infer_equals_grpc(cluster, sampling, raw):
    want = cluster.generate(prompt=TALE, max_tokens=24, **sampling)
    by_name = dict(sampling, max_tokens=24)
    as_text = {k: str(v) for k, v in by_name.items()}
    exclude = {"exclude_input_in_output": True}
    for r in (request(raw=raw, flags=exclude, **by_name), request(raw=raw, flags=exclude,
                                                                  **as_text),
              request(raw=raw, flags=exclude, sampling=by_name),
              request(raw=raw, flags=exclude, sampling=as_text, max_tokens=3)):
        got = cluster.kserve.infer(r)
        assert tensors(got) == {"text_output": want.text}
        assert bool(got.raw_output_contents) == raw
        assert (got.model_name, got.model_version) == ("pocket", "1")
        assert got.parameters["triton_final_response"].bool_param
    whole = cluster.kserve.infer(request(raw=raw, **by_name))
    assert tensors(whole)["text_output"] == TALE + want.text


def test_defaults_are_a_completion_s(cluster):
    got = cluster.kserve.infer(
        request(id="mine", model="", outputs=["num_output_tokens", "finish_reason"],
                flags={"return_num_input_tokens": True}, temperature=0))
    want = cluster.generate(prompt=TALE, max_tokens=16, temperature=0)
    assert got.id == "mine" and tensors(got) == {
        "finish_reason": "length", "num_input_tokens": want.usage.prompt_tokens,
        "num_output_tokens": 16
    }


@pytest.mark.parametrize("raw", [False, True])
def test_stream_equals_grpc(cluster, raw):
    """Several requests on one stream; each one's pieces are its text, and the last piece says
    so. A wrong one is an error message, and the stream goes on."""
    prompts = {f"id-{i}": f"{TALE} {i}" for i in range(4)}
    requests = [
        request(p, raw=raw, id=k, flags={"stream": True, "return_num_output_tokens": True},
                temperature=0, max_tokens=20, ignore_eos=True) for k, p in prompts.items()
    ]
    requests.insert(2, request(id="wrong", temperature=-1.0))
    requests.append(request(id="whole", temperature=0, max_tokens=5))
    pieces, errors = {}, {}
    for m in cluster.kserve.stream(requests):
        r = m.infer_response
        if m.error_message:
            errors[r.id] = m.error_message
        else:
            pieces.setdefault(r.id, []).append(r)
    assert list(errors) == ["wrong"] and "temperature is -1" in errors["wrong"]
    for k, p in prompts.items():
        want = cluster.generate(prompt=p, max_tokens=20, temperature=0, ignore_eos=True)
        assert "".join(tensors(r)["text_output"] for r in pieces[k]) == want.text
        assert sum(tensors(r)["num_output_tokens"] for r in pieces[k]) == 20
        assert len(pieces[k]) > 1  # a reader that is behind gets several tokens in a piece
        last = [r.parameters["triton_final_response"].bool_param for r in pieces[k]]
        assert last == [False] * (len(last) - 1) + [True]
    assert len(pieces.pop("whole")) == 1 and set(pieces) == set(prompts)


def read_late(cluster, begin, n_requests):
    """The messages of a call: not one is taken before the router has made all."""
    cluster.wait_idle(60)
    n_before = cluster.status().finished
    call = begin()
    cluster.wait_finished(n_before + n_requests, 60 * SLOW)
    cluster.wait_idle(60)
    return list(call)


def test_a_slow_reader_gets_several_tokens_in_a_message(cluster):
    """At both gRPC doors: fewer messages, and nothing lost. What the connection holds, 64 KiB of
    window and as much in core, goes as it comes."""
    n = 1200
    native = cluster.request(prompt=TALE, max_tokens=n, temperature=0, ignore_eos=True, logprobs=20)
    ours = request(flags={"stream": True, "return_num_output_tokens": True}, temperature=0,
                   max_tokens=n, ignore_eos=True)
    options = [("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(f"127.0.0.1:{cluster.port}", options) as channel:
        generate = channel.unary_stream("/tandem.v1.Inference/Generate",
                                        request_serializer=pb.GenerateRequest.SerializeToString,
                                        response_deserializer=pb.GenerateResponse.FromString)
        infer = channel.stream_stream(
            SERVICE + "ModelStreamInfer",
            request_serializer=kpb.ModelInferRequest.SerializeToString,
            response_deserializer=kpb.ModelStreamInferResponse.FromString)
        slow = read_late(cluster, lambda: generate(native, timeout=300 * SLOW), 1)
        want = cluster.generate(native)
        assert [t for m in slow for t in m.token_ids] == want.tokens and len(want.tokens) == n
        assert [(lp.logprob, [(t.token, t.logprob) for t in lp.top]) for m in slow
                for lp in m.logprobs] == want.logprobs
        assert "".join(m.text for m in slow) == want.text
        assert slow[0].prompt_tokens and slow[-1].usage.output_tokens == n
        assert all(not m.finish_reason for m in slow[:-1]) and slow[-1].finish_reason
        assert len(slow) < n * 3 / 4 and max(len(m.token_ids) for m in slow) > 100
        asked = []
        for name in "abc":
            asked.append(kpb.ModelInferRequest())
            asked[-1].CopyFrom(ours)
            asked[-1].id = name
        late = read_late(cluster, lambda: infer(iter(asked), timeout=300 * SLOW), len(asked))
        slow = [m.infer_response for m in late]
        assert len(slow) < 3 * n * 3 / 4
        assert max(tensors(r)["num_output_tokens"] for r in slow) > 100
        for name in "abc":
            mine = [r for r in slow if r.id == name]
            assert "".join(tensors(r)["text_output"] for r in mine) == want.text
            assert sum(tensors(r)["num_output_tokens"] for r in mine) == n
            last = [r.parameters["triton_final_response"].bool_param for r in mine]
            assert last == [False] * (len(last) - 1) + [True]


def refused(text_datatype="BYTES", **change):
    r = request()
    r.inputs[0].datatype = text_datatype
    for name, value in change.items():
        setattr(r, name, value)
    return r


def with_tensor(**fields):
    r = request()
    r.inputs.add(**fields)
    return r


def broken_raw(raw):
    r = request(raw=True)
    r.raw_input_contents[0] = raw
    return r


def shaped(*shape):
    r = request()
    r.inputs[0].shape[:] = shape
    return r


REFUSED = [
    (request(model="gpt-5"), Code.NOT_FOUND, 'model "gpt-5" is not served here'),
    (refused(model_version="3"), Code.NOT_FOUND, 'model version "3" is not served'),
    (refused(text_datatype="FP32"), Code.INVALID_ARGUMENT, 'datatype "FP32", must be BYTES'),
    (refused(id="x" * 128), Code.INVALID_ARGUMENT, "id has 128 bytes, limit 127"),
    (kpb.ModelInferRequest(model_name="pocket"), Code.INVALID_ARGUMENT, "text_input is missing"),
    (request(""), Code.INVALID_ARGUMENT, "prompt is empty"),
    (request(b"\xff"), Code.INVALID_ARGUMENT, "text_input: its contents must be one element of "
     "BYTES in UTF-8"),
    (request(temperature=0, max_tokens=0), Code.INVALID_ARGUMENT, "stop.max_tokens is 0, must be "),
    (request(max_tokens="many"), Code.INVALID_ARGUMENT, "max_tokens must be an integer"),
    (request(temperature="warm"), Code.INVALID_ARGUMENT, "temperature must be a number"),
    (request(ignore_eos="perhaps"), Code.INVALID_ARGUMENT, "ignore_eos must be true or false"),
    (request(n=2), Code.INVALID_ARGUMENT, "n must be 1"),
    (request(logprobs=3), Code.INVALID_ARGUMENT, "logprobs must be left out"),
    (request(stop_token_ids="[1,"), Code.INVALID_ARGUMENT, "stop_token_ids"),
    (request(sampling={"temprature": 0}), Code.INVALID_ARGUMENT, '"temprature"'),
    (request(sampling={"guided_json": {"not": {"pattern": "a"}}}), Code.INVALID_ARGUMENT,
     "the keyword not is supported for"),
    (request(sampling=[1]), Code.INVALID_ARGUMENT, "sampling_parameters must be a JSON object"),
    (request(sampling=[[]] * 700000), Code.INVALID_ARGUMENT,
     "sampling_parameters: request body has 1400001 values, limit 1114112"),
    (request(stop_token_ids="[" + "0," * 1200000 + "0]"), Code.INVALID_ARGUMENT,
     "stop_token_ids: request body has 1200002 values, limit 1114112"),
    (request(flags={"stream": True}), Code.INVALID_ARGUMENT, "stream is true, must be false"),
    (with_tensor(name="image", datatype="BYTES", shape=[1]), Code.INVALID_ARGUMENT, '"image"'),
    (request(outputs=["logits"]), Code.INVALID_ARGUMENT, 'output "logits" does not exist'),
    (shaped(2), Code.INVALID_ARGUMENT, "text_input must have one element"),
    (shaped(*[1] * 9), Code.INVALID_ARGUMENT, "or up to 8 ones"),
    (shaped(*[1] * 129), Code.INVALID_ARGUMENT, "inputs.shape has 129 elements, limit 128"),
    (broken_raw(b"\x05\0\0\0abc"), Code.INVALID_ARGUMENT, "text_input: its contents"),
    (broken_raw(b"\xff\xff\xff\xff"), Code.INVALID_ARGUMENT, "text_input: its contents"),
    (broken_raw(b""), Code.INVALID_ARGUMENT, "text_input: its contents"),
    (request(**{f"p{i}": 1 for i in range(65)}), Code.INVALID_ARGUMENT,
     "parameters has 65 elements, limit 64"),
]


@pytest.mark.parametrize("wrong,code,words", REFUSED, ids=[w for _, _, w in REFUSED])
def test_refusals_by_name(cluster, wrong, code, words):
    with pytest.raises(grpc.RpcError) as e:
        cluster.kserve.infer(wrong)
    assert e.value.code() == code and words in e.value.details(), e.value.details()


def test_streams_that_would_repeat_their_prompt_are_refused(cluster):
    wrong = request(flags={"stream": True, "exclude_input_in_output": False})
    m, = cluster.kserve.stream([wrong])
    assert "exclude_input_in_output is false, must be true" in m.error_message


def test_small_calls(cluster):
    k = cluster.kserve
    assert k.ask("ServerLive", kpb.ServerLiveRequest(), kpb.ServerLiveResponse).live
    assert k.ask("ServerReady", kpb.ServerReadyRequest(), kpb.ServerReadyResponse).ready

    def ready(**which):
        return k.ask("ModelReady", kpb.ModelReadyRequest(**which), kpb.ModelReadyResponse).ready

    assert ready(name="pocket") and ready(name="pocket", version="1")
    assert not ready(name="gpt-5") and not ready(name="pocket", version="2")
    server = k.ask("ServerMetadata", kpb.ServerMetadataRequest(), kpb.ServerMetadataResponse)
    assert server.name == "tandem" and re.fullmatch(r"\d+\.\d+\.\d+", server.version)
    model = k.ask("ModelMetadata", kpb.ModelMetadataRequest(name="pocket"),
                  kpb.ModelMetadataResponse)
    assert (model.name, list(model.versions), model.platform) == ("pocket", ["1"], "tandem")
    assert [(t.name, t.datatype, list(t.shape))
            for t in model.inputs][:2] == [("text_input", "BYTES", [1]), ("stream", "BOOL", [1])]
    assert "text_output" in [t.name for t in model.outputs]
    with pytest.raises(grpc.RpcError) as e:
        k.ask("ModelMetadata", kpb.ModelMetadataRequest(name="gpt-5"), kpb.ModelMetadataResponse)
    assert e.value.code() == Code.NOT_FOUND


def test_http_small_paths(cluster):
    ask = cluster.http.json
    assert ask("/v2") == (200, {"name": "tandem", "version": ask("/version")[1]["version"],
                                "extensions": []})
    assert ask("/v2/health/live") == (200, {"live": True})
    assert ask("/v2/health/ready") == (200, {"ready": True})
    assert ask("/v2/models/pocket/ready") == (200, {"ready": True})
    assert ask("/v2/models/pocket/versions/1/ready") == (200, {"ready": True})
    status, model = ask("/v2/models/pocket")
    assert status == 200 and model["versions"] == ["1"]
    assert {"name": "text_output", "datatype": "BYTES", "shape": [1]} in model["outputs"]
    for path, wanted in (("/v2/models/gpt-5", 404), ("/v2/models/gpt-5/ready", 404),
                         ("/v2/models/pocket/versions/7", 404), ("/v2/models/", 404),
                         ("/v2/models//ready", 404), ("/v2/nothing", 404),
                         ("/v2/models/pocket/infer", 405)):
        status, body = ask(path)
        assert status == wanted and list(body) == ["error"], (path, status, body)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_http_equals_grpc(cluster, sampling):
    want = cluster.generate(prompt=TALE, max_tokens=24, **sampling).text
    body = {"text_input": TALE, "parameters": {**sampling, "max_tokens": 24}}
    assert cluster.http.json("/v2/models/pocket/generate",
                             body) == (200, {"model_name": "pocket", "model_version": "1",
                                             "text_output": TALE + want})
    body["exclude_input_in_output"] = True
    assert cluster.http.json("/v2/models/pocket/generate", body)[1]["text_output"] == want
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": [[TALE]]}
    exclude = {"name": "exclude_input_in_output", "datatype": "BOOL", "shape": [1], "data": [True]}
    status, got = cluster.http.json(
        "/v2/models/pocket/versions/1/infer", {
            "id": "a", "inputs": [tensor, exclude], "parameters": body["parameters"],
            "outputs": [{"name": "text_output"}, {"name": "num_output_tokens"}]
        })
    assert status == 200 and got == {
        "id": "a", "model_name": "pocket", "model_version": "1", "outputs": [{
            "name": "text_output", "datatype": "BYTES", "shape": [1], "data": [want]
        }, {"name": "num_output_tokens", "datatype": "UINT32", "shape": [1], "data": [24]}]
    }


def events(cluster, body):
    status, headers, text = cluster.http.ask("/v2/models/pocket/generate_stream", body)
    assert status == 200 and headers["Content-Type"].startswith("text/event-stream"), text
    lines = text.decode().split("\n\n")
    assert lines.pop() == ""
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_http_streams(cluster):
    body = {
        "text_input": TALE, "stream": True, "parameters": {
            "temperature": 0, "max_tokens": 24, "ignore_eos": True
        }
    }
    want = cluster.generate(prompt=TALE, max_tokens=24, temperature=0, ignore_eos=True).text
    got = events(cluster, body)
    assert len(got) > 5 and "".join(e["text_output"] for e in got) == want
    one, = events(cluster, {**body, "stream": False})
    assert one["text_output"] == TALE + want


@pytest.mark.parametrize("path,body,status,words", [
    ("generate", b"{", 400, "request body"), ("generate", [], 400, "must be a JSON object"),
    ("generate", {}, 400, "text_input is missing"),
    ("generate", {"text_input": 3}, 400, "text_input must be a string"),
    ("generate", {"text_input": TALE, "stream": True}, 400, "stream is true, must be false"),
    ("generate", {"text_input": TALE, "max_tokens": 0}, 400, "stop.max_tokens is 0"),
    ("generate_stream", {"text_input": TALE, "top_k": -5}, 400, "top_k"),
    ("generate", {"text_input": TALE, "guided_json": {"not": {"pattern": "a"}}}, 400,
     "the keyword not is supported for"),
    ("infer", {"inputs": 3}, 400, "inputs must be a list"),
    ("infer", {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "parameters": {
        "binary_data_size": 9}}]}, 400, "binary_data_size"),
    ("infer", {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [2], "data":
                           ["a", "b"]}]}, 400, "text_input must have one element"),
    ("infer", {"inputs": [{"name": "x"}] * 17}, 400, "inputs has 17 tensors, limit 16"),
])
def test_http_refusals_by_name(cluster, path, body, status, words):
    got, answer = cluster.http.json(f"/v2/models/pocket/{path}", body)
    assert got == status and list(answer) == ["error"] and words in answer["error"], answer


def test_http_binary_extension_is_refused_by_name(cluster):
    got, answer = cluster.http.json("/v2/models/pocket/infer", b"{}\0\0\0\0", {
        "Inference-Header-Content-Length": "2"
    })
    assert got == 400 and "binary tensor data extension" in answer["error"]


def test_resuming_is_refused_by_name(cluster):
    """It would be answered from the beginning, and the client have the same text twice."""
    url, body = "/v2/models/pocket/generate_stream", {"text_input": TALE, "max_tokens": 2}
    assert cluster.http.ask(url, body, {"Last-Event-ID": ""})[0] == 200
    for name, answer in [("Last-Event-ID", cluster.http.json(url, body, {"Last-Event-ID": "7"})),
                         *((n, cluster.http.json(url, {**body, "parameters": {n: [[5]]}}))
                           for n in ("resume_from", "resume_token_ids"))]:
        assert answer[0] == 400, answer
        assert answer[1]["error"].startswith(f"{name}: a KServe stream cannot be resumed"), answer


def test_a_client_that_leaves_frees_its_requests(cluster):
    """A stream of several and a call of one, left while they run."""
    def ask():
        return request(id="x", flags={"stream": True}, max_tokens=1500, ignore_eos=True)

    with cluster.decode_stopped():
        stream = cluster.kserve.stream([ask(), ask(), ask()])
        cluster.wait_for(lambda: cluster.status().live == 3, "three live requests", 30 * SLOW)
        stream.cancel()
        cluster.wait_for(lambda: cluster.status().live == 0, "their end", 30 * SLOW)
        call = cluster.channel.unary_unary(
            SERVICE + "ModelInfer", request_serializer=kpb.ModelInferRequest.SerializeToString,
            response_deserializer=kpb.ModelInferResponse.FromString).future(
                request(max_tokens=1500, ignore_eos=True), timeout=60 * SLOW)
        cluster.wait_for(lambda: cluster.status().live == 1, "a live request", 30 * SLOW)
        call.cancel()
        cluster.wait_for(lambda: cluster.status().live == 0, "its end", 30 * SLOW)
    cluster.wait_idle()


def test_a_stream_has_a_bound_of_requests(cluster):
    def ask(i):
        return request(id=str(i), flags={"stream": True}, max_tokens=1000, ignore_eos=True)

    stream = cluster.kserve.stream([ask(i) for i in range(300)])
    refused_ids = []
    for m in stream:
        if m.error_message.startswith("256 requests are live on this stream"):
            refused_ids.append(int(m.infer_response.id))
        if len(refused_ids) == 44:
            break
    stream.cancel()
    assert refused_ids == list(range(256, 300))
    cluster.wait_idle(20)


def test_keys_bind_tenants(tmp_path):
    """As at the other doors: health is told to all, the rest to those with a key."""
    path = tmp_path / "tenants.json"
    write_tenants(path, {"name": "acme", "keys": [hashed(ACME)]})
    args = ["--tenants", path, "--http-listen", "127.0.0.1:0"]
    with Cluster(router_args=args, **PATIENT) as c:
        k, http = KServe(c), Http(c)
        model = kpb.ModelMetadataRequest(name="pocket")
        assert k.ask("ServerReady", kpb.ServerReadyRequest(), kpb.ServerReadyResponse).ready
        for ask in (lambda m: k.infer(request(), m), lambda m: list(
                k.stream([request()], metadata=m)), lambda m: k.ask(
                    "ModelMetadata", model, kpb.ModelMetadataResponse, m)):
            with pytest.raises(grpc.RpcError) as e:
                ask(bearer("nobody"))
            assert e.value.code() == Code.UNAUTHENTICATED
            assert ask(bearer(ACME))
        body = {"text_input": TALE, "max_tokens": 2}
        for path in ("/v2/models/pocket/generate", "/v2/models/pocket/generate_stream"):
            assert http.json(path, body)[0] == 401
            assert http.ask(path, body, {"Authorization": "Bearer " + ACME})[0] == 200
        assert http.json("/v2/models/pocket")[0] == 401
        c.wait_idle()
