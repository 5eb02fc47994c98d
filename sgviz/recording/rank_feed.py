"""The schedulers of a run that goes on, each followed by itself: events as they come, with bounded memory.

`rank_split` splits what a recording holds, in the order of time, and begins anew when it was wrong. Here a stream is
never taken back: what names a request waits, without holding up others, until the request has a rank, and of a parent
whose samples are on several ranks each gets the first events. Mirrors nothing of SGLang.

Imports: events, recording.
"""

from __future__ import annotations

import functools
import itertools
import threading
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from sgviz.events.schema import DpRankChanged, EngineConfigured, Event, RequestDispatched, TraceDropped
from sgviz.recording.families import ancestors
from sgviz.recording.rank_lives import BEGINS, ENDS, Life, Waiting
from sgviz.recording.rank_part import RankEvents, live_part
from sgviz.recording.rank_split import NOBODY, SCHEDULER, RankSplit, rank_of

if TYPE_CHECKING:
    from sgviz.recording.ranked_source import RankedSource
    from sgviz.recording.recording import Recording

PIECE = 8192  # events taken at once
MAX_LIVES = 8192  # requests whose rank is remembered; those in a scheduler are never forgotten
MAX_FRAME = 8  # events by which a request begins and ends, kept for the ranks of later samples


class LiveSplit(RankSplit):
    """Splits events in the order in which they come; what is out stays. `stale` is never true."""

    def __init__(self, ranks: Iterable[int] = ()) -> None:
        super().__init__(ranks)
        # by the name of a parent that was not heard of yet: the ranks of its samples and prompts
        self._early: dict[str, list[int]] = {}

    def take(self, event: Event) -> None:
        """Put one event, and what waited for it, where they belong."""
        if (rank := rank_of(event.component)) is not None:
            self.streams.setdefault(rank, [])
        if isinstance(event.body, EngineConfigured):
            self.configured = event.body
        elif isinstance(event.body, TraceDropped):
            self.dropped += event.body.count
        waiting = Waiting(event, self._gap(event), self._lives(event, rank))
        for life in waiting.lives:
            if life.decided and life.held:
                self._release(life)
        undecided = [life for life in waiting.lives if not life.decided]
        for life in undecided:
            life.held.append(waiting)
        if not undecided:
            self._put(waiting)

    def forget(self) -> None:
        """Drop requests that are over, or that nobody sent on, the oldest first, beyond `MAX_LIVES`."""
        excess = len(self._known) - MAX_LIVES
        if excess > 0:
            oldest = list(itertools.islice(self._known.items(), excess))
            for rid, life in oldest:
                if life.over or not life.decided:
                    del self._known[rid]
        while len(self._early) > MAX_LIVES:
            del self._early[next(iter(self._early))]

    def _lives(self, event: Event, rank: int | None) -> tuple[Life, ...]:
        body = event.body
        lives = super()._lives(event, rank)
        if isinstance(body, RequestDispatched):
            for name in (body.rid, *ancestors(body.rid)):
                if (life := self._known.get(name)) is not None:
                    life.sent = True
        if self._early and lives and (ranks := self._early.pop(getattr(body, "rid", ""), None)) is not None:
            self._settle(lives[0], [*lives[0].ranks, *ranks])
        return lives

    def _goes_to(self, rid: str, rank: int) -> Life:
        for name in ancestors(rid):
            if name not in self._known:
                self._early.setdefault(name, []).append(rank)
        return super()._goes_to(rid, rank)

    def _end(self, life: Life) -> None:
        """What went to the controller has a rank, also if that is told after the end."""
        life.over = True
        life.decided = life.decided or not life.sent

    def _settle(self, life: Life, ranks: list[int]) -> None:
        ranks = list(dict.fromkeys(ranks))
        more = [rank for rank in ranks if rank not in life.ranks]
        life.ranks, life.decided = ranks, True
        for waiting in life.frame if life.told else ():
            for rank in more:
                self._append(rank, waiting.event.component, waiting, waiting.event.body)
        self._release(life)

    def _release(self, life: Life) -> None:
        held, life.held = life.held, []
        for waiting in held:
            if all(each.decided for each in waiting.lives):  # else it waits with the others as well
                self._put(waiting)

    def _put(self, waiting: Waiting) -> None:
        body = waiting.event.body
        if isinstance(body, (*BEGINS, *ENDS)) and waiting.lives and len(waiting.lives[0].frame) < MAX_FRAME:
            waiting.lives[0].frame.append(waiting)
        super()._put(waiting)


