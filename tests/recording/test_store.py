"""The file: round trips, every possible cut, strangers in it, and a sink that never waits."""

from __future__ import annotations

import random
import struct
import threading
from pathlib import Path

import msgspec
import pytest
from synthetic import SyntheticRun

from sgviz.errors import SgvizError
from sgviz.events import SCHEMA_VERSION, RingSink, Tracer
from sgviz.events.schema import Event, LoopIdle, RequestDispatched
from sgviz.recording import FileSink, Header, Recording, load, store
from sgviz.recording.store import MAGIC, StoredRun, encode_header, read, write

EVENTS = SyntheticRun(2, output=(2, 4)).events


def frame(value: object) -> bytes:
    data = msgspec.msgpack.encode(value)
    return struct.pack("<I", len(data)) + data


def make(path: Path, events: list[Event]) -> Path:
    write(path, StoredRun(Header(settings={"model": "m"}), events, [], 0))
    return path


def test_round_trip_keeps_every_event_and_the_header(tmp_path: Path) -> None:
    header = Header(settings={"a": 1, "b": None, "c": 0.5, "d": True}, dropped=3, clock="virtual")
    write(tmp_path / "run.sgv", StoredRun(header, EVENTS, [], 0))
    run = read(tmp_path / "run.sgv")
    assert run.events == EVENTS and run.header == header and run.truncated == 0 and not run.unknown


def test_events_come_back_in_the_order_of_time(tmp_path: Path) -> None:
    shuffled = EVENTS[1::2] + EVENTS[0::2]
    assert read(make(tmp_path / "run.sgv", shuffled)).events == EVENTS


def test_every_cut_of_a_file_loses_only_its_tail(tmp_path: Path) -> None:
    events = EVENTS[:7]
    whole = make(tmp_path / "run.sgv", events).read_bytes()
    start = len(whole) - sum(len(frame(event)) for event in events)
    ends = [start + sum(len(frame(event)) for event in events[:n]) for n in range(len(events) + 1)]
    cut = tmp_path / "cut.sgv"
    for size in range(len(whole) + 1):
        cut.write_bytes(whole[:size])
        if size < start:
            with pytest.raises(SgvizError, match=r"cut off in its header"):
                load(cut)
            continue
        rec = load(cut)
        complete = sum(end <= size for end in ends) - 1
        assert len(rec) == complete
        assert rec.truncated == size - ends[complete]


def test_garbage_behind_whole_events_is_left_out(tmp_path: Path) -> None:
    whole = make(tmp_path / "run.sgv", EVENTS).read_bytes()
    for junk in (b"\0" * 4096, b"\x03\0\0\0\xc1\xc1\xc1" * 3, b"\xff" * 64, frame({"not": "an event"})):
        (tmp_path / "junk.sgv").write_bytes(whole + junk)
        rec = load(tmp_path / "junk.sgv")
        assert len(rec) == len(EVENTS) and rec.truncated == len(junk)


def test_unknown_kinds_and_values_are_counted_kept_and_saved_again(tmp_path: Path) -> None:
    t = EVENTS[5].t
    new_kind = frame([1, t, "scheduler", 0, ["tree.painted", 7]])
    new_reason = frame([2, t, "scheduler", 0, ["admit.refused", "r", "bad_weather", 1, 2, []]])
    path = make(tmp_path / "run.sgv", EVENTS)
    path.write_bytes(path.read_bytes() + new_kind + new_reason + new_kind)
    rec = load(path)
    assert rec.unknown == {"tree.painted": 2, "admit.refused": 1} and rec.truncated == 0
    assert len(rec) == len(EVENTS) + 3 == len(rec.events)
    assert rec.events.t_ns.is_monotonic_increasing
    rec.save(tmp_path / "again.sgv")
    assert load(tmp_path / "again.sgv").unknown == rec.unknown


def test_fields_appended_by_a_later_version_are_ignored(tmp_path: Path) -> None:
    path = make(tmp_path / "run.sgv", [])
    path.write_bytes(path.read_bytes() + frame([1, 10, "scheduler", 0, ["loop.idle", 1, 2, 3, "new field"]]))
    rec = load(path)
    assert rec._events == [Event(1, 10, "scheduler", 0, LoopIdle(kv_free=1, kv_evictable=2, kv_protected=3))]


def test_newer_schema_is_refused_with_both_numbers(tmp_path: Path) -> None:
    header = {"schema": SCHEMA_VERSION + 1, "version": "9.9", "settings": "of a shape nobody knows"}
    path = tmp_path / "new.sgv"
    path.write_bytes(MAGIC + frame(header))
    with pytest.raises(SgvizError, match=rf"schema {SCHEMA_VERSION + 1} .*9\.9.*up to {SCHEMA_VERSION}"):
        load(path)


@pytest.mark.parametrize("content", [b"PK\x03\x04 a zip file", MAGIC.replace(b"\r\n", b"\n") + b"rest"])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.sgv").write_bytes(content)
    with pytest.raises(SgvizError, match="not an sgviz recording"):
        load(tmp_path / "x.sgv")


def test_damaged_header_and_missing_file(tmp_path: Path) -> None:
    (tmp_path / "x.sgv").write_bytes(MAGIC + frame([1, 2]))
    with pytest.raises(SgvizError, match=r"header of .* is damaged"):
        load(tmp_path / "x.sgv")
    with pytest.raises(SgvizError, match="cannot read"):
        load(tmp_path / "none.sgv")


