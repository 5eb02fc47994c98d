"""Random numbers without a generator: the same (seed, index) gives the same number, always and anywhere.

Sampling draws one number a token by hashing the request's seed and the token's place in its output, so what
shares the batch, the loop, chunking or a retraction cannot change it. Mirrors the purpose of SGLang's
deterministic sampling (one uniform and inverse CDF here, Gumbel noise by column there). The hash is
splitmix64's finalizer. Imports: numpy.
"""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint64]
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_MASK64 = (1 << 64) - 1


def mix64(words: Bits) -> Bits:
    """Scramble 64-bit words; a bijection, so different words stay different."""
    mixed = words + GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _M1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _M2
    return mixed ^ (mixed >> np.uint64(31))


def seed_of(seed: int | None, rid: str, random_seed: int) -> int:
    """64 bits for a request: its own seed, or one from its rid and the worker's seed, so a replay agrees."""
    if seed is not None:
        return seed & _MASK64
    return (zlib.crc32(rid.encode()) | random_seed << 32) & _MASK64


def uniforms(seeds: Bits, index: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """[N] numbers in (0, 1), one for each (seed, index); 52 bits and never 0 or 1."""
    words = mix64(mix64(seeds) + index.astype(np.uint64) * GOLDEN)
    return ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
