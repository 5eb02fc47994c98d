"""One plan a turn: prefill first, one scan of the queue, and what is told about it."""

from __future__ import annotations

import dataclasses

import pytest
from rig import Rig

from sgviz.events import Reason
from sgviz.events.schema import AdmitOk, AdmitRefused, BatchPlanned, ChunkCut, PrefixMatched, ScanStopped
from sgviz.scheduler.stops import Stop


def planned(rig: Rig) -> list[tuple[str, tuple[str, ...]]]:
    return [(body.mode, body.rids) for body in rig.bodies(BatchPlanned)]


class TestPrefillFirst:
    def test_a_newcomer_goes_before_the_next_decode(self) -> None:
        rig = Rig()
        rig.submit([1], 4, rid="a")
        rig.until(Stop.PROCESSED)
        rig.until(Stop.PROCESSED)
        rig.submit([2], 4, rid="b")
        for _ in range(2):
            rig.until(Stop.PROCESSED)
        assert planned(rig) == [
            ("extend", ("a",)),
            ("decode", ("a",)),
            ("extend", ("b",)),
            ("decode", ("a", "b")),
        ]

    def test_a_mixed_batch_lets_decodes_ride_along(self) -> None:
        rig = Rig(enable_mixed_chunk=True, chunked_prefill_size=8)
        rig.submit([1], 9, rid="a")
        rig.until(Stop.PROCESSED)
        rig.submit(range(20), 3, rid="b")
        rig.run()
        assert planned(rig)[:5] == [
            ("extend", ("a",)),
            *[("mixed", ("b", "a"))] * 3,
            ("decode", ("b", "a")),
        ]
        assert [body.extend_lens for body in rig.bodies(BatchPlanned)[1:4]] == [(7, 1), (7, 1), (6, 1)]
        assert all(sum(body.extend_lens) <= 8 for body in rig.bodies(BatchPlanned))

    @pytest.mark.parametrize("chunk", [16, 33, 64])
    @pytest.mark.parametrize("mixed", [False, True])
    def test_no_prefill_batch_exceeds_its_budget(self, chunk: int, mixed: bool) -> None:
        rig = Rig(chunked_prefill_size=chunk, enable_mixed_chunk=mixed, tokens=2000)
        for i in range(12):
            rig.submit([i + j for j in range(5 + 13 * i % 90)], 9)
            rig.stop()
        rig.run()
        extends = [body for body in rig.bodies(BatchPlanned) if body.mode != "decode"]
        assert len(extends) > 5 and all(sum(body.extend_lens) <= chunk for body in extends)

    def test_at_least_one_token_is_computed_on_a_full_hit(self) -> None:
        rig = Rig()
        for _ in range(2):
            rig.submit(range(10), 4)
            rig.run()
        assert rig.answers["r1"].output_ids == rig.answers["r0"].output_ids
        assert rig.answers["r1"].cached_tokens == 9
        assert [body.extend_lens for body in rig.bodies(BatchPlanned) if body.mode == "extend"] == [
            (10,),
            (1,),
        ]


class TestChunks:
    def test_every_piece_is_told(self) -> None:
        rig = Rig(chunked_prefill_size=16)
        rig.submit(range(40), 1)
        rig.run()
        assert [(body.start, body.end, body.total) for body in rig.bodies(ChunkCut)] == [
            (0, 16, 40), (16, 32, 40), (32, 40, 40),
        ]  # fmt: skip
        oks = rig.bodies(AdmitOk)
        assert [(ok.prefix, ok.extend, ok.chunked, ok.reserved) for ok in oks] == [
            (0, 16, True, 0), (16, 16, True, 0), (32, 8, False, 1),
        ]  # fmt: skip
        assert [ok.need > 0 for ok in oks] == [True, False, False]

    def test_a_whole_prompt_is_no_cut(self) -> None:
        rig = Rig(chunked_prefill_size=16)
        rig.submit(range(16), 1)
        rig.submit(range(16), 1)
        rig.run()
        assert rig.bodies(ChunkCut) == []

    def test_a_small_request_shares_the_batch_of_the_last_piece(self) -> None:
        rig = Rig(chunked_prefill_size=16)
        rig.submit(range(24), 2, rid="long")
        rig.submit(range(50, 54), 2, rid="short")
        rig.run()
        assert planned(rig)[:2] == [("extend", ("long",)), ("extend", ("long", "short"))]

    def test_a_middle_piece_gives_no_token(self) -> None:
        rig = Rig(chunked_prefill_size=16)
        rid = rig.submit(range(40), 3)
        rig.until(Stop.PROCESSED)
        rig.until(Stop.PROCESSED)
        assert rig.answers[rid].output_ids == []
        rig.until(Stop.PROCESSED)
        assert len(rig.answers[rid].output_ids) == 1


