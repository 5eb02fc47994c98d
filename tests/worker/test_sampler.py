"""Sampler: against a slow reference, independent of company, right in distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hand_driver import make_req
from slow_sampler import choose, edited

from sgviz.batch.forward_mode import ForwardMode
from sgviz.batch.req import Req
from sgviz.batch.schedule_batch import ScheduleBatch
from sgviz.cache.req_to_token_pool import ReqToTokenPool
from sgviz.worker.host_result import Pass, to_result
from sgviz.worker.protocol import GenerationBatchResult
from sgviz.worker.random_bits import seed_of, uniforms
from sgviz.worker.sampler import LOGPROB_FLOOR, Sampler, candidates, draw, draw_filtered
from sgviz.worker.sampling_batch import SamplingBatch

VOCAB = 64
EOS = (3,)
Logits = npt.NDArray[np.float32]
POOL = ReqToTokenPool(128, 16)


def put_on_rows(reqs: Sequence[Req], first: int = 1) -> None:
    for row, req in enumerate(reqs, start=first):
        req.kv.req_pool_idx = row


def batch_of(reqs: Sequence[Req], mode: ForwardMode = ForwardMode.EXTEND) -> ScheduleBatch:
    """All outputs known and in KV but the last: what is sampled next is output number len(output_ids)."""
    lengths = [req.seqlen for req in reqs]
    return ScheduleBatch(req_to_token_pool=POOL, reqs=list(reqs), forward_mode=mode, seq_lens=lengths)


def run(
    sampler: Sampler, logits: Logits, batch: ScheduleBatch, previous: SamplingBatch | None = None
) -> GenerationBatchResult:
    sampling = SamplingBatch.from_batch(batch, eos_token_ids=EOS, random_seed=11, previous=previous)
    with torch.inference_mode():
        sampled = sampler.sample(torch.from_numpy(logits.copy()), sampling)
    of = Pass(bid=batch.bid, forward_pass_id=1, can_run_cuda_graph=False)
    return to_result(sampled, sampling, of, 0, 1)


def sample(logits: Logits, reqs: Sequence[Req]) -> GenerationBatchResult:
    put_on_rows(reqs)
    return run(Sampler(logits.shape[1]), logits, batch_of(reqs))


def random_params(rng: np.random.Generator) -> dict[str, object]:
    """Each setting is absent about half the time, so combinations and the plain paths all occur."""
    options: dict[str, object] = {
        "temperature": float(rng.choice([0.0, 0.3, 0.7, 1.5])),
        "top_k": int(rng.integers(1, VOCAB + 10)),
        "top_p": float(rng.choice([0.1, 0.5, 0.9, 0.99, 0.999999])),
        "min_p": float(rng.choice([0.02, 0.2, 1.0])),
        "frequency_penalty": float(rng.uniform(-2, 2)),
        "presence_penalty": float(rng.uniform(-2, 2)),
        "repetition_penalty": float(rng.uniform(0.5, 2)),
        "logit_bias": {str(t): float(rng.uniform(-5, 5)) for t in rng.integers(0, VOCAB, 3)},
        "min_new_tokens": int(rng.integers(0, 8)),
        "stop_token_ids": (int(rng.integers(0, VOCAB)), 5),
        "sampling_seed": int(rng.integers(-(2**40), 2**62)),
    }
    return {name: value for name, value in options.items() if rng.random() < 0.5}


def random_req(rng: np.random.Generator, number: int) -> Req:
    outputs = rng.integers(0, VOCAB, int(rng.integers(0, 12))).tolist()
    asks = int(rng.integers(0, 6)) if rng.random() < 0.4 else None
    return make_req(f"r{number}", [1, 2, 3], logprobs=asks, outputs=outputs, **random_params(rng))


def test_tokens_and_logprobs_are_those_of_the_slow_reference() -> None:
    rng = np.random.default_rng(5)
    compared = skipped = 0
    for trial in range(100):
        reqs = [random_req(rng, trial * 100 + i) for i in range(int(rng.integers(1, 12)))]
        logits = (rng.normal(size=(len(reqs), VOCAB)) * 3).astype(np.float32)
        result = sample(logits, reqs)
        for i, req in enumerate(reqs):
            params = req.sampling_params
            seed = np.array([seed_of(params.sampling_seed, req.rid, 11)], np.uint64)
            u = float(uniforms(seed, np.array([len(req.output_ids)]))[0])
            expected = choose(edited(logits[i], params, req.output_ids, EOS), params, u)
            if expected.margin < 1e-6:
                skipped += 1
                continue
            compared += 1
            assert result.next_token_ids[i] == expected.token, params
            if req.return_logprob:
                check_logprobs(result, i, req, expected.token, expected.log_probs)
    assert compared > 500
    assert skipped < 40  # nearly all: the nucleus of 0.999999 ends within rounding of its bound


def check_logprobs(
    result: GenerationBatchResult, i: int, req: Req, token: int, log_probs: npt.NDArray[np.float64]
) -> None:
    assert result.logprobs is not None
    assert result.top_logprobs is not None
    assert result.logprobs[i] == pytest.approx(log_probs[token], abs=1e-4)
    best = np.argsort(-log_probs, kind="stable")[: req.top_logprobs_num]
    assert [entry[1] for entry in result.top_logprobs[i]] == best.tolist()
    told = [entry[0] for entry in result.top_logprobs[i]]
    assert told == pytest.approx(np.maximum(log_probs[best], LOGPROB_FLOOR).tolist(), abs=1e-4)


@pytest.mark.parametrize("vocab", [64, 5000])
def test_a_row_does_not_depend_on_its_company(vocab: int) -> None:
    """The same row alone, among 32, and among 32 in another order and on other rows of the pool."""
    rng = np.random.default_rng(8)
    reqs = [random_req(rng, i) for i in range(32)]
    logits = (rng.normal(size=(32, vocab)) * 2).astype(np.float32)
    logits[4:8] = np.round(logits[4:8])  # many equal logits: ties must not depend on company either
    together = sample(logits, reqs)
    order = rng.permutation(32)
    put_on_rows([reqs[i] for i in order], first=40)
    shuffled = run(Sampler(vocab), logits[order], batch_of([reqs[i] for i in order]))
    for i, req in enumerate(reqs):
        single = sample(logits[i : i + 1], [req])
        place = order.tolist().index(i)
        assert single.next_token_ids[0] == together.next_token_ids[i] == shuffled.next_token_ids[place]
        if req.return_logprob:
            assert single.logprobs is not None
            assert together.logprobs is not None
            assert shuffled.logprobs is not None
            assert single.logprobs[0] == together.logprobs[i] == shuffled.logprobs[place]
            assert single.top_logprobs is not None
            assert together.top_logprobs is not None
            assert single.top_logprobs[0] == together.top_logprobs[i]


def test_company_with_a_broken_row_changes_nothing() -> None:
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(3, VOCAB)).astype(np.float32)
    reqs = [make_req(f"r{i}", [1], logprobs=2, temperature=t) for i, t in enumerate((0.8, 0.8, 0.0))]
    healthy = sample(logits, reqs)
    logits[1, 5] = np.nan
    broken = sample(logits, reqs)
    for i in (0, 2):
        assert broken.next_token_ids[i] == healthy.next_token_ids[i]
        assert broken.logprobs is not None
        assert healthy.logprobs is not None
        assert broken.logprobs[i] == healthy.logprobs[i]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("asks", [None, 3])
def test_nan_is_never_chosen_and_a_hopeless_row_still_gives_a_token(
    temperature: float, asks: int | None
) -> None:
    logits = np.zeros((4, VOCAB), dtype=np.float32)
    logits[0, 1:] = np.nan
    logits[1] = -np.inf
    logits[2, 9] = np.inf
    logits[3, 7] = np.nan
    reqs = [make_req(f"r{i}", [1], logprobs=asks, temperature=temperature) for i in range(4)]
    result = sample(logits, reqs)
    assert result.next_token_ids[0] == 0
    assert 0 <= result.next_token_ids[1] < VOCAB
    assert result.next_token_ids[2] == 9
    assert result.next_token_ids[3] != 7
    for value in [*(result.logprobs or []), *[v for top in result.top_logprobs or [] for v, _ in top]]:
        assert LOGPROB_FLOOR <= value <= 1e-6


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = np.zeros((3, VOCAB), dtype=np.float32)
    logits[0, [9, 17, 40]] = 2.5
    logits[2, [5, 63]] = 1.0
    for asks in (None, 2):  # by one argmax, and by the full path
        reqs = [make_req(f"r{i}", [1], temperature=0.0, logprobs=asks) for i in range(3)]
        assert sample(logits, reqs).next_token_ids == [9, 0, 5]
    mixed = [make_req("s", [1]), make_req("g", [1], temperature=0.0), make_req("t", [1])]
    assert sample(logits[[0, 0, 2]], mixed).next_token_ids[1] == 9


def test_seeds_repeat_and_differ() -> None:
    rng = np.random.default_rng(1)
    logits = np.repeat(rng.normal(size=(1, VOCAB)).astype(np.float32), 64, axis=0)

    def tokens(**params: object) -> list[int]:
        return sample(logits, [make_req(f"r{i}", [1], **params) for i in range(64)]).next_token_ids

    assert len(set(tokens(sampling_seed=7))) == 1
    unseeded = tokens()
    assert unseeded == tokens()  # the rid and the worker's seed decide
    assert len(set(unseeded)) > 10
    at_places = [make_req("a", [1], outputs=[2] * n, sampling_seed=7) for n in range(64)]
    assert len(set(sample(logits, at_places).next_token_ids)) > 10  # each place in the output draws anew


def chi_square(tokens: Sequence[int], probs: npt.NDArray[np.float64]) -> float:
    counts = Counter(tokens)
    expected = probs * len(tokens)
    return float(sum((counts[t] - e) ** 2 / e for t, e in enumerate(expected) if e > 0))


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"top_k": 4}, [0, 1, 2, 3]),
        ({"top_p": 0.6}, [0, 1, 2]),
        ({"min_p": 0.5}, [0, 1, 2]),
        ({"top_k": 5, "top_p": 0.95}, [0, 1, 2, 3, 4]),
    ],
)
def test_draws_follow_the_distribution(params: dict[str, object], kept: list[int]) -> None:
    """4000 requests without a seed: chi-square below the 99.9th percentile of its 7 degrees of freedom."""
    probs = np.array([0.3, 0.2, 0.16, 0.12, 0.1, 0.06, 0.04, 0.02])
    logits = np.repeat(np.log(probs)[None].astype(np.float32), 4000, axis=0)
    reqs = [make_req(f"request-{i}", [1], **params) for i in range(4000)]
    tokens = run_without_rows(logits, reqs)
    filtered = np.where(np.isin(np.arange(8), kept), probs, 0.0)
    assert set(tokens) == set(kept)
    assert chi_square(tokens, filtered / filtered.sum()) < 24.3


def test_draws_of_one_request_over_its_output_follow_the_distribution() -> None:
    probs = np.array([0.4, 0.3, 0.2, 0.1])
    logits = np.repeat(np.log(probs)[None].astype(np.float32), 4000, axis=0)
    reqs = [make_req("one", [1], outputs=[0] * n, sampling_seed=123) for n in range(4000)]
    tokens = run_without_rows(logits, reqs)
    assert chi_square(tokens, probs) < 16.3  # 99.9 % at 3 degrees of freedom
    pairs = [a * 4 + b for a, b in zip(tokens[::2], tokens[1::2])]
    assert chi_square(pairs, np.outer(probs, probs).ravel()) < 37.7  # neighbours are independent: 15 degrees


def run_without_rows(logits: Logits, reqs: Sequence[Req]) -> list[int]:
    return run(Sampler(logits.shape[1]), logits, batch_of(reqs)).next_token_ids


def test_penalties_count_the_token_in_flight() -> None:
    """Launched one behind the other, as in the overlap loop: the request does not yet list its last token."""
    sampler = Sampler(VOCAB)
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    logits[0, :4] = [5.0, 4.5, 4.2, 4.1]
    req = make_req("a", [1, 2], temperature=0.0, frequency_penalty=1.0)
    put_on_rows([req])
    batch = batch_of([req])
    tokens = run(sampler, logits, batch).next_token_ids
    for _ in range(3):
        batch = batch_of([req], ForwardMode.DECODE)
        batch.seq_lens = [2 + len(tokens)]
        tokens += run(sampler, logits, batch).next_token_ids
    assert req.output_ids == []
    assert tokens == [0, 1, 2, 3]  # each time the last one has lost a point


def test_penalties_begin_anew_on_a_reused_row_and_again_after_a_retraction() -> None:
    sampler = Sampler(VOCAB)
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    logits[0, :2] = [5.0, 4.5]
    first = make_req("a", [1], temperature=0.0, presence_penalty=1.0)
    put_on_rows([first])
    assert run(sampler, logits, batch_of([first])).next_token_ids == [0]
    second = make_req("b", [1], temperature=0.0, presence_penalty=1.0)
    put_on_rows([second])  # the same row, without anybody forgetting it
    assert run(sampler, logits, batch_of([second])).next_token_ids == [0]
    back = make_req("a", [1], temperature=0.0, presence_penalty=1.0, outputs=[0])
    put_on_rows([back])
    assert run(sampler, logits, batch_of([back])).next_token_ids == [1]
    assert len(sampler.penalties) == 1
    sampler.forget([1, 2])
    assert len(sampler.penalties) == 0


def test_an_unfinished_chunk_does_not_count() -> None:
    sampler = Sampler(VOCAB)
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    logits[0, 6] = 1.0
    req = make_req("a", [1, 2, 3, 4], temperature=0.0, frequency_penalty=2.0)
    put_on_rows([req])
    chunk = batch_of([req])
    chunk.seq_lens = [2]
    chunk.chunked_req = req
    assert run(sampler, logits, chunk).next_token_ids == [6]  # nobody uses this
    assert run(sampler, logits, batch_of([req])).next_token_ids == [6]


def test_penalty_rows_grow_and_are_reused() -> None:
    sampler = Sampler(VOCAB)
    rng = np.random.default_rng(4)
    for _ in range(3):
        reqs = [
            make_req(f"r{i}", [1], temperature=0.0, frequency_penalty=1.5, outputs=rng.integers(0, VOCAB, 5))
            for i in range(21)
        ]
        put_on_rows(reqs)
        logits = rng.normal(size=(21, VOCAB)).astype(np.float32)
        tokens = run(sampler, logits, batch_of(reqs)).next_token_ids
        for i, req in enumerate(reqs):
            assert tokens[i] == edited(logits[i], req.sampling_params, req.output_ids, EOS).argmax()
        sampler.forget(list(range(1, 22)))


def test_columns_are_kept_while_the_members_stay() -> None:
    reqs = [make_req(f"r{i}", [1], frequency_penalty=1.0) for i in range(3)]
    put_on_rows(reqs)
    first = SamplingBatch.from_batch(batch_of(reqs, ForwardMode.DECODE))
    same = SamplingBatch.from_batch(batch_of(list(reqs), ForwardMode.DECODE), previous=first)
    assert same.columns is first.columns
    fewer = SamplingBatch.from_batch(batch_of(reqs[:2], ForwardMode.DECODE), previous=first)
    assert fewer.columns is not first.columns
    put_on_rows(reqs, first=9)
    moved = SamplingBatch.from_batch(batch_of(reqs, ForwardMode.DECODE), previous=first)
    assert moved.columns.rows == [9, 10, 11]


def test_candidates_come_largest_first_and_equal_ones_by_id() -> None:
    values = torch.tensor([[1.0, 3.0, 3.0, 0.5], [2.0, 0.0, 2.0, 2.0]])
    found, ids = candidates(values, torch.tensor([1.0, 2.0]))
    assert found.tolist() == [[3.0, 3.0, 1.0], [2.0, 2.0, 2.0]]
    assert ids.tolist() == [[1, 2, 0], [0, 2, 3]]
    padded, padded_ids = candidates(values, torch.tensor([3.5, 0.0]))
    assert padded.tolist() == [[-torch.inf] * 4, [2.0, 2.0, 2.0, 0.0]]
    assert padded_ids[1].tolist() == [0, 2, 3, 1]


@pytest.mark.parametrize("u", [1e-16, 0.25, 0.5, 1 - 1e-16])
def test_a_token_of_probability_zero_is_never_drawn(u: float) -> None:
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]])
    number = torch.tensor([u], dtype=torch.float64)
    assert int(draw(probs, number)) in (1, 3)
    for k, p, m in ((5, 0.9999999, 0.0), (4, 1.0, 0.0), (9, 1.0, 0.1)):
        limits = (torch.tensor([k]), torch.tensor([p]).double(), torch.tensor([m]).double())
        assert int(draw_filtered(probs, number, *limits)) in (1, 3)


def test_uniforms_are_even_and_inside_of_their_interval() -> None:
    seeds = np.arange(200, dtype=np.uint64).repeat(100)
    u = uniforms(seeds, np.tile(np.arange(100), 200))
    assert u.min() > 0
    assert u.max() < 1
    counts = np.histogram(u, bins=50, range=(0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() < 85.4  # 99.9 % at 49 degrees of freedom
    grid = u.reshape(200, 100)
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.03


def test_seed_of_a_request() -> None:
    assert seed_of(5, "x", 1) == seed_of(5, "y", 2) == 5
    assert seed_of(-1, "x", 1) == 2**64 - 1
    assert seed_of(None, "x", 1) == seed_of(None, "x", 1)
    assert len({seed_of(None, rid, seed) for rid in "ab" for seed in (1, 2)}) == 4
