"""Ranks: the schedulers behind the TokenizerManager, and which of them live.

Mirrors what SGLang's TokenizerManager knows of its data parallel workers. One asyncio loop owns it.
Imports: messages, errors.
"""

from __future__ import annotations

import msgspec

from sgviz.errors import BadRequest, Unavailable
from sgviz.messages import FinishReason
from sgviz.messages.parallel import addressees


class Ranks:
    """Which there are, of `size`.

    Args:
        one_process: they are threads of this process.

    Attributes:
        lost: why, by rank.
        aside: ranks that live and get no requests, as their weights are not those of the others: why, by rank.
    """

    def __init__(self, size: int = 1, *, one_process: bool = False) -> None:
        self.size = size
        self.lost: dict[int, str] = {}
        self.aside: dict[int, str] = {}
        self._one_process = one_process

    @property
    def live(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self.lost]

    @property
    def status(self) -> list[bool]:
        return [rank not in self.lost for rank in range(self.size)]

    @property
    def out(self) -> list[int]:
        """The ranks that get no requests: lost, or set aside."""
        return [rank for rank in range(self.size) if rank in self.lost or rank in self.aside]

    def asked(self, question: msgspec.Struct) -> list[int]:
        """The ranks that answer it."""
        return addressees(question, self.live, self._one_process)

    def why_ended(self, rank: int) -> FinishReason:
        """The end of a request that a lost rank had."""
        message = f"data parallel rank {rank}, which had the request, died ({self.lost[rank]}); send it again"
        return FinishReason(
            type="abort", message=message, status_code=Unavailable.status, err_type=Unavailable.type
        )


def check_rank(rank: object, size: int, name: str = "routed_dp_rank") -> int | None:
    """The rank that a request names in that field, as it is to be sent: None of a lone scheduler.

    Raises:
        BadRequest: it is no number of a rank.
    """
    if rank is None:
        return None
    if type(rank) is not int or not 0 <= rank < size:
        which = f"between 0 and {size - 1}" if size > 1 else "0, as there is one rank"
        raise BadRequest(f"{name} must be {which}, got {rank!r:.60}", param=name)
    return rank if size > 1 else None