class TestRefusals:
    def test_running_slots(self) -> None:
        rig = Rig(max_running_requests=2)
        for i in range(4):
            rig.submit([i], 5)
        for _ in range(3):
            rig.until(Stop.PROCESSED)
        # the scan that filled the slots stopped at the third; later plans do not even scan
        assert [(body.rid, body.reason, body.behind) for body in rig.bodies(ScanStopped)] == [
            ("r2", Reason.RUNNING_SLOTS, 1)
        ]
        rig.state.running_batch.batch_is_full = False
        rig.until(Stop.PLANNED)
        (refused,) = rig.bodies(AdmitRefused)
        assert (refused.rid, refused.reason, refused.need, refused.have) == ("r2", Reason.RUNNING_SLOTS, 3, 2)
        assert refused.holders == (("r0", 1), ("r1", 1))
        assert rig.state.running_batch.batch_is_full

    def test_the_refused_one_is_the_first_by_the_policy(self) -> None:
        """It came last, but lof would take it next."""
        rig = Rig(max_running_requests=2, schedule_policy="lof")
        for _ in range(2):
            rig.submit([1], 9)
        rig.until(Stop.PROCESSED)
        rig.until(Stop.PROCESSED)
        rig.submit([2], 3, rid="short")
        rig.submit([3], 8, rid="long")
        rig.until(Stop.RECEIVED)
        rig.state.running_batch.batch_is_full = False
        rig.until(Stop.PLANNED)
        assert [body.rid for body in rig.bodies(AdmitRefused)] == ["long"]
        assert [body.rid for body in rig.bodies(ScanStopped)] == ["long"]

    def test_rows(self) -> None:
        rig = Rig(max_running_requests=2)
        rig.state.limits = dataclasses.replace(rig.state.limits, max_running_requests=9)
        for i in range(3):
            rig.submit([i], 5)
        rig.until(Stop.PROCESSED)
        rig.state.running_batch.batch_is_full = False
        rig.until(Stop.PLANNED)
        (refused,) = rig.bodies(AdmitRefused)
        assert (refused.rid, refused.reason, refused.need, refused.have) == ("r2", Reason.ROWS, 1, 0)
        assert refused.holders == (("r0", 1), ("r1", 1))

    def test_a_cut_prompt_holds_the_last_row(self) -> None:
        rig = Rig(max_running_requests=2, chunked_prefill_size=16)
        rig.submit([1], 9)
        rig.until(Stop.PROCESSED)
        rig.submit(range(40), 2, rid="cut")
        rig.submit([5], 2, rid="waits")
        rig.until_true(lambda: rig.state.chunked_req is None and len(rig.state.live) == 3, most=30)
        rig.run()
        rig.check_empty()
        assert max(len(body.rids) for body in rig.bodies(BatchPlanned)) == 2
        assert ("waits", Reason.ROWS) in [(body.rid, body.reason) for body in rig.bodies(ScanStopped)]

    def test_kv_by_event(self) -> None:
        rig = Rig(tokens=64)
        rig.submit(range(20), 20, rid="first")
        rig.until(Stop.PROCESSED)
        for rid in ("big", "small", "smaller"):
            rig.submit([1, 2], {"big": 90}.get(rid, 1), rid=rid)
        rig.until(Stop.PROCESSED)
        refused = rig.bodies(AdmitRefused)
        assert [(body.rid, body.reason) for body in refused] == [("big", Reason.KV)]
        assert refused[0].need == 2 + 60 + 1  # max_new_tokens was clamped to the pool
        assert refused[0].have < refused[0].need and refused[0].holders == (("first", 20 + 19),)
        # nothing behind the head is tried, however small
        stopped = rig.bodies(ScanStopped)
        assert [(body.rid, body.reason, body.behind) for body in stopped] == [("big", Reason.KV, 2)]

    def test_a_refusal_that_lasts_is_told_once(self) -> None:
        """Decoding requests ride along and leave less than a page of the chunk: refused turn after turn."""
        rig = Rig(page_size=16, chunked_prefill_size=16, enable_mixed_chunk=True, tokens=512)
        rig.submit([1], 40, rid="runs")
        rig.until(Stop.PROCESSED)
        for i in range(3):
            rig.submit(range(50 + i, 90), 2, rid=f"w{i}")
        for _ in range(10):
            rig.until(Stop.PROCESSED)
        (refused,) = rig.bodies(AdmitRefused)
        assert (refused.rid, refused.reason, refused.need, refused.have) == (
            "w0",
            Reason.CHUNK_BUDGET,
            48,
            15,
        )
        assert [(body.rid, body.behind) for body in rig.bodies(ScanStopped)] == [("w0", 2)]
        rig.run()
        rig.check_empty()

    def test_who_is_admitted_is_told_with_its_match(self) -> None:
        rig = Rig()
        rig.submit(range(10), 1)
        rig.run()
        rig.submit([*range(10), 50, 51], 2, rid="b")
        rig.run()
        match, ok = rig.bodies(PrefixMatched)[-1], rig.bodies(AdmitOk)[-1]
        assert (match.rid, match.tokens, match.limit) == ("b", 10, 11)
        assert (ok.rid, ok.prefix, ok.extend, ok.need, ok.reserved) == ("b", 10, 2, 2 + 2 + 1, 2)
        assert ok.rem_chunk == 2048 - 2 and ok.rem_input == 16384 - 2


