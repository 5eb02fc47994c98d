"""One small engine for a file of debugger tests, and the check that each test left it running."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from debug_tools import TIGHT, Load, Moody, eventually

from sgviz.engine import Engine


@pytest.fixture(scope="module")
def moody() -> Moody:
    """The engine's policy."""
    return Moody()


@pytest.fixture(scope="module")
def engine(moody: Moody) -> Iterator[Engine]:
    with Engine("tiny-llama", schedule_policy=moody, enable_debugger=True, **TIGHT) as running:
        yield running


@pytest.fixture(scope="module")
def plain(engine: Engine) -> dict[str, list[int]]:
    """What the load gives when nobody debugs."""
    return Load(engine).join()


@pytest.fixture(autouse=True)
def at_rest(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "engine" in request.fixturenames:
        engine = request.getfixturevalue("engine")
        eventually(lambda: engine.internal_state()["num_live_reqs"] == 0)
        assert not engine.internal_state()["parked"]
