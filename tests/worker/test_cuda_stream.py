"""CUDA streams: what can be checked without a GPU here, and with one the same tokens and times as everywhere."""

from __future__ import annotations

import contextlib
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hand_driver import HandDriver, make_req

from sgviz.batch.req import Req
from sgviz.model.fetch import resolve_model
from sgviz.worker import cuda_stream
from sgviz.worker.cuda_stream import ANCHOR_EVERY_NS, Anchor, Anchors, CudaStreams
from sgviz.worker.host_result import Pass
from sgviz.worker.sampler import Sampled
from sgviz.worker.tp_worker import TpModelWorker

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no usable GPU")
MODELS = ("tiny-llama", "tiny-qwen2", "tiny-qwen3")
PROMPTS = ([5, 6, 7, 8, 9], [40] * 17, list(range(60, 100)), [200])
TOKENS = 12
HOUR_NS = 3600 * 10**9


@dataclass(frozen=True)
class DeviceEvent:
    """A device's event at `ns` of its own clock; like CUDA's, it tells differences in float32 milliseconds."""

    ns: int

    def elapsed_time(self, end_event: DeviceEvent) -> float:
        return float(np.float32((end_event.ns - self.ns) / 1e6))


class TestAnchors:
    def test_times_are_exact_to_two_microseconds_however_long_it_runs(self) -> None:
        now, offset = 17, 5 * 10**12  # the device's clock began at another time

        anchors = Anchors(lambda: Anchor(DeviceEvent(now + offset), now), lambda: now)
        first = anchors.newest
        worst = 0
        for _ in range(2000):
            now += 9_999_777_333
            anchor = anchors.current()
            start, later = now + 1234, now + 500_000_567
            for at in (start, later):
                worst = max(worst, abs(anchor.at(DeviceEvent(at + offset)) - at))
        assert now > 5 * HOUR_NS and worst <= 2000
        assert abs(first.at(DeviceEvent(now + 1234 + offset)) - (now + 1234)) > 100_000  # one anchor for all

    def test_it_is_renewed_no_more_often_than_it_must(self) -> None:
        now, taken = 0, 0

        def take() -> Anchor:
            nonlocal taken
            taken += 1
            return Anchor(DeviceEvent(now), now)

        anchors = Anchors(take, lambda: now)
        for _ in range(100):
            now += ANCHOR_EVERY_NS // 10
            anchors.current()
        assert taken == 1 + 10


class FakeStream:
    """Operations take one unit of the device's time each, in order; an event takes none."""

    def __init__(self, clock: FakeDevice) -> None:
        self.clock, self.at = clock, 0

    def run(self, units: int) -> None:
        self.at = max(self.at, self.clock.earliest) + units

    def wait_event(self, event: FakeEvent) -> None:
        self.at = max(self.at, event.ns)


class FakeEvent:
    """An event on the device's clock, which is an hour ahead of the host's; told in float32 milliseconds."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.timed, self.ns = enable_timing, -1

    def record(self, stream: FakeStream) -> None:
        stream.run(0)
        self.ns = stream.at

    def synchronize(self) -> None:
        assert self.ns >= 0, "waited for before it was recorded"

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.timed and end.timed and self.ns >= 0 and end.ns >= 0
        return float(np.float32((end.ns - self.ns) / 1e6))


@dataclass
class FakeDevice:
    """`earliest`: nothing that is enqueued from now on begins before (the host took so long)."""

    earliest: int = HOUR_NS

    def streams(self, monkeypatch: pytest.MonkeyPatch) -> CudaStreams:
        cuda = types.SimpleNamespace(
            synchronize=lambda device: None,
            Stream=lambda device: FakeStream(self),
            Event=FakeEvent,
            stream=lambda stream: contextlib.nullcontext(),
        )
        monkeypatch.setattr(cuda_stream, "torch", types.SimpleNamespace(cuda=cuda))
        monkeypatch.setattr(
            cuda_stream, "time", types.SimpleNamespace(monotonic_ns=lambda: self.earliest - HOUR_NS)
        )
        made = CudaStreams(torch.device("cpu"))
        monkeypatch.setattr(made, "_to_host", lambda tensor: (made._copy.run(200_000), tensor)[1])  # type: ignore[attr-defined]
        return made


@pytest.mark.parametrize("held_ns", [0, 5_000_000])
def test_intervals_of_forward_sampling_and_copy(monkeypatch: pytest.MonkeyPatch, held_ns: int) -> None:
    """On a device that is played: 3 ms of forward, 1 ms of sampling, 0.2 ms of copy; perhaps held back in between."""
    device = FakeDevice()
    streams = device.streams(monkeypatch)

    def work(ns: int, gives: object) -> Callable[[], Any]:
        return lambda: (streams._forward.run(ns), gives)[1]  # type: ignore[attr-defined]

    device.earliest += 7_000_000
    now = device.earliest - HOUR_NS
    begun, logits = streams.begin(work(3_000_000, torch.zeros(1, 4)))
    device.earliest += 3_000_000 + held_ns if held_ns else 0
    sampled = work(1_000_000, Sampled(tokens=logits.argmax(dim=-1)))
    of = Pass(bid=1, forward_pass_id=1, can_run_cuda_graph=False)
    flight = streams.finish(begun, sampled, types.SimpleNamespace(), of, delayed=held_ns > 0)  # type: ignore[arg-type]
    result = flight.wait()
    assert result.next_token_ids == [0]
    times = [result.start_ns, result.forward_end_ns, result.sample_start_ns, result.end_ns]
    times += [result.copy_start_ns, result.copy_end_ns]
    ms = [round((t - now) / 1e6, 2) for t in times]
    held = held_ns / 1e6
    assert ms == [0, 3, 3 + held, 4 + held, 4 + held, 4.2 + held]
    following, _ = streams.begin(work(3_000_000, logits))
    assert following.started.ns == flight.ended.ns  # type: ignore[attr-defined]  # the copy keeps nobody


def test_forgetting_goes_through_the_streams_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would write beside forwards that are under way."""
    worker = TpModelWorker("tiny-llama", device="cpu", max_total_tokens=64)
    driver = HandDriver(worker)
    req = make_req("a", [1, 2, 3], temperature=0.0)
    driver.step(driver.extend([req]))
    row = req.kv.req_pool_idx
    last = worker._future_map.output_tokens_buf
    seen: list[tuple[int, int]] = []

    class Streams:
        def enqueue(self, work: Callable[[], None]) -> None:
            before = int(last[row])
            work()
            seen.append((before, int(last[row])))

    monkeypatch.setattr(worker, "_cuda", Streams())
    worker.forget([row])
    worker.close()
    assert seen == [(req.output_ids[-1], -1)]


