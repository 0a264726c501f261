#!/usr/bin/python3
"""Makes seeds of the transfer fuzzers: tests/tools/xfer_fuzz_seeds.py frames|setup [FOLDER]

frames: from real traffic. A prefill and a decode worker serve models/pocket on loopback; a packet
socket (needs CAP_NET_RAW) listens to the decode worker's KV port, streams are put together by
sequence number and cut into frames. What is written is what xfer_frame_fuzz reads: a byte of
repairs, the frame's header, its payload. Its receiver has a grant of 5 blocks of 96 bytes in slot
1, so slots become 1 and offsets and lengths of DATA, FINAL and REF are scaled from the real block's
bytes to 96; bytes of blocks are left out (zeros). Keys, handles and generations are put right by
the fuzzer itself. A padding byte or three at the end chooses tcp or rdma for its sender, as n_bytes
% 4.

setup: the seeds of xfer_setup_fuzz without a secret, as a side that knows the cluster secret
would say them."""
import os
import socket
import struct
import sys
import tempfile
import threading

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests", "cluster"))
CORPUS = os.path.join(ROOT, "tests", "fuzz", "corpus")
HEADER = struct.Struct("<IBBHIIIHhQQIIQII")  # docs/wire.md
HELLO, HELLO_ACK, OPEN, DATA, REF, FINAL, TARGETS = 1, 2, 4, 5, 6, 7, 14
CHALLENGE, PROOF = 21, 22
FUZZ_BLOCK, FUZZ_BLOCKS, MAX_SEED = 96, 5, 4096


class Wire(threading.Thread):
    """Segments of TCP to and from one port, until stop()."""
    def __init__(self, port):
        super().__init__(daemon=True)
        self.port, self.done, self.segments = port, threading.Event(), []
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0800))
        self.socket.bind(("lo", 0))
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 20)
        self.socket.settimeout(0.1)

    def run(self):
        while not self.done.is_set():
            try:
                packet, address = self.socket.recvfrom(1 << 17)
            except socket.timeout:
                continue
            if address[2] == socket.PACKET_OUTGOING or packet[
                    9] != socket.IPPROTO_TCP:  # each is seen twice on lo
                continue
            ip, total = (packet[0] & 15) * 4, struct.unpack_from(">H", packet, 2)[0] or len(packet)
            source, target, seq = struct.unpack_from(">HHI", packet, ip)
            data = packet[ip + (packet[ip + 12] >> 4) * 4:total]
            if self.port in (source, target) and data:
                self.segments.append((source, target, seq, data))

    def stop(self):
        self.done.set()
        self.join()

    def frames(self):
        """(from the sender, header, payload) in the order in which their last byte came."""
        streams, out = {}, []
        for source, target, seq, data in self.segments:
            s = streams.setdefault((source, target), {"next": seq, "late": {}, "bytes": b""})
            s["late"][seq] = data
            while s["next"] in s["late"]:
                piece = s["late"].pop(s["next"])
                s["next"] = (s["next"] + len(piece)) & 0xffffffff
                s["bytes"] += piece
            while len(s["bytes"]) >= 64:
                h = HEADER.unpack_from(s["bytes"])
                assert h[0] == 0x31584454, "not a frame: a segment was lost"
                if len(s["bytes"]) < 64 + h[11]:
                    break
                out.append((target == self.port, list(h), s["bytes"][64:64 + h[11]]))
                s["bytes"] = s["bytes"][64 + h[11]:]
        return out


def as_seed(frames, block_bytes, rdma):
    def scaled(offset):
        return min(offset, FUZZ_BLOCKS * block_bytes) * FUZZ_BLOCK // block_bytes

    seed = b""
    for _, h, payload in frames:
        kind = h[2]
        if kind in (HELLO, HELLO_ACK, CHALLENGE, PROOF):
            continue
        h[4] = 1
        if kind == DATA:
            start, end = scaled(h[10]), scaled(h[10] + h[11])
            h[10], h[11] = start, max(end - start, 1)
            payload = bytes(h[11])
        elif kind in (FINAL, REF):
            h[10] = scaled(h[10])
        if len(seed) + 65 + len(payload) > MAX_SEED:
            break
        seed += b"\x0f" + HEADER.pack(*h) + payload
    return seed + bytes((3 if rdma else 2) - len(seed) % 4 + 4 & 3)


