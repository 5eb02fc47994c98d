"""Ends in sessions: clients that leave, streaming sessions, closing, and any conversation at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st
from rig import Rig
from session_tools import S, closed, opened, prompt_of, refused, told, turn

from sgviz.events.schema import SessionClosed, SessionOpened
from sgviz.messages import ShutdownReq
from sgviz.scheduler.stops import Stop


class TestClientLeaves:
    """An aborted turn is a turn: its context is its prompt and what it had generated."""

    @pytest.mark.parametrize("overlap", [False, True])
    def test_while_it_runs(self, overlap: bool) -> None:
        rig = Rig(disable_overlap_schedule=not overlap)
        opened(rig)
        first = told(rig, "a", [1, 2, 3])
        turn(rig, "b", [4, 5], 60, on="a")
        rig.until_true(lambda: len(rig.answers["b"].output_ids) >= 6)
        rig.abort("b")
        rig.run()
        got = rig.answers["b"].output_ids
        assert rig.answers["b"].reason == "abort" and len(got) >= 6
        told(rig, "c", [6], on="b")
        assert prompt_of(rig, "c") == [1, 2, 3, *first, 4, 5, *got, 6]
        told(rig, "again", [4, 5], on="a")  # or as if it had never been
        assert prompt_of(rig, "again") == [1, 2, 3, *first, 4, 5]
        rig.check_empty()

    def test_while_it_waits(self) -> None:
        rig = Rig(max_running_requests=1)
        opened(rig)
        first = told(rig, "a", [1, 2, 3])
        rig.submit(range(10), 30, rid="busy", ignore_eos=True)
        rig.until_true(lambda: "busy" in rig.state.live and not rig.state.waiting_queue)
        turn(rig, "b", [4, 5], on="a")
        rig.until(Stop.RECEIVED)
        rig.abort("b")
        rig.run()
        assert rig.answers["b"].reason == "abort"
        told(rig, "c", [6], on="b")
        assert prompt_of(rig, "c") == [1, 2, 3, *first, 4, 5, 6]


class TestStreaming:
    def test_turns_go_on_by_themselves(self) -> None:
        rig = Rig()
        opened(rig, streaming=True)
        first = told(rig, "a", [1, 2, 3])
        second = told(rig, "b", [4])
        told(rig, "c", [5])
        assert prompt_of(rig, "c") == [1, 2, 3, *first, 4, *second, 5]

    def test_an_aborted_turn_is_rolled_back(self) -> None:
        rig = Rig()
        opened(rig, streaming=True)
        first = told(rig, "a", [1, 2, 3])
        turn(rig, "b", [4], 60)
        rig.until_true(lambda: len(rig.answers["b"].output_ids) >= 3)
        turn(rig, "early", [9])
        rig.until(Stop.RECEIVED)
        assert "has not ended" in refused(rig, "early")
        rig.abort("b")
        rig.run()
        told(rig, "c", [5])
        assert prompt_of(rig, "c") == [1, 2, 3, *first, 5]

    @pytest.mark.parametrize(
        "wrong", [{"on": "a"}, {"offset": 2}, {"replace": True}, {"drop_previous_output": True}]
    )
    def test_it_only_appends(self, wrong: dict[str, object]) -> None:
        rig = Rig()
        opened(rig, streaming=True)
        told(rig, "a", [1, 2, 3])
        turn(rig, "b", [4], **wrong)
        rig.run()
        assert "streaming" in refused(rig, "b")


class TestEnds:
    def test_closing_ends_what_runs_and_what_waits(self) -> None:
        rig = Rig(max_running_requests=1)
        opened(rig)
        turn(rig, "runs", [1, 2, 3], 60)
        rig.until_true(lambda: len(rig.answers["runs"].output_ids) >= 3)
        turn(rig, "waits", [4])
        rig.submit([5], 3, rid="stranger", ignore_eos=True)
        rig.until(Stop.RECEIVED)
        assert closed(rig).success
        rig.run()
        for rid in ("runs", "waits"):
            assert (rig.answers[rid].reason, rig.answers[rid].status) == ("abort", None)
            assert "session was closed" in rig.answers[rid].finish.message
        assert rig.answers["stranger"].reason == "length"
        rig.check_empty()
        (body,) = rig.bodies(SessionClosed)
        assert (body.session_id, body.turns) == (S, 2)

    def test_an_idle_one_closes_by_itself_and_one_with_a_turn_under_way_does_not(self) -> None:
        rig = Rig()
        opened(rig, timeout=5.0), opened(rig, "forever")
        turn(rig, "a", [1, 2, 3], 30)
        for _ in range(12):
            rig.clock.advance(1_000_000_000)
            rig.stop()
        assert rig.bodies(SessionClosed) == [] and "a" in rig.state.live
        rig.run()
        for _ in range(9):
            rig.clock.advance(1_000_000_000)
            rig.stop()
        (body,) = rig.bodies(SessionClosed)
        assert body.session_id == S and "idle" in body.why
        turn(rig, "b", [4], on="a")
        rig.run()
        assert repr(S) in refused(rig, "b") and closed(rig, "forever").success

    def test_all_close_with_the_engine(self) -> None:
        rig = Rig()
        opened(rig), opened(rig, "other", streaming=True)
        told(rig, "a", [1, 2, 3])
        rig.inbox.send(ShutdownReq())
        assert next(rig._loop, None) in (Stop.RECEIVED, None)
        assert [body.session_id for body in rig.bodies(SessionOpened)] == [S, "other"]
        assert {body.session_id: body.why for body in rig.bodies(SessionClosed)} == {
            S: "the engine stops",
            "other": "the engine stops",
        }

    def test_each_turn_keeps_its_own_ids_however_long_its_context(self) -> None:
        rig = Rig(tokens=512, context_len=400)
        opened(rig)
        last, whole = None, 0
        for number in range(12):
            told(rig, f"t{number}", [number, 7], on=last)
            last, whole = f"t{number}", whole + 6
        session = rig.scheduler.intake._sessions._open[S]
        session.look()
        assert sum(len(node.own) + len(node.output) for node in session.nodes.values()) == whole
        assert session.nodes["t11"].prompt() == prompt_of(rig, "t11")

    def test_a_streaming_session_keeps_its_last_turn_only(self) -> None:
        rig = Rig(tokens=512, context_len=400)
        opened(rig, streaming=True)
        for number in range(12):
            told(rig, f"t{number}", [number, 7])
        session = rig.scheduler.intake._sessions._open[S]
        session.look()
        assert session.nodes == {} and session.under_way == [] and session.turns == 12
        assert session.committed.prompt() == prompt_of(rig, "t11")
        assert session.committed.parent is None and session.committed.children == []

    def test_a_long_conversation_keeps_ids_and_nothing_else(self) -> None:
        rig = Rig(tokens=512, context_len=400)
        opened(rig)
        last = None
        for number in range(12):
            told(rig, f"t{number}", [number, 7], on=last)
            last = f"t{number}"
            rig.check_empty()
        session = rig.scheduler.intake._sessions._open[S]
        session.look()
        assert len(session.nodes) == 12 and session.under_way == []
        assert all(node.req is None for node in session.nodes.values())
        assert rig.flush().success


# ---------------------------------------------------------------- any conversation

moves = st.lists(
    st.tuples(
        st.integers(0, 6),  # which turn it goes on from, counted from the newest; beyond the first: from none
        st.sampled_from([None, None, 0, 3, -2, 50]),
        st.booleans(),
        st.sampled_from([False, False, False, True]),
        st.integers(1, 6),  # own ids
        st.integers(0, 5),  # new tokens
        st.sampled_from([None, None, None, 1, 4]),  # abort after so many stops
    ),
    min_size=1,
    max_size=10,
)


@profile(max_examples=40, deadline=None)
@given(moves, st.booleans(), st.sampled_from([1, 4]))
def test_every_prompt_is_what_a_client_would_have_put_together(
    todo: list[tuple[int, int | None, bool, bool, int, int, int | None]], overlap: bool, page: int
) -> None:
    """Against a client that keeps the conversation itself, from the answers it got."""
    rig = Rig(tokens=2048, context_len=512, page_size=page, disable_overlap_schedule=not overlap)
    opened(rig)
    known: dict[str, tuple[list[int], str | None]] = {}  # prompt, parent
    for number, (back, offset, drop, replace, own, new, leave) in enumerate(todo):
        rid, ids = f"t{number}", [(number * 13 + i) % 97 for i in range(own)]
        on = list(known)[-1 - back] if back < len(known) else None
        context: list[int] = []
        if on is not None:
            context = known[on][0] + ([] if drop else rig.answers[on].output_ids)
            context = context[:offset] if offset else context
        turn(rig, rid, ids, new, on=on, offset=offset, replace=replace, drop_previous_output=drop)
        if leave is not None:
            for _ in range(leave):
                rig.stop()
            rig.abort(rid)
        rig.run()
        assert prompt_of(rig, rid) == context + ids
        if replace:
            gone = {on}
            while more := {
                name for name, (_, parent) in known.items() if parent in gone and name not in gone
            }:
                gone |= more
            known = {
                name: kept
                for name, kept in known.items()
                if on is not None and (name == on or name not in gone)
            }
        known[rid] = (context + ids, on)
        rig.check_empty()
    assert closed(rig).success
