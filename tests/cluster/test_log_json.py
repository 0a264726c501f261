"""--log-format json: every line that any daemon writes is one JSON object, whatever names clients
give."""
import json

import grpc

from harness import Cluster

HOSTILE = [
    'plain', 'two words', 'a"b', 'back\\slash', 'a=b lvl=error ev=forged', '"', '\\', '\\"',
    '"} {"ev":"forged"', 'tab\tnew\nline\r', '\x01\x7f', 'ä€😀', 'x' * 127, '€' * 42, '{}', 'a",b'
]


def lines_of(path):
    with open(path, "rb") as f:
        return f.read().decode().splitlines()


def test_every_line_is_an_object():
    args = ["--log-format", "json", "--log-level", "debug"]
    with Cluster(router_args=args, worker_args=args) as c:
        for name in HOSTILE:
            r = c.generate(prompt="Once", max_tokens=2, request_id=name)
            assert r.code == grpc.StatusCode.OK, (name, r.details)
            stream = c.stream(c.request(prompt="Once", max_tokens=1500, ignore_eos=True,
                                        request_id=name))
            next(stream)
            stream.cancel()
        c.generate(prompt="Once", max_tokens=2, model='no "such" model\n{')
        c.wait_idle()
        lines = {d.name: lines_of(d.log_path) for d in (c.router, *c.workers.values())}
    told = set()
    for name, written in lines.items():
        for line in written:
            pairs = json.loads(line, object_pairs_hook=list)
            keys = [k for k, _ in pairs]
            assert keys[:4] == ["ts", "lvl", "d", "ev"] and len(set(keys)) == len(keys), line
            assert all(isinstance(v, str) for _, v in pairs), line
            o = dict(pairs)
            assert o["ev"] != "forged" and o["lvl"] in ("debug", "info", "warn", "error"), line
            if o["ev"] in ("request_done", "request_cancelled"):
                told.add(o["req"])
        assert len(written) >= 3, name
    assert told == set(HOSTILE), set(HOSTILE) ^ told
