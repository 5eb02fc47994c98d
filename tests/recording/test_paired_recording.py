"""Two servers' recordings are one run: one clock, one explanation without a gap, what was sent is what came."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hand_pair import YEAR, at, decode_side, hand_pair, prefill_side
from matplotlib.patches import ConnectionPatch
from pair_recordings import paired, recordings, timed_pair
from recording_checks import assert_memory_adds_up, seamless
from timed_rig import TimedRig

import sgviz
from sgviz.cli import explain
from sgviz.errors import BadRequest, NotFound
from sgviz.events.schema import DisaggTransferred, KvReceived
from sgviz.recording import Cause, PairedRecording, Recording
from sgviz.viz.pair_figure import pair_figure

MS = 1_000_000


def spent(parts: object) -> list[tuple[str, str, float, float]]:
    return [
        (part.side, str(part.cause), (part.start_ns - at(0)) / MS, (part.end_ns - at(0)) / MS)
        for part in parts  # type: ignore[attr-defined]
    ]


def test_each_side_alone_is_explained_to_the_nanosecond() -> None:
    pair = hand_pair()
    for rec in (pair.prefill, pair.decode):
        explanation = rec.explain("a")
        seamless(explanation)
        assert explanation.unexplained_ns == 0, explanation.text()
    decode = pair.decode.explain("a").by_cause()
    assert decode[Cause.PREALLOC] == 12 * MS  # 6 to 18
    assert decode[Cause.AWAITS_KV] == 13 * MS  # 18 to 31
    assert decode[Cause.TRANSFER] == 20 * MS  # 31 to 51
    prefill = pair.prefill.explain("a").by_cause()
    assert prefill[Cause.BOOTSTRAP] == 18 * MS and prefill[Cause.TRANSFER] == 6 * MS
    assert prefill[Cause.PREFILL] == 20 * MS


def test_the_pair_is_explained_from_the_first_arrival_to_the_last_token() -> None:
    explanation = hand_pair().explain("a")
    seamless(explanation)
    assert explanation.unexplained_ns == 0, explanation.text()
    assert explanation.start_ns == at(1) and explanation.total_ns == 66 * MS
    rows = spent(explanation.parts)
    assert ("decode", "prealloc", 8.0, 18.0) in rows  # what the prefill side's bootstrap waited for
    assert ("prefill", "bootstrap", 18.0, 20.0) in rows  # the handshake
    assert ("prefill", "prefill", 25.0, 45.0) in rows
    assert ("transfer", "transfer", 46.0, 51.0) in rows
    assert ("decode", "loop", 51.0, 52.0) in rows  # all is there, and not seen yet
    assert ("decode", "decode", 55.0, 65.0) in rows
    words = explanation.text()
    assert "needs 30 KV tokens, 12 to be had" in words and "10 kB in 2 pieces over shm" in words


def test_the_table_has_both_sides_of_a_request() -> None:
    row = hand_pair().requests.iloc[0]
    assert row.bootstrap_ms == 18 and row.prealloc_ms == 12 and row.transfer_ms == 21
    assert row.prefill_ms == 24 and row.after_prefill_ms == 6 and row.decode_queue_ms == 1
    assert row.transfer_bytes == 10_000 and row.pieces == 2 and row.backend == "shm"
    assert row.bytes_per_s == pytest.approx(10_000 / 0.021)
    assert row.itl_ms == 13 and row.ttft_ms == 52.25


def test_one_host_has_one_clock_and_two_are_joined_by_the_calendar() -> None:
    assert hand_pair(YEAR + 500_000).clock.shift_ns == 0
    clock = hand_pair(YEAR + 500_000).clock
    assert clock.uncertainty_ns == 0 and "one monotonic clock" in clock.words


def shifted(by: int) -> list[object]:
    """The decode side on a host whose clock reads `by` more."""
    stamps = ("start_ns", "end_ns", "received_ns", "turn_ns", "wait_ns")
    out: list[object] = []
    for event in decode_side(YEAR - by):
        moved = {}
        for name in stamps:
            value = getattr(event.body, name, 0)
            if value and not (isinstance(event.body, DisaggTransferred) and name == "start_ns"):
                moved[name] = value + by
        body = msgspec.structs.replace(event.body, **moved)
        out.append(msgspec.structs.replace(event, t=event.t + by, body=body))
    return out


@pytest.mark.parametrize("off_ms", [0, 40, -40])
def test_a_wrong_calendar_is_held_within_cause_and_effect(off_ms: int) -> None:
    events = [
        msgspec.structs.replace(
            event, body=msgspec.structs.replace(event.body, unix_ns=event.body.unix_ns + off_ms * MS)
        )
        if event.kind == "process.started"
        else event
        for event in shifted(900 * MS)
    ]
    pair = PairedRecording(Recording(prefill_side()), Recording(events))
    true = -900 * MS
    assert abs(pair.clock.shift_ns - true) <= 2 * MS < pair.clock.uncertainty_ns + 2 * MS
    assert ("corrected" in pair.clock.words) is bool(off_ms) and "calendar" in pair.clock.words
    seamless(pair.explain("a"))


def test_the_journey_has_the_transfer_between_the_sides() -> None:
    steps = hand_pair().journey("a")
    types = [step.type for step in steps]
    assert types.count("KV transfer") == 1 and types.index("KV transfer") > types.index(
        "GenerationBatchResult"
    )
    assert steps[types.index("KV transfer")].holds["bytes"] == "10,000"
    assert [step.t_ms for step in steps] == sorted(step.t_ms for step in steps)
    assert {step.component.partition("/")[0] for step in steps} == {"prefill", "decode"}


def test_what_does_not_belong_together_is_refused(tmp_path: Path) -> None:
    pair = hand_pair()
    with pytest.raises(BadRequest, match="swap the two"):
        PairedRecording(pair.decode, pair.prefill)
    rig = TimedRig()
    rig.submit(range(8), 2, rid="a")
    rig.run()
    with pytest.raises(BadRequest, match="no recording of a prefill server"):
        PairedRecording(rig.recording(), pair.decode)
    others = [
        msgspec.structs.replace(event, body=msgspec.structs.replace(event.body, rid="b"))
        if hasattr(event.body, "rid")
        else event
        for event in decode_side()
    ]
    with pytest.raises(BadRequest, match="no request in common"):
        PairedRecording(pair.prefill, Recording(others))
    with pytest.raises(NotFound):
        pair.explain("nobody")
    pair.prefill.save(tmp_path / "p.sgv")
    pair.decode.save(tmp_path / "d.sgv")
    assert sgviz.load_pair(tmp_path / "p.sgv", tmp_path / "d.sgv").rids == ["a"]


def test_a_piece_that_differs_is_found() -> None:
    assert hand_pair().audit().findings == ()
    events = [
        msgspec.structs.replace(event, body=msgspec.structs.replace(event.body, bytes=1))
        if isinstance(event.body, KvReceived) and event.body.piece == 1
        else event
        for event in decode_side()
    ]
    report = PairedRecording(Recording(prefill_side()), Recording(events)).audit()
    assert not report.balanced and "piece 1 of a" in str(report)
    assert any("the pieces are the whole" in str(finding) for finding in report.decode.findings)


def test_a_piece_that_comes_twice_or_after_the_end_is_found() -> None:
    events = decode_side()
    last = next(event for event in events if isinstance(event.body, KvReceived) and event.body.last)
    late = msgspec.structs.replace(last, seq=len(events) + 1, t=events[-1].t + 1)
    rules = {finding.rule for finding in Recording([*events, late]).audit().findings}
    assert {"nothing is written after a transfer's end", "a piece travels once"} <= rules


# ---------------------------------------------------------------- real schedulers


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page", [1, 16])
def test_real_pairs_are_explained_and_their_books_balance(
    monkeypatch: pytest.MonkeyPatch, overlap: bool, page: int
) -> None:
    pair = timed_pair(
        monkeypatch, overlap=overlap, prefill_page=page, decode_page=page, delay=2, decode_tokens=192,
        prefill_settings={"chunked_prefill_size": 16}, decode_settings={"num_reserved_decode_tokens": 8},
    )  # fmt: skip
    for number in range(8):
        pair.submit(range(number, number + 40), 12)
    pair.run()
    run = paired(pair)
    assert run.audit().balanced, str(run.audit())
    for rec in (run.prefill, run.decode):
        assert_memory_adds_up(rec)
        assert rec.at().apart == {} and rec.at().waiting == ()
        for rid in run.rids:
            explanation = rec.explain(rid)
            seamless(explanation)
            assert explanation.unexplained_ns <= 0.01 * explanation.total_ns, explanation.text()
    for rid in run.rids:
        explanation = run.explain(rid)
        seamless(explanation)
        assert explanation.unexplained_ns <= 0.01 * explanation.total_ns, explanation.text()
    assert (run.requests.completion_tokens == 12).all()
    assert run.decode.iterations["mode"].isin(["prebuilt", "decode"]).all()
    waited = run.explain(run.rids[-1]).text()
    assert "held by r" in waited or "behind r" in waited


def test_the_fold_has_the_queues_of_both_sides_at_every_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = timed_pair(
        monkeypatch, delay=4, decode_tokens=128, decode_settings={"num_reserved_decode_tokens": 8}
    )
    for number in range(5):
        pair.submit(range(number, number + 30), 6)
    met = set()
    for _ in range(80):
        pair.turn()
        for side, rec in zip(pair.sides, recordings(pair)):
            queues, folded = side.state.disagg, rec.at()
            wanted = {
                req.rid: name
                for name in ("bootstrap", "prealloc", "transfer", "inflight")
                for req in getattr(queues, name)
            }
            assert folded.apart == wanted
            waiting = [req.rid for req in (*side.state.waiting_queue, *queues.ready, *queues.retracted)]
            assert sorted(folded.waiting) == sorted(waiting)
            met |= set(wanted.values())
    assert met == {"bootstrap", "prealloc", "transfer", "inflight"}


@pytest.mark.parametrize("look", ["light", "dark"])
def test_the_figure_has_both_sides_and_an_arrow_a_transfer(look: str) -> None:
    figure = pair_figure(hand_pair(), look=look)
    arrows = [artist for artist in figure.artists if isinstance(artist, ConnectionPatch)]
    assert (
        len(arrows) == 1 and arrows[0].xy1[0] == pytest.approx(44) and arrows[0].xy2[0] == pytest.approx(50)
    )
    assert [ax.get_ylabel() for ax in figure.axes][:3] == ["prefill side", "MB on\nthe way", "decode side"]


def test_the_command_explains_a_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair, names = hand_pair(), [str(tmp_path / name) for name in ("p.sgv", "d.sgv")]
    pair.prefill.save(names[0])
    pair.decode.save(names[1])
    assert explain.main(["--prefill", names[0], "--decode", names[1], "a"]) == 0
    assert "10 kB in 2 pieces over shm" in capsys.readouterr().out
    with pytest.raises(BadRequest, match="needs both"):
        explain.main(["--prefill", names[0], "a"])
