"""The recordings of a prefill and a decode server (and of the router before them) as one run on one clock.

Times of the pair are on the prefill side's clock. SGLang leaves the two servers' logs to be joined by hand.
Imports: errors, events, recording, pandas.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import pandas as pd

from sgviz.errors import BadRequest, NotFound, suggest
from sgviz.events.schema import DisaggQueued, DisaggTransferred, Event
from sgviz.recording.audit import AuditReport
from sgviz.recording.books import Finding
from sgviz.recording.explanation import Explanation
from sgviz.recording.journey import TypeStep
from sgviz.recording.pair_clock import ClockFit, causal_bounds, fit
from sgviz.recording.pair_explain import Seen, both_sides, joined_journey
from sgviz.recording.pair_tables import pair_table
from sgviz.recording.recording import Recording, load
from sgviz.recording.routes import Routes
from sgviz.recording.store import Progress
from sgviz.recording.transfers import DECODE, PREFILL, Transfers

LISTED = 5


@dataclass(frozen=True, slots=True)
class PairAudit:
    """The audits of both sides (and of the router), and `findings` of what one side sent and the other did not get."""

    prefill: AuditReport
    decode: AuditReport
    findings: tuple[Finding, ...]
    router: AuditReport | None = None

    @property
    def balanced(self) -> bool:
        routed = self.router is None or self.router.balanced
        return self.prefill.balanced and self.decode.balanced and routed and not self.findings

    def __str__(self) -> str:
        lines = [f"prefill: {self.prefill}", f"decode: {self.decode}"]
        lines += [f"router: {self.router}"] if self.router is not None else []
        between = "\n".join(map(str, self.findings)) or "what was sent is what came"
        return "\n".join([*lines, f"between them: {between}"])


def load_pair(
    prefill: str | os.PathLike[str],
    decode: str | os.PathLike[str],
    router: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> PairedRecording:
    """Open the `.sgv` files of both servers, and of the router if there is one.

    Raises:
        SgvizError: as `load`. BadRequest: the files are swapped, no such sides, or share no request.
    """
    before = None if router is None else load(router, progress)
    return PairedRecording(load(prefill, progress), load(decode, progress), before)


class PairedRecording:
    """One run of two servers.

    Args:
        prefill, decode, router: recordings, live or from files.

    Attributes:
        clock, router_clock: how the decode side's and the router's times were put on the prefill side's.

    Raises:
        BadRequest: a recording is not of that side, or they have no request in common.
    """

    def __init__(self, prefill: Recording, decode: Recording, router: Recording | None = None) -> None:
        self.prefill = _of_side(prefill, PREFILL)
        self.decode = _of_side(decode, DECODE)
        self.router = router
        self._sent, self._came = _transfers(prefill), _transfers(decode)
        self.rids = _common(self)
        self.clock: ClockFit = fit(prefill, decode, causal_bounds(self._sent, self._came))
        self.router_clock: ClockFit | None = None if router is None else fit(prefill, router)
        shift = self.router_clock.shift_ns if self.router_clock is not None else 0
        self._routes = Routes(shift).read(() if router is None else router.stamped())

    def __repr__(self) -> str:
        sources = " + ".join(
            rec.source for rec in (self.router, self.prefill, self.decode) if rec is not None
        )
        return f"<PairedRecording {sources}: {len(self.rids)} requests on both sides; {self.clock.words}>"

    @property
    def t0(self) -> int:
        """The earliest event, on the pair's clock (ns)."""
        starts = [self.prefill.t0, self.decode.t0 + self.clock.shift_ns, self._routes.start]
        return min(start for start in starts if start is not None)

    @property
    def requests(self) -> pd.DataFrame:
        """One row a request of both sides; see `pair_tables.pair_table`."""
        return pair_table(self)

    def seen(self, rid: str) -> Seen:
        """The request as each side has it, under its whole name.

        Raises:
            NotFound: it is not on both sides.
        """
        name = rid if rid in self.rids else self._whole_name(rid)
        return Seen(
            rid=name,
            prefill=self.prefill.request(name),
            decode=self.decode.request(name),
            sent=self._sent.of(name),
            came=self._came.of(name),
            routed=self._routes.of(name),
            shift=self.clock.shift_ns,
            ranks=(self.prefill.rank_with(name), self.decode.rank_with(name)),
            several=len(self.prefill.ranks) + len(self.decode.ranks) > 2,
        )

    def explain(self, rid: str) -> Explanation:
        """From its arrival (at the router, if it was recorded) to its end on the decode side, without a gap.

        Each part says on which `side` the time was spent. Raises NotFound as `seen` does.
        """
        seen = self.seen(rid)
        return both_sides(seen, self.prefill.explain(seen.rid), self.decode.explain(seen.rid))

    def journey(self, rid: str) -> list[TypeStep]:
        """The types on both sides with the transfer between them, in the order of time. Raises as `seen` does."""
        seen = self.seen(rid)
        return joined_journey(seen, self.prefill.journey(seen.rid), self.decode.journey(seen.rid))

    def audit(self) -> PairAudit:
        """Balance the books of both sides, and compare what was sent with what came."""
        routed = None if self.router is None else self.router.audit()
        return PairAudit(self.prefill.audit(), self.decode.audit(), tuple(self._between()), routed)

    def _between(self) -> list[Finding]:
        found: list[Finding] = []
        for event in self.decode.stamped():
            body = event.body
            if not isinstance(body, DisaggTransferred) or not body.ok:
                continue
            rid = body.rid
            one, two = self._sent.of(rid), self._came.of(rid)
            if one is None or two is None or one.room != two.room:
                continue
            for name, sent, came in _differences(
                [(p.piece, p.start, p.tokens, p.bytes) for p in one.sent],
                [(p.piece, p.start, p.tokens, p.bytes) for p in two.received],
            ):
                found.append(_finding(event, f"{name} of {rid}: sent {sent}, came {came}"))
        return found

    def _whole_name(self, rid: str) -> str:
        part = rid.removeprefix("…")
        fitting = [name for name in self.rids if part and (name.startswith(part) or name.endswith(part))]
        if len(fitting) == 1:
            return fitting[0]
        for side, rec, other in ((PREFILL, self.prefill, DECODE), (DECODE, self.decode, PREFILL)):
            if rid in rec.rids:
                raise NotFound(
                    f"request {rid!r} is in the {side} server's recording only, not in the {other} one's"
                )
        if fitting:
            raise NotFound(
                f"{rid!r} is part of the names of {len(fitting)} requests: {', '.join(fitting[:LISTED])}"
            )
        raise NotFound(
            f"no request {rid!r} among the {len(self.rids)} of both sides{suggest(rid, self.rids)}"
        )


