"""Settings in frozen groups. Names are SGLang's server arguments where it has one.

One table, three users: `Engine(**settings)`, the command line (flags are generated from these fields) and
`/server_info`. Each field says what it does, what is allowed, and where its default comes from.
Imports: config groups, errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from sgviz.config.engine_groups import (
    CacheConfig,
    GrammarConfig,
    ModelConfig,
    ScheduleConfig,
    SimConfig,
)
from sgviz.config.named_processors import named_processors
from sgviz.config.nodes import check_nodes
from sgviz.config.parallel_groups import LOAD_BALANCE_METHODS, DisaggregationConfig, ParallelConfig
from sgviz.config.server_groups import HttpConfig, ObserveConfig, ServeConfig
from sgviz.errors import ConfigError, suggest

LABEL = re.compile(r"(?!__)[A-Za-z_]\w*", re.ASCII)
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")
ANY_HOST = ("0.0.0.0", "::")
PRIORITY_POLICIES = ("fcfs", "lof")  # the others sort by what the cache holds, or not at all
TAKEN_LABELS = (
    "model_name",
    "engine_type",
    "is_streaming",
    "cache_source",
    "le",
)  # by the metrics themselves


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All groups. Field names are unique over the groups, so a flat mapping names each setting."""

    model: ModelConfig = ModelConfig()
    sim: SimConfig = SimConfig()
    cache: CacheConfig = CacheConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    grammar: GrammarConfig = GrammarConfig()
    parallel: ParallelConfig = ParallelConfig()
    disaggregation: DisaggregationConfig = DisaggregationConfig()
    serve: ServeConfig = ServeConfig()
    http: HttpConfig = HttpConfig()
    observe: ObserveConfig = ObserveConfig()

    def flat(self) -> dict[str, str | int | float | bool | None]:
        """Every setting by its name."""
        return {name: getattr(getattr(self, group), name) for group, name in _homes().items_by_group()}

    def public(self) -> dict[str, str | int | float | bool | None]:
        """`flat` without secrets, for `/server_info` and recordings."""
        secret = ("api_key", "admin_api_key", "ssl_keyfile_password")
        return {key: ("***" if key in secret and value else value) for key, value in self.flat().items()}

    @property
    def served_model_name(self) -> str:
        return self.model.served_model_name or self.model.model_path

    @classmethod
    def build(cls, **flat: object) -> Settings:
        """Settings from flat names; ConfigError for an unknown name or a value that is not allowed.

        None for a setting that has no None means its default.
        """
        homes = _homes()
        groups: dict[str, dict[str, object]] = {group: {} for group in cls.__struct_fields__}
        for name, value in flat.items():
            if name not in homes:
                raise ConfigError(f"unknown setting {name!r}{suggest(name, homes)}")
            if value is not None:
                groups[homes[name]][name] = value
        converted: dict[str, Any] = {group: _convert(cls, group, values) for group, values in groups.items()}
        settings = cls(**converted)
        settings._check()
        return settings

    def _check(self) -> None:
        """Raise ConfigError for what the types of the settings do not say."""
        if self.schedule.chunked_prefill_size == 0:
            raise ConfigError(
                "setting chunked_prefill_size = 0: it must be at least 1, or -1 to never cut a prompt",
                param="chunked_prefill_size",
            )
        _check_priorities(self.schedule)
        _check_balance(self.parallel)
        check_nodes(self.parallel, self.disaggregation)
        _check_sides(self)
        _check_pattern(self.grammar)
        named_processors(self.model.custom_logit_processors)
        _check_http(self.http)
        for name in self.observe.allowed_labels:
            if not LABEL.fullmatch(name) or name in TAKEN_LABELS:
                raise ConfigError(
                    f"setting tokenizer_metrics_allowed_custom_labels: {name!r} cannot be a label; one is made of "
                    f"letters, digits and _, begins with no digit and no __, and is none of {', '.join(TAKEN_LABELS)}",
                    param="tokenizer_metrics_allowed_custom_labels",
                )
        if self.observe.disable_events and self.observe.record is not None:
            raise ConfigError(
                f"setting record = {self.observe.record!r}: with disable_events there are no events to record",
                param="record",
            )


