"""A recording of several schedulers: one recording a rank, and what they say together.

Each rank's recording is that of an engine with one scheduler, so everything that reads a recording reads it. Tables of
the whole are those of the ranks, one below the other. SGLang has metrics by rank, and nothing that joins them.

Imports: errors, events, recording, pandas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import pandas as pd

from sgviz.errors import NotFound
from sgviz.events.schema import EngineConfigured, Event
from sgviz.recording.audit import AuditReport
from sgviz.recording.engine_fold import Difference
from sgviz.recording.rank_feed import RankFeed
from sgviz.recording.rank_part import RankEvents, live_part, stored_part
from sgviz.recording.rank_split import NOBODY, RankSplit, rank_of
from sgviz.recording.requests import RequestState
from sgviz.recording.store import Header

if TYPE_CHECKING:
    from sgviz.recording.ranked_source import RankedSource
    from sgviz.recording.recording import Recording

_ORDER = ("t_ms", "planned_ms", "arrival_ms", "first_ms")  # what the rows of a table are ordered by


def ranks_in(header: Header, events: Sequence[Event]) -> set[int]:
    """The schedulers that are some of several; empty where there is just one."""
    names = {anchor.component for anchor in header.anchors} | {event.component for event in events}
    return {rank for name in names if (rank := rank_of(name)) is not None}


class Ranks:
    """The ranks of `whole`. `parts`: a recording each, and under `NOBODY` that of requests that no rank got."""

    def __init__(self, whole: RankedSource, ranks: set[int]) -> None:
        self._whole = whole
        self._split = RankSplit(sorted(ranks))
        self._taken: Sequence[Event] = ()
        self._version = 0  # grows when events are split anew
        self.parts: dict[int, Recording] = {}
        self._names: dict[str, tuple[int, RequestState]] | None = None
        self._feed: RankFeed | None = None  # for who follows a rank
        self._still = False  # what comes now is not taken

    def refresh(self, events: Sequence[Event], *, live: bool) -> None:
        """Split what came since; all of it again where something came or went in between."""
        old, known = self._taken, len(self._taken)
        if events is not old:
            if known and (len(events) < known or events[0] is not old[0] or events[known - 1] is not old[-1]):
                self._again()
                known = 0
            self._split.extend(events[known:], last=not live)
            if self._split.stale:
                self._again()
                self._split.extend(events, last=not live)
            self._taken, self._names = events, None
        elif self._split.waits:  # nothing came since the last look: what is there is all there is
            self._split.extend((), last=True)
            self._names = None
        for rank in sorted(self._split.streams):
            if rank not in self.parts:
                self.parts[rank] = self._part(rank, live)

    def freeze(self, whole: RankedSource) -> Ranks:
        """The moment of the frozen recording `whole`, for itself."""
        self.refresh(whole._events, live=True)
        if self._split.waits:  # what is there is all there is
            self._split.extend((), last=True)
        frozen = Ranks(whole, set())
        frozen._split, frozen._taken = self._split.result(), whole._events
        self._still = True
        try:
            frozen.parts = {rank: part.freeze() for rank, part in self.parts.items()}
        finally:
            self._still = False
        return frozen

    def _again(self) -> None:
        self._split = RankSplit(rank for rank in self._split.streams if rank != NOBODY)
        self._version += 1

    def _part(self, rank: int, live: bool) -> Recording:
        if not live:
            stream = self._split.streams[rank]
            return stored_part(
                self._whole, rank, self.configured, stream, lambda: self._split.missing_in(rank)
            )
        events = RankEvents(
            snapshot=lambda: list(self._stream(rank)),
            total=lambda: len(self._stream(rank)) + (self._version << 40),
            since=lambda count, most: self._followed().since(rank, count, most),
            missing=lambda: self._split.missing_in(rank),
            span=lambda: (self._whole.t0, self._whole.t_end),
        )
        return live_part(self._whole, rank, self.configured, events)

    def _followed(self) -> RankFeed:
        if self._feed is None:
            self._feed = RankFeed(self._whole, self.numbers)
        return self._feed

    def _stream(self, rank: int) -> Sequence[Event]:
        """What came for the rank up to now."""
        if not self._still:
            self._whole.refresh()
        if not self._still and self._whole._events is not self._taken:
            self.refresh(self._whole._events, live=True)
        return self._split.streams.get(rank, ())

    # ------------------------------------------------------------ what they say together

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(sorted(rank for rank in self.parts if rank != NOBODY))

    @property
    def dropped(self) -> int:
        return self._split.dropped

    @property
    def configured(self) -> EngineConfigured | None:
        return self._split.configured or self._whole.header.configured

    @property
    def missing(self) -> dict[str, int]:
        return dict(self._split.missing)

    def of(self, rank: int) -> Recording:
        """Raises NotFound: no such rank."""
        if rank == NOBODY or rank not in self.parts:
            raise NotFound(f"no rank {rank!r}; this recording has {', '.join(map(str, self.numbers))}")
        return self.parts[rank]

    def table(self, name: str) -> pd.DataFrame:
        """That table of all ranks, in the order of time; a parent of requests on several ranks has no rank."""
        tables = [getattr(part, name) for part in self.parts.values()]
        filled = [table for table in tables if len(table)]
        if not filled:
            return tables[0]
        table = pd.concat(filled, ignore_index=True) if len(filled) > 1 else filled[0]
        order = next((column for column in _ORDER if column in table.columns), None)
        if order is not None:
            table = table.sort_values(order, ignore_index=True, kind="stable")
        if name in ("requests", "waits"):
            shared = [rid for rid, ranks in self._parents().items() if len(ranks) > 1]
            twice = table.rid.isin(shared)
            table.loc[twice, "dp_rank"] = pd.NA
            table = table[~(twice & table.duplicated("rid", keep="last"))].reset_index(drop=True)
        return table

    def _parents(self) -> dict[str, list[int]]:
        """On which ranks the samples or prompts of a request are."""
        found: dict[str, list[int]] = {}
        for rank, part in self.parts.items():
            for rid, request in part._requests().items():
                if request.children:
                    found.setdefault(rid, []).append(rank)
        return found

    def requests(self) -> dict[str, RequestState]:
        """All requests in the order of their arrival; of several of one rid all but the last are `rid#n`."""
        return {name: request for name, (_, request) in self._found().items()}

    def home(self, request: RequestState) -> Recording:
        """The recording of the rank that had the request."""
        known = (self.parts[rank] for rank, found in self._found().values() if found is request)
        probed = (part for part in self.parts.values() if request.rid in part._state.requests.probes)
        return next(chain(known, probed))

    def probe(self, rid: str) -> RequestState | None:
        """A health check of the server's own."""
        return next((p for part in self.parts.values() if (p := part._state.requests.probes.get(rid))), None)

    def why_not_running(self, at: float | None, iteration: int | None) -> pd.DataFrame:
        """Who waits at a moment, by rank."""
        tables = [
            self.parts[rank].why_not_running(at, iteration=iteration).assign(dp_rank=rank)
            for rank in self.numbers
        ]
        return pd.concat([table for table in tables if len(table)] or tables[:1], ignore_index=True)

    def _found(self) -> dict[str, tuple[int, RequestState]]:
        """Each request and its rank; a parent of samples on several is where the last of them ended."""
        if self._names is not None:
            return self._names
        every = [(rank, r) for rank, part in self.parts.items() for r in part._requests().values()]
        every.sort(key=lambda item: (_began(item[1]), _ended(self.parts[item[0]], item[1])))
        names: dict[str, tuple[int, RequestState]] = {}
        for rank, request in every:
            old = names.pop(request.rid, None)
            if old is not None and not (request.children and old[1].children):
                names[_free_name(request.rid, names)] = old
            names[request.rid] = (rank, request)
        self._names = names
        return names

    def audit(self) -> AuditReport:
        """The findings of all ranks; each keeps books of its own."""
        reports = {rank: part.audit() for rank, part in self.parts.items()}
        findings = [
            replace(finding, component=f"scheduler-{rank}") if finding.component == "scheduler" else finding
            for rank, report in reports.items()
            for finding in report.findings
        ]
        skipped = sum(report.events - report.audited for report in reports.values())
        live = dict.fromkeys(rid for report in reports.values() for rid in report.live)
        events = len(self._taken)
        ordered = tuple(sorted(findings, key=lambda finding: finding.t))
        return AuditReport(ordered, events, max(0, events - skipped), tuple(live))

    def check(self) -> list[Difference]:
        """The differences of all ranks, in the order of time."""
        found = [difference for part in self.parts.values() for difference in part.check()]
        return sorted(found, key=lambda difference: difference.t)


def _began(request: RequestState) -> int:
    stats = request.stats
    return stats.created or stats.api_server_dispatch or stats.wait_queue_entry or stats.completion


def _ended(part: Recording, request: RequestState) -> int:
    """When the last of its samples or prompts there was done."""
    own = part._requests()
    children = [own[rid].stats.completion or part.t_end for rid in request.children if rid in own]
    return max(children, default=request.stats.completion)


def _free_name(rid: str, taken: Mapping[str, object]) -> str:
    number = 1
    while f"{rid}#{number}" in taken:
        number += 1
    return f"{rid}#{number}"
