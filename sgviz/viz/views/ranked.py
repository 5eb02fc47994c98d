"""RankedViews: the live views of a run with any number of schedulers, each folded by itself.

With one scheduler it is `LiveViews` and nothing else. Mirrors nothing of SGLang.

Imports: errors, recording, viz.views.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from sgviz.errors import BadRequest
from sgviz.recording import Moment, Recording
from sgviz.recording.rank_feed import RankFeed
from sgviz.viz.views.live import Decode, LiveViews, Wanted
from sgviz.viz.views.models import Views


def check_rank(rank: int, ranks: tuple[int, ...]) -> int:
    """`rank` itself, if it is one of `ranks` (empty: there is one scheduler, 0). Raises BadRequest that names them."""
    allowed = ranks or (0,)
    if rank not in allowed:
        named = f"one of {', '.join(map(str, allowed))}" if ranks else "0, the one there is"
        raise BadRequest(f"rank is {rank}; it must be {named}", param="rank")
    return rank


class RankedViews:
    """One `LiveViews` a rank that somebody looked at.

    Args:
        rec: where events come from. decode: token ids to text, for the nodes of the tree.

    Attributes:
        ranks: the schedulers where there are several; else empty.
        count: events of all, as far as the views know them.
    """

    def __init__(self, rec: Recording, decode: Decode | None = None) -> None:
        self._rec = rec
        self._decode = decode
        self.ranks = rec.named_ranks
        self.count = 0
        self._feed = RankFeed(rec, self.ranks) if self.ranks and rec.is_live else None
        self._views: dict[int, LiveViews] = {}

    def refresh(self, rank: int | None = None) -> bool:
        """Take what is new; says whether anything was. `rank`: one that is looked at from now on.

        Raises:
            BadRequest: no such rank.
        """
        if rank is not None:
            self._of(rank)
        if self._feed is not None:
            self.count = self._feed.advance()
        news = [views.refresh() for views in self._views.values()]
        if self._feed is None:
            self.count = max((views.follower.count for views in self._views.values()), default=0)
        return any(news)

    def make(self, wanted: Wanted) -> Views:
        """The views of one moment of one rank. Raises BadRequest as `LiveViews.make` does, and for no such rank."""
        views = self._of(wanted.check().rank)
        if not self.ranks:
            return views.make(wanted)
        made = views.make(msgspec.structs.replace(wanted, at=self._place(views, wanted)))
        why = self._feed.dead.get(wanted.rank) if self._feed is not None else None
        fault = made.fault or ("" if why is None else f"rank {wanted.rank} was lost: {why}")
        return msgspec.structs.replace(made, rank=wanted.rank, ranks=self.ranks, fault=fault)

    def moment(self, place: int, rank: int) -> Moment:
        """A rank's scheduler after the first `place` events of all.

        Raises:
            BadRequest: no such rank, or that many have not come, or they are forgotten.
        """
        follower, feed = self._of(rank).follower, self._feed
        if feed is None:
            return follower.moment(place)
        oldest = max(feed.oldest, feed.place_of(rank, follower.oldest))
        if not oldest <= place <= self.count:
            raise BadRequest(f"seq {place} is not between {oldest} and {self.count}, what is remembered")
        try:
            return replace(follower.moment(feed.count_at(rank, place)), count=place)
        except BadRequest:
            raise BadRequest(f"seq {place} is no longer remembered") from None

    def _place(self, views: LiveViews, wanted: Wanted) -> float | None:
        """Where to look: a moment at which only others did something is the newest that a rank has."""
        if self._feed is None or wanted.at is None or wanted.clock != "ms":
            return wanted.at
        newest = views.newest_ms
        return None if newest < wanted.at <= (self._feed.t_end - self._feed.t0) / 1e6 else wanted.at

    def _of(self, rank: int) -> LiveViews:
        check_rank(rank, self.ranks)
        found = self._views.get(rank)
        if found is None:
            feed = self._feed
            if feed is None:
                found = LiveViews(self._rec.rank(rank) if self.ranks else self._rec, self._decode)
            else:
                feed.advance()
                found = LiveViews(feed.recording(rank), self._decode, lambda: feed.lost)
                found.follower.t0 = feed.t0  # that of all: one moment has one time in all ranks
            found.refresh()
            self._views[rank] = found
        return found
