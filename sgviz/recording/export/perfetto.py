"""A Perfetto trace: tracks by component, slices by batch and by request, flows from request to batch to text.

Of several schedulers each has tracks of its own, and the controller one with its choices.
The protobuf is written by hand (field numbers of perfetto/trace/trace_packet.proto and its neighbours), so
nothing need be installed. Mirrors the torch profiler's picture of SGLang, with decisions instead of kernels.

Imports: events, errors, recording.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from sgviz.errors import SgvizError
from sgviz.events.schema import (
    ChunkSent,
    DpChose,
    DpRankChanged,
    Event,
    GenerationContinued,
    LoopResumed,
    OutputReceived,
    RequestDispatched,
    RequestFinished,
    RequestReceived,
    RequestRefused,
    RequestTokenized,
    ResponseFinished,
    TextEmitted,
    WeightsUpdated,
)
from sgviz.recording.explanation import Part
from sgviz.recording.export.protobuf import fixed64, nested, number, text
from sgviz.recording.fold import BatchState, KvRow
from sgviz.recording.rank_split import rank_of
from sgviz.recording.recording import Recording

SEQUENCE = 1
BEGIN, END, INSTANT, COUNTER = 1, 2, 3, 4
BOOTTIME, REALTIME = 6, 1
# a track's number is its uuid; requests come after the fixed ones
PROCESS, HTTP, TOKENIZER, SCHEDULER, DEVICE, DETOKENIZER, REQUESTS, COPIES, CONTROLLER = (
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    9,
)
AROUND = {HTTP: "http", TOKENIZER: "tokenizer_manager", DETOKENIZER: "detokenizer", REQUESTS: "requests"}
OF_A_RANK = {SCHEDULER: "scheduler", DEVICE: "device", COPIES: "device copy"}
KV_COUNTERS = {10: "free", 11: "evictable", 12: "protected", 13: "private"}
QUEUE_COUNTERS = {14: "running", 15: "waiting"}
FIRST_REQUEST = 100
FIRST_OF_RANKS, TRACKS_A_RANK = 1 << 32, 16  # where there are several; else a scheduler's tracks are as above


def write(rec: Recording, path: Path | str, to: str) -> list[str]:
    """Write the trace to the file `path`."""
    try:
        Path(path).write_bytes(b"".join(nested(1, packet) for packet in packets(rec)))
    except OSError as error:
        raise SgvizError(f"cannot write the trace {str(path)!r}: {error}") from error
    return [str(path)]


def packets(rec: Recording) -> Iterator[bytes]:
    """The TracePackets of a recording, tracks first."""
    flows = {rid: number for number, rid in enumerate(rec.rids, FIRST_REQUEST)}
    ranks: tuple[int | None, ...] = rec.ranks if len(rec.ranks) > 1 else (None,)
    yield from _clock(rec)
    yield from _tracks(flows, ranks)
    yield from _component_events(rec.stamped(), flows)
    for rank in ranks:
        folded = (rec if rank is None else rec.rank(rank)).fold()
        for batch in folded.state.batches.values():
            yield from _batch(batch, flows, rank)
        yield from _kv(folded.kv, rank)
    for rid, track in flows.items():
        for part in rec.explain(rid).stretches():
            yield from _slice(track, part.start_ns, part.end_ns, str(part.cause), _part_notes(part))


# ---------------------------------------------------------------- frame


def _clock(rec: Recording) -> Iterator[bytes]:
    """Trace time is the monotonic clock; where a process read both clocks, calendar time is told."""
    for anchor in rec.header.anchors[:1]:
        clocks = b"".join(
            nested(1, number(1, clock) + number(2, at))
            for clock, at in ((BOOTTIME, anchor.monotonic_ns), (REALTIME, anchor.unix_ns))
        )
        yield number(8, anchor.monotonic_ns) + nested(6, clocks + number(2, BOOTTIME)) + number(10, SEQUENCE)


def _tracks(flows: dict[str, int], ranks: Sequence[int | None]) -> Iterator[bytes]:
    process = number(1, PROCESS) + nested(3, number(1, 1) + text(6, "sgviz"))
    yield nested(60, process) + number(10, SEQUENCE)
    for track, name in (AROUND if len(ranks) == 1 else {**AROUND, CONTROLLER: "controller"}).items():
        yield _track(track, name)
    for rank in ranks:
        suffix = "" if rank is None else f" {rank}"
        for track, name in OF_A_RANK.items():
            yield _track(_of(rank, track), name + suffix)
        for track, name in KV_COUNTERS.items():
            yield _track(_of(rank, track), f"KV {name}{suffix}", unit="tokens")
        for track, name in QUEUE_COUNTERS.items():
            yield _track(_of(rank, track), name + suffix, unit="requests")
    for rid, track in flows.items():
        yield _track(track, rid, REQUESTS)


def _track(track: int, name: str, parent: int = PROCESS, unit: str = "") -> bytes:
    """`unit`: of a counter."""
    counter = nested(8, text(6, unit)) if unit else b""
    return nested(60, number(1, track) + text(2, name) + number(5, parent) + counter) + number(10, SEQUENCE)


def _of(rank: int | None, track: int) -> int:
    """The number of a scheduler's track."""
    return track if rank is None else FIRST_OF_RANKS + rank * TRACKS_A_RANK + track


