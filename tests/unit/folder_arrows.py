#!/usr/bin/python3
"""Checks every #include against the folder arrows of the design, after it has seen itself catch
planted violations.

An include in quotes is a path from the root of the tree, or the header of a generated protobuf-c
file ("tandem/v1/x.pb-c.h"), which counts as folder proto/."""
import os
import re
import sys
import tempfile

from tree import ROOT, code_only, read, source_files

COMMON = ("common/base", "common/rpc", "common/text", "common/kv", "common/model",
          "common/transfer", "common/engine", "common/worker")
ANYTHING = None
# The same sources are compiled for a GPU by nvcc and for the emulated one of the tests: these
# headers stand where CUDA's would.
EMULATED = ("tests/fake/cuda_emu/emu.h", "tests/fake/cuda_emu/runtime.h",
            "tests/fake/cuda_emu/cublaslt.h", "tests/fake/cuda_emu/ptx.h")

# A folder may include itself and those in its right column. An entry that is a file allows just
# that file.
ARROWS = {
    "common/base": (), "common/rpc": ("common/base", "proto"), "common/text": ("common/base", ),
    "common/kv": ("common/base", ), "common/model": ("common/base", "common/kv", "kernels"),
    "common/transfer": ("common/base", "common/kv"), "common/engine": ("common/base", "common/kv",
                                                                       "common/model", "kernels"),
    "common/worker": COMMON +
    ("proto", "kernels/device.h"
     ),  # proto: the messages that common/rpc carries; the table that a worker owns
    "kernels": ("common/base/status.h", "common/base/dtype.h", "common/base/device_memory.h",
                "common/base/symbols.h", "common/base/random.h") + EMULATED,
    "proto": (), "prefill": COMMON + ("proto", ), "decode": COMMON + ("proto", ),
    "router/core": ("common/base/status.h", "common/base/random.h"),
    # No engine, no kernels, no transfer: of a model the router reads config.json.
    "router": ("common/base", "common/rpc", "common/text", "common/model/config.h", "proto",
               "router/core", "router/kserve"),
    # A door: it reads and writes, and leaves decisions to what it calls.
    "router/kserve": ("common/base", "common/rpc", "proto", "router"),
    "sim": ("common/base", "common/engine/scheduler.h", "common/model/config.h",
            "router/objectives.h", "router/core"), "bench": ANYTHING, "cli": ANYTHING,
    "tests": ANYTHING,
}
# Nothing but the tests may include these.
ENDS = ("bench", "cli", "tests")
# router/core is pure: no I/O, no threads, no clock of its own.
PURE = "router/core"
PURE_HEADERS = {
    "assert.h", "errno.h", "float.h", "inttypes.h", "limits.h", "math.h", "stdalign.h", "stdarg.h",
    "stdbool.h", "stddef.h", "stdint.h", "stdio.h", "stdlib.h", "string.h"
}

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"]*)"|<([^>]*)>)', re.MULTILINE)


def folder_of(path):
    """The longest folder of the table that holds the path; None when there is none."""
    best = None
    for folder in ARROWS:
        if path.startswith(folder + "/") and (best is None or len(folder) > len(best)):
            best = folder
    return best


def check_include(root, path, quoted, angled):
    """None, or what is wrong with one include of the file at path."""
    source = folder_of(path)
    if source is None:
        return "stands in no folder of the design's map"
    if angled is not None:
        if source == PURE and angled not in PURE_HEADERS:
            return f"{PURE} is pure and may not include <{angled}>"
        return None
    if quoted.endswith(".pb-c.h"):
        target_path = "proto/" + quoted
    elif ".." in quoted.split("/") or not os.path.isfile(os.path.join(root, quoted)):
        return f'includes "{quoted}", which is no path from the root of the tree'
    else:
        target_path = quoted
    target = folder_of(target_path)
    if target is None:
        return f'includes "{quoted}" of no folder of the design\'s map'
    if target == source or source == "tests":
        return None
    # a bench may share a suite's helper process: anything is open to it
    if source == "bench" and target == "tests":
        return None
    allowed = ARROWS[source]
    if target in ENDS and not (allowed and target_path in allowed):
        return f'includes "{quoted}": nothing may include {target}/'
    if allowed is ANYTHING or target in allowed or target_path in allowed:
        return None
    return f'includes "{quoted}": {source}/ may include only {", ".join(allowed) or "itself"}'


def check_tree(root):
    """Lines "path:line: what is wrong", and the number of includes seen."""
    problems, n_includes = [], 0
    for path in source_files(root):
        text = code_only(read(root, path), keep_strings=True)
        for match in INCLUDE.finditer(text):
            n_includes += 1
            problem = check_include(root, path, match.group(1), match.group(2))
            if problem:
                line = text.count("\n", 0, match.start()) + 1
                problems.append(f"{path}:{line}: {problem}")
    return problems, n_includes


