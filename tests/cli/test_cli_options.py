"""The command line mirrors the settings: flags, types, defaults, errors."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import msgspec
import pytest

from sgviz.cli.options import Option, Parser, add_options, options, settings_from
from sgviz.config import Settings
from sgviz.errors import ConfigError

# People's scripts hold these; a flag that goes or changes its name breaks them.
FLAGS = [
    "--model-path",
    "--tokenizer-path",
    "--weight-version",
    "--served-model-name",
    "--chat-template",
    "--is-embedding",
    "--pooling",
    "--context-length",
    "--dtype",
    "--quantization",
    "--device",
    "--torch-threads",
    "--random-seed",
    "--custom-logit-processors",
    "--mock-step-ms",
    "--sim-model",
    "--sim-tp",
    "--sim-cost",
    "--max-total-tokens",
    "--mem-fraction-static",
    "--page-size",
    "--disable-radix-cache",
    "--schedule-policy",
    "--schedule-conservativeness",
    "--chunked-prefill-size",
    "--max-prefill-tokens",
    "--prefill-max-requests",
    "--max-running-requests",
    "--max-queued-requests",
    "--enable-priority-scheduling",
    "--schedule-low-priority-values-first",
    "--default-priority-value",
    "--abort-on-priority-when-disabled",
    "--disable-priority-preemption",
    "--priority-scheduling-preemption-threshold",
    "--retraction-policy",
    "--enable-mixed-chunk",
    "--disable-consecutive-prefill-overlap",
    "--disable-overlap-schedule",
    "--enable-overlap-schedule",
    "--watchdog-timeout",
    "--grammar-backend",
    "--constrained-json-whitespace-pattern",
    "--constrained-json-disable-any-whitespace",
    "--grammar-timeout",
    "--dp-size",
    "--load-balance-method",
    "--load-snapshot-publish-interval",
    "--base-gpu-id",
    "--gpu-id-step",
    "--nnodes",
    "--node-rank",
    "--dist-init-addr",
    "--node-timeout",
    "--node-heartbeat-timeout",
    "--disaggregation-mode",
    "--disaggregation-transfer-backend",
    "--disaggregation-bootstrap-port",
    "--disaggregation-bootstrap-host",
    "--disaggregation-bootstrap-timeout",
    "--disaggregation-waiting-timeout",
    "--disaggregation-heartbeat-interval",
    "--disaggregation-heartbeat-max-failures",
    "--disaggregation-checksum",
    "--disaggregation-decode-enable-radix-cache",
    "--disaggregation-decode-retraction",
    "--disaggregation-decode-kept-tokens",
    "--num-reserved-decode-tokens",
    "--disaggregation-decode-polling-interval",
    "--host",
    "--port",
    "--api-key",
    "--admin-api-key",
    "--log-level",
    "--stream-interval",
    "--enable-cache-report",
    "--stream-response-default-include-usage",
    "--tool-call-parser",
    "--reasoning-parser",
    "--tokenizer-worker-num",
    "--skip-server-warmup",
    "--startup-timeout",
    "--enable-debugger",
    "--shutdown-grace",
    "--max-body-mb",
    "--read-timeout",
    "--timeout-keep-alive",
    "--request-timeout",
    "--health-timeout",
    "--cors-origins",
    "--ssl-keyfile",
    "--ssl-certfile",
    "--ssl-ca-certs",
    "--ssl-keyfile-password",
    "--disable-events",
    "--event-capacity",
    "--log-requests",
    "--log-requests-level",
    "--log-requests-format",
    "--crash-dump-folder",
    "--record",
    "--tokenizer-metrics-custom-labels-header",
    "--tokenizer-metrics-allowed-custom-labels",
]

# the others go with the first two
TLS = ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_keyfile_password")
# what several hosts need beside the flag
ALONG = {
    "nnodes": {"dp_size": "34", "dist_init_addr": "host:5000"},
    "node_rank": {"nnodes": "18", "dp_size": "18", "dist_init_addr": "host:5000"},
}

Parse = Callable[..., Settings]


@pytest.fixture
def parse() -> Parse:
    """Settings from words, as `sgviz serve` reads them."""
    parser = Parser(prog="sgviz")
    add_options(parser.add_subparsers(required=True).add_parser("serve"))
    return lambda *words: settings_from(parser.parse_args(["serve", *words]))


def given_value(option: Option) -> str | None:
    """A value for the flag that is allowed and differs from the default; None for a switch."""
    if option.kind is bool:
        return None
    if option.choices:
        return next(choice for choice in option.choices if choice != option.default)
    fitting = {
        "mem_fraction_static": "0.5",
        "max_total_tokens": "4096",
        "event_capacity": "2000",
        "log_requests_level": "3",
        "cors_origins": "https://a.example",
        "custom_logit_processors": "name=module:Class",
        "load_balance_method": "total_tokens",
        "dist_init_addr": "host:5000",
        **dict.fromkeys(TLS, __file__),
    }
    plain = {int: "17", float: "2.5", str: "name"}[option.kind]
    return fitting.get(option.name, plain)


def test_the_flags_are_frozen() -> None:
    found = [flag for option in options() for flag in (option.flag, option.opposite) if flag]
    assert found == FLAGS


def test_no_flag_given_means_the_defaults(parse: Parse) -> None:
    assert parse() == Settings()


@pytest.mark.parametrize("option", list(options()), ids=lambda option: option.name)
def test_every_flag_reaches_its_setting_and_no_other(parse: Parse, option: Option) -> None:
    value = given_value(option)
    words = [option.opposite or option.flag] if value is None else [option.flag, value]
    if option.name in TLS:
        words += [word for name in TLS[:2] for word in ("--" + name.replace("_", "-"), __file__)]
    along = ALONG.get(option.name, {})
    words += [word for name, text in along.items() for word in ("--" + name.replace("_", "-"), text)]
    changed = {
        name: (before, after)
        for (name, before), after in zip(Settings().flat().items(), parse(*words).flat().values())
        if before != after
    }
    beside = (*TLS, *along)
    assert [name for name in changed if name not in beside or name == option.name] == [option.name]
    after = changed[option.name][1]
    assert type(after) is option.kind
    assert after == (option.kind(value) if value is not None else not option.default)


def test_a_negative_number_is_a_value(parse: Parse) -> None:
    assert parse("--chunked-prefill-size", "-1").schedule.chunked_prefill_size == -1


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--page-size", "0"], ["page_size", "0", ">= 1"]),
        (["--chunked-prefill-size", "0"], ["chunked_prefill_size = 0", "at least 1", "-1"]),
        (["--port", "65536"], ["port", "65536", "65535"]),
        (["--port", "http"], ["--port", "http", "int"]),
        (["--dtype", "int3"], ["--dtype", "int3", "bfloat16"]),
        (["--schedule-polcy", "lpm"], ["--schedule-polcy", "did you mean '--schedule-policy'?"]),
        (["--shedule-policy=lpm"], ["--shedule-policy ", "did you mean '--schedule-policy'?"]),
        (["--schedule"], ["unknown option --schedule"]),
        (["--zzz"], ["unknown option --zzz"]),
    ],
)
def test_a_wrong_flag_or_value_ends_with_one_sentence(
    parse: Parse, capsys: pytest.CaptureFixture[str], words: list[str], parts: list[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse(*words)
    assert exit_.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    sentence, hint = err.splitlines()
    assert sentence.startswith("sgviz serve: error: ")
    assert hint == "See sgviz serve --help."
    for part in parts:
        assert part in sentence


def test_help_names_description_default_and_source(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    parser = Parser(prog="sgviz serve")
    add_options(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for option in options():
        assert option.flag in shown
        assert " ".join(option.description.split()) in shown
    assert "KV slots per page. [default 1; SGLang]" in shown
    assert all(f"{group}: " in shown for group in Settings.__struct_fields__)


def test_every_setting_says_what_it_is_and_where_its_default_comes_from() -> None:
    assert all(option.description.endswith(".") and option.source for option in options())


def test_presets_give_way_to_flags_and_left_out_settings_have_no_flag() -> None:
    parser = Parser(prog="sgviz demo")
    add_options(parser, without=["port"])
    namespace = parser.parse_args(["--page-size", "16"])
    settings = settings_from(namespace, page_size=4, port=0)
    assert (settings.cache.page_size, settings.serve.port) == (16, 0)
    with pytest.raises(SystemExit):
        parser.parse_args(["--port", "1"])


def test_without_a_parser_the_error_is_raised() -> None:
    with pytest.raises(ConfigError, match="page_size = 0"):
        settings_from(argparse.Namespace(page_size=0))


def test_the_defaults_are_those_of_the_structs() -> None:
    by_name = {option.name: option.default for option in options()}
    assert by_name == Settings().flat()
    assert len(by_name) == sum(len(msgspec.structs.fields(type(group))) for group in _groups())


def _groups() -> list[msgspec.Struct]:
    settings = Settings()
    return [getattr(settings, name) for name in settings.__struct_fields__]
