"""common/rpc as other implementations see it: python3-grpcio against rpc_interop_server, and the C
client against python.

TD_RPC_SERVER = the built program, TD_PYTHON = folder of the generated stubs (ctest sets both).
Certificates are made here by openssl.
"""
import concurrent.futures
import os
import queue
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time

import pytest

grpc = pytest.importorskip("grpc")
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PROGRAM = os.environ["TD_RPC_SERVER"]
sys.path.insert(0, os.environ["TD_PYTHON"])
from tandem.v1 import inference_pb2  # noqa: E402

WAIT_S = 20


class Server:
    def __init__(self, *args):
        self.process = subprocess.Popen([PROGRAM, "serve", *args], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)
        line = self.process.stdout.readline().split()
        assert line and line[0] == "port", line
        self.port = int(line[1])
        self.lines = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.put(line.strip())

    def tell(self, command):
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def stop(self):
        if self.process.poll() is None:
            self.process.stdin.close()
        assert self.process.wait(WAIT_S) == 0  # a sanitizer's finding is a non-zero status

    @property
    def target(self):
        return f"127.0.0.1:{self.port}"


@pytest.fixture
def server():
    s = Server("127.0.0.1:0")
    yield s
    s.stop()


@pytest.fixture
def channel(server):
    with grpc.insecure_channel(server.target) as c:
        yield c


def generate(channel):
    return channel.unary_stream("/tandem.v1.Inference/Generate",
                                request_serializer=inference_pb2.GenerateRequest.SerializeToString,
                                response_deserializer=inference_pb2.GenerateResponse.FromString)


def tokenize(channel):
    return channel.unary_unary("/tandem.v1.Inference/Tokenize",
                               request_serializer=inference_pb2.TokenizeRequest.SerializeToString,
                               response_deserializer=inference_pb2.TokenizeResponse.FromString)


def proto_classes(tmp_path, *files):
    """Classes of our grpc/* protos, without a generated grpc package that would hide the real
    one."""
    out = tmp_path / "set.desc"
    subprocess.run([
        "protoc", "-I", f"{ROOT}/proto", "--include_imports", f"--descriptor_set_out={out}", *files
    ], check=True)
    fds = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())
    return pool_classes(fds.file)


def pool_classes(files):
    pool = descriptor_pool.DescriptorPool()
    left = list(files)
    while left:
        ready = [f for f in left if not any(d in {x.name for x in left} for d in f.dependency)]
        assert ready
        for f in ready:
            pool.Add(f)
            left.remove(f)
    factory = message_factory.MessageFactory(pool)
    return lambda name: factory.GetPrototype(pool.FindMessageTypeByName(name))


def test_stream_and_text(channel):
    prompt = "NUL \0 inside, é, 😀"
    call = generate(channel)(inference_pb2.GenerateRequest(prompt=prompt),
                             metadata=[("x-key", "k1")], timeout=WAIT_S)
    chunks = list(call)
    assert "".join(c.text for c in chunks) == prompt
    assert chunks[-1].finish_reason == inference_pb2.FINISH_STOP and chunks[-1].request_id == "k1"
    assert ("tandem-ledger", "ttft_us=1") in [(m.key, m.value) for m in call.trailing_metadata()]
    assert list(
        tokenize(channel)(inference_pb2.TokenizeRequest(prompt="ab\0"),
                          timeout=WAIT_S).ids) == [97, 98, 0]


def test_invalid(channel):
    raw = channel.unary_unary("/tandem.v1.Inference/Tokenize", request_serializer=bytes,
                              response_deserializer=bytes)
    for body in [b"\xff\xff\xff", b"\x0a\x05ab",
                 b"\x0a\x02\xc3\x28"]:  # not protobuf; cut short; model is not UTF-8
        with pytest.raises(grpc.RpcError) as e:
            raw(body, timeout=WAIT_S)
        assert e.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert e.value.details() == "tandem.v1.TokenizeRequest: field model is not valid UTF-8"
    with pytest.raises(grpc.RpcError) as e:
        raw(b"\x12\x80\x80\x40" + b"x" * (1 << 20), timeout=WAIT_S)
    assert e.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    raw_stream = channel.unary_stream("/tandem.v1.Inference/Generate", request_serializer=bytes,
                                      response_deserializer=bytes)
    with pytest.raises(grpc.RpcError) as e:
        list(raw_stream(b"\x12\x02\xc3\x28",
                        timeout=WAIT_S))  # an as-bytes field is its reader's to check
    assert e.value.code() == grpc.StatusCode.INVALID_ARGUMENT and e.value.details(
    ) == "prompt: must be UTF-8 text"


