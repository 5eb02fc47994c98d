"""One request over a prefill and a decode server: what each did when, the KV between, what the client waits for.

Unlike `explain`, which follows whoever keeps the client waiting, the upper lanes show both sides at the same time.
Imports: recording, viz, matplotlib.
"""

from __future__ import annotations

from collections.abc import Iterator

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from sgviz.errors import BadRequest
from sgviz.recording import Cause, PairedRecording, Part
from sgviz.recording.explanation import counted
from sgviz.recording.intervals import Interval, normal, total
from sgviz.recording.pair_explain import Seen
from sgviz.recording.transfer_words import size_words
from sgviz.viz import causes as looks
from sgviz.viz.frame import label, legend, panels, short
from sgviz.viz.pair_figure import source_lines
from sgviz.viz.style import Theme, theme

LANES = ("prefill server", "KV on the way", "decode server", "the client waits for")
AFTER_FIRST = 1.25  # by default so many times the time to the first token is shown
NAMED_SHARE = 0.004  # what takes less is not named
NS_PER_MS = 1e6


def pair_journey_figure(
    pair: PairedRecording, rid: str, *, until_ms: float | None = None, look: str = "light"
) -> Figure:
    """Draw the beginning of a request's life.

    Args:
        until_ms: how much of it, from its arrival on; None: its first token and a little more.

    Raises:
        NotFound: it is not on both sides. BadRequest: `until_ms` is not above 0, or no such look.
    """
    if until_ms is not None and not until_ms > 0:
        raise BadRequest(f"until_ms is {until_ms}; it must be above 0")
    seen, whole, colours = pair.seen(rid), pair.explain(rid), theme(look)
    start = whole.start_ns
    end = start + int(NS_PER_MS * until_ms) if until_ms is not None else _soon_after_first(seen, start)
    end = min(end, start + whole.total_ns)
    figure, (ax,) = panels([2.9], colours)
    used: dict[Cause, int] = {}
    lanes = {
        0: pair.prefill.explain(seen.rid).parts,
        2: _moved(pair.decode.explain(seen.rid).parts, seen.shift),
        3: whole.parts,
    }
    for row, parts in lanes.items():
        for part in parts:
            left, right = max(part.start_ns, start), min(part.end_ns, end)
            if left < right:
                used[part.cause] = used.get(part.cause, 0) + right - left
                _bar(ax, row, left - start, right - left, **looks.look(part.cause, colours))
    _pieces(ax, seen, start, end, colours)
    _axes(ax, (end - start) / NS_PER_MS, colours)
    handles = [
        Patch(label=str(cause), **looks.look(cause, colours))
        for cause in Cause
        if used.get(cause, 0) > NAMED_SHARE * (end - start)
    ]
    legend(ax, handles, colours)
    words = f"{short(seen.rid)}: the first {(end - start) / NS_PER_MS:,.1f} of {whole.total_ns / NS_PER_MS:,.1f} ms"
    figure.suptitle(words, x=0.012, ha="left", color=colours.text, fontsize=12, fontweight="bold")
    ax.set_title("\n".join(source_lines(pair)), loc="left", fontsize=8, color=colours.muted, pad=8)
    return figure


def _soon_after_first(seen: Seen, start: int) -> int:
    first = seen.decode.stats.first_token or seen.decode.stats.prefill_finished
    handed = first + seen.shift if first else seen.arrived
    return (
        start + max(1, int(AFTER_FIRST * (handed - start)))
        if handed
        else seen.decode.stats.completion + seen.shift
    )


def _moved(parts: tuple[Part, ...], shift: int) -> Iterator[Part]:
    for part in parts:
        yield Part(part.start_ns + shift, part.duration_ns, part.cause)


def _pieces(ax: Axes, seen: Seen, start: int, end: int, colours: Theme) -> None:
    """A bar a piece, from its being read on the one side until it is in place on the other."""
    spans = _spans(seen)
    for left, right in spans:
        if left < min(right, end):
            _bar(ax, 1, left - start, min(right, end) - left, facecolor=colours.transfer, linewidth=0)
    if not spans or seen.placed > end or seen.came is None:
        return
    under_way = total(normal(spans))
    words = f"{size_words(seen.came.bytes)} in {counted(len(spans), 'piece')}"
    words += f", {size_words(seen.came.bytes * 1e9 / under_way)}/s while under way" if under_way else ""
    first, last = (spans[0][0] - start) / NS_PER_MS, (seen.placed - start) / NS_PER_MS
    left_side = first > (end - start) / NS_PER_MS - last  # where there is more room
    ax.annotate(
        f"{words}  " if left_side else f"  {words}", (first if left_side else last, 1),
        ha="right" if left_side else "left", va="center", fontsize=8, color=colours.text,
    )  # fmt: skip


def _spans(seen: Seen) -> list[Interval]:
    """Each piece that came: from its being read until it was in place."""
    read = {piece.piece: piece.start_ns for piece in seen.sent.sent} if seen.sent is not None else {}
    came = seen.came.received if seen.came is not None else []
    return [(read.get(each.piece, each.start_ns + seen.shift), each.end_ns + seen.shift) for each in came]


def _bar(ax: Axes, row: int, left_ns: int, width_ns: int, **look: object) -> None:
    ax.barh(row, width_ns / NS_PER_MS, left=left_ns / NS_PER_MS, height=0.7, **look)  # type: ignore[arg-type]


def _axes(ax: Axes, width_ms: float, colours: Theme) -> None:
    ax.set_yticks(range(len(LANES)), LANES)
    ax.tick_params(axis="y", labelsize=8, labelcolor=colours.text)
    ax.set_ylim(len(LANES) - 0.5, -0.5)
    ax.set_xlim(-0.005 * width_ms, 1.005 * width_ms)
    ax.grid(False, axis="y")
    label(ax, colours, x="time since its arrival (ms)")
