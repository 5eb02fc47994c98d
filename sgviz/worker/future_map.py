"""FutureMap: the last sampled token of each row, on the device, before the scheduler knows it.

A decode step takes its input ids from here at the start of the forward, so it can be launched while the step
before it still runs. Mirrors SGLang 0.5's FutureMap (`output_tokens_buf` by row); simplified: sequence
lengths are known to the scheduler and are not relayed. Imports: errors, torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sgviz.errors import SgvizError

UNKNOWN = -1  # a row for which nothing was sampled


class NothingSampled(SgvizError, RuntimeError):
    """A decode was launched for a row without a last token."""


class FutureMap:
    """`output_tokens_buf` [rows + 1] int64. Use it from one stream only.

    Args:
        rows: the highest row number; more are made room for when they come.
    """

    def __init__(self, rows: int = 0, device: torch.device | str = "cpu") -> None:
        self.output_tokens_buf = torch.full((rows + 1,), UNKNOWN, dtype=torch.int64, device=device)

    def __len__(self) -> int:
        """Row numbers that have a place, row 0 included."""
        return len(self.output_tokens_buf)

    def store(self, rows: Tensor, tokens: Tensor) -> None:
        """`tokens[i]` is the last token of `rows[i]`; both [B] int64 on the device."""
        self.output_tokens_buf[rows] = tokens

    def resolve(self, prefill_ids: Tensor, rows: Tensor) -> Tensor:
        """Input ids: `prefill_ids` of the extends, then the last tokens of the decoding `rows`."""
        if not len(rows):
            return prefill_ids
        last = self.output_tokens_buf[rows]
        if last.device.type == "cpu" and bool((last < 0).any()):
            bad = int(rows[last < 0][0])
            raise NothingSampled(f"row {bad} decodes, but nothing was sampled for it since it was free")
        return torch.cat((prefill_ids, last)) if len(prefill_ids) else last

    def reserve(self, rows: int) -> None:
        """Make room for row numbers up to `rows`."""
        have = len(self.output_tokens_buf)
        if rows >= have:
            more = self.output_tokens_buf.new_full((max(rows + 1, 2 * have) - have,), UNKNOWN)
            self.output_tokens_buf = torch.cat((self.output_tokens_buf, more))

    def forget(self, rows: Tensor) -> None:
        """The rows are free: a decode that reads one of them before it was stored again is an error."""
        self.output_tokens_buf[rows] = UNKNOWN
