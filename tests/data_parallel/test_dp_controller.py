"""The controller: who gets what, in which order, what everybody is told, and what a lost rank changes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from dp_rig import Rig, request
from hypothesis import given
from hypothesis import strategies as st

from sgviz.data_parallel.policies import FollowBootstrapRoom, RankLoad, TotalRequests, TotalTokens
from sgviz.errors import BadRequest
from sgviz.events.schema import DpChose, DpRankChanged
from sgviz.messages import (
    AbortReq,
    ActiveRanksOutput,
    ConfigureTraceReq,
    DebugReq,
    FlushCacheReqInput,
    RoutedReq,
    ShutdownReq,
    TokenizedGenerateReqInput,
)
from sgviz.messages.debug import Detach
from sgviz.messages.flow import StartProfileReqInput
from sgviz.messages.parallel import LoadSnapshot, home_rank
from sgviz.messages.rids import HEALTH_CHECK_PREFIX
from sgviz.messages.session import CloseSessionReqInput, OpenSessionReqInput, SessionParams


def test_a_burst_goes_in_turn_and_the_tokenizer_manager_hears_who_got_what_first() -> None:
    rig = Rig(3)
    rig.send(*[request(f"r{n}") for n in range(7)])
    assert [[m.rid for m in rank.messages] for rank in rig.ranks] == [
        ["r0", "r3", "r6"], ["r1", "r4"], ["r2", "r5"],
    ]  # fmt: skip
    (told,) = rig.to_tokenizer.messages
    assert told.dp_ranks == [0, 1, 2, 0, 1, 2, 0] and told.rids == [f"r{n}" for n in range(7)]
    assert told.created == [m.time_stats.created for m in (request(f"r{n}") for n in range(7))]


def test_the_event_has_what_was_believed_when_it_was_chosen() -> None:
    rig = Rig(2, TotalTokens())
    rig.loads.put(LoadSnapshot(timestamp=1, dp_rank=0, num_used_tokens=30, num_running_reqs=2))
    rig.loads.put(LoadSnapshot(timestamp=1, dp_rank=1, num_waiting_uncached_tokens=25, num_waiting_reqs=1))
    rig.send(request("a", 10), request("b", 4), request("c", 1))
    first, second, third = rig.bodies(DpChose)
    assert first.candidates == ((0, True, 2, 30), (1, True, 1, 25)) and first.rank == 1
    assert second.candidates == ((0, True, 2, 30), (1, True, 2, 35)) and second.rank == 0
    assert third.candidates == ((0, True, 3, 34), (1, True, 2, 35)) and third.rank == 0
    assert (first.policy, first.prompt_tokens, first.received_ns) == ("total_tokens", 10, 1)


def test_policies_that_do_not_look_say_so() -> None:
    rig = Rig(2)
    rig.send(request("a"))
    assert rig.bodies(DpChose)[0].candidates == ((0, True, -1, -1), (1, True, -1, -1))


def test_an_explicit_rank_goes_before_the_policy_and_does_not_move_the_turn() -> None:
    rig = Rig(3)
    rig.send(request("a"), request("b", routed_dp_rank=2), request("c"))
    assert rig.routed() == {"a": 0, "b": 2, "c": 1}
    assert [body.policy for body in rig.bodies(DpChose)] == ["round_robin", "explicit", "round_robin"]


def lost(*ranks: int, of: int, why: str = "signal SIGKILL", requests: int = 0) -> ActiveRanksOutput:
    return ActiveRanksOutput(status=[rank not in ranks for rank in range(of)], why=why, requests=requests)


def test_a_lost_rank_is_skipped_and_a_request_for_it_ends_with_503() -> None:
    rig = Rig(3)
    rig.send(request("a"), lost(1, of=3, requests=4), *[request(f"b{n}") for n in range(4)])
    assert list(rig.routed().values()) == [0, 2, 0, 2, 0]
    assert rig.bodies(DpRankChanged) == [
        DpRankChanged(rank=1, active=False, why="signal SIGKILL", requests=4)
    ]
    assert rig.to_detokenizer.messages == [lost(1, of=3, requests=4)]
    rig.send(request("c", routed_dp_rank=1))
    (refusal,) = rig.to_tokenizer.of(AbortReq)
    assert (refusal.rid, refusal.finished_reason.status_code) == ("c", 503)
    assert "rank 1, named by the request, was lost" in refusal.finished_reason.message
    rig.send(request("d", routed_dp_rank=2))
    assert rig.routed()["d"] == 2


def test_the_loss_is_told_once() -> None:
    rig = Rig(3)
    rig.send(lost(1, of=3), lost(0, 1, of=3), lost(0, 1, of=3))
    assert [body.rank for body in rig.bodies(DpRankChanged)] == [1, 0]


def test_a_room_whose_rank_is_lost_ends_with_503_and_no_room_with_400() -> None:
    rig = Rig(2, FollowBootstrapRoom())
    rig.send(request("a", bootstrap_room=7), lost(1, of=2), request("b", bootstrap_room=7), request("c"))
    assert rig.routed() == {"a": 1}
    reasons = {m.rid: m.finished_reason for m in rig.to_tokenizer.of(AbortReq)}
    assert (reasons["b"].status_code, reasons["c"].status_code) == (503, 400)
    assert reasons["c"].param == "bootstrap_room" and reasons["c"].err_type == BadRequest.type


def test_a_send_into_the_void_does_not_stop_it() -> None:
    """Between a death and the news of it; who got it is told, so the TokenizerManager can end it."""
    rig = Rig(2)
    rig.ranks[0].gone = True
    rig.send(request("a"), request("b"), AbortReq(rid="a"))
    assert rig.routed() == {"a": 0, "b": 1}
    assert [type(m) for m in rig.ranks[1].messages] == [TokenizedGenerateReqInput, AbortReq]


def test_aborts_and_control_go_to_all_that_live_behind_what_came_before() -> None:
    rig = Rig(3)
    rig.send(lost(2, of=3), request("a"), AbortReq(rid="a"), FlushCacheReqInput(id="x"), request("b"))
    assert [type(m) for m in rig.ranks[0].messages] == [
        TokenizedGenerateReqInput, AbortReq, FlushCacheReqInput,
    ]  # fmt: skip
    assert [type(m) for m in rig.ranks[1].messages] == [
        AbortReq, FlushCacheReqInput, TokenizedGenerateReqInput,
    ]  # fmt: skip
    assert not rig.ranks[2].messages


def test_a_debugger_meets_the_first_rank_and_threads_make_one_profile() -> None:
    rig = Rig(2, one_process=True)
    rig.send(DebugReq(id="d", session="s", command=Detach()), StartProfileReqInput(id="p"))
    assert [type(m) for m in rig.ranks[0].messages] == [DebugReq, StartProfileReqInput]
    assert not rig.ranks[1].messages
    apart = Rig(2)
    apart.send(StartProfileReqInput(id="p"))
    assert all(apart_rank.messages for apart_rank in apart.ranks)


@given(st.text(max_size=20), st.integers(1, 6), st.data())
def test_turns_of_a_session_stay_where_it_was_opened(name: str, size: int, data: st.DataObject) -> None:
    rig, others = Rig(size), data.draw(st.sets(st.integers(0, size - 1), max_size=size - 1))
    opened = home_rank(name, range(size))
    rig.send(OpenSessionReqInput(id="o", session_id=name, capacity_of_str_len=9))
    assert [bool(rank.messages) for rank in rig.ranks] == [rank == opened for rank in range(size)]
    turn = SessionParams(id=name)
    rig.send(request("t0", session_params=turn), lost(*(others - {opened}), of=size))
    rig.send(request("t1", session_params=turn), CloseSessionReqInput(id="c", session_id=name))
    assert set(rig.routed().values()) == {opened}
    assert isinstance(rig.ranks[opened].messages[-1], CloseSessionReqInput)


def test_a_turn_that_names_another_rank_than_that_of_its_session_is_told_which_has_it() -> None:
    rig, turn = Rig(3), SessionParams(id="s")
    home = home_rank("s", range(3))
    for rank in range(3):
        rig.send(request(f"t{rank}", session_params=turn, routed_dp_rank=rank))
    assert rig.routed() == {f"t{home}": home}
    reasons = [message.finished_reason for message in rig.to_tokenizer.of(AbortReq)]
    assert [(reason.status_code, reason.param) for reason in reasons] == [(400, "routed_dp_rank")] * 2
    assert all(f"session 's' go to data parallel rank {home}" in reason.message for reason in reasons)


def test_sessions_are_spread() -> None:
    counts = [0] * 4
    for number in range(400):
        counts[home_rank(f"session-{number}", range(4))] += 1
    assert min(counts) > 60


def test_probes_have_a_turn_of_their_own_and_no_events() -> None:
    rig = Rig(2)
    probe = f"{HEALTH_CHECK_PREFIX}x"
    rig.send(request(probe), request("a"), request(probe), request(probe), request("b"))
    assert rig.routed() == {"a": 0, "b": 1}
    assert [body.rid for body in rig.bodies(DpChose)] == ["a", "b"]
    assert [sum(m.rid == probe for m in rank.messages) for rank in rig.ranks] == [2, 1]


def test_probes_do_not_read_the_loads() -> None:
    rig = Rig(2, TotalRequests())
    rig.loads.put(LoadSnapshot(timestamp=1, dp_rank=0, num_running_reqs=5))
    rig.send(request(f"{HEALTH_CHECK_PREFIX}x"))
    rig.loads.put(LoadSnapshot(timestamp=2, dp_rank=0, num_running_reqs=0))
    rig.send(request("a"))
    assert rig.bodies(DpChose)[0].candidates == ((0, True, 0, 0), (1, True, 0, 0))


def test_the_end_goes_to_all_and_in_the_place_of_the_lost_to_the_detokenizer() -> None:
    rig = Rig(3)
    rig.inbox.messages = [lost(0, 2, of=3), ShutdownReq()]
    rig.controller.run()
    assert [len(rank.messages) for rank in rig.ranks] == [0, 1, 0]
    assert [type(m) for m in rig.to_detokenizer.messages] == [ActiveRanksOutput, ShutdownReq, ShutdownReq]


def test_events_can_be_switched_off() -> None:
    rig = Rig(2)
    rig.send(ConfigureTraceReq(on=False), request("a"), ConfigureTraceReq(on=True), request("b"))
    assert [body.rid for body in rig.bodies(DpChose)] == ["b"]
    assert all(isinstance(rank.messages[0], ConfigureTraceReq) for rank in rig.ranks)


class Wrong:
    """A user's policy that gives whatever it was made with, or raises it."""

    name = "wrong"

    def __init__(self, gives: object) -> None:
        self._gives = gives

    def choose(self, request: TokenizedGenerateReqInput, ranks: Sequence[RankLoad]) -> int:
        if isinstance(self._gives, Exception):
            raise self._gives
        return self._gives  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("gives", "status", "word"),
    [(ValueError("oh"), 500, "oh"), (BadRequest("no"), 400, "no"), (2, 500, "2"), (-1, 500, "-1"), (None, 500, "None"),
     (1, 503, "lost"), (True, 500, "True")],
)  # fmt: skip
def test_a_wrong_policy_costs_its_requests_and_nothing_else(gives: object, status: int, word: str) -> None:
    rig = Rig(2, Wrong(gives))
    rig.send(lost(1, of=2), request("a"), request("b", routed_dp_rank=0))
    (refusal,) = rig.to_tokenizer.of(AbortReq)
    assert refusal.rid == "a" and refusal.finished_reason.status_code == status
    assert word in refusal.finished_reason.message
    assert rig.to_tokenizer.of(RoutedReq)[0].rids == ["b"]
