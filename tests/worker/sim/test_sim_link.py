"""KV of a simulated device: the device table's link rate, on a clock turned by hand; nothing of it sleeps."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "disaggregation"))  # kv_pair

from kv_pair import Pair, aux

from sgviz.config import Settings
from sgviz.disaggregation.prefill_route import MOST_PIECE_TOKENS
from sgviz.disaggregation.protocol import KVPoll
from sgviz.events import schema
from sgviz.events.clock import VirtualClock
from sgviz.worker.sim.build import make_sim_worker
from sgviz.worker.sim.hardware import GPUS, Gpu
from sgviz.worker.sim.sim_link import SimLink
from sgviz.worker.sim.worker import SimWorker


class HandTimer:
    """Time on a clock that others read too."""

    def __init__(self) -> None:
        self.clock = VirtualClock(10**9)

    def now(self) -> int:
        return self.clock.now()

    def wait_until(self, ns: int) -> None:
        self.clock.advance(max(0, ns - self.now()))


def worker(gpu: str, timer: HandTimer) -> SimWorker:
    settings = Settings.build(device=f"sim:{gpu}", model_path="tiny-llama", sim_model="llama-3-8b")
    return make_sim_worker(settings, timer=timer)


def test_copies_in_one_direction_wait_for_each_other() -> None:
    timer = HandTimer()
    link, start = SimLink(1e9, timer), timer.now()
    first, second = link.carry(1000), link.carry(500)
    assert not first.done()
    timer.clock.advance(1000)
    assert first.done() and not second.done()
    assert first.result() == (start, start + 1000)
    assert second.result() == (start + 1000, start + 1500) and timer.now() == start + 1500
    timer.clock.advance(500)
    assert link.carry(0).done()  # the link is free, and nothing takes no time


@pytest.mark.parametrize("gpu", GPUS, ids=lambda each: each.name)
def test_the_rate_is_the_device_tables(gpu: Gpu) -> None:
    timer = HandTimer()
    made, slots = worker(gpu.name, timer), np.arange(1, 1001)
    out, back = made.read_kv(slots, memoryview(b"")), made.write_kv(slots, memoryview(b""))
    took = 1000 * made.info.bytes_per_token / gpu.link_bandwidth * 1e9
    start, end = out.result()
    assert made.info.bytes_per_token == 2 * 32 * 8 * 128 * 2 and end - start == pytest.approx(took, abs=1)
    assert back.result() == (start, end)  # the other direction is a link of its own
    made.close()


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_a_transfer_takes_the_links_time_and_no_other(backend: str) -> None:
    """Both ends have a link, so of a transfer in pieces the first one's time is added."""
    timer = HandTimer()
    ends = worker("h100-sxm", timer), worker("h100-sxm", timer)
    pair = Pair(
        backend=backend, source=cast(Any, ends[0]), target=cast(Any, ends[1]), piece_tokens=MOST_PIECE_TOKENS
    )
    timer.clock = pair.clock
    try:
        assert pair.prefill.wait_ms == pair.decode.wait_ms == 1  # the end of such a copy wakes nobody
        slots, piece = (
            np.arange(1, 4 * MOST_PIECE_TOKENS + 1),
            MOST_PIECE_TOKENS * ends[0].info.bytes_per_token / 450e9,
        )
        sender, receiver = pair.met(3, slots.tolist())
        start = timer.now()
        sender.send(0, slots, aux=aux(3))
        pair.settle()
        assert receiver.stats.pieces == 0  # no time has passed, so nothing has come

        def on() -> bool:
            if sender.poll() == receiver.poll() == KVPoll.SUCCESS:
                return True
            timer.clock.advance(1000)
            return False

        pair.pump(on)
        assert receiver.stats.bytes == len(slots) * ends[0].info.bytes_per_token
        sent = [e.body for e in pair.sink.events if isinstance(e.body, schema.KvSent)]
        assert [body.end_ns - start for body in sent] == pytest.approx(
            [k * piece * 1e9 for k in (1, 2, 3, 4)], abs=9
        )
        came = [e.body for e in pair.sink.events if isinstance(e.body, schema.KvReceived)]
        assert [body.end_ns - body.start_ns for body in came] == pytest.approx([piece * 1e9] * 4, abs=2)
        assert came[-1].end_ns - start >= 5 * piece * 1e9 - 9
    finally:
        pair.close()
        for each in ends:
            each.close()
