"""tandem bench against servers with the OpenAI completions API, played by a script: what it says
of them is what they did."""
import json
import os
import signal
import subprocess

import pytest

from harness import BIN, SLOW
from openai_server import DONE, OpenAI, chunk, usage

ANY_LAG = ["--max-sched-lag-ms",
           "100000"]  # this machine may be late: only the tests of that rule judge it


def command(kind, url, *args):
    return [
        os.path.join(BIN, "tandem"), "bench", kind, "--backend", "openai", "--base-url", url,
        "--no-progress", *map(str, args)
    ]


def bench(url, *args, kind="serve", timeout=60, env=None):
    p = subprocess.run(command(
        kind, url, *args), stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout * SLOW,
                       check=False, env={**os.environ, **env} if env else None)
    return p.returncode, p.stdout.decode(), p.stderr.decode()


def read(out_dir):
    result = json.loads((out_dir / "r.json").read_text())
    lines = [
        json.loads(line) for line in (out_dir / "profile_export.jsonl").read_text().splitlines()
    ]
    assert len(lines) == result["pd"]["offered"]
    return result, lines


def run(server, out_dir, *args, rc=0, **kwargs):
    got, out, err = bench(server.url, "--save-detailed", "--result-dir", out_dir,
                          "--result-filename", "r.json", "--warmup", 0, *ANY_LAG, *args, **kwargs)
    assert got == rc, f"exit {got}\n{out}\n{err}"
    return (*read(out_dir), out, err)


TEXTS = ["é", "€", "", "𝄞", " plain",
         "\n"]  # the empty one: half a character that the server holds back


def six_tokens(answer, index, body):
    """Every stream cut at another size, so that cuts fall into characters, lines and events;
    every third with CR LF."""
    events = [chunk(text) for text in TEXTS[:-1]] + [
        chunk(TEXTS[-1], "length"),
        usage(len(body["prompt"]), 6, cached=3), b": bye\n\n", DONE
    ]
    if index % 3 == 2:
        events = [event.replace(b"\n", b"\r\n") for event in events]
    answer.stream(events, cut=1 + index % 11)


def test_a_whole_run(tmp_path):
    n = 33
    with OpenAI(six_tokens) as server:
        result, lines, out, _ = run(
            server, tmp_path, "--num-prompts", n, "--request-rate", 100, "--isl", 12, "--osl", 6,
            "--ignore-eos", "--goodput", "ttft:60000", "tpot:60000", "--seed", 5, "--tenants", 2,
            "--num-warmups", 2, "--extra-body", '{"top_k": 4, "stream_options": null}')
        bodies, paths = server.bodies, server.paths
    assert result["completed"] == n and result["failed"] == 0 and result[
        "backend"] == "openai" and result["model_id"] == "some/model"
    assert result["total_input_tokens"] == 12 * n and result["total_output_tokens"] == 6 * n
    assert result["output_lens"] == [6] * n and result["input_lens"] == [12] * n and [
        len(gaps) for gaps in result["itls"]
    ] == [5] * n
    for ttft, itl, latency in zip(result["ttfts"], result["itls"], result["latencies"]):
        assert 0 < ttft <= latency and min(itl) >= 0 and ttft + sum(itl) == pytest.approx(
            latency, abs=1e-6)
    pd = result["pd"]
    assert pd["attainment"]["n_good"] == pd["attainment"]["n"] == n and pd["rejected"] == {
        "429": 0, "deadline": 0, "error": 0, "unfinished": 0
    }
    assert pd["cached_tokens"] == 3 * n and pd["server"] == server.url
    assert pd["slo"]["sent"] is False
    for key in ("deflected", "wasted_prefill_tokens", "failovers", "preemptions", "jain_index"):
        assert key in pd and (pd[key] is None) == (key != "jain_index"), key
    assert pd["topology"] == {
        "mode": None, "policy": None, "prefill": None, "decode": None, "gpus": None
    }
    assert pd["steady"]["gpus"] is None and pd["steady"]["per_gpu_goodput"] is None and pd[
        "steady"]["request_goodput"] > 0
    assert all(
        v is None for stage in pd["stages_ms"].values()
        for v in stage.values()) and pd["predicted_ttft"] == {"mape": None, "coverage": None}
    for line in lines:
        meta = line["metadata"]
        assert meta["outcome"] == "completed" and meta["stages_ns"] == {} and meta[
            "cached_tokens"] == 3 and line["error"] is None
        assert all(meta[k] is None for k in ("prefill_node", "decode_node", "mode", "failovers"))
        assert line["metrics"]["output_sequence_length"]["value"] == 6
    assert "Stages" not in out and "Goodput per GPU" not in out
    assert "Successful requests:                     33" in out

    # What was sent: the two of the warm-up first.
    assert set(paths) == {"/v1/completions"} and len(bodies) == n + 2
    for body in bodies:
        assert body["model"] == "some/model" and body["stream"] is True and body[
            "max_tokens"] == 6 and body["ignore_eos"] is True and body["temperature"] == 0
        assert body["top_k"] == 4 and "stream_options" not in body and body["user"] in (
            "tenant-0", "tenant-1") and 0 <= body["seed"] < 2**31
        assert len(body["prompt"]) == 12 and all(
            isinstance(i, int) and 0 <= i < 500 for i in body["prompt"])
    assert len({tuple(body["prompt"])
                for body in bodies}) == n + 2 and len({body["seed"] for body in bodies[2:]}) == n


