"""When a scheduler tells its load unasked, and what it says."""

from __future__ import annotations

from rig import Rig

from sgviz.messages.parallel import LoadSnapshot

PROMPT = list(range(1, 11))


def published(interval: int, **settings: object) -> tuple[Rig, list[LoadSnapshot]]:
    told: list[LoadSnapshot] = []
    rig = Rig(put_load=told.append, load_snapshot_publish_interval=interval, **settings)
    return rig, told


def test_after_each_prefill_after_so_many_results_and_when_idle() -> None:
    rig, told = published(5, disable_overlap_schedule=True)
    rig.submit(PROMPT, 13)
    at: list[int] = []
    for _ in range(60):
        before = len(told)
        rig.stop()
        at += [rig.state.forward_ct] * (len(told) - before)
    # the prefill; 5 and 10 decode steps after it; then idle, each time that the loop comes round
    assert at[:3] == [1, 6, 11] and set(at[3:]) == {13}
    assert [each.num_running_reqs for each in told[:3]] == [1, 1, 1] and told[-1].num_running_reqs == 0
    assert all(each.dp_rank == 3 for each in told)


def test_what_waits_and_what_is_held() -> None:
    rig, told = published(1, disable_overlap_schedule=True, max_running_requests=1)
    rig.submit(PROMPT, 4)
    rig.submit(PROMPT * 2, 4)
    rig.submit([9] * 7, 4)
    rig.until_true(lambda: bool(told))
    newest = told[-1]
    assert (newest.num_running_reqs, newest.num_waiting_reqs) == (1, 2)
    assert newest.num_waiting_uncached_tokens == 27
    assert newest.num_used_tokens >= 10 and newest.num_total_tokens == newest.num_used_tokens + 27
    assert newest.max_running_requests == 1
    rig.run()
    last = told[-1]
    assert (last.num_running_reqs, last.num_waiting_reqs, last.num_used_tokens) == (0, 0, 0)
    stamps = [each.timestamp for each in told]
    assert stamps == sorted(stamps)


def test_the_rest_of_a_prompt_in_pieces_and_what_was_taken_count() -> None:
    rig, told = published(1, disable_overlap_schedule=True, chunked_prefill_size=4, page_size=1)
    rig.submit(PROMPT, 4)
    rig.until_true(lambda: bool(told))
    assert (told[0].num_used_tokens, told[0].num_waiting_uncached_tokens) == (4, 6)
    assert told[0].num_taken_reqs == 1
    rig.submit(PROMPT, 4)
    rig.run()
    assert (told[-1].num_taken_reqs, told[-1].num_waiting_uncached_tokens) == (2, 0)


def test_a_lone_scheduler_tells_nobody() -> None:
    rig = Rig()
    rig.submit(PROMPT, 3)
    rig.run()
    assert rig.scheduler._loads is None
