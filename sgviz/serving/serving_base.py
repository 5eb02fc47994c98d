"""The way of every generating request through this stage: parse, validate, convert, then one of two branches.

Mirrors SGLang's `OpenAIServingBase.handle_request`; /generate takes the same way here. Simplified: routing
headers and custom labels are not read.
Imports: errors, messages, events.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from fastapi import Request
from starlette.responses import Response

from sgviz.errors import NotFound, SgvizError, Unavailable
from sgviz.events.schema import RequestConverted, RequestReceived
from sgviz.messages import GenerateReqInput
from sgviz.serving.context import EngineOutput, ModelFacts, ServerState, ServerStatus, ServingContext
from sgviz.serving.http_errors import EngineFailure, as_sgviz_error, error_body, error_response
from sgviz.serving.protocol import GenerateRequest, OpenAIRequest, parse
from sgviz.serving.reply import BodyResponse, ClientWatch, EngineStream, EventStream, Reply

R = TypeVar("R", bound=OpenAIRequest | GenerateRequest)
DEFAULT_MODEL_NAME = "default"  # SGLang's name for "whatever this server serves"
DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Exchange(Generic[R]):
    """One request under way, with all that its answer needs. `rid` is also the id clients see."""

    request: R
    rid: str
    obj: GenerateReqInput
    reply: Reply
    source: EngineStream
    created: int


class AnswerStream(Protocol):
    """Turns engine outputs into the bytes of SSE events."""

    def events_of(self, output: EngineOutput) -> bytes:
        """The events that `output` gives rise to; none: empty."""
        ...

    def closing(self) -> bytes:
        """The events after the last output."""
        ...


class ServingBase(ABC, Generic[R]):
    """`handle_request` and its two branches; a subclass knows one endpoint's body and answer."""

    kind: type[R]
    type_name: str

    def __init__(self, context: ServingContext) -> None:
        self.context = context

    async def handle_request(self, body: dict[str, Any], http: Request) -> Response:
        """Answer `body`, a JSON object. Errors become answers; nothing is raised but a cancellation."""
        received_ns = self.context.trace.clock.now()
        reply: Reply | None = None
        try:
            refuse_unless_up(self.context.status)
            request = parse(self.kind, body)
            rids = self._rids(request)
            reply = Reply(self.context, rids)
            self._trace_received(request, rids, http.url.path)
            self._validate_request(request, body)
            obj = await self._convert_to_internal_request(request, rids)
            obj.received_ns = received_ns
            self._trace_converted(obj, rids)
            return await self._generate(request, rids[0], obj, reply, http)
        except asyncio.CancelledError:
            if self.context.status.state is not ServerState.STOPPING:
                raise
            return self._failed(Unavailable("the server is shutting down"), reply)
        except Exception as error:
            return self._failed(error, reply)

    @abstractmethod
    def _rids(self, request: R) -> list[str]:
        """The rids this request is known by; the first one names the answer."""

    @abstractmethod
    def _describe(self, request: R) -> tuple[str, int, int]:
        """`(model, messages, characters)` for the event."""

    @abstractmethod
    def _validate_request(self, request: R, body: dict[str, Any]) -> None:
        """Raise SgvizError for what can be seen to be wrong without the engine."""

    @abstractmethod
    async def _convert_to_internal_request(self, request: R, rids: list[str]) -> GenerateReqInput: ...

    @abstractmethod
    def _whole_answer(self, exchange: Exchange[R], outputs: list[EngineOutput]) -> Any:
        """The JSON body of a non-streamed answer."""

    @abstractmethod
    def _open_stream(self, exchange: Exchange[R]) -> AnswerStream: ...

    async def _generate(
        self, request: R, rid: str, obj: GenerateReqInput, reply: Reply, http: Request
    ) -> Response:
        watch = ClientWatch(http.receive)
        items = self.context.tokenizer_manager.generate_request(obj, watch.is_disconnected)
        source = EngineStream(items, reply)
        exchange = Exchange(request, rid, obj, reply, source, int(time.time()))
        try:
            # awaited before any status goes out, so that an early error still gets its own
            first = await watch.race(source.next())
            if not first:
                raise EngineFailure("the engine gave no answer", 500, SgvizError.type)
            if obj.stream:
                return self._handle_streaming_request(exchange, first, watch)
            response = self._handle_non_streaming_request(exchange, first)
        except BaseException:
            watch.close()
            await source.close()
            raise
        watch.close()
        await source.close()
        return response

    def _handle_non_streaming_request(self, exchange: Exchange[R], outputs: list[EngineOutput]) -> Response:
        content = msgspec.json.encode(self._whole_answer(exchange, outputs))
        for number, output in enumerate(outputs):
            exchange.reply.sent(output["meta_info"]["id"], number, "body", len(output.get("text") or ""))
        return BodyResponse(content, 200, exchange.reply)

    def _handle_streaming_request(
        self, exchange: Exchange[R], first: list[EngineOutput], watch: ClientWatch
    ) -> Response:
        stopping = error_event(Unavailable("the server is shutting down"))
        events = self._events(exchange, first)
        return EventStream(events, exchange.source, watch, exchange.reply, stopping)

    async def _events(
        self, exchange: Exchange[R], outputs: list[EngineOutput]
    ) -> AsyncGenerator[bytes, None]:
        stream = self._open_stream(exchange)
        try:
            while outputs:
                for output in outputs:
                    if events := stream.events_of(output):
                        yield events
                outputs = await exchange.source.next()
            yield stream.closing()
        except Exception as failure:
            error = as_sgviz_error(failure)
            exchange.reply.status = error.status
            exchange.reply.sent_error(error.message)
            yield error_event(error)

    def _failed(self, failure: Exception, reply: Reply | None) -> Response:
        error = as_sgviz_error(failure)
        if reply is None:
            return error_response(error)
        reply.sent_error(error.message)
        return BodyResponse(msgspec.json.encode(error_body(error)), error.status, reply)

    def _trace_received(self, request: R, rids: list[str], path: str) -> None:
        trace = self.context.trace
        if not trace.on:
            return
        model, messages, chars = self._describe(request)
        for rid in rids:
            trace.emit(
                RequestReceived(
                    rid=rid,
                    type=self.type_name,
                    path=path,
                    stream=bool(request.stream),
                    model=model,
                    messages=messages,
                    chars=chars,
                )
            )

    def _trace_converted(self, obj: GenerateReqInput, rids: list[str]) -> None:
        trace = self.context.trace
        if not trace.on:
            return
        kind, size = _prompt_size(obj)
        listed = obj.sampling_params if isinstance(obj.sampling_params, list) else [obj.sampling_params]
        params = listed[0]
        for rid in rids:
            trace.emit(
                RequestConverted(
                    rid=rid,
                    prompt_kind=kind,
                    size=size,
                    max_new_tokens=params.max_new_tokens,
                    temperature=params.temperature,
                    top_p=params.top_p,
                    top_k=params.top_k,
                    stop=params.stop_strings,
                )
            )


