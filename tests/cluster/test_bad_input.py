"""What nobody should send: every wrong field, size, byte and peer is refused with the right
status and a message that names field, value and limit, and the same daemons still answer the
reference request with the same tokens, with all pools empty."""
import concurrent.futures
import http.client
import math
import os
import queue
import random
import re
import socket
import struct
import threading
import time
import urllib.request
import warnings

import grpc
import proofs
import pytest

from harness import ROOT, SHORT, SLOW, Cluster, Daemon, pb, pocket_with, wpb
from raw import PREFACE, call, field, varint

Code = grpc.StatusCode
OK, INVALID, NOT_FOUND = Code.OK, Code.INVALID_ARGUMENT, Code.NOT_FOUND
EXHAUSTED, UNIMPLEMENTED = Code.RESOURCE_EXHAUSTED, Code.UNIMPLEMENTED
PRECONDITION, UNAVAILABLE = Code.FAILED_PRECONDITION, Code.UNAVAILABLE
CONTEXT, VOCAB = 2048, 2048  # of models/pocket
NAN, INF = math.nan, math.inf

GENERATE, TOKENIZE = "/tandem.v1.Inference/Generate", "/tandem.v1.Inference/Tokenize"
DECODE, PREFILL, ABORT = (f"/tandem.v1.Worker/{m}" for m in ("Decode", "Prefill", "Abort"))
JOIN = "/tandem.v1.Registry/Join"

# ---- sending bytes
# -------------------------------------------------------------------------------------------------


def expect(result, codes, *parts):
    codes = codes if isinstance(codes, tuple) else (codes, )
    assert result[0] in codes, result[:2]
    for part in parts:
        assert part in result[1], f"{part!r} is not in {result[1]!r}"


def channel_to(address):
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1),
               ("grpc.use_local_subchannel_pool", 1)]
    return grpc.insecure_channel(address, options)


