"""generate and stream from Python: the request, the way through the TokenizerManager, and the events of both ends.

An HTTP request's events come from `serving`; a call from Python has the same three: received, converted,
response finished. Imports: tokenizer_manager, serving (sampling, arrivals), messages, events.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from sgviz.engine.given import check_options
from sgviz.errors import BadRequest, SgvizError
from sgviz.events import Tracer
from sgviz.events.schema import ResponseFinished
from sgviz.messages import EmbeddingReqInput, GenerateReqInput, SamplingParams
from sgviz.messages.generate import new_rid, prompt_rids
from sgviz.messages.rids import check_rid
from sgviz.messages.sampling import DEFAULT_NEW_TOKENS
from sgviz.messages.session import session_params_of
from sgviz.serving.arrivals import Arrival, tell_converted, tell_received, text_chars
from sgviz.serving.sampling import native_sampling
from sgviz.serving.vector_base import refuse_aborted
from sgviz.tokenizer_manager import Output, TokenizerManager, raise_failure

OPTIONS = (
    "rid",
    "return_logprob",
    "top_logprobs_num",
    "logprob_start_len",
    "token_ids_logprob",
    "return_text_in_logprobs",
    "extra_key",
    "custom_logit_processor",
    "require_reasoning",
    "priority",
    "session_params",
    "routed_dp_rank",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "disagg_prefill_dp_rank",
)
PATH, ENCODE_PATH = "Engine.generate", "Engine.encode"
ENCODE_OPTIONS = ("rid", "dimensions", "extra_key", "priority", "routed_dp_rank")
CALLER_GONE = 499
MAX_SHOWN = 80
END = object()  # the last thing that `pump` puts
Params = dict[str, Any]


def native_request(
    prompt: str | list[str] | None,
    sampling_params: Params | list[Params] | None,
    *,
    stream: bool,
    input_ids: list[int] | list[list[int]] | None = None,
    **options: Any,
) -> GenerateReqInput:
    """A GenerateReqInput from the arguments of `Engine.generate`; it has a rid, or one a prompt.

    Raises:
        BadRequest: an option is unknown, or a prompt or a rid is not what it must be.
    """
    check_options("generate", options, OPTIONS)
    for each in sampling_params if isinstance(sampling_params, list) else [sampling_params or {}]:
        if not isinstance(each, dict):
            raise BadRequest(
                f"sampling_params must be a dict, or a list of them, got {_short(each)}",
                param="sampling_params",
            )
    params: SamplingParams | list[SamplingParams]
    if isinstance(sampling_params, list):
        params = [native_sampling(each) for each in sampling_params]
    else:
        params = native_sampling(sampling_params or {})
    _check_prompt(prompt, input_ids)
    options["session_params"] = session_params_of(options.get("session_params"))
    obj = GenerateReqInput(
        text=prompt,
        input_ids=input_ids,
        sampling_params=params,
        stream=stream,
        default_new_tokens=DEFAULT_NEW_TOKENS,
        **options,
    )
    obj.rid = _settle_rid(obj)
    return obj


def embedding_request(
    prompt: str | list[str] | None, *, input_ids: list[int] | list[list[int]] | None = None, **options: Any
) -> EmbeddingReqInput:
    """An EmbeddingReqInput from the arguments of `Engine.encode`. Raises BadRequest as `native_request` does."""
    check_options("encode", options, ENCODE_OPTIONS)
    _check_prompt(prompt, input_ids)
    obj = EmbeddingReqInput(text=prompt, input_ids=input_ids, **options)
    obj.rid = _settle_rid(obj)
    return obj


class PythonCalls:
    """The calls of one engine. Everything here runs in the engine's own loop.

    Args:
        trace: a tracer of their own, for that loop. model: its served name, for the events.
    """

    def __init__(self, manager: TokenizerManager, trace: Tracer, model: str) -> None:
        self._manager = manager
        self._trace = trace
        self._model = model

    async def whole(self, obj: GenerateReqInput) -> Output | list[Output]:
        """The one output of an unstreamed call. Raises what the engine ended it with."""
        async with aclosing(self.outputs(obj)) as outputs:
            async for output in outputs:
                return output
        raise SgvizError("the engine gave no answer")

    async def pump(self, obj: GenerateReqInput, put: Callable[[Any], object]) -> None:
        """Put every output, then perhaps an exception, then END."""
        try:
            async with aclosing(self.outputs(obj)) as outputs:
                async for output in outputs:
                    put(output)
        except Exception as error:
            put(error)
        finally:
            put(END)

    async def outputs(self, obj: GenerateReqInput) -> AsyncGenerator[Output | list[Output], None]:
        """The outputs as they come. However it ends, the end of each rid is told once."""
        rids = dict.fromkeys(self._begin(obj))
        status = CALLER_GONE
        try:
            async with aclosing(self._manager.generate_request(obj)) as items:
                async for item in items:
                    rids.update(dict.fromkeys(_ids(item)))
                    raise_failure(item)
                    if isinstance(obj, EmbeddingReqInput):
                        refuse_aborted(item if isinstance(item, list) else [item])
                    if not obj.stream:
                        status = 200  # its caller reads no further
                    yield item
            status = 200
        except (GeneratorExit, asyncio.CancelledError):
            raise
        except BaseException as error:
            status = error.status if isinstance(error, SgvizError) else SgvizError.status
            raise
        finally:
            self._end(rids, status)

    def _begin(self, obj: GenerateReqInput) -> list[str]:
        """The rids of the call, told as received."""
        assert obj.rid is not None
        rids = prompt_rids(obj.rid, None if obj.is_single else len(obj.prompts))
        obj.received_ns = self._trace.clock.now()
        arrival = Arrival(
            type=type(obj).__name__,
            path=ENCODE_PATH if isinstance(obj, EmbeddingReqInput) else PATH,
            stream=obj.stream,
            model=self._model,
            chars=text_chars(obj.prompts),
        )
        tell_received(self._trace, rids, arrival)
        tell_converted(self._trace, rids, obj)
        return rids

    def _end(self, rids: dict[str, None], status: int) -> None:
        if self._trace.on:
            for rid in rids:
                self._trace.emit(ResponseFinished(rid=rid, status=status))


def _check_prompt(prompt: object, input_ids: object) -> None:
    """The types; the rest is checked where HTTP requests are."""
    texts = prompt if isinstance(prompt, list) else [prompt]
    if prompt is not None and not all(isinstance(text, str) for text in texts):
        raise BadRequest(f"prompt must be a text or a list of texts, got {_short(prompt)}", param="prompt")
    if input_ids is not None and not isinstance(input_ids, list):
        raise BadRequest(f"input_ids must be a list, got {_short(input_ids)}", param="input_ids")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _settle_rid(obj: GenerateReqInput) -> str | list[str]:
    """The caller's own, or a fresh one a prompt."""
    if obj.rid is None:
        return new_rid() if obj.is_single else [new_rid() for _ in obj.prompts]
    for rid in obj.rid if isinstance(obj.rid, list) else [obj.rid]:
        check_rid(rid)
    return obj.rid


def _ids(item: Output | list[Output]) -> list[str]:
    return [output["meta_info"]["id"] for output in (item if isinstance(item, list) else [item])]