def test_unknown_method(channel):
    for path in ["/tandem.v1.Inference/Nope", "/no.Such/Service", "/x"]:
        with pytest.raises(grpc.RpcError) as e:
            channel.unary_unary(path, request_serializer=bytes, response_deserializer=bytes)(
                b"", timeout=WAIT_S)
        assert e.value.code() == grpc.StatusCode.UNIMPLEMENTED
        assert e.value.details() == f"unknown method {path}"


def test_gzip_is_refused(channel):
    with pytest.raises(grpc.RpcError) as e:
        tokenize(channel)(inference_pb2.TokenizeRequest(prompt="a" * 1000),
                          compression=grpc.Compression.Gzip, timeout=WAIT_S)
    assert e.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_cancel_and_deadline(server, channel):
    call = generate(channel)(inference_pb2.GenerateRequest(prompt="hang"), timeout=WAIT_S)
    assert next(call).text == "h"
    call.cancel()
    assert server.lines.get(timeout=WAIT_S) == "cancelled"
    with pytest.raises(grpc.RpcError) as e:
        list(generate(channel)(inference_pb2.GenerateRequest(prompt="hang"), timeout=0.2))
    assert e.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert server.lines.get(timeout=WAIT_S) == "cancelled"


def test_metadata_over_limit(channel):
    with pytest.raises(grpc.RpcError) as e:
        tokenize(channel)(inference_pb2.TokenizeRequest(prompt="a"),
                          metadata=[("x-key", "v" * 40000)], timeout=WAIT_S)
    assert e.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_many_at_once(channel):
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        texts = [f"request {i} " * (i % 7 + 1) for i in range(200)]
        got = pool.map(
            lambda t: "".join(c.text for c in generate(channel)
                              (inference_pb2.GenerateRequest(prompt=t), timeout=WAIT_S)), texts)
        assert list(got) == texts


