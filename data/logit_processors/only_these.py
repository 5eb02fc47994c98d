"""A logit processor: the answer is made of the token ids in `custom_params["ids"]` and of nothing else.

sgviz serve --custom-logit-processors only_these=data/logit_processors/only_these.py:OnlyThese

{"text": "Yes or no?", "custom_logit_processor": "only_these", "custom_params": {"ids": [11, 12]}}
"""

from __future__ import annotations

from typing import Any

import torch


class OnlyThese:
    """Bars every other id, by a logit of minus infinity."""

    def __call__(self, logits: torch.Tensor, params: list[dict[str, Any]]) -> torch.Tensor:
        barred = torch.full(logits.shape, -torch.inf)  # [rows, vocab], on the CPU, where indices are checked
        for row, param in enumerate(params):
            barred[row, _ids(param, logits.shape[1])] = 0.0
        return logits + barred.to(logits.device)


def _ids(param: dict[str, Any], vocab: int) -> list[int]:
    """A ValueError is answered with status 400 and its text; any other error is the processor's own: 500."""
    ids = param.get("ids")
    if not isinstance(ids, list) or not ids:
        raise ValueError(f"ids must be a list of token ids, got {ids!r}")
    bad = next((each for each in ids if type(each) is not int or not 0 <= each < vocab), None)
    if bad is not None:
        raise ValueError(f"ids must be integers from 0 to {vocab - 1}, got {bad!r}")
    return ids
