"""The mock device's log-probabilities: by rule from the hash of the history it read.

What comes has one between -1 and 0, and each id behind it (round the vocabulary) has 0.5 less.
Imports: batch, worker.random_bits (no torch).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sgviz.batch.asked_positions import AskedPositions
from sgviz.batch.input_logprobs import InputLogprobs, Pairs
from sgviz.worker.random_bits import Bits

MOCK_TOP_LOGPROB_STEP = 0.5


def logprobs(bits: Bits) -> list[float]:
    """[n] hashes -> of what comes next."""
    return [-float(word % np.uint64(1000)) / 1000 for word in bits]


def behind(token: int, best: float, ids: Sequence[int], vocab_size: int) -> Pairs:
    """Of each of `ids`, where `token` comes and has `best`."""
    return [(best - (each - token) % vocab_size * MOCK_TOP_LOGPROB_STEP, each) for each in ids]


def likeliest(token: int, best: float, count: int, vocab_size: int) -> Pairs:
    """The first `count`, `token` at their head."""
    return behind(token, best, [(token + rank) % vocab_size for rank in range(count)], vocab_size)


def input_logprobs(asked: AskedPositions, bits: Bits, vocab_size: int) -> InputLogprobs:
    """Of the prompt tokens behind n positions, from the hashes [n] of what the KV holds up to each."""
    chosen = logprobs(bits)
    rows = list(zip(asked.next_ids, chosen, strict=True))
    return InputLogprobs(
        logprobs=chosen,
        tops=[likeliest(token, best, asked.tops, vocab_size) for token, best in rows],
        token_ids=[behind(token, best, asked.token_ids, vocab_size) for token, best in rows],
    )
