"""Waiting for a request's states, and noticing that its client has gone.

Mirrors the waiting half of SGLang's `_wait_one_response`. A timer for each wait would cost more than the wait, so
one timer stands for the next question about the client, however many outputs come before. Imports: errors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from sgviz.errors import ClientDisconnected

POLL_S = 0.2  # engine work for a departed client must stop within half a second
IsDisconnected = Callable[[], Awaitable[bool]]


class Waiter:
    """What the one task of a request waits on. Its `event` is shared by all states of the request.

    Args:
        is_disconnected: asks whether the client has gone; None: there is nobody who could go.
        poll_s: seconds between two such questions, also while outputs keep coming.
    """

    def __init__(self, is_disconnected: IsDisconnected | None, poll_s: float = POLL_S) -> None:
        self.event = asyncio.Event()
        self._is_disconnected = is_disconnected
        self._poll_s = poll_s
        self._loop = asyncio.get_running_loop()
        self._due = False
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self) -> None:
        """Until there may be news. Raises ClientDisconnected if nobody is there to read them."""
        if self._timer is None:
            await self.poll()
        await self.event.wait()
        self.event.clear()
        await self.poll()

    async def poll(self) -> None:
        """Ask for the client if it is time to. Raises ClientDisconnected if it has gone."""
        if self._is_disconnected is None:
            return
        if self._due:
            self._due = False
            if await self._is_disconnected():
                raise ClientDisconnected("the client closed the connection")
        if self._timer is None:
            self._timer = self._loop.call_later(self._poll_s, self._on_time)

    def close(self) -> None:
        """Nobody waits any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_time(self) -> None:
        self._timer = None
        self._due = True
        self.event.set()
