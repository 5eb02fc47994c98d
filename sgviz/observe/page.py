"""The page of metrics, made from their tables: `python -m sgviz.observe.page`.

Imports: observe.metrics.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from sgviz.observe.metrics import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    SCHEDULER,
    SCHEDULER_HISTOGRAMS,
    TM_COUNTERS,
    TOKENIZER,
)

PAGE = Path(__file__).with_name("METRICS.md")
HEAD = """# Metrics

Written from the tables in `metrics.py` by `python -m sgviz.observe.page`; do not edit. `GET /metrics` serves them.

Names, types and labels are SGLang's, so that its Grafana boards find them. Each is folded from events at the scrape.
SGLang's metrics that are not listed (speculation, LoRA, host cache, disaggregation, experts) have nothing to count
here.
"""


def page() -> str:
    """The page's text."""
    lines = [HEAD, "| name | type | labels beyond `model_name` | meaning |", "|---|---|---|---|"]
    for name, words in GAUGES.items():
        lines.append(_row(name, "gauge", tuple(SCHEDULER), words))
    for table, base in ((COUNTERS, SCHEDULER), (TM_COUNTERS, TOKENIZER)):
        lines += [
            _row(f"{name}_total", "counter", (*base, *more), words) for name, (words, more) in table.items()
        ]
    for histograms, base in ((HISTOGRAMS, TOKENIZER), (SCHEDULER_HISTOGRAMS, SCHEDULER)):
        lines += [
            _row(name, "histogram", (*base, *more), words) for name, (words, _, more) in histograms.items()
        ]
    return "\n".join(lines) + "\n"


def _row(name: str, kind: str, labels: Sequence[str], words: str) -> str:
    return f"| `sglang:{name}` | {kind} | {', '.join(labels)} | {words} |"


def main() -> int:
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
