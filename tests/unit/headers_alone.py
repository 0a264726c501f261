#!/usr/bin/python3
"""headers_alone.py BUILD_DIR: each header compiles as the first and only include of a file, with
the flags of its folder. A header that a source of this build begins with has been compiled so:
the source's object is there.

The compiler is called as the build calls it, by its launcher: a compiler cache knows a header
that has not changed. Flags come from BUILD_DIR/compile_commands.json: a header is compiled like
a source file of its folder; like the one with the same last word in its name when there is one
(vec_avx512.h like gemm_avx512.c), because that word may be an instruction set. TEMPLATES are
left out, and so are headers that only sources include which this build leaves out (one without
daemons need not have gRPC's headers). A header that no source includes at all is one too many.
Two headers planted first, one that lacks an include and one that does not, show that the check
can tell them apart."""
import fnmatch
import json
import os
import re
import shlex
import subprocess
import sys

from tree import ROOT, code_only, read, source_files

# Bodies that are written once and included by one file per instruction set, after the header that
# defines the vectors of that set.
TEMPLATES = ("kernels/cpu/*_simd.h", )
# CUDA's headers, compiled as the emulated GPU's C++ is: with the flags of a .cu file. Left out of a
# build that has none.
CUDA = ("kernels/cuda/*.h", "tests/fake/cuda_emu/emu.h")
CUDA_BUT_C = "tests/fake/cuda_emu/*.h"
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]*)"', re.MULTILINE)


def is_cuda(header):
    return header == CUDA[1] or (fnmatch.fnmatch(header, CUDA[0])
                                 and not fnmatch.fnmatch(header, CUDA_BUT_C))


def last_word(path):
    return os.path.splitext(os.path.basename(path))[0].split("_")[-1]


FIRST_INCLUDE = re.compile(r'\s*#[ \t]*include[ \t]*"([^"]*)"')


def begins_with(text):
    """The header that a source's code begins with, before any other line; None: none of ours."""
    found = FIRST_INCLUDE.match(code_only(text, keep_strings=True))
    return found.group(1) if found else None


def begun_with(build_dir, compiled):
    """(header, is it CUDA's) for each source that has its object: a header of C is not shown by a
    source that is compiled as C++."""
    found = set()
    for path, command in compiled:
        words = shlex.split(command)
        if os.path.exists(os.path.join(build_dir, words[words.index("-o") + 1])):
            found.add((begins_with(read(ROOT, path)), path.endswith(".cu")))
    return found


def sources(build_dir):
    """(path from ROOT, compile command) of each of our files that this build compiles."""
    with open(os.path.join(build_dir, "compile_commands.json"), encoding="utf-8") as f:
        commands = json.load(f)
    found = [(os.path.relpath(os.path.realpath(entry["file"]), ROOT), entry["command"])
             for entry in commands]
    return [(path, command) for path, command in found
            if not path.startswith("..") and not path.startswith("build" + os.sep)]


def included(paths):
    """Every file of the tree that one of these includes in quotes, or what it includes does.
    Conditions are not looked at."""
    seen, to_read = set(), list(paths)
    while to_read:
        for quoted in INCLUDE.findall(code_only(read(ROOT, to_read.pop()), keep_strings=True)):
            if quoted not in seen and os.path.isfile(os.path.join(ROOT, quoted)):
                seen.add(quoted)
                to_read.append(quoted)
    return seen


def compile_flags(compiled):
    """folder -> {last word of a source file's name: its flags, without what names the file
    itself}. Of .cu files: folder "cuda"."""
    flags = {}
    for path, command in compiled:
        words, kept, skip = shlex.split(command), [], False
        for word in words:
            if skip:
                skip = False
            elif word in ("-o", "-MT", "-MF", "-c"):
                skip = True
            elif word not in ("-MD", "-g", "-w"):
                kept.append(word)
        folder = "cuda" if path.endswith(".cu") else os.path.dirname(path)
        if folder == "cuda" and "-DTD_CUDA_EMULATE" not in kept:
            continue  # nvcc's
        flags.setdefault(folder, {}).setdefault(last_word(path), kept)
    return flags