def _check_priorities(schedule: ScheduleConfig) -> None:
    policy = schedule.schedule_policy
    if schedule.enable_priority_scheduling and policy not in PRIORITY_POLICIES and ":" not in policy:
        raise ConfigError(
            f"setting schedule_policy = {policy!r}: with enable_priority_scheduling it must be one of "
            f"{', '.join(PRIORITY_POLICIES)}, or a class of your own",
            param="schedule_policy",
        )


def _check_balance(parallel: ParallelConfig) -> None:
    name = parallel.load_balance_method
    if name not in LOAD_BALANCE_METHODS and ":" not in name:
        raise ConfigError(
            f"load_balance_method {name!r} is not one of {', '.join(LOAD_BALANCE_METHODS)}"
            f"{suggest(name, LOAD_BALANCE_METHODS)}, nor module:Class or file.py:Class",
            param="load_balance_method",
        )


def _check_sides(settings: Settings) -> None:
    own = settings.disaggregation
    mode = own.disaggregation_mode
    if mode == "null":
        return
    if settings.model.is_embedding:
        raise ConfigError(
            f"disaggregation_mode {mode} and is_embedding do not go together: vectors have no KV to send",
            param="disaggregation_mode",
        )
    host = own.disaggregation_bootstrap_host or settings.serve.host
    if mode == "prefill" and host in ANY_HOST:
        raise ConfigError(
            f"disaggregation_mode prefill with host {host}: decode servers cannot reach that address; give "
            "disaggregation_bootstrap_host, by which they reach this server",
            param="disaggregation_bootstrap_host",
        )


def _check_pattern(grammar: GrammarConfig) -> None:
    name, pattern = "constrained_json_whitespace_pattern", grammar.constrained_json_whitespace_pattern
    if pattern is not None and grammar.grammar_backend != "none":
        from llguidance import LLMatcher  # it takes a while, and most settings name no pattern

        if error := LLMatcher.validate_grammar(LLMatcher.grammar_from_regex(pattern)):
            raise ConfigError(f"setting {name} = {pattern!r}: {' '.join(error.split())}", param=name)


def _check_http(http: HttpConfig) -> None:
    for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
        path = getattr(http, name)
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"setting {name} = {path!r}: there is no such file", param=name)
    for given, other in (("ssl_keyfile", "ssl_certfile"), ("ssl_certfile", "ssl_keyfile")):
        if getattr(http, given) is not None and getattr(http, other) is None:
            raise ConfigError(f"setting {given} goes with {other}, which is not given", param=other)
    for name in ("ssl_ca_certs", "ssl_keyfile_password"):
        if getattr(http, name) is not None and http.ssl_keyfile is None:
            raise ConfigError(f"setting {name} has no use without ssl_keyfile and ssl_certfile", param=name)
    for origin in http.origins:
        if origin != "*" and not ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"setting cors_origins: {origin!r} is no origin; one is scheme://host or scheme://host:port, or *",
                param="cors_origins",
            )


class _Homes(dict[str, str]):
    """Setting name -> group name."""

    def items_by_group(self) -> Iterator[tuple[str, str]]:
        return ((group, name) for name, group in self.items())


def _homes() -> _Homes:
    types = get_type_hints(Settings)
    return _Homes((name, group) for group, kind in types.items() for name in kind.__struct_fields__)


def _convert(cls: type[Settings], group: str, values: dict[str, object]) -> msgspec.Struct:
    kind = get_type_hints(cls)[group]
    for name, value in values.items():
        try:
            msgspec.convert({name: value}, kind)
        except msgspec.ValidationError as error:
            allowed = _choices(kind, name, value) or str(error).split(" - at")[0]
            raise ConfigError(f"setting {name} = {value!r}: {allowed}", param=name) from None
    converted: msgspec.Struct = msgspec.convert(values, kind)
    return converted


def _choices(kind: type[msgspec.Struct], name: str, value: object) -> str:
    """What a setting with a few named values takes, and the nearest; empty for all others."""
    hint = get_type_hints(kind)[name]
    if get_origin(hint) is not Literal:
        return ""
    texts, text = get_args(hint), str(value)
    # of `sim:h100` the whole name is nearer than another name of the same length
    longer = [each for each in texts if len(text) > 2 and each.startswith(text)]
    return f"it must be one of {', '.join(texts)}{suggest(text, longer or texts)}"
