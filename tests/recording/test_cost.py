"""What observing cost: each component's own word, as a table and a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgviz.engine import Engine
from sgviz.events import Event
from sgviz.events.schema import LoopIdle, TraceCost
from sgviz.recording import Recording, load
from sgviz.viz.report import report_html

IDLE = LoopIdle(kv_free=1, kv_evictable=0, kv_protected=0)


def test_the_last_word_of_each_component_counts() -> None:
    events = [
        Event(1, 0, "scheduler", 1, TraceCost(events=1, cost_ns=9_000_000)),
        Event(1, 5, "detokenizer", 0, TraceCost(events=4, cost_ns=1_000_000)),
        Event(2, 50_000_000, "scheduler", 1, TraceCost(events=1000, cost_ns=10_000_000)),
        Event(1, 100_000_000, "http", 0, IDLE),
    ]
    rec = Recording(events)
    table = rec.cost.set_index("component")
    assert list(table.index) == ["scheduler", "detokenizer", "http"]
    assert table.loc["scheduler"].to_dict() == pytest.approx(
        {"events": 2, "cost_ms": 10.0, "us_per_event": 10.0, "share": 0.1}
    )
    assert table.loc["detokenizer"].share == pytest.approx(0.01) and table.loc["http"].isna().sum() == 3
    assert rec.cost_words.startswith("observing cost, as far as it was told: scheduler 10.00% (10.00 ms")
    assert rec.cost_words.endswith("; not yet told by http, which tell when they are idle")


def test_a_recording_where_nobody_told_says_so() -> None:
    assert Recording([]).cost.empty and Recording([]).cost_words == "observing cost: no component told it"
    assert "no component told it" in report_html(Recording([]))


def test_every_component_of_an_engine_tells_its_cost_by_its_end(tmp_path: Path) -> None:
    path = tmp_path / "run.sgv"
    with Engine("tiny-llama", device="mock", record=str(path)) as engine:
        for number in range(20):
            engine.chat(f"question {number}", max_tokens=16)
        engine.generate("and once more", {"max_new_tokens": 2})
    rec = load(path)
    table = rec.cost
    assert set(table.component) == {"http", "tokenizer_manager", "engine", "scheduler", "detokenizer"}
    assert (table.cost_ms >= 0).all() and table.cost_ms.sum() > 0
    assert 0 < table.share.sum() < 0.2 and "not told" not in rec.cost_words
    last = {e.component: (e.seq, e.body) for e in rec.stamped() if isinstance(e.body, TraceCost)}
    assert all(body.events <= seq for seq, body in last.values())
    page = report_html(rec)
    assert rec.cost_words in page and "<td>scheduler</td>" in page
