"""The audit of a run from its events alone: every slot, page, row, lock and request, and who breaks the books.

Each rule is checked at the event that could break it, so a finding names that event. Mirrors the spirit of
SGLang's check_memory, which looks at sums when idle and can name nobody.

Imports: events, recording.books.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from sgviz.events.schema import (
    CacheFlushed,
    DisaggBootstrapped,
    DisaggPreallocated,
    DisaggQueued,
    DisaggTransferred,
    DpRankChanged,
    EngineConfigured,
    Event,
    KvReceived,
    KvSent,
    LimitsChanged,
    LoopIdle,
    OutputStreamed,
    PoolReturned,
    PoolTaken,
    QueueEntered,
    RequestAborted,
    RequestDispatched,
    RequestFinished,
    RequestReceived,
    RequestTokenized,
    RouterFailed,
    RouterPaired,
    RowReturned,
    RowTaken,
    TraceDropped,
    TreeEvicted,
    TreeInserted,
    TreeLocked,
    TreeSplit,
)
from sgviz.recording.books import Books, Finding

SCHEDULER = "scheduler"


@dataclass(frozen=True, slots=True)
class AuditReport:
    """`findings` in the order of time, at most 50. `audited` of `events` were checked: none after a loss.

    `live`: requests that had not ended; what they hold is no fault.
    """

    findings: tuple[Finding, ...]
    events: int
    audited: int
    live: tuple[str, ...]

    @property
    def balanced(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        rest = "" if self.audited == self.events else f" (events were lost after {self.audited})"
        if self.balanced:
            return f"the books of {self.audited} events balance{rest}"
        return "\n".join(
            [f"{len(self.findings)} findings in {self.audited} events{rest}:", *map(str, self.findings)]
        )


class Auditor:
    """An audit that goes on while events come: `add` them in the order of time, ask for the `report` at any moment.

    Args:
        configured: the sizes, where the events themselves do not hold them.
    """

    def __init__(self, configured: EngineConfigured | None = None) -> None:
        self._books = books = Books()
        transfers = books.transfers
        if configured is not None:
            books.configure(configured)
        self._handlers: dict[type, Callable[[Any], None]] = {
            EngineConfigured: books.configure, PoolTaken: books.taken, PoolReturned: books.returned,
            TreeInserted: books.inserted, TreeSplit: books.split, TreeEvicted: books.evicted,
            TreeLocked: books.locked, CacheFlushed: books.flushed, RowTaken: books.row_taken,
            RowReturned: books.row_returned, QueueEntered: books.entered, OutputStreamed: books.streamed,
            RequestAborted: books.aborted, RequestFinished: books.finished_at_tm, LoopIdle: books.idle,
            LimitsChanged: books.shrunk, RequestReceived: books.ends.received, RequestTokenized: books.went_on,
            RequestDispatched: books.went_on, DpRankChanged: books.rank_changed, DisaggQueued: books.disagg_queued,
            DisaggBootstrapped: transfers.bootstrapped, DisaggPreallocated: transfers.preallocated,
            DisaggTransferred: transfers.transferred, KvSent: transfers.sent, KvReceived: transfers.received,
            RouterPaired: books.router.paired, RouterFailed: books.router.failed,
        }  # fmt: skip
        self._last_seq: dict[str, int] = {}
        self._total = self._audited = 0
        self._lost = False

    def add(self, events: Iterable[Event]) -> None:
        """Check further events. After a loss of events the rest cannot be checked and is not."""
        for event in events:
            self._total += 1
            gap = event.seq > self._last_seq.get(event.component, 0) + 1
            self._lost = self._lost or gap or isinstance(event.body, TraceDropped)
            self._last_seq[event.component] = event.seq
            if self._lost:
                continue
            if self._books.gone and event.component == SCHEDULER:
                self._audited += 1  # the last words of a scheduler that was given up
                continue
            self._audited += 1
            handler = self._handlers.get(type(event.body))
            if handler is not None:
                self._books.event = event
                handler(event.body)

    def report(self) -> AuditReport:
        """What was found so far, with the books balanced once more."""
        books = self._books
        if not self._lost:
            books.balance()
        return AuditReport(tuple(books.findings), self._total, self._audited, tuple(books.live))


def audit(events: Iterable[Event], configured: EngineConfigured | None = None) -> AuditReport:
    """Check the books of a run. After a loss of events the rest cannot be checked and is not."""
    auditor = Auditor(configured)
    auditor.add(events)
    return auditor.report()
