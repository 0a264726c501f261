"""TLS on the HTTP port: its certificate and what clients must show, renewed while it runs; and what
a browser's page may read."""
import hashlib
import http.client
import json
import socket
import ssl
import subprocess
import time

import grpc
import pytest

from harness import PATIENT, SLOW, Cluster
from test_http import Http

BODY = json.dumps({"prompt": "a", "max_tokens": 1, "temperature": 0})
KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


class Authority:
    def __init__(self, folder, name):
        self.folder, self.name = folder, name
        self.run("req", "-x509", *KEY, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-days",
                 "30", "-subj", f"/CN={name}", "-addext", "basicConstraints=critical,CA:TRUE",
                 "-addext", "keyUsage=keyCertSign")

    def run(self, *args):
        subprocess.run(["openssl", *args], check=True, capture_output=True, cwd=self.folder)

    def sign(self, name, alt="DNS:localhost,IP:127.0.0.1", usage="serverAuth", days="30"):
        """Writes name.pem and name.key, each by a rename, as a renewal does."""
        ext = self.folder / "ext"
        ext.write_text(f"basicConstraints=CA:FALSE\nsubjectAltName={alt}\n"
                       f"extendedKeyUsage={usage}\n")
        self.run("req", *KEY, "-keyout", "new.key", "-out", "new.csr", "-subj", f"/CN={name}")
        self.run("x509", "-req", "-in", "new.csr", "-CA", f"{self.name}.pem", "-CAkey",
                 f"{self.name}.key", "-CAcreateserial", "-days", days, "-extfile", "ext", "-out",
                 "new.pem")
        for ending in ("pem", "key"):
            (self.folder / f"new.{ending}").rename(self.folder / f"{name}.{ending}")
        return self.folder / f"{name}.pem", self.folder / f"{name}.key"


def context(ca=None, mine=None):
    c = ssl.create_default_context(cafile=ca) if ca else ssl._create_unverified_context()
    if mine:
        c.load_cert_chain(*mine)
    return c


def ask(port, tls, path="/version", body=None, headers=()):
    """(status, body) and the server's certificate."""
    c = http.client.HTTPSConnection("localhost", port, timeout=30 * SLOW, context=tls)
    try:
        c.connect()
        certificate = c.sock.getpeercert(True)
        c.request("POST" if body else "GET", path, body, dict(headers))
        r = c.getresponse()
        return r.status, r.read(), certificate
    finally:
        c.close()


def serving(folder, *more):
    ca = Authority(folder, "ca")
    cert, key = ca.sign("server", usage="serverAuth,clientAuth")
    # Workers need a member's certificate to join, which is not what is tested here.
    return ca, Cluster(
        prefill=0, decode=0, router_args=[
            "--http-listen", "127.0.0.1:0", "--tls-cert", cert, "--tls-key", key, *more
        ], tls=grpc.ssl_channel_credentials((folder / "ca.pem").read_bytes()),
        **PATIENT)


def port_of(c):
    return int(c.router.wait_log(r"ev=http_ready .*port=(\d+) tls=1").group(1))


def test_the_certificate_is_renewed(tmp_path):
    ca, cluster = serving(tmp_path)
    with cluster as c:
        port, tls = port_of(c), context(tmp_path / "ca.pem")
        status, body, first = ask(port, tls)
        assert status == 200 and b"version" in body
        with pytest.raises(ssl.SSLCertVerificationError):
            ask(port, ssl.create_default_context())
        kept = http.client.HTTPSConnection("localhost", port, timeout=30 * SLOW, context=tls)
        kept.request("GET", "/version")
        assert kept.getresponse().read() == body
        ca.sign("server")
        c.router.wait_log(r"ev=http_tls_reloaded")
        status, _, second = ask(port, tls)
        assert status == 200 and second != first
        kept.request("GET", "/version")  # what was begun goes on
        assert kept.getresponse().read() == body and kept.sock.getpeercert(True) == first
        (tmp_path / "server.pem").write_text("none\n")  # told, and the old one stays
        c.router.wait_log(r"ev=http_tls_reload_failed action=keep_old err=.*server.pem")
        assert ask(port, tls)[2] == second
        Authority(tmp_path, "other").sign("half")
        (tmp_path / "half.pem").rename(tmp_path / "server.pem")  # the key is of another
        c.router.wait_log(r"(?s)http_tls_reload_failed.*http_tls_reload_failed .*server.pem")
        assert ask(port, tls)[2] == second
        kept.close()
        with socket.create_connection(("127.0.0.1", port), timeout=30 * SLOW) as s:
            s.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")  # no TLS: no answer
            assert b"200" not in s.recv(1000)


