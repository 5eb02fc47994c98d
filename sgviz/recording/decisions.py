"""The scheduler's decisions and the tokens' ways as tables. Times end in `_ms` from the first event.

Mirrors the AddReqResult that SGLang's adder returns and forgets, with names and numbers.

Imports: events, recording, pandas.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, get_args

import pandas as pd

from sgviz.events.schema import (
    AdmitOk,
    AdmitRefused,
    AdmitRepeated,
    ChunkCut,
    ChunkSent,
    Event,
    ForwardsSlowed,
    OutputReceived,
    OutputStreamed,
    PolicyFailed,
    PrefixMatched,
    ProfileEnded,
    ProfileStarted,
    QueueEntered,
    Reason,
    RequestAborted,
    RequestRetracted,
    ScanStopped,
    TextEmitted,
    TokensSampled,
    WeightsRenamed,
    WeightsUpdated,
)

NS_PER_MS = 1e6
DECISION_COLUMNS = (
    "first_ms", "last_ms", "iteration", "rid", "verdict", "reason", "count", "need", "have", "last_need",
    "last_have", "holders", "extend", "prefix", "chunked", "behind", "node", "chunk_end", "chunk_total",
)  # fmt: skip
TOKEN_COLUMNS = (
    "rid", "index", "token_id", "bid", "sampled_ms", "streamed_ms", "detokenized_ms", "received_ms", "sent_ms",
)  # fmt: skip

Operation = ForwardsSlowed | ProfileStarted | ProfileEnded | WeightsUpdated | WeightsRenamed


@dataclass(slots=True)
class _Row:
    first: int
    last: int
    iteration: int
    rid: str
    verdict: str
    reason: str = ""
    count: int = 1
    need: int | None = None
    have: int | None = None
    last_need: int | None = None
    last_have: int | None = None
    holders: tuple[tuple[str, int], ...] = ()
    extend: int | None = None
    prefix: int | None = None
    chunked: bool = False
    behind: int | None = None
    node: int | None = None
    chunk_end: int | None = None
    chunk_total: int | None = None


@dataclass(slots=True)
class _Decisions:
    rows: list[_Row] = field(default_factory=list)
    open: dict[tuple[str, str], _Row] = field(default_factory=dict)
    matched: dict[str, int] = field(default_factory=dict)

    def prefix_matched(self, event: Event, body: PrefixMatched) -> None:
        self.matched[body.rid] = body.node

    def cut(self, event: Event, body: ChunkCut) -> None:
        last = self.rows[-1] if self.rows else None
        if last is not None and last.rid == body.rid and last.verdict == "admitted":
            last.chunk_end, last.chunk_total = body.end, body.total

    def policy_failed(self, event: Event, body: PolicyFailed) -> None:
        reason = f"{body.policy}: {body.fault}"
        self.rows.append(_Row(event.t, event.t, event.iteration, "", "policy failed", reason))

    def told(self, event: Event, body: Operation) -> None:
        """What an operator did: once, however many processes tell of their part in it."""
        if isinstance(body, WeightsRenamed) and body.of_worker:
            return
        verdict, reason = _operation(body)
        self.rows.append(_Row(event.t, event.t, event.iteration, "", verdict, reason))

    def admitted(self, event: Event, body: AdmitOk) -> None:
        for key in [key for key in self.open if key[0] == body.rid]:
            del self.open[key]
        self.rows.append(_Row(
            event.t, event.t, event.iteration, body.rid, "admitted", "", 1, body.need, body.have, body.need,
            body.have, (), body.extend, body.prefix, body.chunked, node=self.matched.pop(body.rid, None),
        ))  # fmt: skip

    def refused(self, event: Event, body: AdmitRefused) -> None:
        row = self.open.get((body.rid, body.reason))
        if row is None:
            row = self._begin(event, body.rid, "refused", body.reason)
            row.need, row.have, row.holders = body.need, body.have, body.holders
        else:
            row.count, row.last = row.count + 1, event.t
        row.last_need, row.last_have = body.need, body.have

    def repeated(self, event: Event, body: AdmitRepeated) -> None:
        row = self.open.get((body.rid, body.reason))
        if row is not None:
            row.count, row.last = row.count + body.count, max(row.last, body.last_ns)
            row.last_need, row.last_have = body.need, body.have

    def stopped(self, event: Event, body: ScanStopped) -> None:
        row = self.open.get((body.rid, body.reason))
        if row is None:
            row = self._begin(event, body.rid, "not tried", body.reason)
        elif row.verdict == "not tried":
            row.count, row.last = row.count + 1, event.t
        row.behind = body.behind
        if body.passed and (body.passed, Reason.OTHER_KIND) not in self.open:
            self._begin(event, body.passed, "not tried", Reason.OTHER_KIND)

    def _begin(self, event: Event, rid: str, verdict: str, reason: str) -> _Row:
        row = _Row(event.t, event.t, event.iteration, rid, verdict, str(reason))
        self.rows.append(row)
        self.open[rid, reason] = row
        return row

    def retracted(self, event: Event, body: RequestRetracted) -> None:
        self.rows.append(_Row(
            event.t, event.t, event.iteration, body.rid, "retracted", _why_back(body), 1,
            body.need, body.have, body.need, body.have, ((body.preempted_by, body.need),) if body.preempted_by else (),
        ))  # fmt: skip

    def aborted(self, event: Event, body: RequestAborted) -> None:
        if event.component == "scheduler":
            reason = str(body.reason or body.where)
            self.rows.append(_Row(event.t, event.t, event.iteration, body.rid, "aborted", reason))


def _operation(body: Operation) -> tuple[str, str]:
    match body:
        case ForwardsSlowed():
            return "slowed down", f"each forward waits {body.sleep_s:g} s"
        case ProfileStarted():
            return "profile started", body.path
        case ProfileEnded():
            return "profile ended", body.error or body.path
        case WeightsUpdated():
            return "weights updated", f"{body.weight_version}: {body.model_path}"
    return "weights renamed", f"{body.weight_version}, before {body.before}"


def _why_back(body: RequestRetracted) -> str:
    if body.paused:
        return "paused"
    return "priority" if body.preempted_by else "kv"


def decisions_table(events: Iterable[Event], t0: int) -> pd.DataFrame:
    """One row a verdict of admission; a refusal that repeats is one row with `count`, first and last numbers.

    `verdict`: admitted, refused, not tried (planning stopped before it), retracted, aborted, policy failed
    (`reason` says how); or what an operator did, with no rid: slowed down, profile started, profile ended, weights
    updated, weights renamed (`reason` says to what). `need`/`have`
    in the unit of the reason (tokens, rows, requests); `holders`: `(rid, amount)`, largest first (of a preempted one:
    for whom it was sent back); `behind`:
    requests that were not tried because of it. Of an admission: `node`, where its cached prefix ends in the
    tree, and for a piece of a prompt its end and the whole length (`chunk_end`, `chunk_total`).
    """
    made = _Decisions()
    handlers: dict[type, Callable[[Event, Any], None]] = {
        AdmitOk: made.admitted, AdmitRefused: made.refused, AdmitRepeated: made.repeated,
        ScanStopped: made.stopped, RequestRetracted: made.retracted,
        PrefixMatched: made.prefix_matched, ChunkCut: made.cut,
        PolicyFailed: made.policy_failed, RequestAborted: made.aborted,
        **dict.fromkeys(get_args(Operation), made.told),
    }  # fmt: skip
    for event in events:
        handler = handlers.get(type(event.body))
        if handler is not None:
            handler(event, event.body)
    rows = [
        (
            (row.first - t0) / NS_PER_MS, (row.last - t0) / NS_PER_MS, row.iteration, row.rid, row.verdict,
            row.reason, row.count, row.need, row.have, row.last_need, row.last_have, row.holders, row.extend,
            row.prefix, row.chunked, row.behind, row.node, row.chunk_end, row.chunk_total,
        )
        for row in made.rows
    ]  # fmt: skip
    whole = (
        "need",
        "have",
        "last_need",
        "last_have",
        "extend",
        "prefix",
        "behind",
        "node",
        "chunk_end",
        "chunk_total",
    )
    return pd.DataFrame(rows, columns=list(DECISION_COLUMNS)).astype(dict.fromkeys(whole, "Int64"))


@dataclass(slots=True)
class _Way:
    """The tokens of one life of a request: their rows, and how far each stage has come."""

    rows: list[int] = field(default_factory=list)
    streamed: int = 0
    detokenized: int = 0
    received: int = 0
    sent: int = 0
    counts: deque[int] = field(default_factory=deque)


class _Tokens:
    def __init__(self) -> None:
        self.columns: list[list[Any]] = [[] for _ in TOKEN_COLUMNS]
        self.ways: dict[str, _Way] = {}

    def entered(self, t: int, body: QueueEntered) -> None:
        if not body.again:
            self.ways[body.rid] = _Way()

    def _way(self, rid: str) -> _Way:
        return self.ways.setdefault(rid, _Way())

    def sampled(self, t: int, body: TokensSampled) -> None:
        rids, index, ids, bids, times, *later = self.columns
        for rid, token in zip(body.rids, body.token_ids):
            way = self._way(rid)
            index.append(len(way.rows))
            way.rows.append(len(rids))
            rids.append(rid)
            ids.append(token)
            bids.append(body.bid)
            times.append(t)
            for column in later:
                column.append(0)

    def streamed(self, t: int, body: OutputStreamed) -> None:
        for rid, count in zip(body.rids, body.tokens):
            way = self._way(rid)
            way.counts.append(count)
            way.streamed = self._stamp(5, way.rows, way.streamed, count, t)

    def emitted(self, t: int, body: TextEmitted) -> None:
        for rid in body.rids:
            way = self._way(rid)
            count = way.counts.popleft() if way.counts else 0
            way.detokenized = self._stamp(6, way.rows, way.detokenized, count, t)

    def received(self, t: int, body: OutputReceived) -> None:
        for rid, count in zip(body.rids, body.tokens):
            way = self._way(rid)
            way.received = self._stamp(7, way.rows, way.received, count, t)

    def sent(self, t: int, body: ChunkSent) -> None:
        way = self.ways.get(body.rid)
        if way is not None and body.part in ("delta", "reasoning", "tool_call", "body", "finish"):
            way.sent = self._stamp(8, way.rows, way.sent, way.received - way.sent, t)

    def _stamp(self, column: int, rows: list[int], start: int, count: int, t: int) -> int:
        end = min(start + count, len(rows))
        stamps = self.columns[column]
        for row in rows[start:end]:
            stamps[row] = t
        return end


def tokens_table(events: Iterable[Event], t0: int) -> pd.DataFrame:
    """One row a sampled token, in the order of sampling: when it was sampled, streamed, detokenized, received by
    the tokenizer manager and first sent to the client (NaN: not seen).

    `index` counts the request's outputs. `sent_ms` is the first chunk after its text had arrived; text that
    was held back (half a character, a possible stop string) goes with a later one.
    """
    made = _Tokens()
    handlers: dict[type, Callable[[int, Any], None]] = {
        QueueEntered: made.entered, TokensSampled: made.sampled, OutputStreamed: made.streamed,
        TextEmitted: made.emitted, OutputReceived: made.received, ChunkSent: made.sent,
    }  # fmt: skip
    for event in events:
        handler = handlers.get(type(event.body))
        if handler is not None:
            handler(event.t, event.body)
    table = pd.DataFrame(dict(zip(TOKEN_COLUMNS, made.columns)), columns=list(TOKEN_COLUMNS))
    for name in TOKEN_COLUMNS[4:]:
        stamps = table[name].astype("int64")
        table[name] = ((stamps - t0) / NS_PER_MS).where(stamps > 0, math.nan)
    return table
