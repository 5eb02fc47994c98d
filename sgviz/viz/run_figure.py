"""One run on one time axis: what every request was doing, what every batch ran, who held the KV memory.

Simplified: at most `max_lanes` requests get a lane; with more, they are chosen evenly over the arrivals
and a panel counts all of them by phase.

Imports: recording, viz.style, matplotlib (figures only, never pyplot: no global state, no display).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib.ticker
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from sgviz.errors import BadRequest
from sgviz.recording import PhaseName, Recording, RequestState
from sgviz.recording.balance import summed_kv
from sgviz.viz.style import Theme, theme

NS_PER_MS = 1e6
MAX_LANES = 40
PIXELS = 1600  # finer than this nothing is drawn
LABEL = 14  # characters of a rid
DOTS = 150  # batches up to which the number of requests gets a mark of its own
ONE_SIDED = (PhaseName.BOOTSTRAP, PhaseName.PREALLOC, PhaseName.TRANSFER)  # told where they occur
MODES = (("extend", "prefill"), ("mixed", "mixed"), ("decode", "decode"), ("prebuilt", "transfer"))
KV_STATES = ("protected", "private", "evictable", "free")


@dataclass(frozen=True, slots=True)
class Window:
    """The stretch of time shown (monotonic ns) and its unit. Zero on the axis is `start`."""

    start: int
    end: int

    @property
    def unit(self) -> tuple[str, float]:
        """Name of the unit and nanoseconds in it."""
        return ("s", 1e9) if self.end - self.start > 10_000 * NS_PER_MS else ("ms", NS_PER_MS)

    @property
    def width(self) -> float:
        return self.at(self.end)

    def at(self, t: int) -> float:
        """A stamp on the axis."""
        return (t - self.start) / self.unit[1]


def run_figure(
    rec: Recording, *, rids: Sequence[str] | None = None, max_lanes: int = MAX_LANES, look: str = "light"
) -> Figure:
    """Draw a run.

    Args:
        rids: only these requests (and their time); None for all.
        max_lanes: lanes at most, at least 1. look: `light` or `dark`.

    Returns:
        A figure with an Agg canvas: `figure.savefig(...)`, or shown by a notebook as it is.

    Raises:
        NotFound: a rid is not in the recording. BadRequest: `max_lanes` or `look` is not allowed.
    """
    if max_lanes < 1:
        raise BadRequest(f"max_lanes is {max_lanes}; at least one lane is needed")
    rec, colours = rec.freeze(), theme(look)
    requests = [rec.request(rid) for rid in (rec.rids if rids is None else rids)]
    requests = [request for request in requests if request.phases and not request.children]
    if not requests:
        return _empty(rec, colours)
    lanes = _choose(requests, max_lanes)
    window = _window(requests, rec)
    figure, axes = _panels(len(lanes), len(requests) > len(lanes), colours)
    _draw_lanes(axes["lanes"], lanes, len(requests), window, colours)
    if "counts" in axes:
        _draw_counts(axes["counts"], requests, window, colours)
    _draw_batches(axes["batches"], rec, window, colours)
    _draw_memory(axes["memory"], rec, window, colours)
    _finish(figure, axes, rec, requests, window, colours)
    return figure


# ---------------------------------------------------------------- frame


def _panels(lanes: int, summarised: bool, colours: Theme) -> tuple[Figure, dict[str, Axes]]:
    heights = {"lanes": max(0.9, 0.19 * lanes + 0.35)}
    if summarised:
        heights["counts"] = 1.3
    heights |= {"batches": 1.7, "memory": 1.7}
    figure = Figure(
        figsize=(11.5, sum(heights.values()) + 1.5), layout="constrained", facecolor=colours.ground
    )
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=list(heights.values()))
    axes = dict(zip(heights, grid[:, 0]))
    for ax in axes.values():
        _plain(ax, colours)
    return figure, axes


def _plain(ax: Axes, colours: Theme) -> None:
    ax.set_facecolor(colours.ground)
    ax.tick_params(which="both", colors=colours.muted, labelsize=8)
    ax.grid(True, color=colours.grid, linewidth=0.6)
    ax.set_axisbelow(True)
    for side, spine in ax.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(colours.grid)


def _legend(ax: Axes, handles: Sequence[Patch | Line2D], colours: Theme) -> None:
    """Beside the axes, so that it covers no data."""
    legend = ax.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(1.005, 1.02),
        frameon=False,
        fontsize=8,
        handlelength=1.2,
    )
    for text in legend.get_texts():
        text.set_color(colours.text)


def _label(ax: Axes, text: str, colours: Theme) -> None:
    ax.set_ylabel(text, color=colours.text, fontsize=9)


def _finish(
    figure: Figure,
    axes: dict[str, Axes],
    rec: Recording,
    requests: list[RequestState],
    window: Window,
    colours: Theme,
) -> None:
    bottom = axes["memory"]
    bottom.set_xlim(-0.01 * window.width, 1.01 * window.width)
    unit = window.unit[0]
    bottom.set_xlabel(f"time since the first request arrived ({unit})", color=colours.text, fontsize=9)
    tokens = sum(request.sampled for request in requests)
    noun = "request" if len(requests) == 1 else "requests"
    title = f"{len(requests)} {noun}, {len(_batches(rec, window))} batches, {tokens:,} output tokens"
    figure.suptitle(title, x=0.012, ha="left", color=colours.text, fontsize=12, fontweight="bold")
    lost = rec.dropped or rec.truncated or rec.unknown
    axes["lanes"].set_title(
        source_line(rec), loc="left", fontsize=8, color=colours.alert if lost else colours.muted, pad=8
    )
    figure.align_ylabels(list(axes.values()))


def source_line(rec: Recording) -> str:
    """Where the numbers come from, their clock, and what is missing: stands on every figure."""
    parts = [f"source: {rec.source}", f"clock: {rec.header.clock}", f"{rec.dropped:,} events dropped"]
    if rec.truncated:
        parts.append(f"file cut off ({rec.truncated:,} bytes unreadable)")
    if rec.unknown:
        parts.append(f"{sum(rec.unknown.values()):,} events of unknown kind")
    simulated = f"device SIMULATED ({rec.header.device})"
    return "  ·  ".join([*parts, simulated if rec.header.simulated else "all measured, nothing predicted"])


def _empty(rec: Recording, colours: Theme) -> Figure:
    figure = Figure(figsize=(8, 1.6), layout="constrained", facecolor=colours.ground)
    FigureCanvasAgg(figure)
    figure.text(0.5, 0.6, "No request in this recording yet", ha="center", color=colours.text)
    figure.text(0.5, 0.3, source_line(rec), ha="center", color=colours.muted, fontsize=8)
    return figure


def _window(requests: Sequence[RequestState], rec: Recording) -> Window:
    """From the first arrival to the last end; what still runs ends with the recording."""
    start = min(request.phases[0].start for request in requests)
    ends = [request.phases[-1].end or rec.t_end for request in requests]
    return Window(start, max(max(ends), start + 1))


def _choose(requests: list[RequestState], limit: int) -> list[RequestState]:
    """Evenly over the arrivals, first and last among them."""
    if len(requests) <= limit:
        return requests
    picked = np.linspace(0, len(requests) - 1, limit).round().astype(int)
    return [requests[index] for index in picked]


# ---------------------------------------------------------------- requests


def _draw_lanes(ax: Axes, lanes: list[RequestState], count: int, window: Window, colours: Theme) -> None:
    for name in PhaseName:
        bars = [
            (row, window.at(phase.start), window.at(phase.end or window.end))
            for row, request in enumerate(lanes)
            for phase in request.phases
            if phase.name is name
        ]
        if bars:
            rows, lefts, rights = zip(*bars)
            widths = [right - left for left, right in zip(lefts, rights)]
            ax.barh(rows, widths, left=lefts, height=0.72, color=colours.of(name), linewidth=0)
    ax.set_yticks(range(len(lanes)), [_short(request.rid) for request in lanes])
    ax.tick_params(axis="y", labelsize=7, labelcolor=colours.text)
    ax.set_ylim(len(lanes) - 0.4, -0.6)
    ax.grid(False, axis="y")
    _label(ax, "requests" if count == len(lanes) else f"{len(lanes)} of {count} requests", colours)
    names = [name for name in PhaseName if name not in ONE_SIDED or _ever(lanes, name)]
    _legend(ax, [Patch(color=colours.of(name), label=_phase_label(name, lanes)) for name in names], colours)


def _ever(lanes: list[RequestState], name: PhaseName) -> bool:
    return any(phase.name is name for request in lanes for phase in request.phases)


def _phase_label(name: PhaseName, lanes: list[RequestState]) -> str:
    """The name; for a single request with its time, since short phases are hardly seen beside decoding."""
    if len(lanes) > 1:
        return str(name)
    spent = sum(phase.end - phase.start for phase in lanes[0].phases if phase.name is name and phase.end)
    return f"{name} {spent / NS_PER_MS:,.1f} ms"


def _short(rid: str) -> str:
    """The end of a rid tells it apart; the beginning is a common prefix."""
    return rid if len(rid) <= LABEL else f"…{rid[1 - LABEL :]}"


def _patches(names: Sequence[str], colours: Theme) -> list[Patch | Line2D]:
    return [Patch(color=colours.of(name), label=str(name)) for name in names]


def _draw_counts(ax: Axes, requests: list[RequestState], window: Window, colours: Theme) -> None:
    """How many of all requests are in each phase."""
    steps = np.linspace(0, window.width, PIXELS)
    layers = []
    for name in PhaseName:
        phases = [phase for request in requests for phase in request.phases if phase.name is name]
        starts = np.sort([window.at(phase.start) for phase in phases])
        ends = np.sort([window.at(phase.end or window.end) for phase in phases])
        layers.append(np.searchsorted(starts, steps, "right") - np.searchsorted(ends, steps, "right"))
    ax.stackplot(steps, layers, colors=[colours.of(name) for name in PhaseName], linewidth=0)
    ax.set_ylim(bottom=0)
    _label(ax, f"all {len(requests)}\nby phase", colours)


# ---------------------------------------------------------------- batches


def _batches(rec: Recording, window: Window) -> pd.DataFrame:
    """The batches planned in the window, with `left` and `width` on the axis (where the device ran them)."""
    table = rec.iterations
    scale = NS_PER_MS / window.unit[1]
    origin = (window.start - rec.t0) / NS_PER_MS
    start = table.start_ms.fillna(table.planned_ms)
    table["left"] = (start - origin) * scale
    table["width"] = ((table.end_ms - start) * scale).fillna(0).clip(lower=window.width / PIXELS)
    return table[(table.left <= window.width) & (table.left + table.width >= 0)]


def _draw_batches(ax: Axes, rec: Recording, window: Window, colours: Theme) -> None:
    table = _batches(rec, window)
    handles: list[Patch | Line2D] = []
    for mode, meaning in MODES:
        part = table[table["mode"] == mode]
        if len(part):
            colour = colours.of(meaning)
            ax.bar(part.left, part.new_tokens, part.width, align="edge", color=colour, linewidth=0)
            handles.append(Patch(color=colour, label=f"{mode}: {len(part)}"))
    centres = table.left + table.width / 2
    if len(table) <= DOTS:
        (dots,) = ax.plot(centres, table.batch_size, "o", color=colours.text, markersize=3.5)
        dots.set_label("requests in it")
        handles.append(dots)
    _token_axis(ax, int(table.new_tokens.max()) if len(table) else 1)
    _label(ax, "new tokens\nin a batch", colours)
    _legend(ax, handles, colours)


def _token_axis(ax: Axes, most: int) -> None:
    """Decode batches bring single tokens, prefills hundreds: logarithmic where both must be seen."""
    if most > 20:
        ax.set_yscale("log")
        ax.set_ylim(0.7, most * 1.6)
        ax.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:,.0f}"))
        ax.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    else:
        ax.set_ylim(0, max(1, most) * 1.15)
        ax.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(5, integer=True))


# ---------------------------------------------------------------- memory


def _draw_memory(ax: Axes, rec: Recording, window: Window, colours: Theme) -> None:
    table = _memory(rec, window)
    _label(ax, "KV memory\n(tokens)", colours)
    ax.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:,.0f}"))
    if table.empty:
        ax.text(0.5, 0.5, "no memory events", transform=ax.transAxes, ha="center", color=colours.muted)
        return
    ax.stackplot(
        table.x, [table[name] for name in KV_STATES], colors=[colours.of(name) for name in KV_STATES],
        step="post", linewidth=0,
    )  # fmt: skip
    total, most = int(table.total.max()), int((table.total - table.free).max())
    ax.set_ylim(0, total * 1.02 if most > 0.4 * total else max(1.0, most * 1.25))
    peak = Line2D([], [], linestyle="", label=f"total {total:,}\npeak {most:,} ({most / max(1, total):.1%})")
    _legend(ax, [*_patches(KV_STATES, colours), peak], colours)


def _memory(rec: Recording, window: Window) -> pd.DataFrame:
    """The occupancy over the window at the resolution of the picture, held to its right edge."""
    table = summed_kv(rec)
    scale, origin = NS_PER_MS / window.unit[1], (window.start - rec.t0) / NS_PER_MS
    table["x"] = (table.t_ms - origin) * scale
    table = table[table.x <= window.width]
    if table.empty:
        return table
    before = table[table.x < 0].tail(1).assign(x=0.0)
    inside = table[table.x >= 0]
    bins = (inside.x / max(window.width, 1e-9) * PIXELS).astype(int)
    inside = inside.groupby(bins).last()
    return pd.concat([before, inside, (inside if len(inside) else before).tail(1).assign(x=window.width)])
