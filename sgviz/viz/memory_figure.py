"""KV memory by owner over time, and the radix tree at a moment with its locks and owners.

Imports: recording, viz, matplotlib.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from sgviz.recording import Recording, TreeNodeState
from sgviz.viz.frame import label, legend, nothing, panels, plain, short, thousands, title
from sgviz.viz.style import Theme, theme
from sgviz.viz.views.radix_tree import Decode

MOST_OWNERS = 12
NEAR_FULL = 0.6  # of the pool in use: then its size is shown too
MOST_LEAVES = 60
CHARACTERS = 160  # of a node's label that fit across the axes
LEAST_TEXT = 4  # characters; less of a node's text says nothing
LAST_GLYPH = "\u0530"  # matplotlib's own font has Latin, Greek and Cyrillic, and warns about the rest
LOCKED, UNLOCKED = "(tree, locked)", "(tree, unlocked)"


def kv_figure(rec: Recording, *, look: str = "light") -> Figure:
    """Who held the KV memory: the largest owners by name, the others together, and the tree."""
    rec, colours = rec.freeze(), theme(look)
    table = rec.kv_owners
    if table.empty:
        return nothing(rec, "no memory events in this recording yet", colours)
    origin = _first_arrival_ms(rec)
    table = table.assign(t_ms=table.t_ms - origin)
    wide = table.pivot_table(index="t_ms", columns="owner", values="tokens", aggfunc="last", fill_value=0)
    tree = [name for name in (LOCKED, UNLOCKED) if name in wide]
    owners = wide.drop(columns=tree).sum().sort_values(ascending=False).index
    shown, rest = list(owners[:MOST_OWNERS]), list(owners[MOST_OWNERS:])
    layers = [wide[name] for name in tree] + [wide[name] for name in shown]
    labels = [*tree, *(short(name) for name in shown)]
    if rest:
        layers.append(wide[rest].sum(axis=1))
        labels.append(f"{len(rest)} others")
    figure, (ax,) = panels([3.2], colours)
    paints: list[Any] = [colours.of("protected" if name == LOCKED else "evictable") for name in tree]
    paints += [_shade(colours, number, len(layers) - len(tree)) for number in range(len(layers) - len(tree))]
    stacks = ax.stackplot(
        wide.index, layers, colors=paints, step="post", linewidth=0.4, edgecolor=colours.ground
    )
    for number, stack in enumerate(stacks):
        stack.set_hatch(["", "//", "..", "\\\\", "xx"][number % 5])
    total = rec.fold().state.ledger.total
    _fit(ax, wide, total, colours)
    handles = [
        Patch(facecolor=paint, hatch=stack.get_hatch(), label=name)
        for paint, stack, name in zip(paints, stacks, labels)
    ]
    legend(ax, handles[::-1], colours)
    thousands(ax)
    label(ax, colours, x="time since the first request arrived (ms)", y="KV tokens")
    title(figure, ax, f"KV memory by owner, of {total:,} tokens", rec, colours)
    return figure


def _first_arrival_ms(rec: Recording) -> float:
    """Since the first event; 0 without any request."""
    starts = [phases[0].start for rid in rec.rids if (phases := rec.request(rid).phases)]
    return (min(starts) - rec.t0) / 1e6 if starts else 0.0


def _fit(ax: Axes, wide: pd.DataFrame, total: int, colours: Theme) -> None:
    """From the first arrival on, and as high as what was used; the pool's size is drawn where it is in sight."""
    most = float(wide.sum(axis=1).max())
    top = min(total, most * 1.08) if total else most * 1.08
    if total and most > NEAR_FULL * total:
        top = total * 1.04
        ax.axhline(total, color=colours.muted, linewidth=0.8, linestyle="--")
    ax.set_ylim(0, max(top, 1))
    last = float(wide.index.max())
    if last > 0:
        ax.set_xlim(0, last)


