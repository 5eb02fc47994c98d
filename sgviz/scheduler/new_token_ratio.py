"""new_token_ratio: which share of its remaining output a running request is assumed to need (facts 5.8).

It starts high, decays with every decode step that fits, and jumps up after a retraction. Imports: nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

INIT_NEW_TOKEN_RATIO = 0.7
MIN_NEW_TOKEN_RATIO_FACTOR = 0.14
NEW_TOKEN_RATIO_DECAY_STEPS = 600
RETRACT_DECODE_STEPS = 20


@dataclass(slots=True)
class NewTokenRatio:
    """`current` in (0, 1]; `initial`, `minimum` and `step` follow from the conservativeness."""

    initial: float
    minimum: float
    step: float
    current: float

    @classmethod
    def from_conservativeness(cls, conservativeness: float) -> NewTokenRatio:
        initial = min(INIT_NEW_TOKEN_RATIO * conservativeness, 1.0)
        minimum = min(initial * MIN_NEW_TOKEN_RATIO_FACTOR, 1.0)
        return cls(initial, minimum, (initial - minimum) / NEW_TOKEN_RATIO_DECAY_STEPS, initial)

    def decay(self) -> None:
        """One decode step went without a retraction."""
        self.current = max(self.current - self.step, self.minimum)

    def reset(self) -> None:
        """The scheduler is idle."""
        self.current = self.initial

    def after_retraction(self, survivors: Sequence[tuple[int, int]]) -> float:
        """Set from the survivors' `(output tokens, max_new_tokens)`; returns the new value."""
        outputs = sum(done for done, _ in survivors)
        promised = sum(most for _, most in survivors)
        self.current = min(1.0, (outputs + RETRACT_DECODE_STEPS * len(survivors)) / (promised + 1))
        return self.current
