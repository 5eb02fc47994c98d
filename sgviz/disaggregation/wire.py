"""What the two sides say to each other, as msgpack; the bytes of a piece follow in a frame of their own over tcp.

A room is named with the `key` that the decode side drew for it, so that what is late for a room is not taken for a
later request's. Mirrors the ZMQ messages of SGLang's mooncake backend. Imports: disaggregation.protocol.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from sgviz.disaggregation.protocol import KVAux

Carrier = Literal["shm", "tcp"]
NOT_TAKEN = -1  # in place of a checksum
FAKE_BOOTSTRAP_HOST = "2.2.2.2"  # SGLang's: no other side; for warm-up and health checks


class _Message(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    room: int
    key: str


class Hello(_Message, frozen=True, tag="hello"):
    """To the prefill side: a request with this room waits for it here."""

    carrier: Carrier


class Destination(_Message, frozen=True, tag="destination"):
    """To the prefill side: send tokens [prefix_len, prefix_len + tokens) of it."""

    prefix_len: int
    tokens: int


class PieceDone(_Message, frozen=True, tag="done"):
    """To the prefill side: the piece's buffer is not read any more; `written`: it is in its pages."""

    number: int
    written: bool


class Mapped(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="mapped"):
    """To the prefill side: the segment is mapped, so its name may go."""

    segment: str


class Abort(_Message, frozen=True, tag="abort"):
    """To the prefill side: nothing more is taken for it. `status`: what its own request is answered with."""

    why: str
    status: int = 500


class Piece(_Message, frozen=True, tag="piece"):
    """To the decode side: tokens [start, start + tokens), in a shared segment or in the frame behind.

    `checksum`: crc32 of the bytes, or NOT_TAKEN. `aux`: with the last piece.
    """

    number: int
    start: int
    tokens: int
    size: int
    segment: str = ""
    offset: int = 0
    checksum: int = NOT_TAKEN
    last: bool = False
    aux: KVAux | None = None


class Failed(_Message, frozen=True, tag="failed"):
    """To the decode side: nothing more comes for it. `status`: what its own request is answered with."""

    why: str
    status: int = 500


class RankRoute(msgspec.Struct, frozen=True, kw_only=True):
    """A prefill rank as the bootstrap server knows it.

    Attributes:
        tag, wire_bytes: see KVLayout. follow_bootstrap_room: room % dp_size is the rank.
        carriers: how KV can leave. boot_id, token_name, token: a file in shared memory that tells whether another
            process sees the same.
    """

    dp_rank: int
    dp_size: int
    rank_ip: str
    rank_port: int
    heart_port: int
    page_size: int
    tag: str
    wire_bytes: int
    follow_bootstrap_room: bool = True
    carriers: list[Carrier] = msgspec.field(default_factory=lambda: ["shm", "tcp"])
    boot_id: str = ""
    token_name: str = ""
    token: str = ""


class ServerRoute(msgspec.Struct, frozen=True, kw_only=True):
    """What all ranks of a prefill server share."""

    dp_size: int
    page_size: int
    kv_cache_dtype: str
    follow_bootstrap_room: bool
    attn_tp_size: int = 1
    attn_cp_size: int = 1
    pp_size: int = 1


ToPrefill = Hello | Destination | PieceDone | Mapped | Abort
ToDecode = Piece | Failed
