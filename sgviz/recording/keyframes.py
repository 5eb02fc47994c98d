"""Jumping to a moment: copies of the engine's state on the way, from which a few events lead to any place.

The state is small at any moment, so a copy every few thousand events costs little, and a jump anywhere
folds at most that many. Mirrors nothing of SGLang.

Imports: events, errors, recording.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from sgviz.errors import BadRequest
from sgviz.events.schema import Event
from sgviz.recording.engine_fold import EngineFold

KEYFRAME_EVERY = 4096  # events


class Keyframes:
    """States after `counts[i]` events each, the first before any event.

    Args:
        start: the state that the fold begins with. every: events between two keyframes.
    """

    def __init__(self, start: EngineFold, every: int = KEYFRAME_EVERY) -> None:
        self.every = every
        self.counts = [0]
        self._states = [start.copy()]

    @property
    def due(self) -> int:
        """The count at which the next one is to be taken."""
        return self.counts[-1] + self.every

    def take(self, count: int, state: EngineFold) -> int:
        """Keep a copy of the state after `count` events; returns when the next is due."""
        self.counts.append(count)
        self._states.append(state.copy())
        return self.due

    def after(self, events: Sequence[Event], count: int) -> EngineFold:
        """The state after the first `count` of `events`, as a copy of its own."""
        at = bisect_right(self.counts, count) - 1
        state = self._states[at].copy()
        for index in range(self.counts[at], count):
            state.apply(events[index])
        return state

    def count_until_time(self, events: Sequence[Event], t: int) -> int:
        """How many of `events` came at `t` (monotonic ns) or before."""
        return bisect_right(events, t, key=lambda event: event.t)

    def count_until_iteration(self, events: Sequence[Event], iteration: int) -> int:
        """How many of `events` came before the first of a later iteration.

        Raises:
            BadRequest: the recording has no such iteration.
        """
        at = bisect_right(self._states, iteration, key=lambda state: state.iteration) - 1
        first = next((event.iteration for event in events if event.iteration), 0)
        if iteration < max(first, 1):
            raise BadRequest(f"iteration {iteration} is before the first one recorded, {first}")
        for index in range(self.counts[max(at, 0)], len(events)):
            if events[index].iteration > iteration:
                return index
        last = max((state.iteration for state in self._states), default=0)
        last = max(last, *(event.iteration for event in events[self.counts[-1] :]), 0)
        if iteration > last:
            raise BadRequest(f"iteration {iteration} is after the last one recorded, {last}")
        return len(events)