def test_health(server, channel, tmp_path):
    classes = proto_classes(tmp_path, "grpc/health/v1/health.proto")
    request, response = classes("grpc.health.v1.HealthCheckRequest"), classes(
        "grpc.health.v1.HealthCheckResponse")
    check = channel.unary_unary("/grpc.health.v1.Health/Check",
                                request_serializer=request.SerializeToString,
                                response_deserializer=response.FromString)
    watch = channel.unary_stream("/grpc.health.v1.Health/Watch",
                                 request_serializer=request.SerializeToString,
                                 response_deserializer=response.FromString)
    for name in ["", "tandem.v1.Inference"]:
        assert check(request(service=name), timeout=WAIT_S).status == response.NOT_SERVING
    with pytest.raises(grpc.RpcError) as e:
        check(request(service="no.Such"), timeout=WAIT_S)
    assert e.value.code() == grpc.StatusCode.NOT_FOUND
    updates = watch(request(service="tandem.v1.Inference"), timeout=WAIT_S)
    unknown = watch(request(service="no.Such"), timeout=WAIT_S)
    assert next(updates).status == response.NOT_SERVING
    assert next(unknown).status == response.SERVICE_UNKNOWN
    server.tell("serving")
    assert next(updates).status == response.SERVING
    assert check(request(), timeout=WAIT_S).status == response.SERVING
    server.tell("not_serving")
    assert next(updates).status == response.NOT_SERVING
    server.tell("serving")
    assert next(updates).status == response.SERVING
    server.stop()
    assert next(updates).status == response.NOT_SERVING
    with pytest.raises(grpc.RpcError) as e:
        next(updates)
    assert e.value.code() == grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection(channel, tmp_path, version):
    package = f"grpc.reflection.{version}"
    classes = proto_classes(tmp_path, f"grpc/reflection/{version}/reflection.proto")
    request, response = classes(f"{package}.ServerReflectionRequest"), classes(
        f"{package}.ServerReflectionResponse")
    info = channel.stream_stream(f"/{package}.ServerReflection/ServerReflectionInfo",
                                 request_serializer=request.SerializeToString,
                                 response_deserializer=response.FromString)

    def ask(**kwargs):
        return list(info(iter([request(host="h", **kwargs)]), timeout=WAIT_S))[0]

    services = [s.name for s in ask(list_services="*").list_services_response.service]
    assert services == [
        "tandem.v1.Inference", "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection"
    ]
    assert ask(file_containing_symbol="no.Such").error_response.error_code == 5
    assert ask(file_by_filename="no.proto").error_response.error_code == 5
    assert ask(file_containing_extension=dict(containing_type="x",
                                              extension_number=1)).error_response.error_code == 5
    assert ask(all_extension_numbers_of_type="tandem.v1.Usage"
               ).all_extension_numbers_response.base_type_name == "tandem.v1.Usage"
    assert ask().error_response.error_code == 12
    answer = ask(file_containing_symbol="tandem.v1.Registry")
    assert answer.valid_host == "h"
    assert answer.original_request.file_containing_symbol == "tandem.v1.Registry"
    assert len(answer.file_descriptor_response.file_descriptor_proto
               ) == 2  # worker.proto and what it imports

    # a call from nothing but reflection; on one stream, several questions; members and enum values
    # are symbols too
    names = [
        "tandem.v1.Inference.Tokenize", "tandem.v1.GenerateRequest.prompt", "tandem.v1.FINISH_STOP",
        "tandem.v1.FinishReason"
    ]
    answers = list(info(iter([request(file_containing_symbol=n) for n in names]), timeout=WAIT_S))
    files = {bytes(b) for a in answers for b in a.file_descriptor_response.file_descriptor_proto}
    assert len(files) == 1
    protos = [descriptor_pb2.FileDescriptorProto.FromString(f) for f in files]
    method = next(m for s in protos[0].service for m in s.method if m.name == "Tokenize")
    learned = pool_classes(protos)
    ask_type, answer_type = learned(method.input_type[1:]), learned(method.output_type[1:])
    call = channel.unary_unary("/tandem.v1.Inference/Tokenize",
                               request_serializer=ask_type.SerializeToString,
                               response_deserializer=answer_type.FromString)
    assert list(call(ask_type(prompt="hé"), timeout=WAIT_S).ids) == [104, 195, 169]


def test_garbage_on_the_port(server, channel):
    for noise in [
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 100,
            os.urandom(1000), b"\x16\x03\x01" * 40
    ]:
        with socket.create_connection(("127.0.0.1", server.port), WAIT_S) as s:
            s.sendall(noise)
            try:
                while s.recv(4096):
                    pass
            except ConnectionResetError:
                pass
    silent = [socket.create_connection(("127.0.0.1", server.port), WAIT_S) for _ in range(50)]
    assert list(tokenize(channel)(inference_pb2.TokenizeRequest(prompt="a"),
                                  timeout=WAIT_S).ids) == [97]
    for s in silent:
        s.close()


# ---- TLS
# -------------------------------------------------------------------------------------------------


def openssl(*args):
    subprocess.run(["openssl", *args], check=True, stdout=subprocess.DEVNULL,
                   stderr=subprocess.DEVNULL)


class Authority:
    def __init__(self, folder, name):
        self.folder, self.name = folder, name
        self.cert, self.key = folder / f"{name}.pem", folder / f"{name}.key"
        openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                "-days", "2", "-subj", f"/CN={name}", "-keyout", self.key, "-out", self.cert)

    def sign(self, name, cert=None, key=None, alt="IP:127.0.0.1,DNS:tandem.test", usage=None):
        cert, key = cert or self.folder / f"{name}.pem", key or self.folder / f"{name}.key"
        csr, ext = self.folder / f"{name}.csr", self.folder / "ext"
        ext.write_text("basicConstraints=CA:FALSE\n" + (f"subjectAltName={alt}\n" if alt else "") +
                       (f"extendedKeyUsage={usage}\n" if usage else ""))
        openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj",
                f"/CN={name}", "-keyout", f"{key}.new", "-out", csr)
        openssl("x509", "-req", "-in", csr, "-CA", self.cert, "-CAkey", self.key, "-CAcreateserial",
                "-days", "2", "-extfile", ext, "-out", f"{cert}.new")
        os.replace(f"{key}.new", key)
        os.replace(f"{cert}.new", cert)
        return str(cert), str(key)