def test_texts_and_a_server_that_counts_nothing(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Once \\u00e9", "output_tokens": 3}\n')

    def script(answer, index, body):
        answer.stream([
            b": hello\n\n",
            chunk(""),
            chunk("a"),
            chunk(""),
            chunk("b", token_ids=[7, 8]),
            chunk("", "stop"), DONE
        ])

    with OpenAI(script, models=(404, {"detail": "Not Found"})) as server:
        result, lines, out, _ = run(server, tmp_path, "--dataset-name", "custom", "--dataset-path",
                                    prompts, "--num-prompts", 5, "--concurrency", 1, "--model", "m",
                                    "--endpoint", "/v1/completions")
        assert server.n_connections == 2, "one for the question, one for all the requests"
        assert [(b["prompt"], b["max_tokens"], b["stream_options"])
                for b in server.bodies] == [("Once é", 3, {"include_usage": True})] * 5
        assert "ignore_eos" not in server.bodies[0]
    # a: the first token; the empty chunk after it: one more; then two ids; the one that only says
    # "stop": none.
    assert result["output_lens"] == [4] * 5 and [len(gaps) for gaps in result["itls"]] == [2] * 5
    assert result["input_lens"] == [
        None
    ] * 5 and result["total_input_tokens"] is None and result["total_token_throughput"] is None
    assert result["pd"]["cached_tokens"] is None and lines[0]["metrics"]["input_sequence_length"][
        "value"] is None
    assert "Total input tokens" not in out


def broken_in_the_middle(answer):
    answer.start()
    answer.write(chunk("a") + chunk("é")[:-12])
    answer.hang_up()


def hang_up(answer):
    answer.hang_up()


FATES = [  # what the server does, outcome, HTTP status, retry delay, words of the error
    (lambda a: a.stream([chunk("a"), chunk("b", "stop"),
                         usage(9, 2), DONE]), "completed", None, None, None),
    (lambda a: a.send(429, {"error": {"message": "slow down"}}, Retry_After="7"), "rejected", 429,
     7000, "slow down"),
    (lambda a: a.send(503, b"overloaded\nmore", kind="text/plain"), "rejected", 503, None,
     "overloaded"),
    (lambda a: a.send(500, {"error": {"message": "CUDA " + "o" * 5000}}, Retry_After="7"), "failed",
     500, None, "CUDA ooo"),
    (lambda a: a.send(404, {"detail": "Not Found"}), "failed", 404, None, "Not Found"),
    (broken_in_the_middle, "failed", 200, None, ""),
    (lambda a: a.stream([chunk("a"), chunk("b", "stop")]), "failed", 200, None, "[DONE]"),
    (lambda a: a.stream([DONE]), "failed", 200, None, "without a token"),
    (lambda a: a.stream([chunk("a"), b'data: {"error": {"message": "engine died"}}\n\n', DONE]),
     "failed", 200, None, "engine died"),
    (lambda a: a.stream([chunk("a"), b"data: {nonsense\n\n", DONE]), "failed", 200, None,
     "chunk: line 1"),
    (lambda a: a.stream([b'data: {"choices": {}}\n\n', DONE]), "failed", 200, None,
     "choices must be an array"),
    (lambda a: a.stream([b"data: " + b"x" *
                         (1 << 20), b"x\n\n", DONE]), "failed", 200, None, "1048576"),
    (lambda a: a.send(200, {"choices": [{"text": "not streamed"}]}), "failed", 200, None,
     "'application/json', must be text/event-stream"), (hang_up, "failed", None, None, ""),
    (lambda a: a.stream([chunk("a"), chunk("b and more", "stop"),
                         usage(8, 5), DONE]), "completed", None, None,
     None),  # two chunks, five tokens
]


def test_every_way_to_fail(tmp_path):
    with OpenAI(lambda answer, index, body: FATES[index][0](answer)) as server:
        result, lines, out, err = run(server, tmp_path, "--num-prompts", len(FATES),
                                      "--concurrency", 1, "--isl", 9, "--osl", 2, "--goodput",
                                      "ttft:60000")
        assert len(server.bodies) == len(FATES), "a request is sent once"
    for i, (line, (_, outcome, code, retry, words)) in enumerate(zip(lines, FATES)):
        assert line["metadata"]["outcome"] == outcome, (i, line)
        error = line["error"]
        assert (error is None) == (outcome == "completed"), (i, line)
        if error:
            assert error["type"] == outcome and error["code"] == code and error.get(
                "retry_delay_ms") == retry, (i, error)
            assert words in error["message"] and 0 < len(error["message"]) <= 256, (i, error)
    pd = result["pd"]
    assert result["completed"] == 2 and result["failed"] == len(FATES) - 2 and pd["rejected"] == {
        "429": 2, "deadline": 0, "error": len(FATES) - 4, "unfinished": 0
    }
    assert pd["attainment"]["n"] == len(FATES) and pd["attainment"]["n_good"] == 2
    assert result["total_output_tokens"] == 7 and result["total_input_tokens"] == 17 and [
        len(result["itls"][i]) for i in (0, -1)
    ] == [1, 1]
    assert result["errors"][1] == "slow down" and "rejected (HTTP 429, 503):" in out
    assert "HTTP status 429: slow down" in err


def test_a_slow_first_token_misses_its_objective(tmp_path):
    slow_s, limit_ms = 0.6, 300

    def script(answer, index, body):
        if body["user"] == "tenant-1":
            answer.server.owner.release.wait(slow_s)
        answer.stream([chunk("a"), chunk("b", "stop"), usage(4, 2), DONE])

    with OpenAI(script) as server:
        result, lines, _, _ = run(server, tmp_path, "--num-prompts", 20, "--request-rate", 100,
                                  "--isl", 4, "--osl", 2, "--tenants", 2, "--goodput",
                                  f"ttft:{limit_ms}")
    slow = [line["metadata"]["tenant"] == "tenant-1" for line in lines]
    assert result["completed"] == 20 and 0 < sum(slow) < 20
    good = [
        (line["metadata"]["first_token_ns"] - line["metadata"]["scheduled_ns"]) / 1e6 <= limit_ms
        for line in lines
    ]
    assert not any(g for g, s in zip(good, slow)
                   if s) and min(t for t, s in zip(result["ttfts"], slow) if s) >= slow_s
    assert [line["metadata"]["slo_ok"]["ttft"]
            for line in lines] == good and result["pd"]["attainment"]["n_good"] == sum(good)


def held(answer, index, body):
    answer.start()
    answer.write(chunk("a"))
    answer.server.owner.release.wait(60 * SLOW)
    answer.end()


def test_what_runs_on_is_cancelled(tmp_path):
    with OpenAI(held) as server:
        result, lines, _, _ = run(server, tmp_path, "--num-prompts", 3, "--request-rate", 50,
                                  "--isl", 4, "--osl", 2, "--benchmark-grace-period", 0.5, rc=1)
        assert result["pd"]["rejected"]["unfinished"] == 3 == result["failed"]
        assert {line["error"]["type"] for line in lines} == {"unfinished"}
        # Nobody is asked to wait for an interrupt either: what there is, is told.
        server.got.clear()
        p = subprocess.Popen(
            command("serve", server.url, "--save-detailed", "--result-dir", tmp_path,
                    "--result-filename", "r.json", "--num-prompts", 3, "--request-rate", 50,
                    "--isl", 4, "--osl", 2, *ANY_LAG), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert server.got.wait(30 * SLOW)
        p.send_signal(signal.SIGINT)
        p.communicate(timeout=30 * SLOW)
        assert p.returncode == 130
        result, lines = read(tmp_path)
        assert lines and {line["error"]["type"] for line in lines
                          } == {"unfinished"} and "interrupted" in result["pd"]["invalid_reason"]


def test_tls(tmp_path):
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run([
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
        "-nodes", "-days", "2", "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1",
        "-keyout", key, "-out", cert
    ], check=True, capture_output=True)
    with OpenAI(six_tokens, tls=(cert, key)) as server:
        result, _, _, _ = run(server, tmp_path, "--num-prompts", 3, "--concurrency", 1, "--isl", 4,
                              "--osl", 6, "--tls-ca", cert)
        assert result["completed"] == 3 and server.n_connections == 2
        rc, out, err = bench(server.url, "--num-prompts", 1)
        assert rc == 1 and not out and server.url in err and "certificate" in err.lower(), err


def test_a_sweep(tmp_path):
    with OpenAI(six_tokens) as server:
        rc, out, err = bench(server.url, "--rates", "20,40", "--num-prompts", 8, "--isl", 4,
                             "--osl", 6, "--goodput", "ttft:60000", "--result-dir", tmp_path,
                             "--no-plots", *ANY_LAG, kind="sweep")
        assert rc == 0, (out, err)
    rows = [line.split(",") for line in (tmp_path / "sweep.csv").read_text().splitlines()]
    cells = [dict(zip(rows[0], row)) for row in rows[1:]]
    assert [(c["config"], c["rate"], c["deflected"]) for c in cells] == [("openai", "20", ""),
                                                                         ("openai", "40", "")]
    assert all(c["completed"] == c["offered"] != "0" for c in cells)


def test_nobody_there():
    rc, out, err = bench("http://127.0.0.1:1", "--num-prompts", 1)
    assert rc == 1 and not out and "http://127.0.0.1:1" in err and "connect" in err.lower(), (rc,
                                                                                              out,
                                                                                              err)


BAD = [(["--base-url", "grpc://h:1"], "grpc://h:1"), (["--base-url", "http://"], "--base-url"),
       (["--endpoint", "v1/completions"], "--endpoint"),
       (["--endpoint", "/v1/chat/completions"], "/v1/chat/completions"),
       (["--tls-ca", "/x"], "--tls-ca"), (["--tls-key", "/x"], "--tls-key"),
       (["--extra-body", '{"stream": false}'], "'stream'"), (["--extra-body", '{"n": 2}'], "'n'"),
       (["--dataset-name", "sharegpt", "--dataset-path", "/x"], "sharegpt"),
       (["--endpoint", "/generate"], "--model"), ]


def test_bad_options_are_named(tmp_path):
    for args, field in BAD:
        rc, out, err = bench("http://127.0.0.1:1", *args)
        assert rc == 2 and field in err and not out, f"{args}: exit {rc}: {err}"
    rc, out, err = bench("http://127.0.0.1:1", "--goodput", "ttft:5", "--modes", "pd",
                         "--cluster-model", "/x", kind="sweep")
    assert rc == 2 and "--modes" in err and "openai" in err, err
    # What only the server could have told.
    with OpenAI(six_tokens, models=(200, {"data": [{"id": "m", "max_model_len": 50}]})) as server:
        rc, _, err = bench(server.url, "--num-prompts", 1)
        assert rc == 2 and "--vocab-size" in err, err
        rc, _, err = bench(server.url, "--num-prompts", 1, "--vocab-size", 100, "--isl", 40,
                           "--osl", 20)
        assert rc == 2 and "40 input and 20 output tokens" in err, err
    with OpenAI(six_tokens, models=(404, {"detail": "Not Found"})) as server:
        rc, _, err = bench(server.url, "--num-prompts", 1)
        assert rc == 2 and "--model" in err and "HTTP 404: Not Found" in err, err
        assert not server.bodies
