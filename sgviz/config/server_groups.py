"""Settings of the server and of what it tells: HTTP, events, metrics.

Imports: config.field.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sgviz.config.field import field_meta


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP server."""

    host: Annotated[str, field_meta("Address to listen on.", "SGLang")] = "127.0.0.1"
    port: Annotated[int, field_meta("Port to listen on; 0 takes a free one.", "SGLang", ge=0, le=65535)] = (
        30000
    )
    api_key: Annotated[str | None, field_meta("Bearer key for all but the health endpoints.", "SGLang")] = (
        None
    )
    admin_api_key: Annotated[str | None, field_meta("Bearer key for administration.", "SGLang")] = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], field_meta("What is logged.", "SGLang")
    ] = "info"
    stream_interval: Annotated[int, field_meta("Tokens between two streamed pieces.", "SGLang", ge=1)] = 1
    enable_cache_report: Annotated[
        bool, field_meta("Cached tokens in usage.prompt_tokens_details.", "SGLang")
    ] = False
    stream_response_default_include_usage: Annotated[
        bool, field_meta("Streams end with usage even if not asked for.", "SGLang")
    ] = False
    tool_call_parser: Annotated[
        Literal["qwen", "qwen25", "hermes", "llama3", "mistral", "pythonic", "deepseekv3", "deepseekv31"]
        | None,
        field_meta("Format in which the model calls functions; default: it is not given any.", "SGLang"),
    ] = None
    reasoning_parser: Annotated[
        Literal["deepseek-r1", "qwen3", "qwen3-thinking"] | None,
        field_meta("Format of the model's thoughts; default: they are not told from the answer.", "SGLang"),
    ] = None
    tokenizer_worker_num: Annotated[
        int,
        field_meta(
            "Processes that take HTTP requests and tokenize, on one port (sgviz serve only).",
            "SGLang",
            ge=1,
            le=64,
        ),
    ] = 1
    skip_server_warmup: Annotated[
        bool, field_meta("Report ready without a first small generation.", "SGLang")
    ] = False
    startup_timeout: Annotated[
        float, field_meta("Seconds a component may take to load and get ready.", "ours", gt=0.0)
    ] = 300.0
    enable_debugger: Annotated[
        bool,
        field_meta(
            "Let a step debugger attach: POST /sgviz/debug, and Engine.debugger with processes.", "ours"
        ),
    ] = False
    shutdown_grace: Annotated[
        float, field_meta("Seconds that running requests get to finish at a stop.", "ours", ge=0.0)
    ] = 30.0


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the HTTP server, browsers' access to it, and TLS."""

    max_body_mb: Annotated[
        float, field_meta("Largest request body in MiB; a longer one is answered with 413.", "ours", gt=0.0)
    ] = 64.0
    read_timeout: Annotated[
        float,
        field_meta(
            "Seconds a client may take to send a request's head, and its whole body, which gets one more for every "
            "KiB that has come (408).",
            "ours",
            gt=0.0,
        ),
    ] = 30.0
    timeout_keep_alive: Annotated[
        float,
        field_meta(
            "Seconds an idle connection is kept open.",
            "SGLang: SGLANG_TIMEOUT_KEEP_ALIVE, 5; ours 60",
            gt=0.0,
        ),
    ] = 60.0
    request_timeout: Annotated[
        Annotated[float, Meta(gt=0.0)] | None,
        field_meta(
            "Seconds from a request's arrival after which it ends with 503, waiting or running; default: never.",
            "SGLang: SGLANG_REQ_WAITING_TIMEOUT and SGLANG_REQ_RUNNING_TIMEOUT",
        ),
    ] = None
    health_timeout: Annotated[
        float,
        field_meta(
            "Seconds within which every component must be heard for /health to be good.",
            "SGLang: SGLANG_HEALTH_CHECK_TIMEOUT",
            gt=0.0,
        ),
    ] = 20.0
    cors_origins: Annotated[
        str | None,
        field_meta(
            "Origins of web pages that may call the server, separated by commas, or *; default: its own only.",
            "SGLang: all",
        ),
    ] = None
    ssl_keyfile: Annotated[str | None, field_meta("Private key (PEM) for https.", "SGLang")] = None
    ssl_certfile: Annotated[
        str | None, field_meta("Certificate (PEM) for https, with those that vouch for it.", "SGLang")
    ] = None
    ssl_ca_certs: Annotated[
        str | None,
        field_meta(
            "Certificates (PEM) by one of which clients must be vouched for; default: any client.", "SGLang"
        ),
    ] = None
    ssl_keyfile_password: Annotated[str | None, field_meta("Password of the private key.", "SGLang")] = None

    @property
    def origins(self) -> tuple[str, ...]:
        """The entries of `cors_origins`, one by one."""
        return tuple(
            dict.fromkeys(part for each in (self.cors_origins or "").split(",") if (part := each.strip()))
        )


class ObserveConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Events and logs."""

    disable_events: Annotated[bool, field_meta("Emit no events.", "ours")] = False
    event_capacity: Annotated[int, field_meta("Newest events kept in memory.", "ours", ge=1000)] = 200_000
    log_requests: Annotated[
        bool, field_meta("Log a line when a request comes, and one when it ends.", "SGLang")
    ] = False
    log_requests_level: Annotated[
        int,
        field_meta(
            "What they tell: 0 counts and reasons, 1 also sampling parameters, 2 texts and ids in part, 3 whole.",
            "SGLang",
            ge=0,
            le=3,
        ),
    ] = 2
    log_requests_format: Annotated[
        Literal["text", "json"], field_meta("How these lines are written.", "SGLang")
    ] = "text"
    crash_dump_folder: Annotated[
        str | None,
        field_meta(
            "Folder for the last events and the live requests (.sgv and .json) when the engine dies; default: no dump.",
            "SGLang",
        ),
    ] = None
    record: Annotated[str | None, field_meta("File (.sgv) to write all events to.", "ours")] = None
    tokenizer_metrics_custom_labels_header: Annotated[
        str,
        field_meta(
            "Header (a JSON object) in which a request brings labels for metrics.", "SGLang", min_length=1
        ),
    ] = "x-custom-labels"
    tokenizer_metrics_allowed_custom_labels: Annotated[
        str | None,
        field_meta("Labels that are taken from that header, separated by commas; default: none.", "SGLang"),
    ] = None

    @property
    def allowed_labels(self) -> tuple[str, ...]:
        """The names of `tokenizer_metrics_allowed_custom_labels`, one by one."""
        names = (self.tokenizer_metrics_allowed_custom_labels or "").split(",")
        return tuple(dict.fromkeys(name.strip() for name in names if name.strip()))
