"""Times of a worker on another host, on node 0's clock."""

from __future__ import annotations

import time

from sgviz.events import OtherHostClock, WallClock
from sgviz.worker.other_clock import OtherClockWorker
from sgviz.worker.protocol import GenerationBatchResult

SHIFT = 10**15


class Once:
    """A launch whose result is there, and the same object each time."""

    bid, forward_pass_id = 3, 4

    def __init__(self) -> None:
        self.given = GenerationBatchResult(
            start_ns=10, end_ns=20, forward_end_ns=15, bid=3, next_token_ids=[7], forward_pass_id=4
        )

    def done(self) -> bool:
        return True

    def sample(self) -> None:
        pass

    def result(self) -> GenerationBatchResult:
        return self.given


class Worker:
    info = "what it is"
    kv_layout = "how its KV looks"

    def launch(self, batch: object, *, delay_sample: bool = False) -> Once:
        return Once()

    def forget(self, rows: list[int]) -> None: ...

    def load_weights(self, model_path: str) -> None: ...

    def close(self) -> None: ...


def test_times_of_results_are_shifted_once_and_nothing_else_is() -> None:
    worker = OtherClockWorker(Worker(), SHIFT)  # type: ignore[arg-type]
    launch = worker.launch(None)  # type: ignore[arg-type]
    assert (launch.bid, launch.forward_pass_id, launch.done()) == (3, 4, True)
    for result in (launch.result(), launch.result()):
        assert isinstance(result, GenerationBatchResult)
        assert (result.start_ns, result.end_ns, result.forward_end_ns) == (SHIFT + 10, SHIFT + 20, SHIFT + 15)
        assert result.copy_end_ns == 0  # this worker does not tell, on any clock
        assert (result.next_token_ids, result.bid) == ([7], 3)
    assert worker.info == "what it is" and worker.kv_layout == "how its KV looks"


def test_the_clock_and_its_anchor_agree() -> None:
    clock = OtherHostClock(SHIFT)
    before = WallClock().now() + SHIFT
    unix_ns, monotonic_ns = clock.anchor()
    assert before <= monotonic_ns <= clock.now() <= WallClock().now() + SHIFT
    assert abs(unix_ns - time.time_ns()) < 10**10
