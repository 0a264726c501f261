#!/usr/bin/python3
"""names.py: a name server that starts late has the newest names all the same; names come and go;
what is not there does not exist, and a refusal is not what it answers; one that has ended is told
of. Skips (77) without dnsmasq."""
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time

from names import A, AAAA, NOERROR, NXDOMAIN, Names, ask

WAIT_S = 60
ONE, TWO = "one.default.svc.cluster.local", "two.default.svc.cluster.local"
LATE = 'sleep 0.5; exec "$@"'  # on a busy machine a program may begin so much later


def wait_for(condition, what):
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, f"no {what} within {WAIT_S} s"
        time.sleep(0.01)


def free_place():
    """An address of loopback that nobody else uses, and a port below those that the kernel gives
    to connections: other tests listen on 127.0.0.1, and dnsmasq begins half a second later."""
    while True:
        address = "127." + ".".join(str(random.randrange(2, 250)) for _ in range(3))
        port = random.randrange(10000, 30000)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp, socket.socket() as tcp:
            try:
                udp.bind((address, port))
                tcp.bind((address, port))
                return address, port
            except OSError:
                continue


def main():
    if not shutil.which("dnsmasq"):
        print("k8s_names: skipped, no dnsmasq (apt-get install dnsmasq-base)")
        sys.exit(77)
    processes, text = [], [f"10.0.0.1 {ONE}\n"]
    address, port = free_place()
    looked = []

    def start(*command):
        processes.append(
            subprocess.Popen(["sh", "-c", LATE, "sh", *command], stdin=subprocess.DEVNULL,
                             stderr=subprocess.DEVNULL))
        return processes[-1]

    def lines():
        looked.append(time.monotonic())
        if text[0] is None:
            raise ConnectionRefusedError("the API")
        return text[0]

    def says(name, kind, want):
        return lambda: names.problem or ask(address, port, name, kind) == want

    with tempfile.TemporaryDirectory() as folder:
        names = Names(folder, address, start, lines, (OSError, ), port)
        try:
            wait_for(says(ONE, A, (NOERROR, 1)), "first name")
            assert not names.problem, names.problem
            for name, kind, want in ((ONE, AAAA, (NOERROR, 0)), (TWO, A, (NXDOMAIN, 0)),
                                     (TWO, AAAA, (NXDOMAIN, 0))):
                assert says(name, kind, want)(), (name, kind)
            text[0] = None  # an API that does not answer takes no name away
            n = len(looked) + 2
            wait_for(lambda: len(looked) >= n, "more looks")
            assert says(ONE, A, (NOERROR, 1))()
            text[0] = f"10.0.0.2 {TWO}\n10.0.0.3 {TWO}\n"
            wait_for(says(TWO, A, (NOERROR, 2)), "both addresses")
            wait_for(says(ONE, A, (NXDOMAIN, 0)), "end of the first name")
            assert not names.problem, names.problem
            processes[0].kill()
            wait_for(lambda: names.problem, "word of its end")
            assert "dnsmasq ended with -9" in names.problem, names.problem
        finally:
            names.stop()
            for p in processes:
                p.kill()
                p.wait()
    assert len(processes) == 1
    print("k8s_names: as they should be")


if __name__ == "__main__":
    main()
