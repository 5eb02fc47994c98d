"""Why that rank, in words, on a real recording of four ranks: by policy, by name, by session, and beside a lost one."""

from __future__ import annotations

import pytest

from sgviz.engine import Engine
from sgviz.events.schema import DpChose
from sgviz.messages import ActiveRanksOutput
from sgviz.recording import Cause, Recording
from sgviz.recording.controller_part import choice_words

PARAMS = {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}
PROMPTS = [f"request number {n} " * (1 + n % 5) for n in range(12)]


def told(rec: Recording, rid: str) -> str:
    """What the explanation says of the controller's part, which lies between the two sockets."""
    parts = rec.explain(rid).parts
    (at,) = [n for n, part in enumerate(parts) if part.cause is Cause.CONTROLLER]
    assert parts[at - 1].cause is Cause.DISPATCH and parts[at].duration_ns > 0
    return parts[at].detail


def choices(rec: Recording) -> dict[str, DpChose]:
    return {event.body.rid: event.body for event in rec.stamped() if isinstance(event.body, DpChose)}


@pytest.mark.parametrize(
    ("method", "reason"), [("total_tokens", "the fewest tokens"), ("total_requests", "the fewest requests")]
)
def test_by_load_all_ranks_are_told_as_they_were_believed_to_be(method: str, reason: str) -> None:
    with Engine(
        model="tiny-llama", device="mock", dp_size=4, mock_step_ms=2.0, load_balance_method=method
    ) as engine:
        rids = [f"q{n}" for n in range(len(PROMPTS))]
        engine.generate(PROMPTS, PARAMS, rid=rids)
        rec = engine.recording().freeze()
    for rid, body in choices(rec).items():
        words = told(rec, rid)
        assert words.startswith(f"rank {body.rank} by {method}, {reason}; rank 0: ")
        column = 3 if method == "total_tokens" else 2
        assert body.candidates[body.rank][column] == min(each[column] for each in body.candidates)
        for rank, _, requests, tokens in body.candidates:
            plural = "" if requests == 1 else "s"
            assert f"rank {rank}: {requests} request{plural}, {tokens:,} token" in words


def test_in_turn_by_name_by_session_and_beside_one_that_is_out_of_use() -> None:
    with Engine(model="tiny-llama", device="mock", dp_size=4) as engine:
        engine.generate(PROMPTS[:2], PARAMS, rid=["first", "second"])
        engine.generate("x", PARAMS, rid="named", routed_dp_rank=3)
        engine.open_session(1000, "talk")
        home = engine.generate("x", PARAMS, rid="turn", session_params={"id": "talk"})["meta_info"]["dp_rank"]
        aside = ActiveRanksOutput(status=[True] * 4, aside={2: "other weights"})
        engine.pipeline.manager._sender.send(aside)
        engine.generate("x", PARAMS, rid="skipped")
        rec = engine.recording().freeze()
    assert told(rec, "first") == "rank 0 by round_robin, its turn among 4 ranks"
    assert told(rec, "second") == "rank 1 by round_robin, its turn among 4 ranks"
    assert told(rec, "named") == "rank 3: the request names it"
    assert told(rec, "turn") == f"rank {home}: its session is there"
    assert told(rec, "skipped") == "rank 3 by round_robin, its turn among 4 ranks; lost or set aside: 2"


def test_by_room_and_by_a_policy_of_ones_own() -> None:
    body = DpChose(
        rid="r", rank=1, policy="follow_bootstrap_room", candidates=((0, True, -1, -1), (1, True, -1, -1)),
        prompt_tokens=3, received_ns=0,
    )  # fmt: skip
    assert choice_words(body) == "rank 1 by follow_bootstrap_room, its room leads there among 2 ranks"
    own = DpChose(
        rid="r", rank=0, policy="own", candidates=((0, True, 1, 9),), prompt_tokens=3, received_ns=0
    )
    assert choice_words(own) == "rank 0 by own; rank 0: 1 request, 9 tokens"
