"""Retraction, shortage and cut prompts: whatever the scheduler has to do, no client can tell from its answer."""

from __future__ import annotations

from collections import Counter

import pytest
from workloads import (
    Answer,
    assert_books_balance,
    assert_same,
    bodies,
    make_engine,
    run,
    run_streamed,
    workload,
)

from sgviz.events.schema import BatchPlanned, ChunkCut, RequestRetracted

pytestmark = pytest.mark.slow
# one new request a batch and next to nothing reserved: too many are let in, and memory runs out while they decode
GENEROUS = {"schedule_conservativeness": 0.05, "prefill_max_requests": 1}
SHORT = {"max_total_tokens": 250, **GENEROUS}
# with ignore_eos the scheduler would know the length and reserve it whole
LONG = {"max_new_tokens": 60, "min_new_tokens": 60, "ignore_eos": False}


def long_answers(seed: int, count: int) -> tuple[list[list[int]], list[dict]]:
    """Requests whose answers are much longer than their prompts, so that memory runs out while they decode."""
    prompts, params = workload(seed, count, longest=12)
    return prompts, [{**param, **LONG} for param in params]


@pytest.fixture(scope="module")
def reference() -> list[Answer]:
    """With room for all."""
    with make_engine() as engine:
        answers = run(engine, *long_answers(3, 16))
        assert not bodies(engine, RequestRetracted)
        return answers


@pytest.mark.parametrize("loop", ["normal", "overlap"])
@pytest.mark.parametrize("page_size", [1, 8])
@pytest.mark.parametrize("stream", [False, True])
def test_a_retracted_request_answers_as_if_it_never_was(
    loop: str, page_size: int, stream: bool, reference: list[Answer]
) -> None:
    """The same ids, text, logprobs and usage, no streamed token repeated or missing. sgl-project/sglang#39645,
    sgl-project/sglang#26510, sgl-project/sglang#14972, GeeeekExplorer/nano-vllm#211, GeeeekExplorer/nano-vllm#217
    """
    with make_engine(**SHORT, page_size=page_size, event_loop=loop) as engine:
        answers = (run_streamed if stream else run)(engine, *long_answers(3, 16))
        assert_same(answers, reference)
        retracted = bodies(engine, RequestRetracted)
        assert len({body.rid for body in retracted}) > 2, "nobody was retracted"
        assert_books_balance(engine)


@pytest.mark.parametrize("loop", ["normal", "overlap"])
def test_a_pool_far_too_small_still_finishes_everything_in_bounded_steps(loop: str) -> None:
    """No cycle of retracting and admitting again, and normal speed afterwards. huggingface/transformers#43150,
    sgl-project/sglang#708, sgl-project/sglang#26248
    """
    prompts, params = long_answers(4, 12)
    with make_engine(max_total_tokens=130, **GENEROUS, event_loop=loop) as engine:
        answers = run(engine, prompts, params)
        assert [answer.usage[1] for answer in answers] == [60] * 12
        times = Counter(body.rid for body in bodies(engine, RequestRetracted))
        # alone each would take 60 forwards and a prefill; retracted work is done again, but not for ever
        assert times and len(bodies(engine, BatchPlanned)) < 12 * 61 + 61 * sum(times.values()) < 12 * 61 * 5
        before, retracted = len(bodies(engine, BatchPlanned)), sum(times.values())
        run(engine, prompts[:1], params[:1])
        assert len(bodies(engine, BatchPlanned)) - before <= 61
        assert len(bodies(engine, RequestRetracted)) == retracted
        assert_books_balance(engine)


@pytest.fixture(scope="module")
def uncut() -> list[Answer]:
    """Long prompts in one piece each."""
    with make_engine(chunked_prefill_size=-1) as engine:
        answers = run(engine, *workload(6, 12, longest=300))
        assert not bodies(engine, ChunkCut)
        return answers


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("chunk", [8, 13, 64, 200])
def test_a_prompt_cut_in_any_way_gives_the_same_and_no_batch_exceeds_its_budget(
    chunk: int, mixed: bool, uncut: list[Answer]
) -> None:
    """Equal to a run without cuts (ids, logprobs), and every prefill batch within its token budget.
    GeeeekExplorer/nano-vllm#213, GeeeekExplorer/nano-vllm#67, GeeeekExplorer/nano-vllm#207,
    sgl-project/mini-sglang#47
    """
    prompts, params = workload(6, 12, longest=300)
    assert max(map(len, prompts)) > 200
    with make_engine(chunked_prefill_size=chunk, enable_mixed_chunk=mixed, event_loop="overlap") as engine:
        for _ in range(2):  # the second time from the cache
            assert_same(run(engine, prompts, params), uncut)
        assert bodies(engine, ChunkCut)
        prefills = [body for body in bodies(engine, BatchPlanned) if body.mode != "decode"]
        assert max(sum(body.extend_lens) for body in prefills) <= chunk
        assert {body.mode for body in prefills} <= ({"extend", "mixed"} if mixed else {"extend"})
        assert_books_balance(engine)


def test_the_uncut_budget_holds_for_whole_prompts() -> None:
    """max_prefill_tokens bounds a batch of whole prompts, but for one that is longer alone.
    sgl-project/mini-sglang#47
    """
    prompts, params = workload(7, 20, longest=100)
    with make_engine(chunked_prefill_size=-1, max_prefill_tokens=64) as engine:
        run(engine, prompts, params)
        for body in bodies(engine, BatchPlanned):
            if body.mode == "extend" and len(body.rids) > 1:
                assert sum(body.extend_lens[:-1]) < 64
