"""What a node that only runs schedulers answers over HTTP."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from sgviz.config import Settings
from sgviz.errors import StartupError
from sgviz.launch.node_stub import HealthStub

GIVEN = {"nnodes": 2, "dp_size": 2, "node_rank": 1, "dist_init_addr": "10.0.0.1:5000", "port": 0}


@pytest.fixture
def stub() -> Iterator[HealthStub]:
    stub = HealthStub(Settings.build(**GIVEN))
    yield stub
    stub.close()


@pytest.mark.parametrize("path", ["/health", "/health_generate", "/health?x=1"])
def test_health_says_whether_it_is_ready(stub: HealthStub, path: str) -> None:
    answer = httpx.get(f"{stub.url}{path}")
    assert answer.status_code == 503
    assert "node 1 of 2 is not ready: its schedulers are starting" in answer.json()["error"]["message"]
    stub.why_not = None
    answer = httpx.get(f"{stub.url}{path}")
    assert (answer.status_code, answer.json()["status"]) == (200, "ready")


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
def test_anything_else_says_who_serves(stub: HealthStub, method: str) -> None:
    stub.why_not = None
    answer = httpx.request(method, f"{stub.url}/v1/chat/completions", content=b"x" * 1000)
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["code"] == 404 and "10.0.0.1:5000" in error["message"] and "/health" in error["message"]


def test_many_at_once_and_a_client_that_says_nothing(stub: HealthStub) -> None:
    host, port = stub.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))):
        assert [httpx.get(f"{stub.url}/health").status_code for _ in range(5)] == [503] * 5


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes the certificate with openssl")
def test_https_where_the_engine_has_it(tmp_path: Path) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "2",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    given = {**GIVEN, "ssl_keyfile": str(key), "ssl_certfile": str(cert)}
    stub = HealthStub(Settings.build(**given))
    trust = ssl.create_default_context(cafile=str(cert))
    assert stub.url.startswith("https://")
    assert httpx.get(f"{stub.url}/health", verify=trust).status_code == 503
    stub.close()
    stub = HealthStub(Settings.build(**given, ssl_ca_certs=str(cert)))
    with pytest.raises(httpx.TransportError):  # a client that nobody vouches for
        httpx.get(f"{stub.url}/health", verify=trust)
    trust.load_cert_chain(cert, key)
    assert httpx.get(f"{stub.url}/health", verify=trust).status_code == 503
    stub.close()


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        port = other.getsockname()[1]
        with pytest.raises(StartupError, match=f"127.0.0.1:{port}"):
            HealthStub(Settings.build(**{**GIVEN, "port": port}))
