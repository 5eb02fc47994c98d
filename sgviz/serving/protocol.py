"""The request bodies, typed. null means absent, unknown fields are ignored, and an error names its field.

Mirrors SGLang's entrypoints/openai/protocol; field names and defaults are its own. Fields of features
that do not exist yet are not here but in `later`.
Imports: errors.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from sgviz.errors import BadRequest
from sgviz.serving.response_format import ResponseFormat, Schema
from sgviz.serving.tools import MessageToolCall, Tool, ToolChoice

T = TypeVar("T", bound=msgspec.Struct)
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
MAX_TOP_LOGPROBS = 20

_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(?P<name>.*)`")


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ContentPart(msgspec.Struct, frozen=True):
    """One part of a message's content; all but `text` parts belong to later features."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    reasoning_content: str | None = None

    @property
    def text(self) -> str:
        """The content as one string."""
        if isinstance(self.content, list):
            return "".join(part.text or "" for part in self.content)
        return self.content or ""


class OpenAIRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What chat and text completions have in common."""

    model: str | None = None
    rid: str | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    priority: Int64 | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Int64 | None = None
    max_tokens: Int64 | None = None
    min_tokens: Int64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    stream_interval: Int64 | None = None
    response_format: ResponseFormat | None = None
    json_schema: str | Schema | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    custom_logit_processor: str | None = None
    custom_params: dict[str, Any] | None = None
    routed_dp_rank: Int64 | None = None
    data_parallel_rank: Int64 | None = None
    bootstrap_host: str | list[str] | None = None
    bootstrap_port: int | list[int | None] | None = None
    bootstrap_room: int | list[int] | None = None
    disagg_prefill_dp_rank: int | None = None


class ChatCompletionRequest(OpenAIRequest, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    continue_final_message: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None


class CompletionRequest(OpenAIRequest, frozen=True, kw_only=True):
    """POST /v1/completions. `prompt`: str, [str], [int] or [[int]], settled by `prompt_of`."""

    prompt: str | list[Any]
    echo: bool | None = None
    best_of: Int64 | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /generate; SGLang's native body, of which GenerateReqInput is made."""

    text: str | list[str] | None = None
    input_ids: list[Any] | None = None
    rid: str | list[str] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    stream: bool | None = None
    return_logprob: bool | list[bool] | None = None
    top_logprobs_num: Int64 | list[Int64] | None = None
    logprob_start_len: Int64 | list[Int64] | None = None
    token_ids_logprob: list[Any] | None = None
    return_text_in_logprobs: bool | None = None
    priority: Int64 | None = None
    session_params: dict[str, Any] | list[dict[str, Any] | None] | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    require_reasoning: bool | None = None
    custom_logit_processor: str | None = None
    custom_params: dict[str, Any] | None = None
    routed_dp_rank: Int64 | None = None
    data_parallel_rank: Int64 | None = None
    bootstrap_host: str | list[str] | None = None
    bootstrap_port: int | list[int | None] | None = None
    bootstrap_room: int | list[int] | None = None
    disagg_prefill_dp_rank: int | None = None


class AbortRequest(msgspec.Struct, frozen=True):
    """POST /abort_request."""

    rid: str | None = None
    abort_all: bool | None = None


class ParseFunctionCallRequest(msgspec.Struct, frozen=True):
    """POST /parse_function_call: a finished text, and the functions it may call."""

    text: str
    tools: list[Tool]
    tool_call_parser: str | None = None


class SeparateReasoningRequest(msgspec.Struct, frozen=True):
    """POST /separate_reasoning: a finished text."""

    text: str
    reasoning_parser: str | None = None


class TokenizeRequest(msgspec.Struct, frozen=True):
    """POST /v1/tokenize."""

    prompt: str | list[str]
    model: str | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True):
    """POST /v1/detokenize; `tokens`: [int] or [[int]]."""

    tokens: list[Any]
    model: str | None = None
    skip_special_tokens: bool | None = None


def parse(kind: type[T], body: dict[str, Any], prefix: str = "") -> T:
    """`body` as a `kind`.

    Raises:
        BadRequest: the first ill-typed field, by its path (below `prefix`), what it is and what is allowed.
    """
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise _named(str(error), prefix) from None


def _named(text: str, prefix: str) -> BadRequest:
    found = _AT.match(text)
    what, path = (found["what"], found["path"] or "") if found else (text, "")
    missing = _MISSING.search(what)
    if missing:
        path, what = f"{path}.{missing['name']}", "this field is required"
    where = (prefix + path).lstrip(".")
    what = what[0].lower() + what[1:].replace(" | null", "")
    return BadRequest(f"{where}: {what}" if where else what, param=where or None)


def is_ids(value: object) -> bool:
    """Whether `value` is a list of integers (bool is none)."""
    return isinstance(value, list) and all(type(item) is int for item in value)


def ids_of(value: list[Any], name: str) -> list[int] | list[list[int]]:
    """A flat list of token ids, or a list of such lists.

    Raises:
        BadRequest: it is empty, or the first item that does not fit.
    """
    if not value:
        raise BadRequest(f"{name} must not be empty", param=name)
    if type(value[0]) is int:
        _check_items(value, lambda item: type(item) is int, "an integer", name)
    else:
        _check_items(value, is_ids, "a list of integers", name)
    return value


def prompt_of(value: str | list[Any], name: str = "prompt") -> tuple[str, Any]:
    """`("text", str | [str])` or `("input_ids", [int] | [[int]])`; raises BadRequest for anything else."""
    if isinstance(value, str):
        return "text", value
    if value and isinstance(value[0], str):
        _check_items(value, lambda item: isinstance(item, str), "a string", name)
        return "text", value
    return "input_ids", ids_of(value, name)


def batch_size(prompt: str | list[Any] | None) -> int | None:
    """The number of prompts of a batch, by its first item; None for a single prompt."""
    return len(prompt) if isinstance(prompt, list) and prompt and type(prompt[0]) is not int else None


def _check_items(items: list[Any], fits: Any, wanted: str, name: str) -> None:
    for number, item in enumerate(items):
        if not fits(item):
            path = f"{name}[{number}]"
            shown = repr(item)
            shown = shown if len(shown) <= 60 else shown[:57] + "..."
            raise BadRequest(f"{path}: expected {wanted}, got {shown}", param=path)