def side_of(rec: Recording) -> str:
    """`prefill` or `decode`; "" for a recording of a server that does both."""
    told = next((event.body.side for event in rec.stamped() if isinstance(event.body, DisaggQueued)), "")
    return told or str(rec.header.settings.get("disaggregation_mode", "")).replace("null", "")


def _transfers(rec: Recording) -> Transfers:
    """Those of all ranks; each numbers its batches itself."""
    parts = [rec.rank(number) for number in rec.ranks]
    return Transfers.together([Transfers().read(part.stamped()) for part in parts])


def _of_side(rec: Recording, wanted: str) -> Recording:
    side = side_of(rec)
    if side == wanted:
        return rec
    if side:
        raise BadRequest(
            f"{rec.source} is the recording of a {side} server, given as the {wanted} side; swap the two"
        )
    raise BadRequest(
        f"{rec.source} is no recording of a {wanted} server: no request of it met another side "
        "(disaggregation_mode null); read it alone with load"
    )


def _common(pair: PairedRecording) -> list[str]:
    there = dict.fromkeys(pair.decode.rids)
    common = [rid for rid in pair.prefill.rids if rid in there and pair._came.of(rid) and pair._sent.of(rid)]
    if common:
        return common
    shown = [", ".join(rec.rids[:LISTED]) or "none" for rec in (pair.prefill, pair.decode)]
    raise BadRequest(
        f"{pair.prefill.source} and {pair.decode.source} have no request in common (the first has {shown[0]}, the "
        f"second {shown[1]}): they are not of one run"
    )


def _differences(
    sent: list[tuple[int, int, int, int]], came: list[tuple[int, int, int, int]]
) -> list[tuple[str, object, object]]:
    if sent == came:
        return []
    there, here = {piece[0]: piece for piece in sent}, {piece[0]: piece for piece in came}
    return [
        (f"piece {number}", there.get(number, ())[1:], here.get(number, ())[1:])
        for number in sorted(there.keys() | here.keys())
        if there.get(number) != here.get(number)
    ]


def _finding(event: Event, detail: str) -> Finding:
    return Finding(event.t, event.component, event.seq, event.kind, "what was sent is what came", detail)
