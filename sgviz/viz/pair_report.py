"""One HTML file about a prefill and a decode server: what clients waited for, the transfers, both sides' figures.

As `report`, for two recordings on one clock. SGLang leaves the two servers' logs to be joined by hand.
Imports: recording, viz, matplotlib.
"""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Iterable, Iterator

import pandas as pd
from matplotlib.figure import Figure

from sgviz.recording import PairedRecording, Recording
from sgviz.recording.pair_tables import token_gaps
from sgviz.recording.transfer_words import size_words
from sgviz.viz.batch_figure import batches_figure
from sgviz.viz.memory_figure import kv_figure
from sgviz.viz.pair_figure import pair_figure, source_lines
from sgviz.viz.pair_journey_figure import pair_journey_figure
from sgviz.viz.report import SLOWEST, cost_html, image_html, page_html, rows_html, spread_words
from sgviz.viz.trade_figure import trade_figure
from sgviz.viz.waits_figure import waits_figure

MEASURES = (
    "From the arrival (at the router, if it was recorded) to what the decode side handed on. The transfer lasts from "
    "the first piece of KV being read to the last one in its pages; what of it came after the prompt, and the look "
    "that noticed it, kept the client waiting."
)
STAGES = (
    ("handshake", "bootstrap_ms"), ("queue of the prefill side", "prefill_queue_ms"), ("prompt", "prefill_ms"),
    ("transfer", "transfer_ms"), ("from the prompt until the KV was seen", "after_prefill_ms"),
    ("decode", "decode_ms"),
)  # fmt: skip


def pair_report_html(pair: PairedRecording, *, title: str = "") -> str:
    """The page as text."""
    began = time.perf_counter()
    table = pair.requests
    gaps = [*token_gaps(pair).values()]
    every = pd.concat(gaps, ignore_index=True) if gaps else pd.Series(dtype=float)
    series = {
        "first token": {"pair": table.ttft_ms.dropna().to_numpy(dtype=float)},
        "between two tokens": {"pair": every.to_numpy(dtype=float)},
    }
    source = "  ·  ".join(source_lines(pair))
    parts = [
        f"<h1>{html.escape(title or 'A prefill and a decode server')}</h1>",
        f'<p class="note">{"<br>".join(map(html.escape, source_lines(pair)))}</p>',
        _summary(table, every),
        _audit(pair),
        "<h2>Both sides</h2>",
        image_html(pair_figure(pair), "both sides"),
        "<h2>Latencies</h2>",
        image_html(trade_figure(series, source=source, words="Who waited longer"), "latencies"),
        *_slowest(pair, table),
    ]
    for side, rec in (("prefill", pair.prefill), ("decode", pair.decode)):
        for rank in rec.ranks:
            for words, draw in _figures():
                words += f", {side} side" + (f", rank {rank}" if len(rec.ranks) > 1 else "")
                parts += [f"<h2>{html.escape(words)}</h2>", image_html(draw(rec.rank(rank)), words)]
    for side, rec in (("prefill", pair.prefill), ("decode", pair.decode)):
        parts.append(cost_html(rec, time.perf_counter() - began, f"What observing the {side} side cost"))
    return page_html(title or "prefill and decode", parts)


def _figures() -> Iterable[tuple[str, Callable[[Recording], Figure]]]:
    yield "Where the time went", waits_figure
    yield "Batches", batches_figure
    yield "KV memory by owner", kv_figure


def _summary(table: pd.DataFrame, gaps: pd.Series) -> str:
    failed, sent = table[table.failed != ""], table.transfer_bytes.sum()
    rows = [
        ("requests on both sides", f"{len(table):,}"),
        ("transfers that failed", f"{len(failed):,}"),
        ("output tokens", f"{int(table.completion_tokens.sum()):,}"),
        ("KV that travelled", size_words(sent)),
        ("rate of a transfer, median", f"{size_words(table.bytes_per_s.median())}/s" if sent else "-"),
        ("time to first token, median / p99", spread_words(table.ttft_ms.dropna())),
        ("between tokens, median / p99", spread_words(gaps)),
        ("end to end, median / p99", spread_words(table.total_ms.dropna())),
        *((f"{words}, median / p99", spread_words(table[column].dropna())) for words, column in STAGES),
    ]
    return f'{rows_html(rows)}<p class="note">{MEASURES}</p>'


def _audit(pair: PairedRecording) -> str:
    report = pair.audit()
    style = "note" if report.balanced else "bad"
    return f'<p class="{style}">audit: {html.escape(str(report)).replace(chr(10), "<br>")}</p>'


def _slowest(pair: PairedRecording, table: pd.DataFrame) -> Iterator[str]:
    """Those whose first token came latest: from then on the decode side is as any server."""
    slowest = table.dropna(subset=["ttft_ms"]).sort_values("ttft_ms", ascending=False).rid.head(SLOWEST)
    if len(slowest):
        yield f"<h2>The {len(slowest)} that waited longest for their first token</h2>"
    for rid in slowest:
        words = pair.explain(rid).text(140)
        yield f"<h3>{html.escape(rid)}</h3>"
        yield image_html(pair_journey_figure(pair, rid), f"{rid} on both sides")
        yield f"<details><summary>in words</summary><pre>{html.escape(words)}</pre></details>"
