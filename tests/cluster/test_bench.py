"""tandem bench serve and replay against real daemons: what their files say is what happened,
recomputed here from single requests."""
import concurrent.futures
import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import time

import grpc
import pytest

from harness import BIN, SHORT, SLOW, Cluster, pb
from openai_server import DONE, OpenAI, chunk, usage

ANY_LAG = ["--max-sched-lag-ms",
           "100000"]  # this machine may be late: only the tests of that rule judge it


def bench(*args, timeout=90, **kwargs):
    p = subprocess.run([os.path.join(BIN, "tandem"), "bench", *map(str, args)],
                       stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout * SLOW,
                       check=False, **kwargs)
    return p.returncode, p.stdout.decode(), p.stderr.decode()


def run(cluster, out_dir, *args, kind="serve", rc=0):
    """One run with all its files: (result, lines of profile_export.jsonl, stdout)."""
    if kind == "serve" and "--benchmark-grace-period" not in args:  # 30 s are few on a busy machine
        args += ("--benchmark-grace-period", 120 * SLOW)
    got, out, err = bench(kind, "--server", f"127.0.0.1:{cluster.port}", "--save-detailed",
                          "--result-dir", out_dir, "--result-filename", "r.json", *args,
                          timeout=300)
    assert got == rc, f"exit {got}\n{out}\n{err}"
    with open(os.path.join(out_dir, "r.json"), encoding="utf-8") as f:
        result = json.load(f)
    with open(os.path.join(out_dir, "profile_export.jsonl"), encoding="utf-8") as f:
        lines = [json.loads(line) for line in f]
    assert len(lines) == result["pd"]["offered"]
    return result, lines, out


@pytest.fixture(scope="module")
def cluster():
    with Cluster() as c:
        yield c
        c.wait_idle()


def percentile(values, p):
    values = sorted(values)
    rank = p / 100 * (len(values) - 1)
    i = min(int(rank), len(values) - 2)
    return values[i] + (values[i + 1] - values[i]) * (rank - i)


def wilson(k, n, z=1.959963984540054):
    centre, half = k / n + z * z / 2 / n, z * math.sqrt(k / n * (1 - k / n) / n + z * z / 4 / n / n)
    return [max(0, (centre - half) / (1 + z * z / n)), min(1, (centre + half) / (1 + z * z / n))]


def good(line, limits):
    """The verdict from the line's stamps and its class's objectives alone."""
    meta, n = line["metadata"], line["metrics"]["output_sequence_length"]["value"]
    ttft_ms, tpot_ms = limits[meta["class"]]
    if line["error"]:
        return False
    ttft = (meta["first_token_ns"] - meta["scheduled_ns"]) / 1e6
    return ttft <= ttft_ms and (n < 2 or line["metrics"]["inter_token_latency"]["value"] <= tpot_ms)


