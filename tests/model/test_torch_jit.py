"""Modules compiled by several threads at once, as ranks that are threads do when they load."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sgviz.model import torch_jit

THREADS, ROUNDS = 4, 6


def new_class() -> type[nn.Module]:
    """One that torch has not seen, as the first model of a process finds it."""

    class Doubling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return self.twice(x) + 1

        @torch.jit.export
        def twice(self, x: Tensor) -> Tensor:
            return x * 2

    return Doubling


@pytest.fixture(autouse=True)
def _threads_take_turns_quickly() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def compiled(make: Callable[[nn.Module], Any]) -> None:
    for _ in range(ROUNDS):
        kind, gate = new_class(), threading.Barrier(THREADS)

        def one(number: int, kind: type[nn.Module] = kind, gate: threading.Barrier = gate) -> Any:
            gate.wait(10)
            return make(kind())(torch.tensor(float(number)))

        with ThreadPoolExecutor(THREADS) as pool:
            assert [float(y) for y in pool.map(one, range(THREADS))] == [2.0 * n + 1 for n in range(THREADS)]


def test_scripted_at_once() -> None:
    compiled(torch_jit.script)


def test_traced_at_once() -> None:
    compiled(lambda module: torch_jit.trace(module, (torch.zeros(()),)))
