"""The scheduler's events written by hand at given milliseconds, and two loops of which every number is known."""

from __future__ import annotations

from dataclasses import dataclass, field

from sgviz.events.schema import (
    AnyBody,
    BatchFinished,
    BatchLaunched,
    BatchPlanned,
    BatchProcessed,
    Event,
    LoopIdle,
    LoopResumed,
    OutputStreamed,
    QueueEntered,
)
from sgviz.recording.overlap_account import OverlapAccount, StageTime

MS = 1_000_000
PARTS = ("forward_end_ns", "sample_start_ns", "copy_start_ns", "copy_end_ns")


@dataclass
class Hand:
    """Writes the scheduler's events at given milliseconds."""

    events: list[Event] = field(default_factory=list)

    def at(self, ms: float, body: AnyBody) -> None:
        seq = len(self.events) + 1
        self.events.append(Event(seq, round(ms * MS) + MS, "scheduler", 1, body))

    def enter(self, ms: float, rid: str, taken: float) -> None:
        body = QueueEntered(
            rid=rid, position=0, prompt_tokens=1, max_new_tokens=1, stream=False,
            received_ns=round(taken * MS) + MS,
        )  # fmt: skip
        self.at(ms, body)

    def plan(self, ms: float, bid: int, mode: str = "decode") -> None:
        body = BatchPlanned(
            bid=bid, mode=mode, rids=("a",), extend_lens=(1,), prefix_lens=(0,), running=1, waiting=0,
            kv_free=0, kv_evictable=0, kv_protected=0, new_token_ratio=0.5,
        )  # fmt: skip
        self.at(ms, body)

    def launch(self, ms: float, bid: int, turn: float) -> None:
        self.at(ms, BatchLaunched(bid=bid, forward_pass_id=bid, turn_ns=round(turn * MS) + MS))

    def finish(self, ms: float, bid: int, ran: tuple[float, ...], wait: float) -> None:
        """`ran`: start and end on the device; or of forward, sampling and copy."""
        stamps = [round(value * MS) + MS for value in ran]
        parts = {}
        if len(stamps) == 6:
            parts = dict(zip(PARTS, (stamps[1], stamps[2], stamps[4], stamps[5])))
            stamps = [stamps[0], stamps[3]]
        body = BatchFinished(
            bid=bid, start_ns=stamps[0], end_ns=stamps[-1], can_run_cuda_graph=True, wait_ns=round(wait * MS) + MS,
            **parts,
        )  # fmt: skip
        self.at(ms, body)

    def resume(self, ms: float, since: float) -> None:
        self.at(ms, LoopResumed(since_ns=round(since * MS) + MS, at="planned", why="step"))

    def process(self, ms: float, bid: int, *finished: str) -> None:
        self.at(ms, BatchProcessed(bid=bid, finished=finished))

    def idle(self, ms: float) -> None:
        self.at(ms, LoopIdle(kv_free=0, kv_evictable=0, kv_protected=0))


def ms(seconds: float) -> float:
    return round(seconds * 1000, 6)


def by_stage(account: OverlapAccount) -> dict[str, StageTime]:
    return {row.stage: row for row in account.stages}


def normal_loop() -> Hand:
    """Two forwards of 10 ms; before each 1 ms plan and 1 ms launch, after each 2 ms processing, nothing hidden.

    0 turn | 1 planned | 2 launched | 3-13 device | 13.5 result | 15.5 processed | 16 turn | 17 | 18 |
    19-29 device | 29.5 result | 31.5 processed, request over | 32 idle
    """
    hand = Hand()
    hand.enter(0.5, "a", taken=0.25)
    hand.plan(1, 1, "extend")
    hand.launch(2, 1, turn=0)
    hand.finish(13.5, 1, (3, 13), wait=2)
    hand.process(15.5, 1)
    hand.plan(17, 2)
    hand.launch(18, 2, turn=16)
    hand.finish(29.5, 2, (19, 29), wait=18)
    hand.process(31.5, 2, "a")
    hand.idle(32)
    return hand


def overlap_loop() -> Hand:
    """Three forwards back to back from 3 to 33; the host works 2 to 9 and 13.5 to 20, all of it behind them.

    0 turn | 1 planned | 2 launched bid 1 | 3 turn | 4 planned | 5 launched bid 2 | waits 5 to 13.5 | processes
    bid 1 to 15.5 | streams to 16 | 16 turn | 17 planned | 18 launched bid 3 | waits 18 to 23.5 | ...
    """
    hand = Hand()
    hand.enter(0.5, "a", taken=0.25)
    hand.plan(1, 1, "extend")
    hand.launch(2, 1, turn=0)
    hand.plan(4, 2)
    hand.launch(5, 2, turn=3)
    hand.finish(13.5, 1, (3, 13), wait=5)
    hand.process(15.5, 1)
    hand.at(16, OutputStreamed(rids=("a",), tokens=(1,), finished=(False,)))
    hand.plan(17, 3)
    hand.launch(18, 3, turn=16)
    hand.finish(23.5, 2, (13, 23), wait=18)
    hand.process(25, 2)
    hand.finish(33.5, 3, (23, 33), wait=26)
    hand.process(34, 3, "a")
    hand.idle(35)
    return hand
