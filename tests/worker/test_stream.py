"""CpuStream: order, errors, close, and that nothing keeps the thread or the interpreter alive."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator

import pytest

from sgviz.errors import Unavailable
from sgviz.worker.stream import CpuStream


@pytest.fixture
def stream() -> Iterator[CpuStream]:
    made = CpuStream("test-stream")
    yield made
    made.close()


def test_closures_run_in_launch_order_on_one_foreign_thread(stream: CpuStream) -> None:
    ran: list[int] = []
    threads: set[int] = set()

    def step(number: int) -> int:
        ran.append(number)
        threads.add(threading.get_ident())
        return number * number

    futures = [stream.submit(lambda n=n: step(n)) for n in range(100)]
    assert [future.result() for future in futures] == [n * n for n in range(100)]
    assert ran == list(range(100))
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_submit_does_not_wait_for_the_closure(stream: CpuStream) -> None:
    gate = threading.Event()
    first = stream.submit(gate.wait)
    second = stream.submit(lambda: 7)
    assert not first.done()
    assert not second.done()  # behind the first, though it needs nothing
    gate.set()
    assert second.result() == 7
    assert first.done()


@pytest.mark.parametrize("error", [ValueError("bad row 3"), SystemExit(3), KeyboardInterrupt()])
def test_an_error_reaches_its_own_waiter_only(stream: CpuStream, error: BaseException) -> None:
    def fail() -> None:
        raise error

    before, failed, after = stream.submit(lambda: 1), stream.submit(fail), stream.submit(lambda: 2)
    assert before.result() == 1
    for _ in range(2):
        with pytest.raises(type(error)) as caught:
            failed.result()
        assert caught.value is error
    assert after.result() == 2


def test_close_finishes_what_was_launched_and_refuses_more() -> None:
    stream = CpuStream("closing-stream")
    gate = threading.Event()
    futures = [stream.submit(gate.wait), *[stream.submit(lambda n=n: n) for n in range(20)]]
    threading.Timer(0.02, gate.set).start()
    stream.close()
    assert all(future.done() for future in futures)
    assert [future.result() for future in futures[1:]] == list(range(20))
    assert _threads("closing-stream") == []
    with pytest.raises(Unavailable, match="closing-stream"):
        stream.submit(lambda: 0)
    stream.close()  # harmless


def test_an_idle_stream_holds_nothing_of_the_last_closure(stream: CpuStream) -> None:
    class Weights:
        pass

    weights = Weights()
    gone = weakref.ref(weights)

    def fail(held: Weights = weights) -> None:
        raise RuntimeError(f"{held}")

    future = stream.submit(fail)
    with pytest.raises(RuntimeError):
        future.result()
    stream.submit(lambda: None).result()
    del weights, fail, future
    gc.collect()
    assert gone() is None


def test_a_dropped_stream_ends_its_thread() -> None:
    stream = CpuStream("dropped-stream")
    thread = _threads("dropped-stream")[0]
    done = stream.submit(lambda: 1)
    del stream
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()
    assert done.result() == 1


def test_an_open_stream_does_not_keep_python_alive() -> None:
    code = "from sgviz.worker.stream import CpuStream; s = CpuStream(); print(s.submit(lambda: 42).result())"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout.strip(), ended.stderr) == (0, "42", "")


def _threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]
