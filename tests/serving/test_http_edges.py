"""Web pages of other origins, and https with a certificate of our own."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest
from serving_tools import MODEL, Served, chat, served

from sgviz.config import HttpConfig, Settings
from sgviz.errors import ConfigError
from sgviz.serving import Keys
from sgviz.serving.server import check_tls

PAGE = "https://page.example"
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")


def preflight(server: Served, origin: str) -> httpx.Response:
    asks = {"origin": origin, "access-control-request-method": "POST",
            "access-control-request-headers": "authorization, content-type"}  # fmt: skip
    return server.http.options("/v1/chat/completions", headers=asks)


def test_by_default_no_page_is_told_that_it_may(server: Served) -> None:
    assert (
        "access-control-allow-origin" not in server.http.get("/v1/models", headers={"origin": PAGE}).headers
    )
    assert "access-control-allow-origin" not in preflight(server, PAGE).headers


def test_a_named_page_may_call_and_read_errors_too() -> None:
    with served(
        http=HttpConfig(cors_origins=f"{PAGE}, http://localhost:8080"), keys=Keys(api_key="k")
    ) as server:
        asked = preflight(server, PAGE)
        assert asked.status_code == 200 and asked.headers["access-control-allow-origin"] == PAGE
        assert preflight(server, "https://other.example").status_code == 400
        refused = server.http.post("/v1/chat/completions", json=chat(), headers={"origin": PAGE})
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == PAGE
        headers = {"origin": PAGE, "authorization": "Bearer k"}
        stream = server.http.post("/v1/chat/completions", json=chat(stream=True), headers=headers)
        assert stream.headers["access-control-allow-origin"] == PAGE and "[DONE]" in stream.text


def test_all_pages() -> None:
    with served(http=HttpConfig(cors_origins="*")) as server:
        assert (
            server.http.get("/ready", headers={"origin": PAGE}).headers["access-control-allow-origin"] == "*"
        )


@pytest.mark.parametrize("origins", ["page.example", "https://page.example/path", "https://"])
def test_what_is_no_origin_is_refused(origins: str) -> None:
    with pytest.raises(ConfigError, match="is no origin"):
        Settings.build(cors_origins=origins)


def certificate(folder: Path, name: str = "server", password: str = "") -> HttpConfig:
    """A self-signed certificate for 127.0.0.1 with its key."""
    key, cert = folder / f"{name}.key", folder / f"{name}.pem"
    lock = ["-passout", f"pass:{password}"] if password else ["-nodes"]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", *lock, "-keyout", key, "-out", cert, "-days", "2",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return HttpConfig(ssl_keyfile=str(key), ssl_certfile=str(cert), ssl_keyfile_password=password or None)


@needs_openssl
def test_https_with_a_locked_key(tmp_path: Path) -> None:
    http = certificate(tmp_path, password="sesame")
    assert Settings.build(ssl_keyfile=http.ssl_keyfile, ssl_certfile=http.ssl_certfile,
                          ssl_keyfile_password="sesame").public()["ssl_keyfile_password"] == "***"  # fmt: skip
    with served(http=http) as server:
        assert server.handle.url.startswith("https://127.0.0.1:")
        trust = ssl.create_default_context(cafile=http.ssl_certfile)
        with httpx.Client(base_url=server.handle.url, verify=trust) as client:
            assert client.post("/v1/chat/completions", json=chat()).json()["model"] == MODEL
            assert "[DONE]" in client.post("/v1/chat/completions", json=chat(stream=True)).text
        with pytest.raises(httpx.TransportError):
            httpx.get(server.handle.url.replace("https", "http"))


@needs_openssl
def test_clients_must_be_vouched_for_where_certificates_for_that_are_given(tmp_path: Path) -> None:
    ours, theirs = certificate(tmp_path), certificate(tmp_path, "client")
    both = HttpConfig(
        ssl_keyfile=ours.ssl_keyfile, ssl_certfile=ours.ssl_certfile, ssl_ca_certs=theirs.ssl_certfile
    )
    with served(http=both) as server:
        trust = ssl.create_default_context(cafile=ours.ssl_certfile)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.handle.url}/ready", verify=trust)
        assert theirs.ssl_certfile and theirs.ssl_keyfile
        trust.load_cert_chain(theirs.ssl_certfile, theirs.ssl_keyfile)
        assert httpx.get(f"{server.handle.url}/ready", verify=trust).status_code == 200


@needs_openssl
def test_keys_that_cannot_be_used_are_found_at_once_and_nobody_is_asked_for_a_password(
    tmp_path: Path,
) -> None:
    locked, other = certificate(tmp_path, password="sesame"), certificate(tmp_path, "other")
    for key, cert in ((locked.ssl_keyfile, locked.ssl_certfile), (other.ssl_keyfile, locked.ssl_certfile),
                      (other.ssl_certfile, other.ssl_certfile)):  # fmt: skip
        words = (
            "is locked; ssl_keyfile_password must open it" if key == locked.ssl_keyfile else "cannot be used"
        )
        with pytest.raises(ConfigError, match=words):
            check_tls(HttpConfig(ssl_keyfile=key, ssl_certfile=cert))
    check_tls(other)


@needs_openssl
def test_a_password_that_does_not_open_the_key_is_named_as_the_fault(tmp_path: Path) -> None:
    locked, other = certificate(tmp_path, password="sesame"), certificate(tmp_path, "other")
    wrong = HttpConfig(
        ssl_keyfile=locked.ssl_keyfile, ssl_certfile=locked.ssl_certfile, ssl_keyfile_password="open"
    )
    with pytest.raises(ConfigError, match="ssl_keyfile_password does not open it") as caught:
        check_tls(wrong)
    assert caught.value.param == "ssl_keyfile_password" and "'open'" not in caught.value.message
    foreign = HttpConfig(
        ssl_keyfile=locked.ssl_keyfile, ssl_certfile=other.ssl_certfile, ssl_keyfile_password="sesame"
    )
    with pytest.raises(ConfigError, match="cannot be used") as caught:
        check_tls(foreign)
    assert caught.value.param == "ssl_certfile"


@needs_openssl
@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01\x02"])
def test_a_client_that_does_not_end_the_handshake_is_left(tmp_path: Path, said: bytes) -> None:
    http = certificate(tmp_path)
    quick = HttpConfig(ssl_keyfile=http.ssl_keyfile, ssl_certfile=http.ssl_certfile, read_timeout=0.3)
    with served(http=quick) as server:
        with socket.create_connection((server.handle.host, server.handle.port), timeout=10) as client:
            client.sendall(said)
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""
        trust = ssl.create_default_context(cafile=http.ssl_certfile)
        assert httpx.get(f"{server.handle.url}/ready", verify=trust).status_code == 200


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ssl_keyfile": "/nowhere/key"}, "there is no such file"),
        ({"ssl_keyfile": __file__}, "goes with ssl_certfile"),
        ({"ssl_certfile": __file__}, "goes with ssl_keyfile"),
        ({"ssl_keyfile_password": "x"}, "no use without"),
        ({"ssl_ca_certs": __file__}, "no use without"),
    ],
)
def test_settings_of_tls_that_do_not_go_together(given: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Settings.build(**given)
