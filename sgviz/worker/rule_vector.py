"""Vectors of devices that compute nothing: by rule, from 64 bits that stand for the prompt.

The same prompt has the same vector of length 1, whatever shares the batch, and different prompts have vectors that
are as good as orthogonal; nothing more is meant by them. Imports: messages.embedding, worker.random_bits, numpy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from sgviz.messages.embedding import pack_vector
from sgviz.worker.random_bits import uniforms


def rule_vector(bits: int, dim: int, dimensions: int | None = None) -> bytes:
    """`dim` numbers between -1 and 1 drawn for `bits`, cut to `dimensions`, made length 1; float32 as bytes."""
    seeds = np.full(dim, bits, dtype=np.uint64)
    drawn = (uniforms(seeds, np.arange(dim, dtype=np.int64)) * 2 - 1)[:dimensions]
    return pack_vector(drawn / np.linalg.norm(drawn))


def bits_of_ids(ids: Sequence[int]) -> int:
    """64 bits for a prompt."""
    digest = hashlib.blake2b(np.asarray(ids, dtype="<i8").tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
