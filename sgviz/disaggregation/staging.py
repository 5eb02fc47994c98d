"""Where a piece of KV stands between two pools: a few buffers for each decode rank, used again and again.

The pool's copy goes straight into a buffer; the other side copies straight out of it (shm), or zmq sends it (tcp). A
buffer is free again when the other side says so, which bounds what is under way.
Mirrors the buffers that SGLang registers with its transfer engine. Imports: disaggregation (shared_memory, wire).
"""

from __future__ import annotations

from dataclasses import dataclass

from sgviz.disaggregation import shared_memory
from sgviz.disaggregation.wire import Carrier

BUFFERS = 3  # one is read into, one is on its way or written out of, and one to spare


@dataclass(slots=True, kw_only=True)
class Buffer:
    """Room for one piece. `segment`, `offset`: where the other side finds it; none: the bytes are sent."""

    memory: memoryview
    segment: str = ""
    offset: int = 0


class Staging:
    """The buffers for one decode rank.

    Args:
        size: bytes of a buffer; 0: the device copies nothing, and pieces are only counted.
    """

    def __init__(self, carrier: Carrier, size: int, buffers: int = BUFFERS) -> None:
        self._segment = ""
        shared = carrier == "shm" and size > 0
        if shared:
            self._segment, memory = shared_memory.create(size * buffers)
        else:
            memory = memoryview(bytearray(size * buffers))
        self._free = [
            Buffer(memory=memory[at * size : (at + 1) * size], segment=self._segment, offset=at * size)
            for at in reversed(range(buffers))
        ]

    def take(self) -> Buffer | None:
        """A free buffer; None: all are under way."""
        return self._free.pop() if self._free else None

    def give_back(self, buffer: Buffer) -> None:
        self._free.append(buffer)

    def mapped(self, segment: str) -> None:
        """The other side has mapped it."""
        if segment == self._segment:
            shared_memory.unlink(segment)

    def close(self) -> None:
        """Nothing of it is used again; who reads it still, may."""
        self._free.clear()
        if self._segment:
            shared_memory.unlink(self._segment)
