"""The accounts of the transfers of one server: rooms, pieces and what they must cover, and which rule an event breaks.

SGLang checks a transfer by the room in its metadata. Imports: events.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sgviz.events.schema import (
    DisaggBootstrapped,
    DisaggPreallocated,
    DisaggQueued,
    DisaggTransferred,
    KvReceived,
    KvSent,
)

FAKE = "fake"  # nothing travels


@dataclass(slots=True)
class _Account:
    """Of one request: the tokens that were to travel, and what did. `reserved`: a place for them is taken."""

    room: int
    prompt: int
    start: int = 0
    reserved: bool = False
    over: bool = False
    at: int = -1
    bytes: int = 0
    tokens: int = 0
    pieces: dict[int, None] = field(default_factory=dict)


class TransferBooks:
    """`fault(rule, detail)` is told of the event at hand."""

    def __init__(self, fault: Callable[[str, str], None]) -> None:
        self._fault = fault
        self._accounts: dict[str, _Account] = {}
        self._rooms: dict[int, str] = {}

    def queued(self, body: DisaggQueued) -> None:
        other = self._rooms.get(body.room)
        if other is not None and other != body.rid:
            self._fault("a room is one request's", f"room {body.room} of {body.rid} is {other}'s")
        self._rooms[body.room] = body.rid
        self._accounts[body.rid] = _Account(body.room, body.prompt_tokens)

    def bootstrapped(self, body: DisaggBootstrapped) -> None:
        if (account := self._accounts.get(body.rid)) is not None:
            account.start = body.decode_prefix_len

    def preallocated(self, body: DisaggPreallocated) -> None:
        account = self._accounts.get(body.rid)
        if account is None or account.over:
            self._fault("room is taken for who awaits KV", f"{body.rid} awaits none")
            return
        account.reserved, account.start, account.prompt = True, body.prefix_len, body.tokens

    def sent(self, body: KvSent) -> None:
        account = self._accounts.get(body.rid)
        if account is None:
            self._fault("KV is sent for who has a room", f"{body.rid} has none")
            return
        self._piece(account, body)

    def received(self, body: KvReceived) -> None:
        account = self._accounts.get(body.rid)
        if account is None or not account.reserved:
            self._fault("KV is written for who has pages for it", f"{body.rid} has none")
            return
        if account.over:
            self._fault("nothing is written after a transfer's end", f"piece {body.piece} of {body.rid}")
        self._piece(account, body)

    def transferred(self, body: DisaggTransferred) -> None:
        account = self._accounts.get(body.rid)
        if account is None:
            self._fault("a transfer ends that began", f"{body.rid} has none")
            return
        self._rooms.pop(account.room, None)
        if not body.ok:
            return
        account.over = True
        if body.backend == FAKE:
            return
        if account.bytes != body.bytes:
            self._fault(
                "the pieces are the whole", f"{account.bytes} bytes by the pieces, {body.bytes} stated"
            )
        if account.tokens != account.prompt - account.start:
            wanted = f"{account.start} to {account.prompt}"
            self._fault(
                "a transfer brings the whole prompt", f"{account.tokens} tokens came, wanted {wanted}"
            )

    def ended(self, rid: str) -> None:
        """The request is over here."""
        account = self._accounts.get(rid)
        if account is not None and self._rooms.get(account.room) == rid:
            del self._rooms[account.room]

    def _piece(self, account: _Account, body: KvSent | KvReceived) -> None:
        if body.piece in account.pieces:
            self._fault("a piece travels once", f"piece {body.piece} of {body.rid} came twice")
        expected = account.start if account.at < 0 else account.at
        if body.tokens and body.start != expected:
            self._fault(
                "each token travels once", f"a piece of {body.rid} begins at {body.start}, not {expected}"
            )
        if body.start + body.tokens > account.prompt:
            end = body.start + body.tokens
            self._fault("pieces lie in the prompt", f"{body.rid}: {end} of {account.prompt} tokens")
        account.pieces[body.piece] = None
        account.at = max(account.at, body.start + body.tokens)
        account.bytes += body.bytes
        account.tokens += body.tokens
