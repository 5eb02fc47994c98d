"""The tokens of a simulated device: by request and place in its output, and by nothing else.

What shares the batch, the loop, chunks and retractions cannot change them. A request's numbers are kept by its
row, set when it is prefilled, so a decode step costs a few array operations. Imports: batch, worker.random_bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sgviz.batch.asked_positions import AskedPositions
from sgviz.batch.input_logprobs import InputLogprobs, Pairs
from sgviz.batch.req import Req
from sgviz.errors import ConfigError
from sgviz.worker.random_bits import GOLDEN, mix64, seed_of

Bits = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]
EOS_EVERY = 256  # an answer that may end by itself does so after about so many tokens


class TokenRule:
    """Seeded tokens out of `token_ids`.

    Args:
        token_ids: ids to draw from (none of them ends an answer).
        eos_token_id: sampled once in `EOS_EVERY` tokens by requests without ignore_eos; None: never.
        random_seed: for requests that bring no seed.
    """

    def __init__(self, token_ids: Sequence[int], eos_token_id: int | None, random_seed: int) -> None:
        if not len(token_ids):
            raise ConfigError(
                "a simulated device needs at least one token id to draw from", param="model_path"
            )
        self._ids = np.array(token_ids, dtype=np.int64)
        self._eos = eos_token_id
        self._random_seed = random_seed
        self._seeds: Bits = np.zeros(1, dtype=np.uint64)  # by row, as the three below
        self._prompt: Ints = np.zeros(1, dtype=np.int64)
        self._min_new: Ints = np.zeros(1, dtype=np.int64)
        self._may_end = np.zeros(1, dtype=np.bool_)

    def enter(self, reqs: Sequence[Req]) -> None:
        """Remember the requests of an extend by their rows."""
        self._reserve(max(req.kv.req_pool_idx for req in reqs))
        for req in reqs:
            row, params = req.kv.req_pool_idx, req.sampling_params
            self._seeds[row] = seed_of(params.sampling_seed, req.rid, self._random_seed)
            self._prompt[row] = len(req.origin_input_ids)
            self._min_new[row] = params.min_new_tokens
            self._may_end[row] = not params.ignore_eos and self._eos is not None

    def tokens(self, rows: Ints, seq_lens: Ints) -> list[int]:
        """The token after `seq_lens` positions for the request of each row."""
        bits, index = self._bits(rows, seq_lens)
        chosen = self._ids[bits % np.uint64(len(self._ids))]
        may_end = self._may_end[rows]
        if may_end.any():
            ends = (
                may_end
                & (index >= self._min_new[rows])
                & ((bits >> np.uint64(32)) % np.uint64(EOS_EVERY) == 0)
            )
            chosen[ends] = self._eos
        ids: list[int] = chosen.tolist()
        return ids

    def logprobs(self, rows: Ints, seq_lens: Ints) -> list[float]:
        """Natural logs by the same rule, between -1 and 0."""
        bits, _ = self._bits(rows, seq_lens)
        return [-int(word % np.uint64(1000)) / 1000 for word in bits]

    def input_logprobs(self, row: int, asked: AskedPositions) -> InputLogprobs:
        """The same rule for the prompt tokens behind the positions of a request in `row`."""
        lens = np.arange(asked.position, asked.position + len(asked.next_ids), dtype=np.int64) + 1
        chosen = self.logprobs(np.full(len(lens), row, dtype=np.int64), lens)
        rows = list(zip(asked.next_ids, chosen))
        return InputLogprobs(
            logprobs=chosen,
            tops=[self.neighbours(token, best, asked.tops) for token, best in rows],
            token_ids=[self.token_ids(token, best, asked.token_ids) for token, best in rows],
        )

    def token_ids(self, token: int, best: float, ids: Sequence[int]) -> Pairs:
        """Each of `ids` half a nat less likely for every place it lies behind `token` (round the ids drawn from)."""
        at = int(self._ids.searchsorted(token))
        return [(best - (int(self._ids.searchsorted(each)) - at) % len(self._ids) / 2, each) for each in ids]

    def neighbours(self, token: int, best: float, count: int) -> list[tuple[float, int]]:
        """`count` alternatives to `token`, the token first, each half a nat less likely."""
        at = int(self._ids.searchsorted(token))
        others = [int(self._ids[(at + step) % len(self._ids)]) for step in range(1, count)]
        return [(best - rank / 2, one) for rank, one in enumerate([token, *others][:count])]

    def _bits(self, rows: Ints, seq_lens: Ints) -> tuple[Bits, Ints]:
        index = seq_lens - self._prompt[rows]
        return mix64(mix64(self._seeds[rows]) + index.astype(np.uint64) * GOLDEN), index

    def _reserve(self, row: int) -> None:
        more = row + 1 - len(self._seeds)
        if more > 0:
            more += row
            self._seeds = np.pad(self._seeds, (0, more))
            self._prompt = np.pad(self._prompt, (0, more))
            self._min_new = np.pad(self._min_new, (0, more))
            self._may_end = np.pad(self._may_end, (0, more))
