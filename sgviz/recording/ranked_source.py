"""What a recording has if several schedulers were recorded: its ranks, and what follows from all of them.

With one scheduler nothing here does anything. Imports: errors, events, recording.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Self

from sgviz.errors import BadRequest, NotFound
from sgviz.events.schema import EngineConfigured
from sgviz.recording.engine_fold import Difference
from sgviz.recording.fold import Folded
from sgviz.recording.rank_feed import RankFeed
from sgviz.recording.ranks import Ranks, ranks_in
from sgviz.recording.requests import RequestState
from sgviz.recording.source import Source

if TYPE_CHECKING:
    from sgviz.recording.recording import Recording


class RankedSource(Source):
    """The events of a run with any number of schedulers."""

    _ranks: Ranks | None = None
    _is_part = False  # the recording of one rank
    _scanned = 0
    _whole: RankedSource | None = None  # what it is a part of
    _gone: Callable[[], Mapping[str, int]] | None = None  # what was lost of those who speak in it
    rank_number = 0  # which, if it is

    @property
    def named_ranks(self) -> tuple[int, ...]:
        """The schedulers that are some of several, of a live recording as its header names them; () where there is one.

        Looks at no event of a live recording.
        """
        if self._is_part:
            return ()
        if self.is_live:
            return tuple(sorted(ranks_in(self.header, ())))
        many = self._many()
        return () if many is None else many.numbers

    @property
    def ranks(self) -> tuple[int, ...]:
        """The data parallel ranks whose schedulers were recorded; `(0,)`: there is one scheduler."""
        many = self._many()
        return (self.rank_number,) if many is None else many.numbers

    def rank(self, number: int) -> Recording:
        """The recording of one rank: its scheduler, and what the components around it did for its requests.

        Raises:
            NotFound: no such rank.
        """
        from sgviz.recording.recording import Recording

        many = self._many()
        if many is not None:
            return many.of(number)
        if number != self.rank_number or not isinstance(self, Recording):
            raise NotFound(f"no rank {number!r}; this recording has one, {self.rank_number}")
        return self

    def freeze(self) -> Self:
        """This moment of a live recording, for several looks at the same state."""
        many = self._many()
        frozen = super().freeze()
        if frozen is self:
            return self
        if many is not None:
            frozen._ranks = many.freeze(frozen)
        t0, t_end = self.t0, self.t_end
        if self._span is not None:
            frozen._span = lambda: (t0, t_end)
        frozen._is_part, frozen.rank_number = self._is_part, self.rank_number
        if self._gone is not None:
            gone = dict(self._gone())
            frozen._gone = lambda: gone
        return frozen

    def sibling(self) -> Self:
        """A live recording of the same events with a state of its own, for another thread; of a file, itself."""
        if self.is_live and self._whole is not None:
            whole = self._whole.sibling()
            feed = RankFeed(whole, ranks_in(whole.header, ()) | {self.rank_number})
            return feed.recording(self.rank_number)  # type: ignore[return-value]
        return super().sibling()

    @property
    def dropped(self) -> int:
        """Events known to be lost: before the first one, and reported by `trace.dropped`."""
        many = self._many()
        if many is None or self._lost is not None:
            return super().dropped
        return self.header.dropped + many.dropped

    @property
    def missing(self) -> dict[str, int]:
        """Gaps in the sequence numbers, by component."""
        many = self._many()
        if many is not None:
            return many.missing
        found = super().missing
        for component, lost in self._gone().items() if self._gone is not None else ():
            found[component] = max(lost, found.get(component, 0))
        return found

    def check(self) -> list[Difference]:
        """Where the folded memory of a scheduler differs from what its events state; see `Source.check`."""
        many = self._many()
        return super().check() if many is None else many.check()

    # ------------------------------------------------------------ inside

    def _many(self) -> Ranks | None:
        """The ranks, with all that came; None where there is one scheduler."""
        self.refresh()
        events = self._events
        if self._is_part:
            return None
        if self._ranks is None:
            fresh = events[self._scanned :] if self._scanned <= len(events) else events
            found = ranks_in(self.header, fresh)
            self._scanned = len(events)
            if not found:
                return None
            self._ranks = Ranks(self, found)
        self._ranks.refresh(events, live=self.is_live)
        return self._ranks

    def _fold(self) -> Folded:
        if self._many() is not None:
            numbers = ", ".join(f"rank({number})" for number in self.ranks)
            raise BadRequest(
                f"{self.source} has {len(self.ranks)} schedulers; look at one of them: {numbers}"
            )
        return super()._fold()

    def _configured(self) -> EngineConfigured | None:
        many = self._many()
        return super()._configured() if many is None else many.configured

    def _requests(self) -> dict[str, RequestState]:
        many = self._many()
        return super()._requests() if many is None else many.requests()

    def _probe(self, rid: str) -> RequestState | None:
        many = self._many()
        return self._state.requests.probes.get(rid) if many is None else many.probe(rid)