def test_run_with_objectives(cluster, tmp_path):
    n, tokens = 50, 16
    # Objectives near the median, which a busy machine may meet always or never: so two classes
    # beside have what everybody meets and what nobody does. None
    # is told to the router, which would turn away what cannot meet them.
    probe, _, probe_out = run(cluster, tmp_path, "--num-prompts", 20, "--request-rate", 10, "--isl",
                              48, "--osl", tokens, "--ignore-eos", "--seed", 99, "--goodput",
                              "ttft:60000", "--no-send-slo", "--no-realtime", *ANY_LAG)
    assert "Missed TTFT <= 60000 ms:" in probe_out  # of one class; with more, each has a line
    ttft_ms, tpot_ms = probe["median_ttft_ms"] * 1.05, probe["p90_tpot_ms"] * 1.5
    result, lines, out = run(cluster, tmp_path, "--num-prompts", n, "--request-rate", 12,
                             "--input-len", 48, "--output-len", tokens, "--ignore-eos", "--goodput",
                             f"ttft:{ttft_ms}", f"tpot:{tpot_ms}", "--slo-class", "near:weight=4",
                             "all:ttft=600000,tpot=600000", "none:ttft=0.001", "--no-send-slo",
                             "--metadata", "team=a", "--seed", 3, *ANY_LAG)
    limits = {"near": (ttft_ms, tpot_ms), "all": (600000, 600000), "none": (0.001, tpot_ms)}
    pd = result["pd"]
    assert result["completed"] + result["failed"] == pd["offered"] == n and result["failed"] == sum(
        pd["rejected"].values())
    assert result["completed"] == n, pd["rejected"]
    assert result["total_output_tokens"] == n * tokens and result["total_input_tokens"] == n * 48
    assert result["team"] == "a" and pd["valid"] and pd["definitions"]["slo_clock"] and pd["slo"][
        "ttft_ms"] == pytest.approx(ttft_ms)
    assert probe["pd"]["generator_realtime"] is False and pd["generator_realtime"] in (
        True, False)  # as the system permits
    assert pd["topology"]["mode"] == "pd" and pd["topology"]["prefill"] == pd["topology"][
        "decode"] == 1 and pd["arrival"]["rescaled"]

    # vLLM's arrays, and its statistics from them.
    for ttft, itl, latency, n_out in zip(result["ttfts"], result["itls"], result["latencies"],
                                         result["output_lens"]):
        # A client that is behind gets several tokens in a message.
        assert n_out == tokens and len(itl) <= tokens - 1
        assert 0 <= ttft <= latency and min(itl, default=0) >= 0
        assert ttft + sum(itl) == pytest.approx(latency, abs=1e-6)
    ttfts = [t * 1e3 for t in result["ttfts"]]
    tpots = [(e - t) / (tokens - 1) * 1e3 for e, t in zip(result["latencies"], result["ttfts"])]
    itls = [gap * 1e3 for one in result["itls"] for gap in one]
    for name, values in (("ttft", ttfts), ("tpot", tpots), ("itl", itls)):
        assert result[f"mean_{name}_ms"] == pytest.approx(statistics.mean(values), rel=1e-6)
        assert result[f"std_{name}_ms"] == pytest.approx(statistics.pstdev(values), rel=1e-6)
        for p in (50, 90, 95, 99):
            assert result[f"p{p}_{name}_ms"] == pytest.approx(percentile(values, p), rel=1e-6)

    # The schedule: last arrival at n / rate, window behind its first tenth, the generator's lag.
    scheduled = [(line["metadata"]["scheduled_ns"] - lines[0]["metadata"]["scheduled_ns"]) / 1e9
                 for line in lines]
    assert scheduled == sorted(scheduled) and pd["steady"]["t1"] == pytest.approx(n / 12)
    lag = [(line["metadata"]["request_start_ns"] - line["metadata"]["scheduled_ns"]) / 1e6
           for line in lines]
    assert min(lag) >= 0 and pd["sched_lag_ms"]["p99"] == pytest.approx(
        percentile(lag, 99), abs=1e-3)
    assert 0 < pd["generator_cpu_s"] < result["duration"]
    window = [line for line in lines if line["metadata"]["in_window"]]
    assert len(window) == pd["attainment"]["n"] > 30

    # Attainment and goodput from the requests themselves.
    k = sum(good(line, limits) for line in window)
    assert 0 < k < len(window), "the objectives split nothing"
    assert pd["attainment"]["n_good"] == k and pd["attainment"]["joint"] == pytest.approx(
        k / len(window))
    assert pd["attainment"]["ci95_wilson"] == pytest.approx(wilson(k, len(window)))
    assert pd["attainment"]["ci95"][1] - pd["attainment"]["ci95"][0] >= pd["attainment"][
        "ci95_wilson"][1] - pd["attainment"]["ci95_wilson"][0] - 1e-9
    length = pd["steady"]["t1"] - pd["steady"]["t0"]
    assert pd["steady"]["request_goodput"] == pytest.approx(
        k / length) and pd["steady"]["per_gpu_goodput"] == pytest.approx(k / length / 2)
    assert result["request_goodput"] == pytest.approx(
        sum(good(line, limits) for line in lines) / result["duration"], rel=1e-6)
    for line in lines:
        assert line["metadata"]["slo_ok"]["joint"] == good(line, limits)
        stages = line["metadata"]["stages_ns"]
        at_router = sum(
            stages[s] for s in ("router_queue", "reserve", "prefill_queue", "prefill", "rpc"))
        assert 0 < at_router <= line["metrics"]["time_to_first_token"]["value"] * 1e6
        assert line["metadata"]["prefill_node"] == "prefill-0" and line["metadata"][
            "decode_node"] == "decode-0" and line["metadata"]["mode"] == "pd"
    for label in ("Successful requests:                     50", "Request goodput (req/s):",
                  "Mean TTFT (ms):", "P99 TPOT (ms):", "SLO attainment (%) [95% CI]:"):
        assert label in out
    cluster.wait_idle()


