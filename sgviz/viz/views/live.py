"""LiveViews: follows a recording (live, remote or a file) and makes what is drawn of it, now or at an earlier event.

Imports: events, recording, viz.views.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec

from sgviz.errors import BadRequest, suggest
from sgviz.events.schema import Event
from sgviz.recording import Recording, State
from sgviz.recording.follow import Follower
from sgviz.recording.moment import moment
from sgviz.viz.views.clocks import Clock, Clocks
from sgviz.viz.views.dashboard import Counters, dashboard
from sgviz.viz.views.journey import journey_view, ranked
from sgviz.viz.views.kv_map import kv_map
from sgviz.viz.views.models import JourneyView, Views
from sgviz.viz.views.overlap import overlap_view
from sgviz.viz.views.radix_tree import TreeLog, tree_view

PAGE = ("dashboard", "kv", "tree", "journey")
NAMES = (*PAGE, "overlap")
MAX_SECONDS = 60.0
JOURNEY_EVERY_S = 1.0  # a journey reads many events
WHOLE = 20_000  # events up to which it reads all there are
MARGIN = 4_000  # else those from so many before the request came: what it waited for began earlier
EVERY_S = 0.1  # at most ten updates a second
REST = 4.0  # times what an update took: a costly one takes at most a fifth of a processor

Decode = Callable[[list[int]], str]


def pause(took_s: float) -> float:
    """Seconds until the next update, after one that took `took_s`."""
    return max(EVERY_S, REST * took_s)


class Wanted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a viewer looks at.

    `what`: views by name. `at`: a place on `clock`: after so many events, ms since the first, or up to the end of an
    iteration (None: now). `rid`: whose journey ("": one that ended). `node`: whose text. `seconds`: how much of the
    overlap lanes. `rank`: of which scheduler, where there are several.
    """

    what: tuple[str, ...] = PAGE
    at: float | None = None
    clock: Clock = "event"
    rid: str = ""
    node: int = 0
    seconds: Annotated[float, msgspec.Meta(gt=0.0, le=MAX_SECONDS)] = 1.0
    rank: int = 0

    def check(self) -> Wanted:
        """Itself. Raises BadRequest that names a view that is none."""
        for name in self.what:
            if name not in NAMES:
                raise BadRequest(f"view {name!r} is not one of {', '.join(NAMES)}{suggest(name, NAMES)}")
        return self


class LiveViews:
    """Folds what is new when it is asked to, and never more than once; memory is bounded however long the run is.

    Args:
        rec: where events come from. decode: token ids to text, for the nodes of the tree, where somebody can.
        lost: events that were gone before `rec` could have them.
    """

    def __init__(
        self, rec: Recording, decode: Decode | None = None, lost: Callable[[], int] = lambda: 0
    ) -> None:
        self._rec = rec
        self._decode = decode
        self._lost = lost
        self.follower = Follower(rec.since, _start(rec))
        self._counters = Counters()
        self._tree_log = TreeLog()
        self._clocks = Clocks()
        self._fault = ""
        self._default = ""
        self._journey: tuple[str, float, JourneyView] | None = None  # whose, until when it is fresh

    def refresh(self) -> bool:
        """Take what is new; says whether anything was, or whether the recording's fault is another."""
        before, fault = self.follower.count, self._fault
        self._fault = self._rec.fault
        events: Sequence[Event] = self.follower.advance()
        count = self.follower.count - len(events)
        self._counters.total = self.follower.state.ledger.total
        for event in events:
            count += 1
            self._counters.apply(event)
            self._tree_log.apply(event, count)
            self._clocks.apply(event, count)
        return self.follower.count != before or self._fault != fault

    @property
    def newest_ms(self) -> float:
        """When the newest event was, in ms since the first."""
        return max(0.0, (self._clocks.newest.t - self.follower.t0) / 1e6)

    def make(self, wanted: Wanted) -> Views:
        """The views of one moment.

        Raises:
            BadRequest: no such view, or no such event is remembered.
        """
        wanted.check()
        follower = self.follower
        past = follower.at(self._count(wanted))
        now = moment(past.engine, past.count, follower.t0)
        lost = follower.lost + follower.state.dropped + self._lost()
        dropped = lost if self._rec.is_live else self._rec.dropped
        made: dict[str, object] = {}
        if "dashboard" in wanted.what:
            made["dashboard"] = dashboard(now, follower.state, self._counters, follower.t0, dropped)
        if "kv" in wanted.what:
            made["kv"] = kv_map(now, past.pages, past.engine.ledger)
        if "tree" in wanted.what:
            made["tree"] = tree_view(now, self._tree_log, wanted.node, follower.t0, self._decode)
        if "journey" in wanted.what:
            made["journey"] = self._journey_of(wanted.rid)
        if "overlap" in wanted.what:
            made["overlap"] = overlap_view(
                self._rec.since, past.count, past.engine, wanted.seconds, follower.t0
            )
        oldest = self._clocks.forget(follower.oldest)
        return Views(
            seq=past.count,
            newest=follower.count,
            oldest=follower.oldest,
            oldest_ms=max(0.0, (oldest.t - follower.t0) / 1e6),
            newest_ms=self.newest_ms,
            oldest_iteration=oldest.iteration,
            newest_iteration=self._clocks.newest.iteration,
            t_ms=now.t_ms,
            iteration=now.iteration,
            source=self._rec.source,
            live=self._rec.is_live,
            fault=self._fault,
            **made,  # type: ignore[arg-type]
        )

    def _count(self, wanted: Wanted) -> int | None:
        if wanted.at is None:
            return None
        return self._clocks.count_at(wanted.clock, wanted.at, self.follower.t0, self._rec.since)

    def _journey_of(self, rid: str) -> JourneyView:
        """Kept while the request is over, and for a second while it lives."""
        rids = ranked(self.follower.state.requests)
        if self._default not in rids:  # it stays the same while one reads
            self._default = rids[0] if rids else ""
        rid = rid or self._default
        kept, clock = self._journey, time.monotonic()
        if kept is None or kept[0] != rid or (not kept[2].done and clock > kept[1]):
            made = journey_view(self._around(rid), rid)
            again = time.monotonic()
            kept = self._journey = (rid, again + max(JOURNEY_EVERY_S, pause(again - clock)), made)
        return msgspec.structs.replace(kept[2], rids=tuple(rids))

    def _around(self, rid: str) -> Recording:
        """The recording, or of a long one the part in which the request lived."""
        known = self.follower.state.requests.by_rid.get(rid)
        if not self._rec.is_live or self.follower.count <= WHOLE or known is None:
            return self._rec
        count = self.follower.count
        begin = self._clocks.place(known.stats.created) - MARGIN
        until = self._clocks.place(known.end) + MARGIN if known.end else count
        first, events = self._rec.since(max(0, begin), min(until, count) - max(0, begin))
        if not events:
            return self._rec
        state, start = self.follower.state, min(event.t for event in events)
        told = [Event(0, start, component, 0, body) for component, body in state.processes.items()]
        header = msgspec.structs.replace(self._rec.header, dropped=first, configured=state.configured)
        part = sorted([*told, *events], key=lambda event: event.sort_key)
        return Recording(part, header, source=self._rec.source)


def _start(rec: Recording) -> State:
    """An empty state of the size that the recording's header tells."""
    state = State()
    if rec.header.configured is not None:
        state.engine.configured = rec.header.configured
        state.ledger.configure(rec.header.configured)
    return state
