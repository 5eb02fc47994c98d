"""The row pool: rows are numbered 1..size, owned once, and reused."""

from __future__ import annotations

import numpy as np
import pytest

from sgviz.cache.errors import InvalidFree
from sgviz.cache.req_to_token_pool import ReqToTokenPool
from sgviz.errors import ConfigError


def test_rows_are_distinct_and_never_the_padding_row() -> None:
    pool = ReqToTokenPool(3, 8)
    rows = [pool.alloc() for _ in range(3)]
    assert sorted(row for row in rows if row is not None) == [1, 2, 3]
    assert pool.alloc() is None and pool.available_size() == 0


def test_a_row_comes_back_and_is_taken_again() -> None:
    pool = ReqToTokenPool(2, 8)
    first, second = pool.alloc(), pool.alloc()
    assert first is not None and second is not None
    pool.free(first)
    assert pool.available_size() == 1 and pool.alloc() == first


def test_the_table_has_a_padding_row_and_int32_cells() -> None:
    table = ReqToTokenPool(3, 8).table
    assert table.shape == (4, 8) and table.dtype == np.int32


@pytest.mark.parametrize(("row", "what"), [(0, "row 0"), (3, "row 3"), (-1, "row -1"), (1, "row 1 is free")])
def test_a_row_that_nobody_holds_is_refused_by_number(row: int, what: str) -> None:
    pool = ReqToTokenPool(2, 8)
    with pytest.raises(InvalidFree, match=what):
        pool.free(row)
    assert pool.available_size() == 2


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 x 8"):
        ReqToTokenPool(0, 8)
