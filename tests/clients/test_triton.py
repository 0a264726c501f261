"""tritonclient, unchanged, from PyPI: streamed and whole inference over gRPC, sync and async, and
over HTTP, give what gRPC of tandem.v1 gives."""
import json

import pytest

from installed import HERE, Cluster, Up, installed, run
from test_tenants import ACME, bearer, hashed
from test_tenants import write as write_tenants

TALE = "Once upon a time"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return installed(tmp_path_factory, "tritonclient[grpc,http]")


def test_tritonclient(home):
    with Up() as up:
        got = json.loads(run(home, "python", f"{HERE}/triton_client.py", up.at, up.http_at))
        first, want = up.text(TALE, 1), up.text(TALE, 16)
        for door in ("grpc", "http"):
            assert got[door]["live"] and got[door]["ready"] and got[door]["model_ready"]
            assert not got[door]["other_ready"]
            assert got[door]["server"] == "tandem" and got[door]["model"] == "pocket"
            assert got[door]["infer"] == TALE + want and got[door]["tokens"] == 16
            assert got[door]["excluded"] == want
        for stream in ("stream", "aio_stream"):
            pieces = got["grpc"][stream]
            assert sorted(pieces) == ["0", "1", "2"]
            for one in pieces.values():
                assert "".join(text for text, _ in one) == want
                # The first token goes at once; a reader that is behind gets several in a piece.
                assert one[0][0] == first and len(one) > 1
                assert [last for _, last in one] == [False] * (len(one) - 1) + [True]
        assert "temperature" in got["grpc"]["stream_error"]
        assert got["grpc"]["error"] == ["StatusCode.NOT_FOUND", True]
        assert got["http"]["binary"] == ["400", True]
        up.wait_idle()


def test_a_stranger_is_told_before_its_requests(home, tmp_path):
    """A stream without a key ends when it opens, and the client says with which status."""
    path = tmp_path / "tenants.json"
    write_tenants(path, {"name": "acme", "keys": [hashed(ACME)]})
    with Cluster(router_args=["--tenants", path]) as c:
        want = c.generate(prompt=TALE, max_tokens=16, temperature=0, metadata=bearer(ACME)).text
        got = json.loads(run(home, "python", f"{HERE}/triton_client.py", f"127.0.0.1:{c.port}", "",
                             ACME))
    assert got["stranger"] == got["aio_stranger"] == "StatusCode.UNAUTHENTICATED"
    assert "".join(text for text, _ in got["pieces"]) == want
