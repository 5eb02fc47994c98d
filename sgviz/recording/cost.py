"""What observing cost the run: each component measures its own emitting and tells it (`trace.cost`).

Columns of `cost_table`, one row a component: `component`, `events` (that it emitted), `cost_ms` (in emit and flush,
for the events up to its last word; NaN: it told nothing), `us_per_event`, `share` (of the recorded time; each
component has a thread of its own). Building a body is the caller's time and not in it. SGLang has no counterpart.

Imports: events, pandas.
"""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from sgviz.events.schema import Event, TraceCost

COLUMNS = ("component", "events", "cost_ms", "us_per_event", "share")


def cost_table(events: Iterable[Event], t0: int, t_end: int) -> pd.DataFrame:
    """See the module. A component that was started anew counts from its new start."""
    counts: dict[str, int] = {}
    told: dict[str, TraceCost] = {}
    for event in events:
        counts[event.component] = counts.get(event.component, 0) + 1
        if isinstance(event.body, TraceCost):
            told[event.component] = event.body
    rows = [
        (component, count, *_numbers(told.get(component), t_end - t0)) for component, count in counts.items()
    ]
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    return table.sort_values("cost_ms", ascending=False, kind="stable", ignore_index=True)


def _numbers(body: TraceCost | None, span: int) -> tuple[float, float, float]:
    if body is None:
        return float("nan"), float("nan"), float("nan")
    share = body.cost_ns / span if span else float("nan")
    return body.cost_ns / 1e6, body.cost_ns / 1e3 / max(1, body.events), share


def cost_words(table: pd.DataFrame) -> str:
    """One sentence, for reports and the terminal."""
    told = table[table.cost_ms.notna() & table.share.notna()]
    if told.empty:
        return "observing cost: no component told it"
    parts = [
        f"{row.component} {row.share:.2%} ({row.cost_ms:,.2f} ms, {row.us_per_event:.1f} µs an event)"
        for row in told.itertuples()
    ]
    silent = [component for component in table.component if component not in set(told.component)]
    rest = f"; not yet told by {', '.join(silent)}, which tell when they are idle" if silent else ""
    total = f" {told.share.sum():.2%} of the run" if not silent else ", as far as it was told"
    return f"observing cost{total}: {', '.join(parts)}{rest}"
