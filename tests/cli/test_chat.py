"""`sgviz chat` with piped input: turns, commands, errors; on a served engine and on its own."""

from __future__ import annotations

import http.server
import json
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from demo_process import run, socket_folders

from sgviz.cli.client import shown

sys.path.insert(0, str(Path(__file__).parents[1] / "launch"))
from server_process import ServerProcess

pytestmark = pytest.mark.slow
GREEDY = ("--temperature", "0", "--max-tokens", "8")
Messages = list[dict[str, str]]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--torch-threads", "1") as running:
        yield running


def answer(server: ServerProcess, messages: Messages) -> str:
    """What the server says to the conversation, asked plainly and not streamed."""
    body = {"model": "tiny-llama", "messages": messages, "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as reply:
        text: str = json.load(reply)["choices"][0]["message"]["content"]
    return text


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_turns_build_on_each_other_and_reset_forgets(server: ServerProcess, tmp_path: Path) -> None:
    first = answer(server, [user("hello")])
    second = answer(server, [user("hello"), {"role": "assistant", "content": first}, user("go on")])
    assert first and second != first
    done = run(
        "chat",
        "--url",
        server.url,
        *GREEDY,
        folder=tmp_path,
        stdin="hello\n\ngo on\n/reset\nhello\n/exit\nno\n",
    )
    assert done.returncode == 0 and done.stderr == ""
    header, _, talk = done.stdout.partition("\n")
    assert header.startswith(f"tiny-llama at {server.url}")
    assert talk == "".join(f"{shown(text)}\n" for text in (first, second, first))


def test_a_system_message_stays_through_a_reset(server: ServerProcess, tmp_path: Path) -> None:
    expected = answer(server, [{"role": "system", "content": "Be brief."}, user("hello")])
    done = run(
        "chat", "--url", f"{server.url}/v1/", "--system", "Be brief.", *GREEDY,
        folder=tmp_path, stdin="hello\n/reset\nhello\n",
    )  # fmt: skip
    assert done.stdout.partition("\n")[2] == f"{shown(expected)}\n" * 2 + "\n"


def test_commands_are_not_sent_to_the_model(server: ServerProcess, tmp_path: Path) -> None:
    done = run("chat", "--url", server.url, folder=tmp_path, stdin="/help\n/rest now\n")
    lines = done.stdout.splitlines()
    assert lines[1].startswith("/reset starts over") and lines[2].startswith("there is no /rest; /reset")
    assert done.returncode == 0


def test_an_error_is_said_and_the_talk_goes_on(server: ServerProcess, tmp_path: Path) -> None:
    expected = answer(server, [user("hello")])
    stdin = f"{'word ' * 4000}\nhello\n"
    done = run("chat", "--url", server.url, *GREEDY, folder=tmp_path, stdin=stdin)
    assert "2048" in done.stderr and "Traceback" not in done.stderr
    assert done.stdout.partition("\n")[2] == f"\n{shown(expected)}\n\n" and done.returncode == 0


def test_without_a_url_it_starts_an_engine_and_ends_it(tmp_path: Path) -> None:
    done = run("chat", "--model", "tiny-llama", *GREEDY, folder=tmp_path, stdin="hello\n")
    assert done.returncode == 0 and len(done.stdout.splitlines()) >= 2
    assert done.stderr == "starting tiny-llama ...\n" and socket_folders(tmp_path) == []


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1", "http://no-such-host.invalid", "nonsense", "ftp://127.0.0.1"]
)
def test_a_url_where_nobody_answers(url: str, tmp_path: Path) -> None:
    _assert_refused(url, "no server answers", tmp_path)


def test_a_server_that_is_something_else(tmp_path: Path) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        _assert_refused(f"http://127.0.0.1:{other.server_port}", "no list of models", tmp_path)
        other.shutdown()


def test_a_wrong_key(tmp_path: Path) -> None:
    with ServerProcess("--api-key", "sesame", "--device", "mock") as server:
        _assert_refused(server.url, "key", tmp_path)
        done = run("chat", "--url", server.url, "--api-key", "sesame", folder=tmp_path, stdin="/exit\n")
        assert done.returncode == 0


def test_a_server_that_dies_in_the_middle(tmp_path: Path) -> None:
    """The next turn says so in one sentence; the conversation keeps what there was."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), BreaksOff) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{other.server_port}"
        done = run("chat", "--url", url, folder=tmp_path, stdin="hello\n")
        other.shutdown()
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert done.stdout.splitlines()[1] == "Once" and "broke" in done.stderr


def _assert_refused(url: str, sentence: str, folder: Path) -> None:
    done = run("chat", "--url", url, folder=folder, stdin="hello\n")
    assert done.returncode == 1 and done.stdout == ""
    assert sentence in done.stderr and len(done.stderr.splitlines()) == 1


class Elsewhere(http.server.BaseHTTPRequestHandler):
    """Some web server."""

    def do_GET(self) -> None:
        self._answer(b"<html>hello</html>")

    def _answer(self, content: bytes, length: int | None = None) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


class BreaksOff(Elsewhere):
    """An OpenAI server that closes the connection after the first word."""

    def do_GET(self) -> None:
        self._answer(b'{"data": [{"id": "short-lived"}]}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(b'data: {"choices": [{"delta": {"content": "Once"}}]}\n\n', length=10_000)
