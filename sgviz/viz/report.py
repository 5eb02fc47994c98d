"""One HTML file that tells a whole run: numbers, figures, the slowest requests explained, the audit, the cost.

Self-contained: figures are embedded, there is no script and nothing is fetched. Mirrors what one gathers
from SGLang's logs, dashboards and profiles after a run.

Imports: events, recording, viz, matplotlib.
"""

from __future__ import annotations

import base64
import html
import io
import time
from collections.abc import Callable, Iterable

import pandas as pd
from matplotlib.figure import Figure

from sgviz.recording import Recording
from sgviz.recording.balance import imbalance, rank_loads
from sgviz.viz.batch_figure import batches_figure
from sgviz.viz.explain_figure import explain_figure
from sgviz.viz.latency_figure import inter_token_ms, latency_figure
from sgviz.viz.memory_figure import kv_figure, tree_figure
from sgviz.viz.ranks_figure import ranks_figure
from sgviz.viz.run_figure import run_figure, source_line
from sgviz.viz.waits_figure import waits_figure

SLOWEST = 5
DPI = 110
MEASURES = (
    "End to end is total_ms: from arrival to the last byte, the sum of the stages. e2e_ms is the engine's part of it: "
    "it stops when the tokenizer manager is done, before the last byte goes out."
)
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76em; margin: 2em auto; padding: 0 1em; color: #1f2530;
       background: #fff; }
