"""One answer on its way out: watching the client, handing over bytes, and reporting the end exactly once.

Mirrors SGLang's StreamingResponse with its background abort task; here a hang-up is noticed at once: in
the wait for the first item, in a non-streamed answer and in the middle of a stream.
Imports: errors, events, messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from sgviz.errors import ClientDisconnected, SgvizError
from sgviz.events.schema import ChunkSent
from sgviz.messages.generate import failure_of
from sgviz.serving.arrivals import tell_refused
from sgviz.serving.context import EngineOutput, ServingContext

T = TypeVar("T")
CLIENT_GONE = 499


class ClientWatch:
    """Waits for the client to hang up. Start it when the body has been read; `close` it in the end."""

    def __init__(self, receive: Receive) -> None:
        self._task = asyncio.create_task(_until_disconnect(receive))

    async def is_disconnected(self) -> bool:
        """For the TokenizerManager's own polling."""
        return self._task.done()

    async def race(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; it is cancelled, and has ended, when the client leaves first.

        Raises:
            ClientDisconnected: the client left.
        """
        task = asyncio.create_task(work)
        try:
            await asyncio.wait((task, self._task), return_when=asyncio.FIRST_COMPLETED)
        finally:
            # here too when this very wait is cancelled (the server stops)
            left = not task.done()
            if left:
                task.cancel()
                await asyncio.wait((task,))
        if left:
            raise ClientDisconnected("the client hung up")
        return task.result()

    def close(self) -> None:
        self._task.cancel()


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Reply:
    """The rids behind one answer. `end` reports each of them once, however the answer ends.

    Attributes:
        rid: the first; what belongs to the whole answer is told under it.
        handed_over: the TokenizerManager has the request, and tells itself if it refuses it.
        status: what the end of a stream is reported with; an error in the stream sets it to its own.
    """

    def __init__(self, context: ServingContext, rids: list[str]) -> None:
        self._context = context
        self.rid = rids[0]
        self._rids = dict.fromkeys(rids)
        self._ended = False
        self.handed_over = False
        self.status = 200

    def saw(self, rid: str) -> None:
        """A child rid (n > 1, list of prompts) showed up in the engine's output."""
        self._rids[rid] = None

    def sent(self, rid: str, index: int, part: str, chars: int = 0) -> None:
        """Something goes to the HTTP layer; see `ChunkSent`."""
        trace = self._context.trace
        if trace.on:
            trace.emit(ChunkSent(rid=rid, index=index, part=part, chars=chars))

    def sent_error(self, message: str) -> None:
        """An error goes to the HTTP layer, in place of the rest of the answer."""
        self.sent(self.rid, 0, "error", len(message))

    def refused(self, error: SgvizError) -> None:
        """There will be no answer but `error`."""
        if not self.handed_over:
            tell_refused(self._context.trace, self._rids, error)
        self.sent_error(error.message)

    def end(self, status: int) -> None:
        """The last byte was handed over, or nobody is there to take it (499)."""
        if self._ended:
            return
        self._ended = True
        for rid in self._rids:
            self._context.tokenizer_manager.response_sent(rid, status)


class EngineStream:
    """The engine's side of one answer. Closing it early aborts what still runs (see TokenizerManager)."""

    def __init__(self, items: AsyncIterator[EngineOutput | list[EngineOutput]], reply: Reply) -> None:
        self._items = items
        self._reply = reply

    async def next(self) -> list[EngineOutput]:
        """The next outputs; none at the end.

        Raises:
            SgvizError: the engine ended one of them with a status of its own.
        """
        item = await anext(self._items, None)
        outputs = item if isinstance(item, list) else [item] if item is not None else []
        for output in outputs:
            self._reply.saw(output["meta_info"]["id"])
            if (failure := failure_of(output["meta_info"]["finish_reason"])) is not None:
                raise failure
        return outputs

    async def close(self) -> None:
        if isinstance(self._items, AsyncGenerator):
            await self._items.aclose()


class BodyResponse(Response):
    """A whole JSON body that reports its end to `reply`."""

    media_type = "application/json"

    def __init__(self, content: bytes, status: int, reply: Reply) -> None:
        super().__init__(content, status)
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._reply.end(self.status_code)


class EventStream(Response):
    """An SSE answer. When the client leaves, `events` is cancelled, and it and `source` are closed at once.

    Args:
        events: bytes of whole events.
        last_words: sent when the server stops before the stream has ended.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        source: EngineStream,
        watch: ClientWatch,
        reply: Reply,
        last_words: bytes,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events
        self._source = source
        self._watch = watch
        self._reply = reply
        self._last_words = last_words
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = CLIENT_GONE
        try:
            await self._watch.race(self._pump(send))
            status = self._reply.status
        except ClientDisconnected:
            pass
        except asyncio.CancelledError:
            status = 503
            if self._started:
                await send(_body(self._last_words, more=False))
        finally:
            self._watch.close()
            await self._events.aclose()
            await self._source.close()
            self._reply.end(status)

    async def _pump(self, send: Send) -> None:
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in self._events:
            await send(_body(event, more=True))
        await send(_body(b"", more=False))


def _body(content: bytes, more: bool) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": more}
