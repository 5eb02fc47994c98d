"""What a prefill or decode server has to count beyond the rest: its queues, and the transfers of KV.

Mirrors the disaggregation part of SGLang's scheduler metrics. Simplified: what SGLang counts for retries, KV by way of
the host and deferred releases does not happen here. Imports: events, observe.rank_state, observe.series.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from sgviz.events.schema import (
    DisaggBootstrapped,
    DisaggPreallocated,
    DisaggQueued,
    DisaggTransferred,
    Event,
    RequestAborted,
)
from sgviz.observe.rank_state import RankState
from sgviz.observe.series import Labels, Series

MAX_WAITING = 16_384  # more than can be under way
BEFORE = ("bootstrap", "prealloc")  # queues in which nothing travels yet


def side_gauges(state: RankState) -> dict[str, float]:
    """By the names of `names.SIDE_GAUGES`.

    On the decode side one queue has those that look for their prefill server and those that wait for room.
    """
    at = Counter(state.engine.apart.values())
    prefill = state.side == "prefill"
    return {
        "num_prefill_bootstrap_queue_reqs": at["bootstrap"] if prefill else 0,
        "num_prefill_inflight_queue_reqs": at["inflight"],
        "num_decode_prealloc_queue_reqs": 0 if prefill else at["bootstrap"] + at["prealloc"],
        "num_decode_transfer_queue_reqs": at["transfer"],
    }


class SideMetrics:
    """Counts into `series`. `here`: the scheduler whose event is folded."""

    def __init__(self, series: Series, here: Callable[[], RankState]) -> None:
        self._series = series
        self._here = here
        self._since: dict[str, int] = {}  # by rid: when it began to wait for what comes next

    def handlers(self) -> dict[type, Callable[[Event, Any], None]]:
        return {
            DisaggQueued: self._on_queued,
            DisaggBootstrapped: self._on_bootstrapped,
            DisaggPreallocated: self._on_preallocated,
            DisaggTransferred: self._on_transferred,
        }

    def aborted(self, body: RequestAborted) -> None:
        """It waits for nothing any more."""
        self._since.pop(body.rid, None)

    def _on_queued(self, event: Event, body: DisaggQueued) -> None:
        self._since[body.rid] = body.received_ns or event.t
        while len(self._since) > MAX_WAITING:  # whose end was lost
            del self._since[next(iter(self._since))]

    def _on_bootstrapped(self, event: Event, body: DisaggBootstrapped) -> None:
        self._waited("kv_transfer_bootstrap_ms", event, body.rid)
        if body.side == "decode":
            self._since[body.rid] = event.t

    def _on_preallocated(self, event: Event, body: DisaggPreallocated) -> None:
        self._waited("kv_transfer_alloc_ms", event, body.rid)

    def _waited(self, name: str, event: Event, rid: str) -> None:
        since = self._since.pop(rid, None)
        if since is not None:
            self._series.observe(name, (event.t - since) / 1e6, self._label)

    def _on_transferred(self, event: Event, body: DisaggTransferred) -> None:
        self._since.pop(body.rid, None)
        series, own = self._series, self._label
        if not body.ok:
            before = self._here().engine.apart.get(body.rid) in BEFORE
            series.count(f"num_{'bootstrap' if before else 'transfer'}_failed_reqs", 1, own)
            return
        spent = body.end_ns - body.start_ns
        if not body.start_ns or spent <= 0:  # nothing had to travel
            return
        series.observe("kv_transfer_latency_ms", spent / 1e6, own)
        series.observe("kv_transfer_total_mb", body.bytes / 1e6, own)
        series.observe("kv_transfer_speed_gb_s", body.bytes / spent, own)

    @property
    def _label(self) -> Labels:
        return self._here().label
