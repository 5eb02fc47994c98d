"""StepWork: what a forward has to do, as the few sums that its cost depends on. Imports: batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sgviz.batch.schedule_batch import ScheduleBatch


@dataclass(frozen=True, slots=True)
class StepWork:
    """One forward.

    Attributes:
        rows: requests in it; each gets one row of logits.
        new_tokens: positions computed.
        context: positions whose KV is read, each request's counted once.
        pairs: (new position, position it looks at), over all requests.
    """

    rows: int
    new_tokens: int
    context: int
    pairs: float

    @classmethod
    def of(cls, members: Iterable[tuple[int, int]]) -> StepWork:
        """From `(prefix, extend)` of every request: positions in KV before, and new ones (decode: 1)."""
        rows = new = context = 0
        pairs = 0.0
        for prefix, extend in members:
            rows += 1
            new += extend
            context += prefix + extend
            pairs += extend * (prefix + (extend + 1) / 2)
        return cls(rows, new, context, pairs)

    @classmethod
    def of_batch(cls, batch: ScheduleBatch) -> StepWork:
        if batch.forward_mode.is_decode:
            context = sum(batch.seq_lens)
            return cls(len(batch.seq_lens), len(batch.seq_lens), context, float(context))
        return cls.of(zip(batch.prefix_lens, batch.extend_lens))
