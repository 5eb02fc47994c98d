"""How many tokens of KV there are: the wish, the budget, whole pages, and a machine that has no such memory."""

from __future__ import annotations

import os

import pytest

from sgviz.engine import Engine
from sgviz.errors import ConfigError, SgvizError
from sgviz.worker.kv_budget import BOOK_BYTES, kv_tokens

MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def tokens(wish: int | None, *, page_size: int = 16, budget: int = 1000 * 64, host_bytes: int = 0) -> int:
    return kv_tokens(
        max_total_tokens=wish,
        page_size=page_size,
        token_bytes=64,
        budget_bytes=budget,
        useful_tokens=2000,
        host_bytes=host_bytes,
    )


def test_a_wish_goes_before_the_budget_and_pages_are_whole() -> None:
    assert tokens(None) == 992 and tokens(None, budget=1 << 40) == 2000
    assert tokens(5000) == 4992


def test_less_than_a_page_is_refused() -> None:
    with pytest.raises(ConfigError, match="less than one page of 16"):
        tokens(None, budget=64)


@pytest.mark.parametrize("host_bytes", [0, 64])
def test_more_than_the_machine_has_is_refused_with_the_largest_that_fits(host_bytes: int) -> None:
    most = MEMORY // (BOOK_BYTES + host_bytes)
    assert tokens(most, page_size=1, host_bytes=host_bytes) == most
    with pytest.raises(ConfigError, match=f"give at most {most}"):
        tokens(most + 1, host_bytes=host_bytes)


@pytest.mark.parametrize("device", ["mock", "cpu"])
@pytest.mark.parametrize("wish", [2**31 - 1, 10**13])
def test_an_engine_with_too_large_a_pool_is_one_clear_sentence(device: str, wish: int) -> None:
    if device == "mock" and (2**31 - 1) * BOOK_BYTES < MEMORY:
        wish = 10**13  # this machine could
    with pytest.raises(SgvizError, match=r"max_total_tokens") as caught:
        Engine("tiny-llama", device=device, max_total_tokens=wish)
    assert "MemoryError" not in str(caught.value) and "allocate" not in str(caught.value)
