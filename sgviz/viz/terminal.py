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
BAR = 12  # characters of the longest bar
ROWS = 40
JOURNEY_CAPTION = (
    "at: since the request arrived, when the type first came up (the last five come again with every token). "
    "held back: ids whose text is not whole yet, such as half of a character."
)
ITERATIONS_CAPTION = (
    "One row a batch; numbers count from the scheduler's start, and its warm-up is not recorded. "
    "running, waiting: requests when it was planned. tok: tokens of all its members. "
    "device: the forward itself. host: launching it and taking in its result. gap: the device stood still before it."
)
STAGES_CAPTION = (
    "A stage begins where the one before it ends, so they add up. Names are those of SGLang where it has one."
)
_PHASE_OF = {
    "convert": "tokenize", "tokenize": "tokenize", "api_server_dispatch": "tokenize",
    "to_scheduler": "tokenize", "request_process": "queue", "prefill_waiting": "queue",
    "prefill_forward": "prefill", "decode": "decode",
}  # fmt: skip
_MEANING_OF = {
    "convert": "body to GenerateReqInput",
    "tokenize": "checks; text to ids",
    "api_server_dispatch": "into the scheduler's socket",
    "to_scheduler": "until the scheduler takes it",
    "request_process": "made a Req and queued",
    "prefill_waiting": "in the queue",
    "prefill_forward": "prompt, to the first token",
    "decode": "a forward for each other token",
    "output_stream": "last ids to the detokenizer",
    "detokenize": "last ids to text",
    "to_tokenizer_manager": "last text to the main process",
    "respond": "last bytes to the HTTP layer",
}


# two lines each, so that the table fits into 80 columns
_ITERATION_HEADERS = (
    "loop\nturn", "batch\n", "mode\n", "reqs\n", "new\ntok", "cached\ntok", "run-\nning", "wait-\ning",
    "KV used\ntok", "device\nms", "host\nms", "gap\nms",
)  # fmt: skip


def journey_table(steps: Sequence[TypeStep]) -> Table:
    """Two lines a type: its name over where it lives, when it came up, and what it holds."""
    table = _table("The types that carried the request", JOURNEY_CAPTION)
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
    table = _table("What the scheduler ran", ITERATIONS_CAPTION)
    for name in _ITERATION_HEADERS:
        table.add_column(name, justify="left" if name == "mode" else "right", no_wrap=True)
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
    """Where the time went: one row a stage with its meaning and share, and the sum, which is the whole."""
    total = sum(stage.duration_ns for stage in stages)
    longest = max((stage.duration_ns for stage in stages), default=0)
    table = _table("Where the time went", STAGES_CAPTION, show_footer=True)
    table.add_column("stage", footer="end to end", no_wrap=True)
    table.add_column("ms", justify="right", footer=_ms(total / NS_PER_MS), no_wrap=True)
    table.add_column("share", justify="right", footer="100.0 %" if total else "", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("what happens", style="dim")
    for stage in stages:
        share = f"{stage.duration_ns / total:.1%}".replace("%", " %") if total else ""
        bar = "█" * round(BAR * stage.duration_ns / longest) if longest else ""
        colour = DARK.of(_PHASE_OF.get(stage.name, "output"))
        meaning = _MEANING_OF.get(stage.name, "")
        table.add_row(stage.name, _ms(stage.duration_ns / NS_PER_MS), share, Text(bar, style=colour), meaning)
    return table


def _table(title: str, caption: str, *, show_footer: bool = False) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        caption=caption,
        caption_justify="left",
        show_footer=show_footer,
        header_style="bold",
        box=None,
        padding=(0, 1, 0, 0),
    )


def _ms(value: object) -> str:
    return "" if not isinstance(value, float) or math.isnan(value) else f"{value:,.2f}"
