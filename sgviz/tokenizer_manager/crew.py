"""Crew: the tokenizer workers behind the TokenizerManager of the main process, as its control desk sees them.

The MultiTokenizerRouter is one; without workers there is nobody to tell. Imports: messages.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Protocol

from sgviz.messages import FinishReason
from sgviz.messages.workers import AckedOrder, Told


class Crew(Protocol):
    @property
    def live(self) -> int:
        """Their requests under way in the scheduler."""
        ...

    def live_requests(self) -> list[dict[str, Any]]:
        """What is known of each of them here."""
        ...

    def fail_rank(self, rank: int, reason: FinishReason) -> int:
        """End their requests that a lost data parallel rank had, for `reason`; how many there were."""
        ...

    def tell(self, order: Told) -> None:
        """Send an order to all, without waiting."""
        ...

    def ask(self, order: AckedOrder, timeout: float | None = None) -> Awaitable[None]:
        """Send an order to all, at once; wait for the result until all have done it, at most `timeout` seconds.

        Raises (when waited for):
            Unavailable: the engine failed, or one did not do it in time.
        """
        ...


class NoCrew:
    """All requests are the TokenizerManager's own."""

    live = 0

    def live_requests(self) -> list[dict[str, Any]]:
        return []

    def fail_rank(self, rank: int, reason: FinishReason) -> int:
        return 0

    def tell(self, order: Told) -> None:
        pass

    async def ask(self, order: AckedOrder, timeout: float | None = None) -> None:
        pass