REFERENCE = dict(prompt="Once upon a time, there was a little fox who lived in the forest.",
                 max_tokens=5 if SHORT else 12, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def cluster():
    with Cluster(router_args=["--policy", "round_robin", "--max-message-bytes", "32MiB"],
                 worker_args=["--metrics-listen", "127.0.0.1:0"]) as c:
        want = c.generate(**REFERENCE)
        assert want.code == OK and len(want.tokens) == REFERENCE["max_tokens"]
        c.want = want.tokens
        c.workers_at = {w.name: channel_to(w.address) for w in c.status().workers}
        c.first_pids = {d.pid for d in c.all}
        yield c
        for ch in c.workers_at.values():
            ch.close()


@pytest.fixture(autouse=True)
def still_serves(request):
    """After each test that used the shared cluster: the same processes, the same tokens, nothing
    held."""
    yield
    if "cluster" not in request.fixturenames:
        return
    c = request.getfixturevalue("cluster")
    for d in c.all:
        assert d.alive(), f"{d.name} ended with {d.process.returncode}:\n{d.log()[-4000:]}"
    r = c.generate(**REFERENCE)
    assert (r.code, r.tokens) == (OK, c.want), (r.code, r.details)
    c.wait_idle()
    assert {d.pid for d in c.all} == c.first_pids


def cases(table):
    """In sanitizer builds a part of the table: what they add is in the code that all rows share."""
    table = table[::4] if SHORT else table
    return pytest.mark.parametrize("case", table, ids=[c[0] for c in table])


# ---- fields of Generate
# -------------------------------------------------------------------------------------------------

FIELDS = [
    ("model", dict(prompt="a",
                   model="no-such-model"), NOT_FOUND, ["model", "no-such-model", "pocket"]),
    ("model_long", dict(prompt="a", model="x" * 100000), NOT_FOUND, ["model", "xxx", "pocket"]),
    ("no_input", dict(), INVALID, ["input is missing", "prompt", "chat", "token_ids"]),
    ("prompt_empty", dict(prompt=""), INVALID, ["prompt", "empty"]),
    ("prompt_long", dict(prompt="fox " * 3000), INVALID, ["prompt", str(CONTEXT)]),
    ("prompt_too_many_bytes", dict(prompt="x" * 4000000), INVALID, [
        "prompt", "4000000", str(CONTEXT)
    ]), ("ids_empty", dict(ids=[]), INVALID, ["token_ids", "empty"]),
    ("ids_negative", dict(ids=[1, -1]), INVALID, ["token_ids[1]", "-1", f"0..{VOCAB - 1}"]),
    ("ids_vocab", dict(ids=[5, 6, VOCAB]), INVALID, ["token_ids[2]",
                                                     str(VOCAB), f"0..{VOCAB - 1}"]),
    ("ids_max", dict(ids=[2**31 - 1]), INVALID, ["token_ids[0]", str(2**31 - 1)]),
    ("ids_min", dict(ids=[-(2**31)]), INVALID, ["token_ids[0]", str(-(2**31))]),
    ("ids_context", dict(ids=[5] * CONTEXT), INVALID, ["token_ids", str(CONTEXT)]),
    ("chat_empty", dict(chat=[]), INVALID, ["chat.messages", "empty"]),
    ("chat_many", dict(chat=[("user", "a")] * 5000), INVALID, ["chat.messages", "5000", "4096"]),
    ("chat_role", dict(chat=[("wizard", "a")]), INVALID, ["role", "wizard"]),
    ("chat_role_empty", dict(chat=[("", "a")]), INVALID, ["role"]),
    ("chat_long", dict(chat=[("user", "fox " * 3000)]), INVALID, ["prompt", str(CONTEXT)]),
    ("max_tokens_0", dict(prompt="a", max_tokens=0), INVALID, ["stop.max_tokens", "0", "1.."]),
    ("max_tokens_negative", dict(prompt="a",
                                 max_tokens=-7), INVALID, ["stop.max_tokens", "-7", "1.."]),
    ("max_tokens_context", dict(
        prompt="a", max_tokens=CONTEXT), INVALID, ["stop.max_tokens",
                                                   str(CONTEXT), "1.."]),
    ("max_tokens_huge", dict(prompt="a",
                             max_tokens=2**63 - 1), INVALID, ["stop.max_tokens",
                                                              str(2**63 - 1)]),
    ("max_tokens_min", dict(prompt="a",
                            max_tokens=-(2**63)), INVALID, ["stop.max_tokens",
                                                            str(-(2**63))]),
    ("n_129", dict(prompt="a", n=129), INVALID, ["sampling.n", "129", "1..128"]),
    ("n_max", dict(prompt="a", n=2**32 - 1), INVALID, ["sampling.n", str(2**32 - 1)]),
    ("logprobs_negative", dict(prompt="a", logprobs=-1), INVALID, ["logprobs", "-1", "0..20"]),
    ("logprobs_21", dict(prompt="a", logprobs=21), INVALID, ["logprobs", "21", "20"]),
    ("top_k_negative", dict(prompt="a", top_k=-1), INVALID, ["top_k", "-1", ">= 0"]),
    ("bias_token_negative", dict(
        prompt="a", logit_bias=[(-1, 1.0)]), INVALID, ["logit_bias[0].token", "-1",
                                                       str(VOCAB)]),
    ("bias_token_vocab", dict(prompt="a", logit_bias=[(1, 1.0), (VOCAB, 1.0)]), INVALID, [
        "logit_bias[1].token", str(VOCAB)
    ]),
    ("bias_high", dict(prompt="a",
                       logit_bias=[(1, 101.0)]), INVALID, ["logit_bias[0].bias", "101", "100"]),
    ("bias_nan", dict(prompt="a", logit_bias=[(1, NAN)]), INVALID, ["logit_bias[0].bias", "nan"]),
    ("bias_inf", dict(prompt="a", logit_bias=[(1, -INF)]), INVALID, ["logit_bias[0].bias", "inf"]),
    ("bias_many", dict(prompt="a",
                       logit_bias=[(1, 0.0)] * 1025), INVALID, ["logit_bias", "1025", "1024"]),
    ("stop_empty", dict(prompt="a", stop=["x", ""]), INVALID, ["stop[1]", "empty"]),
    ("stop_many", dict(prompt="a", stop=[f"s{i}" for i in range(17)]), INVALID, ["stop", "16"]),
    ("stop_long", dict(prompt="a", stop=["x" * 1025]), INVALID, ["stop[0]", "1025", "1024"]),
    ("stop_ids_negative", dict(prompt="a", stop_token_ids=[-3]), INVALID, [
        "stop.stop_token_ids[0]", "-3", f"0..{VOCAB - 1}"
    ]),
    ("stop_ids_vocab", dict(
        prompt="a", stop_token_ids=[1,
                                    VOCAB]), INVALID, ["stop.stop_token_ids[1]",
                                                       str(VOCAB)]),
    ("stop_ids_many", dict(
        prompt="a", stop_token_ids=[1] * 200), INVALID, ["stop.stop_token_ids", "200", "limit"]),
    ("request_id_long", dict(prompt="a",
                             request_id="r" * 10000), INVALID, ["request_id", "10000", "limit"]),
]
for _name, _bad in (("temperature", [-0.1, 101.0]), ("top_p", [0.0, -1.0, 1.5]), ("min_p", [
        -0.5, 1.5
]), ("repetition_penalty", [0.0, -1.0]), ("presence_penalty", [-2.5, 2.5]), ("frequency_penalty", [
        -2.5, 2.5
])):
    for _v in [*_bad, NAN, INF, -INF]:
        FIELDS.append((f"{_name}_{_v}", {"prompt": "a", _name: _v}, INVALID, [_name, f"{_v:g}"]))


@cases(FIELDS)
def test_field(cluster, case):
    _, kwargs, code, parts = case
    r = cluster.generate(**{"max_tokens": 4, **kwargs})
    expect((r.code, r.details), code, *parts)
    assert r.n_messages == 0


def test_limits_are_inclusive(cluster):
    """What lies just inside each limit is served."""
    inside = [
        dict(temperature=100.0),
        dict(top_p=1.0),
        dict(top_p=1e-6),
        dict(min_p=1.0),
        dict(min_p=0.0),
        dict(repetition_penalty=1e-3),
        dict(top_k=2**31 - 1),
        dict(presence_penalty=2.0, frequency_penalty=-2.0),
        dict(logprobs=20),
        dict(logprobs=0),
        dict(stop=["x" * 1024] * 16),
        dict(n=1),
        dict(logit_bias=[(VOCAB - 1, -100.0), (0, 100.0)]),
        dict(stop_token_ids=[0, VOCAB - 1] * 60),
        dict(seed=2**64 - 1)
    ]
    results = cluster.generate_many(
        [cluster.request(prompt="A fox", max_tokens=2, ignore_eos=True, **kw) for kw in inside])
    assert [r.code for r in results] == [OK] * len(inside), [r.details for r in results]
    r = cluster.generate(ids=[5] * (CONTEXT - 1), max_tokens=1,
                         temperature=0)  # the last place of the context
    assert r.code == OK and len(r.tokens) == 1, r.details


def test_more_than_the_pool_can_ever_hold():
    with Cluster(kv_memory="640KiB") as c:
        blocks = min(w.kv_blocks for w in c.status().workers)
        limit = blocks * 16
        assert limit < CONTEXT
        r = c.generate(ids=[5] * limit, max_tokens=1)
        expect((r.code, r.details), INVALID, "token_ids", str(limit))
        r = c.generate(prompt="fox " * limit, max_tokens=1)
        expect((r.code, r.details), INVALID, "prompt", str(limit))
        r = c.generate(prompt="A fox", max_tokens=limit)
        expect((r.code, r.details), INVALID, "stop.max_tokens", str(limit))
        r = c.generate(ids=[5] * (limit - 1), max_tokens=1, temperature=0)  # all of the pool
        assert r.code == OK and len(r.tokens) == 1, r.details
        r = c.generate(prompt="A fox", temperature=0, max_tokens=None,
                       ignore_eos=True)  # grows until the pool is full, then ends
        assert r.code == OK and r.finish == pb.FINISH_LENGTH, r.details
        assert r.usage.prompt_tokens + r.usage.output_tokens == limit, r.details
        c.wait_idle()


# ---- bytes of text
# -------------------------------------------------------------------------------------------------

BAD_UTF8 = [b"\xff", b"ab\xc3", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"a\x80b"]


@pytest.mark.parametrize("bad", BAD_UTF8, ids=[b.hex() for b in BAD_UTF8])
def test_invalid_utf8(cluster, bad):
    tail = pb.GenerateRequest(stop=pb.StopConditions(max_tokens=2)).SerializeToString()
    for data, what in [(field(2, b"A " + bad), "prompt"),
                       (field(3, field(1,
                                       field(1, b"user") + field(2, bad))), "content"),
                       (field(3, field(1,
                                       field(1, bad) + field(2, b"a"))), "role"),
                       (field(2, b"A fox") + field(8, bad), "request_id"),
                       (field(2, b"A fox") + field(1, bad), "model"),
                       (field(2, b"A fox") + field(7, field(2, bad)), "stop")]:
        expect(call(cluster.channel, GENERATE, data + tail), INVALID, what, "UTF-8")
    expect(call(cluster.channel, TOKENIZE, field(2, bad)), INVALID, "prompt", "UTF-8")


def test_nul_is_a_character(cluster):
    ids = {}
    for text in ("fox", "fox\0", "fox\0den", "\0", "fox\0\0den"):
        t = cluster.unary(TOKENIZE, pb.TokenizeRequest(prompt=text, no_special_tokens=True),
                          pb.TokenizeResponse)
        ids[text] = tuple(t.ids)
    assert len(set(ids.values())) == len(ids), ids  # nothing is cut at the NUL
    by_text = cluster.generate(prompt="fox\0den", max_tokens=4, temperature=0)
    assert by_text.code == OK and by_text.usage.prompt_tokens >= len(ids["fox\0den"])
    chat = cluster.generate(chat=[("user", "fox\0den")], max_tokens=4, temperature=0)
    cut = cluster.generate(chat=[("user", "fox")], max_tokens=4, temperature=0)
    assert chat.code == cut.code == OK and chat.usage.prompt_tokens > cut.usage.prompt_tokens
    r = cluster.generate(prompt="A fox", max_tokens=4, temperature=0, stop=["\0"])
    assert r.code == OK and len(r.tokens) == 4


def test_request_id_cannot_forge_log_lines(cluster):
    evil = 'a" ev=forged x=1\nts=0 lvl=error ev=forged'
    s = cluster.stream(
        cluster.request(prompt="A fox", max_tokens=500, temperature=0, ignore_eos=True,
                        request_id=evil))
    assert next(s).request_id == evil
    s.cancel()
    cluster.wait_idle()
    cluster.router.wait_log(r"ev=request_cancelled.*forged")
    for line in cluster.router.log().splitlines():
        assert not re.sub(r'"(\\.|[^"\\])*"', '""', line).count("ev=forged"), line


def test_unknown_oneof_and_fields(cluster):
    """A field from the future: tolerated. An input from the future: no input."""
    plain = cluster.request(**REFERENCE).SerializeToString()
    future = field(1000, b"\xff" * 100) + varint(1001 << 3) + varint(2**64 - 1) + varint(
        1002 << 3 | 5) + b"abcd" + varint(1003 << 3 | 1) + b"abcdefgh"
    code, details, out = call(cluster.channel, GENERATE, plain + future)
    assert code == OK, details
    assert [t for m in out for t in pb.GenerateResponse.FromString(m).token_ids] == cluster.want
    expect(call(cluster.channel, GENERATE, field(99, b"future input")), INVALID, "input is missing")
    two = pb.GenerateRequest(
        prompt="ignored").SerializeToString() + plain  # the last of a oneof counts
    code, details, out = call(cluster.channel, GENERATE, two)
    assert code == OK and [t for m in out
                           for t in pb.GenerateResponse.FromString(m).token_ids] == cluster.want
    sampling = pb.Sampling(temperature=0).SerializeToString() + future
    code, details, out = call(
        cluster.channel, GENERATE,
        field(2, b"A fox") + field(6, sampling) +
        field(7,
              pb.StopConditions(max_tokens=2).SerializeToString() + future))
    assert code == OK, details


# ---- sizes
# -------------------------------------------------------------------------------------------------


def test_messages_of_100_mb(cluster):
    big = field(2, b"x" * 100_000_000)
    for ch, paths in [(cluster.channel, [GENERATE, TOKENIZE]),
                      (cluster.workers_at["decode-0"], [DECODE]),
                      (cluster.workers_at["prefill-0"], [PREFILL])]:
        for path in paths:
            r = call(ch, path, big)
            expect(r, EXHAUSTED)
            assert re.search(r"\d{6,}", r[1]), f"no size in {r[1]!r}"
    c = cluster.channel.stream_stream(JOIN)(iter([big]), timeout=30 * SLOW)
    with pytest.raises(grpc.RpcError):
        list(c)
    assert c.code() == EXHAUSTED


def test_large_but_allowed_messages(cluster):
    n = 2_000_000 if SHORT else 8_000_000
    expect(call(cluster.channel, GENERATE, field(2, b"x" * (3 * n))), INVALID, "prompt", str(3 * n))
    expect(call(cluster.channel, GENERATE, field(4, field(1, b"\5" * n))), INVALID, "token_ids",
           str(n), str(4 * CONTEXT))
    expect(call(cluster.channel, GENERATE, field(3, b"\x0a\0" * (n // 4))),
           (INVALID, EXHAUSTED))  # many empty chat messages
    expect(call(cluster.channel, GENERATE,
                field(2, b"a") + field(7, b"\x12\0" * n)),
           (INVALID, EXHAUSTED))  # many empty stop strings
    expect(call(cluster.channel, GENERATE,
                field(2, b"a") + field(6, b"\x4a\0" * (n // 4))),
           (INVALID, EXHAUSTED))  # many empty biases
    expect(call(cluster.channel, GENERATE,
                field(2, b"a") * (n // 3)), (OK, INVALID, EXHAUSTED))  # the last of a oneof, often
    expect(call(cluster.channel, GENERATE,
                field(1000, b"") * (n // 4)), (INVALID, EXHAUSTED))  # unknown fields only
    expect(call(cluster.workers_at["decode-0"], DECODE, field(1, field(3, b"\5" * n))), INVALID,
           "seq.sampling")
    expect(
        call(cluster.workers_at["decode-0"], DECODE, field(1,
                                                           field(3, b"\5" * n) + field(5, b""))),
        INVALID, "tokens", str(n), str(CONTEXT))


# ---- bytes that are no message
# -------------------------------------------------------------------------------------------------

SAMPLES = {
    GENERATE: pb.GenerateRequest(
        model="pocket", prompt="A fox " * 5, sampling=pb.Sampling(
            temperature=0, logit_bias=[pb.LogitBias(token=1, bias=2)]), stop=pb.StopConditions(
                max_tokens=1, stop=["abc"], stop_token_ids=[1, 2, 3])),
    TOKENIZE: pb.TokenizeRequest(chat=pb.Chat(
        messages=[pb.ChatMessage(role="user", content="hello")])), DECODE: wpb.DecodeRequest(
            local_prefill=True, seq=wpb.Sequence(
                request=9, tokens=[1, 2, 3], n_prompt=3, sampling=wpb.SamplingSpec(
                    top_p=1, repetition_penalty=1, n_logprobs=-1,
                    max_tokens=1))), PREFILL: wpb.PrefillRequest(
                        grant=b"\1\2\3" * 20, seq=wpb.Sequence(
                            request=9, tokens=[1, 2, 3], n_prompt=3)), ABORT: wpb.AbortRequest(
                                request=1 << 60, attempt=3,
                                reason="none"), "/tandem.v1.Inference/Models": pb.ModelsRequest(),
    "/tandem.v1.Inference/Status": pb.StatusRequest(),
    "/grpc.health.v1.Health/Check": pb.TokenizeRequest(
        model="xyz"),  # field 1, a string: the same bytes
}


def damaged(message, rng):
    good = message.SerializeToString()
    out = [good[:i] for i in range(0, len(good), 9 if SHORT else 1)]
    for _ in range(3 if SHORT else 40):
        b = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            if b:
                b[rng.randrange(len(b))] = rng.randrange(256)
        out.append(bytes(b))
        out.append(rng.randbytes(rng.randint(1, 200)))
    out += [
        b"\xff" * 50, b"\x0a" + varint(2**40), b"\x0a" + varint(2**64 - 1), b"\x0b" * 1000,
        b"\x0a\x7f" * 500
    ]
    return out


def test_garbage_messages_to_every_method(cluster):
    """The Python runtime says which bytes are no message; those are INVALID_ARGUMENT. What
    happens to parse gets some status, no crash."""
    warnings.simplefilter("ignore", RuntimeWarning)  # the Python runtime's, on stray end-group tags
    rng = random.Random(7)
    ports = {"router": cluster.channel, **cluster.workers_at}
    served = {
        "router": [
            GENERATE, TOKENIZE, "/tandem.v1.Inference/Models", "/tandem.v1.Inference/Status",
            "/grpc.health.v1.Health/Check"
        ], "decode-0": [DECODE, PREFILL, ABORT, "/grpc.health.v1.Health/Check"],
        "prefill-0": [DECODE, PREFILL, ABORT]
    }
    n_bad = 0
    for port, paths in served.items():
        for path in paths:
            for data in damaged(SAMPLES[path], rng):
                try:
                    type(SAMPLES[path]).FromString(data)
                    parses = True
                except Exception:
                    parses = False
                r = call(ports[port], path, data,
                         timeout=0.5 if parses else 20 * SLOW)  # what parses may ask for much
                if parses:
                    assert r[0] not in (Code.INTERNAL, Code.UNKNOWN), (port, path, data, r[:2])
                else:
                    n_bad += 1
                    expect(r, (INVALID, NOT_FOUND))  # a model's name of no model may come first
                    assert r[0] == NOT_FOUND or re.search(
                        r"tandem\.v1\.|grpc\.health|prompt|content|model |stop", r[1]), (
                            port, path, data, r[1])  # says where
    assert n_bad > (30 if SHORT else 200)
    for ch in ports.values():  # streams of garbage
        for path in ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
                     "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", JOIN):
            c = ch.stream_stream(path)(iter([rng.randbytes(50), b"\xff" * 20]), timeout=10 * SLOW)
            try:
                list(c)
            except grpc.RpcError:
                pass
            assert c.code() in (INVALID, UNIMPLEMENTED, OK, PRECONDITION), (path, c.code(),
                                                                            c.details())


def test_wrong_methods_and_shapes(cluster):
    for ch in (cluster.channel, *cluster.workers_at.values()):
        for path in ("/tandem.v1.Nothing/Generate", "/tandem.v1.Inference/Nothing", "/", "//", "/x",
                     "/tandem.v2.Inference/Generate", "/" + "x" * 5000):
            r = call(ch, path, b"")
            expect(r, UNIMPLEMENTED)
    expect(call(cluster.workers_at["decode-0"], GENERATE, SAMPLES[GENERATE].SerializeToString()),
           UNIMPLEMENTED)
    expect(call(cluster.channel, DECODE, SAMPLES[DECODE].SerializeToString()), UNIMPLEMENTED)
    expect(call(cluster.workers_at["decode-0"], PREFILL, SAMPLES[PREFILL].SerializeToString()),
           PRECONDITION, "decode worker")
    expect(call(cluster.workers_at["prefill-0"], DECODE, SAMPLES[DECODE].SerializeToString()),
           PRECONDITION, "prefill worker")
    for path, ch in ((GENERATE, cluster.channel), (TOKENIZE, cluster.channel),
                     (DECODE, cluster.workers_at["decode-0"])):
        c = ch.stream_stream(path)(iter([]), timeout=10 * SLOW)  # half-closed without a message
        with pytest.raises(grpc.RpcError):
            list(c)
        assert c.code() in (INVALID, UNIMPLEMENTED, Code.INTERNAL), (path, c.code(), c.details())
        one = SAMPLES[path].SerializeToString()
        c = ch.stream_stream(path)(iter([one] * 5),
                                   timeout=10 * SLOW)  # more messages than the method takes
        try:
            list(c)
        except grpc.RpcError:
            pass
        assert c.code() is not None
    r = call(cluster.channel, GENERATE, SAMPLES[GENERATE].SerializeToString() * 200,
             compression=grpc.Compression.Gzip)
    assert r[0] in (UNIMPLEMENTED, INVALID), r[:2]
    own = channel_to(f"127.0.0.1:{cluster.port}")  # its own connection: the server may close it
    r = call(own, GENERATE, b"", metadata=[("x-long", "y" * 100000)])
    assert r[0] != OK
    own.close()


def test_slow_and_vanishing_clients(cluster):
    """Clients that never read, and clients that go away in the middle, hold nothing."""
    streams = [
        cluster.stream(
            cluster.request(prompt=f"Fox {i}", max_tokens=1500, temperature=0, ignore_eos=True))
        for i in range(8)
    ]
    for i, s in enumerate(streams):
        if i % 2:
            next(s)
    own = [channel_to(f"127.0.0.1:{cluster.port}") for _ in range(4)]
    for ch in own:
        ch.unary_stream(GENERATE)(cluster.request(prompt="Fox", max_tokens=1500, temperature=0,
                                                  ignore_eos=True).SerializeToString())
    for ch in own:
        ch.close()  # the connection goes, mostly before the first token
    for s in streams:
        s.cancel()
    cluster.wait_idle()


# ---- garbage below gRPC
# -------------------------------------------------------------------------------------------------


def tcp_ports(pid):
    """Listening TCP ports of a process, by its descriptors."""
    inodes = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            m = re.match(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{fd}"))
        except OSError:
            continue
        if m:
            inodes.add(m.group(1))
    ports = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if not os.path.exists(table):
            continue
        with open(table, encoding="ascii") as f:
            for line in f.readlines()[1:]:
                w = line.split()
                if w[3] == "0A" and w[9] in inodes:
                    ports.add(int(w[1].rsplit(":", 1)[1], 16))
    return sorted(ports)


def shm_names():
    with open("/proc/net/unix", encoding="utf-8", errors="replace") as f:
        return sorted(set(re.findall(r"@(tandem-xfer-[0-9a-f]+)", f.read())))


def crc32c(data):
    crc = 0xFFFFFFFF
    for b in data:
        crc ^= b
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def wire_version():
    """What the daemons speak: a number of our own here would go stale, and every frame below
    would die at the version check."""
    with open(os.path.join(ROOT, "common", "transfer", "wire.h"), encoding="ascii") as f:
        return int(re.search(r"#define TD_XFER_WIRE_VERSION (\d+)", f.read())[1])


VERSION = wire_version()
(HELLO, ACK, MEM, OPEN, DATA, REF, FINAL, FRAME_ABORT, DONE, FAIL, PING, OFFER, ACCEPT, TARGETS,
 DIGEST, BYE, DEVICE_OFFER, DEVICE_ACCEPT, LENT, TAKEN) = range(1, 21)


def frame(kind, slot=0, generation=0, op=0, attempt=0, status=0, handle=0, offset=0, length=0,
          conn=0, version=VERSION, flags=0, payload=b""):
    """A header of the transfer protocol (common/transfer/wire.h) with a right CRC, and a
    payload."""
    head = struct.pack("<IBBHIIIHhQQIIQI", 0x31584454, version, kind, flags, slot, generation, op,
                       attempt, status, handle, offset, length or len(payload), 0, conn, 0)
    return head + struct.pack("<I", crc32c(head)) + payload


def hello(layout_hash=2, block_bytes=3, incarnation=1, nonce=4, instance=b"liar"):
    return struct.pack("<QQQQ16s64s", incarnation, layout_hash, block_bytes, nonce, b"\0" * 16,
                       instance)


KEY = b"k" * 16
TRANSFER_GARBAGE = [
    b"TDX1" + b"\xff" * 60,
    frame(HELLO, slot=1, payload=hello()),
    frame(HELLO, slot=1, payload=hello()) +
    b"".join(frame(OPEN, slot=i, generation=1, payload=KEY) for i in range(50)),
    frame(DATA, payload=b"x" * 100),
    frame(DATA, length=1 << 20),
    frame(DATA, length=0xFFFFFFFF),
    frame(FINAL, payload=b"note"),
    frame(99),
    frame(0),
    frame(HELLO, version=VERSION + 6, payload=hello()),
    frame(HELLO, flags=1, payload=hello()),
    frame(HELLO, payload=hello(instance=b"x" * 64)),
    frame(OPEN, slot=0xFFFFFFFF, generation=0xFFFFFFFF, payload=KEY),
    frame(PING) * 1000,
    frame(DONE),
    frame(FAIL, status=-20, payload=b"no"),
    frame(ACK, payload=hello()),
    frame(REF, payload=struct.pack("<Iii", 0, -1, 1 << 30)),
    frame(MEM, payload=b"\xff" * 24),
    frame(OFFER, payload=b"\xff" * 520),
    frame(ACCEPT, payload=b"\xff" * 600),
    frame(ACCEPT, status=-3, payload=b"no"),
    frame(TARGETS, payload=b"\xff" * 4096),
    frame(DIGEST, payload=b"\xff" * 4000),
    frame(BYE, status=-20, payload=b"go"),
    frame(DEVICE_OFFER, payload=b"\xff" * 288),
    frame(DEVICE_ACCEPT),
    frame(LENT, payload=b"\xff" * 8),
    frame(TAKEN),
]


def poke(family, address, data, linger_s=0.02):
    with socket.socket(family, socket.SOCK_STREAM) as s:
        s.settimeout(2 * SLOW)
        try:
            s.connect(address)
            s.sendall(data)
            s.settimeout(linger_s)
            s.recv(4096)
        except OSError:
            pass  # closed in our face: fine


def kv_refusals(daemon):
    """What a worker's metrics say of bad peers: {name: value}."""
    for port in tcp_ports(daemon.pid):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=2 * SLOW) as r:
                text = r.read().decode()
                return {
                    m[1]: int(m[2]) for m in re.finditer(
                        r"^td_kv_((?:bad|stale)_frames|refused_peers)_total (\d+)$", text,
                        re.MULTILINE)
                }
        except (OSError, http.client.HTTPException):
            pass  # gRPC or KV
    raise AssertionError(f"{daemon.name} has no metrics")


def test_garbage_on_every_port(cluster):
    rng = random.Random(3)
    workers = [d for d in cluster.all if d.name != "router"]
    before = {d.name: kv_refusals(d) for d in workers}
    lines = {d.name: d.log().count("ev=kv_peer_refused") for d in workers}
    start = time.monotonic()
    data = [
        b"", b"\0", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        rng.randbytes(10000), b"\xff" * 70000, PREFACE, PREFACE + rng.randbytes(3000),
        PREFACE + b"\xff\xff\xff\x04\0\0\0\0\0" + bytes(1000),
        PREFACE + b"\0\0\x06\4\0\0\0\0\0\0\4\xff\xff\xff\xff", PREFACE + bytes(9) * 500,
        *TRANSFER_GARBAGE
    ]
    seen = 0
    held = []
    for d in cluster.all:
        ports = tcp_ports(d.pid)
        assert len(ports) >= (1 if d.name == "router" else 2), (
            d.name, ports)  # workers: gRPC and KV data
        for port in ports:
            for x in data:
                poke(socket.AF_INET, ("127.0.0.1", port), x)
                seen += 1
            for _ in range(10):  # and some that stay, silent or half a header long
                s = socket.create_connection(("127.0.0.1", port))
                s.sendall(PREFACE[:10] if _ % 2 else b"")
                held.append(s)
    for name in shm_names():  # also those of other clusters on this host: none may mind
        for x in TRANSFER_GARBAGE:
            poke(socket.AF_UNIX, "\0" + name, x, 0.002)
    r = cluster.generate(**REFERENCE)
    assert (r.code, r.tokens) == (OK, cluster.want), r.details
    for s in held:
        s.close()
    assert seen > 100
    n = len(TRANSFER_GARBAGE)
    # each of them counts, whatever came in between; the log has a line for the first of each second
    for d in workers:
        more = lambda k: kv_refusals(d)[k] - before[d.name][k]  # noqa: E731, B023
        cluster.wait_for(lambda: min(more("bad_frames"), more("refused_peers")) >= n - 1,
                         f"the refusals in the metrics of {d.name}", 5)  # noqa: B023
        said = d.wait_log(
            r"ev=kv_peer_refused path=(tcp|shm) reason=\"peer \S.* at (127.0.0.1:\d+|this host, "
            r"pid \d+, uid \d+): .*\" others=\d+")
        assert d.log().count("ev=kv_peer_refused") - lines[d.name] <= 1 + (time.monotonic() -
                                                                           start), said[0]


# ---- the Worker service called by a liar
# -------------------------------------------------------------------------------------------------


def sequence(request, tokens, n_prompt=None, attempt=0, max_tokens=12, **sampling):
    s = wpb.SamplingSpec(top_p=1, repetition_penalty=1, n_logprobs=-1, max_tokens=max_tokens)
    for k, v in sampling.items():
        setattr(s, k, v)
    return wpb.Sequence(request=request, attempt=attempt, tokens=tokens,
                        n_prompt=len(tokens) if n_prompt is None else n_prompt, sampling=s)


def salted(n_bytes):
    s = sequence(1, [1])
    s.cache_salt = b"s" * n_bytes
    return s


def traced(n_bytes):
    s = sequence(1, [1])
    s.trace_id = b"t" * n_bytes
    return s


SEQUENCES = [
    ("no_seq", None, ["seq is missing"]),
    ("no_sampling", wpb.Sequence(request=1, tokens=[1], n_prompt=1), ["seq.sampling"]),
    ("empty", sequence(1, []), ["tokens", "empty"]),
    ("negative_id", sequence(1, [1, -1]), ["tokens[1]", "-1", str(VOCAB - 1)]),
    ("vocab_id", sequence(1, [VOCAB]), ["tokens[0]", str(VOCAB),
                                        str(VOCAB - 1)]),
    ("too_long", sequence(1, [1] * CONTEXT), ["tokens", str(CONTEXT)]),
    ("n_prompt_0", sequence(1, [1, 2], n_prompt=0), ["n_prompt", "0", "1..2"]),
    ("n_prompt_3", sequence(1, [1, 2], n_prompt=3), ["n_prompt", "3", "1..2"]),
    ("n_prompt_2_31", sequence(1, [1, 2], n_prompt=2**31), ["n_prompt",
                                                            str(2**31), "1..2"]),
    ("n_prompt_max", sequence(1, [1, 2], n_prompt=2**32 - 1), ["n_prompt",
                                                               str(2**32 - 1), "1..2"]),
    ("max_tokens_0", sequence(1, [1], max_tokens=0), ["max_tokens", "0", "1.."]),
    ("max_tokens_max", sequence(1, [1],
                                max_tokens=2**32 - 1), ["max_tokens",
                                                        str(2**32 - 1), "1.."]),
    ("nothing_left", sequence(1, [1, 2, 3], n_prompt=1,
                              max_tokens=2), ["max_tokens", "2", "nothing is left"]),
    ("temperature", sequence(1, [1], temperature=NAN), ["temperature", "nan"]),
    ("top_p", sequence(1, [1], top_p=0.0), ["top_p", "0"]),
    ("logprobs", sequence(1, [1], n_logprobs=21), ["n_logprobs", "21", "20"]),
    ("salt_15", salted(15), ["seq.cache_salt", "15", "16"]),
    ("salt_long", salted(1 << 20), ["seq.cache_salt", str(1 << 20), "16"]),
    ("trace_15", traced(15), ["seq.trace_id", "15", "16"]),
    ("trace_long", traced(1 << 20), ["seq.trace_id", str(1 << 20), "16"]),
]


@cases(SEQUENCES)
def test_worker_refuses_sequence(cluster, case):
    _, seq, parts = case
    d, p = wpb.DecodeRequest(), wpb.PrefillRequest(grant=b"x" * 280)
    if seq is not None:
        d.seq.CopyFrom(seq)
        p.seq.CopyFrom(seq)
    for local in (False, True):
        d.local_prefill = local
        expect(call(cluster.workers_at["decode-0"], DECODE, d.SerializeToString()), INVALID, *parts)
    expect(call(cluster.workers_at["prefill-0"], PREFILL, p.SerializeToString()), INVALID, *parts)


def open_decode(cluster, request, tokens, attempt=0, max_tokens=12):
    """A reservation as the router makes it: (stream of DecodeEvent, ticket)."""
    m = wpb.DecodeRequest(seq=sequence(request, tokens, attempt=attempt, max_tokens=max_tokens))
    stream = cluster.workers_at["decode-0"].unary_stream(
        DECODE, request_serializer=wpb.DecodeRequest.SerializeToString,
        response_deserializer=wpb.DecodeEvent.FromString)(m, timeout=30 * SLOW)
    return stream, next(stream).ticket


def send_prefill(cluster, request, tokens, grant, skip, attempt=0, max_tokens=12):
    m = wpb.PrefillRequest(seq=sequence(request, tokens, attempt=attempt, max_tokens=max_tokens),
                           grant=grant, skip_tokens=skip)
    return call(cluster.workers_at["prefill-0"], PREFILL, m.SerializeToString())


def fresh_tokens(seed, n=40):
    rng = random.Random(seed)
    return [rng.randrange(300, VOCAB) for _ in range(n)]


def test_grants_that_lie(cluster):
    tokens = fresh_tokens(1)
    rng = random.Random(1)
    stream, ticket = open_decode(cluster, 1 << 40, tokens)
    assert ticket.grant and ticket.cached_tokens == 0
    bad = [(b"", 0, ["grant", "0 bytes"]), (b"x" * 5000, 0, ["grant", "5000"]),
           (b"x", 0, ["grant", "1 bytes"]), (rng.randbytes(len(
               ticket.grant)), 0, ["grant", "magic"]),
           (ticket.grant[:-1], 0, ["grant", str(len(ticket.grant) - 1)]),
           (ticket.grant + b"\0", 0, ["grant", str(len(ticket.grant) + 1)]),
           (ticket.grant, 5, ["skip_tokens", "5", "16"]),
           (ticket.grant, 48, ["skip_tokens", "48", "40"]),
           (ticket.grant, 2**32 - 16, ["skip_tokens", str(2**32 - 16)]),
           (ticket.grant, 16, ["grant", "3 blocks", "skip_tokens"])]
    for grant, skip, parts in bad:
        r = send_prefill(cluster, 1 << 40, tokens, grant, skip)
        assert r[0] not in (OK, Code.INTERNAL, Code.DEADLINE_EXCEEDED), r[:2]
        for part in parts:
            assert part in r[1], (part, r[:2])
    for at in range(0, len(ticket.grant),
                    23 if SHORT else 7):  # one flipped bit each: the blob's CRC finds it
        b = bytearray(ticket.grant)
        b[at] ^= 1 << rng.randrange(8)
        r = send_prefill(cluster, 1 << 40, tokens, bytes(b), 0)
        assert r[0] not in (OK, Code.INTERNAL, Code.DEADLINE_EXCEEDED) and "grant" in r[1], (at,
                                                                                             r[:2])
    r = send_prefill(cluster, 1 << 40, tokens[:16], ticket.grant,
                     0)  # a shorter sequence than the slot was made for
    assert r[0] not in (OK, Code.INTERNAL, Code.DEADLINE_EXCEEDED), r[:2]
    stream.cancel()


# Of a prompt's work and the time in which it should be computed, in us: is it given back before it
# is begun? A time that no clock reaches is none.
TIMED = [("late", 10**7, 5 * 10**6, True), ("too_late", 0, 1, True), ("untimed", 10**7, 0, False),
         ("in_time", 1000, 60 * 10**6, False), ("work_huge", 2**64 - 1, 1, False),
         ("time_huge", 1, 2**64 - 1, False)]


@cases(TIMED)
def test_late_prompts_come_back(cluster, case):
    _, work_us, within_us, is_late = case
    m = wpb.PrefillRequest(seq=sequence((1 << 41) + TIMED.index(case), fresh_tokens(2),
                                        max_tokens=1), work_us=work_us, finish_within_us=within_us)
    r = call(cluster.workers_at["prefill-0"], PREFILL, m.SerializeToString())
    assert r[0] == (Code.OUT_OF_RANGE if is_late else OK), r[:2]


GRANT = "<IHHIIIiQQQHB5s16s16s64s64s64s"  # struct td_xfer_grant_blob


def grant_fields(grant):
    names = [
        "magic", "version", "bytes", "crc", "slot", "generation", "n_blocks", "incarnation",
        "layout_hash", "block_bytes", "port", "path", "reserved", "key", "proof", "host",
        "shm_name", "instance"
    ]
    return dict(zip(names, struct.unpack(GRANT, grant)))


def forge(grant, **changes):
    """The grant with some fields changed and its CRC made right again."""
    values = grant_fields(grant)
    values["crc"] = 0
    for k, v in changes.items():
        values[k] = v(values[k]) if callable(v) else v
    values["crc"] = crc32c(struct.pack(GRANT, *values.values()))
    return struct.pack(GRANT, *values.values())


class Peer:
    """Speaks the transfer protocol to a decode worker's data port, as the sender that a grant is
    for."""
    def __init__(self, grant):
        self.grant = grant_fields(grant)
        host = self.grant["host"].rstrip(b"\0").decode()
        self.s = socket.create_connection((host, self.grant["port"]), timeout=10 * SLOW)
        self.tag = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.s.close()

    def send(self, kind, payload=b"", **kw):
        self.s.sendall(frame(kind, conn=kw.pop("conn", self.tag), payload=payload, **kw))

    def hello(self, **changes):
        """HELLO as the grant asks for it, but for what is changed; (status, reason or None) of
        the answer."""
        path = changes.pop("path", 1)
        named = {k: self.grant[k] for k in ("layout_hash", "block_bytes")}
        self.send(HELLO, hello(**{**named, **changes}), slot=path)
        kind, status, payload = self.answer()
        if kind != ACK or status:
            return status, payload.decode()
        incarnation, layout, block_bytes, nonce = struct.unpack("<QQQQ", payload[:32])
        assert (incarnation, layout, block_bytes) == tuple(
            self.grant[k] for k in ("incarnation", "layout_hash", "block_bytes"))
        self.tag = nonce ^ changes.get("nonce", 4)
        return 0, None

    def bound(self, **kw):
        """The fields that say which slot a frame is for."""
        return dict(slot=self.grant["slot"], generation=self.grant["generation"], attempt=1,
                    handle=77) | kw

    def answer(self):
        """(type, status, payload) of the next frame that is no PING; type None: the connection
        ended."""
        while True:
            head = self.take(64)
            if len(head) < 64:
                return None, 0, b""
            fields = struct.unpack("<IBBHIIIHhQQIIQII", head)
            assert fields[0] == 0x31584454 and fields[1] == VERSION and fields[-1] == crc32c(
                head[:60])
            payload = self.take(fields[11])
            if fields[2] != PING:
                return fields[2], fields[8], payload

    def take(self, n):
        data = b""
        while len(data) < n:
            try:
                more = self.s.recv(n - len(data))
            except ConnectionResetError:
                more = b""
            if not more:
                break
            data += more
        return data


TURN, SIZE = "out of turn", "does not fit type"
# After a right HELLO, and after an OPEN with the right key: what is said, and what the connection
# ends with. The words show which check was reached.
LIES = [
    ("hello_again", lambda p: p.send(HELLO, hello()), TURN),
    ("foreign_tag", lambda p: p.send(OPEN, KEY, **p.bound(conn=p.tag ^ 1)), TURN),
    ("version", lambda p: p.send(PING, version=VERSION + 1),
     f"version is {VERSION + 1}, this side speaks {VERSION}"),
    ("type_0", lambda p: p.send(0), "unknown type 0"),
    ("type_99", lambda p: p.send(99), "unknown type 99"),
    ("flags", lambda p: p.send(OPEN, KEY, **p.bound(flags=1)), "reserved fields of type 4"),
    ("status", lambda p: p.send(BYE, b"x", status=7), "status is 7"),
    ("wrong_key", lambda p: p.send(OPEN, KEY, **p.bound()), "wrong key"),
    ("slot_of_none", lambda p: p.send(OPEN, p.grant["key"], **p.bound(slot=2**32 - 1)),
     "wrong key"),
    ("attempt_0", lambda p: p.send(OPEN, p.grant["key"], **p.bound(attempt=0)), "wrong key"),
    ("key_length", lambda p: p.send(OPEN, KEY + b"k", **p.bound()), SIZE),
    ("data_length", lambda p: p.send(DATA, length=(1 << 20) + 1, **p.bound()), SIZE),
    ("ref_on_tcp", lambda p: p.send(REF, struct.pack("<Iii", 0, -1, 1 << 30), **p.bound()), TURN),
    ("ref_length", lambda p: p.send(REF, b"\0" * 9, **p.bound()), SIZE),
    ("mem_on_tcp", lambda p: p.send(MEM, b"\xff" * 24), TURN),
    ("done", lambda p: p.send(DONE, **p.bound()), TURN),
    ("fail", lambda p: p.send(FAIL, b"no", status=-20, **p.bound()), TURN),
    ("rdma_offer", lambda p: p.send(OFFER, b"\xff" * 520), TURN),
    ("rdma_offer_length", lambda p: p.send(OFFER, b"\xff" * 519), SIZE),
    ("rdma_accept", lambda p: p.send(ACCEPT, b"\xff" * 600), TURN),
    ("targets", lambda p: p.send(TARGETS, b"\xff" * 4096, **p.bound()), TURN),
    ("targets_length", lambda p: p.send(TARGETS, b"\xff" * 7, **p.bound()), SIZE),
    ("device_offer", lambda p: p.send(DEVICE_OFFER, b"\xff" * 288), TURN),
    ("lent_on_tcp", lambda p: p.send(LENT, b"\0" * 8, **p.bound()), TURN),
    ("lent_length", lambda p: p.send(LENT, b"\0" * 7, **p.bound()), SIZE),
    ("taken", lambda p: p.send(TAKEN, **p.bound()), TURN),
    ("taken_length", lambda p: p.send(TAKEN, b"\0", **p.bound()), SIZE),
    ("device_accept", lambda p: p.send(DEVICE_ACCEPT), TURN),
    ("bye", lambda p: p.send(BYE, b"go", status=-20), "closed by peer: go"),
]
KEYED_LIES = [("data_outside", lambda p: p.send(
    DATA, b"x" * 100, offset=p.grant["n_blocks"] * p.grant["block_bytes"] - 99, **p.bound()),
               "data outside the grant"),
              ("data_at_2_64", lambda p: p.send(DATA, b"x" * 100, offset=2**64 - 100, **p.bound()),
               "data outside the grant"),
              ("data_twice", lambda p: [p.send(DATA, b"x" * 100, **p.bound())
                                        for _ in range(2)], "data outside the grant, or twice"),
              ("final_early", lambda p: p.send(FINAL, b"note", offset=1, **p.bound()),
               "final before the last byte"),
              ("digest_outside",
               lambda p: p.send(DIGEST, struct.pack("<II", p.grant["n_blocks"], 0), **p.bound()),
               "digests of blocks"),
              ("digest_length", lambda p: p.send(DIGEST, b"\0" * 4, **p.bound()), SIZE), ]


def test_frames_behind_a_right_hello(cluster):
    """Each lie reaches the check that it is for and ends its connection with that check's words;
    none of them touches a request."""
    stream, ticket = open_decode(cluster, 1 << 46, fresh_tokens(8))
    for changes, why in [(dict(layout_hash=7), "layout 0000000000000007"),
                         (dict(block_bytes=12345), "blocks of 12345 bytes"), (dict(path=3), "RDMA"),
                         (dict(path=4), "path cuda-ipc"), (dict(path=99), "path unknown"),
                         (dict(nonce=0), None), (dict(instance=b"x" * 64), None)]:
        with Peer(ticket.grant) as p:
            status, reason = p.hello(**changes)
            assert (status < 0 and why in reason) if why else (status,
                                                               reason) == (0, ""), (changes, status,
                                                                                    reason)
    for name, lie, why in LIES:
        with Peer(ticket.grant) as p:
            assert p.hello() == (0, None), name
            lie(p)
            kind, _, reason = p.answer()
            assert kind == BYE and why in reason.decode(), (name, kind, reason)
            assert p.answer()[0] is None
    stream.cancel()
    for i, (name, lie, why) in enumerate(KEYED_LIES[::3 if SHORT else 1]):
        stream, ticket = open_decode(cluster, (1 << 47) + i, fresh_tokens(9 + i))
        with Peer(ticket.grant) as p:
            assert p.hello() == (0, None), name
            p.send(OPEN, p.grant["key"], **p.bound())
            lie(p)
            said = p.answer()
            assert said[0] == BYE and why in said[2].decode(), (name, said)
        assert unframed_tokens(stream)[1] == []
    decode = next(d for d in cluster.all if d.name == "decode-0")
    n_stale = kv_refusals(decode)["stale_frames"]
    with Peer(open_decode(cluster, 1 << 48, fresh_tokens(20))
              [1].grant) as p:  # an old generation: told so, and the connection stands
        assert p.hello() == (0, None)
        p.send(OPEN, p.grant["key"], **p.bound(generation=p.grant["generation"] ^ 2**31))
        kind, status, reason = p.answer()
        assert (kind, reason) == (FAIL, b"the grant is an old one") and status < 0
        p.send(OPEN, p.grant["key"], **p.bound())
        p.send(FRAME_ABORT, b"gave up", status=-20, **p.bound())
        p.send(PING)
        cluster.wait_for(lambda: kv_refusals(decode)["stale_frames"] > n_stale,
                         "the stale OPEN in the metrics", 5)
    expect(
        call(cluster.workers_at["decode-0"], ABORT,
             wpb.AbortRequest(request=1 << 48).SerializeToString()), OK)


def unframed_tokens(stream):
    out, code = [], None
    try:
        for ev in stream:
            out += [t.token for t in ev.tokens.out]
    except grpc.RpcError:
        pass
    code = stream.code()
    return code, out


def test_forged_grants_land_nowhere(cluster):
    """Grants whose CRC is right and whose content is not: another slot, generation, key, port:
    nothing is delivered, and the victim's request, reserved all the while, still ends with
    the right tokens when the true grant is used."""
    victim_tokens = fresh_tokens(2)
    want = cluster.generate(ids=victim_tokens, max_tokens=12, temperature=0, ignore_eos=True).tokens
    other = fresh_tokens(3)
    closed = socket.socket()
    closed.bind(("127.0.0.1", 0))  # bound, not listening: refuses
    port = closed.getsockname()[1]
    flip_bytes = lambda k: bytes([k[0] ^ 1]) + k[1:]  # noqa: E731
    for path in (0, 1):  # as granted; tcp only
        stream, ticket = open_decode(cluster, (1 << 41) + path, victim_tokens)
        mine, my_ticket = open_decode(cluster, (1 << 42) + path, other)
        n = {"n_blocks": 3}
        forged = [
            forge(ticket.grant, generation=lambda g: g + 1, path=path),
            forge(ticket.grant, generation=0, path=path),
            forge(ticket.grant, key=flip_bytes, path=path),
            forge(my_ticket.grant, slot=ticket.slot, path=path),
            forge(my_ticket.grant, slot=0xFFFFFFFF, path=path),
            forge(my_ticket.grant, incarnation=5, path=path),
            forge(my_ticket.grant, n_blocks=1000, path=path),
            forge(my_ticket.grant, n_blocks=-1, path=path),
            forge(my_ticket.grant, block_bytes=64, path=path),
            forge(my_ticket.grant, layout_hash=1, path=path),
            forge(my_ticket.grant, shm_name=b"", port=port, path=0),
            forge(my_ticket.grant, port=0, shm_name=b"", path=path),
            forge(my_ticket.grant, host=b"not an address", path=1),
            forge(my_ticket.grant, host=b"nobody.invalid", shm_name=b"", path=1),
            forge(my_ticket.grant, shm_name=b"tandem-xfer-none", port=0),
            forge(my_ticket.grant, reserved=b"\1" * 5),
            forge(my_ticket.grant, path=7)
        ]
        assert n and len(forged[0]) == len(ticket.grant)
        for i, grant in enumerate(forged[:8 if SHORT else None]):
            r = send_prefill(cluster, (1 << 42) + path, other, grant, 0)
            assert r[0] not in (OK, Code.INTERNAL, Code.DEADLINE_EXCEEDED), (i, r[:2])
            assert r[1], i
        mine.cancel()
        r = send_prefill(cluster, (1 << 41) + path, victim_tokens, ticket.grant,
                         ticket.cached_tokens)
        if r[0] == OK:
            code, got = unframed_tokens(stream)
            assert code == OK and got == want  # decode computed from the true KV
        else:  # an intruder with the right slot may cost the slot, never its content
            stream.cancel()
    closed.close()


def test_a_grant_serves_once(cluster):
    tokens = fresh_tokens(4)
    want = cluster.generate(ids=tokens[:20], max_tokens=8, temperature=0, ignore_eos=True).tokens
    stream, ticket = open_decode(cluster, 1 << 43, tokens[:20], max_tokens=8)
    r = send_prefill(cluster, 1 << 43, tokens[:20], ticket.grant, ticket.cached_tokens,
                     max_tokens=8)
    assert r[0] == OK, r[:2]
    again = send_prefill(cluster, 1 << 43, tokens[:20], ticket.grant, ticket.cached_tokens,
                         max_tokens=8)  # told that all is there already, or refused
    assert again[0] not in (Code.INTERNAL, Code.DEADLINE_EXCEEDED), again[:2]
    other = fresh_tokens(6, 20)
    send_prefill(cluster, 1 << 43, other, ticket.grant, ticket.cached_tokens,
                 max_tokens=8)  # other KV to the same place
    code, got = unframed_tokens(stream)
    assert code == OK and got == want
    stream, ticket = open_decode(cluster, 1 << 44, tokens,
                                 max_tokens=8)  # a reservation that is gone
    expect(
        call(cluster.workers_at["decode-0"], ABORT,
             wpb.AbortRequest(request=1 << 44).SerializeToString()), OK)
    assert unframed_tokens(stream) == (
        Code.CANCELLED, []
    )  # the worker said so, so it has let go; a cancel of ours could be overtaken
    stale = send_prefill(cluster, 1 << 44, tokens, ticket.grant, ticket.cached_tokens, max_tokens=8)
    assert stale[0] not in (OK, Code.INTERNAL, Code.DEADLINE_EXCEEDED), stale[:2]


def test_abort_and_attempts(cluster):
    d = cluster.workers_at["decode-0"]
    abort = lambda request, attempt: expect(
        call(d, ABORT,
             wpb.AbortRequest(request=request, attempt=attempt).SerializeToString()), OK
    )  # noqa: E731
    abort(12345, 0)  # nobody's
    abort(2**64 - 1, 2**32 - 1)
    tokens = fresh_tokens(5)
    old, _ = open_decode(cluster, 1 << 45, tokens, attempt=1)
    new, _ = open_decode(cluster, 1 << 45, tokens,
                         attempt=2)  # the same request again, a later attempt
    abort(1 << 45, 1)
    with pytest.raises(grpc.RpcError):
        next(old)
    assert old.code() == Code.CANCELLED
    cluster.wait_for(lambda: sum(w.kv_blocks_held for w in cluster.status().workers) > 0,
                     "the later attempt's blocks", 5)
    abort(1 << 45, 2)
    with pytest.raises(grpc.RpcError):
        next(new)
    assert new.code() == Code.CANCELLED


# ---- workers that are none
# -------------------------------------------------------------------------------------------------


class FakeRouter:
    """A Registry that takes one hello and answers as told."""
    def __init__(self, answer):
        self.hello = queue.Queue()
        outer = self

        def join(messages, context):
            m = wpb.WorkerMessage.FromString(next(messages))
            outer.hello.put(m.hello)
            yield from answer(context)
            for _ in messages:
                pass

        rpc = grpc.stream_stream_rpc_method_handler(join)
        self.server = grpc.server(concurrent.futures.ThreadPoolExecutor(8),
                                  options=[("grpc.max_send_message_length", -1)])
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(
            "tandem.v1.Registry", {"Join": rpc}), ))
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()


def abort_with(context):
    context.abort(grpc.StatusCode.INTERNAL, "no")


ROUTER_ANSWERS = {
    "welcome": lambda context: iter(
        [wpb.RouterMessage(welcome=wpb.Welcome(protocol=1)).SerializeToString()]),
    "reject": lambda context: iter(
        [wpb.RouterMessage(reject=wpb.Reject(reason='no "room"\nev=forged')).SerializeToString()]),
    "garbage": lambda context: iter([b"\xff" * 40]), "nothing": lambda context: iter([]),
    "abort": abort_with, "flood": lambda context: iter(
        [wpb.RouterMessage(welcome=wpb.Welcome(protocol=77)).SerializeToString()] * 500),
    "large": lambda context: iter([field(2, field(1, b"x" * 70_000_000))]),
}


def own_decode(c, router_port):
    return Daemon("own", "tandem-decode", [
        "--name", "own", "--model", c.model, "--router", f"127.0.0.1:{router_port}", "--dtype",
        c.dtype, "--threads", 1, "--kv-memory", c.kv_memory
    ], c.dir.name)


@pytest.fixture(scope="module")
def real_hello(cluster):
    """What a true decode worker of this build says; its router is ours, and lies in every way we
    know: the worker outlives all of it."""
    hello = None
    for name, answer in list(ROUTER_ANSWERS.items())[::3 if SHORT else 1]:
        r = FakeRouter(answer)
        d = own_decode(cluster, r.port)
        try:
            hello = r.hello.get(timeout=30 * SLOW)
            if name in ("reject", "abort", "garbage", "large"):
                r.hello.get(timeout=30 * SLOW)  # it tries again
            assert d.alive(), d.log()
        finally:
            r.server.stop(None)
            d.signal(15)
            assert d.wait_exit(20 * SLOW) == 0, d.log()[-3000:]
        d.check_sanitizers()
        if name == "reject":
            assert 'ev=registration_rejected' in d.log() and "\nev=forged" not in d.log()
    return hello


class FakeWorker:
    """A registration by plain grpcio and, with a behaviour, a Worker service that acts as told."""
    def __init__(self, cluster, hello, behaviour=None, snapshots=False):
        self.calls = 0
        self.server = None
        hello = wpb.Hello.FromString(hello.SerializeToString())
        if behaviour:
            self.server = grpc.server(concurrent.futures.ThreadPoolExecutor(16))

            def run(data, context):
                self.calls += 1
                yield from behaviour(data, context)

            def prove(data, context):  # it is who said the hello: what it lies about comes later
                nonce = wpb.ProveRequest.FromString(data).nonce
                return wpb.ProveResponse(
                    mac=proofs.instance_of_key(hello.instance_key, nonce)).SerializeToString()

            handlers = {m: grpc.unary_stream_rpc_method_handler(run) for m in ("Decode", "Prefill")}
            handlers["Prove"] = grpc.unary_unary_rpc_method_handler(prove)
            self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(
                "tandem.v1.Worker", handlers), ))
            hello.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
            self.server.start()
        self.out = queue.Queue()
        self.out.put(wpb.WorkerMessage(hello=hello))
        self.channel = channel_to(f"127.0.0.1:{cluster.port}")
        self.stream = self.channel.stream_stream(
            JOIN, request_serializer=wpb.WorkerMessage.SerializeToString,
            response_deserializer=wpb.RouterMessage.FromString)(iter(self.out.get, None),
                                                                timeout=60 * SLOW)
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._snapshots, daemon=True)
        if snapshots:
            self.thread.start()

    def _snapshots(self):
        seq = 0
        while not self.stop.wait(0.05):
            seq += 1
            self.out.put(wpb.WorkerMessage(snapshot=wpb.Snapshot(seq=seq)))

    def close(self):
        self.stop.set()
        self.out.put(None)
        self.channel.close()
        if self.server:
            self.server.stop(None).wait()


HELLOS = [("protocol", dict(protocol=2), ["protocol", "2", "1"]),
          ("protocol_0", dict(protocol=0), ["protocol", "0"]),
          ("role", dict(role="chef"), ["role", "chef", "prefill", "decode"]),
          ("role_of_controls", dict(role="\x1b]0;x\x07"), ["role"]),
          ("role_empty", dict(role=""), ["role"]), ("name_empty", dict(name=""), ["name", "127"]),
          ("name_long", dict(name="n" * 200), ["name", "127"]),
          ("address_empty", dict(address=""), ["address", "255"]),
          ("address_long", dict(address="a" * 300), ["address", "255"]),
          ("vocab", dict(vocab=VOCAB + 1), ["vocabulary", str(VOCAB + 1),
                                            str(VOCAB)]),
          ("vocab_0", dict(vocab=0), ["vocabulary", "0"]),
          ("layout", dict(layout_hash=7), ["layout", "0000000000000007"]),
          ("kv_dtype", dict(kv_dtype="int8 "), ["kv_dtype"]),
          ("kv_dtype_long", dict(kv_dtype="int8int8"), ["kv_dtype", "7"]),
          ("kv_blocks_0", dict(kv_blocks=0), ["kv_blocks"]),
          ("block_size_0", dict(block_size=0), ["block_size"]),
          ("max_model_len_0", dict(max_model_len=0), ["max_model_len"]),
          ("max_seqs_0", dict(max_seqs=0), ["max_seqs"]),
          ("max_seqs_huge", dict(max_seqs=(1 << 20) + 1), ["max_seqs", "1048577", "1048576"]),
          ("kv_huge", dict(kv_blocks=(1 << 32) - 1), ["kv_blocks", "4294967295", "4294967296"]), ]


@cases(HELLOS)
def test_hello_refused(cluster, real_hello, case):
    _, changes, parts = case
    hello = wpb.Hello.FromString(real_hello.SerializeToString())
    hello.name = "fake"
    for k, v in changes.items():
        setattr(hello, k, v)
    f = FakeWorker(cluster, hello)
    reasons = []
    with pytest.raises(grpc.RpcError):
        for m in f.stream:
            reasons.append(m.reject.reason)
    expect((f.stream.code(), f.stream.details()), PRECONDITION, *parts)
    assert reasons == [f.stream.details()]
    f.close()
    status = cluster.status()
    assert len(status.workers) == 2
    told = next(w for w in status.refused_workers if w.name == hello.name[:127])
    assert 1 <= told.times_for_good == told.times and told.reason.isprintable()


def test_registry_out_of_order(cluster, real_hello):
    """Snapshots and drains before hello, hello twice, silence, a stranger's address: the router
    keeps what it has."""
    for first in ([], [wpb.WorkerMessage(snapshot=wpb.Snapshot(seq=1, running=2**32 - 1))] * 3, [
            wpb.WorkerMessage(drain=wpb.Drain())
    ], [wpb.WorkerMessage()]):
        c = cluster.channel.stream_stream(
            JOIN, request_serializer=wpb.WorkerMessage.SerializeToString)(iter(first),
                                                                          timeout=10 * SLOW)
        list(c)
        assert c.code() == OK
    hello = wpb.Hello.FromString(real_hello.SerializeToString())
    hello.name, hello.address = "fake", "127.0.0.1:1"
    f = FakeWorker(cluster, hello)
    assert "dialled back 127.0.0.1:1" in next(f.stream).reject.reason  # nobody answers there
    f.close()
    hello.instance_key = b""  # as an older worker's hello: it is not dialled back
    f = FakeWorker(cluster, hello)
    assert next(f.stream).welcome.protocol == 1
    f.out.put(
        wpb.WorkerMessage(snapshot=wpb.Snapshot(seq=2**64 - 1, kv_held=2**32 -
                                                1, tokens_queued=2**64 - 1, running=2**32 -
                                                1, waiting=2**32 - 1, prefill_tokens_total=2**64 -
                                                1)))
    f.out.put(wpb.WorkerMessage(hello=hello))
    with pytest.raises(grpc.RpcError):
        list(f.stream)
    expect((f.stream.code(), f.stream.details()), PRECONDITION, "hello")
    f.close()
    cluster.wait_for(lambda: len(cluster.status().workers) == 2, "the fake to go", 5 * SLOW)


def ticket(**kw):
    return wpb.DecodeEvent(ticket=wpb.Ticket(**kw)).SerializeToString()


def tokens_event(index, token, finish=0):
    return wpb.DecodeEvent(tokens=wpb.Tokens(
        out=[wpb.TokenOut(index=index, token=token, finish=finish)])).SerializeToString()


def hold(messages):
    """Says these and then nothing, until the caller gives up."""
    def run(data, context):
        yield from messages(data)
        while context.is_active():
            time.sleep(0.01)

    return run


DECODE_LIES = {
    "ends_at_once": lambda data, ctx: iter([]), "internal": lambda data, ctx: abort_with(ctx),
    "invalid": lambda data, ctx: ctx.abort(grpc.StatusCode.INVALID_ARGUMENT, "I do not like it"),
    "unimplemented": lambda data, ctx: ctx.abort(grpc.StatusCode.UNIMPLEMENTED, "I cannot do it"),
    "exhausted": lambda data, ctx: ctx.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full"),
    "garbage": lambda data, ctx: iter([b"\xff" * 30]), "empty_event": lambda data, ctx: iter(
        [b"", wpb.DecodeEvent(tokens=wpb.Tokens()).SerializeToString()]),
    "no_grant": hold(lambda data: [ticket(slot=1)]),
    "grant_of_noise": hold(lambda data: [ticket(slot=1, grant=random.Random(9).randbytes(280))]),
    "grant_too_large": hold(lambda data: [ticket(slot=1, grant=b"x" * 1_000_000)]),
    "cached_too_much": hold(
        lambda data: [ticket(slot=1, grant=b"x" * 280, cached_tokens=2**32 - 1)]),
    "cached_not_whole": hold(lambda data: [ticket(slot=1, grant=b"x" * 280, cached_tokens=3)]),
    "two_tickets": hold(lambda data: [ticket(slot=1, grant=b"x" * 280)] * 2),
    "token_negative": lambda data, ctx: iter(
        [tokens_event(len(wpb.DecodeRequest.FromString(data).seq.tokens), -5)]),
    "token_vocab": lambda data, ctx: iter(
        [tokens_event(len(wpb.DecodeRequest.FromString(data).seq.tokens), VOCAB)]),
    "token_gap": lambda data, ctx: iter(
        [tokens_event(len(wpb.DecodeRequest.FromString(data).seq.tokens) + 1, 5)]),
    "token_index_0": lambda data, ctx: iter([tokens_event(0, 5)]),
    "token_index_max": lambda data, ctx: iter([tokens_event(2**32 - 1, 5)]),
    "large": lambda data, ctx: iter([ticket(slot=1, grant=b"x" * 100_000_000)]),
}
PREFILL_LIES = {
    "ends_at_once": lambda data, ctx: iter([]), "internal": lambda data, ctx: abort_with(ctx),
    "invalid": lambda data, ctx: ctx.abort(grpc.StatusCode.INVALID_ARGUMENT, "I do not like it"),
    "garbage": lambda data, ctx: iter([b"\xff" * 30]), "empty_event": lambda data, ctx: iter([b""]),
    "empty_first": lambda data, ctx: iter(
        [wpb.PrefillEvent(first=wpb.FirstToken()).SerializeToString()]),
    "done_without_first": lambda data, ctx: iter(
        [wpb.PrefillEvent(done=wpb.PrefillDone()).SerializeToString()]),
    "index_0": lambda data, ctx: iter([
        wpb.PrefillEvent(first=wpb.FirstToken(out=wpb.TokenOut(index=0, token=4))).
        SerializeToString()
    ]), "token_vocab": lambda data, ctx: iter([
        wpb.PrefillEvent(first=wpb.FirstToken(out=wpb.TokenOut(
            index=len(wpb.PrefillRequest.FromString(data).seq.tokens), token=VOCAB))).
        SerializeToString()
    ]),
}


def serve_beside(cluster, hello, role, behaviour):
    hello = wpb.Hello.FromString(hello.SerializeToString())
    # The fake serves Decode and Prefill, a call for each request.
    hello.name, hello.role, hello.multiplex = "fake", role, False
    f = FakeWorker(cluster, hello, behaviour)
    try:
        assert next(f.stream).welcome.protocol == 1
        for _ in range(3):
            r = cluster.generate(**REFERENCE, timeout=20 * SLOW)
            assert (r.code, r.tokens) == (OK, cluster.want), (r.code, r.details)
        assert f.calls > 0, "the fake was never asked"
    finally:
        f.close()
    cluster.wait_for(lambda: len(cluster.status().workers) == 2, "the fake to go", 5 * SLOW)


@pytest.mark.parametrize("lie", list(DECODE_LIES)[::2 if SHORT else 1])
def test_decode_worker_that_lies(cluster, real_hello, lie):
    """It joins with the right layout and then breaks the protocol: the client's tokens come,
    from the true one."""
    serve_beside(cluster, real_hello, "decode", DECODE_LIES[lie])


@pytest.mark.parametrize("lie", list(PREFILL_LIES)[::2 if SHORT else 1])
def test_prefill_worker_that_lies(cluster, real_hello, lie):
    serve_beside(cluster, real_hello, "prefill", PREFILL_LIES[lie])


def test_worker_that_hangs():
    """Calls are taken, snapshots flow, nothing moves: after stall_ms the request goes elsewhere.
    Health means progress."""
    with Cluster(router_args=["--policy", "round_robin", "--stall-ms", 800 if SHORT else 300]) as c:
        r = FakeRouter(ROUTER_ANSWERS["welcome"])
        d = own_decode(c, r.port)
        hello = r.hello.get(timeout=30 * SLOW)
        r.server.stop(None)
        d.signal(15)
        assert d.wait_exit(20 * SLOW) == 0
        hello.name, hello.multiplex = "fake", False
        want = c.generate(**REFERENCE)
        released = threading.Event()

        def hang(data, context):
            released.wait(30 * SLOW)
            yield from ()

        f = FakeWorker(c, hello, hang, snapshots=True)
        assert next(f.stream).welcome.protocol == 1
        results = [c.generate(**REFERENCE) for _ in range(3)]
        released.set()
        f.close()
        assert [(x.code, x.tokens)
                for x in results] == [(OK, want.tokens)] * 3, [x.details for x in results]
        assert f.calls > 0 and any(x.ledger.failovers for x in results)
        c.wait_for(lambda: len(c.status().workers) == 2, "the fake to go", 5 * SLOW)
        c.wait_idle()


def test_no_prompt_is_taken_that_one_grant_cannot_hold(tmp_path):
    """A grant has 8,192 blocks at most; a model's context, and the pools, may be longer."""
    model = pocket_with(tmp_path,
                        {"config.json": lambda c: c.update(max_position_embeddings=70000)})
    for mode, prefill, longest in (("pd", 1, 8192 * 8), ("colocated", 0, 70000)):
        with Cluster(model=model, mode=mode, prefill=prefill, dtype="bf16", kv_memory="80MiB",
                     worker_args=["--block-size", 8, "--kv-dtype", "int8"]) as c:
            assert [m.max_model_len for m in c.status().models] == [longest]
