"""Who has ended, as the TokenizerManager tells it: behind that, nothing may be done under the same name.

A name may be used again, so what ends is counted against what was received. Names that nobody received (of engines
that are called without a front) are not judged, but for the fresh ones of samples and their warm-ups, which live once.
Imports: events.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from sgviz.events.schema import RequestFinished, RequestReceived

_FRESH = re.compile(r"_(?:\d+|warm)_[0-9a-f]{32}$")


@dataclass(slots=True)
class Ends:
    """`live`: by rid, how often it was received and has not finished; one that was refused counts for ever."""

    live: dict[str, int] = field(default_factory=dict)

    def received(self, body: RequestReceived) -> None:
        self.live[body.rid] = self.live.get(body.rid, 0) + 1

    def finished(self, body: RequestFinished) -> None:
        if body.rid in self.live or _FRESH.search(body.rid):
            self.live[body.rid] = max(0, self.live.get(body.rid, 0) - 1)

    def is_over(self, rid: str) -> bool:
        return self.live.get(rid) == 0
