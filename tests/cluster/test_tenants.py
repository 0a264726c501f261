"""Tenants: the prefix caches of different owners are apart (no hit, no count, no KV less to send
that would tell), and what parts them changes no token."""
import hashlib
import json
import os
import re
import socket
import subprocess
import threading

import grpc
import pytest

from harness import BIN, PATIENT, SLOW, Cluster, free_port, pb
from test_http import Http
from test_metrics import scrape
from test_strangers import certs, creds, tls_args  # noqa: F401  certs is a fixture

OK, INVALID = grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT
UNAUTHENTICATED, DENIED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED
PROMPT = "The little fox walked over the hill and saw a dog. " * 16


def computed(c, port, before):
    """Prompt tokens that the worker at `port` has computed since it had computed `before`.

    The worker writes its metrics at the end of a turn of its step loop, after the answer has
    left. So this waits for the worker's own counters: every request here computes at least one
    prompt token, and in one step."""
    def counted():
        m = scrape(port)
        return m["td_num_requests_running"] == 0 and m["td_prompt_tokens_total"] > before

    c.wait_for(counted, "the prompt in the worker's metrics", 10 * SLOW)
    c.wait_idle()
    return int(scrape(port)["td_prompt_tokens_total"]) - before


def probe(mode):
    """Owners in turn send one prompt; for each: (cached_tokens, tokens prefilled, KV bytes sent
    to decode) and the tokens of the answer."""
    port = free_port()
    alone = ["--metrics-listen", f"127.0.0.1:{port}"]
    pd = mode == "pd"
    with Cluster(prefill=0, decode=1 if pd else 0, mode=mode, **PATIENT) as c:
        c.start_worker("prefill" if pd else "decode", args=alone)
        total, answers = 0, []

        def ask(**who):
            nonlocal total
            r = c.generate(prompt=PROMPT, max_tokens=4, temperature=0.7, seed=11, ignore_eos=True,
                           **who)
            assert r.code == OK, r.details
            n = computed(c, port, total)
            total += n
            answers.append(r.tokens)
            return r.usage.cached_tokens, n, r.ledger.transfer_bytes

        first = ask(tenant="a")
        n = first[1]
        assert first[0] == 0 and n >= 10 * 16 and (first[2] > 0) == pd, first
        hit = (n - 1) // 16 * 16
        again = ask(tenant="a")
        assert again[:2] == (hit, n - hit) and again[2] <= first[2], again
        # Whoever is not a computes all of it and has all of it sent, as if nobody had asked before.
        for who in (dict(tenant="b"), dict(
                tenant="a", cache_salt="x"), dict(
                    tenant="a", cache_salt="y"), dict(cache_salt="a"), dict(), dict(tenant="ax")):
            got = ask(**who)
            assert got == first, (who, got, first)
        # Each has its own, and only its own.
        for who in (dict(tenant="b"), dict(tenant="a",
                                           cache_salt="x"), dict(cache_salt="a"), dict()):
            got = ask(**who)
            assert got[:2] == (hit, n - hit), (who, got)
        assert answers == [answers[0]] * len(answers)  # a salt never changes a token (I1)
        c.wait_idle()


def test_no_tenant_sees_what_another_has_warmed():
    probe("pd")


def test_no_tenant_sees_what_another_has_warmed_colocated():
    probe("colocated")


def test_limits_are_named():
    with Cluster(**PATIENT) as c:
        r = c.generate(prompt="Once", max_tokens=2, cache_salt="s" * 129)
        assert r.code == INVALID and "cache_salt has 129 bytes, limit 128" in r.details, r.details
        r = c.generate(prompt="Once", max_tokens=2, tenant="t" * 64, cache_salt="s" * 128)
        assert r.code == OK, r.details
        c.wait_idle()


# ---- the file of tenants
# -------------------------------------------------------------------------------------------------

ACME, BETA, NEW = "key-of-acme-0123456789", "key-of-beta-0123456789", "new-key-of-beta-98765432"


