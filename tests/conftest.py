"""What holds for all tests: no test is judged by time, a failing example of hypothesis can be repeated, and what
an engine told while it was tested balances.

`HYPOTHESIS_PROFILE=repeatable` generates the same examples each time: a gate that looks for new ones would fail on
changes that are innocent of what it finds. Without it each run looks further.
"""

from __future__ import annotations

import os
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
hypothesis.settings.register_profile("repeatable", hypothesis.settings.get_profile("sgviz"), derandomize=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "sgviz"))


@pytest.fixture(autouse=True, scope="session")
def balanced_books() -> Iterator[None]:
    """Set up after all tests were imported, so it knows whether engines are used at all."""
    with pytest.MonkeyPatch.context() as patch:
        watch_engines(patch)
        yield
