"""Supposition: whether an adder would take a request if certain others gave up all they have, asked one by one.

`PrefillAdder.would_take` answers the same for a whole set; asking that for every set that a search for the fewest
victims looks at takes time with the square of the running requests. SGLang has no counterpart: its victims are
counted by the tokens they were promised. Imports: batch, cache, scheduler.
"""

from __future__ import annotations

import copy
import math

from sgviz.batch.req import Req
from sgviz.cache.kv_cache import Match
from sgviz.cache.releasable import Releasable
from sgviz.scheduler.prefill_adder import PrefillAdder

# far more than sums of floats in another order may differ by; so close to the edge the adder's own sum counts
DOUBT_TOKENS = 1e-3


class Supposition:
    """What `adder` would say to `req`, whose prefix `match` is held; changes nothing but itself."""

    def __init__(self, adder: PrefillAdder, req: Req, match: Match) -> None:
        self._adder = adder
        self._req = req
        self._match = match
        self._trial = copy.copy(adder)
        self._room = Releasable(adder.limits.page_size)
        self._running = set(map(id, adder.running))  # membership only
        self._gone: dict[int, Req] = {}
        self._walks = adder.walks(req)

    @property
    def gone(self) -> list[Req]:
        """Who is supposed to have given up what they have, in the order in which that was said."""
        return list(self._gone.values())

    def is_gone(self, req: Req) -> bool:
        return id(req) in self._gone

    def without(self, victim: Req) -> None:
        """Suppose it of `victim` too."""
        self._gone[id(victim)] = victim
        self._room.add(victim)
        if id(victim) in self._running:
            self._trial.leave_out(victim, 1, rides=self._adder.mixed_decode_tokens > 0)

    def spare(self, victim: Req) -> None:
        """Suppose it of `victim` no more."""
        del self._gone[id(victim)]
        self._room.remove(victim)
        if id(victim) in self._running:
            self._trial.leave_out(victim, -1, rides=self._adder.mixed_decode_tokens > 0)

    def would_take(self) -> bool:
        """As the adder's `would_take` of the same requests."""
        trial = self._trial
        trial.supposed_room = self._room.tokens
        margin = trial.rem_total - trial.need_of(self._req, self._match)
        if self._walks or math.isclose(margin, 0.0, abs_tol=DOUBT_TOKENS):
            trial = copy.copy(self._adder)
            trial.forget(self.gone)
            trial.supposed_room = self._room.tokens
        return trial.takes(self._req, self._match)
