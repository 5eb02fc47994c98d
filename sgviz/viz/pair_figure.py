"""A prefill and a decode server on one time axis: a lane a request on each side, the transfers between, both memories.

Simplified: at most `max_lanes` requests, chosen evenly over the arrivals. Imports: errors, recording, viz, matplotlib.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import ConnectionPatch, Patch

from sgviz.errors import BadRequest
from sgviz.recording import PairedRecording, Phase, PhaseName, Recording
from sgviz.recording.balance import summed_kv
from sgviz.recording.explanation import counted
from sgviz.recording.pair_explain import Seen
from sgviz.recording.transfer_words import size_words
from sgviz.viz.frame import PIXELS, label, legend, panels, short, thousands, unit_of
from sgviz.viz.run_figure import source_line
from sgviz.viz.style import Theme, theme

MAX_LANES = 24
ARROWS = 24  # more would be a curtain
KV_STATES = ("protected", "private", "evictable", "free")


def pair_figure(pair: PairedRecording, *, max_lanes: int = MAX_LANES, look: str = "light") -> Figure:
    """Draw both sides of a run.

    Raises:
        BadRequest: `max_lanes` is below 1, or no such look.
    """
    if max_lanes < 1:
        raise BadRequest(f"max_lanes is {max_lanes}; at least one lane is needed")
    colours = theme(look)
    picked = np.unique(np.linspace(0, len(pair.rids) - 1, min(max_lanes, len(pair.rids))).round().astype(int))
    seen = [pair.seen(pair.rids[at]) for at in picked]
    start, end = _window(pair, seen)
    height = max(1.0, 0.16 * len(seen) + 0.3)
    figure, axes = panels([height, 0.9, height, 1.1, 1.1], colours, sharex=True)
    top, middle, bottom, *memories = axes
    name, scale = unit_of(end - start)
    _lanes(top, [(each, each.prefill.phases, 0) for each in seen], start, end, scale, colours)
    _lanes(
        bottom, [(each, each.decode.phases, pair.clock.shift_ns) for each in seen], start, end, scale, colours
    )
    _transfers(middle, pair, start, scale, colours)
    _arrows(figure, top, bottom, seen, start, scale, colours)
    for ax, rec, shift, side in (
        (memories[0], pair.prefill, 0, "prefill"),
        (memories[1], pair.decode, pair.clock.shift_ns, "decode"),
    ):
        _memory(ax, rec, shift - start, (end - start) / scale, scale, colours)
        label(ax, colours, y=f"KV tokens\n({side})")
    _words(figure, axes, pair, len(seen), name, colours)
    memories[-1].set_xlim(-0.01 * (end - start) / scale, 1.01 * (end - start) / scale)
    return figure


def _window(pair: PairedRecording, seen: Sequence[Seen]) -> tuple[int, int]:
    phases = [(phase, 0) for each in seen for phase in each.prefill.phases]
    phases += [(phase, pair.clock.shift_ns) for each in seen for phase in each.decode.phases]
    starts = [phase.start + shift for phase, shift in phases]
    last = pair.decode.t_end + pair.clock.shift_ns
    ends = [(phase.end + shift) if phase.end else last for phase, shift in phases]
    return min(starts, default=pair.t0), max(*ends, min(starts, default=pair.t0) + 1)


def _lanes(
    ax: Axes,
    runs: Sequence[tuple[Seen, Sequence[Phase], int]],
    start: int,
    end: int,
    scale: float,
    colours: Theme,
) -> None:
    used: dict[PhaseName, None] = {}
    for row, (_, phases, shift) in enumerate(runs):
        for phase in phases:
            name = phase.name
            begin = phase.start + shift
            until = phase.end + shift if phase.end else end
            used[name] = None
            ax.barh(
                row, (until - begin) / scale, left=(begin - start) / scale, height=0.72, color=colours.of(name),
                linewidth=0,
            )  # fmt: skip
    ax.set_yticks(range(len(runs)), [short(each.rid) for each, _, _ in runs])
    ax.tick_params(axis="y", labelsize=7, labelcolor=colours.text)
    ax.set_ylim(len(runs) - 0.4, -0.6)
    ax.grid(False, axis="y")
    names = [name for name in PhaseName if name in used]
    legend(ax, [Patch(color=colours.of(name), label=str(name)) for name in names], colours)


def _transfers(ax: Axes, pair: PairedRecording, start: int, scale: float, colours: Theme) -> None:
    """How much was under way at a moment: the bytes of the transfers of which a piece was read and not all in place."""
    spans = [
        (each.placed - each.travelled_ns, each.placed, each.came.bytes)
        for each in map(pair.seen, pair.rids)
        if each.came is not None and each.travelled_ns
    ]
    label(ax, colours, y="MB on\nthe way")
    if not spans:
        ax.text(
            0.5, 0.5, "no KV travelled", transform=ax.transAxes, ha="center", va="center", color=colours.muted
        )
        ax.set_yticks([])
        return
    changes = sorted([(t, size) for t, _, size in spans] + [(t, -size) for _, t, size in spans])
    times = [(t - start) / scale for t, _ in changes]
    levels = np.cumsum([size for _, size in changes]) / 1e6
    ax.fill_between(times, levels, step="post", color=colours.transfer, linewidth=0)
    ax.set_ylim(bottom=0)
    total = size_words(sum(size for _, _, size in spans))
    legend(
        ax,
        [Patch(color=colours.transfer, label=f"{counted(len(spans), 'transfer')},\n{total}")],
        colours,
    )


def _arrows(
    figure: Figure, top: Axes, bottom: Axes, seen: Sequence[Seen], start: int, scale: float, colours: Theme
) -> None:
    """From the prompt's last result on the one side to where all was in place on the other."""
    for row in range(0, len(seen), max(1, -(-len(seen) // ARROWS))):
        each = seen[row]
        if not each.computed or not each.arrived:
            continue
        patch = ConnectionPatch(
            xyA=((each.computed - start) / scale, row), coordsA="data", axesA=top,
            xyB=((each.arrived - start) / scale, row), coordsB="data", axesB=bottom,
            arrowstyle="-|>", mutation_scale=7, color=colours.transfer, linewidth=0.7, alpha=0.75,
        )  # fmt: skip
        patch.set_in_layout(False)
        figure.add_artist(patch)


def _memory(ax: Axes, rec: Recording, offset: int, width: float, scale: float, colours: Theme) -> None:
    table = summed_kv(rec)
    thousands(ax)
    if table.empty or not table.total.max():
        ax.text(0.5, 0.5, "no memory events", transform=ax.transAxes, ha="center", color=colours.muted)
        ax.set_yticks([])
        return
    table["x"] = (table.t_ms * 1e6 + rec.t0 + offset) / scale
    table = table[table.x <= width]
    bins = (table.x.clip(lower=0) / max(width, 1e-9) * PIXELS).astype(int)
    table = table.groupby(bins).last()
    x = [*table.x.clip(lower=0), width]
    layers = [[*table[name], table[name].iloc[-1]] for name in KV_STATES]
    ax.stackplot(x, layers, colors=[colours.of(name) for name in KV_STATES], step="post", linewidth=0)
    total, most = int(table.total.max()), int((table.total - table.free).max())
    ax.set_ylim(0, total * 1.02 if most > 0.4 * total else max(1.0, most * 1.25))
    handles = [Patch(color=colours.of(name), label=str(name)) for name in KV_STATES]
    handles.append(Patch(facecolor="none", edgecolor="none", label=f"peak {most:,} of {total:,}"))
    legend(ax, handles, colours)


def _words(
    figure: Figure, axes: Sequence[Axes], pair: PairedRecording, lanes: int, unit: str, colours: Theme
) -> None:
    count = len(pair.rids)
    shown = "" if lanes == count else f", {lanes} of them shown"
    words = f"{count} request{'s' * (count != 1)} prefilled on one server and decoded on the other{shown}"
    figure.suptitle(words, x=0.012, ha="left", color=colours.text, fontsize=12, fontweight="bold")
    lost = any(rec.dropped or rec.truncated or rec.unknown for rec in (pair.prefill, pair.decode))
    colour = colours.alert if lost else colours.muted
    axes[0].set_title("\n".join(source_lines(pair)), loc="left", fontsize=8, color=colour, pad=8)
    label(axes[0], colours, y="prefill side")
    label(axes[2], colours, y="decode side")
    label(axes[-1], colours, x=f"time since the first request arrived ({unit})")
    figure.align_ylabels(list(axes))


def source_lines(pair: PairedRecording) -> list[str]:
    """Where the numbers of both sides come from, and how their clocks were joined."""
    sides = (("prefill", pair.prefill), ("decode", pair.decode))
    return [*(f"{side}: {source_line(rec)}" for side, rec in sides), f"clock: {pair.clock.words}"]
