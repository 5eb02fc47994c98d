"""Pair: both calls of an attempt, from their start to their end, and whose fault it is if there is no answer.

The decode side answers only when the KV and the first token are there. From then on the prefill side does not matter
any more. Imports: this folder.
"""

from __future__ import annotations

import asyncio
import contextlib

import httpx2

from sgviz.router.blame import Failed, Stand, Verdict, is_open, judge, overdue
from sgviz.router.calls import Call, Told, Trouble
from sgviz.router.rooms import Stay
from sgviz.router.servers import Watch

GRACE_S = 2.0  # a prefill server that dies may have sent everything; the decode side gets so long to show it
TRUE_CAUSE_S = 0.5  # for the prefill side to say why the decode side failed
LAST_ANSWER_S = 30.0  # for the prefill side to end after the decode side began
EVENT_STREAM = "text/event-stream"


class Pair:
    """Both calls of an attempt, and what is theirs until it ends."""

    def __init__(self, prefill: Call, decode: Call, stay: Stay) -> None:
        self.prefill, self.decode, self._stay = prefill, decode, stay
        self._losses = prefill.server.losses, decode.server.losses
        self._prefilled = asyncio.create_task(prefill.whole())
        self._prefilled.add_done_callback(_looked_at)

    async def begin(self, timeout: float | None, watch: Watch) -> httpx2.Response | Told:
        """The decode side's answer: whole, or at its beginning if it is a stream.

        Raises:
            Failed: there is none, or it took longer than `timeout`.
        """
        try:
            async with asyncio.timeout(timeout):
                return await self._answer()
        except TimeoutError:
            assert timeout is not None
            raise Failed(overdue(*self._stands(None), timeout)) from None
        except Trouble as trouble:
            raise Failed(await self._verdict(trouble, watch)) from None

    async def _answer(self) -> httpx2.Response | Told:
        response = await self._head()
        if response.headers.get("content-type", "").startswith(EVENT_STREAM) and response.status_code < 400:
            return response
        return await self.decode.whole()

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

    async def _verdict(self, trouble: Trouble, watch: Watch) -> Verdict:
        """Have both servers looked at where nothing else can tell which of them failed."""
        by_decode = trouble.server is self.decode.server
        if by_decode and not trouble.retry and trouble.answer.status_code >= 500:
            await asyncio.wait((self._prefilled,), timeout=TRUE_CAUSE_S)
        if is_open(*self._in_order(trouble)):
            # one that is known to be lost needs no look, and one that vanished would keep it waiting
            looks = [watch.look(each.server) for each in (self.prefill, self.decode) if each.server.healthy]
            if looks:
                await asyncio.wait(looks)
        return judge(*self._in_order(trouble))

    def _in_order(self, trouble: Trouble) -> tuple[Stand, Stand]:
        """The call that failed, and the other."""
        prefill, decode = self._stands(trouble)
        return (prefill, decode) if trouble.server is prefill.server else (decode, prefill)

    def _stands(self, trouble: Trouble | None) -> tuple[Stand, Stand]:
        """Of the prefill and the decode side; `trouble`: of the side that it names."""
        prefill, decode = self.prefill.server, self.decode.server
        ended = self._prefilled.done() and not self._prefilled.cancelled()
        done = ended and self._prefilled.exception() is None
        theirs = trouble if trouble is not None and trouble.server is decode else None
        return (
            Stand(prefill, self._losses[0], _trouble(self._prefilled), done),
            Stand(decode, self._losses[1], theirs),
        )

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


def _trouble(task: asyncio.Task[Told]) -> Trouble | None:
    """Why a call failed, if it has."""
    if not task.done() or task.cancelled():
        return None
    error = task.exception()
    return error if isinstance(error, Trouble) else None


def _looked_at(task: asyncio.Task[Told]) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        task.exception()
