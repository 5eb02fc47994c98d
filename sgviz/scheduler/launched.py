"""A launch and the batch it was made from, kept until its result is processed. Imports: batch, worker protocol."""

from __future__ import annotations

from dataclasses import dataclass

from sgviz.batch.schedule_batch import ScheduleBatch
from sgviz.worker.protocol import Launch


@dataclass(frozen=True, slots=True)
class Launched:
    """`batch` is a snapshot; `epochs[i]` is how often member i had been retracted at the launch."""

    batch: ScheduleBatch
    launch: Launch
    epochs: tuple[int, ...]

    @classmethod
    def of(cls, batch: ScheduleBatch, launch: Launch) -> Launched:
        return cls(batch.snapshot(), launch, tuple([req.retraction_count for req in batch.reqs]))

    def still_valid(self, i: int) -> bool:
        """False if member i was retracted since: its token will be computed again."""
        return self.batch.reqs[i].retraction_count == self.epochs[i]
