"""Tables for the terminal: a request's journey, the iterations of a run, the stages of a request.

Imports: events, recording, viz.style, pandas, rich.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd
from rich.table import Table
from rich.text import Text

from sgviz.events.time_stats import Stage
from sgviz.recording import TypeStep
from sgviz.viz.style import DARK

NS_PER_MS = 1e6
BAR = 30  # characters of the longest bar
ROWS = 40
_PHASE_OF = {
    "convert": "tokenize", "tokenize": "tokenize", "api_server_dispatch": "tokenize",
    "to_scheduler": "tokenize", "request_process": "queue", "prefill_waiting": "queue",
    "prefill_forward": "prefill", "decode": "decode",
}  # fmt: skip


def journey_table(steps: Sequence[TypeStep]) -> Table:
    """Two lines a type: its name over where it lives, when it came up, and what it holds."""
    table = _table("The types that carried the request")
    table.add_column("#", justify="right", style="dim")
    table.add_column("type, component, pid", no_wrap=True)
    table.add_column("at (ms)", justify="right", no_wrap=True)
    table.add_column("holds", overflow="fold")
    for number, step in enumerate(steps, start=1):
        place = f"{step.component} · {step.pid}" if step.pid else step.component
        where = Text.assemble((step.type, "bold"), "\n", (place, "dim"))
        facts = [Text.assemble((f"{name} ", "dim"), text) for name, text in step.holds.items()]
        table.add_row(str(number), where, f"{step.t_ms:.2f}", Text(" · ", style="dim").join(facts))
    return table


def iterations_table(iterations: pd.DataFrame, limit: int = ROWS) -> Table:
    """`Recording.iterations`, one row a batch; of more than `limit` the first and the last are shown."""
    table = _table("What the scheduler ran")
    for name in ("iteration", "batch", "mode", "requests", "new tokens", "cached", "running", "waiting"):
        table.add_column(name, justify="left" if name == "mode" else "right", no_wrap=True)
    for name in ("KV used", "device (ms)", "host (ms)", "gap (ms)"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = iterations.to_dict("records")
    head = len(rows) if len(rows) <= limit else (limit + 1) // 2
    tail = 0 if len(rows) <= limit else limit // 2
    for row in rows[:head]:
        table.add_row(*_iteration_cells(row))
    if len(rows) > head + tail:
        table.add_row("…", Text(f"{len(rows) - head - tail} more", style="dim"))
    for row in rows[len(rows) - tail :]:
        table.add_row(*_iteration_cells(row))
    return table


def _iteration_cells(row: dict[str, object]) -> list[Text | str]:
    names = ("batch_size", "new_tokens", "cached_tokens", "running", "waiting", "kv_used")
    mode = str(row["mode"])
    return [
        str(row["iteration"]),
        str(row["bid"]),
        Text(mode, style=DARK.of(mode)),
        *(f"{row[name]:,}" for name in names),
        *(_ms(row[name]) for name in ("device_ms", "host_ms", "gap_ms")),
    ]


def stages_table(stages: Sequence[Stage]) -> Table:
    """Where the time went: one row a stage with its share, and the sum, which is the whole."""
    total = sum(stage.duration_ns for stage in stages)
    longest = max((stage.duration_ns for stage in stages), default=0)
    table = _table("Where the time went", show_footer=True)
    table.add_column("stage", footer="end to end", no_wrap=True)
    table.add_column("ms", justify="right", footer=_ms(total / NS_PER_MS), no_wrap=True)
    table.add_column("share", justify="right", footer="100.0 %" if total else "", no_wrap=True)
    table.add_column("", no_wrap=True)
    for stage in stages:
        share = f"{stage.duration_ns / total:.1%}".replace("%", " %") if total else ""
        bar = "█" * round(BAR * stage.duration_ns / longest) if longest else ""
        colour = DARK.of(_PHASE_OF.get(stage.name, "output"))
        table.add_row(stage.name, _ms(stage.duration_ns / NS_PER_MS), share, Text(bar, style=colour))
    return table


def _table(title: str, *, show_footer: bool = False) -> Table:
    return Table(title=title, title_justify="left", show_footer=show_footer, header_style="bold", box=None)


def _ms(value: object) -> str:
    return "" if not isinstance(value, float) or math.isnan(value) else f"{value:,.2f}"
