"""The border between the schedulers' queues and the transfer of KV: one sender or receiver a request, polled.

Nothing here waits. A manager does its work in `pump`, once a turn of the scheduler, in the scheduler's own thread; what
copies bytes runs on the worker's stream, behind the forwards that were launched before it. Names are those of SGLang's
BaseKVManager, BaseKVSender and BaseKVReceiver. Imports: cache (types), messages.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import msgspec
import zmq

from sgviz.cache.req_kv import Slots

Wake = zmq.Socket[Any] | int  # a socket, or what the kernel calls a file


LOST = 503  # for a request whose other side is unreachable, silent or shutting down: another pair may do it


class KVPoll(IntEnum):
    """Where a transfer is; the order is SGLang's, so that the least of several ranks counts."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING_FOR_INPUT = 2
    TRANSFERRING = 3
    SUCCESS = 4


class KVAux(msgspec.Struct, kw_only=True, frozen=True, array_like=True):
    """What the decode side must know beside the KV: the first token and what was found about it.

    The output columns are of the first token (empty: nobody asked); the input columns of the prompt. `prompt`: its
    `prompt_mark`, None: not told.
    """

    room: int
    first_token: int
    cached_tokens: int = 0
    output_logprob: float | None = None
    output_top_logprobs: list[tuple[float, int]] = []
    output_token_ids_logprobs: list[tuple[float, int]] = []
    input_token_logprobs: list[float] = []
    input_top_logprobs: list[list[tuple[float, int]]] = []
    input_token_ids_logprobs: list[list[tuple[float, int]]] = []
    prompt: int | None = None


def prompt_mark(ids: Sequence[int]) -> int:
    """Tells a prompt from others of its length."""
    return zlib.crc32(array("q", ids).tobytes())


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferStats:
    """What travelled for one request; times in monotonic ns (0: not yet)."""

    bytes: int = 0
    pieces: int = 0
    start_ns: int = 0
    end_ns: int = 0
    backend: str = ""


class KVSender(Protocol):
    """The prefill side of one request."""

    room: int
    decode_prefix_len: int  # tokens that the decode side has; known from WAITING_FOR_INPUT on
    failure: str  # why FAILED
    failure_status: int  # what the request is answered with then
    stats: TransferStats

    def poll(self) -> KVPoll: ...

    def send(self, start: int, slots: Slots, *, aux: KVAux | None = None, cached: bool = False) -> None:
        """Send tokens [start, start + len(slots)), read behind the launched forwards; `aux`: it is the last."""
        ...

    def abort(self, why: str, status: int = 500) -> None:
        """Tell the other side that nothing more comes, and what to answer; FAILED from now on."""
        ...

    @property
    def busy(self) -> bool:
        """A read of the pool is under way: the request's pages must not go back yet."""
        ...


class KVReceiver(Protocol):
    """The decode side of one request."""

    room: int
    aux: KVAux | None  # at SUCCESS
    prefill_dp_rank: int
    failure: str
    failure_status: int
    stats: TransferStats

    def poll(self) -> KVPoll: ...

    def init(self, slots: Slots, prefix_len: int) -> None:
        """Where tokens [prefix_len, prefix_len + len(slots)) go; told to the prefill side."""
        ...

    def abort(self, why: str, status: int = 500) -> None:
        """Take nothing more, and tell the prefill side, and what to answer; FAILED from now on."""
        ...

    @property
    def busy(self) -> bool:
        """A write into the pool is under way: the request's pages must not go back yet."""
        ...


class KVManager(Protocol):
    """What a scheduler's side has of the transfers, all requests together."""

    @property
    def busy(self) -> bool:
        """Some room is open: look again soon."""
        ...

    def pump(self) -> None:
        """Take in what has come, send signs of life, notice who is silent; never waits."""
        ...

    def wakes(self) -> list[Wake]:
        """What to poll in a wait between two pumps: one is due when something of it is readable."""
        ...

    @property
    def wait_ms(self) -> int:
        """How long such a poll may take at most: the end of a simulated copy wakes nobody."""
        ...

    def close(self) -> None: ...


class PrefillKVManager(KVManager, Protocol):
    def create_sender(self, rid: str, room: int, num_tokens: int, *, host: str = "") -> KVSender:
        """Raises BadRequest if the room is taken. `host`: FAKE_BOOTSTRAP_HOST: there is no other side."""
        ...


class DecodeKVManager(KVManager, Protocol):
    def create_receiver(
        self, rid: str, room: int, host: str, port: int, num_tokens: int, prefill_dp_rank: int | None = None
    ) -> KVReceiver:
        """Raises BadRequest if the room is taken by another request."""
        ...