def compile_header(launcher, flags, header, root, scratch):
    language = "c++" if "c++" in flags else "c"
    source = os.path.join(scratch, header.replace("/", "-") + ".c")
    with open(source, "w", encoding="utf-8") as f:
        f.write(f'#include "{header}"\nextern int td_alone;\n')
    return subprocess.run(
        [*launcher, *flags, "-I", root, "-x", language, "-fsyntax-only", "-c", source],
        capture_output=True, text=True, check=False)


def launcher_of(build_dir):
    with open(os.path.join(build_dir, "CMakeCache.txt"), encoding="utf-8") as f:
        found = re.search(r"^CMAKE_C_COMPILER_LAUNCHER:\w+=(.*)$", f.read(), re.MULTILINE)
    return found.group(1).split(";") if found and found.group(1) else []


def self_test(launcher, flags, scratch):
    for text, first in (('/* why */\n#include "a.h"\n#include <b.h>\n', "a.h"),
                        ('#include <b.h>\n#include "a.h"\n', None),
                        ('#define B 1\n#include "a.h"\n', None)):
        if begins_with(text) != first:
            sys.exit(f"headers_alone.py is broken: what begins with {begins_with(text)}: {text}")
    for name, text, is_good in (("good.h", "#include <stdint.h>\nuint32_t td_f(void);\n", True),
                                ("bad.h", "uint32_t td_f(void);\n", False)):
        with open(os.path.join(scratch, name), "w", encoding="utf-8") as f:
            f.write(text)
        if (compile_header(launcher, flags, name, scratch, scratch).returncode == 0) != is_good:
            sys.exit(f"headers_alone.py is broken: it cannot tell that {name} is "
                     f"{'good' if is_good else 'bad'}")


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: headers_alone.py BUILD_DIR")
    compiled = sources(sys.argv[1])
    flags, of_build, of_tree = compile_flags(compiled), included(
        path for path, _ in compiled), included(source_files(ROOT, (".c", ".cu")))
    n_checked, n_begun, left_out, failed = 0, 0, [], []
    begun = begun_with(sys.argv[1], compiled)
    launcher, scratch = launcher_of(sys.argv[1]), os.path.join(sys.argv[1], "headers_alone")
    os.makedirs(scratch, exist_ok=True)
    self_test(launcher, next(iter(next(iter(flags.values())).values())), scratch)
    for header in source_files(ROOT, (".h", )):
        text = code_only(read(ROOT, header), keep_strings=True)
        # A header of a folder without sources of its own is compiled like its parent folder's
        # files.
        folder = os.path.dirname(header)
        while folder and folder not in flags:
            folder = os.path.dirname(folder)
        if is_cuda(header):
            folder = "cuda" if "cuda" in flags else ""
        if header not in of_tree:
            failed.append(header)
            print(f"{header}: no source file includes it")
            continue
        if not folder or header not in of_build:
            left_out.append(header)
            continue
        if not re.search(r"^#ifndef\s+\w+\s*\n#define\s+\w+", text,
                         re.MULTILINE) and "#pragma once" not in text:
            failed.append(header)
            print(f"{header}: has no include guard")
            continue
        if any(fnmatch.fnmatch(header, pattern) for pattern in TEMPLATES):
            left_out.append(header)
            continue
        if (header, is_cuda(header)) in begun:
            n_begun += 1
            continue
        of_folder = flags[folder]
        of_header = of_folder.get(last_word(header)) or next(iter(of_folder.values()))
        result = compile_header(launcher, of_header, header, ROOT, scratch)
        n_checked += 1
        if result.returncode != 0:
            failed.append(header)
            print(f"{header}: does not compile alone:\n{result.stderr}")
    for header in left_out:
        print(f"{header}: left out, a template or of a part that this build leaves out")
    print(f"headers_alone: {n_checked} headers compiled, {n_begun} by sources that begin with "
          f"them, {len(failed)} failed, {len(left_out)} left out")
    if n_checked + n_begun == 0:
        sys.exit("no header was compiled: the check looked at nothing")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