# ---------------------------------------------------------------- with a GPU


@pytest.fixture(scope="module", params=MODELS)
def on_gpu(request: pytest.FixtureRequest) -> Iterator[TpModelWorker]:
    worker = TpModelWorker(request.param, device="cuda", dtype="float32", max_total_tokens=1000)
    yield worker
    worker.close()


def greedy(prefix: str = "r") -> list[Req]:
    return [make_req(f"{prefix}{i}", p, temperature=0.0) for i, p in enumerate(PROMPTS)]


@lru_cache
def expected(model: str) -> list[list[int]]:
    """Greedy continuations by transformers on the CPU, in float32, one prompt at a time."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(resolve_model(model), dtype=torch.float32)
    reference.eval()
    outputs = []
    with torch.inference_mode():
        for prompt in PROMPTS:
            ids = list(prompt)
            for _ in range(TOKENS):
                best = reference(torch.tensor([ids])).logits[0, -1].topk(2)
                assert best.values[0] - best.values[1] > 1e-3, (
                    "a near tie proves nothing: choose another prompt"
                )
                ids.append(int(best.indices[0]))
            outputs.append(ids[len(prompt) :])
    return outputs


@GPU
@pytest.mark.parametrize("chunk", [None, 7])
def test_the_same_tokens_as_transformers(on_gpu: TpModelWorker, chunk: int | None) -> None:
    assert HandDriver(on_gpu).generate(greedy(), TOKENS, chunk) == expected(on_gpu.info.model)


@GPU
def test_launches_behind_one_another_and_their_times(on_gpu: TpModelWorker) -> None:
    driver, reqs = HandDriver(on_gpu), greedy()
    before = time.monotonic_ns()
    launches = [on_gpu.launch(driver.extend(reqs))]
    launches += [on_gpu.launch(driver.decode(reqs)) for _ in range(TOKENS - 1)]
    results = [launch.result() for launch in launches]
    after = time.monotonic_ns()
    tokens = zip(*[result.next_token_ids for result in results])
    assert [list(row) for row in tokens] == expected(on_gpu.info.model)
    times = [t for result in results for t in (result.start_ns, result.forward_end_ns, result.end_ns)]
    assert times == sorted(times)
    assert all(result.end_ns <= result.copy_start_ns <= result.copy_end_ns for result in results)
    slack = 50_000  # of the anchor
    assert before - slack <= times[0] and times[-1] <= after + slack


@GPU
def test_a_row_is_forgotten_behind_its_last_forward_and_before_its_next(on_gpu: TpModelWorker) -> None:
    """Rows that change hands with everything under way: no launch waits for a result."""
    driver = HandDriver(on_gpu)
    right = expected(on_gpu.info.model)
    for turn in range(4):
        reqs = greedy(f"t{turn}.")
        launches = [on_gpu.launch(driver.extend(reqs))]
        launches += [on_gpu.launch(driver.decode(reqs)) for _ in range(TOKENS - 1)]
        rows = [req.kv.req_pool_idx for req in reqs]
        for req in reqs:
            driver.cache.release(req, [], insert=False, why="finish")
        on_gpu.forget(rows)
        tokens = zip(*[launch.result().next_token_ids for launch in launches])
        assert [list(row) for row in tokens] == right
