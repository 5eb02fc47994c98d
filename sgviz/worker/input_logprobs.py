"""Log-probabilities of prompt tokens, from the hidden states of a forward. Mirrors the input half of SGLang's
LogitsProcessor.

Only the rows that somebody asked for get logits, and of these at most `PIECE_CELLS` numbers exist at a time, however
long the prompt and large the vocabulary. They are the model's own: no temperature, no penalties.
Imports: batch, worker.sampler, torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sgviz.batch.asked_positions import AskedPositions
from sgviz.worker.input_part import InputPart
from sgviz.worker.sampler import LOGPROB_FLOOR, clean, likeliest

PIECE_CELLS = 8 << 20  # logits of one piece: 32 MiB in float32, a few times that with what is made of them

Logits = Callable[[Tensor], Tensor]
"""[n, hidden] -> [n, vocab] float32."""


def input_parts(
    asked: Sequence[AskedPositions], hidden: Tensor, logits: Logits, vocab_size: int
) -> list[InputPart]:
    """What each of `asked` wants, from the `hidden` states [T, hidden] of all rows of the forward."""
    rows = max(1, PIECE_CELLS // vocab_size)
    return [_part(wish, hidden[wish.row : wish.row + len(wish.next_ids)], logits, rows) for wish in asked]


def _part(wish: AskedPositions, hidden: Tensor, logits: Logits, rows: int) -> InputPart:
    """[n, hidden] of one member -> its log-probabilities, from the logits of at most `rows` positions at a time."""
    device = hidden.device
    next_ids = torch.tensor(wish.next_ids, dtype=torch.int64, device=device)
    token_ids = torch.tensor(wish.token_ids, dtype=torch.int64, device=device)
    pieces = [
        _piece(logits(hidden[at : at + rows]), next_ids[at : at + rows], wish.tops, token_ids)
        for at in range(0, len(hidden), rows)
    ]
    chosen, tops, top_ids, picked = (torch.cat(column) for column in zip(*pieces))
    return InputPart(
        member=wish.member,
        logprobs=chosen,
        tops=tops,
        top_ids=top_ids,
        wanted=wish.token_ids,
        token_ids=picked,
    )


def _piece(logits: Tensor, next_ids: Tensor, tops: int, token_ids: Tensor) -> tuple[Tensor, ...]:
    """[n] of the tokens that came, [n, tops] values and ids, [n, ids] of those asked for."""
    clean(logits)
    norm = logits.logsumexp(-1, keepdim=True)
    width = min(tops, logits.shape[1])
    wishes = torch.full((len(logits),), width, device=logits.device)
    values, ids = likeliest(logits, wishes, width) if width else (logits[:, :0], next_ids[:, None][:, :0])
    chosen, picked = logits.gather(1, next_ids[:, None]), logits.index_select(1, token_ids)
    told = [(each - norm).clamp_(min=LOGPROB_FLOOR) for each in (chosen, values, picked)]
    return told[0].squeeze(1), told[1], ids, told[2]
