"""The tutorials of docs/, run as they stand: each block of ```sh, in its order, in one folder.

What differs: the programs are the build's, ports and build/tutorial are the test's own. A block
that begins with `tandem up` is a terminal of its own; the next such block, or the end, stops it by
Ctrl-C."""
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "cluster"))
from harness import BIN, ROOT, SLOW, free_port, nap  # noqa: E402

BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECONDS = 600 * SLOW


def blocks(page):
    with open(os.path.join(ROOT, "docs", page), encoding="utf-8") as f:
        found = BLOCK.findall(f.read())
    assert found, f"{page} has no commands"
    return found


class Reader:
    """Someone who types what the page says."""
    def __init__(self, tmp_path):
        self.env = {**os.environ, "TANDEM_SERVER": f"127.0.0.1:{free_port()}"}
        self.http, self.folder, self.up, self.log = free_port(), tmp_path, None, tmp_path / "up.log"

    def as_here(self, text):
        return text.replace("build/release/bin", BIN).replace("build/tutorial", str(
            self.folder)).replace("127.0.0.1:8000", f"127.0.0.1:{self.http}")

    def start(self, command):
        self.stop()
        with open(self.log, "wb") as log:
            self.up = subprocess.Popen(
                ["bash", "-c", f"exec {command} --listen {self.env['TANDEM_SERVER']}"], cwd=ROOT,
                env=self.env, stdout=log, stderr=subprocess.STDOUT)
        begin = time.monotonic()
        while b"tandem is up" not in self.log.read_bytes():
            assert self.up.poll() is None, self.log.read_text()
            assert time.monotonic() < begin + 60 * SLOW, self.log.read_text()
            nap(begin)

    def stop(self):
        if self.up:
            self.up.send_signal(signal.SIGINT)
            assert self.up.wait(60 * SLOW) == 0, self.log.read_text()
            self.up = None

    def type(self, block):
        text = self.as_here(block)
        if re.match(r"\S+/tandem up ", text):
            return self.start(" ".join(text.replace("\\\n", " ").split()))
        p = subprocess.run(["bash", "-eu", "-c", text], cwd=ROOT, env=self.env, timeout=SECONDS,
                           stdin=subprocess.DEVNULL, capture_output=True, check=False)
        out = p.stdout.decode()
        assert p.returncode == 0, f"{text}\n{out}\n{p.stderr.decode()}"
        return out


@pytest.fixture(name="reader")
def a_reader(tmp_path):
    r = Reader(tmp_path)
    yield r
    if r.up and r.up.poll() is None:
        r.up.kill()
        r.up.wait()


def test_first_model(reader):
    said = [reader.type(b) for b in blocks("tutorial-first-model.md")]
    reader.stop()
    generated, answer, completion = said[1], said[-3], json.loads(said[-1])
    assert generated and answer.strip()
    assert completion["model"] == "mine" and completion["choices"][0]["text"]
    assert answer == (reader.folder / "first").read_text()


def test_sweep(reader):
    said = [reader.type(b) for b in blocks("tutorial-sweep.md")]
    reader.stop()
    verdict = said[0][said[0].index("\n\nNo ") if "\n\nNo " in said[0] else 0:]
    assert re.search(r"No clear winner: |No configuration | won: |No other configuration ", verdict)
    assert (reader.folder / "sweep" / "report.html").stat().st_size > 10000
    rows = json.loads((reader.folder / "sweep" / "sweep.json").read_text())["rows"]
    assert {r["config"] for r in rows} == {"pd 1:1", "colocated 0:2"}
    assert said[1].strip() in said[0]  # the verdict, again from the file
