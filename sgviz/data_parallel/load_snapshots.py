"""Load snapshots on their way from the schedulers to the controller: nobody waits, and nobody reads half of one.

Between processes a file in memory, one slot of 16 KiB a rank with a sequence lock and a checksum (as SGLang's shared
memory); between threads a list. Imports: messages.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from pathlib import Path

import msgspec

from sgviz.messages.parallel import LoadSnapshot

SLOT_BYTES = 16 * 1024
TRIES = 8  # of a reader whom a writer comes in the way
_SEQUENCE = struct.Struct("<Q")
_HEAD = struct.Struct("<QII")  # sequence (odd: being written), length and checksum of what follows


class SnapshotList:
    """For ranks that are threads of one process."""

    def __init__(self, ranks: int) -> None:
        self._newest: list[LoadSnapshot | None] = [None] * ranks

    def put(self, snapshot: LoadSnapshot) -> None:
        self._newest[snapshot.dp_rank] = snapshot

    def read(self, rank: int) -> LoadSnapshot | None:
        """The newest of `rank`, None if there is none."""
        return self._newest[rank]

    def close(self) -> None:
        pass


class SnapshotFile:
    """For ranks that are processes of one host: each writes its own slot, anybody reads all."""

    def __init__(self, path: str) -> None:
        with Path(path).open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(LoadSnapshot).decode

    @classmethod
    def create(cls, path: str, ranks: int) -> SnapshotFile:
        """A new file with empty slots."""
        with Path(path).open("wb") as file:
            file.truncate(ranks * SLOT_BYTES)
        return cls(path)

    def put(self, snapshot: LoadSnapshot) -> None:
        """Replace what is in the slot of the snapshot's rank; only that rank may."""
        body, at = self._encode(snapshot), snapshot.dp_rank * SLOT_BYTES
        assert len(body) <= SLOT_BYTES - _HEAD.size, "a snapshot is a few numbers"
        before: int = _SEQUENCE.unpack_from(self._map, at)[0]
        during = before + 1 | 1  # odd also after a writer that died while it wrote
        _SEQUENCE.pack_into(self._map, at, during)
        self._map[at + _HEAD.size : at + _HEAD.size + len(body)] = body
        _HEAD.pack_into(self._map, at, during, len(body), zlib.crc32(body))
        _SEQUENCE.pack_into(self._map, at, during + 1)

    def read(self, rank: int) -> LoadSnapshot | None:
        """The newest of `rank`; None if there is none, or its writer came in the way each time."""
        at = rank * SLOT_BYTES
        for _ in range(TRIES):
            sequence, length, checksum = _HEAD.unpack_from(self._map, at)
            if sequence == 0:
                return None
            if sequence % 2 or length > SLOT_BYTES - _HEAD.size:
                continue
            body = self._map[at + _HEAD.size : at + _HEAD.size + length]
            # the checksum covers machines on which another core may see the writes in another order
            if _SEQUENCE.unpack_from(self._map, at)[0] == sequence and zlib.crc32(body) == checksum:
                return self._decode(body)
        return None

    def close(self) -> None:
        self._map.close()
