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
            barred[row, param["ids"]] = 0.0  # no `ids`, or one out of range, ends this request with the error
        return logits + barred.to(logits.device)
