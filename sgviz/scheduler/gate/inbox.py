"""The scheduler's inbox behind the gate: debug commands are done at once, everything else keeps its order.

Imports: messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from sgviz.messages import ToScheduler
from sgviz.messages.debug import DebugReq

POLL_MS = 100  # a parked scheduler looks at its leases this often; a message wakes it at once


class Source(Protocol):
    """Where messages come from; `sgviz.channel.Receiver` is one."""

    def drain(self, limit: int = ...) -> list[ToScheduler]: ...

    def wait(self, timeout_ms: int) -> bool: ...


class GatedInbox:
    """What the scheduler reads instead of its socket.

    Args:
        command: does a debug command. in_a_hurry: a debugger waits for the next stop, so nothing may block.
    """

    def __init__(
        self, source: Source, command: Callable[[DebugReq], None], in_a_hurry: Callable[[], bool]
    ) -> None:
        self._source = source
        self._command = command
        self._in_a_hurry = in_a_hurry
        self._kept: list[ToScheduler] = []

    def drain(self, limit: int = 1024) -> list[ToScheduler]:
        """The messages kept while parked and those that are there now, without debug commands."""
        messages = self._source.drain(limit)
        if self._kept:
            messages = self._kept + messages
            self._kept = []
        if messages and any(type(message) is DebugReq for message in messages):
            return self._without_commands(messages)
        return messages

    def _without_commands(self, messages: list[ToScheduler]) -> list[ToScheduler]:
        """Commands go first: one behind a message at which a breakpoint parks would never be heard."""
        for message in messages:
            if isinstance(message, DebugReq):
                self._command(message)
        return [message for message in messages if not isinstance(message, DebugReq)]

    def wait(self, timeout_ms: int) -> bool:
        """As the source's; does not block while something is here already or a debugger waits for a stop."""
        if self._kept or self._in_a_hurry():
            return True
        return self._source.wait(timeout_ms)

    def arrivals(self) -> list[ToScheduler]:
        """What came within the next moment; for a parked scheduler."""
        return self._source.drain() if self._source.wait(POLL_MS) else []

    def keep(self, message: ToScheduler) -> None:
        """For the next `drain`, in the order of the calls."""
        self._kept.append(message)
