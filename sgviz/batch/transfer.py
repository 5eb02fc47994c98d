"""What a request of a prefill or decode server carries of the other side: where to meet it, and its transfer of KV.

The sender or receiver itself is made by `sgviz.disaggregation`; here is what everybody may ask of it.
Mirrors the bootstrap fields of SGLang's Req. Imports: nothing of sgviz.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Where the two sides of a request meet.

    Attributes:
        host, port: where the prefill server's ranks are told. room: the request's number there.
        prefill_dp_rank: which of these ranks computes the prompt, if that was decided before.
    """

    host: str
    port: int
    room: int
    prefill_dp_rank: int | None = None

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


class Transfer(Protocol):
    """One request's transfer of KV, to or from the other side."""

    failure: str

    @property
    def busy(self) -> bool:
        """A copy from or into the pool is under way: the request's pages must not go back yet."""
        ...

    def abort(self, why: str, status: int = 500) -> None:
        """End it and tell the other side, which answers its own request with `status`."""
        ...


class Copy(Protocol):
    """A copy of KV under way on the device's stream; `sgviz.worker.protocol.KVCopy` is one."""

    def done(self) -> bool: ...

    def result(self) -> tuple[int, int]: ...


@dataclass(slots=True)
class KeptKv:
    """KV of a request that gave up its pages: `data` in host memory, of its first `tokens` positions."""

    tokens: int
    data: bytearray
    copy: Copy
