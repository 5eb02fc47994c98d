"""Control messages. A request with an `id` gets one reply that carries the same `id`, of each rank that it goes to.

What comes from a scheduler says in `dp_rank` from which. Imports: msgspec only.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sgviz.messages.generate import FinishReason


class AbortReq(msgspec.Struct, kw_only=True, tag=True, array_like=True):
    """To the scheduler: end exactly `rid` (or all, with `abort_all`). From it: `rid` was removed from a
    queue before it ran, for `finished_reason`."""

    rid: str = ""
    abort_all: bool = False
    message: str = ""
    finished_reason: FinishReason | None = None


class FlushCacheReqInput(msgspec.Struct, kw_only=True, tag=True, array_like=True):
    id: str


class FlushCacheReqOutput(msgspec.Struct, kw_only=True, tag=True, array_like=True):
    id: str
    success: bool
    message: str
    dp_rank: int = 0


class GetInternalStateReq(msgspec.Struct, kw_only=True, tag=True, array_like=True):
    id: str


class GetInternalStateReqOutput(msgspec.Struct, kw_only=True, tag=True, array_like=True):
    """The engine's own account: the scheduler fills in queue lengths, pool counts and limits, the detokenizer
    adds how many requests it knows and passes it on."""

    id: str
    state: dict[str, Any]
    dp_rank: int = 0


class HealthCheckOutput(msgspec.Struct, kw_only=True, tag=True, array_like=True):
    """The scheduler lives: sent when a probe came while it was busy and a result followed, or (`forward` False)
    before an answer that goes by the detokenizer, so that a silent detokenizer can be told from a silent scheduler."""

    rid: str
    forward: bool = True
    dp_rank: int = 0


class ConfigureTraceReq(msgspec.Struct, kw_only=True, tag=True, array_like=True):
    """Switch events on or off in a running component."""

    on: bool


class ShutdownReq(msgspec.Struct, kw_only=True, tag=True, array_like=True):
    """Leave the loop and exit 0. The scheduler passes it on to the detokenizer, which leaves when all have."""
