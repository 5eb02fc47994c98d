"""Waits by cause: what the time of all requests went into, and each request's own mixture.

Imports: recording, viz, matplotlib.
"""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from sgviz.recording import Cause, Recording
from sgviz.viz import causes as looks
from sgviz.viz.frame import label, legend, nothing, panels, title
from sgviz.viz.style import theme

MOST_BARS = 200  # more requests are averaged in groups of neighbours

LEGEND_LINE = 0.19  # inches; the legend beside the lower axes is as high as they are at most


def waits_figure(rec: Recording, *, look: str = "light") -> Figure:
    """Draw the sums by cause, and a bar a request from the quickest to the slowest."""
    rec, colours = rec.freeze(), theme(look)
    table = rec.waits
    table = table[table.total_ms > 0].sort_values("total_ms", ignore_index=True)
    if table.empty:
        return nothing(rec, "no request has been explained yet", colours)
    causes = [cause for cause in Cause if table[f"{cause}_ms"].sum() > 0]
    figure, (sums, each) = panels([0.26 * len(causes) + 0.4, max(2.4, LEGEND_LINE * len(causes))], colours)
    totals = [float(table[f"{cause}_ms"].sum()) for cause in causes]
    for row, (cause, total) in enumerate(zip(causes, totals)):
        sums.barh(row, total, height=0.72, **looks.look(cause, colours))
        sums.text(total, row, f" {total / sum(totals):.1%}", va="center", fontsize=8, color=colours.text)
    sums.set_yticks(range(len(causes)), [str(cause) for cause in causes])
    sums.tick_params(axis="y", labelcolor=colours.text)
    sums.set_ylim(len(causes) - 0.4, -0.6)
    label(sums, colours, x="time of all requests together (ms)")
    groups = np.array_split(np.arange(len(table)), min(MOST_BARS, len(table)))
    bottom = np.zeros(len(groups))
    for cause in causes:
        values = table[f"{cause}_ms"].to_numpy(dtype=float)
        heights = np.array([values[group].mean() for group in groups])
        each.bar(range(len(groups)), heights, 0.9, bottom=bottom, **looks.look(cause, colours))
        bottom += heights
    grouped = f", in {len(groups)} groups" if len(groups) < len(table) else ""
    label(each, colours, x=f"{len(table)} requests, quickest first{grouped}", y="time in a request (ms)")
    legend(each, [Patch(label=str(cause), **looks.look(cause, colours)) for cause in causes], colours)
    title(figure, sums, "Where the time of the requests went", rec, colours)
    return figure
