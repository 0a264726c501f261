"""Records what other people's clients send: stands between a client and a cluster, and writes each
request to a file that tests/cluster/test_recorded.py replays.

    record_clients.py FILE HTTP_LISTEN HTTP_SERVER GRPC_LISTEN GRPC_SERVER     # until SIGINT

A line of FILE is one request as JSON: {"head", "body"} of HTTP, the bytes as the client sent them
(latin-1), or {"method", "messages"} of gRPC, the messages in base64. Of requests that differ in
their prompts alone, the first two are kept. Needs grpcio."""
import base64
import json
import re
import select
import signal
import socket
import sys
import threading
from concurrent import futures

import grpc

KEEP = 2  # of one kind


class Recorder:
    def __init__(self, path):
        self.path, self.lock, self.seen = path, threading.Lock(), {}

    def add(self, kind, line):
        with self.lock:
            self.seen[kind] = self.seen.get(kind, 0) + 1
            if self.seen[kind] <= KEEP:
                with open(self.path, "a", encoding="utf-8") as f:
                    f.write(json.dumps(line) + "\n")


def kind_of(head, body):
    """Method, path, the names of the body's fields, and who speaks in its messages."""
    try:
        value = json.loads(body)
        names = sorted(value), sorted({m["role"] for m in value.get("messages", [])})
    except ValueError:
        names = len(body)
    return head.split(b"\r\n")[0], str(names)


def requests_of(data):
    """([(head, body)], the rest): the whole requests at the start of a client's bytes."""
    found = []
    while b"\r\n\r\n" in data:
        head, rest = data.split(b"\r\n\r\n", 1)
        length = re.search(rb"(?im)^content-length: *(\d+)", head)
        if re.search(rb"(?im)^transfer-encoding: *chunked", head):
            end = rest.find(b"0\r\n\r\n")
            n = end + 5 if end >= 0 else len(rest) + 1
        else:
            n = int(length.group(1)) if length else 0
        if len(rest) < n:
            break
        found.append((head + b"\r\n\r\n", rest[:n]))
        data = rest[n:]
    return found, data


def pass_on(client, server_at, recorder):
    server = socket.create_connection(server_at)
    unread = b""
    try:
        while True:
            for s in select.select([client, server], [], [])[0]:
                data = s.recv(1 << 16)
                if not data:
                    return
                (server if s is client else client).sendall(data)
                if s is client:
                    found, unread = requests_of(unread + data)
                    for head, body in found:
                        recorder.add(kind_of(head, body), {
                            "head": head.decode("latin-1"), "body": body.decode("latin-1")
                        })
    except OSError:
        pass
    finally:
        client.close()
        server.close()


def at(text):
    host, port = text.rsplit(":", 1)
    return host, int(port)


def serve_http(listen, server, recorder):
    door = socket.create_server(at(listen))
    while True:
        client, _ = door.accept()
        threading.Thread(target=pass_on, args=(client, at(server), recorder), daemon=True).start()


class PassOn(grpc.GenericRpcHandler):
    """Every method as a stream of bytes in both directions, which a call of one message is, too."""
    def __init__(self, server, recorder):
        self.channel, self.recorder = grpc.insecure_channel(server), recorder

    def service(self, call):
        def run(requests, context):
            messages = []

            def record():
                for m in requests:
                    messages.append(base64.b64encode(m).decode())
                    yield m

            for answer in self.channel.stream_stream(call.method)(record()):
                yield answer
            self.recorder.add(call.method, {"method": call.method, "messages": messages})

        return grpc.stream_stream_rpc_method_handler(run)


def main():
    path, http_listen, http_server, grpc_listen, grpc_server = sys.argv[1:]
    recorder = Recorder(path)
    server = grpc.server(futures.ThreadPoolExecutor(16), handlers=[PassOn(grpc_server, recorder)])
    server.add_insecure_port(grpc_listen)
    server.start()
    threading.Thread(target=serve_http, args=(http_listen, http_server, recorder),
                     daemon=True).start()
    signal.sigwait([signal.SIGINT, signal.SIGTERM])


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
    main()
