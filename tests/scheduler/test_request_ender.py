"""Aborts: wherever a request is when its client goes, it ends once and leaves nothing."""

from __future__ import annotations

import sys
from types import FrameType

import pytest
from rig import Rig

from sgviz.events.schema import RequestAborted
from sgviz.scheduler.stops import Stop

LOOPS = pytest.mark.parametrize("overlap", [False, True])


def make(overlap: bool = False, **settings: object) -> Rig:
    return Rig(disable_overlap_schedule=not overlap, **settings)


def where(rig: Rig) -> list[tuple[str, str]]:
    return [(body.rid, body.where) for body in rig.bodies(RequestAborted)]


class TestAbort:
    @LOOPS
    def test_waiting(self, overlap: bool) -> None:
        """It is answered at once, without any prefill, and the others do not notice."""
        rig = make(overlap, max_running_requests=1)
        first, second = rig.submit([1, 2], 6), rig.submit([3, 4], 6)
        rig.until(Stop.PROCESSED)
        rig.abort(second)
        rig.until(Stop.RECEIVED)
        answer = rig.answers[second]
        assert (answer.cut, answer.reason, answer.status, answer.output_ids) == (True, "abort", None, [])
        rig.run()
        rig.check_empty()
        assert where(rig) == [(second, "waiting")] and len(rig.answers[first].output_ids) == 6

    @LOOPS
    @pytest.mark.parametrize("stream", [False, True])
    def test_running(self, overlap: bool, stream: bool) -> None:
        """It ends with the next result, with the text so far."""
        rig = make(overlap)
        rid = rig.submit([1, 2], 50, stream=stream)
        other = rig.submit([5, 6], 12)
        rig.until_true(lambda: len(rig.answers[other].output_ids) == 5)
        rig.abort(rid)
        rig.until_true(lambda: rig.answers[rid].finals == 1, most=8)
        rig.check()
        answer = rig.answers[rid]
        assert (answer.cut, answer.reason, answer.status, answer.finish.message) == (
            False,
            "abort",
            None,
            "test",
        )
        assert 5 <= len(answer.output_ids) <= 6
        rig.run()
        rig.check_empty()
        assert len(rig.answers[other].output_ids) == 12 and where(rig) == [(rid, "running")]

    @LOOPS
    @pytest.mark.parametrize("turns", [1, 2, 3])
    def test_between_chunks(self, overlap: bool, turns: int) -> None:
        """One final reply, all pages back, a free chunk slot, and the same prompt is right later."""
        rig = make(overlap, chunked_prefill_size=16)
        prompt = [i % 90 for i in range(100)]
        rid = rig.submit(prompt, 4)
        for _ in range(turns):
            rig.until(Stop.LAUNCHED)
        assert rig.state.chunked_req is not None
        rig.abort(rid)
        rig.run()
        rig.check_empty()
        assert rig.state.chunked_req is None
        assert (rig.answers[rid].cut, rig.answers[rid].reason) == (True, "abort")
        assert where(rig) == [(rid, "chunk")]
        again = rig.submit(prompt, 4)
        rig.run()
        calm = make()
        right = calm.submit(prompt, 4)
        calm.run()
        assert rig.answers[again].output_ids == calm.answers[right].output_ids

    @LOOPS
    def test_in_the_turn_of_the_last_chunk(self, overlap: bool) -> None:
        rig = make(overlap, chunked_prefill_size=16)
        rid = rig.submit(range(30), 4)
        rig.until(Stop.LAUNCHED)
        rig.until(Stop.LAUNCHED)
        assert rig.state.chunked_req is None
        rig.abort(rid)
        rig.run()
        rig.check_empty()
        assert where(rig) == [(rid, "running")] and rig.answers[rid].reason == "abort"

    @LOOPS
    def test_before_it_was_ever_tried(self, overlap: bool) -> None:
        rig = make(overlap)
        rid = rig.submit([1, 2], 4)
        rig.abort(rid)  # both messages are taken in together
        rig.run()
        rig.check_empty()
        assert where(rig) == [(rid, "waiting")]

    @LOOPS
    def test_unknown_and_repeated_ones_are_harmless(self, overlap: bool) -> None:
        rig = make(overlap)
        rid = rig.submit([1, 2], 5)
        rig.abort("nobody")
        rig.abort("")
        rig.until(Stop.PROCESSED)
        rig.abort(rid)
        rig.abort(rid)
        rig.run()
        rig.abort(rid)
        rig.run()
        rig.check_empty()
        assert where(rig) == [(rid, "running")]

    @LOOPS
    def test_only_the_very_rid(self, overlap: bool) -> None:
        """Aborting x touches neither x_0 nor xy, whether they run or wait."""
        rig = make(overlap, max_running_requests=3)
        for rid in ("x", "x_0", "xy", "x_1"):
            rig.submit([len(rid), 7], 8, rid=rid)
        rig.until(Stop.PROCESSED)
        rig.abort("x")
        rig.run()
        rig.check_empty()
        assert {rid: answer.reason for rid, answer in rig.answers.items()} == {
            "x": "abort", "x_0": "length", "xy": "length", "x_1": "length",
        }  # fmt: skip

    @LOOPS
    def test_all(self, overlap: bool) -> None:
        rig = make(overlap, max_running_requests=2, chunked_prefill_size=16)
        for i in range(2):
            rig.submit([i], 50)
        rig.until_true(lambda: all(answer.output_ids for answer in rig.answers.values()))
        for i in range(3):
            rig.submit([i + 5], 50)
        rig.until(Stop.PROCESSED)
        rig.abort(abort_all=True)
        rig.run()
        rig.check_empty()
        assert {answer.reason for answer in rig.answers.values()} == {"abort"}

    def test_all_goes_through_a_long_queue_once(self) -> None:
        """Counted in bytecodes: twice the requests, about twice the work."""

        def work(count: int) -> int:
            rig = make(max_running_requests=1, events=False)
            for i in range(count):
                rig.submit([i % 90], 50)
            rig.until(Stop.PLANNED)
            assert len(rig.state.waiting_queue) == count - 1
            steps = 0

            def count_step(frame: FrameType, event: str, arg: object) -> object:
                nonlocal steps
                frame.f_trace_opcodes = True
                steps += event == "opcode"
                return count_step

            before = sys.gettrace()
            sys.settrace(count_step)
            try:
                rig.scheduler.intake._ender.abort_all("test")
            finally:
                sys.settrace(before)
            return steps

        assert work(800) < 2.2 * work(400)

    def test_the_room_it_leaves_is_used_at_once(self) -> None:
        rig = make(tokens=64)
        greedy = rig.submit(range(10), 50)
        rig.until(Stop.PROCESSED)
        waits = rig.submit(range(20, 30), 20)
        rig.until(Stop.PROCESSED)
        assert [req.rid for req in rig.state.waiting_queue] == [waits]
        rig.abort(greedy)
        rig.until_true(lambda: not rig.state.waiting_queue, most=12)
        assert rig.state.running_batch.batch_is_full is False


class TestAbortAfterRetraction:
    """A retracted request has output; it waits, but its client has an open answer."""

    @LOOPS
    @pytest.mark.parametrize("stream", [False, True])
    def test_it_ends_once_with_all_it_had(self, overlap: bool, stream: bool) -> None:
        rig = make(overlap, tokens=104, schedule_conservativeness=0.001)
        for i in range(6):
            rig.submit([40 + i, 3, 5, 7, 9], 30, stream=stream)
            for _ in range(6):
                rig.stop()
        rig.until_true(lambda: any(req.is_retracted for req in rig.state.waiting_queue))
        victim = next(req for req in rig.state.waiting_queue if req.is_retracted)
        had = list(victim.output_ids)
        rig.abort(victim.rid)
        rig.run()
        rig.check_empty()
        answer = rig.answers[victim.rid]
        assert had and answer.output_ids == had and not answer.cut
        assert (answer.reason, answer.finals) == ("abort", 1)