def tls_call(server, ca, pair=(None, None), timeout=WAIT_S, name=None):
    read = lambda p: open(p, "rb").read() if p else None  # noqa: E731
    creds = grpc.ssl_channel_credentials(read(ca), read(pair[1]), read(pair[0]))
    options = [("grpc.use_local_subchannel_pool", 1)]
    if name:
        options.append(("grpc.ssl_target_name_override", name))
    with grpc.secure_channel(server.target, creds, options) as c:
        return list(tokenize(c)(inference_pb2.TokenizeRequest(prompt="t"), timeout=timeout).ids)


def refused(*args, **kwargs):
    with pytest.raises(grpc.RpcError) as e:
        tls_call(*args, **kwargs)
    return e.value.code() == grpc.StatusCode.UNAVAILABLE


def c_call(server, *tls):
    out = subprocess.run([PROGRAM, "call", server.target, "abc", *map(str, tls)],
                         stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    return int(out.stdout.split()[0]), int(out.stdout.split()[1])


def test_mutual_tls(tmp_path):
    ca, other = Authority(tmp_path, "ca"), Authority(tmp_path, "other")
    own, client, stranger = ca.sign("server"), ca.sign("client"), other.sign("stranger")
    s = Server("127.0.0.1:0", *own, str(ca.cert))
    assert tls_call(s, ca.cert, client) == [116]
    assert refused(s, ca.cert)  # no certificate
    assert refused(s, ca.cert, stranger)  # not signed by our CA
    assert refused(s, other.cert, client)  # the client does not trust the server
    assert refused(s, ca.cert, client, name="other.test")  # the name is not in the certificate
    assert tls_call(s, ca.cert, client, name="tandem.test") == [116]
    with grpc.insecure_channel(s.target) as c, pytest.raises(grpc.RpcError):
        tokenize(c)(inference_pb2.TokenizeRequest(prompt="t"), timeout=WAIT_S)
    # the C client
    assert c_call(s, ca.cert, *client) == (0, 3)
    assert c_call(s, ca.cert, *client, "tandem.test") == (0, 3)
    assert c_call(s, ca.cert, *client, "other.test")[0] == 14
    assert c_call(s, ca.cert)[0] == 14
    assert c_call(s, ca.cert, *stranger)[0] == 14
    assert c_call(s, other.cert, *client)[0] == 14
    s.stop()


def peer_names(target, creds):
    """What the server took its peer to be."""
    with (grpc.secure_channel(target, creds) if creds else grpc.insecure_channel(target)) as c:
        call = generate(c)(inference_pb2.GenerateRequest(prompt="x"), timeout=WAIT_S)
        assert "".join(m.text for m in call) == "x"
        return dict(call.trailing_metadata())["peer-names"]


def test_names_of_the_peer(tmp_path):
    ca = Authority(tmp_path, "ca")
    own = ca.sign("server")

    def creds(pair):
        return grpc.ssl_channel_credentials(
            ca.cert.read_bytes(),
            *(pair and [open(pair[1], "rb").read(),
                        open(pair[0], "rb").read()] or []))

    s = Server("127.0.0.1:0", *own, str(ca.cert))
    many = ca.sign("many", alt="DNS:a.test,URI:spiffe://td/w,DNS:b.test,IP:10.0.0.7,email:x@y.test")
    assert peer_names(
        s.target,
        creds(many)) == "dns=a.test,dns=b.test,uri=spiffe://td/w,ip=10.0.0.7,email=x@y.test,cn=many"
    assert peer_names(s.target, creds(ca.sign("bare", alt=None))) == "cn=bare"
    # extendedKeyUsage is OpenSSL's to enforce: a server's certificate is no client's
    assert peer_names(s.target, creds(ca.sign(
        "caller", usage="clientAuth"))) == "dns=tandem.test,ip=127.0.0.1,cn=caller"
    assert peer_names(s.target, creds(ca.sign(
        "both", usage="clientAuth,serverAuth"))) == "dns=tandem.test,ip=127.0.0.1,cn=both"
    only_server, only_client = ca.sign("only_server", usage="serverAuth"), ca.sign(
        "only_client", usage="clientAuth")
    assert refused(s, ca.cert, only_server)
    s.stop()
    s = Server("127.0.0.1:0",
               *own)  # asks for no certificate: nobody is verified, whatever they hold
    assert peer_names(s.target, creds(many)) == "none"
    s.stop()
    s = Server("127.0.0.1:0")
    assert peer_names(s.target, None) == "none"
    s.stop()
    s = Server("127.0.0.1:0", *only_client)  # ... and a client's certificate is no server's
    assert refused(s, ca.cert)
    assert c_call(s, ca.cert)[0] == 14
    s.stop()


def test_server_tls_only(tmp_path):
    ca = Authority(tmp_path, "ca")
    s = Server("127.0.0.1:0", *ca.sign("server"))
    assert tls_call(s, ca.cert) == [116]
    assert c_call(s, ca.cert) == (0, 3)
    s.stop()


def test_certificates_rotate(tmp_path):
    first, second = Authority(tmp_path, "first"), Authority(tmp_path, "second")
    cert, key = first.sign("server")
    trusted = tmp_path / "trusted.pem"  # the server's client CA, rotated as well
    trusted.write_bytes(first.cert.read_bytes())
    old_client, new_client = first.sign("old"), second.sign("new")
    s = Server("127.0.0.1:0", cert, key, str(trusted))
    assert tls_call(s, first.cert, old_client) == [116]
    kept = open(cert, "rb").read()
    with open(cert, "w") as f:
        f.write("no certificate at all")  # the old one stays in use
    assert tls_call(s, first.cert, old_client) == [116]
    with open(cert, "wb") as f:
        f.write(kept)
    second.sign("server", cert=tmp_path / "server.pem", key=tmp_path / "server.key")
    trusted.write_bytes(second.cert.read_bytes())
    assert tls_call(s, second.cert, new_client) == [116]
    assert refused(s, first.cert, new_client)
    assert refused(s, second.cert, old_client)
    s.stop()


def test_client_certificates_rotate(tmp_path):
    first, second = Authority(tmp_path, "first"), Authority(tmp_path, "second")
    trusted = tmp_path / "trusted.pem"  # the client's
    trusted.write_bytes(first.cert.read_bytes())
    cert, key = first.sign("client")
    s = Server("127.0.0.1:0", *first.sign("server"), str(first.cert))
    port = s.port
    c = subprocess.Popen(
        [PROGRAM, "call", s.target, "-", str(trusted), cert, key], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True)

    def ask():
        c.stdin.write("abc\n")
        c.stdin.flush()
        return int(c.stdout.readline().split()[0])

    assert ask() == 0
    s.stop()
    s = Server(f"127.0.0.1:{port}", *second.sign("server2"), str(second.cert))
    assert ask() == 14  # neither trusts the other
    second.sign("client", cert=cert, key=key)
    trusted.write_bytes(second.cert.read_bytes())
    until = time.monotonic() + WAIT_S
    while ask() != 0:
        assert time.monotonic() < until
        time.sleep(0.05)  # paces the questions; the answer decides
    c.stdin.close()
    assert c.wait(WAIT_S) == 0
    s.stop()


def test_bad_files_are_named(tmp_path):
    ca = Authority(tmp_path, "ca")
    cert, key = ca.sign("server")
    _, foreign_key = ca.sign("another")
    for args, word in [((str(tmp_path / "absent.pem"), key), "absent.pem"),
                       ((cert, str(tmp_path / "ext")), "not a PEM file"),
                       ((cert, foreign_key), "does not fit its key")]:
        p = subprocess.run([PROGRAM, "serve", "127.0.0.1:0", *args], stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE, text=True, timeout=60, stdin=subprocess.DEVNULL)
        assert p.returncode == 1 and word in p.stderr, p.stderr


# ---- a server that goes away, frame by frame
# -------------------------------------------------------------------------------------------------


class Wire:
    """A client's end of HTTP/2 that does what it is told, and keeps what comes."""
    DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
    END_STREAM, ACK, END_HEADERS = 1, 1, 4

    def __init__(self, port, tls=None):
        self.until = time.monotonic() + WAIT_S
        self.socket = socket.create_connection(("127.0.0.1", port), WAIT_S)
        if tls:
            self.socket = tls.wrap_socket(self.socket, server_hostname="tandem.test")
        self.scheme = b"\x87" if tls else b"\x86"
        self.bytes, self.pings, self.acks_pings = b"", [], True
        self.is_reset = False
        self.frames = {}  # by stream: (type, flags)
        self.last_ids = []  # of each GOAWAY
        self.socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + self.frame(self.SETTINGS, 0, 0))

    @staticmethod
    def frame(kind, flags, stream, payload=b""):
        return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags,
                                                                 stream) + payload

    def call(self, stream, method, message):
        """The frames of a whole call; no header is put into HPACK's table."""
        path = b"/tandem.v1.Inference/" + method
        head = b"\x83" + self.scheme + b"\x04" + bytes([len(path)]) + path
        for key, value in ((b":authority", b"tandem.test"), (b"content-type", b"application/grpc"),
                           (b"te", b"trailers")):
            head += b"\0" + bytes([len(key)]) + key + bytes([len(value)]) + value
        body = b"\0" + struct.pack(">I", len(message)) + message
        return self.frame(self.HEADERS, self.END_HEADERS, stream, head) + self.frame(
            self.DATA, self.END_STREAM, stream, body)

    def ack_pings(self):
        self.acks_pings = True
        for payload in self.pings:
            self.socket.sendall(self.frame(self.PING, self.ACK, 0, payload))
        self.pings = []

    def read(self):
        """One frame; False at the end."""
        while len(self.bytes) < 9 or len(self.bytes) < 9 + int.from_bytes(self.bytes[:3], "big"):
            self.socket.settimeout(max(self.until - time.monotonic(), 0.001))
            try:
                got = self.socket.recv(65536)
            except ConnectionResetError:  # it closed before it had read our last frame
                got, self.is_reset = b"", True
            if not got:
                return False
            self.bytes += got
        n = int.from_bytes(self.bytes[:3], "big")
        kind, flags, stream = struct.unpack(">BBI", self.bytes[3:9])
        payload, self.bytes = self.bytes[9:9 + n], self.bytes[9 + n:]
        self.frames.setdefault(stream, []).append((kind, flags))
        if kind == self.SETTINGS and not flags & self.ACK:
            self.socket.sendall(self.frame(self.SETTINGS, self.ACK, 0))
        elif kind == self.PING and not flags & self.ACK:
            self.pings.append(payload)
            if self.acks_pings:
                self.ack_pings()
        elif kind == self.GOAWAY:
            self.last_ids.append(struct.unpack(">I", payload[:4])[0])
        return True

    def is_over(self, stream):
        return any(kind == self.RST_STREAM or kind == self.HEADERS and flags & self.END_STREAM
                   for kind, flags in self.frames.get(stream, []))

    def is_answered(self, stream):
        """It is over, and a message came."""
        return self.is_over(stream) and any(kind == self.DATA for kind, _ in self.frames[stream])