def hashed(key):
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def write(path, *tenants):
    """As Kubernetes renews a file: another one takes its place."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"tenants": tenants}))
    os.replace(new, path)


def bearer(key):
    return [("authorization", "Bearer " + key)]


def test_who_is_no_tenant_is_refused_and_names_bind(tmp_path):
    """A key says whose a request is, whatever the request says; who has none is refused before
    its prompt is looked at. All of it replays (I5)."""
    path, log, port = tmp_path / "tenants.json", tmp_path / "decisions", free_port()
    acme = {"name": "acme", "keys": [hashed(ACME)], "classes": ["gold", "chat"]}
    write(path, acme, {"name": "beta", "keys": [hashed(BETA)], "weight": 3, "classes": ["bulk"]})
    args = [
        "--tenants", path, "--slo-class", "chat gold bulk", "--decision-log", log,
        "--metrics-listen", f"127.0.0.1:{port}"
    ]
    ask = dict(prompt=PROMPT, max_tokens=4, temperature=0, ignore_eos=True)
    with Cluster(router_args=args, **PATIENT) as c:
        refused = [(None, {}, UNAUTHENTICATED, "send a key"),
                   (None, dict(tenant="acme"), UNAUTHENTICATED, "send a key"),
                   (bearer("wrong-" + ACME), {}, UNAUTHENTICATED, "is no tenant's"),
                   (bearer(hashed(ACME)), {}, UNAUTHENTICATED, "is no tenant's"),
                   (bearer(ACME), dict(tenant="beta"), DENIED,
                    'tenant is "beta"; the caller is tenant "acme"'),
                   (bearer(ACME), dict(slo_class="bulk"), DENIED,
                    'slo_class is "bulk", which tenant "acme" may not use'),
                   (bearer(ACME), dict(tenant="t" * 65), INVALID, "tenant has 65 bytes, limit 64")]
        for metadata, fields, code, message in refused:
            r = c.generate(prompt="Once", max_tokens=2, metadata=metadata, **fields)
            assert r.code == code and message in r.details and ACME not in r.details, (fields,
                                                                                       r.code,
                                                                                       r.details)
        for name, request, response in (("Tokenize", pb.TokenizeRequest(prompt="Once"),
                                         pb.TokenizeResponse), ("Models", pb.ModelsRequest(),
                                                                pb.ModelsResponse)):
            call = c.channel.unary_unary(f"/tandem.v1.Inference/{name}",
                                         request_serializer=type(request).SerializeToString,
                                         response_deserializer=response.FromString)
            with pytest.raises(grpc.RpcError) as e:
                call(request, timeout=10 * SLOW)
            assert e.value.code() == UNAUTHENTICATED, name
            call(request, timeout=10 * SLOW, metadata=bearer(BETA))
        first = c.generate(metadata=bearer(ACME), tenant="acme", **ask)
        assert first.code == OK and first.usage.cached_tokens == 0, (first.details, first.ledger)
        assert first.ledger.slo_class == "chat", (first.details, first.ledger)
        c.wait_idle()
        other = c.generate(metadata=bearer(BETA),
                           **ask)  # the field is left out: the key says whose it is
        assert (other.code, other.usage.cached_tokens, other.ledger.slo_class,
                other.tokens) == (OK, 0, "bulk", first.tokens), (other.details, other.usage)
        c.wait_idle()
        again = c.generate(metadata=bearer(ACME), **ask)
        assert again.usage.cached_tokens > 0 and again.tokens == first.tokens
        seen = scrape(port)
        assert seen['td_tenant_refusals_total{reason="unknown"}'] == 6 and seen[
            'td_tenant_refusals_total{reason="denied"}'] == 2
        # A new file is in force within a second or two; a broken one changes nothing, and says why.
        write(path, acme, {"name": "beta", "keys": [hashed(NEW), hashed(BETA)]})
        c.router.wait_log(r"ev=tenants_loaded n=2(?s:.*)ev=tenants_loaded n=2")
        assert all(
            c.generate(metadata=bearer(key), prompt="Once", max_tokens=2).code == OK
            for key in (NEW, BETA))
        path.write_text('{"tenants": [{"name": "acme", "keys": ["' + ACME + '"]}]}')
        c.router.wait_log(
            r'ev=tenants_refused action=keep_old err=".*tenant \\"acme\\": keys\[0\] is not')
        assert c.generate(metadata=bearer(NEW), prompt="Once", max_tokens=2).code == OK
        write(path, {"name": "beta", "keys": [hashed(NEW)]})
        c.router.wait_log(r"ev=tenants_loaded n=1")
        r = c.generate(metadata=bearer(BETA), prompt="Once", max_tokens=2)
        assert r.code == UNAUTHENTICATED, r.code
        assert c.generate(metadata=bearer(NEW), prompt="Once", max_tokens=2).code == OK
        # the command line sends a key, and says nothing of a bad one but where it is
        key_file = tmp_path / "key"
        for text, status, words in ((NEW + "\n", 0, b""),
                                    (BETA, 1,
                                     b"UNAUTHENTICATED: the key in authorization is no tenant's"),
                                    ("", 2, b"first line must have 1..512"),
                                    ("k\u00e9y", 2, b"character 2 of the key")):
            key_file.write_text(text)
            p = subprocess.run([
                os.path.join(BIN, "tandem"), "generate", "--server", f"127.0.0.1:{c.port}",
                "--max-tokens", "2", "--api-key-file", key_file, "Once"
            ], capture_output=True, timeout=60 * SLOW)
            assert p.returncode == status and words in p.stderr and BETA.encode() not in p.stderr, (
                text, p.returncode, p.stderr)
        # So does a bench: with what it asks before the load, the load itself, and a sweep's points.
        load = [
            "--server", f"127.0.0.1:{c.port}", "--num-prompts", "4", "--isl", "8", "--osl", "2",
            "--goodput", "ttft:60000", "--max-sched-lag-ms", "100000", "--result-dir", tmp_path,
            "--no-send-slo", "--api-key-file", key_file
        ]
        for text, good, words in ((NEW, True, b""),
                                  (BETA, False,
                                   b"UNAUTHENTICATED: the key in authorization is no tenant's"),
                                  ("", False, b"first line must have 1..512")):
            key_file.write_text(text)
            for command in (["serve"], ["sweep", "--rates", "20"]):
                p = subprocess.run([os.path.join(BIN, "tandem"), "bench", *command, *load],
                                   capture_output=True, timeout=60 * SLOW)
                assert (p.returncode == 0) == good and words in p.stderr, (command, text,
                                                                           p.returncode, p.stdout,
                                                                           p.stderr)
                assert BETA.encode() not in p.stderr
        c.wait_idle()
        logged = c.router.log()
        assert ACME not in logged and BETA not in logged and NEW not in logged
        assert "ev=keys_in_clear" in logged and "ev=tenant_refused" in logged
    # what the core was told of whose share is how large: acme, beta, acme, then beta after the file
    # gave it no weight
    weights = [
        int(w) for w in re.findall(r"^e kind=10 .* weight=(\d+) ", log.read_text(), re.MULTILINE)
    ]
    assert weights[:3] == [1000, 3000, 1000] and set(weights[3:]) == {1000}, weights
    replay = subprocess.run([os.path.join(BIN, "tandem"), "sim", "replay", log],
                            capture_output=True, timeout=60 * SLOW)
    assert replay.returncode == 0 and b": the same\n" in replay.stdout, (
        replay.stdout, replay.stderr.decode()[-3000:])


LARGE = [f"/tandem.v1.Inference/{m}" for m in ("Generate", "Tokenize", "Detokenize")] + [
    f"/inference.GRPCInferenceService/{m}" for m in ("ModelInfer", "ModelStreamInfer")
]


def test_a_stranger_is_told_before_its_request(tmp_path):
    """By its metadata alone: no message is waited for, and so none is kept."""
    path, over = tmp_path / "tenants.json", threading.Event()
    write(path, {"name": "acme", "keys": [hashed(ACME)]})

    def nothing():
        over.wait()
        yield from ()

    with Cluster(prefill=0, decode=0, router_args=["--tenants", path], **PATIENT) as c:
        for method in LARGE:
            for metadata in (None, bearer("wrong-" + ACME)):
                call = c.channel.stream_stream(method)(nothing(), timeout=20 * SLOW,
                                                       metadata=metadata)
                assert call.code() == UNAUTHENTICATED, (method, call.code(), call.details())
            call = c.channel.stream_stream(method)(nothing(), timeout=0.3, metadata=bearer(ACME))
            assert call.code() == grpc.StatusCode.DEADLINE_EXCEEDED, (method, call.code())
        over.set()


def test_a_certificate_is_a_tenant(tmp_path, certs):  # noqa: F811
    path = tmp_path / "tenants.json"
    write(path, {"name": "acme", "certificates": ["*.clients.test"]},
          {"name": "beta", "keys": [hashed(BETA)]})
    with Cluster(router_args=["--tenants", path, *tls_args(certs, "router")],
                 worker_args=[*PATIENT["worker_args"],
                              *tls_args(certs, "worker")], worker_timeout_ms=20000, tls=creds(
                                  certs, "client")) as c:
        r = c.generate(prompt="Once", max_tokens=2)
        assert r.code == OK, r.details
        r = c.generate(prompt="Once", max_tokens=2, tenant="beta")
        assert r.code == DENIED and 'the caller is tenant "acme"' in r.details, r.details
        r = c.generate(prompt="Once", max_tokens=2, metadata=bearer(BETA))
        assert r.code == DENIED and 'the key is tenant "beta"' in r.details, r.details
        write(path, {"name": "acme", "certificates": ["*.elsewhere.test"]})
        c.router.wait_log(r"ev=tenants_loaded n=1")
        r = c.generate(prompt="Once", max_tokens=2)
        assert r.code == UNAUTHENTICATED, r.details
        assert "no name of the caller's certificate" in r.details, r.details
        assert "ev=keys_in_clear" not in c.router.log()
        c.wait_idle()


def test_rates(tmp_path):
    """Above a rate: RESOURCE_EXHAUSTED and when to come again, at both doors; others are served."""
    keys = {name: f"key-of-{name}-0123456789" for name in ("few", "short", "free", "trial")}
    path = tmp_path / "tenants"
    write(path, {
        "name": "few", "keys": [hashed(keys["few"])], "requests_per_s": 0.001
    }, {"name": "short", "keys": [hashed(keys["short"])], "tokens_per_s": 0.01},
                 {"name": "free", "keys": [hashed(keys["free"]), {
                     "key": hashed(keys["trial"]), "requests_per_s": 0.001, "classes": ["bulk"]
                 }]})
    args = ["--api-keys", path, "--slo-class", "bulk:ttft=9e5,tpot=9e5"]
    with Cluster(router_args=[*args, "--http-listen", "127.0.0.1:0"], **PATIENT) as c:
        http = Http(c)
        ask = {"prompt": "a", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        for name, rate in (("few", "requests_per_s, 0.001"), ("short", "tokens_per_s, 0.01"),
                           ("trial", "requests_per_s, 0.001")):
            me = {"Authorization": "Bearer " + keys[name]}
            assert http.ask("/v1/completions", ask, me)[0] == 200
            status, headers, text = http.ask("/v1/completions", ask, me)
            error = json.loads(text)["error"]
            assert status == 429 and error["type"] == "rate_limit_error", text
            whose = 'this key of tenant "free"' if name == "trial" else f'tenant "{name}"'
            assert error["message"].startswith(f"{whose} is above its {rate}: "), text
            # 999 s for a request; the prompt and 4 tokens of output, one above zero, and more
            assert int(headers["Retry-After"]) > 400
            r = c.generate(**ask, metadata=bearer(keys[name]))
            assert r.code == grpc.StatusCode.RESOURCE_EXHAUSTED and rate in r.details
            assert int(r.trailing["retry-delay-ms"]) > 400000
            # A large body is not waited for.
            said = said_to_head(http.port, keys[name], 1 << 20)
            assert said.startswith("http/1.1 429 ") and "connection: close" in said, said
            assert int(re.search("retry-after: (.*)", said)[1]) > 400, said
        for _ in range(5):
            assert http.ask("/v1/completions", ask, {"Authorization": "Bearer " + keys["free"]
                                                     })[0] == 200


def said_to_head(port, key, n_bytes):
    """The head of the answer to a request of which the head alone is sent."""
    with socket.create_connection(("127.0.0.1", port), timeout=20 * SLOW) as s:
        s.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
                  f"Content-Length: {n_bytes}\r\n\r\n".encode())
        said = b""
        while b"\r\n\r\n" not in said:
            said += s.recv(1 << 16) or b"\r\n\r\n"
    return said.decode().lower()


def test_a_wrong_prompt_costs_no_tokens(tmp_path):
    """Nor do those that stand before it in the same request: nothing of them begins."""
    key, path = "key-of-few-0123456789", tmp_path / "tenants"
    write(path, {"name": "few", "keys": [hashed(key)], "tokens_per_s": 0.01})
    args = ["--tenants", path, "--http-listen", "127.0.0.1:0"]
    with Cluster(router_args=args, **PATIENT) as c:
        http, me = Http(c), {"Authorization": "Bearer " + key}
        limit = json.loads(http.ask("/v1/models", None, me)[2])["data"][0]["max_model_len"]
        for prompt in ["a" * 40], ["a", "a" * 40], ["a", "a", "a" * 40]:
            status, _, text = http.ask("/v1/completions",
                                       {"prompt": prompt, "max_tokens": limit - 5}, me)
            assert status == 400 and b"max_tokens" in text, text
        for n in 1, 2:  # what is wrong with a schema is seen later
            ask = {"prompt": "a", "n": n, "guided_json": {"minItems": 9999}, "max_tokens": 5}
            status, _, text = http.ask("/v1/completions", ask, me)
            assert status == 400 and b"minItems is 9999" in text, text
        assert http.ask("/v1/completions", {"prompt": "a", "max_tokens": 1}, me)[0] == 200


def test_a_full_router_takes_nothing_of_a_rate(tmp_path):
    """Who is refused because max_requests are live has not had a request."""
    keys = {name: f"key-of-{name}-0123456789" for name in ("few", "holder")}
    path = tmp_path / "tenants"
    write(path, {"name": "few", "keys": [hashed(keys["few"])], "requests_per_s": 0.001},
          {"name": "holder", "keys": [hashed(keys["holder"])]})
    ask = {"prompt": "a", "max_tokens": 2, "temperature": 0}
    args = ["--tenants", path, "--max-requests", 1, "--http-listen", "127.0.0.1:0"]
    with Cluster(router_args=args, **PATIENT) as c:
        http = Http(c)
        me = {"Authorization": "Bearer " + keys["few"]}
        with c.decode_stopped():
            held = c.stream(c.request(prompt="Once", max_tokens=4), metadata=bearer(keys["holder"]))
            c.wait_for(lambda: c.status().live == 1, "the request that is held", 20 * SLOW)
            for _ in range(3):
                r = c.generate(**ask, metadata=bearer(keys["few"]))
                assert r.code == grpc.StatusCode.RESOURCE_EXHAUSTED, (r.code, r.details)
                assert "max_requests" in r.details, r.details
                status, _, text = http.ask("/v1/completions", ask, me)
                assert status == 429 and b"max_requests" in text, text
        list(held)
        c.wait_idle()
        assert http.ask("/v1/completions", ask, me)[0] == 200
        status, _, text = http.ask("/v1/completions", ask, me)
        assert status == 429 and b"requests_per_s" in text, text


@pytest.mark.parametrize("n", [1, 3])
def test_a_full_queue_takes_no_tokens_of_a_rate(tmp_path, n):
    """The prompt was read, and nothing of it was computed."""
    key, path = "key-of-few-0123456789", tmp_path / "tenants"
    write(path, {"name": "few", "keys": [hashed(key)], "tokens_per_s": 0.01})
    args = ["--tenants", path, "--max-queued", 0]
    with Cluster(prefill=0, decode=0, router_args=args, **PATIENT) as c:
        ask = dict(prompt="The little fox.", max_tokens=2, n=n, metadata=bearer(key))
        for _ in range(3):
            r = c.generate(**ask)
            assert r.code == grpc.StatusCode.RESOURCE_EXHAUSTED, (r.code, r.details)
            assert "queue is full" in r.details, r.details
        c.start_worker("prefill", wait=False)
        c.start_worker("decode", wait=False)
        c.wait_workers(2)
        r = c.generate(**ask)
        assert r.code == OK, r.details
        r = c.generate(**ask)
        assert "is above its tokens_per_s" in r.details, r.details
