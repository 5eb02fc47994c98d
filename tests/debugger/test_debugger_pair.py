"""Breakpoints on the events of prefill/decode disaggregation: each side's scheduler stops exactly there."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from debug_tools import kinds, of_scheduler

sys.path.append(str(Path(__file__).parents[1] / "equivalence"))
from pair_engines import EnginePair, engine_pair

GREEDY = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
# what each side tells of one request; 96 tokens are all that the decode side's pool has
OF_SIDE = {
    "prefill": ["disagg.queued", "disagg.bootstrapped", "kv.sent", "disagg.transferred"],
    "decode": [
        "disagg.queued",
        "disagg.bootstrapped",
        "disagg.preallocated",
        "disagg.prealloc_refused",
        "kv.received",
        "disagg.transferred",
    ],
}


@pytest.fixture(scope="module")
def pair() -> Iterator[EnginePair]:
    tight = {"max_total_tokens": 96, "num_reserved_decode_tokens": 16}
    with engine_pair("tiny-llama", disable_radix_cache=True, enable_debugger=True, decode=tight) as engines:
        yield engines


def ask(pair: EnginePair, first: int) -> list[list[int]]:
    """Two prompts that do not fit the decode side together, so one is refused there for a while."""
    asked = [list(range(first, first + 60)), list(range(first + 60, first + 120))]
    return [output["output_ids"] for output in pair.generate(asked, GREEDY)]


@pytest.mark.parametrize(("side", "kind"), [(side, kind) for side, of in OF_SIDE.items() for kind in of])
def test_a_breakpoint_on_a_kind_of_a_side_stops_exactly_at_its_first_event(
    pair: EnginePair, side: str, kind: str
) -> None:
    undisturbed = ask(pair, 1)
    engine = getattr(pair, side)
    outputs: list[list[list[int]]] = []
    with engine.debugger() as debugger:
        before = debugger.pause().seq
        debugger.continue_()
        number = debugger.breakpoints.add(kind)
        call = threading.Thread(target=lambda: outputs.append(ask(pair, 1)), daemon=True)
        call.start()
        where = debugger.wait()
        time.sleep(0.05)  # were it running, it would emit
        events = of_scheduler(engine, before)
        first = next(event for event in events if event.kind == kind)
        assert where.event == first and where.seq == first.seq
        assert events[-1] == first, f"after it came {kinds(events[events.index(first) + 1 :])}"
        assert f"breakpoint {number}" in where.why
    call.join(30)
    assert not call.is_alive(), "the call hangs"
    assert outputs == [undisturbed], "stopping changed what was said"
    pair.check_idle()
