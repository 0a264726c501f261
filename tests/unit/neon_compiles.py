#!/usr/bin/python3
"""neon_compiles.py: the kernels for aarch64 pass the front end of the cross compiler. They share
templates with those of x86, whose authors build for x86 alone. Exit status 77: no cross compiler
here, or no C library of it (gcc-aarch64-linux-gnu, libc6-dev-arm64-cross)."""
import glob
import os
import shutil
import subprocess
import sys

from tree import ROOT

COMPILER = "aarch64-linux-gnu-gcc"
FLAGS = ["-std=c17", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-Wshadow", "-Wvla"]
ALL = "-march=armv8.2-a+bf16+dotprod+i8mm"  # kernels/CMakeLists.txt gives each file its own


def compiles(path, text=None):
    march = [ALL] if path.endswith(("_bf16.c", "_dot.c", "_i8mm.c")) else []
    command = [COMPILER, "-fsyntax-only", "-I", ROOT, *FLAGS, *march]
    return subprocess.run(command + (["-x", "c", "-"] if text else [path]), input=text, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)


def main():
    if not shutil.which(COMPILER) or compiles("", "#include <stdlib.h>\n").returncode:
        print(f"skipped: {COMPILER} or its C library's headers are not here (scripts/install-deps)")
        return 77
    mistake = '#include "kernels/cpu/vec_neon.h"\nvec f(vec a) { return v_none(a); }\n'
    if not compiles("", mistake).returncode:
        print("neon_compiles: a planted mistake was not seen")
        return 1
    failed, files = 0, sorted(glob.glob(os.path.join(ROOT, "kernels/cpu/*neon*.c")))
    for path in files + [os.path.join(ROOT, "kernels/ops.c")]:
        done = compiles(path)
        if done.returncode:
            print(done.stdout)
            failed += 1
    print(f"neon_compiles: {len(files)} files, {failed} failed")
    return 1 if failed or not files else 0


if __name__ == "__main__":
    sys.exit(main())
