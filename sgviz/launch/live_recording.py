"""What a recording of a running engine stands on: header and ring.

Imports: config, events, recording (a bridge may).
"""

from __future__ import annotations

from collections.abc import Iterable

from sgviz.config import Settings
from sgviz.events import RingSink
from sgviz.events.schema import EngineConfigured
from sgviz.launch.messages import InitInfo
from sgviz.recording import ClockAnchor, Header, Recording


def configured_of(settings: Settings, info: InitInfo) -> EngineConfigured:
    """The sizes of the engine, `info` being the scheduler's."""
    return EngineConfigured(
        settings=settings.public(),
        model=info.model,
        max_total_num_tokens=info.max_total_num_tokens,
        page_size=settings.cache.page_size,
        max_running_requests=info.max_running_requests,
        context_len=info.context_len,
        rows=info.max_running_requests,
    )


def header_of(
    settings: Settings,
    infos: Iterable[InitInfo],
    configured: EngineConfigured | None = None,
    dropped: int = 0,
) -> Header:
    """Settings without secrets, a clock anchor by component, and what was lost before the first event."""
    anchors = tuple(
        ClockAnchor(component=i.component, pid=i.pid, unix_ns=i.unix_ns, monotonic_ns=i.monotonic_ns)
        for i in infos
    )
    return Header(settings=settings.public(), anchors=anchors, configured=configured, dropped=dropped)


def recording_of(ring: RingSink, header: Header) -> Recording:
    """Tables of what the ring holds, brought up to date whenever they are looked at."""
    return Recording.live(
        ring.snapshot, header, total=lambda: ring.total, dropped=lambda: ring.dropped, since=ring.since
    )
