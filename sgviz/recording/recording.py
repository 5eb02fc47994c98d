"""A recording: events, live or from a file, and everything that follows from them.

The reader's face of a run. It replaces what one would gather from SGLang's log lines, metrics and dumps;
every table is folded from the same events, so two tables of a recording never contradict each other.

Imports: events, errors, recording, pandas.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping

import pandas as pd

from sgviz.errors import BadRequest, NotFound, suggest
from sgviz.events.schema import Event
from sgviz.events.time_stats import Stage, TimeStats, stages
from sgviz.recording import tables
from sgviz.recording.audit import AuditReport, audit
from sgviz.recording.cost import cost_table, cost_words
from sgviz.recording.decisions import decisions_table, tokens_table
from sgviz.recording.diff import Diff, diff
from sgviz.recording.explain import Explainer
from sgviz.recording.explanation import Explanation
from sgviz.recording.export import export
from sgviz.recording.journey import TypeStep, journey, routed_steps
from sgviz.recording.moment import Moment, moment
from sgviz.recording.ranked_source import RankedSource
from sgviz.recording.requests import RequestState
from sgviz.recording.sessions import sessions_table
from sgviz.recording.store import Progress, read
from sgviz.recording.waits import kv_owners_table, waits_table, why_not_running

# what each scheduler has of its own; such a table has a column `dp_rank`
BY_RANK = frozenset({
    "requests", "iterations", "batches", "kv", "kv_owners", "decisions", "tokens", "sessions", "waits",
})  # fmt: skip
LISTED = 8  # requests named when several are meant


def load(path: str | os.PathLike[str], progress: Progress | None = None) -> Recording:
    """Open a `.sgv` file. A tail cut by a crash is left out (see `Recording.truncated`).

    Args:
        progress: told `(stage, done, of)` while it loads, and later while it folds.

    Raises:
        SgvizError: no such file, not a recording, header cut off, or written by a newer schema.
    """
    run = read(path, progress)
    rec = Recording(
        run.events, run.header, unknown=run.unknown, truncated=run.truncated, source=os.path.basename(path)
    )
    rec.progress = progress
    return rec


class Recording(RankedSource):
    """What happened, as tables, explanations and moments; `Source` says where the events come from."""

    def __repr__(self) -> str:
        counts = f"{len(self)} events, {len(self.rids)} requests, {self.dropped} dropped"
        return f"<Recording {self.source}: {counts}{'; ' * bool(self.fault)}{self.fault}>"

    @property
    def fault(self) -> str:
        """Why no events come from a server that is followed; empty while they do, and of all other recordings."""
        return self._whole.fault if isinstance(self._whole, Recording) else ""

    @property
    def rids(self) -> list[str]:
        """All requests in the order of their first event."""
        self.refresh()
        return list(self._requests())

    def request(self, rid: str) -> RequestState:
        """The folded request.

        Args:
            rid: the whole of it, or a beginning or end that only one request has (figures show `…4c6f108b6440f`).

        Raises:
            NotFound: the recording has no such rid, or several.
        """
        self.refresh()
        known = self._requests()
        found = known.get(rid) or self._probe(rid)
        if found is not None:
            return found
        fitting = _fitting(rid, known)
        if len(fitting) == 1:
            return known[fitting[0]]
        if fitting:
            listed = ", ".join(fitting[:LISTED]) + (" and others" if len(fitting) > LISTED else "")
            raise NotFound(
                f"{rid!r} is part of the names of {len(fitting)} requests: {listed}; write more of it"
            )
        hint = suggest(rid, known) if isinstance(rid, str) else "; a request is named by its rid, a string"
        raise NotFound(f"no request {rid!r} among the {len(known)} recorded{hint}")

    def rank_with(self, rid: str) -> int | None:
        """The data parallel rank that had the request (None: it was refused before one was chosen); 0 of one scheduler.

        Raises:
            NotFound: as of `request`.
        """
        request, many = self.request(rid), self._many()
        rank = 0 if many is None else many.home(request).rank_number
        return rank if rank >= 0 else None

    # ------------------------------------------------------------ tables

    @property
    def events(self) -> pd.DataFrame:
        """One row an event: stamps, component, kind, whose it is, its fields; see `tables.events_table`."""
        return self._table("events", lambda: tables.events_table(self._events, self._unknown, self.t0))

    @property
    def requests(self) -> pd.DataFrame:
        """One row a request: sizes, latencies and stages; see `tables.requests_table`."""
        return self._table(
            "requests", lambda: tables.requests_table(self._requests().values(), self.t0, self.explainer())
        )

    @property
    def iterations(self) -> pd.DataFrame:
        """One row a scheduler iteration that planned a batch; see `tables.iterations_table`."""
        return self._table("iterations", lambda: tables.iterations_table(self._state, self.t0))

    @property
    def batches(self) -> pd.DataFrame:
        """One row a member of a batch: bid, iteration, mode, member, rid, lengths, token; see `tables`."""
        return self._table("batches", lambda: tables.batches_table(self._state, self.t0))

    @property
    def kv(self) -> pd.DataFrame:
        """KV tokens by state over time, folded from `pool.*` and `tree.*`; see `tables.kv_table`."""
        return self._table("kv", lambda: tables.kv_table(self._fold().kv, self.t0))

    @property
    def kv_owners(self) -> pd.DataFrame:
        """Private KV tokens by owner at up to 400 moments; see `waits.kv_owners_table`."""
        return self._table("kv_owners", lambda: kv_owners_table(self._events, self._configured(), self.t0))

    @property
    def decisions(self) -> pd.DataFrame:
        """One row a verdict of admission, repeats folded; see `decisions.decisions_table`."""
        return self._table("decisions", lambda: decisions_table(self._events, self.t0))

    @property
    def tokens(self) -> pd.DataFrame:
        """One row a sampled token, with its times on the way out; see `decisions.tokens_table`."""
        return self._table("tokens", lambda: tokens_table(self._events, self.t0))

    @property
    def sessions(self) -> pd.DataFrame:
        """One row a turn of a session, and where its ids came from; see `sessions.sessions_table`."""
        return self._table("sessions", lambda: sessions_table(self._events, self.t0))

    @property
    def cost(self) -> pd.DataFrame:
        """What observing cost each component, as it measured it; see `cost.cost_table`."""
        return self._table("cost", lambda: cost_table(self._events, self.t0, self.t_end))

    @property
    def cost_words(self) -> str:
        """The same in one sentence: what share of the run it was."""
        return cost_words(self.cost)

    @property
    def waits(self) -> pd.DataFrame:
        """One row a request: its whole time by cause, a column each; see `waits.waits_table`."""
        return self._table("waits", lambda: waits_table(self.explainer(), self._requests().values()))

    def events_of(self, rid: str) -> pd.DataFrame:
        """The rows of `events` that name the request, as their subject or among others."""
        name = self.request(rid).rid
        chosen = [event for event in self._events if _names(event, name)]
        return tables.events_table(chosen, (), self.t0)

    # ------------------------------------------------------------ one request

    def journey(self, rid: str) -> list[TypeStep]:
        """The types that carried the request, from the HTTP body to the first text sent."""
        request = self.request(rid)
        if (many := self._many()) is not None:
            return many.home(request).journey(request.rid)
        if "router.paired" in request.marks and (route := self.explainer().route(request)) is not None:
            return routed_steps(route, route.start)
        return journey(self._state_now(), request)

    def time_stats(self, rid: str) -> TimeStats:
        """The stamps of the request (monotonic ns), under the names the engine uses."""
        return self.request(rid).stats

    def stages(self, rid: str) -> list[Stage]:
        """The stages of the request end to end; their sum is its whole time."""
        return stages(self.time_stats(rid))

    # ------------------------------------------------------------ why and when

    def explain(self, rid: str) -> Explanation:
        """Where the request's time went: intervals with causes and names that lie end to end.

        Raises:
            NotFound: the recording has no such rid.
        """
        request = self.request(rid)
        if (many := self._many()) is not None:
            return many.home(request).explainer().explain(request)
        return self.explainer().explain(request)

    def explainer(self) -> Explainer:
        """What explains requests of this recording one after the other; computed once."""
        self.refresh()
        if self._explainer is None:
            self._explainer = Explainer(self._events, self._state, self.t_end)
        return self._explainer

    def why_not_running(self, at: float | None = None, *, iteration: int | None = None) -> pd.DataFrame:
        """Each request that waits at a moment, in the order of the queue, with cause, blockers and numbers.

        Args:
            at: ms since the first event; None (and no `iteration`): now, the end of the recording.
        """
        if (many := self._many()) is not None:
            return many.why_not_running(at, iteration)
        moment = self.at(iteration=iteration, time=at)
        return why_not_running(self.explainer(), moment, self._requests(), self.t0)

    def at(
        self, *, iteration: int | None = None, time: float | None = None, count: int | None = None
    ) -> Moment:
        """The state at a moment: queue, running batch, pools, radix tree. Without arguments: the end.

        Args:
            iteration: after everything that happened up to the end of this turn of the loop.
            time: ms since the first event, like the tables' `t_ms`. count: after so many events.

        Raises:
            BadRequest: more than one is given, or the recording has no such moment.
        """
        self.refresh()
        keyframes, events = self._fold().keyframes, self._events
        if sum(given is not None for given in (iteration, time, count)) > 1:
            raise BadRequest("at() takes one of iteration, time and count, not several")
        if iteration is not None:
            count = keyframes.count_until_iteration(events, iteration)
        elif time is not None:
            if not math.isfinite(time):
                raise BadRequest(f"time must be a number of ms, got {time}")
            count = keyframes.count_until_time(events, self.t0 + round(time * 1e6))
        elif count is None:
            count = len(events)
        if not 0 <= count <= len(events):
            raise BadRequest(f"count {count} is not between 0 and the {len(events)} events recorded")
        return moment(keyframes.after(events, count), count, self.t0)

    def audit(self) -> AuditReport:
        """Balance the books from the events alone; a finding names the event that breaks them."""
        many = self._many()
        return audit(self._events, self.header.configured) if many is None else many.audit()

    def diff(self, other: Recording) -> Diff:
        """This run compared with another of the same workload, request by request; see `diff.Diff`."""
        return diff(self, other)

    def export(self, to: str, path: str | os.PathLike[str]) -> list[str]:
        """Write the run as `perfetto`, `otel`, `parquet` or `csv`; returns what was written.

        Args:
            path: a file (perfetto, otel), a folder (parquet, csv), or a collector's http address (otel).

        Raises:
            BadRequest: no such format. SgvizError: it cannot be written, or a package is missing.
        """
        return export(self, to, path)

    # ------------------------------------------------------------ inside

    def _table(self, name: str, build: Callable[[], pd.DataFrame]) -> pd.DataFrame:
        many = self._many()
        if name not in self._tables:
            self._tables[name] = many.table(name) if many and name in BY_RANK else build()
            if name in BY_RANK and many is None:
                self._tables[name]["dp_rank"] = pd.array(
                    [self.rank_number if self.rank_number >= 0 else None] * len(self._tables[name]),
                    dtype="Int64",
                )
        return self._tables[name].copy()


def _fitting(part: object, known: Mapping[str, RequestState]) -> list[str]:
    """The rids that begin or end with `part`; samples and prompts of one that does are meant with it."""
    text = part.removeprefix("…") if isinstance(part, str) else ""
    if not text:
        return []
    fitting = [rid for rid in known if rid.startswith(text) or rid.endswith(text)]
    return [rid for rid in fitting if known[rid].parent not in fitting]


def _names(event: Event, rid: str) -> bool:
    body = event.body
    return getattr(body, "rid", None) == rid or rid in getattr(body, "rids", ())
