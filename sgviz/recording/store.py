"""The `.sgv` file: a header and one frame an event, readable up to the last whole event after a crash.

Layout: 8 magic bytes; u32 little-endian length and msgpack of `Header`; then, for every event, u32
little-endian length and msgpack of `Event`. Nothing is ever rewritten, so a cut file only lacks its
tail. Frames lie in the order of arrival; readers sort by `(t, component, seq)`.
SGLang has no such file: its nearest are the request dumps (pickle) and the OTLP trace.

Imports: events, errors, msgspec, numpy.
"""

from __future__ import annotations

import gc
import importlib.metadata
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from sgviz.errors import SgvizError
from sgviz.events.schema import SCHEMA_VERSION, EngineConfigured, Event

MAGIC = b"\x89SGV\r\n\x1a\n"  # a byte above 127 and both newlines: a text-mode copy is noticed at once
_LENGTH = struct.Struct("<I")
_ARRAY32 = struct.Struct(">cI")
_CHUNK = 8192  # events encoded by one call
_BLOCK = (
    1 << 20
)  # bytes read and decoded by one call; a block with something unknown falls back to frame by frame
_BY_TIME = attrgetter("t", "component", "seq")
_TIME = attrgetter("t")

Setting = str | int | float | bool | None
Progress = Callable[[str, int, int], None]  # stage, done, of


class ClockAnchor(msgspec.Struct, frozen=True, kw_only=True):
    """Two clocks of a process read together: `unix_ns + (t - monotonic_ns)` is the calendar time of `t`."""

    component: str
    pid: int
    unix_ns: int
    monotonic_ns: int


def _version() -> str:
    try:
        return importlib.metadata.version("sgviz")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What stands before the events.

    Attributes:
        schema: version of the event vocabulary. version: of sgviz.
        created_unix_ns: calendar time of writing. clock: what `t` counts (monotonic, virtual).
        settings: the settings as resolved. anchors: one by process.
        dropped: events lost before the first one here; later losses are `trace.dropped` events.
        configured: sizes of the engine, for a recording that began after they were emitted.
    """

    schema: int = SCHEMA_VERSION
    version: str = msgspec.field(default_factory=_version)
    created_unix_ns: int = msgspec.field(default_factory=time.time_ns)
    clock: str = "monotonic"
    settings: dict[str, Setting] = {}
    anchors: tuple[ClockAnchor, ...] = ()
    dropped: int = 0
    configured: EngineConfigured | None = None

    @property
    def device(self) -> str:
        """As the settings name it; a simulated one with its model."""
        device = str(self.settings.get("device", "unknown"))
        return f"{device} with {self.settings.get('sim_model')}" if self.simulated else device

    @property
    def simulated(self) -> bool:
        """Its device was a cost model."""
        return str(self.settings.get("device", "")).startswith("sim:")


class _Peek(msgspec.Struct):
    """As much of a header as every version has."""

    schema: int
    version: str = "unknown"


@dataclass(frozen=True, slots=True)
class UnknownEvent:
    """An event of a kind (or with a value) this version does not know: stamps, kind and its own bytes."""

    seq: int
    t: int
    component: str
    iteration: int
    kind: str
    frame: bytes


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A file's content: known and unknown events in the order of time, and unreadable bytes at the end."""

    header: Header
    events: list[Event]
    unknown: list[UnknownEvent]
    truncated: int


# ---------------------------------------------------------------- writing


def encode_header(header: Header) -> bytes:
    data = msgspec.msgpack.encode(header)
    return MAGIC + _LENGTH.pack(len(data)) + data


def encode_frames(events: Iterable[Event]) -> bytearray:
    """The frames of `events`, one after the other."""
    encode, pack = msgspec.msgpack.Encoder().encode, _LENGTH.pack
    out = bytearray()
    for event in events:
        data = encode(event)
        out += pack(len(data))
        out += data
    return out


