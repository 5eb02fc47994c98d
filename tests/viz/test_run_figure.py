"""The figure of a run: every panel shows the recording's numbers, and nothing overlaps."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sgviz.errors import BadRequest, NotFound
from sgviz.recording import Header, Recording
from sgviz.viz.run_figure import run_figure, source_line
from sgviz.viz.style import DARK, LIGHT, Theme, theme

sys.path.insert(0, str(Path(__file__).parents[1] / "recording"))
import itertools

from synthetic import SyntheticRun


def record(requests: int, **options: object) -> Recording:
    return Recording(SyntheticRun(requests, seed=3, **options).events, source="run.sgv")  # type: ignore[arg-type]


def panels(figure: Figure) -> list[Axes]:
    return list(figure.axes)


def png(figure: Figure) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=60)
    return out.getvalue()


def assert_nothing_overlaps(figure: Figure) -> None:
    """Panels, their legends and titles do not cover each other, and legends cover no data."""
    figure.canvas.draw()
    axes = panels(figure)
    for above, below in itertools.pairwise(axes):
        assert above.get_window_extent().y0 >= below.get_window_extent().y1
    for ax in axes:
        legend = ax.get_legend()
        if legend is not None:
            box = legend.get_window_extent()
            assert box.x0 >= ax.get_window_extent().x1
            assert box.x1 <= figure.bbox.x1 + 1 and box.y0 >= 0
    labels = [label.get_window_extent() for label in axes[0].get_yticklabels()]
    for upper, lower in itertools.pairwise(labels):
        assert upper.y0 >= lower.y1 - 1


@pytest.mark.parametrize("requests", [1, 12, 60])
def test_runs_of_all_sizes_are_drawn_without_overlap(requests: int) -> None:
    figure = run_figure(record(requests, total=900, output=(5, 20)))
    assert len(panels(figure)) == (4 if requests > 40 else 3)
    assert_nothing_overlaps(figure)
    assert png(figure).startswith(b"\x89PNG")


def test_one_lane_a_request_named_in_order() -> None:
    rec = record(5)
    labels = [label.get_text() for label in panels(run_figure(rec))[0].get_yticklabels()]
    assert labels == rec.rids


def test_many_requests_are_sampled_and_the_count_is_told() -> None:
    rec = record(90, total=2_000, output=(2, 4))
    axes = panels(run_figure(rec, max_lanes=10))
    labels = [label.get_text() for label in axes[0].get_yticklabels()]
    assert len(labels) == 10 and (labels[0], labels[-1]) == (rec.rids[0], rec.rids[-1])
    assert axes[0].get_ylabel() == "10 of 90 requests" and axes[1].get_ylabel() == "all 90\nby phase"


def test_bars_of_the_lanes_are_the_phases() -> None:
    rec = record(3)
    lanes = panels(run_figure(rec))[0]
    drawn = sum(patch.get_width() for container in lanes.containers for patch in container)
    phases = [phase for rid in rec.rids for phase in rec.request(rid).phases]
    assert drawn == pytest.approx(sum(phase.end - phase.start for phase in phases) / 1e6)


def test_bars_of_the_batches_are_the_new_tokens() -> None:
    rec = record(8)
    ax = panels(run_figure(rec))[-2]
    heights = sorted(patch.get_height() for container in ax.containers for patch in container)
    assert heights == sorted(rec.iterations.new_tokens)


def test_title_states_counts_source_clock_and_losses() -> None:
    rec = record(2)
    figure = run_figure(rec)
    assert figure.get_suptitle().startswith("2 requests, ")
    line = panels(figure)[0].get_title(loc="left")
    assert line == source_line(rec)
    assert "run.sgv" in line and "monotonic" in line and "0 events dropped" in line


def test_cut_file_is_told_in_the_title(tmp_path: Path) -> None:
    rec = record(2)
    assert "cut off (7 bytes" in source_line(Recording(rec._events, truncated=7))


def test_a_simulated_device_is_named_as_such() -> None:
    settings = {"device": "sim:l4", "sim_model": "llama-3-8b"}
    line = source_line(Recording([], Header(settings=settings)))
    assert "device SIMULATED (sim:l4 with llama-3-8b)" in line and "measured" not in line
    assert "all measured" in source_line(Recording([], Header(settings={"device": "cpu"})))


def test_memory_axis_shows_the_use_and_states_the_total() -> None:
    small = panels(run_figure(record(1, total=20_000)))[-1]
    assert small.get_ylim()[1] < 1_000
    assert "total 20,000" in small.get_legend().get_texts()[-1].get_text()
    full = panels(run_figure(record(12, total=200)))[-1]
    assert full.get_ylim()[1] == pytest.approx(204)


def test_chosen_requests_and_their_time_only() -> None:
    rec = record(12)
    axes = panels(run_figure(rec, rids=["req-004"]))
    assert [label.get_text() for label in axes[0].get_yticklabels()] == ["req-004"]
    stats = rec.time_stats("req-004")
    assert axes[-1].get_xlim()[1] == pytest.approx(1.01 * (stats.response_sent - stats.created) / 1e6)


def test_empty_and_unfinished_runs() -> None:
    assert png(run_figure(Recording([]))).startswith(b"\x89PNG")
    events = SyntheticRun(6).events
    for part in (10, len(events) // 3, len(events) // 2):
        assert_nothing_overlaps(run_figure(Recording(events[:part])))


def test_wrong_arguments_are_named() -> None:
    rec = record(1)
    with pytest.raises(NotFound, match="req-9"):
        run_figure(rec, rids=["req-9"])
    with pytest.raises(BadRequest, match="max_lanes is 0"):
        run_figure(rec, max_lanes=0)
    with pytest.raises(BadRequest, match=r"'drak' \(did you mean 'dark'\?\)"):
        run_figure(rec, look="drak")


def test_drawing_leaves_no_global_state() -> None:
    code = (
        "import sys; from sgviz.viz.run_figure import run_figure; from sgviz.recording import Recording\n"
        "run_figure(Recording([]))\n"
        "assert 'matplotlib.pyplot' not in sys.modules and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# ---------------------------------------------------------------- style


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("look", [LIGHT, DARK])
def test_text_is_readable_and_colours_are_distinct(look: Theme) -> None:
    for name in ("text", "muted"):
        bright, dim = sorted((luminance(look.of(name)), luminance(look.ground)), reverse=True)
        assert (bright + 0.05) / (dim + 0.05) >= 4.5
    phases = [look.of(name) for name in ("tokenize", "queue", "prefill", "decode", "mixed", "output")]
    states = [look.of(name) for name in ("free", "evictable", "private", "protected")]
    assert len(set(phases)) == 6 and len(set(states)) == 4


def test_colours_go_by_meaning() -> None:
    assert theme("light") is LIGHT and LIGHT.of("extend") == LIGHT.prefill
    with pytest.raises(BadRequest, match="did you mean 'decode'"):
        LIGHT.of("decoed")
