"""One stream of events in as many as there are schedulers: each as if its scheduler were the only one.

An event of a scheduler belongs to its rank, one of the components around it to the rank of its request, and one that
names nobody to all. What came before the controller chose waits for that choice, so a stream is only ever appended to.
Mirrors nothing of SGLang. Imports: events, recording, msgspec.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from sgviz.events.schema import (
    DpChose,
    DpRankChanged,
    EngineConfigured,
    Event,
    OutputReceived,
    ProcessStarted,
    QueueEntered,
    TextEmitted,
    TraceDropped,
)
from sgviz.recording.families import parent_name
from sgviz.recording.rank_lives import BEGINS, ENDS, Life, Waiting

SCHEDULER = "scheduler"  # its name where it is the only one
NOBODY = -1  # the stream of requests that no scheduler got
HOLD_NS = 250_000_000  # longer a choice is not waited for; if it comes all the same, everything is split anew
_SCHEDULER = re.compile(r"scheduler-(\d+)")
_Split = OutputReceived | TextEmitted


def rank_of(component: str) -> int | None:
    """The number of a scheduler that is one of several; None for all other components."""
    found = _SCHEDULER.fullmatch(component)
    return int(found[1]) if found else None


class RankSplit:
    """Splits what `extend` gives it, in the order of time.

    Attributes:
        streams: events by rank, and `NOBODY`. Sequence numbers count within a stream; those that were truly lost are
            left out in each. missing: those, by component. stale: what is out was split wrongly; begin anew.
        configured: the engine's sizes, once an event told them. dropped: sum of the `trace.dropped` events.
    """

    def __init__(self, ranks: Iterable[int] = ()) -> None:
        self.streams: dict[int, list[Event]] = {NOBODY: []}
        self.missing: dict[str, int] = {}
        self.stale = False
        self.configured: EngineConfigured | None = None
        self.dropped = 0
        self._known: dict[str, Life] = {}
        self._last_seq: dict[str, int] = {}
        self._gaps: dict[str, int] = {}
        self._numbers: dict[tuple[int, str], int] = {}
        self._queue: deque[Waiting] = deque()
        for rank in ranks:
            self.streams.setdefault(rank, [])

    @property
    def waits(self) -> bool:
        """Whether events are held back."""
        return bool(self._queue)

    def missing_in(self, rank: int) -> dict[str, int]:
        """What was lost of the components that speak in a rank's stream, by their names there."""
        found: dict[str, int] = {}
        for component, lost in self.missing.items():
            number = rank_of(component)
            if number in (None, rank):
                found[component if number is None else SCHEDULER] = lost
        return found

    def result(self) -> RankSplit:
        """What it says of all, without what it needs to go on."""
        done = RankSplit(rank for rank in self.streams if rank != NOBODY)
        done.missing, done.configured, done.dropped = dict(self.missing), self.configured, self.dropped
        return done

    def extend(self, events: Sequence[Event], *, last: bool = False) -> None:
        """Take further events. `last`: none follow, so nothing waits."""
        for event in events:
            if (rank := rank_of(event.component)) is not None:
                self.streams.setdefault(rank, [])
            if isinstance(event.body, EngineConfigured):
                self.configured = event.body
            elif isinstance(event.body, TraceDropped):
                self.dropped += event.body.count
            self._queue.append(Waiting(event, self._gap(event), self._lives(event, rank)))
        now = events[-1].t if events else 0
        while self._queue and (last or self._is_due(self._queue[0], now)):
            self._put(self._queue.popleft())

    # ------------------------------------------------------------ where an event belongs

    def _gap(self, event: Event) -> int:
        component = event.component
        lost = event.seq - self._last_seq.get(component, 0) - 1
        if lost >= 0:
            self._last_seq[component] = event.seq
            if lost:
                self._gaps[component] = self._gaps.get(component, 0) + lost
                self.missing[component] = self._gaps[component]
        return self._gaps.get(component, 0)

    def _lives(self, event: Event, rank: int | None) -> tuple[Life, ...]:
        """Whose event it is, if it is not a scheduler's; those of a scheduler tell where a request is."""
        body = event.body
        if isinstance(body, DpChose):
            return (self._goes_to(body.rid, body.rank),)
        if rank is not None:
            if isinstance(body, QueueEntered):
                went = self._goes_to(body.rid, rank)
                went.over = went.over or body.probe  # no event says that a health check is
            return ()
        if isinstance(body, _Split):
            return tuple([self._life(rid) for rid in body.rids])
        rid = getattr(body, "rid", "")
        if not rid:
            return ()
        life = self._known.get(rid)
        if life is None or (life.over and isinstance(body, BEGINS)):
            life = self._known[rid] = Life()
        if isinstance(body, ENDS):
            self._end(life)
        return (life,)

    def _end(self, life: Life) -> None:
        life.over = life.decided = True

    def _life(self, rid: str) -> Life:
        life = self._known.get(rid)
        if life is None:
            life = self._known[rid] = Life()
        return life

    def _goes_to(self, rid: str, rank: int) -> Life:
        life = self._life(rid)
        if (name := parent_name(rid, self._known)) is not None:  # a sample or prompt takes its parent along
            parent = self._known[name]
            self._settle(parent, [*parent.ranks, rank])
        self._settle(life, [rank])
        return life

    def _settle(self, life: Life, ranks: list[int]) -> None:
        ranks = list(dict.fromkeys(ranks))
        self.stale = self.stale or (life.told and ranks != life.ranks)
        life.ranks, life.decided = ranks, True

    # ------------------------------------------------------------ giving it out

    def _is_due(self, waiting: Waiting, now: int) -> bool:
        return now - waiting.event.t > HOLD_NS or all(life.decided for life in waiting.lives)

    def _put(self, waiting: Waiting) -> None:
        event, lives = waiting.event, waiting.lives
        for life in lives:
            life.told = True
        if (rank := rank_of(event.component)) is not None:
            body = event.body
            if isinstance(body, ProcessStarted):
                body = msgspec.structs.replace(body, component=SCHEDULER)
            self._append(rank, SCHEDULER, waiting, body)
        elif isinstance(event.body, DpRankChanged):
            self._append(event.body.rank, event.component, waiting, event.body)
        elif isinstance(event.body, _Split):
            self._divide(waiting, event.body)
        else:
            for rank in (lives[0].ranks or [NOBODY]) if lives else list(self.streams):
                self._append(rank, event.component, waiting, event.body)

    def _divide(self, waiting: Waiting, body: _Split) -> None:
        """An event that names several requests becomes one for each rank that has some of them."""
        members: dict[int, list[int]] = {}
        for at, life in enumerate(waiting.lives):
            for rank in life.ranks or [NOBODY]:
                members.setdefault(rank, []).append(at)
        for rank, mine in members.items():
            part = body
            if len(mine) < len(body.rids):
                columns = {name: getattr(body, name) for name in body.__struct_fields__}
                part = msgspec.structs.replace(
                    body, **{name: tuple([column[at] for at in mine]) for name, column in columns.items()}
                )
            self._append(rank, waiting.event.component, waiting, part)

    def _append(self, rank: int, component: str, waiting: Waiting, body: object) -> None:
        key = (rank, component)
        number = self._numbers[key] = self._numbers.get(key, 0) + 1
        event = waiting.event
        stream = self.streams.setdefault(rank, [])
        stream.append(Event(number + waiting.gaps, event.t, component, event.iteration, body))  # type: ignore[arg-type]
