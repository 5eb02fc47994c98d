"""Turns verdicts into events, edge-triggered: a refusal is told when its reason changes, not every step.

Its repeats are counted and told once, when it is over. Observation stays O(1) a step however long the queue
is. Imports: events, batch.
"""

from __future__ import annotations

from sgviz.batch.req import Req
from sgviz.cache.kv_cache import Match
from sgviz.events import Reason, Tracer, schema
from sgviz.scheduler.prefill_adder import Admitted, Refused, Verdict


class AdmissionLog:
    """Remembers what was said last, so that a repeated refusal costs nothing."""

    def __init__(self, trace: Tracer) -> None:
        self._trace = trace
        self._refused: tuple[str, Reason] | None = None
        self._stopped: tuple[str, Reason, str] | None = None
        self._repeats = 0
        self._last: Refused | None = None
        self._last_ns = 0

    def matched(self, req: Req, match: Match, limit: int) -> None:
        if self._trace.on:
            body = schema.PrefixMatched(rid=req.rid, tokens=match.length, limit=limit, node=match.node.id)
            self._trace.emit(body)

    def verdict(self, verdict: Verdict) -> None:
        if not self._trace.on:
            return
        if isinstance(verdict, Admitted):
            self._admitted(verdict)
        elif self._refused == (verdict.req.rid, verdict.reason):
            self._repeats += 1
            self._last, self._last_ns = verdict, self._trace.clock.now()
        else:
            self._over()
            self._refused = (verdict.req.rid, verdict.reason)
            self._trace.emit(
                schema.AdmitRefused(
                    rid=verdict.req.rid,
                    reason=verdict.reason,
                    need=verdict.need,
                    have=verdict.have,
                    holders=verdict.holders,
                )
            )

    def scan_stopped(self, rid: str, reason: Reason, behind: int, passed: str = "") -> None:
        """`passed`: the first that was passed over before, being of the other kind."""
        if self._trace.on and self._stopped != (rid, reason, passed):
            self._stopped = (rid, reason, passed)
            self._trace.emit(schema.ScanStopped(rid=rid, reason=reason, behind=behind, passed=passed))

    def _admitted(self, verdict: Admitted) -> None:
        req = verdict.req
        self._over()
        self._refused = self._stopped = None
        self._trace.emit(
            schema.AdmitOk(
                rid=req.rid,
                extend=verdict.extend,
                prefix=verdict.prefix,
                need=verdict.need,
                have=verdict.have,
                reserved=verdict.reserved,
                chunked=verdict.chunked,
                rem_total=verdict.rem_total,
                rem_input=verdict.rem_input,
                rem_chunk=-1 if verdict.rem_chunk is None else verdict.rem_chunk,
            )
        )
        if verdict.chunked or verdict.continued:
            end = verdict.prefix + verdict.extend
            self._trace.emit(schema.ChunkCut(rid=req.rid, start=verdict.prefix, end=end, total=req.seqlen))

    def _over(self) -> None:
        """What was refused again and again until now is decided otherwise: tell how often."""
        last, count = self._last, self._repeats
        self._last, self._repeats = None, 0
        if last is not None:
            self._trace.emit(
                schema.AdmitRepeated(
                    rid=last.req.rid,
                    reason=last.reason,
                    count=count,
                    need=last.need,
                    have=last.have,
                    last_ns=self._last_ns,
                )
            )
