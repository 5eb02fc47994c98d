"""The end of a request for a vector: the vector taken, and the message that carries it away.

Mirrors the embedding branches of SGLang's `process_batch_result_prefill` and `stream_output`. (There the request gets
one token that nobody sees; here none.) Imports: batch, messages.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from sgviz.batch.req import Req
from sgviz.messages import BatchEmbeddingOutput, FinishReason


def take_embedding(req: Req, vector: bytes, now: int) -> bool:
    """End `req` with its vector, unless it is being aborted or the vector holds a NaN. Says whether it has it."""
    req.time_stats.prefill_finished = req.time_stats.prefill_finished or now
    if req.to_finish is not None:
        req.finished_reason = req.to_finish
        return False
    if np.isnan(np.frombuffer(vector, dtype="<f4")).any():
        message = (
            "the model's vector holds a NaN: its weights or a number format too narrow for them are at fault"
        )
        req.finished_reason = FinishReason(
            type="abort", message=message, status_code=500, err_type="InternalServerError"
        )
        return False
    req.embedding = vector
    req.finished_reason = FinishReason(type="length", length=0)
    return True


def embedding_output(due: Sequence[Req]) -> BatchEmbeddingOutput:
    """A row each for the ended requests `due`; they are not to be sent again."""
    for req in due:
        req.finished_output = True
    return BatchEmbeddingOutput(
        rids=[req.rid for req in due],
        finished_reasons=[req.finished_reason for req in due],
        output_ids=[[] for _ in due],
        prompt_tokens=[len(req.origin_input_ids) for req in due],
        completion_tokens=[0] * len(due),
        cached_tokens=[req.cached_tokens for req in due],
        retraction_counts=[req.retraction_count for req in due],
        time_stats=[msgspec.structs.replace(req.time_stats) for req in due],
        embeddings=[req.embedding for req in due],
    )