h1 { font-size: 1.5em; margin-bottom: 0 } h2 { font-size: 1.15em; margin-top: 2em }
img { max-width: 100%; height: auto } .note { color: #69707c; font-size: .85em }
table { border-collapse: collapse; font-size: .85em } td, th { padding: .2em .8em; text-align: right;
       border-bottom: 1px solid #dfe3e8 } td:first-child, th:first-child { text-align: left }
pre { font-size: .8em; overflow-x: auto; background: #f6f7f9; padding: .8em } .bad { color: #c01f3f }
"""


def report_html(rec: Recording, *, title: str = "") -> str:
    """The page as text."""
    began = time.perf_counter()
    rec = rec.freeze()
    parts = [
        f"<h1>{html.escape(title or rec.source)}</h1>",
        f'<p class="note">{html.escape(source_line(rec))}</p>',
        _summary(rec),
        _audit(rec),
    ]
    several = len(rec.ranks) > 1
    if several:
        parts += ["<h2>The ranks</h2>", image_html(ranks_figure(rec), "load of the ranks"), _ranks(rec)]
    for rank in rec.ranks:
        for words, draw in _figures():
            words += f", rank {rank}" if several else ""
            parts += [f"<h2>{html.escape(words)}</h2>", image_html(draw(rec.rank(rank)), words)]
    parts += list(_slowest(rec))
    parts.append(cost_html(rec, time.perf_counter() - began))
    return page_html(title or rec.source, parts)


def page_html(title: str, parts: Iterable[str]) -> str:
    """A whole page of these parts."""
    body = "\n".join(parts)
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'


def _figures() -> Iterable[tuple[str, Callable[[Recording], Figure]]]:
    yield "The run", run_figure
    yield "Where the time went", waits_figure
    yield "Latencies", latency_figure
    yield "Batches", batches_figure
    yield "KV memory by owner", kv_figure
    yield "The radix tree at the end", tree_figure


def image_html(figure: Figure, words: str) -> str:
    """The figure as a picture within the page."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="{html.escape(words)}" src="data:image/png;base64,{data}">'


def _summary(rec: Recording) -> str:
    requests, tokens = rec.requests, rec.tokens
    seconds = _seconds(rec)
    gaps = inter_token_ms(rec)
    ended = requests[requests.e2e_ms.notna()]
    rows = [
        ("requests", f"{len(requests):,}"),
        ("output tokens", f"{len(tokens):,}"),
        ("first arrival to last end", f"{seconds:,.3f} s"),
        ("output tokens a second", f"{len(tokens) / seconds:,.1f}" if seconds else "-"),
        ("batches", f"{len(rec.iterations):,}"),
        ("retractions", f"{int(requests.retractions.sum()):,}"),
        ("time to first token, median / p99", spread_words(requests.ttft_ms.dropna())),
        ("between tokens, median / p99", spread_words(pd.Series(gaps))),
        ("end to end (total_ms), median / p99", spread_words(ended.total_ms)),
        ("in the engine (e2e_ms), median / p99", spread_words(requests.e2e_ms.dropna())),
    ]
    return f'{rows_html(rows)}<p class="note">{MEASURES}</p>'


def rows_html(rows: Iterable[tuple[str, str]]) -> str:
    """A table of names and values."""
    cells = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>" for name, value in rows
    )
    return f"<table>{cells}</table>"


def _seconds(rec: Recording) -> float:
    """From the first request's arrival to the last end; a request under way lasts to the end of the recording."""
    phases = [phases for rid in rec.rids if (phases := rec.request(rid).phases)]
    if not phases:
        return 0.0
    return (max(each[-1].end or rec.t_end for each in phases) - min(each[0].start for each in phases)) / 1e9


def spread_words(values: pd.Series) -> str:
    """Median and p99 of milliseconds."""
    return f"{values.quantile(0.5):,.2f} / {values.quantile(0.99):,.2f} ms" if len(values) else "-"


def _ranks(rec: Recording) -> str:
    """What each rank had to do, and how far the busiest is above the mean."""
    table = rank_loads(rec)
    rows = "".join(
        f"<tr><td>rank {row.dp_rank}</td><td>{row.requests:,}</td><td>{row.prompt_tokens:,}</td>"
        f"<td>{row.output_tokens:,}</td></tr>"
        for row in table.itertuples()
    )
    heads = "".join(f"<th>{head}</th>" for head in ("rank", "requests", "prompt tokens", "output tokens"))
    words = f"prompt tokens of the busiest rank: {imbalance(rec):.2f} times the mean"
    return f'<table><tr>{heads}</tr>{rows}</table><p class="note">{words}</p>'


def _audit(rec: Recording) -> str:
    report = rec.audit()
    style = "note" if report.balanced else "bad"
    return f'<p class="{style}">audit: {html.escape(str(report)).replace(chr(10), "<br>")}</p>'


def _slowest(rec: Recording) -> Iterable[str]:
    waits = rec.waits.sort_values("total_ms", ascending=False).head(SLOWEST)
    if waits.empty:
        return
    yield f"<h2>The {len(waits)} slowest requests</h2>"
    for rid in waits.rid:
        explanation = rec.explain(rid)
        if len(rec.ranks) > 1 and not explanation.parts:
            continue
        yield f"<h3>{html.escape(rid)}</h3>"
        if explanation.parts:
            yield image_html(explain_figure(rec, rid), f"explanation of {rid}")
        yield f"<details><summary>in words</summary><pre>{html.escape(explanation.text(140))}</pre></details>"


def cost_html(rec: Recording, spent_s: float, heading: str = "What observing cost") -> str:
    """What observing cost the run, as its components measured it, and what this page cost."""
    rows = (
        "".join(
            f"<tr><td>{html.escape(row.component)}</td><td>{row.events:,}</td><td>{row.cost_ms:,.3f}</td>"
            f"<td>{row.us_per_event:.2f}</td><td>{row.share:.3%}</td></tr>"
            for row in rec.cost.itertuples()
        )
        .replace("nan%", "-")
        .replace("nan", "-")
    )
    heads = "".join(
        f"<th>{head}</th>" for head in ("component", "events", "cost (ms)", "µs an event", "of the run")
    )
    words = f"{rec.cost_words}; making this page took {spent_s:.1f} s"
    return (
        f"<h2>{html.escape(heading)}</h2><table><tr>{heads}</tr>{rows}</table>"
        f'<p class="note">{html.escape(words)}</p>'
    )
