"""transformers as the reference: is this the greedy continuation, and where may it differ?

A sequence is greedy if every token is the argmax of the reference's logits behind the same prefix; by
induction that is what the reference itself would have generated. A token that is not the argmax is
excused only where the reference's own two best logits are closer than `NEAR_TIE`; the comparison ends
there, since both continuations are right. Everything compared and excused is counted and told.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

NEAR_TIE = 1e-3
Ids = list[int]


class Reference:
    """A model in transformers, float32, eager.

    Attributes:
        compared: tokens of ours that were compared. excused: near ties at which a comparison ended.
    """

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.excused = 0
        self.compared = 0

    def check_greedy(self, prompt: Ids, output: Ids) -> None:
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

    def check_same(self, prompts: Sequence[Ids], plain: Sequence[Ids], other: Sequence[Ids]) -> None:
        """Fail unless two runs gave the same ids, or part at a near tie of the reference."""
        for prompt, a, b in zip(prompts, plain, other, strict=True):
            at = first_difference(a, b)
            if at is None:
                self.compared += len(a)
                continue
            assert at < len(a) and at < len(b), f"one output is a beginning of the other: {len(a)}, {len(b)}"
            self.check_greedy(prompt, a[: at + 1])
            self.check_greedy(prompt, b[: at + 1])

    def generate(self, prompt: Ids, tokens: int) -> Ids:
        """The reference's own generation, as a check of the check."""
        with torch.inference_mode():
            out = self.model.generate(
                torch.tensor([prompt]),
                do_sample=False,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                pad_token_id=0,
            )
        return out[0, len(prompt) :].tolist()

    @contextmanager
    def telling(self, name: str, capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
        """Say at the end what was compared and excused in between, in the test's output."""
        compared, excused = self.compared, self.excused
        yield
        compared, excused = self.compared - compared, self.excused - excused
        assert compared > 0, f"{name}: nothing was compared"
        with capsys.disabled():
            print(f"\n  {name}: {compared} tokens compared, {excused} near ties excused", end="")


def first_difference(a: Ids, b: Ids) -> int | None:
    """The first position at which two outputs differ, None if they are equal."""
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