def test_answers_go_through_tls(tmp_path):
    """A body, a stream, and a stream whose reader pauses are what gRPC gives."""
    ca = Authority(tmp_path, "ca")
    cert, key = ca.sign("server", usage="serverAuth,clientAuth")
    args = ["--tls-cert", cert, "--tls-key", key, "--tls-ca", tmp_path / "ca.pem"]
    tls = grpc.ssl_channel_credentials((tmp_path / "ca.pem").read_bytes(), key.read_bytes(),
                                       cert.read_bytes())
    with Cluster(tls=tls, router_args=["--http-listen", "127.0.0.1:0", *args],
                 worker_args=[*args, *PATIENT["worker_args"]],
                 worker_timeout_ms=PATIENT["worker_timeout_ms"]) as c:
        port, mine = port_of(c), context(tmp_path / "ca.pem", (cert, key))
        body = {"prompt": "Once upon a time", "max_tokens": 60, "temperature": 0, "logprobs": 5}
        want = c.generate(prompt=body["prompt"], max_tokens=60, temperature=0).text
        status, text, _ = ask(port, mine, "/v1/completions", json.dumps(body))
        assert status == 200 and json.loads(text)["choices"][0]["text"] == want
        for pause_s in (0, 0.02):
            h = http.client.HTTPSConnection("localhost", port, timeout=60 * SLOW, context=mine)
            h.request("POST", "/v1/completions", json.dumps({**body, "stream": True}))
            r, data = h.getresponse(), b""
            while more := r.read1(700 if pause_s else 65536):
                data += more
                time.sleep(pause_s)
            h.close()
            events = data.decode().split("\n\n")
            assert events[-2:] == ["data: [DONE]", ""]
            assert "".join(
                json.loads(e.removeprefix("data: "))["choices"][0]["text"]
                for e in events[:-2]) == want


def test_clients_show_a_certificate(tmp_path):
    other = Authority(tmp_path, "other")
    strange = other.sign("strange", usage="clientAuth")
    ca, cluster = serving(tmp_path, "--tls-ca", tmp_path / "ca.pem")
    mine = ca.sign("mine", usage="clientAuth")
    server_only = ca.sign("server_only", usage="serverAuth")
    cluster.tls = grpc.ssl_channel_credentials((tmp_path / "ca.pem").read_bytes(),
                                                             mine[1].read_bytes(),
                                                             mine[0].read_bytes())
    with cluster as c:
        port = port_of(c)
        status, body, _ = ask(port, context(tmp_path / "ca.pem", mine))
        assert status == 200 and b"version" in body
        for who, words in ((None, b"showed none"), (strange, b"not one that tls_ca has signed"),
                           (server_only, b"not one that tls_ca has signed")):
            for path in ("/version", "/metrics", "/v1/models", "/v1/completions"):
                got = ask(port, context(tmp_path / "ca.pem", who), path,
                          BODY if path.endswith("completions") else None)
                assert got[0] == 403 and words in got[1], got
                assert json.loads(got[1])["error"]["type"] == "permission_error"
        # Another CA: what it signed is good now, and what the first signed is not.
        (tmp_path / "ca.pem").write_bytes((tmp_path / "other.pem").read_bytes())
        c.router.wait_log(r"ev=http_tls_reloaded")
        anyone = ssl._create_unverified_context()
        anyone.load_cert_chain(*strange)
        assert ask(port, anyone)[0] == 200
        anyone = ssl._create_unverified_context()
        anyone.load_cert_chain(*mine)
        assert ask(port, anyone)[0] == 403


