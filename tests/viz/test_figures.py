"""The small figures: they draw what the tables say, name their units and source, and survive grey printers."""

from __future__ import annotations

import base64
import re
from itertools import pairwise

import msgspec
import pytest
from matplotlib.figure import Figure
from random_runs import run
from synthetic import SyntheticRun
from workload import crowd

from sgviz.errors import BadRequest, NotFound
from sgviz.events.schema import LoopIdle
from sgviz.recording import Cause, Recording
from sgviz.viz.batch_figure import batches_figure
from sgviz.viz.causes import LOOKS, look
from sgviz.viz.diff_figure import diff_figure
from sgviz.viz.explain_figure import explain_figure
from sgviz.viz.latency_figure import inter_token_ms, latency_figure
from sgviz.viz.memory_figure import kv_figure, tree_figure
from sgviz.viz.report import report_html
from sgviz.viz.style import theme
from sgviz.viz.waits_figure import waits_figure

WHOLE = (waits_figure, kv_figure, tree_figure, batches_figure, latency_figure)


@pytest.fixture(scope="module")
def rec() -> Recording:
    return Recording(SyntheticRun(20, seed=1, total=320, gap_us=2_000).events)


@pytest.fixture(scope="module")
def pressed() -> Recording:
    config: dict[str, object] = {
        "tokens": 192,
        "chunked_prefill_size": 16,
        "schedule_conservativeness": 0.001,
    }
    return run(config, crowd(3))[0].recording()


def words(figure: Figure) -> str:
    texts = [
        text
        for ax in figure.axes
        for text in (ax.xaxis.label, ax.yaxis.label, ax.title, ax._left_title, *ax.texts)
    ]
    legends = [text for ax in figure.axes if ax.get_legend() for text in ax.get_legend().get_texts()]
    return "\n".join(text.get_text() for text in [*texts, *legends, *figure.texts, figure._suptitle] if text)


@pytest.mark.parametrize("draw", WHOLE)
@pytest.mark.parametrize("ground", ["light", "dark"])
def test_every_figure_draws_and_states_its_source(draw, ground: str, pressed: Recording) -> None:  # type: ignore[no-untyped-def]
    figure = draw(pressed, look=ground)
    figure.draw_without_rendering()
    said = words(figure)
    assert "source: events" in said and "0 events dropped" in said
    assert re.search(r"\((ms|s)\)|tokens|requests", said)


@pytest.mark.parametrize("draw", WHOLE)
def test_an_empty_recording_gives_a_figure_that_says_so(draw) -> None:  # type: ignore[no-untyped-def]
    assert re.search(r"no |empty|yet", words(draw(Recording([]))))


def test_explain_figure_s_bars_are_the_parts(pressed: Recording) -> None:
    rid = pressed.requests.set_index("rid").retractions.idxmax()
    explanation = pressed.explain(rid)
    ax = explain_figure(pressed, rid).axes[0]
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert set(labels) == {str(cause) for cause in explanation.by_cause()}
    for row, name in enumerate(labels):
        bars = [bar for bar in ax.patches if abs(bar.get_y() + bar.get_height() / 2 - row) < 0.1]
        drawn, true = sum(bar.get_width() for bar in bars), explanation.by_cause()[Cause(name)] / 1e6
        least = len(bars) * explanation.total_ns / 2000 / 1e6
        assert true - 1e-9 <= drawn <= true + least
    assert "unexplained" in labels or explanation.unexplained_ns == 0


def test_explain_figure_of_an_unknown_request_is_refused(pressed: Recording) -> None:
    with pytest.raises(NotFound):
        explain_figure(pressed, "nobody")
    with pytest.raises(BadRequest, match="no theme"):
        explain_figure(pressed, pressed.rids[0], look="pink")


def test_causes_are_told_apart_without_colour() -> None:
    assert set(LOOKS) == set(Cause) and len(set(LOOKS.values())) == len(LOOKS)
    for ground in ("light", "dark"):
        assert all(look(cause, theme(ground)) for cause in Cause)


def test_waits_figure_s_bars_add_up_to_all_time(pressed: Recording) -> None:
    sums = waits_figure(pressed).axes[0]
    assert sum(bar.get_width() for bar in sums.patches) == pytest.approx(pressed.waits.total_ms.sum())


def test_tree_figure_shows_each_node_with_its_length(pressed: Recording) -> None:
    moment = next(
        m for m in (pressed.at(count=n) for n in range(400, 1200, 50)) if len(m.tree) > 3 and m.running
    )
    figure = tree_figure(pressed, at=moment.t_ms)
    shown = pressed.at(time=moment.t_ms).tree
    widths = sorted(round(patch.get_width()) for patch in figure.axes[0].patches)
    assert widths == sorted(node.tokens for node in shown)
    assert all(f"{node.node}: {node.tokens}" in words(figure) for node in shown)


