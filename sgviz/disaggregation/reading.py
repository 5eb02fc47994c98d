"""Reading: pieces on their way out of the pool, each into a buffer of the decode rank that it is for.

Imports: disaggregation, worker protocol.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from sgviz.disaggregation.copies import Copies, Times
from sgviz.disaggregation.peers import Peers
from sgviz.disaggregation.sender import OutPiece, Sender
from sgviz.disaggregation.staging import Buffer
from sgviz.worker.protocol import MovesKV


class Reading:
    """Those that are being read.

    Args:
        most: tokens of a piece, for which every buffer is large enough.
        or_tcp: where shared memory is full, KV may go over tcp.
    """

    def __init__(
        self,
        worker: MovesKV,
        peers: Peers,
        copies: Copies[tuple[Sender, OutPiece]],
        most: int,
        *,
        or_tcp: bool,
    ) -> None:
        self._worker, self._peers, self._copies = worker, peers, copies
        self._wire_bytes = worker.kv_layout.wire_bytes
        self._most, self._or_tcp = most, or_tcp

    def __len__(self) -> int:
        return len(self._copies)

    def begin(self, sender: Sender) -> None:
        """Read its queued pieces while there are buffers. Raises SgvizError if there will never be any."""
        assert sender.peer is not None
        peer = self._peers[sender.peer]
        size = self._most * self._wire_bytes
        while sender.queued and (buffer := peer.take(size, or_tcp=self._or_tcp)) is not None:
            sender.stats = replace(sender.stats, backend=peer.carrier)
            self._read(sender, sender.queued.popleft(), buffer)

    def over(self, *, wait: bool = False) -> Iterator[tuple[Sender, OutPiece, Times | Exception]]:
        """Those that were read, in the order in which they were to be. `wait`: for all that are being read."""
        for (sender, piece), outcome in self._copies.over(wait=wait):
            sender.reading -= 1
            yield sender, piece, outcome

    def drop(self, sender: Sender, piece: OutPiece) -> None:
        """Read for nothing: its buffer is free, unless the decode rank is lost and the buffers with it."""
        peer = self._peers.get(sender.peer or b"")
        if peer is not None and piece.buffer is not None:
            peer.give_back(piece.buffer)

    def _read(self, sender: Sender, piece: OutPiece, buffer: Buffer) -> None:
        piece.buffer = buffer
        out = buffer.memory[: len(piece.slots) * self._wire_bytes]
        copy = self._worker.read_kv(piece.slots, out) if len(piece.slots) else None
        sender.reading += 1
        self._copies.add((sender, piece), copy)
