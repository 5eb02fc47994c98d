"""`sgviz serve` as those who run it use it: a file of settings, https, the request log, limits; a real process each."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest
from server_process import ServerProcess

pytestmark = pytest.mark.slow

SETTINGS = """
device: mock
max-body-mb: 0.01
request_timeout: 30
log-requests: true
log-requests-format: json
log-requests-level: 1
cors-origins: https://page.example
"""
BODY = {"rid": "one", "text": "hello", "sampling_params": {"max_new_tokens": 3}}


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes the certificate with openssl")
def test_https_from_a_settings_file_with_a_request_log_that_changes(tmp_path: Path) -> None:
    key, cert, config = tmp_path / "key.pem", tmp_path / "cert.pem", tmp_path / "server.yaml"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "2",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    config.write_text(f"{SETTINGS}ssl_keyfile: {key}\nssl_certfile: {cert}\n")
    with ServerProcess("--config", str(config)) as server:
        assert f"sgviz is ready: https://127.0.0.1:{server.port}/v1" in server.text()
        url, trust = f"https://127.0.0.1:{server.port}", ssl.create_default_context(cafile=str(cert))
        with httpx.Client(base_url=url, verify=trust, timeout=30) as client:
            assert client.get("/health").status_code == 200
            assert client.post("/generate", json=BODY).json()["meta_info"]["id"] == "one"
            assert client.post("/generate", json={**BODY, "text": "x" * 20_000}).status_code == 413
            told = client.post("/configure_logging", json={"log_requests_level": 3}).json()
            assert told["log_requests_level"] == 3
            client.post("/generate", json={**BODY, "rid": "two"})
            client.post("/configure_logging", json={"log_requests": False})
            client.post("/generate", json={**BODY, "rid": "three"})
            info = client.get("/server_info", headers={"origin": "https://page.example"})
            assert info.headers["access-control-allow-origin"] == "https://page.example"
            assert info.json()["ssl_keyfile"] == str(key) and info.json()["max_body_mb"] == 0.01
        lines = [
            json.loads(line[line.index("{") :]) for line in server.text().splitlines() if '"event"' in line
        ]
        seen = [(line["event"], line["rid"], "text" in line) for line in lines if "WARMUP" not in line["rid"]]
        assert seen == [
            ("request.received", "one", False), ("request.finished", "one", False),
            ("request.received", "two", True), ("request.finished", "two", True),
        ]  # fmt: skip


def test_a_settings_file_with_a_fault_starts_nothing(tmp_path: Path) -> None:
    config = tmp_path / "server.yaml"
    config.write_text("device: mock\nmax-runing-requests: 3\n")
    with ServerProcess("--config", str(config), wait=False) as server:
        assert server.wait(30) == 2
        assert f"{config}, line 2" in server.text() and "max_running_requests" in server.text()
        assert "Traceback" not in server.text() and "loading" not in server.text()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes the key with openssl")
def test_a_locked_key_without_its_password_starts_nothing_and_asks_nobody(tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "genrsa", "-aes128", "-passout", "pass:sesame", "-out", key, "2048"],
        check=True, capture_output=True,
    )  # fmt: skip
    with ServerProcess("--ssl-keyfile", str(key), "--ssl-certfile", str(key), wait=False) as server:
        assert server.wait(30) != 0
        assert "is locked" in server.text() and "ssl_keyfile_password" in server.text()
        assert "Traceback" not in server.text() and "PEM pass phrase" not in server.text()
