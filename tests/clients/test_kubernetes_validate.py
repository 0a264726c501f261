"""kubernetes-validate, from PyPI, on the manifests: tests/unit/deploy_schemas.py, which `make
check` skips where it is not installed."""
import os
import subprocess
import sys

import pytest

from installed import installed

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def test_schemas(tmp_path_factory):
    program = os.path.join(installed(tmp_path_factory, "kubernetes-validate"),
                           "kubernetes-validate")
    done = subprocess.run(
        [sys.executable,
         os.path.join(ROOT, "tests", "unit", "deploy_schemas.py"), program], capture_output=True,
        text=True, check=False, cwd=ROOT)
    if done.returncode == 77:
        pytest.skip(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
