"""Names for pods, in CoreDNS' place: dnsmasq, whose file of hosts follows what a function gives.

dnsmasq reads the file again at SIGHUP, and SIGHUP ends it as long as it has not begun: on a machine
that does much else that is more than the 0.2 s after which the first change comes. So nothing is
sent to it before it has answered. What it does not know does not exist (NXDOMAIN, --local=/#/):
otherwise dnsmasq refuses (REFUSED), also to say that a name has no IPv6 address, and resolvers take
a refusal for a name server that is ill."""
import os
import signal
import socket
import struct
import threading
import time

READY = "ready.tandem-k8s"  # a name that is always there
LOOK_S = 0.2
NOERROR, NXDOMAIN = 0, 3
A, AAAA = 1, 28


def ask(address, port, name, kind=A, timeout=1.0):
    """(response code, number of answers), or None: nobody answered."""
    labels = b"".join(bytes([len(x)]) + x.encode() for x in name.split("."))
    query = struct.pack(">6H", 1, 0x100, 1, 0, 0, 0) + labels + struct.pack(">BHH", 0, kind, 1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.settimeout(timeout)
        try:
            s.connect((address, port))
            s.send(query)
            answer = s.recv(1500)
        except OSError:  # refused, or no answer in time
            return None
    return answer[3] & 15, struct.unpack(">H", answer[6:8])[0]


class Names:
    """start(*command) starts dnsmasq; lines() gives its file's text, or raises one of `passing`:
    then the text stays. `problem` says why names are followed no more."""
    def __init__(self, folder, address, start, lines, passing=(), port=53, start_s=120):
        self.folder, self.address, self.port, self.start_s = folder, address, port, start_s
        self.start, self.lines, self.passing = start, lines, passing
        self.over, self.ready, self.problem = threading.Event(), threading.Event(), None
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def stop(self):
        self.over.set()
        self.thread.join()

    def run(self):
        try:
            self.follow()
        except Exception as e:  # a thread's failure is the test's: whoever waits is told
            self.problem = f"names are followed no more: {e!r}"

    def write(self, text):
        """At once, by another file's name: dnsmasq may be reading."""
        path = os.path.join(self.folder, "hosts")
        with open(path + ".new", "w", encoding="ascii") as f:
            f.write(f"127.0.0.1 {READY}\n{text}")
        os.rename(path + ".new", path)
        return path

    def follow(self):
        hosts, last = self.write(""), ""
        dnsmasq = self.start("dnsmasq", "-k", "--conf-file=/dev/null", "--no-resolv", "--no-hosts",
                             f"--listen-address={self.address}", f"--port={self.port}",
                             "--bind-interfaces", f"--addn-hosts={hosts}", "--user=root",
                             "--pid-file=", "--local=/#/", "--cache-size=0")
        end = time.monotonic() + self.start_s
        while not self.over.wait(LOOK_S):
            assert dnsmasq.poll() is None, f"dnsmasq ended with {dnsmasq.returncode}"
            if not self.ready.is_set():
                if ask(self.address, self.port, READY):
                    self.ready.set()
                assert time.monotonic() < end, f"dnsmasq: no answer within {self.start_s} s"
                continue
            try:
                text = self.lines()
            except self.passing:
                continue
            if text != last:
                last = text
                self.write(text)
                dnsmasq.send_signal(signal.SIGHUP)
