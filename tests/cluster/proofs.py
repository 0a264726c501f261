"""What common/rpc/identity.c proves, in Python: what a test needs to act as a router or a worker
of a cluster with a secret."""
import hashlib
import hmac
import os
import struct


def mac(secret, label, *fields):
    """common/base/cluster_secret.h: HMAC-SHA256 over label and fields, each preceded by its
    length, and their number."""
    parts = [struct.pack("<I", len(label)), label.encode(), struct.pack("<I", len(fields))]
    for field in fields:
        field = field.encode() if isinstance(
            field, str) else struct.pack("<Q", field) if isinstance(field, int) else field
        parts += [struct.pack("<I", len(field)), field]
    return hmac.new(secret.encode(), b"".join(parts), hashlib.sha256).digest()


def worker(secret, nonces, hello):
    return mac(secret, "tandem join v1 worker", *nonces, hello.role, hello.name, hello.address,
               hello.incarnation)


def router(secret, nonces, welcome):
    return mac(secret, "tandem join v1 router", *nonces, welcome.router_incarnation,
               welcome.prefix_seed)


def instance(secret, nonces, nonce):
    return mac(secret, "tandem instance v1", *nonces, nonce)


def instance_of_key(key, nonce):
    return hmac.new(key, b"tandem instance v1\0" + nonce, hashlib.sha256).digest()


def call(secret, nonces, path, request, attempt, counter):
    """Metadata of a call to Worker."""
    proof = mac(secret, "tandem call v1", *nonces, path, request, attempt, counter)
    return (("tandem-proof",
             f"{nonces[1][:8].hex()} {request:016x} {attempt:08x} {counter:016x} {proof.hex()}"), )


def status(secret, challenge):
    """Metadata of the second call to Status, which tells all."""
    return (("tandem-status-proof",
             f"{challenge.hex()} {mac(secret, 'tandem status v1', challenge).hex()}"), )


def write_secret(path, secret, mode=0o600):
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w") as f:
        f.write(secret + "\n")
    os.chmod(path, mode)
    return str(path)
