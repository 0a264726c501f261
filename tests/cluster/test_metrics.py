"""The router's /metrics say what happened: ends of requests, tokens, failovers, stages; and
/healthz answers."""
import re
import urllib.error
import urllib.request

import grpc

from harness import Cluster, free_port
from test_resume import EXAMPLE

OK = grpc.StatusCode.OK


def scrape(port):
    """{name or name{labels}: value}"""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as r:
        assert r.status == 200 and r.headers["Content-Type"].startswith("text/plain")
        text = r.read().decode()
    pattern = r"^((?:td_|vllm:)\S+) (\S+)$"
    return {m[1]: float(m[2]) for m in re.finditer(pattern, text, re.MULTILINE)}


def check_cancelled(c, port, before):
    """A stream that its client leaves counts as that, with its prompt and what was made of it."""
    length, n_tokens = len("Once") + 1, 1500  # its bytes and the begin token at most
    for n_over in range(20):  # before one is cancelled, so many had come to their end
        stream = c.stream(c.request(prompt="Once", max_tokens=n_tokens, ignore_eos=True))
        next(stream)
        stream.cancel()
        c.wait_idle()
        m = scrape(port)
        if m["td_request_cancelled_total"]:
            break
    assert m["td_request_cancelled_total"] == 1 and m["td_request_success_total"] == before[
        "td_request_success_total"] + n_over
    made, prompt = (m[f"td_{what}_tokens_total"] - before[f"td_{what}_tokens_total"]
                    for what in ("generation", "prompt"))
    assert 0 < made - n_over * n_tokens <= n_tokens, (made, n_over)
    assert n_over + 1 <= prompt <= (n_over + 1) * length, (prompt, n_over)


def test_metrics_say_what_happened():
    port = free_port()
    with Cluster(decode=2, router_args=["--metrics-listen", f"127.0.0.1:{port}"],
                 envs={"decode-0": {"TANDEM_FAULT": "decode_token:kill:20"}}) as c:
        results = []
        for round in range(
                10):  # the router may give the first ones all to the other worker, which is as good
            results += c.generate_many([
                c.request(prompt=f"Story {round} {i}", max_tokens=30, temperature=0,
                          ignore_eos=True) for i in range(6)
            ])
            if c.status().failovers and len(
                    results
            ) > 20:  # and as many as the router wants before it says how many workers it needs
                break
        n = len(results)
        assert [r.code for r in results] == [OK] * n, [r.details for r in results]
        assert c.generate(prompt="", max_tokens=1).code == grpc.StatusCode.INVALID_ARGUMENT
        status = c.status()
        assert status.failovers >= 1, "the fault point was not reached"
        c.wait_for(lambda: scrape(port)["td_request_failovers_total"] == status.failovers,
                   "the failovers in the metrics", 5)
        c.wait_for(lambda: scrape(port)["td_num_requests_running"] == 0, "no request running", 5)
        c.wait_for(lambda: scrape(port)['td_recommended_workers{role="prefill"}'] >= 1,
                   "a recommendation", 10)
        m = scrape(port)
        assert m["td_request_success_total"] == m["td_e2e_request_latency_seconds_count"] == m[
            "td_time_to_first_token_seconds_count"] == n
        assert m["td_time_per_output_token_seconds_count"] == m["td_kv_transfer_seconds_count"] == n
        assert m["td_request_failure_total"] == 1 and m["td_request_cancelled_total"] == 0
        assert m["td_prompt_tokens_total"] == sum(r.usage.prompt_tokens for r in results)
        assert m["td_generation_tokens_total"] == sum(r.usage.output_tokens for r in results)
        assert m["td_generation_tokens_total"] == 30 * n
        assert m["td_num_requests_waiting"] == 0 and m["td_token_mismatch_total"] == 0
        assert 0 < m["td_wasted_prefill_tokens_total"] <= m["td_prompt_tokens_total"] + m[
            "td_generation_tokens_total"]  # the killed worker's
        bounds = {name: v for name, v in m.items() if name.startswith("td_goodput_bound{")}
        assert sorted(bounds.values()) == [0] * (len(bounds) - 1) + [1] and len(bounds) >= 4, bounds
        for role in ("prefill", "decode"):
            assert m[f'td_recommended_workers{{role="{role}"}}'] >= 1 and m[
                f'td_needed_workers{{role="{role}"}}'] > 0
        for objective in ("ttft", "tpot"):
            assert 0 <= m[f'td_prediction_coverage{{objective="{objective}"}}'] <= 1 and m[
                f'td_prediction_mape{{objective="{objective}"}}'] > 0
        stages = sum(m[f'td_stage_seconds_sum{{stage="{s}"}}']
                     for s in ("router_queue", "reserve", "prefill_queue", "prefill", "rpc"))
        assert abs(stages - m["td_time_to_first_token_seconds_sum"]) < 1e-9  # I6, in sum
        assert abs(
            sum(r.ledger.ttft_us
                for r in results) / 1e6 - m["td_time_to_first_token_seconds_sum"]) < 1e-9
        check_cancelled(c, port, m)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=10) as r:
            assert r.read() == b"ok\n"
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/elsewhere", timeout=10)
            raise AssertionError("an unknown page was served")
        except urllib.error.HTTPError as e:
            assert e.code == 404
        again = c.request(prompt="A fox", max_tokens=9, seed=3, ignore_eos=True)
        messages = list(c.stream(again))
        received = EXAMPLE.Received()
        received.take(messages[0])
        assert scrape(port)["td_request_resumed_total"] == 0
        assert received.continued(again).HasField("resume_from")
        list(c.stream(received.continued(again)))
        assert scrape(port)["td_request_resumed_total"] == 1
        seen = False
        for _ in range(20):  # a stream may be over before it is looked at
            stream = c.stream(c.request(prompt="Once", max_tokens=1500, ignore_eos=True))
            next(stream)
            while c.status().live and not seen:  # the two follow the stream, each when it is told
                m = scrape(port)
                seen = 0 < m["vllm:kv_cache_usage_perc"] < 1 == m["vllm:num_requests_running"]
            stream.cancel()
            c.wait_idle()
            if seen:
                break
        assert seen and m["vllm:num_requests_waiting"] == 0, m


