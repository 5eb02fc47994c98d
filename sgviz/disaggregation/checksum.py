"""The checksum mode: whether the bytes of a piece came as they were read. Imports: disaggregation (wire), errors."""

from __future__ import annotations

import zlib

from sgviz.disaggregation.wire import NOT_TAKEN, Piece
from sgviz.errors import SgvizError


def checksum_of(memory: memoryview, *, wanted: bool) -> int:
    """Of the bytes of a piece, for `Piece.checksum`. `wanted`: disaggregation_checksum is set here."""
    return zlib.crc32(memory) if wanted else NOT_TAKEN


def verify(piece: Piece, memory: memoryview, *, wanted: bool) -> None:
    """Raises SgvizError if the bytes are others than those that were sent, or if nobody can tell and it is `wanted`."""
    if piece.checksum == NOT_TAKEN:
        if wanted:
            raise SgvizError("disaggregation_checksum is set here, but not on the prefill server")
        return
    found = zlib.crc32(memory)
    if found != piece.checksum:
        raise SgvizError(
            f"the KV of tokens {piece.start} to {piece.start + piece.tokens} came damaged: its checksum is "
            f"{found:08x}, sent was {piece.checksum:08x}"
        )
