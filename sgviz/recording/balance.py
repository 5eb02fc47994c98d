"""How evenly the requests were spread over the ranks, and the memory of all of them together.

SGLang has no such figures. Imports: recording, pandas.
"""

from __future__ import annotations

import pandas as pd

from sgviz.recording.recording import Recording

KV_STATES = ("free", "evictable", "protected", "private", "total")


def rank_loads(rec: Recording) -> pd.DataFrame:
    """One row a rank: `requests`, `prompt_tokens`, `output_tokens`; a rank that got nothing has zeros."""
    requests = rec.requests.dropna(subset=["dp_rank"])
    grouped = requests.groupby("dp_rank")
    table = pd.DataFrame({
        "requests": grouped.size(),
        "prompt_tokens": grouped.prompt_tokens.sum(),
        "output_tokens": grouped.completion_tokens.sum(),
    })  # fmt: skip
    table.index = table.index.astype(int)
    return table.reindex(list(rec.ranks), fill_value=0).astype(int).rename_axis("dp_rank").reset_index()


def imbalance(rec: Recording) -> float:
    """Prompt tokens of the rank that got most, in units of the mean; 1: all got the same (or nothing)."""
    tokens = rank_loads(rec).prompt_tokens
    return float(tokens.max() / tokens.mean()) if tokens.sum() else 1.0


def summed_kv(rec: Recording) -> pd.DataFrame:
    """`rec.kv` of all ranks together: the sums over them after each event that moved tokens on one."""
    table = rec.kv
    if len(rec.ranks) == 1 or table.empty:
        return table
    sums = dict.fromkeys(KV_STATES, 0)
    for rank in rec.ranks:
        own = table.dp_rank == rank
        filled = table[list(KV_STATES)].where(own).ffill()
        size = int(table.total[own].max()) if own.any() else 0
        empty = {
            state: size if state in ("free", "total") else 0 for state in KV_STATES
        }  # before its first event
        sums = {state: sums[state] + filled[state].fillna(empty[state]).astype(int) for state in KV_STATES}
    return table.assign(**sums, dp_rank=pd.NA)
