"""Just enough of the protobuf wire format to write messages: varints, fixed64, and nested fields.

Imports: standard library.
"""

from __future__ import annotations

import struct

_VARINT, _FIXED64, _BYTES = 0, 1, 2


def varint(value: int) -> bytes:
    """An unsigned varint; negative numbers as 64-bit two's complement."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def number(field: int, value: int) -> bytes:
    """An integer, bool or enum field."""
    return varint(field << 3 | _VARINT) + varint(value)


def fixed64(field: int, value: int) -> bytes:
    return varint(field << 3 | _FIXED64) + struct.pack("<Q", value & (1 << 64) - 1)


def double(field: int, value: float) -> bytes:
    return varint(field << 3 | _FIXED64) + struct.pack("<d", value)


def nested(field: int, payload: bytes) -> bytes:
    """A string, bytes or message field."""
    return varint(field << 3 | _BYTES) + varint(len(payload)) + payload


def text(field: int, value: str) -> bytes:
    return nested(field, value.encode("utf-8"))