def test_a_certificate_is_a_tenant(tmp_path):
    path = tmp_path / "tenants"
    key = "key-of-bulk-0123456789"
    path.write_text(
        json.dumps({
            "tenants": [{
                "name": "acme", "certificates": ["app.acme.example", "URI:spiffe://acme/app"]
            }, {"name": "bulk", "keys": ["sha256:" + hashlib.sha256(key.encode()).hexdigest()]}]
        }))
    ca, cluster = serving(tmp_path, "--tls-ca", tmp_path / "ca.pem", "--tenants", path)
    acme = ca.sign("acme", "DNS:app.acme.example", "clientAuth")
    uri = ca.sign("uri", "URI:spiffe://acme/app", "clientAuth")
    nobody = ca.sign("nobody", "DNS:app.acme.example.evil", "clientAuth")
    cluster.tls = grpc.ssl_channel_credentials((tmp_path / "ca.pem").read_bytes(),
                                                             acme[1].read_bytes(),
                                                             acme[0].read_bytes())
    with cluster as c:
        port = port_of(c)
        bearer = {"Authorization": "Bearer " + key}
        for who, headers, want in ((acme, {}, 200), (uri, {}, 200), (nobody, {}, 401),
                                   (nobody, bearer, 200), (acme, bearer, 403)):
            tls = context(tmp_path / "ca.pem", who)
            got = ask(port, tls, "/v1/models", None, headers)
            assert got[0] == want, (who, got)
            # before a body is read; who may ask hears what is wrong with it
            got = ask(port, tls, "/v1/completions", "{", headers)
            assert got[0] == (400 if want == 200 else want), (who, got)
        for who, want in ((acme, b"HTTP/1.1 400"), (nobody, b"HTTP/1.1 401")):
            tls = context(tmp_path / "ca.pem", who)
            with socket.create_connection(("localhost", port), timeout=30 * SLOW) as raw:
                with tls.wrap_socket(raw, server_hostname="localhost") as s:
                    s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
                              b"Content-Length: 2000000\r\n\r\n")
                    early = s.recv(12) if who == nobody else b""
                    for _ in range(20):
                        s.sendall(b"{" * 100000)
                    assert (early or s.recv(12)) == want, who


def test_pages_of_listed_origins_may_read(tmp_path):
    mine, other = "https://chat.example", "https://evil.example"
    for option, allowed in ((f"{mine}, http://localhost:3000", {mine, "http://localhost:3000"}),
                            ("*", {mine, other}), ("", set())):
        with Cluster(prefill=0, decode=0,
                     router_args=["--http-listen", "127.0.0.1:0", "--http-cors-origins", option],
                     **PATIENT) as c:
            http_port = Http(c)
            for origin in (mine, other, "http://localhost:3000", mine + ".evil.example", "null"):
                _, headers, _ = http_port.ask("/version", headers={"Origin": origin})
                may = option == "*" or origin in allowed
                assert headers["Access-Control-Allow-Origin"] == (origin if may else None)
                assert headers["Vary"] == ("Origin" if may else None)
                # what a browser asks before a POST of JSON
                h = http.client.HTTPConnection("127.0.0.1", http_port.port, timeout=30 * SLOW)
                h.request(
                    "OPTIONS", "/v1/chat/completions", headers={
                        "Origin": origin, "Access-Control-Request-Method": "POST",
                        "Access-Control-Request-Headers": "authorization,x-stainless-lang"
                    })
                r = h.getresponse()
                r.read()
                h.close()
                assert r.status == (204 if may else 405), (option, origin)
                if may:
                    assert r.headers["Access-Control-Allow-Origin"] == origin
                    assert "POST" in r.headers["Access-Control-Allow-Methods"]
                    assert r.headers["Access-Control-Allow-Headers"] == \
                        "authorization,x-stainless-lang"
            # an error can be read, too
            status, headers, _ = http_port.ask("/v1/completions", b"{", {"Origin": mine})
            assert status == 400
            assert headers["Access-Control-Allow-Origin"] == (mine if mine in allowed else None)
