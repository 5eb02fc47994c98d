"""Pooler: the hidden states of prompts to one vector each. Mirrors SGLang's Pooler.

Pooling, then cut to the asked `dimensions`, then length 1. The mean of a prompt that comes in chunks is a sum that
is kept, by the row of the request, until its last chunk. Imports: messages (the spec), errors, torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from sgviz.errors import SgvizError
from sgviz.messages.embedding import EmbeddingSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooled:
    """One request of a forward, as the Pooler sees it.

    Attributes:
        row: names the request over its chunks. prefix, extend: tokens before and in this forward.
        goes_on: a later forward has more of the prompt. dimensions: numbers wanted; None: all.
    """

    row: int
    prefix: int
    extend: int
    goes_on: bool = False
    dimensions: int | None = None


class Pooler:
    """Pools as `spec` says. Its sums belong to the stream: call from the stream's thread only."""

    def __init__(self, spec: EmbeddingSpec) -> None:
        self.spec = spec
        self._sums: dict[int, tuple[int, Tensor]] = {}  # row -> (tokens summed so far, their sum)

    def forward(self, hidden: Tensor, members: list[Pooled]) -> list[Tensor | None]:
        """[T, hidden] float32, member after member, to a normalised vector each; None for a prompt that goes on."""
        parts = hidden.split([member.extend for member in members])
        return [self._vector(part, member) for part, member in zip(parts, members)]

    def forget(self, rows: Iterable[int]) -> None:
        """The rows are free again."""
        for row in rows:
            self._sums.pop(row, None)

    def _vector(self, states: Tensor, member: Pooled) -> Tensor | None:
        if self.spec.pooling == "mean":
            pooled = self._mean(states, member)
        elif member.goes_on:
            return None
        else:
            pooled = states[-1] if self.spec.pooling == "last" else states[0]
        return None if pooled is None else F.normalize(pooled[: member.dimensions], dim=0)

    def _mean(self, states: Tensor, member: Pooled) -> Tensor | None:
        total = states.sum(0)
        if member.prefix:
            tokens, before = self._sums.pop(member.row, (0, total))
            if tokens != member.prefix:
                raise SgvizError(
                    f"the mean of row {member.row} has {tokens} tokens before this chunk, wanted {member.prefix}"
                )
            total = before + total
        if member.goes_on:
            self._sums[member.row] = member.prefix + member.extend, total
            return None
        return total / (member.prefix + member.extend)


def to_host(vectors: list[Tensor | None]) -> list[bytes]:
    """Little-endian float32 on the host; empty for those that are not there yet."""
    return [b"" if vector is None else vector.cpu().numpy().astype("<f4").tobytes() for vector in vectors]
