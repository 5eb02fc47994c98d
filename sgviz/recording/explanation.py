"""Explanation: where one request's time went, as intervals with causes that lie end to end.

Mirrors what SGLang's time_stats and its log lines leave to the reader to guess. Everything here is a value;
`explain` makes it.

Imports: msgspec.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import msgspec


class Cause(StrEnum):
    """What an interval of a request's life went into, in about the order of a life."""

    CONVERT = "convert"
    TOKENIZE = "tokenize"
    DISPATCH = "dispatch"
    CONTROLLER = "controller"
    INBOX = "inbox"
    INTAKE = "intake"
    BOOTSTRAP = "bootstrap"
    PREALLOC = "prealloc"
    AWAITS_KV = "awaits_kv"
    PLANNING = "planning"
    KV = "kv"
    ROWS = "rows"
    RUNNING_SLOTS = "running_slots"
    CHUNK_BUDGET = "chunk_budget"
    PREFILL_BUDGET = "prefill_budget"
    MAX_REQUESTS = "max_requests"
    OTHER_KIND = "other_kind"
    HEAD_OF_LINE = "head_of_line"
    POLICY_ORDER = "policy_order"
    PRIORITY = "priority"
    PAUSED = "paused"
    GRAMMAR = "grammar"
    PREFETCH = "prefetch"
    NEVER_FITS = "never_fits"
    RETRACTION = "retraction"
    PARKED = "parked"
    SCHEDULING = "scheduling"
    PREFILL = "prefill"
    RECOMPUTE = "recompute"
    DECODE = "decode"
    DECODE_BESIDE_PREFILL = "decode_beside_prefill"
    STALLED_BY_PREFILL = "stalled_by_prefill"
    DEVICE_BUSY = "device_busy"
    TRANSFER = "transfer"
    HANDOVER = "handover"
    PROCESSING = "processing"
    LOOP = "loop"
    SEND = "send"
    DETOKENIZE = "detokenize"
    DELIVER = "deliver"
    RESPOND = "respond"
    CLIENT = "client"
    CHILDREN = "children"
    ROUTE = "route"
    ATTEMPT = "failed_attempt"
    UNEXPLAINED = "unexplained"


MEANINGS: dict[Cause, str] = {
    Cause.CONVERT: "the HTTP body is checked and turned into an engine request",
    Cause.TOKENIZE: "text becomes token ids",
    Cause.DISPATCH: "the tokenized request is put into the scheduler's socket",
    Cause.CONTROLLER: "the data parallel controller chooses a rank",
    Cause.INBOX: "it lies in the scheduler's inbox until the loop's next turn",
    Cause.INTAKE: "the scheduler makes a Req of it",
    Cause.BOOTSTRAP: "the prefill and the decode server find each other",
    Cause.PREALLOC: "room for its KV is awaited on the decode server",
    Cause.AWAITS_KV: "the decode server has room, and the prefill server has not begun to send",
    Cause.PLANNING: "it waits for the planning of this turn",
    Cause.KV: "too few KV tokens",
    Cause.ROWS: "no row for a further request",
    Cause.RUNNING_SLOTS: "all running slots are taken",
    Cause.CHUNK_BUDGET: "the chunk budget of the batch is used up",
    Cause.PREFILL_BUDGET: "the prefill token budget of the batch is used up",
    Cause.MAX_REQUESTS: "the batch has as many requests as it may",
    Cause.OTHER_KIND: "a batch is for tokens or for vectors, and this one is of the other kind",
    Cause.HEAD_OF_LINE: "it stands behind a request that cannot be taken",
    Cause.POLICY_ORDER: "the policy puts requests before it that came later",
    Cause.PRIORITY: "requests of a higher priority go first",
    Cause.PAUSED: "the engine is paused",
    Cause.GRAMMAR: "its grammar is being compiled",
    Cause.PREFETCH: "its prefix is being fetched",
    Cause.NEVER_FITS: "it can never fit, and is refused",
    Cause.RETRACTION: "it gave up its KV and waits to be taken again",
    Cause.PARKED: "parked by a debugger: the scheduler stands still",
    Cause.SCHEDULING: "the scheduler plans and launches a batch",
    Cause.PREFILL: "its prompt is computed",
    Cause.RECOMPUTE: "what a retraction threw away is computed again",
    Cause.DECODE: "one token is computed",
    Cause.DECODE_BESIDE_PREFILL: "one token is computed in a batch that also computes prompts",
    Cause.STALLED_BY_PREFILL: "the device computes the prompts of others",
    Cause.DEVICE_BUSY: "the device runs a batch without it",
    Cause.TRANSFER: "its KV travels from the prefill to the decode server",
    Cause.HANDOVER: "a batch is on its way to the device, or its result back",
    Cause.PROCESSING: "a result is put into the requests",
    Cause.LOOP: "the scheduler sends output, takes in messages and begins its next turn",
    Cause.SEND: "the last tokens are sent to the detokenizer",
    Cause.DETOKENIZE: "token ids become text (a vector is passed on)",
    Cause.DELIVER: "the text goes to the tokenizer manager",
    Cause.RESPOND: "the answer is put into HTTP (one of several answers waits here for the others)",
    Cause.CLIENT: "the client takes the rest of the answer",
    Cause.CHILDREN: "it is done and waits for the other samples or prompts of its answer",
    Cause.ROUTE: "the router passes it on",
    Cause.ATTEMPT: "the router gave it to a pair of servers that failed",
    Cause.UNEXPLAINED: "no event explains it",
}

