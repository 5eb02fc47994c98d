"""One server for all tests: each gets it with a fresh manager and default settings."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from serving_tools import Served, served


@pytest.fixture(scope="session")
def running() -> Iterator[Served]:
    with served() as server:
        yield server


@pytest.fixture
def server(running: Served) -> Iterator[Served]:
    yield running
    running.reset()
