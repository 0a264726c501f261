#!/usr/bin/python3
"""Runs the transfer bench briefly and checks its reports: every row and field is there, the
numbers agree with each other, every byte that the engine moved was verified, and bad options
are refused by name. Speed is not judged here."""
import csv
import json
import os
import subprocess
import sys
import tempfile

PROGRAM = sys.argv[1]
REPEATS = 3
SPREADS = ("gb_per_s", "us_per_transfer", "post_us_per_transfer", "post_ns_per_block",
           "post_cpu_ns_per_block", "sender_cpu_s_per_gb", "receiver_cpu_s_per_gb")


def run(*options):
    return subprocess.run([PROGRAM, "xfer", *options], capture_output=True, text=True, check=False,
                          timeout=200)


def measured(folder, *options):
    """The JSON and the CSV rows of a run that must succeed."""
    names = os.path.join(folder, "xfer.json"), os.path.join(folder, "xfer.csv")
    p = run("--repeats", str(REPEATS), "--transfers", "24", "--footprint", "8MiB", "--no-iperf3",
            "--json", names[0], "--csv", names[1], *options)
    assert p.returncode == 0, (p.returncode, p.stdout, p.stderr)
    with open(names[0], encoding="utf-8") as f:
        report = json.load(f)
    with open(names[1], encoding="utf-8", newline="") as f:
        return report, list(csv.DictReader(f)), p.stdout


