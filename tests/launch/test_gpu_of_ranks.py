"""Which GPU a rank takes: the first one and a step, counted on its own host."""

from __future__ import annotations

import pytest
import torch

from sgviz.config import Settings
from sgviz.config.parallel_groups import ParallelConfig
from sgviz.errors import ConfigError
from sgviz.worker.model_runner import resolve_device


@pytest.mark.parametrize(
    ("given", "gpus"),
    [
        ({}, [0, 1, 2, 3]),
        ({"base_gpu_id": 2}, [2, 3, 4, 5]),
        ({"base_gpu_id": 1, "gpu_id_step": 2}, [1, 3, 5, 7]),
        ({"base_gpu_id": 3, "gpu_id_step": 0}, [3, 3, 3, 3]),
    ],
)
def test_rank_k_takes_the_first_and_k_steps(given: dict[str, int], gpus: list[int]) -> None:
    parallel = ParallelConfig(dp_size=4, **given)
    assert [parallel.gpu_of(rank) for rank in range(4)] == gpus


def test_each_host_counts_its_own_gpus() -> None:
    nodes = [ParallelConfig(dp_size=4, nnodes=2, node_rank=node, base_gpu_id=1) for node in range(2)]
    assert [[node.gpu_of(rank) for rank in node.ranks_of(node.node_rank)] for node in nodes] == [
        [1, 2],
        [1, 2],
    ]


@pytest.mark.parametrize("name", ["base_gpu_id", "gpu_id_step"])
def test_neither_is_below_zero(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        Settings.build(dp_size=2, **{name: -1})
    assert error.value.param == name


def test_a_gpu_that_is_not_there_is_named_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda", 1) == resolve_device("auto", 1) == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match="GPU 2 is not here; torch finds 2") as error:
        resolve_device("cuda", 2)
    assert error.value.param == "base_gpu_id"


def test_on_a_cpu_the_number_means_nothing() -> None:
    assert resolve_device("cpu", 7) == torch.device("cpu")
