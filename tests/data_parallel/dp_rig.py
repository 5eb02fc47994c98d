"""A controller between boxes: no sockets, no time but a virtual clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from sgviz.data_parallel.controller import DataParallelController
from sgviz.data_parallel.load_snapshots import SnapshotList
from sgviz.data_parallel.policies import DispatchPolicy, RoundRobin
from sgviz.errors import Unavailable
from sgviz.events import RingSink, TimeStats, Tracer, VirtualClock
from sgviz.messages import RoutedReq, SamplingParams, TokenizedGenerateReqInput


@dataclass
class Box:
    """What was sent to somebody; `gone`: nobody is there."""

    messages: list[Any] = field(default_factory=list)
    gone: bool = False

    def send(self, message: msgspec.Struct) -> None:
        if self.gone:
            raise Unavailable("gone")
        self.messages.append(message)

    def drain(self, limit: int = 1024) -> list[Any]:
        out, self.messages = self.messages[:limit], self.messages[limit:]
        return out

    def wait(self, timeout_ms: int) -> bool:
        return bool(self.messages)

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.messages if isinstance(message, kind)]


class Rig:
    def __init__(
        self, ranks: int, policy: DispatchPolicy | None = None, *, one_process: bool = False
    ) -> None:
        self.inbox, self.to_tokenizer, self.to_detokenizer = Box(), Box(), Box()
        self.ranks = [Box() for _ in range(ranks)]
        self.loads, self.clock, self.ring = SnapshotList(ranks), VirtualClock(1), RingSink()
        self.controller = DataParallelController(
            inbox=self.inbox,
            ranks=self.ranks,
            to_tokenizer=self.to_tokenizer,
            to_detokenizer=self.to_detokenizer,
            policy=policy or RoundRobin(),
            loads=self.loads,
            trace=Tracer("data_parallel_controller", self.ring, self.clock),
            one_process=one_process,
        )

    def send(self, *messages: Any) -> None:
        self.controller.take(messages)

    def bodies(self, kind: type) -> list[Any]:
        return [event.body for event in self.ring.snapshot() if isinstance(event.body, kind)]

    def routed(self) -> dict[str, int]:
        """By rid, as the TokenizerManager was told."""
        told = self.to_tokenizer.of(RoutedReq)
        return {rid: rank for each in told for rid, rank in zip(each.rids, each.dp_ranks)}


def request(rid: str, tokens: int = 1, **fields: Any) -> TokenizedGenerateReqInput:
    return TokenizedGenerateReqInput(
        rid=rid,
        input_ids=[0] * tokens,
        sampling_params=SamplingParams(),
        stream=False,
        time_stats=TimeStats(created=len(rid) + tokens),
        **fields,
    )
