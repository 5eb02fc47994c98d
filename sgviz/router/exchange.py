"""One request through a pair: both servers get it, the decode side's answer goes to the client, failures end both.

Before the first token a request can start again with another pair. Each attempt is told by an event, and so is each
that fails. Mirrors mini_lb's `generate`, which waits for both and retries nothing. Imports: errors, events, serving
(client watch, names of headers), this folder.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.responses import Response

from sgviz.errors import Unavailable
from sgviz.events.schema import RouterFailed, RouterPaired
from sgviz.router.blame import Failed, Side, Verdict
from sgviz.router.bodies import Asked, Meeting
from sgviz.router.calls import Call, Told
from sgviz.router.pair import Pair
from sgviz.router.pair_stream import PairStream
from sgviz.router.rooms import Stay
from sgviz.router.servers import Server
from sgviz.serving.pass_on import RawHeaders
from sgviz.serving.reply import ClientWatch
from sgviz.serving.routing import HEADER

if TYPE_CHECKING:
    from sgviz.router.router import Router

RANK_HEADER = HEADER.lower().encode()


@dataclass(frozen=True, slots=True)
class Attempt:
    """Which attempt of a request it is, with whom, and the room of each answer."""

    number: int
    prefill: Server
    decode: Server
    rooms: tuple[int, ...]


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
        router, retries = self._router, self._router.options.retries
        for number in range(1, retries + 2):
            try:
                return await self._attempt(number, watch)
            except Failed as failed:
                verdict = failed.verdict
                self._tried.update(server.url for server in verdict.avoid)
                if verdict.retry and verdict.lost and not router.has_pair:
                    await watch.race(_end_of([router.watch.look(each.server) for each in verdict.lost]))
                if not verdict.retry or number > retries or not router.has_pair:
                    return verdict.answer
                router.counts.retries += 1
        raise AssertionError("the last attempt returns or raises")

    async def _attempt(self, number: int, watch: ClientWatch) -> Response:
        router = self._router
        prefill, decode = router.prefill.choose(self._tried), router.decode.choose(self._tried)
        names = router.names.take([*self._asked.rids, *self._asked.answer_rids])
        meeting = self._asked.for_pair(prefill, router.rooms)
        attempt = Attempt(number, prefill, decode, tuple(meeting.rooms))
        self._tell_paired(attempt)
        stay = Stay(router.rooms, meeting.rooms, router.names, names)
        pair = self._pair(prefill, decode, meeting, stay)
        try:
            found = await watch.race(pair.begin(router.options.request_timeout, router.watch))
        except BaseException as error:
            ending = pair.quit(self._asked.rids)
            verdict = error.verdict if isinstance(error, Failed) else None
            if verdict is not None:
                self._set_aside(verdict)
                self._tell_failed(attempt, verdict)
            if verdict is not None and verdict.retry:
                await ending  # so that the rid is free for the next attempt
            else:
                router.spawn(ending)
            raise
        if isinstance(found, Told):
            router.spawn(pair.finish())
            return found.response()

        def broke(why: str) -> None:
            answer = Response(status_code=Unavailable.status)
            self._tell_failed(attempt, Verdict(Side.DECODE, why, answer), began=True)

        return PairStream(found, pair, watch, self._asked.rids, router, broke)

    def _pair(self, prefill: Server, decode: Server, meeting: Meeting, stay: Stay) -> Pair:
        client, target, headers = self._router.client, self._target, self._headers
        # the rank is one of the decode server's
        others = [each for each in headers if each[0] != RANK_HEADER]
        return Pair(
            Call(client, prefill, target, others, meeting.prefill),
            Call(client, decode, target, headers, meeting.decode),
            stay,
        )

    def _set_aside(self, verdict: Verdict) -> None:
        """Nobody gets a server whose connection failed before a look finds it well."""
        for trouble in verdict.lost:
            self._router.watch.suspect(trouble.server, trouble.lost)

    def _tell_paired(self, attempt: Attempt) -> None:
        trace = self._router.trace
        if not trace.on:
            return
        candidates = tuple((s.url, s.side, s.healthy, s.requests) for s in self._router.watch.servers)
        for rid, room in zip(self._asked.answer_rids, attempt.rooms):
            body = RouterPaired(
                rid=rid, room=room, prefill=attempt.prefill.url, decode=attempt.decode.url,
                policy=self._router.options.policy, candidates=candidates, attempt=attempt.number,
            )  # fmt: skip
            trace.emit(body)

    def _tell_failed(self, attempt: Attempt, verdict: Verdict, *, began: bool = False) -> None:
        self._router.counts.failed[verdict.side] += 1
        trace = self._router.trace
        if not trace.on:
            return
        for rid, room in zip(self._asked.answer_rids, attempt.rooms):
            body = RouterFailed(
                rid=rid, room=room, attempt=attempt.number, prefill=attempt.prefill.url, decode=attempt.decode.url,
                side=verdict.side, why=verdict.why, status=verdict.answer.status_code, began=began,
            )  # fmt: skip
            trace.emit(body)


async def _end_of(looks: list[asyncio.Task[None]]) -> None:
    await asyncio.wait(looks)
