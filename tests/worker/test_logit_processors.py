"""Logit processors: whose rows they see, in which place of the order, and what happens when one fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hand_driver import HandDriver, make_req
from torch import Tensor

from sgviz.batch.req import Req
from sgviz.batch.vocab_mask import VocabMask
from sgviz.errors import ConfigError
from sgviz.worker.logit_processors import LogitProcessors, load_logit_processors
from sgviz.worker.sampler import Sampler
from sgviz.worker.sampling_batch import SamplingBatch, SamplingColumns
from sgviz.worker.tp_worker import TpModelWorker

EXAMPLE = Path(__file__).resolve().parents[2] / "data/logit_processors/only_these.py"
VOCAB = 40


class Force:
    """The id in `token` and no other, in place; keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, list[dict[str, Any]]]] = []

    def __call__(self, logits: Tensor, params: list[dict[str, Any]]) -> None:
        self.calls.append((logits.clone(), params))
        for row, param in zip(logits, params, strict=True):
            row[param["token"]] = 1e4


class Broken:
    def __call__(self, logits: Tensor, params: list[dict[str, Any]]) -> Tensor:
        logits.fill_(7.0)  # what it has done before it raises must not count
        raise RuntimeError("no idea")


class Narrow:
    def __call__(self, logits: Tensor, params: list[dict[str, Any]]) -> Tensor:
        return logits[:, :3]


class Half:
    def __call__(self, logits: Tensor, params: list[dict[str, Any]]) -> Tensor:
        return logits.half()


class NotANumber:
    def __call__(self, logits: Tensor, params: list[dict[str, Any]]) -> None:
        logits[:, 3] = torch.nan


class BarsAll:
    def __call__(self, logits: Tensor, params: list[dict[str, Any]]) -> Tensor:
        return torch.full_like(logits, -torch.inf)


class Picky:
    def __call__(self, logits: Tensor, params: list[dict[str, Any]]) -> None:
        if any("token" not in param for param in params):
            raise ValueError("give a token")


def req(rid: str, name: str | None = None, params: dict[str, Any] | None = None, **more: Any) -> Req:
    made = make_req(rid, [1, 2, 3], temperature=0.0, custom_params=params, **more)
    made.custom_logit_processor = name
    return made


def sample(
    reqs: list[Req], logits: Tensor, mask: VocabMask | None = None, **by_name: Any
) -> tuple[list[int], dict[int, str]]:
    columns = SamplingColumns.build(reqs, list(range(1, len(reqs) + 1)), (), 0)
    batch = SamplingBatch(
        columns=columns,
        output_index=np.zeros(len(reqs), dtype=np.int64),
        final=np.ones(len(reqs), dtype=np.bool_),
        fresh=[],
        vocab_mask=mask,
    )
    sampled = Sampler(VOCAB, processors=LogitProcessors(by_name)).sample(logits, batch)
    assert sampled.nan_members == []
    return sampled.tokens.tolist(), {i: failure.why for i, failure in sampled.failures.items()}


def some(rows: int) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(3))


def test_it_sees_its_own_rows_behind_penalties_and_bias() -> None:
    force, logits = Force(), some(4)
    plain = logits.argmax(-1).tolist()
    reqs = [req("a"), req("b", "force", {"token": 5}), req("c"), req("d", "force", {"token": 9})]
    reqs[1] = req("b", "force", {"token": 5}, logit_bias={"7": 3.0})
    tokens, failures = sample(reqs, logits.clone(), force=force)
    assert (tokens, failures) == ([plain[0], 5, plain[2], 9], {})
    ((seen, params),) = force.calls
    assert params == [{"token": 5}, {"token": 9}]
    expected = logits[[1, 3]]
    expected[0, 7] += 3.0
    torch.testing.assert_close(seen, expected)


def test_two_processors_in_one_batch_and_params_left_out() -> None:
    force, seen = Force(), []
    reqs = [req("a", "force", {"token": 5}), req("b", "look")]
    tokens, failures = sample(reqs, some(2), force=force, look=lambda logits, params: seen.append(params))
    assert tokens[0] == 5 and seen == [[{}]] and failures == {}


@pytest.mark.parametrize(
    "kind, why",
    [
        (Broken, "RuntimeError: no idea"),
        (Narrow, "TypeError: it returned logits of shape [1, 3]"),
        (Half, "TypeError: it returned logits of dtype float16 for float32"),
        (NotANumber, "ArithmeticError: the logits that it gave hold a NaN"),
        (BarsAll, "it bars every id"),
        (Picky, "give a token"),
    ],
)
def test_one_that_fails_takes_nobody_with_it(kind: type, why: str) -> None:
    logits = some(3)
    reqs = [req("a"), req("b", "bad"), req("c", "force", {"token": 4})]
    tokens, failures = sample(reqs, logits.clone(), bad=kind(), force=Force())
    assert [tokens[0], tokens[2]] == [int(logits[0].argmax()), 4]
    assert list(failures) == [1] and failures[1].startswith(why)


