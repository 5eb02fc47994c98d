"""Fields of features that come later. A value that would change the answer is refused by name.

Unknown fields are ignored; these are known, and ignoring them would give a wrong answer without a word.
A feature that is built takes its line out of the table. SGLang answers such fields per feature.
Imports: errors.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Flag, auto
from typing import Any

import msgspec

from sgviz.errors import BadRequest

Body = dict[str, Any]


class On(Flag):
    """Which bodies a field belongs to."""

    CHAT = auto()
    COMPLETION = auto()
    GENERATE = auto()
    SAMPLING = auto()  # the sampling_params object of /generate
    OPENAI = CHAT | COMPLETION
    ALL = CHAT | COMPLETION | GENERATE


def _given(value: Any, body: Body) -> bool:
    return value is not None and value is not False and value not in ("", [], {})


def _not_none(value: Any, body: Body) -> bool:
    return value is not None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _chooses_tools(value: Any, body: Body) -> bool:
    return value not in (None, "none", "auto")


def _beyond_text(value: Any, body: Body) -> bool:
    return value is not None and value != ["text"]


def _more_than_n(value: Any, body: Body) -> bool:
    n = body.get("n") or 1
    return _is_number(value) and _is_number(n) and value > n


class Later(msgspec.Struct, frozen=True):
    """One field: where it may stand, the feature it belongs to, and when its value changes the answer."""

    field: str
    on: On
    feature: str
    changes: Callable[[Any, Body], bool] = _given


TABLE: tuple[Later, ...] = (
    Later("tools", On.COMPLETION, "function calling without chat"),
    Later("tool_choice", On.COMPLETION, "function calling without chat", _chooses_tools),
    Later("web_search_options", On.OPENAI, "web search", _not_none),
    Later("functions", On.OPENAI, "the older form of function calling; tools is supported"),
    Later("function_call", On.OPENAI, "the older form of function calling", _chooses_tools),
    Later("guided_json", On.OPENAI, "structured output under this name; json_schema is supported"),
    Later("guided_regex", On.OPENAI, "structured output under this name; regex is supported"),
    Later("guided_choice", On.OPENAI, "structured output under this name; regex is supported"),
    Later("guided_grammar", On.OPENAI, "structured output under this name; ebnf is supported"),
    Later("structured_outputs", On.OPENAI, "structured output under this name; response_format is supported"),
    Later("stop_regex", On.OPENAI | On.SAMPLING, "stopping at a regular expression"),
    Later("modalities", On.OPENAI, "audio output", _beyond_text),
    Later("audio", On.OPENAI, "audio output"),
    Later("images", On.OPENAI, "multimodal input"),
    Later("image_data", On.ALL, "multimodal input"),
    Later("video_data", On.ALL, "multimodal input"),
    Later("audio_data", On.ALL, "multimodal input"),
    Later("input_ids", On.OPENAI, "token ids beside messages or prompt"),
    Later("input_embeds", On.ALL, "embeddings as input"),
    Later("prompt_embeds", On.COMPLETION, "embeddings as input"),
    Later("suffix", On.COMPLETION, "filling in the middle"),
    Later("best_of", On.COMPLETION, "best_of above n", _more_than_n),
    Later("return_prompt_token_ids", On.ALL, "prompt ids in the answer"),
    Later("multi_item_delimiter_indices", On.ALL, "multi-item scoring"),
    Later("token_indices_to_pool", On.ALL, "pooling"),
    Later(
        "require_reasoning", On.OPENAI, "thoughts by request; /generate has it, and the chat template here"
    ),
    Later("background", On.ALL, "requests that go on without their client"),
    Later("lora_path", On.ALL, "LoRA adapters"),
    Later("lora_id", On.ALL, "LoRA adapters"),
    Later("session_params", On.OPENAI, "sessions here; /generate has them"),
    Later("session_id", On.ALL, "sessions"),
    Later("return_hidden_states", On.ALL, "hidden states"),
    Later("return_routed_experts", On.ALL, "experts"),
    Later("max_thinking_tokens", On.ALL, "reasoning budgets", _not_none),
    Later("thinking_budget", On.ALL, "reasoning budgets", _not_none),
)


def refuse_later(body: Body, on: On, prefix: str = "") -> None:
    """Raise BadRequest for the first field of `body` whose feature does not exist yet."""
    for line in TABLE:
        if line.on & on and line.field in body and line.changes(body[line.field], body):
            name = prefix + line.field
            raise BadRequest(f"{name} is not supported yet ({line.feature})", param=name)
