"""Other weights take the place of the old ones whole, in every layout, or the old ones stay whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hand_driver import HandDriver, make_req
from other_weights import WEIGHTS, copied, of_integers, other_weights, without_a_tensor

from sgviz.errors import BadRequest
from sgviz.worker.mock_worker import MockWorker
from sgviz.worker.protocol import Worker
from sgviz.worker.tp_worker import TpModelWorker

PROMPTS = ([5, 6, 7, 8, 9], [40] * 17, list(range(60, 100)))
TOKENS = 10
LAYOUTS = {"packed": {}, "int8": {"quantization": "w8a8_int8"}, "bfloat16": {"dtype": "bfloat16"}}


def worker_of(model: str, **options: str) -> TpModelWorker:
    return TpModelWorker(model, device="cpu", max_total_tokens=600, torch_threads=1, **options)  # type: ignore[arg-type]


def answers(worker: Worker) -> list[list[int]]:
    """Greedy tokens of a few prompts, on an empty cache."""
    driver = HandDriver(worker)
    reqs = [make_req(f"r{i}", prompt, temperature=0.0) for i, prompt in enumerate(PROMPTS)]
    driver.step(driver.extend(reqs))
    while len(reqs[0].output_ids) < TOKENS:
        driver.step(driver.decode(reqs))
    for req in reqs:
        worker.forget([req.kv.req_pool_idx])
    return [list(req.output_ids) for req in reqs]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return other_weights(tmp_path_factory.mktemp("weights") / "other")


@pytest.fixture
def worker() -> Iterator[TpModelWorker]:
    made = worker_of("tiny-llama")
    yield made
    made.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_there_and_back_again_it_answers_as_one_that_began_so(other: Path, layout: str) -> None:
    options = LAYOUTS[layout]
    fresh = worker_of(str(other), **options)
    wanted = answers(fresh)
    fresh.close()
    worker = worker_of("tiny-llama", **options)
    try:
        own = answers(worker)
        assert own != wanted
        for path, expected in ((str(other), wanted), ("tiny-llama", own), (str(other), wanted)):
            worker.load_weights(path).install()
            assert answers(worker) == expected
        assert worker.info.model == "other"
    finally:
        worker.close()


def test_forwards_go_on_with_the_old_ones_until_they_are_installed(
    other: Path, worker: TpModelWorker
) -> None:
    own = answers(worker)
    weights = worker.load_weights(str(other))
    assert answers(worker) == own
    while not weights.done():
        assert answers(worker) == own
    assert answers(worker) == own
    weights.install()
    assert answers(worker) != own


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: copied(path, intermediate_size=96), "intermediate_size is 96, not"),
        (lambda path: copied(path, num_hidden_layers=1), "num_layers is 1, not"),
        (
            lambda path: copied(path, "tiny-qwen3"),
            "architecture is 'Qwen3ForCausalLM', not 'LlamaForCausalLM'",
        ),
        (without_a_tensor, "missing are model.norm.weight"),
        (of_integers, "tensor .* has dtype int64; weights must be floating-point numbers"),
        (lambda path: path, "there is no model"),
    ],
)
def test_what_does_not_fit_is_named_and_the_old_ones_stay_whole(
    make: Callable[[Path], Path], words: str, worker: TpModelWorker, tmp_path: Path
) -> None:
    own = answers(worker)
    weights = worker.load_weights(str(make(tmp_path / "bad")))
    with pytest.raises(BadRequest, match=words) as caught:
        weights.install()
    assert caught.value.param == "model_path"
    assert answers(worker) == own and worker.info.model == "tiny-llama"


def test_a_file_cut_in_the_middle_is_an_error_and_no_half_a_model(
    worker: TpModelWorker, tmp_path: Path
) -> None:
    own = answers(worker)
    path = copied(tmp_path / "cut") / WEIGHTS
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(BadRequest, match="cannot be read"):
        worker.load_weights(str(path.parent)).install()
    assert answers(worker) == own


def test_a_device_without_weights_says_so() -> None:
    with pytest.raises(BadRequest, match="mock device has no weights"):
        MockWorker(threaded=False).load_weights("tiny-llama")
