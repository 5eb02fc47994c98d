"""AskedPositions: for which rows of a forward log-probabilities of prompt tokens are wanted.

The logits at a position say what comes after it, so the last position of a chunk gives the first token of the next
one, and the last of the prompt gives none. Mirrors SGLang's extend_logprob_start_lens. Imports: batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgviz.batch.schedule_batch import ScheduleBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedPositions:
    """What one member of a batch wants: of n positions, one after the other.

    Attributes:
        member: its place in the batch. position: the first one in the request. row: the first one in the forward.
        next_ids: [n] the prompt token behind each. tops: alternatives wanted. token_ids: further ids wanted.
    """

    member: int
    position: int
    row: int
    next_ids: list[int]
    tops: int
    token_ids: tuple[int, ...]


def asked_positions(batch: ScheduleBatch) -> list[AskedPositions]:
    """All of a batch that is about to be launched; decoding requests want none."""
    if batch.forward_mode.is_decode:
        return []
    asked, row = [], 0
    for i in range(len(batch) - batch.decode_rows):
        req, prefix = batch.reqs[i], batch.prefix_lens[i]
        if req.misses_input_logprobs:
            first = max(req.logprob_start_len, prefix)
            next_ids = req.origin_input_ids[first + 1 : batch.seq_lens[i] + 1]
            if next_ids:
                asked.append(
                    AskedPositions(
                        member=i,
                        position=first,
                        row=row + first - prefix,
                        next_ids=next_ids,
                        tops=req.top_logprobs_num,
                        token_ids=req.token_ids_logprob,
                    )
                )
        row += batch.extend_lens[i]
    return asked
