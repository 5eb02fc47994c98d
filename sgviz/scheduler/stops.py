"""The named stops of every event loop: where a server drains on, a debugger parks and a replay clocks."""

from __future__ import annotations

from enum import StrEnum


class Stop(StrEnum):
    """RECEIVED: messages are in. PLANNED: the next batch is fixed (or none). LAUNCHED: it runs on the device.
    PROCESSED: a result is in the requests. IDLE: there was nothing to do; waiting for a message is allowed."""

    RECEIVED = "received"
    PLANNED = "planned"
    LAUNCHED = "launched"
    PROCESSED = "processed"
    IDLE = "idle"