def _prompt_size(obj: GenerateReqInput) -> tuple[str, int]:
    """The kind of prompt and its characters or ids, over the whole batch."""
    if obj.text is not None:
        return "text", len(obj.text) if isinstance(obj.text, str) else sum(map(len, obj.text))
    rows = obj.input_ids or []
    return "input_ids", sum(len(row) if isinstance(row, list) else 1 for row in rows)


def refuse_unless_up(status: ServerStatus) -> None:
    """Raise Unavailable while the server starts, stops or is broken."""
    if status.state != ServerState.UP:
        detail = f": {status.message}" if status.message else ""
        raise Unavailable(f"the server is {status.state}{detail}")


def check_model(name: str | None, facts: ModelFacts) -> None:
    """Raise NotFound unless `name` is absent or the served model."""
    if name not in (None, DEFAULT_MODEL_NAME, facts.served_model_name):
        served = facts.served_model_name
        raise NotFound(f"the model {name!r} does not exist; this server serves {served!r}", param="model")


def extra_key_of(request: OpenAIRequest | GenerateRequest) -> str | None:
    """The name of the prefix cache's compartment, or None for the common one."""
    return (request.cache_salt or "") + (request.extra_key or "") or None


def sse(content: Any) -> bytes:
    """One SSE event with `content` as JSON."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def error_event(error: SgvizError) -> bytes:
    """What a stream ends with when it fails; no [DONE] follows."""
    return sse(error_body(error))