def test_metrics_of_processes_workers_and_sizes():
    """What every daemon tells of its process, what the router tells of its workers, and the names
    of vLLM."""
    port, workers = free_port(), {"prefill-0": free_port(), "decode-0": free_port()}
    with Cluster(prefill=0, decode=0, router_args=[
            "--metrics-listen", f"127.0.0.1:{port}", "--metrics-alias", "vllm", "--slo-class",
            "gold:ttft=60000,tpot=60000 bulk:best_effort", "--served-model-name", 'a"b\\c'
    ]) as c:
        for name, at in workers.items():
            c.start_worker(name.split("-")[0], args=["--metrics-listen", f"127.0.0.1:{at}"])
        c.wait_workers(2)
        named = 'model_name="a\\"b\\\\c"'
        results = [c.generate(prompt="Once", max_tokens=n, ignore_eos=True, slo_class=k)
                   for n, k in ((3, "gold"), (40, "bulk"), (5, "bulk"))]
        assert [r.code for r in results] == [OK] * 3, [r.details for r in results]
        c.wait_for(lambda: scrape(port)[f'td_workers{{role="decode",state="ready",{named}}}'] == 1,
                   "the decode worker in the metrics", 5)
        m = scrape(port)
        assert sum(v for k, v in m.items() if k.startswith("td_workers{")) == 2
        assert m[f"td_request_prompt_tokens_count{{{named}}}"] == 3
        assert m[f"td_request_prompt_tokens_sum{{{named}}}"] == m["td_prompt_tokens_total"] > 3
        assert m[f"td_request_generation_tokens_sum{{{named}}}"] == 48
        assert m[f'td_request_generation_tokens_bucket{{{named},le="5"}}'] == 2
        assert m[f'td_request_queue_time_seconds_count{{class="gold",{named}}}'] == 1
        assert m[f'td_request_queue_time_seconds_count{{class="bulk",{named}}}'] == 2
        assert m[f'td_request_finished_total{{finished_reason="length",{named}}}'] == 3
        assert m["td_inter_token_latency_seconds_count"] == 48 - 3
        ours = {"generation_tokens_total": "td_generation_tokens_total",
                "prompt_tokens_total": "td_prompt_tokens_total",
                "time_to_first_token_seconds_sum": "td_time_to_first_token_seconds_sum",
                "inter_token_latency_seconds_count": "td_inter_token_latency_seconds_count",
                "e2e_request_latency_seconds_sum": "td_e2e_request_latency_seconds_sum",
                "request_time_per_output_token_seconds_sum": "td_time_per_output_token_seconds_sum"}
        for theirs, name in ours.items():
            assert m[f"vllm:{theirs}{{{named}}}"] == m[name], theirs
        assert m[f'vllm:request_success_total{{finished_reason="length",{named}}}'] == 3
        assert m[f'vllm:request_success_total{{finished_reason="abort",{named}}}'] == 0
        for at in (port, *workers.values()):
            with urllib.request.urlopen(f"http://127.0.0.1:{at}/metrics", timeout=10) as r:
                text = r.read().decode()
            info = re.search(r'^td_build_info\{version="[\d.]+",commit="([0-9a-f]{12}\+?)?",'
                             r'kernels="([^"]*)"\} 1$', text, re.MULTILINE)
            assert info and bool(info[2]) == (at != port), text
            for name in ("process_cpu_seconds_total", "process_resident_memory_bytes",
                         "process_open_fds", "process_max_fds", "process_start_time_seconds"):
                assert float(re.search(rf"^{name} (\S+)$", text, re.MULTILINE)[1]) > 0, name
