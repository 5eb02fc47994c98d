"""Flow: whether requests may go on to the scheduler, and who has. Pauses close it, and so do other weights.

Mirrors `is_pause` with its condition and the `model_update_lock` of SGLang's TokenizerManager: requests wait out a
pause before they count as readers of the weights (facts, trap 24), and a writer has precedence over those that come.
A request is a reader until its answers are complete here, however slowly its client takes them.
One asyncio loop owns it. Imports: errors, events, and the waiting of this folder.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from sgviz.errors import Unavailable
from sgviz.events.clock import Clock
from sgviz.events.schema import GenerationContinued, GenerationPaused
from sgviz.events.tracer import Tracer
from sgviz.messages.flow import PauseMode
from sgviz.tokenizer_manager.engine_time import EngineTime
from sgviz.tokenizer_manager.wait import Waiter

WEIGHTS = "weights"  # the mode, in events, of a wait for other weights
Ended = Callable[[], bool]


class Flow:
    """Open, or closed by a pause, or by a change of weights.

    Args:
        time: stands still in a pause, and while weights are changed: for the time limits of requests. While such a
            change still waits for those under way it goes on, or one that never ends would hold up all others for ever.

    Attributes:
        mode: of the pause, if there is one.
        elsewhere: how many requests are under way in other processes.
    """

    def __init__(self, trace: Tracer, clock: Clock, time: EngineTime) -> None:
        self.mode: PauseMode | None = None
        self._trace = trace
        self._clock = clock
        self._time = time
        self._writers = 0
        self._writing = 0
        self._closed_as: tuple[str, int] | None = None
        self._refusal: str | None = None
        self._waiting: dict[int, asyncio.Event] = {}
        self._inside: dict[int, Ended] = {}
        self._news = asyncio.Event()
        self.elsewhere: Callable[[], int] = int

    @property
    def is_closed(self) -> bool:
        return self.mode is not None or self._writers > 0

    # ------------------------------------------------------------ requests

    async def enter(self, waiter: Waiter, given_up: Ended, ended: Ended) -> None:
        """Wait until requests may go on, then count as under way until `leave`, or until `ended` says so.

        It also returns when the request is `given_up` while it waits.

        Raises:
            Unavailable: no new requests are taken any more. ClientDisconnected: nobody waits for the answer.
        """
        key = id(waiter)
        self._waiting[key] = waiter.event
        try:
            while self.is_closed and not given_up():
                await waiter.wait()
                if self._refusal is not None and not given_up():
                    raise Unavailable(self._refusal)
        finally:
            del self._waiting[key]
        self._inside[key] = ended

    def leave(self, waiter: Waiter) -> None:
        """The request of `waiter` is over; harmless if it never entered."""
        if self._inside.pop(id(waiter), None) is not None:
            self._news.set()

    def note(self) -> None:
        """Some request ended: perhaps somebody waits for that."""
        self._news.set()

    def refuse(self, why: str) -> None:
        """Those that wait get Unavailable."""
        self._refusal = why
        self._wake()

    # ------------------------------------------------------------ pauses and weights

    def pause(self, mode: PauseMode) -> None:
        """Let no new request go on."""
        self.mode = mode
        self._settle()

    def go_on(self) -> None:
        """The pause is over."""
        self.mode = None
        self._settle()

    @asynccontextmanager
    async def changing_weights(self, *, all_end: bool = False) -> AsyncIterator[None]:
        """Nobody is under way, or stands still in a pause, and nobody goes on until it is left.

        `all_end`: those under way were aborted, so they are waited for in a pause too.
        """
        self._writers += 1
        self._settle()
        try:
            if all_end:
                await self.until(self._is_empty)
            else:
                await self.all_left(None)
            self._writing += 1
            self._settle()
            try:
                yield
            finally:
                self._writing -= 1
        finally:
            self._writers -= 1
            self._settle()

    async def all_left(self, mode: PauseMode | None) -> None:
        """Wait until no request is under way, or the pause is another than `mode` (None: there is none)."""
        await self.until(lambda: self.mode != mode or self._is_empty())

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until that is so; asked again whenever a request ends, a pause begins or ends, or weights change."""
        while not true():
            self._news.clear()
            await self._news.wait()

    def _is_empty(self) -> bool:
        return all(ended() for ended in self._inside.values())

    def _settle(self) -> None:
        """Tell what has changed, and wake whom it concerns."""
        mode = self.mode or (WEIGHTS if self._writers else None)
        before = self._closed_as
        if mode != (before[0] if before else None):
            self._tell(before, mode)
            self._closed_as = (mode, self._clock.now()) if mode else None
        if self.mode or self._writing:
            self._time.stand_still()
        else:
            self._time.go_on()
        self._news.set()
        self._wake()

    def _tell(self, before: tuple[str, int] | None, mode: str | None) -> None:
        if not self._trace.on:
            return
        if before is not None:
            self._trace.emit(GenerationContinued(mode=before[0], since_ns=before[1]))
        if mode is not None:
            self._trace.emit(GenerationPaused(mode=mode, requests=len(self._inside) + self.elsewhere()))

    def _wake(self) -> None:
        for event in self._waiting.values():
            event.set()
