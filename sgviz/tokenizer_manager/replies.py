"""Questions to the schedulers, each of whom gives one answer, matched by `id`.

Mirrors SGLang's FanOutCommunicator. What differs: several questions may be on their way, and a rank that is lost
meanwhile is not waited for. Imports: messages, channel, errors.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from sgviz.channel import Sender
from sgviz.errors import SgvizError, Unavailable
from sgviz.messages import DebugReq, FlowQuestion, FlushCacheReqInput, GetInternalStateReq, SessionQuestion
from sgviz.tokenizer_manager.engine_time import EngineTime
from sgviz.tokenizer_manager.merge import Reply, merged
from sgviz.tokenizer_manager.ranks import Ranks

Question = FlushCacheReqInput | GetInternalStateReq | DebugReq | FlowQuestion | SessionQuestion


@dataclass(slots=True, eq=False)
class _Waiting:
    """Who has yet to answer, what the others said, and who waits for all of it."""

    ranks: set[int]  # membership and emptiness only
    done: asyncio.Future[dict[int, Reply]]
    parts: dict[int, Reply] = field(default_factory=dict)

    def settle(self) -> None:
        """Nobody is waited for any more."""
        if self.ranks or self.done.done():
            return
        if self.parts:
            self.done.set_result(dict(sorted(self.parts.items())))
        else:
            self.done.set_exception(Unavailable("the data parallel rank that was asked died; ask again"))


class Replies:
    """Who waits for which answers of which `ranks`."""

    def __init__(self, sender: Sender, time: EngineTime, ranks: Ranks) -> None:
        self._sender = sender
        self._time = time
        self.ranks = ranks
        self._waiting: dict[str, _Waiting] = {}
        self._failure: SgvizError | None = None

    async def ask(self, question: Question, timeout: float) -> Reply:
        """Send and wait at most `timeout` seconds, parked time not counted; the answers of all ranks as one.

        Raises:
            Unavailable: an answer did not come.
        """
        return merged(list((await self.ask_each(question, timeout)).values()))

    async def ask_each(self, question: Question, timeout: float) -> dict[int, Reply]:
        """As `ask`; the answers by rank, in their order."""
        if self._failure is not None:
            raise self._failure
        asked = self.ranks.asked(question)
        if not asked:
            raise Unavailable("the data parallel rank that answers this died")
        waiting = _Waiting(set(asked), asyncio.get_running_loop().create_future())
        self._waiting[question.id] = waiting
        try:
            self._sender.send(question)
            return await self._time.wait_for(waiting.done, timeout)
        except TimeoutError:
            name, silent = type(question).__name__, ", ".join(map(str, sorted(waiting.ranks)))
            who = "the scheduler" if self.ranks.size == 1 else f"the scheduler of rank {silent}"
            raise Unavailable(f"{who} did not answer {name} within {timeout:g} s") from None
        finally:
            self._waiting.pop(question.id, None)

    def answer(self, reply: Reply) -> None:
        """Hand a reply to whoever asked; one that nobody waits for is dropped."""
        waiting = self._waiting.get(reply.id)
        if waiting is not None and reply.dp_rank in waiting.ranks:
            waiting.ranks.discard(reply.dp_rank)
            waiting.parts[reply.dp_rank] = reply
            waiting.settle()

    def lose(self, rank: int) -> None:
        """That rank answers nothing any more."""
        for waiting in self._waiting.values():
            waiting.ranks.discard(rank)
            waiting.settle()

    def fail_all(self, error: SgvizError) -> None:
        """The engine is gone: every question, also one to come, ends with `error`."""
        self._failure = error
        for waiting in self._waiting.values():
            if not waiting.done.done():
                waiting.done.set_exception(error)