# (file, its include, is it allowed). The targets exist in the planted tree.
PLANTED = [("common/base/a.c", '"common/base/status.h"', True),
           ("common/base/a.c", '"common/kv/kv_pool.h"', False),
           ("common/kv/a.c", '"common/base/log.h"', True),
           ("common/kv/a.c", '"common/transfer/transfer.h"', False),
           ("common/transfer/a.c", '"common/kv/kv_pool.h"', True),
           ("common/transfer/a.c", '"common/rpc/rpc.h"', False),
           ("common/model/a.c", '"kernels/ops.h"', True),
           ("common/model/a.c", '"common/rpc/rpc.h"', False),
           ("common/rpc/a.c", '"tandem/v1/worker.pb-c.h"', True),
           ("common/rpc/a.c", '"common/kv/kv_pool.h"', False),
           ("common/kv/a.c", '"tandem/v1/worker.pb-c.h"', False),
           ("common/worker/a.c", '"common/transfer/transfer.h"', True),
           ("common/worker/a.c", '"kernels/ops.h"', False),
           ("common/worker/a.c", '"router/core/core.h"', False),
           ("kernels/cpu/a.c", '"common/base/status.h"', True),
           ("kernels/cpu/a.c", '"common/base/dtype.h"', True),
           ("kernels/cpu/a.c", '"common/base/log.h"', False),
           ("kernels/cuda/a.cu", '"common/model/model.h"', False),
           ("prefill/a.c", '"common/worker/worker.h"', True),
           ("prefill/a.c", '"decode/decode.h"', False),
           ("decode/a.c", '"router/core/core.h"', False),
           ("router/a.c", '"router/core/core.h"', True),
           ("router/a.c", '"prefill/prefill.h"', False),
           ("router/kserve/a.c", '"common/rpc/rpc.h"', True),
           ("router/kserve/a.c", '"router/core/core.h"', False),
           ("router/core/a.c", '"common/base/status.h"', True),
           ("router/core/a.c", '"common/base/clock.h"', False),
           ("router/core/a.c", '"router/router.h"', False),
           ("router/core/a.c", "<pthread.h>", False), ("router/core/a.c", "<time.h>", False),
           ("router/core/a.c", "<string.h>", True), ("router/a.c", "<pthread.h>", True),
           ("bench/a.c", '"decode/decode.h"', True), ("bench/a.c", '"tests/unit/capture.h"', True),
           ("cli/a.c", '"router/core/core.h"', True), ("cli/a.c", '"bench/bench.h"', False),
           ("router/a.c", '"cli/cli.h"', False), ("router/a.c", '"common/text/tokenizer.h"', True),
           ("router/a.c", '"common/model/config.h"', True),
           ("router/a.c", '"common/model/model.h"', False),
           ("router/a.c", '"common/engine/scheduler.h"', False),
           ("router/a.c", '"common/transfer/transfer.h"', False),
           ("router/a.c", '"kernels/ops.h"', False),
           ("common/engine/a.c", '"common/model/model.h"', True),
           ("common/engine/a.c", '"common/transfer/transfer.h"', False),
           ("common/engine/a.c", '"common/rpc/rpc.h"', False),
           ("sim/a.c", '"common/engine/scheduler.h"', True),
           ("sim/a.c", '"common/engine/engine.h"', False),
           ("sim/a.c", '"common/model/model.h"', False), ("sim/a.c", '"router/core/core.h"', True),
           ("router/a.c", '"sim/sim.h"', False), ("cli/a.c", '"sim/sim.h"', True),
           ("kernels/cuda/a.cu", '"tests/fake/cuda_emu/emu.h"', True),
           ("kernels/cuda/a.cu", '"tests/unit/capture.h"', False),
           ("common/kv/a.c", '"tests/unit/capture.h"', False),
           ("tests/unit/a.c", '"tests/unit/capture.h"', True),
           ("tests/unit/a.c", '"bench/bench.h"', True),
           ("common/kv/a.c", '"kv_pool.h"', False),  # not from the root
           ("common/kv/a.c", '"../kv/kv_pool.h"', False),
           ("common/kv/a.c", '"common/kv/nowhere.h"', False),
           ("elsewhere/a.c", '"common/base/status.h"', False), ]
TARGETS = [
    "common/base/status.h", "common/base/dtype.h", "common/base/log.h", "common/base/clock.h",
    "common/kv/kv_pool.h", "common/transfer/transfer.h", "common/rpc/rpc.h", "common/model/model.h",
    "common/model/config.h", "common/text/tokenizer.h", "common/engine/scheduler.h",
    "common/engine/engine.h", "sim/sim.h", "tests/fake/cuda_emu/emu.h", "common/worker/worker.h",
    "kernels/ops.h", "router/core/core.h", "router/router.h", "prefill/prefill.h",
    "decode/decode.h", "bench/bench.h", "cli/cli.h", "tests/unit/capture.h"
]


def self_test():
    for path, include, is_allowed in PLANTED:
        with tempfile.TemporaryDirectory() as root:
            for name in TARGETS + [path]:
                os.makedirs(os.path.join(root, os.path.dirname(name)), exist_ok=True)
                with open(os.path.join(root, name), "w", encoding="utf-8") as f:
                    if name == path:
                        f.write('/* #include "decode/decode.h" in a comment is none */\n  #  '
                                f'include {include}\n')
            problems, n_includes = check_tree(root)
            if n_includes != 1 or bool(problems) == is_allowed:
                sys.exit(f"folder_arrows.py is broken: {path} including {include} gave {problems}")


def main():
    self_test()
    problems, n_includes = check_tree(ROOT)
    for problem in problems:
        print(problem)
    print(f"folder_arrows: {n_includes} includes, {len(problems)} against the arrows")
    if n_includes == 0:
        sys.exit("no include found: the check looked at nothing")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