def any_server():
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    tls.set_alpn_protocols(["h2"])
    return tls


@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "tls"])
def test_goaway_ends_no_call(tmp_path, is_tls):
    """Calls that are live, or that core has read and not yet handed on, are answered. Core never
    sees those that come later, up to when the client knows: its last GOAWAY names none of them."""
    tls, pair = None, []
    if is_tls:
        pair, tls = Authority(tmp_path, "ca").sign("server"), any_server()
    s = Server("127.0.0.1:0", *pair)
    w = Wire(s.port, tls)
    text = inference_pb2.TokenizeRequest(prompt="abc").SerializeToString()
    hang = inference_pb2.GenerateRequest(prompt="hang").SerializeToString()
    w.socket.sendall(w.call(1, b"Generate", hang))
    while sum(kind == w.DATA for kind, _ in w.frames.get(1, [])) < 4:
        assert w.read()
    # All in one read of core's; the first holds the loop until the server is told to go.
    early, late = range(5, 65, 2), range(65, 95, 2)
    w.socket.sendall(
        w.call(3, b"Status", b"") + b"".join(w.call(i, b"Tokenize", text) for i in early))
    assert s.lines.get(timeout=WAIT_S) == "held"
    w.acks_pings = False  # so that the server cannot tell its last stream
    s.tell("goaway")
    while not w.last_ids:
        assert w.read()
    w.socket.sendall(b"".join(w.call(i, b"Tokenize", text) for i in late))  # they cross
    w.ack_pings()
    while len(w.last_ids) < 2 or not all(w.is_over(i) for i in early if i <= w.last_ids[1]):
        assert w.read()
    assert w.last_ids[0] == 2**31 - 1 and w.last_ids[1] < late[0]
    w.socket.sendall(w.frame(w.RST_STREAM, 0, 1, struct.pack(">I", 8)))
    assert s.lines.get(timeout=WAIT_S) == "cancelled"
    while w.read():
        pass
    unanswered = [i for i in early if not w.is_answered(i)]
    assert all(i > w.last_ids[1] for i in unanswered)
    assert [w.frames[i] for i in (*unanswered, *late) if i in w.frames] == []
    assert w.frames[1][-1][0] == w.DATA  # nothing but messages before it was taken back
    s.stop()