def _packet(t: int, event: bytes) -> bytes:
    return number(8, t) + nested(11, event) + number(10, SEQUENCE)


def _note(name: str, value: int | str) -> bytes:
    return nested(4, text(10, name) + (number(4, value) if isinstance(value, int) else text(6, value)))


def _notes(values: dict[str, int | str]) -> bytes:
    return b"".join(_note(name, value) for name, value in values.items())


def _slice(
    track: int, start: int, end: int, name: str, notes: dict[str, int | str], flows: Sequence[int] = ()
) -> Iterator[bytes]:
    linked = b"".join(fixed64(47, flow) for flow in flows)
    yield _packet(start, number(9, BEGIN) + number(11, track) + text(23, name) + linked + _notes(notes))
    yield _packet(max(start, end), number(9, END) + number(11, track))


def _instant(track: int, t: int, name: str, notes: dict[str, int | str], flows: bytes = b"") -> bytes:
    return _packet(t, number(9, INSTANT) + number(11, track) + text(23, name) + flows + _notes(notes))


def _count(track: int, t: int, value: int) -> bytes:
    return _packet(t, number(9, COUNTER) + number(11, track) + number(30, value))


# ---------------------------------------------------------------- content


def _batch(batch: BatchState, flows: dict[str, int], rank: int | None) -> Iterator[bytes]:
    """Its planning, its run on the device with a flow for each member, and its processing."""
    plan = batch.plan
    notes: dict[str, int | str] = {
        "bid": plan.bid,
        "mode": plan.mode,
        "requests": len(plan.rids),
        "new_tokens": sum(plan.extend_lens),
        "rids": ", ".join(plan.rids[:16]),
    }
    if batch.launched:
        since = batch.turn or batch.planned
        yield from _slice(_of(rank, SCHEDULER), since, batch.launched, f"plan #{plan.bid}", notes)
    if batch.processed and batch.finished:
        yield from _slice(
            _of(rank, SCHEDULER), batch.finished, batch.processed, f"process #{plan.bid}", {"bid": plan.bid}
        )
    if batch.end:
        yield from _on_device(batch, notes, [flows[rid] for rid in plan.rids if rid in flows], rank)
    for track, value in zip(QUEUE_COUNTERS, (plan.running, plan.waiting)):
        yield _count(_of(rank, track), batch.planned, value)


def _on_device(
    batch: BatchState, notes: dict[str, int | str], members: Sequence[int], rank: int | None
) -> Iterator[bytes]:
    """The batch with its forward and sampling inside, where the device tells them apart, and the copy beside it."""
    plan, device = batch.plan, _of(rank, DEVICE)
    begin, end = _slice(device, batch.start, batch.end, f"{plan.mode} #{plan.bid}", notes, members)
    yield begin
    if batch.forward_end:
        yield from _slice(device, *batch.forward, "forward", {})
        yield from _slice(device, *batch.sampling, "sample", {})
    yield end
    if batch.copy_start:
        copies = _of(rank, COPIES)
        yield from _slice(copies, batch.copy_start, batch.copy_end, f"copy #{plan.bid}", {"bid": plan.bid})


