"""Deadlines: requests that take longer than `request_timeout` end with 503, wherever they are.

SGLang's scheduler does so by two environment variables, for waiting and for running. Here the time counts from the
arrival in this process, on a clock that stands still while a debugger holds the scheduler, and a request ends even
if the engine says nothing more. One asyncio loop owns it. Imports: the rest of this folder.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque

from sgviz.tokenizer_manager.engine_time import LEAST_WAIT_S, EngineTime
from sgviz.tokenizer_manager.state import ReqState
from sgviz.tokenizer_manager.table import RequestTable

Line = deque[tuple[float, weakref.ref[ReqState]]]  # what has ended is not kept alive until its time is up
LAST_WORD_S = 2.0  # the engine gets so long to end what is aborted; then it ends here all the same


class Deadlines:
    """Watches what `table` registers, from now on."""

    def __init__(self, table: RequestTable, time: EngineTime, timeout: float) -> None:
        self._table = table
        self._time = time
        self._timeout = timeout
        self._running: Line = deque()  # both in the order of time, as all get the same
        self._ending: Line = deque()
        self._task: asyncio.Task[None] | None = None
        table.on_register = self._watch

    def close(self) -> None:
        """Stop watching."""
        if self._task is not None:
            self._task.cancel()

    def _watch(self, state: ReqState) -> None:
        self._running.append((self._time.now() + self._timeout, weakref.ref(state)))
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._sweep())

    async def _sweep(self) -> None:
        """As long as there is anything to wait for."""
        while (next_at := self._next()) is not None:
            await asyncio.sleep(max(next_at - self._time.now(), LEAST_WAIT_S))
            now = self._time.now()
            for state in _due(self._running, now):
                self._table.expire(
                    state, f"the request took longer than {self._timeout:g} s (request_timeout)"
                )
                self._ending.append((now + LAST_WORD_S, weakref.ref(state)))
            for state in _due(self._ending, now):
                self._table.give_up(state)

    def _next(self) -> float | None:
        """When something falls due; the requests that ended before are forgotten."""
        for line in (self._running, self._ending):
            while line and _live(line[0][1]) is None:
                line.popleft()
        return min((line[0][0] for line in (self._running, self._ending) if line), default=None)


def _due(line: Line, now: float) -> list[ReqState]:
    """Those whose time is up, taken out of the line, without those that have ended."""
    out = []
    while line and line[0][0] <= now:
        if (state := _live(line.popleft()[1])) is not None:
            out.append(state)
    return out


def _live(reference: weakref.ref[ReqState]) -> ReqState | None:
    state = reference()
    return None if state is None or state.finished else state
