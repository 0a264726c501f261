"""Bytes below gRPC and protobuf, as no client of ours sends them: for the tests of floods and of
bad input."""
import contextlib
import socket
import struct

import grpc

from harness import SLOW

# ---- HTTP/2 (RFC 9113) -------------------------------------------------------------------------

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, RST_STREAM, SETTINGS, CONTINUATION, END_HEADERS = 1, 3, 4, 9, 4


def frame(kind, flags, stream, payload):
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def call_headers(path):
    """HPACK, no indexing but of the static table: :method POST, :scheme http, :path, :authority
    x, content-type, te."""
    return b"\x83\x86\x04" + bytes([
        len(path)
    ]) + path + b"\x01\x01x" + b"\x0f\x10\x10application/grpc" + b"\x00\x02te\x08trailers"


def dial(port, source=None):
    s = socket.socket()
    s.settimeout(10 * SLOW)
    if source:
        s.bind((source, 0))
    s.connect(("127.0.0.1", port))
    return s


def http2(port, source=None, context=None):
    """A connection that has said hello: PREFACE and empty SETTINGS; over TLS with an
    ssl.SSLContext."""
    s = dial(port, source)
    if context:
        s = context.wrap_socket(s, server_hostname="localhost")
    s.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))
    return s


def is_served(s):
    """The server's SETTINGS frame came: core has the connection. False: it was closed."""
    try:
        return len(s.recv(9)) > 0
    except ConnectionError:
        return False


def is_open(s):
    """Nothing more came of the server, not even an end."""
    s.setblocking(False)
    try:
        while s.recv(1 << 16):
            pass
        return False
    except BlockingIOError:
        return True
    except ConnectionError:
        return False
    finally:
        s.setblocking(True)


# ---- protobuf ----------------------------------------------------------------------------------


def varint(n):
    out = b""
    while n > 127:
        out += bytes([n & 127 | 128])
        n >>= 7
    return out + bytes([n])


def field(number, data):
    """One length-delimited field, whatever its bytes."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def call(channel, path, data, timeout=None, metadata=None, **kw):
    """Sends one message of raw bytes; returns (code, details, list of raw messages)."""
    c = channel.unary_stream(path, request_serializer=None, response_deserializer=None)(
        data, timeout=timeout or 20 * SLOW, metadata=metadata, **kw)
    out = []
    with contextlib.suppress(grpc.RpcError):
        out.extend(c)
    return c.code(), c.details() or "", out