def test_failed_save_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = make(tmp_path / "run.sgv", EVENTS[:3])
    with pytest.raises(SgvizError, match="folder that exists"):
        Recording(EVENTS).save(tmp_path / "no" / "run.sgv")
    broken = StoredRun(Header(), [Event(1, 1, "c", 0, object())], [], 0)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        write(path, broken)
    assert len(load(path)) == 3 and [file.name for file in tmp_path.iterdir()] == ["run.sgv"]


# ---------------------------------------------------------------- sink


def test_sink_follows_a_ring_from_several_threads(tmp_path: Path) -> None:
    ring = RingSink()
    with FileSink(tmp_path / "run.sgv", flush_s=0.01) as sink:
        stop = ring.subscribe(sink)
        tracers = [Tracer(f"c{number}", ring) for number in range(4)]

        def emit(tracer: Tracer) -> None:
            for number in range(500):
                tracer.emit(RequestDispatched(rid=str(number)))

        threads = [threading.Thread(target=emit, args=(tracer,)) for tracer in tracers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stop()
    rec = load(tmp_path / "run.sgv")
    assert rec._events == ring.snapshot() and len(rec) == 2000 == sink.written
    assert sink.dropped == rec.dropped == 0 and rec.missing == {}


def test_full_sink_drops_counts_and_says_so_in_the_file(tmp_path: Path) -> None:
    sink = FileSink(tmp_path / "run.sgv", capacity=10, flush_s=60)
    sink.extend(EVENTS[:8])
    sink.extend(EVENTS[8:20])
    sink.put(EVENTS[20])
    sink.close()
    sink.put(EVENTS[21])
    rec = load(tmp_path / "run.sgv")
    assert rec._events[:10] == EVENTS[:10]
    assert rec.dropped == 11 and sink.dropped == 12


def test_open_sink_is_readable_before_it_is_closed(tmp_path: Path) -> None:
    sink = FileSink(tmp_path / "run.sgv", flush_s=0.01)
    try:
        assert len(load(tmp_path / "run.sgv")) == 0
        sink.extend(EVENTS)
        while sink.written < len(EVENTS):
            threading.Event().wait(0.01)
        assert load(tmp_path / "run.sgv")._events == EVENTS
    finally:
        sink.close()
        sink.close()


def test_failing_disk_does_not_reach_the_loop_and_is_told_at_once_and_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = FileSink(tmp_path / "run.sgv", flush_s=60)
    sink._file.close()
    sink._file = open("/dev/full", "wb", buffering=0)  # type: ignore[assignment]  # noqa: SIM115
    sink.extend(EVENTS)
    with pytest.raises(SgvizError, match=rf"incomplete: .*0 events were written, {len(EVENTS)} dropped"):
        sink.close()
    assert [record.levelname for record in caplog.records if "stops here" in record.message] == ["ERROR"]


def test_sink_needs_a_folder(tmp_path: Path) -> None:
    with pytest.raises(SgvizError, match="folder that exists"):
        FileSink(tmp_path / "no" / "run.sgv")


def test_header_stands_before_the_events(tmp_path: Path) -> None:
    FileSink(tmp_path / "run.sgv", Header(settings={"x": 1})).close()
    assert (tmp_path / "run.sgv").read_bytes().startswith(MAGIC)
    assert read(tmp_path / "run.sgv").header.settings == {"x": 1}
    assert encode_header(Header()).startswith(MAGIC)


def test_events_come_back_in_the_order_of_time_component_and_number(tmp_path: Path) -> None:
    rng = random.Random(0)
    body = RequestDispatched(rid="r")
    events = [
        Event(seq, rng.randrange(40), component, 0, body)
        for component in ("b", "a", "c")
        for seq in range(1, 60)
    ]
    rng.shuffle(events)
    write(tmp_path / "run.sgv", StoredRun(Header(), events, [], 0))
    assert read(tmp_path / "run.sgv").events == sorted(events, key=lambda event: event.sort_key)
    write(tmp_path / "empty.sgv", StoredRun(Header(), [], [], 0))
    assert read(tmp_path / "empty.sgv").events == []


@pytest.mark.parametrize("block", [1, 7, 64, 300, 4096])
def test_blocks_of_any_size_give_the_same_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    stranger = frame([1, EVENTS[5].t, "scheduler", 0, ["tree.painted", 7]])
    path = make(tmp_path / "run.sgv", EVENTS)
    path.write_bytes(path.read_bytes() + stranger + b"\x09\0\0\0cut")
    monkeypatch.setattr(store, "_BLOCK", block)
    run = read(path)
    assert run.events == EVENTS and len(run.unknown) == 1 and run.truncated == 7


def test_a_length_beyond_the_end_is_not_read_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged length must not make the rest of a large file be read again for every block."""
    path = make(tmp_path / "run.sgv", EVENTS)
    junk = b"\xff\xff\xff\x7f" + b"x" * 50_000
    path.write_bytes(path.read_bytes() + junk)
    monkeypatch.setattr(store, "_BLOCK", 1000)
    blocks: list[int] = []
    run = read(path, lambda stage, done, of: blocks.append(done))
    assert run.events == EVENTS and run.truncated == len(junk)
    assert len(blocks) <= (path.stat().st_size - len(junk)) // 1000 + 2


def test_progress_is_told_while_loading_and_folding(tmp_path: Path) -> None:
    Recording(SyntheticRun(20).events).save(tmp_path / "run.sgv")
    told: list[tuple[str, int, int]] = []
    rec = load(tmp_path / "run.sgv", lambda stage, done, of: told.append((stage, done, of)))
    assert {stage for stage, *_ in told} == {"load"}
    rec.at()
    assert told[-1] == ("fold", len(rec), len(rec))
