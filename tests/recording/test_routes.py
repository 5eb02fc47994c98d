"""What a router did with a request, read back: its attempts and failures, as parts, steps and books."""

from __future__ import annotations

from typing import Any

import pytest
from hand_loop import MS, Hand
from hand_pair import YEAR, at, decode_side, prefill_side, started

from sgviz.events.schema import Event, RouterFailed, RouterPaired
from sgviz.recording import Cause, Explanation, PairedRecording, Recording
from sgviz.recording.routes import Routes
from sgviz.viz.explain_figure import explain_figure

GONE = "http://gone:1"


def names(attempt: int, rid: str = "a", prefill: str = "http://p:1") -> dict[str, Any]:
    return {"rid": rid, "room": attempt, "prefill": prefill, "decode": "http://d:2", "attempt": attempt}


def words(explanation: Explanation) -> str:
    return " ".join(str(explanation).split())


def paired(attempt: int, **changed: Any) -> RouterPaired:
    return RouterPaired(**{**names(attempt), **changed}, policy="random", candidates=())


def failed(attempt: int, side: str = "prefill", **changed: Any) -> RouterFailed:
    more = {"side": side, "why": "it vanished", "status": 503}
    return RouterFailed(**{**names(attempt), **more, **changed})


def router(*told: tuple[float, RouterPaired | RouterFailed]) -> list[Event]:
    hand = Hand()
    started(hand, YEAR)
    for ms, body in told:
        hand.at(ms, body)
    return hand.events


RETRIED = router(
    (-0.75, paired(1, prefill=GONE)), (-0.5, failed(1, prefill=GONE)), (-0.25, paired(2)),
)  # fmt: skip


def test_the_pair_is_explained_from_the_first_attempt_on() -> None:
    pair = PairedRecording(Recording(prefill_side()), Recording(decode_side()), Recording(RETRIED))
    explanation = pair.explain("a")
    first, ending, taken = explanation.parts[:3]
    assert [part.cause for part in (first, ending, taken)] == [Cause.ATTEMPT, Cause.ATTEMPT, Cause.ROUTE]
    assert first.start_ns == at(-0.75) and first.end_ns == at(-0.5) == ending.start_ns
    assert (
        "to http://gone:1" in first.detail
        and "by the fault of the prefill server: it vanished" in first.detail
    )
    assert taken.end_ns == at(1) and "attempt 2, to http://p:1 and http://d:2 by random" in taken.detail
    assert {part.side for part in (first, ending, taken)} == {"router"}
    assert sum(part.duration_ns for part in explanation.parts) == explanation.total_ns == round(67.75 * MS)
    assert explanation.unexplained_ns == 0 and "the fault of the prefill server" in words(explanation)
    steps = [step for step in pair.journey("a") if step.type == "RouterPaired"]
    assert [step.holds.get("failed") for step in steps] == ["prefill: it vanished", None]
    assert pair.audit().router is not None and pair.audit().balanced and pair.t0 == at(-0.75)


def test_an_answer_that_broke_off_is_told_at_its_end() -> None:
    events = router((0, paired(1)), (80, failed(1, "decode", why="it died", began=True)))
    pair = PairedRecording(Recording(prefill_side()), Recording(decode_side()), Recording(events))
    parts = pair.explain("a").parts
    assert parts[0].cause is Cause.ROUTE and parts[-1].end_ns == at(80)
    assert (
        "broke off in the middle of its answer, by the fault of the decode server: it died"
        in parts[-1].detail
    )


def test_a_name_used_again_is_another_request() -> None:
    again = [*((5 + ms, body) for ms, body in ((0, paired(1, room=8)), (1, failed(1, "decode", room=8))))]
    rec = Recording(router((0, paired(1)), (1, failed(1)), (2, paired(2)), *again))
    assert rec.rids == ["a#1", "a"] and rec.audit().balanced
    assert rec.explain("a#1").total_ns == 2 * MS and rec.explain("a").total_ns == MS
    assert "the prefill server" in words(rec.explain("a#1")) and "the decode server" in words(
        rec.explain("a")
    )
    assert len(rec.journey("a#1")) == 2 and len(rec.journey("a")) == 1
    last = Routes(shift=7).read(rec.stamped()).of("a")
    assert last is not None and last.start == at(5) + 7


def test_a_router_alone_is_explained_up_to_its_last_pair() -> None:
    rec = Recording(RETRIED)
    explanation = rec.explain("a")
    assert explanation.by_cause() == {Cause.ATTEMPT: MS // 2, Cause.ROUTE: 0}
    assert explanation.total_ns == MS // 2 and "their own recordings tell" in words(explanation)
    assert rec.waits.failed_attempt_ms.tolist() == [0.5]
    explain_figure(rec, "a")
    explain_figure(Recording(router((0, paired(1)))), "a")  # and that nothing took time


@pytest.mark.parametrize(
    ("told", "rule"),
    [
        ((paired(2),), "follows one that failed"),
        ((paired(1), paired(2)), "has not failed"),
        ((paired(1), failed(1), paired(3)), "comes attempt 1"),
        ((paired(1), failed(1, began=True), paired(2)), "had begun to answer"),
        ((failed(1),), "was paired"),
        ((paired(1), failed(1), failed(1)), "fails once"),
        ((paired(1), failed(1, prefill=GONE)), "was paired"),
        ((paired(1), failed(1, "nobody")), "who"),
    ],
)
def test_attempts_that_do_not_add_up_are_found(told: tuple[Any, ...], rule: str) -> None:
    report = Recording(router(*enumerate(told))).audit()
    assert len(report.findings) == 1 and rule in str(report)