def cached_tokens(lines, want):
    """Prompt tokens found in the prefill worker's cache. The router answers a request that ends
    before that worker's report without it: then the stage is 0, too, and nothing is known."""
    got = [
        line["metadata"]["cached_tokens"] if line["metadata"]["stages_ns"]["prefill"] else None
        for line in lines
    ]
    assert len(got) == len(want) and any(g is not None for g in got)
    assert [w if g is None else g for g, w in zip(got, want)] == want


def test_seed_makes_the_prompts(cluster, tmp_path):
    for args, cached in ((("--seed", 501), 0),
                         (("--random-seed", 501),
                          48),  # the same prompts again: all blocks but the last
                         (("--seed", 502), 0), (("--seed", 503, "--num-warmups", 6),
                                                0)):  # warming up is not with the measured prompts
        result, lines, _ = run(cluster, tmp_path, "--num-prompts", 4, "--request-rate", 50, "--isl",
                               64, "--osl", 24, "--ignore-eos", *args, *ANY_LAG)
        assert result["completed"] == 4
        cached_tokens(lines, [cached] * 4)


def test_replay_shares_what_the_trace_shares(cluster, tmp_path):
    trace = tmp_path / "mooncake.jsonl"
    rows = [(0, 1024, [5, 6]), (400, 1024, [5, 7]), (800, 1536, [5, 6, 8]), (1200, 512, [9])]
    trace.write_text("".join(
        json.dumps({"timestamp": t, "input_length": n, "output_length": 256, "hash_ids": ids}) +
        "\n" for t, n, ids in rows))
    # One at a time: what the one before has computed is in the cache, however long that took.
    result, lines, _ = run(cluster, tmp_path, "--trace", trace, "--length-scale", 0.0625,
                           "--rate-scale", 2, "--ignore-eos", "--seed", 77, "--warmup", 0,
                           "--max-concurrency", 1, *ANY_LAG, kind="replay")
    assert result["completed"] == 4 and result["input_lens"] == [
        64, 64, 96, 32
    ] and result["output_lens"] == [16] * 4
    cached_tokens(lines, [0, 32, 64, 0])
    at = [(line["metadata"]["scheduled_ns"] - lines[0]["metadata"]["scheduled_ns"]) / 1e9
          for line in lines]
    assert at == pytest.approx([0, 0.2, 0.4, 0.6], abs=1e-6)
    arrival = result["pd"]["arrival"]
    assert (arrival["process"], arrival["time_scale"], arrival["length_scale"],
            arrival["trace_block_tokens"]) == ("trace", 0.5, 0.0625, 32)
    assert result["request_rate"] is None and result["pd"]["dataset"] == "mooncake"


