"""Settings in frozen groups. Names are SGLang's server arguments where it has one.

One table, three users: `Engine(**settings)`, the command line (flags are generated from these fields) and
`/server_info`. Each field says what it does, what is allowed, and where its default comes from.
Imports: errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from sgviz.errors import ConfigError, suggest

LABEL = re.compile(r"(?!__)[A-Za-z_]\w*", re.ASCII)
TAKEN_LABELS = (
    "model_name",
    "engine_type",
    "is_streaming",
    "cache_source",
    "le",
)  # by the metrics themselves
DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_MAX_RUNNING = 256  # requests that may decode together, where memory allows, if nobody says otherwise


def _meta(text: str, source: str, **limits: Any) -> Meta:
    return Meta(description=text, extra={"source": source}, **limits)


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which model runs, and on what."""

    model_path: Annotated[
        str,
        _meta("Default model's name, a tiny model's name, a local Hugging Face folder or a hub id.", "ours"),
    ] = DEFAULT_MODEL
    tokenizer_path: Annotated[str | None, _meta("Folder of the tokenizer, if not the model's.", "SGLang")] = (
        None
    )
    served_model_name: Annotated[
        str | None, _meta("Name clients see and ask for; default: the model path.", "SGLang")
    ] = None
    chat_template: Annotated[
        str | None, _meta("File with a Jinja chat template that replaces the model's own.", "SGLang")
    ] = None
    context_length: Annotated[
        Annotated[int, Meta(ge=8)] | None,
        _meta("Positions a request may use; default: the model's.", "SGLang"),
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        _meta(
            "Number format of weights and KV; auto: float32 on CPU, bfloat16 on GPU.",
            "SGLang (auto); ours on CPU",
        ),
    ] = "auto"
    quantization: Annotated[
        Literal["w8a8_int8"] | None,
        _meta(
            "w8a8_int8: weights and activations of the projections in int8, on a CPU; answers differ a little.",
            "SGLang (none)",
        ),
    ] = None
    device: Annotated[
        Literal["auto", "cpu", "cuda", "mock", "sim:a100-80g", "sim:h100-sxm", "sim:h200", "sim:l4"],
        _meta(
            "auto takes a GPU where there is one; mock computes tokens by rule and loads no model; sim:GPU takes "
            "as long as that GPU would (see sim_model).",
            "ours",
        ),
    ] = "auto"
    torch_threads: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        _meta("Threads of torch in the scheduler; default: torch's own.", "ours"),
    ] = None
    random_seed: Annotated[
        int, _meta("Seed for requests that bring none.", "SGLang draws one; ours is fixed")
    ] = 42
    mock_step_ms: Annotated[
        float, _meta("Duration of one forward of the mock device in milliseconds.", "ours", ge=0.0)
    ] = 0.0


class SimConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The simulated device (device sim:...). Everything measured on it is simulated."""

    sim_model: Annotated[
        Literal[
            "llama-3-8b",
            "llama-3-70b",
            "llama-2-7b",
            "llama-2-70b",
            "qwen2.5-7b",
            "qwen2.5-0.5b",
            "smollm2-135m",
        ],
        _meta("Model whose shape decides time and memory; the model path gives the tokenizer only.", "ours"),
    ] = "llama-3-8b"
    sim_tp: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | None,
        _meta("GPUs the simulated model is spread over; default: 4 for a 70B, else 1.", "ours"),
    ] = None
    sim_cost: Annotated[
        str | None,
        _meta(
            "JSON file of costs fitted from a recording (FittedCost.save), in place of the roofline.", "ours"
        ),
    ] = None


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """KV memory."""

    max_total_tokens: Annotated[
        Annotated[int, Meta(ge=16)] | None,
        _meta("KV slots of the pool; default: what 1 GiB (CPU) or the GPU's fraction holds.", "ours"),
    ] = None
    mem_fraction_static: Annotated[
        float,
        _meta(
            "Share of GPU memory for weights and KV; no effect on CPU.",
            "SGLang: by device; ours 0.85",
            gt=0.0,
            le=1.0,
        ),
    ] = 0.85
    page_size: Annotated[int, _meta("KV slots per page.", "SGLang", ge=1, le=256)] = 1
    disable_radix_cache: Annotated[bool, _meta("Never share prefixes between requests.", "SGLang")] = False


class ScheduleConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler may put into a batch, and in which order."""

    schedule_policy: Annotated[
        str,
        _meta(
            "Order of the waiting queue: fcfs, lpm, dfs-weight, lof, random, or your own policy as "
            "module:Class or file.py:Class.",
            "SGLang; classes are ours",
        ),
    ] = "fcfs"
    schedule_conservativeness: Annotated[
        float,
        _meta("Above 1 reserves more memory for running requests, below 1 less.", "SGLang", gt=0.0, le=10.0),
    ] = 1.0
    chunked_prefill_size: Annotated[
        int,
        _meta(
            "Prompt tokens of one batch; a longer prompt is cut. -1: never cut. 0 is not allowed.",
            "SGLang on small devices",
            ge=-1,
        ),
    ] = 2048
    max_prefill_tokens: Annotated[
        int,
        _meta(
            "Prompt tokens after which a batch takes no further request; one prompt alone may be longer.",
            "SGLang",
            ge=1,
        ),
    ] = 16384
    prefill_max_requests: Annotated[
        Annotated[int, Meta(ge=1)] | None, _meta("New requests of one batch.", "SGLang")
    ] = None
    max_running_requests: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        _meta("Requests that may decode together; default: by memory, at most 256 on CPU.", "ours"),
    ] = None
    max_queued_requests: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        _meta("Requests that may wait; one more is answered with 503.", "SGLang"),
    ] = None
    enable_mixed_chunk: Annotated[
        bool, _meta("Let decoding requests ride along with a prompt chunk.", "SGLang")
    ] = False
    disable_consecutive_prefill_overlap: Annotated[
        bool,
        _meta(
            "Overlap loop: process a prefill's result before the next prefill is launched (first tokens leave sooner).",
            "SGLang: SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP",
        ),
    ] = False
    disable_overlap_schedule: Annotated[
        bool,
        _meta(
            "Process each result before the next launch (the normal loop).", "SGLang: overlap; ours: normal"
        ),
    ] = True
    watchdog_timeout: Annotated[
        float,
        _meta(
            "Seconds one turn of the scheduler (one forward) may take before it counts as stuck.",
            "SGLang",
            gt=0.0,
        ),
    ] = 300.0


class GrammarConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Structured output."""

    grammar_backend: Annotated[
        Literal["llguidance", "none"],
        _meta(
            "What compiles json_schema, regex, ebnf and structural_tag; none: refuse them.",
            "SGLang: xgrammar",
        ),
    ] = "llguidance"
    constrained_json_whitespace_pattern: Annotated[
        str | None,
        _meta(
            "Regular expression of what may stand once between two tokens of JSON; default: a space, or a line "
            "break and up to 32 blanks.",
            "SGLang: any whitespace",
        ),
    ] = None
    constrained_json_disable_any_whitespace: Annotated[
        bool, _meta("Compact JSON: nothing may stand between its tokens.", "SGLang")
    ] = False
    grammar_timeout: Annotated[
        float, _meta("Seconds a request waits for its grammar to compile.", "SGLang: 50", gt=0.0)
    ] = 30.0


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP server."""

    host: Annotated[str, _meta("Address to listen on.", "SGLang")] = "127.0.0.1"
    port: Annotated[int, _meta("Port to listen on; 0 takes a free one.", "SGLang", ge=0, le=65535)] = 30000
    api_key: Annotated[str | None, _meta("Bearer key for all but the health endpoints.", "SGLang")] = None
    admin_api_key: Annotated[str | None, _meta("Bearer key for administration.", "SGLang")] = None
    log_level: Annotated[Literal["debug", "info", "warning", "error"], _meta("What is logged.", "SGLang")] = (
        "info"
    )
    stream_interval: Annotated[int, _meta("Tokens between two streamed pieces.", "SGLang", ge=1)] = 1
    enable_cache_report: Annotated[bool, _meta("Cached tokens in usage.prompt_tokens_details.", "SGLang")] = (
        False
    )
    stream_response_default_include_usage: Annotated[
        bool, _meta("Streams end with usage even if not asked for.", "SGLang")
    ] = False
    tool_call_parser: Annotated[
        Literal["qwen", "qwen25", "hermes", "llama3", "mistral", "pythonic", "deepseekv3", "deepseekv31"]
        | None,
        _meta("Format in which the model calls functions; default: it is not given any.", "SGLang"),
    ] = None
    reasoning_parser: Annotated[
        Literal["deepseek-r1", "qwen3", "qwen3-thinking"] | None,
        _meta("Format of the model's thoughts; default: they are not told from the answer.", "SGLang"),
    ] = None
    skip_server_warmup: Annotated[bool, _meta("Report ready without a first small generation.", "SGLang")] = (
        False
    )
    startup_timeout: Annotated[
        float, _meta("Seconds a component may take to load and get ready.", "ours", gt=0.0)
    ] = 300.0
    enable_debugger: Annotated[
        bool,
        _meta("Let a step debugger attach: POST /sgviz/debug, and Engine.debugger with processes.", "ours"),
    ] = False
    shutdown_grace: Annotated[
        float, _meta("Seconds that running requests get to finish at a stop.", "ours", ge=0.0)
    ] = 30.0


class ObserveConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Events."""

    disable_events: Annotated[bool, _meta("Emit no events.", "ours")] = False
    event_capacity: Annotated[int, _meta("Newest events kept in memory.", "ours", ge=1000)] = 200_000
    record: Annotated[str | None, _meta("File (.sgv) to write all events to.", "ours")] = None
    tokenizer_metrics_custom_labels_header: Annotated[
        str,
        _meta("Header (a JSON object) in which a request brings labels for metrics.", "SGLang", min_length=1),
    ] = "x-custom-labels"
    tokenizer_metrics_allowed_custom_labels: Annotated[
        str | None,
        _meta("Labels that are taken from that header, separated by commas; default: none.", "SGLang"),
    ] = None

    @property
    def allowed_labels(self) -> tuple[str, ...]:
        """The names of `tokenizer_metrics_allowed_custom_labels`, one by one."""
        names = (self.tokenizer_metrics_allowed_custom_labels or "").split(",")
        return tuple(dict.fromkeys(name.strip() for name in names if name.strip()))


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All groups. Field names are unique over the groups, so a flat mapping names each setting."""

    model: ModelConfig = ModelConfig()
    sim: SimConfig = SimConfig()
    cache: CacheConfig = CacheConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    grammar: GrammarConfig = GrammarConfig()
    serve: ServeConfig = ServeConfig()
    observe: ObserveConfig = ObserveConfig()

    def flat(self) -> dict[str, str | int | float | bool | None]:
        """Every setting by its name."""
        return {name: getattr(getattr(self, group), name) for group, name in _homes().items_by_group()}

    def public(self) -> dict[str, str | int | float | bool | None]:
        """`flat` without secrets, for `/server_info` and recordings."""
        secret = ("api_key", "admin_api_key")
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
        _check_pattern(self.grammar)
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


def _check_pattern(grammar: GrammarConfig) -> None:
    name, pattern = "constrained_json_whitespace_pattern", grammar.constrained_json_whitespace_pattern
    if pattern is not None and grammar.grammar_backend != "none":
        from llguidance import LLMatcher  # it takes a while, and most settings name no pattern

        if error := LLMatcher.validate_grammar(LLMatcher.grammar_from_regex(pattern)):
            raise ConfigError(f"setting {name} = {pattern!r}: {' '.join(error.split())}", param=name)


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
