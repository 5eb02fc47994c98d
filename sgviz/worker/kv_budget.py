"""How many tokens of KV a device gets. Mirrors SGLang's memory profiling.

Imports: model.model_config, errors (no torch).
"""

from __future__ import annotations

import os

from sgviz.errors import ConfigError
from sgviz.model.model_config import ModelFacts

BOOK_BYTES = 32  # of the host a token: free lists, marks, and what stands for the KV of a device without one
CPU_KV_BYTES = 1 << 30  # on CPU the pool shares memory with everything else on the machine


def bytes_per_token(facts: ModelFacts, itemsize: int) -> int:
    """KV bytes one token costs in all layers, K and V, at `itemsize` bytes a number."""
    return facts.num_layers * 2 * facts.num_kv_heads * facts.head_dim * itemsize


def kv_tokens(
    *,
    max_total_tokens: int | None,
    page_size: int,
    token_bytes: int,
    budget_bytes: int,
    useful_tokens: int,
    host_bytes: int = 0,
) -> int:
    """Slots of the pool, whole pages.

    Args:
        max_total_tokens: the user's wish; it goes before the budget.
        budget_bytes: memory the pool may take.
        useful_tokens: more than this can never be in use (requests times context).
        host_bytes: what of `token_bytes` lies in the memory of this machine.

    Raises:
        ConfigError: not even one page fits, or the wish is more than this machine's memory.
    """
    if max_total_tokens is not None:
        _check_host(max_total_tokens, BOOK_BYTES + host_bytes)
    tokens = min(budget_bytes // token_bytes, useful_tokens) if max_total_tokens is None else max_total_tokens
    whole = tokens // page_size * page_size
    if whole < page_size:
        raise ConfigError(
            f"the KV pool would hold {tokens} tokens ({token_bytes} bytes each), less than one page of "
            f"{page_size}; give max_total_tokens of at least {page_size} or free some memory",
            param="max_total_tokens",
        )
    return whole


def _check_host(tokens: int, token_bytes: int) -> None:
    """An allocation that is too large may fail at once, or much later when its pages are touched."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if tokens * token_bytes > memory:
        raise ConfigError(
            f"max_total_tokens {tokens} takes {tokens * token_bytes / 1e9:,.0f} GB of this machine's memory "
            f"({token_bytes} bytes a token), which is {memory / 1e9:,.1f} GB; give at most {memory // token_bytes}",
            param="max_total_tokens",
        )


def usable_context(wanted: int | None, has: int) -> int:
    """Positions a request may use: the user's wish, at most the model's. Raises ConfigError above that."""
    if wanted is not None and wanted > has:
        raise ConfigError(f"context_length {wanted} is more than the model's {has}", param="context_length")
    return has if wanted is None else wanted
