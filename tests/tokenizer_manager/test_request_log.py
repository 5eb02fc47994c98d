"""The request log: what each level tells, both forms, and changes while requests are under way."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from tm_rig import params, rig, run

from sgviz.errors import BadRequest
from sgviz.messages import GenerateReqInput
from sgviz.tokenizer_manager.request_log import SHOWN, RequestLog

LONG = "x" * (SHOWN + 7)


@pytest.fixture(autouse=True)
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "sgviz.requests")
    return caplog


def request(rid: str = "a", text: Any = "hello", **values: Any) -> GenerateReqInput:
    return GenerateReqInput(text=text, rid=rid, sampling_params=params(temperature=0.5), **values)


def logged(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(record.getMessage()) for record in caplog.records if record.name == "sgviz.requests"]


def of_level(level: int, lines: pytest.LogCaptureFixture, text: str = "hello") -> tuple[dict[str, Any], ...]:
    async def body() -> None:
        async with rig(request_log=RequestLog(True, level, "json")) as r:
            await r.all(request(text=text))

    run(body())
    return tuple(logged(lines))


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_each_level_tells_more(lines: pytest.LogCaptureFixture, level: int) -> None:
    came, ended = of_level(level, lines)
    assert (came["event"], ended["event"]) == ("request.received", "request.finished")
    assert came["rid"] == ended["rid"] == "a" and not came["stream"]
    assert (came["length"], came["unit"]) == (5, "characters")
    assert ("sampling_params" in came) == (level >= 1) and ("text" in came) == (level >= 2)
    assert (ended["prompt_tokens"], ended["completion_tokens"], ended["cached_tokens"]) == (5, 3, 2)
    assert ended["finish_reason"] == {"type": "length", "length": 3} and ended["seconds"] >= 0
    assert ("text" in ended) == ("output_ids" in ended) == (level >= 2)
    if level >= 1:
        assert came["sampling_params"] == {"max_new_tokens": 3, "temperature": 0.5}
    if level >= 2:
        assert came["text"] == "hello" and ended["text"] == "abc" and len(ended["output_ids"]) == 3


def test_level_2_cuts_and_says_so_and_level_3_does_not(lines: pytest.LogCaptureFixture) -> None:
    from sgviz.tokenizer_manager.request_log import _cut

    assert _cut(LONG, 2) == "x" * SHOWN + "... (7 more)" and _cut(LONG, 3) == LONG
    assert _cut([1] * (SHOWN + 7), 2) == [1] * SHOWN + ["... (7 more)"] and len(_cut([1] * 9999, 3)) == 9999
    assert _cut("x" * SHOWN, 2) == "x" * SHOWN


@pytest.mark.parametrize("level", [2, 3])
@pytest.mark.parametrize("form", ["json", "text"])
def test_views_of_growing_lists_are_told_as_lists(
    lines: pytest.LogCaptureFixture, level: int, form: str
) -> None:
    """As chat and completion streams ask for them."""

    async def body() -> None:
        async with rig(request_log=RequestLog(True, level, form)) as r:
            await r.all(request("v", stream=True, as_views=True))

    run(body())
    ended = [record.getMessage() for record in lines.records if record.name == "sgviz.requests"][-1]
    assert "Grown" not in ended
    ids = json.loads(ended)["output_ids"] if form == "json" else eval(ended.split("output_ids=")[1])
    assert len(ids) == 3 and all(type(token) is int for token in ids)


def test_one_line_a_request_however_many_samples_and_chunks(lines: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with rig(request_log=RequestLog(True, 2, "json")) as r:
            await r.all(request("s", stream=True))
            await r.all(request("b", ["p", "q"], stream=True))

    run(body())
    _, single, came, batch = logged(lines)
    assert single["text"] == "abc"
    assert came["text"] == ["p", "q"] and came["prompts"] == 2
    assert [answer["text"] for answer in batch["answers"]] == ["abc", "abc"]


def test_a_request_that_fails_or_is_left_ends_with_a_line_too(lines: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with rig(request_log=RequestLog(True, 0, "json")) as r:
            with pytest.raises(BadRequest):
                await r.all(request("bad", ""))
            r.engine.auto = False
            stream = r.manager.generate_request(request("left", stream=True))
            task = asyncio.create_task(anext(stream))
            await r.dispatched()
            r.engine.token("left", "so far")
            await task
            await stream.aclose()

    run(body())
    ends = {line["rid"]: line for line in logged(lines) if line["event"] == "request.finished"}
    assert "no tokens" in ends["bad"]["error"] and "completion_tokens" not in ends["bad"]
    assert ends["left"]["error"] == "GeneratorExit" and ends["left"]["completion_tokens"] > 0


def test_off_says_nothing_and_changes_hold_for_what_comes_then(lines: pytest.LogCaptureFixture) -> None:
    log = RequestLog()

    async def body() -> None:
        async with rig(request_log=log) as r:
            await r.all(request("silent"))
            assert log.configure(on=True, form="json") == {
                "log_requests": True, "log_requests_level": 2, "log_requests_format": "json"
            }  # fmt: skip
            r.engine.auto = False
            task = r.start(request("seen"))
            await r.dispatched(2)
            log.configure(on=False)
            r.engine._answer(r.engine.live["seen"])
            await task
            await asyncio.sleep(0)

    run(body())
    assert [(line["event"], line["rid"]) for line in logged(lines)] == [
        ("request.received", "seen"), ("request.finished", "seen")
    ]  # fmt: skip


def test_the_plain_form_has_the_rid_in_front(lines: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with rig(request_log=RequestLog(True, 1)) as r:
            await r.all(request("a b"))

    run(body())
    came, ended = (record.getMessage() for record in lines.records if record.name == "sgviz.requests")
    assert came.startswith("request.received rid='a b' stream=False") and "temperature" in came
    assert ended.startswith("request.finished rid='a b' seconds=") and "text=" not in ended
