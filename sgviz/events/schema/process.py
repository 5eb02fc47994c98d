"""Events of processes and of recording itself. Imports: schema.base."""

from __future__ import annotations

from sgviz.events.schema.base import Body

# ---------------------------------------------------------------- processes and recording


class ProcessStarted(Body, frozen=True, tag="process.started"):
    """A component came up. The two clocks were read together, so `t` can be turned into calendar time."""

    component: str
    pid: int
    mode: str
    unix_ns: int
    monotonic_ns: int


class EngineConfigured(Body, frozen=True, tag="engine.configured"):
    """The settings as resolved, and the sizes that follow from model and memory."""

    settings: dict[str, str | int | float | bool | None]
    model: str
    max_total_num_tokens: int
    page_size: int
    max_running_requests: int
    context_len: int
    rows: int


class TraceDropped(Body, frozen=True, tag="trace.dropped"):
    """A sink had no room for `count` events; `total` since the start."""

    sink: str
    count: int
    total: int


class TraceCost(Body, frozen=True, tag="trace.cost"):
    """What observing cost the component so far: `cost_ns` in emit and flush, for `events` events."""

    events: int
    cost_ns: int
