"""The page of metrics, made from their tables: `python -m sgviz.observe.page`.

Imports: observe.names.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from sgviz.observe.names import (
    ABSENT,
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    HTTP_COUNTERS,
    HTTP_GAUGES,
    SCHEDULER,
    SIDE_COUNTERS,
    SIDE_GAUGES,
    SIDE_HISTOGRAMS,
    TM_COUNTERS,
    TM_HISTOGRAMS,
    TOKENIZER,
    Named,
)

PAGE = Path(__file__).with_name("METRICS.md")
MODEL = "model_name"
HEAD = """# Metrics

Written from the tables in `names.py` by `python -m sgviz.observe.page`; do not edit. `GET /metrics` serves them.

Names, types, labels and buckets are SGLang's, so that its Grafana boards find them. Each is folded from events at the
scrape, but for the `http_*` ones, which are counted at the port.

With `--tokenizer-metrics-allowed-custom-labels team,app` a request may bring labels of its own in the header
`x-custom-labels: {"team": "search"}` (another name: `--tokenizer-metrics-custom-labels-header`). They are on all
metrics that are marked *custom*, empty where a request brought none. What is not allowed, or no text or number, is
left out; a header that is no JSON object is ignored: measuring must not fail a request.

With `--dp-size` above 1 what each scheduler has of its own (all that has a `tp_rank`, but the events lost) has a label
`dp_rank` as well; requests are counted together.
"""
SIDE_HEAD = """
Of a server that only prefills or only decodes (its label `engine_type` says so instead of *unified*):

| name | type | labels | meaning |
|---|---|---|---|"""
ABSENT_HEAD = """
## Not here

SGLang's metrics that this server does not serve, and why.

| why | names (`sglang:`) |
|---|---|
"""


def page() -> str:
    """The page's text."""
    lines = [HEAD, "| name | type | labels | meaning |", "|---|---|---|---|"]
    scheduler, tokenizer = (MODEL, *SCHEDULER), (MODEL, *TOKENIZER, "*custom*")
    lines += _rows(GAUGES, "gauge", scheduler)
    lines += _rows(COUNTERS, "counter", scheduler) + _rows(HISTOGRAMS, "histogram", scheduler)
    lines += _rows(TM_COUNTERS, "counter", tokenizer) + _rows(TM_HISTOGRAMS, "histogram", tokenizer)
    lines += _rows(HTTP_COUNTERS, "counter", ()) + _rows(HTTP_GAUGES, "gauge", ())
    lines += [SIDE_HEAD, *_rows(SIDE_GAUGES, "gauge", scheduler), *_rows(SIDE_COUNTERS, "counter", scheduler)]
    lines += _rows(SIDE_HISTOGRAMS, "histogram", scheduler)
    absent = "\n".join(f"| {why} | {names} |" for why, names in ABSENT)
    return "\n".join(lines) + "\n" + ABSENT_HEAD + absent.replace("*", "\\*") + "\n"


def _rows(table: Mapping[str, Named], kind: str, base: Sequence[str]) -> list[str]:
    ending = "_total" if kind == "counter" else ""
    return [
        f"| `sglang:{name}{ending}` | {kind} | {', '.join((*base, *what.labels))} | {what.words} |"
        for name, what in table.items()
    ]


def main() -> int:
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
