"""The page of the HTTP port, as bytes: one file, its policy, and the option that turns it off. What
it does in a browser is tests/clients/test_page.py's."""
import http.client
import os
import re

from harness import ROOT, Cluster

SOURCES = os.path.join(ROOT, "router", "http", "page")


def get(port, path="/", method="GET"):
    c = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    c.request(method, path)
    r = c.getresponse()
    body = r.read().decode()
    c.close()
    return r.status, dict((k.lower(), v) for k, v in r.getheaders()), body


def http_port(c):
    return int(c.router.wait_log(r"ev=http_ready .*port=(\d+)").group(1))


def source(name):
    with open(os.path.join(SOURCES, name), encoding="utf-8") as f:
        return f.read()


def test_sources_are_safe():
    """Text of models and servers is never read as HTML, and nothing comes from elsewhere."""
    html, js, css = source("page.html"), source("page.js"), source("page.css")
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(",
                 "new Function", "DOMParser", "srcdoc", "javascript:"):
        assert word not in js, word
    assert not re.search(r"\son\w+\s*=", html) and not re.search(r"\sstyle\s*=", html)
    assert "<link rel=\"icon\" href=\"data:,\">" in html
    for text in (html, js, css):
        outside = re.findall(r"(?:https?:)?//[\w.]+\.\w+[^\s'\"]*", text)
        assert set(outside) <= {"http://www.w3.org/2000/svg"}, outside
    assert "url(" not in css and "@import" not in css


def test_page():
    with Cluster(prefill=0, decode=0, router_args=["--http-listen", "127.0.0.1:0"]) as c:
        port, nonces = http_port(c), set()
        for _ in range(2):
            status, headers, body = get(port)
            assert status == 200 and headers["content-type"] == "text/html; charset=utf-8"
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["cache-control"] == "no-store"
            assert headers["referrer-policy"] == "no-referrer"
            policy = dict(
                x.strip().split(" ", 1) for x in headers["content-security-policy"].split(";"))
            nonce = re.fullmatch(r"'nonce-([0-9a-f]{32})'", policy["script-src"])[1]
            assert policy == {
                "default-src": "'none'", "script-src": f"'nonce-{nonce}'",
                "style-src": f"'nonce-{nonce}'", "connect-src": "'self'", "img-src": "data:",
                "base-uri": "'none'", "form-action": "'none'", "frame-ancestors": "'none'"
            }
            nonces.add(nonce)
            whole = source("page.html").replace("@CSS@", source("page.css"))
            assert body == whole.replace("@JS@", source("page.js")).replace("@NONCE@", nonce)
        assert len(nonces) == 2
        status, headers, body = get(port, method="HEAD")
        assert (status, body) == (200, "") and "content-security-policy" in headers
        status, headers, _ = get(port, "/v1/models")
        assert status == 200 and "content-security-policy" not in headers
        assert get(port, method="POST")[0] == 405


def test_page_is_turned_off():
    with Cluster(prefill=0, decode=0, router_args=["--http-listen", "127.0.0.1:0", "--page",
                                                   "off"]) as c:
        status, _, body = get(http_port(c))
        assert status == 404 and "--page off" in body
        assert get(http_port(c), "/v1/models")[0] == 200