def record(name, rdma=False, digest="off", chunk=512, n_tokens=5 * 16 - 4, cancel=False):
    """One prompt of FUZZ_BLOCKS blocks. rdma: by the provider in memory."""
    from harness import Cluster, free_port
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        env = {"TANDEM_VERBS_FAKE": f"path={folder}/fabric"} if rdma else {}
        path = [
            "--transfer", "rdma" if rdma else "tcp", "--kv-digest", digest, "--max-step-tokens",
            chunk
        ]
        with Cluster(prefill=0, decode=0) as c:
            c.start_worker("decode", env=env, args=[*path, "--transfer-port", port])
            c.start_worker("prefill", env=env, args=path)
            c.wait_workers(2)
            wire = Wire(port)
            wire.start()
            request = c.request(ids=[3 + i * 7 % 500 for i in range(n_tokens)], max_tokens=2,
                                ignore_eos=True)
            if cancel:
                c.stream(request).cancel()
            else:
                assert len(c.generate(request).tokens) == 2
            c.wait_idle()
            wire.stop()
    frames = wire.frames()
    hello = next(p for _, h, p in frames if h[2] == HELLO)
    block_bytes = struct.unpack_from("<Q", hello, 16)[0]
    print(
        f"{name}: {len(frames)} frames of types {[h[2] for _, h, _ in frames]}, blocks of "
        f"{block_bytes} bytes", flush=True)
    return as_seed(frames, block_bytes, rdma)


def frame_seeds():
    yield "real_tcp", record("real_tcp")
    yield "real_tcp_chunks_digests", record("real_tcp_chunks_digests", digest="always", chunk=16)
    yield "real_rdma", record("real_rdma", rdma=True)
    yield "real_rdma_digests", record("real_rdma_digests", rdma=True, digest="1/2", chunk=32)


def setup_seeds():
    fix_length_and_sizes, secret_engine = 6, 64

    def bare(kind):
        return bytes([fix_length_and_sizes]) + HEADER.pack(0, 0, kind, *[0] * 13) + bytes(32)

    folder = os.path.join(CORPUS, "xfer_setup_fuzz")
    for name in ("tcp_initiator", "shm_initiator", "rdma_initiator", "tcp_acceptor",
                 "rdma_acceptor"):
        with open(os.path.join(folder, name), "rb") as f:
            seed = f.read()
        hello, rest = seed[1:66 + 112] + bytes(32), seed[66 + 112:]
        first = bytes([seed[0] | secret_engine])
        yield f"secret_{name}", first + (hello + bare(PROOF)
                                         if "initiator" in name else bare(CHALLENGE) + hello) + rest
        if name == "tcp_initiator":
            yield "secret_no_proof", first + hello + rest
            yield "secret_wrong_proof", first + hello + b"\x02" + bare(PROOF)[1:] + rest
            yield "secret_old_hello", first + b"\0" + HEADER.pack(
                0, 0, HELLO, *[0] * 8, 112, *[0] * 4) + seed[66:66 + 112] + rest


def main():
    what = {"frames": frame_seeds, "setup": setup_seeds}[sys.argv[1]]
    folder = sys.argv[2] if len(sys.argv) > 2 else os.path.join(
        CORPUS, f"xfer_{sys.argv[1].rstrip('s')}_fuzz")
    for name, seed in what():
        with open(os.path.join(folder, name), "wb") as f:
            f.write(seed)
        print(f"{name}: {len(seed)} bytes")


if __name__ == "__main__":
    main()
