"""The events of a request's arrival, one pair a prompt: HTTP requests and calls from Python tell them alike.

SGLang has no counterpart. Imports: errors, events, messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from sgviz.errors import SgvizError
from sgviz.events import Tracer
from sgviz.events.schema import RequestConverted, RequestReceived, RequestRefused
from sgviz.messages import EmbeddingReqInput, GenerateReqInput
from sgviz.serving.custom_labels import Labels


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """What `request.received` says of a request. `chars`: by prompt, of its text (0 for ids)."""

    type: str
    path: str
    stream: bool
    model: str
    chars: Sequence[int]
    messages: int = 0


def tell_received(trace: Tracer, rids: Sequence[str], arrival: Arrival, labels: Labels = ()) -> None:
    """`request.received` for every rid. `labels`: those for metrics that the request brought."""
    if not trace.on:
        return
    for number, rid in enumerate(rids):
        trace.emit(
            RequestReceived(
                rid=rid,
                type=arrival.type,
                path=arrival.path,
                stream=arrival.stream,
                model=arrival.model,
                messages=arrival.messages,
                # of a request that is wrong the rids may be more than the prompts
                chars=arrival.chars[number] if number < len(arrival.chars) else 0,
                labels=labels,
            )
        )


def tell_converted(trace: Tracer, rids: Sequence[str], obj: GenerateReqInput) -> None:
    """`request.converted` for every rid, each with its own prompt and sampling."""
    if not trace.on:
        return
    prompts, params = obj.prompts, obj.sampling_params
    each = params if isinstance(params, list) else [params] * len(prompts)
    for rid, prompt, param in zip(rids, prompts, each):
        trace.emit(
            RequestConverted(
                rid=rid,
                prompt_kind="text" if isinstance(prompt, str) else "input_ids",
                # anything else is refused in a moment
                size=len(prompt) if isinstance(prompt, str | list) else 0,
                max_new_tokens=obj.default_new_tokens
                if param.max_new_tokens is None
                else param.max_new_tokens,
                temperature=param.temperature,
                top_p=param.top_p,
                top_k=param.top_k,
                stop=param.stop_strings,
                embedding=isinstance(obj, EmbeddingReqInput),
            )
        )


def tell_refused(trace: Tracer, rids: Iterable[str], error: SgvizError) -> None:
    """`request.refused` for every rid: serving takes none of them."""
    if trace.on:
        for rid in rids:
            trace.emit(RequestRefused(rid=rid, where="serving", status=error.status, why=error.message))


def text_chars(prompts: Sequence[object]) -> list[int]:
    """Characters of each prompt that is a text, 0 for others."""
    return [len(prompt) if isinstance(prompt, str) else 0 for prompt in prompts]
