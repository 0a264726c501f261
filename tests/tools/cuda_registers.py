#!/usr/bin/python3
"""Registers, spills and shared memory of every kernel, as ptxas told when it was compiled.

    cuda_registers.py compile NVCC ARGUMENTS...             runs the compiler; what ptxas -v says
        goes to OBJECT.ptxas instead of the terminal
    cuda_registers.py check BUILD_DIR NVCC_VERSION [--write]  writes BUILD_DIR/cuda_registers.csv
        and compares it with bench/results/cuda_registers.csv

The check fails for a kernel with more spilled bytes, or more bytes of stack, than its row in the
record has (none, where it has no row): register pressure is found when it comes in and not on a
GPU months later. It also fails where ptxas tells of a performance loss, such as asynchronous
products that it had to serialize. --write makes this build the record. Another version of nvcc
than the record's is not compared (exit 77)."""
import csv
import os
import re
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
RECORD = os.path.join(ROOT, "bench", "results", "cuda_registers.csv")
COLUMNS = [
    "file", "kernel", "arch", "registers", "stack_bytes", "spill_store_bytes", "spill_load_bytes",
    "smem_bytes", "nvcc"
]
BOUND = ("stack_bytes", "spill_store_bytes", "spill_load_bytes")

ENTRY = re.compile(r"Compiling entry function '([^']+)' for '([^']+)'")
PROPERTIES = re.compile(
    r"^\s+(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SMEM = re.compile(r"(\d+) bytes smem")
NOISE = re.compile(r"^ptxas info\b|^\s+\d+ bytes stack frame")


def compile_and_keep(command):
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    lines = (result.stdout + result.stderr).splitlines()
    if "-o" in command and result.returncode == 0:
        path = command[command.index("-o") + 1] + ".ptxas"
        with open(path, "w", encoding="utf-8") as f:
            f.write("\n".join(line for line in lines if NOISE.search(line)) + "\n")
    for line in lines:
        if not NOISE.search(line):
            print(line)
    return result.returncode


def parse(text):
    """[(mangled name, arch, registers, stack, spill stores, spill loads, smem)]: a function that
    is called has properties too, and is no entry."""
    found, name, arch, properties = [], None, None, None
    for line in text.splitlines():
        entry, sizes, used = ENTRY.search(line), PROPERTIES.search(line), USED.search(line)
        if entry:
            name, arch, properties = entry.group(1), entry.group(2), None
        elif sizes and name and properties is None:
            properties = [int(n) for n in sizes.groups()]
        elif used and name:
            smem = SMEM.search(line)
            found.append((name, arch, int(
                used.group(1)), *(properties or (0, 0, 0)), int(smem.group(1)) if smem else 0))
            name = None
    return found


def losses(text):
    """What ptxas says it had to make slow, as information only: -Werror does not stop it."""
    return [
        line.removeprefix("ptxas info    : ") for line in text.splitlines()
        if "Performance Loss" in line
    ]


def demangle(names):
    result = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True,
                            check=True)
    return dict(zip(names, (readable(line) for line in result.stdout.splitlines())))


def readable(name):
    """void attn<64, true>(args) -> attn<64, true>: kernels are no overloads."""
    name = name.replace("(anonymous namespace)::", "")
    depth = 0
    for i, c in enumerate(name):
        depth += (c == "<") - (c == ">")
        if c == "(" and depth == 0 and i:
            name = name[:i]
            break
    return re.sub(r"\((?:int|bool|unsigned int)\)", "", name.removeprefix("void "))


def compare(rows, record):
    """What is worse than the record, in words."""
    known, problems = {(r["file"], r["kernel"], r["arch"]): r for r in record}, []
    for row in rows:
        listed = known.get((row["file"], row["kernel"], row["arch"]))
        for column in BOUND:
            limit = int(listed[column]) if listed else 0
            if int(row[column]) > limit:
                problems.append(
                    f"{row['file']}: {row['kernel']} on {row['arch']}: {column} {row[column]}, "
                    f"{limit if listed else 'none'} in the record"
                    f" ({row['registers']} registers)")
    return problems


