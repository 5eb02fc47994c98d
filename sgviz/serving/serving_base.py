"""The way of every generating request through this stage: parse, validate, convert, then one of two branches.

Mirrors SGLang's `OpenAIServingBase.handle_request`; /generate takes the same way here.
Imports: errors, messages, events.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from fastapi import Request
from starlette.responses import Response

from sgviz.errors import BadRequest, NotFound, SgvizError, Unavailable
from sgviz.messages import GenerateReqInput
from sgviz.messages.generate import new_rid, prompt_rids
from sgviz.messages.rids import check_rid
from sgviz.serving.arrivals import Arrival, tell_converted, tell_received
from sgviz.serving.context import EngineOutput, ModelFacts, ServerState, ServerStatus, ServingContext
from sgviz.serving.http_errors import as_sgviz_error, error_body
from sgviz.serving.protocol import GenerateRequest, OpenAIRequest, parse
from sgviz.serving.reply import BodyResponse, ClientWatch, EngineStream, EventStream, Reply
from sgviz.serving.routing import asked_rank, take_meeting
from sgviz.serving.vector_protocol import VectorRequest

R = TypeVar("R", bound=msgspec.Struct)
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
    # names of the body for fields of GenerateReqInput and SamplingParams, where they differ
    public_names: Mapping[str, str]

    def __init__(self, context: ServingContext) -> None:
        self.context = context

    async def handle_request(self, body: dict[str, Any], http: Request) -> Response:
        """Answer `body`, a JSON object. Errors become answers; nothing is raised but a cancellation."""
        received_ns = self.context.trace.clock.now()
        reply: Reply | None = None
        try:
            refuse_unless_up(self.context.status)
            request = parse(self.kind, body)
            rid = self._rid(request)
            for each in [rid] if isinstance(rid, str) else rid:
                check_rid(each)
            rids = prompt_rids(rid, self._batch_size(request))
            reply = Reply(self.context, rids)
            labels = self.context.custom_labels.of(http.headers)
            tell_received(self.context.trace, rids, self._arrival(request, http.url.path), labels)
            self._validate_request(request, body)
            rank = asked_rank(http.headers, request)
            obj = await self._convert_to_internal_request(request)
            obj.routed_dp_rank = rank
            take_meeting(request, obj)
            obj.rid, obj.received_ns = rid, received_ns
            tell_converted(self.context.trace, rids, obj)
            return await self._generate(request, rid if isinstance(rid, str) else rid[0], obj, reply, http)
        except asyncio.CancelledError:
            if self.context.status.state is not ServerState.STOPPING:
                raise
            return self._failed(Unavailable("the server is shutting down"), reply or self._unread(body))
        except Exception as error:
            return self._failed(error, reply or self._unread(body))

    @abstractmethod
    def _rid(self, request: R) -> str | list[str]:
        """The rid as given, or a fresh one; it (or the first of a list) names the answer."""

    @abstractmethod
    def _batch_size(self, request: R) -> int | None:
        """The number of prompts of a batch; None for a single prompt. The request may be wrong yet."""

    @abstractmethod
    def _arrival(self, request: R, path: str) -> Arrival:
        """What the event says."""

    @abstractmethod
    def _validate_request(self, request: R, body: dict[str, Any]) -> None:
        """Raise SgvizError for what can be seen to be wrong without the engine."""

    @abstractmethod
    async def _convert_to_internal_request(self, request: R) -> GenerateReqInput:
        """All but its rid and the time of its arrival."""

    @abstractmethod
    def _whole_answer(self, exchange: Exchange[R], outputs: list[EngineOutput]) -> Any:
        """The JSON body of a non-streamed answer."""

    @abstractmethod
    def _open_stream(self, exchange: Exchange[R]) -> AnswerStream: ...

    async def _generate(
        self, request: R, rid: str, obj: GenerateReqInput, reply: Reply, http: Request
    ) -> Response:
        watch = ClientWatch(http.receive)
        reply.handed_over = True
        items = self.context.tokenizer_manager.generate_request(obj, watch.is_disconnected)
        source = EngineStream(items, reply)
        exchange = Exchange(request, rid, obj, reply, source, int(time.time()))
        try:
            # awaited before any status goes out, so that an early error still gets its own
            first = await watch.race(source.next())
            if not first:
                raise SgvizError("the engine gave no answer")
            if obj.stream:
                return self._handle_streaming_request(exchange, first, watch)
            response = self._handle_non_streaming_request(exchange, first)
        except BaseException as error:
            watch.close()
            await source.close()
            if isinstance(error, BadRequest) and error.param is not None:
                error.param = self._public_name(error.param, request)
            raise
        watch.close()
        await source.close()
        return response

    def _public_name(self, param: str, request: R) -> str:
        """What clients call the field that the TokenizerManager complains about."""
        return self.public_names.get(param, param)

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
                        yield one_line_each(events)
                outputs = await exchange.source.next()
            yield stream.closing()
        except Exception as failure:
            error = as_sgviz_error(failure)
            exchange.reply.status = error.status
            exchange.reply.sent_error(error.message)
            yield error_event(error)

    def _unread(self, body: dict[str, Any]) -> Reply:
        """For the refusal of a body that is no request: under the name it brought, if that is one."""
        rid = body.get("rid")
        try:
            check_rid(rid)
        except BadRequest:
            rid = new_rid()
        return Reply(self.context, [str(rid)])

    def _failed(self, failure: Exception, reply: Reply) -> Response:
        error = as_sgviz_error(failure)
        reply.refused(error)
        return BodyResponse(msgspec.json.encode(error_body(error)), error.status, reply)


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


def extra_key_of(request: OpenAIRequest | GenerateRequest | VectorRequest) -> str | None:
    """The name of the prefix cache's compartment, or None for the common one.

    Without a salt it is the extra key itself, as in a call from Python. No two pairs share a name.

    Raises:
        BadRequest: one of them holds the character that separates them.
    """
    for name in ("cache_salt", "extra_key"):
        if "\0" in (getattr(request, name) or ""):
            raise BadRequest(f"{name} must not hold the character U+0000", param=name)
    if request.cache_salt:
        return f"{request.cache_salt}\0{request.extra_key or ''}"
    return request.extra_key or None


def one_line_each(events: bytes) -> bytes:
    """SSE events of JSON, without the characters that many a client's line splitting takes for the end of a line."""
    if b"\xe2\x80" in events or b"\xc2\x85" in events:
        for character in ("\x85", "\u2028", "\u2029"):
            events = events.replace(character.encode(), f"\\u{ord(character):04x}".encode())
    return events


def sse(content: Any) -> bytes:
    """One SSE event with `content` as JSON."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def error_event(error: SgvizError) -> bytes:
    """What a stream ends with when it fails; no [DONE] follows."""
    return sse(error_body(error))
