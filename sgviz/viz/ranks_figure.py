"""The load of each data parallel rank over time, and the choices of the controller.

Imports: events, recording, viz, matplotlib.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from sgviz.events.schema import DpChose
from sgviz.recording import Recording
from sgviz.recording.rank_split import SCHEDULER
from sgviz.viz.frame import label, legend, nothing, panels, thousands, title
from sgviz.viz.style import Theme, theme

MEANINGS = ("prefill", "private", "decode", "output", "queue", "transfer", "mixed", "bootstrap")
Dash = Literal["-", "--", ":", "-."]
DASHES: tuple[Dash, ...] = ("-", "--", ":", "-.")
THIN, THICK = 1.1, 2.6  # points; the first rank's line is the thickest, so that those over it hide none


def ranks_figure(rec: Recording, *, look: str = "light") -> Figure:
    """Running, waiting and KV tokens used by rank, and which rank each request went to."""
    rec, colours = rec.freeze(), theme(look)
    table = rec.iterations
    if table.empty:
        return nothing(rec, "no rank has planned a batch yet", colours)
    ends = {rank: _end(rec.rank(rank)) for rank in rec.ranks}
    figure, axes = panels([1.5, 1.5, 1.5, 0.32 * len(rec.ranks) + 0.5], colours, sharex=True)
    for ax, column, words in zip(
        axes, ("running", "waiting", "kv_used"), ("running", "waiting", "KV tokens used")
    ):
        for place, rank in enumerate(rec.ranks):
            mine = table[table.dp_rank == rank]
            style, colour = _line(rank, colours)
            until, last = ends[rank]
            x, y = [*mine.planned_ms, until], [*mine[column], last[column]]
            width = THIN + (THICK - THIN) * (1 - place / max(1, len(rec.ranks) - 1))
            ax.step(x, y, where="post", color=colour, linestyle=style, linewidth=width)
        ax.set_ylim(-0.03 * (most := max(1.0, float(table[column].max()))), 1.08 * most)
        ax.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        thousands(ax)
        label(ax, colours, y=words)
    handles = [
        Line2D([], [], color=_line(rank, colours)[1], linestyle=_line(rank, colours)[0], label=f"rank {rank}")
        for rank in rec.ranks
    ]
    legend(axes[0], handles, colours)
    _choices(rec, axes[-1], colours)
    label(axes[-1], colours, x="time since the first event (ms)", y="chosen")
    title(figure, axes[0], f"Load of {len(rec.ranks)} ranks", rec, colours)
    figure.align_ylabels(axes)
    return figure


def _end(part: Recording) -> tuple[float, dict[str, int]]:
    """When a rank's scheduler last said something (ms since the first event), and its load then."""
    own = [event.t for event in part.stamped() if event.component == SCHEDULER]
    now = part.at()
    used = now.protected + now.private_total
    last = {"running": len(now.running), "waiting": len(now.waiting), "kv_used": used}
    return (own[-1] - part.t0) / 1e6 if own else 0.0, last


def _choices(rec: Recording, ax: Axes, colours: Theme) -> None:
    """A mark a choice, the larger the longer the prompt."""
    made = [(event.t, event.body) for event in rec.stamped() if isinstance(event.body, DpChose)]
    longest = max((body.prompt_tokens for _, body in made), default=1) or 1
    for rank in rec.ranks:
        mine = [(t, body) for t, body in made if body.rank == rank]
        at = np.array([(t - rec.t0) / 1e6 for t, _ in mine])
        sizes = np.array([8 + 80 * body.prompt_tokens / longest for _, body in mine])
        ax.scatter(
            at, np.full(len(at), rank), s=sizes, color=_line(rank, colours)[1], alpha=0.6, linewidths=0
        )
    ax.set_yticks(list(rec.ranks), [f"rank {rank}" for rank in rec.ranks])
    ax.set_ylim(max(rec.ranks) + 0.6, min(rec.ranks) - 0.6)


def _line(rank: int, colours: Theme) -> tuple[Dash, str]:
    """Dashes and colour of a rank; more than there are colours differ in their dashes."""
    return DASHES[rank // len(MEANINGS) % len(DASHES)], colours.of(MEANINGS[rank % len(MEANINGS)])
