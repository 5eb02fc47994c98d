"""InputLogprobs: log-probabilities of prompt tokens, as forwards give them piece by piece.

Mirrors SGLang's input logprob fields of Req. Imports: nothing of sgviz.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Pairs = list[tuple[float, int]]  # (log-probability, token id)


@dataclass(slots=True)
class InputLogprobs:
    """By position, each given all tokens before it.

    Attributes:
        logprobs: of the prompt's own token.
        tops: the likeliest tokens, best first; empty lists where none were asked for.
        token_ids: the ids that were asked for, in that order; empty lists where none were.
    """

    logprobs: list[float] = field(default_factory=list)
    tops: list[Pairs] = field(default_factory=list)
    token_ids: list[Pairs] = field(default_factory=list)

    def extend(self, more: InputLogprobs) -> None:
        """Append those of the positions that follow."""
        self.logprobs += more.logprobs
        self.tops += more.tops
        self.token_ids += more.token_ids
