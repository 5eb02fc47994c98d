"""The overlap loop's two exceptions: sampling that waits for the result before it, and prefills in turn.

The rule of these tests stands for a grammar: it looks the last token up on the host, so it cannot choose the next
one before the last result has been processed. It raises where it is asked too early.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "scheduler"))
sys.path.insert(0, str(Path(__file__).parent / "worker"))

from hand_driver import HandDriver, make_req
from rig import Rig
from workload import CONTEXT, EOS_EVERY, VOCAB, Abort, Run, Step, Submit, crowd, submit

from sgviz.batch.req import Req
from sgviz.config import ScheduleConfig
from sgviz.errors import SgvizError
from sgviz.events import schema
from sgviz.scheduler.overlap_rules import OverlapRules
from sgviz.worker.mock_worker import MockWorker, mock_info
from sgviz.worker.stream import WorkerLaunch

STEP = 5


class Grammar(OverlapRules):
    """Those whose rid begins with "g" are under a grammar."""

    def needs_last_token(self, req: Req) -> bool:
        return req.rid.startswith("g")


class Counting(MockWorker):
    """Notes whose sampling was delayed."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.delayed: list[tuple[str, ...]] = []

    def launch(self, batch: object, *, delay_sample: bool = False) -> object:
        if delay_sample:
            self.delayed.append(tuple(req.rid for req in batch.reqs))
        return super().launch(batch, delay_sample=delay_sample)


def make_rig(*, threaded: bool = False, page_size: int = 1, tokens: int = 512, **settings: object) -> Rig:
    """A rig in which the tokens of "g..." follow from the token before, as the host knows it."""
    known: list[Rig] = []

    def rule(rid: str, index: int, bits: int) -> int | None:
        req = known[0].state.live.get(rid)
        if req is None or not rid.startswith("g"):
            return None  # ended by the result before: nobody will look at this token
        if len(req.output_ids) < index:
            raise AssertionError(
                f"{rid} was sampled for place {index} with {len(req.output_ids)} tokens known"
            )
        last = req.output_ids[-1] if req.output_ids else req.origin_input_ids[-1]
        return (last * 3 + STEP) % VOCAB

    info = mock_info(vocab_size=VOCAB, context_len=CONTEXT, max_total_num_tokens=tokens)
    worker = Counting(
        info, eos_every=EOS_EVERY, threaded=threaded, check=True, rule=rule, page_size=page_size
    )
    rig = Rig(worker=worker, page_size=page_size, **settings)
    rig.scheduler._rules = Grammar(ScheduleConfig())
    known.append(rig)
    return rig


def play(rig: Rig, todo: Sequence[Step], grammar_every: int) -> dict[str, str]:
    """Do it all; which rid each request got."""
    names: dict[str, str] = {}
    for step in todo:
        if isinstance(step, Submit):
            number = len(names)
            rid = f"{'g' if number % grammar_every == 0 else 'r'}{number}"
            names[f"{number}"] = rid
            submit(rig, step, rid)
        elif isinstance(step, Abort) and step.which < len(names):
            rig.abort(names[str(len(names) - 1 - step.which)])
        elif isinstance(step, Run):
            for _ in range(step.stops):
                rig.stop()
    rig.run()
    return names


def answers(rig: Rig) -> dict[str, tuple[list[int], str | None, object]]:
    return {
        rid: (answer.output_ids, answer.reason, answer.finish and answer.finish.matched)
        for rid, answer in rig.answers.items()
    }


@pytest.mark.parametrize("threaded", [False, True])
def test_a_grammar_sees_the_last_token_in_the_overlap_loop(threaded: bool) -> None:
    rigs = [make_rig(threaded=threaded, disable_overlap_schedule=normal) for normal in (True, False)]
    for rig in rigs:
        for rid in ("g0", "r1", "g2"):
            rig.submit(range(1, 9), 12, rid=rid)
        rig.run()
        rig.check_empty()
    assert answers(rigs[0]) == answers(rigs[1])
    ids = rigs[1].answers["g0"].output_ids
    assert [(last * 3 + STEP) % VOCAB for last in ids] == [*ids[1:], (ids[-1] * 3 + STEP) % VOCAB]
    assert rigs[0].worker.delayed == []
    assert rigs[1].worker.delayed  # else the rule would have raised
    for rig in rigs:
        rig.worker.close()


def test_who_is_under_no_grammar_is_not_delayed() -> None:
    rig = make_rig(disable_overlap_schedule=False)
    rig.submit(range(1, 9), 12, rid="r0")
    rig.run()
    assert rig.worker.delayed == []


def test_without_the_delay_the_grammar_would_be_asked_too_early() -> None:
    rig = make_rig(disable_overlap_schedule=False)
    rig.scheduler._rules = OverlapRules(ScheduleConfig())
    rig.submit(range(1, 9), 12, rid="g0")
    with pytest.raises(AssertionError, match="was sampled for place 1 with 0 tokens known"):
        rig.run()


