"""SignsOfLife: when each stage behind the TokenizerManager last gave a sign of life.

SGLang keeps one stamp for all messages (`last_receive_tstamp`). Here the stages are told apart, so that a busy
scheduler does not hide a silent detokenizer, and the silent one can be named. Imports: messages, events.
"""

from __future__ import annotations

import asyncio

from sgviz.events.clock import Clock
from sgviz.messages import (
    BatchEmbeddingOutput,
    BatchStrOutput,
    GetInternalStateReqOutput,
    HealthCheckOutput,
    ToTokenizer,
)

SCHEDULER, DETOKENIZER, WORKER = "scheduler", "detokenizer", "worker"
RESULTS = (BatchStrOutput, BatchEmbeddingOutput)
BY_DETOKENIZER = (*RESULTS, GetInternalStateReqOutput)  # everything else the scheduler sends straight


class SignsOfLife:
    """One asyncio loop owns it. Stamps are ns of `clock`.

    Attributes:
        newest: when the last message of any kind came.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.newest = clock.now()
        # in the order of suspicion: what comes first explains the silence of those behind it
        self._last = dict.fromkeys((SCHEDULER, DETOKENIZER, WORKER), self.newest)
        self._news = asyncio.Event()
        self._given_up = False

    def note(self, message: ToTokenizer) -> None:
        """A message came: whoever made it and whoever passed it on is alive."""
        self.newest = self._last[SCHEDULER] = self._clock.now()
        if isinstance(message, BY_DETOKENIZER):
            self._last[DETOKENIZER] = self.newest
        if isinstance(message, RESULTS) or (isinstance(message, HealthCheckOutput) and message.forward):
            self._last[WORKER] = self.newest
        self._news.set()

    def silent_since(self, start: int) -> str | None:
        """The stage that keeps the others from being heard since `start`; None: all were heard."""
        return next((name for name, stamp in self._last.items() if stamp <= start), None)

    async def all_since(self, start: int) -> None:
        """Wait until every stage was heard later than `start`, or all is given up."""
        while self.silent_since(start) is not None and not self._given_up:
            self._news.clear()
            await self._news.wait()

    def give_up(self) -> None:
        """Nobody will say anything more: whoever waits need not wait for the time-out."""
        self._given_up = True
        self._news.set()