def _kv(rows: Sequence[KvRow], rank: int | None) -> Iterator[bytes]:
    """Only what changed since the row before."""
    last: dict[int, int] = {}
    for row in rows:
        for track, name in KV_COUNTERS.items():
            value: int = getattr(row, name)
            if last.get(track) != value:
                last[track] = value
                yield _count(_of(rank, track), row.t, value)


def _component_events(events: Sequence[Event], flows: dict[str, int]) -> Iterator[bytes]:
    """What the components around the scheduler told, with the flow of the request."""
    for event in events:
        body, scheduler = event.body, _of(rank_of(event.component), SCHEDULER)
        match body:
            case DpChose():
                chosen: dict[str, int | str] = {"rid": body.rid, "rank": body.rank, "policy": body.policy}
                yield _instant(CONTROLLER, event.t, event.kind, chosen, _flow(flows, body.rid))
            case DpRankChanged():
                changed: dict[str, int | str] = {
                    "rank": body.rank,
                    "active": int(body.active),
                    "why": body.why,
                }
                yield _instant(CONTROLLER, event.t, event.kind, changed)
            case RequestReceived():
                yield _instant(HTTP, event.t, event.kind, {"rid": body.rid}, _flow(flows, body.rid))
            case RequestTokenized():
                notes: dict[str, int | str] = {"rid": body.rid, "tokens": body.prompt_tokens}
                yield _instant(TOKENIZER, event.t, event.kind, notes, _flow(flows, body.rid))
            case RequestDispatched() | RequestFinished():
                yield _instant(TOKENIZER, event.t, event.kind, {"rid": body.rid}, _flow(flows, body.rid))
            case TextEmitted() | OutputReceived():
                track = DETOKENIZER if isinstance(body, TextEmitted) else TOKENIZER
                linked = b"".join(_flow(flows, rid) for rid in body.rids)
                yield _instant(track, event.t, event.kind, {"requests": len(body.rids)}, linked)
            case ChunkSent():
                chunk: dict[str, int | str] = {"rid": body.rid, "part": body.part, "chars": body.chars}
                yield _instant(HTTP, event.t, event.kind, chunk, _flow(flows, body.rid))
            case ResponseFinished():
                ends = fixed64(48, flows[body.rid]) if body.rid in flows else b""
                yield _instant(HTTP, event.t, event.kind, {"rid": body.rid, "status": body.status}, ends)
            case RequestRefused():
                track = TOKENIZER if body.where == "tokenizer" else HTTP
                told: dict[str, int | str] = {"rid": body.rid, "status": body.status, "why": body.why}
                yield _instant(track, event.t, event.kind, told, _flow(flows, body.rid))
            case LoopResumed():
                yield from _slice(
                    scheduler, body.since_ns, event.t, "parked", {"at": body.at, "why": body.why}
                )
            case GenerationContinued():
                track = scheduler if event.component.startswith("scheduler") else TOKENIZER
                yield from _slice(track, body.since_ns, event.t, "paused", {"mode": body.mode})
            case WeightsUpdated():
                what: dict[str, int | str] = {
                    "model_path": body.model_path,
                    "weight_version": body.weight_version,
                }
                yield from _slice(scheduler, event.t - body.load_ns, event.t, event.kind, what)


def _flow(flows: dict[str, int], rid: str) -> bytes:
    return fixed64(47, flows[rid]) if rid in flows else b""


def _part_notes(part: Part) -> dict[str, int | str]:
    notes: dict[str, int | str] = {"detail": part.detail} if part.detail else {}
    if part.blockers:
        notes["blockers"] = ", ".join(part.blockers)
    return notes | ({"bid": part.bid} if part.bid else {})
