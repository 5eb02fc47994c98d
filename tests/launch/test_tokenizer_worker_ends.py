"""How a server of tokenizer workers ends: by a signal, by a death, before it has begun."""

from __future__ import annotations

import shutil
import signal
import ssl
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from server_process import ServerProcess, gone
from worker_tools import LONG, WORKERS, eventually, open_stream, post, slow, state

import sgviz

pytestmark = pytest.mark.slow
MANY = 24  # the kernel chooses a worker for each connection: of 8, all go to one of two in one of 128 runs


def test_a_worker_that_dies_ends_the_server(tmp_path: Path) -> None:
    with ServerProcess(*WORKERS, "--record", str(tmp_path / "run.sgv")) as server:
        children = server.children()
        assert set(children) == {"scheduler", "detokenizer", "http-1", "http-2"}
        slow(server)
        with ThreadPoolExecutor(MANY) as pool:
            jobs = [
                pool.submit(post, server, "/generate", text="x", rid=f"r{number}", sampling_params=LONG)
                for number in range(MANY)
            ]
            eventually(lambda: state(server)["num_running_reqs"] == MANY)
            children["http-1"].kill()
            ends = [job.exception() or job.result().status_code for job in jobs]
        assert server.wait() == 1
        # of the dead one the connections broke, of the other there is an answer
        assert all(end == 503 or isinstance(end, httpx.TransportError) for end in ends)
        assert any(end == 503 for end in ends) and any(end != 503 for end in ends)
        assert "the http-1 died (signal SIGKILL)" in server.text()
        assert gone(list(children.values())) and server.leftovers() == []
    assert sgviz.load(tmp_path / "run.sgv").requests.shape[0] == MANY


def test_a_scheduler_that_dies_is_told_to_clients_of_all_workers() -> None:
    with ServerProcess(*WORKERS) as server:
        children = server.children()
        slow(server)
        with ThreadPoolExecutor(8) as pool:
            jobs = [pool.submit(post, server, "/generate", text="x", sampling_params=LONG) for _ in range(8)]
            eventually(lambda: state(server)["num_running_reqs"] == 8)
            children["scheduler"].kill()
            answers = [job.result() for job in jobs]
        assert {answer.status_code for answer in answers} == {503}
        assert all("scheduler died" in answer.json()["error"]["message"] for answer in answers)
        assert server.wait() == 1
        assert gone(list(children.values())) and server.leftovers() == []


def test_a_stop_lets_the_requests_of_all_workers_finish() -> None:
    with ServerProcess(*WORKERS) as server:
        children = list(server.children().values())
        params = {**LONG, "max_new_tokens": 400}
        with ThreadPoolExecutor(8) as pool:
            jobs = [
                pool.submit(post, server, "/generate", text="x", sampling_params=params) for _ in range(8)
            ]
            eventually(lambda: state(server)["num_running_reqs"] == 8)
            server.signal(signal.SIGTERM)
            outputs = [job.result().json() for job in jobs]
        assert all(output["meta_info"]["completion_tokens"] == 400 for output in outputs)
        assert server.wait(60) == 0
        assert gone(children) and server.leftovers() == []


def test_a_second_signal_ends_at_once_and_leaves_nothing() -> None:
    with ServerProcess(*WORKERS, "--shutdown-grace", "60") as server:
        children = list(server.children().values())
        with open_stream(server, "long"):
            server.signal(signal.SIGTERM)
            eventually(lambda: "stopping" in server.text())
            server.signal(signal.SIGTERM)
            server.wait(30)
        assert gone(children) and server.leftovers() == []


def test_a_main_process_that_is_killed_takes_its_workers_along() -> None:
    with ServerProcess(*WORKERS) as server:
        children = list(server.children().values())
        server.signal(signal.SIGKILL)
        assert gone(children)


def test_a_taken_port_is_told() -> None:
    with ServerProcess(*WORKERS) as server:
        for flags in ((), WORKERS):
            with ServerProcess(*flags, "--port", str(server.port), wait=False) as second:
                assert second.wait(60) == 1
                assert "cannot listen on" in second.text()
        assert len(server.children()) == 4
        assert psutil.Process(server.process.pid).is_running()


def test_a_worker_that_dies_while_it_starts_is_told_and_nothing_stays() -> None:
    with ServerProcess(*WORKERS, wait=False) as server:
        children = server.wait_for_children(4)
        max(children, key=lambda child: child.pid).kill()
        assert server.wait(60) == 1
        assert "the http-2 process died while starting (signal SIGKILL)" in server.text()
        assert gone(children) and server.leftovers() == []


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes the certificate with openssl")
def test_keys_certificates_and_limits_hold_for_what_is_answered_and_what_is_passed_on(tmp_path: Path) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "2",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    flags = (
        "--ssl-keyfile",
        str(key),
        "--ssl-certfile",
        str(cert),
        "--api-key",
        "sesame",
        "--max-body-mb",
        "0.1",
    )
    with ServerProcess(*WORKERS, *flags) as server:
        trust = ssl.create_default_context(cafile=str(cert))

        def ask(path: str, key: str, size: int = 1) -> int:
            with httpx.Client(base_url=server.url, verify=trust, timeout=30) as client:
                body = {"text": "x" * size, "sampling_params": {"max_new_tokens": 1}}
                return client.post(path, json=body, headers={"authorization": f"Bearer {key}"}).status_code

        for _ in range(4):
            for path, fine in (("/generate", 200), ("/flush_cache", 200)):
                assert ask(path, "sesame") == fine
                assert ask(path, "wrong") == 401
                assert ask(path, "sesame", 200_000) == 413
        server.signal(signal.SIGINT)
        assert server.wait(30) == 0
        assert "Traceback" not in server.text(), server.text()
