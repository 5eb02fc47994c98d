"""Waits as tables: what the queue waits for at a moment, and each request's time by cause.

Imports: events, recording, pandas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pandas as pd

from sgviz.events.schema import EngineConfigured, Event
from sgviz.recording.engine_fold import EngineFold
from sgviz.recording.explain import Explainer
from sgviz.recording.explanation import Cause
from sgviz.recording.moment import Moment
from sgviz.recording.requests import RequestState

WHY_COLUMNS = ("position", "rid", "waiting_since_ms", "waited_ms", "cause", "blockers", "detail")
NS_PER_MS = 1e6


def why_not_running(
    explainer: Explainer, moment: Moment, requests: Mapping[str, RequestState], t0: int
) -> pd.DataFrame:
    """One row a waiting request. `waited_ms`: in this stay in the queue; `blockers`: rids it waits for."""
    rows: list[tuple[object, ...]] = []
    for position, rid in enumerate(moment.waiting):
        request = requests.get(rid)
        found = explainer.waiting_part(request, moment.t) if request is not None else None
        if found is None:
            rows.append((position, rid, None, None, str(Cause.UNEXPLAINED), (), "no event says when it came"))
            continue
        since, part = found
        rows.append((
            position, rid, (since - t0) / NS_PER_MS, (moment.t - since) / NS_PER_MS, str(part.cause),
            part.blockers, part.detail,
        ))  # fmt: skip
    return pd.DataFrame(rows, columns=list(WHY_COLUMNS))


def waits_table(explainer: Explainer, requests: Iterable[RequestState]) -> pd.DataFrame:
    """One row a request, a column a cause with its milliseconds (0: none), and `total_ms`, their sum."""
    causes = list(Cause)
    rows = []
    for request in requests:
        explanation = explainer.explain(request)
        sums = explanation.by_cause()
        rows.append((
            request.rid, explanation.total_ns / NS_PER_MS, *(sums.get(cause, 0) / NS_PER_MS for cause in causes)
        ))  # fmt: skip
    return pd.DataFrame(rows, columns=["rid", "total_ms", *(f"{cause}_ms" for cause in causes)])


def kv_owners_table(
    events: Sequence[Event], configured: EngineConfigured | None, t0: int, points: int = 400
) -> pd.DataFrame:
    """Who holds the private KV memory: one row an owner at each of up to `points` moments, largest first.

    `count` events had happened, as `Recording.at` takes it. `owner` is a rid, or `(tree, locked)` and
    `(tree, unlocked)` for what the radix tree has.
    """
    fold = EngineFold(configured=configured)
    if configured is not None:
        fold.ledger.configure(configured)
    step = max(1, len(events) // points)
    rows: list[tuple[object, ...]] = []
    for number, event in enumerate(events, 1):
        fold.apply(event)
        if number % step == 0 or number == len(events):
            ledger = fold.ledger
            held = [
                *ledger.holders(),
                ("(tree, locked)", ledger.protected),
                ("(tree, unlocked)", ledger.evictable),
            ]
            rows += [
                (number, (event.t - t0) / NS_PER_MS, fold.iteration, owner, tokens)
                for owner, tokens in held
                if tokens
            ]
    return pd.DataFrame(rows, columns=["count", "t_ms", "iteration", "owner", "tokens"])
