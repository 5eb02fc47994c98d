"""The pictures and the page of a pair of servers, of a run written by hand; the latency picture of several runs."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib.colors as mcolors
import numpy as np
import pytest
from matplotlib.axes import Axes

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recording"))
from hand_pair import hand_pair

from sgviz.cli import explain, report
from sgviz.errors import BadRequest, NotFound
from sgviz.recording import PairedRecording
from sgviz.viz.pair_journey_figure import LANES, pair_journey_figure
from sgviz.viz.pair_report import pair_report_html
from sgviz.viz.style import LIGHT
from sgviz.viz.trade_figure import trade_figure


@pytest.fixture
def pair() -> PairedRecording:
    return hand_pair()


@pytest.fixture
def files(pair: PairedRecording, tmp_path: Path) -> list[str]:
    paths = [tmp_path / "p.sgv", tmp_path / "d.sgv"]
    for rec, path in zip((pair.prefill, pair.decode), paths):
        rec.save(path)
    return ["--prefill", str(paths[0]), "--decode", str(paths[1])]


def bars(ax: Axes, row: int, colour: str) -> list[tuple[float, float]]:
    """Where the bars of that colour are, in ms."""
    wanted = mcolors.to_rgba(colour)
    return [
        (round(bar.get_x(), 3), round(bar.get_x() + bar.get_width(), 3))
        for bar in ax.patches
        if round(bar.get_y() + bar.get_height() / 2) == row and bar.get_facecolor() == wanted
    ]


# ---------------------------------------------------------------- one request over both


def test_each_lane_shows_its_server(pair: PairedRecording) -> None:
    """It arrives at 1 ms, is computed from 25 to 45, travels 30 to 32 and 46 to 51, and decodes from 55 to 65."""
    ax = pair_journey_figure(pair, "a", until_ms=66).axes[0]
    assert [text.get_text() for text in ax.get_yticklabels()] == list(LANES)
    assert bars(ax, 0, LIGHT.prefill) == [(24.0, 44.0)] and not bars(ax, 0, LIGHT.decode)
    assert bars(ax, 1, LIGHT.transfer) == [(29.0, 31.0), (45.0, 50.0)]
    assert bars(ax, 2, LIGHT.decode) == [(54.0, 64.0)] and not bars(ax, 2, LIGHT.prefill)
    assert bars(ax, 3, LIGHT.prefill) == [(24.0, 44.0)] and bars(ax, 3, LIGHT.decode) == [(54.0, 64.0)]
    assert bars(ax, 3, LIGHT.transfer) == [(45.0, 50.0)]


def test_it_says_what_travelled_and_how_fast(pair: PairedRecording) -> None:
    ax = pair_journey_figure(pair, "a", until_ms=66).axes[0]
    said = [text.get_text().strip() for text in ax.texts]
    assert said == ["10 kB in 2 pieces, 1.43 MB/s while under way"]  # 30 to 32 and 46 to 51
    assert "clock: " in ax.get_title(loc="left") and "p.sgv" in ax.get_title(loc="left")


def test_by_default_it_shows_the_way_to_the_first_token(pair: PairedRecording) -> None:
    right = pair_journey_figure(pair, "a").axes[0].get_xlim()[1]
    first_ms = pair.requests.ttft_ms[0]
    assert first_ms < right < 1.3 * first_ms


def test_what_cannot_be_drawn_is_refused(pair: PairedRecording) -> None:
    with pytest.raises(BadRequest, match="until_ms is 0"):
        pair_journey_figure(pair, "a", until_ms=0)
    with pytest.raises(NotFound):
        pair_journey_figure(pair, "b")


# ---------------------------------------------------------------- files


def test_report_of_a_pair_is_one_page_about_both(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.main([*files, "-o", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert page.startswith("<!doctype html>") and "p.sgv and d.sgv" in page and "10 kB in 2 pieces" in page
    assert "prefill side" in page and "decode side" in page and "http" not in page.replace("http-equiv", "")
    assert str(tmp_path / "page.html") in capsys.readouterr().out


def test_without_a_name_it_lies_beside_the_decode_sides_recording(files: list[str], tmp_path: Path) -> None:
    assert report.main(files) == 0
    assert (tmp_path / "d.html").exists()


def test_what_belongs_to_no_pair_is_refused_by_name(files: list[str], tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="both --prefill FILE and --decode FILE"):
        report.main(files[:2])
    with pytest.raises(BadRequest, match="swap the two"):
        report.main(["--prefill", files[3], "--decode", files[1]])
    with pytest.raises(BadRequest, match="one recording too many"):
        report.main([files[1], *files])
    with pytest.raises(BadRequest, match="is the recording itself"):
        report.main([*files, "-o", files[1]])
    assert not list(tmp_path.glob("*.html"))


def test_explain_of_a_pair_draws_its_request(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "a.png"
    assert explain.main([*files, "a", "--figure", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "10 kB in 2 pieces over shm" in said and "one monotonic clock" in said


def test_a_page_says_that_a_transfer_failed(pair: PairedRecording) -> None:
    page = pair_report_html(pair)
    assert "<td>transfers that failed</td><td>0</td>" in page


# ---------------------------------------------------------------- several runs


def test_a_line_a_run_and_the_share_that_waited_longer() -> None:
    values = np.arange(1.0, 101.0)
    figure = trade_figure({"wait": {"one": values, "two": 2 * values}}, source="made up")
    (ax,) = figure.axes
    assert len(ax.lines) == 2 and ax.get_xlabel() == "wait (ms)" and ax.get_title(loc="left") == "made up"
    x, y = ax.lines[0].get_data()
    assert [y[list(x).index(value)] for value in (1.0, 51.0, 100.0)] == pytest.approx([1.0, 0.5, 0.01])
    words = ax.get_legend().get_texts()[0].get_text()
    assert words.splitlines() == ["one", "p50 50.5 ms", "p90 90.1 ms", "p99 99.0 ms"]


def test_a_run_without_values_has_no_line() -> None:
    figure = trade_figure({"wait": {"one": np.empty(0), "two": np.array([3.0])}}, source="")
    assert len(figure.axes[0].lines) == 1
    assert not trade_figure({"wait": {"one": np.empty(0)}}, source="").axes[0].lines
