"""One request through a pair: both servers get it, the decode side's answer goes to the client, failures end both.

The decode side answers only when the KV and the first token are there. Before that the request can start again with
another pair; from then on the prefill side does not matter any more. Mirrors mini_lb's `generate`, which waits for both
and retries nothing. Imports: errors, events, serving (client watch, names of headers), this folder.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import httpx2
from starlette.responses import Response

from sgviz.errors import from_status
from sgviz.events.schema import RouterPaired
from sgviz.router.bodies import Asked, Meeting
from sgviz.router.calls import Call, Told, Trouble
from sgviz.router.pair_stream import PairStream
from sgviz.router.rooms import Stay
from sgviz.router.servers import Server
from sgviz.serving.pass_on import RawHeaders
from sgviz.serving.reply import ClientWatch
from sgviz.serving.routing import HEADER

if TYPE_CHECKING:
    from sgviz.router.router import Router

GRACE_S = 2.0  # a prefill server that dies may have sent everything; the decode side gets so long to show it
TRUE_CAUSE_S = 0.5  # for the prefill side to say why the decode side failed
LAST_ANSWER_S = 30.0  # for the prefill side to end after the decode side began
EVENT_STREAM = "text/event-stream"
RANK_HEADER = HEADER.lower().encode()


class Exchange:
    """The attempts of one request, one pair each."""

    def __init__(self, router: Router, target: bytes, headers: RawHeaders, asked: Asked) -> None:
        self._router, self._target, self._headers, self._asked = router, target, headers, asked
        self._tried: set[str] = set()  # addresses, membership only

    async def answer(self, watch: ClientWatch) -> Response:
        """What the client gets: the decode side's answer, or why there is none.

        Raises:
            ClientDisconnected: the client left. Unavailable: no server of one side is healthy. BadRequest: another
                request has its name.
        """
        retries = self._router.options.retries
        for attempt in range(1, retries + 2):
            try:
                return await self._attempt(attempt, watch)
            except Trouble as trouble:
                self._tried.add(trouble.server.url)
                await self._suspect(trouble, watch)
                if not trouble.retry or attempt > retries or not self._router.has_pair:
                    return trouble.answer
                self._router.counts.retries += 1
        raise AssertionError("the last attempt returns or raises")

    async def _suspect(self, trouble: Trouble, watch: ClientWatch) -> None:
        """Have a server looked at whose connection failed; wait for that only where there is no other.

        One that has no room may have lost a rank: the look tells which, and the next room is of another.
        """
        router = self._router
        if trouble.lost:
            look = router.watch.suspect(trouble.server, trouble.lost)
            if trouble.retry and not router.has_pair:
                await watch.race(_end_of(look))
        elif trouble.retry and trouble.server.side == "prefill":
            await watch.race(_end_of(router.watch.look(trouble.server)))

    async def _attempt(self, attempt: int, watch: ClientWatch) -> Response:
        router = self._router
        prefill, decode = router.prefill.choose(self._tried), router.decode.choose(self._tried)
        names = router.names.take([*self._asked.rids, *self._asked.answer_rids])
        meeting = self._asked.for_pair(prefill, router.rooms)
        self._tell(attempt, meeting.rooms, prefill, decode)
        stay = Stay(router.rooms, meeting.rooms, router.names, names)
        pair = self._pair(prefill, decode, meeting, stay)
        try:
            found = await watch.race(pair.begin(router.options.request_timeout))
        except BaseException as error:
            ending = pair.quit(self._asked.rids)
            if isinstance(error, Trouble) and error.retry:
                await ending  # so that the rid is free for the next attempt
            else:
                router.spawn(ending)
            raise
        if isinstance(found, Told):
            router.spawn(pair.finish())
            return found.response()
        return PairStream(found, pair, watch, self._asked.rids, router)

    def _pair(self, prefill: Server, decode: Server, meeting: Meeting, stay: Stay) -> Pair:
        client, target, headers = self._router.client, self._target, self._headers
        # the rank is one of the decode server's
        others = [each for each in headers if each[0] != RANK_HEADER]
        return Pair(
            Call(client, prefill, target, others, meeting.prefill),
            Call(client, decode, target, headers, meeting.decode),
            stay,
        )

    def _tell(self, attempt: int, rooms: list[int], prefill: Server, decode: Server) -> None:
        trace = self._router.trace
        if not trace.on:
            return
        candidates = tuple((s.url, s.side, s.healthy, s.requests) for s in self._router.watch.servers)
        for rid, room in zip(self._asked.answer_rids, rooms):
            body = RouterPaired(
                rid=rid, room=room, prefill=prefill.url, decode=decode.url, policy=self._router.options.policy,
                candidates=candidates, attempt=attempt,
            )  # fmt: skip
            trace.emit(body)


class Pair:
    """Both calls of an attempt, and what is theirs until it ends."""

    def __init__(self, prefill: Call, decode: Call, stay: Stay) -> None:
        self.prefill, self.decode, self._stay = prefill, decode, stay
        self._prefilled = asyncio.create_task(prefill.whole())
        self._prefilled.add_done_callback(_looked_at)

    async def begin(self, timeout: float | None) -> httpx2.Response | Told:
        """The decode side's answer: whole, or at its beginning if it is a stream.

        Raises:
            Trouble: there is none, by whoever's fault. SgvizError: it took longer than `timeout`.
        """
        try:
            async with asyncio.timeout(timeout):
                response = await self._head()
                if (
                    response.headers.get("content-type", "").startswith(EVENT_STREAM)
                    and response.status_code < 400
                ):
                    return response
                return await self.decode.whole()
        except TimeoutError:
            text = f"the answer did not begin within {timeout:g} s (request_timeout of the router)"
            raise from_status(504, text) from None
        except Trouble as trouble:
            raise await self._true_cause(trouble) from None

    async def _head(self) -> httpx2.Response:
        head = self.decode.head
        await asyncio.wait((head, self._prefilled), return_when=asyncio.FIRST_COMPLETED)
        trouble = _trouble(self._prefilled)
        if trouble is not None and not head.done():
            if trouble.broke:
                await asyncio.wait((head,), timeout=GRACE_S)
            if not head.done():
                raise trouble
        return await head

    async def _true_cause(self, trouble: Trouble) -> Trouble:
        """Of two failures that of the prefill side, which the decode side only heard of.

        Not where the decode side's is the caller's fault, or another pair may do better.
        """
        if trouble.server is self.prefill.server or 400 <= trouble.answer.status_code < 500:
            return trouble
        if not trouble.retry:
            await asyncio.wait((self._prefilled,), timeout=TRUE_CAUSE_S)
        cause = _trouble(self._prefilled)
        return trouble if cause is None or trouble.retry > cause.retry else cause

    async def quit(self, rids: list[str]) -> None:
        """Nobody wants an answer any more."""
        try:
            self._prefilled.cancel()
            await asyncio.gather(self.prefill.quit(rids), self.decode.quit(rids))
        finally:
            self._stay.end()

    async def finish(self) -> None:
        """The decode side has said all; the prefill side may take a moment longer."""
        self._stay.leave()
        try:
            await self.decode.close()
            await asyncio.wait((self._prefilled,), timeout=LAST_ANSWER_S)
            self._prefilled.cancel()
            await self.prefill.close()
        finally:
            self._stay.end()


async def _end_of(look: asyncio.Task[None]) -> None:
    await asyncio.wait((look,))


def _trouble(task: asyncio.Task[Told]) -> Trouble | None:
    """Why a call failed, if it has."""
    if not task.done() or task.cancelled():
        return None
    error = task.exception()
    return error if isinstance(error, Trouble) else None


def _looked_at(task: asyncio.Task[Told]) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        task.exception()