def under_pressure(seed: int) -> tuple[list[Rig], dict[str, object]]:
    """The normal and the overlap loop after the same crowd in the same small pool."""
    rng = random.Random(seed)
    todo = [step for step in crowd(seed, size=20) if not isinstance(step, Abort)]
    chosen = {
        "tokens": 192,
        "page_size": rng.choice((1, 4)),
        "chunked_prefill_size": rng.choice((8, 16, 33)),
        "enable_mixed_chunk": rng.random() < 0.5,
        "schedule_conservativeness": 0.001,
    }
    rigs = [make_rig(disable_overlap_schedule=normal, **chosen) for normal in (True, False)]
    for rig in rigs:
        play(rig, todo, 2)
        rig.check_empty()
    return rigs, chosen


def test_both_loops_agree_under_pressure_with_a_grammar() -> None:
    """Stops inside the late step, retractions, chunks and mixed batches at once."""
    retracted = chunked = stopped = 0
    for seed in range(12):
        (normal, overlap), chosen = under_pressure(seed)
        assert answers(normal) == answers(overlap), f"seed {seed}, {chosen}"
        retracted += len(overlap.bodies(schema.RequestRetracted))
        chunked += len(overlap.bodies(schema.ChunkCut))
        stopped += sum(answer.reason == "stop" for answer in overlap.answers.values())
    assert retracted > 5 and chunked > 20 and stopped > 20


@pytest.mark.parametrize("seed", range(6))
def test_aborts_leave_nothing_behind(seed: int) -> None:
    """Where an abort falls depends on the loop, so only what was given before it can be compared."""
    rigs = [make_rig(tokens=192, disable_overlap_schedule=n, chunked_prefill_size=16) for n in (True, False)]
    for rig in rigs:
        play(rig, crowd(seed, size=14), 2)
        rig.check_empty()
    for rid, answer in rigs[0].answers.items():
        other = rigs[1].answers[rid].output_ids
        shared = min(len(answer.output_ids), len(other))
        assert answer.output_ids[:shared] == other[:shared]


def test_a_launch_that_nobody_samples_says_so() -> None:
    rig = make_rig()
    rig.submit(range(1, 5), 2, rid="r0")
    batch = rig.plan()
    assert batch is not None
    launch = rig.worker.launch(batch, delay_sample=True)
    assert not launch.done()
    with pytest.raises(SgvizError, match=r"call sample\(\) before result\(\)"):
        launch.result()
    launch.sample()
    launch.sample()
    assert launch.done()
    assert launch.result().next_token_ids == launch.result().next_token_ids
    assert not isinstance(launch, WorkerLaunch)


def test_the_real_worker_samples_the_same_late() -> None:
    from sgviz.worker.tp_worker import TpModelWorker

    found = []
    for delay in (False, True):
        worker = TpModelWorker(
            "tiny-llama", dtype="float32", device="cpu", max_total_tokens=512, torch_threads=1
        )
        driver = HandDriver(worker)
        reqs = [make_req("a", range(4, 20), temperature=0.0), make_req("b", range(9, 15), sampling_seed=3)]
        for step in range(6):
            batch = driver.decode(reqs) if step else driver.extend(reqs)
            launch = worker.launch(batch, delay_sample=delay)
            held = time.monotonic_ns()
            launch.sample()
            result = launch.result()
            assert result.start_ns < result.forward_end_ns < result.end_ns <= result.copy_end_ns
            apart = result.sample_start_ns - result.forward_end_ns
            assert (apart >= 0 and result.sample_start_ns >= held) if delay else apart == 0
            driver.process(batch, result)
        found.append([req.output_ids for req in reqs])
        worker.close()
    assert found[0] == found[1]


# ---------------------------------------------------------------- prefills in turn


def order_of(rig: Rig) -> list[tuple[str, int]]:
    """What happened to batches, in order: launched and processed, by bid."""
    kinds = {schema.BatchLaunched: "launched", schema.BatchProcessed: "processed"}
    return [
        (kinds[type(event.body)], event.body.bid)
        for event in rig.ring.snapshot()
        if type(event.body) in kinds
    ]


@pytest.mark.parametrize("off", [False, True])
def test_a_prefill_after_a_prefill_waits_for_its_result_if_asked_to(off: bool) -> None:
    rig = Rig(
        disable_overlap_schedule=False,
        disable_consecutive_prefill_overlap=off,
        prefill_max_requests=1,
        tokens=512,
    )
    for rid in ("a", "b", "c"):
        rig.submit(range(1, 20), 4, rid=rid)
    rig.run()
    rig.check_empty()
    order = order_of(rig)
    assert (order.index(("processed", 1)) < order.index(("launched", 2))) is off
    assert (order.index(("processed", 2)) < order.index(("launched", 3))) is off
    # the decode that follows overlaps in any case
    assert order.index(("processed", 3)) > order.index(("launched", 4))


@pytest.mark.parametrize("mixed", [False, True])
def test_prefills_in_turn_change_no_answer(mixed: bool) -> None:
    found = []
    for off in (False, True):
        rig = Rig(
            tokens=192,
            context_len=CONTEXT,
            eos_every=EOS_EVERY,
            chunked_prefill_size=16,
            enable_mixed_chunk=mixed,
            disable_overlap_schedule=False,
            disable_consecutive_prefill_overlap=off,
            schedule_conservativeness=0.001,
        )
        play(rig, [step for step in crowd(3, size=14) if not isinstance(step, Abort)], 1)
        rig.check_empty()
        found.append(answers(rig))
    assert found[0] == found[1]
