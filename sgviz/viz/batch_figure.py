"""Batch by batch: what each was made of, how full, and how long the device took and stood still.

Imports: recording, viz, matplotlib.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sgviz.recording import Recording
from sgviz.viz.frame import label, legend, nothing, panels, thousands, title
from sgviz.viz.style import theme

MOST_BARS = 400  # more batches are averaged in groups of neighbours


def batches_figure(rec: Recording, *, look: str = "light") -> Figure:
    """Draw the composition of the batches in the order of planning."""
    rec, colours = rec.freeze(), theme(look)
    iterations = rec.iterations
    if iterations.empty:
        return nothing(rec, "no batch was planned yet", colours)
    table = _composition(rec, iterations)
    groups = np.array_split(np.arange(len(table)), min(MOST_BARS, len(table)))
    x = np.arange(len(groups)) * len(table) / len(groups)
    width = len(table) / len(groups) * 0.95
    figure, (tokens, members, times) = panels([1.8, 1.4, 1.4], colours, sharex=True)
    for ax, layers in (
        (tokens, (("prefill_tokens", "prefill", ""), ("decode_tokens", "decode", "//"))),
        (members, (("prefilling", "prefill", ""), ("decoding", "decode", "//"))),
        (times, (("device_ms", "decode", ""), ("gap_ms", "alert", ".."))),
    ):
        bottom = np.zeros(len(groups))
        for name, meaning, hatch in layers:
            values = table[name].fillna(0).to_numpy(dtype=float)
            heights = np.array([values[group].mean() for group in groups])
            paint: dict[str, Any] = {
                "color": colours.of(meaning),
                "hatch": hatch,
                "edgecolor": colours.ground,
                "linewidth": 0,
            }
            ax.bar(x, heights, width, bottom=bottom, align="edge", label=_words(name), **paint)
            bottom += heights
        legend(ax, None, colours)
    thousands(tokens)
    label(tokens, colours, y="new tokens")
    label(members, colours, y="requests")
    label(times, colours, y="time (ms)")
    grouped = (
        f" (mean of {len(table) / len(groups):.1f} neighbours a bar)" if len(groups) < len(table) else ""
    )
    label(times, colours, x=f"batch in the order of planning{grouped}")
    title(figure, tokens, f"What {len(table):,} batches were made of", rec, colours)
    return figure


def _composition(rec: Recording, iterations: pd.DataFrame) -> pd.DataFrame:
    """Tokens and members of each batch that compute prompts, and that decode (one new token)."""
    members = rec.batches
    decoding = (members["mode"] != "extend") & (members.extend_len == 1)
    parts = (
        members.assign(decode=decoding)
        .groupby(["bid", "decode"])
        .extend_len.agg(["sum", "count"])
        .unstack(fill_value=0)
    )
    columns = {}
    for decode, tokens, count in (
        (False, "prefill_tokens", "prefilling"),
        (True, "decode_tokens", "decoding"),
    ):
        columns[tokens] = parts["sum"].get(decode, pd.Series(0, index=parts.index))
        columns[count] = parts["count"].get(decode, pd.Series(0, index=parts.index))
    return iterations.merge(pd.DataFrame(columns), left_on="bid", right_index=True, how="left")


def _words(name: str) -> str:
    return {"device_ms": "device runs", "gap_ms": "device stands still before"}.get(
        name, name.replace("_", " ")
    )
