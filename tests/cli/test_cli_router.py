"""`sgviz router` on the command line: what it takes, what it refuses, and servers that are not there yet."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from sgviz.cli.router import _options, _parser, main
from sgviz.errors import SgvizError
from sgviz.router.options import POLICIES

sys.path.insert(0, str(Path(__file__).parents[1] / "router"))
from pair_processes import RouterProcess

PAIR = ("--prefill", "http://p:1", "--decode", "http://d:1")


def test_the_help_names_every_option_and_policy() -> None:
    text = _parser().format_help()
    flags = (
        "--prefill", "--decode", "--host", "--port", "--api-key", "--max-body-mb", "--request-timeout", "--policy",
        "--retries", "--health-interval", "--health-timeout", "--seed", "--record", "--json", "--log-level",
    )  # fmt: skip
    assert all(flag in text for flag in flags) and all(policy in text for policy in POLICIES)
    assert "(default: None)" not in text


def test_options_come_from_flags_and_servers_may_be_several() -> None:
    args = _parser().parse_args(
        [
            "--prefill", "http://p:1", "8998", "--prefill", "http://q:1/v1", "--decode", "http://d:1/",
            "--decode", "http://e:1", "--policy", "power_of_two", "--retries", "0", "--request-timeout", "1.5",
        ]
    )  # fmt: skip
    options = _options(args)
    assert options.prefill == (("http://p:1", 8998), ("http://q:1", None))
    assert options.decode == ("http://d:1", "http://e:1")
    assert (options.policy, options.retries, options.request_timeout) == ("power_of_two", 0, 1.5)
    assert (options.host, options.port) == ("127.0.0.1", 8000)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), "--prefill, --decode"),
        (("--prefill", "http://p:1"), "--decode"),
        (("--prefill", "p:1", "--decode", "http://d:1"), "http://HOST:PORT"),
        (("--prefill", "http://p:1", "0", "--decode", "http://d:1"), "no port"),
        ((*PAIR, "--decode", "http://d:1"), "twice"),
        ((*PAIR, "--decode", "http://p:1"), "both"),
        ((*PAIR, "--retries", "-1"), "--retries -1"),
        ((*PAIR, "--health-timeout", "nan"), "--health-timeout"),
        ((*PAIR, "--policy", "best"), "round_robin"),
        ((*PAIR, "--port", "70000"), "65535"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_starts(
    argv: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 2 and words in capsys.readouterr().err


def test_a_port_in_use_is_found_before_anything_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SgvizError, match=str(port)):
            main((*PAIR, "--port", str(port)))


@pytest.mark.slow
def test_a_router_before_its_servers_says_what_is_missing_and_ends_on_a_signal() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # takes connections and never answers
        silent = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        flags = ("--prefill", "http://127.0.0.1:9", "--decode", silent, "--health-timeout", "0.3")
        with RouterProcess(*flags) as router:
            (decode,) = router.ready["decode"]
            assert not router.ready["healthy"] and "within 0.3 s" in decode["why"]
            answer = httpx2.post(f"{router.url}/v1/completions", json={"prompt": "a"})
            message = answer.json()["error"]["message"]
            assert answer.status_code == 503 and "http://127.0.0.1:9" in message
            assert httpx2.get(f"{router.url}/health").status_code == 503
            assert router.stop(signal.SIGHUP) == 0


@pytest.mark.slow
def test_the_line_for_people_counts_the_servers_and_the_log_says_why() -> None:
    command = [
        sys.executable,
        "-m",
        "sgviz",
        "router",
        *PAIR[:2],
        "--decode",
        "http://127.0.0.1:9",
        "--port",
        "0",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, log = process.communicate(timeout=20.0)
    finally:
        process.kill()
        process.wait()
    assert "0 of 1 prefill servers and 0 of 1 decode servers healthy" in line
    assert "the decode server http://127.0.0.1:9 gets no requests: it cannot be reached" in log
    assert process.returncode == 0 and "Traceback" not in log
