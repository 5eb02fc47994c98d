"""What holds for all tests: no test is judged by time, a failing example of hypothesis can be repeated, and what
an engine told while it was tested balances."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

sys.path.append(str(Path(__file__).resolve().parent))  # books

from books import watch_engines

hypothesis.settings.register_profile(
    "sgviz",
    deadline=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("sgviz")


@pytest.fixture(autouse=True, scope="session")
def balanced_books() -> Iterator[None]:
    """Set up after all tests were imported, so it knows whether engines are used at all."""
    with pytest.MonkeyPatch.context() as patch:
        watch_engines(patch)
        yield
