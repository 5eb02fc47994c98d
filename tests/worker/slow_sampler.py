"""A plain reference of sampling: one row at a time, numpy in float64, full sorts. Slow on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgviz.messages import SamplingParams

Floats = npt.NDArray[np.float64]


@dataclass
class Choice:
    """What the reference chose. `margin`: how far the draw is from choosing another token."""

    token: int
    margin: float
    log_probs: Floats
    kept: list[int]


def edited(logits: Floats, params: SamplingParams, outputs: Sequence[int], eos: Sequence[int]) -> Floats:
    """Penalties, min_new_tokens and logit_bias."""
    row = logits.astype(np.float64).copy()
    for token in set(outputs):
        times = list(outputs).count(token)
        row[token] -= params.frequency_penalty * times + params.presence_penalty
    if len(outputs) < params.min_new_tokens:
        row[[*eos, *(params.stop_token_ids or ())]] = -np.inf
    for token in set(outputs):
        scale = params.repetition_penalty
        row[token] = row[token] / scale if row[token] > 0 else row[token] * scale
    for key, value in (params.logit_bias or {}).items():
        row[int(key)] += value
    return row


def choose(row: Floats, params: SamplingParams, u: float) -> Choice:
    """The token at the edited logits `row` for the number `u`."""
    scaled = row if params.is_greedy else row / params.temperature
    shifted = scaled - scaled.max()
    probs = np.exp(shifted) / np.exp(shifted).sum()
    log_probs = shifted - np.log(np.exp(shifted).sum())
    if params.is_greedy:
        top = np.sort(row)[::-1]
        return Choice(int(row.argmax()), float(top[0] - top[1]), log_probs, [int(row.argmax())])
    unfiltered = params.top_k >= len(row) and params.top_p >= 1 and params.min_p == 0
    order = np.arange(len(row)) if unfiltered else np.argsort(-probs, kind="stable")
    kept: list[int] = []
    mass, margin = 0.0, 1.0
    for rank, token in enumerate(order):
        if not unfiltered:
            edge = probs[order[0]] * params.min_p
            if rank > 0 and probs[token] > 1e-7:  # the best always stays; a lighter one moves no draw
                margin = min(margin, abs(mass - params.top_p) if params.top_p < 1 else 1.0)
                margin = min(margin, abs(probs[token] / edge - 1) if params.min_p > 0 else 1.0)
            if rank >= params.top_k or mass > params.top_p or probs[token] < edge:
                break
        kept.append(int(token))
        mass += probs[token]
    cumulated = np.cumsum(probs[kept])
    target = u * cumulated[-1]
    place = min(int(np.searchsorted(cumulated, target, side="right")), len(kept) - 1)
    margin = min(margin, float(np.abs(cumulated[:-1] - target).min(initial=1.0)))
    return Choice(kept[place], margin, log_probs, kept)
