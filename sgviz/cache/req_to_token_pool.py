"""ReqToTokenPool: a row of slots per running request. Mirrors SGLang's class of that name.

Cell `[row, position]` is the slot that holds the KV of that position. Row 0 is padding and never a
request's. Simplified: rows carry no generation counter. Imports: numpy, cache.errors.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sgviz.cache.errors import InvalidFree
from sgviz.errors import ConfigError


class ReqToTokenPool:
    """Rows 1..size of a table position -> slot; rows are reused last in, first out.

    Args:
        size: rows that requests can hold at once.
        max_context_len: positions of a row, any headroom included.

    Attributes:
        table: int32 [size + 1, max_context_len]; what lies beyond a request's length is stale.
    """

    def __init__(self, size: int, max_context_len: int) -> None:
        if size < 1 or max_context_len < 1:
            raise ConfigError(f"a row pool needs rows and positions, not {size} x {max_context_len}")
        self.size = size
        self.max_context_len = max_context_len
        self.table: npt.NDArray[np.int32] = np.zeros((size + 1, max_context_len), dtype=np.int32)
        self._free = list(range(size, 0, -1))
        self._taken = bytearray(size + 1)
        self._freed: list[int] = []

    def available_size(self) -> int:
        return len(self._free)

    def alloc(self) -> int | None:
        """A row number, or None when all are taken."""
        if not self._free:
            return None
        row = self._free.pop()
        self._taken[row] = 1
        return row

    def free(self, row: int) -> None:
        """Give `row` back.

        Raises:
            InvalidFree: the row is not a request's row, or nobody holds it.
        """
        if not 1 <= row <= self.size:
            raise InvalidFree(f"row {row} is not a request's row; rows are 1 to {self.size}")
        if not self._taken[row]:
            raise InvalidFree(f"row {row} is free already")
        self._taken[row] = 0
        self._free.append(row)
        self._freed.append(row)

    def take_freed(self) -> list[int]:
        """The rows given back since the last call, for whoever keeps something by row."""
        freed, self._freed = self._freed, []
        return freed