class TestTheLatch:
    """batch_is_full: set on a shortage, cleared when somebody leaves; neither starves nor scans in vain."""

    def full(self, **settings: object) -> Rig:
        rig = Rig(tokens=64, **settings)
        rig.submit(range(10), 30, rid="a")
        rig.submit(range(20, 25), 6, rid="b")
        rig.until(Stop.PROCESSED)
        rig.submit(range(30, 40), 20, rid="c")
        rig.until(Stop.PROCESSED)
        return rig

    def test_a_shortage_sets_it_and_later_plans_do_not_match(self) -> None:
        rig = self.full()
        assert rig.state.running_batch.batch_is_full
        step = rig.state.cache.tree._step
        rig.until(Stop.PLANNED)
        assert rig.state.cache.tree._step == step

    @pytest.mark.parametrize("overlap", [False, True])
    def test_a_finish_clears_it(self, overlap: bool) -> None:
        rig = self.full(disable_overlap_schedule=not overlap)
        rig.until_true(lambda: rig.answers["b"].finals == 1, most=60)
        rig.until(Stop.PLANNED)
        rig.until(Stop.PLANNED)
        assert rig.state.waiting_queue == []

    @pytest.mark.parametrize("overlap", [False, True])
    def test_an_abort_clears_it(self, overlap: bool) -> None:
        rig = self.full(disable_overlap_schedule=not overlap)
        rig.abort("b")
        for _ in range(3):
            rig.until(Stop.PLANNED)
        assert rig.state.waiting_queue == []

    def test_a_foreseen_finish_clears_it_also_when_it_was_seen_in_a_mixed_plan(self) -> None:
        rig = Rig(disable_overlap_schedule=False, enable_mixed_chunk=True)
        rig.submit([1], 4, rid="a")
        rig.submit([2], 20, rid="b")
        rig.until_true(lambda: len(rig.answers["a"].output_ids) == 3)
        running = rig.state.running_batch
        running.batch_is_full = True
        assert [req.rid for req in running.reqs] == ["a", "b"]  # the last token of a is under way
        assert rig.scheduler.planner._decode.can_ride_along()
        assert [req.rid for req in running.reqs] == ["b"] and not running.batch_is_full
