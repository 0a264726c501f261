"""A router that is asked to end while a stream is live: it finishes, and clients are told to go
elsewhere instead of being refused."""
import http.client
import json
import signal
import time

import grpc

from harness import SLOW, free_port
from test_routers import fleet

OK = grpc.StatusCode.OK
N_TOKENS = 60  # of the stream that lasts
# The decode worker stops in that stream, which therefore lasts until it is told to go on. It has
# made as many tokens before; requests of one token do without it.
STOP = {"decode-0": {"TANDEM_FAULT": f"decode_token:stop:{N_TOKENS + 5}"}}
PATIENCE_MS = 60000 * SLOW


def know_both(a, b):
    """The channel of a client that knows both routers; its connection is to the first."""
    a.channel.close()
    a.channel = grpc.insecure_channel(f"ipv4:127.0.0.1:{a.port},127.0.0.1:{b.port}",
                                      [("grpc.use_local_subchannel_pool", 1)])
    return a.channel


def assert_answered_until_it_has_gone(a, b, ask, want):
    """Every answer is given, by either, until the port of the one that drains is closed."""
    n_before, begin = b.status().finished, time.monotonic()
    while b.status().finished == n_before:
        r = a.generate(ask)
        assert (r.code, r.tokens) == (OK, want), r.details
        assert time.monotonic() - begin < 30 * SLOW


def test_a_draining_router_sends_clients_to_the_other(tmp_path):
    port = free_port()
    http_args = ["--http-listen", f"127.0.0.1:{port}", "--test-drain-linger-ms", 0]
    patient = ["--drain-timeout-ms", 60000, "--worker-timeout-ms", PATIENCE_MS]
    with fleet(tmp_path, router_args=patient, worker_args=["--peer-timeout-ms", PATIENCE_MS],
               envs=STOP) as (a, b):
        ask = a.request(prompt="Once upon a time", max_tokens=1, temperature=0)
        client = know_both(a, b)
        want = a.generate(ask).tokens
        a.router.signal(signal.SIGTERM)  # with short requests alone, one at a time
        assert_answered_until_it_has_gone(a, b, ask, want)
        assert a.router.wait_exit(20 * SLOW) == 0
        client.close()
        a.channel = None
        a.router_args += http_args
        a.start_router(listen=f"127.0.0.1:{a.port}")
        a.wait_workers(2)
        client = know_both(a, b)
        assert a.generate(ask).tokens == want
        long = a.request(prompt="Fox", max_tokens=N_TOKENS, temperature=0.5, seed=1,
                         ignore_eos=True)
        whole = b.generate(long).tokens
        keep = http.client.HTTPConnection("127.0.0.1", port, timeout=30 * SLOW)
        body = json.dumps({"prompt": "a", "max_tokens": 1, "temperature": 0})
        keep.request("POST", "/v1/completions", body)
        first = keep.getresponse().read()
        stream = a.stream(long)
        got = list(next(stream).token_ids)
        decode = a.workers["decode-0"]
        decode.wait_log(r"ev=fault_fires")
        a.router.signal(signal.SIGTERM)
        assert_answered_until_it_has_gone(a, b, ask, want)
        keep.request("POST", "/v1/completions", body)
        answer = keep.getresponse()
        assert (answer.status, answer.headers["Connection"]) == (200, "close")
        assert answer.read()[-40:] == first[-40:]
        assert a.router.alive()
        decode.signal(signal.SIGCONT)
        got += [t for m in stream for t in m.token_ids]
        assert stream.code() == OK and got == whole
        assert a.router.wait_exit(30 * SLOW) == 0
        client.close()
        a.channel = None
