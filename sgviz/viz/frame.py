"""What all small figures share: a figure with an Agg canvas, plain axes, a legend beside, its source below.

Imports: recording, viz, matplotlib.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from sgviz.recording import Recording
from sgviz.viz.run_figure import source_line
from sgviz.viz.style import Theme

WIDTH = 11.5
PIXELS = 1600  # finer than this nothing is drawn
LABEL = 14


def panels(heights: Sequence[float], colours: Theme, *, sharex: bool = False) -> tuple[Figure, list[Axes]]:
    """A figure of stacked axes with these heights (inches)."""
    figure = Figure(figsize=(WIDTH, sum(heights) + 1.3), layout="constrained", facecolor=colours.ground)
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(heights), 1, sharex=sharex, squeeze=False, height_ratios=list(heights))
    axes: list[Axes] = list(grid[:, 0])
    for ax in axes:
        plain(ax, colours)
    return figure, axes


def plain(ax: Axes, colours: Theme) -> None:
    """Quiet axes: two spines, a light grid."""
    ax.set_facecolor(colours.ground)
    ax.tick_params(which="both", colors=colours.muted, labelsize=8)
    ax.grid(True, color=colours.grid, linewidth=0.6)
    ax.set_axisbelow(True)
    for side, spine in ax.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(colours.grid)


def label(ax: Axes, colours: Theme, *, x: str = "", y: str = "") -> None:
    """Axis labels, with units."""
    if x:
        ax.set_xlabel(x, color=colours.text, fontsize=9)
    if y:
        ax.set_ylabel(y, color=colours.text, fontsize=9)


def thousands(ax: Axes, axis: str = "y") -> None:
    (ax.yaxis if axis == "y" else ax.xaxis).set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:,.0f}")
    )


def legend(ax: Axes, handles: Sequence[Artist] | None, colours: Theme) -> None:
    """Beside the axes, so that it covers no data; None: what the axes have labels for."""
    where: dict[str, Any] = {
        "loc": "upper left",
        "bbox_to_anchor": (1.005, 1.02),
        "frameon": False,
        "fontsize": 8,
    }
    made = ax.legend(handles=handles, **where) if handles is not None else ax.legend(**where)
    for text in made.get_texts():
        text.set_color(colours.text)


def title(figure: Figure, top: Axes, words: str, rec: Recording, colours: Theme) -> None:
    """What it shows, and where the numbers come from."""
    figure.suptitle(words, x=0.012, ha="left", color=colours.text, fontsize=12, fontweight="bold")
    lost = rec.dropped or rec.truncated or rec.unknown
    top.set_title(
        source_line(rec), loc="left", fontsize=8, color=colours.alert if lost else colours.muted, pad=8
    )


def nothing(rec: Recording, words: str, colours: Theme) -> Figure:
    """A figure that says why it is empty."""
    figure = Figure(figsize=(8, 1.6), layout="constrained", facecolor=colours.ground)
    FigureCanvasAgg(figure)
    figure.text(0.5, 0.6, words, ha="center", color=colours.text)
    figure.text(0.5, 0.3, source_line(rec), ha="center", color=colours.muted, fontsize=8)
    return figure


def short(rid: str) -> str:
    """The end of a rid tells it apart; the beginning is a common prefix."""
    return rid if len(rid) <= LABEL else f"…{rid[1 - LABEL :]}"


def unit_of(span_ns: int) -> tuple[str, float]:
    """Name of the unit in which a span reads well, and nanoseconds in it."""
    return ("s", 1e9) if span_ns > 10_000_000_000 else ("ms", 1e6)
