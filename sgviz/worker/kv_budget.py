"""How many tokens of KV a device gets. Mirrors SGLang's memory profiling.

Imports: model.model_config, errors (no torch).
"""

from __future__ import annotations

from sgviz.errors import ConfigError
from sgviz.model.model_config import ModelFacts

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
) -> int:
    """Slots of the pool, whole pages.

    Args:
        max_total_tokens: the user's wish; it goes before the budget.
        budget_bytes: memory the pool may take.
        useful_tokens: more than this can never be in use (requests times context).

    Raises:
        ConfigError: not even one page fits.
    """
    tokens = min(budget_bytes // token_bytes, useful_tokens) if max_total_tokens is None else max_total_tokens
    whole = tokens // page_size * page_size
    if whole < page_size:
        raise ConfigError(
            f"the KV pool would hold {tokens} tokens ({token_bytes} bytes each), less than one page of "
            f"{page_size}; give max_total_tokens of at least {page_size} or free some memory",
            param="max_total_tokens",
        )
    return whole


def usable_context(wanted: int | None, has: int) -> int:
    """Positions a request may use: the user's wish, at most the model's. Raises ConfigError above that."""
    if wanted is not None and wanted > has:
        raise ConfigError(f"context_length {wanted} is more than the model's {has}", param="context_length")
    return has if wanted is None else wanted
