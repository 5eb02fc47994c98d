"""PairStream: the decode side's stream on its way to the client, and the ends it can come to.

Imports: errors, serving (client watch, SSE), this folder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import httpx2
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from sgviz.errors import ClientDisconnected, SgvizError, Unavailable
from sgviz.serving.pass_on import end_to_end
from sgviz.serving.reply import ClientWatch
from sgviz.serving.serving_base import error_event

if TYPE_CHECKING:
    from sgviz.router.pair import Pair
    from sgviz.router.router import Router

ENDS_OF_EVENT = (b"\n\n", b"\n\r\n", b"\r\r")  # an empty line, after a line ended by any of \n, \r\n, \r
LONGEST_END = max(map(len, ENDS_OF_EVENT))


class WholeEvents:
    """Cuts bytes that come anyhow behind whole events, and changes none of them."""

    def __init__(self) -> None:
        self._held = bytearray()

    def add(self, piece: bytes) -> bytes:
        """All that can go out now, b"" if no event has ended."""
        fresh = max(0, len(self._held) - LONGEST_END + 1)  # an end may lie across the pieces
        self._held += piece
        end = max(_behind(self._held, mark, fresh) for mark in ENDS_OF_EVENT)
        out = bytes(self._held[:end])
        del self._held[:end]
        return out

    def rest(self) -> bytes:
        """What no end of an event followed."""
        return bytes(self._held)


class PairStream(Response):
    """The decode side's stream, byte for byte. Where it breaks off, whole events are out, and an error follows.

    Args:
        broke: told why, where it breaks off.
    """

    def __init__(
        self,
        source: httpx2.Response,
        pair: Pair,
        watch: ClientWatch,
        rids: list[str],
        router: Router,
        broke: Callable[[str], None],
    ) -> None:
        super().__init__(status_code=source.status_code)
        self.raw_headers = end_to_end(source.headers.raw, frozenset({b"date"}))
        self._source, self._pair, self._watch, self._rids, self._router = source, pair, watch, rids, router
        self._broke, self._started = broke, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ended = False
        try:
            ended = await self._watch.race(self._pass(send))
        except ClientDisconnected:
            pass
        except asyncio.CancelledError:
            if self._started:
                await send(_body(error_event(Unavailable("the router is shutting down")), more=False))
        finally:
            self._watch.close()
            self._router.spawn(self._pair.finish() if ended else self._pair.quit(self._rids))

    async def _pass(self, send: Send) -> bool:
        """Whether it came to its end."""
        self._started = True
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        events = WholeEvents()
        try:
            await self._pair.decode.server.while_it_lives(self._copy(events, send))
        except httpx2.RequestError as error:
            await send(_body(error_event(self._lost(error)), more=False))
            return False
        await send(_body(events.rest(), more=False))
        return True

    async def _copy(self, events: WholeEvents, send: Send) -> None:
        async for piece in self._source.aiter_raw():
            if whole := events.add(piece):
                await send(_body(whole, more=True))

    def _lost(self, error: httpx2.RequestError) -> SgvizError:
        decode = self._pair.decode
        why = f"it broke off in the middle of an answer ({type(error).__name__})"
        self._router.watch.suspect(decode.server, why)
        told = decode.broken(error)
        self._broke(told.message)
        return told


class Spawn:
    """Starts tasks that end what clients do not wait for, and keeps hold of them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _behind(held: bytearray, mark: bytes, start: int) -> int:
    """The place behind the last `mark`; 0 if there is none."""
    at = held.rfind(mark, start)
    return at + len(mark) if at >= 0 else 0


def _body(content: bytes, more: bool) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": more}
