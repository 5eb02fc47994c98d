"""DecodeGraph: a whole decode step as one traced graph, for float32 on a CPU.

From the last sampled token of each row to the next one in a single call, so Python's interpreter lock is taken
twice a step and not at each of a thousand operators: beside a busy scheduler thread that decides everything.
One trace serves every number of rows and every length. The role of SGLang's CUDA graphs; torch.jit is ageing, so
nothing outside `_trace` knows of it. Imports: model.decoder, forward_batch,
kv_pool, torch_jit, torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from sgviz.model import torch_jit
from sgviz.model.attention import MAX_PADDED_CELLS, WASTE_LIMIT
from sgviz.model.decoder import CausalLM
from sgviz.model.forward_batch import ForwardBatch
from sgviz.model.kv_pool import MHATokenToKVPool

PAD_POSITIONS = (
    16  # lengths are rounded up to this, so vector kernels add in one order whatever the length is
)
WARM_UP_CALLS = 3  # the executor of torch.jit settles on a plan within these


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """What a step needs beside the tokens, as tensors on the CPU.

    Attributes:
        rows: [B] int64 places of the last tokens.
        positions: [B] int64. out_cache_loc: [B] int64 slots to write.
        slot_table: [B, S] int64, S a multiple of the page size and of PAD_POSITIONS; 0 beyond the length.
        columns: [S] int64, 0 to S - 1. bag_starts: [B * heads] int32, S apart.
    """

    rows: Tensor
    positions: Tensor
    out_cache_loc: Tensor
    slot_table: Tensor
    columns: Tensor
    bag_starts: Tensor


@dataclass(slots=True, eq=False)
class DecodeOutput:
    """What a step gave.

    Attributes:
        tokens: [B] int64, the argmax of each row.
        logits: [B, vocab] float32.
        unknown: some row had no last token, so nothing here means anything.
        nan: some row's logits hold a NaN.
    """

    tokens: Tensor
    logits: Tensor
    unknown: bool
    nan: bool


class DecodeGraph:
    """Traces `model` over `kv_pool` at construction; `run` it from one thread at a time."""

    def __init__(self, model: CausalLM, kv_pool: MHATokenToKVPool) -> None:
        self._heads = model.config.facts.num_heads
        self._kv_pool = kv_pool
        self._pool = tuple(kv_pool.layers)
        self._step = PAD_POSITIONS * kv_pool.page_size // np.gcd(PAD_POSITIONS, kv_pool.page_size)
        self._keys = torch.empty(0)
        self._call = self._trace(model)

    def prepare(self, batch: ForwardBatch, rows: Tensor) -> DecodeInputs | None:
        """The inputs for `batch`, or None if padding its lengths would cost too much in one piece."""
        longest = max(batch.seq_lens)
        if longest * len(batch) > min(MAX_PADDED_CELLS, WASTE_LIMIT * sum(batch.seq_lens)):
            return None
        return self._inputs(rows, batch.positions, batch.out_cache_loc, batch.slot_table[:, :longest])

    def run(self, last_tokens: Tensor, inputs: DecodeInputs) -> DecodeOutput:
        """One step. Writes KV, and the argmax of each row to its place in `last_tokens` [places] int64.

        A row without a last token (a negative one) stays without.
        """
        cells = inputs.slot_table.numel() * self._kv_pool.num_kv_heads * self._kv_pool.head_dim
        if len(self._keys) < cells:
            self._keys = torch.empty(cells + cells // 2)
        tokens, flags, logits = self._call(last_tokens, inputs, self._keys)
        unknown, nan = flags.tolist()
        return DecodeOutput(tokens, logits, unknown, nan)

    def let_go(self) -> None:
        """Hold no memory of the pool's any more; nothing runs afterwards. What torch.jit made lies in rings."""
        self._held.kept = []

    def _inputs(self, rows: Tensor, positions: Tensor, locations: Tensor, table: Tensor) -> DecodeInputs:
        # numpy, as this runs beside the stream: torch would start a second team of threads for a large table
        size, length = table.shape
        padded = -(-length // self._step) * self._step
        slots = np.zeros((size, padded), dtype=np.int64)
        slots[:, :length] = table.numpy()
        # What lies beyond a row's end may be any slot, but one that is being written could hold anything.
        slots[np.arange(padded) > positions.numpy()[:, None]] = 0
        starts = torch.arange(0, size * self._heads * padded, padded, dtype=torch.int32)
        columns = torch.arange(padded)
        return DecodeInputs(rows, positions, locations, torch.from_numpy(slots), columns, starts)

    @torch.inference_mode()
    def _trace(
        self, model: CausalLM
    ) -> Callable[[Tensor, DecodeInputs, Tensor], tuple[Tensor, Tensor, Tensor]]:
        """The step as a function of tensors only. The only place that knows torch.jit."""
        module, pool = _DecodeStep(model, self._kv_pool), self._pool
        # Three rows in slot 0, which nobody owns: sizes of 1 could be taken for sizes that never change.
        table = torch.zeros((3, 2 * self._step), dtype=torch.int64)
        last, zero = torch.zeros(4, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
        sample = self._inputs(torch.arange(1, 4), zero, zero, table)
        keys = torch.empty(table.numel() * self._kv_pool.num_kv_heads * self._kv_pool.head_dim)

        def arguments(last: Tensor, inputs: DecodeInputs, keys: Tensor) -> tuple[object, ...]:
            return (
                last,
                inputs.rows,
                inputs.positions,
                inputs.out_cache_loc,
                inputs.slot_table,
                inputs.columns,
                inputs.bag_starts,
                keys,
                pool,
            )

        traced, held = torch_jit.trace(module, arguments(last, sample, keys)), torch_jit.script(_Held())
        traced.eval()
        module.let_go()
        self._held = held

        @torch.inference_mode()
        def call(last: Tensor, inputs: DecodeInputs, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            given = arguments(last, inputs, keys)
            held.kept = [each for each in given if isinstance(each, Tensor)] + list(pool)
            tokens, flags, logits = traced(*given)
            return tokens, flags, logits

        for _ in range(WARM_UP_CALLS):
            call(last, sample, keys)
        return call


class _Held(nn.Module):
    """Owns a step's inputs beside Python, on torch's side, until the next step.

    A tensor that only Python owns any more asks for the interpreter's lock: without this each input would, in the
    middle of the step, at its last use.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.jit.Attribute([], list[Tensor])

    def forward(self) -> int:
        return len(self.kept)


class _DecodeStep(nn.Module):
    """The step as it is traced: tensors only, and no size that Python sees."""

    def __init__(self, model: CausalLM, kv_pool: MHATokenToKVPool) -> None:
        super().__init__()
        self.model = model
        self._kv_pool = kv_pool

    def let_go(self) -> None:
        """Once traced it is needed no more, and torch.jit leaves it in a ring with all that it holds."""
        del self.model, self._kv_pool

    def forward(
        self,
        last_tokens: Tensor,
        rows: Tensor,
        positions: Tensor,
        out_cache_loc: Tensor,
        slot_table: Tensor,
        columns: Tensor,
        bag_starts: Tensor,
        keys: Tensor,
        pool: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, two flags (a row without a last token, a NaN), logits."""
        ids = last_tokens.index_select(0, rows)
        attention = _PaddedAttention(
            self._kv_pool, pool, self.model.config.facts.num_heads, out_cache_loc, slot_table, keys
        )
        attention.mask(positions, columns, bag_starts)
        hidden = self.model.hidden(ids.clamp_min(0), positions, attention)
        logits = self.model.logits(hidden)
        best, tokens = logits.max(-1)
        unknown = ids < 0
        last_tokens.index_copy_(0, rows, torch.where(unknown, ids, tokens))
        return tokens, torch.stack((unknown.any(), best.isnan().any())), logits


class _PaddedAttention:
    """AttentionBackend of one new position a row: rows padded to one length, KV heads as bags of values.

    Keys are gathered into `keys` for one bmm; values stay where they are: an embedding bag adds up the
    pool's rows by the weights, which saves gathering them.
    """

    def __init__(
        self,
        kv_pool: MHATokenToKVPool,
        pool: tuple[Tensor, ...],
        heads: int,
        out_cache_loc: Tensor,
        slot_table: Tensor,
        keys: Tensor,
    ) -> None:
        self._pool, self._locations = pool, out_cache_loc
        self._kv_heads, self._group = kv_pool.num_kv_heads, heads // kv_pool.num_kv_heads
        self._dim, page = kv_pool.head_dim, kv_pool.page_size
        self._page_size, self._num_slots = page, kv_pool.num_slots
        head = torch.arange(self._kv_heads)
        pages = torch.div(slot_table[:, ::page], page, rounding_mode="floor") if page > 1 else slot_table
        # [B, KV heads, pages] -> flat: what is gathered is at once the batch of a bmm.
        self._key_index = (pages[:, None] + (head * kv_pool.num_pages)[:, None]).flatten()
        slots = (slot_table[:, None] + (head * kv_pool.num_slots)[:, None]).to(torch.int32)
        self._value_index = slots[:, :, None].expand(-1, -1, self._group, -1).flatten()
        self._keys = keys.narrow(0, 0, self._key_index.shape[0] * page * self._dim)
        self._keys = self._keys.view(-1, page * self._dim)
        self._bias = keys
        self._bag_starts = keys

    def mask(self, positions: Tensor, columns: Tensor, bag_starts: Tensor) -> None:
        """What lies beyond a row's position gets no weight."""
        beyond = columns > positions[:, None]
        bias = torch.zeros_like(beyond, dtype=torch.float32).masked_fill_(beyond, -torch.inf)
        bias = bias[:, None, None].expand(-1, self._kv_heads, self._group, -1)
        self._bias, self._bag_starts = bias.flatten(0, 1), bag_starts

    def prepare(self, batch: ForwardBatch) -> None:
        """All is known at construction."""

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, heads, head_dim], k and v [B, KV heads, head_dim] -> [B, heads * head_dim]."""
        kv = self._pool[layer]
        kv[0].index_copy_(1, self._locations, k.transpose(0, 1))
        kv[1].index_copy_(1, self._locations, v.transpose(0, 1))
        torch.index_select(kv[0].view(-1, self._page_size * self._dim), 0, self._key_index, out=self._keys)
        keys = self._keys.view(self._bias.shape[0], -1, self._dim)
        queries = q.reshape(-1, self._group, self._dim)
        scores = torch.baddbmm(self._bias, queries, keys.transpose(1, 2), alpha=self._dim**-0.5)
        weights = torch.softmax(scores, -1).flatten()
        out: Tensor = torch.ops.aten._embedding_bag_forward_only(
            kv[1].view(-1, self._dim), self._value_index, self._bag_starts, False, 0, False, weights
        )[0]
        return out.view(q.shape[0], -1)