def write(path: str | os.PathLike[str], run: StoredRun) -> None:
    """Write a whole run at once; `path` is replaced only when everything is on disk."""
    target = Path(os.path.realpath(path))  # of a link the file behind it
    if target.exists() and not target.is_file():
        raise SgvizError(f"cannot write the recording {str(target)!r}: it is there and no file")
    part = target.with_name(f"{target.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        with opened(part) as file:
            file.write(encode_header(run.header))
            for start in range(0, len(run.events), _CHUNK):
                file.write(encode_frames(run.events[start : start + _CHUNK]))
            for unknown in run.unknown:
                file.write(_LENGTH.pack(len(unknown.frame)) + unknown.frame)
        part.replace(target)
    except OSError as error:
        raise SgvizError(f"cannot write the recording {str(target)!r}: {error}") from error
    finally:
        part.unlink(missing_ok=True)


def opened(path: Path) -> BinaryIO:
    """The file, emptied for writing; an error that says what to do instead of OSError."""
    try:
        return path.open("wb")
    except OSError as error:
        raise SgvizError(
            f"cannot open {str(path)!r} for a recording: {error}; "
            "give a path in a folder that exists and can be written"
        ) from error


# ---------------------------------------------------------------- reading


def read(path: str | os.PathLike[str], progress: Progress | None = None) -> StoredRun:
    """Read a `.sgv` file; a cut or damaged tail is left out and its size given in `truncated`.

    Raises:
        SgvizError: no such file, not a recording, header cut off, or written by a newer schema.
    """
    name = str(path)
    try:
        with Path(path).open("rb") as file, no_gc():
            size = os.fstat(file.fileno()).st_size
            header, start = _read_header(file, name)
            events, unknown, whole = _decode(_blocks(file, start, size), progress, size)
            unknown.sort(key=_BY_TIME)
            return StoredRun(header, _by_time(events), unknown, size - start - whole)
    except OSError as error:
        raise SgvizError(f"cannot read the recording {name!r}: {error}") from error


def _by_time(events: list[Event]) -> list[Event]:
    """Sorted by `(t, component, seq)`. Files are nearly so, and only equal times need the other two."""
    times = np.fromiter(map(_TIME, events), dtype=np.int64, count=len(events))
    steps = np.diff(times)
    if (steps < 0).any():
        order = np.argsort(times, kind="stable")
        events, steps = [events[at] for at in order.tolist()], np.diff(times[order])
    same = np.flatnonzero(steps == 0)
    for run in np.split(same, np.flatnonzero(np.diff(same) > 1) + 1):
        if len(run):
            first, last = int(run[0]), int(run[-1]) + 2
            events[first:last] = sorted(events[first:last], key=_BY_TIME)
    return events


def _read_header(file: BinaryIO, name: str) -> tuple[Header, int]:
    """The header, and where the events begin."""
    start = len(MAGIC) + _LENGTH.size
    head = file.read(start)
    if head[: len(MAGIC)] != MAGIC:
        if MAGIC.startswith(head):
            raise SgvizError(f"{name!r} is cut off in its header: {len(head)} bytes and no event")
        raise SgvizError(f"{name!r} is not an sgviz recording: it begins with {head[:8]!r}, not {MAGIC!r}")
    length = _LENGTH.unpack_from(head, len(MAGIC))[0] if len(head) == start else 0
    raw = file.read(length)
    if not length or len(raw) < length:
        raise SgvizError(f"{name!r} is cut off in its header: {len(head) + len(raw)} bytes and no event")
    try:
        peek = msgspec.msgpack.decode(raw, type=_Peek)
        if peek.schema > SCHEMA_VERSION:
            raise SgvizError(
                f"{name!r} has event schema {peek.schema} (written by sgviz {peek.version}); this sgviz "
                f"reads schemas up to {SCHEMA_VERSION}: upgrade sgviz to open it"
            )
        return msgspec.msgpack.decode(raw, type=Header), start + length
    except msgspec.DecodeError as error:
        raise SgvizError(f"the header of {name!r} is damaged: {error}") from error


def _blocks(file: BinaryIO, start: int, size: int) -> Iterator[list[bytes]]:
    """The whole frames up to `size`, without their lengths, some at a time; `start`: where the file stands."""
    unpack, rest, need = _LENGTH.unpack_from, b"", 0
    while start < size:
        data = rest + file.read(min(max(_BLOCK, need - len(rest)), size - start))
        if len(data) == len(rest):
            return  # somebody made the file shorter meanwhile
        start += len(data) - len(rest)
        last, at, out = len(data), 0, []
        while at + 4 <= last:
            begin = at + 4
            end = begin + unpack(data, at)[0]
            if end > last or end == begin:
                break
            out.append(data[begin:end])
            at = end
        yield out
        rest = data[at:]
        need = _LENGTH.size + unpack(rest)[0] if len(rest) >= 4 else 0
        if need == _LENGTH.size or need - len(rest) > size - start:
            return  # nothing that could be a frame


def _decode(
    blocks: Iterable[Sequence[bytes]], progress: Progress | None, size: int
) -> tuple[list[Event], list[UnknownEvent], int]:
    """Known events, unknown ones, and the bytes of the sound frames (the first damaged one ends the file)."""
    decode = msgspec.msgpack.Decoder(list[Event]).decode
    events: list[Event] = []
    unknown: list[UnknownEvent] = []
    whole = 0
    for frames in blocks:
        if progress is not None:
            progress("load", whole, size)
        array = b"".join((_ARRAY32.pack(b"\xdd", len(frames)), *frames))
        try:
            events += decode(array)
        except msgspec.DecodeError:
            sound = _decode_each(frames, events, unknown)
            if sound < len(frames):
                return events, unknown, whole + sum(_LENGTH.size + len(frame) for frame in frames[:sound])
        whole += len(array) - _ARRAY32.size + _LENGTH.size * len(frames)
    return events, unknown, whole


def _decode_each(frames: Sequence[bytes], events: list[Event], unknown: list[UnknownEvent]) -> int:
    """One frame at a time; returns how many were sound."""
    decode = msgspec.msgpack.Decoder(Event).decode
    for index, frame in enumerate(frames):
        try:
            events.append(decode(frame))
        except msgspec.ValidationError:
            stranger = _as_unknown(frame)
            if stranger is None:
                return index
            unknown.append(stranger)
        except msgspec.DecodeError:
            return index
    return len(frames)


def _as_unknown(frame: bytes) -> UnknownEvent | None:
    """The stamps of an event whose body does not fit; None when it is no event at all."""
    try:
        seq, t, component, iteration, body = msgspec.msgpack.decode(frame, type=_Stamped)[:5]
        return UnknownEvent(seq, t, component, iteration, str(body[0]), frame)
    except (msgspec.DecodeError, IndexError):
        return None


_Stamped = tuple[int, int, str, int, list[object]]


@contextmanager
def no_gc() -> Iterator[None]:
    """A million new objects and none to collect: the collector would double the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
