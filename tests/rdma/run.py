#!/usr/bin/python3
"""Boots one VM with two Soft-RoCE devices (scripts/rdma-vm) and runs the RDMA tests in it, one
after the other.

    tests/rdma/run.py BUILD_DIR [--long | --part cluster | --part transfer | NAME ...]

A test is a line of TESTS: name, seconds it may take, command. --part cluster: the one of them that
runs clusters; --part transfer: the others; ctest runs both, each in a VM of its own. Those of LONG
run too with --long, or when they are named; those of MEASUREMENTS only when they are named. The
programs' output is passed on as it comes; cmocka's and pytest's totals in it are what
scripts/check counts. A program is skipped when it exits with 77. Exit status: 0; 1 when one
failed; 77 when the VM cannot run here, or all were skipped."""
import ctypes
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
VM = os.path.join(ROOT, "scripts", "rdma-vm")
SKIPPED = 77
BOOT_S = 120
PATIENCE = 3

# The transfer suite's cases over both devices.
XFER = "env TANDEM_XFER_REAL=rxe0,rxe1 BIN/xfer_test"
PYTEST = "/usr/bin/python3 -m pytest -q -rfEs -p no:cacheprovider"
# BIN stands for the build's bin/ folder. A limit is for what hangs: PATIENCE times the seconds told
# here, which are three times what an emulated VM
# needs where few others run. With 46 ready to run on 2 processors it gets a fifth of one, and
# "cluster" was cut off at 600 s, one test before its end.
TESTS = [("verbs_real", 120, "BIN/verbs_real_test rxe0 rxe1"),
         ("verbs_fault", 120, "BIN/verbs_fault_test rxe0 rxe1"),
         ("xfer_arrive", 60, XFER + " transfers_arrive_whole*"),
         ("xfer_order", 60, XFER + " any_order_and_late_final*"),
         ("xfer_cancel", 60, XFER + " cancel_at_every_point*"),
         ("xfer_revoke", 60, XFER + " revoke_at_every_point*"),
         ("xfer_kill", 120, XFER + " kill_at_every_point*"),
         ("xfer_cut", 60, XFER + " a_cut_connection*"),
         ("xfer_random", 120, "env TANDEM_XFER_SOAK=60 " + XFER + " random_transfers*child*"),
         ("xfer_liar", 120, "env TANDEM_XFER_REAL=rxe0,rxe1 BIN/xfer_liar_test"),
         # One program: gRPC's import alone takes half a minute there. make check-long runs the case
         # of a link that goes down, too, a third of it; verbs_fault has that without clusters.
         ("cluster", 600, PYTEST + " tests/rdma/test_rdma_cluster.py -k " +
          ("'not long or link_down'" if os.environ.get("TANDEM_TEST_LONG") else "'not long'")),
         ]
LONG = [  # a stop is noticed after seconds, so those tests are here
    ("cluster_long", 600, PYTEST + " tests/rdma/test_rdma_cluster.py -k 'long and not killed'"),
    ("cluster_killed", 900, PYTEST +
     " -s tests/rdma/test_rdma_cluster.py -k killed_whenever"),  # begins no kill after 300 s
    ("xfer_all", 700, "env TANDEM_XFER_SOAK=400 " + XFER),
]
# Run when they are named: figures, which depend on the machine and fail nothing.
MEASUREMENTS = [("write_bw", 180, "tests/rdma/write_bw"),
                ("windows_cost", 120, "BIN/windows_cost rxe0 rxe1"), ]


def guest_script(tests, bin_dir):
    """Shell for the VM: every test between two marked lines, the second with its status."""
    lines = []
    for name, limit_s, command in tests:
        words = shlex.join(w.replace("BIN/", bin_dir + "/") for w in shlex.split(command))
        lines += [
            f"echo '### {name}'", f"timeout -k 5 {PATIENCE * limit_s} {words} 2>&1",
            f"echo \"### {name} status $?\""
        ]
    return "\n".join(lines) + "\n"


def die_with_parent():
    ctypes.CDLL(None).prctl(
        1, signal.SIGTERM)  # PR_SET_PDEATHSIG: where ctest kills this, the VM ends too


def cpu_s():
    """What all that has ended took: the VM, and what started it."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    bin_dir, names = os.path.join(os.path.abspath(sys.argv[1]), "bin"), sys.argv[2:]
    known = TESTS + LONG + MEASUREMENTS
    if names == ["--long"]:
        names = [t[0] for t in TESTS + LONG]
    if names[:1] == ["--part"] and names[1:] in (["cluster"], ["transfer"]):
        names = [t[0] for t in TESTS if (t[0] == "cluster") == (names[1] == "cluster")]
    unknown = [n for n in names if n not in [t[0] for t in known]]
    if unknown:
        sys.exit(f"no such test: {unknown[0]}; there are " + ", ".join(t[0] for t in known))
    tests = [t for t in known if t[0] in names] if names else TESTS
    limit_s = PATIENCE * (BOOT_S + sum(t[1] for t in tests))
    begin = time.monotonic()
    vm = subprocess.Popen(
        [VM, "run", "-t",
         str(limit_s), "--", "/bin/sh", "-c",
         guest_script(tests, bin_dir)], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", preexec_fn=die_with_parent)
    statuses, started_s = {}, {}
    for line in vm.stdout:
        print(line, end="", flush=True)
        mark = re.search(r"### (\S+)(?: status (\d+))?\n$",
                         line)  # a program that was cut off ends in the middle of a line
        if mark and mark.group(2) is None:
            started_s[mark.group(1)] = time.monotonic()
        elif mark:
            statuses[mark.group(1)] = int(
                mark.group(2)), time.monotonic() - started_s[mark.group(1)]
    status = vm.wait()
    if status == SKIPPED and not statuses:
        sys.exit(SKIPPED)

    failed = []
    for name, _, _ in tests:
        if name not in statuses:
            result = "did not run" if name not in started_s else "did not end"
            failed.append(name)
        else:
            code, seconds = statuses[name]
            result = {0: "passed", SKIPPED: "skipped", 124: "timed out"}.get(
                code, f"failed with status {code}") + f" ({seconds:.1f} s)"
            if code not in (0, SKIPPED):
                failed.append(name)
        print(f"rdma: {name}: {result}")
    wall_s = time.monotonic() - begin
    print(f"rdma: {len(tests)} programs, {len(failed)} failed; {wall_s:.1f} s with the VM's boot, "
          f"{cpu_s():.1f} s of CPU time")
    if failed or status != 0:
        if status != 0:
            print(f"rdma: scripts/rdma-vm ended with {status}")
        sys.exit(1)
    if all(code == SKIPPED for code, _ in statuses.values()):
        sys.exit(SKIPPED)


if __name__ == "__main__":
    main()
