"""MockWorker: the same history gives the same token, and a wrong slot never goes unnoticed."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest
from hand_driver import HandDriver, make_req
from hypothesis import given, settings
from hypothesis import strategies as st

from sgviz.batch.schedule_batch import ScheduleBatch
from sgviz.errors import Unavailable
from sgviz.worker.mock_worker import KvMismatch, MockWorker, mock_info

PROMPTS = ([5, 6, 7], [8] * 11, list(range(20, 45)))


def inline(page_size: int = 1, **options: object) -> HandDriver:
    worker = MockWorker(threaded=False, check=True, page_size=page_size, **options)
    return HandDriver(worker, page_size=page_size)


def alone(prompt: list[int], tokens: int, **options: object) -> list[int]:
    return inline(**options).generate([make_req("a", prompt)], tokens)[0]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [None, 1, 4])
def test_company_chunks_and_pages_do_not_change_tokens(page_size: int, chunk: int | None) -> None:
    reqs = [make_req(f"r{i}", prompt) for i, prompt in enumerate(PROMPTS)]
    together = inline(page_size).generate(reqs, 12, chunk)
    assert together == [alone(prompt, 12) for prompt in PROMPTS]


@settings(max_examples=30, deadline=None)
@given(
    a=st.lists(st.integers(0, 999), min_size=1, max_size=12),
    b=st.lists(st.integers(0, 999), min_size=1, max_size=12),
)
def test_next_token_depends_on_the_whole_history(a: list[int], b: list[int]) -> None:
    assert (alone(a, 3) == alone(b, 3)) == (a == b)


def test_mixed_retracted_and_cached_runs_give_the_tokens_of_a_plain_run() -> None:
    driver = inline()
    first, second = make_req("a", PROMPTS[1]), make_req("b", PROMPTS[2])
    driver.generate([first], 3)
    driver.step(driver.mixed([second], [first]))
    driver.retract(first)
    driver.step(driver.decode([second]))
    driver.step(driver.extend([first]))
    for _ in range(3):
        driver.step(driver.decode([second, first]))
    assert first.output_ids == alone(PROMPTS[1], 8)
    assert second.output_ids == alone(PROMPTS[2], 5)
    driver.finish(first)
    again = make_req("c", PROMPTS[1])
    driver.step(driver.extend([again]))
    assert again.prefix_len == len(PROMPTS[1]) - 1  # all but the last prompt token came from the tree
    assert again.output_ids == first.output_ids[:1]


def swap_slots(driver: HandDriver, batch: ScheduleBatch) -> None:
    row = batch.req_to_token_pool.table[batch.rows[0]]
    row[1], row[2] = row[2], row[1]


def steal_slot(driver: HandDriver, batch: ScheduleBatch) -> None:
    batch.out_cache_loc[0] = batch.req_to_token_pool.table[batch.rows[1], 0]


def wrong_length(driver: HandDriver, batch: ScheduleBatch) -> None:
    batch.seq_lens[0] -= 1
    batch.prefix_lens[0] -= 1


def foreign_row(driver: HandDriver, batch: ScheduleBatch) -> None:
    batch.req_to_token_pool.table[batch.rows[0], 0] = batch.req_to_token_pool.table[batch.rows[1], 0]


def overwrite_kv(driver: HandDriver, batch: ScheduleBatch) -> None:
    driver.worker._kv[batch.req_to_token_pool.table[batch.rows[0], 1]] = 999  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("corrupt", "position"),
    [
        (swap_slots, "position 1"),
        (steal_slot, "position"),
        (wrong_length, "position|length"),
        (foreign_row, "position 0"),
        (overwrite_kv, "position 1"),
    ],
)
def test_corruption_raises_with_the_position_and_changes_unchecked_output(
    corrupt: Callable[[HandDriver, ScheduleBatch], None], position: str
) -> None:
    outputs = []
    for check in (True, False):
        driver = HandDriver(MockWorker(threaded=False, check=check))
        reqs = [make_req(f"r{i}", prompt) for i, prompt in enumerate(PROMPTS)]
        driver.generate(reqs, 3)
        batch = driver.decode(reqs)
        corrupt(driver, batch)
        if check:
            with pytest.raises(KvMismatch, match=position):
                driver.step(batch)
        else:
            outputs = driver.step(batch).next_token_ids
    wanted = [alone(prompt, 4)[3] for prompt in PROMPTS]
    assert outputs != wanted


def test_a_decode_of_a_row_that_sampled_nothing_is_an_error() -> None:
    driver = inline()
    req = make_req("lost", PROMPTS[0])
    driver.step(driver.extend([req]))
    driver.worker.forget(batch_rows := [req.kv.req_pool_idx])
    assert batch_rows == [1]
    with pytest.raises(KvMismatch, match="lost decodes"):
        driver.step(driver.decode([req]))


def test_lists_that_disagree_are_refused_at_launch() -> None:
    driver = inline()
    reqs = [make_req("a", PROMPTS[0]), make_req("b", PROMPTS[1])]
    batch = driver.extend(reqs)
    batch.extend_lens[1] += 1
    with pytest.raises(ValueError, match=r"batch 1 .*15 new positions"):
        driver.worker.launch(batch)


def test_slots_outside_of_the_pool_are_refused() -> None:
    driver = HandDriver(MockWorker(mock_info(max_total_num_tokens=64), threaded=False), page_size=16)
    with pytest.raises(KvMismatch, match="slots 1 to 64"):
        for n in range(3):
            driver.step(driver.extend([make_req(f"r{n}", [n] * 20)]))


def test_launch_takes_a_snapshot() -> None:
    """Whatever the scheduler does after launch does not reach the forward under way."""
    driver = HandDriver(worker := MockWorker(manual=True, check=True))
    req = make_req("a", PROMPTS[1])
    batch = driver.extend([req])
    launch = worker.launch(batch)
    batch.req_to_token_pool.table[:] = 0
    batch.out_cache_loc[:] = 0
    batch.input_ids.clear()
    batch.reqs.clear()
    req.output_ids.append(1)
    req.kv.req_pool_idx = 7
    assert not launch.done()
    assert worker.complete() == 1
    assert launch.result().next_token_ids == alone(PROMPTS[1], 1)


def test_manual_mode_overlaps_launches_and_keeps_their_order() -> None:
    """Two decodes may be under way although the scheduler knows neither of the tokens."""
    driver = HandDriver(worker := MockWorker(manual=True, check=True))
    req = make_req("a", PROMPTS[0])
    batches = [driver.extend([req])]
    launches = [worker.launch(batches[0])]
    batches.append(driver.decode([req]))
    launches.append(worker.launch(batches[1]))
    assert worker.pending == 2
    assert worker.complete() == 1
    assert [launch.done() for launch in launches] == [True, False]
    driver.process(batches[0], launches[0].result())
    batches.append(driver.decode([req]))
    launches.append(worker.launch(batches[2]))
    worker.close()  # finishes what is under way
    results = [launch.result() for launch in launches]
    assert [result.forward_pass_id for result in results] == [1, 2, 3]
    assert [result.bid for result in results] == [1, 2, 3]
    assert [result.next_token_ids[0] for result in results] == alone(PROMPTS[0], 3)


def test_an_error_in_a_forward_is_raised_by_its_launch_and_the_next_one_runs() -> None:
    driver = HandDriver(worker := MockWorker(check=True))
    good, bad = make_req("good", PROMPTS[0]), make_req("bad", PROMPTS[1])
    broken = driver.extend([bad])
    broken.out_cache_loc[2] = broken.out_cache_loc[3]
    launches = [worker.launch(broken), worker.launch(driver.extend([good]))]
    with pytest.raises(KvMismatch, match="written twice"):
        launches[0].result()
    assert launches[1].result().next_token_ids == alone(PROMPTS[0], 1)
    worker.close()
    with pytest.raises(Unavailable):
        worker.launch(driver.decode([good]))


def test_durations_are_asked_at_launch_and_slept_on_the_stream() -> None:
    asked: list[tuple[int, int]] = []

    def seconds(batch: ScheduleBatch) -> float:
        asked.append((len(batch), threading.get_ident()))
        return 0.03

    driver = HandDriver(worker := MockWorker(duration=seconds))
    reqs = [make_req("a", PROMPTS[0]), make_req("b", PROMPTS[1])]
    launch = worker.launch(driver.extend(reqs))
    assert asked == [(2, threading.get_ident())]
    result = launch.result()
    assert result.end_ns - result.start_ns >= 0.03e9
    worker.close()


def test_answers_end_by_themselves_at_the_given_rate() -> None:
    info = mock_info(vocab_size=50, eos_token_ids=(7, 9))
    driver = HandDriver(MockWorker(info, threaded=False, eos_every=10, check=True), rows=64)
    reqs = [make_req(f"r{i}", [i]) for i in range(50)]
    never = make_req("late", [0], min_new_tokens=30)  # has the same history as r0 until r0 would end
    tokens = driver.generate([*reqs, never], 30)
    flat = np.array(tokens[:-1])
    share = (flat == 7).mean()
    assert 0.07 < share < 0.13  # 1500 draws at 0.1: four standard deviations
    assert not (flat == 9).any()
    assert 7 not in tokens[-1]
    assert not (
        np.array(HandDriver(MockWorker(info, threaded=False)).generate([make_req("a", [1])], 40)) == 7
    ).any()
    assert set(range(50)) - {9} <= set(flat.ravel().tolist())  # every other token occurs


def test_eos_rate_without_eos_id_is_refused() -> None:
    with pytest.raises(ValueError, match="eos_every = 5"):
        MockWorker(mock_info(eos_token_ids=()), eos_every=5, threaded=False)


def test_a_rule_decides_by_request_and_place() -> None:
    script = {"a": [11, 12, 13]}

    def rule(rid: str, index: int, bits: int) -> int | None:
        return script[rid][index] if rid in script else None

    reqs = [make_req("a", PROMPTS[0]), make_req("b", PROMPTS[1])]
    outputs = inline(rule=rule).generate(reqs, 3)
    assert outputs == [[11, 12, 13], alone(PROMPTS[1], 3)]


def test_logprobs_come_for_all_and_alternatives_for_those_who_ask() -> None:
    driver = inline()
    reqs = [make_req("a", PROMPTS[0], logprobs=3), make_req("b", PROMPTS[1])]
    result = driver.step(driver.extend(reqs))
    assert result.logprobs is not None
    assert result.top_logprobs is not None
    assert all(value <= 0 for value in result.logprobs)
    assert [len(entry) for entry in result.top_logprobs] == [3, 0]
    assert result.top_logprobs[0][0] == (result.logprobs[0], result.next_token_ids[0])
    assert driver.step(driver.decode([reqs[1]])).logprobs is None


def test_the_mock_loads_no_torch() -> None:
    code = "import sys, sgviz.worker.mock_worker, sgviz.worker.factory; print('torch' in sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout.strip() == "False"
