"""Grammar: how far one request has come in its grammar, as scheduler and worker see it.

`sgviz.grammar` makes them. Mirrors SGLang's BaseGrammarObject. Imports: nothing of sgviz.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt


class Failure(NamedTuple):
    """Why a grammar does not go on. `too_complex`: a limit of the backend, so the text of the grammar is at fault."""

    message: str
    too_complex: bool


class Grammar(Protocol):
    """One request's. Only the scheduler's thread touches it; no call raises for what a grammar or a token is like."""

    @property
    def ended(self) -> bool:
        """Nothing but an end token may follow, or one has come."""
        ...

    @property
    def accepted(self) -> int:
        """Tokens taken so far."""
        ...

    def fill(self, row: npt.NDArray[np.int32]) -> None:
        """Write the tokens that may come next: bit i of word w is token 32 w + i. `row` is all zero before."""
        ...

    def accept(self, token: int) -> Failure | None:
        """Go on by a sampled token; if it cannot, why (the state stays as it was then)."""
        ...
