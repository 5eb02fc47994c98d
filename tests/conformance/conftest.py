"""Two served engines for the official client: one with a real model, and one whose model writes a given text."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "pitfalls"))  # pitfall_tools, forced_model

from forced_model import Forced, forced_model
from pitfall_tools import Served, serving


@pytest.fixture(scope="session", params=["threads", pytest.param("processes", marks=pytest.mark.slow)])
def running(request: pytest.FixtureRequest) -> Iterator[Served]:
    with serving(max_total_tokens=4096, mode=request.param) as served:
        yield served


@pytest.fixture
def server(running: Served) -> Iterator[Served]:
    """A real model. After the test every component must be empty and the books balanced."""
    yield running
    running.assert_empty()


@pytest.fixture(scope="session")
def playing() -> Iterator[Forced]:
    with forced_model(tool_call_parser="hermes", reasoning_parser="qwen3") as forced:
        yield forced


@pytest.fixture
def forced(playing: Forced) -> Iterator[Forced]:
    """A model that writes what the test gives it."""
    yield playing
    playing.served.assert_empty()
