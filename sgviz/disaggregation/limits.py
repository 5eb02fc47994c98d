"""The time limits of the settings, in ns, and how long a wait for the other side may be.

Imports: config, worker protocol.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgviz.config import DisaggregationConfig
from sgviz.worker.protocol import KVLayout

S = 10**9
LOOK_MS = 1  # between two looks at what wakes nobody
WOKEN_MS = 20  # where everything does: for what has a time limit


@dataclass(frozen=True, slots=True)
class Limits:
    """`silence`: without a sign for so long, a side is lost."""

    bootstrap: int
    waiting: int
    interval: int
    silence: int

    @classmethod
    def of(cls, settings: DisaggregationConfig) -> Limits:
        interval = settings.disaggregation_heartbeat_interval
        return cls(
            bootstrap=round(settings.disaggregation_bootstrap_timeout * S),
            waiting=round(settings.disaggregation_waiting_timeout * S),
            interval=round(interval * S),
            # half an interval before the next one counts as missed, so that a late beat is not taken for a missing one
            silence=round(interval * (settings.disaggregation_heartbeat_max_failures + 0.5) * S),
        )

    @property
    def memory(self) -> int:
        """A side that was lost and gives no sign for so long waits for nothing: its rooms ended by their own limits."""
        return max(self.silence, self.bootstrap + self.waiting)


def wait_ms_of(layout: KVLayout) -> int:
    """How long a manager of such a device may be left alone while nothing wakes it."""
    return WOKEN_MS if layout.wire_bytes else LOOK_MS
