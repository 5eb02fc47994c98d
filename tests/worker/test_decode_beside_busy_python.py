"""The interpreter lock must not stop a forward: what the overlap loop stands on."""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hand_driver import HandDriver, make_req

from sgviz.worker.tp_worker import TpModelWorker

ROWS, STEPS = 8, 12


@contextmanager
def busy_thread() -> Iterator[None]:
    """A thread that runs plain Python without a pause, as a scheduler with much to do."""
    stop = False

    def spin() -> None:
        count = 0
        while not stop:
            count += 1

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        stop = True
        thread.join()


def step_ms(driver: HandDriver, reqs: list[object]) -> float:
    """Median time the device says a decode step took."""
    times = []
    for _ in range(STEPS):
        result = driver.step(driver.decode(reqs))  # type: ignore[arg-type]
        times.append((result.end_ns - result.start_ns) / 1e6)
    return statistics.median(times)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "w8a8_int8"])
def test_a_decode_step_beside_busy_python_takes_at_most_twice_as_long(quantization: str | None) -> None:
    assert sys.getswitchinterval() == pytest.approx(0.005), "the default, at which eager forwards stand still"
    worker = TpModelWorker(
        "smollm2-135m-instruct",
        device="cpu",
        max_total_tokens=4000,
        torch_threads=1,
        quantization=quantization,  # type: ignore[arg-type]
    )
    driver = HandDriver(worker)
    reqs = [make_req(f"r{i}", range(20 + i, 84 + i), temperature=0.0, ignore_eos=True) for i in range(ROWS)]
    driver.step(driver.extend(reqs))
    step_ms(driver, reqs)
    ratios = []
    for _ in range(3):
        alone = step_ms(driver, reqs)
        with busy_thread():
            beside = step_ms(driver, reqs)
        ratios.append(beside / alone)
        time.sleep(0.05)
    worker.close()
    assert statistics.median(ratios) < 2.0, ratios
