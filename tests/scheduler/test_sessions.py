"""Sessions in the scheduler: whose ids a turn begins with, and what is refused."""

from __future__ import annotations

import pytest
from rig import Rig
from session_tools import S, closed, opened, prompt_of, refused, told, turn

from sgviz.events.schema import SessionTurn
from sgviz.scheduler.sessions import MOST_OPEN


@pytest.mark.parametrize("overlap", [False, True])
def test_a_turn_goes_on_from_the_ids_of_the_one_before(overlap: bool) -> None:
    rig = Rig(disable_overlap_schedule=not overlap)
    assert opened(rig).success
    first = told(rig, "a", [1, 2, 3, 4, 5])
    second = told(rig, "b", [6, 7], on="a")
    assert prompt_of(rig, "b") == [1, 2, 3, 4, 5, *first, 6, 7]
    assert rig.answers["b"].cached_tokens == 8  # all but the last sampled token, which has no KV yet
    told(rig, "c", [8], on="b")
    assert prompt_of(rig, "c") == [1, 2, 3, 4, 5, *first, 6, 7, *second, 8]
    plain = Rig()
    plain.submit(prompt_of(rig, "c"), 4, rid="c", ignore_eos=True)
    plain.run()
    assert plain.answers["c"].output_ids == rig.answers["c"].output_ids
    rig.check_empty()
    (body,) = [body for body in rig.bodies(SessionTurn) if body.rid == "c"]
    assert (body.session_id, body.parent, body.context_tokens, body.new_tokens) == (S, "b", 15, 1)


def test_two_turns_from_one_are_branches() -> None:
    rig = Rig()
    opened(rig)
    first = told(rig, "a", [1, 2, 3])
    for rid in ("left", "right"):
        turn(rig, rid, [9, ord(rid[0]) % 90], on="a")
    rig.run()
    for rid in ("left", "right"):
        assert prompt_of(rig, rid) == [1, 2, 3, *first, 9, ord(rid[0]) % 90]
    told(rig, "right2", [5], on="right")
    assert prompt_of(rig, "right2") == [*prompt_of(rig, "right"), *rig.answers["right"].output_ids, 5]
    rig.check_empty()


def test_without_a_rid_a_turn_begins_anew_and_the_others_stay() -> None:
    rig = Rig()
    opened(rig)
    first = told(rig, "a", [1, 2, 3])
    told(rig, "b", [4, 5])
    assert prompt_of(rig, "b") == [4, 5]
    told(rig, "c", [6], on="a")
    assert prompt_of(rig, "c") == [1, 2, 3, *first, 6]


@pytest.mark.parametrize(("offset", "kept"), [(None, 9), (0, 9), (5, 5), (2, 2), (-3, 6), (100, 9)])
def test_the_offset_cuts_the_context(offset: int | None, kept: int) -> None:
    rig = Rig()
    opened(rig)
    first = told(rig, "a", [1, 2, 3, 4, 5])
    told(rig, "b", [6], on="a", offset=offset)
    assert prompt_of(rig, "b") == [*[1, 2, 3, 4, 5, *first][:kept], 6]


def test_the_output_of_the_turn_before_can_be_dropped() -> None:
    rig = Rig()
    opened(rig)
    told(rig, "a", [1, 2, 3])
    told(rig, "b", [6], on="a", drop_previous_output=True)
    assert prompt_of(rig, "b") == [1, 2, 3, 6]


def test_a_leading_bos_is_left_out_where_something_stands_before_it() -> None:
    rig = Rig()
    opened(rig)
    first = told(rig, "a", [1, 2, 3])
    for rid, on in (("b", "a"), ("new", None)):
        turn(rig, rid, [50, 7], on=on)
        rig.inbox.messages[-1].bos_token_id = 50
        rig.run()
    assert prompt_of(rig, "b") == [1, 2, 3, *first, 7] and prompt_of(rig, "new") == [50, 7]