def test_closed_loop_and_texts(cluster, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        '{"prompt": "Once upon a time", "output_tokens": 8}\n{"prompt": "The old boat"}\n')
    result, lines, _ = run(cluster, tmp_path, "--dataset-name", "custom", "--dataset-path", prompts,
                           "--num-prompts", 30, "--concurrency", 4, "--custom-output-len", 8,
                           "--ignore-eos", "--slo-class", "gold:ttft=60000,weight=3",
                           "free:ttft=0.001", "--tenants", 2, "--no-send-slo", "--warmup", 0,
                           *ANY_LAG)
    pd = result["pd"]
    assert result["completed"] == 30 and result["max_concurrent_requests"] <= 4 and result[
        "max_concurrency"] == 4
    assert pd["arrival"]["process"] == "closed_loop" and result["request_rate"] == "inf"
    assert min(
        line["metadata"]["scheduled_ns"] for line in lines) == lines[0]["metadata"]["scheduled_ns"]
    per_class = pd["per_class"]
    assert per_class["gold"]["n"] + per_class["free"]["n"] == 30 and per_class["free"]["n"] > 0
    assert per_class["gold"]["attainment"] == 1 and per_class["free"]["attainment"] == 0
    assert pd["attainment"]["n_good"] == per_class["gold"]["n"] == sum(
        line["metadata"]["class"] == "gold" for line in lines)
    assert {line["metadata"]["tenant"]
            for line in lines} == {"tenant-0", "tenant-1"} and 0.5 <= pd["jain_index"] <= 1


def test_sharegpt_is_counted_by_the_server(cluster, tmp_path):
    conversations = [{
        "conversations": [{"from": "human", "value": f"Tell me about number {i} please."},
                          {"from": "gpt", "value": "one two three four five six seven"}]
    } for i in range(5)]
    (tmp_path / "s.json").write_text(json.dumps(conversations + [{"conversations": []}]))
    result, _, _ = run(cluster, tmp_path, "--dataset-name", "sharegpt", "--dataset-path",
                       tmp_path / "s.json", "--ignore-eos", "--request-rate", 20, *ANY_LAG)
    answer = cluster.unary("/tandem.v1.Inference/Tokenize",
                           pb.TokenizeRequest(prompt="one two three four five six seven"),
                           pb.TokenizeResponse).ids
    assert result["completed"] == 5 and result["output_lens"] == [len(answer)] * 5


def test_rejected_and_unfinished_are_misses(tmp_path):
    with Cluster(router_args=["--max-requests", 3, "--max-queued", 2]) as c:
        result, lines, _ = run(c, tmp_path, "--num-prompts", 40, "--request-rate", "inf", "--isl",
                               32, "--osl", 400, "--ignore-eos", "--goodput", "ttft:60000",
                               "--warmup", 0, *ANY_LAG)
        pd = result["pd"]
        assert pd["offered"] == 40 == result["completed"] + pd["rejected"]["429"] and pd[
            "rejected"]["429"] > 0 < result["completed"]
        assert pd["attainment"]["n"] == 40 and pd["attainment"]["n_good"] == result["completed"]
        assert pd["steady"]["request_goodput"] is None  # all at once: the window has no length
        refused = [line for line in lines if line["error"]]
        assert {line["error"]["type"]
                for line in refused} == {"rejected"} and all(line["error"]["message"]
                                                             for line in refused)
        c.wait_idle()
        # No grace at all: what runs after the last arrival is cancelled, and the cluster is empty
        # at once.
        result, _, out = run(c, tmp_path, "--num-prompts", 2, "--isl", 32, "--osl", 1900,
                             "--ignore-eos", "--request-rate", 50, "--benchmark-grace-period", 0,
                             "--goodput", "ttft:60000", "--warmup", 0, *ANY_LAG, rc=1)
        assert result["pd"]["rejected"]["unfinished"] == 2 == result["failed"] and result["pd"][
            "attainment"]["joint"] == 0
        assert "unfinished at the end of the grace:" in out
        c.wait_idle()


