"""Two runs over each other: each request's time, the change by cause, KV memory and batches over time.

Imports: recording, viz, matplotlib.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from sgviz.recording import Diff, Recording
from sgviz.viz.frame import PIXELS, label, legend, nothing, panels, short, thousands, title
from sgviz.viz.run_figure import source_line
from sgviz.viz.style import Theme, theme

MOST_CAUSES = 10
MOST_NAMED = 6
NAME_WIDTH = 0.06  # of the axes
Picked = npt.NDArray[np.int64]


def diff_figure(found: Diff, *, look: str = "light") -> Figure:
    """Draw a `Recording.diff`."""
    colours = theme(look)
    if found.requests.empty:
        return nothing(found.a, "the two recordings have no request in common", colours)
    causes = list(found.by_cause().items())[:MOST_CAUSES]
    figure, (change, by_cause, kv, batches) = panels([1.8, 0.24 * len(causes) + 0.5, 1.5, 1.5], colours)
    _draw_changes(change, found, colours)
    _draw_causes(by_cause, causes, len(found.requests), colours)
    for rec, name, meaning, line in ((found.a, "a", "prefill", "-"), (found.b, "b", "queue", "--")):
        _draw_curves(kv, batches, rec, f"{name}: {rec.source}", colours.of(meaning), line)
    for ax, words in ((kv, "KV tokens in use"), (batches, "requests in a batch")):
        legend(ax, None, colours)
        thousands(ax)
        thousands(ax, "x")
        label(ax, colours, x="time since the run's first event (ms)", y=words)
    title(figure, change, f"{len(found.requests)} requests in both runs", found.a, colours)
    by_cause.set_title(f"b: {source_line(found.b)}", loc="left", fontsize=8, color=colours.muted, pad=8)
    return figure


def _draw_changes(ax: Axes, found: Diff, colours: Theme) -> None:
    """A bar a request in the order of arrival: slower up, faster down; the largest are named."""
    order = {rid: number for number, rid in enumerate(found.a.rids)}
    table = found.requests.assign(x=found.requests.rid.map(order))
    slower = table.change_ms > 0
    handles = []
    for part, meaning, hatch, words in (
        (table[slower], "alert", "//", "slower in b"),
        (table[~slower], "decode", "", "not slower in b"),
    ):
        paint: dict[str, Any] = {
            "facecolor": colours.of(meaning),
            "hatch": hatch,
            "edgecolor": colours.ground,
            "linewidth": 0,
        }
        ax.bar(part.x, part.change_ms, 0.9, **paint)
        handles.append(Patch(label=f"{words}: {len(part)}", **paint))  # no bar has no colour to show
    _name_largest(ax, table, colours)
    thousands(ax)
    ax.axhline(0, color=colours.muted, linewidth=0.8)
    legend(ax, handles, colours)
    label(ax, colours, x="requests in order of arrival", y="change b - a (ms)")


def _name_largest(ax: Axes, table: pd.DataFrame, colours: Theme) -> None:
    """Names beyond the ends of the longest bars; of neighbours, whose names would overlap, only the first."""
    named: list[float] = []
    for row in table.head(MOST_NAMED).itertuples():
        if all(abs(row.x - x) > NAME_WIDTH * len(table) for x in named):
            named.append(row.x)
            beyond = (0, 2) if row.change_ms > 0 else (0, -2)
            ax.annotate(
                short(row.rid), (row.x, row.change_ms), beyond, textcoords="offset points", fontsize=7,
                color=colours.text, ha="center", va="bottom" if row.change_ms > 0 else "top",
            )  # fmt: skip
    ax.margins(y=0.14)  # room for the names


def _draw_causes(ax: Axes, causes: list[tuple[str, float]], count: int, colours: Theme) -> None:
    values = [ms / count for _, ms in causes]
    paints = [colours.of("alert" if value > 0 else "decode") for value in values]
    bars = ax.barh(range(len(causes)), values, 0.7, color=paints, edgecolor=colours.ground, linewidth=0)
    for bar, value in zip(bars, values):
        bar.set_hatch("//" if value > 0 else "")
    ax.set_yticks(range(len(causes)), [cause for cause, _ in causes])
    ax.tick_params(axis="y", labelcolor=colours.text)
    ax.set_ylim(max(1, len(causes)) - 0.4, -0.6)
    ax.axvline(0, color=colours.muted, linewidth=0.8)
    thousands(ax, "x")
    label(ax, colours, x="change by cause, mean of a request (ms)")


def _draw_curves(kv: Axes, batches: Axes, rec: Recording, words: str, colour: str, line: str) -> None:
    memory, iterations = rec.kv, rec.iterations
    style: dict[str, Any] = {"color": colour, "linestyle": line, "linewidth": 1.3, "label": words}
    if len(memory):
        pick = _picked(len(memory))
        used = (memory.protected + memory.private).to_numpy()
        kv.step(memory.t_ms.to_numpy()[pick], used[pick], where="post", **style)
    if len(iterations):
        pick = _picked(len(iterations))
        batches.step(
            iterations.planned_ms.to_numpy()[pick],
            iterations.batch_size.to_numpy()[pick],
            where="post",
            **style,
        )


def _picked(count: int) -> Picked:
    picked: Picked = np.unique(np.linspace(0, count - 1, min(PIXELS, count)).round().astype(np.int64))
    return picked
