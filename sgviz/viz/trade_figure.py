"""Latencies of several runs on one page: a panel a measure, a line a run, from its middle to its worst.

The vertical axis is the share that waited longer, on a logarithmic scale: what a tail is about is seen there, where a
distribution of shares not above has run into its upper edge. Imports: viz, matplotlib.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from sgviz.viz.frame import label, legend, panels
from sgviz.viz.style import theme

Floats = npt.NDArray[np.float64]
SHARES = (1.0, 0.5, 0.1, 0.01, 0.001)
MOST_POINTS = 2000
MEANINGS = ("decode", "transfer", "prefill", "output", "queue", "bootstrap")
DASHES = ("-", "--", ":", "-.")


def trade_figure(
    series: Mapping[str, Mapping[str, Floats]], *, source: str, words: str = "", look: str = "light"
) -> Figure:
    """Draw it.

    Args:
        series: measure -> run -> values in ms. source: printed below the title. words: the title; default: the runs.
    """
    colours = theme(look)
    figure, axes = panels([2.2] * len(series), colours)
    for ax, (measure, runs) in zip(axes, series.items()):
        for number, (name, values) in enumerate(runs.items()):
            if len(values):
                _draw(
                    ax,
                    name,
                    values,
                    colours.of(MEANINGS[number % len(MEANINGS)]),
                    DASHES[number % len(DASHES)],
                )
        _axes(ax, runs.values())
        label(ax, colours, x=f"{measure} (ms)", y="share that\nwaited longer")
        if ax.has_data():
            legend(ax, None, colours)
    names = list(dict.fromkeys(name for runs in series.values() for name in runs))
    title = words or " against ".join(names)
    figure.suptitle(title, x=0.012, ha="left", color=colours.text, fontsize=12, fontweight="bold")
    axes[0].set_title(source, loc="left", fontsize=8, color=colours.muted, pad=8)
    return figure


def _draw(ax: Axes, name: str, values: Floats, colour: str, dashes: str) -> None:
    points = np.sort(values)
    count = len(points)
    # close together at the end, where few are left
    picked = np.unique((count - np.geomspace(1, count, min(count, MOST_POINTS))).round().astype(int))
    told = [f"p{100 - 100 * share:g}" for share in SHARES[1:] if share * count > 0.5]
    said = "\n".join(f"{name} {np.percentile(points, float(name[1:])):,.1f} ms" for name in told)
    above = (count - picked) / count
    ax.step(
        points[picked],
        above,
        where="pre",
        color=colour,
        linestyle=dashes,
        linewidth=1.6,
        label=f"{name}\n{said}",
    )


def _axes(ax: Axes, runs: Iterable[Floats]) -> None:
    """Both logarithmic, with the shares of the percentiles as ticks; the quickest few are left out."""
    filled = [values for values in runs if len(values)]
    ax.set_xscale("log")
    ax.set_yscale("log")
    if filled:
        low = max(1e-3, min(float(np.percentile(values, 10)) for values in filled))
        ax.set_xlim(0.9 * low, 1.1 * max(float(values.max()) for values in filled))
    least = 0.9 / max((len(values) for values in filled), default=1)
    ax.set_ylim(max(least, SHARES[-1] / 2), 1.1)
    ax.yaxis.set_minor_locator(NullLocator())
    ticks = [share for share in SHARES if share > least]
    ax.set_yticks(ticks, [_share(share) for share in ticks])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_locator(LogLocator(10, (1, 2, 5)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def _share(share: float) -> str:
    return "all" if share == 1 else f"{100 * share:g} % (p{100 - 100 * share:g})"
