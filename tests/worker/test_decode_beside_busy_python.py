"""The interpreter lock must not stop a forward: what the overlap loop stands on."""

from __future__ import annotations

import hashlib
import statistics
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hand_driver import HandDriver, make_req

from sgviz.batch.req import Req
from sgviz.model.model_config import Quantization
from sgviz.worker.tp_worker import TpModelWorker

ROWS, STEPS = 8, 12


def count(turns: int = 1000) -> None:
    """Plain Python that never lets go of the interpreter lock by itself."""
    for _ in range(turns):
        pass


def digest(data: bytes = bytes(1 << 22)) -> None:
    """The same load on a core, without the lock: hashing a large buffer releases it."""
    hashlib.sha256(data).digest()


@contextmanager
def busy_thread(work: Callable[[], None]) -> Iterator[None]:
    """A thread that does `work` without a pause."""
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            work()

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def step_ms(driver: HandDriver, reqs: list[Req]) -> float:
    """Median time the device says a decode step took."""
    times = []
    for _ in range(STEPS):
        result = driver.step(driver.decode(reqs))
        times.append((result.end_ns - result.start_ns) / 1e6)
    return statistics.median(times)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("quantization", [None, "w8a8_int8"])
def test_a_decode_step_beside_busy_python_takes_at_most_twice_as_long(
    quantization: Quantization | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sys.getswitchinterval() == pytest.approx(0.005), "the default, at which eager forwards stand still"
    worker = TpModelWorker(
        "smollm2-135m-instruct",
        device="cpu",
        max_total_tokens=4000,
        torch_threads=1,
        quantization=quantization,
    )
    driver = HandDriver(worker)
    reqs = [make_req(f"r{i}", range(20 + i, 84 + i), temperature=0.0, ignore_eos=True) for i in range(ROWS)]
    driver.step(driver.extend(reqs))
    step_ms(driver, reqs)
    ratios = []
    for _ in range(3):
        with busy_thread(digest):  # so that both runs share the cores with one other thread
            beside_work = step_ms(driver, reqs)
        with busy_thread(count):
            beside_python = step_ms(driver, reqs)
        ratios.append(beside_python / beside_work)
    worker.close()
    with capsys.disabled():
        print(f"\n  beside busy Python a step takes {statistics.median(ratios):.2f} times as long", end="")
    assert statistics.median(ratios) < 2.0, ratios