def check_rows(report, rows, table):
    for key in ("bench", "version", "commit", "when", "command", "machine", "cpu", "kernel", "cpus",
                "memory_bytes", "load_average", "repeats", "results", "skipped"):
        assert key in report, key
    assert report["machine"] == "the test's" and report[
        "repeats"] == REPEATS and "--sizes" in report["command"], report
    n_bytes = 0
    for row in report["results"]:
        where = (row["case"], row["path"], row["depth"], row["streams"])
        assert row["bytes"] == row["block_bytes"] * row["n_blocks"], where
        assert len(row["gb_per_s_each"]) == REPEATS, where
        for key in SPREADS if not row["is_floor"] else SPREADS[:2]:
            v = row[key]
            assert 0 <= v["min"] <= v["median"] <= v["max"], (where, key, v)
        assert row["gb_per_s"]["min"] > 0, where
        assert sorted(row["gb_per_s_each"])[REPEATS // 2] == row["gb_per_s"]["median"], where
        product = row["gb_per_s"]["median"] * row["us_per_transfer"]["median"] * 1e3  # GB/s x us
        assert abs(product / row["bytes"] - 1) < 1e-6, (where, product)
        if row["is_floor"]:
            assert row["floor_is"], where
            continue
        assert 0 < row["latency_us"]["p50"] <= row["latency_us"]["p99"], where
        assert row["post_us_per_transfer"]["min"] > 0, where
        floor = {
            "tcp": "bare_tcp", "shm": "memcpy", "cuda-ipc": "device_copy",
            "tcp-staged": "pinned_copy", "shm-staged": "pinned_copy"
        }[row["path"]]
        assert row["streams"] > 1 or row["ratio_to"][floor]["min"] > 0, where
        n_bytes += row["bytes"] * row["transfers_per_repeat"] * REPEATS
    # The batches that were not timed (warm-up, posting) were verified, too.
    assert report["n_bytes_verified"] > n_bytes > 0, (report["n_bytes_verified"], n_bytes)
    assert len(rows) == len(
        report["results"]) and len(rows) <= len(table.splitlines()), (len(rows),
                                                                      len(report["results"]))
    for row, as_json in zip(rows, report["results"]):
        assert None not in row and None not in row.values(), row
        assert (row["path"], row["case"], int(
            row["bytes"])) == (as_json["path"], as_json["case"], as_json["bytes"]), row
        assert abs(float(row["gb_s_median"]) - as_json["gb_per_s"]["median"]) < 1e-4, row


def on_a_gpu():
    """Pools in the memory of a device (the emulated one: two processes on it)."""
    with tempfile.TemporaryDirectory() as folder:
        report, rows, table = measured(folder, "--device", "cuda", "--sizes", "4k,96k",
                                       "--block-bytes", "32KiB", "--depth", "1,4", "--streams",
                                       "1,2", "--machine", "the test's")
        check_rows(report, rows, table)
        seen = {(r["case"], r["path"], r["depth"], r["streams"]) for r in report["results"]}
        wanted = {(c, p, d, 1) for c in ("4KiB", "96KiB")
                  for p in ("cuda-ipc", "shm-staged", "tcp-staged", "device_copy", "pinned_copy")
                  for d in (1, 4)}
        wanted |= {(c, "tcp-staged", 4, 2) for c in ("4KiB", "96KiB")}
        assert seen == wanted, seen ^ wanted
        report, _, _ = measured(folder, "--device", "cuda", "--path", "cuda-ipc", "--shape",
                                "llama-8b", "--tokens", "24", "--block-tokens", "8", "--memory",
                                "32MiB", "--depth", "2")
        assert [r["n_blocks"] for r in report["results"]] == [3, 3], report["results"]
    for options, words in ((["--path", "cuda-ipc"], "add --device cuda"), ([
            "--device", "cuda", "--path", "shm"
    ], "leave out --device cuda")):
        p = run(*options)
        assert p.returncode != 0 and words in p.stderr, (options, p.returncode, p.stderr)
    print("bench_xfer: fields, ratios and verified bytes of cuda-ipc and the staged paths are as "
          "they should be")


def main():
    with tempfile.TemporaryDirectory() as folder:
        report, rows, table = measured(folder, "--path", "tcp,shm", "--sizes", "4k,96k",
                                       "--block-bytes", "32KiB", "--depth", "1,4", "--streams",
                                       "1,2", "--machine", "the test's")
        check_rows(report, rows, table)
        seen = {(r["case"], r["path"], r["depth"], r["streams"]) for r in report["results"]}
        wanted = {(c, p, d, 1) for c in ("4KiB", "96KiB")
                  for p in ("tcp", "shm", "memcpy", "bare_tcp") for d in (1, 4)}
        wanted |= {(c, "tcp", 4, 2) for c in ("4KiB", "96KiB")}
        assert seen == wanted, seen ^ wanted

        # Shuffled blocks of a prompt, and one that does not fit, which is named.
        report, rows, _ = measured(folder, "--path", "tcp,shm", "--shape", "llama-8b", "--tokens",
                                   "24,131072", "--block-tokens", "8", "--memory", "32MiB",
                                   "--depth", "2")
        assert {(r["case"], r["tokens"], r["n_blocks"], r["block_bytes"], r["shuffled"])
                for r in report["results"]} == {("llama-8b/24", 24, 3, 8 * 131072, True)
                                                }, report["results"]
        assert [s["what"] for s in report["skipped"]
                if s["what"] != "iperf3"] == ["llama-8b/131072"], report["skipped"]

        report, rows, _ = measured(folder, "--path", "shm", "--sizes", "96k", "--block-bytes",
                                   "32KiB", "--shuffled", "--depth", "2")
        assert {(r["case"], r["path"], r["n_blocks"], r["shuffled"]) for r in report["results"]
                } == {("96KiB/shuffled", p, 3, True) for p in ("shm", "memcpy")}, report["results"]

    for options, words in ((["--path", "pigeon"], "pigeon"), (["--sizes", "4q"], "4q"), ([
            "--depth", "0"
    ], "--depth"), (["--shape", "gpt-1"], "gpt-1"), (["--sizes", "100k", "--block-bytes",
                                                      "64KiB"], "multiple"), ([
                                                          "--json", "/nowhere/x.json"
                                                      ], "/nowhere/x.json")):
        p = run(*options)
        assert p.returncode != 0 and words in p.stderr, (options, p.returncode, p.stderr)
    print("bench_xfer: fields, ratios and verified bytes of tcp and shm are as they should be")


if sys.argv[2:] == ["cuda"]:
    on_a_gpu()
else:
    main()
