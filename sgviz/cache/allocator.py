"""PagedTokenAllocator: which KV slots are free. Mirrors SGLang's TokenToKVPoolAllocator and its paged kin.

Works in pages of `page_size` slots; with page size 1 a page is a slot. Page 0 is a dummy that padded
rows may write into, so the usable slots are page_size .. size + page_size - 1. The free list is a stack:
the page freed last is taken first, the lowest of several freed together before the others.
Simplified: frees take effect at once (no free groups), no sorting on demand. Imports: numpy, cache.errors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sgviz.cache.errors import CacheMisuse, InvalidFree
from sgviz.cache.req_kv import Slots
from sgviz.errors import ConfigError

Lengths = Sequence[int] | npt.NDArray[np.int64] | npt.NDArray[np.int32]  # one entry a request


class PagedTokenAllocator:
    """Free pages and who takes them.

    Args:
        size: usable slots (tokens), a multiple of `page_size`.
        page_size: slots of a page.

    Attributes:
        size: the usable slots, less those that were retired. pages: all there ever were, retired ones included.
    """

    def __init__(self, size: int, page_size: int) -> None:
        if page_size < 1:
            raise ConfigError(f"page_size {page_size} is not allowed; it must be at least 1")
        if size < page_size or size % page_size:
            raise ConfigError(f"a pool of {size} tokens is not a whole number of pages of {page_size}")
        self.size = size
        self.page_size = page_size
        self.pages = size // page_size
        self._free: Slots = np.arange(self.pages, 0, -1, dtype=np.int64)
        self._n_free = self.pages
        self._taken: npt.NDArray[np.bool_] = np.zeros(self.pages + 1, dtype=np.bool_)
        self._retired: list[Slots] = []

    def available_size(self) -> int:
        """Free tokens; always whole pages."""
        return self._n_free * self.page_size

    def free_pages(self) -> Slots:
        """Numbers of the free pages, the next one to be taken first (a copy)."""
        return self._free[: self._n_free][::-1].copy()

    def retire(self, tokens: int) -> Slots:
        """Take up to `tokens` free slots, in whole pages, out of the pool for good; returns them."""
        pages = self._take(min(tokens // self.page_size, self._n_free))
        self._retired.append(pages)
        self.size -= len(pages) * self.page_size
        return (pages[:, None] * self.page_size + np.arange(self.page_size)).ravel()

    def retired_pages(self) -> Slots:
        """Numbers of the pages that are no longer of the pool."""
        return np.concatenate([np.empty(0, dtype=np.int64), *self._retired])

    def pages_needed(self, prefix_lens: Lengths, seq_lens: Lengths) -> int:
        """New pages that growing each request from its prefix length to its sequence length takes."""
        prefix, seq = _lengths(prefix_lens, seq_lens)
        page = self.page_size
        if page == 1:
            return int(seq.sum() - prefix.sum())
        return int(((seq + (page - 1)) // page - (prefix + (page - 1)) // page).sum())

    def alloc_extend(self, prefix_lens: Lengths, seq_lens: Lengths, last_locs: Lengths) -> Slots | None:
        """Slots for positions [prefix, seq) of every request, request after request.

        A partly used last page is filled first, then come whole pages, then a new tail page. All or nothing.

        Args:
            prefix_lens: [n] tokens each request has already.
            seq_lens: [n] tokens it has afterwards, at least as many.
            last_locs: [n] slot of its last token; read only where the last page is partly used.

        Returns:
            int64 [sum(seq - prefix)], or None when the free pages do not suffice.
        """
        prefix, seq = _lengths(prefix_lens, seq_lens)
        new_pages = self.pages_needed(prefix, seq)
        if new_pages > self._n_free:
            return None
        pages = self._take(new_pages)
        if self.page_size == 1:
            return pages
        last = np.asarray(last_locs, dtype=np.int64)
        if ((seq - prefix) == 1).all():
            return self._one_each(prefix, last, pages)
        return self._several_each(prefix, seq, last, pages)

    def free(self, slots: Slots) -> None:
        """The pages that these slots lie in come back; naming some slots of a page gives back all of it.

        Raises:
            InvalidFree: a slot is foreign, named twice, or its page is free already.
        """
        if not len(slots):
            return
        unique = np.unique(np.asarray(slots, dtype=np.int64))
        self._refuse_invalid(slots, unique)
        pages = unique if self.page_size == 1 else np.unique(unique // self.page_size)
        self._taken[pages] = False
        end = self._n_free + len(pages)
        self._free[self._n_free : end] = pages[::-1]
        self._n_free = end

    def _take(self, count: int) -> Slots:
        start = self._n_free - count
        pages = self._free[start : self._n_free][::-1].copy()
        self._n_free = start
        self._taken[pages] = True
        return pages

    def _one_each(self, prefix: Slots, last: Slots, pages: Slots) -> Slots:
        """The decode step: the slot after the last one, or the first of a new page."""
        slots: Slots = last + 1
        slots[prefix % self.page_size == 0] = pages * self.page_size
        return slots

    def _several_each(self, prefix: Slots, seq: Slots, last: Slots, pages: Slots) -> Slots:
        page = self.page_size
        extend = seq - prefix
        first_new = (prefix + (page - 1)) // page  # index in the request of its first new page
        new_pages = (seq + (page - 1)) // page - first_new
        pages_before = np.cumsum(new_pages) - new_pages
        tokens_before = np.cumsum(extend) - extend
        position = np.arange(int(extend.sum())) + np.repeat(prefix - tokens_before, extend)
        which = position // page + np.repeat(pages_before - first_new, extend)
        in_last = position < np.repeat(first_new * page, extend)
        slots: Slots = position + np.repeat(last + 1 - prefix, extend)
        fresh = ~in_last
        slots[fresh] = pages[which[fresh]] * page + position[fresh] % page
        return slots

    def _refuse_invalid(self, slots: Slots, unique: Slots) -> None:
        page, first, last = self.page_size, self.page_size, (self.pages + 1) * self.page_size - 1
        if unique[0] < first or unique[-1] > last:
            bad = unique[0] if unique[0] < first else unique[-1]
            raise InvalidFree(f"slot {bad} is not of this pool; its slots are {first} to {last}")
        free_already = ~self._taken[unique // page]
        if free_already.any():
            raise InvalidFree(f"slot {unique[free_already][0]} is free already (freed twice, or never taken)")
        if len(unique) != len(slots):
            _, counts = np.unique(slots, return_counts=True)
            raise InvalidFree(f"slot {unique[counts > 1][0]} is named twice in one free")


def _lengths(prefix_lens: Lengths, seq_lens: Lengths) -> tuple[Slots, Slots]:
    prefix = np.asarray(prefix_lens, dtype=np.int64)
    seq = np.asarray(seq_lens, dtype=np.int64)
    if prefix.shape != seq.shape:
        raise CacheMisuse(f"{prefix.size} prefix lengths do not go with {seq.size} sequence lengths")
    if (seq < prefix).any():
        at = int((seq < prefix).argmax())
        raise CacheMisuse(f"request {at} of the batch would shrink from {prefix[at]} to {seq[at]} tokens")
    return prefix, seq
