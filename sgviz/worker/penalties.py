"""PenaltyState: how often each token occurs in the output of the rows that have a penalty.

Lives on the device and is updated when a token is sampled, so the token in flight is counted although the
scheduler has not seen it; SGLang counts one step late there. Mirrors its penaltylib. Imports: torch.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

MIN_CAPACITY = 4


class PenaltyState:
    """Counts by row, `[capacity, vocab]` on the device; grows by doubling with the rows in use.

    Use it from one stream only: the order of calls is the order of forwards.
    """

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._counts = torch.zeros((0, vocab_size), dtype=torch.float32, device=self.device)
        self._places: dict[int, int] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._places)

    def begin(self, row: int, output_ids: list[int]) -> None:
        """A request starts, or comes back after a retraction, on `row` with this output so far."""
        counts = self._counts_of(row)
        counts.zero_()
        if output_ids:
            ids = torch.tensor(output_ids, dtype=torch.int64, device=self.device)
            counts.scatter_add_(0, ids, torch.ones(len(output_ids), device=self.device))

    def apply(
        self,
        logits: Tensor,
        members: Tensor,
        rows: list[int],
        frequency: Tensor,
        presence: Tensor,
        repetition: Tensor,
    ) -> None:
        """Change `logits[members]` in place, in SGLang's order: additive penalties first.

        Args:
            logits: [B, vocab]. members: [n] rows of `logits`. rows: the n rows of the pool.
            frequency, presence, repetition: [n] factors.
        """
        index = self._index(rows)  # first: it may replace the counts by a larger tensor
        counts = self._counts[index]
        at, ids = counts.nonzero(as_tuple=True)  # few: only what was sampled before changes
        where = (members[at], ids)
        part = logits[where] - frequency[at] * counts[at, ids] - presence[at]
        logits[where] = torch.where(part > 0, part / repetition[at], part * repetition[at])

    def count(self, rows: list[int], tokens: Tensor) -> None:
        """`tokens[i]` was sampled for `rows[i]`."""
        index = self._index(rows)  # first, as above
        ones = torch.ones(len(rows), device=self.device)
        self._counts.index_put_((index, tokens), ones, accumulate=True)

    def forget(self, rows: Iterable[int]) -> None:
        """The rows are free; unknown ones are no matter."""
        for row in rows:
            place = self._places.pop(row, None)
            if place is not None:
                self._free.append(place)

    def _index(self, rows: list[int]) -> Tensor:
        for row in rows:
            self._place(row)
        return torch.tensor([self._places[row] for row in rows], dtype=torch.int64, device=self.device)

    def _counts_of(self, row: int) -> Tensor:
        place = self._place(row)  # may grow the tensor
        return self._counts[place]

    def _place(self, row: int) -> int:
        place = self._places.get(row)
        if place is None:
            if not self._free:
                self._grow()
            place = self._places[row] = self._free.pop()
            self._counts[place].zero_()
        return place

    def _grow(self) -> None:
        old = len(self._counts)
        more = max(MIN_CAPACITY, old)
        self._counts = torch.cat((self._counts, self._counts.new_zeros((more, self.vocab_size))))
        self._free = list(range(old + more - 1, old - 1, -1))
