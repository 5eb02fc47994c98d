"""The audit of names: what is done for a request after its end is noticed, and a name may be used again."""

from __future__ import annotations

import numpy as np
import pytest

from sgviz.events.schema import (
    AnyBody,
    EngineConfigured,
    Event,
    PoolReturned,
    PoolTaken,
    RequestAborted,
    RequestDispatched,
    RequestFinished,
    RequestReceived,
    RequestTokenized,
)
from sgviz.recording.audit import audit

WARM = "a_warm_" + "0123456789abcdef" * 2


def received(rid: str) -> RequestReceived:
    return RequestReceived(rid=rid, type="t", path="/", stream=False, model="m", messages=0, chars=1)


def finished(rid: str) -> RequestFinished:
    return RequestFinished(
        rid=rid, reason="abort", matched="", prompt_tokens=0, completion_tokens=0, cached_tokens=0
    )


def tokenized(rid: str) -> RequestTokenized:
    return RequestTokenized(rid=rid, prompt_tokens=1)


def rules(*bodies: AnyBody) -> list[str]:
    events = [Event(seq, seq, "tokenizer_manager", 0, body) for seq, body in enumerate(bodies, 1)]
    return [finding.rule for finding in audit(events).findings]


LATE = "nothing is done for a request after its end"


@pytest.mark.parametrize(
    "late",
    [
        tokenized("a"),
        RequestDispatched(rid="a"),
        RequestAborted(rid="a", where="tokenizer", why="again"),
    ],
)
def test_what_comes_after_the_end_is_named(late: AnyBody) -> None:
    assert rules(received("a"), finished("a"), late) == [LATE]
    assert rules(received("a"), tokenized("a"), finished("a"), received("a"), late) == []


def test_a_warm_up_lives_once_though_nobody_received_it() -> None:
    assert rules(received("a"), finished(WARM), tokenized(WARM)) == [LATE]
    assert rules(received("a"), finished(WARM), finished(WARM)) == ["a request ends once"]


def test_two_of_one_name_of_which_the_second_came_early() -> None:
    assert rules(received("a"), received("a"), finished("a"), tokenized("a"), finished("a")) == []


def slots_back(taker: str, giver: str) -> list[str]:
    slots = np.arange(1, 4, dtype="<i4").tobytes()
    bodies = (
        PoolTaken(rids=(taker,), counts=(3,), slots=slots, free=5),
        PoolReturned(rid=giver, slots=slots, free=8, why="finish"),
    )
    sizes = EngineConfigured(
        settings={},
        model="m",
        max_total_num_tokens=8,
        page_size=1,
        max_running_requests=1,
        context_len=8,
        rows=1,
    )
    events = [Event(seq, seq, "scheduler", 0, body) for seq, body in enumerate(bodies, 1)]
    return [finding.rule for finding in audit(events, sizes).findings]


@pytest.mark.parametrize("rid", ["x\0", "x\0\0", "\0", "x\n"])
def test_a_name_with_control_characters_is_no_other_name(rid: str) -> None:
    assert slots_back(rid, rid) == []
    assert slots_back(rid, "x") == slots_back("x", rid) == ["a slot comes back from its owner"]
