"""From a body's fields to SamplingParams: request value, else the model's default, else SGLang's.

Ranges are not checked here: `SamplingParams.verify` does it once, in the TokenizerManager.
Imports: errors, messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from sgviz.errors import BadRequest, suggest
from sgviz.messages import SamplingParams
from sgviz.messages.sampling import TOP_K_ALL
from sgviz.serving.later import TABLE, On, refuse_later
from sgviz.serving.protocol import OpenAIRequest, parse
from sgviz.serving.response_format import as_text, grammar_of

# body field -> SamplingParams field, where they differ
_RENAMED = {"min_tokens": "min_new_tokens", "seed": "sampling_seed"}
_COPIED = (
    "n", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "logit_bias", "stop", "stop_token_ids", "ignore_eos", "no_stop_trim",
    "skip_special_tokens", "spaces_between_special_tokens", "stream_interval", "min_tokens", "seed", "custom_params",
)  # fmt: skip
NATIVE_FIELDS = SamplingParams.__struct_fields__
# the other way round, for what is found wrong behind this stage
SAMPLING_NAMES = MappingProxyType(
    {**{ours: body for body, ours in _RENAMED.items()}, "max_new_tokens": "max_tokens"}
)
NATIVE_NAMES = MappingProxyType({name: f"sampling_params.{name}" for name in NATIVE_FIELDS})
JSON_FIELDS = ("json_schema", "structural_tag")  # a text of JSON, or the JSON itself
_INT64_FIELDS = ("sampling_seed", "stream_interval", "max_new_tokens", "min_new_tokens")


def openai_sampling(
    request: OpenAIRequest, max_new_tokens: int | None, defaults: Mapping[str, float]
) -> SamplingParams:
    """The sampling of a chat or text completion; `defaults` come from the model's generation_config."""
    given = {_RENAMED.get(name, name): getattr(request, name) for name in _COPIED}
    values = {name: value for name, value in given.items() if value is not None}
    return _build({**defaults, **values, **grammar_of(request), "max_new_tokens": max_new_tokens}, "")


def native_sampling(params: dict[str, Any], prefix: str = "sampling_params") -> SamplingParams:
    """The sampling of /generate. An unknown name is refused: it is a mistyped setting."""
    given = {name: value for name, value in params.items() if value is not None}
    refuse_later(given, On.SAMPLING, f"{prefix}.")
    known = {*NATIVE_FIELDS, *(line.field for line in TABLE if line.on & On.SAMPLING)}
    for name in given:
        if name not in known:
            hint = suggest(name, NATIVE_FIELDS)
            raise BadRequest(f"{prefix}: unknown sampling parameter {name!r}{hint}", param=f"{prefix}.{name}")
    # absent is not SGLang's default yet: near the end of the context that default is cut, a given limit refused
    values = {
        "max_new_tokens": None,
        **{name: value for name, value in given.items() if name in NATIVE_FIELDS},
        **{name: as_text(given[name]) for name in JSON_FIELDS if isinstance(given.get(name), dict | bool)},
    }
    return _build(values, f"{prefix}.")


def _build(values: dict[str, Any], prefix: str) -> SamplingParams:
    top_k = values.get("top_k")
    if isinstance(top_k, int) and top_k > TOP_K_ALL:
        values["top_k"] = TOP_K_ALL
    params = parse(SamplingParams, values, prefix.rstrip("."))
    for name in _INT64_FIELDS:
        value = getattr(params, name)
        if value is not None and not -(2**63) <= value < 2**63:
            raise BadRequest(f"{prefix}{name}: {value} does not fit into 64 bits", param=prefix + name)
    return params
