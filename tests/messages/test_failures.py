"""What a finish_reason means as an error: one rule for HTTP answers and for calls from Python."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sgviz.errors import BadRequest, SgvizError, Unavailable, from_status
from sgviz.messages import SamplingParams
from sgviz.messages.generate import failure_of, prompt_rids
from sgviz.serving.reply import EngineStream
from sgviz.tokenizer_manager import raise_failure


def abort(**fields: Any) -> dict[str, Any]:
    return {"type": "abort", "message": "why", "status_code": None, "err_type": None, **fields}


class Ends:
    """Takes note of rids, as a Reply does."""

    def saw(self, rid: str) -> None:
        assert rid == "r"


def over_http(output: dict[str, Any]) -> None:
    async def items() -> AsyncIterator[dict[str, Any]]:
        yield output

    asyncio.run(EngineStream(items(), Ends()).next())  # type: ignore[arg-type]


@pytest.mark.parametrize("way", [over_http, raise_failure])
@pytest.mark.parametrize(
    ("reason", "status", "kind"),
    [
        (abort(status_code=400), 400, BadRequest.type),
        (abort(status_code=503), 503, Unavailable.type),
        (abort(status_code=500, err_type="OutOfMemory"), 500, "OutOfMemory"),
        (abort(status_code=429), 429, BadRequest.type),
        (abort(status_code=599), 599, SgvizError.type),
        (abort(status_code=400, message=None), 400, BadRequest.type),
    ],
)
def test_an_abort_with_a_status_is_an_error(way: Any, reason: dict[str, Any], status: int, kind: str) -> None:
    with pytest.raises(SgvizError) as caught:
        way({"meta_info": {"id": "r", "finish_reason": reason}})
    assert (caught.value.status, caught.value.type) == (status, kind)
    assert caught.value.message == (reason["message"] or "aborted")


@pytest.mark.parametrize("way", [over_http, raise_failure])
@pytest.mark.parametrize(
    "reason",
    [None, {"type": "stop", "matched": 2}, {"type": "length", "length": 3}, abort(), abort(status_code=200)],
)
def test_all_other_ends_are_none(way: Any, reason: dict[str, Any] | None) -> None:
    way({"meta_info": {"id": "r", "finish_reason": reason}})
    assert failure_of(reason) is None


def test_a_status_stays_as_it_is_and_the_classes_are_untouched() -> None:
    error = from_status(418, "short and stout", param="pot")
    assert (error.status, error.type, error.param) == (418, BadRequest.type, "pot")
    assert isinstance(from_status(400, "x"), BadRequest) and from_status(400, "x").status == 400
    assert (SgvizError.status, BadRequest.status) == (500, 400)


def test_the_rids_of_prompts() -> None:
    assert prompt_rids("r", None) == ["r"]
    assert prompt_rids("r", 2) == ["r_0", "r_1"]
    assert prompt_rids(["a", "b", "a"], 3) == ["a", "b"]


def test_settled_sampling_needs_no_tokenizer() -> None:
    settled = SamplingParams(stop="ab", temperature=0.0).normalize()
    assert settled.stop == ("ab",) and settled.is_greedy and settled.normalize() == settled
