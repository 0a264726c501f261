"""Helm's own renderer, from PyPI, on the chart: tests/unit/helm_chart.py, which `make check` lets
do without."""
import os
import subprocess

from installed import installed

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def test_chart(tmp_path_factory):
    python = os.path.join(installed(tmp_path_factory, "helm-python-sdk", "pyyaml"), "python")
    done = subprocess.run([python, os.path.join(ROOT, "tests", "unit", "helm_chart.py")],
                          capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0 and "rendered_by_sdk" in done.stdout, done.stdout + done.stderr
