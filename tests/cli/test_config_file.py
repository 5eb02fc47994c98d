"""`--config`: a YAML file says what flags say, flags win, and every fault names its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgviz.cli.config_file import read_config
from sgviz.cli.options import Parser, add_config, add_options, settings_from
from sgviz.config import Settings


def settings(path: Path, *flags: str) -> Settings:
    parser = Parser(prog="sgviz serve")
    add_config(parser)
    add_options(parser)
    return settings_from(parser.parse_args(["--config", str(path), *flags]))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "server.yaml"


def refusal(file: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    with pytest.raises(SystemExit) as ended:
        settings(file, *flags)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_both_ways_to_write_a_name_and_every_kind_of_value(file: Path) -> None:
    file.write_text(
        "model-path: tiny-llama\nmax_running_requests: 7\nmax-body-mb: 2\nschedule_conservativeness: 0.5\n"
        "enable-mixed-chunk: true\ndisable_overlap_schedule: false\napi_key: '123'\nrecord: null\n"
    )
    got = settings(file)
    assert (got.model.model_path, got.schedule.max_running_requests, got.http.max_body_mb) == (
        "tiny-llama",
        7,
        2,
    )
    assert got.schedule.enable_mixed_chunk and not got.schedule.disable_overlap_schedule
    assert (got.serve.api_key, got.observe.record) == ("123", None)


def test_the_file_says_what_the_flags_say(file: Path) -> None:
    file.write_text("port: 1234\nstream-interval: 3\n")
    parser = Parser()
    add_options(parser)
    assert settings(file) == settings_from(parser.parse_args(["--port", "1234", "--stream-interval", "3"]))


def test_the_command_line_wins_also_to_switch_off(file: Path) -> None:
    file.write_text("port: 1234\nhost: 0.0.0.0\ndisable_overlap_schedule: true\n")
    got = settings(file, "--port", "0", "--enable-overlap-schedule")
    assert (got.serve.port, got.serve.host) == (0, "0.0.0.0")
    assert not got.schedule.disable_overlap_schedule


def test_an_empty_file_says_nothing(file: Path) -> None:
    file.write_text("# nothing yet\n")
    assert settings(file) == Settings() and read_config(str(file)).values == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port: 1\nmax-runing-requests: 3\n", ["line 2", "'max-runing-requests'", "max_running_requests"]),
        ("port: 99999\n", ["line 1", "port = 99999"]),
        ("host: x\nport: high\n", ["line 2", "port = 'high'"]),
        ("port: 1\nPort: 2\n", ["line 2", "'Port'"]),
        ("port: 1\nport: 2\n", ["line 2", "line 1 already"]),
        ("page-size: 1\npage_size: 2\n", ["line 2", "line 1 already"]),
        ("host: x\nport: [1, 2]\n", ["line 2", "plain value, not a list"]),
        ("serve:\n  port: 1\n", ["line 1", "unknown setting 'serve'"]),
        ("- port\n", ["line 1", "mapping"]),
        ("a: b\n  c: d\n", ["line 2", "no YAML"]),
        ("port: !!python/object:os.system 1\n", ["line 1", "port"]),
        ("port: 1\nrecord: 2020-13-45\n", ["line 2", "record"]),
        ("chunked_prefill_size: 0\n", ["line 1", "chunked_prefill_size = 0"]),
        ("\tport: 1\n", ["line 1", "no YAML"]),
        ("port: 1\n---\nport: 2\n", ["no YAML"]),
    ],
)
def test_a_fault_names_file_line_and_key(
    file: Path, capsys: pytest.CaptureFixture[str], text: str, words: list[str]
) -> None:
    file.write_text(text)
    said = refusal(file, capsys)
    assert all(word in said for word in [str(file), *words]), said
    assert "Traceback" not in said


def test_a_fault_of_the_command_line_is_not_blamed_on_the_file(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("page_size: 2\n")
    said = refusal(file, capsys, "--page-size", "0")
    assert "page_size = 0" in said and str(file) not in said


@pytest.mark.parametrize(
    "make", [lambda path: None, lambda path: path.mkdir(), lambda path: path.write_bytes(b"\xff\xfe")]
)
def test_a_file_that_cannot_be_read(file: Path, capsys: pytest.CaptureFixture[str], make: object) -> None:
    make(file)  # type: ignore[operator]
    said = refusal(file, capsys)
    assert str(file) in said and "Traceback" not in said


def test_a_flag_that_switches_off_stands_in_the_file_too(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("enable-overlap-schedule: true\n")
    assert not settings(file).schedule.disable_overlap_schedule
    file.write_text("enable_overlap_schedule: false\n")
    assert settings(file).schedule.disable_overlap_schedule
    file.write_text("enable-overlap-schedule: 1\n")
    assert "line 1: setting enable-overlap-schedule: it must be true or false, got 1" in refusal(file, capsys)
    file.write_text("enable-overlap-schedule: true\ndisable-overlap-schedule: true\n")
    assert "stands on line 1 already" in refusal(file, capsys)
