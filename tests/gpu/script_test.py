#!/usr/bin/env python3
"""script_test.py BUILD_DIR - tests/gpu/run from its bundle, in a root directory that holds glibc, a
shell and Python and nothing that tandem is built with.

The three calls run in their smallest form on the emulated GPU; a step that hangs is killed and
told; what is left when time is over is told; and without a GPU every step says so by name. Where
the machine gives no mount namespace, all of it runs beside the machine's own libraries, which is
said."""
import csv
import glob
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
EXPECTED_SKIPS = re.compile(
    r"--tiny|compute-sanitizer is not on the path|No module named|takes two GPUs")
# Packages of tandem's build whose libraries must not be in the root beside the bundle.
FOREIGN = ("libgrpc", "libprotobuf", "libibverbs", "libjansson", "libxxhash", "libpcre2",
           "libutf8proc", "libcmocka", "libmicrohttpd")


def copy_program(path, root):
    """The program and what it loads, where they are."""
    done = subprocess.run(["ldd", path], capture_output=True, text=True, check=False)
    for name in [path, *re.findall(r"(/\S+) \(0x", done.stdout)]:
        to = root + name
        if not os.path.exists(to):
            os.makedirs(os.path.dirname(to), exist_ok=True)
            shutil.copy(os.path.realpath(name), to)


def make_root(root):
    """Python with its standard library, sh, and glibc with what programs may ask of it. A
    symbolic link /lib would hide what lies behind it: it is made first."""
    for name in ("bin", "sbin", "lib", "lib64"):
        if os.path.islink("/" + name):
            os.makedirs(os.path.join(root, "usr", name), exist_ok=True)
            os.symlink("usr/" + name, os.path.join(root, name))
    for name in ("tmp", "proc", "dev", "sys", "etc", "out"):
        os.makedirs(os.path.join(root, name))
    python = os.path.realpath(sys.executable)
    for program in (python, shutil.which("sh"), shutil.which("env")):
        copy_program(program, root)
    if not os.path.exists(root + "/usr/bin/python3"):
        os.symlink(python, root + "/usr/bin/python3")
    if not os.path.exists(root + "/bin/sh"):
        os.symlink(os.path.realpath(shutil.which("sh")), root + "/bin/sh")
    library = sysconfig.get_path("stdlib")
    shutil.copytree(
        library, root + library, ignore=shutil.ignore_patterns(
            "test", "__pycache__", "*-packages", "idlelib", "tkinter"), dirs_exist_ok=True)
    for module in glob.glob(os.path.join(library, "lib-dynload", "*.so")):
        if re.match(
                r"_(lzma|bz2|hashlib|json|struct|socket|posixsubprocess|random|csv|datetime|ctypes"
                r"|queue)\b", os.path.basename(module)):
            copy_program(module, root)
    libc = next(line.split()[2] for line in subprocess.run(
        ["ldd", python], capture_output=True, text=True, check=True).stdout.splitlines()
                if "libc.so.6" in line)
    for name in ("libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "libresolv.so.2",
                 "libutil.so.1", "libnss_files.so.2"):
        path = os.path.join(os.path.dirname(libc), name)
        if os.path.exists(path) and not os.path.exists(root + path):
            shutil.copy(os.path.realpath(path), root + path)
    with open(os.path.join(root, "etc", "hosts"), "w", encoding="utf-8") as f:
        f.write("127.0.0.1 localhost\n")


def inside(root, *args, timeout=240):
    """The command in that root, with /proc, /dev and /sys of this machine; an empty environment
    but for the path. root "": outside.

    /sys must be there: a thread's first malloc counts the processors in it, and gRPC 1.51 allocates
    between connect() and its look at errno. Without /sys a connection that is under way then ends
    now and then with "No such file or directory"."""
    if not root:
        return subprocess.run(["env", "-i", "PATH=/usr/bin:/bin", "HOME=/tmp", *map(str, args)],
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=timeout, check=False)
    script = 'for d in proc dev sys; do mount --rbind /$d "$1/$d" || exit; done; exec chroot "$@"'
    command = [
        "unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"]), "sh", "-c",
        script, "sh", root, "/usr/bin/env", "-i", "PATH=/usr/bin:/bin", "HOME=/tmp", *args
    ]
    return subprocess.run([str(a) for a in command], stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          timeout=timeout, check=False)