class TestReplace:
    def test_what_came_after_is_forgotten(self) -> None:
        rig = Rig()
        opened(rig)
        first = told(rig, "a", [1, 2, 3])
        told(rig, "b", [4], on="a")
        told(rig, "c", [5], on="b")
        told(rig, "d", [6], on="a", replace=True)
        assert prompt_of(rig, "d") == [1, 2, 3, *first, 6]
        for gone in ("b", "c"):
            turn(rig, f"after-{gone}", [7], on=gone)
            rig.run()
            assert repr(gone) in refused(rig, f"after-{gone}")
        told(rig, "e", [7], on="a")
        assert [body.forgotten for body in rig.bodies(SessionTurn) if body.rid == "d"] == [2]

    def test_without_a_rid_all_of_it(self) -> None:
        rig = Rig()
        opened(rig)
        told(rig, "a", [1, 2, 3])
        turn(rig, "runs", [4], 50, on="a")
        rig.until_true(lambda: len(rig.answers["runs"].output_ids) >= 3)
        told(rig, "new", [9], replace=True)
        assert prompt_of(rig, "new") == [9]
        assert rig.answers["runs"].reason == "abort" and rig.answers["runs"].status is None
        turn(rig, "late", [7], on="a")
        rig.run()
        assert "'a'" in refused(rig, "late")
        rig.check_empty()

    def test_one_that_runs_ends_and_its_tokens_so_far_count(self) -> None:
        rig = Rig()
        opened(rig)
        turn(rig, "a", [1, 2, 3], 60)
        rig.until_true(lambda: len(rig.answers["a"].output_ids) >= 5)
        so_far = list(rig.state.live["a"].output_ids)
        told(rig, "b", [4], on="a", replace=True)
        assert prompt_of(rig, "b") == [1, 2, 3, *so_far, 4]
        assert rig.answers["a"].reason == "abort"
        rig.check_empty()

    def test_a_refused_turn_replaces_nothing(self) -> None:
        rig = Rig(context_len=64)
        opened(rig)
        first = told(rig, "a", [1, 2, 3])
        told(rig, "b", [4], on="a")
        turn(rig, "long", [5] * 60, on="a", replace=True)
        rig.run()
        assert "67 tokens" in refused(rig, "long")
        told(rig, "c", [6], on="b")
        assert prompt_of(rig, "c")[: 3 + len(first)] == [1, 2, 3, *first]


class TestRefusals:
    def test_an_unknown_session(self) -> None:
        rig = Rig()
        turn(rig, "a", [1], id="nobody")
        rig.run()
        assert "'nobody'" in refused(rig, "a")

    def test_a_closed_session(self) -> None:
        rig = Rig()
        opened(rig)
        told(rig, "a", [1, 2])
        assert closed(rig).success
        turn(rig, "b", [1], on="a")
        rig.run()
        assert repr(S) in refused(rig, "b")
        assert not closed(rig).success

    def test_an_unknown_turn_and_one_of_another_session(self) -> None:
        rig = Rig()
        opened(rig), opened(rig, "other")
        told(rig, "a", [1, 2])
        for rid, id_, on in (("x", S, "nobody"), ("y", "other", "a")):
            turn(rig, rid, [1], id=id_, on=on)
            rig.run()
            assert repr(on) in refused(rig, rid)

    def test_a_turn_that_has_not_ended(self) -> None:
        rig = Rig()
        opened(rig)
        turn(rig, "a", [1, 2, 3], 30)
        rig.until_true(lambda: len(rig.answers["a"].output_ids) >= 2)
        turn(rig, "b", [4], on="a")
        rig.run()
        assert "has not ended" in refused(rig, "b") and rig.answers["a"].reason == "length"

    def test_more_text_than_the_session_may_have(self) -> None:
        """A letter for each token: 3 + 4 + 3 fit, a fourth does not."""
        rig = Rig()
        opened(rig, capacity=10)
        told(rig, "a", [1, 2, 3])
        turn(rig, "b", [1, 2, 3, 4], on="a")
        rig.run()
        assert "11 characters" in refused(rig, "b") and "10" in refused(rig, "b")
        told(rig, "c", [1, 2, 3], on="a")

    def test_a_tokenizer_that_raises_ends_the_turn_and_nothing_else(self) -> None:
        rig = Rig()
        opened(rig, capacity=10)

        def broken(ids: list[int], skip_special_tokens: bool) -> str:
            raise ValueError("no such id")

        sessions = rig.scheduler.intake._sessions
        decode, sessions._decode = sessions._decode, broken
        turn(rig, "a", [1, 2, 3])
        rig.run()
        answer = rig.answers["a"]
        assert (answer.status, answer.finals) == (500, 1)
        assert "ValueError: no such id" in answer.finish.message
        assert answer.finish.err_type == "InternalServerError"
        sessions._decode = decode
        told(rig, "b", [1, 2, 3])
        rig.check_empty()

    def test_more_sessions_than_may_be_open(self) -> None:
        rig = Rig()
        sessions = rig.scheduler.intake._sessions
        for number in range(MOST_OPEN):
            assert sessions.open(str(number), 10, False, None) == ""
        assert f"{MOST_OPEN} sessions are open" in opened(rig).message and len(sessions) == MOST_OPEN
        assert closed(rig, "7").success and opened(rig).success

    def test_a_name_that_is_taken(self) -> None:
        rig = Rig()
        assert opened(rig).success
        again = opened(rig)
        assert not again.success and repr(S) in again.message
        closed(rig)
        assert opened(rig).success
