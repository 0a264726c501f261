#!/usr/bin/python3
"""docs/config.md is what the built daemons' --help says, and the comparison is seen to fail on a
file that is not."""
import os
import subprocess
import sys
import tempfile

from tree import ROOT

SCRIPT = os.path.join(ROOT, "scripts", "gen-config-docs")
DOC = os.path.join(ROOT, "docs", "config.md")


def check(path):
    done = subprocess.run([SCRIPT, "--bin", os.environ["TANDEM_BIN"], "--check", "--out", path],
                          capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1) or done.stderr:
        sys.exit(f"gen-config-docs --check: status {done.returncode}\n{done.stderr}")
    return done.returncode, done.stdout


with open(DOC, encoding="utf-8") as f:
    text = f.read()
with tempfile.TemporaryDirectory() as folder:
    changed = os.path.join(folder, "config.md")
    with open(changed, "w", encoding="utf-8") as f:
        f.write(text.replace("`--drain-timeout-ms`", "`--drain-timeout`", 1))
    if check(changed)[0] != 1:
        sys.exit("a changed file passes the comparison")
status, diff = check(DOC)
if status:
    sys.exit(diff)
print("docs/config.md agrees with the daemons")
