"""Waiting for a request's states, and noticing that its client has gone.

Mirrors the waiting half of SGLang's `_wait_one_response`. Imports: errors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

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
        self._next_poll = asyncio.get_running_loop().time() + poll_s

    async def wait(self) -> None:
        """Until there may be news. Raises ClientDisconnected if nobody is there to read them."""
        while not self.event.is_set():
            await self._wait_until_poll()
            await self.poll()
        self.event.clear()

    async def poll(self) -> None:
        """Ask for the client if it is time to. Raises ClientDisconnected if it has gone."""
        loop = asyncio.get_running_loop()
        if self._is_disconnected is None or loop.time() < self._next_poll:
            return
        if await self._is_disconnected():
            raise ClientDisconnected("the client closed the connection")
        self._next_poll = loop.time() + self._poll_s

    async def _wait_until_poll(self) -> None:
        if self._is_disconnected is None:
            await self.event.wait()
            return
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._next_poll):
                await self.event.wait()
