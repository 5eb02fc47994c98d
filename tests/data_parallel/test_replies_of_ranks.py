"""Questions to several ranks: one answer of all, whoever is lost meanwhile."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from sgviz.errors import BadRequest, Unavailable
from sgviz.events import VirtualClock
from sgviz.messages import (
    AbortReq,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetInternalStateReqOutput,
    HealthCheckOutput,
    RoutedReq,
)
from sgviz.messages.flow import (
    ControlReqOutput,
    GetLoadsReqOutput,
    Load,
    PauseGenerationReqOutput,
    ProfileReqOutput,
    UpdateWeightFromDiskReqOutput,
)
from sgviz.messages.session import OpenSessionReqInput
from sgviz.tokenizer_manager.engine_time import EngineTime
from sgviz.tokenizer_manager.merge import accounts, merged, total_load
from sgviz.tokenizer_manager.ranks import Ranks, check_rank
from sgviz.tokenizer_manager.replies import Replies
from sgviz.tokenizer_manager.signs import SignsOfLife


@dataclass
class Sent:
    messages: list[Any] = field(default_factory=list)

    def send(self, message: Any) -> None:
        self.messages.append(message)


def flushed(rank: int, success: bool = True, message: str = "") -> FlushCacheReqOutput:
    return FlushCacheReqOutput(id="x", success=success, message=message or f"by {rank}", dp_rank=rank)


def ask(ranks: Ranks, steps: Any, timeout: float = 5.0, question: Any = None) -> Any:
    """The answer to a question, while `steps(replies)` happens."""

    async def run() -> Any:
        replies = Replies(Sent(), EngineTime(), ranks)  # type: ignore[arg-type]
        task = asyncio.create_task(replies.ask(question or FlushCacheReqInput(id="x"), timeout))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        steps(replies)
        return await task

    return asyncio.run(run())


def answers(*given: Any) -> Any:
    return lambda replies: [replies.answer(each) for each in given]


def test_all_must_have_answered_and_their_words_are_joined_by_rank() -> None:
    reply = ask(Ranks(3), answers(flushed(2), flushed(0), flushed(0, False, "twice"), flushed(1)))
    assert (reply.success, reply.message) == (True, "by 0 | by 1 | by 2")
    reply = ask(Ranks(2), answers(flushed(1), flushed(0, False, "busy")))
    assert (reply.success, reply.message) == (False, "busy | by 1")


def test_one_that_is_silent_is_named() -> None:
    with pytest.raises(Unavailable, match="rank 1 did not answer FlushCacheReqInput"):
        ask(Ranks(2), answers(flushed(0)), timeout=0.05)


def test_a_rank_that_is_lost_meanwhile_is_not_waited_for() -> None:
    def steps(replies: Replies) -> None:
        replies.answer(flushed(0))
        replies.lose(1)

    assert ask(Ranks(2), steps).message == "by 0"


def test_if_all_who_were_asked_are_lost_the_question_fails() -> None:
    def steps(replies: Replies) -> None:
        for rank in range(2):
            replies.lose(rank)

    with pytest.raises(Unavailable, match="died"):
        ask(Ranks(2), steps)
    gone = Ranks(2)
    gone.lost = {0: "x", 1: "y"}
    with pytest.raises(Unavailable, match="died"):
        ask(gone, answers())


def test_a_lost_rank_is_not_asked_and_a_session_by_one_only() -> None:
    ranks = Ranks(3)
    ranks.lost[1] = "killed"
    assert ranks.asked(FlushCacheReqInput(id="x")) == [0, 2]
    (home,) = ranks.asked(OpenSessionReqInput(id="x", session_id="s", capacity_of_str_len=1))
    assert home in (0, 2)


def test_how_answers_become_one() -> None:
    def of(kind: type, **each: list[Any]) -> Any:
        rows = [dict(zip(each, values)) for values in zip(*each.values())]
        return merged(
            [kind(id="x", success=True, message="m", dp_rank=rank, **row) for rank, row in enumerate(rows)]
        )

    assert of(PauseGenerationReqOutput, requests=[2, 3]).requests == 5
    assert of(UpdateWeightFromDiskReqOutput, progress=[{"a": 1}, {"b": 2}]).progress == {"a": 1, "b": 2}
    assert of(ProfileReqOutput, path=["p", "q"]).path == "p | q"
    refused = [
        ControlReqOutput(id="x", success=True, message="done"),
        ControlReqOutput(id="x", success=False, message="no", status=503, param="f", dp_rank=1),
    ]
    reply = merged(refused)
    assert isinstance(reply, ControlReqOutput)
    assert (reply.success, reply.message, reply.status, reply.param) == (False, "done | no", 503, "f")
    alike = of(ProfileReqOutput, path=["p", "p"])
    assert (alike.message, alike.path) == ("m", "p | p")  # words that all say alike are said once


def test_loads_and_accounts() -> None:
    first = Load(num_running_reqs=1, max_total_num_tokens=10, cache_hit_rate=0.5)
    loads = [first, Load(num_running_reqs=4, max_total_num_tokens=10)]
    assert total_load(loads) == Load(num_running_reqs=5, max_total_num_tokens=20, cache_hit_rate=0.25)
    reply = merged([GetLoadsReqOutput(id="x", load=load, dp_rank=rank) for rank, load in enumerate(loads)])
    assert isinstance(reply, GetLoadsReqOutput) and reply.load.num_running_reqs == 5
    states = [
        {"num_live_reqs": 1, "max_req_input_len": 9, "new_token_ratio": 0.5, "num_detokenizer_reqs": 3},
        {"num_live_reqs": 2, "max_req_input_len": 7, "new_token_ratio": 0.7, "num_detokenizer_reqs": 4},
    ]
    parts = {
        rank: GetInternalStateReqOutput(id="x", state=dict(state), dp_rank=rank)
        for rank, state in ((0, states[0]), (2, states[1]))
    }
    whole = merged(list(parts.values()))
    assert isinstance(whole, GetInternalStateReqOutput)
    assert whole.state == {
        "num_live_reqs": 3, "max_req_input_len": 7, "new_token_ratio": 0.6, "num_detokenizer_reqs": 4,
    }  # fmt: skip
    ranks = Ranks(3)
    ranks.lost[1] = "killed"
    told = accounts(parts, ranks)
    assert told[1] == {"dp_rank": 1, "active": False, "why": "killed"}
    assert told[2] == {"dp_rank": 2, "active": True, **states[1]}


def test_each_scheduler_must_be_heard() -> None:
    clock = VirtualClock(1)
    signs = SignsOfLife(clock, ranks=2)
    start = clock.now()
    clock.advance(5)
    steps = [
        (RoutedReq(rids=[], created=[], dp_ranks=[]), "scheduler of rank 0"),
        (AbortReq(rid="refused by the controller"), "scheduler of rank 0"),
        (HealthCheckOutput(rid="", forward=False, dp_rank=1), "scheduler of rank 0"),
        (HealthCheckOutput(rid="", forward=True, dp_rank=0), "detokenizer"),
        (GetInternalStateReqOutput(id="x", state={}, dp_rank=0), None),
    ]
    assert signs.silent_since(start) == "data parallel controller"
    for message, silent in steps:
        signs.note(message)
        assert signs.silent_since(start) == silent


def test_a_lost_scheduler_need_not_be_heard() -> None:
    clock = VirtualClock(1)
    signs = SignsOfLife(clock, ranks=2)
    start = clock.now()
    clock.advance(5)
    signs.note(HealthCheckOutput(rid="", forward=True, dp_rank=1))
    signs.note(GetInternalStateReqOutput(id="x", state={}, dp_rank=1))
    assert signs.silent_since(start) == "scheduler of rank 0"
    signs.lose(0)
    assert signs.silent_since(start) is None


@pytest.mark.parametrize(
    ("given", "size", "sent"), [(None, 1, None), (None, 3, None), (0, 1, None), (0, 3, 0), (2, 3, 2)]
)
def test_ranks_that_a_request_may_name(given: int | None, size: int, sent: int | None) -> None:
    assert check_rank(given, size) == sent


@pytest.mark.parametrize(("given", "size"), [(1, 1), (3, 3), (-1, 3), (True, 3), ("1", 3), (1.0, 3)])
def test_ranks_that_there_are_not(given: object, size: int) -> None:
    with pytest.raises(BadRequest) as error:
        check_rank(given, size)
    assert error.value.param == "routed_dp_rank"
