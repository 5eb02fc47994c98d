"""The recording of one rank of several: its events under the header of an engine with one scheduler.

Imports: events, recording.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from sgviz.events.schema import EngineConfigured, Event
from sgviz.recording.rank_split import NOBODY, SCHEDULER, rank_of
from sgviz.recording.store import Header

if TYPE_CHECKING:
    from sgviz.recording.ranked_source import RankedSource
    from sgviz.recording.recording import Recording


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEvents:
    """Where a live rank has its events from.

    Attributes:
        snapshot, total, since: as of `Source.live`. missing: what was lost of those who speak there, by component.
        span: first and last stamp of the whole.
    """

    snapshot: Callable[[], list[Event]]
    total: Callable[[], int]
    since: Callable[[int, int], tuple[int, Sequence[Event]]]
    missing: Callable[[], Mapping[str, int]]
    span: Callable[[], tuple[int, int]]


def live_part(
    whole: RankedSource, rank: int, configured: EngineConfigured | None, events: RankEvents
) -> Recording:
    """The recording of a rank of `whole`, brought up to date whenever it is looked at."""
    from sgviz.recording.recording import Recording  # which is made of its like

    part = Recording.live(
        events.snapshot,
        _header_of(whole.header, rank, configured),
        total=events.total,
        dropped=whole._lost,
        since=events.since,
    )
    return _named(part, whole, rank, events.span, events.missing)


def stored_part(
    whole: RankedSource,
    rank: int,
    configured: EngineConfigured | None,
    events: Sequence[Event],
    missing: Callable[[], Mapping[str, int]],
) -> Recording:
    """The recording of a rank of `whole` to which nothing more comes."""
    from sgviz.recording.recording import Recording

    part = Recording(events, _header_of(whole.header, rank, configured))
    return _named(part, whole, rank, lambda: (whole.t0, whole.t_end), missing)


def _named(
    part: Recording,
    whole: RankedSource,
    rank: int,
    span: Callable[[], tuple[int, int]],
    missing: Callable[[], Mapping[str, int]],
) -> Recording:
    part.source = f"{whole.source}, rank {rank}" if rank != NOBODY else whole.source
    part._span, part._gone = span, missing
    part._is_part, part.rank_number, part._whole = True, rank, whole
    return part


def _header_of(header: Header, rank: int, configured: EngineConfigured | None) -> Header:
    """The header with one scheduler, by the name that it has when it is the only one."""
    anchors = [
        msgspec.structs.replace(anchor, component=SCHEDULER) if rank_of(anchor.component) == rank else anchor
        for anchor in header.anchors
        if rank_of(anchor.component) in (None, rank)
    ]
    return msgspec.structs.replace(header, anchors=tuple(anchors), configured=configured)
