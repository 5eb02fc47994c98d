"""One detokenizer behind several schedulers: when it leaves, and what it forgets of a lost one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from byte_bpe import ByteBpe

from sgviz.detokenizer_manager import DetokenizerManager
from sgviz.events import Tracer, VirtualClock
from sgviz.events.time_stats import TimeStats
from sgviz.messages import ActiveRanksOutput, BatchTokenIDOutput, FinishReason, ShutdownReq
from sgviz.scheduler.stops import Stop


@dataclass
class Box:
    messages: list[Any] = field(default_factory=list)

    def drain(self, limit: int = 1024) -> list[Any]:
        out, self.messages = self.messages[:1], self.messages[1:]
        return out

    def wait(self, timeout_ms: int) -> bool:
        return bool(self.messages)

    def send(self, message: Any) -> None:
        self.messages.append(message)


def output(
    rid: str, rank: int, *, first: bool = True, reason: FinishReason | None = None
) -> BatchTokenIDOutput:
    ids = [72, 105]
    return BatchTokenIDOutput(
        rids=[rid], finished_reasons=[reason], output_ids=[ids], prompt_tokens=[1], completion_tokens=[2],
        cached_tokens=[0], retraction_counts=[0], time_stats=[TimeStats()], decode_ids=[[65, *ids] if first else ids],
        read_offsets=[1], skip_special_tokens=[True], spaces_between_special_tokens=[True], no_stop_trim=[False],
        dp_rank=rank,
    )  # fmt: skip


def manager(ranks: int) -> tuple[DetokenizerManager, Box, Box]:
    inbox, outbox, clock = Box(), Box(), VirtualClock(1)
    made = DetokenizerManager(
        ByteBpe(),
        inbox,
        outbox,
        Tracer("detokenizer", None, clock),
        clock,
        ranks=ranks,  # type: ignore[arg-type]
    )
    return made, inbox, outbox


def run_until_idle(loop: Iterator[Stop]) -> bool:
    """Whether it goes on."""
    return any(stop is Stop.IDLE for stop in loop)


def test_it_leaves_when_the_last_rank_has() -> None:
    made, inbox, outbox = manager(3)
    loop = made.event_loop()
    inbox.messages = [ShutdownReq(), output("a", 2), ShutdownReq()]
    assert run_until_idle(loop) and [message.rids for message in outbox.messages] == [["a"]]
    inbox.messages = [output("a", 2, first=False), ShutdownReq(), output("late", 1)]
    assert not run_until_idle(loop)
    assert len(outbox.messages) == 2


def test_the_rank_is_passed_on() -> None:
    made, inbox, outbox = manager(2)
    inbox.messages = [output("a", 1), output("b", 0), ShutdownReq(), ShutdownReq()]
    made.run()
    assert [(message.rids, message.dp_rank) for message in outbox.messages] == [(["a"], 1), (["b"], 0)]


def test_a_lost_rank_is_forgotten_and_its_last_words_are_not_passed_on() -> None:
    made, inbox, outbox = manager(2)
    lost = ActiveRanksOutput(status=[True, False])
    inbox.messages = [
        output("a", 1),
        output("b", 0),
        lost,
        output("a", 1, first=False),
        output("b", 0, first=False),
    ]
    inbox.messages += [ShutdownReq(), ShutdownReq()]
    made.run()
    assert list(made.decode_status) == ["b"]
    assert [message.rids for message in outbox.messages] == [["a"], ["b"], ["b"]]
