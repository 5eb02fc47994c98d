"""Questions to the scheduler that have one answer, matched by `id`.

Mirrors SGLang's FanOutCommunicator. What is simplified: one scheduler, so one reply; several questions may
be on their way. Imports: messages, channel, errors.
"""

from __future__ import annotations

import asyncio

from sgviz.channel import Sender
from sgviz.errors import SgvizError, Unavailable
from sgviz.messages import (
    DebugReq,
    DebugReqOutput,
    FlowQuestion,
    FlowReply,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetInternalStateReq,
    GetInternalStateReqOutput,
    SessionQuestion,
    SessionReply,
)
from sgviz.tokenizer_manager.engine_time import EngineTime

Question = FlushCacheReqInput | GetInternalStateReq | DebugReq | FlowQuestion | SessionQuestion
Reply = FlushCacheReqOutput | GetInternalStateReqOutput | DebugReqOutput | FlowReply | SessionReply


class Replies:
    """Who waits for which answer."""

    def __init__(self, sender: Sender, time: EngineTime) -> None:
        self._sender = sender
        self._time = time
        self._waiting: dict[str, asyncio.Future[Reply]] = {}
        self._failure: SgvizError | None = None

    async def ask(self, question: Question, timeout: float) -> Reply:
        """Send and wait at most `timeout` seconds, parked time not counted. Raises Unavailable if no answer came."""
        if self._failure is not None:
            raise self._failure
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[question.id] = future
        try:
            self._sender.send(question)
            return await self._time.wait_for(future, timeout)
        except TimeoutError:
            name = type(question).__name__
            raise Unavailable(f"the scheduler did not answer {name} within {timeout:g} s") from None
        finally:
            self._waiting.pop(question.id, None)

    def answer(self, reply: Reply) -> None:
        """Hand a reply to whoever asked; one that nobody waits for is dropped."""
        future = self._waiting.get(reply.id)
        if future is not None and not future.done():
            future.set_result(reply)

    def fail_all(self, error: SgvizError) -> None:
        """The engine is gone: every question, also one to come, ends with `error`."""
        self._failure = error
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