class _Lane:
    """One rank's events that are remembered, and after how many of all each was there."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.places: list[int] = []
        self.gone = 0  # events before them

    def drop(self, place: int) -> None:
        """Forget what was there when all events were `place`; a quarter at once, so that it costs little."""
        over = bisect_right(self.places, place)
        if over > len(self.places) // 4:
            del self.events[:over], self.places[:over]
            self.gone += over


class RankFeed:
    """The ranks of a live recording, in the order in which their events come.

    Args:
        whole: followed by its `since`. ranks: the numbers of its schedulers.

    Attributes:
        count: events of all so far. oldest: those of them that are no longer there. lost: those that were gone
            before they could be taken. dead: why, of ranks that were lost.
    """

    def __init__(self, whole: RankedSource, ranks: Iterable[int]) -> None:
        self.whole = whole
        self.ranks = tuple(sorted(ranks))
        self.count = 0
        self.oldest = 0
        self.lost = 0
        self.dead: dict[int, str] = {}
        self.t0 = 0  # earliest and latest stamp
        self.t_end = 0
        self._split = LiveSplit(self.ranks)
        self._lanes = {rank: _Lane() for rank in (*self.ranks, NOBODY)}
        self._turn = threading.Lock()

    def advance(self) -> int:
        """Take all that is new; how many events there were in all."""
        with self._turn:
            while True:
                first, events = self.whole.since(self.count, PIECE)
                self.lost += max(0, first - self.count)
                self.count = max(first, self.count)
                if not events:
                    break
                stamps = [event.t for event in events]
                self.t0, self.t_end = min(self.t0 or stamps[0], *stamps), max(self.t_end, *stamps)
                self._take(events)
            self.oldest, _ = self.whole.since(0, 0)
            for lane in self._lanes.values():
                lane.drop(self.oldest)
            self._split.forget()
            return self.count

    def since(self, rank: int, count: int, most: int) -> tuple[int, Sequence[Event]]:
        """As `RingSink.since`, of the events of a rank and by their own numbers."""
        self.advance()
        with self._turn:
            lane = self._lanes[rank]
            at = max(0, count - lane.gone)
            return max(count, lane.gone), lane.events[at : at + most]

    def snapshot(self, rank: int) -> list[Event]:
        """What is remembered of a rank, in the order of time."""
        self.advance()
        with self._turn:
            return _numbered(sorted(self._lanes[rank].events, key=lambda event: event.sort_key))

    def total(self, rank: int) -> int:
        """Events of a rank so far."""
        self.advance()
        lane = self._lanes[rank]
        return lane.gone + len(lane.events)

    def count_at(self, rank: int, place: int) -> int:
        """How many events a rank had when all were `place`; of what is forgotten, as many as are."""
        with self._turn:
            lane = self._lanes[rank]
            return lane.gone + bisect_right(lane.places, place)

    def place_of(self, rank: int, count: int) -> int:
        """How many events there were in all when a rank had `count`; of what is forgotten, `oldest`."""
        with self._turn:
            lane = self._lanes[rank]
            at = count - lane.gone
            return lane.places[at - 1] if 0 < at <= len(lane.places) else self.oldest

    def recording(self, rank: int) -> Recording:
        """The recording of a rank over what is remembered of it here."""
        events = RankEvents(
            snapshot=lambda: self.snapshot(rank),
            total=lambda: self.total(rank),
            since=functools.partial(self.since, rank),
            missing=lambda: self._split.missing_in(rank),
            span=lambda: (self.t0, self.t_end),
        )
        return live_part(self.whole, rank, self._split.configured, events)

    def _take(self, events: Sequence[Event]) -> None:
        streams = self._split.streams
        for event in events:
            self._split.take(event)
            self.count += 1
            if isinstance(event.body, DpRankChanged):
                self._changed(event.body)
            for rank, stream in streams.items():
                if stream:
                    lane = self._lanes.setdefault(rank, _Lane())
                    lane.places.extend([self.count] * len(stream))
                    lane.events.extend(stream)
                    stream.clear()

    def _changed(self, body: DpRankChanged) -> None:
        self.dead.pop(body.rank, None)
        if not body.active:
            self.dead[body.rank] = body.why


def _numbered(events: list[Event]) -> list[Event]:
    """Numbers in the order of time for what may have waited, else it would look as if some were lost.

    A scheduler's events never wait; what its numbers leave out was lost.
    """
    first: dict[str, int] = {}
    for event in events:
        first[event.component] = min(event.seq, first.get(event.component, event.seq))
    for at, event in enumerate(events):
        number = first[event.component]
        first[event.component] += 1
        if event.component != SCHEDULER and event.seq != number:
            events[at] = msgspec.structs.replace(event, seq=number)
    return events