def verdicts(out, call, done):
    """{step: (verdict, why)} of the table, which must be what was printed."""
    with open(f"{out}/call{call}.csv", encoding="utf-8", newline="") as f:
        rows = list(csv.DictReader(f))
    printed = re.findall(r"^(PASS|FAIL|SKIP) (\S+) [\d.]+ s(?:: (.*))?$", done.stdout, re.M)
    assert [(r["verdict"], r["step"], r["why"]) for r in rows] == printed, done.stdout
    return {r["step"]: (r["verdict"], r["why"]) for r in rows}


def main():
    build = os.path.abspath(sys.argv[1])
    with tempfile.TemporaryDirectory() as top:
        root = os.path.join(top, "root")
        bundle = os.path.join(top, "gpu-bundle")
        subprocess.run([
            sys.executable,
            os.path.join(ROOT, "tests", "gpu", "run"), "--part", "bundle", "--tiny", "--bin",
            os.path.join(build, "bin"), "--library",
            os.path.join(build, "bin", "libtandem_cuda_emu.so"), "--bundle", bundle, "--commit",
            "none"
        ], check=True)
        make_root(root)
        found = [
            n for n in sum((files for _, _, files in os.walk(root)), []) if n.startswith(FOREIGN)
        ]
        assert not found, f"the root is not bare: {found}"
        with tarfile.open(bundle + ".tar.xz") as tar:
            # our own archive; without it Python 3.12 warns and 3.14 filters
            tar.extraction_filter = lambda member, path: member
            tar.extractall(root)
        out, place, python = root + "/out", "", "/usr/bin/python3"
        probe = inside(root, python, "-c", "print('here')")
        if probe.stdout.strip() != "here":
            print(f"no mount namespace on this machine ({probe.stdout.strip()[-200:]}): not in a "
                  "bare root")
            place, python, root = root, sys.executable, ""
        bundle = place + "/gpu-bundle"
        run = [python, bundle + "/tests/gpu/run", "--out", place + "/out"]
        emulated = ["--tiny", "--library", bundle + "/bin/libtandem_cuda_emu.so"]

        # Without a GPU: told by name, at once.
        done = inside(root, *run, "--part", "kernels:cuda_attn_test,golden", timeout=60)
        assert done.returncode == 1 and len(
            re.findall(r"^== \S+: FAILED: .*CUDA is not available", done.stdout,
                       re.M)) == 2, done.stdout
        print("no device: told by name")

        # A step that hangs, and the end of the call's time.
        start = time.monotonic()
        done = inside(root, *run, *emulated, "--call", 2, "--limit", 13, "--hang", "floors")
        seen = verdicts(out, 2, done)
        assert done.returncode == 1 and seen["floors"][0] == "FAIL" and re.fullmatch(
            r"still running after 1\d s, killed", seen["floors"][1]), done.stdout
        assert all(v[0] == "SKIP" and "s left of the call" in v[1] for step, v in seen.items()
                   if step != "floors"), done.stdout
        assert time.monotonic() - start < 60
        print("a step that hangs: killed and told")

        for call in (1, 2, 3):
            done = inside(root, *run, *emulated, "--call", call)
            print(done.stdout)
            seen = verdicts(out, call, done)
            bad = {
                step: v for step, v in seen.items()
                if v[0] == "FAIL" or v[0] == "SKIP" and not EXPECTED_SKIPS.search(v[1])
            }
            if bad or done.returncode:
                with open(f"{out}/call{call}.log", encoding="utf-8") as f:
                    print(f.read()[-12000:])
                raise SystemExit(f"call {call}: {bad}")
        left = sorted(os.listdir(out))
        print("left in --out:", *left)
        for word in ("engine-bench", "cuda-attn", "cuda-sample", "cluster", "xfer", "floors"):
            assert any(n.startswith(word) for n in left), word
    return 0


if __name__ == "__main__":
    sys.exit(main())
