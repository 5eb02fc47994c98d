"""Latencies as distributions: time to first token, between tokens, and end to end.

Imports: recording, viz, matplotlib.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sgviz.recording import Recording
from sgviz.viz.frame import label, legend, nothing, panels, title
from sgviz.viz.style import Theme, theme

Floats = npt.NDArray[np.float64]
PERCENTILES = (50, 90, 99)
MOST_POINTS = 2000


def inter_token_ms(rec: Recording) -> Floats:
    """[n] ms between the arrivals of a request's neighbouring tokens at the tokenizer manager.

    Tokens that arrived together count 0 but for the first of them. For answers that are not streamed, and where
    only a scheduler was recorded, the times of sampling are taken.
    """
    table = rec.tokens
    streamed = {row.rid for row in rec.requests.itertuples() if row.stream}
    table["at"] = table.received_ms.where(table.rid.isin(streamed), table.sampled_ms).fillna(table.sampled_ms)
    gaps = table.sort_values(["rid", "index"]).groupby("rid")["at"].diff()
    found: Floats = gaps.dropna().to_numpy(dtype=np.float64)
    return found


def latency_figure(rec: Recording, *, look: str = "light") -> Figure:
    """Draw the three distributions with their percentiles."""
    rec, colours = rec.freeze(), theme(look)
    requests = rec.requests
    series = (
        ("time to first token", requests.ttft_ms.dropna().to_numpy(dtype=np.float64), "prefill", "-"),
        ("between two tokens", inter_token_ms(rec), "decode", "--"),
        ("end to end", requests.total_ms[requests.e2e_ms.notna()].to_numpy(dtype=np.float64), "output", ":"),
    )
    if not any(len(values) for _, values, *_ in series):
        return nothing(rec, "no token has arrived yet", colours)
    figure, (ax,) = panels([3.0], colours)
    for name, values, meaning, line in series:
        if len(values):
            _draw(ax, name, values, colours.of(meaning), line)
    ax.set_xscale("symlog", linthresh=0.1)
    ax.set_ylim(0, 1.02)
    legend(ax, None, colours)
    label(ax, colours, x="latency (ms)", y="share not above")
    _percentile_lines(ax, colours)
    title(figure, ax, f"Latencies of {len(requests):,} requests", rec, colours)
    return figure


def _draw(ax: Axes, name: str, values: Floats, colour: str, line: str) -> None:
    points = np.sort(values)
    picked = np.unique(np.linspace(0, len(points) - 1, MOST_POINTS).round().astype(int))
    said = ", ".join(f"p{p} {np.percentile(points, p):,.2f}" for p in PERCENTILES)
    ax.step(
        points[picked], (picked + 1) / len(points), where="post", color=colour, linestyle=line, linewidth=1.6,
        label=f"{name}\n{said} ms",
    )  # fmt: skip


def _percentile_lines(ax: Axes, colours: Theme) -> None:
    for percentile in PERCENTILES:
        ax.axhline(percentile / 100, color=colours.grid, linewidth=0.8)
