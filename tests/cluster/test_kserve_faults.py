"""KServe's doors under faults: a worker that is killed in the middle of streams, clients that
leave, deadlines, two models by name and alias. What comes is what tandem.v1 gave before, token for
token."""
import json
import signal
import threading

import grpc
import pytest

from harness import PATIENT, SHORT, SLOW, Cluster
from inference import grpc_service_pb2 as kpb
from small_model import make_small
from test_http import Http
from test_kserve import SERVICE, KServe, request, tensors
from test_models import start_two

Code = grpc.StatusCode
N = 4 if SHORT else 8
VICTIM = "decode-0"
FLAGS = {"stream": True, "return_num_output_tokens": True}


def asked(i):
    """(model, prompt, parameters) of request i: mixed lengths, greedy and sampled, both models."""
    model = ("pocket", "small", "pocket", "tiny")[i % 4]
    return model, f"Story {i}. The little fox walked over the hill. " * (1 + i % 3 * 4), {
        "max_tokens": 30 + i, "temperature": 0.9 if i % 2 else 0.0, "seed": 100 + i,
        "ignore_eos": True
    }


def kserve_request(i, **flags):
    model, prompt, parameters = asked(i)
    return request(prompt, model=model, id=str(i), flags={**FLAGS, **flags}, **parameters)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    small = make_small(str(tmp_path_factory.mktemp("models") / "small"))
    with Cluster(decode=2, router_args=[
            "--model", f"small,tiny={small}", "--http-listen", "127.0.0.1:0", "--policy",
            "round_robin"
    ], **PATIENT) as c:
        start_two(c, small)
        c.kserve, c.http = KServe(c), Http(c)
        c.want = []
        for i in range(N):
            model, prompt, parameters = asked(i)
            r = c.generate(prompt=prompt, model=model, **parameters)
            assert r.code == Code.OK, r.details
            c.want.append((r.text, len(r.tokens)))
        yield c
        c.wait_idle()


def stream_all(c, pieces):
    """All requests on one stream; pieces[id] = the answers so far."""
    for m in c.kserve.stream([kserve_request(i) for i in range(N)], timeout=120):
        assert not m.error_message, m
        pieces.setdefault(m.infer_response.id, []).append(tensors(m.infer_response))


def check(c, pieces):
    for i, (text, n) in enumerate(c.want):
        got = pieces[str(i)]
        assert "".join(p["text_output"] for p in got) == text, i
        assert sum(p["num_output_tokens"] for p in got) == n, i


def over_http(c, i):
    model, prompt, parameters = asked(i)
    status, _, text = c.http.ask(f"/v2/models/{model}/generate_stream", {
        "text_input": prompt, "stream": True, "parameters": parameters
    })
    assert status == 200, text
    return "".join(
        json.loads(e.removeprefix("data: "))["text_output"]
        for e in text.decode().split("\n\n")[:-1])


def whole(c, i):
    model, prompt, parameters = asked(i)
    flags = {"exclude_input_in_output": True}
    return tensors(c.kserve.infer(request(prompt, model=model, flags=flags,
                                          **parameters)))["text_output"]


def run_doors(c):
    """A stream with all requests, and each of them by ModelInfer and by HTTP, at once."""
    pieces, texts = {}, [[None] * N, [None] * N]

    def one(at, door, i):
        texts[at][i] = door(c, i)

    threads = [threading.Thread(target=stream_all, args=(c, pieces))]
    for at, door in enumerate((whole, over_http)):
        threads += [threading.Thread(target=one, args=(at, door, i)) for i in range(N)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    check(c, pieces)
    assert texts == [[text for text, _ in c.want]] * 2


def test_a_killed_worker_is_not_seen(cluster):
    """kill -9 of a decode worker at its 40th token, with streams at both doors."""
    cluster.workers[VICTIM].signal(signal.SIGTERM)  # in its place one that will kill itself
    assert cluster.workers[VICTIM].wait_exit(20 * SLOW) == 0
    cluster.next_index["decode"] = 9
    victim = cluster.start_worker("decode", env={"TANDEM_FAULT": "decode_token:kill:40"})
    for _ in range(8):  # until it has met its end
        run_doors(cluster)
        if not victim.alive():
            break
    assert victim.wait_exit(1) == -signal.SIGKILL
    assert cluster.status().failovers > 0
    cluster.wait_idle()


def test_clients_that_leave_disturb_nobody(cluster):
    """Streams that are cancelled in the middle: the others' tokens stay, nothing is held."""
    pieces = {}
    whole_stream = threading.Thread(target=stream_all, args=(cluster, pieces))
    whole_stream.start()
    for i in range(N):
        stream = cluster.kserve.stream([kserve_request(i), kserve_request((i + 1) % N)])
        assert not next(stream).error_message
        stream.cancel()
    whole_stream.join()
    check(cluster, pieces)
    cluster.wait_idle()


def test_deadlines_free_what_they_held(cluster):
    """A worker that does not move: each call ends at its client's deadline, and holds nothing after
    the worker has gone on."""
    stopped = [d for name, d in cluster.workers.items() if d.alive() and "decode" in name]
    long = dict(max_tokens=1000, ignore_eos=True)
    for d in stopped:
        d.signal(signal.SIGSTOP)
    try:
        infer = cluster.channel.unary_unary(
            SERVICE + "ModelInfer", request_serializer=kpb.ModelInferRequest.SerializeToString,
            response_deserializer=kpb.ModelInferResponse.FromString)
        with pytest.raises(grpc.RpcError) as e:
            infer(request(model="tiny", **long), timeout=0.5)
        assert e.value.code() == Code.DEADLINE_EXCEEDED
        with pytest.raises(grpc.RpcError) as e:
            list(cluster.kserve.stream([request(flags=FLAGS, **long)] * 3, timeout=0.5 / SLOW))
        assert e.value.code() == Code.DEADLINE_EXCEEDED
    finally:
        for d in stopped:
            d.signal(signal.SIGCONT)
    cluster.wait_idle()
    run_doors(cluster)
