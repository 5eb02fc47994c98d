"""The explanation of one request: a row a cause, time across, who was waited for written into the bars.

Imports: recording, viz, matplotlib.
"""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sgviz.recording import Cause, Explanation, Part, Recording
from sgviz.viz import causes as looks
from sgviz.viz.frame import label, nothing, panels, short, title, unit_of
from sgviz.viz.style import Theme, theme

NAMED_SHARE = 0.12  # a bar at least this wide has room for a name


def explain_figure(rec: Recording, rid: str, *, look: str = "light") -> Figure:
    """Draw where the time of `rid` went.

    Raises:
        NotFound: the recording has no such rid. BadRequest: no such look.
    """
    rec, colours = rec.freeze(), theme(look)
    explanation = rec.explain(rid)
    if not explanation.total_ns:
        return nothing(rec, f"{rid} took no time", colours)
    sums = explanation.by_cause()
    causes = [cause for cause in Cause if cause in sums]
    figure, (ax,) = panels([max(1.2, 0.3 * len(causes) + 0.5)], colours)
    name, scale = unit_of(explanation.total_ns)
    for row, cause in enumerate(causes):
        _draw_row(ax, row, [p for p in explanation.parts if p.cause is cause], explanation, scale, colours)
    width = explanation.total_ns / scale
    ax.set_yticks(range(len(causes)), [str(cause) for cause in causes])
    ax.tick_params(axis="y", labelsize=8, labelcolor=colours.text)
    ax.set_ylim(len(causes) - 0.4, -0.6)
    ax.set_xlim(-0.005 * width, 1.005 * width)
    ax.grid(False, axis="y")
    for row, cause in enumerate(causes):
        words = f"{sums[cause] / scale:,.3f} {name}  {sums[cause] / explanation.total_ns:.1%}"
        ax.text(
            1.01, row, words, transform=ax.get_yaxis_transform(), va="center", fontsize=8, color=colours.text
        )
    label(ax, colours, x=f"time since its arrival ({name})")
    title(figure, ax, f"{short(rid)}: where {width:,.3f} {name} went", rec, colours)
    return figure


def _draw_row(
    ax: Axes, row: int, parts: list[Part], explanation: Explanation, scale: float, colours: Theme
) -> None:
    least = explanation.total_ns / 2000  # a shorter stretch would not be seen
    origin = explanation.start_ns
    lefts = [(part.start_ns - origin) / scale for part in parts]
    widths = [max(part.duration_ns, least) / scale for part in parts]
    ax.barh([row] * len(parts), widths, left=lefts, height=0.72, **looks.look(parts[0].cause, colours))
    for part, left, width in zip(parts, lefts, widths):
        if part.blockers and part.duration_ns > NAMED_SHARE * explanation.total_ns:
            rest = len(part.blockers) - 1
            words = short(part.blockers[0]) + (f" +{rest}" if rest else "")
            box = {"facecolor": colours.ground, "edgecolor": "none", "pad": 1.0, "alpha": 0.85}
            ax.text(
                left + width / 2,
                row,
                words,
                ha="center",
                va="center",
                fontsize=7,
                color=colours.text,
                bbox=box,
            )
