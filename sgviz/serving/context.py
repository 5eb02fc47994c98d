"""What the HTTP layer is given: its collaborators as Protocols, the model's facts, keys and status.

Mirrors the state that SGLang's http_server keeps in a module-level global; here it is an argument of
`create_app`, so that two servers may live in one process.
Imports: messages, events.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import msgspec
from fastapi import FastAPI

from sgviz.config import HttpConfig
from sgviz.events import Tracer
from sgviz.messages import EmbeddingSpec, FlushCacheReqOutput, GenerateReqInput, GetInternalStateReqOutput
from sgviz.messages.flow import Activity, Load, PauseMode, UpdateWeightFromDiskReqOutput
from sgviz.serving.custom_labels import CustomLabels

# SGLang's public answer dict: {"text", "output_ids", "meta_info", "index"?}; it leaves by /generate as it is
EngineOutput = dict[str, Any]
IsDisconnected = Callable[[], Awaitable[bool]]
Scalar = str | int | float | bool | None


class Sessions(Protocol):
    """Conversations that the scheduler keeps the ids of. Both raise BadRequest."""

    async def open(
        self,
        capacity_of_str_len: int,
        session_id: str | None = None,
        *,
        streaming: bool = False,
        timeout: float | None = None,
    ) -> str: ...

    async def close(self, session_id: str) -> None: ...


class WeightsInUse(Protocol):
    """Which weights the engine runs with; `model_path` "" if it was not told."""

    model_path: str
    version: str


class Ranks(Protocol):
    """The schedulers behind the TokenizerManager; `out` are those that get no requests."""

    size: int

    @property
    def out(self) -> list[int]: ...


class ControlDesk(Protocol):
    """What operators ask of the engine; see the TokenizerManager's."""

    @property
    def weights(self) -> WeightsInUse: ...

    async def pause_generation(self, mode: PauseMode) -> int: ...

    async def continue_generation(self) -> None: ...

    async def update_weights_from_disk(
        self,
        model_path: str,
        load_format: str | None,
        *,
        flush_cache: bool,
        abort_all_requests: bool,
        weight_version: str | None,
    ) -> UpdateWeightFromDiskReqOutput: ...

    async def update_weight_version(self, new_version: str, abort_all_requests: bool) -> None: ...

    async def start_profile(
        self,
        output_dir: str | None,
        num_steps: int | None,
        activities: list[Activity] | None,
        *,
        with_stack: bool,
        record_shapes: bool,
        profile_id: str | None,
    ) -> str: ...

    async def stop_profile(self) -> str: ...

    async def slow_down(self, forward_sleep_time: float | None) -> None: ...

    async def get_loads(self) -> Mapping[int, Load]:
        """By data parallel rank; 0 where there is one."""
        ...


class TokenizerManager(Protocol):
    """The next stage. Its errors are those of `sgviz.errors`, also `ClientDisconnected`."""

    @property
    def control(self) -> ControlDesk: ...

    @property
    def ranks(self) -> Ranks: ...

    def generate_request(
        self, obj: GenerateReqInput, is_disconnected: IsDisconnected | None = None
    ) -> AsyncIterator[EngineOutput | list[EngineOutput]]:
        """Streamed: cumulative outputs, with `index` when there are several. Else one item: an output,
        or the list of a batch in the order prompt_no * n + sample_no. Closing it early aborts what runs."""
        ...

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None: ...

    async def flush_cache(self) -> FlushCacheReqOutput: ...

    async def get_internal_state(self, timeout: float) -> GetInternalStateReqOutput: ...

    async def health_generate(self, timeout: float) -> str | None:
        """The stage that gave no sign of life within `timeout` seconds of a small probe; None: all did."""
        ...

    @property
    def sessions(self) -> Sessions: ...

    def response_sent(self, rid: str, status: int) -> None:
        """The answer to `rid` ended; emits `response.finished`."""
        ...


class Tokenizer(Protocol):
    """What serving itself needs of the tokenizer: /tokenize, /detokenize and the echo of id prompts."""

    def encode(self, text: str, /, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: list[int], /, skip_special_tokens: bool = True) -> str: ...


class ChatTemplates(Protocol):
    def apply(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> list[int]:
        """Prompt ids of a conversation. Raises BadRequest if the template refuses it."""
        ...


class RequestLogSwitch(Protocol):
    def configure(
        self, on: bool | None = None, level: int | None = None, form: str | None = None
    ) -> dict[str, bool | int | str]:
        """Change what is given of the request log; how it is then."""
        ...


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What clients may ask of the model; `default_sampling` comes from its generation_config."""

    served_model_name: str
    model_path: str
    context_len: int
    vocab_size: int
    version: str
    tokenizer_path: str | None = None
    eos_token_ids: tuple[int, ...] = ()
    is_generation: bool = True
    embedding: EmbeddingSpec | None = None
    default_sampling: Mapping[str, float] = {}


class Keys(msgspec.Struct, frozen=True, kw_only=True):
    api_key: str | None = None
    admin_api_key: str | None = None


class ServerState(StrEnum):
    STARTING = "starting"
    UP = "up"
    STOPPING = "stopping"
    UNHEALTHY = "unhealthy"


@dataclass(slots=True)
class ServerStatus:
    """Whether requests are taken. Whoever owns the engine sets it; `message` says more about a bad state."""

    state: ServerState = ServerState.STARTING
    message: str = ""


@dataclass(slots=True, kw_only=True)
class ServingContext:
    """Everything `create_app` needs.

    Attributes:
        settings: for /server_info, as they are: without secrets.
        mounts: called with the app before it starts, to add routes (/metrics, /sgviz, /viz).
        enable_cache_report: cached tokens in `usage.prompt_tokens_details`.
        default_include_usage: streams end with usage even if not asked for.
        tool_call_parser, reasoning_parser: formats of the model's calls and thoughts; None: not told apart.
        health_generation: /health sends a small request through the pipeline.
        custom_labels: which labels for metrics a request may bring.
        health_timeout: seconds a probe or a question to the scheduler may take.
        http: limits of bodies, and which web pages may call.
        request_log: what /configure_logging changes.
    """

    tokenizer_manager: TokenizerManager
    tokenizer: Tokenizer
    templates: ChatTemplates
    facts: ModelFacts
    trace: Tracer
    status: ServerStatus
    settings: Mapping[str, Scalar] = field(default_factory=dict)
    keys: Keys = field(default_factory=Keys)
    mounts: Sequence[Callable[[FastAPI], None]] = ()
    enable_cache_report: bool = False
    default_include_usage: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    health_generation: bool = True
    health_timeout: float = 20.0
    http: HttpConfig = field(default_factory=HttpConfig)
    request_log: RequestLogSwitch | None = None
    custom_labels: CustomLabels = field(default_factory=CustomLabels)
