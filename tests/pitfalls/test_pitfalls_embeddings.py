"""Known faults of servers on the way of a request for a vector, each named after what others have seen."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator

import httpx
import pytest

from sgviz.engine import Engine


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("tiny-llama", device="mock", max_total_tokens=2048, context_length=256) as running:
        yield running


BAD: list[dict[str, object]] = [
    {"input": []}, {"input": ""}, {"input": [[]]}, {"input": [312]}, {"input": [-1]}, {"input": [2**70]},
    {"input": [1.5]}, {"input": [True]}, {"input": [None]}, {"input": {"text": "a"}}, {"input": [[1], 2]},
    {"input": "a" * 3000}, {"input": "\ud800"}, {"input": "a", "dimensions": 2**70},
    {"input": "a", "encoding_format": "int8"},
]  # fmt: skip


def test_no_tokens_or_ids_outside_the_vocabulary_are_a_400_for_that_request_while_others_run_on(
    engine: Engine,
) -> None:
    """vllm-project/vllm#7283, vllm-project/vllm#7746, Blaizzy/mlx-vlm#1491"""
    url = engine.serve(port=0).url
    good = {"input": ["one", "two"]}

    def post(body: dict[str, object]) -> httpx.Response:
        import json

        return httpx.post(
            f"{url}/v1/embeddings",
            content=json.dumps(body),
            headers={"content-type": "application/json"},
            timeout=60,
        )

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(post, [each for body in BAD for each in (body, good)]))
    for body, bad, beside in zip(BAD, answers[::2], answers[1::2]):
        assert bad.status_code == 400, (body, bad.text)
        assert bad.json()["error"]["type"] == "BadRequestError"
        assert beside.status_code == 200 and len(beside.json()["data"]) == 2
    assert engine.internal_state()["num_live_reqs"] == 0


def test_the_whole_prompt_in_the_cache_gives_the_identical_vector(engine: Engine) -> None:
    """GeeeekExplorer/nano-vllm#144, lablup/mlxcel#1760, ml-explore/mlx-lm#1581"""
    first, second = (engine.encode(input_ids=list(range(50))) for _ in range(2))
    assert second["meta_info"]["cached_tokens"] == 49 and first["embedding"] == second["embedding"]
