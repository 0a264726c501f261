"""What the tests of other people's programs stand on: programs from PyPI in a throw-away
environment, and a cluster of `tandem up` to point them at.

    home = installed(tmp_path_factory, "openai")          # skips where PyPI cannot be reached
    with Up() as up:
        run(home, "python", "client.py", up.url)
"""
import atexit
import os
import shutil
import subprocess
import sys

import grpc
import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "cluster"))
from harness import POCKET, SLOW, Cluster, Daemon, free_port  # noqa: E402

INSTALL_S = 900


def installed(tmp_path_factory, *packages, options=(), disk_gib=1):
    """The bin directory of a new environment with the packages. Skips, saying so, where there is
    no python3-venv, no PyPI, or less free disk than the packages need."""
    home = str(tmp_path_factory.mktemp("installed"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)  # pytest would keep gigabytes of them
    free_gib = shutil.disk_usage(home).free / (1 << 30)
    if free_gib < disk_gib:
        pytest.skip(f"{' '.join(packages)} need {disk_gib} GiB of disk, {free_gib:.0f} are free")
    made = subprocess.run([sys.executable, "-m", "venv", home], capture_output=True, text=True,
                          check=False)
    if made.returncode:
        pytest.skip(f"python3-venv is not installed: {made.stdout[-300:]}")
    bin_dir = os.path.join(home, "bin")
    got = subprocess.run([
        os.path.join(bin_dir, "pip"), "install", "-q", "--no-compile", *options, *packages
    ], capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if got.returncode:
        pytest.skip(f"PyPI has no {' '.join(packages)} for us: {got.stderr[-300:]}")
    return bin_dir


def run(bin_dir, program, *args, timeout=900, cwd=None, offline=True):
    """One program of the environment to its end; its stdout. offline: Hugging Face's libraries are
    told not to look for the tokenizer in their hub."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "LD_PRELOAD")}
    env.update(NO_COLOR="1", TERM="dumb")
    if offline:
        env.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    done = subprocess.run([os.path.join(bin_dir, program), *map(str, args)], capture_output=True,
                          text=True, timeout=timeout * SLOW, env=env, cwd=cwd, check=False)
    assert done.returncode == 0, (program, done.stdout[-3000:], done.stderr[-3000:])
    return done.stdout


class Up(Cluster):
    """`tandem up --http-listen`, on ports of its own, with all that a Cluster can be asked."""
    def __init__(self, model=POCKET):
        super().__init__(model=model)
        secret = os.path.join(self.dir.name, "secret")
        with open(secret, "x", encoding="ascii", opener=lambda p, f: os.open(p, f, 0o600)) as f:
            f.write(os.urandom(32).hex() + "\n")
        self.router_args = ["--cluster-secret-file", secret]
        self.port, self.http_port = free_port(), free_port()
        self.at, self.http_at = f"127.0.0.1:{self.port}", f"127.0.0.1:{self.http_port}"
        self.url = f"http://{self.http_at}"

    def __enter__(self):
        self.router = Daemon("up", "tandem", [
            "up", "--model", self.model, "--listen", self.at, "--http-listen", self.http_at,
            "--dtype", "f32", "--kv-memory", "16MiB", *self.router_args
        ], self.dir.name)
        self.all.append(self.router)
        try:
            self.router.wait_log(r"tandem is up")
            self.connect()
        except BaseException:
            self._kill_all()
            raise
        return self

    def text(self, prompt, max_tokens, ignore_eos=False):
        """What gRPC answers at temperature 0."""
        r = self.generate(prompt=prompt, max_tokens=max_tokens, temperature=0,
                          ignore_eos=ignore_eos)
        assert r.code == grpc.StatusCode.OK, (r.code, r.details)
        return r.text

    def chat(self, content, max_tokens, ignore_eos=False):
        r = self.generate(chat=[("user", content)], max_tokens=max_tokens, temperature=0,
                          ignore_eos=ignore_eos)
        assert r.code == grpc.StatusCode.OK, (r.code, r.details)
        return r.text
