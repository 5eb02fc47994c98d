"""Two runs of the same workload, request by request: the first decision that differs, who got slower, and why.

Requests are aligned by rid, or by prompt where rids differ (`alignment`); then those of `b` go by their names
in `a`. Mirrors nothing of SGLang, where two benchmark outputs are compared by their means.

Imports: events, recording, pandas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

from sgviz.events.schema import (
    AdmitOk,
    AdmitRefused,
    BatchPlanned,
    Event,
    QueueSorted,
    Reason,
    RequestAborted,
    RequestRetracted,
    ScanStopped,
)
from sgviz.recording.alignment import AlignedBy, align
from sgviz.recording.explanation import Cause, Explanation
from sgviz.recording.requests import RequestState

if TYPE_CHECKING:
    from sgviz.recording.recording import Recording

NS_PER_MS = 1e6
CAUSES = 6  # named one by one in the text
Decision = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The `number`-th decision (from 1) is `a` in one run and `b` in the other ("": the run has no more).

    `t_ms_*` count from each run's first event, `iteration_*` are turns of the loop.
    """

    number: int
    a: str
    b: str
    iteration_a: int
    iteration_b: int
    t_ms_a: float
    t_ms_b: float


@dataclass(frozen=True, slots=True)
class Diff:
    """`a` compared with `b`.

    Attributes:
        first: the first decision that differs; None when all are the same.
        requests: one row a common request, largest change first: `rid` (in a), `rid_b`, `total_ms_a`,
            `total_ms_b`, `change_ms` (b - a), `cause` (the one that changed most in that direction),
            `cause_ms` (by how much), `blockers` (whom it waited for more in the slower run), then
            `<cause>_ms`, the change by cause.
        only_a, only_b: rids of one run alone. aligned_by: how the others were paired.
    """

    a: Recording
    b: Recording
    first: FirstDifference | None
    requests: pd.DataFrame
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    aligned_by: AlignedBy = AlignedBy.RID

    def slower(self, count: int = 10) -> pd.DataFrame:
        """The requests that took longest more in `b`."""
        return self.requests[self.requests.change_ms > 0].head(count)

    def by_cause(self) -> dict[str, float]:
        """Change in ms by cause over all common requests, largest first."""
        sums = {cause: float(self.requests[f"{cause}_ms"].sum()) for cause in map(str, Cause)}
        return {cause: ms for cause, ms in sorted(sums.items(), key=lambda item: -abs(item[1])) if ms}

    def text(self, count: int = 10) -> str:
        """In plain words."""
        return "\n".join(_lines(self, count))

    def __str__(self) -> str:
        return self.text()


def diff(a: Recording, b: Recording) -> Diff:
    """Align two recordings and compare them."""
    a, b = a.freeze(), b.freeze()
    found = align(_requests(a), _requests(b))
    names = found.of_b
    rows = [_row(a.explain(rid), b.explain(other), names) for rid, other in found.pairs.items()]
    columns = ["rid", "rid_b", "total_ms_a", "total_ms_b", "change_ms", "cause", "cause_ms", "blockers"]
    table = pd.DataFrame(rows, columns=[*columns, *(f"{cause}_ms" for cause in Cause)])
    table = table.sort_values("change_ms", key=lambda change: -change.abs(), ignore_index=True, kind="stable")
    return Diff(
        a, b, first_difference(a, b, names), table,
        tuple(rid for rid in a.rids if rid not in found.pairs),
        tuple(rid for rid in b.rids if rid not in names),
        found.by,
    )  # fmt: skip


def _requests(rec: Recording) -> dict[str, RequestState]:
    return {rid: rec.request(rid) for rid in rec.rids}


def _row(a: Explanation, b: Explanation, names: Mapping[str, str]) -> tuple[object, ...]:
    was, now = a.by_cause(), b.by_cause()
    change = {cause: now.get(cause, 0) - was.get(cause, 0) for cause in Cause}
    total = b.total_ns - a.total_ns
    sign = 1 if total >= 0 else -1
    cause = max(change, key=lambda each: sign * change[each])
    ours, theirs = a.blockers(), {names.get(rid, rid): ns for rid, ns in b.blockers().items()}
    slow, fast = (theirs, ours) if total >= 0 else (ours, theirs)
    more = {rid: ns - fast.get(rid, 0) for rid, ns in slow.items() if ns > fast.get(rid, 0)}
    blockers = tuple(sorted(more, key=lambda rid: (-more[rid], rid))[:3])
    return (
        a.rid, b.rid, a.total_ns / NS_PER_MS, b.total_ns / NS_PER_MS, total / NS_PER_MS,
        str(cause) if change[cause] else "", change[cause] / NS_PER_MS, blockers,
        *(change[each] / NS_PER_MS for each in Cause),
    )  # fmt: skip


# ---------------------------------------------------------------- decisions


