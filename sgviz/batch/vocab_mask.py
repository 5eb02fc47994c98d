"""VocabMask: which tokens may come next, between the grammars of the requests and the sampler.

A mask is filled in the scheduler's thread when a batch is sampled, never before: only then every token that the
grammar must know has been accepted. Mirrors the `vocab_mask` of SGLang's SamplingBatchInfo; rows without a grammar
have no entry here. Imports: batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgviz.batch.req import Req
from sgviz.batch.schedule_batch import ScheduleBatch

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.int32]
WORD_BITS = 32
Constrained = Sequence[tuple[int, Req]]


@dataclass(frozen=True, slots=True)
class VocabMask:
    """The tokens that the members under a grammar may have next; nobody else is in it.

    Attributes:
        members: [n] their places in the batch, ascending.
        words: [n, ceil(vocab / 32)] int32; bit i of word w is set where token 32 w + i may come.
    """

    members: Ints
    words: Words

    def allowed(self, vocab_size: int) -> npt.NDArray[np.bool_]:
        """[n, vocab] the same, a byte a token."""
        bits = np.unpackbits(self.words.view(np.uint8), axis=1, bitorder="little")
        return bits[:, :vocab_size].view(np.bool_)

    def corrected(self, tokens: list[int], vocab_size: int) -> list[int]:
        """The tokens that devices without logits choose: one that may not come gives way to the next id that may."""
        chosen = list(tokens)
        for member, allowed in zip(self.members.tolist(), self.allowed(vocab_size)):
            ids = np.flatnonzero(allowed)
            if len(ids):
                chosen[member] = int(ids[np.searchsorted(ids, chosen[member]) % len(ids)])
        return chosen


def constrained_members(batch: ScheduleBatch) -> Constrained:
    """Who in the batch is under a grammar, by place; a prompt that goes on gets no token yet."""
    return [
        (place, req)
        for place, req in enumerate(batch.reqs)
        if req.grammar is not None and req is not batch.chunked_req
    ]


def fill_vocab_mask(members: Constrained, vocab_size: int, eos_token_ids: Iterable[int]) -> VocabMask | None:
    """The mask of this step; None if all of `members` have ended meanwhile.

    Where more than the end may come, `min_new_tokens` keeps the end away here; where only the end may come, it ends.
    """
    going = [(place, req) for place, req in members if not req.finished]
    if not going:
        return None
    words = np.zeros((len(going), -(-vocab_size // WORD_BITS)), dtype=np.int32)
    for row, (_, req) in zip(words, going):
        assert req.grammar is not None
        req.grammar.fill(row)
        params = req.sampling_params
        if len(req.output_ids) < params.min_new_tokens:
            _bar(row, {*eos_token_ids, *(params.stop_token_ids or ())})
    return VocabMask(np.array([place for place, _ in going], dtype=np.int64), words)


def _bar(row: Words, ids: Iterable[int]) -> None:
    """Take `ids` out, unless nothing would be left."""
    rest = row.copy()
    bits = rest.view(np.uint8)
    for token in sorted(ids):
        if token >> 3 < len(bits):
            bits[token >> 3] &= 0xFF ^ (1 << (token & 7))
    if rest.any():
        row[:] = rest
