"""One server for all tests that do not change it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from serving_tools import Served, served


@pytest.fixture(scope="session")
def server() -> Iterator[Served]:
    with served() as running:
        yield running