def test_tree_figure_writes_into_a_node_what_fits_of_its_text(pressed: Recording) -> None:
    figure = tree_figure(pressed, decode=lambda ids: "ab\n漢$" * len(ids))
    figure.draw_without_rendering()
    (ax,) = figure.axes
    texts = [each.get_text() for each in ax.texts]
    assert any('"ab··$' in text for text in texts)  # what the font lacks would be a warning
    for node, text in zip(ax.patches, ax.texts):
        if '"' in text.get_text():
            assert text.get_window_extent().x1 <= node.get_window_extent().x1


def test_latencies_between_tokens_are_the_differences(rec: Recording) -> None:
    gaps = inter_token_ms(rec)
    assert len(gaps) == len(rec.tokens) - rec.tokens.rid.nunique() and (gaps >= 0).all()


def test_batches_figure_shows_all_new_tokens(rec: Recording) -> None:
    figure = batches_figure(rec)
    assert sum(bar.get_height() for bar in figure.axes[0].patches) == rec.iterations.new_tokens.sum()


def test_large_runs_are_aggregated() -> None:
    rec = Recording(SyntheticRun(80, seed=2, total=400, max_running=1).events)
    assert len(rec.iterations) > 400
    assert len(batches_figure(rec).axes[0].patches) <= 2 * 400


def test_diff_figure_shows_a_bar_a_request(rec: Recording) -> None:
    other = Recording(SyntheticRun(20, seed=1, total=320, gap_us=2_000, decode_us=15_000).events)
    figure = diff_figure(rec.diff(other))
    assert len(figure.axes[0].patches) == 20 and "slower in b" in words(figure)
    assert "no request in common" in words(diff_figure(rec.diff(Recording([]))))


def test_names_in_the_diff_figure_do_not_overlap(rec: Recording) -> None:
    other = Recording(SyntheticRun(20, seed=1, total=320, gap_us=2_000, decode_us=15_000).events)
    figure = diff_figure(rec.diff(other))
    figure.draw_without_rendering()
    ax = figure.axes[0]
    boxes = sorted((each.get_window_extent() for each in ax.texts), key=lambda box: box.x0)
    assert 1 < len(boxes) <= 6 and all(left.x1 < right.x0 for left, right in pairwise(boxes))
    assert all(ax.get_window_extent().y0 <= box.y0 and box.y1 <= ax.get_window_extent().y1 for box in boxes)


def test_report_is_one_file_that_fetches_nothing(pressed: Recording) -> None:
    page = report_html(pressed, title="a <run>")
    assert "<script" not in page and not re.search(r"(src|href)=\"(?!data:)", page) and "url(" not in page
    images = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert len(images) >= 6 and all(base64.b64decode(image).startswith(b"\x89PNG") for image in images)
    assert (
        "a &lt;run&gt;" in page and "books of" in page and "observing cost" in page and "retraction" in page
    )


def test_report_of_an_empty_recording_is_a_page() -> None:
    assert report_html(Recording([])).startswith("<!doctype html>")


def test_kv_figure_begins_at_the_first_arrival_and_is_as_high_as_what_was_used() -> None:
    slow = Recording(SyntheticRun(6, seed=1, total=4_000, gap_us=2_000).events)
    (ax,) = kv_figure(slow).axes
    used = slow.kv_owners.groupby("count").tokens.sum().max()
    assert ax.get_xlim()[0] == 0 and used <= ax.get_ylim()[1] < 1.2 * used < 4_000
    assert "first request arrived" in ax.get_xlabel() and "of 4,000 tokens" in words(ax.figure)


def test_a_nearly_full_pool_is_drawn_with_its_size(pressed: Recording) -> None:
    (ax,) = kv_figure(pressed).axes
    assert 192 <= ax.get_ylim()[1] < 1.1 * 192


def test_waits_figure_s_legend_ends_with_its_plot(pressed: Recording, rec: Recording) -> None:
    for recording in (pressed, rec):
        figure = waits_figure(recording)
        figure.draw_without_rendering()
        each = figure.axes[1]
        legend, plot = each.get_legend().get_window_extent(), each.get_window_extent()
        assert legend.y0 >= plot.y0 - 4 and len(each.get_legend().get_texts()) >= 12


def test_the_report_counts_from_the_first_arrival() -> None:
    """A process that started long before changes neither the time nor the rate."""
    events = SyntheticRun(6, seed=1, total=320).events
    rec = Recording(events)
    first = min(rec.request(rid).phases[0].start for rid in rec.rids)
    last = max(rec.request(rid).phases[-1].end for rid in rec.rids)
    early = msgspec.structs.replace(events[0], t=events[0].t - 60_000_000_000, seq=0, body=LoopIdle(
        kv_free=320, kv_evictable=0, kv_protected=0
    ))  # fmt: skip
    for recording in (rec, Recording([early, *events])):
        page = report_html(recording)
        assert f"<td>{(last - first) / 1e9:,.3f} s</td>" in page
        assert f"<td>{len(rec.tokens) / ((last - first) / 1e9):,.1f}</td>" in page and "total_ms" in page
