"""Phases of requests on servers of every kind: one colour each, in the figures and in JavaScript; the load by rank."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "equivalence"))
from pair_engines import engine_pair

from sgviz.engine import Engine
from sgviz.recording import PhaseName
from sgviz.viz.live_page import module_text
from sgviz.viz.ranks_figure import ranks_figure
from sgviz.viz.style import theme
from sgviz.viz.views import LiveViews, Wanted, themes


@pytest.mark.parametrize("look", ["light", "dark"])
def test_every_phase_has_a_colour_of_its_own_and_the_same_everywhere(look: str) -> None:
    colours = {str(name): theme(look).of(name) for name in PhaseName}
    assert len(set(colours.values())) == len(colours)
    assert {name: themes()[look][name] for name in colours} == colours


def test_the_page_names_every_phase() -> None:
    lists = re.findall(r"^const (?:SIDE_)?PHASES = \[(.*?)\]", module_text(), re.MULTILINE)
    named = {word.strip(' "') for words in lists for word in words.split(",")}
    assert named == {str(name) for name in PhaseName} and len(lists) == 2


def test_the_dashboard_of_a_side_has_its_phases_and_only_batches_that_ran() -> None:
    with engine_pair("tiny-llama", device="mock", mock_step_ms=2.0, max_total_tokens=512) as pair:
        asked = [[number + k for k in range(60)] for number in range(12)]
        pair.generate(asked, {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True})
        for engine, phases in (
            (pair.prefill, {"bootstrap", "transfer"}),
            (pair.decode, {"prealloc", "transfer"}),
        ):
            views = LiveViews(engine.recording())
            views.refresh()
            board = views.make(Wanted()).dashboard
            assert board is not None
            assert phases <= {phase[0] for lane in board.lanes for phase in lane.phases}
            assert board.batches and all(bar.end_ms > bar.start_ms for bar in board.batches)


@pytest.mark.parametrize("look", ["light", "dark"])
def test_the_load_of_every_rank_ends_as_its_scheduler_does(look: str) -> None:
    with Engine("tiny-llama", device="mock", dp_size=3, mock_step_ms=1.0) as engine:
        engine.generate([f"{n}" for n in range(12)], {"max_new_tokens": 20})
        rec = engine.recording().freeze()
    running, waiting, used, chosen = ranks_figure(rec, look=look).axes
    for ax in (running, waiting, used):
        assert [line.get_ydata()[-1] for line in ax.lines] == [0, 0, 0]
    peaks = [max(line.get_ydata()) for line in running.lines]
    assert peaks == [rec.rank(rank).iterations.running.max() for rank in rec.ranks]
    assert sum(len(marks.get_offsets()) for marks in chosen.collections) >= 12
    widths = [line.get_linewidth() for line in running.lines]
    assert widths == sorted(widths, reverse=True) and len(set(widths)) == 3
