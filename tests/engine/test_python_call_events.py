"""Calls from Python leave the same trace as HTTP requests: received, converted, and one end for each rid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from sgviz.engine import Engine
from sgviz.errors import BadRequest
from sgviz.events.schema import RequestConverted, RequestReceived, ResponseFinished

GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("tiny-llama", device="mock", max_total_tokens=4096) as running:
        yield running


def bodies(engine: Engine, kind: type) -> list:
    events = engine.pipeline.ring.snapshot()
    return [event.body for event in events if isinstance(event.body, kind) and event.component == "engine"]


def ends(engine: Engine) -> dict[str, int]:
    """rid -> status; fails if one ended twice."""
    found = bodies(engine, ResponseFinished)
    assert [rid for rid, times in Counter(body.rid for body in found).items() if times > 1] == []
    return {body.rid: body.status for body in found}


def test_a_journey_starts_at_the_arrival_and_ends_with_the_answer(engine: Engine) -> None:
    out = engine.generate("hello there", GREEDY)
    rid = out["meta_info"]["id"]
    request = engine.recording().request(rid)
    journey = [step.type for step in engine.recording().journey(rid)]
    assert (
        journey[:3] == ["GenerateReqInput", "TokenizedGenerateReqInput", "Req"]
        and journey[-1] == "BatchStrOutput"
    )
    received = next(body for body in bodies(engine, RequestReceived) if body.rid == rid)
    assert (received.type, received.path, received.chars) == ("GenerateReqInput", "Engine.generate", 11)
    assert (received.stream, received.model) == (False, "tiny-llama")
    converted = next(body for body in bodies(engine, RequestConverted) if body.rid == rid)
    assert (converted.prompt_kind, converted.size, converted.max_new_tokens) == ("text", 11, 6)
    stats = request.stats
    assert 0 < stats.created <= stats.tokenize_start <= stats.tokenize_finish
    assert stats.finished <= stats.response_sent and ends(engine)[rid] == 200


def test_every_prompt_of_a_list_has_its_own_rid(engine: Engine) -> None:
    outs = engine.generate(["a", "bb", "ccc"], [{**GREEDY, "max_new_tokens": n} for n in (1, 2, 3)])
    rids = [out["meta_info"]["id"] for out in outs]
    converted = {body.rid: body for body in bodies(engine, RequestConverted)}
    assert [(converted[rid].size, converted[rid].max_new_tokens) for rid in rids] == [(1, 1), (2, 2), (3, 3)]
    assert {ends(engine)[rid] for rid in rids} == {200}
    named = engine.generate(["a", "bb"], GREEDY, rid="pair")
    assert [out["meta_info"]["id"] for out in named] == ["pair_0", "pair_1"]
    assert {rid for rid in ends(engine) if rid.startswith("pair")} == {"pair_0", "pair_1"}


def test_samples_end_with_their_request(engine: Engine) -> None:
    outs = engine.generate("abc", {**GREEDY, "n": 3}, rid="threefold")
    rids = {out["meta_info"]["id"] for out in outs}
    assert len(rids) == 3
    assert {rid for rid in ends(engine) if rid.startswith("threefold")} == {"threefold", *rids}


def test_a_stream_that_is_read_to_its_end(engine: Engine) -> None:
    last = list(engine.stream_sync("streamed", GREEDY))[-1]
    rid = last["meta_info"]["id"]
    received = next(body for body in bodies(engine, RequestReceived) if body.rid == rid)
    assert received.stream and ends(engine)[rid] == 200


def test_a_stream_that_is_left(engine: Engine) -> None:
    stream = engine.stream_sync("left", {"max_new_tokens": 1500, "ignore_eos": True}, rid="left early")
    next(stream)
    stream.close()
    engine.internal_state()  # a turn of the engine's loop, in which the cancelled task ended
    assert ends(engine)["left early"] == 499


def test_a_request_that_is_refused(engine: Engine) -> None:
    wrong = ({"prompt": ""}, {"prompt": ["a", 5]}, {"prompt": None}, {"input_ids": [[1], [10**6]]})
    for number, arguments in enumerate(wrong):
        with pytest.raises(BadRequest):
            engine.generate(**arguments, sampling_params=GREEDY, rid=f"refused{number}")
        with pytest.raises(BadRequest):
            list(engine.stream_sync(**arguments, sampling_params=GREEDY))
    statuses = Counter(body.status for body in bodies(engine, ResponseFinished) if "refused" in body.rid)
    assert set(statuses) == {400}
    with pytest.raises(BadRequest, match="rid must be a string"):
        engine.generate("x", GREEDY, rid=7)
    with pytest.raises(BadRequest, match="did you mean 'return_logprob'"):
        engine.generate("x", GREEDY, return_logprobs=True)


def test_a_request_that_is_aborted_ends_well(engine: Engine) -> None:
    stream = engine.stream_sync("to be aborted", {"max_new_tokens": 1500, "ignore_eos": True}, rid="aborted")
    next(stream)
    engine.abort("aborted")
    assert list(stream)[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert ends(engine)["aborted"] == 200


def test_without_events_nothing_is_told() -> None:
    with Engine("tiny-llama", device="mock", disable_events=True) as engine:
        engine.generate("x", GREEDY)
        assert engine.pipeline.ring.snapshot() == []