def test_a_router_that_dies_is_told_as_failures(tmp_path):
    with Cluster() as c:
        p = subprocess.Popen([
            os.path.join(BIN, "tandem"), "bench", "serve", "--server", f"127.0.0.1:{c.port}",
            "--num-prompts", "100", "--request-rate", "25", "--isl", "32", "--osl", "8",
            "--ignore-eos", "--goodput", "ttft:60000", "--no-send-slo", "--warmup", "0",
            "--result-dir", tmp_path, "--result-filename", "d.json", *ANY_LAG
        ], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            c.wait_for(lambda: c.status().finished >= 5, "five answers", 30 * SLOW)
            c.router.signal(signal.SIGKILL)
            _, err = p.communicate(timeout=60 * SLOW)
        finally:
            p.kill()
            p.wait()
        assert p.returncode == 0 and b"failed: gRPC status 14" in err, err.decode()
        with open(tmp_path / "d.json", encoding="utf-8") as f:
            result = json.load(f)
        pd = result["pd"]
        assert pd["offered"] == 100 == result["completed"] + pd["rejected"]["error"] and result[
            "completed"] >= 5 and pd["rejected"]["error"] > 0
        assert pd["attainment"]["n"] == 100 and pd["attainment"]["n_good"] == result["completed"]


def test_a_late_generator_fails_the_run(cluster, tmp_path):
    result, _, out = run(cluster, tmp_path, "--num-prompts", 5, "--request-rate", 50, "--isl", 16,
                         "--osl", 2, "--max-sched-lag-ms", "0.000001", rc=1)
    assert result["completed"] == 5 and result["pd"]["valid"] is False and "sched_lag_ms" in result[
        "pd"]["invalid_reason"]
    assert "NOT VALID" in out


def test_interrupt_reports_and_cancels(cluster, tmp_path):
    p = subprocess.Popen([
        os.path.join(BIN, "tandem"), "bench", "serve", "--server", f"127.0.0.1:{cluster.port}",
        "--num-prompts", "1000", "--request-rate", "5", "--isl", "32", "--osl", "1500",
        "--ignore-eos", "--result-dir", tmp_path, "--result-filename", "i.json"
    ], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        cluster.wait_for(lambda: cluster.status().live >= 1, "the first request", 30 * SLOW)
        p.send_signal(signal.SIGINT)
        out, err = p.communicate(timeout=30 * SLOW)
    finally:
        p.kill()
        p.wait()
    assert p.returncode == 130, err.decode()
    assert "NOT VALID: interrupted" in out.decode()
    with open(tmp_path / "i.json", encoding="utf-8") as f:
        result = json.load(f)
    assert 1 <= result["pd"]["offered"] < 1000
    cluster.wait_idle()


@contextlib.contextmanager
def scripted_router(answer):
    """A server of the same API that keeps the requests and answers Generate with answer(request,
    context): (port, requests)."""
    seen = []

    def generate(request, context):
        seen.append(request)
        yield from answer(request, context)

    unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
    handlers = {
        "Models": unary(
            lambda r, c: pb.ModelsResponse(models=
                                           [pb.ModelInfo(id="m", max_model_len=4096, vocab=50)]),
            pb.ModelsRequest.FromString, pb.ModelsResponse.SerializeToString),
        "Status": unary(
            lambda r, c: pb.StatusResponse(
                mode="pd", workers=
                [pb.WorkerStatus(role=role) for role in ("prefill", "decode", "decode")]),
            pb.StatusRequest.FromString, pb.StatusResponse.SerializeToString), "Generate": stream(
                generate, pb.GenerateRequest.FromString, pb.GenerateResponse.SerializeToString),
    }
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(16))
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("tandem.v1.Inference", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield port, seen
    finally:
        server.stop(None).wait(10)


def tokens(n):
    return [pb.GenerateResponse(token_ids=[1]) for _ in range(n)]


def end(request, **ledger):
    return pb.GenerateResponse(
        finish_reason=pb.FINISH_LENGTH, usage=pb.Usage(prompt_tokens=len(
            request.token_ids.ids), output_tokens=3, cached_tokens=2), ledger=pb.Ledger(**ledger))


class Fake:  # stands for a Cluster in run()
    def __init__(self, port):
        self.port = port


def test_what_is_sent(tmp_path):
    def answer(request, context):
        yield from tokens(3)
        yield end(request, mode="colocated", predicted_ttft_us=2500, ttft_us=2000,
                  router_queue_us=2000)

    with scripted_router(answer) as (port, seen):
        result, lines, _ = run(
            Fake(port), tmp_path, "--num-prompts", 20, "--request-rate", 200, "--isl", 12, "--osl",
            3, "--random-range-ratio", 0.5, "--ignore-eos", "--slo-class",
            "gold:ttft=450,tpot=40,weight=2", "free", "--goodput", "ttft:9000", "--tenants", 2,
            "--temperature", 0.5, "--top-p", 0.9, "--extra-body",
            '{"top_k": 7, "priority": -3, "presence_penalty": 0.5}', "--seed", 11, "--gpus", 6,
            *ANY_LAG)
        by_id = {int(r.request_id.rsplit("-", 1)[1]): r for r in seen}
        assert sorted(by_id) == list(range(20))
        for i, line in enumerate(lines):
            r = by_id[i]
            assert 6 <= len(r.token_ids.ids) <= 18 and all(
                0 <= t < 50 for t in r.token_ids.ids) and r.model == "m" and r.return_token_ids
            assert len(
                r.token_ids.ids
            ) == result["input_lens"][i] and 1 <= r.stop.max_tokens <= 5 and r.stop.ignore_eos
            assert r.slo_class == line["metadata"]["class"] and r.tenant == line["metadata"][
                "tenant"]
            assert r.objectives.ttft_ms == (450 if r.slo_class == "gold" else 9000)
            if r.slo_class == "gold":
                assert r.objectives.tpot_ms == 40
            else:
                assert not r.objectives.HasField("tpot_ms")
            assert (r.sampling.temperature, r.sampling.top_k, r.priority,
                    r.sampling.presence_penalty) == (0.5, 7, -3, 0.5)
            assert line["metadata"]["predicted"]["ttft"] == 2.5 and line["metadata"][
                "mode"] == "local" and line["metadata"]["cached_tokens"] == 2
        assert {r.slo_class
                for r in seen} == {"gold", "free"} and len({r.sampling.seed for r in seen}) == 20
        assert len({tuple(r.token_ids.ids)
                    for r in seen}) == 20 and len({len(r.token_ids.ids) for r in seen}) > 3
        pd = result["pd"]
        assert pd["topology"]["prefill"] == 1 and pd["topology"]["decode"] == 2 and pd["steady"][
            "gpus"] == 6 and pd["deflected"] == 20
        assert pd["predicted_ttft"] == {"mape": pytest.approx(0.25), "coverage": 1.0
                                        } and pd["cached_tokens"] == 40

        del seen[:]
        run(Fake(port), tmp_path, "--num-prompts", 3, "--goodput", "ttft:9000", "--no-send-slo",
            *ANY_LAG)
        assert len(seen) == 3 and not any(
            r.HasField("objectives") or r.slo_class or r.tenant for r in seen)


def test_every_end_has_its_place(tmp_path):
    """Each way a stream can end, and gaps that are known."""
    def answer(request, context):
        i = int(request.request_id.rsplit("-", 1)[1])
        if i == 0:
            context.set_trailing_metadata((("retry-delay-ms", "250"), ))
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue is full")
        if i == 1:
            context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "too late")
        yield from tokens(2)
        if i == 2:
            context.abort(grpc.StatusCode.INTERNAL, "broke")
        if i == 3:
            return  # OK, but nobody said that it was the end
        if i == 4:
            stop.result(60 * SLOW)  # until the bench has given up
            return
        yield pb.GenerateResponse(text="no token")
        yield pb.GenerateResponse(token_ids=[4, 5])
        yield end(request)

    stop = concurrent.futures.Future()
    with scripted_router(answer) as (port, _):
        try:
            result, lines, _ = run(Fake(port), tmp_path, "--num-prompts", 6, "--request-rate", 100,
                                   "--isl", 8, "--osl", 4, "--warmup", 0, "--goodput", "ttft:60000",
                                   "--benchmark-grace-period", 5, *ANY_LAG)
        finally:
            stop.set_result(None)
    pd = result["pd"]
    assert result["completed"] == 1 and pd["rejected"] == {
        "429": 1, "deadline": 1, "error": 2, "unfinished": 1
    }
    assert [line["metadata"]["outcome"] for line in lines] == [
        "rejected", "timed_out", "failed", "failed", "unfinished", "completed"
    ]
    assert lines[0]["error"] == {
        "code": 8, "type": "rejected", "message": "queue is full", "retry_delay_ms": 250
    } and lines[5]["error"] is None
    assert [len(itl) for itl in result["itls"]] == [
        0, 0, 1, 1, 1, 2
    ]  # a message with text alone is no token; one with two ids is one gap
    assert result["output_lens"] == [0, 0, 2, 2, 2, 4] and result["total_output_tokens"] == 4
    assert pd["wasted_prefill_tokens"] == 3 * 8 and pd["attainment"]["joint"] == pytest.approx(
        1 / 6)


def test_both_backends_write_the_same_keys(cluster, tmp_path):
    def keys(value):
        return {k: keys(v) for k, v in value.items()} if isinstance(value, dict) else None

    args = ("--num-prompts", 3, "--concurrency", 1, "--isl", 16, "--osl", 2, "--ignore-eos",
            "--goodput", "ttft:60000", *ANY_LAG)
    result, lines, _ = run(cluster, tmp_path, *args)
    with OpenAI(lambda a, index, body: a.stream(
        [chunk("a"), chunk("b", "length"), usage(16, 2), DONE])) as server:
        other, other_lines, _ = run(cluster, tmp_path, "--backend", "openai", "--base-url",
                                    server.url, *args)
        assert server.keys == {None}
        server.keys.clear()
        (tmp_path / "key").write_text("a-key-of-somebody\n")
        run(cluster, tmp_path, "--backend", "openai", "--base-url", server.url, "--api-key-file",
            tmp_path / "key", *args)
        assert server.keys == {
            "Bearer a-key-of-somebody"
        } and len(server.bodies) == 6  # also of what is asked before the load
    assert other["completed"] == result["completed"] == 3 and other[
        "total_output_tokens"] == result["total_output_tokens"] == 6
    assert set(other["pd"]["definitions"]) == {*result["pd"].pop("definitions"), "rejected"}
    other["pd"].pop("definitions")
    assert keys(other) == keys(result)
    for a, b in zip(other_lines, lines):
        b["metadata"]["stages_ns"] = {}  # the router's alone
        assert keys(a) == keys(b)


def test_a_small_load_by_default(cluster, tmp_path):
    """Who says neither rate nor concurrency does not send everything at once; and the target is
    named before anything is sent."""
    rc, out, err = bench("serve", "--server", f"127.0.0.1:{cluster.port}", "--isl", 8, "--osl", 2,
                         "--save-detailed", "--result-dir", tmp_path, "--result-filename", "r.json",
                         *ANY_LAG)
    assert rc == 0, err
    assert err.splitlines()[0] == (
        f"tandem bench serve: target 127.0.0.1:{cluster.port}/tandem.v1.Inference/Generate, at "
        "most 4 at a time"), err
    with open(tmp_path / "r.json", encoding="utf-8") as f:
        result = json.load(f)
    assert result["completed"] == 100 and result["max_concurrency"] == 4, result
    rc, _, err = bench("serve", "--server", f"127.0.0.1:{cluster.port}", "--isl", 8, "--osl", 2,
                       "--num-prompts", 6, "--request-rate", "inf", *ANY_LAG)
    assert rc == 0 and err.splitlines()[0].endswith("/Generate, all at once"), err


def test_nobody_there():
    started = time.monotonic()
    rc, out, err = bench("serve", "--server", "127.0.0.1:1")
    assert rc == 1 and not out and "127.0.0.1:1" in err and "UNAVAILABLE" in err, (rc, out, err)
    assert time.monotonic() - started < 20 * SLOW


def test_too_long_for_the_model(cluster):
    rc, _, err = bench("serve", "--server", f"127.0.0.1:{cluster.port}", "--isl", 2000, "--osl",
                       100, "--num-prompts", 2)
    assert rc == 2 and "2000 input and 100 output tokens" in err and "--length-scale" in err, err
    rc, _, err = bench("serve", "--server", f"127.0.0.1:{cluster.port}", "--model", "nope")
    assert rc == 2 and "'nope'" in err, err


BAD = [(["--request-rate", "0"], "--request-rate"), (["--request-rate", "fast"], "--request-rate"),
       (["--burstiness", "-1"], "--burstiness"), (["--goodput", "itl:5"], "'itl'"),
       (["--goodput", "ttft:0"], "ttft"), (["--goodput", "ttft:nan", "tpot:5"], "ttft"),
       (["--goodput"], "--goodput needs a value"), (["--slo-preset", "none"], "--slo-preset"),
       (["--slo-class", "a:ttft=-1"], "ttft"), (["--dataset-name", "alpaca"], "--dataset-name"),
       (["--dataset-name", "mooncake"], "--dataset-path"),
       (["--dataset-path", "/x"], "--dataset-path"), (["--isl", "0"], "--input-len"),
       (["--warmup", "-1"], "--warmup"), (["--arrival", "trace"], "trace"),
       (["--arrival", "poisson", "--burstiness", "0.5"], "--burstiness"),
       (["--arrival-cv", "2", "--burstiness", "2"], "--arrival-cv"),
       (["--ramp-up-strategy", "linear"], "ramp_up_start_rps"),
       (["--ramp-up-start-rps", "5"], "--ramp-up-strategy"),
       (["--metric-percentiles", "101"], "--metric-percentiles"),
       (["--percentile-metrics", "ttft,foo"], "'foo'"), (["--extra-body", "{"], "--extra-body"),
       (["--extra-body", '{"best_of": 2}'], "'best_of'"), (["--backend", "vllm"], "--backend"),
       (["--vocab-size", "5"], "--vocab-size"), (["--endpoint", "v1/completions"], "--endpoint"),
       (["--base-url", "https://h:1"], "--tls-ca"), (["--num-promts", "5"], "--num-prompts"),
       (["--time-scale", "2", "--rate-scale", "2"], "--rate-scale"), ]


def test_bad_options_are_named(cluster):
    for args, field in BAD[::3 if SHORT else 1]:
        rc, out, err = bench("serve", "--server", f"127.0.0.1:{cluster.port}", *args)
        assert rc == 2 and field in err and not out, f"{args}: exit {rc}: {err}"
    rc, _, err = bench("replay", "--server", f"127.0.0.1:{cluster.port}")
    assert rc == 2 and "--trace" in err
    rc, _, err = bench("serve", "--server", f"127.0.0.1:{cluster.port}", "--num-prompts", 1,
                       "--isl", 8, "--osl", 1, "--save-result", "--result-dir", "/nonexistent",
                       *ANY_LAG)
    assert rc == 1 and "/nonexistent/" in err, err