def _shade(colours: Theme, number: int, count: int) -> tuple[float, float, float]:
    """Between the colour of private memory and the ground, so that neighbours differ in lightness."""
    base = np.array([int(colours.private[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    share = 0.25 + 0.75 * ((number * 5) % max(1, count)) / max(1, count)
    ground = np.array([int(colours.ground[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    mixed = base * share + ground * (1 - share)
    return float(mixed[0]), float(mixed[1]), float(mixed[2])


def tree_figure(
    rec: Recording,
    *,
    at: float | None = None,
    iteration: int | None = None,
    decode: Decode | None = None,
    look: str = "light",
) -> Figure:
    """The radix tree at a moment: tokens across from the root, a row a leaf, locked nodes dark with their owners.

    Args:
        at: ms since the first event; without it and `iteration`, the end.
        decode: token ids to text, e.g. `engine.pipeline.tokenizer.decode`: then each node shows what fits of its text.
    """
    rec, colours = rec.freeze(), theme(look)
    moment = rec.at(time=at, iteration=iteration)
    if not moment.tree:
        return nothing(rec, f"the radix tree is empty at {moment.t_ms:,.3f} ms", colours)
    boxes, leaves = _layout(moment.tree)
    hidden = max(0, leaves - MOST_LEAVES)
    figure, (ax,) = panels([max(1.5, 0.24 * min(leaves, MOST_LEAVES) + 0.6)], colours)
    plain(ax, colours)
    width = max(start + node.tokens for node, start, *_ in boxes) * 1.02
    for node, start, top, height in boxes:
        if top < MOST_LEAVES:
            words = _node_words(node, decode, round(node.tokens / width * CHARACTERS))
            _draw_node(ax, node, words, start, top, height, colours)
    ax.set_xlim(0, width)
    ax.set_ylim(min(leaves, MOST_LEAVES) + 0.2, -0.2)
    ax.set_yticks([])
    ax.grid(False, axis="y")
    label(ax, colours, x="tokens from the root")
    kinds = [
        Patch(facecolor=colours.protected, label="locked by running requests"),
        Patch(facecolor=colours.evictable, hatch="//", edgecolor=colours.ground, label="evictable"),
    ]
    legend(ax, kinds, colours)
    tokens = sum(node.tokens for node in moment.tree)
    more = f", {hidden} leaves not shown" if hidden else ""
    words = f"Radix tree at {moment.t_ms:,.3f} ms: {len(moment.tree)} nodes, {tokens:,} tokens{more}"
    title(figure, ax, words + ("" if moment.tree_exact else " (events were lost: incomplete)"), rec, colours)
    return figure


Box = tuple[TreeNodeState, int, int, int]  # node, first token, top row, rows


def _layout(tree: Sequence[TreeNodeState]) -> tuple[list[Box], int]:
    """Where each node goes: behind its parent, as high as its leaves. Parents come first in `tree`."""
    children: dict[int, list[TreeNodeState]] = {}
    for node in tree:
        children.setdefault(node.parent, []).append(node)
    leaves: dict[int, int] = {}
    for node in reversed(tree):
        leaves[node.node] = sum(leaves[child.node] for child in children.get(node.node, ())) or 1
    places: dict[int, tuple[int, int]] = {}
    boxes, row = [], 0
    used: dict[int, int] = {}
    for node in tree:
        if node.parent in places:
            begin, top = places[node.parent]
            top += used.get(node.parent, 0)
            used[node.parent] = used.get(node.parent, 0) + leaves[node.node]
        else:
            begin, top = 0, row
            row += leaves[node.node]
        places[node.node] = (begin + node.tokens, top)
        boxes.append((node, begin, top, leaves[node.node]))
    return boxes, row


def _node_words(node: TreeNodeState, decode: Decode | None, room: int) -> str:
    """Number, length and owners; and as much of its text as `room` characters hold."""
    words = f"{node.node}: {node.tokens}"
    if node.owners:
        words += (
            " " + ", ".join(short(rid) for rid in node.owners[:2]) + (" …" if len(node.owners) > 2 else "")
        )
    room -= len(words) + len(' ""')
    if decode is None or room < LEAST_TEXT:
        return words
    text = decode(np.frombuffer(node.token_ids, dtype="<i4")[:CHARACTERS].tolist())
    seen = "".join(each if each.isprintable() and each < LAST_GLYPH else "·" for each in text)
    return f'{words} "{seen if len(seen) <= room else seen[: room - 1] + "…"}"'


def _draw_node(
    ax: Axes, node: TreeNodeState, words: str, start: int, top: int, height: int, colours: Theme
) -> None:
    locked = node.locks > 0
    paint = colours.protected if locked else colours.evictable
    hatch = "" if locked else "//"
    ax.add_patch(
        Rectangle(
            (start, top + 0.06),
            node.tokens,
            height - 0.12,
            facecolor=paint,
            edgecolor=colours.ground,
            hatch=hatch,
        )
    )
    box = {"facecolor": colours.ground, "edgecolor": "none", "pad": 0.6, "alpha": 0.85}
    ax.text(
        start + 0.3,
        top + height / 2,
        words,
        va="center",
        fontsize=6.5,
        color=colours.text,
        bbox=box,
        clip_on=True,
        parse_math=False,
    )