def first_difference(a: Recording, b: Recording, names: Mapping[str, str]) -> FirstDifference | None:
    """The first place where the two sequences of decisions part. `names`: what b's rids are called in a."""
    ours, theirs = list(_decisions(a.stamped(), {})), list(_decisions(b.stamped(), names))
    for number in range(max(len(ours), len(theirs))):
        one = ours[number] if number < len(ours) else None
        two = theirs[number] if number < len(theirs) else None
        if one is None or two is None or one[0] != two[0]:
            return FirstDifference(
                number + 1, _words(one), _words(two), one[1].iteration if one else 0, two[1].iteration if two else 0,
                (one[1].t - a.t0) / NS_PER_MS if one else 0.0, (two[1].t - b.t0) / NS_PER_MS if two else 0.0,
            )  # fmt: skip
    return None


def _decisions(events: Iterable[Event], names: Mapping[str, str]) -> Iterable[tuple[Decision, Event]]:
    """What was decided, without the numbers that led to it and without time, rids as `names` calls them."""

    def called(rid: str) -> str:
        return names.get(rid, rid)

    for event in events:
        body = event.body
        match body:
            case AdmitOk():
                yield ("admit", called(body.rid), body.prefix, body.extend), event
            case AdmitRefused():
                yield ("refuse", called(body.rid), str(body.reason)), event
            case ScanStopped():
                if body.passed:
                    yield ("stop", called(body.passed), str(Reason.OTHER_KIND)), event
                yield ("stop", called(body.rid), str(body.reason)), event
            case QueueSorted():
                yield ("sort", *(called(rid) for rid, _, _ in body.moves)), event
            case RequestRetracted():
                yield ("retract", called(body.rid), body.output_tokens), event
            case RequestAborted() if event.component == "scheduler":
                yield ("abort", called(body.rid), body.where), event
            case BatchPlanned():
                yield ("batch", body.mode, tuple(map(called, body.rids)), body.extend_lens), event


def _words(decision: tuple[Decision, Event] | None) -> str:
    if decision is None:
        return ""
    match decision[0]:
        case ("admit", rid, prefix, extend):
            return f"admit {rid} with {extend} new and {prefix} cached tokens"
        case ("refuse", rid, reason):
            return f"refuse {rid} for {reason}"
        case ("stop", rid, reason):
            return f"stop planning at {rid} for {reason}"
        case ("sort", *rids):
            return f"reorder the queue: {', '.join(map(str, rids[:5]))}" + (" …" if len(rids) > 5 else "")
        case ("retract", rid, tokens):
            return f"retract {rid} after {tokens} output tokens"
        case ("abort", rid, where):
            return f"abort {rid} ({where})"
        case ("batch", mode, tuple() as rids, tuple() as extends):
            names = ", ".join(map(str, rids[:5])) + (" …" if len(rids) > 5 else "")
            return f"run {len(rids)} requests ({mode}, {sum(extends)} new tokens): {names}"
    return str(decision[0])


def _lines(found: Diff, count: int) -> Iterable[str]:
    table = found.requests
    paired = f"{len(table)} requests in both, aligned by {found.aligned_by.words}"
    yield f"a: {found.a.source}, b: {found.b.source}; {paired}"
    for name, rids in (("a", found.only_a), ("b", found.only_b)):
        if rids:
            yield f"only in {name}: {len(rids)} ({', '.join(rids[:5])}{' …' if len(rids) > 5 else ''})"
    first = found.first
    if first is None:
        yield "every decision is the same"
    else:
        yield f"the first decision that differs is number {first.number}:"
        yield f"  a: {first.a or '(none)'} (iteration {first.iteration_a}, {first.t_ms_a:.3f} ms)"
        yield f"  b: {first.b or '(none)'} (iteration {first.iteration_b}, {first.t_ms_b:.3f} ms)"
    if table.empty:
        return
    slower, faster = int((table.change_ms > 0).sum()), int((table.change_ms < 0).sum())
    yield f"in b {slower} are slower and {faster} faster; mean change {table.change_ms.mean():+.3f} ms, by cause:"
    causes = list(found.by_cause().items())
    rest = sum(ms for _, ms in causes[CAUSES:])
    for cause, ms in [*causes[:CAUSES], *([("all others", rest)] if causes[CAUSES:] else [])]:
        yield f"  {cause:<22} {ms / len(table):+.3f} ms a request"
    changed = table[table.change_ms != 0].head(count)
    if len(changed):
        yield "largest changes:"
    for row in changed.itertuples():
        who = f", for {', '.join(row.blockers)}" if row.blockers else ""
        yield (
            f"  {row.rid}: {row.total_ms_a:.3f} -> {row.total_ms_b:.3f} ms ({row.change_ms:+.3f}); "
            f"{row.cause} {row.cause_ms:+.3f} ms{who}"
        )