@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "tls"])
def test_goaway_resets_no_connection(tmp_path, is_tls):
    """A client that still sends when the server closes reads up to the end, and is not reset: a
    reset would destroy what is on its way to it. The server waits for it, but not for long."""
    tls, pair = None, []
    if is_tls:
        pair, tls = Authority(tmp_path, "ca").sign("server"), any_server()
    s = Server("127.0.0.1:0", *pair)
    w = Wire(s.port, tls)
    hang = inference_pb2.GenerateRequest(prompt="hang").SerializeToString()
    w.socket.sendall(w.call(1, b"Generate", hang))
    while not w.frames.get(1):
        assert w.read()
    s.tell("goaway")
    while len(w.last_ids) < 2:
        assert w.read()
    # The last stream ends, and core closes before it has read what comes behind, all sent at once.
    late = b"".join(w.call(i, b"Tokenize", b"") for i in range(3, 2003, 2))
    w.socket.sendall(w.frame(w.RST_STREAM, 0, 1, struct.pack(">I", 8)) + late)
    assert s.lines.get(timeout=WAIT_S) == "cancelled"
    while w.read():
        pass
    assert not w.is_reset
    if is_tls:
        w.socket.close()
    s.stop()


def test_connections_that_linger_are_counted_and_end_soon():
    """A connection that waits for its client's end holds a descriptor: it counts as open. It is
    looked at often, so one after another takes no second each."""
    s = Server("127.0.0.1:0")
    wires = [Wire(s.port) for _ in range(33)]
    hang = inference_pb2.GenerateRequest(prompt="hang").SerializeToString()
    for w in wires:
        w.socket.sendall(w.call(1, b"Generate", hang))
        while not w.frames.get(1):
            assert w.read()
    s.tell("goaway")
    for w in wires:
        while len(w.last_ids) < 2:
            assert w.read()

    def n_open():
        s.tell("connections")
        while not (line := s.lines.get(timeout=WAIT_S)).startswith("connections "):
            assert line == "cancelled"
        return int(line.split()[1])

    begin = time.monotonic()
    for n_left in range(len(wires) - 1, 0, -1):  # the last call keeps the server
        w = wires[n_left]
        w.socket.sendall(w.frame(w.RST_STREAM, 0, 1, struct.pack(">I", 8)))
        while w.read():
            pass
        assert n_open() == n_left + 1 and not w.is_reset
        w.socket.close()
        while n_open() > n_left:
            assert time.monotonic() < begin + WAIT_S
    assert time.monotonic() < begin + 4
    s.stop()


# ---- the C client and a python server
# -------------------------------------------------------------------------------------------------


def test_c_client_python_server():
    def answer(request, context):
        return inference_pb2.TokenizeResponse(ids=list(request.prompt.encode()))

    handler = grpc.method_handlers_generic_handler(
        "tandem.v1.Inference", {
            "Tokenize": grpc.unary_unary_rpc_method_handler(
                answer, inference_pb2.TokenizeRequest.FromString,
                inference_pb2.TokenizeResponse.SerializeToString)
        })
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((handler, ))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    out = subprocess.run([PROGRAM, "call", f"127.0.0.1:{port}", "héé"], stdout=subprocess.PIPE,
                         text=True, timeout=60, check=True)
    assert out.stdout.split()[:2] == ["0", "5"]
    server.stop(0).wait()
