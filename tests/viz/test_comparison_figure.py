"""The figures of a comparison: what is drawn are the account's spans and seconds, over the same stretch for all."""

from __future__ import annotations

import math
from dataclasses import replace

import pandas as pd
import pytest
from matplotlib.collections import PolyCollection

from sgviz.errors import BadRequest
from sgviz.recording.overlap_account import OverlapAccount, Span
from sgviz.viz.comparison_figure import LATENCIES, comparison_figure
from sgviz.viz.overlap_lanes import draw_account, draw_lanes, lanes_figure, shown_stretch

MS = 1_000_000
SOURCE = "events  ·  clock: monotonic  ·  0 events dropped  ·  device SIMULATED (sim:h100-sxm)"


def account(idle_ms: int, turns: int = 40) -> OverlapAccount:
    """Turns of a 10 ms forward, then `idle_ms` of exposed host work."""
    step, start = (10 + idle_ms) * MS, 7_000 * MS
    device = tuple(Span(start + n * step, start + n * step + 10 * MS, "decode", n) for n in range(turns))
    host = tuple(Span(span.end, span.end + idle_ms * MS, "process", span.bid) for span in device if idle_ms)
    waits = tuple(Span(span.start, span.end, "wait", span.bid) for span in device)
    end = start + turns * step
    return OverlapAccount(
        window=(start, end),
        until="last arrival",
        host_busy_s=turns * idle_ms / 1000,
        host_hidden_s=0.0,
        host_exposed_s=turns * idle_ms / 1000,
        host_wait_s=turns / 100,
        handoff_s=0.0,
        device_busy_s=turns / 100,
        device_idle_s=turns * idle_ms / 1000,
        runnable_s=(end - start) / 1e9,
        launches=turns,
        host=(*host, *waits),
        device=device,
        runnable=((start, end),),
    )


TWO = {"normal": account(5), "overlap": account(0)}


def numbers() -> pd.DataFrame:
    index = pd.MultiIndex.from_product([["normal", "overlap"], [0, 1]], names=["run", "repeat"])
    columns = {
        f"{which}_{name}_ms": [1.0, 2.0, 3.0, 4.0]
        for name, _ in LATENCIES
        for which in ("median", "p90", "p99")
    }
    return pd.DataFrame({"output_throughput": [10.0, 12.0, 20.0, 22.0], **columns}, index=index)


def test_the_stretch_is_the_same_for_all_and_inside_the_shortest_run() -> None:
    begin, end = shown_stretch(TWO, None)
    assert 0 <= begin < end <= 400 and end - begin == pytest.approx(10 * 12.5)
    assert shown_stretch(TWO, 0.1) == (150, 250)
    assert shown_stretch(TWO, 99) == (0, 400)
    with pytest.raises(BadRequest, match="above 0"):
        shown_stretch(TWO, 0)
    with pytest.raises(BadRequest, match="launched"):
        shown_stretch({}, None)


def bars(ax: object) -> list[tuple[float, float, float]]:
    """`(left, right, height in the lanes)` of every bar drawn."""
    found = []
    for collection in ax.collections:
        assert isinstance(collection, PolyCollection)
        for path in collection.get_paths():
            box = path.get_extents()
            found.append((round(box.x0, 6), round(box.x1, 6), round((box.y0 + box.y1) / 2, 6)))
    return found


def test_the_lanes_show_the_spans_where_they_were() -> None:
    figure = lanes_figure(TWO, source=SOURCE, seconds=0.03)
    ax = figure.axes[0]
    assert ax.get_xlim() == (185, 215) and ax.get_title(loc="left") == SOURCE
    device = sorted((a, b) for a, b, row in bars(ax) if row == 0)
    # forwards of the first run begin every 15 ms; between them the device stood still
    assert device == [(185, 190), (190, 195), (195, 205), (205, 210), (210, 215)]
    host = sorted((a, b) for a, b, row in bars(ax) if row == 1)
    assert (190, 195) in host
    other = sorted((a, b) for a, b, row in bars(ax) if row == 2.6)
    assert other == [(185, 190), (190, 200), (200, 210), (210, 215)]


def test_sampling_is_paler_and_copies_lie_below() -> None:
    """10 ms of device of which the last 2 are sampling; the copy beside the next forward."""
    plain = account(0)
    forwards = [Span(span.start, span.end - 2 * MS, "decode", span.bid) for span in plain.device]
    samples = [Span(span.end - 2 * MS, span.end, "sample", span.bid) for span in plain.device]
    copies = tuple(Span(span.end, span.end + MS, "copy", span.bid) for span in plain.device)
    parted = replace(plain, device=(*forwards, *samples), copies=copies)
    ax = lanes_figure({"overlap": parted}, source=SOURCE, seconds=0.02).axes[0]
    assert sorted((a, b) for a, b, row in bars(ax) if row == 0) == [
        (190, 198),
        (198, 200),
        (200, 208),
        (208, 210),
    ]
    assert sorted((a, b) for a, b, row in bars(ax) if 0.4 < row < 0.6) == [(190, 191), (200, 201)]
    first, second = ax.collections[:2]
    assert sum(second.get_facecolor()[0][:3]) > sum(first.get_facecolor()[0][:3])
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert "paler: sampling" in legend and "below: copy to the host" in legend
    plain_legend = lanes_figure(TWO, source=SOURCE).axes[0].get_legend()
    assert "paler: sampling" not in [text.get_text() for text in plain_legend.get_texts()]


def test_the_bars_are_the_seconds_of_the_account() -> None:
    ax = lanes_figure(TWO, source=SOURCE).axes[0]
    ax.clear()
    draw_account(ax, TWO)
    widths = [round(patch.get_width(), 6) for patch in ax.patches]
    assert widths == pytest.approx([200 / 3, 100 / 3, 100 / 3, 200 / 3, 100, 100])
    assert "0.40 s" in [text.get_text() for text in ax.texts]


@pytest.mark.parametrize("look", ["light", "dark"])
def test_the_page_has_lanes_account_and_percentiles_and_says_its_source(look: str) -> None:
    figure = comparison_figure(TWO, numbers(), source=SOURCE, look=look)
    assert len(figure.axes) == 2 + 1 + len(LATENCIES)
    assert figure.axes[0].get_title(loc="left") == SOURCE
    assert "normal against overlap, 2 repeats" in figure.get_suptitle()
    throughput = figure.axes[2]
    assert [patch.get_height() for patch in throughput.patches] == [11.0, 21.0]
    assert [list(line.get_ydata()) for line in throughput.lines] == [[10.0, 12.0], [20.0, 22.0]]
    figure.canvas.draw()


def test_missing_latencies_are_left_out() -> None:
    empty = numbers()
    empty["median_tpot_ms"] = math.nan
    comparison_figure(TWO, empty, source=SOURCE).canvas.draw()


def test_a_look_that_there_is_not_is_refused() -> None:
    ax = lanes_figure(TWO, source=SOURCE).axes[0]
    with pytest.raises(BadRequest, match="light and dark"):
        draw_lanes(ax, TWO, look="pink")
