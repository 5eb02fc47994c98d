"""Events of prefill/decode disaggregation: two sides of one request, and the KV between them. Imports: schema.base."""

from __future__ import annotations

from sgviz.events.schema.base import Body


class DisaggQueued(Body, frozen=True, tag="disagg.queued"):
    """A request came and waits for its other side: in the bootstrap queue (`side` prefill) or prealloc queue (decode).

    `peer`: the prefill server's bootstrap address. `received_ns`: when it was taken from the inbox.
    """

    rid: str
    side: str
    room: int
    peer: str
    prompt_tokens: int
    received_ns: int


class DisaggBootstrapped(Body, frozen=True, tag="disagg.bootstrapped"):
    """Both sides of a request found each other.

    On the prefill side: the decode side has told its destination, and has `decode_prefix_len` tokens already. On the
    decode side: it knows the rank `prefill_dp_rank` of the prefill server and how to reach it.
    """

    rid: str
    side: str
    room: int
    peer: str
    decode_prefix_len: int = 0
    prefill_dp_rank: int = 0


class DisaggPreallocated(Body, frozen=True, tag="disagg.preallocated"):
    """The decode side took row and pages for a prompt that is to come: `tokens` of it, `prefix_len` found in its cache.

    `need` and `have`: KV tokens asked for with the reserve, and what could be had.
    """

    rid: str
    room: int
    tokens: int
    prefix_len: int
    need: int
    have: int


class DisaggPreallocRefused(Body, frozen=True, tag="disagg.prealloc_refused"):
    """The decode side has no room yet for the first of its prealloc queue, told when the reason changes.

    `reason`: kv, rows, or retracted (requests that were retracted go first). `behind`: how many wait behind it.
    """

    rid: str
    room: int
    reason: str
    need: int
    have: int
    behind: int


class KvSent(Body, frozen=True, tag="kv.sent"):
    """The prefill side handed a piece of KV over: tokens `start` to `start + tokens`, read from its pool between
    `start_ns` and `end_ns`. `cached`: they came from its cache, before any forward."""

    rid: str
    room: int
    piece: int
    start: int
    tokens: int
    bytes: int
    start_ns: int
    end_ns: int
    last: bool
    cached: bool = False


class KvReceived(Body, frozen=True, tag="kv.received"):
    """The decode side wrote a piece of KV into its pages between `start_ns` and `end_ns`. `verified`: by checksum."""

    rid: str
    room: int
    piece: int
    start: int
    tokens: int
    bytes: int
    start_ns: int
    end_ns: int
    last: bool
    verified: bool = False


class DisaggTransferred(Body, frozen=True, tag="disagg.transferred"):
    """The transfer of a request ended, well (`ok`) or for a reason (`why`).

    `start_ns`: the first piece was sent, `end_ns`: the last was in place (decode side) or confirmed (prefill side); 0:
    it never began. `bytes` and `pieces` that travelled. `backend`: shm, tcp or fake.
    """

    rid: str
    side: str
    room: int
    ok: bool
    why: str
    bytes: int
    pieces: int
    start_ns: int
    end_ns: int
    backend: str
