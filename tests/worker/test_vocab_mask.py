"""The mask of a grammar in the sampler: nothing barred is ever chosen, and rows without a grammar do not notice."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hand_driver import HandDriver, make_req
from test_sampler import EOS, VOCAB, batch_of, put_on_rows, random_req

from sgviz.batch.grammar import Failure
from sgviz.batch.req import Req
from sgviz.batch.vocab_mask import VocabMask, constrained_members, fill_vocab_mask
from sgviz.worker.sampler import Sampled, Sampler
from sgviz.worker.sampling_batch import SamplingBatch
from sgviz.worker.tp_worker import TpModelWorker


class Fixed:
    """A grammar that allows the same ids at every step."""

    ended = False
    accepted = 0

    def __init__(self, *ids: int) -> None:
        self.ids = ids

    def fill(self, row: np.ndarray) -> None:
        for token in self.ids:
            row.view(np.uint8)[token >> 3] |= 1 << (token & 7)

    def accept(self, token: int) -> Failure | None:
        return None


def sample(logits: np.ndarray, reqs: Sequence[Req], *, masked: bool = True) -> Sampled:
    put_on_rows(reqs)
    batch = batch_of(reqs)
    sampling = SamplingBatch.from_batch(batch, eos_token_ids=EOS, random_seed=11)
    if masked and (members := constrained_members(batch)):
        mask = fill_vocab_mask(members, VOCAB, EOS)
        sampling = SamplingBatch(
            columns=sampling.columns, output_index=sampling.output_index, final=sampling.final,
            fresh=sampling.fresh, vocab_mask=mask,
        )  # fmt: skip
    with torch.inference_mode():
        return Sampler(VOCAB).sample(torch.from_numpy(logits.copy()), sampling)


def logits_of(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.normal(0, 4, (count, VOCAB)).astype(np.float32)


def test_only_what_is_allowed_is_chosen_and_the_others_choose_as_before() -> None:
    """Random settings of all kinds, some rows under a grammar."""
    for seed in range(60):
        rng = np.random.default_rng(seed)
        reqs = [random_req(rng, number) for number in range(6)]
        for req in reqs[::2]:
            req.grammar = Fixed(*rng.choice(VOCAB, int(rng.integers(1, 9)), replace=False).tolist())
        logits = logits_of(rng, 6)
        with_mask, without = sample(logits, reqs), sample(logits, reqs, masked=False)
        for place, req in enumerate(reqs):
            token = int(with_mask.tokens[place])
            if req.grammar is None:
                assert token == int(without.tokens[place]), (seed, place)
            else:
                assert token in req.grammar.ids, (seed, place)  # type: ignore[attr-defined]


def test_a_greedy_row_takes_the_best_of_what_is_allowed() -> None:
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    logits[0, [7, 20, 40]] = (9, 5, 3)
    req = make_req("a", [1, 2], temperature=0.0)
    req.grammar = Fixed(20, 40)
    assert int(sample(logits, [req]).tokens[0]) == 20


def test_logprobs_are_of_what_is_allowed() -> None:
    req = make_req("a", [1, 2], temperature=0.0, logprobs=2)
    req.grammar = Fixed(20, 40)
    sampled = sample(np.zeros((1, VOCAB), dtype=np.float32), [req])
    assert sampled.logprobs is not None and float(sampled.logprobs[0]) == pytest.approx(np.log(0.5))
    assert sampled.top_ids is not None and sampled.top_ids[0].tolist() == [20, 40]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_a_broken_row_still_gives_what_is_allowed(temperature: float, bad: float) -> None:
    req = make_req("a", [1, 2], temperature=temperature)
    req.grammar = Fixed(20, 40)
    logits = logits_of(np.random.default_rng(0), 1)
    logits[0] = bad
    assert int(sample(logits, [req]).tokens[0]) in (20, 40)


def test_min_new_tokens_bars_the_end_but_not_the_last_way_out() -> None:
    logits = np.zeros((2, VOCAB), dtype=np.float32)
    logits[:, EOS[0]] = 9
    both, only = (make_req(rid, [1, 2], temperature=0.0, min_new_tokens=5) for rid in "ab")
    both.grammar, only.grammar = Fixed(EOS[0], 20), Fixed(EOS[0])
    assert sample(logits, [both, only]).tokens.tolist() == [20, EOS[0]]


def test_who_has_ended_meanwhile_is_left_out() -> None:
    from sgviz.messages import FinishReason

    reqs = [make_req(rid, [1, 2]) for rid in "abc"]
    reqs[0].grammar, reqs[2].grammar = Fixed(1), Fixed(2)
    put_on_rows(reqs)
    batch = batch_of(reqs)
    members = constrained_members(batch)
    assert [place for place, _ in members] == [0, 2]
    reqs[0].finished_reason = FinishReason(type="stop")
    mask = fill_vocab_mask(members, VOCAB, EOS)
    assert mask is not None and mask.members.tolist() == [2]
    reqs[2].finished_reason = FinishReason(type="stop")
    assert fill_vocab_mask(members, VOCAB, EOS) is None
    batch.chunked_req = reqs[2]
    assert [place for place, _ in constrained_members(batch)] == [0]


def test_devices_without_logits_take_the_next_id_that_may_come() -> None:
    words = np.zeros((2, 2), dtype=np.int32)
    for row, ids in zip(words, ((5, 40), (63,))):
        Fixed(*ids).fill(row)
    mask = VocabMask(np.array([0, 2]), words)
    assert mask.corrected([4, 9, 0], VOCAB) == [5, 9, 63]
    assert mask.corrected([41, 9, 63], VOCAB) == [5, 9, 63]


@pytest.mark.parametrize("delay", [False, True])
def test_the_real_worker_keeps_to_the_mask_in_every_kind_of_batch(delay: bool) -> None:
    """Prefill, decode and a member without a grammar, whose tokens are those it has alone."""
    worker = TpModelWorker("tiny-llama", dtype="float32", device="cpu", max_total_tokens=512, torch_threads=1)
    alone, found = [], []
    for constrained in (False, True):
        driver = HandDriver(worker)
        free = make_req("free", range(4, 20), temperature=0.0)
        bound = make_req("bound", range(9, 15), sampling_seed=3)
        bound.grammar = Fixed(30, 31, 32) if constrained else None
        for step in range(6):
            batch = driver.decode([free, bound]) if step else driver.extend([free, bound])
            launch = worker.launch(batch, delay_sample=delay)
            launch.sample()
            driver.process(batch, launch.result())
        alone.append(free.output_ids)
        found.append(bound.output_ids)
    worker.close()
    assert alone[0] == alone[1]
    assert set(found[1]) <= {30, 31, 32} and not set(found[0]) <= {30, 31, 32}