WAITS = frozenset({
    Cause.PLANNING, Cause.KV, Cause.ROWS, Cause.RUNNING_SLOTS, Cause.CHUNK_BUDGET, Cause.PREFILL_BUDGET,
    Cause.MAX_REQUESTS, Cause.OTHER_KIND, Cause.HEAD_OF_LINE, Cause.POLICY_ORDER, Cause.PRIORITY, Cause.PAUSED,
    Cause.GRAMMAR, Cause.PREFETCH, Cause.NEVER_FITS, Cause.RETRACTION, Cause.PARKED,
})  # fmt: skip
STEPS = frozenset({
    Cause.SCHEDULING, Cause.HANDOVER, Cause.PROCESSING, Cause.LOOP, Cause.DECODE, Cause.DECODE_BESIDE_PREFILL,
    Cause.DEVICE_BUSY,
})  # fmt: skip


class Part(msgspec.Struct, frozen=True, gc=False):
    """One interval: `start_ns` (monotonic), `duration_ns`, its `cause`, and the rids that it waited for.

    `detail` names numbers and holders in words; `bid` is the batch it has to do with (0: none). `side`: where it was
    spent, if two servers were recorded: router, prefill, decode or transfer.
    """

    start_ns: int
    duration_ns: int
    cause: Cause
    blockers: tuple[str, ...] = ()
    detail: str = ""
    bid: int = 0
    side: str = ""

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where the time of `rid` went: `parts` from its arrival to its last byte, without gap or overlap.

    `total_ns` is their sum. `refused` says why it was not taken (empty: it was).
    `done` is False when the request was still under way at the end of the recording.
    """

    rid: str
    total_ns: int
    parts: tuple[Part, ...]
    done: bool = True
    refused: str = ""

    @property
    def start_ns(self) -> int:
        return self.parts[0].start_ns if self.parts else 0

    def by_cause(self) -> dict[Cause, int]:
        """Nanoseconds by cause, largest first."""
        sums: dict[Cause, int] = {}
        for part in self.parts:
            sums[part.cause] = sums.get(part.cause, 0) + part.duration_ns
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    @property
    def unexplained_ns(self) -> int:
        return sum(part.duration_ns for part in self.parts if part.cause is Cause.UNEXPLAINED)

    def blockers(self) -> dict[str, int]:
        """Nanoseconds waited for each request; a wait for several counts for each of them."""
        sums: dict[str, int] = {}
        for part in self.parts:
            for rid in part.blockers:
                sums[rid] = sums.get(rid, 0) + part.duration_ns
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def stretches(self) -> list[Part]:
        """The parts with the beat of decoding joined: a run of steps is one stretch named after its largest."""
        return list(_joined(self.parts))

    def text(self, width: int = 110) -> str:
        """In plain words; see `explain_text`."""
        from sgviz.recording.explain_text import explanation_text

        return explanation_text(self, width)

    def __str__(self) -> str:
        return self.text()


def counted(count: int, what: str, plural: str = "s") -> str:
    """`1 decode step`, `1,200 decode steps`."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}{plural}"


def plain_ms(ns: int) -> str:
    """Milliseconds to three digits or more, never with an exponent: `3,260 ms`, `12.3 ms`, `0.012 ms`."""
    ms = ns / 1e6
    digits = 0 if ms >= 100 else 1 if ms >= 10 else 2 if ms >= 1 else 3
    return f"{ms:,.{digits}f} ms"


def _joined(parts: Iterable[Part]) -> Iterable[Part]:
    run: list[Part] = []
    for part in parts:
        if part.cause in STEPS and (not run or run[-1].side == part.side):
            run.append(part)
            continue
        if part.cause in STEPS:
            yield from _stretch(run)
            run = [part]
            continue
        yield from _stretch(run)
        run = []
        yield part
    yield from _stretch(run)


def _stretch(run: list[Part]) -> Iterable[Part]:
    if len(run) < 2:
        yield from run
        return
    sums: dict[Cause, int] = {}
    for part in run:
        sums[part.cause] = sums.get(part.cause, 0) + part.duration_ns
    largest = max(sums, key=lambda cause: sums[cause])
    steps = len({part.bid for part in run if part.cause in (Cause.DECODE, Cause.DECODE_BESIDE_PREFILL)})
    spent = ", ".join(
        f"{cause} {plain_ms(ns)}" for cause, ns in sorted(sums.items(), key=lambda item: -item[1])
    )
    total = sum(sums.values())
    detail = f"{counted(steps, 'decode step')}: {spent}" if steps else spent
    yield Part(run[0].start_ns, total, largest, run[0].blockers if not steps else (), detail, 0, run[0].side)
