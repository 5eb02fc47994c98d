"""transformers as the reference: is this the greedy continuation, and where may it differ?

A sequence is greedy if every token is the argmax of the reference's logits behind the same prefix; by
induction that is what the reference itself would have generated. A token that is not the argmax is
excused only where the reference's own two best logits are closer than `NEAR_TIE`; the comparison ends
there, since both continuations are right.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

NEAR_TIE = 1e-3


class Reference:
    """A model in transformers, float32, eager."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.excused = 0
        self.compared = 0

    def check_greedy(self, prompt: list[int], output: list[int]) -> None:
        """Fail if `output` is not the greedy continuation of `prompt`."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :].float()
        best, ids = logits.topk(2, dim=-1)
        for position, token in enumerate(output):
            self.compared += 1
            if token == int(ids[position, 0]):
                continue
            gap = float(best[position, 0] - best[position, 1])
            assert gap < NEAR_TIE and token == int(ids[position, 1]), (
                f"position {position}: token {token}, reference {ids[position].tolist()} with a gap of {gap:.2e}"
            )
            self.excused += 1
            return

    def generate(self, prompt: list[int], tokens: int) -> list[int]:
        """The reference's own generation, as a check of the check."""
        with torch.inference_mode():
            out = self.model.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0
            )
        return out[0, len(prompt) :].tolist()

    def report(self, name: str) -> str:
        return f"{name}: {self.compared} tokens compared with transformers, {self.excused} near ties excused"


def first_difference(a: list[int], b: list[int]) -> int | None:
    """The first position at which two outputs differ, None if they are equal."""
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def same_or_near_tie(reference: Reference, prompt: list[int], a: list[int], b: list[int]) -> None:
    """Two runs gave the same ids, or they part at a near tie of the reference."""
    at = first_difference(a, b)
    if at is None:
        return
    assert at < len(a) and at < len(b), f"one output is a beginning of the other: {len(a)} and {len(b)} tokens"
    reference.check_greedy(prompt, a[: at + 1])
    reference.check_greedy(prompt, b[: at + 1])