PLANTED = ("ptxas info    : (C7518) Potential Performance Loss: wgmma.mma_async instructions are "
           "serialized in the function '_Z3badPf'") + """
ptxas info    : Compiling entry function '_Z4goodILi2EEvPf' for 'sm_80'
ptxas info    : Function properties for _Z4goodILi2EEvPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 30 registers, used 1 barriers, 1024 bytes smem, 372 bytes cmem[0]
ptxas info    : Compiling entry function '_Z3badPf' for 'sm_80'
ptxas info    : Function properties for _Z3badPf
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers
"""


def self_test():
    entries = parse(PLANTED)
    if entries != [("_Z4goodILi2EEvPf", "sm_80", 30, 0, 0, 0, 1024),
                   ("_Z3badPf", "sm_80", 255, 8, 4, 12, 0)]:
        sys.exit(f"cuda_registers.py is broken: it read {entries}")
    if len(losses(PLANTED)) != 1 or losses(PLANTED.partition("\n")[2]):
        sys.exit("cuda_registers.py is broken: it does not tell a loss from none")
    names = demangle([e[0] for e in entries])
    if list(names.values()) != ["good<2>", "bad"]:
        sys.exit(f"cuda_registers.py is broken: names {names}")
    rows = [row_of("f.cu", e, names, "13.0") for e in entries]
    listed = [dict(rows[1])]
    if len(compare(rows, [])) != 3 or compare(
            rows, listed) or len(compare(rows, [dict(listed[0], spill_load_bytes=11)])) != 1:
        sys.exit("cuda_registers.py is broken: it does not tell a spill from none")


def row_of(file, entry, names, nvcc):
    return dict(zip(COLUMNS, (file, names[entry[0]], *entry[1:], nvcc)))


def write(path, rows):
    with open(path, "w", encoding="utf-8", newline="") as f:
        writer = csv.DictWriter(f, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read(path):
    with open(path, encoding="utf-8", newline="") as f:
        return list(csv.DictReader(f))


def check(build_dir, nvcc_version, is_writing):
    self_test()
    nvcc, rows, slow = ".".join(nvcc_version.split(".")[:2]), [], []
    folder = os.path.join(build_dir, "kernels", "cuda", "CMakeFiles", "tandem_cuda.dir")
    for name in sorted(os.listdir(folder)):
        source = name.removesuffix(".o.ptxas")
        if source == name or not os.path.exists(os.path.join(ROOT, "kernels", "cuda", source)):
            continue
        with open(os.path.join(folder, name), encoding="utf-8") as f:
            text = f.read()
        entries = parse(text)
        slow += [f"{source}: {loss}" for loss in losses(text)]
        names = demangle([e[0] for e in entries]) if entries else {}
        rows += [row_of(source, e, names, nvcc) for e in entries]
    if not rows:
        sys.exit(f"cuda_registers: no kernel in {folder}: build tandem_cuda first")
    rows.sort(key=lambda r: (r["file"], r["kernel"], r["arch"]))
    write(os.path.join(build_dir, "cuda_registers.csv"), rows)
    if is_writing:
        write(RECORD, rows)
    record = read(RECORD)
    spilling = [r for r in rows if any(int(r[c]) for c in BOUND)]
    print(f"cuda_registers: {len(rows)} kernels and architectures, up to "
          f"{max(int(r['registers']) for r in rows)} registers, {len(spilling)} with stack or "
          "spills")
    if record and record[0]["nvcc"] != nvcc:
        print(f"cuda_registers: the record is of nvcc {record[0]['nvcc']}, this is {nvcc}: not "
              "compared")
        return 77
    problems = compare(rows, record)
    for problem in slow + problems:
        print(problem)
    if problems:
        print("cuda_registers: fewer registers a thread (smaller tiles, __launch_bounds__), or, "
              "with a reason in the commit, tests/tools/cuda_registers.py check "
              "BUILD_DIR NVCC_VERSION --write")
    return 1 if slow or problems else 0


def main():
    if len(sys.argv) > 2 and sys.argv[1] == "compile":
        return compile_and_keep(sys.argv[2:])
    if len(sys.argv) in (4, 5) and sys.argv[1] == "check" and (len(sys.argv) == 4
                                                               or sys.argv[4] == "--write"):
        return check(sys.argv[2], sys.argv[3], len(sys.argv) == 5)
    sys.exit(__doc__)


if __name__ == "__main__":
    sys.exit(main())
