"""The worker's log-probabilities of prompt tokens: the asked rows only, in bounded pieces, equal to one log_softmax."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hand_driver import HandDriver, make_req
from torch import Tensor

from sgviz.batch.asked_positions import AskedPositions, asked_positions
from sgviz.worker.input_logprobs import PIECE_CELLS, input_parts
from sgviz.worker.protocol import ProcessorFailure
from sgviz.worker.sampler import LOGPROB_FLOOR, Sampled
from sgviz.worker.tp_worker import TpModelWorker

VOCAB, HIDDEN = 50, 8


class Head:
    """A linear layer that keeps how many rows it was given at a time."""

    def __init__(self, vocab: int = VOCAB) -> None:
        self.weight = torch.randn(vocab, HIDDEN, generator=torch.Generator().manual_seed(1))
        self.rows: list[int] = []

    def __call__(self, hidden: Tensor) -> Tensor:
        self.rows.append(len(hidden))
        return hidden @ self.weight.T


def states(rows: int) -> Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(2))


def wish(
    row: int, next_ids: list[int], tops: int = 0, token_ids: tuple[int, ...] = (), member: int = 0
) -> AskedPositions:
    return AskedPositions(
        member=member, position=0, row=row, next_ids=next_ids, tops=tops, token_ids=token_ids
    )


@pytest.mark.parametrize("pieces", [1, 3, 6, 12])
def test_pieces_give_what_the_whole_gives(pieces: int) -> None:
    head, hidden = Head(), states(20)
    next_ids = [(7 * i) % VOCAB for i in range(12)]
    vocab = PIECE_CELLS // -(-12 // pieces)  # so many rows are one piece
    (part,) = input_parts([wish(5, next_ids, 3, (4, 4, 9))], hidden, head, vocab)
    assert len(head.rows) == pieces and sum(head.rows) == 12
    expected = (hidden[5:17] @ head.weight.T).log_softmax(-1)
    torch.testing.assert_close(part.logprobs, expected[torch.arange(12), torch.tensor(next_ids)])
    best = expected.topk(3)
    torch.testing.assert_close(part.tops, best.values)
    assert part.top_ids.tolist() == best.indices.tolist()
    torch.testing.assert_close(part.token_ids, expected[:, [4, 4, 9]])


def test_a_piece_is_bounded_and_only_asked_rows_are_computed() -> None:
    """2,000 positions and 49,152 ids would be 400 MB of logits at once."""
    head, hidden = Head(vocab=49_152), states(500)
    input_parts([wish(100, [1] * 350)], hidden, head, 49_152)
    assert sum(head.rows) == 350
    assert max(head.rows) * 49_152 <= PIECE_CELLS


def test_members_are_kept_apart() -> None:
    head, hidden = Head(), states(9)
    first, second = input_parts(
        [wish(0, [1, 2], tops=1), wish(6, [3], token_ids=(8,), member=4)], hidden, head, VOCAB
    )
    assert (first.member, second.member) == (0, 4)
    assert first.tops.shape == (2, 1) and first.token_ids.shape == (2, 0)
    assert second.tops.shape == (1, 0) and second.token_ids.shape == (1, 1)


def test_all_of_the_vocabulary_may_be_asked_for() -> None:
    head, hidden = Head(), states(2)
    (part,) = input_parts([wish(0, [1, 2], tops=VOCAB + 5)], hidden, head, VOCAB)
    assert sorted(part.top_ids[0].tolist()) == list(range(VOCAB))


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_broken_logits_give_finite_numbers(broken: float) -> None:
    def head(hidden: Tensor) -> Tensor:
        logits = torch.zeros(len(hidden), VOCAB)
        logits[0, 3] = broken
        return logits

    (part,) = input_parts([wish(0, [3, 3], tops=2, token_ids=(3,))], states(2), head, VOCAB)
    for numbers in (part.logprobs, part.tops, part.token_ids):
        assert bool(numbers.isfinite().all()) and float(numbers.min()) >= LOGPROB_FLOOR


@pytest.fixture(scope="module")
def worker() -> Iterator[TpModelWorker]:
    made = TpModelWorker("tiny-llama", max_total_tokens=1024, torch_threads=1)
    yield made
    made.close()


@pytest.mark.parametrize("most", [None, 1, 5, 13])
@pytest.mark.parametrize("start", [0, 4, 12, 38])
def test_chunks_give_what_one_prefill_gives(worker: TpModelWorker, most: int | None, start: int) -> None:
    driver = HandDriver(worker)
    ids = [(17 * i) % 250 + 3 for i in range(40)]
    req = make_req("r", ids, logprobs=2)
    req.logprob_start_len, req.token_ids_logprob = start, (9, 5)
    while req.input_logprobs.logprobs == [] or req.misses_input_logprobs:
        batch = driver.extend([req], most)
        asked = asked_positions(batch)
        result = driver.step(batch)
        if asked:
            assert result.input_logprobs is not None and result.input_logprobs[0] is not None
            req.input_logprobs.extend(result.input_logprobs[0])
    expected = _of_transformers(ids)
    found = req.input_logprobs
    assert found.logprobs == pytest.approx(
        [float(expected[p, ids[p + 1]]) for p in range(start, 39)], abs=1e-4
    )
    assert [[token for _, token in row] for row in found.token_ids] == [[9, 5]] * (39 - start)
    for place, row in enumerate(found.tops, start):
        assert [value for value, _ in row] == pytest.approx(expected[place].topk(2).values.tolist(), abs=1e-4)


def _of_transformers(ids: list[int]) -> Tensor:
    from transformers import AutoModelForCausalLM

    from sgviz.model.fetch import resolve_model

    model = AutoModelForCausalLM.from_pretrained(resolve_model("tiny-llama"), dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


def test_those_who_did_not_ask_get_none(worker: TpModelWorker) -> None:
    driver = HandDriver(worker)
    asking, silent = make_req("a", range(3, 20), logprobs=0), make_req("s", range(30, 40), logprobs=1)
    asking.logprob_start_len = 3
    result = driver.step(driver.extend([silent, asking]))
    assert result.input_logprobs is not None and result.input_logprobs[0] is None
    assert len(result.input_logprobs[1].logprobs) == 13
    assert driver.step(driver.decode([silent, asking])).input_logprobs is None


def test_chosen_ids_are_told_at_each_step(worker: TpModelWorker) -> None:
    driver = HandDriver(worker)
    both = make_req("b", range(3, 20), logprobs=312)
    both.token_ids_logprob = (5, 200)
    plain = make_req("p", range(3, 12), logprobs=0)
    result = driver.step(driver.extend([both, plain]))
    for _ in range(3):
        assert result.token_ids_logprobs is not None and result.top_logprobs is not None
        by_id = {token: value for value, token in result.top_logprobs[0]}
        assert result.token_ids_logprobs == [[(by_id[5], 5), (by_id[200], 200)], []]
        result = driver.step(driver.decode([both, plain]))


def test_a_copy_to_the_host_takes_everything_along() -> None:
    """What the GPU's copy stream does with each tensor of a result."""
    head, hidden = Head(), states(4)
    (part,) = input_parts([wish(0, [1, 2, 3], 2, (5,), member=1)], hidden, head, VOCAB)
    ones = torch.ones(2)
    sampled = Sampled(
        tokens=ones, logprobs=ones, top_logprobs=ones, top_ids=ones, token_ids_logprobs=ones, inputs=[part],
        failures={1: ProcessorFailure("why")},
    )  # fmt: skip
    seen: list[Tensor] = []

    def move(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor + 1

    moved = sampled.moved(move)
    assert len(seen) == 5 + 4
    assert moved.failures == {1: ProcessorFailure("why")} and (
        moved.inputs[0].member,
        moved.inputs[0].wanted,
    ) == (1, (5,))
    torch.testing.assert_close(moved.inputs[0].logprobs, part.logprobs + 1)
    assert moved.token_ids_logprobs is not None and moved.token_ids_logprobs.tolist() == [2.0, 2.0]
    alone = Sampled(tokens=ones).moved(move)
    assert alone.logprobs is alone.token_ids_logprobs is None and alone.inputs == []
