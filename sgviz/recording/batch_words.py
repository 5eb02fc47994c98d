"""Batches in words, for explanations. Imports: recording."""

from __future__ import annotations

from collections.abc import Sequence

from sgviz.recording.explanation import counted
from sgviz.recording.fold import BatchState
from sgviz.recording.requests import RequestState

NAMED = 5  # requests named in a detail; the rest is counted


def of_prompt(life: RequestState, end: int) -> str:
    """How much of the prompt tokens up to `end` are."""
    total = life.prompt_tokens or 0
    return f" of {total}" if end <= total else f" ({total} of the prompt)"


def batch_words(batch: BatchState) -> str:
    """Its number, mode and members."""
    plan = batch.plan
    return f"batch #{plan.bid}, {plan.mode}, {counted(len(plan.rids), 'request')}: {named(plan.rids)}"


def others_words(batch: BatchState) -> tuple[tuple[str, ...], str]:
    """Who runs in a batch of others, those with a prompt first, and what."""
    plan = batch.plan
    if plan.mode == "decode":
        return plan.rids, f"without it: {batch_words(batch)}"
    prompts = tuple(rid for rid, extend in zip(plan.rids, plan.extend_lens) if extend > 1) or plan.rids
    tokens = sum(plan.extend_lens)
    return (
        prompts,
        f"batch #{plan.bid} computes prompts ({counted(tokens, 'new token')}) of {named(prompts)}",
    )


def named(rids: Sequence[str]) -> str:
    """The first few by name."""
    rest = len(rids) - NAMED
    return ", ".join(rids[:NAMED]) + (f" and {rest} more" if rest > 0 else "")
