"""MHATokenToKVPool: the K and V tensors behind the slots. Mirrors SGLang's pool of that name.

Layout of a layer: [K and V, KV heads, slots, head_dim], all layers in one block. Heads lie outside of slots, so what is
gathered for many requests is at once the batch of a bmm, without a copy; and the slots of a page are
contiguous, so a page is gathered as one piece.
Imports: torch.
"""

from __future__ import annotations

import torch
from torch import Tensor


class MHATokenToKVPool:
    """KV of `size` tokens in slots page_size .. size + page_size - 1; lower slots are a dummy write target.

    `layers` are views of `block`, so that one copy can take all of them.

    Args:
        size: usable slots. page_size: slots that are handed out and gathered together.
        dtype: of the stored values, that of the model.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        size: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.size = size
        self.page_size = page_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.device = torch.device(device)
        self.num_pages = -(-size // page_size) + 1
        self.num_slots = self.num_pages * page_size
        shape = (num_layers, 2, num_kv_heads, self.num_slots, head_dim)
        # Zeros: a masked cell still takes part in a product, where a stray NaN would spread.
        self.block = torch.zeros(shape, dtype=dtype, device=device)
        self.layers = [self.block[layer] for layer in range(num_layers)]
        self._pages = [kv.view(2 * num_kv_heads * self.num_pages, page_size * head_dim) for kv in self.layers]
        self._head_offsets = torch.arange(2 * num_kv_heads, device=device)[:, None] * self.num_pages

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of one token, all layers."""
        return len(self.layers) * 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v, [T, KV heads, head_dim] each, at `slots` [T]."""
        kv = self.layers[layer]
        kv[0].index_copy_(1, slots, k.transpose(0, 1))
        kv[1].index_copy_(1, slots, v.transpose(0, 1))

    def wash(self, slots: Tensor) -> None:
        """Put zeros where `slots` [T] hold NaN or infinity."""
        for kv in self.layers:
            kv[:, :, slots] = kv[:, :, slots].nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def gather_index(self, slot_table: Tensor) -> Tensor:
        """What `gather` needs to read the positions of `slot_table` [b, s]; the same for every layer.

        Where page_size > 1 a request's positions fill its pages in order, so the first slot of each
        page stands for all of it.
        """
        pages = slot_table[:, :: self.page_size] // self.page_size
        return (self._head_offsets + pages.reshape(1, -1)).reshape(-1)

    def gather(self, layer: int, index: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """K and V of `rows` requests, [KV heads * rows, s, head_dim] each, s rounded up to whole pages."""
        flat = self._pages[layer].index_select(0, index)
        kv = flat.view(2, self.num_kv_heads * rows, -1, self.head_dim)
        return kv[0], kv[1]
