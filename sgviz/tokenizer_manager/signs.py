"""SignsOfLife: when each stage behind the TokenizerManager last gave a sign of life.

SGLang keeps one stamp for all messages (`last_receive_tstamp`). Here the stages are told apart, so that a busy
scheduler does not hide a silent detokenizer or another silent scheduler, and the silent one can be named.
Imports: messages, events.
"""

from __future__ import annotations

import asyncio

from sgviz.events.clock import Clock
from sgviz.messages import (
    AbortReq,
    BatchEmbeddingOutput,
    BatchStrOutput,
    GetInternalStateReqOutput,
    HealthCheckOutput,
    RoutedReq,
    ToTokenizer,
)

CONTROLLER, SCHEDULER = "data parallel controller", "scheduler"
DETOKENIZER, WORKER = "detokenizer", "worker"
RESULTS = (BatchStrOutput, BatchEmbeddingOutput)
BY_DETOKENIZER = (*RESULTS, GetInternalStateReqOutput)  # everything else the scheduler sends straight
BY_CONTROLLER = (
    RoutedReq,
    HealthCheckOutput,
    GetInternalStateReqOutput,
)  # or an answer to what went through it


class SignsOfLife:
    """One asyncio loop owns it. Stamps are ns of `clock`.

    Args:
        ranks: how many schedulers there are.

    Attributes:
        newest: when the last message of any kind came.
    """

    def __init__(self, clock: Clock, ranks: int = 1) -> None:
        self._clock = clock
        self.newest = clock.now()
        self._schedulers = [SCHEDULER] if ranks == 1 else [f"{SCHEDULER} of rank {k}" for k in range(ranks)]
        # in the order of suspicion: what comes first explains the silence of those behind it
        first = [] if ranks == 1 else [CONTROLLER]
        self._last = dict.fromkeys((*first, *self._schedulers, DETOKENIZER, WORKER), self.newest)
        self._news = asyncio.Event()
        self._given_up = False

    def note(self, message: ToTokenizer) -> None:
        """A message came: whoever made it and whoever passed it on is alive."""
        self.newest = self._clock.now()
        if isinstance(message, BY_CONTROLLER):
            self._see(CONTROLLER)
        if not isinstance(message, RoutedReq | AbortReq):
            self._see(self._schedulers[message.dp_rank])
        elif len(self._schedulers) == 1:  # the controller of several sends such, too
            self._see(SCHEDULER)
        if isinstance(message, BY_DETOKENIZER):
            self._see(DETOKENIZER)
        if isinstance(message, RESULTS) or (isinstance(message, HealthCheckOutput) and message.forward):
            self._see(WORKER)
        self._news.set()

    def _see(self, stage: str) -> None:
        if stage in self._last:
            self._last[stage] = self.newest

    def lose(self, rank: int) -> None:
        """Nothing more is expected of that scheduler."""
        self._last.pop(self._schedulers[rank], None)
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
