"""A comparison on one page: lanes over the same seconds, the account as bars, percentiles with their spread.

Imports: recording, viz, matplotlib, pandas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from sgviz.recording.overlap_account import OverlapAccount
from sgviz.viz.overlap_lanes import draw_account, draw_lanes, plain
from sgviz.viz.style import Theme, theme

LATENCIES = (("ttft", "TTFT"), ("itl", "ITL"), ("tpot", "TPOT"), ("e2e_latency", "E2E"))
WHICH = ("median", "p90", "p99")
RANKS_HEIGHT = 2.2  # inches
RUN_COLOURS = ("#b7a98c", "#54708f", "#8c6f5a", "#9fb3a6", "#7a7f8c")  # of no phase, mode or memory state


def comparison_figure(
    accounts: Mapping[str, OverlapAccount],
    every_run: pd.DataFrame,
    *,
    source: str,
    seconds: float | None = None,
    look: str = "light",
    rank_loads: pd.DataFrame | None = None,
) -> Figure:
    """Draw a comparison.

    Args:
        accounts: of one repeat by run name. every_run: a row for each `(run, repeat)` with the columns of
            bench_serving. source: printed below the title. seconds: of the lanes; None: about ten forwards.
        rank_loads: `prompt_tokens` for each `(run, data parallel rank)`; None: no run had several.

    Raises:
        BadRequest: nothing was launched, or `seconds` or `look` is not allowed.
    """
    colours, names = theme(look), list(accounts)
    height = 0.75 + 0.62 * len(names)
    heights = [height, height, 2.9] + ([RANKS_HEIGHT] if rank_loads is not None else [])
    figure = Figure(figsize=(11.5, sum(heights) + 2.0), layout="constrained", facecolor=colours.ground)
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    top, middle, bottom, *rest = parts = [figure.add_subfigure(grid[row]) for row in range(len(heights))]
    lanes = top.subplots()
    draw_lanes(lanes, accounts, seconds=seconds, look=look)
    draw_account(middle.subplots(), accounts, look=look)
    draw_percentiles(bottom.subplots(1, len(LATENCIES) + 1), every_run, names, colours)
    for part in rest if rank_loads is not None else ():
        draw_ranks(part.subplots(1, len(names), squeeze=False)[0], rank_loads, colours)
    for part in parts:
        part.set_facecolor(colours.ground)
    repeats = int(every_run.groupby(level=0).size().max())
    title = f"{' against '.join(names)}, {repeats} repeats" if repeats > 1 else " against ".join(names)
    figure.suptitle(title, x=0.012, ha="left", color=colours.text, fontsize=12, fontweight="bold")
    lanes.set_title(source, loc="left", fontsize=8, color=colours.muted, pad=8)
    return figure


def draw_percentiles(
    axes: Sequence[Axes], every_run: pd.DataFrame, names: Sequence[str], colours: Theme
) -> None:
    """Throughput and latencies: a bar is the median of the repeats, a dot each repeat."""
    _groups(axes[0], every_run, names, [("output_throughput", "output")], colours)
    axes[0].set_title("throughput (tok/s)", fontsize=9, color=colours.text)
    for ax, (column, title) in zip(axes[1:], LATENCIES):
        columns = [(f"{which}_{column}_ms", which) for which in WHICH]
        _groups(ax, every_run, names, columns, colours)
        ax.set_title(f"{title} (ms)", fontsize=9, color=colours.text)
    handles, labels = axes[0].get_legend_handles_labels()
    legend = axes[-1].legend(
        handles, labels, loc="upper left", bbox_to_anchor=(1.0, 1.02), frameon=False, fontsize=8,
        title="bar: median\ndots: repeats", title_fontsize=7,
    )  # fmt: skip
    for text in (*legend.get_texts(), legend.get_title()):
        text.set_color(colours.text)


def draw_ranks(axes: Sequence[Axes], rank_loads: pd.DataFrame, colours: Theme) -> None:
    """Prompt tokens of each rank, a picture a run, all of one scale; the line is the mean over the run's ranks."""
    tokens = rank_loads["prompt_tokens"]
    for number, (ax, name) in enumerate(zip(axes, dict.fromkeys(tokens.index.get_level_values(0)))):
        mine = tokens.xs(name, level=0)
        ax.bar(range(len(mine)), mine, 0.7, color=RUN_COLOURS[number % len(RUN_COLOURS)], linewidth=0)
        ax.set_xlabel("rank", fontsize=8, color=colours.muted)
        ax.axhline(mine.mean(), color=colours.text, linewidth=1, linestyle=(0, (4, 3)))
        ax.set_xticks(range(len(mine)), [f"{rank}" for rank in mine.index])
        plain(ax, colours)
        ax.grid(False, axis="x")
        ax.set_ylim(0, max(tokens.max() * 1.05, 1))
        most = f"{mine.max() / mine.mean():.2f} x mean" if mine.sum() else "nothing"
        ax.set_title(f"{name}: {most}", fontsize=9, color=colours.text)
    axes[0].set_ylabel("prompt tokens", fontsize=9, color=colours.text)


def _groups(
    ax: Axes,
    every_run: pd.DataFrame,
    names: Sequence[str],
    columns: Sequence[tuple[str, str]],
    colours: Theme,
) -> None:
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        rows = every_run.xs(name, level=0)
        places = [group + (number - (len(names) - 1) / 2) * width for group in range(len(columns))]
        heights = [float(rows[column].median()) for column, _ in columns]
        colour = RUN_COLOURS[number % len(RUN_COLOURS)]
        ax.bar(places, heights, width * 0.92, color=colour, linewidth=0, label=name)
        for place, (column, _) in zip(places, columns):
            values = list(rows[column])
            ax.plot([place] * len(values), values, "o", color=colours.text, markersize=2.5, alpha=0.8)
    ax.set_xticks(range(len(columns)), [label for _, label in columns])
    plain(ax, colours)
    ax.grid(False, axis="x")
    ax.set_ylim(bottom=0)
