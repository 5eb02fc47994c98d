"""Device and host of several runs over the same seconds, one pair of lanes a run; and their account as bars.

What is drawn is the overlap account itself: its spans, its hidden, exposed and idle seconds. Time counts from
the first launch of each run, so that runs made one after the other lie below each other.
Imports: recording, viz.style, matplotlib.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from sgviz.errors import BadRequest
from sgviz.recording.intervals import Interval, both, normal, without
from sgviz.recording.overlap_account import COPY, SAMPLE, STAGES, WAIT, OverlapAccount, Span
from sgviz.viz.style import HostColours, Theme, host_colours, theme

NS_PER_MS = 1e6
FORWARDS_SHOWN = 10
MODES = ("extend", "mixed", "decode")
DEVICE_ROW, HOST_ROW, RUN_HEIGHT = 0.0, 1.0, 2.6
LANE = (-0.4, 0.8)  # of a row: where its bars begin, and how high they are
COPY_LANE = (0.42, 0.13)  # below the device's own, as copies run beside the next forward
PALE = 0.45  # of a colour; the rest is the ground's


def lanes_figure(
    accounts: Mapping[str, OverlapAccount], *, source: str, seconds: float | None = None, look: str = "light"
) -> Figure:
    """Only the lanes, see `draw_lanes`. `source` is printed above them."""
    colours = theme(look)
    figure = Figure(figsize=(11.5, 1.6 + 1.1 * len(accounts)), layout="constrained", facecolor=colours.ground)
    FigureCanvasAgg(figure)
    ax = figure.subplots()
    draw_lanes(ax, accounts, seconds=seconds, look=look)
    ax.set_title(source, loc="left", fontsize=8, color=colours.muted)
    return figure


def shown_stretch(accounts: Mapping[str, OverlapAccount], seconds: float | None) -> tuple[float, float]:
    """Begin and end of what the lanes show, in ms after the first launch; it lies within every run's window.

    Raises:
        BadRequest: `seconds` is not above 0, or no run launched anything.
    """
    if seconds is not None and not seconds > 0:
        raise BadRequest(f"seconds is {seconds}; it must be above 0", param="seconds")
    windows = [account.window_s * 1000 for account in accounts.values() if account.launches]
    if not windows:
        raise BadRequest("no run launched a batch: there is nothing to draw")
    turns = [account.window_s * 1000 / account.launches for account in accounts.values() if account.launches]
    length = min(seconds * 1000 if seconds else FORWARDS_SHOWN * float(np.median(turns)), min(windows))
    begin = (min(windows) - length) / 2
    return begin, begin + length


def draw_lanes(
    ax: Axes, accounts: Mapping[str, OverlapAccount], *, seconds: float | None = None, look: str = "light"
) -> None:
    """Two lanes a run: forwards by mode, paler while they are sampled, with the copies of results below and the
    device's idle time; and the host's stages.

    Args:
        seconds: how much to show, from the middle of the shortest run; None: about ten forwards.
    """
    colours, host = theme(look), host_colours(look)
    begin, end = shown_stretch(accounts, seconds)
    ticks: list[tuple[float, str]] = []
    for number, (name, account) in enumerate(accounts.items()):
        top = number * RUN_HEIGHT
        origin = account.window[0]
        shown = [(origin + round(begin * NS_PER_MS), origin + round(end * NS_PER_MS))]
        _draw_device(ax, top + DEVICE_ROW, account, shown, colours)
        _draw_host(ax, top + HOST_ROW, account, shown, host)
        ticks += [(top + DEVICE_ROW, f"{name}\ndevice"), (top + HOST_ROW, "host")]
    _finish_lanes(ax, ticks, (begin, end), colours)
    used = {span.stage for account in accounts.values() for span in (*account.device, *account.copies)}
    _legend(ax, _lane_patches(used, colours, host), colours)


def _draw_device(
    ax: Axes, row: float, account: OverlapAccount, shown: list[Interval], colours: Theme
) -> None:
    origin = account.window[0]
    modes = {span.bid: span.stage for span in account.device if span.stage != SAMPLE}
    for mode in dict.fromkeys(modes.values()):
        colour = colours.of(_mode_colour(mode))
        samples = [span for span in account.device if span.stage == SAMPLE and modes.get(span.bid) == mode]
        _bars(ax, row, _of(account.device, mode, shown), origin, colour, edge=colours.ground)
        _bars(ax, row, _of(samples, SAMPLE, shown), origin, _pale(colour, colours), edge=colours.ground)
    _bars(ax, row, _of(account.copies, COPY, shown), origin, _pale(colours.muted, colours), lane=COPY_LANE)
    busy = both(normal((span.start, span.end) for span in account.device), shown)
    idle = without(both(account.runnable, shown), busy)
    ax.broken_barh(
        [_at(pair, origin) for pair in idle], (row + LANE[0], LANE[1]), facecolor="none", edgecolor=colours.alert,
        hatch="//////", linewidth=0.0,
    )  # fmt: skip


def _draw_host(
    ax: Axes, row: float, account: OverlapAccount, shown: list[Interval], host: HostColours
) -> None:
    origin = account.window[0]
    for stage in (*STAGES, WAIT):
        _bars(ax, row, _of(account.host, stage, shown), origin, host.of(stage))


def _of(spans: Sequence[Span], stage: str, shown: list[Interval]) -> list[Interval]:
    """The parts of the spans of one stage that are shown; neighbours stay apart."""
    low, high = shown[0]
    return [
        (max(span.start, low), min(span.end, high))
        for span in spans
        if span.stage == stage and span.start < high and span.end > low
    ]


def _bars(
    ax: Axes, row: float, parts: Sequence[Interval], origin: int, colour: str, *,
    edge: str | None = None, lane: tuple[float, float] = LANE,
) -> None:  # fmt: skip
    if parts:
        ax.broken_barh(
            [_at(part, origin) for part in parts], (row + lane[0], lane[1]), facecolor=colour,
            edgecolor=edge or colour, linewidth=0.5 if edge else 0.0,
        )  # fmt: skip


def _pale(colour: str, colours: Theme) -> str:
    mixed = [PALE * own + (1 - PALE) * ground for own, ground in zip(to_rgb(colour), to_rgb(colours.ground))]
    return to_hex((mixed[0], mixed[1], mixed[2]))


def _at(part: Interval, origin: int) -> tuple[float, float]:
    return (part[0] - origin) / NS_PER_MS, (part[1] - part[0]) / NS_PER_MS


def _mode_colour(mode: str) -> str:
    return mode if mode in MODES else "decode"


def _finish_lanes(
    ax: Axes, ticks: Sequence[tuple[float, str]], stretch: tuple[float, float], colours: Theme
) -> None:
    plain(ax, colours)
    ax.grid(False, axis="y")
    ax.set_yticks([row for row, _ in ticks], [text for _, text in ticks])
    ax.tick_params(axis="y", labelcolor=colours.text, length=0)
    ax.set_ylim(max(row for row, _ in ticks) + 0.6, -0.6)
    ax.set_xlim(*stretch)
    ax.set_xlabel("ms after the first launch of each run", color=colours.text, fontsize=9)


def _lane_patches(modes: set[str], colours: Theme, host: HostColours) -> list[Patch]:
    patches = [
        Patch(color=colours.of(_mode_colour(mode)), label=f"forward: {mode}")
        for mode in MODES
        if mode in modes
    ]
    if SAMPLE in modes:
        patches.append(Patch(color=_pale(colours.decode, colours), label="paler: sampling"))
    if COPY in modes:
        patches.append(Patch(color=_pale(colours.muted, colours), label="below: copy to the host"))
    patches.append(
        Patch(
            facecolor="none",
            edgecolor=colours.alert,
            hatch="//////",
            linewidth=0,
            label="device idle, work to do",
        )
    )
    patches += [Patch(color=host.of(stage), label=f"host: {stage}") for stage in STAGES]
    patches.append(Patch(facecolor=host.wait, edgecolor=colours.grid, label="host waits for a result"))
    return patches


# ---------------------------------------------------------------- bars


def draw_account(ax: Axes, accounts: Mapping[str, OverlapAccount], *, look: str = "light") -> None:
    """Two stacked bars a run, in per cent of its own window: the host's time, and the device's."""
    colours, host = theme(look), host_colours(look)
    rows: list[tuple[float, str]] = []
    for number, (name, account) in enumerate(accounts.items()):
        top = number * RUN_HEIGHT
        whole = account.window_s or 1.0
        rest = account.host_busy_s - account.host_hidden_s - account.host_exposed_s
        hosts = [
            (account.host_hidden_s, host.hidden), (account.host_exposed_s, host.exposed), (rest, host.loop),
            (account.host_wait_s, host.wait),
        ]  # fmt: skip
        devices = [(account.device_busy_s, colours.decode), (account.device_idle_s, colours.alert)]
        _stack(ax, top + DEVICE_ROW, devices, whole, colours, host)
        _stack(ax, top + HOST_ROW, hosts, whole, colours, host)
        rows += [(top + DEVICE_ROW, f"{name}\ndevice"), (top + HOST_ROW, "host")]
    plain(ax, colours)
    ax.grid(False, axis="y")
    ax.set_yticks([row for row, _ in rows], [text for _, text in rows])
    ax.tick_params(axis="y", labelcolor=colours.text, length=0)
    ax.set_ylim(max(row for row, _ in rows) + 0.6, -0.6)
    ax.set_xlim(0, 100)
    ends = ", ".join(dict.fromkeys(account.until for account in accounts.values()))
    ax.set_xlabel(
        f"% of the time from the first launch to the {ends} (one run each); seconds in the bars",
        color=colours.text,
        fontsize=9,
    )
    patches = [
        Patch(color=colours.decode, label="device busy"), Patch(color=colours.alert, label="device idle, work to do"),
        Patch(color=host.hidden, label="host hidden"), Patch(color=host.exposed, label="host exposed"),
        Patch(color=host.loop, label="host busy, nothing to run"),
        Patch(facecolor=host.wait, edgecolor=colours.grid, label="host waits for a result"),
    ]  # fmt: skip
    _legend(ax, patches, colours)


def _stack(
    ax: Axes,
    row: float,
    parts: Sequence[tuple[float, str]],
    whole: float,
    colours: Theme,
    host: HostColours,
) -> None:
    left = 0.0
    for seconds, colour in parts:
        share = 100 * seconds / whole
        if share <= 0:
            continue
        ax.barh(row, share, left=left, height=0.8, color=colour, linewidth=0)
        if share > 7:
            ink = colours.text if colour == host.wait else colours.ground
            ax.text(
                left + share / 2, row, f"{seconds:.2f} s", ha="center", va="center", fontsize=8, color=ink
            )
        left += share


# ---------------------------------------------------------------- shared


def plain(ax: Axes, colours: Theme) -> None:
    """The page's colours; only left and bottom lines."""
    ax.set_facecolor(colours.ground)
    ax.tick_params(which="both", colors=colours.muted, labelsize=8)
    ax.grid(True, color=colours.grid, linewidth=0.6)
    ax.set_axisbelow(True)
    for side, spine in ax.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(colours.grid)


def _legend(ax: Axes, patches: Sequence[Patch], colours: Theme) -> None:
    legend = ax.legend(
        handles=list(patches), loc="upper left", bbox_to_anchor=(1.005, 1.02), frameon=False, fontsize=8,
        handlelength=1.2,
    )  # fmt: skip
    for text in legend.get_texts():
        text.set_color(colours.text)
