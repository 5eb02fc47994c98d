"""DebugDesk: where debuggers in the main process meet the scheduler: their commands, and the news of its status.

SGLang has no counterpart. One asyncio loop owns a desk. Imports: messages, channel, errors.
"""

from __future__ import annotations

import asyncio
import contextlib

from sgviz.channel import Sender
from sgviz.errors import SgvizError, Unavailable, from_status
from sgviz.messages import DebugReq, DebugReqOutput, DebugStatus
from sgviz.messages.debug import DebugCommand, Detach
from sgviz.messages.generate import new_rid
from sgviz.tokenizer_manager.engine_time import EngineTime
from sgviz.tokenizer_manager.replies import Replies

ANSWER_TIMEOUT_S = 60.0  # a running scheduler answers at its next turn, which may be behind a long forward


class DebugDesk:
    """Knows the scheduler's last word about parking.

    Attributes:
        status: as the scheduler told last.
    """

    def __init__(self, sender: Sender, replies: Replies, time: EngineTime) -> None:
        self.status = DebugStatus()
        self._sender = sender
        self._replies = replies
        self._time = time
        self._news = asyncio.Event()
        self._failure: SgvizError | None = None

    async def ask(self, session: str, command: DebugCommand) -> DebugReqOutput:
        """Let the scheduler do a command of the debugger that calls itself `session`.

        Raises:
            SgvizError: why it was not done, with its HTTP status. Unavailable: no answer came.
        """
        question = DebugReq(id=new_rid(), session=session, command=command)
        reply = await self._replies.ask(question, ANSWER_TIMEOUT_S)
        assert isinstance(reply, DebugReqOutput)
        if reply.error:
            raise from_status(reply.error_status, reply.error)
        return reply

    async def wait(self, after: int, timeout: float) -> DebugStatus:
        """The status as soon as the scheduler is parked for a later time than `after`, or after `timeout` seconds.

        It also ends when nobody is attached any more.

        Raises:
            SgvizError: the engine ended.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        while self._failure is None:
            status, left = self.status, end - loop.time()
            if (status.parked and status.stop_no > after) or not status.attached or left <= 0:
                return status
            self._news.clear()
            try:
                async with asyncio.timeout(left):
                    await self._news.wait()
            except TimeoutError:
                continue
        raise self._failure

    def take(self, news: DebugReqOutput) -> None:
        """What the scheduler says, as an answer or by itself."""
        self.status = news.status
        if news.status.parked:
            self._time.stand_still()
        else:
            self._time.go_on()
        self._news.set()
        if news.id:
            self._replies.answer(news)

    def release(self) -> None:
        """Let the scheduler run on, whoever is attached: the engine needs it now."""
        if self.status.attached:
            with contextlib.suppress(Unavailable):  # it is gone, and nobody waits for it
                self._sender.send(DebugReq(id="", session="", command=Detach()))

    def lose(self, rank: int) -> None:
        """A scheduler died, others live: if it was the one that debuggers attach to, nobody is attached any more."""
        if rank == 0:
            self.status = DebugStatus()
            self._time.go_on()
            self._news.set()

    def fail(self, error: SgvizError) -> None:
        """The engine ended: whoever waits for a stop hears it."""
        self._failure = error
        self._time.go_on()
        self._news.set()
