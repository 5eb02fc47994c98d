"""Requests that no stage takes: the explanation says so, by HTTP and in the scheduler, and leaves nothing open."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from timed_rig import TimedRig

from sgviz.engine import Engine
from sgviz.events import Tracer
from sgviz.events.schema import RequestAborted, RequestDispatched, RequestReceived, RequestTokenized
from sgviz.recording import Cause, Explanation

POOL = 64


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Engine, str]]:
    with Engine("tiny-llama", device="mock", max_total_tokens=POOL) as engine:
        yield engine, engine.serve(port=0).url


def refused(served: tuple[Engine, str], **body: Any) -> tuple[str, Explanation]:
    """What the client was told, and the explanation."""
    engine, url = served
    data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(urllib.request.Request(url + "/generate", data, kind), timeout=60)
    assert error.value.code == 400
    told = json.loads(error.value.read())["error"]["message"]
    rec = engine.recording()
    for _ in range(500):  # the client may have read the answer before its end is told
        if rec.request(body["rid"]).stats.response_sent:
            break
        time.sleep(0.01)
    explanation = rec.freeze().explain(body["rid"])
    assert explanation.done and explanation.unexplained_ns <= 0.01 * explanation.total_ns, explanation.text()
    assert sum(part.duration_ns for part in explanation.parts) == explanation.total_ns
    return told, explanation


@pytest.mark.parametrize(
    ("rid", "fields"),
    [
        ("long", {"input_ids": list(range(POOL + 20))}),
        ("much", {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": POOL}}),
        ("copies", {"input_ids": list(range(POOL + 20)), "sampling_params": {"n": 2}}),
    ],
)
def test_what_never_fits_is_named_with_the_numbers(
    served: tuple[Engine, str], rid: str, fields: dict[str, Any]
) -> None:
    limits = served[0].internal_state()
    told, explanation = refused(served, rid=rid, **fields)
    (part,) = [part for part in explanation.parts if part.cause is Cause.NEVER_FITS]
    assert explanation.refused == f"refused with status 400: {told}"
    if rid == "long":
        assert served[0].recording().request(rid).prompt_tokens == len(fields["input_ids"])
    assert part.detail == told and str(len(fields["input_ids"])) in told
    assert limits["max_total_num_tokens"] == POOL and "can never fit" in explanation.text()


def test_what_is_refused_for_another_reason_is_not_called_so(served: tuple[Engine, str]) -> None:
    for rid, fields in (
        ("range", {"text": "a", "sampling_params": {"top_p": 7}}),
        ("ids", {"input_ids": [10**9]}),
    ):
        _, explanation = refused(served, rid=rid, **fields)
        assert not [part for part in explanation.parts if part.cause is Cause.NEVER_FITS]
        assert (
            explanation.refused.startswith("refused with status 400: ")
            and explanation.refused in explanation.text()
        )
        assert Cause.UNEXPLAINED not in explanation.by_cause()


def test_what_fits_alone_is_taken(served: tuple[Engine, str]) -> None:
    engine, _ = served
    most = engine.generate(
        input_ids=list(range(20)), rid="most", sampling_params={"max_new_tokens": POOL - 22, "temperature": 0}
    )
    assert most["meta_info"]["finish_reason"]["type"] in ("length", "stop")
    assert Cause.NEVER_FITS not in engine.recording().freeze().explain("most").by_cause()


def test_the_scheduler_s_own_refusal_is_named_after_the_way_there() -> None:
    """Its pool may be smaller than the tokenizer manager knew; the front's events are given here by hand."""
    rig = TimedRig(tokens=POOL)
    front = Tracer("tokenizer_manager", rig.ring, rig.clock)
    for body in (
        RequestReceived(rid="late", type="t", path="/", stream=False, model="m", messages=0, chars=0),
        RequestTokenized(rid="late", prompt_tokens=90),
        RequestDispatched(rid="late"),
    ):
        rig.clock.advance(1000)
        front.emit(body)
    rig.submit(range(90), 4, rid="late")
    rig.run()
    (end,) = [event for event in rig.events() if isinstance(event.body, RequestAborted)]
    explanation = rig.recording().explain("late")
    assert explanation.parts[-1].cause is Cause.NEVER_FITS and explanation.parts[-1].end_ns == end.t
    assert "90 tokens" in explanation.parts[-1].detail and explanation.unexplained_ns == 0
