"""InputPart: what one forward gave of the log-probabilities of one prompt, as tensors. Imports: torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True, kw_only=True)
class InputPart:
    """Of n positions of a member.

    Attributes:
        member: its place in the batch.
        logprobs: [n] of the token that came. tops, top_ids: [n, k] the likeliest, best first.
        token_ids: [n, m] of the ids that were asked for. wanted: [m] these ids.
    """

    member: int
    logprobs: Tensor
    tops: Tensor
    top_ids: Tensor
    wanted: tuple[int, ...]
    token_ids: Tensor

    def moved(self, move: Callable[[Tensor], Tensor]) -> InputPart:
        """The same with every tensor put through `move`."""
        return InputPart(
            member=self.member,
            logprobs=move(self.logprobs),
            tops=move(self.tops),
            top_ids=move(self.top_ids),
            wanted=self.wanted,
            token_ids=move(self.token_ids),
        )