def test_only_the_request_whose_params_are_wrong_ends() -> None:
    reqs = [req("a", "force", {"token": 4}), req("b", "force", {"tokne": 4}), req("c", "force", {"token": 6})]
    tokens, failures = sample(reqs, some(3), force=Force())
    assert [tokens[0], tokens[2]] == [4, 6] and failures == {1: "KeyError: 'token'"}


def test_what_a_grammar_bars_stays_barred() -> None:
    words = np.zeros((1, -(-VOCAB // 32)), dtype=np.int32)
    words[0, 0] = 0b1100  # ids 2 and 3
    mask = VocabMask(members=np.array([0], dtype=np.int64), words=words)
    tokens, _ = sample([req("a", "force", {"token": 9})], some(1), mask, force=Force())
    assert tokens[0] in (2, 3)


def test_one_that_bars_what_the_grammar_allows_leaves_nothing() -> None:
    def bars(logits: Tensor, params: list[dict[str, Any]]) -> None:
        logits[:, 2:4] = -torch.inf

    words = np.full((1, -(-VOCAB // 32)), 0, dtype=np.int32)
    words[0, 0] = 0b1100  # ids 2 and 3
    mask = VocabMask(members=np.array([0], dtype=np.int64), words=words)
    assert list(sample([req("a", "bars"), req("b", "bars")], some(2), mask, bars=bars)[1]) == [0]


def test_only_a_value_error_is_a_refusal_of_the_params() -> None:
    rows, processed = some(2), SamplingColumns.build([req("a", "x"), req("b", "y")], [1, 2], (), 0).processed
    failures = LogitProcessors({"x": Picky(), "y": Broken()}).apply(rows, processed)
    assert [failures[i].is_refusal for i in (0, 1)] == [True, False]


def test_a_nan_of_the_model_is_not_the_processors() -> None:
    rows = some(1)
    rows[0, 3] = torch.nan
    columns = SamplingColumns.build([req("a", "n")], [1], (), 0)
    assert LogitProcessors({"n": NotANumber()}).apply(rows, columns.processed) == {}


def test_in_the_worker_the_decode_graph_stands_aside() -> None:
    """Greedy decode steps run as one traced graph with its own argmax, which would not know of a processor."""
    worker = TpModelWorker(
        "tiny-llama",
        max_total_tokens=256,
        torch_threads=1,
        logit_processors=load_logit_processors(f"only_these={EXAMPLE}:OnlyThese"),
    )
    assert worker.runner.decode_graph is not None
    try:
        driver = HandDriver(worker)
        alone = make_req("p", range(3, 12), temperature=0.0)
        driver.step(driver.extend([alone]))
        for _ in range(4):
            driver.step(driver.decode([alone]))
        plain = make_req("q", range(3, 12), temperature=0.0)
        only = make_req("o", range(3, 12), temperature=0.0, custom_params={"ids": [201, 17]})
        only.custom_logit_processor = "only_these"
        driver.step(driver.extend([plain, only]))
        for _ in range(4):
            driver.step(driver.decode([plain, only]))
        assert set(only.output_ids) <= {201, 17} and len(only.output_ids) == 5
        assert plain.output_ids == alone.output_ids
    finally:
        worker.close()


@pytest.mark.parametrize(
    "setting, fault",
    [
        ("x", "must be name=module:Class"),
        ("x=only_these", "must be name=module:Class"),
        ("a b=m:C", "must be name=module:Class"),
        (f"a={EXAMPLE}:OnlyThese,a={EXAMPLE}:OnlyThese", "given twice"),
        (f"a={EXAMPLE}:OnlyThose", "did you mean 'OnlyThese'"),
        ("a=nowhere.py:OnlyThese", "there is no file"),
        ("a=no_such_module_at_all:X", "importing no_such_module_at_all raised"),
        ("a=pathlib:PurePath", "has no method __call__"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(setting: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault.replace("(", r"\(")) as caught:
        load_logit_processors(setting)
    assert caught.value.param == "custom_logit_processors"


def test_the_example_is_loaded_by_file_and_name() -> None:
    loaded = load_logit_processors(f" first={EXAMPLE}:OnlyThese , second = {EXAMPLE}:OnlyThese ")
    tokens, _ = sample([req("a", "second", {"ids": [8]})], some(1), second=loaded._by_name["second"])
    assert tokens == [8]
