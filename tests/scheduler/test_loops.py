"""The two loops: where they stop, in which order they work, and that they give the same answers."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as profile
from hypothesis import strategies as st
from rig import Rig
from workload import CONTEXT, EOS_EVERY, VOCAB, Run, Submit, crowd, submit

from sgviz.batch.schedule_batch import ScheduleBatch
from sgviz.cache.errors import CacheCorrupt
from sgviz.events.schema import BatchLaunched, BatchPlanned, BatchProcessed, TokensSampled
from sgviz.messages import ShutdownReq
from sgviz.scheduler.stops import Stop
from sgviz.worker.mock_worker import MockWorker, mock_info
from sgviz.worker.stream import WorkerLaunch

R, P, L, D, I = Stop.RECEIVED, Stop.PLANNED, Stop.LAUNCHED, Stop.PROCESSED, Stop.IDLE  # noqa: E741


def order_of_work(rig: Rig) -> list[str]:
    """Launches and results as they happened: L1 D1 L2 D2 ..."""
    names = {BatchLaunched: "L", BatchProcessed: "D"}
    return [
        f"{names[type(event.body)]}{event.body.bid}"
        for event in rig.ring.snapshot()
        if type(event.body) in names
    ]


class TestStops:
    def test_normal(self) -> None:
        rig = Rig(disable_overlap_schedule=True)
        assert [rig.stop() for _ in range(3)] == [R, P, I]
        rig.submit([1, 2], 2)
        assert [rig.stop() for _ in range(11)] == [R, P, L, D, R, P, L, D, R, P, I]
        assert order_of_work(rig) == ["L1", "D1", "L2", "D2"]

    def test_overlap(self) -> None:
        rig = Rig(disable_overlap_schedule=False)
        assert [rig.stop() for _ in range(3)] == [R, P, I]
        rig.submit([1, 2], 2)
        first = [R, P, L]  # nothing to process yet
        assert [rig.stop() for _ in range(13)] == [*first, R, P, L, D, R, P, D, R, P, I]
        assert order_of_work(rig) == ["L1", "L2", "D1", "D2"]

    def test_a_loop_never_waits_by_itself(self) -> None:
        rig = Rig(disable_overlap_schedule=False)
        assert [rig.stop() for _ in range(9)] == [R, P, I] * 3

    @pytest.mark.parametrize("overlap", [False, True])
    def test_shutdown_processes_what_is_under_way(self, overlap: bool) -> None:
        rig = Rig(disable_overlap_schedule=not overlap)
        rid = rig.submit([1, 2], 9)
        rig.until(Stop.LAUNCHED)
        rig.inbox.send(ShutdownReq())
        rest = []
        with pytest.raises(StopIteration):
            while True:
                rest.append(rig.stop())
        assert rest == [D] and len(rig.answers[rid].output_ids) == 1
        assert rig.bodies(BatchLaunched)[-1].bid == rig.bodies(BatchProcessed)[-1].bid


class TestOverlapOrder:
    def test_a_result_is_processed_while_the_next_batch_runs(self) -> None:
        """P | D1, process P | D2, process D1 ...: the finish by EOS is seen when one more is under way."""
        rig = self.eos_at(3)
        rig.run()
        assert order_of_work(rig) == ["L1", "L2", "D1", "L3", "D2", "L4", "D3", "D4"]
        assert [len(body.rids) for body in rig.bodies(TokensSampled)] == [1, 1, 1, 0]
        assert len(rig.answers["r0"].output_ids) == 3

    def test_the_late_token_is_dropped_and_its_slot_comes_back(self) -> None:
        rig = self.eos_at(3)
        rig.until_true(lambda: rig.answers["r0"].finals == 1)
        assert rig.state.is_fully_idle and rig.state.pending_results == 1
        rig.check_empty()
        rig.run()
        rig.check_empty()
        assert rig.answers["r0"].deltas == [1, 1, 1]

    def test_a_finish_by_length_is_foreseen(self) -> None:
        rig = Rig(disable_overlap_schedule=False)
        rig.submit([1], 4)
        rig.run()
        assert len(rig.bodies(BatchLaunched)) == 4
        assert all(len(body.rids) == 1 for body in rig.bodies(TokensSampled))

    def test_a_request_that_wants_one_token_is_never_decoded(self) -> None:
        rig = Rig(disable_overlap_schedule=False)
        rig.submit([1], 1)
        rig.submit([2], 0)
        rig.run()
        assert [body.mode for body in rig.bodies(BatchPlanned)] == ["extend"]

    def test_the_slot_of_a_late_forward_may_be_taken_by_the_next_request(self) -> None:
        """The new prefill runs behind the late decode, so that it overwrites and not the other way round."""
        rig = self.eos_at(3, tokens=16, context_len=64)
        rig.until_true(lambda: rig.answers["r0"].finals == 1)
        rig.submit(range(40, 49), 4, rid="next")
        rig.run()  # the worker checks every position that it reads
        assert len(rig.answers["next"].output_ids) == 4

    @staticmethod
    def eos_at(number: int, **settings: object) -> Rig:
        rule = lambda rid, index, _: 2 if rid == "r0" and index == number - 1 else 5  # noqa: E731
        rig = Rig(rule=rule, disable_overlap_schedule=False, **settings)
        rig.submit([1, 2, 3], 20)
        return rig


@profile(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 10**6), st.sampled_from([1, 16]), st.sampled_from([8, 2048]), st.booleans())
def test_both_loops_give_the_same_answers(seed: int, page: int, chunk: int, mixed: bool) -> None:
    rigs = [
        Rig(
            tokens=256,
            context_len=CONTEXT,
            vocab_size=VOCAB,
            eos_every=EOS_EVERY,
            page_size=page,
            chunked_prefill_size=max(chunk, page),
            enable_mixed_chunk=mixed,
            schedule_conservativeness=0.001,
            disable_overlap_schedule=normal,
        )
        for normal in (True, False)
    ]
    for rig in rigs:
        for step in crowd(seed, size=10):
            if isinstance(step, Submit):
                submit(rig, step, f"r{len(rig.answers)}")
            elif isinstance(step, Run):
                for _ in range(step.stops):
                    rig.stop()
        rig.run()
        rig.check_empty()
    normal, overlap = rigs
    for rid, answer in normal.answers.items():
        other = overlap.answers[rid]
        assert answer.output_ids == other.output_ids, rid
        assert answer.logprobs == other.logprobs, rid
        assert answer.finish == other.finish, rid


class Broken(MockWorker):
    """Fails in its third forward, on the device or already at the launch."""

    def __init__(self, where: str) -> None:
        super().__init__(
            mock_info(vocab_size=97, context_len=256, max_total_num_tokens=512), threaded=where == "device"
        )
        self._where, self._number = where, 0

    def launch(self, batch: ScheduleBatch, *, delay_sample: bool = False) -> WorkerLaunch:
        self._number += 1
        if self._number < 3:
            return super().launch(batch)
        if self._where == "launch":
            raise RuntimeError("out of luck")
        return WorkerLaunch(batch.bid, self._number, self._stream.submit(self._fail))

    def _fail(self) -> object:
        raise RuntimeError("out of luck")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("where", ["launch", "device"])
def test_a_worker_that_raises_ends_the_loop_with_its_error(where: str, overlap: bool) -> None:
    """The error surfaces to whoever drives the loop; the loop is over and does not hang."""
    worker = Broken(where)
    rig = Rig(worker=worker, disable_overlap_schedule=not overlap)
    rid = rig.submit([1, 2], 9)
    with pytest.raises(RuntimeError, match="out of luck"):
        rig.run(most=100)
    assert rig.answers[rid].finals == 0 and len(rig.answers[rid].output_ids) <= 2
    with pytest.raises(StopIteration):
        rig.stop()
    worker.close()


def test_run_drains_the_loop_until_shutdown() -> None:
    rig = Rig(disable_overlap_schedule=False)
    rid = rig.submit([1, 2, 3], 5)
    waits = []

    def wait(timeout_ms: int) -> bool:
        waits.append(timeout_ms)
        rig.inbox.send(ShutdownReq())
        return True

    rig.inbox.wait = wait
    rig.scheduler.run()
    rig._collect()
    assert len(rig.answers[rid].output_ids) == 5 and len(waits) == 1 and waits[0] > 0


def test_a_broken_tree_is_found_at_idle() -> None:
    """The counters alone would not show it."""
    rig = Rig()
    rig.submit(range(20), 4)
    rig.run()
    leaf = next(node for node in rig.state.cache.tree.nodes() if not node.children)
    leaf.queued = False
    rig.submit(range(50, 60), 4)
    with pytest.raises(CacheCorrupt, match="an unlocked leaf that eviction does not know"):
        rig.run()
