"""EngineTime: a clock that stands still while a debugger has parked the scheduler, for the server's own time limits.

SGLang has no counterpart. One asyncio loop owns it. Imports: nothing of sgviz.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")
LEAST_WAIT_S = 0.05  # between two looks at a clock that may stand still


class EngineTime:
    """Seconds of the loop's clock, or of another one, without those in which it stood still."""

    def __init__(self, of: EngineTime | None = None) -> None:
        self._of = of
        self._held = 0.0
        self._parked_at: float | None = None

    @property
    def stands_still(self) -> bool:
        return self._parked_at is not None

    def now(self) -> float:
        at = self._parked_at if self._parked_at is not None else self._base()
        return at - self._held

    def _base(self) -> float:
        return asyncio.get_running_loop().time() if self._of is None else self._of.now()

    def stand_still(self) -> None:
        """From now on no time passes; harmless if it is so already."""
        if self._parked_at is None:
            self._parked_at = self._base()

    def go_on(self) -> None:
        if self._parked_at is not None:
            self._held += self._base() - self._parked_at
            self._parked_at = None

    async def wait_for(self, awaitable: Awaitable[T], timeout: float) -> T:
        """As `asyncio.wait_for`, with `timeout` seconds of this clock. Raises TimeoutError."""
        task = asyncio.ensure_future(awaitable)
        deadline = self.now() + timeout
        try:
            while not task.done():
                left = deadline - self.now()
                if left <= 0:
                    raise TimeoutError
                await asyncio.wait((task,), timeout=max(left, LEAST_WAIT_S) if self.stands_still else left)
            return task.result()
        finally:
            task.cancel()
