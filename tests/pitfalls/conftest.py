"""One served engine for the chapters that need no other, and a check after every test that nothing stayed behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "launch"))  # server_process

from pitfall_tools import Served, serving


@pytest.fixture(scope="module")
def running() -> Iterator[Served]:
    with serving(max_total_tokens=4096) as served:
        yield served


@pytest.fixture
def server(running: Served) -> Iterator[Served]:
    """A real model behind a real port. After the test every component must be empty and the books balanced."""
    yield running
    running.assert_empty()
